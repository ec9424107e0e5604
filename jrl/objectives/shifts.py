"""Batch-level terms of preference losses, written once a step as the statistic "shift", nats.

What KTO measures rewards from, BCO's running mean, the match of optimal transport. They look at the
whole batch, and so are computed from log-probabilities at the start of the step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jrl.objectives.comparisons import comparable, extremes
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Transform

START = frozenset({"proximal_logprobs", "ref_logprobs"})


def sums(name: str, batch: Batch) -> Array:
    """[N, G]: the sum of a statistic over each member's trained tokens."""
    return jnp.where(trained(batch), batch.stats[name], 0).sum(axis=2)


def write(batch: Batch, name: str, values: Array) -> Batch:
    """The batch with a statistic that is the same at all tokens of a member.

    Args:
      batch: any.
      name: of the statistic.
      values: [N, G], [N, 1] or [] float.
    """
    values = jnp.broadcast_to(values, batch.members.shape)
    spread = jnp.broadcast_to(jnp.expand_dims(values, 2), batch.mask.shape)
    return batch.replace(stats={**batch.stats, name: spread.astype(jnp.float32)})


def start_log_ratio(batch: Batch) -> Array:
    """[N, G] nats: log pi(y) - log pi_ref(y) at the start of the step."""
    return sums("proximal_logprobs", batch) - sums("ref_logprobs", batch)


def divergence_shift() -> Transform:
    """Writes the divergence from the reference that KTO measures rewards from.

    max(0, the mean of log pi(y) - log pi_ref(y) over the batch's completions).
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        live = comparable(batch)
        mean = jnp.where(live, start_log_ratio(batch), 0).sum() / jnp.maximum(live.sum(), 1)
        return scores, write(batch, "shift", jnp.maximum(mean, 0))

    return stateless(apply, START)


def running_shift(decay: float) -> Transform:
    """Writes the running mean of the log-ratio of completions, as in BCO.

    Each step's number is the mean of the mean over desirable completions and the mean over the
    others (scores above and below 0: put it after ``comparisons.labels``). The state is ``decay``
    times itself and the rest that number; the first step's number at first.

    Args:
      decay: in [0, 1).
    """

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        mean, steps = state
        live, ratio = comparable(batch), start_log_ratio(batch)

        def average(kind: Array) -> tuple[Array, Array]:
            total = jnp.where(kind, ratio, 0).sum() / jnp.maximum(kind.sum(), 1)
            return total, kind.any().astype(jnp.float32)

        high, some_high = average(live & (scores > 0))
        low, some_low = average(live & ~(scores > 0))
        kinds = some_high + some_low
        now = (high + low) / jnp.maximum(kinds, 1)
        moved = jnp.where(steps == 0, now, decay * mean + (1 - decay) * now)
        mean = jnp.where(kinds > 0, moved, mean)
        return scores, write(batch, "shift", mean), (mean, steps + (kinds > 0))

    return Transform(
        init=lambda: (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)),
        apply=apply,
        needs=START,
    )


def quantile_shift(paired: bool) -> Transform:
    """Writes the log-ratio that optimal transport matches a completion with, as in AOT.

    Of the batch's pairs, put together by ``comparisons.best_and_worst``, sorted over the batch:

        paired    of log pi(chosen) - log pi(rejected): the reference's value of the same rank
        unpaired  of a chosen completion's log-ratio: the rejected ones' value of the same rank,
                  and of a rejected one's: the chosen ones'

    Args:
      paired: which of the two.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)
        here = best.any(axis=1) & worst.any(axis=1)

        def gather(values: Array, at: Array) -> Array:
            return jnp.where(at, values, 0).sum(axis=1)

        def same_rank(values: Array, others: Array) -> Array:
            """[N, 1]: the others' value of each value's rank; groups without a pair sort last."""
            order = jnp.argsort(jnp.argsort(jnp.where(here, values, jnp.inf)))
            matched = jnp.sort(jnp.where(here, others, jnp.inf))[order]
            return jnp.expand_dims(jnp.where(here, matched, 0), 1)

        if paired:
            policy, ref = sums("proximal_logprobs", batch), sums("ref_logprobs", batch)
            u, v = (gather(x, best) - gather(x, worst) for x in (policy, ref))
            return scores, write(batch, "shift", same_rank(u, v))
        ratio = start_log_ratio(batch)
        high, low = gather(ratio, best), gather(ratio, worst)
        matched = jnp.where(best, same_rank(high, low), same_rank(low, high))
        return scores, write(batch, "shift", matched)

    return stateless(apply, START)
