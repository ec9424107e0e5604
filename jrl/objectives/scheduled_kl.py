"""A divergence from two policies at once, their shares moving from one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import jax.numpy as jnp

from jrl.objectives.kl import estimator
from jrl.types import Array, Regularizer, Stats


def base_share(step: Array) -> Array:
    """[] float32: the share of the base policy in ReMix's convex constraint after so many steps.

    max(1 - 0.1 ceil(max(step - 50, 0) / 10), 0.5) of "Squeeze the Soaked Sponge: Efficient
    Off-policy Reinforcement Finetuning for Large Language Model" (arXiv:2507.06892).

    >>> [round(float(base_share(jnp.int32(s))), 2) for s in (0, 50, 51, 61, 200)]
    [1.0, 1.0, 0.9, 0.8, 0.5]
    """
    tens = jnp.ceil(jnp.maximum(step - 50, 0) / 10)
    return jnp.maximum(1 - 0.1 * tens, 0.5).astype(jnp.float32)


def convex_kl(kind: str, coef: float) -> tuple[Regularizer, Regularizer]:
    """Divergence from the base and from the previous policy, as two terms that count steps.

        coef [share KL(pi || base) + (1 - share) KL(pi || previous)]

    Base is the reference policy, and previous the policy at the start of the training step.

    Args:
      kind: "k2" or "k3"; see ``objectives.kl`` for what each one's gradient is.
      coef: per nat.

    Returns:
      Regularizers named "kl" and "kl_previous"; both count training steps, for ``base_share``.
    """
    divergence = estimator(kind)

    def term(name: str, other: str, part: Any) -> Regularizer:
        def value(stats: Stats, mask: Array) -> Array:
            chex.assert_rank(mask, 1)
            return divergence(stats["logprobs"], stats[other])

        def later(step: Any, metrics: Mapping[str, Array]) -> Any:
            return step + 1

        return Regularizer(
            name,
            value,
            lambda step: coef * part(base_share(step)),
            init=lambda: jnp.int32(0),
            update=later,
            needs=frozenset({other}),
        )

    return (
        term("kl", "ref_logprobs", lambda share: share),
        term("kl_previous", "proximal_logprobs", lambda share: 1 - share),
    )
