"""Trip counts of loops, against XLA's own and against programs without loops."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jrl.plan.costs import program_costs
from jrl.plan.hlo import parse_program
from jrl.plan.loops import computation_runs

N = 16
PRODUCT = 2 * N**3


def flops(text):
    return sum(c.runs * c.flops for c in program_costs(text, (1,)))


def unsaid(text):
    """A program's text without the trip counts that XLA found."""
    return re.sub(r'"known_trip_count":\{"n":"\d+"\},?|"known_\w+":\{[^}]*\},?', "", text)


def loop(start, stop, step, compare=jnp.less):
    """A product for each value of a counter."""

    def function(x):
        def turn(carry):
            i, y = carry
            return i + step, y @ x

        return jax.lax.while_loop(lambda c: compare(c[0], stop), turn, (jnp.int32(start), x))[1]

    return function


def compiled(function, *more):
    return jax.jit(function).lower(jnp.eye(N), *more).compile()


CASES = [
    ((0, 10, 1), 10),
    ((0, 10, 2), 5),
    ((0, 11, 2), 6),
    ((3, 11, 4), 2),
    ((20, 3, -3, jnp.greater), 6),
    ((0, 10, 5, jnp.less_equal), 3),
    ((12, 0, -4, jnp.greater_equal), 4),
    ((0, 12, 3, jnp.not_equal), 4),
    ((5, 5, 1), 0),
]


@pytest.mark.parametrize(("args", "trips"), CASES)
def test_a_counter_is_followed_by_its_step_from_its_start(args, trips):
    text = compiled(loop(*args)).as_text()
    assert flops(unsaid(text)) == trips * PRODUCT


def test_nested_loops_multiply():
    def function(x):
        inner = lambda j, y: y @ x  # noqa: E731
        outer = lambda i, y: jax.lax.fori_loop(2, 9, inner, y) @ x  # noqa: E731
        return jax.lax.fori_loop(1, 6, outer, x)

    text = compiled(function).as_text()
    assert flops(unsaid(text)) == flops(text) == 5 * 8 * PRODUCT


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_a_loop_counts_as_its_twin_without_one_that_xla_counts_itself(unroll):
    """Steps of a scan unrolled in part, all of them, and what XLA's own analysis says of those."""

    def scanned(unroll):
        def turn(y, w):
            return jnp.tanh(y @ w), jnp.sum(y)

        return compiled(lambda x, ws: jax.lax.scan(turn, x, ws, unroll=unroll), WS)

    twin = scanned(12)
    assert not re.search(r" while\(", twin.as_text())
    twin_flops = twin.cost_analysis()["flops"]
    assert twin_flops == pytest.approx(12 * PRODUCT, rel=0.2)  # which counts sums and tanh, too
    assert flops(twin.as_text()) == flops(unsaid(scanned(unroll).as_text())) == 12 * PRODUCT


WS = jnp.ones((12, N, N))


def test_a_bound_that_the_loop_carries_unchanged_is_found_where_it_starts():
    """XLA leaves it so where the bound is an argument of a function that it was made of."""
    text = BOUND.format(start=0, bound=24)
    assert flops(text) == 8 * PRODUCT
    assert flops(BOUND.format(start=-6, bound=24)) == 10 * PRODUCT


def test_of_several_conditions_the_first_to_fail_counts():
    text = BOUND.format(start=0, bound=24)
    several = text.replace("ROOT %lt", "%lt").replace(
        "direction=LT\n",
        "direction=LT\n"
        "  %alive = pred[] get-tuple-element(%q), index=3\n"
        "  ROOT %both = pred[] and(%lt, %alive)\n",
    )
    assert several != text
    assert flops(several) == 8 * PRODUCT
    none = several.replace("and(%lt, %alive)", "and(%alive, %alive)")
    assert flops(none) == PRODUCT  # nothing bounds it: once


def test_an_inner_loop_may_start_at_what_the_outer_one_carries():
    """Where that changes it is taken for 0, the most turns there can be."""

    def function(x):
        inner = lambda j, y: y @ x  # noqa: E731
        outer = lambda i, y: jax.lax.fori_loop(i, 8, inner, y)  # noqa: E731
        return jax.lax.fori_loop(0, 4, outer, x)

    assert flops(unsaid(compiled(function).as_text())) == 4 * 8 * PRODUCT


BOUND = """HloModule jit_f, is_scheduled=true

%next (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %three = s32[] constant(3)
  ROOT %add = s32[] add(%p, %three)
}}

%body (p: (s32[], s32[], f32[16,16], pred[])) -> (s32[], s32[], f32[16,16], pred[]) {{
  %p = (s32[], s32[], f32[16,16]{{1,0}}, pred[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[16,16]{{1,0}} get-tuple-element(%p), index=2
  %alive = pred[] get-tuple-element(%p), index=3
  %on = s32[] fusion(%i), kind=kLoop, calls=%next
  %dot = f32[16,16]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %out = (s32[], s32[], f32[16,16]{{1,0}}, pred[]) tuple(%on, %n, %dot, %alive)
}}

%condition (q: (s32[], s32[], f32[16,16], pred[])) -> pred[] {{
  %q = (s32[], s32[], f32[16,16]{{1,0}}, pred[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %lt = pred[] compare(%j, %m), direction=LT
}}

ENTRY %main (a: f32[16,16], b: pred[]) -> f32[16,16] {{
  %a = f32[16,16]{{1,0}} parameter(0)
  %b = pred[] parameter(1)
  %start = s32[] constant({start})
  %bound = s32[] constant({bound})
  %held = s32[] copy(%bound)
  %init = (s32[], s32[], f32[16,16]{{1,0}}, pred[]) tuple(%start, %held, %a, %b)
  %while = (s32[], s32[], f32[16,16]{{1,0}}, pred[]) while(%init), condition=%condition, body=%body
  ROOT %r = f32[16,16]{{1,0}} get-tuple-element(%while), index=2
}}
"""


def test_every_computation_is_counted_by_its_name():
    runs = computation_runs(parse_program(BOUND.format(start=0, bound=24)))
    assert runs == {"main": 1.0, "body": 8.0, "condition": 8.0}


def test_values_are_followed_through_nested_fusions_in_linear_time():
    """What a fusion makes is used twice: found anew every time, 2^40 evaluations."""
    double = """%double{i} (p: s32[], q: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  %a = s32[] {kind}(%p, %q){calls}
  ROOT %least = s32[] minimum(%a, %a)
}}

"""
    fusions = [double.format(i=0, kind="add", calls="")]
    for i in range(1, 40):
        calls = f", kind=kLoop, calls=%double{i - 1}"
        fusions.append(double.format(i=i, kind="fusion", calls=calls))
    text = BOUND.format(start=0, bound=24)
    step = "%on = s32[] fusion(%i), kind=kLoop, calls=%next"
    deep = "%k = s32[] constant(3)\n  %on = s32[] fusion(%i, %k), kind=kLoop, calls=%double39"
    assert step in text
    head, rest = text.replace(step, deep).split("\n\n", 1)
    assert flops("\n\n".join([head, "".join(fusions) + rest])) == 8 * PRODUCT
