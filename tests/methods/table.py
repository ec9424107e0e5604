"""Shared code of the tables over all methods: a method's one program, and batches in its shape.

A method's advantages, loss, gradients and new state are one compiled program, ``program(name)``. It
takes ``LANES`` batches side by side, so that rows in another order, garbage in the padding, halves
of a batch and numbers at their extremes are one call, and so is a step of training. Everything that
is asked of each method goes through it: nothing else is compiled once for each of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrl.methods import all_methods
from jrl.objectives import (
    combine_terms,
    compute_advantages,
    policy_loss,
    term_counts,
    update_state,
)
from jrl.types import Batch
from jrl.zoo.networks.token_values import TokenValues

LANES, N, G, T = 6, 8, 4, 5
NAMES = list(all_methods())
EVERYONE = np.ones(N, bool)

# Coefficients for the small numbers of the tests, where the defaults are for others. Rewards are
# between 0 and 1 here.
COEFFICIENTS = {"mpo": {"threshold": 0.5}, "fact_rlhf": {"stop_penalty": 0.1}}


@functools.cache
def example(name):
    """The method of that name as the tables build it."""
    published = all_methods()[name]
    options = COEFFICIENTS.get(name, {})
    made_up = {
        c.name: c.domain.example
        for c in published.coefficients.values()
        if c.required and c.name not in options
    }
    return published(**made_up, **options)


def out_of_reach(name):
    """Whether a method reads what the tables' network does not give: such a run is refused."""
    method = example(name)
    reads_attention = any(s.over == "attention" for s in method.objective.statistics)
    return reads_attention or isinstance(method.network, TokenValues)


def one_of_each_family():
    """The first method of each family that the tables' network can train."""
    first = {}
    for name in NAMES:
        if not out_of_reach(name):
            first.setdefault(all_methods()[name].family, name)
    return set(first.values())


# ---------------------------------------------------------------- one batch in many forms


def draws(method):
    """(members, of them greedy baselines, of them demonstrations) of a method's groups."""
    if not method.draw.samples:
        return method.draw.demonstrations, 0, method.draw.demonstrations
    more = method.draw.baseline_members + method.draw.demonstrations
    return (
        max(G, more + method.least_group),
        method.draw.baseline_members,
        method.draw.demonstrations,
    )


def numbers(name, seed=0, spread=0.3, reward=1.0):
    """(statistics with gradient, batch) in NumPy: ragged, with an empty group and equal rewards.

    Args:
      name: the method, which says what statistics there are and whose the members are.
      seed: of the numbers.
      spread: nats, the deviation of the policies' log-probabilities from the sampler's.
      reward: points, the scale of the rewards.
    """
    method = example(name)
    g, greedy, demonstrations = draws(method)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, (N, g))
    lengths[0, 0] = 0
    mask = (np.arange(T) < lengths[..., None]) & (rng.random((N, g, T)) < 0.9)
    members = rng.random((N, g)) < 0.9
    members[1] = False  # an empty group
    if method.draw.samples:
        members[2] = np.arange(g) == g - 1 - demonstrations  # a group with one member
    baseline = np.broadcast_to(np.arange(g) < greedy, (N, g)).copy()
    members &= ~baseline
    external = np.broadcast_to(np.arange(g) >= g - demonstrations, (N, g))
    rewards = rng.choice([0.0, 0.25, 1.0], (N, g)) * reward
    rewards[3] = rewards[3, 0]  # equal rewards
    logprobs = np.minimum(rng.normal(-1.5, 0.4, (N, g, T)), -0.01)
    if spread > 1:  # ratios far above 1 need tokens that the sampler found unlikely
        logprobs -= np.abs(spread * rng.normal(size=logprobs.shape)) * (
            rng.random(logprobs.shape) < 0.5
        )

    def near():
        return np.minimum(logprobs + spread * rng.normal(size=logprobs.shape), -1e-3)

    brought = {statistic.name: statistic for statistic in method.objective.statistics}
    shares = {key: rng.uniform(0.05, 0.95, logprobs.shape) for key in sorted(brought)}
    stats = {key: near() for key in sorted(method.objective.needs) if key.endswith("_logprobs")}
    stats |= {key: value for key, value in shares.items() if brought[key].start}
    for key in ("rollout_entropy", "rollout_values"):
        stats[key] = np.abs(rng.normal(size=logprobs.shape))
    stats["sampler_logprobs"] = np.where(external[..., None], 0, logprobs)
    stats["external"] = 1.0 * np.broadcast_to(external[..., None], mask.shape)
    trained = {key: value for key, value in shares.items() if not brought[key].start}
    trained |= {
        "logprobs": near(),
        "entropy": np.abs(rng.normal(size=logprobs.shape)),
        "values": rng.normal(size=logprobs.shape),
    }
    turns = np.cumsum(rng.random((N, g, T)) < 0.3, axis=2)
    batch = Batch(
        prompt_tokens=rng.integers(0, 9, (N, 2)),
        prompt_lengths=rng.integers(1, 3, N),
        tokens=rng.integers(0, 9, (N, g, T)),
        lengths=lengths,
        mask=mask,
        rewards=rewards[..., None],
        reward_weights=np.ones(1),
        members=members,
        baseline=baseline,
        truncated=rng.random((N, g)) < 0.2,
        stats=stats,
        ids={
            "prompt": rng.permutation(N),
            "tie_breaker": rng.permutation(N * g).reshape(N, g),
            "turn": turns,
            "step": turns,
        },
    )
    return trained, as_float32(batch)


def as_float32(tree):
    """The tree in the dtypes of the records."""
    kinds = {"f": np.float32, "i": np.int32, "b": np.bool_}
    return jax.tree.map(lambda x: np.asarray(x, kinds[np.asarray(x).dtype.kind]), tree)


def reordered(trained, batch, prompts, members):
    """The same rows in another order: prompts [N], members [G] are permutations."""

    def move(x):
        x = np.asarray(x)[prompts]
        return x[:, members] if x.ndim > 1 else x

    weights, texts = batch.reward_weights, batch.prompt_tokens[prompts]
    permuted = jax.tree.map(move, (trained, batch.replace(reward_weights=None, prompt_tokens=None)))
    return permuted[0], permuted[1].replace(reward_weights=weights, prompt_tokens=texts)


def with_garbage(trained, batch, rng):
    """The same batch with NaN and junk wherever nothing may be read."""
    live = batch.mask & batch.members[..., None]
    is_live = np.arange(T) < batch.lengths[..., None]
    spoil = lambda x: np.where(live, x, np.nan)  # noqa: E731
    unread = ~batch.members & ~batch.baseline
    return jax.tree.map(spoil, trained), batch.replace(
        tokens=np.where(is_live, batch.tokens, rng.integers(0, 9, batch.tokens.shape)),
        rewards=np.where(unread[..., None], np.nan, batch.rewards),
        stats={
            key: np.where(is_live, x, 0) if key == "external" else spoil(x)
            for key, x in batch.stats.items()
        },
    )


# ---------------------------------------------------------------- the one program of a method


def evaluate(objective, trained, batch, keep, state):
    """The loss, its gradients and the new state; only prompts under ``keep`` [N] have losses.

    Each term is divided by its count over the whole batch, as in a training step, so that losses
    and gradients of parts of a batch add up. Gradients are of the loss times the count of the
    surrogate's term: sums, of the size of one token's.
    """
    advantages, batch, state, metrics_of_advantage = compute_advantages(objective, batch, state)
    counts = term_counts(objective, batch)
    batch = batch.replace(members=batch.members & keep[:, None])

    def loss(trained):
        terms, metrics = policy_loss(objective, trained, batch, advantages, state)
        shares = {name: (total, counts[name]) for name, (total, _) in terms.items()}
        value = combine_terms(objective, shares, state)
        return value * jnp.maximum(counts["surrogate"], 1), (value, terms, metrics)

    (_, (value, terms, metrics)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
    metrics = {key: total / jnp.maximum(count, 1) for key, (total, count) in metrics.items()}
    return {
        "loss": value,
        "terms": terms,
        "gradients": gradients,
        "state": update_state(objective, state, metrics),
        "metrics": metrics,
        "nonfinite": metrics["nonfinite"] + metrics_of_advantage["nonfinite_rewards"][0],
    }


@functools.lru_cache(maxsize=4)  # tests run method by method; more programs would only take memory
def program(name):
    """``evaluate`` of ``LANES`` sets of arguments at once, each with a leading [LANES]."""
    return jax.jit(jax.vmap(functools.partial(evaluate, example(name).objective)))


def fresh_state(name):
    """The state of the method's objective before the first step."""
    return as_float32(example(name).objective.init())


def side_by_side(name, variants):
    """``evaluate`` of at most ``LANES`` of (trained, batch, keep), each from a fresh state.

    Returns:
      A list of results in NumPy.
    """
    full = [*variants, *[variants[-1]] * (LANES - len(variants))]
    fresh = fresh_state(name)
    stacked = jax.tree.map(lambda *x: np.stack(x), *((*as_float32(v), fresh) for v in full))
    out = jax.device_get(program(name)(*stacked))
    return [jax.tree.map(lambda x: x[i], out) for i in range(len(variants))]  # noqa: B023
