"""What many methods have in common, so that each of them reads as its differences."""

from __future__ import annotations

from functools import partial

from jrl.methods.base import GroupEditor, Method, Schedule
from jrl.methods.domains import is_zero
from jrl.objectives import advantages, aggregates, regularizers, surrogates, transforms
from jrl.types import Aggregate, Objective, Regularizer, Surrogate, Transform

CENTRED = transforms.per_group(advantages.mean_centred)
"""Rewards minus their group's mean."""


def normalised(eps: float, ddof: int) -> Transform:
    """GRPO's advantages: rewards minus their group's mean, over its deviation."""
    return transforms.per_group(partial(advantages.group_mean_std, eps=eps, ddof=ddof))


def clipped(
    low: float, high: float, correction: str, cap: float, dual_clip: float | None = None
) -> Surrogate:
    """PPO's clipped token ratios with a correction by name."""
    named = surrogates.named_correction(correction, cap)
    return surrogates.clipped_ratio(low, high, dual_clip=dual_clip, correction=named)


def kl_term(kind: str, coef: float) -> tuple[Regularizer, ...]:
    """The divergence from the reference as a loss term; no term and no reference at 0."""
    return () if is_zero(coef) else (regularizers.kl_in_loss(kind, coef),)


def kl_penalty(kind: str, coef: float, level: str = "token") -> tuple[Transform, ...]:
    """The divergence taken out of the reward; no step and no reference at 0."""
    return () if is_zero(coef) else (transforms.kl_in_reward(kind, coef, level=level),)


def against_others(
    advantage: Transform,
    surrogate: Surrogate,
    aggregate: Aggregate = aggregates.sequence_mean,
    regularizers: tuple[Regularizer, ...] = (),
    epochs: int = 1,
    groups: GroupEditor | None = None,
) -> Method:
    """A method that compares the completions of a prompt with one another: at least two."""
    return Method(
        Objective(advantage, surrogate, aggregate, regularizers),
        groups=GroupEditor() if groups is None else groups,
        schedule=Schedule(epochs),
        min_group=2,
    )
