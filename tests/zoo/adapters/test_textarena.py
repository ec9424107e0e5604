"""Games of textarena, where it is installed."""

import asyncio
import importlib.util
import sys

import numpy as np
import pytest

from jrl.episodes.host import Reply
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.adapters.textarena import from_textarena

PROMPT = Prompt(0, "Win.", np.zeros(0, np.int32), "-")
needs_textarena = pytest.mark.extra("textarena")


async def play(env, moves, seed=3):
    try:
        state, messages = await env.init(PROMPT, seed)
        texts, feedback = [messages[0]["content"]], {}
        for number, move in enumerate(moves):
            state, feedback = await env.step(
                state, Reply(move, move, np.zeros(1, np.int32), number, False)
            )
            if feedback.get("done"):
                break
            texts.append(feedback["messages"][0]["content"])
        await env.close(state)
        return texts, feedback
    finally:
        await env.lifecycle.shutdown()


@needs_textarena
def test_a_game_is_played_to_its_end():
    env = from_textarena("GuessTheNumber-v0")
    moves = [f"I say [{i}]" for i in range(1, 21)]
    texts, end = asyncio.run(play(env, moves))
    assert texts[0].startswith("Win.\n[GAME] You are Player 0")
    assert texts[1] == "[GAME] The target number is higher."  # its own move is not repeated
    assert end["done"]
    assert end["success"] is (end["reward"] >= 1)
    assert end["metrics"] == {"invalid_moves": 0.0}
    again = asyncio.run(play(from_textarena("GuessTheNumber-v0"), moves))
    assert again == (texts, end)  # the seed is the game


@needs_textarena
def test_an_opponent_moves_between_the_policys_turns(tmp_path):
    (tmp_path / "other.py").write_text(
        "import re\n\ndef move(seen):\n    return re.findall(r'\\[\\d\\]', seen)[-1]\n"
    )
    env = from_textarena("TicTacToe-v0", players=2, opponent=f"{tmp_path}/other.py:move")
    texts, end = asyncio.run(play(env, ["[0]", "[1]", "[2]"]))
    assert len(texts) >= 2 or end["done"]


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(UserError, match="players = 2 of 'TicTacToe-v0' and no opponent"):
        from_textarena("TicTacToe-v0", players=2)
    with pytest.raises(UserError, match="there is no file 'none.py'"):
        from_textarena("TicTacToe-v0", players=2, opponent="none.py:move", python="/bin/sh")
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="'GuessTheNumber-v0' needs textarena"):
        from_textarena("GuessTheNumber-v0")
