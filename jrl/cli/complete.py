"""The shell's completion of methods, configuration keys and their values."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from jrl.config import describe


def complete_method(incomplete: str) -> list[str]:
    """Methods of the library that begin so.

    Their names are read from the sources: importing them takes JAX, and so a second a key press.
    """
    names: list[str] = []
    library = Path(__file__).parents[1]
    for folder in (library / "methods", library / "zoo" / "methods"):
        for path in folder.glob("*.py"):
            names += _DECORATED.findall(path.read_text(encoding="utf-8"))
    return sorted(name for name in names if name.startswith(incomplete))


_DECORATED = re.compile(r"^@(?:published|variant\([^@]*?\))\ndef (\w+)", re.MULTILINE)


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Configuration keys that begin so, or values of the key before the equals sign."""
    # bash takes "method=gr" for three words, of which the last is to be completed
    words = [ctx.params.get("config") or "", *(ctx.params.get("overrides") or ())]
    if not incomplete and (values := _values(words[-1], "")):
        return values
    if words[-1] == "=":
        return _values(words[-2], incomplete)
    key, equals, begun = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values(key, begun)]
    return [f"{each.name}=" for each in describe() if each.name.startswith(incomplete)]


def _values(key: str, prefix: str) -> list[str]:
    """Values of a key that begin so, where they are a closed set."""
    if key == "method":
        return complete_method(prefix)
    kinds = {each.name: each.kind for each in describe()}
    choices = {"true or false": "true | false"}.get(kinds.get(key, ""), kinds.get(key, ""))
    values = choices.split(" | ") if " | " in choices else []
    return [value for value in values if value.startswith(prefix)]
