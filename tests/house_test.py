"""The house test: what holds on every commit (DESIGN: ten checks, each with a bound).

Eight virtual CPU devices and a tiny model. Each check builds what it needs from the library's own
functions and compares with something the library did not compute, or with itself run another way.
``tests/mutants.py`` plants the faults that these checks exist for.
"""

from __future__ import annotations

import sys
import traceback
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrl
from jrl.config import load_config
from jrl.data.tasks import get_task
from jrl.mesh import make_mesh, replicated
from jrl.methods import get_method
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.draw import make_law
from jrl.train.groups import collect
from jrl.train.loop import fit, train
from jrl.train.rollout import task_rollout, to_batch
from jrl.train.score import score
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step, place_batch

LIBRARY = Path(jrl.__file__).parent
TASK = get_task("arithmetic", difficulty=2)  # prompts and answers of several lengths
PROMPTS, GROUP = 8, 3
WEIGHTS = {"verify": 1.0, "partial": 0.5}
CONFIG = ModelConfig(
    vocab_size=TASK.vocab_size,
    layers=2,
    embed_dim=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_length=TASK.prompt_tokens + TASK.completion_tokens,
)
METHOD = get_method("grpo")


class World:
    """A mesh, a state on it, and the two programs compiled for it."""

    def __init__(
        self, *, devices=1, tensor=1, learning_rate=1.0, law=None, spy=None, seed=0, **split
    ):
        self.mesh = make_mesh(
            {"fsdp": devices // tensor, "tensor": tensor}, jax.devices()[:devices]
        )
        self.network = transformer(CONFIG)
        if spy is not None:
            self.network = self.network._replace(
                hidden=spy(self.network.hidden), extend=spy(self.network.extend)
            )
        self.law = jax.device_put(law or make_law(), replicated(self.mesh))
        self.optimizer = optax.sgd(learning_rate)
        make = partial(
            init_state,
            network=self.network,
            objective=METHOD.objective,
            optimizer=self.optimizer,
        )
        key = jax.random.key(seed)
        self.shardings = state_shardings(jax.eval_shape(make, key), self.mesh, network=self.network)
        self.state = jax.jit(make, out_shardings=self.shardings)(key)
        self.step = make_step(
            network=self.network, objective=METHOD.objective, optimizer=self.optimizer, **split
        )
        self.compiled = compile_step(self.step, self.shardings, self.mesh)
        self.sample = jax.jit(
            partial(
                task_rollout,
                law=self.law,
                task=TASK,
                split="train",
                parts=tuple(WEIGHTS),
                network=self.network,
                group=GROUP,
            )
        )
        self.collect = partial(
            collect,
            draw=self.sample,
            prompts=PROMPTS,
            weights=np.array(list(WEIGHTS.values()), np.float32),
            method=METHOD,
            mesh=self.mesh,
        )

    def fit(self, steps, step=None):
        """``steps`` steps of the library's own loop: (state, metrics and rollouts by step)."""
        log = []

        def on_step(done, state, metrics, groups, cursor):
            log.append((jax.device_get(metrics), jax.device_get(groups.rollout)))
            return False

        with jax.set_mesh(self.mesh):
            state = fit(
                self.state, self.collect, step or self.compiled, self.law, steps, on_step=on_step
            )
        return state, log

    def groups(self, step=0):
        """The groups that the first prompts give at a step."""
        with jax.set_mesh(self.mesh):
            ids = np.arange(PROMPTS, dtype=np.int32)
            return self.sample(self.state.key, self.state.params["policy"], np.int32(step), ids)


@cache
def some_batch():
    """Groups of the untrained policy, with rewards that differ inside every group; on the host."""
    groups = World().groups()
    rewards = np.random.default_rng(0).normal(size=(PROMPTS, GROUP, 2)).astype(np.float32)
    weights = np.array(list(WEIGHTS.values()), np.float32)
    return jax.device_get(to_batch(groups.rollout, rewards, weights))


def gradient(batch, **world):
    """The gradient the training step applied: with SGD at rate 1, what the weights lost."""
    w = World(**world)
    before = jax.device_get(w.state.params["policy"])
    with jax.set_mesh(w.mesh):
        state, _ = w.compiled(w.state, place_batch(batch, w.mesh), w.law)
    after = jax.device_get(state.params["policy"])
    return before, jax.tree.map(np.subtract, before, after)


def assert_close(a, b, bound):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        difference = np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)))
        assert difference <= bound, f"{jax.tree_util.keystr(path)}: {difference} > {bound}"


def test_1_few_frames_from_fit_to_the_network():
    stacks = []

    def spy(function):
        def watched(*args):
            stacks.append(traceback.extract_stack()[:-1])
            return function(*args)

        return watched

    World(spy=spy).fit(1)
    depths = set()
    for stack in stacks:
        own = [f.name for f in stack if Path(f.filename).is_relative_to(LIBRARY)]
        assert own[0] == "fit"
        depths.add(own[1])
        assert len(own) <= 6, own
    assert depths == {"collect", "step"}  # both ways were seen


def test_2_few_files_run_in_a_step():
    w, batch, files = World(), some_batch(), set()

    def watch(frame, event, argument):
        name = Path(frame.f_code.co_filename)
        if event == "call" and name.is_relative_to(LIBRARY):
            files.add(name.relative_to(LIBRARY).as_posix())

    sys.setprofile(watch)
    try:
        w.compiled.lower(w.state, batch, w.law)  # tracing runs what the step is made of
    finally:
        sys.setprofile(None)
    assert {"train/step.py", "models/transformer.py", "objectives/policy.py"} <= files
    assert len(files) <= 14, sorted(files)


def test_3_one_trace_and_one_executable():
    w, traces = World(devices=8, tensor=2), []

    def counted(*args):
        traces.append(1)
        return w.step(*args)

    compiled = compile_step(counted, w.shardings, w.mesh)
    state, log = w.fit(4, compiled)
    assert int(state.step) == len(log) == 4
    assert len(traces) == 1
    assert compiled._cache_size() == 1
    assert w.sample._cache_size() == 1


def test_4_shardings_stay():
    w = World(devices=8, tensor=2)
    before = jax.tree.map(lambda x: x.sharding, w.state)
    spread = [s for s in jax.tree.leaves(before) if not s.is_fully_replicated]
    assert len(spread) >= 8  # the mesh really divides the weights
    state, _ = w.fit(1)
    after = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, before, after))


def test_5_no_transfers_in_a_step():
    w = World(devices=8, tensor=2)
    with jax.set_mesh(w.mesh):
        batch, _, _ = w.collect(w.state.key, w.state.params["policy"], step=0, cursor=0)
        state, _ = w.compiled(w.state, batch, w.law)
        with jax.transfer_guard("disallow"):
            state, metrics = w.compiled(state, batch, w.law)
            jax.block_until_ready(metrics)


def test_6_draws_differ_by_step_and_repeat_by_seed():
    w = World(learning_rate=0.0)
    first, second, again = (w.groups(step).rollout.tokens for step in (0, 1, 0))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, World(seed=1).groups(0).rollout.tokens)
    assert len({tuple(row) for row in np.asarray(first[0])}) > 1  # members of a group differ
    _, log = World(learning_rate=0.0).fit(2)
    _, repeated = World(learning_rate=0.0).fit(2)
    for (_, a), (_, b) in zip(log, repeated, strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}],
    ids=["plain", "truncated"],
)
def test_7_trainer_logprobs_equal_the_samplers(knobs):
    w = World(law=make_law(**knobs))
    groups = w.groups()
    batch = to_batch(groups.rollout, groups.rewards, jnp.ones(2))
    stats = score(
        w.state.params, batch, w.law, network=w.network, value=None, want=frozenset({"logprobs"})
    )
    live = np.asarray(batch.mask)
    difference = np.abs(np.asarray(stats["logprobs"]) - np.asarray(groups.rollout.sampler_logprobs))
    assert live.sum() > PROMPTS * GROUP * 2
    assert difference[live].max() <= 1e-5
    assert len(set(np.asarray(batch.prompt_lengths).tolist())) > 1


def test_8_gradient_at_ratio_one_is_reinforce():
    batch = some_batch()
    batch = jax.tree.map(lambda x: x[:4], batch.replace(reward_weights=None)).replace(
        reward_weights=batch.reward_weights
    )
    params, ours = gradient(batch)
    rewards = np.asarray(batch.rewards, np.float64) @ np.array(list(WEIGHTS.values()))
    mean = rewards.mean(axis=1, keepdims=True)
    advantages = (rewards - mean) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    network = transformer(CONFIG)

    def reinforce(params):
        """Each sequence alone, unpadded, through the whole softmax."""
        total = 0.0
        for i in range(len(rewards)):
            prompt = batch.prompt_tokens[i, : batch.prompt_lengths[i]]
            for j in range(GROUP):
                n = int(batch.lengths[i, j])
                tokens = jnp.concatenate([prompt, batch.tokens[i, j, :n]])[None]
                place = jnp.arange(tokens.shape[1])[None]
                hidden, _ = network.hidden(params, tokens, place, jnp.ones_like(tokens))
                law = jax.nn.log_softmax(network.logits(params, hidden))[0]
                logprobs = law[jnp.arange(len(prompt) - 1, len(prompt) + n - 1), tokens[0, -n:]]
                total += -advantages[i, j] * logprobs.mean()
        return total / rewards.size

    reference = jax.device_get(jax.jit(jax.grad(reinforce))(params))
    assert max(np.abs(x).max() for x in jax.tree.leaves(reference)) > 1e-2
    assert_close(ours, reference, 1e-5)


@pytest.mark.parametrize("split", [{"microbatches": 2}, {"microbatches": 4}, {"devices": 8}])
def test_9_the_gradient_does_not_depend_on_the_split(split):
    batch = some_batch()
    # Rows of unlike lengths, so that a mean of means would show.
    mask = np.asarray(batch.mask).copy()
    mask[::2, 1:] = False
    batch = batch.replace(mask=mask)
    _, whole = gradient(batch)
    _, parts = gradient(batch, **split)
    assert_close(parts, whole, 1e-6)


def test_10_resume_is_bit_equal(tmp_path):
    overrides = (
        "data.task=arithmetic",
        "model.config={layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=32}",
        "sampling.group=4",
        "train.prompts=4",
        "eval.problems=8",
        "optimizer.learning_rate=1e-2",
        "objective={kl_coef=0.1}",
    )

    def run(name, steps):
        config = load_config(
            None, [*overrides, f"run.dir={tmp_path / name}", f"train.steps={steps}"]
        )
        train(config, echo=lambda line: None)

    run("whole", 4)
    run("parts", 2)
    run("parts", 4)
    whole, parts = (saved_leaves(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert len(whole) > 30
    for name, leaf in whole.items():
        assert np.array_equal(leaf, parts[name]), name


def saved_leaves(run):
    """Every array of a run's newest checkpoint, by path, as it lies on disk."""
    import orbax.checkpoint as ocp

    newest = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name)) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(newest).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return reader.restore(newest, restore_args=kinds)
