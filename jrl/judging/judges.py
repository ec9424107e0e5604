"""The judges of a run: language models that compute reward parts, as rows end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl.config import Config
from jrl.config.judge import POLICY, START, TOKEN_FORMS, JudgeTable
from jrl.errors import UserError
from jrl.judging.cache import QuestionVote
from jrl.judging.client import JudgeClient
from jrl.judging.models import ModelJudge, judge_shape, model_judge
from jrl.judging.text_parts import TextParts
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Returned, Sample
from jrl.rewards.judge_prompts import check_template
from jrl.rewards.model import JudgeModel
from jrl.rewards.rules import Rules
from jrl.rewards.verdicts import Form, Question, check_rubrics, make_form
from jrl.setup.reward_parts import judge_of, parts_of, reward_tables
from jrl.setup.run import Run, sampler_of
from jrl.types import NOTHING, Params, Prompt


class Judge(NamedTuple):
    """The judge of one reward part; a ``TextGiver``.

    Attributes:
      table: keys of the part.
      form: questions, parsing and points.
      rules: the rows it is asked about, and the value without a verdict.
      client: sends the questions.
    """

    table: JudgeTable
    form: Form
    rules: Rules
    client: JudgeClient | ModelJudge

    @property
    def only(self) -> str:
        """As ``TextGiver.only``."""
        return self.table.only

    @property
    def by_group(self) -> bool:
        """As ``TextGiver.by_group``."""
        return self.form.by_group

    @property
    def remote(self) -> bool:
        """As ``TextGiver.remote``."""
        return not self.table.local

    def with_weights(self, weights: Mapping[str, Params]) -> Judge | None:
        """As ``TextGiver.with_weights``: a policy cannot judge without weights."""
        if not isinstance(self.client, ModelJudge):
            return self
        client = self.client.with_weights(weights)
        return None if client is None else self._replace(client=client)

    def stop(self) -> None:
        """As ``TextGiver.stop``."""
        self.client.stop()

    def points(
        self, units: Sequence[Sequence[Sample]]
    ) -> tuple[list[Sequence[Returned]], dict[str, float]]:
        """As ``TextGiver.points``."""
        votes, form = range(self.table.votes), self.form
        first = [[form.questions(unit, vote) for vote in votes] for unit in units]
        verdicts, counts = self._verdicts(first)
        if form.follow is not None:
            replies = zip(units, verdicts, strict=True)
            then = [[form.follow(unit, read, vote) for vote in votes] for unit, read in replies]
            more, again = self._verdicts(then)
            verdicts = [a + b for a, b in zip(verdicts, more, strict=True)]
            counts = {name: counts[name] + again[name] for name in counts}
        pairs = zip(units, verdicts, strict=True)
        return [form.points(unit, readable) for unit, readable in pairs], counts

    def begin(self, sample: Sample) -> None:
        """Begins to ask about one sample, if the questions depend on it only.

        They do not if members are compared or ``only`` selects by other points. A judge on the
        run's devices is asked later.
        """
        if self.by_group or self.only or not isinstance(self.client, JudgeClient):
            return
        if self.rules.asks(sample):
            votes = range(self.table.votes)
            self.client.begin(
                [QuestionVote(q, v) for v in votes for q in self.form.questions([sample], v)]
            )

    def _verdicts(
        self, by_unit: Sequence[Sequence[Sequence[Question]]]
    ) -> tuple[list[list[list[Any]]], dict[str, float]]:
        """The readable verdicts of each question of each unit, and counts.

        Args:
          by_unit: questions by unit and vote.
        """
        entries = [
            QuestionVote(question, vote)
            for unit in by_unit
            for vote, questions in enumerate(unit)
            for question in questions
        ]
        verdicts, counts = self.client.verdicts(entries)
        left, readable = iter(verdicts), []
        for listed in by_unit:
            votes = [[next(left) for _ in questions] for questions in listed]
            readable.append(
                [[v for v in each if v is not None] for each in zip(*votes, strict=True)]
            )
        return readable, counts


def judges_of(run: Run, split: str) -> TextParts:
    """The judges of a run, for a split of its data."""
    names = parts_of(run.config).given_by("judge")
    judges = {n: _judge(run.config, n, partial(_model_judge, run, n)) for n in names}
    return judge_parts(judges, run.tokenizer, run.config.train.steps, split)


def judge_parts(
    judges: Mapping[str, Judge], tokenizer: Tokenizer, steps: int, split: str
) -> TextParts:
    """Judges by reward part; each process asks about a share of the groups."""
    return TextParts(judges, tokenizer, steps, f"{split}/judge", "judge_seconds")


def endpoint_judges(config: Config) -> dict[str, Judge]:
    """The judges of a configuration that are called at endpoints, by reward part.

    Raises:
      UserError: an address that is none, or an environment variable that does not exist.
    """
    names = parts_of(config).given_by("judge")
    return {name: _judge(config, name) for name in names if not judge_of(config, name).local}


Client = Callable[[JudgeTable, str, Path | None], Any]
"""(keys, "rewards.NAME", directory of verdicts) -> client of the judge."""


def _judge(config: Config, name: str, local: Client | None = None) -> Judge:
    """A judge; ``local`` makes the client of one on the run's devices."""
    table, key, rewards = judge_of(config, name), f"rewards.{name}", reward_tables(config)[name]
    make = local if table.local and local is not None else _endpoint
    client = make(table, key, _cache(table.cache, config.run.dir))
    weight = parts_of(config).weights[name] if table.form in TOKEN_FORMS else None
    rules = Rules(rewards.missing, where=rewards.where, by_token=weight)
    return Judge(table, make_form(table, key), rules, client)


def _endpoint(table: JudgeTable, key: str, cache: Path | None) -> JudgeClient:
    return JudgeClient(table, key, cache=cache, processes=jax.process_count())


def _model_judge(
    run: Run, name: str, table: JudgeTable, key: str, cache: Path | None
) -> ModelJudge:
    """The judge of a reward part, on the run's devices."""
    model = run.rewards.judges.get(name)
    theirs = table.model not in (POLICY, START)
    variables = NOTHING if theirs else run.config.data.wording["variables"]
    if model is None:  # the policy, whose verdicts are another judge's after each step
        model, cache = JudgeModel(sampler_of(run), None, run.tokenizer), None
    seed = run.config.seed
    return model_judge(table, model, seed=seed, cache=cache, variables=variables)


def _cache(cache: str | bool, run_dir: str | None) -> Path | None:
    if cache is True:
        return Path(run_dir).absolute() / "judge" if run_dir else None
    return Path(cache).absolute() if cache else None


def check_judges(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a judge that cannot be asked about these prompts; sends nothing."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.meta)
    endpoint_judges(config)
    for name in parts_of(config).given_by("judge"):
        table, key = judge_of(config, name), f"rewards.{name}"
        check_template(table, columns, key)
        check_rubrics(table, prompts, key)
        if table.local:
            judge_shape(config, name)
        cache = table.cache
        if isinstance(cache, str) and not Path(cache).absolute().parent.is_dir():
            raise UserError(
                f"{key}.cache = {cache!r}: the directory above it does not exist;"
                " make it, or name another"
            )


def probe_judges(config: Config) -> None:
    """Sends one request to each endpoint that judges in a run.

    Raises:
      UserError: nobody answers at an address, or a request is refused.
    """
    for judge in endpoint_judges(config).values():
        judge.client.probe()
