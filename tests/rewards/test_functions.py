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
from jrl.rewards import FUNCTION_NAMES, Sample, make_reward
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


def test_repetition_of_words_knows_no_case():
    told = sample("The cat the CAT the dog")  # of five pairs, "the cat" and "cat the" come again
    assert points("repetition", told, size=2, unit="words") == [pytest.approx(-2 / 5)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("get_repetition_penalty_reward", {"max_penalty": 0.5}, "max_penalty = 0.5; must be at mo"),
        ("get_repetition_penalty_reward", {"ngram_size": 0}, "ngram_size = 0; must be at least 1"),
        (
            "get_soft_overlong_punishment",
            {"max_completion_len": 1, "soft_punish_cache": 2},
            "soft_punish_cache = 2; must be 0 to max_completion_len = 1",
        ),
    ],
)
def test_options_of_trl_are_named_as_trl_has_them(name, options, message):
    with pytest.raises(UserError, match=rf"rewards\.{name}\.{message}"):
        points(name, **options)


@pytest.mark.parametrize("case", PEERS["soft_overlong"])
def test_soft_overlong_is_trl_s(case):
    limits = {"max_completion_len": case["limit"], "soft_punish_cache": case["cache"]}
    (mine,) = points("get_soft_overlong_punishment", sample(tokens=case["tokens"]), **limits)
    assert mine == pytest.approx(case["points"])


@pytest.mark.parametrize("case", PEERS["cosine_length"])
def test_cosine_length_is_trl_s(case):
    options = {"max_len": 100, "min_value_wrong": -2.0, "max_value_wrong": -0.5}
    options |= {"min_value_correct": 0.25, "max_value_correct": 1.5}
    completion = sample(case["text"], tokens=case["tokens"])
    assert points("get_cosine_scaled_reward", completion, **options)[0] == pytest.approx(
        case["points"]
    )


@pytest.mark.parametrize("name", ["think_format", "tag_count", "reasoning_steps"])
def test_forms_are_trl_s_and_open_r1_s(name):
    for case in PEERS[name]:
        assert points(name, sample(case["text"])) == [pytest.approx(case["points"])], case["text"]


def test_a_tag_that_is_there_twice_counts_for_nothing():
    text = "<think>\nx\n</think>\n<answer>\n7\n</answer>\n</answer>"
    assert points("tag_count", sample(text)) == [0.75]


def test_verl_s_by_name():
    for case in PEERS["gsm8k"]:
        completion = sample(case["text"], case["answer"])
        mine = points("gsm8k", completion, method=case["method"], format_score=0.1)
        assert mine == [case["points"]], case
    for case in PEERS["search_r1_like_qa_em"]:
        completion = sample(case["text"], {"target": case["answer"]})
        assert points("search_r1_like_qa_em", completion, format_score=0.1) == [case["points"]], (
            case
        )
    sentence = sample("I do not see it.")  # a full stop alone is a form for verl
    assert points("gsm8k", sentence, method="flexible", format_score=0.1) == [0.1]
    assert points("gsm8k", sample("4."), method="flexible") == [0.0]  # "4." is not "4" there
    assert points("gsm8k", sample("#### 4" + " " * 295), sample("#### 4" + " " * 294)) == [0, 1]
    for extra, paid in ((9, 1.0), (10, 0.25)):  # more than ten of one tag are many
        told = sample("</answer>" * extra + "<answer>Paris</answer>", {"target": ["Paris"]})
        assert points("search_r1_like_qa_em", told) == [paid]
    right = "<think>x</think> \\boxed{4}"
    assert points("geo3k", sample(right), sample("\\boxed{4}"), sample("4")) == [1.0, 0.9, 0.0]
    assert points("geo3k", sample("4"), sample(right), use_boxed=False) == [0.9, 0.1]
    assert points("math_dapo", sample("Answer: 4"), sample("Answer: 5"), sample("4")) == [1, -1, -1]
    boxes = [sample(text) for text in ("\\boxed{4}", "\\boxed{4.0}", "\\boxed{4}" + "." * 100)]
    assert points("math_dapo", *boxes, strict_box_verify=True) == [1, -1, -1]
    stated = [sample("\\boxed{5} \\boxed{4}"), sample("The answer is 4."), sample("\\boxed{5}")]
    for name in ("math_reward", "math_batch"):
        assert points(name, *stated) == [1.0, 0.0, 0.0]
        assert points(name, sample(r"\boxed{2^2}")) == [1.0]
    for name in ("math_verify", "prime_math"):
        assert points(name, *stated) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("case", PEERS["math_dapo"], ids=lambda case: case["text"][:20])
def test_math_dapo_can_have_the_verdicts_of_verl(case):
    how = {"strict_box_verify": case["strict"], "compare": "minerva"}
    assert points("math_dapo", sample(case["text"], case["answer"]), **how) == [case["points"]]


def test_math_dapo_compares_by_the_grammar_else():
    told = [sample(f"Answer: {text}", "5 km") for text in ("5.0", "5 cm", "x = 5")]
    assert points("math_dapo", *told) == [1, -1, 1]
    assert points("math_dapo", *told, compare="minerva") == [-1, 1, 1]
    with pytest.raises(UserError, match=r"math_dapo.compare = 'verl'; choose from grammar, minerv"):
        make_reward("math_dapo", compare="verl")


def test_all_that_trl_and_verl_ship_is_here_by_name():
    """The public functions of trl.rewards, and verl's modules of reward_score with its choice."""
    trl = "accuracy_reward reasoning_accuracy_reward get_cosine_scaled_reward think_format_reward"
    trl += " get_repetition_penalty_reward get_soft_overlong_punishment"
    verl = "geo3k gsm8k math_batch math_dapo math_reward math_verify prime_code prime_math"
    verl += " sandbox_fusion search_r1_like_qa_em default_compute_score"
    assert {*trl.split(), *verl.split()} <= {*FUNCTION_NAMES}


def test_new_ngrams_are_those_of_darling():
    for case in PEERS["new_ngrams"]:
        group = [sample(text) for text in case["texts"]]
        assert points("new_ngrams", *group, size=case["size"]) == pytest.approx(case["points"])


def in_our_form(calls):
    return [{"name": c["name"], "arguments": c["parameters"]} for c in calls]


def test_tool_calls_are_scored_as_toolrl_does():
    for case in PEERS["tool_call_score"]:
        gold, calls = in_our_form(case["gold"]), in_our_form(case["calls"])
        assert 6 * call_score(gold, calls) - 3 == pytest.approx(case["points"]), calls
    once = [{"name": "open", "arguments": {"url": "u"}}]  # answers one of two that are expected
    assert call_score(once * 2, once) == pytest.approx((1 / 2 + 2) / 5)


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
    texts = [call("add", a=1, b=2), call("add", a=1, b=3), "<tool_call>{</tool_call>", "none"]
    mine = points("tool_calls", *(sample(text, gold) for text in texts))
    assert mine == pytest.approx([1.0, 3 / 4, 0.0, 0.0])
    assert points("tool_calls", sample("x", "")) == [None]
    with pytest.raises(UserError, match="answer of prompt 0 is '3'; give a list of calls"):
        points("tool_calls", sample("x", 3))


def test_toolrl_pays_form_and_calls():
    gold = [{"name": "add", "arguments": {"a": 1}}]
    formed = "<think>t</think>\n" + call("add", a=1)
    texts = [sample(text, gold) for text in (formed, call("add", a=1), "<think>t</think>", formed)]
    assert points("toolrl", *texts) == [4.0, 3.0, -3.0, 4.0]
    answer = sample("<think>t</think>\n<response>4</response>", "<response>4</response>")
    assert points("toolrl", answer) == [1.0]
    early, late = (sample(formed, gold, step=s) for s in (0, 150))
    assert points("toolrl", early, late, schedule_steps=150) == [4.0, 4.0]
    half = sample(formed, gold, step=75)
    assert points("toolrl", half, schedule_steps=150) == [pytest.approx(1.5 + 2.5)]
    bare = [sample("none", gold, step=s) for s in (0, 75, 150)]  # neither form nor call
    assert points("toolrl", *bare, schedule_steps=150) == [-2 - 2, -1 - 2.5, -1 - 3]


def test_accuracy_has_no_opinion_without_an_answer():
    assert points("accuracy", sample("\\boxed{4}"), sample("5"), sample("4", None)) == [1, 0, None]
    assert points("cosine_length", sample("4", None), limit=10) == [None]
    texts = ["<think>\\boxed{5}</think> \\boxed{4}", "<think>\\boxed{4}", "<think></think> 5"]
    assert points("reasoning_accuracy", *map(sample, texts)) == [1.0, 0.0, 0.0]


def test_the_shortest_right_answer_of_a_group_gets_the_most():
    group = [sample("4", tokens=10), sample("4", tokens=20), sample("5", tokens=10)]
    group.append(sample("5", tokens=30))
    assert points("length_in_group", *group) == [0.5, 0.0, 0.0, -0.5]
    assert points("length_in_group", sample("4"), sample("5")) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("C", 1), ("(C)", 1), ("The answer is **C**.", 1), ("C. Paris", 1), ("Paris", 1), ("B", 0),
     ("I think it is Paris", 1), ("The answer is a city, Paris", 1), ("It is a mystery", 0),
     ("A or B", 0), ("", 0), ("<answer>c</answer>", 1)],
)  # fmt: skip
def test_multiple_choice_knows_a_letter_and_a_text(text, expected):
    choices = ["Rome", "Berlin", "Paris"]
    for answer in ("C", 2, "Paris"):
        assert points("multiple_choice", sample(text, answer, choices=choices)) == [expected]


@pytest.mark.parametrize(
    ("choices", "answer", "text", "paid"),
    [(["0", "1", "-1", "2"], "B", r"\boxed{-1}", 0), (["0", "1", "-1", "2"], "C", r"\boxed{-1}", 1),
     (["15", "2.5"], "A", "The answer is 1.5", 0), (["15", "1.5"], "B", "1.5", 1),
     (["15", "25"], "B", "It must be 25 in all", 1), (["15", "25"], "B", "It is 25.5 or so", 0),
     (["<", ">", "="], "A", "", 0), (["<", ">", "="], "A", ">", 0), (["<", ">", "="], "B", ">", 1),
     (["5", "+", "7"], "A", "(A)", 1), (["5", "+", "7"], "A", "(B)", 0),
     (["World War 2", "World War 1"], "A", "It was world war 2, I think", 1),
     (["A dog", "the dog", "cat"], "A", "dog", 0)],  # which of the two is not said
)  # fmt: skip
def test_choices_that_differ_in_a_sign_are_others(choices, answer, text, paid):
    assert points("multiple_choice", sample(text, answer, choices=choices)) == [paid]


def test_a_choice_that_is_none_is_said():
    with pytest.raises(UserError, match="the answer 'Madrid' of prompt 0 is no letter"):
        points("multiple_choice", sample("C", "Madrid", choices=["Rome", "Paris"]))


def test_a_theorem_is_paid_for_the_right_verdict():
    samples = [sample(rf"Suppose not. \boxed{{{word}}}", "disproved") for word in
            ("disproved", "Disproved.", "proved", "not proved")]  # fmt: skip
    assert points("exact", *samples, sample("It is disproved? No.", "disproved")) == [1, 1, 0, 0, 0]


def test_answers_in_words():
    completion = sample("<answer>The Big Apple!</answer>", ["big apple", "New York"])
    assert (
        points("exact_match", completion)
        == points("f1", completion)
        == points("contains", completion)
        == [1.0]
    )
    near = sample("a big red apple", "big apple")
    assert points("exact_match", near) == [0.0]
    assert points("f1", near) == [pytest.approx(0.8)]
    assert points("contains", sample("it is the big apple, yes", "big apple")) == [1.0]
    for name in ("exact_match", "f1"):  # of "A" and "+" SQuAD's form leaves nothing
        letters = [sample(text, "A") for text in ("A.", "a", "the", "", "B")]
        assert points(name, *letters) == [1.0, 1.0, 0.0, 0.0, 0.0]
        signs = [sample(text, "+") for text in ("+", "-", "a", "")]
        assert points(name, *signs) == [1.0, 0.0, 0.0, 0.0]
    again = sample("dog dog", "dog dog cat")  # words count as often as they are there
    assert points("f1", again) == [pytest.approx(4 / 5)]
    last = sample("<answer>Rome</answer>, no: <answer>Paris</answer>", "Paris")
    assert points("exact_match", last) == [1.0]
    with pytest.raises(UserError, match=r"rewards\.f1: the answer is \[\]; give a text"):
        points("f1", sample("x", []))


def test_agreement_in_a_group():
    group = [sample(t, None) for t in ("\\boxed{4}", "so 4.0", "\\boxed{5}", "no idea")]
    assert points("majority", *group) == [1, 1, 0, 0]
    tied = [sample(rf"\boxed{{{x}}}") for x in (5, 4, 5, 4)]
    assert points("majority", *tied) == [1, 0, 1, 0]  # of equals the first
    assert points("answer_share", *group) == [0.5, 0.5, 0.25, 0.0]
    assert points("new_answer", *group, floor=0.1) == pytest.approx([2 / 3, 2 / 3, 1, 1])
    assert points("new_answer", group[0], group[0], floor=0.1) == [0.1, 0.1]
    # EMPO's code pays nothing where all answers differ; a band of entropies says nothing outside
    different = [sample(f"\\boxed{{{i}}}") for i in range(3)]
    assert points("answer_share", *different) == [0.0] * 3
    silent = [sample(r"\boxed{4}"), sample("no idea"), sample("none")]  # three classes, too
    assert points("answer_share", *silent) == [0.0] * 3
    assert points("answer_share", *silent, high=1.0) == [None] * 3  # log 3 is 1.1
    entropy = 1.5 * math.log(2)  # of shares 1/2, 1/4, 1/4
    assert points("answer_share", *group, high=entropy - 0.01) == [None] * 4
    assert points("answer_share", *group, high=entropy + 0.01) == [0.5, 0.5, 0.25, 0.0]


def test_language_reflection_and_what_they_refuse():
    samples = [sample(t) for t in ("Ответ: да yes", "yes", "42", "```да``` yes")]
    assert points("language", *samples) == pytest.approx([3 / 10, 1, 1, 1])
    assert points("language", samples[0], scripts=["cyrillic"]) == pytest.approx([0.7])
    with pytest.raises(UserError, match="scripts = 'latn'; did you mean 'latin'"):
        points("language", samples[0], scripts=["latn"])
    assert points("reflection", sample("Wait, let me check."), sample("x"), most=2) == [1.0, 0.0]


RETRIEVER = """
def search(queries):
    return [["p1", "p2", *map(str, range(100))] if "cat" in q else [] for q in queries]
"""


def test_convsearch_pays_by_rank(tmp_path):
    (tmp_path / "search.py").write_text(RETRIEVER)
    samples = [
        sample("<think>x</think>cat food", gold="p1"),
        sample("<think>x</think>cat food", gold=["7", "p2"]),
        sample("<think>x</think>cat food", gold="8"),
        sample("<think>x</think>dog", gold="p1"),
        sample("cat food", gold="p1"),
    ]
    mine = points("convsearch", *samples, retriever=f"{tmp_path}/search.py:search")
    assert mine == pytest.approx([18 / 9, 17 / 9, 89 / 90, 0.0, -0.1])


def test_convsearch_is_stricter_after_a_quarter_of_the_steps(tmp_path):
    """The authors' code (BeastyZ/ConvSearch-R1) with steps."""
    (tmp_path / "search.py").write_text(RETRIEVER)
    samples = [
        sample("<think>x</think>\n<rewrite>cat food</rewrite>", gold=gold, step=step, steps=40)
        for step in (10, 11)
        for gold in ("p1", "7", "8", "97", "98")  # of ranks 1, 10, 11, 100 and 101
    ]
    mine = points("convsearch", *samples, retriever=f"{tmp_path}/search.py:search", curriculum=True)
    early = [1.0, 1 - 9 / 99, 1 - 10 / 99, 0.0, -0.2]
    assert mine == pytest.approx([*early, 1.0, 1 - 9 / 99, 0.0, 0.0, -0.2])


def test_rank_fidelity_is_the_mean_over_the_other_items():
    """Against the formula by hand, over two items of two members each."""
    stated = {0: ("1", "3"), 1: ("4", "4")}
    batch = [sample(text, i + 1, id=i) for i, texts in stated.items() for text in texts]
    mine = points("rank_fidelity", *batch)
    phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))  # noqa: E731
    spread = math.sqrt(2.0 + 0.0 + 1e-6)
    for k, (score, other, g) in enumerate([(1, 4, 0), (3, 4, 0), (4, 2, 1), (4, 2, 1)]):
        p = phi((score - other) / spread)
        expected = math.sqrt(p * g + 1e-6) + math.sqrt((1 - p) * (1 - g) + 1e-6)
        assert mine[k] == pytest.approx(expected, abs=1e-9)
    assert points("rank_fidelity", *batch[:2]) == [0.0, 0.0]


def test_rank_fidelity_over_three_items_one_pair_equal_one_member_silent():
    stated = {0: ("1", "3"), 1: ("4", "none"), 2: ("2", "5")}
    label, numbers = {0: 1, 1: 2, 2: 1}, {0: [1.0, 3.0], 1: [4.0], 2: [2.0, 5.0]}
    mine = points("rank_fidelity", *(sample(t, label[i], id=i) for i in stated for t in stated[i]))
    spread = {i: np.var(q, ddof=1) if len(q) > 1 else 0.0 for i, q in numbers.items()}
    expected = []
    for i, texts in stated.items():
        for text in texts:
            each = []
            for j in stated.keys() - {i} if text != "none" else ():
                z = (float(text) - np.mean(numbers[j])) / math.sqrt(spread[i] + spread[j] + 1e-6)
                p, g = 0.5 * (1 + math.erf(z / 2**0.5)), (np.sign(label[i] - label[j]) + 1) / 2
                each.append(math.sqrt(p * g + 1e-6) + math.sqrt((1 - p) * (1 - g) + 1e-6))
            expected.append(np.mean(each) if each else 0.0)
    assert mine == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [("rank_fidelity", "good", "prompt 0 has the answer 'good'; its label must be a number"),
     ("dynamic_iou", "a box", r"prompt 0 has the answer 'a box'; give \[left, top"),
     ("fapo_critic", "7", "prompt 0 has total_steps = None and the answer '7'; give the number"),
     ("listwise_agreement", "1, 2", "prompt 0 has the answer '1, 2'; give {\"scores\"")],
)  # fmt: skip
def test_a_label_that_cannot_be_read_is_named(name, answer, message):
    with pytest.raises(UserError, match=message):
        points(name, sample("1", answer))


def test_the_last_threshold_of_the_overlap_is_the_highest():
    for step, paid in ((25, 0.97), (26, 0.0)):
        near = sample("[0, 0, 10, 9.7]", [0, 0, 10, 10], step=step, steps=100)
        assert points("dynamic_iou", near) == [pytest.approx(paid)]


def test_a_group_that_agrees_says_nothing_where_entropy_has_a_least():
    sure, split = [sample(r"\boxed{4}")] * 4, [sample(rf"\boxed{{{x}}}") for x in (4, 4, 5, 5)]
    assert points("answer_share", *sure, low=0.1) == [None] * 4
    assert points("answer_share", *split, low=math.log(2) - 1e-6) == [0.5] * 4


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
    silent = [sample("no idea"), sample("none"), *group[:2]]  # two classes of their own
    nats = sum(-p * math.log(p) for p in (0.25, 0.25, 0.5))
    assert points("semantic_entropy", *silent) == pytest.approx([-nats] * 4)


EMBEDDINGS = """
PLACES = {"up": [1, 0], "upwards": [0.9, 0.5], "right": [0.4, 0.9], "down": [-2, 0], "zero": [0, 0]}


def embed(texts):
    return [PLACES[text] for text in texts]


def too_few(texts):
    return [[1.0, 0.0]]
"""


def test_answers_in_words_are_of_a_class_where_embeddings_are_alike(tmp_path):
    """Chains of neighbours are a class: "up" and "right" are too far from each other."""
    (tmp_path / "mine.py").write_text(EMBEDDINGS)
    words = ("up", "<answer>down</answer>", "right", "upwards", "<answer></answer>")
    group, options = [sample(word) for word in words], {"embed": f"{tmp_path}/mine.py:embed"}
    near = options | {"alike": 0.75}
    assert points("majority", *group, **near) == [1, 0, 1, 1, 0]
    assert points("answer_share", *group, **near) == [0.6, 0.2, 0.6, 0.6, 0.0]
    assert points("new_answer", *group, **near) == [0.5, 1.0, 0.5, 0.5, 1.0]
    entropy = -0.6 * math.log(0.6) - 0.4 * math.log(0.2)
    assert points("semantic_entropy", *group, **near) == pytest.approx([-entropy] * 5)
    far = options | {"alike": 0.85}  # cosines are 0.87, 0.80 and 0.41
    assert points("answer_share", *group, **far) == [0.4, 0.2, 0.2, 0.4, 0.0]
    assert points("answer_share", sample("zero"), sample("zero"), **near) == [0.0, 0.0]
    with pytest.raises(UserError, match=r"majority.embed returned shape \(1, 2\) for 2 texts"):
        points("majority", *group[:2], embed=f"{tmp_path}/mine.py:too_few")
    with pytest.raises(UserError, match=r"rewards.answer_share.alike = 0; the least cosine"):
        make_reward("answer_share", alike=0)
    with pytest.raises(UserError, match=r"rewards.new_answer.embed"):
        make_reward("new_answer", embed=f"{tmp_path}/mine.py:nobody")


CLASSIFIER = """
CALLS = []


def like(firsts, seconds):
    CALLS.append(len(firsts))
    pairs = [(a.split("#")[0], b.split("#")[0]) for a, b in zip(firsts, seconds)]
    letters = [({*a} & {*b}) - {" "} for a, b in pairs]
    return [0.25 * len(each) for each in letters]


def one(firsts, seconds):
    return [1.0]
"""


def partition(texts, equivalent):
    """The released code's union of pairs, by a parent for each."""
    parent = list(range(len(texts)))

    def root(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for i in range(len(texts)):
        for j in range(i + 1, len(texts)):
            if equivalent(texts[i], texts[j]) and root(i) != root(j):
                parent[root(i)] = root(j)
    return [root(i) for i in range(len(texts))]


def test_darling_pays_the_share_of_other_classes(tmp_path):
    (tmp_path / "mine.py").write_text(CLASSIFIER)
    options = {"equivalent": f"{tmp_path}/mine.py:like"}
    texts = ["a b c a b c a", "b c d b c d b", "c d e c d e d", "x y z x y z x", "f f f f f f f"]

    def equivalent(a, b):
        return 0.25 * len(({*a} & {*b}) - {" "}) > 0.5

    texts += ["x y z z y x q"]
    roots = partition(texts, equivalent)
    by_hand = [max(0.1, (6 - roots.count(r)) / 5) for r in roots]
    assert points("darling", *map(sample, texts), **options) == pytest.approx(by_hand)
    assert len({*by_hand}) > 1
    # a chain joins the ends of which the classifier says no
    chain = ["a b c d a b c", "b c d e b c d", "d e c f g d e", "f g h f g h c"]
    assert not equivalent(chain[0], chain[2])
    assert points("darling", *map(sample, chain[:3]), **options) == [0.1] * 3
    # short texts are compared by their words, and nobody is asked
    short = [sample(text) for text in ("red dog", "a dog", "one cat here")]
    assert points("darling", *short, **options) == [0.5, 0.5, 1.0]
    one = f"{tmp_path}/mine.py:one"
    assert points("darling", *short, equivalent=one) == [0.5, 0.5, 1.0]
    with pytest.raises(UserError, match="darling.equivalent returned 1 probabilities for 15 pairs"):
        points("darling", *map(sample, texts), equivalent=one)


def test_darling_may_compare_right_answers_alone(tmp_path):
    (tmp_path / "mine.py").write_text(CLASSIFIER)
    options = {"equivalent": f"{tmp_path}/mine.py:like", "right_only": True}
    texts = ("a b c a b c\n#### 4", "a b c c b a\n#### 4", "q r s q r s\n#### 4", "x y z x\n#### 5")
    group = [sample(text) for text in texts]
    assert points("darling", *group, **options) == [0.5, 0.5, 1.0, 0.1]
    assert points("darling", *group[2:], **options) == [0.1, 0.1]  # one that is right is alone


def test_tulu_s_reward_is_10_for_a_verified_answer_and_minus_10_without_an_end():
    truncated = [
        Sample(s.prompt, s.completion, s.tokens, "length") for s in (sample(r"\boxed{4}"),)
    ]
    group = [sample(r"\boxed{4}"), sample(r"\boxed{5}"), *truncated]
    parts = np.array([[points("ended", s)[0], points("math", s)[0]] for s in group])
    total = make_combined("total", "veto", ["ended", "math"], {"below": 1.0, "points": -1.0})
    assert (10 * total.combine(columns(parts))).tolist() == [[10.0, 0.0, -10.0]]
    assert points("ended", truncated[0]) == [0.0]


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

    mine, demonstration_parts = ["abba", "cd", "hh h"], ["ab", "dc e"]
    encoder = f"{tmp_path}/letters.py:encode"
    samples = [
        sample("abba. cd; hh h!", "ab\ndc e?"),
        sample("...", "ab"),
        sample("a", 1, note="a"),
    ]
    ours = points("demonstration_similarity", *samples, encoder=encoder)
    expected = np.mean(
        [max(cosine(vector(a), vector(b)) for b in demonstration_parts) for a in mine]
    )
    assert ours[0] == pytest.approx(expected, abs=1e-9)
    assert 0.3 < expected < 0.9
    assert ours[1] is None
    by_column = points("demonstration_similarity", samples[2], encoder=encoder, column="note")
    assert by_column == [pytest.approx(1.0)]
    with pytest.raises(UserError, match="encoder returned 1 vectors for 2 texts"):
        points("demonstration_similarity", sample("a", "b"), encoder=f"{tmp_path}/letters.py:short")


def test_listed_solutions_have_the_points_that_the_row_says():
    row = {"solutions": ["a b", " c"], "equivalent": [True, False]}
    samples = [sample("a b\n", **row), sample("c", **row), sample("d", **row), sample("a")]
    assert points("listed_solution", *samples) == [1.0, 0.0, None, None]
    with pytest.raises(UserError, match="prompt 0 has 2 solutions and 1 equivalent"):
        points("listed_solution", sample("c", **(row | {"equivalent": [True]})))


EMBED = """
def letters(texts):
    return [[text.count(c) / 2 for c in "catdog"] for text in texts]


def too_few(texts):
    return [[1.0]]
"""


def relevance(one, other):
    return sum(one.count(c) / 2 * other.count(c) / 2 for c in "catdog")


def test_r3_is_the_released_code_s(tmp_path):
    """Relevance to the question times length, or to the reference on a fixed scale, in loops."""
    (tmp_path / "embed.py").write_text(EMBED)
    texts = ["a cat, a cat, a cat!", "dog", "cats and dogs sat together.", ""]
    words = [["a", "cat", ",", "a", "cat", ",", "a", "cat", "!"], ["dog"]]
    words += [["cats", "and", "dogs", "sat", "together", "."], []]
    options = {"embed": f"{tmp_path}/embed.py:letters", "limit": 700}
    question = "do cats dig"
    for kind, reference in (
        ("OPENENDED", question),
        ("CONSTRAINED", "a good cat"),
        (None, question),
    ):
        meta = {"qtype": kind, "reference": "a good cat"}
        prompt = Prompt(0, question, np.zeros(1, np.int32), "4", meta)
        group = [Sample(prompt, text, np.zeros(3, np.int32), "stop_token") for text in texts]
        for text, split, mine in zip(texts, words, points("r3", *group, **options), strict=True):
            trigrams = [tuple(split[i : i + 3]) for i in range(len(split) - 2)]
            distinct = len(set(trigrams)) / len(trigrams) if trigrams else 1.0
            scale = 7 / 3.5 if kind == "CONSTRAINED" else len(split) / 100
            assert mine == pytest.approx(scale * relevance(reference, text) * distinct)


def test_r3_names_what_is_missing(tmp_path):
    (tmp_path / "embed.py").write_text(EMBED)
    good = {"embed": f"{tmp_path}/embed.py:letters"}
    with pytest.raises(UserError, match="prompt 0 has no 'reference' and no answer"):
        points("r3", sample("cat", answer=None, qtype="CONSTRAINED"), **good)
    with pytest.raises(UserError, match=r"r3.embed returned shape \(1, 1\) for 3 texts"):
        points("r3", sample("cat"), sample("dog"), embed=f"{tmp_path}/embed.py:too_few")
    with pytest.raises(UserError, match="rewards.r3.embed"):
        make_reward("r3", embed=f"{tmp_path}/embed.py:nobody")


def test_a_chain_is_paid_by_its_length():
    group = [sample(tokens=n) for n in (0, 5, 20, 21)]
    assert points("chain_length", *group, limit=20) == [0.0, 0.25, 1.0, 1.0]
    with pytest.raises(UserError, match="rewards.chain_length.limit = 0; must be at least 1"):
        make_reward("chain_length", limit=0)


def test_speed_is_time_saved_beside_the_row_s_program(monkeypatch):
    """perf = 1 - T_y / T_x of each test's least time, of programs that pass all tests."""
    from jrl.verifiers.code import Verdicts
    from jrl.zoo.rewards import speed

    rng = np.random.default_rng(0)
    spent = {"slow": rng.uniform(2.0, 3.0, 6), "fast": rng.uniform(0.1, 1.0, 6)}
    spent["near"] = spent["slow"] * 0.95

    def judge(program, tests, language, limits):
        assert len(tests.cases) == 6  # two tests, three times
        passed = [True, program != "half"] * 3
        notes = ["ok ''"] * 6 if program != "cut" else ["ok ''", "timeout ''"]
        return Verdicts(passed, notes, seconds=tuple(spent.get(program, [0.1] * 6)))

    monkeypatch.setattr(speed, "judge", judge)
    columns = {"input": "slow", "answer": {"inputs": ["1", "2"], "outputs": ["1", "2"]}}
    names = ("fast", "near", "slow", "half")
    mine = points("code_speed", *(sample(name, **columns) for name in names))
    least = {k: min(x[0], x[2], x[4]) + min(x[1], x[3], x[5]) for k, x in spent.items()}
    saved = 1 - least["fast"] / least["slow"]
    assert mine == pytest.approx([1 + saved, 1.0, 1.0, 0.5])
    (near,) = points("code_speed", sample("near", **columns), least=0.01)
    assert near == pytest.approx(1.05)
    assert points("code_speed", sample("fast", **(columns | {"input": "cut"}))) == [None]
    with pytest.raises(UserError, match="prompt 0 has no program in 'src'"):
        points("code_speed", sample("fast", **columns), slow="src")
    with pytest.raises(UserError, match="its program in 'input' passes 3 of 6 runs"):
        points("code_speed", sample("fast", **(columns | {"input": "half"})))
    with pytest.raises(UserError, match="repeats = 0 must be at least 1"):
        make_reward("code_speed", repeats=0)
