"""Options of rewards that look like secrets: they are used, and not written down."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError

HIDDEN = "(hidden)"
"""What a run directory holds instead of a secret."""

_ENVIRONMENT = "env:"
_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential"}


def hide(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with ``HIDDEN`` for those that look like secrets.

    Text looks like one where a word of its name is key, token, secret, password or the like. What
    names an environment variable, as "env:JUDGE_KEY", is no secret.

    >>> hide({"api_key": "sk-1", "authToken": "env:TOKEN", "max_tokens": 5, "url": "a.b"})
    {'api_key': '(hidden)', 'authToken': 'env:TOKEN', 'max_tokens': 5, 'url': 'a.b'}
    """
    return {
        name: hide(value)
        if isinstance(value, Mapping)
        else HIDDEN
        if _is_secret(name, value) and not value.startswith(_ENVIRONMENT)
        else value
        for name, value in options.items()
    }


def reveal(options: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The options as a reward function gets them.

    Args:
      options: of one table; secrets as "env:NAME" are read from the environment.
      table: its dotted name, for messages.

    Raises:
      UserError: there is no such variable, or the secret is that of a run directory, which does not
        hold it.
    """
    found = {}
    for name, value in options.items():
        key = f"{table}.{name}"
        if isinstance(value, Mapping):
            value = reveal(value, key)
        elif _is_secret(name, value):
            value = _value(key, value)
        found[name] = value
    return found


def _value(key: str, value: str) -> str:
    if value == HIDDEN:
        raise UserError(
            f"{key} = {value!r}: the run directory does not hold it; give it again, or keep it in "
            f"an environment variable and set {key} = 'env:NAME'"
        )
    variable = value.removeprefix(_ENVIRONMENT)
    if variable == value:
        return value
    if variable not in os.environ:
        raise UserError(f"{key} = {value!r}: there is no environment variable {variable}; set it")
    return os.environ[variable]


def _is_secret(name: str, value: object) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return isinstance(value, str) and any(w.lower().removesuffix("s") in _WORDS for w in words)
