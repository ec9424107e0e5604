"""The bandit's payments, and what it counts as the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.episodes.device_play import scripted
from jrl.errors import UserError


def test_arms_pay_as_often_as_they_say_and_are_counted():
    env = get_env("bandit", arms=3, turns=8, best=0.8, other=0.25)
    start = env.generate(jax.random.key(0), "train")
    assert env.render(start)[0] == "abc:"
    chance = np.asarray(start.state.chance)
    assert sorted(chance.tolist()) == pytest.approx([0.25, 0.25, 0.8])
    keys = jax.random.split(jax.random.key(1), 1000)
    for arm in range(4):  # the last is none
        token = jnp.array(env.tokenizer.encode("abcd"[arm]))
        pulled = jit(jax.vmap(lambda k, token=token: env.step(start.state, token, jnp.int32(1), k)))
        after, turn = jax.device_get(pulled(keys))
        share = chance[arm] if arm < 3 else 0.0
        assert abs((turn.reward > 0).mean() - share) < 0.05
        assert set(turn.reward.tolist()) <= {0, 1 / 8}
        assert (turn.success == (arm < 3 and share > 0.5)).all()
        text = [env.tokenizer.decode(row) for row in turn.reply.tolist()]
        assert text == ["1" if r else "0" for r in turn.reward]
        counts = np.zeros(3)
        counts[arm : arm + 1] = 1
        assert (after.pulls == counts).all()
        assert (after.wins.sum(1) == (turn.reward > 0)).all()


def test_states_are_the_same_when_the_counts_are():
    env = get_env("bandit", arms=2, turns=3)
    state = env.generate(jax.random.key(0), "train").state
    token, ids = jnp.array(env.tokenizer.encode("a")), set()
    cases = [
        ([0, 0], [0, 0]),
        ([1, 0], [0, 0]),
        ([1, 0], [1, 0]),
        ([0, 1], [0, 0]),
        ([2, 0], [1, 0]),
    ]
    for pulls, wins in cases:
        for chance in (state.chance, state.chance[::-1]):
            here = state.replace(pulls=jnp.array(pulls), wins=jnp.array(wins), chance=chance)
            ids.add(int(env.step(here, token, jnp.int32(1), jax.random.key(0))[1].state_id))
    assert len(ids) == len(cases)


def test_the_solution_finds_the_best_arm():
    env = get_env("bandit", arms=3, turns=12, best=1.0, other=0.0)
    episode = jit(jax.vmap(lambda k: scripted(k, env.generate(k, "eval"), env=env)[2]))
    log = episode(jax.random.split(jax.random.key(0), 50))
    assert np.asarray(log.success).all()
    assert np.asarray(log.points.sum((1, 2))).min() > 0.8


def test_bad_options():
    for options, message in (
        ({"arms": 1}, "data.arms = 1; choose an integer from 2 to 8"),
        ({"best": 0.2, "other": 0.5}, "data.other = 0.5 and data.best = 0.2; give chances"),
    ):
        with pytest.raises(UserError, match=message):
            get_env("bandit", **options)
