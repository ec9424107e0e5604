"""Games of textarena, played by a policy that reads and writes text."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.episodes.host import HostEnv, Limits
from jrl.episodes.process import process_env
from jrl.errors import UserError
from jrl.system.extras import need
from jrl.types import NOTHING

_CHILD = Path(__file__).with_name("textarena_child.py")


def from_textarena(
    game: str,
    *,
    options: Mapping[str, Any] = NOTHING,
    players: int = 1,
    opponent: str = "",
    python: str | None = None,
    processes: int = 64,
) -> HostEnv:
    """A game of 20 turns at most; needs the extra ``textarena``, or a Python that has it.

    Games keep their random numbers where all of a process share them, so each episode has a process
    of its own (``process_env``). It is reset with the group's seed: the members of a group play the
    same game. The rewards are the game's for the policy's player, at the last turn; a game is won
    with a reward of 1. A move that the game calls invalid is counted as "invalid_moves".

    Args:
      game: a name that ``textarena.make`` knows, such as "GuessTheNumber-v0".
      options: of ``textarena.make``.
      players: of the game; the policy is player 0.
      opponent: ``FILE.py:function`` from an observation (text) to a move (text), for all other
        players; needed where there are any.
      python: an interpreter that has textarena; None for this one.
      processes: games at a time, others wait; 0 for as many as there are episodes in decode slots
        and opened ahead of them.

    Raises:
      UserError: textarena is not installed here, or there is nobody to play against.
    """
    if players > 1 and not opponent:
        raise UserError(
            f"players = {players} of {game!r} and no opponent; name one as FILE.py:function"
        )
    if python is None and importlib.util.find_spec("textarena") is None:
        need("textarena", "textarena", repr(game))
    place, _, name = opponent.rpartition(":")
    if opponent and not Path(place).is_file():
        raise UserError(f"opponent = {opponent!r}: there is no file {place!r}")
    arguments = {
        "game": game,
        "options": dict(options),
        "players": players,
        "opponent": f"{Path(place).resolve()}:{name}" if opponent else "",
    }
    limits = Limits(turns=20)
    return process_env(
        f"{_CHILD}:TextGame", arguments, python=python, limits=limits, at_once=processes
    )
