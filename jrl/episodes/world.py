"""The world that answers the policy's turns: an environment on the host, or plain text.

Both answer through an inbox, so that the scheduler never waits for either and never asks which of
them it plays with. Nothing here touches the device.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jrl.episodes.calls import Answer, Calls
from jrl.episodes.chat import Format
from jrl.episodes.env_calls import call_init, call_step
from jrl.episodes.episode import Episode
from jrl.episodes.follow import TurnRules, rules_of
from jrl.episodes.host import Feedback, HostEnv, Limits
from jrl.models.tokenizer import Tokenizer
from jrl.types import StopReason

GRACE_SECONDS = 2.0
"""Time after a call's deadline before its event loop is checked for blocking."""
BLOCKED = "the event loop was blocked; an async function must not wait by itself"
"""Error of calls whose event loop was abandoned."""
_ENDLESS = 1 << 30


class World(Protocol):
    """Answers the policy's turns. A call returns at once; its answer arrives in the inbox."""

    @property
    def name(self) -> str:
        """Name for reports of long waits."""

    @property
    def rules(self) -> TurnRules:
        """Rules for the end of a turn."""

    @property
    def verified(self) -> bool:
        """Whether a successful episode is known to be correct, as a checked proof is."""

    @property
    def inbox(self) -> queue.SimpleQueue[Answer]:
        """Answers in order of arrival."""

    def open(self, number: int, episode: Episode, longest: int) -> None:
        """Answers (state, ids of the opening, state id); openings have at most ``longest`` ids."""

    def step(self, number: int, episode: Episode) -> None:
        """Answers (state, feedback, ids of the answer, state id) to the turn that has ended."""

    def fork(self, number: int, state: Any) -> None:
        """Answers a copy of a state."""

    def close(self, number: int, state: Any) -> None:
        """Ends a state."""

    def cancel(self, number: int) -> None:
        """Gives up a call."""

    def blocked(self, seconds: float) -> bool:
        """Whether the calls under way are lost because nothing answers any more."""


class HostWorld(NamedTuple):
    """A ``World`` that is an environment on the host.

    Attributes:
      calls: used by this world only, until the play ends.
      env: the environment.
      chat: encodes its messages as ids.
      tokenizer: turns what was sampled into text.
      rules: of the environment.
    """

    calls: Calls
    env: HostEnv
    chat: Format
    tokenizer: Tokenizer
    rules: TurnRules

    @property
    def name(self) -> str:
        """See ``World``."""
        return "environments"

    @property
    def verified(self) -> bool:
        """See ``World``."""
        return self.env.extras.verified

    @property
    def inbox(self) -> queue.SimpleQueue[Answer]:
        """Answers in order of arrival."""
        return self.calls.inbox

    def _submit(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        # A deadline for every kind of call: otherwise a close that hangs would never end.
        seconds = self.env.limits.call_seconds
        self.calls.submit(number, function, *arguments, seconds=seconds)

    def open(self, number: int, episode: Episode, longest: int) -> None:
        """See ``World``."""
        # The seed is the group's: members must open alike to share a prompt.
        _, prompt, seed = episode.problem
        self._submit(number, call_init, self.env, self.chat, prompt, seed, longest)

    def step(self, number: int, episode: Episode) -> None:
        """See ``World``."""
        # The environment must know about cuts: a cut turn may end inside a tool call.
        cut = episode.turn.stop == StopReason.LENGTH
        arguments = episode.state, episode.at.turn, episode.last_turn(), cut
        self._submit(number, call_step, self.env, self.chat, self.tokenizer, *arguments)

    def fork(self, number: int, state: Any) -> None:
        """See ``World``."""
        # Checked before the run: branching and searching need an environment that can be copied.
        assert self.env.fork is not None
        self._submit(number, self.env.fork, state)

    def close(self, number: int, state: Any) -> None:
        """See ``World``."""
        self._submit(number, self.env.close, state)

    def cancel(self, number: int) -> None:
        """See ``World``."""
        self.calls.cancel(number)

    def blocked(self, seconds: float) -> bool:
        """See ``World``."""
        return self.calls.blocked(seconds)


def host_world(calls: Calls, env: HostEnv, chat: Format, tokenizer: Tokenizer) -> HostWorld:
    """An environment, called through ``calls``."""
    return HostWorld(calls, env, chat, tokenizer, rules_of(env, chat))


class TextWorld:
    """A ``World`` that never answers: text, in steps that end at stop tokens or a limit.

    Args:
      ends: ids that end a completion; other stop tokens of the rows end a step.
      step_tokens: most tokens of a step; 0 for those left of the completion.
    """

    name, verified = "search", False

    def __init__(self, ends: Sequence[int], step_tokens: int = 0) -> None:
        # A completion has no number of turns and no clock: its token limit is the row's own.
        limits = Limits(turns=_ENDLESS, turn_tokens=step_tokens, episode_seconds=0.0)
        self.rules = TurnRules(limits, done=StopReason.STOP_TOKEN)
        self.inbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._ends = frozenset(ends)

    def open(self, number: int, episode: Episode, longest: int) -> None:
        """See ``World``; the opening is the prompt."""
        # Through the inbox although the answer is known: the scheduler then has one path for all
        # answers, and answers come in the order of the calls.
        self.inbox.put(Answer(number, (None, episode.problem.prompt.tokens, 0)))

    def step(self, number: int, episode: Episode) -> None:
        """See ``World``; a completion is done with a stop token of its own."""
        # Steps stop at tokens too, such as a newline; only those of the tokenizer end the
        # completion. What stopped at a limit of tokens continues with the next step.
        stopped = episode.turn.stop == StopReason.STOP_TOKEN
        done = stopped and int(episode.last_turn()[-1]) in self._ends
        self.inbox.put(Answer(number, (None, Feedback((), (), done), [], 0)))

    def fork(self, number: int, state: Any) -> None:
        """See ``World``."""
        self.inbox.put(Answer(number, state))

    def close(self, number: int, state: Any) -> None:
        """See ``World``."""
        self.inbox.put(Answer(number))

    def cancel(self, number: int) -> None:
        """See ``World``; there is nothing under way."""

    def blocked(self, seconds: float) -> bool:
        """See ``World``."""
        return False


def gather(
    calls: Calls, requests: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float
) -> list[Answer]:
    """The answers to calls (function, arguments) that are made together, in their order.

    Args:
      calls: used by this function only, until it returns.
      requests: the calls.
      seconds: limit of each.
    """
    answers = dict[int, Answer]()
    for number, (function, arguments) in enumerate(requests):
        calls.submit(number, function, *arguments, seconds=seconds)
    # The calls run side by side, so one deadline holds for all of them.
    until = time.monotonic() + seconds + GRACE_SECONDS
    while len(answers) < len(requests):
        with contextlib.suppress(queue.Empty):
            # Wakes up once a second: an event loop that is blocked puts nothing into the inbox, not
            # even its own timeouts.
            answer = calls.inbox.get(timeout=1.0)
            answers[answer.number] = answer
            continue
        if time.monotonic() > until and calls.blocked(GRACE_SECONDS):
            lost = [n for n in range(len(requests)) if n not in answers]
            answers |= {n: Answer(n, error=BLOCKED, timeout=True) for n in lost}
    return [answers[n] for n in range(len(requests))]


def close_env(calls: Calls, env: HostEnv) -> None:
    """Ends what the environment shares between episodes, and the calls."""
    with contextlib.suppress(Exception):  # a run that has ended well must not fail here
        calls.run(env.lifecycle.shutdown, env.limits.call_seconds)
    calls.close()
