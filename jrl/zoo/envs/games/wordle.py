"""A game like Wordle over words of few letters: each guess is marked letter by letter.

With the prompt "3:" for words of three letters an episode may read "abcx+.bdaxx+" and so on: after
a guess "+" marks a letter in its place, "x" one that is elsewhere in the word, "." one that is not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("abcdefghijklmnopqrstuvw12345678:+x.")
LETTER_A, DIGIT_1, COLON, PLACE, WORD, NONE = TOKENIZER.encode("a1:+x.")
MOST_WORDS = 5000


class Word(struct.PyTreeNode):
    """word [L] int32, letters from 0; open [W] bool, which of all words the marks so far allow."""

    word: Array
    open: Array


def wordle(letters: int = 4, length: int = 3, turns: int = 6) -> Env:
    """A point for the word, which may be any of ``letters ** length``, in both splits.

    Letters that a guess holds more often than the word are marked as Wordle does: those in their
    place first, then the others from the left, as often as the word has them.

    Args:
      letters: the word's are the first of the alphabet, 2 to 20.
      length: letters of a word, 1 to 8.
      turns: the most guesses, 1 to 100.

    Returns:
      The Env. The identity of a state is the set of words that the marks so far allow.

    Raises:
      UserError: an option out of its range, or more than 5000 words.
    """
    check_range("data.letters", letters, 2, 20)
    check_range("data.length", length, 1, 8)
    check_range("data.turns", turns, 1, 100)
    if letters**length > MOST_WORDS:
        raise UserError(
            f"data.letters = {letters} and data.length = {length} make {letters**length} words; "
            f"lower one of them, to at most {MOST_WORDS}"
        )
    numbers = np.arange(letters**length)[:, None]
    words = jnp.asarray(numbers // letters ** np.arange(length)[::-1] % letters, jnp.int32)
    label = jnp.arange(1, len(words) + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    prompt = jnp.array([DIGIT_1 + length - 1, COLON], jnp.int32)

    def init(key: Array, split: str) -> tuple[Word, Array, Array]:
        word = words[jax.random.randint(key, (), 0, len(words))]
        return Word(word, jnp.ones(len(words), bool)), prompt, jnp.int32(2)

    def step(state: Word, tokens: Array, size: Array, key: Array) -> tuple[Word, Turn]:
        guess = tokens - LETTER_A
        valid = jnp.all((guess >= 0) & (guess < letters))
        marks = jnp.where(valid, marked(guess, state.word), 0)
        same = jax.vmap(lambda word: jnp.all(marked(guess, word) == marks))(words)
        solved = valid & jnp.all(guess == state.word)
        open_letters = jnp.sum(jnp.where(state.open, label, 0), dtype=jnp.uint32)
        return state.replace(open=state.open & (same | ~valid)), Turn(
            reply=jnp.array([NONE, WORD, PLACE], jnp.int32)[marks],
            count=jnp.int32(length),
            reward=solved.astype(jnp.float32),
            done=solved,
            success=solved,
            state_id=open_letters.astype(jnp.int32),
        )

    def solution(state: Word) -> tuple[Array, Array]:
        """The first word that the marks allow."""
        guess = words[jnp.argmax(state.open)] + LETTER_A
        return guess.astype(jnp.int32), jnp.int32(length)

    return Env(
        name="wordle",
        init=init,
        step=step,
        turns=turns,
        prompt_tokens=2,
        turn_tokens=length,
        reply_tokens=length,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )


def marked(guess: Array, word: Array) -> Array:
    """[L] int32: 2 for a letter in its place, 1 for one elsewhere in the word, 0 for the others."""
    place = guess == word
    letters, word_letters = guess[:, None], word[None]
    # Of each letter, those that are not in their place.
    free = jnp.sum((letters == word_letters) & ~place[None], axis=1)
    earlier = jnp.tril(jnp.ones((len(word), len(word)), bool), -1)
    before = jnp.sum((letters == guess[None]) & ~place[None] & earlier, axis=1)
    return jnp.where(place, 2, jnp.where(before < free, 1, 0)).astype(jnp.int32)
