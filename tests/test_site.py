"""The documentation's pages: all there, every link followed, the generated ones complete."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from hub_mirror import checkpoint, lines

import jrl
from jrl.config import describe, load_config
from jrl.methods import all_methods, list_methods
from jrl.setup.objective import COMMON
from jrl.train.build import setup

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        spec = importlib.util.spec_from_file_location("site_builder", ROOT / ".ci" / "site.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    return module


@pytest.fixture(scope="module")
def pages(site, tmp_path_factory):
    """The pages without the notebooks, which only the extra docs can convert."""
    target = tmp_path_factory.mktemp("site") / "pages"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "write_notebook", write_notebook)
        site.write_pages(target)
    return target


def write_notebook(source, target):
    cells = json.loads(source.read_text())["cells"]
    texts = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    target.write_text("\n\n".join(texts))


def pages_of(nav):
    """Pages of a navigation as Zensical reads it."""
    for entry in nav:
        for value in [entry] if isinstance(entry, str) else entry.values():
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_every_page_is_in_the_navigation_once(site, pages):
    paths = sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    assert sorted(pages_of(site.navigation())) == paths
    assert len(site.NAV) < 10  # groups, not a list of pages


def test_every_guide_and_every_notebook_is_a_page(site):
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    guides |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    guides |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "configs/README.md"}
    assert guides <= set(site.sources())


def test_links_lead_to_pages_or_headings(site, pages):
    count = 0
    for page in pages.rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", text)):
            if re.match(r"https?:", target) or page.parent.name == "reference":
                continue  # the build checks names of the reference
            path, _, heading = target.partition("#")
            assert not path or (page.parent / path).exists(), f"{page.name}: {target}"
            if heading:
                text = (page.parent / path if path else page).read_text()
                names = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
                assert heading in map(site.methods.slug, names), f"{page.name}: {target}"
            count += 1
    assert count > 400


def test_links_to_other_files_become_text(site):
    text = "[a page](data.md#models) and [a file](../pyproject.toml), ![a picture](report.png)"
    assert site.relinked(text, "docs/own.md") == (
        "[a page](data.md#models) and a file, ![a picture](report.png)"
    )
    assert (
        site.relinked("[it](../docs/own.md)", "notebooks/2_grpo_on_cpu.ipynb") == "[it](../own.md)"
    )


def test_every_method_has_a_page_with_formula_paper_departures_and_keys(pages):
    catalogue = (pages / "methods" / "index.md").read_text()
    for method in list_methods():
        name = method["name"]
        page = (pages / "methods" / f"{name}.md").read_text()
        assert f"[`{name}`]({name}.md)" in catalogue
        assert f"# {name}\n" in page
        assert "\n## Formula\n" in page
        departs = re.search(r"Departures?[,: \n]", all_methods()[name].__doc__)
        assert ("\n## Departures from the paper\n" in page) == bool(departs), name
        for each in method["coefficients"]:
            assert f"| `objective.{each['name']}` |" in page
        assert method["arxiv"] is None or f"https://arxiv.org/abs/{method['arxiv']})" in page
        assert f" method={name}" in page


def test_a_method_page_says_what_its_docstring_says(pages):
    page = (pages / "methods" / "gspo.md").read_text()
    assert "```text\ns_i = exp(1/|y_i| sum_t log rho_t)\nloss = -1/G" in page
    assert "- **Differs from:** [grpo](grpo.md)" in page
    assert "| `objective.clip_high` | `0.0004` | a number of at least 0 |" in page
    assert "method = jrl.methods.gspo()" in page
    dapo = (pages / "methods" / "dapo.md").read_text()
    assert "## Departures from the paper\n\n`buffer_tokens` (b) is a fifth" in dapo
    assert "jrl.methods.dapo(max_tokens=...)" in dapo


def test_the_page_of_keys_holds_every_key(pages):
    keys = (pages / "keys.md").read_text()
    assert all(f"| `{key.name}` |" in keys for key in describe())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files for the commands of the methods' pages."""
    place = tmp_path_factory.mktemp("data")
    checkpoint(place / "DIR", chat=True)
    checkpoint(place / "TEACHER", chat=True)
    more = {"solutions": ["1", "2"]}  # of methods that read a list
    solved = [{"question": f"{i} + 1?", "answer": f"so #### {i + 1}"} | more for i in range(9)]
    (place / "train.jsonl").write_text(lines(solved))
    # Columns that only some methods read: a rationale, and a score of each answer.
    more = {"rationale": "1", "score_chosen": 1.0, "score_rejected": 0.0}
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} | more for i in range(9)]
    (place / "pairs.jsonl").write_text(lines(pairs))
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (place / "talks.jsonl").write_text(lines([{"messages": turns, "reward": 1.0}] * 9))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("method", list_methods(), ids=lambda method: method["name"])
def test_the_command_of_a_method_sets_a_run_up(site, method, data, monkeypatch):
    monkeypatch.chdir(data)
    program, command, config, *changes = shlex.split(site.methods.example(method))
    assert (program, command) == ("jrl", "train")
    small = ["sampling.max_new_tokens=8", "model.dtype=float32", "mesh.fsdp=1", "train.prompts=4"]
    small.append("train.microbatches=1")
    chosen = load_config(ROOT / config, [*changes, *small])
    assert chosen.method == method["name"]
    assert setup(chosen).method is not None


def test_the_reference_names_what_packages_list_and_what_pages_import(site, pages):
    text = "".join(page.read_text() for page in (pages / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))
    assert {
        "jrl.fit",
        "jrl.make_step",
        "jrl.objectives.grpo_loss",
        "jrl.types.StopReason",
    } <= documented
    assert "jrl.episodes.tool_env" in documented
    assert {f"jrl.{name}" for name in site.reference.PACKAGES} <= documented
    for name in documented:  # each is there; griffe finds it by itself when the site is built
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module or "jrl"), last), name
    public = {n for n in jrl.__all__ if n != "__version__"}
    assert {f"jrl.{n}" for n in public if not hasattr(getattr(jrl, n), "__path__")} <= (
        documented | {f"jrl.{n}" for n in site.reference.PACKAGES}
    )


def test_docstrings_are_written_as_markdown(site):
    markdown = site.methods.as_markdown(
        "Sum of ``x`` [G] and <b>::\n\n    a_t = b * c\n\nArgs:\n  *rest: [N] int.\n  n: 1.\n\n"
        ">>> f(1)\n2"
    )
    assert markdown == (
        "Sum of `x` \\[G\\] and &lt;b&gt;:\n\n```text\na_t = b * c\n```\n\n\nArgs:\n"
        "  *rest: \\[N\\] int.\n  n: 1.\n\n```pycon\n>>> f(1)\n2\n```\n"
    )


@pytest.mark.parametrize(
    ("line", "language"),
    [
        ("jrl train configs/tiny.toml", "bash"),
        (".venv/bin/pip install -e .", "bash"),
        ("PYTHON=python3.12 make demo", "bash"),
        ("tpu_scripts/create.sh --zone a", "bash"),
        ("[data]", "toml"),
        ('method = "grpo"', "toml"),
        ('{"prompt": 1}', "json"),
        ("@variant(grpo)", "python"),
        ("training finished", "text"),
    ],
)
def test_blocks_of_pages_have_a_language(site, line, language):
    assert site.with_languages(f"Text:\n\n    {line}\n\nMore.\n") == (
        f"Text:\n\n```{language}\n{line}\n```\n\n\nMore.\n"
    )
    assert site.with_languages(f"- item\n\n    {line}\n") == f"- item\n\n    {line}\n"


def test_keys_that_pages_name_are_keys():
    """In code, a table and a name in it; coefficients of methods and metrics stand beside them."""
    keys = {key.name for key in describe()}
    tables = {key.partition(".")[0] for key in keys if "." in key} - {
        "objective",
        "watch",
        "frozen",
    }
    coefficients = {c["name"] for method in list_methods() for c in method["coefficients"]}
    count = 0
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            for table, name in re.findall(r"(?<![\w/.])([a-z_]+)\.([a-z_0-9]+)\b", code):
                if table == "objective":
                    assert name in coefficients | set(COMMON), f"{page}: {code}"
                elif table in tables and name not in FILES:
                    exists = f"{table}.{name}" in keys
                    prefix = any(key.startswith(f"{table}.{name}.") for key in keys)
                    assert exists or prefix or is_open(table), f"{page}: {code}"
                    count += 1
    assert count > 40


FILES = ("csv", "json", "jsonl", "md", "parquet", "py", "toml")


def is_open(table):
    """Tables whose keys a user names, or that pages use as a name of their own."""
    return table in ("rewards", "data", "run")


@pytest.mark.slow
@pytest.mark.extra("docs")
def test_the_site_is_built_without_a_warning_and_without_torch(tmp_path):
    """A link to nowhere or a name that is not there ends the build."""
    for name in ("torch", "transformers", "textarena"):  # an import of these is an error
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('imports {name}')\n")
    built = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "site.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    directory = ROOT / "build" / "docs" / "site"
    notebook = (directory / "notebooks" / "2_grpo_on_cpu" / "index.html").read_text()
    assert notebook.count("<img") >= 1
    assert '<span class="kn">import</span>' in notebook  # colours
    reference = (directory / "reference" / "jrl" / "index.html").read_text()
    assert 'id="jrl.fit"' in reference
    assert "&gt;&gt;&gt;" in (directory / "reference" / "objectives" / "index.html").read_text()
    index = json.loads((directory / "search.json").read_text())
    pages = {item["location"].partition("#")[0] for item in index["items"] if has_key(item)}
    having = [m for m in list_methods() if "clip_high" in {c["name"] for c in m["coefficients"]}]
    assert {f"methods/{method['name']}/" for method in having} <= pages
    home = (directory / "index.html").read_text()
    assert "<title>Reinforcement learning for language models in JAX - JRL</title>" in home
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)', home)


def has_key(item):
    return "clip_high" in item["text"]
