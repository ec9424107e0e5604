"""Assignment of decode slots to episodes and search nodes, and suspension of the others.

If another episode could use the slot of a row that waits for its environment, and moving the row
costs less than holding the slot, the row is suspended (its cache is copied out) or dropped. It
returns when its answer has arrived and a slot is free. Episodes with the fewest turns come first,
new ones before all others, so that the episodes of a batch advance together and few slots are empty
at the end.

A node of a search has its row suspended, and every episode that continues it begins with a copy.
A row without a copy is prefilled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, MutableMapping, Sequence

from jrl.episodes.episode import Episode
from jrl.sampling.admission import RowStart
from jrl.sampling.row_costs import ChoosePlace, WaitCosts, WaitingPlace
from jrl.sampling.rows import More, Rows


class DecodeSlots:
    """The episodes under way, and their rows.

    Args:
      rows: with weights.
      choose: keeps, parks or drops a waiting row whose slot another episode could use.
      counts: adds to "parked" and "dropped", rows that left their slots; "read_tokens", of prompts,
        answers and dropped rows, as often as they are computed; "reread_tokens", of those that had
        been computed before.

    Attributes:
      slots: [S], the episode in each slot, or None.
    """

    def __init__(self, rows: Rows, choose: ChoosePlace, counts: MutableMapping[str, float]) -> None:
        self._rows, self._choose, self._counts = rows, choose, counts
        self.slots: list[Episode | None] = [None] * rows.slots
        # Dicts for their order: first come, first served, and the oldest copy goes first.
        self._ready: dict[Episode, None] = {}
        self._answered: dict[Episode, None] = {}  # in their slots
        self._away: dict[Episode, None] = {}  # wait for their environments without a slot
        self._suspended: dict[Episode, None] = {}

    @property
    def running(self) -> bool:
        """Whether the policy samples in any slot."""
        return any(e is not None and e.call is None for e in self.slots)

    @property
    def new(self) -> int:
        """Episodes that are ready and have had no slot yet."""
        return sum(not e.clock.began for e in self._ready)

    def waiting(self) -> Iterator[Episode]:
        """Episodes with a running clock: in a slot, or waiting for their environments."""
        yield from [e for e in self.slots if e is not None]
        yield from list(self._away)

    def delay(self, seconds: float) -> None:
        """Takes seconds off the clocks that run."""
        for episode in self.waiting():
            episode.clock.began += seconds
            episode.clock.turn_began += seconds

    # ------------------------------------------------------------ what happens to episodes

    def add(self, episode: Episode, limit: int, parent: Episode | None = None) -> None:
        """Queues an episode that can begin, or that continues without a slot.

        Args:
          episode: its row will hold ``episode.past()``.
          limit: tokens after the opening at which its turn ends.
          parent: the node with whose row it begins; None for a row of its own.
        """
        row_state = episode.row_state
        row_state.ready, row_state.limit, row_state.parent = time.monotonic(), limit, parent
        self._ready[episode] = None
        if parent is not None:
            parent.row_state.children += 1

    def fork(self, branch: Episode, source: Episode, limit: int) -> None:
        """Copies the past of a branch from the row of its source.

        If no more rows may be suspended, nothing is copied and the past is prefilled again.

        Args:
          branch: ``add`` it once it can begin.
          source: has stopped in its slot.
          limit: tokens after the opening at which the first turn of the branch ends.
        """
        if self._room():
            assert source.row_state.row is not None
            start, length = branch.row_start(limit), branch.at.length
            branch.row_state.suspended = self._rows.fork(source.row_state.row, start, length)
            branch.row_state.runs = True  # it already has the key and the limit of the branch
            self._suspended[branch] = None

    def resume(self, episode: Episode, limit: int) -> None:
        """Makes an episode ready to sample after an appended answer, wherever its row is."""
        if episode.row_state.row is not None:
            episode.row_state.limit = limit
            self._answered[episode] = None
        else:
            self._away.pop(episode, None)
            self.add(episode, limit)

    def restart(self, episode: Episode, limit: int) -> None:
        """Begins the episode's next context, in a new row."""
        self.remove(episode)
        self.add(episode, limit)

    def pause(self, episode: Episode) -> None:
        """Makes an episode a node: its row leaves its slot, and others may begin with copies."""
        self._away.pop(episode, None)
        if episode.row_state.row is not None:
            self._suspend(episode)

    def remove(self, episode: Episode) -> None:
        """Frees the row of an episode that has ended, or of a node that is not continued."""
        row_state = episode.row_state
        if row_state.row is not None:
            # Otherwise it would be decoded until another episode takes the slot.
            self._rows.halt(row_state.row)
            self.slots[row_state.row], row_state.row = None, None
        if episode in self._ready and row_state.parent is not None:
            row_state.parent.row_state.children -= 1
        row_state.suspended = row_state.ready = row_state.parent = None
        row_state.runs = False
        for table in (self._ready, self._answered, self._away, self._suspended):
            table.pop(episode, None)

    # ------------------------------------------------------------ slots

    def fill(self) -> None:
        """Gives slots to episodes that are ready, and answers to rows that resume."""
        now = time.monotonic()
        answers: dict[int, More] = {}
        for episode in self._answered:
            self._append(episode, answers)
        self._answered = {}
        free = [row for row, episode in enumerate(self.slots) if episode is None]
        idle: dict[int, WaitCosts] | None = None
        placed: list[Episode] = []
        # Stable: of those with the same number of turns, first come, first served.
        for episode in sorted(self._ready, key=lambda e: e.at.turn):
            if free:
                row = free.pop()
            else:
                idle = self._idle(now) if idle is None else idle
                # A suspended row that gets a slot makes room for another one.
                room = self._room(leaving=int(episode in self._suspended))
                vacated = self._vacate(idle, now, room=room)
                if vacated is None and room:
                    break  # nor is there a slot for those after it
                if vacated is None:
                    continue
                row = vacated
            self._give_slot(episode, row, now)
            placed.append(episode)
        self._load(placed, answers)

    def _give_slot(self, episode: Episode, row: int, now: float) -> None:
        row_state, clock = episode.row_state, episode.clock
        assert row_state.ready is not None
        self.slots[row], row_state.row = episode, row
        # Deadlines limit policy and environment, not the rest of the batch: time spent waiting for
        # a slot does not count.
        clock.began = clock.began + now - row_state.ready if clock.began else now
        clock.turn_began, row_state.ready = now, None
        del self._ready[episode]
        self._suspended.pop(episode, None)

    def _load(self, placed: Sequence[Episode], answers: dict[int, More]) -> None:
        """Puts rows of episodes into their slots, and appends their unread tokens."""
        children = [e for e in placed if e.row_state.parent is not None]
        self._read_nodes(children)
        starts: dict[int, RowStart] = {}
        for episode in placed:
            row_state, start = episode.row_state, episode.row_start(episode.row_state.limit)
            row, suspended, parent = row_state.row, row_state.suspended, row_state.parent
            assert row is not None
            if parent is not None:
                # Rekeyed by the child's number: siblings sample different tokens from one copy.
                assert parent.row_state.suspended is not None
                self._rows.resume(row, parent.row_state.suspended, start)
                self._begun(episode, parent)
            elif suspended is not None:
                self._rows.resume(row, suspended)
                if not row_state.runs:
                    self._append(episode, answers)
            else:
                starts[row], past = start, episode.past().tolist()
                self._counts["reread_tokens"] += row_state.computed
                if past:
                    answers[row] = More(past, row_state.limit)
            row_state.suspended, row_state.runs = None, False
        self._read(starts, answers)

    def _append(self, episode: Episode, answers: dict[int, More]) -> None:
        """Appends unread tokens to a row in its slot, which then runs again."""
        row, unread, limit = episode.row_state.row, episode.unread(), episode.row_state.limit
        assert row is not None
        if unread:
            answers[row] = More(unread, limit)
        else:  # extending by no token would leave it stopped
            self._rows.resume(row, self._rows.suspend(row), episode.row_start(limit))

    def _read(self, starts: dict[int, RowStart], answers: dict[int, More]) -> None:
        # Prompts before answers, which are appended to them.
        if starts:
            self._counts["read_tokens"] += self._rows.admit(starts)
        if answers:
            self._counts["read_tokens"] += sum(len(more.tokens) for more in answers.values())
            self._rows.extend(answers)

    # ------------------------------------------------------------ nodes of searches

    def _read_nodes(self, children: Sequence[Episode]) -> None:
        """Completes the copies that episodes begin with, in the slots of these episodes.

        An answer is prefilled once for all episodes that continue it, before the first of them
        begins; so is a prompt, whose root is a node without sampled tokens.
        """
        nodes = list(
            dict.fromkeys(e.row_state.parent for e in children if e.row_state.parent is not None)
        )
        starts: dict[int, RowStart] = {}
        answers: dict[int, More] = {}
        changed: list[tuple[int, Episode]] = []
        # Each node has a child here, so there are at least as many slots as nodes.
        for child, node in zip(children, nodes, strict=False):
            row, unread, row_state = child.row_state.row, node.unread(), node.row_state
            assert row is not None
            if row_state.suspended is not None and not unread:
                continue
            if row_state.suspended is not None:
                self._rows.resume(row, row_state.suspended)
            else:  # evicted, or a root: prefilled from its first token on
                starts[row], unread = node.row_start(node.room), node.past().tolist()
                self._counts["reread_tokens"] += row_state.computed
            if unread:
                answers[row] = More(unread, node.room)
            changed.append((row, node))
        self._read(starts, answers)
        for row, node in changed:
            node.row_state.suspended = self._rows.suspend(row)
            node.row_state.computed = len(node.opening) + node.at.length
            self._keep(node)

    def _begun(self, episode: Episode, node: Episode) -> None:
        """Records that an episode has its copy; after the last child the node's copy is freed."""
        episode.row_state.parent, episode.row_state.computed = None, node.row_state.computed
        node.row_state.children -= 1
        # A node is expanded once, except a root, where new paths begin when all others have ended.
        if not node.row_state.children and node.at.turn:
            node.row_state.suspended = None
            self._suspended.pop(node, None)

    def _keep(self, episode: Episode) -> None:
        """Keeps a copy; without room it replaces the oldest copy of an idle node."""
        self._suspended.pop(episode, None)
        self._suspended[episode] = None
        for other in list(self._suspended):
            if len(self._suspended) <= max(self._rows.max_suspended, 1):
                break
            if other is not episode and self._idles(other):
                del self._suspended[other]
                other.row_state.suspended = None

    def _idles(self, episode: Episode) -> bool:
        """Whether it is a node without children now, whose copy may be dropped and recomputed."""
        waits = episode in self._ready or episode in self._away or episode.row_state.runs
        return not waits and not episode.row_state.children

    # ------------------------------------------------------------ rows that wait

    def _room(self, leaving: int = 0) -> bool:
        """Whether one more row may be suspended; the copies of idle nodes make room."""
        needed = sum(not self._idles(e) for e in self._suspended)
        return needed - leaving < self._rows.max_suspended

    def _suspend(self, episode: Episode) -> None:
        row = episode.row_state.row
        assert row is not None
        episode.row_state.suspended = self._rows.suspend(row)
        self.slots[row], episode.row_state.row = None, None
        self._keep(episode)

    def _idle(self, now: float) -> dict[int, WaitCosts]:
        """Waiting costs by row, of the rows in slots that wait for their environment."""
        costs = {}
        for row, episode in enumerate(self.slots):
            if episode is not None and episode.call is not None:
                tokens = len(episode.opening) + episode.at.length
                waited = now - episode.call.since
                costs[row] = self._rows.costs.wait(waited, tokens=tokens)
        return costs

    def _vacate(self, idle: dict[int, WaitCosts], now: float, *, room: bool) -> int | None:
        """A slot freed by parking or dropping its row; None if holding all rows costs least.

        Args:
          idle: from ``_idle``; loses the slot.
          now: seconds of ``time.monotonic``.
          room: whether one more row may be suspended.
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
        self._away[episode] = None
        if place == WaitingPlace.PARKED:
            self._suspend(episode)
        else:
            self.slots[row], episode.row_state.row = None, None
        self._counts[place.value] += 1
        return row
