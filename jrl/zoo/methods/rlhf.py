"""Reinforcement learning from human feedback: PPO on a reward model, and its refinements.

The reward model is a reward function, trained by ``bradley_terry``. Notation as in ``ppo``.
"""

from __future__ import annotations

from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.actor_critic import ppo
from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Choice, Count, NonNegative, Positive
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.methods.preference import dpo
from jrl.objectives import aggregates, comparisons
from jrl.objectives.advantages import live_mean
from jrl.objectives.kl import bounded_exp
from jrl.objectives.members import Members, over_group
from jrl.objectives.pairs import preference_metrics, softplus
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Stats, Surrogate, Transform, opinions
from jrl.zoo.methods.preference import Points


@variant(ppo, kl_coef=0.05, value_coef=0.1, epochs=4)
def rlhf_summarize(base: Method) -> Method:
    """PPO on a reward model of human comparisons, less the divergence from the supervised model.

    "Learning to summarize from human feedback" (arXiv:2009.01325): a reward model trained with
    -log sigmoid(r(y_w) - r(y_l)) (``bradley_terry``), shifted so that reference summaries score 0
    on average; then PPO, discount 1, on

        R(x, y) = r(x, y) - beta log( pi(y|x) / pi_SFT(y|x) )

    with the divergence charged token by token and a value network of its own, started from the
    reward model: ``value.kind = "network"`` and ``value.path``, the reward model's. Departures:
    without those keys values are a head of the policy; the reward is not shifted. ``value_coef``
    and ``epochs`` are those that reproductions use; the advantages are whitened, as in ``ppo``.
    """
    return base


@variant(ppo, kl_coef=0.05)
def salsa(base: Method) -> Method:
    """PPO whose reference policy is the weight average of two supervised fine-tunings.

    "SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF" (arXiv:2411.01798):

        theta_ref = alpha theta_1 + (1 - alpha) theta_2,  alpha = 1/2
        maximise E[r] - beta KL(pi || pi_ref)

    The objective is that of ``ppo``; the soup, the average of two independent fine-tunings of one
    network, is the run's reference policy: ``frozen.ref = ["A", "B"]`` in a configuration, or
    ``models.soup.average([one, two])`` in ``init_state(frozen={"ref": ...})``; training starts from
    one of the two. Without it the reference is the starting policy, and this is ``ppo``. Not known:
    beta (``kl_coef``).
    """
    return base


def length_cost(points: float) -> Transform:
    """Subtracts ``points`` from the score for each trained token."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        return scores - points * batch.mask.sum(axis=2), batch

    return stateless(apply)


def stop_cost(points: float) -> Transform:
    """Subtracts ``points`` from the score of a truncated completion."""
    return stateless(lambda scores, batch: (scores - points * batch.truncated, batch))


@variant(ppo, kl_coef=0.1, gae_lambda=1.0, value_coef=0.1, epochs=2)
def fact_rlhf(
    base: Method, length_penalty: NonNegative = 10 / 896, stop_penalty: NonNegative = 8.0
) -> Method:
    """PPO whose reward model reads facts that the policy does not see, with rule rewards added.

    Fact-RLHF of "Aligning Large Multimodal Models with Factually Augmented RLHF"
    (arXiv:2309.14525):

        R = r(x, facts, y) + 2 correctness(y) - c tokens(y) - 8 [cut] - beta log(pi / pi_SFT)

    r is a reward model of "which answer makes up more", given captions or the right option beside
    the prompt (``[rewards.NAME] function = "fact_rlhf"``, ``zoo.rewards.models``); it and the rule
    of correctness are reward parts, each with its weight. Numbers are the released runs': c is 10
    points for 896 tokens; correctness has weight 2 and is 1 for the right option, 1/2 and -1/2 for
    a right and a wrong answer to a question whose answer is no, 0 otherwise. Departures: the code
    holds the divergence of a token above 0 and multiplies all rewards by 10.
    """
    costs = length_cost(length_penalty), stop_cost(stop_penalty)
    return base.before(*costs).with_(lacks="images")


@variant(ppo, kl_coef=0.05)
def mpo(
    base: Method,
    stage: Annotated[str, Choice(("dpo", "ppo"))] = "dpo",
    threshold: NonNegative = 1.0,
    beta: Positive = 0.1,
) -> Method:
    """DPO on easy pairs first; then PPO on hard prompts, with the DPO model as the reference.

    "Mixed Preference Optimization: Reinforcement Learning with Data Selection and Better Reference
    Model" (arXiv:2403.19443): a threshold on a reward model's |r(y_w) - r(y_l)| parts the pairs.

        stage "dpo"   -log sigmoid( beta h(y_w) - beta h(y_l) ) where the gap is above it
        stage "ppo"   PPO with reward r - ``kl_coef`` log(pi / pi_ref) where it is not

    The second stage is a run that starts from the first one's checkpoint, which is then its
    reference as well. In the first author's code the threshold is 1 on HH-RLHF and 2 on TLDR, and
    the pairs are in the reward model's order. Departures: the gap is that of the group at hand, its
    best against its worst score: the data's pair in the first stage, the policy's own draws in the
    second, where the paper keeps the parting of the data. PPO's own coefficients but ``epochs`` are
    read in the second stage alone. Not known: beta and ``kl_coef`` of the paper's runs (that code's
    plain DPO and PPO have 0.3 and 0.4).
    """
    if stage == "dpo":
        first = dpo.build({"beta": beta, "min_gap": threshold})
        return first.with_(epochs=base.schedule.epochs)
    return base.before(comparisons.within_gap(threshold))


def lagrangian(budget: float, rate: float, initial: float, cap: float) -> Transform:
    """``safe_rlhf``'s score (reward - lambda cost) / (1 + lambda); the state is log lambda.

    Of the ``rewards`` [N, G, R] the last part is the cost, points; ``cap`` bounds lambda.
    """

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(scores, 2)
        if batch.rewards.shape[2] < 2:
            return scores, batch, state
        cost = batch.rewards[:, :, -1]
        reward = scores - cost * batch.reward_weights[-1]
        multiplier = jnp.exp(state)
        live = batch.members & opinions(batch.rewards, batch.ids)[:, :, -1]
        mean = live_mean(cost, live)
        updated = jnp.minimum(state + rate * multiplier * (mean - budget), jnp.log(cap))
        # A floor keeps the exponential above 0, from where it could never rise again.
        updated = jnp.where(live.any(), jnp.maximum(updated, -20.0), state)
        return (reward - multiplier * cost) / (1 + multiplier), batch, updated

    return Transform(
        init=lambda: jnp.minimum(jnp.log(initial), jnp.log(cap)).astype(jnp.float32), apply=apply
    )


@variant(ppo, kl_coef=0.02)
def safe_rlhf(
    base: Method,
    budget: Points = 0.0,
    dual_rate: Positive = 0.1,
    initial_lambda: Positive = 1.0,
    max_lambda: Positive = 5.0,
) -> Method:
    """PPO under a constraint on a cost, with a multiplier that learns along.

    "Safe RLHF-V: Safe Reinforcement Learning from Human Feedback in Multimodal Large Language
    Models" (arXiv:2503.17682), after Safe RLHF (arXiv:2310.12773), whose cost model is
    ``safe_rlhf_cost``:

        min over theta, max over lambda >= 0 of  -J_R + lambda (J_C - budget)
        A = (A_R - lambda A_C) / (1 + lambda)
        log lambda <- log lambda + rate * lambda * (mean cost - budget),  lambda <= max_lambda

    The last reward part is the cost (unweighted), the others the reward, each of which may be a
    trained model (docs/reward-models.md); with a single part nothing is constrained. Lambda is
    capped as in the released code, whose numbers these are: the text version's, and the V version's
    ``kl_coef`` (with lambda from 10 to at most 20, budget -0.5; the text version has ``kl_coef``
    0.01). Departures: generalised advantages are linear in the reward, so one value network of
    (R - lambda C) / (1 + lambda) stands for the paper's two, whose mix differs from it only while
    lambda moves. The mean cost is the batch's, the code's that of the last 128 completions; no loss
    on pre-training data is added (coefficient 16 there).
    """
    step = lagrangian(budget, dual_rate, initial_lambda, max_lambda)
    return base.before(step).with_(lacks="images")


# ---------------------------------------------------------------- GEPO


def equivalent_group(members: Members, beta: float, spread_coef: float) -> tuple[Array, Stats]:
    """``gepo``'s preference of equivalent demonstrations, which score above 1/2, over the others.

    Returns:
      The [] loss, 0 where either kind is missing (NaN where a score is), and [] metrics.
    """
    reward = beta * members.log_ratio()
    same, other = members.live & (members.score > 0.5), members.live & (members.score <= 0.5)

    high, low = live_mean(reward, same), live_mean(reward, other)
    spread = live_mean(jnp.square(reward - high), same)
    both = same.any() & other.any()
    loss = jnp.where(both, softplus(low - high) + spread_coef * spread, 0)
    has_nan = (members.live & jnp.isnan(members.score)).any()
    return jnp.where(has_nan, jnp.nan, loss), preference_metrics(high, low)


def beside_equivalent(inner: Surrogate, coef: float, beta: float, spread_coef: float) -> Surrogate:
    """``inner`` on the policy's own samples plus ``coef`` times ``equivalent_group`` on the rest.

    Use it with ``sequence_sum``, the mean over groups: the own draws' losses are divided by their
    tokens and by the number of own draws.
    """
    preference = over_group(
        lambda members: equivalent_group(members, beta, spread_coef), {"ref_logprobs"}
    )

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        demonstrated = (jnp.where(mask, stats["external"], 0).max(axis=1) > 0)[:, None]
        sampled, data = mask & ~demonstrated, mask & demonstrated
        losses, metrics = jax.vmap(inner.apply)(stats, advantages, sampled)
        tokens = jnp.maximum(sampled.sum(axis=1, keepdims=True), 1)
        losses = losses / (tokens * jnp.maximum(sampled.any(axis=1).sum(), 1))
        preferred, more = preference.apply(stats, advantages, data)
        metrics = {name: live_mean(value, sampled) for name, value in metrics.items()}
        return jnp.where(sampled, losses, 0) + coef * preferred, {**metrics, **more}

    needs = inner.needs | {"ref_logprobs", "external"}
    return Surrogate(apply, needs, over="group", labels=inner.labels)


@variant(grpo)
def gepo(
    base: Method,
    beta: Positive = 0.1,
    gepo_coef: NonNegative = 0.01,
    spread_coef: NonNegative = 1.0,
    demonstrations: Count = 2,
) -> Method:
    """On-policy clipped learning from tests, plus a preference for equivalent programs as a group.

    OORL of "On-Policy Optimization with Group Equivalent Preference for Multi-Programming Language
    Understanding" (arXiv:2505.12723): RL on the policy's translations, whose reward is 1 when the
    unit tests pass, and GEPO on intermediate representations of the source program, given as
    demonstrations: reward 1 for one that is equivalent to it, 0 for one that is not. A row lists as
    many as ``demonstrations`` in the field that ``data.fields.solution`` names, and beside it
    whether each is equivalent, which ``function = "listed_solution"`` pays; that part comes first
    in ``combine = "first"``, the tests behind it. With r = beta (log pi - log pi_ref):

        loss = GRPO  +  c ( -log sigmoid(mean of r over equivalent - mean over inequivalent)
                            + c' variance of r over the equivalent ones )

    with the paper's c (``gepo_coef``) 0.01 and c' (``spread_coef``) 1. Departures: GRPO where the
    paper's runs take REINFORCE++; the variance divides by the number of equivalent ones; with
    ``kl_coef`` the demonstrations' tokens are held to the reference, too. Its section 4.1 has no
    beta (0.1 is DPO's), clip bounds or coefficient of the divergence.
    """
    objective = base.objective
    regularizers = (
        r._replace(aggregate=r.aggregate or objective.aggregate) for r in objective.regularizers
    )
    return base.with_(
        advantage=comparisons.own_only(objective.advantage),
        surrogate=beside_equivalent(objective.surrogate, gepo_coef, beta, spread_coef),
        aggregate=aggregates.sequence_sum,
        regularizers=tuple(regularizers),
        plan=Plan(demonstrated(demonstrations, distinct=True)),
        needs=base.needs.reading("several solutions"),
    )


# ---------------------------------------------------------------- DR-IRL


def scaled_by_hardness(inner: Transform, threshold: float) -> Transform:
    """Advantages of the policy's own samples, times ``dr_irl``'s coefficients of difficulty.

    Demonstrations leave their groups: they are compared with, and neither trained on nor counted.
    """

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        shown = comparisons.demonstrations(batch) & batch.members
        sampled = batch.members & ~shown
        advantages, edited, state = inner.apply(scores, batch.replace(members=sampled), state)
        shown_score = live_mean(scores, shown, axis=1)
        compared = sampled & shown.any(axis=1, keepdims=True)
        gap = jnp.where(compared, shown_score[:, None] - scores, 0)
        typical = compared & (jnp.square(gap - live_mean(gap, compared)) <= threshold)
        usual = jnp.where(typical.any(), live_mean(gap, typical), live_mean(gap, compared))
        # A quotient of sigmoids by their logarithms, which stays finite far from 0.
        scale = softplus(-live_mean(gap, compared)) - softplus(-usual)
        if batch.rewards.shape[2] > 1:
            scored = sampled & opinions(batch.rewards, batch.ids)[..., 1]
            unlike = 1 - batch.rewards[..., 1]
            hard = softplus(-live_mean(unlike, scored)) - softplus(-unlike)
            scale = scale + jnp.where(scored, hard, 0)
        return advantages * bounded_exp(scale), edited, state

    return inner._replace(apply=apply, needs=inner.needs | {"external"})


@variant(grpo)
def dr_irl(base: Method, threshold: Positive = 1.0) -> Method:
    """GRPO whose advantages grow with how far a sample is from a demonstration, in words and worth.

    GRPO-S of DR-IRL, the paper of ``ml_irl``. With W_i in [0, 1] how alike sample and demonstration
    are, and R_i the demonstration's reward less the sample's,

        alpha_D = sigmoid(d_i) / sigmoid(mean of d),       d_i = 1 - W_i
        alpha_M = sigmoid(mean of R where (R_i - mean of R)^2 <= tau) / sigmoid(mean of R)
        A_i = alpha_D alpha_M (r_i - mean(r)) / std(r)

    then the clipped loss of GRPO. The first reward part is r, a model that ``ml_irl`` trained on
    demonstrations of one kind of harm (``where`` tells kinds apart); the second, with weight 0, is
    ``demonstration_similarity``, which gives W: without it alpha_D is 1. The data's own solution is
    the demonstration. Departures: means are over a step's batch, the paper's over a kind's data;
    tau (``threshold``, points squared) is not known, nor which of sample and demonstration its R_i
    subtracts. Read from two accounts of the paper, whose code is not published.
    """
    advantage = scaled_by_hardness(base.objective.advantage, threshold)
    return base.with_(advantage=advantage, plan=Plan(demonstrated(1)))
