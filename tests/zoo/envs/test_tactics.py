"""Tactics: each one's success and failure, and that none proves what does not hold."""

import random

import pytest
from kripke import MODELS, follows

from jrl.zoo.envs.propositions import Formula, negation, parse_formula, provable, show
from jrl.zoo.envs.statements import short_proof, statements
from jrl.zoo.envs.tactics import TACTICS, TacticError, opened, run_tactic, show_goals


def goals_after(statement, *tactics):
    goals = opened(parse_formula(statement))
    for tactic in tactics:
        goals = run_tactic(goals, tactic)
    return goals


@pytest.mark.parametrize(
    ("statement", "tactics"),
    [
        ("a -> a", "intro h; exact h"),
        ("a -> b -> a", "intro x y; exact x."),
        ("a -> a /\\ a", "intros; constructor; assumption; assumption"),
        ("a /\\ b -> b /\\ a", "intro h; cases h; split; exact h2; exact h1"),
        ("a \\/ b -> b \\/ a", "intro h; cases h; right; exact h1; left; assumption"),
        ("(a -> b) -> (b -> c) -> a -> c", "intros f g x; apply g; apply f; exact x"),
        ("(a -> b -> c) -> a /\\ b -> c", "intros; cases h2; apply h1; assumption; assumption"),
        ("(a -> b) -> ~b -> ~a", "intro f n x; apply n; apply f; exact x"),
        ("~~(a \\/ ~a)", "intro h; apply h; right; intro x; apply h; left; exact x"),
        (
            "~(a \\/ b) -> ~a /\\ ~b",
            "intro; split; intro; apply h1; left; assumption; intro;apply h1; right; assumption",
        ),
        ("a -> ~a -> b", "intros; contradiction"),
        ("a -> ~a -> b", "intros; exfalso; apply h2; exact h1"),
        ("False -> a", "intro h; cases h"),
        ("False -> a", "intro h; contradiction"),
        ("True", "trivial"),
        ("a -> a", "intro h; trivial"),
        ("(a <-> b) -> (b <-> a)", "intro h; cases h; split; exact h2; exact h1"),
        (
            "(a -> b /\\ c) -> a -> b",
            "intro f x; have h : b ∧ c; apply f; exact x; cases h;assumption",
        ),
    ],
)
def test_classic_proofs(statement, tactics):
    *before, last = [tactic.strip() for tactic in tactics.split(";")]
    goals = goals_after(statement, *before)
    assert goals != ()
    assert run_tactic(goals, last) == ()


@pytest.mark.parametrize(
    ("statement", "tactics", "expected"),
    [
        ("a -> b", ["intro"], "h1 : a |- b"),
        ("a -> b -> c", ["intros"], "h1 : a h2 : b |- c"),
        ("a -> b -> c", ["intros x"], "x : a |- b -> c"),
        (
            "(a -> b -> c) -> c",
            ["intro h", "apply h"],
            "goal 1 of 2 h : a -> b -> c |- a goal 2 of 2 h : a -> b -> c |- b",
        ),
        ("(a -> b -> c) -> b -> c", ["intro h", "apply h"], "h : a -> b -> c |- a"),
        ("a /\\ b -> c", ["intro h1", "cases h1"], "h2 : a h3 : b |- c"),
        ("(a <-> b) -> c", ["intro h", "cases h"], "h1 : a -> b h2 : b -> a |- c"),
        ("a \\/ b -> c", ["intro h", "cases h"], "goal 1 of 2 h1 : a |- c goal 2 of 2 h1 : b |- c"),
        ("a", ["have h : b -> c"], "goal 1 of 2 |- b -> c goal 2 of 2 h : b -> c |- a"),
        ("a \\/ b", ["exfalso"], "|- False"),
        ("a <-> b", ["split"], "goal 1 of 2 |- a -> b goal 2 of 2 |- b -> a"),
        (
            "a /\\ (b -> b)",
            ["have h : a", "have g : c"],
            "goal 1 of 3 |- c goal 2 of 3 g : c |- a goal 3 of 3 h : a |- a /\\ (b -> b)",
        ),
    ],
)
def test_goals_that_a_tactic_leaves(statement, tactics, expected):
    assert " ".join(show_goals(goals_after(statement, *tactics)).split()) == expected


def test_goals_are_shown_as_in_lean():
    goals = goals_after("~a /\\ b -> c /\\ d", "intro h", "cases h", "split")
    above = "h1 : ~a\nh2 : b\n|- "
    assert show_goals(goals) == f"goal 1 of 2\n{above}c\n\ngoal 2 of 2\n{above}d"
    assert show_goals(()) == "no goals"


@pytest.mark.parametrize(
    ("statement", "tactics", "message"),
    [
        ("a", [""], "expected a tactic, found nothing"),
        ("a", ["-> b"], "expected a tactic, found '-> b'"),
        ("a", ["simp"], "unknown tactic 'simp'; the tactics are intro, intros, exact"),
        ("a", ["Intro h"], "unknown tactic 'Intro'"),
        ("a", ["intro h"], "tactic 'intro' failed, the target is no implication: a"),
        ("a", ["intros"], "tactic 'intros' failed, the target is no implication: a"),
        ("a -> b", ["intro x y"], "tactic 'intro' failed, the target is no implication: b"),
        ("a -> b", ["intro 1"], "'intro': '1' is no name of a hypothesis"),
        (
            "a -> b -> a",
            ["intro h", "intro h"],
            "'intro': there is a hypothesis 'h'; choose another name",
        ),
        (
            "a -> b",
            ["intro h", "exact h"],
            "type mismatch: 'h' has type a but is expected to have type b",
        ),
        ("a -> b", ["intro h", "exact g"], "unknown identifier 'g'"),
        ("a", ["exact"], "'exact' takes the name of a hypothesis, found nothing"),
        ("a", ["apply f x"], "'apply' takes the name of a hypothesis, found 'f x'"),
        ("a -> b", ["intro h", "assumption"], "tactic 'assumption' failed, no hypothesis is b"),
        ("a", ["assumption h"], "'assumption' takes no argument, found 'h'"),
        (
            "(a -> b) -> c",
            ["intro h", "apply h"],
            "tactic 'apply' failed, could not unify the conclusion of 'h', b, with the target c",
        ),
        ("(a -> a) -> a", ["intro h", "apply h"], "tactic 'apply' failed, it changes nothing"),
        ("a \\/ b", ["split"], "tactic 'split' failed, the target is no /\\ and no <->: a \\/ b"),
        ("~a", ["constructor"], "tactic 'constructor' failed, the target is no /\\"),
        ("a /\\ b", ["left"], "tactic 'left' failed, the target is no \\/: a /\\ b"),
        ("a /\\ b", ["right"], "tactic 'right' failed, the target is no \\/: a /\\ b"),
        (
            "~a -> b",
            ["intro h", "cases h"],
            "tactic 'cases' failed, 'h' is no /\\, \\/, <-> or False: ~a",
        ),
        ("False", ["exfalso"], "tactic 'exfalso' failed, it changes nothing"),
        (
            "a -> ~b -> c",
            ["intros", "contradiction"],
            "tactic 'contradiction' failed, no hypothesis is False, and none is the negation",
        ),
        ("a", ["trivial"], "tactic 'trivial' failed, the target is not True"),
        ("a", ["have h"], "'have' takes NAME : FORMULA, found 'h'"),
        ("a", ["have : b"], "'have': '' is no name of a hypothesis"),
        ("a -> b", ["intro h", "have h : b"], "'have': there is a hypothesis 'h'"),
        (
            "a",
            ["have h : b ->"],
            "tactic 'have' failed, the formula cannot be read: character 5:"
            " expected a formula, found the end",
        ),
        ("a", ["exact h; trivial"], "'exact' takes the name of a hypothesis, found 'h; trivial'"),
        ("a", ["exact " + "h" * 600], "a tactic has at most 600 characters, and this one 606"),
    ],
)
def test_a_tactic_that_fails_says_why(statement, tactics, message):
    goals = goals_after(statement, *tactics[:-1])
    with pytest.raises(TacticError) as error:
        run_tactic(goals, tactics[-1])
    assert str(error.value).startswith(message)


def test_goals_stay_of_a_size_that_can_be_shown():
    long = " /\\ ".join(["abcdefgh"] * 40)
    goals = goals_after("a", *(f"have h{i} : {long}" for i in range(8)))
    assert len(goals) == 9
    with pytest.raises(TacticError, match="'have' failed, it leaves goals of more than 8000"):
        run_tactic(goals, f"have h8 : {long}")


def random_formula(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return Formula(rng.choice(["a", "b", "c", "False", "True"]))
    name, left = rng.choice(["->", "/\\", "\\/", "<->", "~"]), random_formula(rng, depth - 1)
    return negation(left) if name == "~" else Formula(name, (left, random_formula(rng, depth - 1)))


def tactics_for(rng, goal):
    """Every tactic, with arguments that it may take."""
    names = [h for h, _ in goal.hypotheses]
    yield from (name for name in TACTICS if name not in ("exact", "apply", "cases", "have"))
    yield from (f"{name} {h}" for name in ("exact", "apply", "cases") for h in names)
    yield from (f"intro x{len(names)}", f"intros y{len(names)}")
    yield f"have n{len(names)} : {show(random_formula(rng, 2))}"


def valid(model, goals):
    return all(follows(model, [f for _, f in goal.hypotheses], goal.target) for goal in goals)


def decided(goals):
    return all(provable([f for _, f in goal.hypotheses], goal.target) for goal in goals)


@pytest.mark.parametrize("seed", range(4))
def test_accepted_tactics_are_sound(seed):
    """By the decision procedure, and in Kripke models, which share nothing with it.

    Where the goals that a tactic leaves hold, the goal before holds; in each model by itself.
    """
    rng, accepted = random.Random(seed), dict.fromkeys(TACTICS, 0)
    for _ in range(80):
        goals = opened(Formula("->", (random_formula(rng, 2), random_formula(rng, 2))))
        for _ in range(8):
            states, models = [], rng.sample(MODELS, 5)
            for tactic in tactics_for(rng, goals[0]):
                try:
                    after = run_tactic(goals, tactic)
                except TacticError:
                    continue
                new = after[: len(after) - len(goals) + 1]
                trace = f"{show_goals(goals)}\n{tactic}\n{show_goals(after)}"
                assert after[len(new) :] == goals[1:], trace
                assert decided(goals[:1]) or not decided(new), trace
                for model in models:
                    assert valid(model, goals[:1]) or not valid(model, new), trace
                accepted[tactic.split()[0]] += 1
                states.append(after)
            goals = rng.choice(states)
            if not goals:
                break
    assert min(accepted.values()) > 0, accepted


def test_a_proof_takes_every_provable_statement_to_the_end():
    """So the tactics are complete, as far as the search for a proof gets."""
    rng, count = random.Random(0), 0
    for _ in range(400):
        formula = random_formula(rng, 3)
        proof = short_proof(formula, most=20)
        if provable((), formula):
            count += 1
            assert goals_after(show(formula), *proof) == ()
        else:
            assert proof is None
    assert count > 50


def test_a_short_proof_is_found_first():
    assert short_proof(parse_formula("a -> a")) == ("intros", "assumption")
    assert short_proof(parse_formula("a -> b")) is None
    assert short_proof(parse_formula("(a -> b) -> (b -> c) -> a -> c"), most=3) is None
    (text,) = statements(0, 1)
    assert len(short_proof(parse_formula(text))) >= 3
