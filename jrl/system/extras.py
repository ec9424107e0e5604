"""Optional packages: the command that installs a missing one in this environment.

An extra is a name of ``[project.optional-dependencies]``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from jrl.errors import UserError

DISTRIBUTION = "jrl-lm"
"""Name of this library on the package index; the import is ``jrl``."""

_CHECKOUT = Path(__file__).resolve().parents[2]


def install_line(extra: str) -> str:
    """The command that installs an extra into this Python, from the checkout it runs from.

    An installed package without a checkout names the packages of the extra themselves.
    """
    pip = f"{_short(Path(sys.executable))} -m pip install"
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"{pip} -e {shlex.quote(f'{_short(_CHECKOUT)}[{extra}]')}"
    return f"{pip} {' '.join(shlex.quote(each) for each in packages(extra)) or extra}"


def need(module: str, extra: str, needed_by: str) -> Any:
    """A module of an extra.

    Args:
      module: its dotted name.
      extra: that brings it.
      needed_by: names the feature that needs it, for the message.

    Raises:
      UserError: it is not installed; with the line that installs it here.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = error.name or module
        raise UserError(f"{needed_by} needs {name}; install it: {install_line(extra)}") from None


def packages(extra: str, distribution: str = DISTRIBUTION) -> list[str]:
    """The requirements of an extra, as the installed package declares them."""
    marked = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    lines = [line.partition(";") for line in _requirements(distribution)]
    return [name.strip() for name, _, marker in lines if marked.search(marker)]


def extras() -> dict[str, list[str]]:
    """Every extra with its requirements, in order of declaration."""
    try:
        names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        names = []
    return {name: packages(name) for name in names}


def missing(requirements: list[str]) -> list[str]:
    """The missing requirements, including those of their extras."""
    absent = []
    for each in requirements:
        match = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", each)
        assert match is not None, each
        name, inside = match[1], [extra.strip() for extra in (match[2] or "").split(",")]
        if not version(name, ""):
            absent.append(name)
            continue
        for extra in filter(None, inside):
            absent += missing(packages(extra, name))
    return absent


def version(distribution: str = DISTRIBUTION, absent: str = "0+unknown") -> str:
    """The version of a package, by default this library; ``absent`` if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return absent


def _requirements(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _short(path: Path) -> str:
    """A path, relative to the working directory if below it."""
    try:
        relative = path.relative_to(Path.cwd())
    except ValueError:
        return shlex.quote(str(path))
    return shlex.quote(str(relative))
