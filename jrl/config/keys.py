"""Every key of a configuration with its type, default and meaning, for documentation and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from jrl.config.base import Table
from jrl.config.data import GIVEN_KINDS
from jrl.config.tables import Config


class Key(NamedTuple):
    """One configuration key, for documentation.

    Attributes:
      name: dotted.
      kind: its type in words.
      default: None where there is none.
      text: what it means.
      only: the kinds of its table that have it, such as "data.task"; empty where all have.
    """

    name: str
    kind: str
    default: Any
    text: str
    only: tuple[str, ...] = ()

    @property
    def single(self) -> list[str]:
        """``only`` without what no key tells alone: combinations, recorded sessions, dialogues.

        Empty for the key that names a kind itself.
        """
        names = [kind for kind in self.only if " and " not in kind and kind not in GIVEN_KINDS]
        return [] if self.name in self.only else names


def describe() -> list[Key]:
    """Every key of the configuration in order, each once, with type, default and meaning."""
    keys: list[Key] = []
    for name, field in Config.model_fields.items():
        if kinds := variants(name):
            keys += _of_union(name, kinds)
        elif (table := table_of(field.annotation)) is not None:
            keys += _keys(table, name)
        else:
            keys.append(_leaf(name, field))
    return keys


def table_note(name: str) -> str:
    """Facts about a table that precede its keys: its kinds, and whether it may be absent."""
    table = Config.model_fields[name].annotation
    if kinds := variants(name):
        first = [kind for kind in kinds if " and " not in kind and kind not in GIVEN_KINDS]
        prefix = f"{name}.kind = "
        label = "kind" if all(kind.startswith(prefix) for kind in first) else "one of"
        first = [kind.removeprefix(prefix) for kind in first]
        return f"  {label}: {', '.join(first)}; keys of only some of them say so"
    return "  optional" if type(None) in get_args(table) else ""


def variants(table: str) -> dict[str, type[Table]]:
    """The kinds of a table that is a union, by tag; empty for other tables."""
    field = Config.model_fields.get(table)
    kinds: dict[str, type[Table]] = {}
    for member in get_args(field.annotation) if field is not None else ():
        kind, *marks = get_args(member) or (None,)
        kinds |= {mark.tag: kind for mark in marks if isinstance(mark, Tag)}
    return kinds


def table_of(kind: Any) -> type[Table] | None:
    """The table that a field holds, also where it may be absent; None for single keys."""
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Table)), None)


def _of_union(table: str, kinds: Mapping[str, type[Table]]) -> Iterator[Key]:
    keys = {tag: {key.name: key for key in _keys(kind, table)} for tag, kind in kinds.items()}
    names = dict.fromkeys(name for inside in keys.values() for name in inside)
    for name in sorted(names, key=lambda name: name not in kinds):  # first those that tell kinds
        having = {tag: inside[name] for tag, inside in keys.items() if name in inside}
        parts = (part for key in having.values() for part in key.kind.split(" | "))
        types = " | ".join(dict.fromkeys(parts))
        only = () if len(having) == len(kinds) else tuple(having)
        yield next(iter(having.values()))._replace(kind=types, only=only)


def _keys(table: type[Table], prefix: str) -> list[Key]:
    return [_leaf(f"{prefix}.{name}", field) for name, field in table.model_fields.items()]


def _leaf(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Key(name, _kind(field.annotation), default, field.description or "")


_KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _kind(annotation: Any) -> str:
    """A type in words: "text", "a | b" for a closed set, "table", "list"."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return " | ".join(inside)
    if origin in (dict, tuple):
        return {dict: "table", tuple: "list"}[origin]
    if inside:  # T | None
        return " | ".join(_kind(kind) for kind in inside if kind is not type(None))
    return _KINDS[annotation]
