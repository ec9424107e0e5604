"""Environments that are pure functions over arrays, so that whole episodes run on the device.

An episode begins with a prompt. The policy draws a turn of up to ``turn_tokens`` tokens, ``step``
pays for it and replies with up to ``reply_tokens``, and so on, until the environment is done or
``turns`` turns are taken. ``play`` runs many episodes in one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.data.tasks.base import Task
from jrl.errors import UserError
from jrl.types import Array


class Turn(struct.PyTreeNode):
    """The environment's result of ONE turn of the policy.

    Attributes:
      reply: [Q] int32, what the policy reads next, from column 0; not read after the last turn.
      count: [] int32, tokens of the reply, 0 to Q.
      reward: [] float32, points paid for the turn; [R] where the policy plays R players, points for
        each of them. Those of a player that does not move stand at its last turn.
      done: [] bool, whether the episode ends here.
      success: [] bool, whether it ends well; [R] for several players.
      state_id: [] int32, the identity of the state in which the turn was taken: equal ids within a
        group mean that the policy had the same choice.
    """

    reply: Array
    count: Array
    reward: Array
    done: Array
    success: Array
    state_id: Array


class Start(struct.PyTreeNode):
    """The start of ONE episode.

    Attributes:
      tokens: [P] int32, the prompt from column 0, then padding.
      length: [] int32, tokens of the prompt.
      state: the environment's own, any pytree of arrays.
    """

    tokens: Array
    length: Array
    state: Any


def one_player(state: Any) -> Array:
    """The player to move in single-player environments."""
    return jnp.int32(0)


class Env(NamedTuple):
    """An environment as functions of ONE episode and the limits of its arrays.

    Attributes:
      name: as in ``ENVS``.
      init: (key, split) -> (state, prompt [P] int32, length [] int32), with ``split`` "train" or
        "eval". All members of a group start from one call of it.
      step: (state, tokens [A] int32, length [] int32, key) -> (state, ``Turn``). ``tokens`` is what
        the policy drew in this turn, its stop token included, then 0; a turn that reached A tokens
        has none.
      turns: the most turns of an episode.
      prompt_tokens: P.
      turn_tokens: A, the most tokens of a turn.
      reply_tokens: Q, the most tokens of a reply.
      vocab_size: V.
      stop_id: the token that ends a turn.
      tokenizer: of prompts, turns and replies.
      solution: (state) -> (tokens [A] int32, length [] int32), a good turn in this state, for a
        warm start; None where nobody wrote one.
      players: R, that the policy plays against each other in training. In the split "eval" it plays
        player 0 alone, and the environment the others.
      mover: (state) -> [] int32, which of the players takes the next turn.
    """

    name: str
    init: Callable[[Array, str], tuple[Any, Array, Array]]
    step: Callable[[Any, Array, Array, Array], tuple[Any, Turn]]
    turns: int
    prompt_tokens: int
    turn_tokens: int
    reply_tokens: int
    vocab_size: int
    stop_id: int
    tokenizer: Any
    solution: Callable[[Any], tuple[Array, Array]] | None = None
    players: int = 1
    mover: Callable[[Any], Array] = one_player

    @property
    def completion_tokens(self) -> int:
        """T: room for all turns and the replies between them."""
        return self.turns * self.turn_tokens + (self.turns - 1) * self.reply_tokens

    def generate(self, key: Array, split: str) -> Start:
        """Starts one episode; the key is consumed."""
        state, tokens, length = self.init(key, split)
        return Start(tokens, length, state)

    def render(self, start: Start) -> tuple[str, str]:
        """The prompt as text, and nothing for an answer; on the host."""
        prompt: Any = np.asarray(start.tokens)[: int(start.length)]
        return self.tokenizer.decode(prompt), ""

    def check(self) -> Env:
        """The environment itself, its functions traced once but not run.

        Raises:
          UserError: naming the function or limit, its value and what would do.
        """
        name_text = f"environment {self.name!r}"
        for name, least in (("turns", 1), ("prompt_tokens", 1), ("turn_tokens", 1), ("players", 1)):
            _check_limit(f"{name_text}: {name}", getattr(self, name), least)
        _check_limit(f"{name_text}: reply_tokens", self.reply_tokens, 0)
        for name in ("init", "step", "mover"):
            if not callable(function := getattr(self, name)):
                raise UserError(f"{name_text}: {name} = {function!r:.40}; give a function")
        key = jax.eval_shape(lambda: jax.random.key(0))
        start = jax.eval_shape(lambda k: self.generate(k, "train"), key)
        tokens_spec, scalar = ((self.turn_tokens,), jnp.int32), ((), jnp.int32)
        _check_arrays(
            f"{name_text}: init",
            {"prompt": start.tokens, "length": start.length},
            {"prompt": ((self.prompt_tokens,), jnp.int32), "length": scalar},
        )
        turn_of = (
            start.state,
            jax.ShapeDtypeStruct(*tokens_spec),
            jax.ShapeDtypeStruct(*scalar),
            key,
        )
        state, turn = jax.eval_shape(self.step, *turn_of)
        if not isinstance(turn, Turn):
            raise UserError(
                f"{name_text}: step returned {turn!r:.40}; return (state, jrl.episodes.Turn)"
            )
        each = (self.players,) if self.players > 1 else ()
        expected: dict[str, Any] = {"reply": ((self.reply_tokens,), jnp.int32), "count": scalar}
        expected |= {"reward": (each, jnp.float32), "success": (each, jnp.bool_)}
        expected |= {"done": ((), jnp.bool_), "state_id": scalar}
        _check_arrays(f"{name_text}: step", vars(turn), expected)
        mover = jax.eval_shape(self.mover, start.state)
        _check_arrays(f"{name_text}: mover", {"player": mover}, {"player": scalar})
        # Leaf by leaf: a state of another library may compare arrays with ==, not descriptions.
        before, after = (
            {jax.tree_util.keystr(path) or "state": _typed(x) for path, x in leaves}
            for leaves in map(jax.tree_util.tree_leaves_with_path, (start.state, state))
        )
        if before != after:
            raise UserError(
                f"{name_text}: step returned a state of {after}, and init one of {before}; both "
                "need the same arrays"
            )
        if self.solution is not None:
            tokens, length = jax.eval_shape(self.solution, start.state)
            outputs = {"tokens": tokens, "length": length}
            _check_arrays(
                f"{name_text}: solution", outputs, {"tokens": tokens_spec, "length": scalar}
            )
        return self


def _check_limit(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} = {value!r}; give a whole number, at least {least}")


def _check_arrays(name_text: str, outputs: Any, expected: dict[str, Any]) -> None:
    for name, (shape, dtype) in expected.items():
        if _typed(outputs[name]) != _typed(jax.ShapeDtypeStruct(shape, dtype)):
            raise UserError(
                f"{name_text}: {name} is {_typed(outputs[name])}; declared as "
                f"{_typed(jax.ShapeDtypeStruct(shape, dtype))}"
            )


def _typed(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def task_env(task: Task) -> Env:
    """A procedural task as the environment of one turn, whose reward is its checker's."""

    def init(key: Array, split: str) -> tuple[Any, Array, Array]:
        problem = task.generate(key, split)
        return problem, problem.tokens, problem.length

    def step(problem: Any, tokens: Array, length: Array, key: Array) -> tuple[Any, Turn]:
        points = task.verify(problem, tokens, length)
        return problem, Turn(
            reply=jnp.zeros(0, jnp.int32),
            count=jnp.int32(0),
            reward=points,
            done=tokens[length - 1] == task.stop_id,  # else the limit ended it
            success=points >= 1,
            state_id=jnp.int32(0),
        )

    return Env(
        name=task.name,
        init=init,
        step=step,
        turns=1,
        prompt_tokens=task.prompt_tokens,
        turn_tokens=task.completion_tokens,
        reply_tokens=0,
        vocab_size=task.vocab_size,
        stop_id=task.stop_id,
        tokenizer=task.tokenizer,
        solution=task.solution,
    )


# ---------------------------------------------------------------- the record of turns


class TurnLog(struct.PyTreeNode):
    """Positions of the turns of B episodes, by turn; at most K.

    Attributes:
      count: [B] int32, turns taken.
      starts: [B, K] int32, the column of each turn's first token; T where there is no turn.
      ends: [B, K] int32, the column after its last one; the reply follows.
      states: [B, K] int32, ``Turn.state_id``.
      players: [B, K] int32, who took each turn, by ``Env.mover``.
      points: [B, K] float32, ``Turn.reward`` of the player who took the turn, and what it was paid
        for turns of others until its next one.
      success: [B] bool, or [B, R].
    """

    count: Array
    starts: Array
    ends: Array
    states: Array
    players: Array
    points: Array
    success: Array

    def by_token(self, width: int) -> dict[str, Array]:
        """Arrays [B, T] by name, which mean nothing past an episode's end.

        Returns:
          "turn", "state" and "role" (the player) of each token, int32, a reply's being those of the
          turn before it;
          "drawn", True at a turn's own tokens; "paid", its points at the last one of them, float32.
        """
        column = jnp.arange(width)[None]
        # Turns that were not taken start at T, past every column, and so count for none.
        begun = self.starts[:, :, None] <= column[:, None]
        turn = jnp.maximum(begun.sum(1) - 1, 0).astype(jnp.int32)
        at = lambda x: jnp.take_along_axis(x, turn, axis=1)  # noqa: E731
        end = at(self.ends)
        paid = jnp.where(column == end - 1, at(self.points), 0.0)
        states, roles = at(self.states), at(self.players)
        sampled = column < end
        return {"turn": turn, "state": states, "role": roles, "drawn": sampled, "paid": paid}


def empty_log(env: Env, rows: int) -> TurnLog:
    """The record of ``rows`` episodes, at first."""
    turns, width = env.turns, env.completion_tokens
    return TurnLog(
        count=jnp.zeros(rows, jnp.int32),
        starts=jnp.full((rows, turns), width, jnp.int32),
        ends=jnp.zeros((rows, turns), jnp.int32),
        states=jnp.zeros((rows, turns), jnp.int32),
        players=jnp.zeros((rows, turns), jnp.int32),
        points=jnp.zeros((rows, turns), jnp.float32),
        success=jnp.zeros((rows, env.players) if env.players > 1 else rows, bool),
    )


def paid_points(points: Array, players: Array, turn: Array, reward: Array) -> Array:
    """[K] float32: the rewards of ONE episode's turns, including turn number ``turn``.

    Args:
      points: [K] float32, before.
      players: [K] int32, who took each turn, this one included.
      turn: [] int32.
      reward: [] float32, for the player who took it; or [R], for each player at its last turn. A
        player that had none yet gets nothing.

    >>> paid_points(jnp.zeros(4), jnp.array([0, 1, 0, 0]), 2, jnp.array([1.0, -1.0])).tolist()
    [0.0, -1.0, 1.0, 0.0]
    """
    if reward.ndim == 0:
        return points.at[turn].add(reward, mode="drop")
    number, out_of_range = jnp.arange(points.shape[0])[None], points.shape[0]
    own_turns = (players[None] == jnp.arange(reward.shape[0])[:, None]) & (number <= turn)
    # A player without a turn has no token to be paid at; past the end its points are dropped.
    last = jnp.where(own_turns.any(1), jnp.where(own_turns, number, -1).max(1), out_of_range)
    return points.at[last].add(reward, mode="drop")
