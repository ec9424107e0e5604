"""Transforms that read more of a pair than its two scores.

Which tokens a correction changed, how far two models agree on a ranking, how sure an estimator is,
what goal was set, and the multiplier of a cost constraint.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from jrl.objectives.comparisons import best_and_worst, comparable, extremes
from jrl.objectives.shifts import START, sums, write
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Transform


def common_tokens(a: Array, live_a: Array, b: Array, live_b: Array) -> tuple[Array, Array]:
    """Which tokens of two sequences belong to their longest common subsequence.

    Args:
      a: [T] int32.
      live_a: [T] bool; tokens that are not live match nothing.
      b: [T] int32.
      live_b: [T] bool.

    Returns:
      [T] bool of a and of b. Of several longest ones, the one that matches a's tokens earliest.

    >>> ones = jnp.ones(4, bool)
    >>> both = common_tokens(jnp.array([1, 2, 3, 4]), ones, jnp.array([1, 3, 9, 4]), ones)
    >>> [x.astype(int).tolist() for x in both]
    [[1, 0, 1, 1], [1, 1, 0, 1]]
    """
    chex.assert_equal_shape([a, b, live_a, live_b])
    size = a.shape[0]
    match = (a[:, None] == b[None, :]) & live_a[:, None] & live_b[None, :]

    def row(below: Array, matches: Array) -> tuple[Array, Array]:
        here = jnp.where(matches, below[1:] + 1, below[:-1])
        best = jnp.flip(jax.lax.cummax(jnp.flip(here)))
        best = jnp.concatenate([best, jnp.zeros(1, jnp.int32)])
        return best, best

    last = jnp.zeros(size + 1, jnp.int32)
    _, lengths = jax.lax.scan(row, last, match, reverse=True)
    lengths = jnp.concatenate([lengths, last[None]])  # [T + 1, T + 1], of what follows (i, j)

    def walk(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple]:
        i, j = at
        inside = (i < size) & (j < size)
        found = inside & match[jnp.minimum(i, size - 1), jnp.minimum(j, size - 1)]
        down, right = lengths[jnp.minimum(i + 1, size), j], lengths[i, jnp.minimum(j + 1, size)]
        step_i = inside & (found | (down >= right))
        step_j = inside & (found | ~(down >= right))
        return (i + step_i, j + step_j), (i, j, found)

    zero = jnp.zeros((), jnp.int32)
    _, (at_a, at_b, found) = jax.lax.scan(walk, (zero, zero), None, length=2 * size)
    drop = jnp.full_like(at_a, size)  # out of range, and dropped by the scatter
    none = jnp.zeros(size, bool)
    in_a = none.at[jnp.where(found, at_a, drop)].set(True, mode="drop")
    in_b = none.at[jnp.where(found, at_b, drop)].set(True, mode="drop")
    return in_a, in_b


def changed_token_weights(gamma: float) -> Transform:
    """Writes "token_weight": ``gamma`` at tokens that differ between best and worst, else 1.

    The tokens of both that are not in their longest common subsequence differ. Other members' are
    all 1.

    Args:
      gamma: above 0.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)
        live = trained(batch)

        def one(tokens: Array, live: Array, best: Array, worst: Array) -> Array:
            i, j = jnp.argmax(best), jnp.argmax(worst)
            in_i, in_j = common_tokens(tokens[i], live[i], tokens[j], live[j])
            same = jnp.where(best[:, None], in_i[None], jnp.where(worst[:, None], in_j[None], True))
            return jnp.where(same, 1.0, gamma)

        # One group at a time: the table of lengths is T by T.
        weights = jax.lax.map(lambda x: one(*x), (batch.tokens, live, best, worst))
        return scores, batch.replace(stats={**batch.stats, "token_weight": weights})

    return stateless(apply)


def kendall(x: Array, y: Array, live: Array) -> Array:
    """[]: Kendall's tau of two scores [G] over live members, in [-1, 1]; 0 for fewer than two.

    >>> float(kendall(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 3.0, 2.0]), jnp.ones(3, bool)))
    0.3333333432674408
    """
    pairs = live[:, None] & live[None, :] & ~jnp.eye(live.shape[0], dtype=bool)
    agree = jnp.sign(x[:, None] - x[None, :]) * jnp.sign(y[:, None] - y[None, :])
    return jnp.where(pairs, agree, 0).sum() / jnp.maximum(pairs.sum(), 1)


def self_ranking() -> Transform:
    """Scores become the policy's own mean log-probabilities; writes "pair_weight", their agreement.

    The agreement is the mean over groups of (tau + 1) / 2, with tau Kendall's between the members'
    ranking by the policy and that by the reference (the model before it), at the start of the step.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        live = comparable(batch)
        tokens = jnp.maximum(batch.mask.sum(axis=2), 1)
        now, before = (sums(x, batch) / tokens for x in ("proximal_logprobs", "ref_logprobs"))
        tau = jax.vmap(kendall)(now, before, live)
        ranked = live.sum(axis=1) > 1
        rate = jnp.where(ranked, (tau + 1) / 2, 0).sum() / jnp.maximum(ranked.sum(), 1)
        return now, write(batch, "pair_weight", rate)

    return stateless(apply, START)


def certainty(minimum: float = 0.0) -> Transform:
    """Writes "pair_weight": how sure the passes of an estimator are of best over worst.

    Each reward part is one pass. With p_t = sigmoid(part t's gap between best and worst):

        1 - [H(mean of p_t) - mean of H(p_t)] / log 2

    one minus the mutual information (BALD) of label and pass, in bits; a single pass gives 1.

    Args:
      minimum: groups below it are left out.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)

        def of(at: Array) -> Array:
            return jnp.where(at[:, :, None], batch.rewards, 0).sum(axis=1)

        p = jax.nn.sigmoid(of(best) - of(worst))
        bald = _entropy(p.mean(axis=1)) - _entropy(p).mean(axis=1)
        # Rounding may leave a tiny negative; one pass gives exactly 0.
        sure = 1 - jnp.clip(bald / jnp.log(2.0), 0, 1)
        members = batch.members & ~(sure < minimum)[:, None]
        return scores, write(batch.replace(members=members), "pair_weight", sure[:, None])

    return stateless(apply)


def _entropy(p: Array) -> Array:
    return -xlogy(p, p) - xlogy(1 - p, 1 - p)


def length_cost(points: float) -> Transform:
    """Takes ``points`` from the score for each trained token."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        return scores - points * batch.mask.sum(axis=2), batch

    return stateless(apply)


RATIONALE = 1
"""``ids["stratum"]`` of a member that explains the pair instead of answering the prompt."""


def pair_and_rationale() -> Transform:
    """Leaves the best and the worst answer of each group and the rationales beside them.

    A rationale is a member whose ``ids["stratum"]`` is ``RATIONALE``. Writes "pair_weight": 1 on
    the two answers, 0 on rationales. A group whose answers have no gap is left out whole.
    """
    choose_two = best_and_worst()

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        kinds = batch.ids.get("stratum", jnp.zeros(batch.members.shape, jnp.int32))
        rationale = kinds == RATIONALE
        answers = batch.replace(members=batch.members & ~rationale)
        _, answers, _ = choose_two.apply(scores, answers, ())
        some = answers.members.any(axis=1, keepdims=True)
        kept = answers.members | (rationale & batch.members & some)
        batch = batch.replace(members=kept)
        return scores, write(batch, "pair_weight", (~rationale).astype(jnp.float32))

    return stateless(apply)


def nearest_to_goal() -> Transform:
    """Scores become -(goal - score)^2 where the environment recorded ``ids["goal"]`` [N], points.

    Without goals the scores stay: the best one is the goal.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        if "goal" not in batch.ids:
            return scores, batch
        goal = batch.ids["goal"].astype(jnp.float32)
        return -jnp.square(jnp.expand_dims(goal, 1) - scores), batch

    return stateless(apply)


def lagrangian(budget: float, rate: float, initial: float, cap: float) -> Transform:
    """The score of a constrained problem: (reward - lambda cost) / (1 + lambda).

    The last reward part is the cost, unweighted, where there are two or more; the others, weighted,
    are the reward. After each step log lambda moves by rate times lambda times (mean cost -
    budget), and lambda is held within the cap.

    Args:
      budget: points, the mean cost that is allowed.
      rate: per point.
      initial: lambda at the start, above 0.
      cap: the greatest lambda.

    Returns:
      A transform [N, G] -> [N, G] whose state is log lambda. With one reward part there is no cost,
      and the score stays.
    """

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(scores, 2)
        if batch.rewards.shape[2] < 2:
            return scores, batch, state
        cost = batch.rewards[:, :, -1]
        reward = scores - cost * batch.reward_weights[-1]
        multiplier = jnp.exp(state)
        live = batch.members
        mean = jnp.where(live, cost, 0).sum() / jnp.maximum(live.sum(), 1)
        moved = jnp.minimum(state + rate * multiplier * (mean - budget), jnp.log(cap))
        # A floor keeps the exponential above 0, from where it could never rise again.
        moved = jnp.where(live.any(), jnp.maximum(moved, -20.0), state)
        return (reward - multiplier * cost) / (1 + multiplier), batch, moved

    return Transform(
        init=lambda: jnp.minimum(jnp.log(initial), jnp.log(cap)).astype(jnp.float32), apply=apply
    )


def step_ends() -> Transform:
    """Only the last token of each reasoning step is trained on; scores become its labels.

    Steps are runs of one ``ids["step"]`` [N, G, T]; a completion without them is one step. The
    label of a step is the statistic "step_labels" at its end, where the data gives it (1 right, 0
    wrong, or an estimate between), and otherwise the completion's score; held within [0, 1].

    Returns:
      A transform to [N, G, T] that edits the mask.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = trained(batch)
        step = batch.ids.get("step", jnp.zeros(live.shape, jnp.int32))

        def ends(step: Array, live: Array) -> Array:
            def look(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
                label, here = now
                end = here & (label != later)
                return jnp.where(here, label, later), end

            none = jnp.full((), jnp.iinfo(jnp.int32).min, jnp.int32)
            return jax.lax.scan(look, none, (step, live), reverse=True)[1]

        end = jax.vmap(jax.vmap(ends))(step, live)
        whole = jnp.broadcast_to(scores[:, :, None], live.shape)
        labels = jnp.clip(batch.stats.get("step_labels", whole), 0, 1)
        return labels, batch.replace(mask=batch.mask & end)

    return stateless(apply)
