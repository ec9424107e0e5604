"""Docstrings and the pages of the checkout as the Markdown that the site renders."""

from __future__ import annotations

import re
import textwrap

COMMANDS = (
    r"(?:\S*/)?(?:jrl|pip|make|python3?|jupyter|pre-commit|git|cd|export)\b|\.ci/run|\S+\.sh\b"
)
LANGUAGES = (
    ("bash", rf"(?:[A-Z_]+=\S+ )*(?:{COMMANDS})"),
    ("toml", r"\[[\w.\"-]+\]|[\w.]+ = "),
    ("json", r"\{\""),
    ("python", r"(?:import|from|def|async def|class) |@\w+|\w+\(|\w+, \w+ = \w+"),
)
"""Language -> how the first line of an indented block begins that is in it."""
CODE = re.compile(r"(`+)(.+?)\1", flags=re.DOTALL)


def as_markdown(docstring: str) -> str:
    """A docstring whose formulas, doctests and brackets Markdown shows as they are written.

    Indented blocks and doctests become fenced ones; outside of code the characters that Markdown
    reads as its own are escaped. Sections such as ``Args:`` stay for the docstring parser.
    """
    lines, out, blank = docstring.split("\n"), [], True
    i = 0
    while i < len(lines):
        line = lines[i]
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith(">>> "):
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            out += fenced(lines[i:end], "pycon", indent)
            i = end
        elif blank and line.strip() and indent >= 4:
            end = end_of_block(lines, i, 4)
            kind = language_of(line)  # "r_t = a formula" looks like TOML
            out += fenced(lines[i:end], "text" if kind == "toml" else kind, 0)
            i = end
        else:
            start = i  # a paragraph at once, since code in it may run over a line's end
            while i < len(lines) and lines[i].strip() and not lines[i].lstrip().startswith(">>> "):
                i += 1
            i = max(i, start + 1)
            out += escaped("\n".join(lines[start:i])).split("\n")
        blank = not out[-1].strip()
    return "\n".join(out)


def end_of_block(lines: list[str], start: int, indent: int) -> int:
    """The line behind an indented block, blank lines inside it included."""
    end = start
    for i in range(start, len(lines)):
        if not lines[i].strip():
            continue
        if len(lines[i]) - len(lines[i].lstrip()) < indent:
            break
        end = i
    return end + 1


def fenced(lines: list[str], language: str, indent: int) -> list[str]:
    """Lines as a fenced block at an indentation, their own common indentation taken off."""
    body = textwrap.dedent("\n".join(lines)).split("\n")
    return [" " * indent + line for line in (f"```{language}", *body, "```", "")]


def language_of(line: str) -> str:
    """The language of an indented block, by its first line; text when in doubt."""
    return next((name for name, how in LANGUAGES if re.match(how, line.strip())), "text")


def escaped(text: str) -> str:
    """Prose whose brackets, stars and angles are characters; code in it stays as it is."""
    pieces, at = [], 0
    for code in CODE.finditer(text):
        pieces += [plain(text[at : code.start()]), f"`{code[2]}`"]
        at = code.end()
    return "".join([*pieces, plain(text[at:])])


def plain(text: str) -> str:
    """Text without a backquote, escaped."""
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    # the stars of an argument in a section of arguments are its name's
    return re.sub(r"(?m)^ +\*\*?\w+: |[\[\]*]", keep_argument, text)


def keep_argument(match: re.Match[str]) -> str:
    """The name of a starred argument as it is, any other character escaped."""
    return match[0] if match[0].startswith(" ") else f"\\{match[0]}"


def with_languages(page: str) -> str:
    """A page whose indented blocks are fenced, each in its language, so that it has colours."""
    lines, out, blank, inside = page.split("\n"), [], True, False
    i = 0
    while i < len(lines):
        line = lines[i]
        inside ^= line.startswith("```")
        if not inside and blank and line.startswith("    ") and not in_list(out):
            end = end_of_block(lines, i, 4)
            out += fenced(lines[i:end], language_of(line), 0)
            i = end
        else:
            out.append(line)
            i += 1
        blank = not out[-1].strip()
    return "\n".join(out)


def in_list(lines: list[str]) -> bool:
    """Whether an indented block behind these lines belongs to the last item of a list."""
    for line in reversed(lines):
        if line.strip() and not line.startswith(" "):
            return bool(re.match(r"[-*] |\d+\. ", line))
    return False


def cell(text: str) -> str:
    """Text inside a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
