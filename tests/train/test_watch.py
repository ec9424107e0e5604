"""Limits on metrics: what is said, when a run ends, and what holds without being asked for."""

import pytest

from jrl.config import WatchTable
from jrl.errors import UserError
from jrl.train.watch import MEMORY, Watch, memory_bytes

SOUND = {
    **{"step": 1, "skipped_updates": 0.0, "entropy": 1.0, "ratio": 1.0, "logprob_diff": 1e-6},
    **{"zero_std_groups": 0.2, "length": 40.0, "compiles": 9, "reward": 0.5, MEMORY: 1e9},
}
FAULTS = {
    "sampler and trainer differ": ("logprob_diff", {"above": 0.05}, 0.2),
    "entropy collapses": ("entropy", {"below": 0.05}, 0.001),
    "reward collapses": ("reward", {"below": 0.1}, 0.0),
    "ratios explode": ("ratio", {"above": 2.0, "below": 0.5}, 40.0),
    "groups carry no signal": ("zero_std_groups", {"above": 0.9}, 1.0),
    "lengths blow up": ("length", {"above": 1000}, 4096.0),
    "programs are compiled again": ("compiles", {"above": 20}, 31),
    "memory grows": (MEMORY, {"above": 8e9}, 9e9),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_each_fault_is_seen_after_its_steps(fault, action):
    name, limit, value = FAULTS[fault]
    watch = Watch({name: WatchTable(**limit, steps=2, action=action)})
    assert watch(1, SOUND) == ({}, {})
    assert watch(2, SOUND | {name: value}) == ({}, {})
    assert watch(3, SOUND) == ({}, {})  # not in a row
    watch(4, SOUND | {name: value})
    warned, stopped = watch(5, SOUND | {name: value})
    said, other = (warned, stopped) if action == "warn" else (stopped, warned)
    assert not other
    assert said[name].startswith(f"step 5: {name} = ")
    assert said[name].endswith(" for 2 steps in a row")
    assert watch(6, SOUND | {name: value}) == ({}, {})  # said once


def test_what_holds_without_being_asked_for():
    watch = Watch({})
    assert watch(1, SOUND | {"reward_failures": 1.0}) == ({}, {})
    assert watch(2, SOUND | {"reward_failures": 1.0}) == ({}, {})
    _, reasons = watch(3, SOUND | {"reward_failures": 1.0})
    assert reasons["reward_failures"] == (
        "step 3: reward_failures = 1, above 0.99 for 3 steps in a row"
    )
    _, reasons = watch(4, SOUND | {"skipped_updates": 0.25})
    assert reasons == {"skipped_updates": "step 4: skipped_updates = 0.25, above 0"}
    assert Watch({"skipped_updates": WatchTable(action="none")})(
        1, SOUND | {"skipped_updates": 1.0}
    ) == ({}, {})


def test_a_number_that_is_not_finite_breaks_every_limit():
    watch = Watch({"ratio": WatchTable(above=2, action="stop")})
    assert watch(1, SOUND | {"ratio": None})[1] == {"ratio": "step 1: ratio = NaN, not finite"}


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(UserError, match="watch = 'entropie'; did you mean 'entropy'"):
        Watch({"entropie": WatchTable(above=1)})(1, SOUND)
    assert Watch({"eval/accuracy": WatchTable(below=0.1)})(1, SOUND) == ({}, {})


def test_a_limit_needs_a_bound():
    with pytest.raises(ValueError, match="needs above, below, or both"):
        WatchTable(steps=2)


def test_memory_is_that_of_the_process():
    assert 1e7 < memory_bytes() < 1e12
    assert Watch({MEMORY: WatchTable(above=1)}).wants_memory
    assert not Watch({}).wants_memory
