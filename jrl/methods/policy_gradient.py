"""REINFORCE and its baselines: other samples, the greedy completion, the batch.

Each function says its paper's formula with r the reward of a completion, A the advantage, G the
completions of a prompt and rho_t the ratio of token t under the policy being trained to the one it
was drawn from. Those without a ratio are meant for one pass over completions just drawn.
"""

from __future__ import annotations

from typing import Annotated

from jrl.methods.base import Method, Schedule, kl_penalty
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    AtLeastOne,
    Choice,
    CorrectionName,
    Count,
    Fraction,
    KlInReward,
    NonNegative,
    Positive,
)
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, greedy_baseline
from jrl.methods.ratios import CLIPS
from jrl.objectives import advantages, aggregates, transforms
from jrl.objectives.corrections import named_correction
from jrl.objectives.ratios import clipped_ratio, score
from jrl.objectives.ratios import reinforce as score_function
from jrl.types import Array, Batch, Objective


@published
def reinforce(baseline: Annotated[str, Choice(("none", "batch"))] = "none") -> Method:
    """The score-function gradient of the expected reward, and nothing else.

    "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"
    (Williams, 1992; not on arXiv):

        loss = -1/B sum_i (r_i - b) sum_t log pi_t

    Departures: b is 0, or with ``baseline="batch"`` the mean reward of the batch, the sample's own
    included, which scales the gradient by (B - 1) / B on average.
    """
    advantage = transforms.centre() if baseline == "batch" else transforms.identity()
    surrogate = score_function()._replace(on_policy=True)
    return Method(Objective(advantage, surrogate, aggregates.sequence_sum))


@variant(reinforce, without=("baseline",))
def rloo(base: Method, kl_coef: NonNegative = 0.0, kl_kind: KlInReward = "k1") -> Method:
    """REINFORCE on complete sequences, each against the mean of the group's others.

    "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in
    LLMs" (arXiv:2402.14740):

        R_i = r_i - beta log(pi(y_i) / pi_ref(y_i))
        loss = -1/G sum_i [R_i - mean of R_j over j != i] sum_t log pi_t

    Departures: beta (``kl_coef``) is 0 unless given; the divergence is that of the sampler's
    distribution.
    """
    charged = kl_penalty(kl_kind, kl_coef, "sequence")
    advantage = transforms.chain(*charged, transforms.per_group(advantages.leave_one_out))
    return base.with_(advantage=advantage, group=2)


def _members_and_baseline(batch: Batch) -> tuple[Array, ...]:
    return batch.members, batch.baseline


@variant(reinforce, without=("baseline",))
def remax(base: Method, kl_coef: NonNegative = 0.0, kl_kind: KlInReward = "k1") -> Method:
    """REINFORCE with the reward of the greedy completion as the baseline.

    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models" (arXiv:2310.10505):

        loss = -1/N sum_i (r(x_i, y_i) - r(x_i, greedy completion of x_i)) sum_t log pi_t

    One greedy completion is drawn for each prompt and not trained on. Departures: beta
    (``kl_coef``) is 0 unless given, and then charges the sampled completion, not the greedy one:
    its whole divergence, of the sampler's distribution, at every token, where the released code
    charges each token its own. That code divides by the batch's tokens, discounts the reward by
    0.99 a token in its scripts, and holds r less its baseline within 5.
    """
    charged = kl_penalty(kl_kind, kl_coef, "sequence")
    centred = transforms.per_group(advantages.greedy_baseline, _members_and_baseline)
    return base.with_(advantage=transforms.chain(*charged, centred), plan=Plan(greedy_baseline))


@published
def reinforce_plus_plus(
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInReward = "k1",
    discount: Fraction = 1.0,
    correction: CorrectionName = "none",
    correction_cap: AtLeastOne = 2.0,
    correction_low: Positive | None = None,
    epochs: Count = 1,
) -> Method:
    """PPO's clipped loss without a critic: rewards to go, normalised over the batch.

    "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization"
    (arXiv:2501.03262), the form for one or more samples a prompt:

        A_t = r - beta sum_{s >= t} k1_s,    then (A_t - mean) / std over the batch's tokens
        loss = -mean over tokens of min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)

    Departures: beta (``kl_coef``) is 0 unless given, and k1 is of the sampler's log-probabilities;
    ``discount`` (1 in the paper's formula) and the population deviation come from the authors'
    OpenRLHF, which holds its square at 1e-8 or above where 1e-8 is added here. The clip is that of
    the paper's first version; bounds too wide to reach leave its last one.
    """
    charged = kl_penalty(kl_kind, kl_coef)
    to_go = transforms.reward_to_go(discount)
    correct = named_correction(correction, correction_cap, correction_low)
    return Method(
        Objective(
            transforms.chain(*charged, to_go, transforms.whiten("tokens")),
            clipped_ratio(clip_low, clip_high, correction=correct),
            aggregates.token_mean,
        ),
        schedule=Schedule(epochs),
    )


@variant(grpo, without=(*CLIPS, "eps", "ddof"))
def maxrl(base: Method) -> Method:
    """Rewards over their group's mean: the likelihood of a right answer, not its probability.

    "Maximum Likelihood Reinforcement Learning" (arXiv:2602.02710), for rewards of 0 and 1:

        A_i = (r_i - mean(r)) / mean(r),  0 where no completion is right
        loss = -1/G sum_i A_i sum_t log pi_t

    Departures: other rewards that are not negative are taken as they are; a group whose mean is not
    above 0 is left out. The released code puts these advantages into PPO's loss, clipped at 0.2,
    with the mean over the batch's tokens.
    """
    compare = transforms.per_group(advantages.mean_scaled)
    return base.with_(advantage=compare, rule=score, aggregate=aggregates.sequence_sum)
