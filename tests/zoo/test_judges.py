"""Forms of judging of single papers, and the rewards that judges are trained by."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jrl.config.judge import Criterion, JudgeTable, checked
from jrl.errors import UserError
from jrl.judging.judges import Judge
from jrl.judging.limits import COUNTS
from jrl.rewards import make_reward
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import check_template
from jrl.rewards.rules import Rules
from jrl.rewards.verdicts import make_form, rubric_score
from jrl.types import Prompt
from jrl.zoo.rewards.rubrics import rubicon_form, rubicon_score


class Toy:
    """A judge that is a function of the last message and the vote."""

    def __init__(self, reply):
        self.reply, self.prompts = reply, []

    def verdicts(self, requests):
        texts = [each.question.messages[-1]["content"] for each in requests]
        self.prompts += texts
        replies = [self.reply(text, each.vote) for text, each in zip(texts, requests, strict=True)]
        read = [each.question.read(reply) for each, reply in zip(requests, replies, strict=True)]
        return read, dict.fromkeys(COUNTS, 0.0) | {"judge_calls": float(len(requests))}


def sample(completion, answer="4", row=0, step=0, **meta):
    prompt = Prompt(row, "2+2?", np.zeros(1, np.int32), answer, meta, question="2+2?")
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token", step=step, steps=9)


def points_of(units, reply, **options):
    """Points of units of samples by a toy judge, and the judge."""
    table = checked(
        JudgeTable, "rewards.good", {"url": "http://localhost:1", "model": "m"} | options
    )
    toy = Toy(reply)
    judge = Judge(table, make_form(table, "rewards.good"), Rules(), toy)
    return judge.points(units), toy


# ---------------------------------------------------------------- BRPO


def by_length(text, vote):
    """The longer of two answers is better."""
    first, second = (text.split(f"Answer {x}:\n")[1].split("\n\n")[0] for x in "AB")
    return json.dumps({"scores": [len(first), len(second)]})


def test_brpo_compares_each_with_one_of_its_group():
    texts = ["aaa", "a", "aaaa", "aa", "aa"]
    for step in range(6):
        group = [sample(text, step=step) for text in texts]
        ([points], counts), _toy = points_of([group], by_length, form="brpo")
        (at,) = [i for i, value in enumerate(points) if value is None]
        assert counts["judge_calls"] == 8  # both orders of four pairs
        wins = [1.0 if len(t) > len(texts[at]) else -1.0 for t in texts]
        assert points == [None if i == at else win for i, win in enumerate(wins)]
        assert points_of([group], by_length, form="brpo")[0][0] == [points]  # the same reference
    references = {
        points_of([[sample(t, step=s) for t in texts]], by_length, form="brpo")[0][0][0].index(None)
        for s in range(20)
    }
    assert len(references) > 2  # drawn anew in every step
    # a judge that likes the first of two has no winner, and one that is not asked twice has
    likes_first = lambda text, vote: '{"scores": [9, 1]}'  # noqa: E731
    both = points_of([group], likes_first, form="brpo")[0][0][0]
    assert sorted(set(both) - {None}) == [-1.0]
    once = points_of([group], likes_first, form="brpo", swap=False)[0][0][0]
    assert sorted(set(once) - {None}) == [1.0]
    assert points_of([group], lambda *_: "A", form="brpo")[0][0] == [[None] * 5]


# ---------------------------------------------------------------- RLAIF-V


def claims_of(text, vote):
    """Claims are words; "b" and "c" are not so, and of "d" one vote of three is."""
    if "Verdict:" not in text:
        words = text.split("Answer:\n")[1].split("\n\n")[0]
        return "no list" if words == "x" else json.dumps({"claims": words.split()})
    claim = text.split("claims something. ")[1].split("\n\n")[0]
    if claim == "?":
        return "perhaps"
    return f"Verdict: {'yes' if claim == 'a' or (claim == 'd' and vote == 0) else 'no'}"


def test_rlaif_v_counts_rejected_claims():
    texts = ["a b c", "a a", "a d", "x", "a ?"]
    options = {"form": "rlaif_v", "votes": 3, "temperature": 1.0}
    (points, counts), toy = points_of([[sample(t)] for t in texts], claims_of, **options)
    assert points == [[-2.0], [0.0], [-1.0], [None], [None]]
    assert counts["judge_calls"] == 15 + 3 * (3 + 2 + 2 + 0 + 2)
    even = {"form": "rlaif_v", "votes": 2, "temperature": 1.0}
    assert points_of([[sample("a d")]], claims_of, **even)[0][0] == [[0.0]]  # half is no rejection
    single = "A reply to it claims something. b"
    assert any(single in text and "a b c" not in text for text in toy.prompts)  # asked alone


# ---------------------------------------------------------------- CAPO


def test_capo_costs_a_point_at_every_token_of_a_wrong_step():
    """The second token is of both steps, and belongs to the worse one."""
    text = "aa\n\nbbbb\n\nc"
    one = dataclasses.replace(sample(text), tokens=np.arange(5), ends=np.array([2, 6, 9, 10, 11]))
    lists = ("[1]", "[1, 2]", "[1, 3]", "[1, 2]")
    for vote, points in {
        "majority": [-1.0, -1.0, -0.5, -0.5, 0.0],
        "mean": [-1.0, -1.0, -0.5, -0.5, -0.25],
        "min": [-1.0, -1.0, 0.0, 0.0, 0.0],
    }.items():
        more = {"form": "capo", "votes": 4, "temperature": 1.0, "vote": vote}
        reply = lambda text, vote: f'{{"wrong": {lists[vote]}}}'  # noqa: E731
        assert points_of([[one]], reply, **more)[0][0] == [[points]]
    assert points_of([[one]], lambda *_: '{"wrong": []}', form="capo")[0][0] == [[[0.0] * 5]]


# ---------------------------------------------------------------- FAPO


def test_fapo_finds_the_first_wrong_step():
    def reply(text, vote):
        assert "[step 0]\nfirst" in text
        assert "Right answer:\n4" in text
        last = text.split("[step 1]\n")[1].split("\n")[0]
        steps = {"wrong": "It is \\boxed{1}", "right": "\\boxed{-1}", "late": "\\boxed{0}"}
        return steps.get(last, "\\boxed{7}")

    units = [[sample(f"first\n\n{last}")] for last in ("wrong", "right", "late", "neither")]
    (points, _), _ = points_of(units, reply, form="fapo", only="math")
    assert points == [[1.0], [0.0], [1.0], [None]]  # there is no seventh step


def test_the_critic_of_fapo_is_paid_for_the_distance():
    pay = make_reward("fapo_critic", "rewards.fapo_critic")
    cases = (
        *((-1, "-1", 1.0), (-1, "2", -1.0), (2, "-1", -1.0)),
        *((2, "2", 1.0), (2, "0", 1 - 2 / 5), (2, "9", -1.0), (2, "two", -1.0)),
    )
    for label, stated, points in cases:
        reply = sample(f"It is \\boxed{{{stated}}}.", answer=label, total_steps=5)
        assert pay([reply]) == [pytest.approx(points, abs=1e-12)]


# ---------------------------------------------------------------- RewardAnything


def test_reward_anything_scores_a_group_by_a_principle():
    def reply(text, vote):
        assert "Principle: be short" in text
        answers = json.loads(text.split("Responses: ")[1].split("\n\n")[0])
        assert next(iter(answers.values())) == ["a", "bb", "cccc"][vote]  # each begins with another
        scores = {name: 6 - len(answer) for name, answer in answers.items()}
        return json.dumps({"scores": scores, "best-to-worst": sorted(scores)})

    group = [sample(text) for text in ("a", "bb", "cccc")]
    more = {"principle": "be short", "votes": 3, "temperature": 1.0}
    (points, _), _ = points_of([group], reply, form="reward_anything", **more)
    assert points == [[1.0, 0.75, 0.25]]
    four = json.dumps({"scores": {f"model-{i}": 3 for i in range(1, 5)}})  # of three members
    for bad in ('{"scores": {"model-1": 3, "model-2": 4}}', four, '{"scores": [1, 2, 3]}', "none"):
        assert points_of([group], lambda *_, bad=bad: bad, form="reward_anything")[0][0] == [
            [None] * 3
        ]


def agreement(scores, labels):
    """The released formula, in float64, by loops over all pairs."""
    loss = total = np.float64(0)
    for i in range(len(scores)):
        for j in range(i):
            weight = 1 + abs(labels[i] - labels[j])
            total += weight
            order = np.sign(scores[i] - scores[j]) * np.sign(labels[i] - labels[j])
            tie = scores[i] == scores[j] and labels[i] != labels[j]
            loss += weight * (order < 0) + weight * 0.5 * tie
    return 1 - loss / total


def test_listwise_agreement_is_the_released_formula():
    pay = make_reward("listwise_agreement", "rewards.listwise_agreement")
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = rng.integers(1, 6, (2, 4))
        names = [f"model-{i}" for i in range(4)]
        as_json = [json.dumps({"scores": dict(zip(names, x.tolist(), strict=True))})
                   for x in (scores, labels)]  # fmt: skip
        (points,) = pay([sample(as_json[0], answer=as_json[1])])
        assert points == pytest.approx(agreement(scores, labels), abs=1e-12)
    assert pay([sample("no scores", answer=as_json[1])]) == [0.0]


def test_a_judge_that_leaves_scores_out_is_paid_nothing():
    pay = make_reward("listwise_agreement", "rewards.listwise_agreement")
    label = json.dumps({"scores": {"a": 1, "b": 5}})
    for scores in ("{}", '{"a": 1}', '{"a": 1e999, "b": 1e999}', '{"a": true, "b": 5}'):
        assert pay([sample(f'{{"scores": {scores}}}', answer=label)]) == [0.0]
    assert pay([sample('{"scores": {"a": 2, "b": 3, "c": null}}', answer=label)]) == [1.0]


# ---------------------------------------------------------------- RISE-Judge, FARE


@pytest.mark.parametrize(
    ("form", "label", "right", "wrong"),
    [
        ("pairwise", "A", "Both are fine. [[A]]", "[[B]]"),
        ("yes_no", "no", "Verdict: no", "Verdict: yes"),
        ("score", "7", "Score: 7", "Score: 8"),
        ("step", -1, "\\boxed{-1}", "\\boxed{0}"),
        ("step", 2, "\\boxed{2}", "\\boxed{1}"),  # the first wrong one, not any
        ("listwise", [2, 1, 3], '{"ranking": [2, 1, 3]}', '{"ranking": [1, 2, 3]}'),
        ("listwise", [2, 1, 3], '{"ranking": [2, 1, 3]}', '{"ranking": [2, 3, 1]}'),
    ],
)
def test_a_judge_is_paid_for_the_label(form, label, right, wrong):
    pay = make_reward("judge_verdict", "rewards.judge_verdict", form=form)
    assert [pay([sample(r, answer=label)])[0] for r in (right, wrong, "A B yes 7")] == [1, 0, 0]


def test_a_label_that_is_no_verdict_is_named():
    pay = make_reward("judge_verdict", "rewards.judge_verdict", form="yes_no")
    with pytest.raises(UserError, match="prompt 3 has the answer 'perhaps', which is no verdict"):
        pay([sample("Verdict: yes", answer="perhaps", row=3)])


# ---------------------------------------------------------------- SRPO


def reflected(first, second, reflection="hm", pad=0):
    parts = (("think", "t" * 9), ("answer", first), ("reflection", reflection + " " * pad))
    parts += (("think", "t" * 9), ("answer", second))
    return "".join(f"<{n}>{text}</{n}>" for n, text in parts)


def test_srpo_pays_what_reflection_makes_of_an_answer():
    pay = make_reward("srpo", "rewards.srpo", form=0.5, length=0.0)
    cases = {("5", "4"): 1.0, ("4", "4"): 0.75, ("4", "5"): 0.25, ("5", "5"): 0.0}
    for (first, second), effect in cases.items():
        assert pay([sample(reflected(first, second))]) == [effect + 0.5]
        assert pay([sample(reflected(first, second) + "<reflection>")]) == [effect]
        assert pay([sample("<reflection>" + reflected(first, second))]) == [effect]
    assert pay([sample("<think>t</think><answer>4</answer>")]) == [0.5]
    assert pay([sample("4")]) == [0.0]


def test_the_length_of_a_reflection_has_a_target():
    with_length, bare = (make_reward("srpo", "rewards.srpo", length=x) for x in (0.1, 0.0))
    near = reflected("4", "4").replace("t" * 9, "t" * 400)
    ratio = len(near) / 401
    assert 2.1 < ratio < 2.4
    (a,), (b,) = with_length([sample(near)]), bare([sample(near)])
    assert a - b == pytest.approx(0.1 * math.exp(-(((ratio - 2) / 0.5) ** 2)), abs=1e-12)
    for pad in (0, 30):
        text = reflected("4", "4", pad=pad)
        ratio = len(text) / 10  # nine letters of thought, and the answer
        points = 0.1 * math.exp(-(((ratio - 2) / 0.5) ** 2))
        (a,), (b,) = with_length([sample(text)]), bare([sample(text)])
        assert a - b == pytest.approx(points, abs=1e-12)
    near = make_reward("srpo", "rewards.srpo", target=ratio, most=ratio + 1)
    assert near([sample(text)])[0] - b == pytest.approx(0.1, abs=1e-12)


# ---------------------------------------------------------------- Rubicon


def rubicon_by_hand(met, weights, a, b, c):
    """The docstring's formula in loops."""
    s = [(1 - math.exp(-a * m)) / (1 - math.exp(-a)) for m in met]
    pairs = [(j, k) for k in range(len(met)) for j in range(k)]
    u = sum(w * x for w, x in zip(weights, s, strict=True)) / sum(weights)
    both = sum(weights[j] * weights[k] for j, k in pairs)
    v = sum(weights[j] * weights[k] * s[j] * s[k] for j, k in pairs) / both
    return ((1 - b) * u + b * v) ** c


def test_rubicon_sums_up_by_the_formula_of_its_docstring():
    draw = np.random.default_rng(0)
    for _ in range(20):
        met, weights = draw.random(4), draw.random(4) + 0.1
        rubric = [Criterion(text="x", weight=w) for w in weights]
        a, b, c = draw.random() * 4 + 0.1, draw.random(), 1 + 2 * draw.random()
        points = rubicon_score(met, rubric, a, b, c)
        assert points == pytest.approx(rubicon_by_hand(met, weights, a, b, c), abs=1e-12)
        plain = rubicon_score(met, rubric, saturation=1e-6, interaction=0.0, shaping=1.0)
        assert plain == pytest.approx(rubric_score(met, rubric), abs=1e-5)


def test_each_of_rubicons_four_does_what_the_paper_says():
    two = [Criterion(text="x"), Criterion(text="y")]
    assert rubicon_score([1, 1], [two[0], Criterion(text="y", veto=True)]) == 1
    assert rubicon_score([1, 0.4], [two[0], Criterion(text="y", veto=True)]) == 0
    # diminishing returns: one criterion whole is worth less than both by half, or by pairs less yet
    alone = {"interaction": 0.0, "shaping": 1.0}
    assert rubicon_score([1, 0], two, **alone) < rubicon_score([0.5, 0.5], two, **alone)
    assert rubicon_score([1, 0], two, 1e-6, 0.2, 1.0) < rubicon_score([1, 0], two, 1e-6, 0.0, 1.0)
    # the best are farther apart than others
    high = rubicon_score([1, 1], two, 1e-6, 0, 2.0) - rubicon_score([0.9, 0.9], two, 1e-6, 0, 2.0)
    low = rubicon_score([0.2, 0.2], two, 1e-6, 0, 2.0) - rubicon_score(
        [0.1, 0.1], two, 1e-6, 0, 2.0
    )
    assert high > 0.15 > 0.04 > low
    minus = [*two, Criterion(text="z", weight=-1.0)]
    assert rubicon_score([1, 1, 1], minus) < rubicon_score([1, 1, 0], minus) == 1
    assert rubicon_score([0.5], two[:1], 1e-6, 0.9, 1.0) == pytest.approx(0.5, abs=1e-6)  # no pair


def test_a_critic_gives_levels_that_rubicon_sums_up():
    levels = ["dull", "fair", "vivid"]
    criteria = [{"text": "vivid", "levels": levels}, {"text": "praises itself not", "veto": True}]
    units = [[sample("good")], [sample("proud")]]

    def reply(text, vote):
        return json.dumps({"1": 1, "2": "proud" not in text})

    (points, _), _ = points_of(units, reply, form="rubicon", criteria=criteria)
    rubric = [Criterion(**each) for each in criteria]
    assert [x for (x,) in points] == [rubicon_score([0.5, 1.0], rubric), 0.0]
    sharper = rubicon_form(shaping=4.0)(checked(JudgeTable, "k", options_of(criteria)), "k")
    (more,) = sharper.points(units[0], [[[0.5, 1.0]]])
    assert more < points[0][0]


def options_of(criteria):
    return {"url": "http://localhost:1", "model": "m", "form": "rubicon", "criteria": criteria}


# ---------------------------------------------------------------- Datarus-R1


def test_steps_and_the_whole_count_in_equal_shares():
    units = [[sample("load\n\nfit\n\nsay")], [sample("one")], [sample("\n")]]

    def reply(text, vote):
        many = "in 3 steps" in text and "[step 3]\nsay" in text
        return json.dumps({"steps": [1, 5, 3] if many else [2], "whole": 4})

    options = {"form": "datarus", "scale": [1, 5]}
    (points, counts), _ = points_of(units, reply, **options)
    by_hand = [((np.mean(s) + 4) / 2 - 1) / 4 for s in ([1, 5, 3], [2])]
    assert [x for (x,) in points[:2]] == pytest.approx(by_hand, abs=1e-12)
    assert points[2] == [None]
    assert counts["judge_calls"] == 2
    wrong = ('{"steps": [1, 2], "whole": 3}', '{"steps": [9]}', '{"steps": [9], "whole": 3}', "4")
    for answer in wrong:
        (points, _), _ = points_of(units[1:2], lambda text, vote, answer=answer: answer, **options)
        assert points == [[None]]


def test_the_steps_of_an_episode_are_its_turns():
    turns = [("assistant", "import x"), ("tool", "error"), ("assistant", "so 4")]
    messages = tuple({"role": role, "content": text} for role, text in turns)
    unit = [dataclasses.replace(sample("so 4"), messages=messages)]
    prompts = []

    def reply(text, vote):
        prompts.append(text)
        return '{"steps": [10, 1], "whole": 10}'

    (points, _), _ = points_of([unit], reply, form="datarus")
    assert points == [[pytest.approx((5.5 + 10) / 2 / 9 - 1 / 9, abs=1e-12)]]
    assert "Step 1: import x\n\ntool: error\n\nStep 2: so 4" in prompts[0]


# ---------------------------------------------------------------- PTA-GRPO


def test_a_plan_is_worth_the_share_of_its_solutions_that_are_right():
    """Against the mean by hand; the solver of these tests is right in as many votes of four."""
    right = {"add": 3, "guess": 1, "halve": 0}
    plans = [f"<plan> {p} </plan><think>?</think><answer>9</answer>" for p in right]

    def reply(text, vote):
        (plan,) = [p for p in right if "plan, and end" in text and p in text]
        return (
            "no idea"
            if vote == 3 and plan == "halve"
            else f"So \\boxed{{{4 if vote < right[plan] else 5}}}"
        )

    bare = ["4", "<plan>a</plan><plan>b</plan>4", "<plan> </plan>4"]
    units = [[sample(text)] for text in plans + bare]
    options = {"form": "pta_plan", "votes": 4, "temperature": 1.0}
    (points, counts), toy = points_of(units, reply, **options)
    expected = [np.mean([float(vote < n) for vote in range(4)]) for n in right.values()]
    assert [x for (x,) in points] == [*expected, 0.0, 0.0, 0.0]
    assert counts["judge_calls"] == 12  # nothing is asked about completions without a plan
    assert all(
        "2+2?" in text and "9" not in text for text in toy.prompts
    )  # the plan alone is shown


def test_the_policy_solves_by_plans_where_a_configuration_says_so():
    options = {"model": "policy", "form": "pta_plan", "votes": 4, "temperature": 1.0}
    table = checked(JudgeTable, "rewards.plan", options)
    assert table.local
    with pytest.raises(UserError, match="rewards.plan.votes = 4 with temperature = 0"):
        checked(JudgeTable, "rewards.plan", options | {"temperature": 0.0})
    with pytest.raises(UserError, match="write {plan} into it"):
        check_template(
            checked(JudgeTable, "rewards.plan", options | {"template": "x"}), (), "rewards.plan"
        )
