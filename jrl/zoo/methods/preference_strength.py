"""The reward models of "Secrets of RLHF in Large Language Models Part II: Reward Modeling".

Strengths of preferences, contrast of representations, and meta-learning for a policy that moves.
Notation as in ``methods.reward_model``.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Count, NonNegative, Positive, Range
from jrl.methods.preference import list_method
from jrl.methods.reward_model import bradley_terry, last_value
from jrl.methods.schedule import Ahead
from jrl.objectives import aggregates, comparisons, lists
from jrl.objectives.advantages import live_mean
from jrl.objectives.comparisons import comparable
from jrl.objectives.members import Members, over_group
from jrl.objectives.pairs import softplus
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Objective, Statistic, Stats, Surrogate, Transform


@published
def preference_strength(form: Annotated[str, Choice(("soft", "margin"))] = "soft") -> Method:
    """The preference loss with each pair's strength as a soft label, or as a margin.

    "Secrets of RLHF in Large Language Models Part II: Reward Modeling" (arXiv:2401.06080). The
    strength of a pair is the mean over M reward models of one less the other's score,
    mu = mean over m of r_m(y_w) - r_m(y_l); with d = v_w - v_l,

        soft      -p log sigmoid(d) - (1 - p) log sigmoid(-d),   p = sigmoid(mu)
        margin    -log sigmoid(d - mu)

    the mean over a group's pairs. Scores are the mean scores of the M models, so that their
    differences are the strengths (``jrl.zoo.with_strengths`` writes such rows). The
    order of a pair is that of its strength, which is the paper's flip of labels for all pairs whose
    strength is below 0, where the paper flips the tenth of least strength. The paper's contrastive
    loss is ``simcse_reward``, its MetaRM ``meta_rm``.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        values, ordered = last_value(group), lists.ordered_pairs(group)
        d = values[:, None] - values[None, :]
        strength = jnp.where(ordered, group.score[:, None] - group.score[None, :], 0)
        p = jax.nn.sigmoid(strength)
        soft = p * softplus(-d) + (1 - p) * softplus(d)
        each = soft if form == "soft" else softplus(strength - d)
        return lists.mean_of_pairs(each, values, group)

    return list_method(loss, ("values",))


# ---------------------------------------------------------------- contrast of representations


def feature(number: int) -> Statistic:
    """A fixed random projection of the state before a completion's last token, "feature_N"."""

    def apply(hidden: Array, mask: Array) -> Array:
        last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[0]), 0))
        size = hidden.shape[1]
        direction = np.random.default_rng(number).standard_normal(size) / np.sqrt(size)
        read = hidden[last].astype(jnp.float32) @ direction.astype(np.float32)
        return jnp.broadcast_to(read, mask.shape)

    return Statistic(f"feature_{number}", apply, over="hidden")


def cosines(one: Array, other: Array) -> Array:
    """[N, M]: of the rows of [N, K] and [M, K]."""

    def unit(x: Array) -> Array:
        return x / jnp.sqrt(jnp.maximum(jnp.square(x).sum(axis=-1, keepdims=True), 1e-12))

    return unit(one) @ unit(other).T


def contrast(width: int, of: str, temperature: float, dropout: float) -> Surrogate:
    """SimCSE's loss over ONE group; see ``simcse_reward``."""
    features = tuple(feature(k) for k in range(width))

    def masks(bits: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(0), bits)
        return jax.random.bernoulli(key, 1 - dropout, (2, width))

    def loss(group: Members) -> tuple[Array, Stats]:
        states = jnp.stack([group.first(each.name) for each in features], axis=1)
        stays = jax.vmap(masks)(group.first("tie_breaker").astype(jnp.int32))
        views = jnp.where(stays, states[:, None] / (1 - dropout), 0)  # [G, 2, width]
        live = group.live
        if of == "differences":
            ordered = lists.ordered_pairs(group)
            live = (ordered | ordered.T).reshape(-1)
            views = (views[:, None] - views[None, :]).reshape(-1, 2, width)
        scores = cosines(views[:, 0], views[:, 1]) / temperature
        each = jax.nn.logsumexp(jnp.where(live[None, :], scores, -1e30), axis=1)
        each = each - jnp.diagonal(scores)
        value = live_mean(each, live)
        return value, {"contrast": value}

    surrogate = over_group(loss)
    return surrogate._replace(statistics=features, labels=frozenset({"tie_breaker"}))


@variant(bradley_terry)
def simcse_reward(
    base: Method,
    of: Annotated[str, Choice(("responses", "differences"))] = "responses",
    contrast_coef: NonNegative = 1.0,
    temperature: Positive = 0.05,
    dropout: Annotated[float, Range(0.0, 0.9)] = 0.05,
    width: Count = 32,
) -> Method:
    """The preference loss, and SimCSE's loss on what the reward model makes of responses.

    Of the paper of ``preference_strength``, with h_s and h_t a text's representation under two
    masks of dropout,

        loss = L_rm + b mean over i of -log[ exp(cos(h_s_i, h_t_i) / tau)
                                             / sum over j of exp(cos(h_s_i, h_t_j) / tau) ]

    i and j go over the chosen and rejected responses y, which fared best there, or over f(y_w) -
    f(y_l) and f(y_l) - f(y_w) (``of``); L_rm is the loss of ``bradley_terry``. b = 1
    (``contrast_coef``) and dropout 0.05 are the paper's; tau is that of SimCSE (arXiv:2104.08821),
    the paper has none. Departures: j goes over the group's own texts, where the paper has those of
    a batch; a representation is the state before the text's last token, projected to ``width``
    numbers on fixed random directions, and dropout is on these, where the paper has it in every
    layer and so in L_rm, too; its other loss, SwAV, is not here. The states are the policy's, so
    ``value.kind = "head"``.
    """
    ranked = base.objective.surrogate
    added = contrast(width, of, temperature, dropout)

    def apply(stats: Stats, scores: Array, mask: Array) -> tuple[Array, Stats]:
        losses, metrics = ranked.apply(stats, scores, mask)
        more, noted = added.apply(stats, scores, mask)
        return losses + contrast_coef * more, metrics | noted

    both = ranked._replace(apply=apply, statistics=added.statistics, labels=added.labels)
    return base.with_(surrogate=both)


# ---------------------------------------------------------------- MetaRM


def unranked() -> Transform:
    """Leaves the groups whose scores are all equal."""
    ranked = comparisons.with_gap()

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        _, left, _ = ranked.apply(scores, batch, ())
        alike = comparable(batch) & ~left.members.any(axis=1, keepdims=True)
        return scores, batch.replace(members=alike)

    return stateless(apply)


def difference() -> Objective:
    """Spread of the scores of a group's responses: J of ``meta_rm``, the mean over groups.

    Groups are those whose responses nobody ranked.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        values, live = last_value(group), group.live
        pairs = jnp.triu(live[:, None] & live[None, :], 1)
        gaps = jax.nn.sigmoid(jnp.abs(values[:, None] - values[None, :]))
        count = jnp.maximum(live.sum(), 1)
        return 2 / jnp.square(count) * jnp.where(pairs, gaps, 0).sum(), {}

    return Objective(unranked(), over_group(loss, ("values",)), aggregates.sequence_sum)


@variant(bradley_terry)
def meta_rm(base: Method, ascent: Positive = 5e-6) -> Method:
    """A reward model of given preferences that still tells responses of a later policy apart.

    MetaRM of the paper of ``preference_strength`` (and of "MetaRM: Shifted Distributions Alignment
    via Meta-Learning", arXiv:2405.00438): with k responses s of the policy as it is now to a
    prompt, which nobody ranked,

        J = 2 / k^2  sum over i < j of sigmoid(|v(s_i) - v(s_j)|)
        theta' = theta + eta grad J(theta)
        theta <- theta - alpha grad L(theta')

    with L the loss of ``bradley_terry`` and alpha the optimiser's step. Rows of ``data.pairs`` are
    lists: those with equal scores are the s of J, those with an order the preferences of L.
    Departures: a batch has rows of both in the proportion of the data, where the paper draws a
    number of each; without a row of equal scores in a minibatch the step is that of
    ``bradley_terry``. Not known: eta (``ascent``); 5e-6 is the paper's rate of reward models.
    """
    return base.with_(schedule=base.schedule._replace(ahead=Ahead(difference(), ascent)))
