"""The optimiser of a run, from optax, as its configuration describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jrl.config_unions import Adafactor, Adam, AdamW, Lion, Optimizer, OptimizerTable, Sgd
from jrl.errors import choose
from jrl.methods.domains import is_zero


def schedule(table: OptimizerTable, peak: Any, updates: int, warmup: Any) -> optax.Schedule:
    """The learning rate at each update: a linear rise, then constant, cosine or linear to 0.

    Args:
      table: names the shape.
      peak: the learning rate after the rise; may be traced.
      updates: optimiser updates of the whole run.
      warmup: updates of the rise; may be traced.
    """
    known = isinstance(warmup, int)
    length = max(updates - warmup, 1) if known else jnp.maximum(updates - warmup, 1)
    over = max(warmup, 1) if known else jnp.maximum(warmup, 1)

    def rate(count: Any) -> Any:
        rise = 1.0 if is_zero(warmup) else jnp.minimum((count + 1) / over, 1.0)
        done = jnp.clip((count - warmup) / length, 0.0, 1.0)
        fall = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + jnp.cos(jnp.pi * done))}
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
    """

    def build(learning_rate: Any, **numbers: Any) -> optax.GradientTransformation:
        given = _with_numbers(table, numbers)
        warmup = given.warmup_steps * updates_per_step
        rate = schedule(given, learning_rate, steps * updates_per_step, warmup)
        optimizer = _optimizer(given, rate)
        if is_zero(given.clip_norm):
            return optimizer
        return optax.chain(optax.clip_by_global_norm(given.clip_norm), optimizer)

    return build


def _with_numbers(table: Optimizer, numbers: dict[str, Any]) -> Optimizer:
    """The table with other numbers, which are not checked: they may be traced.

    Raises:
      UserError: the optimizer has no such number.
    """
    known = [name for name in type(table).model_fields if name not in _NO_NUMBERS]
    for name in numbers:
        if name not in known:
            raise choose("optimizer", name, known)
    return table.model_copy(update=numbers)


_NO_NUMBERS = ("name", "schedule", "learning_rate")
"""Words, and the rate, which is an argument of its own."""


def _optimizer(table: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    match table:
        case AdamW(weight_decay=decay, b1=b1, b2=b2, eps=eps):
            return optax.adamw(rate, b1, b2, eps, weight_decay=decay)
        case Adam(b1=b1, b2=b2, eps=eps):
            return optax.adam(rate, b1, b2, eps)
        case Sgd(b1=b1):
            return optax.sgd(rate, momentum=None if is_zero(b1) else b1)
        case Lion(weight_decay=decay, b1=b1, b2=b2):
            return optax.lion(rate, b1, b2, weight_decay=decay)
        case Adafactor(weight_decay=decay, eps=eps):
            return optax.adafactor(
                rate, eps=eps, weight_decay_rate=None if is_zero(decay) else decay
            )
