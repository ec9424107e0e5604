"""Countdown: reach a target with given numbers, each used at most once; many answers are right."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.data.tasks.base import (
    ARROW,
    COLON,
    COMMA,
    DIGIT_0,
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
)
from jrl.data.tasks.numbers import apply, bounded, check_operations
from jrl.models.tokenizer import STOP_ID

HIGHEST = 99
"""Targets, and all intermediate results of the known solution, are from 1 to this."""
LEGAL_POINTS = 0.2
"""Partial credit for a legal expression with another value."""


class Reading(NamedTuple):
    """The state of reading an expression; all [] except ``unused``.

    Attributes:
      value: int32, of the expression so far.
      operation: int32, the token of the operation whose right side is being read.
      current: int32, the number being read.
      digits: bool, True once it has a digit.
      unused: [K] bool, which of the given numbers may still be used.
      legal: bool, False after the first mistake.
      done: bool, True after the stop token.
    """

    value: Array
    operation: Array
    current: Array
    digits: Array
    unused: Array
    legal: Array
    done: Array


def _read(state: Reading, token: Array, numbers: Array) -> Reading:
    """The reading after one more token."""
    is_digit = (token >= DIGIT_0) & (token < DIGIT_0 + 10)
    is_stop = token == STOP_ID
    ends_number = is_stop | (token == PLUS) | (token == MINUS) | (token == TIMES)
    grown = jnp.minimum(state.current * 10 + token - DIGIT_0, 10 * (HIGHEST + 1))
    leading_zero = state.digits & (state.current == 0)

    usable = state.unused & (numbers == state.current)
    used = (jnp.arange(numbers.shape[0]) == jnp.argmax(usable)) & ends_number
    value = apply(state.operation, state.value, state.current)
    legal_digit = is_digit & ~leading_zero
    legal_end = ends_number & state.digits & usable.any()
    return Reading(
        # A mistake makes the value meaningless; the bound only keeps int32 from wrapping.
        value=jnp.where(ends_number, jnp.clip(value, -(10**6), 10**6), state.value),
        operation=jnp.where(ends_number, token, state.operation),
        current=jnp.where(is_digit, grown, 0),
        digits=is_digit,
        unused=state.unused & ~used,
        legal=state.legal & ~state.done & (legal_digit | legal_end),
        done=state.done | is_stop,
    )


def read_expression(numbers: Array, tokens: Array, length: Array) -> tuple[Array, Array]:
    """The value of an expression, worked out from left to right ("2+3*4" is 20).

    Args:
      numbers: [K] int32, what may be used, each at most once.
      tokens: [T] int32; numbers without leading zeros, with "+", "-" or "*" between them, and the
        stop token last.
      length: [] int32, tokens of the expression, the stop token included.

    Returns:
      (value [] int32, legal [] bool); the value means nothing unless legal. Legal means: grammar
      right, only the given numbers used, and the stop token at ``length - 1`` and nowhere else.
    """
    chex.assert_rank([numbers, tokens, length], [1, 1, 0])
    start = Reading(
        value=jnp.int32(0),
        operation=jnp.int32(PLUS),
        current=jnp.int32(0),
        digits=jnp.bool_(False),
        unused=jnp.ones(numbers.shape, bool),
        legal=jnp.bool_(True),
        done=jnp.bool_(False),
    )

    def step(state: Reading, inputs: tuple[Array, Array]) -> tuple[Reading, None]:
        token, live = inputs
        after = _read(state, token, numbers)
        return jax.tree.map(lambda new, old: jnp.where(live, new, old), after, state), None

    live = jnp.arange(tokens.shape[0]) < length
    end, _ = jax.lax.scan(step, start, (tokens.astype(jnp.int32), live))
    return end.value, end.legal & end.done & (length <= tokens.shape[0])


def countdown(difficulty: int = 3, largest: int = 9, operations: str = "+-*") -> Task:
    """Reach a target: "3,7,5:22>" may be followed by "3*5+7".

    Every given number may be used at most once. Expressions are worked out from left to right, as
    on a pocket calculator, so "7+3*5" is 50.

    Args:
      difficulty: given numbers, 2 to 6.
      largest: numbers are from 1 to this, 5 to 49. Targets are from 1 to 99.
      operations: the operations that problems are made with; completions may use all of "+-*".
        One that would leave 1 to 99 is replaced by "+" or "-".

    Returns:
      The Task. Problems with the same target and the same numbers in any order count as the same.
      ``partial`` gives 0.2 for a legal expression with another value. ``answer`` holds the target,
      the numbers and one solution.
    """
    check_range("data.difficulty", difficulty, 2, 6)
    check_range("largest", largest, 5, HIGHEST // 2)
    choices = check_operations(operations)
    digits = len(str(largest))
    prompt_tokens = difficulty * (digits + 1) + 3
    completion_tokens = difficulty * (digits + 1)

    def draw(bits: Array) -> tuple[Problem, Array]:
        number_bits, order_bits, rest = jnp.split(bits, [difficulty, 2 * difficulty])
        used = integers(number_bits, 1, largest + 1)
        sampled = choices[integers(rest[1:], 0, len(operations))]
        count = integers(rest[0], 2, difficulty + 1)

        def step(value: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            operation, operand, position = inputs
            operation, result = bounded(operation, value, operand, 1, HIGHEST)
            return jnp.where(position < count, result, value), operation

        positions = jnp.arange(1, difficulty)
        target, expressions = jax.lax.scan(step, used[0], (sampled, used[1:], positions))
        ends = jnp.append(expressions, STOP_ID)
        ends = jnp.where(jnp.arange(difficulty) == count - 1, STOP_ID, ends).astype(jnp.int32)
        expression = listed(used, digits, ends)
        live = expression.live & (jnp.arange(expression.live.shape[0]) < count * (digits + 2))
        solution, _ = join(completion_tokens, expression._replace(live=live))

        numbers = used[jnp.argsort(order_bits)]
        commas = jnp.array([COMMA] * (difficulty - 1) + [COLON], jnp.int32)
        aim = listed(target[None], 2, jnp.array([ARROW], jnp.int32))
        tokens, length = join(prompt_tokens, listed(numbers, digits, commas), aim)
        answer = jnp.concatenate([target[None], numbers, solution])
        return Problem(tokens, length, answer), jnp.append(jnp.sort(numbers), target)

    def judged(problem: Problem, tokens: Array, length: Array) -> tuple[Array, Array]:
        numbers = problem.answer[1 : difficulty + 1]
        value, legal = read_expression(numbers, tokens, length)
        return legal & (value == problem.answer[0]), legal

    def verify(problem: Problem, tokens: Array, length: Array) -> Array:
        right, _ = judged(problem, tokens, length)
        return right.astype(jnp.float32)

    def partial(problem: Problem, tokens: Array, length: Array) -> Array:
        right, legal = judged(problem, tokens, length)
        return jnp.where(right, 1.0, jnp.where(legal, LEGAL_POINTS, 0.0)).astype(jnp.float32)

    def solution(problem: Problem) -> tuple[Array, Array]:
        tokens = problem.answer[difficulty + 1 :]
        return tokens, (jnp.argmax(tokens == STOP_ID) + 1).astype(jnp.int32)

    return make_task(
        "countdown",
        difficulty=difficulty,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        draw=draw,
        words=3 * difficulty,
        verify=verify,
        partial=partial,
        solution=solution,
    )
