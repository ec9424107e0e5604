"""The training step against loops by hand, itself in parts, and NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.methods import get_method
from jrl.methods.schedule import Schedule
from jrl.models.heads import value_head, value_network
from jrl.objectives import aggregates, regularizers, transforms
from jrl.objectives.kl import AdaptiveCoef
from jrl.sampling.params import make_sampling_params
from jrl.train.score import score
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.train.step_metrics import batch_metrics, summarise
from jrl.types import stream

SAMPLING = make_sampling_params(0.9)
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def network(bag):
    return bag


@pytest.fixture(scope="module")
def params(bag_params):
    return bag_params


@pytest.fixture(scope="module")
def batch(make_batch, network, params):
    """Groups of unequal lengths with a member left out, drawn by nearly the present policy."""
    batch = make_batch(g=3)
    members = batch.members.at[1, 1].set(False).at[3, 0].set(False)
    want = frozenset({"logprobs"})
    of = partial(score, {"policy": params}, network=network, value=None, want=want)
    logprobs = jax.jit(of)(batch, SAMPLING)["logprobs"]
    noise = 0.2 * jax.random.normal(jax.random.key(5), logprobs.shape)
    return batch.replace(members=members, stats={"sampler_logprobs": logprobs + noise})


@pytest.fixture(scope="module")
def world(network, params, quick_jit):
    """(objective, optimizer, ...) -> (compiled step, state at step 0)."""

    def make(objective, optimizer, value=None, **split):
        common = {
            "network": network,
            "objective": objective,
            "optimizer": optimizer,
            "value": value,
        }
        return quick_jit(make_step(**common, **split)), init_state(KEY, params, **common)

    return make


def assert_close(a, b, atol):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


def rich_objective():
    """Token mean, a steered KL term, entropy: whatever could be divided wrongly or forgotten."""
    kl = regularizers.kl_in_loss("k3", AdaptiveCoef(initial=0.5, target=0.02, rate=0.5))
    return get_method("grpo").objective._replace(
        aggregate=aggregates.token_mean,
        regularizers=(
            kl,
            regularizers.entropy_bonus(0.01)._replace(aggregate=aggregates.sequence_mean),
        ),
    )


@pytest.fixture(scope="module")
def rich(world):
    """(compiled step, state) whole and in 2 microbatches."""
    return {
        parts: world(rich_objective(), optax.sgd(0.1, momentum=0.9), microbatches=parts)
        for parts in (1, 2)
    }


# ---------------------------------------------------------------- updates


def test_epochs_and_minibatches_against_a_loop_by_hand(world, network, params, batch):
    rate = 0.3
    twice = {"schedule": Schedule(epochs=2), "minibatches": 2}
    step, state = world(get_method("grpo").objective, optax.sgd(rate), **twice)
    after, metrics = step(state, batch, SAMPLING)

    members = np.asarray(batch.members)
    rewards = np.asarray(batch.rewards, np.float64)[:, :, 0]
    advantages = np.zeros_like(rewards)
    for i, live in enumerate(members):
        r = rewards[i][live]
        advantages[i][live] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)

    @jax.jit
    def loss_and_gradient(params, part, advantages):
        def loss(params):
            want = frozenset({"logprobs"})
            stats = score(
                {"policy": params}, part, SAMPLING, network=network, value=None, want=want
            )
            ratio = jnp.exp(stats["logprobs"] - part.stats["sampler_logprobs"])
            a = advantages[:, :, None]
            losses = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
            live = part.mask & part.members[:, :, None]
            count = live.sum(2)
            means = jnp.where(live, losses, 0).sum(2) / jnp.maximum(count, 1)
            return means.sum() / (count > 0).sum()

        return jax.value_and_grad(loss)(params)

    key, losses, norms = stream(state.key, "train", 0), [], []
    for epoch in range(2):
        order = jax.random.permutation(jax.random.fold_in(key, epoch), 4)
        for rows in (order[:2], order[2:]):
            part = batch.replace(reward_weights=None)
            part = jax.tree.map(lambda x, rows=rows: x[rows], part)
            part = part.replace(reward_weights=batch.reward_weights)
            loss, gradient = loss_and_gradient(params, part, advantages[rows].astype(np.float32))
            params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
            losses.append(float(loss))
            norms.append(float(optax.tree.norm(gradient)))
    assert_close(after.params["policy"], params, 1e-5)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert int(after.step) == 1


def test_the_gradient_is_taken_ahead_and_changes_where_it_started(world, network, params, batch):
    """MetaRM: theta - alpha grad L(theta + eta grad J(theta)), by hand, of a batch in two parts."""
    rate, eta, head = 0.3, 0.7, value_head(network)
    points = np.array([[1.0, 0.0, 0.5], [0.2, 0.1, 0.9], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    mixed = batch.replace(rewards=jnp.asarray(points, jnp.float32)[:, :, None])
    method, members = get_method("meta_rm", ascent=eta), np.asarray(batch.members)

    def mean_over(of_group, groups, params):
        want = frozenset({"values"})
        stats = score(params, mixed, SAMPLING, network=network, value=head, want=want)
        at = jnp.maximum(mixed.lengths - 1, 0)[:, :, None]
        values = jnp.take_along_axis(stats["values"], at, axis=2)[:, :, 0]
        return sum(of_group(n, np.flatnonzero(members[n]), values[n]) for n in groups) / len(groups)

    def apart(n, live, v):
        gaps = [jnp.abs(v[i] - v[j]) for i in live for j in live if i < j]
        return 2 / len(live) ** 2 * sum(1 / (1 + jnp.exp(-gap)) for gap in gaps)

    def preferred(n, live, v):
        gaps = [v[i] - v[j] for i in live for j in live if points[n, i] > points[n, j]]
        return sum(jnp.log1p(jnp.exp(-gap)) for gap in gaps) / len(gaps)

    @jax.jit
    def by_hand(start):
        height, up = jax.value_and_grad(partial(mean_over, apart, (2, 3)))(start)
        ahead = jax.tree.map(lambda x, g: x + eta * g, start, up)
        slopes = [jax.grad(partial(mean_over, preferred, (0, 1)))(at) for at in (ahead, start)]
        return height, *(jax.tree.map(lambda x, g: x - rate * g, start, g) for g in slopes)

    step, state = world(
        method.objective, optax.sgd(rate), head, schedule=method.schedule, microbatches=2
    )
    weight = 0.5 * jax.random.normal(jax.random.key(8), (network.embed_dim,))
    start = {"policy": params, "value": {"weight": weight, "bias": jnp.float32(0.1)}}
    height, expected, plain = by_hand(start)
    after, metrics = step(state.replace(params=jax.tree.map(jnp.copy, start)), mixed, SAMPLING)
    assert_close(after.params, expected, 1e-5)
    assert metrics["ahead_loss"] == pytest.approx(float(height), abs=1e-5)
    change = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), plain, expected)
    assert max(jax.tree.leaves(change)) > 1e-3


def test_microbatches_do_not_show(rich, batch):
    """Prompts of unequal lengths, members missing, terms with different counts: all the same."""
    (whole_step, state), (step, _) = rich[1], rich[2]
    full, metrics = whole_step(state, batch, SAMPLING)
    split, split_metrics = step(state, batch, SAMPLING)
    assert_close(split.params, full.params, 1e-6)
    assert_close(split.opt_state, full.opt_state, 1e-5)
    assert_close(split.method, full.method, 1e-6)
    assert_close(split_metrics, metrics, 2e-5)
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), full.params, state.params)
    assert max(jax.tree.leaves(change)) > 1e-3


def test_the_gradient_is_what_the_optimizer_got(rich, batch):
    step, state = rich[1]
    after, metrics = step(state, batch, SAMPLING)
    change = jax.tree.map(lambda a, b: (a - b) / 0.1, state.params, after.params)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(change)), rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing(rich, batch):
    step, state = rich[1]
    state, _ = step(state, batch, SAMPLING)  # some momentum
    with_nan = batch.replace(rewards=batch.rewards.at[2, 1, 0].set(jnp.nan))
    after, metrics = step(state, with_nan, SAMPLING)
    assert metrics["skipped_updates"] == 1
    assert metrics["nonfinite_rewards"] == pytest.approx(1 / 10)
    assert not np.isfinite(metrics["grad_norm"])
    for a, b in zip(
        jax.tree.leaves((after.params, after.opt_state, after.frozen)),
        jax.tree.leaves((state.params, state.opt_state, state.frozen)),
        strict=True,
    ):
        assert np.array_equal(a, b)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.method))
    assert int(after.step) == 2
    # The next good batch trains as if nothing had happened.
    further, metrics = step(after.replace(method=state.method), batch, SAMPLING)
    expected, _ = step(state, batch, SAMPLING)
    assert metrics["skipped_updates"] == 0
    assert_close(further.params, expected.params, 0)


def test_one_broken_minibatch_of_two_is_left_out(world, batch):
    objective = get_method("grpo").objective
    step, state = world(objective, optax.adam(0.01), minibatches=2)
    with_nan = batch.replace(rewards=batch.rewards.at[2, 1, 0].set(jnp.nan))
    after, metrics = step(state, with_nan, SAMPLING)
    assert metrics["skipped_updates"] == 1
    assert int(after.opt_state[0].count) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


# ---------------------------------------------------------------- objectives through the step


def test_supervised_training_lowers_the_loss(world, make_batch):
    examples = make_batch(g=1, stats={})
    step, state = world(get_method("sft").objective, optax.adam(0.02))
    losses = []
    for _ in range(25):
        state, metrics = step(state, examples, make_sampling_params())
        losses.append(float(metrics["loss"]))
    assert losses[0] > 2.0
    assert losses[-1] < 0.3 * losses[0]
    assert "approx_kl" not in metrics
    assert "entropy" not in metrics


@pytest.mark.parametrize("make", [value_head, value_network])
def test_ppo_learns_values(world, network, batch, make):
    """The same batch again and again: the estimates approach what it is worth."""
    method = get_method("ppo", value_clip=None, whiten=False)
    step, state = world(method.objective, optax.adam(0.02), value=make(network))
    start, losses = state.params, []
    for _ in range(12):
        state, metrics = step(state, batch, SAMPLING)
        losses.append(float(metrics["value_loss"]))
    assert losses[0] > 0.1
    assert losses[-1] < 0.5 * losses[0]
    for part in ("policy", "value"):
        changed = jax.tree.map(lambda a, b: (a != b).any(), start[part], state.params[part])
        assert any(jax.tree.leaves(changed))


def test_divergence_from_the_reference(rich, batch, params):
    step, state = rich[1]
    first, metrics = step(state, batch, SAMPLING)
    assert metrics["kl"] == pytest.approx(0, abs=1e-7)
    # Far below the target, so the coefficient falls by rate * 0.2.
    assert first.method["regularizers"][0] == pytest.approx(0.5 * 0.9, rel=1e-5)
    second, metrics = step(first, batch, SAMPLING)
    assert metrics["kl"] > 1e-6
    assert_close(second.frozen["ref"], params, 0)
    error = np.clip(float(metrics["kl"]) / 0.02 - 1, -0.2, 0.2)
    expected = 0.45 * (1 + 0.5 * error)
    assert second.method["regularizers"][0] == pytest.approx(expected, rel=1e-5)


def test_the_state_of_the_advantage_moves(world, batch, network):
    steered = AdaptiveCoef(initial=0.5, target=1e-6, rate=0.5)
    advantage = transforms.chain(
        transforms.kl_in_reward("k2", steered, "sequence"),
        get_method("grpo").objective.advantage,
    )
    objective = get_method("grpo").objective._replace(advantage=advantage)
    step, state = world(objective, optax.sgd(0.1))
    after, _ = step(state, batch, SAMPLING)  # the noise of the sampler is a divergence
    assert after.method["advantage"][0] == pytest.approx(0.5 * 1.1, rel=1e-5)


# ---------------------------------------------------------------- metrics


def test_drift_from_the_sampler(rich, batch, network, params):
    """Before the first update it is the noise that the batch was given."""
    step, state = rich[1]
    _, metrics = step(state, batch, SAMPLING)
    want = frozenset({"logprobs", "entropy"})
    run = jax.jit(partial(score, network=network, value=None, want=want))
    stats = run({"policy": params}, batch, SAMPLING)
    live = np.asarray(batch.mask & batch.members[:, :, None])
    d = np.asarray(stats["logprobs"] - batch.stats["sampler_logprobs"], np.float64)[live]
    assert metrics["logprob_diff"] == pytest.approx(np.abs(d).mean(), rel=1e-4)
    assert metrics["approx_kl"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-3)
    assert metrics["entropy"] == pytest.approx(np.asarray(stats["entropy"])[live].mean(), rel=1e-4)


def test_logprob_diff_is_of_the_first_update(world, batch, network, params):
    of = partial(score, network=network, value=None, want=frozenset({"logprobs"}))
    exact = batch.replace(
        stats={"sampler_logprobs": jax.jit(of)({"policy": params}, batch, SAMPLING)["logprobs"]}
    )
    step, state = world(get_method("grpo").objective, optax.sgd(0.3), schedule=Schedule(epochs=3))
    _, metrics = step(state, exact, SAMPLING)
    assert metrics["logprob_diff"] < 1e-5
    assert metrics["approx_kl"] > 1e-4  # later updates have moved away


def test_batch_metrics_against_numpy(make_batch):
    rng = np.random.default_rng(1)
    members = np.ones((4, 3), bool)
    members[0, 2] = members[3] = False
    rewards = rng.normal(size=(4, 3, 2)).astype(np.float32)
    rewards[0, 2] = np.nan  # what does not count may be anything
    batch = make_batch(
        g=3,
        rewards=rewards,
        reward_weights=np.array([1.0, 0.25], np.float32),
        members=members,
    )
    logprobs = np.where(batch.mask, batch.stats["sampler_logprobs"], np.float32(9))
    batch = batch.replace(stats={"sampler_logprobs": logprobs})
    metrics_of = jax.jit(batch_metrics)
    got = metrics_of(batch)
    live = np.asarray(members)
    scores = np.asarray(batch.rewards, np.float64) @ [1.0, 0.25]
    lengths, truncated = np.asarray(batch.lengths), np.asarray(batch.truncated)
    tokens = np.asarray(batch.mask) & live[:, :, None]
    expected = {
        "reward": scores[live].mean(),
        "reward_std": np.mean([scores[i][live[i]].std() for i in range(3)]),
        "reward_parts": np.asarray(batch.rewards)[live].mean(axis=0),
        "length": lengths[live].mean(),
        "prompt_length": np.asarray(batch.prompt_lengths)[live.any(1)].mean(),
        "truncated": truncated[live].mean(),
        "completion_tokens": tokens.sum(),
        "padding": 1 - lengths.sum() / np.asarray(batch.mask).size,
        "entropy": -np.asarray(batch.stats["sampler_logprobs"])[tokens].mean(),
    }
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    assert 0 < expected["truncated"] < 1
    none = metrics_of(batch.replace(members=np.zeros_like(members)))
    none.pop("padding")  # the network reads them all the same
    assert all((np.asarray(x) == 0).all() for x in none.values())


def test_the_names_of_the_metrics(rich, batch):
    step, state = rich[1]
    _, metrics = step(state, batch, SAMPLING)
    assert {
        *("reward", "reward_std", "reward_parts", "length", "truncated", "completion_tokens"),
        *("advantage_mean", "advantage_std", "zero_std_groups", "nonfinite_rewards"),
        *("loss", "kl", "entropy", "approx_kl", "nonfinite"),
        *("logprob_diff", "grad_norm", "skipped_updates"),
    } <= set(metrics)
    for name, value in metrics.items():
        assert value.shape == ((1,) if name == "reward_parts" else ()), name
        assert value.dtype == jnp.float32, name


def test_summarise():
    pairs = {
        "mean": (jnp.array([2.0, 4.0]), jnp.array([1.0, 3.0])),
        "one": (jnp.float32(6), jnp.float32(4)),
        "sum": (jnp.array([1.0, 0.0, 1.0]), jnp.zeros(3)),
        "nothing": (jnp.float32(0), jnp.float32(0)),
    }
    assert {k: float(v) for k, v in summarise(pairs).items()} == {
        "mean": 1.5,
        "one": 1.5,
        "sum": 2.0,
        "nothing": 0.0,
    }
