"""A trained reward model as a reward: jitted, in the trainer's process, over tokens.

The functions of ``rewards.pool`` read text in worker processes without JAX; a reward model reads
tokens on the devices of the policy. Hence the package ``rewards`` does not import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class ModelReward:
    """Points of rollouts from a reward model.

    Args:
      params: of the reward model.
      values: its network.
    """

    def __init__(self, params: Params, values: Values) -> None:
        def points(params: Params, rollout: Rollout) -> Array:
            return last_values(values(params, rollout), rollout.mask)

        self._params, self._points, self._values = params, jax.jit(points), jax.jit(values)

    def __call__(self, rollout: Rollout) -> np.ndarray:
        """[N, G] float32 rewards, on the host."""
        points: np.ndarray = np.asarray(self._points(self._params, rollout))
        return points

    def of_tokens(self, rollout: Rollout) -> np.ndarray:
        """[N, G, T] float32 values after each token, on the host."""
        return np.asarray(self._values(self._params, rollout))


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
