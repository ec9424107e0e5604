"""Methods whose reward is the policy's own confidence: no answer, no judge."""

from __future__ import annotations

import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import NonNegative
from jrl.methods.group_relative import grpo
from jrl.objectives.advantages import live_mean
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Statistic, Transform
from jrl.zoo.methods.difficulty import self_certainty


def divergence_from_uniform(distributions: dict[str, Array], token: Array) -> Array:
    """[] float32, nats: KL(uniform || policy) over the vocabulary, of the raw logits.

    >>> round(float(divergence_from_uniform({"logits": jnp.array([0.0, 2.0])}, 0)), 4)
    0.4338
    """
    return self_certainty(distributions, token) - jnp.log(distributions["logits"].shape[-1])


CERTAINTY = Statistic("rollout_divergence", divergence_from_uniform, start=True)
"""``divergence_from_uniform`` at the start of the training step."""


def add_certainty(reward_coef: float) -> Transform:
    """Scores times ``reward_coef``, plus each completion's mean self-certainty in nats."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = trained(batch)
        mean = live_mean(batch.stats[CERTAINTY.name], live, axis=2)
        return reward_coef * values + mean, batch

    return stateless(apply, statistics=(CERTAINTY,))


@variant(grpo)
def intuitor(base: Method, reward_coef: NonNegative = 0.0) -> Method:
    """GRPO whose reward is how far the policy's distributions are from the uniform one.

    Intuitor of "Learning to Reason without External Rewards" (arXiv:2505.19590), with V the size of
    the vocabulary, U the uniform distribution and p_t the policy's before token t:

        u(o) = 1/|o| sum_t KL(U || p_t) = -1/(|o| V) sum_t sum_j log(V p_t(j))
        A_i = (u_i - mean(u)) / std(u)

    at the start of the training step, from logits without temperature. ``reward_coef`` times the
    run's own rewards is added; it is 0 in the paper. A run needs a reward part all the same, by
    which its accuracy is measured. Departure: beta (``kl_coef``) is ``grpo``'s 0 unless given; the
    released run on MATH has 0.005.
    """
    return base.before(add_certainty(reward_coef))
