"""Guess the number: the environment says whether the secret is greater or smaller.

After the prompt "31:" for the numbers 0 to 31 an episode may read "15>23<19": guesses of as many
digits as the greatest number has, each but the right one answered.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("0123456789<>?:")
DIGIT_0, SMALLER, GREATER, INVALID = TOKENIZER.encode("0<>?")


class Secret(struct.PyTreeNode):
    """The secret, and the least and greatest number that the answers leave; all [] int32."""

    secret: Array
    low: Array
    high: Array


def guess_number(numbers: int = 32, turns: int = 0, cost: float = 0.05) -> Env:
    """A point for the secret number, less ``cost`` for each guess before it.

    Args:
      numbers: the secret is one of 0 to ``numbers`` - 1, all equally likely in both splits; 2 to
        1000.
      turns: the most guesses; 0 for two more than binary search ever needs.
      cost: points, at least 0.

    Returns:
      The Env. The identity of a state is what the answers so far leave, the least and the greatest
      number that the secret may be. A turn that is no number below ``numbers`` is answered by "?".

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.numbers", numbers, 2, 1000)
    check_range("data.turns", turns, 0, 1000)
    if not isinstance(cost, int | float) or isinstance(cost, bool) or not 0 <= cost < math.inf:
        raise UserError(f"data.cost = {cost!r}; give points, at least 0")
    prompt = jnp.array(TOKENIZER.encode(f"{numbers - 1}:"), jnp.int32)
    digits = prompt.shape[0] - 1
    powers = 10 ** jnp.arange(digits)[::-1]

    def init(key: Array, split: str) -> tuple[Secret, Array, Array]:
        secret = jax.random.randint(key, (), 0, numbers)
        return Secret(secret, jnp.int32(0), jnp.int32(numbers - 1)), prompt, jnp.int32(digits + 1)

    def step(state: Secret, tokens: Array, length: Array, key: Array) -> tuple[Secret, Turn]:
        figures = tokens - DIGIT_0
        guess = jnp.sum(figures * powers)
        valid = jnp.all((figures >= 0) & (figures < 10)) & (guess < numbers)
        solved = valid & (guess == state.secret)
        greater, smaller = valid & (guess < state.secret), valid & (guess > state.secret)
        reply = jnp.where(greater, GREATER, jnp.where(smaller, SMALLER, INVALID))
        after = state.replace(
            low=jnp.where(greater, jnp.maximum(state.low, guess + 1), state.low),
            high=jnp.where(smaller, jnp.minimum(state.high, guess - 1), state.high),
        )
        return after, Turn(
            reply=reply[None].astype(jnp.int32),
            count=jnp.int32(1),
            reward=jnp.where(solved, 1.0, -cost).astype(jnp.float32),
            done=solved,
            success=solved,
            state_id=state.low * numbers + state.high,
        )

    def solution(state: Secret) -> tuple[Array, Array]:
        middle = (state.low + state.high) // 2
        return (DIGIT_0 + middle // powers % 10).astype(jnp.int32), jnp.int32(digits)

    return Env(
        name="guess_number",
        init=init,
        step=step,
        turns=turns or numbers.bit_length() + 2,
        prompt_tokens=digits + 1,
        turn_tokens=digits,
        reply_tokens=1,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )
