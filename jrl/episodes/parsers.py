r"""Tool-call formats of each model family, as values: text to calls, a call to text.

    parser = PARSERS["hermes"]
    parser.parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    # (Call("add", {"a": 1}),)

A parser reads the policy's words with their control tokens spelled out, never raises, and tells two
kinds of error apart: "structure", what no call can be read from, and "content", a call of a tool or
with arguments that there are not (``tools.check_call``).

Calls are parsed from where they begin, by a reader of their language (JSON, Python, or parameters
between tags), which says where they end. So a family's marks inside a string are text. Only where
that reader fails do marks say how far the broken call goes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.errors import UserError, unknown_choice

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, an object, by the tool's name."""


class Call(NamedTuple):
    """One tool call.

    Attributes:
      name: of the tool.
      arguments: by name, JSON values.
      id: that the policy gave it, in formats that have one; else "".
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""


class Malformed(NamedTuple):
    """A tool call that cannot be made.

    Attributes:
      kind: "structure", where no call can be read; "content", where tool or arguments are wrong.
      reason: for the policy to read.
      name: of the tool, where it can be read.
    """

    kind: str
    reason: str
    name: str = ""


class Parser(NamedTuple):
    """A family's tool-call format.

    Attributes:
      parse: (text, schemas) -> the calls in it, in order; () for a text without any. The schemas
        give types to formats that do not write them, and say which tools are offered: where a
        format has no mark of a call, JSON that names another tool is an answer.
      render: (call) -> text that ``parse`` reads as that call.
      role: of the messages that results are sent back in.
      result: (text of a result) -> content of that message.
      template: texts of which chat templates of the family contain one; () for any.
      others: texts that show that a template is another family's all the same.
      list_tags: what the family writes around a list of tools.
      ends_turn: whether a call ends with a token at which the turn ends, so that a turn has one.
      begin: (text, schemas) -> the character at which the first call begins, the length of the text
        for none; None for a parser of one's own.
      channels: (text without calls) -> (what was thought, what was said), where a format writes
        them as messages of their own; None for a text without such messages.
      name: of the family; "" for a parser of one's own.
    """

    parse: Callable[[str, Schemas], tuple[Call | Malformed, ...]]
    render: Callable[[Call], str]
    role: str = "tool"
    result: Callable[[str], str] = lambda text: text
    template: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    list_tags: tuple[str, str] = ("", "")
    ends_turn: bool = False
    begin: Callable[[str, Schemas], int] | None = None
    channels: Callable[[str], tuple[str, str] | None] | None = None
    name: str = ""

    def fits(self, template: str) -> bool:
        """Whether a chat template has the family's marks."""
        other = any(mark in template for mark in self.others)
        return any(mark in template for mark in self.template) and not other


def get_parser(name: str, template: str | None = None) -> Parser:
    """The parser of a family.

    Args:
      name: of ``PARSERS``.
      template: the chat template that it is used with; None where there is none. One without the
        marks of any family, which has no place for tools, goes with every parser.

    Raises:
      UserError: there is no such family, or the template is that of another one.
    """
    if name not in PARSERS:
        raise unknown_choice("parser", name, PARSERS)
    fit = [n for n, parser in PARSERS.items() if template is not None and parser.fits(template)]
    if fit and name not in fit:
        fault_text = f"its chat template is of {' or '.join(map(repr, fit))}"
        raise UserError(f"parser = {name!r} does not fit the model: {fault_text}; use that parser")
    return PARSERS[name]


# ---------------------------------------------------------------- JSON

Parsed = tuple[Call | Malformed, ...]

_dumps = functools.partial(json.dumps, ensure_ascii=False)
_SPACE = re.compile(r"\s*")
_ADDRESS = re.compile(r"<[^<>\n]{1,200} at 0x[0-9a-fA-F]+>")


def without_addresses(text: str) -> str:
    """A text without the memory addresses of Python objects, which differ in runs of one seed.

    >>> without_addresses("malformed node: <ast.Name object at 0x7f03a1>")
    'malformed node: an expression'
    """
    return _ADDRESS.sub("an expression", text)


def _malformed(reason: str, name: str = "") -> Malformed:
    """A broken call."""
    return Malformed("structure", without_addresses(reason)[:300], name)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits[:40])


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a character, after white space, and where it ends.

    A value that cannot be read is ``Malformed``, and ends where it should begin.
    """
    at = _after_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return _malformed(f"not JSON: {error}"), at


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _json(text: str) -> Any:
    """The value of a text, or ``Malformed``."""
    value, end = _json_at(text, 0)
    if isinstance(value, Malformed) or not text[end:].strip():
        return value
    return _malformed(f"not JSON: extra data: {text[end:]!r:.40}")


def _without_surrogates(value: Any) -> Any:
    """A JSON value without lone surrogates, which cannot be encoded: they become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "id", "type"}


def _call(value: Any) -> Call | Malformed:
    """A call from {"name": ..., "arguments": ...}; arguments may be text that holds JSON."""
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed('a call is a JSON object with a "name"')
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if not _has_arguments(value):
        return _malformed('the arguments of a call are the object "arguments"', value["name"])
    call = _with_arguments(value["name"], arguments)
    call_id = value.get("id")
    if isinstance(call, Call) and isinstance(call_id, str):
        return call._replace(id=_without_surrogates(call_id))
    return call


def _has_arguments(value: Mapping[str, Any]) -> bool:
    """Whether an object has arguments where a call has them, or none at all."""
    return any(key in value for key in _ARGUMENTS) or value.keys() <= _BESIDE


def _with_arguments(name: str, arguments: Any) -> Call | Malformed:
    name = _without_surrogates(name)
    if arguments is None or arguments == "":  # so OpenAI's clients write none
        arguments = {}
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if isinstance(arguments, Malformed):
        return arguments._replace(name=name)
    if not isinstance(arguments, dict):
        return _malformed("the arguments must be a JSON object", name)
    try:
        return Call(name, _without_surrogates(arguments))
    except RecursionError:
        return _malformed("the arguments are nested too deeply", name)


# ---------------------------------------------------------------- parts of a turn


class _Part(NamedTuple):
    """A call in a text.

    Attributes:
      begin: its first character, that of its mark included.
      end: behind its last one; where it should begin, for a broken call.
      call: what was read.
      bare: whether nothing stands behind its mark that a call begins with.
    """

    begin: int
    end: int
    call: Call | Malformed
    bare: bool = False


Scan = Callable[[str, Schemas], Iterator[_Part]]
"""(text, schemas) -> the calls in it, in order, those in thoughts included."""

_THOUGHT_END = re.compile(r"</think>|\[/THINK\]")


def _parts(text: str, parts: Iterable[_Part]) -> list[_Part]:
    """The calls outside of thoughts; a mark beside calls that begins nothing is a word."""
    calls, last = list(parts), 0
    for match in _THOUGHT_END.finditer(text):
        end = match.start()
        if any(x.begin <= end < x.end for x in calls):
            continue  # one inside a call is text
        begin = text.rfind(match[0].replace("/", ""), last, end)  # < 0: the template has opened it
        calls = [x for x in calls if not begin <= x.begin < end]
        last = match.end()
    some = any(isinstance(x.call, Call) for x in calls)
    return [x for x in calls if not (some and x.bare)]


def _family(scan: Scan, render: Callable[[Call], str], **more: Any) -> Parser:
    """The parser of a family whose calls ``scan`` reads."""

    def parse(text: str, schemas: Schemas) -> Parsed:
        return tuple(part.call for part in _parts(text, scan(text, schemas)))

    def begin(text: str, schemas: Schemas) -> int:
        return next((part.begin for part in _parts(text, scan(text, schemas))), len(text))

    return Parser(parse, render, begin=begin, **more)


# ---------------------------------------------------------------- between tags

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

Read = Callable[[str, int], tuple[Call | Malformed, int]]
"""(text, start of a call) -> (the call, its end). A broken call ends where it starts."""


def _tagged(
    text: str, read: Read, first: re.Pattern[str], bare: re.Pattern[str] | None = None
) -> Iterator[_Part]:
    """The calls after <tool_call>.

    Args:
      text: of a turn.
      read: reads one call.
      first: what a call begins with. So may another one behind it, before the closing tag.
      bare: how a call may begin without the tag.
    """
    at = 0
    while True:
        starts = [(text.find(_OPEN, at), _OPEN)]
        if bare is not None and (match := bare.search(text, at)):
            starts.append((match.start(), ""))
        start, mark = min(((i, m) for i, m in starts if i >= 0), default=(-1, ""))
        if start < 0:
            return
        begin = at = start + len(mark)
        close, again = text.find(_CLOSE, at), text.find(_OPEN, at)
        word = first.match(text, at) is None and (close < 0 or 0 <= again < close)
        call, end = read(text, at)
        while isinstance(call, Call) and first.match(text, end):
            yield _Part(start, end, call)
            start, (call, end) = end, read(text, end)
        closed = text.startswith(_CLOSE, _after_space(text, end))
        if isinstance(call, Call) and mark and not closed:
            close, again = text.find(_CLOSE, end), text.find(_OPEN, end)
            closed = close >= 0 and not 0 <= again < close
        if mark and not closed and _CLOSE not in text[at:]:
            call = _malformed(f"{_CLOSE} is missing")
        yield _Part(start, end, call, word)
        # After a broken call the search goes on inside it: where it ends is not known.
        at = max(end, begin + (not mark))


_OBJECT = re.compile(r'\s*\{\s*["}]')


def _scan_hermes(text: str, schemas: Schemas) -> Iterator[_Part]:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        value, end = _json_at(text, at)
        return _call(value), end

    return _tagged(text, read, _OBJECT)


def _render_hermes(call: Call) -> str:
    # A "<" in a string is written as an escape: other readers of this format search for the tags.
    body = _dumps({"name": call.name, "arguments": call.arguments}).replace("<", "\\u003c")
    return f"<tool_call>\n{body}\n</tool_call>"


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
# Strings are not quoted here, so the end of a value is a closing tag that something follows which
# may follow a value. A closing tag in the middle of a text is text.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>|\Z))")
_UNCLOSED = re.compile(r"\n?(?=\n<parameter=[^>\n]+>\n|\s*</function>\s*(?:</tool_call>|\Z))")
_FUNCTION_END = re.compile(r"\s*</function>")


def _scan_coder(text: str, schemas: Schemas) -> Iterator[_Part]:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        head = _FUNCTION.match(text, at)
        if head is None:
            return _malformed("a call is <function=NAME> ... </function>"), at
        name, begin, at = head[1].strip(), at, head.end()
        schema = schemas.get(name, {})
        types = schema.get("properties", {})
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, at):
            value, at = _parameter_value(text, parameter.end())
            key = parameter[1].strip()
            arguments[key] = _typed(value, resolved(types.get(key, {}), schema), schema)
        end = _FUNCTION_END.match(text, at)
        if end is None:
            rest = text[at:].partition("</function>")[0]
            return _malformed(f"not a <parameter=...>: {rest.strip()!r:.60}", name), begin
        return _with_arguments(name, arguments), end.end()

    offered = "|".join(map(re.escape, schemas))
    bare = re.compile(rf"^[ \t]*<function=(?:{offered})>", re.MULTILINE) if offered else None
    return _tagged(text, read, _FUNCTION, bare)


def _parameter_value(text: str, at: int) -> tuple[str, int]:
    """The text of a parameter, and where its closing tag ends; the tag may be missing."""
    closed, unclosed = _VALUE_END.search(text, at), _UNCLOSED.search(text, at)
    if unclosed and (closed is None or unclosed.start() < closed.start()):
        between = text[at : closed.start()] if closed else ""
        if closed is None or "\n<parameter=" in between:
            return text[at : unclosed.start()], unclosed.end()
    if closed:
        return text[at : closed.start()], closed.end()
    return text[at:], len(text)


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
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            kinds = kinds.union(*(allowed_kinds(option, root, depth + 1) for option in options))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(values, list) and values:
        return {next(kind for kind, fits in _IS.items() if fits(value)) for value in values}
    return kinds


_IS = {
    "boolean": lambda x: isinstance(x, bool),
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "string": lambda x: isinstance(x, str),
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "null": lambda x: x is None,
}


_TRUTHS = {"true": True, "false": False, "null": None, "none": None}


def _typed(text: str, schema: Any, root: Any) -> Any:
    """The value of a parameter that is written without quotes, by its schema.

    JSON and Python literals are read where the schema allows their type; any other text is text.
    """
    kinds = allowed_kinds(schema, root)
    if kinds == {"string"}:
        return text
    value = _json(text)
    if not kinds:
        return text if isinstance(value, Malformed) else value
    for candidate in (value, _literal(text), _TRUTHS.get(text.strip().lower(), value)):
        fits = any(_IS[kind](candidate) for kind in kinds if kind in _IS and kind != "string")
        if not isinstance(candidate, Malformed) and fits:
            return candidate
    if isinstance(value, Malformed) or "string" in kinds:
        return text
    return value  # of a type that the schema does not allow, which ``check_call`` will say


def _render_coder(call: Call) -> str:
    lines = [f"<tool_call>\n<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else _dumps(value)
        lines.append(f"<parameter={name}>\n{text}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


# ---------------------------------------------------------------- JSON after a control token

_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"\w*"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r'^[ \t]*(?=\{\s*"|```)', re.MULTILINE)
_MOST_OBJECTS = 16
"""Lines with an object that are tried as the first call behind words."""


def _scan_llama(text: str, schemas: Schemas) -> Iterator[_Part]:
    last, starts = 0, [0, *(match.end() for match in _THOUGHT_END.finditer(text))]
    for start, limit in itertools.pairwise([*starts, len(text) + 1]):
        if start < last:
            continue  # the end of a thought inside a call is text
        for part in _llama_calls(text, start, limit, schemas):
            yield part
            last = part.end


def _llama_calls(text: str, start: int, limit: int, schemas: Schemas) -> Iterator[_Part]:
    """The calls that begin in a part of a text: at once, behind the mark, or at a line's start."""
    at = _after_space(text, start)
    tag = -1 if text.startswith("{", at) else text.find(_PYTHON_TAG, at, limit)
    if tag >= 0:
        at = tag + len(_PYTHON_TAG)
        value, end = _json_at(text, at)
        yield _Part(tag, end, _call(value))
        at = limit if isinstance(value, Malformed) else end
    elif not text.startswith("{", at):
        at = _line_of_call(text, at, limit, schemas)
    while at < limit and _OBJECT.match(text, at):
        value, end = _json_at(text, at)
        if not (tag >= 0 and isinstance(value, dict)) and not _on_offer(text, at, value, schemas):
            return  # an answer, or words after the calls
        yield _Part(at, end, _call(value))
        if isinstance(value, Malformed):
            return
        at = end
        while at < len(text) and (text[at].isspace() or text[at] in ";,"):
            at += 1


def _line_of_call(text: str, at: int, limit: int, schemas: Schemas) -> int:
    """Start of the first line that is a call of an offered tool, or ``limit``.

    What stands between fences is an example.
    """
    fenced, tries = False, 0
    for match in _LINE.finditer(text, at, limit):
        if text.startswith("```", match.end()):
            fenced = not fenced
        elif not fenced and tries < _MOST_OBJECTS:
            tries += 1
            value, _ = _json_at(text, match.end())
            if isinstance(value, dict) and _on_offer(text, match.end(), value, schemas):
                return match.end()
    return limit


def _on_offer(text: str, at: int, value: Any, schemas: Schemas) -> bool:
    """Whether JSON calls a tool on offer; broken JSON where it begins with the tool's name."""
    if isinstance(value, Malformed):
        name = _NAMED.match(text, at)
        return name is not None and name[1] in schemas
    return isinstance(value, dict) and value.get("name") in schemas and _has_arguments(value)


def _render_llama(call: Call) -> str:
    return _dumps({"name": call.name, "parameters": call.arguments})


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\])?\s*(?=\{)")
_LIST = re.compile(r"\s*[\[{]")


def _scan_mistral(text: str, schemas: Schemas) -> Iterator[_Part]:
    mark = text.find(_MISTRAL)
    while mark >= 0:
        at = mark + len(_MISTRAL)
        head = _MISTRAL_HEAD.match(text, at)
        value, end = _json_at(text, head.end() if head else at)
        if head:  # from version 11 of the format on
            call = _with_arguments(head[1], value)
            call = call._replace(id=head[2] or "") if isinstance(call, Call) else call
            yield _Part(mark, end, call)
        else:
            items = value if isinstance(value, list) else [value]
            for item in items:
                yield _Part(mark, end, _call(item), _LIST.match(text, at) is None)
            if not items:
                yield _Part(mark, end, _malformed("[TOOL_CALLS] without a call"))
        mark = text.find(_MISTRAL, max(at, end))


def _render_mistral(call: Call) -> str:
    # A bracket in a string is written as an escape: other readers of this format split at it.
    value = {"name": call.name, "arguments": call.arguments}
    body = _dumps(value | ({"id": call.id} if call.id else {}))
    body = body.replace(_MISTRAL, "\\u005bTOOL_CALLS]")
    return f"{_MISTRAL}[{body}]"


def _deepseek(words: str) -> str:
    """A control token of DeepSeek's, written with wide bars and low lines of its own."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END, _SEP = (_deepseek(f"tool {words}") for words in ("call begin", "call end", "sep"))
_FENCE_BEGIN = re.compile(r"([^\n`]*)\n```json\n")  # the older form: "function", separator, name
_FENCE_END = re.compile(r"\s*```")
_DEEPSEEK_MARK = re.compile(
    rf"(?:{re.escape(_deepseek('tool calls begin'))}\s*)?{re.escape(_BEGIN)}"
)


def _scan_deepseek(text: str, schemas: Schemas) -> Iterator[_Part]:
    at = 0
    while mark := _DEEPSEEK_MARK.search(text, at):
        at = mark.end()
        separator, again = text.find(_SEP, at), text.find(_BEGIN, at)
        if separator < 0 or 0 <= again < separator:
            yield _Part(mark.start(), at, _malformed(f"{_SEP} is missing"), again >= 0)
            continue
        name, body = text[at:separator].strip(), separator + len(_SEP)
        fence = _FENCE_BEGIN.match(text, body) if name == "function" else None
        if fence:
            name, body = fence[1].strip(), fence.end()
        value, end = _json_at(text, body)
        if fence and (close := _FENCE_END.match(text, end)):
            end = close.end()
        if not isinstance(value, Malformed) and text.startswith(_END, _after_space(text, end)):
            call = _with_arguments(name, value)
        elif _END not in text[body:]:
            call = _malformed(f"{_END} is missing")
        else:
            call = _malformed("the arguments must be a JSON object")
            call = value if isinstance(value, Malformed) else call
        call = call if name else _malformed("a call without the name of a tool")
        yield _Part(mark.start(), end, call)
        at = max(body, end)


def _render_deepseek(call: Call) -> str:
    body = _dumps(call.arguments).replace("<", "\\u003c")
    one = f"{_BEGIN}{call.name}{_SEP}{body}{_END}"
    return _deepseek("tool calls begin") + one + _deepseek("tool calls end")


_HARMONY_HEAD = re.compile(
    r"(?:\A|<\|start\|>|<\|channel\|>)([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
)
_HARMONY_END = re.compile(r"<\|call\|>|<\|end\|>|<\|return\|>|\Z")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CALL_END = "<|call|>"


def _scan_harmony(text: str, schemas: Schemas) -> Iterator[_Part]:
    at = calls = 0
    while head := _HARMONY_HEAD.search(text, at):
        at = head.end()
        recipient = _RECIPIENT.search(head[1])
        if recipient is None:  # words, up to the mark that ends a message
            closing = _HARMONY_END.search(text, at)
            at = closing.end() if closing else at
            continue
        name = recipient[1]
        value, end = _json_at(text, at)
        at_end = text.startswith(_CALL_END, _after_space(text, end))
        whole = at_end or (isinstance(value, Malformed) and _CALL_END in text[at:])
        call = _with_arguments(name, value) if whole else None
        calls += 1
        yield _Part(head.start(), end, call or _malformed(f"{_CALL_END} is missing", name))
        at = max(at, end)
    if not calls and _RECIPIENT.search(text, at):
        yield _Part(at, at, _malformed("<|message|> is missing"))


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _harmony_channels(text: str) -> tuple[str, str] | None:
    """The text of the channel "analysis" (thinking), and that of the others."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    at = 0
    while head := _HARMONY_HEAD.search(text, at):
        end = _HARMONY_END.search(text, head.end())
        at = end.end() if end else len(text)
        channel = _CHANNEL.search(head[0])
        message = text[head.end() : end.start() if end else at]
        texts[channel is not None and channel[1] == "analysis"].append(message)
    if not at and _CHANNEL.match(text) is None:
        return None
    thinking, answer = ("\n".join(filter(None, texts[key])) for key in (True, False))
    return thinking, answer


def _render_harmony(call: Call) -> str:
    body = _dumps(call.arguments).replace("<", "\\u003c")
    return (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{body}<|call|>"
    )


# ---------------------------------------------------------------- Python between fences

_CODE_BEGIN, _CODE_END = re.compile(r"```tool_code[ \t\r]*\n"), "```"
_LONGEST = 1 << 16
"""Characters of Python that are parsed at most; the parser's memory grows a hundredfold."""
_MOST_FENCES = 16
"""Closing fences that are tried; one inside a string leaves the code before it unfinished."""


def _scan_gemma(text: str, schemas: Schemas) -> Iterator[_Part]:
    at = 0
    while mark := _CODE_BEGIN.search(text, at):
        calls, at = _code_at(text, mark.end())
        for call in calls:
            yield _Part(mark.start(), at, call)


def _code_at(text: str, begin: int) -> tuple[list[Call | Malformed], int]:
    """The calls of a block of code, and where its closing fence ends."""
    first: tuple[list[Call | Malformed], int] | None = None
    close = begin
    for _ in range(_MOST_FENCES):
        close = text.find(_CODE_END, close)
        if close < 0:
            break
        body = text[begin:close]
        close += len(_CODE_END)
        statements = _statements(body)
        if not isinstance(statements, Malformed):
            calls = [_python_call(node) for s in statements for node in _expressions(s)]
            return calls or [_malformed("tool_code without a call")], close
        first = first or ([statements], close)
    return first or ([_malformed("``` is missing")], len(text))


def _statements(body: str) -> list[ast.stmt] | Malformed:
    if len(body) > _LONGEST:
        return _malformed(f"longer than {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _malformed(f"not Python: {error}")


def _expressions(statement: ast.stmt) -> Sequence[ast.expr | None]:
    """The expression of a line, or those of the list that it is."""
    node = statement.value if isinstance(statement, ast.Expr) else None
    return node.elts if isinstance(node, ast.List) and node.elts else [node]


def _python_call(node: ast.expr | None) -> Call | Malformed:
    """The call of a line such as ``name(a=1)`` or ``print(name(a=1))``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        node = node.args[0] if len(node.args) == 1 and not node.keywords else None
    if not isinstance(node, ast.Call):
        return _malformed("each line must be one call, name(argument=value)")
    try:
        name = ast.unparse(node.func)
    except (ValueError, RecursionError, MemoryError):
        return _malformed("each line must be one call, name(argument=value)")
    if node.args or not all(k.arg for k in node.keywords):
        return _malformed("arguments must be given by name", name)
    names = [keyword.arg for keyword in node.keywords]
    if len(set(names)) < len(names):
        return _malformed("an argument is there twice", name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        value = _value_of(keyword.value)
        if isinstance(value, Malformed):
            return _malformed(f"arguments must be JSON values: {keyword.arg}", name)
        arguments[str(keyword.arg)] = value
    return _with_arguments(name, arguments)


_WORDS = {"true": True, "false": False, "null": None}


class _JsonWords(ast.NodeTransformer):
    """Reads JSON's words for truth and nothing as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _value_of(node: ast.expr) -> Any:
    """The JSON value of a Python literal, or ``Malformed``; tuples become lists."""
    try:
        value = ast.literal_eval(_JsonWords().visit(node))
        # Sets and bytes are Python, but no arguments.
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _malformed("not a literal")


def _literal(text: str) -> Any:
    """The JSON value of a text that is a Python literal, or ``Malformed``."""
    statements = _statements(text)
    if isinstance(statements, Malformed) or len(statements) != 1:
        return _malformed("not a literal")
    node = statements[0]
    return _value_of(node.value) if isinstance(node, ast.Expr) else _malformed("not a literal")


def _render_gemma(call: Call) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    # Backquotes stand in strings alone; other readers of this format search for the fence.
    body = f"{call.name}({inside})".replace("`", "\\x60")
    return f"```tool_code\n{body}\n```"


_FAMILIES = {
    "hermes": _family(
        _scan_hermes,
        _render_hermes,
        template=("<tool_call>",),
        others=("<parameter=", "<arg_key>"),  # Qwen3-Coder's, and GLM's
        list_tags=("<tools>\n", "\n</tools>"),
    ),
    "qwen3_coder": _family(
        _scan_coder,
        _render_coder,
        template=("<parameter=",),
        list_tags=("<tools>\n", "\n</tools>"),
    ),
    "llama3": _family(
        _scan_llama,
        _render_llama,
        template=("ipython", "<|python_tag|>"),
        others=("<function=", "<tool_call>", _BEGIN),
    ),
    "mistral": _family(
        _scan_mistral,
        _render_mistral,
        template=(_MISTRAL,),
        list_tags=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "gemma": _family(
        _scan_gemma,
        _render_gemma,
        role="user",
        result=lambda text: f"```tool_output\n{text}\n```",
        template=("<start_of_turn>",),
    ),
    "deepseek": _family(_scan_deepseek, _render_deepseek, template=(_BEGIN,)),
    "gpt_oss": _family(
        _scan_harmony,
        _render_harmony,
        template=("<|channel|>",),
        ends_turn=True,
        channels=_harmony_channels,
    ),
}
PARSERS: Mapping[str, Parser] = {n: p._replace(name=n) for n, p in _FAMILIES.items()}
"""The formats by family: Hermes and Qwen 2.5 and 3, Qwen3-Coder, Llama 3, Mistral, Gemma 3,
DeepSeek V3 and R1, gpt-oss."""
