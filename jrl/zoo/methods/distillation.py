"""Distillation from a teacher, with policy gradients or beyond a model of preferences."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.distillation import GRPO_ONLY
from jrl.methods.domains import Flag, NonNegative, Positive
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.objectives import aggregates, distill, transforms
from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.types import Array, Objective, Statistic


@variant(grpo, without=GRPO_ONLY)
def minillm(base: Method, normalise: Flag = True) -> Method:
    """Policy gradient on the reverse divergence: the next token exactly, what follows by sampling.

    "MiniLLM: Knowledge Distillation of Large Language Models" (arXiv:2306.08543), r_t =
    log(teacher_t / sampler_t):

        A_t  = 1/(|y| - t) sum_{s > t} r_s       (length-normalised; the sum without)
        loss = mean over tokens of [KL(student || teacher)_t - min(rho_t A_t, clip(rho_t) A_t)]

    the single-step decomposition, its first term over the whole vocabulary. Departures: no tokens
    are drawn from a mixture with the teacher, the language-model loss on a corpus is left out, and
    advantages are not whitened as in the released code, which counts a token's own r_t in A_t as
    well; the mean over tokens is that code's. The paper divides by |y| - t - 1, one less than the
    sum has terms and 0 at the last but one token; here it is their mean.
    """
    reverse = distill.divergence_in_loss(distill.divergence("reverse"))
    return base.plus(reverse).with_(
        advantage=distill.teacher_reward_to_go(normalise),
        aggregate=aggregates.token_mean,
        group=1,
        lacks="sampling from a mixture of student and teacher; the loss on a pre-training corpus",
    )


def adaptive_teacher(beta: float, beta2: float) -> Statistic:
    """The weighted divergence from a teacher extrapolated beyond two models, of one token.

    Args:
      beta: multiplies the divergence.
      beta2: how far to extrapolate, for each unit of distance between the two models.

    Returns:
      A statistic of the frozen policies "dpo" and "reverse_dpo", nats.
    """

    def apply(distributions: dict[str, Array], token: Array) -> Array:
        dpo, reverse = (
            jax.lax.stop_gradient(distributions[name]) for name in ("dpo", "reverse_dpo")
        )
        weight = beta2 * 2 * distill.total_variation(dpo, reverse) + 1e-3
        # A token that one of the distributions leaves out says nothing about the direction.
        finite = jnp.isfinite(dpo) & jnp.isfinite(reverse)
        step = jnp.where(finite, dpo - jnp.where(finite, reverse, 0), 0)
        step = jnp.clip(step, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        teacher = jax.nn.log_softmax(dpo + weight * step)
        teacher = jnp.where(jnp.isnan(dpo + reverse), jnp.nan, teacher)
        return beta / weight * distill.reverse_kl(distributions["policy"], teacher)

    return Statistic(f"adaptive_teacher_{beta}_{beta2}", apply, ("policy", "dpo", "reverse_dpo"))


@published
def align_distil(beta: Positive = 0.1, beta2: NonNegative = 15.0, on_policy: Flag = True) -> Method:
    """Distillation from a teacher beyond a DPO model, the farther the more the two models differ.

    "AlignDistil: Token-Level Language Model Alignment as Adaptive Policy Distillation"
    (arXiv:2503.02832). Of a DPO model and one trained with the order of the pairs swapped:

        w = beta2 sum_v |p_dpo - p_reverse| + 1e-3,    z* = z_dpo + w (z_dpo - z_reverse)
        loss = mean over completions y of 1/|y| sum_t beta/w KL(student || softmax(z*))

    The two models, trained with DPO's beta at 0.1, are the frozen policies "dpo" and "reverse_dpo".
    ``on_policy=False`` learns from the pairs' completions, given as two demonstrations a prompt;
    pass ``beta2=10`` with it, the paper's. Departures: a logit difference is held within 20 nats,
    and is 0 for a token that a truncation removed from either model's distribution.
    """
    surrogate = distill.minimise(adaptive_teacher(beta, beta2))
    return Method(
        Objective(transforms.identity(), surrogate, aggregates.sequence_mean),
        plan=Plan() if on_policy else Plan(demonstrated(2, alone=True)),
    )
