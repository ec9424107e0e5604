"""Whole runs as one program, against the host's loop and against themselves one by one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect.collector import Collector
from jrl.collect.plan import Setting
from jrl.collect.plan_tools import TaskTools
from jrl.collect.sources_task import TaskSource, task_rollout
from jrl.config.optimizer import Optimizer
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import Plan, find_method, get_method
from jrl.methods.plan import demonstrated, greedy_baseline
from jrl.methods.schedule import Schedule, copies, every, restart
from jrl.sampling.params import make_sampling_params
from jrl.train.compiled import (
    held_out,
    iterate,
    make_iteration,
    make_run,
    solution_batch,
    warm_start,
    with_policy,
)
from jrl.train.loop import policy_weights
from jrl.train.optimizer import make_optimizer
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.train.step_metrics import with_slot_use

WEIGHTS = {"verify": 1.0, "partial": 0.5}
PROMPTS, GROUP, STEPS = 4, 3, 3
KEY = jax.random.key(5)
SAMPLING = make_sampling_params(0.8)


@pytest.fixture(scope="module")
def task(first_letter):
    return first_letter


@pytest.fixture(scope="module")
def network(make_bag, task):
    return make_bag(task.vocab_size, 8, task.prompt_tokens + task.completion_tokens)


def assert_close(a, b, atol):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


# ---------------------------------------------------------------- against the host


def test_host_and_compiled_agree(network, task, quick_jit):
    """Several steps, with a greedy member and a solution: the same tokens, metrics, weights."""
    both = lambda asks, view: demonstrated(1)(greedy_baseline(asks, view), view)  # noqa: E731
    method = get_method("grpo")._replace(plan=Plan(both))
    common = {"network": network, "objective": method.objective, "optimizer": optax.sgd(0.3)}
    step = make_step(**common)
    fresh = partial(init_state, KEY, **common)

    mesh = make_mesh({}, jax.devices()[:1])
    draw = quick_jit(
        partial(
            task_rollout,
            sampling_params=SAMPLING,
            task=task,
            parts=tuple(WEIGHTS),
            network=network,
        )
    )
    log, tokens_by_step, prompt_ids, cursor = [], [], [], 0
    weights, tools = list(WEIGHTS.values()), partial(TaskTools, task)
    setting = Setting(method, PROMPTS, GROUP, weights, tools=tools)
    collector = Collector(TaskSource(task, tuple(WEIGHTS), draw), setting, mesh)
    with jax.set_mesh(mesh):
        shardings = state_shardings(jax.eval_shape(fresh), mesh, network=network)
        state = jax.jit(fresh, out_shardings=shardings)()
        train = compile_step(step, shardings, mesh)
        for i in range(STEPS):
            weights = policy_weights(state)
            batch, groups, cursor = collector.collect(state.key, weights, step=i, cursor=cursor)
            tokens_by_step.append(groups.rollout.tokens)
            prompt_ids.append(batch.ids["prompt"])
            state, metrics = train(state, batch, SAMPLING)
            log.append(with_slot_use(jax.device_get(metrics | groups.counts)))

    tokens = []

    def record_step(state, batch, sampling_params):
        state, metrics = step(state, batch, sampling_params)
        return state, metrics | {"tokens": batch.tokens, "ids": batch.ids["prompt"]}

    iteration = make_iteration(
        record_step,
        method=method,
        task=task,
        network=network,
        weights=WEIGHTS,
        prompts=PROMPTS,
        group=GROUP,
    )
    state_, start = fresh(), iteration.begin(fresh())
    run = quick_jit(partial(iterate, iteration, steps=STEPS))
    scanned, _, curves = run(state_, start, SAMPLING)
    tokens = curves.pop("tokens")
    assert np.array_equal(tokens, np.stack(tokens_by_step))
    assert tokens.shape == (STEPS, PROMPTS, GROUP + 2, task.completion_tokens)
    assert np.array_equal(np.ravel(curves.pop("ids")), np.arange(STEPS * PROMPTS))
    assert np.array_equal(np.ravel(prompt_ids), np.arange(STEPS * PROMPTS))
    assert int(scanned.step) == int(state.step) == STEPS
    assert_close(scanned.params, state.params, 1e-5)
    assert curves.keys() == log[0].keys()
    for name, curve in curves.items():
        expected = np.stack([metrics[name] for metrics in log])
        np.testing.assert_allclose(curve, expected, atol=1e-5, rtol=1e-4, err_msg=name)


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def run(network, task):
    return make_run(
        method=get_method("grpo"),
        task=task,
        network=network,
        optimizer=optax.adam,
        steps=STEPS,
        prompts=PROMPTS,
        group=GROUP,
        weights=WEIGHTS,
        warmup={"steps": 4, "batch": 8, "learning_rate": 0.05},
        eval_problems=16,
    )


@pytest.fixture(scope="module")
def one(run, quick_jit):
    """(seed, learning rate, temperature) -> (state, curves) of a single run."""
    program = quick_jit(run)

    def call(seed, rate=0.05, temperature=1.0):
        key = jax.random.key(seed)
        return program(key, {"learning_rate": rate, "temperature": temperature})

    return call


def test_a_run_is_a_function_of_its_key_and_hyperparameters(one):
    state, curves = one(0)
    again, same = one(0)
    assert_close((again.params, same), (state.params, curves), 0)
    assert curves["reward"].shape == (STEPS,)
    assert curves["accuracy_before"].shape == curves["accuracy_after"].shape == ()
    assert int(state.step) == STEPS
    embed = lambda out: np.asarray(out[0].params["policy"]["embed"])  # noqa: E731
    first = embed((state, curves))
    for other in (one(1), one(0, rate=0.01), one(0, temperature=0.5)):
        assert not np.allclose(embed(other), first, atol=1e-4)
    # Temperature is the sampling_params's: colder draws are likelier ones.
    cold, hot = one(0, temperature=0.3)[1], one(0, temperature=2.0)[1]
    assert cold["entropy"][0] < curves["entropy"][0] < hot["entropy"][0]
    # No learning, no change after the warm start.
    still, _ = one(0, rate=0.0)
    change = np.abs(embed((still, None)) - first).max()
    assert change > 1e-3


def test_many_seeds_at_once(run, one, quick_jit):
    keys = jnp.stack([jax.random.key(0), jax.random.key(1)])
    hyperparameters = {"learning_rate": 0.05, "temperature": 1.0}
    states, curves = quick_jit(jax.vmap(run, (0, None)))(keys, hyperparameters)
    for seed in range(2):
        state, single = one(seed)
        mine = jax.tree.map(lambda x, seed=seed: x[seed], (states.params, curves))
        assert np.array_equal(mine[1]["completion_tokens"], single["completion_tokens"])
        assert_close(mine, (state.params, single), 2e-4)


def test_unknown_hyperparameters(run):
    with pytest.raises(UserError, match="'momentum' is unknown; choose from.*learning_rate"):
        run(KEY, {"learning_rate": 0.1, "momentum": 0.9})


# ---------------------------------------------------------------- warm start and evaluation


def test_solutions_are_right(task, quick_jit):
    batch = quick_jit(partial(solution_batch, task=task, count=6))(KEY).check()
    assert batch.tokens.shape == (6, 1, task.completion_tokens)
    for i in range(6):
        n = int(batch.lengths[i, 0])
        assert int(batch.tokens[i, 0, n - 1]) == task.stop_id
        assert np.asarray(batch.mask[i, 0]).tolist() == [
            k < n for k in range(task.completion_tokens)
        ]
    problems = jax.vmap(lambda k: task.generate(k, "train"))(jax.random.split(KEY, 6))
    assert np.array_equal(batch.prompt_tokens, problems.tokens)
    right = jax.vmap(task.verify)(problems, batch.tokens[:, 0], batch.lengths[:, 0])
    assert np.all(np.asarray(right) == 1)


def test_the_warm_start_learns_the_solutions(network, task, quick_jit):
    params = network.init(jax.random.key(1))
    start = partial(warm_start, task=task, network=network, batch=16, learning_rate=0.03)
    trained, losses = quick_jit(partial(start, steps=30))(KEY, params)
    assert losses.shape == (30,)
    assert losses[-5:].mean() < 0.6 * losses[0]
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    # Every update has examples of its own.
    assert len(set(np.asarray(losses).tolist())) == 30


def test_held_out_problems_stay_the_same(network, task, quick_jit):
    params = network.init(jax.random.key(1))
    ask = quick_jit(partial(held_out, task=task, network=network, problems=8, samples=2))
    a, b = (
        ask(KEY, params, make_sampling_params()),
        ask(KEY, jax.tree.map(jnp.negative, params), make_sampling_params()),
    )
    assert a.rewards.shape == (8, 2, 1)
    assert np.array_equal(a.subject.tokens, b.subject.tokens)
    assert not np.array_equal(a.rollout.tokens, b.rollout.tokens)
    other = ask(jax.random.key(6), params, make_sampling_params())
    assert not np.array_equal(a.subject.tokens, other.subject.tokens)
    assert int(a.subject.tokens.min()) >= 7  # of the eval split


def test_with_policy_starts_afresh(network):
    method = get_method("grpo", kl_coef=0.1)
    optimizer = optax.adam(0.1)
    state = init_state(KEY, network=network, objective=method.objective, optimizer=optimizer)
    used = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    policy = network.init(jax.random.key(9))
    out = with_policy(used, policy, optimizer)
    assert out.params["policy"] is policy
    assert_close(out.frozen["ref"], policy, 0)
    assert out.frozen["ref"]["embed"].unsafe_buffer_pointer() != (
        policy["embed"].unsafe_buffer_pointer()
    )
    assert_close(out.opt_state, state.opt_state, 0)
    schedule = Schedule(after=(copies("expert", every(2)), restart("first", every(4))))
    common = {"objective": method.objective, "optimizer": optimizer, "schedule": schedule}
    state = init_state(KEY, network=network, **common)
    warm = with_policy(state, policy, optimizer, unchanged_policies=("expert",)).frozen
    assert_close(warm["first"], policy, 0)
    assert_close(warm["expert"], state.frozen["expert"], 0)


# ---------------------------------------------------------------- sweeps


def test_every_number_can_be_swept_and_means_what_it_means_alone(network, task, quick_jit):
    """A vmap over numbers of method and optimizer gives the runs with these numbers fixed."""
    table, steps = Optimizer(b2=0.95, clip_norm=0.5), 2
    common = {
        **{"task": task, "network": network, "steps": steps, "prompts": PROMPTS},
        **{"group": GROUP, "weights": WEIGHTS, "eval_problems": 4},
    }
    free = make_run(method=find_method("grpo"), optimizer=make_optimizer(table, steps), **common)
    swept = {
        "learning_rate": jnp.array([0.05, 0.01]),
        "objective.clip_high": jnp.array([0.28, 0.01]),
        "objective.kl_coef": jnp.array([0.0, 0.3]),
        "optimizer.b1": jnp.array([0.9, 0.5]),
        "optimizer.weight_decay": jnp.array([0.0, 0.2]),
        "optimizer.clip_norm": jnp.array([0.5, 0.01]),
        "optimizer.warmup_steps": jnp.array([0.0, 2.0]),
    }
    states, _ = quick_jit(jax.vmap(free, (None, 0)))(KEY, swept)
    for i in range(2):
        one = {name: float(values[i]) for name, values in swept.items()}
        fixed = make_run(
            method=get_method(
                "grpo",
                clip_high=one["objective.clip_high"],
                kl_coef=one["objective.kl_coef"] or jnp.float32(0.0),
            ),
            optimizer=make_optimizer(
                table.model_copy(
                    update={
                        **{name: one[f"optimizer.{name}"] for name in ("b1", "weight_decay")},
                        "clip_norm": one["optimizer.clip_norm"],
                        "warmup_steps": int(one["optimizer.warmup_steps"]),
                    }
                ),
                steps,
            ),
            **common,
        )
        state, _ = quick_jit(fixed)(KEY, {"learning_rate": one["learning_rate"]})
        mine = jax.tree.map(lambda x, i=i: x[i], states.params)
        assert_close(mine, state.params, 1e-4)
    assert not np.allclose(*states.params["policy"]["embed"], atol=1e-3)


def test_hyperparameters_that_nothing_reads_are_refused(run, network, task):
    with pytest.raises(UserError, match=r"objective.clip_high is given, and .* find_method"):
        run(KEY, {"learning_rate": 0.1, "objective.clip_high": 0.3})
    free = make_run(
        method=find_method("grpo"),
        optimizer=make_optimizer(Optimizer(), 1),
        **{"task": task, "network": network, "steps": 1, "prompts": 2, "group": 2},
        weights=WEIGHTS,
    )
    with pytest.raises(UserError, match="clip_hi = .*: grpo has no such coefficient; did you mean"):
        free(KEY, {"learning_rate": 0.1, "objective.clip_hi": 0.3})
    with pytest.raises(UserError, match="optimizer = 'momentum'; choose from.*b1.*weight_decay"):
        free(KEY, {"learning_rate": 0.1, "optimizer.momentum": 0.3})
    with pytest.raises(UserError, match="optimizer.learning_rate' is unknown"):
        free(KEY, {"learning_rate": 0.1, "optimizer.learning_rate": 0.3})
