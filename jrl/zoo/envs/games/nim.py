"""Nim, normal play: two players take from one heap at a time; who takes the last object wins.

After the prompt "343:", the heaps, the turn "a2" takes 2 objects from heap a, and the reply "b4103"
says that the other player took 4 from heap b, which leaves 1, 0 and 3.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn
from jrl.errors import UserError, unknown_choice
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("abcd0123456789:")
HEAP_A, DIGIT_0, COLON = TOKENIZER.encode("a0:")
OPPONENTS = ("perfect", "random", "self")


class Board(struct.PyTreeNode):
    """left [H] int32, objects by heap; the player to move; whether a perfect one is player 1."""

    left: Array
    player: Array
    perfect: Array


def nim(heaps: int = 3, most: int = 3, opponent: str = "perfect", illegal: float = 0.0) -> Env:
    """A point for the player that takes the last object; an illegal move loses.

    The policy moves first, from heaps of 1 to ``most`` objects each, all equally likely in both
    splits. It can force a win unless the heaps' exclusive or is 0, and a perfect player punishes
    every mistake; so the share of winnable starts is the best score there is.

    Args:
      heaps: 1 to 4.
      most: objects in a heap at first, 1 to 9.
      opponent: "perfect" leaves an exclusive or of 0 where it can, and takes one object from the
        largest heap where it cannot; "random" draws one of the legal moves; "self" is the policy,
        which then is paid for both players, and meets a perfect player in the split "eval".
      illegal: points for an illegal move, 0 or less. Against a perfect player, weights at random
        never win; that a legal move is better than none then has to be learned first.

    Returns:
      The Env. The identity of a state is its heaps. With "self" every reply begins with the heaps
      that a turn leaves, "143" after "a2", and the other player's turn follows.

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.heaps", heaps, 1, 4)
    check_range("data.most", most, 1, 9)
    if opponent not in OPPONENTS:
        raise unknown_choice("data.opponent", opponent, OPPONENTS)
    if not isinstance(illegal, int | float) or isinstance(illegal, bool) or not illegal <= 0:
        raise UserError(f"data.illegal = {illegal!r}; give points, 0 or less")
    if opponent == "self":
        return _against_itself(heaps, most, illegal)
    base = (most + 1) ** jnp.arange(heaps)

    def init(key: Array, split: str) -> tuple[Array, Array, Array]:
        left = jax.random.randint(key, (heaps,), 1, most + 1)
        prompt = jnp.append(left + DIGIT_0, COLON).astype(jnp.int32)
        return left, prompt, jnp.int32(heaps + 1)

    def step(left: Array, tokens: Array, length: Array, key: Array) -> tuple[Array, Turn]:
        mine, legal = _after_turn(left, tokens)
        won = legal & (mine.sum() == 0)
        theirs, number = perfect_move(mine) if opponent == "perfect" else random_move(mine, key)
        after = mine.at[theirs].add(-number)
        reply = jnp.append(jnp.stack([theirs + HEAP_A, number + DIGIT_0]), after + DIGIT_0)
        return after, Turn(
            reply=reply.astype(jnp.int32),
            count=jnp.int32(heaps + 2),
            reward=jnp.where(legal, won, illegal).astype(jnp.float32),
            done=~legal | won | (after.sum() == 0),
            success=won,
            state_id=jnp.sum(left * base).astype(jnp.int32),
        )

    def solution(left: Array) -> tuple[Array, Array]:
        heap, count = perfect_move(left)
        return jnp.stack([heap + HEAP_A, count + DIGIT_0]).astype(jnp.int32), jnp.int32(2)

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


def _after_turn(left: Array, tokens: Array) -> tuple[Array, Array]:
    """(the heaps after a turn such as "a2", whether it is a legal move); unchanged if it is not."""
    heaps, heap, count = left.shape[0], tokens[0] - HEAP_A, tokens[1] - DIGIT_0
    inside = (heap >= 0) & (heap < heaps)
    legal = inside & (count >= 1) & (count <= left[jnp.clip(heap, 0, heaps - 1)])
    return jnp.where(legal, left.at[heap].add(-count, mode="drop"), left), legal


def _against_itself(heaps: int, most: int, illegal: float) -> Env:
    """``nim`` with the policy as both players."""
    single = nim(heaps, most, "perfect")
    base = (most + 1) ** jnp.arange(heaps)

    def init(key: Array, split: str) -> tuple[Board, Array, Array]:
        left, prompt, length = single.init(key, split)
        return Board(left, jnp.int32(0), jnp.bool_(split == "eval")), prompt, length

    def step(board: Board, tokens: Array, length: Array, key: Array) -> tuple[Board, Turn]:
        mine, legal = _after_turn(board.left, tokens)
        over = ~legal | (mine.sum() == 0)
        theirs, number = perfect_move(mine)
        answered = mine.at[theirs].add(-number)
        defeated = board.perfect & (answered.sum() == 0)
        other = 1 - board.player
        winner = jnp.where(legal & (mine.sum() == 0), board.player, other)
        done = over | defeated
        won = done & (jnp.arange(2) == winner)
        failed = ~legal & (jnp.arange(2) == board.player)
        move = jnp.stack([theirs + HEAP_A, number + DIGIT_0])
        return Board(
            left=jnp.where(board.perfect, answered, mine),
            player=jnp.where(board.perfect, board.player, other).astype(jnp.int32),
            perfect=board.perfect,
        ), Turn(
            reply=jnp.concatenate([mine + DIGIT_0, move, answered + DIGIT_0]).astype(jnp.int32),
            count=jnp.where(board.perfect, 2 * heaps + 2, heaps).astype(jnp.int32),
            reward=jnp.where(failed, illegal, won).astype(jnp.float32),
            done=done,
            success=won,
            state_id=jnp.sum(board.left * base).astype(jnp.int32),
        )

    assert single.solution is not None
    solve = single.solution
    return single._replace(
        init=init,
        step=step,
        turns=heaps * most,
        reply_tokens=2 * heaps + 2,
        solution=lambda board: solve(board.left),
        players=2,
        mover=lambda board: board.player,
    )


def perfect_move(left: Array) -> tuple[Array, Array]:
    """(heap [] int32, objects [] int32): to an exclusive or of 0, or one from the largest heap.

    From empty heaps it takes 0.
    """
    total = functools.reduce(operator.xor, left)
    target = left ^ total
    wins = target < left  # never where the exclusive or is 0 already
    heap = jnp.where(wins.any(), jnp.argmax(wins), jnp.argmax(left)).astype(jnp.int32)
    count = jnp.where(wins.any(), left[heap] - target[heap], jnp.minimum(left[heap], 1))
    return heap, count.astype(jnp.int32)


def random_move(left: Array, key: Array) -> tuple[Array, Array]:
    """(heap, objects), one of the legal moves, each equally likely; 0 objects where none is left.

    There are as many legal moves as objects.
    """
    move = jax.random.randint(key, (), 0, jnp.maximum(left.sum(), 1))
    before = jnp.cumsum(left) - left
    heap = jnp.sum(before + left <= move).clip(0, left.shape[0] - 1).astype(jnp.int32)
    count = jnp.where(left.sum() > 0, move - before[heap] + 1, 0)
    return heap, count.astype(jnp.int32)
