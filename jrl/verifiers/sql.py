"""Queries by what they give: the reward ``sql``, and Reasoning-SQL's partial rewards.

"Reasoning-SQL: Reinforcement Learning with SQL Tailored Partial Rewards" (arXiv:2503.23157) adds
execution accuracy, a judge, syntax check, schema linking and n-gram similarity; each but the judge
is a function here, and ``[rewards]`` has the weights and may have a judge. The last two are Jaccard
similarities with the gold query. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample, defaults_of, options_of
from jrl.verifiers.references import Reference
from jrl.verifiers.sql_engines import (
    ENGINES,
    Database,
    DatabaseSpec,
    QueryError,
    ResultRows,
    opened,
)
from jrl.verifiers.sql_text import is_ordered, jaccard, last_query, ngrams, tokens

if TYPE_CHECKING:
    from jrl.types import Prompt

_GOLD = ("query", "sql", "SQL", "gold_sql", "answer")
_SCRIPTS = ("schema", "context", "sql_context")
_SHOWN = 100


class _Task(NamedTuple):
    """A row's database, gold query or "", and expected rows or None."""

    source: DatabaseSpec
    query: str
    rows: ResultRows | None


def sql(
    samples: list[Sample],
    database: str = "",
    script_column: str = "",
    query_column: str = "",
    rows_column: str = "",
    engine: str = "sqlite",
    seconds: float = 5.0,
    max_rows: int = 100_000,
    check_rows: int = 64,
) -> list[float]:
    """Execution accuracy: 1 where the query gives the rows of the gold query, else 0.

    The query is the last fenced block of SQL, or all of the completion. It is run on a connection
    that can only read. Rows are compared as a multiset, in their order where the gold query has an
    ORDER BY outside of parentheses; numbers agree in nine digits.

    Args:
      samples: what to judge.
      database: the file, with columns of the row in braces: "DIR/{db_id}/{db_id}.sqlite" is the
        layout of Spider and BIRD; "" where rows bring a script.
      script_column: of the statements that make the row's database in memory; "" for the first of
        ``schema``, ``context`` and ``sql_context`` that is there.
      query_column: of the gold query; "" for ``query``, ``sql``, ``SQL``, ``gold_sql`` or the
        answer.
      rows_column: of the expected rows, a list of lists, in the place of a gold query.
      engine: "sqlite", or "duckdb" with the extra.
      seconds: of one query.
      max_rows: of a result.
      check_rows: of each file, rows whose gold query is run before training begins, so that those
        where it fails, or gives other rows than ``rows_column`` has, are named; 0 for none.

    Raises:
      UserError: a row without a database or a gold query, or whose gold query fails.
    """
    find = _finder(
        *(database, script_column, engine, seconds, max_rows),
        query_column=query_column,
        rows_column=rows_column,
    )
    if check_rows < 0:  # what it is for is in ``reference``
        raise UserError(f"rewards.sql.check_rows = {check_rows}: give 0 for none, or a number")
    points = []
    for sample in samples:
        task = find(sample)
        gold = _gold_rows(task, seconds, max_rows, sample)
        with opened(task.source, seconds, max_rows) as base:
            rows = _tried(base, last_query(sample.completion))
        points.append(float(rows is not None and same_rows(rows, gold, is_ordered(task.query))))
    return points


@options_of(sql, "query_column", "rows_column", "check_rows")
def sql_syntax(samples: list[Sample], **options: Any) -> list[float]:
    """Reasoning-SQL's syntax check: 1 where the query runs without an error, else 0.

    Arguments are those of ``sql``.
    """
    find = _finder(**options, gold=False)
    points = []
    for sample in samples:
        with opened(find(sample).source, options["seconds"], options["max_rows"]) as base:
            points.append(float(_tried(base, last_query(sample.completion)) is not None))
    return points


@options_of(sql, "rows_column", "seconds", "max_rows", "check_rows")
def sql_schema(samples: list[Sample], **options: Any) -> list[float]:
    """Reasoning-SQL's schema linking: the Jaccard similarity of the tables and columns used.

    Those of a query are the names of the database's tables and columns among its tokens, so that
    one that does not run has some, too. The paper does not say how it reads them from a query.

    Arguments are those of ``sql``.
    """
    find = _finder(**options, seconds=1.0, max_rows=1)
    points = []
    for sample in samples:
        task = find(sample)
        with opened(task.source, 1.0, 1) as base:
            names = base.names()
        used = (set(tokens(text)) & names for text in (last_query(sample.completion), task.query))
        points.append(jaccard(*used))
    return points


def sql_ngrams(samples: list[Sample], query_column: str = "", n: int = 2) -> list[float]:
    """Reasoning-SQL's n-gram similarity: the Jaccard similarity of the queries' runs of n tokens.

    Tokens are those of SQL, in lower case but for texts. n = 2 is what reimplementations use; the
    paper's could not be checked.

    Args:
      samples: what to judge.
      query_column: of the gold query, as for ``sql``.
      n: tokens in a run.
    """
    if n < 1:
        raise UserError(f"rewards.sql_ngrams.n = {n}: a run has at least one token")
    points = []
    for sample in samples:
        gold = _gold_query(sample, query_column)
        points.append(jaccard(ngrams(last_query(sample.completion), n), ngrams(gold, n)))
    return points


def reference(prompt: Prompt, where: str, options: Mapping[str, Any]) -> Reference:
    """The row's gold query on its database.

    Args:
      prompt: of the row.
      where: which row it is, for messages.
      options: of ``sql``.
    """
    chosen = {**defaults_of(sql), **options}
    chosen.pop("check_rows")
    seconds, max_rows = chosen["seconds"], chosen["max_rows"]
    sample = Sample(prompt, "", np.zeros(0, np.int32), "stop_token")

    def complaint() -> str:
        task = _finder(**chosen)(sample)
        if task.rows is None:
            _gold_rows(task, seconds, max_rows, sample)
            return ""
        if not (query := _gold_query(sample, chosen["query_column"], needed=False)):
            return ""
        rows = _gold_rows(task._replace(query=query, rows=None), seconds, max_rows, sample)
        if same_rows(rows, task.rows, is_ordered(query)):
            return ""
        return f"the gold query gives {str(rows)[:_SHOWN]}, not {str(task.rows)[:_SHOWN]}"

    file = ""
    with contextlib.suppress(KeyError, IndexError, ValueError, OSError):
        status = os.stat(chosen["database"].format(**prompt.meta))
        file = f"{status.st_size} {status.st_mtime_ns}"
    content = repr(("sql", chosen, dict(prompt.meta), prompt.answer, file))
    return Reference(where, content, complaint)


# ---------------------------------------------------------------- comparing


def same_rows(rows: ResultRows, gold: ResultRows, ordered: bool) -> bool:
    """Whether two results are equal, in their order or as multisets.

    >>> same_rows([(1, 0.1 + 0.2)], [(1.0, 0.3)], ordered=True)
    True
    """
    if len(rows) != len(gold):
        return False
    mine, theirs = ([tuple(map(_plain, row)) for row in each] for each in (rows, gold))
    return mine == theirs if ordered else Counter(mine) == Counter(theirs)


def _plain(value: Any) -> Any:
    """A value that can be compared: whole numbers are exact, others have nine digits."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple(sorted((str(key), repr(_plain(x))) for key, x in value.items()))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str | bytes | int):
            rounded = float(f"{float(value):.9g}")
            return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
    return value if isinstance(value, str | bytes | int) else str(value)


# ---------------------------------------------------------------- rows of the data


def _finder(
    database: str,
    script_column: str,
    engine: str,
    seconds: float,
    max_rows: int,
    *,
    query_column: str = "",
    rows_column: str = "",
    gold: bool = True,
) -> Any:
    """A function of a sample that returns its ``_Task``."""
    if engine not in ENGINES:
        raise unknown_choice("rewards.sql.engine", engine, ENGINES)
    if not seconds > 0 or max_rows < 1:
        raise UserError(
            f"rewards.sql: seconds = {seconds} and max_rows = {max_rows} must be above 0"
        )

    def find(sample: Sample) -> _Task:
        source = _source(sample, database, script_column, engine)
        if not gold:
            return _Task(source, "", None)
        rows = sample.prompt.meta.get(rows_column) if rows_column else None
        if rows is not None:
            return _Task(source, "", [tuple(row) for row in rows])
        return _Task(source, _gold_query(sample, query_column), None)

    return find


def _source(sample: Sample, database: str, script_column: str, engine: str) -> DatabaseSpec:
    meta: Mapping[str, Any] = sample.prompt.meta
    if database:
        try:
            return DatabaseSpec(engine, database.format(**meta), "")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"rewards.sql.database = {database!r}: row {sample.prompt.id + 1} has no column"
                f" {error}; columns are {', '.join(map(str, meta)) or 'none'}"
            ) from None
    names = [script_column] if script_column else list(_SCRIPTS)
    script = next((meta[name] for name in names if meta.get(name)), None)
    if not isinstance(script, str):
        raise UserError(
            f"rewards.sql: row {sample.prompt.id + 1} has no database: give rewards.sql.database, a"
            f" file with columns in braces, or statements in {', '.join(names)}"
        )
    return DatabaseSpec(engine, "", script)


def _gold_query(sample: Sample, column: str, *, needed: bool = True) -> str:
    columns = {**sample.prompt.meta, "answer": sample.prompt.answer}
    names = [column] if column else list(_GOLD)
    query = next((columns[name] for name in names if columns.get(name)), None)
    if not isinstance(query, str) and not needed:
        return ""
    if not isinstance(query, str):
        raise UserError(
            f"rewards.sql: row {sample.prompt.id + 1} has no gold query in {', '.join(names)}; name"
            " the column with query_column, or give rows_column"
        )
    return query


def _gold_rows(task: _Task, seconds: float, max_rows: int, sample: Sample) -> ResultRows:
    if task.rows is not None:
        return task.rows
    try:
        return _run_gold(task.source, task.query, seconds, max_rows)
    except QueryError as error:
        raise UserError(
            f"rewards.sql: the gold query of row {sample.prompt.id + 1}, {task.query[:_SHOWN]!r},"
            f" fails: {error}; repair the row, leave it out, or raise seconds"
        ) from None


@functools.lru_cache(64)
def _run_gold(source: DatabaseSpec, query: str, seconds: float, max_rows: int) -> ResultRows:
    """The members of a group ask for the same one after another."""
    with opened(source, seconds, max_rows) as base:
        return base.run(query)


def _tried(base: Database, query: str) -> ResultRows | None:
    """The rows of a query, or None where it cannot be run."""
    try:
        return base.run(query)
    except QueryError:
        return None
