"""Routed experts: every token visits its best experts, and none is dropped.

Tokens are sorted by expert and each expert multiplies its own contiguous run of rows (a grouped
matrix product), so the work is that of the visited experts whatever the balance.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.models.product import PRODUCT
from jrl.types import Array


def route(
    logits: Array, *, experts_per_token: int, norm_topk_prob: bool
) -> tuple[Array, Array, Array]:
    """Which experts each token visits, and with what weight.

    Args:
      logits: [M, E] float32, the router's scores.
      experts_per_token: experts visited, the most probable first.
      norm_topk_prob: scale the visited experts' probabilities to sum to one.

    Returns:
      weights [M, k] float32, experts [M, k] int32, and probs [M, E] float32 (the full softmax).
    """
    chex.assert_rank(logits, 2)
    chex.assert_type(logits, jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(probs, experts_per_token)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, experts, probs


def router_statistics(experts: Array, probs: Array, live: Array) -> dict[str, Array]:
    """How evenly and how surely live tokens are routed.

    Args:
      experts: [M, k] int32, experts visited.
      probs: [M, E] float32.
      live: [M] bool; padding is not counted.

    Returns:
      ``router_load`` [E] float32, each expert's share of the visits (sums to 1), and
      ``router_entropy`` [] float32, nats, the mean entropy of the router's law. Zeros when no
      token is live.
    """
    chex.assert_rank([experts, probs, live], [2, 2, 1])
    counted = live.astype(jnp.float32)
    tokens = jnp.maximum(counted.sum(), 1.0)
    visits = jnp.zeros(probs.shape[1], jnp.float32).at[experts].add(counted[:, None])
    entropy = -(probs * jnp.log(jnp.maximum(probs, 1e-30))).sum(axis=-1)
    return {
        "router_load": visits / (tokens * experts.shape[1]),
        "router_entropy": (entropy * counted).sum() / tokens,
    }


def grouped_matmul(x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    """Each run of rows times its own matrix, accumulated in float32, in the dtype of ``x_md``.

    Args:
      x_md: [M, D], rows sorted by expert.
      w_edf: [E, D, F].
      rows_e: [E] int32, rows of each expert; they sum to M.
    """
    chex.assert_rank([x_md, w_edf, rows_e], [2, 3, 1])
    return checkpoint_name(_grouped_matmul(x_md, w_edf, rows_e), PRODUCT)


@jax.custom_vjp
def _grouped_matmul(x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    w_edf = w_edf.astype(x_md.dtype)
    y_mf = jax.lax.ragged_dot(x_md, w_edf, rows_e, preferred_element_type=jnp.float32)
    return y_mf.astype(x_md.dtype)


_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),  # rows are what is summed over
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _forward(x_md: Array, w_edf: Array, rows_e: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_matmul(x_md, w_edf, rows_e), (x_md, w_edf, rows_e)


def _backward(kept: tuple[Array, Array, Array], g_mf: Array) -> tuple[Array, Array, None]:
    # Written out because the derivative JAX makes multiplies float32 cotangents by bfloat16
    # weights, which loses the fast matrix units, and rounds the weights' gradient to bfloat16.
    x_md, w_edf, rows_e = kept
    w_efd = w_edf.astype(x_md.dtype).transpose(0, 2, 1)
    dx_md = jax.lax.ragged_dot(g_mf, w_efd, rows_e, preferred_element_type=jnp.float32)
    dw_edf = jax.lax.ragged_dot_general(
        x_md, g_mf, rows_e, _BY_EXPERT, preferred_element_type=jnp.float32
    )
    return dx_md.astype(x_md.dtype), dw_edf.astype(w_edf.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def routed(
    x_md: Array,
    weights_mk: Array,
    experts_mk: Array,
    gate: Array,
    up: Array,
    down: Array,
    act: Callable[[Array], Array],
) -> Array:
    """The weighted sum of the visited experts' gated feed-forward outputs.

    Args:
      x_md: [M, D].
      weights_mk: [M, k] float32.
      experts_mk: [M, k] int32.
      gate: [E, D, F].
      up: [E, D, F].
      down: [E, F, D].
      act: the gate's non-linearity.

    Returns:
      [M, D] in the dtype of ``x_md``; summed over experts in float32.
    """
    chex.assert_rank([x_md, weights_mk, gate, up, down], [2, 2, 3, 3, 3])
    chex.assert_equal_shape([weights_mk, experts_mk])
    m, k = experts_mk.shape
    visits = experts_mk.reshape(m * k)
    order = jnp.argsort(visits, stable=True)
    rows_e = jnp.bincount(visits, length=gate.shape[0]).astype(jnp.int32)
    sorted_x = x_md[order // k]
    hidden = act(grouped_matmul(sorted_x, gate, rows_e)) * grouped_matmul(sorted_x, up, rows_e)
    out = grouped_matmul(hidden, down, rows_e)
    unsorted = out[jnp.argsort(order)].reshape(m, k, -1)
    return jnp.einsum("mkd,mk->md", unsorted.astype(jnp.float32), weights_mk).astype(x_md.dtype)
