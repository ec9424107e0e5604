"""The grid world against FrozenLake's rules in plain Python, as gymnasium states them."""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.data.tasks.base import in_eval
from jrl.episodes import get_env
from jrl.errors import UserError

KEYS = jax.random.split(jax.random.key(0), 40)


def frozen_lake(desc, row, col, action):
    """(row, col, reward, terminated) of one move on solid ice."""
    rows, cols = len(desc), len(desc[0])
    if action == 0:
        col = max(col - 1, 0)
    elif action == 1:
        row = min(row + 1, rows - 1)
    elif action == 2:
        col = min(col + 1, cols - 1)
    elif action == 3:
        row = max(row - 1, 0)
    letter = desc[row][col]
    return row, col, float(letter == "g"), letter in "gh"


def description(env, start):
    n = int(np.sqrt(env.prompt_tokens - 2))
    text = env.render(start)[0]
    assert len(text) == n * n + 2
    return [text[i * n : i * n + n] for i in range(n)], (int(text[-2]), int(text[-1]))


@pytest.mark.parametrize(
    "options",
    [{}, {"map": "8x8"}, {"map": "random", "size": 5}, {"map": "random", "start": "anywhere"}],
    ids=str,
)
def test_moves_follow_the_rules(options):
    env = get_env("gridworld", **options)
    start_of, step = jit(partial(env.generate, split="train")), jit(env.step)
    rng, visits = np.random.default_rng(0), collections.Counter()
    for key in KEYS[:6]:
        start = jax.device_get(start_of(key))
        desc, (row, col) = description(env, start)
        assert desc[row][col] == "s"
        assert sum(line.count("s") for line in desc) == 1
        if "start" not in options:
            assert (row, col) == (0, 0)
        state = start.state
        for _ in range(40):
            action = int(rng.integers(0, 5))  # 4 is none of the letters
            token = env.tokenizer.encode("ldrus"[action])
            before = row * len(desc) + col
            state, turn = jax.device_get(step(state, jnp.array(token), jnp.int32(1), key))
            row, col, reward, done = frozen_lake(desc, row, col, action)
            assert env.tokenizer.decode(turn.reply.tolist()) == f"{row}{col}"
            assert (turn.reward, turn.done, turn.success) == (reward, done, reward == 1)
            assert turn.state_id == before
            visits[desc[row][col]] += 1
            if done:
                break
    assert set(visits) >= {"f", "h"}


def test_known_maps_are_those_of_frozen_lake():
    for name, rows in {
        "4x4": ["SFFF", "FHFH", "FFFH", "HFFG"],
        "8x8": [
            *("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF"),
            *("FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
        ],
    }.items():
        env = get_env("gridworld", map=name)
        start = env.generate(KEYS[0], "train")
        assert description(env, start) == ([row.lower() for row in rows], (0, 0))


def test_slippery_moves_go_three_ways_alike():
    env = get_env("gridworld", slippery=True)
    start = env.generate(KEYS[0], "train")
    state = start.state.replace(place=jnp.int32(9))  # row 2, column 1: ice all around but above
    down = jnp.array(env.tokenizer.encode("d"))
    keys = jax.random.split(jax.random.key(1), 600)
    after, _ = jit(jax.vmap(lambda k: env.step(state, down, jnp.int32(1), k)))(keys)
    counts = collections.Counter(np.asarray(after.place).tolist())
    assert set(counts) == {13, 8, 10}  # down, and left and right of it
    assert max(abs(c - 200) for c in counts.values()) < 50
    after, _ = env.step(state, jnp.array(env.tokenizer.encode("s")), jnp.int32(1), keys[0])
    assert int(after.place) == 9


def breadth_first(desc):
    """Moves from the goal to every cell that it can be reached from."""
    n = len(desc)
    ways, queue = {(n - 1, n - 1): 0}, collections.deque([(n - 1, n - 1)])
    while queue:
        row, col = queue.popleft()
        for other in ((row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)):
            inside = min(other) >= 0 and max(other) < n and desc[other[0]][other[1]] != "h"
            if inside and other not in ways:
                ways[other] = ways[row, col] + 1
                queue.append(other)
    return ways


def test_random_maps_can_be_solved_and_stay_in_their_split():
    env = get_env("gridworld", map="random", size=4, start="anywhere")
    starts = {
        split: jax.device_get(jit(jax.vmap(partial(env.generate, split=split)))(KEYS))
        for split in ("train", "eval")
    }
    solution = jit(env.solution)
    texts, holes = {}, 0
    for split, start_states in starts.items():
        texts[split] = set()
        in_split = jax.vmap(in_eval)(start_states.state.tiles)
        assert (np.asarray(in_split) == (split == "eval")).all()
        for i in range(len(KEYS)):
            start = jax.tree.map(lambda x, i=i: x[i], start_states)
            desc, place = description(env, start)
            texts[split].add("".join(desc))
            holes += sum(row.count("h") for row in desc)
            ways = breadth_first(desc)
            assert place in ways
            if i >= 8:
                continue
            row, col = place  # the solution takes a shortest way
            for left in range(ways[place], 0, -1):
                state = start.state.replace(place=np.int32(row * 4 + col))
                tokens, _ = solution(state)
                action = "ldru".index(env.tokenizer.decode(np.asarray(tokens).tolist()))
                row, col, reward, _ = frozen_lake(desc, row, col, action)
                assert ways[row, col] == left - 1
            assert reward == 1
    assert len(texts["train"]) > 30
    assert not texts["train"] & texts["eval"]
    assert 0.1 < holes / (16 * 2 * len(KEYS)) < 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "5x5"}, "data.map = '5x5'; choose from 4x4, 8x8, random"),
        ({"start": "middle"}, "data.start = 'middle'; choose from anywhere, corner"),
        ({"size": 9}, "data.size = 9; choose an integer from 2 to 8"),
        ({"slippery": 1}, "data.slippery = 1; give true or false"),
        ({"turns": -1}, "data.turns = -1; choose an integer"),
        ({"holes": 3}, "data.holes = 3: there is no such option"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        get_env("gridworld", **options)
