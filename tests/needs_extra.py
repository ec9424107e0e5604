"""Tests that need an extra of ``pyproject.toml``: marked by its name, or skipped with their module.

    pytestmark = pytest.mark.extra("mcp")          # or a mark of one test
    pytestmark = pytest.mark.extra("dev", "torch")   # only this package of the extra
    require("serve")                               # before a module imports the extra's packages

``make test`` skips them where the extra is not installed, and says so. ``--extras`` names extras
that are there for certain: a test of one of those that cannot run is a failure. Which tests belong
to an extra is declared in ``extras.toml``; ``make extras-test`` runs them in an environment of the
extra's own.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from jrl.system.extras import missing

CHECKOUT = Path(__file__).resolve().parent.parent
VARIABLE = "JRL_TEST_EXTRAS"
"""Of the environment: the extras of ``--extras``, also for modules that are being collected."""


@cache
def declared() -> dict[str, list[str]]:
    """The requirements of every extra, by its name."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]


def within(extra: str) -> set[str]:
    """An extra and those that it includes, such as "data" in "dev".

    >>> sorted(within("dev") & {"data", "dev", "games"})
    ['data', 'dev']
    """
    inner = [re.fullmatch(r"jrl-lm\[(.*)\]", line) for line in declared()[extra]]
    names = [name.strip() for match in inner if match for name in match[1].split(",")]
    return {extra}.union(*(within(name) for name in names))


def promised() -> set[str]:
    """The extras that are installed for certain, with those that they include."""
    names = filter(None, os.environ.get(VARIABLE, "").split(","))
    return set().union(*(within(name) for name in names))


@cache
def lacks(extra: str, *packages: str) -> list[str]:
    """The packages of an extra that are not installed here; of those alone that are named."""
    lines = [line for name in within(extra) for line in declared()[name]]
    return missing(
        [
            line
            for line in lines
            if not line.startswith("jrl-lm[")
            and (not packages or re.match(r"[\w.-]+", line)[0] in packages)
        ]
    )


def skip_or_fail(extra: str, *packages: str, module: bool = False) -> None:
    """Skips a test or its module where an extra is missing; fails it where it must be there."""
    absent = lacks(extra, *packages)
    if not absent:
        return
    reason = f"needs the extra {extra} ({', '.join(absent)}): make extras-test"
    if extra in promised():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=module)


def require(extra: str, *packages: str) -> None:
    """Ends the collection of a module whose extra, or those packages of it, are missing."""
    skip_or_fail(extra, *packages, module=True)
