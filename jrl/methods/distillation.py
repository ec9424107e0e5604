"""Learning from a teacher's probabilities on completions that the policy, or the data, wrote."""

from __future__ import annotations

from typing import Annotated

from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Positive, Range, Tokens, Whole
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.methods.ratios import CLIPS
from jrl.objectives import aggregates, distill, ratios, transforms
from jrl.types import Objective

Divergence = Annotated[str, Choice(distill.KINDS)]
Inner = Annotated[float, Range(0.001, 0.999)]


@published
def gkd(
    divergence: Divergence = "jsd",
    beta: Inner = 0.5,
    over: Annotated[str, Choice(("vocabulary", "sampled"))] = "vocabulary",
    demonstrations: Tokens = 0,
    top_k: Whole = 0,
    tail: Annotated[str, Choice(distill.TAILS)] = "renormalised",
) -> Method:
    """A divergence between teacher and student at every token of the student's own completions.

    "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"
    (arXiv:2306.13649), generalised knowledge distillation:

        loss = mean over completions y of 1/|y| sum_t D(teacher || student)(. | x, y_<t)

    with D KL(teacher || student) ("forward"), KL(student || teacher) ("reverse") or the generalised
    Jensen-Shannon divergence with weight ``beta`` on the teacher ("jsd"). No gradient passes
    through the sampling. ``demonstrations`` completions of the data join each group: the paper's
    lambda is the fraction of the group that is not one of them. ``over="sampled"`` estimates D by
    the drawn token alone, where the teacher's whole distribution is not to be had; it claims D's
    gradient on the student's own samples, so that it takes no demonstrations.

    With ``top_k`` above 0 D is over the teacher's that many likeliest tokens, as other libraries
    have it, and the backward pass keeps 2 k + 1 numbers of the teacher a token, where it would make
    the teacher's distribution again. ``tail`` says what becomes of the other tokens: they are left
    out and both distributions divided by what is left ("renormalised", as in NeMo-RL by default and
    ROLL), left out of the sum of D ("cut", verl's with "forward"), as good as impossible for the
    teacher ("floor", NeMo-RL's ``zero_outside_topk``) or one token together ("bucket", a lower
    bound of D). NeMo-RL and ROLL take 64, and average over tokens, not completions.

    Departures: at the ends of ``beta``, where the divergence is 0, choose "forward" or "reverse".
    The paper's further RL term is to be had by adding ``distill.divergence_in_loss`` to a method.
    """
    if over == "sampled" and demonstrations:
        raise UserError(
            f"gkd.over = 'sampled' with gkd.demonstrations = {demonstrations}; the estimate holds "
            "for the policy's own samples: give demonstrations = 0, or over = 'vocabulary'"
        )
    if over == "sampled" and top_k:
        raise UserError(
            f"gkd.over = 'sampled' with gkd.top_k = {top_k}: the drawn token is not the teacher's"
            " likeliest; give top_k = 0, or over = 'vocabulary'"
        )
    if over == "sampled":
        surrogate = distill.sampled_divergence(divergence, beta)
    elif top_k:
        surrogate = distill.minimise(distill.top_k_divergence(divergence, top_k, tail, beta))
    else:
        surrogate = distill.minimise(distill.divergence(divergence, beta))
    return Method(
        Objective(transforms.identity(), surrogate, aggregates.sequence_mean),
        plan=Plan(demonstrated(demonstrations)),
    )


GRPO_ONLY = ("eps", "ddof")


@variant(grpo, without=(*GRPO_ONLY, *CLIPS))
def on_policy_distillation(base: Method, cap: Positive = 4.0) -> Method:
    """RL whose reward at every token is how much likelier the teacher finds it than the student.

    "On-Policy Distillation" (Lu and Thinking Machines Lab, 2025; a report, not on arXiv):

        A_t  = log(teacher_t / sampler_t),    loss = -mean over tokens of sg(rho_t) A_t log pi_t

    the reverse divergence of the drawn token as its advantage, with discount 0: nothing of what
    follows is charged to it. Departures: the importance weight rho_t is held below 1 + ``cap``; the
    mean over tokens, for the report does not say how tokens are weighed.
    """
    return base.with_(
        rule=ratios.bounded(0.0, 1 + cap),
        advantage=distill.teacher_reward(),
        aggregate=aggregates.token_mean,
        group=1,
    )
