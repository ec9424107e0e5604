"""Critic-free policy gradients with group-relative, leave-one-out, greedy or batch baselines.

Each function says its paper's formula with r the reward of a completion, A the advantage and
rho_t the ratio of token t under the policy being trained to the one it was drawn from.
"""

from __future__ import annotations

from typing import Annotated, Any

from jrl.methods.base import (
    AtLeastOne,
    Choice,
    Count,
    Draw,
    Flag,
    Fraction,
    Method,
    NonNegative,
    Positive,
    Range,
    Schedule,
    is_zero,
    published,
    refill,
)
from jrl.objectives import advantages, aggregates, regularizers, surrogates, transforms
from jrl.objectives.surrogates import CORRECTIONS, named_correction
from jrl.types import Array, Batch, Objective, Regularizer, Transform

FAMILY = "policy_gradient"

CorrectionName = Annotated[str, Choice(tuple(CORRECTIONS))]
DualClip = Annotated[float, Range(1.0, open_low=True)]
KlInLoss = Annotated[str, Choice(("k2", "k3"))]
KlInReward = Annotated[str, Choice(("k1", "k2", "k3"))]
Ddof = Annotated[int, Range(0, 1, whole=True)]
Tokens = Annotated[int, Range(0, whole=True)]


def _normalised(eps: float, ddof: int) -> Transform:
    def advantage(rewards: Array, members: Array) -> Array:
        return advantages.group_mean_std(rewards, members, eps=eps, ddof=ddof)

    return transforms.per_group(advantage)


def _kl(kind: str, coef: float) -> tuple[Regularizer, ...]:
    """No term, and no reference policy, when the coefficient is 0."""
    return () if is_zero(coef) else (regularizers.kl_in_loss(kind, coef),)


def _sequence_kl(kind: str, coef: float) -> tuple[Transform, ...]:
    return () if is_zero(coef) else (transforms.kl_in_reward(kind, coef, level="sequence"),)


@published(
    paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    arxiv="2402.03300",
    family=FAMILY,
)
def grpo(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: DualClip | None = None,
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


@published(
    paper="Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human "
    "Feedback in LLMs",
    arxiv="2402.14740",
    family=FAMILY,
)
def rloo(kl_coef: NonNegative = 0.0, kl_kind: KlInReward = "k1") -> Method:
    """REINFORCE on whole completions, each against the mean of the group's others.

    "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in
    LLMs" (arXiv:2402.14740):

        R_i = r_i - beta log(pi(y_i) / pi_ref(y_i))
        loss = -1/G sum_i [R_i - mean of R_j over j != i] sum_t log pi_t

    Departures: beta (``kl_coef``) is 0 unless given; the divergence is that of the sampler's law.
    """
    return Method(
        Objective(
            advantage=transforms.chain(
                *_sequence_kl(kl_kind, kl_coef), transforms.per_group(advantages.leave_one_out)
            ),
            surrogate=surrogates.reinforce(),
            aggregate=aggregates.sequence_sum,
        ),
        min_group=2,
    )


@published(
    paper="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization",
    arxiv="2501.03262",
    family=FAMILY,
)
def reinforce_plus_plus(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInReward = "k1",
    discount: Fraction = 1.0,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """PPO's clipped loss without a critic: rewards to go, normalised over the whole batch.

    "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization"
    (arXiv:2501.03262), the form for one or more samples a prompt:

        A_t = r - beta sum_{s >= t} k1_s,    then (A_t - mean) / std over the batch's tokens
        loss = -mean over tokens of min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)

    Departures: beta (``kl_coef``) is 0 unless given; ``discount`` (1 in the paper's formula) comes
    from the authors' OpenRLHF, as do the population deviation and the 1e-8 added to its square.
    The clip is that of the paper's first version; bounds too wide to reach leave its last one.
    """
    penalty = [] if is_zero(kl_coef) else [transforms.kl_in_reward(kl_kind, kl_coef)]
    return Method(
        Objective(
            advantage=transforms.chain(
                *penalty, transforms.reward_to_go(discount), transforms.whiten("tokens")
            ),
            surrogate=surrogates.clipped_ratio(
                clip_low, clip_high, correction=named_correction(correction, correction_cap)
            ),
            aggregate=aggregates.token_mean,
        ),
        schedule=Schedule(epochs),
    )


def _members_and_baseline(batch: Batch) -> tuple[Array, ...]:
    return batch.members, batch.baseline


@published(
    paper="ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning "
    "Large Language Models",
    arxiv="2310.10505",
    family=FAMILY,
)
def remax(kl_coef: NonNegative = 0.0, kl_kind: KlInReward = "k1") -> Method:
    """REINFORCE with the reward of the greedy completion as the baseline.

    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models" (arXiv:2310.10505):

        loss = -1/N sum_i (r(x_i, y_i) - r(x_i, greedy completion of x_i)) sum_t log pi_t

    One greedy completion is drawn for each prompt and not trained on. Departures: beta
    (``kl_coef``) is 0 unless given, and then charges the sampled completion, not the greedy one.
    """
    steps: tuple[Any, ...] = _sequence_kl(kl_kind, kl_coef)
    return Method(
        Objective(
            advantage=transforms.chain(
                *steps, transforms.per_group(advantages.greedy_baseline, _members_and_baseline)
            ),
            surrogate=surrogates.reinforce(),
            aggregate=aggregates.sequence_sum,
        ),
        draw=Draw(baseline_members=1),
    )


@published(
    paper="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement "
    "Learning",
    family=FAMILY,
)
def reinforce(baseline: Annotated[str, Choice(("none", "batch"))] = "none") -> Method:
    """The score-function gradient of the expected reward, and nothing else.

    "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"
    (Williams, 1992; not on arXiv):

        loss = -1/B sum_i (r_i - b) sum_t log pi_t

    Departures: b is 0, or with ``baseline="batch"`` the mean reward of the batch, the sample's own
    included, which scales the gradient by (B - 1) / B on average.
    """
    advantage = transforms.centre() if baseline == "batch" else transforms.identity()
    return Method(Objective(advantage, surrogates.reinforce(), aggregates.sequence_sum))
