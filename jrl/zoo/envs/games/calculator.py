"""A calculator tool: the policy may have one operation worked out for it in each turn.

After the prompt "12*7-5:" an episode may read "12*7#84 84-5#79 =79#" without the spaces, where "#"
stands for the stop token that ends a turn: two calls with their results, and an answer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.data.tasks.base import Problem as Expression
from jrl.data.tasks.base import Text, check_range, integers, join, number, split_generator
from jrl.episodes.device import Env, Turn
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("0123456789+-*=!:")
DIGIT_0, PLUS, MINUS, TIMES, ANSWER, ERROR, COLON = TOKENIZER.encode("0+-*=!:")
OPERATIONS = np.array([PLUS, MINUS, TIMES], np.int32)
DIGITS = 9
"""Of the longest number; the greatest are below 2**31."""
LARGEST = 10**DIGITS - 1


class Work(struct.PyTreeNode):
    """A question's numbers [K + 1] and operations [K]; value [] of the first done [] of these."""

    numbers: Array
    operations: Array
    value: Array
    done: Array


class Operation(NamedTuple):
    """Two numbers and the token of the operation between them, [] int32, and whether it is one."""

    left: Array
    operation: Array
    right: Array
    valid: Array


def calculator(operations: int = 2, digits: int = 2) -> Env:
    """A point for the right answer to a chain of operations, worked out from left to right.

    A turn "12*7" calls the tool, which replies with the result; one that is no call, or whose
    result has more than nine digits, gets "!". A turn that begins with "=" is the answer and ends
    the episode.

    Args:
      operations: K, of each question, 1 to 3.
      digits: the most digits of its numbers, 1 or 2.

    Returns:
      The Env. The identity of a state is how many operations the policy has had worked out. The
      splits "train" and "eval" have no question in common.

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.operations", operations, 1, 3)
    check_range("data.digits", digits, 1, 2)
    width = operations * (digits + 1) + digits + 1
    longest = 2 * DIGITS + 4  # two signs, an operation, and the stop token

    def draw(bits: Array) -> tuple[Expression, Array]:
        numbers = integers(bits[: operations + 1], 1, 10**digits)
        signs = jnp.asarray(OPERATIONS)[integers(bits[operations + 1 :], 0, 3)]
        pieces = [decimal(numbers[0])]
        for i in range(operations):
            pieces += [_token(signs[i]), decimal(numbers[i + 1])]
        tokens, length = join(width, *pieces, _token(jnp.int32(COLON)))
        question = jnp.concatenate([numbers, signs])
        return Expression(tokens, length, question), question

    generate = split_generator(draw, 2 * operations + 1)

    def init(key: Array, split: str) -> tuple[Work, Array, Array]:
        problem = generate(key, split)
        numbers, signs = problem.answer[: operations + 1], problem.answer[operations + 1 :]
        return Work(numbers, signs, numbers[0], jnp.int32(0)), problem.tokens, problem.length

    def step(work: Work, tokens: Array, length: Array, key: Array) -> tuple[Work, Turn]:
        call = parse_call(tokens, length)
        result, fits = worked_out(call)
        result_text, count = join(DIGITS + 1, decimal(result))
        answers = tokens[0] == ANSWER
        answer_given, valid = parse_number(tokens, jnp.int32(1), length - 1)
        right = answers & valid & (answer_given == solved(work)) & (tokens[length - 1] == STOP_ID)
        at = jnp.minimum(work.done, operations - 1)
        ahead = fits & (work.done < operations) & (call.left == work.value)
        ahead &= (call.operation == work.operations[at]) & (call.right == work.numbers[at + 1])
        error = jnp.zeros(DIGITS + 1, jnp.int32).at[0].set(ERROR)
        after = work.replace(
            value=jnp.where(ahead, result, work.value), done=work.done + ahead.astype(jnp.int32)
        )
        return after, Turn(
            reply=jnp.where(fits, result_text, error),
            count=jnp.where(fits, count, 1).astype(jnp.int32),
            reward=right.astype(jnp.float32),
            done=answers,
            success=right,
            state_id=work.done,
        )

    def solved(work: Work) -> Array:
        value = work.numbers[0]
        for i in range(operations):
            value = apply(work.operations[i], value, work.numbers[i + 1])
        return value

    def solution(work: Work) -> tuple[Array, Array]:
        at, stop = jnp.minimum(work.done, operations - 1), _token(jnp.int32(STOP_ID))
        value = decimal(work.value)
        call_text = join(
            longest, value, _token(work.operations[at]), decimal(work.numbers[at + 1]), stop
        )
        answer = join(longest, _token(jnp.int32(ANSWER)), value, stop)
        over = work.done >= operations
        return jnp.where(over, answer[0], call_text[0]), jnp.where(over, answer[1], call_text[1])

    return Env(
        name="calculator",
        init=init,
        step=step,
        turns=operations + 2,
        prompt_tokens=width,
        turn_tokens=longest,
        reply_tokens=DIGITS + 1,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )


def apply(operation: Array, left: Array, right: Array) -> Array:
    """``left operation right``, int32."""
    least = jnp.where(operation == MINUS, left - right, left * right)
    return jnp.where(operation == PLUS, left + right, least)


def worked_out(call: Operation) -> tuple[Array, Array]:
    """(the result [] int32, whether the call is valid and the result has at most nine digits)."""
    # Sums stay below 2**31. Rounding in float32 is less than a part in 2**23, so no product wraps.
    product = call.left.astype(jnp.float32) * call.right.astype(jnp.float32)
    small = (call.operation != TIMES) | (jnp.abs(product) < 2e9)
    result = apply(call.operation, call.left, call.right)
    fits = call.valid & small & (jnp.abs(result) <= LARGEST)
    return jnp.where(fits, result, 0), fits


def parse_call(tokens: Array, length: Array) -> Operation:
    """A turn "12*-7" with its stop token as a call; its first sign but at the start counts."""
    place = jnp.arange(tokens.shape[0])
    sign = (tokens == PLUS) | (tokens == MINUS) | (tokens == TIMES)
    at = jnp.argmax(sign & (place > 0)).astype(jnp.int32)
    left, first = parse_number(tokens, jnp.int32(0), at)
    right, second = parse_number(tokens, at + 1, length - 1)
    ends = tokens[length - 1] == STOP_ID
    return Operation(left, tokens[at], right, (at > 0) & first & second & ends)


def parse_number(tokens: Array, begin: Array, end: Array) -> tuple[Array, Array]:
    """(the number in columns ``begin`` to ``end`` - 1, whether it is one, of 1 to 9 digits)."""
    place = jnp.arange(tokens.shape[0])
    negative = tokens[jnp.clip(begin, 0, tokens.shape[0] - 1)] == MINUS
    begin = begin + negative
    inside, figures = (place >= begin) & (place < end), tokens - DIGIT_0
    valid = jnp.all(~inside | ((figures >= 0) & (figures < 10)))
    valid &= (end > begin) & (end - begin <= DIGITS)
    power = jnp.where(inside & valid, 10 ** jnp.clip(end - 1 - place, 0, DIGITS - 1), 0)
    value = jnp.sum(figures * power, dtype=jnp.int32)
    return jnp.where(negative, -value, value), valid


def decimal(value: Array) -> Text:
    """The decimal form of an integer of at most nine digits."""
    return number(value, DIGITS, zero=DIGIT_0, minus=MINUS)


def _token(token: Array) -> Text:
    return Text(jnp.asarray(token, jnp.int32)[None], jnp.ones(1, bool))
