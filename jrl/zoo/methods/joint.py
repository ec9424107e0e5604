"""Methods that train the policy and its judge in one run."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Ddof, Flag, Fraction, Positive, Whole
from jrl.methods.group_relative import grpo
from jrl.objectives.advantages import group_mean_std, live_mean
from jrl.objectives.aggregates import token_mean
from jrl.objectives.transforms import trained
from jrl.types import Array, Batch, Transform
from jrl.zoo.networks.policies import Policies

# ---------------------------------------------------------------- RL Tango


def step_points(step: Array, verdicts: Array, verified: Array, live: Array) -> tuple[Array, Array]:
    """Points of ONE solution's steps at the tokens that end them: 1 / n for right, else -1 / n.

    Args:
      step: [T] int32, the number of each token's step, -1 for none.
      verdicts: [] int32, bit k says that step k is right.
      verified: [] int32, n, how many steps have a verdict; 0 for no points.
      live: [T] bool, tokens that are trained on.

    Returns:
      ([T] float32 points, [T] bool where they stand).

    >>> step, live = jnp.array([0, 0, 1, -1]), jnp.ones(4, bool)
    >>> [x.tolist() for x in step_points(step, jnp.int32(1), jnp.int32(2), live)]
    [[0.0, 0.5, -0.5, 0.0], [False, True, True, False]]
    """
    chex.assert_rank([step, live], 1)
    following = jnp.append(step[1:], -1)
    ends = live & (step >= 0) & (step != following) & (step < verified)
    right = (verdicts >> jnp.clip(step, 0, 30)) & 1
    points = (2.0 * right - 1) / jnp.maximum(verified, 1)
    return jnp.where(ends, points, 0).astype(jnp.float32), ends


def process_advantages(points: Array, ends: Array, eps: float, ddof: int) -> Array:
    """[G, T] float32: what each token's and all later steps earn, normalised in ONE group.

    Args:
      points: [G, T] float32, of steps at their last tokens.
      ends: [G, T] bool, where those stand.
      eps: added to the deviation.
      ddof: of the deviation.

    Returns:
      The sum, from each token on, of (points - mean) / (deviation + eps), both over all steps of
      the group; a single step keeps its points.
    """
    count = ends.sum()
    mean = live_mean(points, ends)
    spread = jnp.where(ends, jnp.square(points - mean), 0).sum() / jnp.maximum(count - ddof, 1)
    alone = count <= 1
    scaled = (points - jnp.where(alone, 0, mean)) / (jnp.where(alone, 1, jnp.sqrt(spread)) + eps)
    scaled = jnp.where(ends, scaled, 0)
    return jnp.cumsum(scaled[:, ::-1], axis=1)[:, ::-1]


def by_outcome_and_steps(
    alpha: float, alpha_min: float, steps: int, eps: float, ddof: int
) -> Transform:
    """``rl_tango``'s advantages [N, G, T], of solver and judge alike; the state counts updates."""
    rate = math.log(alpha / alpha_min) / steps

    def apply(values: Array, batch: Batch, done: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(values, 2)
        live, ids = trained(batch), batch.ids
        outcome = jax.vmap(partial(group_mean_std, eps=eps, ddof=ddof))(values, batch.members)
        advantages = jnp.where(live, jnp.expand_dims(outcome, 2), 0)
        if "solution_step" not in ids:
            return advantages, batch, done + 1
        solves = jnp.expand_dims(_solves(live, ids), (1, 2))
        labels = ids["solution_step"], ids["verdicts"], ids["verified_steps"]
        points, ends = jax.vmap(jax.vmap(step_points))(*labels, live & solves)
        process = jax.vmap(partial(process_advantages, eps=eps, ddof=ddof))(points, ends)
        weight = jnp.maximum(alpha * jnp.exp(-rate * done.astype(jnp.float32)), alpha_min)
        # The judge's own rows have no steps: their advantages are those of the outcome, whole.
        weight = jnp.where(ends.any() & solves, weight, 0)
        mixed = (1 - weight) * advantages + weight * jnp.where(live, process, 0)
        return mixed, batch, done + 1

    return Transform(lambda: jnp.int32(0), apply)


def _solves(live: Array, ids: dict[str, Array]) -> Array:
    """[N] bool: groups of the first role, the solver, by the label "role" [N, G] of episodes."""
    return (live.any(axis=2) & (ids["role"] == 0)).any(axis=1)


def balanced_verdicts(decay: float = 0.8) -> Transform:
    """Scales the judge's advantages so that right and wrong solutions weigh the same.

    With n+ and n- the moving averages of how many solutions of a step are right and wrong, a
    verdict on one of them weighs 1 / sqrt(n) of its kind, over the mean weight of the step's.
    """

    def apply(values: Array, batch: Batch, averages: Array) -> tuple[Array, Batch, Array]:
        live, ids = trained(batch), batch.ids
        if "outcome" not in ids:
            return values, batch, averages
        judged = live.any(axis=2) & ~_solves(live, ids)[:, None]
        right = ids["outcome"] == 1
        count = jnp.stack([(judged & right).sum(), (judged & ~right).sum()]).astype(jnp.float32)
        first = averages.sum() == 0
        mixed = jnp.where(first, count, decay * averages + (1 - decay) * count)
        averages = jnp.where(judged.any(), mixed, averages)
        weights = 1 / (jnp.sqrt(averages) + 1e-6)
        of_each = jnp.where(right, weights[0], weights[1])
        mean = live_mean(of_each, judged)
        scale = jnp.where(judged, of_each / jnp.where(mean > 0, mean, 1), 1)
        return values * jnp.expand_dims(scale, 2), batch, averages

    return Transform(lambda: jnp.zeros(2, jnp.float32), apply)


@variant(grpo, kl_coef=0.001)
def rl_tango(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    policies: Count = 2,
    alpha: Fraction = 0.1,
    alpha_min: Positive = 0.001,
    alpha_steps: Count = 300,
    balance: Flag = True,
    generator_steps: Count = 3,
    verifier_steps: Count = 1,
    warmup: Whole = 40,
) -> Method:
    """GRPO for a generator and the verifier of its steps, two policies that are trained by turns.

    "RL Tango: Reinforcing Generator and Verifier Together for Language Reasoning"
    (arXiv:2505.15034), as its released code has it. The verifier writes a verdict on each of the n
    steps of a solution and one on the whole; it is paid for the latter alone,

        verifier    r = 1[verdict = outcome] + 0.8 form
        generator   r = outcome
        A_t = (1 - a) (r - mean(r)) / std(r) + a sum over its steps from t on of z_k

    with z_k the points of a step, 1 / n where the verdict is "correct" and else -1 / n at the token
    that ends it, less their mean and over their deviation in the group; a falls from ``alpha`` to
    ``alpha_min`` in ``alpha_steps`` updates of the generator, exponentially. The verifier's
    advantages have no second term. With ``balance`` those on right and on wrong solutions weigh as
    1 / sqrt of how many of each there are, moving averages of 0.8. The loss is clipped and averaged
    over tokens, with 0.001 of the divergence k3. ``generator_steps`` of the generator and
    ``verifier_steps`` of the verifier alternate, after ``warmup`` steps of the verifier.

    The environment is ``judged`` with ``form = "steps"`` (``zoo.envs.judged``), which pays so. With
    ``policies`` 1 one policy is both, and every step trains it as both.

    Departures: a verifier's group are its verdicts on the different solutions of a problem, one
    each, where the code samples several on one solution; no bonus for entropy (the code has 0.001);
    both begin with the same weights, where the paper first fine-tunes a generator. Verdicts that
    are not as many as the steps give no points, as in the code, nor do more than 31.
    """
    advantage = by_outcome_and_steps(alpha, alpha_min, alpha_steps, eps, ddof)
    method = base.with_(advantage=advantage, aggregate=token_mean)
    method = method.after(balanced_verdicts()) if balance else method
    if policies == 1:
        return method
    return method.with_(
        network=Policies(policies, turns=(generator_steps, verifier_steps), warmup=warmup)
    )
