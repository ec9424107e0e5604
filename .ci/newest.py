"""Runs the fast tests with each newer release series of JAX, on Python 3.12 or newer.

    python3 .ci/newest.py                           # all of them, with each of JAX_SERIES
    python3 .ci/newest.py --jax 0.12 tests/models   # those of a folder with one

Environments are made below build/newest, one at a time: about 7 GB each where pip brings PyTorch
with CUDA. One whose tests pass is removed; one whose tests fail stays and is used again. A run of
all tests writes its rows in tests/last_newest_run.md.

Python is the first that is new enough of: the one that runs this, NAMES on PATH, pyenv's. Where
there is none, the packages of Debian's stable release are unpacked into build/newest/python, with
the C library that they were built for: nothing is installed into the system, so no rights are
needed. Runs on Python 3.8 and newer.
"""

import argparse
import datetime
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
WHERE = ROOT / "build" / "newest"
RECORD = ROOT / "tests" / "last_newest_run.md"
JAX_SERIES = ("0.11", "0.12")
OLDEST = (3, 12)
"""The oldest Python that these releases of JAX install on."""
NAMES = ("python3.13", "python3.12", "python3.14")
PACKAGES = ("python3-venv", "libstdc++6")  # wheels with C++ in them need the second
CHECK = f"import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < {OLDEST})"


def usable(python):
    """Whether a Python is new enough and can make an environment."""
    try:
        return subprocess.run([python, "-c", CHECK], capture_output=True).returncode == 0
    except OSError:
        return False


def installed_python():
    """A Python of this machine that is new enough, or None."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    of_pyenv = (path for name in NAMES for path in glob.glob(f"{pyenv}/versions/*/bin/{name}"))
    return next(filter(usable, (sys.executable, *NAMES, *of_pyenv)), None)


def debian_mirror():
    """The address that this system's apt takes Debian's packages from, and None elsewhere."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)", "Created-By: Packages"],
        capture_output=True,
        text=True,
    ).stdout
    return next(iter(re.findall(r"^(\S+/debian/?) main$", listed, flags=re.MULTILINE)), None)


def apt_options(folder, mirror):
    """Options with which apt-get keeps everything in a folder, and holds nothing for installed."""
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "sources" / "stable.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: stable\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
    places = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # another user may not write here
    }
    return [f"-o{name}={place}" for name, place in places.items()]


def write_starter(root):
    """Puts a script in the place of the unpacked interpreter; its path.

    The C library is newer than the system's, so its own loader must start the program. The script
    tells it the name it was started by, which is how Python finds the environment it belongs to.
    """
    folder = root / "usr" / "bin"
    python = next(p for p in folder.glob("python3.*") if re.fullmatch(r"python3\.\d+", p.name))
    program = python.rename(folder / f"{python.name}.program")
    loader = next(root.glob("usr/lib*/ld-linux*.so.*"))
    libraries = next(root.glob("usr/lib/*/libc.so.6")).parent
    python.write_text(
        f'#!/bin/sh\nexec "{loader}" --library-path "{libraries}" --argv0 "$0" "{program}" "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def debian_python(folder):
    """The Python of Debian's stable release, unpacked into a folder."""
    root = folder / "root"
    for program in root.glob("usr/bin/python3.*.program"):
        if usable(str(program.with_suffix(""))):
            return str(program.with_suffix(""))
    mirror = debian_mirror() if shutil.which("apt-get") else None
    if mirror is None:
        raise SystemExit(
            "newest-test needs Python 3.12 or newer with venv; there is none on PATH or of pyenv, "
            "and no apt-get of Debian to bring one. Name one: make newest-test PYTHON=python3.13"
        )
    shutil.rmtree(folder, ignore_errors=True)
    options = apt_options(folder, mirror)
    print(f"--- unpacking the Python of Debian's stable release into {root}", flush=True)
    for command in (["update"], ["install", "--yes", "--download-only", *PACKAGES]):
        subprocess.run(["apt-get", "-qq", *options, *command], check=True)
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return write_starter(root)


def make_environment(python, where, series):
    """An environment with the development tools and one series of JAX; its Python."""
    inside, stamp = where / "bin" / "python", where / "installed"
    key = f"{os.path.realpath(python)}\n{(ROOT / 'pyproject.toml').read_text()}"
    if stamp.exists() and stamp.read_text() == key:
        return inside
    shutil.rmtree(where, ignore_errors=True)
    print(f"--- JAX {series}: installing into {where}", flush=True)
    # Debian's ensurepip reads its wheels from /usr/share, where an unpacked one has none.
    wheels = sorted((WHERE / "python").glob("root/usr/share/python-wheels/pip-*.whl"))
    if wheels and WHERE in pathlib.Path(python).parents:
        subprocess.run([python, "-m", "venv", "--without-pip", where], check=True)
        subprocess.run([inside, wheels[-1] / "pip", "install", "-qq", wheels[-1]], check=True)
    else:
        subprocess.run([python, "-m", "venv", where], check=True)
    command = [inside, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    command += ["--no-compile", "-e", ".[dev]", f"jax=={series}.*"]
    subprocess.run(command, check=True, cwd=ROOT)
    stamp.write_text(key)
    return inside


def run_tests(python, workers, arguments, report):
    """Runs pytest of an environment as `make test` does; its exit status."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [python, "-m", "pytest", "-n", workers, "--maxprocesses", "4", "--dist", "worksteal"]
    command += [f"--junitxml={report}", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=env).returncode


VERSIONS = """
import importlib.metadata, platform
names = "jax", "flax", "optax", "orbax-checkpoint", "numpy"
print(platform.python_version(), end=" | ")
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
"""


def row_of(python, report):
    """A run's line in Markdown: versions, counts and minutes."""
    shown = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    suites = list(xml.etree.ElementTree.parse(report).iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    minutes = sum(float(suite.get("time", 0)) for suite in suites) / 60
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    counts = f"{total - failed - errors - skipped} | {skipped} | {failed + errors} | {minutes:.0f}"
    return f"| {shown.stdout.strip()} | {counts} | {commit}, {datetime.date.today()} |"


HEAD = [
    "| Python | versions | passed | skipped | failed | minutes | tried |",
    "| --- | --- | ---: | ---: | ---: | ---: | --- |",
]


def record(rows, before):
    """The page: the new rows, and of other series of JAX those that stand there."""
    old = {
        m[1]: m[0] for m in re.finditer(r"^\| [\d.]+ \| jax (\d+\.\d+).*$", before, re.MULTILINE)
    }
    rows = {**old, **rows}
    return "\n".join(
        [
            "# The last run of the fast tests with newer Python and JAX",
            "",
            "`make newest-test`, on two cores. `make test` is what Python 3.11 and JAX 0.10 run.",
            "",
            *HEAD,
            *(
                rows[series]
                for series in sorted(rows, key=lambda s: [int(n) for n in s.split(".")])
            ),
            "",
        ]
    )


def main():
    """Runs the tests with each series of JAX; 0 if none failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="Other arguments are pytest's.")
    parser.add_argument("--jax", default=",".join(JAX_SERIES), metavar="SERIES,...")
    parser.add_argument("--workers", default="logical", help="of pytest, as -n has them")
    parser.add_argument("--debian", action="store_true", help="unpack a Python in any case")
    args, tests = parser.parse_known_args()
    python = None if args.debian else installed_python()
    python = python or debian_python(WHERE / "python")
    print(f"--- Python: {python}", flush=True)
    rows, failed = {}, []
    for series in args.jax.split(","):
        where, report = WHERE / f"jax-{series}", WHERE / f"jax-{series}.xml"
        inside = make_environment(python, where, series)
        print(f"--- JAX {series}: testing", flush=True)
        report.unlink(missing_ok=True)
        if run_tests(inside, args.workers, tests, report):
            failed.append(series)
        if not report.exists():
            raise SystemExit(f"pytest with JAX {series} ended before it ran a test")
        rows[series] = row_of(inside, report)
        if not tests:
            RECORD.write_text(record(rows, RECORD.read_text() if RECORD.exists() else ""))
        if series not in failed:
            shutil.rmtree(where, ignore_errors=True)
    print("\n".join([*HEAD, *rows.values()]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
