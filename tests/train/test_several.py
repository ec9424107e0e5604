"""Several policies in one run: each draws and learns for its own player, and for that one alone."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.device_episodes import episode_rollout
from jrl.collect.groups import to_batch
from jrl.collect.sources import simple_request
from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.models import hf
from jrl.run.export import export_run
from jrl.run.run import train
from jrl.serving.launch import served_policy
from jrl.setup.frozen import frozen_params
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build, programs
from jrl.train.loop import policy_weights
from jrl.train.step import make_step
from jrl.train.trainable import check_trainable
from jrl.zoo.networks.policies import SUMMED, Policies, divided_batch, one_of

NIM = 'data={env="nim",heaps=2,most=3,opponent="self",illegal=-0.2}'
LINES = (
    NIM,
    "method=grpo",
    "objective.policies=2",
    "objective.swap_every=2",
    "optimizer.learning_rate=0.02",
    "optimizer.warmup_steps=0",
    "model.config.layers=1",
    "model.config.embed_dim=16",
    "model.config.heads=2",
    "model.config.kv_heads=1",
    "model.config.head_dim=8",
    "model.config.mlp_dim=16",
    "sampling.group=6",
    "train.prompts=6",
    "train.steps=4",
    "eval.problems=8",
)


def settings(directory, *more):
    here = f"run.dir={json.dumps(str(directory))}"
    return load_config("configs/gridworld.toml", [here, *LINES, *more])


def far_apart(params):
    """Both policies, so different that what the wrong one drew would be seen."""
    return jax.tree.map(lambda x: jnp.stack([x[0], 3 * x[1]]), params)


def test_each_policy_draws_for_its_player_and_is_trained_on_that_players_groups():
    run = build.setup(settings("unused", "train.mode=host"))
    policies, schedule = run.method.network, run.method.schedule
    make, _ = programs.state_layout(run)
    state = jax.jit(make)(jax.random.key(0), None, {})
    state = state.replace(params=far_apart(state.params))
    options = {"task": run.task, "network": run.network, "parts": {"reward": 1.0}}
    draw = jax.jit(functools.partial(episode_rollout, slots=8, **options))
    step = jax.jit(programs.make_train_step(run))
    parts = {"objective": run.method.objective, "optimizer": run.optimizer}
    alone = jax.jit(
        make_step(network=run.network.extras.derived.network, **parts, schedule=schedule)
    )
    ids, weights, sampling_params = jnp.arange(6, dtype=jnp.int32), jnp.ones(1), run.sampling_params
    for number in (0, 2):  # policies have swapped players at the second
        state = state.replace(step=jnp.int32(number))
        request = simple_request(state.key, policy_weights(state), state.step, ids, 6)
        groups = draw(request, sampling_params=sampling_params)
        rows = groups.rollout, groups.rewards, weights, groups.ids, groups.stats
        batch = to_batch(*rows, sampled=True)
        after, metrics = step(state, batch, sampling_params)
        assert metrics["logprob_diff"] < 1e-5
        divided, metrics_apart = divided_batch(batch, policies, number), []
        for policy in range(2):
            part, player = one_of(divided, policy), (policy - number // 2) % 2
            # Of a start's two groups the one of this player.
            np.testing.assert_array_equal(part.mask, batch.mask[player::2])
            assert (part.ids["role"][part.mask] == player).all()
            names = ("params", "opt_state", "method")
            parts_of_state = {name: one_of(getattr(state, name), policy) for name in names}
            expected, metrics_alone = alone(state.replace(**parts_of_state), part, sampling_params)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5),
                one_of((after.params, after.opt_state), policy),
                (expected.params, expected.opt_state),
            )
            metrics_apart.append(metrics_alone)
        assert metrics["policy_rewards"].tolist() == [float(x["reward"]) for x in metrics_apart]
        for name in SUMMED:
            assert metrics.get(name) == (
                sum(x[name] for x in metrics_apart) if name in metrics else None
            )
        assert int(after.step) == number + 1
        # Scored by each other, they differ from what was drawn.
        wrong = state.replace(params=jax.tree.map(lambda x: x[::-1], state.params))
        assert step(wrong, batch, sampling_params)[1]["logprob_diff"] > 1e-2


def test_a_frozen_copy_plays_and_is_renewed_in_time():
    lines = ("objective.copy_every=2", "objective.swap_every=0", "method=reinforce")
    run = build.setup(settings("unused", "train.mode=host", *lines))
    make, _ = programs.state_layout(run)
    state = jax.jit(make)(jax.random.key(0), None, {})
    state = state.replace(params=far_apart(state.params))
    options = {"task": run.task, "network": run.network, "parts": {"reward": 1.0}}
    draw = functools.partial(episode_rollout, slots=8, **options)
    ids, sampling_params = jnp.arange(6, dtype=jnp.int32), run.sampling_params
    step = programs.make_train_step(run)

    @jax.jit
    def both(state):
        request = simple_request(state.key, policy_weights(state), state.step, ids, 6)
        groups = draw(request, sampling_params=sampling_params)
        rows = groups.rollout, groups.rewards, jnp.ones(1), groups.ids, groups.stats
        batch = to_batch(*rows, sampled=True)
        return *step(state, batch, sampling_params), batch

    equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    for number in range(2):
        before, (state, metrics, batch) = state, both(state)
        first, other = (one_of(state.params, i) for i in range(2))
        assert metrics["logprob_diff"] < 1e-5
        scores = [batch.score()[i::2] for i in range(2)]
        living = [batch.members[i::2] for i in range(2)]
        means = [(x * m).sum() / max(m.sum(), 1) for x, m in zip(scores, living, strict=True)]
        np.testing.assert_allclose(metrics["policy_rewards"], means, rtol=1e-6)
        changed = jax.tree.map(lambda a, b: (a != b).any(), first, one_of(before.params, 0))
        assert any(jax.tree.leaves(changed))
        equal(other, first if number == 1 else one_of(before.params, 1))
    assert run.method.network == Policies(2, trained=1)


def numbers(directory):
    timed = CLOCKS | {"rollout_seconds"}
    lines = [r for r in read_jsonl(directory / "metrics.jsonl") if "loss" in r]
    return [{k: v for k, v in r.items() if k not in timed} for r in lines]


def test_a_run_is_the_same_in_both_modes_and_resumes_bit_for_bit(tmp_path):
    for mode in ("compiled", "host"):
        train(settings(tmp_path / mode, f"train.mode={mode}"), echo=lambda line: None)
    both = (numbers(tmp_path / mode) for mode in ("compiled", "host"))
    for one, other in zip(*both, strict=True):
        assert one.keys() == other.keys() >= {"reward/policy_0", "reward/policy_1"}
        for name, value in one.items():
            assert value == pytest.approx(other[name], abs=1e-4), name
    for steps in (2, 4):
        halves = settings(tmp_path / "halves", "train.mode=host", f"train.steps={steps}")
        train(halves, echo=lambda line: None)
    assert numbers(tmp_path / "halves") == numbers(tmp_path / "host")
    check_what_others_read(tmp_path)


def check_what_others_read(root):
    """The policies of a finished run as checkpoints of their own, and as a frozen one."""
    config = settings(root / "host", "train.mode=host")
    run = build.setup(config, trains=False)
    with jax.set_mesh(run.mesh):
        _, weights, _ = load_policy(run, None)
    embeds = []
    for policy in range(2):
        export_run(config, root / f"policy_{policy}", policy=policy)
        _, tensors = hf.open_checkpoint(root / f"policy_{policy}")
        embeds.append(np.asarray(hf.in_memory(tensors)["embed"]))
        np.testing.assert_array_equal(embeds[-1], weights["embed"][policy])
    assert (embeds[0] != embeds[1]).any()
    served = served_policy(config, checkpoint=None)
    np.testing.assert_array_equal(served.params["embed"], weights["embed"])
    reads = load_config("configs/gridworld.toml", [f"frozen.ref={json.dumps(config.run.dir)}"])
    np.testing.assert_array_equal(frozen_params(reads, "ref")["embed"], embeds[0])
    with pytest.raises(UserError, match="--policy 2: the run trained 2, numbered from 0"):
        export_run(config, root / "policy_2", policy=2)


def set_up(config):
    check_trainable(build.setup(config))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((NIM.replace("self", "perfect"),), "objective.policies = 2: each policy plays as many"),
        (("objective.policies=3",), "the environment has 2 for the policy"),
        (("sampling.int8=['weights']",), "does not go with sampling.int8 = ['weights']"),
        (("sampling.float8=weights",), "does not go with sampling.float8 = ['weights']"),
        (("train.mode=packed",), "does not go with train.mode = 'packed'"),
        (
            ("objective.policies=1", "objective.swap_every=0", "objective.copy_every=2"),
            "objective.copy_every = 2: one policy plays all players",
        ),
        (
            ("lora.rank=2",),
            "objective.policies = 2 does not go with [lora]: all weights are trained; remove",
        ),
    ],
)
def test_what_several_policies_cannot_have_is_said_first(tmp_path, more, message):
    with pytest.raises(UserError) as error:
        set_up(settings(tmp_path, "train.mode=host", *more))
    assert message in str(error.value)
