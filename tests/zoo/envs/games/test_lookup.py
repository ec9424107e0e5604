"""The lookup tool against a dictionary."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.episodes.device_play import scripted
from jrl.errors import UserError


def test_calls_and_answers_against_a_dictionary():
    env = get_env("lookup", keys=5, hops=3)
    step, start_of = jit(env.step), jit(partial(env.generate, split="train"))
    rng, outcomes = np.random.default_rng(0), set()
    for i in range(20):
        start = jax.device_get(start_of(jax.random.key(i)))
        question = env.render(start)[0]
        store = dict(zip("abcde", ("abcde"[v] for v in start.state.values), strict=True))
        at, left = question[0], int(question[1])
        assert question[2] == ":"
        outcomes.add(left)
        state = start.state
        for _ in range(5):
            text = f"{rng.choice(list('??????=z'))}{rng.choice(list('abcdez') + [at] * 6)}"
            truth = at
            for _ in range(left):
                truth = store[truth]
            tokens = jnp.array(env.tokenizer.encode(text))
            state, turn = jax.device_get(step(state, tokens, jnp.int32(2), jax.random.key(0)))
            assert turn.state_id == (left * 5 + "abcde".index(at))
            assert turn.done == (text[0] == "=")
            assert turn.success == (text[0] == "=" and text[1] == truth)
            assert turn.reward == turn.success
            if turn.done:
                outcomes.add("right" if turn.success else "wrong")
                break
            valid = text[0] == "?" and text[1] in store
            expected = store[text[1]] if valid else "!"
            assert env.tokenizer.decode(turn.reply.tolist()) == expected
            outcomes.add("value" if valid else "error")
            if valid and text[1] == at and left:
                at, left = store[at], left - 1
    assert outcomes == {1, 2, 3, "value", "error", "right", "wrong"}


def test_the_solution_answers_after_as_many_calls_as_it_needs():
    env = get_env("lookup", keys=26, hops=4)
    starts = jax.vmap(partial(env.generate, split="eval"))(jax.random.split(jax.random.key(0), 30))
    log = jit(jax.vmap(lambda s: scripted(jax.random.key(0), s, env=env)[2]))(starts)
    assert np.asarray(log.success).all()
    assert np.array_equal(log.count[:, 0], starts.state.hops + 1)


def test_bad_options():
    with pytest.raises(UserError, match="data.keys = 27; choose an integer from 2 to 26"):
        get_env("lookup", keys=27)
    with pytest.raises(UserError, match="data.hops = 0; choose an integer from 1 to 9"):
        get_env("lookup", hops=0)
