"""The methods of intrinsic.py against loops written from their papers."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    check,
    clipped_loss,
    mean_over,
    numbers,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
)

from jrl.zoo.methods.intrinsic import divergence_from_uniform, intuitor


def with_logits(d, rng):
    """Distributions over 5 tokens, and the statistic that a scoring pass makes of their logits."""
    d.logits = numbers(rng, *d.mask.shape, 5)
    shifted = np.log(np.exp(d.logits).sum(-1)) - d.logits.mean(-1) - np.log(5)
    d.rollout_divergence = shifted


def loss_of(d, reward_coef):
    scores = reward_coef * d.rewards
    for n, i, tokens in sequences(d):
        p = [np.exp(d.logits[n, i, t]) / np.exp(d.logits[n, i, t]).sum() for t in tokens]
        divergence = [sum(0.2 * np.log(0.2 / each)) for each in p]
        scores[n, i] += np.mean(divergence)
    advantage = standard_score(d, scores)

    def of_token(n, i, t):
        return clipped_loss(ratio(d, (n, i, t)), advantage[n, i], 0.2)

    return mean_over(d, of_token, "sequences")


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_intuitor_is_grpo_on_the_divergence_from_the_uniform_distribution(reward_coef):
    def loss(d, frozen):
        return loss_of(d, reward_coef)

    check(intuitor(reward_coef=reward_coef), loss, prepare=with_logits)


def test_without_a_difference_of_certainty_nothing_is_learned():
    d = ragged(3)
    d.rollout_divergence = np.ones(d.mask.shape)
    d.mask[..., 0] = True
    _, gradients = run(intuitor(), d)
    np.testing.assert_allclose(gradients["logprobs"], 0, atol=1e-6)
    logits = np.array([0.3, -1.0, 2.0, 0.0])
    probs = np.exp(logits) / np.exp(logits).sum()
    divergence = divergence_from_uniform({"logits": jnp.asarray(logits, jnp.float32)}, 0)
    assert float(divergence) == pytest.approx((0.25 * np.log(0.25 / probs)).sum(), rel=1e-5)
