"""Databases that one query may read and nothing may write: SQLite, and DuckDB. Imports no JAX."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jrl.errors import UserError
from jrl.system.extras import need

ResultRows = list[tuple[Any, ...]]
ENGINES = ("sqlite", "duckdb")
_STEPS = 1000
_LONGEST_VALUE = 8 << 20
_LONGEST_QUERY = 1 << 16
_LARGEST_RESULT = 64 << 20
_AT_ONCE = 8
"""Rows fetched before their size is looked at."""
_SCRIPT_SECONDS = 10.0
_VACUUM = re.compile(r"(?:^|(?<=;))\s*VACUUM\s*(?:;|\Z)", re.IGNORECASE | re.MULTILINE)
_MOST_PAGES = 1 << 18
"""Of 4 KiB, in a database that a script fills."""
_SIZES = ("page_size", "temp_store")
"""Pragmas of a script that do nothing; dumps have the first."""


class QueryError(Exception):
    """A query that cannot be run, or is beyond a limit."""


class DatabaseSpec(NamedTuple):
    """A database.

    Attributes:
      engine: "sqlite" or "duckdb".
      path: its file; "" for one in memory.
      script: statements that fill one in memory.
    """

    engine: str
    path: str
    script: str


class Database(Protocol):
    """An open database."""

    def run(self, query: str) -> ResultRows:
        """The rows of a query; QueryError where there are none to be had."""

    def names(self) -> set[str]:
        """Its tables and columns, in lower case."""


@contextlib.contextmanager
def opened(source: DatabaseSpec, seconds: float, max_rows: int) -> Iterator[Database]:
    """Opens a database to read.

    Args:
      source: which.
      seconds: of one query.
      max_rows: of its result; more are a QueryError.

    Raises:
      UserError: there is no such database, or its script fails.
    """
    if source.path and not Path(source.path).is_file():
        raise UserError(f"rewards.sql.database: there is no file {source.path}")
    engine = _Sqlite if source.engine == "sqlite" else _Duckdb
    database = engine(source, seconds, max_rows)
    try:
        yield database
    finally:
        database.connection.close()


def _bad_script(source: DatabaseSpec, error: Exception) -> UserError:
    database = source.path or f"the script {source.script[:60]!r}"
    return UserError(f"rewards.sql: {database} is no database for {source.engine}: {error}")


def _bounded(cursor: Any, most: int) -> ResultRows:
    """The rows of a result, one more than ``most`` where there are more.

    Raises:
      QueryError: they are too large together.
    """
    rows: ResultRows = []
    size = 0
    while len(rows) <= most and (some := cursor.fetchmany(min(_AT_ONCE, most + 1 - len(rows)))):
        rows += some
        size += sum(len(x) for row in some for x in row if isinstance(x, str | bytes))
        if size > _LARGEST_RESULT:
            raise QueryError(f"a result of more than {_LARGEST_RESULT >> 20} MiB")
    return rows


class _Sqlite:
    """A connection that reads: no ATTACH, PRAGMA, extension, nor anything that writes."""

    _ALLOWED = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE))
    _FUNCTIONS = frozenset(("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"))

    def __init__(self, source: DatabaseSpec, seconds: float, max_rows: int) -> None:
        self._seconds, self._max_rows = seconds, max_rows
        where = Path(source.path).resolve().as_uri() if source.path else ""
        try:
            self.connection = sqlite3.connect(
                f"{where}?mode=ro&immutable=1" if where else ":memory:", uri=bool(where)
            )
        except sqlite3.Error as error:
            raise _bad_script(source, error) from None
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        try:
            if not where:
                self._fill(source.script)
            self._names = self._read_names()
        except sqlite3.Error as error:
            self.connection.close()  # nobody else will: Python 3.13 warns of it
            raise _bad_script(source, error) from None
        self.connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        self.connection.set_authorizer(self._authorize)

    def _fill(self, script: str) -> None:
        """Runs the statements of a row, which come with the data, without files and within limits.

        Raises:
          sqlite3.Error: a statement fails, or takes too long.
        """
        end = time.monotonic() + _SCRIPT_SECONDS
        self.connection.execute(f"PRAGMA max_page_count = {_MOST_PAGES}")
        self.connection.execute("PRAGMA temp_store = MEMORY")
        self.connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
        self.connection.set_authorizer(self._authorize_script)
        try:
            # Nothing in memory, and an ATTACH of SQLite's own, which is refused.
            self.connection.executescript(_VACUUM.sub("", script))
        except sqlite3.OperationalError as error:
            if time.monotonic() > end:
                problem = f"its statements take longer than {_SCRIPT_SECONDS:g} s"
                raise sqlite3.OperationalError(problem) from error
            raise
        finally:
            self.connection.set_authorizer(None)
            self.connection.set_progress_handler(None, 0)

    def _authorize_script(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        attaches = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
        calls = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in self._FUNCTIONS
        pragma = str(first).lower() if action == sqlite3.SQLITE_PRAGMA else ""
        # A temporary table has no limit of pages.
        temporary = action == sqlite3.SQLITE_CREATE_TEMP_TABLE
        if attaches or calls or temporary or pragma == "max_page_count":
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_IGNORE if pragma in _SIZES and second else sqlite3.SQLITE_OK

    def _read_names(self) -> set[str]:
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        tables = [name for (name,) in self.connection.execute(query)]
        names = {name.lower() for name in tables}
        for table in tables:
            columns = self.connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
            names |= {str(name).lower() for (name,) in columns}
        return names

    def _authorize(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        reads = action in self._ALLOWED
        calls = action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in self._FUNCTIONS
        # table-valued functions such as pragma_table_info read what PRAGMA does
        pragma = str(first).lower().startswith("pragma_")
        return sqlite3.SQLITE_OK if (reads and not pragma) or calls else sqlite3.SQLITE_DENY

    def names(self) -> set[str]:
        return self._names

    def run(self, query: str) -> ResultRows:
        if len(query) > _LONGEST_QUERY:
            raise QueryError(f"a query of {len(query)} characters")
        end = time.monotonic() + self._seconds
        self.connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
        try:
            cursor = self.connection.execute(query)
            rows = _bounded(cursor, self._max_rows)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, MemoryError, ValueError) as error:
            raise QueryError(str(error)) from None
        finally:
            self.connection.set_progress_handler(None, 0)
        if cursor.description is None:
            raise QueryError("it gives no rows")
        if len(rows) > self._max_rows:
            raise QueryError(f"more than {self._max_rows} rows")
        return rows


class _Duckdb:
    """A connection without access to files, whose one statement is a SELECT."""

    def __init__(self, source: DatabaseSpec, seconds: float, max_rows: int) -> None:
        self._seconds, self._max_rows = seconds, max_rows
        self._duckdb = need("duckdb", "duckdb", 'rewards.sql.engine = "duckdb"')
        limits: dict[str, Any] = {"threads": 1, "memory_limit": "512MB"}
        if not source.path:  # its statements come with the data
            limits["enable_external_access"] = False
        try:
            self.connection = self._duckdb.connect(
                source.path or ":memory:", read_only=bool(source.path), config=limits
            )
            if source.script:
                with self._interrupted(_SCRIPT_SECONDS):
                    self.connection.execute(source.script)
            query = "SELECT table_name, column_name FROM information_schema.columns"
            rows = self.connection.execute(query).fetchall()
            self.connection.execute("SET enable_external_access = false")
            self.connection.execute("SET lock_configuration = true")
        except self._duckdb.Error as error:
            raise _bad_script(source, error) from None
        self._names = {str(name).lower() for row in rows for name in row}

    @contextlib.contextmanager
    def _interrupted(self, seconds: float) -> Iterator[None]:
        """Ends what the connection does in it after some seconds."""
        timer = threading.Timer(seconds, self.connection.interrupt)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def names(self) -> set[str]:
        return self._names

    def run(self, query: str) -> ResultRows:
        if len(query) > _LONGEST_QUERY:
            raise QueryError(f"a query of {len(query)} characters")
        try:
            statements = self.connection.extract_statements(query)
            kinds = [statement.type for statement in statements]
            if kinds != [self._duckdb.StatementType.SELECT]:
                raise QueryError("it is not one SELECT")
            with self._interrupted(self._seconds):
                rows = _bounded(self.connection.execute(statements[0]), self._max_rows)
        except (self._duckdb.Error, RuntimeError, MemoryError) as error:
            raise QueryError(str(error)) from None
        if len(rows) > self._max_rows:
            raise QueryError(f"more than {self._max_rows} rows")
        return list(rows)
