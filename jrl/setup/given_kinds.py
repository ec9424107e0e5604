"""Kinds of data that hold the completions, so that none is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.data.messages import Wording
from jrl.data.pairs import Judged, build_judged, rows_for
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.plan import Plan
from jrl.setup.device_kinds import TaskKind
from jrl.setup.kind import ROW_LABELS, Kind, Labels, Opened, RunData
from jrl.setup.recorded import read_dialogue_file, read_sessions, recorded_groups


class GivenKind(Kind):
    """Completions that the data hold; nothing is sampled."""

    eval_metrics = None
    known_metrics = False

    def samples(self, method: Method) -> bool:
        """Never."""
        return False

    def reported_weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """None: the data hold the scores."""
        return {}

    def draws(self, method: Method) -> bool:
        """Never."""
        return False

    def labels(self, method: Method) -> Labels:
        """None."""
        return Labels()

    def played(self, plan: Plan) -> Plan:
        """No plan: what is trained on is there already."""
        return Plan()


class RecordedKind(GivenKind):
    """Sessions that a server recorded."""

    def labels(self, method: Method) -> Labels:
        """The turns of sessions, and the points that they were given."""
        return Labels(ROW_LABELS, {"paid": 3})

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """The groups of recorded rows, each with its prompt."""
        data: Any = self.config.data
        read = read_sessions(self.config, data)
        groups, prompts, counts = recorded_groups(self.config, data, tokenizer, method, read)
        return RunData({"train": prompts, "eval": []}, {}, {"train": counts}, groups)


class DialogueKind(RecordedKind):
    """Dialogues that nobody sampled."""

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """The groups of dialogues, each with its prompt."""
        data: Any = self.config.data
        read = read_dialogue_file(data, tokenizer, opened)
        groups, prompts, counts = recorded_groups(self.config, data, tokenizer, method, read)
        return RunData({"train": prompts, "eval": []}, {}, {"train": counts}, groups)


class PairKind(GivenKind):
    """Judged completions from files."""

    sampled = False
    dropped_metrics = ("reward", "reward_std", "reward/score", "zero_std_groups")

    def rows_of_a_prompt(self, method: Method) -> int:
        """Two: a preferred completion and another one."""
        return 2

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """Training and held-out judged completions, tokenized.

        What a method needs may say how rows are read (``data.pairs.rows_for``); one that needs
        "rationales" reads one in each row of training.
        """
        data: Any = self.config.data
        judged: dict[str, list[Judged]] = {}
        counts: dict[str, Any] = {}
        for split, spec in (("pairs", data.pairs), ("eval", data.eval)):
            if spec is not None:
                rows = opened(spec, key=f"data.{split}")
                judged[split], counts[split] = build_judged(
                    rows_for(method.needs.reads, rows),
                    Wording(tokenizer, **data.wording),
                    rationales="rationales" in method.needs.reads and split == "pairs",
                    max_prompt_tokens=self.longest_prompt,
                    max_completion_tokens=self.new_tokens,
                    overlong=data.overlong,
                    invalid=data.invalid,
                )
        return RunData({"train": [], "eval": []}, judged, counts)

    def check_members(self, method: Method, data: RunData, least: int) -> None:
        """Raises UserError where no record has as many completions."""
        if max(len(j.completions) for j in data.judged["pairs"]) < least:
            raise UserError(
                f"method = {self.config.method!r} compares {least} completions of one prompt, and"
                " data.pairs has one in each record; choose a method of labelled completions such"
                " as kto"
            )


class TaskPairKind(PairKind, TaskKind):
    """Judged completions of a procedural task, which gives tokenizer and lengths."""
