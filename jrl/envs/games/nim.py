"""Nim, normal play: two players take from one heap at a time; who takes the last object wins.

After the prompt "343:", the heaps, the turn "a2" takes 2 objects from heap a, and the reply "b4103"
says that the other player took 4 from heap b, which leaves 1, 0 and 3.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from jrl.data.tasks.base import check_range
from jrl.envs.base import Env, Turn
from jrl.errors import choose
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("abcd0123456789:")
HEAP_A, DIGIT_0, COLON = TOKENIZER.encode("a0:")
OPPONENTS = ("perfect", "random")


def nim(heaps: int = 3, most: int = 3, opponent: str = "perfect") -> Env:
    """A point for the player that takes the last object; an illegal move loses.

    The policy moves first, from heaps of 1 to ``most`` objects each, all equally likely in both
    splits. It can force a win unless the heaps' exclusive or is 0, and a perfect player punishes
    every mistake; so the share of winnable starts is the best score there is.

    Args:
      heaps: 1 to 4.
      most: objects in a heap at first, 1 to 9.
      opponent: "perfect" leaves an exclusive or of 0 where it can, and takes one object from the
        largest heap where it cannot; "random" draws one of the legal moves.

    Returns:
      The Env. The identity of a state is its heaps.

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.heaps", heaps, 1, 4)
    check_range("data.most", most, 1, 9)
    if opponent not in OPPONENTS:
        raise choose("data.opponent", opponent, OPPONENTS)
    base = (most + 1) ** jnp.arange(heaps)

    def init(key: Array, split: str) -> tuple[Array, Array, Array]:
        left = jax.random.randint(key, (heaps,), 1, most + 1)
        prompt = jnp.append(left + DIGIT_0, COLON).astype(jnp.int32)
        return left, prompt, jnp.int32(heaps + 1)

    def step(left: Array, tokens: Array, length: Array, key: Array) -> tuple[Array, Turn]:
        heap, taken = tokens[0] - HEAP_A, tokens[1] - DIGIT_0
        inside = (heap >= 0) & (heap < heaps)
        legal = inside & (taken >= 1) & (taken <= left[jnp.clip(heap, 0, heaps - 1)])
        mine = jnp.where(legal, left.at[heap].add(-taken, mode="drop"), left)
        won = legal & (mine.sum() == 0)
        theirs, number = perfect_move(mine) if opponent == "perfect" else random_move(mine, key)
        after = mine.at[theirs].add(-number)
        shown = jnp.append(jnp.stack([theirs + HEAP_A, number + DIGIT_0]), after + DIGIT_0)
        return after, Turn(
            reply=shown.astype(jnp.int32),
            count=jnp.int32(heaps + 2),
            reward=won.astype(jnp.float32),
            done=~legal | won | (after.sum() == 0),
            success=won,
            state_id=jnp.sum(left * base).astype(jnp.int32),
        )

    def solution(left: Array) -> tuple[Array, Array]:
        heap, taken = perfect_move(left)
        return jnp.stack([heap + HEAP_A, taken + DIGIT_0]).astype(jnp.int32), jnp.int32(2)

    return Env(
        name="nim",
        init=init,
        step=step,
        turns=(heaps * most + 1) // 2,  # each turn and its reply take an object at least
        prompt_tokens=heaps + 1,
        turn_tokens=2,
        reply_tokens=heaps + 2,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )


def perfect_move(left: Array) -> tuple[Array, Array]:
    """(heap [] int32, objects [] int32): to an exclusive or of 0, or one from the largest heap.

    From empty heaps it takes 0.
    """
    total = functools.reduce(operator.xor, left)
    target = left ^ total
    wins = target < left  # never where the exclusive or is 0 already
    heap = jnp.where(wins.any(), jnp.argmax(wins), jnp.argmax(left)).astype(jnp.int32)
    taken = jnp.where(wins.any(), left[heap] - target[heap], jnp.minimum(left[heap], 1))
    return heap, taken.astype(jnp.int32)


def random_move(left: Array, key: Array) -> tuple[Array, Array]:
    """(heap, objects), one of the legal moves, each equally likely; 0 objects where none is left.

    There are as many legal moves as objects.
    """
    move = jax.random.randint(key, (), 0, jnp.maximum(left.sum(), 1))
    before = jnp.cumsum(left) - left
    heap = jnp.sum(before + left <= move).clip(0, left.shape[0] - 1).astype(jnp.int32)
    taken = jnp.where(left.sum() > 0, move - before[heap] + 1, 0)
    return heap, taken.astype(jnp.int32)
