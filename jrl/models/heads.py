"""Networks with one output per token: value estimates and scalar rewards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array, Network, Params, SharedRows, ValueNetwork


class RewardNetwork(NamedTuple):
    """Scores complete sequences.

    Attributes:
      init: (key) -> params.
      axes: () -> logical axes, like params.
      apply: (params, tokens [B, L], lengths [B]) -> [B] float32, points, read at the last token
        of each sequence; tokens start at column 0 and ``lengths`` is at least 1.
    """

    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    apply: Callable[[Params, Array, Array], Array]


def _init_linear(network: Network, outputs: int = 1) -> Params:
    # Zeros, so that a fresh head estimates 0 everywhere and the first advantages are the returns.
    more = () if outputs == 1 else (outputs,)
    return {
        "weight": jnp.zeros((network.embed_dim, *more), jnp.float32),
        "bias": jnp.zeros(more, jnp.float32),
    }


def _axes_linear(outputs: int = 1) -> Any:
    more = () if outputs == 1 else (None,)
    return {"weight": ("embed", *more), "bias": more}


def _linear(params: Params, hidden: Array) -> Array:
    """[...] float32: one number for each hidden vector, or [..., K] of several outputs."""
    with jax.named_scope("scalar_head"):
        # In float32: values and rewards are subtracted from one another, where 8 bits are few.
        hidden32 = hidden.astype(jnp.float32)
        out = jnp.tensordot(hidden32, params["weight"], axes=1)
        return out + jnp.broadcast_to(params["bias"], out.shape)


def value_head(network: Network, outputs: int = 1) -> ValueNetwork:
    """A linear map of the policy's own hidden states; its gradient reaches the policy's trunk.

    Args:
      network: the policy, whose hidden states are read.
      outputs: K, numbers for each token.

    Returns:
      A ``ValueNetwork`` whose parameters are {"weight" [D], "bias" []} float32, zeros at first, or
      {"weight" [D, K], "bias" [K]} of several outputs.
    """

    def apply(
        params: Params, policy_hidden: Array, tokens: Array, positions: Array, segments: Array
    ) -> Array:
        chex.assert_axis_dimension(policy_hidden, -1, network.embed_dim)
        del tokens, positions, segments  # all that they say is in the hidden states
        return _linear(params, policy_hidden)

    def apply_shared(params: Params, policy_hidden: Array, rows: SharedRows) -> Array:
        return apply(params, policy_hidden, rows.tokens, rows.positions, rows.segments)

    init, axes = (lambda key: _init_linear(network, outputs)), partial(_axes_linear, outputs)
    return ValueNetwork(init, axes, apply, apply_shared)


def value_network(network: Network, outputs: int = 1) -> ValueNetwork:
    """A separate network with a linear head; nothing is shared with the policy.

    Args:
      network: the trunk, for instance ``transformer(config)`` of another size.
      outputs: K, numbers for each token.

    Returns:
      A ``ValueNetwork`` whose parameters are {"trunk", "head"}; to start it from a checkpoint,
      replace "trunk".
    """

    def apply(
        params: Params, policy_hidden: Array, tokens: Array, positions: Array, segments: Array
    ) -> Array:
        del policy_hidden  # the trunk reads the tokens itself
        hidden, _ = network.hidden(params["trunk"], tokens, positions, segments)
        return _linear(params["head"], hidden)

    def apply_shared(params: Params, policy_hidden: Array, rows: SharedRows) -> Array:
        del policy_hidden
        assert network.extras.hidden_shared is not None
        hidden, _ = network.extras.hidden_shared(params["trunk"], rows)
        return _linear(params["head"], hidden)

    shared = None if network.extras.hidden_shared is None else apply_shared
    return ValueNetwork(*_trunk_and_head(network, outputs), apply, shared)


def value_networks(network: Network, outputs: int) -> ValueNetwork:
    """A separate network for each output; the trunks begin alike.

    Args:
      network: the trunk of each.
      outputs: K, at least 2.

    Returns:
      A ``ValueNetwork`` whose parameters are those of ``value_network`` with a leading axis of K.
    """
    one = value_network(network)

    def each(function: Callable[..., Array]) -> Callable[..., Array]:
        def apply(params: Params, *inputs: Any) -> Array:
            # Not ``vmap``: the activations of one network are enough to hold at a time.
            values = jax.lax.map(lambda member: function(member, *inputs), params)
            return jnp.moveaxis(values, 0, -1)

        return apply

    def init(key: Array) -> Params:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (outputs, *x.shape)), one.init(key))

    def axes() -> Any:
        is_names = lambda x: type(x) is tuple  # noqa: E731
        return jax.tree.map(lambda names: (None, *names), one.axes(), is_leaf=is_names)

    shared = None if one.apply_shared is None else each(one.apply_shared)
    return ValueNetwork(init, axes, each(one.apply), shared)


def after_token(value: ValueNetwork) -> ValueNetwork:
    """A value network shifted by one token: each column has the number of the next live one.

    A value estimate stands before a token is drawn; a reward model judges what it has read, the
    last token included. Where no live column follows, the number is the column's own.
    """

    def apply(
        params: Params, policy_hidden: Array, tokens: Array, positions: Array, segments: Array
    ) -> Array:
        values = value.apply(params, policy_hidden, tokens, positions, segments)
        size = segments.shape[1]
        column = jnp.arange(size)[None]
        live = jnp.where(segments > 0, column, size)
        next_live = jnp.pad(live[:, 1:], ((0, 0), (0, 1)), constant_values=size)
        following = jax.lax.cummin(next_live, axis=1, reverse=True)
        following = jnp.where(following < size, following, column)
        return along_columns(values, following)

    return ValueNetwork(value.init, value.axes, apply)


def along_columns(values: Array, columns: Array) -> Array:
    """The values [B, L] or [B, L, K] at the columns [B, T] of their rows."""
    columns = columns.reshape(*columns.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, columns, axis=1)


def reward_network(network: Network) -> RewardNetwork:
    """A network with a linear head read at the last token of each sequence.

    Args:
      network: the trunk.

    Returns:
      A ``RewardNetwork`` whose parameters are {"trunk", "head"}.
    """

    def apply(params: Params, tokens: Array, lengths: Array) -> Array:
        return _linear(params["head"], last_hidden(network, params["trunk"], tokens, lengths))

    return RewardNetwork(*_trunk_and_head(network), apply)


Scores = Callable[[Params, Array, Array], Array]
"""(params, tokens [B, L], lengths [B]) -> [B, K] float32: K numbers for each text, read at its last
token; tokens start at column 0 and ``lengths`` is at least 1."""


def last_hidden(network: Network, trunk: Params, tokens: Array, lengths: Array) -> Array:
    """[B, D]: the trunk's state at the last token of each row.

    Args:
      network: the trunk.
      trunk: its parameters.
      tokens: [B, L] int32, from column 0.
      lengths: [B] int32, at least 1.
    """
    chex.assert_rank([tokens, lengths], [2, 1])
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(columns[None], tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden, _ = network.hidden(trunk, tokens, positions, segments)
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def label_scores(network: Network) -> Scores:
    """The scores of a published reward model, one for each label (``hf.open_classifier``).

    Args:
      network: the trunk.

    Returns:
      A function of {"trunk", "head": {"weight" [K, D], and perhaps "bias" [K]}}.
    """

    def scores(params: Params, tokens: Array, lengths: Array) -> Array:
        hidden = last_hidden(network, params["trunk"], tokens, lengths)
        with jax.named_scope("label_head"):
            head = params["head"]
            values = hidden.astype(jnp.float32) @ head["weight"].T
            return values + head["bias"][None] if "bias" in head else values

    return scores


def answer_scores(network: Network, ids: tuple[int, int]) -> Scores:
    """The difference of two answers' log-probabilities as a language model's next token, in nats.

    With "Yes" and "No" this is the reward of "RLBFF: Binary Flexible Feedback to bridge between
    Human Feedback & Verifiable Rewards" (arXiv:2509.21319).

    Args:
      network: the language model.
      ids: tokens of the two answers.

    Returns:
      A function of {"trunk"}, with K = 1.
    """
    first, second = ids

    def scores(params: Params, tokens: Array, lengths: Array) -> Array:
        hidden = last_hidden(network, params["trunk"], tokens, lengths)
        logits = network.logits(params["trunk"], hidden)  # the softmax's sum cancels
        return (logits[:, first] - logits[:, second])[:, None]

    return scores


def _trunk_and_head(
    network: Network, outputs: int = 1
) -> tuple[Callable[[Array], Params], Callable[[], Any]]:
    def init(key: Array) -> Params:
        return {"trunk": network.init(key), "head": _init_linear(network, outputs)}

    def axes() -> Any:
        return {"trunk": network.axes(), "head": _axes_linear(outputs)}

    return init, axes
