"""Published methods by name: ``jrl.methods.grpo(clip_high=0.28)`` is a ``Method``.

>>> import jrl
>>> jrl.methods.grpo(clip_high=0.28).least_group
2
>>> jrl.methods.grpo is all_methods()["grpo"]
True

``COMMON`` lists those that practitioners use. A file added to one of
``definition.PACKAGES`` adds its decorated functions.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError, unknown_choice
from jrl.methods.base import Method, Schedule
from jrl.methods.check_method import check_method
from jrl.methods.curriculum import (
    Between,
    Curriculum,
    Outcome,
    Query,
    RoundTools,
    Selection,
    Table,
    put_rows,
    rows_in_turn,
    top_rows,
)
from jrl.methods.definition import Published, all_methods, published, variant
from jrl.methods.domains import (
    AboveOne,
    AtLeastOne,
    Choice,
    Count,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Tokens,
    Whole,
)
from jrl.methods.edit import Edit, EditView, edit_of, fill, fill_groups, of_parts, only, refill
from jrl.methods.plan import Plan, StepView, also, more, new
from jrl.methods.replays import replay, replay_rare, replay_share, replay_successes
from jrl.methods.schedule import After, Ahead, average, copies, every, restart
from jrl.methods.stores import group_store, member_store
from jrl.user_code import FORMS, check_options, load, made_by, parameters_of

if TYPE_CHECKING:
    from jrl.methods.actor_critic import ppo as ppo
    from jrl.methods.actor_critic import vapo as vapo
    from jrl.methods.distillation import gkd as gkd
    from jrl.methods.distillation import on_policy_distillation as on_policy_distillation
    from jrl.methods.group_relative import dapo as dapo
    from jrl.methods.group_relative import dr_grpo as dr_grpo
    from jrl.methods.group_relative import grpo as grpo
    from jrl.methods.policy_gradient import maxrl as maxrl
    from jrl.methods.policy_gradient import reinforce as reinforce
    from jrl.methods.policy_gradient import reinforce_plus_plus as reinforce_plus_plus
    from jrl.methods.policy_gradient import remax as remax
    from jrl.methods.policy_gradient import rloo as rloo
    from jrl.methods.preference import dpo as dpo
    from jrl.methods.preference import ipo as ipo
    from jrl.methods.preference import orpo as orpo
    from jrl.methods.preference import simpo as simpo
    from jrl.methods.ratios import cispo as cispo
    from jrl.methods.ratios import gmpo as gmpo
    from jrl.methods.ratios import gspo as gspo
    from jrl.methods.reward_model import bradley_terry as bradley_terry
    from jrl.methods.reward_model import prm as prm
    from jrl.methods.supervised import dft as dft
    from jrl.methods.supervised import sft as sft

COMMON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "groups of completions, compared with one another": (
            *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo"),
        ),
        "policy gradient with a baseline": (
            *("reinforce", "rloo", "remax", "reinforce_plus_plus", "maxrl"),
        ),
        "with a value network": ("ppo", "vapo"),
        "preference pairs": ("dpo", "ipo", "kto", "simpo", "orpo", "online_dpo"),
        "given completions": ("sft", "dft"),
        "distillation from a teacher": ("gkd", "on_policy_distillation"),
        "reward models": ("bradley_terry", "prm"),
    }
)
"""Group -> the methods that practitioners use first; ``jrl methods`` prints them."""

__all__ = [
    "COMMON",
    "AboveOne",
    "After",
    "Ahead",
    "AtLeastOne",
    "Between",
    "Choice",
    "Count",
    "Curriculum",
    "Edit",
    "EditView",
    "Flag",
    "Fraction",
    "Method",
    "NonNegative",
    "Outcome",
    "OwnMethod",
    "Plan",
    "Positive",
    "Published",
    "Query",
    "Range",
    "RoundTools",
    "Schedule",
    "Selection",
    "StepView",
    "Table",
    "Tokens",
    "Whole",
    "all_methods",
    "also",
    "average",
    "copies",
    "edit_of",
    "every",
    "fill",
    "fill_groups",
    "find_method",
    "get_method",
    "group_store",
    "list_methods",
    "member_store",
    "more",
    "new",
    "of_parts",
    "only",
    "published",
    "put_rows",
    "refill",
    "replay",
    "replay_rare",
    "replay_share",
    "replay_successes",
    "restart",
    "rows_in_turn",
    "show_method",
    "top_rows",
    "variant",
]


def __getattr__(name: str) -> Published:
    """The published method of that name, as ``jrl.methods.grpo``."""
    # Modules of the package are asked for here before they are imported: by then the table of all
    # methods may be half made. And no method's name begins with an underscore.
    if not name.startswith("_") and name not in _modules():
        method = all_methods().get(name)
        if method is not None:
            return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; `jrl methods --all`")


def __dir__() -> list[str]:
    """The public names and the methods in ``COMMON``."""
    return sorted({*__all__, *(name for names in COMMON.values() for name in names)})


@functools.cache
def _modules() -> frozenset[str]:
    """Names of the files of this package."""
    return frozenset(file.name for file in pkgutil.iter_modules(__path__))


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
        """The method as a plain dict, for ``jrl methods``."""
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
          UserError: it does not take one of them, needs another, or returns something else; or a
            part of the method is none.
        """
        if "base" in self.coefficients and "base" not in coefficients:
            raise UserError(
                f"method = {self.name!r}: a function of `base` is decorated with @variant of the"
                " method that it changes, such as @variant(grpo)"
            )
        check_options(self._function, coefficients, "objective")
        method = made_by(self._function, f"method = {self.name!r}", **coefficients)
        if not isinstance(method, Method):
            result = f"method = {self.name!r} returned {method!r:.40}"
            raise UserError(f"{result}; return a jrl.methods.Method")
        return check_method(method, f"method = {self.name!r}")


def find_method(name: str) -> Published | OwnMethod:
    """The method of that name, to be called with coefficients.

    Args:
      name: as ``jrl methods`` lists it, or a function of one's own as ``FILE.py:function`` or
        ``module:function``: decorated as the library's are, or a plain one.

    Raises:
      UserError: there is no such method; the nearest is named.
    """
    if ":" in name:
        user_method = load(name, "method")
        return user_method if isinstance(user_method, Published) else OwnMethod(name, user_method)
    methods = all_methods()
    if name not in methods:
        raise UserError(
            f"{unknown_choice('method', name, methods)}; `jrl methods` lists them. Or write {FORMS}"
        )
    return methods[name]


def get_method(name: str, /, **coefficients: Any) -> Method:
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
    """Every method as a plain dict, in alphabetical order; ``jrl methods --json`` prints them.

    Each holds name, paper, arxiv, family, summary, seams, needs (statistics, at the default
    coefficients), min_group, reward_parts (in order; [] for any) and coefficients (name, default,
    required, domain).
    """
    return [method.describe() for method in all_methods().values()]


def show_method(name: str) -> dict[str, Any]:
    """One method as a plain dict, of the library or of one's own; ``jrl methods NAME`` prints it.

    Args:
      name: as for ``find_method``.

    Raises:
      UserError: there is no such method.
    """
    return find_method(name).describe()
