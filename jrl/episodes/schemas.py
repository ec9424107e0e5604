"""JSON schemas of tools' arguments: checked once, and read within limits of time.

Schemas come from servers and files, arguments from the policy. A check runs in the thread that
serves all episodes, so it must end: regular expressions are matched by ``regex``, which gives up in
time, and every other keyword looks at the clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jrl.errors import UserError
from jrl.system.extras import need

CHECK_SECONDS = 0.25
"""Processor time of one call's check, at most; typical ones take a millisecond.

Not by the clock: what is wrong with a policy's arguments must not depend on what else runs."""

_until: ContextVar[float] = ContextVar("until")


class _TooLongError(Exception):
    """A check takes too long."""


def check_schema(schema: Mapping[str, Any], owner: str, *, of_object: bool = True) -> None:
    """Raises a UserError for a schema that cannot check arguments.

    The draft is the one that ``$schema`` names, 2020-12 where it names none.

    Args:
      schema: the schema.
      owner: whose it is, for the message.
      of_object: whether it must be of an object, as arguments are.

    Raises:
      UserError: the schema is invalid, is not of an object where it must be, has a ``$ref`` that
        leads nowhere or out of the schema, a pattern that is no regular expression, or does not
        end.
    """
    jsonschema = need("jsonschema", "tools", "a run with tools")
    if not isinstance(schema, Mapping):
        raise UserError(f"{owner}: its schema is {schema!r:.60}, not an object")
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        # Without formats: Python's re knows fewer patterns than regex, which reads them here.
        draft.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
        json.dumps(schema)
    except jsonschema.SchemaError as error:
        raise UserError(f"{owner}: its schema is invalid: {error.message:.200}") from None
    except Exception as error:
        raise UserError(f"{owner}: its schema is invalid: {error!r:.200}") from None
    if of_object and schema.get("type") != "object":
        raise UserError(f'{owner}: its schema must have "type": "object"')
    _check_parts(schema, draft, owner)
    if why := fault(schema, {}, misfits=False):
        raise UserError(f"{owner}: its schema cannot be used: {why}")


def _check_parts(schema: Mapping[str, Any], draft: Any, owner: str) -> None:
    """Raises UserError for references and patterns anywhere in a schema that lead nowhere."""
    import referencing
    import referencing.jsonschema

    regex = need("regex", "tools", "a run with tools")
    dialect = draft.META_SCHEMA.get("$schema", draft.META_SCHEMA.get("id", ""))
    specification = referencing.jsonschema.specification_with(dialect)

    present: set[str] = set()

    def visit(resource: Any, resolver: Any) -> None:
        part = resource.contents
        if not isinstance(part, Mapping):
            return
        present.update(part)
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(part.get(name), str):
                try:
                    resolver.lookup(part[name])
                except Exception:
                    where = f"{name} = {part[name]!r:.80}"
                    raise UserError(
                        f"{owner}: its schema refers to {where}, which it does not "
                        "define; define it in $defs"
                    ) from None
        patterns = [part["pattern"]] if isinstance(part.get("pattern"), str) else []
        if isinstance(part.get("patternProperties"), Mapping):
            patterns += part["patternProperties"]
        for pattern in patterns:
            try:
                regex.compile(pattern)
            except regex.error as error:
                raise UserError(
                    f"{owner}: its schema has the pattern {pattern!r:.80}: {error}"
                ) from None
        for inner in resource.subresources():
            visit(inner, resolver.in_subresource(inner))

    root = specification.create_resource(dict(schema))
    try:
        visit(root, referencing.Registry().resolver_with_root(root))
    except RecursionError:
        raise UserError(f"{owner}: its schema is nested too deeply") from None
    if {"unevaluatedProperties", "patternProperties"} <= present:
        # jsonschema matches those patterns by itself, without an end.
        raise UserError(
            f"{owner}: its schema has unevaluatedProperties and patternProperties; use "
            "additionalProperties"
        )


def fault(schema: Mapping[str, Any], arguments: Any, *, misfits: bool = True) -> str | None:
    """The reason that arguments do not fit a schema, for the policy; None if they do.

    Args:
      schema: that ``check_schema`` has passed.
      arguments: JSON values.
      misfits: whether arguments that do not fit are a fault, beside those that cannot be checked.
    """
    import jsonschema

    token = _until.set(time.thread_time() + CHECK_SECONDS)
    try:
        validator = _validator(json.dumps(schema, sort_keys=True))
        error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    except RecursionError:
        return "the arguments are nested too deeply"
    except _TooLongError:
        return f"the arguments took more than {CHECK_SECONDS:g} seconds to check"
    except Exception as unexpected:
        return f"the arguments cannot be checked: {unexpected!r:.200}"
    finally:
        _until.reset(token)
    if error is None or not misfits:
        return None
    where = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"arguments{where}: {error.message:.300}"


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    import jsonschema
    import referencing

    parsed = json.loads(schema)
    draft = jsonschema.validators.validator_for(parsed, jsonschema.Draft202012Validator)
    # Without a registry jsonschema would fetch what other hosts are named in a $ref.
    return _timed(draft)(_bare(parsed), registry=referencing.Registry())


def _bare(schema: Any) -> Any:
    """The schema without the names of drafts, which would bring back validators without a clock."""
    if isinstance(schema, list):
        return [_bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _bare(v) for k, v in schema.items() if k != "$schema" or not isinstance(v, str)}


@functools.cache
def _timed(draft: Any) -> Any:
    """A draft's validator whose keywords look at the clock, and whose patterns end in time."""
    import jsonschema

    keywords = {name: _watched(keyword) for name, keyword in draft.VALIDATORS.items()}
    keywords["pattern"] = _watched(_pattern)
    keywords["patternProperties"] = _watched(_pattern_properties)
    if "additionalProperties" in keywords:
        keywords["additionalProperties"] = _watched(_additional_properties(draft))
    return jsonschema.validators.extend(draft, keywords)


Keyword = Callable[[Any, Any, Any, Any], Any]
"""(validator, value of the keyword, instance, schema) -> errors, as jsonschema calls it."""


def _watched(keyword: Keyword) -> Keyword:
    def watched(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if time.thread_time() > _until.get():
            raise _TooLongError
        yield from keyword(validator, value, instance, schema) or ()

    return watched


def _matches(pattern: str, text: str) -> bool:
    import regex

    while (left := _until.get() - time.thread_time()) > 0:
        # Its limit counts what other threads do, too: where that used it up it is tried again.
        with contextlib.suppress(TimeoutError):
            return regex.search(pattern, text, timeout=max(left, 0.001)) is not None
    raise _TooLongError


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    import jsonschema

    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r:.100} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(draft: Any) -> Keyword:
    """The usual keyword, which matches patterns by itself where there are some."""
    import jsonschema

    usual = draft.VALIDATORS["additionalProperties"]

    def additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties", {})
        if not patterns or not validator.is_type(instance, "object"):
            yield from usual(validator, allowed, instance, schema) or ()
            return
        for name, value in instance.items():
            if name in schema.get("properties", {}) or any(_matches(p, name) for p in patterns):
                continue
            if validator.is_type(allowed, "object"):
                yield from validator.descend(value, allowed, path=name)
            elif not allowed:
                yield jsonschema.ValidationError(f"{name!r:.100} was unexpected")

    return additional


_DEEPEST = 32
"""References that are followed, one to another."""


def resolved(schema: Any, root: Any) -> Any:
    """A schema behind its references within ``root``; itself where they lead nowhere."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            break
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str) and reference.startswith("#"):
            target = root
            for name in filter(None, reference[1:].split("/")):
                name = name.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                break
            schema = target
        elif isinstance(parts, list) and len(parts) == 1 and "type" not in schema:
            schema = parts[0]
        else:
            break
    return schema


JSON_TYPES = {
    "boolean": lambda x: isinstance(x, bool),
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "string": lambda x: isinstance(x, str),
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "null": lambda x: x is None,
}
"""JSON type -> whether a value is of it."""


def allowed_kinds(schema: Any, root: Any = None, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say.

    Args:
      schema: of a value.
      root: in which references are looked up; None for the schema itself.
      depth: of this schema in others.
    """
    root = schema if root is None else root
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return set()
    kind = schema.get("type")
    listed = kind if isinstance(kind, list) else [kind]
    kinds = {name for name in listed if isinstance(name, str)}
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            kinds = kinds.union(*(allowed_kinds(option, root, depth + 1) for option in options))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(values, list) and values:
        return {next(kind for kind, fits in JSON_TYPES.items() if fits(value)) for value in values}
    return kinds
