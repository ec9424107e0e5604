"""Model FLOPs and floors, counted by hand on small shapes and against published sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jrl.config_io import load_config
from jrl.mesh import batch_shards, lone_axes, make_mesh
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.plan.lower import abstract_run
from jrl.plan.memory import cache_bytes
from jrl.plan.topology import parse_topology
from jrl.plan.useful import (
    Lengths,
    attention_pairs,
    decoding,
    floor_seconds,
    forward_flops,
    layer_matrices,
    model_flops,
)
from jrl.train.gather import slots_on_chip, token_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
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
    seen = place[:, None] >= place[None]
    if window is not None:
        seen &= place[:, None] - place[None] < window
    assert attention_pairs(model, sizes) == 3 * (seen[:4].sum() + 2 * seen[4:].sum())


def vars_of(config):
    names = ("vocab_size", "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim")
    return {name: getattr(config, name) for name in (*names, "max_length")}


def test_a_forward_pass_counts_each_prompt_once_and_logits_of_completions_alone():
    sizes = Lengths(prompts=3, group=2, prompt=4, new=5)
    matrices, head = 3 * (ATTENTION + 72) * (4 + 10), 4 * 10 * 10
    pairs = attention_pairs(SMALL, sizes)
    assert forward_flops(SMALL, sizes) == 2 * 3 * (matrices + head + 2 * 2 * 8 * pairs)


@pytest.fixture(scope="module")
def pod():
    """The 8B-class configuration on a mesh of one device, as which any chip counts."""
    config = load_config(CONFIGS / "pod_8b_v6e.toml", ["mesh={data=1}", "sampling.mesh={}"])
    return abstract_run(config, make_mesh({}, jax.devices()[:1]))


def test_the_8b_step_on_64_chips_of_v6e_takes_at_least_0_89_seconds(pod):
    """By hand: 6 FLOPs for each of 6.95e9 weights and token, the head's, and 1.9e15 of pairs."""
    tokens, completions = 128 * (512 + 8 * 1024), 128 * 8 * 1024
    pairs = 128 * (512 * 513 / 2 + 8 * (1024 * 512 + 1024 * 1025 / 2))
    layer = 4096 * (32 + 2 * 8 + 32) * 128 + 3 * 4096 * 12288
    by_hand = 6 * (36 * layer * tokens + 4096 * 151936 * completions)
    by_hand += 12 * 36 * 32 * 128 * pairs
    assert model_flops(pod, "train_step") == pytest.approx(by_hand)
    topology = parse_topology("v6e:8x8")
    assert floor_seconds(pod, pod.mesh, topology, "train_step") == pytest.approx(0.8898, abs=1e-4)
    assert model_flops(pod, "sampler") == model_flops(pod, "train_step") / 3
    assert model_flops(pod, "resharding") == 0


def test_decoding_reads_weights_and_the_live_part_of_the_cache_for_every_token(pod):
    found = decoding(pod, pod.mesh)
    each = 2 * 36 * 8 * 128 * 2
    assert found.steps == 1024
    assert found.cache == each * (128 * 512 + 1024 * 1025 / 2)
    matrices = layer_matrices(pod.shape) + 4096 * 151936
    norms = 4096 * (2 * 36 + 1) + 2 * 36 * 128
    assert found.weights == 2 * (matrices + norms)
    # of 1,024 columns blocks of 128: on average four and a half of the eight
    assert found.live == {"read_cache": 4.5 / 8, "splash": 0.75}
    few = pod._replace(
        config=pod.config.model_copy(
            update={"sampling": pod.config.sampling.model_copy(update={"slots": 256})}
        )
    )
    queued = decoding(few, few.mesh)
    assert queued.steps == 4 * 1024
    assert queued.cache == each * (32 * 512 + 256 * 1025 / 2)


def test_slots_are_of_each_device_that_samples_by_itself_else_of_all():
    """As ``mesh.lone_axes`` has it, which the sampler asks."""
    devices = jax.devices()[:8]
    for axes, gathered in (
        ({"data": 8}, True),
        ({"fsdp": 8}, True),
        ({"fsdp": 8}, False),
        ({"data": 2, "fsdp": 4}, False),
        ({"data": 2, "tensor": 4}, True),
        ({"fsdp": 2, "expert": 4}, True),
    ):
        mesh = make_mesh(axes, devices)
        with jax.set_mesh(mesh):
            alone = bool(lone_axes(gathered))
        found = slots_on_chip(64, mesh.shape, gathered)
        assert found == (64 if alone else 64 // batch_shards(mesh)), (axes, gathered)
        assert slots_on_chip(0, mesh.shape, gathered) == 0


def test_a_token_of_an_8_bit_cache_has_a_scale_for_each_vector(pod):
    assert token_bytes(pod.shape, 4, []) == 2 * 36 * 2 * 128 * 2
    assert token_bytes(pod.shape, 4, ["cache"]) == 2 * 36 * 2 * (128 + 4)
    short = pod.config.sampling.model_copy(update={"int8": ["cache"]})
    run = pod._replace(config=pod.config.model_copy(update={"sampling": short}))
    assert decoding(run, run.mesh).cache == decoding(pod, pod.mesh).cache * 132 / 256
    assert cache_bytes(run) == cache_bytes(pod) * 132 / 256
