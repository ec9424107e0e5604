"""Nim against plain Python, and its perfect player against a search of the whole game."""

import functools
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
from jrl.zoo.envs.games.nim import perfect_move, random_move


@functools.cache
def winning(heaps):
    """Whether the player to move can force a win; no objects left is a loss."""
    return any(
        not winning((*heaps[:i], heaps[i] - k, *heaps[i + 1 :]))
        for i in range(len(heaps))
        for k in range(1, heaps[i] + 1)
    )


def test_the_perfect_player_never_gives_a_won_game_away():
    positions = np.array(list(itertools.product(range(5), repeat=3)))
    heap, counts = jax.device_get(jit(jax.vmap(perfect_move))(jnp.asarray(positions)))
    for before, i, k in zip(positions, heap, counts, strict=True):
        if before.sum() == 0:
            assert k == 0
            continue
        assert 1 <= k <= before[i]
        after = before.copy()
        after[i] -= k
        assert winning(tuple(before)) == (not winning(tuple(after)))


def test_random_moves_are_all_legal_moves_alike():
    left = jnp.array([2, 0, 3])
    keys = jax.random.split(jax.random.key(0), 1000)
    heap, removed = jax.device_get(jit(jax.vmap(lambda k: random_move(left, k)))(keys))
    moves, counts = np.unique(np.stack([heap, removed], 1), axis=0, return_counts=True)
    assert moves.tolist() == [[0, 1], [0, 2], [2, 1], [2, 2], [2, 3]]
    assert np.abs(counts - 200).max() < 60


@pytest.mark.parametrize("opponent", ["perfect", "random"])
def test_moves_follow_the_rules(opponent):
    env = get_env("nim", heaps=2, most=4, opponent=opponent)
    step, start_of = jit(env.step), jit(partial(env.generate, split="train"))
    rng, ends = np.random.default_rng(0), set()
    for i in range(40):
        start = jax.device_get(start_of(jax.random.key(i)))
        text = env.render(start)[0]
        heaps = [int(c) for c in text[:2]]
        assert text[2:] == ":"
        state = start.state
        while True:
            move = f"{rng.choice(list('aabbc'))}{rng.integers(0, 4)}"
            tokens = jnp.array(env.tokenizer.encode(move))
            key = jax.random.key(int(rng.integers(1000)))
            state, turn = jax.device_get(step(state, tokens, jnp.int32(2), key))
            assert turn.state_id == heaps[0] + 5 * heaps[1]
            mine, count = "abcd".index(move[0]), int(move[1])
            if mine > 1 or not 1 <= count <= heaps[mine]:
                assert (turn.done, turn.success, turn.reward) == (True, False, 0)
                ends.add("illegal")
                break
            heaps[mine] -= count
            if sum(heaps) == 0:
                assert (turn.done, turn.success, turn.reward) == (True, True, 1)
                ends.add("won")
                break
            reply = env.tokenizer.decode(turn.reply.tolist())
            theirs, number = "abcd".index(reply[0]), int(reply[1])
            assert 1 <= number <= heaps[theirs]
            heaps[theirs] -= number
            assert reply[2:] == "".join(map(str, heaps))
            is_over = sum(heaps) == 0
            assert (turn.done, turn.success, turn.reward) == (is_over, False, 0)
            if is_over:
                ends.add("lost")
                break
    assert ends >= {"illegal", "lost"}
    assert ("won" in ends) == (opponent == "random")  # nobody wins by chance against perfection


def test_against_a_perfect_player_the_solution_wins_what_can_be_won():
    env = get_env("nim", heaps=3, most=3)
    keys = jax.random.split(jax.random.key(2), 200)

    def episode(key):
        start = env.generate(key, "eval")
        return start.state, scripted(key, start, env=env)[2].success[0]

    heaps, success = jax.device_get(jit(jax.vmap(episode))(keys))
    expected = [winning(tuple(row)) for row in heaps.tolist()]
    assert success.tolist() == expected
    assert 0.5 < np.mean(expected) < 1


@pytest.mark.parametrize("opponent", ["perfect", "self"])
def test_an_illegal_move_may_cost_points(opponent):
    env = get_env("nim", heaps=2, most=3, opponent=opponent, illegal=-0.5)
    state = env.generate(jax.random.key(0), "train").state
    tokens = jnp.array(env.tokenizer.encode("c1"))
    _, turn = jit(env.step)(state, tokens, jnp.int32(2), jax.random.key(0))
    assert bool(turn.done)
    assert np.asarray(turn.reward).tolist() == (-0.5 if opponent == "perfect" else [-0.5, 1.0])
    assert not np.asarray(turn.success).ravel()[0]


def test_bad_options():
    for options, message in (
        ({"heaps": 5}, "data.heaps = 5; choose an integer from 1 to 4"),
        ({"illegal": 0.5}, "data.illegal = 0.5; give points, 0 or less"),
        ({"most": 0}, "data.most = 0; choose an integer from 1 to 9"),
        ({"opponent": "perfct"}, "data.opponent = 'perfct'; did you mean 'perfect'"),
    ):
        with pytest.raises(UserError, match=message):
            get_env("nim", **options)
