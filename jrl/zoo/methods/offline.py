"""Learning from episodes that anybody drew: imitation, values of tokens, critics of steps.

The heads of values are those of ``zoo.networks.token_values``; "base" is the policy without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, Schedule
from jrl.methods.definition import published, variant
from jrl.methods.domains import Count, Fraction, NonNegative, Positive, Whole, check_band, is_zero
from jrl.methods.plan import Plan
from jrl.methods.replays import replay_share
from jrl.methods.schedule import refreshed
from jrl.methods.supervised import sft
from jrl.objectives import advantages, aggregates, ratios, segments, transforms
from jrl.objectives.members import first_token
from jrl.objectives.regularizers import term
from jrl.types import Array, Batch, Objective, Regularizer, Statistic, Stats, Surrogate, Transform
from jrl.zoo.methods.rounds import written_problems
from jrl.zoo.methods.supervised import best_of_batch
from jrl.zoo.networks.token_values import TokenValues, towards

# What a network with token values shows of ONE token, by name, and the token -> a number.


def _of_head(outputs: dict[str, Array], token: Array, head: int) -> Array:
    return outputs["q"][head, token]


def _target(outputs: dict[str, Array], token: Array) -> Array:
    return outputs["q_target"][token]


def _state(outputs: dict[str, Array], token: Array) -> Array:
    return outputs["v"]


def _unlikely(outputs: dict[str, Array], token: Array) -> Array:
    """Minus the log-probability of the token if values were logits, summed over heads."""
    return -jax.nn.log_softmax(outputs["q"])[:, token].sum()


def _surprise(outputs: dict[str, Array], token: Array) -> Array:
    return -jax.nn.log_softmax(outputs["base"])[token]


def _read(heads: int) -> tuple[Statistic, ...]:
    of_each = [Statistic(f"q_{i}", partial(_of_head, head=i)) for i in range(heads)]
    return (*of_each, Statistic("q_unlikely", _unlikely), Statistic("base_surprise", _surprise))


def _values_learner(
    loss: Callable[[Stats, Array, Array], tuple[Array, Stats]],
    points: Callable[[Array, Array], Array],
    statistics: tuple[Statistic, ...],
    network: TokenValues,
    follow: float,
    epochs: int,
) -> Method:
    """A method whose loss reads rewards by token, ``points`` of (rewards [T], mask [T])."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        rewards = transforms.rewards_by_token(scores, batch)
        return jax.vmap(jax.vmap(points))(rewards, transforms.trained(batch)), batch

    advantage: Transform = transforms.stateless(apply)
    surrogate = Surrogate(loss, frozenset(each.name for each in statistics), statistics=statistics)
    return Method(
        Objective(advantage, surrogate, aggregates.token_mean),
        schedule=Schedule(epochs, (towards("q_target", "q", follow),)),
        network=network,
    )


@variant(sft)
def filtered_bc(base: Method, keep: Fraction = 0.1) -> Method:
    """Maximum likelihood of the episodes whose returns are the batch's best.

    The filtered behaviour cloning of "LMRL Gym: Benchmarks for Multi-Turn Reinforcement Learning
    with Language Models" (arXiv:2311.18232):

        loss = -mean over the drawn tokens of the kept episodes of log pi_t

    ``keep`` is the released code's of ``digirl``, which has it as a baseline too. Where
    ``data.train`` names dialogues or recorded sessions it clones a data set, as the paper does;
    else, a departure, the policy's own episodes of this step. Departures: the best are those of
    each batch, and not of the whole data set.
    """
    return base.with_(plan=Plan(), advantage=best_of_batch(keep), surrogate=ratios.reinforce())


@published
def ilql(
    beta: NonNegative = 16.0,
    tau: Fraction = 0.7,
    discount: Fraction = 0.99,
    cql_coef: NonNegative = 0.01,
    sft_coef: NonNegative = 1.0,
    follow: Fraction = 0.005,
    epochs: Count = 1,
) -> Method:
    """Values of tokens, learned from episodes that anybody drew, lean the policy.

    "Offline RL for Natural Language Generation with Implicit Language Q Learning"
    (arXiv:2206.11871), which "Zero-Shot Goal-Directed Dialogue via RL on Imagined Conversations"
    (arXiv:2311.05584) and LMRL Gym (see ``filtered_bc``) use. A token that was drawn is an action,
    and the next state is the one before the next such token, so that replies of an environment cost
    no discount:

        Q' = min_i Q'_i(s, a),   y = r + gamma V(s')
        loss = mean over tokens of  1/2 sum_i (Q_i(s, a) - y)^2
                                  + 1/2 |tau - 1(Q' < V(s))| (Q' - V(s))^2
                                  - alpha sum_i log softmax(Q_i(s, .))_a  -  log pi_base(a | s)
        policy ~ pi_base exp(beta min_i Q'_i)

    with y and Q' constants, targets Q'_i that go ``follow`` of the way to Q_i after an update, and
    V 0 after the last token. Beta, gamma, tau and ``follow`` are the released runs' on Wordle,
    alpha (``cql_coef``) is LMRL Gym's. Episodes are recorded sessions (``data.train =
    "recorded:DIR"``), dialogues ("dialogues:FILE", such as those that ``jrl imagine`` writes for
    the second paper) or the run's own. Departures: base and values share a trunk, which the
    released code leaves to choose, so that the last term (``sft_coef``) is learned along; LMRL Gym
    clones the data first, and keeps that policy. V is 0 after the last token also where a
    completion was cut, as what it earned is known then; LMRL Gym takes V of the state behind it
    where the environment was not done. Of the targets only the heads follow; there the whole model
    does.
    """

    def loss(stats: Stats, rewards: Array, mask: Array) -> tuple[Array, Stats]:
        value = stats["state_value"]
        _, aim = advantages.gae(rewards, jax.lax.stop_gradient(value), mask, discount, 0.0)
        of_q = (jnp.square(stats["q_0"] - aim) + jnp.square(stats["q_1"] - aim)) / 2
        error = stats["q_target"] - value
        of_v = jnp.abs(tau - (error < 0)) * jnp.square(error) / 2
        rest = cql_coef * stats["q_unlikely"] + sft_coef * stats["base_surprise"]
        metrics = {"q_loss": of_q, "v_loss": of_v, "state_value": value}
        return of_q + of_v + rest, jax.lax.stop_gradient(metrics)

    statistics = (*_read(2), Statistic("q_target", _target), Statistic("state_value", _state))
    points = lambda rewards, mask: rewards  # noqa: E731
    return _values_learner(loss, points, statistics, TokenValues(beta, heads=2), follow, epochs)


@published
def mc_returns(
    beta: NonNegative = 16.0,
    discount: Fraction = 0.99,
    cql_coef: NonNegative = 0.01,
    sft_coef: NonNegative = 1.0,
    epochs: Count = 1,
) -> Method:
    """Values of tokens fitted to the returns that followed them lean the policy.

    The Monte Carlo returns of LMRL Gym (arXiv:2311.18232), the paper of ``filtered_bc``, R being
    the discounted return from a token on:

        loss = mean over tokens of  1/2 (Q(s, a) - R)^2
                                  - alpha log softmax(Q(s, .))_a  -  log pi_base(a | s)
        policy ~ pi_base exp(beta Q)

    Nothing is added to the return of a completion that was cut, as there. Numbers and departures
    are those of ``ilql``, whose V and Q' are not part of it.
    """

    def loss(stats: Stats, returns: Array, mask: Array) -> tuple[Array, Stats]:
        of_q = jnp.square(stats["q_0"] - returns) / 2
        rest = cql_coef * stats["q_unlikely"] + sft_coef * stats["base_surprise"]
        return of_q + rest, jax.lax.stop_gradient({"q_loss": of_q})

    points = partial(advantages.reward_to_go, discount=discount)
    return _values_learner(loss, points, _read(1), TokenValues(beta, heads=1), 1.0, epochs)


# ---------------------------------------------------------------- critics of steps


def value_by_step(batch: Batch) -> tuple[Array, Array]:
    """[N, G, T]: the probability of success before each token's step, and before the next one.

    The value network's number is a logit. After the last step it is 0.
    """
    live, steps = transforms.trained(batch), segments.step_ids(batch)
    chance = jax.nn.sigmoid(batch.stats["rollout_values"])
    step_value = jax.vmap(jax.vmap(segments.at_step_start))(chance, steps, live)
    return step_value, jax.vmap(jax.vmap(segments.at_next_step))(step_value, steps, live)


def outcomes(values: Array, batch: Batch) -> tuple[Array, Array, Batch]:
    """Points of each token's step [N, G, T], scores [N, G], and success as "returns"."""
    rewards = transforms.rewards_by_token(values, batch)
    score = rewards.sum(axis=2)
    won = jnp.where(jnp.isnan(score), score, score > 0)
    returns = transforms.per_token(won, batch)
    batch = batch.with_stats(returns=returns)
    return segments.total(rewards, segments.steps(batch)), score, batch


def success_loss(coef: float) -> Regularizer:
    """``coef`` times the cross-entropy of the value network's logit against success, "returns".

    Its mean is over tokens.
    """

    def value(stats: Stats, mask: Array) -> Array:
        return jax.nn.softplus(stats["values"]) - stats["returns"] * stats["values"]

    token_mean = aggregates.token_mean
    return term("value_loss", value, coef, "values", "returns", aggregate=token_mean)


def better_steps(decay: float, keep: float, threshold: float) -> Transform:
    """``digirl``'s weights [N, G, T], 1 for the steps that are imitated and 0 for the others."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = transforms.trained(batch), segments.step_ids(batch)
        earned, score, batch = outcomes(values, batch)
        step_value, following = value_by_step(batch)
        starts = jax.vmap(jax.vmap(segments.step_starts))(steps, live)
        left = starts.sum(axis=2, keepdims=True) - jnp.cumsum(starts, axis=2)
        share = jnp.float32(decay) ** left
        gain = share * jnp.expand_dims(score, 2) + (1 - share) * (following + earned - step_value)
        # Before the first token the value knows the instruction alone.
        first = jnp.where(first_token(live), step_value, 0).sum(axis=2)
        surprise = batch.stats["returns"][:, :, 0] - first
        members = live.any(axis=2)
        surprise_bound = segments.quantile(surprise, segments.segments(members), 1 - keep)
        selected = (gain > threshold) & jnp.expand_dims(members & (surprise >= surprise_bound), 2)
        return jnp.where(jnp.isnan(gain), gain, selected), batch

    return transforms.stateless(apply, frozenset({"rollout_values"}))


@published
def digirl(
    decay: Fraction = 0.5,
    keep: Fraction = 0.1,
    threshold: NonNegative = 0.05,
    value_coef: Positive = 1.0,
    replayed: Fraction = 0.0,
    each: Count = 8,
    kept_prompts: Count = 1024,
) -> Method:
    """Imitation of steps that did better than the value network expected, in surprising episodes.

    "DigiRL: Training In-The-Wild Device-Control Agents with Autonomous Reinforcement Learning"
    (arXiv:2406.11896). With V the probability of success, R the episode's score, H its last step:

        A_h = lambda^(H - h) R + (1 - lambda^(H - h)) (V(s_(h+1)) + r_h - V(s_h))
        loss = -mean over episodes of sum_h 1[A_h > threshold] log pi(a_h | s_h)
               + c * cross-entropy of V against success, score > 0

    over the ``keep`` of the batch's episodes that surprise most, success - V(instruction). Steps
    are ``ids["step"]``; the value network's number is V's logit. ``keep``, ``threshold`` and lambda
    (``decay``) are the released code's, whose A is V' - V + r + lambda^(H - h) R. Departures: one
    network for V of instructions and of states, where the code has two, the latter twin; it learns
    at every token; the mean is over all episodes, also those not kept. The code draws its batches
    from a buffer of all episodes: with ``replayed`` above 0 that share of a group's members are
    earlier episodes of its prompt, as far as any are kept, as in ``arpo_replay``.
    """
    rule = () if is_zero(replayed) else (replay_share(-math.inf, replayed, each, kept_prompts),)
    return Method(
        Objective(
            better_steps(decay, keep, threshold),
            ratios.reinforce(),
            aggregates.sequence_sum,
            (success_loss(value_coef),),
        ),
        edits=rule,
    )


def blended_steps(blend: float) -> Transform:
    """``webrl``'s advantage of each step, [N, G, T]."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        earned, score, batch = outcomes(values, batch)
        step_value, following = value_by_step(batch)
        final = jnp.expand_dims(score, 2) - step_value
        return blend * (earned + following - step_value) + (1 - blend) * final, batch

    return transforms.stateless(apply, frozenset({"rollout_values"}))


def between(low: float, high: float) -> Transform:
    """Masks replayed steps unless the policy's probability of their tokens is in (low, high].

    The chance of a step is the geometric mean of its tokens', the inverse of its perplexity, by the
    policy at the start of the training step.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        if "replayed" not in batch.ids:
            return values, batch
        chance = jnp.exp(segments.mean(batch.stats["proximal_logprobs"], segments.steps(batch)))
        fresh = jnp.expand_dims(batch.ids["replayed"] == 0, 2)
        mask = batch.mask & (fresh | ((chance > low) & (chance <= high)))
        return values, batch.replace(mask=mask)

    return transforms.stateless(apply, frozenset({"proximal_logprobs"}))


def step_regression(beta: float) -> Surrogate:
    """(beta log(pi / pi_ref) of a step - its advantage)^2, at the step's first token."""

    def apply(stats: Stats, gains: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([gains, mask], 1)
        drift = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0)
        total = segments.total(drift, segments.segments(mask, stats["step"]))
        error = beta * total - gains
        return jnp.where(segments.step_starts(stats["step"], mask), jnp.square(error), 0), {}

    return Surrogate(apply, frozenset({"ref_logprobs"}), labels=frozenset({"step"}))


@published
def webrl(
    beta: Positive = 1.0,
    blend: Fraction = 0.5,
    value_coef: Positive = 1.0,
    phase_steps: Count = 100,
    replayed: Fraction = 0.0,
    each: Count = 8,
    kept_prompts: Count = 1024,
    written: Whole = 0,
    low: Fraction = 0.05,
    high: Fraction = 0.75,
) -> Method:
    """Log-ratios of steps to the last phase's policy, fitted to the steps' advantages.

    "WebRL: Training LLM Web Agents via Self-Evolving Online Curriculum Reinforcement Learning"
    (arXiv:2411.02337), with V the probability of success and R the episode's score:

        A(s, a) = lambda (r + V(s') - V(s)) + (1 - lambda) (R - V(s))
        loss = mean over episodes of sum over steps of (beta log(pi(a | s) / pi_ref(a | s)) - A)^2
               + c * cross-entropy of V against success, score > 0

    pi_ref is the policy as the phase began, of ``phase_steps`` training steps. Steps are
    ``ids["step"]``; the value network's number is V's logit; lambda (``blend``) is the paper's.
    With ``replayed`` above 0 (2/3 in the released code; prompts must come again) that share of a
    group's members are earlier successes of its prompt, as far as any are kept, and of these the
    steps alone are trained on whose perplexity is at least 1/0.95 and below 1/0.5. What is kept is
    as in ``arpo_replay``.

    With ``written`` above 0 (``data.train`` with an environment on the host, and ``data.writer``)
    another model writes that number of tasks as a phase begins, after those that were failed in the
    last one. Those stay for which V at the start is from ``low`` to ``high``, the released code's.

    Departures: the released code has twin networks, and A = V' - V + r + R - 0.05, whose sign alone
    counts: 1, and -0.6 for the steps below 0, which are then left out; the log-ratio is divided by
    the batch's action tokens, the loss by beta, which is 1 to 5 and no more than makes the two
    sides equal; a phase is one epoch over its episodes there, and its tasks are the written ones
    alone, where here they join those of the data.
    """
    check_band(low=low, high=high)
    advantage = blended_steps(blend)
    if not is_zero(replayed):
        advantage = transforms.chain(advantage, between(0.5, 0.95))
    rule = () if is_zero(replayed) else (replay_share(0.5, replayed, each, kept_prompts),)
    return Method(
        Objective(
            advantage,
            step_regression(beta),
            aggregates.sequence_sum,
            (success_loss(value_coef),),
        ),
        schedule=Schedule(after=refreshed(phase_steps)),
        edits=rule,
        curriculum=written_problems(phase_steps, written, low, high) if written else None,
    )
