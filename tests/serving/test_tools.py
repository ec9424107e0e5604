"""Tools in chat completions and responses, by OpenAI's client, over a scripted engine."""

import contextlib
import dataclasses
import json
import string
import threading

import pytest
from chat_templates import chat_tokenizer  # noqa: F401
from needs_extra import require

from jrl.episodes.parsers import PARSERS, Call
from jrl.episodes.recorded import read_recorded
from jrl.errors import UserError
from jrl.models.tokenizer import CharTokenizer
from jrl.sampling.request import PartialCompletion, RequestLimits
from jrl.serving.api_error import ApiError
from jrl.serving.http import Service
from jrl.serving.openai_requests import parse
from jrl.serving.openai_responses import chat_body
from jrl.serving.openai_tools import Tools, calls_of, takes_one_call, tool_parser
from jrl.serving.record import Recorder
from jrl.serving.server import HttpServer
from jrl.types import StopReason

require("serve")
require("dev", "openai")
import openai  # noqa: E402

pytestmark = pytest.mark.extra("serve")

LIMITS = RequestLimits(
    slots=4,
    prompt_tokens=2000,
    max_new_tokens=300,
    vocab_size=110,
    max_length=2400,
    stop_tokens=1,
    biases=True,
)
WIDE = dataclasses.replace(LIMITS, vocab_size=1000)
HERMES = PARSERS["hermes"]


class Talker(CharTokenizer):
    """A template in the manner of Hermes, which ends every message with the stop token, "\\x0b"."""

    def __init__(self):
        super().__init__(string.printable.replace("\x0b", ""))

    def encode(self, text, *, add_special=False):
        return [1 if c == "\x0b" else super(Talker, self).encode(c)[0] for c in text]

    def chat(self, messages, *, tools=None, **variables):
        schemas = "".join(json.dumps(tool) + "\n" for tool in tools or ())
        return schemas + "".join(self._message(m) for m in messages)

    def _message(self, message):
        calls = [
            HERMES.render(Call(c["function"]["name"], c["function"]["arguments"]))
            for c in message.get("tool_calls", ())
        ]
        content = message["content"] + ("\n" if calls and message["content"] else "")
        end = "\x0b" if message["role"] == "assistant" else "\n"
        return content + "\n".join(calls) + end


class Silent(Talker):
    """A template that has no place for tools."""

    def chat(self, messages, *, tools=None, **variables):
        return super().chat(messages)


class Scripted:
    """Draws these texts, one a request, each ended by a stop token or the request's limit."""

    failure = None

    def __init__(self, texts):
        self.texts, self.prompts, self.threads = list(texts), [], []

    def submit(self, request, on_update):
        self.prompts.append(Talker().decode(request.tokens))
        thread = threading.Thread(target=self._draw, args=(self.texts.pop(0), request, on_update))
        thread.start()
        self.threads.append(thread)

    def _draw(self, text, request, on_update):
        partial = PartialCompletion(0, 0, request, Talker())
        tokens = [*Talker().encode(text), 1][: request.max_new_tokens]
        for i, token in enumerate(tokens, 1):
            stop = StopReason.LENGTH if i == request.max_new_tokens else StopReason.RUNNING
            stop = StopReason.STOP_TOKEN if token == 1 else stop
            on_update(0, partial.extend([token], [-0.5], 0, stop, ()))

    def abort(self, handle):
        pass

    def close(self, seconds):
        pass


@contextlib.contextmanager
def serving(*texts, tokenizer=None, parser=HERMES, recorder=None):
    """A client, and the engine behind its server."""
    engine, options = Scripted(texts), {"model": "m", "queue": 4, "recorder": recorder}
    service = Service(engine, tokenizer or Talker(), LIMITS, parser=parser, **options)
    running = HttpServer(service, "127.0.0.1", 0, 1.0)
    try:
        url = running.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, engine
    finally:
        running.stop()
        assert running.wait(10)
        for thread in engine.threads:
            thread.join()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DOUBLE = {"type": "function", "function": {"name": "double", "parameters": SCHEMA}}
CALLS = HERMES.render(Call("double", {"a": 4})) + "\n" + HERMES.render(Call("double", {"a": 5}))
ASK = [{"role": "user", "content": "Double 4 and 5."}]
REQUEST = {"model": "m", "tools": [DOUBLE], "messages": ASK}


def names_and_arguments(message):
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]


def test_calls_come_back_as_calls_and_their_results_are_told():
    with serving("I do.\n" + CALLS, "8 and 10") as (client, engine):
        first = client.chat.completions.create(**REQUEST)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I do.")
        assert names_and_arguments(choice.message) == [("double", {"a": 4}), ("double", {"a": 5})]
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert all(len(each) == 9 and each.isalnum() for each in ids)
        results = [
            {"role": "tool", "tool_call_id": each, "content": text}
            for each, text in zip(ids, ("8", "10"), strict=True)
        ]
        messages = [*ASK, choice.message.model_dump(exclude_none=True), *results]
        second = client.chat.completions.create(**REQUEST | {"messages": messages})
        assert second.choices[0].message.content == "8 and 10"
        assert (second.choices[0].finish_reason, second.choices[0].message.tool_calls) == (
            "stop",
            None,
        )
        opening, continued = engine.prompts
    assert json.dumps(SCHEMA)[1:-1] in opening
    # What was drawn stands in the next prompt as it was drawn.
    assert continued == opening + "I do.\n" + CALLS + "8\n10\n"


def test_a_stream_gives_the_calls_at_its_end():
    with serving("Now.\n" + CALLS, "plain") as (client, _):
        pieces = list(client.chat.completions.create(stream=True, **REQUEST))
        text = "".join(p.choices[0].delta.content or "" for p in pieces)
        calls = [c for p in pieces for c in p.choices[0].delta.tool_calls or ()]
        assert text == "Now."
        assert [(c.index, c.function.name) for c in calls] == [(0, "double"), (1, "double")]
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        pieces = list(client.chat.completions.create(stream=True, **REQUEST))
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == "plain"
        assert pieces[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "more"),
    [("<tool_call>\n{not json\n</tool_call>", {}), (CALLS, {"tool_choice": "none"})],
)
def test_what_is_no_call_is_text(text, more):
    with serving(text) as (client, _):
        (choice,) = client.chat.completions.create(**REQUEST | more).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == text


def test_a_session_of_calls_is_trained_on_id_for_id(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.begin({"model": "m", "version": 0})
    with contextlib.closing(recorder), serving(CALLS, "18", recorder=recorder) as (client, _):
        session = {"extra_headers": {"X-Session-Id": "task"}}
        message = client.chat.completions.create(**REQUEST, **session).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "9"} for call in message.tool_calls
        ]
        messages = [*ASK, message.model_dump(exclude_none=True), *results]
        client.chat.completions.create(**REQUEST | {"messages": messages}, **session)
    recorded = read_recorded(tmp_path)
    ((row,),) = recorded.groups
    assert (recorded.counts.rerendered, recorded.counts.rows) == (0, 1)
    assert [s.drawn for s in row.segments] == [True, False, True]
    texts = [Talker().decode(s.tokens) for s in row.segments]
    assert texts == [CALLS, "9\n9\n", "18"]


HALVE = {"type": "function", "function": {"name": "halve", "parameters": SCHEMA}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_of_allowed_tools_alone_the_model_is_told():
    """A call of another one never reaches the client, who would run it."""
    other = HERMES.render(Call("halve", {"a": 4}))
    body = REQUEST | {"tools": [DOUBLE, HALVE], "tool_choice": allowed("auto", DOUBLE)}
    with serving(CALLS, other, other) as (client, engine):
        (choice,) = client.chat.completions.create(**body).choices
        assert [name for name, _ in names_and_arguments(choice.message)] == ["double", "double"]
        (choice,) = client.chat.completions.create(**body).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", other)
        both = body | {"tool_choice": allowed("auto", HALVE, DOUBLE)}
        (choice,) = client.chat.completions.create(**both).choices
        assert names_and_arguments(choice.message) == [("halve", {"a": 4})]
    assert ["halve" in prompt for prompt in engine.prompts] == [False, False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_the_client_takes_no_second(stream):
    with serving(CALLS) as (client, _):
        options = {"parallel_tool_calls": False, "stream": stream}
        reply = client.chat.completions.create(**REQUEST, **options)
        message = list(reply)[-1].choices[0].delta if stream else reply.choices[0].message
    assert names_and_arguments(message) == [("double", {"a": 4})]


EFFORT = (
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- 'Reasoning: ' + reasoning_effort }}{{- messages[0].content }}"
)


def test_effort_is_a_variable_of_templates_that_read_it(chat_tokenizer):  # noqa: F811
    """As in vLLM and SGLang; others are as without it."""

    def prompt_of(template, **more):
        tokenizer = chat_tokenizer(template)
        ask = {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}
        parsed = parse(ask, chat=True, tokenizer=tokenizer, limits=WIDE, model="m")
        return tokenizer.decode(parsed.requests[0].tokens, skip_special=False)

    assert prompt_of(EFFORT) == "Reasoning: mediumx"
    assert prompt_of(EFFORT, reasoning_effort="high") == "Reasoning: highx"
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert prompt_of(EFFORT, **both) == "Reasoning: lowx"
    assert prompt_of("qwen", reasoning_effort="high") == prompt_of("qwen")
    with pytest.raises(ApiError, match="reasoning_effort = 'hihg'; choose from none, minimal, low"):
        prompt_of(EFFORT, reasoning_effort="hihg")
    with pytest.raises(ApiError, match="must be a string"):
        prompt_of(EFFORT, reasoning_effort=3)
    with pytest.raises(ApiError, match=r"chat_template_kwargs\.reasoning_effort differ; give one"):
        prompt_of(EFFORT, **both | {"reasoning_effort": "high"})


def test_a_developer_is_the_system_where_the_template_knows_none(chat_tokenizer):  # noqa: F811
    template = "{% for m in messages %}{{ m.role + ':' + m.content + ' ' }}{% endfor %}"
    with_developer = template + "{# developer #}"
    for source, role in ((template, "system"), (with_developer, "developer")):
        tokenizer = chat_tokenizer(source)
        ask = {"model": "m", "messages": [{"role": "developer", "content": "be brief"}, *ASK]}
        parsed = parse(ask, chat=True, tokenizer=tokenizer, limits=WIDE, model="m")
        text = tokenizer.decode(parsed.requests[0].tokens, skip_special=False)
        assert text == f"{role}:be brief user:{ASK[0]['content']} "


def test_what_clients_send_back_is_taken(chat_tokenizer):  # noqa: F811
    """Fields of LiteLLM and of lm-evaluation-harness, and an empty list of calls."""
    tokenizer = chat_tokenizer("qwen")

    def prompt_of(message, **more):
        ask = {"model": "m", "messages": [*ASK, {"role": "assistant"} | message, *ASK], **more}
        return parse(ask, chat=True, tokenizer=tokenizer, limits=WIDE, model="m").requests[0].tokens

    plain = prompt_of({"content": "Hi"})
    sent_back = [{"provider_specific_fields": {"refusal": None}}, {"type": "text"}, {"audio": None}]
    for more in (*sent_back, {"tool_calls": []}, {"annotations": []}):
        assert prompt_of({"content": "Hi"} | more) == plain
    assert prompt_of({"content": None, "tool_calls": []}) == prompt_of({"content": ""})
    stops = [tokenizer.decode([i], skip_special=False) for i in tokenizer.stop_ids]
    assert prompt_of({"content": "Hi"}, stop=["Question:", *stops]) == plain
    with pytest.raises(ApiError, match="function_call is not supported"):
        prompt_of({"content": "Hi", "function_call": {"name": "f", "arguments": "{}"}})


def test_a_template_for_one_call_a_turn_gets_one(chat_tokenizer):  # noqa: F811
    """Else the reply, which clients send back, would end the conversation."""
    one = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single tool-calls') }}{% endif %}"
        "[{{ m.tool_calls[0].function.name }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{{ tools }}"
    )
    assert takes_one_call(chat_tokenizer(one))
    assert not takes_one_call(chat_tokenizer("qwen"))


def test_ids_of_calls_are_those_that_templates_take_and_differ():
    calls = [{"name": "double", "arguments": {"a": 1}, "id": i} for i in ("1", *["abcdefgh1"] * 2)]
    tools = Tools((DOUBLE,), PARSERS["mistral"], False, None)
    _, written = calls_of(f"[TOOL_CALLS]{json.dumps(calls)}", tools)
    ids = [call["id"] for call in written]
    assert ids[1] == "abcdefgh1"
    assert len({*ids}) == 3
    assert all(len(i) == 9 for i in ids)


BAD = [
    ({"tools": {}}, "tools must be an array"),
    ({"tools": [{"type": "web_search"}]}, 'tools[0] must be an object with "type": "function"'),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name must be a text"),
    ({"tools": [DOUBLE, DOUBLE]}, "two functions have the same name"),
    ({"tool_choice": "any"}, "tool_choice = 'any'; this server takes 'auto', 'none', 'required'"),
    ({"tool_choice": "required", "tools": []}, "tool_choice = 'required' needs tools"),
    ({"tool_choice": "required"}, "needs constrained decoding"),  # these servers have none
    ({"tool_choice": {"type": "function", "function": {"name": "half"}}}, "tools has 'double'"),
    ({"tool_choice": allowed("auto", HALVE)}, "names the function 'halve'; tools has 'double'"),
    ({"tool_choice": allowed("auto", DOUBLE), "tools": []}, "needs tools"),
    ({"tool_choice": allowed("any", DOUBLE)}, '"allowed_tools": {"mode": "auto" or "required"'),
    ({"tool_choice": allowed("auto")}, "this server takes 'auto', 'none', 'required'"),
    ({"tool_choice": allowed("required", DOUBLE)}, "needs constrained decoding"),
    ({"response_format": {"type": "json_object"}}, "needs constrained decoding"),
    (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [{}]}]},
        "messages[1].tool_calls[0] must have a function with a name",
    ),
    (
        {
            "messages": [
                *ASK,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                },
            ]
        },
        "tool_calls[0].function.arguments must be JSON of an object",
    ),
    ({"messages": [*ASK, {"role": "user", "tool_calls": []}]}, "of the assistant"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "object", "properties": [1]}},
                }
            ]
        },
        "tools[0].function.parameters.properties must be an object",
    ),
    ({"extra_body": {"repetition_penalty": 1.5}}, "repetition_penalty = 1.5 is not supported"),
    ({"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "[0].reasoning must be"),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_bad_requests_are_named(more, message):
    with serving() as (client, _), pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**REQUEST | more)
    assert message in error.value.message


def test_what_the_server_cannot_tell_or_read_is_named():
    with serving(parser=None) as (client, _), pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**REQUEST)
    assert "start the server with --tool-parser, one of hermes," in error.value.message
    with (
        serving(tokenizer=Silent()) as (client, _),
        pytest.raises(openai.BadRequestError) as error,
    ):
        client.chat.completions.create(**REQUEST)
    assert "chat template does not write the tool 'double'" in error.value.message
    with pytest.raises(UserError, match="parser = 'none'"):
        tool_parser("none", Talker())
    assert tool_parser("llama3", Talker()) is PARSERS["llama3"]
    assert tool_parser(None, Talker()) is None


@pytest.mark.parametrize("family", PARSERS)
def test_calls_of_every_family_are_read(family):
    parser = PARSERS[family]
    tools = Tools((DOUBLE,), parser)
    before, calls = calls_of(parser.render(Call("double", {"a": 4})), tools)
    assert before is None
    ((name, arguments),) = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    assert (name, json.loads(arguments)) == ("double", {"a": 4})
    assert calls_of("nothing to call", tools) == (None, [])


HARMONY = PARSERS["gpt_oss"]
THOUGHT = "<|channel|>analysis<|message|>Twice 4.<|end|><|start|>assistant"
FINAL = THOUGHT + "<|channel|>final<|message|>It is 8, so <b>8</b>."


@pytest.mark.parametrize("stream", [False, True])
def test_what_gpt_oss_thinks_is_no_content(stream):
    """An analysis before a call, before an answer, and one that a stop string cuts."""
    preamble = "<|channel|>commentary<|message|>I double.<|end|><|start|>assistant"
    call = THOUGHT + preamble + HARMONY.render(Call("double", {"a": 4}))
    with serving(call, FINAL, FINAL, THOUGHT, parser=HARMONY) as (client, _):

        def ask(**more):
            body = {"model": "m", "messages": ASK, "stream": stream, **more}
            reply = client.chat.completions.create(**body)
            if not stream:
                ((choice,), message) = reply.choices, reply.choices[0].message
                return choice.finish_reason, message.content, message.reasoning_content, message
            *_, last = (piece.choices[0] for piece in reply)
            delta = last.delta
            return last.finish_reason, delta.content, delta.reasoning_content, delta

        finish, content, thought, message = ask(tools=[DOUBLE])
        assert (finish, content, thought) == ("tool_calls", "I double.", "Twice 4.")
        assert names_and_arguments(message) == [("double", {"a": 4})]
        assert ask(tools=[DOUBLE])[:3] == ("stop", "It is 8, so <b>8</b>.", "Twice 4.")
        assert ask(stop=["so"])[:3] == ("stop", "It is 8, ", "Twice 4.")
        finish, content, thought, _ = ask()
        assert (finish, content or "", thought) == ("stop", "", "Twice 4.")


def test_words_before_calls_are_the_content_however_calls_begin():
    """A call of Qwen3-Coder's without the opening tag, and marks of lists with spaces behind."""
    body = "<function=double>\n<parameter=a>\n4\n</parameter>\n</function>\n</tool_call>"
    bar, low = "\uff5c", "\u2581"
    begins = f"<{bar}tool{low}calls{low}begin{bar}>\n"
    one = PARSERS["deepseek"].render(Call("double", {"a": 4})).partition(">")[2]
    for family, text in (("qwen3_coder", body), ("deepseek", begins + one)):
        before, calls = calls_of("I do.\n\n" + text, Tools((DOUBLE,), PARSERS[family]))
        assert (before, len(calls)) == ("I do.", 1)


# ---------------------------------------------------------------- POST /v1/responses

FLAT = {"type": "function", "name": "double", "parameters": SCHEMA, "strict": True}


def test_a_response_is_the_chat_completion_in_items():
    with serving("Eight.", "Eight.") as (client, engine):
        said = client.responses.create(
            model="m", instructions="Be short.", input="Double 4.", store=False, temperature=0.5
        )
        chat = client.chat.completions.create(
            model="m",
            messages=[
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Double 4."},
            ],
        )
    assert engine.prompts[0] == engine.prompts[1]
    assert said.output_text == chat.choices[0].message.content == "Eight."
    assert (said.status, said.temperature, said.instructions) == ("completed", 0.5, "Be short.")
    usage = chat.usage
    assert said.usage.input_tokens == usage.prompt_tokens
    assert said.usage.output_tokens == usage.completion_tokens == 7  # with the stop token
    assert said.usage.total_tokens == usage.total_tokens


def test_a_reply_cut_by_its_limit_is_incomplete():
    with serving("Eight.") as (client, _):
        said = client.responses.create(model="m", input="Double 4.", max_output_tokens=3)
    assert (said.status, said.output_text) == ("incomplete", "Eig")
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.output[0].status == "incomplete"


def test_calls_and_their_outputs_are_items():
    with serving(f"I call it.{CALLS}", "8 and 10.") as (client, engine):
        first = client.responses.create(model="m", input="Double 4 and 5.", tools=[FLAT])
        words, *calls = first.output
        assert words.content[0].text == "I call it."
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            ("double", {"a": 4}),
            ("double", {"a": 5}),
        ]
        outputs = [
            {"type": "function_call_output", "call_id": c.call_id, "output": str(2 * n)}
            for c, n in zip(calls, (4, 5), strict=True)
        ]
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Double 4 and 5."}]}]
        history = [*asked, *(item.model_dump() for item in first.output), *outputs]
        second = client.responses.create(model="m", input=history, tools=[FLAT])
    assert second.output_text == "8 and 10."
    # One message of the assistant, with its words and calls as they were drawn, and two results.
    offered = engine.prompts[0].removesuffix("Double 4 and 5.\n")
    results = "".join(HERMES.result(x) + "\n" for x in ("8", "10"))
    assert engine.prompts[1] == f"{offered}Double 4 and 5.\nI call it.\n{CALLS}{results}"


@pytest.mark.parametrize("text", ["Eight and ten.", f"I call it.{CALLS}", CALLS])
def test_a_stream_of_a_response_ends_with_the_whole(text):
    request = {"model": "m", "input": "Double 4 and 5.", "tools": [FLAT] if "<" in text else []}
    with serving(text, text) as (client, _):
        whole = client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    shown = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert shown == final.output_text == whole.output_text
    calls = [
        [(c.name, c.arguments) for c in r.output if c.type == "function_call"]
        for r in (final, whole)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) == (2 if "<" in text else 0)
    if text == "Eight and ten.":  # as it is drawn
        assert sum(e.type == "response.output_text.delta" for e in events) > 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id = 'resp_1' is not supported"),
        ({"extra_body": {"temprature": 1}}, "unknown parameter 'temprature'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] must be an object with"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] must be of type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
        ({"input": []}, "input must be a text or an array"),
        ({"max_output_tokens": 0}, "max_output_tokens = 0; must be 1 to"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort = 'huge'; choose from"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"top_logprobs": 3}, "top_logprobs = 3 is not supported"),
    ],
)
def test_what_responses_have_no_answer_for_is_named(change, message):
    with serving() as (client, _), pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "m", "input": "a", **change})
    assert message in refused.value.body["message"]


def test_a_named_function_and_a_thought_are_translated():
    body = chat_body(
        {
            "model": "m",
            "input": [
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
                {"role": "user", "content": "a"},
            ],
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": "double"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        }
    )
    assert body["messages"] == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        {"role": "user", "content": "a"},
    ]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "double"}}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert body["response_format"] == shape


def test_numbers_that_json_has_not_are_refused_before_anything_is_sampled():
    """The reply repeats the request; a client of another library may send them."""
    for number in (float("nan"), float("inf")):
        with pytest.raises(ApiError, match="NaN or an infinite number"):
            chat_body({"model": "m", "input": "a", "metadata": {"x": number}})


def test_a_session_of_responses_is_trained_on_id_for_id(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.begin({"model": "m", "version": 0})
    request = {"model": "m", "tools": [FLAT], "metadata": {"session_id": "task"}}
    asked = [{"role": "user", "content": "Double 4 and 5."}]
    with contextlib.closing(recorder), serving(CALLS, "18", recorder=recorder) as (client, _):
        first = client.responses.create(**request, input=asked)
        assert first.session_id == "task"
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "9"}
            for item in first.output
        ]
        history = [*asked, *(item.model_dump() for item in first.output), *results]
        client.responses.create(**request, input=history)
    ((row,),) = read_recorded(tmp_path).groups
    assert [Talker().decode(s.tokens) for s in row.segments] == [CALLS, "9\n9\n", "18"]
