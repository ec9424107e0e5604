"""Preference learning on the policy's own completions: pairs by reward, win rates, iteration.

"The group" is what the policy drew for one prompt. A judge or preference model that scores single
completions is a reward function; the probability that one completion beats another is made from
two scores (``win_rates``). Notation and inherited coefficients as in ``preference``.
"""

from __future__ import annotations

from typing import Annotated

import chex
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from jrl.methods.base import Method, Schedule, against_others, kl_penalty
from jrl.methods.definition import published, variant
from jrl.methods.domains import AtLeastOne, Choice, Count, Fraction, NonNegative, Positive, is_zero
from jrl.methods.plan import Plan, demonstrated
from jrl.methods.preference import Noise, PairLossName, Steps, dpo, dpo_loss, implicit
from jrl.methods.schedule import average, refreshed
from jrl.objectives import aggregates, comparisons, pairs, ratios, transforms
from jrl.objectives.advantages import live_mean
from jrl.objectives.comparisons import START, comparable, extremes, sums, write
from jrl.objectives.kl import bounded_exp
from jrl.objectives.members import GroupLoss, Members, over_group, over_sequence, spoilt
from jrl.objectives.pairs import Side, sigmoid
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Statistic, Stats, Transform, opinions
from jrl.zoo.methods.preference import trusted
from jrl.zoo.methods.rlhf import length_cost

WinModel = Annotated[str, Choice(("bradley_terry", "comparison"))]


@variant(dpo)
def online_dpo(base: Method) -> Method:
    """A direct alignment loss on pairs sampled from the current policy and ranked by a judge.

    OAIF of "Direct Language Model Alignment from Online AI Feedback" (arXiv:2402.04792), with
    (y_w, y_l) the best and the worst of the group and a, b = beta h(y_w), beta h(y_l):

        "sigmoid" (DPO)  -log sigmoid(a - b)
        "ipo"            [h(y_w) - h(y_l) - 1 / (2 beta)]^2
        "hinge" (SLiC)   max(0, 1 - (a - b))

    Departures: the paper draws two completions; of a larger group the extremes are taken. The judge
    is whatever scores completions. The paper keeps the reference, as here with ``refresh_ref`` 0.
    """
    return base


# ---------------------------------------------------------------- win rates


def win_rates(
    model: str = "bradley_terry", *, against: str = "others", less: float = 0.0
) -> Transform:
    """The probability that a member is preferred to another member of its group.

    Args:
      model: how scores make a preference: "bradley_terry" sigmoid(r_i - r_j), or "comparison", 1
        for the higher score, 1/2 for equal ones, 0 for the lower.
      against: "others", or "all" to count the member itself, which it beats half the time.
      less: taken off, such as the 1/2 of an even game.

    Returns:
      A transform [N, G] -> [N, G]; a member with no others has 1/2.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = comparable(batch)
        scores = jnp.where(live, scores, 0)
        gap = scores[:, :, None] - scores[:, None, :]
        # sign() of NaN is NaN, so that neither model loses one.
        wins = sigmoid(gap) if model == "bradley_terry" else (jnp.sign(gap) + 1) / 2
        compared = live[:, :, None] & live[:, None, :]
        if against == "others":
            compared = compared & ~jnp.eye(live.shape[1], dtype=bool)[None]
        count = compared.sum(axis=2)
        # Deviations from 1/2 are averaged, so that an even game gives exactly 1/2.
        mean = jnp.where(compared, wins - 0.5, 0).sum(axis=2) / jnp.maximum(count, 1) + 0.5
        return jnp.where(live, mean - less, 0), batch

    return stateless(apply)


@published
def sppo(
    eta: Positive = 1000.0,
    model: WinModel = "bradley_terry",
    against: Annotated[str, Choice(("all", "others"))] = "all",
    use: Annotated[str, Choice(("extremes", "all"))] = "extremes",
    refresh_ref: Steps = 100,
) -> Method:
    """Regression of the log-ratio on the probability of beating the policy's other completions.

    "Self-Play Preference Optimization for Language Model Alignment" (arXiv:2405.00675):

        loss = [ log(pi(y) / pi_t(y)) - eta (P(y beats pi_t) - 1/2) ]^2

    the mean over completions, with pi_t the policy at the start of the iteration (the reference,
    renewed every ``refresh_ref`` steps) and P estimated over the group, the completion itself
    included (``against``). As in the paper the completions of the highest and the lowest P are
    trained on (``use``). Departures: completions are drawn from the policy of the step, the paper's
    from pi_t; P comes from scores by ``model``, not from a pairwise preference model. The
    hard-label form that TRL names sppo_hard is model="comparison", against="others",
    eta = 1 / beta on pairs, with twice the loss.
    """

    def regression(group: Members) -> tuple[Array, Stats]:
        log_ratio, advantage = group.log_ratio(), group.score - 0.5
        value = jnp.square(log_ratio - eta * advantage)
        return value, {"margin": log_ratio * jnp.sign(advantage)}

    steps = [win_rates(model, against=against)]
    if use == "extremes":
        steps.append(comparisons.best_and_worst())
    surrogate = over_sequence(regression, ("ref_logprobs",))
    method = against_others(transforms.chain(*steps), surrogate, aggregates.sequence_sum)
    return method.with_(schedule=Schedule(after=refreshed(refresh_ref)))


@published
def nash_md(
    tau: NonNegative = 0.01, model: WinModel = "bradley_terry", ref_decay: Fraction = 1.0
) -> Method:
    """Policy gradient of the probability of beating an opponent, less a divergence.

    Nash-MD-PG of "Nash Learning from Human Feedback" (arXiv:2312.00886):

        gradient = E[ grad log pi(y) ( P(y beats y') - 1/2 - tau log(pi(y) / mu(y)) ) ]

    with mu the reference. The paper's opponent y' is drawn from the geometric mixture of pi and mu,
    token by token; here opponents are the group's other completions, the mixture with weight 0 on
    mu, and P is the mean over them. Departures: P comes from scores by ``model``, not from a
    pairwise preference model; log(pi / mu) is that of the sampler's distribution. With
    ``ref_decay`` below 1 mu is a moving average of the policy, the direction of Nash-EMA.
    """
    after = () if is_zero(1 - ref_decay) else (average("ref", ref_decay),)
    steps = (win_rates(model, less=0.5), *kl_penalty("k1", tau, "sequence"))
    surrogate = ratios.reinforce()._replace(on_policy=True)
    method = against_others(transforms.chain(*steps), surrogate, aggregates.sequence_sum)
    return method.with_(
        schedule=Schedule(after=after),
        lacks="opponents drawn from the geometric mixture of policy and reference; the group's"
        " other completions stand for them",
    )


@variant(dpo)
def xpo(
    base: Method,
    beta: Positive,
    loss: PairLossName,
    label_smoothing: Noise,
    alpha: NonNegative = 1e-5,
) -> Method:
    """Online DPO that pays for moving probability away from the reference's own completions.

    "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient
    RLHF" (arXiv:2405.21046), with y drawn from the policy, y' from the reference, and (y_w, y_l)
    the two in order of reward:

        loss = alpha log pi(y')  -  log sigmoid( beta h(y_w) - beta h(y_l) )

    Departures: the reference's completion comes as the group's demonstration (``external``); the
    term is left out of a pair of two own completions. The paper's theory sets alpha by the horizon;
    the default is TRL's.
    """
    preferred = dpo_loss(loss, beta, label_smoothing)

    def optimistic(chosen: Side, rejected: Side) -> Array:
        optimism = chosen.external * chosen.logprob + rejected.external * rejected.logprob
        return preferred(chosen, rejected) + alpha * optimism

    return base.with_(
        surrogate=pairs.pair(optimistic, implicit(beta), ("ref_logprobs", "external")),
        plan=Plan(demonstrated(1)),
        lacks="completions drawn from the reference policy; the data's own solution stands for one",
    )


# ---------------------------------------------------------------- P3O


def pairwise_ratios(clip: float, cap: float, kl_coef: float, joint: bool) -> GroupLoss:
    """The loss of ``p3o``, the mean over a group's pairs."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        log_rho = group.total("logprobs") - group.total("sampler_logprobs")
        score = group.score
        if not is_zero(kl_coef):
            score = score - kl_coef * group.log_ratio()
        gap = jax.lax.stop_gradient(score[:, None] - score[None, :])
        rho = bounded_exp(log_rho)
        if joint:
            pair_ratio = log_rho[:, None] - log_rho[None, :]
            near = jnp.clip(pair_ratio, -clip, clip)
            weight = bounded_exp(log_rho[:, None] + log_rho[None, :])
        else:
            pair_ratio = jnp.broadcast_to(rho[:, None], gap.shape)
            near, weight = jnp.clip(pair_ratio, 1 - clip, 1 + clip), rho[None, :]
        push = -gap * jax.lax.stop_gradient(jnp.clip(weight, 1 / cap, cap))
        each = jnp.maximum(push * pair_ratio, push * near) / (2 if joint else 1)
        # Both orders of a pair: the joint loss is the same for them, the separate ones are its two
        # halves.
        both = group.live[:, None] & group.live[None, :] & ~jnp.eye(len(rho), dtype=bool)
        clipped = live_mean((pair_ratio != near).astype(jnp.float32), both)
        return spoilt(live_mean(each, both), group), {"clip_fraction": clipped}

    return of_group


@published
def p3o(
    clip: Positive = 0.2,
    clipping: Annotated[str, Choice(("joint", "separate"))] = "joint",
    kl_coef: NonNegative = 0.05,
    ratio_cap: AtLeastOne = 10.0,
    epochs: Count = 1,
) -> Method:
    """The policy gradient of reward differences, with clipped ratios of complete sequences.

    P3O of "Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment"
    (arXiv:2310.00212). With rho_i = pi(y_i) / pi_old(y_i) of whole completions, and without
    gradient the advantage of one over the other and weights held within 1/10 and 10 (``ratio_cap``)

        d = r(y_1) - r(y_2) - beta (h(y_1) - h(y_2)),  w_i = rho_i,  w = rho_1 rho_2,

    the loss of a pair is, as in the first author's code,

        "separate"  1/2 [ max(-d w_2 rho_1, -d w_2 clip(rho_1, 1 +- eps))
                          + max(d w_1 rho_2, d w_1 clip(rho_2, 1 +- eps)) ]
        "joint"     1/2 max(-d w g, -d w clip(g, +- eps)),  g = log rho_1 - log rho_2, nats

    On policy both have the gradient -d/2 grad [log pi(y_1) - log pi(y_2)]. beta, eps and the cap
    are that code's; it passes four times over a batch. Which form the paper calls V1 and which V2
    is not labelled there. Departures: of a larger group, the mean over its pairs; ratios are
    clamped at 20 nats, and pi_old is the sampler.
    """
    needs = ("sampler_logprobs", *(() if is_zero(kl_coef) else ("ref_logprobs",)))
    loss = pairwise_ratios(clip, ratio_cap, kl_coef, clipping == "joint")
    surrogate = over_group(loss, needs)
    return against_others(transforms.identity(), surrogate, aggregates.sequence_sum, epochs=epochs)


# ---------------------------------------------------------------- self-rewarding


INITIAL = Statistic(
    "initial_logprobs",
    lambda distributions, token: distributions["initial"][token],
    ("initial",),
    start=True,
)
"""Log-probability of the token under the frozen policy "initial"."""


def kendall(x: Array, y: Array, live: Array) -> Array:
    """[]: Kendall's tau of two scores [G] over live members, in [-1, 1]; 0 for fewer than two.

    >>> float(kendall(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 3.0, 2.0]), jnp.ones(3, bool)))
    0.3333333432674408
    """
    both = live[:, None] & live[None, :] & ~jnp.eye(live.shape[0], dtype=bool)
    agree = jnp.sign(x[:, None] - x[None, :]) * jnp.sign(y[:, None] - y[None, :])
    return live_mean(agree, both)


def self_ranking(by: str) -> Transform:
    """Scores become the policy's own of ``cream``; writes "pair_weight", their agreement.

    The agreement is the mean over groups of (tau + 1) / 2, with tau Kendall's between the members'
    ranking by the policy and that by the reference (the model before it), at the start of the step.

    Args:
      by: "implicit" or "likelihood".
    """
    statistics = (INITIAL,) if by == "implicit" else ()

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        live = comparable(batch)
        tokens = jnp.maximum(batch.mask.sum(axis=2), 1)
        now = sums("proximal_logprobs", batch)
        now = now - sums(INITIAL.name, batch) if statistics else now / tokens
        tau = jax.vmap(kendall)(now, sums("ref_logprobs", batch) / tokens, live)
        rate = live_mean((tau + 1) / 2, live.sum(axis=1) > 1)
        return now, write(batch, "pair_weight", rate)

    return stateless(apply, START, statistics)


@variant(dpo, without=("loss", "label_smoothing"), refresh_ref=100)
def cream(
    base: Method,
    beta: Positive,
    ranking: Annotated[str, Choice(("implicit", "likelihood"))] = "implicit",
) -> Method:
    """DPO on the policy's own ranking, trusted as far as the model before it ranks alike.

    "CREAM: Consistency Regularized Self-Rewarding Language Models" (arXiv:2410.12735): the group is
    ranked by the policy's implicit reward log pi(y) - log pi_0(y) against the initial model, the
    frozen policy "initial", and by the mean log-probability of a token under the model of the
    iteration before (the reference, renewed every ``refresh_ref`` steps), as in the released code;

        C = mean over prompts of (Kendall's tau of the two rankings + 1) / 2
        loss = -C log sigmoid(a - b) - (1 - C) log sigmoid(b - a)

    for the best and the worst by the policy's ranking. Rewards are not read. A run starts from a
    policy that differs from the initial one, or no pair has a gap. Departures: an iteration ranks
    before it trains; here each step ranks its own completions, before its update, and C is that of
    the step's batch; per-prompt C is a variant of the paper. ``ranking="likelihood"`` ranks by the
    mean log-probability for the policy as well, and needs no third model.
    """
    return base.with_(surrogate=trusted(beta)).before(self_ranking(ranking))


# ---------------------------------------------------------------- judges of other kinds


@variant(dpo)
def online_iterative_dpo(base: Method, length_penalty: NonNegative = 0.0) -> Method:
    """DPO on the best and the worst of a group by a reward model, against a fixed reference.

    "RLHF Workflow: From Reward Modeling to Online RLHF" (arXiv:2405.07863): draw a group, score it,
    pair the extremes, and minimise DPO's loss against the supervised model:

        score = r(y) - ``length_penalty`` * tokens(y)

    The released runs take 3 iterations of 20,000 prompts with 8 draws at temperature 1 of the
    current policy; one of their two configurations has ``label_smoothing`` 0.1, and the later
    release renews the reference in each iteration (``refresh_ref``). Departures: an iteration is a
    training step, so every step's pairs are the current policy's. The code's penalty counts
    characters, and only chooses the pair, which the plain reward then orders. The reward model is
    trained by ``bradley_terry``.
    """
    return base.before(length_cost(length_penalty))


@variant(online_iterative_dpo, without=("length_penalty",), label_smoothing=0.1, refresh_ref=100)
def matryoshka(base: Method) -> Method:
    """Iterated DPO on guidance for another model: what led it to a right answer is preferred.

    "Matryoshka: Learning to Drive Black-Box LLMs with LLMs" (arXiv:2410.20749): the policy writes
    intermediate guidance, over several turns, for a model that is not trained; the other model's
    final output is judged, and

        loss = -0.9 log sigmoid(z) - 0.1 log sigmoid(-z),   z = beta h(g_w) - beta h(g_l)

    with g_w guidance that led to a better output than g_l did, drawn anew by the policy as it is.
    ``zoo.envs.players.guided_env`` has the other model act. beta and ``label_smoothing`` are those
    of the released script, whose reference is the policy that a round starts from (here renewed
    every ``refresh_ref`` steps). Departures: pairs are the extremes of a group, where the paper
    pairs any guidance that succeeded with any that failed.
    """
    return base


@variant(dpo, refresh_ref=100)
def rlaif_v(base: Method) -> Method:
    """Iterated DPO on pairs that differ in how many of their claims an open judge rejects.

    "RLAIF-V: Aligning MLLMs through Open-Source AI Feedback for Super GPT-4V Trustworthiness"
    (arXiv:2405.17220): the group is drawn under one decoding distribution; a judge splits each
    answer into claims and answers a yes/no question for each (a reward part with
    ``form = "rlaif_v"``);

        score(y) = -(number of rejected claims)

    and the reference is renewed every ``refresh_ref`` steps. At inference the policy picks by its
    own reward, ``self_feedback``. Departures: the released code draws two pairs at random among all
    of a prompt's ten answers whose scores differ, and then drops pairs whose winner is much the
    shorter, until mean lengths agree; here the extremes are the pair, of whatever lengths.
    """
    return base.with_(lacks="images")


def self_feedback(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """RLAIF-V's reward for selecting one of several answers: the mean token log-ratio.

    Returns:
      [] float32, nats. 0 where nothing is live.

    >>> ones = jnp.ones(2, bool)
    >>> float(self_feedback(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0]), ones))
    0.5
    """
    chex.assert_equal_shape([logprobs, ref_logprobs, mask])
    return live_mean(logprobs - ref_logprobs, mask)


def easy_pairs(share: float, min_certainty: float) -> Transform:
    """Leaves the pairs on which the passes of an estimator agree, and of those a random share.

    Each reward part of weight 0 is one pass, or each part where all have a weight; p_t =
    sigmoid(part t's gap between best and worst).

    Args:
      share: of the pairs that most passes do not order the other way round, the part drawn
        without replacement, in proportion to 1 - BALD (nats), BALD = H(mean of p_t) - mean of
        H(p_t).
      min_certainty: pairs with less than this of 1 - BALD / log 2 are left out beforehand, as are
        those of which a pass has no opinion.

    Returns:
      A transform after ``comparisons.best_and_worst``, rounding the number drawn up. A NaN reward
      is kept, to come to light.
    """

    def entropy(p: Array) -> Array:
        return -xlogy(p, p) - xlogy(1 - p, 1 - p)

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)

        def of(at: Array) -> Array:
            return jnp.where(at[:, :, None], batch.rewards, 0).sum(axis=1)

        p = sigmoid(of(best) - of(worst))
        silent = batch.reward_weights == 0
        passes = silent | ~silent.any()
        has_opinion = opinions(batch.rewards, batch.ids)
        # A member that a pass has not read has no gap there, and a reward of 0.
        unread = ((best | worst)[:, :, None] & ~has_opinion & passes[None, None]).any(axis=(1, 2))

        def mean(values: Array) -> Array:  # over passes
            return jnp.where(passes[None], values, 0).sum(axis=1) / passes.sum()

        bald = entropy(mean(p)) - mean(entropy(p))
        # Rounding may leave a tiny negative; one pass gives exactly 0.
        bald = jnp.clip(bald, 0, jnp.log(2.0))
        against = mean((p < 0.5).astype(jnp.float32)) > 0.5
        unsure = 1 - bald / jnp.log(2.0) < min_certainty
        paired = best.any(axis=1) & worst.any(axis=1)  # not so where a score is NaN
        eligible = paired & ~against & ~unsure & ~unread
        # The greatest of log w + Gumbel noise are a draw without replacement in proportion to w.
        seeds = jnp.where(best, batch.ids.get("tie_breaker", 0), 0).sum(axis=1).astype(jnp.uint32)
        noise = jax.vmap(lambda seed: jax.random.gumbel(jax.random.key(seed)))(seeds)
        keys = jnp.where(eligible, jnp.log1p(-bald) + noise, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-keys))
        sampled = eligible & (rank < jnp.ceil(share * eligible.sum()))
        usable = sampled | ~paired | (jnp.isnan(p) & passes[None]).any(axis=1)
        return scores, batch.replace(members=batch.members & usable[:, None])

    return stateless(apply)


@variant(dpo, refresh_ref=100)
def upo(base: Method, share: Fraction = 0.5, min_certainty: Fraction = 0.0) -> Method:
    """Iterated DPO on pairs selected by the agreement of an estimator's stochastic passes.

    "Self-Evolutionary Large Language Models through Uncertainty-Enhanced Preference Optimization"
    (arXiv:2409.11212): pairs drawn from the policy and ranked by a reward model are judged again by
    an estimator with Monte Carlo dropout (10 passes). Each reward part of weight 0 is one of its
    passes, ``function = "upo"`` with ``single_pass`` 0 to 9 and the estimator's ``path``; the part
    that ranks has a weight. With p_t the probability that pass t gives to y_w over y_l, as in the
    released code:

        BALD = H(mean of p_t) - mean of H(p_t)

    Pairs on which most passes disagree with the ranking are left out; of the others ``share`` are
    drawn without replacement in proportion to 1 - BALD and trained on with plain DPO. Departures:
    the draw is from a step's batch; the released code adds a fifth of an equal draw in proportion
    to BALD, 30 % of the widest margins and 40 % of labelled pairs. ``min_certainty`` leaves out
    pairs whose 1 - BALD / log 2 is less. Whether the paper's own loss carries the certainty is not
    known; the released trainer's does not.
    """
    return base.after(easy_pairs(share, min_certainty))
