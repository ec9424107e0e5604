"""Numbers that a compiled run takes as arguments, so that ``vmap`` can sweep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.types import Array

Hyperparameters = Mapping[str, Array | float]
"""Names -> numbers, traced or not: "learning_rate"; "temperature"; "objective.NAME", a coefficient
of the method; "optimizer.NAME", a number of the optimizer."""


class Chosen(NamedTuple):
    """Hyperparameters by whom they concern.

    Attributes:
      learning_rate: of the optimizer.
      optimizer: its other numbers, by name.
      objective: coefficients of the method, by name.
      sampling_params: the distribution that completions are drawn from.
    """

    learning_rate: Array | float
    optimizer: dict[str, Any]
    objective: dict[str, Any]
    sampling_params: SamplingParams


def choose_hyperparameters(numbers: Hyperparameters) -> Chosen:
    """Sorts what a run is given.

    Raises:
      UserError: an unknown name, or no learning rate.
    """
    parts: dict[str, dict[str, Any]] = {"optimizer": {}, "objective": {}}
    for name, value in numbers.items():
        table, dot, key = name.partition(".")
        if dot and table in parts and key != "learning_rate":
            parts[table][key] = value
        elif name not in ("learning_rate", "temperature"):
            raise UserError(
                f"hyperparameters: {name!r} is unknown; choose from learning_rate, temperature, "
                "objective.NAME (a coefficient of the method) and optimizer.NAME"
            )
    if "learning_rate" not in numbers:
        raise UserError("hyperparameters: learning_rate is missing")
    sampling_params = make_sampling_params()
    if "temperature" in numbers:
        # Put in afterwards, since it may be traced: a run for each of many temperatures.
        temperature = jnp.asarray(numbers["temperature"], jnp.float32)
        sampling_params = sampling_params.replace(temperature=temperature)
    return Chosen(numbers["learning_rate"], parts["optimizer"], parts["objective"], sampling_params)


def method_with(method: Method | Callable[..., Method], coefficients: Mapping[str, Any]) -> Method:
    """The method, with these coefficients where it is still a function of them.

    Raises:
      UserError: it is a value already and there are coefficients, or it does not take one of them.
    """
    if not isinstance(method, Method):
        return method(**{name: _real(value) for name, value in coefficients.items()})
    if coefficients:
        raise UserError(
            f"hyperparameters: objective.{next(iter(coefficients))} is given, and the method's "
            "coefficients are fixed; pass its function as method, such as find_method('grpo')"
        )
    return method


def _real(value: Any) -> Any:
    """Numbers as arrays: a coefficient that may be anything is not taken out where it is 0."""
    return jnp.asarray(value, jnp.float32) if isinstance(value, float) else value
