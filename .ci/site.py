"""Builds the documentation as a site with mkdocs: make site.

Pages are README.md, docs/, the guides of configs/ and benchmarks/, and three that are generated:
the catalogue of methods, the configuration keys and the Python reference. A link that leads nowhere
is an error.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "start.md": "docs/start.md",
    "concepts.md": "docs/concepts.md",
    "recipes.md": "docs/recipes.md",
    "python.md": "docs/python.md",
    "own.md": "docs/own.md",
    "rewards.md": "docs/rewards.md",
    "data.md": "docs/data.md",
    "runs.md": "docs/runs.md",
    "trackers.md": "docs/trackers.md",
    "serving.md": "docs/serving.md",
    "howto.md": "docs/howto.md",
    "safety.md": "docs/safety.md",
    "comparison.md": "docs/comparison.md",
    "environments.md": "docs/environments.md",
    "configs.md": "configs/README.md",
    "pods.md": "tpu_scripts/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "plans.md": "benchmarks/pods.md",
    "weak_scaling.md": "benchmarks/weak_scaling.md",
}
FURTHER = {
    "jrl.methods": ("find_method", "variant"),
    "jrl.objectives": ("per_group",),
    "jrl.rewards": ("whole_group",),
    "jrl.data": ("make_task",),
    "jrl.episodes": ("Env", "HostEnv", "Turn", "coroutine_env", "process_env", "tool_env"),
}
"""Module -> its names that own.md and environments.md use, for the Python reference."""

NAV = [
    {"JRL": "index.md"},
    {"Get started": "start.md"},
    {"Concepts": "concepts.md"},
    {"Recipes": "recipes.md"},
    {"Models and data": "data.md"},
    {"From Python": "python.md"},
    {"Functions of your own": "own.md"},
    {"What a run leaves": "runs.md"},
    {"Trackers": "trackers.md"},
    {"Serving, exports and the Hub": "serving.md"},
    {"Memory, compiling, collapse, resuming": "howto.md"},
    {"Code that means no good": "safety.md"},
    {"Environments in one program": "environments.md"},
    {"Meshes, adapters, serving": "configs.md"},
    {"Pods": "pods.md"},
    {"Methods": "methods.md"},
    {"Configuration keys": "keys.md"},
    {"Python reference": "api.md"},
    {"Beside other libraries": "comparison.md"},
    {"Benchmarks": "benchmarks.md"},
    {"Plans of the pods": "plans.md"},
    {"Weak scaling on paper": "weak_scaling.md"},
]


def write_pages(target: pathlib.Path) -> None:
    """Writes every page of the site into a directory, links between them made to fit."""
    target.mkdir(parents=True)
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (target / name).write_text(relinked(text, source), encoding="utf-8")
    for folder in ("docs", "benchmarks"):
        for picture in (ROOT / folder).glob("*.png"):
            shutil.copy(picture, target / picture.name)
    (target / "methods.md").write_text(methods_page(), encoding="utf-8")
    (target / "keys.md").write_text(keys_page(), encoding="utf-8")
    (target / "api.md").write_text(api_page(), encoding="utf-8")


def relinked(text: str, source: str) -> str:
    """A page with its relative links to other pages as they are in the site."""
    names = {path: name for name, path in PAGES.items()}
    folder = (ROOT / source).parent

    def link(found: re.Match[str]) -> str:
        target, mark, heading = found[1].partition("#")
        there = (folder / target).resolve()
        if re.match(r"[a-z]+:|#", found[1]) or not there.is_relative_to(ROOT):
            return found[0]
        path = there.relative_to(ROOT).as_posix()
        if there.suffix == ".png":
            return f"]({there.name})"
        return f"]({names[path]}{mark}{heading})" if path in names else found[0]

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def methods_page() -> str:
    """The catalogue: a table for each family."""
    from jrl.methods import list_methods

    families: dict[str, list[dict]] = {}
    for method in list_methods():
        families.setdefault(method["family"], []).append(method)
    lines = ["# Methods", "", f"{len(list_methods())} published methods by family; `jrl methods"]
    lines[-1] += " NAME` shows one with its coefficients."
    for family, methods in families.items():
        lines += [
            "",
            f"## {family}",
            "",
            "| method | | paper | lacks |",
            "| --- | --- | --- | --- |",
        ]
        for item in methods:
            paper = item["paper"] or ""
            if item["arxiv"]:
                paper = f"[{paper}](https://arxiv.org/abs/{item['arxiv']})"
            cells = (f"`{item['name']}`", item["summary"], paper, item["unsupported"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """Every configuration key."""
    from jrl.config import describe

    lines = ["# Configuration keys", "", "| key | type | default | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    for key in describe():
        default = "" if key.default in (None, {}, (), "") else f"`{json.dumps(key.default)}`"
        only = f" With {', '.join(key.single)}." if key.single else ""
        cells = (f"`{key.name}`", key.kind, default, key.text + only)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Every name of ``jrl`` itself and of what one's own parts are written with."""
    import jrl

    lines = [
        "# Python reference",
        "",
        "What `from jrl import ...` gives, by name; then what methods, tasks, environments and",
        "rewards of your own are written with, behind the module of each. Records and further",
    ]
    lines += ["functions have their documentation in the source: `help(jrl.types)`.", ""]
    names = [
        (name, jrl)
        for name in sorted(set(jrl.__all__) - {"__version__"}, key=str.lower)
        if not inspect.ismodule(getattr(jrl, name))
    ]
    names += [
        (name, importlib.import_module(module))
        for module, listed in FURTHER.items()
        for name in listed
    ]
    for name, module in names:
        value = getattr(module, name)
        if module is not jrl:
            name = f"{module.__name__}.{name}"
        lines += [f"## {name}", "", f"    {signature(name, value)}", ""]
        lines += ["```text", (inspect.getdoc(value) or "").strip(), "```", ""]
    return "\n".join(lines)


def signature(name: str, value: object) -> str:
    """How a name is called, without the types; of a record its fields."""
    if inspect.isclass(value) and hasattr(value, "model_fields"):
        return f"{name}(**tables)"
    if inspect.isclass(value) and issubclass(value, Exception):
        return f"{name}(message)"
    parameters = inspect.signature(value).parameters.values()
    empty = inspect.Parameter.empty
    shown = [p.replace(annotation=empty) for p in parameters if p.name != "self"]
    return f"{name}{inspect.Signature(shown)}"


def settings(target: pathlib.Path) -> dict:
    """What mkdocs reads; JSON is YAML."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = about["urls"]["Repository"]
    return {
        "site_name": "JRL",
        "site_description": about["description"],
        **({} if ".invalid" in address else {"repo_url": address}),
        "docs_dir": str(target / "pages"),
        "site_dir": str(target / "site"),
        "theme": {"name": "material", "features": ["content.code.copy"]},
        "markdown_extensions": ["tables", "fenced_code", "toc"],
        "nav": NAV,
        "strict": True,
    }


def main() -> None:
    """Writes the pages and builds the site into build/docs/site."""
    target = ROOT / "build" / "docs"
    shutil.rmtree(target, ignore_errors=True)
    write_pages(target / "pages")
    config = target / "mkdocs.yml"
    config.write_text(json.dumps(settings(target)), encoding="utf-8")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(config)]
    subprocess.run(mkdocs, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    print(target / "site" / "index.html")


if __name__ == "__main__":
    main()
