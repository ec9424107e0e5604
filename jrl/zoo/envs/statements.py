r"""Statements of intuitionistic propositional logic that can be proved, each with a short proof.

    python -m jrl.zoo.envs.statements configs/prover

writes the statements of ``configs/prover.toml``, train.jsonl and eval.jsonl, each with a proof as
its answer. ``--count``, ``--held-out``, ``--atoms``, ``--depth`` and ``--seed`` make others.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from jrl.errors import UserError
from jrl.zoo.envs.propositions import FALSE, Formula, negation, provable, show
from jrl.zoo.envs.tactics import Goal, TacticError, free_name, opened, run_tactic

MOST_TACTICS = 12
"""The most in the proof of a statement."""
_FEWEST = 3
_NODES = 3000
"""Goals that the search for a proof looks at."""
_IDLE = 20_000
"""Failed formulas in a row before giving up."""


def statements(seed: int, count: int, *, atoms: int = 3, depth: int = 3) -> list[str]:
    """Statements that can be proved, in an order without a pattern.

    No two are the same up to the names of atoms, and no proper part of one holds always or never.
    Proofs (``short_proof``) take 3 to ``MOST_TACTICS`` tactics; no length has more than a quarter
    of the statements, rounded up.

    Args:
      seed: of the draws.
      count: how many.
      atoms: the most that occur in a statement, 1 to 26.
      depth: of connectives inside one another, 2 to 5.

    Raises:
      UserError: there are fewer statements of this depth.
    """
    return [text for text, _ in proved(seed, count, atoms=atoms, depth=depth)]


def proved(
    seed: int, count: int, *, atoms: int = 3, depth: int = 3
) -> list[tuple[str, tuple[str, ...]]]:
    """The ``statements``, each with the tactics of a short proof."""
    if not 1 <= atoms <= 26 or not 2 <= depth <= 5:
        raise UserError(f"atoms = {atoms}, depth = {depth}; give 1 to 26 and 2 to 5")
    rng = random.Random(seed)
    proofs: dict[str, tuple[str, ...]] = {}
    lengths: dict[int, int] = {}
    share, idle = -(-count // 4), 0
    while len(proofs) < count:
        idle += 1
        if idle > _IDLE:
            raise UserError(
                f"{len(proofs)} of {count} statements were found with atoms = {atoms}, depth = "
                f"{depth}; ask for fewer, or raise these"
            )
        formula = _renamed(_random_implication(rng, atoms, depth))
        text = show(formula)
        if text in proofs or not provable((), formula) or _empty_parts(formula):
            continue
        proof = short_proof(formula)
        if proof is None or len(proof) < _FEWEST or lengths.get(len(proof), 0) >= share:
            continue
        proofs[text], idle = proof, 0
        lengths[len(proof)] = lengths.get(len(proof), 0) + 1
    rows = list(proofs.items())
    rng.shuffle(rows)  # short ones are found first
    return rows


# ---------------------------------------------------------------- formulas by chance


def _random_implication(rng: random.Random, atoms: int, depth: int) -> Formula:
    """An implication, as theorems are, with parts of any kind."""
    parts = _formula(rng, atoms, depth - 1), _formula(rng, atoms, depth - 1)
    return Formula("->", parts)


def _formula(rng: random.Random, atoms: int, depth: int) -> Formula:
    if depth == 0 or rng.random() < 0.2:
        return Formula("abcdefghijklmnopqrstuvwxyz"[rng.randrange(atoms)])
    name = rng.choices(("->", "/\\", "\\/", "~", "<->"), (8, 4, 4, 3, 1))[0]
    left = _formula(rng, atoms, depth - 1)
    return negation(left) if name == "~" else Formula(name, (left, _formula(rng, atoms, depth - 1)))


def _renamed(formula: Formula) -> Formula:
    """The formula with atoms renamed a, b, ... in order of occurrence."""
    names: dict[str, str] = {}

    def walk(part: Formula) -> Formula:
        if part.parts:
            return Formula(part.name, tuple(map(walk, part.parts)))
        if part == FALSE:
            return part
        return Formula(names.setdefault(part.name, "abcdefghijklmnopqrstuvwxyz"[len(names)]))

    return walk(formula)


def _empty_parts(formula: Formula) -> bool:
    """Whether a proper part says nothing: it holds always, or never, or both its parts are one."""
    return any(
        part != FALSE
        and (
            part.parts[:1] == part.parts[1:] != ()
            or provable((), part)
            or provable((part,), FALSE)
            or _empty_parts(part)
        )
        for part in formula.parts
    )


# ---------------------------------------------------------------- proofs


def short_proof(statement: Formula, most: int = MOST_TACTICS) -> tuple[str, ...] | None:
    """The tactics of a short proof; None where the search finds none.

    No shorter one has the tactics that are tried: ``intros``, what takes one connective apart, and
    ``have`` for what hypotheses conclude. Only ``provable`` goals are looked at.

    Args:
      statement: to prove.
      most: tactics of a proof.

    >>> from jrl.zoo.envs.propositions import parse_formula
    >>> short_proof(parse_formula("(a -> b) -> (b -> c) -> a -> c"))
    ('intros', 'apply h2', 'apply h1', 'assumption')
    """
    search = _Search()
    for length in range(1, most + 1):
        proof = search.prove(opened(statement)[0], length)
        if proof is not None or search.nodes > _NODES:
            return proof
    return None


class _Search:
    """Provability of goals, over all depths."""

    def __init__(self) -> None:
        self.nodes = 0
        self.needs: dict[Goal, int] = {}  # tactics that a proof has more of
        self.true: dict[Goal, bool] = {}

    def prove(self, goal: Goal, most: int) -> tuple[str, ...] | None:
        """A proof of at most this length, in tactics."""
        if self.needs.get(goal, 0) >= most or self.nodes > _NODES:
            return None
        self.nodes += 1
        for tactic in _candidates(goal):
            try:
                left = run_tactic((goal,), tactic)
            except TacticError:
                continue
            if len(left) < most and all(map(self.provable, left)):
                proof = self.prove_all(left, most - 1)
                if proof is not None:
                    return (tactic, *proof)
        self.needs[goal] = most
        return None

    def prove_all(self, goals: Sequence[Goal], most: int) -> tuple[str, ...] | None:
        """Proofs of all goals, one after another, the first as short as can be."""
        if not goals:
            return ()
        for length in range(1, most - len(goals) + 2):
            first = self.prove(goals[0], length)
            if first is not None:
                rest = self.prove_all(goals[1:], most - length)
                return None if rest is None else (*first, *rest)
        return None

    def provable(self, goal: Goal) -> bool:
        if goal not in self.true:
            self.true[goal] = provable([formula for _, formula in goal.hypotheses], goal.target)
        return self.true[goal]


def _candidates(goal: Goal) -> Iterator[str]:
    """Tactics that may lead to a proof, those that close the goal first."""
    yield from ("assumption", "contradiction", "trivial", "intros", "split")
    for name, formula in goal.hypotheses:
        if formula.name in ("/\\", "\\/", "<->", "False"):
            yield f"cases {name}"
        elif formula.name == "->":
            yield f"apply {name}"
    yield from ("left", "right", "exfalso")
    formulas = {formula for _, formula in goal.hypotheses}
    for _, formula in goal.hypotheses:
        while formula.name == "->":
            formula = formula.parts[1]
            if formula not in formulas and formula != goal.target:
                yield f"have {free_name(goal)} : {show(formula)}"


# ---------------------------------------------------------------- files


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes train.jsonl and eval.jsonl, with disjoint statements."""
    parser = argparse.ArgumentParser(prog="python -m jrl.zoo.envs.statements")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=400, help="statements to train on")
    parser.add_argument("--held-out", type=int, default=100, help="statements of eval.jsonl")
    parser.add_argument("--atoms", type=int, default=3, help="the most of a statement")
    parser.add_argument("--depth", type=int, default=3, help="of connectives inside one another")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = proved(
        options.seed, options.count + options.held_out, atoms=options.atoms, depth=options.depth
    )
    options.directory.mkdir(parents=True, exist_ok=True)
    files = {"train": rows[options.held_out :], "eval": rows[: options.held_out]}
    for name, statements in files.items():
        lines = [json.dumps({"question": q, "answer": "\n".join(proof)}) for q, proof in statements]
        text = "".join(f"{line}\n" for line in lines)
        (options.directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
