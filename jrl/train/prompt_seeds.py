"""Sampling seeds of each prompt, for rows scheduled by a host."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from jrl.types import stream


def prompt_seeds(key: Any, name: str, step: Any, positions: Any, attempt: int = 0) -> list[int]:
    """A number below 2**64 for each prompt: its raw key, at the first attempt that of ``generate``.

    Args:
      key: the run's root key.
      name: of the stream, "sample" or "eval".
      step: of training.
      positions: [N] int, in the run's order.
      attempt: how often the prompts were drawn in this step before.
    """
    raw = np.asarray(_raw_keys(key, name, step, np.asarray(positions), attempt))
    return [(int(hi) << 32) + int(lo) for hi, lo in raw]


@partial(jax.jit, static_argnums=1)
def _raw_keys(key: Any, name: str, step: Any, positions: Any, attempt: Any) -> Any:
    """[N, 2] uint32."""
    root = stream(key, name, step)
    again = jax.random.key_data(jax.random.fold_in(root, attempt))
    raw = jax.numpy.where(attempt > 0, again, jax.random.key_data(root))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(raw), positions)
    return jax.random.key_data(keys)
