"""Any Flax module, Linen or NNX, as a policy, a value network or a reward network.

A module is called in one of two ways, chosen by ``packed``:

- ``packed=True``: ``module(tokens [B, L], positions [B, L], segments [B, L])``. The module masks:
  a token attends to tokens of its own segment at positions no later than its own; segment 0 is
  padding, which may stand between prompt and completion.
- ``packed=False``: ``module(tokens [B, L])``, for a module that knows plain causal attention over
  columns and nothing else. Each sequence is laid out from column 0 without gaps, padding last, so
  that columns are positions. Rows of several segments cannot be laid out so and give NaN.

A module with another signature is adapted by ``call(module, tokens, positions, segments)``, which
returns what the module would. The module must be a pure function of its parameters: no batch
statistics, no dropout that is switched on. Parameters are the module's own nested dict.

There is no key-value cache to share: ``extend`` keeps the tokens and runs the module over all of
them again, which is right for every module and quadratic in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.errors
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import meta

from jrl.errors import UserError
from jrl.mesh import RULES, constrain
from jrl.models import replay
from jrl.models.heads import RewardNetwork
from jrl.types import Array, Network, Params, ValueNetwork

Call = Callable[[Any, Array, Array, Array], Array]
"""(module, tokens [B, L], positions [B, L], segments [B, L]) -> what the module returns."""


def linen_network(
    module: nn.Module,
    *,
    vocab_size: int,
    max_length: int,
    packed: bool = True,
    call: Call | None = None,
) -> Network:
    """A Linen module as the policy.

    Args:
      module: returns logits [B, L, V] of any float dtype; see the head of this file.
      vocab_size: V.
      max_length: the longest sequence the module accepts, tokens.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``Network`` whose "hidden" states are the logits, D = V.

    Raises:
      UserError: from ``init`` and calls: state besides parameters, dropout that is switched on,
        partitioning names that JRL's table lacks, or a result of the wrong shape.
    """
    return _network(_linen(module, packed, call), vocab_size, max_length)


def nnx_network(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    vocab_size: int,
    max_length: int,
    packed: bool = True,
    call: Call | None = None,
) -> Network:
    """An NNX module as the policy; as ``linen_network``, but the module is made when needed.

    Args:
      make_module: (rngs) -> the module. Called at trace time, each time with the same result.
      vocab_size: V.
      max_length: the longest sequence the module accepts, tokens.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``Network`` whose parameters are the pure dict of the module's ``nnx.Param`` state.

    Raises:
      UserError: as ``linen_network``.
    """
    return _network(_nnx(make_module, packed, call), vocab_size, max_length)


def linen_value(
    module: nn.Module, *, packed: bool = True, call: Call | None = None
) -> ValueNetwork:
    """A Linen module that returns [B, L], points, as a separate value network.

    Args:
      module: called like a policy; returns one number a token.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``ValueNetwork`` that does not read the policy's hidden states.

    Raises:
      UserError: as ``linen_network``.
    """
    return _value(_linen(module, packed, call))


def nnx_value(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    packed: bool = True,
    call: Call | None = None,
) -> ValueNetwork:
    """``linen_value`` for an NNX module; ``make_module`` as in ``nnx_network``."""
    return _value(_nnx(make_module, packed, call))


def linen_reward(
    module: nn.Module, *, packed: bool = True, call: Call | None = None
) -> RewardNetwork:
    """A Linen module that returns [B, L], points, as a reward network.

    Args:
      module: called like a policy; the number at a sequence's last token is its reward.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``RewardNetwork``.

    Raises:
      UserError: as ``linen_network``.
    """
    return _reward(_linen(module, packed, call))


def nnx_reward(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    packed: bool = True,
    call: Call | None = None,
) -> RewardNetwork:
    """``linen_reward`` for an NNX module; ``make_module`` as in ``nnx_network``."""
    return _reward(_nnx(make_module, packed, call))


# ------------------------------------------------------------ a module as functions of parameters


class _Functions(NamedTuple):
    """A module of either kind: init(key), axes(), and run(params, tokens, positions, segments)."""

    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    run: Callable[[Params, Array, Array, Array], Array]


def _adaptor(packed: bool, call: Call | None) -> Call:
    if call is not None:
        return call
    if packed:
        return lambda module, tokens, positions, segments: module(tokens, positions, segments)
    return lambda module, tokens, positions, segments: module(tokens)


def _linen(module: nn.Module, packed: bool, call: Call | None) -> _Functions:
    name = type(module).__name__
    adapted = _adaptor(packed, call)

    def boxed(key: Array) -> Params:
        one = jnp.ones((1, 1), jnp.int32)
        variables: Any = module.init({"params": key}, one, one * 0, one, method=adapted)
        if extra := sorted(set(variables) - {"params"}):
            raise UserError(_impure(name, f"collection {extra[0]!r}"))
        params = variables.get("params", {})
        jax.eval_shape(run, meta.unbox(params), one, one * 0, one)  # dropout shows in calls only
        return params

    def init(key: Array) -> Params:
        return meta.unbox(boxed(key))

    def axes() -> Any:
        abstract = jax.eval_shape(boxed, jax.random.key(0))
        specs = nn.get_partition_spec(abstract)
        return _axes(name, meta.unbox(abstract), specs)

    def run(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        try:
            out: Any = module.apply({"params": params}, tokens, positions, segments, method=adapted)
        except flax.errors.InvalidRngError as error:
            raise _draws(name) from error
        return out

    return _Functions(init, axes, run if packed else _one_sequence_a_row(run))


def _nnx(
    make_module: Callable[[nnx.Rngs], nnx.Module], packed: bool, call: Call | None
) -> _Functions:
    adapted = _adaptor(packed, call)

    def split(key: Array) -> tuple[str, Any, Any, Any]:
        with nnx.use_eager_sharding(False):  # the training state is placed as a whole
            module = make_module(nnx.Rngs(key))
        parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
        graph, params, draws, rest = parts
        name = type(module).__name__
        for path, variable in nnx.to_flat_state(rest):
            where = f"{type(variable).__name__} {'.'.join(map(str, path))}"
            raise UserError(_impure(name, where))
        return name, graph, params, draws

    def abstract() -> tuple[str, Any, Any, Any]:
        static: list[Any] = []

        def shapes() -> Any:
            name, graph, params, draws = split(jax.random.key(0))
            static.extend((name, graph))
            return params, draws

        params, draws = jax.eval_shape(shapes)
        name, graph = static
        return name, graph, params, draws

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(split(key)[2])

    def axes() -> Any:
        name, _, params, _ = abstract()
        specs = nnx.to_pure_dict(nnx.get_partition_spec(params))
        return _axes(name, nnx.to_pure_dict(params), specs)

    def run(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        name, graph, state, draws = abstract()
        nnx.replace_by_pure_dict(state, params)
        # Modules hold the generators of their dropout; a count that moves betrays a draw.
        draws = jax.tree.map(_blank, draws)
        module = nnx.merge(graph, state, draws)
        counts = _counts(module)
        out = adapted(module, tokens, positions, segments)
        if any(a is not b for a, b in zip(counts, _counts(module), strict=True)):
            raise _draws(name)
        return out

    return _Functions(init, axes, run if packed else _one_sequence_a_row(run))


def _blank(x: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _counts(module: nnx.Module) -> list[Any]:
    state = nnx.to_flat_state(nnx.state(module, nnx.RngCount))
    return [variable.get_value() for _, variable in state]


def _draws(name: str) -> UserError:
    return UserError(
        f"{name} draws random numbers when called (dropout?); a policy's log-probabilities must"
        " repeat, so build it with deterministic=True or rate 0"
    )


def _impure(name: str, what: str) -> str:
    return (
        f"{name} keeps state besides its parameters ({what}); JRL's networks are functions of"
        " their parameters alone, so build it without batch statistics or caches"
    )


def _axes(name: str, shapes: Any, specs: Any) -> Any:
    """Logical axis names of every leaf, from the module's partitioning metadata."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    found = jax.tree.leaves(specs, is_leaf=is_spec)
    axes = []
    for (path, leaf), spec in zip(leaves, found, strict=True):
        names = tuple(spec) + (None,) * (leaf.ndim - len(spec))
        for axis in names:
            if axis is not None and axis not in RULES:
                raise UserError(
                    f"{name}{jax.tree_util.keystr(path)}: partitioned over {axis!r}; name the"
                    f" axes as JRL does: {', '.join(RULES)}"
                )
        axes.append(names)
    return jax.tree.unflatten(treedef, axes)


def _one_sequence_a_row(run: Callable[..., Array]) -> Callable[..., Array]:
    """``run`` for a module that is causal over columns: gaps are closed before and opened after."""

    def dense(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        rows, columns = tokens.shape
        live = segments != 0
        row = jnp.arange(rows)[:, None]
        laid = jnp.zeros_like(tokens).at[row, jnp.where(live, positions, columns)]
        laid_live = jnp.zeros_like(segments).at[row, jnp.where(live, positions, columns)]
        column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), tokens.shape)
        out = run(params, laid.set(tokens, mode="drop"), column, laid_live.set(1, mode="drop"))
        back = jnp.clip(positions, 0, columns - 1).reshape(rows, columns, *(1,) * (out.ndim - 2))
        out = jnp.take_along_axis(out, back, axis=1)
        fits = (segments == segments.max(axis=1, keepdims=True)) & (positions < columns)
        wrong = (live & ~fits).any(axis=1).reshape(rows, *(1,) * (out.ndim - 1))
        return jnp.where(wrong, jnp.nan, out)

    return dense


# ------------------------------------------------------------------- the three uses of a module


def _network(functions: _Functions, vocab_size: int, max_length: int) -> Network:
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


def _value(functions: _Functions) -> ValueNetwork:
    init, axes, run = functions

    def apply(
        params: Params, policy_hidden: Array, tokens: Array, positions: Array, segments: Array
    ) -> Array:
        del policy_hidden  # the module reads the tokens itself
        out = run(params, tokens, positions, segments)
        _check(out, tokens.shape, "a value network returns [B, L]")
        return out.astype(jnp.float32)

    return ValueNetwork(init, axes, apply)


def _reward(functions: _Functions) -> RewardNetwork:
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
        raise UserError(
            f"the Flax module returned a {type(out).__name__}, expected one array: {rule}"
        )
    if out.shape != shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise UserError(
            f"the Flax module returned {out.dtype}{list(out.shape)}, expected"
            f" floats {list(shape)}: {rule}"
        )
