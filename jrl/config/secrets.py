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
"""Words of a name that make its value a secret."""
_ENDINGS = ("token", "secret", "password", "passwd", "passphrase", "credential", "cookie")
"""Ends of words written together that do so too, such as authtoken."""
_KEYS = (
    *("access", "account", "api", "app", "auth", "client", "deploy", "encryption", "license"),
    *("master", "private", "secret", "server", "service", "session", "shared", "signing", "ssh"),
    *("storage", "subscription", "user", "webhook"),
)
"""What "key" is written together with in such names, as monkey is not."""
_PREFIXED = (
    *("sk", "pk", "rk", "ghp", "gho", "ghs", "ghu", "github_pat", "glpat", "hf", "xox[abeprs]"),
    *("gsk", "xai", "r8", "pplx", "nvapi", "tvly", "fw", "dop_v1", "npm", "pypi", "lsv2", "csk"),
    *("shpat", "shpss", "sntrys", "dckr_pat", "atlasv1", "whsec", "tgp_v1", "jina", "pcsk", "SG"),
)
"""Beginnings of the keys of well-known services, before "-", "_" or "."."""
_HEADER = re.compile(r"(?:Bearer|Basic|Token)\s+\S{6,}")
"""A text that is nothing but the value of a header."""
_FORMS = re.compile(
    r"(?i:authorization)[\"']?\s*:\s*[\"']?\w+\s+\S{6,}|"
    rf"(?<![\w/.-])(?:{'|'.join(_PREFIXED)})[-_.](?=[\w.-]*\d)[\w.-]{{11,}}(?![\w/])|"
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{10,}|"
    r"\beyJ[\w-]{8,}\.[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE|"
    r"\w+://(?:[^/\s:@]*:[^/\s@]+|[0-9a-zA-Z_-]{20,})@"
)
"""Secrets whatever the name of the text that holds them: headers, keys of well-known services,
addresses with a password or a key before their host."""
_ASSIGNED = re.compile(
    r"(?:^|[?&;,\s])-{0,2}([\w.-]+)\s*=\s*([^\s&;,]+)|^([\w-]+):\s+(\S+)$|"
    r"[\"']([\w-]+)[\"']\s*:\s*[\"']([^\"']+)[\"']"
)
"""A name with its value inside a text: of a query, a connection string, an option, a header."""
_SIGNED = {"sig", "signature"}
"""Words of the names of values in a query that let whoever has the address in."""
_FLAG = re.compile(r"(?:^|\s)--?([\w-]+)(?:\s+([^-\s]\S*))?")
"""An option of a command, and what follows it."""
_NUMBER = re.compile(r"[\d.]*")


def hide_own(tree: Mapping[str, Any], option_keys: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's tables with secrets in options of custom functions hidden.

    Args:
      tree: the tables.
      option_keys: for ``data`` and ``optimizer`` the names of the keys that are options.
    """
    hidden = dict(tree)
    for table in ("rewards", "objective"):
        hidden[table] = {
            name: hide(value) if isinstance(value, Mapping) else hide({name: value})[name]
            for name, value in tree[table].items()
        }
    for table, names in option_keys.items():
        options = {name: value for name, value in tree[table].items() if name in names}
        hidden[table] = {**tree[table], **hide(options)}
    if tree["model"].get("config"):
        hidden["model"] = {**tree["model"], "config": hide(tree["model"]["config"])}
    return hidden


def hide(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with ``HIDDEN`` for those that look like secrets.

    Text looks like one where a word of its name, or of a table or list that it stands in, is key,
    token, secret, password, auth or the like, or where it has the form of one, such as "Bearer
    ...", or holds such a name with its value, as queries of addresses and options of commands do.
    What names an environment variable, as "env:JUDGE_KEY" or ``key_variable``, is no secret.

    >>> hide({"api_keys": ["sk-1"], "authToken": "env:TOKEN", "max_tokens": 5, "url": "a.b"})
    {'api_keys': ['(hidden)'], 'authToken': 'env:TOKEN', 'max_tokens': 5, 'url': 'a.b'}
    >>> hide({"key_variable": "JUDGE_KEY"})
    {'key_variable': 'JUDGE_KEY'}
    """
    return {name: _hidden(value, _names_one(name)) for name, value in options.items()}


def _hidden(value: Any, inside: bool) -> Any:
    """A value without secrets; ``inside`` something whose name is that of one."""
    if isinstance(value, Mapping):
        return {name: _hidden(each, inside or _names_one(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        flags = [False, *map(_is_secret_flag, value)]
        pairs = zip(value, flags[:-1], strict=True)
        return [_hidden(x, inside or (flag and not _is_number(x))) for x, flag in pairs]
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
    """Whether a name is that of a secret."""
    if str(name).endswith("_variable"):  # it names a variable of the environment
        return False
    together = {f"{before}key" for before in _KEYS}
    return any(w in _WORDS or w in together or w.endswith(_ENDINGS) for w in _words(name))


def _is_secret_flag(value: object) -> bool:
    """Whether a list's item is an option whose value is a secret, the next item."""
    if not isinstance(value, str):
        return False
    match = _FLAG.fullmatch(value)
    return match is not None and match[2] is None and _names_one(match[1])


def _is_number(value: object) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def _is_secret(value: object, inside: bool) -> bool:
    if not isinstance(value, str):
        return False
    if inside or _HEADER.fullmatch(value) is not None or _FORMS.search(value) is not None:
        return True
    pairs = [(m[1] or m[3] or m[5], m[2] or m[4] or m[6]) for m in _ASSIGNED.finditer(value)]
    pairs += [(m[1], m[2]) for m in _FLAG.finditer(value) if m[2]]
    signed = {name for name, _ in pairs if "://" in value and _SIGNED & set(_words(name))}
    return any((name in signed or _names_one(name)) and not _is_number(x) for name, x in pairs)


def _words(name: object) -> list[str]:
    """The words that a name is written of, in small letters and without a plural."""
    return [w.lower().removesuffix("s") for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))]
