"""Methods with credit by turn of an episode, from rewards that stand at turns."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Ddof, Fraction, Positive
from jrl.methods.group_relative import grpo
from jrl.objectives import segments
from jrl.objectives.segments import step_ids, step_starts
from jrl.objectives.transforms import paid_rewards, stateless, token_rewards, trained
from jrl.types import Array, Batch, Transform
from jrl.zoo.methods.structure import step_returns


def normalised_turns(discount: float, eps: float, ddof: int) -> Transform:
    """Rewards of turns, normalised over all turns of a group, then summed from each turn on.

    Args:
      discount: of a turn, in [0, 1].
      eps: added to the deviation.
      ddof: of the deviation.

    Returns:
      A transform to [N, G, T]: the tokens of a turn have the same advantage; see ``igpo``.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = trained(batch), step_ids(batch)
        rewards = jnp.where(live, token_rewards(paid_rewards(values, batch), batch), 0)
        starts = jax.vmap(jax.vmap(step_starts))(steps, live)  # a turn counts once
        earned = segments.total(rewards, segments.steps(batch))
        turns = segments.segments(starts, jnp.arange(live.shape[0])[:, None, None])
        gap = jnp.where(starts, earned - segments.mean(earned, turns), 0)
        each = gap / (segments.std(earned, turns, ddof=ddof) + eps)
        back = partial(step_returns, discount=discount)
        return jax.vmap(jax.vmap(back))(each, steps, live), batch

    return stateless(apply)


@variant(grpo)
def igpo(base: Method, eps: Positive, ddof: Ddof, discount: Fraction = 1.0) -> Method:
    """GRPO over turns that are paid for what they tell of the answer.

    "Information Gain-based Policy Optimization: A Simple and Effective Approach for Multi-Turn LLM
    Agents" (arXiv:2510.14967): with p_t the policy's probability of the reference answer,
    teacher-forced behind turn t, exp of the mean log-probability of its tokens,

        r_t = p_t - p_(t-1) for each turn before the last, the outcome for the last
        A_t = (r_t - mean(r)) / std(r) over all turns of the group's episodes
        A~_t = sum over k >= t of discount^(k - t) A_k, at every token of turn t

    The gains are a reward part: ``[rewards.gain] function = "likelihood"`` with ``by = "turn"``
    (``configs/intrinsic.toml`` shows signals without turns, docs/rewards.md this one). Departures:
    the released code centres the sums from each token on over the group, and has no deviation; the
    loss is the mean over each episode's tokens; the KL term is off.
    """
    return base.with_(advantage=normalised_turns(discount, eps, ddof))
