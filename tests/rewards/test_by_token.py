"""Points by token: from a function, through the pool, to the tokens of the batch."""

import pathlib
import re
import types

import numpy as np
import pytest

from jrl.collect.groups import to_batch
from jrl.collect.reward_stages import function_stage
from jrl.collect.sources import Groups
from jrl.collect.sources_text import TextSource
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.judging.host import HostScorer
from jrl.models.tokenizer import char_tokenizer
from jrl.objectives.transforms import paid_rewards
from jrl.rewards import Sample, make_reward
from jrl.rewards.model import at_progress, at_turn_ends
from jrl.rewards.pool import RewardPool
from jrl.rewards.rules import Rules
from jrl.setup.reward_parts import parts_of, reward_pool
from jrl.types import Prompt, Rollout, StopReason

JUDGES = pathlib.Path(__file__).parent / "judges.py"
WORDS = char_tokenizer()
REQUEST = types.SimpleNamespace(step=0, weights={})


def pool_of(function, workers=0, **rules):
    part = make_reward(f"{JUDGES}:{function}")
    limits = Rules(by_token=0.5, **rules)
    return RewardPool({"part": part}, workers=workers, timeout_seconds=60, rules={"part": limits})


def rollout_of(*texts, masked=()):
    """One group; tokens at the columns ``masked`` are an environment's."""
    ids = [WORDS.encode(text) for text in texts]
    g, t = len(ids), max(map(len, ids)) + 1
    tokens, mask = np.zeros((1, g, t), np.int32), np.zeros((1, g, t), bool)
    for j, row in enumerate(ids):
        tokens[0, j, : len(row)], mask[0, j, : len(row)] = row, True
    mask[:, :, list(masked)] = False
    return Rollout(
        prompt_tokens=np.ones((1, 2), np.int32),
        prompt_lengths=np.array([2], np.int32),
        tokens=tokens,
        lengths=np.array([[len(row) for row in ids]], np.int32),
        mask=mask,
        sampler_logprobs=np.zeros((1, g, t), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        stop=np.full((1, g), StopReason.STOP_TOKEN, np.int32),
        baseline=np.zeros((1, g), bool),
    )


PROMPT = Prompt(7, "q", np.ones(2, np.int32), "12")


def source_of(pool):
    return TextSource([PROMPT], 2, None, None, None, pool, WORDS)


@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_reach_the_tokens_and_their_sum_the_score(workers):
    rollout = rollout_of("ab 12", "zz", "7")
    with pool_of("digits_by_token", workers) as pool:
        groups = source_of(pool).judge([PROMPT], [PROMPT], rollout)
    assert groups.rewards[0, :, 0].tolist() == [2.0, 0.0, 1.0]  # "zz" has one number for all of it
    paid = np.zeros((1, 3, 6))
    paid[0, 0, 3:5] = paid[0, 2, 0] = 0.5  # times the weight
    np.testing.assert_array_equal(groups.stats["paid"], paid)
    batch = to_batch(rollout, groups.rewards, np.array([0.5], np.float32), {}, groups.stats)
    rewards = np.asarray(paid_rewards(batch.score(), batch))
    np.testing.assert_allclose(rewards, paid, atol=1e-7)
    np.testing.assert_allclose(rewards.sum(2), batch.score(), atol=1e-6)


def test_of_an_episode_the_policy_s_tokens_are_paid_beside_the_environment_s_points():
    rollout = rollout_of("12x34", masked=[2])
    spoken = [[[{"role": "assistant", "content": "12"}, {"role": "tool", "content": "x"},
                {"role": "assistant", "content": "34"}]]]  # fmt: skip
    paid = np.zeros((1, 1, 6), np.float32)
    paid[0, 0, 1] = 3.0
    ids = {"prompt": np.array([7], np.int32)}
    groups = Groups(rollout, np.zeros((1, 1, 0)), [PROMPT], {}, ids, {"paid": paid}, spoken)
    with pool_of("digits_by_token") as pool:
        stage = function_stage(HostScorer(pool, WORDS), lambda groups: groups.subject)
        groups, points = stage(groups, {}, REQUEST)
    assert points["part"].tolist() == [[4.0]]
    assert groups.stats["paid"][0, 0].tolist() == [0.5, 3.5, 0.0, 0.5, 0.5, 0.0]
    with pool_of("last_piece") as pool:  # pieces of the last turn's text, at its tokens
        stage = function_stage(HostScorer(pool, WORDS), lambda groups: groups.subject)
        groups, _ = stage(groups._replace(stats=None), {}, REQUEST)
    assert groups.stats["paid"][0, 0].tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0]


def test_pieces_of_text_are_paid_at_their_tokens():
    ends = np.array([2, 2, 5, 9], np.int32)  # the second token ends within a character
    sample = Sample(PROMPT, "abcdefghi", np.arange(4), "length", ends=ends)
    assert sample.by_token([(0, 2, 1.0), (3, 6, 2.0), (4, 4, 9.0)]) == [1.0, 0.0, 0.0, 2.0]
    assert sample.by_token([(3, 6, 2.0)], spread=True) == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(UserError, match=r"piece \(3, 10\) is not within a text of 9 characters"):
        sample.by_token([(3, 10, 1.0)])
    with pytest.raises(UserError, match="set by_token = true"):
        Sample(PROMPT, "a", np.arange(1), "length").by_token([])


def test_the_example_of_the_docs_pays_lines_and_apologies():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (code,) = re.findall(r"^```python\n(# steps.py.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    namespace: dict = {}
    exec(compile(code, "steps.py", "exec"), namespace)
    text = "ab\nsorry"
    sample = Sample(PROMPT, text, np.arange(4), "length", ends=np.array([2, 3, 6, 8]))
    assert namespace["steps"]([sample]) == [[1.0, 0.0, -0.5, 0.5]]


def test_what_cannot_be_read_is_named():
    rollout = rollout_of("ab", "abc")
    with pool_of("two_by_token") as pool:
        match = r"returned 2 numbers for the 3 tokens of sample 0 \(prompt 7\)"
        with pytest.raises(UserError, match=match):
            source_of(pool).judge([PROMPT], [PROMPT], rollout)
    outside = pytest.raises(UserError, match="returned 1, outside of its range")
    with pool_of("digits_by_token", high=0.5) as pool, outside:
        source_of(pool).judge([PROMPT], [PROMPT], rollout_of("1"))
    part = make_reward(f"{JUDGES}:digits_by_token")
    unasked = pytest.raises(UserError, match="list of 2 numbers.*set by_token = true")
    with RewardPool({"part": part}, workers=0, timeout_seconds=1) as pool, unasked:
        source_of(pool).judge([PROMPT], [PROMPT], rollout)


def test_the_key_makes_a_part_by_token_with_its_weight():
    function = f"{JUDGES}:digits_by_token"
    lines = ["data.train=x.jsonl", f"rewards={{a={{function='{function}', weight=2.0}}}}"]
    lines.append("reward_pool.workers=0")
    with reward_pool(load_config(None, lines)) as pool:
        assert not pool.by_token
    config = load_config(None, [*lines, "rewards.a.by_token=true"])
    with reward_pool(config) as pool:
        groups = source_of(pool).judge([PROMPT], [PROMPT], rollout_of("1"))
    assert groups.stats["paid"].tolist() == [[[2.0, 0.0]]]
    model = load_config(None, [lines[0], "rewards={model={path='x', by_token=true}}"])
    with pytest.raises(UserError, match=r"rewards.model.by_token = true.*given otherwise \(model"):
        parts_of(model)


def test_a_model_pays_values_and_their_changes_at_the_ends_of_steps():
    """Beside loops; the second member of the first group has no token of the policy's own."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 3, 7)).astype(np.float32)
    steps, mask = np.sort(rng.integers(0, 3, (2, 3, 7)), axis=2), rng.random((2, 3, 7)) < 0.7
    mask[0, 1] = False
    ends = np.zeros((2, 3, 7), bool)
    for n, i, t in np.argwhere(mask):
        later = [u for u in range(t + 1, 7) if mask[n, i, u] and steps[n, i, u] == steps[n, i, t]]
        ends[n, i, t] = not later
    progress = np.zeros((2, 3, 7))
    for n in range(2):
        firsts = [values[n, i][ends[n, i]][0] for i in range(3) if ends[n, i].any()]
        for i in range(3):
            at = np.flatnonzero(ends[n, i])
            progress[n, i, at] = np.diff(values[n, i, at], prepend=np.mean(firsts))
    assert ends.sum(2).max() > 1
    np.testing.assert_array_equal(at_turn_ends(values, mask, steps), np.where(ends, values, 0))
    np.testing.assert_allclose(at_progress(values, mask, steps), progress, atol=1e-6)


def test_a_search_says_that_it_has_no_tokens_to_pay():
    with pytest.raises(UserError, match=r"rewards.a.by_token.*needs one number per path"):
        check_features({"search": "tree.kind = 'puct'", "token rewards": "rewards.a.by_token"})
