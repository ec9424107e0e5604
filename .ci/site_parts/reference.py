"""The Python reference: a page for each package, which mkdocstrings fills from the source.

Which names are public is asked of the packages, which import no more than JRL needs to run; their
signatures and docstrings are read by griffe, without importing anything.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

PACKAGES = (
    *("objectives", "methods", "models", "sampling", "rewards", "episodes", "data", "train", "run"),
    *("evaluate", "plan", "config", "types", "errors", "mesh"),
)
"""Packages and modules of ``jrl`` in the order of the navigation."""

FURTHER = {
    "jrl.data.tasks.base": ("in_eval", "join", "listed", "number", "split_generator", "text"),
}
"""Module -> its names that the guides write one's own parts with, beside those of its package."""


def pages() -> dict[str, str]:
    """Name below reference/ -> page."""
    import jrl

    top = [name for name in names_of(jrl) if not inspect.ismodule(getattr(jrl, name))]
    made = {"jrl.md": page("jrl", top, "What `from jrl import ...` gives.", doc=False)}
    for name in PACKAGES:
        module = importlib.import_module(f"jrl.{name}")
        here = [n for n in names_of(module) if n not in top]
        elsewhere = [n for n in names_of(module) if n in top]
        note = "Also here: " + ", ".join(f"[`{n}`](jrl.md#jrl.{n})" for n in elsewhere) + "."
        made[f"{name}.md"] = page(module.__name__, here, note if elsewhere else "")
    return made


def page(module: str, names: list[str], note: str, *, doc: bool = True) -> str:
    """The page of one module: its docstring, and each of its names."""
    lines = ["---", f"title: {module}", "---", "", f"# {module}", ""]
    if doc:
        lines += [f"::: {module}", "    options:", *options(members="false"), ""]
    lines += [note, ""]
    further = [
        f"{home}.{name}"
        for home, listed in FURTHER.items()
        if home.startswith(f"{module}.") and module != "jrl"
        for name in listed
        if name not in names
    ]
    for name in [*(f"{module}.{name}" for name in names), *further]:
        lines += [f"::: {name}", ""]
    return "\n".join(lines)


def options(**changed: str) -> list[str]:
    """Lines of mkdocstrings' options of a module that is shown by its docstring alone."""
    chosen = {"show_root_heading": "false", "show_root_toc_entry": "false", **changed}
    return [f"      {name}: {value}" for name, value in chosen.items()]


def names_of(module: ModuleType) -> list[str]:
    """A package's public names: those it lists, or those defined in it or a module below it."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(module).items()
            if is_public(name) and str(getattr(value, "__module__", "")).startswith(module.__name__)
        ]
    return sorted((name for name in listed if is_public(name)), key=str.lower)


def is_public(name: str) -> bool:
    """Whether a name is for users: constants and ``__version__`` have no documentation to show."""
    return not name.startswith("_") and not name.isupper()


def navigation() -> list[dict[str, str]]:
    """The reference's pages in order."""
    return [{name: f"reference/{name.removeprefix('jrl.') or name}.md"} for name in titles()]


def titles() -> list[str]:
    """Names of the modules that have a page."""
    return ["jrl", *(f"jrl.{name}" for name in PACKAGES)]
