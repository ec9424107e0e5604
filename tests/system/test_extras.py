"""The line that installs an extra works here; nobody is sent to the `jrl` of the index."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest

from jrl.data.datasets import open_dataset
from jrl.errors import UserError
from jrl.system import extras

ROOT = pathlib.Path(__file__).parents[2]


def test_the_line_names_this_python_and_this_checkout(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = extras.install_line("math")
    assert line == f"{sys.executable} -m pip install -e '{ROOT}[math]'"
    monkeypatch.chdir(ROOT)
    assert extras.install_line("math").endswith(" -m pip install -e '.[math]'")


def test_without_a_checkout_the_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert extras.install_line("math").endswith(" -m pip install 'math-verify>=0.8' 'sympy>=1.13'")


def test_what_is_missing():
    assert extras.missing(["jax>=0.1", "no-such-package>=2", "numpy"]) == ["no-such-package"]
    assert extras.missing(["pytest[dev]"]) == extras.missing(extras.packages("dev", "pytest"))
    assert not extras.packages("no_such_extra", "jax")
    assert "math-verify>=0.8" in extras.extras()["math"]
    assert extras.version() == importlib.metadata.version("jrl-lm")


def test_what_needs_an_extra_says_so():
    assert extras.need("json", "data", "this") is __import__("json")
    with pytest.raises(UserError) as caught:
        extras.need("no_such_module.inside", "data", "reading a.parquet")
    assert str(caught.value) == (
        f"reading a.parquet needs no_such_module; install it: {extras.install_line('data')}"
    )


@pytest.mark.parametrize("extra", ["data", "tfds"])
def test_data_without_its_extra_names_the_line(extra, monkeypatch, tmp_path):
    spec = {"data": str(tmp_path / "a.parquet"), "tfds": "tfds:gsm8k"}[extra]
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow.parquet", "tensorflow_datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"-m pip install -e .*\[{extra}\]"):
        open_dataset(spec)


def tracked():
    output = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in output.split("\0") if name]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nobody_is_sent_to_another_package_of_that_name():
    """`jrl` on the package index is somebody else's."""
    advice = re.compile(r"""pip[^\n]*\binstall\b[^\n`]*?[\s"']jrl(?![\w/-])(?!-)""")
    assert advice.search('pip install "jrl[plan]"')
    assert advice.search("pip install -q jrl")
    assert not advice.search("pip install -e '.[math]'")
    for path in tracked():
        if path == pathlib.Path(__file__) or path.suffix in (".png", ".jsonl"):
            continue
        match = advice.search(path.read_text(encoding="utf-8", errors="ignore"))
        assert not match, f"{path}: {match[0]}"
