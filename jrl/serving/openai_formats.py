"""``response_format`` and ``tool_choice`` of chat completions, as grammars of the reply.

    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
    "auto", "none", "required", {"type": "function", "function": {"name": ...}}

``sampling.grammar`` allows at each token what the grammar allows, so a reply follows its schema
unless it ends at its length. With "auto" a reply is free, or, beside a ``response_format``, calls
or JSON of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.episodes.call_grammars import MOST_CALLS, call_rules, json_expression
from jrl.errors import UserError
from jrl.sampling.grammar import Grammars
from jrl.serving.api_error import ApiError, Json
from jrl.serving.openai_tools import Tools

THOUGHT_END = "</think>"


def reply_grammar(
    body: Json,
    tools: Tools | None,
    grammars: Grammars | None,
    *,
    thinking: bool,
) -> str | None:
    """The grammar of the reply to a request, checked; None where any text will do.

    Args:
      body: of the request.
      tools: that it offers.
      grammars: of the served model; None for a server without.
      thinking: whether the prompt ends inside a thought, which the grammar then leaves free.

    Raises:
      ApiError: a parameter is not what OpenAI's API takes, or the grammar cannot be satisfied.
    """
    schema = _schema(body.get("response_format"))
    enforced = tools is not None and tools.enforced
    if schema is None and not enforced:
        return None
    param = "tool_choice" if enforced else "response_format"
    if grammars is None:
        raise ApiError(
            f"{param} needs constrained decoding, which this server has not; its first line says"
            " why",
            param=param,
        )
    answer = schema if not enforced else None
    try:
        grammar = _grammar(tools, answer, grammars, thinking)
        grammars.check(grammar)
    except UserError as error:
        raise ApiError(f"{param}: {error}", param=param) from None
    except (RecursionError, TypeError):  # nested without end, or a keyword of another type
        problem = f"{param}: the schema is no JSON schema that can be followed; simplify it"
        raise ApiError(problem, param=param) from None
    return grammar


def _grammar(tools: Tools | None, schema: Any, grammars: Grammars, thinking: bool) -> str:
    options, rules = [], ""
    if tools is not None:
        most = 1 if tools.single else MOST_CALLS
        names = [tools.only] if tools.only else list(tools.schemas)
        chosen = {name: tools.schemas[name] for name in names}
        rules = call_rules(tools.parser, chosen, grammars.literal, most)
        options.append("calls")
    if schema is not None:
        rules += f"answer: {json_expression(schema)}\n"
        options.append("answer")
    thought = ""
    if thinking:
        end = grammars.literal(THOUGHT_END)
        if end.startswith("<["):  # a token of its own, which no text matches
            rules += f"thought: /(?s:.*)/ {end} /[ \\n]{{0,4}}/\n"
        else:
            rules += f"thought: thinking /[ \\n]{{0,4}}/\nthinking[suffix={end}]: /(?s:.*)/\n"
        thought = "thought "
    return f"start: {thought}({' | '.join(options)})\n{rules}"


def _schema(value: Any) -> Any:
    """The JSON schema of a ``response_format``; None for text."""
    where = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ApiError(f'{where} must be an object with a "type"', param=where)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ApiError(
            f"{where}.type = {kind!r:.40}; this server takes 'text', 'json_object' and"
            " 'json_schema'",
            param=f"{where}.type",
        )
    inside = value.get("json_schema")
    schema = inside.get("schema") if isinstance(inside, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(
            f"{where}.json_schema.schema must be an object", param=f"{where}.json_schema.schema"
        )
    return schema
