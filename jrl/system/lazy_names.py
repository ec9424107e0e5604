"""Packages whose public names are imported on first use, so that importing them is cheap.

    if TYPE_CHECKING:
        from jrl.train.step import make_step as make_step
    else:
        __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)

The imports for type checkers and editors are written out, since neither follows ``__getattr__``;
``tests/test_package.py`` compares them with the table.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__all__``, ``__getattr__`` and ``__dir__``.

    Args:
      package: the package's ``__name__``.
      homes: module -> the names that it defines. A module of the package's own name stands for its
        subpackages: those names are imported as modules.

    Returns:
      The names, sorted, and two functions of a module.
    """
    module_of = {name: module for module, names in homes.items() for name in names}
    names = sorted(module_of)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    # Without this, dir() and completion show the module's own imports and hide the public names.
    return names, get, lambda: list(names)
