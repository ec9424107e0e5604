"""The steps from rewards to advantages, as ``(init, apply)`` values that chain.

A chain starts from the score [N, G] (the weighted sum of the reward parts) and ends in advantages,
[N, G] or [N, G, T]. Transforms read the batch's records and never the parameters. If a transform
needs per-token rewards and gets [N, G], the score is placed at the last live token of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.errors import UserError, unknown_choice
from jrl.objectives import advantages as group
from jrl.objectives.branches import by_branch, of_members
from jrl.objectives.kl import AdaptiveCoef, estimator
from jrl.types import Array, Batch, Statistic, Transform


def stateless(
    apply: Callable[[Array, Batch], tuple[Array, Batch]],
    needs: frozenset[str] = frozenset(),
    statistics: tuple[Statistic, ...] = (),
) -> Transform:
    """A transform that keeps no state, from a function of advantages and batch.

    Args:
      apply: (advantages, batch) -> (advantages, batch).
      needs: names of the statistics that it reads from ``batch.stats``.
      statistics: those that it brings along.
    """

    def with_state(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        return *apply(values, batch), state

    return Transform(lambda: (), with_state, needs, statistics)


def chain(*transforms: Transform) -> Transform:
    """Transforms applied from left to right; the state is a tuple of theirs.

    >>> score = jnp.array([[1.0, 5.0]])
    >>> both = chain(clip(0.0, 4.0), clip(2.0, 9.0))
    >>> both.apply(score, None, both.init())[0].tolist()
    [[2.0, 4.0]]
    """

    def apply(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        after = []
        for transform, before in zip(transforms, state, strict=True):
            # The batch is passed on, since a transform may add statistics that later ones read.
            values, batch, new = transform.apply(values, batch, before)
            after.append(new)
        return values, batch, tuple(after)

    return Transform(
        init=lambda: tuple(transform.init() for transform in transforms),
        apply=apply,
        needs=frozenset().union(*(transform.needs for transform in transforms)),
        statistics=tuple(s for transform in transforms for s in transform.statistics),
    )


def identity() -> Transform:
    """The unchanged score: plain REINFORCE, or a loss that reads no advantage."""
    return stateless(lambda values, batch: (values, batch))


def read_members(batch: Batch) -> tuple[Array, ...]:
    """The arrays [N, G] that most group functions read in addition to the rewards: ``members``."""
    return (batch.members,)


def per_group(
    advantage: Callable[..., Array],
    reads: Callable[[Batch], tuple[Array, ...]] = read_members,
) -> Transform:
    """A function of ONE group, lifted over all groups by ``vmap``.

    Args:
      advantage: (rewards [G], *arrays [G]) -> [G], as in ``objectives.advantages``.
      reads: (batch) -> the arrays [N, G] handed to ``advantage`` after the rewards.

    Returns:
      A transform [N, G] -> [N, G].
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        # The function sees one group only, so it cannot mix prompts by mistake.
        lifted = jax.vmap(advantage)(values, *reads(batch))
        shape = getattr(lifted, "shape", None)
        if shape != values.shape and shape != batch.mask.shape:
            of_one = jax.tree.map(lambda x: x.shape[1:], lifted)
            raise UserError(
                f"an advantage of one group of {values.shape[1]} members returned {of_one}; return"
                f" [G], here {values.shape[1:]}"
            )
        return lifted, batch

    return stateless(apply)


def whiten(over: str = "tokens", *, eps: float = 1e-8, ddof: int = 0) -> Transform:
    """Subtracts the mean of the batch and divides by its standard deviation.

    The global normalisation of ``reinforce_plus_plus``. The deviation is the population's by
    default, as in the authors' OpenRLHF, and ``eps`` is added to the variance under the root.

    Args:
      over: "tokens" weighs every trained token the same and returns [N, G, T]; "sequences" weighs
        every live member the same and returns [N, G].
      eps: squared reward, added to the variance; above 0.
      ddof: 0 divides the squares by the live values, 1 by one less.

    Returns:
      A transform. Equal values give exactly 0, an empty batch gives 0, a live NaN gives NaN.

    Raises:
      UserError: for another ``over``, or when "sequences" is asked of per-token advantages.
    """
    if over not in ("tokens", "sequences"):
        raise unknown_choice("whiten.over", over, ("tokens", "sequences"))

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = batch.members
        if over == "tokens":
            # Long completions weigh more here; "sequences" is the choice for equal weights.
            values, live = per_token(values, batch), trained(batch)
        elif values.ndim == 3:
            raise UserError(
                "whiten.over = 'sequences' after per-token advantages; use 'tokens', or whiten "
                "before the step that makes them per token"
            )
        count = live.sum()
        # As in mean_centred: equal values must cancel exactly.
        lowest = jnp.min(values, where=live, initial=jnp.inf)
        shifted = jnp.where(live, values - lowest, 0)
        centred = jnp.where(live, shifted - shifted.sum() / jnp.maximum(count, 1), 0)
        scale = group.square_scale(centred)
        centred = centred / scale
        variance = jnp.square(centred).sum() / jnp.maximum(count - ddof, 1)
        # eps inside the root: equal values give 0 * finite = 0 in place of 0 / 0.
        return centred * jax.lax.rsqrt(variance + eps / scale / scale), batch

    return stateless(apply)


def centre() -> Transform:
    """Subtracts the mean score of the batch's live members, exactly 0 when all are equal.

    Returns:
      A transform [N, G] -> [N, G]; the whole batch is treated as one group.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        # The whole batch as one group: prompts with higher rewards keep a positive advantage.
        flat = group.mean_centred(values.reshape(-1), batch.members.reshape(-1))
        return flat.reshape(values.shape), batch

    return stateless(apply)


def overlong_penalty(max_tokens: int, buffer_tokens: int, scale: float = 1.0) -> Transform:
    """A penalty on completions near the length limit: put it before the baseline.

    The soft overlong punishment of ``dapo``: 0 up to ``max_tokens - buffer_tokens``, then linear,
    ``scale`` from ``max_tokens`` on.

    Args:
      max_tokens: tokens, L_max of the paper.
      buffer_tokens: tokens, L_cache of the paper, at most ``max_tokens``. 0 leaves a hard limit:
        ``scale`` for every completion longer than ``max_tokens``.
      scale: reward.

    Returns:
      A transform [N, G] -> [N, G]. It counts tokens under the mask: not an environment's replies.

    Raises:
      UserError: when the buffer is negative or longer than the limit.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise UserError(
            f"overlong buffer_tokens = {buffer_tokens}; give 0 to max_tokens = {max_tokens} tokens"
        )

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        # Trained tokens only: a policy must not be charged for the length of an environment's
        # replies.
        over = (completion_tokens(batch) - (max_tokens - buffer_tokens)).astype(values.dtype)
        # Buffer 0 makes the ramp one token wide, which is the hard limit.
        return values - scale * jnp.clip(over / max(buffer_tokens, 1), 0, 1), batch

    return stateless(apply)


def kl_in_reward(
    kind: str = "k1",
    coef: float | AdaptiveCoef = 0.05,
    level: str = "token",
    policy: str = "sampler_logprobs",
) -> Transform:
    """Subtracts ``coef`` times the divergence from the reference policy from the reward.

    Args:
      kind: the estimator, k1, k2 or k3 (``objectives.kl``).
      coef: reward per nat; an ``AdaptiveCoef`` is steered by the mean divergence of a trained
        token (level "token") or of a live sequence (level "sequence").
      level: "token" charges each token for itself and returns per-token rewards [N, G, T];
        "sequence" charges the sequence for the sum over its tokens and keeps [N, G].
      policy: the statistic of the sampling policy's log-probabilities.

    Raises:
      UserError: for an unknown kind or level, or "sequence" after per-token rewards.
    """
    if level not in ("token", "sequence"):
        raise unknown_choice("kl_in_reward.level", level, ("token", "sequence"))
    divergence = estimator(kind, "kl_in_reward.kind")

    def apply(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        live = trained(batch)
        # Masked before the estimator: statistics of padding are arbitrary, and exp of them may
        # overflow.
        policy_logprobs = jnp.where(live, batch.stats[policy], 0)
        ref_logprobs = jnp.where(live, batch.stats["ref_logprobs"], 0)
        kl = jnp.where(live, divergence(policy_logprobs, ref_logprobs), 0)
        if level == "sequence":
            if values.ndim == 3:
                raise UserError("kl_in_reward.level = 'sequence' after per-token rewards")
            # A sequence's divergence is the sum over its tokens, and the controller's unit a
            # sequence.
            kl, count = kl.sum(axis=2), batch.members.sum()
        else:
            values, count = token_rewards(values, batch), live.sum()
        if not isinstance(coef, AdaptiveCoef):
            return values - coef * kl, batch, state
        mean = kl.sum() / jnp.maximum(count, 1)
        # This batch uses the coefficient of the previous ones, as adaptive-KL PPO does.
        return values - state * kl, batch, coef.next(state, mean)

    return Transform(
        init=coef.init if isinstance(coef, AdaptiveCoef) else lambda: (),
        apply=apply,
        needs=frozenset({policy, "ref_logprobs"}),
    )


def reward_to_go(discount: float = 1.0) -> Transform:
    """The discounted sum of the rewards from each token on; see ``advantages.reward_to_go``."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        def one(rewards: Array, mask: Array) -> Array:
            return group.reward_to_go(rewards, mask, discount)

        return jax.vmap(jax.vmap(one))(token_rewards(values, batch), trained(batch)), batch

    return stateless(apply)


def gae(
    discount: float = 1.0,
    decay: float = 0.95,
    *,
    value_decay: float | None = None,
    length_scale: float | None = None,
) -> Transform:
    """Generalised advantage estimates; writes the value network's targets to ``returns``.

    Args:
      discount: the factor for one live token, in [0, 1].
      decay: lambda, in [0, 1].
      value_decay: lambda of the value network's targets, when it is another one.
      length_scale: alpha of a lambda by length, max(0, 1 - 1 / (alpha l)) for l live tokens, in
        place of ``decay``: the length-adaptive estimates of ``vapo``.

    Returns:
      A transform to [N, G, T] that reads ``rollout_values`` and adds ``batch.stats["returns"]``.
    """

    def one(rewards: Array, estimates: Array, mask: Array) -> tuple[Array, Array]:
        gae_lambda: float | Array = decay
        if length_scale is not None:
            # Longer sequences bootstrap less: with a fixed lambda the final reward would reach
            # early tokens as lambda^l, almost 0.
            gae_lambda = jnp.maximum(1 - 1 / (length_scale * jnp.maximum(mask.sum(), 1)), 0)
        advantages, returns = group.gae(rewards, estimates, mask, discount, gae_lambda)
        if value_decay is not None:
            # The value network may learn from less biased targets than the policy's advantages use.
            _, returns = group.gae(rewards, estimates, mask, discount, value_decay)
        return advantages, returns

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        advantages, returns = jax.vmap(jax.vmap(one))(
            token_rewards(values, batch), batch.stats["rollout_values"], trained(batch)
        )
        return advantages, batch.with_stats(returns=returns)

    return stateless(apply, frozenset({"rollout_values"}))


def over_branches() -> Transform:
    """A token's mean advantage over the members that share it.

    The hard attribution of "Agentic Reinforced Policy Optimization" (arXiv:2507.19849). Sampled
    independently, each of these members would train its own copy of the token with its own
    advantage.

    Returns:
      A transform [N, G] -> [N, G, T]. Advantages that are by token already stay as they are, and so
      do all where the batch has no label "node".
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        if values.ndim == 3 or "node" not in batch.ids:
            return values, batch
        return by_branch(values, batch), batch

    return stateless(apply)


def mask_truncated(*, from_group: bool = False) -> Transform:
    """Masks truncated completions in the loss.

    The overlong filtering of ``dapo``.

    Args:
      from_group: True also excludes them from their group's statistics, for later transforms.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        complete = ~batch.truncated
        # A branch's shared tokens stay while any complete member goes through them.
        mask = batch.mask & of_members(complete, batch)
        # Still a member by default: the cut completion's reward counts in the group's baseline.
        members = batch.members & complete if from_group else batch.members
        return values, batch.replace(mask=mask, members=members)

    return stateless(apply)


def clip(low: float, high: float) -> Transform:
    """Advantages clipped to two bounds. NaN stays NaN."""
    return stateless(lambda values, batch: (jnp.clip(values, low, high), batch))


def trained(batch: Batch) -> Array:
    """[N, G, T] bool: the trained tokens, under the mask and of live members."""
    return batch.mask & jnp.expand_dims(batch.members, 2)


def completion_tokens(batch: Batch) -> Array:
    """[N, G] int32, tokens: of each completion under the mask, without an environment's replies.

    In trees a completion's shared prefix, sampled by another member, counts too.
    """
    # The mask of a branch lacks the shared prefix, which the length limit does count.
    if "node" in batch.ids and "turn" not in batch.ids:
        return batch.lengths
    return batch.mask.sum(2, dtype=jnp.int32)


def paid() -> Transform:
    """The score by token: rewards of the environment at the turns they were given for.

    Returns:
      A transform of ``paid_rewards``: put it before steps that give credit by turn.
    """
    return stateless(lambda values, batch: (paid_rewards(values, batch), batch))


def paid_rewards(values: Array, batch: Batch) -> Array:
    """Scores [N, G] as rewards [N, G, T], if the batch has rewards by turn ("paid").

    The rest of a score, such as other reward parts, is placed at the last live token, so the sum
    over a completion's tokens stays the score. Without the statistic "paid", or by token already,
    the values are returned unchanged.
    """
    if values.ndim == 3 or "paid" not in batch.stats:
        return values
    # Rewards at untrained positions would be lost, so they count as part of the rest.
    earned = jnp.where(trained(batch), batch.stats["paid"], 0)
    return earned + token_rewards(values - earned.sum(axis=2), batch)


def rewards_by_token(values: Array, batch: Batch) -> Array:
    """[N, G, T]: what is paid at each trained token, the rest of a score at the last; else 0."""
    return jnp.where(trained(batch), token_rewards(paid_rewards(values, batch), batch), 0)


def token_rewards(values: Array, batch: Batch) -> Array:
    """[N, G, T]: the values themselves, or each score at its sequence's last trained token."""
    chex.assert_rank(values, {2, 3})
    if values.ndim == 3:
        return values
    return jax.vmap(jax.vmap(group.at_last_token))(values, trained(batch))


def per_token(values: Array, batch: Batch) -> Array:
    """[N, G, T]: the values themselves, or each sequence's value at all of its tokens."""
    chex.assert_rank(values, {2, 3})
    if values.ndim == 3:
        return values
    return jnp.broadcast_to(jnp.expand_dims(values, 2), batch.mask.shape)


# ---------------------------------------------------------------- right and wrong answers
#
# A completion is correct if its score is above a threshold; 0.5 suits rewards of 0 and 1 and of -1
# and 1 alike. A NaN score gives a NaN label, which the metrics count.


def correct(score: Array, above: float) -> Array:
    """1 where the score is above the threshold, 0 where it is not, NaN where it is NaN.

    Args:
      score: [...] float.
      above: threshold of the score.

    >>> correct(jnp.array([1.0, 0.5, -1.0, jnp.nan]), 0.5).tolist()
    [1.0, 0.0, 0.0, nan]
    """
    # A comparison with NaN is False, which would hide a broken reward as a wrong answer.
    return jnp.where(jnp.isnan(score), score, (score > above).astype(score.dtype))


def pass_rate(labels: Array, members: Array) -> Array:
    """The fraction of right answers (labels [..., G]) among the live members [..., G] of a group.

    Returns:
      [..., 1] float; 0 for an empty group.

    >>> pass_rate(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([True, True, True, False])).tolist()
    [0.6666666865348816]
    """
    return group.live_mean(labels, members, axis=-1)[..., None]
