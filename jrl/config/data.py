"""``[data]``: a table with its own keys for each kind of data.

A key of another kind cannot be given. What is given says which kind it is: ``data.task``,
``data.env``, ``data.pairs``, a recording or dialogues in ``data.train``, or none.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from jrl.config.base import Table, key
from jrl.config.features import Features, present

_PROMPT_TOKENS = 512
EPISODE_REWARDS = {"reward": 1.0, "success": 0.0}
"""Default weights of an episode's reward parts: the environment's reward, and 1 for success."""
RECORDED = "recorded:"
"""Prefix of a ``data.train`` with sessions recorded by a server."""
DIALOGUES = "dialogues:"
"""Prefix of a ``data.train`` with a file of conversations."""
RECORDED_KIND = "data.train = 'recorded:DIR'"
DIALOGUES_KIND = "data.train = 'dialogues:FILE'"
SOURCE = "source:"
"""Prefix of a ``data.train`` with a custom source."""
SOURCE_KIND = "data.train = 'source:FILE.py:function'"
GIVEN_KINDS = (RECORDED_KIND, DIALOGUES_KIND, SOURCE_KIND)
"""Kinds of data that a value of ``data.train`` tells, and no key alone."""


class DataTable(Table):
    """Properties of every kind of data, so that no reader has to ask for the kind."""

    completions_key: ClassVar[str | None] = None
    """The key that holds the completions; None where the policy draws them."""
    kind: ClassVar[str] = "data.train"
    """The keys that say which data these are."""
    has_solutions: ClassVar[bool] = False
    """Whether the data have solutions for a warm start, and a tokenizer."""
    default_rewards: ClassVar[Mapping[str, float]] = {"math": 1.0}
    """Reward part -> weight where a run names none."""
    reward_names: ClassVar[tuple[str, ...]] = ()
    """Valid reward parts besides functions of the user; () for any."""
    own_rewards: ClassVar[bool] = True
    """Whether functions of the user may be reward parts."""
    judged_on_host: ClassVar[bool] = True
    """Whether reward functions on the host judge completions."""

    def giver(self, part: str, function: str, *, known: bool) -> Literal["data", "function"] | None:
        """What gives a reward part its points; None where nothing does.

        Args:
          part: its name.
          function: the name of its function.
          known: whether that is one of the user's or of the library's.
        """
        by_function = self.own_rewards and known
        if not self.reward_names:
            return "function" if by_function or self.judged_on_host else "data"
        if function not in self.reward_names and not by_function:
            return None
        return "function" if by_function and part not in self.reward_names else "data"

    @property
    def name(self) -> str:
        """Name of the procedural task or the environment on the device; "" for none."""
        return ""

    @property
    def own_limit(self) -> str:
        """The key and value that set the longest completion; "" for ``sampling.max_new_tokens``."""
        return ""

    def needs_answer(self, read: Callable[[], bool]) -> bool:
        """Whether rows must have an answer; ``read`` says whether a reward part reads it."""
        return True

    @property
    def plain_files(self) -> dict[str, Any]:
        """Split -> file whose rows must all become prompts; {} where some may not."""
        return {}

    @property
    def longest_prompt(self) -> int:
        """The longest prompt in text, tokens; a procedural task has its own."""
        return _PROMPT_TOKENS

    @property
    def wording(self) -> dict[str, Any]:
        """Keys that form a prompt: the arguments ``system``, ``template`` and ``variables``."""
        return {"system": None, "template": "plain", "variables": {}}

    @property
    def free_options(self) -> dict[str, Any]:
        """Options of a user's function, of any name."""
        return {}

    def order_seed(self, seed: int) -> int | None:
        """Seed of the order of records; None keeps the order of the file."""
        return None

    @property
    def features(self) -> Features:
        """What these data bring to a run, as in ``features.TABLE``, with its words for messages."""
        files = sorted(self.model_fields_set & {"train", "pairs"})
        return present(
            {
                "records": (not self.name, "data.train"),
                "task": (self.name, f"{self.kind} = {self.name!r}"),
                "files": (files, "".join(f"data.{name}" for name in files[:1])),
                "own limit": (self.own_limit, self.own_limit),
                "given completions": (self.completions_key, self.completions_key or ""),
                "solutions": (self.has_solutions or not files, self.kind),
            }
        )


Weights = Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]
"""Sources of data with their parts."""


class FileTable(DataTable):
    """Keys of all data from files."""

    overlong: Literal["error", "drop", "truncate"] = key(
        "error", "what happens to a prompt above the limit; the counts are printed"
    )
    shuffle: bool = key(True, "visit the records in random order, a new one in each epoch")

    def order_seed(self, seed: int) -> int | None:
        """Seed of the order of records; None keeps the order of the file."""
        return seed if self.shuffle else None


class RowTable(FileTable):
    """Keys of data whose rows are records."""

    eval: str | None = key(None, "held-out prompts or judged completions, same forms")
    invalid: Literal["error", "skip"] = key(
        "error", "what happens to a row that cannot be used, such as one without an answer"
    )


class TextTable(FileTable):
    """Keys of all text data."""

    max_prompt_tokens: int = key(_PROMPT_TOKENS, "longest prompt, tokens", ge=1)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt, tokens."""
        return self.max_prompt_tokens


class ChatTable(TextTable):
    """Arguments for encoding a record as a prompt."""

    system: str | None = key(None, "system message before the question")
    template: str = key(
        "chat",
        "chat: the tokenizer's chat template; plain: the question as it is; or text with"
        " {question} in it",
    )
    template_variables: dict[str, Any] = key(
        {}, "further variables of the chat template, such as {enable_thinking = false}"
    )

    @property
    def wording(self) -> dict[str, Any]:
        """Keys that form a prompt: the arguments ``system``, ``template`` and ``variables``."""
        return {
            "system": self.system,
            "template": self.template,
            "variables": self.template_variables,
        }

    @field_validator("template")
    @classmethod
    def _template(cls, value: str) -> str:
        if value in ("chat", "plain"):
            return value
        try:
            parsed = [part for part in string.Formatter().parse(value) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"no format string ({error}); write a brace as {{{{") from error
        # With neither a conversion nor a format: "{question:>9999999999}" is a text of 10 GB.
        if parsed and {part[1:] for part in parsed} == {("question", "", None)}:
            return value
        raise ValueError("must be chat, plain, or text with {question} and no other braces")


class QuestionTable(RowTable, TextTable):
    """Questions from files, with their answers."""

    train: str | Weights | None = key(
        None,
        "training prompts: FILE.jsonl, .parquet, .csv or .json, files as DIR/*.jsonl,"
        " tfds:NAME/SPLIT, or a data set of the Hugging Face Hub as ORG/NAME[/CONFIG][:SPLIT];"
        " or a table of several with their weights; or episodes:N, N problems that the environment"
        " makes itself; or recorded:DIR, sessions recorded by `jrl serve --record DIR`; or"
        " dialogues:FILE, conversations as messages with rewards",
    )
    fields: dict[Literal["question", "answer", "solution"], str] = key(
        {},
        "names of a record's fields, if they are not question and answer; solution is the worked"
        " solution that methods with demonstrations imitate, by default the whole answer",
    )
    answer_pattern: str | None = key(
        None, "regular expression whose first group is the final answer inside the answer field"
    )

    @field_validator("answer_pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        try:
            groups = re.compile(value).groups if value is not None else 1
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if groups < 1:
            raise ValueError("needs a group in parentheses around the answer")
        return value


class PromptData(ChatTable, QuestionTable):
    """Prompts from files."""

    def needs_answer(self, read: Callable[[], bool]) -> bool:
        """Where a reward part reads it, or a key names the field, or a pattern in it."""
        return "answer" in self.fields or self.answer_pattern is not None or read()

    @property
    def plain_files(self) -> dict[str, Any]:
        """Both splits, unless rows are skipped."""
        return {"train": self.train, "eval": self.eval} if self.invalid == "error" else {}

    @property
    def features(self) -> Features:
        """Text."""
        return super().features | {"text": "data.train"}


class OptionTable(DataTable):
    """Data whose further keys are options of a function."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the function takes."""
        return dict(self.model_extra or {})


class TaskData(OptionTable):
    """A procedural task; further keys are its options."""

    kind: ClassVar[str] = "data.task"
    has_solutions: ClassVar[bool] = True
    default_rewards: ClassVar[Mapping[str, float]] = {"verify": 1.0}
    reward_names: ClassVar[tuple[str, ...]] = ("verify", "partial", "model")

    task: str = Field(
        description="procedural task by name, or a function of your own as FILE.py:function or"
        " module:function; its options, such as difficulty, are further keys of [data]"
    )

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task

    @property
    def own_limit(self) -> str:
        """The key and value that set the longest completion."""
        return f"data.task = {self.task!r}"

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the task's function takes."""
        return self.options


class EnvData(OptionTable):
    """An environment; further keys are its options."""

    kind: ClassVar[str] = "data.env"
    has_solutions: ClassVar[bool] = True
    default_rewards: ClassVar[Mapping[str, float]] = EPISODE_REWARDS
    reward_names: ClassVar[tuple[str, ...]] = tuple(EPISODE_REWARDS)
    own_rewards: ClassVar[bool] = False

    env: str = Field(
        description="environment by name, or a function of your own as FILE.py:function or"
        " module:function; its options, such as turns, are further keys of [data]"
    )

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.env

    @property
    def own_limit(self) -> str:
        """The key and value that set the longest completion."""
        return f"data.env = {self.env!r}"

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the environment's function takes."""
        return self.options

    @property
    def features(self) -> Features:
        """The environment, and the task that it is."""
        return super().features | {"device environment": f"{self.kind} = {self.name!r}"}


class EpisodeData(QuestionTable, OptionTable):
    """Questions that each open episodes with a host environment, which writes the messages.

    Further keys are options of the environment.
    """

    default_rewards: ClassVar[Mapping[str, float]] = EPISODE_REWARDS
    judged_on_host: ClassVar[bool] = False

    env: str = EnvData.model_fields["env"]  # type: ignore[assignment]

    @property
    def features(self) -> Features:
        """Episodes."""
        return super().features | {"episodes": "data.env with data.train"}


class ScoredTable(DataTable):
    """Shared keys of data with scored completions."""

    completions_key: ClassVar[str | None] = "data.pairs"
    default_rewards: ClassVar[Mapping[str, float]] = {"score": 1.0}
    reward_names: ClassVar[tuple[str, ...]] = ("score",)
    judged_on_host: ClassVar[bool] = False

    @property
    def own_limit(self) -> str:
        """Completions are as long as ``sampling.max_new_tokens`` or a task says."""
        return ""

    @property
    def features(self) -> Features:
        """Pairs."""
        return super().features | {"pairs": "data.pairs"}


class SourceData(TextTable, OptionTable):
    """Groups from a source of one's own; further keys are its options."""

    kind: ClassVar[str] = SOURCE_KIND
    default_rewards: ClassVar[Mapping[str, float]] = {"reward": 1.0}
    judged_on_host: ClassVar[bool] = False

    train: str = Field(
        description="source:FILE.py:function or source:module:function, which is called with"
        " sampler, tokenizer and the further keys of [data], and returns a"
        " jrl.train.Source"
    )

    @property
    def place(self) -> str:
        """The function, as FILE.py:function or module:function."""
        return self.train.partition(":")[2]

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the function takes."""
        return self.options

    @property
    def features(self) -> Features:
        """A source of one's own."""
        return super().features | {"own source": self.kind}


class PairData(ScoredTable, RowTable, ChatTable):
    """Judged completions from files."""

    pairs: str = Field(
        description="judged completions, same forms as data.train; a record holds chosen and"
        " rejected; prompt, completion and label; or prompt, responses and scores, each text or"
        " messages. With data.task they are texts of that task"
    )


class TaskPairs(ScoredTable, RowTable, TaskData):
    """Judged completions of a procedural task, from files."""

    kind: ClassVar[str] = "data.pairs and data.task"

    pairs: str = PairData.model_fields["pairs"]  # type: ignore[assignment]


class RecordedData(ChatTable):
    """Sessions of agents that a server recorded; nothing is sampled."""

    kind: ClassVar[str] = RECORDED_KIND
    completions_key: ClassVar[str | None] = RECORDED_KIND
    default_rewards: ClassVar[Mapping[str, float]] = {"reward": 1.0}
    reward_names: ClassVar[tuple[str, ...]] = ("reward",)
    own_rewards: ClassVar[bool] = False
    judged_on_host: ClassVar[bool] = False

    train: str = Field(
        description="recorded:DIR, which `jrl serve --record` wrote: what was drawn is trained on"
        " with its recorded log-probabilities; sessions that open with the same prompt are a group"
    )
    overlong: Literal["error", "drop"] = key(
        "error", FileTable.model_fields["overlong"].description or ""
    )

    @property
    def place(self) -> str:
        """The directory of the recording, or the file of the dialogues."""
        return self.train.partition(":")[2]

    @property
    def features(self) -> Features:
        """Completions in rows of several turns."""
        return super().features | {"recorded": self.kind}


class DialogueData(RecordedData):
    """Conversations from files, in which anybody spoke as the assistant; nothing is sampled."""

    kind: ClassVar[str] = DIALOGUES_KIND
    completions_key: ClassVar[str | None] = DIALOGUES_KIND

    train: str = Field(
        description="dialogues:FILE, any form of file that holds prompts; a row has messages, and"
        " reward (a number, for the whole) or rewards (one for each message of the assistant);"
        " the assistant's messages are trained on"
    )
    invalid: Literal["error", "skip"] = key(
        "error", RowTable.model_fields["invalid"].description or ""
    )

    @property
    def features(self) -> Features:
        """Completions without the log-probabilities of who sampled them."""
        return super().features | {"dialogues": self.kind}


def _data_kind(value: Any) -> str:
    """The tag of a dict by its keys, that of a table by its type."""
    train = value.get("train") if isinstance(value, dict) else getattr(value, "train", None)
    for prefix, kind in zip((RECORDED, DIALOGUES, SOURCE), GIVEN_KINDS, strict=True):
        if isinstance(train, str) and train.startswith(prefix):
            return kind
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", {})
    if kinds := [f"data.{name}" for name in ("pairs", "task") if name in keys]:
        return " and ".join(kinds)
    return " and ".join(f"data.{n}" for n in ("env", "train") if n in keys) or "data.train"


Data = Annotated[
    Annotated[PromptData, Tag("data.train")]
    | Annotated[TaskData, Tag("data.task")]
    | Annotated[PairData, Tag("data.pairs")]
    | Annotated[TaskPairs, Tag("data.pairs and data.task")]
    | Annotated[RecordedData, Tag(RECORDED_KIND)]
    | Annotated[DialogueData, Tag(DIALOGUES_KIND)]
    | Annotated[SourceData, Tag(SOURCE_KIND)]
    | Annotated[EnvData, Tag("data.env")]
    | Annotated[EpisodeData, Tag("data.env and data.train")],
    Discriminator(_data_kind),
]
