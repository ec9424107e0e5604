"""A batch built from the few arrays a test is about."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.types import Batch


def build(rewards, mask, *, members=None, baseline=None, truncated=None, lengths=None, stats=None):
    rewards, mask = np.asarray(rewards, np.float32), np.asarray(mask, bool)
    n, g, t = mask.shape
    some = np.ones((n, g), bool)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return Batch(
        prompt_tokens=jnp.zeros((n, 1), jnp.int32),
        prompt_lengths=jnp.ones(n, jnp.int32),
        tokens=jnp.zeros((n, g, t), jnp.int32),
        lengths=jnp.asarray(mask.sum(2) if lengths is None else lengths, jnp.int32),
        mask=jnp.asarray(mask),
        rewards=f32(rewards)[..., None],
        reward_weights=jnp.ones(1, jnp.float32),
        members=jnp.asarray(some if members is None else members),
        baseline=jnp.asarray(~some if baseline is None else baseline),
        truncated=jnp.asarray(~some if truncated is None else truncated),
        stats={name: f32(value) for name, value in (stats or {}).items()},
    ).check()


@pytest.fixture(scope="session")
def make_batch():
    return build
