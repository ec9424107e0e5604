"""The documentation's pages: all there, every link followed, the generated ones complete."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from jrl.config_io import describe
from jrl.methods import all_methods

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


@pytest.mark.slow
def test_mkdocs_builds_it_without_a_warning(site):
    pytest.importorskip("material", reason="needs the extra docs")
    built = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "site.py")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert (ROOT / "build" / "docs" / "site" / "methods" / "index.html").exists()
