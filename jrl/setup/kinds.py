"""The kinds of data: one value for each, made once from the configuration.

    kind = kind_of(config)                           # the kind is asked here and nowhere else
    data = kind.read(tokenizer, method, open_source)
    width = kind.width(data)

``Kind`` is what every kind answers, so that no caller asks which one a run has. What draws groups
of each is in ``train.batches.SOURCES``, since sources stand on programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

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
from jrl.data.messages import Wording
from jrl.data.pairs import Judged, JudgedCounts, build_judged, rows_for
from jrl.data.prompts import PromptCounts, build_prompts
from jrl.data.tables import Source as Rows
from jrl.data.tasks import Task, get_task
from jrl.episodes import Env, get_env
from jrl.episodes.device_play import check_room
from jrl.episodes.transcript import Transcript
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.plan import Plan
from jrl.rewards.base import Sample
from jrl.rewards.columns import check_column
from jrl.sampling.slot_sizes import CHUNK
from jrl.sampling.slots import check_length
from jrl.setup.first_row import needs_answer
from jrl.setup.recorded import KeptCounts, recorded_groups
from jrl.setup.reward_parts import parts_by_step, parts_by_token, parts_of
from jrl.types import NOTHING, SILENT, Network, Prompt

Opened = Callable[..., Rows]
"""(what names a source of rows, key=...) -> the rows, as ``data.sources.open_source``."""


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
      votes: whether final answers can be compared for a majority vote.
      lines: whether completions have lines, which are the steps of a search.
      sampled: whether a policy sampled the completions, so that they have log-probabilities.
      contexts_of_plans: whether a plan's members may be trained under prompts of their own.
      cache_on_host: whether the sampler's cache may wait on the host.
      plays: whether an environment on the host answers the policy's turns.
      step_name: name of the steps of a search, for messages.
      faults: counts of failures of its environment.
      no_steps: ``by`` of a reward model that pays by step -> why these completions have none.
      reported: whether a run prints its reward at the start.
      known_metrics: whether the metrics of steps follow from the configuration.
      dropped_metrics: those of a step that say nothing about the policy.
      counts_note: end of the printed line about the data's records.
      rows: rows of a prompt in a batch; None if sampling decides.
    """

    task: Task | Env | None = None
    eval_parts: Mapping[str, float] = {}
    eval_metrics: tuple[str, ...] | None = ()
    votes = True
    lines = True
    sampled = True
    contexts_of_plans = False
    cache_on_host = False
    plays = False
    step_name = "steps"
    faults: tuple[str, ...] = ()
    no_steps: Mapping[str, str] = {
        "turn": "these data have no turns of an environment on the host; remove it, or set data.env"
    }
    reported = True
    known_metrics = True
    dropped_metrics: tuple[str, ...] = ()
    counts_note = ""
    rows: int | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def tokenizer(self) -> Any:
        """The task's; None where a checkpoint has it."""
        return None

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
        return {"records": "data.train"}

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

    def draws(self, method: Method) -> bool:
        """Whether a program samples the groups of a training step."""
        return method.draw.samples and self.config.sampling.group > 0

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
        return rounded(max(lengths))

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The ids that end a completion."""
        return tuple(tokenizer.stop_ids)

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
        names = {"question": "question", "answer": "answer", **data.fields}
        if method.draw.demonstrations:
            names.setdefault("solution", names["answer"])
        elif "solution" in names:
            raise UserError(
                f"data.fields.solution = {names['solution']!r} is not read by method = "
                f"{self.config.method!r}, which trains on no demonstrations; remove it"
            )
        prompts: dict[str, list[Prompt]] = {"train": [], "eval": []}
        counts: dict[str, Any] = {}
        several = "several solutions" in method.needs
        for split, spec in (("train", data.train), ("eval", data.eval)):
            if spec is not None:
                prompts[split], counts[split] = build_prompts(
                    opened(spec, key=f"data.{split}"),
                    Wording(tokenizer, **data.wording),
                    question_key=names["question"],
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

    def first_prompt(self, data: RunData) -> Prompt | None:
        """A prompt of training with its answer, to try reward functions on; None without any."""
        return next(iter(data.prompts.get("train", ())), None)

    def as_rewarded(self, sample: Sample) -> Sample:
        """A completion as reward functions read it."""
        return sample

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

    def check_searched(self) -> None:
        """Raises UserError where an evaluation cannot search."""

    def check_variants(self, config: Config, data: RunData) -> None:
        """Raises UserError where an evaluation reads a column that held-out problems lack."""
        if self.held_out(config, data).problems:
            check_column("eval.variants_of", config.eval.variants_of, data.prompts.get("eval", ()))


class TextKind(Kind):
    """Prompts in text, from files, which reward functions on the host judge."""

    contexts_of_plans = True

    @property
    def features(self) -> dict[str, str]:
        """Text."""
        return super().features | {"text": "data.train"}

    def labels(self, method: Method) -> Labels:
        """Numbers for final answers, reward parts without an opinion, and lines."""
        ids = {"answer": 2, SILENT: 2} if method.draw.samples else {}
        by_line = "lines" in method.needs or parts_by_step(self.config)
        ids |= {"step": 3} if by_line else {}
        return _in_trees(method, Labels(ids, super().labels(method).stats))


class EpisodeKind(Kind):
    """Prompts in text that open episodes with an environment on the host."""

    eval_parts: Mapping[str, float] = {"success": 1.0, "reward": 0.0}
    eval_metrics = None
    cache_on_host = True
    plays = True
    step_name = "turns"
    faults = ("env_errors", "env_timeouts", "env_fork_errors")
    no_steps: Mapping[str, str] = {}
    known_metrics = False
    counts_note = " of the question; the environment opens with its own messages"

    @property
    def features(self) -> dict[str, str]:
        """Episodes."""
        return super().features | {"episodes": "data.env with data.train"}

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

    def search_seed(self, step: int) -> int:
        """The step of training, with which environments may change."""
        return step

    def as_rewarded(self, sample: Sample) -> Sample:
        """An episode of one turn."""
        messages = ({"role": "assistant", "content": sample.completion},)
        return dataclasses.replace(sample, messages=messages, stop="done")


class GivenKind(Kind):
    """Completions that the data hold; nothing is sampled."""

    eval_metrics = None
    reported = False
    known_metrics = False

    def draws(self, method: Method) -> bool:
        """Never."""
        return False

    def labels(self, method: Method) -> Labels:
        """None."""
        return Labels()

    @property
    def features(self) -> dict[str, str]:
        """Given completions."""
        return super().features | {"given completions": self.config.data.completions_key or ""}

    def played(self, plan: Plan) -> Plan:
        """No plan: what is trained on is there already."""
        return Plan()


class RecordedKind(GivenKind):
    """Sessions that a server recorded."""

    def labels(self, method: Method) -> Labels:
        """The turns of sessions, and the points that they were given."""
        return Labels(ROW_LABELS, {"paid": 3})

    @property
    def features(self) -> dict[str, str]:
        """Given completions in rows of several turns."""
        return super().features | {"recorded": self.config.data.completions_key or ""}

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """The groups of recorded rows, each with its prompt."""
        data: Any = self.config.data
        groups, prompts, counts = recorded_groups(self.config, data, tokenizer, method, opened)
        return RunData({"train": prompts, "eval": []}, {}, {"train": counts}, groups)


class DialogueKind(RecordedKind):
    """Dialogues that nobody sampled."""

    @property
    def features(self) -> dict[str, str]:
        """Recorded completions without the log-probabilities of who sampled them."""
        return super().features | {"dialogues": self.config.data.completions_key or ""}


class PairKind(GivenKind):
    """Judged completions from files."""

    sampled = False
    dropped_metrics = ("reward", "reward_std", "reward/score", "zero_std_groups")
    rows: int | None = 2

    @property
    def features(self) -> dict[str, str]:
        """Pairs."""
        return super().features | {"pairs": "data.pairs"}

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
                    rows_for(method.needs, rows),
                    Wording(tokenizer, **data.wording),
                    rationales="rationales" in method.needs and split == "pairs",
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


class TaskKind(Kind):
    """Problems of a procedural task, made and judged on the device."""

    eval_parts: Mapping[str, float] = {"verify": 1.0}
    votes = False
    lines = False
    no_steps: Mapping[str, str] = {
        **Kind.no_steps,
        **dict.fromkeys(
            ("step", "progress"),
            "completions of a task have no lines that would be steps; remove it",
        ),
    }

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
        """Reward functions of one's own, beside those of the task."""
        parts = parts_of(self.config).given_by("function") if self.config.rewards else ()
        return {"own reward of a task": f"rewards.{parts[0]}"} if parts else {}

    def draws(self, method: Method) -> bool:
        """Always: a program makes the problems, with the solutions that a method reads."""
        return True

    def labels(self, method: Method) -> Labels:
        """Numbers for completions."""
        ids = {"answer": 2} if method.draw.samples else {}
        return _in_trees(method, Labels(ids, super().labels(method).stats))

    def problems(self, data: RunData, pool: int, split: str = "train") -> int:
        """As many as are asked for: they are made from keys."""
        return pool

    @property
    def tokenizer(self) -> Any:
        """The task's."""
        return self.task.tokenizer

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


class TaskPairKind(PairKind, TaskKind):
    """Judged completions of a procedural task, which gives tokenizer and lengths."""


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
        brought = super().features | {"device environment": self.named}
        if self.task.players == 1:
            return brought
        return brought | {"several groups": f"{self.named}, of {self.task.players} players,"}

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

    def check_searched(self) -> None:
        """Raises UserError: such episodes cannot be continued from their middle."""
        raise UserError(
            "--search: episodes in an environment on the device are not searched; leave it out"
        )

    def check_lengths(self, network: Network, width: int) -> None:
        """Raises UserError where an episode does not fit the network."""
        check_room(self.task, network)


class SourceKind(Kind):
    """Groups from a source of one's own."""

    eval_metrics = None
    known_metrics = False

    @property
    def features(self) -> dict[str, str]:
        """A source of one's own."""
        return super().features | {"own source": self.config.data.kind}

    def width(self, data: RunData) -> int:
        """P: the limit, since nobody knows yet what the source will ask."""
        return self.prompt_tokens

    def read(self, tokenizer: Any, method: Method, opened: Opened) -> RunData:
        """Nothing: the source has its own data."""
        return RunData({"train": [], "eval": []}, {}, {})

    def held_out(self, config: Config, data: RunData) -> HeldOut:
        """As many as the configuration says: the source is asked for the split "eval"."""
        return HeldOut(config.eval.problems, min(config.train.prompts, config.eval.problems))


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

    @property
    def new_tokens(self) -> int:
        """T, the task's."""
        return self._task.completion_tokens


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


def _in_trees(method: Method, labels: Labels) -> Labels:
    """The labels of completions, with those of the trees that they are leaves of."""
    ids, stats = dict(labels.ids), dict(labels.stats)
    if method.draw.search is not None:
        return Labels({"step": 3, "node": 3}, {"node_value": 3})
    return Labels(ids | ({"node": 3} if method.draw.tree is not None else {}), stats)


def rounded(length: int) -> int:
    """Tokens rounded up to 16."""
    return -(-length // 16) * 16
