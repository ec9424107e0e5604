"""The judges of a run: reward parts that models give, as rows end."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config import Config
from jrl.config.judge import POLICY, START, TOKEN_FORMS, JudgeTable
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Returned, Sample, total
from jrl.rewards.judge_prompts import check_template
from jrl.rewards.model import JudgeModel
from jrl.rewards.rules import Rules
from jrl.rewards.verdicts import Form, Question, check_rubrics, make_form
from jrl.system.processes import deal
from jrl.train.build import Run, sampler_of
from jrl.train.judge_cache import Asked
from jrl.train.judge_client import JudgeClient
from jrl.train.judge_models import ModelJudge, judge_shape, model_judge
from jrl.train.judging import Texts, with_ends
from jrl.train.reward_parts import judge_of, parts_of, reward_tables
from jrl.types import NOTHING, Params, Prompt, StopReason


class Judge(NamedTuple):
    """One part that a judge gives.

    Attributes:
      name: of the part.
      table: its keys.
      form: what is asked.
      rules: which rows it is asked about, and what no verdict means.
      client: that asks.
    """

    name: str
    table: JudgeTable
    form: Form
    rules: Rules
    client: JudgeClient | ModelJudge

    def points(
        self, units: Sequence[Sequence[Sample]]
    ) -> tuple[list[Sequence[Returned]], dict[str, float]]:
        """Points of the samples of each unit, and counts."""
        votes, form = range(self.table.votes), self.form
        first = [[form.questions(unit, vote) for vote in votes] for unit in units]
        verdicts, counts = self._asked(first)
        if form.follow is not None:
            known = zip(units, verdicts, strict=True)
            then = [[form.follow(unit, read, vote) for vote in votes] for unit, read in known]
            more, again = self._asked(then)
            verdicts = [a + b for a, b in zip(verdicts, more, strict=True)]
            counts = {name: counts[name] + again[name] for name in counts}
        given = zip(units, verdicts, strict=True)
        return [form.points(unit, readable) for unit, readable in given], counts

    def begin(self, sample: Sample) -> None:
        """Begins to ask about one sample, where that alone says what to ask.

        Not where members are compared, where other points say who is asked, or where the one who
        answers is on the run's devices.
        """
        if self.form.by_group or self.table.only or not isinstance(self.client, JudgeClient):
            return
        if self.rules.asks(sample):
            votes = range(self.table.votes)
            self.client.begin(
                [Asked(q, v) for v in votes for q in self.form.questions([sample], v)]
            )

    def _asked(
        self, by_unit: Sequence[Sequence[Sequence[Question]]]
    ) -> tuple[list[list[list[Any]]], dict[str, float]]:
        """The readable verdicts of each question of each unit, and counts.

        Args:
          by_unit: questions by unit and vote.
        """
        asked = [
            Asked(question, vote)
            for unit in by_unit
            for vote, questions in enumerate(unit)
            for question in questions
        ]
        verdicts, counts = self.client.verdicts(asked)
        left, readable = iter(verdicts), []
        for listed in by_unit:
            votes = [[next(left) for _ in questions] for questions in listed]
            readable.append(
                [[v for v in each if v is not None] for each in zip(*votes, strict=True)]
            )
        return readable, counts


class Judges(NamedTuple):
    """All judges of a run; they are asked at the same time.

    Attributes:
      judges: one for each part.
      tokenizer: turns completions into text.
      name: of what is judged, where several processes share the judging.
      steps: training steps of the run.
    """

    judges: Sequence[Judge]
    tokenizer: Tokenizer
    name: str
    steps: int

    @classmethod
    def of(cls, run: Run, split: str) -> Judges:
        """Those of a run, for a split of its data."""
        names = parts_of(run.config).given_by("judge")
        judges = [_judge(run.config, name, partial(_model_judge, run, name)) for name in names]
        return cls(judges, run.tokenizer, split, run.config.train.steps)

    def __call__(
        self,
        texts: Texts,
        given: Mapping[str, Any],
        step: int,
        weights: Mapping[str, Params] = NOTHING,
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, float], np.ndarray | None]:
        """Points of N groups of G members; each process asks about a share of the groups.

        Args:
          texts: of the members. Those that are absent, failed or were dropped are not judged.
          given: points [N, G] by part so far, NaN for no opinion.
          step: training steps done.
          weights: that drew the members, by name. A policy that judges has no opinion without
            them, of completions that were there already.

        Returns:
          (points [N, G] float32 by part, NaN where there is no verdict; [N, G] bool, members that
          leave their group; counts by name; [N, G, T] float32, weighted points of the tokens, None
          where no judge gives them by token).
        """
        begin, stop = time.perf_counter(), np.asarray(texts.rollout.stop)
        present = (stop != StopReason.ABORTED) & (stop < StopReason.FAILED)
        asks = {}
        for judge in self.judges:
            asks[judge.name] = present.copy()
            if judge.table.only:
                asks[judge.name] &= np.nan_to_num(np.asarray(given[judge.table.only])) > 0

        def work(rows: np.ndarray) -> tuple[tuple[np.ndarray, ...], dict[str, float]]:
            groups = {
                (i, j): self._sample(texts, i, j, step)
                for i in rows.tolist()
                for j in np.flatnonzero(present[i]).tolist()
            }
            jobs: dict[str, Future[Any]] = {}
            done = {}
            with ThreadPoolExecutor(len(self.judges)) as threads:
                try:
                    for judge in self.judges:
                        if not judge.table.local:
                            mine = asks[judge.name]
                            jobs[judge.name] = threads.submit(_judged, judge, groups, mine, rows)
                    # In this thread, the one that has the device; servers answer meanwhile.
                    for judge in self.judges:
                        if isinstance(judge.client, ModelJudge):
                            client, mine = judge.client.with_weights(weights), asks[judge.name]
                            if client is None:
                                mine = np.zeros_like(mine)  # nothing is asked
                            here = judge._replace(client=client or judge.client)
                            done[judge.name] = _judged(here, groups, mine, rows)
                    done |= {name: job.result() for name, job in jobs.items()}
                finally:  # an interrupt of this thread ends the others, too
                    self.stop()
            counts: collections.Counter[str] = collections.Counter()
            each = [done[judge.name] for judge in self.judges]
            for *_, more in each:
                counts.update(more)
            points = np.stack([points for points, *_ in each], axis=-1)
            paid = np.zeros((*points.shape[:2], self.by_token * texts.rollout.tokens.shape[2]))
            for _, _, by_member, _ in each:
                for (place, j), numbers in by_member.items():
                    paid[place, j, texts.columns(rows[place], j)] += numbers
            dropped = np.any([dropped for _, dropped, *_ in each], axis=0)
            return (points, dropped, paid.astype(np.float32)), dict(counts)

        (points, dropped, paid), counts = deal(f"{self.name}/judge", len(stop), work)
        counts["judge_seconds"] = time.perf_counter() - begin
        by_name = dict(zip((j.name for j in self.judges), np.moveaxis(points, -1, 0), strict=True))
        return by_name, dropped, counts, paid if self.by_token else None

    def begin(self, sample: Sample) -> None:
        """Begins to ask about a sample before all are there; a call then has what was said."""
        for judge in self.judges:
            judge.begin(sample)

    def stop(self) -> None:
        """Drops what was begun and not asked for; ends a call in another thread."""
        for judge in self.judges:
            judge.client.stop()

    @property
    def by_token(self) -> bool:
        """Whether a judge may give a number for each token."""
        return any(judge.rules.by_token is not None for judge in self.judges)

    def _sample(self, texts: Texts, i: int, j: int, step: int) -> Sample:
        sample = texts.sample(i, j, step, self.steps)
        return with_ends(sample, self.tokenizer) if self.by_token else sample


def _judged(
    judge: Judge, samples: Mapping[tuple[int, int], Sample], asks: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], np.ndarray], dict[str, float]]:
    """Of one judge for some groups.

    Returns:
      (points [n, G] float32, sums of those by token; dropped [n, G] bool; by (place, member) the
      weighted points of its sample's tokens; counts).
    """
    points = np.full((len(rows), asks.shape[1]), np.nan, np.float32)
    dropped = np.zeros(points.shape, bool)
    paid: dict[tuple[int, int], np.ndarray] = {}
    places: list[list[tuple[int, int]]] = []
    units: list[list[Sample]] = []
    for place, i in enumerate(rows.tolist()):
        present = np.flatnonzero(asks[i]).tolist()
        members = [j for j in present if judge.rules.asks(samples[i, j])]
        for unit in [members] if judge.form.by_group else [[j] for j in members]:
            places.append([(place, j) for j in unit])
            units.append([samples[i, j] for j in unit])
    results, counts = judge.points(units)
    absent = 0.0 if judge.rules.missing == "zero" else np.nan
    for where, values in zip(places, results, strict=True):
        for at, value in zip(where, values, strict=True):
            points[at] = absent if value is None else total(value)
            if isinstance(value, list) and judge.rules.by_token is not None:
                paid[at] = judge.rules.by_token * np.array(value)
            dropped[at] = value is None and judge.rules.missing == "drop"
    return points, dropped, paid, counts


def endpoint_judges(config: Config) -> list[Judge]:
    """The judges of a configuration that are behind endpoints.

    Raises:
      UserError: an address that is none, or an environment variable that does not exist.
    """
    names = parts_of(config).given_by("judge")
    return [_judge(config, name) for name in names if not judge_of(config, name).local]


Client = Callable[[JudgeTable, str, Path | None], Any]
"""(keys, "rewards.NAME", directory of verdicts) -> who is asked."""


def _judge(config: Config, name: str, local: Client | None = None) -> Judge:
    """A judge; ``local`` makes the client of one on the run's devices."""
    table, key, rewards = judge_of(config, name), f"rewards.{name}", reward_tables(config)[name]
    make = local if table.local and local is not None else _endpoint
    client = make(table, key, _cache(table.cache, config.run.dir))
    weight = parts_of(config).weights[name] if table.form in TOKEN_FORMS else None
    rules = Rules(rewards.missing, where=rewards.where, by_token=weight)
    return Judge(name, table, make_form(table, key), rules, client)


def _endpoint(table: JudgeTable, key: str, cache: Path | None) -> JudgeClient:
    return JudgeClient(table, key, cache=cache, processes=jax.process_count())


def _model_judge(
    run: Run, name: str, table: JudgeTable, key: str, cache: Path | None
) -> ModelJudge:
    """The judge behind a part of a run, on its devices."""
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
    for judge in endpoint_judges(config):
        judge.client.probe()
