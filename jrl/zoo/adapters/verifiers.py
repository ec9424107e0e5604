"""Environments of the package ``verifiers`` (0.4 or newer), played turn by turn.

Such an environment runs an episode by itself: a harness plays a task of a taskset and asks an
endpoint for the model's turns. Here that endpoint hands the question to the decode slots and waits;
the environment's own programs, tools, stops, hooks and rewards are used as they are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.episodes.coroutine import Outcome, Policy, coroutine_env
from jrl.episodes.host import ChatOptions, EnvError, HostEnv, Lifecycle, Limits, Reply
from jrl.episodes.parsers import Call, Malformed, Parser, get_parser
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.system.event_loop import run_in_thread
from jrl.system.extras import install_line, need
from jrl.types import NOTHING, Prompt
from jrl.user_code import load
from jrl.zoo.adapters.verifiers_loop import chat_loop
from jrl.zoo.adapters.verifiers_service import Service, completion

_TURNS = 16
_TOOL_SECONDS = 120.0
"""For the first episode of an environment with tools, which is opened to read what they are."""


def from_verifiers(
    id: str,
    *,
    arguments: Mapping[str, Any] = NOTHING,
    evaluation: Mapping[str, Any] = NOTHING,
    tasks: int = 0,
    parser: str = "hermes",
    turns: int = 0,
    success: float = 1.0,
) -> HostEnv:
    """An environment of verifiers; needs the extra ``verifiers``.

    The seed of a group names its task; the prompt's text, if any, stands before the task's. The
    reward is that of the trace of the agent that asked the policy, at the last turn; its rewards
    by name and its metrics are counted. Every question must continue the one before: an agent that
    rewrites what was said (such as by compaction), and a second conversation in one episode, fail
    the episode.

    An agent without a harness of its own, where its taskset brings none, is a chat loop inside this
    process (``verifiers_loop``), with the task's tools and no others; verifiers would take "bash",
    which lets the policy run commands. "bash" and "null" start a program by ``uv`` for each
    episode. A harness that executes code needs ``runtime`` in its agent's table.

    Args:
      id: a taskset that is installed, or ``FILE.py:Taskset``.
      arguments: of the environment, as verifiers' table ``[env]`` has them, such as
        {"taskset": {"split": "train"}, "agent": {"runtime": {"type": "docker"}}}.
      evaluation: settings of the taskset that are others for evaluations, such as
        {"split": "test"}.
      tasks: only the first so many; 0 for all. A taskset without an end needs a number.
      parser: of the policy's family, by name, where the environment has tools.
      turns: the most of an episode, after which it is scored; 0 for each agent's own, or 16
        where it has none.
      success: reward from which on an episode is a success.

    Returns:
      The environment. Its functions are async and share an event loop, so that it cannot be played
      with ``isolate``.

    Raises:
      UserError: verifiers is not installed, is another version, or has no such environment.
    """
    vf = need("verifiers.v1", "verifiers", repr(id))
    if not hasattr(vf, "resolve_env_config"):
        raise UserError(
            f"{id!r} needs verifiers 0.4 or newer; {install_line('verifiers')} --upgrade"
        )
    config = _config(vf, id, arguments, turns)
    rows = {"train": _tasks(vf, id, config.taskset, tasks)}
    rows["eval"] = rows["train"]
    if evaluation:
        changed = _checked(
            id, type(config.taskset).model_validate, {**config.taskset.model_dump(), **evaluation}
        )
        rows["eval"] = _tasks(vf, id, changed, tasks)
    family = get_parser(parser)
    service = Service(vf, _checked(id, vf.load_environment, config))
    tools = _tools(vf, id, config, rows["train"][0])
    split = {"now": "train"}

    async def episode(policy: Policy, prompt: Prompt, seed: int) -> Outcome:
        now = rows[split["now"]]
        task = _with_text(now[seed % len(now)], prompt.text)
        async with service.episode(task) as (conversation, run):
            reply = await _play(policy, conversation, run, family, tools)
            reward, metrics = _scored(await run, conversation.traces)
        won = reward >= success
        return Outcome(reward, success=won, metrics=metrics, cut=reply.cut and not won)

    most = max(agent.max_turns for agent in _roles(vf, config).values())
    return coroutine_env(
        episode,
        limits=Limits(turns=most),
        chat=ChatOptions(roles=(family.role,), tools=tools, family=family.name)
        if tools
        else ChatOptions(),
        lifecycle=Lifecycle(
            begin=lambda step, which: split.update(now=which), shutdown=service.close
        ),
    )


# ---------------------------------------------------------------- the environment


def _checked(id: str, make: Any, *arguments: Any) -> Any:
    """The environment of verifiers, with its errors in one line."""
    try:
        return make(*arguments)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.id = {id!r}: verifiers cannot load it: {reason:.300}") from None


def _config(vf: Any, id: str, arguments: Mapping[str, Any], turns: int) -> Any:
    """The environment's configuration, with what JRL sets where it is left open."""
    name = id
    if ":" in id:  # a file's module is known to verifiers by its stem
        taskset = load(id, "data.id")
        name = Path(id.rpartition(":")[0]).stem
        sys.modules.setdefault(name, sys.modules[taskset.__module__])
    table = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
    config = _checked(id, vf.resolve_env_config, table)
    plain = vf.default_harness_id(name) == "bash"  # also where the taskset brings none
    for role, agent in _roles(vf, config).items():
        changes: dict[str, Any] = {"max_turns": turns or agent.max_turns or _TURNS}
        harness = agent.harness
        if harness is None and plain:
            harness = changes["harness"] = chat_loop()
        if "runtime" not in agent.model_fields_set:
            ident = harness.id if harness is not None else vf.default_harness_id(name)
            if _executes(vf, ident):
                raise UserError(
                    f"data.id = {id!r}: harness {ident!r} executes what the policy writes; say "
                    f"where: data.arguments.{role}.runtime.type = 'docker', or 'subprocess' for "
                    "this machine"
                )
            changes["runtime"] = vf.SubprocessConfig()
        setattr(config, role, agent.model_copy(update=changes))
    return config


def _roles(vf: Any, config: Any) -> dict[str, Any]:
    """The agents of an environment, by name."""
    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


def _executes(vf: Any, harness: str) -> bool:
    return bool(vf.load_harness(vf.harness_config_type(harness)(id=harness)).EXECUTES_CODE)


def _tasks(vf: Any, id: str, config: Any, most: int) -> list[Any]:
    taskset = _checked(id, vf.load_taskset, config)
    if not most and not taskset.bounded:
        raise UserError(f"data.id = {id!r} has endlessly many tasks; set data.tasks to a number")
    rows = _checked(id, list, itertools.islice(taskset, most or None))
    if not rows:
        raise UserError(f"data.id = {id!r} has no tasks")
    return rows


def _with_text(task: Any, text: str) -> Any:
    """A task whose first words to the policy are preceded by a text."""
    prompt = task.data.prompt
    if not text or prompt is None:
        return task
    if isinstance(prompt, str):
        return task.with_data(prompt=f"{text}\n{prompt}")
    messages = list(prompt)
    for i, message in enumerate(messages):
        if message.role == "user" and isinstance(message.content, str):
            messages[i] = message.model_copy(update={"content": f"{text}\n{message.content}"})
            break
    return task.with_data(prompt=messages)


def _tools(vf: Any, id: str, config: Any, task: Any) -> tuple[dict[str, Any], ...]:
    """The tools that the policy is offered, which the first request of an episode names."""

    async def first() -> Any:
        service = Service(vf, vf.load_environment(config))
        try:
            async with service.episode(task) as (conversation, run):
                async with asyncio.timeout(_TOOL_SECONDS):
                    body = await conversation.question(run)
                return body if body is not None else _scored(await run, set())
        finally:
            await service.close()
            await asyncio.sleep(0.1)  # programs that were killed are waited for in this loop

    try:
        body = run_in_thread(first())  # this thread may have an event loop
    except (EnvError, TimeoutError) as error:
        raise UserError(f"data.id = {id!r}: its first episode fails: {error}") from None
    return tuple(body.get("tools") or ())


# ------------------------------------------------------------------- an episode


async def _play(
    policy: Policy,
    conversation: Any,
    run: asyncio.Task[Any],
    family: Parser,
    tools: Sequence[Mapping[str, Any]],
) -> Reply:
    """Takes the policy's turns until the episode has ended; the last one."""
    past: list[Any] = []
    names: dict[str, str] = {}
    reply: Reply | None = None
    while (body := await conversation.question(run)) is not None:
        if tuple(body.get("tools") or ()) != tuple(tools):
            raise EnvError("its tools differ between tasks, which one run cannot")
        messages = body["messages"]
        if past and (
            messages[: len(past)] != past
            or len(messages) < len(past) + 2
            or messages[len(past)]["role"] != "assistant"
        ):
            raise EnvError("the environment rewrites what was said before, which a row cannot")
        new = messages[len(past) + 1 :] if past else messages
        past = list(messages)
        reply = await policy(
            _shown([_message(m, family, names) for m in new], family, tools, reply)
        )
        calls = _calls(reply, family, tools, names)
        conversation.answer(completion(reply.turn, reply.text, calls, reply.cut))
    if reply is None:
        _scored(await run, set())
        raise EnvError("the environment ended an episode before its first turn")
    return reply


def _shown(
    messages: list[Message], family: Parser, tools: Any, reply: Reply | None
) -> list[Message]:
    """Messages as the family's template takes them: roles that must alternate are joined."""
    if reply is None or not tools or family.role == "tool":
        return messages
    return [{"role": family.role, "content": "\n".join(m["content"] for m in messages)}]


def _message(message: Mapping[str, Any], family: Parser, names: Mapping[str, str]) -> Message:
    """A message with its content as one text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EnvError("a message that is not text alone")
        content = "".join(part["text"] for part in content)
    if message["role"] != "tool":
        return {"role": message["role"], "content": content}
    if family.role != "tool":
        return {"role": family.role, "content": family.result(content)}
    number = message["tool_call_id"]
    return {
        "role": "tool",
        "content": content,
        "name": names.get(number, "unknown"),
        "tool_call_id": number,
    }


def _calls(
    reply: Reply, family: Parser, tools: Sequence[Mapping[str, Any]], names: dict[str, str]
) -> list[dict[str, Any]]:
    """The tool calls of a turn, as OpenAI's API writes them."""
    if not tools:
        return []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    parsed: Sequence[Call | Malformed] = family.parse(reply.raw, schemas)
    calls = []
    for i, call in enumerate(parsed):
        # What cannot be read as arguments is told by the environment, as its own errors are.
        text = json.dumps(call.arguments) if isinstance(call, Call) else call.reason
        number = f"call{(reply.turn * 100 + i) % 100_000:05d}"
        names[number] = call.name or "unknown"
        function = {"name": names[number], "arguments": text}
        calls.append({"id": number, "type": "function", "function": function})
    return calls


def _scored(episode: Any, trace_ids: set[str]) -> tuple[float, dict[str, float]]:
    """Reward and numbers of a finished episode.

    Raises:
      EnvError: it failed.
    """
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason given"
        raise EnvError(f"verifiers: {reason:.300}")
    traces = [trace for trace in episode.traces if trace.id in trace_ids]
    if len(traces) != 1:
        raise EnvError(f"{len(traces)} conversations with the policy in one episode; 1 is played")
    (trace,) = traces
    numbers = {name: value for name, value in trace.metrics.items() if value is not None}
    numbers |= {name: part.score for name, part in trace.rewards.items() if part is not None}
    return float(trace.reward), {name: float(value) for name, value in numbers.items()}
