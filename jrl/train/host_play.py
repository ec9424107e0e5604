"""Episodes with environments on the host, played over decode slots that do not wait for them.

One thread, the caller's, touches the device. Between two chunks of decoding it takes the answers
that have arrived, gives them to their rows, and fills free slots with the next episodes, which were
opened ahead. A row that waits for its environment stays in its slot, or makes room for another
episode until its answer is there (``host_slots``), and the others decode on.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.calls import Answer, Calls
from jrl.episodes.chat import Format
from jrl.episodes.episode import Episode, call_init, call_step, shared_start
from jrl.episodes.host import EnvError, Feedback, HostEnv
from jrl.episodes.transcript import Transcript
from jrl.models.chat_frames import Message
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.row_costs import ChoosePlace, cheapest
from jrl.sampling.rows import Rows
from jrl.system.wait_reports import waiting
from jrl.train.host_branches import EpisodeBranches, tree_of
from jrl.train.host_slots import EpisodeSlots
from jrl.types import Params, Prompt, StopReason

_LOOK_SECONDS = 0.05
"""Where nothing can be decoded, how long an answer is waited for between two looks at deadlines."""
GRACE_SECONDS = 2.0
"""How long after its deadline a call's answer may arrive before its event loop is looked at."""


class Played(NamedTuple):
    """Episodes that have ended.

    Attributes:
      groups: a transcript for each member of each prompt.
      counts: numbers by name, which add up: "episodes", "turns", "env_errors", "env_timeouts",
        "env_close_errors", "slot_tokens" (drawn), "slot_steps" (decode steps times slots, or the
        episodes left where these are fewer), "idle_seconds" (in which all slots waited for
        environments), and those of ``host_slots.EpisodeSlots``. With several contexts also
        "summaries" that were drawn. Where episodes branch also "branches", "env_fork_errors"
        (branches that ended because the environment could not be copied) and
        "tree_shared_tokens", as ``host_branches.tree_of`` counts them.
    """

    groups: list[list[Transcript]]
    counts: dict[str, float]


Newer = Callable[[], tuple[Params, int] | None]
"""() -> newer parameters and their version, or None to keep those in use."""


def keep_weights() -> tuple[Params, int] | None:
    """A ``Newer`` that has none."""
    return None


BY_TIMING = frozenset(
    {"slot_use", "idle_seconds", "parked", "dropped", "read_tokens", "reread_tokens"}
)
"""Counts that depend on when environments answer; nothing that is drawn does."""


def play_episodes(
    rows: Rows,
    calls: Calls,
    env: HostEnv,
    chat: Format,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    *,
    group: int,
    tokenizer: Tokenizer,
    newer: Newer = keep_weights,
    choose: ChoosePlace = cheapest,
    branches: EpisodeBranches | None = None,
    policy_of: Callable[[int], int] | None = None,
) -> Played:
    """``group`` episodes of each prompt.

    What is drawn depends on the weights, the seed of the prompt, the member and what the
    environment answers; not on when it answers, nor on slots.

    Args:
      rows: with weights.
      calls: nobody else's while this runs.
      env: the environment.
      chat: how its messages become ids, ``format_of`` it.
      prompts: N of them.
      seeds: [N], below 2**64, of each prompt's draws, and given to ``env.init``.
      group: members of a group.
      tokenizer: turns what was drawn into text.
      newer: asked before each chunk, so that weights may change between tokens. Rows keep the keys
        and values of older weights, but for those that are dropped, which are read by the newest.
      choose: where a row waits whose slot another episode could use.
      branches: how the members of a group branch off one another, with rows that measure what it
        reads; None to play each by itself.
      policy_of: which policy of several a player is, with rows that draw from several.

    Returns:
      All episodes; those whose environment failed have the reason why.
    """
    game = _Game(rows, env, chat, tokenizer, calls, newer, choose, branches, policy_of)
    return game.play(prompts, seeds, group)


def summary_request(env: HostEnv, chat: Format, *, closed: bool, first: bool) -> list[int]:
    """The ids that ask for a summary; see ``Format.following``."""
    asked: Message = {"role": "user", "content": env.chat.summary}
    return chat.following([asked], closed=closed, first=first)


def summary_room(env: HostEnv, chat: Format) -> int:
    """Tokens that every context but the last keeps for a summary and what asks for it."""
    if env.limits.contexts == 1:
        return 0
    ways = itertools.product((True, False), repeat=2)
    asked = [summary_request(env, chat, closed=closed, first=first) for closed, first in ways]
    return env.limits.summary_tokens + max(map(len, asked))


class _Game:
    """The loop of ``play_episodes``."""

    def __init__(
        self,
        rows: Rows,
        env: HostEnv,
        chat: Format,
        tokenizer: Tokenizer,
        calls: Calls,
        newer: Newer,
        choose: ChoosePlace,
        branches: EpisodeBranches | None,
        policy_of: Callable[[int], int] | None,
    ) -> None:
        self.rows, self.env, self.chat, self.tokenizer = rows, env, chat, tokenizer
        self.calls, self.newer, self.limits = calls, newer, env.limits
        self.episodes: list[Episode] = []
        self.branches, self.policy_of = branches, policy_of
        self.of_call: dict[int, Episode] = {}
        self.copies: dict[int, Episode] = {}  # calls of fork, and the branch that each is for
        self.starts: dict[int, np.ndarray] = {}  # what the openings of a group have in common
        self.closing: dict[int, float] = {}  # calls of close, and until when they may take
        self.next_call = self.next_group = self.group = self.left = self.opened = 0
        self.counts: dict[str, float] = collections.defaultdict(float)
        self.table = EpisodeSlots(rows, choose, self.counts)
        self.reserve = summary_room(env, chat)

    def play(self, prompts: Sequence[Prompt], seeds: Sequence[int], group: int) -> Played:
        """See ``play_episodes``."""
        self.group = group
        self.episodes = [
            Episode(i, j, prompt, seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            for j in range(group)
        ]
        self.left = len(self.episodes)
        for i in range(len(prompts) if self.branches else 0):
            assert self.branches is not None
            self.branches.deal(self._group(i))
        with waiting("environments", self._left, seconds=self.limits.call_seconds):
            while self.left or self.of_call or self.closing:
                self._open_ahead()
                self.table.fill()
                runs = self.table.running
                if runs:
                    self._decode()
                for answer in self._arrived(wait=not runs):
                    self._take(answer)
                self._expire()
        groups = [self._group(i) for i in range(len(prompts))]
        names = ["env_errors", "env_timeouts", "env_close_errors", "idle_seconds"]
        names += ["parked", "dropped", "read_tokens", "reread_tokens"]
        counts = dict.fromkeys(names, 0.0)
        if self.limits.contexts > 1:
            counts["summaries"] = 0.0
        if self.branches is not None:
            counts |= dict.fromkeys(["branches", "env_fork_errors", "tree_shared_tokens"], 0.0)
        counts |= {"episodes": float(len(self.episodes)), **self.counts}
        if self.branches is None:
            return Played([[e.transcript() for e in members] for members in groups], counts)
        trees = [tree_of(members) for members in groups]
        counts["tree_shared_tokens"] = float(sum(shared for _, shared in trees))
        return Played([rows for rows, _ in trees], counts)

    def _left(self) -> str:
        """How far the episodes are; read by another thread."""
        playing, turns = self.left, self.counts.get("turns", 0)
        asked = len(self.of_call) + len(self.closing)
        return (
            f"{playing} of {len(self.episodes)} episodes left, {turns:.0f} turns played, "
            f"{asked} calls unanswered"
        )

    def _group(self, index: int) -> list[Episode]:
        return self.episodes[index * self.group : (index + 1) * self.group]

    def _roots(self, index: int) -> list[Episode]:
        """The members of a group that begin by themselves, and together."""
        members = self._group(index)
        return members if self.branches is None else members[: self.branches.roots]

    # ------------------------------------------------------------ calls

    def _call(self, episode: Episode, function: Callable[..., Any], *arguments: Any) -> None:
        seconds = self.limits.call_seconds
        number, self.next_call = self.next_call, self.next_call + 1
        episode.call, episode.call_until = number, time.monotonic() + seconds
        self.of_call[number] = episode
        self.calls.submit(number, function, *arguments, seconds=seconds)

    def _arrived(self, *, wait: bool) -> Iterator[Answer]:
        """The answers in the inbox; waits a little for the first where nothing else is to do."""
        if wait and (self.of_call or self.closing):
            began, first = time.monotonic(), None
            with contextlib.suppress(queue.Empty):
                first = self.calls.inbox.get(timeout=_LOOK_SECONDS)
            # What is closed at the end keeps no slot from decoding.
            self.counts["idle_seconds"] += (time.monotonic() - began) * bool(self.left)
            if first is None:
                return
            yield first
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.calls.inbox.get_nowait()

    def _take(self, answer: Answer) -> None:
        """Continues the episode that an answer is for."""
        if self.closing.pop(answer.number, None) is not None:
            self.counts["env_close_errors"] += bool(answer.error)
            return
        episode = self.of_call.pop(answer.number, None)
        if episode is None:
            return  # of an event loop that was given up
        episode.call = None
        if (branch := self.copies.pop(answer.number, None)) is not None:
            self._copied(branch, answer)
            if episode.stop is None:
                self._ask(episode)
            return
        if episode.stop is not None:  # it ended meanwhile; a late init still wants closing
            if not answer.error and not episode.has_state:
                self._close(answer.value[0])
            return
        if episode.has_state:
            self.rows.costs.record_wait(answer.seconds)
        if answer.error:
            self._fail(episode, answer.error, timeout=answer.timeout)
        elif not episode.has_state:
            episode.open(*answer.value)
            self.opened += 1
            self._opened(episode.group)
        else:
            episode.state, feedback, ids, state_id = answer.value
            self._answered(episode, feedback, ids, state_id)

    def _fail(self, episode: Episode, reason: str, *, timeout: bool = False) -> None:
        self.counts["env_timeouts" if timeout else "env_errors"] += 1
        episode.reason = reason
        self._end(episode, StopReason.TIMEOUT if timeout else StopReason.FAILED)
        if not episode.has_state:
            self._opened(episode.group)

    def _end(self, episode: Episode, stop: StopReason) -> None:
        """Frees the slot and closes the environment."""
        episode.stop = stop
        self.left -= 1
        self.table.remove(episode)
        if episode.has_state:
            self.opened -= 1
            self._close(episode.state)
            episode.state = None
        # Members that nobody left it for begin by themselves, so that the group is full.
        for number in episode.spare:
            self._open(self._group(episode.group)[number])
        episode.spare = ()

    def _close(self, state: Any) -> None:
        seconds = self.limits.call_seconds
        number, self.next_call = self.next_call, self.next_call + 1
        self.closing[number] = time.monotonic() + seconds
        self.calls.submit(number, self.env.close, state, seconds=seconds)

    def _expire(self) -> None:
        """Ends what is past a deadline of its turn or episode, or of a call that cannot answer."""
        now, limits = time.monotonic(), self.limits
        for episode in self.table.waiting():
            late = ""
            if limits.episode_seconds and now > episode.began + limits.episode_seconds:
                late = f"the episode took more than {limits.episode_seconds:g} seconds"
            if limits.turn_seconds and now > episode.turn_began + limits.turn_seconds:
                late = f"turn {episode.turn} took more than {limits.turn_seconds:g} seconds"
            if late:
                if episode.call is not None:
                    self.calls.cancel(episode.call)
                self._fail(episode, late, timeout=True)
        overdue = [n for n, e in self.of_call.items() if now > e.call_until + GRACE_SECONDS]
        overdue += [n for n, until in self.closing.items() if now > until + GRACE_SECONDS]
        if overdue and self.calls.blocked(GRACE_SECONDS):
            # All that the loop was to answer is lost with it.
            for number in list(self.of_call):
                said = "the event loop was blocked; an async function must not wait by itself"
                self._take(Answer(number, error=said, timeout=True))
            for number in list(self.closing):
                self._take(Answer(number, error="the event loop was blocked"))

    # ------------------------------------------------------------ openings

    def _open_ahead(self) -> None:
        """Opens the next groups, so that a free slot finds an episode that can begin."""
        groups, slots = len(self.episodes) // self.group, self.rows.slots
        opening = sum(not e.has_state for e in self.of_call.values())
        # As many as all slots begin with together, and twice as many environments as rows.
        most = 2 * (slots + self.rows.max_suspended)
        while (
            self.next_group < groups
            and opening + self.table.new < slots
            and opening + self.opened < most
        ):
            for episode in self._roots(self.next_group):
                self._open(episode)
                opening += 1
            self.next_group += 1

    def _open(self, episode: Episode) -> None:
        problem = episode.prompt, episode.seed, self.rows.prompt_tokens
        self._call(episode, call_init, self.env, self.chat, *problem)

    def _opened(self, index: int) -> None:
        """Queues a group once all that begin together have opened or failed.

        What their openings do not share counts as completion tokens, so the room of each is known
        only then. An episode that opens later, in a group that branches, must begin as they do.
        """
        if any(e.stop is None and not e.has_state for e in self._roots(index)):
            return
        # Those that have room were queued before, or branched off one that was.
        new = [e for e in self._group(index) if e.stop is None and e.has_state and not e.room]
        if not new:
            return
        if index not in self.starts:
            self.starts[index] = new[0].opening[: shared_start([e.opening for e in new])]
        start = self.starts[index]
        for episode in new:
            episode.room = self.rows.max_new_tokens - (len(episode.opening) - len(start))
            if not len(start) or not np.array_equal(episode.opening[: len(start)], start):
                said = "the members of a group open with different first tokens"
                self._fail(episode, f"{said}; let init depend on prompt and seed alone")
            elif self._usable(episode) < 1:
                self._fail(episode, "its opening differs from the group's by a whole completion")
            else:
                self.table.add(episode, self._turn_limit(episode))

    def _turn_limit(self, episode: Episode) -> int:
        """Completion tokens at which the turn ends that is about to be drawn."""
        most, room = self.limits.turn_tokens, self._usable(episode)
        return min(room, episode.length + most) if most else room

    # ------------------------------------------------------------ turns

    def _decode(self) -> None:
        """Draws a chunk, and hands ended turns to the environment."""
        if (found := self.newer()) is not None:
            self.rows.set_weights(*found)
        # Where fewer episodes are left than slots, the others are not in use.
        wanted = min(self.rows.slots, self.left)
        policies = None
        if self.policy_of is not None:
            policies = [0 if e is None else self.policy_of(e.player) for e in self.table.slots]
        out = self.rows.decode(wanted, policies)
        self.counts["slot_steps"] += int(out.steps) * wanted
        for row, episode in enumerate(self.table.slots):
            if episode is None or episode.call is not None:
                continue
            count = int(out.counts[row])
            self.counts["slot_tokens"] += count
            if count:
                tokens = np.asarray(out.tokens)[row, :count]
                logprobs = np.asarray(out.logprobs)[row, :count]
                numbers = None
                if self.branches is not None:  # without a measure, how surprising each token was
                    measured = out.measured
                    numbers = -logprobs if measured is None else np.asarray(measured)[row, :count]
                episode.grow(tokens, logprobs, self.rows.version, numbers)
            episode.last = StopReason(int(out.stop[row]))
            if episode.last != StopReason.RUNNING:
                self._say(episode)

    def _say(self, episode: Episode) -> None:
        """Lets a branch leave before the turn that has ended, or asks about the turn."""
        if episode.asked is not None:
            self._summarised(episode)
            return
        episode.end_turn()
        self.counts["turns"] += 1
        if self.branches is not None and self.branches.leaves(episode):
            branch = self.branches.take(episode, self._group(episode.group))
            self.counts["branches"] += 1
            # Of the row and of the environment: both are now as they were when the turn began.
            self.table.fork(branch, episode, self._turn_limit(branch))
            assert self.env.fork is not None
            self.copies[self.next_call] = branch
            self._call(episode, self.env.fork, episode.state)
            self.table.asked(episode)
        else:
            self._ask(episode)

    def _copied(self, branch: Episode, answer: Answer) -> None:
        """Begins a branch with a copy of the environment, or ends it for want of one."""
        if not answer.error:
            branch.state, branch.has_state = answer.value, True
            self.opened += 1
            self.table.add(branch, self._turn_limit(branch))
            return
        self.counts["env_fork_errors"] += 1
        branch.reason = f"the environment's state cannot be copied: {answer.error}"
        source = branch.source
        if source is not None and source.stop is None:
            source.spare, branch.spare = (*source.spare, *branch.spare), ()
        self._end(branch, StopReason.FAILED)

    def _ask(self, episode: Episode) -> None:
        """Asks the environment about the turn that has ended."""
        tokens, cut = episode.said(), episode.last == StopReason.LENGTH
        said = episode.state, episode.turn, tokens, cut
        self._call(episode, call_step, self.env, self.chat, self.tokenizer, *said)
        self.table.asked(episode)

    def _answered(
        self, episode: Episode, feedback: Feedback, ids: list[int], state_id: int
    ) -> None:
        """Pays the turn, and ends the episode or continues it behind the answer."""
        cut = episode.last == StopReason.LENGTH
        try:
            episode.pay(feedback)
        except EnvError as error:
            self._fail(episode, str(error))
            return
        if feedback.done:  # before the room is looked at: an episode may fill it exactly
            self._end(episode, StopReason.LENGTH if feedback.cut else StopReason.DONE)
        elif cut and self._last_context(episode) and self._full(episode):
            self._end(episode, StopReason.LENGTH)
        elif episode.turn + 1 >= self.limits.turns:
            self._end(episode, StopReason.TURNS)
        elif not self._full(episode, ids):
            episode.answer(ids, state_id, self._next_player(episode, feedback))
            self._next(episode, ids, self._turn_limit(episode))
        elif self._last_context(episode):
            # Nothing is cut: an answer after which the policy could not speak is not given.
            self._end(episode, StopReason.LENGTH)
        else:
            ids = summary_request(self.env, self.chat, closed=not cut, first=episode.turn == 0)
            player = self._next_player(episode, feedback)
            episode.ask_summary(ids, feedback.messages, state_id, player)
            self._next(episode, ids, episode.length + self.limits.summary_tokens)

    def _next_player(self, episode: Episode, feedback: Feedback) -> int:
        named = feedback.next
        return (episode.player + 1) % self.env.players if named is None else named

    def _next(self, episode: Episode, ids: list[int], limit: int) -> None:
        """Lets the policy speak behind these ids, up to a limit of completion tokens."""
        episode.turn_began = time.monotonic()
        self.table.answered(episode, ids, limit)

    # ------------------------------------------------------------ contexts

    def _last_context(self, episode: Episode) -> bool:
        return episode.context + 1 >= self.limits.contexts

    def _usable(self, episode: Episode) -> int:
        """Completion tokens of a context, less those that its summary needs."""
        return episode.room - (0 if self._last_context(episode) else self.reserve)

    def _full(self, episode: Episode, ids: Sequence[int] = ()) -> bool:
        """Whether the policy could not speak behind these ids in the same context."""
        return episode.length + len(ids) >= self._usable(episode)

    def _summarised(self, episode: Episode) -> None:
        """Begins the next context, which the summary and the answer must leave room in."""
        assert episode.asked is not None
        messages, state_id, player = episode.asked
        episode.end_summary()
        self.counts["summaries"] += 1
        ids = self.chat.following(messages, closed=episode.last != StopReason.LENGTH)
        if self._full(episode, ids):
            self._end(episode, StopReason.LENGTH)
            return
        episode.answer(ids, state_id, player)
        self.table.restart(episode, self._turn_limit(episode))
