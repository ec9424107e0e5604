"""Tools in chat completions: their description for the chat template, and calls in the reply.

A family's parser (``jrl.episodes.parsers``) reads the calls of what was drawn, so that an agent
that talks OpenAI's API plays with a policy as environments of tools do. A text in which a call
cannot be read is a message without calls.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.episodes.parsers import PARSERS, Call, Parser, Schemas, get_parser
from jrl.errors import UserError
from jrl.models.chat_frames import (
    Frames,
    Message,
    calling,
    chat_template,
    check_fields,
    check_variables,
    conversation_ids,
    left_out,
)
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.serving.api_error import ApiError, Json
from jrl.system.json_text import json_or_none

_ID_SIZE = 9
"""Letters and digits of a call's id: what templates of Mistral's models ask for."""
_ID = re.compile(rf"[A-Za-z0-9]{{{_ID_SIZE}}}")


class Tools(NamedTuple):
    """The tools of one request.

    Attributes:
      offered: as the request has them, for the chat template.
      parser: of the model's calls.
      enforced: whether the reply must be calls, as ``tool_choice`` says.
      only: the one tool that must be called; None for any.
      single: whether the reply has at most one call.
      barred: names of tools of the request that ``tool_choice`` does not allow.
    """

    offered: tuple[Json, ...]
    parser: Parser
    enforced: bool = False
    only: str | None = None
    single: bool = False
    barred: frozenset[str] = frozenset()

    @property
    def schemas(self) -> Schemas:
        """JSON schema of the arguments, by the tool's name."""
        return {each["function"]["name"]: each["function"]["parameters"] for each in self.offered}


def tool_parser(name: str | None, tokenizer: Tokenizer) -> Parser | None:
    """The served model's call format: the named family, or the one whose marks its template has.

    Returns:
      None where nothing says so; requests with tools are refused then.

    Raises:
      UserError: there is no such family, or the template is of another one.
    """
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.templates:
        return None if name is None else get_parser(name)
    template = tokenizer.templates[chat_template(tokenizer, tools=True)]
    if name is not None:
        return get_parser(name, template)
    fit = [parser for parser in PARSERS.values() if parser.fits(template)]
    return fit[0] if len(fit) == 1 else None


def read_tools(body: Json, parser: Parser | None) -> Tools | None:
    """The tools that a request names; None for none.

    Args:
      body: of the request.
      parser: of the served model's family, or None.

    Raises:
      ApiError: tools are not what OpenAI's API takes, or no parser reads their calls.
    """
    entries, choice = body.get("tools"), _choice(body.get("tool_choice"))
    if entries in (None, []):
        if choice.mode == "required" or choice.names is not None:
            raise ApiError(
                f"tool_choice = {body['tool_choice']!r:.60} needs tools", param="tool_choice"
            )
        return None
    if not isinstance(entries, list):
        raise ApiError("tools must be an array of functions", param="tools")
    tools = tuple(_read_tool(each, i) for i, each in enumerate(entries))
    names = [each["function"]["name"] for each in tools]
    if len(set(names)) < len(tools):
        raise ApiError("tools: two functions have the same name", param="tools")
    if choice.mode == "none":
        return None
    if parser is None:
        families = ", ".join(PARSERS)
        raise ApiError(
            "tools: the model's chat template does not say how it writes calls; start the server"
            f" with --tool-parser, one of {families}",
            param="tools",
        )
    for name in choice.names or ():
        if name not in names:
            problem = f"tool_choice names the function {name!r:.60}; tools has "
            raise ApiError(problem + ", ".join(map(repr, names)), param="tool_choice")
    barred: frozenset[str] = frozenset()
    if choice.only is None and choice.names is not None:
        barred = frozenset(names) - set(choice.names)
        tools = tuple(each for each in tools if each["function"]["name"] not in barred)
    single = choice.only is not None or body.get("parallel_tool_calls") is False
    return Tools(tools, parser, choice.mode == "required", choice.only, single, barred)


class _Choice(NamedTuple):
    """A parsed ``tool_choice``.

    Attributes:
      mode: auto, none or required.
      names: the functions that it names; None where it names none.
      only: the function that must be called once; None for any.
    """

    mode: str
    names: tuple[str, ...] | None = None
    only: str | None = None


def _choice(choice: Any) -> _Choice:
    if choice in (None, "none", "auto", "required"):
        return _Choice(choice or "auto")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and (name := _function_name(choice)) is not None:
        return _Choice("required", (name,), name)
    allowed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        entries = allowed.get("tools")
        names = [_function_name(each) for each in entries] if isinstance(entries, list) else []
        if names and None not in names:
            return _Choice(allowed["mode"], tuple(filter(None, names)))
    raise ApiError(
        f"tool_choice = {choice!r:.60}; this server takes 'auto', 'none', 'required',"
        ' {"type": "function", "function": {"name": NAME}} and {"type": "allowed_tools",'
        ' "allowed_tools": {"mode": "auto" or "required", "tools": [FUNCTION, ...]}}',
        param="tool_choice",
    )


def _function_name(entry: Any) -> str | None:
    """NAME of {"type": "function", "function": {"name": NAME}}; None for anything else."""
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name and entry.get("type") == "function" else None


def _read_tool(entry: Any, i: int) -> Json:
    where = f"tools[{i}]"
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or entry.get("type") != "function":
        raise ApiError(
            f'{where} must be an object with "type": "function" and a "function"', param=where
        )
    name, schema = function.get("name"), function.get("parameters") or {}
    if not isinstance(name, str) or not name:
        raise ApiError(f"{where}.function.name must be a text", param=f"{where}.function.name")
    if not isinstance(schema, dict):
        raise ApiError(
            f"{where}.function.parameters must be an object", param=f"{where}.function.parameters"
        )
    if not isinstance(schema.get("properties", {}), dict):
        place = f"{where}.function.parameters.properties"
        raise ApiError(f"{place} must be an object: a schema for each argument", param=place)
    parameters = {"type": "object", "properties": {}, **schema}
    return {"type": "function", "function": {**function, "parameters": parameters}}


@functools.lru_cache(maxsize=8)
def takes_one_call(tokenizer: Any) -> bool:
    """Whether the chat template refuses two calls in a turn, as Llama 3's does.

    A reply with two would end the conversation: clients send it back.
    """
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.templates:
        return False
    frames = Frames(tokenizer, chat_template(tokenizer, tools=True), {})

    def refuses(names: Sequence[str]) -> bool:
        ids = [f"jrlcall0{i}" for i, _ in enumerate(names)]
        call = calling(names, ids, content="", as_text=False)
        return frames.refuses([{"role": "user", "content": "a"}, call])

    return not refuses(["f"]) and refuses(["f", "g"])


def told_calls(message: Json, where: str) -> Json | None:
    """{"tool_calls": ...} of a message as templates take it; None for a message without calls.

    Raises:
      ApiError: it is not what OpenAI's API takes.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise ApiError(
            f"{where}.tool_calls must be an array, of the assistant", param=f"{where}.tool_calls"
        )
    if not calls:  # as some servers write it; a template would take it for calls
        return None
    names = [f"{where}.tool_calls[{i}]" for i in range(len(calls))]
    return {"tool_calls": [_read_call(*pair) for pair in zip(calls, names, strict=True)]}


def _read_call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ApiError(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json_or_none(arguments)
    if not isinstance(arguments, dict):
        raise ApiError(
            f"{where}.function.arguments must be JSON of an object", param=f"{where}.function"
        )
    called = {"name": name, "arguments": arguments}
    return {"type": "function", "id": str(call.get("id") or ""), "function": called}


def conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Token ids of the conversation with its tools, by the chat template.

    What messages say is text, and never a control token.

    Raises:
      UserError: the template refuses the messages, writes no tools or no calls, or does not read a
        variable; or something beside the contents spells a control token.
    """
    offered = list(tools.offered) if tools else []
    check_variables(variables, tokenizer, "chat_template_kwargs")
    check_fields(tokenizer, [dict(m) for m in messages], offered, "the request")
    results = [
        {**m, "role": tools.parser.role, "content": tools.parser.result(m["content"])}
        if tools is not None and m["role"] == "tool"
        else m
        for m in messages
    ]
    template_values = {**variables, "tools": offered} if tools else dict(variables)
    frames = None
    if isinstance(tokenizer, FileTokenizer) and tokenizer.templates:
        frames = Frames(
            tokenizer, chat_template(tokenizer, tools=tools is not None), template_values
        )

    def render(messages: Sequence[Message], tools: Sequence[Message]) -> str:
        used = {**template_values, "tools": list(tools)} if tools else template_values
        if frames is not None:
            return frames._replace(variables=used).render(messages)
        return tokenizer.chat(messages, **used)

    if name := left_out(render, results, offered):
        raise UserError(
            f"the model's chat template does not write the tool {name!r}; tell of tools and their"
            " calls in messages"
        )
    if frames is not None:
        return conversation_ids(frames, results, "assistant")
    return tokenizer.encode(render(results, offered))


def calls_of(raw: str, tools: Tools) -> tuple[str | None, list[Json]]:
    """The words before the first call, and the calls, as a message has them.

    Args:
      raw: what was drawn, control tokens spelled out.
      tools: of the request.

    Returns:
      (None where nothing stands before, calls); no calls where none can be read, and the first
      alone where the request takes no second one.
    """
    parsed = tools.parser.parse(raw, tools.schemas)
    calls = [call for call in parsed if isinstance(call, Call)]
    if not parsed or len(calls) < len(parsed) or any(c.name in tools.barred for c in calls):
        return None, []
    begin = 0 if tools.parser.begin is None else tools.parser.begin(raw, tools.schemas)
    taken, used = calls[:1] if tools.single else calls, set[str]()
    return raw[:begin].strip() or None, [_written(call, used) for call in taken]


def _written(call: Call, used: set[str]) -> Json:
    """A call as a message has it, with its own id where templates take it and no other has it."""
    name = call.id
    if name in used or not _ID.fullmatch(name):
        name = secrets.token_hex(_ID_SIZE)[:_ID_SIZE]
    used.add(name)
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}
