"""Guess-the-number against plain Python, and binary search as its best player."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.episodes.device_play import scripted
from jrl.errors import UserError


def test_answers_say_where_the_secret_is():
    env = get_env("guess_number", numbers=20, cost=0.25)
    step, start_of = jit(env.step), jit(partial(env.generate, split="train"))
    rng, replies, secrets = np.random.default_rng(0), set(), set()
    for i in range(12):
        start = jax.device_get(start_of(jax.random.key(i)))
        assert env.render(start)[0] == "19:"
        state, secret = start.state, int(start.state.secret)
        secrets.add(secret)
        low, high = 0, 19
        for _ in range(6):
            text = rng.choice([f"{rng.integers(0, 20):02}", "77", "1:", f"{secret:02}"])
            tokens = jnp.array(env.tokenizer.encode(str(text)))
            state, turn = jax.device_get(step(state, tokens, jnp.int32(2), jax.random.key(0)))
            assert turn.state_id == low * 20 + high
            number = int(text) if text.isdigit() and int(text) < 20 else None
            correct = number == secret
            assert (turn.done, turn.success) == (correct, correct)
            assert turn.reward == np.float32(1 if correct else -0.25)
            if correct:
                replies.add("=")
                break
            expected = "?" if number is None else ">" if secret > number else "<"
            assert env.tokenizer.decode(turn.reply.tolist()) == expected
            replies.add(expected)
            if expected == ">":
                low = max(low, number + 1)
            if expected == "<":
                high = min(high, number - 1)
    assert replies == {"<", ">", "?", "="}
    assert len(secrets) > 5


@pytest.mark.parametrize("numbers", [2, 10, 32])
def test_the_solution_is_binary_search(numbers):
    env = get_env("guess_number", numbers=numbers)
    start = env.generate(jax.random.key(0), "eval")

    def turns_needed(secret):
        with_secret = start.replace(state=start.state.replace(secret=secret))
        log = scripted(jax.random.key(0), with_secret, env=env)[2]
        return log.count[0], log.success

    counts, success = jax.device_get(jit(jax.vmap(turns_needed))(jnp.arange(numbers)))
    assert success.all()

    def search(low, high):  # guesses for each number between the two
        if low > high:
            return []
        middle = (low + high) // 2
        return [
            *(1 + x for x in search(low, middle - 1)),
            1,
            *(1 + x for x in search(middle + 1, high)),
        ]

    assert counts.tolist() == search(0, numbers - 1)
    assert counts.max() == numbers.bit_length() if numbers & (numbers - 1) else True
    assert env.turns == numbers.bit_length() + 2


def test_bad_options():
    for options, message in (
        ({"numbers": 1}, "data.numbers = 1; choose an integer from 2 to 1000"),
        ({"cost": -1}, "data.cost = -1; give points, at least 0"),
        ({"turns": 1001}, "data.turns = 1001"),
    ):
        with pytest.raises(UserError, match=message):
            get_env("guess_number", **options)
