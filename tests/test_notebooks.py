"""The notebooks run from their first cell to their last, and git holds them without outputs."""

import ast
import importlib.metadata
import inspect
import json
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "Python 3",
    "language": "python",
}

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


RUN = """
import sys, nbclient, nbformat
source, target, folder = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
resources = {"metadata": {"path": folder}}
nbclient.NotebookClient(
    notebook, kernel_name="python3", timeout=900, resources=resources
).execute()
nbformat.write(notebook, target)
"""


def execute(path, folder, monkeypatch):
    """Runs all cells with this environment's Python; returns what they printed and drew.

    Jupyter is told of a kernel in ``folder`` and writes there alone, so none needs to be installed.
    It runs in a process of its own: its sockets give warnings, which here are errors.
    """
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(KERNEL))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.setenv("JRL_NOTEBOOK_FAST", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    target = folder / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(target), str(folder)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [output for cell in read(target).cells for output in cell.get("outputs", ())]
    streams = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type == "stream":
            streams[output.name] += output.text
    return streams | {"plots": sum("image/png" in o.get("data", {}) for o in outputs)}


def test_both_notebooks_are_looked_at():
    assert [path.stem for path in NOTEBOOKS] == ["1_an_objective_by_hand", "2_grpo_on_cpu"]


@by_name
def test_git_holds_no_outputs(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@by_name
def test_it_reads_as_a_lesson(path):
    cells = read(path).cells
    assert cells[0].source.startswith("# ")
    prose = sum(cell.cell_type == "markdown" for cell in cells)
    assert prose * 3 >= len(cells)
    assert all(cell.source.count("\n") < 45 for cell in cells)


@by_name
def test_names_and_keywords_of_the_library_exist(path):
    """A renamed function or argument is found here, without the minutes that a run takes."""
    sources = [c.source for c in read(path).cells if c.cell_type == "code"][1:]
    tree = ast.parse("\n".join(sources))
    imports = [x for x in tree.body if isinstance(x, (ast.Import, ast.ImportFrom))]
    names = {}
    exec(compile(ast.Module(imports, type_ignores=[]), str(path), "exec"), names)
    checked = 0
    for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
        partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
        called = call.args[0] if partial else call.func
        function = names.get(called.id) if isinstance(called, ast.Name) else None
        if not inspect.isfunction(function) or not function.__module__.startswith("jrl"):
            continue
        parameters = inspect.signature(function).parameters.values()
        if any(x.kind is x.VAR_KEYWORD for x in parameters):
            continue
        given = {keyword.arg for keyword in call.keywords} - {None}
        assert given <= {x.name for x in parameters}, ast.unparse(call)
        checked += len(given)
    assert checked > 0


def test_the_first_cell_is_the_same_in_all():
    first = {
        next(c.source for c in read(path).cells if c.cell_type == "code") for path in NOTEBOOKS
    }
    assert len(first) == 1
    assert "jrl" not in re.findall(r"pip install[^\n]*\s(\S+)", first.pop())  # by path, no index


def first_cell(namespace, monkeypatch, folder, installed):
    """Runs the first code cell with its shell commands recorded instead of run."""
    source = next(c.source for c in read(NOTEBOOKS[0]).cells if c.cell_type == "code")
    source = re.sub(r"^(\s*)([%!].*)$", r"\1commands.append(f'\2')", source, flags=re.MULTILINE)

    def version(name):
        if not installed:
            raise namespace["missing"](name)
        return "0"

    namespace["missing"] = importlib.metadata.PackageNotFoundError
    namespace["commands"] = []
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(folder)
    exec(source, namespace)
    return namespace["commands"]


def test_the_first_cell_does_nothing_where_jrl_is_installed(monkeypatch, tmp_path):
    before = list(sys.path)
    assert first_cell({}, monkeypatch, tmp_path, installed=True) == []
    assert sys.path == before


def test_the_first_cell_installs_the_checkout_around_it(monkeypatch):
    commands = first_cell({}, monkeypatch, ROOT / "notebooks", installed=False)
    assert commands == [f"%pip install -q -e {ROOT}"]
    assert sys.path[0] == str(ROOT)


def test_the_first_cell_asks_for_an_address_elsewhere(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="set REPO"):
        first_cell({}, monkeypatch, tmp_path, installed=False)


@pytest.mark.slow
def test_an_objective_by_hand(monkeypatch, tmp_path):
    seen = execute(NOTEBOOKS[0], tmp_path, monkeypatch)
    assert "all hold" in seen["stdout"]
    assert float(re.search(r"largest difference (\S+)", seen["stdout"])[1]) < 1e-6
    final = dict(re.findall(r"'([^']+)': ([\d.]+)", seen["stdout"].splitlines()[-1]))
    assert float(final["GRPO"]) > 0.95
    assert set(final) == {"GRPO", "leave one out", "share of success"}
    assert seen["plots"] == 5
    assert not seen["stderr"]


@pytest.mark.slow
def test_grpo_on_cpu(monkeypatch, tmp_path):
    seen = execute(NOTEBOOKS[1], tmp_path, monkeypatch)
    before, after = re.search(r"problems: ([\d.]+) before, ([\d.]+) after", seen["stdout"]).groups()
    assert float(before) < 0.75
    assert float(after) > float(before) + 0.1
    assert seen["plots"] == 2  # the live curve is drawn over, and the eight runs
    assert "accuracy_after" in seen["stdout"]
    assert not seen["stderr"]


@pytest.mark.slow
def test_a_cell_that_fails_fails_the_test(monkeypatch, tmp_path):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        execute(tmp_path / "broken.ipynb", tmp_path, monkeypatch)
