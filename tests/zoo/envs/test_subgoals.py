"""Proofs by parts: what is tried, what is shared, and that a plan proves what it says."""

import pytest

from jrl.episodes.host import EnvError
from jrl.errors import UserError
from jrl.zoo.envs.propositions import parse_formula, provable
from jrl.zoo.envs.subgoals import PlannedProof, Stuck, model_planner, prove_by_parts

HARD = "(a -> b) -> (b -> c) -> (c -> d) -> a -> d"


class Prover:
    """Proves what holds and is short enough; remembers what it was asked."""

    def __init__(self, longest):
        self.longest, self.requests = longest, []

    def __call__(self, statements):
        self.requests.append(list(statements))
        return [len(s) <= self.longest and provable((), parse_formula(s)) for s in statements]


def test_what_is_proved_at_once_needs_no_plan():
    prover = Prover(99)
    proofs = prove_by_parts(["a -> a", "a", "a -> a"], prover, lambda stuck: [], plans=2)
    assert proofs == [PlannedProof(True), PlannedProof(False, (), 2), PlannedProof(True)]
    assert prover.requests == [["a -> a", "a"]]  # nothing twice


def test_a_plan_is_made_anew_where_it_fails_and_what_was_proved_is_shared():
    """By hand: the goal g follows from the lemmas x and y, of which y takes x."""
    provable = {"x", "x -> y", "x -> y -> g", "w"}
    asked_statements, failures = [], []

    def prove(statements):
        asked_statements.append(list(statements))
        return [s in provable for s in statements]

    def planner(stuck):
        failures.append(stuck)
        return ["y", "not a formula ("] if not stuck.plan else ["x", "y"]

    proofs = prove_by_parts(["g", "w"], prove, planner)
    assert proofs == [PlannedProof(True, ("x", "y"), 2), PlannedProof(True)]
    assert failures == [Stuck("g"), Stuck("g", ("y",), ("y", "y -> g"))]
    assert asked_statements == [["g", "w"], ["y", "y -> g"], ["x", "x -> y", "x -> y -> g"]]
    provable.remove("x -> y")
    (failure,) = prove_by_parts(["g"], prove, planner, plans=2)
    assert failure == PlannedProof(False, (), 2)


def test_what_a_plan_proves_holds():
    """Whatever planners write: the prover is right, so what it proves from parts is."""
    wrong = ["a", "b", "a -> b", "a \\/ ~a", "((a -> b) -> a) -> a"]
    parts = lambda stuck: ["a -> a", "b \\/ b -> b", stuck.statement]  # noqa: E731
    for planner in (lambda stuck: wrong[:3], parts, lambda stuck: [*wrong, stuck.statement]):
        proofs = prove_by_parts([HARD, *wrong], Prover(40), planner)
        assert not any(each.proved for each in proofs[1:])


def test_subgoals_make_hard_statements_provable():
    """Each of an implication's own parts is short."""
    goal = "(a -> a) /\\ ((b -> b) /\\ ((a -> b -> a) /\\ (a -> a \\/ b)))"

    def prove(statements):
        def easy(s):
            formula = parse_formula(s)
            premises = set()
            while formula.name == "->":
                premises.add(formula.parts[0])
                formula = formula.parts[1]
            conclusion = formula
            while conclusion.name == "/\\" and conclusion.parts[0] in premises:
                conclusion = conclusion.parts[1]
            return conclusion.name != "/\\" and provable((), parse_formula(s))

        return [easy(s) for s in statements]

    def planner(stuck):
        return ["a -> a", "b -> b", "a -> b -> a", "a -> a \\/ b"]

    (alone,) = prove_by_parts([goal], prove, lambda stuck: ["b -> b"], plans=1)
    (proof,) = prove_by_parts([goal], prove, planner, plans=1)
    assert (alone.proved, proof.proved, proof.plans) == (False, True, 1)
    assert len(proof.plan) == 4


def test_a_model_is_asked_for_lemmas_and_told_what_failed():
    prompts = []

    def speaker(messages):
        prompts.append(messages[0]["content"])
        return "Sure.\n`a -> a`\n`b`"

    planner = model_planner(speaker)
    assert planner(Stuck("a -> b")) == ["a -> a", "b"]
    assert "a -> b" in prompts[0]
    assert "were tried" not in prompts[0]
    planner(Stuck("a -> b", ("c",), ("c -> a -> b",)))
    assert "`c`" in prompts[1]
    assert "`c -> a -> b`" in prompts[1]
    with pytest.raises(EnvError, match="the planner said 3, not text"):
        model_planner(lambda messages: 3)(Stuck("a"))


@pytest.mark.parametrize(
    ("statements", "plans", "message"),
    [(["a ->"], 3, "the statement 'a ->' cannot be read"), (["a"], 0, "plans = 0; must be at")],
)
def test_what_cannot_be_planned_is_named(statements, plans, message):
    with pytest.raises(UserError, match=message):
        prove_by_parts(statements, Prover(9), lambda stuck: [], plans=plans)
