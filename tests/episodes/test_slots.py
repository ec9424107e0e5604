"""Assignment of slots, and treatment of waiting rows, with rows that only record calls."""

import collections
import time

import numpy as np
import pytest

from jrl.episodes.episode import EnvCall, EnvCallKind, Episode, Sampled
from jrl.episodes.slots import DecodeSlots
from jrl.sampling.row_costs import RowCosts, WaitingPlace, cheapest
from jrl.types import Prompt


class Rows:
    """Stands in for ``Rows``."""

    def __init__(self, slots, suspended):
        self.slots, self.max_suspended = slots, suspended
        self.costs, self.done = RowCosts(slots), []

    def admit(self, starts):
        self.done += [("admit", row, start.tokens, start.member) for row, start in starts.items()]
        return sum(len(start.tokens) for start in starts.values())

    def extend(self, answers):
        self.done += [("extend", row, list(m.tokens), m.limit) for row, m in answers.items()]

    def suspend(self, row):
        self.done.append(("suspend", row))
        return f"row {row}"

    def resume(self, row, suspended, start=None):
        member = () if start is None else (start.member,)
        self.done.append(("resume", row, suspended, *member))

    def fork(self, row, start, length):
        self.done.append(("fork", row, start.member, length, start.limit))
        return f"fork of row {row}"

    def halt(self, row):
        self.done.append(("halt", row))


def table_of(slots=1, parked=1, choose=cheapest):
    rows, counts = Rows(slots, parked), collections.defaultdict(float)
    return DecodeSlots(rows, choose, counts), rows, counts


def episode(member, opening=(1, 2)):
    opened_episode = Episode(0, member, Prompt(0, "", np.zeros(0, np.int32), None), 5)
    opened_episode.open(None, np.array(opening, np.int32), 0)
    return opened_episode


def say(table, one, *tokens):
    """The policy ends a turn, and the environment is asked."""
    one.grow(Sampled(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), 0))
    one.end_turn()
    now = time.monotonic()
    one.call = EnvCall(1, EnvCallKind.STEP, now, now + 9, one)


def hear(table, one, ids, limit=30):
    """The environment answers."""
    one.call = None
    one.answer(ids, 0)
    table.resume(one, limit)


@pytest.mark.parametrize("place", [WaitingPlace.PARKED, WaitingPlace.DROPPED])
def test_a_row_leaves_and_returns(place):
    table, rows, counts = table_of(choose=lambda wait: place)
    first, second = episode(0), episode(1)
    table.add(first, 9)
    table.fill()
    say(table, first, 3, 4)
    table.fill()
    assert table.slots == [first]  # nobody else could use the slot
    table.add(second, 9)
    table.fill()
    assert (table.slots, first.row_state.row) == ([second], None)
    assert list(table.waiting()) == [second, first]
    say(table, second, 6)
    rows.done.clear()
    hear(table, first, [7, 8])
    assert first not in list(table.waiting())  # its time stands still
    table.fill()
    assert table.slots == [first]
    assert counts[place.value] == 2
    if place == WaitingPlace.PARKED:
        assert rows.done == [("suspend", 0), ("resume", 0, "row 0"), ("extend", 0, [7, 8], 30)]
        assert (counts["read_tokens"], counts["reread_tokens"]) == (2 + 2 + 2, 0)
    else:
        again = [3, 4, 7, 8]
        assert rows.done == [("admit", 0, (1, 2), 0), ("extend", 0, again, 30)]
        assert (counts["read_tokens"], counts["reread_tokens"]) == (2 + 2 + 2 + 4, 4)


def test_a_row_that_is_held_gets_its_answer_where_it_is():
    table, rows, counts = table_of(choose=lambda wait: WaitingPlace.HELD)
    first, second = episode(0), episode(1)
    table.add(first, 9)
    table.fill()
    table.add(second, 9)
    say(table, first, 3)
    table.fill()
    assert table.slots == [first]
    assert not table.running
    assert table.new == 1
    hear(table, first, [7])
    table.fill()
    assert table.running
    assert rows.done[-1] == ("extend", 0, [7], 30)
    assert not counts["parked"] + counts["dropped"]


def test_no_more_rows_are_parked_than_there_is_room_for():
    table, _rows, counts = table_of(parked=1, choose=lambda wait: WaitingPlace.PARKED)
    three = [episode(i) for i in range(3)]
    for one in three:
        table.add(one, 9)
    table.fill()
    say(table, three[0], 3)
    table.fill()
    say(table, three[1], 3)
    table.fill()
    assert table.slots == [three[1]]  # it stays, though the third is ready
    hear(table, three[0], [7])
    table.fill()  # the one that returns makes the room that the other takes
    assert table.slots == [three[0]]
    assert counts["parked"] == 2


def test_those_with_the_fewest_turns_come_first():
    table, rows, _counts = table_of(slots=1, parked=3, choose=lambda wait: WaitingPlace.PARKED)
    old, young, new = (episode(i) for i in range(3))
    table.add(old, 9)
    table.fill()
    say(table, old, 3)
    table.add(young, 9)
    table.fill()
    say(table, young, 3)
    hear(table, old, [7])
    table.add(new, 9)
    table.fill()
    assert table.slots == [new]
    table.remove(new)
    assert rows.done[-1] == ("halt", 0)
    hear(table, young, [7])
    table.fill()
    assert table.slots == [old]  # as many turns as the other, and ready before it


def test_an_episode_that_ends_while_it_is_away_is_forgotten():
    table, _rows, _counts = table_of(choose=lambda wait: WaitingPlace.PARKED)
    first, second, third = (episode(i) for i in range(3))
    table.add(first, 9)
    table.fill()
    say(table, first, 3)
    table.add(second, 9)
    table.fill()
    table.remove(first)
    assert list(table.waiting()) == [second]
    say(table, second, 4)
    table.add(third, 9)
    table.fill()  # there is room again
    assert table.slots == [third]


def test_the_row_with_the_longest_wait_makes_room(monkeypatch):
    table, rows, _counts = table_of(slots=2, parked=2)
    for seconds in (0.5, 0.5, 9.0):
        rows.costs.record_wait(seconds)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, second, third = (episode(i) for i in range(3))
    table.add(first, 9)
    table.add(second, 9)
    table.fill()
    say(table, first, 3)
    clock[0] += 1.0  # the first is one of the slow ones
    say(table, second, 3)
    table.add(third, 9)
    table.fill()
    assert first.row_state.row is None
    assert second.row_state.row is not None
    start = first.clock.began
    clock[0] += 1.0
    hear(table, first, [7])
    clock[0] += 5.0  # without a slot
    table.fill()
    assert second.row_state.row is None  # parked in turn
    assert first.row_state.row is not None
    assert (first.clock.began, first.clock.turn_began) == (start + 5.0, clock[0])


@pytest.mark.parametrize("room", [1, 0])
def test_a_branch_begins_with_a_copy_where_there_is_room(room):
    table, rows, counts = table_of(slots=2, parked=room)
    source, branch = episode(0), Episode(0, 3, Prompt(0, "", np.zeros(0, np.int32), None), 5)
    table.add(source, 9)
    table.fill()
    say(table, source, 3, 4)
    hear(table, source, [7, 8])
    table.fill()
    say(table, source, 6)
    source.branch_off(branch)
    rows.done.clear()
    table.fork(branch, source, 12)
    table.add(branch, 12)
    table.fill()
    assert table.slots[branch.row_state.row] is branch
    row = branch.row_state.row
    if room:  # rewound to the turn's first token, and nothing is read
        fork = ("fork", source.row_state.row, 3, 4, 12)
        assert rows.done == [fork, ("resume", row, f"fork of row {source.row_state.row}")]
        assert counts["reread_tokens"] == 0
    else:  # prompt, turn and answer, all of which the source has read
        past = [3, 4, 7, 8]
        assert rows.done == [("admit", row, (1, 2), 3), ("extend", row, past, 12)]
        assert counts["reread_tokens"] == 2 + 4


def test_a_branch_that_ends_before_it_begins_leaves_room():
    table, rows, _ = table_of(slots=1, parked=1)
    source, branch = episode(0), Episode(0, 1, Prompt(0, "", np.zeros(0, np.int32), None), 5)
    table.add(source, 9)
    table.fill()
    say(table, source, 3)
    hear(table, source, [7])
    table.fill()
    say(table, source, 6)
    source.branch_off(branch)
    table.fork(branch, source, 12)
    table.remove(branch)
    source.branch_off(branch)
    table.fork(branch, source, 12)
    assert [step[0] for step in rows.done].count("fork") == 2
