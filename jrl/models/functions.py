"""Networks of plain functions: of parameters and tokens, without a framework of modules.

``function_network`` makes a policy of two functions; ``flax_bridge`` takes modules apart into such
functions first. Its head has the two ways in which a network is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.mesh import RULES, constrain
from jrl.models import replay
from jrl.models.heads import RewardNetwork
from jrl.types import Array, Network, Params, ValueNetwork


def function_network(
    init: Callable[[Array], Params],
    logits: Callable[..., Array],
    *,
    vocab_size: int,
    max_length: int,
    packed: bool = True,
    axes: Any = None,
) -> Network:
    """A policy of two plain functions.

    Args:
      init: (key) -> parameters, nested dicts of arrays.
      logits: (params, tokens [B, L], positions [B, L], segments [B, L]) -> logits [B, L, V] of any
        float dtype. A token attends to tokens of its own segment at positions no later than its
        own; segment 0 is padding. With ``packed=False`` (params, tokens) -> logits, causal over the
        columns.
      vocab_size: V.
      max_length: the longest sequence that it accepts, tokens.
      packed: whether ``logits`` takes positions and segments, and masks by them.
      axes: a tree like the parameters, of tuples with a logical axis name (``jrl.mesh.RULES``) or
        None for each axis; None keeps all parameters whole on every device.

    Returns:
      A ``Network`` whose "hidden" states are the logits, D = V. ``extend`` runs ``logits`` over all
      tokens again; a ``Network`` with a cache of its own is written out, as ``transformer`` is.

    Raises:
      UserError: from ``init`` and calls: an axis name that JRL's table lacks, or a result of the
        wrong shape.
    """
    name = getattr(logits, "__name__", "the function")

    def run(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        return logits(params, tokens, positions, segments) if packed else logits(params, tokens)

    def named() -> Any:
        shapes = jax.eval_shape(init, jax.random.key(0))
        if axes is None:
            return jax.tree.map(lambda x: (None,) * x.ndim, shapes)
        is_names = lambda x: isinstance(x, tuple)  # noqa: E731
        specs = jax.tree.map(lambda x: jax.sharding.PartitionSpec(*x), axes, is_leaf=is_names)
        return axes_of(name, shapes, specs)

    functions = Functions(init, named, run if packed else one_sequence_a_row(run))
    return network_of(functions, vocab_size, max_length)


class Functions(NamedTuple):
    """A network of any kind: init(key), axes(), and run(params, tokens, positions, segments)."""

    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    run: Callable[[Params, Array, Array, Array], Array]


def axes_of(name: str, shapes: Any, specs: Any) -> Any:
    """Logical axis names of every leaf.

    Args:
      name: of the network, for messages.
      shapes: of the parameters.
      specs: a tree of PartitionSpecs with the names, which may be shorter than the shapes.

    Raises:
      UserError: a name that JRL's table lacks.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    spec_leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    axes = []
    for (path, leaf), spec in zip(leaves, spec_leaves, strict=True):
        names = tuple(spec) + (None,) * (leaf.ndim - len(spec))
        for axis in names:
            if axis is not None and axis not in RULES:
                raise UserError(
                    f"{name}{jax.tree_util.keystr(path)}: partitioned over {axis!r}; name the"
                    f" axes as JRL does: {', '.join(RULES)}"
                )
        axes.append(names)
    return jax.tree.unflatten(treedef, axes)


def one_sequence_a_row(run: Callable[..., Array]) -> Callable[..., Array]:
    """``run`` for a module that is causal over columns: gaps are closed before and opened after."""

    def dense(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        rows, columns = tokens.shape
        live = segments != 0
        row = jnp.arange(rows)[:, None]
        packed = jnp.zeros_like(tokens).at[row, jnp.where(live, positions, columns)]
        packed_live = jnp.zeros_like(segments).at[row, jnp.where(live, positions, columns)]
        column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), tokens.shape)
        out = run(params, packed.set(tokens, mode="drop"), column, packed_live.set(1, mode="drop"))
        packed_at = jnp.clip(positions, 0, columns - 1).reshape(
            rows, columns, *(1,) * (out.ndim - 2)
        )
        out = jnp.take_along_axis(out, packed_at, axis=1)
        fits = (segments == segments.max(axis=1, keepdims=True)) & (positions < columns)
        wrong = (live & ~fits).any(axis=1).reshape(rows, *(1,) * (out.ndim - 1))
        return jnp.where(wrong, jnp.nan, out)

    return dense


# ------------------------------------------------------------------- the three uses of functions


def network_of(functions: Functions, vocab_size: int, max_length: int) -> Network:
    """A policy whose "hidden" states are the logits that the functions return."""
    init, axes, run = functions

    def hidden(
        params: Params, tokens: Array, positions: Array, segments: Array
    ) -> tuple[Array, dict[str, Array]]:
        chex.assert_equal_shape([tokens, positions, segments])
        out = run(params, tokens, positions, segments)
        _check(out, (*tokens.shape, vocab_size), "a policy returns logits [B, L, V]")
        return constrain(out, "batch", None, None), {}

    return Network(
        vocab_size=vocab_size,
        embed_dim=vocab_size,
        max_length=max_length,
        init=init,
        axes=axes,
        hidden=hidden,
        logits=lambda params, logits: logits.astype(jnp.float32),
        prepare=lambda params: params,
        init_cache=replay.init_cache,
        extend=functools.partial(replay.extend, hidden=hidden),
    )


def value_of(functions: Functions) -> ValueNetwork:
    """A separate value network, from functions that return [B, L] values."""
    init, axes, run = functions

    def apply(
        params: Params, policy_hidden: Array, tokens: Array, positions: Array, segments: Array
    ) -> Array:
        del policy_hidden  # the module reads the tokens itself
        out = run(params, tokens, positions, segments)
        _check(out, tokens.shape, "a value network returns [B, L]")
        return out.astype(jnp.float32)

    return ValueNetwork(init, axes, apply)


def reward_of(functions: Functions) -> RewardNetwork:
    """A reward network, which reads what the functions return at a sequence's last token."""
    init, axes, run = functions

    def apply(params: Params, tokens: Array, lengths: Array) -> Array:
        chex.assert_rank([tokens, lengths], [2, 1])
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        segments = (columns < lengths[:, None]).astype(jnp.int32)
        out = run(params, tokens, columns, segments)
        _check(out, tokens.shape, "a reward network returns [B, L]")
        return jnp.take_along_axis(out, (lengths - 1)[:, None], axis=1)[:, 0].astype(jnp.float32)

    return RewardNetwork(init, axes, apply)


def _check(out: Any, shape: tuple[int, ...], rule: str) -> None:
    if not isinstance(out, jax.Array):
        raise UserError(f"the network returned a {type(out).__name__}, expected one array: {rule}")
    if out.shape != shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise UserError(
            f"the network returned {out.dtype}{list(out.shape)}, expected"
            f" floats {list(shape)}: {rule}"
        )
