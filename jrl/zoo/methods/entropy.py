"""Relatives of GRPO that steer entropy, or spread of thought: by targets, histories, weights.

Each function says its paper's formula with A the advantage of GRPO and H the entropy of the
policy's distribution, nats a token. All else is as in ``grpo``. In code, ``entropy`` is that of the
policy being trained and carries gradient; ``rollout_entropy`` is that at the start of the training
step and carries none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import (
    AtLeastOne,
    Choice,
    Count,
    Flag,
    NonNegative,
    Positive,
    Share,
    Tokens,
    check_band,
)
from jrl.methods.edit import refill
from jrl.methods.group_relative import grpo
from jrl.objectives.advantages import live_mean, mean_centred
from jrl.objectives.aggregates import sequence_sum, token_mean
from jrl.objectives.comparisons import tie_breakers
from jrl.objectives.kl import bounded_exp
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Regularizer, Statistic, Stats, Transform

TINY = 1e-8

# ---------------------------------------------------------------- Confucius3-Math


def hardness_weighted(correct: float, hardness: float) -> Transform:
    """(R - m) (1 + hardness (1 - m)), with R = 1 from ``correct`` on, else -1, and m its mean."""

    def one(scores: Array, members: Array) -> Array:
        signs = jnp.where(scores >= correct, 1.0, jnp.where(jnp.isnan(scores), scores, -1.0))
        mean = live_mean(signs, members)
        return mean_centred(signs, members) * (1 + hardness * (1 - mean))

    return stateless(lambda values, batch: (jax.vmap(one)(values, batch.members), batch))


def entropy_target(target: float, coef: float) -> Regularizer:
    """The distance ``coef |h - target|`` of the mean entropy h from a target, by its gradient.

        coef sign(h - target) sum of the gradients of the tokens' entropies over their number

    where the sign is that of the step before, so that the term adds up over microbatches; there is
    no term in the first step of a run.

    Returns:
      A regularizer named "entropy"; its metric is the entropy itself. Its mean is over tokens.
    """

    def update(state: Array, metrics: Mapping[str, Array]) -> Array:
        return metrics["entropy"].astype(jnp.float32)

    return Regularizer(
        "entropy",
        lambda stats, mask: stats["entropy"],
        coef=lambda state: coef * jnp.sign(state - target),
        init=lambda: jnp.asarray(target, jnp.float32),
        update=update,
        needs=frozenset({"entropy"}),
        aggregate=token_mean,
    )


@variant(grpo, clip_high=0.28)
def confucius3_math(
    base: Method,
    stage: Annotated[str, Choice(("hardness", "entropy"))] = "hardness",
    correct: Positive = 0.5,
    hardness: NonNegative = 0.256,
    max_rounds: Count = 10,
    target: Positive = 0.55,
    entropy_coef: NonNegative = 0.001,
) -> Method:
    """A first stage with an entropy target, later ones with more weight for prompts hard now.

    "Confucius3-Math: A Lightweight High-Performance Reasoning LLM for Chinese K-12 Mathematics
    Learning" (arXiv:2506.18330), sections 6.1 and 6.2. Policy-Specific Hardness Weighting, for its
    stages 2 and 3, with R_i = 1 for a right completion and -1 for a wrong one, m the group's mean:

        A_i = (R_i - m) (1 + 0.256 (1 - m))
        loss = -sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - low, 1 + high) A_i)

    over groups in which some but not all are right (others are drawn in their place). Targeted
    Entropy Regularization, for stage 1 (``stage="entropy"``), adds to the loss of GRPO

        0.001 |mean H - 0.55|

    A completion is right from ``correct`` points on. Stage "entropy" reads ``eps``, ``ddof``,
    ``target`` and ``entropy_coef``; stage "hardness" reads ``correct``, ``hardness`` and
    ``max_rounds`` in their place. Departures: the sum over tokens is averaged over completions, a
    constant factor; which side of the target the entropy is on is that of the step before
    (``entropy_target``). The paper has no clip bounds; here DAPO's.
    """
    lacking = "a prompt scheduler that brings groups left over back (Recent Sample Recovery)"
    if stage == "entropy":
        return base.plus(entropy_target(target, entropy_coef)).with_(lacks=lacking)
    return base.with_(
        advantage=hardness_weighted(correct, hardness),
        aggregate=sequence_sum,
        **refill(max_rounds=max_rounds),
        lacks=lacking,
    )


# ---------------------------------------------------------------- AEPO


def places(eligible: Array, tie_breaker: Array) -> Array:
    """[N, G] int32: each eligible member's place in a random order of them all, from 0.

    Members that are not eligible come after all that are.

    >>> places(jnp.array([[True, True], [False, True]]), jnp.array([[5, 2], [1, 9]])).tolist()
    [[1, 0], [3, 2]]
    """
    order = jnp.lexsort((tie_breaker.reshape(-1), ~eligible.reshape(-1)))
    return jnp.argsort(order).astype(jnp.int32).reshape(eligible.shape)


def substitute_heated(
    compare: Transform, *, target: float, hot: float, cold: float, rows: int, threshold: float
) -> Transform:
    """Advantages with good completions of a second, heated pass in place of some rows; ``aepo``.

    Returns:
      A transform [N, G] -> [N, G] whose state is [] float32, the temperature of the next second
      pass. Members of the second pass that are not used are left out. Without ``ids["pass"]`` the
      advantages are those of ``compare``.
    """

    def of_pass(values: Array, batch: Batch, members: Array) -> Array:
        return compare.apply(values, batch.replace(members=members), compare.init())[0]

    def apply(values: Array, batch: Batch, temperature: Array) -> tuple:
        second = batch.members & (batch.ids.get("pass", jnp.zeros_like(batch.lengths)) > 0)
        first = batch.members & ~second
        gain = of_pass(values, batch, second)
        helpful = second & ~(gain <= threshold)  # a NaN is kept, to come to light
        limit = jnp.minimum(helpful.sum(), rows)
        limit = jnp.where(temperature >= hot, limit, limit // 2)
        used = helpful & (places(helpful, tie_breakers(batch)) < limit)
        replaced = first & (places(first, tie_breakers(batch)) < limit)
        original = first & ~replaced
        ones = jnp.where(jnp.isnan(gain), gain, 1)
        values = jnp.where(used, ones, jnp.where(original, of_pass(values, batch, first), 0))

        live = batch.mask & first[:, :, None]
        entropy = live_mean(batch.stats["rollout_entropy"], live)
        # A NaN entropy is on neither side.
        steered = jnp.where(entropy > target, cold, temperature)
        steered = jnp.where(entropy <= target, hot, steered)
        steered = jnp.where(live.any(), steered, temperature).astype(jnp.float32)
        return values, batch.replace(members=original | used), steered

    def init() -> Array:
        return jnp.asarray(hot, jnp.float32)

    return Transform(init, apply, needs=frozenset({"rollout_entropy"}))


@variant(grpo, dual_clip=3.0, correction="proximal")
def aepo(
    base: Method,
    target: Positive = 0.5,
    hot: Positive = 1.2,
    cold: Positive = 0.8,
    rows: Tokens = 60,
    threshold: NonNegative = 0.05,
) -> Method:
    """GRPO with correct completions sampled at another temperature, which steer the entropy.

    "Arbitrary Entropy Policy Optimization: Entropy Is Controllable in Reinforcement Fine-tuning"
    (arXiv:2510.08141). While the policy's entropy is at or below ``target``, a second pass over a
    quarter of the prompts draws at the temperature ``hot``, otherwise at ``cold``. With S its
    completions of an advantage above ``threshold``, m of them replace as many rows of the batch,

        m = min(rows, |S|), halved while cold;   A = 1 for the m, GRPO's for the others
        loss = -1/(sum_i |o_i|) sum_i sum_t min(rho_t A, clip(rho_t, 1 - eps, 1 + eps) A)

    with rho_t against the policy at the start of the step at temperature 1, whatever temperature
    drew the token: a ratio to the heated distribution would undo the heating. Numbers, the
    dual clip and the token mean are those of the released code, whose best result has ``target``
    0.75.

    Members of the second pass are those with ``ids["pass"]`` above 0; the temperature of the next
    one is the state. Departures: which completions of S are used and which rows they replace is
    drawn at random, where the code takes the first of each; the entropy is that of the
    distributions of the first pass's tokens, where the code estimates it from the log-probabilities
    of all of them.
    """
    compare = base.objective.advantage
    return base.with_(
        advantage=substitute_heated(
            compare, target=target, hot=hot, cold=cold, rows=rows, threshold=threshold
        ),
        aggregate=token_mean,
        lacks="a second sampling pass, at the temperature that the state holds",
    )


# ---------------------------------------------------------------- EPO


class TurnHistory(NamedTuple):
    """The entropy of each turn, averaged over the training steps in which it occurred.

    Attributes:
      mean: [turns] float32, nats.
      times: [turns] float32, training steps.
      steps: [] float32, training steps done.
    """

    mean: Array
    times: Array
    steps: Array


def entropy_history(turns: int, total_steps: int, low: float = 0.0, high: float = 2.0) -> Transform:
    """Writes where each token's entropy may lie, by what its turn's entropy used to be.

    For ``smoothed_entropy`` to read it adds ``entropy_low`` and ``entropy_high``, ``low`` and
    ``high`` times the turn's mean entropy in earlier steps, and ``entropy_smoothing``: the weight
    of the term (beta in ``epo_entropy``), 0 in the first half of the turns and for a turn not seen
    before.

    Returns:
      A transform that leaves the advantages as they are. Without ``ids["turn"]`` a completion is
      one turn, number 0.
    """

    def init() -> TurnHistory:
        return TurnHistory(jnp.zeros(turns), jnp.zeros(turns), jnp.zeros(()))

    def apply(values: Array, batch: Batch, history: TurnHistory) -> tuple:
        live = trained(batch)
        turn = batch.ids.get("turn", jnp.zeros(live.shape, jnp.int32))
        turn = jnp.where(live, jnp.clip(turn, 0, turns - 1), 0)
        by_turn = partial(jax.ops.segment_sum, segment_ids=turn.reshape(-1), num_segments=turns)
        number = by_turn(live.reshape(-1).astype(jnp.float32))
        entropy = by_turn(jnp.where(live, batch.stats["rollout_entropy"], 0).reshape(-1))
        turn_entropy = entropy / jnp.maximum(number, 1)

        half = total_steps // 2
        first = history.steps / max(half, 1)
        second = (history.steps - half) / max(total_steps - half, 1)
        early, fading = 1 - 0.2 * (1 - jnp.exp(-2 * first)), 0.8 * jnp.exp(-3 * second)
        phase = jnp.where(history.steps <= half, early, fading)
        late = jnp.arange(turns) >= turns // 2
        smoothing = jnp.where(late & (history.times > 0), phase, 0)
        stats = {
            "entropy_low": (low * history.mean)[turn],
            "entropy_high": (high * history.mean)[turn],
            "entropy_smoothing": smoothing[turn],
        }
        count = history.times + (number > 0)
        step = jnp.where(number > 0, turn_entropy - history.mean, 0) / jnp.maximum(count, 1)
        history = TurnHistory(history.mean + step, count, history.steps + 1)
        return values, batch.with_stats(**stats), history

    return Transform(init, apply, needs=frozenset({"rollout_entropy"}))


def smoothed_entropy(coef: float, penalty: float = 0.1, *, hinge: bool = True) -> Regularizer:
    """An entropy bonus, less a penalty where the entropy has left the range of its history.

        coef mean over tokens of [-H + smoothing * penalty * excess]

    Returns:
      A regularizer that reads what ``entropy_history`` writes.
    """

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        entropy = stats["entropy"]
        above, below = entropy - stats["entropy_high"], stats["entropy_low"] - entropy
        excess = jnp.maximum(jnp.maximum(above, below), 0)
        if not hinge:
            excess = jnp.where(excess > 0, 1.0, excess)
        return stats["entropy_smoothing"] * penalty * excess - entropy

    needs = ("entropy", "entropy_low", "entropy_high", "entropy_smoothing")
    return term("smoothed_entropy", value, coef, *needs, aggregate=token_mean)


@variant(grpo)
def epo_entropy(
    base: Method,
    total_steps: Count,
    turns: Count = 1,
    entropy_coef: NonNegative = 0.001,
    penalty: NonNegative = 0.1,
    low: NonNegative = 0.0,
    high: NonNegative = 2.0,
    hinge: Flag = True,
) -> Method:
    """GRPO with an entropy bonus that stays within what each turn's entropy used to be.

    "EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning"
    (arXiv:2509.22576):

        loss = loss of GRPO - c [mean over tokens of H - beta * mean over tokens of L]

    where L is a penalty for tokens with H outside ``low`` to ``high`` times the mean entropy that
    their turn had in earlier training steps, 0 for the first half of an episode's ``turns``; and
    beta is 1 - 0.2 (1 - exp(-2 p)) in the first half of ``total_steps`` and 0.8 exp(-3 p) in the
    second, p being the part of that half which is done: it goes from 1 to 0.83, and from 0.8 to
    0.04. Turns are ``ids["turn"]``, which environments record; another completion is one turn.

    Departures: as released the penalty is a constant (0.05 to 0.1), which has no gradient;
    ``hinge`` takes ``penalty`` times the distance from the range instead, and False is the released
    form. The released schedule counts epochs, and its common script leaves it off
    (``enable_smooth_weights=False``: beta is 1 throughout); the paper's own formula for beta could
    not be found. A turn's first step has no history and no penalty. The history is of the entropy
    at the start of each training step. The paper also adds the term to PPO. Other numbers are those
    of the released scripts.
    """
    check_band(low=low, high=high)
    steered = base.after(entropy_history(turns, total_steps, low, high))
    return steered.plus(smoothed_entropy(entropy_coef, penalty, hinge=hinge))


# ---------------------------------------------------------------- STEER


def entropy_change(
    advantages: Array, logprobs: Array, sampler_logprobs: Array, entropy: Array
) -> Array:
    """The first-order change of the entropy that a policy-gradient step makes at each token.

        Omega_t = (A_t / mu_t) pi_t (1 - pi_t) (log pi_t + H_t)

    up to the step's size; 0 for a token that was certain. All arrays are of one shape.

    >>> half = jnp.log(jnp.array([0.5]))
    >>> round(float(entropy_change(jnp.ones(1), half, half, jnp.zeros(1))[0]), 4)
    -0.3466
    """
    chex.assert_equal_shape([advantages, logprobs, sampler_logprobs, entropy])
    ratio = bounded_exp(logprobs - sampler_logprobs)
    return advantages * ratio * -jnp.expm1(jnp.minimum(logprobs, 0)) * (logprobs + entropy)


def weigh_by_entropy_change(least: float, most: float, floor: float, falloff: str) -> Transform:
    """Advantages times a weight that falls with |Omega|, as ``steer_entropy`` has it.

    The weight is positive, so that multiplying the advantage is multiplying PPO's clipped loss.

    Returns:
      A transform to [N, G, T].
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = trained(batch)
        values = per_token(values, batch)
        inputs = (batch.stats[name] for name in ("proximal_logprobs", "sampler_logprobs"))
        logprobs, sampled_logprobs = (jnp.where(live, x, 0) for x in inputs)
        entropy = jnp.where(live, batch.stats["rollout_entropy"], 0)
        size = jnp.abs(
            entropy_change(jnp.where(live, values, 0), logprobs, sampled_logprobs, entropy)
        )
        top = jnp.max(jnp.where(live, size, 0))
        if falloff == "exponential":
            # The quotient first: the largest token's is 1 exactly, however large it is.
            weight = least ** (size / jnp.maximum(top, floor))
        else:
            low = jnp.min(size, where=live, initial=jnp.inf)
            width = top - low
            part = jnp.where(width == 0, 0.5, (size - low) / jnp.where(width == 0, 1, width))
            weight = most - (most - least) * part
        return values * jnp.where(live, weight, 1), batch

    needs = frozenset({"proximal_logprobs", "sampler_logprobs", "rollout_entropy"})
    return stateless(apply, needs)


@variant(grpo, clip_high=0.28, dual_clip=10.0)
def steer_entropy(
    base: Method,
    least_weight: Share = 0.8,
    most_weight: AtLeastOne = 1.2,
    floor: Positive = 0.02,
    falloff: Annotated[str, Choice(("exponential", "linear"))] = "exponential",
) -> Method:
    """Tokens whose update would change the entropy most weigh least.

    STEER of "Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective"
    (arXiv:2510.10150), with mu the distribution drawn from and H the entropy at the token:

        Omega_t = (A / mu_t) pi_t (1 - pi_t) (log pi_t + H_t)
        w_t = exp(-k |Omega_t|),  k = -log(least_weight) / max(max |Omega|, 0.02)
        loss = mean over tokens of w_t times PPO's dual-clipped loss with clip-higher, A as in GRPO

    ``falloff="linear"``, the other form of the released code, goes in a straight line from
    ``most_weight`` at the batch's least |Omega| to ``least_weight`` at its greatest, half way
    between where all are equal. Numbers are those of the released scripts. Departures: the weights
    are computed once, with the policy at the start of the training step, over the whole batch; the
    released code takes the least and greatest |Omega| of each microbatch, at every update.
    """
    weighed = weigh_by_entropy_change(least_weight, most_weight, floor, falloff)
    return base.after(weighed).with_(aggregate=token_mean)


# ---------------------------------------------------------------- VERL


def effective_rank(states: Array, live: Array) -> Array:
    """Exponential of the entropy of the centred states' singular values, taken as shares.

    Args:
      states: [T, D] float.
      live: [T] bool, which rows count.

    Returns:
      [] float32, from 1 to min(T, D); 0 for fewer than two live rows, 1 when all are equal.

    >>> square = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(float(effective_rank(square, jnp.ones(4, bool))), 4)
    2.0
    """
    chex.assert_rank([states, live], [2, 1])
    row = live[:, None]
    count = live.sum()
    states = jnp.where(row, states, 0).astype(jnp.float32)
    centred = jnp.where(row, states - states.sum(axis=0)[None] / jnp.maximum(count, 1), 0)
    values = jnp.linalg.svd(centred, compute_uv=False)
    shares = values / (values.sum() + TINY)
    rank = jnp.exp(-(shares * jnp.log(shares + TINY)).sum())
    return jnp.where(count > 1, rank, 0)


def running_ranks(hidden: Array, mask: Array, stride: int) -> Array:
    """The effective rank of a completion's beginnings, renewed every ``stride`` tokens.

    Returns:
      [T] float32: at the k-th live token the rank of the first ``stride * j + 1`` live states, the
      greatest such number that is at most k with j at least 1, 0 before there is one; at the last
      live token that of all of them.
    """
    chex.assert_rank([hidden, mask], [2, 1])
    order = jnp.argsort(~mask, stable=True)  # the live ones first, in order
    packed = hidden[order]
    index = jnp.arange(mask.shape[0])
    live, total = mask.sum(), jnp.cumsum(mask)

    def first(count: Array) -> Array:
        return effective_rank(packed, (index < count) & (index < live))

    steps_at_most = max((mask.shape[0] - 1) // stride, 0)
    counts = jnp.concatenate([stride * jnp.arange(1, steps_at_most + 1) + 1, live[None]])
    ranks = jax.lax.map(first, counts)
    steps = jnp.maximum(total - 1, 0) // stride
    running = jnp.where(steps > 0, ranks[jnp.maximum(steps - 1, 0)], 0)
    return jnp.where(mask, jnp.where(total == live, ranks[-1], running), 0)


def rank_changes(ranks: Array, mask: Array, stride: int) -> Array:
    """Rank, its mean velocity and its mean acceleration over ONE completion.

    Returns:
      [3] float32: the rank of the whole completion, the mean v_j from j = 2 and the mean a_j from
      j = 3 (``verl_effective_rank``); 0 where there is none.

    >>> ranks = jnp.array([0.0, 1.0, 3.0, 3.5, 3.5])
    >>> rank_changes(ranks, jnp.ones(5, bool), 1).tolist()
    [3.5, 1.5, -0.5]
    """
    chex.assert_rank([ranks, mask], 1)
    total = jnp.cumsum(mask)
    last = jnp.max(jnp.where(mask & (total == total[-1]), ranks, -jnp.inf))
    last = jnp.where(total[-1] > 0, last, 0)
    # The places where a rank was taken, moved to the front.
    measured_here = mask & (total > 1) & ((total - 1) % stride == 0)
    order = jnp.argsort(~measured_here, stable=True)
    m, count = jnp.where(measured_here, ranks, 0)[order], measured_here.sum()
    j = jnp.arange(m.shape[0])
    before = (jnp.cumsum(m) - m) / jnp.maximum(j, 1)
    velocity = jnp.where((j >= 1) & (j < count), m - before, 0)
    change = velocity - jnp.concatenate([jnp.zeros(1), velocity[:-1]])
    acceleration = jnp.where((j >= 2) & (j < count), change, 0)
    mean_v = velocity.sum() / jnp.maximum(count - 1, 1)
    mean_a = acceleration.sum() / jnp.maximum(count - 2, 1)
    return jnp.stack([last, mean_v, mean_a]).astype(jnp.float32)


class RankState(NamedTuple):
    """Running means over steps.

    Attributes:
      means: [3] float32, of rank, velocity and acceleration.
      score: [] float32, points, of the reward.
      steps: [] int32, training steps seen; at 0 the others mean nothing.
    """

    means: Array
    score: Array
    steps: Array


def rank_bonus(stride: int, gain: float, kappa: float, rate: float, fading: bool) -> Transform:
    """Adds ``verl_effective_rank``'s bonus to each advantage; the first step adds nothing.

    Returns:
      A transform [N, G] -> [N, G] that keeps ``RankState``.
    """

    def ranks_of(hidden: Array, mask: Array) -> Array:
        return running_ranks(hidden, mask, stride)

    def init() -> RankState:
        return RankState(jnp.zeros(3), jnp.zeros(()), jnp.int32(0))

    def apply(values: Array, batch: Batch, state: RankState) -> tuple[Array, Batch, RankState]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        ranks = jnp.where(live, batch.stats["running_rank"], 0)
        changes = jax.vmap(jax.vmap(lambda x, m: rank_changes(x, m, stride)))(ranks, live)
        gap = changes - state.means[None, None]
        gap = jnp.clip(gap / (jnp.abs(state.means) + TINY)[None, None], -5, 5)
        rank, velocity, acceleration = jnp.moveaxis(gap, 2, 0)
        tendency = jax.nn.sigmoid(gain * acceleration)
        aux = tendency * jnp.tanh(rank) + (1 - tendency) * jnp.tanh(velocity)
        if fading:
            aux = aux * (1 - (state.score + 1) / 2)
        bonus = jnp.minimum(jnp.maximum(aux, 0), jnp.abs(values) / kappa)
        shaped = jnp.where(state.steps > 0, values + bonus, values)

        # Completions without a token do not count in the running means.
        sequences = live.any(axis=2)
        count = sequences.sum()
        total = jnp.where(sequences[:, :, None], changes, 0).sum(axis=(0, 1))
        sequence_mean = total / jnp.maximum(count, 1)
        score = live_mean(batch.score(), sequences)
        step = jnp.where(state.steps > 0, rate, 1.0) * (count > 0)
        after = RankState(
            state.means + step * (sequence_mean - state.means),
            state.score + step * (score - state.score),
            state.steps + (count > 0).astype(jnp.int32),
        )
        return shaped, batch, after

    statistic = Statistic("running_rank", ranks_of, over="hidden", start=True)
    return Transform(init, apply, statistics=(statistic,))


@variant(grpo, kl_coef=0.001)
def verl_effective_rank(
    base: Method,
    stride: Count = 40,
    gain: NonNegative = 2.0,
    kappa: AtLeastOne = 2.0,
    ema_rate: Share = 0.3,
    fading: Flag = False,
) -> Method:
    """GRPO with a bonus for completions whose hidden states spread more than they used to.

    VERL, Velocity-Exploiting Rank-Learning, of "Beyond the Exploration-Exploitation Trade-off: A
    Hidden State Approach for LLM Reasoning in RLVR" (arXiv:2509.23808); not the verl framework.
    With m_j the effective rank of the last layer's first 40 j + 1 states (40 is ``stride``), as far
    as a completion has that many:

        velocity v_j = m_j - mean(m_1 .. m_{j-1}),  acceleration a_j = v_j - v_{j-1}
        d = (x - running mean of x) / |running mean of x|, within 5, for the rank of the whole
            completion and the means of v and a over it
        beta = sigmoid(gain d_a),  aux = beta tanh(d_rank) + (1 - beta) tanh(d_v)
        A + min(max(aux, 0), |A| / kappa)

    and the loss of GRPO. ``fading`` also multiplies aux by one minus the running mean reward, moved
    from [-1, 1] to [0, 1]. Layer and numbers are those of the released scripts; the states are
    those after the final norm, as there for Qwen2 and Llama. Departures: the bonus goes to all
    tokens of a completion, where the released code adds it to the last one's advantage alone; the
    running means start at the first step's, which adds no bonus, and there at 0; of a completion
    beyond 512 tokens the released code takes the last 512 for v and a; its scripts' entropy bonus
    of 0.001 is left out.
    """
    return base.after(rank_bonus(stride, gain, kappa, ema_rate, fading))
