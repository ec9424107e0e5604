r"""Proofs with subgoals: a planner names them, and provers prove them in parallel.

    found = prove_by_parts(["a /\\ b -> b /\\ a"], prove, model_planner(endpoint(url, model)))

The inference of "Scaling up Multi-Turn Off-Policy RL and Multi-Agent Tree Search for LLM
Step-Provers" (arXiv:2509.06493, the method ``bfs_prover``): a model that reasons in general words
decomposes what the prover cannot prove, all provers share what has been proved, and where one gets
stuck the plan is made anew. Departures: a subgoal is proved as an implication from those before it,
so that all of a plan are tried at once, where the paper goes from one to the next; propositional
logic takes Lean's place (``zoo.envs.propositions``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jrl.episodes.host import EnvError
from jrl.episodes.model_endpoint import Speaker
from jrl.errors import UserError
from jrl.zoo.envs.propositions import Formula, FormulaError, parse_formula, show

Prove = Callable[[Sequence[str]], Sequence[bool]]
"""(statements) -> whether each was proved; they are tried side by side."""


class Stuck(NamedTuple):
    """A statement that was not proved, as the planner reads it.

    Attributes:
      statement: that was not proved.
      plan: the subgoals that were tried last; () at first.
      failed: of these, and perhaps of the statement behind them, what was not proved.
    """

    statement: str
    plan: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


Planner = Callable[[Stuck], Sequence[str]]
"""Unproved statement -> subgoals, in an order in which each may use those before it."""


class PlannedProof(NamedTuple):
    """The outcome of a statement.

    Attributes:
      proved: whether it was.
      plan: the subgoals by which, () where it took none, or where it was not proved.
      plans: how many were tried.
    """

    proved: bool
    plan: tuple[str, ...] = ()
    plans: int = 0


def prove_by_parts(
    statements: Sequence[str], prove: Prove, planner: Planner, *, plans: int = 3
) -> list[PlannedProof]:
    """Proves statements, with planned subgoals where direct search fails.

    Args:
      statements: formulas in text.
      prove: a prover, such as a search with a policy.
      planner: asked where a statement resists, and again where its plan does.
      plans: the most of a statement.

    Returns:
      What became of each. Where subgoals S_1, ..., S_k prove a statement G, so have been the
      implications to each from those before it, S_1 -> ... -> S_k -> G the last.

    Raises:
      UserError: a statement that cannot be read, or no plans.
    """
    if plans < 1:
        raise UserError(f"plans = {plans}; must be at least 1")
    goals = [_read(statement) for statement in statements]
    proved: dict[str, bool] = {}  # shared by all, and by their subgoals

    def attempt(formulas: Sequence[Formula]) -> None:
        new = list(dict.fromkeys(text for f in formulas if (text := show(f)) not in proved))
        if new:
            proved.update(zip(new, map(bool, prove(new)), strict=True))

    attempt(goals)
    proofs = [PlannedProof(proved[show(goal)]) for goal in goals]
    tried = {i: Stuck(show(goals[i])) for i, each in enumerate(proofs) if not each.proved}
    for number in range(1, plans + 1):
        chains: dict[int, list[Formula]] = {}
        for i, stuck in tried.items():
            parts = [part for text in planner(stuck) if (part := _subgoal(text)) is not None]
            chains[i] = [_implied(parts[:k], part) for k, part in enumerate([*parts, goals[i]])]
            tried[i] = stuck._replace(plan=tuple(map(show, parts)))
        attempt([formula for chain in chains.values() for formula in chain])
        for i, chain in chains.items():
            failed = tuple(show(f) for f in chain if not proved[show(f)])
            tried[i] = tried[i]._replace(failed=failed)
            plan = () if failed else tried[i].plan
            proofs[i] = PlannedProof(not failed, plan, number)
        tried = {i: stuck for i, stuck in tried.items() if stuck.failed}
        if not tried:
            break
    return proofs


def _read(statement: str) -> Formula:
    try:
        return parse_formula(statement)
    except FormulaError as error:
        raise UserError(f"the statement {statement!r:.60} cannot be read: {error}") from None


def _subgoal(text: str) -> Formula | None:
    """A planned subgoal; None where the text is no formula."""
    try:
        return parse_formula(text)
    except FormulaError:
        return None


def _implied(premises: Sequence[Formula], goal: Formula) -> Formula:
    """The goal behind an arrow from each premise."""
    for premise in reversed(premises):
        goal = Formula("->", (premise, goal))
    return goal


# ---------------------------------------------------------------- a model as the planner

_PLAN = (
    "A prover of intuitionistic propositional logic could not prove\n{statement}\n{failure}Name"
    " lemmas that lead to it, in an order in which each follows from those before it by a short"
    " proof. Write each as a formula, with ->, /\\, \\/, ~, True and False, on a line of its own"
    " between backticks, and write nothing else."
)


def model_planner(speaker: Speaker) -> Planner:
    """A model that writes subgoals; lines that are no formulas are left out.

    Args:
      speaker: sync, from messages to text, such as ``endpoint.endpoint``.

    Raises:
      EnvError: when asked, it returns no text.
    """

    def plan(stuck: Stuck) -> list[str]:
        failure = ""
        if stuck.plan:
            tried, failed = (
                "\n".join(f"`{x}`" for x in some) for some in (stuck.plan, stuck.failed)
            )
            failure = (
                f"These lemmas were tried:\n{tried}\nand this could not be proved:\n{failed}\n"
            )
        request = _PLAN.format(statement=stuck.statement, failure=failure)
        text = speaker([{"role": "user", "content": request}])
        if not isinstance(text, str):
            raise EnvError(f"the planner said {text!r:.60}, not text")
        return re.findall(r"`([^`\n]+)`", text)

    return plan
