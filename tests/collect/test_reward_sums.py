"""Weighted rewards whose sum float32 cannot hold: an error of that completion, by name."""

import types

import numpy as np
import pytest

from jrl.collect.reward_stages import FiniteSums, function_stage
from jrl.collect.sources import Groups
from jrl.config import load_config
from jrl.errors import UserError
from jrl.judging.host import HostScores
from jrl.setup.reward_parts import reward_pool
from jrl.system.float32 import sum_overflows
from jrl.system.signals import Stopping
from jrl.train import build
from jrl.train.batches import training_batches
from jrl.types import Rollout, StopReason

PARTS = {"a": 1.0, "b": 2.0}
REQUEST = types.SimpleNamespace(step=0, weights={})
FINE, HUGE = [1.0, 2.0], [3e38, 1e38]


class FixedSource:
    """A source of two groups of two: the second member of the second group has huge rewards."""

    def __init__(self, huge=HUGE):
        self.huge = huge

    def draw(self, request):
        rewards = np.array([[FINE, FINE], [FINE, self.huge]], np.float32)
        stop = np.full((2, 2), StopReason.STOP_TOKEN, np.int32)
        tokens, zeros = np.zeros((2, 2, 1), np.int32), np.zeros((2, 2), np.int32)
        rollout = Rollout(
            *(tokens[:, 0], zeros[:, 0] + 1, tokens, zeros + 1, tokens == 0),
            *(tokens * 0.0, tokens, stop, zeros > 0),
        )
        paid = np.ones((2, 2, 1), np.float32)
        counts = {"reward_errors": 1.0}
        return Groups(rollout, rewards, [], counts, {"prompt": np.array([7, 8])}, {"paid": paid})


def test_the_run_stops_and_says_which_parts_of_which_prompt():
    with pytest.raises(UserError) as raised:
        FiniteSums(FixedSource(), PARTS, "stop").draw(None)
    text = str(raised.value)
    assert "1 * 3e+38 of rewards.a and 2 * 1e+38 of rewards.b is infinite in float32" in text
    assert "(prompt 8); lower a weight or a reward, or set reward_pool.on_error" in text


def test_it_is_worth_nothing_or_leaves_its_group_and_is_counted():
    zero = FiniteSums(FixedSource(), PARTS, "zero").draw(None)
    assert zero.rewards.tolist() == [[FINE, FINE], [FINE, [0, 0]]]
    assert zero.stats["paid"].ravel().tolist() == [1, 1, 1, 0]
    dropped = FiniteSums(FixedSource(), PARTS, "drop").draw(None)
    assert dropped.rollout.stop[1].tolist() == [StopReason.STOP_TOKEN, StopReason.ABORTED]
    assert zero.counts == dropped.counts == {"reward_errors": 2.0}


@pytest.mark.parametrize("huge", [[3e38, -1e38], [3e38, np.nan], FINE])
def test_what_float32_holds_passes_as_it_is(huge):
    groups = FiniteSums(FixedSource(huge), PARTS, "stop").draw(None)
    assert groups.counts == {"reward_errors": 1.0}
    np.testing.assert_array_equal(groups.rewards[1, 1], np.float32(huge))


def test_products_sums_and_infinite_parts_are_found():
    rewards = [[3e38, 0], [0, 2e38], [3e38, 2e37], [np.inf, 0], [1e38, 1e38], [np.nan, 3e38]]
    overflows = sum_overflows(rewards, [1.0, 2.0])
    assert overflows.tolist() == [False, True, False, True, False, False]
    assert sum_overflows([[np.inf, 0]], [0.0, 1.0]).tolist() == [True]  # 0 * inf is NaN


@pytest.mark.parametrize("more", [(), ("rewards={verify={}}",)])
def test_runs_whose_rewards_come_from_outside_are_looked_at(tmp_path, more):
    """Those of a task alone are 0 to 1, and no step of such a run waits for the host to look."""
    (tmp_path / "own.py").write_text("def points(samples):\n    return [0.0 for _ in samples]\n")
    reward = f"rewards={{'{tmp_path}/own.py:points'={{weight=2}}}}"
    lines = ["data.task=sorting", "data.difficulty=3", "reward_pool={workers=0, on_error='drop'}"]
    lines += ["model.config={layers=1, embed_dim=8, heads=1, kv_heads=1, head_dim=8, mlp_dim=8}"]
    run = build.setup(load_config(None, [*lines, *(more or (reward,))]))
    with (
        reward_pool(run.config) as pool,
        training_batches(run, pool, 0, {}, Stopping()) as batches,
    ):
        assert isinstance(batches.source, FiniteSums) == (not more)


class Scorer:
    """A scorer of two functions that drops two members."""

    pool = types.SimpleNamespace(functions={"a": None, "b": None})

    def __call__(self, prompts, rollout, *more):
        points, answers = np.zeros((2, 2, 2), np.float32), np.zeros((2, 2), np.int32)
        return HostScores(rollout, points, answers, {"reward_dropped": 2.0}, None)


def test_dropped_members_of_two_stages_are_counted_together():
    """A model's, which reads first, and those of a function."""
    before = FixedSource().draw(None)._replace(counts={"reward_dropped": 1.0, "length": 3.0})
    after, points = function_stage(Scorer(), lambda groups: ())(before, {}, REQUEST)
    assert after.counts == {"reward_dropped": 3.0, "length": 3.0}
    assert list(points) == ["a", "b"]
