"""Squared errors over complete sequences: mirror descent, contrast, balance, Bellman equations.

Each function says its paper's formula with r the reward of a completion y, pi the policy being
trained, and l(y) = log(pi(y) / pi_ref(y)), summed over the completion's trained tokens. Log-ratios
are squared, never exponentiated. All float32.
"""

from __future__ import annotations

from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import CENTRED, Method, Needs, Schedule, against_others
from jrl.methods.definition import published
from jrl.methods.domains import Choice, Count, NonNegative, Positive, Tokens, is_zero
from jrl.methods.schedule import refreshed
from jrl.objectives import aggregates, segments, transforms
from jrl.objectives.advantages import mean_centred
from jrl.objectives.distill import divergence_in_loss
from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.members import Members, first_token, over_group
from jrl.objectives.ratios import checked
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import completion_tokens, reward_to_go, stateless
from jrl.types import Array, Batch, Objective, Regularizer, Statistic, Stats, Surrogate, Transform

# ---------------------------------------------------------------- mirror descent


def squared_log_ratio(tau: float) -> Surrogate:
    """``kimi_k1_5``'s loss of ONE sequence, the square at its first live token."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        gap = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0).sum()
        rein = jnp.where(first_token(mask), tau / 2 * jnp.square(gap), 0)
        return -advantages * stats["logprobs"] + rein, {"log_ratio": gap}

    return Surrogate(checked(apply), frozenset({"ref_logprobs"}))


def ranked_in_group(scale: float = 1.0, correct: float = 0.5, start_steps: int = 0) -> Transform:
    """Rewards short and penalises long completions of a group; see ``kimi_k1_5``.

    0 for all when the group's lengths are equal.

    Args:
      scale: what the reward is multiplied by, points.
      correct: points, the least score of a right answer.
      start_steps: training steps without it, at the start of the run.
    """

    def apply(values: Array, batch: Batch, steps: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(values, 2)
        lengths = completion_tokens(batch).astype(jnp.float32)
        least = jnp.min(lengths, axis=1, keepdims=True, where=batch.members, initial=jnp.inf)
        most = jnp.max(lengths, axis=1, keepdims=True, where=batch.members, initial=-jnp.inf)
        differ = most > least
        reward = 0.5 - (lengths - least) / jnp.where(differ, most - least, 1)
        reward = jnp.where(values >= correct, reward, jnp.minimum(reward, 0))
        applies = differ & batch.members & (steps >= start_steps)
        return values + jnp.where(applies, scale * reward, 0), batch, steps + 1

    return Transform(init=lambda: jnp.zeros((), jnp.int32), apply=apply)


@published
def kimi_k1_5(
    tau: Positive = 0.1,
    length_scale: NonNegative = 1.0,
    length_start: Tokens = 0,
    correct: Positive = 0.5,
    iteration_steps: Count = 10,
    epochs: Count = 1,
) -> Method:
    """Online mirror descent: the group's mean as baseline, a squared log-ratio as the rein.

    "Kimi k1.5: Scaling Reinforcement Learning with LLMs" (arXiv:2501.12599). The gradient of the
    report, with the reference the policy at the start of the iteration:

        1/k sum_j [ grad log pi(y_j) (r_j - mean(r)) - tau / 2 grad l(y_j)^2 ]

    To r is added, from training step ``length_start`` on, ``length_scale`` times the length reward

        lambda = 0.5 - (len - shortest) / (longest - shortest),   min(0, lambda) if wrong

    within the group, right being ``correct`` points or more. Every ``iteration_steps`` steps the
    reference becomes a copy of the policy and the optimiser starts anew.

    Unknown: tau, the weight of the length reward and the updates in an iteration are not published;
    the defaults are ours. An iteration of one update would leave tau without effect, since l is
    then 0, and would make Adam, always at its first update, move every weight by its rate.
    Departures: the warm-up of the length reward is a switch; the two recipes for short models
    (merging, shortest-of-n, preference pairs) are not part of this method.
    """
    length = (
        () if is_zero(length_scale) else (ranked_in_group(length_scale, correct, length_start),)
    )
    advantage = transforms.chain(*length, CENTRED)
    method = against_others(advantage, squared_log_ratio(tau), aggregates.sequence_sum)
    return method.with_(
        schedule=Schedule(epochs, refreshed(iteration_steps, moments=True)),
        lacks="sampling of prompts by curriculum and by failure rate; partial rollouts",
    )


# ---------------------------------------------------------------- contrast and balance


def contrastive(beta: float) -> Surrogate:
    """``copg``'s loss over all pairs of a group; a member's reward is its advantage."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        ratio = group.log_ratio()
        gap, reward = mean_centred(ratio, group.live), mean_centred(group.score, group.live)
        # The sum over pairs of a product of differences is n times that of centred products.
        others = jnp.maximum(group.live.sum() - 1, 1)
        return -2 / others * ((reward - beta / 2 * gap) * gap).sum(), {"log_ratio": ratio}

    return over_group(of_group, {"ref_logprobs"})


@published
def copg(beta: Positive = 0.1) -> Method:
    """The contrast of two completions' rewards times that of their log-ratios, on any data.

    "Contrastive Policy Gradient: Aligning LLMs on sequence-level scores in a supervised-friendly
    fashion" (arXiv:2406.19185), for a pair (y, y') from anywhere:

        loss = -[(r - r') - beta / 2 (l(y) - l(y'))] (l(y) - l(y'))

    Its gradient weighs grad log pi(y) - grad log pi(y') by the difference of r - beta l, without
    an importance weight. A group gives the mean over all its pairs; a group of one has loss 0.

    Departures: completions without a trained token are in no pair. The paper's temperatures differ
    from task to task; the default is ours.
    """
    return against_others(transforms.identity(), contrastive(beta), aggregates.sequence_sum)


def log_variance() -> Surrogate:
    """The variance over a group of log pi(y) less the advantage."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        gap = mean_centred(group.total("logprobs") - group.score, group.live)
        loss = jnp.square(gap).sum() / jnp.maximum(group.live.sum(), 1)
        return loss, {"balance_gap": jnp.abs(gap)}

    return over_group(of_group)


@published
def for_flow(beta: Positive = 1.0, floor: Positive = 1e-3) -> Method:
    """Trajectory balance: completions as likely as their rewards, not only the best of them.

    FoR of "Flow of Reasoning: Efficient Training of LLM Policy with Divergent Thinking"
    (arXiv:2406.05673), in the form without a learned partition function (VarGrad):

        s_i = log pi(y_i) - beta log R_i,   loss = mean_i (s_i - mean_j s_j)^2  for each prompt

    The backward policy of a tree is 1. R is the score, at least ``floor`` points, so that a score
    of 0 has a logarithm.

    Departures: the completion's tokens are the trajectory; the per-step likelihoods that the paper
    adds to R, its tempered sampling, prioritised replay and local search belong to the environment
    and the sampler; beta is constant, where the released code's rises from 1 to 2 over the epochs.
    """
    log_reward = stateless(
        lambda values, batch: (beta * jnp.log(jnp.maximum(values, floor)), batch)
    )
    method = against_others(log_reward, log_variance(), aggregates.sequence_sum)
    return method.with_(
        lacks="replay by priority, tempered draws and local search over reasoning trees"
    )


# ---------------------------------------------------------------- soft Bellman equations

LEVELS = ("token", "step", "response")
"""The action unit of ``oreo``'s policy equation."""

PAPERS_ALPHA = {"token": 0.01, "step": 0.1, "response": 0.3}


def path_returns() -> Transform:
    """The reward from each token on, as advantage and as the statistic "returns"."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        returns, batch, _ = reward_to_go().apply(values, batch, ())
        return returns, batch.with_stats(returns=returns)

    return stateless(apply)


def soft_path_consistency(beta: float, level: str = "token") -> Surrogate:
    """``oreo``'s error of the policy, with the return as advantage; use it with ``sequence_mean``.

    An action is the tokens of one ``level``; its loss stands at its first token.
    """
    labels = ("step",) if level == "step" else ()

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        drift = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0)
        columns = jnp.arange(mask.shape[0])
        if level == "token":
            step_drift, starts, last = drift, mask, columns
            share = jnp.ones((), drift.dtype)
        else:
            seg = segments.segments(mask, *(stats[name] for name in labels))
            column = columns.astype(jnp.float32)
            starts = mask & (segments.minimum(column, seg) == column)
            last = segments.maximum(column, seg).astype(jnp.int32)
            step_drift = segments.total(drift, seg)
            share = mask.sum() / jnp.maximum(starts.sum(), 1)
        onwards = jnp.cumsum(drift[::-1])[::-1]
        after = jax.lax.stop_gradient((onwards - drift)[last])
        value = jax.lax.stop_gradient(stats["values"])
        error = value - advantages + beta * step_drift + beta * after
        return jnp.where(starts, share * jnp.square(error), 0), {"path_error": jnp.abs(error)}

    return Surrogate(apply, frozenset({"values", "ref_logprobs"}), labels=frozenset(labels))


def soft_value_loss(beta: float, coef: float = 1.0) -> Regularizer:
    """``coef`` times ``oreo``'s error of the values, against ``path_returns``' "returns"."""

    def value(stats: Stats, mask: Array) -> Array:
        drift = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0)
        onwards = jax.lax.stop_gradient(jnp.cumsum(drift[::-1])[::-1])
        return jnp.square(stats["values"] - stats["returns"] + beta * onwards)

    needs = ("values", "returns", "ref_logprobs")
    return term("value_loss", value, coef, *needs, aggregate=aggregates.sequence_mean)


def reference_divergence(coef: float) -> Regularizer:
    """``coef`` times KL(pi || pi_ref) of each token's distribution, over the full vocabulary.

    Log-ratios are held within 20 nats: a token that truncation took from the reference would cost
    infinitely much.
    """

    def apply(distributions: Stats, token: Array) -> Array:
        supported = distributions["policy"] > -jnp.inf
        policy = jnp.where(supported, distributions["policy"], 0)
        gap = jnp.clip(policy - distributions["ref"], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return jnp.where(supported, jnp.exp(policy) * gap, 0).sum()

    statistic = Statistic("reference_divergence", apply, ("policy", "ref"))
    return divergence_in_loss(statistic, coef)


@published
def oreo(
    beta: Positive = 0.03,
    level: Annotated[str, Choice(LEVELS)] = "token",
    value_coef: Positive = 1.0,
    kl_coef: NonNegative | None = None,
    epochs: Count = 1,
) -> Method:
    """Policy and values fitted together to the soft Bellman equation, on any samples.

    OREO of "Offline Reinforcement Learning for LLM Multi-Step Reasoning" (arXiv:2412.16145). With
    d_t = log(pi_t / pi_ref,t), R the reward of the completion and V the value before a token:

        policy:  mean_t (sg(V_t) - R + beta d_t + sg(beta sum_{i > t} d_i))^2
        value:   mean_t (V_t - R + beta sum_{i >= t} sg(d_i))^2
        loss = policy + value_coef value + alpha KL(pi || pi_ref)

    ``level`` "step" and "response" take the tokens of a reasoning step (the label "step": a line of
    a text, a turn of an episode), or all of them, for one action of the policy's equation. The KL
    is over the whole vocabulary. beta is the paper's, and so is alpha unless ``kl_coef`` is given:
    0.01 for tokens, 0.1 for steps, 0.3 for responses. Departures: the samples are whatever the run
    gives, the policy's own unless it is told otherwise; the paper's value network has an optimiser
    of its own; the values are fitted at every token at every level, where the released code fits
    them where steps begin. The values guide a search at test time with ``jrl eval --search beam
    --by value``.
    """
    terms = [soft_value_loss(beta, value_coef)]
    alpha = PAPERS_ALPHA[level] if kl_coef is None else kl_coef
    if not is_zero(alpha):
        terms.append(reference_divergence(alpha))
    return Method(
        Objective(
            path_returns(),
            soft_path_consistency(beta, level),
            aggregates.sequence_mean,
            tuple(terms),
        ),
        schedule=Schedule(epochs),
        needs=Needs(reads=frozenset({"lines"} if level == "step" else ())),
    )


# ---------------------------------------------------------------- the uniform policy's values


def _mean_logprob(distributions: Stats, token: Array) -> Array:
    """The mean log-probability over the tokens that truncation leaves."""
    supported = distributions["policy"] > -jnp.inf
    return jnp.where(supported, distributions["policy"], 0).sum() / supported.sum()


def uniform_policy_error(scale: float = 1.0) -> Surrogate:
    """``rover``'s loss; it brings the mean of log pi over the vocabulary, now and at the start."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        q = scale * (stats["logprobs"] - stats["proximal_logprobs"])
        mean = scale * (stats["distribution_mean"] - stats["rollout_distribution_mean"])

        def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            value, live = now
            return jnp.where(live, value, later), later

        _, following = jax.lax.scan(step, jnp.zeros((), mean.dtype), (mean, mask), reverse=True)
        target = jax.lax.stop_gradient(advantages + following)
        return jnp.square(q - target), {"q_value": q, "q_target": target}

    statistics = (
        Statistic("distribution_mean", _mean_logprob),
        Statistic("rollout_distribution_mean", _mean_logprob, start=True),
    )
    return Surrogate(apply, frozenset({"proximal_logprobs"}), statistics=statistics)


@published
def rover(scale: Positive = 1.0, epochs: Count = 1) -> Method:
    """The uniformly random policy's values, held in log-ratios and fitted by squared errors.

    "Random Policy Valuation is Enough for LLM Reasoning with Verifiable Rewards"
    (arXiv:2509.24981):

        Q(s, a) = rho (log pi(a | s) - log pi_old(a | s))
        target_t = r_i - mean(r) + mean over the vocabulary of Q(s_{t+1}, .), 0 after the last token
        loss = mean over tokens of (Q(s_t, a_t) - sg(target_t))^2

    with rho (``scale``) 1, the reward given at every token, and pi_old the policy at the start of
    the step. Departures: where truncation removes tokens from the distribution, the mean is over
    those that it leaves; the optional clip of the released code is left out. Its script for
    mathematics also divides the reward by the group's deviation.
    """
    surrogate = uniform_policy_error(scale)
    return against_others(CENTRED, surrogate, aggregates.token_mean, epochs=epochs)
