"""Checks of an environment on the host before anything compiles: its parts and their signatures."""

from __future__ import annotations

import inspect
from typing import Any

from jrl.episodes.host import ChatOptions, EnvExtras, HostEnv, Lifecycle, Limits
from jrl.errors import UserError

OWN_IDS = (
    *("turn", "step", "state", "node", "context", "episode", "role"),
    *("prompt", "ask", "stratum", "answer", "replayed"),
)
"""Names in ``batch.ids`` that every environment's rows may have."""

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
"""Arguments by position; ``fork`` and ``extras.write`` may be None."""


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
            f"{key} is a {type(env).__name__}; give a jrl.episodes.host.HostEnv, such as"
            " HostEnv(init, step), or name an async def episode(policy, prompt)"
        )
    for name, record in _RECORDS.items():
        if not isinstance(value := getattr(env, name), record):
            raise UserError(f"{key}.{name} = {value!r:.40}; must be a {record.__name__}")
    for name, arguments in _FUNCTIONS.items():
        value = env
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None or name not in ("fork", "extras.write"):
            check_function(value, arguments, f"{key}.{name}", name in ("fork", "extras.write"))
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
    env.limits.check()
    return env


def check_function(
    function: Any, arguments: tuple[str, ...], key: str, optional: bool = False
) -> None:
    """Raises UserError unless a value can be called with so many arguments by position.

    Args:
      function: the value.
      arguments: their names, for the message.
      key: that names the function, for the message.
      optional: whether None would do, for the message.
    """
    if not callable(function):
        none = " or None" if optional else ""
        raise UserError(
            f"{key} = {function!r:.40}; must be a function({', '.join(arguments)}){none}"
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # written in C: its arguments are not known
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__name__", "it")
        raise UserError(
            f"{key}: {name}{_shown(signature)} must take ({', '.join(arguments)})"
        ) from None


def _shown(signature: inspect.Signature) -> str:
    """The arguments without annotations.

    >>> _shown(inspect.signature(lambda state, *, key=1: None))
    '(state, *, key=1)'
    """
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _check_names(names: Any, key: str) -> None:
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{key} = {names!r:.60}; must be a tuple of names")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{key} = {names!r:.60}: {twice[0]!r} is there twice")


def _check_labels(extras: EnvExtras, key: str) -> None:
    """Raises UserError for names of labels that are invalid, repeated, or already ids."""
    taken = set(OWN_IDS)
    for field, names in (("labels", extras.labels), ("token_labels", extras.token_labels)):
        _check_names(names, f"{key}.{field}")
        for name in names:
            if name in taken:
                raise UserError(
                    f"{key}.{field}: {name!r} is taken; choose a name that is not a label yet,"
                    f" and none of {', '.join(OWN_IDS)}"
                )
            taken.add(name)
