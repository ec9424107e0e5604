"""The optimiser of a run, from optax, as its configuration describes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jrl import user_code as own
from jrl.config.optimizer import Optimizer
from jrl.config.secrets import reveal
from jrl.errors import UserError, unknown_choice
from jrl.methods.domains import is_zero

NAMES = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "lion", "nadam", "nadamw", "radam", "rmsprop", "sgd", "sign_sgd"),
    *("signum", "yogi"),
)
"""Optimizers of optax that are called by name.

Without lamb, lars and novograd, which read the norm of each layer: weights of all layers are one
array here, so they would read the norm of all layers together.
"""


def schedule(table: Optimizer, peak: Any, updates: int, warmup: Any) -> optax.Schedule:
    """The learning rate at each update: a linear rise, then constant, cosine or linear to 0.

    Args:
      table: names the shape.
      peak: the learning rate after the rise; may be traced.
      updates: optimiser updates of the whole run.
      warmup: updates of the rise; may be traced.
    """
    static = isinstance(warmup, int)
    length = max(updates - warmup, 1) if static else jnp.maximum(updates - warmup, 1)
    over = max(warmup, 1) if static else jnp.maximum(warmup, 1)
    rises = not is_zero(warmup)

    def rate(count: Any) -> Any:
        rise = jnp.minimum((count + 1) / over, 1.0) if rises else 1.0
        progress = jnp.clip((count - warmup) / length, 0.0, 1.0)
        fall = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        }
        return peak * rise * fall[table.schedule]

    return rate


def make_optimizer(
    table: Optimizer, steps: int, updates_per_step: int = 1
) -> Callable[..., optax.GradientTransformation]:
    """Learning rate and other numbers -> optimiser; they may be traced, so that runs vmap over it.

    Args:
      table: the run's ``[optimizer]``.
      steps: training steps of the run.
      updates_per_step: optimiser updates each step makes (epochs times minibatches).

    Returns:
      (learning rate, numbers of the table by name, in place of its own) -> optimiser.

    Raises:
      UserError: there is no such optimizer, or it has no such key, or not such a value.
    """
    table = table.model_copy(update=reveal(table.options, "optimizer"))
    function = _function(table.name)
    _check_options(table, function)
    if ":" in table.name:
        setting = f"optimizer.name = {table.name!r}"
        result = own.made_by(function, setting, table.learning_rate, **table.options)
        if not isinstance(result, optax.GradientTransformation):
            raise UserError(f"{setting} returned {result!r:.40}; return an optax optimizer")

    def build(learning_rate: Any, **numbers: Any) -> optax.GradientTransformation:
        numbers_table = _with_numbers(table, _arguments(function), numbers)
        warmup = numbers_table.warmup_steps * updates_per_step
        rate = schedule(numbers_table, learning_rate, steps * updates_per_step, warmup)
        optimizer = function(rate, **numbers_table.options)
        if is_zero(numbers_table.clip_norm):
            return optimizer
        return optax.chain(optax.clip_by_global_norm(numbers_table.clip_norm), optimizer)

    return build


def _function(name: str) -> Callable[..., optax.GradientTransformation]:
    """A function from learning rates to optimizers; no weight decay by default."""
    if ":" in name:
        return own.load(name, "optimizer.name")
    if name not in NAMES:
        raise unknown_choice("optimizer.name", name, NAMES)
    function: Callable[..., optax.GradientTransformation] = getattr(optax, name)
    if "weight_decay" in inspect.signature(function).parameters:
        return functools.partial(function, weight_decay=0.0)
    return function


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments after the learning rate, with their defaults."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


_BELOW_ONE = ("b1", "b2", "b3", "beta", "decay", "decay_rate", "momentum", "rho")
_OF_SHAPES = ("min_dim_size_to_factor",)
"""Numbers that decide what arrays an optimizer's state has: no value of theirs can be traced."""
_NOT_BELOW_ZERO = ("weight_decay", "weight_decay_rate", "eps_root")
_ABOVE_ZERO = ("eps",)
"""It keeps a weight without a gradient from 0 / 0."""


def _check_options(table: Optimizer, function: Callable[..., Any]) -> None:
    others = Optimizer.model_fields
    own.check_options(function, table.options, "optimizer", first=1, others=others)
    kinds = _kinds(function)
    lines = []
    for name, value in table.options.items():
        setting = f"optimizer.{name} = {value!r}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        problem = _of_another_kind(value, kinds.get(name, ""))
        if problem:
            lines.append(f"{setting}; {problem}")
        elif number and name in _BELOW_ONE and not 0 <= value < 1:
            lines.append(f"{setting}; must be at least 0 and below 1")
        elif number and name in _ABOVE_ZERO and value <= 0:
            lines.append(f"{setting}; must be above 0")
        elif number and name in _NOT_BELOW_ZERO and value < 0:
            lines.append(f"{setting}; must be at least 0")
    if lines:
        raise UserError("\n".join(lines))


def _kinds(function: Callable[..., Any]) -> dict[str, str]:
    """The kind of value of each argument after the learning rate, where it is known.

    A default tells; where that is None, as of optax's ``momentum``, the annotation does.
    """
    kinds = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default, annotation = parameter.default, str(parameter.annotation)
        if isinstance(default, bool | str):
            kinds[parameter.name] = type(default).__name__
        elif isinstance(default, int | float):
            whole = isinstance(default, int) and parameter.annotation in (int, "int")
            kinds[parameter.name] = "int" if whole else "float"
        elif default is None and "Callable" not in annotation:
            types = [kind for kind in ("bool", "float", "int", "str") if kind in annotation]
            if "float" in types:  # a number, where an array is possible too
                types = ["float"]
            kinds |= {parameter.name: types[0]} if len(types) == 1 else {}
    return kinds


def _of_another_kind(value: Any, kind: str) -> str:
    """Requirement that a value violates; "" if none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "bool" if not isinstance(value, bool):
            return "must be true or false"
        case "int" if not number or isinstance(value, float):
            return "must be a whole number"
        case "float" if not number:
            return "must be a number"
        case "str" if not isinstance(value, str):
            return "must be text"
    return ""


def _with_numbers(
    table: Optimizer, arguments: dict[str, Any], numbers: dict[str, Any]
) -> Optimizer:
    """The table with other numbers, which are not checked: they may be traced.

    Raises:
      UserError: the optimizer has no such number.
    """
    values = {**arguments, **table.options}
    names = [
        name
        for name, value in values.items()
        if type(value) in (int, float) and name not in _OF_SHAPES
    ]
    for name in numbers:
        if name not in (*names, "warmup_steps", "clip_norm"):
            raise unknown_choice("optimizer", name, [*names, "warmup_steps", "clip_norm"])
    return table.model_copy(update=numbers)
