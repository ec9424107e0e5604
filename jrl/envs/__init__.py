"""Environments: episodes of many turns, played against the policy inside one program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jrl.envs.base import Env, Start, Turn, task_env
from jrl.envs.games.bandit import bandit
from jrl.envs.games.calculator import calculator
from jrl.envs.games.gridworld import gridworld
from jrl.envs.games.guess import guess_number
from jrl.envs.games.lookup import lookup
from jrl.envs.games.nim import nim
from jrl.envs.games.wordle import wordle
from jrl.envs.libraries import LIBRARIES
from jrl.errors import UserError, choose
from jrl.own import FORMS, check_options, load, made_by

ENVS: dict[str, Callable[..., Env]] = {
    "bandit": bandit,
    "calculator": calculator,
    "gridworld": gridworld,
    "guess_number": guess_number,
    "lookup": lookup,
    "nim": nim,
    "wordle": wordle,
}
"""Constructors of environments by name; each takes options of its own."""
KNOWN = ENVS | LIBRARIES
"""With those of other libraries, which take one of their names as ``id``."""


def get_env(name: str, **options: Any) -> Env:
    """The environment of that name, checked.

    Args:
      name: a key of ``KNOWN``, or a function of one's own as ``FILE.py:function`` or
        ``module:function``.
      **options: arguments of its constructor.

    Raises:
      UserError: there is none of that name, an option is unknown or out of range, or what a
        function of one's own returned does not fit together.
    """
    if ":" not in name and name not in KNOWN:
        raise UserError(f"{choose('data.env', name, KNOWN)}, {FORMS}")
    make = load(name, "data.env") if ":" in name else KNOWN[name]
    if inspect.iscoroutinefunction(make):
        raise UserError(
            f"data.env = {name!r} is an episode, which is played on the host about prompts; give"
            " data.train (in Python, rows)"
        )
    check_options(make, options, "data")
    env = made_by(make, f"data.env = {name!r}", **options)
    if not isinstance(env, Env):
        raise UserError(f"data.env = {name!r} returned {env!r:.40}; return a jrl.envs.Env")
    return env.check()


__all__ = ["ENVS", "KNOWN", "Env", "Start", "Turn", "get_env", "task_env"]
