"""Judges as stages of a run: who is asked, what no verdict means, and several at the same time."""

import types

import numpy as np
import pytest
from judge_server import judge_server

from jrl.collect.reward_stages import judge_stage
from jrl.collect.sources import Groups
from jrl.config import load_config
from jrl.errors import UserError
from jrl.judging.host import Texts
from jrl.judging.judges import check_judges, endpoint_judges, judge_parts
from jrl.models.tokenizer import CharTokenizer
from jrl.setup.reward_parts import accuracy_part, parts_by_token, parts_of
from jrl.types import Prompt, StopReason

REQUEST = types.SimpleNamespace(step=0, weights={})
END, LEFT, FAILED, ABSENT = (
    *(StopReason.STOP_TOKEN, StopReason.ABORTED),
    *(StopReason.FAILED, StopReason.ABSENT),
)


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def config(url, parts, *more):
    tables = [f"{name}={{url='{url}', model='m', {keys}}}" for name, keys in parts.items()]
    rewards = f"rewards={{math={{}}, {', '.join(tables)}}}"
    return load_config(None, ["data.train=x.jsonl", "model.path=x", rewards, *more])


def rewards_of(config, stop, points=None):
    """Rewards of a configuration's judges for groups whose member j of group i is "i j"."""
    n, g = np.shape(stop)
    tokens = np.stack(np.broadcast_arrays(np.arange(n)[:, None], np.arange(g)), axis=-1)
    rollout = types.SimpleNamespace(
        tokens=tokens, lengths=np.full((n, g), 2), stop=np.array(stop), mask=tokens >= 0
    )
    prompts = [Prompt(i, "why?", np.zeros(1), "x", {"kind": "ab"[i % 2]}) for i in range(n)]
    judges = judge_parts(endpoint_judges(config), Words(), 1, "test")
    return judges(Texts(prompts, rollout, judges.tokenizer), points or {}, 0)[:3]


ONE = "function='judge', template='{completion}', scale=[0, 10]"


def by_member(body, number):
    """10 for member 1, 0 for member 0, nothing for others."""
    member = body["messages"][-1]["content"].split()[-1]
    return {"0": "Score: 0", "1": "Score: 10"}.get(member, "I do not know.")


def questions_in(bodies):
    return sorted(body["messages"][-1]["content"] for body in bodies)


def test_members_that_are_gone_are_not_asked():
    with judge_server(by_member) as (url, bodies):
        points, dropped, counts = rewards_of(
            config(url, {"good": ONE}), [[END, END, END], [LEFT, FAILED, ABSENT]]
        )
    np.testing.assert_array_equal(points["good"], [[0, 1, np.nan], [np.nan] * 3])
    assert questions_in(bodies) == ["0 0", "0 1", "0 2"]
    assert not dropped.any()
    assert (counts["judge_calls"], counts["judge_unreadable"]) == (3, 1)
    assert counts["judge_seconds"] > 0


def test_no_verdict_is_what_missing_says_among_those_asked():
    parts = {
        "zero": f"{ONE}, missing='zero', where={{kind='a'}}",
        "drop": f"{ONE}, missing='drop', where={{kind=['b']}}",
    }
    with judge_server(by_member) as (url, bodies):
        points, dropped, counts = rewards_of(config(url, parts), [[END] * 3] * 2)
    nan = [np.nan] * 3
    np.testing.assert_array_equal(points["zero"], [[0, 1, 0], nan])
    np.testing.assert_array_equal(points["drop"], [nan, [0, 1, np.nan]])
    np.testing.assert_array_equal(dropped, [[False] * 3, [False, False, True]])
    assert questions_in(bodies) == ["0 0", "0 1", "0 2", "1 0", "1 1", "1 2"]
    assert counts["judge_unreadable"] == 2


def test_a_judge_that_is_down_costs_its_own_part():
    with judge_server(by_member) as (url, _):
        with judge_server(by_member) as (down_url, _):
            pass  # it was there when the run began
        tables = ", ".join(
            f"{name}={{url='{at}', model='m', {ONE}, retries=0}}"
            for name, at in (("good", url), ("lost", down_url))
        )
        both = load_config(None, ["data.train=x.jsonl", "model.path=x", f"rewards={{{tables}}}"])
        points, dropped, counts = rewards_of(both, [[END] * 2])
    np.testing.assert_array_equal(points["good"], [[0, 1]])
    np.testing.assert_array_equal(points["lost"], [[np.nan] * 2])
    assert (counts["judge_calls"], counts["judge_failures"]) == (4, 2)
    assert not dropped.any()


def test_only_right_answers_are_judged_where_that_is_asked_for():
    """FAPO: a flaw counts where the answer is right, and nobody is asked of wrong ones."""
    right = np.array([[1.0, 0.0, np.nan], [0.0, 1.0, 1.0]])
    with judge_server(by_member) as (url, bodies):
        points, *_ = rewards_of(
            config(url, {"flaw": f"{ONE}, only='math'"}), [[END] * 3] * 2, {"math": right}
        )
    assert questions_in(bodies) == ["0 0", "1 1", "1 2"]
    np.testing.assert_array_equal(points["flaw"], [[0, np.nan, np.nan], [np.nan, 1, np.nan]])


@pytest.mark.parametrize("form", ["brpo", "reward_anything"])
def test_a_group_of_which_nobody_is_judged_has_no_opinion(form):
    """Forms of a group may look at its first member."""
    keys = f"function='judge', form='{form}', where={{kind='c'}}"
    with judge_server(by_member) as (url, bodies):
        points, *_ = rewards_of(config(url, {"part": keys}), [[END] * 2] * 2)
    assert not bodies
    assert np.isnan(points["part"]).all()


def test_a_group_is_ranked_without_those_that_are_gone():
    keys = "function='judge', form='listwise', template='{completions}'"

    def longest_first(body, number):
        count = body["messages"][-1]["content"].count("Answer")
        return '{"ranking": %s}' % list(range(1, count + 1))  # noqa: UP031

    with judge_server(longest_first) as (url, bodies):
        points, *_ = rewards_of(
            config(url, {"best": keys}), [[END, FAILED, END], [END, LEFT, LEFT]]
        )
    np.testing.assert_array_equal(points["best"], [[1, np.nan, 0], [np.nan] * 3])
    assert len(bodies) == 1  # one member has nobody to be ranked with


def test_wrong_steps_are_paid_at_tokens():
    """The weight is that of the part; another part is not by token, an absent member has none."""
    tokenizer = CharTokenizer("ab\n")
    texts = ("ab\n\na", "b", "a\n\na\n\nb")
    tokens = np.zeros((1, 4, 9), np.int32)
    for j, text in enumerate(texts):
        tokens[0, j, : len(text)] = tokenizer.encode(text)
    lengths = np.array([[len(text) for text in texts] + [0]])
    rollout = types.SimpleNamespace(
        tokens=tokens, lengths=lengths, stop=np.array([[END] * 3 + [ABSENT]]), mask=tokens > 0
    )

    def wrong(body, number):
        text = body["messages"][-1]["content"]
        if "Verdict" in text:
            return "yes"
        count = text.count("[step")
        return "none" if count == 1 else f'{{"wrong": [{count - 1}]}}'

    with judge_server(wrong) as (url, _):
        parts = {
            "step": "function='judge', form='steps', weight=0.5, missing='zero'",
            "good": "function='judge', form='yes_no'",
        }
        settings = config(url, parts)
        judges = judge_parts(endpoint_judges(settings), tokenizer, 1, "test")
        prompts = [Prompt(0, "why?", np.zeros(1), "x")]
        points, _, counts, paid = judges(Texts(prompts, rollout, tokenizer), {}, 0)
        groups = Groups(rollout, None, prompts, {}, {}, {"paid": np.ones((1, 4, 9), np.float32)})
        groups, _ = judge_stage(judges, lambda groups: groups.subject)(groups, {}, REQUEST)
        alone = judges._replace(givers={"good": judges.givers["good"]})
        assert alone(Texts(prompts, rollout, tokenizer), {}, 0)[3] is None
    np.testing.assert_array_equal(points["step"], [[-1, 0, -1, np.nan]])
    np.testing.assert_array_equal(points["good"], [[1, 1, 1, np.nan]])
    expected = np.zeros((1, 4, 9))
    # where the first of two steps, and the second of three, has its last character
    expected[0, 0, 3] = expected[0, 2, 5] = -0.5
    np.testing.assert_array_equal(paid, expected)
    np.testing.assert_array_equal(groups.stats["paid"], 1 + expected)  # beside what was paid
    assert counts["judge_unreadable"] == 1
    assert [*parts_by_token(settings).values()] == ["rewards.step.form = 'steps'"]


OWN = """
from jrl.rewards import Form, question

def shout(table, key):
    def questions(samples, vote):
        return [question(table, s, {}, str.strip, s.completion) for s in samples]

    def points(samples, verdicts):
        return [float(votes[0].isupper()) if votes else None for votes in verdicts]

    return Form(False, questions, points)
"""


def test_a_form_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    keys = f"function='judge', form='{tmp_path / 'mine.py'}:shout'"

    def reply(body, number):
        return "NO " if "1" in body["messages"][0]["content"] else "no"

    with judge_server(reply) as (url, _):
        settings = config(url, {"loud": keys})
        check_judges(settings, [Prompt(0, "", np.zeros(1), "", {})])
        points, *_ = rewards_of(settings, [[END, END]])
    np.testing.assert_array_equal(points["loud"], [[0, 1]])


def test_who_gives_a_part_and_what_goes_with_it():
    url = "http://127.0.0.1:1/v1"
    fine = config(url, {"good": ONE, "judge": "votes=1"})  # a part of that name is one, too
    assert parts_of(fine).given_by("judge") == ("good", "judge")
    assert accuracy_part(fine, {}) == "math"
    with pytest.raises(UserError, match=r"rewards.good.only = 'maths'; did you mean 'math'"):
        parts_of(config(url, {"good": f"{ONE}, only='maths'"}))
    with pytest.raises(UserError, match=r"rewards.good.only = 'gain'; choose from math"):
        parts_of(
            config(url, {"good": f"{ONE}, only='gain'"}, "rewards.gain={function='likelihood'}")
        )
    with pytest.raises(UserError, match=r"rewards.good.range = \[0.0, 1.0\]: a judge's points"):
        parts_of(config(url, {"good": f"{ONE}, range=[0, 1]"}))
    missing = [Prompt(0, "", np.zeros(1), "", {"kind": 1})]
    other = config(url, {"good": "function='judge', template='{completion} {kind} {sort}'"})
    with pytest.raises(UserError, match=r"rewards.good.template has {sort}.*choose from.*kind"):
        check_judges(other, missing)
    with pytest.raises(UserError, match=r"rewards.good.cache = '/no/where': the directory above"):
        check_judges(config(url, {"good": f"{ONE}, cache='/no/where'"}), missing)


def test_verdicts_are_kept_with_the_run(tmp_path):
    directory = f"run.dir={tmp_path / 'run'}"
    (tmp_path / "run").mkdir()
    with judge_server(by_member) as (url, bodies):
        for _ in range(2):
            rewards_of(config(url, {"good": ONE}, directory), [[END] * 2])
        assert len(bodies) == 2
        assert (tmp_path / "run" / "judge").is_dir()
        rewards_of(config(url, {"good": f"{ONE}, cache=false"}, directory), [[END] * 2])
        assert len(bodies) == 4
        (tmp_path / "run").rename(tmp_path / "moved")
        rewards_of(config(url, {"good": ONE}, directory), [[END] * 2])
    assert not (tmp_path / "run").exists()  # a run that was moved is not begun again
