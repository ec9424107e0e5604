"""The methods of policy_gradient.py and reinforce.py against float64 loops from their papers.

A reference takes the batch's numbers, the log-probabilities to differentiate and a second copy of
them that stands wherever the paper stops the gradient; the gradient is a central difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.methods import get_method
from jrl.objectives import (
    aggregates,
    combine_terms,
    compute_advantages,
    policy_loss,
    surrogates,
)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
few = settings(max_examples=5, deadline=None, derandomize=True)


# ---------------------------------------------------------------- references


def members_of(d, n):
    return [i for i in range(d.members.shape[1]) if d.members[n, i]]


def tokens_of(d, n, i):
    return [t for t in range(d.mask.shape[2]) if d.mask[n, i, t]]


def sequences(d):
    """(prompt, member, its live tokens) of every live member with a live token."""
    n_prompts, n_members, _ = d.mask.shape
    every = [(n, i) for n in range(n_prompts) for i in range(n_members) if d.members[n, i]]
    return [(n, i, tokens_of(d, n, i)) for n, i in every if tokens_of(d, n, i)]


def normalised(d, rewards, eps=1e-6):
    a = np.zeros_like(rewards)
    for n in range(len(rewards)):
        live = members_of(d, n)
        if len(live) < 2:
            continue
        group = [rewards[n, i] for i in live]
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        for i in live:
            a[n, i] = (rewards[n, i] - mean) / (std + eps)
    return a


def ppo_token(ratio, a, low=0.2, high=0.2):
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def ratio_at(d, lp, at, below="sampler_logprobs"):
    return np.exp(np.clip(lp[at] - getattr(d, below)[at], -20, 20))


def grpo_loss(d, lp, frozen, kl_coef=0.0):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        inner = 0.0
        for t in tokens:
            inner += ppo_token(ratio_at(d, lp, (n, i, t)), a[n, i])
            delta = d.ref_logprobs[n, i, t] - lp[n, i, t]
            inner += kl_coef * (np.exp(delta) - delta - 1)
        total += inner / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_dual_loss(d, lp, frozen, c=1.1):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            gain = -ppo_token(ratio_at(d, lp, (n, i, t)), a[n, i])
            gain = max(gain, c * a[n, i]) if a[n, i] < 0 else gain
            total -= gain / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_tis_loss(d, lp, frozen, cap=1.2):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            at = (n, i, t)
            weight = min(np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at]), cap)
            loss = ppo_token(ratio_at(d, lp, at, "proximal_logprobs"), a[n, i])
            total += weight * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_icepop_loss(d, lp, frozen, cap=1.2):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            at = (n, i, t)
            weight = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
            weight = weight if 1 / cap <= weight <= cap else 0.0
            loss = ppo_token(ratio_at(d, lp, at, "proximal_logprobs"), a[n, i])
            total += weight * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_sequence_mis_loss(d, lp, frozen, cap=1.2):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        weight = np.exp(
            sum(d.proximal_logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens)
        )
        for t in tokens:
            loss = ppo_token(ratio_at(d, lp, (n, i, t), "proximal_logprobs"), a[n, i])
            total += (weight if weight <= cap else 0.0) * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def dr_grpo_loss(d, lp, frozen, max_tokens=7):
    total = 0.0
    for n, i, tokens in sequences(d):
        live = members_of(d, n)
        a = d.rewards[n, i] - sum(d.rewards[n, j] for j in live) / len(live)
        total += sum(ppo_token(ratio_at(d, lp, (n, i, t)), a) for t in tokens)
    return total / max(len(sequences(d)), 1) / max_tokens


def dapo_loss(d, lp, frozen, limit=4, buffer=3, scale=0.5):
    shaped = d.rewards.copy()
    for n, i in np.ndindex(shaped.shape):
        length = d.lengths[n, i]
        if length > limit:
            shaped[n, i] += -1 * scale
        elif length > limit - buffer:
            shaped[n, i] += ((limit - buffer) - length) / buffer * scale
    a, total, count = normalised(d, shaped), 0.0, 0
    for n, i, tokens in sequences(d):
        for t in tokens:
            total += ppo_token(ratio_at(d, lp, (n, i, t)), a[n, i], 0.2, 0.28)
            count += 1
    return total / max(count, 1)


def gspo_loss(d, lp, frozen, low=0.05, high=0.1):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        gaps = [lp[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        total += ppo_token(np.exp(sum(gaps) / len(tokens)), a[n, i], low, high)
    return total / max(len(sequences(d)), 1)


def gspo_token_loss(d, lp, frozen, low=0.05, high=0.1):
    a, total = normalised(d, d.rewards), 0.0
    for n, i, tokens in sequences(d):
        gaps = [frozen[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        s = np.exp(sum(gaps) / len(tokens))
        for t in tokens:
            s_t = s * np.exp(lp[n, i, t]) / np.exp(frozen[n, i, t])
            total += ppo_token(s_t, a[n, i], low, high) / len(tokens)
    return total / max(len(sequences(d)), 1)


def cispo_loss(d, lp, frozen, low=0.2, high=0.3):
    a, total, count = normalised(d, d.rewards), 0.0, 0
    for n, i, tokens in sequences(d):
        for t in tokens:
            weight = min(max(ratio_at(d, frozen, (n, i, t)), 1 - low), 1 + high)
            total -= weight * a[n, i] * lp[n, i, t]
            count += 1
    return total / max(count, 1)


def rloo_loss(d, lp, frozen, beta=0.1):
    returns = d.rewards.copy()
    for n, i in np.ndindex(returns.shape):
        for t in tokens_of(d, n, i):
            returns[n, i] -= beta * (d.sampler_logprobs[n, i, t] - d.ref_logprobs[n, i, t])
    total = 0.0
    for n, i, tokens in sequences(d):
        others = [returns[n, j] for j in members_of(d, n) if j != i]
        a = returns[n, i] - sum(others) / len(others) if others else 0.0
        total -= a * sum(lp[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


def reinforce_plus_plus_loss(d, lp, frozen, beta=0.1):
    to_go = {}
    for n, i, tokens in sequences(d):
        for t in tokens:
            later = [s for s in tokens if s >= t]
            gaps = [d.sampler_logprobs[n, i, s] - d.ref_logprobs[n, i, s] for s in later]
            to_go[n, i, t] = d.rewards[n, i] - beta * sum(gaps)
    if not to_go:
        return 0.0
    mean = sum(to_go.values()) / len(to_go)
    variance = sum((a - mean) ** 2 for a in to_go.values()) / len(to_go)
    total = 0.0
    for at, a in to_go.items():
        total += ppo_token(ratio_at(d, lp, at), (a - mean) / (variance + 1e-8) ** 0.5)
    return total / len(to_go)


def remax_loss(d, lp, frozen):
    total = 0.0
    for n, i, tokens in sequences(d):
        total -= (d.rewards[n, i] - d.rewards[n, 0]) * sum(lp[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


def reinforce_loss(d, lp, frozen):
    total = sum(-d.rewards[n, i] * lp[n, i, t] for n, i, ts in sequences(d) for t in ts)
    return total / max(len(sequences(d)), 1)


def reinforce_batch_loss(d, lp, frozen):
    live = [d.rewards[n, i] for n, i in np.ndindex(d.rewards.shape) if d.members[n, i]]
    b = sum(live) / max(len(live), 1)
    total = sum(-(d.rewards[n, i] - b) * lp[n, i, t] for n, i, ts in sequences(d) for t in ts)
    return total / max(len(sequences(d)), 1)


CASES = {
    "grpo": (grpo_loss, "grpo", {}),
    "grpo with k3": (lambda d, lp, f: grpo_loss(d, lp, f, 0.04), "grpo", {"kl_coef": 0.04}),
    "grpo with dual clip": (grpo_dual_loss, "grpo", {"dual_clip": 1.1}),
    "grpo with tis": (grpo_tis_loss, "grpo", {"correction": "tis", "correction_cap": 1.2}),
    "grpo with icepop": (
        grpo_icepop_loss,
        "grpo",
        {"correction": "icepop", "correction_cap": 1.2},
    ),
    "grpo with sequence masks": (
        grpo_sequence_mis_loss,
        "grpo",
        {"correction": "sequence_mis", "correction_cap": 1.2},
    ),
    "dr_grpo": (dr_grpo_loss, "dr_grpo", {"max_tokens": 7}),
    "dapo": (
        dapo_loss,
        "dapo",
        {"max_tokens": 4, "buffer_tokens": 3, "overlong_scale": 0.5},
    ),
    "gspo": (gspo_loss, "gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    "gspo at the paper's bounds": (
        lambda d, lp, f: gspo_loss(d, lp, f, 3e-4, 4e-4),
        "gspo",
        {},
    ),
    "gspo-token": (
        gspo_token_loss,
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.1, "gradient": "token"},
    ),
    "cispo": (cispo_loss, "cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    "rloo": (rloo_loss, "rloo", {"kl_coef": 0.1}),
    "reinforce_plus_plus": (reinforce_plus_plus_loss, "reinforce_plus_plus", {"kl_coef": 0.1}),
    "remax": (remax_loss, "remax", {}),
    "reinforce": (reinforce_loss, "reinforce", {}),
    "reinforce with a baseline": (reinforce_batch_loss, "reinforce", {"baseline": "batch"}),
}


def central_difference(loss, point, step=1e-6):
    gradient = np.zeros_like(point)
    for at in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[at] += step
        down[at] -= step
        gradient[at] = (loss(up) - loss(down)) / (2 * step)
    return gradient


def assert_matches(reference, method, d, batch, run):
    value, gradients = run(method, batch, d)
    expected = reference(d, d.logprobs, d.logprobs)
    slope = central_difference(lambda lp: reference(d, lp, d.logprobs), d.logprobs)
    scale = max(1.0, np.abs(slope).max())
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-5 * scale)
    np.testing.assert_allclose(gradients["logprobs"], slope, rtol=2e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case, make_ragged, make_batch, loss_and_gradients):
    reference, name, coefficients = CASES[case]
    for seed, spread in ((0, 0.3), (1, 0.05), (2, 3.0)):
        d = make_ragged(seed, spread=spread, baseline=name == "remax")
        assert d.live.any()
        method = get_method(name, **coefficients)
        assert_matches(reference, method, d, make_batch(d), loss_and_gradients)


@few
@given(shape=shapes, seed=st.integers(0, 10**6), case=st.sampled_from(sorted(CASES)))
def test_any_shape_equals_the_paper(shape, seed, case, make_ragged, make_batch, loss_and_gradients):
    reference, name, coefficients = CASES[case]
    d = make_ragged(seed, *shape, baseline=name == "remax")
    method = get_method(name, **coefficients)
    assert_matches(reference, method, d, make_batch(d), loss_and_gradients)


# ---------------------------------------------------------------- guards


@pytest.mark.parametrize("case", [c for c in CASES if c != "reinforce"])
def test_extreme_but_finite_numbers_give_finite_losses(
    case, make_ragged, make_batch, loss_and_gradients
):
    _, name, coefficients = CASES[case]
    d = make_ragged(5, baseline=name == "remax")
    d.logprobs = np.where(np.arange(5) % 2, -1e4, -1e-4) * np.ones_like(d.logprobs)
    d.sampler_logprobs = np.where(np.arange(5) % 3, -5e3, -1e-6) * np.ones_like(d.logprobs)
    d.rewards = d.rewards * 1e6
    value, gradients = loss_and_gradients(get_method(name, **coefficients), make_batch(d), d)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("case", CASES)
def test_a_nan_reward_comes_out_as_nan(case, make_ragged, make_batch, loss_and_gradients):
    _, name, coefficients = CASES[case]
    d = make_ragged(0, baseline=name == "remax")
    n, i, _ = sequences(d)[0]
    d.rewards[n, i] = np.nan
    value, _ = loss_and_gradients(get_method(name, **coefficients), make_batch(d), d)
    assert np.isnan(value)


# ---------------------------------------------------------------- identities


def replaced(method, **parts):
    return method._replace(objective=method.objective._replace(**parts))


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_plus_plus"]
)
def test_on_policy_gradient_is_reinforce_with_the_same_advantages(
    name, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(3)
    d.logprobs = d.sampler_logprobs
    coefficients = {"max_tokens": 5} if name in ("dr_grpo", "dapo") else {}
    method = get_method(name, **coefficients)
    plain = replaced(method, surrogate=surrogates.reinforce())
    batch = make_batch(d)
    _, ours = loss_and_gradients(method, batch, d)
    _, theirs = loss_and_gradients(plain, batch, d)
    assert np.abs(theirs["logprobs"]).max() > 0.01
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-6)


def test_gspo_is_grpo_at_length_one(make_ragged, make_batch, loss_and_gradients):
    d = make_ragged(4, 3, 5, 1)
    batch = make_batch(d)
    one, g_one = loss_and_gradients(get_method("gspo", clip_low=0.2, clip_high=0.2), batch, d)
    two, g_two = loss_and_gradients(get_method("grpo"), batch, d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


def test_gspo_token_has_the_gradient_of_gspo(make_ragged, make_batch, loss_and_gradients):
    d = make_ragged(6)
    bounds = {"clip_low": 0.05, "clip_high": 0.1}
    _, whole = loss_and_gradients(get_method("gspo", **bounds), make_batch(d), d)
    token = get_method("gspo", gradient="token", **bounds)
    _, single = loss_and_gradients(token, make_batch(d), d)
    np.testing.assert_allclose(whole["logprobs"], single["logprobs"], atol=1e-6)


def test_dapo_at_equal_clips_is_token_mean_grpo(make_ragged, make_batch, loss_and_gradients):
    d = make_ragged(7)
    batch = make_batch(d)
    dapo = get_method("dapo", max_tokens=5, overlong_scale=0.0, clip_high=0.2)
    grpo = replaced(get_method("grpo"), aggregate=aggregates.token_mean)
    one, g_one = loss_and_gradients(dapo, batch, d)
    two, g_two = loss_and_gradients(grpo, batch, d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


def test_without_a_correction_proximal_equal_to_sampler_changes_nothing(
    make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(8)
    d.proximal_logprobs = d.sampler_logprobs
    plain, _ = loss_and_gradients(get_method("grpo"), make_batch(d), d)
    for correction in ("proximal", "tis", "icepop", "sequence_tis", "sequence_mis"):
        method = get_method("grpo", correction=correction)
        corrected, _ = loss_and_gradients(method, make_batch(d), d)
        assert corrected == pytest.approx(plain, abs=1e-6)


def test_masking_truncated_completions_takes_their_gradient_away(
    make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(9)
    d.truncated = d.lengths == 5
    assert (d.live & d.truncated[..., None]).any()
    kept = get_method("dapo", max_tokens=5)
    masked = get_method("dapo", max_tokens=5, mask_truncated=True)
    _, with_them = loss_and_gradients(kept, make_batch(d), d)
    _, without = loss_and_gradients(masked, make_batch(d), d)
    assert np.abs(with_them["logprobs"][d.truncated]).max() > 0
    assert np.abs(without["logprobs"][d.truncated]).max() == 0
    assert np.abs(without["logprobs"]).max() > 0


# ---------------------------------------------------------------- invariances, all methods at once

EVERY = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo"]


def method_with_everything(name):
    extra = {"max_tokens": 5} if name in ("dr_grpo", "dapo") else {}
    if name not in ("dapo", "cispo", "remax"):
        extra["kl_coef"] = 0.1
    if name == "ppo":
        extra["entropy_coef"] = 0.1
    return get_method(name, **extra)


@pytest.mark.parametrize("name", EVERY)
def test_padding_of_any_content_changes_nothing(name, make_ragged, make_batch, loss_and_gradients):
    d = make_ragged(10, baseline=name == "remax")
    wide = make_ragged(10, baseline=name == "remax")
    _, g, t = d.mask.shape
    for key, value in vars(d).items():
        if key == "ids":  # read by none of these
            continue
        padding = [(0, 0), (0, 1)] + ([(0, 2)] if value.ndim == 3 else [])
        filler = False if value.dtype == bool else 0 if key == "lengths" else np.nan
        setattr(wide, key, np.pad(value, padding, constant_values=filler))
    method = method_with_everything(name)
    narrow_loss, narrow = loss_and_gradients(method, make_batch(d), d)
    wide_loss, padded = loss_and_gradients(method, make_batch(wide), wide)
    assert wide_loss == pytest.approx(narrow_loss, abs=1e-6)
    for key, gradient in narrow.items():
        np.testing.assert_allclose(padded[key][:, :g, :t], gradient, atol=1e-7)
        assert not padded[key][:, g:].any()
        assert not padded[key][:, :, t:].any()


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_prompts_and_members_changes_nothing(
    name, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(11, baseline=name == "remax")
    rng = np.random.default_rng(0)
    order = np.ix_(rng.permutation(3), rng.permutation(4))
    mixed = make_ragged(11)
    for key, value in vars(d).items():
        if key != "ids":  # read by none of these
            setattr(mixed, key, value[order])
    method = method_with_everything(name)
    one, gradients = loss_and_gradients(method, make_batch(d), d)
    two, shuffled = loss_and_gradients(method, make_batch(mixed), mixed)
    assert two == pytest.approx(one, rel=1e-5)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(shuffled[key], gradient[order], atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "ppo"])
def test_sums_and_counts_add_up_over_microbatches(name, make_ragged, make_batch):
    d = make_ragged(12, 4, 3, 5)
    objective = method_with_everything(name).objective
    trained = {
        k: jnp.asarray(getattr(d, k), jnp.float32) for k in ("logprobs", "values", "entropy")
    }
    state = objective.init()
    advantages, batch, state, _ = compute_advantages(objective, make_batch(d), state)
    whole = policy_loss(objective, trained, batch, advantages, state)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        cut = lambda x, rows=rows: x[rows]  # noqa: E731
        piece = jax.tree.map(cut, batch.replace(reward_weights=jnp.ones(4)))
        piece = piece.replace(reward_weights=batch.reward_weights)
        parts.append(
            policy_loss(objective, jax.tree.map(cut, trained), piece, advantages[rows], state)
        )
    added = jax.tree.map(lambda a, b: a + b, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), added, whole)
    loss = combine_terms(objective, added[0], state)
    assert float(loss) == pytest.approx(float(combine_terms(objective, whole[0], state)), rel=1e-5)


def test_coefficients_may_be_traced(make_ragged, make_batch):
    d = make_ragged(13)
    batch = make_batch(d)
    trained = {"logprobs": jnp.asarray(d.logprobs, jnp.float32)}

    def loss(clip_high, kl_coef):
        objective = get_method("grpo", clip_high=clip_high, kl_coef=kl_coef).objective
        state = objective.init()
        advantages, edited, state, _ = compute_advantages(objective, batch, state)
        terms, _ = policy_loss(objective, trained, edited, advantages, state)
        return combine_terms(objective, terms, state)

    highs, coefs = jnp.array([0.1, 0.3]), jnp.array([0.0, 0.5])
    together = jax.jit(jax.vmap(loss))(highs, coefs)
    apart = [loss(float(high), float(coef)) for high, coef in zip(highs, coefs, strict=True)]
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert abs(apart[0] - apart[1]) > 1e-3
