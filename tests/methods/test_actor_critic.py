"""PPO against loops written from the papers, in float64, with every term switched on."""

import numpy as np
import pytest

from jrl.methods import get_method
from jrl.objectives import compute_advantages


def live_tokens(d):
    n, g, t = d.mask.shape
    found = {}
    for i, j in np.ndindex(n, g):
        steps = [k for k in range(t) if d.live[i, j, k]]
        if steps:
            found[i, j] = steps
    return found


def estimates(d, *, beta, discount, decay, whiten):
    """Advantages and returns by at: GAE as a double sum over later temporal differences."""
    advantages, returns = {}, {}
    for (i, j), steps in live_tokens(d).items():
        v = [d.rollout_values[i, j, k] for k in steps] + [0.0]
        r = [-beta * (d.sampler_logprobs[i, j, k] - d.ref_logprobs[i, j, k]) for k in steps]
        r[-1] += d.rewards[i, j]
        delta = [r[k] + discount * v[k + 1] - v[k] for k in range(len(steps))]
        for k, place in enumerate(steps):
            tail = range(k, len(steps))
            a = sum((discount * decay) ** (later - k) * delta[later] for later in tail)
            advantages[i, j, place] = a
            returns[i, j, place] = a + v[k]
    if whiten and advantages:
        mean = sum(advantages.values()) / len(advantages)
        variance = sum((a - mean) ** 2 for a in advantages.values()) / len(advantages)
        advantages = {at: (a - mean) / np.sqrt(variance + 1e-8) for at, a in advantages.items()}
    return advantages, returns


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
