"""A game of textarena in a process of its own: standard library and textarena alone.

``process_env`` runs this file in whatever Python has textarena; JRL need not be installed there.
"""

import importlib.util
import pathlib
from typing import Any


class TextGame:
    """``init``, ``step`` and ``close`` of one game; the state is what has been shown so far."""

    def __init__(self, game: str, options: dict, players: int, opponent: str) -> None:
        import textarena

        self.make = lambda: textarena.make(game, **options)
        self.players = players
        self.opponent = _load(opponent) if opponent else None

    def init(self, prompt: Any, seed: int) -> tuple[Any, list[dict]]:
        """Begins a game; other players move before the policy's first turn."""
        env = self.make()
        env.reset(num_players=self.players, seed=seed % 2**31)
        state = {"env": env, "seen": ""}
        done, _ = self._others(env)
        text = f"{prompt.text}\n{self._new(state)}".strip() if not done else "The game is over."
        return state, [{"role": "user", "content": text}]

    def step(self, state: Any, reply: Any) -> tuple[Any, dict]:
        """Plays the policy's move and those of the others."""
        env = state["env"]
        done, _ = env.step(reply.text)
        invalid = 0.0
        if not done:
            done, _ = self._others(env)
        if done:
            rewards, game_info = env.close()
            points = float((rewards or {}).get(0, 0.0))
            invalid = float(bool(((game_info or {}).get(0) or {}).get("invalid_move", False)))
            metrics = {"invalid_moves": invalid}
            return state, {
                "reward": points,
                "done": True,
                "success": points >= 1,
                "metrics": metrics,
            }
        text = self._new(state, reply.text)
        return state, {"messages": [{"role": "user", "content": text}], "state_key": state["seen"]}

    def close(self, state: Any) -> None:
        """Forgets the game."""
        state.clear()

    def _others(self, env: Any) -> tuple[bool, Any]:
        """Moves of the other players, until it is the policy's turn or the game is over."""
        while self.opponent is not None:
            player, observation = env.get_observation()
            if player == 0:
                break
            done, info = env.step(self.opponent(_as_text(observation)))
            if done:
                return True, info
        return False, None

    def _new(self, state: Any, reply: str = "") -> str:
        """The part of the observation that is new to the policy, without its last move."""
        _, observation = state["env"].get_observation()
        if not isinstance(observation, str):  # messages not read before, as (sender, text, kind)
            text = "\n".join(str(item[1]) for item in observation if item[0] != 0)
            state["seen"] += text
            return text or "Your turn."
        before, state["seen"] = state["seen"], observation
        new = observation.removeprefix(before).strip()
        if reply := reply.strip():
            echo, separator, rest = new.partition(reply)
            if separator and echo.startswith("[") and "\n" not in echo:
                new = rest.strip()
        return new or "Your turn."


def _as_text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(str(item[1]) for item in observation)


def _load(spec: str) -> Any:
    place, _, name = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(pathlib.Path(place).stem, place)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)
