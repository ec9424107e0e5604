"""Demonstrations: completions that the data gives, as members of groups beside the sampled ones."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.data.tasks import Task
from jrl.types import Array, Rollout, StopReason


def demonstration_rollout(
    prompt_tokens: Any, prompt_lengths: Any, tokens: Any, lengths: Any, complete: Any, count: int
) -> Rollout:
    """Completions from the data as a rollout that no policy sampled: their versions are -1.

    Args:
      prompt_tokens: [N, P] int32.
      prompt_lengths: [N] int32.
      tokens: [N, T] int32, on the host or the device.
      lengths: [N] int32, tokens.
      complete: [N] bool, False where the completion had to be cut.
      count: members of each group, all alike.
    """
    # Demonstrations of a task are made inside the sampling program, those in text on the host.
    xp: Any = np if isinstance(tokens, np.ndarray) else jnp
    n, t = tokens.shape

    def members(x: Any) -> Any:
        return xp.repeat(x[:, None], count, axis=1)

    stop = xp.where(complete, int(StopReason.STOP_TOKEN), int(StopReason.LENGTH))
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=members(tokens),
        lengths=members(lengths),
        mask=members(xp.arange(t)[None] < lengths[:, None]),
        sampler_logprobs=xp.zeros((n, count, t), np.float32),
        versions=xp.full((n, count, t), -1, np.int32),
        stop=members(stop.astype(np.int32)),
        baseline=xp.zeros((n, count), bool),
    ).check()


def task_solution(task: Task, problem: Any) -> tuple[Array, Array, Array]:
    """ONE problem's solution: tokens [T], length [] with the stop token, whether it has one."""
    tokens, length = task.solution(problem)
    at = jnp.arange(tokens.shape[0])
    # Without its stop token a solution teaches the policy never to end.
    bare = (tokens[length - 1] != task.stop_id) & (length < tokens.shape[0])
    tokens = jnp.where(bare & (at == length), task.stop_id, tokens)
    length = (length + bare).astype(jnp.int32)
    return tokens, length, tokens[length - 1] == task.stop_id
