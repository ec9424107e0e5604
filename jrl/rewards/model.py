"""Trained reward models as rewards: jitted, in the trainer's process, over tokens; and ensembles.

The functions of ``rewards.pool`` read text in worker processes without JAX; a reward model reads
tokens on the devices of the policy. Hence the package ``rewards`` does not import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.config.reward_model import Ensemble, RewardModelTable
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.types import Array, Network, Params, Rollout

Values = Callable[[Params, Rollout], Array]
"""(params, rollout) -> [N, G, T] float32, the value of each token."""


def last_values(values: Array, mask: Array) -> Array:
    """The value at the last live token, as in the losses of ``methods.reward_model``.

    Args:
      values: [..., T] float32, points.
      mask: [..., T] bool.

    Returns:
      [...] float32, points; 0 where nothing is live.

    >>> values = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> last_values(values, jnp.array([[True, True, False], [False, False, False]])).tolist()
    [2.0, 0.0]
    """
    t = values.shape[-1]
    last = t - 1 - jnp.argmax(mask[..., ::-1], axis=-1)
    last_value = jnp.take_along_axis(values, last[..., None], axis=-1)[..., 0]
    return jnp.where(mask.any(-1), last_value, 0).astype(jnp.float32)


def reduce_ensemble(points: Array, ensemble: Ensemble, uncertainty: float) -> Array:
    """Reduction of M reward models' scores to one number.

    "Reward Model Ensembles Help Mitigate Overoptimization" (arXiv:2310.02743):

        mean        mu
        min         the least, its worst-case optimisation
        uwo         mu - c var, its uncertainty-weighted optimisation
        deviation   mu - c sd, a lower confidence bound

    with the variance over the M models, divided by M.

    Args:
      points: [M, ...] float32, points of M models.
      ensemble: which.
      uncertainty: c.

    Returns:
      [...] float32, points.

    >>> reduce_ensemble(jnp.array([[1.0], [3.0]]), "uwo", 0.5).tolist()
    [1.5]
    """
    if ensemble == "min":
        return points.min(axis=0)
    if ensemble == "mean":
        return points.mean(axis=0)
    spread = points.var(axis=0) if ensemble == "uwo" else points.std(axis=0)
    return points.mean(axis=0) - uncertainty * spread


def reduced(each: Array, table: RewardModelTable) -> Array:
    """[...] float32: the numbers [M, ...] of M models, linked and made one."""
    each = jax.nn.sigmoid(each) if table.link == "sigmoid" else each
    return reduce_ensemble(each, table.ensemble, table.uncertainty)


def dropout_passes(
    weight: Array, axis: int, dropout: float, passes: int, single: int | None, seed: int
) -> Array:
    """Weights of a linear head in several passes with dropout on its inputs.

    Monte Carlo dropout of "Dropout as a Bayesian Approximation: Representing Model Uncertainty in
    Deep Learning" (arXiv:1506.02142), on the last layer's states: leaving an input out, and
    dividing the others by 1 - p, is the same as doing so to its weight. A pass has one mask for all
    texts, so that the numbers of two are those of one network, in any company.

    Args:
      weight: of the head; ``axis`` counts its inputs.
      axis: of the inputs.
      dropout: p, in [0, 1).
      passes: how many.
      single: the one that is wanted, from 0 on; None for all.
      seed: of the masks.

    Returns:
      [passes, ...], or [1, ...] of a single one.
    """
    root = jax.random.fold_in(jax.random.key(seed), passes)
    numbers = jnp.arange(passes) if single is None else jnp.array([single])
    size = (weight.shape[axis],)

    def one(number: Array) -> Array:
        mask = jax.random.bernoulli(jax.random.fold_in(root, number), 1 - dropout, size)
        shape = [1] * weight.ndim
        shape[axis] = size[0]
        return weight * mask.reshape(shape) / (1 - dropout)

    return jax.vmap(one)(numbers)


def at_turn_ends(values: Any, mask: Any, turns: Any) -> np.ndarray:
    """The values at the last live token of each turn, 0 elsewhere.

    Args:
      values: [..., T] float32, points.
      mask: [..., T] bool, the policy's own tokens.
      turns: [..., T] int32, the turn of each token; never decreasing along a row.

    >>> at_turn_ends([[1.0, 2.0, 3.0]], [[True, True, True]], [[0, 0, 1]]).tolist()
    [[0.0, 2.0, 3.0]]
    """
    values, mask, turns = np.asarray(values, np.float32), np.asarray(mask), np.asarray(turns)
    paid = np.zeros_like(values)
    for row in np.ndindex(mask.shape[:-1]):
        ends = _last_of_each(mask[row], turns[row])
        paid[row][ends] = values[row][ends]
    return paid


def at_progress(values: Any, mask: Any, steps: Any) -> np.ndarray:
    """Change of the value over each step, at the step's last live token; 0 elsewhere.

    The progress of "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning"
    (arXiv:2410.08146), with v_h the value after step h:

        A_h = v_h - v_(h-1),   A_1 = v_1 - mean of the group's v_1

    The mean stands for the value before the first step, which a model of steps is not trained on.

    Args:
      values: [..., G, T] float32, points.
      mask: [..., G, T] bool, the policy's own tokens.
      steps: [..., G, T] int32, the step of each token; never decreasing along a row.

    >>> values, steps = [[[1.0, 4.0, 2.0]], [[0.0, 3.0, 7.0]]], [[[0, 0, 1]], [[0, 0, 0]]]
    >>> at_progress(values, np.ones((2, 1, 3), bool), steps)[0].tolist()
    [[0.0, 0.0, -2.0]]
    """
    values, mask, steps = np.asarray(values, np.float32), np.asarray(mask), np.asarray(steps)
    paid, first = np.zeros_like(values), np.zeros(mask.shape[:-1], np.float32)
    for row in np.ndindex(mask.shape[:-1]):
        ends = _last_of_each(mask[row], steps[row])
        step_values = values[row][ends]
        first[row] = step_values[0] if len(ends) else 0
        paid[row][ends] = np.diff(step_values, prepend=step_values[:1])
    live = mask.any(axis=-1)
    count = np.maximum(live.sum(axis=-1, keepdims=True), 1)
    before = np.where(live, first, 0).sum(axis=-1, keepdims=True) / count
    for row in zip(*np.nonzero(live), strict=True):
        paid[row][_last_of_each(mask[row], steps[row])[0]] = (first - before)[row]
    return paid


def _last_of_each(mask: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The last live token of each run of one number along a row [T]."""
    live = np.flatnonzero(mask)
    return live[np.append(np.diff(numbers[live]) != 0, True)[: len(live)]]


class ModelReward:
    """Points of rollouts from a reward model.

    Args:
      params: of the reward model.
      values: its network.
      by: of which values the points are made; see ``RewardModelTable.by``.
    """

    def __init__(self, params: Params, values: Values, by: str = "completion") -> None:
        def points(params: Params, rollout: Rollout) -> Array:
            return last_values(values(params, rollout), rollout.mask)

        self.params, self.values, self.by = params, values, by
        self._points, self._values = jax.jit(points), jax.jit(values)

    def __call__(self, rollout: Rollout) -> np.ndarray:
        """[N, G] float32 rewards, on the host."""
        points: np.ndarray = np.asarray(self._points(self.params, rollout))
        return points

    def of_tokens(self, rollout: Rollout) -> np.ndarray:
        """[N, G, T] float32 values after each token, on the host."""
        return np.asarray(self._values(self.params, rollout))


class JudgeModel(NamedTuple):
    """A model that judges in text on the run's devices.

    Attributes:
      network: of the model.
      params: on the devices; None for those of the policy, which each draw brings.
      tokenizer: its own.
      checksum: of the weights, one number a leaf; () for the policy's.
    """

    network: Network
    params: Params
    tokenizer: Tokenizer
    checksum: tuple[int, ...] = ()


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
