"""The training step, program 2 of an iteration: score, advantages, loss, gradient, update.

    state, metrics = train_step(state, batch)

``make_step`` returns a pure function; ``compile_step`` is the one place that jits it, with the
state donated and its shardings pinned, so that step 2 runs the executable of step 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.errors import UserError
from jrl.mesh import batch_sharding, replicated
from jrl.objectives.kl import k3
from jrl.objectives.policy import (
    combine_terms,
    compute_advantages,
    policy_loss,
    term_counts,
    update_state,
)
from jrl.sampling.draw import Law
from jrl.train.score import in_parts, score, split
from jrl.types import (
    Array,
    Batch,
    Network,
    Objective,
    Params,
    Stats,
    TrainState,
    ValueNetwork,
    stream,
)

Metrics = dict[str, Array]
Pairs = dict[str, tuple[Array, Array]]
"""(sum, count) by name."""
Step = Callable[[TrainState, Batch, Law], tuple[TrainState, Metrics]]


def make_step(
    *,
    network: Network,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    value: ValueNetwork | None = None,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Step:
    """A training step as a pure function of (state, batch, law).

    Args:
      network: the policy.
      objective: what to maximise.
      optimizer: any optax transformation; sees the gradient of the mean loss.
      value: the value network, when the objective needs values.
      epochs: passes over the batch.
      minibatches: optimiser updates an epoch; prompts are dealt to them at random each epoch.
      microbatches: parts that a minibatch's gradient is summed over, to bound memory. The result
        does not depend on it: sums and counts travel, and are divided once.

    Returns:
      The step. It returns scalars by name, means over tokens, sequences or updates as named.
      An update whose gradient is not finite is left out and counted in ``skipped_updates``; then
      the objective's own state stays as it was, too.

    Raises:
      UserError: the objective needs values and there is no value network; when called, a batch
        that minibatches and microbatches do not divide.
    """
    check_value(objective, value)

    def step(state: TrainState, batch: Batch, law: Law) -> tuple[TrainState, Metrics]:
        batch = batch.check()
        check_split(batch.tokens.shape[0], minibatches, microbatches)
        batch = batch.replace(stats=batch.stats | _frozen_statistics(state, batch, law))
        advantages, batch, method, sums = compute_advantages(objective, batch, state.method)
        key = stream(state.key, "train", state.step)

        def update(carry: Any, index: Array) -> tuple[Any, Pairs]:
            rows = _minibatch_rows(key, index, batch.tokens.shape[0], minibatches)
            part = _take_rows(batch, rows), advantages[rows]
            grads, sums = _gradient(carry[0], part, method, law)
            return _apply_gradient(carry, grads, sums)

        carry = (state.params, state.opt_state)
        (params, opt_state), updates = jax.lax.scan(update, carry, jnp.arange(epochs * minibatches))
        if "logprob_diff" in updates:  # before the first update, when it is rounding alone
            updates["logprob_diff"] = jax.tree.map(lambda x: x[:1], updates["logprob_diff"])
        metrics = batch_metrics(batch) | summarise(sums) | summarise(updates)
        # A tracker must not swallow the NaN that an update was left out for.
        method = update_state(objective, method, metrics)
        sound = metrics["skipped_updates"] == 0
        method = jax.tree.map(lambda new, old: jnp.where(sound, new, old), method, state.method)
        state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            method=method,
        )
        return state, metrics

    def _frozen_statistics(state: TrainState, batch: Batch, law: Law) -> Stats:
        """What the objective needs of policies that do not change during the step."""

        def of(params: Params, want: frozenset[str]) -> Stats:
            scoring = partial(score, params, law=law, network=network, value=value, want=want)
            return in_parts(scoring, batch, minibatches * microbatches)

        stats: Stats = {}
        renamed = {"proximal_logprobs": "logprobs", "rollout_values": "values"}
        start = {name: source for name, source in renamed.items() if name in objective.needs}
        if start:
            scored = of(state.params, frozenset(start.values()))
            stats |= {name: scored[source] for name, source in start.items()}
        for name in sorted(state.frozen):
            scored = of({"policy": state.frozen[name]}, frozenset({"logprobs"}))
            stats[f"{name}_logprobs"] = scored["logprobs"]
        return jax.lax.stop_gradient(stats)

    live = frozenset({"logprobs", "entropy", "values"})
    want = (objective.needs & live) | {"logprobs"}

    def _gradient(
        params: Params, part: tuple[Batch, Array], method: Any, law: Law
    ) -> tuple[Params, Pairs]:
        """The gradient of the mean loss over a minibatch, and the sums behind its metrics."""
        batch, advantages = part
        counts = term_counts(objective, batch)

        def loss(params: Params, rows: tuple[Batch, Array]) -> tuple[Array, Pairs]:
            batch, advantages = rows
            stats = batch.stats | score(
                params, batch, law, network=network, value=value, want=frozenset(want)
            )
            terms, sums = policy_loss(objective, stats, batch, advantages, method)
            terms = {name: (total, counts[name]) for name, (total, _) in terms.items()}
            mean = combine_terms(objective, terms, method)
            share = {"loss": (mean, jnp.float32(1 / microbatches))}
            return mean, _drift(stats, batch) | sums | share

        grad = jax.grad(loss, has_aux=True)
        if microbatches == 1:
            return grad(params, (batch, advantages))

        def add(total: Any, rows: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, rows)), None

        split_advantages = jnp.moveaxis(
            advantages.reshape(-1, microbatches, *advantages.shape[1:]), 1, 0
        )
        parts = (split(batch, microbatches), split_advantages)
        shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    def _apply_gradient(
        carry: tuple[Params, Any], grads: Params, sums: Pairs
    ) -> tuple[tuple[Params, Any], Pairs]:
        """One optimiser update, left out when the gradient is not finite."""
        params, opt_state = carry
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        changes, moved = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, changes), moved)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, carry)
        return kept, sums | {
            "grad_norm": (norm, jnp.float32(1)),
            "skipped_updates": ((~finite).astype(jnp.float32), jnp.float32(0)),
        }

    return step


def compile_step(step: Step, shardings: TrainState, mesh: Mesh) -> Step:
    """The step as one executable: state donated, its shardings pinned on both sides.

    Args:
      step: from ``make_step``.
      shardings: from ``state.state_shardings``.
      mesh: the mesh of the run.

    Returns:
      A function of (state, batch, law); call it under ``jax.set_mesh(mesh)``.
    """
    return jax.jit(
        step,
        in_shardings=(shardings, None, replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _drift(stats: Stats, batch: Batch) -> Pairs:
    """How far the policy is from the sampler and from the reference, as (sum, count).

    Returns:
      logprob_diff: the mean absolute difference from the sampler's log-probabilities, nats; before
        the first update of a step it is what the two disagree by, and should be rounding.
      kl: the k3 estimate of KL(policy, reference), nats a token, where there is a reference.
    """
    live = batch.mask & batch.members[:, :, None]
    count = live.sum(dtype=jnp.float32)
    now = jax.lax.stop_gradient(stats["logprobs"])
    pairs = {}
    if "sampler_logprobs" in stats:  # supervised examples were drawn by nobody
        difference = jnp.abs(now - stats["sampler_logprobs"])
        pairs["logprob_diff"] = (jnp.where(live, difference, 0).sum(), count)
    if "ref_logprobs" in stats:
        divergence = k3(now.reshape(-1), stats["ref_logprobs"].reshape(-1))
        pairs["kl"] = (jnp.where(live.reshape(-1), divergence, 0).sum(), count)
    return pairs


def check_value(objective: Objective, value: ValueNetwork | None) -> None:
    """Raises UserError when an objective needs values and there is no value network."""
    if value is None and objective.needs & {"values", "rollout_values"}:
        raise UserError(
            "value = None: the objective needs a value network; pass value_head(network) or "
            "value_network(network)"
        )


def check_split(prompts: int, minibatches: int, microbatches: int) -> None:
    """Raises UserError when a batch of ``prompts`` does not divide as asked."""
    if min(minibatches, microbatches) < 1 or prompts % (minibatches * microbatches):
        raise UserError(
            f"minibatches = {minibatches} times microbatches = {microbatches} does not divide a "
            f"batch of {prompts} prompts; choose divisors of it"
        )


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """The batch on the mesh, prompts divided over the data axes."""
    weights = jax.device_put(batch.reward_weights, replicated(mesh))
    rows = jax.device_put(batch.replace(reward_weights=None), batch_sharding(mesh))
    return rows.replace(reward_weights=weights)


def batch_metrics(batch: Batch) -> Metrics:
    """What a batch looks like in numbers, over its live members and tokens.

    Returns:
      reward and reward_std (points; the latter inside groups, averaged over them), reward_parts
      ([R], unweighted), length (tokens), truncated (fraction), completion_tokens and, for drawn
      completions, entropy (nats a token, estimated by the drawn tokens' own log-probabilities).
    """
    members, scores = batch.members, batch.score()
    count = jnp.maximum(members.sum(), 1)
    size = members.sum(1)
    mean = jnp.where(members, scores, 0).sum(1) / jnp.maximum(size, 1)
    squares = jnp.where(members, jnp.square(scores - mean[:, None]), 0).sum(1)
    deviation = jnp.sqrt(squares / jnp.maximum(size, 1))
    live = batch.mask & members[:, :, None]
    metrics = {
        "reward": jnp.where(members, scores, 0).sum() / count,
        "reward_std": deviation.sum() / jnp.maximum((size > 0).sum(), 1),
        "reward_parts": jnp.where(members[:, :, None], batch.rewards, 0).sum((0, 1)) / count,
        "length": jnp.where(members, batch.lengths, 0).sum() / count,
        "truncated": (members & batch.truncated).sum() / count,
        "completion_tokens": live.sum(dtype=jnp.float32),
    }
    if "sampler_logprobs" in batch.stats:
        drawn = jnp.where(live, batch.stats["sampler_logprobs"], 0)
        metrics["entropy"] = -drawn.sum() / jnp.maximum(live.sum(), 1)
    return metrics


def _minibatch_rows(key: Array, index: Array, n: int, minibatches: int) -> Array:
    """The prompts of one update; every epoch deals all of them out anew."""
    if minibatches == 1:
        return jnp.arange(n)
    epoch, part = index // minibatches, index % minibatches
    order = jax.random.permutation(jax.random.fold_in(key, epoch), n)
    return jax.lax.dynamic_slice_in_dim(order, part * (n // minibatches), n // minibatches)


def _take_rows(batch: Batch, rows: Array) -> Batch:
    if rows.shape[0] == batch.tokens.shape[0]:
        return batch
    taken = jax.tree.map(lambda x: x[rows], batch.replace(reward_weights=None))
    return taken.replace(reward_weights=batch.reward_weights)


def summarise(pairs: Pairs) -> Metrics:
    """(sum, count) pairs, each [] or stacked over updates, as one number each.

    A count of 0 throughout marks a plain sum.
    """
    out = {}
    for name, (total, count) in pairs.items():
        total, count = total.sum(), count.sum()
        out[name] = jnp.where(count > 0, total / jnp.where(count > 0, count, 1), total)
    return out
