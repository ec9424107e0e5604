"""Statistics over segments: items that share an id (prompt, turn, step, stratum, state, node).

    seg = segments(live, batch.ids["turn"], member_index)     # items with equal ids, all of them
    baseline = mean(values, seg)                               # every item gets its segment's mean

One primitive for every nested grouping. All arrays have one shape of the caller's choosing, such
as [N, G] or [N, G, T]; segments may be ragged, lie anywhere, and have any integer as id. Nothing
here depends on the order of items, and everything works under ``jit``, ``vmap`` and sharding.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array, Batch


class Segments(NamedTuple):
    """A grouping of items.

    Attributes:
      number: [...] int32, a dense number for each item's segment; meaningless where not live.
      live: [...] bool, True for items that count.
    """

    number: Array
    live: Array


def segments(live: Array, *ids: Array) -> Segments:
    """The grouping in which live items with equal ids share a segment.

    Args:
      live: [...] bool.
      *ids: integers that broadcast to the shape of ``live``; with none, all items are one segment.

    >>> seg = segments(jnp.ones(4, bool), jnp.array([7, -1, 7, 7]))
    >>> mean(jnp.array([1.0, 5.0, 2.0, 3.0]), seg).tolist()
    [2.0, 5.0, 2.0, 2.0]
    """
    chex.assert_type(live, bool)
    size = live.size
    columns = [jnp.broadcast_to(x, live.shape).reshape(size) for x in ids]
    columns.append((~live).reshape(size).astype(jnp.int32))  # the most significant key: dead last
    # Sorting finds equal ids of any integers under jit; a table by id would need their range.
    order = jnp.lexsort(columns)
    new = jnp.zeros(size, bool)
    for column in columns:
        ordered = column[order]
        new = new | jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    # Dense numbers, below the number of items, so segment sums have a static size.
    rank = jnp.cumsum(new, dtype=jnp.int32)
    index = jnp.zeros(size, jnp.int32).at[order].set(rank)
    return Segments(index.reshape(live.shape), live)


def total(values: Array, seg: Segments) -> Array:
    """[...] float32: the sum over each item's segment; 0 where not live. A live NaN spreads."""
    return _spread(_sum(values, seg), seg)


def count(seg: Segments) -> Array:
    """[...] float32: how many live items each item's segment has; 0 where not live."""
    return total(jnp.ones(seg.live.shape, jnp.float32), seg)


def mean(values: Array, seg: Segments) -> Array:
    """[...] float32: the mean over each item's segment; 0 where not live.

    Equal values give exactly themselves: the deviations from the segment's least value are
    averaged, so that a constant segment has a deviation of exactly 0.
    """
    least = _least(values, seg)
    # A sum of equal values divided by their count may miss the value by an ulp; zeros cannot.
    shifted = jnp.where(seg.live, values - _spread(least, seg), 0)
    return jnp.where(seg.live, _spread(least, seg) + total(shifted, seg) / _at_least_1(seg), 0)


def std(values: Array, seg: Segments, *, ddof: int = 0) -> Array:
    """[...] float32: the standard deviation over each item's segment; 0 for segments of one.

    Args:
      values: [...] float.
      seg: from ``segments``.
      ddof: 0 divides the squares by the number of items, 1 by one less.
    """
    squares = total(jnp.square(centred(values, seg)), seg) / jnp.maximum(count(seg) - ddof, 1)
    # The root's gradient at 0 is infinite; statistics carry none, but a caller may ask.
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), squares)


def standard_scores(values: Array, seg: Segments, eps: float, ddof: int) -> Array:
    """[...] float32: items less their segment's mean, over its deviation plus ``eps``.

    0 where not live, and for segments of one.
    """
    return centred(values, seg) / (std(values, seg, ddof=ddof) + eps)


def centred(values: Array, seg: Segments) -> Array:
    """[...] float32: each item less the mean of its segment; 0 where not live."""
    return jnp.where(seg.live, values - mean(values, seg), 0)


def leave_one_out(values: Array, seg: Segments) -> Array:
    """[...] float32: the mean over the OTHER items of each item's segment; 0 for segments of one.

    >>> seg = segments(jnp.ones(3, bool))
    >>> leave_one_out(jnp.array([3.0, 0.0, 1.0]), seg).tolist()
    [0.5, 2.0, 1.5]
    """
    values = jnp.where(seg.live, values, 0)
    others = count(seg) - 1
    # One subtraction an item in place of a mask per pair; NaN stays, so that it is found.
    rest = (total(values, seg) - values) / jnp.maximum(others, 1)
    # A segment of one has no baseline: 0, unless a NaN must stay visible.
    return jnp.where(seg.live & (others > 0), rest, jnp.where(jnp.isnan(rest), rest, 0))


def minimum(values: Array, seg: Segments) -> Array:
    """[...] float32: the least value of each item's segment; 0 where not live."""
    return _spread(_least(values, seg), seg)


def maximum(values: Array, seg: Segments) -> Array:
    """[...] float32: the greatest value of each item's segment; 0 where not live."""
    return -minimum(-values, seg)


def quantile(values: Array, seg: Segments, q: Array | float) -> Array:
    """[...] float32: the q-quantile of each item's segment, linear between neighbours.

    Args:
      values: [...] float. A live NaN sorts last.
      seg: from ``segments``.
      q: [] float in [0, 1].

    >>> quantile(jnp.array([4.0, 1.0, 2.0]), segments(jnp.ones(3, bool)), 0.25).tolist()
    [1.5, 1.5, 1.5]
    """
    size = values.size
    index, live = seg.number.reshape(size), seg.live.reshape(size)
    flat = jnp.where(live, values.reshape(size), 0).astype(jnp.float32)
    # By segment, then by value: each segment is a sorted run, the dead ones at the end.
    ordered = flat[jnp.lexsort([flat, index, ~live])]
    # Dense indices grow in the order of this sort, so that a segment starts where the smaller ones
    # end.
    counts = jax.ops.segment_sum(live.astype(jnp.int32), index, num_segments=size)
    counts = jnp.where(jnp.arange(size) <= jnp.max(jnp.where(live, index, -1)), counts, 0)
    start = jnp.cumsum(counts) - counts
    rank = start + q * jnp.maximum(counts - 1, 0)
    low = jnp.clip(jnp.floor(rank).astype(jnp.int32), 0, size - 1)
    high = jnp.clip(jnp.ceil(rank).astype(jnp.int32), 0, size - 1)
    part = rank - low
    at = ordered[low] * (1 - part) + jnp.where(part > 0, ordered[high] * part, 0)
    return _spread(at, seg)


# ---------------------------------------------------------------- steps of an episode
#
# An environment records ``ids["step"]`` [N, G, T], the number of the action that a token belongs
# to; a batch without it holds one step a completion. The tokens of a step lie next to each other.


def step_ids(batch: Batch) -> Array:
    """[N, G, T] int32, the step of each token; 0 for all when no environment recorded any."""
    return batch.ids.get("step", jnp.zeros(batch.mask.shape, jnp.int32))


def steps(batch: Batch) -> Segments:
    """The trained tokens of each step of each completion."""
    n, g, _ = batch.mask.shape
    live = batch.mask & jnp.expand_dims(batch.members, 2)
    return segments(live, jnp.arange(n * g).reshape(n, g, 1), step_ids(batch))


def step_starts(steps: Array, mask: Array) -> Array:
    """[T] bool, True at the first live token of each step of ONE sequence.

    >>> step_starts(jnp.array([4, 4, 4, 7]), jnp.array([False, True, True, True])).tolist()
    [False, True, False, True]
    """
    chex.assert_equal_shape([steps, mask])
    latest = _latest(mask)
    # The previous LIVE token: replies of an environment lie between two tokens of a step.
    before = jnp.concatenate([jnp.full(1, -1, latest.dtype), latest[:-1]])
    return mask & ((before < 0) | (steps[before] != steps))


def at_step_start(values: Array, steps: Array, mask: Array) -> Array:
    """[T]: the value at the first live token of each token's step; 0 outside the mask."""
    return jnp.where(mask, values[_latest(step_starts(steps, mask))], 0)


def at_next_step(values: Array, steps: Array, mask: Array, last: float = 0.0) -> Array:
    """[T]: the value at the first live token of the NEXT step of ONE sequence.

    Args:
      values: [T] float.
      steps: [T] int32.
      mask: [T] bool.
      last: value for the tokens of the last step.

    >>> steps, mask = jnp.array([0, 0, 1, 2]), jnp.ones(4, bool)
    >>> at_next_step(jnp.array([1.0, 2.0, 3.0, 4.0]), steps, mask, -1.0).tolist()
    [3.0, 3.0, 4.0, -1.0]
    """
    size = mask.shape[0]
    starts = jnp.where(step_starts(steps, mask), jnp.arange(size), size)
    later = jnp.concatenate([starts[1:], jnp.full(1, size)])
    following = jax.lax.cummin(later, reverse=True)
    value = jnp.where(following < size, values[jnp.minimum(following, size - 1)], last)
    return jnp.where(mask, value, 0)


def _latest(flags: Array) -> Array:
    """[T] int32: the index of the latest True so far; -1 before the first."""
    return jax.lax.cummax(jnp.where(flags, jnp.arange(flags.shape[0]), -1))


def _sum(values: Array, seg: Segments) -> Array:
    """[items] by segment index."""
    size = values.size
    live_values = jnp.where(seg.live, values, 0).astype(jnp.float32).reshape(size)
    return jax.ops.segment_sum(live_values, seg.number.reshape(size), num_segments=size)


def _least(values: Array, seg: Segments) -> Array:
    size = values.size
    live_values = jnp.where(seg.live, values, jnp.inf).astype(jnp.float32).reshape(size)
    least = jax.ops.segment_min(live_values, seg.number.reshape(size), num_segments=size)
    return jnp.where(least == jnp.inf, 0, least)


def _spread(by_segment: Array, seg: Segments) -> Array:
    """Each item's own segment's number; 0 where not live."""
    return jnp.where(seg.live, by_segment[seg.number], 0)


def _at_least_1(seg: Segments) -> Array:
    return jnp.maximum(count(seg), 1)
