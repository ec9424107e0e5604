"""Which episode is in which decode slot, and where those are that wait for their environments.

A slot never waits for an environment as long as another episode could use it and moving costs less:
the waiting row is parked or dropped, and returns when its answer is there and a slot is free.
Episodes that have taken the fewest turns come first, new ones before all others. So all of a batch
advance together, and few slots are left without an episode at its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, MutableMapping

from jrl.episodes.episode import Episode
from jrl.sampling.admission import RowStart
from jrl.sampling.row_costs import ChoosePlace, WaitCosts, WaitingPlace
from jrl.sampling.rows import More, Rows, SuspendedRow

_ROWS = 1 << 20
"""More than a group has members."""


class EpisodeSlots:
    """The episodes under way, and their rows.

    Args:
      rows: with weights.
      choose: where a row waits whose slot another episode could use.
      counts: adds to "parked" and "dropped", rows that left their slots; "read_tokens", of prompts,
        answers and dropped rows, as often as they are computed; "reread_tokens", of dropped rows.

    Attributes:
      slots: [S], the episode in each slot, or None.
    """

    def __init__(self, rows: Rows, choose: ChoosePlace, counts: MutableMapping[str, float]) -> None:
        self._rows, self._choose, self._counts = rows, choose, counts
        self.slots: list[Episode | None] = [None] * rows.slots
        self._away: dict[Episode, float] = {}  # wait for their environments without a slot
        self._parked: dict[Episode, SuspendedRow] = {}
        self._forked: dict[Episode, SuspendedRow] = {}  # of branches that have not begun
        self._ready: dict[Episode, float] = {}  # could use a slot, and since when
        self._limits: dict[Episode, int] = {}  # of the turns that the ready ones begin
        self._answers: dict[int, More] = {}  # for rows that have stayed in their slots
        self._asked: dict[Episode, float] = {}

    @property
    def running(self) -> bool:
        """Whether the policy speaks in any slot."""
        return any(e is not None and e.call is None for e in self.slots)

    @property
    def new(self) -> int:
        """Episodes that are ready and have had no slot yet."""
        return sum(not e.began for e in self._ready)

    def waiting(self) -> Iterator[Episode]:
        """Those whose time is running: in a slot, or waiting for their environments."""
        yield from [e for e in self.slots if e is not None]
        yield from list(self._away)

    # ------------------------------------------------------------ what happens to episodes

    def add(self, episode: Episode, limit: int) -> None:
        """An episode that can begin, and the completion tokens at which its first turn ends."""
        self._ready[episode], self._limits[episode] = time.monotonic(), limit

    def fork(self, branch: Episode, source: Episode, limit: int) -> None:
        """Keeps the past that a branch begins with, from the row that it leaves.

        Where no more rows may be parked nothing is kept, and the past is read again.

        Args:
          branch: ``add`` it once it can begin.
          source: has stopped in its slot.
          limit: completion tokens at which the first turn of the branch ends.
        """
        if self._copies() < self._rows.max_suspended:
            assert source.row is not None
            self._forked[branch] = self._rows.fork(source.row, _start(branch, limit), branch.length)

    def asked(self, episode: Episode) -> None:
        """Its environment has been asked about the turn that it ended."""
        self._asked[episode] = time.monotonic()

    def answered(self, episode: Episode, ids: list[int], limit: int) -> None:
        """Its environment has answered, and the next turn can begin.

        Args:
          episode: to which the answer has been added.
          ids: of the answer.
          limit: completion tokens at which the turn ends.
        """
        if episode.row is not None:
            self._answers[episode.row] = More(ids, limit)
        else:
            del self._away[episode]
            self.add(episode, limit)

    def restart(self, episode: Episode, limit: int) -> None:
        """Its next context begins, in a row of its own.

        Args:
          episode: to which the answer has been added.
          limit: completion tokens at which the turn ends.
        """
        self.remove(episode)
        self.add(episode, limit)

    def remove(self, episode: Episode) -> None:
        """Forgets an episode that has ended."""
        if episode.row is not None:
            self._rows.halt(episode.row)
            self._answers.pop(episode.row, None)
            self.slots[episode.row] = None
            episode.row = None
        copies = self._parked, self._forked
        tables: tuple[dict, ...] = self._away, self._ready, self._limits, self._asked, *copies
        for table in tables:
            table.pop(episode, None)

    # ------------------------------------------------------------ slots

    def fill(self) -> None:
        """Gives slots to episodes that are ready, and answers to rows that resume."""
        now, answers, self._answers = time.monotonic(), self._answers, {}
        starts: dict[int, RowStart] = {}
        again: dict[int, RowStart] = {}
        free = [row for row, episode in enumerate(self.slots) if episode is None]
        idle: dict[int, WaitCosts] | None = None
        # Stable: of those with the same number of turns, first come, first served.
        for episode in sorted(self._ready, key=lambda e: e.turn):
            if free:
                row = free.pop()
            else:
                idle = self._idle(now) if idle is None else idle
                # What a parked row leaves behind is room for another.
                leaves = episode in self._parked or episode in self._forked
                room = self._copies() - leaves < self._rows.max_suspended
                found = self._vacate(idle, now, room=room)
                if found is None and room:
                    break  # nor for those that come after it
                if found is None:
                    continue
                row = found
            begins = not episode.began
            limit = self._give_slot(episode, row, now)
            if (forked := self._forked.pop(episode, None)) is not None:
                self._rows.resume(row, forked)  # with all of its past
            elif (parked := self._parked.pop(episode, None)) is not None:
                self._rows.resume(row, parked)
                answers[row] = More(_answer(episode), limit)
            elif episode.turn:
                again[row] = _start(episode, limit)
                answers[row] = More(episode.past().tolist(), limit)
                # A branch has the answer from the episode that it left.
                new = 0 if begins else len(_answer(episode))
                read = len(episode.opening) + episode.length - new
                self._counts["reread_tokens"] += read
            else:
                starts[row] = _start(episode, limit)
        if starts | again:
            self._counts["read_tokens"] += self._rows.admit(starts | again)
        if answers:
            self._counts["read_tokens"] += sum(len(more.tokens) for more in answers.values())
            self._rows.extend(answers)

    def _copies(self) -> int:
        """Rows that are kept beside the slots."""
        return len(self._parked) + len(self._forked)

    def _give_slot(self, episode: Episode, row: int, now: float) -> int:
        """Notes who has the slot; the limit of tokens of the turn."""
        self.slots[row], episode.row = episode, row
        # The time in which it could have used a slot and had none is no time of the episode.
        since = self._ready.pop(episode)
        if episode.began:
            episode.began += now - since
        else:
            episode.began = now
        episode.turn_began = now
        return self._limits.pop(episode)

    def _idle(self, now: float) -> dict[int, WaitCosts]:
        """What it costs to let the rows wait that do, where there is room to park them."""
        found = {}
        for row, episode in enumerate(self.slots):
            if episode is not None and episode.call is not None:
                tokens, waited = len(episode.opening) + episode.length, now - self._asked[episode]
                found[row] = self._rows.costs.wait(waited, tokens=tokens)
        return found

    def _vacate(self, idle: dict[int, WaitCosts], now: float, *, room: bool) -> int | None:
        """A slot whose row waits elsewhere from now on; None where it costs least to hold all.

        Args:
          idle: from ``_idle``; loses the slot.
          now: seconds of ``time.monotonic``.
          room: whether one more row may be parked.
        """
        best, saved = None, -math.inf
        for row, wait in idle.items():
            wait = wait if room else wait._replace(parked=math.inf)
            place = self._choose(wait)
            if place == WaitingPlace.HELD or (place == WaitingPlace.PARKED and not room):
                continue
            gain = wait.held - (wait.parked if place == WaitingPlace.PARKED else wait.dropped)
            if best is None or gain > saved:
                best, saved = (row, place), gain
        if best is None:
            return None
        row, place = best
        del idle[row]
        episode = self.slots[row]
        assert episode is not None
        if place == WaitingPlace.PARKED:
            self._parked[episode] = self._rows.suspend(row)
        self._counts[place.value] += 1
        self._away[episode], episode.row = now, None
        return row


def _start(episode: Episode, limit: int) -> RowStart:
    # A row's draws follow from its number and their places, so each context is another row.
    number = episode.member + episode.context * _ROWS
    return RowStart(tuple(episode.opening.tolist()), episode.seed, number, limit)


def _answer(episode: Episode) -> list[int]:
    """The ids of the environment's last answer."""
    return episode.transcript().segments[-1].tokens.tolist()
