"""Tasks with one right completion: sorting, arithmetic, sequences and a chain of steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.data.tasks.base import (
    ARROW,
    COMMA,
    DIGIT_0,
    EQUALS,
    MINUS,
    PLUS,
    TIMES,
    Array,
    Problem,
    Task,
    check_range,
    integers,
    join,
    listed,
    make_task,
    number,
    text,
)
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID

OPERATIONS = {"+": PLUS, "-": MINUS, "*": TIMES}


def check_operations(operations: str) -> Array:
    """[K] int32, the tokens of the operations in a text like "+-*"; an error names any other."""
    if not operations or set(operations) - set(OPERATIONS):
        raise UserError(f"operations = {operations!r}; choose from the characters + - *")
    return jnp.array([OPERATIONS[c] for c in operations], jnp.int32)


def apply(operation: Array, left: Array, right: Array) -> Array:
    """``left operation right`` for the token of an operation, int32."""
    return jnp.where(
        operation == PLUS,
        left + right,
        jnp.where(operation == MINUS, left - right, left * right),
    )


def bounded(
    operation: Array, left: Array, right: Array, low: int, high: int
) -> tuple[Array, Array]:
    """An operation whose result stays in a range, replaced by "+" or "-" where it would not.

    Args:
      operation: [] int32, the token of "+", "-" or "*".
      left: [] int32, from ``low`` to ``high``.
      right: [] int32, from 1 to ``high / 2``; ``left`` likewise when below it.
      low: the least result, 0 or 1.
      high: the greatest result.

    Returns:
      (operation [] int32, result [] int32).
    """
    operation = jnp.where((operation == TIMES) & (left * right > high), PLUS, operation)
    operation = jnp.where((operation == PLUS) & (left + right > high), MINUS, operation)
    operation = jnp.where((operation == MINUS) & (left - right < low), PLUS, operation)
    return operation, apply(operation, left, right)


def sorting(difficulty: int = 5) -> Task:
    """Write the digits in ascending order: "50352>" is followed by "02355".

    Args:
      difficulty: digits to sort, 3 to 32. There are ``10**difficulty`` problems.

    Returns:
      The Task; a problem's identity is its prompt.
    """
    check_range("data.difficulty", difficulty, 3, 32)

    def draw(bits: Array) -> tuple[Problem, Array]:
        digits = integers(bits, 0, 10) + DIGIT_0
        tokens = jnp.append(digits, ARROW)
        answer = jnp.append(jnp.sort(digits), STOP_ID)
        return Problem(tokens, jnp.int32(difficulty + 1), answer), digits

    size = difficulty + 1
    return make_task(
        "sorting",
        difficulty=difficulty,
        prompt_tokens=size,
        completion_tokens=size,
        draw=draw,
        words=difficulty,
    )


def arithmetic(difficulty: int = 2, operations: str = "+-") -> Task:
    """Work out one operation on two numbers: "12-40=" is followed by "-28".

    Args:
      difficulty: the most digits of each number, 1 to 4.
      operations: the operations to draw from, a text such as "+" or "+-*".

    Returns:
      The Task. Problems that differ only in the order of "+" or "*" count as the same.
    """
    check_range("data.difficulty", difficulty, 1, 4)
    choices = check_operations(operations)
    prompt_tokens, digits = 2 * difficulty + 2, 2 * difficulty

    def draw(bits: Array) -> tuple[Problem, Array]:
        pair = integers(bits[:2], 0, 10**difficulty)
        operation = choices[integers(bits[2], 0, len(operations))]
        ends = jnp.stack([operation, jnp.int32(EQUALS)])
        tokens, length = join(prompt_tokens, listed(pair, difficulty, ends))
        value = number(apply(operation, *pair), digits)
        answer, _ = join(digits + 2, value, text(STOP_ID))
        same = jnp.where(operation == MINUS, pair, jnp.sort(pair))
        return Problem(tokens, length, answer), jnp.append(same, operation)

    return make_task(
        "arithmetic",
        difficulty=difficulty,
        prompt_tokens=prompt_tokens,
        completion_tokens=digits + 2,
        draw=draw,
        words=3,
    )


def sequence(difficulty: int = 2, next_terms: int = 1) -> Task:
    """Continue a sequence: "4,7,10,13,16>" is followed by "19".

    Five terms are shown. The rules, in order: a constant step; a step that grows by a constant;
    two steps in turn; each term the sum of the two before it. Five terms settle which one it is.

    Args:
      difficulty: how many of the four rules to draw from, 1 to 4.
      next_terms: terms to write, 1 to 3, with commas between them.

    Returns:
      The Task; a problem's identity is its prompt. Numbers have at most three digits.
    """
    check_range("data.difficulty", difficulty, 1, 4)
    check_range("next_terms", next_terms, 1, 3)
    prompt_terms, digits = 5, 3
    count = prompt_terms + next_terms

    def draw(bits: Array) -> tuple[Problem, Array]:
        rule = integers(bits[0], 0, difficulty)
        first = integers(bits[1], 0, 100)
        one, two = integers(bits[2], 1, 31), integers(bits[3], 1, 31)
        growth = integers(bits[4], 1, 6)
        position = jnp.arange(count - 1)
        steps = jnp.stack(
            [
                jnp.full_like(position, one),
                one + growth * position,
                jnp.where(position % 2, two, one),
            ]
        )
        stepped = jnp.append(first, first + jnp.cumsum(steps[jnp.minimum(rule, 2)]))
        sums = [one, two]
        while len(sums) < count:
            sums.append(sums[-1] + sums[-2])
        terms = jnp.where(rule == 3, jnp.stack(sums), stepped).astype(jnp.int32)
        prompt = listed(terms[:prompt_terms], digits, _separators(prompt_terms, ARROW))
        rest = listed(terms[prompt_terms:], digits, _separators(next_terms, STOP_ID))
        tokens, length = join(prompt_terms * (digits + 1), prompt)
        answer, _ = join(next_terms * (digits + 1), rest)
        return Problem(tokens, length, answer), terms[:prompt_terms]

    return make_task(
        "sequence",
        difficulty=difficulty,
        prompt_tokens=prompt_terms * (digits + 1),
        completion_tokens=next_terms * (digits + 1),
        draw=draw,
        words=5,
    )


def chain(difficulty: int = 3, operations: str = "+-*") -> Task:
    """Work through several steps, writing each result: "7+5-3*2>" is followed by "12,9,18".

    The operations are done from left to right, as on a pocket calculator.

    Args:
      difficulty: operations in the chain, 2 to 16; every operand is from 1 to 9.
      operations: the operations to draw from, a text such as "+-". One that would leave the range
        0 to 99 is replaced by "+" or "-".

    Returns:
      The Task; a problem's identity is its prompt.
    """
    check_range("data.difficulty", difficulty, 2, 16)
    choices = check_operations(operations)
    prompt_tokens = 2 * difficulty + 2

    def draw(bits: Array) -> tuple[Problem, Array]:
        operands = integers(bits[: difficulty + 1], 1, 10)
        sampled = choices[integers(bits[difficulty + 1 :], 0, len(operations))]

        def step(value: Array, inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            operation, result = bounded(inputs[0], value, inputs[1], 0, 99)
            return result, (operation, result)

        _, (operations_text, results) = jax.lax.scan(step, operands[0], (sampled, operands[1:]))
        signs = jnp.append(operations_text, ARROW)
        tokens = jnp.stack([operands + DIGIT_0, signs], axis=1).reshape(-1).astype(jnp.int32)
        steps = listed(results, 2, _separators(difficulty, STOP_ID))
        answer, _ = join(3 * difficulty, steps)
        return Problem(tokens, jnp.int32(prompt_tokens), answer), tokens

    return make_task(
        "chain",
        difficulty=difficulty,
        prompt_tokens=prompt_tokens,
        completion_tokens=3 * difficulty,
        draw=draw,
        words=2 * difficulty + 1,
    )


def _separators(count: int, end: int) -> Array:
    """[count] int32: commas, and ``end`` after the last number."""
    return jnp.array([COMMA] * (count - 1) + [end], jnp.int32)
