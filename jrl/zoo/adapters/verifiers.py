"""Environments of the package ``verifiers`` (0.1), played turn by turn.

Such an environment runs an episode by itself and asks a client for the model's words. Here that
client hands the question to the decode slots and waits: the environment's own loop, its hooks,
tools, stops and rubric are used as they are, whatever it overrides.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.episodes.host import (
    ChatOptions,
    EnvError,
    Feedback,
    HostEnv,
    Lifecycle,
    Limits,
    Reply,
)
from jrl.episodes.parsers import Call, Malformed, Parser, get_parser
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.system.extras import need
from jrl.types import NOTHING, Prompt
from jrl.user_code import load

_TURNS = 16


def from_verifiers(
    id: str,
    *,
    arguments: Mapping[str, Any] = NOTHING,
    parser: str = "hermes",
    turns: int = 0,
    success: float = 1.0,
) -> HostEnv:
    """An environment of verifiers; needs the extra ``verifiers``.

    The seed of a group names its problem, of the environment's own data set (for evaluations its
    evaluation set); the prompt's text, if any, stands before the question. The reward is the
    rubric's, at the last turn, and its metrics are counted. Every question must continue the one
    before: an environment that rewrites what was said fails the episode. Reward functions of a
    whole group cannot be used, since episodes end one by one.

    Args:
      id: that ``verifiers.load_environment`` knows, or ``FILE.py:function`` that returns one.
      arguments: of ``load_environment``, or of that function.
      parser: of the policy's family, by name, where the environment has tools.
      turns: the most of an episode, after which it is scored; 0 for the environment's own, or 16
        where it has none.
      success: reward from which on an episode is a success.

    Returns:
      The environment. Its functions are async and share an event loop, so that it cannot be played
      with ``isolate``.

    Raises:
      UserError: verifiers is not installed, is another version, or has no such environment.
    """
    vf = need("verifiers", "verifiers", repr(id))
    if not hasattr(vf, "MultiTurnEnv"):
        raise UserError(
            f"{id!r} needs verifiers 0.1, in which MultiTurnEnv is; pip install 'verifiers<0.2'"
        )
    game = _made(vf, id, arguments)
    if turns:
        game.max_turns = turns
    family = get_parser(parser)
    tools = tuple(_schema(tool) for tool in game.tool_defs or ())
    rows: dict[str, Any] = {}
    client_class = _client_class(vf)

    def begin(step: int, split: str) -> None:
        rows["now"] = game.get_eval_dataset() if split == "eval" else game.get_dataset()

    async def init(prompt: Prompt, seed: int) -> tuple[_Episode, list[dict[str, Any]]]:
        if "now" not in rows:
            begin(0, "train")
        row = dict(rows["now"][seed % len(rows["now"])])
        episode = _Episode(game, client_class(), family, {t["function"]["name"]: t for t in tools})
        return episode, await episode.begin(row, prompt.text)

    async def step(episode: _Episode, reply: Reply) -> tuple[_Episode, Feedback]:
        messages = await episode.say(reply)
        if messages is not None:
            return episode, Feedback(messages)
        reward, metrics = await episode.score()
        won = reward >= success
        return episode, Feedback(
            reward=reward, done=True, success=won, metrics=metrics, cut=reply.cut and not won
        )

    async def close(episode: _Episode) -> None:
        await episode.end()

    return HostEnv(
        init=init,
        step=step,
        close=close,
        fork=None,  # what tools hold is known to the library alone
        limits=Limits(turns=game.max_turns if game.max_turns > 0 else _TURNS),
        chat=ChatOptions(roles=(family.role,), tools=tools, family=family.name)
        if tools
        else ChatOptions(),
        lifecycle=Lifecycle(begin=begin, shutdown=game._teardown),
    )


def _made(vf: Any, id: str, arguments: Mapping[str, Any]) -> Any:
    if ":" in id:
        env = load(id, "data.id")(**arguments)
    else:
        try:
            env = vf.load_environment(id, **arguments)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"data.id = {id!r}: verifiers cannot load it: {reason:.300}") from None
    if not isinstance(env, vf.MultiTurnEnv):
        raise UserError(f"data.id = {id!r} is a {type(env).__name__}, not a MultiTurnEnv")
    return env


def _schema(tool: Any) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**described, "parameters": dict(tool.parameters)}}


def _client_class(vf: Any) -> Any:
    """A client whose model is the policy: it passes questions on and waits for answers."""

    class Policy(vf.Client):
        def __init__(self) -> None:
            super().__init__(None)
            self.questions: asyncio.Queue[list[Any]] = asyncio.Queue()
            self.responses: asyncio.Queue[Any] = asyncio.Queue()

        async def get_response(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            self.questions.put_nowait(copy.deepcopy(list(prompt)))  # environments change theirs
            return await self.responses.get()

        def setup_client(self, config: Any) -> Any:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return Policy


class _Episode:
    """One rollout of the environment's own, which waits for the policy in between."""

    def __init__(
        self, env: Any, client: Any, parser: Parser, tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._env, self._client, self._parser, self._tools = env, client, parser, tools
        self._task: asyncio.Task[Any] | None = None
        self._past: list[Any] = []
        self._names: dict[str, str] = {}  # of called tools, by the call's id

    async def begin(self, row: dict[str, Any], before: str) -> list[dict[str, Any]]:
        """Starts the rollout; its first question."""
        if before:
            row["prompt"] = _with_text(row["prompt"], before)
        self._task = asyncio.create_task(self._env.rollout(row, self._client, "policy", {}))
        try:
            first = await self._question()
        except BaseException:
            await self.end()
            raise
        if first is None:
            await self._result()
            raise EnvError("the environment ended an episode before its first turn")
        self._past = first
        return [self._message(message) for message in first]

    async def say(self, reply: Reply) -> list[Message] | None:
        """The environment's answer to a turn; None where the episode has ended."""
        self._client.responses.put_nowait(self._response(reply))
        question = await self._question()
        if question is None:
            return None
        past = len(self._past)
        continues = question[:past] == self._past and len(question) >= past + 2
        if not continues or question[past].role != "assistant":
            raise EnvError("the environment rewrites earlier messages, which a row cannot")
        self._past = question
        messages = [self._message(message) for message in question[past + 1 :]]
        if self._parser.role == "tool" or not self._tools:
            return list(messages)
        joined = "\n".join(m["content"] for m in messages)  # a role that must alternate
        return [{"role": self._parser.role, "content": joined}]

    async def score(self) -> tuple[float, dict[str, float]]:
        """Reward and metrics of an episode that has ended."""
        state = await self._result()
        await self._env.rubric.score_rollout(state)
        metrics = {k: float(v) for k, v in (state["metrics"] or {}).items() if v is not None}
        return float(state["reward"]), metrics

    async def end(self) -> None:
        """Ends the rollout where it is; its own clean-up runs."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(BaseException):
                await self._task

    async def _result(self) -> Any:
        assert self._task is not None
        state = await self._task
        if state["error"] is not None:
            raise EnvError(f"verifiers: {state['error']!r:.200}")
        return state

    async def _question(self) -> list[Any] | None:
        """The messages that the environment asks the policy with; None once it asks no more."""
        assert self._task is not None
        question = asyncio.ensure_future(self._client.questions.get())
        try:
            await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
            return question.result() if question.done() else None
        finally:
            question.cancel()

    def _response(self, reply: Reply) -> Any:
        """The policy's turn as the model's response, its tool calls read by the family's parser."""
        from verifiers.types import Response, ResponseMessage, ToolCall

        schemas = {name: tool["function"]["parameters"] for name, tool in self._tools.items()}
        parsed: Sequence[Call | Malformed] = ()
        if self._tools:
            parsed = self._parser.parse(reply.raw, schemas)
        calls = []
        for i, call in enumerate(parsed):
            # What cannot be read as arguments is told by the environment, as its own errors are.
            text = json.dumps(call.arguments) if isinstance(call, Call) else call.reason
            number = f"call{(reply.turn * 100 + i) % 100_000:05d}"
            calls.append(ToolCall(id=number, name=call.name or "unknown", arguments=text))
            self._names[number] = call.name or "unknown"
        return Response(
            id=f"turn{reply.turn}",
            created=int(time.time()),
            model="policy",
            message=ResponseMessage(
                content=reply.text,
                tool_calls=calls or None,
                finish_reason="length" if reply.cut else "tool_calls" if calls else "stop",
                is_truncated=reply.cut,
            ),
        )

    def _message(self, message: Any) -> dict[str, Any]:
        """A message with its content as one text."""
        content = message.content
        if not isinstance(content, str):
            parts = [p if isinstance(p, str) else dict(p) for p in content or ()]
            if any(not isinstance(p, str) and p.get("type") != "text" for p in parts):
                raise EnvError("a message that is not text alone")
            content = "".join(p if isinstance(p, str) else p["text"] for p in parts)
        if message.role != "tool":
            return {"role": message.role, "content": content}
        number = message.tool_call_id
        called = {"name": self._names.get(number, "unknown"), "tool_call_id": number}
        if self._parser.role != "tool":
            return {"role": self._parser.role, "content": self._parser.result(content)}
        return {"role": "tool", "content": content, **called}


def _with_text(prompt: Any, text: str) -> Any:
    """A question's messages with a text before the first user's words."""
    if isinstance(prompt, str):
        return f"{text}\n{prompt}"
    messages = [dict(message) for message in prompt]
    for message in messages:
        if message["role"] == "user":
            message["content"] = f"{text}\n{message['content']}"
            break
    return messages
