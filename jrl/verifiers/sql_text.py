"""The text of SQL queries: tokens, what is ordered, the last block. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?\*/           # comments
    |'(?:[^']|'')*'                   # text
    |"(?:[^"]|"")*"|`[^`]*`|\[[^\]\n]*\]   # quoted names
    |[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?
    |\w+|<>|!=|<=|>=|\|\||::|[^\s\w]""",
    re.DOTALL | re.VERBOSE,
)
_FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)


def tokens(query: str) -> list[str]:
    """The tokens of a query without comments: words and names in lower case, texts as they are.

    >>> tokens('SELECT "Name" FROM t -- all')
    ['select', 'name', 'from', 't']
    """
    tokens = []
    for token in _TOKEN.findall(query.rstrip().rstrip(";")):
        if token.startswith(("--", "/*")):
            continue
        if token[0] in '"`[' and len(token) > 1:
            token = token[1:-1]
        tokens.append(token if token.startswith("'") else token.lower())
    return tokens


def is_ordered(query: str) -> bool:
    """Whether the result of a query has an order: ORDER BY outside of all parentheses.

    >>> is_ordered("select a from (select a from t order by a)"), is_ordered("select 1 ORDER BY 1")
    (False, True)
    """
    depth = 0
    parts = tokens(query)
    for token, following in zip(parts, [*parts[1:], ""], strict=False):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token == "order" and following == "by":
            return True
    return False


def last_query(text: str) -> str:
    """The last fenced block that is SQL, else the last fenced block, else all of a text."""
    blocks = _FENCE.findall(text)
    of_sql = [body for label, body in blocks if "sql" in label.lower()]
    chosen = of_sql or [body for _, body in blocks] or [text]
    return str(chosen[-1]).strip()


def jaccard(a: Iterable[object], b: Iterable[object]) -> float:
    """The size of two sets' intersection over that of their union; 1 for two empty ones."""
    first, second = set(a), set(b)
    return len(first & second) / len(first | second) if first | second else 1.0


def ngrams(query: str, n: int) -> set[tuple[str, ...]]:
    """The runs of n tokens of a query; the query itself where it has fewer."""
    parts = tokens(query)
    if 0 < len(parts) < n:
        return {tuple(parts)}
    return {tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)}
