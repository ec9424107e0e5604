"""Methods with a curriculum of problems around an unchanged objective."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.curriculum import Curriculum, Outcome, Query, Selection, Table, put_rows, top_rows
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Fraction, Positive
from jrl.methods.group_relative import grpo
from jrl.types import Array


def posteriors(target: float, decay: float, prior: tuple[float, float], pool: int) -> Curriculum:
    """Problems by a draw from the posterior of each one's success rate, the nearest to a target."""

    def init(table: Table) -> dict[str, Array]:
        return {name: jnp.full(table.rows, x) for name, x in zip("ab", prior, strict=True)}

    def choose(state: dict[str, Array], query: Query) -> tuple[Selection, Any]:
        rate = jax.random.beta(query.key, state["a"], state["b"])
        rows = top_rows(-jnp.abs(rate - target), query)
        return Selection(rows, prior={"success_rate": rate[rows]}), state

    def update(state: dict[str, Array], outcome: Outcome) -> dict[str, Array]:
        right = outcome.rate * outcome.size
        counts = {"a": right, "b": outcome.size - right}
        start = dict(zip("ab", prior, strict=True))
        return {
            n: put_rows(x, outcome, decay * x[outcome.row] + (1 - decay) * start[n] + counts[n])
            for n, x in state.items()
        }

    return Curriculum(init, choose, update, pool=pool)


@variant(grpo)
def mopps(
    base: Method,
    target: Fraction = 0.5,
    decay: Fraction = 0.5,
    prior_right: Positive = 1.0,
    prior_wrong: Positive = 1.0,
    pool: Count = 1024,
) -> Method:
    """GRPO on the problems whose success rate, drawn from a posterior, is nearest to a half.

    MoPPS of "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning
    Models?" (arXiv:2507.04632). Each problem has a Beta(a, b) over its success rate; before a step

        p ~ Beta(a, b) for every problem, and the N problems with the least |p - 0.5| are used

    and after it, for each of these, with s right among G completions,

        a = decay a + (1 - decay) a_0 + s,  b = decay b + (1 - decay) b_0 + G - s

    Departures: all problems are candidates, where the released code draws a larger batch of them
    first; on a procedural task there are ``pool``. s is the sum of the reward part that says what
    is right. The released runs have the uniform prior, and decays of 0.5 (countdown, geometry) and
    1 (mathematics).
    """
    prior = (prior_right, prior_wrong)
    return base.with_(curriculum=posteriors(target, decay, prior, pool))
