"""Kinds of data that are made on the device: procedural tasks, and environments as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.data.tasks import Task, get_task
from jrl.episodes import get_env
from jrl.episodes.device_play import check_room
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.sampling.slot_sizes import CHUNK
from jrl.setup.kind import HeldOut, Kind, Labels, Opened, RunData, in_trees
from jrl.setup.reward_parts import parts_of
from jrl.types import Network, Prompt


class TaskKind(Kind):
    """Problems of a procedural task, made and judged on the device."""

    eval_parts: Mapping[str, float] = {"verify": 1.0}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.task: Any = self._make(config.data.name, reveal(config.data.free_options, "data"))

    def _make(self, name: str, options: Mapping[str, Any]) -> Any:
        return get_task(name, **options)

    @property
    def named(self) -> str:
        """The task or environment, as the configuration names it."""
        return f"{self.config.data.kind} = {self.config.data.name!r}"

    @property
    def features(self) -> dict[str, str]:
        """Those of the data, and reward functions of one's own beside those of a task."""
        parts = parts_of(self.config).given_by("function") if self.config.rewards else ()
        reward_part = {"own reward of a task": f"rewards.{parts[0]}"} if parts else {}
        return super().features | reward_part

    def draws(self, method: Method) -> bool:
        """Always: a program makes the problems, with the solutions that a method reads."""
        return True

    def labels(self, method: Method) -> Labels:
        """Numbers for completions."""
        ids = {"answer": 2} if method.draw.samples else {}
        return in_trees(method, Labels(ids, super().labels(method).stats))

    def problems(self, data: RunData, pool: int, split: str = "train") -> int:
        """As many as are asked for: they are made from keys."""
        return pool

    @property
    def tokenizer(self) -> Any:
        """The task's."""
        return self.task.tokenizer

    @property
    def tokenizer_facts(self) -> str:
        """All tasks have one alphabet."""
        return "the tasks' own"

    @property
    def new_tokens(self) -> int:
        """T, the task's."""
        return self.task.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """P, the task's."""
        return self.task.prompt_tokens

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt, the task's."""
        return self.task.prompt_tokens

    def width(self, data: RunData) -> int:
        """P, the task's."""
        return self.task.prompt_tokens

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The id that ends a completion of the task."""
        return (self.task.stop_id,)

    def step_tokens(self, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
        """None: completions of a task have no lines."""
        return ()

    def tokenizer_in(self, directory: Path | str) -> Any:
        """The task's."""
        return self.task.tokenizer

    def made_at_once(self, problems: int) -> int:
        """All of them."""
        return problems

    def final_answers(self, completions: Sequence[str]) -> None:
        """None: the task compares whole completions."""

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """Nothing: problems are made from keys."""
        return RunData({"train": [], "eval": []}, {}, {})

    def first_prompt(self, data: RunData) -> Prompt | None:
        """A problem as reward functions get it, with a correct completion as its answer."""
        generate = jax.jit(self.task.generate, static_argnums=1)
        problem = jax.device_get(generate(jax.random.key(self.config.seed), "train"))
        text, answer = self.task.render(problem)
        return Prompt(0, text, problem.tokens[: int(problem.length)], answer)

    def held_out(self, config: Config, data: RunData) -> HeldOut:
        """All problems in one draw."""
        return HeldOut(config.eval.problems, config.eval.problems)

    def asked(
        self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[Prompt]]
    ) -> tuple[Kind, list[Prompt]]:
        """The texts in the task's alphabet.

        Raises:
          UserError: one is longer than the task's prompts, or holds a character that is none of
            its tokenizer's.
        """
        task, prompts = self.task, []
        for number, text in enumerate(texts, 1):
            ids = task.tokenizer.encode(text)
            if not 0 < len(ids) <= task.prompt_tokens:
                problem = task.generate(jax.random.key(0), split="eval")
                raise UserError(
                    f"prompt {number}: {text!r} has {len(ids)} characters; prompts of data.task ="
                    f" {task.name!r} have up to {task.prompt_tokens}, such as"
                    f" {task.render(problem)[0]!r}"
                )
            prompts.append(Prompt(number - 1, text, np.array(ids, np.int32), "", {}, None))
        return AskedKind(self.config, task), prompts


class EnvKind(TaskKind):
    """Episodes in an environment on the device."""

    eval_parts: Mapping[str, float] = {"success": 1.0, "reward": 0.0}
    eval_metrics = ("success", "reward", "turns")
    known_metrics = False  # the environment names some of its own

    @property
    def players(self) -> int:
        """Those of the environment that the policy plays."""
        return self.task.players

    @property
    def features(self) -> dict[str, str]:
        """The environment, and its players."""
        if self.task.players == 1:
            return super().features
        return super().features | {
            "several groups": f"{self.named}, of {self.task.players} players,"
        }

    @property
    def decode_trips(self) -> dict[str, int]:
        """Turns, in chunks: a fixed number of steps is decoded between two answers."""
        return {"answers": 1, "turns": self.task.turns * -(-self.task.turn_tokens // CHUNK)}

    def _make(self, name: str, options: Mapping[str, Any]) -> Any:
        return get_env(name, **options)

    def labels(self, method: Method) -> Labels:
        """The turns of episodes, and the points that they paid."""
        by_token = dict.fromkeys(("turn", "step", "state", "role"), 3)
        return Labels({**by_token, "stratum": 2}, {"paid": 3})

    def first_prompt(self, data: RunData) -> Prompt | None:
        """Nothing: the environment pays."""
        return None

    def asked(
        self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[Prompt]]
    ) -> tuple[Kind, list[Prompt]]:
        """Nobody asks an environment.

        Raises:
          UserError: always.
        """
        raise UserError(f"{self.named} makes its own prompts; leave --prompt out")

    def check_searched(self, use: str = "") -> None:
        """Raises UserError: such episodes cannot be continued from their middle."""
        raise UserError(
            "--search: episodes in an environment on the device are not searched; leave it out"
        )

    def check_lengths(self, network: Network, width: int) -> None:
        """Raises UserError where an episode does not fit the network."""
        check_room(self.task, network)


class AskedKind(Kind):
    """Texts in the alphabet of a procedural task, asked by a person and judged by nobody.

    Args:
      config: of the run on the task.
      task: whose tokenizer and lengths are taken.
    """

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__(config)
        self._task = task

    @property
    def tokenizer(self) -> Any:
        """The task's."""
        return self._task.tokenizer

    def tokenizer_in(self, directory: Path | str) -> Any:
        """The task's."""
        return self._task.tokenizer

    @property
    def new_tokens(self) -> int:
        """T, the task's."""
        return self._task.completion_tokens

    def width(self, data: RunData) -> int:
        """P, the task's."""
        return self._task.prompt_tokens
