"""Learning from given completions."""

from __future__ import annotations

from typing import Annotated

from jrl.methods.base import Method, published
from jrl.methods.domains import Choice
from jrl.objectives import aggregates, surrogates, transforms
from jrl.types import Objective


@published(
    paper="Training language models to follow instructions with human feedback",
    arxiv="2203.02155",
    family="supervised",
)
def sft(weigh: Annotated[str, Choice(("tokens", "sequences"))] = "tokens") -> Method:
    """Maximum likelihood of the given completions, one to a group.

    The supervised stage of "Training language models to follow instructions with human feedback"
    (arXiv:2203.02155):

        loss = -mean over completion tokens of log pi_t

    Rewards are not read. ``weigh="sequences"`` takes the mean over completions of their token
    means instead; the paper does not say which it uses.
    """
    mean = aggregates.token_mean if weigh == "tokens" else aggregates.sequence_mean
    return Method(Objective(transforms.identity(), surrogates.nll(), mean))
