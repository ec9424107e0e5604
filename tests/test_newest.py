"""``make newest-test``: which Python it takes, how an unpacked one starts, what it records."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PYTHON = sys.executable
TOO_OLD = "#!/bin/sh\nexit 1\n"
NEW_ENOUGH = "#!/bin/sh\nexit 0\n"


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def script(monkeypatch, tmp_path):
    """``.ci/newest.py`` on a machine whose Pythons a test makes."""
    spec = importlib.util.spec_from_file_location("newest_script", CHECKOUT / ".ci/newest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.sys, "executable", str(executable(tmp_path / "python3", TOO_OLD)))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(module, "NAMES", ("python3.98", "python3.97"))
    return module


def test_the_python_that_runs_it_comes_first_where_it_is_new_enough(script, tmp_path):
    executable(tmp_path / "path" / "python3.98", NEW_ENOUGH)
    assert script.installed_python() == "python3.98"
    executable(tmp_path / "python3", NEW_ENOUGH)
    assert script.installed_python() == str(tmp_path / "python3")


def test_a_name_on_the_path_that_does_not_run_is_passed_over(script, tmp_path):
    """pyenv has such names for every version, and they end with 127 for those not selected."""
    executable(tmp_path / "path" / "python3.98", TOO_OLD)
    assert script.installed_python() is None
    under = executable(tmp_path / "pyenv/versions/3.97.1/bin/python3.97", NEW_ENOUGH)
    assert script.installed_python() == str(under)


def test_the_age_of_a_python_is_what_it_says(script, monkeypatch):
    assert script.usable(PYTHON) is (sys.version_info >= (3, 12))
    monkeypatch.setattr(script, "CHECK", script.CHECK.replace("(3, 12)", "(3, 99)"))
    assert not script.usable(PYTHON)


def test_nothing_to_unpack_is_one_line_that_names_a_way(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "debian_mirror", lambda: None)
    with pytest.raises(SystemExit, match=r"make newest-test PYTHON=python3\.13"):
        script.debian_python(tmp_path / "python")


def test_the_mirror_is_the_one_that_this_system_uses(script, tmp_path):
    lines = "https://a.invalid/debian-security/ main\\nhttps://b.invalid/debian/ main"
    executable(tmp_path / "path" / "apt-get", f"#!/bin/sh\nprintf '{lines}\\n'\n")
    assert script.debian_mirror() == "https://b.invalid/debian/"
    executable(tmp_path / "path" / "apt-get", "#!/bin/sh\necho https://c.invalid/ubuntu main\n")
    assert script.debian_mirror() is None


def test_an_unpacked_python_starts_with_its_libraries_and_the_name_it_was_called_by(
    script, tmp_path
):
    root = tmp_path / "a folder"
    executable(root / "usr/lib64/ld-linux-x86-64.so.2", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    executable(root / "usr/bin/python3.98", "the program\n")
    (root / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    (root / "usr/lib/x86_64-linux-gnu/libc.so.6").touch()
    starter = Path(script.write_starter(root))
    (tmp_path / "python").symlink_to(starter)  # as an environment has it
    ran = subprocess.run([tmp_path / "python", "-c", "a b"], capture_output=True, text=True)
    assert ran.stdout.splitlines() == [
        "--library-path",
        f"{root}/usr/lib/x86_64-linux-gnu",
        "--argv0",
        f"{tmp_path}/python",
        f"{root}/usr/bin/python3.98.program",
        "-c",
        "a b",
    ]
    assert (root / "usr/bin/python3.98.program").read_text() == "the program\n"


def test_a_run_is_counted_from_what_pytest_wrote(script, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="10" failures="1" errors="2" skipped="3" time="120"/>'
        "</testsuites>"
    )
    cells = [cell.strip() for cell in script.row_of(PYTHON, report).split("|")]
    assert cells[1] == sys.version.split()[0]
    assert cells[2].startswith("jax 0.")
    assert cells[3:7] == ["4", "3", "3", "2"]


def test_the_record_keeps_the_rows_of_series_that_were_not_run(script):
    first = script.record({"0.11": "| 3.12.1 | jax 0.11.2, flax 1 | a |"}, "")
    page = script.record({"0.12": "| 3.13.0 | jax 0.12.0.1, flax 1 | b |"}, first)
    page = script.record({"0.12": "| 3.13.0 | jax 0.12.1, flax 1 | c |"}, page)
    assert [line for line in page.splitlines() if "| jax" in line] == [
        "| 3.12.1 | jax 0.11.2, flax 1 | a |",
        "| 3.13.0 | jax 0.12.1, flax 1 | c |",
    ]


def test_the_shipped_record_has_every_series(script):
    page = (CHECKOUT / "tests" / "last_newest_run.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if "| jax" in line]
    series = [".".join(row[2].split()[1].rstrip(",").split(".")[:2]) for row in rows]
    assert series == list(script.JAX_SERIES)


def test_the_package_names_the_pythons_that_were_tried(script):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    versions = {line.rpartition(" :: ")[2] for line in project["classifiers"]}
    page = (CHECKOUT / "tests" / "last_newest_run.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if "| jax" in line]
    assert {row[1].strip().rpartition(".")[0] for row in rows} <= versions
    assert "{}.{}".format(*script.OLDEST) in versions
    assert project["requires-python"].removeprefix(">=") in versions
