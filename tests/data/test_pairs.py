"""Pairs, labels and lists: every form a file may have, and what is said about what is wrong."""

import json
import string

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jrl.config import load_config
from jrl.data.datasets import MemoryRows, open_dataset
from jrl.data.messages import Wording
from jrl.data.pairs import build_judged, judged_batch, pairs_of_samples
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.models.tokenizer import ALPHABET, CharTokenizer
from jrl.setup.kinds import kind_of

STOP = 1
LIMITS = {"max_prompt_tokens": 40, "max_completion_tokens": 12}
Q, A, B = (
    {"role": r, "content": c} for r, c in (("user", "2+2"), *[("assistant", x) for x in "45"])
)


class Chat(CharTokenizer):
    """A template with headers in letters, and "?" as the stop token."""

    def __init__(self):
        super().__init__()
        self.eos_id = self.encode("?")[0]
        self.stop_ids = (self.eos_id,)

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        text = "".join(f"{m['role'][0]}:{m['content']}?;" for m in messages)
        return text + ("a:" if add_generation_prompt else "")


class Thinking(Chat):
    """A template that writes an answer behind a mark, as templates of reasoning models do."""

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        marked = [
            {**m, "content": "=>" + m["content"]} if m["role"] == "assistant" else m
            for m in messages
        ]
        return super().chat(marked, add_generation_prompt=add_generation_prompt)


class Rewriting(Chat):
    """A template that writes a finished conversation in another way."""

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        text = super().chat(messages, add_generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else "," + text


def read(*rows, tokenizer=None, **more):
    words = {name: more.pop(name) for name in ("system", "template") if name in more}
    wording = Wording(tokenizer or Chat(), **words)
    return build_judged(MemoryRows(rows, "line"), wording, **{**LIMITS, **more})


def texts(row, tokenizer=None):
    tokenizer = tokenizer or Chat()
    return row.text, [tokenizer.decode(c) for c in row.completions]


def fails(*rows, **more):
    with pytest.raises(UserError) as caught:
        read(*rows, **more)
    return str(caught.value)


PAIRS = {
    "text": {"prompt": "2+2", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [Q], "chosen": [A], "rejected": [B]},
    "prompt in messages, answers in text": {"prompt": [Q], "chosen": "4", "rejected": "5"},
    "messages that begin alike": {"chosen": [Q, A], "rejected": [Q, B]},
    "prompt in text and at the head of both": {
        "prompt": "2+2",
        "chosen": [Q, A],
        "rejected": [Q, B],
    },
}


@pytest.mark.parametrize("form", PAIRS)
def test_all_forms_of_a_pair_are_the_same_pair(form):
    (pair,), counts = read({**PAIRS[form], "source": "kept out"})
    assert texts(pair) == ("u:2+2?;a:", ["4?", "5?"])
    assert pair.prompt.tolist() == Chat().encode("u:2+2?;a:")
    assert pair.scores == (1.0, 0.0)
    assert counts.kind == "pairs"


def test_longer_conversations_keep_every_turn_in_the_prompt():
    turns = [Q, A, {"role": "user", "content": "why"}]
    (pair,), _ = read({"chosen": [*turns, A], "rejected": [*turns, B]})
    assert pair.text == "u:2+2?;a:4?;u:why?;a:"
    assert texts(pair)[1] == ["4?", "5?"]


WHY = {"role": "user", "content": "why"}
BEFORE = {  # prompt, what both answers begin with -> the prompt
    "a system message and the question again": (
        [{"role": "system", "content": "s"}, Q],
        [Q],
        "s:s?;u:2+2?;a:",
    ),
    "the conversation goes on": ([Q], [A, WHY], "u:2+2?;a:4?;u:why?;a:"),
    "as text": ("2+2", [A, WHY], "u:2+2?;a:4?;u:why?;a:"),
    "the question again, and on from there": (
        [{"role": "system", "content": "s"}, Q],
        [Q, A, WHY],
        "s:s?;u:2+2?;a:4?;u:why?;a:",
    ),
    "the whole conversation again": ([Q], [Q, A, WHY], "u:2+2?;a:4?;u:why?;a:"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_the_prompt_of_a_row_is_kept_before_what_answers_begin_with(name):
    prompt, shared, expected = BEFORE[name]
    (pair,), _ = read({"prompt": prompt, "chosen": [*shared, A], "rejected": [*shared, B]})
    assert texts(pair) == (expected, ["4?", "5?"])


def test_labels_and_lists_are_groups_of_one_and_of_many():
    row = {"prompt": "2+2", "completion": "4"}
    rows, counts = read({**row, "label": True}, {**row, "label": 0})
    assert [j.scores for j in rows] == [(1.0,), (0.0,)]
    assert counts.kind == "labels"
    (rows,), counts = read(
        {"prompt": [Q], "responses": ["4", [B], "6"], "scores": np.array([1, -0.5, 0])}
    )
    assert rows.scores == (1.0, -0.5, 0.0)
    assert texts(rows)[1] == ["4?", "5?", "6?"]
    assert counts.kind == "lists"


def test_plain_text_ends_with_the_stop_token():
    tokenizer = CharTokenizer()
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    (pair,), _ = read(row, tokenizer=tokenizer, template="plain")
    assert pair.prompt.tolist() == tokenizer.encode("2+2=")
    assert [c.tolist() for c in pair.completions] == [[*tokenizer.encode(x), STOP] for x in "45"]
    (pair,), _ = read(row, tokenizer=tokenizer, template="q {question}>")
    assert pair.text == "q 2+2=>"


def test_texts_that_begin_alike_share_their_prompt_up_to_a_space():
    row = {"chosen": "say: two words", "rejected": "say: two lies"}
    (pair,), _ = read(row, tokenizer=CharTokenizer(), template="plain")
    assert texts(pair, CharTokenizer()) == ("say: two", [" words", " lies"])
    assert "a prompt only with data.template = 'plain'" in fails(row)


def test_a_system_message_is_put_before_prompts_without_one():
    system = {"role": "system", "content": "be"}
    rows = [PAIRS["messages"], {"prompt": [{**system, "content": "own"}, Q], "chosen": "4"}]
    rows[1]["rejected"] = "5"
    pairs, _ = read(*rows, system="be")
    assert [j.text[:6] for j in pairs] == ["s:be?;", "s:own?"]


def test_a_completion_is_what_the_template_writes_after_the_prompt():
    (pair,), _ = read(PAIRS["text"], tokenizer=Thinking())
    assert texts(pair) == ("u:2+2?;a:", ["=>4?", "=>5?"])
    (pair,), _ = read(PAIRS["text"], tokenizer=Rewriting())
    assert texts(pair) == ("u:2+2?;a:", ["4?", "5?"])


PAIR, LIST = PAIRS["text"], {"prompt": "a", "responses": ["b"]}
WRONG = {
    "line 1: there is no rejected, only prompt, chosen": {"prompt": "a", "chosen": "b"},
    "line 1: there is no scores": {"prompt": "a", "responses": ["b"]},
    "chosen and rejected are equal; remove": {**PAIR, "rejected": "4"},
    "the same tokens; remove the row": {**PAIR, "chosen": "4?x", "rejected": "4?y"},
    "rejected is empty; give it a text, or remove": {**PAIR, "rejected": " "},
    "prompt is empty": {**PAIR, "prompt": ""},
    "there is no prompt, and chosen and rejected have no common beginning": {
        "chosen": [A],
        "rejected": [B],
    },
    "one of chosen and rejected is text": {**PAIR, "rejected": [B]},
    "label = 'yes'; write true or false": {"prompt": "a", "completion": "b", "label": "yes"},
    "2 responses but 1 scores": {"prompt": "a", "responses": ["b", "c"], "scores": [1]},
    "responses is empty": {"prompt": "a", "responses": [], "scores": []},
    "scores holds nan": {"prompt": "a", "responses": ["b"], "scores": [float("nan")]},
    "scores holds 1e+308; write finite float32": {**LIST, "scores": [1e308]},
    "scores holds 1000000000000000000000000000000000000000; write": {**LIST, "scores": [10**39]},
    "a message has role and content": {**PAIR, "prompt": [{"from": "human"}]},
    "prompt must be text or a list": {**PAIR, "prompt": 3},
    "it must be one message of the assistant": {"prompt": [Q], "chosen": [Q, A], "rejected": [B]},
    "prompt ends with a message of the assistant": {
        "prompt": [Q, A],
        "chosen": "b",
        "rejected": "c",
    },
    "the completion has 14 tokens and sampling.max_new_tokens is 12; raise it": {
        **PAIR,
        "chosen": "1234567890123",
    },
    "the prompt has 46 tokens and data.max_prompt_tokens is 40": {**PAIR, "prompt": "9" * 40},
    "there is no prompt; write question as prompt": {
        "question": "2?",
        "chosen": "4",
        "rejected": "5",
    },
    "images is not read": {**PAIR, "images": [{"bytes": b"x"}]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_said_with_its_line(message):
    assert message in (error := fails(WRONG[message]))
    assert error.startswith("line 1: ")


def test_kinds_do_not_mix_and_messages_need_the_chat_template():
    label = {"prompt": "a", "completion": "b", "label": True}
    assert "line 2: labels after pairs; put them into separate files" in fails(PAIR, label)
    assert "set it to 'chat'" in fails(PAIRS["messages"], template="plain")
    text = '[{"role": "assistant", "content": "4"}]'
    assert "line 1: chosen is text that holds messages" in fails({**PAIR, "chosen": text})
    assert "the data has no rows" in fails()
    assert "data.overlong = 'cut'; choose from" in fails(PAIR, overlong="cut")


def test_too_long_is_dropped_or_truncated_as_configured():
    long_prompt = {**PAIR, "prompt": "1234567890"}
    long_answer = {**PAIR, "chosen": "456"}
    alike = {**PAIR, "chosen": "451", "rejected": "459"}
    rows = (PAIR, long_prompt, long_answer, alike)
    limits = {"max_prompt_tokens": 12, "max_completion_tokens": 2}
    pairs, counts = read(*rows, **limits, overlong="drop")
    assert [j.id for j in pairs] == [0]
    assert (counts.rows, counts.used, counts.dropped, counts.truncated) == (4, 1, 3, 0)
    assert (counts.longest_prompt, counts.longest_completion) == (16, 4)
    pairs, counts = read(*rows, **limits, overlong="truncate")
    assert [j.id for j in pairs] == [0, 1, 2]  # the fourth has nothing left to compare
    assert (counts.used, counts.dropped, counts.truncated) == (3, 1, 2)
    assert Chat().decode(pairs[1].prompt) == "34567890?;a:"
    assert texts(pairs[2])[1] == ["45", "5?"]
    assert pairs[2].cut == (True, False)
    assert "no record of 1 is left: the longest prompt has 16" in fails(
        long_prompt, **limits, overlong="drop"
    )
    assert "1 pairs of 4 rows; too long: 3 dropped" in str(
        read(*rows, **limits, overlong="drop")[1]
    )


def test_files_give_what_rows_give(tmp_path):
    rows = [PAIRS["messages"], {"prompt": [Q], "chosen": [B], "rejected": [A]}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(r) for r in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [texts(j) for j in read(*rows)[0]]
    for name in ("a.jsonl", "a.parquet"):
        pairs, _ = build_judged(open_dataset(str(tmp_path / name)), Chat(), **LIMITS)
        assert [texts(j) for j in pairs] == expected
    (tmp_path / "b.jsonl").write_text(json.dumps(PAIR) + "\n\n" + json.dumps({"prompt": "x"}))
    with pytest.raises(UserError, match=r"b\.jsonl, line 3: there is no chosen and no rejected"):
        build_judged(open_dataset(str(tmp_path / "b.jsonl")), Wording(Chat()), **LIMITS)


def test_the_batch_says_who_is_there_and_what_counts():
    many = {"prompt": "2+2", "responses": ["4", "55", "6"], "scores": [1, 0.5, 0]}
    few = {"prompt": "1", "responses": ["1"], "scores": [2]}
    pairs, _ = read(many, few)
    batch = judged_batch(pairs, prompt_tokens=16, group=3, completion_tokens=5).check()
    assert batch.members.tolist() == [[True] * 3, [True, False, False]]
    assert batch.lengths.tolist() == [[2, 3, 2], [2, 0, 0]]
    assert batch.mask.sum() == batch.lengths.sum() == 9
    assert batch.score().tolist() == [[1, 0.5, 0], [2, 0, 0]]
    assert batch.tokens[0, 1].tolist() == [*Chat().encode("55?"), 0, 0]
    assert batch.prompt_lengths.tolist() == [9, 7]
    assert Chat().decode(batch.prompt_tokens[1, :7]) == "u:1?;a:"
    assert (batch.stats["external"] == batch.mask).all()
    assert batch.ids["prompt"].tolist() == [0, 1]


def test_samples_become_pairs_of_best_and_worst():
    triples = [("p", " ", -1.0), ("p", "a", 0.5), ("q", "x", 1.0)]
    triples += [("p", "b", 1.0), ("q", "y", 1.0), ("p", "c", 0.0)]
    samples = [{"prompt": p, "completion": c, "reward": r} for p, c, r in triples]
    best = {"prompt": "p", "chosen": "b", "rejected": "c"}
    assert pairs_of_samples(samples) == [best]
    assert pairs_of_samples(samples, gap=1.0) == []
    read(best)  # a record like any other


# ---------------------------------------------------------------- rows in token ids

IDS = {"prompt": [5, 6], "responses": [[7], [8, 9, 1]], "scores": [0.5, 0.0]}
STEPS = {"steps": [[1], [2, 1]], "step_values": [[0.5], [0.25, 0.0]]}


def test_token_ids_are_trained_on_as_they_are():
    (one, other), counts = read(IDS | {"visits": [3, 1]}, IDS | {"visits": [2, 0]})
    assert counts.kind == "lists"
    assert one.prompt.tolist() == [5, 6]
    assert [c.tolist() for c in one.completions] == [[7], [8, 9, 1]]  # nothing is put behind them
    assert one.text == Chat().decode([5, 6])
    batch = judged_batch([one, other], prompt_tokens=3, group=3, completion_tokens=4)
    assert batch.check().stats["visits"].tolist() == [
        [[3, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
        [[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert set(batch.ids) == {"prompt"}
    assert "step_labels" not in batch.stats


def test_steps_and_their_values_stand_at_their_tokens():
    columns = {name: np.array(x, dtype=object) for name, x in (IDS | STEPS).items()}
    for row in (IDS | STEPS, columns):  # as in JSON, and as in Parquet
        (one,), _ = read(row, max_completion_tokens=2, overlong="truncate")
        batch = judged_batch([one], prompt_tokens=2, group=2, completion_tokens=2)
        assert batch.ids["step"].tolist() == [[[0, 0], [0, 0]]]
        assert batch.stats["step_labels"].tolist() == [[[0.5, 0], [0.25, 0.25]]]
        (one,), _ = read(row)
        batch = judged_batch([one], prompt_tokens=2, group=2, completion_tokens=3)
        assert batch.ids["step"].tolist() == [[[0, 0, 0], [0, 0, 1]]]
        assert batch.stats["step_labels"].tolist() == [[[0.5, 0, 0], [0.25, 0.25, 0]]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"responses": [[7], "8"]}, r"responses\[1\] = 8 with a prompt of token ids; give a list"),
        ({"responses": [[7], []]}, r"responses\[1\] = \[\] with a prompt of token ids"),
        ({"responses": [[7], [-1]]}, r"responses\[1\] = \[-1\] with a prompt of token ids"),
        ({"visits": [1]}, r"visits = \[1\]; give 2 numbers of at least 0"),
        ({"visits": [1, -1]}, "give 2 numbers of at least 0"),
        ({"visits": "many"}, "visits = many; give 2 numbers"),
        ({"steps": [[1], [3]]}, "steps and step_values go together, with a list for each of the 2"),
        (STEPS | {"steps": [[1], [2, 2]]}, r"steps\[1\] holds 4 tokens and responses\[1\] 3"),
        (STEPS | {"steps": [[1], 3]}, r"steps\[1\] = 3; give 1 numbers of at least 1"),
        (STEPS | {"steps": [[1], [3, 0]]}, "numbers of at least 1"),
        (STEPS | {"step_values": [[1], [2]]}, r"step_values\[1\] = \[2\]; give 2 numbers"),
    ],
)
def test_what_is_wrong_with_token_ids_is_named(more, message):
    with pytest.raises(UserError, match=message):
        read(IDS | more)


def test_pairs_in_token_ids_are_two_responses():
    with pytest.raises(UserError, match="write chosen and rejected as two responses with the"):
        read({"prompt": [5], "chosen": [6], "rejected": [7]})


def test_all_rows_have_visits_or_none():
    with pytest.raises(
        UserError, match="line 2: visits, steps or attributes are in some rows only"
    ):
        read(IDS | {"visits": [1, 1]}, IDS)


def test_attributes_stand_beside_their_responses():
    """HelpSteer2's, null where one is not labelled."""
    row = {"prompt": "q", "responses": ["a", "bc"], "scores": [1, 0]}
    pairs, _ = read(row | {"attributes": [[4, None], [0, 2.5]]}, row | {"attributes": [[1, 2]] * 2})
    batch = judged_batch(pairs, prompt_tokens=8, group=3, completion_tokens=6)
    first, second = batch.stats["attribute_0"], batch.stats["attribute_1"]
    assert first[0, :2, 0].tolist() == [4, 0]
    assert np.isnan(second[0, 0]).all()
    assert (second[0, 1] == 2.5).all()
    assert (first[1, :2] == 1).all()
    assert np.isnan(first[:, 2]).all()
    with pytest.raises(
        UserError, match="line 2: visits, steps or attributes are in some rows only"
    ):
        read(row | {"attributes": [[1]] * 2}, row)
    for wrong in ([[1]], [[1], [1, 2]], [1, 2], [["a"], [1]], [[], []]):
        with pytest.raises(UserError, match="line 1: attributes"):
            read(row | {"attributes": wrong})


def test_a_prompt_of_token_ids_may_hold_the_beginning_of_a_completion():
    limits = {"max_prompt_tokens": 2, "max_completion_tokens": 4}
    row = IDS | {"prompt": [5, 6, 7]}
    (one,), _ = read(row, **limits)
    assert len(one.prompt) == 3
    with pytest.raises(UserError, match="4 tokens and data.max_prompt_tokens with what .* is 3"):
        read(row | {"prompt": [5, 6, 7, 8]}, **limits)


def test_a_rationale_is_a_member_that_reads_both_answers_and_learns_the_rest():
    row = {"prompt": "2+2", "chosen": "4", "rejected": "5", "rationale": "sum"}
    pairs, _ = read(row, rationales=True)
    assert texts(pairs[0])[1] == ["4?", "5?", "4?5?sum?"]
    batch = judged_batch(pairs, prompt_tokens=12, group=3, completion_tokens=9)
    assert batch.ids["stratum"].tolist() == [[0, 0, 1]]
    assert batch.mask.sum(2).tolist() == [[2, 2, 4]]
    assert batch.mask[0, 2].tolist() == [False] * 4 + [True] * 4 + [False]
    assert batch.members.all()
    plain, _ = read(row)
    assert len(plain[0].completions) == 2
    with pytest.raises(UserError, match="the rationale behind both answers has 8 tokens and samp"):
        read(row, rationales=True, max_completion_tokens=7)
    with pytest.raises(UserError, match="rationale = None; the method learns why"):
        read({**row, "rationale": None}, rationales=True)
    list_row = {"prompt": "2+2", "responses": ["4"], "scores": [1.0]}
    with pytest.raises(UserError, match="a rationale belongs to chosen and rejected"):
        read(list_row, rationales=True)


@pytest.mark.parametrize(
    ("method", "groups", "members"), [("reward_augmented_dpo", 2, 2), ("rdpo", 1, 3), ("dpo", 1, 2)]
)
def test_methods_of_pairs_read_what_they_need(method, groups, members):
    row = {"prompt": "2+2", "chosen": "4", "rejected": "5", "rationale": "sum"}
    row |= {"chosen_score": 9, "rejected_score": 1}
    lines = ["data.pairs=x.jsonl", "data.template=plain", f"method={method}"]
    lines += ["data.max_prompt_tokens=400", "sampling.max_new_tokens=20"]
    kind = kind_of(load_config(None, lines))
    opened = lambda spec, key: MemoryRows([row], "line")  # noqa: E731
    data = kind.read(
        CharTokenizer(ALPHABET + string.ascii_uppercase + ".()\n"), get_method(method), opened
    )
    assert [len(one.completions) for one in data.judged["pairs"]] == [members] * groups
