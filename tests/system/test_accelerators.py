"""Packages of the accelerators' extras: plugins that compile the policy without the chip."""

import os
import subprocess
import sys

import pytest

POLICY = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer

shape = ModelConfig(vocab_size=48, layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8,
                    mlp_dim=32, max_length=32)
network = transformer(shape)
place = SingleDeviceSharding(devices[0])
params = jax.eval_shape(network.init, jax.random.key(0))
tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

def scores(params, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = network.hidden(params, tokens, places, jnp.ones_like(tokens))
    return network.logits(params, hidden)

compiled = jax.jit(scores, in_shardings=place, out_shardings=place).lower(params, tokens).compile()
print(compiled.memory_analysis().argument_size_in_bytes, compiled.as_text().count("fusion"))
"""
TPU = """
from jrl.plan.topology import parse_topology, compile_devices
devices = compile_devices(parse_topology("v5e:2x2"))
"""
GPU = """
from jrl.plan.topology import parse_topology, compile_devices
devices = compile_devices(parse_topology("h100x1"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "chip",
    [
        pytest.param(TPU, marks=pytest.mark.extra("tpu"), id="tpu"),
        pytest.param(GPU, marks=pytest.mark.extra("cuda12"), id="cuda12"),
        pytest.param(GPU, marks=pytest.mark.extra("cuda13"), id="cuda13"),
    ],
)
def test_the_policy_is_compiled_for_a_chip_that_is_not_here(chip):
    # XLA_FLAGS are those of another backend.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", chip + POLICY], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    arguments, fusions = map(int, done.stdout.split())
    assert arguments > 4 * 48 * 16  # the embedding alone, in float32
    assert fusions > 0
