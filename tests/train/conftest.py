"""A small policy and ragged batches for it, shared by the tests of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.types import Batch

CONFIG = ModelConfig(
    vocab_size=19,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
)


@pytest.fixture(scope="session")
def network():
    return transformer(CONFIG)


@pytest.fixture(scope="session")
def params(network):
    """Weights large enough that the policy has preferences; on the host, never donated."""
    return jax.tree.map(lambda x: 1.5 * np.asarray(x), jax.jit(network.init)(jax.random.key(0)))


def build(n=4, g=2, p=3, t=5, seed=0, **fields):
    """Ragged prompts and completions with random tokens, also where there are none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, (n, g)).astype(np.int32)
    lengths.flat[:2] = (t, 1)
    ones = np.ones((n, g), bool)
    batch = Batch(
        prompt_tokens=rng.integers(0, 19, (n, p)).astype(np.int32),
        prompt_lengths=((np.arange(n) % p) + 1).astype(np.int32),
        tokens=rng.integers(0, 19, (n, g, t)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(t) < lengths[:, :, None],
        rewards=rng.normal(size=(n, g, 1)).astype(np.float32),
        reward_weights=np.ones(1, np.float32),
        members=ones,
        baseline=~ones,
        truncated=rng.random((n, g)) < 0.4,
        stats={"sampler_logprobs": (-rng.random((n, g, t)) - 1).astype(np.float32)},
    )
    return jax.tree.map(jnp.asarray, batch.replace(**fields)).check()


@pytest.fixture(scope="session")
def make_batch():
    return build
