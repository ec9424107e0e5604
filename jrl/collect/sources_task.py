"""Groups of problems that the device makes: procedural tasks, and environments on the device.

``task_rollout`` is problems, completions and rewards in one program; its twin for environments is
``episodes.episode_rollout``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.members import SampledMembers, join_drawn, plain_ask
from jrl.collect.sources import Groups, counted_draw, entries
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.errors import UserError, unknown_choice
from jrl.sampling.generate import generate
from jrl.sampling.params import SamplingParams
from jrl.sampling.sequences import Members
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.tree import TreeShape, generate_tree
from jrl.types import Array, Branching, Network, Prompt, Rollout, stream
from jrl.types.asks import Ask, DrawRequest, Tokens


def task_rollout(
    request: DrawRequest,
    *,
    sampling_params: SamplingParams,
    task: Task,
    parts: Sequence[str],
    network: Network,
    slots: int = 0,
    chunk: int = 4,
) -> Groups:
    """Problems, completions and rewards in one program; the same function in every mode.

    The problem in row i of a run is a function of (key, i) alone; the completions of a ticket at a
    step are a function of that, the weights, and (key, step, ticket).

    Args:
      request: asks of the same N tickets, and the weights to draw with. With a tree ``ids`` gains
        "node", and no members may stand beside the tree's.
      sampling_params: scalars.
      task: the procedural task.
      parts: reward parts, of "verify" and "partial".
      network: the policy.
      slots: completions decoded at a time; 0 takes all.
      chunk: decode steps between slot refills.

    Returns:
      The groups; their subject is the problems, with N rows. ``ids`` holds "answer" [N, G], a
      number for the whole completion: equal numbers, equal completions.
    """
    tickets, rows = entries(request)
    problems = task_problems(task, request.key, rows, request.split)
    key = stream(request.key, sample_stream(request), request.step)

    how: dict[str, Any] = {"network": network, "stop_tokens": (task.stop_id,)}
    how |= {"max_new_tokens": task.completion_tokens}
    plan = SlotPlan(slots, chunk=chunk)

    def arguments(prompts: Tokens, ask: Ask, *members: Members) -> Any:
        weights, version = request.weights[ask.policy], request.versions[ask.policy]
        return (
            key,
            weights,
            prompts.ids,
            prompts.lengths,
            sampling_params,
            version,
            tickets,
            *members,
        )

    def sample(prompts: Tokens, members: Members, ask: Ask) -> SampledMembers:
        return counted_draw(generate(*arguments(prompts, ask, members), slots=plan, **how))

    prompts, together = Tokens(problems.tokens, problems.length), None
    if (plain := plain_ask(request.asks, sampling_params.temperature)) is not None:
        ask, members = plain
        result: Any
        if not isinstance(ask.tree, Branching):
            result = generate(*arguments(prompts, ask, members), slots=plan, **how)
        else:
            tree = TreeShape(ask.tree, ask.width)
            result = generate_tree(*arguments(prompts, ask), tree=tree, slots=slots, **how)
        together = counted_draw(result)
    rollout, labels, counts = join_drawn(
        request.asks,
        together,
        sample,
        prompts,
        sampling_params.temperature,
        task.completion_tokens,
    )
    rewards = judge_problems(task, parts, problems, rollout.tokens, rollout.lengths)
    answer = jax.vmap(jax.vmap(completion_number))(rollout.tokens, rollout.lengths)
    ids = {"prompt": rows, "answer": answer, **labels}
    return Groups(rollout, rewards, problems, counts, ids)


DATA_STREAMS = {"train": "data", "eval": "eval_data"}
"""Split -> stream of the run's keys that problems are made from."""


def sample_stream(request: DrawRequest) -> str:
    """The stream of the run's keys that members of a task or in an environment are drawn with."""
    return "eval" if request.split == "eval" else request.stream


def task_problems(task: Task | Env, key: Array, rows: Array, split: str) -> Any:
    """The problems in rows [N] int32 of a split; a pytree with N rows."""
    keys = jax.vmap(lambda i: stream(key, DATA_STREAMS[split], i))(rows)
    return jax.vmap(lambda k: task.generate(k, split))(keys)


def judge_problems(
    task: Task, parts: Sequence[str], problems: Any, tokens: Array, lengths: Array
) -> Array:
    """[N, G, R] float32, points of completions by the task's own judges.

    Args:
      task: that made the problems.
      parts: reward parts, of "verify" and "partial".
      problems: a pytree with N rows.
      tokens: [N, G, T] int32.
      lengths: [N, G] int32, tokens.
    """
    judges = {"verify": task.verify, "partial": task.partial}
    for part in parts:
        if part not in judges:
            raise unknown_choice("rewards", part, judges)

    def judge(problem: Any, tokens: Array, length: Array) -> Array:
        return jnp.array([judges[part](problem, tokens, length) for part in parts], jnp.float32)

    of_group = jax.vmap(judge, in_axes=(None, 0, 0))
    return jax.vmap(of_group)(problems, tokens, lengths)


def completion_number(tokens: Array, length: Array) -> Array:
    """[] int32, at least 0, for the first ``length`` tokens of ONE completion."""
    odd = jnp.uint32(0x9E3779B1)
    powers = jnp.cumprod(jnp.full(tokens.shape, odd, jnp.uint32))
    live = jnp.arange(tokens.shape[0]) < length
    total = jnp.sum(jnp.where(live, (tokens.astype(jnp.uint32) + 1) * powers, 0), dtype=jnp.uint32)
    return (total >> 1).astype(jnp.int32)


class TaskSource:
    """Problems of a procedural task.

    Row i is the problem made from key number i, so there is no end of them.

    Args:
      task: which.
      parts: reward parts that the device computes.
      program: (request) -> groups, compiled; of ``task_rollout`` or ``episode_rollout``. None
        where nothing is drawn.
      sampling_params: the argument of that name of ``program``; None where it has its own.
      free: frees what ``program`` holds between draws.
      split: "train" or "eval", of the rows that ``prompts`` makes.
    """

    def __init__(
        self,
        task: Any,
        parts: Sequence[str],
        program: Callable[..., Groups] | None,
        sampling_params: SamplingParams | None = None,
        *,
        free: Callable[[], None] | None = None,
        split: str = "train",
    ) -> None:
        self.task, self._parts, self._free, self._split = task, tuple(parts), free, split
        # The compiled program itself, so that no frame stands between it and who collects.
        self.draw: Any = program
        if sampling_params is not None and program is not None:
            self.draw = partial(program, sampling_params=sampling_params)
        self._make = jax.jit(self._problems)
        self._judge = jax.jit(self._rewards)

    def _problems(self, key: Array, rows: Array) -> Any:
        return task_problems(self.task, key, rows, self._split)

    def _rewards(self, problems: Any, tokens: Array, lengths: Array) -> Array:
        return judge_problems(self.task, self._parts, problems, tokens, lengths)

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """The rows with the tickets' numbers: a problem is used once."""
        return tickets

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[Any, list[Prompt]]:
        """As ``Source.prompts``; the problems are on the host, and prompts have no text."""
        problems = jax.device_get(self._make(key, np.asarray(rows, np.int32)))
        parts = zip(np.asarray(rows).tolist(), problems.tokens, problems.length, strict=True)
        return problems, [Prompt(i, "", np.asarray(ids[:n], np.int32), "") for i, ids, n in parts]

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """As ``Source.judge``, by the task's own judges."""
        n = len(prompts)
        some = np.arange(1 << (n - 1).bit_length()) % n  # few shapes, hence few programs
        lengths = np.maximum(rollout.lengths, 1)  # a path of a search may still be empty
        rows = jax.tree.map(lambda x: x[some], (subject, rollout.tokens, lengths))
        ids = {"prompt": np.array([prompt.id for prompt in prompts], np.int32)}
        return Groups(rollout, np.asarray(self._judge(*rows))[:n], subject, {}, ids)

    def finish(self, complete: bool) -> None:
        """As ``Source.finish``."""
        if self._free is not None:
            self._free()

    def notes(self) -> dict[str, Any]:
        """Nothing: the next problems follow from their rows."""
        return {}


class EnvSource(TaskSource):
    """Starts of episodes in an environment on the device; ``task`` is the environment."""

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Only the environment judges, while it plays.

        Raises:
          UserError: always.
        """
        raise UserError(f"data.env = {self.task.name!r}: episodes are judged as they are played")
