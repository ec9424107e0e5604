"""Training a scalar reward: the value head on the policy's trunk, read at the last trained token.

A run of this family gives as "values" the head's number AFTER a token (``heads.after_token``): at
the last one it has read everything. Below, v_i is that number for completion i, in points.
Groups are ranked lists of completions of one prompt with human or judge scores; a pair is a group
of two with scores 1 and 0. The log-probabilities carry no gradient. Metrics: ``accuracy`` and
``margin`` over pairs, ``chosen_reward`` and ``rejected_reward``.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import NonNegative, Positive
from jrl.methods.preference import list_method
from jrl.objectives import aggregates, lists, segments
from jrl.objectives.members import Members, spoilt
from jrl.objectives.pairs import softplus
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Objective, Stats, Surrogate, Transform


def last_value(group: Members) -> Array:
    """[G] the value at each member's last trained token."""
    return group.last("values")


@published
def bradley_terry(
    margin: NonNegative = 0.0, margin_per_point: NonNegative = 0.0, centring: NonNegative = 0.0
) -> Method:
    """The likelihood of each preference under a logistic model of the difference of two values.

    "Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons" (Bradley and
    Terry, 1952; not on arXiv), as the reward model of InstructGPT (``sft``), the mean over a
    group's pairs of unequal scores s:

        loss = -log sigmoid( v_w - v_l - m ) + c (v_w + v_l)^2

    with m = ``margin`` + ``margin_per_point`` (s_w - s_l), as in "Llama 2: Open Foundation and
    Fine-Tuned Chat Models" (arXiv:2307.09288), and c (``centring``) the coefficient of "Helping or
    Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward Hacking"
    (arXiv:2312.09244), which keeps values near 0; both are 0 unless given.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        values, ordered = last_value(group), lists.ordered_pairs(group)
        high, low = values[:, None], values[None, :]
        gaps = group.score[:, None] - group.score[None, :]
        m = margin + margin_per_point * jnp.where(ordered, gaps, 0)
        each = softplus(m - high + low) + centring * jnp.square(high + low)
        value = lists.mean_over_pairs(each, ordered)
        return spoilt(value, group), lists.ranking_metrics(values, ordered)

    return list_method(loss, ("values",))


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


def step_ends() -> Transform:
    """Only the last token of each reasoning step is trained on; scores become its labels.

    Steps are runs of one ``ids["step"]``; a completion without them is one step. The label of a
    step is the statistic "step_labels" at its end, where the data gives it (1 right, 0 wrong, or an
    estimate between), and otherwise the completion's score; held within [0, 1].

    Returns:
      A transform to [N, G, T] that edits the mask.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = trained(batch)

        def ends(step: Array, live: Array) -> Array:
            def look(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
                label, is_live = now
                end = is_live & (label != later)
                return jnp.where(is_live, label, later), end

            none = jnp.full((), jnp.iinfo(jnp.int32).min, jnp.int32)
            return jax.lax.scan(look, none, (step, live), reverse=True)[1]

        end = jax.vmap(jax.vmap(ends))(segments.step_ids(batch), live)
        sequence_labels = jnp.broadcast_to(scores[:, :, None], live.shape)
        labels = jnp.clip(batch.stats.get("step_labels", sequence_labels), 0, 1)
        return labels, batch.replace(mask=batch.mask & end)

    return stateless(apply)


def step_cross_entropy() -> Surrogate:
    """The cross-entropy of each token's value as a logit; the advantages are the labels."""

    def apply(stats: Stats, labels: Array, mask: Array) -> tuple[Array, Stats]:
        logits = stats["values"]
        losses = softplus(logits) - labels * logits
        right = (logits > 0) == (labels > 0.5)
        return losses, {"accuracy": right.astype(jnp.float32), "label": labels}

    return Surrogate(apply, frozenset({"values"}))


@published
def prm() -> Method:
    """A process reward model: the cross-entropy of right and wrong at the end of each step.

    "Let's Verify Step by Step" (arXiv:2305.20050), with v the logit at a step's last token and z
    its label:

        loss = - mean over steps of [ z log sigmoid(v) + (1 - z) log sigmoid(-v) ]

    Steps are recorded by the environment or the data (``ids["step"]``), labels by the data
    (statistic "step_labels" at the step's end; estimates between 0 and 1 are soft labels, as in
    "Math-Shepherd: Verify and Reinforce LLMs Step-by-step without Human Annotations",
    arXiv:2312.08935), and are what ``jrl eval --search puct --out`` writes for ``data.pairs``.
    Without labels every step has its completion's score, held in [0, 1]; without steps a completion
    is one. Departures: the paper's third label, neutral, is a soft label of the user's choosing; it
    has the model predict a token for the label, here the value head does.
    """
    return Method(
        Objective(step_ends(), step_cross_entropy(), aggregates.token_mean),
    )


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
    whose difference it is; ``jrl eval --search puct --out`` goes by ``episodes.tree.puct`` and the
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
