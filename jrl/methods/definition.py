"""Published methods: functions with a paper, checked and inherited coefficients.

    @published                                     # a method of its own
    def grpo(clip_low: NonNegative = 0.2, ...) -> Method:

    @variant(grpo, clip_low=3e-4, clip_high=4e-4)  # a method by its difference from another
    def gspo(base: Method) -> Method:
        '''GRPO with one ratio a completion. "Group Sequence ..." (arXiv:2507.18071): formula'''
        return base.with_(ratio=sequence)

The paper is read from the docstring, where all methods of one paper but the first say "the paper of
``gspo``"; the family is the file. A variant takes all coefficients of its base, so that
``correction``, ``kl_coef`` or ``epochs`` mean the same for every relative.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jrl.errors import Mistakes, UserError, nearest
from jrl.methods.base import Method
from jrl.methods.check_method import check_method
from jrl.methods.domains import Coefficient, coefficients_of
from jrl.system.readable import as_text
from jrl.types import Objective
from jrl.user_code import made_by

Build = Callable[..., Method]

_PAPER = re.compile(r'"([^"]+)" \(([^()]*(?:\([^()]*\)[^()]*)*)\)')
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_ANOTHERS = re.compile(r"the paper of ``(\w+)``")


class Paper(NamedTuple):
    """The first paper that a docstring names.

    Attributes:
      title: the exact title.
      arxiv: the arXiv id, or None for work that is not there.
    """

    title: str
    arxiv: str | None


def paper_of(docstring: str) -> Paper | None:
    """The first ``"Title" (arXiv:id)`` of a docstring; a parenthesis without an id gives None.

    >>> paper_of('GRPO with one ratio. "Group Sequence Policy Optimization" (arXiv:2507.18071)')
    Paper(title='Group Sequence Policy Optimization', arxiv='2507.18071')
    """
    match = _PAPER.search(" ".join(docstring.split()))
    if match is None:
        return None
    arxiv = _ARXIV.search(match[2])
    return Paper(match[1], None if arxiv is None else arxiv[1])


class _FromPaper(Method):
    """A ``Method`` that prints the call it came from; changed by ``with_`` it is a plain one.

    Attributes:
      made_by: the method's name with the coefficients that are not at their defaults.
    """

    made_by = "Method"


def _is_changed(value: Any, default: Any) -> bool:
    """Whether a coefficient is not at its default; an array may be traced, and counts as moved."""
    return isinstance(value, jax.Array) or value != default


class Published:
    """A method's function with its paper and coefficients; calling it checks the coefficients.

    Attributes:
      name: the method's name, that of its function.
      family: the name of the file that the method stands in.
      coefficients: the arguments by name, those of the base of a variant included.
      base: the method that this one is a variant of, or None.
    """

    def __init__(
        self,
        function: Callable[..., Method],
        build: Build,
        coefficients: Mapping[str, Coefficient],
        base: Published | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name: str = function.__name__
        self.family = function.__module__.rpartition(".")[2]
        self.coefficients = coefficients
        self.base = base
        self._build = build
        self._globals = function.__globals__
        # What help() and completion show: a variant's own function takes its base instead.
        self.__signature__ = inspect.Signature(
            [c.parameter for c in coefficients.values()], return_annotation=Method
        )

    def __call__(self, **coefficients: Any) -> Method:
        """The method with these coefficients, the others at their defaults.

        Raises:
          UserError: for an unknown coefficient (the nearest is named), a value outside its domain
            (the domain is named), a missing one that has no default, or a part of the method that
            is none.
        """
        mistakes = Mistakes()
        mistakes.look(lambda: self.check(self.name, coefficients))
        mistakes.look(lambda: self.check(self._label, self._own_defaults(coefficients)))
        mistakes.lines += [
            f"{self.name} needs {name}; give {coefficient.domain}"
            for name, coefficient in self.coefficients.items()
            if coefficient.required and name not in coefficients
        ]
        mistakes.check()
        return check_method(self.build(coefficients), f"method = {self.name!r}")

    @property
    def _is_own(self) -> bool:
        """Whether the function is a user's."""
        return not self.__module__.startswith("jrl.")

    @property
    def _label(self) -> str:
        """The name, of a user's function with its file."""
        file = self._globals.get("__file__") if self._is_own else None
        return f"{Path(file).name}:{self.name}" if file else self.name

    def _own_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults in use that a user wrote; those of the library are tested."""
        each = self.coefficients.items() if self._is_own else ()
        return {name: c.default for name, c in each if not c.required and name not in given}

    def check(self, table: str, coefficients: Mapping[str, Any]) -> None:
        """Raises a UserError with a line for each coefficient that is wrong.

        Args:
          table: what they stand in, for messages: "objective" in a configuration.
          coefficients: by name.
        """
        mistakes = Mistakes()
        for name, value in coefficients.items():
            if name in self.coefficients:
                mistakes.look(functools.partial(self.coefficients[name].check, table, value))
            else:
                mistakes.lines.append(
                    f"{table}.{name} = {value!r}: {self.name} has no such coefficient;"
                    f" {self._near(name)}"
                )
        mistakes.check()

    def _near(self, name: str) -> str:
        """What a coefficient that the method lacks may have been meant for."""
        from jrl.config.explain import KEYS_ELSEWHERE  # with pydantic, which methods do without

        keys = KEYS_ELSEWHERE.get(name.lower(), "")
        named = ["loss"] if keys == "method" else re.findall(r"objective\.(\w+)", keys)
        here = next((key for key in named if key in self.coefficients), None)
        if here is None and keys == "method":
            return "the method says that: set method, such as dapo, dr_grpo or gspo"
        return nearest(here or name, self.coefficients)

    def build(self, coefficients: Mapping[str, Any]) -> Method:
        """The method with these coefficients, not checked again."""
        defaults = {n: c.default for n, c in self.coefficients.items() if not c.required}
        arguments = {**defaults, **coefficients}
        if self._is_own:
            method = _FromPaper._make(self._checked(arguments))
        else:
            method = _FromPaper._make(self._build(**arguments))
        changed = {
            name: value
            for name, value in coefficients.items()
            if name not in defaults or _is_changed(value, defaults[name])
        }
        texts = ", ".join(f"{name}={as_text(value, 1)}" for name, value in changed.items())
        method.made_by = f"{self.name}({texts})"
        return method

    def _checked(self, arguments: Mapping[str, Any]) -> Method:
        """What a user's function returns, if it is a method."""
        key = f"method = {self._label!r}"
        method = made_by(self._build, key, **arguments)
        if inspect.iscoroutine(method):
            method.close()  # or Python would warn that nobody awaited it
        if not isinstance(method, Method):
            raise UserError(
                f"{key} returned {method!r:.60}; return a jrl.methods.Method, such as"
                " base.with_(...)"
            )
        return method

    def __repr__(self) -> str:
        """The name, the paper, and coefficients with their defaults."""
        paper = f'"{self.paper}"' + (f" (arXiv:{self.arxiv})" if self.arxiv else "")
        rows = [f"  {parameter}" for parameter in self.__signature__.parameters.values()]
        return "\n".join([f"{self.name}: {self.summary}", f"  {paper}", *rows])

    def example(self) -> Method:
        """The method at its defaults, arguments without one made up: to look at, not to train."""
        required = (c for c in self.coefficients.values() if c.required)
        return self(**{c.name: c.domain.example for c in required})

    @functools.cached_property
    def _source(self) -> Paper | None:
        """The paper: its own, or that of the method that the docstring names, of any file."""
        doc = " ".join((self.__doc__ or "").split())
        if (another := _ANOTHERS.search(doc)) is None:
            return paper_of(doc)
        first = self._globals.get(another[1]) or all_methods().get(another[1])
        return first._source if isinstance(first, Published) else paper_of(doc)

    @property
    def paper(self) -> str | None:
        """The exact title of the paper, or None where the docstring names none."""
        return None if self._source is None else self._source.title

    @property
    def arxiv(self) -> str | None:
        """The paper's arXiv id, or None."""
        return None if self._source is None else self._source.arxiv

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return (inspect.getdoc(self) or "").partition("\n")[0]

    def describe(self) -> dict[str, Any]:
        """The method as a plain dict, for ``jrl methods``."""
        method = self.example()
        return {
            "name": self.name,
            "paper": self.paper,
            "arxiv": self.arxiv,
            "family": self.family,
            "base": None if self.base is None else self.base.name,
            "summary": self.summary,
            "seams": list(method.seams),
            "needs": sorted(method.objective.needs),
            "min_group": method.least_group,
            "reward_parts": list(method.parts),
            "state": state_kept(method.objective),
            "unsupported": method.lacks,
            "notes": (inspect.getdoc(self) or "").partition("\n")[2].strip(),
            "coefficients": [
                {
                    "name": c.name,
                    "default": None if c.required else c.default,
                    "required": c.required,
                    "domain": f"{c.domain}{', or nothing' if c.optional else ''}",
                }
                for c in self.coefficients.values()
            ],
        }


def published(function: Callable[..., Method]) -> Published:
    """Makes a function that returns a ``Method`` a published one.

    Every argument must be annotated with a domain: ``clip: NonNegative = 0.2``.
    """
    return Published(function, function, coefficients_of(function))


def variant(
    base: Published, *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., Method]], Published]:
    """Publishes a function of a base method, which states only the differences.

    The function takes the base as a ``Method``, then arguments of its own, each annotated with a
    domain. An argument that the base has too is passed to both: without a default of its own it
    keeps the base's.

    Args:
      base: what the variant inherits from, with all coefficients.
      without: coefficients of the base that mean nothing to the variant; they keep their defaults
        and are not offered.
      **defaults: other defaults for coefficients of the base.

    Raises:
      TypeError: a name that the base does not have, or a base that is no published method.
    """
    if not isinstance(base, Published):
        raise TypeError(
            "variant takes the published method that is changed, as in @variant(grpo), not"
            f" {base!r:.60}"
        )
    for name in (*without, *defaults):
        if name not in base.coefficients:
            raise TypeError(f"{base.name} has no coefficient {name!r}")

    def decorate(function: Callable[..., Method]) -> Published:
        declared = coefficients_of(function, skip=1)
        inherited = {
            name: coefficient._replace(default=defaults.get(name, coefficient.default))
            for name, coefficient in base.coefficients.items()
            if name not in without
        }
        declared = {
            name: c._replace(default=inherited[name].default)
            if c.required and name in inherited
            else c
            for name, c in declared.items()
        }

        def build(**coefficients: Any) -> Method:
            mine = {name: coefficients[name] for name in declared}
            theirs = {name: value for name, value in coefficients.items() if name in inherited}
            fixed = {name: value for name, value in defaults.items() if name in without}
            return function(base.build({**fixed, **theirs}), **mine)

        # Own coefficients first: they are what a reader looks for.
        return Published(function, build, {**declared, **{**inherited, **declared}}, base)

    return decorate


PACKAGES = ("jrl.methods", "jrl.zoo.methods")
"""Packages whose files hold published methods. By name, as the core imports nothing of the zoo."""


@functools.cache
def all_methods() -> MappingProxyType[str, Published]:
    """Every decorated function in the files of ``PACKAGES``, by name, in alphabetical order.

    Raises:
      ValueError: when two files define methods of one name.
    """
    methods: dict[str, Published] = {}
    paths = {package: importlib.import_module(package).__path__ for package in PACKAGES}
    files = [f for name, path in paths.items() for f in pkgutil.iter_modules(path, f"{name}.")]
    for file in files:
        module = importlib.import_module(file.name)
        for value in vars(module).values():
            if not isinstance(value, Published) or value.__module__ != module.__name__:
                continue
            if value.name in methods:
                raise ValueError(
                    f"two methods are named {value.name!r}: in {methods[value.name].__module__} "
                    f"and in {value.__module__}; qualify one of them"
                )
            methods[value.name] = value
    return MappingProxyType(dict(sorted(methods.items())))


def state_kept(objective: Objective) -> list[str]:
    """Parts of an objective with state from step to step: "advantage", a regularizer."""
    state = jax.eval_shape(objective.init)  # its shapes alone: a list of methods needs no device
    names = ["advantage"] if jax.tree.leaves(state["advantage"]) else []
    parts = zip(objective.regularizers, state["regularizers"], strict=True)
    return names + [part.name for part, inner in parts if jax.tree.leaves(inner)]
