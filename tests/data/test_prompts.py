"""Prompts: templates, answers, and the length limit, whose victims are always counted."""

import json

import numpy as np
import pytest

from jrl.data.messages import Wording
from jrl.data.prompts import build_prompts, pad_prompts
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer


class Rows(list):
    def where(self, index):
        return f"rows.jsonl, line {index + 1}"


class Chatty(type(char_tokenizer())):
    """The character tokenizer with a chat template and a token before plain texts."""

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        turns = "".join(f"{m['role']}:{m['content']};" for m in messages)
        return turns + ("assistant:" if add_generation_prompt else "")

    def encode(self, text, *, add_special=False):
        return ([self.eos_id] if add_special else []) + super().encode(text)


ROWS = Rows(
    [
        {"question": "2+2?", "answer": "so\n#### 4", "level": 1},
        {"question": "a much longer one?", "answer": "#### 1\n#### 1,234,567 ", "level": 2},
    ]
)


def build(rows=ROWS, tokenizer=None, **options):
    options = {"max_prompt_tokens": 50, **options}
    words = {name: options.pop(name) for name in ("system", "template") if name in options}
    return build_prompts(rows, Wording(tokenizer or Chatty(), **words), **options)


def test_chat_prompts_carry_text_tokens_answer_and_the_rest():
    prompts, counts = build(answer_pattern=r"####\s*(.+)", system="be kind")
    first = prompts[0]
    assert first.text == "system:be kind;user:2+2?;assistant:"
    assert char_tokenizer().decode(first.tokens) == first.text
    assert first.tokens.dtype == np.int32
    assert (first.id, first.answer, first.meta) == (0, "4", {"level": 1})
    assert (prompts[1].id, prompts[1].answer) == (1, "1234567")
    assert (counts.rows, counts.used, counts.dropped, counts.truncated) == (2, 2, 0, 0)
    assert counts.longest_tokens == len(prompts[1].tokens)
    assert str(counts).startswith("2 prompts of 2 rows")


def test_a_tokenizer_stands_for_its_chat_template():
    alone, _ = build_prompts(ROWS, Chatty(), max_prompt_tokens=50)
    assert [prompt.text for prompt in alone] == [prompt.text for prompt in build()[0]]


def test_other_templates():
    prompts, _ = build(template="plain")
    assert prompts[0].text == "2+2?"
    assert prompts[0].tokens.tolist() == Chatty().encode("2+2?", add_special=True)
    assert prompts[0].answer == "so\n#### 4"
    prompts, _ = build(template="q: {question} a:")
    assert prompts[0].text == "q: 2+2? a:"
    assert prompts[0].tokens[0] == Chatty().eos_id
    with pytest.raises(UserError, match=r"character '\\n'"):
        build(template="plain", system="hello")


def test_without_an_answer_key_there_is_no_answer():
    prompts, _ = build(Rows([{"question": "2?"}]), answer_key=None)
    assert prompts[0].answer is None


def test_answers_that_are_not_text_stay_what_they_are():
    prompts, _ = build(Rows([{"q": "2?", "a": 4, "question": 1}]), question_key="q", answer_key="a")
    assert prompts[0].answer == 4
    assert prompts[0].meta == {"q": "2?", "a": 4, "question": 1}  # columns keep their own names


def test_fields_without_a_thing_in_them_are_no_images_and_no_inputs():
    row = {"instruction": "2+2?", "input": "", "output": "4", "images": [], "image": None}
    prompts, _ = build(Rows([row]), question_key="instruction", answer_key="output")
    assert prompts[0].answer == "4"


def test_rows_of_pandas_are_read_with_their_arrays_and_missing_values():
    """A list is an array there, which is neither true nor false; what is missing is NaN."""
    context = np.array(["a", "b"], object)
    rows = Rows([{"question": "2+2?", "answer": "4", "context": context, "image": np.nan}])
    assert build(rows)[0][0].answer == "4"
    rows = Rows([{"instruction": "2+2?", "answer": "4", "input": np.nan, "images": np.array([])}])
    assert build(rows, question_key="instruction")[0][0].answer == "4"
    rows = Rows([{"instruction": "2+2?", "answer": "4", "context": context}])
    with pytest.raises(UserError, match="line 1: context has text that the instruction is about"):
        build(rows, question_key="instruction")


def test_overlong_prompts_are_refused_dropped_or_cut_and_counted():
    limit = {"max_prompt_tokens": 10, "template": "plain"}
    with pytest.raises(UserError, match=r"line 2: the prompt has 19 tokens .* is 10; raise it, or"):
        build(**limit)
    prompts, counts = build(**limit, overlong="drop")
    assert [p.id for p in prompts] == [0]
    assert (counts.rows, counts.used, counts.dropped, counts.truncated) == (2, 1, 1, 0)
    prompts, counts = build(**limit, overlong="truncate")
    assert [len(p.tokens) for p in prompts] == [5, 10]
    assert prompts[1].text == "onger one?"
    assert (counts.used, counts.dropped, counts.truncated, counts.longest_tokens) == (2, 0, 1, 19)
    assert "0 dropped, 1 truncated; longest 19 tokens" in str(counts)
    with pytest.raises(
        UserError, match=r"all 2 prompts are longer than .* = 2 \(the longest has 19"
    ):
        build(max_prompt_tokens=2, template="plain", overlong="drop")
    with pytest.raises(UserError, match="overlong = 'cut'; choose from drop, error, truncate"):
        build(overlong="cut")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"answer": "4"}, {}, "line 1: there is no field 'question'; set data.fields.question"),
        (
            {"question": "2?"},
            {},
            "line 1: there is no field 'answer'; add it, or name rewards that need none",
        ),
        (
            {"question": "2?", "gold": "4"},
            {},
            "line 1: there is no field 'answer'; set data.fields.answer to one of gold",
        ),
        ({"messages": []}, {}, "it has messages: read conversations by data.train=dialogues:FILE"),
        (
            {"messages": [{"role": "user", "content": "2?"}], "ground_truth": "4"},
            {},
            "its messages end with a question: set data.fields.question to messages",
        ),
        (
            {"messages": [{"role": "assistant", "content": "2?"}], "ground_truth": "4"},
            {},
            "it has messages: read conversations by data.train=dialogues:FILE",
        ),
        (
            {"instruction": "Add.", "input": "2 + 2", "output": "4"},
            {},
            "no field 'question' and no field 'answer'; it has instruction and input: set",
        ),
        (
            {"conversations": [{"from": "human", "value": "2?"}]},
            {},
            "as ShareGPT has them: write from and value as role .* by data.train=dialogues:FILE",
        ),
        (
            {"instruction": "Add.", "input": "2 + 2", "output": "4"},
            {"question_key": "instruction", "answer_key": "output"},
            "line 1: input has text that the instruction is about, and the prompt would lack it",
        ),
        (
            {"instruction": "Who?", "context": "Ann is.", "response": "Ann"},
            {"question_key": "instruction", "answer_key": "response"},
            "line 1: context has text that the instruction is about",
        ),
        (
            {"question": "What is it?", "answer": "4", "images": [{"bytes": b"x"}]},
            {},
            "line 1: images is not read, as the models here take text alone; leave the row out",
        ),
        ({"question": "", "answer": "4"}, {}, "line 1: question is blank"),
        (
            {"prompt": "2?", "chosen": "4", "rejected": "5"},
            {},
            "it has chosen and rejected: read pairs by data.pairs=FILE",
        ),
        ({"question": "2?", "answer": " "}, {}, "line 1: answer is empty"),
        ({"question": "2?", "answer": None}, {}, "line 1: answer is empty"),
        ({"question": ["2?"], "answer": "4"}, {}, "line 1: question holds 2.; a message has role"),
        (
            {"question": 2, "answer": "4"},
            {},
            "question must be text or a list of messages, not int",
        ),
        (
            {"text": "2?"},
            {},
            "no field 'question' and no field 'answer'; set data.fields.question and",
        ),
        ({"question": "2?", "answer": "4"}, {"answer_pattern": "#(.)"}, "has no match of data"),
        ({"question": "2?", "answer": "# "}, {"answer_pattern": "#(.)"}, "line 1: answer is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row, options, message):
    with pytest.raises(UserError, match=message):
        build(Rows([row]), **options)


def test_an_empty_prompt_is_named():
    with pytest.raises(UserError, match="line 1: the prompt is empty"):
        build(Rows([{"question": "", "answer": "4"}]), char_tokenizer(), template="plain")


def test_no_rows_are_an_error():
    with pytest.raises(UserError, match="no rows"):
        build(Rows())


def test_pad_prompts():
    prompts, _ = build(template="plain")
    tokens, lengths = pad_prompts(prompts, 20)
    assert tokens.shape == (2, 20)
    assert tokens.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == [5, 19]
    for prompt, row, length in zip(prompts, tokens, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], prompt.tokens)
        assert not row[length:].any()
    with pytest.raises(UserError, match="prompt 1 has 19 tokens and the limit is 18"):
        pad_prompts(prompts, 18)


MESSAGES = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
]


def test_a_question_may_be_messages_with_examples():
    row = {"question": MESSAGES, "answer": "4"}
    prompts, _ = build(Rows([row]), system="be brief", max_prompt_tokens=60)
    assert prompts[0].text == "system:add;user:1+1?;assistant:2;user:2+2?;assistant:"
    row = {"question": MESSAGES[1:], "answer": "4"}
    prompts, _ = build(Rows([row]), system="add", max_prompt_tokens=60)
    assert prompts[0].text == "system:add;user:1+1?;assistant:2;user:2+2?;assistant:"
    with pytest.raises(UserError, match="ends with a message of the assistant"):
        build(Rows([{"question": MESSAGES[:3], "answer": "4"}]))
    with pytest.raises(UserError, match="data.template = 'plain' cannot render"):
        build(Rows([{"question": MESSAGES, "answer": "4"}]), template="plain")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(UserError, match="give text alone"):
        build(Rows([{"question": image, "answer": "4"}]))


LAYOUTS = {
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    },
    "TRL, messages": {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4"},
    "TRL, text": {"prompt": "2+2?", "ground_truth": "4"},
    "problems": {"problem": "2+2?", "answer": "4"},
    "OpenRLHF": {"input": "2+2?", "label": "4", "datasource": "math"},
    "prime-rl": {"prompt": "2+2?", "verification_info": '{"ground_truth": "4"}', "metadata": "{}"},
    "DeepMath": {"question": "2+2?", "final_answer": "4", "r1_solution_1": "two and two"},
}


def test_verl_s_messages_come_before_a_bare_question():
    row = LAYOUTS["verl"] | {"question": "two and two?"}
    prompts, counts = build(Rows([row]))
    assert prompts[0].text == "user:2+2?;assistant:"
    assert prompts[0].meta["question"] == "two and two?"
    fields = "question: prompt, answer: reward_model.ground_truth"
    assert str(counts).endswith(f"; longest {counts.longest_tokens} tokens; {fields}")
    prompts, counts = build(Rows([{"question": "2?", "prompt": "x", "answer": "4"}]))
    assert prompts[0].text == "user:2?;assistant:"
    assert str(counts).endswith(" tokens")


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_published_layouts_are_read_as_they_are(row):
    prompts, _ = build(Rows([row]))
    assert prompts[0].text == "user:2+2?;assistant:"
    assert prompts[0].answer == "4"
    assert prompts[0].meta == {k: v for k, v in row.items() if k not in ("question", "answer")}


def test_the_label_of_a_judged_completion_is_no_answer():
    row = {"prompt": "2+2?", "completion": "4", "label": True}
    with pytest.raises(UserError, match=r"no field 'answer'; it has completion and label: read .*"):
        build(Rows([row]))
    assert build(Rows([row]), needs_answer=False)[0][0].answer is None
    assert build(Rows([row]), answer_key="label")[0][0].answer is True


@pytest.mark.parametrize("text", [json.dumps(MESSAGES), str(MESSAGES)], ids=["json", "python"])
def test_messages_as_text_are_refused(text):
    with pytest.raises(UserError, match="line 1: question is text that holds messages"):
        build(Rows([{"question": text, "answer": "4"}]))
    with pytest.raises(UserError, match="is not in the built-in tokenizer's alphabet"):
        build(Rows([{"question": '[{"role": 4}]', "answer": "4"}]))  # are no messages


def test_a_path_names_a_field_of_a_field():
    row = {"extra": {"q": "2?", "deep": {"a": 4}}, "prompt": "other"}
    prompts, _ = build(Rows([row]), question_key="extra.q", answer_key="extra.deep.a")
    assert (prompts[0].text, prompts[0].answer) == ("user:2?;assistant:", 4)
    with pytest.raises(UserError, match="no field 'extra.x'"):
        build(Rows([row]), question_key="extra.x", answer_key="extra.deep.a")


def test_a_solution_may_be_a_message_and_no_other_list():
    row = {"question": "2?", "answer": "4", "s": "four"}
    message = {"role": "assistant", "content": "four"}
    for solution in ([message], np.array([message])):  # as Parquet gives it
        (prompt,), _ = build(Rows([row | {"s": solution}]), solution_key="s")
        assert (
            prompt.solution.tolist() == build(Rows([row]), solution_key="s")[0][0].solution.tolist()
        )
    for wrong in ([message, message], ["four"], {"a": 1}, [message | {"tool_calls": [{}]}]):
        with pytest.raises(UserError, match="line 1: s must be text, or a list with one message"):
            build(Rows([row | {"s": wrong}]), solution_key="s")


def test_rows_list_as_many_solutions_as_a_method_demonstrates():
    rows = [{"question": "q", "answer": "4", "s": texts} for texts in (["a", "b", "c"], ["a", "b"])]
    prompts, _ = build(Rows(rows), solution_key="s", solutions=2)
    assert [len(p.solution) for p in prompts] == [6, 4]  # each with the token that ends it
    with pytest.raises(UserError, match=r"s lists 2 solutions, and .*demonstrations = 3; list as"):
        build(Rows(rows), solution_key="s", solutions=3)
    with pytest.raises(UserError, match="s lists 1 solutions"):
        build(Rows([rows[0] | {"s": "a"}]), solution_key="s", solutions=2)


def test_answers_of_arrays_are_lists_as_files_have_them():
    """verl's sets of Search-R1 hold arrays in a table, where they come by way of pandas."""
    targets = {"target": np.array(["a", "b"], object), "n": np.float64(2)}
    row = {"question": "2?", "reward_model": {"ground_truth": targets}}
    prompts, _ = build(Rows([row]))
    assert prompts[0].answer == {"target": ["a", "b"], "n": 2.0}
    assert type(prompts[0].answer["n"]) is float


@pytest.mark.parametrize("label", ["", None, float("nan"), []])
def test_an_empty_answer_is_none_where_none_is_needed(label):
    rows = Rows([{"question": "2?", "label": label}, {"question": "3?"}])
    prompts, _ = build(rows, needs_answer=False)
    assert [p.answer for p in prompts] == [None, None]
    with pytest.raises(UserError, match="label is"):
        build(rows)


def test_an_answer_that_no_reward_needs_is_read_where_rows_have_it():
    """A function may take ``answer=None``, or read it from a state."""
    prompts, _ = build(Rows([{"question": "2?", "label": "4"}]), needs_answer=False)
    assert prompts[0].answer == "4"


@pytest.mark.parametrize("tools", [float("nan"), 3, "3"])
def test_tools_that_are_none(tools):
    with pytest.raises(UserError, match="line 1: tools holds"):
        build(Rows([{"question": "2?", "answer": "4", "tools": tools}]))
