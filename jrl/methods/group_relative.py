"""Group-relative policy gradients: each completion against the others of its prompt.

Each function says its paper's formula with r the reward of a completion, A the advantage and
rho_t the ratio of token t under the policy being trained to the one it was drawn from. Relatives
of GRPO inherit its coefficients: ``eps``, ``ddof``, ``correction``, ``kl_coef``, ``epochs``, ...
are as in ``grpo`` everywhere, departures from any paper that does not have them.
"""

from __future__ import annotations

from jrl.methods.base import CENTRED, Method, against_others, kl_term, normalised
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    AboveOne,
    AtLeastOne,
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
from jrl.methods.edit import refill
from jrl.objectives import aggregates, transforms
from jrl.objectives.corrections import named_correction
from jrl.objectives.ratios import clip, ratio_loss, token


@published
def grpo(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    off_policy_limit: Positive | None = None,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInLoss = "k3",
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    correction_low: Positive | None = None,
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
    (``ddof=1``); the paper does not say which. ``dual_clip``, ``correction`` (with its greatest
    weight, and its least where not the name's own) and ``off_policy_limit`` are not in the paper;
    see ``objectives.ratios``.
    """
    rule = clip(clip_low, clip_high, dual_clip)
    weighting = named_correction(correction, correction_cap, correction_low)
    return against_others(
        normalised(eps, ddof),
        ratio_loss(token, rule, weighting, off_policy_limit),
        regularizers=kl_term(kl_kind, kl_coef),
        epochs=epochs,
    )


@variant(grpo, without=("eps", "ddof"))
def dr_grpo(base: Method, max_tokens: Count) -> Method:
    """GRPO without its two biases: no deviation in the advantage, no length in the mean.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783):

        A_i = r_i - mean(r)
        loss = -1/G sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i) / max_tokens

    Departures: the formula of the paper has no divisor; its code divides by the completion limit,
    as here. Completions without a trained token are not counted in G.
    """
    return base.with_(advantage=CENTRED, aggregate=aggregates.constant_norm(max_tokens))


@variant(grpo, clip_high=0.28)
def dapo(
    base: Method,
    max_tokens: Count,
    buffer_tokens: Tokens | None = None,
    overlong_scale: NonNegative = 1.0,
    mask_truncated: Flag = False,
    min_std: NonNegative = 1e-6,
    max_rounds: Count = 10,
) -> Method:
    """GRPO with a higher upper clip, dynamic sampling, a token mean and a penalty near the limit.

    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476):

        loss = -1/(sum_i |o_i|) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - low, 1 + high) A_i)

    over groups in which some but not all answers are right (others are drawn in their place), with
    A_i as in GRPO of the reward minus the soft overlong punishment:

        0 up to L - b tokens, then (|o_i| - (L - b)) / b, and 1 from L tokens on

    Departures: ``buffer_tokens`` (b) is a fifth of ``max_tokens`` (L) unless given; the paper has
    4,096 of 20,480. Groups are compared by their rewards' deviation before the punishment, as in
    the released code, which filters on accuracy. The token mean is over the batch, as there; the
    paper's formula divides prompt by prompt, and has no bound on negative advantages, where the
    released runs set ``dual_clip`` 10. The paper's other remedy for cut completions, leaving
    them out of the loss, is ``mask_truncated``.
    """
    buffer = max_tokens // 5 if buffer_tokens is None else buffer_tokens
    steps = []
    if not is_zero(overlong_scale):
        steps.append(transforms.overlong_penalty(max_tokens, buffer, overlong_scale))
    if mask_truncated:  # after the penalty, which counts the tokens under the mask
        steps.append(transforms.mask_truncated())
    return base.before(*steps).with_(aggregate=aggregates.token_mean, **refill(min_std, max_rounds))
