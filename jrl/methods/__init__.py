"""Published methods by name. A file added to one of ``PACKAGES`` adds its decorated functions.

>>> get_method("grpo", clip_high=0.28).min_group
2
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from jrl.errors import UserError, choose
from jrl.methods.base import Method, Schedule
from jrl.methods.definition import Published, published, variant
from jrl.methods.edit import refill
from jrl.methods.plan import Plan
from jrl.own import FORMS, check_options, load, made_by, parameters_of

__all__ = [
    "Method",
    "OwnMethod",
    "Plan",
    "Published",
    "Schedule",
    "all_methods",
    "find_method",
    "get_method",
    "list_methods",
    "published",
    "refill",
    "show_method",
    "variant",
]


PACKAGES = ("jrl.methods", "jrl.zoo.methods")
"""Packages whose files hold published methods."""


@functools.cache
def all_methods() -> MappingProxyType[str, Published]:
    """Every decorated function in the files of ``PACKAGES``, by name, in alphabetical order.

    Raises:
      ValueError: when two files define methods of one name.
    """
    found: dict[str, Published] = {}
    packages = [importlib.import_module(name) for name in PACKAGES]
    files = [
        file.name
        for package in packages
        for file in pkgutil.iter_modules(package.__path__, prefix=f"{package.__name__}.")
    ]
    for file in files:
        module = importlib.import_module(file)
        for value in vars(module).values():
            if not isinstance(value, Published) or value.__module__ != module.__name__:
                continue
            if value.name in found:
                raise ValueError(
                    f"two methods are named {value.name!r}: in {found[value.name].__module__} and "
                    f"in {value.__module__}; qualify one of them"
                )
            found[value.name] = value
    return MappingProxyType(dict(sorted(found.items())))


class OwnMethod:
    """A plain function of one's own that returns a ``Method``.

    Attributes:
      name: where it is, as ``FILE.py:function`` or ``module:function``.
      family: none of the library's.
      coefficients: its arguments, by name.
    """

    family = ""

    def __init__(self, name: str, function: Callable[..., Method]) -> None:
        self.name, self._function = name, function
        self.coefficients = parameters_of(function, f"method = {name!r}")

    def describe(self) -> dict[str, Any]:
        """What ``jrl methods`` prints, as plain values."""
        arguments = self.coefficients.values()
        return {
            "name": self.name,
            "summary": (inspect.getdoc(self._function) or "").partition("\n")[0],
            "coefficients": [
                {
                    "name": p.name,
                    "default": None if p.default is p.empty else p.default,
                    "required": p.default is p.empty,
                    "domain": "any" if p.annotation is p.empty else str(p.annotation),
                }
                for p in arguments
            ],
        }

    def __call__(self, **coefficients: Any) -> Method:
        """The method with these coefficients.

        Raises:
          UserError: it does not take one of them, needs another, or returns something else.
        """
        if "base" in self.coefficients and "base" not in coefficients:
            raise UserError(
                f"method = {self.name!r}: a function of `base` is decorated with @variant of the"
                " method that it changes, such as @variant(grpo)"
            )
        check_options(self._function, coefficients, "objective")
        method = made_by(self._function, f"method = {self.name!r}", **coefficients)
        if not isinstance(method, Method):
            what = f"method = {self.name!r} returned {method!r:.40}"
            raise UserError(f"{what}; return a jrl.methods.Method")
        return method


def find_method(name: str) -> Published | OwnMethod:
    """The method of that name, to be called with coefficients.

    Args:
      name: as ``jrl methods`` lists it, or a function of one's own as ``FILE.py:function`` or
        ``module:function``: decorated as the library's are, or a plain one.

    Raises:
      UserError: there is no such method; the nearest is named.
    """
    if ":" in name:
        own = load(name, "method")
        return own if isinstance(own, Published) else OwnMethod(name, own)
    methods = all_methods()
    if name not in methods:
        raise UserError(
            f"{choose('method', name, methods)}; `jrl methods` lists them. Or write {FORMS}"
        )
    return methods[name]


def get_method(name: str, **coefficients: Any) -> Method:
    """The method of that name with these coefficients.

    Args:
      name: as for ``find_method``.
      **coefficients: by name; those not given keep their defaults.

    Raises:
      UserError: for an unknown name or coefficient (the nearest is named), a value outside its
        domain (the domain is named), or a missing coefficient that has no default.
    """
    return find_method(name)(**coefficients)


def list_methods() -> list[dict[str, Any]]:
    """What ``jrl methods --json`` prints: one plain dict a method, in alphabetical order.

    Each holds name, paper, arxiv, family, summary, seams, needs (statistics, at the default
    coefficients), min_group and coefficients (name, default, required, domain).
    """
    return [method.describe() for method in all_methods().values()]


def show_method(name: str) -> dict[str, Any]:
    """What ``jrl methods NAME`` prints of one method, of the library or of one's own.

    Args:
      name: as for ``find_method``.

    Raises:
      UserError: there is no such method.
    """
    return find_method(name).describe()
