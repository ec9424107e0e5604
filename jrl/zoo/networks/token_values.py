"""A policy with token Q-values that shift its distribution towards higher-valued tokens.

    guided = TokenValues(beta=8.0)(network)

Heads on the last layer's states give Q of every token that could come next, two estimates of it,
and V of the state. Targets of the two follow them slowly (``towards``). The policy draws
from

    pi(a | s) ~ pi_base(a | s) exp(beta min(Q'_1(s, a), Q'_2(s, a)))

as "Offline RL for Natural Language Generation with Implicit Language Q Learning"
(arXiv:2206.11871) does; V(s), which the paper subtracts from Q, is the same for all tokens and
cancels. Losses read the heads by name, in statistics over the vocabulary: "base" [V] the logits of
the policy without values, "q" [2, V], "q_target" [V], "v" [].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrl.methods.schedule import After, AfterView, every
from jrl.types import Array, Derived, Network, NetworkExtras, Params, SharedRows, TrainState, Views

_WIDER = 2
"""Hidden units of a head for each of the network's."""


@dataclasses.dataclass(frozen=True)
class TokenValues:
    """Token Q-values that shift the policy: ``Method.network`` of methods that learn them.

    Attributes:
      beta: how much values count in the policy, nats a point.
      heads: estimates of Q, the lowest of which counts.
    """

    beta: float
    heads: int = 2

    def __call__(self, network: Network) -> Network:
        """The network with heads for the values of tokens, which start at 0.

        Args:
          network: all of whose weights are trained.

        Returns:
          A network whose parameters are {"base", "q" and "q_target" of all heads, "v"}.
        """
        return _with_token_values(network, self.beta, self.heads)


def _with_token_values(network: Network, beta: float, heads: int) -> Network:
    extras = network.extras

    def init(key: Array) -> Params:
        return start(key, network.init(key))

    def start(key: Array, base: Params) -> Params:
        keys = jax.random.split(jax.random.fold_in(key, 1), heads)
        q = jax.vmap(lambda k: _init_head(k, network, network.vocab_size))(keys)
        v = _init_head(jax.random.fold_in(key, 2), network, 1)
        return {"base": base, "q": q, "q_target": jax.tree.map(jnp.copy, q), "v": v}

    def axes() -> Any:
        twice = jax.tree.map(
            lambda names: (None, *names), _axes_head("vocab"), is_leaf=lambda x: type(x) is tuple
        )
        return {"base": network.axes(), "q": twice, "q_target": twice, "v": _axes_head(None)}

    def shown(params: Any, hidden: Array) -> dict[str, Array]:
        q = jax.vmap(_head, (0, None), -2)(params["q"], hidden)
        return {
            "base": network.logits(params["base"], hidden),
            "q": q,
            "q_target": _least(params["q_target"], hidden),
            "v": _head(params["v"], hidden)[..., 0],
        }

    def logits(params: Any, hidden: Array) -> Array:
        return network.logits(params["base"], hidden) + beta * _least(params["q_target"], hidden)

    def hidden_shared(params: Params, rows: SharedRows) -> tuple[Array, dict[str, Array]]:
        assert extras.hidden_shared is not None
        return extras.hidden_shared(params["base"], rows)

    def fill(weights: Any, *rest: Any) -> Any:
        assert extras.fill is not None
        return extras.fill(weights["base"], *rest)

    def init_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Any:
        base_weights = None if weights is None else weights["base"]
        return network.init_cache(rows, length, base_weights, pieces)

    return network._replace(
        init=init,
        axes=axes,
        hidden=lambda params, *rest: network.hidden(params["base"], *rest),
        logits=logits,
        prepare=lambda params: params | {"base": network.prepare(params["base"])},
        init_cache=init_cache,
        extend=lambda weights, *rest: network.extend(weights["base"], *rest),
        extras=NetworkExtras(
            fill=None if extras.fill is None else fill,
            hidden_shared=None if extras.hidden_shared is None else hidden_shared,
            gathered=extras.gathered,
            views=Views(vocabulary=shown),
            derived=Derived(
                network=network,
                start=start,
                plain=lambda params, policy: params["base"],
                exact=False,
            ),
        ),
    )


def _init_head(key: Array, network: Network, outputs: int) -> Params:
    """A head of one hidden layer; zeros at the end, so that it gives 0 at first."""
    inner = _WIDER * network.embed_dim
    scale = network.embed_dim**-0.5
    return {
        "inner": scale * jax.random.normal(key, (network.embed_dim, inner), jnp.float32),
        "inner_bias": jnp.zeros(inner, jnp.float32),
        "outer": jnp.zeros((inner, outputs), jnp.float32),
        "outer_bias": jnp.zeros(outputs, jnp.float32),
    }


def _axes_head(outputs: str | None) -> Any:
    return {
        "inner": ("embed", None),
        "inner_bias": (None,),
        "outer": (None, outputs),
        "outer_bias": (outputs,),
    }


def _head(params: Params, hidden: Array) -> Array:
    """[..., outputs] float32 values."""
    with jax.named_scope("token_values"):
        inner = _affine(hidden.astype(jnp.float32), params["inner"], params["inner_bias"])
        return _affine(jax.nn.relu(inner), params["outer"], params["outer_bias"])


def _affine(x: Array, weight: Array, bias: Array) -> Array:
    return jnp.tensordot(x, weight, axes=1) + bias.reshape(*(1,) * (x.ndim - 1), -1)


def _least(params: Params, hidden: Array) -> Array:
    """[..., V] float32: the lowest of the heads' values, which no loss changes."""
    values = jax.vmap(_head, (0, None))(params, hidden).min(axis=0)
    return jax.lax.stop_gradient(values)


def towards(target: str, source: str, share: Any) -> After:
    """A part of the policy's parameters that follows another part after every update.

    Args:
      target: a key of the policy's parameters, which no loss moves.
      source: the key that it follows.
      share: in [0, 1], the part of the way that it goes.
    """

    def mix(old: Array, new: Array) -> Array:
        return (old + share * (new - old)).astype(old.dtype)

    def apply(state: TrainState, view: AfterView) -> TrainState:
        # From where it was before the update: weight decay would move it, too.
        before, policy = view.before.params["policy"], state.params["policy"]
        followed = jax.tree.map(mix, before[target], policy[source])
        return state.replace(params=state.params | {"policy": policy | {target: followed}})

    return After(apply, every(1), on="update")
