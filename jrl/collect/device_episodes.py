"""Hops 2 to 4 in an environment: groups of whole episodes, the twin of ``task_rollout``.

What runs on the device alone need of a procedural task, or of an environment, is ``on_device``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.collect.members import flagged, members_of
from jrl.collect.plan_tools import TaskTools
from jrl.collect.sources import Groups, entries
from jrl.collect.sources_task import sample_stream, task_problems, task_rollout
from jrl.data.tasks import Task
from jrl.episodes import Env, Start
from jrl.episodes.device_play import Episodes, play, scripted
from jrl.episodes.device_self_play import rows_of_players
from jrl.errors import UserError, unknown_choice
from jrl.sampling.params import SamplingParams
from jrl.sampling.slot_sizes import SlotPlan
from jrl.types import Array, Batch, Network, stream
from jrl.types.asks import Asks, DrawRequest

EPISODE_REWARDS = ("reward", "success")
"""Reward parts of an episode: the points that the environment paid, and 1 where it ended well."""


def episode_rollout(
    request: DrawRequest,
    *,
    sampling_params: SamplingParams,
    task: Env,
    parts: Mapping[str, float],
    network: Network,
    slots: int = 0,
    chunk: int = 4,
) -> Groups:
    """Starts, episodes and rewards in one program; the same function in every mode.

    The start in row i of a run is a function of (key, i) alone; the episodes of a ticket at a step
    are a function of that, the weights, and (key, step, ticket).

    Args:
      request: asks of the same N tickets, and the weights to play with.
      sampling_params: scalars.
      task: the environment.
      parts: reward part, of ``EPISODE_REWARDS`` -> weight.
      network: the policy.
      slots: episodes played at a time; 0 takes all.
      chunk: decode steps after which ended turns are answered.

    Returns:
      The groups; their subject is the ``Start`` of each. ``ids`` holds "turn", "step" (here the
      same), "state" and "role" [N, G, T], and "stratum" [N, G], the turns taken; ``stats`` the
      weighted points "paid" [N, G, T]. Where the policy plays R players, training gets N * R
      groups, a player of a start each (``rows_of_players``).
    """
    check_asks(task, request.asks)
    (tickets, rows), split = entries(request), request.split
    starts = task_problems(task, request.key, rows, split)
    own_policies = split == "train" and network.extras.stack is not None
    drawing = request.asks[0].policy
    played, slot_steps = play(
        stream(request.key, sample_stream(request), request.step),
        request.weights[drawing],
        starts,
        sampling_params,
        request.versions[drawing],
        tickets,
        members_of(request.asks, sampling_params.temperature),
        env=task,
        network=network,
        slots=SlotPlan(slots, chunk=chunk),
        step=request.step if own_policies else None,
    )
    played = played._replace(rollout=flagged(played.rollout, request.asks))
    if task.players > 1:
        played, starts, rows = _by_role(played, starts, rows, task, split)
    points = {"reward": played.paid.sum(2), "success": played.success.astype(jnp.float32)}
    for part in parts:
        if part not in points:
            raise unknown_choice("rewards", part, points)
    return Groups(
        rollout=played.rollout,
        rewards=jnp.stack([points[part] for part in parts], axis=2),
        subject=starts,
        counts={"slot_tokens": played.rollout.mask.sum(), "slot_steps": slot_steps},
        ids={
            "prompt": rows,
            "turn": played.turn,
            "step": played.turn,
            "state": played.state,
            "role": played.role,
            "stratum": played.turns,
        },
        stats={"paid": parts.get("reward", 0.0) * played.paid},
    )


def _by_role(
    played: Episodes, starts: Start, ids: Array, env: Env, split: str
) -> tuple[Episodes, Start, Array]:
    """Training: a group for each player of each start. Evaluation: player 0, the policy."""
    if split == "eval":
        return played._replace(success=played.success[:, :, 0]), starts, ids
    starts, ids = jax.tree.map(lambda x: jnp.repeat(x, env.players, axis=0), (starts, ids))
    return rows_of_players(played, env.players), starts, ids


def check_asks(env: Env, asks: Asks) -> None:
    """Raises UserError for asks that an environment cannot play."""
    if any(ask.prefix is not None for ask in asks):
        raise UserError(
            f"data.env: the method learns from demonstrations, and the environment {env.name!r} has"
            " none; choose a method that draws its own completions, or a procedural task"
        )
    if any(ask.context is not None for ask in asks):
        raise UserError(
            "data.env: the method samples under other prompts than the data's, and the environment"
            f" {env.name!r} opens its episodes itself; choose a procedural task, or data.train"
        )


# ---------------------------------------------------------------- for a warm start


def scripted_batch(key: Array, *, env: Env, count: int) -> Batch:
    """Supervised examples: ``count`` episodes played by ``env.solution``, G = 1.

    Raises:
      UserError: nobody wrote one.
    """
    if env.solution is None:
        raise UserError(
            f"warmup.steps: the environment {env.name!r} has no solution to learn; set it to 0"
        )

    def one(key: Array) -> tuple[Any, ...]:
        of_start, of_steps = jax.random.split(key)
        start = env.generate(of_start, "train")
        tokens, length, log = scripted(of_steps, start, env=env)
        sampled = log.by_token(env.completion_tokens)["drawn"][0]
        return start, tokens, length, sampled

    starts, tokens, lengths, drawn = jax.vmap(one)(jax.random.split(key, count))
    mask = drawn & (jnp.arange(tokens.shape[1])[None] < lengths[:, None])
    return _supervised(starts, tokens, lengths, mask)


# ---------------------------------------------------------------- a task, or an environment


class OnDevice(NamedTuple):
    """Functions of a task or an environment for a run on the device.

    Attributes:
      rollout: (request, ...) -> groups.
      eval_parts: reward part -> weight in an evaluation; the first part says what is right.
      examples: (key, task, count) -> supervised examples, G = 1.
      tools: (task) -> what plans are offered, by the root key; None for nothing.
      features: (task) -> what it brings to a run, as in ``config.features.TABLE``.
    """

    rollout: Callable[..., Groups]
    eval_parts: Mapping[str, float]
    examples: Callable[[Array, Any, int], Batch]
    tools: Callable[[Any], Callable[[Any], Any] | None]
    features: Callable[[Any], dict[str, str]]


def on_device(task: Task | Env) -> OnDevice:
    """Device functions of a task or an environment; the kind is asked here alone."""
    return _ENV if isinstance(task, Env) else _TASK


def held_out_rollout(request: DrawRequest, *, task: Task | Env, **how: Any) -> Groups:
    """``on_device(task).rollout`` for an evaluation, as a program with its own name."""
    return on_device(task).rollout(request, task=task, **how)


def solution_batch(key: Array, *, task: Task | Env, count: int) -> Batch:
    """Supervised examples: ``count`` training problems with a right completion each, G = 1."""
    return on_device(task).examples(key, task, count)


def _solved_batch(key: Array, task: Task, count: int) -> Batch:
    """Solutions of a task as supervised examples."""
    problems = jax.vmap(lambda k: task.generate(k, "train"))(jax.random.split(key, count))
    tokens, lengths = jax.vmap(task.solution)(problems)
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return _supervised(problems, tokens, lengths, mask)


def _supervised(problems: Any, tokens: Array, lengths: Array, mask: Array) -> Batch:
    """Examples of one completion each.

    Args:
      problems: with the fields ``tokens`` [N, P] and ``length`` [N].
      tokens: [N, T] int32.
      lengths: [N] int32, tokens.
      mask: [N, T] bool, tokens to learn.
    """
    count = tokens.shape[0]
    ones = jnp.ones((count, 1), bool)
    return Batch(
        prompt_tokens=problems.tokens,
        prompt_lengths=problems.length,
        tokens=tokens[:, None],
        lengths=lengths[:, None],
        mask=mask[:, None],
        rewards=jnp.zeros((count, 1, 1), jnp.float32),
        reward_weights=jnp.ones(1, jnp.float32),
        members=ones,
        baseline=~ones,
        truncated=~ones,
    )


_TASK = OnDevice(
    task_rollout,
    {"verify": 1.0},
    _solved_batch,
    lambda task: partial(TaskTools, task),
    lambda task: {},
)
_ENV = OnDevice(
    episode_rollout,
    {"success": 1.0, "reward": 0.0},
    lambda key, env, count: scripted_batch(key, env=env, count=count),
    lambda env: None,
    lambda env: {"device environment": f"the environment {env.name!r}"},
)
