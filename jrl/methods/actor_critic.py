"""Policy gradients with a value network."""

from __future__ import annotations

from jrl.methods.base import Method, Schedule, published
from jrl.methods.domains import (
    AboveOne,
    AtLeastOne,
    CorrectionName,
    Count,
    Flag,
    Fraction,
    KlInReward,
    NonNegative,
    Positive,
    is_zero,
)
from jrl.objectives import aggregates, regularizers, surrogates, transforms
from jrl.objectives.surrogates import named_correction
from jrl.types import Objective


@published(
    paper="Proximal Policy Optimization Algorithms", arxiv="1707.06347", family="actor_critic"
)
def ppo(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    discount: Fraction = 1.0,
    gae_lambda: Fraction = 0.95,
    whiten: Flag = True,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInReward = "k1",
    value_coef: Positive = 0.5,
    value_clip: Positive | None = 0.2,
    entropy_coef: NonNegative = 0.0,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    epochs: Count = 1,
) -> Method:
    """Clipped token ratios, generalised advantage estimates, and a value network that learns along.

    "Proximal Policy Optimization Algorithms" (arXiv:1707.06347) with "High-Dimensional Continuous
    Control Using Generalized Advantage Estimation" (arXiv:1506.02438), a token being an action:

        r_t = score at the last token, minus beta k1_t at every token
        A_t = GAE(discount, lambda),  R_t = A_t + V_t
        loss = mean over tokens of [-min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
                                    + c_1 value_loss_t - c_2 H_t]

    Departures, all of them common for language models: the penalty against a reference policy
    (``kl_coef``; "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593), no
    discount, advantages whitened over the batch's tokens, the value loss halved and clipped as in
    the released code. The paper has c_1 (``value_coef``) 1, of an error that is not halved, and c_2
    (``entropy_coef``) 0.01.
    """
    steps = [] if is_zero(kl_coef) else [transforms.kl_in_reward(kl_kind, kl_coef)]
    steps.append(transforms.gae(discount, gae_lambda))
    if whiten:
        steps.append(transforms.whiten("tokens"))
    terms = [regularizers.value_loss(value_coef, value_clip)]
    if not is_zero(entropy_coef):
        terms.append(regularizers.entropy_bonus(entropy_coef))
    return Method(
        Objective(
            advantage=transforms.chain(*steps),
            surrogate=surrogates.clipped_ratio(
                clip_low,
                clip_high,
                dual_clip=dual_clip,
                correction=named_correction(correction, correction_cap),
            ),
            aggregate=aggregates.token_mean,
            regularizers=tuple(terms),
        ),
        schedule=Schedule(epochs),
    )
