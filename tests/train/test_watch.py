"""Limits on metrics: what is said and done, and what holds without being asked for."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect.sources import Around
from jrl.config import load_config
from jrl.config.tables import WatchTable
from jrl.errors import RunStopped, UserError
from jrl.methods import get_method
from jrl.run import loops
from jrl.run import run as running
from jrl.run.run import train
from jrl.sampling.params import make_sampling_params
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import read_jsonl
from jrl.train import batches
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.train.watch import COMPILED, LIMITS, MEMORY, Watch, resident_bytes, skip_rule

SOUND = {
    **{"step": 1, "skipped_updates": 0.0, "entropy": 1.0, "ratio": 1.0, "logprob_diff": 1e-6},
    **{"zero_std_groups": 0.2, "length": 40.0, "compiles": 9, "reward": 0.5, MEMORY: 1e9},
    COMPILED: 0,
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
HELD = {
    **{"logprob_diff": 0.5, "entropy": 0.001, "reward": 0.1, "ratio": 9.0, "zero_std_groups": 1.0},
    **{"length": 200.0, COMPILED: 1, MEMORY: 3e9},
}
"""Metric -> a value beyond the limit that holds without being asked for."""


def lines_by_action(verdict):
    """Action -> its lines, of those that have some."""
    return {n: getattr(verdict, n) for n in ("warn", "rollback", "stop") if getattr(verdict, n)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", ["warn", "rollback", "stop"])
def test_each_fault_is_seen_after_its_steps(fault, action):
    name, limit, value = FAULTS[fault]
    watch = Watch({name: WatchTable(**limit, steps=2, action=action)})
    assert lines_by_action(watch(1, SOUND)) == {}
    assert lines_by_action(watch(2, SOUND | {name: value})) == {}
    assert lines_by_action(watch(3, SOUND)) == {}  # not in a row
    watch(4, SOUND | {name: value})
    verdict = watch(5, SOUND | {name: value})
    assert list(lines_by_action(verdict)) == [action]
    line = getattr(verdict, action)[name]
    assert line.startswith(f"step 5: {name} = ")
    assert line.endswith(" for 2 steps in a row")
    assert (verdict.since, verdict.suspects) == ((4, True) if action == "rollback" else (5, False))
    assert lines_by_action(watch(6, SOUND | {name: value})) == {}  # said once


def test_what_holds_without_being_asked_for():
    watch = Watch({})
    assert lines_by_action(watch(1, SOUND | {"reward_failures": 1.0})) == {}
    assert lines_by_action(watch(2, SOUND | {"reward_failures": 1.0})) == {}
    reasons = watch(3, SOUND | {"reward_failures": 1.0}).stop
    assert reasons["reward_failures"] == (
        "step 3: reward_failures = 1, above 0.99 for 3 steps in a row"
    )
    verdicts = [watch(4 + i, SOUND | {"env_failures": 1.0}).stop for i in range(3)]
    assert verdicts[2]["env_failures"].endswith("above 0.99 for 3 steps in a row")
    watch = Watch({})
    reasons = watch(4, SOUND | {"skipped_updates": 0.25}).stop
    assert reasons == {"skipped_updates": "step 4: skipped_updates = 0.25, above 0"}
    quiet = Watch({"skipped_updates": WatchTable(action="none")})
    assert lines_by_action(quiet(1, SOUND | {"skipped_updates": 1.0})) == {}


@pytest.mark.parametrize("name", HELD)
def test_each_fault_is_warned_of_without_being_asked_for(name):
    watch, limit = Watch({}), LIMITS[name]
    begin = 30  # relative limits have seen what is usual by then
    for step in range(begin):
        assert lines_by_action(watch(step, SOUND)) == {}
    lines = [watch(begin + i, SOUND | {name: HELD[name]}).warn for i in range(limit.steps + 5)]
    assert [line for line in lines if line] == [lines[limit.steps - 1]]
    assert lines[limit.steps - 1][name].startswith(f"step {begin + limit.steps - 1}: {name} = ")


def test_relative_limits_compare_with_the_first_and_the_best_steps():
    watch = Watch({"length": WatchTable(grows=2), "reward": WatchTable(falls=0.5)})
    for step in range(10):
        watch(step, SOUND | {"length": 10.0 + step % 2, "reward": -0.5})
    assert lines_by_action(watch(10, SOUND | {"length": 20.9, "reward": -0.7})) == {}
    lines = watch(11, SOUND | {"length": 21.1, "reward": -0.8}).warn
    assert lines == {
        "length": "step 11: length = 21.1, more than 2 times the 10.5 of the first steps",
        "reward": "step 11: reward = -0.8, 50% and more below its best, -0.5",
    }
    for step in range(12, 32):  # the best is a mean, not a lucky step
        watch(step, SOUND | {"reward": 1.0})
    assert "below its best, 1" in watch(32, SOUND | {"reward": 0.4}).warn["reward"]


def test_a_resumed_watch_acts_as_one_that_never_stopped():
    limits = {
        "length": WatchTable(grows=2, steps=3),
        "reward": WatchTable(falls=0.5, steps=2),
        "ratio": WatchTable(above=2, steps=4),
        "entropy": WatchTable(below=0.1, steps=2, action="rollback"),
    }

    def record(step):
        late = {"length": 90.0, "reward": -3.0, "ratio": 3.0, "entropy": 0.0}
        return SOUND | {"length": 10.0 + step, "reward": step / 9} | (late if step > 12 else {})

    whole = Watch(limits)
    for stopped in range(18):
        again = Watch(limits)
        again.resume(json.loads(json.dumps(whole.notes())))
        rest = [again(step, record(step)) for step in range(stopped, 18)]
        same = Watch(limits)
        verdicts = [same(step, record(step)) for step in range(18)]
        assert rest == verdicts[stopped:]
        whole(stopped, record(stopped))
    assert {name for verdict in verdicts for name in verdict.warn} == {"length", "reward", "ratio"}
    Watch({}).resume({})
    Watch({"reward": WatchTable(above=9)}).resume(whole.notes())  # the limits are others


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_limit_that_is_another_on_resume_acts_from_there(action):
    """It acts at its number of steps, which the count of the old limit may be beyond."""
    before, beyond = Watch({"ratio": WatchTable(above=2, steps=2)}), SOUND | {"ratio": 3.0}
    for step in range(5):
        before(step, beyond)
    again = Watch({"ratio": WatchTable(above=2, steps=2, action=action)})
    again.resume(json.loads(json.dumps(before.notes())))
    acted = [list(getattr(again(step, beyond), action)) for step in (5, 6)]
    assert acted == [[], ["ratio"]]


def test_a_run_that_is_resumed_after_a_stop_has_its_steps_again():
    limits = {"ratio": WatchTable(above=2, steps=2, action="stop")}
    watch, beyond = Watch(limits), SOUND | {"ratio": 3.0}
    assert [list(watch(step, beyond).stop) for step in (1, 2)] == [[], ["ratio"]]
    again = Watch(limits)
    again.resume(watch.notes())
    assert [list(again(step, beyond).stop) for step in (3, 4)] == [[], ["ratio"]]


def test_a_number_that_is_not_finite_breaks_every_limit():
    watch = Watch({"ratio": WatchTable(above=2, action="stop")})
    assert watch(1, SOUND | {"ratio": None}).stop == {"ratio": "step 1: ratio = NaN, not finite"}


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(UserError, match="watch = 'entropie'; did you mean 'entropy'"):
        Watch({"entropie": WatchTable(above=1)})(1, SOUND)
    assert lines_by_action(Watch({"eval/accuracy": WatchTable(below=0.1)})(1, SOUND)) == {}


def test_only_what_was_asked_for_makes_the_segments_of_a_compiled_run_short():
    assert not Watch({}).acts
    assert not Watch({"ratio": WatchTable(above=2)}).acts
    for action in ("stop", "rollback"):
        assert Watch({"ratio": WatchTable(above=2, action=action)}).acts


def test_a_limit_needs_a_bound():
    with pytest.raises(ValueError, match="needs above, below, grows or falls"):
        WatchTable(steps=2)
    for more in ({"steps": 2}, {"grows": 3}):
        with pytest.raises(ValueError, match="acts inside the training step"):
            WatchTable(above=1, action="skip", **more)


def test_memory_is_that_of_the_process():
    assert 1e7 < resident_bytes() < 1e12


# ---------------------------------------------------------------- faults in a training step

TAMPERED = {
    "logprob_diff": ({"above": 0.05}, lambda b: logprobs(b, -1.0)),
    "ratio": ({"above": 2.0}, lambda b: logprobs(b, -1.0)),
    "entropy": ({"below": 0.05}, lambda b: logprobs(b, None)),
    "reward": ({"below": -5.0}, lambda b: b.replace(rewards=b.rewards - 9)),
    "zero_std_groups": ({"above": 0.9}, lambda b: b.replace(rewards=jnp.ones_like(b.rewards))),
    "length": ({"above": 4.5}, lambda b: longest(b)),
}
"""Metric -> its limit, and what breaks a batch so that it is passed."""


def logprobs(batch, shift):
    """The batch with other log-probabilities of the sampler."""
    sampled_logprobs = batch.stats["sampler_logprobs"]
    other = jnp.zeros_like(sampled_logprobs) if shift is None else sampled_logprobs + shift
    return batch.replace(stats={"sampler_logprobs": other})


def longest(batch):
    """Every completion as long as it can be."""
    t = batch.tokens.shape[2]
    return batch.replace(lengths=jnp.full_like(batch.lengths, t), mask=jnp.ones_like(batch.mask))


@pytest.fixture(scope="module")
def guarded(bag, bag_params, make_batch, quick_jit):
    """A step that all limits guard, its state, and a batch that it takes."""
    limits = {name: WatchTable(**limit, action="skip") for name, (limit, _) in TAMPERED.items()}
    method, optimizer = get_method("grpo"), optax.adam(1e-2)
    common = {"network": bag, "objective": method.objective, "optimizer": optimizer}
    state = init_state(jax.random.key(0), bag_params, **common)
    step = quick_jit(make_step(**common, skip=skip_rule(limits)))
    return step, state, own_draws(bag, bag_params, make_batch(n=4, g=3))


def own_draws(bag, params, batch):
    """The batch as if the policy had drawn it: with its own log-probabilities."""
    from jrl.train.score import score

    scored = jax.jit(partial(score, network=bag, value=None, want=frozenset({"logprobs"})))
    scores = scored({"policy": params}, batch, make_sampling_params())
    return batch.replace(stats={"sampler_logprobs": scores["logprobs"]})


@pytest.mark.parametrize("name", [None, *TAMPERED])
def test_a_step_beyond_a_limit_is_left_out_and_counted(guarded, name):
    step, state, batch = guarded
    faulty = batch if name is None else TAMPERED[name][1](batch)
    after, metrics = step(state, faulty, make_sampling_params())
    assert int(after.step) == 1
    assert metrics["skipped_steps"] == (name is not None)
    same = jax.tree.map(np.array_equal, *((s.params, s.opt_state) for s in (state, after)))
    assert all(jax.tree.leaves(same)) == (name is not None)


def test_a_step_that_is_not_finite_is_beyond_every_limit():
    rule = skip_rule({"ratio": WatchTable(above=2, action="skip"), "loss": WatchTable(above=9)})
    assert not rule({"ratio": jnp.float32(1), "loss": jnp.float32(99)})
    assert rule({"ratio": jnp.float32(jnp.nan)})
    assert skip_rule({"loss": WatchTable(above=9)}) is None


def test_only_what_the_step_computes_can_skip_it():
    rule = skip_rule({MEMORY: WatchTable(above=1, action="skip")})
    with pytest.raises(UserError, match=r'action = "skip" needs a metric of the step: watch = '):
        rule({"loss": jnp.float32(0), "reward_parts": jnp.zeros(2)})


# ---------------------------------------------------------------- faults in a run

TASK = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=2", "train.prompts=2"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "eval.problems=2", "log.samples_every=0"),
    *("optimizer={name='sgd', learning_rate=0.1}", "objective={kl_coef=0.1}"),
)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Trains with faults planted before some steps; the run directory and what was said."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    notes = []
    monkeypatch.setattr(loops.Progress, "note", lambda self, text: notes.append(text))
    make = batches.run_source

    class Faulty(Around):
        def __init__(self, source, faults):
            super().__init__(source)
            self.faults = faults

        def draw(self, request):
            groups = jax.device_get(self.source.draw(request))
            return self.faults.get(int(request.step) + 1, lambda g: g)(groups)

    def of(faults, *changes):
        def source(run, pool):
            return Faulty(make(run, pool), faults)

        monkeypatch.setattr(batches, "run_source", source)  # of training, not of evaluations
        directory = tmp_path / "run"
        place = f"run.dir={json.dumps(str(directory))}"
        try:
            train(load_config(None, [*TASK, *changes, place]), echo=lambda line: None)
        finally:
            of.notes, of.dir = notes, directory
        return directory

    return of


def records(directory):
    return read_jsonl(directory / "metrics.jsonl")[1:]


def weights(directory, step):
    """The weights of a checkpoint, and which step it holds."""
    import orbax.checkpoint as ocp

    state = directory / "checkpoints" / f"{step:08d}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        arrays = reader.restore(state, restore_args=kinds)
    return {n: x for n, x in arrays.items() if n.startswith("params")}, int(arrays["step"])


def with_shift(shift, groups):
    logged = groups.rollout.sampler_logprobs
    other = np.zeros_like(logged) if shift is None else logged + np.float32(shift)
    return groups._replace(rollout=groups.rollout.replace(sampler_logprobs=other))


def paid(points, groups):
    return groups._replace(rewards=np.full_like(groups.rewards, points))


def varied(groups):
    """Members with different rewards, so that each step changes the weights."""
    points = np.arange(groups.rewards.size, dtype=np.float32).reshape(groups.rewards.shape)
    return groups._replace(rewards=points)


def compile_one(groups):
    jax.jit(lambda x: x + len(groups.counts))(np.zeros(1)).block_until_ready()
    return groups


def use_memory(blocks, groups):
    blocks.append(np.ones(40_000_000))  # 320 MB
    return groups


def test_faults_of_a_run_are_warned_of_at_their_steps(go):
    blocks = []
    faults = {
        3: partial(with_shift, -1.0),
        4: partial(with_shift, None),
        5: partial(paid, -9.0),
        6: compile_one,
        7: partial(use_memory, blocks),
    }
    most = resident_bytes() + 1_500_000_000
    limits = {
        "logprob_diff": "above=0.2",
        "ratio": "above=2",
        "entropy": "below=0.01",
        "reward": "below=-5",
        COMPILED: "above=0",
        MEMORY: f"above={most}",
    }
    directory = go(
        faults,
        "train.steps=7",
        *(f"watch.{name}={{{limit}, action='warn'}}" for name, limit in limits.items()),
    )
    values = {r["step"]: r for r in records(directory)}
    assert values[7][MEMORY] - values[6][MEMORY] > 200_000_000
    warned = [line.removeprefix("warning: ").split(" = ")[0] for line in go.notes]
    for expected in (
        *("step 3: logprob_diff", "step 3: ratio", "step 4: entropy", "step 5: reward"),
        f"step 6: {COMPILED}",
    ):
        assert expected in warned, go.notes
    assert not [line for line in warned if line.startswith("step 2: ") and COMPILED not in line]


def test_a_run_goes_back_to_the_checkpoint_before_a_fault_and_on_with_the_next_prompts(go):
    faults = dict.fromkeys(range(1, 9), varied) | dict.fromkeys((5, 6), partial(paid, -9.0))
    rule = "watch.reward={below=-5, steps=2, action='rollback'}"
    run = go(faults, rule, "train.steps=8", "checkpoint.every=1", "checkpoint.keep=9")
    assert "back to the weights of step 4, 1 of 3 times" in go.notes[-1]
    assert Checkpoints(run / "checkpoints", 1).steps() == [0, 1, 2, 3, 4, 6, 7, 8]
    (before, four), (after, six), (later, _) = (weights(run, s) for s in (4, 6, 7))
    assert (four, six) == (4, 6)
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert not all(np.array_equal(after[n], later[n]) for n in after)
    logged = records(run)
    assert [r["step"] for r in logged] == list(range(1, 9))
    assert [r["prompts"] for r in logged] == list(range(2, 17, 2))
    assert [r.get("rollbacks", 0) for r in logged] == [0] * 6 + [1] * 2


DISJOINT = ("mesh.data=1", "sampling.mesh.data=1", "placement.staleness=1")


@pytest.mark.parametrize(
    "changes",
    [
        ("train.mode=host",),
        ("train.mode=compiled",),
        pytest.param(("lora.rank=2",), marks=pytest.mark.slow),
        pytest.param(DISJOINT, marks=pytest.mark.slow),
    ],
    ids=["host", "compiled", "adapters", "disjoint"],
)
def test_a_run_that_goes_back_again_and_again_stops_and_keeps_what_was_good(go, changes):
    rule = "watch.length={above=0, action='rollback'}"
    with pytest.raises(RunStopped, match="step 4: length = .*, above 0, after 3 rollbacks; ") as e:
        go({}, rule, "train.steps=9", "checkpoint.every=1", *changes)
    assert "step 3 is saved" in str(e.value)
    assert Checkpoints(go.dir / "checkpoints", 1).steps() == [2, 3]
    (first, _), (last, step) = weights(go.dir, 2), weights(go.dir, 3)
    assert step == 3
    assert all(np.array_equal(first[n], last[n]) for n in first)
    assert [r["step"] for r in records(go.dir)] == [1, 2, 3, 4]


def test_a_run_that_skips_every_step_stops(go):
    rule = "watch.length={above=0, action='skip'}"
    with pytest.raises(RunStopped, match="step 10: skipped_steps = 1, above 0 for 10 steps in a"):
        go({}, rule, "train.steps=20", "checkpoint.every=0")
    assert sum("its update was left out" in line for line in go.notes) == 10
