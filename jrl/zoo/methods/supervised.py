"""Likelihood of the best that the policy drew, and of right and wrong answers.

In formulas with y it is 1 for a right answer, a score above ``above``, and 0 for a wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.methods.base import Method, Needs, Schedule, against_others
from jrl.methods.curriculum import unchanged
from jrl.methods.definition import published, variant
from jrl.methods.domains import (
    Choice,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Whole,
    check_band,
    is_zero,
)
from jrl.methods.edit import Edit, refill
from jrl.methods.plan import DrawingPolicy, Plan, StepView, stored_apart
from jrl.methods.replays import replay_share
from jrl.methods.schedule import copies, every, restart
from jrl.methods.supervised import sft
from jrl.objectives import aggregates, distill, ratios, segments, transforms
from jrl.objectives.branches import by_branch, of_members
from jrl.objectives.kl import bounded_exp
from jrl.objectives.members import Members, over_group
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import correct, pass_rate, per_token, stateless
from jrl.types import Array, Batch, Regularizer, Search, Statistic, Stats, Surrogate, Transform
from jrl.types.asks import Asks

BelowOne = Annotated[float, Range(-10.0, 0.999)]


@variant(sft)
def sequence_kd(base: Method) -> Method:
    """Maximum likelihood of completions that the teacher wrote.

    "Sequence-Level Knowledge Distillation" (arXiv:1606.07947), the Seq-KD loss, with the teacher's
    distribution replaced by its own completions:

        loss = -log pi(y),    y the teacher's completion of x

    The data's solutions are the teacher's completions; the loss is that of ``sft``. Departures: the
    paper takes the teacher's beam-search mode, here it is what the data gives; its mixture with the
    word-level loss is ``gkd`` on demonstrations.
    """
    return base


def one_token_rollout(wrong: float, temperature: float) -> Statistic:
    """The policy-gradient loss of drawing one token in place of the given one, in expectation.

    Args:
      wrong: points, the reward of any token but the given one, whose reward is 1.
      temperature: of the distribution that the token is drawn from, over the policy's own logits.

    Returns:
      A statistic "one_token_rollout": -sum_a sg(q(a) R(a)) log pi(a), nats times points. A token
      that a truncation removed is never drawn.
    """

    def apply(distributions: dict[str, Array], token: Array) -> Array:
        policy = distributions["policy"]
        dead = jnp.exp(policy) == 0
        # log pi over tau is the logits over tau up to a constant, and knows the truncation.
        q = jax.nn.softmax(jnp.where(dead, -jnp.inf, policy) / temperature)
        reward = jnp.where(jnp.arange(policy.shape[0]) == token, 1.0, wrong)
        weight = jax.lax.stop_gradient(q * reward)
        return -jnp.where(dead, 0, weight * jnp.where(dead, 0, policy)).sum()

    return Statistic(f"one_token_rollout_{wrong}_{temperature}", apply)


@variant(sft, weigh="sequences")
def otr(base: Method, beta: BelowOne = -0.1, temperature: Positive = 1.3) -> Method:
    """Policy gradient, at every data token, on one token sampled in its place.

    "One-Token Rollout: Guiding Supervised Fine-Tuning of LLMs with Policy Gradient"
    (arXiv:2509.26313). With the given prefix, a token a drawn from the policy's distribution q at a
    raised temperature is rewarded with R(a) = 1 where it is the given token x_t and ``beta``
    elsewhere:

        loss = -mean over tokens of sum_a sg(q(a) R(a)) log pi(a)

    Departures: the expectation over a, of which the paper's K = 256 draws a token are an estimate;
    nothing is drawn. Not known (we found no code): ``beta`` and ``temperature``; the paper asks for
    a slightly negative reward and a temperature above 1.
    """
    rollout = one_token_rollout(beta, temperature)
    return base.with_(surrogate=distill.minimise(rollout, "one_token_loss"))


# ---------------------------------------------------------------- the policy's own best


def _imitated(scores: Array) -> Array:
    """1 for members that are imitated: ``ratios.reinforce`` is then their likelihood. NaN shows."""
    return jnp.where(jnp.isnan(scores), scores, 1)


def best_of_batch(keep: float) -> Transform:
    """Trains on the members whose score is in the top ``keep`` of the batch alone; ties pass."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        seg = segments.segments(batch.members)
        high = ~(scores < segments.quantile(scores, seg, 1 - keep))
        return _imitated(scores), batch.replace(mask=batch.mask & of_members(high, batch))

    return transforms.stateless(apply)


def middle_steps(low: float, high: float, success: float) -> Transform:
    """Trains on steps of successful members whose perplexity is between two of its quantiles."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        won = batch.mask & of_members(~(scores < success), batch)
        batch = batch.replace(mask=won)
        live = transforms.trained(batch)
        doubt = -segments.mean(batch.stats["sampler_logprobs"], segments.steps(batch))
        starts = jax.vmap(jax.vmap(segments.step_starts))(segments.step_ids(batch), live)
        each = segments.segments(starts)  # a step counts once, however long it is
        bounds = [jnp.max(segments.quantile(doubt, each, q)) for q in (low, high)]
        inside = (doubt >= bounds[0]) & (doubt <= bounds[1])
        inside = inside | jnp.expand_dims(jnp.isnan(scores), 2)
        return _imitated(scores), batch.replace(mask=won & inside)

    return transforms.stateless(apply, frozenset({"sampler_logprobs"}))


def frozen_copy(name: str, every: int) -> DrawingPolicy:
    """The copy of the policy that a run freezes every so many steps under this name."""
    return DrawingPolicy(name, lambda state: state.frozen[name], lambda step: step - step % every)


@dataclasses.dataclass(frozen=True)
class by_policy:
    """A ``Plan.first`` whose members are sampled by another policy.

    Attributes:
      name: of ``Plan.policies``.
      first: what the asks are; as a plan has it.
    """

    name: str
    first: Callable[[Asks, StepView], Asks] = unchanged

    def __call__(self, asks: Asks, view: StepView) -> Asks:
        """The asks of ``first``, by this policy."""
        return tuple(ask.replace(policy=self.name) for ask in self.first(asks, view))


@variant(sft)
def bfs_prover(
    base: Method,
    low: Fraction = 0.1,
    high: Fraction = 0.9,
    success: Positive = 1.0,
    round_steps: Whole = 0,
    restart_rounds: Whole = 0,
    replayed: Fraction = 0.0,
    each: Count = 1,
    kept_prompts: Count = 65536,
) -> Method:
    """Expert iteration on the steps of successful episodes that are neither easy nor noise.

    The training of "Scaling up Multi-Turn Off-Policy RL and Multi-Agent Tree Search for LLM
    Step-Provers" (arXiv:2509.06493), BFS-Prover-V2:

        loss = -mean over tokens of log pi_t, of steps in episodes of ``success`` points or more
               whose perplexity is between two quantiles of the batch's steps

    Steps are ``ids["step"]``, in episodes the turns, perplexities those of the policy that drew
    them. A group is the leaves of a best-first search (``episodes.tree.best_first``), 4 steps wide
    unless ``tree.width`` says otherwise. ``zoo.envs.prover`` has theorems to prove, each step
    a tactic.

    With ``round_steps`` above 0 training goes in rounds of that length, whose proofs are found by
    the policy as the round began, the expert; every ``restart_rounds`` rounds, where that is above
    0, the policy begins anew from its first weights and learns what the expert finds. With
    ``replayed`` above 0 (problems must come again) that share of a group's members are the newest
    ``each`` proofs of its problem, as far as any are kept.

    Departures: the paper starts anew where progress has stopped, and filters harder then. Not
    known: the band, a tenth at either end being a guess, and how many steps and rounds.
    """
    check_band(low=low, high=high)
    edits: tuple[Edit, ...] = ()
    if not is_zero(replayed):
        below = float(np.nextafter(np.float32(success), np.float32(0)))  # points are float32
        edits = (replay_share(below, replayed, each, kept_prompts),)
    if restart_rounds and not round_steps:
        raise UserError(
            f"objective.restart_rounds = {restart_rounds}: rounds have no steps; set"
            " objective.round_steps above 0"
        )
    after = (copies("expert", every(round_steps)),) if round_steps else ()
    if restart_rounds:
        after = (restart("first", every(round_steps * restart_rounds)), *after)
    first: Any = stored_apart if edits else unchanged
    experts = (frozen_copy("expert", round_steps),) if round_steps else ()
    return base.with_(
        plan=Plan(
            by_policy("expert", first) if experts else first,
            policies=experts,
            tree=Search("best_first"),
        ),
        needs=Needs().reading("lines"),
        advantage=middle_steps(low, high, success),
        surrogate=ratios.reinforce(),
        schedule=Schedule(after=after),
        edits=edits,
    )


def tree_targets(correct: float) -> Transform:
    """1 for members that are right and 0 for others; writes the values' targets, "returns"."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        right = scores >= correct
        outcome = jnp.where(right, 1.0, -1.0)
        below = by_branch(outcome, batch) if "node" in batch.ids else outcome
        returns = transforms.per_token(below, batch)
        if "node_value" in batch.stats:  # of rewards of 0 and 1: how many of a node's leaves win
            returns = 2 * batch.stats["node_value"] - 1
        if "step_labels" in batch.stats:  # of the rows of a search: the chance of a right answer
            returns = 2 * batch.stats["step_labels"] - 1
        batch = batch.with_stats(returns=returns)
        return jnp.where(jnp.isnan(scores), scores, right), batch

    return transforms.stateless(apply)


def bounded_value_loss(coef: float) -> Regularizer:
    """``coef`` times the squared error of tanh of the value network's number."""

    def value(stats: Stats, mask: Array) -> Array:
        return jnp.square(jnp.tanh(stats["values"]) - stats["returns"])

    return term("value_loss", value, coef, "values", "returns")


@variant(sft)
def alphamath(base: Method, beta: Positive = 0.01, correct: Positive = 0.5) -> Method:
    """Right paths of a search tree are imitated, and values fitted to the tree's on all paths.

    "AlphaMath Almost Zero: process Supervision without process" (arXiv:2405.03553), V being tanh of
    the value head and Q the mean outcome, 1 or -1, below a node:

        loss = -mean over tokens of 1[right] log pi_t + beta mean over tokens of (V_t - Q_t)^2

    Q is 2 z - 1 of the steps' labels z in ``data.pairs``, which ``jrl eval --search puct --out``
    writes; or of the statistic "node_value", the mean reward, 0 or 1, of a node's leaves, which a
    search in the run records (``tree.by``); without either the mean outcome of the
    members that go through a token, where these branch off one another (``[tree]``), else
    the path's own outcome. The paper's search selects by ``episodes.tree.puct``, and at inference
    takes the best of a step-level beam. beta is the paper's (0.0005 for Llama 3). Departures: every
    token of a step is fitted, where the paper fits its end. A search in the run backs up V, as (1 +
    V) / 2, for steps with which no path ends, and the reward for others.
    """
    return base.with_(
        plan=Plan(estimate=lambda number: (1 + jnp.tanh(number)) / 2),
        advantage=tree_targets(correct),
        surrogate=ratios.reinforce(),
        regularizers=(bounded_value_loss(beta),),
    )


# ---------------------------------------------------------------- NFT

PROMPT_WEIGHTS = ("none", "failure_rate", "odds_root")
"""Weights of a prompt with pass rate p: 1, 1 - p, or the root of (1 - p) / p."""

RATE_MARGIN = 0.02
"""Pass rates are held this far from 0 and 1, as in the released code of NFT."""


def nft_labels(prompt_weight: str, negative_weight: float, above: float) -> Transform:
    """Signed weights of right (+) and wrong (-) answers; mixed groups alone are kept.

    It writes the statistic "pass_rate" for ``nft_loss``.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = correct(values, above)
        rate = pass_rate(labels, batch.members)
        uniform = (rate == 0) | (rate == 1)  # a NaN rate is neither, and stays
        rate = jnp.clip(rate, RATE_MARGIN, 1 - RATE_MARGIN)
        weights = {"none": jnp.ones_like(rate), "failure_rate": 1 - rate}
        weights["odds_root"] = jnp.sqrt((1 - rate) / rate)
        weight = weights[prompt_weight] * jnp.where(labels == 0, -negative_weight, 1)
        rates = per_token(jnp.broadcast_to(rate, values.shape), batch)
        batch = batch.replace(
            members=batch.members & ~uniform, stats={**batch.stats, "pass_rate": rates}
        )
        # NaN compares as not 0: the label itself has to carry it.
        return jnp.where(jnp.isnan(labels), labels, weight), batch

    return stateless(apply)


def nft_loss(level: str, floor: float) -> Surrogate:
    """``nft``'s loss, the sign of the advantage being the label and its size the weight.

    At level "sequence" the one loss stands at every token: aggregate by a mean.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        log_ratio = stats["logprobs"] - stats["sampler_logprobs"]
        if level == "sequence":
            log_ratio = jnp.broadcast_to(jnp.where(mask, log_ratio, 0).sum(), mask.shape)
        ratio = bounded_exp(log_ratio)
        rate = stats["pass_rate"]
        rest = (1 - rate * ratio) / (1 - rate)
        bounded = jax.lax.stop_gradient(jnp.maximum(rest, floor))
        # The value of log(held) with the gradient of rest / held: exact, where adding and taking
        # away a large number again would round.
        negative = -(jnp.log(bounded) + (rest - jax.lax.stop_gradient(rest)) / bounded)
        losses = jnp.where(advantages < 0, -advantages * negative, -advantages * log_ratio)
        return losses, {"ratio": ratio, "negative_floor": (rest < floor).astype(jnp.float32)}

    return Surrogate(apply, frozenset({"sampler_logprobs", "pass_rate"}))


@published
def nft(
    level: Annotated[str, Choice(("token", "sequence"))] = "token",
    prompt_weight: Annotated[str, Choice(PROMPT_WEIGHTS)] = "failure_rate",
    negative_weight: NonNegative = 1.0,
    floor: Positive = 1.0,
    above: NonNegative = 0.5,
    max_tokens: Count = 1000,
    epochs: Count = 1,
) -> Method:
    """Maximum likelihood of right answers, and of wrong ones under an implied negative policy.

    Negative-aware fine-tuning of "Bridging Supervised Learning and Reinforcement Learning in Math
    Reasoning" (arXiv:2505.18116), with p the fraction of the group's answers that are right:

        right:  -w log rho_t
        wrong:  -w log max_v((1 - p rho_t) / (1 - p), floor)
        loss = 1/G sum_i sum_t (that) / max_tokens

    max_v takes the larger value and keeps the first one's gradient. w is ``prompt_weight``: 1
    ("none"), 1 - p ("failure_rate", on-policy Dr. GRPO's gradient) or sqrt((1 - p) / p)
    ("odds_root", GRPO's); wrong answers' losses are also multiplied by ``negative_weight``. p is
    held within 0.02 of 0 and 1. Groups that are all right or all wrong are replaced, as in DAPO.
    ``level="sequence"`` takes the ratio of the whole completion, and the mean over completions. All
    numbers are those of the released runs, where 0.5 is suggested as the weight of wrong answers
    for 32B. Departures: the code's sum over completions is a mean here.
    """
    mean = aggregates.constant_norm(max_tokens) if level == "token" else aggregates.sequence_mean
    labels = nft_labels(prompt_weight, negative_weight, above)
    return against_others(labels, nft_loss(level, floor), mean, epochs=epochs).with_(**refill())


# ---------------------------------------------------------------- PACS


def outcome_cross_entropy(
    beta: float, against: str, *, leave_one_out: bool, balanced: bool
) -> Surrogate:
    """``pacs``' loss over groups whose scores are labels in [0, 1]; use it with ``sequence_sum``.

    The gradient passes through all members of the group.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        live, label = group.live, group.score
        count = live.sum()
        psi = score = beta * (group.total("logprobs") - group.total(against))
        if leave_one_out:
            psi = score - (score.sum() - score) / jnp.maximum(count - 1, 1)
        loss = label * jax.nn.softplus(-psi) + (1 - label) * jax.nn.softplus(psi)
        if balanced:
            right = label.sum()
            same_label = jnp.where(label > 0.5, right, count - right)
            mixed = (right > 0) & (right < count)
            loss = loss * jnp.where(mixed, count / jnp.maximum(2 * same_label, 1), 1)
        # Times 0 rather than replaced by it, so that a NaN is kept.
        total = jnp.where(live, loss, 0).sum() * (count > 1) / jnp.maximum(count, 1)
        return total, {"predicted_outcome": jax.nn.sigmoid(psi)}

    return over_group(of_group, {against})


@published
def pacs(
    beta: Positive = 1.0,
    against: Annotated[str, Choice(("sampler", "proximal", "ref"))] = "sampler",
    estimator: Annotated[str, Choice(("rloo", "naive"))] = "rloo",
    class_weight: Annotated[str, Choice(("none", "balanced"))] = "balanced",
    above: NonNegative = 0.5,
    epochs: Count = 1,
) -> Method:
    """The outcome is predicted from a group-relative log-ratio, and cross-entropy trains it.

    "Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR"
    (arXiv:2509.02522):

        s_i = beta sum_t log rho_t,   psi_i = s_i - mean of s_j over j != i
        loss = -mean_i [y_i log sigmoid(psi_i) + (1 - y_i) log(1 - sigmoid(psi_i))]

    The ratio is to the policy that drew the completion, as in the released code
    (``against="ref"``: to the reference). ``estimator="naive"`` takes psi = s. ``class_weight=
    "balanced"`` gives right and wrong answers of a mixed group half of its weight each, as the
    released runs do, with beta 1 and 2. Departures: the mean is over groups of the mean over
    members, which differ when groups do in size; a group of one has loss 0. The code's third
    estimator, psi over the deviation of the group, is left out: its gradient does not exist at
    rho = 1.
    """
    surrogate = outcome_cross_entropy(
        beta,
        f"{against}_logprobs",
        leave_one_out=estimator == "rloo",
        balanced=class_weight == "balanced",
    )
    labels = stateless(lambda values, batch: (correct(values, above), batch))
    return against_others(labels, surrogate, aggregates.sequence_sum, epochs=epochs)
