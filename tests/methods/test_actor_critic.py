"""PPO and its relatives against loops from the papers, in float64, with every term."""

import jax
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    ragged,
)
from steps import estimates, live_tokens, with_nucleus

from jrl.methods import get_method
from jrl.objectives import compute_advantages


def ppo_loss(d, logprobs, values, entropy, advantages, returns, clip=0.2, c1=0.7, c2=0.05):
    total = 0.0
    for at, a in advantages.items():
        ratio = np.exp(logprobs[at] - d.sampler_logprobs[at])
        total -= min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
        old, new, target = d.rollout_values[at], values[at], returns[at]
        near = old + min(max(new - old, -0.3), 0.3)
        total += c1 * 0.5 * max((new - target) ** 2, (near - target) ** 2)
        total -= c2 * entropy[at]
    return total / max(len(advantages), 1)


def slope(loss, point, step=1e-6):
    gradient = np.zeros_like(point)
    for at in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[at] += step
        down[at] -= step
        gradient[at] = (loss(up) - loss(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_all_gradients_equal_the_paper(
    seed, whiten, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(seed)
    knobs = {"discount": 0.9, "whiten": whiten}
    advantages, returns = estimates(d, beta=0.1, decay=0.8, **knobs)
    method = get_method(
        "ppo",
        gae_lambda=0.8,
        kl_coef=0.1,
        value_coef=0.7,
        value_clip=0.3,
        entropy_coef=0.05,
        **knobs,
    )
    value, gradients = loss_and_gradients(method, make_batch(d), d)
    args = (d.logprobs, d.values, d.entropy)
    assert value == pytest.approx(ppo_loss(d, *args, advantages, returns), abs=2e-5)
    for place, name in enumerate(("logprobs", "values", "entropy")):

        def loss(x, place=place):
            point = [*args[:place], x, *args[place + 1 :]]
            return ppo_loss(d, *point, advantages, returns)

        expected = slope(loss, args[place])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradients[name], expected, rtol=2e-4, atol=2e-5)


def test_without_values_or_decay_ppo_credits_the_whole_score(make_ragged, make_batch):
    d = make_ragged(2)
    d.rollout_values = np.zeros_like(d.rollout_values)
    objective = get_method("ppo", gae_lambda=1.0, whiten=False).objective
    advantages, batch, _, _ = compute_advantages(objective, make_batch(d), objective.init())
    expected = np.where(d.live, d.rewards[..., None], 0)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(batch.stats["returns"], expected, atol=1e-6)


def test_ppo_asks_for_a_value_network_and_others_do_not():
    assert get_method("ppo").value
    assert not get_method("grpo").value
    assert {"values", "rollout_values", "returns"} <= get_method("ppo").objective.needs
    assert "entropy" not in get_method("ppo").objective.needs
    assert "entropy" in get_method("ppo", entropy_coef=0.1).objective.needs


# ---------------------------------------------------------------- VAPO


def vapo_loss(d, frozen, alpha=0.5, clip=(0.2, 0.28), c1=0.5, mu=0.1):
    total, count, right = 0.0, 0, []
    for (i, j), steps in live_tokens(d).items():
        decay = max(1 - 1 / (alpha * len(steps)), 0)
        v = [d.rollout_values[i, j, k] for k in steps] + [0.0]
        r = [0.0] * (len(steps) - 1) + [d.rewards[i, j]]
        delta = [r[k] + v[k + 1] - v[k] for k in range(len(steps))]
        for k, place in enumerate(steps):
            at = (i, j, place)
            a = sum(decay ** (s - k) * delta[s] for s in range(k, len(steps)))
            ratio = np.exp(np.clip(d.logprobs[at] - d.sampler_logprobs[at], -20, 20))
            total -= min(ratio * a, min(max(ratio, 1 - clip[0]), 1 + clip[1]) * a)
            total += c1 * 0.5 * (d.values[at] - d.rewards[i, j]) ** 2
            count += 1
            right += [d.logprobs[at]] if d.rewards[i, j] > 0 else []
    return total / max(count, 1) - mu * sum(right) / max(len(right), 1)


CASES = {
    "vapo": (vapo_loss, {"length_scale": 0.5}, ("logprobs", "values")),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_the_others_equal_the_paper(name):
    reference, coefficients, wrt = CASES[name]
    check(get_method(name, **coefficients), reference, wrt=wrt)


def test_the_value_targets_of_vapo_are_the_scores(make_batch):
    d = ragged(3)
    objective = get_method("vapo").objective
    _, batch, _, _ = compute_advantages(objective, make_batch(d), objective.init())
    expected = np.where(d.live, d.rewards[..., None], 0)
    np.testing.assert_allclose(batch.stats["returns"], expected, atol=1e-5)


# ---------------------------------------------------------------- the divergence's coefficient


@pytest.mark.parametrize("name", ["ppo", "vapo", "salsa", "rlhf_summarize", "nlpo"])
def test_the_coefficient_of_the_divergence_is_steered_to_its_target(name):
    """Ziegler's controller: 1 + 0.1 clip(kl / target - 1, -0.2, 0.2) times as much a step."""
    d = ragged(6)
    with_nucleus(d, np.random.default_rng(0))
    reference = d.teacher_logprobs if name == "nlpo" else d.ref_logprobs
    live = d.live & (d.in_nucleus > 0.5) if name == "nlpo" else d.live
    kl = (d.sampler_logprobs - reference)[live].mean()
    objective = get_method(name, kl_coef=0.5, kl_target=abs(kl) / 1.1).objective
    first, _, state, _ = compute_advantages(objective, as_batch(d), objective.init())
    fixed = get_method(name, kl_coef=0.5, kl_target=None).objective
    np.testing.assert_allclose(
        first, compute_advantages(fixed, as_batch(d), fixed.init())[0], atol=1e-6
    )
    factor = 1 + 0.1 * np.clip(np.sign(kl) * 1.1 - 1, -0.2, 0.2)
    (coef,) = jax.tree.leaves(state["advantage"])
    assert float(coef) == pytest.approx(0.5 * factor, rel=1e-4)


def test_relatives_of_ppo_inherit_its_coefficients():
    reads = get_method("vapo", kl_coef=0.1, entropy_coef=0.1).objective.needs
    assert reads >= {"ref_logprobs", "entropy"}
    for name in ("vapo", "salsa", "rlhf_summarize", "fact_rlhf", "mpo", "safe_rlhf"):
        stage = {"stage": "ppo"} if name == "mpo" else {}
        method = get_method(name, correction="tis", epochs=3, **stage)
        assert method.objective.surrogate.parts.correction.kind == "truncate"
        assert method.schedule.epochs == 3
