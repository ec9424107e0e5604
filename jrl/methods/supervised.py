"""Learning from given completions: each is a demonstration, the only member of its group."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import Draw, Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Positive, Range
from jrl.objectives import aggregates, distill, ratios, transforms
from jrl.types import Array, Objective, Statistic, Stats, Surrogate

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
    nothing is drawn. ``beta`` and ``temperature`` are not known, and no code is released that we
    found: the defaults are a slightly negative reward and a temperature above 1, as the paper asks
    for.
    """
    rollout = one_token_rollout(beta, temperature)
    return base.with_(surrogate=distill.minimise(rollout, "one_token_loss"))
