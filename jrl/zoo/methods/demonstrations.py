"""External completions, alone or with the policy's own: imitate, prefer, or reinforce.

Demonstrations are the group's last members; the statistic "external" is 1 on their tokens. All
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, Needs, Schedule, entropy_term, normalised
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    Choice,
    Count,
    Ddof,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Tokens,
    check_band,
)
from jrl.methods.edit import of_parts
from jrl.methods.group_relative import dr_grpo, grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.methods.preference import dpo, pair_method
from jrl.methods.ratios import CLIPS
from jrl.methods.schedule import refreshed
from jrl.objectives import aggregates, comparisons, pairs, ratios
from jrl.objectives.advantages import live_mean
from jrl.objectives.kl import bounded_exp
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Objective, Rollout, Statistic, Stats, Surrogate, Transform

OutsideLoss = Callable[[Stats, Array], Array]
"""(stats, advantages [T]) -> losses [T] of one demonstration."""


def beside(inner: Surrogate, loss: OutsideLoss, needs: frozenset[str] = frozenset()) -> Surrogate:
    """A surrogate with another loss on demonstrations, which have no sampler.

    Args:
      inner: over sequences, for the policy's own tokens; it is shown a ratio of 1 on external ones.
      loss: of the external tokens.
      needs: names of the statistics that ``loss`` reads.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        external = stats["external"] > 0
        policy_stats = {name: stats[name] for name in inner.needs | inner.labels | {"logprobs"}}
        for name in policy_stats.keys() & {"sampler_logprobs", "proximal_logprobs"}:
            current = jax.lax.stop_gradient(stats["logprobs"])
            policy_stats[name] = jnp.where(external, current, policy_stats[name])
        losses, metrics = inner.apply(policy_stats, advantages, mask & ~external)
        return jnp.where(external, loss(stats, advantages), losses), metrics

    needs = inner.needs | needs | {"external"}
    return Surrogate(apply, needs, statistics=inner.statistics, labels=inner.labels)


def imitated(stats: Stats, advantages: Array) -> Array:
    """-A log pi, with the demonstration's advantage A from a transform."""
    return -advantages * stats["logprobs"]


def with_entropy(base: Method, coef: float) -> Method:
    """The method with a bonus for the mean entropy of the trained tokens."""
    return base.plus(*(t._replace(aggregate=aggregates.token_mean) for t in entropy_term(coef)))


# ---------------------------------------------------------------- imitation beside GRPO


def _mixed(
    values: Array, own_weight: Array, imitate: Array, demonstrated: Array, batch: Batch
) -> Array:
    """[N, G]: own advantages and imitation weights, each over its kind's share of the sequences.

    With ``sequence_mean`` each kind's loss is then the mean over its own sequences.
    """
    live = trained(batch).any(axis=2)
    count = live.sum(dtype=jnp.float32)
    copies = (live & demonstrated).sum(dtype=jnp.float32)
    return jnp.where(
        demonstrated,
        imitate * count / jnp.maximum(copies, 1),
        own_weight * count / jnp.maximum(count - copies, 1) * values,
    )


def imitate_unsolved(inner: Transform, right: float = 0.0, coef: float = 1.0) -> Transform:
    """Own samples get ``inner``'s advantages; demonstrations of unsolved prompts are imitated.

    Other demonstrations, also those of prompts without an own sample, leave ``batch.members``.
    """
    of_own = comparisons.own_only(inner)

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(scores, 2)
        demonstrated = comparisons.demonstrations(batch)
        sampled = batch.members & ~demonstrated
        best = jnp.max(scores, axis=1, where=sampled, initial=-jnp.inf)
        unsolved = sampled.any(axis=1) & ~(best > right)
        values, _, state = of_own.apply(scores, batch, state)
        batch = batch.replace(members=sampled | (batch.members & demonstrated & unsolved[:, None]))
        return _mixed(values, jnp.float32(1), jnp.float32(coef), demonstrated, batch), batch, state

    return of_own._replace(apply=apply)


@variant(grpo)
def relift(base: Method, right: NonNegative = 0.0, sft_coef: NonNegative = 1.0) -> Method:
    """GRPO, and supervised learning from the demonstrations of prompts that no sample solves.

    "Learning What Reinforcement Learning Can't: Interleaved Online Fine-Tuning for Hardest
    Questions" (arXiv:2506.07527), ReLIFT. With A the own samples' normalised rewards:

        loss = GRPO's over own samples
               + c * mean over demonstrations y of unsolved prompts of -1/|y| sum_t log pi_t

    A prompt is unsolved when none of its samples scores above ``right``. Departures: the paper
    gathers unsolved prompts in a buffer and takes a supervised step of its own, with an optimiser
    of its own, once it holds 128 (the prompts of a batch); here they are learned from in the step
    that found them, with c = ``sft_coef``. The released runs' RL is Dr. GRPO without a clip (no
    deviation, sums over tokens / 8192) with an entropy bonus of 0.001, and their supervised loss
    a mean over tokens. A demonstration is given for every prompt and read only where needed.
    """
    return base.with_(
        advantage=imitate_unsolved(base.objective.advantage, right, sft_coef),
        surrogate=beside(base.objective.surrogate, imitated),
        plan=Plan(demonstrated(1)),
    )


class Balance(NamedTuple):
    """The numbers of ``amft``'s rule for mu, under its coefficients' names."""

    initial: float = 0.8
    rate: float = 1e-4
    entropy_rate: float = 5e-4
    target_entropy: float | None = None
    low: float = 0.05
    high: float = 0.95


class BalanceState(NamedTuple):
    """State of the controller: mu, its last change, the last U, the target and the step count.

    All are [] float32.
    """

    mu: Array
    change: Array
    utility: Array
    target: Array
    steps: Array


_LEAST_CHANGE = 0.01
"""Moves of mu below this count less than in proportion: the slope is then mostly noise."""


def balanced(inner: Transform, controller: Balance) -> Transform:
    """(1 - mu) times own samples' advantages, mu times imitation of demonstrations.

    Before each step, with U the mean score of the own samples and H their mean entropy,

        mu <- clip(mu + rate * slope + entropy_rate * (target - H), low, high)
        slope = dU dmu / (dmu^2 + 0.01^2)

    of the last step's changes dU and dmu: the secant of the utility as a function of mu.
    """
    of_own = comparisons.own_only(inner)

    def init() -> BalanceState:
        mu, zero = jnp.float32(controller.initial), jnp.float32(0)
        return BalanceState(mu, zero, zero, jnp.float32(controller.target_entropy or 0), zero)

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(scores, 2)
        demonstrated = comparisons.demonstrations(batch)
        state = _steer(controller, state, scores, batch.members & ~demonstrated, batch)
        values, _, _ = of_own.apply(scores, batch, inner.init())
        return _mixed(values, 1 - state.mu, state.mu, demonstrated, batch), batch, state

    return Transform(init, apply, of_own.needs | {"rollout_entropy"})


def _steer(
    controller: Balance, state: BalanceState, scores: Array, sampled: Array, batch: Batch
) -> BalanceState:
    tokens = trained(batch) & jnp.expand_dims(sampled, 2)
    entropy = live_mean(batch.stats["rollout_entropy"], tokens)
    utility = live_mean(scores, sampled)
    first = state.steps == 0
    target = state.target
    if controller.target_entropy is None:
        target = jnp.where(first, entropy, target)
    gain = jnp.where(first, 0, utility - state.utility)
    slope = gain * state.change / (jnp.square(state.change) + _LEAST_CHANGE**2)
    move = controller.rate * slope + controller.entropy_rate * (target - entropy)
    mu = jnp.clip(state.mu + move, controller.low, controller.high)
    return BalanceState(mu, mu - state.mu, utility, target, state.steps + 1)


@variant(grpo)
def amft(
    base: Method,
    initial: Fraction = 0.8,
    rate: NonNegative = 1e-4,
    entropy_rate: NonNegative = 5e-4,
    target_entropy: NonNegative | None = None,
    low: Fraction = 0.05,
    high: Fraction = 0.95,
) -> Method:
    """RL on own samples and SFT on demonstrations in one loss, their balance learned on the way.

    "AMFT: Aligning LLM Reasoners by Meta-Learning the Optimal Imitation-Exploration Balance"
    (arXiv:2508.06944, withdrawn by its authors):

        loss = (1 - mu) L_RL + mu L_SFT
        mu  <- clip(mu + rate * dU/dmu + entropy_rate * (target - H), low, high)

    with U the utility, H the policy's mean entropy at its own samples and ``target`` that of the
    first step unless given (there: at the demonstrations, after the warm-up). Rates, start and
    bounds are those of the released configurations; that code is a sketch, whose rollouts are
    placeholders. Departures: dU/dmu is the secant of the mean reward over the last two steps
    (``balanced``) where the paper differentiates a held-out loss through one optimiser step, for
    which an objective would have to see parameters; L_RL is GRPO's, where the released code has PPO
    with a value network; the supervised warm-up is a run of ``sft`` before this one.
    """
    check_band(low=low, high=high)
    controller = Balance(initial, rate, entropy_rate, target_entropy, low, high)
    return base.with_(
        advantage=balanced(base.objective.advantage, controller),
        surrogate=beside(base.objective.surrogate, imitated),
        plan=Plan(demonstrated(1)),
        lacks="a meta-gradient through the optimiser step on held-out problems",
    )


# ---------------------------------------------------------------- demonstrations in the group


def against_own(normalise: bool, eps: float, ddof: int) -> Transform:
    """Scores minus the mean of the policy's own members, with ``normalise`` over their deviation.

    As in the released code of RL-PLUS, equal own scores leave a demonstration's difference
    unscaled. Groups with fewer than two own members get 0.
    """

    def one(rewards: Array, members: Array, sampled: Array) -> Array:
        count = sampled.sum()
        lowest = jnp.min(rewards, where=sampled, initial=jnp.inf)
        shifted = jnp.where(members, rewards - jnp.where(jnp.isposinf(lowest), 0, lowest), 0)
        mean = jnp.where(sampled, shifted, 0).sum() / jnp.maximum(count, 1)
        centred = jnp.where(members & (count > 1), shifted - mean, 0 * shifted)
        if not normalise:
            return centred
        squares = jnp.where(sampled, jnp.square(centred), 0).sum()
        deviation = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
        return centred / (jnp.where(deviation == 0, 1, deviation) + eps)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        sampled = batch.members & ~comparisons.demonstrations(batch)
        return jax.vmap(one)(values, batch.members, sampled), batch

    return stateless(apply, frozenset({"external"}))


def uniform_probability(everything: bool) -> Statistic:
    """One over the size of the vocabulary, or 1, at every token; named "uniform_probability"."""

    def apply(distributions: Stats, token: Array) -> Array:
        return jnp.float32(1 if everything else 1 / distributions["policy"].shape[-1])

    return Statistic("uniform_probability", apply, start=True)


@variant(dr_grpo)
def rl_plus(
    base: Method,
    demonstrations: Count = 1,
    focus: NonNegative = 0.5,
    outside: Annotated[str, Choice(("uniform", "one"))] = "uniform",
    pool: Annotated[str, Choice(("group", "own"))] = "group",
    normalise: Flag = False,
    clipped: Flag = False,
    eps: Positive = 1e-6,
    ddof: Ddof = 1,
    entropy_coef: NonNegative = 0.001,
) -> Method:
    """Dr. GRPO with demonstrations, weighted by a mixture ratio and by how new they are.

    "RL-PLUS: Countering Capability Boundary Collapse of LLMs in Reinforcement Learning with
    Hybrid-policy Optimization" (arXiv:2508.00222). On the policy's own completions -rho_t A_i, with
    A_i = r_i - mean(r) over the group, demonstrations included; on a token of a demonstration

        omega = pi_old / 2 + 1 / (2 V)
        loss_t = -2 pi / (omega + pi_old) A_i (1 - sg(pi))^gamma

    with V the size of the vocabulary, the uniform distribution standing in for whoever wrote it;
    tokens are summed, over ``max_tokens``. As in the released run there is no clip (``clipped``
    brings GRPO's, with its bounds), no deviation (``normalise``: that of ``pool``, with ``eps`` and
    ``ddof``), gamma (``focus``) is 0.5, and the bonus for entropy 0.001; ``outside="one"`` takes
    its 1 in place of the paper's 1 / V. ``pool="own"`` compares with the policy's own completions
    alone.
    """

    def mixture(stats: Stats, advantages: Array) -> Array:
        ratio_now, ratio_start = (
            bounded_exp(stats["logprobs"]),
            bounded_exp(stats["proximal_logprobs"]),
        )
        ratio = 2 * ratio_now / (1.5 * ratio_start + stats["uniform_probability"] / 2)
        rarity = jnp.maximum(1 - jax.lax.stop_gradient(ratio_now), 0) ** focus
        return -ratio * rarity * advantages

    uniform = uniform_probability(outside == "one")
    if pool == "own" or normalise:
        advantage = against_own(normalise, eps, ddof)
        if pool == "group":
            advantage = normalised(eps, ddof)
        base = base.with_(advantage=advantage)
    if not clipped:
        base = base.with_(rule=ratios.free)
    objective = base.objective
    reads = frozenset({"proximal_logprobs", "uniform_probability"})
    base = base.with_(
        advantage=objective.advantage._replace(statistics=(uniform,)),
        surrogate=beside(objective.surrogate, mixture, reads),
        plan=Plan(demonstrated(demonstrations)),
    )
    return with_entropy(base, entropy_coef)


@variant(dr_grpo, without=CLIPS)
def critique_grpo(
    base: Method,
    refinements: Tokens = 0,
    gamma: Positive = 0.1,
    entropy_coef: NonNegative = 0.001,
) -> Method:
    """The group's own answers and refined ones together, the refined ones shaped to be learnt.

    "Critique-GRPO: Advancing LLM Reasoning with Natural Language and Numerical Feedback"
    (arXiv:2506.03106). The group holds first answers and answers refined with the help of a
    critique, both scored under the plain prompt, and A_i = r_i - mean(r) over both:

        loss = -1/G sum_i A_i sum_t w_t / max_tokens
        w_t = rho_t for a first answer,   pi_t / (pi_t + gamma) for a refined one

    without clipping or KL, and with the released code's bonus for entropy. Refined answers are the
    last ``refinements`` members, taken from the data's solutions until the sampler can refine; in
    the released runs a group is seven own answers and one refined, the first right one (or else the
    best) of the refinements of all eight.

    Departures: completions without a trained token are not counted in G; the released trainer
    divides by the deviation unless a key is set that its script does not set.
    """

    def shaped(stats: Stats, advantages: Array) -> Array:
        chance = bounded_exp(stats["logprobs"])
        return -advantages * chance / (chance + gamma)

    free = base.with_(rule=ratios.free)
    base = free.with_(
        surrogate=beside(free.objective.surrogate, shaped),
        plan=Plan(demonstrated(refinements)),
        lacks="a critique of each answer and a second pass that refines it",
    )
    return with_entropy(base, entropy_coef)


# ---------------------------------------------------------------- expert iteration


def _refusals(depth: float, slope: float) -> Callable[[Array, Rollout], Array]:
    """The reward parts of Auto-CEI: right 1, wrong -1, a refusal by the depth of its reasoning."""

    def rewards(parts: Array, rollout: Rollout) -> Array:
        right = parts[..., 0]
        scored = jnp.where(jnp.isnan(right), right, jnp.where(right > 0, 1.0, -1.0))
        if parts.shape[-1] > 1:
            steps = parts[..., 2] if parts.shape[-1] > 2 else jnp.asarray(rollout.mask).sum(-1)
            abstention = jnp.tanh(slope * (steps - depth) / 2)  # 2 / (1 + exp(-x)) - 1
            scored = jnp.where(parts[..., 1] > 0, abstention, scored)
        return jnp.zeros_like(parts).at[..., 0].set(scored)

    return rewards


def expert_weights(temperature: float) -> Transform:
    """Expected number of occurrences of a sample among its group and as many further samples.

    A draw's probability is in proportion to exp(score / temperature), the temperature in points.

    Returns:
      A transform [N, G] -> [N, G]: n times the softmax of the n live members, plus 1, and 0 where
      the score is -1 or less; scaled so that the mean over the batch's samples is 1. A member
      without a trained token is not counted.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = comparisons.comparable(batch)
        shares = jax.nn.softmax(scores / temperature, axis=1, where=live)
        weights = shares * live.sum(axis=1, keepdims=True) + 1
        # Stated as what is left out: a NaN score stays in, and shows.
        weights = jnp.where(live & ~(scores <= -1), weights, 0)
        total = weights.sum()
        return weights * live.sum() / jnp.where(total == 0, 1, total), batch

    return stateless(apply)


@published
def auto_cei(
    temperature: Positive = 0.6, depth: NonNegative = 13.0, slope: Positive = 0.4
) -> Method:
    """Expert iteration that rewards "I don't know" more after longer reasoning.

    "Automatic Curriculum Expert Iteration for Reliable LLM Reasoning" (arXiv:2410.07627). Rewards
    are 1 for a right answer, -1 for a wrong one and for a refusal after d reasoning steps

        2 / (1 + exp(-c2 (d - c1))) - 1,        c1 = ``depth``, c2 = ``slope``

    SFT learns from all samples and, beside them, as many drawn with p in proportion to
    exp(reward / T), less the wrong ones:

        loss = sum_i w_i * -1/|y_i| sum_t log pi_t / sum_i w_i,    w_i = (G p_i + 1) [r_i > -1]

    The first reward part is the answer's correctness; a second marks refusals; a third is d, where
    there is none the completion's length in tokens. Give the parts weight 1. Defaults are the
    released code's, where T is the initial model's precision, c2 = ln(10) / (4 deviations of d) and
    c1 starts at the mean d of refusals; its search maximises 0.8 precision + 0.2 (1 - refusal
    rate). Departures: the expectation of the resampling, in place of a draw; each iteration there
    starts from the instruct model again.
    """
    return Method(
        Objective(expert_weights(temperature), ratios.reinforce(), aggregates.sequence_mean),
        rewards=of_parts(_refusals(depth, slope)),
        needs=Needs(
            1,
            "a reward function that finds refusals and counts reasoning steps; the search "
            "over depth, an outer loop that moves it while precision and refusal rate on held-out "
            "problems improve",
        ),
    )


# ---------------------------------------------------------------- pairs


@published
def redi(alpha: NonNegative = 0.8, gamma: NonNegative = 0.0) -> Method:
    """Right traces of a teacher are made likelier, wrong ones less so, with unequal weights.

    "Harnessing Negative Signals: Reinforcement Distillation from Teacher Data for LLM Reasoning"
    (arXiv:2505.24850), its second stage, without a reference policy:

        loss = mean over pairs of -1/|y_w| log pi(y_w) + alpha/|y_l| log pi(y_l)

    ``gamma`` above 0 also multiplies the second term by exp(gamma * its mean log-probability), as a
    constant. The first stage is a run of ``sft`` on the right traces. Departures: none; on the
    policy's own samples the pair is the best and the worst by reward.
    """

    def loss(chosen: pairs.Side, rejected: pairs.Side) -> Array:
        unlikely = jnp.exp(gamma * jax.lax.stop_gradient(jnp.minimum(rejected.mean, 0)))
        return -chosen.mean + alpha * unlikely * rejected.mean

    return pair_method(loss, lambda side: side.mean, needs=())


def demonstrations_first() -> Transform:
    """The score is 1 for a demonstration and 0 for a draw of the policy: self-play's preference."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        return comparisons.demonstrations(batch).astype(jnp.float32), batch

    return stateless(apply, frozenset({"external"}))


@variant(dpo, without=("refresh_ref",))
def spin(base: Method, iteration: Count = 100) -> Method:
    """The data's completion is preferred to the policy's own, whose last iterate is the reference.

    "Self-Play Fine-Tuning Converts Weak Language Models to Strong Language Models"
    (arXiv:2401.01335), with y the demonstration, y' ~ pi_t and l(z) = log(1 + exp(-z)):

        loss = mean l(lambda log(pi(y) / pi_t(y)) - lambda log(pi(y') / pi_t(y')))

    lambda is ``beta``; pi_t is replaced by the policy every ``iteration`` steps, and the optimiser
    starts anew. Departures: y' is drawn from the policy of the step and not from pi_t; of several
    own samples one takes part, at random.
    """
    return base.before(demonstrations_first()).with_(
        plan=Plan(demonstrated(1)),
        schedule=Schedule(after=refreshed(iteration, moments=True)),
        group=1,
    )


def stronger_first(filtered: bool) -> Transform:
    """The score is 1 for the policy's own sample and 0 for a given one.

    Args:
      filtered: True to leave out own samples whose reward is no more than the best given one's.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        demonstrated = comparisons.demonstrations(batch)
        weak = batch.members & demonstrated
        bar = jnp.max(scores, axis=1, where=weak, initial=-jnp.inf, keepdims=True)
        # Written so that a NaN reward is kept, and makes the loss NaN.
        members = batch.members & (demonstrated | ~(filtered & (scores <= bar)))
        values = jnp.where(
            jnp.isnan(scores) & filtered, scores, (~demonstrated).astype(scores.dtype)
        )
        return values, batch.replace(members=members)

    return stateless(apply, frozenset({"external"}))


@variant(dpo, without=("refresh_ref",))
def self_reinforcement(base: Method, filtered: Flag = True, iteration: Count = 100) -> Method:
    """The fine-tuned policy's own answers are preferred to those of the model before fine-tuning.

    "Optimizing Language Model's Reasoning Abilities with Weak Supervision" (arXiv:2405.04086). On
    questions without answers, y+ ~ the fine-tuned policy, y- ~ the model it was tuned from:

        loss = mean -log sigmoid(beta log(pi(y+) / pi_ref(y+)) - beta log(pi(y-) / pi_ref(y-)))

    The weaker model's answers are the data's solutions. ``filtered`` keeps pairs in which the own
    answer has the higher reward: the paper's filter, in which the policy judges both answers by
    relevance and coherence, has to be given as a reward function. The next iteration's reference is
    the policy, every ``iteration`` steps; the first stage is a run of ``sft`` on the labelled seed.
    Departures: of several own answers one takes part, at random. Not known (no code was released):
    what the filter compares, ``beta`` and the length of an iteration.
    """
    return base.before(stronger_first(filtered)).with_(
        plan=Plan(demonstrated(1)),
        schedule=Schedule(after=refreshed(iteration)),
        group=1,
        lacks="answers of the weaker model drawn in the run itself; a reward function in "
        "which the policy judges its own answers",
    )
