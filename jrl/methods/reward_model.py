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
from jrl.methods.definition import published
from jrl.methods.domains import NonNegative
from jrl.methods.preference import list_method
from jrl.objectives import aggregates, lists, segments
from jrl.objectives.members import Members
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
        return lists.mean_of_pairs(each, values, group)

    return list_method(loss, ("values",))


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
