"""Hides options of custom functions that look like secrets: used, but not written to disk."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError

HIDDEN = "(hidden)"
"""Placeholder for a secret in the run directory."""

_ENVIRONMENT = "env:"
_WORDS = {
    *("key", "apikey", "token", "secret", "password", "passwd", "pwd", "passphrase", "pass"),
    *("credential", "cred", "auth", "authorization", "authentication", "bearer", "cookie", "jwt"),
}
_FORMS = re.compile(
    r"(?:Bearer|Basic|Token)\s+\S{6,}|"
    r"(?:sk|pk|rk|ghp|gho|ghs|github_pat|glpat|hf|xox[abprs])[-_](?=.*\d)[\w-]{11,}|AKIA[A-Z0-9]{12,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}.*|-----BEGIN.*|\w+://[^/\s:@]*:[^/\s@]+@.*",
    re.DOTALL,
)
"""Texts that are secrets whatever their name: headers, keys of well-known services, addresses with
a password in them."""


def hide_own(tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's tables with secrets in options of custom functions hidden.

    Args:
      tree: the tables.
      own: for ``data`` and ``optimizer`` the names of the keys that are options.
    """
    hidden = dict(tree)
    for table in ("rewards", "objective"):
        hidden[table] = {
            name: hide(value) if isinstance(value, Mapping) else hide({name: value})[name]
            for name, value in tree[table].items()
        }
    for table, names in own.items():
        options = {name: value for name, value in tree[table].items() if name in names}
        hidden[table] = {**tree[table], **hide(options)}
    if tree["model"].get("config"):
        hidden["model"] = {**tree["model"], "config": hide(tree["model"]["config"])}
    return hidden


def hide(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with ``HIDDEN`` for those that look like secrets.

    Text looks like one where a word of its name, or of a table or list that it stands in, is key,
    token, secret, password, auth or the like, or where it has the form of one, such as "Bearer
    ...". What names an environment variable, as "env:JUDGE_KEY", is no secret.

    >>> hide({"api_keys": ["sk-1"], "authToken": "env:TOKEN", "max_tokens": 5, "url": "a.b"})
    {'api_keys': ['(hidden)'], 'authToken': 'env:TOKEN', 'max_tokens': 5, 'url': 'a.b'}
    """
    return {name: _hidden(value, _names_one(name)) for name, value in options.items()}


def _hidden(value: Any, inside: bool) -> Any:
    """A value without secrets; ``inside`` something whose name is that of one."""
    if isinstance(value, Mapping):
        return {name: _hidden(each, inside or _names_one(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, inside) for each in value]
    return HIDDEN if _is_secret(value, inside) and not value.startswith(_ENVIRONMENT) else value


def reveal(options: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The options as a function gets them.

    Args:
      options: of one table; secrets as "env:NAME" are read from the environment.
      table: its dotted name, for messages.

    Raises:
      UserError: there is no such variable, or the secret is that of a run directory, which does not
        hold it.
    """
    return {
        name: _revealed(value, f"{table}.{name}", _names_one(name))
        for name, value in options.items()
    }


def _revealed(value: Any, key: str, inside: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _revealed(each, f"{key}.{name}", inside or _names_one(name))
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_revealed(each, f"{key}.{i}", inside) for i, each in enumerate(value)]
    return _value(key, value) if value == HIDDEN or _is_secret(value, inside) else value


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


def _names_one(name: object) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))
    return any({w.lower(), w.lower().removesuffix("s")} & _WORDS for w in words)


def _is_secret(value: object, inside: bool) -> bool:
    return isinstance(value, str) and (inside or _FORMS.fullmatch(value) is not None)
