"""Environments that configurations name: ``data.env = "jrl.envs.shipped:python_math"``."""

from __future__ import annotations

import collections
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

from jrl.envs.calculator import calculator_tool
from jrl.envs.host import HostEnv, Limits, Reply
from jrl.envs.parsers import get_parser
from jrl.envs.sandbox import Sandbox, SandboxLimits, python_tool
from jrl.envs.search import search_tool
from jrl.envs.tools import Tool, tool_env
from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample
from jrl.rewards.exact import exact_reward
from jrl.types import Prompt

TOOLS = ("python", "calculator")


def python_math(
    *,
    tools: Sequence[str] = ("python",),
    parser: str = "hermes",
    turns: int = 4,
    turn_tokens: int = 0,
    tool_calls: int = 0,
    call_seconds: float = 30.0,
    episode_seconds: float = 600.0,
    seconds: float = 5.0,
    network: bool = False,
    system: str | None = None,
) -> HostEnv:
    """Questions with a number for an answer, and Python to compute it with.

    1 point where the number in the last turn is the answer's (``rewards.exact``).

    Args:
      tools: of "python" and "calculator".
      parser: of the policy's family, by name (``envs.parsers.PARSERS``).
      turns: the most of an episode.
      turn_tokens: the most of one turn; 0 for what is left.
      tool_calls: the most of an episode; 0 for any number.
      call_seconds: for one turn of the environment, with all its tool calls.
      episode_seconds: of an episode; 0 for any time.
      seconds: for one run of Python.
      network: whether Python may run where it cannot be kept from the network (``Sandbox``).
      system: a system message, or None.

    Raises:
      UserError: another tool or parser, Python that would have the network, or a run of it that
        may take longer than a call.
    """
    made: list[Tool] = []
    if "python" in tools and seconds >= call_seconds:
        raise UserError(
            f"seconds = {seconds:g} of a run of Python, and call_seconds = {call_seconds:g}, which "
            "would fail the member first; raise call_seconds"
        )
    for name in tools:
        if name not in TOOLS:
            raise unknown_choice("tools", name, TOOLS)
        box = SandboxLimits(seconds=seconds)
        if name == "python":
            made.append(python_tool(Sandbox(box, network=network)))
        else:
            made.append(calculator_tool())

    def reward(prompt: Prompt, reply: Reply) -> float:
        return exact_reward([Sample(prompt, reply.text, reply.tokens, "stop_token")])[0]

    limits = Limits(turns, turn_tokens, tool_calls, call_seconds, 0.0, episode_seconds)
    return tool_env(made, get_parser(parser), reward, limits, system=system)


def answer_words(text: str) -> list[str]:
    """The words of an answer, without case, articles and punctuation.

    >>> answer_words("The City of Ravel.")
    ['city', 'of', 'ravel']
    """
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def answer_f1(text: str, answer: str) -> float:
    """How far the words of two answers agree: the harmonic mean of precision and recall, 0 to 1.

    >>> answer_f1("ravel", "Ravel"), round(answer_f1("the city Ravel", "Ravel"), 2)
    (1.0, 0.67)
    """
    said, right = answer_words(text), answer_words(answer)
    both = sum((collections.Counter(said) & collections.Counter(right)).values())
    return 2 * both / (len(said) + len(right)) if both else 0.0


def last_answer(text: str) -> str:
    """What stands after the last "Answer:", to the end of its line; "" where there is none."""
    found = re.findall(r"answer\s*:\s*(.*)", text, re.IGNORECASE)
    return found[-1].strip(" *.") if found else ""


def multi_hop(
    corpus: str = "configs/search/corpus.jsonl",
    *,
    parser: str = "hermes",
    documents: int = 3,
    turns: int = 6,
    turn_tokens: int = 0,
    tool_calls: int = 0,
    call_seconds: float = 30.0,
    episode_seconds: float = 600.0,
    system: str | None = None,
) -> HostEnv:
    """Questions that take several look-ups in a corpus at hand, by BM25.

    Points are ``answer_f1`` of what stands after the last "Answer:"; 1 is a success.

    Args:
      corpus: a file of one {"text": ...} a line.
      parser: of the policy's family, by name.
      documents: in a result of the search.
      turns: the most of an episode.
      turn_tokens: the most of one turn; 0 for what is left.
      tool_calls: the most of an episode; 0 for any number.
      call_seconds: for one turn of the environment, with all its tool calls.
      episode_seconds: of an episode; 0 for any time.
      system: a system message, or None.

    Raises:
      UserError: there is no such file, or a line of it has no text.
    """
    texts = read_corpus(corpus)

    def reward(prompt: Prompt, reply: Reply) -> float:
        return answer_f1(last_answer(reply.text), str(prompt.answer))

    tools = [search_tool(texts, count=documents)]
    limits = Limits(turns, turn_tokens, tool_calls, call_seconds, 0.0, episode_seconds)
    return tool_env(tools, get_parser(parser), reward, limits, system=system)


def read_corpus(path: str) -> list[str]:
    """The texts of a file of one {"text": ...} a line."""
    if not Path(path).is_file():
        raise UserError(f"corpus = {path!r}: there is no such file")
    texts = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path}, line {number}: write {{"text": ...}}') from None
    return texts
