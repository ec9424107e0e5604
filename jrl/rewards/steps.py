"""Steps of a text: what judges say wrong or right of, one by one. Imports no JAX."""

from __future__ import annotations

import itertools
import re

_BREAK = re.compile(r"\n[^\S\n]*\n\s*")


def steps_of(text: str) -> list[tuple[int, int]]:
    r"""(begin, end) of each step, characters: paragraphs, which blank lines end.

    Every character from the first step's on belongs to one step; blank lines to that before them.

    >>> steps_of("a = 1\n\nb = 2\nc\n \n\nd")
    [(0, 7), (7, 18), (18, 19)]
    >>> steps_of("\n\n"), steps_of("one")
    ([], [(0, 3)])
    """
    begin = len(text) - len(text.lstrip())
    ends = [m.end() for m in _BREAK.finditer(text, begin) if m.end() < len(text)]
    places = [begin, *ends, len(text)]
    return [(a, b) for a, b in itertools.pairwise(places) if text[a:b].strip()]


def numbered_steps(text: str, first: int = 1) -> str:
    r"""The steps with their numbers, as a judge reads them.

    >>> numbered_steps("a\n\nb")
    '[step 1]\na\n\n[step 2]\nb'
    """
    parts = [text[a:b].strip() for a, b in steps_of(text)]
    return "\n\n".join(f"[step {i}]\n{part}" for i, part in enumerate(parts, first))
