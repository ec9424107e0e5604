"""Baselines and weights of REINFORCE that single papers published.

Notation as in ``methods.policy_gradient``.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import CENTRED, Method
from jrl.methods.definition import variant
from jrl.methods.domains import Choice, Count, Flag, Fraction, NonNegative, Whole
from jrl.methods.group_relative import grpo
from jrl.methods.policy_gradient import reinforce, reinforce_plus_plus
from jrl.methods.ratios import CLIPS
from jrl.objectives import advantages, aggregates, normalizers, segments, transforms
from jrl.objectives.ratios import score
from jrl.types import Array, Batch, Statistic, Stats, Transform
from jrl.zoo.networks.policies import train_policies


@variant(grpo, without=("eps", "ddof"), kl_kind="k2")
def reinforce_plus_plus_baseline(base: Method) -> Method:
    """REINFORCE++ against the mean of the prompt's completions, normalised over the batch.

    The form for several samples a prompt, of the paper of ``reinforce_plus_plus``:

        A_i = r_i - mean of the group,    then (A - mean) / std over the batch's tokens
        loss = -mean over tokens of min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i) + beta k2

    Departures: beta (``kl_coef``) is 0 unless given; the deviation as in ``reinforce_plus_plus``.
    """
    advantage = transforms.chain(CENTRED, transforms.whiten("tokens"))
    return base.with_(advantage=advantage, aggregate=aggregates.token_mean)


@variant(grpo, without=CLIPS)
def gpg(base: Method, normalise: Annotated[str, Choice(("none", "std"))] = "none") -> Method:
    """The plain policy gradient of a group, scaled up for the groups that have nothing to say.

    "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning"
    (arXiv:2504.02546):

        A_i = alpha (r_i - mean(r)) / F,   alpha = B / (B - M)
        loss = -1/(sum_i |o_i|) sum_i sum_t A_i log pi_t

    with B the batch's completions and M those in groups whose rewards are all equal. F is 1, or the
    group's deviation with ``normalise="std"``, which alone reads ``eps`` and ``ddof``. Departure:
    the paper's threshold on how many groups must be informative, below which it draws more, is not
    part of it.
    """
    base = base.with_(advantage=CENTRED) if normalise == "none" else base
    base = base.after(normalizers.scale_to_informative())
    return base.with_(rule=score, aggregate=aggregates.token_mean)


def _members_and_lengths(batch: Batch) -> tuple[Array, ...]:
    return batch.members, transforms.trained(batch).sum(axis=2, dtype=jnp.float32)


@variant(grpo, without=(*CLIPS, "eps", "ddof"))
def opo(base: Method) -> Method:
    """REINFORCE against the mean reward of the prompt's completions, weighted by their lengths.

    "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585):

        b = sum_i |o_i| r_i / sum_i |o_i|
        loss = -1/G sum_i (r_i - b) sum_t log pi_t

    the baseline of least variance if the squared score function grows with the length. Departures:
    |o_i| counts trained tokens; a completion without any is not counted in G.
    """
    compare = transforms.per_group(advantages.length_weighted_centred, _members_and_lengths)
    return base.with_(advantage=compare, rule=score, aggregate=aggregates.sequence_sum)


def _collision(distributions: Stats, token: Array) -> Array:
    return jnp.exp(2 * distributions["policy"]).sum()


COLLISION = Statistic("collision", _collision, start=True)
"""Collision probability of two samples from the policy's distribution, at the start of the step."""


def optimal_token_baseline(discount: float, lone_tail: bool) -> Transform:
    """``otb``'s advantage of each token, [N, G, T]; exactly 0 where a place's returns are equal."""

    def to_go(rewards: Array, mask: Array) -> Array:
        return advantages.reward_to_go(rewards, mask, discount)

    def of_group(returns: Array, energy: Array, mask: Array) -> Array:
        live = mask.sum(axis=0, keepdims=True)
        spent = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0), axis=1), 0)
        # Where nothing was spent by anybody, all weigh the same.
        none = spent.sum(axis=0, keepdims=True) <= 0
        weights = jnp.where(none, mask, spent)
        lowest = jnp.min(returns, axis=0, keepdims=True, where=mask, initial=jnp.inf)
        shifted = jnp.where(mask, returns - lowest, 0)
        total = jnp.where(live > 0, weights.sum(axis=0, keepdims=True), 1)
        baseline = (weights * shifted).sum(axis=0, keepdims=True) / total
        alone = returns if lone_tail else 0 * shifted  # a NaN stays one
        return jnp.where(mask, jnp.where(live > 1, shifted - baseline, alone), 0)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = transforms.trained(batch)
        token_logprobs = jnp.where(live, batch.stats["proximal_logprobs"], 0)
        energy = 1 - 2 * jnp.exp(jnp.minimum(token_logprobs, 0)) + batch.stats["collision"]
        returns = jax.vmap(jax.vmap(to_go))(transforms.token_rewards(values, batch), live)
        # Of rounding below 0 a weight could be made negative; a NaN stays one.
        return jax.vmap(of_group)(returns, jnp.maximum(energy, 0), live), batch

    return transforms.stateless(apply, frozenset({"proximal_logprobs"}), (COLLISION,))


@variant(grpo, without=(*CLIPS, "eps", "ddof"))
def otb(base: Method, discount: Fraction = 1.0, lone_tail: Flag = False) -> Method:
    """REINFORCE with a baseline for every token, weighted by the gradient spent up to it.

    "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (arXiv:2602.07078):

        w_t = 1 - 2 pi_t + sum over the vocabulary of pi^2,  W_t = sum_{s <= t} w_s
        b_t = sum_i G_it W_it / sum_i W_it   over the completions that reach place t
        loss = -1/G sum_i sum_t (G_it - b_t) log pi_t

    with G_t the reward from t on, and w_t the squared norm of the token's score function with
    respect to the logits. Departures: pi is the policy at the start of the step. Where a completion
    is alone at its place, the baseline is its own return and the advantage 0; verl, with
    ``lone_tail``, has baseline 0 there.
    """
    compare = optimal_token_baseline(discount, lone_tail)
    return base.with_(advantage=compare, rule=score, aggregate=aggregates.sequence_sum)


# ---------------------------------------------------------------- agents


def leave_out_near_zero(least: float) -> Transform:
    """Leaves members out of the loss, and of its mean, whose advantage is within ``least`` of 0."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        return values, batch.replace(members=batch.members & ~(jnp.abs(values) < least))

    return transforms.stateless(apply)


@variant(grpo, without=("eps", "ddof"), clip_low=1 / 11, clip_high=0.1, epochs=2)
def loop(base: Method, least: NonNegative = 0.01) -> Method:
    """PPO's clip with the leave-one-out baseline: a policy gradient for long episodes, no critic.

    LOOP of "Reinforcement Learning for Long-Horizon Interactive LLM Agents" (arXiv:2502.01600), K
    episodes to a task:

        A_k = R_k - mean of R_j over j != k = K / (K - 1) (R_k - mean(R))
        loss = -mean over episodes of the mean over drawn tokens of
               min(rho_t A_k, clip(rho_t, 1 / (1 + eps), 1 + eps) A_k)

    with ratios by token, of the paper's three the best. Episodes with |A| below ``least`` are left
    out (appendix D). eps 0.1, ``least`` and two passes over a batch are the released code's.
    """
    compare = transforms.per_group(advantages.leave_one_out)
    return base.with_(advantage=transforms.chain(compare, leave_out_near_zero(least)))


def own_steps() -> Transform:
    """Each token gets what was paid for its own step alone, [N, G, T]: nothing flows between steps.

    Steps are ``ids["step"]``; what was paid for no step counts for the last one.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        rewards = transforms.rewards_by_token(values, batch)
        return segments.total(rewards, segments.steps(batch)), batch

    return transforms.stateless(apply)


@variant(reinforce_plus_plus, without=("kl_coef", "kl_kind", "discount"))
def comas(base: Method, policies: Count = 3, swap_every: Whole = 1) -> Method:
    """REINFORCE++ on messages, each scored by the discussion itself.

    "CoMAS: Co-Evolving Multi-Agent Systems via Interaction Rewards" (arXiv:2510.08529). A solution
    is proposed, evaluated and given a score s of 1, 2 or 3:

        r = (s - 1) / 2 for the solution, 1 - (s - 1) / 2 for the evaluation, 0 for the score
        r = 0, 0 and -1 where the score cannot be read
        A = (r - mean) / std over the batch's tokens, at the tokens of the message alone

    then PPO's clipped loss. A message is a step; ``zoo.envs.players.discussion_env`` plays the
    roles and pays so, as the authors' code does. Every agent is a policy of its own, learns from
    its own messages, and takes the next role after ``swap_every`` steps. Not known: how the paper
    deals out the roles. Departure: no penalty for the divergence. With ``policies`` 1 one plays all
    roles.
    """
    method = base.with_(advantage=transforms.chain(own_steps(), transforms.whiten("tokens")))
    if policies == 1:
        return method
    return train_policies(method, policies, swap_every)


# ---------------------------------------------------------------- weighted REINFORCE


def outcome_weights(positive: float, negative: float, above: float) -> Transform:
    """``positive`` for correct answers, ``-negative`` for wrong ones; no baseline, no scale."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        labels = transforms.correct(values, above)
        return positive * labels - negative * (1 - labels), batch

    return transforms.stateless(apply)


@variant(reinforce, without=("baseline",))
def w_reinforce(
    base: Method,
    positive_weight: NonNegative = 0.1,
    negative_weight: NonNegative = 1.0,
    above: NonNegative = 0.5,
) -> Method:
    """REINFORCE on outcomes, with right answers counting less than wrong ones.

    Weighted REINFORCE of "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning"
    (arXiv:2506.01347):

        loss = -1/B sum_i (lambda y_i - (1 - y_i)) sum_t log pi_t

    with lambda (``positive_weight``) 0.1 as the paper recommends; no baseline, no normalisation,
    on-policy. ``nsr`` and ``psr`` are its two halves. Departures: sums over the tokens of a
    completion, as in the paper's formula; the released code takes the mean over all tokens and
    clips PPO's ratio at 0.2, with four updates a batch.
    """
    return base.before(outcome_weights(positive_weight, negative_weight, above))


_WEIGHTS = ("positive_weight", "negative_weight")


@variant(w_reinforce, without=_WEIGHTS, positive_weight=0.0)
def nsr(base: Method) -> Method:
    """Negative sample reinforcement: wrong answers are made less likely, right ones let be.

    A half of the paper of ``w_reinforce``:

        loss = 1/B sum_i (1 - y_i) sum_t log pi_t

    Departures: right answers are counted in B, as in the paper's expectation over all samples.
    """
    return base


@variant(w_reinforce, without=_WEIGHTS, positive_weight=1.0, negative_weight=0.0)
def psr(base: Method) -> Method:
    """Positive sample reinforcement: right answers are made more likely, wrong ones let be.

    A half of the paper of ``w_reinforce``:

        loss = -1/B sum_i y_i sum_t log pi_t

    Departures: wrong answers are counted in B, as in the paper's expectation over all samples.
    """
    return base
