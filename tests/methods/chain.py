"""The tables' tiny task, on which every method trains: write good tokens, and then stop.

The policy is a table of logits, one row for the token before, so that the expected reward is a sum
over a chain and known exactly. One sampler draws for all methods, and one program scores for all
that bring no statistic of their own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from table import EVERYONE, LANES, NAMES, G, N, T, as_float32, draws, example, fresh_state, program

from jrl.collect.groups import PlacedGroups
from jrl.methods.edit import EditView, Stateless
from jrl.sampling.params import make_sampling_params
from jrl.train.score import score
from jrl.types import Batch, Network, Rollout, StopReason, ValueNetwork

V, P, B = 6, 2, LANES * N
STOP, GOOD, BAD = 0, (1, 2, 3), (4, 5)
STEPS = 20
OPTIMIZER = optax.adam(0.1)
FULLEST = "nlpo"
"""The method that asks the most of a training step: values, epochs, statistics of its own, and a
reference that is renewed."""


# ---------------------------------------------------------------- the policy and the task


def table_network():
    """The logits of the next token are the row of the token before."""
    return Network(
        vocab_size=V,
        embed_dim=V,
        max_length=P + T,
        init=lambda key: {"table": jax.random.normal(key, (V, V))},
        axes=lambda: {"table": (None, None)},
        hidden=lambda params, tokens, positions, segments: (params["table"][tokens], {}),
        logits=lambda params, hidden: hidden,
        prepare=None,
        init_cache=None,
        extend=None,
    )


OUTPUTS = max(example(name).objective.value_outputs for name in NAMES)


def table_values():
    """As many values as any method reads, for each token at each position."""
    return ValueNetwork(
        init=lambda key: {"table": jnp.zeros((V, P + T, OUTPUTS))},
        axes=lambda: {"table": (None, None, None)},
        apply=lambda params, hidden, tokens, positions, segments: params["table"][
            tokens, jnp.clip(positions, 0, P + T - 1)
        ],
    )


NETWORK, VALUES, SAMPLING = table_network(), table_values(), make_sampling_params()


def start():
    return np.random.default_rng(0).normal(size=(V, V)).astype(np.float32) * 0.3


def frozen(name):
    """A policy that is read: the reference is the start, others know the task or its opposite."""
    table, push = start(), np.zeros(V, np.float32)
    if name != "ref":
        push[list(GOOD)], push[list(BAD)] = 1.5, -1.5
        push *= -1 if name.startswith("reverse") else 1
    return {"table": table + push}


def expected_reward(table):
    """The chance of one good token or more and then a stop or the end, over the prompts."""
    table = np.asarray(table, np.float64)
    chances = np.exp(table - table.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    ahead = np.ones(V)
    for step in reversed(range(T)):
        ahead = chances[:, list(GOOD)] @ ahead[list(GOOD)] + chances[:, STOP] * (step > 0)
    return float(ahead[1:].mean())


# ---------------------------------------------------------------- what a step trains on


@functools.cache
def sampler():
    """(key, table, prompts [B]) -> tokens and log-probabilities [B, G + 1, T], the last greedy."""

    def draw(key, table, prompts):
        token = jnp.broadcast_to(prompts[:, None], (B, G + 1))
        steps = []
        for k in jax.random.split(key, T):
            logprobs = jax.nn.log_softmax(table[token])
            best = jnp.argmax(logprobs, axis=2)
            token = jnp.where(jnp.arange(G + 1) < G, jax.random.categorical(k, logprobs), best)
            steps.append((token, jnp.take_along_axis(logprobs, token[:, :, None], axis=2)[:, :, 0]))
        return [jnp.stack(x, axis=2) for x in zip(*steps, strict=True)]

    return jax.jit(draw)


def solutions(rng, count):
    """[B, count, T]: one good token, then a stop."""
    tokens = np.zeros((B, count, T), np.int64)
    tokens[..., 0] = rng.choice(GOOD, (B, count))
    return tokens


PARTS = {"car": 2, "tool_star": 3}
"""Reward parts of methods that read several. All are the task's here: right answers are confident,
well formed and found with tools."""


def rollout_of(method, step, table, parts=1):
    """The method's rollout and its rewards, after plan, rewards and edits."""
    rng = np.random.default_rng(step)
    places = step * B + np.arange(B)
    prompts = 1 + places % (V - 1)
    sampled, logprobs = jax.device_get(sampler()(jax.random.key(step), table, prompts))
    members, greedy, demonstrations = draws(method)
    solution_tokens = solutions(rng, demonstrations)
    if method.lacks.startswith("answers of the weaker model"):
        solution_tokens[..., 0] = rng.choice(BAD, solution_tokens.shape[:2])
    counts = (members - greedy - demonstrations, greedy, demonstrations)
    assert counts[0] <= G

    def joined(sampled, others):
        return np.concatenate([sampled[:, : counts[0]], sampled[:, G:][:, :greedy], others], axis=1)

    tokens, logprobs = (
        joined(sampled, solution_tokens),
        joined(logprobs, np.zeros(solution_tokens.shape)),
    )
    kind = np.repeat(np.arange(3), counts)
    ended = np.cumsum(tokens == STOP, axis=2)
    mask = (ended - (tokens == STOP)) == 0
    good = (np.isin(tokens, GOOD) | (tokens == STOP) | ~mask).all(2) & (tokens[..., 0] != STOP)
    rollout = Rollout(
        prompt_tokens=np.stack([prompts, np.zeros_like(prompts)], axis=1),
        prompt_lengths=np.ones(B),
        tokens=tokens,
        lengths=mask.sum(2),
        mask=mask,
        sampler_logprobs=np.where(mask, logprobs, 0),
        versions=np.where(mask, step, -1),
        stop=np.where(ended[..., -1] > 0, StopReason.STOP_TOKEN, StopReason.LENGTH),
        baseline=np.broadcast_to(kind == 1, mask.shape[:2]),
    )
    rewards = np.repeat(good[..., None], parts, axis=2).astype(np.float32)
    rewards = np.asarray(method.rewards(placed(rollout, rewards), None).rewards, np.float32)
    return rollout, rewards.sum(2, keepdims=True), places, kind == 2


def placed(rollout, rewards):
    """Groups of the members of a rollout, all of them sampled for training."""
    zeros, numbers = np.zeros(rollout.baseline.shape, np.int32), np.arange(len(rewards))
    ones = np.ones(rewards.shape[2], np.float32)
    labels = {}, {}, {}, numbers, numbers, zeros, zeros == 0, zeros
    return PlacedGroups(rollout, rewards, ones, *labels)


def left_by(edit, rollout, rewards):
    """[B, G] bool: the members that an edit leaves in their groups."""
    keys, numbers = jax.random.split(jax.random.key(0), len(rewards)), np.arange(len(rewards))
    edited, _ = edit.apply((), placed(rollout, rewards), EditView(0, keys[0], keys, numbers < 0))
    return np.asarray(edited.members())


def batch_of(method, step, table, parts=1):
    """A step's batch of B prompts, made as the training loop makes it, its edits included.

    Edits that store completions leave the batch as it is: no prompt has come before.
    """
    rollout, rewards, places, demonstrations = rollout_of(method, step, table, parts)
    members = ~rollout.baseline
    for edit in method.edits:
        if isinstance(edit.init, Stateless):
            members &= left_by(edit, rollout, rewards)
    external = np.broadcast_to(demonstrations[:, None], rollout.mask.shape) & rollout.mask
    batch = Batch(
        prompt_tokens=rollout.prompt_tokens,
        prompt_lengths=rollout.prompt_lengths.astype(int),
        tokens=rollout.tokens,
        lengths=rollout.lengths,
        mask=rollout.mask & members[..., None],
        rewards=rewards,
        reward_weights=np.ones(1),
        members=members,
        baseline=rollout.baseline,
        truncated=rollout.stop == StopReason.LENGTH,
        stats={"sampler_logprobs": rollout.sampler_logprobs, "external": external * 1.0},
        ids={"prompt": places % 64},
    )
    return as_float32(batch)


def in_lanes(tree):
    """[LANES, N, ...] from [B, ...]."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(LANES, N, *x.shape[1:]), tree)


def in_the_tables_shape(method, step, batch, first):
    """The batch as ``program`` takes it: in lanes, with the statistics that the method reads.

    Args:
      method: the method.
      step: number of the step.
      batch: from ``batch_of``.
      first: statistics at the start of the step, by name.
    """
    shape = batch.tokens.shape
    ties = np.random.default_rng(step).integers(0, 2**31 - 1, shape[:2])
    one_turn = np.zeros(shape, np.int32)
    ids = batch.ids | {"tie_breaker": ties.astype(np.int32), "turn": one_turn, "step": one_turn}
    brought = {s.name for s in method.objective.statistics if s.start}
    names = {n for n in method.objective.needs if n.endswith("_logprobs")} | brought
    names |= {"rollout_entropy", "rollout_values"}
    stats = batch.stats | {name: first[name] for name in names - {*batch.stats}}
    batch = in_lanes(batch.replace(stats=stats, ids=ids, reward_weights=None))
    return batch.replace(reward_weights=np.ones((LANES, 1), np.float32))


# ---------------------------------------------------------------- a step, but for the loss

TRAINED = frozenset({"logprobs", "entropy", "values"})
FROZEN = tuple(sorted(frozenset().union(*(example(name).objective.frozen for name in NAMES))))


@functools.lru_cache(maxsize=8)
def scorer(statistics, also=()):
    """(params and frozen policies by name, batch) -> the live statistics and those named."""
    want = TRAINED | {*also}
    common = {"network": NETWORK, "value": VALUES, "want": want, "statistics": statistics}
    return jax.jit(lambda params, batch: score(params, batch, SAMPLING, **common))


@functools.lru_cache(maxsize=8)
def updater(statistics):
    """(params, moments, frozen, batch, gradients by statistics) -> params, moments, norm."""
    score = scorer(statistics)

    @jax.jit
    def update(params, moments, frozen, batch, gradients):
        _, pull = jax.vjp(lambda params: score(params | frozen, batch), params)
        (gradient,) = pull(gradients)
        changes, moments = OPTIMIZER.update(gradient, moments, params)
        return optax.apply_updates(params, changes), moments, optax.tree.norm(gradient)

    return update


def train(name):
    """Twenty steps, the loss and its gradients by the method's ``program``.

    Returns:
      The expected reward before and after, and the metrics of every step, means over the lanes:
      the method's own, "loss", "nonfinite" and "grad_norm".
    """
    method = example(name)
    statistics, schedule = method.objective.statistics, method.schedule
    at_start = tuple(s for s in statistics if s.start)
    live = tuple(s for s in statistics if not s.start)
    score_start = scorer(at_start, tuple(f"{name}_logprobs" for name in FROZEN))
    others = {key: frozen(key) for key in FROZEN}
    params = {"policy": {"table": start()}, "value": VALUES.init(None)}
    moments = OPTIMIZER.init(params)
    state = jax.tree.map(lambda x: np.stack([x] * LANES), fresh_state(name))
    keep, metrics = np.stack([EVERYONE] * LANES), []
    for i in range(STEPS):
        bare = batch_of(method, i, params["policy"]["table"], PARTS.get(name, 1))
        first = dict(jax.device_get(score_start(params | others, bare)))
        first["proximal_logprobs"] = first["logprobs"]
        first |= {f"rollout_{source}": first[source] for source in ("entropy", "values")}
        batch = in_the_tables_shape(method, i, bare, first)
        for _ in range(schedule.epochs):
            now = in_lanes(jax.device_get(scorer(live)(params | others, bare)))
            out = jax.device_get(program(name)(now, batch, keep, state))
            slopes = {k: x.reshape(B, *x.shape[2:]) for k, x in out["gradients"].items()}
            params, moments, norm = updater(live)(params, moments, others, bare, slopes)
        state = out["state"]
        for after in schedule.after:
            if not after.due(i + 1):
                continue
            if after.frozen:
                others["ref"] = params["policy"]
            elif after.on == "step":
                moments = OPTIMIZER.init(params)
        step_metrics = out["metrics"] | {"loss": out["loss"], "nonfinite": out["nonfinite"]}
        metrics.append({k: x.mean(0) for k, x in step_metrics.items()} | {"grad_norm": float(norm)})
    return expected_reward(start()), expected_reward(params["policy"]["table"]), metrics


# ---------------------------------------------------------------- what training must show

# Methods whose policy is not what learns, or not from these rewards: the metric that tells, and
# which way it goes.
OTHERWISE = {
    "bradley_terry": ("margin", 1),
    "margin_ranking": ("margin", 1),
    "plackett_luce": ("loss", -1),
    "prm": ("loss", -1),
    "meds3": ("loss", -1),
    "rest_mcts": ("loss", -1),
    "safe_rlhf_cost": ("loss", -1),
    "preference_strength": ("margin", 1),
    "simcse_reward": ("margin", 1),
    "meta_rm": ("margin", 1),
    "sorm": ("loss", -1),
    "spa_progress": ("loss", -1),
    "pav_verifier": ("loss", -1),
    "ml_irl": ("margin", 1),
    "helpsteer2_regression": ("loss", -1),
    "crm": ("loss", -1),
    "steerlm2": ("loss", -1),  # towards answers by their posterior, not by their reward
}


def assert_learns(name, before, after, metrics):
    """Asserts that all metrics are finite and the policy, or what learns instead, got better."""
    for i, step_metrics in enumerate(metrics):
        nonfinite = [key for key, value in step_metrics.items() if not np.isfinite(value).all()]
        assert not nonfinite, f"step {i}: {nonfinite}"
    assert max(step_metrics["grad_norm"] for step_metrics in metrics) > 0
    if name in OTHERWISE:
        key, sign = OTHERWISE[name]
        first, last = (np.mean([m[key] for m in part]) for part in (metrics[:5], metrics[-5:]))
        assert sign * (last - first) > 0, f"{key}: {first} -> {last}"
    else:
        assert after > before + 0.01, f"expected reward: {before:.3f} -> {after:.3f}"
    return metrics
