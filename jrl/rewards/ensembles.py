"""Reward models of run directories as one: ensembles, and passes of one with dropout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jrl.config.reward_model import RewardModelTable
from jrl.errors import UserError
from jrl.rewards.model import ModelReward, Values, dropout_passes
from jrl.rewards.text_models import reduced
from jrl.types import Array, Params, Rollout


def ensemble_of(models: Sequence[ModelReward], table: RewardModelTable) -> ModelReward:
    """One reward model of several of one shape, whose numbers it links and reduces.

    Raises:
      UserError: they are not of one shape.
    """
    if len(models) == 1 and table.link == "identity":
        return ModelReward(models[0].params, models[0].values, table.by)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), model.params) for model in models]
    for path, shape in zip(table.path, shapes, strict=True):
        if shape != shapes[0]:
            raise UserError(
                f"path: {path!r} trained a network of other sizes than {table.path[0]!r}; models"
                " of an ensemble are of one shape"
            )
    params = jax.tree.map(lambda *x: jnp.stack(x), *(model.params for model in models))
    values = partial(_ensemble_values, values=models[0].values, table=table)
    return ModelReward(params, values, table.by)


def with_dropout(
    model: ModelReward, table: RewardModelTable, seed: int, *, axis: int
) -> ModelReward:
    """A reward model in several passes with dropout before its head, linked and reduced.

    Args:
      model: of which the trunk is read once for all passes.
      table: whose keys say how many.
      seed: of the masks.
      axis: of the head's inputs in its weight: 1 behind that of several networks.
    """
    one = model.params["value"]
    head = one.get("head", one)
    fixed = table.dropout, table.passes, table.single_pass, seed
    weight = dropout_passes(head["weight"], axis, *fixed)
    params = {"head": weight, "rest": model.params}

    def values(params: Params, rollout: Rollout) -> Array:
        def one(weight: Array) -> Array:
            one = params["rest"]["value"]
            head = one.get("head", one) | {"weight": weight}
            value = one | {"head": head} if "head" in one else head
            return model.values(params["rest"] | {"value": value}, rollout)

        return reduced(jax.vmap(one)(params["head"]), table)

    return ModelReward(params, values, table.by)


def one_of(
    models: Sequence[ModelReward], table: RewardModelTable, seed: int, axis: int
) -> ModelReward:
    """The models of a part's runs as one; see ``with_dropout`` and ``ensemble_of``."""
    if table.dropout:
        return with_dropout(models[0], table, seed, axis=axis)
    return ensemble_of(models, table)


def _ensemble_values(
    params: Params, rollout: Rollout, *, values: Values, table: RewardModelTable
) -> Array:
    """[N, G, T] float32 of M models, reduced for each token."""
    return reduced(jax.vmap(values, in_axes=(0, None))(params, rollout), table)
