"""Top-k, top-p and min-p as the smallest logit that they keep, in a kernel for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.gpu_kernels.common import place, power
from jrl.types import Array

_TOGETHER = 8192
"""Logits that a pass looks at together."""
_BY_VALUE = 24
"""Passes that halve an interval of values, before those that halve one of bits."""


@functools.partial(jax.jit, static_argnames=("interpret",))
def least_kept(
    logits_sv: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    interpret: bool = False,
) -> Array:
    """The smallest logit that top-k, then top-p, and min-p keep: ``params.kept_tokens`` of it on.

    One program searches for a row, and ends when it is found; a row that keeps all reads nothing.

    Args:
      logits_sv: [S, V] float32.
      temperature: [S] float32; a row at 0 keeps all.
      top_k: [S] int32; 0 keeps all.
      top_p: [S] float32; 1 keeps all.
      min_p: [S] float32; 0 keeps all.
      interpret: see ``attend_cache``.

    Returns:
      [S] float32; -inf where all are kept.
    """
    s, v = logits_sv.shape

    def kernel(x_ref: Any, t_ref: Any, k_ref: Any, p_ref: Any, m_ref: Any, least_ref: Any) -> None:
        t, k, p, m = t_ref[0], k_ref[0], p_ref[0], m_ref[0]
        row = _Row(x_ref, v, jnp.where(t > 0, t, 1.0))
        few, mass, floors = (t > 0) & (k > 0) & (k < v), (t > 0) & (p < 1), (t > 0) & (m > 0)
        lowest, peak = row.extremes(few | mass | floors)
        cut = row.search(few, lambda x: jnp.ones_like(x), k.astype(jnp.float32), lowest, peak, 0.5)
        weight = lambda x: jnp.exp((x - peak) / row.temperature)  # noqa: E731
        # Top-p is of what top-k has kept, so its search begins there.
        lowest = jnp.maximum(lowest, cut)
        total = row.above(mass, lowest, weight)
        # Sums round by less than this; what weighs little more cannot be told from it.
        error = 4 * 2 * (row.turns + 13) * float(np.finfo(np.float32).eps) * total
        cut = jnp.maximum(cut, row.search(mass, weight, p * total, lowest, peak, error))
        least_ref[0] = jnp.maximum(cut, row.floor(floors, peak, jnp.log(jnp.maximum(m, 1e-30))))

    numbers = temperature, top_k, top_p, min_p
    row = lambda *shape: pl.BlockSpec((1, *shape), lambda i: (i, *(0,) * len(shape)))  # noqa: E731
    return pl.pallas_call(
        kernel,
        grid=(s,),
        in_specs=[row(v), *(row() for _ in numbers)],
        out_specs=row(),
        out_shape=jax.ShapeDtypeStruct((s,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=16),
        interpret=interpret,
        name="least_kept",
    )(logits_sv, *numbers)


class _Row:
    """A row of logits that a program goes over as often as it needs.

    Each pass takes a flag, whether it is asked for; one that is not reads nothing.

    Args:
      ref: [1, V] float32.
      v: V.
      temperature: [] float32.
    """

    def __init__(self, ref: Any, v: int, temperature: Any) -> None:
        self.temperature, self.size = temperature, min(_TOGETHER, power(v))
        self.turns, self._ref, self._v = pl.cdiv(v, self.size), ref, v

    def _over(self, enabled: Any, start: Any, step: Callable[[Any, Array], Any]) -> Any:
        """Folds ``step`` over the logits, ``size`` at a time; those beyond the last are -inf."""

        def turn(i: Any, carry: Any) -> Any:
            token = i * self.size + jnp.arange(self.size)
            x = plgpu.load(place(self._ref, 0, token), mask=token < self._v, other=-jnp.inf)
            return step(carry, x)

        return jax.lax.fori_loop(0, enabled.astype(jnp.int32) * self.turns, turn, start)

    def extremes(self, enabled: Any) -> tuple[Any, Any]:
        """The smallest logit above -inf, and the largest."""
        start = jnp.full(self.size, jnp.inf), jnp.full(self.size, -jnp.inf)
        least = lambda low, x: jnp.minimum(low, jnp.where(x > -jnp.inf, x, jnp.inf))  # noqa: E731
        low, high = self._over(
            enabled, start, lambda carry, x: (least(carry[0], x), jnp.maximum(carry[1], x))
        )
        return low.min(0), high.max(0)

    def above(self, enabled: Any, least: Any, weight: Callable[[Any], Any]) -> Any:
        """Total weight of the logits from ``least`` on."""
        add = lambda sums, x: sums + jnp.where(x >= least, weight(x), 0.0)  # noqa: E731
        return self._over(enabled, jnp.zeros(self.size, jnp.float32), add).sum(0)

    def floor(self, enabled: Any, peak: Any, floor: Any) -> Any:
        """The smallest logit whose log-probability is this near the largest one's."""
        near = lambda x: (x - peak) / self.temperature >= floor  # noqa: E731
        least = lambda low, x: jnp.minimum(low, jnp.where(near(x), x, jnp.inf))  # noqa: E731
        smallest = self._over(enabled, jnp.full(self.size, jnp.inf), least).min(0)
        return jnp.where(enabled, smallest, -jnp.inf)

    def search(
        self,
        enabled: Any,
        weight: Callable[[Any], Any],
        limit: Any,
        lowest: Any,
        peak: Any,
        rounding: Any,
    ) -> Any:
        """The greatest value from which on the logits weigh enough; ``params._search`` of one row.

        Args:
          enabled: whether it is; without it nothing is read.
          weight: of logits.
          limit: how much is enough.
          lowest: the smallest value of interest.
          peak: the largest logit.
          rounding: a single logit that weighs less is not told from rounding.
        """

        def unfinished(carry: tuple[Any, ...]) -> Any:
            _, low, high, mass, beyond = carry
            # Once a single logit is between both the search is over.
            one = weight(_real(low))
            several = mass - beyond >= 1.5 * jnp.where(one > rounding, one, 0.0)
            return enabled & (mass >= limit) & several & (low + 1 < high)

        def halve(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            i, low, high, mass, beyond = carry
            # By value first, which finds the place among logits, then by bits, which ends.
            between = _order(_real(low) / 2 + _real(high) / 2)
            middle = (low & high) + ((low ^ high) >> 1)  # which cannot overflow
            tried = jnp.clip(jnp.where(i < _BY_VALUE, between, middle), low + 1, high - 1)
            mass_above = self.above(enabled, _real(tried), weight)
            up = mass_above >= limit
            return (
                i + 1,
                jnp.where(up, tried, low),
                jnp.where(up, high, tried),
                jnp.where(up, mass_above, mass),
                jnp.where(up, beyond, mass_above),
            )

        low, high, whole = _order(lowest), _order(peak) + 1, self.above(enabled, lowest, weight)
        # The masses at both ends come along, so that a halving goes over the row once.
        start = jnp.int32(0), low, high, whole, jnp.float32(0)
        _, low, _, mass, _ = jax.lax.while_loop(unfinished, halve, start)
        return jnp.where(enabled & (mass >= limit), _real(low), -jnp.inf)


def _order(x: Any) -> Any:
    """int32 in the order of the float32 ``x``."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _real(x: Any) -> Any:
    """The inverse of ``_order``."""
    bits = jnp.where(x < 0, x ^ 0x7FFFFFFF, x)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
