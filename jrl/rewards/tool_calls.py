"""A reward for the tools that a completion calls, beside those that the data expect."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.system.json_text import json_or_none

_OPEN = re.compile(r"<tool_call>\s*")
Call = Mapping[str, Any]
"""A call: {"name": text, "arguments": {...}}; "parameters" is read like "arguments"."""


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """The calls in a text, each JSON behind <tool_call>, one or several; None where one is broken.

    >>> calls_in('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [{'name': 'add', 'arguments': {'a': 1}}]
    """
    calls: list[dict[str, Any]] = []
    decoder, end = json.JSONDecoder(), 0
    for mark in _OPEN.finditer(text):
        if mark.start() < end:
            continue  # within the text of a call
        at = mark.end()
        while not text.startswith("</tool_call>", at):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            if (call := _call(value)) is None:
                return None
            calls.append(call)
            at += len(text[at:]) - len(text[at:].lstrip())
        end = at
    return calls


def _call(value: Any) -> dict[str, Any] | None:
    value = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_or_none(arguments)
    if not isinstance(arguments, dict):
        return None
    return {"name": value["name"], "arguments": arguments}


def call_score(expected: Sequence[Call], calls: Sequence[Call]) -> float:
    """Agreement of calls with the expected ones, 0 to 1.

    "ToolRL: Reward is All Tool Learning Needs" (arXiv:2504.13958): the multiset Jaccard of the
    names, and for each expected call the best of those of its name that are left: the Jaccard of
    the arguments' names plus the arguments with the same value; over the most there can be.
    """
    if list(expected) == list(calls):
        return 1.0
    score = _jaccard([c["name"] for c in expected], [c["name"] for c in calls])
    most, used = 1.0, set[int]()
    for call in expected:
        arguments = call["arguments"]
        most += 1 + len(arguments)
        best, at = 0.0, -1
        for i, other in enumerate(calls):
            if i in used or other["name"] != call["name"]:
                continue
            other_arguments = other["arguments"]
            value = _jaccard(list(arguments), list(other_arguments))
            value += sum(
                k in other_arguments and other_arguments[k] == x for k, x in arguments.items()
            )
            if value > best:
                best, at = value, i
        if at >= 0:
            used.add(at)
            score += best
    return score / most


def _jaccard(a: Sequence[str], b: Sequence[str]) -> float:
    if a == b:
        return 1.0
    if not a or not b:
        return 0.0
    common = sum((Counter(a) & Counter(b)).values())
    return common / (len(a) + len(b) - common)


def tool_calls(samples: list[Sample], column: str = "answer") -> list[float | None]:
    """``call_score`` of each completion, 0 for a call that cannot be read.

    Args:
      samples: what to judge; in an episode the calls of all its turns count.
      column: with the expected calls: a list of calls, the same as JSON, or a text that holds them
        as a completion would. None, an empty list and a text without calls expect none: no
        opinion.

    Raises:
      UserError: what a row expects cannot be read.
    """
    points: list[float | None] = []
    for sample in samples:
        expected = expected_calls(sample, column)
        calls = calls_in(policy_text(sample))
        if not expected:
            points.append(None)
        else:
            points.append(0.0 if calls is None else call_score(expected, calls))
    return points


def tools_used(samples: list[Sample], names: Sequence[str]) -> list[float]:
    """1 where every named tool was called, else 0; a broken call makes it 0.

    The condition of the bonus of "Tool-Star: Empowering LLM-Brained Multi-Tool Reasoner via
    Reinforcement Learning" (arXiv:2505.16410); ``method = "tool_star"`` pays it.

    Args:
      samples: what to judge; in an episode the calls of all its turns count.
      names: of tools.

    Raises:
      UserError: no tool is named.
    """
    if isinstance(names, str) or not names:
        raise UserError(f"rewards.tools_used.names = {names!r}; give a list of names of tools")
    calls_by_sample = [calls_in(policy_text(sample)) or [] for sample in samples]
    return [float(set(names) <= {call["name"] for call in calls}) for calls in calls_by_sample]


def policy_text(sample: Sample) -> str:
    """All that the policy said in a sample."""
    turns = [m["content"] for m in sample.messages if m["role"] == "assistant"]
    return "\n".join(map(str, turns)) if turns else sample.completion


def expected_calls(sample: Sample, column: str) -> list[dict[str, Any]]:
    """The calls that a row expects.

    Raises:
      UserError: they cannot be read.
    """
    prompt = sample.prompt
    value = prompt.meta.get(column, prompt.answer if column == "answer" else None)
    if isinstance(value, str):
        if "<tool_call>" in value or not value.lstrip().startswith(("[", "{")):
            calls = calls_in(value)
            if calls is not None:
                return calls
        else:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
    listed = [value] if isinstance(value, Mapping) else value or []
    is_list = isinstance(listed, list | tuple)
    read = [_call(dict(x) if isinstance(x, Mapping) else x) for x in listed] if is_list else [None]
    if any(call is None for call in read):
        raise UserError(
            f"rewards.tool_calls: {column} of prompt {prompt.id} is {str(value)[:60]!r}; give a"
            ' list of calls such as {"name": "add", "arguments": {"a": 1}}'
        )
    return [call for call in read if call is not None]
