"""Training in environments: host and compiled mode agree, credit by turn, whole runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect.collector import Collector
from jrl.collect.device_episodes import episode_rollout, solution_batch
from jrl.collect.groups import to_batch
from jrl.collect.plan import Setting
from jrl.collect.sources import simple_request
from jrl.collect.sources_task import TaskSource
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.episodes import get_env
from jrl.errors import UserError
from jrl.evaluate.evaluator import episode_metrics
from jrl.evaluate.samples import samples_of
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.methods.plan import also
from jrl.objectives.transforms import completion_tokens, overlong_penalty, paid
from jrl.sampling.params import make_sampling_params
from jrl.setup.features import features_of
from jrl.setup.kinds import kind_of
from jrl.train.compiled import held_out, iterate, make_iteration, make_run
from jrl.train.loop import policy_weights
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.train.step_metrics import with_slot_use
from jrl.types.asks import Tokens

WEIGHTS = {"reward": 2.0, "success": 1.0}
PROMPTS, GROUP, STEPS, KEY = 4, 3, 2, jax.random.key(5)
SAMPLING = make_sampling_params(0.8)
ENV = get_env("guess_number", numbers=4, turns=4, cost=0.25)


@pytest.fixture(scope="module")
def network(make_bag):
    return make_bag(ENV.vocab_size, 8, ENV.prompt_tokens + ENV.completion_tokens)


@pytest.fixture(scope="module")
def draw(network, quick_jit):
    return quick_jit(
        partial(
            episode_rollout,
            sampling_params=SAMPLING,
            task=ENV,
            parts=WEIGHTS,
            network=network,
        )
    )


def assert_close(a, b, atol):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_host_and_compiled_agree(network, draw, quick_jit):
    """GiGPO for a few steps: the same tokens, metrics and weights."""
    method = get_method("gigpo")
    common = {"network": network, "objective": method.objective, "optimizer": optax.sgd(0.3)}
    step, fresh = make_step(**common), partial(init_state, KEY, **common)
    mesh, log, tokens, cursor = make_mesh({}, jax.devices()[:1]), [], [], 0
    setting = Setting(method, PROMPTS, GROUP, list(WEIGHTS.values()))
    collector = Collector(TaskSource(ENV, tuple(WEIGHTS), draw), setting, mesh)
    with jax.set_mesh(mesh):
        shardings = state_shardings(jax.eval_shape(fresh), mesh, network=network)
        state = jax.jit(fresh, out_shardings=shardings)()
        train = compile_step(step, shardings, mesh)
        for i in range(STEPS):
            weights = policy_weights(state)
            batch, groups, cursor = collector.collect(state.key, weights, step=i, cursor=cursor)
            tokens.append(batch.tokens)
            state, metrics = train(state, batch, SAMPLING)
            log.append(with_slot_use(jax.device_get(metrics | groups.counts)))

    def record_step(state, batch, sampling_params):
        state, metrics = step(state, batch, sampling_params)
        return state, metrics | {"tokens": batch.tokens}

    iteration = make_iteration(
        record_step,
        method=method,
        task=ENV,
        network=network,
        weights=WEIGHTS,
        prompts=PROMPTS,
        group=GROUP,
    )
    state_, start = fresh(), iteration.begin(fresh())
    run = quick_jit(partial(iterate, iteration, steps=STEPS))
    scanned, _, curves = run(state_, start, SAMPLING)
    assert np.array_equal(curves.pop("tokens"), np.stack(tokens))
    assert_close(scanned.params, state.params, 1e-5)
    assert curves.keys() == log[0].keys() >= {"turns", "slot_use"}
    for name, curve in curves.items():
        expected = np.stack([metrics[name] for metrics in log])
        np.testing.assert_allclose(curve, expected, atol=1e-5, rtol=1e-4, err_msg=name)
    assert 1 < curves["turns"].min() <= curves["turns"].max() <= ENV.turns


@pytest.fixture(scope="module")
def groups(network, draw):
    params = network.init(jax.random.key(0))
    tickets = jnp.arange(8, dtype=jnp.int32)
    return draw(simple_request(KEY, {"policy": params}, jnp.int32(1), tickets, GROUP))


@pytest.fixture(scope="module")
def batch(groups):
    weights = jnp.array(list(WEIGHTS.values()), jnp.float32)
    return to_batch(groups.rollout, groups.rewards, weights, groups.ids, groups.stats).check()


def test_rewards_stand_at_the_turns_that_earned_them(batch, groups):
    secret = np.asarray(groups.subject.state.secret)
    values, _, _ = paid().apply(batch.score(), batch, ())
    count = 0
    for n in range(8):
        for g in range(GROUP):
            expected = np.zeros(batch.mask.shape[2])
            last = int(batch.lengths[n, g]) - 1
            for t in np.flatnonzero(batch.mask[n, g]):  # a guess is one digit
                text = ENV.tokenizer.decode([int(batch.tokens[n, g, t])])
                right = text == str(secret[n])
                expected[t] = 2.0 if right else -0.5
                if right:
                    assert t == last
                    expected[t] += 1  # "success" is nobody's turn: it stands at the last token
                    count += 1
            np.testing.assert_allclose(values[n, g], expected, atol=1e-6)
    assert count > 2
    np.testing.assert_allclose(values.sum(2), batch.score(), atol=1e-6)
    bare, _, _ = paid().apply(batch.score(), batch.replace(stats={}), ())
    assert np.array_equal(bare, batch.score())


def test_gigpo_compares_turns_taken_in_the_same_state(batch):
    """Against loops over groups, states and turns."""
    method = get_method("gigpo", discount=0.9)
    advantage = method.objective.advantage
    got, _, _ = advantage.apply(batch.score(), batch, advantage.init())
    mask, score = np.asarray(batch.mask), np.asarray(batch.score(), np.float64)
    state, rewards = np.asarray(batch.ids["state"]), np.asarray(batch.stats["paid"], np.float64)
    success = np.asarray(batch.rewards)[:, :, 1]

    def normalised(values):
        values = np.array(values)
        deviation = values.std(ddof=1) if len(values) > 1 else 0.0
        return (values - values.mean()) / (deviation + 1e-6) if len(values) > 1 else 0 * values

    several = 0
    for n in range(8):
        episode_advantages = normalised(score[n])
        turns = {}
        for g in range(GROUP):
            total = success[n, g]  # weight 1, at the last turn
            for t in np.flatnonzero(mask[n, g])[::-1]:
                total = rewards[n, g, t] + (
                    total if t == mask[n, g].nonzero()[0][-1] else 0.9 * total
                )
                turns.setdefault(int(state[n, g, t]), []).append((g, t, total))
        for turns_in_state in turns.values():
            several += len(turns_in_state) > 1
            steps = normalised([total for *_, total in turns_in_state])
            for (g, t, _), step in zip(turns_in_state, steps, strict=True):
                np.testing.assert_allclose(got[n, g, t], episode_advantages[g] + step, atol=2e-3)
    assert several > 8


def test_lengths_in_losses_are_those_of_the_policys_tokens(batch):
    token_counts = np.asarray(batch.mask).sum(2)
    assert (token_counts < np.asarray(batch.lengths)).any()
    assert np.array_equal(completion_tokens(batch), token_counts)
    penalty = overlong_penalty(2, 0)
    values, _, _ = penalty.apply(jnp.zeros(token_counts.shape), batch, ())
    assert np.array_equal(values, -(token_counts > 2).astype(np.float32))
    stopped = np.asarray(batch.truncated)
    assert stopped.any()
    assert np.array_equal(stopped, np.asarray(batch.rewards)[:, :, 1] == 0)


@pytest.mark.slow
def test_a_run_learns_from_random_weights_for_all_seeds_at_once(network, quick_jit):
    run = make_run(
        method=get_method("gigpo"),
        task=get_env("guess_number", numbers=2, turns=2),
        network=network,
        optimizer=optax.adam,
        steps=80,
        prompts=8,
        group=8,
        weights={"reward": 1.0},
        eval_problems=16,
    )
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    _, curves = quick_jit(jax.vmap(run, (0, None)))(keys, {"learning_rate": 0.02})
    assert curves["accuracy_before"].shape == (2,)
    assert (curves["accuracy_before"] < 0.7).all()
    assert (curves["accuracy_after"] > 0.9).all()


def test_held_out_episodes_report_success_and_reward(network, quick_jit):
    ask = quick_jit(partial(held_out, task=ENV, network=network, problems=6, samples=2))
    groups = ask(KEY, network.init(jax.random.key(1)), SAMPLING)
    assert groups.rewards.shape == (6, 2, 2)
    success, reward = np.moveaxis(np.asarray(groups.rewards), 2, 0)
    turns = np.where(groups.rollout.mask, groups.ids["turn"] + 1, 0).max(2)
    np.testing.assert_allclose(reward, np.where(success, 1 - 0.25 * (turns - 1), -0.25 * turns))


def test_a_warm_start_learns_the_turns_and_not_the_replies():
    batch = solution_batch(KEY, task=ENV, count=6).check()
    for i in range(6):
        text = ENV.tokenizer.decode(batch.tokens[i, 0, : int(batch.lengths[i, 0])].tolist())
        mask = np.asarray(batch.mask[i, 0, : len(text)]).tolist()
        assert mask == [c.isdigit() for c in text]
        assert text[0] == "1"  # half of 0 to 3
    env = ENV._replace(solution=None)
    with pytest.raises(UserError, match="warmup.steps: the environment 'guess_number' has no"):
        solution_batch(KEY, task=env, count=2)


def test_methods_with_demonstrations_are_refused(network):
    tickets = np.arange(2, dtype=np.int32)
    request = simple_request(KEY, {"policy": None}, np.int32(0), tickets, 2)
    solution = Tokens(np.zeros((2, 1), np.int32), np.ones(2, np.int32))
    asks = (*request.asks, also(request.asks, 1, prefix=solution, prefix_as="given"))
    with pytest.raises(UserError, match="data.env: the method learns from demonstrations"):
        episode_rollout(
            request.replace(asks=asks),
            sampling_params=SAMPLING,
            task=ENV,
            parts=WEIGHTS,
            network=network,
        )


def test_a_method_that_drops_groups_cannot_have_players_in_them(network):
    dapo, grpo = get_method("dapo", max_tokens=9), get_method("grpo")
    one, both = (
        load_config(None, [f"data={{env='nim', opponent='{opponent}'}}"])
        for opponent in ("random", "self")
    )

    def check(config, method):
        parts = {"network": network, "model": None, "data": kind_of(config).features}
        check_features(features_of(config, method, **parts))

    with pytest.raises(UserError, match="'nim', of 2 players, does .* keeps some groups and drops"):
        check(both, dapo)
    with pytest.raises(UserError, match="2 players, does .* adapts: it learns from one group of"):
        check(both, get_method("mopps"))
    check(both, grpo)
    for method in (dapo, get_method("mopps")):
        check(one, method)


def test_samples_are_transcripts_by_turn(groups):
    for record in samples_of(groups, ENV.tokenizer, ENV, WEIGHTS, 6):
        turns = record["turns"]
        assert "".join(turn["text"] for turn in turns) == record["completion"]
        kinds = [turn["by"] for turn in turns]
        assert kinds == ["policy", "environment"] * (len(kinds) // 2) + ["policy"]
        assert sum(turn["paid"] for turn in turns) == pytest.approx(2 * record["rewards"]["reward"])
        assert all(turn["paid"] == 0 for turn in turns[1::2])
        assert record["prompt"] == "3:"
        assert record["stop"] == ("done" if record["rewards"]["success"] else "turns")


def test_evaluations_of_episodes_count_turns(groups):
    rewards = groups.rewards[:, :, ::-1]  # success, then reward, as in an evaluation
    metrics = episode_metrics(jax.device_get(groups._replace(rewards=rewards)))
    assert metrics["success"] == pytest.approx(float(np.mean(rewards[:, :, 0])))
    assert metrics["reward"] == pytest.approx(float(np.mean(rewards[:, :, 1])))
    assert metrics["turns"] == pytest.approx(float(groups.ids["stratum"].mean()))
