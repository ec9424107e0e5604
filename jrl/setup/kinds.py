"""The kinds of data: one value for each, made once from the configuration.

    kind = kind_of(config)                           # the kind is asked here and nowhere else
    data = kind.read(tokenizer, method, open_dataset)
    width = kind.width(data)

What draws groups of each is in ``train.batches.SOURCES``, since sources stand on programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jrl.config import Config
from jrl.config.data import (
    DialogueData,
    EnvData,
    EpisodeData,
    PairData,
    PromptData,
    RecordedData,
    SourceData,
    TaskData,
    TaskPairs,
)
from jrl.config.secrets import reveal
from jrl.episodes.calls import Calls
from jrl.episodes.configured import configured_env
from jrl.episodes.host import HostEnv, nothing_shared
from jrl.episodes.tree import SEARCHES
from jrl.episodes.world import close_env
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.models.config import ModelConfig
from jrl.rewards.base import Sample
from jrl.setup.device_kinds import EnvKind, TaskKind
from jrl.setup.given_kinds import DialogueKind, PairKind, RecordedKind, TaskPairKind
from jrl.setup.kind import ROW_LABELS, HeldOut, Kind, Labels, Opened, RunData, in_trees
from jrl.setup.reward_parts import parts_by_step
from jrl.types import SILENT


class TextKind(Kind):
    """Prompts in text, from files, which reward functions on the host judge."""

    contexts_of_plans = True

    def labels(self, method: Method) -> Labels:
        """Numbers for final answers, reward parts without an opinion, and lines."""
        ids = {"answer": 2, SILENT: 2} if method.draw.samples else {}
        by_line = "lines" in method.needs.reads or parts_by_step(self.config)
        ids |= {"step": 3} if by_line else {}
        return in_trees(method, Labels(ids, super().labels(method).stats))


class EpisodeKind(Kind):
    """Prompts in text that open episodes with an environment on the host."""

    eval_parts: Mapping[str, float] = {"success": 1.0, "reward": 0.0}
    eval_metrics = None
    plays = True
    step_name = "turns"
    faults: Mapping[str, tuple[str, ...]] = {
        "env_errors": ("env_errors", "env_timeouts", "env_fork_errors")
    }
    known_metrics = False
    counts_note = " of the question; the environment opens with its own messages"

    @functools.cached_property
    def env(self) -> HostEnv:
        """The environment as it describes itself; what its episodes would share has ended."""
        data: Any = self.config.data
        env = configured_env(data.env, reveal(data.options, "data"))
        if env.lifecycle.shutdown is not nothing_shared:
            close_env(Calls(), env)
        return env

    @property
    def contexts(self) -> int:
        """Contexts of an episode at most."""
        data: Any = self.config.data
        contexts = data.options.get("contexts", 1)
        return contexts if isinstance(contexts, int) else 1

    def width(self, data: RunData) -> int:
        """P: the limit, since nobody knows yet what an environment will say."""
        return self.config.data.longest_prompt

    def batch_shape(self, method: Method) -> tuple[int, int, int]:
        """A row holds all contexts of an episode."""
        n, g, t = super().batch_shape(method)
        return n, g, t * self.contexts

    def labels(self, method: Method) -> Labels:
        """The turns of episodes, their final answers and the points that they paid."""
        ids = {**ROW_LABELS, "answer": 2} | ({"context": 3} if self.contexts > 1 else {})
        trees, search = method.draw.shares, method.draw.search is not None
        stats = {"paid": 3, "node_value": 3} if search else {"paid": 3}
        return Labels(ids | ({"node": 3} if trees else {}), stats)

    def cached(self, model: ModelConfig | None) -> None:
        """Nothing: the keys and values of rows that wait for an answer may wait on the host."""

    def search_seed(self, step: int) -> int:
        """The step of training, with which environments may change."""
        return step

    def check_searched(self, use: str = "") -> None:
        """Raises UserError for what is made of completions, or of their steps."""
        made, _, search = use.partition(" ")
        if made == "choice":
            raise UserError(
                f"--search {search} counts completions of text; name one search instead"
            )
        if made == "rows" and SEARCHES[search].whole:
            raise UserError(
                f"--out: --search {search} plays complete episodes, which have no steps to"
                f" compare; use one of {', '.join(n for n in SEARCHES if not SEARCHES[n].whole)}"
            )

    def as_rewarded(self, sample: Sample) -> Sample:
        """An episode of one turn."""
        messages = ({"role": "assistant", "content": sample.completion},)
        return dataclasses.replace(sample, messages=messages, stop="done")


class SourceKind(Kind):
    """Groups from a source of one's own."""

    eval_metrics = None
    known_metrics = False

    def width(self, data: RunData) -> int:
        """P: the limit, since nobody knows yet what the source will ask."""
        return self.prompt_tokens

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """Nothing: the source has its own data."""
        return RunData({"train": [], "eval": []}, {}, {})

    def columns(self, data: RunData) -> None:
        """Not known before the source is asked."""

    def held_out(self, config: Config, data: RunData) -> HeldOut:
        """As many as the configuration says: the source is asked for the split "eval"."""
        return HeldOut(config.eval.problems, min(config.train.prompts, config.eval.problems))


KINDS: Mapping[type, type[Kind]] = {
    PromptData: TextKind,
    TaskData: TaskKind,
    EnvData: EnvKind,
    EpisodeData: EpisodeKind,
    SourceData: SourceKind,
    PairData: PairKind,
    TaskPairs: TaskPairKind,
    RecordedData: RecordedKind,
    DialogueData: DialogueKind,
}
"""Table of the configuration -> its kind."""


def kind_of(config: Config) -> Kind:
    """The kind of a configuration's data, with its task or environment made.

    Raises:
      UserError: there is no such task or environment, or it does not take its options.
    """
    return KINDS[type(config.data)](config)
