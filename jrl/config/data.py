"""``[data]``: a table with its own keys for each kind of data.

A key of another kind cannot be given. What is given says which kind it is: ``data.task``,
``data.env``, ``data.pairs``, a recording or dialogues in ``data.train``, or none.
"""

from __future__ import annotations

import re
import string
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from jrl.config.base import Table, key

_PROMPT_TOKENS = 512


class DataTable(Table):
    """Properties of every kind of data, so that no reader has to ask for the kind."""

    @property
    def completions_key(self) -> str | None:
        """The key that holds the completions; None where the policy draws them."""
        return None

    @property
    def scored(self) -> bool:
        """Whether the data hold the scores of their completions."""
        return False

    @property
    def name(self) -> str:
        """Name of the procedural task or the environment on the device; "" for none."""
        return ""

    @property
    def kind(self) -> str:
        """The keys that say which data these are."""
        return "data.train"

    @property
    def own_limit(self) -> str:
        """The key and value that set the longest completion; "" for ``sampling.max_new_tokens``."""
        return ""

    @property
    def has_solutions(self) -> bool:
        """Whether the data have solutions for a warm start, and a tokenizer."""
        return False

    @property
    def plays(self) -> bool:
        """Whether an environment on the host answers completions."""
        return False

    @property
    def branches(self) -> str:
        """The reason that members of a group cannot branch; "" if they can."""
        return f"{self.completions_key} holds the completions, and none is drawn; remove it" * bool(
            self.completions_key
        )

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
    def default_rewards(self) -> dict[str, float]:
        """Reward part -> weight where a run names none."""
        return {"math": 1.0}

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Valid reward parts besides functions of the user; () for any."""
        return ()

    @property
    def own_rewards(self) -> bool:
        """Whether functions of the user may be reward parts."""
        return True

    @property
    def judged_on_host(self) -> bool:
        """Whether reward functions on the host judge completions."""
        return True


EPISODE_REWARDS = {"reward": 1.0, "success": 0.0}
"""Default weights of an episode's reward parts: the environment's reward, and 1 for success."""

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


class TaskData(DataTable):
    """A procedural task; further keys are its options."""

    model_config = ConfigDict(extra="allow")

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
    def kind(self) -> str:
        """The keys that say which data these are."""
        return "data.task"

    @property
    def has_solutions(self) -> bool:
        """A task knows a right completion of each problem."""
        return True

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the task's function takes."""
        return self.options

    @property
    def default_rewards(self) -> dict[str, float]:
        """Reward part -> weight where a run names none."""
        return {"verify": 1.0}

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The reward parts of the task, and a reward model."""
        return ("verify", "partial", "model")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the task's function takes."""
        return dict(self.model_extra or {})


class EnvData(DataTable):
    """An environment; further keys are its options."""

    model_config = ConfigDict(extra="allow")

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
    def kind(self) -> str:
        """The keys that say which data these are."""
        return "data.env"

    @property
    def has_solutions(self) -> bool:
        """An environment may play its episodes itself."""
        return True

    @property
    def branches(self) -> str:
        """The reason that members of a group cannot branch."""
        return (
            "completions and episodes on the host branch, those in an environment on the device do"
            " not; use a task, data.train, or data.env = FILE.py:function"
        )

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the environment's function takes."""
        return self.options

    @property
    def default_rewards(self) -> dict[str, float]:
        """Reward part -> weight where a run names none."""
        return dict(EPISODE_REWARDS)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The environment's reward, and success."""
        return tuple(EPISODE_REWARDS)

    @property
    def own_rewards(self) -> bool:
        """The environment pays."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the environment's function takes."""
        return dict(self.model_extra or {})


class EpisodeData(QuestionTable):
    """Questions that each open episodes with a host environment, which writes the messages.

    Further keys are options of the environment.
    """

    model_config = ConfigDict(extra="allow")

    env: str = EnvData.model_fields["env"]  # type: ignore[assignment]

    @property
    def plays(self) -> bool:
        """An environment on the host answers."""
        return True

    @property
    def default_rewards(self) -> dict[str, float]:
        """Reward part -> weight where a run names none."""
        return dict(EPISODE_REWARDS)

    @property
    def judged_on_host(self) -> bool:
        """The environment pays."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the environment's function takes."""
        return dict(self.model_extra or {})


class ScoredTable(DataTable):
    """Shared keys of data with scored completions."""

    @property
    def completions_key(self) -> str | None:
        """The key that holds the completions."""
        return "data.pairs"

    @property
    def scored(self) -> bool:
        """Each record has scores."""
        return True

    @property
    def own_limit(self) -> str:
        """Completions are as long as ``sampling.max_new_tokens`` or a task says."""
        return ""

    @property
    def default_rewards(self) -> dict[str, float]:
        """The one reward part: the scores of the records."""
        return {"score": 1.0}

    @property
    def judged_on_host(self) -> bool:
        """The records hold the scores."""
        return False


class SourceData(TextTable):
    """Groups from a source of one's own; further keys are its options."""

    model_config = ConfigDict(extra="allow")

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
    def kind(self) -> str:
        """The key that names the source."""
        return SOURCE_KIND

    @property
    def free_options(self) -> dict[str, Any]:
        """The keys that the function takes."""
        return dict(self.model_extra or {})

    @property
    def default_rewards(self) -> dict[str, float]:
        """The one reward part where a run names none."""
        return {"reward": 1.0}

    @property
    def judged_on_host(self) -> bool:
        """The source judges."""
        return False


class PairData(ScoredTable, RowTable, ChatTable):
    """Judged completions from files."""

    pairs: str = Field(
        description="judged completions, same forms as data.train; a record holds chosen and"
        " rejected; prompt, completion and label; or prompt, responses and scores, each text or"
        " messages. With data.task they are texts of that task"
    )


class TaskPairs(ScoredTable, RowTable, TaskData):
    """Judged completions of a procedural task, from files."""

    @property
    def kind(self) -> str:
        """The keys that say which data these are."""
        return "data.pairs and data.task"

    pairs: str = PairData.model_fields["pairs"]  # type: ignore[assignment]


class RecordedData(ChatTable):
    """Sessions of agents that a server recorded; nothing is sampled."""

    train: str = Field(
        description="recorded:DIR, which `jrl serve --record` wrote: what was drawn is trained on"
        " with its recorded log-probabilities; sessions that open with the same prompt are a group"
    )
    overlong: Literal["error", "drop"] = key(
        "error", FileTable.model_fields["overlong"].description or ""
    )

    @property
    def kind(self) -> str:
        """The key that names the episodes."""
        return RECORDED_KIND

    @property
    def completions_key(self) -> str | None:
        """The key that holds the completions."""
        return self.kind

    @property
    def default_rewards(self) -> dict[str, float]:
        """The one reward part: the points that an episode was given."""
        return {"reward": 1.0}

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The one reward part."""
        return ("reward",)

    @property
    def own_rewards(self) -> bool:
        """The points are recorded."""
        return False

    @property
    def judged_on_host(self) -> bool:
        """The points are recorded."""
        return False

    @property
    def has_logprobs(self) -> bool:
        """Whether a policy drew the completions, and its log-probabilities are there."""
        return True

    @property
    def place(self) -> str:
        """The directory of the recording, or the file of the dialogues."""
        return self.train.partition(":")[2]


class DialogueData(RecordedData):
    """Conversations from files, in which anybody spoke as the assistant; nothing is sampled."""

    train: str = Field(
        description="dialogues:FILE, any form of file that holds prompts; a row has messages, and"
        " reward (a number, for the whole) or rewards (one for each message of the assistant);"
        " the assistant's messages are trained on"
    )
    invalid: Literal["error", "skip"] = key(
        "error", RowTable.model_fields["invalid"].description or ""
    )

    @property
    def kind(self) -> str:
        """The key that names the dialogues."""
        return DIALOGUES_KIND

    @property
    def has_logprobs(self) -> bool:
        """Anybody spoke as the assistant."""
        return False


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
