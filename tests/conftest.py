"""Setup of every test: a quiet CPU backend with eight devices, and strict JAX settings.

The environment is written before anything imports JAX, so that subprocesses started by a test see
the same machine.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
OLD_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
"""Whether XLA can do without its newer emitters; a later one ends the process at the flag."""
MAPPINGS, MOST_MAPPINGS = pathlib.Path("/proc/self/maps"), 10_000
"""Pieces of memory of a process. Each program has several, and Linux lets it have 65,530."""
LONG = tuple(
    f"tests/{x}.py" for x in ("test_soak", "plan/test_plan", "test_notebooks", "test_demo")
)
"""Files whose slow tests take up to minutes each."""
sys.path.insert(0, str(CHECKOUT / "tests"))  # for tpu_programs, needs_extra and small_policy
pytest_plugins = ["small_policy"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Programs of tests take far longer to compile than to run: the suite is twice as fast so.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # Workers keep all cores busy; a program compiled in many parts takes a quarter longer in sum.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if OLD_EMITTERS:
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Compiled programs are kept between runs and shared by the workers of pytest-xdist.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CHECKOUT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Nobody reads where each operation of a program came from, and to write it takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if importlib.util.find_spec("hypothesis") is not None:  # environments of one extra have none
    from hypothesis import settings

    # A law that is slow once, on busy cores, is no failure.
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")
# Tracing makes millions of small objects. Python would look through all of them every 700, which
# takes an eighth of the processor time of tests that train.
gc.set_threshold(10_000, 20, 50)
# Tests start many Pythons of their own. Where none may write bytecode beside its sources, each
# would compile all that it imports, and take three seconds for JAX alone.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(CHECKOUT / ".cache" / "python")
    sys.dont_write_bytecode = False
# A shell that starts something in the background has it ignore SIGINT, and nohup SIGHUP. Tests send
# both, and wait for what they do.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# No test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import needs_extra
import pytest
import tpu_programs

from jrl.report import page

DRAW_PLOTS = page._draw_plots

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Ends the compiling process behind a module; lets programs go when memory matters."""
    yield
    tpu_programs.compiler.close()
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


def pytest_configure(config):
    """Tells modules and workers which extras are there for certain."""
    if (extras := config.getoption("--extras")) is not None:
        unknown = set(filter(None, extras.split(","))) - set(needs_extra.declared())
        if unknown:
            raise pytest.UsageError(f"--extras: no extra is called {', '.join(sorted(unknown))}")
        os.environ[needs_extra.VARIABLE] = extras


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without looking for garbage; what is collected stays, and is not looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item):
    """Skips a test whose extra is missing, or fails it where the extra must be there."""
    for mark in item.iter_markers("extra"):
        needs_extra.skip_or_fail(*mark.args)


def pytest_collection_modifyitems(config, items):
    """Marks the tests of ``slow.txt`` as slow; leaves those of one extra, where that is asked."""
    if (only := config.getoption("--only-extra")) is not None:
        marked = [i for i in items if any(only == m.args[0] for m in i.iter_markers("extra"))]
        config.hook.pytest_deselected(items=[i for i in items if i not in marked])
        items[:] = marked
    lines = (CHECKOUT / "tests" / "slow.txt").read_text().splitlines()
    left = {f"tests/{line}": False for line in lines if line and not line.startswith("#")}
    for item in items:
        for name in (item.nodeid, item.nodeid.partition("[")[0]):
            if name in left:
                left[name] = True
                item.add_marker(pytest.mark.slow)
    # One that begins last would keep one worker busy, and let the others wait.
    items.sort(key=lambda i: not (i.nodeid.startswith(LONG) and i.get_closest_marker("slow")))
    if not config.option.file_or_dir and not all(left.values()):
        stale = ", ".join(name for name, matched in left.items() if not matched)
        raise pytest.UsageError(f"tests/slow.txt names what is no test: {stale}")


BEGIN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write a summary of the run, in Markdown")
    parser.addoption(
        "--extras", metavar="NAME,...", help="extras whose tests must run; one that skips fails"
    )
    parser.addoption("--only-extra", metavar="NAME", help="only the tests marked for this extra")


def skipped_extras(reports):
    """Number of skipped reports by missing extra."""
    counts = {}
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        match = re.search(r"needs the extra ([\w-]+) ", reason)
        if match:
            counts[match[1]] = counts.get(match[1], 0) + 1
    return counts


def pytest_terminal_summary(terminalreporter, config):
    """Says which extras were missing; writes what a full run gave, to be read in the repository."""
    left_out = skipped_extras(terminalreporter.stats.get("skipped", ()))
    if left_out:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(left_out.items()))
        terminalreporter.write_line(f"skipped for want of an extra: {names}: make extras-test")
    if config.getoption("--record") is None:
        return
    stats = terminalreporter.stats
    seconds = time.monotonic() - BEGIN
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.strip()
    counts = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    took = {}
    for reports in stats.values():
        for report in reports:
            file = getattr(report, "nodeid", "").partition("::")[0]
            took[file] = took.get(file, 0.0) + getattr(report, "duration", 0.0)
    slowest = sorted(took.items(), key=lambda item: -item[1])[:20]
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax"))
    lines = [
        "# The last full run of the tests",
        "",
        f"`make test-all` at {commit} on {datetime.date.today()}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
        + f" in {seconds / 60:.0f} minutes on {os.cpu_count()} cores"
        + f" (Python {platform.python_version()}, {versions}).",
        "",
        *(
            f"The tests of the extra {name} ({count} skipped) run in an environment of their own: "
            "`last_extras_run.md`."
            for name, count in sorted(left_out.items())
        ),
        *([""] if left_out else []),
        "| file | seconds |",
        "| --- | ---: |",
        *(f"| `{file}` | {spent:.0f} |" for file, spent in slowest),
        "",
        *(f"- failed: `{report.nodeid}`" for report in stats.get("failed", ())),
    ]
    pathlib.Path(config.getoption("--record")).write_text("\n".join(lines).rstrip() + "\n")


@pytest.fixture(scope="session", autouse=True)
def reports_without_pictures():
    """Runs write their page; its pictures take two seconds, and ``pictures`` has them drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_draw_plots", lambda out, curves: None)
        yield


@pytest.fixture
def pictures(monkeypatch):
    """Reports with their pictures, as users have them."""
    monkeypatch.setattr(page, "_draw_plots", DRAW_PLOTS)


@pytest.fixture(scope="session")
def checkout() -> pathlib.Path:
    """The root of the source checkout."""
    return CHECKOUT
