"""Numbers as text, and a made-up game played through the adapter against plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.errors import UserError
from jrl.zoo.adapters.arrays import Game, array_env, plain_keys, written

FIGURES = "0123456789abcdefghijklmnopqrstuvwxyz+-"


def text(observation, digits=1, decimals=2):
    symbols = jit(partial(written, digits=digits, decimals=decimals))(observation)
    return "".join(FIGURES[i] for i in symbols.tolist())


def test_numbers_are_written_with_as_many_figures_each():
    assert text(jnp.array([0, 9, 10, 35, 36, -4])) == "09azz-"
    assert text(jnp.array([0, 36, 1295, 5000, -4]), digits=2) == "0010zzzz--"
    assert text(jnp.array([200, 7], jnp.uint8), digits=2) == "5k07"
    assert text(jnp.array([0.0, 1.234, -0.5, 77.0])) == "+000+123-050+999"
    assert text(jnp.array([1.25]), digits=2, decimals=0) == "+01"
    assert text(jnp.array([jnp.nan])) == "+000"
    assert text(jnp.array([[True, False], [False, True]])) == "1001"
    assert text({"b": jnp.array(3), "a": jnp.array(True)}) == "13"


@pytest.mark.parametrize("flags", [2, 5, 6])
def test_a_board_of_flags_is_one_figure_a_cell(flags):
    board = np.random.default_rng(flags).random((2, 3, flags)) < 0.4
    figures = text(jnp.asarray(board))
    for cell, figure in zip(board.reshape(-1, flags), figures, strict=True):
        first = int(np.argmax(cell)) + 1 if cell.any() else 0
        bits = int(sum(2**i for i in np.flatnonzero(cell)))
        assert FIGURES.index(figure) == (bits if flags <= 5 else first)


def race(players=2, target=7):
    """Players add 1 to 3 in turns, 3 only below 4; who reaches the target has a point."""

    def step(state, action, key):
        total = state["total"] + action + 1
        done = total >= target
        mine = jnp.arange(players) == state["player"]
        reward = jnp.where(done, jnp.where(mine, 1.0, -1.0), 0.0)
        reward = reward if players > 1 else reward[0]
        return {"total": total, "player": (state["player"] + 1) % players}, reward, done

    return Game(
        name="race",
        reset=lambda key: {"total": jnp.int32(0), "player": jax.random.randint(key, (), 0, 2)},
        step=step,
        observe=lambda state: jnp.stack([state["total"], state["player"]]),
        actions=3,
        players=players,
        player=lambda state: state["player"],
        legal=lambda state: jnp.arange(3) < jnp.where(state["total"] < 4, 3, 2),
    )


def turns_of(env, split, seed, letters="ABC"):
    """An episode of random turns: (prompt, [(letter, turn, who took it)])."""
    rng = np.random.default_rng(seed)
    start = jax.device_get(env.generate(jax.random.key(seed), split))
    step, state, turns = jit(env.step), start.state, []
    while len(turns) < env.turns:
        letter = str(rng.choice(list(letters)))
        tokens = jnp.array(env.tokenizer.encode(letter))
        key = jax.random.key(100 * seed + len(turns))
        mover = int(env.mover(state))
        state, turn = jax.device_get(step(state, tokens, jnp.int32(1), key))
        turns.append((letter, turn, mover))
        if turn.done:
            break
    return env.render(start)[0], turns


def state_text(env, turn):
    return env.tokenizer.decode(turn.reply[: turn.count].tolist())


def test_against_itself_the_policy_is_asked_for_every_player():
    env = array_env(race(), turns=10, opponent="self").check()
    assert env.players == 2
    for seed in range(8):
        prompt, turns = turns_of(env, "train", seed)
        total, player = int(prompt[0]), int(prompt[1])
        for letter, turn, mover in turns:
            assert mover == player
            total += "ABC".index(letter) + 1
            expected = [0, 0] if total < 7 else [1 if p == player else -1 for p in range(2)]
            assert turn.reward.tolist() == expected
            assert turn.success.tolist() == [e == 1 for e in expected]
            assert turn.done == (total >= 7)
            player = 1 - player
            assert state_text(env, turn) == f"{total}{player}"


@pytest.mark.parametrize("opponent", ["random", "self"])
def test_other_players_draw_legal_actions_until_it_is_the_policys_turn(opponent):
    env = array_env(race(), turns=10, opponent=opponent).check()
    split = "eval" if opponent == "self" else "train"
    moves, first, ends = set(), set(), set()
    for seed in range(30):
        prompt, turns = turns_of(env, split, seed, letters="AB")
        total = int(prompt[0])
        first.add(total)
        for letter, turn, mover in turns:
            assert mover == 0
            total += "AB".index(letter) + 1
            points = float(np.atleast_1d(turn.reward)[0])
            if total >= 7:
                assert (points, bool(turn.done)) == (1, True)
            else:
                after = int(state_text(env, turn)[0])
                assert (points, bool(turn.done)) == (-float(after >= 7), after >= 7)
                moves.add((total >= 4, after - total))
                total = after
            ends.add(points)
            assert bool(np.atleast_1d(turn.success)[0]) == (points == 1)
    assert moves == {(False, 1), (False, 2), (False, 3), (True, 1), (True, 2)}
    assert first >= {0, 1, 2, 3}  # in half of the games another player begins
    assert ends == {0, 1, -1}


def test_a_turn_that_is_no_action_ends_the_episode():
    env = array_env(race(players=1), turns=10).check()
    state = env.generate(jax.random.key(0), "train").state
    for word in ("3", "+"):
        tokens = jnp.array(env.tokenizer.encode(word))
        _, turn = env.step(state, tokens, jnp.int32(1), jax.random.key(0))
        assert (float(turn.reward), bool(turn.done), bool(turn.success)) == (-1, True, False)
    _, turn = env.step(state, jnp.array([env.stop_id]), jnp.int32(1), jax.random.key(0))
    assert bool(turn.done)


def test_points_add_up_to_the_goal_and_many_actions_take_two_letters():
    def step(state, action, key):
        return state + action, jnp.float32(1), state + action > 100

    game = Game("sum", lambda key: jnp.int32(0), step, lambda state: state, actions=30)
    env = array_env(game, turns=3, goal=2.0, digits=3, show=lambda x: x * 2).check()
    assert (env.turn_tokens, env.reply_tokens) == (2, 3)
    state, turns, ids = env.generate(jax.random.key(0), "train").state, [], []
    for letters in ("BC", "AB", "BD"):  # 28, 1, 29
        tokens = jnp.array(env.tokenizer.encode(letters))
        state, turn = env.step(state, tokens, jnp.int32(2), jax.random.key(0))
        turns.append((state_text(env, turn), bool(turn.success)))
        ids.append(int(turn.state_id))
    assert turns == [("01k", False), ("01m", True), ("038", True)]
    assert len(set(ids)) == 3
    _, turn = env.step(state, jnp.array(env.tokenizer.encode("BE")), jnp.int32(2), KEY)  # 30
    assert float(turn.reward) == -1


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "data.turns = 0; choose an integer from 1 to 10000"),
        ({"digits": 9}, "data.digits = 9; choose an integer from 1 to 6"),
        ({"decimals": -1}, "data.decimals = -1; choose an integer from 0 to 6"),
        ({"goal": "high"}, "data.goal = 'high'; give points"),
        ({"opponent": "me"}, "data.opponent = 'me'; choose from random, self"),
        ({"opponent": "self"}, "data.opponent = 'self': race has one player"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        array_env(race(players=1), **({"turns": 5} | options))


def test_too_many_actions():
    with pytest.raises(UserError, match="race has 677 actions; the adapter writes up to 676"):
        array_env(race()._replace(actions=677), turns=5)


def test_random_keys_of_a_state_are_integers_to_the_host():
    """NumPy holds no typed keys, and groups of several draws are joined as its arrays."""

    def step(state, action, key):
        key, step_key = jax.random.split(state["key"])
        total = state["total"] + jax.random.randint(step_key, (), 0, 10)
        return {"key": key, "total": total}, jnp.float32(0), total > 20

    game = Game(
        name="dice",
        reset=lambda key: {"key": jax.random.key(7, impl="rbg"), "total": jnp.int32(0)},
        step=step,
        observe=lambda state: state["total"],
        actions=2,
    )
    plain = plain_keys(game)
    mine, theirs = game.reset(jax.random.key(0)), plain.reset(jax.random.key(0))
    assert np.concatenate([theirs["key"], theirs["key"]]).dtype == np.uint32
    for _ in range(3):
        mine, *_ = game.step(mine, jnp.int32(0), jax.random.key(1))
        theirs, *_ = plain.step(theirs, jnp.int32(0), jax.random.key(1))
        assert plain.observe(theirs) == game.observe(mine)
    free = race()
    assert plain_keys(free) is free
    start = array_env(game, turns=3).generate(jax.random.key(0), "train")
    assert all(isinstance(np.asarray(x), np.ndarray) for x in jax.tree.leaves(start.state))
