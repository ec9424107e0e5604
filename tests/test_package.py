"""The package as a whole: what imports what, what is loaded when, and what a wheel holds."""

import ast
import fnmatch
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

import jrl

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jrl"

BASE = {"types", "errors", "json_text"}
MAY_IMPORT = {
    "errors": set(),
    "compiles": set(),
    "own": {"errors", "json_text"},
    "json_text": {"errors"},
    "memory": {"errors"},
    "waits": set(),
    "extras": {"errors"},
    "hub": {"errors"},
    "types": {"errors"},
    "mesh": BASE,
    "signals": {"errors"},
    "step_files": set(),
    "integrity": BASE,
    "step_contents": {*BASE, "integrity", "step_files"},
    "checkpoint": {*BASE, "step_contents", "step_files", "waits"},
    "objectives": BASE,
    "rewards": {*BASE, "own", "waits"},
    "models": {*BASE, "hub", "mesh"},
    "data": {*BASE, "extras", "hub", "memory", "mesh", "models", "own"},
    "sampling": {*BASE, "mesh", "models"},
    "envs": {*BASE, "data", "episodes", "extras", "mesh", "models", "own", "rewards", "sampling"},
    "episodes": {*BASE, "envs", "models"},
    "methods": {*BASE, "objectives", "own"},
}
"""Area -> the other areas it may import. What is not here lies above and may import anything but
``cli``; nothing that is here may import it."""

HEAVY = {
    *("orbax", "tensorstore", "tensorflow", "tensorflow_datasets", "matplotlib", "transformers"),
    *("torch", "tokenizers", "pyarrow", "math_verify", "sympy", "safetensors"),
    *("jinja2", "tensorboardX", "wandb", "jetstream", "grpc", "starlette", "uvicorn"),
    "huggingface_hub",
    *("jsonschema", "gymnasium", "textarena", "reasoning_gym", "openenv", "mcp"),
}
"""Loaded by what needs them, when it runs."""

REMOVED = {
    "jax.tree_map",
    "jax.random.PRNGKey",
    "jax.experimental.maps",
    "jax.experimental.pjit",
    "jax.experimental.shard_map",
    "jax.experimental.host_callback",
    "jax.abstract_arrays",
    "jax.xla_computation",
    "jax.interpreters",
    "flax.optim",
    "flax.training.checkpoints",
}
"""Gone from JAX and Flax, or on the way out."""


def sources():
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


SOURCES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def for_types_alone(tree):
    """The imports under ``if TYPE_CHECKING``, which never run."""
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
    guarded = [n for n in tests if ast.unparse(n.test) == "TYPE_CHECKING"]
    return {inner for n in guarded for inner in ast.walk(n)}


def imported(name):
    """Every module of jrl that a module imports, at its head or inside a function."""
    found, unread = set(), for_types_alone(TREES[name])
    for node in ast.walk(TREES[name]):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(SOURCES)
            found |= inner or {node.module}
            if inner and len(inner) < len(node.names):
                found.add(node.module)
    return {m for m in found if m == "jrl" or m.startswith("jrl.")}


def test_only_the_fixed_names_stand_at_the_top():
    """Git's files; what is downloaded or built there is not for the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    dotted = {name for name in top if name.startswith(".")}
    assert dotted == {".ci", ".gitignore", ".pre-commit-config.yaml"}
    assert top - dotted == {
        *("pyproject.toml", "jrl", "configs", "notebooks", "tests", "tpu_scripts", "README.md"),
        *("benchmarks", "docs", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    }


def area(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_go_down(name):
    if name == "jrl":
        assert not imported(name)  # its names are looked up lazily
        return
    if name == "jrl.__main__":
        assert imported(name) == {"jrl.cli.app", "jrl.errors", "jrl.signals"}
        return
    for other in imported(name):
        assert other != "jrl", f"{name} imports the package's own head"
        if area(other) == area(name):
            continue
        assert area(other) != "cli", f"{name} imports the command line"
        if area(name) in MAY_IMPORT:
            assert area(other) in MAY_IMPORT[area(name)], f"{name} imports {other}"


def test_the_layers_are_checked_on_real_imports():
    assert "jrl.types" in imported("jrl.objectives.advantages")
    assert "jrl.errors" in imported("jrl.types") | imported("jrl.mesh")
    assert len(SOURCES) > 20


def test_no_module_imports_itself_in_a_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        path.append(name)
        for other in sorted(imported(name) & set(SOURCES)):
            visit(other)
        path.pop()
        done.add(name)

    for name in SOURCES:
        visit(name)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_that_was_removed_is_used(name):
    for node in ast.walk(TREES[name]):
        used = set()
        if isinstance(node, ast.Attribute):
            used = {dotted(node)}
        elif isinstance(node, ast.Import):
            used = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert not used & REMOVED, f"{name}:{node.lineno}: {used & REMOVED}"


@pytest.mark.parametrize("name", sorted(s for s in SOURCES if area(s) != "cli"))
def test_no_key_or_seed_has_a_default(name):
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        positional = [*node.args.posonlyargs, *node.args.args]
        last = positional[len(positional) - len(node.args.defaults) :]
        given = [*zip(last, node.args.defaults, strict=True)]
        given += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        for argument, default in given:
            random = argument.arg == "seed" or (
                argument.arg == "key" and "Array" in ast.unparse(argument.annotation)
            )
            assert default is None or not random, (
                f"{name}:{node.lineno}: {argument.arg} has a default"
            )


def loaded_by(statement):
    script = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return {module.split(".")[0] for module in json.loads(run.stdout)}


@pytest.mark.parametrize("statement", ["import jrl", "import jrl.cli.app", "import jrl.config"])
def test_the_head_and_the_command_line_load_no_jax(statement):
    assert not loaded_by(statement) & {"jax", "flax", "optax", "numpy", *HEAVY}


def test_no_module_loads_what_it_may_not_need():
    statement = "\n".join(f"import {name}" for name in SOURCES if not name.endswith("__main__"))
    assert not loaded_by(statement) & HEAVY


def test_public_names_lead_to_their_modules():
    assert sorted(set(jrl.__all__) - {"__version__"}) == sorted(jrl._HOME)
    for name, home in jrl._HOME.items():
        assert getattr(jrl, name) is getattr(importlib.import_module(home), name)
        assert name in dir(jrl)
        # A name that is also a module would change its meaning with the order of imports.
        assert f"jrl.{name}" not in SOURCES
    with pytest.raises(AttributeError, match="'jrl' has no attribute 'generator'"):
        jrl.generator  # noqa: B018


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once():
    version = project()["project"]["version"]
    assert jrl.__version__ == importlib.metadata.version("jrl-lm") == version
    assert version in (ROOT / "CHANGELOG.md").read_text()
    for name, path in SOURCES.items():
        assert f'"{version}"' not in path.read_text(), name


def test_a_wheel_would_hold_every_file():
    patterns = project()["tool"]["setuptools"]["package-data"]["jrl"]
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        inside = path.relative_to(PACKAGE)
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").exists(), f"{inside.parent} is no package"
        else:
            assert any(fnmatch.fnmatch(str(inside), p) for p in patterns), f"{inside} is left out"


def test_every_import_is_declared():
    """Third-party modules that jrl imports are dependencies, or belong to a named extra."""
    names = {"orbax": "orbax-checkpoint", "math_verify": "math-verify", "yaml": "pyyaml"}
    names |= {"jetstream": "google-jetstream", "grpc": "grpcio"}
    declared = project()["project"]
    extras = declared["optional-dependencies"].values()
    everything = [*declared["dependencies"], *itertools.chain.from_iterable(extras)]
    known = {
        requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip()
        for requirement in everything
    }
    known |= {requirement.replace("_", "-") for requirement in known}
    transitive = {"etils", "absl", "ml_dtypes", "click", "rich"}  # of orbax, jax and typer
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top in sys.stdlib_module_names or top == "jrl" or top in transitive:
                    continue
                wanted = names.get(top, top.replace("_", "-"))
                assert wanted in known or top in known, f"{name} imports {top}"
