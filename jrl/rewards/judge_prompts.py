"""The questions to judges: templates, their fields, and what fills those. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.config.judge import PUBLISHED_FORMS, JudgeTable
from jrl.errors import UserError, nearest
from jrl.rewards.base import Sample
from jrl.user_code import load

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
COMMON_FIELDS = ("question", "reference", "principle")
"""Fields of every template, besides the columns of the data."""
_ONE = ("completion", "conversation")


class FormText(NamedTuple):
    """The question of a form.

    Attributes:
      template: where a part has none of its own.
      fields: of a template, besides those of all forms.
      shows: of each of these, a template of one's own must have one: what is judged.
    """

    template: str
    fields: tuple[str, ...] = _ONE
    shows: tuple[tuple[str, ...], ...] = (_ONE,)


TEXTS: Mapping[str, FormText] = {
    "score": FormText(
        """{principle}
Judge the answer to the question below.

Question:
{question}

Answer:
{completion}

Give a score from {low} (worst) to {high} (best). End with a line "Score: NUMBER".""",
        (*_ONE, "low", "high"),
    ),
    "yes_no": FormText(
        """{principle}
Question:
{question}

Answer:
{completion}

Is the answer good? Think first, then end with a line "Verdict: yes" or "Verdict: no"."""
    ),
    "rubric": FormText(
        """{principle}
Judge the answer to the question by each of the criteria below.

Question:
{question}

Answer:
{completion}

Criteria:
{criteria}

End with a JSON object of the criteria's numbers, each true where it is met, else false,
such as {"1": true, "2": false}.""",
        (*_ONE, "criteria"),
    ),
    "pairwise": FormText(
        """{principle}
Which of two answers to the question is better?

Question:
{question}
{criteria}
Answer A:
{first}

Answer B:
{second}

Neither order nor length counts. End with [[A]], [[B]], or [[C]] for a tie.""",
        ("first", "second", "criteria"),
        (("first",), ("second",)),
    ),
    "listwise": FormText(
        """{principle}
Rank {count} answers to the question.

Question:
{question}

{completions}

End with a JSON object that lists their numbers, the best first, such as {"ranking": [2, 1]}.""",
        ("completions", "count"),
        (("completions",),),
    ),
    "steps": FormText(
        """{principle}
Check each step of the answer for itself: whether it follows, and is right.

Question:
{question}

Answer, in numbered steps:
{steps}

Criticise the steps one by one. End with a JSON object of the numbers of those that are wrong, such
as {"wrong": [2]}; the list is empty where all are right.""",
        (*_ONE, "steps"),
        (("steps", *_ONE),),
    ),
}
"""The question of each form."""


def text_of(form: str) -> FormText:
    """The question of a form by name."""
    if form in TEXTS:
        return TEXTS[form]
    named: Any = load(PUBLISHED_FORMS.get(form, form), "form")
    # A function of one's own that asks in its own words has no text.
    text: FormText = getattr(named, "text", FormText("", shows=()))
    return text


def asks_with_reference(options: Mapping[str, Any]) -> bool:
    """Whether a judge reads the row's answer, by the keys of its part.

    In its question, or to compare what it replies; a form of one's own may do either.
    """
    form = str(options.get("form", "score"))
    if form == "pairwise" and options.get("against", "reference") == "reference":
        return True
    if ":" in form:
        return True
    try:
        published: Any = load(PUBLISHED_FORMS[form], "form") if form in PUBLISHED_FORMS else None
        if published is not None and published.reads_answer:
            return True
        template = options.get("template") or text_of(form).template
    except UserError:  # whoever asks names the mistake
        return False
    return "{reference}" in f"{options.get('system', '')}{template}"


def check_template(table: JudgeTable, columns: Iterable[str], key: str) -> None:
    """Raises UserError for a field of a template that nothing fills, or one without an answer.

    Args:
      table: the judge's keys.
      columns: of the data.
      key: "rewards.NAME", for messages.
    """
    form = text_of(table.form)
    fields = [*dict.fromkeys([*COMMON_FIELDS, *form.fields, *columns])]
    for place, text in (("template", table.template), ("system", table.system)):
        if field := unknown_field([text], fields):
            raise UserError(
                f"{key}.{place} has {{{field}}}, which is no field of form ="
                f" {table.form!r} and no column of the data; {nearest(field, fields)}"
            )
    used = _FIELD.findall(table.template)
    absent = [names for names in form.shows if not any(name in used for name in names)]
    if table.template and absent:
        shown = " or ".join(f"{{{name}}}" for name in absent[0])
        raise UserError(f"{key}.template does not show what is judged; write {shown} into it")


def messages_of(
    table: JudgeTable, sample: Sample, fields: Mapping[str, str], template: str = ""
) -> tuple[Mapping[str, str], ...]:
    """The question to a judge, as messages.

    Args:
      table: the judge's keys.
      sample: whose prompt fills the fields of all forms.
      fields: those of the form, by name.
      template: in place of the form's.
    """
    values = {**fields_of(sample, table.principle), **fields}
    question = filled(template or table.template or text_of(table.form).template, values)
    user = {"role": "user", "content": question.strip()}
    if not table.system:
        return (user,)
    return {"role": "system", "content": filled(table.system, values).strip()}, user


def fields_of(sample: Sample, principle: str) -> dict[str, Any]:
    """The fields of all templates: every column of the row, its question, answer and principle.

    Args:
      sample: what is judged.
      principle: of the part; "" for the row's own, if it has such a column.
    """
    prompt = sample.prompt
    return {
        **prompt.meta,
        "question": question_of(sample),
        "reference": "" if prompt.answer is None else str(prompt.answer),
        "principle": principle or prompt.meta.get("principle", ""),
    }


def pieces(template: str, values: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The text of a filled template in order: (text, whether it fills a field)."""
    end = 0
    for field in _FIELD.finditer(template):
        yield template[end : field.start()], False
        yield str(values.get(field[1], "")), True
        end = field.end()
    yield template[end:], False


def filled(template: str, values: Mapping[str, Any]) -> str:
    """A template with its fields; braces in what fills them stay.

    >>> filled("{who} says {what}{nothing}", {"who": "{what}", "what": "yes"})
    '{what} says yes'
    """
    return "".join(text for text, _ in pieces(template, values))


def unknown_field(texts: Iterable[str], allowed: Sequence[str]) -> str | None:
    """The first {field} of templates that is none of the known ones."""
    fields = (field for text in texts for field in _FIELD.findall(text))
    return next((field for field in fields if field not in allowed), None)


def question_of(sample: Sample) -> str:
    """The user's last message of a sample, the row's question, or the whole prompt."""
    questions = [m["content"] for m in sample.prompt.messages if m["role"] == "user"]
    return (
        str(questions[-1])
        if questions
        else getattr(sample.prompt, "question", "") or sample.prompt.text
    )


def shown(sample: Sample) -> dict[str, str]:
    """The fields of forms that judge one sample."""
    opening = sample.prompt.messages or ({"role": "user", "content": question_of(sample)},)
    after = sample.messages or ({"role": "assistant", "content": sample.completion},)
    return {"completion": sample.completion, "conversation": _spoken([*opening, *after])}


def answer_of(sample: Sample) -> str:
    """The text that is compared: a completion, or an episode's conversation."""
    return _spoken(sample.messages) if sample.messages else sample.completion


def _spoken(messages: Iterable[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
