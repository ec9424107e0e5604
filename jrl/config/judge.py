"""The keys of a reward part that a judge gives: ``[rewards.NAME] function = "judge"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from jrl.config.explain import explain
from jrl.config.unions import Table, key
from jrl.errors import UserError, nearest, unknown_choice

T = TypeVar("T", bound=Table)

FORMS = ("score", "yes_no", "rubric", "pairwise", "listwise", "steps")
"""What a judge can be asked, by name."""
_ZOO = "jrl.zoo.rewards.judges"
PUBLISHED_FORMS = {
    "brpo": f"{_ZOO}:brpo",
    "capo": f"{_ZOO}:capo",
    "datarus": "jrl.zoo.rewards.rubrics:datarus",
    "fapo": f"{_ZOO}:fapo",
    "pta_plan": "jrl.zoo.rewards.plans:pta_plan",
    "reward_anything": f"{_ZOO}:reward_anything",
    "rlaif_v": f"{_ZOO}:rlaif_v",
    "rubicon": "jrl.zoo.rewards.rubrics:rubicon",
}
"""Forms of one paper each, by name; each is a ``rewards.verdicts.NamedForm``."""
TOKEN_FORMS = ("steps", "capo")
"""Forms that give a number for each token, as functions with ``by_token = true`` do."""
RUBRIC_FORMS = ("rubric", "rubicon")
"""Forms that are asked about criteria; "pairwise" may be."""
POLICY, START = "policy", "start"
"""What ``model`` names on the run's devices besides directories."""
_ENDPOINT_KEYS = (
    *("key_variable", "fields", "timeout", "seconds", "retries", "requests_per_minute"),
)
"""Keys that a model on the run's devices does not read."""


class Criterion(Table):
    """One criterion of a rubric."""

    text: str = key(..., "what the judge decides on: met or not", min_length=1)
    weight: float = key(1.0, "of the criterion in the score; below 0 for what is not wanted")
    veto: bool = key(False, "whether the score is 0 where it is not met")
    levels: list[str] = key(
        [], "what each level means, the worst first, of which the judge names one; else met or not"
    )


class JudgeTable(Table):
    """A judge: a model behind an endpoint or on the run's own devices, and what it is asked."""

    url: str = key(
        "", "base of the API, such as http://localhost:8000/v1; empty: on the run's devices"
    )
    model: str = key(
        ...,
        'the model\'s name there; without url "policy", "start" (the checkpoint that the policy'
        " began with), or the directory of a checkpoint or a run",
        min_length=1,
    )
    key_variable: str = key("", "environment variable that holds the key of the API")
    form: str = key(
        "score",
        "what is asked: a number, yes or no, criteria, which of two is better, a ranking, wrong"
        " steps, a paper's form, or FILE.py:function of one's own, (keys, name) -> Form",
    )
    template: str = key("", "the question to the judge; {fields} are filled in")
    system: str = key("", "a system message before it")
    principle: str = key("", "what fills {principle}; else the row's column of that name")
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] = key(
        [1.0, 10.0], "least and greatest score, which become 0 and 1"
    )
    criteria: list[Criterion] = key(
        [], "of a rubric, or to compare by: tables with text, weight, veto and levels"
    )
    column: str = key("", "column of the data with the criteria of each row, in place of criteria")
    against: Literal["reference", "group"] = key(
        "reference", "what a completion is compared with: the row's answer, the group's others"
    )
    swap: bool = key(True, "whether both orders of a pair are asked; where they disagree, a tie")
    only: str = key("", "a part: only samples with points above 0 there are judged")
    votes: int = key(1, "how often each question is asked", ge=1, le=1024)
    vote: Literal["mean", "majority", "min"] = key("mean", "what is made of the votes")
    temperature: float = key(0.0, "of the judge's sampling", ge=0)
    max_tokens: int = key(512, "limit of a reply", ge=1)
    max_prompt_tokens: int = key(
        2048, "longest question to a model on the run's devices; longer ones have no verdict", ge=1
    )
    fields: dict[str, Any] = key({}, "further fields of each request, such as seed")
    at_once: int = key(16, "requests, or rows decoded, at the same time", ge=1, le=4096)
    timeout: float = key(60.0, "seconds for one request", gt=0)
    seconds: float = key(
        300.0, "for all verdicts of a step; what has none by then has no opinion", gt=0
    )
    retries: int = key(4, "after replies 429 and 5xx, timeouts, lost connections", ge=0, le=100)
    requests_per_minute: float = key(0.0, "limit of requests sent; 0 for none", ge=0)
    cache: str | bool = key(
        True, "directory of verdicts already given; true is judge/ of the run, false none"
    )

    @property
    def local(self) -> bool:
        """Whether the judge is a model on the run's devices."""
        return not self.url

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wrong = _wrong(self) or _unread(self)
        if wrong:
            raise ValueError(wrong)
        return self


def _wrong(judge: JudgeTable) -> str:
    """What does not go together, as "KEY = VALUE: ..."; "" for nothing."""
    low, high = judge.scale
    if ":" not in judge.form and judge.form not in (names := (*FORMS, *PUBLISHED_FORMS)):
        return str(unknown_choice("form", judge.form, names))
    if not low < high:
        return f"scale = {judge.scale}; give the least score, then the greatest"
    if judge.votes > 1 and judge.temperature == 0:
        return (
            f"votes = {judge.votes} with temperature = 0, where all votes are equal; set"
            " temperature above 0, or votes = 1"
        )
    if not (judge.criteria or judge.column):
        missing = "criteria are missing: give a list of them, or column, whose rows have them"
        return missing if judge.form in RUBRIC_FORMS else ""
    if judge.form not in (*RUBRIC_FORMS, "pairwise"):
        name = "criteria" if judge.criteria else "column"
        return f"{name} with form = {judge.form!r}; set form = 'rubric'"
    if judge.criteria and judge.column:
        return f"column = {judge.column!r} with criteria; remove one of them"
    return "" if judge.column else weightless(judge.criteria)


def _unread(judge: JudgeTable) -> str:
    """The first key that nobody reads where the judge is, as "KEY = VALUE: ..."; "" for none."""
    keys = _ENDPOINT_KEYS if judge.local else ("max_prompt_tokens",)
    name = next((name for name in keys if name in judge.model_fields_set), "")
    if name and judge.local:
        return (
            f"{name} = {getattr(judge, name)!r} without url: a model on the run's devices does not"
            " read it; remove it, or set url"
        )
    if name:
        return f"{name} with url: the server limits its prompts itself; remove it"
    if judge.local and judge.model == POLICY and "cache" in judge.model_fields_set and judge.cache:
        return (
            f"cache = {judge.cache!r} with model = 'policy', which is another judge after each"
            " step; remove it"
        )
    return ""


def weightless(criteria: list[Criterion]) -> str:
    """What is wrong with the weights of criteria, as "criteria ..."; "" for nothing."""
    if not criteria:
        return "criteria = []; give a rubric at least one"
    if sum(max(c.weight, 0.0) for c in criteria) <= 0:
        weights = [c.weight for c in criteria]
        return f"criteria have weights {weights}, of which none counts; set one above 0"
    if one := next((c for c in criteria if len(c.levels) == 1), None):
        return f"criterion {one.text!r:.40} has levels {one.levels}; give two, the worst first"
    return ""


def judge_table(key: str, options: Mapping[str, Any]) -> JudgeTable:
    """The checked keys of a judge.

    Args:
      key: "rewards.NAME", for messages.
      options: its keys besides those that every reward part has.

    Raises:
      UserError: a line for each mistake, which names the key.
    """
    return checked(JudgeTable, key, options)


def criteria_of(rows: Any, where: str) -> list[Criterion]:
    """The criteria that a row of the data holds: texts, or tables as in ``Criterion``.

    Args:
      rows: the row's value.
      where: names it, for messages.

    Raises:
      UserError: there are none, or they say nothing.
    """
    if not isinstance(rows, list | tuple):
        raise UserError(f"{where} is {rows!r:.60}; write a list of criteria")
    tables = [{"text": row} if isinstance(row, str) else row for row in rows]
    criteria = [checked(Criterion, f"{where}, criterion {i}", t) for i, t in enumerate(tables, 1)]
    if wrong := weightless(criteria):
        raise UserError(f"{where}: {wrong}")
    return criteria


def checked(table: type[T], key: str, values: Any) -> T:
    """A table of a reward part.

    Args:
      table: its class.
      key: "rewards.NAME", for messages.
      values: its keys.

    Raises:
      UserError: a line for each mistake, which names the key.
    """
    try:
        return table.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise UserError("\n".join(_line(table, key, each) for each in errors)) from None


def _line(table: type[Table], key: str, error: Any) -> str:
    """One mistake in a table that is not one of the configuration's own."""
    path, value = error["loc"], error["input"]
    name = ".".join([key, *map(str, path)])
    if error["type"] == "missing":
        field = table.model_fields.get(str(path[0]))
        text = (field and field.description) if len(path) == 1 else "give it"
        return f"{name} is missing: {text}"
    if error["type"] == "extra_forbidden":
        known = table.model_fields if len(path) == 1 else Criterion.model_fields
        return f"{name} = {value!r:.80}: no such key; {nearest(path[-1], known)}"
    if error["type"] == "value_error":
        return f"{key}.{error['ctx']['error']}"
    return explain({**error, "loc": (key, *map(str, path))})
