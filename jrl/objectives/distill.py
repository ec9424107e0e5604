"""Learning from another distribution: divergences over the vocabulary or of the sampled token.

A divergence is written once, as a function of two [V] vectors of log-probabilities, the student's
and the teacher's. ``divergence`` makes a ``Statistic`` of one, to be minimised as the loss itself
(``minimise``) or added to another loss (``divergence_in_loss``). ``top_k_divergence`` reads of the
teacher the likeliest tokens alone, ``sampled_divergence`` the drawn one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.errors import unknown_choice
from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.transforms import stateless, trained
from jrl.types import (
    Aggregate,
    Array,
    Batch,
    Regularizer,
    Statistic,
    Stats,
    Surrogate,
    Transform,
)

KINDS = ("forward", "reverse", "jsd")
"""forward: KL(teacher || student); reverse: KL(student || teacher); jsd: ``generalized_jsd``."""


def reverse_kl(student: Array, teacher: Array) -> Array:
    """KL(student || teacher) of one token's distributions: seeks the teacher's modes.

    Args:
      student: [V] float32, log-probabilities; -inf where a truncation removed the token.
      teacher: [V] float32, likewise.

    Returns:
      [] float32, nats. Infinite where the student may draw what the teacher never does, as under
      two truncated distributions. A token without probability adds 0, not NaN, also to the
      gradient.

    >>> half, sure = jnp.log(jnp.array([0.5, 0.5])), jnp.array([0.0, -jnp.inf])
    >>> [round(float(reverse_kl(*pair)), 4) for pair in ((sure, half), (half, sure))]
    [0.6931, inf]
    """
    _check(student, teacher)
    mass = jnp.exp(student)
    dead = mass == 0
    gap = jnp.where(dead, 0, student) - jnp.where(dead, 0, teacher)
    return jnp.where(dead, 0, mass * gap).sum()


def forward_kl(student: Array, teacher: Array) -> Array:
    """KL(teacher || student) of one token's distributions: covers all that the teacher does.

    Args and returns as ``reverse_kl``, of which this is the mirror.

    >>> half, sure = jnp.log(jnp.array([0.5, 0.5])), jnp.array([0.0, -jnp.inf])
    >>> round(float(forward_kl(half, sure)), 4)
    0.6931
    """
    return reverse_kl(teacher, student)


def generalized_jsd(student: Array, teacher: Array, beta: float | Array = 0.5) -> Array:
    """Jensen-Shannon divergence of one token's distributions, weight ``beta`` on the teacher.

    Equation 1 of ``gkd``'s paper, P the teacher and Q the student:

        beta KL(P || M) + (1 - beta) KL(Q || M),    M = beta P + (1 - beta) Q

    Args:
      student: [V] float32, log-probabilities; -inf where a truncation removed the token.
      teacher: [V] float32, likewise.
      beta: strictly between 0 and 1, where it is 0 for all distributions; divided by beta it tends
        to the forward divergence, and divided by 1 - beta to the reverse one.

    Returns:
      [] float32, nats; finite for all distributions, at most log 2 when beta is 1/2.

    >>> one, other = jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0])
    >>> round(float(generalized_jsd(one, other)), 4)
    0.6931
    """
    _check(student, teacher)
    dead = (jnp.exp(student) == 0) & (jnp.exp(teacher) == 0)
    # Both distributions -inf is a mixture of -inf, whose gradient is NaN: such tokens are taken out
    # first.
    q, p = jnp.where(dead, 0, student), jnp.where(dead, 0, teacher)
    mixture = jnp.where(dead, -jnp.inf, jnp.logaddexp(p + jnp.log(beta), q + jnp.log1p(-beta)))
    return beta * reverse_kl(teacher, mixture) + (1 - beta) * reverse_kl(student, mixture)


def total_variation(one: Array, other: Array) -> Array:
    """Half the sum of the absolute differences of probabilities, in [0, 1].

    Both are [V] float32, log-probabilities.

    >>> float(total_variation(jnp.log(jnp.array([0.5, 0.5])), jnp.array([0.0, -jnp.inf])))
    0.5
    """
    _check(one, other)
    return jnp.abs(jnp.exp(one) - jnp.exp(other)).sum() / 2


def between(kind: str, beta: float = 0.5) -> Callable[[Array, Array], Array]:
    """The divergence of that name, a function of (student [V], teacher [V]).

    Raises:
      UserError: for a name that is not one of ``KINDS``.
    """
    if kind not in KINDS:
        raise unknown_choice("divergence", kind, KINDS)
    if kind == "jsd":
        return lambda student, teacher: generalized_jsd(student, teacher, beta)
    return {"forward": forward_kl, "reverse": reverse_kl}[kind]


def divergence(kind: str = "reverse", beta: float = 0.5, teacher: str = "teacher") -> Statistic:
    """A full-vocabulary divergence from a frozen policy at every token, with gradient.

    Args:
      kind: one of ``KINDS``.
      beta: the teacher's weight in "jsd".
      teacher: the frozen policy: "teacher", "ref" or another name.

    Returns:
      A statistic named after all three, nats.
    """
    measure = between(kind, beta)

    def apply(distributions: dict[str, Array], token: Array) -> Array:
        return measure(distributions["policy"], jax.lax.stop_gradient(distributions[teacher]))

    weight = f"_{beta}" if kind == "jsd" else ""
    return Statistic(f"{kind}{weight}_from_{teacher}", apply, ("policy", teacher))


# ---------------------------------------------------------------- the teacher's likeliest tokens

TAILS = ("renormalised", "cut", "floor", "bucket")
"""Treatments of the tokens outside the teacher's k likeliest; see ``on_top_k``."""
FLOOR = -100.0
"""Log-probability that the "floor" gives them, nats; NeMo-RL's."""
SAVED = "teacher_top_k"
"""Name under which the backward pass of scoring finds what was kept of a teacher."""


class TopK(NamedTuple):
    """The stored part of a teacher's distribution at one token.

    Attributes:
      logprobs: [k] float32, log-probabilities of its likeliest tokens, in falling order.
      ids: [k] int32, these tokens; of equally likely ones the lowest ids.
      rest: [] float32, log-probability of all others together.
    """

    logprobs: Array
    ids: Array
    rest: Array


def top_k_of(logprobs: Array, k: int) -> TopK:
    """The k likeliest tokens of ONE distribution.

    Args:
      logprobs: [V] float32; -inf where a truncation removed the token.
      k: tokens to keep; all where there are no more.

    >>> top = top_k_of(jnp.log(jnp.array([0.1, 0.6, 0.3])), 2)
    >>> top.ids.tolist(), round(float(jnp.exp(top.rest)), 4)
    ([1, 2], 0.1)
    """
    chex.assert_rank(logprobs, 1)
    chex.assert_type(logprobs, float)
    values, ids = jax.lax.top_k(logprobs, min(k, logprobs.shape[0]))
    return TopK(values, ids, _rest(logprobs, ids))


def on_top_k(student: Array, teacher: TopK, tail: str) -> tuple[Array, Array]:
    """Both distributions as a divergence over the teacher's likeliest tokens reads them.

    Args:
      student: [V] float32, log-probabilities.
      teacher: of the same vocabulary.
      tail: what becomes of the other tokens:
        "renormalised": they are left out, and both distributions divided by what is left (NeMo-RL's
        ``zero_outside_topk=False``, ROLL's ``logits_topk``);
        "cut": they are left out of the sum, and probabilities stay (verl's ``forward_kl_topk``);
        such sums are no divergences, and may be negative;
        "floor": the teacher is divided by what is left and finds the others as good as impossible,
        at ``FLOOR`` (NeMo-RL's ``zero_outside_topk=True``);
        "bucket": they count as one token, so that the result is a lower bound of the divergence.

    Returns:
      (student, teacher): [k] float32, [k + 1] with "bucket" and [V] with "floor".

    Raises:
      UserError: for a tail that is not one of ``TAILS``.
    """
    if tail not in TAILS:
        raise unknown_choice("tail", tail, TAILS)
    likeliest = student[teacher.ids]
    if tail == "cut":
        return likeliest, teacher.logprobs
    if tail == "bucket":
        if len(teacher.ids) == len(student):  # nothing is left for the bucket
            return likeliest, teacher.logprobs
        rest = _rest(student, teacher.ids)
        return jnp.append(likeliest, rest), jnp.append(teacher.logprobs, teacher.rest)
    left = jax.nn.log_softmax(teacher.logprobs)
    if tail == "renormalised":
        return jax.nn.log_softmax(likeliest), left
    floor = jnp.full_like(student, FLOOR)
    return student, floor.at[teacher.ids].set(jnp.maximum(left, FLOOR))


def _rest(logprobs: Array, ids: Array) -> Array:
    """[]: the log-probability of all tokens but these; -inf, without a gradient, for nothing."""
    others = logprobs.at[ids].set(-jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(others))
    top = jnp.where(jnp.isneginf(top), 0, top)
    mass = jnp.exp(others - top).sum()
    return jnp.where(mass == 0, -jnp.inf, top + jnp.log(jnp.where(mass == 0, 1, mass)))


def top_k_divergence(
    kind: str = "forward",
    k: int = 64,
    tail: str = "renormalised",
    beta: float = 0.5,
    teacher: str = "teacher",
) -> Statistic:
    """A divergence over a frozen policy's k likeliest tokens, at every token, with gradient.

    Scoring in chunks keeps of the teacher 2 k + 1 numbers a token for the backward pass, which
    makes neither its distribution nor its logits again.

    Args:
      kind: one of ``KINDS``.
      k: how many of the teacher's tokens are read.
      tail: one of ``TAILS``; see ``on_top_k``.
      beta: the teacher's weight in "jsd".
      teacher: the frozen policy: "teacher", "ref" or another name.

    Returns:
      A statistic named after all of them, nats.
    """
    measure = between(kind, beta)
    if tail not in TAILS:
        raise unknown_choice("tail", tail, TAILS)

    def apply(distributions: dict[str, Array], token: Array) -> Array:
        top = top_k_of(jax.lax.stop_gradient(distributions[teacher]), k)
        top = TopK(*(checkpoint_name(x, SAVED) for x in top))
        return measure(*on_top_k(distributions["policy"], top, tail))

    weight = f"_{beta}" if kind == "jsd" else ""
    return Statistic(f"{kind}{weight}_top_{k}_{tail}_from_{teacher}", apply, ("policy", teacher))


# ---------------------------------------------------------------- in losses


def minimise(statistic: Statistic, metric: str = "divergence") -> Surrogate:
    """The statistic itself as the loss; the advantages are not read.

    Args:
      statistic: carries gradient.
      metric: the name under which its mean is reported.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        losses = stats[statistic.name]
        return losses, {metric: losses}

    return Surrogate(apply, frozenset(), statistics=(statistic,))


def divergence_in_loss(
    statistic: Statistic, coef: float = 1.0, *, aggregate: Aggregate | None = None
) -> Regularizer:
    """``coef`` times a statistic that carries gradient, added to another loss under its name."""

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        return stats[statistic.name]

    return Regularizer(
        statistic.name, value, lambda state: coef, aggregate=aggregate, statistics=(statistic,)
    )


def sampled_divergence(kind: str = "reverse", beta: float = 0.5) -> Surrogate:
    """A divergence from the teacher, estimated from the sampled tokens' probabilities only.

    With r = teacher / student at the token, every divergence is the student's mean of some f(r).
    Its gradient is the student's mean of w grad log(student), where w = f(r) - r f'(r) up to a
    constant; each is taken so that w(1) = 0:

        forward   f = r log r                    w = 1 - r
        reverse   f = -log r                     w = -log r
        jsd       f = beta r log r - m log m     w = -(1 - beta) log m,  m = beta r + 1 - beta

    Args:
      kind: one of ``KINDS``.
      beta: the teacher's weight in "jsd".

    Returns:
      A surrogate whose value is f(r) and whose gradient is w's; it claims the divergence's gradient
      for tokens that the student itself drew. log r is clamped to ``LOG_RATIO_LIMIT``.

    Raises:
      UserError: for an unknown kind.
    """
    if kind not in KINDS:
        raise unknown_choice("divergence", kind, KINDS)

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask, stats["logprobs"]], 1)
        logprobs = stats["logprobs"]
        log_r = stats["teacher_logprobs"] - jax.lax.stop_gradient(logprobs)
        log_r = jnp.clip(log_r, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        r = jnp.exp(log_r)
        if kind == "forward":
            value, weight = r * log_r, -jnp.expm1(log_r)
        elif kind == "reverse":
            value, weight = -log_r, -log_r
        else:
            log_m = jnp.log1p(beta * jnp.expm1(log_r))
            mixed = beta * r + 1 - beta
            value, weight = beta * r * log_r - mixed * log_m, -(1 - beta) * log_m
        losses = value + weight * (logprobs - jax.lax.stop_gradient(logprobs))
        return losses, {"divergence": value}

    return Surrogate(apply, frozenset({"teacher_logprobs"}))


def teacher_reward() -> Transform:
    """Each token's advantage is log(teacher / sampler): minus the sampled reverse divergence.

    Returns:
      A transform to [N, G, T] that reads no reward; a per-token reward, not summed over what
      follows.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        return _teacher_gap(batch), batch

    return stateless(apply, frozenset({"sampler_logprobs", "teacher_logprobs"}))


def teacher_reward_to_go(normalise: bool = True) -> Transform:
    """Each token's advantage is the mean, or sum, of log(teacher / sampler) over all LATER tokens.

    The long part of the gradient of ``minillm``; the token's own divergence is left to a
    full-vocabulary term.

    Args:
      normalise: True to divide by the number of live tokens after it, the paper's length
        normalisation; the last live token gets 0.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = trained(batch)
        gap = _teacher_gap(batch)
        later = _after(gap)
        if normalise:
            later = later / jnp.maximum(_after(live.astype(gap.dtype)), 1)
        return jnp.where(live, later, 0), batch

    return stateless(apply, frozenset({"sampler_logprobs", "teacher_logprobs"}))


def _teacher_gap(batch: Batch) -> Array:
    """[N, G, T]: log(teacher / sampler), 0 off the trained tokens."""
    gap = batch.stats["teacher_logprobs"] - batch.stats["sampler_logprobs"]
    return jnp.where(trained(batch), gap, 0)


def _after(values: Array) -> Array:
    """Sums over later entries of the last axis; a NaN reaches earlier entries alone."""
    later = jnp.flip(jnp.cumsum(jnp.flip(values, -1), axis=-1), -1)
    return jnp.concatenate([later[..., 1:], jnp.zeros_like(later[..., :1])], axis=-1)


def _check(one: Array, other: Array) -> None:
    chex.assert_rank([one, other], 1)
    chex.assert_equal_shape([one, other])
    chex.assert_type([one, other], float)
