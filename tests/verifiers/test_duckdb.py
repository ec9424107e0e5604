"""The reward ``sql`` on DuckDB."""

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.verifiers.sql_engines import DatabaseSpec, opened

pytestmark = pytest.mark.extra("duckdb")
SCRIPT = "CREATE TABLE t (a INTEGER, b DOUBLE); INSERT INTO t VALUES (1, 0.5), (2, 1.5), (3, 2.5);"


def paid(text, answer="SELECT sum(b) FROM t", name="sql", **options):
    prompt = Prompt(5, "?", np.zeros(1, np.int32), answer, {"schema": SCRIPT})
    sample = Sample(prompt, text, np.zeros(1, np.int32), "stop_token")
    return make_reward(name, engine="duckdb", seconds=0.5, **options)([sample])[0]


def test_results_are_compared():
    assert paid("```sql\nFROM t SELECT 4.5\n```", "SELECT sum(b) FROM t LIMIT 1") == 0.0
    assert paid("SELECT 3 * avg(b) FROM t") == 1.0
    assert paid("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t") == 1.0
    assert paid("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t ORDER BY a") == 0.0
    assert paid("SELECT a FROM t WHERE", name="sql_syntax") == 0.0


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE t",
        "ATTACH '/tmp/x.db'",
        "SET enable_external_access = true",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "COPY t TO '/tmp/stolen.csv'",
        "INSTALL httpfs",
        "SELECT 1; DROP TABLE t",
        "SELECT count(*) FROM range(100000000000) a, range(100000000000) b",
    ],
)
def test_queries_that_mean_no_good_are_no_queries(query):
    assert paid(query, name="sql_syntax") == 0.0


def test_a_file_is_read(tmp_path):
    import duckdb

    path = tmp_path / "t.duckdb"
    with duckdb.connect(str(path)) as base:
        base.execute(SCRIPT)
    assert paid("SELECT sum(b) FROM t", database=str(path)) == 1.0
    (tmp_path / "bad").write_text("nothing of the kind" * 999)
    with pytest.raises(UserError, match="is no database for duckdb"):
        paid("SELECT 1", database=str(tmp_path / "bad"))


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("COPY (SELECT 1) TO 'FILE'", "Cannot access file"),
        ("ATTACH 'FILE'", "Cannot access file"),
        ("CREATE TABLE t AS SELECT count(*) c FROM range(100000000000)", "Interrupted"),
    ],
)
def test_statements_of_a_row_have_limits_too(script, problem, tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.verifiers.sql_engines._SCRIPT_SECONDS", 0.5)
    source = DatabaseSpec("duckdb", "", script.replace("FILE", str(tmp_path / "made.db")))
    with pytest.raises(UserError, match=f"is no database for duckdb: .*{problem}"):
        opened(source, 1.0, 10).__enter__()
    assert not (tmp_path / "made.db").exists()
