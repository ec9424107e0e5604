"""Measured costs of episodes' rows, and the choices based on them."""

import math

import pytest

from jrl.sampling.row_costs import RowCosts, Timings, WaitCosts, WaitingPlace, cheapest


def test_the_first_of_each_shape_is_not_timed():
    timings = Timings()
    assert [timings.due("a"), timings.due("b"), timings.due("a")] == [False, False, True]
    for size in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        timings.record(size, 0.5 + 0.25 * size)
    assert timings.seconds(10) == pytest.approx(3.0)
    assert sum(timings.due("a") for _ in range(160)) == 10  # now and then


def costs(slots=8):
    row_costs = RowCosts(slots)
    for _ in range(3):
        row_costs.leaving.record(1, 0.01)
        row_costs.returning.record(1, 0.02)
        row_costs.reading.record(100, 0.1)
        row_costs.reading.record(200, 0.2)
    return row_costs


def test_a_wait_costs_what_was_measured():
    row_costs = costs()
    for seconds in (1.0, 2.0, 6.0):
        row_costs.record_wait(seconds)
    wait = row_costs.wait(1.5, tokens=300)
    assert wait == pytest.approx(((0.5 + 4.5) / 2, 8 * 0.03, 8 * 0.3))
    assert [row_costs.wait_left(x) for x in (0.0, 1.0, 2.0)] == pytest.approx([3.0, 3.0, 4.0])
    assert row_costs.wait_left(7.0) == 7.0  # longer than any before


def test_the_choice_changes_with_wait_and_length():
    row_costs = costs()
    row_costs.record_wait(0.1)
    assert cheapest(row_costs.wait(0.0, tokens=300)) == WaitingPlace.HELD
    row_costs = costs()
    row_costs.record_wait(10.0)
    assert cheapest(row_costs.wait(0.0, tokens=300)) == WaitingPlace.PARKED
    # Not dropped, whose bits differ.
    assert cheapest(row_costs.wait(0.0, tokens=10)) == WaitingPlace.PARKED
    full = row_costs.wait(0.0, tokens=300)._replace(parked=math.inf)
    assert cheapest(full) == WaitingPlace.DROPPED
    assert cheapest(full._replace(dropped=24.0)) == WaitingPlace.HELD


def test_what_was_never_measured_is_tried_but_reading():
    row_costs = RowCosts(4)
    assert row_costs.wait(0.0, tokens=9) == (0.0, 0.0, math.inf)
    assert cheapest(row_costs.wait(0.0, tokens=9)) == WaitingPlace.HELD
    assert cheapest(row_costs.wait(0.2, tokens=9)) == WaitingPlace.PARKED
    assert cheapest(WaitCosts(1.0, math.inf, math.inf)) == WaitingPlace.HELD


def test_chunks_may_be_as_idle_as_half_a_return_to_the_host():
    row_costs = RowCosts(8)
    assert row_costs.idle_steps() == 0
    for _ in range(3):
        row_costs.steps.record(1, 0.01)
        row_costs.returns.record(1, 0.02)
    assert row_costs.idle_steps() == 8
