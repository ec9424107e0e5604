"""Every link of every page: those inside the checkout followed, addresses looked at or fetched.

``make links`` (JRL_LINKS=1) fetches each address once, and asks arXiv for each paper that a method
names.
"""

import difflib
import json
import os
import pathlib
import re
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree

import pytest

from jrl.methods import list_methods

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("docs", "configs", "tpu_scripts", "benchmarks")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ADDRESS = re.compile(r"https?://[^\s)\]\"'`<>,]+")
HERE = ("localhost", "127.0.0.1")
NO_PAGE = {"https://example.invalid/jrl": "the placeholder for the repository's address"}

fetching = pytest.mark.skipif(not os.environ.get("JRL_LINKS"), reason="make links fetches them")


def text_of(page):
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def slugs(text):
    """Names of a page's headings in its address."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in headings}


def addresses():
    """Address -> the pages that name it, their final full stops left out."""
    pages_by_address = {}
    for page in PAGES:
        for address in ADDRESS.findall(text_of(page)):
            pages_by_address.setdefault(address.rstrip(".;:"), []).append(page.name)
    return pages_by_address


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page):
    for target in LINK.findall(text_of(page)):
        if ADDRESS.match(target):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / urllib.parse.unquote(path) if path else page
        assert file.exists(), target
        assert file.resolve().is_relative_to(ROOT), target
        if heading:
            assert heading in slugs(file.read_text()), target


def test_there_are_links_of_each_kind():
    inside = [target for page in PAGES for target in LINK.findall(text_of(page))]
    assert len([target for target in inside if not ADDRESS.match(target)]) > 30
    assert len(addresses()) > 4
    assert slugs("# A `b`, c-d\n```\n# no heading\n```\n") == {"a-b-c-d"}


def test_addresses_are_well_formed():
    for address, pages in addresses().items():
        parts = urllib.parse.urlsplit(address)
        is_here = parts.hostname in HERE
        assert parts.scheme == ("http" if is_here else "https"), (address, pages)
        assert is_here or "." in (parts.hostname or ""), (address, pages)
        assert re.fullmatch(r"[\w.-]+(:\d+)?", parts.netloc), (address, pages)
        assert not re.search(r"[{}|\\^]", address), (address, pages)


@fetching
def test_addresses_are_there():
    failures = {}
    for address, pages in addresses().items():
        if urllib.parse.urlsplit(address).hostname in HERE or address in NO_PAGE:
            continue
        request = urllib.request.Request(address, headers={"User-Agent": "jrl-links"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
        except urllib.error.URLError as error:
            failures[address] = (pages, error)
    assert not failures


@fetching
def test_papers_have_the_titles_that_methods_name():
    """By arXiv's own list; a title may have changed between versions, a little."""
    papers = {each["arxiv"]: each["paper"] for each in list_methods() if each["arxiv"]}
    assert len(papers) > 50
    titles, names = {}, list(papers)
    for start in range(0, len(names), 100):
        query = urllib.parse.urlencode({"id_list": ",".join(names[start : start + 100])})
        address = f"https://export.arxiv.org/api/query?{query}&max_results=100"
        with urllib.request.urlopen(address, timeout=60) as answer:
            tree = ElementTree.fromstring(answer.read())
        for entry in tree.iter("{http://www.w3.org/2005/Atom}entry"):
            name = re.search(r"(\d{4}\.\d{4,5})", entry.findtext("{*}id") or "")
            if name is not None:
                titles[name[1]] = " ".join((entry.findtext("{*}title") or "").split())
        time.sleep(3)  # as arXiv asks
    plain = lambda title: re.sub(r"[^a-z0-9]+", " ", title.lower()).strip()  # noqa: E731
    near = {
        name: difflib.SequenceMatcher(None, plain(title), plain(titles.get(name, ""))).ratio()
        for name, title in papers.items()
    }
    wrong = {name: (papers[name], titles.get(name)) for name, ratio in near.items() if ratio < 0.8}
    assert not wrong
