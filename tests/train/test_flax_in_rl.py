"""Linen and NNX modules as policies and value networks, through sampling and training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jrl.collect.groups import to_batch
from jrl.methods import get_method
from jrl.models.flax_bridge import linen_network, linen_value, nnx_network, nnx_value
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.train.state import init_state
from jrl.train.step import make_step

V, D, N, G, P, T = 13, 12, 4, 4, 3, 5
SAMPLING = make_sampling_params(0.8)
LENGTHS = np.array([1, 3, 2, 3], np.int32)


def mean_of_past(x, positions, segments):
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    sees = same & (positions[:, :, None] >= positions[:, None, :])
    return jnp.einsum("bqk,bkd->bqd", sees / jnp.maximum(sees.sum(2, keepdims=True), 1), x)


class LinenModule(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, tokens, positions, segments):
        x = nn.Embed(V, D)(tokens) + nn.Embed(P + T, D)(positions)
        x = nn.tanh(x + nn.Dense(D)(mean_of_past(x, positions, segments)))
        return nn.Dense(self.outputs)(x)


class LinenValue(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, segments):
        return LinenModule(1)(tokens, positions, segments)[..., 0]


class NnxModule(nnx.Module):
    def __init__(self, rngs, outputs=V):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.place = nnx.Embed(P + T, D, rngs=rngs)
        self.mix = nnx.Linear(D, D, rngs=rngs)
        self.head = nnx.Linear(D, outputs, rngs=rngs)

    def __call__(self, tokens, positions, segments):
        x = self.embed(tokens) + self.place(positions)
        return self.head(nnx.tanh(x + self.mix(mean_of_past(x, positions, segments))))


class NnxValue(nnx.Module):
    def __init__(self, rngs):
        self.trunk = NnxModule(rngs, 1)

    def __call__(self, *inputs):
        return self.trunk(*inputs)[..., 0]


POLICIES = {
    "linen": lambda: linen_network(LinenModule(V), vocab_size=V, max_length=P + T),
    "nnx": lambda: nnx_network(NnxModule, vocab_size=V, max_length=P + T),
}
VALUES = {"linen": lambda: linen_value(LinenValue()), "nnx": lambda: nnx_value(NnxValue)}
METHODS = {
    "grpo": get_method("grpo", kl_coef=0.05),
    "ppo": get_method("ppo", value_clip=None, whiten=False),
}


def sampled(network, params, jit):
    """A batch drawn from the policy; a completion's points are how often it says 7."""
    tokens = np.random.default_rng(0).integers(0, V, (N, P)).astype(np.int32)
    run = partial(generate, network=network, group=G, max_new_tokens=T, stop_tokens=(1, 2))
    ids = np.arange(N, dtype=np.int32)
    rollout, _ = jit(run)(jax.random.key(2), params, tokens, LENGTHS, SAMPLING, jnp.int32(0), ids)
    points = ((rollout.tokens == 7) & rollout.mask).sum(-1, keepdims=True).astype(jnp.float32)
    return to_batch(rollout, points, jnp.ones(1))


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("linen", "grpo"),
        ("nnx", "ppo"),
        pytest.param("nnx", "grpo", marks=pytest.mark.slow),
        pytest.param("linen", "ppo", marks=pytest.mark.slow),
    ],
)
def test_a_module_is_sampled_and_trained(policy, name, quick_jit):
    """PPO's value network is a module of the other kind."""
    network, objective = POLICIES[policy](), METHODS[name].objective
    value = VALUES["linen" if policy == "nnx" else "nnx"]() if METHODS[name].value else None
    common = {
        "network": network,
        "objective": objective,
        "optimizer": optax.adam(0.03),
        "value": value,
    }
    state = quick_jit(partial(init_state, **common))(jax.random.key(1))
    batch = sampled(network, state.params["policy"], quick_jit)
    assert len(set(np.asarray(batch.lengths).ravel().tolist())) > 1
    assert float(batch.rewards.std()) > 0
    step = quick_jit(make_step(**common))
    log, start = [], state
    for _ in range(8):
        state, metrics = step(state, batch, SAMPLING)
        log.append(jax.device_get(metrics))
    # The trainer sees the distribution that the sampler drew from.
    assert log[0]["logprob_diff"] < 1e-5
    assert log[0]["approx_kl"] < 1e-8 < log[7]["approx_kl"]
    assert all(x["skipped_updates"] == 0 for x in log)
    for part in start.params:
        differences = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max()), start.params[part], state.params[part]
        )
        assert max(jax.tree.leaves(differences)) > 1e-2, part
    if value is not None:
        assert log[7]["value_loss"] < 0.7 * log[0]["value_loss"]
    else:
        assert log[0]["kl"] == pytest.approx(0, abs=1e-7)
        assert log[7]["kl"] > 1e-6
        assert jax.tree.structure(state.frozen["ref"]) == jax.tree.structure(state.params["policy"])
