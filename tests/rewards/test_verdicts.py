"""Verdicts of judges: what is asked, what is read of replies, and the points made of them."""

import dataclasses

import numpy as np
import pytest

from jrl.config.judge import JudgeTable, checked, criteria_of
from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import check_template
from jrl.rewards.replies import (
    read_criteria,
    read_object,
    read_preference,
    read_ranking,
    read_score,
    read_step,
    read_steps,
    read_yes_no,
)
from jrl.rewards.verdicts import check_rubrics, make_form
from jrl.types import Prompt

WHERE = {"url": "http://localhost:1/v1", "model": "m"}


def sample(completion, answer="4", meta=None, messages=(), row=0):
    prompt = Prompt(row, "<user>2 + 2?", np.zeros(1, np.int32), answer, meta or {}, question="2+2?")
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token", messages)


def table(**options):
    return checked(JudgeTable, "rewards.good", WHERE | options)


def points_of(samples, reply, **options):
    """Points of a unit of samples by a judge that is a function of the question's text."""
    form = make_form(table(**options), "rewards.good")
    votes = range(options.get("votes", 1))
    questions_by_vote = [form.questions(samples, vote) for vote in votes]
    read = [
        [q.read(reply(q.messages[-1]["content"])) for q in questions]
        for questions in questions_by_vote
    ]
    readable = [[v for v in each if v is not None] for each in zip(*read, strict=True)]
    return form.points(samples, readable)


@pytest.mark.parametrize(
    ("reply", "points"),
    [
        ("Fine.\nScore: 7", 0.7),
        ("**Score: 7**", 0.7),
        ("score = 7.5/10.", 0.75),
        ("Final score: 0", 0.0),
        ("[[10]]", 1.0),
        ('```json\n{"reason": "a {b} c", "score": 3}\n```', 0.3),
        ("<think>Score: 1</think>Score: 2", 0.2),
        ("```\nScore: 7\n```", 0.7),
        ("\u8a55\u5206\uff1a7", None),
        ("<think>I would say\nScore: 9", None),  # it did not come to an end
        ("Score: 7/5", None),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: seven", None),
        ("Score: 7\nBut it is late.", None),
        ("[[7]] or [[8]], I cannot say", None),
        ('{"score": 3, "score": 9}', None),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ('{"score": 1e999}', None),
        ('{"score": 3, "rating": 4}', None),
        ('{"reasons": {"score": 9}', None),  # cut: what is inside is not the verdict
        ('{"x": ' * 100_000 + "}", None),
        ("7", None),
        ("", None),
    ],
)
def test_a_score_is_read_strictly(reply, points):
    assert read_score(reply, 0, 10) == points


@pytest.mark.parametrize(
    ("read", "reply", "verdict"),
    [
        (read_yes_no, "It holds.\nYes.", 1.0),
        (read_yes_no, '{"verdict": "no"}', 0.0),
        (read_yes_no, "[[yes]]", 1.0),
        (read_yes_no, "Yes, I think so, but", None),
        (read_preference, "Verdict: tie", 0.5),
        (read_preference, '{"better": "B"}', 0.0),
        (read_preference, "A", None),
        (lambda r: read_ranking(r, 3), "[[3 > 1 > 2]]", [2, 0, 1]),
        (lambda r: read_ranking(r, 3), '{"ranking": [1, 2]}', None),
        (lambda r: read_ranking(r, 2), '{"ranking": [1, true]}', None),
        (lambda r: read_ranking(r, 2), '{"ranking": [0, 1]}', None),
        (lambda r: read_criteria(r, 2), '{"criteria": {"1": "yes", "2": 0.5}}', [1.0, 0.5]),
        (lambda r: read_criteria(r, 2), '{"1": true, "2": 7}', None),
        (lambda r: read_criteria(r, 1), '{"1": true, "2": true}', None),
        (lambda r: read_criteria(r, 1), "1: true", None),
        (read_object, '{"scores": [NaN, 3]}', None),  # no JSON, and as a number a tie
        (lambda r: read_steps(r, 2), '{"wrong": [2, 2]}', [2]),
        (lambda r: read_steps(r, 2), '{"wrong": [0]}', None),
        (lambda r: read_steps(r, 2), '{"wrong": 1}', None),
        (lambda r: read_step(r, 2), "\\boxed{0}, no: \\boxed{1}.", 1),
        (lambda r: read_step(r, 2), "<think>\\boxed{0}</think>All is right.", None),
    ],
)
def test_other_verdicts_are_read_strictly(read, reply, verdict):
    assert read(reply) == verdict


def with_ends(text, ends):
    return dataclasses.replace(sample(text), tokens=np.arange(len(ends)), ends=np.array(ends))


def test_wrong_steps_are_paid_at_the_tokens_that_end_them():
    """Three steps of the text, in seven tokens; the last is the stop token."""
    one = with_ends("aa bb\n\nc\n \ndd", [2, 5, 8, 9, 12, 13, 13])
    prompts = []
    reply = lambda text: prompts.append(text) or 'Bad. {"wrong": [1, 3]}'  # noqa: E731
    assert points_of([one], reply, form="steps") == [[0, 0, -1, 0, 0, -1, 0]]
    assert "[step 1]\naa bb\n\n[step 2]\nc\n\n[step 3]\ndd" in prompts[0]
    left = iter(['{"wrong": [1]}', '{"wrong": [1, 2]}', '{"wrong": [4]}', "none"])
    votes = {"form": "steps", "votes": 4, "temperature": 1.0}
    assert points_of([one], lambda text: next(left), **votes) == [[0, 0, -1, 0, -0.5, 0, 0]]
    assert points_of([one], lambda text: '{"wrong": []}', form="steps") == [[0] * 7]
    # where nothing was said, or it is not known where tokens end, there is no opinion
    nothing, unknown = with_ends("\n\n", [1, 2]), sample("aa")
    assert points_of([nothing], reply, form="steps") == [None]
    assert points_of([unknown], lambda text: '{"wrong": [1]}', form="steps") == [None]


def test_the_fields_of_a_template_are_filled():
    prompts = []
    messages = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "go on"})
    template = "{question}|{completion}|{conversation}|{reference}|{principle}|{level}|{high}"
    one = sample("{reference}", meta={"level": 3}, messages=messages)
    reply = lambda text: prompts.append(text) or "Score: 3"  # noqa: E731
    options = {"template": template + ' {"score": 1}', "principle": "be kind", "scale": [1, 5]}
    assert points_of([one], reply, **options) == [0.5]
    spoken = "user: 2+2?\n\nassistant: a\n\nuser: go on"
    # what a completion holds is not filled in, and braces of JSON stay
    assert prompts == [f'2+2?|{{reference}}|{spoken}|4|be kind|3|5 {{"score": 1}}']


def test_votes():
    left = iter(["Score: 10", "no number", "Score: 10", "Score: 1"])
    points = points_of([sample("a")], lambda text: next(left), votes=4, temperature=1.0)
    assert points == [pytest.approx(2 / 3)]  # of the three that can be read
    left = iter(["yes", "no", "yes"])
    more = {"form": "yes_no", "votes": 3, "vote": "majority", "temperature": 1.0}
    assert points_of([sample("a")], lambda text: next(left), **more) == [1.0]
    assert points_of([sample("a")], lambda text: "perhaps", **more) == [None]


def test_a_rubric_has_weights_and_vetoes():
    criteria = [
        {"text": "right", "weight": 2.0},
        {"text": "short"},
        {"text": "rude", "weight": -3.0},
        {"text": "honest", "weight": 1.0, "veto": True},
    ]

    def points(*met):
        reply = "{" + ", ".join(f'"{i}": {str(m).lower()}' for i, m in enumerate(met, 1)) + "}"
        return points_of([sample("a")], lambda text: reply, form="rubric", criteria=criteria)[0]

    assert points(True, False, False, True) == 3 / 4
    assert points(True, True, False, True) == 1
    assert points(True, True, True, True) == 1 / 4
    assert points(False, False, True, True) == 0  # bounded
    assert points(True, True, False, False) == 0  # the veto
    assert points(True, True, False) is None
    prompts = []
    points_of([sample("a")], lambda t: prompts.append(t) or "", form="rubric", criteria=criteria)
    assert "1. right\n2. short\n3. rude\n4. honest" in prompts[0]


def test_a_criterion_may_have_levels():
    criteria = [{"text": "vivid", "levels": ["flat", "plain", "vivid"], "weight": 3}, "short"]
    prompts, options = [], {"form": "rubric", "column": "rubric"}
    one = [sample("a", meta={"rubric": criteria})]
    for level, met in ((0, 0.0), (1, 0.5), (2, 1.0)):
        reply = f'{{"1": {level}, "2": true}}'
        points = points_of(one, lambda t, reply=reply: prompts.append(t) or reply, **options)
        assert points == [(3 * met + 1) / 4]
    assert "1. vivid (give its level; 0: flat; 1: plain; 2: vivid)\n2. short" in prompts[0]
    for level in ("3", "true", "0.5", "-1"):
        assert points_of(one, lambda t, x=level: f'{{"1": {x}, "2": true}}', **options) == [None]
    with pytest.raises(UserError, match=r"criterion 'x' has levels \['a'\]; give two"):
        table(form="rubric", criteria=[{"text": "x", "levels": ["a"]}])


def test_a_comparison_may_go_by_criteria():
    rubric = [{"text": "one", "veto": True}, {"text": "two"}]
    units = [
        sample("a", answer="b", meta={"rubric": r}, row=i) for i, r in enumerate((rubric, None))
    ]
    prompts, options = [], {"form": "pairwise", "column": "rubric"}
    points_of(units, lambda text: prompts.append(text) or "[[A]]", **options)
    assert len(prompts) == 2  # both orders of the row that has criteria
    assert (
        "?\n\nBy these criteria, hard ones first:\n1. (hard) one\n2. two\n\nAnswer A" in prompts[0]
    )
    points_of(units[:1], lambda text: prompts.append(text) or "[[A]]", form="pairwise")
    assert "By these" not in prompts[-1]
    with pytest.raises(UserError, match="column with form = .score."):
        table(column="rubric")


def test_a_row_may_have_a_rubric_of_its_own():
    rows = [["cites"], [{"text": "cites", "weight": 1.0}, {"text": "long", "weight": 3.0}], None]
    samples = [sample("a", meta={"rubric": r}, row=i) for i, r in enumerate(rows)]
    reply = lambda text: '{"1": true, "2": false}' if "2. long" in text else '{"1": true}'  # noqa: E731
    options = {"form": "rubric", "column": "rubric"}
    assert points_of(samples, reply, **options) == [1.0, 0.25, None]
    prompts = [s.prompt for s in samples]
    check_rubrics(table(**options), prompts, "rewards.good")
    bad = sample("a", meta={"rubric": [{"text": "x", "weight": 0}]}, row=6).prompt
    with pytest.raises(UserError, match=r"rewards.good.column = 'rubric': row 7: criteria have"):
        check_rubrics(table(**options), [*prompts, bad], "rewards.good")
    with pytest.raises(UserError, match="no row of the data has a rubric"):
        check_rubrics(table(form="rubric", column="other"), prompts, "rewards.good")
    with pytest.raises(UserError, match="write a list of criteria"):
        criteria_of("cites", "row 1")


def ab(text):
    """The two answers of a question to a judge of pairs."""
    return [part.partition("\n")[0] for part in text.split("Answer ")[1:3] for part in [part[3:]]]


def test_pairs_are_asked_in_both_orders():
    longer = lambda text: "[[A]]" if len(ab(text)[0]) > len(ab(text)[1]) else "[[B]]"  # noqa: E731
    samples = [sample("a"), sample("bbb"), sample("cc")]
    form = {"form": "pairwise", "against": "group"}
    assert points_of(samples, longer, **form) == [0.0, 1.0, 0.5]
    assert points_of(samples, lambda text: "[[A]]", **form) == [0.5] * 3  # by place: a tie
    assert points_of(samples, lambda text: "[[A]]", swap=False, **form) == [1.0, 0.5, 0.0]
    assert points_of(samples[:1], longer, **form) == [None]  # nobody to be compared with
    some = lambda text: "?" if ab(text) == ["bbb", "a"] else longer(text)  # noqa: E731
    assert points_of(samples, some, **form) == [0.0, 1.0, 0.5]  # of the pairs that were judged
    against = [sample("a", "right"), sample("much too long", "right"), sample("x", None)]
    assert points_of(against, longer, form="pairwise") == [0.0, 1.0, None]


def test_a_list_begins_with_another_member_each_time():
    begins_with_aa = []

    def by_place(text):
        begins_with_aa.append(text.index("aa") < text.index("b"))
        return '{"ranking": [1, 2]}'

    samples = [sample("aa"), sample("b")]
    more = {"form": "listwise", "temperature": 1.0}
    assert points_of(samples, by_place, **more) == [1.0, 0.0]
    assert points_of(samples, by_place, votes=2, **more) == [0.5, 0.5]
    assert begins_with_aa == [True, True, False]
    three = [sample("a"), sample("b"), sample("c")]
    assert points_of(three, lambda text: "Ranking: 2 > 3 > 1", form="listwise") == [0.0, 1.0, 0.5]
    assert points_of(three, lambda text: "Ranking: 2 > 3", form="listwise") == [None] * 3
    assert points_of(three[:1], by_place, form="listwise") == [None]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": None}, "rewards.good.model is missing: the model's name at the API"),
        ({"url": None, "timeout": 9}, r"rewards.good.timeout = 9.0 without url: a model on the ru"),
        ({"max_prompt_tokens": 9}, "rewards.good.max_prompt_tokens with url: the server limits"),
        ({"url": "", "model": "policy", "cache": True}, "cache = True with model = 'policy'"),
        ({"model": None}, "rewards.good.model is missing"),
        ({"form": "rubic"}, "rewards.good.form = 'rubic'; did you mean 'rubric'"),
        ({"form": "rubric"}, "rewards.good.criteria are missing"),
        (
            {"form": "rubric", "criteria": [{"text": "a", "weight": 0.0}]},
            r"rewards.good.criteria have weights \[0.0\], of which none counts; set one above 0",
        ),
        ({"form": "rubric", "criteria": [{"txt": "a"}]}, "criteria.0.txt = 'a': no such key; did"),
        ({"criteria": [{"text": "a"}]}, "rewards.good.criteria with form = 'score'"),
        ({"scale": [5, 1]}, r"rewards.good.scale = \[5.0, 1.0\]; give the least"),
        ({"votes": 3}, "rewards.good.votes = 3 with temperature = 0, where all votes are equal"),
        ({"tempeature": 1}, "rewards.good.tempeature = 1: no such key; did you mean 'temperature'"),
        ({"retries": -1}, "rewards.good.retries = -1; must be at least 0"),
    ],
)
def test_bad_keys_are_named(options, line):
    values = {k: v for k, v in (WHERE | options).items() if v is not None}
    with pytest.raises(UserError, match=line):
        checked(JudgeTable, "rewards.good", values)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"template": "{complition}"}, "template has {complition}, which is no field"),
        ({"template": "{question}"}, "does not show what is judged; write {completion} or"),
        ({"template": "{first}", "form": "pairwise"}, "write {second} into it"),
        ({"system": "{who}"}, "rewards.good.system has {who}"),
    ],
)
def test_bad_templates_are_named(options, line):
    with pytest.raises(UserError, match=line):
        check_template(table(**options), ["level"], "rewards.good")
    check_template(table(template="{completion} {level}"), ["level"], "rewards.good")
