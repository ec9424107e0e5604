"""Environments on the device by name."""

from __future__ import annotations

import inspect
from typing import Any

from jrl.episodes.device import Env
from jrl.errors import UserError, unknown_choice
from jrl.user_code import FORMS, check_options, load, made_by

_GAMES, _LIBRARIES = "jrl.zoo.envs.games", "jrl.zoo.adapters.array_games"
ENVS: dict[str, str] = {
    "bandit": f"{_GAMES}.bandit:bandit",
    "calculator": f"{_GAMES}.calculator:calculator",
    "gridworld": f"{_GAMES}.gridworld:gridworld",
    "gymnax": f"{_LIBRARIES}:gymnax",
    "guess_number": f"{_GAMES}.guess:guess_number",
    "jumanji": f"{_LIBRARIES}:jumanji",
    "lookup": f"{_GAMES}.lookup:lookup",
    "navix": f"{_LIBRARIES}:navix",
    "nim": f"{_GAMES}.nim:nim",
    "pgx": f"{_LIBRARIES}:pgx",
    "wordle": f"{_GAMES}.wordle:wordle",
}
"""Environments on the device by name: where the constructor of each is. Each takes options of its
own; those of other libraries take one of the library's names as ``id``."""


def get_env(name: str, /, **options: Any) -> Env:
    """The environment of that name, checked.

    Args:
      name: a key of ``ENVS``, or a function of one's own as ``FILE.py:function`` or
        ``module:function``.
      **options: arguments of its constructor.

    Raises:
      UserError: there is none of that name, an option is unknown or out of range, or what a
        function of one's own returned does not fit together.
    """
    if ":" not in name and name not in ENVS:
        raise UserError(f"{unknown_choice('data.env', name, ENVS)}, {FORMS}")
    make = load(ENVS.get(name, name), "data.env")
    if inspect.iscoroutinefunction(make):
        raise UserError(
            f"data.env = {name!r} is an episode, which is played on the host about prompts; give"
            " data.train (in Python, rows)"
        )
    check_options(make, options, "data")
    env = made_by(make, f"data.env = {name!r}", **options)
    if not isinstance(env, Env):
        raise UserError(f"data.env = {name!r} returned {env!r:.40}; return a jrl.episodes.Env")
    return env.check()
