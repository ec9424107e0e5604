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

from collections.abc import Callable
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import meta

from jrl.errors import UserError
from jrl.models.functions import (
    Functions,
    axes_of,
    network_of,
    one_sequence_a_row,
    reward_of,
    value_of,
)
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
    return network_of(_linen(module, packed, call), vocab_size, max_length)


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
    return network_of(_nnx(make_module, packed, call), vocab_size, max_length)


def linen_value(
    module: nn.Module, *, packed: bool = True, call: Call | None = None
) -> ValueNetwork:
    """A Linen module that returns [B, L] values, as a separate value network.

    Args:
      module: called like a policy; returns one number a token.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``ValueNetwork`` that does not read the policy's hidden states.

    Raises:
      UserError: as ``linen_network``.
    """
    return value_of(_linen(module, packed, call))


def nnx_value(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    packed: bool = True,
    call: Call | None = None,
) -> ValueNetwork:
    """``linen_value`` for an NNX module; ``make_module`` as in ``nnx_network``."""
    return value_of(_nnx(make_module, packed, call))


def linen_reward(
    module: nn.Module, *, packed: bool = True, call: Call | None = None
) -> RewardNetwork:
    """A Linen module that returns [B, L] rewards, as a reward network.

    Args:
      module: called like a policy; the number at a sequence's last token is its reward.
      packed: whether the module takes positions and segments, and masks by them.
      call: how to call it, when not as ``packed`` says.

    Returns:
      A ``RewardNetwork``.

    Raises:
      UserError: as ``linen_network``.
    """
    return reward_of(_linen(module, packed, call))


def nnx_reward(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    packed: bool = True,
    call: Call | None = None,
) -> RewardNetwork:
    """``linen_reward`` for an NNX module; ``make_module`` as in ``nnx_network``."""
    return reward_of(_nnx(make_module, packed, call))


# ------------------------------------------------------------ a module as functions of parameters


def _adaptor(packed: bool, call: Call | None) -> Call:
    if call is not None:
        return call
    if packed:
        return lambda module, tokens, positions, segments: module(tokens, positions, segments)
    return lambda module, tokens, positions, segments: module(tokens)


def _linen(module: nn.Module, packed: bool, call: Call | None) -> Functions:
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
        return axes_of(name, meta.unbox(abstract), specs)

    def run(params: Params, tokens: Array, positions: Array, segments: Array) -> Array:
        try:
            out: Any = module.apply({"params": params}, tokens, positions, segments, method=adapted)
        except flax.errors.InvalidRngError as error:
            raise _draws(name) from error
        return out

    return Functions(init, axes, run if packed else one_sequence_a_row(run))


def _nnx(
    make_module: Callable[[nnx.Rngs], nnx.Module], packed: bool, call: Call | None
) -> Functions:
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
        return axes_of(name, nnx.to_pure_dict(params), specs)

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

    return Functions(init, axes, run if packed else one_sequence_a_row(run))


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


def _impure(name: str, state: str) -> str:
    return (
        f"{name} keeps state besides its parameters ({state}); JRL's networks are functions of"
        " their parameters alone, so build it without batch statistics or caches"
    )
