"""A grid world with the rules of FrozenLake: cross the ice, keep out of the holes.

The prompt "fsffhfhfffffhffg01" is the map, row by row, and the place: row 0, column 1. A turn is
one letter, such as "d" for down, and the reply the new place, "11".
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.data.tasks.base import check_range, in_eval
from jrl.episodes.device import Env, Turn
from jrl.errors import UserError, unknown_choice
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

MAPS = {
    "4x4": ("sfff", "fhfh", "fffh", "hffg"),
    "8x8": (
        *("sfffffff", "ffffffff", "fffhffff", "fffffhff"),
        *("fffhffff", "fhhfffhf", "fhffhfhf", "fffhfffg"),
    ),
}
"""FrozenLake's own: start, frozen, hole, goal."""
STARTS = ("corner", "anywhere")
CANDIDATES = 64
FROZEN_SHARE = 0.8  # of the cells of a random map, as in gymnasium's generate_random_map

TOKENIZER = char_tokenizer("ldrusfhg01234567")
LEFT, DOWN, RIGHT, UP, S, F, H, G, DIGIT_0 = TOKENIZER.encode("ldrusfhg0")
MOVES = np.array(
    [(0, -1), (1, 0), (0, 1), (-1, 0)], np.int32
)  # rows, columns; left, down, right, up


class Grid(struct.PyTreeNode):
    """Tiles [C] int32, tokens by row; place [] int32, the cell that the policy is in."""

    tiles: Array
    place: Array


def gridworld(
    map: str = "4x4",
    size: int = 4,
    start: str = "corner",
    slippery: bool = False,
    turns: int = 0,
) -> Env:
    """FrozenLake: a point at the goal, nothing and the end in a hole.

    A letter of l, d, r, u moves left, down, right or up, and not out of the grid; any other token
    stays. On slippery ice one move in three goes where it was meant to, and one to either side.

    Args:
      map: "4x4" or "8x8", FrozenLake's own; or "random", a new one for every group, one cell in
        five a hole and the goal in reach. Random maps of the split "eval" are never trained on; of
        the others both splits have the same.
      size: rows and columns of a random map, 2 to 8.
      start: "corner", as in FrozenLake, or "anywhere" on the ice from where the goal is in reach.
      slippery: whether moves slip.
      turns: the most moves; 0 for four times the rows, or 25 times on slippery ice.

    Returns:
      The Env. The identity of a state is its cell.

    Raises:
      UserError: an option out of its range.
    """
    if map not in (*MAPS, "random"):
        raise unknown_choice("data.map", map, (*MAPS, "random"))
    if start not in STARTS:
        raise unknown_choice("data.start", start, STARTS)
    check_range("data.size", size, 2, 8)
    if not isinstance(slippery, bool):
        raise UserError(f"data.slippery = {slippery!r}; give true or false")
    check_range("data.turns", turns, 0, 1000)
    n = size if map == "random" else len(MAPS[map])
    cells, fixed_tiles = n * n, None
    if map != "random":
        fixed_tiles = jnp.array(TOKENIZER.encode("".join(MAPS[map])), jnp.int32)
    generate = partial(_generate, tiles=fixed_tiles, n=n, anywhere=start == "anywhere")

    def init(key: Array, split: str) -> tuple[Grid, Array, Array]:
        if fixed_tiles is None:
            grids, fine = jax.vmap(generate)(jax.random.split(key, CANDIDATES))
            is_eval = jax.vmap(in_eval)(grids.tiles)
            first = jnp.argmax(fine & (is_eval == (split == "eval")))
            grid = jax.tree.map(lambda x: x[first], grids)
        else:
            grid, _ = generate(key)
        prompt = jnp.concatenate([grid.tiles, shown(grid.place)])
        return grid, prompt, jnp.int32(cells + 2)

    def shown(place: Array) -> Array:
        return (DIGIT_0 + jnp.stack([place // n, place % n])).astype(jnp.int32)

    def step(grid: Grid, tokens: Array, length: Array, key: Array) -> tuple[Grid, Turn]:
        action = tokens[0] - LEFT
        if slippery:
            action = jnp.where(
                (action >= 0) & (action < 4),
                (action + jax.random.randint(key, (), -1, 2)) % 4,
                action,
            )
        place = moved(grid.place, action, n)
        tile = grid.tiles[place]
        won = tile == G
        return grid.replace(place=place), Turn(
            reply=shown(place),
            count=jnp.int32(2),
            reward=won.astype(jnp.float32),
            done=won | (tile == H),
            success=won,
            state_id=grid.place,
        )

    def solution(grid: Grid) -> tuple[Array, Array]:
        ways = distances(grid.tiles, n)
        nexts = jax.vmap(lambda a: moved(grid.place, a, n))(jnp.arange(4))
        return (LEFT + jnp.argmin(ways[nexts])[None]).astype(jnp.int32), jnp.int32(1)

    return Env(
        name="gridworld",
        init=init,
        step=step,
        turns=turns or n * (25 if slippery else 4),
        prompt_tokens=cells + 2,
        turn_tokens=1,
        reply_tokens=2,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )


def _generate(key: Array, *, tiles: Array | None, n: int, anywhere: bool) -> tuple[Grid, Array]:
    """A grid, and whether its goal is in reach; random tiles where none are given."""
    cells = n * n
    of_map, of_start = jax.random.split(key)
    if tiles is None:
        frozen = jax.random.uniform(of_map, (cells,)) < FROZEN_SHARE
        tiles = jnp.where(frozen, F, H).at[0].set(S).at[-1].set(G)
    ways = distances(tiles, n)
    place = jnp.int32(0)
    if anywhere:
        # The greatest of random weights: each cell from which the goal is in reach alike.
        inside = (ways > 0) & (ways < cells)
        weight = jnp.where(inside, jax.random.uniform(of_start, (cells,)), -1)
        place = jnp.argmax(weight).astype(jnp.int32)
        tiles = tiles.at[0].set(F).at[place].set(S)
    return Grid(tiles, place), ways[place] < cells


def moved(place: Array, action: Array, n: int) -> Array:
    """[] int32: the cell after a move; an action that is none of 0 to 3 stays."""
    row, column = place // n, place % n
    by = jnp.asarray(MOVES)[jnp.clip(action, 0, 3)]
    row, column = jnp.clip(row + by[0], 0, n - 1), jnp.clip(column + by[1], 0, n - 1)
    return jnp.where((action >= 0) & (action < 4), row * n + column, place).astype(jnp.int32)


def distances(tiles: Array, n: int) -> Array:
    """[C] int32: the fewest moves from each cell to the goal; C in holes, and where none leads."""
    cells = n * n
    ends = jax.vmap(lambda c: jax.vmap(lambda a: moved(c, a, n))(jnp.arange(4)))(jnp.arange(cells))

    def relax(_: Array, ways: Array) -> Array:
        nearer = jnp.minimum(ways, 1 + ways[ends].min(1))
        return jnp.where(tiles == H, cells, jnp.minimum(nearer, cells))

    return jax.lax.fori_loop(0, cells, relax, jnp.where(tiles == G, 0, cells).astype(jnp.int32))
