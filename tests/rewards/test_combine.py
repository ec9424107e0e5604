"""Combinators: what each makes of its parts, with and without an opinion, on NumPy and in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards.combine import (
    COMBINATORS,
    Columns,
    columns,
    combined,
    in_order,
    make_combined,
)

NAN = np.nan
# four members: all opinions, a low first part, no opinion of the first, no opinion at all
POINTS = [[1.0, 0.5], [0.0, 2.0], [NAN, 0.25], [NAN, NAN]]


def of(name, options=None, points=POINTS, **more):
    c = columns(points)._replace(names=("a", "b"), **more)
    return COMBINATORS[name](c, **(options or {}))[0]


CASES = [
    ("sum", {}, [1.5, 2.0, 0.25, NAN]),
    ("sum", {"weights": [2.0, 1.0]}, [2.5, 2.0, 0.25, NAN]),
    ("mean", {}, [0.75, 1.0, 0.25, NAN]),
    ("product", {}, [0.5, 0.0, 0.25, NAN]),
    ("min", {}, [0.5, 0.0, 0.25, NAN]),
    ("max", {}, [1.0, 2.0, 0.25, NAN]),
    ("gate", {}, [0.5, 0.0, NAN, NAN]),
    ("gate", {"least": 0.0, "otherwise": -1.0}, [0.5, 2.0, NAN, NAN]),
    ("veto", {"below": 0.5, "points": -1.0}, [0.5, -1.0, 0.25, NAN]),
    ("veto", {"below": 1.0, "points": -1.0}, [0.5, -1.0, 0.25, NAN]),  # 1 is not below it
    ("sequence", {}, [1.5, 0.0, 0.25, NAN]),
    ("sequence", {"weights": [2.0, 1.0]}, [2.5, 0.0, 0.25, NAN]),
    ("clip", {"low": 0.3, "high": 1.6}, [1.5, 1.6, 0.3, NAN]),
    ("threshold", {"least": 1.0}, [1.0, 1.0, 0.0, NAN]),
    ("threshold", {"least": 1.5}, [1.0, 1.0, 0.0, NAN]),
    ("first", {}, [1.0, 0.0, 0.25, NAN]),
    ("saturate", {"limit": 2.0}, [*(2 * np.tanh([0.75, 1.0, 0.125])), NAN]),
    ("rank", {}, [0.5, 1.0, 0.0, NAN]),
    ("rank", {"weights": [1.5, 1.0]}, [0.75, 0.75, 0.0, NAN]),  # equals: half a win
    ("bounded", {"weights": [1.0, -1.0]}, [*(1 / (1 + np.exp([-0.5, 2.0]))), NAN, NAN]),
]


@pytest.mark.parametrize(("name", "options", "expected"), CASES)
def test_a_combinator_on_numpy_and_within_a_compiled_program(name, options, expected):
    np.testing.assert_allclose(of(name, options), expected, rtol=1e-6)

    @jax.jit
    def traced(points, members):
        return COMBINATORS[name](Columns(points, members, ("a", "b")), **options)

    combined = traced(jnp.asarray(POINTS)[None], jnp.ones((1, 4), bool))[0]
    np.testing.assert_allclose(combined, expected, rtol=1e-5)


def test_normalised_over_its_group_and_over_the_batch():
    values = np.array([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])
    members = np.array([[True, True, True], [True, True, False]])
    c = Columns(values[..., None], members)
    normalised = COMBINATORS["normalise"](c, eps=0.0 + 1e-9)
    np.testing.assert_allclose(
        normalised[0], (values[0] - 3) / np.std(values[0], ddof=1), rtol=1e-6
    )
    np.testing.assert_allclose(normalised[1], 0, atol=1e-6)
    live = values[members]
    over_all = COMBINATORS["normalise"](c, over="batch", eps=1e-9)
    np.testing.assert_allclose(over_all, (values - live.mean()) / np.std(live, ddof=1), rtol=1e-6)


def test_a_rank_is_among_members_and_weights_are_one_for_each_part():
    c = Columns(np.array([[[1.0], [3.0], [2.0]]]), np.array([[True, False, True]]), ("a",))
    np.testing.assert_array_equal(COMBINATORS["rank"](c), [[0.0, NAN, 1.0]])
    for name in ("sum", "sequence", "clip"):
        for weights in ([1.0], [1.0, 1.0, 1.0]):
            with pytest.raises(UserError, match=rf"weights has {len(weights)} numbers for 2 parts"):
                make_combined("p", name, ["a", "b"], {"weights": weights})
        with pytest.raises(UserError, match=r"weights = \[0.0, 0.0\], of which none counts"):
            make_combined("p", name, ["a", "b"], {"weights": [0.0, 0.0]})


def test_what_a_row_of_the_data_says():
    rows = [{"kind": "math", "w": 2.0}, {"kind": "code", "w": 0.5}, {"kind": "?"}]
    c = Columns(np.array([[[1.0, 3.0]], [[1.0, 3.0]], [[1.0, 3.0]]]), np.ones((3, 1), bool),
                ("right", "tests"), rows)  # fmt: skip
    cases = {"math": "right", "code": "tests"}
    chosen = COMBINATORS["by_kind"](c, column="kind", cases=cases)
    np.testing.assert_array_equal(chosen[:, 0], [1.0, 3.0, NAN])
    chosen = COMBINATORS["by_kind"](c, column="kind", cases=cases, others="tests")
    np.testing.assert_array_equal(chosen[:, 0], [1.0, 3.0, 3.0])
    np.testing.assert_array_equal(COMBINATORS["row_weight"](c, column="w")[:, 0], [8.0, 2.0, NAN])


def test_a_schedule_is_linear_between_its_steps():
    for step, factor in ((0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (99, 0.5)):
        c = columns([[2.0]])._replace(step=step)
        scheduled = COMBINATORS["schedule"](c, steps=[10, 20], factors=[1.0, 0.5])
        assert scheduled[0, 0] == pytest.approx(2 * factor)


def test_parts_of_parts_are_made_in_order():
    last = make_combined("last", "sum", ["middle", "x"], {})
    middle = make_combined("middle", "product", ["x", "y"], {})
    x, y = np.array([[2.0, 3.0]]), np.array([[5.0, NAN]])
    every = combined(in_order([last, middle]), {"x": x, "y": y}, np.ones((1, 2), bool))
    np.testing.assert_array_equal(every["last"], [[12.0, 6.0]])
    circle = [make_combined("a", "sum", ["b"], {}), make_combined("b", "sum", ["a"], {})]
    with pytest.raises(UserError, match=r"rewards\.a, rewards\.b: each is made of the others"):
        in_order(circle)


@pytest.mark.parametrize(
    ("combine", "of", "options", "message"),
    [
        ("sun", ["a"], {}, r"rewards\.p\.combine = 'sun'; did you mean 'sum'"),
        ("sum", [], {}, r"has nothing to combine; name parts in rewards\.p\.of"),
        ("sum", ["a"], {"weights": [1.0, 2.0]}, r"rewards\.p: weights has 2 numbers for 1 parts"),
        ("gate", ["a", "b"], {"leats": 1.0}, "leats"),
        ("schedule", ["a"], {"steps": [2, 1], "factors": [0.0, 1.0]}, "rising steps"),
        ("normalise", ["a"], {"over": "all"}, "over = 'all'; choose from batch, group"),
        ("sum", ["a"], {"weights": [NAN]}, r"weights = \[nan\]; write finite numbers"),
        ("saturate", ["a"], {"limit": 0.0}, r"limit = 0\.0; write a number above 0"),
        ("clip", ["a"], {"low": 1.0, "high": 0.0}, r"low = 1\.0, high = 0\.0"),
        ("clip", ["a"], {"low": NAN}, r"low = nan, high = inf"),
        ("schedule", ["a"], {"steps": [1], "factors": [NAN]}, r"factors = \[nan\]"),
        ("by_kind", ["a"], {"column": "k", "cases": {"m": "z"}}, "cases names z, and of has a"),
    ],
)
def test_what_cannot_be_combined_is_said(combine, of, options, message):
    with pytest.raises(UserError, match=message):
        make_combined("p", combine, of, options)


def test_par_is_bounded_and_centred_at_the_references():
    rows = [{"ref": 1.0}, {"ref": [0.0, 2.0]}, {}]
    points = np.array([[[1.0], [3.0]], [[1.0], [NAN]], [[0.0], [0.0]]])
    c = Columns(points, np.ones((3, 2), bool), ("s",), rows)
    bounded = COMBINATORS["bounded"](c, column="ref")
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    by_hand = (sigmoid(1.0) + sigmoid(-1.0)) / 2
    np.testing.assert_allclose(
        bounded, [[0.5, sigmoid(2.0)], [by_hand, NAN], [NAN, NAN]], rtol=1e-6
    )


def test_a_cosine_shifts_from_form_to_content():
    c = columns([[1.0, 0.2, 0.4], [0.0, 0.5, NAN], [NAN, 1.0, 1.0], [1.0, NAN, NAN]])
    names = ["tags", "steps", "whole"]
    combine = make_combined("both", "cosine_shift", names, {"steps": 40, "last": 0.1}).combine
    for step in (0, 10, 25, 40, 99):
        w = 0.1 + 0.9 * (1 + np.cos(np.pi * min(step / 40, 1))) / 2
        expected = [[w * 1 + (1 - w) * 0.3, (1 - w) * 0.5, NAN, NAN]]
        for arrays in (c, c._replace(points=jnp.asarray(c.points))):
            combined = combine(arrays._replace(step=step))
            np.testing.assert_allclose(combined, expected, atol=1e-6)
    with pytest.raises(UserError, match="rewards.both: steps = 0 of 3 parts"):
        make_combined("both", "cosine_shift", names, {"steps": 0}).combine(c)


def test_group_contrast_pays_a_behaviour_that_helps():
    behaviour = [
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 0.0, 1.0, 0.0],
    ]
    right = [[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    c = Columns(np.stack([behaviour, right], axis=-1), np.ones((4, 4), bool), ("aux", "right"))
    combined = make_combined("aux", "group_contrast", ["shown", "right"], {}).combine(c)
    expected = [[1, 1, 0, 0], [-1, 0, 0, 0], [0] * 4, [0] * 4]
    np.testing.assert_array_equal(combined, expected)
    # a difference of 1/2 is within eps, one of -2/3 is not
    wide = make_combined("aux", "group_contrast", ["shown", "right"], {"eps": 0.5}).combine(c)
    np.testing.assert_array_equal(wide, [[0] * 4, expected[1], [0] * 4, [0] * 4])
    # the one that was right without it is gone: in the second group nothing is better or worse
    left = np.ones((4, 4), bool)
    left[1, 1:3] = False
    combined = make_combined("aux", "group_contrast", ["shown", "right"], {}).combine(
        c._replace(members=left)
    )
    np.testing.assert_array_equal(combined, [expected[0], [0] * 4, [0] * 4, [0] * 4])
