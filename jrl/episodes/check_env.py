"""Checks of an environment on the host before anything compiles: its parts and their signatures."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from jrl.episodes.host import ChatOptions, EnvExtras, HostEnv, Lifecycle, Limits
from jrl.episodes.parsers import PARSERS
from jrl.errors import UserError, unknown_choice
from jrl.user_code import check_function

OWN_IDS = (
    *("turn", "step", "state", "node", "context", "episode", "role"),
    *("prompt", "ask", "stratum", "answer", "replayed"),
)
"""Names in ``batch.ids`` that every environment's rows may have."""

FORM = "async def episode(policy, prompt), perhaps with seed, the seed of the group"

_RECORDS: dict[str, type] = {
    "limits": Limits,
    "chat": ChatOptions,
    "lifecycle": Lifecycle,
    "extras": EnvExtras,
}
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "init": ("prompt", "seed"),
    "step": ("state", "reply"),
    "close": ("state",),
    "fork": ("state",),
    "lifecycle.begin": ("step", "split"),
    "lifecycle.shutdown": (),
    "extras.write": ("failed", "count", "seed"),
}
"""Arguments by position."""
_OPTIONAL = ("fork", "extras.write")
"""Functions that may be None."""


def check_env(env: Any, key: str = "env") -> HostEnv:
    """The environment.

    Args:
      env: what should be a ``HostEnv``.
      key: that names it, for messages.

    Raises:
      UserError: it is none, or a part is missing, of another type, or takes other arguments; names
        the part and what would do.
    """
    if not isinstance(env, HostEnv):
        if inspect.iscoroutine(env):
            env.close()  # or Python would warn that nobody awaited it
        raise UserError(
            f"{key} is a {type(env).__name__}; give a jrl.episodes.HostEnv, such as"
            " HostEnv(init, step), or name an async def episode(policy, prompt)"
        )
    for name, record in _RECORDS.items():
        if not isinstance(value := getattr(env, name), record):
            raise UserError(f"{key}.{name} = {value!r:.40}; must be a {record.__name__}")
    for name, arguments in _FUNCTIONS.items():
        value = env
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None or name not in _OPTIONAL:
            check_function(value, arguments, f"{key}.{name}", name in _OPTIONAL)
    for name, number, least in (
        ("players", env.players, 1),
        ("extras.asks", env.extras.asks, 1),
        ("lifecycle.at_once", env.lifecycle.at_once, 0),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{key}.{name} = {number!r:.40}; must be a number, at least {least}")
    for name, names in (("parts", env.parts), ("chat.roles", env.chat.roles)):
        _check_names(names, f"{key}.{name}")
        if not names:
            raise UserError(f"{key}.{name} = (); give at least one name")
    _check_labels(env.extras, f"{key}.extras")
    env.limits.check(f"{key}.limits")
    if env.chat.family and env.chat.family not in PARSERS:
        raise unknown_choice(f"{key}.chat.family", env.chat.family, PARSERS)
    return env


def _check_names(names: Any, key: str) -> None:
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{key} = {names!r:.60}; must be a tuple of names")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{key} = {names!r:.60}: {twice[0]!r} is there twice")


def _check_labels(extras: EnvExtras, key: str) -> None:
    """Raises UserError for names of labels that are invalid, repeated, or already ids."""
    names_taken = set(OWN_IDS)
    for field, names in (("labels", extras.labels), ("token_labels", extras.token_labels)):
        _check_names(names, f"{key}.{field}")
        for name in names:
            if name in names_taken:
                raise UserError(
                    f"{key}.{field}: {name!r} is taken; choose a name that is not a label yet,"
                    f" and none of {', '.join(OWN_IDS)}"
                )
            names_taken.add(name)


# ---------------------------------------------------------------- coroutines


def is_episode(function: Callable[..., Any]) -> bool:
    """Whether a function is an episode, or was meant to be one, and no maker of an environment."""
    if _is_async(function) or inspect.isasyncgenfunction(function):
        return True
    return _arguments(function)[:2] == ["policy", "prompt"]


def check_episode(episode: Any, key: str, options: bool = False) -> None:
    """Raises UserError for what cannot be played as an episode.

    Args:
      episode: the function.
      key: that names it, for messages.
      options: whether arguments beside policy, prompt and seed may need a value.
    """
    if not callable(episode):
        raise UserError(f"{key} = {episode!r:.60}; give {FORM}")
    names = _arguments(episode)
    signature = f"{getattr(episode, '__name__', 'the episode')}({', '.join(names)})"
    if inspect.isasyncgenfunction(episode):
        raise UserError(
            f"{key}: {signature} yields; an episode awaits its turns and returns: {FORM}"
        )
    if not _is_async(episode):
        raise UserError(f"{key}: {signature} is not async; write {FORM}")
    parameters = list(inspect.signature(episode).parameters.values())
    by_place = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    swapped = by_place[:1] == ["prompt"] or by_place[1:2] == ["policy"]
    if len(by_place) < 2 or swapped or "seed" in by_place[:2]:
        raise UserError(
            f"{key}: {signature} must take policy and prompt, in this order; write {FORM}"
        )
    required = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in (*by_place[:2], "seed")
    ]
    if required and not options:
        raise UserError(
            f"{key}: {signature} needs {required[0]}, which no episode gets; write {FORM}"
        )


def check_roles(episode: Callable[..., Any], roles: tuple[str, ...], key: str) -> None:
    """Raises UserError for roles that are invalid, or that the episode's source uses beside them.

    Args:
      episode: the function.
      roles: its names.
      key: that names the function, for messages.
    """
    if not all(isinstance(name, str) for name in roles) or len(set(roles)) < len(roles):
        raise UserError(f"{key}: roles = {roles!r:.80}; give each role a name of its own")
    for name in _roles_in_source(episode):
        if name not in roles:
            all_roles = ", ".join(f'"{role}"' for role in (*roles, name))
            raise UserError(
                f"{key}: it awaits turns of {name!r}, and its roles are {', '.join(roles)}; name"
                f" all of them above it, the first to speak first, such as @roles({all_roles})"
            )


def _roles_in_source(episode: Callable[..., Any]) -> list[str]:
    """The names in ``policy["NAME"]`` and ``policy.role("NAME", ...)``, where there is source."""
    while isinstance(episode, functools.partial):
        episode = episode.func
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(episode)))
    except (OSError, TypeError, SyntaxError):
        return []  # typed into a prompt, an object, or a part of a larger expression
    policy, names = _arguments(episode)[0], []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=str(owner)), slice=ast.Constant(value=str(name))):
                names += [name] if owner == policy else []
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=str(owner)), attr="role"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names += [name] if owner == policy else []
    return names


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call_method = type(function).__call__  # of an object whose __call__ is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def _arguments(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return []  # written in C
