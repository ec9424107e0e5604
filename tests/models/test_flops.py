"""Model FLOPs of a forward pass, counted by hand on small shapes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jrl.models.config import ModelConfig
from jrl.models.flops import Lengths, attention_pairs, forward_flops, layer_matrices
from jrl.models.transformer import transformer

SMALL = ModelConfig(
    vocab_size=10,
    layers=3,
    embed_dim=4,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=6,
    max_length=32,
)
ATTENTION = 4 * (2 + 2 * 1 + 2) * 8  # q, k, v and o


def test_a_token_is_multiplied_with_every_matrix_of_dense_layers_and_with_its_own_experts():
    assert layer_matrices(SMALL) == 3 * (ATTENTION + 3 * 4 * 6)
    params = jax.eval_shape(transformer(SMALL).init, jax.random.key(0))
    matrices = [x.size for x in jax.tree.leaves(params["layers"]) if x.ndim > 2]
    assert layer_matrices(SMALL) == sum(matrices)
    sparse = ModelConfig(
        **{f: getattr(SMALL, f) for f in ("vocab_size", "layers", "embed_dim", "heads")},
        **{f: getattr(SMALL, f) for f in ("kv_heads", "head_dim", "mlp_dim", "max_length")},
        experts=8,
        experts_per_token=2,
        expert_mlp_dim=5,
    )
    assert layer_matrices(sparse) == 3 * (ATTENTION + 4 * 8 + 2 * 3 * 4 * 5)


@pytest.mark.parametrize("window", [None, 3])
def test_pairs_are_those_that_a_causal_mask_lets_through(window):
    sizes = Lengths(prompts=1, group=2, prompt=4, new=5)
    model = SMALL if window is None else ModelConfig(**vars_of(SMALL) | {"window": window})
    place = np.arange(9)
    visible = place[:, None] >= place[None]
    if window is not None:
        visible &= place[:, None] - place[None] < window
    assert attention_pairs(model, sizes) == 3 * (visible[:4].sum() + 2 * visible[4:].sum())


def vars_of(config):
    names = ("vocab_size", "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim")
    return {name: getattr(config, name) for name in (*names, "max_length")}


def test_a_forward_pass_counts_each_prompt_once_and_logits_of_completions_alone():
    sizes = Lengths(prompts=3, group=2, prompt=4, new=5)
    matrices, head = 3 * (ATTENTION + 72) * (4 + 10), 4 * 10 * 10
    pairs = attention_pairs(SMALL, sizes)
    assert forward_flops(SMALL, sizes) == 2 * 3 * (matrices + head + 2 * 2 * 8 * pairs)
