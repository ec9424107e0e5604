"""Likelihood of given completions."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice
from jrl.methods.plan import Plan, demonstrated
from jrl.objectives import aggregates, ratios, transforms
from jrl.types import Array, Objective, Stats, Surrogate

Weigh = Annotated[str, Choice(("tokens", "sequences"))]


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
    plan = Plan(demonstrated(1, alone=True))
    return Method(Objective(transforms.identity(), ratios.nll(), mean), plan=plan)


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
