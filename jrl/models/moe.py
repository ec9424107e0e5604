"""Routed experts: every token visits its best experts, and none is dropped.

Tokens are sorted by expert and each expert multiplies its own contiguous run of rows
(``jrl.models.grouped``), so the work is that of the visited experts whatever the balance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.mesh import RULES, divides, spec
from jrl.models.grouped import Gather, grouped_matmul
from jrl.types import Array


class Routing(NamedTuple):
    """Destinations of M tokens.

    Attributes:
      weights: [M, k] float32, what each expert's output is multiplied by; carries gradient.
      experts: [M, k] int32.
      probs: [M, E] float32, the softmax of all scores.
      scored_experts: [M, k] int32, where the scores alone would send them.
    """

    weights: Array
    experts: Array
    probs: Array
    scored_experts: Array


def route(
    logits: Array,
    *,
    experts_per_token: int,
    norm_topk_prob: bool,
    recorded: Array | None = None,
) -> Routing:
    """The experts of each token, and their weights.

    With ``recorded`` experts it is the replay of "Stabilizing MoE Reinforcement Learning by
    Aligning Training and Inference Routers" (arXiv:2510.11370): the experts are those on record,
    and their weights the probabilities that these scores give them, through which the router
    learns.

    Args:
      logits: [M, E] float32, the router's scores.
      experts_per_token: experts visited, the most probable first.
      norm_topk_prob: scale the visited experts' probabilities to sum to one.
      recorded: [M, k] int, experts to visit instead; a token of which nothing is on record, -1,
        goes where the scores send it.
    """
    chex.assert_rank(logits, 2)
    chex.assert_type(logits, jnp.float32)
    # Softmax over all experts before top-k, as Mixtral and Qwen3-MoE do; after it, norm_topk_prob
    # would change nothing.
    probs = jax.nn.softmax(logits, axis=-1)
    weights, top_k = jax.lax.top_k(probs, experts_per_token)
    experts = top_k
    if recorded is not None:
        chex.assert_equal_shape([recorded, top_k])
        experts = jnp.where(recorded < 0, top_k, recorded.astype(jnp.int32))
        # The probabilities are of the current router: gradients of a replayed choice must reach it.
        weights = jnp.take_along_axis(probs, experts, axis=1)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(weights, experts, probs, top_k)


# ---------------------------------------------------------------- numbers of a router


def router_sums(logits: Array, routing: Routing, live: Array) -> dict[str, Array]:
    """Router statistics of live tokens in one layer, as sums that add up over parts of a batch.

    Args:
      logits: [M, E] float32.
      routing: of the tokens.
      live: [M] bool; padding is not counted.

    Returns:
      float32 each: "router_tokens" [], "router_asked" [] (visits that the tokens were to make),
      "router_visits" [E] (those that each expert is given),
      "router_probs" [E] (the sum of its probabilities; carries gradient), "router_entropy" []
      (nats), "router_z" [] (squared logarithms of the softmax's denominators; carries gradient) and
      "router_moved" [] (visits of experts that the scores alone would not have chosen).
    """
    chex.assert_rank([logits, live], [2, 1])
    weight, probs = live.astype(jnp.float32), routing.probs
    zeros = jnp.zeros(probs.shape[1], jnp.float32)
    # Padding rows add weight 0; a scatter over live rows only would need a dynamic shape.
    visits = zeros.at[routing.experts].add(weight[:, None], mode="drop")
    # Bounded below, because 0 * log(0) is NaN for an expert whose probability underflows.
    entropy = -(probs * jnp.log(jnp.maximum(probs, 1e-30))).sum(axis=-1)
    stays = (routing.experts[:, :, None] == routing.scored_experts[:, None, :]).any(-1)
    sums = {
        "router_tokens": weight.sum(),
        "router_asked": weight.sum() * routing.experts.shape[1],
        "router_visits": visits,
        "router_probs": (probs * weight[:, None]).sum(0),
        # A metric, not a loss: no gradient.
        "router_entropy": (jax.lax.stop_gradient(entropy) * weight).sum(),
        "router_z": (jnp.square(jax.nn.logsumexp(logits, axis=-1)) * weight).sum(),
        "router_moved": (~stays * weight[:, None]).sum(),
    }
    return sums


def balance_loss(sums: dict[str, Array]) -> Array:
    """The load-balance loss, times the number of tokens, averaged over layers.

    The auxiliary loss of "Switch Transformers: Scaling to Trillion Parameter Models with Simple and
    Efficient Sparsity" (arXiv:2101.03961), eq. 4, with the share of visits in place of the share of
    tokens where a token visits several experts: E times the sum over experts of that share times
    the mean probability. It is 1 when both are even. (The loss of Hugging Face's Mixtral and
    Qwen3-MoE is k times as large, and takes all layers as one.)

    Args:
      sums: from ``router_sums``, each with a leading axis of layers.

    Returns:
      [] float32; divide by the number of tokens.
    """
    visits, probs = sums["router_visits"], sums["router_probs"]
    # The counts are not differentiable; the gradient reaches the router through ``probs`` only.
    share = visits / jnp.maximum(visits.sum(-1, keepdims=True), 1)
    return visits.shape[-1] * (jax.lax.stop_gradient(share) * probs).sum(-1).mean()


def z_loss(sums: dict[str, Array]) -> Array:
    """The squared logarithm of the softmax's denominator, summed over tokens, mean over layers.

    The router z-loss of "ST-MoE: Designing Stable and Transferable Sparse Expert Models"
    (arXiv:2202.08906), eq. 5, which keeps the router's scores small.

    Args:
      sums: from ``router_sums``, each with a leading axis of layers.

    Returns:
      [] float32; divide by the number of tokens.
    """
    return sums["router_z"].mean()


# ---------------------------------------------------------------- the experts


class Experts(NamedTuple):
    """The weights of a layer's experts, and how their products are made.

    Attributes:
      gate: [E, D, F].
      up: [E, D, F].
      down: [E, F, D].
      act: the gate's non-linearity.
      kernel: of ``grouped.KERNELS``.
    """

    gate: Array
    up: Array
    down: Array
    act: Callable[[Array], Array]
    kernel: str = "auto"


def routed(
    x_md: Array,
    weights_mk: Array,
    experts_mk: Array,
    live_m: Array,
    experts: Experts,
    *,
    first: Array | int = 0,
    fsdp: bool = False,
    one_of: int = 1,
) -> Array:
    """The weighted sum of the visited experts' gated feed-forward outputs.

    Args:
      x_md: [M, D].
      weights_mk: [M, k] float32.
      experts_mk: [M, k] int32.
      live_m: [M] bool; padding visits nobody.
      experts: all of them, or those that this device has.
      first: the number of the first of them; visits of others count as 0.
      fsdp: under ``jax.shard_map``, whether D of the weights is divided over that axis.
      one_of: devices that share out the experts; see ``grouped_matmul``.

    Returns:
      [M, D] float32.
    """
    chex.assert_rank([x_md, weights_mk, live_m, experts.gate], [2, 2, 1, 3])
    chex.assert_equal_shape([weights_mk, experts_mk])
    (m, k), local = experts_mk.shape, experts.gate.shape[0]
    # Visits to absent experts and of padding get number ``local``, one past the last, so that a
    # sort puts them behind all real work.
    visits = jnp.where(live_m[:, None], experts_mk - first, local).reshape(m * k)
    visits = jnp.where((visits >= 0) & (visits < local), visits, local)  # elsewhere: sorted last
    # Stable, so that the order within an expert, hence the rounding of its sums, does not depend on
    # the sort's implementation.
    order = jnp.argsort(visits, stable=True)
    # The inverse permutation, by one scatter in place of a second sort.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(m * k), unique_indices=True)
    # One bin more for the visits that do not count; kernels skip the rows past the sum.
    rows_e = jnp.bincount(visits, length=local + 1)[:local].astype(jnp.int32)
    sorted_x = _spread(x_md, order, back, k)

    def times(x: Array, w: Array, dim: int) -> Array:
        gather = Gather("fsdp", dim) if fsdp else None
        return grouped_matmul(x, w, rows_e, kernel=experts.kernel, gather=gather, one_of=one_of)

    hidden = experts.act(times(sorted_x, experts.gate, 1)) * times(sorted_x, experts.up, 1)
    out = _reorder(times(hidden, experts.down, 2), back, order).reshape(m, k, -1)
    # The k outputs are summed in float32; only the result is rounded.
    return jnp.einsum("mkd,mk->md", out.astype(jnp.float32), weights_mk)


@jax.custom_vjp
def _reorder(x: Array, order: Array, back: Array) -> Array:
    """``x[order]`` for a permutation; ``back`` is its inverse."""
    return x[order]


_reorder.defvjp(
    lambda x, order, back: (x[order], back),
    # A gather, where the derivative that JAX makes is a scatter.
    lambda back, g: (g[back], None, None),
)


def _spread(x_md: Array, order: Array, back: Array, copies: int) -> Array:
    """[M * k, D]: k copies of each row, in this order."""
    m, d = x_md.shape
    # A broadcast's derivative is a sum over the copies; indexing rows directly would make it a
    # scatter-add.
    repeated = jnp.broadcast_to(x_md[:, None], (m, copies, d)).reshape(m * copies, d)
    return _reorder(repeated, order, back)


# ---------------------------------------------------------------- over devices


def over_mesh(
    x_bqd: Array,
    weights_bqk: Array,
    experts_bqk: Array,
    live_bq: Array,
    experts: Experts,
    *,
    fsdp: bool,
) -> Array:
    """``routed`` on the mesh of ``jax.set_mesh``, each device with the experts that it has.

    Tokens are divided over the expert axis as they are over the data axes. The devices that share
    out the experts exchange all their tokens (an all-gather), each works on those that visit its
    own experts, and the sums go back to where the tokens came from (a reduce-scatter in float32).
    With k visits a token and no more than k devices on the axis that moves hardly more than sending
    each token to its experts alone, and there is room for every token on every device, so that none
    is dropped. Nothing is exchanged between data-parallel devices but, with ``fsdp``, the weights.

    Args:
      x_bqd: [B, Q, D].
      weights_bqk: [B, Q, k] float32.
      experts_bqk: [B, Q, k] int32.
      live_bq: [B, Q] bool.
      experts: all of them.
      fsdp: whether D of the weights is divided over that axis.

    Returns:
      [B, Q, D] in the dtype of ``x_bqd``.
    """
    b, q, d = x_bqd.shape
    mesh = jax.sharding.get_abstract_mesh()
    # On one device, or inside a shard_map, there is nobody to exchange tokens with.
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        x, w, e, live = (_flat(a) for a in (x_bqd, weights_bqk, experts_bqk, live_bq))
        return routed(x, w, e, live, experts).reshape(b, q, d).astype(x_bqd.dtype)
    rows = RULES["batch"] if divides(mesh, "batch", b) else ()
    columns = RULES["length"] if divides(mesh, "length", q) else ()
    tokens, inner = PartitionSpec(rows or None, columns or None), "embed" if fsdp else None
    wide = spec(("expert", inner, "mlp"))
    by_expert, shares = "expert" in rows, mesh.shape["expert"]

    def gathered(x: Array) -> Array:
        return jax.lax.all_gather(_flat(x), "expert", axis=0, tiled=True) if by_expert else _flat(x)

    def local(
        x: Array, w: Array, e: Array, live: Array, gate: Array, up: Array, down: Array
    ) -> Array:
        local_experts = experts._replace(gate=gate, up=up, down=down)
        first = jax.lax.axis_index("expert") * gate.shape[0]
        tokens = gathered(x), gathered(w), gathered(e), gathered(live)
        # Every device works on all tokens of its expert group, so no capacity limit can drop one.
        y = routed(*tokens, local_experts, first=first, fsdp=fsdp, one_of=shares)
        # Summed over the parts of F that tensor divides. Over expert, a psum only if its devices
        # have the same tokens; else the reduce-scatter below also returns each token to its owner.
        y = jax.lax.psum(y, "tensor" if by_expert else ("tensor", "expert"))
        if by_expert:
            y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        return y.reshape(x.shape).astype(x.dtype)

    run = jax.shard_map(
        local,
        in_specs=(*(tokens,) * 4, wide, wide, spec(("expert", "mlp", inner))),
        out_specs=tokens,
        check_vma=False,
    )
    mats = experts.gate, experts.up, experts.down
    return run(x_bqd, weights_bqk, experts_bqk, live_bq, *mats)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])
