"""The calculator tool against Python's integers."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.episodes.device_play import scripted
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID
from jrl.zoo.envs.games.calculator import LARGEST

ENV = get_env("calculator", operations=2)


def turn_of(text, stop=True):
    ids = [*ENV.tokenizer.encode(text), *([STOP_ID] if stop else [])]
    tokens = np.zeros(ENV.turn_tokens, np.int32)
    tokens[: len(ids)] = ids
    return tokens, np.int32(len(ids))


def python_result(text):
    """The tool's reply to a call, by Python; "!" for an invalid one."""
    match = re.fullmatch(r"(-?\d{1,9})([-+*])(-?\d{1,9})", text)
    if not match:
        return "!"
    value = eval(f"({int(match[1])}){match[2]}({int(match[3])})")
    return str(value) if abs(value) <= LARGEST else "!"


def test_calls_are_worked_out():
    rng = np.random.default_rng(0)
    numbers = [0, 7, -3, 12, 99, -100, 46341, 99999, 123456789, 999999999, -999999999]
    calls = [f"{a}{op}{b}" for a in numbers for op in "+-*" for b in numbers]
    calls += ["", "5", "-5", "+", "5+", "+5", "5--", "1+2+3", "12345678901+1", "5!5", "=", ":3*4"]
    calls += ["".join(rng.choice(list("0123456789+-*=!:"), rng.integers(1, 9))) for _ in range(300)]
    calls = [c for c in calls if len(c) < ENV.turn_tokens]
    tokens, lengths = map(np.stack, zip(*map(turn_of, calls), strict=True))
    start = ENV.generate(jax.random.key(0), "train")
    step = jit(jax.vmap(lambda t, n: ENV.step(start.state, t, n, jax.random.key(0))[1]))
    turns = jax.device_get(step(tokens, lengths))
    for i, call in enumerate(calls):
        assert turns.done[i] == call.startswith("="), call
        reply = ENV.tokenizer.decode(turns.reply[i, : turns.count[i]].tolist())
        if not turns.done[i]:
            assert reply == python_result(call), call
    without_stop = turn_of("1" * ENV.turn_tokens, stop=False)
    assert (
        ENV.tokenizer.decode(
            step(without_stop[0][None], without_stop[1][None]).reply[0, :1].tolist()
        )
        == "!"
    )


def test_answers_and_states():
    start_of, step = jit(partial(ENV.generate, split="train")), jit(ENV.step)
    for i in range(10):
        start = jax.device_get(start_of(jax.random.key(i)))
        question = ENV.render(start)[0]
        first, a, second, b, third = re.fullmatch(
            r"(\d+)([-+*])(\d+)([-+*])(\d+):", question
        ).groups()
        half = eval(f"{first}{a}{second}")
        value = eval(f"({half}){b}{third}")
        state, ids, results = start.state, [], []
        for text in (f"{half}{b}{third}", f"{first}{a}{second}", f"{half}{b}{third}", f"={value}"):
            last = state
            state, turn = jax.device_get(step(state, *turn_of(text), jax.random.key(0)))
            ids.append(int(turn.state_id))
            results.append((bool(turn.done), bool(turn.success), float(turn.reward)))
        ahead = 0 if (half, b, third) != (int(first), a, second) else 1
        assert ids[-1] == 2 or ahead
        assert results == [(False, False, 0)] * 3 + [(True, True, 1)]
        for wrong in (f"={value + 1}", "=", f"={value}+0"):
            _, turn = step(last, *turn_of(wrong), jax.random.key(0))
            assert (bool(turn.done), bool(turn.success)) == (True, False)
        _, turn = step(last, *turn_of(f"={value}", stop=False), jax.random.key(0))
        assert not bool(turn.success)


def test_the_solution_is_right():
    env = get_env("calculator", operations=3)
    starts = jax.vmap(partial(env.generate, split="eval"))(jax.random.split(jax.random.key(0), 30))
    log = jit(jax.vmap(lambda s: scripted(jax.random.key(0), s, env=env)[2]))(starts)
    assert np.asarray(log.success).all()
    assert (np.asarray(log.count) == 4).all()


def test_bad_options():
    with pytest.raises(UserError, match="data.operations = 4; choose an integer from 1 to 3"):
        get_env("calculator", operations=4)
    with pytest.raises(UserError, match="data.digits = 3; choose an integer from 1 to 2"):
        get_env("calculator", digits=3)
