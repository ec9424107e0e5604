"""Steps of an episode: what belongs to one, what comes next, and how good each was.

An environment records ``ids["step"]`` [N, G, T], the number of the action that a token belongs to,
and ``ids["state"]`` [N, G, T], a number for the state in which that action was chosen (a hash of
the observation). A batch without steps holds one step a completion. The tokens of a step lie next
to each other. All float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp

from jrl.objectives import advantages as group
from jrl.objectives import segments
from jrl.objectives.segments import Segments
from jrl.objectives.transforms import per_token, stateless, token_rewards, trained
from jrl.types import Array, Batch, Transform


def step_ids(batch: Batch) -> Array:
    """[N, G, T] int32, the step of each token; 0 for all when no environment recorded any."""
    return batch.ids.get("step", jnp.zeros(batch.mask.shape, jnp.int32))


def step_segments(batch: Batch) -> Segments:
    """The trained tokens of each step of each completion."""
    n, g, _ = batch.mask.shape
    rows = jnp.arange(n * g).reshape(n, g, 1)
    return segments.segments(trained(batch), rows, step_ids(batch))


def step_starts(steps: Array, mask: Array) -> Array:
    """[T] bool, True at the first live token of each step of ONE sequence.

    >>> step_starts(jnp.array([4, 4, 4, 7]), jnp.array([False, True, True, True])).tolist()
    [False, True, False, True]
    """
    chex.assert_equal_shape([steps, mask])
    before = _latest(mask, 1)
    return mask & ((before < 0) | (steps[before] != steps))


def at_step_start(values: Array, steps: Array, mask: Array) -> Array:
    """[T]: what stands at the first live token of each token's step; 0 outside the mask."""
    start = _latest(step_starts(steps, mask), 0)
    return jnp.where(mask, values[start], 0)


def at_next_step(values: Array, steps: Array, mask: Array, last: float = 0.0) -> Array:
    """[T]: what stands at the first live token of the NEXT step of ONE sequence.

    Args:
      values: [T] float.
      steps: [T] int32.
      mask: [T] bool.
      last: what the tokens of the last step get.

    >>> steps, mask = jnp.array([0, 0, 1, 2]), jnp.ones(4, bool)
    >>> at_next_step(jnp.array([1.0, 2.0, 3.0, 4.0]), steps, mask, -1.0).tolist()
    [3.0, 3.0, 4.0, -1.0]
    """
    size = mask.shape[0]
    starts = jnp.where(step_starts(steps, mask), jnp.arange(size), size)
    later = jnp.concatenate([starts[1:], jnp.full(1, size)])
    following = jax.lax.cummin(later, reverse=True)
    found = following < size
    value = jnp.where(found, values[jnp.minimum(following, size - 1)], last)
    return jnp.where(mask, value, 0)


def step_returns(rewards: Array, steps: Array, mask: Array, discount: float) -> Array:
    """[T] points: the discounted reward from each token's step to the end of ONE sequence.

        R_k = sum over later steps l >= k of discount^(l - k) r_l

    Args:
      rewards: [T] float, points; a step's reward is the sum over its tokens.
      steps: [T] int32.
      mask: [T] bool.
      discount: the factor for one STEP, in [0, 1].

    >>> steps, mask = jnp.array([0, 0, 1, 2]), jnp.ones(4, bool)
    >>> step_returns(jnp.array([1.0, 0.0, 0.0, 4.0]), steps, mask, 0.5).tolist()
    [2.0, 2.0, 2.0, 4.0]
    """
    chex.assert_equal_shape([rewards, steps, mask])
    starts = step_starts(steps, mask)

    def back(later: tuple[Array, Array], now: tuple[Array, Array, Array]) -> tuple:
        total, crossed = later
        reward, start, live = now
        here = reward + jnp.where(crossed, discount * total, total)
        total = jnp.where(live, here, total)
        return (total, jnp.where(live, start, crossed)), total

    nothing = (jnp.zeros((), rewards.dtype), jnp.zeros((), bool))
    returns: Array
    _, returns = jax.lax.scan(back, nothing, (rewards, starts, mask), reverse=True)
    return at_step_start(returns, steps, mask)


def group_in_group(
    weight: float = 1.0, discount: float = 0.95, eps: float = 1e-6, normalise: bool = True
) -> Transform:
    """Each episode against its group, and each step against the steps taken in the same state.

    GiGPO, "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv:2505.10978): the
    normalised score of the episode plus ``weight`` times the normalised return of the step among
    all steps that the group's members took in that state; 0 for a state seen once.

    Args:
      weight: omega, of the second part.
      discount: the factor for one step.
      eps: points, added to each deviation.
      normalise: True to divide by the sample deviation, False to centre only.

    Returns:
      A transform from [N, G], or from per-token rewards [N, G, T], to [N, G, T]. Without
      ``ids["state"]`` every state counts as seen once.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = trained(batch), step_ids(batch)
        rewards = jnp.where(live, token_rewards(values, batch), 0)
        score = values if values.ndim == 2 else rewards.sum(axis=2)
        compare = partial(group.group_mean_std, eps=eps) if normalise else group.mean_centred
        episode = per_token(jax.vmap(compare)(score, batch.members), batch)
        if "state" not in batch.ids:
            return episode, batch

        def returns_of(rewards: Array, steps: Array, mask: Array) -> Array:
            return step_returns(rewards, steps, mask, discount)

        returns = _each(returns_of)(rewards, steps, live)
        starts = _each(step_starts)(steps, live)  # a step counts once, however long it is
        groups = jnp.arange(live.shape[0])[:, None, None]
        seg = segments.segments(starts, groups, batch.ids["state"])
        gain = jnp.where(starts, returns - segments.mean(returns, seg), 0)
        if normalise:
            gain = gain / (segments.std(returns, seg, ddof=1) + eps)
        return episode + weight * _each(at_step_start)(gain, steps, live), batch

    return stateless(apply)


def _latest(flags: Array, shift: int) -> Array:
    """[T] int32: the place of the latest True at or before t - shift; -1 before the first."""
    seen = jax.lax.cummax(jnp.where(flags, jnp.arange(flags.shape[0]), -1))
    if shift:
        seen = jnp.concatenate([jnp.full(shift, -1, seen.dtype), seen[:-shift]])
    return seen


def _each(one: Callable[..., Array]) -> Callable[..., Array]:
    """A function of one sequence, lifted over groups and members."""
    return jax.vmap(jax.vmap(one))
