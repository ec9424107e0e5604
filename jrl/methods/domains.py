"""Domains of a method's coefficients, written in its signature.

    def my_method(clip: NonNegative = 0.2, rounds: Count = 1, kl_kind: KlInLoss = "k2") -> Method:

Calling the method with a value outside it then names the domain, and ``jrl methods`` prints it.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax

from jrl.errors import UserError
from jrl.objectives.corrections import CORRECTIONS


class Range(NamedTuple):
    """Numbers between two bounds, which belong to it unless ``open_low``."""

    low: float
    high: float = math.inf
    open_low: bool = False
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        limits = f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"
        return f"{noun} {limits}" + ("" if self.high == math.inf else f", at most {self.high:g}")

    @property
    def example(self) -> Any:
        """Some number of it, for building a method only to look at it."""
        return 1 if self.whole else (self.low + min(self.high, self.low + 2)) / 2


class Choice(NamedTuple):
    """One of a few words."""

    words: tuple[str, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    @property
    def example(self) -> str:
        """The first word."""
        return self.words[0]


class Switch(NamedTuple):
    """True or false."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"

    @property
    def example(self) -> bool:
        """False."""
        return False


Domain = Range | Choice | Switch

NonNegative = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, open_low=True)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Share = Annotated[float, Range(0.0, 1.0, open_low=True)]
AtLeastOne = Annotated[float, Range(1.0)]
Count = Annotated[int, Range(1, whole=True)]
Tokens = Annotated[int, Range(0, whole=True)]
Whole = Annotated[int, Range(0, whole=True)]
Flag = Annotated[bool, Switch()]
Ddof = Annotated[int, Range(0, 1, whole=True)]
AboveOne = Annotated[float, Range(1.0, open_low=True)]
KlInLoss = Annotated[str, Choice(("k2", "k3"))]
KlInReward = Annotated[str, Choice(("k1", "k2", "k3"))]
CorrectionName = Annotated[str, Choice(tuple(CORRECTIONS))]


def is_zero(coef: Any) -> bool:
    """True for the number 0, and for no JAX array, whose value may not be known yet."""
    return not isinstance(coef, jax.Array) and coef == 0


def check_band(*, equal: bool = False, **bounds: Any) -> None:
    """Raises a UserError where nothing is between two coefficients; traced ones pass.

    Args:
      equal: whether they may be equal.
      **bounds: the lower one and the upper one, by name.

    >>> check_band(low=0.2, high=0.8)
    """
    (low, least), (high, most) = bounds.items()
    if isinstance(least, jax.Array) or isinstance(most, jax.Array):
        return
    if least > most or (least == most and not equal):
        raise UserError(f"objective.{low} = {least}; give a number below objective.{high} = {most}")


class Coefficient(NamedTuple):
    """An argument of a method.

    Attributes:
      name: the argument, and the key in a configuration.
      domain: what it may be.
      default: what it is when not given; ``inspect.Parameter.empty`` when it must be given.
      optional: True when None is allowed as well.
    """

    name: str
    domain: Domain
    default: Any
    optional: bool = False

    @property
    def required(self) -> bool:
        """True when there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def parameter(self) -> inspect.Parameter:
        """The argument by keyword, annotated with the domain in words."""
        kind = inspect.Parameter.KEYWORD_ONLY
        words = f"{self.domain}{', or None' if self.optional else ''}"
        return inspect.Parameter(self.name, kind, default=self.default, annotation=words)

    def check(self, method: str, value: Any) -> None:
        """Raises a UserError that names the domain when the value is outside it.

        A JAX array passes unchecked where a real number may stand: it may be traced, as under a
        ``vmap`` over coefficients.
        """
        if (value is None and self.optional) or value in self.domain:
            return
        if (
            isinstance(value, jax.Array)
            and isinstance(self.domain, Range)
            and not self.domain.whole
        ):
            return
        none = ", or nothing" if self.optional else ""
        raise UserError(f"{method}.{self.name} = {value!r}; give {self.domain}{none}")


def coefficients_of(build: Callable[..., Any], *, skip: int = 0) -> dict[str, Coefficient]:
    """The arguments of a method's function, by name; the first ``skip`` are left out.

    Raises:
      TypeError: for an argument that is not annotated with exactly one domain.
    """
    hints = typing.get_type_hints(build, include_extras=True)
    coefficients = {}
    parameters = inspect.signature(build).parameters
    for name, parameter in list(parameters.items())[skip:]:
        hint, optional = hints.get(name), False
        if type(None) in typing.get_args(hint):
            optional = True
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        domains = [part for part in typing.get_args(hint) if isinstance(part, Domain)]
        if len(domains) != 1:
            raise TypeError(f"{build.__name__}: annotate {name} with a domain, such as NonNegative")
        coefficients[name] = Coefficient(name, domains[0], parameter.default, optional)
    return coefficients
