"""Queries judged by what they give."""

import sqlite3
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.verifiers.sql import same_rows
from jrl.verifiers.sql_engines import DatabaseSpec, opened
from jrl.verifiers.sql_text import is_ordered, jaccard, last_query, ngrams, tokens

SCRIPT = """
CREATE TABLE people (id INTEGER, name TEXT, age INTEGER);
INSERT INTO people VALUES (1, 'Ann', 30), (2, 'Bob', 25), (3, 'Cid', 30);
CREATE TABLE pets (owner INTEGER, kind TEXT);
INSERT INTO pets VALUES (1, 'cat'), (1, 'dog'), (3, 'cat');
"""
GOLD = "SELECT name FROM people WHERE age = 30"


def sample(text, answer=GOLD, **meta):
    prompt = Prompt(5, "?", np.zeros(1, np.int32), answer, {"schema": SCRIPT} | meta)
    return Sample(prompt, text, np.zeros(1, np.int32), "stop_token")


def paid(text, answer=GOLD, name="sql", options=(), **meta):
    return make_reward(name, **dict(options))([sample(text, answer, **meta)])[0]


def test_results_are_compared_and_not_texts():
    assert paid("Thus:\n```sql\nselect p.name from people p where p.age > 29\n```") == 1.0
    assert paid("SELECT name FROM people WHERE age > 29 ORDER BY name DESC") == 1.0
    assert paid("SELECT name FROM people") == 0.0
    assert paid("SELECT DISTINCT kind FROM pets", "SELECT kind FROM pets") == 0.0  # a multiset
    assert paid("SELECT age, name FROM people", "SELECT name, age FROM people") == 0.0
    assert paid("SELEC name", GOLD) == 0.0
    assert paid("") == 0.0


def test_order_counts_where_the_gold_query_has_one():
    gold = "SELECT name FROM people ORDER BY age, name"
    assert paid("SELECT name FROM people ORDER BY age, id", gold) == 1.0
    assert paid("SELECT name FROM people ORDER BY name", gold) == 0.0
    inner = "SELECT name FROM (SELECT * FROM people ORDER BY age)"
    assert paid("SELECT name FROM people", inner) == 1.0


def test_gold_rows_and_columns_of_other_names():
    options = {"rows_column": "rows", "script_column": "db"}
    rows = {"rows": [["Ann"], ["Cid"]], "db": SCRIPT, "schema": ""}
    assert paid(GOLD, "", options=options, **rows) == 1.0
    assert paid("SELECT name FROM people", "", options=options, **rows) == 0.0
    options = {"query_column": "gold"}
    assert paid(GOLD, "", options=options, gold=GOLD) == 1.0


def test_a_file_of_each_row(tmp_path):
    (tmp_path / "pets").mkdir()
    with sqlite3.connect(tmp_path / "pets" / "pets.sqlite") as base:
        base.executescript(SCRIPT)
    base.close()
    options = {"database": str(tmp_path / "{db_id}" / "{db_id}.sqlite")}
    assert paid(GOLD, options=options, db_id="pets") == 1.0
    assert paid("DELETE FROM people", options=options, db_id="pets") == 0.0
    assert paid(GOLD, options=options, db_id="pets") == 1.0
    file = DatabaseSpec("sqlite", str(tmp_path / "pets" / "pets.sqlite"), "")
    with opened(file, 1.0, 9) as base:
        base.connection.set_authorizer(None)  # the file is not to be written without it, either
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            base.connection.execute("DELETE FROM people")
    with pytest.raises(UserError, match="there is no file"):
        paid(GOLD, options=options, db_id="birds")
    with pytest.raises(UserError, match="no column 'db_id'"):
        paid(GOLD, options=options)


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH DATABASE '/tmp/stolen.db' AS x",
        "PRAGMA table_info(people)",
        "SELECT * FROM pragma_table_info('people')",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('x.so')",
        "SELECT readfile('/etc/passwd')",
        "SELECT fts3_tokenizer('simple')",
        "INSERT INTO people VALUES (4, 'Dan', 1)",
        "UPDATE people SET age = 30",
        "DROP TABLE people",
        "CREATE TABLE more (x)",
        "CREATE TEMP TABLE more (x)",
        "VACUUM INTO '/tmp/stolen.db'",
        "BEGIN",
        "SELECT name FROM people WHERE age = 30; DROP TABLE people",
        "SELECT zeroblob(1000000000)",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 900) "
        "SELECT zeroblob(8000000) FROM c",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT '" + "x" * 100_000 + "'",
        "\0SELECT 1",
        "EXPLAIN DELETE FROM people",
    ],
)
def test_queries_that_mean_no_good_are_no_queries(query):
    begin = time.monotonic()
    options = {"seconds": 0.5, "max_rows": 1000}
    assert paid(query, name="sql_syntax", options=options) == 0.0
    assert paid(query, options=options) == 0.0
    assert time.monotonic() - begin < 10


ENDLESS = (
    "CREATE TABLE t AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n;"
)


def test_a_dump_may_end_in_vacuum():
    assert paid(GOLD, schema=f"{SCRIPT}\nVACUUM;\nvacuum") == 1.0
    assert paid(GOLD, schema=f"PRAGMA page_size=65536; {SCRIPT}; VACUUM;") == 1.0


SCRIPTS = {
    "ATTACH DATABASE 'FILE' AS x; CREATE TABLE x.y(b);": "not authorized",
    "VACUUM INTO 'FILE'": "authorization denied",
    "PRAGMA max_page_count = 1000000000": "not authorized",
    "CREATE TEMP TABLE large(x)": "not authorized",
    ENDLESS: "take longer than 0.5 s",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_statements_of_a_row_have_limits_too(script, tmp_path, monkeypatch):
    """They come with the data, and run in the process of training before it begins."""
    monkeypatch.setattr("jrl.verifiers.sql_engines._SCRIPT_SECONDS", 0.5)
    place, begin = tmp_path / "made.db", time.monotonic()
    with pytest.raises(UserError, match=f"is no database for sqlite: .*({SCRIPTS[script]})"):
        paid(GOLD, schema=SCRIPT + script.replace("FILE", str(place)))
    assert not place.exists()
    assert time.monotonic() - begin < 10


def test_reasoning_sql_s_partial_rewards():
    assert paid("SELECT 1", name="sql_syntax") == 1.0
    assert paid("SELECT nothing FROM people", name="sql_syntax") == 0.0
    # {people, name, age} and {people, name}
    assert paid("SELECT name FROM people", name="sql_schema") == pytest.approx(2 / 3)
    assert paid("SELECT name FROM people WHERE", name="sql_schema") == pytest.approx(2 / 3)
    more = "SELECT name, id FROM people WHERE age = 30"  # what the gold query lacks costs, too
    assert paid(more, name="sql_schema") == pytest.approx(3 / 4)
    assert paid("SELECT kind FROM pets", name="sql_schema") == 0.0
    assert paid(GOLD.lower() + ";", name="sql_ngrams") == 1.0
    # of 7 runs of two tokens in the gold query, and 4 in the other, 3 are common
    assert paid("SELECT name FROM people", name="sql_ngrams") == pytest.approx(3 / 7)
    assert paid("SELECT name FROM people", name="sql_ngrams", options={"n": 1}) == pytest.approx(
        4 / 8
    )


def test_texts_of_queries():
    assert tokens("SELECT `A b`, 'It''s' /* no */ FROM [t]") == [
        *("select", "a b", ",", "'It''s'", "from", "t")
    ]
    assert is_ordered("SELECT a FROM t ORDER  BY a")
    assert not is_ordered("SELECT rank() OVER (ORDER BY a) FROM t")
    assert last_query("```sql\na\n```\n```\nb\n```") == "a"
    assert last_query("```\na\n```\n```\nb\n```") == "b"
    assert last_query(" select 1 ") == "select 1"
    assert last_query("```sql\nselect 1") == "select 1"  # cut off
    assert ngrams("select", 2) == {("select",)}
    assert (jaccard([], []), jaccard("ab", "bc")) == (1.0, pytest.approx(1 / 3))


def test_how_values_are_compared():
    assert same_rows([(1, None, "a"), (2, 0.5, b"b")], [(2, 0.5, b"b"), (1.0, None, "a")], False)
    assert same_rows([(0.1 + 0.2,)], [(0.3,)], False)  # another order of a sum
    assert not same_rows([(2**60,)], [(2**60 + 1,)], False)
    assert not same_rows([(1,), (1,), (2,)], [(1,), (2,), (2,)], False)
    assert not same_rows([("1",)], [(1,)], False)
    assert not same_rows([(1,), (2,)], [(2,), (1,)], True)


def test_mistakes_are_named():
    with pytest.raises(
        UserError, match="gold query of row 6, 'SELECT x FROM people', fails: no such"
    ):
        paid("x", "SELECT x FROM people")
    with pytest.raises(UserError, match="row 6 has no gold query"):
        paid("x", "")
    with pytest.raises(UserError, match="row 6 has no database"):
        paid("x", schema="")
    with pytest.raises(UserError, match="is no database for sqlite"):
        paid("x", schema="CREATE TABLE")
    for options, match in (
        ({"engine": "sqlit"}, "sqlite"),
        ({"seconds": 0.0}, "must be above 0"),
    ):
        with pytest.raises(UserError, match=match):
            make_reward("sql", **options)
    with pytest.raises(UserError, match="at least one token"):
        make_reward("sql_ngrams", n=0)


def test_a_database_that_cannot_be_filled_is_closed(monkeypatch):
    opened_ones, connect = [], sqlite3.connect

    def recorded(*arguments, **options):
        opened_ones.append(connect(*arguments, **options))
        return opened_ones[-1]

    monkeypatch.setattr(sqlite3, "connect", recorded)
    with pytest.raises(UserError, match="is no database for sqlite"):
        paid("x", schema="CREATE TABLE")
    assert opened_ones
    for connection in opened_ones:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
