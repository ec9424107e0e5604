"""Losses and advantages of arrays: those of the methods on records, and NumPy's in float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl.objectives as objectives
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.objectives import (
    array_advantages,
    array_losses,
    array_pairs,
    combine_terms,
    compute_advantages,
    policy_loss,
)

N, G, T = 3, 4, 5
MODULES = (array_advantages, array_losses, array_pairs)
PUBLIC = sorted(
    name
    for module in MODULES
    for name, value in vars(module).items()
    if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
)


@pytest.fixture
def arrays(make_batch):
    """(batch, logprobs, old, reference [N, G, T]), ragged and with an empty completion."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, (N, G))
    lengths[0, 0] = 0
    mask = (np.arange(T) < lengths[..., None]) & (rng.random((N, G, T)) < 0.9)
    old = -np.abs(rng.normal(size=(N, G, T)))
    new, ref = (old + 0.3 * rng.normal(size=old.shape) for _ in range(2))
    members = np.ones((N, G), bool)
    members[1, 2] = False
    stats = {"sampler_logprobs": old, "ref_logprobs": ref}
    rewards = rng.choice([0.0, 0.25, 1.0], (N, G))
    batch = make_batch(rewards, mask, members=members, stats=stats)
    return batch, *(jnp.asarray(x, jnp.float32) for x in (new, old, ref))


def on_records(method, batch, logprobs):
    """(advantages [N, G, T], loss, gradient) by the functions of a training step."""
    objective = method.objective
    advantages, batch, state, _ = compute_advantages(objective, batch, objective.init())

    def loss(logprobs):
        terms, _ = policy_loss(objective, {"logprobs": logprobs}, batch, advantages, state)
        return combine_terms(objective, terms, state)

    return advantages, *jax.jit(jax.value_and_grad(loss))(logprobs)


# name of the method -> (coefficients, loss of arrays, advantages of arrays)
SAME = {
    "grpo": ({}, objectives.grpo_loss, objectives.grpo_advantages),
    "dr_grpo": (
        {"max_tokens": 8},
        functools.partial(objectives.dr_grpo_loss, max_tokens=8),
        objectives.dr_grpo_advantages,
    ),
    "gspo": ({}, objectives.gspo_loss, objectives.grpo_advantages),
    "cispo": ({}, objectives.cispo_loss, objectives.grpo_advantages),
    "rloo": ({}, None, objectives.rloo_advantages),
    "dapo": (
        {"max_tokens": 8, "overlong_scale": 0.0},
        objectives.dapo_loss,
        objectives.grpo_advantages,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_loss_of_arrays_is_the_methods_on_records(name, arrays):
    batch, new, old, _ = arrays
    coefficients, loss, advantages_of = SAME[name]
    advantages, value, gradient = on_records(get_method(name, **coefficients), batch, new)
    mine = advantages_of(batch.score(), batch.members)
    live = batch.mask & batch.members[..., None]
    np.testing.assert_allclose(jnp.where(live, mine[..., None], 0), advantages, atol=1e-6)

    def of_arrays(new):
        if loss is None:
            return objectives.reinforce_loss(new, mine, live)
        return loss(new, old, mine, live)

    got, slope = jax.jit(jax.value_and_grad(of_arrays))(new)
    np.testing.assert_allclose(got, value, atol=1e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


def test_the_divergence_of_grpo_is_the_methods(arrays):
    batch, new, old, ref = arrays
    method = get_method("grpo", kl_coef=0.5, kl_kind="k2")
    _, value, gradient = on_records(method, batch, new)
    live = batch.mask & batch.members[..., None]
    advantages = objectives.grpo_advantages(batch.score(), batch.members)

    def of_arrays(new):
        return objectives.grpo_loss(
            new, old, advantages, live, ref_logprobs=ref, kl_coef=0.5, kl_kind="k2"
        )

    got, slope = jax.jit(jax.value_and_grad(of_arrays))(new)
    np.testing.assert_allclose(got, value, atol=1e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)


def test_ppo_and_its_value_loss_are_the_methods(arrays):
    batch, new, old, _ = arrays
    rng = np.random.default_rng(1)
    values, before = (jnp.asarray(rng.normal(size=new.shape), jnp.float32) for _ in range(2))
    batch = batch.replace(stats=batch.stats | {"rollout_values": before})
    objective = get_method("ppo").objective
    advantages, ready, state, _ = compute_advantages(objective, batch, objective.init())
    stats = {"logprobs": new, "values": values}
    terms, _ = policy_loss(objective, stats, ready, advantages, state)
    expected = combine_terms(objective, terms, state)

    live = batch.mask & batch.members[..., None]
    paid = objectives.at_last_token(batch.score(), live)
    estimates, returns = objectives.gae(paid, before, live)
    white = objectives.whiten_tokens(estimates, live)
    np.testing.assert_allclose(white, advantages, atol=1e-5)
    surrogate = objectives.ppo_loss(new, old, white, live)
    value = objectives.ppo_value_loss(values, before, returns, live)
    np.testing.assert_allclose(surrogate + 0.5 * value, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_a_preference_loss_of_arrays_is_the_methods(name, make_batch):
    rng = np.random.default_rng(2)
    mask = np.arange(T) < rng.integers(1, T + 1, (N, 2, 1))
    new, ref = (jnp.asarray(-np.abs(rng.normal(size=(N, 2, T))), jnp.float32) for _ in range(2))
    rewards = np.tile([1.0, 0.0], (N, 1))
    batch = make_batch(rewards, mask, stats={"ref_logprobs": ref})
    method = get_method(name, **({"tau": 0.3} if name == "ipo" else {}))
    _, value, gradient = on_records(method, batch, new)
    live = batch.mask
    tokens = live.sum(2)

    def of_arrays(new):
        now, before = (objectives.sequence_logprobs(x, live) for x in (new, ref))
        if name in ("dpo", "ipo"):
            keys = {"tau": 0.3} if name == "ipo" else {}
            loss = getattr(objectives, f"{name}_loss")
            return loss(now[:, 0], now[:, 1], before[:, 0], before[:, 1], **keys)
        loss = getattr(objectives, f"{name}_loss")
        return loss(now[:, 0], now[:, 1], tokens[:, 0], tokens[:, 1])

    got, slope = jax.jit(jax.value_and_grad(of_arrays))(new)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)


# ---------------------------------------------------------------- NumPy in float64


def test_grpo_by_loops(arrays):
    batch, new, old, ref = arrays
    live = np.asarray(batch.mask & batch.members[..., None])
    rewards, members = np.asarray(batch.score(), np.float64), np.asarray(batch.members)
    total, completions = 0.0, 0
    for n in range(N):
        group = rewards[n][members[n]]
        for i in range(G):
            tokens = np.flatnonzero(live[n, i])
            if not tokens.size:
                continue
            a = (rewards[n, i] - group.mean()) / (group.std(ddof=1) + 1e-6)
            of_token = []
            for t in tokens:
                r = np.exp(float(new[n, i, t]) - float(old[n, i, t]))
                d = float(new[n, i, t]) - float(ref[n, i, t])
                gain = min(r * a, min(max(r, 0.8), 1.2) * a)
                of_token.append(-gain + 0.1 * (np.exp(-d) - 1 + d))
            total += np.mean(of_token)
            completions += 1
    advantages = objectives.grpo_advantages(batch.score(), batch.members)
    got = objectives.grpo_loss(
        new, old, advantages, jnp.asarray(live), ref_logprobs=ref, kl_coef=0.1
    )
    np.testing.assert_allclose(got, total / completions, rtol=2e-5)


def test_token_logprobs_and_entropy_by_numpy():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, 7))
    tokens = rng.integers(0, 7, (2, 3))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.log(np.take_along_axis(chances, tokens[..., None], -1))[..., 0]
    logits = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(objectives.token_logprobs(logits, tokens), expected, rtol=1e-5)
    expected = -(chances * np.log(chances)).sum(-1)
    np.testing.assert_allclose(objectives.entropy(logits), expected, rtol=1e-5)


def test_the_entropy_of_a_truncated_distribution_has_a_gradient():
    gradient = jax.grad(lambda x: objectives.entropy(x))(jnp.array([0.0, 1.0, -jnp.inf]))
    assert np.isfinite(gradient).all()
    assert float(gradient[0]) > 0


def test_opo_remax_and_maxrl_by_numpy():
    rng = np.random.default_rng(4)
    rewards, greedy = rng.random((N, G)), rng.random(N)
    lengths = rng.integers(1, 9, (N, G))
    r32 = jnp.asarray(rewards, jnp.float32)
    baseline = (rewards * lengths).sum(1) / lengths.sum(1)
    np.testing.assert_allclose(
        objectives.opo_advantages(r32, jnp.asarray(lengths)), rewards - baseline[:, None], atol=1e-6
    )
    np.testing.assert_allclose(
        objectives.remax_advantages(r32, jnp.asarray(greedy, jnp.float32)),
        rewards - greedy[:, None],
        atol=1e-6,
    )
    np.testing.assert_allclose(
        objectives.maxrl_advantages(r32), rewards / rewards.mean(1, keepdims=True) - 1, atol=1e-5
    )


# ---------------------------------------------------------------- what all of them keep


def test_an_on_policy_step_has_the_gradient_of_reinforce():
    """The old log-probabilities may be the same array: no gradient passes through them."""
    logprobs, mask = -jnp.ones((2, 3)), jnp.ones((2, 3), bool)
    advantages = jnp.array([1.0, -2.0])
    slope = jax.grad(lambda x: objectives.ppo_loss(x, x, advantages, mask))(logprobs)
    expected = jax.grad(lambda x: objectives.reinforce_loss(x, advantages, mask))(logprobs) / 3
    np.testing.assert_allclose(slope, expected, atol=1e-7)


def takes_tokens(name):
    return (
        name.endswith("_loss") and "mask" in inspect.signature(getattr(objectives, name)).parameters
    )


@pytest.mark.parametrize("name", [name for name in PUBLIC if takes_tokens(name)])
def test_padding_is_not_read_and_axes_are_free(name):
    """NaN outside the mask changes nothing, and [B, T] is the same as [N, G, T]."""
    function = getattr(objectives, name)
    rng = np.random.default_rng(5)
    mask = rng.random((2, 3, 4)) < 0.7
    sizes = {"advantages": (2, 3)}
    keys = {"max_tokens": 4} if name == "dr_grpo_loss" else {}
    names = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    arrays = {n: -np.abs(rng.normal(size=sizes.get(n, mask.shape))) for n in names if n != "mask"}
    arrays = {n: jnp.asarray(x, jnp.float32) for n, x in arrays.items()} | {"mask": mask}
    spoiled = {
        n: jnp.where(mask, x, jnp.nan) if x.shape == mask.shape and n != "mask" else x
        for n, x in arrays.items()
    }
    flat = {n: x.reshape(6, *x.shape[2:]) for n, x in arrays.items()}
    compiled = jax.jit(functools.partial(function, **keys))
    expected = compiled(**arrays)
    assert np.isfinite(expected)
    np.testing.assert_allclose(compiled(**spoiled), expected)
    np.testing.assert_allclose(compiled(**flat), expected, rtol=1e-6)
    slope = jax.jit(jax.grad(lambda x: function(**{**spoiled, names[0]: x}, **keys)))(
        spoiled[names[0]]
    )
    assert np.isfinite(np.asarray(slope)).all()
    assert not np.asarray(slope)[~mask].any()


def test_shapes_that_do_not_fit_are_named():
    mask = jnp.ones((2, 3), bool)
    with pytest.raises(AssertionError, match="old_logprobs beside the mask"):
        objectives.ppo_loss(jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.zeros(2), mask)
    with pytest.raises(AssertionError):
        objectives.ppo_loss(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(3), mask)
    with pytest.raises(TypeError, match="together"):
        objectives.grpo_loss(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(2), mask, kl_coef=0.1)
    zeros = jnp.zeros(2)
    with pytest.raises(UserError, match=r"dpo_loss.kind = 'sigmod'; did you mean 'sigmoid'"):
        objectives.dpo_loss(zeros, zeros, zeros, zeros, kind="sigmod")


MASK, ROW = jnp.ones((2, 3), bool), -jnp.ones((2, 3))
MISTAKES = {
    "tokens that broadcast": (
        lambda: objectives.token_logprobs(jnp.zeros((2, 3, 5)), jnp.zeros((1, 3), int)),
        r"\[tokens beside logits",
    ),
    "advantages [B, 1]": (
        lambda: objectives.ppo_loss(ROW, ROW, jnp.zeros((2, 1)), MASK),
        r"\[advantages beside the mask\]",
    ),
    "a number": (
        lambda: objectives.ppo_loss(ROW, ROW, 1.0, MASK),
        r"advantages is a float; pass an array, jnp.asarray\(advantages\)",
    ),
    "whole numbers": (lambda: objectives.grpo_advantages(jnp.ones((2, 3), int)), r"\[rewards\]"),
    "members of 0 and 1": (
        lambda: objectives.rloo_advantages(ROW, MASK.astype(int)),
        r"\[members\]",
    ),
    "a list": (lambda: objectives.grpo_advantages([[1.0, 0.0]]), "rewards is a list"),
    "a mask as a list": (lambda: objectives.sft_loss(ROW, [[True]]), "mask is a list"),
    "a mask of 0 and 1": (
        lambda: objectives.whiten_tokens(ROW, MASK.astype(int)),
        r"\[mask\]",
    ),
    "old values": (
        lambda: objectives.ppo_value_loss(ROW, ROW[:1], ROW, MASK),
        r"\[old_values beside the mask\]",
    ),
    "pairs": (
        lambda: objectives.bradley_terry_loss(jnp.zeros(2), [0.0, 1.0]),
        "rejected is a list",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_argument_that_does_not_fit_is_named(name):
    call, message = MISTAKES[name]
    with pytest.raises((AssertionError, TypeError), match=message):
        call()


def test_half_precision_is_computed_in_float32():
    chosen, rejected = jnp.array([-512.0], jnp.bfloat16), jnp.array([-516.0], jnp.bfloat16)
    ref = jnp.array([-512.6])  # not a number of bfloat16
    loss = objectives.dpo_loss(chosen, rejected, ref, ref, beta=1.0)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log1p(np.exp(-4.0)), rtol=1e-5)
    mask, paid = jnp.ones((1, 3), bool), jnp.full((1, 3), 40000.0, jnp.float16)
    assert objectives.reward_to_go(paid, mask).tolist() == [[120000.0, 80000.0, 40000.0]]
    last = objectives.at_last_token(jnp.ones(1, jnp.bfloat16), mask)
    assert last.dtype == jnp.float32
    assert last.tolist() == [[0.0, 0.0, 1.0]]


def test_the_package_offers_every_one_of_them():
    assert len(PUBLIC) == 28
    missing = [name for name in PUBLIC if getattr(objectives, name, None) is None]
    assert not missing
    assert set(PUBLIC) <= set(dir(objectives))
