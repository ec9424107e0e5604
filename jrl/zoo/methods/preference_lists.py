"""Papers whose preference loss looks at more, or less, than a pair: labels, rankings, levels.

Completions with a label of their own, whole lists in order, siblings in a tree, levels that rules
give; and pairs with weighed tokens or a rationale. Notation and inherited coefficients as in
``preference``.
"""

from __future__ import annotations

from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, against_others
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    AtLeastOne,
    Choice,
    Count,
    Flag,
    NonNegative,
    Positive,
    Range,
    is_zero,
)
from jrl.methods.preference import Noise, PairLossName, dpo, list_method, orpo
from jrl.objectives import aggregates, comparisons, transforms
from jrl.objectives.advantages import live_mean
from jrl.objectives.comparisons import START, comparable, extremes, start_log_ratio, write
from jrl.objectives.kl import estimator
from jrl.objectives.lists import every_pair, list_nll, ordered_pairs, ranking_metrics
from jrl.objectives.members import Members, mean_over_best, over_group, over_sequence, spoilt
from jrl.objectives.pairs import reward_loss, sigmoid, softplus
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Objective, Regularizer, Stats, Surrogate, Transform
from jrl.zoo.methods.preference import Points

Decay = Annotated[float, Range(0.0, 0.999999)]
RationaleForm = Annotated[str, Choice(("nll", "log_sigmoid"))]


# ---------------------------------------------------------------- labels


def labels(
    threshold: float, positive: float = 1.0, negative: float = 1.0, *, balanced: bool = False
) -> Transform:
    """Signed weights from scores: ``positive`` above the threshold, minus ``negative`` at or below.

    ``balanced`` scales each kind by (all completions) / (completions of the kind), so that the mean
    over completions is the sum of the two kinds' means. A NaN score stays NaN.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        good = jnp.where(scores > threshold, 1.0, jnp.where(jnp.isnan(scores), jnp.nan, 0.0))
        up, down = jnp.float32(positive), jnp.float32(negative)
        if balanced:
            live = comparable(batch)
            count, high = live.sum(), (live & (scores > threshold)).sum()
            up = up * count / jnp.maximum(high, 1)
            down = down * count / jnp.maximum(count - high, 1)
        return good * up - (1 - good) * down, batch

    return stateless(apply)


def labelled(beta: float, bounded: bool) -> Surrogate:
    """A loss of each completion's implicit reward, on the side that its label says.

    The sign of the score is the label and its size the weight:

        |score| f(sign(score) beta (log pi(y) - log pi_ref(y) - shift))

    f is -log sigmoid(x), or if ``bounded`` 1 - sigmoid(x), whose gradient vanishes on both sides.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        reward = jnp.sign(group.score) * beta * (group.log_ratio() - group.first("shift"))
        value = jnp.abs(group.score) * (sigmoid(-reward) if bounded else softplus(-reward))
        return value, {"accuracy": (reward > 0).astype(jnp.float32), "margin": reward}

    return over_sequence(of_group, ("ref_logprobs", "shift"))


def divergence_shift() -> Transform:
    """Writes the divergence from the reference that KTO measures rewards from.

    max(0, the mean of log pi(y) - log pi_ref(y) over the batch's completions).
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        live = comparable(batch)
        mean = live_mean(start_log_ratio(batch), live)
        return scores, write(batch, "shift", jnp.maximum(mean, 0))

    return stateless(apply, START)


@published
def kto(
    beta: Positive = 0.1,
    desirable: NonNegative = 1.0,
    undesirable: NonNegative = 1.0,
    threshold: Points = 0.5,
) -> Method:
    """Prospect theory's value of each completion, desirable or not; no pairs are needed.

    "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306):

        z0 = max(0, KL(pi || pi_ref))
        loss = lambda_D (1 - sigmoid(beta (h(y) - z0)))   for a desirable y
               lambda_U (1 - sigmoid(beta (z0 - h(y))))   for an undesirable one

    the mean over completions; desirable is a reward above ``threshold`` points. Departures: the
    paper estimates z0 from completions of OTHER prompts of the microbatch, a second scoring pass;
    here it is the mean of h over the batch's own completions at the start of the step, which is the
    divergence itself where the policy drew them, and only a stand-in where the data did.
    """
    signed = transforms.chain(labels(threshold, desirable, undesirable), divergence_shift())
    return Method(Objective(signed, labelled(beta, bounded=True), aggregates.sequence_sum))


def running_shift(decay: float | None) -> Transform:
    """Writes the running mean of the log-ratio of completions, as in BCO.

    Each step's number is the mean of the mean over desirable completions and the mean over the
    others (scores above and below 0: put it after ``labels``).

    Args:
      decay: None for the mean over all completions so far; in [0, 1) the state is ``decay`` times
        itself and the rest the step's number, the first step's number at first.
    """

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        mean, count_before = state
        live, ratio = comparable(batch), start_log_ratio(batch)

        def average(kind: Array) -> tuple[Array, Array]:
            return live_mean(ratio, kind), kind.any().astype(jnp.float32)

        high, some_high = average(live & (scores > 0))
        low, some_low = average(live & ~(scores > 0))
        count = live.sum().astype(jnp.float32)
        now = (high + low) / jnp.maximum(some_high + some_low, 1)
        share = count / jnp.maximum(count_before + count, 1) if decay is None else 1 - decay
        updated = mean + jnp.where(count_before == 0, 1.0, share) * (now - mean)
        mean = jnp.where(count > 0, updated, mean)
        return scores, write(batch, "shift", mean), (mean, count_before + count)

    zero = jnp.zeros((), jnp.float32)
    return Transform(init=lambda: (zero, zero), apply=apply, needs=START)


@published
def bco(beta: Positive = 0.1, decay: Decay | None = None, threshold: Points = 0.5) -> Method:
    """A binary classifier of completions whose logit is the implicit reward less a running mean.

    "Binary Classifier Optimization for Large Language Model Alignment" (arXiv:2404.04656):

        delta = running mean of beta [mean of h over desirable + mean of h over undesirable] / 2
        loss = - mean over desirable y of log sigmoid(beta h(y) - delta)
               - mean over undesirable y of log sigmoid(delta - beta h(y))

    desirable is a reward above ``threshold`` points. delta is measured at the start of the step,
    the step included, and carries no gradient; it is the mean over all completions so far, as in
    TRL, which pools the two kinds and gives 0.01 as beta of the paper's paired runs. Departures:
    ``decay`` makes it a moving average. TRL takes one mean over all completions in the loss.
    Weights of undesirable completions by density ratio, p / (1 - p) within 0.5 and 10 in TRL, for
    data whose two kinds have different prompts, are not here.
    """
    signed = transforms.chain(labels(threshold, balanced=True), running_shift(decay))
    return Method(Objective(signed, labelled(beta, bounded=False), aggregates.sequence_sum))


# ---------------------------------------------------------------- corrected tokens


def common_tokens(a: Array, live_a: Array, b: Array, live_b: Array) -> tuple[Array, Array]:
    """Membership of each token of two sequences in their longest common subsequence.

    The sequences are [T] int32; tokens that are not live [T] match nothing.

    Returns:
      [T] bool of a and of b. Of several longest ones, the one that matches a's tokens earliest.

    >>> ones = jnp.ones(4, bool)
    >>> both = common_tokens(jnp.array([1, 2, 3, 4]), ones, jnp.array([1, 3, 9, 4]), ones)
    >>> [x.astype(int).tolist() for x in both]
    [[1, 0, 1, 1], [1, 1, 0, 1]]
    """
    chex.assert_equal_shape([a, b, live_a, live_b])
    size = a.shape[0]
    match = (a[:, None] == b[None, :]) & live_a[:, None] & live_b[None, :]

    def row(below: Array, matches: Array) -> tuple[Array, Array]:
        length_here = jnp.where(matches, below[1:] + 1, below[:-1])
        best = jnp.flip(jax.lax.cummax(jnp.flip(length_here)))
        best = jnp.concatenate([best, jnp.zeros(1, jnp.int32)])
        return best, best

    last = jnp.zeros(size + 1, jnp.int32)
    _, lengths = jax.lax.scan(row, last, match, reverse=True)
    lengths = jnp.concatenate([lengths, last[None]])  # [T + 1, T + 1], of what follows (i, j)

    def walk(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple]:
        i, j = at
        inside = (i < size) & (j < size)
        matched = inside & match[jnp.minimum(i, size - 1), jnp.minimum(j, size - 1)]
        down, right = lengths[jnp.minimum(i + 1, size), j], lengths[i, jnp.minimum(j + 1, size)]
        step_i = inside & (matched | (down >= right))
        step_j = inside & (matched | ~(down >= right))
        return (i + step_i, j + step_j), (i, j, matched)

    zero = jnp.zeros((), jnp.int32)
    _, (at_a, at_b, is_match) = jax.lax.scan(walk, (zero, zero), None, length=2 * size)
    drop = jnp.full_like(at_a, size)  # out of range, and dropped by the scatter
    none = jnp.zeros(size, bool)
    in_a = none.at[jnp.where(is_match, at_a, drop)].set(True, mode="drop")
    in_b = none.at[jnp.where(is_match, at_b, drop)].set(True, mode="drop")
    return in_a, in_b


def changed_token_weights(gamma: float) -> Transform:
    """Writes "token_weight": ``gamma`` at tokens that differ between best and worst, else 1.

    The tokens of both that are not in their longest common subsequence differ. Other members' are
    all 1.

    Args:
      gamma: above 0.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)
        live = trained(batch)

        def one(tokens: Array, live: Array, best: Array, worst: Array) -> Array:
            i, j = jnp.argmax(best), jnp.argmax(worst)
            in_i, in_j = common_tokens(tokens[i], live[i], tokens[j], live[j])
            same = jnp.where(best[:, None], in_i[None], jnp.where(worst[:, None], in_j[None], True))
            return jnp.where(same, 1.0, gamma)

        # One group at a time: the table of lengths is T by T.
        weights = jax.lax.map(lambda x: one(*x), (batch.tokens, live, best, worst))
        return scores, batch.with_stats(token_weight=weights)

    return stateless(apply)


@variant(dpo, beta=0.5)
def ddpo(
    base: Method,
    beta: Positive,
    loss: PairLossName,
    label_smoothing: Noise,
    gamma: AtLeastOne = 5.0,
) -> Method:
    """DPO in which the tokens that a human correction changed weigh more.

    DDPO (dense DPO) of "RLHF-V: Towards Trustworthy MLLMs via Behavior Alignment from Fine-grained
    Correctional Human Feedback" (arXiv:2312.00849): y_w is the corrected answer, y_l the original;

        log pi(y) = [ sum over unchanged log pi_t + gamma sum over changed log pi_t ] / N,
        N = |unchanged| + gamma |changed|

    for the policy and the reference, in DPO's loss, with the paper's beta and gamma (section 4.1).
    Departures: a token is unchanged when it belongs to the longest common subsequence of the two
    completions; the released code matches blocks of at least 3 tokens and leaves pure insertions
    and deletions at weight 1; the paper's pairs are about images, which are not read here.
    """

    def reward(group: Members) -> Array:
        weight = group.stats["token_weight"]
        ratio = weight * (group.stats["logprobs"] - group.stats["ref_logprobs"])
        total = jnp.where(group.mask, weight, 0).sum(axis=1)
        summed = jnp.where(group.mask, ratio, 0).sum(axis=1)
        return beta * summed / jnp.where(total > 0, total, 1)

    of_pair = every_pair(reward, reward_loss(loss, beta, label_smoothing))
    return base.after(changed_token_weights(gamma)).with_(
        surrogate=over_group(of_pair, ("ref_logprobs", "token_weight"))
    )


# ---------------------------------------------------------------- rankings


@published
def pro(sft_coef: NonNegative = 0.05, gap_temperature: Flag = True) -> Method:
    """Likelihood of a complete ranking under mean log-probabilities, plus imitation of its best.

    "Preference Ranking Optimization for Human Alignment" (arXiv:2306.17492), for y_1 > ... > y_n
    with p(y) = log pi(y) / |y| and rewards r:

        loss = - sum over k < n of log[ exp(p_k / T_kk) / sum over i >= k of exp(p_i / T_ki) ]
               - beta (n - 1)^2 log pi(y_1)
        T_ki = 1 / (r_k - r_i),  T_kk = min over i > k of T_ki

    beta (``sft_coef``), its factor and the sum over tokens in the last term are the released
    code's. ``gap_temperature=False`` sets every T to 1, for rankings without rewards. Departures: a
    completion of an equal reward is not ranked below; of several best ones the mean is imitated.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        means, ordered = group.mean("logprobs"), ordered_pairs(group)
        gaps = group.score[:, None] - group.score[None, :]
        ranked = list_nll(means, ordered, gaps if gap_temperature else None)
        imitated = sft_coef * jnp.square(jnp.maximum(group.live.sum() - 1, 0))
        value = ranked - imitated * mean_over_best(group.total("logprobs"), group)
        return spoilt(value, group), ranking_metrics(means, ordered)

    return list_method(loss)


@published
def rrhf(sft_coef: NonNegative = 1.0) -> Method:
    """Rank candidates by a hinge on mean log-probabilities and imitate the best one.

    RRHF (arXiv:2304.05302) as "Leveraging Reinforcement Learning and Large Language Models for Code
    Optimization" (arXiv:2312.05657) trains with it, p_i = log pi(y_i) / |y_i|:

        loss = sum over r_i < r_j of max(0, p_i - p_j)  -  log pi(y_best)

    with rewards from running the code (tests passed, speed): ``function = "code_speed"``.
    Departures: of several best candidates the mean is imitated; ``sft_coef`` weighs the second
    term, which RRHF's released code divides by the row's length and its paper does not. Of rewards
    the loss reads the order alone.
    """

    def loss(group: Members) -> tuple[Array, Stats]:
        means, ordered = group.mean("logprobs"), ordered_pairs(group)
        rank = jnp.where(ordered, jnp.maximum(0, means[None, :] - means[:, None]), 0).sum()
        value = rank - sft_coef * mean_over_best(group.total("logprobs"), group)
        return spoilt(value, group), ranking_metrics(means, ordered)

    return list_method(loss)


@variant(dpo, without=("min_gap",))
def tp_llama(base: Method, beta: Positive, loss: PairLossName, label_smoothing: Noise) -> Method:
    """DPO on steps: at a node of a search tree the step that led to success beats failed siblings.

    TP-LLaMA of "Advancing Tool-Augmented Large Language Models: Integrating Insights from Errors in
    Inference Trees" (arXiv:2406.07115). A group holds the children of one node of a successful
    path: the prompt is the history that they share, a completion is one step, its reward 1 on the
    path and 0 off it;

        loss = - mean over failed siblings l of log sigmoid( beta h(y_w) - beta h(y_l) )

    after supervised training on the successful paths. ``jrl eval RUN --search puct --out DIR`` of a
    run with tools makes such groups, each child worth its share of successes. Departures: the
    paper searches depth first, and stops at the first success; its data are a flat list of such
    pairs, each of which counts the same, and here a node's pairs are averaged first. Not known:
    beta; 0.1 is DPO's.
    """
    of_pairs = every_pair(
        lambda group: beta * group.log_ratio(), reward_loss(loss, beta, label_smoothing)
    )
    return base.with_(
        advantage=comparisons.with_gap(),
        surrogate=over_group(of_pairs, ("ref_logprobs",)),
    )


# ---------------------------------------------------------------- SteerLM 2.0


def attribute_posterior(group: Members) -> tuple[Array, Stats]:
    """``steerlm2``'s divergence over ONE group, [], and what the best-weighted answers have."""
    live, log_prior = group.live, group.total("ref_logprobs")

    def shares(logits: Array) -> tuple[Array, Array]:
        """The softmax over live members, and its logarithm."""
        log_share = jax.nn.log_softmax(jnp.where(live, logits, -1e30))
        return jnp.where(live, jnp.exp(log_share), 0), jnp.where(live, log_share, 0)

    target, log_target = shares(group.score - log_prior)
    share, log_share = shares(group.total("logprobs") - log_prior)
    loss = (target * (log_target - log_share)).sum()
    return spoilt(loss, group), {"target_overlap": jnp.minimum(target, share).sum()}


@published
def steerlm2() -> Method:
    """Moves an attribute-conditioned policy towards answers that have the attributes asked for.

    SteerLM 2.0 of the paper of ``helpsteer2_regression``: the best Q(y | a, x) is
    P(a | x, y) P(y | x), up to a factor. For answers y_i drawn from the policy as it begins, Q',

        w_i = softmax over i of [ log P(a | x, y_i) + log P(y_i | x) - log Q'(y_i | a, x) ]
        b_i = softmax over i of [ log Q(y_i | a, x) - log Q'(y_i | a, x) ]
        gradient = - sum_i (w_i - b_i) grad log Q(y_i | a, x)

    which is that of KL(w || b), the loss here. Rows of ``data.pairs`` are lists: the prompt names
    the attributes, the score of an answer is log P(a | x, y) + log P(y | x), nats, of an attribute
    model and of a model that knows no attributes. Q' is the reference. A further iteration draws
    anew and is a further run. Departures: the released code, whose b this is, divides a group's
    loss by its mean length. The attribute model is trained by ``helpsteer2_regression``.
    """
    loss = over_group(attribute_posterior, ("ref_logprobs",))
    return against_others(transforms.identity(), loss, aggregates.sequence_sum)


# ---------------------------------------------------------------- rationales


RATIONALE = 1
"""``ids["stratum"]`` of a member that explains the pair instead of answering the prompt."""


def with_rationale(base: Method, gamma: float, form: str) -> Method:
    """A method of pairs that also learns their rationales.

    A rationale is a member whose ``ids["stratum"]`` is ``RATIONALE``. A group whose answers are
    left out is left out whole. "pair_weight" becomes 1 on answers, 0 on rationales.
    """
    pair = base.objective.surrogate

    def choose_two(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        kinds = batch.ids.get("stratum", jnp.zeros(batch.members.shape, jnp.int32))
        rationale = kinds == RATIONALE
        answers = batch.replace(members=batch.members & ~rationale)
        _, answers, state = base.objective.advantage.apply(scores, answers, state)
        some = answers.members.any(axis=1, keepdims=True)
        batch = batch.replace(members=answers.members | (rationale & batch.members & some))
        return scores, write(batch, "pair_weight", (~rationale).astype(jnp.float32)), state

    def rationale_loss(group: Members) -> tuple[Array, Stats]:
        rationale = group.live & ~(group.first("pair_weight") > 0)
        logprob = group.total("logprobs")
        cost = softplus(-gamma * logprob) if form == "log_sigmoid" else -gamma * logprob
        return live_mean(cost, rationale), {"rationale": jnp.where(rationale, logprob, 0).sum()}

    rationales = over_group(rationale_loss, ("pair_weight",))

    def apply(stats: Stats, scores: Array, mask: Array) -> tuple[Array, Stats]:
        losses, metrics = pair.apply(stats, scores, mask & (stats["pair_weight"] > 0))
        more, also = rationales.apply(stats, scores, mask)
        return losses + more, {**metrics, **also}

    return base.with_(
        advantage=base.objective.advantage._replace(apply=choose_two),
        surrogate=pair._replace(apply=apply, needs=pair.needs | rationales.needs),
        needs=base.needs.reading("rationales"),
    )


@variant(dpo)
def rdpo(base: Method, gamma: NonNegative = 0.01, form: RationaleForm = "nll") -> Method:
    """DPO plus the likelihood of a rationale that says why one answer is better.

    RDPO of "Data-Centric Human Preference Optimization with Rationales" (arXiv:2407.14477):

        loss = -log sigmoid( beta h(y_w) - beta h(y_l) )  -  gamma log pi(rationale | x, y_w, y_l)

    Rows of ``data.pairs`` bring the rationale in a column of that name. It is a further member of
    the group with ``ids["stratum"]`` 1: its tokens are the two answers, not trained on, then the
    rationale, trained on. Departures: ``form="log_sigmoid"`` writes the second term as
    -log sigmoid(gamma log pi), as the released code does; how the paper words the request for a
    rationale is not known, so nothing stands between the answers.
    """
    return with_rationale(base, gamma, form)


@variant(orpo)
def rorpo(base: Method, gamma: NonNegative = 0.01, form: RationaleForm = "nll") -> Method:
    """ORPO plus the likelihood of a rationale that says why one answer is better.

    RORPO, of the paper of ``rdpo``: the loss of ``orpo`` and the rationale's term of ``rdpo``, with
    the same departures.
    """
    return with_rationale(base, gamma, form)


# ---------------------------------------------------------------- levels


def pair_share() -> Transform:
    """Writes "pair_share": the batch's groups over its pairs of unequal scores, 0 without a pair.

    Times it, the mean over groups of their sums over pairs is the mean over pairs.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = comparable(batch)
        wins = live[:, :, None] & live[:, None] & (scores[:, :, None] > scores[:, None])
        count = wins.sum()
        share = jnp.where(count > 0, live.any(axis=1).sum() / jnp.maximum(count, 1), 0)
        return scores, write(batch, "pair_share", share)

    return stateless(apply)


def trust_region(coef: float) -> Regularizer:
    """``coef`` times k3 of the policy and the sampler, the mean over all trained tokens.

        k3 = pi_old / pi - 1 - log(pi_old / pi)

    On the first update of a batch it has no gradient.
    """
    k3 = estimator("k3")

    def value(stats: Stats, mask: Array) -> Array:
        return k3(stats["logprobs"], stats["sampler_logprobs"])

    token_mean = aggregates.token_mean
    return term("trust_region", value, coef, "sampler_logprobs", aggregate=token_mean)


@published
def trpa(
    beta: Positive = 0.1,
    emphasis: AtLeastOne = 2.5,
    best: NonNegative = 1.0,
    anchor: Annotated[str, Choice(("sampler", "ref"))] = "ref",
    trust_coef: NonNegative = 0.001,
    epochs: Count = 1,
) -> Method:
    """All pairs of a group that are on different levels, each in its right order.

    TRPA of "Trust Region Preference Approximation: A simple and stable reinforcement learning
    algorithm for LLM reasoning" (arXiv:2504.04524). Rules put each completion on a level (right,
    wrong, incomplete, wrong format in the paper); here a level is a reward, and the best one starts
    at ``best`` points:

        d(y) = mean over tokens of log pi - log pi_ref
        h = c beta (d(y_w) - d(y_l)),  c = 2.5 where y_w is on the best level, else 1
        loss = -mean over pairs of log sigmoid(h) + c' mean over tokens of k3(pi, pi_old)

    and where the batch has no pair -mean log sigmoid(+-d), + for the best level, in place of the
    first term. beta, c and c' (``trust_coef``) are the released run's. Departures: that last mean
    is over prompts, then over the completions of each; pi_old is the sampler;
    ``anchor="sampler"`` puts it in the place of the reference. The paper's other form, after
    Kahneman and Tversky, is not here.
    """
    ref = f"{anchor}_logprobs"

    def loss(group: Members) -> tuple[Array, Stats]:
        gap, wins = group.mean("logprobs") - group.mean(ref), ordered_pairs(group)
        strength = beta * jnp.where(group.score >= best, emphasis, 1)
        margin = strength[:, None] * (gap[:, None] - gap[None, :])
        paired = jnp.where(wins, softplus(-margin), 0).sum()
        toward = jnp.where(group.score >= best, gap, -gap)
        alone = jnp.where(group.live, softplus(-toward), 0).sum()
        share = jnp.max(group.first("pair_share"))
        value = jnp.where(share > 0, share * paired, alone / jnp.maximum(group.live.sum(), 1))
        return spoilt(value, group), {
            "pair_accuracy": live_mean(margin > 0, wins),
            "pairs": wins.sum().astype(jnp.float32),
        }

    regularizers = () if is_zero(trust_coef) else (trust_region(trust_coef),)
    surrogate = over_group(loss, (ref, "pair_share"))
    return against_others(pair_share(), surrogate, aggregates.sequence_sum, regularizers, epochs)
