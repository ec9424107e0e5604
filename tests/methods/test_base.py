from types import SimpleNamespace

import numpy as np
import pytest

from jrl.collect.groups import PlacedGroups
from jrl.errors import UserError
from jrl.methods import find_method
from jrl.methods.base import Method, Schedule
from jrl.methods.definition import paper_of, published, variant
from jrl.methods.domains import Count, NonNegative
from jrl.methods.edit import differing, refill
from jrl.methods.plan import Plan, also
from jrl.objectives import aggregates, ratios, transforms
from jrl.types import Objective, StopReason
from jrl.types.asks import BASELINE

PLAIN = Objective(transforms.identity(), ratios.reinforce(), aggregates.token_mean)


def baselines(count):
    """A first draw with greedy members."""
    return lambda asks, view: (*asks, also(asks, count, use=BASELINE))


@published
def sample_method(strength: NonNegative, rounds: Count = 1) -> Method:
    """Says what it does.

    "A Title" (a talk) and more, after "Another Title" (arXiv:2501.00001).
    """
    return Method(PLAIN, schedule=Schedule(rounds), plan=Plan(baselines(int(strength))))


def test_a_published_method_describes_itself():
    description = sample_method.describe()
    assert description["name"] == "sample_method"
    assert (description["paper"], description["arxiv"], description["family"]) == (
        "A Title",
        None,
        "test_base",
    )
    assert description["summary"] == "Says what it does."
    assert description["seams"] == ["objective", "plan"]
    strength, rounds = description["coefficients"]
    assert strength == {
        "name": "strength",
        "default": None,
        "required": True,
        "domain": "a number of at least 0",
    }
    assert rounds["default"] == 1
    assert not rounds["required"]


def test_coefficients_reach_the_method():
    method = sample_method(strength=2.0, rounds=3)
    assert (method.draw.baseline_members, method.schedule.epochs) == (2, 3)
    assert method.seams == ("objective", "plan", "schedule")


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({}, "sample_method needs strength; give a number of at least 0"),
        ({"strength": -1.0}, "sample_method.strength = -1.0; give a number of at least 0"),
        ({"strength": float("nan")}, "strength = nan"),
        ({"strength": float("inf")}, "strength = inf"),
        ({"strength": True}, "strength = True"),
        ({"strength": 1, "rounds": 1.5}, "rounds = 1.5; give a whole number of at least 1"),
        ({"strength": 1, "rounds": None}, "rounds = None"),
        ({"strength": 1, "round": 2}, "did you mean 'rounds'? choose from rounds, strength"),
    ],
)
def test_wrong_coefficients_are_named_with_their_domain(coefficients, message):
    with pytest.raises(UserError) as error:
        sample_method(**coefficients)
    assert message in str(error.value)


def test_an_argument_without_a_domain_is_refused_when_the_method_is_defined():
    with pytest.raises(TypeError, match="annotate strength with a domain"):

        @published
        def careless(strength: float = 1.0) -> Method:
            return Method(PLAIN)


@variant(sample_method, strength=3.0)
def child(base: Method, rounds: Count, greedy: Count = 2) -> Method:
    """Says how it differs."""
    return base.with_(epochs=rounds * greedy)


def test_a_variant_has_the_coefficients_of_its_base_with_its_own_defaults():
    assert list(child.coefficients) == ["rounds", "greedy", "strength"]
    method = child()
    assert (method.draw.baseline_members, method.schedule.epochs) == (3, 2)
    method = child(strength=1.0, rounds=4, greedy=1)
    assert (method.draw.baseline_members, method.schedule.epochs) == (1, 4)
    with pytest.raises(UserError, match=r"child\.strength = -1"):
        child(strength=-1)
    assert child.describe()["base"] == "sample_method"


def test_a_coefficient_that_means_nothing_to_a_variant_is_not_offered():
    @variant(sample_method, without=("strength",), strength=5.0)
    def fixed(base: Method) -> Method:
        return base

    assert list(fixed.coefficients) == ["rounds"]
    assert fixed().draw.baseline_members == 5
    with pytest.raises(UserError, match="fixed has no such coefficient"):
        fixed(strength=1.0)
    with pytest.raises(TypeError, match="sample_method has no coefficient 'power'"):
        variant(sample_method, power=1.0)


@pytest.mark.parametrize(
    ("method", "name", "hint"),
    [
        ("grpo", "beta", "did you mean 'kl_coef'"),
        ("grpo", "epsilon_high", "did you mean 'clip_high'"),
        ("grpo", "loss_type", "set method, such as dapo"),
        ("dpo", "loss_type", "did you mean 'loss'"),
    ],
)
def test_a_coefficient_by_the_name_of_another_library_is_told_this_ones(method, name, hint):
    with pytest.raises(UserError, match=hint):
        find_method(method).check("objective", {name: 0.1})


@pytest.mark.parametrize(
    ("docstring", "paper"),
    [
        (
            'Does it.\n\n"A Title: and\n    More" (arXiv:2501.12345), with',
            ("A Title: and More", "2501.12345"),
        ),
        (
            'X. "It (Not) Is" (arXiv:2210.01241) "B" (arXiv:2501.00001)',
            ("It (Not) Is", "2210.01241"),
        ),
        ('X. "A Talk" (Somebody, 1992), not on arXiv.', ("A Talk", None)),
    ],
)
def test_the_paper_is_the_first_that_the_docstring_names(docstring, paper):
    assert paper_of(docstring) == paper
    assert paper_of("Says nothing.") is None


def placed(rewards, members):
    """Groups with these rewards, as an edit sees them."""
    m, size = members.shape
    stop = np.where(members, StopReason.STOP_TOKEN, StopReason.FAILED).astype(np.int32)
    rollout = SimpleNamespace(stop=stop, baseline=np.zeros((m, size), bool))
    zeros = np.zeros((m, size), np.int32)
    scores = np.asarray(rewards, np.float32)[:, :, None]
    labels = ({}, {}, {}, np.arange(m), np.arange(m))
    ones = np.ones(1, np.float32)
    return PlacedGroups(rollout, scores, ones, *labels, zeros, zeros == 0, zeros)


def test_refill_keeps_groups_whose_live_rewards_differ_and_those_with_a_nan():
    rewards = np.array([[1, 1, 0], [1, 0, 9], [1, 5, 5], [0.1, 0.1, 0.1], [np.nan, 1, 1]])
    members = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    groups = placed(rewards, members)
    assert differing(groups, 1e-6).tolist() == [False, True, False, False, True]
    (drop,) = refill(max_rounds=4)["edits"]
    left, _ = drop.apply((), groups, None)
    assert left.members().any(1).tolist() == [False, True, False, False, True]
    plan = refill(max_rounds=4)["plan"]
    assert (plan.rounds, plan.prompts(8)) == (3, 24)


def test_refill_compares_the_deviation_with_its_bound():
    groups = placed(np.array([[0.0, 1.0]]), np.ones((1, 2), bool))
    assert differing(groups, 0.4).tolist() == [True]
    assert differing(groups, 0.6).tolist() == [False]


def test_refill_takes_no_rounding_of_equal_rewards_for_a_difference():
    """In float32 the mean of 16 rewards of 13.7 is another number than each of them."""
    points = np.array([0.7, 13.7, 33.3, 100.1, 1e20])[:, None]
    groups = placed(np.broadcast_to(points, (5, 16)), np.ones((5, 16), bool))
    assert not differing(groups, 1e-6).any()


def test_hooks_that_are_not_filled_do_nothing():
    method = Method(PLAIN)
    groups = placed(np.ones((3, 2)), np.ones((3, 2), bool))
    assert method.rewards(groups, None) is groups
    assert method.seams == ("objective",)
