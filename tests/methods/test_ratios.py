"""The methods of ratios.py against loops written from their papers."""

import numpy as np
import pytest
from harness import (
    assert_cut,
    assert_matches,
    assert_reinforce_on_policy,
    check,
    clipped_loss,
    log_ratio,
    lower,
    over_sequences,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.methods import get_method

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))


few = settings(max_examples=5, deadline=None, derandomize=True)


TURNWISE = '''
from jrl.methods import variant
from jrl.methods.group_relative import grpo
from jrl.methods.ratios import gspo
from jrl.objectives import ratios


@variant(gspo)
def by_turn(base):
    """GSPO with a ratio for each turn."""
    return base.with_(ratio=ratios.segment("turn"))


@variant(grpo)
def by_state(base):
    """GRPO with a ratio for each state, whichever tokens it has."""
    return base.with_(ratio=ratios.segment("state"))
'''


def segment_loss(label):
    def loss(d, frozen):
        def of_sequence(a, places):
            parts = {}
            for at in places:
                parts.setdefault(d.ids[label][at], []).append(log_ratio(d, at))
            s = [np.exp(np.mean(parts[d.ids[label][at]])) for at in places]
            return np.mean([clipped_loss(x, a, 0.1, 0.2) for x in s])

        return over_sequences(d, of_sequence)

    return loss


@pytest.fixture
def turnwise(tmp_path):
    path = tmp_path / "turnwise.py"
    path.write_text(TURNWISE)
    return path


@pytest.mark.parametrize("label", ["turn", "state"])
def test_a_sibling_of_ones_own_has_a_ratio_for_each_segment(label, turnwise):
    method = get_method(f"{turnwise}:by_{label}", clip_low=0.1, clip_high=0.2)
    check(method, segment_loss(label), ids=(label,))


def test_without_labels_the_whole_completion_is_one_segment(turnwise):
    d = ragged(4)
    got, of_turn = run(get_method(f"{turnwise}:by_turn"), d)
    expected, slope = run(get_method("gspo"), d)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(of_turn["logprobs"], slope["logprobs"], atol=1e-6)


def gmpo_loss(d, frozen, low=0.2, high=0.3):
    def of_sequence(a, places):
        logs = [log_ratio(d, at) for at in places]
        if a > 0:
            logs = [min(x, high) for x in logs]
        if a < 0:
            logs = [max(x, -low) for x in logs]
        return -a * np.exp(sum(logs) / len(logs))

    return over_sequences(d, of_sequence)


def gspo_loss(d, frozen, low=0.05, high=0.1):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        gaps = [d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        total += clipped_loss(np.exp(sum(gaps) / len(tokens)), a[n, i], low, high)
    return total / max(len(sequences(d)), 1)


def cispo_loss(d, frozen, low=0.2, high=0.3):
    a, total, count = standard_score(d), 0.0, 0
    for n, i, tokens in sequences(d):
        for t in tokens:
            weight = min(max(ratio(frozen, (n, i, t)), 1 - low), 1 + high)
            total -= weight * a[n, i] * d.logprobs[n, i, t]
            count += 1
    return total / max(count, 1)


PREPARE = {"gmpo": lower}


CASES = {
    "gspo": (gspo_loss, "gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    "gspo at the paper's bounds": (
        lambda d, f: gspo_loss(d, f, 3e-4, 4e-4),
        "gspo",
        {},
    ),
    "cispo": (cispo_loss, "cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    "gmpo": (gmpo_loss, "gmpo", {"clip_low": 0.2, "clip_high": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients = CASES[case]
    check(get_method(name, **coefficients), reference, prepare=PREPARE.get(name))


@few
@given(shape=shapes, seed=st.integers(0, 10**6), case=st.sampled_from(["gspo", "cispo"]))
def test_any_shape_equals_the_paper(shape, seed, case):
    reference, name, coefficients = CASES[case]
    assert_matches(get_method(name, **coefficients), reference, ragged(seed, *shape))


def test_token_mean_of_an_off_policy_batch_is_cut():
    """The clip of gmpo is both open and shut on the batches above."""
    assert_cut("gmpo", CASES["gmpo"][2])


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize("name", ["gspo", "cispo", "gmpo"])
def test_on_policy_gradient_is_reinforce_with_the_same_advantages(name):
    d = ragged(3)
    lower(d, None)
    d.logprobs = d.proximal_logprobs = d.sampler_logprobs.copy()
    assert_reinforce_on_policy(get_method(name), d)


def test_gspo_is_grpo_at_length_one():
    d = ragged(4, 3, 5, 1)
    one, g_one = run(get_method("gspo", clip_low=0.2, clip_high=0.2), d)
    two, g_two = run(get_method("grpo"), d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


def test_gmpo_at_length_one_clipped_at_the_same_ratios_is_grpo():
    d = ragged(4, g=5, t=1)
    one, g_one = run(get_method("gmpo", clip_low=0.1, clip_high=0.2), d)
    low, high = 1 - np.exp(-0.1), np.exp(0.2) - 1
    two, g_two = run(get_method("grpo", clip_low=float(low), clip_high=float(high)), d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)
