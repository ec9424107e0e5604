"""Procedural tasks, and functions to write them with.

A task generates problems on the device, judges completions there, and knows a correct completion.
The splits "train" and "eval" are disjoint: a hash of a problem's identity decides to which of the
two it belongs, independent of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.errors import UserError, unknown_choice
from jrl.models.tokenizer import PAD_ID, STOP_ID, CharTokenizer, char_tokenizer

Array = jax.Array

DIGIT_0 = 2
PLUS, MINUS, TIMES, EQUALS, ARROW, COMMA, COLON = char_tokenizer().encode("+-*=>,:")
SPLITS = ("train", "eval")
EVAL_SHARE = 4
"""One of this many problems belongs to the eval split."""
CANDIDATES = 32
"""Problems generated for one that is returned; the first of the requested split is taken."""


class Problem(struct.PyTreeNode):
    """One problem, on the device.

    Attributes:
      tokens: [P] int32, the prompt from column 0, then pad.
      length: [] int32, tokens of the prompt.
      answer: [A] int32, what the task judges by; for most tasks the correct completion, padded.
    """

    tokens: Array
    length: Array
    answer: Array


class Task(NamedTuple):
    """A family of problems with a generator and a verifier, all jittable with fixed shapes.

    Attributes:
      name: as in ``TASKS``.
      difficulty: the task's own measure of size; larger is harder.
      prompt_tokens: P, the longest prompt.
      completion_tokens: T, the longest correct completion, the stop token included.
      vocab_size: V.
      stop_id: the token that ends a completion.
      tokenizer: of prompts and completions.
      generate: (key, split) -> Problem, ONE problem of the split "train" or "eval"; the key is
        consumed. Use ``jax.vmap(functools.partial(task.generate, split="train"))(keys)`` for many.
      verify: (problem, tokens [T], length []) -> [] float32, points: 1 when the completion is
        exactly correct and ends with the stop token, which ``length`` counts; else 0. Tokens at and
        past ``length`` are not read.
      partial: like ``verify``, points from 0 to 1 for a partly correct completion; 1 if and only
        if ``verify`` gives 1.
      solution: (problem) -> (tokens [T] int32, length [] int32), a correct completion with its stop
        token.
      render: (problem) -> (prompt text, text of a correct completion), on the host.
    """

    name: str
    difficulty: int
    prompt_tokens: int
    completion_tokens: int
    vocab_size: int
    stop_id: int
    tokenizer: CharTokenizer
    generate: Callable[..., Problem]
    verify: Callable[[Problem, Array, Array], Array]
    partial: Callable[[Problem, Array, Array], Array]
    solution: Callable[[Problem], tuple[Array, Array]]
    render: Callable[[Problem], tuple[str, str]]


# ---------------------------------------------------------------- text of varying length


class Text(NamedTuple):
    """A piece of text of varying length in a fixed array.

    Attributes:
      tokens: [W] int32.
      live: [W] bool, True at the tokens that are part of the text.
    """

    tokens: Array
    live: Array


def text(*tokens: Array | int) -> Text:
    """A piece of text from its tokens, each an int or [] int32."""
    return Text(jnp.stack([jnp.int32(t) for t in tokens]), jnp.ones(len(tokens), bool))


def number(value: Array, digits: int, *, zero: int = DIGIT_0, minus: int = MINUS) -> Text:
    """The decimal form of an integer, with "-" in front when it is negative.

    Args:
      value: [] int32, below ``10**digits`` in magnitude.
      digits: the most digits it can have.
      zero: the token of "0"; those of other digits follow.
      minus: the token of "-".

    Returns:
      A Text of ``digits + 1`` positions, the first one for the sign.
    """
    powers = jnp.array([10**i for i in reversed(range(digits))], jnp.int32)
    size = jnp.abs(value)
    tokens = jnp.append(jnp.int32(minus), (size // powers) % 10 + zero)
    live = jnp.append(value < 0, size >= powers).at[-1].set(True)
    return Text(tokens, live)


def listed(values: Array, digits: int, separators: Array) -> Text:
    """Numbers, each followed by its separator.

    Args:
      values: [K] int32, below ``10**digits`` in magnitude.
      digits: the most digits that one can have.
      separators: [K] int32, the token after each number.

    Returns:
      A Text of ``K * (digits + 2)`` positions.
    """
    numbers = jax.vmap(lambda value: number(value, digits))(values)
    tokens = jnp.concatenate([numbers.tokens, separators[:, None]], axis=1)
    live = jnp.pad(numbers.live, ((0, 0), (0, 1)), constant_values=True)
    return Text(tokens.reshape(-1), live.reshape(-1))


def join(size: int, *pieces: Text) -> tuple[Array, Array]:
    """The concatenation of the pieces.

    Args:
      size: length of the result; all live tokens must fit.
      *pieces: what to write.

    Returns:
      (tokens [size] int32, padded, length [] int32).
    """
    tokens = jnp.concatenate([piece.tokens for piece in pieces])
    live = jnp.concatenate([piece.live for piece in pieces])
    target = jnp.where(live, jnp.cumsum(live) - 1, size)
    packed = jnp.full((size,), PAD_ID, jnp.int32).at[target].set(tokens, mode="drop")
    return packed, jnp.sum(live).astype(jnp.int32)


# ---------------------------------------------------------------- splits


def in_eval(identity: Array) -> Array:
    """Whether the problem with this identity belongs to the eval split.

    Args:
      identity: [I] int32, equal for problems that count as the same.

    Returns:
      [] bool; True for one identity in ``EVAL_SHARE``.
    """
    chex.assert_rank(identity, 1)
    # Odd multipliers from the golden ratio, then murmur3's finaliser, in wrapping uint32.
    position = np.arange(1, identity.shape[0] + 1, dtype=np.uint64)
    multipliers = (position * position * np.uint64(0x9E3779B9) | np.uint64(1)).astype(np.uint32)
    mixed = jnp.sum((identity.astype(jnp.uint32) + 1) * multipliers, dtype=jnp.uint32)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(multiplier)
    return (mixed ^ (mixed >> 16)) % EVAL_SHARE == 0


Draw = Callable[[Array], tuple[Problem, Array]]
"""(bits [W] uint32, uniform) -> (problem, identity [I] int32)."""


def integers(bits: Array, low: int, high: int) -> Array:
    """Integers from ``low`` to ``high`` - 1, int32, from uniform uint32 bits.

    The modulus favours small numbers by less than one part in a million for ranges below 4,000.
    """
    return (low + bits % (high - low)).astype(jnp.int32)


def split_generator(draw: Draw, words: int, candidates: int = CANDIDATES) -> Callable[..., Problem]:
    """A generator of problems of one split from a generator of all problems.

    Generates ``candidates`` problems and returns the first of the requested split. If there is none
    (for "eval", once in 10,000 problems at 32 candidates), it returns one fixed problem of that
    split, found here; never a problem of the other split.

    Args:
      draw: a function of ``words`` uniform words.
      words: W.
      candidates: problems generated for one that is returned.

    Returns:
      generate(key, split) -> Problem.

    Raises:
      UserError: 256 problems are all of one split, so none can be held out.
    """

    def held_out(bits: Array) -> Array:
        return in_eval(draw(bits)[1])

    @jax.jit
    def samples() -> tuple[Array, Array]:
        rows = jax.random.bits(jax.random.key(0), (256, words), jnp.uint32)
        return rows, jax.vmap(held_out)(rows)

    rows, is_eval = map(np.asarray, samples())
    if is_eval.all() or not is_eval.any():
        raise UserError("the task has too few problems to hold some out; raise its difficulty")
    spare = {split: rows[np.argmax(is_eval == (split == "eval"))] for split in SPLITS}

    def generate(key: Array, split: str) -> Problem:
        if split not in SPLITS:
            raise unknown_choice("split", split, SPLITS)
        rows = jax.random.bits(key, (candidates, words), jnp.uint32)
        right = jax.vmap(held_out)(rows) == (split == "eval")
        bits = jnp.where(right.any(), rows[jnp.argmax(right)], spare[split])
        return draw(bits)[0]

    return generate


# ---------------------------------------------------------------- tasks with one right completion


def _resize(tokens: Array, size: int) -> Array:
    """The first ``size`` tokens, padded."""
    return jnp.pad(tokens[:size], (0, max(0, size - tokens.shape[0])), constant_values=PAD_ID)


def _exact_matches(problem: Problem, tokens: Array, length: Array) -> tuple[Array, Array]:
    """(positions that agree with the answer, length of the longer of the two), both [] int32."""
    chex.assert_rank([tokens, length], [1, 0])
    size = problem.answer.shape[0]
    answer_length = jnp.argmax(problem.answer == STOP_ID) + 1
    position = jnp.arange(size)
    same = (
        (_resize(tokens, size) == problem.answer) & (position < length) & (position < answer_length)
    )
    return jnp.sum(same), jnp.maximum(length, answer_length)


def exact_points(problem: Problem, tokens: Array, length: Array) -> Array:
    """1 when the completion equals ``problem.answer`` up to and including its stop token, else 0.

    Args:
      problem: its answer is a completion with a stop token.
      tokens: [T] int32.
      length: [] int32, tokens of the completion, the stop token included.

    Returns:
      [] float32, points.
    """
    same, longest = _exact_matches(problem, tokens, length)
    return (same == longest).astype(jnp.float32)


def matched_share(problem: Problem, tokens: Array, length: Array) -> Array:
    """The share of positions at which the completion agrees with ``problem.answer``.

    Args:
      problem: its answer is a completion with a stop token.
      tokens: [T] int32.
      length: [] int32, tokens of the completion, the stop token included.

    Returns:
      [] float32, points from 0 to 1, of the longer of completion and answer; 1 only if equal.
    """
    same, longest = _exact_matches(problem, tokens, length)
    return same.astype(jnp.float32) / longest.astype(jnp.float32)


def answer_solution(problem: Problem) -> tuple[Array, Array]:
    """The answer itself, and its length with the stop token."""
    length = jnp.argmax(problem.answer == STOP_ID) + 1
    return problem.answer, length.astype(jnp.int32)


def check_range(key: str, value: int, low: int, high: int) -> None:
    """Raises UserError unless ``value`` is an integer from ``low`` to ``high``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise UserError(f"{key} = {value!r}; choose an integer from {low} to {high}")


def make_task(
    name: str,
    *,
    difficulty: int,
    prompt_tokens: int,
    completion_tokens: int,
    draw: Draw,
    words: int,
    verify: Callable[[Problem, Array, Array], Array] = exact_points,
    partial: Callable[[Problem, Array, Array], Array] = matched_share,
    solution: Callable[[Problem], tuple[Array, Array]] = answer_solution,
) -> Task:
    """A Task from its generator; by default ``answer`` is the only correct completion.

    Args:
      name: as in ``TASKS``.
      difficulty: as in ``Task``.
      prompt_tokens: P.
      completion_tokens: T.
      draw: one problem of any split from ``words`` words of uniform bits.
      words: W.
      verify: as in ``Task``.
      partial: as in ``Task``.
      solution: as in ``Task``.

    Returns:
      The Task.
    """
    tokenizer = char_tokenizer()

    def render(problem: Problem) -> tuple[str, str]:
        tokens, length = (np.asarray(leaf) for leaf in solution(problem))
        prompt: Any = np.asarray(problem.tokens)[: int(problem.length)]
        return tokenizer.decode(prompt), tokenizer.decode(tokens[: int(length)])

    return Task(
        name=name,
        difficulty=difficulty,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        vocab_size=tokenizer.vocab_size,
        stop_id=STOP_ID,
        tokenizer=tokenizer,
        generate=split_generator(draw, words),
        verify=verify,
        partial=partial,
        solution=solution,
        render=render,
    )
