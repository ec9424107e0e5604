import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.objectives.advantages import (
    at_last_token,
    gae,
    greedy_baseline,
    group_mean_std,
    leave_one_out,
    mean_centred,
    reward_to_go,
)

few = settings(max_examples=15, deadline=None, derandomize=True)
GROUP_FUNCTIONS = [mean_centred, group_mean_std, leave_one_out]


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@few
@given(seed=st.integers(0, 10**6), g=st.integers(2, 9))
def test_leave_one_out_is_the_centred_reward_stretched(seed, g):
    rewards, members = jnp.asarray(numbers(seed, g)), jnp.ones(g, bool)
    expected = mean_centred(rewards, members) * g / (g - 1)
    np.testing.assert_allclose(leave_one_out(rewards, members), expected, rtol=1e-6)


@few
@given(seed=st.integers(0, 10**6), g=st.integers(2, 9), absent=st.integers(0, 4))
def test_ragged_groups_equal_the_group_of_their_live_members(seed, g, absent):
    rewards = numbers(seed, g + absent)
    members = np.random.default_rng(seed).permutation(np.arange(g + absent) < g)
    rewards[~members] = np.nan  # what is absent is not read
    for function in GROUP_FUNCTIONS:
        ragged = np.asarray(function(jnp.asarray(rewards), jnp.asarray(members)))
        alone = function(jnp.asarray(rewards[members]), jnp.ones(g, bool))
        np.testing.assert_allclose(ragged[members], alone, rtol=1e-5, atol=1e-6)
        assert not ragged[~members].any()


@pytest.mark.parametrize("ddof", [0, 1])
def test_group_mean_std_equals_numpy(ddof):
    rewards = numbers(0, 6)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=ddof, dtype=np.float64) + 0.1)
    got = group_mean_std(jnp.asarray(rewards), jnp.ones(6, bool), eps=0.1, ddof=ddof)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e18, 1e25, -3e37])
def test_rewards_whose_squares_float32_cannot_hold_are_normalised_like_small_ones(scale):
    """A deviation of infinity would make all advantages 0, and the step say nothing."""
    rewards = np.array([1.0, 0.0, 0.0, 2.0])
    expected = np.sign(scale) * (rewards - rewards.mean()) / rewards.std(ddof=1)
    got = group_mean_std(jnp.asarray(rewards * scale, jnp.float32), jnp.ones(4, bool))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
def test_equal_rewards_give_exactly_zero(function):
    # 0.1 seven times: the float32 mean is not 0.1, and a tiny deviation would blow that up.
    for level in (0.1, 1e6 / 3):
        assert not np.asarray(function(jnp.full(7, level), jnp.ones(7, bool))).any()


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
def test_one_live_member_and_none_give_zero(function):
    rewards = jnp.array([3.0, 5.0])
    assert function(rewards, jnp.array([False, True])).tolist() == [0, 0]
    assert function(rewards, jnp.array([False, False])).tolist() == [0, 0]


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
@pytest.mark.parametrize("g", [1, 3])
def test_a_live_nan_spoils_its_whole_group_and_no_other(function, g):
    rewards = jnp.ones((2, g)).at[0, 0].set(jnp.nan)
    got = jax.vmap(function)(rewards, jnp.ones((2, g), bool))
    assert np.isnan(got[0]).all()
    assert not np.isnan(got[1]).any()


def test_greedy_baseline_without_a_greedy_member_is_nan_for_live_members():
    got = greedy_baseline(jnp.ones(3), jnp.array([True, True, False]), jnp.zeros(3, bool))
    assert np.isnan(got[:2]).all()
    assert got[2] == 0


def test_whole_numbers_are_refused():
    with pytest.raises(AssertionError):
        mean_centred(jnp.ones(3, jnp.int32), jnp.ones(3, bool))
    with pytest.raises(AssertionError):
        mean_centred(jnp.ones(3), jnp.ones(3))
    with pytest.raises(AssertionError):
        mean_centred(jnp.ones(3), jnp.ones(2, bool))


def test_at_last_token_steps_over_holes_and_empty_rows():
    assert at_last_token(jnp.float32(2), jnp.array([1, 0, 1, 0], bool)).tolist() == [0, 0, 2, 0]
    assert at_last_token(jnp.float32(2), jnp.zeros(4, bool)).tolist() == [0, 0, 0, 0]


@few
@given(
    seed=st.integers(0, 10**6),
    t=st.integers(1, 8),
    discount=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_gae_equals_loops_over_the_live_tokens(seed, t, discount, decay):
    rng = np.random.default_rng(seed)
    mask = rng.random(t) < 0.7
    rewards, values = numbers(seed, t), numbers(seed + 1, t)
    rewards[~mask] = values[~mask] = np.nan
    places = np.flatnonzero(mask)
    expected = np.zeros(t)
    later_value = later_advantage = 0.0
    for place in places[::-1]:
        delta = rewards[place] + discount * later_value - values[place]
        expected[place] = delta + discount * decay * later_advantage
        later_value, later_advantage = values[place], expected[place]
    args = (jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask))
    advantages, returns = gae(*args, discount, decay)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), atol=1e-5)


def test_gae_without_decay_is_the_one_step_difference():
    rewards, values, mask = jnp.array([0.0, 1.0]), jnp.array([0.5, 0.25]), jnp.ones(2, bool)
    advantages, _ = gae(rewards, values, mask, 0.5, 0.0)
    assert advantages.tolist() == [0.5 * 0.25 - 0.5, 1 - 0.25]


def test_a_live_nan_reaches_every_earlier_token():
    got = reward_to_go(jnp.array([0.0, jnp.nan, 1.0]), jnp.ones(3, bool))
    assert np.isnan(got).tolist() == [True, True, False]


def test_undiscounted_reward_to_go_of_a_score_is_that_score_everywhere():
    mask = jnp.array([True, True, False, True, False])
    rewards = at_last_token(jnp.float32(3), mask)
    chex.assert_trees_all_equal(reward_to_go(rewards, mask), jnp.where(mask, 3.0, 0.0))
