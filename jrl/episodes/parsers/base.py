"""Records of tool calls, and the parser of a family of formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


_ADDRESS = re.compile(r"<[^<>\n]{1,200} at 0x[0-9a-fA-F]+>")


def without_addresses(text: str) -> str:
    """A text without the memory addresses of Python objects, which differ in runs of one seed.

    >>> without_addresses("malformed node: <ast.Name object at 0x7f03a1>")
    'malformed node: an expression'
    """
    return _ADDRESS.sub("an expression", text)


def malformed(reason: str, name: str = "") -> Malformed:
    """A broken call."""
    return Malformed("structure", without_addresses(reason)[:300], name)


class Part(NamedTuple):
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


Scan = Callable[[str, Schemas], Iterator[Part]]
"""(text, schemas) -> the calls in it, in order, those in thoughts included."""
THOUGHT_END = re.compile(r"</think>|\[/THINK\]")
_BEGINS_WITH_THOUGHT = re.compile(r"\s*(?:<think>|\[THINK\])")


def _parts(text: str, parts: Iterable[Part]) -> list[Part]:
    """The calls outside of thoughts; a mark beside calls that begins nothing is a word."""
    calls, last = list(parts), 0
    for match in THOUGHT_END.finditer(text):
        end = match.start()
        if any(x.begin <= end < x.end for x in calls):
            continue  # one inside a call is text
        begin = text.rfind(match[0].replace("/", ""), last, end)  # < 0: the template has opened it
        if begin < 0 < last:
            continue  # a thought has ended before, and none began since: a word
        calls = [x for x in calls if not begin <= x.begin < end]
        last = match.end()
    if not last and _BEGINS_WITH_THOUGHT.match(text):
        return []  # the turn ended in its thought
    some = any(isinstance(x.call, Call) for x in calls)
    return [x for x in calls if not (some and x.bare)]


def family(name: str, scan: Scan, render: Callable[[Call], str], **more: Any) -> Parser:
    """The parser of a family whose calls ``scan`` reads; see ``Parser`` for the rest."""

    def parse(text: str, schemas: Schemas) -> tuple[Call | Malformed, ...]:
        return tuple(part.call for part in _parts(text, scan(text, schemas)))

    def begin(text: str, schemas: Schemas) -> int:
        return next((part.begin for part in _parts(text, scan(text, schemas))), len(text))

    return Parser(parse, render, begin=begin, name=name, **more)
