"""The documentation's pages: all there, every link followed, the generated ones complete."""

import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jrl
from jrl.config import describe
from jrl.methods import all_methods, list_methods
from jrl.train.objective import COMMON

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / ".ci" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site, tmp_path_factory):
    target = tmp_path_factory.mktemp("site") / "pages"
    site.write_pages(target)
    return target


def test_every_page_is_in_the_navigation(site, pages):
    listed = [path for entry in site.NAV for path in entry.values()]
    assert sorted(listed) == sorted(path.name for path in pages.glob("*.md"))


def test_links_lead_to_pages_files_of_the_checkout_or_headings(pages):
    for page in pages.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:", target):
                continue
            path, _, heading = target.partition("#")
            assert not path or (pages / path).exists(), f"{page.name}: {target}"
            if heading:
                text = (pages / path if path else page).read_text()
                names = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
                slugs = {re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names}
                assert heading in slugs, f"{page.name}: {target}"


def test_generated_pages_hold_every_method_and_every_key(pages):
    methods, keys = (pages / "methods.md").read_text(), (pages / "keys.md").read_text()
    assert all(f"| `{name}` |" in methods for name in all_methods())
    assert all(f"| `{key.name}` |" in keys for key in describe())


def test_the_reference_holds_every_name_with_its_signature(site, pages):
    text = (pages / "api.md").read_text()
    names = {n for n in jrl.__all__ if not inspect.ismodule(getattr(jrl, n))} - {"__version__"}
    names |= {f"{module}.{name}" for module, listed in site.FURTHER.items() for name in listed}
    assert "jrl.episodes.tool_env(tools" in text
    assert set(re.findall(r"^## (.*)$", text, flags=re.MULTILINE)) == names
    assert "    get_method(name, **coefficients)" in text
    assert "    make_mesh(sizes=None, devices=None, *, slices=0" in text
    blocks = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(names)
    assert all(len(block) > 30 for block in blocks)


def test_keys_that_pages_name_are_keys():
    """In code, a table and a name in it; coefficients of methods and metrics stand beside them."""
    keys = {key.name for key in describe()}
    tables = {key.partition(".")[0] for key in keys if "." in key} - {
        "objective",
        "watch",
        "frozen",
    }
    coefficients = {c["name"] for method in list_methods() for c in method["coefficients"]}
    found = 0
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            for table, name in re.findall(r"(?<![\w/.])([a-z_]+)\.([a-z_0-9]+)\b", code):
                if table == "objective":
                    assert name in coefficients | set(COMMON), f"{page}: {code}"
                elif table in tables and name not in FILES:
                    known = f"{table}.{name}" in keys
                    prefix = any(key.startswith(f"{table}.{name}.") for key in keys)
                    assert known or prefix or is_open(table), f"{page}: {code}"
                    found += 1
    assert found > 40


FILES = ("csv", "json", "jsonl", "md", "parquet", "py", "toml")


def is_open(table):
    """Tables whose keys a user names, or that pages use as a name of their own."""
    return table in ("rewards", "data", "run")


@pytest.mark.slow
def test_mkdocs_builds_it_without_a_warning(site):
    pytest.importorskip("material", reason="needs the extra docs")
    built = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "site.py")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert (ROOT / "build" / "docs" / "site" / "methods" / "index.html").exists()
