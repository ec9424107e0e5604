"""Launches in a GPU's compiled loops, on a program that XLA compiled for an H100.

``gpu_sampler.hlo`` is of a loop that asks the host and has 16 turns of another one inside: in each
a product behind a conditional, a loop that ends early, and an argmax in the scope of the draw.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jrl.plan.hlo import parse_program
from jrl.plan.kernels import Launches, loop_launches, token_step

PROGRAM = Path(__file__).with_name("gpu_sampler.hlo").read_text()


def step_of(text):
    return token_step(parse_program(text))


def test_launches_of_each_loop_are_counted_with_those_inside():
    outer, inner, threshold = loop_launches(parse_program(PROGRAM))
    assert (outer.trips, inner.trips, threshold.trips) == (None, 16, None)
    assert (outer.inside, threshold.inside) == ((), (outer.body, inner.body))
    assert outer.scope == "jit(sampler)/decode/while"
    # A turn: the halving, and the two kernels of the condition.
    assert threshold.launches == Launches(draw=3, returns=1)
    # The comparison, the product in two kernels (the other branch has one), the sum; the loop of
    # the draw and its argmax; two counters.
    assert inner.launches == Launches(layers=4, draw=4, rest=2, conditionals=1, returns=2)
    # 16 of these, a copy of the counter's start, the condition.
    assert outer.launches == Launches(64, 64, 34, 16, 33)


def test_a_token_step_has_its_share_of_the_loop_around_it():
    step = step_of(PROGRAM)
    assert step == Launches(layers=4, draw=4, rest=2 + 2 / 16, conditionals=1, returns=2 + 1 / 16)
    assert step.total == 10.125


def test_without_a_known_trip_count_every_token_returns_to_the_host():
    step = step_of(PROGRAM.replace("known_trip_count", "unknown"))
    assert step.returns == 3
    assert step.rest == 3  # the condition, too


def test_where_xla_dropped_a_name_those_of_what_is_fused_decide():
    argmax = next(x for x in PROGRAM.splitlines() if "%input_reduce_fusion.2 = " in x)
    assert step_of(PROGRAM.replace(argmax, argmax.split(", metadata=")[0])).draw == 4


def test_a_loop_without_a_name_is_part_of_what_it_reads():
    lines = PROGRAM.replace("attention/add", "draw/add").splitlines()
    lines = [x.split(", metadata=")[0] if "/threshold/" in x else x for x in lines]
    # The sum that it starts from, three launches of a turn, the argmax.
    assert step_of("\n".join(lines)).draw == 5


@pytest.mark.parametrize("line", ["", "  %copy.1 = f32[] copy(%x)\n"])
def test_a_program_without_a_loop_has_no_step_of(line):
    program = f"ENTRY %main (x: f32[]) -> f32[] {{\n  %x = f32[] parameter(0)\n{line}}}\n"
    assert loop_launches(parse_program(program)) == []
    assert step_of(program) is None
