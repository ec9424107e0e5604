"""Methods that ask for further members of some groups: hard ones, and those that failed."""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Choice, Count, Whole
from jrl.methods.edit import EditView, edit_of, only
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, StepView, more
from jrl.types import Array
from jrl.types.asks import Asks

Balance = Annotated[str, Choice(("hard", "equal"))]


def further_members(rate: Array, size: Array, most: int, balance: str) -> Array:
    """[m] int32: members that ``dars`` adds to groups of success rate [m] and size [m].

    >>> rates, sizes = jnp.array([0.0, 0.25, 0.5]), jnp.array([8, 8, 8])
    >>> further_members(rates, sizes, 32, "equal").tolist()
    [9, 2, 0]
    >>> further_members(rates, sizes, 32, "hard").tolist()
    [23, 6, 0]
    """
    size = jnp.maximum(size, 1)
    a = jnp.maximum(rate, 0.5 / size)
    each = 2 * jnp.sqrt(jnp.maximum(a * (1 - a), 1e-12))
    peak = size * (2 * (1 - a) if balance == "hard" else jnp.ones_like(a))
    # Rounding must not ask for one more where the quotient is whole.
    count = jnp.ceil((peak - size * each) / each - 1e-4)
    return jnp.where(a < 0.5, jnp.clip(count, 0, most - size), 0).astype(jnp.int32)


@variant(grpo)
def dars(base: Method, balance: Balance = "hard", max_group: Count = 32) -> Method:
    """GRPO with further completions of the problems that are mostly failed.

    DARS of "Depth-Breadth Synergy in RLVR: Unlocking LLM Reasoning Gains with Adaptive Exploration"
    (arXiv:2508.13755). A group of n completions with success rate a (0.5 / n where none is right)
    has n S of advantage in sum, S = 2 sqrt(a (1 - a)); where a < 0.5

        min(ceil((n c - n S) / S), max_group - n)

    completions are added, c = 1 for equal treatment (``balance="equal"``) and 2 (1 - a) for the
    hardness-weighted schedule (``"hard"``). Advantages are those of the whole group.

    Departures: the schedule for advantages without a deviation, which the paper has too and the
    released scripts take (with 64 members at most for the hard schedule, 32 for the equal one), is
    not here. DARS-B is this with a large ``train.prompts``, one minibatch and ``epochs`` above 1.
    """

    def further(groups: Any, view: StepView) -> Asks:
        known = (groups.drawn() & groups.judged()).any(axis=1)  # of others not how hard they are
        count = further_members(groups.rate(), groups.sizes(), max_group, balance)
        count = jnp.where(known, count, 0)
        return (more(groups, count, max(max_group - view.group, 1)),)

    plan = Plan(next=further, rounds=1, members=lambda group: max(max_group - group, 0))
    return base.with_(plan=plan)


def _failed(groups: Any) -> Array:
    """[m] bool: groups with members that were judged, none of which has any success."""
    sampled = groups.drawn() & groups.judged()
    return sampled.any(axis=1) & ~(sampled & (groups.success() > 0)).any(axis=1)


def least_hinted(groups: Any, view: EditView) -> Any:
    """The groups with their first member replaced by the one that a hint let succeed, if any."""
    hinted, live = groups.round > 0, groups.members()
    won = live & hinted & (groups.success() > 0)
    unhinted = live & ~hinted
    first = unhinted & (jnp.cumsum(unhinted, axis=1) == 1)
    return only(groups, won | (unhinted & ~(first & won.any(axis=1, keepdims=True))))


@variant(grpo)
def scaf_grpo(
    base: Method, levels: Count = 12, exempt_steps: Whole = 50, hint_tokens: Count = 512
) -> Method:
    """GRPO in which a group that failed gets one success that a hint made possible.

    "Scaf-GRPO: Scaffolded Group Relative Policy Optimization for Enhancing LLM Reasoning"
    (arXiv:2510.19807). After ``exempt_steps`` steps, a group without any success is sampled once
    more with a hint in the prompt, at up to ``levels`` levels, each of which gives away more, until
    a completion is right. That completion, with the hinted prompt that it was drawn and is trained
    under, takes the place of one of the group's own; the advantages are those of the group then.
    There is no divergence from a reference.

    A prompt's hints are in its field "hints", from knowledge over a plan to steps of the solution:
    a list of tiers, each a list of texts (three of four in the paper; the released code leaves the
    plan out). The levels go through them in order, and one shows a tier's texts so far, as there.
    A list of texts is a single tier; with another number of texts than ``levels`` they are spread
    over the levels. A procedural task has no hints but the beginning of its solution, which is
    forced as the first tokens of the completion and not trained on.

    The member that gives way is the first, as in the released code. Departures: a hint is
    introduced by "Hint:", there by its tier's name. A hinted prompt that needs more than
    ``hint_tokens`` tokens beside the problem's is left out.
    """

    def hinted(groups: Any, view: StepView) -> Asks:
        failed = _failed(groups) & (view.step >= exempt_steps)
        return (more(groups, failed, 1, **view.tools.hints(groups, view.round, levels)),)

    plan = Plan(next=hinted, rounds=levels, members=lambda group: levels, tokens=hint_tokens)
    return base.with_(plan=plan, edits=(edit_of(least_hinted),))
