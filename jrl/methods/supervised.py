"""Maximum likelihood: of given completions, or of the best that the policy drew itself."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import Draw, Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Fraction, Positive, Range
from jrl.objectives import aggregates, distill, ratios, segments, transforms
from jrl.objectives.branches import by_branch
from jrl.types import Array, Batch, Objective, Regularizer, Statistic, Stats, Surrogate, Transform

Weigh = Annotated[str, Choice(("tokens", "sequences"))]
BelowOne = Annotated[float, Range(-10.0, 0.999)]


@published
def sft(weigh: Weigh = "tokens") -> Method:
    """Maximum likelihood of the given completions, one to a group.

    The supervised stage of "Training language models to follow instructions with human feedback"
    (arXiv:2203.02155):

        loss = -mean over completion tokens of log pi_t

    Rewards are not read. ``weigh="sequences"`` takes the mean over completions of their token
    means instead; the paper does not say which it uses.
    """
    mean = aggregates.token_mean if weigh == "tokens" else aggregates.sequence_mean
    given = Draw(demonstrations=1, own=False)
    return Method(Objective(transforms.identity(), ratios.nll(), mean), draw=given)


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


def rectified_nll() -> Surrogate:
    """``-sg(pi_t) log pi_t``: the negative log-likelihood weighted by the probability itself."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        logprobs = stats["logprobs"]
        weight = jnp.exp(jax.lax.stop_gradient(jnp.minimum(logprobs, 0)))
        return -weight * logprobs, {"token_probability": weight}

    return Surrogate(apply, frozenset())


@variant(sft)
def dft(base: Method) -> Method:
    """SFT with every token's loss multiplied by the token's own probability, as a constant.

    "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification"
    (arXiv:2508.05629), Dynamic Fine-Tuning:

        loss = -mean over completion tokens of sg(pi_t) log pi_t

    so that an unlikely token no longer has a gradient inversely proportional to its probability.
    The paper writes a sum over tokens; the mean over the batch's tokens is its released code's.
    """
    return base.with_(surrogate=rectified_nll())


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
    """At every given token: policy gradient on one token drawn in its place, right or wrong.

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


def _kept(scores: Array) -> Array:
    """1 for members that are imitated: ``ratios.reinforce`` is then their likelihood. NaN shows."""
    return jnp.where(jnp.isnan(scores), scores, 1)


def best_of_batch(keep: float) -> Transform:
    """Trains on the members whose score is in the top ``keep`` of the batch alone; ties pass."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        seg = segments.segments(batch.members)
        high = ~(scores < segments.quantile(scores, seg, 1 - keep))
        return _kept(scores), batch.replace(mask=batch.mask & jnp.expand_dims(high, 2))

    return transforms.stateless(apply)


@variant(sft)
def filtered_bc(base: Method, keep: Fraction = 0.1) -> Method:
    """Maximum likelihood of the episodes whose returns are the batch's best.

    The filtered behaviour cloning of "LMRL Gym: Benchmarks for Multi-Turn Reinforcement Learning
    with Language Models" (arXiv:2311.18232):

        loss = -mean over the drawn tokens of the kept episodes of log pi_t

    ``keep`` is the released code's of ``digirl``, which has it as a baseline too. Departures: the
    episodes are the policy's own of this step, where the paper clones a data set.
    """
    return base.with_(draw=Draw(), advantage=best_of_batch(keep), surrogate=ratios.reinforce())


def middle_steps(low: float, high: float, success: float) -> Transform:
    """Trains on steps of successful members whose perplexity is between two of its quantiles."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        won = batch.mask & jnp.expand_dims(~(scores < success), 2)
        batch = batch.replace(mask=won)
        live = transforms.trained(batch)
        doubt = -segments.mean(batch.stats["sampler_logprobs"], segments.steps(batch))
        starts = jax.vmap(jax.vmap(segments.step_starts))(segments.step_ids(batch), live)
        each = segments.segments(starts)  # a step counts once, however long it is
        bounds = [jnp.max(segments.quantile(doubt, each, q)) for q in (low, high)]
        inside = (doubt >= bounds[0]) & (doubt <= bounds[1])
        inside = inside | jnp.expand_dims(jnp.isnan(scores), 2)
        return _kept(scores), batch.replace(mask=won & inside)

    return transforms.stateless(apply, frozenset({"sampler_logprobs"}))


@variant(sft)
def bfs_prover(
    base: Method, low: Fraction = 0.1, high: Fraction = 0.9, success: Positive = 1.0
) -> Method:
    """Expert iteration on the steps of successful episodes that are neither easy nor noise.

    The training of "Scaling up Multi-Turn Off-Policy RL and Multi-Agent Tree Search for LLM
    Step-Provers" (arXiv:2509.06493), BFS-Prover-V2:

        loss = -mean over tokens of log pi_t, of steps in episodes of ``success`` points or more
        whose perplexity is between two quantiles of the batch's steps

    Steps are ``ids["step"]``, perplexities those of the policy that drew them. Best-first search is
    ``envs.tree.best_first``. Departures: the paper iterates over all proofs found so far, and
    from time to time starts anew from the first weights on those that the current expert finds
    again. Not known: the band; a tenth at either end is a guess.
    """
    return base.with_(
        draw=Draw(),
        advantage=middle_steps(low, high, success),
        surrogate=ratios.reinforce(),
        unsupported="groups drawn by a search, a prover, and starting anew",
    )


def tree_targets(correct: float) -> Transform:
    """1 for members that are right and 0 for others; writes the values' targets, "returns"."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        right = scores >= correct
        outcome = jnp.where(right, 1.0, -1.0)
        below = by_branch(outcome, batch) if "node" in batch.ids else outcome
        returns = batch.stats.get("node_value", transforms.per_token(below, batch))
        if "step_labels" in batch.stats:  # of the rows of a search: the chance of a right answer
            returns = 2 * batch.stats["step_labels"] - 1
        batch = batch.replace(stats={**batch.stats, "returns": returns})
        return jnp.where(jnp.isnan(scores), scores, right), batch

    return transforms.stateless(apply)


def bounded_value_loss(coef: float) -> Regularizer:
    """``coef`` times the squared error of tanh of the value network's number."""

    def value(stats: Stats, mask: Array) -> Array:
        return jnp.square(jnp.tanh(stats["values"]) - stats["returns"])

    needs = frozenset({"values", "returns"})
    return Regularizer("value_loss", value, lambda state: coef, needs=needs)


@variant(sft)
def alphamath(base: Method, beta: Positive = 0.01, correct: Positive = 0.5) -> Method:
    """Right paths of a search tree are imitated, and values fitted to the tree's on all paths.

    "AlphaMath Almost Zero: process Supervision without process" (arXiv:2405.03553), V being tanh of
    the value head and Q the mean outcome, 1 or -1, below a node:

        loss = -mean over tokens of 1[right] log pi_t + beta mean over tokens of (V_t - Q_t)^2

    Q is 2 z - 1 of the steps' labels z in ``data.pairs``, which ``jrl eval --search mcts --out``
    writes; or the statistic "node_value" (``envs.tree.backed_up``); without either the mean outcome
    of the members that go through a token, where these branch off one another (``objective.tree``),
    else the path's own outcome. The search selects by ``envs.tree.puct``, and at inference takes
    the best of a step-level beam. beta is the paper's (0.0005 for Llama 3). Departures: every token
    of a step is fitted, where the paper fits its end.
    """
    return base.with_(
        draw=Draw(),
        advantage=tree_targets(correct),
        surrogate=ratios.reinforce(),
        regularizers=(bounded_value_loss(beta),),
        unsupported="a search guided by the value head: that of jrl eval goes by likelihood",
    )
