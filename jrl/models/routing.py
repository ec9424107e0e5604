"""The record of where a sampler's router sent each token, kept in the cache with keys and values.

So the record goes wherever the cache goes: into other slots, over a fork, into a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jrl.errors import UserError
from jrl.mesh import constrain
from jrl.models.config import ModelConfig
from jrl.types import Array, Cache, Network

if TYPE_CHECKING:
    from jrl.models.decode import View


def recording(network: Network, config: ModelConfig) -> Network:
    """The network with caches that keep where its router sent each token, for training to replay.

    Args:
      network: one of ``transformer``, perhaps with another cache.
      config: of the network.

    Returns:
      The network; its caches have "experts" [S, c, k] in the pieces of sparse layers, int8, or
      int16 where there are more than 128 experts; -1 where nothing is written.

    Raises:
      UserError: a model without experts.
    """
    if not any(config.sparse):
        raise UserError(
            "objective.router_replay = true: the model has no routed experts; remove it"
        )
    network = network._replace(init_cache=_with_room(network.init_cache, config))
    return network.with_extras(recorded=recorded)


def record_dtype(config: ModelConfig) -> Any:
    """Dtype of recorded experts; numbers go from -1 to experts - 1."""
    return jnp.int8 if config.experts <= 128 else jnp.int16


def _with_room(init_cache: Callable[..., Cache], config: ModelConfig) -> Callable[..., Cache]:
    dtype = record_dtype(config)

    def empty(piece: dict[str, Array]) -> dict[str, Array]:
        rows, _, columns, _ = piece["v"].shape
        experts = jnp.full((rows, columns, config.experts_per_token), -1, dtype)
        return piece | {"experts": constrain(experts, "batch", None, None)}

    def init(*args: Any, **kwargs: Any) -> Cache:
        cache = init_cache(*args, **kwargs)
        layers = tuple(
            tuple(map(empty, pieces)) if sparse else pieces
            for pieces, sparse in zip(cache.rows, config.sparse, strict=True)
        )
        return cache.replace(rows=layers)

    return init


def record(
    old: Sequence[dict[str, Array]],
    new: Sequence[dict[str, Array]],
    experts: Array,
    views: Sequence[View],
    live: Array,
) -> tuple[dict[str, Array], ...]:
    """A layer's pieces with the experts of live tokens written where their keys are.

    Args:
      old: the pieces as they were.
      new: the pieces with keys and values written.
      experts: [S, Q, k] int32.
      views: how the tokens look at the pieces.
      live: [S, Q] bool.
    """
    rows = jnp.arange(experts.shape[0])[:, None]
    columns = [view.columns for view in views if view.columns is not None]
    pieces = []
    for before, after, at in zip(old, new, columns, strict=True):
        recorded_experts = before["experts"]
        at = jnp.where(live & (at >= 0), at, recorded_experts.shape[1])
        recorded_experts = recorded_experts.at[rows, at].set(
            experts.astype(recorded_experts.dtype), mode="drop"
        )
        pieces.append(after | {"experts": recorded_experts})
    return tuple(pieces)


def recorded(own_pieces: Sequence[Sequence[dict[str, Array]]]) -> Array:
    """[S, C, n, k] int8 or int16: the record in a cache's rows, of all n sparse layers."""
    layers = [
        jnp.concatenate([piece["experts"] for piece in pieces], axis=1)
        for pieces in own_pieces
        if "experts" in pieces[0]
    ]
    return jnp.stack(layers, axis=2)
