"""Model FLOPs and floors, counted by hand on small shapes and against published sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.mesh import batch_shards, lone_axes, make_mesh
from jrl.models.flops import layer_matrices
from jrl.models.gpu import STEPS
from jrl.plan.lower import abstract_run
from jrl.plan.memory import cache_bytes
from jrl.plan.topology import parse_topology
from jrl.plan.useful import decoding, floor_seconds, loop_trips, model_flops
from jrl.setup.gather import slots_on_chip, token_bytes

CONFIGS = Path(__file__).parents[2] / "configs"


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
    traffic = decoding(pod, pod.mesh)
    each = 2 * 36 * 8 * 128 * 2
    assert traffic.steps == 1024
    assert traffic.cache == each * (128 * 512 + 1024 * 1025 / 2)
    matrices = layer_matrices(pod.shape) + 4096 * 151936
    norms = 4096 * (2 * 36 + 1) + 2 * 36 * 128
    assert traffic.weights == 2 * (matrices + norms)
    # of 1,024 columns blocks of 128: on average four and a half of the eight
    assert traffic.live == {"read_cache": 4.5 / 8, "splash": 0.75}
    few = pod._replace(
        config=pod.config.model_copy(
            update={"sampling": pod.config.sampling.model_copy(update={"slots": 256})}
        )
    )
    queued = decoding(few, few.mesh)
    assert queued.steps == 4 * 1024
    assert queued.cache == each * (32 * 512 + 256 * 1025 / 2)


def test_on_a_gpu_a_turn_of_the_decode_loop_is_several_tokens(pod):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    mesh = SimpleNamespace(shape=pod.mesh.shape, devices=np.array([gpu], object))
    assert decoding(pod, mesh).live == {"attend_cache": 16.5 / 32}  # blocks of 32 columns
    trips = loop_trips(pod, mesh, "sampler")
    assert trips["decode"] * STEPS == loop_trips(pod, pod.mesh, "sampler")["decode"] == 1024


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
        slots = slots_on_chip(64, mesh.shape, gathered)
        assert slots == (64 if alone else 64 // batch_shards(mesh)), (axes, gathered)
        assert slots_on_chip(0, mesh.shape, gathered) == 0


def test_a_token_of_an_8_bit_cache_has_a_scale_for_each_vector(pod):
    assert token_bytes(pod.shape, 4, []) == 2 * 36 * 2 * 128 * 2
    assert token_bytes(pod.shape, 4, ["cache"]) == 2 * 36 * 2 * (128 + 4)
    short = pod.config.sampling.model_copy(update={"int8": ["cache"]})
    run = pod._replace(config=pod.config.model_copy(update={"sampling": short}))
    assert decoding(run, run.mesh).cache == decoding(pod, pod.mesh).cache * 132 / 256
    assert cache_bytes(run) == cache_bytes(pod) * 132 / 256
