"""Learning from episodes that anybody drew: imitation of the best, and values that lean the policy.

The heads of values are those of ``models.token_values``; "base" is the policy without them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jrl.methods.base import Draw, Method, Schedule, TokenValues
from jrl.methods.definition import published, variant
from jrl.methods.domains import Count, Fraction, NonNegative
from jrl.methods.supervised import best_of_batch, sft
from jrl.objectives import advantages, aggregates, ratios, transforms
from jrl.types import Array, Batch, Objective, Statistic, Stats, Surrogate, Transform

# What a network with token values shows of ONE token, by name, and the token -> a number.


def _of_head(shown: dict[str, Array], token: Array, head: int) -> Array:
    return shown["q"][head, token]


def _target(shown: dict[str, Array], token: Array) -> Array:
    return shown["q_target"][token]


def _state(shown: dict[str, Array], token: Array) -> Array:
    return shown["v"]


def _unlikely(shown: dict[str, Array], token: Array) -> Array:
    """Minus the log-probability of the token if values were logits, summed over heads."""
    return -jax.nn.log_softmax(shown["q"])[:, token].sum()


def _surprise(shown: dict[str, Array], token: Array) -> Array:
    return -jax.nn.log_softmax(shown["base"])[token]


def _read(heads: int) -> tuple[Statistic, ...]:
    of_each = [Statistic(f"q_{i}", partial(_of_head, head=i)) for i in range(heads)]
    return (*of_each, Statistic("q_unlikely", _unlikely), Statistic("base_surprise", _surprise))


def _values_learner(
    loss: Callable[[Stats, Array, Array], tuple[Array, Stats]],
    points: Callable[[Array, Array], Array],
    read: tuple[Statistic, ...],
    values: TokenValues,
    epochs: int,
) -> Method:
    """A method whose loss reads points by token, ``points`` of (rewards [T], mask [T])."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        rewards = transforms.token_rewards(transforms.paid_rewards(scores, batch), batch)
        return jax.vmap(jax.vmap(points))(rewards, transforms.trained(batch)), batch

    advantage: Transform = transforms.stateless(apply)
    surrogate = Surrogate(loss, frozenset(each.name for each in read), statistics=read)
    return Method(
        Objective(advantage, surrogate, aggregates.token_mean),
        schedule=Schedule(epochs),
        token_values=values,
    )


@variant(sft)
def filtered_bc(base: Method, keep: Fraction = 0.1) -> Method:
    """Maximum likelihood of the episodes whose returns are the batch's best.

    The filtered behaviour cloning of "LMRL Gym: Benchmarks for Multi-Turn Reinforcement Learning
    with Language Models" (arXiv:2311.18232):

        loss = -mean over the drawn tokens of the kept episodes of log pi_t

    ``keep`` is the released code's of ``digirl``, which has it as a baseline too. Where
    ``data.train`` names dialogues or recorded sessions it clones a data set, as the paper does;
    else, a departure, the policy's own episodes of this step. Departures: the best are those of
    each batch, and not of the whole data set.
    """
    return base.with_(draw=Draw(), advantage=best_of_batch(keep), surrogate=ratios.reinforce())


@published
def ilql(
    beta: NonNegative = 16.0,
    tau: Fraction = 0.7,
    discount: Fraction = 0.99,
    cql_coef: NonNegative = 0.01,
    sft_coef: NonNegative = 1.0,
    follow: Fraction = 0.005,
    epochs: Count = 1,
) -> Method:
    """Values of tokens, learned from episodes that anybody drew, lean the policy.

    "Offline RL for Natural Language Generation with Implicit Language Q Learning"
    (arXiv:2206.11871), which "Zero-Shot Goal-Directed Dialogue via RL on Imagined Conversations"
    (arXiv:2311.05584) and LMRL Gym (see ``filtered_bc``) use. A token that was drawn is an action,
    and the next state is the one before the next such token, so that replies of an environment cost
    no discount:

        Q' = min_i Q'_i(s, a),   y = r + gamma V(s')
        loss = mean over tokens of  1/2 sum_i (Q_i(s, a) - y)^2
                                  + 1/2 |tau - 1(Q' < V(s))| (Q' - V(s))^2
                                  - alpha sum_i log softmax(Q_i(s, .))_a  -  log pi_base(a | s)
        policy ~ pi_base exp(beta min_i Q'_i)

    with y and Q' constants, targets Q'_i that go ``follow`` of the way to Q_i after an update, and
    V 0 after the last token. Beta, gamma, tau and ``follow`` are the released runs' on Wordle,
    alpha (``cql_coef``) is LMRL Gym's. Episodes are recorded sessions (``data.train =
    "recorded:DIR"``), dialogues ("dialogues:FILE", such as those that ``jrl imagine`` writes for
    the second paper) or the run's own. Departures: base and values share a trunk, which the
    released code leaves to choose, so that the last term (``sft_coef``) is learned along; LMRL Gym
    clones the data first, and keeps that policy.
    """

    def loss(stats: Stats, rewards: Array, mask: Array) -> tuple[Array, Stats]:
        value = stats["state_value"]
        _, aim = advantages.gae(rewards, jax.lax.stop_gradient(value), mask, discount, 0.0)
        of_q = (jnp.square(stats["q_0"] - aim) + jnp.square(stats["q_1"] - aim)) / 2
        error = stats["q_target"] - value
        of_v = jnp.abs(tau - (error < 0)) * jnp.square(error) / 2
        rest = cql_coef * stats["q_unlikely"] + sft_coef * stats["base_surprise"]
        told = {"q_loss": of_q, "v_loss": of_v, "state_value": value}
        return of_q + of_v + rest, jax.lax.stop_gradient(told)

    read = (*_read(2), Statistic("q_target", _target), Statistic("state_value", _state))
    points = lambda rewards, mask: rewards  # noqa: E731
    return _values_learner(loss, points, read, TokenValues(beta, follow, heads=2), epochs)


@published
def mc_returns(
    beta: NonNegative = 16.0,
    discount: Fraction = 0.99,
    cql_coef: NonNegative = 0.01,
    sft_coef: NonNegative = 1.0,
    epochs: Count = 1,
) -> Method:
    """Values of tokens fitted to the returns that followed them lean the policy.

    The Monte Carlo returns of LMRL Gym (arXiv:2311.18232), the paper of ``filtered_bc``, R being
    the discounted return from a token on:

        loss = mean over tokens of  1/2 (Q(s, a) - R)^2
                                  - alpha log softmax(Q(s, .))_a  -  log pi_base(a | s)
        policy ~ pi_base exp(beta Q)

    Numbers and departures are those of ``ilql``.
    """

    def loss(stats: Stats, returns: Array, mask: Array) -> tuple[Array, Stats]:
        of_q = jnp.square(stats["q_0"] - returns) / 2
        rest = cql_coef * stats["q_unlikely"] + sft_coef * stats["base_surprise"]
        return of_q + rest, jax.lax.stop_gradient({"q_loss": of_q})

    points = partial(advantages.reward_to_go, discount=discount)
    return _values_learner(loss, points, _read(1), TokenValues(beta, 1.0, heads=1), epochs)
