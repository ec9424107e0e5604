"""Numbers that a training step reports of its batch and its updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrl.objectives.kl import k3
from jrl.objectives.policy import Pairs, drawn
from jrl.types import Array, Batch, Stats, opinions

Metrics = dict[str, Array]


def batch_metrics(batch: Batch) -> Metrics:
    """Metrics of a batch, over its live members and tokens.

    Returns:
      reward and reward_std (points; the latter inside groups, averaged over them), reward_parts
      ([R], unweighted), length (tokens under the mask), prompt_length (tokens), truncated
      (fraction), completion_tokens, padding (the fraction of completion columns that hold no token,
      in rows as the network reads them); of episodes, turns and row_length (tokens, with those of
      the environment); and, for drawn completions, entropy (nats a token, estimated by their own
      log-probabilities).
      Demonstrations count towards token totals only.
    """
    live, sampled = batch.mask & batch.members[:, :, None], drawn(batch)
    members, scores = batch.members, batch.score()
    if "external" in batch.stats:
        demonstrated = ((batch.stats["external"] != 0) & live).any(-1)
        members = jnp.where((members & ~demonstrated).any(), members & ~demonstrated, members)
    count = jnp.maximum(members.sum(), 1)
    size = members.sum(1)
    groups = jnp.maximum((size > 0).sum(), 1)
    mean = jnp.where(members, scores, 0).sum(1) / jnp.maximum(size, 1)
    squares = jnp.where(members, jnp.square(scores - mean[:, None]), 0).sum(1)
    deviation = jnp.sqrt(squares / jnp.maximum(size, 1))
    metrics = {
        "reward": jnp.where(members, scores, 0).sum() / count,
        "reward_std": deviation.sum() / groups,
        "reward_parts": _part_means(batch, members),
        "length": jnp.where(members, batch.mask.sum(2), 0).sum() / count,
        "prompt_length": jnp.where(size > 0, batch.prompt_lengths, 0).sum() / groups,
        "truncated": (members & batch.truncated).sum() / count,
        "completion_tokens": live.sum(dtype=jnp.float32),
        "padding": _padding(batch),
    }
    if "turn" in batch.ids:
        turns_taken = jnp.where(batch.mask, batch.ids["turn"] + 1, 0).max(2)
        metrics["turns"] = jnp.where(members, turns_taken, 0).sum() / count
        metrics["row_length"] = jnp.where(members, batch.lengths, 0).sum() / count
    if "sampler_logprobs" in batch.stats:
        entropies = jnp.where(sampled, batch.stats["sampler_logprobs"], 0)
        metrics["entropy"] = -entropies.sum() / jnp.maximum(sampled.sum(), 1)
    return metrics


def _part_means(batch: Batch, members: Array) -> Array:
    """[R], the mean of each part over the members that it has an opinion of."""
    scored = members[:, :, None] & opinions(batch.rewards, batch.ids)
    return jnp.where(scored, batch.rewards, 0).sum((0, 1)) / jnp.maximum(scored.sum((0, 1)), 1)


def _padding(batch: Batch) -> Array:
    if batch.packing is not None:
        return (batch.packing.members < 0).mean(dtype=jnp.float32)
    return 1 - batch.lengths.mean(dtype=jnp.float32) / batch.tokens.shape[2]


def drift(stats: Stats, batch: Batch) -> Pairs:
    """Divergence of the policy from the sampler and from the reference, as (sum, count).

    Returns:
      logprob_diff: the mean absolute difference from the sampler's log-probabilities, nats, over
        tokens that the policy drew; before the first update of a step it is what the two disagree
        by, and should be rounding.
      kl: the k3 estimate of KL(policy, reference), nats a token, where there is a reference.
    """
    live = batch.mask & batch.members[:, :, None]
    count = live.sum(dtype=jnp.float32)
    now = jax.lax.stop_gradient(stats["logprobs"])
    pairs = {}
    if "sampler_logprobs" in stats:  # supervised examples were drawn by nobody
        sampled, difference = drawn(batch), jnp.abs(now - stats["sampler_logprobs"])
        total = jnp.where(sampled, difference, 0).sum()
        pairs["logprob_diff"] = (total, sampled.sum(dtype=jnp.float32))
    if "ref_logprobs" in stats:
        divergence = k3(now.reshape(-1), stats["ref_logprobs"].reshape(-1))
        pairs["kl"] = (jnp.where(live.reshape(-1), divergence, 0).sum(), count)
    return pairs


def summarise(pairs: Pairs) -> Metrics:
    """(sum, count) pairs, each [] or stacked over updates, as one number each.

    A count of 0 throughout marks a plain sum.
    """
    out = {}
    for name, (total, count) in pairs.items():
        total, count = total.sum(), count.sum()
        out[name] = jnp.where(count > 0, total / jnp.where(count > 0, count, 1), total)
    return out


def with_slot_use(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts with ``slot_use`` in place of the two sums it is made of.

    It is the share of slot-steps (decode steps, each counted once for every slot in use) that drew
    a token. Where no policy drew there are no such sums, and the counts stay as they are.
    """
    rest = {k: v for k, v in counts.items() if k not in ("slot_tokens", "slot_steps")}
    if "slot_steps" not in counts:
        return rest
    return rest | {"slot_use": counts["slot_tokens"] / counts["slot_steps"]}
