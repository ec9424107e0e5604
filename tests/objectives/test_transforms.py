import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives import advantages, transforms
from jrl.objectives.kl import AdaptiveCoef
from jrl.objectives.normalizers import exponential_weights, mark_positive, scale_to_informative

MASK = np.array([[[1, 1, 1], [1, 0, 0]], [[1, 0, 1], [0, 0, 0]]], bool)
SCORE = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply(transform, values, batch):
    values, batch, _ = transform.apply(jnp.asarray(values), batch, transform.init())
    return np.asarray(values), batch


def test_a_chain_applies_from_left_to_right_and_keeps_each_state(make_batch):
    stats = {"sampler_logprobs": numbers(0, 2, 2, 3), "ref_logprobs": numbers(1, 2, 2, 3)}
    steered = transforms.kl_in_reward("k1", AdaptiveCoef(0.5, 1.0), level="sequence")
    chain = transforms.chain(transforms.clip(0, 3), steered, transforms.centre())
    assert chain.needs == {"sampler_logprobs", "ref_logprobs"}
    state = chain.init()
    assert (state[0], float(state[1]), state[2]) == ((), 0.5, ())
    values, _, after = chain.apply(jnp.asarray(SCORE), make_batch(SCORE, MASK, stats=stats), state)
    kl = np.where(MASK, stats["sampler_logprobs"] - stats["ref_logprobs"], 0).sum(2)
    shaped = np.clip(SCORE, 0, 3) - 0.5 * kl
    np.testing.assert_allclose(values, shaped - shaped.mean(), rtol=1e-5)
    error = np.clip(kl.mean() / 1.0 - 1, -0.2, 0.2)
    assert float(after[1]) == pytest.approx(0.5 * (1 + 0.1 * error), rel=1e-5)
    assert float(after[1]) != 0.5


def test_per_group_is_a_loop_over_groups(make_batch):
    rewards, members = numbers(0, 3, 4), np.random.default_rng(0).random((3, 4)) < 0.8
    batch = make_batch(rewards, np.ones((3, 4, 2)), members=members)
    got, _ = apply(transforms.per_group(advantages.leave_one_out), rewards, batch)
    for n in range(3):
        alone = advantages.leave_one_out(jnp.asarray(rewards[n]), jnp.asarray(members[n]))
        np.testing.assert_allclose(got[n], alone, rtol=1e-6)


def test_per_group_reads_what_it_is_told_to(make_batch):
    greedy = np.array([[False, True], [True, False]])
    batch = make_batch(SCORE, MASK, baseline=greedy, members=~greedy)
    step = transforms.per_group(advantages.greedy_baseline, lambda b: (b.members, b.baseline))
    assert apply(step, SCORE, batch)[0].tolist() == [[-1, 0], [0, 1]]


# ---------------------------------------------------------------- whiten, centre


def test_whiten_over_tokens_weighs_long_sequences_more(make_batch):
    members = np.array([[True, True], [True, False]])
    batch = make_batch(SCORE, MASK, members=members)
    got, _ = apply(transforms.whiten("tokens"), SCORE, batch)
    live = MASK & members[..., None]
    tokens = np.broadcast_to(SCORE[..., None], MASK.shape)[live].astype(np.float64)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var() + 1e-8)
    np.testing.assert_allclose(got[live], expected, rtol=1e-5)
    assert not got[~live].any()


@pytest.mark.parametrize("ddof", [0, 1])
def test_whiten_over_sequences_weighs_members_the_same(ddof, make_batch):
    members = np.array([[True, True], [True, False]])
    batch = make_batch(SCORE, MASK, members=members)
    got, _ = apply(transforms.whiten("sequences", eps=0.5, ddof=ddof), SCORE, batch)
    scores = SCORE[members].astype(np.float64)
    expected = (scores - scores.mean()) / np.sqrt(scores.var(ddof=ddof) + 0.5)
    np.testing.assert_allclose(got[members], expected, rtol=1e-5)
    assert not got[~members].any()


@pytest.mark.parametrize("over", ["tokens", "sequences"])
def test_whiten_on_equal_values_nothing_and_nan(over, make_batch):
    step = transforms.whiten(over)
    equal = np.full((2, 2), 0.1, np.float32)
    assert not apply(step, equal, make_batch(equal, MASK))[0].any()
    nobody = make_batch(SCORE, MASK, members=np.zeros((2, 2), bool))
    assert not apply(step, SCORE, nobody)[0].any()
    spoiled = SCORE.copy()
    spoiled[0, 0] = np.nan
    assert np.isnan(apply(step, spoiled, make_batch(SCORE, MASK))[0][MASK[..., 0]]).all()


@pytest.mark.parametrize("over", ["tokens", "sequences"])
def test_whiten_holds_rewards_whose_squares_float32_does_not(over, make_batch):
    batch = make_batch(SCORE, MASK)
    small, _ = apply(transforms.whiten(over, eps=1e-30), SCORE, batch)
    large, _ = apply(transforms.whiten(over, eps=1e-30), SCORE * np.float32(1e30), batch)
    np.testing.assert_allclose(large, small, rtol=1e-5)
    assert np.abs(small).max() > 0.5


def test_whiten_refuses_sequences_after_tokens(make_batch):
    with pytest.raises(UserError, match="after per-token advantages; use 'tokens'"):
        apply(transforms.whiten("sequences"), numbers(0, 2, 2, 3), make_batch(SCORE, MASK))
    with pytest.raises(UserError, match="did you mean 'tokens'"):
        transforms.whiten("token")


def test_centre_takes_the_mean_over_live_members_of_the_whole_batch(make_batch):
    members = np.array([[True, True], [True, False]])
    got, _ = apply(transforms.centre(), SCORE, make_batch(SCORE, MASK, members=members))
    assert got.tolist() == [[-1, 0], [1, 0]]


# ---------------------------------------------------------------- rewards


def test_overlong_penalty_is_a_ramp_in_tokens(make_batch):
    lengths = np.array([[5, 6, 7, 8, 10, 11]])
    batch = make_batch(np.zeros((1, 6)), np.arange(11) < lengths[:, :, None], lengths=lengths)
    ramp = transforms.overlong_penalty(max_tokens=10, buffer_tokens=4, scale=2.0)
    got, _ = apply(ramp, np.zeros((1, 6), np.float32), batch)
    np.testing.assert_allclose(got, [[0, 0, -0.5, -1, -2, -2]], atol=1e-6)
    hard, _ = apply(transforms.overlong_penalty(7, 0), np.zeros((1, 6), np.float32), batch)
    assert hard.tolist() == [[0, 0, 0, -1, -1, -1]]


@pytest.mark.parametrize("buffer", [-1, 11])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(UserError, match="give 0 to max_tokens = 10 tokens"):
        transforms.overlong_penalty(10, buffer)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_token_penalty_leaves_the_score_at_the_last_live_token(kind, make_batch):
    here, reference = numbers(2, 2, 2, 3), numbers(3, 2, 2, 3)
    here[~MASK] = np.nan
    batch = make_batch(SCORE, MASK, stats={"sampler_logprobs": here, "ref_logprobs": reference})
    got, _ = apply(transforms.kl_in_reward(kind, 0.1), SCORE, batch)
    d = (here - reference).astype(np.float64)
    kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[kind]
    expected = np.where(MASK, -0.1 * kl, 0)
    for n, g in np.ndindex(2, 2):
        if MASK[n, g].any():
            expected[n, g, np.flatnonzero(MASK[n, g])[-1]] += SCORE[n, g]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    charged, _ = apply(transforms.kl_in_reward(kind, 0.1, level="sequence"), SCORE, batch)
    expected = SCORE - 0.1 * np.where(MASK, kl, 0).sum(2)
    np.testing.assert_allclose(charged, expected, rtol=1e-4)


def test_kl_in_reward_reads_the_policy_it_is_told_to(make_batch):
    stats = {"proximal_logprobs": numbers(0, 2, 2, 3), "ref_logprobs": numbers(1, 2, 2, 3)}
    step = transforms.kl_in_reward("k1", 1.0, "sequence", policy="proximal_logprobs")
    assert step.needs == set(stats)
    got, _ = apply(step, SCORE, make_batch(SCORE, MASK, stats=stats))
    gap = np.where(MASK, stats["proximal_logprobs"] - stats["ref_logprobs"], 0).sum(2)
    np.testing.assert_allclose(got, SCORE - gap, rtol=1e-5)


def test_kl_in_reward_refuses_what_it_cannot_do(make_batch):
    with pytest.raises(UserError, match=r"kl_in_reward.kind = 'k4'"):
        transforms.kl_in_reward("k4")
    with pytest.raises(UserError, match="did you mean 'token'"):
        transforms.kl_in_reward("k1", level="tokens")
    stats = {"sampler_logprobs": numbers(0, 2, 2, 3), "ref_logprobs": numbers(1, 2, 2, 3)}
    with pytest.raises(UserError, match="after per-token rewards"):
        apply(
            transforms.kl_in_reward(level="sequence"),
            numbers(0, 2, 2, 3),
            make_batch(SCORE, MASK, stats=stats),
        )


# ---------------------------------------------------------------- per-token advantages


def test_reward_to_go_lifts_the_function_of_one_sequence(make_batch):
    rewards = numbers(4, 2, 2, 3)
    got, _ = apply(transforms.reward_to_go(0.5), rewards, make_batch(SCORE, MASK))
    for n, g in np.ndindex(2, 2):
        alone = advantages.reward_to_go(jnp.asarray(rewards[n, g]), jnp.asarray(MASK[n, g]), 0.5)
        np.testing.assert_allclose(got[n, g], alone, rtol=1e-6)


def test_gae_writes_returns_and_keeps_the_other_statistics(make_batch):
    stats = {"rollout_values": numbers(5, 2, 2, 3), "sampler_logprobs": numbers(6, 2, 2, 3)}
    step = transforms.gae(0.9, 0.7)
    assert step.needs == {"rollout_values"}
    got, batch = apply(step, SCORE, make_batch(SCORE, MASK, stats=stats))
    assert set(batch.stats) == {"rollout_values", "sampler_logprobs", "returns"}
    rewards = advantages.at_last_token(jnp.float32(3), jnp.asarray(MASK[1, 0]))
    values = jnp.asarray(stats["rollout_values"][1, 0])
    one, target = advantages.gae(rewards, values, jnp.asarray(MASK[1, 0]), 0.9, 0.7)
    np.testing.assert_allclose(got[1, 0], one, rtol=1e-6)
    np.testing.assert_allclose(batch.stats["returns"][1, 0], target, rtol=1e-6)


# ---------------------------------------------------------------- masks


def test_what_a_truncated_member_drew_for_others_stays(make_batch):
    n, g, t = 2, 3, 4
    batch = make_batch(np.zeros((n, g)), np.ones((n, g, t), bool))
    node = np.broadcast_to(np.arange(1, g + 1)[None, :, None], (n, g, t)).copy()
    node[:, :2, 0] = g + 1  # the first two begin alike, and the first drew it
    mask = np.ones((n, g, t), bool)
    mask[:, 1, 0] = False
    truncated = np.zeros((n, g), bool)
    truncated[:, 0] = True
    batch = batch.replace(
        mask=mask,
        members=np.ones((n, g), bool),
        truncated=truncated,
        ids={**batch.ids, "node": node},
    )
    _, edited = apply(transforms.mask_truncated(), np.zeros((n, g)), batch)
    expected = mask & ~truncated[:, :, None]
    expected[:, 0, 0] = True
    np.testing.assert_array_equal(edited.mask, expected)


@pytest.mark.parametrize("from_group", [False, True])
def test_mask_truncated_edits_masks(from_group, make_batch):
    truncated = np.array([[True, False], [False, False]])
    batch = make_batch(SCORE, MASK, truncated=truncated)
    values, edited = apply(transforms.mask_truncated(from_group=from_group), SCORE, batch)
    assert values.tolist() == SCORE.tolist()
    np.testing.assert_array_equal(edited.mask, MASK & ~truncated[..., None])
    np.testing.assert_array_equal(
        edited.members, ~truncated if from_group else np.ones_like(truncated)
    )


def test_clip_holds_values_and_keeps_nan(make_batch):
    values = np.array([[-5.0, np.nan], [0.5, 5.0]], np.float32)
    got, _ = apply(transforms.clip(-1, 2), values, make_batch(SCORE, MASK))
    np.testing.assert_array_equal(got, [[-1, np.nan], [0.5, 2]])


def test_lambda_by_length_and_undecayed_targets(make_batch):
    rewards, mask = [[1.0, 1.0]], [[[1, 1, 1, 1], [1, 0, 0, 0]]]
    estimates = numbers(0, 1, 2, 4)
    batch = make_batch(rewards, mask, stats={"rollout_values": estimates})
    transform = transforms.gae(1.0, length_scale=0.5, value_decay=1.0)
    values, edited, _ = transform.apply(batch.score(), batch, transform.init())
    by_length = transforms.gae(1.0, 0.5)  # 1 - 1 / (0.5 * 4)
    expected, _, _ = by_length.apply(batch.score(), batch, by_length.init())
    np.testing.assert_allclose(values[0, 0], expected[0, 0], atol=1e-6)
    assert values[0, 1, 0] == pytest.approx(1.0 - float(estimates[0, 1, 0]), abs=1e-6)
    np.testing.assert_allclose(edited.stats["returns"], np.asarray(mask), atol=1e-6)


def test_positive_marks_make_a_token_mean_one_over_good_completions(make_batch):
    batch = make_batch([[1.0, 0.0]], [[[1, 1, 0], [1, 1, 1]]])
    transform = mark_positive()
    values, edited, _ = transform.apply(batch.score(), batch, transform.init())
    assert values.tolist() == [[1.0, 0.0]]
    assert edited.stats["positive"].tolist() == [[[2.5, 2.5, 0.0], [0.0, 0.0, 0.0]]]


def test_silent_groups_are_made_up_for(make_batch):
    batch = make_batch([[1.0, 0.0], [1.0, 1.0]], np.ones((2, 2, 1)))
    transform = transforms.chain(
        transforms.per_group(advantages.mean_centred), scale_to_informative()
    )
    values, _, _ = transform.apply(batch.score(), batch, transform.init())
    assert values.tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_weights_are_exponential_and_capped(make_batch):
    batch = make_batch([[0.0, 1.0, 1e9]], np.ones((1, 3, 1)))
    transform = exponential_weights(0.5, 20.0)
    values, _, _ = transform.apply(batch.score(), batch, transform.init())
    np.testing.assert_allclose(values, [[1.0, np.exp(2.0), 20.0]], rtol=1e-6)
