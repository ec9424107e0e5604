"""response_format and tool_choice, by OpenAI's own client, over a random policy."""

import contextlib
import json
import string

import jax
import numpy as np
import pytest
from hub_mirror import byte_tokenizer
from needs_extra import require

from jrl.episodes import call_grammars
from jrl.episodes.call_grammars import call_rules, json_expression
from jrl.episodes.parsers import PARSERS, Call
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.sampling.grammar import Grammars
from jrl.sampling.request import PartialCompletion, RequestFeatures, RequestLimits
from jrl.serving.http import Service
from jrl.serving.openai_replies import ReplyChoice
from jrl.serving.openai_requests import parse
from jrl.serving.server import HttpServer
from jrl.serving.worker import EngineWorker
from jrl.types import StopReason

require("serve")
require("dev", "openai")
require("tools", "jsonschema")
import jsonschema  # noqa: E402
import openai  # noqa: E402

pytestmark = pytest.mark.extra("serve")

NETWORK = transformer(
    ModelConfig(
        vocab_size=101,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=900,
    )
)


class Talker(CharTokenizer):
    """A template that writes tools, contents and calls; one message opens a thought."""

    def __init__(self):
        super().__init__(string.printable.replace("\x0b", ""))

    def chat(self, messages, *, tools=None, **variables):
        tool_names = "".join(tool["function"]["name"] + "\n" for tool in tools or ())
        body = "".join(m.get("reasoning_content", "") + m["content"] + "\n" for m in messages)
        return tool_names + body + ("<think>\n" if "think" in body else "")


@pytest.fixture(scope="module")
def server():
    talker, mesh = Talker(), make_mesh()
    params = jax.jit(NETWORK.init)(jax.random.key(0))
    grammars = Grammars(talker, NETWORK.vocab_size)
    engine = Engine(
        NETWORK,
        params,
        slots=3,
        prompt_tokens=60,
        max_new_tokens=800,
        stop_tokens=talker.stop_ids,
        tokenizer=talker,
        chunk=8,
        requests=RequestFeatures(reports=True, grammars=grammars),
    )
    worker = EngineWorker(engine, tokenizer=talker, mesh=mesh)
    service = Service(
        worker,
        talker,
        worker.limits,
        model="m",
        queue=9,
        parser=PARSERS["hermes"],
        grammars=grammars,
    )
    running = HttpServer(service, "127.0.0.1", 0, 5.0)
    yield running
    running.stop()
    assert running.wait(20)
    worker.close(20)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        yield client


ASK = {"model": "m", "messages": [{"role": "user", "content": "go"}], "seed": 5}
SHORT = {"type": "string", "maxLength": 6}
NESTED = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "color": {"enum": ["red", 'a "quoted" one', "back\\slash", None]},
        "points": {
            "type": "array",
            "items": {"$ref": "#/$defs/point"},
            "minItems": 1,
            "maxItems": 3,
        },
        "other": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "color", "points", "other"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "s": SHORT},
            "required": ["x", "s"],
            "additionalProperties": False,
        }
    },
}


def shaped(schema, **more):
    kind = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    return ASK | {"response_format": kind} | more


def test_replies_follow_a_nested_schema(client):
    reply = client.chat.completions.create(**shaped(NESTED, n=3))
    texts = [choice.message.content for choice in reply.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), NESTED)
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 3
    assert len(set(texts)) > 1
    assert client.chat.completions.create(**shaped(NESTED)).choices[0].message.content == texts[0]


def test_a_stream_is_the_same_text_in_pieces(client):
    content = client.chat.completions.create(**shaped(NESTED)).choices[0].message.content
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.chat.completions.create(**shaped(NESTED, **options)))
    *parts, last = pieces
    assert "".join(p.choices[0].delta.content or "" for p in parts) == content
    assert len(parts) > 10
    assert all(p.usage is None for p in parts)
    assert (last.choices, last.usage.completion_tokens) == ([], len(content) + 1)


def test_a_reply_at_its_limit_says_so(client):
    (choice,) = client.chat.completions.create(**shaped(NESTED, max_tokens=9)).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == '{"name": '[: len(choice.message.content)]


def test_any_json_object(client):
    ask = {"response_format": {"type": "json_object"}, "max_tokens": 700, "temperature": 0.3}
    for seed in range(3):
        (choice,) = client.chat.completions.create(**ASK | ask | {"seed": seed}).choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")


def test_free_replies_beside_bound_ones_are_as_they_were(client):
    free = ASK | {"max_tokens": 40}
    alone = client.chat.completions.create(**free).choices[0].message.content
    stream = client.chat.completions.create(**shaped(NESTED, stream=True))
    next(iter(stream))
    assert client.chat.completions.create(**free).choices[0].message.content == alone
    assert list(stream)


WEATHER = {
    "type": "object",
    "properties": {"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("weather", WEATHER), ("clock", CLOCK))
]


def calls_of(choice):
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]


def test_required_tools_are_called(client):
    ask = ASK | {"tools": TOOLS, "tool_choice": "required", "n": 3}
    schemas = {"weather": WEATHER, "clock": CLOCK}
    one = client.chat.completions.create(**ask, parallel_tool_calls=False).choices
    assert [len(calls_of(choice)) for choice in one] == [1, 1, 1]
    several = client.chat.completions.create(**ask, temperature=9.0).choices
    for choice in (*one, *several):
        if choice.finish_reason == "length":  # a random policy goes on and on
            continue
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        for name, arguments in calls_of(choice):
            jsonschema.validate(arguments, schemas[name])


def test_of_allowed_tools_one_must_be_called(client):
    clock = {"type": "function", "function": {"name": "clock"}}
    tools = {"mode": "required", "tools": [clock]}
    ask = ASK | {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": tools}}
    choices = client.chat.completions.create(**ask, n=3, parallel_tool_calls=False).choices
    assert [name for choice in choices for name, _ in calls_of(choice)] == ["clock"] * 3


def test_a_named_tool_is_called_once_and_streams(client):
    only = {"type": "function", "function": {"name": "weather"}}
    ask = ASK | {"tools": TOOLS, "tool_choice": only}
    (choice,) = client.chat.completions.create(**ask).choices
    ((name, arguments),) = calls_of(choice)
    jsonschema.validate(arguments, WEATHER)
    *_, last = client.chat.completions.create(**ask, stream=True)
    (call,) = last.choices[0].delta.tool_calls
    assert (name, call.function.name) == ("weather", "weather")
    assert json.loads(call.function.arguments) == arguments


def test_calls_or_an_answer_in_its_schema_where_the_model_may_choose(client):
    ask = shaped({"type": "object", "properties": {}, "additionalProperties": False}, tools=TOOLS)
    ask |= {"temperature": 9.0, "parallel_tool_calls": False}
    kinds = set()
    for seed in range(8):
        (choice,) = client.chat.completions.create(**ask | {"seed": seed}).choices
        kinds.add(choice.finish_reason)
        assert choice.message.tool_calls or choice.message.content == "{}"
    assert kinds == {"tool_calls", "stop"}


def test_a_thought_that_the_template_opened_is_apart():
    """Clients read the content as JSON, so the thought before it is a field of its own."""
    talker = Talker()
    limits = RequestLimits(4, 60, 90, talker.vocab_size, 200, 1, True, True, grammars=True)
    ask = shaped({"enum": ["x"]}) | {"messages": [{"role": "user", "content": "think"}]}
    parsed = parse(
        ask,
        chat=True,
        tokenizer=talker,
        limits=limits,
        model="m",
        grammars=Grammars(talker, talker.vocab_size),
    )
    assert "thought" in parsed.requests[0].grammar
    reply, pieces = ReplyChoice(parsed, 0, talker), []
    completion = PartialCompletion(0, 0, parsed.requests[0], talker)
    for token in [*talker.encode('so < x\n</think>\n"x"'), 1]:
        stop = StopReason.STOP_TOKEN if token == 1 else StopReason.RUNNING
        pieces.append(reply.add(completion.extend([token], [0.0], 0, stop)))
    message = reply.finished()["message"]
    assert (message["content"], message["reasoning_content"]) == ('"x"', "so < x")
    deltas = [piece["delta"] for piece in pieces if piece]
    assert "".join(d.get("content", "") for d in deltas) == '"x"'
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "so < x"


BAD = [
    (shaped({"type": "integer", "minimum": 3, "maximum": 2}), "minimum (3) is greater"),
    (
        shaped({"type": "array", "uniqueItems": True}),
        'decoding cannot follow the schema\'s "uniqueItems"; remove it',
    ),
    (shaped({"type": "string", "format": "phone"}), "the schema's format = 'phone'; remove it"),
    (shaped({"$ref": "#"}), "refers to nothing but itself; give it a type"),
    (
        shaped({"type": "integer", "minimum": -(2**63)}),
        "(min=Some(-9223372036854775808), max=None)",
    ),
    (shaped({"type": "string", "pattern": "[a"}), "unclosed character class"),
    (shaped({"$ref": "#/$defs/none"}), "'/$defs/none' does not exist"),
    (shaped([]), "json_schema.schema must be an object"),
    (ASK | {"response_format": {"type": "xml"}}, "response_format.type = 'xml'; this server takes"),
    (ASK | {"response_format": "json"}, 'must be an object with a "type"'),
    (
        ASK
        | {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
        },
        'tool_choice: decoding cannot follow the schema\'s "not"; remove it',
    ),
]


def test_a_format_that_any_text_has_is_no_reason_to_refuse():
    """pydantic writes them for Path, bytes and SecretStr."""
    talker = Talker()
    grammars = Grammars(talker, talker.vocab_size)
    names = ("path", "file-path", "directory-path", "binary", "password")
    fields = {name: {"type": "string", "format": name} for name in names}
    fields["default"] = {"type": "string", "format": "path"}  # a field that is called as a keyword
    schema = {"type": "object", "properties": fields | {"format": {"const": {"format": "path"}}}}
    grammars.check(f"start: {json_expression(schema)}\n")
    assert '"const": {"format": "path"}' in json_expression(schema)


def test_a_coder_writes_texts_without_quotes_whatever_else_an_argument_may_be():
    """Strict schemas have null in the types of optional arguments."""
    text = call_grammars._coder_value({"type": "string"})
    optional = {"type": ["string", "null"], "enum": ["c", "f", None]}
    assert call_grammars._coder_value(optional) == '("c" | "f" | "null")'
    assert (
        call_grammars._coder_value({"type": ["string", "integer"], "enum": ["a", 1]})
        == '("a" | "1")'
    )
    dates = {"type": "string", "anyOf": [{"format": "date"}, {"format": "date-time"}]}
    assert call_grammars._coder_value(dates) == f"({text} | {text})"
    assert text in call_grammars._coder_value(
        {"type": "string", "anyOf": [True, {"type": "string"}]}
    )
    with pytest.raises(UserError, match="texts without '<'"):
        call_grammars._coder_value({"type": "string", "enum": ["a<b"]})


@pytest.mark.parametrize(("ask", "message"), BAD)
def test_what_cannot_be_enforced_is_said_in_one_line(client, ask, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ask)
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_a_schema_nested_without_end_is_refused(client):
    schema = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(openai.BadRequestError, match="recursion limit"):
        client.chat.completions.create(**shaped(schema))


def test_thoughts_of_earlier_replies_reach_the_template(client, server):
    prompts = []
    submit = server.service.sampler.submit
    server.service.sampler.submit = lambda request, on_update: (
        prompts.append(Talker().decode(request.tokens)) or submit(request, on_update)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, server.service.sampler, "submit", submit)
        history = [
            *ASK["messages"],
            {"role": "assistant", "content": "4", "reasoning_content": "2+2 ", "annotations": []},
        ]
        client.chat.completions.create(**ASK | {"messages": history, "max_tokens": 1})
        history[1]["reasoning_content"] = ["2+2"]
        with pytest.raises(openai.BadRequestError, match=r"reasoning_content must be a text"):
            client.chat.completions.create(**ASK | {"messages": history})
    assert prompts == ["go\n2+2 4\n"]


@pytest.mark.parametrize("family", PARSERS)
def test_the_grammar_of_every_family_is_read_by_its_parser(family):
    """Any sampled text of the grammar is calls whose arguments fit the schema."""
    alphabet = string.printable.replace("\x0b", "") + "\uff5c\u2581"
    talker = CharTokenizer(alphabet)
    grammars, parser = Grammars(talker, talker.vocab_size), PARSERS[family]
    schemas = {
        "weather": WEATHER,
        "mix": {
            "type": "object",
            "properties": {
                "flag": {"type": "boolean"},
                "note": SHORT,
                "list": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
                "kind": {"type": "string", "enum": ["up", "down"]},
                "side": {"anyOf": [{"type": "string", "enum": ["left"]}, {"type": "null"}]},
            },
            "required": ["flag", "kind", "side"],
            "additionalProperties": False,
        },
    }
    if family == "qwen3_coder":  # its strings are free text, which no length bounds
        schemas["weather"] = {"type": "object", "properties": {"city": {"type": "string"}}}
        del schemas["mix"]["properties"]["note"]
    grammar = "start: calls\n" + call_rules(parser, schemas, grammars.literal, 3)
    rng, count = np.random.default_rng(0), 0
    for _ in range(30):
        constraint, ids = grammars.start(grammar), []
        for _ in range(500):
            bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            likely = [i for i in allowed if talker.decode([i]) in '"}]),<\n/']
            token = int(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
            if token == 1:
                break
            ids.append(token)
            constraint.push([token])
        else:
            continue
        count += 1
        calls = parser.parse(talker.decode(ids), schemas)
        assert calls, talker.decode(ids)
        for call in calls:
            assert isinstance(call, Call), (call, talker.decode(ids))
            jsonschema.validate(call.arguments, schemas[call.name])
    assert count > 10


def harmony_tokenizer(place):
    """Bytes and the marks of gpt-oss; as there, a call ends with a token that ends the turn."""
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"]
    backend = byte_tokenizer()
    backend.add_special_tokens(marks)
    backend.save(str(place / "tokenizer.json"))
    template = "{{ messages }}{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    about = {"eos_token": "<|return|>", "chat_template": template}
    (place / "tokenizer_config.json").write_text(json.dumps(about))
    ends = [backend.token_to_id(mark) for mark in marks[-2:]]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(place)


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_forced_call_of_gpt_oss_ends_with_its_own_stop_token(name, tmp_path):
    """Only "<|call|>" may end it: behind the other stop token no call could be read."""
    tokenizer = harmony_tokenizer(tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    limits = RequestLimits(4, 400, 90, tokenizer.vocab_size, 800, 8, True, True, grammars=True)
    choice = {"type": "function", "function": {"name": name}}
    ask = ASK | {"tools": TOOLS, "tool_choice": choice if name == "weather" else "required"}
    ask["messages"] = [{"role": "user", "content": "weather, clock"}]
    options = {"tokenizer": tokenizer, "limits": limits, "model": "m", "grammars": grammars}
    parsed = parse(ask, chat=True, parser=PARSERS["gpt_oss"], **options)
    constraint = grammars.start(parsed.requests[0].grammar)
    schemas = {"weather": WEATHER, "clock": CLOCK}
    rng, ids = np.random.default_rng(0), []
    while not set(ids) & set(tokenizer.stop_ids):
        allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        likely = [i for i in allowed if tokenizer.decode([int(i)]) in '"}']
        ids.append(int(rng.choice(likely or allowed)))
        constraint.push(ids[-1:])
    text = tokenizer.decode(ids, skip_special=False)
    assert text.startswith("<|channel|>commentary to=functions.")
    assert text.endswith("}<|call|>")
    (call,) = PARSERS["gpt_oss"].parse(text, schemas)
    jsonschema.validate(call.arguments, schemas[call.name])
    assert name == "clock" or call.name == name
    with pytest.raises(UserError, match="is a stop token of the model"):
        grammars.literal("a<|call|>b", last=True)
    with pytest.raises(UserError, match="is a stop token of the model"):
        grammars.literal("a<|call|>")
