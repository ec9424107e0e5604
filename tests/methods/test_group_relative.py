"""The methods of group_relative.py against float64 loops from their papers.

A reference takes the batch's numbers, the log-probabilities to differentiate and a second copy of
them that stands wherever the paper stops the gradient; the gradient is a central difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    advantages_of,
    assert_matches,
    check,
    clipped_loss,
    members_of,
    ragged,
    sequences,
    standard_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.methods import get_method
from jrl.objectives import (
    aggregates,
    combine_terms,
    compute_advantages,
    policy_loss,
    ratios,
)
from jrl.objectives.corrections import CORRECTIONS

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))


few = settings(max_examples=5, deadline=None, derandomize=True)


# ---------------------------------------------------------------- references


def ratio_at(d, lp, at, below="sampler_logprobs"):
    return np.exp(np.clip(lp[at] - getattr(d, below)[at], -20, 20))


def grpo_loss(d, lp, frozen, kl_coef=0.0):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        inner = 0.0
        for t in tokens:
            inner += clipped_loss(ratio_at(d, lp, (n, i, t)), a[n, i])
            delta = d.ref_logprobs[n, i, t] - lp[n, i, t]
            inner += kl_coef * (np.exp(delta) - delta - 1)
        total += inner / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_dual_loss(d, lp, frozen, c=1.1):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            gain = -clipped_loss(ratio_at(d, lp, (n, i, t)), a[n, i])
            gain = max(gain, c * a[n, i]) if a[n, i] < 0 else gain
            total -= gain / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_tis_loss(d, lp, frozen, cap=1.2):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            at = (n, i, t)
            weight = min(np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at]), cap)
            loss = clipped_loss(ratio_at(d, lp, at, "proximal_logprobs"), a[n, i])
            total += weight * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_icepop_loss(d, lp, frozen, cap=1.2, low=1 / 1.2):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            at = (n, i, t)
            weight = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
            weight = weight if low <= weight <= cap else 0.0
            loss = clipped_loss(ratio_at(d, lp, at, "proximal_logprobs"), a[n, i])
            total += weight * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_sequence_mis_loss(d, lp, frozen, cap=1.2):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        weight = np.exp(
            sum(d.proximal_logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens)
        )
        for t in tokens:
            loss = clipped_loss(ratio_at(d, lp, (n, i, t), "proximal_logprobs"), a[n, i])
            total += (weight if weight <= cap else 0.0) * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def dr_grpo_loss(d, lp, frozen, max_tokens=7):
    total = 0.0
    for n, i, tokens in sequences(d):
        live = members_of(d, n)
        a = d.rewards[n, i] - sum(d.rewards[n, j] for j in live) / len(live)
        total += sum(clipped_loss(ratio_at(d, lp, (n, i, t)), a) for t in tokens)
    return total / max(len(sequences(d)), 1) / max_tokens


def dapo_loss(d, lp, frozen, limit=4, buffer=3, scale=0.5):
    shaped = d.rewards.copy()
    for n, i in np.ndindex(shaped.shape):
        length = d.lengths[n, i]
        if length > limit:
            shaped[n, i] += -1 * scale
        elif length > limit - buffer:
            shaped[n, i] += ((limit - buffer) - length) / buffer * scale
    a, total, count = standard_score(d, shaped), 0.0, 0
    for n, i, tokens in sequences(d):
        for t in tokens:
            total += clipped_loss(ratio_at(d, lp, (n, i, t)), a[n, i], 0.2, 0.28)
            count += 1
    return total / max(count, 1)


def grpo_mis_loss(d, lp, frozen, cap=1.2):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        for t in tokens:
            at = (n, i, t)
            weight = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
            loss = clipped_loss(ratio_at(d, lp, at, "proximal_logprobs"), a[n, i])
            total += (weight if weight <= cap else 0.0) * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_geometric_mis_loss(d, lp, frozen, cap=1.2):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        gaps = [d.proximal_logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        mean = np.exp(sum(gaps) / len(gaps))
        weight = 1.0 if 1 / cap <= mean <= cap else 0.0  # not weighted where it is kept
        for t in tokens:
            loss = clipped_loss(ratio_at(d, lp, (n, i, t), "proximal_logprobs"), a[n, i])
            total += weight * loss / len(tokens)
    return total / max(len(sequences(d)), 1)


def grpo_off_policy_loss(d, lp, frozen, limit=0.1):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        drift = np.mean([d.sampler_logprobs[n, i, t] - frozen[n, i, t] for t in tokens])
        if a[n, i] < 0 and drift > limit:
            continue
        losses = [clipped_loss(ratio_at(d, lp, (n, i, t)), a[n, i]) for t in tokens]
        total += sum(losses) / len(tokens)
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
    "grpo with icepop as first published": (
        lambda d, lp, f: grpo_icepop_loss(d, lp, f, 5.0, 0.5),
        "grpo",
        {"correction": "icepop", "correction_cap": 5.0, "correction_low": 0.5},
    ),
    "grpo with sequence masks": (
        grpo_sequence_mis_loss,
        "grpo",
        {"correction": "sequence_mis", "correction_cap": 1.2},
    ),
    "grpo with masked weights": (
        grpo_mis_loss,
        "grpo",
        {"correction": "mis", "correction_cap": 1.2},
    ),
    "grpo with geometric masks": (
        grpo_geometric_mis_loss,
        "grpo",
        {"correction": "geometric_mis", "correction_cap": 1.2},
    ),
    "grpo without far sequences": (grpo_off_policy_loss, "grpo", {"off_policy_limit": 0.1}),
    "dr_grpo": (dr_grpo_loss, "dr_grpo", {"max_tokens": 7}),
    "dapo": (
        dapo_loss,
        "dapo",
        {"max_tokens": 4, "buffer_tokens": 3, "overlong_scale": 0.5},
    ),
}


def harnessed(reference):
    """The reference as the harness calls it."""
    return lambda d, frozen: reference(d, d.logprobs, frozen.logprobs)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients = CASES[case]
    method = get_method(name, **coefficients)
    check(method, harnessed(reference))


@few
@given(shape=shapes, seed=st.integers(0, 10**6), case=st.sampled_from(sorted(CASES)))
def test_any_shape_equals_the_paper(shape, seed, case):
    reference, name, coefficients = CASES[case]
    method = get_method(name, **coefficients)
    assert_matches(method, harnessed(reference), ragged(seed, *shape))


# ---------------------------------------------------------------- identities


def replaced(method, **parts):
    return method._replace(objective=method.objective._replace(**parts))


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "dr_grpo",
        "dapo",
    ],
)
def test_on_policy_gradient_is_reinforce_with_the_same_advantages(
    name, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(3)
    d.logprobs = d.sampler_logprobs
    coefficients = {"max_tokens": 5} if name in ("dr_grpo", "dapo") else {}
    method = get_method(name, **coefficients)
    plain = replaced(method, surrogate=ratios.reinforce())
    batch = make_batch(d)
    _, ours = loss_and_gradients(method, batch, d)
    _, theirs = loss_and_gradients(plain, batch, d)
    assert np.abs(theirs["logprobs"]).max() > 0.01
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-6)


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
    for correction in set(CORRECTIONS) - {"none"}:
        method = get_method("grpo", correction=correction)
        corrected, _ = loss_and_gradients(method, make_batch(d), d)
        assert corrected == pytest.approx(plain, abs=1e-6)


def test_masking_truncated_completions_takes_their_gradient_away(
    make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(9)
    d.truncated = d.lengths == 5
    assert (d.live & d.truncated[..., None]).any()
    unmasked = get_method("dapo", max_tokens=5)
    masked = get_method("dapo", max_tokens=5, mask_truncated=True)
    _, with_them = loss_and_gradients(unmasked, make_batch(d), d)
    _, without = loss_and_gradients(masked, make_batch(d), d)
    assert np.abs(with_them["logprobs"][d.truncated]).max() > 0
    assert np.abs(without["logprobs"][d.truncated]).max() == 0
    assert np.abs(without["logprobs"]).max() > 0
    # the penalty of a masked completion still counts in its group's statistics
    punished, left = (advantages_of(method, d)[~d.truncated] for method in (unmasked, masked))
    np.testing.assert_allclose(left, punished, atol=1e-6)


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
    pairs = [(float(high), float(coef)) for high, coef in zip(highs, coefs, strict=True)]
    one_by_one = [jax.jit(lambda pair=pair: loss(*pair))() for pair in pairs]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5)
    assert abs(one_by_one[0] - one_by_one[1]) > 1e-3
