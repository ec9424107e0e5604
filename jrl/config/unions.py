"""Configuration tables with several kinds: ``[data]``, ``[tree]`` and ``[optimizer]``.

Each kind of data is a table with its own keys, so that a key of another kind cannot be given. What
is given says which kind it is: ``data.task``, ``data.env``, ``data.pairs``, a recording or
dialogues in ``data.train``, or none. A tree says it in ``tree.kind``. An optimizer's own keys are
the arguments of the function that ``optimizer.name`` names.
"""

from __future__ import annotations

import re
import string
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator


def key(default: Any, text: str, **limits: Any) -> Any:
    """A field with its description and numeric limits."""
    if isinstance(default, dict | list):
        value = default
        return Field(default_factory=lambda: type(value)(value), description=text, **limits)
    return Field(default=default, description=text, **limits)


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, types are exact, values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


# ---------------------------------------------------------------- data

Weights = Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]
"""Sources of data with their parts."""


class FileTable(Table):
    """Keys of all data from files."""

    overlong: Literal["error", "drop", "truncate"] = key(
        "error", "what happens to a prompt above the limit; the counts are printed"
    )
    shuffle: bool = key(True, "visit the records in random order, a new one in each epoch")


class RowTable(FileTable):
    """Keys of data whose rows are records."""

    eval: str | None = key(None, "held-out prompts or judged completions, same forms")
    invalid: Literal["error", "skip"] = key(
        "error", "what happens to a row that cannot be used, such as one without an answer"
    )


class TextTable(FileTable):
    """Keys of all text data."""

    max_prompt_tokens: int = key(512, "longest prompt, tokens", ge=1)

    @property
    def wording(self) -> dict[str, Any]:
        """How a prompt is made: the arguments ``system``, ``template`` and ``variables``."""
        return {"system": None, "template": "plain", "variables": {}}


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
        """How a prompt is made: the arguments ``system``, ``template`` and ``variables``."""
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
        " or a table of several with their weights; or recorded:DIR, sessions that `jrl serve"
        " --record DIR` wrote; or dialogues:FILE, conversations in messages with rewards",
    )
    fields: dict[Literal["question", "answer", "solution"], str] = key(
        {},
        "names of a record's fields, where they are not question and answer; solution is the worked"
        " solution that methods with demonstrations learn, by default the whole answer",
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


class TaskData(Table):
    """A procedural task; further keys are its options."""

    model_config = ConfigDict(extra="allow")

    task: str = Field(
        description="procedural task by name, or a function of your own as FILE.py:function or"
        " module:function; its options, such as difficulty, are further keys of [data]"
    )

    @property
    def kind(self) -> str:
        """The key that names the task."""
        return "data.task"

    @property
    def name(self) -> str:
        """Of the task."""
        return self.task

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the task's function takes."""
        return dict(self.model_extra or {})


class EnvData(Table):
    """An environment; further keys are its options."""

    model_config = ConfigDict(extra="allow")

    env: str = Field(
        description="environment by name, or a function of your own as FILE.py:function or"
        " module:function; its options, such as turns, are further keys of [data]"
    )

    @property
    def kind(self) -> str:
        """The key that names the environment."""
        return "data.env"

    @property
    def name(self) -> str:
        """Of the environment."""
        return self.env

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
    def options(self) -> dict[str, Any]:
        """The keys that the environment's function takes."""
        return dict(self.model_extra or {})


class PairData(RowTable, ChatTable):
    """Judged completions from files."""

    pairs: str = Field(
        description="judged completions, same forms as data.train; a record holds chosen and"
        " rejected; prompt, completion and label; or prompt, responses and scores, each text or"
        " messages. With data.task they are texts of that task"
    )


class TaskPairs(RowTable, TaskData):
    """Judged completions of a procedural task, from files."""

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
    def place(self) -> str:
        """The directory of the recording, or the file of the dialogues."""
        return self.train.partition(":")[2]


class DialogueData(RecordedData):
    """Conversations from files, in which anybody spoke as the assistant; nothing is sampled."""

    train: str = Field(
        description="dialogues:FILE, any form of file that holds prompts; a row has messages, and"
        " reward (a number, for the whole) or rewards (one for each message of the assistant);"
        " what the assistant said is trained on"
    )
    invalid: Literal["error", "skip"] = key(
        "error", RowTable.model_fields["invalid"].description or ""
    )

    @property
    def kind(self) -> str:
        """The key that names the dialogues."""
        return DIALOGUES_KIND


RECORDED = "recorded:"
"""Prefix of a ``data.train`` with sessions recorded by a server."""
DIALOGUES = "dialogues:"
"""Prefix of a ``data.train`` with a file of conversations."""
RECORDED_KIND = "data.train = 'recorded:DIR'"
DIALOGUES_KIND = "data.train = 'dialogues:FILE'"
GIVEN_KINDS = (RECORDED_KIND, DIALOGUES_KIND)
"""Kinds of data that a value of ``data.train`` tells, and no key alone."""


def _data_kind(value: Any) -> str:
    """The tag of a dict by its keys, that of a table by its type."""
    train = value.get("train") if isinstance(value, dict) else getattr(value, "train", None)
    for prefix, kind in zip((RECORDED, DIALOGUES), GIVEN_KINDS, strict=True):
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
    | Annotated[EnvData, Tag("data.env")]
    | Annotated[EpisodeData, Tag("data.env and data.train")],
    Discriminator(_data_kind),
]


# ---------------------------------------------------------------- the tree of a group

TREE_KIND = (
    "branch: members leave one another at tokens, or behind answers of an environment; search: they"
    " are the leaves of a search; none: they are drawn apart; method: as the method has it"
)


class MethodTree(Table):
    """Members are drawn as the method says."""

    kind: Literal["method"] = key("method", TREE_KIND)


class NoTree(Table):
    """Members are drawn apart."""

    kind: Literal["none"] = key("none", TREE_KIND)


class BranchTree(Table):
    """Members branch off one another. A key left out is the method's, if its members branch."""

    kind: Literal["branch"] = key("branch", TREE_KIND)
    at: Literal["entropy", "gap", "surprise", "even"] | None = key(
        None, "which tokens are left; entropy unless the method says otherwise"
    )
    roots: int | None = key(None, "members drawn from the prompt; 0: half of the group", ge=0)
    rounds: int | None = key(
        None, "rounds in which members branch; of a search, in which nodes are expanded", ge=1
    )
    above: float | None = key(
        None,
        "what the number of a token must exceed, in nats for entropy and surprise, in probability"
        " for gap; not read with even",
        ge=0,
    )


class SearchTree(Table):
    """Members are leaves of a search. A key left out is the method's, if it searches."""

    kind: Literal["search"] = key("search", TREE_KIND)
    by: (
        Literal["uct", "puct", "frontier", "best_first", "beam", "greedy", "dvts", "best_of_n"]
        | None
    ) = key(None, "how nodes are chosen; puct unless the method says otherwise")
    rounds: int | None = key(None, BranchTree.model_fields["rounds"].description or "", ge=1)
    width: int | None = key(None, "steps drawn from a node", ge=1)
    tokens: int | None = key(
        None,
        "most tokens of a step of text, which ends with a line, too; not read in episodes",
        ge=1,
    )
    exploration: float | None = key(
        None, "how much uct and puct count that a node was seldom visited", ge=0
    )


def _tree_kind(value: Any) -> str | None:
    """The tag of a dict or of a table; None where a dict has no kind."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return None if kind is None else f"tree.kind = {kind!r}"


Tree = Annotated[
    Annotated[MethodTree, Tag("tree.kind = 'method'")]
    | Annotated[NoTree, Tag("tree.kind = 'none'")]
    | Annotated[BranchTree, Tag("tree.kind = 'branch'")]
    | Annotated[SearchTree, Tag("tree.kind = 'search'")],
    Discriminator(_tree_kind),
]


# ---------------------------------------------------------------- the optimizer


class Optimizer(Table):
    """The optimizer and its schedule; further keys are arguments of the optimizer's function."""

    model_config = ConfigDict(extra="allow")

    name: str = key(
        "adamw",
        "optimizer of optax by name, such as adamw, sgd, lion or adafactor, or a function of your"
        " own as FILE.py:function or module:function, called with the learning rate; its other"
        " arguments, such as b1, b2 or weight_decay (0 when not set), are further keys of"
        " [optimizer]",
    )
    learning_rate: float = key(1e-6, "learning rate at its peak", ge=0)
    schedule: Literal["constant", "cosine", "linear"] = key(
        "constant", "learning rate after the warm-up; cosine and linear fall to 0 at the last step"
    )
    warmup_steps: int = key(0, "training steps over which the learning rate rises from 0", ge=0)
    clip_norm: float = key(1.0, "largest global gradient norm; 0 does not clip", ge=0)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys: arguments of the optimizer's function."""
        return dict(self.model_extra or {})
