"""Papers that learn from preferences with a loss of their own or a way of their own to make pairs.

Conventions and notation as in ``preference``: pairs are groups of two with rewards 1 and 0, or the
best and the worst of a drawn group; h(y) = log pi(y) - log pi_ref(y).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import chex
import jax.numpy as jnp

from jrl.methods.base import Method, Schedule, published
from jrl.methods.domains import AtLeastOne, Choice, Flag, Fraction, NonNegative, Positive
from jrl.methods.preference import FAMILY, Steps, dpo_loss, implicit, orpo_loss, pair_method
from jrl.objectives import aggregates, comparisons, lists, pairs, preference_data, transforms
from jrl.objectives.members import GroupLoss, Members, over_group
from jrl.objectives.pairs import Side
from jrl.types import Array, Objective, Stats, Transform

RationaleForm = Annotated[str, Choice(("nll", "log_sigmoid"))]


def _list_method(
    before: Transform, loss: GroupLoss, needs: tuple[str, ...] = (), waits: str = ""
) -> Method:
    objective = Objective(before, over_group(loss, needs), aggregates.sequence_sum)
    return Method(objective, min_group=2, waits=waits)


@published(
    paper="CREAM: Consistency Regularized Self-Rewarding Language Models",
    arxiv="2410.12735",
    family=FAMILY,
    identities=("where both models rank alike it is DPO on the policy's own ranking",),
)
def cream(beta: Positive = 0.1, refresh_ref: Steps = 100) -> Method:
    """DPO on the policy's own ranking, trusted as far as the model before it ranks alike.

    "CREAM: Consistency Regularized Self-Rewarding Language Models" (arXiv:2410.12735): the group is
    ranked by the policy's own mean log-probability of a token, and by that of the iteration before
    (the reference, renewed every ``refresh_ref`` steps);

        C = mean over prompts of (Kendall's tau of the two rankings + 1) / 2
        loss = -C log sigmoid(a - b) - (1 - C) log sigmoid(b - a)

    with a = beta h(y_w), b = beta h(y_l) of the best and the worst by the policy's ranking. Rewards
    are not read. Departures: an iteration ranks before it trains; here each step ranks its own
    completions, before its update, and C is that of the step's batch. The ranking by DPO's implicit
    reward, which needs a third model, is not here; per-prompt C is a variant of the paper.
    """

    def loss(chosen: Side, rejected: Side) -> Array:
        a, b = beta * chosen.log_ratio, beta * rejected.log_ratio
        return pairs.logistic(a, b, 1 - chosen.weight)

    return pair_method(
        loss,
        implicit(beta),
        ("ref_logprobs", "pair_weight"),
        before=(preference_data.self_ranking(),),
        schedule=Schedule(refresh_ref=refresh_ref),
    )


@published(
    paper="RLHF-V: Towards Trustworthy MLLMs via Behavior Alignment from Fine-grained Correctional "
    "Human Feedback",
    arxiv="2312.00849",
    family=FAMILY,
    identities=("with gamma 1 it is DPO on mean log-ratios",),
)
def ddpo(beta: Positive = 0.1, gamma: AtLeastOne = 5.0) -> Method:
    """DPO in which the tokens that a human correction changed weigh more.

    DDPO (dense DPO) of "RLHF-V: Towards Trustworthy MLLMs via Behavior Alignment from Fine-grained
    Correctional Human Feedback" (arXiv:2312.00849): y_w is the corrected answer, y_l the original;

        log pi(y) = [ sum over unchanged log pi_t + gamma sum over changed log pi_t ] / N,
        N = |unchanged| + gamma |changed|

    for the policy and the reference, in DPO's loss. Departures: a token is unchanged when it
    belongs to the longest common subsequence of the two completions. beta is not stated beside the
    formula; the default is DPO's.
    """

    def reward(group: Members) -> Array:
        weight = group.stats["token_weight"]
        ratio = weight * (group.stats["logprobs"] - group.stats["ref_logprobs"])
        total = jnp.where(group.mask, weight, 0).sum(axis=1)
        summed = jnp.where(group.mask, ratio, 0).sum(axis=1)
        return beta * summed / jnp.where(total > 0, total, 1)

    before = transforms.chain(
        comparisons.best_and_worst(), preference_data.changed_token_weights(gamma)
    )
    return _list_method(
        before,
        lists.every_pair(reward, pairs.logistic),
        ("ref_logprobs", "token_weight"),
        waits="images",
    )


@published(
    paper="RLHF Workflow: From Reward Modeling to Online RLHF",
    arxiv="2405.07863",
    family=FAMILY,
    identities=("without a length penalty it is online DPO",),
)
def online_iterative_dpo(beta: Positive = 0.1, length_penalty: NonNegative = 0.0) -> Method:
    """DPO on the best and the worst of a group by a reward model, against a fixed reference.

    "RLHF Workflow: From Reward Modeling to Online RLHF" (arXiv:2405.07863): draw a group (8 in the
    paper), score it, pair the extremes, and minimise DPO's loss against the supervised model:

        score = r(y) - ``length_penalty`` * tokens(y)
        loss = -log sigmoid( beta h(y_w) - beta h(y_l) )

    Departures: an iteration is a training step, so every step's pairs are the current policy's. The
    paper's mix of draws for exploration (temperatures, older policies) and the number of iterations
    are not known. The reward model is trained by ``bradley_terry``.
    """
    return pair_method(
        dpo_loss("sigmoid", beta),
        implicit(beta),
        before=(preference_data.length_cost(length_penalty),),
    )


@published(
    paper="Preference Ranking Optimization for Human Alignment",
    arxiv="2306.17492",
    family=FAMILY,
    identities=("of two completions it is logistic in the difference of means times the gap",),
)
def pro(sft_coef: NonNegative = 0.05, gap_temperature: Flag = True) -> Method:
    """The likelihood of a whole ranking under mean log-probabilities, plus imitation of the best.

    "Preference Ranking Optimization for Human Alignment" (arXiv:2306.17492), for y_1 > ... > y_n
    with p(y) = log pi(y) / |y| and rewards r:

        loss = - sum over k < n of log[ exp(p_k / T_kk) / sum over i >= k of exp(p_i / T_ki) ]
               - beta p(y_1)
        T_ki = 1 / (r_k - r_i),  T_kk = min over i > k of T_ki

    ``gap_temperature=False`` sets every T to 1, for rankings without rewards. Departures: a
    completion of an equal reward is not ranked below; of several best ones the mean is imitated;
    whether the paper's supervised term is a sum or a mean over tokens is not known to us, here it
    is the mean. The default beta (``sft_coef``) is that of its code for lists of two.
    """
    return _list_method(comparisons.with_gap(), lists.ranking(sft_coef, gap_temperature))


@published(
    paper="Leveraging Reinforcement Learning and Large Language Models for Code Optimization",
    arxiv="2312.05657",
    family=FAMILY,
    identities=("of one gap it is the gap's hinge plus the likelihood of the best",),
)
def rrhf(sft_coef: NonNegative = 1.0) -> Method:
    """Rank candidates by a hinge on mean log-probabilities and imitate the best one.

    RRHF (arXiv:2304.05302) as "Leveraging Reinforcement Learning and Large Language Models for Code
    Optimization" (arXiv:2312.05657) trains with it, p_i = log pi(y_i) / |y_i|:

        loss = sum over r_i < r_j of max(0, p_i - p_j)  -  log pi(y_best)

    with rewards from running the code (tests passed, speed). Departures: of several best
    candidates the mean is imitated; ``sft_coef`` weighs the second term. The scale of the paper's
    reward is not known, and the loss reads its order alone.
    """
    return _list_method(
        comparisons.with_gap(), lists.hinge_ranking(sft_coef), waits="running code for its speed"
    )


def _with_rationale(pair: GroupLoss, needs: tuple[str, ...], gamma: float, form: str) -> Method:
    """A pair's loss plus the likelihood of the rationales that stand beside it."""

    def loss(group: Members) -> tuple[Array, Stats]:
        answer = group.first("pair_weight") > 0
        answers = group._replace(mask=group.mask & answer[:, None])
        value, metrics = pair(answers)
        told = group.live & ~answer
        logprob = group.total("logprobs")
        cost = pairs.softplus(-gamma * logprob) if form == "log_sigmoid" else -gamma * logprob
        mean = jnp.where(told, cost, 0).sum() / jnp.maximum(told.sum(), 1)
        return value + mean, {**metrics, "rationale": jnp.where(told, logprob, 0).sum()}

    return _list_method(
        preference_data.pair_and_rationale(),
        loss,
        (*needs, "pair_weight"),
        waits="pairs that come with a rationale",
    )


@published(
    paper="Data-Centric Human Preference Optimization with Rationales",
    arxiv="2407.14477",
    family=FAMILY,
    identities=("without a rationale it is DPO",),
)
def rdpo(beta: Positive = 0.1, gamma: NonNegative = 0.01, form: RationaleForm = "nll") -> Method:
    """DPO plus the likelihood of a rationale that says why one answer is better.

    RDPO of "Data-Centric Human Preference Optimization with Rationales" (arXiv:2407.14477):

        loss = -log sigmoid( beta h(y_w) - beta h(y_l) )  -  gamma log pi(rationale | x, y_w, y_l)

    The rationale is a further member of the group with ``ids["stratum"]`` 1: its tokens are the two
    answers, not trained on, then the rationale, trained on. Departures: ``form="log_sigmoid"``
    writes the second term as -log sigmoid(gamma log pi), as the released code does.
    """
    needs = ("ref_logprobs",)
    pair = pairs.pair_of_group(dpo_loss("sigmoid", beta), implicit(beta), needs)
    return _with_rationale(pair, needs, gamma, form)


@published(
    paper="Data-Centric Human Preference Optimization with Rationales",
    arxiv="2407.14477",
    family=FAMILY,
    identities=("without a rationale it is ORPO",),
)
def rorpo(
    lambda_: NonNegative = 0.1, gamma: NonNegative = 0.01, form: RationaleForm = "nll"
) -> Method:
    """ORPO plus the likelihood of a rationale that says why one answer is better.

    RORPO of "Data-Centric Human Preference Optimization with Rationales" (arXiv:2407.14477): the
    loss of ``orpo`` and the rationale's term of ``rdpo``, with the same departures.
    """
    pair = pairs.pair_of_group(orpo_loss(lambda_), lambda side: lambda_ * side.mean, ())
    return _with_rationale(pair, (), gamma, form)


@published(
    paper="RLAIF-V: Aligning MLLMs through Open-Source AI Feedback for Super GPT-4V "
    "Trustworthiness",
    arxiv="2405.17220",
    family=FAMILY,
    identities=("its self-feedback is the implicit reward over length",),
)
def rlaif_v(beta: Positive = 0.1, min_gap: NonNegative = 0.0, refresh_ref: Steps = 100) -> Method:
    """Iterated DPO on pairs that differ in how many of their claims an open judge rejects.

    "RLAIF-V: Aligning MLLMs through Open-Source AI Feedback for Super GPT-4V Trustworthiness"
    (arXiv:2405.17220): the group is drawn under one decoding law; a judge splits each answer into
    claims and answers a yes/no question for each;

        score(y) = -(number of rejected claims)
        loss = -log sigmoid( beta h(y_w) - beta h(y_l) )  where score(y_w) - score(y_l) > min_gap

    and the reference is renewed every ``refresh_ref`` steps. At inference the policy picks by its
    own reward, ``self_feedback``. Departures: the paper draws several pairs a prompt by a rule that
    is not known to us; here the extremes are the pair.
    """
    return pair_method(
        dpo_loss("sigmoid", beta),
        implicit(beta),
        min_gap=min_gap,
        schedule=Schedule(refresh_ref=refresh_ref),
        waits="a judge of single claims, and images",
    )


def self_feedback(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """The reward by which RLAIF-V picks the best of several answers: the mean log-ratio of a token.

    Args:
      logprobs: [T] float, nats, under the trained policy.
      ref_logprobs: [T] float, nats, under its reference.
      mask: [T] bool, True where live.

    Returns:
      [] float32, nats. 0 where nothing is live.

    >>> ones = jnp.ones(2, bool)
    >>> float(self_feedback(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0]), ones))
    0.5
    """
    chex.assert_equal_shape([logprobs, ref_logprobs, mask])
    ratio = jnp.where(mask, logprobs - ref_logprobs, 0)
    return ratio.sum() / jnp.maximum(mask.sum(), 1)


@published(
    paper="Reward-Augmented Data Enhances Direct Preference Alignment of LLMs",
    arxiv="2410.08067",
    family=FAMILY,
    identities=("the goal of the lower score reverses the pair",),
)
def reward_augmented_dpo(beta: Positive = 0.1) -> Method:
    """DPO on pairs whose prompt names the score to reach, so that the lower one can win.

    "Reward-Augmented Data Enhances Direct Preference Alignment of LLMs" (arXiv:2410.08067): of each
    pair with scores r_w > r_l, two prompts are made, one for each score as the goal g, and the
    answer nearest to the goal is preferred, R(x, g, y) = -(g - r(y))^2:

        loss = -log sigmoid( beta h(y_w) - beta h(y_l) ),   y_w, y_l in order of R

    ``goal_conditioned`` doubles the data; alternatively the environment records ``ids["goal"]`` [N]
    and the scores are turned into R here. Departures: the wording of the prompt is not known; at
    inference the prompt names the greatest score.
    """
    return pair_method(
        dpo_loss("sigmoid", beta), implicit(beta), before=(preference_data.nearest_to_goal(),)
    )


def goal_conditioned(
    pair: Mapping[str, Any], template: str = "{prompt}\n\nAnswer at the level of score {score}."
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two pairs from one with scores: one that aims at each score.

    Args:
      pair: with "prompt", "chosen", "rejected", "chosen_score" and "rejected_score".
      template: how a prompt names the score to reach.

    >>> given = {"prompt": "p", "chosen": "a", "rejected": "b"}
    >>> scored = {**given, "chosen_score": 9, "rejected_score": 4}
    >>> two = goal_conditioned(scored, "{prompt} {score}")
    >>> [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in two]
    [('p 9', 'a', 'b'), ('p 4', 'b', 'a')]
    """

    def aiming(score: Any, chosen: str, rejected: str) -> dict[str, Any]:
        prompt = template.format(prompt=pair["prompt"], score=score)
        return {"prompt": prompt, "chosen": pair[chosen], "rejected": pair[rejected]}

    return (
        aiming(pair["chosen_score"], "chosen", "rejected"),
        aiming(pair["rejected_score"], "rejected", "chosen"),
    )


@published(
    paper="Advancing Tool-Augmented Large Language Models: Integrating Insights from Errors in "
    "Inference Trees",
    arxiv="2406.07115",
    family=FAMILY,
    identities=("with one failed sibling it is DPO",),
)
def tp_llama(beta: Positive = 0.1) -> Method:
    """DPO on steps: at a node of a search tree the step that led to success beats failed siblings.

    TP-LLaMA of "Advancing Tool-Augmented Large Language Models: Integrating Insights from Errors in
    Inference Trees" (arXiv:2406.07115). A group holds the children of one node of a successful
    path: the prompt is the history that they share, a completion is one step, its reward 1 on the
    path and 0 off it;

        loss = - mean over failed siblings l of log sigmoid( beta h(y_w) - beta h(y_l) )

    after supervised training on the successful paths. Departures: the mean is over a node's pairs
    first; the paper's weighing of nodes with several failed children is not known.
    """
    return _list_method(
        comparisons.with_gap(),
        lists.every_pair(lambda group: beta * group.log_ratio(), pairs.logistic),
        ("ref_logprobs",),
        waits="a tree search over tool calls",
    )


@published(
    paper="Self-Evolutionary Large Language Models through Uncertainty-Enhanced Preference "
    "Optimization",
    arxiv="2409.11212",
    family=FAMILY,
    identities=("with one pass of the estimator it is DPO",),
)
def upo(beta: Positive = 0.1, min_certainty: Fraction = 0.0, refresh_ref: Steps = 100) -> Method:
    """Iterated DPO in which a pair counts as far as an estimator's stochastic passes agree on it.

    "Self-Evolutionary Large Language Models through Uncertainty-Enhanced Preference Optimization"
    (arXiv:2409.11212): pairs drawn from the policy and ranked by a reward model are judged again by
    an estimator with Monte Carlo dropout. Each reward part is one of its passes; with p_t the
    probability that part t gives to y_w over y_l:

        certainty = 1 - [H(mean of p_t) - mean of H(p_t)] / log 2
        loss = -certainty log sigmoid( beta h(y_w) - beta h(y_l) )

    Departures: the paper samples reliable pairs and lets the certainty enter DPO's loss; how, and
    which score of uncertainty, could not be found. Mutual information and a weight are the plainest
    reading; pairs below ``min_certainty`` are left out, in place of sampling.
    """
    prefer = dpo_loss("sigmoid", beta)
    return pair_method(
        lambda chosen, rejected: chosen.weight * prefer(chosen, rejected),
        implicit(beta),
        ("ref_logprobs", "pair_weight"),
        after=(preference_data.certainty(min_certainty),),
        schedule=Schedule(refresh_ref=refresh_ref),
        waits="an estimator with dropout at inference; several reward functions stand for its "
        "passes",
    )
