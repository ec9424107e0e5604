"""Hides options of custom functions that look like secrets: used, but not written to disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError

HIDDEN = "(hidden)"
"""Placeholder for a secret in the run directory."""

_ENVIRONMENT = "env:"
_WORDS = {
    *("key", "apikey", "token", "secret", "password", "passwd", "pwd", "passphrase"),
    *("passcode", "pw", "webhook", "dsn", "otp", "totp", "mnemonic", "sas"),
    *("credential", "cred", "auth", "oauth", "authorization", "authentication"),
    *("bearer", "cookie", "jwt"),
}
"""Words of a name that make its value a secret."""
_ENDINGS = ("token", "secret", "password", "passwd", "passphrase", "credential", "cookie")
"""Ends of words written together that do so too, such as authtoken."""
_KEYS = (
    *("access", "account", "api", "app", "auth", "client", "deploy", "encryption", "license"),
    *("master", "private", "secret", "server", "service", "session", "shared", "signing", "ssh"),
    *("storage", "subscription", "user", "webhook", "anthropic", "hf", "openai", "wandb"),
)
"""Words joined to "key" in names of secrets, unlike in "monkey"."""
_PASSES = {
    *("all", "allow", "at", "backward", "band", "bonu", "by", "can", "check", "compile"),
    *("compiler", "did", "each", "eval", "extra", "final", "first", "forward", "full", "fusion"),
    *("graph", "high", "if", "k", "last", "low", "max", "min", "multi", "must", "n", "next", "no"),
    *("not", "num", "on", "one", "optimizer", "partial", "per", "pytest", "second", "should"),
    *("single", "test", "third", "to", "train", "two", "unit"),
}
"""Words before "pass", without an s, where it is no password: first_pass, unlike db_pass."""
_LOGINS = {
    *("account", "admin", "api", "app", "bitbucket", "cert", "client", "database", "db", "docker"),
    *("email", "ftp", "gh", "git", "github", "gitlab", "http", "imap", "keystore", "ldap", "login"),
    *("mail", "mongo", "my", "mysql", "pg", "postgre", "proxy", "redi", "root", "server", "sftp"),
    *("smtp", "sql", "ssh", "sudo", "user", "vault", "vpn", "wifi"),
}
"""Words before "pat", a personal access token, as ``_words`` has them, without an s at the end."""
_OF_TOKENS = (
    *("budget", "clip", "count", "credit", "entropy", "id", "kl", "length", "level", "limit"),
    *("loss", "mask", "mean", "mode", "penalty", "reward", "sum", "type", "weight", "weighting"),
)
"""What follows "token" where it is one of a vocabulary."""
_PLAIN_KEYS = (
    *("answer", "column", "field", "foreign", "group", "label", "metric", "primary", "prompt"),
    *("question", "response", "reward", "sort", "target"),
)
"""Words joined to "key" in names of columns."""
_PLAIN_TOKENS = (
    *("audio", "begin", "bo", "bos", "cls", "end", "eo", "eos", "image", "mask", "pad", "sep"),
    *("special", "start", "stop", "think", "turn", "unk"),
)
"""Words joined to "token" in names of vocabulary entries."""
_PREFIXED = (
    *("sk", "pk", "rk", "ghp", "gho", "ghs", "ghu", "github_pat", "glpat", "hf", "xox[abeprs]"),
    *("gsk", "xai", "r8", "pplx", "nvapi", "tvly", "fw", "dop_v1", "npm", "pypi", "lsv2", "csk"),
    *("shpat", "shpss", "sntrys", "dckr_pat", "atlasv1", "whsec", "tgp_v1", "jina", "pcsk", "SG"),
    *("hv[bs]", "tskey", "figd", "sntryu", "ph[cx]", "wandb_v1", "ntn", "sbp", "sb_secret"),
    *("ghr", "xapp", "gl(?:dt|rt|ptt|ft|soat|cbt)", "GOCSPX", "PMAK", "rubygems"),
    *("glc", "lin_api", "CCIPAT", "AGE-SECRET-KEY", "e2b", "esecret", "dp\\.pt"),
)
"""Beginnings of the keys of well-known services, before "-", "_" or "."."""
_HEADER = re.compile(r"(?:Bearer|Basic|Token)\s+\S{6,}|(?i:bearer|basic|token)\s+(?=\S*\d)\S{12,}")
"""A text that is nothing but the value of a header."""
_FORMS = re.compile(
    r"(?i:authorization)[\"']?\s*:\s*[\"']?"
    r"(?:(?i:apikey|basic|bearer|digest|hmac|key|token)\s+|\w+\s+(?=\S*\d))\S{6,}|"
    rf"(?<![\w/.-])(?:{'|'.join(_PREFIXED)})[-_.](?=[\w.-]*\d)[\w.-]{{11,}}(?![\w/])|"
    r"(?<![\w/.-])(?:hf|api_org)_(?=\w*[a-z])(?=\w*[A-Z])[a-zA-Z]{20,}(?![\w/])|"
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{10,}|"
    r"\b(?:dapi|AC|SK)[0-9a-f]{32}\b|\bkey-[0-9a-f]{32}\b|\bsecret_[a-zA-Z0-9]{32,}|\bATATT[\w-]{16,}|\bEAAC\w{20,}|"
    r"\bfc-[0-9a-f]{32}\b|\bpa-[\w-]{40,}|\brpa_[A-Z0-9]{30,}|\bABSK[\w+/=]{40,}|\b1//0[\w-]{20,}|"
    r"\bBearer\s+(?=[\w.~+/-]*\d)[\w.~+/-]{12,}|"
    r"\b\d{8,10}:AA[\w-]{30,}|hooks\.slack\.com/\w+/\S{16,}|/api/webhooks/\d+/\S{16,}|/bot\d+:[\w-]{16,}|"
    r"(?:^|\s)(?:-u|--user)[ =](?!\d+:\d+\s)[^\s:]+:\S+|"
    r"\beyJ[\w-]{8,}\.[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE|"
    r"\w+://(?:[^/\s:@]*:[^/\s@]+|[0-9a-zA-Z_-]{20,})@"
)
"""Secrets whatever the name of the text that holds them: headers, keys of well-known services,
addresses with a password or a key before their host."""
_ASSIGNED = re.compile(
    r"(?:^|[?&#;,(\s])-{0,2}([\w.-]+)\s*=\s*([^\s&;,]+)|^([\w-]+):\s+(\S+)$|"
    r"(?m:^\s*([\w-]+):\s+(?=\S*\d)(\S{8,})$)|"
    r"[\"']([\w-]+)[\"']\s*:\s*[\"']([^\"']+)[\"']|[\"']([\w-]+):\s+([^\s\"']+)"
)
"""A name with its value inside a text: of a query, a connection string, an option, a header."""
_QUERY = re.compile(r"([?&#]([\w.-]+)=)[^\s&#'\"]+")
"""A name with its value in an address."""
_SIGNED = {"sig", "signature", "pass"}
"""Words of the names of values in a query that let whoever has the address in."""
_LONG_CODE = 12
"""Characters of a "code" in a query that is one of these, and not one of a language."""
_CLEAR = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase|authorization"
    r"|(?:access|auth|bearer|github|hf|refresh)[_-]?token)"
)
"""Ends of names that are a secret's whatever they belong to."""
_QUOTED = re.compile(
    r"(?<![\w.-])([\w.-]+)([\"']?\s*[=:]\s*([\"']))(?!env:|\(hidden\))"
    r"((?:\\.|(?!\3)[^\\\n]){4,})"
)
"""A name and its quoted value in a message, as far as the line goes where no quote ends it."""
_LONG_VALUE = 8
"""Characters of a quoted value that is a secret by any name that ``hide`` knows."""
_NAMED = re.compile(
    rf"(?im)((?<![\w.-])[\w.-]*{_CLEAR}[\"']?(?:\s*=\s*|:(?=\S)"
    r"|:[ \t]+(?=[^\s\"',;}&\d]*\d[^\s\"',;}&]*(?:[\"',;}]|(?<=:)\s|\s*$)))"
    r"|--(?:api-key|password|secret|token)[ =])"
    r"(?!env:|\(hidden\)|[\"']|(?:none|null|true|false)(?![\w-]))"
    r"(?:(?:bearer|basic|token)\s+)?[^\s\"',;}&]{4,}?(?=:?(?:[\s\"',;}&]|$))"
)
"""Such a name and its value without quotes; what follows a colon and a space may be a sentence, and
is none where it has a digit and nothing follows."""
_FLAG = re.compile(r"(?:^|\s)--?([\w-]+)(?:\s+([^-\s]\S*))?")
"""An option of a command, and what follows it."""
_FLAGGED = re.compile(
    r"((?<![\w-])(--?[\w-]+)[\"']?(?:\s*,\s*|\s+|=)([\"']))(?!-|env:|\(hidden\))"
    r"((?:\\.|(?!\3)[^\\\n])+)"
)
"""Such an option and its value in quotes, as in the list of a command that a message shows."""
_LONG_NUMBER = 100_000
"""A password of digits alone, which a file or a command line makes a number."""
_NUMBER = re.compile(r"[\d.]*")
_WORD = re.compile(r"[A-Za-z]{1,7}\W?")


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
    hidden: dict[str, Any] = _hidden(options, False)
    return hidden


def _hidden(value: Any, inside: bool, listed: bool = False) -> Any:
    """A value without secrets.

    Args:
      value: of JSON.
      inside: whether it stands in something whose name is that of a secret.
      listed: whether it is an item of a list.
    """
    secret = _secrets(value, inside, listed)
    if isinstance(value, Mapping):
        pairs = zip(value.items(), secret, strict=True)
        return {n: HIDDEN if _is_digits(n, x) else _hidden(x, s) for (n, x), s in pairs}
    if isinstance(value, list | tuple):
        return [_hidden(x, s, True) for x, s in zip(value, secret, strict=True)]
    return HIDDEN if _is_secret(value, inside) and not value.startswith(_ENVIRONMENT) else value


def _secrets(value: Any, inside: bool, listed: bool) -> list[bool]:
    """Whether each item of an object or a list is a secret by what it stands beside."""
    if isinstance(value, Mapping):
        named = any(_is_name(value.get(name)) for name in ("name", "key", "header"))
        return [
            inside or _names_one(n) or (named and n == "value") or _is_pass(n, x)
            for n, x in value.items()
        ]
    if not isinstance(value, list | tuple):
        return []
    if listed and len(value) == 2 and _is_name(value[0]):  # ["x-api-key", ...] of headers
        return [inside, True]
    return [
        inside or _is_flagged(option, x) for option, x in zip([None, *value], value, strict=False)
    ]


def without_secrets(text: str) -> str:
    """A message with ``HIDDEN`` for keys of well-known services, logins and keys in addresses.

    >>> without_secrets("rewards.j.url = 'http://me:pw@host/v1?api_key=abc' does not answer")
    "rewards.j.url = 'http://(hidden)host/v1?api_key=(hidden)' does not answer"
    """
    text = _FORMS.sub(
        lambda m: m[0].partition("://")[0] + "://" + HIDDEN if "://" in m[0] else HIDDEN, text
    )
    text = _FLAGGED.sub(lambda m: m[1] + HIDDEN if _is_flagged(m[2], m[4]) else m[0], text)
    text = _QUERY.sub(lambda m: m[1] + HIDDEN if _in_query(m[2]) else m[0], text)
    text = _QUOTED.sub(lambda m: m[1] + m[2] + HIDDEN if _is_quoted(m[1], m[4]) else m[0], text)
    return _NAMED.sub(lambda m: m[1] + HIDDEN, text)


def reveal(options: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The options as a function gets them.

    Args:
      options: of one table; secrets as "env:NAME" are read from the environment.
      table: its dotted name, for messages.

    Raises:
      UserError: there is no such variable, or the secret is that of a run directory, which does not
        hold it.
    """
    revealed: dict[str, Any] = _revealed(options, table, False)
    return revealed


def _revealed(value: Any, key: str, inside: bool, listed: bool = False) -> Any:
    """The inverse of ``_hidden``, for the value of a dotted key."""
    secret = _secrets(value, inside, listed)
    if isinstance(value, Mapping):
        pairs = zip(value.items(), secret, strict=True)
        return {n: _revealed(x, f"{key}.{n}", s) for (n, x), s in pairs}
    if isinstance(value, list | tuple):
        items = enumerate(zip(value, secret, strict=True))
        return [_revealed(x, f"{key}.{i}", s, True) for i, (x, s) in items]
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
    words, together = _words(name), {f"{x}key" for x in _KEYS} | {f"{x}pass" for x in _LOGINS}
    harmless = {"key": _PLAIN_KEYS, "token": _PLAIN_TOKENS}
    if len(words) == 2 and words[0] in harmless.get(words[1], ()):
        return False
    if words[0:1] == ["token"] and set(words[1:2]) & set(_OF_TOKENS):
        words = words[2:]
    match words:
        case [*_, before, "pass"] if before not in _PASSES:
            return True
        case [*_, before, "pat"] if before in _LOGINS:
            return True
    return any(w in _WORDS or w in together or w.endswith(_ENDINGS) for w in words)


def _is_quoted(name: str, value: str) -> bool:
    """Whether a value in quotes is a secret by its name, which a table's may precede."""
    if re.search(f"(?i){_CLEAR}$", name):
        return True
    last = name.rpartition(".")[2]
    return _names_one(last) and not last.endswith("tokens") and len(value) >= _LONG_VALUE


def _in_query(name: str) -> bool:
    """Whether a name in an address is that of a secret."""
    return _names_one(name) or bool(_SIGNED & set(_words(name)))


def _is_pass(name: object, value: object) -> bool:
    """Whether a value is a password by the short name, which has other meanings too."""
    return (
        str(name).lower() == "pass" and isinstance(value, str) and _is_given("pass", value, False)
    )


def _is_digits(name: object, value: object) -> bool:
    """Whether a number is a secret by its name."""
    is_long = type(value) is int and abs(value) >= _LONG_NUMBER
    return is_long and re.search(f"(?i){_CLEAR}$", str(name)) is not None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _names_one(value)


def _is_secret_flag(value: object) -> bool:
    """Whether a list's item is an option whose value is a secret, the next item."""
    if not isinstance(value, str):
        return False
    match = _FLAG.fullmatch(value)
    named = match is not None and (_names_one(match[1]) or match[1].lower() in ("pass", "pat"))
    return match is not None and match[2] is None and named


def _is_flagged(option: object, value: object) -> bool:
    """Whether a value is a secret by the option that it stands behind."""
    return (_is_secret_flag(option) and not _is_number(value)) or _is_login(option, value)


def _is_login(option: object, value: object) -> bool:
    """Whether an item of a list is a name with its password, as curl takes it behind -u."""
    login = isinstance(value, str) and re.fullmatch(r"(?!\d+:\d+$)[^\s:]+:\S+", value)
    return option in ("-u", "--user") and bool(login)


def _is_number(value: object) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def _is_secret(value: object, inside: bool) -> bool:
    if not isinstance(value, str):
        return False
    if inside or _HEADER.fullmatch(value) is not None or _FORMS.search(value) is not None:
        return True
    if value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            written = json.loads(value)
            if _hidden(written, False) != written:
                return True
    pairs = [[x for x in m.groups() if x is not None] for m in _ASSIGNED.finditer(value)]
    pairs += [[m[1], m[2]] for m in _FLAG.finditer(value) if m[2]]
    signed = {
        name
        for name, x in pairs
        if "://" in value
        and (_SIGNED & set(_words(name)) or (name.lower() == "code" and len(x) >= _LONG_CODE))
    }
    secret = (x for name, x in pairs if name in signed or _is_given(name, x, "://" in value))
    return any(not _is_number(x) for x in secret)


def _is_given(name: str, value: str, in_address: bool) -> bool:
    """Whether a text gives a secret of this name, which it may also tell of."""
    if name.lower() == "pass":
        return len(value) >= _LONG_VALUE and re.search(r"\d", value) is not None
    if name.lower() in ("key", "token") and not in_address and _WORD.fullmatch(value):
        return False  # "write key=value pairs"
    return _names_one(name)


def _words(name: object) -> list[str]:
    """The words that a name is written of, in small letters and without a plural."""
    words = [w.lower() for w in re.findall(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+", str(name))]
    return [w if w.endswith("ss") or w == "sas" else w.removesuffix("s") for w in words]
