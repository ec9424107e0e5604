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
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_DECODER = json.JSONDecoder(parse_constant=_refuse)


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


def _call(value: Any, keys: Sequence[str] = ("arguments",)) -> Call | Malformed:
    """A call from {"name": ..., "arguments": ...}; arguments may be text that holds JSON."""
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed('a call is a JSON object with a "name"')
    arguments: Any = next((value[key] for key in keys if key in value), {})
    call = _with_arguments(value["name"], arguments)
    call_id = value.get("id")
    if isinstance(call, Call) and isinstance(call_id, str):
        return call._replace(id=_without_surrogates(call_id))
    return call


def _with_arguments(name: str, arguments: Any) -> Call | Malformed:
    name = _without_surrogates(name)
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


# ---------------------------------------------------------------- between tags

_OPEN, _CLOSE, _THOUGHT = "<tool_call>", "</tool_call>", "</think>"

Read = Callable[[str, int], tuple[Call | Malformed, int]]
"""(text, start of a call) -> (the call, its end). A broken call ends where it starts."""


def _tagged(text: str, read: Read, bare: re.Pattern[str] | None = None) -> Parsed:
    """The calls after <tool_call>; those inside thinking are ignored.

    Args:
      text: of a turn.
      read: reads one call.
      bare: how a call may begin without the tag.
    """
    calls: list[Call | Malformed] = []
    at, thinking = 0, _THOUGHT in text
    while True:
        starts = [(text.find(mark, at), mark) for mark in (_OPEN, *([_THOUGHT] * thinking))]
        if bare is not None and (match := bare.search(text, at)):
            starts.append((match.start(), ""))
        start, mark = min(((i, m) for i, m in starts if i >= 0), default=(-1, ""))
        if start < 0:
            return tuple(calls)
        at = start + len(mark)
        if mark == _THOUGHT:  # what came before it was thought, and is no call
            calls, thinking = [], False
            continue
        call, end = read(text, at)
        closed = text.startswith(_CLOSE, _after_space(text, end))
        if isinstance(call, Call) and mark and not closed:
            close = text.find(_CLOSE, end)
            again = text.find(_OPEN, end)
            closed = close >= 0 and not 0 <= again < close
        if mark and not closed and _CLOSE not in text[at:]:
            call = _malformed(f"{_CLOSE} is missing")
        calls.append(call)
        # After a broken call the search goes on inside it: where it ends is not known.
        at = max(end, at + (not mark))


def _parse_hermes(text: str, schemas: Schemas) -> Parsed:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        value, end = _json_at(text, at)
        return _call(value), end

    return _tagged(text, read)


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


def _parse_coder(text: str, schemas: Schemas) -> Parsed:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        head = _FUNCTION.match(text, at)
        if head is None:
            return _malformed("a call is <function=NAME> ... </function>"), at
        name, begin, at = head[1].strip(), at, head.end()
        types = schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, at):
            value, at = _parameter_value(text, parameter.end())
            key = parameter[1].strip()
            arguments[key] = _typed(value, types.get(key, {}))
        end = _FUNCTION_END.match(text, at)
        if end is None:
            rest = text[at:].partition("</function>")[0]
            return _malformed(f"not a <parameter=...>: {rest.strip()!r:.60}", name), begin
        return _with_arguments(name, arguments), end.end()

    offered = "|".join(map(re.escape, schemas))
    bare = re.compile(rf"^[ \t]*<function=(?:{offered})>", re.MULTILINE) if offered else None
    return _tagged(text, read, bare)


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


def allowed_kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            kinds = kinds.union(*map(allowed_kinds, options))
    values = schema.get("enum")
    if not kinds and isinstance(values, list) and all(isinstance(v, str) for v in values):
        return {"string"}
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


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter that is written without quotes, by its schema.

    JSON and Python literals are read where the schema allows their type; any other text is text.
    """
    kinds = allowed_kinds(schema)
    if kinds == {"string"}:
        return text
    value = _json(text)
    if not kinds:
        return text if isinstance(value, Malformed) else value
    for candidate in (value, _literal(text)):
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
_OBJECT = re.compile(r'\{\s*"')
_NAMED = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


def _parse_llama(text: str, schemas: Schemas) -> Parsed:
    begin = _after_space(text, 0)
    marked = not text.startswith("{", begin) and _PYTHON_TAG in text
    if marked:
        begin = text.index(_PYTHON_TAG) + len(_PYTHON_TAG)
    calls: list[Call | Malformed] = []
    for value in _objects(text, begin):
        call = _call(value, ("parameters", "arguments"))
        if isinstance(value, Malformed) and not marked:
            # Broken JSON is a broken call only where it names a tool.
            name = _NAMED.search(text, begin)
            offered = name is not None and name[1] in schemas
        else:
            offered = marked or (isinstance(value, dict) and value.get("name") in schemas)
        if not offered:
            break  # an answer, or words after the calls
        calls.append(call)
    if marked and not calls:
        value, _ = _json_at(text, begin)
        calls.append(_call(value, ("parameters", "arguments")))
    return tuple(calls)


def _objects(text: str, at: int) -> Iterator[Any]:
    """JSON objects one after another, perhaps with semicolons between them; the last may be broken.

    Words after an object end the sequence.
    """
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
        if not _OBJECT.match(text, at):
            return
        value, at = _json_at(text, at)
        yield value
        if isinstance(value, Malformed):
            return


def _render_llama(call: Call) -> str:
    return _dumps({"name": call.name, "parameters": call.arguments})


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\])?\s*(?=\{)")


def _parse_mistral(text: str, schemas: Schemas) -> Parsed:
    calls: list[Call | Malformed] = []
    at = text.find(_MISTRAL)
    while at >= 0:
        at += len(_MISTRAL)
        head = _MISTRAL_HEAD.match(text, at)
        value, end = _json_at(text, head.end() if head else at)
        if head:  # from version 11 of the format on
            call = _with_arguments(head[1], value)
            calls.append(call._replace(id=head[2] or "") if isinstance(call, Call) else call)
        else:
            items = value if isinstance(value, list) else [value]
            calls += [_call(item) for item in items]
            if not items:
                calls.append(_malformed("[TOOL_CALLS] without a call"))
        at = text.find(_MISTRAL, max(at, end))
    return tuple(calls)


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


def _parse_deepseek(text: str, schemas: Schemas) -> Parsed:
    calls: list[Call | Malformed] = []
    at = text.find(_BEGIN)
    while at >= 0:
        at += len(_BEGIN)
        separator, again = text.find(_SEP, at), text.find(_BEGIN, at)
        if separator < 0 or 0 <= again < separator:
            calls.append(_malformed(f"{_SEP} is missing"))
            at = again
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
        calls.append(call if name else _malformed("a call without the name of a tool"))
        at = text.find(_BEGIN, max(body, end))
    return tuple(calls)


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


def _parse_harmony(text: str, schemas: Schemas) -> Parsed:
    calls: list[Call | Malformed] = []
    at = 0
    while head := _HARMONY_HEAD.search(text, at):
        at = head.end()
        recipient = _RECIPIENT.search(head[1])
        if recipient is None:  # words, up to the mark that ends a message
            end = _HARMONY_END.search(text, at)
            at = end.end() if end else at
            continue
        name = recipient[1]
        value, end_of_value = _json_at(text, at)
        at_end = text.startswith(_CALL_END, _after_space(text, end_of_value))
        if at_end or (isinstance(value, Malformed) and _CALL_END in text[at:]):
            calls.append(_with_arguments(name, value))
        else:
            calls.append(_malformed(f"{_CALL_END} is missing", name))
        at = max(at, end_of_value)
    if not calls and _RECIPIENT.search(text):
        calls.append(_malformed("<|message|> is missing"))
    return tuple(calls)


def _render_harmony(call: Call) -> str:
    body = _dumps(call.arguments).replace("<", "\\u003c")
    return (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{body}<|call|>"
    )


# ---------------------------------------------------------------- Python between fences

_CODE_BEGIN, _CODE_END = "```tool_code\n", "```"
_LONGEST = 1 << 16
"""Characters of Python that are parsed at most; the parser's memory grows a hundredfold."""
_MOST_FENCES = 16
"""Closing fences that are tried; one inside a string leaves the code before it unfinished."""


def _parse_gemma(text: str, schemas: Schemas) -> Parsed:
    calls: list[Call | Malformed] = []
    at = text.find(_CODE_BEGIN)
    while at >= 0:
        begin = at + len(_CODE_BEGIN)
        parsed, at = _code_at(text, begin)
        calls += parsed
        at = text.find(_CODE_BEGIN, at)
    return tuple(calls)


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
            calls = [_python_call(statement) for statement in statements]
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


def _python_call(statement: ast.stmt) -> Call | Malformed:
    """The call of a line such as ``name(a=1)`` or ``print(name(a=1))``."""
    node = statement.value if isinstance(statement, ast.Expr) else None
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
    "hermes": Parser(
        _parse_hermes,
        _render_hermes,
        template=("<tool_call>",),
        others=("<parameter=", "<arg_key>"),  # Qwen3-Coder's, and GLM's
        list_tags=("<tools>\n", "\n</tools>"),
    ),
    "qwen3_coder": Parser(
        _parse_coder,
        _render_coder,
        template=("<parameter=",),
        list_tags=("<tools>\n", "\n</tools>"),
    ),
    "llama3": Parser(
        _parse_llama,
        _render_llama,
        template=("ipython", "<|python_tag|>"),
        others=("<function=", "<tool_call>", _BEGIN),
    ),
    "mistral": Parser(
        _parse_mistral,
        _render_mistral,
        template=(_MISTRAL,),
        list_tags=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "gemma": Parser(
        _parse_gemma,
        _render_gemma,
        role="user",
        result=lambda text: f"```tool_output\n{text}\n```",
        template=("<start_of_turn>",),
    ),
    "deepseek": Parser(_parse_deepseek, _render_deepseek, template=(_BEGIN,)),
    "gpt_oss": Parser(_parse_harmony, _render_harmony, template=("<|channel|>",), ends_turn=True),
}
PARSERS: Mapping[str, Parser] = {n: p._replace(name=n) for n, p in _FAMILIES.items()}
"""The formats by family: Hermes and Qwen 2.5 and 3, Qwen3-Coder, Llama 3, Mistral, Gemma 3,
DeepSeek V3 and R1, gpt-oss."""
