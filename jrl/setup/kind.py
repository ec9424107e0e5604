"""What every kind of data answers, so that no caller asks which one a run has.

``Kind`` is the protocol, and as it stands the kind of prompts from files. The kinds are in
``setup.kinds``, those on the device in ``setup.device_kinds`` and those that hold completions in
``setup.given_kinds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.config import Config
from jrl.data.messages import Wording
from jrl.data.pairs import Judged, JudgedCounts
from jrl.data.prompts import PromptCounts, build_prompts
from jrl.data.tables import Dataset
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.episodes.transcript import Transcript
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.methods.base import Method
from jrl.methods.plan import Plan
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import line_ends, load_tokenizer
from jrl.rewards.base import Sample
from jrl.rewards.columns import check_column
from jrl.rewards.exact import final_answer
from jrl.sampling.slots import check_length
from jrl.setup.first_row import needs_answer
from jrl.setup.recorded import KeptCounts
from jrl.setup.reward_parts import parts_by_token
from jrl.types import NOTHING, SILENT, Network, Prompt

Opened = Callable[..., Dataset]
"""(what names a source of rows, key=...) -> the rows, as ``data.datasets.open_dataset``."""


class RunData(NamedTuple):
    """Data read from files; empty for a procedural task.

    Attributes:
      prompts: "train" and "eval", prompts in text; empty with pairs.
      judged: "pairs" and "eval", judged completions; empty without ``data.pairs``.
      counts: what became of the records of each file.
      recorded: rows of sessions in groups, one of each training prompt; empty without
        recorded sessions or dialogues in ``data.train``.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    judged: dict[str, list[Judged]]
    counts: dict[str, PromptCounts | JudgedCounts | KeptCounts]
    recorded: Sequence[Sequence[Transcript]] = ()


class Labels(NamedTuple):
    """Arrays of a batch by name, with the number of their axes: 2 for [N, G], 3 for [N, G, T].

    Attributes:
      ids: int32, as ``Batch.ids``.
      stats: float32, as ``Batch.stats``.
    """

    ids: Mapping[str, int] = NOTHING
    stats: Mapping[str, int] = NOTHING


ROW_LABELS: Mapping[str, int] = {
    **dict.fromkeys(("turn", "step", "state"), 3),
    **dict.fromkeys(("episode", "role", "stratum"), 2),
}
"""Labels of rows that transcripts become, as ``Labels.ids``."""


class HeldOut(NamedTuple):
    """Held-out problems of an evaluation, and the number of them per draw."""

    problems: int
    at_once: int


class Kind:
    """The kind of a run's data, as its setup asks for it; this base class is prompts from files.

    Args:
      config: of the run.

    Attributes:
      config: of the run.
      task: the procedural task, or the environment on the device; None without one.
      eval_parts: reward parts of an evaluation, the first of which says what is right; empty for
        those of the run.
      eval_metrics: names that an evaluation adds to those of all; None where they are not known
        before the first.
      sampled: whether a policy sampled the completions, so that they have log-probabilities.
      contexts_of_plans: whether a plan's members may be trained under prompts of their own.
      plays: whether an environment on the host answers the policy's turns.
      step_name: name of the steps of a search, for messages.
      faults: what an evaluation by search reports -> the counts of failures that it adds up.
      known_metrics: whether the metrics of steps follow from the configuration.
      dropped_metrics: those of a step that say nothing about the policy.
      counts_note: end of the printed line about the data's records.
    """

    task: Task | Env | None = None
    eval_parts: Mapping[str, float] = {}
    eval_metrics: tuple[str, ...] | None = ()
    sampled = True
    contexts_of_plans = False
    plays = False
    step_name = "steps"
    faults: Mapping[str, tuple[str, ...]] = {}
    known_metrics = True
    dropped_metrics: tuple[str, ...] = ()
    counts_note = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def tokenizer(self) -> Any:
        """The task's; None where a checkpoint has it."""
        return None

    @property
    def tokenizer_facts(self) -> bytes | str:
        """Facts that two runs share if their tokens mean the same."""
        return (model_directory(self.config.model.path or "") / "tokenizer.json").read_bytes()

    @property
    def players(self) -> int:
        """Players whose moves the policy samples; an environment on the host has its own number."""
        return 1

    @property
    def new_tokens(self) -> int:
        """T: the most tokens of a completion."""
        return self.config.sampling.max_new_tokens

    @property
    def prompt_tokens(self) -> int:
        """P as long as the data are not read, rounded up as ``width`` is."""
        return rounded(self.config.data.longest_prompt)

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.config.data.longest_prompt

    @property
    def contexts(self) -> int:
        """Contexts of a completion at most, each as long as one."""
        return 1

    @property
    def features(self) -> dict[str, str]:
        """Features of the data, by name as in ``features.TABLE``, with their words for messages."""
        return self.config.data.features

    @property
    def decode_trips(self) -> dict[str, int]:
        """The most iterations of the sampler's loops over tokens, by their ``jax.named_scope``."""
        return {"decode": self.new_tokens}

    def batch_shape(self, method: Method) -> tuple[int, int, int]:
        """(groups, members of each, completion tokens) of a training batch."""
        draw, group, t = method.draw, self.config.sampling.group, self.new_tokens
        g = (group + draw.baseline_members if draw.samples and group else 0) + draw.demonstrations
        if (plan := method.plan).next is not None:
            g += plan.members(group)
            t += plan.tokens if self.contexts_of_plans else 0
        return method.batch_groups(self.config.train.prompts), g, t

    def samples(self, method: Method) -> bool:
        """Whether the policy samples completions to train on."""
        return method.draw.samples

    def draws(self, method: Method) -> bool:
        """Whether a program samples the groups of a training step."""
        return self.samples(method) and self.config.sampling.group > 0

    def has_logprobs(self, method: Method) -> bool:
        """Whether batches have log-probabilities of the policy that sampled the completions."""
        return self.sampled and method.draw.samples

    def rows_of_a_prompt(self, method: Method) -> int:
        """Completions of a prompt in a batch, greedy baselines and demonstrations among them."""
        draw = method.draw
        samples = self.config.sampling.group + draw.baseline_members if draw.samples else 0
        return samples + draw.demonstrations

    def labels(self, method: Method) -> Labels:
        """Labels and statistics of a batch, beside those that every batch has."""
        return Labels({}, {"paid": 3} if parts_by_token(self.config) else {})

    def problems(self, data: RunData, pool: int, split: str = "train") -> int:
        """Number of problems of a split; ``pool`` if they are endless."""
        return len(data.prompts.get(split, ()))

    def played(self, plan: Plan) -> Plan:
        """A method's plan, as it is played on this kind of data."""
        return plan

    def width(self, data: RunData) -> int:
        """P: the longest prompt, rounded up so that a few more rows change no program."""
        lengths = [len(p.tokens) for listed in data.prompts.values() for p in listed]
        lengths += [len(j.prompt) for listed in data.judged.values() for j in listed]
        return rounded(max(lengths, default=1))

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The ids that end a completion."""
        return tuple(tokenizer.stop_ids)

    def step_tokens(self, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
        """The ids that end a step of a search in text: those whose text ends a line."""
        return line_ends(tokenizer, vocab_size)

    def tokenizer_in(self, directory: Path | str) -> Any:
        """The tokenizer of a checkpoint; a task has its own."""
        return load_tokenizer(directory)

    def cached(self, model: ModelConfig | None) -> ModelConfig | None:
        """The shape whose keys and values the devices hold while completions are sampled."""
        return model

    def made_at_once(self, problems: int) -> int:
        """Number of these problems of an evaluation that a program makes in one draw."""
        return 0

    def check_lengths(self, network: Network, width: int) -> None:
        """Raises UserError where prompt and completion do not fit the network."""
        check_length(network, width, self.new_tokens)

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """Training and held-out prompts, tokenized.

        Raises:
          UserError: a row lacks a field, is too long, or the template fails on it.
        """
        data: Any = self.config.data
        if data.train is None:
            raise UserError(
                "data.train and data.task are both missing; name a file of prompts or a procedural"
                " task"
            )
        names = {"answer": "answer", **data.fields}
        if method.draw.demonstrations:
            names.setdefault("solution", names["answer"])
        elif "solution" in names:
            raise UserError(
                f"data.fields.solution = {names['solution']!r} is not read by method = "
                f"{self.config.method!r}, which trains on no demonstrations; remove it"
            )
        prompts: dict[str, list[Prompt]] = {"train": [], "eval": []}
        counts: dict[str, Any] = {}
        several = "several solutions" in method.needs.reads
        for split, spec in (("train", data.train), ("eval", data.eval)):
            if spec is not None:
                prompts[split], counts[split] = build_prompts(
                    opened(spec, key=f"data.{split}"),
                    Wording(tokenizer, **data.wording),
                    question_key=names.get("question"),
                    answer_key=names["answer"],
                    answer_pattern=data.answer_pattern,
                    solution_key=names.get("solution") if split == "train" else None,
                    solutions=method.draw.demonstrations if several else None,
                    needs_answer=needs_answer(self.config),
                    max_prompt_tokens=data.max_prompt_tokens,
                    overlong=data.overlong,
                    invalid=data.invalid,
                )
        return RunData(prompts, {}, counts)

    def columns(self, data: RunData) -> tuple[str, ...] | None:
        """Names of the columns that reward functions may take; None where they are not known."""
        first = next(iter(data.prompts.get("train", ())), None)
        if first is None:
            return ()
        return (*(["question"] if first.question else []), *first.meta)

    def first_prompt(self, data: RunData) -> Prompt | None:
        """A prompt of training with its answer, to try reward functions on; None without any."""
        return next(iter(data.prompts.get("train", ())), None)

    def as_rewarded(self, sample: Sample) -> Sample:
        """A completion as reward functions read it."""
        return sample

    def reported_weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Weights of the reward parts that a report of the run explains."""
        return weights

    def eval_weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Weights of the reward parts of an evaluation, from those of the run."""
        return self.eval_parts or weights

    def final_answers(self, completions: Sequence[str]) -> list[str | None] | None:
        """Final answers, which a majority vote compares; None where there are none to compare."""
        return [final_answer(text) for text in completions]

    def check_members(self, method: Method, data: RunData, least: int) -> None:
        """Raises UserError where groups are too small for a method that compares their members.

        Args:
          method: of the run.
          data: of the run.
          least: the fewest members of a group that the method learns from.
        """
        draw, group = method.draw, self.config.sampling.group
        if (group if draw.samples else 0) + draw.demonstrations < least:
            raise UserError(
                f"sampling.group = {group}: method {self.config.method!r} compares the samples of"
                f" one prompt and needs at least {least} of them; raise sampling.group or choose a"
                " method without a group baseline, such as reinforce_plus_plus or ppo"
            )

    def held_out(self, config: Config, data: RunData) -> HeldOut:
        """Problems of an evaluation: as many prompts per draw as a training step."""
        problems = min(config.eval.problems, len(data.prompts.get("eval", ())))
        return HeldOut(problems, config.train.prompts)

    def asked(
        self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[Prompt]]
    ) -> tuple[Kind, list[Prompt]]:
        """The kind of prompts that a person asks, and these prompts.

        Args:
          texts: of a person.
          encode: makes prompts of them as those of the run's files are made.
        """
        return self, encode(texts)

    def search_seed(self, step: int) -> int:
        """The step that keys the tokens of a search at evaluation: text does not change with it."""
        return 0

    def check_searched(self, use: str = "") -> None:
        """Raises UserError where an evaluation cannot search.

        Args:
          use: what is made of the paths: "rows STRATEGY" for rows that compare their steps,
            "choice STRATEGY" for a choice by counts of completions; "" for their accuracy alone.
        """

    def check_variants(self, config: Config, data: RunData) -> None:
        """Raises UserError where an evaluation reads a column that held-out problems lack."""
        if self.held_out(config, data).problems:
            check_column("eval.variants_of", config.eval.variants_of, data.prompts.get("eval", ()))


def in_trees(method: Method, labels: Labels) -> Labels:
    """The labels of completions, with those of the trees that they are leaves of."""
    ids, stats = dict(labels.ids), dict(labels.stats)
    if method.draw.search is not None:
        return Labels({"step": 3, "node": 3, SILENT: 2}, {"node_value": 3})
    return Labels(ids | ({"node": 3} if method.draw.tree is not None else {}), stats)


def rounded(length: int) -> int:
    """Tokens rounded up to 16."""
    return -(-length // 16) * 16
