"""Formulas of propositional logic: text, and what follows from what."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kripke import MODELS, follows, forced

from jrl.zoo.envs.propositions import (
    DEEPEST,
    LONGEST,
    Formula,
    FormulaError,
    negation,
    parse_formula,
    provable,
    show,
)

QUICK = settings(max_examples=200, deadline=None, database=None)
LEAVES = st.sampled_from(["a", "b", "c", "True", "False"]).map(Formula)


def joined(inner):
    names = st.sampled_from(["->", "/\\", "\\/", "<->"])
    return st.builds(lambda name, *parts: Formula(name, parts), names, inner, inner)


ROWS = list(itertools.product((False, True), repeat=3))
FORMULAS = st.recursive(LEAVES, lambda inner: joined(inner) | inner.map(negation), max_leaves=6)


@QUICK
@given(FORMULAS)
def test_what_is_written_is_read_again(formula):
    text = show(formula)
    assert parse_formula(text) == formula
    lean = {"->": "→", "/\\": "∧", "\\/": "∨", "~": "¬"}  # noqa: RUF001
    signs = text.replace("<->", "↔")
    for ascii_form, sign in lean.items():
        signs = signs.replace(ascii_form, sign)
    assert parse_formula(signs) == formula


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a -> b -> c", "(a -> (b -> c))"),
        ("a /\\ b \\/ c -> d", "((a /\\ b) \\/ c) -> d"),
        ("a /\\ b /\\ c", "a /\\ (b /\\ c)"),
        ("~a /\\ b", "(~a) /\\ b"),
        ("a <-> b -> c", "a <-> (b -> c)"),
        ("¬a∨b↔True", "(a -> False) \\/ b <-> True"),  # noqa: RUF001
        ("  a\t->  h1'  ", "a -> h1'"),
    ],
)
def test_connectives_bind_as_in_lean(text, same):
    assert parse_formula(text) == parse_formula(same)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 1: expected a formula, found the end"),
        ("a ->", "character 5: expected a formula, found the end"),
        ("a b", "character 3: expected a connective or the end, found 'b'"),
        ("(a -> b", "character 8: expected a connective or ')', found the end"),
        ("a -> Prop", "character 6: expected a formula, found 'Prop'"),
        ("a & b", "character 3: expected a connective or the end, found '&'"),
        ("a <-> b <-> c", "character 9: expected a connective or the end, found '<->'"),
        ("~" * (DEEPEST + 1) + "a", f"character 62: nested more than {DEEPEST} deep"),
        ("a" * (LONGEST + 1), f"a formula has at most {LONGEST} characters, and this one 501"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text, message):
    with pytest.raises(FormulaError) as error:
        parse_formula(text)
    assert str(error.value) == message


@QUICK
@given(st.text(alphabet="ab ()~-></\\TrueFals→∧¬", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        formula = parse_formula(text)
    except FormulaError:
        return
    assert parse_formula(show(formula)) == formula


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("((a -> b) -> a) -> a", False),  # Peirce's law
        ("~~(((a -> b) -> a) -> a)", True),
        ("a \\/ ~a", False),
        ("~~(a \\/ ~a)", True),
        ("~~a -> a", False),
        ("~~~a -> ~a", True),
        ("~(a /\\ b) -> ~a \\/ ~b", False),
        ("~(a \\/ b) <-> ~a /\\ ~b", True),
        ("(a -> b) \\/ (b -> a)", False),
        ("(~a -> b \\/ c) -> (~a -> b) \\/ (~a -> c)", False),  # the rule of Harrop, no theorem
        ("(a \\/ b -> c) <-> (a -> c) /\\ (b -> c)", True),
        ("(((a -> b) -> c) -> d) -> (b -> c) -> d", False),
        ("((a -> b) -> c) -> b -> c", True),
        ("(a <-> ~a) -> False", True),
        ("False -> a", True),
        ("(True -> a) -> a", True),
        ("(False -> a) -> a", False),
    ],
)
def test_theorems_of_intuitionistic_logic_are_told_from_others(text, holds):
    formula = parse_formula(text)
    assert provable((), formula) == holds
    assert provable((), negation(negation(formula))) or not holds


@QUICK
@given(FORMULAS)
def test_double_negations_of_tautologies_alone_are_provable(formula):
    """Glivenko's theorem, with truth tables as the other way to decide."""
    one = ((0,),)
    tables = [dict(zip("abc", ((x,) for x in row), strict=True)) for row in ROWS]
    tautology = all(forced((one, values), formula, 0) for values in tables)
    assert provable((), negation(negation(formula))) == tautology


@QUICK
@given(st.lists(FORMULAS, max_size=2), FORMULAS)
def test_what_is_provable_follows_in_every_model(hypotheses, target):
    holds = all(follows(model, hypotheses, target) for model in MODELS)
    if provable(hypotheses, target):
        assert holds
    elif not hypotheses and len(show(target)) < 16:  # little enough for models of three worlds
        assert not holds


@QUICK
@given(st.lists(FORMULAS, max_size=3), FORMULAS)
def test_hypotheses_are_assumptions(hypotheses, target):
    arrows = functools.reduce(lambda f, h: Formula("->", (h, f)), hypotheses, target)
    assert provable(hypotheses, target) == provable((), arrows)
