"""Direct alignment: losses of a chosen and a rejected completion, without a reward model.

Data of pairs are groups of two with rewards 1 (chosen) and 0 (rejected). On groups that the policy
draws, the completion of the highest reward is the chosen one and that of the lowest the rejected
one (``comparisons.best_and_worst``: ties are broken at random, a group of equal rewards is left
out), so every method here also runs online. Below, y_w and y_l are the two, log pi(y) is the SUM
over a completion's trained tokens, h(y) = log pi(y) - log pi_ref(y), a = beta h(y_w) and
b = beta h(y_l) are the implicit rewards, and every loss is a mean over pairs.

Relatives of DPO inherit its coefficients: ``loss``, ``label_smoothing``, ``min_gap`` and
``refresh_ref`` are as in ``dpo`` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from jrl.methods.base import Method, Schedule, against_others
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Flag, NonNegative, Positive, Range
from jrl.methods.schedule import refreshed
from jrl.objectives import aggregates, comparisons, pairs
from jrl.objectives.members import GroupLoss, over_group
from jrl.objectives.pairs import PAIR_LOSSES, Reward, Side, dpo_loss, odds_ratio_loss
from jrl.types import Array

Noise = Annotated[float, Range(0.0, 0.5)]
"""A rate of wrong labels."""
Steps = Annotated[int, Range(0, whole=True)]
"""Training steps; 0 for never."""

# ---------------------------------------------------------------- DPO

PairLossName = Annotated[str, Choice(tuple(PAIR_LOSSES))]


def implicit(beta: float) -> Reward:
    """The implicit reward beta h of a side."""
    return lambda side: beta * side.log_ratio


def pair_method(
    loss: pairs.PairLoss,
    reward: Reward,
    needs: Iterable[str] = ("ref_logprobs",),
    min_gap: float = 0.0,
    refresh_ref: int = 0,
) -> Method:
    """A method from a loss of (chosen, rejected): the mean over pairs.

    Args:
      loss: as in ``pairs.pair``, as are ``reward`` and ``needs``.
      reward: the implicit reward of a side, for the metrics.
      needs: names of statistics.
      min_gap: points, as in ``comparisons.best_and_worst``.
      refresh_ref: steps, as in ``schedule.refreshed``.
    """
    chosen, surrogate = comparisons.best_and_worst(min_gap), pairs.pair(loss, reward, needs)
    method = against_others(chosen, surrogate, aggregates.sequence_sum)
    return method.with_(schedule=Schedule(after=refreshed(refresh_ref)))


@published
def dpo(
    beta: Positive = 0.1,
    loss: PairLossName = "sigmoid",
    label_smoothing: Noise = 0.0,
    min_gap: NonNegative = 0.0,
    refresh_ref: Steps = 0,
) -> Method:
    """The logistic loss of the difference of implicit rewards beta log(pi / pi_ref).

    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"
    (arXiv:2305.18290):

        a = beta h(y_w),  b = beta h(y_l)
        loss = -log sigmoid(a - b)

    Departures: ``label_smoothing`` e weighs the loss of the reversed pair by e and the pair's own
    by 1 - e (conservative DPO, Mitchell 2023; not on arXiv); "sigmoid" and "hinge" read it. Pairs
    whose scores differ by ``min_gap`` points or less are left out. Every ``refresh_ref`` steps the
    reference becomes the policy, for iterated DPO; 0 keeps it. Other losses of a and b:

    - "hinge": max(0, 1 - (a - b)), "Statistical Rejection Sampling Improves Preference
      Optimization" (arXiv:2309.06657);
    - "ipo": the loss of ``ipo`` with beta as its tau;
    - "nca": -log sigmoid(a) - [log sigmoid(-a) + log sigmoid(-b)] / 2, "Noise Contrastive
      Alignment of Language Models with Explicit Rewards" (arXiv:2402.05369);
    - "discopop": the logistic and the exponential loss mixed by sigmoid((a - b) / 0.05),
      "Discovering Preference Optimization Algorithms with and for Large Language Models"
      (arXiv:2406.08414); the exponential is clamped at 20 nats;
    - "apo_zero" and "apo_down": sigmoid(-a) + sigmoid(b) and sigmoid(a) + sigmoid(b - a), "Anchored
      Preference Optimization and Contrastive Revisions" (arXiv:2408.06266).
    """
    prefer = dpo_loss(loss, beta, label_smoothing)
    return pair_method(prefer, implicit(beta), min_gap=min_gap, refresh_ref=refresh_ref)


@variant(dpo, without=("beta", "loss", "label_smoothing"))
def ipo(base: Method, tau: Positive = 0.1, length_normalised: Flag = False) -> Method:
    """A squared loss that holds the difference of log-ratios at a finite margin.

    "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036):

        loss = [h(y_w) - h(y_l) - 1 / (2 tau)]^2

    Departures: ``length_normalised`` divides each h by its completion's tokens, as the authors
    later advised and TRL does.
    """

    def h(side: Side) -> Array:
        return side.log_ratio / side.tokens if length_normalised else side.log_ratio

    loss = dpo_loss("ipo", tau, of=h)
    return base.with_(surrogate=pairs.pair(loss, lambda side: tau * h(side)))


# ---------------------------------------------------------------- without a reference


@variant(dpo, without=("loss", "refresh_ref"), beta=2.0)
def simpo(base: Method, beta: Positive, label_smoothing: Noise, gamma: NonNegative = 1.0) -> Method:
    """The logistic loss of mean log-probabilities with a margin; no reference policy.

    "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734):

        loss = -log sigmoid( beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma )

    Departures: the paper tunes both by model, gamma from 0.3 to 1.6 where beta is 2 to 2.5, and 3
    to 5 where it is 10; the defaults are those of Llama 3 8B. gamma is the margin itself, not the
    released code's ``gamma_beta_ratio``, which is multiplied by beta.
    """
    loss = dpo_loss("sigmoid", beta, label_smoothing, lambda side: side.mean, gamma)
    return base.with_(surrogate=pairs.pair(loss, lambda side: beta * side.mean, ()))


@published
def orpo(lambda_: NonNegative = 0.1, min_gap: NonNegative = 0.0) -> Method:
    """Supervised learning of the chosen completion plus a penalty on the odds of the rejected one.

    "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691), with
    P = exp(log pi(y) / |y|), the geometric mean of a completion's token probabilities:

        odds(y) = P / (1 - P)
        loss = -log pi(y_w) / |y_w|  -  lambda log sigmoid( log odds(y_w) - log odds(y_l) )

    Departures: P is held 1e-6 below 1, in logarithms; the likelihood is of the completion alone,
    each one's mean, as the formula has it, where TRL and the released code average over the tokens
    of prompts and completions of the batch.
    """
    loss = odds_ratio_loss(lambda_)
    return pair_method(loss, lambda side: lambda_ * side.mean, (), min_gap)


def list_method(loss: GroupLoss, needs: tuple[str, ...] = ()) -> Method:
    """A method from a loss of groups whose scores differ: the mean over them."""
    surrogate = over_group(loss, needs)
    return against_others(comparisons.with_gap(), surrogate, aggregates.sequence_sum)
