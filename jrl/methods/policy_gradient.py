"""Group-relative policy gradients: each completion against the others of its prompt.

Each function says its paper's formula with r the reward of a completion, A the advantage and
rho_t the ratio of token t under the policy being trained to the one it was drawn from.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from jrl.methods.base import Method, Schedule, published, refill
from jrl.methods.domains import (
    AboveOne,
    AtLeastOne,
    Choice,
    CorrectionName,
    Count,
    Ddof,
    Flag,
    KlInLoss,
    NonNegative,
    Positive,
    Tokens,
    is_zero,
)
from jrl.objectives import advantages, aggregates, regularizers, surrogates, transforms
from jrl.objectives.surrogates import named_correction
from jrl.types import Objective, Regularizer, Transform

FAMILY = "group_relative"


def _normalised(eps: float, ddof: int) -> Transform:
    return transforms.per_group(partial(advantages.group_mean_std, eps=eps, ddof=ddof))


def _kl(kind: str, coef: float) -> tuple[Regularizer, ...]:
    """No term, and no reference policy, when the coefficient is 0."""
    return () if is_zero(coef) else (regularizers.kl_in_loss(kind, coef),)


@published(
    paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    arxiv="2402.03300",
    family=FAMILY,
)
def grpo(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInLoss = "k3",
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """Group-relative advantages, clipped token ratios, the mean over tokens of each completion.

    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300):

        A_i = (r_i - mean(r)) / std(r)
        loss = -1/G sum_i 1/|o_i| sum_t [min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)
                                         - beta k3_t]

    Departures: beta (``kl_coef``) is 0, as in most later work, and then no reference policy is
    kept; the paper trains with 0.04. The two clip bounds are separate arguments; the paper does not
    give their value, 0.2 is PPO's. ``eps`` is added to the deviation, which is the sample's
    (``ddof=1``); the paper does not say which. ``dual_clip`` and ``correction`` are not in the
    paper; see ``objectives.surrogates``.
    """
    return Method(
        Objective(
            advantage=_normalised(eps, ddof),
            surrogate=surrogates.clipped_ratio(
                clip_low,
                clip_high,
                dual_clip=dual_clip,
                correction=named_correction(correction, correction_cap),
            ),
            aggregate=aggregates.sequence_mean,
            regularizers=_kl(kl_kind, kl_coef),
        ),
        schedule=Schedule(epochs),
        min_group=2,
    )


@published(
    paper="Understanding R1-Zero-Like Training: A Critical Perspective",
    arxiv="2503.20783",
    family=FAMILY,
)
def dr_grpo(
    max_tokens: Count,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInLoss = "k3",
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """GRPO without its two biases: no deviation in the advantage, no length in the mean.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783):

        A_i = r_i - mean(r)
        loss = -1/G sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i) / max_tokens

    Departures: the formula of the paper has no divisor; its code divides by the completion limit,
    as here. Completions without a trained token are not counted in G.
    """
    return Method(
        Objective(
            advantage=transforms.per_group(advantages.mean_centred),
            surrogate=surrogates.clipped_ratio(
                clip_low, clip_high, correction=named_correction(correction, correction_cap)
            ),
            aggregate=aggregates.constant_norm(max_tokens),
            regularizers=_kl(kl_kind, kl_coef),
        ),
        schedule=Schedule(epochs),
        min_group=2,
    )


@published(
    paper="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    arxiv="2503.14476",
    family=FAMILY,
)
def dapo(
    max_tokens: Count,
    buffer_tokens: Tokens | None = None,
    overlong_scale: NonNegative = 1.0,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.28,
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    mask_truncated: Flag = False,
    min_std: NonNegative = 1e-6,
    max_rounds: Count = 10,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """GRPO with a higher upper clip, dynamic sampling, a token mean and a penalty near the limit.

    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476):

        loss = -1/(sum_i |o_i|) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - low, 1 + high) A_i)

    over groups in which some but not all answers are right (others are drawn in their place), with
    A_i as in GRPO of the reward minus the soft overlong punishment:

        0 up to L - b tokens, then (|o_i| - (L - b)) / b, and 1 from L tokens on

    Departures: ``buffer_tokens`` (b) is a fifth of ``max_tokens`` (L) unless given; the paper has
    4,096 of 20,480. Groups are compared by their rewards' deviation before the punishment, as in
    the released code, which filters on accuracy; ``eps`` and ``ddof`` as in ``grpo``. The paper's
    other remedy for cut completions, leaving them out of the loss, is ``mask_truncated``.
    """
    buffer = max_tokens // 5 if buffer_tokens is None else buffer_tokens
    steps = [transforms.mask_truncated()] if mask_truncated else []
    if not is_zero(overlong_scale):
        steps.append(transforms.overlong_penalty(max_tokens, buffer, overlong_scale))
    return Method(
        Objective(
            advantage=transforms.chain(*steps, _normalised(eps, ddof)),
            surrogate=surrogates.clipped_ratio(
                clip_low, clip_high, correction=named_correction(correction, correction_cap)
            ),
            aggregate=aggregates.token_mean,
        ),
        groups=refill(min_std, max_rounds),
        schedule=Schedule(epochs),
        min_group=2,
    )


@published(paper="Group Sequence Policy Optimization", arxiv="2507.18071", family=FAMILY)
def gspo(
    clip_low: NonNegative = 3e-4,
    clip_high: NonNegative = 4e-4,
    gradient: Annotated[str, Choice(("sequence", "token"))] = "sequence",
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInLoss = "k3",
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """GRPO with one ratio a completion: the geometric mean of its tokens' ratios, clipped.

    "Group Sequence Policy Optimization" (arXiv:2507.18071):

        s_i = exp(1/|y_i| sum_t log rho_t)
        loss = -1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

    with A_i as in GRPO and the paper's clip bounds. ``gradient="token"`` is its GSPO-token. |y_i|
    counts trained tokens. Departures: ``eps`` and ``ddof`` as in ``grpo``; ``correction`` is not in
    the paper.
    """
    return Method(
        Objective(
            advantage=_normalised(eps, ddof),
            surrogate=surrogates.clipped_sequence_ratio(
                clip_low,
                clip_high,
                gradient=gradient,
                correction=named_correction(correction, correction_cap),
            ),
            aggregate=aggregates.sequence_mean,
            regularizers=_kl(kl_kind, kl_coef),
        ),
        schedule=Schedule(epochs),
        min_group=2,
    )


@published(
    paper="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    arxiv="2506.13585",
    family=FAMILY,
)
def cispo(
    clip_low: NonNegative = 1.0,
    clip_high: NonNegative = 4.0,
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """REINFORCE with clipped importance weights: no token ever loses its gradient to clipping.

    CISPO of "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (arXiv:2506.13585):

        loss = -1/(sum_i |o_i|) sum_i sum_t sg(clip(rho_t, 1 - low, 1 + high)) A_i log pi_t

    with A_i as in GRPO. The paper sets no lower bound (``clip_low`` 1 does that) and tunes the
    upper one without giving it; the default, weights up to 5, is the upper bound that TRL's
    documentation takes from "The Art of Scaling Reinforcement Learning Compute for LLMs"
    (arXiv:2510.13786). Departures: ``eps`` and ``ddof`` as in ``grpo``; the dynamic sampling and
    length penalty that the paper borrows from DAPO are not part of it.
    """
    return Method(
        Objective(
            advantage=_normalised(eps, ddof),
            surrogate=surrogates.cispo(
                clip_low, clip_high, correction=named_correction(correction, correction_cap)
            ),
            aggregate=aggregates.token_mean,
        ),
        schedule=Schedule(epochs),
        min_group=2,
    )
