"""Who gets a slot, and what becomes of a row that waits, with rows that only note what is done."""

import collections
import time

import numpy as np
import pytest

from jrl.envs.episode import Episode
from jrl.serving.row_costs import Place, RowCosts, cheapest
from jrl.train.host_seats import Seats
from jrl.types import Prompt


class Rows:
    """Stands in for ``EpisodeRows``."""

    def __init__(self, slots, parked):
        self.slots, self.parked, self.costs, self.done = slots, parked, RowCosts(slots), []

    def admit(self, starts):
        self.done += [("admit", row, start.tokens, start.member) for row, start in starts.items()]
        return sum(len(start.tokens) for start in starts.values())

    def extend(self, answers):
        self.done += [("extend", row, list(m.tokens), m.limit) for row, m in answers.items()]

    def park(self, row):
        self.done.append(("park", row))
        return f"row {row}"

    def resume(self, row, parked):
        self.done.append(("resume", row, parked))

    def halt(self, row):
        self.done.append(("halt", row))


def seats_of(slots=1, parked=1, choose=cheapest):
    rows, counts = Rows(slots, parked), collections.defaultdict(float)
    return Seats(rows, choose, counts), rows, counts


def episode(member, opening=(1, 2)):
    made = Episode(0, member, Prompt(0, "", np.zeros(0, np.int32), None), 5)
    made.open(None, np.array(opening, np.int32), 0)
    return made


def say(seats, one, *tokens):
    """The policy ends a turn, and the environment is asked."""
    one.grow(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), 0)
    one.end_turn()
    one.call = 1
    seats.asked(one)


def hear(seats, one, ids, limit=30):
    """The environment answers."""
    one.call = None
    one.answer(ids, 0)
    seats.answered(one, ids, limit)


@pytest.mark.parametrize("place", [Place.PARKED, Place.DROPPED])
def test_a_row_leaves_and_returns(place):
    seats, rows, counts = seats_of(choose=lambda wait: place)
    first, second = episode(0), episode(1)
    seats.add(first, 9)
    seats.fill()
    say(seats, first, 3, 4)
    seats.fill()
    assert seats.slots == [first]  # nobody else could use the slot
    seats.add(second, 9)
    seats.fill()
    assert (seats.slots, first.row) == ([second], None)
    assert list(seats.waiting()) == [second, first]
    say(seats, second, 6)
    rows.done.clear()
    hear(seats, first, [7, 8])
    assert first not in list(seats.waiting())  # its time stands still
    seats.fill()
    assert seats.slots == [first]
    assert counts[place.value] == 2
    if place == Place.PARKED:
        assert rows.done == [("park", 0), ("resume", 0, "row 0"), ("extend", 0, [7, 8], 30)]
        assert (counts["read_tokens"], counts["reread_tokens"]) == (2 + 2 + 2, 0)
    else:
        again = [3, 4, 7, 8]
        assert rows.done == [("admit", 0, (1, 2), 0), ("extend", 0, again, 30)]
        assert (counts["read_tokens"], counts["reread_tokens"]) == (2 + 2 + 2 + 4, 4)


def test_a_row_that_is_held_gets_its_answer_where_it_is():
    seats, rows, counts = seats_of(choose=lambda wait: Place.HELD)
    first, second = episode(0), episode(1)
    seats.add(first, 9)
    seats.fill()
    seats.add(second, 9)
    say(seats, first, 3)
    seats.fill()
    assert seats.slots == [first]
    assert not seats.running
    assert seats.new == 1
    hear(seats, first, [7])
    seats.fill()
    assert seats.running
    assert rows.done[-1] == ("extend", 0, [7], 30)
    assert not counts["parked"] + counts["dropped"]


def test_no_more_rows_are_parked_than_there_is_room_for():
    seats, _rows, counts = seats_of(parked=1, choose=lambda wait: Place.PARKED)
    three = [episode(i) for i in range(3)]
    for one in three:
        seats.add(one, 9)
    seats.fill()
    say(seats, three[0], 3)
    seats.fill()
    say(seats, three[1], 3)
    seats.fill()
    assert seats.slots == [three[1]]  # it stays, though the third is ready
    hear(seats, three[0], [7])
    seats.fill()  # the one that returns makes the room that the other takes
    assert seats.slots == [three[0]]
    assert counts["parked"] == 2


def test_those_with_the_fewest_turns_come_first():
    seats, rows, _counts = seats_of(slots=1, parked=3, choose=lambda wait: Place.PARKED)
    old, young, new = (episode(i) for i in range(3))
    seats.add(old, 9)
    seats.fill()
    say(seats, old, 3)
    seats.add(young, 9)
    seats.fill()
    say(seats, young, 3)
    hear(seats, old, [7])
    seats.add(new, 9)
    seats.fill()
    assert seats.slots == [new]
    seats.remove(new)
    assert rows.done[-1] == ("halt", 0)
    hear(seats, young, [7])
    seats.fill()
    assert seats.slots == [old]  # as many turns as the other, and ready before it


def test_an_episode_that_ends_while_it_is_away_is_forgotten():
    seats, _rows, _counts = seats_of(choose=lambda wait: Place.PARKED)
    first, second, third = (episode(i) for i in range(3))
    seats.add(first, 9)
    seats.fill()
    say(seats, first, 3)
    seats.add(second, 9)
    seats.fill()
    seats.remove(first)
    assert list(seats.waiting()) == [second]
    say(seats, second, 4)
    seats.add(third, 9)
    seats.fill()  # there is room again
    assert seats.slots == [third]


def test_the_row_with_the_longest_wait_makes_room(monkeypatch):
    seats, rows, _counts = seats_of(slots=2, parked=2)
    for seconds in (0.5, 0.5, 9.0):
        rows.costs.record_wait(seconds)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, second, third = (episode(i) for i in range(3))
    seats.add(first, 9)
    seats.add(second, 9)
    seats.fill()
    say(seats, first, 3)
    clock[0] += 1.0  # the first is one of the slow ones
    say(seats, second, 3)
    seats.add(third, 9)
    seats.fill()
    assert first.row is None
    assert second.row is not None
    began = first.began
    clock[0] += 1.0
    hear(seats, first, [7])
    clock[0] += 5.0  # without a slot
    seats.fill()
    assert second.row is None  # parked in turn
    assert first.row is not None
    assert (first.began, first.turn_began) == (began + 5.0, clock[0])
