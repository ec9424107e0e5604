r"""How models of each family write tool calls, as values: text to calls, a call to text.

    parser = PARSERS["hermes"]
    parser.parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    # (Call("add", {"a": 1}),)

A parser reads the policy's words with their control tokens spelled out, never raises, and tells two
kinds of error apart: "structure", what no call can be read from, and "content", a call of a tool or
with arguments that there are not (``tools.check_call``).
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
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
        give types to formats that do not write them.
      render: (call) -> text that ``parse`` reads as that call.
      role: of the messages that results are sent back in.
      result: (text of a result) -> content of that message.
      template: texts of which chat templates of the family contain one; () for any.
      others: texts that show that a template is another family's all the same.
      list_tags: what the family writes around a list of tools.
      name: of the family; "" for a parser of one's own.
    """

    parse: Callable[[str, Schemas], tuple[Call | Malformed, ...]]
    render: Callable[[Call], str]
    role: str = "tool"
    result: Callable[[str], str] = lambda text: text
    template: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    list_tags: tuple[str, str] = ("", "")
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
        said = f"its chat template is of {' or '.join(map(repr, fit))}"
        raise UserError(f"parser = {name!r} does not fit the model: {said}; use that parser")
    return PARSERS[name]


# ---------------------------------------------------------------- JSON


_dumps = functools.partial(json.dumps, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json(text: str) -> Any:
    """The value, or ``Malformed``."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return Malformed("structure", f"not JSON: {error}"[:300])


def _call(value: Any, keys: Sequence[str] = ("arguments",)) -> Call | Malformed:
    """A call from {"name": ..., "arguments": ...}; arguments may be text that holds JSON."""
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Malformed("structure", 'a call is a JSON object with a "name"')
    found = [value[key] for key in keys if key in value]
    call = _with_arguments(value["name"], found[0] if found else {})
    given = value.get("id")
    return call._replace(id=given) if isinstance(call, Call) and isinstance(given, str) else call


def _with_arguments(name: str, arguments: Any) -> Call | Malformed:
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if isinstance(arguments, Malformed):
        return arguments._replace(name=name)
    if not isinstance(arguments, dict):
        return Malformed("structure", "the arguments must be a JSON object", name)
    return Call(name, arguments)


# ---------------------------------------------------------------- between tags

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _tagged(
    text: str, read: Callable[[str], tuple[Call | Malformed, ...]]
) -> tuple[Call | Malformed, ...]:
    """What stands between <tool_call> and </tool_call>; thinking before it is not looked at."""
    out: list[Call | Malformed] = []
    thought, _, rest = text.partition("</think>")
    for body, end in _TOOL_CALL.findall(rest or thought):
        out += read(body) if end else [Malformed("structure", "</tool_call> is missing")]
    return tuple(out)


def _parse_hermes(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    return _tagged(text, lambda body: (_call(_json(body)),))


def _render_hermes(call: Call) -> str:
    # A "<" in a string is written as an escape, or a text could end the call.
    body = _dumps({"name": call.name, "arguments": call.arguments}).replace("<", "\\u003c")
    return f"<tool_call>\n{body}\n</tool_call>"


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)


def _parse_coder(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    def read(body: str) -> tuple[Call | Malformed, ...]:
        found = _FUNCTION.fullmatch(body)
        if found is None:
            return (Malformed("structure", "a call is <function=NAME> ... </function>"),)
        name, rest = found[1].strip(), found[2]
        types = schemas.get(name, {}).get("properties", {})
        arguments, end = {}, 0
        for match in _PARAMETER.finditer(rest):
            if rest[end : match.start()].strip():
                break
            arguments[match[1].strip()] = _typed(match[2], types.get(match[1].strip(), {}))
            end = match.end()
        if rest[end:].strip():
            return (Malformed("structure", f"not a <parameter=...>: {rest[end:]!r:.60}", name),)
        return (Call(name, arguments),)

    return _tagged(text, read)


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter that is written without quotes, by its schema."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    if kinds == ["string"]:
        return text
    value = _json(text)
    if isinstance(value, Malformed) or ("string" in kinds and isinstance(value, str)):
        return text
    return value


def _render_coder(call: Call) -> str:
    lines = [f"<tool_call>\n<function={call.name}>"]
    for name, value in call.arguments.items():
        written = value if isinstance(value, str) else _dumps(value)
        lines.append(f"<parameter={name}>\n{written}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


# ---------------------------------------------------------------- JSON behind a control token

_ENDS = re.compile(r"(<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>|</s>|<\|im_end\|>)\s*\Z")


def _values(text: str, separators: str) -> list[Any]:
    """JSON values one after another; what is none of them is Malformed, and the last."""
    decoder, at = json.JSONDecoder(parse_constant=_refuse), 0
    out: list[Any] = []
    while at < len(text):
        if text[at].isspace() or text[at] in separators:
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*out, Malformed("structure", f"not JSON: {error}"[:300])]
        out.append(value)
    return out


def _parse_llama(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    body = _ENDS.sub("", text).strip()
    marked = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>")
    if not marked and not re.match(r'\{\s*"', body):
        return ()
    return tuple(_call(value, ("parameters", "arguments")) for value in _values(body, ";"))


def _render_llama(call: Call) -> str:
    return _dumps({"name": call.name, "parameters": call.arguments})


_MISTRAL = "[TOOL_CALLS]"


def _parse_mistral(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    out: list[Call | Malformed] = []
    _, *bodies = _ENDS.sub("", text).split(_MISTRAL)
    for body in bodies:
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\])?\s*(?=\{)", body)
        if named:  # from version 11 of the format on
            made = _with_arguments(named[1], body[named.end() :])
            out.append(made._replace(id=named[2] or "") if isinstance(made, Call) else made)
            continue
        value = _json(body)
        listed = value if isinstance(value, list) else [value]
        out += [_call(v) for v in listed]
        if not listed:
            out.append(Malformed("structure", "[TOOL_CALLS] without a call"))
    return tuple(out)


def _render_mistral(call: Call) -> str:
    # A bracket in a string is written as an escape, or a text could begin another call.
    given = {"name": call.name, "arguments": call.arguments}
    body = _dumps(given | ({"id": call.id} if call.id else {}))
    body = body.replace(_MISTRAL, "\\u005bTOOL_CALLS]")
    return f"{_MISTRAL}[{body}]"


def _deepseek(words: str) -> str:
    """A control token of DeepSeek's, written with wide bars and low lines of its own."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END, _SEP = (_deepseek(f"tool {words}") for words in ("call begin", "call end", "sep"))
_DEEPSEEK = re.compile(f"{_BEGIN}(.*?){_SEP}(.*?)({_END}|(?={_BEGIN})|\\Z)", re.DOTALL)
_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)


def _parse_deepseek(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    out: list[Call | Malformed] = []
    for head, body, end in _DEEPSEEK.findall(text):
        if not end:
            out.append(Malformed("structure", f"{_END} is missing"))
            continue
        fenced = _FENCED.fullmatch(body)  # the older form: "function", separator, name, fence
        if head.strip() == "function" and fenced is not None:
            head, body = fenced[1], fenced[2]
        if head.strip():
            out.append(_with_arguments(head.strip(), body))
        else:
            out.append(Malformed("structure", "a call without the name of a tool"))
    if not out and _BEGIN in text:
        out.append(Malformed("structure", f"{_SEP} is missing"))
    return tuple(out)


def _render_deepseek(call: Call) -> str:
    body = _dumps(call.arguments).replace("<", "\\u003c")
    one = f"{_BEGIN}{call.name}{_SEP}{body}{_END}"
    return _deepseek("tool calls begin") + one + _deepseek("tool calls end")


_HARMONY = re.compile(
    r"(?:\A|<\|start\|>|<\|channel\|>)([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(.*?)(<\|call\|>|<\|end\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def _parse_harmony(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    out: list[Call | Malformed] = []
    for head, body, end in _HARMONY.findall(text):
        to = _RECIPIENT.search(head)
        if to is not None:
            cut = Malformed("structure", "<|call|> is missing", to[1])
            out.append(_with_arguments(to[1], body) if end == "<|call|>" else cut)
    if not out and _RECIPIENT.search(text):
        out.append(Malformed("structure", "<|message|> is missing"))
    return tuple(out)


def _render_harmony(call: Call) -> str:
    body = _dumps(call.arguments).replace("<", "\\u003c")
    return (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{body}<|call|>"
    )


# ---------------------------------------------------------------- Python between fences

_TOOL_CODE = re.compile(r"```tool_code\n(.*?)(\n?```|\Z)", re.DOTALL)
_LONGEST = 1 << 16
"""Characters of Python that are parsed at most; the parser's memory grows a hundredfold."""


def _parse_gemma(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
    out: list[Call | Malformed] = []
    for body, end in _TOOL_CODE.findall(text):
        out += _python(body) if end else [Malformed("structure", "``` is missing")]
    return tuple(out)


def _python(body: str) -> list[Call | Malformed]:
    """The calls in lines such as ``name(a=1)`` or ``print(name(a=1))``."""
    if len(body) > _LONGEST:
        return [Malformed("structure", f"longer than {_LONGEST} characters")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Malformed("structure", f"not Python: {error}"[:300])]
    if not statements:
        return [Malformed("structure", "tool_code without a call")]
    return [_python_call(statement) for statement in statements]


def _python_call(statement: ast.stmt) -> Call | Malformed:
    node = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        node = node.args[0] if len(node.args) == 1 and not node.keywords else None
    if not isinstance(node, ast.Call):
        return Malformed("structure", "each line must be one call, name(argument=value)")
    try:
        name = ast.unparse(node.func)
        if node.args or not all(k.arg for k in node.keywords):
            return Malformed("structure", "arguments must be given by name", name)
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        # Sets and bytes are Python, but no arguments; tuples become lists.
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        return Malformed("structure", f"arguments must be JSON values: {error}"[:300])
    return Call(name, arguments)


def _render_gemma(call: Call) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    body = f"{call.name}({inside})".replace("`", "\\x60")  # backquotes stand in strings alone
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
    "gpt_oss": Parser(_parse_harmony, _render_harmony, template=("<|channel|>",)),
}
PARSERS: Mapping[str, Parser] = {n: p._replace(name=n) for n, p in _FAMILIES.items()}
"""The formats by family: Hermes and Qwen 2.5 and 3, Qwen3-Coder, Llama 3, Mistral, Gemma 3,
DeepSeek V3 and R1, gpt-oss."""
