"""Grammars of tool calls: the texts in which a family's parser reads calls of the given tools.

They are written in llguidance's variant of Lark, see ``sampling.grammar``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.episodes.parsers import Call, Parser, Schemas
from jrl.episodes.schemas import allowed_kinds, resolved
from jrl.errors import UserError

Literal = Callable[..., str]
"""(text with control tokens, last=whether the completion may end with it) -> its expression."""
MOST_CALLS = 16
"""Calls of one turn, at most, so that a model that repeats itself ends."""

_OPTIONS = {
    # One way to write a value: models that may write white space anywhere sometimes never end it.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,  # exclusive options are a promise that no grammar can keep
}
_ANY_TEXT = ("binary", "directory-path", "file-path", "password", "path")
_VALUES = ("const", "default", "enum", "examples")
"""Keywords of schemas that hold values, not schemas."""
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords of schemas that hold schemas by names, which are no keywords."""
_MARK = {"\ue000": 0}


def json_expression(schema: Any) -> str:
    """The expression for JSON of a schema, without white space but one after ":" and ","."""
    if not isinstance(schema, Mapping):
        schema = {} if schema is True else {"enum": []}
    return "%json " + json.dumps({**_without_text_formats(schema), "x-guidance": _OPTIONS})


def _without_text_formats(schema: Any) -> Any:
    """A schema without formats that any text has, as pydantic writes them for paths and secrets."""

    def part_of(key: str, part: Any) -> Any:
        if key in _NAMED and isinstance(part, Mapping):
            return {name: _without_text_formats(named) for name, named in part.items()}
        return part if key in _VALUES else _without_text_formats(part)

    if isinstance(schema, list):
        return [_without_text_formats(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: part_of(key, part)
        for key, part in schema.items()
        if not (key == "format" and isinstance(part, str) and part in _ANY_TEXT)
    }


def call_rules(parser: Parser, schemas: Schemas, literal: Literal, most: int = MOST_CALLS) -> str:
    """Rules of a grammar, the first one ``calls``: one call or more, of these tools.

    Args:
      parser: of the model's family.
      schemas: of the arguments, by the tool's name.
      literal: see ``Literal``.
      most: calls; 1 where a call ends the turn.

    Raises:
      UserError: the family cannot write a call of some tool.
    """
    again = "" if most == 1 or parser.ends_turn else f' ("\\n" call){{0,{most - 1}}}'
    rules = [f"calls: call{again}", "call: " + " | ".join(f"call{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        (read, *more) = parser.parse(parser.render(Call(name, {})), {name: schema}) or (None,)
        if more or not isinstance(read, Call) or read.name != name:
            raise UserError(
                f"the tool {name!r} cannot be called in the format {parser.name!r}; rename it"
            )
        rules += _rules_of(parser, name, schema, f"call{i}", literal)
    return "\n".join(rules) + "\n"


def _rules_of(
    parser: Parser, name: str, schema: Mapping[str, Any], rule: str, literal: Literal
) -> list[str]:
    if parser.name == "qwen3_coder":
        return _coder_rules(name, schema, rule, literal)
    if parser.name == "gemma":
        return _gemma_rules(name, schema, rule, literal)
    before, body, after = parser.render(Call(name, _MARK)).partition(
        json.dumps(_MARK, ensure_ascii=False)
    )
    if not body:
        raise UserError(
            "calls of a parser of your own cannot be enforced; send tool_choice = 'auto'"
        )
    end = f" {literal(after, last=parser.ends_turn)}" if after else ""
    return [f"{rule}: {literal(before)} {json_expression(schema)}{end}"]


def _parameters(schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The schema of each argument with the definitions it may refer to, and the required ones."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    names = frozenset(required) if isinstance(required, list) else frozenset()
    if unknown := sorted(names - set(properties)):
        raise UserError(f"the argument {unknown[0]!r} is required, and properties has no such name")
    return {
        key: {**shared, **value} if isinstance(value, Mapping) else value
        for key, value in properties.items()
    }, names


_FREE = "/([^<]|<[^\\/fp])*/"
"""A text among other expressions; it may not hold the beginning of a closing tag."""


def _coder_rules(name: str, schema: Mapping[str, Any], rule: str, literal: Literal) -> list[str]:
    """Parameters between tags, strings without quotes; see ``parsers.qwen3_coder``."""
    properties, required = _parameters(schema)
    parts, rules = [literal(f"<tool_call>\n<function={name}>")], []
    for i, (key, value) in enumerate(properties.items()):
        if not key or set(key) & set(">\n") or key != key.strip():
            raise UserError(f"the argument {key!r} cannot be written between tags; rename it")
        parts.append(f"{rule}_{i}" + ("" if key in required else "?"))
        text, close = literal(f"\n<parameter={key}>\n"), literal("\n</parameter>")
        if _coder_value(value) == _FREE and close.startswith('"'):
            # Up to the whole closing tag, the first of them: a text may hold the beginning of one.
            rules.append(f"{rule}_{i}: {text} {rule}_{i}_v")
            rules.append(f"{rule}_{i}_v[suffix={close}]: /(?s:.*)/")
        else:
            rules.append(f"{rule}_{i}: {text} {_coder_value(value)} {close}")
    parts.append(literal("\n</function>\n</tool_call>"))
    return [f"{rule}: " + " ".join(parts), *rules]


def _coder_value(schema: Any) -> str:
    kinds, root = allowed_kinds(schema), schema
    if "string" not in kinds:
        return json_expression(schema)
    schema = resolved(schema, schema)
    for word in ("anyOf", "oneOf"):  # such as a text or null, the text without quotes
        if isinstance(options := schema.get(word), list) and options:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            shared |= {"type": schema["type"]} if "type" in schema else {}
            each = [{**shared, **x} if isinstance(x, Mapping) else x for x in options]
            return "(" + " | ".join(map(_coder_value, each)) + ")"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        if not values or not all(v and "<" not in v for v in values if isinstance(v, str)):
            raise UserError("an enum of this format has texts without '<'")
        written = [v if isinstance(v, str) else json.dumps(v) for v in values]
        return "(" + " | ".join(map(json.dumps, written)) + ")"
    return _FREE


def _gemma_rules(name: str, schema: Mapping[str, Any], rule: str, literal: Literal) -> list[str]:
    """One line of Python; JSON values are Python literals to ``parsers.gemma``."""
    properties, required = _parameters(schema)
    if wrong := [key for key in properties if not key.isidentifier()]:
        raise UserError(f"the argument {wrong[0]!r} is no name of Python; rename it")
    # Those that are required come first, so that commas stand where they must.
    ordered: Sequence[str] = sorted(properties, key=lambda key: key not in required)
    open_, close = literal(f"```tool_code\n{name}("), literal(")\n```")
    rules = [f"{rule}: {open_} {rule}_a0 {close}"]
    for i, key in enumerate(ordered):
        one = f"{json.dumps(key + '=')} {json_expression(properties[key])} {rule}_b{i + 1}"
        skip = key not in required
        rules.append(f"{rule}_a{i}: {one}" + (f" | {rule}_a{i + 1}" if skip else ""))
        rules.append(f'{rule}_b{i}: ", " {one}' + (f" | {rule}_b{i + 1}" if skip else ""))
    return [*rules, f'{rule}_a{len(ordered)}: ""', f'{rule}_b{len(ordered)}: ""']
