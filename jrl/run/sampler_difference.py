"""Difference of the sampler's distribution from the one that training scores with."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.groups import to_batch
from jrl.collect.sources import simple_request
from jrl.objectives.kl import k3
from jrl.setup.adapters import policy_of
from jrl.setup.run import Run
from jrl.train.batches import sources_of
from jrl.train.score import score
from jrl.types import Array, Batch, Network, Params, Rollout, TrainState


def distribution_difference(
    sampler_logprobs: Array, logprobs: Array, mask: Array
) -> dict[str, Array]:
    """The difference between two distributions, measured on tokens that the first one drew.

    Args:
      sampler_logprobs: float32, nats, of the distribution drawn from; any shape.
      logprobs: the same tokens under the distribution that is trained.
      mask: True where a token counts.

    Returns:
      mean_difference and max_difference of the log-probabilities, absolute, nats; kl, the k3
      estimate of KL(sampler, policy), nats a token; tokens counted. Zeros when none counts.

    >>> live = jnp.array([True, False])
    >>> found = distribution_difference(jnp.zeros(2), jnp.array([0.5, -9.0]), live)
    >>> round(float(found["kl"]), 4), float(found["max_difference"])
    (0.1487, 0.5)
    """
    live = mask.reshape(-1)
    sampled = jnp.where(live, sampler_logprobs.reshape(-1), 0)
    scored = jnp.where(live, logprobs.reshape(-1), 0)
    count = jnp.maximum(live.sum(), 1)
    difference = jnp.abs(scored - sampled)
    return {
        "mean_difference": difference.sum() / count,
        "max_difference": difference.max(),
        "kl": k3(sampled, scored).sum() / count,
        "tokens": live.sum(),
    }


def rollout_difference(
    params: Params, rollout: Rollout, sampling_params: Any, *, network: Network
) -> dict[str, Array]:
    """``distribution_difference`` of a rollout, scored by ``network`` under ``params``."""
    ones = jnp.ones((*rollout.lengths.shape, 1), jnp.float32)
    batch: Batch = to_batch(rollout, ones, jnp.ones(1, jnp.float32))
    want = frozenset({"logprobs"})
    stats = score(
        {"policy": params}, batch, sampling_params, network=network, value=None, want=want
    )
    return distribution_difference(rollout.sampler_logprobs, stats["logprobs"], rollout.mask)


def measure_run(run: Run, state: TrainState) -> dict[str, float]:
    """``distribution_difference`` of a run's sampler and its policy, on the prompts of one step.

    Args:
      run: from ``setup``; it must draw completions.
      state: at any step; call it under the run's mesh.
    """
    in_place = run._replace(rollout_mesh=None)  # where the state is
    source, policy = sources_of(in_place).train(in_place, None), policy_of(state, run.network)
    tickets = np.arange(run.config.train.prompts, dtype=np.int32)
    rows = source.order(tickets)
    group = run.config.sampling.group
    request = simple_request(state.key, {"policy": policy}, np.int32(0), tickets, group, rows=rows)
    rollout = source.draw(request).rollout
    source.finish(complete=True)
    measure = jax.jit(partial(rollout_difference, network=run.network))
    return {name: float(x) for name, x in measure(policy, rollout, run.sampling_params).items()}


def difference_text(run: Run, state: TrainState) -> str:
    """Message about a sampler whose distribution is not the policy's."""
    drift = measure_run(run, state)
    parts = " and ".join(run.config.sampling.in_8_bits)
    return (
        f"sampling with {parts} in 8 bits draws from another distribution than the policy's: over "
        f"{drift['tokens']:.0f} tokens log-probabilities differ by {drift['mean_difference']:.2g} "
        f"nats on average and {drift['max_difference']:.2g} at most, and KL(sampler, policy) is "
        f"{drift['kl']:.2g} nats a token; {correction_text(run)}"
    )


def correction_text(run: Run) -> str:
    """The correction for a sampler's distribution that is not the policy's, as text."""
    needs = run.method.objective.surrogate.needs
    if {"sampler_logprobs", "proximal_logprobs"} <= needs:
        return "losses are weighted for it (importance sampling)"
    if "sampler_logprobs" in needs:
        return "the method's ratios are against the distribution drawn from"
    return "losses are not corrected for it"
