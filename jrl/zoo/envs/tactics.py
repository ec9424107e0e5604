r"""Proofs in intuitionistic propositional logic by tactics, in the words of Lean 4.

    goals = opened(parse_formula("a /\\ b -> b /\\ a"))
    goals = run_tactic(goals, "intro h")
    print(show_goals(goals))                # h : a /\ b
                                            # |- b /\ a

Goals are tuples that never change, so a copy of a proof is the proof itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jrl.zoo.envs.propositions import (
    FALSE,
    TRUE,
    Formula,
    FormulaError,
    negation,
    parse_formula,
    show,
)

LARGEST = 8000
"""Characters of goals, as ``show_goals`` writes them; a tactic may not leave more."""
_LONGEST = 600
"""Characters of a tactic with its arguments."""


class TacticError(ValueError):
    """A tactic that fails, with the reason in the words of Lean."""


class Goal(NamedTuple):
    """One goal that is left to prove.

    Attributes:
      hypotheses: (name, formula) pairs, the newest last; no name stands twice.
      target: the formula to prove.
    """

    hypotheses: tuple[tuple[str, Formula], ...]
    target: Formula


Goals = tuple[Goal, ...]
"""A state of a proof: tactics change the first goal, and with none left the proof is complete."""


def opened(statement: Formula) -> Goals:
    """The one goal with which the proof of a statement begins."""
    return (Goal((), statement),)


def show_goals(goals: Goals) -> str:
    """The goals as Lean shows them, hypotheses above the target of each.

    >>> print(show_goals((Goal((("h", parse_formula("~a")),), parse_formula("a -> b")),)))
    h : ~a
    |- a -> b
    """
    texts = []
    for number, goal in enumerate(goals, 1):
        lines = [f"goal {number} of {len(goals)}"] if len(goals) > 1 else []
        lines += [f"{name} : {show(formula)}" for name, formula in goal.hypotheses]
        texts.append("\n".join([*lines, f"|- {show(goal.target)}"]))
    return "\n\n".join(texts) if goals else "no goals"


def run_tactic(goals: Goals, text: str) -> Goals:
    """The goals that a tactic leaves.

    Where all of them hold, so did the goals before.

    Args:
      goals: at least one.
      text: a tactic of ``TACTICS`` with its arguments; a period may end it.

    Raises:
      TacticError: it is unknown, does not apply to the first goal, changes nothing, or leaves more
        than ``LARGEST`` characters of goals.
    """
    text = text.strip().removesuffix(".").strip()
    if len(text) > _LONGEST:
        raise TacticError(f"a tactic has at most {_LONGEST} characters, and this one {len(text)}")
    match = re.match(r"\w+", text)
    if match is None:
        raise TacticError("expected a tactic, found " + (f"'{text:.40}'" if text else "nothing"))
    name, rest = match[0], text[match.end() :].strip()
    if name not in TACTICS:
        raise TacticError(f"unknown tactic '{name:.40}'; the tactics are {', '.join(TACTICS)}")
    left = (*TACTICS[name](goals[0], name, rest), *goals[1:])
    if left == goals:
        raise _failed(name, "it changes nothing")
    if len(show_goals(left)) > LARGEST:
        raise _failed(name, f"it leaves goals of more than {LARGEST} characters")
    return left


# ---------------------------------------------------------------- what tactics share

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_']*")


def _failed(tactic: str, why: str) -> TacticError:
    return TacticError(f"tactic '{tactic}' failed, {why}")


def _no_arguments(tactic: str, rest: str) -> None:
    if rest:
        raise TacticError(f"'{tactic}' takes no argument, found '{rest:.40}'")


def _hypothesis(goal: Goal, tactic: str, rest: str) -> Formula:
    """The hypothesis that the argument names."""
    if not _NAME.fullmatch(rest):
        problem = f"found '{rest:.40}'" if rest else "found nothing"
        raise TacticError(f"'{tactic}' takes the name of a hypothesis, {problem}")
    hypotheses = dict(goal.hypotheses)
    if rest not in hypotheses:
        raise TacticError(f"unknown identifier '{rest:.40}'")
    return hypotheses[rest]


def _check_new(goal: Goal, tactic: str, name: str) -> str:
    """The name, for a new hypothesis."""
    if not _NAME.fullmatch(name):
        raise TacticError(f"'{tactic}': '{name:.40}' is no name of a hypothesis")
    if name in dict(goal.hypotheses):
        raise TacticError(f"'{tactic}': there is a hypothesis '{name:.40}'; choose another name")
    return name


def free_name(goal: Goal) -> str:
    """The first of h1, h2, ... that no hypothesis has."""
    names = {name for name, _ in goal.hypotheses}
    return next(f"h{i}" for i in range(1, len(names) + 2) if f"h{i}" not in names)


def _with(goal: Goal, formula: Formula, name: str = "") -> Goal:
    """The goal with one more hypothesis, under a free name unless there is one."""
    return goal._replace(hypotheses=(*goal.hypotheses, (name or free_name(goal), formula)))


def _without(goal: Goal, name: str) -> Goal:
    return goal._replace(hypotheses=tuple(h for h in goal.hypotheses if h[0] != name))


# ---------------------------------------------------------------- the tactics


def _intro(goal: Goal, tactic: str, rest: str) -> Goals:
    """Moves what an implication assumes into the hypotheses, once for each name."""
    names = rest.split() or [""]
    while names:
        if goal.target.name != "->":
            raise _failed(tactic, f"the target is no implication: {show(goal.target)}")
        name = names.pop(0)
        if name:
            _check_new(goal, tactic, name)
        left, right = goal.target.parts
        goal = _with(goal, left, name)._replace(target=right)
        if tactic == "intros" and not rest and right.name == "->":
            names = [""]
    return (goal,)


def _exact(goal: Goal, tactic: str, rest: str) -> Goals:
    formula = _hypothesis(goal, tactic, rest)
    if formula != goal.target:
        raise TacticError(
            f"type mismatch: '{rest}' has type {show(formula)} but is expected to have type "
            f"{show(goal.target)}"
        )
    return ()


def _assumption(goal: Goal, tactic: str, rest: str) -> Goals:
    _no_arguments(tactic, rest)
    if goal.target not in dict(goal.hypotheses).values():
        raise _failed(tactic, f"no hypothesis is {show(goal.target)}")
    return ()


def _contradiction(goal: Goal, tactic: str, rest: str) -> Goals:
    _no_arguments(tactic, rest)
    formulas = {formula for _, formula in goal.hypotheses}
    if FALSE not in formulas and not any(negation(formula) in formulas for formula in formulas):
        raise _failed(tactic, "no hypothesis is False, and none is the negation of another")
    return ()


def _trivial(goal: Goal, tactic: str, rest: str) -> Goals:
    """``assumption`` or ``contradiction``, or the target is True."""
    _no_arguments(tactic, rest)
    if goal.target == TRUE:
        return ()
    for close in (_assumption, _contradiction):
        try:
            return close(goal, tactic, "")
        except TacticError:
            continue
    raise _failed(tactic, "the target is not True, and assumption and contradiction fail, too")


def _apply(goal: Goal, tactic: str, rest: str) -> Goals:
    """The premises of a hypothesis that ends in the target, with as few arguments as possible."""
    result, premises = _hypothesis(goal, tactic, rest), []
    while result != goal.target:
        if result.name != "->":
            raise _failed(
                tactic,
                f"could not unify the conclusion of '{rest}', {show(result)}, with the target "
                f"{show(goal.target)}",
            )
        premises.append(result.parts[0])
        result = result.parts[1]
    return tuple(goal._replace(target=each) for each in premises)


def _split(goal: Goal, tactic: str, rest: str) -> Goals:
    _no_arguments(tactic, rest)
    if goal.target.name == "/\\":
        parts = goal.target.parts
    elif goal.target.name == "<->":
        parts = _both_ways(goal.target)
    else:
        raise _failed(tactic, f"the target is no /\\ and no <->: {show(goal.target)}")
    return tuple(goal._replace(target=part) for part in parts)


def _both_ways(formula: Formula) -> tuple[Formula, ...]:
    """The implications of A <-> B."""
    return Formula("->", formula.parts), Formula("->", formula.parts[::-1])


def _side(goal: Goal, tactic: str, rest: str) -> Goals:
    _no_arguments(tactic, rest)
    if goal.target.name != "\\/":
        raise _failed(tactic, f"the target is no \\/: {show(goal.target)}")
    return (goal._replace(target=goal.target.parts[tactic == "right"]),)


def _cases(goal: Goal, tactic: str, rest: str) -> Goals:
    """Splits a hypothesis; its parts get new names."""
    formula = _hypothesis(goal, tactic, rest)
    if formula == FALSE:
        return ()
    if formula.name == "\\/":
        return tuple(_without(_with(goal, part), rest) for part in formula.parts)
    if formula.name not in ("/\\", "<->"):
        raise _failed(tactic, f"'{rest}' is no /\\, \\/, <-> or False: {show(formula)}")
    for part in formula.parts if formula.name == "/\\" else _both_ways(formula):
        goal = _with(goal, part)
    return (_without(goal, rest),)


def _exfalso(goal: Goal, tactic: str, rest: str) -> Goals:
    _no_arguments(tactic, rest)
    return (goal._replace(target=FALSE),)


def _have(goal: Goal, tactic: str, rest: str) -> Goals:
    """First the formula is to be proved, then the target with its help."""
    name, colon, text = (part.strip() for part in rest.partition(":"))
    if not colon:
        raise TacticError(f"'have' takes NAME : FORMULA, found '{rest:.40}'")
    _check_new(goal, tactic, name)
    try:
        formula = parse_formula(text)
    except FormulaError as error:
        raise _failed(tactic, f"the formula cannot be read: {error}") from None
    return goal._replace(target=formula), _with(goal, formula, name)


TACTICS: Mapping[str, Callable[[Goal, str, str], Goals]] = MappingProxyType(
    {
        "intro": _intro,
        "intros": _intro,
        "exact": _exact,
        "assumption": _assumption,
        "apply": _apply,
        "split": _split,
        "constructor": _split,
        "left": _side,
        "right": _side,
        "cases": _cases,
        "exfalso": _exfalso,
        "contradiction": _contradiction,
        "trivial": _trivial,
        "have": _have,
    }
)
"""Name -> (first goal, the name, its arguments) -> the goals that replace it."""
