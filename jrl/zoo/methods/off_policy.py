"""Policy gradients on tokens that the policy did not draw: late samples, replayed ones, data.

In the formulas rho is the ratio of the policy being trained to mu, the policy that drew the token,
which may be an earlier one, and A_i = r_i - mean(r) over the group. Relatives of GRPO inherit its
coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import CENTRED, Method, Schedule
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    Choice,
    Count,
    Flag,
    Fraction,
    KlInLoss,
    NonNegative,
    Positive,
    Range,
    Tokens,
    check_band,
    is_zero,
)
from jrl.methods.edit import Edit, EditView, fill_groups
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.methods.policy_gradient import reinforce
from jrl.methods.ratios import CLIPS
from jrl.methods.replays import replay_successes
from jrl.methods.schedule import refreshed
from jrl.methods.stores import group_store
from jrl.objectives import aggregates, ratios
from jrl.objectives.kl import bounded_exp, estimator
from jrl.objectives.members import first_token
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Objective, Regularizer, Stats, Surrogate, Transform
from jrl.zoo.methods.actor_critic import CORRECTION

MASKS = ("none", "one_side", "two_side", "ring")
"""The ratios that keep their gradient; see ``rec``."""


def far_dropped(
    mask: str, bounds: tuple[float, float], ring: tuple[float, float], importance: bool
) -> ratios.Rule:
    """``ratios.weight`` of the ratio (``importance``) or 1, and 0 for ratios too far from 1.

    The masks are those of ``rec``, with ``bounds`` and ``ring`` as (low, high).
    """

    def function(log_ratio: Array, advantages: Array, *_: Any) -> tuple[Array, Stats]:
        ratio = bounded_exp(log_ratio)
        # Stated as what is left out: a NaN fails every comparison, stays in, and shows.
        below, above = ratio < 1 - bounds[0], ratio > 1 + bounds[1]
        out = jnp.zeros(ratio.shape, bool)
        if mask == "one_side":
            out = ((advantages > 0) & above) | ((advantages < 0) & below)
        elif mask != "none":
            out = above | below
        if mask == "ring":
            out = out & ~((advantages >= 0) & (ratio <= 1 - ring[0]))
            out = out & ~((advantages <= 0) & (ratio >= 1 + ring[1]))
        weights = jnp.where(out, 0, ratio if importance else jnp.ones_like(ratio))
        return weights, {"ratio": ratio, "masked_fraction": out}

    return ratios.weight(function)


@variant(grpo, without=(*CLIPS, "eps", "ddof"))
def rec(
    base: Method,
    mask: Annotated[str, Choice(MASKS)] = "one_side",
    importance: Flag = True,
    level: Annotated[str, Choice(("token", "geometric"))] = "token",
    low: Fraction | None = None,
    high: NonNegative | None = None,
    ring_low: Fraction = 0.6,
    ring_high: NonNegative = 2.0,
) -> Method:
    """REINFORCE with clipping: tokens whose ratio went too far lose their gradient.

    "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths About
    GRPO and Its Friends" (arXiv:2509.24203):

        loss = -mean over tokens of M_t A_i w_t log pi_t

    M is 1 or 0: "two_side" keeps 1 - low <= rho <= 1 + high; "one_side" asks the upper bound of
    A >= 0 alone and the lower of A <= 0; "ring" is "two_side" and beyond it A >= 0 with
    rho <= 1 - ring_low and A <= 0 with rho >= 1 + ring_high; "none" keeps all. w is rho, or 1
    without ``importance``, as in the released example. ``level="geometric"`` takes the geometric
    mean of the completion's ratios in place of the token's, and the mean over completions of their
    means. Bounds that are not given are the released code's: 0.2 and 0.2 for tokens, 3e-4 and 4e-4
    for the geometric mean.
    """
    geometric = level == "geometric"
    defaults = (3e-4, 4e-4) if geometric else (0.2, 0.2)
    bounds = (defaults[0] if low is None else low, defaults[1] if high is None else high)
    return base.with_(
        advantage=CENTRED,
        ratio=ratios.sequence if geometric else ratios.token,
        rule=far_dropped(mask, bounds, (ring_low, ring_high), importance),
        aggregate=aggregates.sequence_mean if geometric else aggregates.token_mean,
    )


_PLAIN = ("mask", "importance", "level", "low", "high", "ring_low", "ring_high")


def _sampler_distance(coef: float) -> Regularizer:
    """``coef`` times the squared log-ratio to the sampler."""

    def value(stats: Stats, mask: Array) -> Array:
        return jnp.square(stats["logprobs"] - stats["sampler_logprobs"])

    return term("sampler_k2", value, coef, "sampler_logprobs")


@variant(rec, without=_PLAIN, mask="none", importance=False)
def opmd(base: Method, tau: NonNegative = 0.1) -> Method:
    """REINFORCE without ratios, held to the sampler by the squared log-ratio (mirror descent).

    The off-policy reading of online policy mirror descent in the paper of ``rec``:

        loss = mean over tokens of [-A_i log pi_t + tau (log pi_t - log mu_t)^2]

    As in the released code tau, 0.1 in its configuration, holds the 1/2 that Kimi k1.5 writes.
    Departures: the square is of each token, not of the completion's sum.
    """
    return base.plus(_sampler_distance(tau))


@variant(rec, without=_PLAIN, mask="none", importance=False)
def asymre(base: Method, tau: NonNegative = 0.1) -> Method:
    """REINFORCE without ratios, plus the likelihood of all samples: a baseline below the mean.

    The off-policy reading of asymmetric REINFORCE in the paper of ``rec``:

        loss = -mean over tokens of (A_i + tau) log pi_t

    The second term is tau times KL(sampler || policy), up to a constant; tau is that of the
    released configuration.
    """
    return base.plus(term("cross_entropy", lambda stats, mask: -stats["logprobs"], tau))


def balance_and_centre() -> Transform:
    """Drops failures until they are no more than the successes, then subtracts the group's mean.

    Failures are members below the mean score. Those dropped, the ones with the largest
    tie-breakers, get 0 and stay members: their tokens count where losses are averaged.

    Returns:
      A transform [N, G] -> [N, G].
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live, tie_breaker = batch.members, batch.ids["tie_breaker"]
        failed = live & (CENTRED.apply(scores, batch, ())[0] < 0)
        fewer = (live & ~failed).sum(axis=1, keepdims=True)
        earlier = jnp.expand_dims(tie_breaker, 1) < jnp.expand_dims(tie_breaker, 2)
        rank = (earlier & jnp.expand_dims(failed, 1)).sum(axis=2)
        members = live & ~(failed & (rank >= fewer))
        return CENTRED.apply(scores, batch.replace(members=members), ())[0], batch

    return stateless(apply)


@variant(rec, without=_PLAIN, mask="none", importance=False)
def red(
    base: Method,
    variant: Annotated[str, Choice(("weight", "drop"))] = "weight",
    temperature: Positive = 1.0,
) -> Method:
    """REINFORCE without ratios on a reshaped batch: high advantages weigh more, or failures less.

    The data-shaping methods of the paper of ``rec``:

        weight:  loss = -mean over tokens of exp(A_i / T) A_i log pi_t
        drop:    loss = -mean over tokens of A_i log pi_t

    "drop" leaves out, at random, as many of a group's members below its mean as there are more of
    them than of the others, then takes A against the mean of those kept; the tokens of the others
    count in the mean over tokens. The rule and T = 1 are the released code's. Departures: the
    exponent is held within 20.
    """
    if variant == "drop":
        return base.with_(advantage=balance_and_centre())
    weigh = stateless(lambda values, batch: (values * bounded_exp(values / temperature), batch))
    return base.after(weigh)


# ---------------------------------------------------------------- replay


@variant(grpo, clip_high=0.3)
def arpo_replay(
    base: Method, above: NonNegative = 0.1, each: Count = 8, kept_prompts: Count = 1024
) -> Method:
    """GRPO that puts an earlier success in the place of one member where all members failed.

    "ARPO:End-to-End Policy Optimization for GUI Agents with Experience Replay" (arXiv:2505.16282).
    (``arpo`` is another paper's.) For a group in which nobody succeeded, and of whose prompt some
    success s is kept, s takes the place of the first member before

        A_i = (r_i - mean(r)) / std(r)
        loss = -1/G sum_i 1/|o_i| sum_t min(rho_t A_i, clip(rho_t, 1 - 0.2, 1 + 0.3) A_i)

    so that the group has a gradient. A completion is a success with more than ``above`` points of
    the reward part that says what is right: "success" in episodes. Of each prompt the newest
    ``each`` are kept and one is drawn at random, as in the released code; its successes and those
    of the step itself are not mixed. There is no divergence from a reference. Runs need prompts
    that come again, hence ``data.train``, alone or with an environment on the host whose problem is
    the prompt's: a success is replayed where the group opens with the same tokens. About 40 bytes
    a token are kept of ``each`` completions of at most ``kept_prompts`` prompts.

    Departures: the loss is the paper's mean over completions, where the released code averages over
    the batch's tokens; rho is to the policy that drew the success; the released code scores it
    anew, so that its ratio begins at 1. That code takes a group for failed at a mean below 0.2 with
    a deviation below 0.05, adds half a point for well-formed actions (a reward part of the
    environment here), and clips twice, at 3 (``dual_clip``). The paper's choice of tasks, those
    that the first policy solves at least once, is a choice of ``data.train``.
    """
    return base.with_(edits=(replay_successes(above, each, kept_prompts),))


def base_share(step: Array) -> Array:
    """[] float32: the share of the base policy in ``remix``'s divergence by training step.

    >>> [round(float(base_share(jnp.int32(s))), 2) for s in (0, 50, 51, 61, 200)]
    [1.0, 1.0, 0.9, 0.8, 0.5]
    """
    tens = jnp.ceil(jnp.maximum(step - 50, 0) / 10)
    return jnp.maximum(1 - 0.1 * tens, 0.5).astype(jnp.float32)


def convex_kl(kind: str, coef: float) -> tuple[Regularizer, Regularizer]:
    """``remix``'s divergences from the reference and from the policy at the start of the step.

    Both terms count training steps, for ``base_share``.
    """
    divergence = estimator(kind)

    def from_policy(name: str, other: str, part: Any) -> Regularizer:
        def value(stats: Stats, mask: Array) -> Array:
            chex.assert_rank(mask, 1)
            return divergence(stats["logprobs"], stats[other])

        def later(step: Any, metrics: Mapping[str, Array]) -> Any:
            return step + 1

        return Regularizer(
            name,
            value,
            lambda step: coef * part(base_share(step)),
            init=lambda: jnp.int32(0),
            update=later,
            needs=frozenset({other}),
        )

    return (
        from_policy("kl", "ref_logprobs", lambda share: share),
        from_policy("kl_previous", "proximal_logprobs", lambda share: 1 - share),
    )


def recent_groups(share: float, window: int, until: int) -> Edit:
    """Groups of the last steps beside those of this one, as a share of the batch.

    Args:
      share: of the batch that is replayed.
      window: steps whose groups are stored.
      until: training steps after which nothing is replayed; 0 for never.
    """

    def extra(prompts: int) -> int:
        return round(prompts * share / (1 - share))

    def apply(store: Any, groups: Any, view: EditView) -> tuple[Any, Any]:
        rows, exists = store.sample(view.extra.shape[0], view.key)
        active = jnp.ones((), bool) if is_zero(until) else view.step < until
        fresh = groups.live()
        return fill_groups(groups, view.extra & active, rows, exists), store.put(groups, fresh)

    return Edit(group_store(window), apply, extra)


def recentred_clip(low: float = 0.2, high: float = 0.2) -> ratios.Rule:
    """PPO's clip centred on where the policy stood at the start of the step, for old samples.

    A stale sample may move as far as a fresh one, where a clip around 1 would already have cut its
    gradient. For fresh samples the centre is 1. See ``remix``.
    """

    def bounds(stats: Stats) -> tuple[Array, Array]:
        # No gradient flows: both are statistics of the start of the step.
        centre = bounded_exp(stats["proximal_logprobs"] - stats["sampler_logprobs"])
        return centre - low, centre + high

    return ratios.clip_between(bounds, needs=frozenset({"proximal_logprobs", "sampler_logprobs"}))


@variant(grpo, without=("dual_clip", *CORRECTION), kl_coef=0.001, epochs=2)
def remix(
    base: Method,
    clip_low: NonNegative,
    clip_high: NonNegative,
    kl_coef: NonNegative,
    kl_kind: KlInLoss,
    reincarnation_steps: Tokens = 50,
    replayed: Annotated[float, Range(0.0, 0.9)] = 0.4,
    window: Count = 2,
) -> Method:
    """Fresh and replayed completions in one loss, the clip centred on the current policy.

    ReMix of "Squeeze the Soaked Sponge: Efficient Off-policy Reinforcement Finetuning for Large
    Language Model" (arXiv:2507.06892), its form on GRPO:

        rho_t = pi_t / mu_t,  c_t = pi_k_t / mu_t,  mu one of the last policies, pi_k the latest
        loss = -mean over completions of their mean of min(rho_t A, clip(rho_t, c_t - e, c_t + e) A)
               + beta [share KL(pi || base) + (1 - share) KL(pi || previous)]
        share = max(1 - 0.1 ceil(max(step - 50, 0) / 10), 0.5)

    with ``epochs`` passes over a batch (the paper's update-to-data ratio of 2). ``replayed`` of it
    (two fifths) are groups of the last ``window`` policies, drawn evenly. The base policy is
    replaced by the current one after ``reincarnation_steps`` (50 or 100 in the paper; 0 never), and
    then the replay ends.

    Departures: the previous policy is the one at the start of the training step, which needs no
    snapshot. Whole groups are replayed, with their own advantages. The reincarnation is repeated at
    an interval, not done once, and ``epochs`` stays. Not known (the authors' repository holds no
    code yet): how the last policies are weighed, beta (``kl_coef``), the divergence's estimator,
    the clip bounds.
    """
    return base.with_(
        rule=recentred_clip(clip_low, clip_high),
        regularizers=() if is_zero(kl_coef) else convex_kl(kl_kind, kl_coef),
        schedule=base.schedule._replace(after=refreshed(reincarnation_steps)),
        edits=() if is_zero(replayed) else (recent_groups(replayed, window, reincarnation_steps),),
    )


@variant(reinforce, without=("baseline",))
def topr(
    base: Method,
    baseline: Annotated[float, Range(-1.0, 1.0)] = 0.0,
    weight_low: NonNegative = 0.0,
    weight_high: Positive = 1.0,
    epochs: Count = 1,
) -> Method:
    """Right completions as in maximum likelihood, wrong ones by a tapered importance weight.

    TOPR of "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs"
    (arXiv:2503.14286):

        R = r - c,  rho = pi(y) / mu(y)
        loss = -1/B sum over y of sg(w) R log pi(y),  w = 1 if R >= 0, else clip(rho, 0, 1)

    There is no other regularisation, and the data may stay the same for several updates
    (``epochs``). The paper's rewards are 1 and -1: with rewards of 0 and 1 give c (``baseline``)
    0.5, or wrong completions weigh nothing at all. With those rewards c sets the effective share
    of right completions, p (1 - c) / (1 + (1 - 2p) c) for a share p.

    Departures: the logarithm of a token's ratio is held within 20, as is that of the product
    before it is clipped.
    """
    check_band(equal=True, weight_low=weight_low, weight_high=weight_high)
    surrogate = ratios.ratio_loss(ratios.product, ratios.tapered(weight_low, weight_high))
    base = base.before(stateless(lambda values, batch: (values - baseline, batch)))
    return base.with_(surrogate=surrogate, epochs=epochs)


# ---------------------------------------------------------------- data alone


def reference_advantage(*, priority: bool = True) -> Transform:
    """The score less the value before the first token; completions that are no better are dropped.

    Without ``priority`` the rest weigh alike. Scaled so that a mean over all sequences is a mean
    over the rest; the statistic "positive" becomes what a completion weighs, 0 for a dropped one,
    and "returns" the score, both at every token.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        start = jnp.where(first_token(live), batch.stats["rollout_values"], 0).sum(axis=2)
        nonempty = live.any(axis=2)
        gain = jnp.where(nonempty, values - start, 0)
        gain = jnp.where(gain <= 0, 0, gain)  # written so that a NaN stays
        weight = gain if priority else jnp.where(gain > 0, 1, gain)
        total = weight.sum()
        weight = weight * nonempty.sum() / jnp.where(total == 0, 1, total)
        at_tokens = {"returns": values, "positive": weight}
        at_tokens = {n: jnp.where(live, per_token(x, batch), 0) for n, x in at_tokens.items()}
        return gain * weight, batch.with_stats(**at_tokens)

    return stateless(apply, frozenset({"rollout_values"}))


RATIOS = ("sequence", "token", "none")
"""Of ``a_lol``: one ratio for the completion, one for each token, or 1."""


def offline_gradient(ratio: str = "sequence", clip: float = 0.9) -> Surrogate:
    """``-A sg(clip(r, 1 - clip, 1 + clip)) log pi_t`` with r of ``RATIOS`` to the reference."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        losses = -advantages * stats["logprobs"]
        if ratio == "none":
            return losses, {}
        gap = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0)
        weight = bounded_exp(gap.sum() if ratio == "sequence" else gap)
        weight = jax.lax.stop_gradient(jnp.broadcast_to(weight, mask.shape))
        return losses * jnp.clip(weight, 1 - clip, 1 + clip), {"ratio": weight}

    return Surrogate(apply, frozenset() if ratio == "none" else frozenset({"ref_logprobs"}))


def start_value_loss(coef: float = 1.0) -> Regularizer:
    """``coef`` times the squared error of the value before the first token, by sequence."""

    def value(stats: Stats, mask: Array) -> Array:
        error = jnp.square(stats["values"] - stats["returns"])
        return jnp.where(first_token(mask), error, 0)

    total = aggregates.sequence_sum
    return term("value_loss", value, coef, "values", "returns", aggregate=total)


def plain_log_ratio(coef: float) -> Regularizer:
    """``coef`` times log pi - log pi_ref of the data's tokens, summed over each completion.

    A completion counts as in the rest of the loss, by the statistic "positive". On data its
    gradient is minus that of the likelihood: it holds the policy back from fitting the
    data too closely. (On the policy's own samples it would be noise; see ``objectives.kl``.)
    """

    def value(stats: Stats, mask: Array) -> Array:
        return stats["positive"] * (stats["logprobs"] - stats["ref_logprobs"])

    needs = ("ref_logprobs", "positive")
    return term("log_ratio", value, coef, *needs, aggregate=aggregates.sequence_sum)


@published
def a_lol(
    ratio: Annotated[str, Choice(RATIOS)] = "sequence",
    clip: Fraction = 0.9,
    priority: Flag = True,
    value_coef: NonNegative = 1.0,
    kl_coef: NonNegative = 0.0,
    epochs: Count = 1,
) -> Method:
    """Offline policy gradient on the data that is better than what the value expects.

    A-LoL of "Improving Language Models with Advantage-based Offline Policy Gradients"
    (arXiv:2305.14718), a whole completion being one action:

        A = R(x, y) - V(x)
        loss = -mean over data with A > 0 of A sg(clip(r, 1 - eps, 1 + eps)) log pi(y | x)

    with r = pi(y | x) / pi_ref(y | x) (``ratio`` "sequence"), a ratio for each token ("token", the
    paper's A-LoL seq.) or 1 ("none", its reference-free form). ``kl_coef`` adds log pi - log pi_ref
    of the same data, those with A > 0; the paper's KL form is that with ``ratio="none"``. The
    completions are the data's demonstrations; R is what the reward functions say of them.

    Departures: the paper draws the remaining data with chances in proportion to A; here each
    completion is weighted by A over the batch's mean (``priority``), which is the same on average.
    V is the value network before the first token, trained as the policy is (squared error), where
    the paper fits a head on the frozen reference beforehand.
    """
    regularizers = () if is_zero(kl_coef) else (plain_log_ratio(kl_coef),)
    return Method(
        Objective(
            reference_advantage(priority=priority),
            offline_gradient(ratio, clip),
            aggregates.sequence_sum,
            (start_value_loss(value_coef), *regularizers),
        ),
        plan=Plan(demonstrated(1, alone=True)),
        schedule=Schedule(epochs),
    )
