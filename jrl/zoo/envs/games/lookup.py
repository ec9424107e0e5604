"""A lookup tool over a key-value store that the policy cannot see.

The prompt "c2:" asks for what stands at the key that stands at c. "?c" calls the tool, which
replies with the value, such as "f"; "=b" answers and ends the episode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jrl.data.tasks.base import check_range
from jrl.episodes.device import Env, Turn
from jrl.models.tokenizer import STOP_ID, char_tokenizer
from jrl.types import Array

TOKENIZER = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789?=!:")
KEY_A, DIGIT_0, ASK, ANSWER, ERROR, COLON = TOKENIZER.encode("a0?=!:")


class Store(struct.PyTreeNode):
    """values [K] int32 by key; the key [] that the policy is at, and hops [] to the answer."""

    values: Array
    at: Array
    hops: Array


def lookup(keys: int = 8, hops: int = 2) -> Env:
    """A point for the right answer; a call of the tool with no key of the store replies "!".

    Args:
      keys: of the store, 2 to 26; their values are keys again, drawn anew for every group, so that
        nothing can be learned by heart and the splits need not differ.
      hops: the most lookups that a question needs, 1 to 9; each question has its own number.

    Returns:
      The Env. The identity of a state is the number of lookups left and the key they start from.

    Raises:
      UserError: an option out of its range.
    """
    check_range("data.keys", keys, 2, 26)
    check_range("data.hops", hops, 1, 9)

    def init(key: Array, split: str) -> tuple[Store, Array, Array]:
        of_values, of_key, of_hops = jax.random.split(key, 3)
        values = jax.random.randint(of_values, (keys,), 0, keys)
        first = jax.random.randint(of_key, (), 0, keys)
        number = jax.random.randint(of_hops, (), 1, hops + 1)
        prompt = jnp.stack([KEY_A + first, DIGIT_0 + number, jnp.int32(COLON)])
        return Store(values, first, number), prompt.astype(jnp.int32), jnp.int32(3)

    def step(store: Store, tokens: Array, length: Array, key: Array) -> tuple[Store, Turn]:
        key_index = tokens[1] - KEY_A
        valid_key = (key_index >= 0) & (key_index < keys) & (length == 2)
        value = store.values[jnp.clip(key_index, 0, keys - 1)]
        asks, answers = (tokens[0] == ASK) & valid_key, tokens[0] == ANSWER
        right = answers & valid_key & (key_index == answer(store))
        ahead = asks & (key_index == store.at) & (store.hops > 0)
        after = store.replace(at=jnp.where(ahead, value, store.at), hops=store.hops - ahead)
        return after, Turn(
            reply=jnp.where(asks, KEY_A + value, ERROR).astype(jnp.int32)[None],
            count=jnp.int32(1),
            reward=right.astype(jnp.float32),
            done=answers,
            success=right,
            state_id=(store.hops * keys + store.at).astype(jnp.int32),
        )

    def answer(store: Store) -> Array:
        """The key that ``store.hops`` lookups lead to from here."""
        follow = lambda i, at: jnp.where(i < store.hops, store.values[at], at)  # noqa: E731
        return jax.lax.fori_loop(0, hops, follow, store.at)

    def solution(store: Store) -> tuple[Array, Array]:
        tool = jnp.where(store.hops > 0, ASK, ANSWER)
        return jnp.stack([tool, KEY_A + store.at]).astype(jnp.int32), jnp.int32(2)

    return Env(
        name="lookup",
        init=init,
        step=step,
        turns=hops + 2,
        prompt_tokens=3,
        turn_tokens=2,
        reply_tokens=1,
        vocab_size=TOKENIZER.vocab_size,
        stop_id=STOP_ID,
        tokenizer=TOKENIZER,
        solution=solution,
    )
