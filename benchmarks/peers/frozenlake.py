"""FrozenLake's rules in plain Python, for peers whose environments run on the host.

The same texts as ``jrl.zoo.envs.games.gridworld`` with ``start = "anywhere"``: the map and the
place as a prompt, a letter as a turn, the new place as a reply.
"""

from __future__ import annotations

MAP = "sffffhfhfffhhffg"
SIZE = 4
MOVES = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
STARTS = [i for i, tile in enumerate(MAP) if tile in "sf"]
"""Cells that an episode may begin in; the goal can be reached from all of them."""


def prompt(place: int) -> str:
    """The map, with the start where the episode begins, and the place."""
    tiles = MAP.replace("s", "f")
    return f"{tiles[:place]}s{tiles[place + 1 :]}{shown(place)}"


def shown(place: int) -> str:
    """Row and column."""
    return f"{place // SIZE}{place % SIZE}"


def move(place: int, turn: str) -> tuple[int, float, bool]:
    """The place after a turn, the points for it, and whether the episode is over."""
    row, column = MOVES.get(turn, (0, 0))
    row = min(max(place // SIZE + row, 0), SIZE - 1)
    column = min(max(place % SIZE + column, 0), SIZE - 1)
    place = row * SIZE + column
    return place, float(MAP[place] == "g"), MAP[place] in "gh"
