"""Losses of reward models that single papers published. Notation as in ``methods.reward_model``.

v_i is the value at completion i's last token, s_i its score in the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import Method, against_others
from jrl.methods.definition import published, variant
from jrl.methods.domains import Count, Fraction, NonNegative, Positive, Range, Whole
from jrl.methods.preference import list_method
from jrl.methods.reward_model import last_value, prm, step_ends
from jrl.objectives import aggregates, lists, segments
from jrl.objectives.comparisons import comparable, extremes, write
from jrl.objectives.members import (
    Members,
    last_token,
    over_group,
    over_sequence,
    spoilt,
    value_output,
)
from jrl.objectives.pairs import softplus
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import STATISTICS, Array, Batch, Objective, Stats, Surrogate, Transform


@published
def safe_rlhf_cost(sign_coef: NonNegative = 1.0) -> Method:
    """A cost model: which of two completions is more harmful, and whether each is harmful at all.

    "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (arXiv:2310.12773), with w the more
    harmful one of a pair and the sign sg of a completion 1 where it is harmful, -1 where not:

        loss = -log sigmoid(v_w - v_l) - c [ log sigmoid(sg_w v_w) + log sigmoid(sg_l v_l) ]

    the mean over a group's pairs of unequal scores; c (``sign_coef``) is 1 in the paper. Scores are
    signed harm: above 0 for harmful, below for harmless, the more harmful the higher; at 0 a
    completion has no sign. So a cost of 0 is the border that ``safe_rlhf``'s budget is measured
    from.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        values, sign = last_value(group), jnp.sign(group.score)
        wrong_side = jnp.where(sign == 0, 0, softplus(-sign * values))
        ranked = softplus(values[None, :] - values[:, None])
        each = ranked + sign_coef * (wrong_side[:, None] + wrong_side[None, :])
        return lists.mean_of_pairs(each, values, group)

    return list_method(loss, ("values",))


def of_labels(labelled: Callable[[Array], Array]) -> Transform:
    """``step_ends`` whose labels [N, G, T], 0 but at the ends of steps, go through a function."""
    ends = step_ends()

    def apply(scores: Array, batch: Batch, state: tuple) -> tuple[Array, Batch, tuple]:
        labels, edited, state = ends.apply(scores, batch, state)
        return labelled(jnp.where(trained(edited), labels, 0)), edited, state

    return ends._replace(apply=apply)


@variant(prm)
def pav_verifier(base: Method, best_of: Count = 4) -> Method:
    """A process advantage verifier: a prover's chance of success behind each step.

    PAV of "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning"
    (arXiv:2410.08146). From each step k a policy draws completions; z_k is the share of right ones,
    which is ``prm``'s label (``jrl eval --search puct --out`` counts them), and the prover is the
    best of K (``best_of``) of its draws, right if any of them is:

        q_k = 1 - (1 - z_k)^K
        loss = - mean over steps of [ q_k log sigmoid(v_k) + (1 - q_k) log sigmoid(-v_k) ]

    4 is the paper's best K; with 1 the policy that drew is the prover. In RL and in search it is
    the step's change of sigmoid(v) that counts: a part ``function = "pav"``. Departures: the paper
    finds the first wrong step of a path and samples around it; here every step counts alike.
    """
    return base.with_(advantage=of_labels(lambda z: 1 - (1 - z) ** best_of))


@published
def ml_irl(beta: Positive = 1.0, square_coef: NonNegative = 0.0) -> Method:
    """Maximum-likelihood inverse RL: demonstrations are worth more than what the policy writes.

    The reward of DR-IRL, "Inverse Reinforcement Learning with Dynamic Reward Scaling for LLM
    Alignment" (arXiv:2503.18991), for a policy that is held fixed: of

        max over r, min over pi of  E[ (r(x, y) - r(x, y')) / beta + KL(pi || pi_ref) ]

    with demonstrations y and samples y' of the policy, the reward's part,

        loss = - (v_y - v_y') / beta + c (v_y^2 + v_y'^2)

    the mean over a group's pairs of unequal scores: a demonstration is "chosen", a sample
    "rejected". The paper trains one such model for each kind of harm; ``where`` of a reward part
    says which rows it scores. Departures: c (``square_coef``) is 0 in the paper's formula, which
    has no least value then; the policy is not renewed in between, which further runs do. Read from
    two accounts of the paper.
    """

    def loss(high: Array, low: Array) -> Array:
        return (low - high) / beta + square_coef * (jnp.square(high) + jnp.square(low))

    return list_method(lists.every_pair(last_value, loss), ("values",))


@variant(prm)
def sorm(base: Method) -> Method:
    """A stepwise outcome reward model: whether any completion from a step on can still be right.

    The SORM of "GLoRe: When, Where, and How to Improve LLM Reasoning via Global and Local
    Refinements" (arXiv:2402.10963). From each step k the policy draws K completions; with z_k the
    share of right ones, which is ``prm``'s label (``jrl eval --search puct --out`` counts them),

        loss = - mean over steps of [ y_k log sigmoid(v_k) + (1 - y_k) log sigmoid(-v_k) ],
        y_k = 1 if z_k > 0 else 0

    an estimate of the best policy's value, where ``prm``'s is that of the policy at hand. A step
    before one from which an answer was right is right, too, as in the paper. Its other rules
    that clean labels, and the rows that train its global and local refinements (by ``sft``), are
    ``jrl.zoo.sorm_rows``, ``global_rows`` and ``local_rows``. Departures: those rules are read from
    an account of the paper.
    """

    def right(labels: Array) -> Array:
        # a NaN stays one, so that a broken score comes to light
        hard = jnp.where(labels > 0, 1.0, labels)
        return jax.lax.cummax(hard, axis=2, reverse=True)

    return base.with_(advantage=of_labels(right))


# ---------------------------------------------------------------- HelpSteer2


_MOST = sum(name.startswith("attribute_") for name in STATISTICS)
Attributes = Annotated[int, Range(1, _MOST, whole=True)]


def with_attributes(count: int) -> Transform:
    """Fills in "attribute_0" and on where rows have fewer: the score is the first, others NaN."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        names, unknown = attribute_names(count), jnp.full(batch.mask.shape, jnp.nan)
        filled = dict.fromkeys(names, unknown) | {names[0]: per_token(scores, batch)}
        return scores, batch.replace(stats=filled | batch.stats)

    return stateless(apply)


def attribute_names(count: int) -> list[str]:
    """Their statistics."""
    return [f"attribute_{k}" for k in range(count)]


@published
def helpsteer2_regression(attributes: Attributes = 5) -> Method:
    """A reward model of several attributes, each learned by the square of its error.

    "HelpSteer2: Open-source dataset for training top-performing reward models" (arXiv:2406.08673),
    with a_k the label of attribute k, 0 to 4, and v_k the head's number for it at the last token:

        loss = mean over the labelled attributes k of (v_k - a_k)^2

    Rows of ``data.pairs`` are lists with "attributes", as many as ``attributes``, null where one is
    not labelled; the paper's are helpfulness, correctness, coherence, complexity and verbosity.
    Without that field the first is the score. As a reward ``labels`` weighs them by their place,
    ``{0 = 0.65, 1 = 0.8, 2 = 0.45, 3 = 0.55, 4 = -0.4}`` as in ``function = "helpsteer2"``.
    Departures: the mean is each completion's, where the released code has that of a microbatch.
    """
    values = ["values", *(f"values_{k}" for k in range(1, attributes))]
    labels = attribute_names(attributes)

    def loss(group: Members) -> tuple[Array, Stats]:
        errors, count = jnp.zeros(group.live.shape), jnp.zeros(group.live.shape)
        for name, of in zip(values, labels, strict=True):
            label = group.last(of)
            labelled = ~jnp.isnan(label)
            errors += jnp.where(
                labelled, jnp.square(group.last(name) - jnp.where(labelled, label, 0)), 0
            )
            count += labelled
        # a NaN score is a broken one, not an attribute that nobody labelled
        value = jnp.where(jnp.isnan(group.score), jnp.nan, errors / jnp.maximum(count, 1))
        return value, {"error": jnp.sqrt(value), "chosen_reward": group.last("values")}

    read = tuple(value_output(k) for k in range(1, attributes))
    surrogate = over_sequence(loss, ("values", *labels))._replace(statistics=read)
    return Method(Objective(with_attributes(attributes), surrogate, aggregates.sequence_sum))


# ---------------------------------------------------------------- CRM


def peer_reviewed(first: float, last: float, steps: int) -> Transform:
    """Deals out pairs to two reward models, and leaves each the clearest by the other's margin.

    Each pair, the best and the worst of a group, is one model's, by chance. Of the n that are a
    model's in the step's batch, the ceil(share n) of the greatest margin by the other model at the
    start of the step stay, with share going from ``first`` to ``last`` in ``steps`` steps.

    Returns:
      A transform that writes "pair_weight", 1 for the first model's pairs and 0 for the second's,
      and "pair_share", what a pair counts for in the mean over groups: 0 where it does not stay.
      Only the two of a pair remain. Its state counts steps.
    """

    def margins(name: str, best: Array, worst: Array, batch: Batch) -> Array:
        """[N] float32."""
        ends = jnp.where(last_token(trained(batch)), batch.stats[name], 0).sum(axis=2)
        return jnp.where(best, ends, 0).sum(axis=1) - jnp.where(worst, ends, 0).sum(axis=1)

    def apply(scores: Array, batch: Batch, state: Array) -> tuple[Array, Batch, Array]:
        best, worst = extremes(scores, batch)
        gap = jnp.where(best, scores, 0).sum(axis=1) - jnp.where(worst, scores, 0).sum(axis=1)
        paired = best.any(axis=1) & (gap > 0)
        coin = (jnp.where(best, batch.ids["tie_breaker"], 0).sum(axis=1) >> 3) & 1
        done = jnp.minimum(state / jnp.maximum(steps, 1), 1.0)
        share, stays = first + (last - first) * done, jnp.zeros(paired.shape, bool)
        for model, reviewer in enumerate(("rollout_values_1", "rollout_values")):
            mine = paired & (coin == model)
            margin = jnp.where(mine, margins(reviewer, best, worst, batch), -jnp.inf)
            rank = jnp.argsort(jnp.argsort(-margin))
            stays |= mine & (rank < jnp.ceil(share * mine.sum()))
        live = comparable(batch)
        # a NaN stays, so that a broken score comes to light
        broken = (live & jnp.isnan(scores)).any(axis=1)
        counts = jnp.where(stays, live.any(axis=1).sum() / jnp.maximum(stays.sum(), 1), 0)
        counts = jnp.where(broken, 1.0, counts)
        batch = batch.replace(members=batch.members & (best | worst | broken[:, None]))
        batch = write(batch, "pair_weight", 1.0 - coin[:, None])
        return scores, write(batch, "pair_share", counts[:, None]), state + 1

    return Transform(
        init=lambda: jnp.zeros((), jnp.float32),
        apply=apply,
        needs=frozenset({"rollout_values", "rollout_values_1"}),
        statistics=(value_output(1, start=True),),
    )


@published
def crm(
    noise: Fraction = 0.2, first_share: Fraction = 0.5, curriculum_steps: Whole = 100
) -> Method:
    """Two reward models that choose each other's pairs, so that neither learns its own mistakes.

    Collaborative Reward Modeling of "Two Minds Better Than One: Collaborative Reward Modeling for
    LLM Alignment" (arXiv:2505.10597). Pairs whose labels are wrong are hard to fit, so each model
    reviews its peer's batch, by its own loss or, which is the same order, its margin
    m = v_w - v_l, and leaves the peer those that are clear, a share of 1 - ``noise``:

        loss = -log sigmoid(v1_w - v1_l)   over the first's pairs of the greatest m2
               -log sigmoid(v2_w - v2_l)   over the second's pairs of the greatest m1

    ``noise`` is the rate of wrong labels that one expects. ``value.kind = "networks"`` makes them
    two whole networks, "head" two heads of one; as a reward the mean of both counts, or ``labels``.
    Departures: the paper's curriculum sorts an epoch's pairs from easy to hard by margin; here the
    share that stays rises from ``first_share`` in ``curriculum_steps`` steps, which leaves out the
    hard ones at first, too. Batches are dealt out by chance, in halves; how the paper does it is
    not known, nor its shares. Read from reviews and accounts of the paper.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        first = group.first("pair_weight").max() > 0.5
        values = jnp.where(first, last_value(group), group.last("values_1"))
        each = softplus(values[None, :] - values[:, None])
        value, metrics = lists.mean_of_pairs(each, values, group)
        return value * group.first("pair_share").max(), metrics

    surrogate = over_group(loss, ("values", "pair_weight", "pair_share"))._replace(
        statistics=(value_output(1),)
    )
    chosen = peer_reviewed(first_share, 1 - noise, curriculum_steps)
    return against_others(chosen, surrogate, aggregates.sequence_sum)


@published
def spa_progress() -> Method:
    """A progress estimator: contributions of steps that add up to the outcome.

    "SPA-RL: Reinforcing LLM Agents via Stepwise Progress Attribution" (arXiv:2505.20732). With v_k
    the value at the end of step k and R the completion's score,

        loss = ( sum over steps of v_k - R )^2

    the mean over completions. Steps are those of ``prm``. In RL the reward of turn t is
    alpha v_t + beta g_t, with g_t whether the environment could carry the action out: a part
    ``function = "model"`` with this run as its path, ``by = "turn"`` and weight alpha, beside the
    environment's part with weight beta, by ``ppo``. Departures: the value head is linear, where the
    paper's has layers of its own. The released script for WebShop has beta 0.5, and in the place of
    v_t what the episode is worth less the mean of the task's other episodes.
    """
    ends = step_ends()

    def apply(scores: Array, batch: Batch, state: tuple) -> tuple[Array, Batch, tuple]:
        _, edited, state = ends.apply(scores, batch, state)
        return jnp.broadcast_to(scores[:, :, None], batch.mask.shape), edited, state

    def loss(group: Members) -> tuple[Array, Stats]:
        total = group.total("values")
        return jnp.square(total - group.score), {"progress": total, "outcome": group.score}

    surrogate = over_sequence(loss, ("values",))
    advantage = ends._replace(apply=apply)
    return Method(Objective(advantage, surrogate, aggregates.sequence_sum))


@published
def plackett_luce() -> Method:
    """The likelihood of a complete ranking: each completion is chosen before all those below it.

    "The Analysis of Permutations" (Plackett, 1975; not on arXiv):

        loss = - sum over k of log[ exp(v_k) / (exp(v_k) + sum over i below k of exp(v_i)) ]

    the mean over groups. Departures: completions of one score are in no order: neither is below the
    other.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        values, ordered = last_value(group), lists.ordered_pairs(group)
        value = spoilt(lists.list_nll(values, ordered), group)
        return value, lists.ranking_metrics(values, ordered)

    return list_method(loss, ("values",))


@published
def margin_ranking(margin: Positive = 1.0) -> Method:
    """A hinge on the difference of two values.

    The loss of "Large Margin Rank Boundaries for Ordinal Regression" (Herbrich, Graepel and
    Obermayer, 2000; not on arXiv), the mean over a group's pairs of unequal scores:

        loss = max(0, margin - (v_w - v_l))
    """
    hinge = lists.every_pair(last_value, lambda high, low: jnp.maximum(0, margin - (high - low)))
    return list_method(hinge, ("values",))


def quality_values(rewards: Array, steps: Array, mask: Array) -> Array:
    """[T]: ``rest_mcts``' value after each token's step of ONE sequence, from process rewards."""
    starts = segments.step_starts(steps, mask)
    left = starts.sum() - jnp.cumsum(starts)  # steps after this one

    def on(value: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        reward, start, distance = now
        updated = jnp.maximum(value + (1 - value) / (distance + 1) * reward, 0)
        value = jnp.where(start, updated, value)
        return value, value

    first = segments.at_step_start(rewards, steps, mask)
    values: Array
    _, values = jax.lax.scan(on, jnp.zeros(()), (first, starts, left * 1.0))
    return jnp.where(mask, values, 0)


def step_qualities() -> Transform:
    """``step_ends``, with the labels r mapped to ``quality_values`` of 2 r - 1."""
    ends = step_ends()

    def apply(scores: Array, batch: Batch, state: tuple) -> tuple[Array, Batch, tuple]:
        labels, edited, state = ends.apply(scores, batch, state)
        live, steps = trained(batch), segments.step_ids(batch)
        last = jnp.where(trained(edited), labels, 0)
        label = segments.total(last, segments.steps(batch))  # from the step's end to its tokens
        values = jax.vmap(jax.vmap(quality_values))(2 * label - 1, steps, live)
        return values, edited, state

    return ends._replace(apply=apply)


def step_squares() -> Surrogate:
    """The squared error of each token's value; the advantages are the targets."""

    def apply(stats: Stats, targets: Array, mask: Array) -> tuple[Array, Stats]:
        return jnp.square(stats["values"] - targets), {"target": targets}

    return Surrogate(apply, frozenset({"values"}))


@variant(prm)
def meds3(base: Method) -> Method:
    """A process reward model on the steps of a search tree, with chances of success as labels.

    The reward model of "MedS^3: Towards Medical Small Language Models with Self-Evolved Slow
    Thinking" (arXiv:2501.12051). A tree is grown by

        argmax over children of v + 2 sqrt(ln N(parent) / N),   those never visited first

    (``episodes.tree.uct``), finished paths left alone, v_k being the share of right endings behind
    step k. Paths that end rightly train the policy (``sft``), and all paths this model, on both
    sides:

        loss = - mean over steps of [ v_k log sigmoid(V_k) + (1 - v_k) log sigmoid(-V_k) ]

    which is the loss of ``prm`` with soft labels: "step_values" of the rows that
    ``episodes.tree_rows.rows_of_tree`` makes. At inference the best of N completions is taken by
    the model. Departures: V is the value head's number, where the paper's head has two classes,
    whose difference it is; ``jrl eval --search puct --out`` uses ``episodes.tree.puct`` and the
    policy's likelihood, in Python ``episodes.search.play_search`` takes the paper's selection.
    """
    return base


@variant(prm)
def rest_mcts(base: Method) -> Method:
    """A value model of partial solutions: how far along the right way each step is.

    The value model of "ReST-MCTS*: LLM Self-Training via Process Reward Guided Tree Search"
    (arXiv:2406.03816). With m_k the steps left after step k and r_k its process reward, 1 for a
    right step and -1 for a wrong one:

        v_k = max(v_(k-1) + (1 - v_(k-1)) / (m_k + 1) r_k, 0),   v_0 = 0
        loss = mean over steps of (V_k - v_k)^2

    so that a right solution of K steps is worth k / K after step k. r_k is 2 z - 1 of ``prm``'s
    label z; the paper writes 1 - 2 r for r the chance of an error, and its code takes
    max(0, v + (1 - v) r / m) as here. Departures: m_k is what the path itself has left, where the
    paper takes the shortest right path of a search tree. The policy is trained on traces of high
    value by ``filtered_bc``.
    """
    return base.with_(advantage=step_qualities(), surrogate=step_squares())
