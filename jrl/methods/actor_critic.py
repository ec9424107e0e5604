"""PPO and its relatives: policy gradients with a value network.

Relatives of ``ppo`` inherit its coefficients. Departures of ``ppo`` hold for all of them.
"""

from __future__ import annotations

from jrl.methods.base import Method, Schedule, entropy_term
from jrl.methods.definition import published, variant
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
from jrl.objectives import aggregates, normalizers, ratios, regularizers, transforms
from jrl.objectives.corrections import named_correction
from jrl.objectives.kl import AdaptiveCoef
from jrl.types import Objective, Transform


def credited(
    estimates: Transform,
    whiten: bool,
    kl_coef: float,
    kl_kind: str,
    kl_target: float | None,
) -> Transform:
    """Advantages by token: rewards where they were paid, less the divergence, estimate, whitening.

    The coefficients are those of ``ppo``; ``estimates`` goes from rewards to advantages.
    """
    steps = [transforms.paid()]
    if not is_zero(kl_coef):
        coef = kl_coef if kl_target is None else AdaptiveCoef(kl_coef, kl_target)
        steps.append(transforms.kl_in_reward(kl_kind, coef))
    steps.append(estimates)
    if whiten:
        steps.append(transforms.whiten("tokens"))
    return transforms.chain(*steps)


@published
def ppo(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    discount: Fraction = 1.0,
    gae_lambda: Fraction = 0.95,
    whiten: Flag = True,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInReward = "k1",
    kl_target: Positive | None = None,
    value_coef: Positive = 0.5,
    value_clip: Positive | None = 0.2,
    entropy_coef: NonNegative = 0.0,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    correction_low: Positive | None = None,
    epochs: Count = 1,
) -> Method:
    """Clipped token ratios, generalised advantage estimates, and a value network that learns along.

    "Proximal Policy Optimization Algorithms" (arXiv:1707.06347) with "High-Dimensional Continuous
    Control Using Generalized Advantage Estimation" (arXiv:1506.02438), a token being an action:

        r_t = score at the last token, minus beta k1_t at every token; what an environment paid for
              a turn at the last token of that turn
        A_t = GAE(discount, lambda),  R_t = A_t + V_t
        loss = mean over tokens of [-min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
                                    + c_1 value_loss_t - c_2 H_t]

    Departures, all of them common for language models: the penalty against a reference policy
    (``kl_coef``), which ``kl_target`` steers to that many nats a token, both from "Fine-Tuning
    Language Models from Human Preferences" (arXiv:1909.08593); no discount; advantages whitened
    over the batch's tokens, by their population variance; the value loss halved and clipped as in
    the released code; V after the last token is 0, also where a completion was cut. k1 of the
    penalty is of the sampler's log-probabilities, which other libraries compute again in the
    trainer: the same where the two agree. The paper has c_1 (``value_coef``) 1, of an error that is
    not halved, and c_2 (``entropy_coef``) 0.01.
    """
    rule = ratios.clip(clip_low, clip_high, dual_clip)
    correct = named_correction(correction, correction_cap, correction_low)
    return Method(
        Objective(
            credited(transforms.gae(discount, gae_lambda), whiten, kl_coef, kl_kind, kl_target),
            ratios.ratio_loss(ratios.token, rule, correct),
            aggregates.token_mean,
            (regularizers.value_loss(value_coef, value_clip), *entropy_term(entropy_coef)),
        ),
        schedule=Schedule(epochs),
    )


@variant(ppo, without=("discount", "gae_lambda"), clip_high=0.28, value_clip=None, whiten=False)
def vapo(
    base: Method,
    whiten: Flag,
    kl_coef: NonNegative,
    kl_kind: KlInReward,
    kl_target: Positive | None,
    length_scale: Positive = 0.05,
    nll_coef: NonNegative = 0.1,
) -> Method:
    """PPO for long reasoning: lambda by length, undecayed value targets, right answers imitated.

    "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks"
    (arXiv:2504.05118), l being a completion's length:

        A_t = GAE(1, 1 - 1 / (alpha l)),  R_t = GAE(1, 1) + V_t
        loss = mean over tokens of [-min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)
                                    + c_1 value_loss_t]
               - mu * mean over the tokens of right completions of log pi_t

    with alpha 0.05 (``length_scale``) and mu 0.1 (``nll_coef``). The paper trains the value network
    alone first, on returns of the starting policy: the run's own warm-up of the values does that.
    It draws few prompts with many completions each. Departures: lambda is at least 0, which the
    formula is not for l below 20; a completion is right where its score is above 0; with several
    updates a step, mu weighs by the right completions of the whole batch. Whitening, c_1 and the
    clip of the value loss are not taken from the paper.
    """
    estimates = transforms.gae(1.0, value_decay=1.0, length_scale=length_scale)
    base = base.with_(advantage=credited(estimates, whiten, kl_coef, kl_kind, kl_target))
    base = base.before(normalizers.mark_positive())
    return base if is_zero(nll_coef) else base.plus(regularizers.positive_nll(nll_coef))
