"""Questions that are answered with tools: ``data.env = "python_math"``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jrl.episodes.host import HostEnv, Limits
from jrl.episodes.parsers import get_parser
from jrl.episodes.sandbox import Sandbox, SandboxLimits, python_tool
from jrl.episodes.tools import Tool, tool_env
from jrl.errors import UserError, unknown_choice
from jrl.zoo.envs.answer_rewards import EXACT, F1, last_turn_reward
from jrl.zoo.envs.calculator import calculator_tool
from jrl.zoo.envs.search import search_tool


def python_math(
    *,
    tools: Sequence[str] = ("python",),
    parser: str = "hermes",
    seconds: float = 5.0,
    network: bool = False,
    system: str | None = None,
    limits: Limits = Limits(turns=4),  # noqa: B008 - a value that nobody can change
) -> HostEnv:
    """Questions with a number for an answer, and Python to compute it with.

    The reward is 1 where the number in the last turn is the answer's (``rewards.exact``).

    Args:
      tools: of "python" and "calculator".
      parser: of the policy's family, by name (``episodes.parsers.PARSERS``).
      seconds: for one run of Python.
      network: whether Python may run where it cannot be kept from the network (``Sandbox``).
      system: a system message, or None.
      limits: of an episode, by their names in a configuration.

    Raises:
      UserError: another tool or parser, Python that would have the network, or a run of it that
        may take longer than a call.
    """
    makers = {
        "python": lambda: _python(seconds, network, limits),
        "calculator": calculator_tool,
    }
    chosen = _chosen(tools, makers)
    return tool_env(chosen, get_parser(parser), last_turn_reward(EXACT), limits, system=system)


def _chosen(names: Sequence[str], makers: Mapping[str, Callable[[], Tool]]) -> list[Tool]:
    for name in names:
        if name not in makers:
            raise unknown_choice("tools", name, makers)
    return [makers[name]() for name in names]


def _python(seconds: float, network: bool, limits: Limits) -> Tool:
    if seconds >= limits.call_seconds:
        raise UserError(
            f"seconds = {seconds:g} of a run of Python, and call_seconds ="
            f" {limits.call_seconds:g}, which would fail the member first; raise call_seconds"
        )
    return python_tool(Sandbox(SandboxLimits(seconds=seconds), network=network))


def multi_hop(
    corpus: str = "configs/search/corpus.jsonl",
    *,
    tools: Sequence[str] = ("search",),
    parser: str = "hermes",
    documents: int = 3,
    seconds: float = 5.0,
    network: bool = False,
    system: str | None = None,
    limits: Limits = Limits(turns=6),  # noqa: B008 - a value that nobody can change
) -> HostEnv:
    """Questions that take several look-ups in a local corpus, by BM25.

    The reward is ``answer_rewards.answer_f1`` of the last "Answer:"; 1 is a success.

    Args:
      corpus: a file of one {"text": ...} a line.
      tools: of "search" and "python".
      parser: of the policy's family, by name.
      documents: in a result of the search.
      seconds: for one run of Python.
      network: whether Python may run where it cannot be kept from the network (``Sandbox``).
      system: a system message, or None.
      limits: of an episode, by their names in a configuration.

    Raises:
      UserError: there is no such file, a line of it has no text, another tool, or Python that may
        not run.
    """
    makers = {
        "search": lambda: search_tool(read_corpus(corpus), count=documents),
        "python": lambda: _python(seconds, network, limits),
    }
    chosen = _chosen(tools, makers)
    return tool_env(chosen, get_parser(parser), last_turn_reward(F1), limits, system=system)


def read_corpus(path: str) -> list[str]:
    """The texts of a file with one {"text": ...} per line."""
    file, texts = Path(path).expanduser(), []
    if not file.is_file():
        raise UserError(f"corpus = {path!r}: there is no such file")
    # By line feeds alone: JSON text may hold what Python also takes for the end of a line.
    for number, line in enumerate(file.read_text("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path}, line {number}: write {{"text": ...}}') from None
    return texts
