"""Environments of other libraries: the same episodes as without the adapter."""

import importlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.episodes import get_env
from jrl.errors import UserError
from jrl.system import extras
from jrl.zoo.adapters import array_games

FIGURES = "0123456789abcdefghijklmnopqrstuvwxyz"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEY = jax.random.key(4)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture
def library(request):
    """A library of the extra "games"; its own warnings on import are none of ours."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield importlib.import_module(request.param)


def uses(name):
    only = pytest.param(name, marks=pytest.mark.extra("games", name))
    return pytest.mark.parametrize("library", [only], indirect=True)


def episode(env, actions, split="train", key=KEY):
    """The prompt, then (reply, reward, done, player) of each turn."""
    step, start = jit(env.step), env.generate(key, split)
    turns, state = [], start.state
    for action in actions:
        tokens = jnp.array(env.tokenizer.encode(LETTERS[action]))
        mover = int(env.mover(state))
        state, turn = step(state, tokens, jnp.int32(1), jax.random.key(0))
        reply = env.tokenizer.decode(turn.reply[: int(turn.count)].tolist())
        turns.append((reply, np.asarray(turn.reward), bool(turn.done), mover))
        if turn.done:
            break
    return env.render(start)[0], turns


def own_state(env, key=KEY):
    """The library's state at the start of that episode."""
    return env.generate(key, "train").state.state


@uses("pgx")
def test_tic_tac_toe_is_that_of_pgx(library):
    env, game = (
        get_env("pgx", id="tic_tac_toe", opponent="self", turns=9),
        library.make("tic_tac_toe"),
    )
    for seed in range(3):
        key, rng = jax.random.key(seed), np.random.default_rng(seed)
        actions = rng.permutation(9).tolist()
        prompt, turns = episode(env, actions, key=key)
        state, step = own_state(env, key), jit(game.step)
        assert prompt == "0" * 9
        for action, (reply, reward, done, player) in zip(actions, turns, strict=False):
            assert player == int(state.current_player)
            state = step(state, jnp.int32(action))
            board = np.asarray(state.observation).reshape(9, 2)
            assert reply == "".join(str(int(mine) + 2 * int(theirs)) for mine, theirs in board)
            assert reward.tolist() == np.asarray(state.rewards).tolist()
            assert done == bool(state.terminated)
        assert turns[-1][2]


@uses("pgx")
def test_a_random_opponent_of_pgx_moves_in_between(library):
    env = get_env("pgx", turns=5)
    moves_before = set()
    for seed in range(6):
        prompt, turns = episode(env, [4, 4], key=jax.random.key(seed))
        moves_before.add(prompt.count("2"))  # of the other player, seen by the policy
        if prompt[4] == "0":
            assert turns[0][0][4] == "1"
            assert turns[0][0].count("2") == prompt.count("2") + 1
            assert turns[1][1] == -1  # taken: illegal, and so lost
            assert turns[1][2]
    assert moves_before == {0, 1}


@uses("jumanji")
def test_a_maze_is_that_of_jumanji(library):
    env, maze = get_env("jumanji", id="Maze-v0", turns=8, digits=1), library.make("Maze-v0")
    actions = [0, 1, 2, 3, 1, 1, 2, 2]
    prompt, turns = episode(env, actions)
    (state, observation), step = own_state(env), jit(maze.step)

    def text_of(o):
        places = [o.agent_position.row, o.agent_position.col]
        target = [o.target_position.row, o.target_position.col]
        figures = [FIGURES[int(x)] for x in (*places, *target)]
        return "".join(figures) + "".join("01"[int(x)] for x in np.ravel(o.walls))

    # Leaves of a NamedTuple stand in the order of its fields.
    assert prompt == text_of(observation)
    for action, (reply, reward, done, _) in zip(actions, turns, strict=False):
        state, timestep = step(state, jnp.int32(action))
        assert reply == text_of(timestep.observation)
        assert (float(reward), done) == (float(timestep.reward), bool(timestep.last()))


@uses("jumanji")
def test_actions_of_several_numbers_are_counted_through(library):
    env = get_env("jumanji", id="Minesweeper-v0", turns=3)
    start = env.generate(KEY, "train")
    state, game = own_state(env), library.make("Minesweeper-v0")
    tokens = jnp.array(env.tokenizer.encode("BV"))  # 26 + 21 = row 4, column 7
    _, turn = jit(env.step)(start.state, tokens, jnp.int32(2), KEY)
    _, timestep = jit(game.step)(state[0], jnp.array([4, 7]))
    board = env.tokenizer.decode(turn.reply.tolist())[:100]
    assert board == "".join("-" if x < 0 else FIGURES[x] for x in np.ravel(timestep.observation[0]))
    assert float(turn.reward) == float(timestep.reward)


@uses("gymnax")
def test_a_pole_is_that_of_gymnax(library):
    env = get_env("gymnax", id="CartPole-v1", turns=30, goal=9.0)
    pole, parameters = library.make("CartPole-v1")
    prompt, turns = episode(env, [1] * 30)
    (state, observation), step = own_state(env), jit(partial(pole.step_env, params=parameters))

    def text_of(o):
        return "".join(
            ("-" if x < 0 else "+") + f"{min(round(abs(float(x)) * 100), 999):03}" for x in o
        )

    assert prompt == text_of(observation)
    for reply, reward, done, _ in turns:
        observation, state, paid, terminated, _ = step(KEY, state, 1)
        assert reply == text_of(observation)
        assert (float(reward), done) == (float(paid), bool(terminated))
    assert 5 < len(turns) < 15  # pushed one way, it falls


@uses("gymnax")
def test_what_is_shown_may_be_chosen(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def flags(observation):\n    return observation > 0.5\n")
    env = get_env("gymnax", id="Catch-bsuite", turns=9, show="mine.py:flags")
    prompt, turns = episode(env, [1] * 9)
    assert len(prompt) == 50
    assert prompt.count("1") == 2  # the ball and the paddle
    assert turns[-1][2]


@uses("navix")
def test_an_empty_room_is_that_of_navix(library):
    env = get_env("navix", id="Navix-Empty-5x5-v0", turns=20)
    room = library.make("Navix-Empty-5x5-v0")
    actions = [2, 2, 1, 0, 1, 2, 2, 2]  # 2: forward, 1: turn right, 0: left
    prompt, turns = episode(env, actions)
    state, step = own_state(env), jit(room.step)
    text_of = lambda s: "".join(FIGURES[int(x)] for x in np.ravel(s.observation))  # noqa: E731
    assert prompt == text_of(state)
    for action, (reply, reward, done, _) in zip(actions, turns, strict=False):
        state = step(state, jnp.int32(action))
        assert reply == text_of(state)
        assert (float(reward), done) == (float(state.reward), bool(state.step_type > 0))
    assert (turns[-1][1], turns[-1][2]) == (1, True)


@pytest.mark.parametrize("name", ["gymnax", "jumanji", "navix", "pgx"])
def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it(name, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=f"data.env = '{name}' needs {name}; install it.*games"):
        getattr(array_games, name)()
    assert "games" in extras.install_line("games")


@uses("pgx")
def test_unknown_names_and_options_are_refused(library):
    with pytest.raises(UserError, match="data.id = 'tictactoe'"):
        get_env("pgx", id="tictactoe")
    with pytest.raises(UserError, match="data.digit = 2: there is no such option"):
        get_env("pgx", digit=2)
    with pytest.raises(UserError, match="data.opponent = 'self': pgx 2048 has one player"):
        get_env("pgx", id="2048", opponent="self")
