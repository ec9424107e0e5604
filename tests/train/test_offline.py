"""Offline runs: from random episodes alone, values make a policy better than its teacher."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jrl.collect.device_episodes import episode_rollout
from jrl.collect.groups import to_batch
from jrl.collect.sources import simple_request
from jrl.config import load_config
from jrl.episodes import get_env
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run.export import export_run
from jrl.sampling.params import make_sampling_params
from jrl.train import build
from jrl.train.compiled import held_out
from jrl.train.loop import policy_weights
from jrl.train.state import init_state
from jrl.train.step import make_step

ENV = get_env("guess_number", numbers=8, cost=0.1)
PLAIN = transformer(
    ModelConfig(
        vocab_size=ENV.vocab_size,
        layers=1,
        embed_dim=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        mlp_dim=64,
        max_length=ENV.prompt_tokens + ENV.completion_tokens,
    )
)
STARTS, GROUP, ROWS, STEPS = 192, 8, 32, 400


@pytest.mark.parametrize(("name", "more"), [("ilql", {"follow": 0.05}), ("mc_returns", {})])
def test_values_learned_from_random_episodes_lean_the_policy_to_better_ones(name, more):
    method, sampling_params = get_method(name, beta=16.0, **more), make_sampling_params()
    network = method.network(PLAIN)
    parts = {"network": network, "objective": method.objective, "optimizer": optax.adam(3e-3)}
    state, key = init_state(jax.random.key(0), **parts), jax.random.key(1)
    options = {"task": ENV, "network": network, "parts": {"reward": 1.0}}
    draw = functools.partial(episode_rollout, sampling_params=sampling_params, **options)
    ids = jnp.arange(STARTS, dtype=jnp.int32)
    request = simple_request(key, policy_weights(state), jnp.int32(0), ids, GROUP)
    groups = jax.jit(draw)(request)
    rows = groups.rollout, groups.rewards, jnp.ones(1), groups.ids, groups.stats
    sampled_batch = to_batch(*rows, sampled=True)
    step = make_step(**parts, schedule=method.schedule)

    def one(state, number):
        chosen = jax.random.randint(jax.random.fold_in(key, number), (ROWS,), 0, STARTS)
        part = jax.tree.map(lambda x: x[chosen], sampled_batch.replace(reward_weights=None))
        part = part.replace(reward_weights=sampled_batch.reward_weights)
        state, metrics = step(state, part, sampling_params)
        return state, metrics["loss"]

    state, losses = jax.jit(lambda s: jax.lax.scan(one, s, jnp.arange(STEPS)))(state)
    assert jnp.isfinite(losses).all()
    ask = {"sampling_params": sampling_params, "task": ENV, "problems": 256}

    def solved(beta):
        leaning = get_method(name, beta=beta, **more).network(PLAIN)
        run_heldout = jax.jit(functools.partial(held_out, network=leaning, **ask))
        return float(run_heldout(key, state.params["policy"]).rewards[..., 0].mean())

    cloned, leaning = solved(0.0), solved(16.0)
    taught = float(groups.rewards[..., 0].mean())
    assert taught < 0  # points of the random episodes, which mostly fail
    assert cloned < 0.3
    assert leaning > cloned + 0.15


def test_what_a_policy_with_values_cannot_have_is_said(tmp_path):
    lines = ["method=ilql", "train.mode=host", f'run.dir="{tmp_path}"']
    with pytest.raises(UserError, match="has further parameters, does not go with .lora"):
        build.setup(load_config("configs/gridworld.toml", [*lines, "lora.rank=2"]))
    config = load_config("configs/gridworld.toml", lines)
    with pytest.raises(UserError, match="a Hugging Face checkpoint has no place for them"):
        export_run(config, tmp_path / "out")
