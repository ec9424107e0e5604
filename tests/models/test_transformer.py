import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import transformer as T
from jrl.models.config import ModelConfig

TINY = ModelConfig(
    vocab_size=31,
    layers=3,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_dim=24,
    max_length=64,
)
VARIANTS = {
    "plain": {},
    "gemma": {
        **{"norm_plus_one": True, "post_norms": True, "qk_norm": True, "embed_scale": 4.0},
        **{"activation": "gelu_tanh", "attention_softcap": 5.0, "logit_softcap": 3.0},
        **{"window": 3, "window_pattern": (True, False), "rope_local_theta": 100.0},
        **{"rope_scaling": "linear", "rope_factor": 8.0, "query_scale": 0.3},
    },
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied_embeddings": False},
    "unrotated": {"rope_pattern": (True, False, True), "rope_scaling": "llama3"},
    "experts": {"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8},
    "mixed": {
        **{"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8},
        **{"expert_pattern": (False, True, True)},
    },
}


def make(**changes):
    config = dataclasses.replace(TINY, **changes)
    network = T.transformer(config)
    params = network.init(jax.random.key(0))
    # Constants at their start would hide a forgotten bias or norm.
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return network, treedef.unflatten(noisy)


def whole(network, params, tokens, lengths):
    b, l = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(l), (b, l))
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    return network.hidden(params, tokens, positions, segments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_extend_equals_hidden_on_ragged_rows(variant):
    network, params = make(**VARIANTS[variant])
    prompts, total, rows = jnp.array([5, 3, 1]), 11, 3
    tokens = jax.random.randint(jax.random.key(2), (rows, total), 0, TINY.vocab_size)
    expected, _ = whole(network, params, tokens, jnp.full(rows, total))

    extend = jax.jit(network.extend)
    cache = network.init_cache(rows, total + 2, params)
    columns = jnp.broadcast_to(jnp.arange(5), (rows, 5))
    live = columns < prompts[:, None]
    out, cache = extend(params, cache, tokens[:, :5], columns, live)
    np.testing.assert_allclose(
        np.where(live[:, :, None], out, 0.0),
        np.where(live[:, :, None], expected[:, :5], 0.0),
        atol=1e-5,
    )
    for step in range(total - 5):
        at = (prompts + step)[:, None]
        token = jnp.take_along_axis(tokens, at, axis=1)
        out, cache = extend(params, cache, token, at, jnp.ones((rows, 1), bool))
        wanted = jnp.take_along_axis(expected, at[:, :, None], axis=1)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_extend_writes_only_live_tokens():
    network, params = make()
    cache = network.init_cache(2, 4, params)
    tokens = jnp.ones((2, 2), jnp.int32)
    positions = jnp.array([[0, 1], [0, 9]])
    live = jnp.array([[True, False], [True, True]])
    _, cache = network.extend(params, cache, tokens, positions, live)
    written = np.array([[(np.asarray(part["k"]) != 0).any((1, 3))] for part in cache]).any((0, 1))
    assert written.tolist() == [[True, False, False, False], [True, False, False, False]]
