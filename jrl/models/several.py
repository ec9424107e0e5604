"""Stacked policies, one per player, each trained on its own rows.

    network = together(network, 2)
    params = network.init(key)                              # [2, ...] each; both begin alike
    weights = network.extras.several.speaking(who).prepare(params)

As a network it is the first policy: evaluation, serving and export use that one. When players take
turns, every policy prefills every row into its own cache, and the policy whose turn it is samples.
Each token is therefore read once per policy; a decode step is bound by reading weights, so policies
with separate rows would take as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.types import Array, Cache, Network, NetworkExtras, Params, Several


class Prepared(struct.PyTreeNode):
    """The results of the policies' ``prepare``: of all, or of the first only."""

    weights: tuple[Any, ...]


def together(network: Network, count: int, swap_every: int = 0, copy_every: int = 0) -> Network:
    """``count`` policies like ``network``, which begin with the same weights.

    Args:
      network: all of whose weights are trained.
      count: at least 2.
      swap_every: see ``Several``.
      copy_every: see ``Several``.
    """
    first, extras = partial(_first, network), network.extras
    speaking = partial(_speaking, network, count)
    several = Several(count, swap_every, copy_every, network, speaking)
    return network._replace(
        init=lambda key: stacked(network.init(key), count),
        axes=lambda: stacked_axes(network.axes()),
        hidden=first(network.hidden),
        logits=first(network.logits),
        prepare=lambda params: Prepared((network.prepare(_of_first(params)),)),
        init_cache=_init_cache(network),
        extend=first(network.extend),
        extras=NetworkExtras(
            fill=first(extras.fill),
            hidden_shared=first(extras.hidden_shared),
            head=first(extras.head),
            attention=first(extras.attention),
            gathered=extras.gathered,
            several=several,
        ),
    )


def stacked(tree: Any, count: int) -> Any:
    """Every array ``count`` times, along a new first axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)


def stacked_axes(axes: Any) -> Any:
    """The logical axes of ``stacked`` parameters."""
    return jax.tree.map(lambda names: (None, *names), axes, is_leaf=lambda x: type(x) is tuple)


def one_of(tree: Any, index: Any) -> Any:
    """Policy number ``index`` of a stacked tree."""
    return jax.tree.map(lambda x: x[index], tree)


def _of_first(params: Any) -> Any:
    return params.weights[0] if isinstance(params, Prepared) else one_of(params, 0)


def _first(network: Network, function: Callable[..., Any] | None) -> Any:
    """A function of parameters or prepared weights and more, with those of the first policy."""
    if function is None:
        return None
    return lambda params, *arguments: function(_of_first(params), *arguments)


def _init_cache(network: Network) -> Callable[..., Cache]:
    def init_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Cache:
        weights_of_first = None if weights is None else _of_first(weights)
        return network.init_cache(rows, length, weights_of_first, pieces)

    return init_cache


def _speaking(network: Network, count: int, policies: Array) -> Network:
    """See ``Several.speaking``."""

    def prepare(params: Params) -> Prepared:
        return Prepared(tuple(network.prepare(one_of(params, i)) for i in range(count)))

    def init_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Cache:
        weights_of = [None] * count if weights is None else weights.weights
        caches = [network.init_cache(rows, length, each, pieces) for each in weights_of]
        return Cache(own=tuple(cache.own for cache in caches))

    def parts(cache: Cache) -> list[Cache]:
        prefixes = [None] * count if cache.prefix is None else cache.prefix
        pairs = zip(cache.own, prefixes, strict=True)
        return [cache.replace(own=layers, prefix=prefix) for layers, prefix in pairs]

    def joined(cache: Cache, caches: list[Cache]) -> Cache:
        return cache.replace(own=tuple(each.own for each in caches))

    def chosen(of_each: list[Array]) -> Array:
        """[S, ...]: each row by its policy."""
        rows = jnp.arange(of_each[0].shape[0])
        return jnp.stack(of_each)[policies, rows]

    def extend(weights: Prepared, cache: Cache, *tokens: Array) -> tuple[Array, Cache]:
        pairs = zip(weights.weights, parts(cache), strict=True)
        results = [network.extend(each, part, *tokens) for each, part in pairs]
        return chosen([hidden for hidden, _ in results]), joined(
            cache, [after for _, after in results]
        )

    def fill(weights: Prepared, cache: Cache, tokens: Array, lengths: Array) -> Cache:
        assert network.extras.fill is not None
        pairs = zip(weights.weights, parts(cache), strict=True)
        return joined(cache, [network.extras.fill(w, part, tokens, lengths) for w, part in pairs])

    def logits(weights: Prepared, hidden: Array) -> Array:
        return chosen([network.logits(each, hidden) for each in weights.weights])

    return network._replace(
        prepare=prepare,
        init_cache=init_cache,
        extend=extend,
        logits=logits,
        extras=NetworkExtras(
            fill=None if network.extras.fill is None else fill, gathered=network.extras.gathered
        ),
    )
