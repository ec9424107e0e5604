"""The reward ``json_schema``: whether the JSON of a completion fits a schema. Imports no JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.episodes.schemas import check_schema, fault
from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.system.extras import need

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_LONGEST = 1 << 20
_STARTS = 1000
_NONE = object()
_NUMBERS = frozenset({"integer", "number"})
_BOUNDS = (
    *((low, high, _NUMBERS) for low in ("minimum", "exclusiveMinimum")
      for high in ("maximum", "exclusiveMaximum")),
    ("minLength", "maxLength", frozenset({"string"})),
    ("minItems", "maxItems", frozenset({"array"})),
    ("minProperties", "maxProperties", frozenset({"object"})),
)  # fmt: skip
"""The least and the greatest of what a value of some types has."""


def json_schema(
    samples: list[Sample],
    schema: Any = None,
    column: str = "json_schema",
    partial: float = 0.0,
) -> list[float]:
    """1 where the last JSON in a completion fits the row's schema, else 0; needs ``tools``.

    The JSON is that of the last fenced block that holds some, else the last object or list in the
    text, else the whole text. Drafts are those of jsonschema, 2020-12 where the schema names none;
    a check that does not end within a quarter of a second fails.

    Args:
      samples: what to judge.
      schema: of rows without one: a table, or JSON text.
      column: with the row's schema, an object or JSON text.
      partial: points for JSON that does not fit.

    Raises:
      UserError: there is no schema, it is invalid, or nothing can satisfy it.
    """
    need("jsonschema", "tools", "rewards.json_schema")
    if schema is not None:
        _read(schema, "rewards.json_schema.schema")
    points = []
    for sample in samples:
        of_row = sample.prompt.meta.get(column)
        owner = f"rewards.json_schema: column {column!r} of row {sample.prompt.id + 1}"
        if of_row is None and schema is None:
            raise UserError(f"{owner} is empty; fill it, or give rewards.json_schema.schema")
        schema_of_row = _read(schema if of_row is None else of_row, owner)
        value = last_json(sample.completion)
        fits = value is not _NONE and fault(schema_of_row, value) is None
        points.append(1.0 if fits else 0.0 if value is _NONE else float(partial))
    return points


_cache: dict[str, dict[str, Any]] = {}


def _read(schema: Any, owner: str) -> dict[str, Any]:
    """A schema that has been checked, which each process does once."""
    key = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    if key not in _cache:
        try:
            read = json.loads(key)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{owner}: its schema is no JSON: {error}") from None
        if read is not False:
            check_schema(read, owner, of_object=False)
        if why := impossible(read):
            raise UserError(f"{owner}: nothing can satisfy its schema: {why}")
        if len(_cache) >= 256:
            del _cache[next(iter(_cache))]
        _cache[key] = read
    return _cache[key]


def impossible(schema: Any, where: str = "the schema") -> str:
    """Why no value satisfies a schema, as far as its own keywords tell, references aside; else "".

    Args:
      schema: that ``check_schema`` has passed, or a part of one.
      where: what it is called in the reason.

    >>> impossible({"type": "array", "minItems": 3, "maxItems": 2})
    'the schema has minItems = 3 above maxItems = 2'
    """
    if schema is False:
        return f"{where} is false"
    if not isinstance(schema, Mapping):
        return ""
    if schema.get("not") in ({}, True) or schema.get("enum") == []:
        return f"{where} allows no value"
    every = schema.get("allOf", ())
    reasons = [impossible(part, f"its allOf[{i}]") for i, part in enumerate(every)]
    for name in ("anyOf", "oneOf"):
        ways = [impossible(part, f"its {name}[{i}]") for i, part in enumerate(schema.get(name, ()))]
        reasons.append(ways[0] if ways and all(ways) else "")
    parts = [part for part in (schema, *every) if isinstance(part, Mapping)]
    declared = [part["type"] for part in parts if "type" in part]
    if declared and not _common(declared):
        reasons.append(f"{where} asks for the types {' and '.join(map(str, declared))} at once")
    return next(filter(None, [*reasons, _impossible_values(schema, where)]), "")


def _common(declared: Sequence[Any]) -> set[str]:
    """The types that all of some values of "type" allow; an integer is a number."""
    allowed = []
    for value in declared:
        names = {value} if isinstance(value, str) else set(value)
        allowed.append(names | {"integer"} if "number" in names else names)
    return set.intersection(*allowed)


def _impossible_values(schema: Mapping[str, Any], where: str) -> str:
    """As ``impossible``, by the keywords of values, bounds and properties."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    stands_alone = values and "$ref" not in json.dumps(schema)
    if stands_alone and all(fault(schema, value) is not None for value in values):
        return f"{where} allows only {json.dumps(values)[:60]}, which its other keys forbid"
    types = _common([schema["type"]]) if "type" in schema else None
    for low, high, of in _BOUNDS:
        least, most = schema.get(low), schema.get(high)
        if types is not None and not types <= of:
            continue  # a value of another type has no such bounds
        if isinstance(least, int | float) and isinstance(most, int | float):
            is_open = "exclusive" in low + high
            if least > most or (is_open and least == most):
                return f"{where} has {low} = {least} above {high} = {most}"
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required") if types is None or types == {"object"} else ()
    for name in required if isinstance(required, list) else []:
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if closed and name not in properties:
            return f"{where} requires {name!r} and forbids it"
        if why := impossible(properties.get(name, True), f"its property {name!r}"):
            return why
    return ""


def last_json(text: str) -> Any:
    """The value of the last JSON in a text; ``_NONE`` where there is none.

    >>> last_json('{"a": 1} and then [2]'), last_json("7")
    ([2], 7)
    """
    text = text[-_LONGEST:]
    for block in reversed(_FENCE.findall(text)):
        value = _parsed(block)
        if value is not _NONE:
            return value
    value = _parsed(text)
    return _last_span(text) if value is _NONE else value


def _refuse(name: str) -> Any:
    raise ValueError(name)


_decoder = json.JSONDecoder(parse_constant=_refuse)
"""Without NaN and infinity, which are no JSON."""


def _parsed(text: str) -> Any:
    try:
        return _decoder.decode(text.strip())
    except (ValueError, RecursionError):
        return _NONE


def _last_span(text: str) -> Any:
    """The last object or list of a text that is not part of another."""
    value, end = _NONE, 0
    for attempt, match in enumerate(re.finditer(r"[{\[]", text)):
        if attempt >= _STARTS:
            break
        if match.start() >= end:
            try:
                value, end = _decoder.raw_decode(text, match.start())
            except (ValueError, RecursionError):
                continue
    return value
