"""The word game against Wordle's rule for marks in plain Python."""

import collections
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.episodes.device_play import scripted
from jrl.errors import UserError
from jrl.zoo.envs.games.wordle import marked


def wordle_marks(guess, word):
    """Wordle's colours: letters in place, then others from the left while the word has them."""
    marks, rest = [0] * len(word), collections.Counter()
    for i, (g, w) in enumerate(zip(guess, word, strict=True)):
        if g == w:
            marks[i] = 2
        else:
            rest[w] += 1
    for i, g in enumerate(guess):
        if marks[i] == 0 and rest[g] > 0:
            marks[i], rest[g] = 1, rest[g] - 1
    return marks


def test_marks_are_those_of_wordle():
    pairs = np.array(list(itertools.product(itertools.product(range(3), repeat=4), repeat=2)))
    got = jit(jax.vmap(lambda p: marked(p[0], p[1])))(pairs)
    for (guess, word), marks in zip(pairs.tolist(), np.asarray(got).tolist(), strict=True):
        assert marks == wordle_marks(guess, word), (guess, word)


def test_guesses_are_answered_and_narrow_the_words():
    env = get_env("wordle", letters=4, length=3)
    step, start_of = jit(env.step), jit(partial(env.generate, split="train"))
    rng, states = np.random.default_rng(0), {}
    words = ["".join(w) for w in itertools.product("abcd", repeat=3)]
    for i in range(8):
        start = jax.device_get(start_of(jax.random.key(i)))
        assert env.render(start)[0] == "3:"
        word = "".join("abcd"[k] for k in start.state.word)
        state, left = start.state, words
        for _ in range(4):
            guess = str(rng.choice([*words, "aez", word]))
            tokens = jnp.array(env.tokenizer.encode(guess.replace("z", "w")))
            state, turn = jax.device_get(step(state, tokens, jnp.int32(3), jax.random.key(0)))
            assert states.setdefault(int(turn.state_id), left) == left
            assert (turn.done, turn.success, turn.reward) == ((guess == word),) * 3
            marks = [0] * 3 if guess == "aez" else wordle_marks(guess, word)
            assert env.tokenizer.decode(turn.reply.tolist()) == "".join(".x+"[m] for m in marks)
            if guess != "aez":
                left = [w for w in left if wordle_marks(guess, w) == marks]
            assert [w for w, o in zip(words, state.open, strict=True) if o] == left
    assert len(states) > 8


def test_the_solution_finds_every_word():
    env = get_env("wordle", letters=3, length=3, turns=10)
    start = env.generate(jax.random.key(0), "eval")
    words = jnp.array(list(itertools.product(range(3), repeat=3)))

    def episode(word):
        with_word = start.replace(state=start.state.replace(word=word))
        return scripted(jax.random.key(0), with_word, env=env)[2]

    log = jit(jax.vmap(episode))(words)
    assert np.asarray(log.success).all()
    assert np.asarray(log.count).max() <= 6


def test_bad_options():
    for options, message in (
        ({"letters": 1}, "data.letters = 1; choose an integer from 2 to 20"),
        ({"letters": 20, "length": 4}, "make 160000 words; lower one of them, to at most 5000"),
    ):
        with pytest.raises(UserError, match=message):
            get_env("wordle", **options)
