"""Tasks with one right completion: sorting, arithmetic, sequences and a chain of steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.data.tasks.base import (
    COMMA,
    DIGIT_0,
    EQUALS,
    GOES,
    MINUS,
    PLUS,
    TIMES,
    Array,
    Problem,
    Task,
    Text,
    check_range,
    join,
    literal,
    make_task,
    number,
)
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID

OPERATIONS = {"+": PLUS, "-": MINUS, "*": TIMES}


def check_operations(operations: str) -> Array:
    """[K] int32, the tokens of the operations in a text like "+-*"; an error names any other."""
    if not operations or set(operations) - set(OPERATIONS):
        raise UserError(f"task.operations = {operations!r}; choose from the characters + - *")
    return jnp.array([OPERATIONS[c] for c in operations], jnp.int32)


def apply(operation: Array, left: Array, right: Array) -> Array:
    """``left operation right`` for the token of an operation, int32."""
    return jnp.where(
        operation == PLUS,
        left + right,
        jnp.where(operation == MINUS, left - right, left * right),
    )


def sorting(difficulty: int = 5) -> Task:
    """Write the digits in ascending order: "50352>" is followed by "02355".

    Args:
      difficulty: digits to sort, 3 to 32. There are ``10**difficulty`` problems.

    Returns:
      The Task; a problem's identity is its prompt.
    """
    check_range("task.difficulty", difficulty, 3, 32)

    def draw(key: Array) -> tuple[Problem, Array]:
        digits = jax.random.randint(key, (difficulty,), 0, 10, jnp.int32) + DIGIT_0
        tokens = jnp.append(digits, GOES)
        answer = jnp.append(jnp.sort(digits), STOP_ID)
        return Problem(tokens, jnp.int32(difficulty + 1), answer), digits

    size = difficulty + 1
    return make_task(
        "sorting", difficulty=difficulty, prompt_tokens=size, completion_tokens=size, draw=draw
    )


def arithmetic(difficulty: int = 2, operations: str = "+-") -> Task:
    """Work out one operation on two numbers: "12-40=" is followed by "-28".

    Args:
      difficulty: the most digits of each number, 1 to 4.
      operations: the operations to draw from, a text such as "+" or "+-*".

    Returns:
      The Task. Problems that differ only in the order of "+" or "*" count as the same.
    """
    check_range("task.difficulty", difficulty, 1, 4)
    choices = check_operations(operations)
    prompt_tokens, digits = 2 * difficulty + 2, 2 * difficulty

    def draw(key: Array) -> tuple[Problem, Array]:
        number_key, operation_key = jax.random.split(key)
        left, right = jax.random.randint(number_key, (2,), 0, 10**difficulty, jnp.int32)
        operation = jax.random.choice(operation_key, choices)
        prompt = join(
            prompt_tokens,
            _unsigned(left, difficulty),
            Text(operation[None], jnp.int32(1)),
            _unsigned(right, difficulty),
            literal(EQUALS),
        )
        value = apply(operation, left, right)
        answer = join(digits + 2, number(value, digits), literal(STOP_ID))
        swap = (operation != MINUS) & (left > right)
        identity = jnp.stack(
            [operation, jnp.where(swap, right, left), jnp.where(swap, left, right)]
        )
        return Problem(prompt.tokens, prompt.length, answer.tokens), identity

    return make_task(
        "arithmetic",
        difficulty=difficulty,
        prompt_tokens=prompt_tokens,
        completion_tokens=digits + 2,
        draw=draw,
    )


def _unsigned(value: Array, digits: int) -> Text:
    """The decimal form of a number that is not negative, in ``digits`` places."""
    text = number(value, digits)
    return Text(text.tokens[:digits], text.length)


def _listed(size: int, values: Array, digits: int, end: int) -> Text:
    """Comma-separated numbers that are not negative, then the token ``end``."""
    pieces: list[Text] = []
    for i in range(values.shape[0]):
        pieces += [_unsigned(values[i], digits), literal(COMMA)]
    return join(size, *pieces[:-1], literal(end))
