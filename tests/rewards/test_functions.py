"""The library's reward functions, beside the numbers that TRL, Open-R1, verl and papers' code give.

``peer_values.json`` was computed by the functions of TRL at f2cd577, Open-R1 at 1416fa0, verl at
b178a3c, DARLING at c07a323 and ToolRL at 8cee13e.
"""

import json
import math
import pathlib

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.rewards.combine import columns, make_combined
from jrl.rewards.tool_calls import call_score, calls_in
from jrl.types import Prompt

PEERS = json.loads((pathlib.Path(__file__).parent / "peer_values.json").read_text())


def sample(text="", answer="4", tokens=3, id=0, step=0, steps=0, **meta):
    ids = np.zeros(tokens, np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    prompt = Prompt(id, "?", np.zeros(1, np.int32), answer, meta)
    return Sample(prompt, text, ids, "stop_token", step=step, steps=steps)


def points(name, *samples, **options):
    return make_reward(name, **options)(list(samples))


@pytest.mark.parametrize("case", PEERS["repetition"])
def test_repetition_is_trl_s(case):
    options = {"size": case["size"], "penalty": case["penalty"]}
    assert points("repetition", sample(tokens=case["ids"]), **options)[0] == pytest.approx(
        case["points"]
    )
    theirs = {"ngram_size": case["size"], "max_penalty": case["penalty"]}
    again = points("get_repetition_penalty_reward", sample(tokens=case["ids"]), **theirs)
    assert again[0] == pytest.approx(case["points"])


@pytest.mark.parametrize("case", PEERS["soft_overlong"])
def test_soft_overlong_is_trl_s(case):
    limits = {"max_completion_len": case["limit"], "soft_punish_cache": case["cache"]}
    (mine,) = points("get_soft_overlong_punishment", sample(tokens=case["tokens"]), **limits)
    assert mine == pytest.approx(case["points"])


@pytest.mark.parametrize("case", PEERS["cosine_length"])
def test_cosine_length_is_trl_s(case):
    options = {"max_len": 100, "min_value_wrong": -2.0, "max_value_wrong": -0.5}
    options |= {"min_value_correct": 0.25, "max_value_correct": 1.5}
    told = sample(case["text"], tokens=case["tokens"])
    assert points("get_cosine_scaled_reward", told, **options)[0] == pytest.approx(case["points"])


@pytest.mark.parametrize("name", ["think_format", "tag_count", "reasoning_steps"])
def test_forms_are_trl_s_and_open_r1_s(name):
    for case in PEERS[name]:
        assert points(name, sample(case["text"])) == [pytest.approx(case["points"])], case["text"]


def test_verl_s_by_name():
    for case in PEERS["gsm8k"]:
        told = sample(case["text"], case["answer"])
        mine = points("gsm8k", told, method=case["method"], format_score=0.1)
        assert mine == [case["points"]], case
    for case in PEERS["search_r1_like_qa_em"]:
        told = sample(case["text"], {"target": case["answer"]})
        assert points("search_r1_like_qa_em", told, format_score=0.1) == [case["points"]], case
    right = "<think>x</think> \\boxed{4}"
    assert points("geo3k", sample(right), sample("\\boxed{4}"), sample("4")) == [1.0, 0.9, 0.0]
    assert points("math_dapo", sample("Answer: 4"), sample("Answer: 5"), sample("4")) == [1, -1, -1]


def test_new_ngrams_are_those_of_darling():
    for case in PEERS["new_ngrams"]:
        group = [sample(text) for text in case["texts"]]
        assert points("new_ngrams", *group, size=case["size"]) == pytest.approx(case["points"])


def in_our_form(calls):
    return [{"name": c["name"], "arguments": c["parameters"]} for c in calls]


def test_tool_calls_are_scored_as_toolrl_does():
    for case in PEERS["tool_call_score"]:
        gold, made = in_our_form(case["gold"]), in_our_form(case["calls"])
        assert 6 * call_score(gold, made) - 3 == pytest.approx(case["points"]), made


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_read_and_what_cannot_be_read_is_0():
    quoted = call("say", text='<tool_call>{"name": "x"}</tool_call>')
    assert calls_in(quoted) == [
        {"name": "say", "arguments": {"text": '<tool_call>{"name": "x"}</tool_call>'}}
    ]
    assert calls_in(call("a") + call("b")) == [{"name": n, "arguments": {}} for n in "ab"]
    assert calls_in('<tool_call>{"name": }</tool_call>') is None
    assert calls_in("no call") == []
    gold = [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    told = [call("add", a=1, b=2), call("add", a=1, b=3), "<tool_call>{</tool_call>", "none"]
    mine = points("tool_calls", *(sample(text, gold) for text in told))
    assert mine == pytest.approx([1.0, 3 / 4, 0.0, 0.0])
    assert points("tool_calls", sample("x", "")) == [None]
    with pytest.raises(UserError, match="answer of prompt 0 is '3'; give a list of calls"):
        points("tool_calls", sample("x", 3))


def test_toolrl_pays_form_and_calls():
    gold = [{"name": "add", "arguments": {"a": 1}}]
    formed = "<think>t</think>\n" + call("add", a=1)
    told = [sample(text, gold) for text in (formed, call("add", a=1), "<think>t</think>", formed)]
    assert points("toolrl", *told) == [4.0, 3.0, -3.0, 4.0]
    answer = sample("<think>t</think>\n<response>4</response>", "<response>4</response>")
    assert points("toolrl", answer) == [1.0]
    early, late = (sample(formed, gold, step=s) for s in (0, 150))
    assert points("toolrl", early, late, schedule_steps=150) == [4.0, 4.0]
    half = sample(formed, gold, step=75)
    assert points("toolrl", half, schedule_steps=150) == [pytest.approx(1.5 + 2.5)]


def test_accuracy_has_no_opinion_without_an_answer():
    assert points("accuracy", sample("\\boxed{4}"), sample("5"), sample("4", None)) == [1, 0, None]
    told = ["<think>\\boxed{5}</think> \\boxed{4}", "<think>\\boxed{4}", "<think></think> 5"]
    assert points("reasoning_accuracy", *map(sample, told)) == [1.0, 0.0, 0.0]


def test_the_shortest_right_answer_of_a_group_gets_the_most():
    group = [sample("4", tokens=10), sample("4", tokens=20), sample("5", tokens=10)]
    group.append(sample("5", tokens=30))
    assert points("length_in_group", *group) == [0.5, 0.0, 0.0, -0.5]
    assert points("length_in_group", sample("4"), sample("5")) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("C", 1), ("(C)", 1), ("The answer is **C**.", 1), ("C. Paris", 1), ("Paris", 1), ("B", 0),
     ("I think it is Paris", 1), ("A or B", 0), ("", 0), ("<answer>c</answer>", 1)],
)  # fmt: skip
def test_multiple_choice_knows_a_letter_and_a_text(text, expected):
    choices = ["Rome", "Berlin", "Paris"]
    for answer in ("C", 2, "Paris"):
        assert points("multiple_choice", sample(text, answer, choices=choices)) == [expected]


def test_a_choice_that_is_none_is_said():
    with pytest.raises(UserError, match="the answer 'Madrid' of prompt 0 is no letter"):
        points("multiple_choice", sample("C", "Madrid", choices=["Rome", "Paris"]))


def test_answers_in_words():
    told = sample("<answer>The Big Apple!</answer>", ["big apple", "New York"])
    assert points("exact_match", told) == points("f1", told) == points("contains", told) == [1.0]
    near = sample("a big red apple", "big apple")
    assert points("exact_match", near) == [0.0]
    assert points("f1", near) == [pytest.approx(0.8)]
    assert points("contains", sample("it is the big apple, yes", "big apple")) == [1.0]
    with pytest.raises(UserError, match=r"rewards\.f1: the answer is \[\]; give a text"):
        points("f1", sample("x", []))


def test_agreement_in_a_group():
    group = [sample(t, None) for t in ("\\boxed{4}", "so 4.0", "\\boxed{5}", "no idea")]
    assert points("majority", *group) == [1, 1, 0, 0]
    assert points("answer_share", *group) == [0.5, 0.5, 0.25, 0.0]
    assert points("new_answer", *group, floor=0.1) == pytest.approx([2 / 3, 2 / 3, 1, 1])
    # EMPO's code pays nothing where all answers differ; a band of entropies says nothing outside
    apart = [sample(f"\\boxed{{{i}}}") for i in range(3)]
    assert points("answer_share", *apart) == [0.0] * 3
    entropy = 1.5 * math.log(2)  # of shares 1/2, 1/4, 1/4
    assert points("answer_share", *group, high=entropy - 0.01) == [None] * 4
    assert points("answer_share", *group, high=entropy + 0.01) == [0.5, 0.5, 0.25, 0.0]


def test_language_reflection_and_what_they_refuse():
    told = [sample(t) for t in ("Ответ: да yes", "yes", "42", "```да``` yes")]
    assert points("language", *told) == pytest.approx([3 / 10, 1, 1, 1])
    assert points("language", told[0], scripts=["cyrillic"]) == pytest.approx([0.7])
    with pytest.raises(UserError, match="scripts = 'latn'; did you mean 'latin'"):
        points("language", told[0], scripts=["latn"])
    assert points("reflection", sample("Wait, let me check."), sample("x"), most=2) == [1.0, 0.0]


RETRIEVER = """
def search(queries):
    return [["p1", "p2", *map(str, range(100))] if "cat" in q else [] for q in queries]
"""


def test_convsearch_pays_by_rank(tmp_path):
    (tmp_path / "search.py").write_text(RETRIEVER)
    told = [
        sample("<think>x</think>cat food", gold="p1"),
        sample("<think>x</think>cat food", gold=["7", "p2"]),
        sample("<think>x</think>cat food", gold="8"),
        sample("<think>x</think>dog", gold="p1"),
        sample("cat food", gold="p1"),
    ]
    mine = points("convsearch", *told, retriever=f"{tmp_path}/search.py:search")
    assert mine == pytest.approx([18 / 9, 17 / 9, 89 / 90, 0.0, -0.1])


def test_convsearch_is_stricter_after_a_quarter_of_the_steps(tmp_path):
    """The authors' code (BeastyZ/ConvSearch-R1) with steps."""
    (tmp_path / "search.py").write_text(RETRIEVER)
    told = [
        sample("<think>x</think>\n<rewrite>cat food</rewrite>", gold=gold, step=step, steps=40)
        for step in (10, 11)
        for gold in ("p1", "7", "8", "97", "98")  # of ranks 1, 10, 11, 100 and 101
    ]
    mine = points("convsearch", *told, retriever=f"{tmp_path}/search.py:search", curriculum=True)
    early = [1.0, 1 - 9 / 99, 1 - 10 / 99, 0.0, -0.2]
    assert mine == pytest.approx([*early, 1.0, 1 - 9 / 99, 0.0, 0.0, -0.2])


def test_r3_is_relevance_by_length_and_variety(tmp_path):
    """As naver-ai/rethinking-proxy-reward computes it; constrained rows by their reference."""
    code = "def near(pairs):\n    return [float(len(a)) for a, _ in pairs]\n"
    (tmp_path / "near.py").write_text(code)
    judged = [
        sample("a b, a b, a b"),  # 8 words, 3 of 6 trigrams; the question is "?"
        sample("hi"),
        sample("a b, a b, a b", answer="four", qtype="CONSTRAINED"),
    ]
    mine = points("r3", *judged, relevance=f"{tmp_path}/near.py:near", limit=350)
    assert mine == pytest.approx([8 / 100 * 0.5, 1 / 100, 4.0 * 0.5])
    (tmp_path / "none.py").write_text("def near(pairs):\n    return []\n")
    with pytest.raises(UserError, match="rewards.r3.relevance returned 0 values for 1 pairs"):
        points("r3", sample("a"), relevance=f"{tmp_path}/none.py:near")


def test_rank_fidelity_is_the_mean_over_the_other_items():
    """Against the formula by hand, over two items of two members each."""
    stated = {0: ("1", "3"), 1: ("4", "4")}
    batch = [sample(text, i + 1, id=i) for i, texts in stated.items() for text in texts]
    mine = points("rank_fidelity", *batch)
    phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))  # noqa: E731
    spread = math.sqrt(2.0 + 0.0 + 1e-6)
    for k, (own, other, g) in enumerate([(1, 4, 0), (3, 4, 0), (4, 2, 1), (4, 2, 1)]):
        p = phi((own - other) / spread)
        expected = math.sqrt(p * g + 1e-6) + math.sqrt((1 - p) * (1 - g) + 1e-6)
        assert mine[k] == pytest.approx(expected, abs=1e-9)
    assert points("rank_fidelity", *batch[:2]) == [0.0, 0.0]


def test_dynamic_iou_rises_with_the_steps():
    box, near = [0, 0, 10, 10], "[0, 0, 10, 9]"
    for step, paid in ((0, 0.9), (10, 0.9), (11, 0.0), (90, 0.0)):
        assert points("dynamic_iou", sample(near, box, step=step, steps=100)) == [paid]
    assert points("dynamic_iou", sample("[0, 0, 10, 10]", box, step=99, steps=100)) == [1.0]
    assert points("dynamic_iou", sample("no box", box)) == [0.0]


def test_semantic_entropy_is_that_of_the_classes_of_answers():
    group = [sample(rf"\boxed{{{x}}}") for x in ("2", "2.0", "3")] + [sample("no idea")]
    entropy = sum(-p * math.log(p) for p in (0.5, 0.25, 0.25))
    assert points("semantic_entropy", *group) == pytest.approx([-entropy] * 4)
    assert points("semantic_entropy", *group, share=True) == pytest.approx(
        [-entropy / math.log(4)] * 4
    )
    assert points("semantic_entropy", *group[:2]) == [0.0, 0.0]


def test_tulu_s_reward_is_10_for_a_verified_answer_and_minus_10_without_an_end():
    cut = [Sample(s.prompt, s.completion, s.tokens, "length") for s in (sample(r"\boxed{4}"),)]
    group = [sample(r"\boxed{4}"), sample(r"\boxed{5}"), *cut]
    parts = np.array([[points("ended", s)[0], points("math", s)[0]] for s in group])
    total = make_combined("total", "veto", ["ended", "math"], {"below": 1.0, "points": -1.0})
    assert (10 * total.combine(columns(parts))).tolist() == [[10.0, 0.0, -10.0]]
    assert points("ended", cut[0]) == [0.0]


def test_demonstration_similarity_is_that_of_the_nearest_clauses(tmp_path):
    (tmp_path / "letters.py").write_text(
        "def encode(texts):\n"
        "    return [[text.lower().count(c) + 0.01 for c in 'abcdefgh'] for text in texts]\n"
        "def short(texts):\n"
        "    return encode(texts)[1:]\n"
    )

    def vector(text):
        return np.array([text.count(c) + 0.01 for c in "abcdefgh"])

    def cosine(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    mine, shown = ["abba", "cd", "hh h"], ["ab", "dc e"]
    encoder = f"{tmp_path}/letters.py:encode"
    told = [sample("abba. cd; hh h!", "ab\ndc e?"), sample("...", "ab"), sample("a", 1, note="a")]
    ours = points("demonstration_similarity", *told, encoder=encoder)
    expected = np.mean([max(cosine(vector(a), vector(b)) for b in shown) for a in mine])
    assert ours[0] == pytest.approx(expected, abs=1e-9)
    assert 0.3 < expected < 0.9
    assert ours[1] is None
    by_column = points("demonstration_similarity", told[2], encoder=encoder, column="note")
    assert by_column == [pytest.approx(1.0)]
    with pytest.raises(UserError, match="encoder returned 1 vectors for 2 texts"):
        points("demonstration_similarity", sample("a", "b"), encoder=f"{tmp_path}/letters.py:short")


def test_listed_solutions_have_the_points_that_the_row_says():
    row = {"solutions": ["a b", " c"], "equivalent": [True, False]}
    told = [sample("a b\n", **row), sample("c", **row), sample("d", **row), sample("a")]
    assert points("listed_solution", *told) == [1.0, 0.0, None, None]
    with pytest.raises(UserError, match="prompt 0 has 2 solutions and 1 equivalent"):
        points("listed_solution", sample("c", **(row | {"equivalent": [True]})))
