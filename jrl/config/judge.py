"""Keys of a reward part with a judge: ``[rewards.NAME] function = "judge"``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from jrl.config.base import Table, key
from jrl.config.explain import explain
from jrl.errors import UserError, nearest, unknown_choice

T = TypeVar("T", bound=Table)

FORMS = ("score", "yes_no", "rubric", "pairwise", "listwise", "steps")
"""Forms of questions to a judge, by name."""
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
"""Forms of single papers, by name; each is a ``rewards.verdicts.NamedForm``."""
TOKEN_FORMS = ("steps", "capo")
"""Forms with a reward per token, as functions with ``by_token = true``."""
RUBRIC_FORMS = ("rubric", "rubicon")
"""Forms that need criteria; "pairwise" may have them."""
POLICY, START = "policy", "start"
"""Values of ``model`` on the run's devices that are not directories."""
_ENDPOINT_KEYS = (
    *("key_variable", "fields", "timeout", "seconds", "retries", "requests_per_minute"),
)
"""Keys that a model on the run's devices does not read."""


class Criterion(Table):
    """One criterion of a rubric."""

    text: str = key(..., "the criterion in words; the judge says whether it is met", min_length=1)
    weight: float = key(1.0, "weight in the score; negative for unwanted properties")
    veto: bool = key(False, "true: the score is 0 unless the criterion is met")
    levels: list[str] = key(
        [], "meaning of each level, the worst first; the judge names one; empty: met or not"
    )


class JudgeTable(Table):
    """A judge, behind an endpoint or on the run's own devices, and its questions."""

    url: str = key(
        "", "base URL of the API, such as http://localhost:8000/v1; empty: on the run's devices"
    )
    model: str = key(
        ...,
        'the model\'s name at the API; without url "policy", "start" (the initial policy), or the'
        " directory of a checkpoint or a run",
        min_length=1,
    )
    key_variable: str = key("", "environment variable with the API key")
    form: str = key(
        "score",
        "form of the question: score, yes_no, rubric, pairwise, listwise, steps, a paper's form,"
        " or your own as FILE.py:function, (keys, name) -> Form",
    )
    template: str = key("", "question to the judge, with {fields}; by default that of the form")
    system: str = key("", "system message before the question")
    principle: str = key("", "value of {principle}; by default the row's column of that name")
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] = key(
        [1.0, 10.0], "lowest and highest score, mapped to 0 and 1"
    )
    criteria: list[Criterion] = key(
        [], "criteria of a rubric or a comparison: tables with text, weight, veto and levels"
    )
    column: str = key("", "column of the data with each row's criteria, instead of criteria")
    against: Literal["reference", "group"] = key(
        "reference", "compare with the row's answer (reference) or the group's other members"
    )
    swap: bool = key(True, "ask about a pair in both orders; a tie if the verdicts disagree")
    only: str = key("", "a part: judge only samples whose reward there is above 0")
    votes: int = key(1, "times that each question is asked", ge=1, le=1024)
    vote: Literal["mean", "majority", "min"] = key("mean", "how votes are combined")
    temperature: float = key(0.0, "temperature of the judge", ge=0)
    max_tokens: int = key(512, "longest reply, tokens", ge=1)
    max_prompt_tokens: int = key(
        2048, "longest question on the run's devices, tokens; longer ones get no verdict", ge=1
    )
    fields: dict[str, Any] = key({}, "further fields of requests, such as seed")
    at_once: int = key(16, "concurrent requests, or rows decoded concurrently", ge=1, le=4096)
    timeout: float = key(60.0, "limit of one request, seconds", gt=0)
    seconds: float = key(
        300.0, "limit for all verdicts of a step, seconds; later ones count as no opinion", gt=0
    )
    retries: int = key(
        4, "retries after status 429 and 5xx, timeouts and lost connections", ge=0, le=100
    )
    requests_per_minute: float = key(0.0, "rate limit; 0: none", ge=0)
    cache: str | bool = key(
        True, "directory of cached verdicts; true: judge/ of the run; false: no cache"
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
    """A conflict between keys, as "KEY = VALUE: ..."; "" if there is none."""
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
    """The first key that has no effect for this judge, as "KEY = VALUE: ..."; "" if none."""
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
    """A mistake in the weights of criteria, as "criteria ..."; "" if there is none."""
    if not criteria:
        return "criteria = []; give a rubric at least one"
    if sum(max(c.weight, 0.0) for c in criteria) <= 0:
        weights = [c.weight for c in criteria]
        return f"criteria have weights {weights}, of which none counts; set one above 0"
    if one := next((c for c in criteria if len(c.levels) == 1), None):
        return f"criterion {one.text!r:.40} has levels {one.levels}; give two, the worst first"
    return ""


def criteria_of(rows: Any, where: str) -> list[Criterion]:
    """The criteria of a row of the data: texts, or tables as in ``Criterion``.

    Args:
      rows: the row's value.
      where: names it, for messages.

    Raises:
      UserError: there are none, or no weight is above 0.
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
        fields = table.model_fields if len(path) == 1 else Criterion.model_fields
        return f"{name} = {value!r:.80}: no such key; {nearest(path[-1], fields)}"
    if error["type"] == "value_error":
        return f"{key}.{error['ctx']['error']}"
    return explain({**error, "loc": (key, *map(str, path))})
