"""Tools in words, for models whose chat template has no place for them, or that have none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.episodes.parsers import PARSERS, Call


class Description(NamedTuple):
    """The policy's description of its tools.

    Attributes:
      head: before the schemas.
      schemas: JSON, a tool a line. The tools' authors wrote it, so it is text from outside.
      tail: how a call is written, in the family's own control tokens.
    """

    head: str
    schemas: str
    tail: str

    @property
    def text(self) -> str:
        """All of it."""
        return self.head + self.schemas + self.tail


def describe(tools: Sequence[Mapping[str, Any]], family: str) -> Description:
    """The tools of an environment, and how models of a family call them.

    The example of a call is what the family's parser itself writes, so that what the policy is
    told to write is what is read.

    Args:
      tools: as OpenAI's API writes them.
      family: of ``PARSERS``.

    >>> print(describe([], "gemma").tail)
    <BLANKLINE>
    To call one, write its name and arguments like this, and stop:
    ```tool_code
    NAME(ARGUMENT='VALUE')
    ```
    """
    parser = PARSERS[family]
    begin, end = parser.list_tags
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = parser.render(Call("NAME", {"ARGUMENT": "VALUE"}))
    return Description(
        f"You may call these functions, described as JSON:\n{begin}",
        lines,
        f"{end}\nTo call one, write its name and arguments like this, and stop:\n{example}",
    )
