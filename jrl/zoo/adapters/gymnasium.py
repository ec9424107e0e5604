"""Environments of gymnasium, played by a policy that reads and writes text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.episodes.host import Feedback, HostEnv, Limits, Reply
from jrl.system.extras import need
from jrl.types import NOTHING, Prompt
from jrl.user_code import load


def from_gymnasium(
    make: str | Callable[[], Any],
    show: Callable[[Any], str],
    read: Callable[[str], Any],
    limits: Limits,
    *,
    options: Mapping[str, Any] = NOTHING,
    unreadable: str = "That is no action.",
) -> HostEnv:
    """A gymnasium environment as one of text; needs the extra ``gymnasium`` where it is named.

    Every episode has an environment of its own, made by ``make`` and reset with the group's seed,
    so that the members of a group start alike. Reward and end are gymnasium's; an episode that its
    own time limit cuts is done as well. A positive last reward is a success.

    Args:
      make: an id that ``gymnasium.make`` knows, or a function that returns an environment.
      show: (observation) -> what the policy reads.
      read: (the policy's text) -> an action, or None where it can read none.
      limits: of an episode.
      options: of ``gymnasium.make``.
      unreadable: what the policy reads where ``read`` gave None, or an action that a discrete
        space does not hold; the turn is lost, and counted as "unreadable".

    Returns:
      The environment. Its functions are sync and run in threads.

    Raises:
      UserError: gymnasium is not installed.
    """
    if isinstance(make, str):
        name, gymnasium = make, need("gymnasium", "gymnasium", repr(make))
        make = lambda: gymnasium.make(name, **options)  # noqa: E731
    new = make

    def init(prompt: Prompt, seed: int) -> tuple[_Game, Feedback]:
        env = new()
        observation, _ = env.reset(seed=seed % 2**31)
        text = show(observation)
        start = f"{prompt.text}\n{text}" if prompt.text else text
        messages = [{"role": "user", "content": start}]
        return _Game(env, text), Feedback(messages, state_key=text)

    def step(game: _Game, reply: Reply) -> tuple[_Game, Feedback]:
        action = read(reply.text)
        if action is None or not _is_legal(game.env, action):
            messages = [{"role": "user", "content": unreadable}]
            lost = {"unreadable": 1.0}
            return game, Feedback(messages, metrics=lost, state_key=game.shown)
        observation, reward, terminated, truncated, _ = game.env.step(action)
        text = show(observation)
        done = bool(terminated or truncated)
        messages = [{"role": "user", "content": text}]
        reward = float(reward)
        won = done and reward > 0
        feedback = Feedback(messages, reward, done=done, success=won, state_key=text)
        return game._replace(shown=text), feedback

    return HostEnv(init, step, lambda game: game.env.close(), limits=limits)


class _Game(NamedTuple):
    """An environment of gymnasium, and its last observation in words."""

    env: Any
    shown: str


def _is_legal(env: Any, action: Any) -> bool:
    """Whether a discrete space holds an action; environments fail in their own ways at others."""
    space: Any = getattr(env, "action_space", None)
    return not hasattr(space, "n") or space.contains(action)


def gymnasium(
    id: str, *, show: str = "", read: str = "", arguments: Mapping[str, Any] = NOTHING
) -> HostEnv:
    """``from_gymnasium`` for configurations, of at most 50 turns unless ``data.turns`` is set.

    Args:
      id: a name that ``gymnasium.make`` knows, such as "FrozenLake-v1".
      show: ``FILE.py:function`` from an observation to text; "" for Python's ``str``.
      read: ``FILE.py:function`` from text to an action, or None where it can read none; "" for the
        last whole number of the text.
      arguments: of ``gymnasium.make``.
    """
    to_text: Callable[[Any], str] = load(show, "data.show") if show else str
    to_action = load(read, "data.read") if read else last_integer
    return from_gymnasium(id, to_text, to_action, Limits(turns=50), options=arguments)


def last_integer(text: str) -> int | None:
    """The last whole number of a text, None where there is none.

    >>> last_integer("Not 1, but 2."), last_integer("left")
    (2, None)
    """
    numbers = re.findall(r"-?\b\d{1,9}\b", text)
    return int(numbers[-1]) if numbers else None
