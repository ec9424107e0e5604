"""Environments on the host, as values: sync or async functions around a state.

    async def init(prompt, seed):           # -> (state, the first messages)
        return State(prompt, seed), [{"role": "user", "content": prompt.text}]

    async def step(state, reply):           # -> (state, what the environment answers)
        return state, Feedback(messages=[{"role": "user", "content": "And now?"}], reward=0.0)

    env = HostEnv(init, step)

Everything that such a function returns is checked before it is used. One that raises, hangs or
answers nonsense ends its own member and nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.chat import ChatFormat, Format, PlainFormat, chat_template
from jrl.episodes.env_error import EnvError as EnvError
from jrl.episodes.env_error import FormError
from jrl.episodes.parsers import get_parser
from jrl.episodes.tool_descriptions import describe
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.system.float32 import fits_float32
from jrl.types import NOTHING, Prompt


class Limits(NamedTuple):
    """Limits of an episode.

    Attributes:
      turns: turns of the policy.
      turn_tokens: sampled tokens in one turn; 0 for what is left of the completion.
      tool_calls: in an episode; 0 for any number. Read by environments of tools.
      call_seconds: for one call of init, step or close.
      turn_seconds: for a turn, from its first token to the answer; 0 for any time.
      episode_seconds: from the first token to the last answer; 0 for any time.
      answer_chars: the most text of one answer.
      contexts: of an episode; with more than 1 the policy writes a summary where a context is full,
        and continues from the opening and its summary in the next one.
      summary_tokens: the most of a summary, which every context but the last keeps free.
    """

    turns: int = 8
    turn_tokens: int = 0
    tool_calls: int = 0
    call_seconds: float = 30.0
    turn_seconds: float = 0.0
    episode_seconds: float = 600.0
    answer_chars: int = 1 << 16
    contexts: int = 1
    summary_tokens: int = 256

    def check(self, table: str = "limits") -> Limits:
        """Returns self.

        Args:
          table: that holds them, for messages.

        Raises:
          UserError: a limit that no episode can keep.
        """
        least: dict[str, float] = {"call_seconds": 0.001}
        least |= dict.fromkeys(("turns", "answer_chars", "contexts", "summary_tokens"), 1)
        values: dict[str, Any] = self._asdict()
        for name, value in values.items():
            seconds = name.endswith("seconds")
            if isinstance(value, bool) or not issubclass(
                type(value), Real if seconds else Integral
            ):
                kind = "a number" if seconds else "an integer"
                raise UserError(f"{table}.{name} = {value!r:.40}; must be {kind}")
            if not float(value) >= least.get(name, 0) or not math.isfinite(value):
                raise UserError(f"{table}.{name} = {value}; must be at least {least.get(name, 0)}")
        return self


class Reply(NamedTuple):
    """The policy's turn.

    Attributes:
      text: without control tokens.
      raw: with control tokens spelled out, for parsers of tool calls.
      tokens: [t] int32.
      turn: its number, from 0.
      cut: whether a limit of tokens ended the turn.
    """

    text: str
    raw: str
    tokens: np.ndarray
    turn: int
    cut: bool


class Feedback(NamedTuple):
    """An environment's answer to a turn; with messages and ``state_key`` alone, an opening.

    Attributes:
      messages: shown to the policy next, dicts with "role" and "content"; none when done.
      reward: of the turn, a number or one for each reward part.
      done: whether the episode has ended.
      success: whether it has ended well.
      state_key: names the state that the environment is in now, for methods that compare the turns
        taken in one state; None for the text of ``messages``. Keys are compared by their ``repr``.
      metrics: numbers to add up over the episode, by name.
      earlier: rewards of the turns before this one, from the first on, where they are known only
        now; each as ``reward`` is, added to what the turn has.
      cut: whether it is done only because a limit of tokens ended the policy's turn; it then counts
        as truncated.
      next: the player that takes the next turn; None for the one after this turn's.
      labels: whole numbers by name, of ``EnvExtras.labels`` for the episode (the last one counts),
        and of ``EnvExtras.token_labels`` one for each character of the turn's text.
    """

    messages: Sequence[Message] = ()
    reward: float | Sequence[float] = 0.0
    done: bool = False
    success: bool = False
    state_key: Any = None
    metrics: Mapping[str, float] = NOTHING
    earlier: Sequence[float | Sequence[float]] = ()
    cut: bool = False
    next: int | None = None
    labels: Mapping[str, int | Sequence[int]] = NOTHING


def nothing(state: Any) -> None:
    """Closes an environment that holds nothing."""


async def nothing_shared() -> None:
    """Ends what the episodes of an environment share, where that is nothing."""


def nothing_begins(step: int, split: str) -> None:
    """Begins a step of training, where that changes nothing."""


Writer = Callable[[Sequence[str], int, int], Any]
"""(texts of failed problems, how many are wanted, seed) -> new ones, each a text or a row as
``data.train`` has them; sync or async."""


class ChatOptions(NamedTuple):
    """Settings of the chat template, besides the messages.

    Attributes:
      roles: of the messages that ``step`` answers with.
      tools: descriptions of the tools, as OpenAI's API writes them.
      family: of the parser that reads the policy's calls, of ``parsers.PARSERS``; "" for none.
      variables: of the template, such as {"enable_thinking": False}.
      summary: the message that asks for a summary, in the role "user"; see ``Limits.contexts``.
    """

    roles: tuple[str, ...] = ("user",)
    tools: tuple[Mapping[str, Any], ...] = ()
    family: str = ""
    variables: Mapping[str, Any] = NOTHING
    summary: str = (
        "There is little room left. Write a summary of all that is needed to finish the task: what "
        "was tried, what was found, and what is to be done next. Only the question and this summary"
        " will be kept."
    )


class Lifecycle(NamedTuple):
    """Calls around the episodes of a training step and of a run.

    Attributes:
      begin: (training step, "train" or "eval") -> None, before the episodes of a step are opened,
        for environments that change with the training. A run that resumes begins with its step, so
        that what depends on the step alone is what it would have been.
      shutdown: async () -> None, at the end of the run; releases what all episodes share. A run
        makes an environment to check it, one to play a turn before training where it is your own,
        one for training and one for evaluation, and shuts each down.
      at_once: episodes that can be open at a time, others wait in ``init``; 0 for any number.
    """

    begin: Callable[[int, str], None] = nothing_begins
    shutdown: Callable[[], Any] = nothing_shared
    at_once: int = 0


class EnvExtras(NamedTuple):
    """Abilities that only some methods use.

    Attributes:
      labels: names of numbers of an episode, which methods find in ``ids``, [N, G]; -1 for none.
      token_labels: names of numbers of tokens, [N, G, T]; -1 for none.
      asks: groups of a problem in training, whose episodes ``init`` begins differently: it finds
        the number of the group, from 0 on, in ``prompt.meta["ask"]``, and methods in
        ``ids["ask"]``. Held-out episodes are those of number 0.
      write: writes new problems after those that the policy fails, for methods with a curriculum;
        None for none.
      verified: whether a success is known to be right, as a checked proof is, without an answer
        to compare with: a search at evaluation may stop there.
    """

    labels: tuple[str, ...] = ()
    token_labels: tuple[str, ...] = ()
    asks: int = 1
    write: Writer | None = None
    verified: bool = False


class HostEnv(NamedTuple):
    """An environment on the host. Sync functions run in threads of their own.

    A sync function that never returns fails its member at the deadline, but cannot be ended: its
    thread stays behind, one for each such call. Run such environments in processes
    (``process.process_env``, ``data.isolate``).

    Attributes:
      init: (prompt, seed) -> (state, messages), or a ``Feedback`` of messages and ``state_key`` in
        their place. The members of a group get the same seed, so that they start alike.
      step: (state, ``Reply``) -> (state, ``Feedback``, or a dict with its fields).
      close: (state) -> None; called once for every state that init returned.
      fork: (state) -> a copy that is played and closed independently; sync or async. Called
        between an answer and the next ``step``, where episodes branch (``[tree]``). One
        that raises ends the branch and nothing else. None for a state that cannot be copied, such
        as a connection; then episodes do not branch.
      parts: names of the reward parts.
      players: roles whose turns are sampled; player 0 begins. With several each becomes a row and
        a group of its own in training, rewarded for its own turns; see
        ``transcript.rows_of_players``.
      limits: of an episode.
      chat: what the chat template renders beside the messages.
      lifecycle: calls around the episodes of a step and of a run.
      extras: what only some methods read.
    """

    init: Callable[[Prompt, int], Any]
    step: Callable[[Any, Reply], Any]
    close: Callable[[Any], Any] = nothing
    fork: Callable[[Any], Any] | None = copy.deepcopy
    parts: tuple[str, ...] = ("reward",)
    players: int = 1
    limits: Limits = Limits()
    chat: ChatOptions = ChatOptions()
    lifecycle: Lifecycle = Lifecycle()
    extras: EnvExtras = EnvExtras()


def format_of(env: HostEnv, tokenizer: Tokenizer) -> Format:
    """The format of this environment's messages: the chat template, if there is one.

    Raises:
      UserError: the template is not of the family whose calls the environment reads, cannot
        continue a conversation with it, or nothing would tell the policy its tools.
    """
    if isinstance(tokenizer, FileTokenizer) and tokenizer.templates:
        name = chat_template(tokenizer, tools=bool(env.chat.tools))
        if env.chat.family and name in tokenizer.templates:
            get_parser(env.chat.family, tokenizer.templates[name])
        asks = ["user"] if env.limits.contexts > 1 else []  # for summaries
        chat = ChatFormat(
            tokenizer,
            tools=env.chat.tools,
            roles=tuple(dict.fromkeys([*env.chat.roles, *asks])),
            variables=env.chat.variables,
            family=env.chat.family,
        )
        if not chat.tells_tools:
            raise UserError(f"the chat template writes no tools, and {_UNTOLD}")
        return chat
    if env.chat.tools and not env.chat.family:
        raise UserError(f"the model has no chat template to write tools, and {_UNTOLD}")
    described = describe(env.chat.tools, env.chat.family) if env.chat.tools else None
    return PlainFormat(tokenizer, described)


_UNTOLD = (
    "the environment names no parser of jrl.episodes.parsers that says how; set ChatOptions.family,"
    " or describe the tools in a system message and leave ChatOptions.tools empty"
)


# ---------------------------------------------------------------- checks of returned values


def check_messages(messages: Any, limits: Limits) -> list[Message]:
    """The messages of an opening or an answer.

    Raises:
      EnvError: they are not messages, or too long.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise FormError(f"messages are {messages!r:.60}, not a list of at least one dict")
    total = 0
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise FormError(f'a message is {message!r:.60}, not a dict with "role" and "content"')
        if not isinstance(message.get("content"), str):
            raise FormError(f"the content of a message is {message.get('content')!r:.60}, not text")
        total += len(message["content"])
    if total > limits.answer_chars:
        raise EnvError(f"an answer of {total} characters; the limit is {limits.answer_chars}")
    return list(messages)


def check_opening(value: Any, limits: Limits) -> tuple[list[Message], Any]:
    """The messages of an opening and the key of its state, None for the text of the messages.

    Raises:
      EnvError: it is neither messages nor a feedback with these two fields alone.
    """
    if isinstance(value, Mapping) and "messages" in value:
        value = _feedback(value)
    if not isinstance(value, Feedback):
        return check_messages(value, limits), None
    for name, field in value._asdict().items():
        if field and name not in ("messages", "state_key"):
            raise FormError(f"an opening has {name}, which is for turns; give messages, state_key")
    return check_messages(value.messages, limits), value.state_key


def _feedback(fields: Mapping[str, Any]) -> Feedback:
    """The feedback with these fields."""
    unknown = ", ".join(map(str, fields.keys() - set(Feedback._fields)))
    if unknown:
        raise FormError(f"feedback has no {unknown:.80}")
    return Feedback(**fields)


def check_feedback(value: Any, limits: Limits, parts: int, players: int = 1) -> Feedback:
    """The feedback, its reward a tuple of ``parts`` numbers.

    Raises:
      EnvError: it is none, a reward is not finite, messages are missing, or a player is next that
        is not there.
    """
    if isinstance(value, Mapping):
        value = _feedback(value)
    if not isinstance(value, Feedback):
        raise FormError(f"step returned {value!r:.60}, not (state, Feedback)")
    last = reward_parts(value.reward, parts)
    if not isinstance(value.earlier, list | tuple):
        raise FormError(f"earlier is {value.earlier!r:.60}, not a list of rewards")
    earlier = tuple(reward_parts(reward, parts) for reward in value.earlier)
    if not isinstance(value.metrics, Mapping):
        raise FormError(f"metrics are {value.metrics!r:.60}, not a dict")
    metrics = {str(name): _number(x, f"metric {name}") for name, x in value.metrics.items()}
    if value.next is not None and value.next not in range(players):
        raise FormError(f"player {value.next!r:.20} is next; there are {players}, from 0 on")
    done = bool(value.done)
    messages = [] if done else check_messages(value.messages, limits)
    if not isinstance(value.labels, Mapping):
        raise FormError(f"labels are {value.labels!r:.60}, not a dict")
    labels = {str(name): _label(x, str(name)) for name, x in value.labels.items()}
    return Feedback(
        messages=messages,
        reward=last,
        done=done,
        success=bool(value.success),
        state_key=value.state_key,
        metrics=metrics,
        earlier=earlier,
        cut=bool(value.cut),
        next=value.next,
        labels=labels,
    )


def reward_parts(value: Any, parts: int) -> tuple[float, ...]:
    """The reward of one turn as one number for each part.

    Raises:
      EnvError: another number of parts, or one that is not a finite number.
    """
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) != parts:
        raise FormError(f"{len(numbers)} reward parts; the environment names {parts}")
    return tuple(_number(x, "reward") for x in numbers)


def _label(value: Any, name: str) -> int | list[int]:
    many = value if isinstance(value, list | tuple | np.ndarray) else [value]
    for each in many:
        if not isinstance(each, int | np.integer) or not -(2**31) <= each < 2**31:
            raise FormError(f"label {name} is {each!r:.60}, not a whole number of 32 bits")
    return [int(x) for x in many] if many is value else int(value)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float | np.number | np.bool_):
        raise FormError(f"{name} is {value!r:.60}, not a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more digits
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise EnvError(f"{name} is {number}, not finite")
    if not fits_float32(number):
        raise EnvError(f"{name} is {number:g}, infinite in float32")
    return number
