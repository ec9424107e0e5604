"""Reading and checking the configuration of a run: TOML with dotted overrides.

Problems are reported all at once, one line each.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from jrl.config.explain import explain_all, not_removable, of_other_kinds, without_renamed
from jrl.config.numbers import beyond_32_bits, unwritable
from jrl.config.tables import Config
from jrl.config.write import as_tree
from jrl.errors import Mistakes, UserError

T = TypeVar("T")


def load_config(
    path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Config:
    """Reads a TOML file, applies ``a.b=value`` overrides, and checks the result.

    A value is read as TOML; a bare word is text; nothing after the ``=`` removes the key,
    which must be set, or be a key of the configuration.

    Args:
      path: the TOML file, its tables as nested dicts, or None to start from the defaults.
      overrides: in order; later ones win.

    Returns:
      The configuration, checked.

    Raises:
      UserError: one line for each problem, with the key, the value and what would do.

    >>> load_config(None, ["sampling.group=4", "method=rloo"]).sampling.group
    4
    """
    if isinstance(path, Mapping):
        tree = copy.deepcopy(dict(path))
    else:
        tree = {} if path is None else read_toml(Path(path))
    mistakes = Mistakes()
    for override in overrides:
        mistakes.look(partial(_apply, tree, override))
    config = mistakes.look(lambda: build_config(tree))
    mistakes.check()
    return config


def build_config(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from nested dicts.

    Args:
      tree: tables and keys, as ``tomllib`` reads them.

    Returns:
      The configuration.

    Raises:
      UserError: one line for each problem.
    """
    lines, tree = without_renamed(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        lines += explain_all(error.errors(include_url=False))
    else:
        lines += of_other_kinds(config)
        lines += unwritable(as_tree(config), config.model_dump())
        lines += beyond_32_bits(config)
    if lines:
        raise UserError("\n".join(lines))
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
      UserError: it is missing, too large, or no TOML; names a file that is meant, perhaps.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is not a file; name a TOML file or a run directory")
    try:
        if path.exists() and path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: larger than {_LARGEST} bytes, so no configuration")
        return _toml(path.read_text(encoding="utf-8-sig"))  # some editors begin with its mark
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from None
    except OSError as error:
        places = (path.parent, path.parent / "configs", Path("configs"))
        files = {p.name: p for place in reversed(places) for p in place.glob("*.toml")}
        nearest = difflib.get_close_matches(path.name, files, n=1)
        hint = f"; did you mean {files[nearest[0]]}?" if nearest else ""
        raise UserError(f"{path}: {error.strerror or error}{hint}") from None


_LARGEST = 10_000_000
"""Bytes of a configuration file."""
_DEEPEST = 50
"""Tables and lists inside each other."""


def _toml(text: str) -> dict[str, Any]:
    """The tables in a text; raises TOMLDecodeError also where tomllib has other errors."""

    def too_deep(value: Any, levels: int) -> bool:
        inside = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            return False
        return not levels or any(too_deep(each, levels - 1) for each in inside)

    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply; use fewer levels") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # such as a number of more digits than Python reads
        raise tomllib.TOMLDecodeError(str(error)) from None
    if too_deep(tree, _DEEPEST):
        raise tomllib.TOMLDecodeError("nested too deeply; use fewer levels")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Puts one ``a.b=value`` into nested dicts."""
    if re.search("[\ud800-\udfff]", override):
        raise UserError(f"override {override!r}; it is not UTF-8 text")
    name, equals, text = override.partition("=")
    try:
        parsed = _toml(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if not equals or len(parsed) != 1:
        raise UserError(f"override {override!r}; write table.key=value, such as train.steps=10")
    path = []
    while isinstance(parsed, dict):
        ((part, parsed),) = parsed.items()
        path.append(part)
    if not text.strip():
        _remove(tree, path)
        return
    node = tree
    for depth, part in enumerate(path[:-1], 1):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"override {override!r}; {'.'.join(path[:depth])} is not a table")
    node[path[-1]] = _parse_value(name, text.strip())


def _remove(tree: dict[str, Any], path: Sequence[str]) -> None:
    """Takes a key out of nested dicts; one that is not there must be a key of the configuration."""
    node: Any = tree
    for part in path[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and path[-1] in node:
        del node[path[-1]]
    elif problem := not_removable(path):
        raise UserError(problem)


def _parse_value(name: str, text: str) -> Any:
    try:
        parsed = _toml(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError as error:
        if text[0] in "[\"'":  # a "{" may begin a template
            raise UserError(f"{name} = {text}; not a valid TOML value: {error}") from None
        return text


def from_table(table: str, make: type[T], values: Mapping[str, Any]) -> T:
    """Builds a frozen dataclass from a free-form table, naming keys it does not have.

    Args:
      table: dotted name of the table, for messages.
      make: a dataclass, such as ``ModelConfig``.
      values: the table's keys.

    Returns:
      ``make(**values)``.

    Raises:
      UserError: unknown keys, with the nearest name, or missing ones.
    """
    fields = {field.name: field for field in dataclasses.fields(make)}  # type: ignore[arg-type]
    lines = []
    for name, value in values.items():
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1)
            hint = (
                f"did you mean {table}.{nearest[0]}?"
                if nearest
                else f"keys are {', '.join(fields)}"
            )
            lines.append(f"unknown key {table}.{name} = {value!r}; {hint}")
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.init and name not in values:
            lines.append(f"{table}.{name} is missing")
    if lines:
        raise UserError("\n".join(lines))
    return make(**values)
