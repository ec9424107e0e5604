"""Tools as an environment: the policy calls them, reads the results, and answers.

    env = tool_env([calculator_tool(), python_tool(sandbox)], get_parser("hermes"), reward, limits)

The policy reads its mistakes: an unknown tool, arguments that break the schema, a tool that raises
``ToolError`` or runs out of time. A call that cannot be parsed ends the episode, by default. A tool
that fails in any other way is no fault of the policy's and fails the member.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.calls import run_either
from jrl.episodes.gate import retrieve_error, run_within
from jrl.episodes.host import ChatOptions, EnvError, Feedback, HostEnv, Limits, Reply
from jrl.episodes.parsers import Call, Malformed, Parser, Schemas
from jrl.episodes.parsers.base import without_addresses
from jrl.episodes.schemas import check_schema, fault
from jrl.errors import UserError, unknown_choice
from jrl.types import Prompt

MALFORMED = ("end", "tell")


class ToolError(Exception):
    """An error of a tool, for the policy to read."""


class Tool(NamedTuple):
    """A function that the policy may call.

    Attributes:
      name: letters, digits, "_" and "-".
      description: for the policy.
      parameters: JSON schema of the arguments, an object.
      call: sync or async, with the arguments by name; returns text.
      seconds: for one call.
      longest: characters of a result; what is longer loses its middle, and says so.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Any]
    seconds: float = 10.0
    longest: int = 4000

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API describe it."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**described, "parameters": dict(self.parameters)}}


def one_text(name: str, **described: str) -> dict[str, Any]:
    """``Tool.parameters`` of one text by this name, with what describes it."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", **described}},
        "required": [name],
        "additionalProperties": False,
    }


Reward = Callable[[Prompt, Reply], Any]
"""(problem, the last turn) -> reward; sync or async. It is not called for members that failed."""


class _Session(NamedTuple):
    prompt: Prompt
    calls: int = 0


def tool_env(
    tools: Sequence[Tool],
    parser: Parser,
    reward: Reward,
    limits: Limits,
    *,
    system: str | None = None,
    malformed: str = "end",
) -> HostEnv:
    """An environment in which the policy uses tools until it answers without a call.

    Args:
      tools: with different names.
      parser: of the policy's family.
      reward: judges the last turn; an answer worth 1 or more is a success.
      limits: of an episode; calls beyond ``tool_calls`` are refused in words.
      system: a system message, or None.
      malformed: "end" judges a turn whose call has no readable structure as the last one; "tell"
        tells the policy what is wrong with it.

    Returns:
      The environment. Its metrics are "tool_calls", "tool_errors" (told to the policy),
      "tool_timeouts" and "tool_structure_errors".

    Raises:
      UserError: a tool's name or schema is invalid, or two have one name.
    """
    if malformed not in MALFORMED:
        raise unknown_choice("malformed", malformed, MALFORMED)
    by_name = _checked(tools)
    schemas = {name: tool.parameters for name, tool in by_name.items()}
    limits.check()

    async def init(prompt: Prompt, seed: int) -> tuple[_Session, list[dict[str, str]]]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        return _Session(prompt), [*messages, {"role": "user", "content": prompt.text}]

    async def step(state: _Session, reply: Reply) -> tuple[_Session, Feedback]:
        calls = parser.parse(reply.raw, schemas)
        malformed_calls = [c for c in calls if isinstance(c, Malformed)]
        metrics = {"tool_structure_errors": float(len(malformed_calls))}
        if not calls or (malformed_calls and malformed == "end"):
            return state, await _judged(reward, state.prompt, reply, metrics)
        left = limits.tool_calls - state.calls if limits.tool_calls else len(calls)
        answers = [
            _answer(by_name, schemas, call, i < left, metrics) for i, call in enumerate(calls)
        ]
        texts = await asyncio.gather(*answers)
        metrics["tool_calls"] = float(min(len(calls), max(left, 0)))
        messages = _messages(parser, calls, texts, state.calls)
        return state._replace(calls=state.calls + len(calls)), Feedback(messages, metrics=metrics)

    return HostEnv(
        init=init,
        step=step,
        limits=limits,
        chat=ChatOptions(
            roles=(parser.role,),
            tools=tuple(tool.schema() for tool in tools),
            family=parser.name,
        ),
    )


async def _judged(
    reward: Reward, prompt: Prompt, reply: Reply, metrics: Mapping[str, float]
) -> Feedback:
    """The end of an episode."""
    score = await run_either(reward, prompt, reply)
    won = isinstance(score, int | float | np.number | np.bool_) and score >= 1
    # An answer that was cut before it was right is truncated, as a completion of one turn is.
    return Feedback(
        reward=score, done=True, success=bool(won), metrics=metrics, cut=reply.cut and not won
    )


async def _answer(
    tools: Mapping[str, Tool],
    schemas: Schemas,
    call: Call | Malformed,
    allowed: bool,
    metrics: dict[str, float],
) -> str:
    """The result of one call, as the policy reads it."""
    checked = check_call(call, schemas) if isinstance(call, Call) else call
    if isinstance(checked, Malformed):
        metrics["tool_errors"] = metrics.get("tool_errors", 0.0) + 1
        return f"Error: {checked.reason}"
    if not allowed:
        return "Error: there are no tool calls left; answer now"
    tool = tools[checked.name]
    running = await run_within(run_either(tool.call, **checked.arguments), tool.seconds)
    if not running.done():
        running.cancel()
        running.add_done_callback(retrieve_error)
        metrics["tool_timeouts"] = metrics.get("tool_timeouts", 0.0) + 1
        return f"Error: {tool.name} took more than {tool.seconds:g} seconds"
    try:
        text = running.result()
    except ToolError as error:
        metrics["tool_errors"] = metrics.get("tool_errors", 0.0) + 1
        return _shortened(f"Error: {error}", tool.longest)
    except asyncio.CancelledError:
        raise EnvError(f"tool {tool.name} cancelled itself") from None
    if not isinstance(text, str):
        raise EnvError(f"tool {tool.name} returned {text!r:.60}, not text")
    return _shortened(text, tool.longest)


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def check_call(call: Call, schemas: Schemas) -> Call | Malformed:
    """The call, or why there is no such tool or its arguments do not fit the schema."""
    if call.name not in schemas:
        names = ", ".join(sorted(schemas))
        return Malformed("content", f"there is no tool {call.name!r:.80}; use {names}", call.name)
    why = fault(schemas[call.name], call.arguments)
    return call if why is None else Malformed("content", without_addresses(why), call.name)


def _messages(
    parser: Parser, calls: Sequence[Call | Malformed], texts: Sequence[str], before: int
) -> list[dict[str, Any]]:
    """The results as messages, one each, or all in one of a role that must alternate."""
    contents = [parser.result(text) for text in texts]
    if parser.role != "tool":
        return [{"role": parser.role, "content": "\n".join(contents)}]
    return [
        {
            "role": "tool",
            "name": call.name or "unknown",
            "tool_call_id": _call_id(call, before + i),
            "content": content,
        }
        for i, (call, content) in enumerate(zip(calls, contents, strict=True))
    ]


def _call_id(call: Call | Malformed, number: int) -> str:
    """The id that the policy gave the call, where it is one; else one of nine characters.

    Nine letters or digits, because Mistral's templates refuse other ids.
    """
    name = call.id if isinstance(call, Call) else ""
    return name if re.fullmatch(r"[A-Za-z0-9]{9}", name) else f"call{number % 100_000:05d}"


def check_tool(tool: Tool, where: str) -> None:
    """Raises a UserError for a tool that cannot be called.

    Args:
      tool: it.
      where: which one, for the message.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]{0,63}", tool.name, re.ASCII):
        raise UserError(f"{where}: a name is up to 64 letters, digits, _ and -, first a letter")
    check_schema(tool.parameters, where)
    if not tool.seconds > 0:
        raise UserError(f"{where}: seconds = {tool.seconds}; must be above 0")


def _checked(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name."""
    if not tools:
        raise UserError("tools = []; give at least one tool")
    for i, tool in enumerate(tools):
        where = f"tools[{i}], {tool.name!r}"
        check_tool(tool, where)
        if any(other.name == tool.name for other in tools[:i]):
            raise UserError(f"{where}: another tool has this name")
    return {tool.name: tool for tool in tools}
