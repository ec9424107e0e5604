"""Installs each extra in an environment of its own, at its current versions, and runs its tests.

    python .ci/extras.py                        # all of them
    python .ci/extras.py mcp textarena          # these alone

writes their rows in tests/last_extras_run.md.

`tests/extras.toml` says which tests belong to an extra. A skip for want of the extra is a failure,
and so is an extra that cannot be installed; one without packages for this platform is listed as
such. Environments are made below --where, one at a time, and removed unless --keep.
"""

import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "extras.toml"
RECORD = ROOT / "tests" / "last_extras_run.md"
PYTEST = ["hypothesis", "packaging", "pytest", "pytest-timeout", "pytest-xdist"]
NO_PACKAGE = re.compile(r"No matching distribution found|is not a supported wheel|Requires-Python")
ELSEWHERE = ("cuda12", "cuda13", "plan-gpu", "tpu")
"""Extras of an accelerator, which have no packages for every platform."""

Row = collections.namedtuple("Row", "extra versions passed skipped failed seconds note")


def pip(python: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip of an environment."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def make_base(where: pathlib.Path, more: list[str]) -> None:
    """An environment with the library and pytest alone, from which the others are copied."""
    shutil.rmtree(where, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    installed = pip(
        where / "bin" / "python", "install", "-q", "--no-compile", *more, "-e", ".", *PYTEST
    )
    if installed.returncode:
        raise SystemExit(installed.stdout + installed.stderr)


def environment(base: pathlib.Path, where: pathlib.Path) -> pathlib.Path:
    """A copy of the base, by hard links, which pip replaces and never writes into; its Python."""
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(base, where, symlinks=True, copy_function=os.link)
    return where / "bin" / "python"


def versions_of(python: pathlib.Path, lines: list[str]) -> str:
    """The installed versions of an extra's own packages, and the newest where that is another."""
    listed = {
        row["name"].lower().replace("_", "-"): row["version"]
        for row in json.loads(pip(python, "list", "--format=json").stdout)
    }
    names = [re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines]
    return ", ".join(
        f"{name} {listed.get(name, '?')}{newer(python, name, listed.get(name, '?'))}"
        for name in names
        if name != "jrl-lm"
    )


def newer(python: pathlib.Path, name: str, version: str) -> str:
    """The newest version of a package, where it is not the one that was installed."""
    newest = re.match(r"\S+ \(([^)]+)\)", pip(python, "index", "versions", name).stdout)
    return f" (newest {newest[1]})" if newest and newest[1] != version else ""


def run_tests(python: pathlib.Path, extra: str, entry: dict, where: pathlib.Path) -> list[dict]:
    """The outcome of every test of an extra: {"name", "outcome", "why"}."""
    env = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    outcomes = []
    for key, more in (("tests", []), ("marked", ["--only-extra", extra])):
        if not entry.get(key):
            continue
        report = where / f"{key}.xml"
        command = [python, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "-n0"]
        command += ["--extras", extra, *more, f"--junitxml={report}", *entry[key]]
        ran = subprocess.run(list(map(str, command)), cwd=ROOT, env=env)
        if not report.exists() or ran.returncode not in (0, 1):
            reason = f"pytest ended with {ran.returncode} on {' '.join(entry[key])}"
            outcomes.append({"name": key, "outcome": "failed", "why": reason})
        if report.exists():
            outcomes += [outcome_of(case) for case in xml_cases(report)]
    return outcomes


def xml_cases(report: pathlib.Path) -> list[xml.etree.ElementTree.Element]:
    """The tests of a report that pytest wrote."""
    return list(xml.etree.ElementTree.parse(report).iter("testcase"))


def outcome_of(case: xml.etree.ElementTree.Element) -> dict[str, str]:
    """How a test of a report ended."""
    name = f"{case.get('classname')}::{case.get('name')}"
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(tag)) is not None:
            return {"name": name, "outcome": outcome, "why": element.get("message") or ""}
    return {"name": name, "outcome": "passed", "why": ""}


def try_extra(extra: str, lines: list[str], entry: dict, args: argparse.Namespace) -> Row:
    """Installs an extra and runs its tests."""
    where = args.where / extra
    print(f"--- {extra}", flush=True)
    python = environment(args.where / "base", where)
    try:
        packages = [*args.install, "-e", f".[{extra}]", *PYTEST, *entry.get("tools", ())]  # at once
        installed = pip(python, "install", "-q", "--no-compile", *packages)
        log = installed.stdout + installed.stderr
        if "does not provide the extra" in log:  # pip installs the rest, and says no more
            return Row(extra, "", 0, 0, 1, 0, "pip finds no such extra")
        if installed.returncode:
            last = log.strip().splitlines()[-1]
            if extra in ELSEWHERE and NO_PACKAGE.search(log):
                return Row(extra, "", 0, 0, 0, 0, f"not installable here: {last}")
            return Row(extra, "", 0, 0, 1, 0, f"cannot be installed: {last}")
        versions = versions_of(python, lines)
        began = time.monotonic()
        outcomes = run_tests(python, extra, entry, where)
        seconds = round(time.monotonic() - began)
        counts = collections.Counter(one["outcome"] for one in outcomes)
        note = "" if counts["passed"] or counts["failed"] else "no test of it ran"
        failed = counts["failed"] + bool(note)
        for one in outcomes:
            if one["outcome"] == "failed":
                print(f"failed: {one['name']}: {one['why']}", flush=True)
        return Row(extra, versions, counts["passed"], counts["skipped"], failed, seconds, note)
    finally:
        if not args.keep:
            shutil.rmtree(where, ignore_errors=True)


HEAD = [
    "| extra | versions | passed | skipped | failed | seconds | tried |",
    "| --- | --- | ---: | ---: | ---: | ---: | --- |",
]


def line_of(row: Row, tried: str) -> str:
    """A row in Markdown."""
    versions = "; ".join(filter(None, (row.versions, row.note)))
    counts = f"{row.passed} | {row.skipped} | {row.failed} | {row.seconds}"
    return f"| `{row.extra}` | {versions} | {counts} | {tried} |"


def record(lines: dict[str, str], before: str) -> str:
    """The page: the new rows, and of the other extras those that stand there.

    Args:
      lines: rows by extra, in the order of pyproject.toml; "" where it was not tried now.
      before: the page as it is.
    """
    old = {m[1]: m[0] for m in re.finditer(r"^\| `([\w-]+)` .*$", before, flags=re.MULTILINE)}
    rows = [line or old.get(extra, "") for extra, line in lines.items()]
    return "\n".join(
        [
            "# The last run of the tests of each extra",
            "",
            "`make extras-test`: each extra alone with the library in a new environment, at the "
            "newest version that pip can install; one in parentheses is newer, but not all that it"
            " needs is on the package index. Seconds are those of testing. Skipped are "
            "tests of other extras in the same files, and those that the machine cannot run.",
            "",
            *HEAD,
            *filter(None, rows),
            "",
        ]
    )


def now() -> str:
    """Commit, day and Python of a run."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    python = platform.python_version()
    return f"{described.stdout.strip()}, {datetime.date.today()}, Python {python}"


def main() -> int:
    """Runs the extras that are named, or all; 0 if nothing failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--where", type=pathlib.Path, default=ROOT / "build" / "extras")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--install", nargs="*", default=[], help="more arguments of pip install")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared, entries = project["optional-dependencies"], tomllib.loads(TABLE.read_text())
    if unknown := set(args.extras) - set(declared):
        parser.error(f"no extra is called {', '.join(sorted(unknown))}")
    make_base(args.where / "base", args.install)
    rows, tried = [], now()
    for extra in declared:
        if not args.extras or extra in args.extras:
            rows.append(try_extra(extra, declared[extra], entries[extra], args))
            lines = dict.fromkeys(declared, "") | {row.extra: line_of(row, tried) for row in rows}
            before = RECORD.read_text() if RECORD.exists() else ""
            RECORD.write_text(record(lines, before))  # at once: a run that is ended keeps its rows
    if not args.keep:
        shutil.rmtree(args.where / "base", ignore_errors=True)
    print("\n".join([*HEAD, *filter(None, lines.values())]))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
