"""Transforms that scale advantages by statistics of the batch, or of a reward part."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives import advantages as group
from jrl.objectives.kl import bounded_exp
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Transform, opinions


def decoupled_parts(*, eps: float = 1e-6, ddof: int = 1) -> Transform:
    """The weighted sum of the reward parts, each normalised in its group on its own.

    Of a part count the members that it has an opinion of. The first step of ``gdpo``: a part that
    all members share takes nothing from the others' resolution, as it does when the sum is
    normalised.

    Args:
      eps: points, added to each part's deviation.
      ddof: as in ``advantages.group_mean_std``.

    Returns:
      A transform to [N, G] that starts anew from ``batch.rewards`` and ``batch.reward_weights``:
      it stands first in a chain.
    """

    def of_part(rewards: Array, members: Array) -> Array:
        return group.group_mean_std(rewards, members, eps=eps, ddof=ddof)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        scored = batch.members[:, :, None] & opinions(batch.rewards, batch.ids)
        parts = jax.vmap(jax.vmap(of_part), in_axes=2, out_axes=2)(batch.rewards, scored)
        return (parts * batch.reward_weights[None, None]).sum(-1), batch

    return stateless(apply)


def beta_normalised(limit: float = 300.0) -> Transform:
    """Rewards minus their group's mean, over the density of a Beta distribution at that mean.

    See ``bnpo``; ``limit`` is the greatest a + b. The variance of p is the sample's, over the
    number of groups less 1.

    Returns:
      A transform [N, G] -> [N, G] for rewards in [0, 1]. Where p does not vary over the batch there
      is no Beta distribution, and nothing is divided. The density's logarithm is held within 20
      nats.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        members = batch.members
        centred = jax.vmap(group.mean_centred)(values, members)
        nonempty = members.any(axis=1)
        p = jnp.clip(group.live_mean(values, members, axis=1), 0, 1)
        deviation = group.mean_centred(p, nonempty)
        mean = group.live_mean(p, nonempty)
        variance = jnp.square(deviation).sum() / jnp.maximum(nonempty.sum() - 1, 1)
        spread = jnp.where(variance > 0, variance, 1)
        both = jnp.clip(mean * (1 - mean) / spread - 1, 0, limit)
        both = jnp.where(variance <= 0, 0, both)
        alpha, beta = 1 + mean * both / 3, 1 + (1 - mean) * both / 3
        inside = jnp.clip(p, 1e-6, 1 - 1e-6)
        log_density = (alpha - 1) * jnp.log(inside) + (beta - 1) * jnp.log1p(-inside)
        log_density = log_density - jax.scipy.special.betaln(alpha, beta)
        return centred * jnp.expand_dims(bounded_exp(-log_density), 1), batch

    return stateless(apply)


def scale_to_informative() -> Transform:
    """Advantages times all live members over those in groups that have a non-zero advantage.

    The correction of ``gpg``: groups whose answers are all right or all wrong add nothing to the
    gradient but still count in its mean.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        informative = ((values != 0) & batch.members).any(axis=1, keepdims=True)
        some = (batch.members & informative).sum()
        return values * (batch.members.sum() / jnp.maximum(some, 1)), batch

    return stateless(apply)


def exponential_weights(temperature: float = 1.0, cap: float = 20.0) -> Transform:
    """min(exp(A / temperature), cap): the weights of ``awr``."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        return jnp.minimum(bounded_exp(values / temperature), cap), batch

    return stateless(apply)


def mark_positive() -> Transform:
    """Marks the tokens of completions whose score is above 0; put it first.

    Writes the statistic "positive": on the trained tokens of those completions the number of all
    trained tokens of the batch over the number of these, and 0 elsewhere. A mean over all tokens
    of ``positive`` times a loss is then the mean of that loss over the positive tokens.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        chosen = live & jnp.expand_dims(values > 0, 2)
        weight = live.sum() / jnp.maximum(chosen.sum(), 1)
        positive = jnp.where(chosen, weight, 0).astype(jnp.float32)
        return values, batch.with_stats(positive=positive)

    return stateless(apply)
