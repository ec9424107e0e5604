"""Environments around other models, servers and libraries, for configurations.

What these take in Python as functions and objects, a configuration names: a model behind an
endpoint by its address, a function as ``FILE.py:function``.

    [data]
    train = "train.jsonl"
    env = "jrl.zoo.envs.named:guided"
    url = "http://localhost:8000/v1"
    model = "some-model"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.episodes.host import HostEnv, Limits, Reply
from jrl.episodes.parsers import get_parser
from jrl.episodes.tools import tool_env
from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.rewards.exact import exact_reward
from jrl.types import NOTHING, Prompt
from jrl.user_code import load
from jrl.zoo.adapters.gymnasium import from_gymnasium
from jrl.zoo.adapters.mcp import McpServer
from jrl.zoo.envs import players
from jrl.zoo.envs.shipped import answer_f1, last_answer

EXACT, F1 = "exact", "f1"


def mcp(
    server: str | Sequence[str],
    *,
    reward: str = EXACT,
    names: Sequence[str] = (),
    pass_variables: Sequence[str] = (),
    parser: str = "hermes",
    turns: int = 8,
    turn_tokens: int = 0,
    tool_calls: int = 0,
    call_seconds: float = 30.0,
    episode_seconds: float = 600.0,
    seconds: float = 10.0,
    system: str | None = None,
) -> HostEnv:
    """Questions that the policy answers with the tools of an MCP server.

    Args:
      server: its address, or the command that starts it, a list.
      reward: of the last turn: "exact" for the answer's number or text (``rewards.exact``), "f1"
        for the words of what stands after the last "Answer:" (``shipped.answer_f1``), or
        ``FILE.py:function`` from (prompt, text) to points.
      names: of the tools, as the server has them; [] for all.
      pass_variables: names of environment variables that the command gets.
      parser: of the policy's family, by name.
      turns: the most of an episode.
      turn_tokens: the most of one turn; 0 for what is left.
      tool_calls: the most of an episode; 0 for any number.
      call_seconds: for one turn of the environment, with all its tool calls.
      episode_seconds: of an episode; 0 for any time.
      seconds: for one call of a tool.
      system: a system message, or None.

    Raises:
      UserError: the server does not answer, or has no tool that can be used.
    """
    judge, family = judge_of(reward, "data.reward"), get_parser(parser)
    given = {
        name: players.environment_variable(name, "data.pass_variables") for name in pass_variables
    }
    found = McpServer(server, given)
    limits = Limits(turns, turn_tokens, tool_calls, call_seconds, 0.0, episode_seconds)

    def points(prompt: Prompt, reply: Reply) -> Any:
        return judge(prompt, reply.text)

    try:
        tools = found.tools(names, seconds=seconds)
        return found.close_with(tool_env(tools, family, points, limits, system=system))
    except BaseException:
        found.close()
        raise


def guided(
    url: str,
    model: str,
    *,
    reward: str = EXACT,
    turns: int = 1,
    system: str | None = None,
    hint: str = "{question}\n\n{guidance}",
    key_variable: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> HostEnv:
    """``players.guided_env``: the policy guides a model behind an endpoint, whose answers count.

    Args:
      url: of the endpoint's base, such as "http://localhost:8000/v1".
      model: as the endpoint calls it.
      reward: of that model's answers: "exact", "f1", or ``FILE.py:function`` from (prompt, text).
      turns: of the policy.
      system: what the policy is told to do, or None.
      hint: how question and guidance become the other model's first message.
      key_variable: the environment variable that holds the endpoint's key, or "".
      max_tokens: of an answer.
      temperature: of its draws.

    Raises:
      UserError: there is no such function or variable.
    """
    other = players.keyed_endpoint(
        url, model, key_variable, max_tokens=max_tokens, temperature=temperature
    )
    judge = judge_of(reward, "data.reward")
    return players.guided_env(other, judge, turns=turns, system=system, hint=hint)


def dialogue(
    judge: str,
    *,
    user: str = "",
    url: str = "",
    model: str = "",
    turns: int = 8,
    key_variable: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> HostEnv:
    """``players.dialogue_env``: the policy talks with a user, of whom every turn is judged.

    Args:
      judge: ``FILE.py:function`` from (prompt, messages) to points, or (points, whether it ends).
      user: ``FILE.py:function`` from messages to text; "" for a model behind an endpoint.
      url: of the endpoint's base.
      model: as the endpoint calls it.
      turns: the most of the policy's.
      key_variable: the environment variable that holds the endpoint's key, or "".
      max_tokens: of an answer.
      temperature: of its draws.

    Raises:
      UserError: there is no such function or variable, or neither user nor endpoint.
    """
    if user:
        speaker = load(user, "data.user")
    elif url and model:
        speaker = players.keyed_endpoint(
            url, model, key_variable, max_tokens=max_tokens, temperature=temperature
        )
    else:
        raise UserError("data.user is missing: name a FILE.py:function, or give url and model")
    return players.dialogue_env(speaker, load(judge, "data.judge"), turns=turns)


def pair(*, reward: str = EXACT) -> HostEnv:
    """``players.pair_env``: the policy as pioneer and observer.

    Args:
      reward: of each answer: "exact", "f1", or ``FILE.py:function`` from (prompt, text) to points.
    """
    return players.pair_env(judge_of(reward, "data.reward"))


def consultation(
    url: str,
    model: str,
    examiner: str,
    *,
    turns: Sequence[int] = (2, 10),
    key_variable: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> HostEnv:
    """``players.consultation_env``: the policy as a doctor, a model as the patient.

    Args:
      url: of the patient's endpoint.
      model: as the endpoint calls it.
      examiner: ``FILE.py:function`` from (prompt, diagnosis) to 0 to 10 points.
      turns: the least and the most of an episode.
      key_variable: the environment variable that holds the endpoint's key, or "".
      max_tokens: of an answer.
      temperature: of its draws.
    """
    if len(turns) != 2:
        raise UserError(f"data.turns = {list(turns)}; give the least and the most")
    patient = players.keyed_endpoint(
        url, model, key_variable, max_tokens=max_tokens, temperature=temperature
    )
    judge = load(examiner, "data.examiner")
    return players.consultation_env(patient, judge, turns=(turns[0], turns[1]))


def zero_search(
    url: str,
    model: str,
    steps: int,
    *,
    reward: str = EXACT,
    parser: str = "hermes",
    start: float = 0.0,
    end: float = 0.5,
    turns: int = 6,
    turn_tokens: int = 0,
    tool_calls: int = 0,
    call_seconds: float = 30.0,
    episode_seconds: float = 600.0,
    key_variable: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> HostEnv:
    """``players.zero_search_env``: questions with a search that a model behind an endpoint plays.

    Args:
      url: of the endpoint's base.
      model: as the endpoint calls it.
      steps: training steps of the run, ``train.steps``.
      reward: of the last turn: "exact", "f1" as in the paper, or ``FILE.py:function`` from (prompt,
        text) to points.
      parser: of the policy's family, by name.
      start: chance of noise at first, and in evaluations.
      end: chance of noise in the end.
      turns: the most of an episode.
      turn_tokens: the most of one turn; 0 for what is left.
      tool_calls: the most of an episode; 0 for any number.
      call_seconds: for one turn of the environment, with all its searches.
      episode_seconds: of an episode; 0 for any time.
      key_variable: the environment variable that holds the endpoint's key, or "".
      max_tokens: of an answer.
      temperature: of its draws.
    """
    other = players.keyed_endpoint(
        url, model, key_variable, max_tokens=max_tokens, temperature=temperature
    )
    judge = judge_of(reward, "data.reward")
    limits = Limits(turns, turn_tokens, tool_calls, call_seconds, 0.0, episode_seconds)

    def points(prompt: Prompt, reply: Reply) -> Any:
        return judge(prompt, reply.text)

    family = get_parser(parser)
    return players.zero_search_env(other, family, points, limits, steps=steps, start=start, end=end)


def gymnasium(
    id: str,
    *,
    show: str = "",
    read: str = "",
    turns: int = 50,
    turn_tokens: int = 0,
    arguments: Mapping[str, Any] = NOTHING,
) -> HostEnv:
    """``gymnasium.from_gymnasium``: an environment of gymnasium by its name.

    Args:
      id: a name that ``gymnasium.make`` knows, such as "FrozenLake-v1".
      show: ``FILE.py:function`` from an observation to text; "" for Python's own words.
      read: ``FILE.py:function`` from text to an action, or None where it can read none; "" for the
        last whole number of the text.
      turns: the most of an episode.
      turn_tokens: the most of one turn; 0 for what is left.
      arguments: of ``gymnasium.make``.
    """
    shown: Callable[[Any], str] = load(show, "data.show") if show else str
    taken = load(read, "data.read") if read else last_integer
    limits = Limits(turns=turns, turn_tokens=turn_tokens)
    return from_gymnasium(id, shown, taken, limits, options=arguments)


def last_integer(text: str) -> int | None:
    """The last whole number of a text, None where there is none.

    >>> last_integer("Not 1, but 2."), last_integer("left")
    (2, None)
    """
    found = re.findall(r"-?\b\d{1,9}\b", text)
    return int(found[-1]) if found else None


def judge_of(name: str, key: str) -> Callable[[Prompt, str], Any]:
    """(prompt, text) -> points, by name."""
    if name == F1:
        return lambda prompt, text: answer_f1(last_answer(text), str(prompt.answer))
    if name != EXACT:
        return load(name, key)

    def exact(prompt: Prompt, text: str) -> float:
        return exact_reward([Sample(prompt, text, np.zeros(0, np.int32), "stop_token")])[0]

    return exact
