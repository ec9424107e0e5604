"""Environments of other libraries that are pure functions over arrays, as environments of text.

The policy reads what the player to move observes, every number of it with as many characters, and
answers with the letter of an action: "A" for 0, "B" for 1; two letters where there are more than 26
actions. ``libraries`` holds the adapters of pgx, jumanji, gymnax and navix.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn, one_player
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

FIGURES = string.digits + string.ascii_lowercase
"""Base of integers in observations."""
LETTERS = string.ascii_uppercase
BITS = 5
"""The most flags of a cell that one figure holds."""
OPPONENTS = ("random", "self")


class Game(NamedTuple):
    """The adapter's interface of a game: pure functions of ONE episode.

    Attributes:
      name: for messages.
      reset: (key) -> state, any pytree of arrays.
      step: (state, action [] int32, key) -> (state, reward [] float32, done [] bool); with R
        players the reward is [R], for each of them.
      observe: (state) -> what the player to move sees, a pytree of arrays.
      actions: of which 0 to ``actions`` - 1.
      players: R.
      player: (state) -> the player to move, [] int32; for several players.
      legal: (state) -> [actions] bool; for several players.
    """

    name: str
    reset: Callable[[Array], Any]
    step: Callable[[Any, Array, Array], tuple[Any, Array, Array]]
    observe: Callable[[Any], Any]
    actions: int
    players: int = 1
    player: Callable[[Any], Array] = lambda state: jnp.int32(0)
    legal: Callable[[Any], Array] | None = None


class Playing(struct.PyTreeNode):
    """state: the game's; total [R] float32: points so far; alone: the policy is player 0 only."""

    state: Any
    total: Array
    alone: Array


def plain_keys(game: Game) -> Game:
    """The game with the random keys of its state as integers.

    Groups of several draws are joined on the host, as NumPy arrays, which hold no typed keys.
    """
    impls: list[Any] = []  # of the keys among the leaves; None for other arrays

    def reset(key: Array) -> Any:
        state = game.reset(key)
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(state)]
        keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
        impls[:] = [
            jax.random.key_impl(x) if k else None for x, k in zip(leaves, keys, strict=True)
        ]
        return state

    tree = jax.tree.structure(jax.eval_shape(reset, jax.random.key(0)))
    if not any(impls):
        return game

    def converted(convert: Callable[[Array, Any], Array], state: Any) -> Any:
        leaves = zip(jax.tree.leaves(state), impls, strict=True)
        return jax.tree.unflatten(tree, [x if i is None else convert(x, i) for x, i in leaves])

    typed = partial(converted, lambda x, impl: jax.random.wrap_key_data(x, impl=impl))
    plain = partial(converted, lambda x, impl: jax.random.key_data(x))

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        state, reward, done = game.step(typed(state), action, key)
        return plain(state), reward, done

    def legal(state: Any) -> Array:
        assert game.legal is not None
        return game.legal(typed(state))

    return game._replace(
        reset=lambda key: plain(game.reset(key)),
        step=step,
        observe=lambda state: game.observe(typed(state)),
        player=lambda state: game.player(typed(state)),
        legal=legal if game.legal is not None else None,
    )


def array_env(
    game: Game,
    *,
    turns: int,
    goal: float = 1.0,
    opponent: str = "random",
    digits: int = 1,
    decimals: int = 2,
    show: Callable[[Any], Any] | None = None,
) -> Env:
    """A game as an environment, with its own rewards; a turn that is no action ends it with -1.

    Args:
      game: the functions.
      turns: the most turns, 1 to 10,000.
      goal: points at which an episode ended well.
      opponent: of a game for several players. "random": the policy is player 0, and the others draw
        one of their legal actions; "self": the policy plays all of them in training, and against
        random ones in the split "eval".
      digits: figures of a whole number, and of a float before its point, 1 to 6; greater numbers
        show the greatest one, and whole ones below 0 "-".
      decimals: figures of a float after its point, 0 to 6.
      show: (observation) -> the pytree to be shown instead. A bool array with three axes is a
        board of flags, and a cell one figure: its flags as bits, the first one the least, up to
        five, or the number of the first that is set, from 1.

    Returns:
      The Env. The identity of a state is a checksum of what the policy reads.

    Raises:
      UserError: an option out of its range.
    """
    _check(game, turns, goal, opponent, digits, decimals)
    game = plain_keys(game)
    shown = show or (lambda observation: observation)
    key = jax.eval_shape(lambda: jax.random.key(0))
    symbols = FIGURES + "+-"
    width = 1 if game.actions <= len(LETTERS) else 2
    tokenizer = char_tokenizer(symbols + LETTERS[: game.actions])
    write = lambda state: 2 + written(shown(game.observe(state)), digits, decimals)  # noqa: E731
    text = jax.eval_shape(lambda k: write(game.reset(k)), key)
    several = game.players > 1 and opponent == "self"
    mover = lambda playing: game.player(playing.state).astype(jnp.int32)  # noqa: E731

    def init(key: Array, split: str) -> tuple[Playing, Array, Array]:
        of_state, of_others = jax.random.split(key)
        zero = jnp.zeros(game.players, jnp.float32)
        alone = jnp.bool_(not several or split == "eval")
        begun = Playing(game.reset(of_state), zero, alone)
        state, _, paid = _others_move(game, begun, of_others, jnp.bool_(False), zero)
        return begun.replace(state=state, total=paid), write(state), jnp.int32(text.shape[0])

    def step(playing: Playing, tokens: Array, length: Array, key: Array) -> tuple[Playing, Turn]:
        of_step, of_others = jax.random.split(key)
        player = mover(playing) if game.players > 1 else jnp.int32(0)
        letters = tokens - 2 - len(symbols)
        action = letters[0] if width == 1 else letters[0] * len(LETTERS) + letters[1]
        valid = jnp.all((letters >= 0) & (letters < len(LETTERS))) & (action < game.actions)
        state, paid, done = game.step(playing.state, jnp.where(valid, action, 0), of_step)
        next_playing = Playing(state, playing.total, playing.alone)
        over, paid = done | ~valid, jnp.atleast_1d(paid)
        state, done, paid = _others_move(game, next_playing, of_others, over, paid)
        forfeit = jnp.where(jnp.arange(game.players) == player, -1.0, 0.0)
        paid = jnp.where(valid, paid, forfeit).astype(jnp.float32)
        total, before = playing.total + paid, write(playing.state)
        well = total >= goal
        return Playing(state, total, playing.alone), Turn(
            reply=write(state),
            count=jnp.int32(text.shape[0]),
            reward=paid if several else paid[0],
            done=done,
            success=well if several else well[0],
            state_id=_checksum(before),
        )

    return Env(
        name=game.name,
        init=init,
        step=step,
        turns=turns,
        prompt_tokens=text.shape[0],
        turn_tokens=width,
        reply_tokens=text.shape[0],
        vocab_size=tokenizer.vocab_size,
        stop_id=STOP_ID,
        tokenizer=tokenizer,
        players=game.players if several else 1,
        mover=mover if several else one_player,
    )


def _others_move(
    game: Game, playing: Playing, key: Array, done: Array, paid: Array
) -> tuple[Any, Array, Array]:
    """Plays the other players' turns: the state, whether the game is over, and points paid."""
    if game.players == 1:
        return playing.state, done, paid

    def others_turn(carry: tuple) -> Array:
        state, done, _, _ = carry
        return playing.alone & ~done & (game.player(state) != 0)

    def move(carry: tuple) -> tuple:
        state, _, paid, key = carry
        key, of_action, of_step = jax.random.split(key, 3)
        assert game.legal is not None
        odds = jnp.where(game.legal(state), 0.0, -jnp.inf)
        action = jax.random.categorical(of_action, odds).astype(jnp.int32)
        state, more, done = game.step(state, action, of_step)
        return state, done, paid + more, key

    # A loop and not one move: with more than two players several others move in a row.
    state, done, paid, _ = jax.lax.while_loop(others_turn, move, (playing.state, done, paid, key))
    return state, done, paid


def _check(game: Game, turns: int, goal: float, opponent: str, digits: int, decimals: int) -> None:
    check_range("data.turns", turns, 1, 10_000)
    check_range("data.digits", digits, 1, 6)
    check_range("data.decimals", decimals, 0, 6)
    if not isinstance(goal, int | float) or isinstance(goal, bool):
        raise UserError(f"data.goal = {goal!r}; give points")
    if opponent not in OPPONENTS:
        raise UserError(f"data.opponent = {opponent!r}; choose from {', '.join(OPPONENTS)}")
    if opponent == "self" and game.players == 1:
        raise UserError(f"data.opponent = 'self': {game.name} has one player; leave it out")
    if not 1 <= game.actions <= len(LETTERS) ** 2:
        raise UserError(
            f"{game.name} has {game.actions} actions; the adapter writes up to {len(LETTERS) ** 2}"
        )


# ---------------------------------------------------------------- numbers as text


def written(observation: Any, digits: int, decimals: int) -> Array:
    """[W] int32: every number of a pytree of arrays, from its first leaf on, in symbols.

    Symbols 0 to 35 are ``FIGURES``, 36 is "+" and 37 "-". W depends on shapes and dtypes alone.

    >>> written({"a": jnp.array([3, 40, -1]), "b": jnp.float32(-0.25)}, 1, 2).tolist()
    [3, 35, 37, 37, 0, 2, 5]
    """
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(observation)]
    return jnp.concatenate([_leaf(x, digits, decimals) for x in leaves]).astype(jnp.int32)


def _leaf(x: Array, digits: int, decimals: int) -> Array:
    """[W] int32: one array in symbols."""
    if x.dtype == jnp.bool_ and x.ndim >= 3:
        flags = x.shape[-1]
        first = jnp.where(x.any(-1), jnp.argmax(x, axis=-1) + 1, 0)
        bits = jnp.dot(x.astype(jnp.int32), 2 ** jnp.arange(flags)) if flags <= BITS else first
        return jnp.minimum(bits, len(FIGURES) - 1).reshape(-1)
    if x.dtype == jnp.bool_:
        return x.reshape(-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        most = len(FIGURES) ** digits - 1
        figures = _figures(jnp.clip(x.astype(jnp.int32), 0, most), digits, len(FIGURES))
        return jnp.where(x.reshape(-1, 1) < 0, len(FIGURES) + 1, figures).reshape(-1)
    count = digits + decimals
    size = jnp.round(jnp.abs(jnp.nan_to_num(x.astype(jnp.float32))) * 10.0**decimals)
    figures = _figures(jnp.minimum(size, 10.0**count - 1).astype(jnp.int32), count, 10)
    sign = len(FIGURES) + (x.reshape(-1, 1) < 0)
    return jnp.concatenate([sign, figures], axis=1).reshape(-1)


def _figures(x: Array, count: int, base: int) -> Array:
    """[n, count] int32: the figures of whole numbers of at least 0, the greatest first."""
    places = jnp.asarray([base**i for i in reversed(range(count))], jnp.int32)
    return x.reshape(-1, 1) // places[None] % base


def _checksum(tokens: Array) -> Array:
    """[] int32 of [W] tokens; texts that differ in one place never have the same."""
    odd = jnp.uint32(0x9E3779B1)
    step = lambda total, token: total * odd + token.astype(jnp.uint32)  # noqa: E731
    total, _ = jax.lax.scan(lambda t, x: (step(t, x), None), jnp.uint32(0), tokens)
    return total.astype(jnp.int32)
