"""Questions to judges about samples, and rewards from their verdicts. Imports no JAX.

    form = make_form(table, "rewards.helpful")      # of a [rewards.NAME] with function = "judge"
    questions = form.questions(samples, vote=0)     # each with messages and a reader of the reply
    points = form.points(samples, verdicts)         # [None | 0 ... 1] for each sample

Forms: a score, yes or no, a rubric of criteria with weights, vetoes and levels, a comparison with
the reference answer or with each other member of the group (both orders asked; where they disagree
it is a tie), by criteria where there are any, and a ranking of the group. Rubrics are as in Rubicon
(arXiv:2508.12790), comparisons by them as in OpenRubrics (arXiv:2510.07743), and rankings by a
principle as in RewardAnything (arXiv:2506.03637).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jrl.config.judge import PUBLISHED_FORMS, Criterion, JudgeTable, criteria_of
from jrl.errors import UserError
from jrl.rewards.base import Points, Returned, Sample
from jrl.rewards.judge_prompts import FormText, answer_of, messages_of, shown
from jrl.rewards.replies import (
    read_criteria,
    read_preference,
    read_ranking,
    read_score,
    read_steps,
    read_yes_no,
)
from jrl.rewards.steps import numbered_steps, steps_of
from jrl.user_code import load


class Question(NamedTuple):
    """One request to a judge.

    Attributes:
      messages: with role and content.
      read: (reply) -> the verdict; None where the reply holds none.
    """

    messages: tuple[Mapping[str, str], ...]
    read: Callable[[str], Any]


class Form(NamedTuple):
    """Form of a judge's questions about a unit of samples.

    Attributes:
      by_group: whether a unit is the members of a group; else one sample.
      questions: (samples, vote) -> what to ask, as many for each vote.
      points: (samples, for each question its readable verdicts) -> points or None.
      follow: (samples, the verdicts so far, vote) -> what to ask then, as many for each vote; the
        verdicts of that stand behind those of the first questions. None for one round.
    """

    by_group: bool
    questions: Callable[[Sequence[Sample], int], list[Question]]
    points: Callable[[Sequence[Sample], Sequence[Sequence[Any]]], Sequence[Returned]]
    follow: Callable[[Sequence[Sample], Sequence[Sequence[Any]], int], list[Question]] | None = None


class NamedForm(NamedTuple):
    """A form that ``form`` names.

    Attributes:
      make: (the judge's keys, "rewards.NAME") -> the form.
      text: its question.
      reads_answer: whether it compares replies with the row's answer.
    """

    make: Callable[[JudgeTable, str], Form]
    text: FormText
    reads_answer: bool = False

    def __call__(self, table: JudgeTable, key: str) -> Form:
        """The form that a judge's keys ask for."""
        return self.make(table, key)


def make_form(table: JudgeTable, key: str) -> Form:
    """The form that a judge's keys ask for.

    Args:
      table: the keys.
      key: "rewards.NAME", for messages about rows of the data.
    """
    if table.form in PUBLISHED_FORMS or ":" in table.form:
        named = load(PUBLISHED_FORMS.get(table.form, table.form), f"{key}.form")
        form: Form = named(table, key)
        return form
    if table.form == "steps":
        return by_steps(table, _at_steps)
    if table.form == "pairwise":
        return _pairwise(table, key)
    if table.form == "listwise":
        return _listwise(table)
    if table.form == "rubric":
        return by_criteria(table, key)
    low, high = table.scale
    read = partial(read_score, low=low, high=high) if table.form == "score" else read_yes_no
    more = {"low": f"{low:g}", "high": f"{high:g}"}
    return by_sample(
        lambda sample, _: question(table, sample, {**shown(sample), **more}, read),
        lambda sample, _, votes: pooled(votes, table.vote),
    )


def pooled(votes: Sequence[float], how: str) -> float | None:
    """Reduction of several verdicts to one; None if there are none.

    Args:
      votes: those that could be read.
      how: "mean"; "majority": the most frequent one, the mean of those that are equally so; or
        "min", so that one vote of 0 decides.

    >>> pooled([1.0, 0.0, 1.0], "majority"), pooled([1.0, 0.0], "majority"), pooled([], "mean")
    (1.0, 0.5, None)
    """
    if not votes:
        return None
    if how == "min":
        return min(votes)
    if how == "majority":
        counts = collections.Counter(votes)
        votes = [vote for vote, count in counts.items() if count == max(counts.values())]
    return sum(votes) / len(votes)


def rubric_score(met: Sequence[float], criteria: Sequence[Criterion]) -> float:
    """The weighted share of criteria that are met, 0 where one with a veto is not.

    sum(w_k m_k) / sum(max(w_k, 0)), within [0, 1]; criteria with weights below 0 take points away.

    Args:
      met: how far each is met, in [0, 1]; a veto counts below 0.5.
      criteria: of the rubric.

    >>> criteria = [Criterion(text="right", weight=3.0), Criterion(text="safe", veto=True)]
    >>> rubric_score([1.0, 1.0], criteria), rubric_score([0, 1], criteria)
    (1.0, 0.25)
    >>> rubric_score([1.0, 0.0], criteria)
    0.0
    """
    if any(c.veto and m < 0.5 for m, c in zip(met, criteria, strict=True)):
        return 0.0
    total = sum(c.weight * m for m, c in zip(met, criteria, strict=True))
    return min(max(total / sum(max(c.weight, 0.0) for c in criteria), 0.0), 1.0)


def check_rubrics(table: JudgeTable, prompts: Iterable[Any], key: str) -> None:
    """Raises UserError for a row whose rubric cannot be read; a row without one is not judged."""
    if table.column:
        present = [_row_criteria(prompt, table.column, key) for prompt in prompts]
        if present and not any(present):
            raise UserError(
                f"{key}.column = {table.column!r}: no row of the data has a rubric there"
            )


# ---------------------------------------------------------------- the forms


def by_sample(
    ask: Callable[[Sample, Any], Question],
    pay: Callable[[Sample, Any, Sequence[Any]], Returned],
    part_of: Callable[[Sample], Any] = lambda sample: sample,
    silent: Points = None,
) -> Form:
    """A form of one question about each sample.

    Args:
      ask: (sample, its part) -> the question.
      pay: (sample, its part, the readable verdicts) -> points or None.
      part_of: sample -> what is asked about, such as its steps; nothing is asked where that is
        empty.
      silent: points of a sample about which nothing is asked.
    """

    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        return [ask(sample, part) for sample in samples if (part := part_of(sample))]

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[Any]]) -> list[Returned]:
        left, parts = iter(verdicts), [(sample, part_of(sample)) for sample in samples]
        return [pay(sample, part, next(left)) if part else silent for sample, part in parts]

    return Form(False, questions, points)


def by_criteria(
    table: JudgeTable,
    key: str,
    score: Callable[[Sequence[float], Sequence[Criterion]], float] = rubric_score,
) -> Form:
    """A form that asks how far a sample meets each criterion.

    Args:
      table: the judge's keys; ``vote`` pools the votes of each criterion.
      key: "rewards.NAME", for messages.
      score: (how far each is met, 0 to 1; the criteria) -> points.

    Returns:
      The form. A row without criteria is not judged.
    """

    def ask(sample: Sample, rubric: list[Criterion]) -> Question:
        fields = {**shown(sample), "criteria": _listed(rubric)}
        read = partial(read_criteria, count=len(rubric), levels=_levels(rubric))
        return question(table, sample, fields, read)

    def pay(sample: Sample, rubric: list[Criterion], votes: Sequence[list[float]]) -> Points:
        met = [pooled(each, table.vote) or 0.0 for each in zip(*votes, strict=True)]
        return score(met, rubric) if votes else None

    return by_sample(ask, pay, lambda sample: _criteria(table, sample, key))


def _listed(rubric: Sequence[Criterion]) -> str:
    """The numbered criteria of a question, those with levels with what each level means."""
    lines = []
    for i, criterion in enumerate(rubric, 1):
        levels = "; ".join(f"{k}: {text}" for k, text in enumerate(criterion.levels))
        lines.append(f"{i}. {criterion.text}" + f" (give its level; {levels})" * bool(levels))
    return "\n".join(lines)


def _levels(rubric: Sequence[Criterion]) -> list[int]:
    return [len(criterion.levels) for criterion in rubric]


def _criteria(table: JudgeTable, sample: Sample, key: str) -> list[Criterion]:
    return table.criteria or _row_criteria(sample.prompt, table.column, key)


def _row_criteria(prompt: Any, column: str, key: str) -> list[Criterion]:
    rows = prompt.meta.get(column)
    if not rows:
        return []
    return criteria_of(rows, f"{key}.column = {column!r}: row {prompt.id + 1}")


def by_steps(table: JudgeTable, pay: Callable[[Sample, list[float]], list[float]]) -> Form:
    """A form that asks which steps of a sample are wrong, and pays by token.

    Args:
      table: the judge's keys; ``vote`` makes of a step's votes how far it is wrong, "min" where all
        votes say so.
      pay: (sample, how far each of its steps is wrong, 0 to 1) -> [n] numbers, one for each token.

    Returns:
      The form. A sample without a step, or of which it is not known where its tokens end in the
      text, has no opinion.
    """

    def ask(sample: Sample, count: int) -> Question:
        fields = {**shown(sample), "steps": numbered_steps(sample.completion)}
        return question(table, sample, fields, partial(read_steps, count=count))

    def points(sample: Sample, count: int, votes: Sequence[list[int]]) -> Returned:
        if not votes or len(sample.ends) != len(sample.tokens):
            return None
        numbers = range(1, count + 1)
        wrong = [pooled([float(k in vote) for vote in votes], table.vote) for k in numbers]
        return pay(sample, [share or 0.0 for share in wrong])

    return by_sample(ask, points, lambda sample: len(steps_of(sample.completion)))


def _at_steps(sample: Sample, wrong: list[float]) -> list[float]:
    """Minus a point for each wrong step, at the token that ends it."""
    pairs = zip(steps_of(sample.completion), wrong, strict=True)
    return sample.by_token((begin, end, -share) for (begin, end), share in pairs)


def _pairwise(table: JudgeTable, key: str) -> Form:
    by_group, orders = table.against == "group", 2 if table.swap else 1

    def rubric(sample: Sample) -> str:
        criteria = _criteria(table, sample, key) if table.criteria or table.column else []
        marked = [c.model_copy(update={"text": "(hard) " * c.veto + c.text}) for c in criteria]
        return f"\nBy these criteria, hard ones first:\n{_listed(marked)}\n" if marked else ""

    def pairs(samples: Sequence[Sample]) -> list[tuple[int, int]]:
        asks = [i for i, s in enumerate(samples) if not table.column or rubric(s)]
        if by_group:
            return [(i, j) for i in asks for j in range(i + 1, len(samples))]
        return [(i, -1) for i in asks if samples[i].prompt.answer not in (None, "")]

    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        out = []
        for i, j in pairs(samples):
            mine = answer_of(samples[i])
            other = answer_of(samples[j]) if by_group else str(samples[i].prompt.answer)
            for first, second in ((mine, other), (other, mine))[:orders]:
                fields = {"first": first, "second": second, "criteria": rubric(samples[i])}
                out.append(question(table, samples[i], fields, read_preference))
        return out

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[float]]) -> list[Points]:
        results: list[list[float]] = [[] for _ in samples]
        for number, (i, j) in enumerate(pairs(samples)):
            both = verdicts[number * orders : (number + 1) * orders]
            wins = preferred([pooled(votes, table.vote) for votes in both])
            if wins is not None:
                results[i].append(wins)
                if j >= 0:
                    results[j].append(1 - wins)
        return [pooled(each, "mean") for each in results]

    return Form(by_group, questions, points)


def preferred(verdicts: Sequence[float | None]) -> float | None:
    """Reward of a pair's first sample, from the verdicts in both orders, or in one.

    Args:
      verdicts: for those named first in each order; 1 where that one is better.

    Returns:
      1 or 0 where both orders agree, 0.5 where they do not; None where one has no verdict.

    >>> preferred([1.0, 0.0]), preferred([1.0, 1.0]), preferred([1.0, None])
    (1.0, 0.5, None)
    """
    if any(verdict is None for verdict in verdicts):
        return None
    sides = [v if i == 0 else 1 - v for i, v in enumerate(verdicts) if v is not None]
    better = [(side > 0.5) - (side < 0.5) for side in sides]
    return (better[0] + 1) / 2 if len(set(better)) == 1 else 0.5


def _listwise(table: JudgeTable) -> Form:
    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        count = len(samples)
        if count < 2:
            return []
        # Each vote begins with another member, since the first place of a list has an advantage.
        order = [(i + vote) % count for i in range(count)]
        texts = [f"Answer {n}:\n{answer_of(samples[i])}" for n, i in enumerate(order, 1)]
        fields = {"completions": "\n\n".join(texts), "count": str(count)}
        read = partial(_places, order=order)
        return [question(table, samples[0], fields, read)]

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[list[int]]]) -> list[Points]:
        if not verdicts:
            return [None] * len(samples)
        last = len(samples) - 1
        ranks = [[1 - ranking.index(i) / last for ranking in verdicts[0]] for i in range(last + 1)]
        return [pooled(each, table.vote) for each in ranks]

    return Form(True, questions, points)


def _places(reply: str, order: Sequence[int]) -> list[int] | None:
    """The members of a group, best first, of a reply that names them by their places in a list."""
    ranking = read_ranking(reply, len(order))
    return None if ranking is None else [order[place] for place in ranking]


def question(
    table: JudgeTable,
    sample: Sample,
    fields: Mapping[str, str],
    read: Callable[[str], Any],
    template: str = "",
) -> Question:
    """A question about a sample; ``template`` in place of the form's."""
    return Question(messages_of(table, sample, fields, template), read)
