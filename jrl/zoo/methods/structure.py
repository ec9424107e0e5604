"""Methods that know how completions are built: of steps, rows, in strata.

Each function says its paper's formula with r the reward of a completion. All else is as in
``grpo``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Ddof, Flag, Fraction, NonNegative, Positive
from jrl.methods.group_relative import grpo
from jrl.methods.policy_gradient import reinforce
from jrl.objectives import segments
from jrl.objectives.advantages import group_mean_std, mean_centred
from jrl.objectives.aggregates import token_mean
from jrl.objectives.segments import Segments, at_step_start, step_ids, step_starts
from jrl.objectives.transforms import (
    paid_rewards,
    per_token,
    rewards_by_token,
    stateless,
    token_rewards,
    trained,
)
from jrl.types import Array, Batch, Transform

# ---------------------------------------------------------------- steps


def step_returns(
    rewards: Array, steps: Array, mask: Array, discount: float, joined: Array | None = None
) -> Array:
    """[T] the discounted reward from each token's step to the end of ONE sequence.

        R_k = sum over later steps l >= k of discount^(l - k) r_l

    Args:
      rewards: [T] float, points; a step's reward is the sum over its tokens.
      steps: [T] int32.
      mask: [T] bool.
      discount: the factor for one STEP, in [0, 1].
      joined: [T] bool, False at the tokens of a step that stands alone: nothing later counts for it
        and it counts for nothing earlier. None where all are joined.

    >>> steps, mask = jnp.array([0, 0, 1, 2]), jnp.ones(4, bool)
    >>> step_returns(jnp.array([1.0, 0.0, 0.0, 4.0]), steps, mask, 0.5).tolist()
    [2.0, 2.0, 2.0, 4.0]
    """
    chex.assert_equal_shape([rewards, steps, mask])
    starts = step_starts(steps, mask)
    joined = jnp.ones_like(mask) if joined is None else joined

    def back(later: tuple[Array, Array, Array], now: tuple[Array, ...]) -> tuple:
        total, crossed, linked = later
        reward, start, join, live = now
        carried = jnp.where(join & linked, discount * total, 0)
        total = jnp.where(live, reward + jnp.where(crossed, carried, total), total)
        after = (total, jnp.where(live, start, crossed), jnp.where(live, join, linked))
        return after, total

    nothing = (jnp.zeros((), rewards.dtype), jnp.zeros((), bool), jnp.zeros((), bool))
    returns: Array
    _, returns = jax.lax.scan(back, nothing, (rewards, starts, joined, mask), reverse=True)
    return at_step_start(returns, steps, mask)


def _discounted(rewards: Array, steps: Array, mask: Array, joined: Array, discount: float) -> Array:
    return step_returns(rewards, steps, mask, discount, joined)


def group_in_group(
    weight: float = 1.0,
    discount: float = 0.95,
    eps: float = 1e-6,
    ddof: int = 1,
    normalise: bool = True,
    among: str = "state",
    matched: float | None = None,
    cross_steps: bool = False,
) -> Transform:
    """Each episode against its group, and each step against those taken in the same state: GiGPO.

    The coefficients are those of ``gigpo``, with ``weight`` its omega. Steps are compared with
    those that have the label ``among``, "state" or "step"; without it every state counts as seen
    once. A step that earned fewer than ``matched`` points stands alone in the returns.
    """

    def each(one: Callable[..., Array], *arrays: Array) -> Array:
        return jax.vmap(jax.vmap(one))(*arrays)

    def against(values: Array, seg: Segments) -> Array:
        if not normalise:
            return segments.centred(values, seg)
        return segments.standard_scores(values, seg, eps, ddof)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps, values = trained(batch), step_ids(batch), paid_rewards(values, batch)
        rewards = jnp.where(live, token_rewards(values, batch), 0)
        score = values if values.ndim == 2 else rewards.sum(axis=2)
        starts = each(step_starts, steps, live)  # a step counts once, however long it is
        groups = jnp.arange(live.shape[0])[:, None, None]
        if cross_steps:
            gain = against(per_token(score, batch), segments.segments(starts, groups))
            episode = each(at_step_start, gain, steps, live)
        else:
            compare = partial(group_mean_std, eps=eps, ddof=ddof) if normalise else mean_centred
            episode = per_token(jax.vmap(compare)(score, batch.members), batch)
        if among not in batch.ids:
            return episode, batch

        joined = jnp.ones_like(live)
        if matched is not None:
            joined = segments.total(rewards, segments.steps(batch)) >= matched
        one = partial(_discounted, discount=discount)
        returns = each(one, rewards, steps, live, joined)
        gain = against(returns, segments.segments(starts, groups, batch.ids[among]))
        return episode + weight * each(at_step_start, gain, steps, live), batch

    return stateless(apply)


@variant(grpo)
def gigpo(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    omega: NonNegative = 1.0,
    discount: Fraction = 0.95,
    normalise: Flag = True,
    cross_steps: Flag = False,
) -> Method:
    """GRPO over episodes, plus each step against the group's other steps from the same state.

    "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv:2505.10978):

        A = A_E + omega A_S
        A_E = (R - mean(R)) / F over the episodes of the group
        A_S = (R_t - mean(R_t)) / F over the steps that the group took in the same state,
              R_t = sum over k >= t of discount^(k - t) r_k; 0 for a state seen once

    F is the deviation, or 1 without ``normalise``. Steps are ``ids["step"]``, states
    ``ids["state"]``. In A_E the paper counts an episode once; the released code counts it once for
    each of its steps, which is ``cross_steps`` (a group of one step there has A_E = R, here 0).
    Departures: the loss is the mean over each episode's tokens; a score for the whole episode
    stands at its last step; the KL term is off. On completions of one turn, which record neither
    steps nor states, it is GRPO.
    """
    return base.with_(
        advantage=group_in_group(omega, discount, eps, ddof, normalise, cross_steps=cross_steps)
    )


@variant(gigpo, discount=0.5)
def ui_s1(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    omega: NonNegative,
    discount: Fraction,
    normalise: Flag,
    cross_steps: Flag,
    matched: NonNegative = 1.0,
) -> Method:
    """GRPO over episodes along an expert's trajectory, plus each step against the same step's.

    Semi-online RL of "UI-S1: Advancing GUI Automation via Semi-online Reinforcement Learning"
    (arXiv:2509.11543): where an action is not the expert's, the expert's is put in its place, and
    the episode continues:

        A = A_E + omega A_S
        A_E = (R - mean(R)) / std(R) over the episodes of the group
        A_S = (R_t - mean(R_t)) / std(R_t) over the group's steps of number t
        R_t = r_t + discount R_(t+1) while steps t and t + 1 are the expert's, else r_t

    A step is the expert's when it earned ``matched`` points (``zoo.envs.players.expert_env`` pays
    1). omega, the discount and the deviations are those of the released scripts, which also charge
    1e-4 of k3 (``kl_coef``); their code has ``cross_steps``. Departures: the expert's action
    reaches the policy as the environment's answer, where the paper rewrites the policy's own turn.
    """
    return base.with_(
        advantage=group_in_group(
            omega, discount, eps, ddof, normalise, "step", matched, cross_steps
        )
    )


def turn_returns(discount: float, normalise: bool) -> Transform:
    """The return of each token's step over the step's tokens, from rewards by turn, [N, G, T].

    With ``normalise`` the greatest return of a completion, without sign, is 1.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = trained(batch), step_ids(batch)
        rewards = rewards_by_token(values, batch)
        one = partial(step_returns, discount=discount)
        returns = jax.vmap(jax.vmap(one))(rewards, steps, live)
        if normalise:
            most = jnp.max(jnp.abs(returns), axis=2, keepdims=True)
            returns = returns / jnp.where(most == 0, 1, most)
        return returns / jnp.maximum(segments.count(segments.steps(batch)), 1), batch

    return stateless(apply)


@variant(reinforce, without=("baseline",))
def epo_strategy(base: Method, discount: Fraction = 0.99, normalise: Flag = True) -> Method:
    """REINFORCE on turns: each turn's mean log-probability, weighted by what followed it.

    "EPO: Explicit Policy Optimization for Strategic Reasoning in LLMs via Reinforcement Learning"
    (arXiv:2502.12486), a turn a_t being the strategy that another model acts on:

        R_t = sum over k >= t of discount^(k - t) r_k,  A_t = R_t / max_k |R_k|
        loss = -mean over episodes of sum_t A_t 1/|a_t| sum_i log pi(a_t,i | history)

    Turns are ``ids["step"]``, r_k what the environment paid for a turn, process and outcome alike.
    ``zoo.envs.players.guided_env`` has the other model act. The discount and the division by an
    episode's greatest return (``normalise``) are those of the released code. Departures: the paper
    also trains by self-play of two strategists; ``guided_env`` has one, and the other model stays
    as it is.
    """
    advantage = turn_returns(discount, normalise)
    return base.with_(advantage=advantage, lacks="self-play of two strategists")


# ---------------------------------------------------------------- episodes of several rows


def per_episode(inner: Transform) -> Transform:
    """A group transform with the rows of one episode as one member.

    Rows of a group belong together where ``ids["episode"]`` is equal. The episode's score is the
    sum over its rows, and all of them get its advantage; an episode of which a limit ended a row is
    not trained on.

    Args:
      inner: [N, G] -> [N, G].
    """

    def apply(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(values, 2)
        n, g = values.shape
        column = jnp.broadcast_to(jnp.arange(g)[None], (n, g))
        label = batch.ids.get("episode", column)
        seg = segments.segments(batch.members, jnp.arange(n)[:, None], label)
        first = batch.members & (segments.minimum(column * 1.0, seg) == column)
        step_totals = jnp.where(first, segments.total(values, seg), 0)
        shared, _, state = inner.apply(step_totals, batch.replace(members=first), state)
        shared = segments.total(jnp.where(first, shared, 0), seg)
        over = segments.total(batch.truncated * 1.0, seg) > 0
        return shared, batch.replace(mask=batch.mask & ~jnp.expand_dims(over, 2)), state

    return inner._replace(apply=apply)


@variant(grpo)
def supo(base: Method) -> Method:
    """GRPO over episodes that continue from their own summaries: the rows share one advantage.

    "Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management"
    (arXiv:2510.06727): where the context is full the policy writes a summary, and continues
    from prompt and summary (``data.contexts``, with an environment on the host):

        A_i = (r_i - mean(r)) / std(r) over the group's episodes, at every token that was drawn in
              any context of episode i, summaries included
        loss = mean over tokens of the clipped loss of GRPO

    and episodes that reached a limit unfinished are left out of the loss. The contexts of an
    episode lie in one row; where it was recorded as several, these have one ``ids["episode"]``.
    Departure: the answer for which there was no room is not lost, but follows the summary. Not
    known: how the paper weighs tokens of long and short contexts (here all alike), and whether the
    statistics count unfinished episodes (here they do).
    """
    advantage = per_episode(base.objective.advantage)
    return base.with_(
        advantage=advantage,
        aggregate=token_mean,
    )


# ---------------------------------------------------------------- strata


def stratified(group_transform: Transform, blend: float, eps: float, ddof: int) -> Transform:
    """``blend`` of the scores normalised inside strata, the rest from a group transform.

    Strata are the labels ``batch.ids["stratum"]`` ([N, G]); where nobody recorded any, a group is
    one stratum. A completion alone in its stratum has 0 for the first part.
    """

    def apply(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(values, 2)
        row = jnp.arange(values.shape[0])[:, None]
        stratum = batch.ids.get("stratum", jnp.zeros(values.shape, jnp.int32))
        strata = segments.segments(batch.members, row, stratum)
        local = segments.standard_scores(values, strata, eps, ddof)
        values, batch, state = group_transform.apply(values, batch, state)
        return blend * local + (1 - blend) * values, batch, state

    return group_transform._replace(apply=apply)


@variant(grpo)
def stratified_grpo(base: Method, eps: Positive, ddof: Ddof, blend: Fraction = 0.6) -> Method:
    """Completions compared with those of their group that have the same structure.

    "Stratified GRPO: Handling Structural Heterogeneity in Reinforcement Learning of LLM Search
    Agents" (arXiv:2510.06214):

        A_san = (r - mean of the stratum) / (its deviation + eps)
        A = alpha A_san + (1 - alpha) (r - mean of the group) / (its deviation + eps)

    A stratum holds the completions of a prompt with, say, one number of search calls: the label
    "stratum", in environments the number of turns; without it a group is one stratum. alpha
    (``blend``) is that of the paper's runs on a 3B base model.
    """
    return base.with_(advantage=stratified(base.objective.advantage, blend, eps, ddof))


# ---------------------------------------------------------------- turns


def normalised_turns(discount: float, eps: float, ddof: int) -> Transform:
    """Rewards of turns, normalised over all turns of a group, then summed from each turn on.

    Args:
      discount: of a turn, in [0, 1].
      eps: added to the deviation.
      ddof: of the deviation.

    Returns:
      A transform to [N, G, T]: the tokens of a turn have the same advantage; see ``igpo``.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = trained(batch), step_ids(batch)
        rewards = rewards_by_token(values, batch)
        starts = jax.vmap(jax.vmap(step_starts))(steps, live)  # a turn counts once
        earned = segments.total(rewards, segments.steps(batch))
        turns = segments.segments(starts, jnp.arange(live.shape[0])[:, None, None])
        each = segments.standard_scores(earned, turns, eps, ddof)
        back = partial(step_returns, discount=discount)
        return jax.vmap(jax.vmap(back))(each, steps, live), batch

    return stateless(apply)


@variant(grpo)
def igpo(base: Method, eps: Positive, ddof: Ddof, discount: Fraction = 1.0) -> Method:
    """GRPO over turns that are paid for what they tell of the answer.

    "Information Gain-based Policy Optimization: A Simple and Effective Approach for Multi-Turn LLM
    Agents" (arXiv:2510.14967): with p_t the policy's probability of the reference answer,
    teacher-forced behind turn t, exp of the mean log-probability of its tokens,

        r_t = p_t - p_(t-1) for each turn before the last, the outcome for the last
        A_t = (r_t - mean(r)) / std(r) over all turns of the group's episodes
        A~_t = sum over k >= t of discount^(k - t) A_k, at every token of turn t

    The gains are a reward part: ``[rewards.gain] function = "likelihood"`` with ``by = "turn"``
    (``configs/intrinsic.toml`` shows signals without turns, docs/reward-recipes.md this one).
    Departures: the released code centres the sums from each token on over the group, and has no
    deviation; the loss is the mean over each episode's tokens; the KL term is off.
    """
    return base.with_(advantage=normalised_turns(discount, eps, ddof))
