"""Calls in an environment's thread: to open it, and to pass it the policy's turn."""

from __future__ import annotations

import contextlib
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.episodes.calls import run_either
from jrl.episodes.chat import Format
from jrl.episodes.env_error import FormError
from jrl.episodes.host import (
    EnvError,
    Feedback,
    HostEnv,
    Reply,
    check_feedback,
    check_opening,
)
from jrl.episodes.parsers.base import without_addresses
from jrl.models.chat_frames import Message
from jrl.models.tokenizer import Tokenizer
from jrl.types import Prompt
from jrl.user_code import error_with_line


async def call_init(
    env: HostEnv, chat: Format, prompt: Prompt, seed: int, longest: int
) -> tuple[Any, np.ndarray, int]:
    """Opens an environment: its state, the ids of the opening, and the id of the state.

    Args:
      env: the environment.
      chat: how its messages become ids.
      prompt: the problem.
      seed: of the group.
      longest: tokens of an opening.

    Raises:
      EnvError: what it returned cannot be used.
    """
    state, value = _pair(await run_either(env.init, prompt, seed), "init", "(state, messages)")
    try:
        messages, key = check_opening(value, env.limits)
        state_id = _state_id(key, messages)
        opening = np.array(chat.opening(messages), np.int32)
        if not 1 <= len(opening) <= longest:
            raise EnvError(
                f"opens with {len(opening)} tokens; data.max_prompt_tokens allows {longest}"
            )
    except BaseException:
        await run_either(env.close, state)  # nobody else learns of the state
        raise
    return state, opening, state_id


async def call_step(
    env: HostEnv, chat: Format, tokenizer: Tokenizer, state: Any, turn: int, tokens: Any, cut: bool
) -> tuple[Any, Feedback, list[int], int]:
    """Tells an environment what was said: its state, the feedback, the answer's ids, a state id.

    Args:
      env: the environment.
      chat: how its messages become ids.
      tokenizer: turns the tokens into text.
      state: the environment's own.
      turn: number of the turn.
      tokens: [t] int32, what the policy drew.
      cut: whether a limit of tokens ended the turn.

    Raises:
      EnvError: what it returned cannot be used.
    """
    # Decoded twice, with and without control tokens: parsers of tool calls read some of those.
    ids = tokens.tolist()
    text, raw = tokenizer.decode(ids), tokenizer.decode(ids, skip_special=False)
    # A copy: an environment that sorts its tokens in place must not change those that are trained.
    reply = Reply(text=text, raw=raw, tokens=tokens.copy(), turn=turn, cut=cut)
    state, value = _pair(await run_either(env.step, state, reply), "step", "(state, Feedback)")
    feedback = check_feedback(value, env.limits, len(env.parts), env.players)
    feedback = feedback._replace(labels=_labels(env, feedback, tokenizer, ids))
    answer = (
        [] if feedback.done else chat.following(feedback.messages, closed=not cut, first=turn == 0)
    )
    return state, feedback, answer, _state_id(feedback.state_key, feedback.messages)


TRIED_TURNS = 8
"""Most turns of an episode that is tried: enough for every role, and few calls of other models."""
TRIED_SECONDS = 10.0
"""After these no further turn is tried, so that slow tools delay a run by one call of each."""


async def try_episode(
    env: HostEnv, chat: Format, tokenizer: Tokenizer, prompt: Prompt, longest: int, tokens: Any
) -> str:
    """What is wrong with the form of an environment's values; "" for nothing.

    Opens it, answers with turns that nobody sampled until the episode ends, ``TRIED_TURNS`` at
    most, and closes it.

    Args:
      env: the environment.
      chat: how its messages become ids.
      tokenizer: turns the tokens into text.
      prompt: the problem.
      longest: tokens of an opening.
      tokens: [t] int32, each turn.
    """
    try:
        state, _, _ = await call_init(env, chat, prompt, 0, longest)
    except FormError as error:
        return f"init: {error}"
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(error_with_line(error, "init")) from error
    until = time.monotonic() + TRIED_SECONDS
    try:
        for turn in range(min(env.limits.turns, TRIED_TURNS)):
            state, feedback, *_ = await call_step(env, chat, tokenizer, state, turn, tokens, False)
            if feedback.done or time.monotonic() > until:
                break
    except BaseException as error:  # also where it is out of time
        with contextlib.suppress(Exception):  # the turn's error says more
            await run_either(env.close, state)
        if isinstance(error, FormError):
            return f"step: {error}"
        if isinstance(error, Exception) and not isinstance(error, EnvError):
            raise EnvError(error_with_line(error, "step")) from error
        raise
    await run_either(env.close, state)
    return ""


def _labels(
    env: HostEnv, feedback: Feedback, tokenizer: Tokenizer, ids: Sequence[int]
) -> dict[str, int | list[int]]:
    """The labels of a turn, those of characters as those of its tokens.

    A token has the label of the first character that it adds to the text; if it adds none, -1.

    Raises:
      EnvError: a label that the environment does not declare, or not one for each character.
    """
    labels: dict[str, int | list[int]] = {}
    for name, label in feedback.labels.items():
        if name not in (env.extras.labels if isinstance(label, int) else env.extras.token_labels):
            raise FormError(f"label {name} is not declared by the environment")
        if isinstance(label, int):
            labels[name] = label
            continue
        # By prefix: a token alone may decode to half a character.
        begins = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
        if len(label) != begins[-1]:
            raise FormError(f"label {name}: {len(label)} numbers for {begins[-1]} characters")
        labels[name] = [label[begin] if begin < begins[-1] else -1 for begin in begins[:-1]]
    return labels


def _pair(value: Any, name: str, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise FormError(f"{name} returned {value!r:.60}, not {form}")
    return value[0], value[1]


def _state_id(key: Any, messages: Sequence[Message]) -> int:
    """A number of 31 bits for a state: by its name, or by what is seen in it."""
    if key is None:
        text = "\0".join(m["content"] for m in messages)
    else:
        # All of an array: NumPy leaves out the middle of long ones, and digits of floats.
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            text = repr(key)
        if not isinstance(key, str) and text != without_addresses(text):
            raise FormError(f"state_key is {text:.60}; give a text, numbers or a tuple of those")
    return zlib.crc32(text.encode("utf-8", "replace")) & 0x7FFFFFFF
