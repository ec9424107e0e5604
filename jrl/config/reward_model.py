"""Keys of a reward part with a trained model: ``[rewards.NAME] function = "model"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jrl.config.base import Table, key

PUBLISHED_MODELS: Mapping[str, str] = {
    name: f"jrl.zoo.rewards.models:{name}"
    for name in ("fact_rlhf", "helpsteer2", "pav", "rlbff", "rlmt", "rluf", "upo")
}
"""Reward models of single papers: functions without arguments that return keys of
``RewardModelTable``, which a part's own keys override."""
MODEL_NAMES = ("model", *PUBLISHED_MODELS)
"""Values of a part's ``function`` that mean a reward model."""
_PASSES = ("dropout", "passes", "single_pass")
TOKEN_KEYS = frozenset({"path", "by", "link", "ensemble", "uncertainty", "labels", *_PASSES})
"""Keys of run directories' models, which read the policy's tokens."""
Ensemble = Literal["mean", "min", "deviation", "uwo"]


def _listed(value: object) -> object:
    """One path, as a list of one."""
    return (value,) if isinstance(value, str) else value


class RewardModelTable(Table):
    """A reward model: its path, its prompt, and how its outputs become a reward."""

    path: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_listed),
        Field(min_length=1, strict=False),
    ] = key(
        ...,
        "a run directory, a *ForSequenceClassification or *ForTokenClassification checkpoint, or,"
        " with answers, a language model's; a list is an ensemble of models of one shape",
    )
    template: str | list[dict[str, str]] = key(
        "",
        "input of the model, with {fields}: messages (tables with role and content) for the chat"
        " template, or a text; by default the prompt's messages and the completion",
    )
    principle: str = key("", "value of {principle}; by default the row's column of that name")
    variables: dict[str, Any] = key({}, "variables of the chat template, such as enable_thinking")
    after: str = key(
        "",
        'score only the text after this one, such as "</think>"; without it no opinion',
    )
    labels: dict[str, float] = key(
        {},
        "weights of a head's scores, by the names of its labels; for a run directory's model with"
        " several outputs by index, from 0 on, by default their mean",
    )
    answers: Annotated[list[str], Field(min_length=2, max_length=2)] | None = key(
        None,
        'two words of one token, such as ["Yes", "No"]: the score is log p(first) - log p(second)'
        " of a language model's next token",
    )
    column: str = key(
        "",
        "score the text in this column of the row in place of the completion, such as an answer of"
        " the initial policy (PAR); all members of a group have the same score",
    )
    by: Literal["completion", "turn", "step", "progress"] = key(
        "completion",
        "completion: the value at the last token; step: the value at each step's end, as that"
        " step's reward; progress: the change of the value over each step, at its end; turn: in"
        " episodes, a run directory's model's value at each turn's end; the part's reward is the"
        " sum. A step is a line or a turn; of text, a paragraph, read with what is before it",
    )
    link: Literal["identity", "sigmoid"] = key(
        "identity", "function of the score: sigmoid turns a logit into a probability"
    )
    ensemble: Ensemble = key(
        "mean",
        "reduction of an ensemble's scores: mean; min; deviation: mean - uncertainty times the"
        " standard deviation; uwo: mean - uncertainty times the variance",
    )
    uncertainty: float = key(1.0, "coefficient of an ensemble's spread", ge=0)
    dropout: float = key(
        0.0,
        "share of the head's inputs that each pass drops at random (Monte Carlo dropout); the"
        " passes are an ensemble",
        ge=0,
        lt=1,
    )
    passes: int = key(1, "passes with dropout", ge=1, le=1024)
    single_pass: int | None = key(
        None, "use only this pass, from 0 on; by default all, as an ensemble", ge=0
    )
    max_tokens: int = key(
        0, "longest text, tokens; longer ones get no opinion; 0: the model's length", ge=0
    )
    rows: int = key(16, "texts per forward pass", ge=1, le=4096)

    @property
    def reads_text(self) -> bool:
        """Whether a key is set that only models that read text have."""
        return bool(self.model_fields_set - TOKEN_KEYS)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if wrong := _wrong(self):
            raise ValueError(wrong)
        return self


def _wrong_passes(table: RewardModelTable) -> str:
    """Conflict between dropout and other keys, as ``_wrong``."""
    if not table.dropout:
        name = next((n for n in _PASSES[1:] if n in table.model_fields_set), "")
        return f"{name} = {getattr(table, name)} without dropout; set it to 0.1" if name else ""
    if len(table.path) > 1:
        return (
            f"dropout = {table.dropout} with {len(table.path)} paths; the passes of one model are"
            " an ensemble, so name one"
        )
    if table.answers is not None:
        return f"dropout = {table.dropout} with answers, which no head gives; remove one of them"
    if table.single_pass is not None and table.single_pass >= table.passes:
        return f"single_pass = {table.single_pass} of {table.passes} passes; count from 0 on"
    return ""


def _wrong(table: RewardModelTable) -> str:
    """Conflict between keys, as "KEY = VALUE: ..."; "" if there is none."""
    if wrong := _wrong_passes(table):
        return wrong
    one = len(table.path) == 1 and (table.passes == 1 or table.single_pass is not None)
    if one and (table.ensemble != "mean" or "uncertainty" in table.model_fields_set):
        name = "ensemble" if table.ensemble != "mean" else "uncertainty"
        return (
            f"{name} = {getattr(table, name)!r} with one path; give a list of models, or remove it"
        )
    if "uncertainty" in table.model_fields_set and table.ensemble in ("mean", "min"):
        return (
            f"uncertainty = {table.uncertainty} is not read with ensemble = {table.ensemble!r}; set"
            ' ensemble to "deviation" or "uwo"'
        )
    name = next((n for n in ("after", "column") if getattr(table, n)), "")
    if name and table.by in ("step", "progress"):  # each step is read with what is before it
        value = getattr(table, name)
        return f"{name} = {value!r} is not read with by = {table.by!r}; remove one of them"
    if table.answers is not None:
        if table.labels:
            return (
                "labels are those of a head, and answers are read without one; remove one of them"
            )
        if not table.template:
            return (
                "template is missing: with answers, write the question that the language model is"
                " to answer"
            )
        if table.answers[0] == table.answers[1]:
            return f"answers = {table.answers}; give two different words"
    if table.labels and not any(table.labels.values()):
        return f"labels = {table.labels}, of which none counts; set one other than 0"
    if isinstance(table.template, list):
        for i, message in enumerate(table.template):
            if set(message) != {"role", "content"}:
                return f"template[{i}] = {message}; write a message as {{role = .., content = ..}}"
    return ""
