"""Environments of pgx, jumanji, gymnax and navix, played inside one program; extra ``games``.

Each function makes a ``Game`` of a library's environment, and ``array_env`` the rest: its further
keyword arguments (``turns``, ``goal``, ``opponent``, ``digits``, ``decimals``, ``show``) are the
options of all four. In a configuration ``data.show = "FILE.py:function"`` names a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.episodes.device import Env
from jrl.errors import UserError, unknown_choice
from jrl.system.extras import need
from jrl.types import Array
from jrl.user_code import check_options, load
from jrl.zoo.adapters.arrays import Game, array_env

EXTRA = "games"


def pgx(id: str = "tic_tac_toe", opponent: str = "random", turns: int = 20, **options: Any) -> Env:
    """A game of pgx, such as "tic_tac_toe", "connect_four", "kuhn_poker" or "2048".

    "Pgx: Hardware-Accelerated Parallel Game Simulators for Reinforcement Learning"
    (arXiv:2303.17503). An illegal action loses, as in pgx. Who is player 0, and so who begins, is
    drawn by pgx.

    Args:
      id: its name.
      opponent: "random", or "self" for the policy on all sides.
      turns: the most turns.
      **options: of ``array_env``.

    Returns:
      The Env.

    Raises:
      UserError: pgx is not installed, has no game of that name, or an option is out of its range.
    """
    library = need("pgx", EXTRA, "data.env = 'pgx'")
    if id not in library.available_envs():
        raise unknown_choice("data.id", id, library.available_envs())
    env = library.make(id)

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        state = env.step(state, action, key)
        rewards = state.rewards if env.num_players > 1 else state.rewards[0]
        return state, rewards, state.terminated | state.truncated

    game = Game(
        name=f"pgx {id}",
        reset=env.init,
        step=step,
        observe=lambda state: state.observation,
        actions=env.num_actions,
        players=env.num_players,
        player=lambda state: state.current_player,
        legal=lambda state: state.legal_action_mask,
    )
    return array_env(game, turns=turns, opponent=opponent, **_own_show(options))


def jumanji(id: str = "Maze-v0", turns: int = 50, **options: Any) -> Env:
    """An environment of jumanji, such as "Maze-v0", "Game2048-v1" or "SlidingTilePuzzle-v0".

    "Jumanji: a Diverse Suite of Scalable Reinforcement Learning Environments in JAX"
    (arXiv:2306.09884). The policy sees neither the count of steps nor which actions are legal.
    Actions of several numbers are counted through, the last number first.

    Args:
      id: its name, or FILE.py:function that returns a jumanji environment, for one with a generator
        of its own.
      turns: the most turns.
      **options: of ``array_env``.

    Returns:
      The Env.

    Raises:
      UserError: jumanji is not installed, has no such environment, or an option is out of its
        range.
    """
    library = need("jumanji", EXTRA, "data.env = 'jumanji'")
    env = _made(id, library.make, sorted(library.registered_environments()))
    spec = env.action_spec
    sizes = np.asarray(getattr(spec, "num_values", None))
    if sizes.dtype == object:
        raise UserError(
            f"data.id = {id!r}: its actions are {spec!r:.60}; choose an environment whose actions "
            "are integers"
        )

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        if sizes.ndim:
            action = jnp.stack(jnp.unravel_index(action, tuple(sizes.ravel().tolist())))
            action = action.reshape(sizes.shape)
        inner, timestep = env.step(state[0], action.astype(spec.dtype))
        reward = jnp.asarray(timestep.reward, jnp.float32)
        return (inner, timestep.observation), reward.sum(), timestep.last()

    def reset(key: Array) -> tuple[Any, Any]:
        state, timestep = env.reset(key)
        return state, timestep.observation

    game = Game(
        name=f"jumanji {id}",
        reset=reset,
        step=step,
        observe=lambda state: _without(state[1], ("action_mask", "step_count")),
        actions=math.prod(sizes.ravel().tolist()),
    )
    return array_env(game, turns=turns, **_own_show(options))


def gymnax(id: str = "CartPole-v1", turns: int = 50, **options: Any) -> Env:
    """An environment of gymnax with its default parameters, such as "CartPole-v1".

    gymnax (github.com/RobertTLange/gymnax). Where the reward has no end, as for a pole that stands,
    ``goal`` says how many points are a success.

    Args:
      id: its name.
      turns: the most turns.
      **options: of ``array_env``.

    Returns:
      The Env.

    Raises:
      UserError: gymnax is not installed, has no such environment, its actions are no whole numbers,
        or an option is out of its range.
    """
    library = need("gymnax", EXTRA, "data.env = 'gymnax'")
    if id not in library.registered_envs:
        raise unknown_choice("data.id", id, library.registered_envs)
    env, parameters = library.make(id)
    actions = getattr(env.action_space(parameters), "n", None)
    if actions is None:
        raise UserError(
            f"data.id = {id!r}: its actions are not integers; choose another environment"
        )

    def reset(key: Array) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, parameters)
        return state, observation

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        observation, inner, reward, ended, _ = env.step_env(key, state[0], action, parameters)
        done = ended | env.is_truncated(inner, parameters)
        return (inner, observation), jnp.asarray(reward, jnp.float32), done

    game = Game(f"gymnax {id}", reset, step, lambda state: state[1], int(actions))
    return array_env(game, turns=turns, **_own_show(options))


def navix(id: str = "Navix-Empty-5x5-v0", turns: int = 30, **options: Any) -> Env:
    """A grid of navix, MiniGrid in JAX, such as "Navix-Empty-5x5-v0" or "Navix-DoorKey-5x5-v0".

    "NAVIX: Scaling MiniGrid Environments with JAX" (arXiv:2407.19396). The policy sees the whole
    grid, three numbers a cell.

    Args:
      id: its name.
      turns: the most turns.
      **options: of ``array_env``.

    Returns:
      The Env.

    Raises:
      UserError: navix is not installed, has no such environment, or an option is out of its range.
    """
    library = need("navix", EXTRA, "data.env = 'navix'")
    env = _made(id, library.make, sorted(library.registry()))

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        state = env.step(state, action)
        return state, jnp.asarray(state.reward, jnp.float32), state.step_type > 0

    game = Game(
        name=f"navix {id}",
        reset=env.reset,
        step=step,
        observe=lambda state: state.observation,
        actions=len(env.action_set),
    )
    return array_env(game, turns=turns, **_own_show(options))


def _made(id: str, make: Callable[[str], Any], names: list[str]) -> Any:
    """A library's environment by name, or from a user function."""
    if ":" in id:
        return load(id, "data.id")()
    if id not in names:
        raise unknown_choice("data.id", id, names)
    return make(id)


def _own_show(options: dict[str, Any]) -> dict[str, Any]:
    """The options, checked, with a function in place of its name."""
    check_options(array_env, options | {"turns": 0}, "data", first=1)
    show = options.get("show")
    return options | ({"show": load(show, "data.show")} if isinstance(show, str) else {})


def _without(observation: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a NamedTuple or dataclass but for some, in their order."""
    fields = observation._asdict() if hasattr(observation, "_asdict") else vars(observation)
    return {name: jax.tree.leaves(x) for name, x in fields.items() if name not in names}
