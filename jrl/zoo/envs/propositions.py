"""Formulas of propositional logic: read, written, and decided in intuitionistic logic.

    formula = parse_formula("(a -> b) -> ~b -> ~a")
    provable((), formula)                   # True
    show(formula)                           # '(a -> b) -> ~b -> ~a'

``tactics`` proves them step by step, and ``statements`` draws some that can be proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 500
"""Characters of a formula that is read."""
DEEPEST = 60
"""Connectives and parentheses inside one another in a formula that is read."""


class FormulaError(ValueError):
    """A text that is no formula; says at which character."""


class Formula(NamedTuple):
    r"""A proposition.

    The negation of A is A -> False, as in Lean, and is written ~A.

    Attributes:
      name: a connective ("->", "/\", "\/", "<->"), "True", "False", or the name of an atom.
      parts: what a connective connects, two formulas; else none.
    """

    name: str
    parts: tuple[Formula, ...] = ()


TRUE, FALSE = Formula("True"), Formula("False")


def negation(formula: Formula) -> Formula:
    """The formula that implies False where this one holds."""
    return Formula("->", (formula, FALSE))


# ---------------------------------------------------------------- reading and writing

_BINDS = {"<->": 20, "->": 25, "\\/": 30, "/\\": 35}
"""Precedence of each connective, the numbers of Lean 4's notation."""
_NOT = 40
_UNICODE = {"→": "->", "∧": "/\\", "∨": "\\/", "¬": "~", "↔": "<->"}  # noqa: RUF001
_TOKEN = re.compile(r"\s*(<->|->|/\\|\\/|[~()]|[A-Za-z_][A-Za-z0-9_']*|\S|\Z)")
_ATOM = re.compile(r"[a-z][A-Za-z0-9_']*")


def parse_formula(text: str) -> Formula:
    r"""The formula that a text writes.

    Negation binds strongest, then /\, \/, -> and <->; the first three connectives group to the
    right, and <-> not at all, as in Lean 4. The signs of Lean are read too.

    Args:
      text: at most ``LONGEST`` characters.

    Raises:
      FormulaError: it is none, or too long or too deep.

    >>> show(parse_formula("¬ a ∨ b → (a → b)"))
    '~a \\/ b -> a -> b'
    """
    if len(text) > LONGEST:
        raise FormulaError(f"a formula has at most {LONGEST} characters, and this one {len(text)}")
    tokens = [(_UNICODE.get(m[1], m[1]), m.start(1) + 1) for m in _TOKEN.finditer(text)]
    reader = _Reader(tokens)
    formula = reader.formula(0, 0)
    reader.expect("", "a connective or the end")
    return formula


class _Reader:
    """Operator precedence over (token, number of its first character), the last of them ""."""

    def __init__(self, tokens: list[tuple[str, int]]) -> None:
        self.tokens, self.next = tokens, 0

    def take(self) -> str:
        self.next += 1
        return self.tokens[self.next - 1][0]

    def wrong(self, expected: str) -> FormulaError:
        token, place = self.tokens[self.next]
        actual = f"{token!r}" if token else "the end"
        return FormulaError(f"character {place}: expected {expected}, found {actual}")

    def expect(self, token: str, expected: str) -> None:
        if self.tokens[self.next][0] != token:
            raise self.wrong(expected)
        self.next += 1

    def formula(self, least: int, depth: int) -> Formula:
        """The longest formula from here whose connectives bind at least so strongly."""
        if depth > DEEPEST:
            place = self.tokens[self.next][1]
            raise FormulaError(f"character {place}: nested more than {DEEPEST} deep")
        left = self.operand(depth)
        while (binds := _BINDS.get(self.tokens[self.next][0], -1)) >= least:
            name = self.take()
            if name == "<->":
                left = Formula(name, (left, self.formula(binds + 1, depth + 1)))
                least = max(least, binds + 1)  # a second one needs parentheses
            else:
                left = Formula(name, (left, self.formula(binds, depth + 1)))
        return left

    def operand(self, depth: int) -> Formula:
        token = self.tokens[self.next][0]
        if token == "(":
            self.take()
            inner = self.formula(0, depth + 1)
            self.expect(")", "a connective or ')'")
            return inner
        if token == "~":
            self.take()
            return negation(self.formula(_NOT, depth + 1))
        if token not in ("True", "False") and not _ATOM.fullmatch(token):
            raise self.wrong("a formula")
        return Formula(self.take())


def show(formula: Formula) -> str:
    r"""The formula as text, with as few parentheses as Lean's notation allows.

    >>> show(parse_formula("(a /\\ (b \\/ c)) -> ((a -> False) <-> b)"))
    'a /\\ (b \\/ c) -> (~a <-> b)'
    """
    return _show(formula, 0)


def _show(formula: Formula, least: int) -> str:
    if not formula.parts:
        return formula.name
    left, right = formula.parts
    if formula.name == "->" and right == FALSE:
        return f"~{_show(left, _NOT)}"
    binds = _BINDS[formula.name]
    after = binds + 1 if formula.name == "<->" else binds
    text = f"{_show(left, binds + 1)} {formula.name} {_show(right, after)}"
    return f"({text})" if binds < least else text


# ---------------------------------------------------------------- the decision procedure


def provable(hypotheses: Iterable[Formula], target: Formula) -> bool:
    r"""Whether the hypotheses imply the target in intuitionistic propositional logic.

    The calculus G4ip of "Contraction-free sequent calculi for intuitionistic logic" (Dyckhoff,
    1992; LJT there), in which every rule leaves less to prove, so that the search ends. It takes
    exponential time in the worst case. A <-> B is decided as both implications.

    Args:
      hypotheses: in any order.
      target: what they may imply.

    >>> provable((), parse_formula("a \\/ ~a")), provable((), parse_formula("~~(a \\/ ~a)"))
    (False, True)
    """
    return _Decision().holds(frozenset(map(_without_iff, hypotheses)), _without_iff(target))


def _without_iff(formula: Formula) -> Formula:
    parts = tuple(map(_without_iff, formula.parts))
    if formula.name != "<->":
        return Formula(formula.name, parts)
    return Formula("/\\", (Formula("->", parts), Formula("->", parts[::-1])))


class _Decision:
    """Answers for all that the decision of one statement comes upon."""

    def __init__(self) -> None:
        self.proved: dict[tuple[frozenset[Formula], Formula], bool] = {}

    def holds(self, premises: frozenset[Formula], target: Formula) -> bool:
        if FALSE in premises or target == TRUE or target in premises:
            return True
        if (premises, target) not in self.proved:
            self.proved[premises, target] = self._by_rules(premises, target)
        return self.proved[premises, target]

    def _by_rules(self, premises: frozenset[Formula], target: Formula) -> bool:
        # Rules that lose nothing come first, and of these the ones that leave one case.
        rules = [(cases, f) for f in premises if (cases := _decomposed(f, premises)) is not None]
        cases, premise = min(rules, key=lambda rule: len(rule[0]), default=([], target))
        if len(cases) == 1:
            return self.holds(premises - {premise} | cases[0], target)
        if target.name == "->":
            return self.holds(premises | {target.parts[0]}, target.parts[1])
        if target.name == "/\\":
            return all(self.holds(premises, part) for part in target.parts)
        if cases:
            return all(self.holds(premises - {premise} | case, target) for case in cases)
        if target.name == "\\/" and any(self.holds(premises, part) for part in target.parts):
            return True
        for formula in premises:
            if formula.name == "->" and formula.parts[0].parts:  # (C -> D) -> B; all else is done
                (left, right), rest = formula.parts, premises - {formula}
                weaker = Formula("->", (left.parts[1], right))
                if self.holds(rest | {right}, target) and self.holds(rest | {weaker}, left):
                    return True
        return False


def _decomposed(formula: Formula, premises: frozenset[Formula]) -> list[set[Formula]] | None:
    """The replacement of a hypothesis in each case to prove, if invertible; None for no rule."""
    if formula == TRUE:
        return [set()]
    if formula.name == "/\\":
        return [set(formula.parts)]
    if formula.name == "\\/":
        return [{part} for part in formula.parts]
    if formula.name != "->":
        return None
    left, right = formula.parts
    if left == FALSE:
        return [set()]
    if left == TRUE or (not left.parts and left in premises):
        return [{right}]
    if left.name == "/\\":
        return [{Formula("->", (left.parts[0], Formula("->", (left.parts[1], right))))}]
    if left.name == "\\/":
        return [{Formula("->", (part, right)) for part in left.parts}]
    return None
