"""The table of the tests of each extra: complete, and the only way to leave a test out."""

import ast
import importlib.util
import re
import subprocess
import tomllib
import types
from pathlib import Path

import needs_extra
import pytest

TESTS = Path(__file__).parent
TABLE = tomllib.loads((TESTS / "extras.toml").read_text())
FILES = sorted(path for path in TESTS.rglob("*.py") if "__pycache__" not in path.parts)


def files_of(entry):
    """The files of an extra, also where only a test of one is named."""
    names = (name for key in ("tests", "marked", "long") for name in entry.get(key, ()))
    return {name.partition("::")[0] for name in names}


def marks(tree):
    """The extras that a module names in marks and ``require``, each with the packages named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "pytest.mark.extra",
            "require",
        ):
            yield [ast.literal_eval(arg) for arg in node.args if isinstance(arg, ast.Constant)]


def test_every_extra_has_tests_that_exist():
    assert set(TABLE) == set(needs_extra.declared())
    for extra, entry in TABLE.items():
        assert set(entry) <= {"tests", "marked", "long", "tools"}, extra
        assert "long" not in entry or extra in needs_extra.within("dev"), extra
        assert entry["tests"], extra
        for name in (*entry["tests"], *files_of(entry)):
            file, _, test = name.partition("::")
            assert (TESTS.parent / file).is_file(), name
            assert not test or f"def {test}(" in (TESTS.parent / file).read_text(), name


def test_no_module_asks_for_more_than_the_extra_that_runs_its_tests():
    """A module whose ``require`` is not met is skipped whole: nothing of it would run."""
    for extra, entry in TABLE.items():
        for name in (*entry["tests"], *entry.get("marked", ())):
            tree = ast.parse((TESTS.parent / name.partition("::")[0]).read_text())
            calls = [node.value for node in tree.body if isinstance(node, ast.Expr)]
            for call in calls:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "require":
                    required, *packages = map(ast.literal_eval, call.args)
                    met = required in needs_extra.within(extra)
                    tools = set(entry.get("tools", ()))
                    assert met or (packages and set(packages) <= tools), (extra, name, required)


def test_every_mark_stands_in_the_table():
    marks_used = set()
    for path in FILES:
        name = path.relative_to(TESTS.parent).as_posix()
        for extra, *packages in marks(ast.parse(path.read_text())):
            assert extra in TABLE, f"{path}: no extra is called {extra}"
            if path.name == "tpu_programs.py":  # a mark that other files use
                continue
            tools = [e["tools"] for e in TABLE.values() if name in files_of(e) and "tools" in e]
            if packages and any(set(packages) <= set(some) for some in tools):
                continue  # a client that another extra's tests speak with
            assert name in files_of(TABLE[extra]), f"{name} is missing in [{extra}]"
            marks_used.add(extra)
        if "needs_libtpu" in path.read_text() and path.name != "tpu_programs.py":
            name = path.relative_to(TESTS.parent).as_posix()
            assert name in files_of(TABLE["plan"]) or path == Path(__file__), name
    assert len(marks_used) > 12


def test_no_other_skip_is_for_want_of_a_package():
    """``importorskip`` and ``find_spec`` hide dead code where nothing installs the package."""
    other = re.compile(r"importorskip|(skipif|skip)\([^)]*(find_spec|not installed|is_available)")
    for path in FILES:
        if path != Path(__file__):
            match = other.search(path.read_text())
            assert not match, f"{path}: {match[0]}; use pytest.mark.extra"


def test_a_missing_extra_skips_and_a_promised_one_fails(monkeypatch):
    monkeypatch.setitem(needs_extra.declared(), "games", ["no-such-package>=1", "numpy"])
    needs_extra.lacks.cache_clear()
    try:
        with pytest.raises(pytest.skip.Exception, match=r"extra games \(no-such-package\): make"):
            needs_extra.require("games")
        needs_extra.require("games", "numpy")  # that package alone
        monkeypatch.setenv(needs_extra.VARIABLE, "games,math")
        with pytest.raises(pytest.fail.Exception, match="needs the extra games"):
            needs_extra.require("games")
    finally:
        needs_extra.lacks.cache_clear()


def test_what_dev_includes_is_promised_with_it(monkeypatch):
    monkeypatch.setenv(needs_extra.VARIABLE, "dev")
    assert {"dev", "math", "serve", "textarena"} <= needs_extra.promised()
    assert "games" not in needs_extra.promised()


@pytest.fixture
def script(monkeypatch, tmp_path):
    """``.ci/extras.py`` with a pip that says what a test has it say."""
    spec = importlib.util.spec_from_file_location("extras_script", TESTS.parent / ".ci/extras.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "environment", lambda base, where: where / "python")
    return module


@pytest.mark.parametrize(
    ("extra", "code", "message", "failed", "note"),
    [
        ("mcp", 0, "WARNING: jrl-lm 0.1.0 does not provide the extra 'mcp'", 1, "no such extra"),
        ("mcp", 1, "ERROR: No matching distribution found for mcp", 1, "cannot be installed: ERR"),
        ("cuda12", 1, "ERROR: No matching distribution found for x", 0, "not installable here: E"),
        ("cuda12", 1, "ERROR: no space left", 1, "cannot be installed: ERROR: no space"),
    ],
)
def test_an_extra_that_cannot_be_installed_fails(
    script, monkeypatch, tmp_path, extra, code, message, failed, note
):
    answer = subprocess.CompletedProcess([], code, "", message)
    monkeypatch.setattr(script, "pip", lambda *arguments: answer)
    args = types.SimpleNamespace(where=tmp_path, install=[], keep=False)
    row = script.try_extra(extra, ["mcp>=2"], {"tests": ["none"]}, args)
    assert (row.failed, row.passed) == (failed, 0)
    assert note in row.note


@pytest.mark.parametrize(
    ("outcomes", "failed"), [(["passed", "skipped"], 0), (["passed", "failed"], 1), ([], 1)]
)
def test_a_failure_or_no_test_at_all_fails_an_extra(
    script, monkeypatch, tmp_path, outcomes, failed
):
    packages = '[{"name": "Mcp", "version": "2.3.0"}]'
    answers = {"list": packages, "index": "mcp (2.4.0)\n"}
    monkeypatch.setattr(
        script,
        "pip",
        lambda python, verb, *more: subprocess.CompletedProcess([], 0, answers.get(verb, ""), ""),
    )
    tests = [{"name": "a", "outcome": one, "why": ""} for one in outcomes]
    monkeypatch.setattr(script, "run_tests", lambda *arguments: tests)
    args = types.SimpleNamespace(where=tmp_path, install=[], keep=True)
    row = script.try_extra("mcp", ["mcp>=2"], {"tests": ["none"]}, args)
    assert (row.failed, row.versions) == (failed, "mcp 2.3.0 (newest 2.4.0)")


def test_the_record_keeps_the_rows_of_extras_that_were_not_tried(script):
    row = script.Row("mcp", "mcp 2.3.0", 7, 0, 0, 60, "")
    first = script.record({"data": "| `data` | old |", "mcp": ""}, "")
    page = script.record({"data": "", "mcp": script.line_of(row, "now"), "docs": ""}, first)
    assert [line for line in page.splitlines() if line.startswith("| `")] == [
        "| `data` | old |",
        "| `mcp` | mcp 2.3.0 | 7 | 0 | 0 | 60 | now |",
    ]


def test_the_shipped_record_has_every_extra_and_no_failure():
    """But for dev, whose tests are those of ``make test-all`` and its record."""
    page = (TESTS / "last_extras_run.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert set(TABLE) - {"dev"} <= {row[1].strip(" `") for row in rows} <= set(TABLE)
    assert {row[5].strip() for row in rows} == {"0"}
