"""The loss of a batch: the two functions that a training step calls.

    advantages, batch, state, metrics = compute_advantages(objective, batch, state)   # once a step
    terms, metrics = policy_loss(objective, stats, batch, advantages, state)  # once a microbatch
    loss = combine_terms(objective, terms, state)

Terms and metrics are ``(sum, count)`` pairs that add up over microbatches; the counts depend on the
masks alone. Because the terms are divided by the counts of the WHOLE batch, a microbatch's share
of the loss is its sums over the counts that ``term_counts`` gives for the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.objectives.kl import k3
from jrl.objectives.transforms import per_token, trained
from jrl.types import STATISTICS, Aggregate, Array, Batch, Objective, Regularizer, Stats, Surrogate

Pair = tuple[Array, Array]
"""(sum [], count []) float32."""
Pairs = dict[str, Pair]


def compute_advantages(
    objective: Objective, batch: Batch, state: Any
) -> tuple[Array, Batch, Any, Pairs]:
    """The advantage of every token, from the batch's rewards.

    Args:
      objective: its ``advantage`` is applied to ``batch.score()``.
      batch: the whole batch, not a microbatch: baselines and normalisations see all of it.
      state: ``objective.init()`` or what the last step returned.

    Returns:
      advantages: [N, G, T] float32; 0 for tokens that are not trained. No gradient.
      batch: as the transforms left it (masks edited, ``returns`` added).
      state: the new state.
      metrics: ``advantage_mean`` and ``advantage_std`` over trained tokens, ``zero_std_groups`` the
        fraction of groups of two or more whose live scores are all equal, ``nonfinite_rewards``
        the fraction of live members whose score is NaN or infinite; and the transforms' ``notes``.

    Raises:
      UserError: when a statistic that a transform needs is not in ``batch.stats``, or advantages
        are no floats.
    """
    batch.check()
    names = {statistic.name for statistic in objective.advantage.statistics}
    _require(objective.advantage.needs | names, batch.stats, "the advantage")
    score = batch.score()
    metrics = _score_metrics(score, batch.members)
    values, batch, inner = objective.advantage.apply(score, batch, state["advantage"])
    metrics = jax.lax.stop_gradient(batch.notes) | metrics
    batch = batch.replace(notes={})
    if not jnp.issubdtype(jnp.result_type(values), jnp.floating):
        raise UserError(f"the advantage returned {jnp.result_type(values)}; return float32")
    live = trained(batch)
    advantages = jnp.where(live, per_token(values, batch), 0).astype(jnp.float32)
    count = live.sum(dtype=jnp.float32)
    mean = advantages.sum() / jnp.maximum(count, 1)
    spread = jnp.where(live, jnp.square(advantages - mean), 0).sum()
    one = jnp.ones((), jnp.float32)
    metrics["advantage_mean"] = (advantages.sum(), count)
    metrics["advantage_std"] = (jnp.sqrt(spread / jnp.maximum(count, 1)), one)
    return jax.lax.stop_gradient(advantages), batch, {**state, "advantage": inner}, metrics


def policy_loss(
    objective: Objective, stats: Stats, batch: Batch, advantages: Array, state: Any
) -> tuple[Pairs, Pairs]:
    """The terms of the loss of a batch or a microbatch, not yet divided or combined.

    Args:
      objective: its ``surrogate``, ``aggregate`` and ``regularizers`` are applied.
      stats: statistics computed from the parameters being trained, each [N, G, T] float32:
        ``logprobs`` at least. The others are read from ``batch.stats``; on a clash these win.
      batch: the (micro)batch, as ``compute_advantages`` returned it.
      advantages: [N, G, T] float32.
      state: ``objective.init()`` or what the last step returned.

    Returns:
      terms: "surrogate" and one entry for each regularizer: (sum, count). Not scaled.
      metrics: (sum, count) by name, over live tokens: those of the surrogate (numbers of a whole
        sequence or group are counted once for each that has a live token); ``approx_kl``, the k3
        estimate of KL(sampler || policy), nats, over tokens that the policy drew; the mean of each
        regularizer under its name; and
        ``nonfinite``, the fraction of live tokens whose loss is NaN or infinite. A NaN also makes
        the term NaN.

    Raises:
      UserError: when a statistic that the objective reads is in neither place.
    """
    live = trained(batch)
    stats = {**batch.stats, **stats}
    _require(objective.needs | {"logprobs"}, stats, "the objective")
    # Padding may hold anything. Zeroing it before the functions, not only after, keeps a NaN there
    # from coming back through the gradient.
    stats = {name: jnp.where(live, value, 0) for name, value in stats.items()}
    advantages = jax.lax.stop_gradient(jnp.where(live, advantages, 0))

    surrogate = objective.surrogate
    over_groups = surrogate.over == "group"
    lifted = jax.vmap(surrogate.apply) if over_groups else jax.vmap(jax.vmap(surrogate.apply))
    # Labels are zeroed in the padding too: what lies there may belong to no turn.
    labels = {name: jnp.where(live, _label(name, batch), 0) for name in sorted(surrogate.labels)}
    result = lifted(_reads(surrogate, stats) | labels, advantages, live)
    losses, per_token_metrics = _checked_losses(result, live, over_groups)
    terms = {"surrogate": _aggregate(objective.aggregate, losses, live, over_groups)}
    metrics = {name: _live_mean(value, live) for name, value in per_token_metrics.items()}
    if "sampler_logprobs" in stats:
        # Every method is watched, also those whose surrogate has no ratio.
        drift = k3(stats["sampler_logprobs"], stats["logprobs"])
        metrics = {"approx_kl": _live_mean(drift, drawn(batch)), **metrics}
    finite = jnp.isfinite(losses)
    for regularizer in objective.regularizers:
        values = jax.vmap(jax.vmap(regularizer.value))(_reads(regularizer, stats), live)
        aggregate = regularizer.aggregate or objective.aggregate
        terms[regularizer.name] = _aggregate(aggregate, values, live)
        metrics[regularizer.name] = _live_mean(values, live)
        finite = finite & jnp.isfinite(values)
    metrics["nonfinite"] = _live_mean(~finite, live)
    return terms, metrics


def drawn(batch: Batch) -> Array:
    """[N, G, T] bool: the trained tokens that the policy drew, those of demonstrations left out."""
    live = trained(batch)
    return live & (batch.stats["external"] == 0) if "external" in batch.stats else live


def term_counts(objective: Objective, batch: Batch) -> dict[str, Array]:
    """The count of each term that ``policy_loss`` would return, without the losses.

    Args:
      objective: its aggregates are applied to zeros.
      batch: as ``compute_advantages`` returned it.

    Returns:
      [] float32 by the names of ``policy_loss``'s terms.
    """
    live = trained(batch)
    zeros = jnp.zeros(live.shape, jnp.float32)
    over_groups = objective.surrogate.over == "group"
    counts = {"surrogate": _aggregate(objective.aggregate, zeros, live, over_groups)[1]}
    for regularizer in objective.regularizers:
        aggregate = regularizer.aggregate or objective.aggregate
        counts[regularizer.name] = _aggregate(aggregate, zeros, live)[1]
    return counts


def combine_terms(objective: Objective, terms: Mapping[str, Pair], state: Any) -> Array:
    """The scalar to minimise: each term's sum over its count, times its coefficient, added up.

    Args:
      objective: its regularizers give the coefficients; the surrogate's is 1.
      terms: (sum, count) by name. For one of several microbatches, the counts are those of the
        whole batch (``term_counts``); the losses of the microbatches then add up to the batch's.
      state: ``objective.init()`` or what the last step returned.

    Returns:
      [] float32. A term with count 0 adds its sum, which is 0.
    """
    total, count = terms["surrogate"]
    loss = total / jnp.maximum(count, 1)
    for regularizer, inner in zip(objective.regularizers, state["regularizers"], strict=True):
        total, count = terms[regularizer.name]
        loss = loss + regularizer.coef(inner) * total / jnp.maximum(count, 1)
    return loss


def update_state(objective: Objective, state: Any, metrics: Mapping[str, Array]) -> Any:
    """The objective's state after a training step.

    Args:
      objective: its regularizers' ``update`` is called.
      state: as ``compute_advantages`` returned it.
      metrics: [] float32 by name, ``policy_loss``'s metrics of the step, divided.
    """
    inner = tuple(
        regularizer.update(before, metrics)
        for regularizer, before in zip(objective.regularizers, state["regularizers"], strict=True)
    )
    return {**state, "regularizers": inner}


def _checked_losses(result: Any, live: Array, over_groups: bool) -> tuple[Array, Stats]:
    """A surrogate's result for all sequences, checked to be (losses, metrics by name)."""
    form = "[G, T]" if over_groups else "[T]"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise UserError(
            f"a surrogate returns (losses {form}, metrics by name), {{}} for none; not a"
            f" {type(result).__name__}"
        )
    if jnp.shape(result[0]) != live.shape:
        skipped = 1 if over_groups else 2
        raise UserError(
            f"a surrogate returned losses of shape {jnp.shape(result[0])[skipped:]}; return one for"
            f" each token, {form}, here {live.shape[skipped:]}"
        )
    if not jnp.issubdtype(jnp.result_type(result[0]), jnp.floating):
        raise UserError(
            f"a surrogate returned losses of {jnp.result_type(result[0])}; return float32, which"
            " has a gradient"
        )
    for name, values in result[1].items():
        shape = jnp.shape(values)
        if live.shape[: len(shape)] != shape:
            skipped = 1 if over_groups else 2
            raise UserError(
                f"a surrogate returned the metric {name!r} of shape {shape[skipped:]}; return one"
                f" number, or one for each token, {form}, here {live.shape[skipped:]}"
            )
    return result


def _reads(part: Surrogate | Regularizer, stats: Stats) -> Stats:
    """The statistics passed to a part: log-probabilities, its needs and its labels."""
    names = part.needs | {"logprobs"} | {statistic.name for statistic in part.statistics}
    return {name: stats[name] for name in sorted(names)}


def _label(name: str, batch: Batch) -> Array:
    """[N, G, T] int32: a label of each token, whatever it was recorded for; 0 without any."""
    label = batch.ids.get(name, jnp.zeros((), jnp.int32))
    axes = tuple(range(label.ndim, batch.mask.ndim))
    return jnp.broadcast_to(jnp.expand_dims(label, axes), batch.mask.shape)


def _aggregate(aggregate: Aggregate, losses: Array, live: Array, over_groups: bool = False) -> Pair:
    """Applies an aggregate to [N, G, T]: rows are sequences [N * G, T], or groups [N, G * T]."""
    chex.assert_equal_shape([losses, live])
    rows = (live.shape[0], -1) if over_groups else (-1, live.shape[-1])
    pair = aggregate(losses.reshape(rows), live.reshape(rows))
    if not isinstance(pair, tuple) or [jnp.shape(x) for x in pair] != [(), ()]:
        raise UserError(
            "an aggregate returns (sum [], count []) of losses [B, T] and their mask, as"
            f" jrl.objectives.token_mean; not {jax.tree.map(jnp.shape, pair)}"
        )
    return pair


def _live_mean(values: Array, live: Array) -> Pair:
    """Over live tokens; of values [N, G] or [N], over the sequences or groups that have one."""
    live = live.any(axis=tuple(range(values.ndim, live.ndim)))
    values = jax.lax.stop_gradient(values).astype(jnp.float32)
    return jnp.where(live, values, 0).sum(), live.sum(dtype=jnp.float32)


def _score_metrics(score: Array, members: Array) -> Pairs:
    low = jnp.min(score, axis=1, where=members, initial=jnp.inf)
    high = jnp.max(score, axis=1, where=members, initial=-jnp.inf)
    compared = members.sum(axis=1) > 1
    nonfinite = members & ~jnp.isfinite(score)
    return {
        "zero_std_groups": (
            (compared & (low == high)).sum(dtype=jnp.float32),
            compared.sum(dtype=jnp.float32),
        ),
        "nonfinite_rewards": (
            nonfinite.sum(dtype=jnp.float32),
            members.sum(dtype=jnp.float32),
        ),
    }


def _require(needs: frozenset[str], stats: Mapping[str, Array], reader: str) -> None:
    absent = sorted(needs - set(stats))
    if absent:
        meanings = "; ".join(f"{name}: {STATISTICS.get(name, 'unknown')}" for name in absent)
        raise UserError(
            f"{reader} reads statistics that the batch does not hold ({meanings}); have the "
            "scoring pass compute them, or choose a method that does not need them"
        )
