"""Several policies trained in one run: a training state of each, stacked, and a step for each.

An episode of R players makes R groups for each start, one after the other, so that the groups of a
player lie R apart. Every policy has its own weights, optimiser, reference, value network and state
of the method, and is trained on the groups of the player that it was; nothing is shared but the
program. See ``models.several``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jrl.errors import UserError
from jrl.models.several import stacked, stacked_axes
from jrl.sampling.params import SamplingParams
from jrl.types import Array, Batch, Network, Several, TrainState, ValueNetwork

SUMMED = ("completion_tokens", "skipped_updates", "skipped_steps")
"""Metrics of a step that add up over policies; of all others the mean is taken."""
_OF_EACH = ("params", "opt_state", "frozen", "method")
N = TypeVar("N", Network, ValueNetwork)


def stack_state(state: TrainState, count: int) -> TrainState:
    """A state of one policy as that of ``count`` which begin alike."""
    return state.replace(**{name: stacked(getattr(state, name), count) for name in _OF_EACH})


def unstacked(shardings: Any) -> Any:
    """Where the weights of one policy lie, from where those of several do."""

    def of_one(where: NamedSharding) -> NamedSharding:
        return NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))

    return jax.tree.map(of_one, shardings)


def with_stacked_axes(network: N) -> N:
    """A network of which several stand in one tree, for where they lie."""
    return network._replace(axes=lambda: stacked_axes(network.axes()))


def divided_batch(batch: Batch, several: Several, step: Array | int) -> Batch:
    """[policies, ...]: each policy's groups of a batch in which players take turns."""

    def divide(x: Array) -> Array:
        by_player = jnp.moveaxis(x.reshape(-1, several.policies, *x.shape[1:]), 1, 0)
        return jnp.roll(by_player, several.policy(0, step), axis=0)

    weights = stacked(batch.reward_weights, several.policies)
    rows = jax.tree.map(divide, batch.replace(reward_weights=None))
    return rows.replace(reward_weights=weights)


def step_of_each(step: Callable[..., Any], several: Several) -> Callable[..., Any]:
    """A training step of all policies, one after the other, or of the first, from that of one.

    Its metrics are means over the policies that were trained and drew anything, or sums
    (``SUMMED``); "policy_rewards" [policies] are the rewards of each.
    """
    trained = 1 if several.copy_every else several.policies

    def every(
        state: TrainState, batch: Batch, sampling_params: SamplingParams
    ) -> tuple[TrainState, dict[str, Array]]:
        rows = divided_batch(batch, several, state.step)

        def one(given: tuple[dict, Batch]) -> tuple[dict, dict[str, Array]]:
            own, part = given
            after, metrics = step(state.replace(**own), part, sampling_params)
            return {name: getattr(after, name) for name in _OF_EACH}, metrics

        # Not ``vmap``: the activations of one policy are enough to hold at a time.
        each = {name: getattr(state, name) for name in _OF_EACH}
        first = jax.tree.map(lambda x: x[:trained], (each, rows))
        after, found = jax.lax.map(one, first)
        if several.copy_every:
            due = (state.step + 1) % several.copy_every == 0
            after = jax.tree.map(partial(_with_others, due), after, each)
        # A policy whose player never moved has nothing to report.
        moved = found["completion_tokens"] > 0

        def mean(x: Array) -> Array:
            own = jnp.where(moved.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
            return own.sum(0) / jnp.maximum(moved.sum(), 1)

        shown = found.pop("advantages", None)
        metrics = {n: x.sum(0) if n in SUMMED else mean(x) for n, x in found.items()}
        metrics["policy_rewards"] = jax.vmap(_reward)(rows)
        if shown is not None:  # in the order of the batch's groups
            shown = jnp.roll(shown, -several.policy(0, state.step), axis=0)
            in_order = jnp.moveaxis(shown, 0, 1).reshape(-1, *shown.shape[2:])
            metrics["advantages"] = in_order[: shown.shape[1]]
        return state.replace(step=state.step + 1, **after), metrics

    return every


def _with_others(due: Array, first: Array, before: Array) -> Array:
    """All policies after a step that trained the first: the others as they were, or copies."""
    copies = jnp.broadcast_to(first, before.shape)
    return jnp.concatenate([first, jnp.where(due, copies, before)[1:]])


def _reward(batch: Batch) -> Array:
    """[] float32: the mean score of the live members."""
    scores = jnp.where(batch.members, batch.score(), 0)
    return scores.sum() / jnp.maximum(batch.members.sum(), 1)


# ---------------------------------------------------------------- what must hold


def check_division(players: int, policies: int) -> None:
    """Raises UserError where players cannot be shared out among policies."""
    if policies > 1 and players % policies:
        raise UserError(
            f"objective.policies = {policies}: each policy plays as many players as the others, and"
            f" the environment has {players} for the policy; choose an environment of several"
            " players, such as data.env = 'nim' with data.opponent = 'self', or set"
            " objective.policies to 1"
        )
