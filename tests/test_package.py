"""The package as a whole: what imports what, what is loaded when, and what a wheel holds."""

import ast
import fnmatch
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jrl

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jrl"

FLOORS = [
    {"errors"},
    {"system"},
    {"user_code", "hub"},
    {"types"},
    {"mesh"},
    {"config"},
    {"objectives", "models"},
    {"storage"},
    {"sampling"},
    {"rewards", "data"},
    {"episodes"},
    {"verifiers"},
    {"methods"},
    {"setup"},
    {"judging"},
    {"collect"},
    {"train"},
    {"evaluate"},
    {"report"},
    {"run"},
    {"serving", "plan"},
    {"entry"},
    {"zoo"},
    {"cli"},
    {"__main__"},
]
"""The areas of the package, bottom first. A module imports areas of lower floors, and its own."""
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
ZOO_FLOORS = [{"envs", "networks", "rewards", "jetstream"}, {"adapters", "methods"}, {"tools"}]
"""The folders of the zoo, likewise."""
ZOO_FLOOR = {name: floor for floor, names in enumerate(ZOO_FLOORS) for name in names}
NOT_IN_THE_ZOO = {"entry", "cli"}
"""The zoo stands on the whole library but for these, and only names in strings lead to it."""

HEAVY = {
    *("orbax", "tensorstore", "tensorflow", "tensorflow_datasets", "matplotlib", "transformers"),
    *("torch", "tokenizers", "pyarrow", "math_verify", "sympy", "safetensors"),
    *(
        "jinja2",
        "tensorboardX",
        "wandb",
        "trackio",
        "mlflow",
        "llguidance",
        "jetstream",
        "grpc",
        "starlette",
        "uvicorn",
    ),
    "huggingface_hub",
    *("jsonschema", "gymnasium", "textarena", "reasoning_gym", "openenv", "mcp"),
    *("duckdb", "nltk", "punkt", "langdetect"),
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


@functools.cache
def tree_of(name):
    """The syntax tree of a module; read by the worker that tests it alone."""
    return ast.parse(SOURCES[name].read_text())


def for_types_alone(tree):
    """The imports under ``if TYPE_CHECKING``, which never run."""
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
    guarded = [n for n in tests if ast.unparse(n.test) == "TYPE_CHECKING"]
    return {inner for n in guarded for statement in n.body for inner in ast.walk(statement)}


def imported(name):
    """Every module of jrl that a module imports, at its head or inside a function."""
    modules, unread = set(), for_types_alone(tree_of(name))
    for node in ast.walk(tree_of(name)):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(SOURCES)
            modules |= inner or {node.module}
            if inner and len(inner) < len(node.names):
                modules.add(node.module)
    return {m for m in modules if m == "jrl" or m.startswith("jrl.")}


def test_only_the_fixed_names_stand_at_the_top():
    """Git's files; what is downloaded or built there is not for the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    output = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    top = {path.partition("/")[0] for path in output.stdout.splitlines()}
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
        # Its names and version are looked up lazily, and those of modules that moved lead to new
        # ones.
        assert imported(name) == {
            f"jrl.system.{module}" for module in ("extras", "lazy_names", "moved_modules")
        }
        return
    for other in imported(name):
        assert other != "jrl", f"{name} imports the package's own head"
        if area(other) == area(name):
            continue
        assert FLOOR[area(other)] < FLOOR[area(name)], f"{name} imports {other}"
        assert area(other) != "zoo", f"{name} imports {other}; name it in a table of strings"
        assert area(name) != "zoo" or area(other) not in NOT_IN_THE_ZOO, f"{name} imports {other}"


def test_every_area_has_a_floor():
    assert {area(name) for name in SOURCES if name != "jrl"} == set(FLOOR)


def test_imports_go_down_in_the_zoo():
    """Its folders know one another as the areas of the package do."""
    modules = [name for name in SOURCES if area(name) == "zoo" and name != "jrl.zoo"]
    assert {name.split(".")[2] for name in modules} == set(ZOO_FLOOR)
    for name in modules:
        for other in imported(name) & set(modules):
            above, below = name.split(".")[2], other.split(".")[2]
            assert above == below or ZOO_FLOOR[below] < ZOO_FLOOR[above], f"{name} imports {other}"


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
    assert ast.get_docstring(tree_of(name)), f"{name} has no docstring"


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_that_was_removed_is_used(name):
    for node in ast.walk(tree_of(name)):
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
    for node in ast.walk(tree_of(name)):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        positional = [*node.args.posonlyargs, *node.args.args]
        last = positional[len(positional) - len(node.args.defaults) :]
        defaults = [*zip(last, node.args.defaults, strict=True)]
        defaults += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        for argument, default in defaults:
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


LAZY = sorted(name for name in SOURCES if "HOMES = {" in SOURCES[name].read_text())
"""Packages whose public names are imported on first use."""


def names_for_checkers(package):
    """name -> module of the imports that type checkers and editors read."""
    imports = [n for n in for_types_alone(tree_of(package)) if isinstance(n, ast.ImportFrom)]
    return {a.asname: n.module for n in imports for a in n.names if a.asname == a.name}


@pytest.mark.parametrize("package", LAZY)
def test_public_names_lead_to_their_modules(package):
    module = importlib.import_module(package)
    homes = {name: home for home, names in module.HOMES.items() for name in names}
    assert names_for_checkers(package) == homes
    assert sorted({*module.__all__} - {"__version__"}) == sorted(homes)
    assert {*dir(module)} - {"__version__"} == {*homes}
    for name, home in homes.items():
        value = getattr(module, name)
        if home == package:
            assert value is importlib.import_module(f"{package}.{name}")
            continue
        assert value is getattr(importlib.import_module(home), name)
        # A name that is also a module would change its meaning with the order of imports.
        assert f"{package}.{name}" not in SOURCES
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'generator'"):
        module.generator  # noqa: B018


def test_dir_shows_public_names_alone():
    assert {"fit", "generate", "make_step", "objectives", "methods"} <= {*dir(jrl)}
    assert {"Evaluator", "searching"} <= {*dir(jrl.evaluate)}
    listed = (jrl, jrl.train, jrl.models, jrl.methods, jrl.evaluate, jrl.rewards, jrl.types)
    for package in (*listed, jrl.config):
        imports = {"Any", "Callable", "TYPE_CHECKING", "annotations", "importlib", "lazy_names"}
        assert not imports & {*dir(package)}


def test_methods_and_losses_are_two_dots_away():
    script = """
import sys, jrl
assert "jax" not in sys.modules
assert jrl.methods.reinforce(baseline="batch").objective.surrogate.on_policy
assert jrl.methods.step_q.name == "step_q"  # of the zoo, found by name
import jrl.methods.policy_gradient, jrl.methods.ratios
assert jrl.methods.reinforce.arxiv is None and jrl.methods.ratios.gspo is jrl.methods.gspo
assert jrl.objectives.grpo_advantages is jrl.objectives.array_advantages.grpo_advantages
"""
    loaded_by(script)


DEEP = re.compile(r"\bjrl(?:\.[A-Za-z_]\w*){3,}")
PACKAGE_IMPORT = re.compile(r"from (jrl(?:\.\w+)*) import \(?([\w, \n]+)")


def pages():
    """The files that show users names of the library, as text."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.md")]
    texts += [*(ROOT / "configs").glob("*.toml")]
    yield from ((page.name, page.read_text()) for page in texts)
    for page in (ROOT / "notebooks").glob("*.ipynb"):
        yield (
            page.name,
            "".join(l for c in json.loads(page.read_text())["cells"] for l in c["source"]),
        )


def test_no_page_shows_a_name_deeper_than_its_package():
    read = 0
    for page, text in pages():
        text = re.sub(r"python -m jrl[\w.]+", "", text)  # a command, which no one types as a name
        assert not DEEP.findall(text), page
        for package, names in PACKAGE_IMPORT.findall(text):
            assert package.count(".") < 2, f"{page}: from {package} import {names}"
            read += 1
    assert read > 30


NAME = re.compile(r"\bjrl\.[a-z_]+(?:\.[A-Za-z_]\w*)?(?![\w(]*\.(?:py|toml|json))")
LISTED = re.compile(r"^\| `jrl\.(\w+)` \| ([^|]+) \|$", re.MULTILINE)


def test_names_that_pages_show_exist():
    """A renamed function is found here, also where no block of code uses it."""
    api_names = {name for _, text in pages() for name in NAME.findall(text)}
    api_names = {name for name in api_names if not (ROOT / f"{name.replace('.', '/')}").exists()}
    packages_listed = LISTED.findall((ROOT / "docs/python.md").read_text())
    api_names |= {
        f"jrl.{package}.{n}" for package, ns in packages_listed for n in re.findall(r"`(\w+)`", ns)
    }
    assert len(packages_listed) > 4
    assert len(api_names) > 40
    for name in sorted(api_names):
        _, first, *rest = name.split(".")
        assert first in dir(jrl), name  # `import jrl` alone leads there
        value = getattr(jrl, first)
        for part in rest:
            value = getattr(value, part, None) or importlib.import_module(name)


def test_no_method_has_the_name_of_a_file_beside_it():
    from jrl.methods import COMMON, all_methods

    files = {name.rpartition(".")[2] for name in SOURCES if name.startswith("jrl.methods.")}
    assert not files & {*all_methods()}
    assert not {*vars(sys.modules["jrl.methods"])} & {*all_methods()}
    common = {name for names in COMMON.values() for name in names}
    in_core = {n for n, m in all_methods().items() if m.__module__.startswith("jrl.methods.")}
    assert in_core <= common  # the zoo has what single papers need
    homes = names_for_checkers("jrl.methods")
    assert {*homes} == in_core
    assert all(all_methods()[name].__module__ == home for name, home in homes.items())
    assert 20 <= len(common) <= 26


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
    declared_names = {
        requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip()
        for requirement in everything
    }
    declared_names |= {requirement.replace("_", "-") for requirement in declared_names}
    transitive = {"etils", "absl", "ml_dtypes", "click", "rich"}  # of orbax, jax and typer
    for name in SOURCES:
        for node in ast.walk(tree_of(name)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top in sys.stdlib_module_names or top == "jrl" or top in transitive:
                    continue
                distribution = names.get(top, top.replace("_", "-"))
                assert distribution in declared_names or top in declared_names, (
                    f"{name} imports {top}"
                )
