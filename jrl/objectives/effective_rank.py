"""How many directions a completion's hidden states spread over, and a bonus for it."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.objectives.transforms import trained
from jrl.types import Array, Batch, Statistic, Transform

TINY = 1e-8


def effective_rank(states: Array, live: Array) -> Array:
    """Exponential of the entropy of the centred states' singular values, taken as shares.

    Args:
      states: [T, D] float.
      live: [T] bool, which rows count.

    Returns:
      [] float32, from 1 to min(T, D); 0 for fewer than two live rows, 1 when all are equal.

    >>> square = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(float(effective_rank(square, jnp.ones(4, bool))), 4)
    2.0
    """
    chex.assert_rank([states, live], [2, 1])
    row = live[:, None]
    count = live.sum()
    states = jnp.where(row, states, 0).astype(jnp.float32)
    centred = jnp.where(row, states - states.sum(axis=0)[None] / jnp.maximum(count, 1), 0)
    values = jnp.linalg.svd(centred, compute_uv=False)
    shares = values / (values.sum() + TINY)
    rank = jnp.exp(-(shares * jnp.log(shares + TINY)).sum())
    return jnp.where(count > 1, rank, 0)


def running_ranks(hidden: Array, mask: Array, stride: int) -> Array:
    """The effective rank of a completion's beginnings, renewed every ``stride`` tokens.

    Args:
      hidden: [T, D] float, the states from which the tokens were predicted.
      mask: [T] bool, True where the policy drew the token; the others are stepped over.
      stride: tokens.

    Returns:
      [T] float32: at the k-th live token the rank of the first ``stride * (k // stride)`` live
      states, 0 before there are any; at the last live token that of all of them.
    """
    chex.assert_rank([hidden, mask], [2, 1])
    order = jnp.argsort(~mask, stable=True)  # the live ones first, in order
    packed = hidden[order]
    place = jnp.arange(mask.shape[0])
    live, total = mask.sum(), jnp.cumsum(mask)

    def first(count: Array) -> Array:
        return effective_rank(packed, (place < count) & (place < live))

    counts = jnp.concatenate([stride * jnp.arange(1, mask.shape[0] // stride + 1), live[None]])
    ranks = jax.lax.map(first, counts)
    steps = total // stride
    running = jnp.where(steps > 0, ranks[jnp.maximum(steps - 1, 0)], 0)
    return jnp.where(mask, jnp.where(total == live, ranks[-1], running), 0)


def rank_statistic(stride: int) -> Statistic:
    """``running_ranks`` of the last layer's states at the start of the training step."""

    def apply(hidden: Array, mask: Array) -> Array:
        return running_ranks(hidden, mask, stride)

    return Statistic("running_rank", apply, over="hidden", start=True)


def rank_changes(ranks: Array, mask: Array, stride: int) -> Array:
    """Rank, its velocity and its acceleration over ONE completion.

    With m_1, m_2, ... the ranks after every ``stride`` tokens, v_j = m_j - mean(m_1 .. m_{j-1})
    from j = 2 and a_j = v_j - v_{j-1} from j = 3.

    Args:
      ranks: [T] float, from ``running_ranks``.
      mask: [T] bool.
      stride: tokens, the same.

    Returns:
      [3] float32: the rank of the whole completion, the mean v and the mean a; 0 where there is
      none.

    >>> ranks = jnp.array([1.0, 3.0, 3.5, 3.5])
    >>> rank_changes(ranks, jnp.ones(4, bool), 1).tolist()
    [3.5, 1.5, -0.5]
    """
    chex.assert_rank([ranks, mask], 1)
    total = jnp.cumsum(mask)
    last = jnp.max(jnp.where(mask & (total == total[-1]), ranks, -jnp.inf))
    last = jnp.where(total[-1] > 0, last, 0)
    # The places where a rank was taken, moved to the front.
    taken = mask & (total % stride == 0)
    order = jnp.argsort(~taken, stable=True)
    m, count = jnp.where(taken, ranks, 0)[order], taken.sum()
    j = jnp.arange(m.shape[0])
    before = (jnp.cumsum(m) - m) / jnp.maximum(j, 1)
    velocity = jnp.where((j >= 1) & (j < count), m - before, 0)
    change = velocity - jnp.concatenate([jnp.zeros(1), velocity[:-1]])
    acceleration = jnp.where((j >= 2) & (j < count), change, 0)
    mean_v = velocity.sum() / jnp.maximum(count - 1, 1)
    mean_a = acceleration.sum() / jnp.maximum(count - 2, 1)
    return jnp.stack([last, mean_v, mean_a]).astype(jnp.float32)


class RankState(NamedTuple):
    """Running means over steps.

    Attributes:
      means: [3] float32, of rank, velocity and acceleration.
      score: [] float32, points, of the reward.
      steps: [] int32, training steps seen; at 0 the others mean nothing.
    """

    means: Array
    score: Array
    steps: Array


def rank_bonus(
    stride: int = 40,
    gain: float = 1.5,
    cap: float = 2.0,
    rate: float = 0.3,
    fading: bool = False,
) -> Transform:
    """Adds to each advantage a bonus for a hidden state that spreads more than it used to.

        d_k = clip((m_k - mean_k) / |mean_k|, -5, 5) for k of rank, velocity, acceleration
        b = sigmoid(gain d_acceleration),  aux = b tanh(d_rank) + (1 - b) tanh(d_velocity)
        A + min(max(aux, 0), |A| / cap)

    mean_k are the running means of the steps before; the first step adds nothing.

    Args:
      stride: tokens between two ranks.
      gain: of the acceleration.
      cap: kappa, at least 1: the bonus stays below this part of the advantage, so that no
        advantage changes its sign.
      rate: of the running means, in (0, 1]; they start at the first step's.
      fading: True also multiplies aux by 1 - (running mean reward + 1) / 2, for rewards in [-1, 1].

    Returns:
      A transform [N, G] -> [N, G] that keeps ``RankState``.
    """
    statistic = rank_statistic(stride)

    def init() -> RankState:
        return RankState(jnp.zeros(3), jnp.zeros(()), jnp.int32(0))

    def apply(values: Array, batch: Batch, state: RankState) -> tuple[Array, Batch, RankState]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        ranks = jnp.where(live, batch.stats[statistic.name], 0)
        measured = jax.vmap(jax.vmap(lambda x, m: rank_changes(x, m, stride)))(ranks, live)
        gap = measured - state.means[None, None]
        gap = jnp.clip(gap / (jnp.abs(state.means) + TINY)[None, None], -5, 5)
        rank, velocity, acceleration = jnp.moveaxis(gap, 2, 0)
        tendency = jax.nn.sigmoid(gain * acceleration)
        aux = tendency * jnp.tanh(rank) + (1 - tendency) * jnp.tanh(velocity)
        if fading:
            aux = aux * (1 - (state.score + 1) / 2)
        bonus = jnp.minimum(jnp.maximum(aux, 0), jnp.abs(values) / cap)
        shaped = jnp.where(state.steps > 0, values + bonus, values)
        return shaped, batch, _later(state, measured, batch, live.any(axis=2), rate)

    return Transform(init, apply, statistics=(statistic,))


def _later(state: RankState, measured: Array, batch: Batch, live: Array, rate: float) -> RankState:
    """The running means with one more batch in them; completions without a token do not count."""
    count = live.sum()
    each = jnp.maximum(count, 1)
    own = jnp.where(live[:, :, None], measured, 0).sum(axis=(0, 1)) / each
    score = jnp.where(live, batch.score(), 0).sum() / each
    step = jnp.where(state.steps > 0, rate, 1.0) * (count > 0)
    return RankState(
        state.means + step * (own - state.means),
        state.score + step * (score - state.score),
        state.steps + (count > 0).astype(jnp.int32),
    )
