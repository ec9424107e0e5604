"""The judges of a run: reward parts that models behind endpoints give, as rows end."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config import Config
from jrl.config.judge import JudgeTable
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Points, Sample
from jrl.rewards.judge_prompts import check_template
from jrl.rewards.rules import Rules
from jrl.rewards.verdicts import Form, check_rubrics, make_form
from jrl.system.processes import deal
from jrl.train.build import Run
from jrl.train.judge_client import Asked, JudgeClient
from jrl.train.judging import Texts
from jrl.train.reward_parts import judge_of, parts_of, reward_tables
from jrl.types import Prompt, StopReason


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
    client: JudgeClient

    def points(
        self, units: Sequence[Sequence[Sample]]
    ) -> tuple[list[list[Points]], dict[str, float]]:
        """Points of the samples of each unit, and counts."""
        votes = range(self.table.votes)
        by_unit = [[self.form.questions(unit, vote) for vote in votes] for unit in units]
        asked = [
            Asked(question, vote)
            for unit in by_unit
            for vote, questions in enumerate(unit)
            for question in questions
        ]
        verdicts, counts = self.client.verdicts(asked)
        left, points = iter(verdicts), []
        for unit, listed in zip(units, by_unit, strict=True):
            given = [[next(left) for _ in questions] for questions in listed]
            readable = [[v for v in each if v is not None] for each in zip(*given, strict=True)]
            points.append(self.form.points(unit, readable))
        return points, counts


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
        return cls(judges_of(run.config), run.tokenizer, split, run.config.train.steps)

    def __call__(
        self, texts: Texts, given: Mapping[str, Any], step: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, float]]:
        """Points of N groups of G members; each process asks about a share of the groups.

        Args:
          texts: of the members. Those that are absent, failed or were dropped are not judged.
          given: points [N, G] by part so far, NaN for no opinion.
          step: training steps done.

        Returns:
          (points [N, G] float32 by part, NaN where there is no verdict; [N, G] bool, members that
          leave their group; counts by name).
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
                (i, j): texts.sample(i, j, step, self.steps)
                for i in rows.tolist()
                for j in np.flatnonzero(present[i]).tolist()
            }
            with ThreadPoolExecutor(len(self.judges)) as threads:
                jobs = [
                    threads.submit(_judged, judge, groups, asks[judge.name], rows)
                    for judge in self.judges
                ]
                try:
                    done = [job.result() for job in jobs]
                finally:  # an interrupt of this thread ends the others, too
                    for judge in self.judges:
                        judge.client.stop()
            counts: collections.Counter[str] = collections.Counter()
            for *_, each in done:
                counts.update(each)
            points = np.stack([points for points, *_ in done], axis=-1)
            return (points, np.any([dropped for _, dropped, _ in done], axis=0)), dict(counts)

        (points, dropped), counts = deal(f"{self.name}/judge", len(stop), work)
        counts["judge_seconds"] = time.perf_counter() - begin
        by_name = dict(zip((j.name for j in self.judges), np.moveaxis(points, -1, 0), strict=True))
        return by_name, dropped, counts


def _judged(
    judge: Judge, samples: Mapping[tuple[int, int], Sample], asks: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Of one judge for some groups: points [n, G] float32, dropped [n, G] bool, and counts."""
    points = np.full((len(rows), asks.shape[1]), np.nan, np.float32)
    dropped = np.zeros(points.shape, bool)
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
            points[at] = absent if value is None else value
            dropped[at] = value is None and judge.rules.missing == "drop"
    return points, dropped, counts


def judges_of(config: Config) -> list[Judge]:
    """The judges of a configuration.

    Raises:
      UserError: an address that is none, or an environment variable that does not exist.
    """
    judges, tables = [], reward_tables(config)
    for name in parts_of(config).given_by("judge"):
        table, key = judge_of(config, name), f"rewards.{name}"
        rules = Rules(tables[name].missing, where=tables[name].where)
        cache = _cache(table.cache, config.run.dir)
        client = JudgeClient(table, key, cache=cache, processes=jax.process_count())
        judges.append(Judge(name, table, make_form(table, key), rules, client))
    return judges


def _cache(cache: str | bool, run_dir: str | None) -> Path | None:
    if cache is True:
        return Path(run_dir).absolute() / "judge" if run_dir else None
    return Path(cache).absolute() if cache else None


def check_judges(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a judge that cannot be asked about these prompts; sends nothing."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.meta)
    for judge in judges_of(config):
        check_template(judge.table, columns, f"rewards.{judge.name}")
        check_rubrics(judge.table, prompts, f"rewards.{judge.name}")
        cache = judge.table.cache
        if isinstance(cache, str) and not Path(cache).absolute().parent.is_dir():
            raise UserError(
                f"rewards.{judge.name}.cache = {cache!r}: the directory above it does not exist;"
                " make it, or name another"
            )


def probe_judges(config: Config) -> None:
    """Sends one request to each judge of a run.

    Raises:
      UserError: nobody answers at an address, or a request is refused.
    """
    for judge in judges_of(config):
        judge.client.probe()
