"""Relatives of GRPO that give some tokens of a completion more credit than others.

Each function says its paper's formula with r the reward of a completion, A the advantage of GRPO,
rho_t the ratio of token t under the policy being trained to the one it was drawn from, and H_t the
entropy of the policy's distribution at the token. All else is as in ``grpo``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import CENTRED, Method
from jrl.methods.definition import variant
from jrl.methods.domains import (
    AtLeastOne,
    Choice,
    Count,
    Ddof,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Tokens,
)
from jrl.methods.edit import of_parts
from jrl.methods.group_relative import dapo, grpo
from jrl.methods.policy_gradient import rloo
from jrl.objectives import segments
from jrl.objectives.advantages import group_mean_std, live_mean
from jrl.objectives.aggregates import sequence_mean
from jrl.objectives.members import first_token
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Aggregate, Array, Batch, Rollout, Statistic, Transform

ENTROPY = frozenset({"rollout_entropy"})

# ---------------------------------------------------------------- forking tokens


def keep_uncertain(share: float = 0.2) -> Transform:
    """Sets the advantage of all but a ``share`` of the batch's tokens, the most uncertain, to 0.

    They stay under the mask, so that a mean over tokens still counts them. A NaN entropy makes the
    token's advantage NaN.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live = trained(batch)
        entropy = jnp.where(live, batch.stats["rollout_entropy"], 0)
        threshold = segments.quantile(entropy, segments.segments(live), 1 - share)
        keep = jnp.where(jnp.isnan(entropy), entropy, entropy >= threshold)
        return per_token(values, batch) * keep, batch

    return stateless(apply, ENTROPY)


@variant(dapo)
def forking_tokens(base: Method, rho: Fraction = 0.2) -> Method:
    """DAPO with the gradient of the batch's most uncertain tokens alone.

    "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for
    LLM Reasoning" (arXiv:2506.01939):

        loss = -1/(sum_i |o_i|) sum_i sum_t 1[H_t >= tau] min(rho_t A_i, clip(rho_t) A_i)

    with tau such that the part ``rho`` of the batch's tokens pass; all else as in ``dapo``.

    Departures: the sum is divided by the number of ALL tokens, as the formula has it, so that the
    step shrinks with ``rho``; tau is that of the whole batch, where the paper's code takes each
    micro-batch's; H is the policy's at the start of the training step. Tokens exactly at the
    quantile pass.
    """
    return base.after(keep_uncertain(rho))


# ---------------------------------------------------------------- EMPG


def modulate_by_step(sharpness: float, clarity: float, bonus: float) -> Transform:
    """``empg``'s credit for steps [N, G, T], from the advantages of completions."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        live, steps = trained(batch), segments.step_ids(batch)
        seg = segments.steps(batch)
        once = jnp.where(live, 1 / jnp.maximum(segments.count(seg), 1), 0)

        def mean(x: Array) -> Array:  # over the batch's steps, each counted once
            return jnp.where(live, x * once, 0).sum() / jnp.maximum(once.sum(), 1)

        entropy = segments.mean(batch.stats["rollout_entropy"], seg)
        low = jnp.min(entropy, where=live, initial=jnp.inf)
        width = jnp.max(entropy, where=live, initial=-jnp.inf) - low
        level = jnp.where(live, (entropy - low) / jnp.where(width == 0, 1, width), 0)
        scale = jnp.exp(-sharpness * level)
        # Levels are in [0, 1]: -1 stands for that of a step that does not exist.
        following = jax.vmap(jax.vmap(partial(segments.at_next_step, last=-1.0)))
        next_level = following(level, steps, live)
        clear = jnp.where(next_level == -1, 0, jnp.exp(-clarity * next_level))
        credit = per_token(values, batch) * scale / jnp.where(live.any(), mean(scale), 1)
        credit = credit + bonus * clear
        return jnp.where(live, credit - mean(credit), 0), batch

    return stateless(apply, ENTROPY)


@variant(grpo)
def empg(
    base: Method,
    sharpness: NonNegative = 1.0,
    clarity: NonNegative = 1.0,
    bonus: NonNegative = 0.1,
) -> Method:
    """GRPO whose steps earn by the policy's confidence, and by the clarity of what follows.

    "Harnessing Uncertainty: Entropy-Modulated Policy Gradients for Long-Horizon LLM Agents"
    (arXiv:2509.09265). With h_k the mean entropy of a step's tokens, brought to [0, 1] by the
    batch's least and greatest:

        A_k = A exp(-k h_k) / mean(exp(-k h)) + zeta exp(-k' h_(k+1)),   less the batch's mean

    then the clipped loss of GRPO. Steps are ``ids["step"]``, turns in an environment; a completion
    without them is one.
    k (``sharpness``), k' (``clarity``) and zeta (``bonus``) are those of the authors' page. Means
    are over steps, each counted once, and the last step of an episode gets no bonus, as there; H is
    the policy's at the start of the training step.
    """
    return base.after(modulate_by_step(sharpness, clarity, bonus))


# ---------------------------------------------------------------- CAPO


def outcome_and_paid(scores: Array, batch: Batch) -> tuple[Array, Array]:
    """(outcome [N, G], points paid at tokens [N, G, T]), which add up to the scores."""
    live = trained(batch)
    paid = jnp.where(live, batch.stats.get("paid", jnp.zeros(live.shape)), 0)
    return scores - paid.sum(axis=2), paid


def by_judged_token(eps: float, ddof: int) -> Transform:
    """The outcome at every token plus what is paid at it, normalised over the group's tokens."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        outcome, paid = outcome_and_paid(values, batch)
        credit = jnp.expand_dims(outcome, 2) + paid
        n, live = credit.shape[0], trained(batch)
        normalised = jax.vmap(partial(group_mean_std, eps=eps, ddof=ddof))
        out = normalised(credit.reshape(n, -1), live.reshape(n, -1)).reshape(credit.shape)
        return out, batch

    return stateless(apply)


@variant(grpo)
def capo(base: Method, eps: Positive = 1e-6, ddof: Ddof = 1) -> Method:
    """GRPO with a penalty for the tokens of steps that a judge calls wrong.

    "CAPO: Towards Enhancing LLM Reasoning through Generative Credit Assignment" (arXiv:2508.02298).
    With the verified outcome v of a completion and the tokens T_wrong of its wrong steps,

        R_t = W_outcome v - W_process 1[t in T_wrong],   A_t = (R_t - mean(R)) / std(R)

    and the clipped loss of GRPO. A judge with ``form = "capo"`` gives the second term: W_process is
    the weight of its part, W_outcome that of the part that says what is right, and should be the
    greater. Not known: the paper's weights, and over what it normalises; here over all trained
    tokens of the group. Without a judge by step each token has the outcome.
    """
    return base.with_(advantage=by_judged_token(eps, ddof))


# ---------------------------------------------------------------- PAV


def with_step_progress(outcome: Transform) -> Transform:
    """The outcome's advantage at every token, plus what is paid for the token's own step."""

    def apply(values: Array, batch: Batch, state: tuple) -> tuple[Array, Batch, tuple]:
        rest, paid = outcome_and_paid(values, batch)
        advantage, batch, state = outcome.apply(rest, batch, state)
        progress = segments.total(paid, segments.steps(batch))
        return per_token(advantage, batch) + progress, batch, state

    return outcome._replace(apply=apply)


@variant(rloo)
def pav(base: Method) -> Method:
    """RLOO on outcomes, plus each step's progress under a prover, paid to that step alone.

    The RL of the paper of ``pav_verifier``:

        gradient = sum over steps of grad log pi(a_h | s_h) [ Q(s_h, a_h) + alpha A_mu(s_h, a_h) ]

    with Q the policy's own return, here r_i less the mean of the others as in ``rloo``, and A_mu
    the change that the step makes of the chance of success of a prover mu. It is not summed over
    later steps: states are those of the policy before the update. A part ``function = "pav"`` gives
    alpha A_mu, its weight being alpha, beside the part that says what is right; steps are lines, or
    the turns of an environment. Departures: the paper does not say which baseline its runs take.
    """
    lines = base.needs.reading("lines")
    return base.with_(advantage=with_step_progress(base.objective.advantage))._replace(needs=lines)


# ---------------------------------------------------------------- DeGRPO


def first_token_apart(weight: float) -> Aggregate:
    """The mean over sequences of ``weight`` times the first token's loss plus the others' mean.

    Args:
      weight: of the first token, whatever the length.

    >>> losses, mask = jnp.array([[5.0, 2.0, 4.0, 9.0]]), jnp.array([[True, True, True, False]])
    >>> [float(x) for x in first_token_apart(0.1)(losses, mask)]
    [3.5, 1.0]
    """

    def aggregate(losses: Array, mask: Array) -> tuple[Array, Array]:
        chex.assert_rank([losses, mask], 2)
        chex.assert_equal_shape([losses, mask])
        first = first_token(mask)
        rest = mask & ~first
        total = weight * jnp.where(first, losses, 0).sum(axis=1) + live_mean(losses, rest, axis=1)
        return total.sum(dtype=jnp.float32), mask.any(axis=1).sum(dtype=jnp.float32)

    return aggregate


@variant(grpo, without=("eps", "ddof"))
def degrpo(
    base: Method,
    alpha: NonNegative = 0.001,
    gamma: Fraction = 0.5,
    think_token: Tokens | None = None,
    correct: Positive = 0.5,
) -> Method:
    """A first token that chooses how to answer, with a weight that no length dilutes.

    DeGRPO of "Thinkless: LLM Learns When to Think" (arXiv:2505.13379). With L_t the clipped loss of
    token t and A_i = r_i - mean(r):

        loss = 1/G sum_i [alpha L_0 + 1/T_i sum over t >= 1 of L_t] + beta KL
        r = 1 for a right short answer, 1 - gamma for a right long one, -1 for a wrong one

    T_i counts the trained tokens after the first. The rewards are rewritten so when ``think_token``
    is given, the id of the token that opens a long answer: in the first reward part, which says
    whether the answer is right (``correct`` points or more).

    The defaults of alpha, of gamma and of the advantage without a deviation are those of the
    released training script. Departures: the mean of the tokens after the first is each
    completion's, as in the paper, where the released code averages over the batch's tokens; the
    KL's mean is over each completion's tokens, and beta (``kl_coef``) is 0 unless given, where the
    script has 0.001 of k3. The model must have been taught both modes by
    supervised training first.
    """

    def by_mode(parts: Array, rollout: Rollout) -> Array:
        right = parts[..., 0] >= correct
        long = jnp.asarray(rollout.tokens)[..., 0] == think_token
        first = jnp.where(right, jnp.where(long, 1 - gamma, 1.0), -1.0)
        first = jnp.where(jnp.isnan(parts[..., 0]), parts[..., 0], first)
        return jnp.concatenate([first[..., None], parts[..., 1:]], -1)

    kl = tuple(term._replace(aggregate=sequence_mean) for term in base.objective.regularizers)
    method = base.with_(advantage=CENTRED, aggregate=first_token_apart(alpha), regularizers=kl)
    return method if think_token is None else method.with_(rewards=of_parts(by_mode))


# ---------------------------------------------------------------- preplan and anchor

# A ``Statistic`` over "attention" is a function of ONE sequence: (weights [H, T, L], lags [T, L],
# mask [T]) -> [T]. Row t of ``weights`` is what completion token t attends to, over the columns of
# the whole sequence, the last T of which are the completion; ``lags`` says how many tokens back a
# column is, below 0 for what the token does not see. H counts the heads of the chosen layers.

RULES = ("local", "global", "coupled")
"""Amplify planning tokens, anchors, or anchors that share with the planning token before them."""


def head_spans(weights: Array, lags: Array, mask: Array) -> Array:
    """Mean attention distance of each head: heads with a short one are local, others global.

    Returns:
      [H] float32, tokens.
    """
    chex.assert_rank([weights, lags, mask], [3, 2, 1])
    reach = (weights * jnp.expand_dims(jnp.maximum(lags, 0), 0)).sum(axis=2)
    live = jnp.expand_dims(mask, 0)
    return jnp.where(live, reach, 0).sum(axis=1) / jnp.maximum(mask.sum(), 1)


def attention_distance(
    weights: Array, lags: Array, mask: Array, *, window: int, heads: float = 1.0
) -> Array:
    """WAAD of ``preplan_anchor``, [T] tokens: how far back a token looks, capped at the window.

    The fraction ``heads`` of all heads, those of the shortest spans, is local. 0 where not live.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> lags = jnp.array([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    >>> attention_distance(weights, lags, jnp.ones(3, bool), window=1).tolist()
    [0.0, 0.5, 1.0]
    """
    local = _chosen_heads(head_spans(weights, lags, mask), heads)
    capped = jnp.expand_dims(jnp.clip(lags, 0, window), 0)
    return jnp.where(mask, local @ (weights * capped).sum(axis=2), 0)


def attention_influence(
    weights: Array, lags: Array, mask: Array, *, nearest: int, farthest: int, heads: float = 1.0
) -> Array:
    """FAI of ``preplan_anchor``, [T]: the mean attention that a token gets from later ones.

    The fraction ``heads`` of all heads, those of the longest spans, is global. 0 where not live,
    and where no token ``nearest`` to ``farthest`` later is.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> lags = jnp.array([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    >>> every = jnp.ones(3, bool)
    >>> attention_influence(weights, lags, every, nearest=1, farthest=9).tolist()
    [0.75, 0.0, 0.0]
    """
    broad = _chosen_heads(-head_spans(weights, lags, mask), heads)
    prompt_tokens = weights.shape[2] - mask.shape[0]
    lags = lags[:, prompt_tokens:]
    later = (lags >= nearest) & (lags <= farthest) & jnp.expand_dims(mask, 1)
    influence = jnp.tensordot(broad, weights[:, :, prompt_tokens:], axes=1)
    total = jnp.where(later, influence, 0).sum(axis=0)
    return jnp.where(mask, total / jnp.maximum(later.sum(axis=0), 1), 0)


def rhythm_factors(
    distance: Array,
    influence: Array,
    mask: Array,
    rule: str = "coupled",
    *,
    factor: float = 1.5,
    fraction: float = 0.4,
    reach: int = 3,
    shared: float = 0.5,
) -> Array:
    """Advantage multipliers of ONE completion: gamma_t, [T] float32.

    ``distance`` [T] is from ``attention_distance``, ``influence`` [T] from ``attention_influence``;
    tokens outside the mask [T] are stepped over. ``fraction`` is of the live tokens, rounded up,
    ties included.

    >>> distance = jnp.array([1, 1.2, 9, 8.9, 8.8, 8.7, 2, 2.1, 1])
    >>> rhythm_factors(distance, distance, jnp.ones(9, bool), "local", factor=2.0).tolist()
    [2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    """
    size = mask.shape[0]
    order = jnp.argsort(~mask, stable=True)  # live tokens side by side, in order
    live = jnp.arange(size) < mask.sum()
    distance, influence = jnp.where(live, distance[order], 0), jnp.where(live, influence[order], 0)
    change = jnp.abs(distance - jnp.roll(distance, -1))
    change = jnp.where(live & jnp.roll(live, -1).at[-1].set(False), change, 0)
    planning, anchor = _top(change, live, fraction), _top(influence, live, fraction)
    if rule == "coupled":
        # The greatest change among the tokens before, the nearest of them on a tie.
        steps = range(1, reach + 1)
        before = jnp.stack([jnp.roll(change, k).at[:k].set(-1) for k in steps])
        intro = jnp.arange(size) - 1 - jnp.argmax(before, axis=0)
        low = distance <= jnp.nanmedian(jnp.where(live, distance, jnp.nan))
        least = jnp.min(change, where=planning, initial=jnp.inf)
        dominated = anchor & low & (before.max(axis=0) >= least)
        intro = jnp.where(dominated, intro, size)
        receiver = jnp.zeros(size, bool).at[intro].set(True, mode="drop")
        bonus = anchor * jnp.where(dominated, 1 - shared, 1.0) + shared * receiver
    else:
        bonus = jnp.float32(planning if rule == "local" else anchor)
    gamma = 1 + (factor - 1) * bonus
    gamma = jnp.where(jnp.isnan(distance) | jnp.isnan(influence), jnp.nan, gamma)
    return jnp.zeros(size).at[order].set(jnp.where(live, gamma, 1))


def amplify(
    statistics: tuple[Statistic, ...], factors: Callable[..., Array], positive_only: bool
) -> Transform:
    """Multiplies advantages, to [N, G, T], by factors that it reads from statistics it brings.

    Args:
      statistics: what ``factors`` reads.
      factors: (a [T] for each statistic, mask [T]) -> [T], of ONE completion.
      positive_only: True to leave advantages below 0 as they are.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        values, live = per_token(values, batch), trained(batch)
        inputs = (batch.stats[statistic.name] for statistic in statistics)
        factor = jax.vmap(jax.vmap(factors))(*inputs, live)
        return values * (jnp.where(values < 0, 1, factor) if positive_only else factor), batch

    return stateless(apply, statistics=statistics)


@variant(grpo)
def preplan_anchor(
    base: Method,
    rule: Annotated[str, Choice(RULES)] = "coupled",
    factor: AtLeastOne = 1.5,
    fraction: Fraction = 0.4,
    reach: Count = 3,
    shared: Fraction = 0.5,
    positive_only: Flag = False,
    window: Count = 10,
    nearest: Count = 10,
    farthest: Count = 100,
    heads: Fraction = 0.3,
) -> Method:
    """GRPO with larger advantages where attention shows the model planning and anchoring.

    "Attention Illuminates LLM Reasoning: The Preplan-and-Anchor Rhythm Enables Fine-Grained Policy
    Optimization" (arXiv:2510.13554). From the attention a[t, s] of one scoring pass at the start of
    the step, in five layers spread over the middle third:

        WAAD_t  = mean over local heads of sum_s a[t, s] min(t - s, window)
        FAI_s   = mean over global heads and later t, nearest <= t - s <= farthest, of a[t, s]
        Delta_t = |WAAD_t - WAAD_{t+1}|;   planning tokens P: the top 0.4 of Delta,
                                           anchors G: the top 0.4 of FAI, of each completion
        local:   gamma_t = 1 + 0.5 [t in P];    global: gamma_t = 1 + 0.5 [t in G]
        coupled: gamma_t = 1 + 0.5 [t in G, not D] + 0.5 (1 - alpha) [t in D] + 0.5 alpha [t in I]
        A_t = gamma_t A

    Local heads are the 0.3 of least mean span, global ones the 0.3 of the greatest. D holds the
    dominated anchors: those of low WAAD with a high Delta among the ``reach`` tokens before (the
    paper has 1 to 3), and I the tokens of that greatest Delta, which get the part alpha
    (``shared``) of the bonus. Numbers are those of the paper's later version, which amplifies
    advantages of both signs; the first has ``farthest`` 50 and ``positive_only``.

    Not known (the paper's settings and the authors' trainer lack them): alpha, here 0.5; what low
    and high are, here a WAAD of at most the completion's median and a Delta of the planning tokens;
    Delta of the last token, here 0.
    """
    local = partial(attention_distance, window=window, heads=heads)
    broad = partial(attention_influence, nearest=nearest, farthest=farthest, heads=heads)
    statistics = (
        Statistic("attention_distance", local, over="attention", start=True),
        Statistic("attention_influence", broad, over="attention", start=True),
    )
    gamma = partial(
        rhythm_factors, rule=rule, factor=factor, fraction=fraction, reach=reach, shared=shared
    )
    return base.after(amplify(statistics, gamma, positive_only))


def _chosen_heads(spans: Array, fraction: float) -> Array:
    """[H] float32: equal weights that sum to 1 over the heads of the least spans, ties included."""
    count = max(1, round(fraction * spans.shape[0]))
    chosen = (spans <= jnp.sort(spans)[count - 1]).astype(jnp.float32)
    return chosen / jnp.maximum(chosen.sum(), 1)


def _top(values: Array, live: Array, fraction: float) -> Array:
    """[T] bool: the greatest ``fraction`` of the live values, at least one, ties included."""
    count = jnp.ceil(fraction * live.sum() - 1e-4).astype(jnp.int32)
    ordered = -jnp.sort(jnp.where(live, -values, jnp.inf))
    least = ordered[jnp.clip(count - 1, 0, values.shape[0] - 1)]
    return live & (values >= least)
