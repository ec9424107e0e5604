"""Rewards by the values of a column: over members and opinions; a column that is not there."""

from types import SimpleNamespace

import numpy as np
import pytest

from jrl.collect.sources import Groups
from jrl.errors import UserError
from jrl.rewards.columns import check_column
from jrl.run.reward_metrics import rewards_by
from jrl.types import SILENT, Prompt, StopReason


def prompt(id, **meta):
    return Prompt(id, "?", np.zeros(1, np.int32), "4", meta)


def test_means_are_over_the_members_of_a_value_and_known_parts():
    stop = np.full((3, 2), StopReason.STOP_TOKEN, np.int32)
    stop[2, 1] = StopReason.FAILED  # not counted
    rollout = SimpleNamespace(stop=stop, baseline=np.zeros((3, 2), bool))
    rewards = np.array([[[1, 0], [0, 4]], [[1, 2], [1, 6]], [[0, 8], [9, 9]]], np.float32)
    ids = {SILENT: np.array([[2, 0], [0, 0], [0, 0]], np.int32)}  # part 1 of the first member
    prompts = [prompt(0, kind="a/b"), prompt(1), prompt(2, kind="a/b")]
    groups = Groups(rollout, rewards, prompts, {}, ids)
    assert rewards_by(groups, {"x": 1.0, "y": 0.5}, "kind") == pytest.approx(
        {
            "reward_by/a_b": (1 + 2 + 4) / 3,
            "reward_by/a_b/x": 1 / 3,
            "reward_by/a_b/y": 6.0,
            "reward_by/none": (2 + 4) / 2,
            "reward_by/none/x": 1.0,
            "reward_by/none/y": 4.0,
        }
    )


def test_a_column_that_the_data_lack_is_said():
    check_column("log.by", "", [])
    check_column("log.by", "kind", [prompt(0), prompt(1, kind="x")])
    with pytest.raises(UserError, match=r"log\.by = 'kin': the data has no such column; there are"):
        check_column("log.by", "kin", [prompt(1, kind="x")])
    with pytest.raises(UserError, match="there are none"):
        check_column("log.by", "kind", [])
