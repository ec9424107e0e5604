"""Builds the documentation as a site with Zensical: make site.

Pages are those of ``NAV``: README.md, docs/, the guides of configs/, tpu_scripts/ and benchmarks/,
the notebooks with their outputs, and what is generated: a page for each method, the configuration
keys and the Python reference. A link that leads nowhere, and a name that the reference does not
find, is an error. Needs the extra docs alone, and no network.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import tomli_w
from site_parts import methods, reference
from site_parts.markdown import cell, escaped, with_languages
from site_parts.notebooks import write_notebook

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAV: list[tuple[str, Any]] = [
    ("Home", "README.md"),
    (
        "Learn",
        [
            ("Get started", "docs/start.md"),
            ("Gallery", "docs/gallery.md"),
            ("Concepts", "docs/concepts.md"),
            ("Recipes", "docs/recipes.md"),
            ("From Python", "docs/python.md"),
        ],
    ),
    (
        "Notebooks",
        [
            ("An objective by hand", "notebooks/1_an_objective_by_hand.ipynb"),
            ("GRPO on a CPU", "notebooks/2_grpo_on_cpu.ipynb"),
            ("Sampling and slots", "notebooks/3_sampling_and_slots.ipynb"),
            ("A whole run as one program", "notebooks/4_a_whole_run_as_one_program.ipynb"),
            ("LoRA on a checkpoint", "notebooks/5_lora_on_a_checkpoint.ipynb"),
            ("A multi-turn tool user", "notebooks/6_a_multi_turn_tool_user.ipynb"),
            ("From one chip to a pod", "notebooks/7_from_one_chip_to_a_pod.ipynb"),
        ],
    ),
    (
        "Guides",
        [
            ("Models and data", "docs/data.md"),
            ("Environments", "docs/environments.md"),
            ("Methods and functions of your own", "docs/own.md"),
            ("Signals", "docs/signals.md"),
            ("Rewards", "docs/rewards.md"),
            ("Verifiers: code, SQL, proofs", "docs/verifiers.md"),
            ("Judges", "docs/judges.md"),
            ("Reward models", "docs/reward-models.md"),
            ("Reward recipes", "docs/reward-recipes.md"),
            ("What a run leaves", "docs/runs.md"),
            ("Trackers", "docs/trackers.md"),
            ("Memory, compiling, collapse, resuming", "docs/howto.md"),
            ("Malicious code", "docs/safety.md"),
        ],
    ),
    (
        "Scale and serve",
        [
            ("Meshes, adapters, serving", "configs/README.md"),
            ("Pods", "tpu_scripts/README.md"),
            ("Serving, exports and the Hub", "docs/serving.md"),
        ],
    ),
    ("Methods", "methods/"),
    (
        "Reference",
        [
            ("Configuration keys", "keys.md"),
            ("Python", "reference/"),
        ],
    ),
    (
        "Project",
        [
            ("Comparison with other libraries", "docs/comparison.md"),
            ("Benchmarks", "benchmarks/README.md"),
            ("Speed beside other libraries", "benchmarks/peers.md"),
            ("Many seeds", "benchmarks/runs.md"),
            ("One accelerator", "benchmarks/gpu.md"),
            ("Plans of the pods", "benchmarks/pods.md"),
            ("Weak scaling on paper", "benchmarks/weak_scaling.md"),
            ("Changelog", "CHANGELOG.md"),
            ("Contributing", "CONTRIBUTING.md"),
            ("A map of the code", "docs/code.md"),
        ],
    ),
]
"""Group or title -> pages, each a file of the checkout; those without one are generated."""

RENAMED = {
    "README.md": "index.md",
    "configs/README.md": "configs.md",
    "tpu_scripts/README.md": "pods.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/pods.md": "benchmarks/plans.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""File of the checkout -> page; others lose docs/ and, a notebook, its ending."""
GENERATED = ("keys.md", "methods/", "reference/")
HOME_TITLE = "Reinforcement learning for language models in JAX"


def sources(nav: list[tuple[str, Any]] = NAV) -> list[str]:
    """The files of the checkout that are pages, in the order of the navigation."""
    files = []
    for _, entry in nav:
        files += sources(entry) if isinstance(entry, list) else [entry]
    return [source for source in files if source not in GENERATED]


def page_of(source: str) -> str:
    """The page of a file of the checkout, by its path in the site."""
    return RENAMED.get(source, source.removeprefix("docs/").replace(".ipynb", ".md"))


def navigation(nav: list[tuple[str, Any]] = NAV) -> list[Any]:
    """The navigation as Zensical reads it."""
    entries: list[Any] = []
    for title, entry in nav:
        if isinstance(entry, list):
            entries.append({title: navigation(entry)})
        elif entry == "methods/":
            entries.append({title: methods.navigation(listed_methods())})
        elif entry == "reference/":
            entries.append({title: reference.navigation()})
        else:
            entries.append({title: page_of(entry)})
    return entries


def write_pages(target: pathlib.Path) -> None:
    """Writes every page of the site into a directory, links between them made to fit."""
    target.mkdir(parents=True)
    for source in sources():
        page = target / page_of(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".ipynb"):
            write_notebook(ROOT / source, page)
            text = page.read_text(encoding="utf-8")
        else:
            text = with_languages((ROOT / source).read_text(encoding="utf-8"))
        page.write_text(relinked(text, source), encoding="utf-8")
    home = target / "index.md"
    home.write_text(f"---\ntitle: {HOME_TITLE}\n---\n\n{home.read_text(encoding='utf-8')}")
    for folder in ("docs", "benchmarks"):
        for kind in ("*.png", "*.svg"):
            for picture in (ROOT / folder).rglob(kind):
                copy = target / picture.relative_to(ROOT / ("docs" if folder == "docs" else ""))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(picture, copy)
    (target / "style.css").write_bytes((ROOT / ".ci" / "site_parts" / "style.css").read_bytes())
    generated = {"keys.md": keys_page(), **method_pages()}
    generated |= {f"reference/{name}": text for name, text in reference.pages().items()}
    for name, text in generated.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")


def relinked(text: str, source: str) -> str:
    """A page with its relative links as they are in the site; one to another file is its text."""
    here = pathlib.PurePosixPath(page_of(source)).parent
    names = {path: page_of(path) for path in sources()}
    folder = (ROOT / source).parent

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, _, heading = target.partition("#")
        file = (folder / path).resolve()
        if re.match(r"[a-z]+:|#", target) or not file.is_relative_to(ROOT):
            return match[0]
        name = file.relative_to(ROOT).as_posix()
        if file.suffix in (".png", ".svg"):
            page = name.removeprefix("docs/")
        elif name in names:
            page = names[name]
        else:
            return label if source != page_of(source) or mark else match[0]
        return f"{mark}[{label}]({os.path.relpath(page, here)}{'#' * bool(heading)}{heading})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, text)


def listed_methods() -> list[dict[str, Any]]:
    """The catalogue."""
    from jrl.methods import list_methods

    return list_methods()


def method_pages() -> dict[str, str]:
    """The catalogue and a page a method, by name."""
    from jrl.methods import all_methods

    functions, listed = all_methods(), listed_methods()
    pages = {"methods/index.md": methods.catalogue(listed)}
    for method in listed:
        function = functions[method["name"]]
        path = pathlib.Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        home = f"`{path.relative_to(ROOT).as_posix()}`"
        pages[f"methods/{method['name']}.md"] = methods.method_page(method, function, home)
    return pages


def keys_page() -> str:
    """Every configuration key, a table for each table."""
    from jrl.config import describe

    lines = ["# Configuration keys", ""]
    lines += ["`jrl show-config CONFIG` prints those of a run. Every method's own keys, those of"]
    lines += ["`objective`, are on [its page](methods/index.md)."]
    keys = describe()
    tables = dict.fromkeys(key.name.partition(".")[0] for key in keys if is_table(key))
    groups = {"Top level": [k for k in keys if k.name not in tables and "." not in k.name]}
    groups |= {name: [k for k in keys if k.name.partition(".")[0] == name] for name in tables}
    for table, rows in groups.items():
        lines += ["", f"## {table}", "", "| key | type | default | meaning |"]
        lines += ["| --- | --- | --- | --- |", *map(key_row, rows)]
    return "\n".join(lines) + "\n"


def is_table(key: Any) -> bool:
    """Whether a key is in a table, or one itself, whose keys the user names."""
    return "." in key.name or key.kind == "table"


def key_row(key: Any) -> str:
    """A key's line of the table."""
    default = "" if key.default in (None, {}, (), "") else f"`{json.dumps(key.default)}`"
    only = f" With {', '.join(key.single)}." if key.single else ""
    row = (f"`{key.name}`", escaped(key.kind), default, escaped(key.text + only))
    return "| " + " | ".join(cell(each) for each in row) + " |"


def settings() -> dict[str, Any]:
    """What Zensical reads."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = about["urls"]["Repository"]
    features = ("content.code.copy", "navigation.indexes", "navigation.tabs", "navigation.top")
    options = {
        "docstring_style": "google",
        "docstring_options": {"returns_multiple_items": False, "returns_named_value": False},
        "docstring_section_style": "list",
        "extensions": ["site_parts.griffe_markdown"],
        "filters": ["!^_"],
        "line_length": 80,
        "members_order": "source",
        "separate_signature": True,
        "show_root_heading": True,
        "show_root_full_path": False,
        "show_source": False,
        "heading_level": 2,
    }
    return {
        "project": {
            "site_name": "JRL",
            "site_description": about["description"],
            **({} if ".invalid" in address else {"repo_url": address}),
            "docs_dir": "pages",
            "site_dir": "site",
            "extra_css": ["style.css"],
            "nav": navigation(),
            "theme": {"font": False, "features": list(features), "palette": palettes()},
            "markdown_extensions": {
                "attr_list": {},
                "tables": {},
                "toc": {"permalink": True},
                "pymdownx": {
                    "highlight": {"anchor_linenums": False},
                    "inlinehilite": {},
                    "superfences": {},
                },
            },
            "plugins": {
                # without the underscore: a key is one word
                "search": {"separator": r"[\s\-,:!=\[\]()\\" + '"`/]+' + r"|\.(?!\d)"},
                "mkdocstrings": {
                    "handlers": {"python": {"paths": [str(ROOT)], "options": options}}
                },
            },
        }
    }


def palettes() -> list[dict[str, Any]]:
    """Light, dark, and the button between them."""
    return [
        {
            "scheme": scheme,
            "media": f"(prefers-color-scheme: {name})",
            "toggle": {"icon": f"lucide/{icon}", "name": f"To {other} colours"},
        }
        for scheme, name, icon, other in (
            ("default", "light", "sun", "dark"),
            ("slate", "dark", "moon", "light"),
        )
    ]


def main() -> None:
    """Writes the pages and builds the site into build/docs/site."""
    target = ROOT / "build" / "docs"
    shutil.rmtree(target, ignore_errors=True)
    write_pages(target / "pages")
    config = target / "zensical.toml"
    config.write_text(tomli_w.dumps(settings()), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    path = os.pathsep.join([str(ROOT / ".ci"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = built.stdout + built.stderr
    if built.returncode or "griffe: " in log:  # of a docstring that the reference cannot read
        raise SystemExit(f"{log.partition('Traceback')[0]}the site was not built")
    print(f"{target / 'site'}: {sys.executable} -m http.server -d {target / 'site'} shows it")


if __name__ == "__main__":
    main()
