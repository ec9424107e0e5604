"""A bandit with memory: the policy finds the paying arm by pulling and reads its past pulls.

After the prompt "abc:" an episode may read "a0b1b1a0": an arm, and whether it paid.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn
from jrl.errors import UserError
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("abcdefgh01:")
ARM_A, NOTHING, COLON = TOKENIZER.encode("a0:")


class Arms(struct.PyTreeNode):
    """K arms: chance [K] float32 that each pays, pulls and wins [K] int32 so far."""

    chance: Array
    pulls: Array
    wins: Array


def bandit(arms: int = 3, turns: int = 10, best: float = 0.9, other: float = 0.1) -> Env:
    """A share of a point for every pull that pays; ``turns`` pulls that all pay make one point.

    One arm, any with the same chance in both splits, pays with the chance ``best`` and the others
    with ``other``. An episode ends well when its last pull is of the best arm. A turn that names no
    arm is a pull that pays nothing.

    Args:
      arms: K, 2 to 8.
      turns: pulls, 1 to 1000.
      best: probability.
      other: probability, at most ``best``.

    Returns:
      The Env. The identity of a state is how often each arm was pulled and paid.

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.arms", arms, 2, 8)
    check_range("data.turns", turns, 1, 1000)
    if not 0 <= other <= best <= 1:
        raise UserError(
            f"data.other = {other!r} and data.best = {best!r}; give chances, other at most best"
        )
    prompt = jnp.append(ARM_A + jnp.arange(arms), COLON).astype(jnp.int32)
    places = (2 * turns + 1) ** jnp.arange(2 * arms, dtype=jnp.uint32)  # wraps where it must

    def init(key: Array, split: str) -> tuple[Arms, Array, Array]:
        pays = jnp.arange(arms) == jax.random.randint(key, (), 0, arms)
        none = jnp.zeros(arms, jnp.int32)
        state = Arms(jnp.where(pays, best, other).astype(jnp.float32), none, none)
        return state, prompt, jnp.int32(arms + 1)

    def step(state: Arms, tokens: Array, length: Array, key: Array) -> tuple[Arms, Turn]:
        pulled = jnp.arange(arms) == tokens[0] - ARM_A
        pays = jax.random.uniform(key) < jnp.sum(jnp.where(pulled, state.chance, 0))
        counts = jnp.concatenate([state.pulls, state.wins]).astype(jnp.uint32)
        after = state.replace(pulls=state.pulls + pulled, wins=state.wins + (pulled & pays))
        chosen = jnp.argmax(state.chance) == tokens[0] - ARM_A
        return after, Turn(
            reply=(NOTHING + pays.astype(jnp.int32))[None],
            count=jnp.int32(1),
            reward=pays / jnp.float32(turns),
            done=jnp.bool_(False),
            success=chosen,
            state_id=jnp.sum(counts * places, dtype=jnp.uint32).astype(jnp.int32),
        )

    def solution(state: Arms) -> tuple[Array, Array]:
        """The arm with the best mean under a uniform prior, the first of equal ones."""
        mean = (state.wins + 1) / (state.pulls + 2)
        return (ARM_A + jnp.argmax(mean)[None]).astype(jnp.int32), jnp.int32(1)

    return Env(
        name="bandit",
        init=init,
        step=step,
        turns=turns,
        prompt_tokens=arms + 1,
        turn_tokens=1,
        reply_tokens=1,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )
