"""Disjoint meshes: what moves between them, who draws what when, and runs that are stopped."""

import copy
import json
import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.collector import StepGroups
from jrl.collect.sources import Groups
from jrl.config import load_config
from jrl.errors import UserError
from jrl.mesh import make_mesh, tree_shardings
from jrl.run import loops
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.placement import make_meshes
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build, disjoint, handover
from jrl.train.disjoint import BatchesAhead, ages, restored, stored
from jrl.train.handover import AdapterHandover, Handover, HandoverError
from jrl.train.loop import train_steps
from jrl.types import Prompt, Rollout

AXES = {"w": ("layers", "embed", "heads", None), "b": ("vocab", "embed"), "s": (None,)}


def meshes(mine, theirs):
    n, m = (int(np.prod(list(sizes.values()))) for sizes in (mine, theirs))
    devices = jax.devices()
    return make_mesh(mine, devices[:n]), make_mesh(theirs, devices[n : n + m])


def tree():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(2, 8, 4, 3)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=(8, 12)), jnp.bfloat16),
        "s": np.arange(5, dtype=np.int32),
    }


# ---------------------------------------------------------------- from mesh to mesh


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}),
        ({"fsdp": 4}, {"tensor": 4}),
        ({"fsdp": 4}, {"tensor": 2}),
        ({"fsdp": 2}, {"fsdp": 2, "tensor": 2}),
    ],
)
def test_weights_arrive_bit_for_bit_and_never_through_the_host(mine, theirs, monkeypatch):
    mesh, rollout_mesh = meshes(mine, theirs)
    where = tree_shardings(rollout_mesh, AXES, tree())
    params = jax.device_put(tree(), tree_shardings(mesh, AXES, tree()))

    def fetched(self):
        pytest.fail("a weight went through the host")

    hand_over = Handover(where, mesh, rollout_mesh)
    with monkeypatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(type(params["w"]), "_value", property(fetched))
        weights = hand_over.send(params, 3)
    with jax.set_mesh(rollout_mesh):
        received = hand_over.receive(weights, 3)
    for name, leaf in tree().items():
        assert received[name].sharding == where[name]
        assert np.array_equal(np.asarray(received[name]), leaf)
        assert not received[name].sharding.device_set & params[name].sharding.device_set


def test_a_leaf_that_changed_on_its_way_is_named_with_its_version():
    mesh, rollout_mesh = meshes({"data": 1}, {"data": 1})
    where = tree_shardings(rollout_mesh, AXES, tree())
    hand_over = Handover(where, mesh, rollout_mesh)
    corrupted(hand_over)
    params = jax.device_put(tree(), mesh.devices.item())
    with pytest.raises(HandoverError, match=r"version 7 of the policy changed .*: w \(sent"):
        hand_over.receive(hand_over.send(params, 7), 7)
    with pytest.raises(HandoverError, match="hold version 7 of the policy .* asks for version 8"):
        hand_over.receive(hand_over.send(params, 7), 8)


def corrupted(hand_over):
    """Lets one bit of one leaf flip on the way."""
    settle = hand_over._settle

    def flip(params):
        params, name = settle(params), next(n for n in ("w", "embed", "b") if n in params)
        leaf = np.asarray(params[name])
        bits = leaf.view(np.uint16).copy()
        bits.flat[5] ^= 1
        return params | {name: jax.device_put(bits.view(leaf.dtype), params[name].sharding)}

    hand_over._settle = flip


def test_a_frozen_base_moves_once_and_its_adapters_every_time(monkeypatch):
    mesh, rollout_mesh = meshes({"fsdp": 2}, {"tensor": 2})
    split = SimpleNamespace(
        split=lambda params: ({"b": params["b"]}, {name: params[name] for name in "ws"}),
        join=lambda trained, base: base | trained,
    )
    where = tree_shardings(rollout_mesh, AXES, tree())
    hand_over = AdapterHandover(split, where, mesh, rollout_mesh)
    shapes_moved, move = [], handover._move
    monkeypatch.setattr(
        handover, "_move", lambda x, to: shapes_moved.append(x.shape) or move(x, to)
    )
    for version in (4, 5):
        weights = tree() | {"b": jnp.full((8, 12), version, jnp.bfloat16)}
        params = jax.device_put(weights, tree_shardings(mesh, AXES, weights))
        received = hand_over.receive(hand_over.send(params, version), version)
        for name, leaf in weights.items():
            assert received[name].sharding == where[name]
            assert np.array_equal(np.asarray(received[name]), leaf)
    assert shapes_moved.count((8, 12)) == 2
    assert shapes_moved.count((2, 8, 4, 3)) == shapes_moved.count((5,)) == 1
    corrupted(hand_over._adapters)
    with pytest.raises(HandoverError, match=r"version 6 of the policy changed .*: b \(sent"):
        hand_over.receive(hand_over.send(params, 6), 6)


# ---------------------------------------------------------------- who draws what when


def groups_of(version, t=2):
    ones = np.ones((1, 1), np.int32)
    rollout = Rollout(
        prompt_tokens=ones,
        prompt_lengths=ones[0],
        tokens=np.ones((1, 1, t), np.int32),
        lengths=t * ones,
        mask=np.ones((1, 1, t), bool),
        sampler_logprobs=np.zeros((1, 1, t), np.float32),
        versions=np.full((1, 1, t), version, np.int32),
        stop=ones,
        baseline=ones != 1,
    )
    return Groups(rollout, np.zeros((1, 1, 1), np.float32), None, {}, {"prompt": ones[0]})


class Loop:
    """The loop without a model: version k of the policy is the number k."""

    def __init__(self, staleness, *, before_draw=None, before_step=None, carried=(), start=0):
        mesh, rollout_mesh = meshes({"data": 1}, {"data": 1})
        where = tree_shardings(rollout_mesh, {"w": (None,)}, {"w": np.zeros(1)})
        self.log, self.steps, self.start = [], [], start
        self.before_draw, self.before_step = before_draw, before_step
        self.ahead = BatchesAhead(
            self,
            Handover(where, mesh, rollout_mesh),
            staleness=staleness,
            cursor=start,
            carried=carried,
        )

    def assemble(self, groups):
        return groups, groups.cursor

    def draw(self, key, weights, *, step, version, cursor, newer):
        assert newer is None
        if self.before_draw is not None:
            self.before_draw(step)
        assert threading.current_thread().name.startswith("rollout")
        self.log.append((step, int(weights["policy"]["w"][0]), version, cursor))
        return StepGroups(groups_of(version), None, cursor + 1)

    def step(self, state, batch, sampling_params):
        if self.before_step is not None:
            self.before_step(state.step)
        self.steps.append((state.step, batch))
        return self.state(state.step + 1), {}

    def state(self, step):
        return SimpleNamespace(
            step=step, key=np.zeros(2, np.uint32), params={"policy": {"w": jnp.full(1, step)}}
        )

    def run(self, steps):
        counts = []

        def on_step(done, state, metrics, groups, cursor):
            counts.append(groups.counts)
            return False

        with self.ahead:
            train_steps(self.state(self.start), self.ahead, self.step, None, steps, on_step=on_step)
        return counts


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_step_decides_which_version_draws_a_batch(staleness):
    full = Loop(staleness)
    counts = full.run(5)
    versions = [max(0, i - staleness) for i in range(5 + staleness)]
    assert full.log == [(i, v, v, i) for i, v in enumerate(versions)]
    assert full.steps == [(i, i + 1) for i in range(5)]
    ages = [min(i, staleness) for i in range(5)]
    assert [c["staleness"] for c in counts] == [c["staleness_max"] for c in counts] == ages
    assert all(c["rollout_seconds"] > 0 for c in counts)
    assert all(c["waited_seconds"] >= 0 for c in counts)
    # Stopped after two steps and gone on, every batch is drawn once and by the same version.
    first = Loop(staleness)
    first.run(2)
    rest = Loop(staleness, carried=first.ahead.drawn(), start=2)
    assert len(rest.ahead.drawn()) == staleness
    rest.run(5)
    assert first.log + rest.log == full.log
    assert first.steps + rest.steps == full.steps


def test_a_rollout_runs_while_the_step_before_it_trains():
    """Each waits for the other to be under way; one after the other, neither would finish."""
    meet = threading.Barrier(2, timeout=60)
    overlapped = Loop(
        1,
        before_draw=lambda step: step and meet.wait(),  # all but the very first batch
        before_step=lambda step: meet.wait(),
    )
    overlapped.run(3)
    assert overlapped.steps == [(0, 1), (1, 2), (2, 3)]


def test_an_error_while_drawing_ends_the_run():
    def fails(step):
        if step == 2:
            raise ValueError("no batch 2")

    failing = Loop(1, before_draw=fails)
    with pytest.raises(ValueError, match="no batch 2"):
        failing.run(9)
    assert [step for step, _ in failing.steps] == [0, 1]
    assert not [t for t in threading.enumerate() if t.name.startswith("rollout")]


def test_an_error_while_training_is_not_held_up_by_what_waits_to_be_drawn():
    steps_drawn = []

    def fails(step):
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        Loop(5000, before_draw=steps_drawn.append, before_step=fails).run(9)
    assert len(steps_drawn) < 5000


@pytest.fixture
def stuck():
    """Something that a drawing thread waits for until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_rollout_that_hangs_can_be_given_up_and_what_was_drawn_before_is_kept(stuck):
    slow = Loop(2, before_draw=lambda step: stuck.wait() if step == 2 else None)
    start = time.monotonic()
    with slow.ahead as ahead:
        for step in range(2):
            ahead.collect(np.zeros(2, np.uint32), slow.state(step).params,
                          step=step, cursor=step)  # fmt: skip
        assert ahead.drawn(0.1) == []  # batch 2 is the next, and batch 3 waits for it
        assert ahead.drawn() == []  # not waited for again
    assert time.monotonic() - start < 10


def test_an_interrupted_wait_for_a_batch_saves_the_batches_before_the_one_that_hangs(stuck):
    def interrupt(step):
        if step == 1:
            threading.Timer(2.0, os.kill, [os.getpid(), signal.SIGINT]).start()
            stuck.wait()

    hangs = Loop(1, before_draw=interrupt)
    with pytest.raises(KeyboardInterrupt):
        hangs.run(9)
    assert [step for step, _ in hangs.steps] == [0]
    assert hangs.ahead.drawn() == []


def test_what_is_drawn_ahead_can_be_forgotten():
    """The next batch is then drawn by the policy that asks for it, from prompts not yet used."""
    again = Loop(2)
    key = np.zeros(2, np.uint32)
    with again.ahead as ahead:
        for step in range(3):
            _, _, cursor = ahead.collect(key, again.state(step).params, step=step,
                                         cursor=0)  # fmt: skip
        assert len(ahead.drawn()) == 2
        ahead.forget(cursor)
        assert ahead.drawn() == []
        for step in range(3, 6):
            ahead.collect(key, again.state(step + 100).params, step=step, cursor=0)
        ahead.drawn()
    later = again.log[5:]
    assert [(step, cursor) for step, _, _, cursor in later] == [(3 + i, 3 + i) for i in range(5)]
    assert [version for _, _, version, _ in later] == [3, 3, 3, 4, 5]


def test_tokens_older_than_agreed_are_refused():
    assert ages(groups_of(3), 5, 2) == {"staleness": 2.0, "staleness_max": 2.0}
    with pytest.raises(HandoverError, match=r"step 6: .* drawn by version 3 to 3 .* 4 to 6"):
        ages(groups_of(3), 6, 2)
    with pytest.raises(HandoverError, match="by version 3 to 3"):
        ages(groups_of(3), 2, 2)
    groups = groups_of(4)
    groups.rollout.versions[0, 0, 0] = 1
    groups.rollout.mask[0, 0, 0] = False
    assert ages(groups, 4, 0)["staleness_max"] == 0  # what is not trained on has no age
    assert ages(groups_of(-1), 4, 0) == {"staleness": 0.0, "staleness_max": 0.0}


def test_groups_of_text_survive_a_checkpoint(tmp_path):
    prompts = [Prompt(i, f"q{i}", np.arange(3), "5") for i in (4, 9)]
    groups = groups_of(2)._replace(subject=prompts[1:], counts={"reward_errors": 1.0})
    prior = {"rate": np.array([0.25], np.float32)}
    step_groups = StepGroups(groups, np.array([False]), 12, prior=prior)
    with Checkpoints(tmp_path, 1) as checkpoints:
        extra = {"cursor": 3, "carried": [stored(step_groups)]}
        checkpoints.save(1, {"w": np.zeros(2)}, extra=extra)
        _, extra = checkpoints.restore({"w": np.zeros(2)})
        _, less = checkpoints.restore({"w": np.zeros(2)}, subset=True)
    assert less["carried"][0]["rewards"] is None
    run = SimpleNamespace(data=SimpleNamespace(prompts={"train": prompts}))
    back = restored(extra["carried"][0], run)
    assert (back.cursor, back.groups.subject, back.groups.counts) == (
        12,
        prompts[1:],
        groups.counts,
    )
    old, new = (
        (d.groups.rollout, d.groups.rewards, d.groups.ids, d.members, dict(d.prior))
        for d in (step_groups, back)
    )
    jax.tree.map(np.testing.assert_array_equal, old, new)
    assert [x.dtype for x in jax.tree.leaves(old)] == [x.dtype for x in jax.tree.leaves(new)]


# ---------------------------------------------------------------- whole runs

BASE = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=4", "train.prompts=4"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "optimizer.learning_rate=1e-2", "train.steps=4"),
    *("eval.problems=4", "checkpoint.every=0", "log.samples_every=1", "mesh.data=4"),
    "objective.correction=tis",
)
DISJOINT = ("placement={}", "sampling.mesh.data=4")
EXPERTS = [f"model.config.{size}" for size in ("experts=4", "experts_per_token=2")]
POLICIES = {
    "all weights": (),
    "packed": (
        *("train.mode=packed", "data.task=chain", "data.difficulty=16"),
        *("mesh.data=2", "optimizer.learning_rate=1e-5", "train.steps=7"),
    ),
    "adapters": ("lora.rank=2", "objective.kl_coef=0.05"),
    "adapters on 8 bits": ("lora.rank=2", "lora.base=int8", "sampling.int8=weights"),
    "drawn in 8 bits": ("sampling.int8=['weights', 'cache']",),
    "experts": (*EXPERTS, "model.config.expert_mlp_dim=16", "objective.router_replay=true"),
}


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def go(directory, *changes):
    overrides = [*BASE, *changes, f"run.dir={json.dumps(str(directory))}"]
    train(load_config(None, overrides), echo=lambda line: None)
    return read(directory)


def read(directory):
    """(records but for clocks, samples of training, the final state) of a run."""
    records = read_jsonl(directory / "metrics.jsonl")[1:]
    samples = read_jsonl(directory / "samples.jsonl")
    return (
        [{k: v for k, v in r.items() if k not in CLOCKS} for r in records],
        [s for s in samples if s.get("split") != "eval"],
        leaves(directory),
    )


def leaves(directory):
    import orbax.checkpoint as ocp

    step = Checkpoints(directory / "checkpoints", 2).latest_step()
    state = directory / "checkpoints" / f"{step:08d}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return reader.restore(state, restore_args=kinds)


def assert_equal_state(mine, theirs):
    assert len(mine) > 20
    assert mine.keys() == theirs.keys()
    for name, leaf in theirs.items():
        assert np.array_equal(leaf, mine[name]), name


def others_slow(names):
    """All of them, those after the first left to ``-m slow``."""
    first, *rest = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in rest)]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """policy -> what its run on one mesh gives; each is trained once."""
    runs = {}

    def run(policy):
        if policy not in runs:
            runs[policy] = go(tmp_path_factory.mktemp("shared"), *POLICIES[policy])
        return copy.deepcopy(runs[policy])

    return run


@pytest.mark.parametrize("policy", others_slow(POLICIES))
def test_no_staleness_is_the_synchronous_run_bit_for_bit(policy, synchronous, tmp_path):
    changes = POLICIES[policy]
    records, samples, state = synchronous(policy)
    # as many devices draw as in the other run: a product of fewer rows may round otherwise
    same = ["sampling.mesh.data=2"] if "mesh.data=2" in changes else []
    theirs, their_samples, end = go(tmp_path / "disjoint", *DISJOINT, *changes, *same)
    assert [r.pop("staleness") for r in theirs] == [0] * len(records)
    assert [r.pop("staleness_max") for r in theirs] == [0] * len(records)
    assert theirs == records
    assert their_samples == samples
    assert_equal_state(end, state)
    assert len({r["loss"] for r in records}) > 1
    if policy == "experts":
        assert [r["router_moved"] for r in theirs] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "other_meshes"),
    [
        ("adapters on 8 bits", ("mesh.fsdp=4", "placement={}", "sampling.mesh.tensor=2")),
        ("adapters", ("mesh.tensor=2", "mesh.fsdp=2", "placement={}", "sampling.mesh.fsdp=4")),
        ("experts", ("mesh.expert=4", "placement={}", "sampling.mesh.expert=2")),
    ],
)
def test_meshes_that_divide_the_weights_otherwise_are_the_same_run(
    policy, other_meshes, synchronous, tmp_path
):
    """Up to rounding: sums over other devices are sums in another order."""
    changes = POLICIES[policy]
    records, samples, _ = synchronous(policy)
    meshes = ("mesh.data=1", *other_meshes)
    theirs, their_samples, _ = go(tmp_path / "disjoint", *changes, *meshes)
    assert [s["completion"] for s in their_samples] == [s["completion"] for s in samples]
    for mine, other in zip(records, theirs, strict=True):
        for name in ("reward", "loss", "grad_norm", "length"):
            assert other[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("policy", others_slow(["packed", "adapters on 8 bits", "experts"]))
def test_a_stale_run_resumes_bit_for_bit_from_where_a_signal_stopped_it(
    policy, tmp_path, monkeypatch
):
    """The batch drawn ahead is saved with the state, for its policy is gone by then.

    So is what it was packed by: the seventh batch would have fitted into a smaller shape than the
    one that earlier batches brought about, and sums would have been rounded in another way.
    """
    last = 6 if policy == "packed" else 2
    stale = (*DISJOINT, "placement.staleness=1", *POLICIES[policy])
    records, samples, state = go(tmp_path / "whole", *stale)
    assert [r["staleness_max"] for r in records] == [0, *[1] * (len(records) - 1)]
    assert all(0.5 < r["correction_weight"] < 2 for r in records)
    with monkeypatch.context() as patch:
        step = loops.Progress.step

        def stop(self, done, record):
            step(self, done, record)
            if done == last:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(loops.Progress, "step", stop)
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {last}; saved in"):
            go(tmp_path / "broken", *stale)
    theirs, their_samples, end = go(tmp_path / "broken", *stale)
    assert theirs == records
    assert their_samples == samples
    assert_equal_state(end, state)


def test_a_run_whose_weights_change_on_the_way_ends_before_it_draws_with_them(
    tmp_path, monkeypatch
):
    class Corrupting(Handover):
        def send(self, params, version):
            if version == 1:
                corrupted(self)
            return super().send(params, version)

    monkeypatch.setattr(disjoint, "Handover", Corrupting)
    with pytest.raises(HandoverError, match=r"version 1 of the policy changed .*: embed \(sent"):
        go(tmp_path / "run", *DISJOINT)
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]] == [1]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("placement.staleness=-1",), "staleness = -1; must be"),
        (("sampling.mesh.data=0",), "sampling.mesh.data = 0; must be"),
        (
            (*DISJOINT, "train.mode=compiled"),
            r"train.mode = 'compiled' does not go with \[placement\]: it is one program",
        ),
        (
            (*DISJOINT, "mesh.data=8", "train.prompts=8"),
            "8 devices and sampling.mesh for 4 others; there are 8",
        ),
        ((*DISJOINT, "mesh.data=-1", "sampling.mesh.data=-1"), "data and .*data are -1; only"),
        ((*DISJOINT, "mesh.data=3", "train.prompts=12"), "has 3 devices and sampling.mesh 4"),
        (
            (*DISJOINT, "sampling.mesh.data=3"),
            "prompts = 4 cannot be split over the 3 devices",
        ),
        (
            (*DISJOINT, "mesh.data=1", "sampling.mesh.data=-1", "sampling.mesh.tensor=2"),
            "sampling.mesh.data = -1: the 7 devices that are left do not divide by the 2",
        ),
    ],
)
def test_a_split_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_meshes(load_config(None, [*BASE, *changes]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("sampling.mesh.data=1", "sampling.mesh.tensor=4"),
            "sampling.mesh: .*kv_heads",
        ),
        (
            ("method=sft", "objective={}"),
            "method = 'sft', which draws nothing: its devices are for a rollout",
        ),
    ],
)
def test_a_run_that_cannot_draw_apart_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        go(tmp_path / "run", *DISJOINT, *changes)


def test_what_is_left_goes_to_the_mesh_that_asks_for_it():
    sizes = partial(load_config, None)
    mesh, rollout = make_meshes(sizes([*BASE, *DISJOINT, "mesh.data=-1"]))
    assert (mesh.size, rollout.size) == (4, 4)
    assert set(mesh.devices.flat).isdisjoint(rollout.devices.flat)
    mesh, rollout = make_meshes(sizes([*BASE, *DISJOINT, "sampling.mesh.data=-1", "mesh.data=4"]))
    assert (mesh.size, rollout.shape["data"]) == (4, 4)
    assert make_meshes(sizes(BASE))[1] is None
    # Who only evaluates such a run needs no devices for rollout.
    alone = build.setup(sizes([*BASE, *DISJOINT, "mesh.data=8", "train.prompts=8"]), trains=False)
    assert (alone.mesh.size, alone.rollout_mesh) == (8, None)
