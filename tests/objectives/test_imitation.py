"""Weights of demonstrations and own samples against loops, and the balance that is learned."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.objectives import surrogates
from jrl.objectives.imitation import (
    Balance,
    balanced,
    demonstrated,
    expert_weights,
    imitate_external,
    relift,
)


@pytest.fixture(scope="module")
def batch(make_batch):
    """Three prompts of two own samples and a demonstration; the second demonstration is absent."""
    mask = np.ones((3, 3, 2), bool)
    mask[0, 0, 1] = False
    members = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool)
    external = np.zeros((3, 3, 2))
    external[:, 2] = 1
    entropy = np.where(external > 0, 9.0, 0.5)
    stats = {"external": external, "rollout_entropy": entropy}
    rewards = np.array([[0, 0, 1.0], [0, 0, 1], [1, 0, 1]])
    return make_batch(rewards, mask, members=members, stats=stats)


def test_demonstrations_are_known_by_their_tokens(batch):
    assert demonstrated(batch).tolist() == [[False, False, True]] * 3


def test_only_demonstrations_of_unsolved_prompts_are_imitated(batch):
    values, after, _ = relift(coef=0.5).apply(batch.score(), batch, ())
    assert after.members.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    # Seven sequences take part, one of them a demonstration: 1/7 of the mean times 0.5 * 7.
    assert values[0, 2] == pytest.approx(0.5 * 7)
    deviation = 0.5**0.5
    expected = np.array([0.5, -0.5]) / (deviation + 1e-6) * 7 / 6
    np.testing.assert_allclose(values[:, :2], [[0, 0], [0, 0], expected], rtol=1e-5)


def test_a_score_up_to_the_bar_does_not_solve_a_prompt(batch):
    _, after, _ = relift(right=1.0).apply(batch.score(), batch, ())
    assert after.members[2, 2]


def test_the_balance_weighs_both_kinds_by_their_own_means(batch):
    transform = balanced(Balance(initial=0.25, rate=0.0, entropy_rate=0.0))
    values, after, _ = transform.apply(batch.score(), batch, transform.init())
    assert after.members.tolist() == batch.members.tolist()
    assert values[0, 2] == values[2, 2] == pytest.approx(0.25 * 8 / 2)
    assert values[2, 0] == pytest.approx(0.75 * 8 / 6 * 0.5 / (0.5**0.5 + 1e-6))


def test_the_balance_follows_utility_and_entropy(batch):
    """Three steps of the written rule; the demonstrations' entropy and scores are not looked at."""
    control = Balance(initial=0.4, rate=0.01, entropy_rate=0.1, target_entropy=0.9)
    transform = balanced(control)
    state, mu, change, before = transform.init(), 0.4, 0.0, None
    for rewards in ([0, 0, 0.0], [0, 1, 0], [1, 1, 0]):
        scores = jnp.asarray([[r, r, 7.0] for r in rewards], jnp.float32)
        _, _, state = transform.apply(scores, batch, state)
        utility = np.mean(rewards)
        gain = 0 if before is None else utility - before
        moved = 0.01 * gain * change / (change**2 + 1e-4) + 0.1 * (0.9 - 0.5)
        new = min(max(mu + moved, 0.05), 0.95)
        mu, change, before = new, new - mu, utility
        assert state.mu == pytest.approx(mu, rel=1e-5)
    assert state.steps == 3


def test_the_first_step_s_entropy_is_the_target(batch):
    transform = balanced(Balance(entropy_rate=1.0))
    _, _, state = transform.apply(batch.score(), batch, transform.init())
    assert (state.target, state.mu) == (0.5, 0.5)
    lower = batch.replace(
        stats=batch.stats | {"rollout_entropy": 0 * batch.stats["external"] + 0.4}
    )
    _, _, state = transform.apply(batch.score(), lower, state)
    assert state.mu == pytest.approx(0.6)


def test_the_balance_stays_within_its_bounds(batch):
    transform = balanced(Balance(entropy_rate=100.0, target_entropy=1e4))
    _, _, state = transform.apply(batch.score(), batch, transform.init())
    assert state.mu == pytest.approx(0.95)


def test_expert_weights_are_expected_counts_of_a_resampled_group(make_batch):
    members = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
    mask = np.ones((3, 3, 2), bool)
    mask[0, 2] = False
    rewards = np.array([[1.0, 0, 5], [1, 2, 3], [1, 1, 1]])
    values, _, _ = expert_weights(0.5).apply(
        jnp.asarray(rewards, jnp.float32), make_batch(rewards, mask, members=members), ()
    )
    odds = np.exp(1 / 0.5)
    expected = [[2 * odds / (odds + 1), 2 / (odds + 1), 0], [0, 1, 0], [0, 0, 0]]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_demonstrations_have_no_ratio():
    """Neither loss nor metrics read the sampler's log-probability there."""
    inner = surrogates.clipped_ratio()
    stats = {
        "logprobs": jnp.array([-1.0, -2.0, -0.5]),
        "sampler_logprobs": jnp.array([-1.5, 0.0, 0.0]),
        "external": jnp.array([0.0, 1.0, 1.0]),
    }
    advantages, mask = jnp.array([1.0, 3.0, 0.0]), jnp.ones(3, bool)
    losses, metrics = imitate_external(inner).apply(stats, advantages, mask)
    np.testing.assert_allclose(losses, [-1.2, 6.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], [np.exp(0.5), 1, 1], rtol=1e-6)
