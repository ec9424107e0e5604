"""The house test: what holds on every commit (DESIGN: ten checks, each with a bound).

Eight virtual CPU devices and a tiny model. Each check builds what it needs from the library's own
functions and compares with something the library did not compute, or with itself run another way.
``tests/mutants.py`` plants the faults that these checks exist for.
"""

from __future__ import annotations

import re
import sys
import traceback
from copy import copy
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrl
from jrl.collect.collector import Collector
from jrl.collect.groups import place_batch, to_batch
from jrl.collect.plan import Setting
from jrl.collect.sources import simple_request
from jrl.collect.sources_task import TaskSource, task_rollout
from jrl.collect.sources_text import TextSource
from jrl.config import load_config
from jrl.config.optimizer import Optimizer
from jrl.data.tasks import get_task
from jrl.mesh import make_mesh, replicated
from jrl.methods import get_method
from jrl.methods.schedule import Schedule
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.rewards import make_reward
from jrl.rewards.pool import CallOutcome, RewardPool, Scores
from jrl.run.run import train
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.storage.metrics import read_jsonl
from jrl.train.compiled import held_out
from jrl.train.loop import policy_weights, train_steps
from jrl.train.optimizer import make_optimizer
from jrl.train.score import score
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.types import Prompt, stream

LIBRARY = Path(jrl.__file__).parent
README = Path(__file__).parents[1] / "README.md"
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
    """A mesh, what makes a state on it, and the two programs for it; ``world`` gives one."""

    def __init__(
        self,
        *,
        devices=1,
        tensor=1,
        learning_rate=1.0,
        method=METHOD,
        knobs=(),
        spy=None,
        **split,
    ):
        self.mesh = make_mesh(
            {"fsdp": devices // tensor, "tensor": tensor}, jax.devices()[:devices]
        )
        self.network = transformer(CONFIG)
        if spy is not None:
            self.network = self.network._replace(
                hidden=spy(self.network.hidden), extend=spy(self.network.extend)
            ).with_extras(hidden_shared=spy(self.network.extras.hidden_shared))
        self.sampling_params = jax.device_put(
            make_sampling_params(**dict(knobs)), replicated(self.mesh)
        )
        self.optimizer = optax.sgd(learning_rate)
        make = partial(
            init_state,
            network=self.network,
            objective=method.objective,
            optimizer=self.optimizer,
        )
        shapes = jax.eval_shape(make, jax.random.key(0))
        self.shardings = state_shardings(shapes, self.mesh, network=self.network)
        self.make = jax.jit(make, out_shardings=self.shardings)
        self.step = make_step(
            network=self.network, objective=method.objective, optimizer=self.optimizer, **split
        )
        self.compiled = compile_step(self.step, self.shardings, self.mesh)
        self.sample = jax.jit(
            partial(
                task_rollout,
                sampling_params=self.sampling_params,
                task=TASK,
                parts=tuple(WEIGHTS),
                network=self.network,
            )
        )
        self.method = method
        weights = np.array(list(WEIGHTS.values()), np.float32)
        self.collect_from(TaskSource(TASK, tuple(WEIGHTS), self.sample), weights)

    def collect_from(self, source, reward_weights):
        """Makes a source that of the batches."""
        setting = Setting(self.method, PROMPTS, GROUP, reward_weights)
        self.collector = Collector(source, setting, self.mesh)

    def fit(self, steps, step=None):
        """``steps`` steps of the library's own loop: (state, metrics and rollouts by step)."""
        log = []

        def on_step(done, state, metrics, groups, cursor):
            log.append((jax.device_get(metrics), jax.device_get(groups.rollout)))
            return False

        with jax.set_mesh(self.mesh):
            state = train_steps(
                self.state,
                self.collector,
                step or self.compiled,
                self.sampling_params,
                steps,
                on_step=on_step,
            )
        return state, log

    def groups(self, step=0, prompts=PROMPTS):
        """The groups that the first prompts give at a step."""
        with jax.set_mesh(self.mesh):
            ids = np.arange(prompts, dtype=np.int32)
            return self.sample(self.request(step, ids))

    def request(self, step, tickets, *, rows=None, key=None):
        """Request of draws with the state's policy."""
        key, weights = self.state.key if key is None else key, policy_weights(self.state)
        return simple_request(key, weights, np.int32(step), tickets, GROUP, rows=rows)


programs = cache(World)


def world(*, seed=0, **options):
    """A ``World`` with a state of its own; worlds that differ in nothing else share programs."""
    setup = copy(programs(**options))
    setup.state = setup.make(jax.random.key(seed))
    return setup


@cache
def some_batch():
    """Groups of the untrained policy, with rewards that differ inside every group; on the host."""
    groups = world().groups()
    rewards = np.random.default_rng(0).normal(size=(PROMPTS, GROUP, 2)).astype(np.float32)
    weights = np.array(list(WEIGHTS.values()), np.float32)
    return jax.device_get(to_batch(groups.rollout, rewards, weights))


def gradient(batch, **split):
    """The gradient the training step applied: with SGD at rate 1, what the weights lost."""
    w = world(**split)
    before = jax.device_get(w.state.params["policy"])
    with jax.set_mesh(w.mesh):
        state, _ = w.compiled(w.state, place_batch(batch, w.mesh), w.sampling_params)
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

    world(spy=spy).fit(1)
    depths = set()
    for stack in stacks:
        frames = [f.name for f in stack if Path(f.filename).is_relative_to(LIBRARY)]
        assert frames[0] == "train_steps"
        depths.add(frames[1])
        assert len(frames) <= 6, frames
    assert depths == {"collect", "step"}  # both ways were seen


WATCHERS = ("compile_cache.py", "compile_reports.py", "wait_reports.py", "signals.py")
"""Files that look at a run from outside: at what JAX compiles, at waits, at signals."""


def entered(run):
    """The files of jrl/ that a call enters, in the order of their first functions."""
    names = {}

    def watch(frame, event, argument):  # called when a Python function is
        names.setdefault(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    paths = [Path(name) for name in names if Path(name).is_relative_to(LIBRARY)]
    return [p.relative_to(LIBRARY).as_posix() for p in paths if p.name not in WATCHERS]


def hops_of_the_readme():
    """Hop -> the files or folders that README's figure names for it."""
    figure = README.read_text().partition("## Five hops")[2].partition("## ")[0]
    files_by_hop, hop = {}, 0
    for line in re.findall(r"^ {4}.*", figure, flags=re.M):  # the figure, not the prose after it
        if start := re.match(r" {0,4}([1-5]) ", line):
            hop = int(start[1])
        files_by_hop.setdefault(hop, []).extend(
            re.findall(r"(?<![\w/])[a-z]+/[\w/]*(?:\.py)?", line)
        )
    return {hop: names for hop, names in files_by_hop.items() if hop and names}


def test_2_the_files_of_the_readme_are_the_first_of_their_hops():
    w, hops = World(), hops_of_the_readme()
    assert sorted(hops) == [1, 2, 3, 4, 5]
    w.state = w.make(jax.random.key(0))
    with RewardPool({"exact": make_reward("exact")}, workers=0, timeout_seconds=9) as pool:
        source = text_source(w, [f"{i}+{3 * i}=" for i in range(PROMPTS)], pool=pool)
        w.collect_from(source, np.ones(1, np.float32))
        files = entered(lambda: w.fit(1))
    earlier = {"train/loop.py"}
    assert files[0] in earlier  # where ``train_steps`` is
    for hop, names in hops.items():
        package = names[0].partition("/")[0]
        new = (f for f in files if not f.startswith(tuple(earlier)))
        first = next(f for f in new if f.startswith(f"{package}/"))
        assert first.startswith(names[0]), f"hop {hop} begins in {first}"
        earlier.update(names)


def test_2_a_step_enters_the_files_that_explain_it():
    w = World()  # of its own: both programs are traced for the first time here
    w.state = w.make(jax.random.key(0))
    files = entered(lambda: w.fit(1))
    assert {"collect/collector.py", "train/step.py", "objectives/policy.py"} <= set(files)


def test_2_a_step_of_the_demo_enters_the_same_files(tmp_path, monkeypatch):
    """The same of a run of ``configs/tiny.toml``, from where its loop begins."""
    before, entered_files = sys.gettrace(), []

    def watched_steps(*args, on_step, **kwargs):
        def after(*step_args):
            sys.settrace(before)  # what is written after a step is not on the way to it
            return on_step(*step_args)

        results = []
        entered_files.extend(
            entered(lambda: results.append(train_steps(*args, on_step=after, **kwargs)))
        )
        return results[0]

    monkeypatch.setattr("jrl.run.loops.train_steps", watched_steps)
    short = ["train.steps=1", "train.prompts=8", "sampling.group=4", "eval.problems=8"]
    short += ["warmup.steps=1", f"run.dir={tmp_path / 'run'}"]
    train(load_config(str(README.parent / "configs" / "tiny.toml"), short))
    assert {"collect/collector.py", "train/step.py", "objectives/policy.py"} <= set(entered_files)


# A layout that does not come back also draws this warning; the assertions are to say what is wrong.
donated = pytest.mark.filterwarnings("ignore:Some donated buffers")


@donated
def test_3_one_trace_and_one_executable():
    w, traces = world(devices=8, tensor=2), []

    def counted(*args):
        traces.append(1)
        return w.step(*args)

    compiled = compile_step(counted, w.shardings, w.mesh)
    state, log = w.fit(4, compiled)
    assert int(state.step) == len(log) == 4
    assert len(traces) == 1
    assert compiled._cache_size() == 1
    assert w.sample._cache_size() == 1


@donated
def test_4_shardings_stay():
    w = world(devices=8, tensor=2)
    before = jax.tree.map(lambda x: x.sharding, w.state)
    spread = [s for s in jax.tree.leaves(before) if not s.is_fully_replicated]
    assert len(spread) >= 8  # the mesh really divides the weights
    state, _ = w.fit(1)
    after = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, before, after))
    # The old state has given its buffers to the new one: a step needs no room for both. The number
    # of steps is the one that JAX 0.11 keeps.
    assert all(x.is_deleted() for x in jax.tree.leaves(w.state.replace(step=None)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_5_no_transfers_in_a_step():
    w = world(devices=8, tensor=2)
    with jax.set_mesh(w.mesh):
        weights = policy_weights(w.state)
        batch, _, _ = w.collector.collect(w.state.key, weights, step=0, cursor=0)
        state, _ = w.compiled(w.state, batch, w.sampling_params)
        with jax.transfer_guard("disallow"):
            state, metrics = w.compiled(state, batch, w.sampling_params)
            jax.block_until_ready(metrics)
    assert int(state.step) == 2  # the guard lets nothing through, and the steps were done


def test_6_draws_differ_by_step_and_repeat_by_seed():
    w = world(learning_rate=0.0)
    first, second, again = (w.groups(step).rollout.tokens for step in (0, 1, 0))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, world(seed=1).groups(0).rollout.tokens)
    assert len({tuple(row) for row in np.asarray(first[0])}) > 1  # members of a group differ
    _, log = world(learning_rate=0.0).fit(2)
    _, repeated = world(learning_rate=0.0).fit(2)
    for (_, a), (_, b) in zip(log, repeated, strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    # The second step starts where the first one ended.
    one, two = ({tuple(row) for row in rollout.prompt_tokens} for _, rollout in log)
    assert len(one - two) >= PROMPTS - 1


class PointsById:
    """Stands for a pool of reward functions: each completion gets its prompt's number."""

    over_batch = by_token = False

    def scores(self, samples, *, group):
        points = np.array([[s.prompt.id] for s in samples], np.float32)
        return Scores(points, CallOutcome(np.zeros(len(samples), bool), {}))


def text_source(w, texts, seed=None, pool=None):
    """The prompts as a run on text reads them."""
    tokens = [np.array(TASK.tokenizer.encode(text), np.int32) for text in texts]
    prompts = [Prompt(i, text, tokens[i], "") for i, text in enumerate(texts)]
    program = partial(
        generate,
        network=w.network,
        max_new_tokens=TASK.completion_tokens,
        stop_tokens=(TASK.stop_id,),
    )
    pool, width = pool or PointsById(), TASK.prompt_tokens
    return TextSource(
        prompts, width, seed, jax.jit(program), w.sampling_params, pool, TASK.tokenizer
    )


def test_6_draws_for_prompts_in_text_differ_by_step_and_repeat():
    w = world()
    source = text_source(w, [f"{i}+{3 * i}=" for i in range(PROMPTS)])
    tickets = np.arange(PROMPTS, dtype=np.int32)

    def tokens(step, key=w.state.key):
        return source.draw(w.request(step, tickets, key=key)).rollout.tokens

    first, second = tokens(0), tokens(1)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, tokens(0))
    assert not np.array_equal(first, tokens(0, world(seed=1).state.key))
    assert len({tuple(row) for row in first[0]}) > 1


DISTRIBUTIONS = pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}],
    ids=["plain", "truncated"],
)


@DISTRIBUTIONS
def test_7_trainer_logprobs_equal_the_samplers(knobs):
    w = world(knobs=tuple(knobs.items()))
    groups = w.groups()
    batch = to_batch(groups.rollout, groups.rewards, jnp.ones(2))
    how = {"network": w.network, "value": None, "want": frozenset({"logprobs"})}
    stats = jax.jit(partial(score, **how))(w.state.params, batch, w.sampling_params)
    live = np.asarray(batch.mask)
    difference = np.abs(np.asarray(stats["logprobs"]) - np.asarray(groups.rollout.sampler_logprobs))
    assert live.sum() > PROMPTS * GROUP * 2
    assert difference[live].max() <= 1e-5
    assert len(set(np.asarray(batch.prompt_lengths).tolist())) > 1


def numpy_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """[V] probabilities of one token in float64, written down from the definitions."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-weights)[: top_k or None]
    shares = weights[order] / weights[order].sum()
    order = order[np.cumsum(shares) - shares < top_p]
    order = order[weights[order] >= min_p * weights.max()]
    probs = np.zeros(len(logits))
    probs[order] = weights[order] / weights[order].sum()
    return probs


def unpadded(rollout):
    """Each sequence without a gap: tokens, positions, segments [B, L]; places before [B, T]."""
    n, g, t = rollout.tokens.shape
    width = rollout.prompt_tokens.shape[1] + t
    tokens, segments = np.zeros((2, n * g, width), np.int32)
    for row in range(n * g):
        i, j = divmod(row, g)
        full = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]].tolist()
        full += rollout.tokens[i, j, : rollout.lengths[i, j]].tolist()
        tokens[row, : len(full)], segments[row, : len(full)] = full, 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    before = np.repeat(rollout.prompt_lengths, g)[:, None] - 1 + np.arange(t)
    return tokens, positions, segments, before


@DISTRIBUTIONS
def test_7_the_sampler_draws_from_the_distribution_by_definition(knobs):
    w = world(knobs=tuple(knobs.items()))
    rollout = jax.device_get(w.groups(prompts=256).rollout)
    *inputs, before = unpadded(rollout)

    @jax.jit
    def all_logits(params, before):
        hidden, _ = w.network.hidden(params, *inputs)
        return w.network.logits(params, jnp.take_along_axis(hidden, before[:, :, None], axis=1))

    logits = np.asarray(all_logits(w.state.params["policy"], before))
    live = rollout.mask.reshape(len(logits), -1)
    tokens = rollout.tokens.reshape(live.shape)[live]
    distributions = np.array([numpy_distribution(x, **knobs) for x in logits[live]])
    chances = np.maximum(distributions[np.arange(len(tokens)), tokens], 1e-30)
    assert np.abs(np.log(chances) - rollout.sampler_logprobs.reshape(live.shape)[live]).max() < 1e-4
    # Chi-square over the vocabulary; its mean is at most its number of terms.
    expected, counts = distributions.sum(axis=0), np.bincount(tokens, minlength=TASK.vocab_size)
    often = expected > 5
    terms = often.sum()
    statistic = ((counts - expected) ** 2 / np.where(often, expected, 1))[often].sum()
    assert statistic < terms + 5 * np.sqrt(2 * terms)
    assert live.sum() > 2000
    assert terms > 10


def group_relative(batch):
    """[N, G] float64, GRPO's advantages by their definition."""
    rewards = np.asarray(batch.rewards, np.float64) @ np.array(list(WEIGHTS.values()))
    spread = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6
    return (rewards - rewards.mean(axis=1, keepdims=True)) / spread


def test_8_gradient_at_ratio_one_is_reinforce():
    batch = some_batch()
    batch = jax.tree.map(lambda x: x[:2], batch.replace(reward_weights=None)).replace(
        reward_weights=batch.reward_weights
    )
    params, ours = gradient(batch)
    advantages = group_relative(batch)
    network = transformer(CONFIG)

    def reinforce(params):
        """Each sequence alone, unpadded, through the whole softmax."""
        total = 0.0
        for i in range(len(advantages)):
            prompt = batch.prompt_tokens[i, : batch.prompt_lengths[i]]
            for j in range(GROUP):
                n = int(batch.lengths[i, j])
                tokens = jnp.concatenate([prompt, batch.tokens[i, j, :n]])[None]
                positions = jnp.arange(tokens.shape[1])[None]
                hidden, _ = network.hidden(params, tokens, positions, jnp.ones_like(tokens))
                table = jax.nn.log_softmax(network.logits(params, hidden))[0]
                logprobs = table[jnp.arange(len(prompt) - 1, len(prompt) + n - 1), tokens[0, -n:]]
                total += -advantages[i, j] * logprobs.mean()
        return total / advantages.size

    reference = jax.device_get(jax.jit(jax.grad(reinforce))(params))
    assert max(np.abs(x).max() for x in jax.tree.leaves(reference)) > 1e-2
    assert_close(ours, reference, 1e-5)


def off_policy_loss(params, reference, inputs, batch, advantages, low, high, coef):
    """Clipped surrogate and k3 by their definitions; how many tokens were clipped above, below."""
    network, (*inputs, before) = transformer(CONFIG), inputs

    def logprobs(params):
        hidden, _ = network.hidden(params, *inputs)
        table = jax.nn.log_softmax(network.logits(params, hidden))
        sampled_tokens = batch.tokens.reshape(before.shape)
        return table[jnp.arange(len(before))[:, None], before, sampled_tokens].reshape(
            batch.tokens.shape
        )

    now = logprobs(params)
    ratio = jnp.exp(now - batch.stats["sampler_logprobs"])
    gain = advantages[:, :, None] * ratio
    least = jnp.minimum(gain, advantages[:, :, None] * jnp.clip(ratio, 1 - low, 1 + high))
    behind = logprobs(reference) - now
    losses = jnp.where(batch.mask, -least + coef * (jnp.exp(behind) - behind - 1), 0)
    clipped = (least < gain) & batch.mask
    sides = jnp.stack([(clipped & (ratio > 1)).sum(), (clipped & (ratio < 1)).sum()])
    return (losses.sum(-1) / batch.mask.sum(-1)).mean(), sides


def test_8_off_policy_step_equals_a_hand_written_loop():
    low, high, coef, rate, parts = 0.1, 0.3, 0.1, 0.5, 2
    method = get_method("grpo", clip_low=low, clip_high=high, kl_coef=coef)
    w = world(method=method, learning_rate=rate, schedule=Schedule(epochs=2), minibatches=parts)
    noise = np.random.default_rng(1).uniform(-0.3, 0.3, some_batch().tokens.shape)
    sampler = some_batch().stats["sampler_logprobs"] + noise.astype(np.float32)
    batch = some_batch().replace(stats={"sampler_logprobs": sampler})
    reference = world(seed=1).state.params["policy"]
    start = w.state.replace(frozen={"ref": jax.tree.map(jnp.copy, reference)})
    params, root = jax.device_get((start.params["policy"], start.key))
    with jax.set_mesh(w.mesh):
        state, _ = w.compiled(start, place_batch(batch, w.mesh), w.sampling_params)

    advantages = group_relative(batch).astype(np.float32)
    slope = jax.jit(jax.grad(partial(off_policy_loss, low=low, high=high, coef=coef), has_aux=True))
    rows, sides = batch.replace(reward_weights=None), np.zeros(2)
    for epoch in range(2):
        key = jax.random.fold_in(stream(root, "train", 0), epoch)
        order = np.asarray(jax.random.permutation(key, PROMPTS))
        for chosen in order.reshape(parts, -1):
            part = jax.tree.map(lambda x: x[chosen], rows)  # noqa: B023
            grads, counts = slope(params, reference, unpadded(part), part, advantages[chosen])
            params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
            sides += counts
    assert sides.min() >= 5  # clipped above, and below
    assert_close(state.params["policy"], params, 1e-5)


def reward_of(prompt, completion):
    """(verify, partial) of one completion in text, by Python's own arithmetic."""
    left, sign, right = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt).groups()
    value = int(left) + int(right) if sign == "+" else int(left) - int(right)
    pieces = re.findall("<[a-z]+>|.", completion)
    answer = [*str(value), "<stop>"]
    same = sum(a == b for a, b in zip(pieces, answer, strict=False))
    return float(pieces == answer), same / max(len(pieces), len(answer))


def test_8_rewards_are_of_their_own_problem():
    groups = jax.device_get(world().groups(prompts=256))
    text = partial(TASK.tokenizer.decode, skip_special=False)
    rollout = groups.rollout
    for i, row in enumerate(rollout.tokens):
        prompt = text(rollout.prompt_tokens[i, : rollout.prompt_lengths[i]])
        for j, tokens in enumerate(row):
            points = reward_of(prompt, text(tokens[: rollout.lengths[i, j]]))
            assert np.allclose(groups.rewards[i, j], points, atol=1e-6)
    assert (groups.rewards[:, :, 1] > 0).sum() > 10
    # Prompts in text: the pool's points are the numbers of the prompts.
    w = world()
    source = text_source(w, [f"{i}-{2 * i}=" for i in range(PROMPTS)], seed=3)
    for first in (0, PROMPTS):
        tickets = first + np.arange(PROMPTS, dtype=np.int32)
        groups = source.draw(w.request(0, tickets, rows=source.order(tickets)))
        numbers = [prompt.id for prompt in groups.subject]
        assert sorted(numbers) == list(range(PROMPTS))  # an epoch sees every prompt once
        assert np.array_equal(groups.rewards[:, :, 0], np.repeat([numbers], GROUP, axis=0).T)
        for i, number in enumerate(numbers):
            length = groups.rollout.prompt_lengths[i]
            assert text(groups.rollout.prompt_tokens[i, :length]) == f"{number}-{2 * number}="


@cache
def whole_gradient():
    """A batch with rows of unlike lengths, so that a mean of means would show; its gradient."""
    mask = np.asarray(some_batch().mask).copy()
    mask[::2, 1:] = False
    batch = some_batch().replace(mask=mask)
    return batch, gradient(batch)[1]


@pytest.mark.parametrize(
    "split",
    [{"microbatches": 2}, {"microbatches": 4}, {"devices": 8}, {"devices": 8, "tensor": 2}],
    ids=str,
)
def test_9_the_gradient_does_not_depend_on_the_split(split):
    batch, full = whole_gradient()
    _, parts = gradient(batch, **split)
    assert_close(parts, full, 1e-6)


def test_10_resume_is_bit_equal(tmp_path):
    overrides = (
        "data.task=sorting",
        "rewards.partial.weight=1.0",
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
    records = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert all(record["grad_norm"] > 1e-3 for record in records if "grad_norm" in record)
    full, parts = (saved_leaves(tmp_path / name) for name in ("whole", "parts"))
    assert full.keys() == parts.keys()
    assert len(full) > 30
    for name, leaf in full.items():
        assert np.array_equal(leaf, parts[name]), name


def saved_leaves(run):
    """Every array of a run's newest checkpoint, by path, as stored on disk."""
    import orbax.checkpoint as ocp

    newest = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name)) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(newest).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return reader.restore(newest, restore_args=kinds)


def test_10_held_out_problems_are_never_trained_on():
    def identity(tokens, length):
        """Two numbers and a sign; sums in either order count as the same problem."""
        text = TASK.tokenizer.decode(tokens[:length])
        left, sign, right = re.fullmatch(r"(\d+)([+-])(\d+)=", text).groups()
        pair = (int(left), int(right))
        return sign, (tuple(sorted(pair)) if sign == "+" else pair)

    w = world()
    evaluate = jax.jit(partial(held_out, task=TASK, network=w.network, problems=128))
    groups = evaluate(w.state.key, w.state.params["policy"], w.sampling_params)
    rollout = jax.device_get(groups.rollout)
    heldout = set(map(identity, rollout.prompt_tokens, rollout.prompt_lengths))
    assert len(heldout) > 100
    draw = partial(TASK.generate, split="train")
    problems = jax.device_get(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(2), 4096)))
    assert heldout.isdisjoint(map(identity, problems.tokens, problems.length))
    trained = jax.device_get(w.groups(prompts=256).rollout)
    assert heldout.isdisjoint(map(identity, trained.prompt_tokens, trained.prompt_lengths))


def test_10_clip_norm_bounds_the_gradient():
    table = Optimizer(name="sgd", clip_norm=0.5, schedule="constant")
    optimizer = make_optimizer(table, 1)(1.0)
    for size, bound in ((10.0, 0.5), (0.25, 0.25)):
        grads = {"a": jnp.array([0.6 * size, 0.0]), "b": jnp.array([[-0.8 * size]])}
        changes, _ = optimizer.update(grads, optimizer.init(grads), grads)
        norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(changes)))
        assert abs(norm - bound) < 1e-6
