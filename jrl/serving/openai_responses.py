"""OpenAI's Responses API on chat completions: what a request stands for, and its reply in items.

Nothing is kept between requests: the client sends the whole history as items, which are messages,
function calls, their outputs, and thoughts (``reasoning`` with parts ``reasoning_text``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.serving.api_error import ApiError, Json
from jrl.serving.openai_requests import IGNORED

SAME = IGNORED | {"model", "temperature", "top_p", "stream", "parallel_tool_calls"}
"""Parameters that chat completions have, too."""

RENAMED: Mapping[str, str] = {
    "max_output_tokens": "max_completion_tokens",
    "reasoning.effort": "reasoning_effort",
    "text.format": "response_format",
    "text.verbosity": "verbosity",
}
"""Parameters that chat completions have by another name."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, [], ["reasoning.encrypted_content"]),  # thoughts are sent as they are
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning.generate_summary": (None, "auto"),
    "reasoning.summary": (None, "auto"),
    "stream_options": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
"""Parameters that are accepted only with these values, which change nothing."""


def chat_body(body: Any) -> Json:
    """The body of the chat completion that a request stands for.

    Raises:
      ApiError: names a parameter or an item that chat completions have not.
    """
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    try:  # the reply repeats what is asked for
        json.dumps(body, allow_nan=False)
    except ValueError:
        raise ApiError("the body holds NaN or an infinite number, which JSON has not") from None
    values = dict(body)
    for table in ("reasoning", "text"):
        inside = values.pop(table, None) or {}
        if not isinstance(inside, dict):
            raise ApiError(f"{table} must be an object", param=table)
        values |= {f"{table}.{name}": value for name, value in inside.items()}
    chat: Json = {
        "messages": _messages(values.pop("instructions", None), values.pop("input", None))
    }
    for name, value in values.items():
        if name in SAME or name in RENAMED:
            chat[RENAMED.get(name, name)] = value
        elif name == "tools":
            chat[name] = [_nested(tool) for tool in value] if isinstance(value, list) else value
        elif name == "tool_choice":
            chat[name] = _choice(value)
        elif name not in NEUTRAL:
            raise ApiError(f"unknown parameter {name!r:.60}", param=name, code="unknown_parameter")
        elif value not in NEUTRAL[name]:
            problem = f"{name} = {value!r:.60} is not supported by this server; leave it out"
            raise ApiError(problem, param=name)
    match chat.get("response_format"):
        case {"type": "json_schema", **schema}:
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def renamed(error: ApiError) -> ApiError:
    """An error of the chat completion in the names of this API; its messages are input."""
    for name, chat in [*RENAMED.items(), ("input", r"messages(\[\d+\])?")]:
        error.message = re.sub(rf"\b{chat}", name, error.message)
        error.param = error.param and re.sub(rf"\b{chat}", name, error.param)
    return error


def _nested(tool: Any) -> Any:
    """A function in the form of chat completions; anything else as it is, for them to refuse."""
    match tool:
        case {"type": "function", "name": _, **others}:
            return {"type": "function", "function": {"name": tool["name"], **others}}
    return tool


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [_nested(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return _nested(choice)


def _messages(instructions: Any, items: Any) -> list[Json]:
    """The conversation; items of one turn of the assistant are one message."""
    messages = [] if instructions is None else [{"role": "developer", "content": instructions}]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ApiError("input must be a text or an array with at least one item", param="input")
    turn: Json = {}  # the assistant's message that a further item may belong to
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in ("message", "function_call", "function_call_output", "reasoning"):
            known = "message, function_call, function_call_output or reasoning"
            raise ApiError(f"input[{i}] must be of type {known}", param=f"input[{i}]")
        if kind == "function_call_output":
            text, turn = _text(item.get("output"), f"input[{i}].output"), {}
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and item.get("role") != "assistant":
            text, turn = _text(item.get("content"), f"input[{i}].content"), {}
            messages.append({"role": item.get("role"), "content": text})
        else:
            if not turn or kind == "reasoning" or (kind == "message" and turn["content"]):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                turn.setdefault("tool_calls", []).append(call)
            else:
                text = _text(item.get("content") or "", f"input[{i}].content")
                turn["content" if kind == "message" else "reasoning_content"] = text
    return messages


def _text(content: Any, where: str) -> str:
    """The text of an item: itself, or that of its parts."""
    kinds = ("input_text", "output_text", "reasoning_text", "text")
    match content:
        case str():
            return content
        case [*parts] if all(
            isinstance(part, dict)
            and part.get("type") in kinds
            and isinstance(part.get("text"), str)
            for part in parts
        ):
            return "".join(part["text"] for part in parts)
    raise ApiError(f"{where} must be a text or an array of text parts", param=where)


class Items:
    """The items of a reply as it grows, with the events of a stream.

    Args:
      body: of the request; replies repeat what it asks for.
      head: id, created and model of the chat completion.
    """

    def __init__(self, body: Json, head: Json) -> None:
        self._id, self._text, self._finish = head["id"].partition("-")[2], "", "stop"
        self._output: list[Json] = []
        asked = {name: value for name, value in body.items() if name not in ("input", "stream")}
        usual = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
        fixed = {"object": "response", "created_at": head["created"], "error": None, "store": False}
        self._head = {"id": f"resp_{self._id}", **usual, **asked, **fixed}
        self._head |= {name: head[name] for name in ("model", "session_id") if name in head}

    def begin(self) -> Iterator[Json]:
        """The first events."""
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress", None)}

    def add(self, choice: Json) -> Iterator[Json]:
        """The events of a piece of the chat completion, or of the finished one."""
        delta: Json = choice["delta"] if "delta" in choice else choice["message"]
        ends = choice["finish_reason"]
        calls, text = delta.get("tool_calls", ()), delta.get("content") or ""
        self._finish = ends or self._finish
        if thought := delta.get("reasoning_content"):
            item = {"type": "reasoning", "summary": [], "content": []}
            yield self._added("rs", item)
            yield self._done(content=[{"type": "reasoning_text", "text": thought}])
        if text or self._text or (ends and not calls):
            yield from self._grow(text, bool(ends))
        for call in calls:
            item = {
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
            }
            arguments = call["function"]["arguments"]
            yield self._added("fc", item | {"arguments": ""})
            event, place = "response.function_call_arguments", self._place
            yield {"type": f"{event}.delta", "delta": arguments, **place}
            yield {"type": f"{event}.done", "arguments": arguments, **place}
            yield self._done(arguments=arguments)

    def end(self, usage: Json) -> Json:
        """The last event, with the whole response."""
        return {"type": f"response.{self._status}", "response": self._response(self._status, usage)}

    @property
    def _status(self) -> str:
        return "completed" if self._finish in ("stop", "tool_calls") else "incomplete"

    def _grow(self, text: str, ends: bool) -> Iterator[Json]:
        """More of the message, which begins with its first piece."""
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        event, inside = "response.output_text", {"content_index": 0}
        if not self._output or self._output[-1]["type"] != "message":
            yield self._added("msg", {"type": "message", "role": "assistant", "content": []})
            begun = {"type": "response.content_part.added", "part": part}
            yield {**begun, **self._place, **inside}
        self._text += text
        place = {**self._place, **inside, "logprobs": []}
        if text:
            yield {"type": f"{event}.delta", "delta": text, **place}
        if ends:
            part = part | {"text": self._text}
            yield {"type": f"{event}.done", "text": self._text, **place}
            yield {"type": "response.content_part.done", "part": part, **self._place, **inside}
            yield self._done(content=[part])

    def _added(self, prefix: str, item: Json) -> Json:
        name = f"{prefix}_{self._id}_{len(self._output)}"
        self._output.append({"id": name, "status": "in_progress", **item})
        return {"type": "response.output_item.added", **self._item}

    def _done(self, **whole: Any) -> Json:
        self._output[-1] |= {"status": self._status, **whole}
        return {"type": "response.output_item.done", **self._item}

    @property
    def _item(self) -> Json:
        return {"item": dict(self._output[-1]), "output_index": len(self._output) - 1}

    @property
    def _place(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _response(self, status: str, usage: Json | None) -> Json:
        """The response so far; tokens of thoughts are counted with the rest."""
        cut = {"reason": "max_output_tokens"} if self._finish == "length" else None
        counts = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        more = {"incomplete_details": cut, "output": list(self._output), "usage": counts}
        return {**self._head, "status": status, **more}
