"""The notebooks run from their first cell to their last, and git holds them with their outputs."""

import ast
import importlib.metadata
import inspect
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PLACEHOLDER = "https://example.invalid/jrl"
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
source, target, folder, times = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
for cell in notebook.cells:
    cell.pop("id", None)
notebook.nbformat_minor = 4  # cells of this version need no ids of their own
code = [cell for cell in notebook.cells if cell.cell_type == "code"]
notebook.cells = [cell.copy() for cell in code for _ in range(int(times))]
resources = {"metadata": {"path": folder}}
nbclient.NotebookClient(
    notebook, kernel_name="python3", timeout=900, resources=resources
).execute()
nbformat.write(notebook, target)
"""


def execute(path, folder, monkeypatch, times=1):
    """Runs all cells with this environment's Python; returns what they printed and drew.

    With ``times`` each code cell runs so often before the next one; the outputs are those of its
    first time.

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
        [sys.executable, "-c", RUN, str(path), str(target), str(folder), str(times)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = read(target).cells[::times]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    streams = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type == "stream":
            streams[output.name] += output.text
    return streams | {"plots": sum("image/png" in o.get("data", {}) for o in outputs)}


@by_name
def test_no_cell_gives_a_function_or_import_another_meaning(path):
    """Such a cell cannot run twice, which "change the numbers as you read" invites to."""
    kinds = {}
    for cell in [c for c in read(path).cells if c.cell_type == "code"][1:]:
        here = {}
        for node in ast.parse(cell.source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                here |= {(a.asname or a.name).partition(".")[0]: "import" for a in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                here[node.name] = "function"
            else:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                here |= {n.id: "value" for n in stored if isinstance(n.ctx, ast.Store)}
        for name, kind in here.items():
            earlier = kinds.get(name, "value")
            assert earlier in ("value", kind), f"{name} was a {earlier}: {cell.source}"
        kinds |= here


def test_all_notebooks_are_looked_at():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_an_objective_by_hand",
        "2_grpo_on_cpu",
        "3_sampling_and_slots",
        "4_a_whole_run_as_one_program",
        "5_lora_on_a_checkpoint",
        "6_a_multi_turn_tool_user",
        "7_from_one_chip_to_a_pod",
    ]


MOST_BYTES = 200_000
"""Of a notebook with its outputs: pictures stay small."""


@by_name
def test_git_holds_small_outputs_of_one_run_from_first_to_last(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MOST_BYTES
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.metadata for cell in notebook.cells)
    outputs = [output for cell in cells for output in cell.outputs]
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert any("image/png" in output.get("data", {}) for output in outputs) or "7_" in path.name
    for word in ("/tmp/", "/home/", "/root/", "site-packages"):  # of the machine they ran on
        assert not any(word in str(output) for output in outputs), word


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
    calls = 0
    for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
        partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
        callee = call.args[0] if partial else call.func
        function = names.get(callee.id) if isinstance(callee, ast.Name) else None
        if not inspect.isfunction(function) or not function.__module__.startswith("jrl"):
            continue
        calls += 1
        parameters = inspect.signature(function).parameters.values()
        if any(x.kind is x.VAR_KEYWORD for x in parameters):
            continue
        keywords = {keyword.arg for keyword in call.keywords} - {None}
        assert keywords <= {x.name for x in parameters}, ast.unparse(call)
    assert calls > 0


def test_the_first_cell_is_the_same_in_all():
    first = {
        next(c.source for c in read(path).cells if c.cell_type == "code") for path in NOTEBOOKS
    }
    assert len(first) == 1
    assert "jrl" not in re.findall(r"pip install[^\n]*\s(\S+)", first.pop())  # by path, no index


def first_cell(namespace, monkeypatch, folder, installed, address=""):
    """Runs the first code cell with its shell commands recorded instead of run."""
    source = next(c.source for c in read(NOTEBOOKS[0]).cells if c.cell_type == "code")
    source = re.sub(r'^REPO = ".*?"', f'REPO = "{address}"', source, flags=re.MULTILINE)
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
    assert commands == [f'%pip install -q -e "{ROOT}[plot]"']
    assert sys.path[0] == str(ROOT)


def test_the_first_cell_takes_an_uploaded_zip(monkeypatch, tmp_path):
    """As a repository's page gives it: everything below one directory."""
    with zipfile.ZipFile(tmp_path / "jrl-main.zip", "w") as archive:
        archive.writestr("jrl-main/jrl/errors.py", "")
        archive.writestr("jrl-main/pyproject.toml", "")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("other/a.txt", "")
    commands = first_cell({}, monkeypatch, tmp_path, installed=False)
    assert commands == [f'%pip install -q -e "{tmp_path}/jrl-main[plot]"']
    assert not (tmp_path / "other").exists()


def test_the_first_cell_clones_the_address_that_a_maintainer_set(monkeypatch, tmp_path):
    address = "https://git.example.com/org/jrl"
    (tmp_path / "jrl-checkout" / "jrl").mkdir(parents=True)  # what git would write
    real = pathlib.Path.iterdir
    paths = []

    def iterdir(path):  # it is there from the second look on
        paths.append(path)
        return real(path) if len(paths) > 3 else iter(())

    monkeypatch.setattr(pathlib.Path, "iterdir", iterdir)
    (tmp_path / "jrl-checkout" / "jrl" / "errors.py").touch()
    commands = first_cell({}, monkeypatch, tmp_path, installed=False, address=address)
    assert commands == [
        f'!git clone --quiet --depth 1 {address} "{tmp_path}/jrl-checkout"',
        f'%pip install -q -e "{tmp_path}/jrl-checkout[plot]"',
    ]


def test_the_address_is_written_in_one_place():
    """pyproject.toml has it, README the same; the notebooks have nothing for the placeholder."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = about["project"]["urls"]["Repository"]
    assert f"\n    git clone {address} jrl\n" in (ROOT / "README.md").read_text()
    expected = "" if address == PLACEHOLDER else address
    for path in NOTEBOOKS:
        source = next(c.source for c in read(path).cells if c.cell_type == "code")
        assert f'REPO = "{expected}"' in source


def test_a_maintainer_sets_the_address_with_one_command(tmp_path):
    names = ["pyproject.toml", "README.md", ".ci/address.py"]
    for name in (*names, *(f"notebooks/{p.name}" for p in NOTEBOOKS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    address = "https://git.example.com/org/jrl"
    command = [sys.executable, str(tmp_path / ".ci" / "address.py"), address]
    subprocess.run(command, check=True, capture_output=True)
    about = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert about["project"]["urls"]["Repository"] == address
    for path in NOTEBOOKS:
        text = (tmp_path / "notebooks" / path.name).read_text()
        assert f'REPO = \\"{address}\\"' in text
        assert text.replace(address, "") == path.read_text().replace(address, "")
    assert f"\n    git clone {address} jrl\n" in (tmp_path / "README.md").read_text()
    wrong = subprocess.run([*command[:2], "nowhere"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "is no address" in wrong.stderr


def test_the_first_cell_asks_for_an_address_elsewhere(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="upload a zip of its source.*set REPO"):
        first_cell({}, monkeypatch, tmp_path, installed=False)


# The notebooks that train for seconds run each cell twice: "change the numbers as you read" invites
# to that. The others train in cells of their own.


@pytest.mark.slow
def test_an_objective_by_hand(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[0], tmp_path, monkeypatch, times=2)
    assert "all hold" in result["stdout"]
    assert float(re.search(r"largest difference (\S+)", result["stdout"])[1]) < 1e-6
    final = dict(re.findall(r"'([^']+)': ([\d.]+)", result["stdout"].splitlines()[-1]))
    assert float(final["GRPO"]) > 0.95
    assert set(final) == {"GRPO", "leave one out", "share of success"}
    assert result["plots"] == 5
    assert not result["stderr"]


@pytest.mark.slow
def test_grpo_on_cpu(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[1], tmp_path, monkeypatch)
    before, after = re.search(
        r"problems: ([\d.]+) before, ([\d.]+) after", result["stdout"]
    ).groups()
    assert float(before) < 0.75
    assert float(after) > float(before) + 0.1
    assert result["plots"] == 2  # the live curve is drawn over, and the eight runs
    assert "accuracy_after" in result["stdout"]
    assert not result["stderr"]


@pytest.mark.slow
def test_sampling_and_slots(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[2], tmp_path, monkeypatch, times=2)
    same, other = re.findall(r"scored at temperature [\d.]+: +(\S+) nats", result["stdout"])
    assert float(same) < 1e-4 < 0.1 < float(other)
    shares = [int(x) for x in re.findall(r"slots: +(\d+)% of", result["stdout"])]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0]
    assert result["plots"] == 2
    assert not result["stderr"]


@pytest.mark.slow
def test_a_whole_run_as_one_program(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[3], tmp_path, monkeypatch)
    assert "16 runs of 20 steps" in result["stdout"]
    assert len(re.findall(r"^ +[1-9]e-0\d ", result["stdout"], flags=re.MULTILINE)) == 16
    assert result["plots"] == 1
    assert not result["stderr"]


@pytest.mark.slow
def test_lora_on_a_checkpoint(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[4], tmp_path, monkeypatch, times=2)
    assert "adapter_model.safetensors" in result["stdout"]
    assert float(re.search(r"difference of a logit: (\S+)", result["stdout"])[1]) < 1e-3
    assert float(re.search(r"difference from transformers: (\S+)", result["stdout"])[1]) < 1e-3
    assert result["plots"] == 1


@pytest.mark.slow
def test_a_multi_turn_tool_user(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[5], tmp_path, monkeypatch)
    before, after = re.search(r"success ([\d.]+) before, ([\d.]+) after", result["stdout"]).groups()
    assert float(after) > float(before) + 0.1
    assert "environment" in result["stdout"]
    assert not result["stderr"]


@pytest.mark.slow
def test_from_one_chip_to_a_pod(monkeypatch, tmp_path):
    result = execute(NOTEBOOKS[6], tmp_path, monkeypatch, times=2)
    assert "8 devices" in result["stdout"]
    assert len(re.findall(r"fsdp 4 x tensor 2 +0\.", result["stdout"])) == 1


@pytest.mark.slow
def test_a_cell_that_fails_fails_the_test(monkeypatch, tmp_path):
    failing = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    nbformat.write(failing, tmp_path / "broken.ipynb")
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        execute(tmp_path / "broken.ipynb", tmp_path, monkeypatch)
