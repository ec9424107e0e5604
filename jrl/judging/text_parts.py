"""Reward parts whose givers read the text of members: judges, and reward models with a tokenizer.

    parts = TextParts(givers, tokenizer, steps)
    points, dropped, counts, paid = parts(texts, points_so_far, step)

Only this module decides the effect of no opinion, which members leave their groups, and which
process reads which samples.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from jrl.judging.host import Texts, with_ends
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Returned, Sample, total
from jrl.rewards.rules import Rules
from jrl.system.processes import deal
from jrl.types import NOTHING, Params, StopReason


class TextGiver(Protocol):
    """Giver of a reward part that reads text."""

    @property
    def rules(self) -> Rules:
        """Rules of the part: the samples it reads, and its value without an opinion."""

    @property
    def only(self) -> str:
        """Name of a part: only samples with points above 0 there are read; "" for all."""

    @property
    def by_group(self) -> bool:
        """Whether it reads the members of a group together, not one sample at a time."""

    @property
    def remote(self) -> bool:
        """Whether it waits for a server, so that others may read at the same time."""

    def with_weights(self, weights: Mapping[str, Params]) -> Self | None:
        """Itself with the weights that sampled the members, by name; None if it cannot read."""

    def points(
        self, units: Sequence[Sequence[Sample]]
    ) -> tuple[Sequence[Sequence[Returned]], dict[str, float]]:
        """Points of the samples of each unit, None for no opinion, and counts."""

    def begin(self, sample: Sample) -> None:
        """May begin to read a sample of a step before the others have ended."""

    def stop(self) -> None:
        """Drops calls that began; makes a running ``points`` in another thread return."""


class GivenScores(NamedTuple):
    """One giver's rewards of some groups.

    Attributes:
      points: [n, G] float32, sums of those by token; NaN for no opinion.
      dropped: [n, G] bool.
      paid: by (place, member) the weighted points of its sample's tokens.
      counts: by name.
    """

    points: np.ndarray
    dropped: np.ndarray
    paid: dict[tuple[int, int], np.ndarray]
    counts: dict[str, float]


class TextParts(NamedTuple):
    """Reward parts of a run whose givers read text; servers are asked at the same time.

    Attributes:
      givers: by reward part.
      tokenizer: turns completions into text.
      steps: training steps of the run.
      dealt: name under which processes share the groups; "" where each reads all, as programs of
        all devices must.
      clock: name of the count of seconds; "" for none.
    """

    givers: Mapping[str, TextGiver]
    tokenizer: Tokenizer
    steps: int
    dealt: str = ""
    clock: str = ""

    def __call__(
        self,
        texts: Texts,
        so_far: Mapping[str, Any],
        step: int,
        weights: Mapping[str, Params] = NOTHING,
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, float], np.ndarray | None]:
        """Points of N groups of G members.

        Args:
          texts: of the members. Those that are absent, failed or were dropped are not read.
          so_far: points [N, G] by part so far, NaN for no opinion.
          step: training steps done.
          weights: that drew the members, by name. A policy that judges has no opinion without
            them, of completions that were there already.

        Returns:
          (points [N, G] float32 by part, NaN for no opinion; [N, G] bool, members that leave their
          group; counts by name; [N, G, T] float32, weighted points of the tokens, None where no
          giver has them by token).
        """
        begin, stop = time.perf_counter(), np.asarray(texts.rollout.stop)
        present = (stop != StopReason.ABORTED) & (stop < StopReason.FAILED)

        def work(rows: np.ndarray) -> tuple[tuple[np.ndarray, ...], dict[str, float]]:
            samples = {
                (i, j): self.ended(texts.sample(i, j, step, self.steps))
                for i in rows.tolist()
                for j in np.flatnonzero(present[i]).tolist()
            }
            return self._merged(
                texts, rows, self._scores_of(samples, present, so_far, rows, weights)
            )

        n = len(stop)
        results = deal(self.dealt, n, work) if self.dealt else work(np.arange(n))
        (points, dropped, paid), counts = results
        if self.clock:
            counts[self.clock] = time.perf_counter() - begin
        by_name = dict(zip(self.givers, np.moveaxis(points, -1, 0), strict=True))
        return by_name, dropped, counts, paid if self.by_token else None

    @property
    def by_token(self) -> bool:
        """Whether a giver may give a number for each token."""
        return any(giver.rules.by_token is not None for giver in self.givers.values())

    def ended(self, sample: Sample) -> Sample:
        """The sample as givers read it, with ``ends`` if points are by token."""
        return with_ends(sample, self.tokenizer) if self.by_token else sample

    def begin(self, sample: Sample) -> None:
        """Begins to read a sample before the others have ended; a later call uses the results."""
        for giver in self.givers.values():
            giver.begin(sample)

    def stop(self) -> None:
        """Drops results that were not collected; ends a running call in another thread."""
        for giver in self.givers.values():
            giver.stop()

    def _scores_of(
        self,
        samples: Mapping[tuple[int, int], Sample],
        present: np.ndarray,
        points: Mapping[str, Any],
        rows: np.ndarray,
        weights: Mapping[str, Params],
    ) -> list[GivenScores]:
        """Each giver's rewards of the groups in some rows."""
        jobs: dict[str, Future[GivenScores]] = {}
        done: dict[str, GivenScores] = {}
        asks = dict.fromkeys(self.givers, present)
        for name, giver in self.givers.items():
            if giver.only:
                asks[name] = present & (np.nan_to_num(np.asarray(points[giver.only])) > 0)
        with ThreadPoolExecutor(max(len(self.givers), 1)) as threads, contextlib.ExitStack() as end:
            end.callback(self.stop)  # an interrupt of this thread ends the others, too
            for name, giver in self.givers.items():
                if giver.remote:
                    jobs[name] = threads.submit(_scores_of, giver, samples, asks[name], rows)
            # In this thread, the one that has the device; servers answer meanwhile.
            for name, giver in self.givers.items():
                if not giver.remote:
                    here = giver.with_weights(weights)
                    mine = np.zeros_like(present) if here is None else asks[name]
                    done[name] = _scores_of(here or giver, samples, mine, rows)
            done |= {name: job.result() for name, job in jobs.items()}
        return [done[name] for name in self.givers]

    def _merged(
        self, texts: Texts, rows: np.ndarray, each: Sequence[GivenScores]
    ) -> tuple[tuple[np.ndarray, ...], dict[str, float]]:
        """((points [n, G, R], dropped [n, G], paid [n, G, T]), the counts summed)."""
        counts: collections.Counter[str] = collections.Counter()
        for one in each:
            counts.update(one.counts)
        points = np.stack([one.points for one in each], axis=-1)
        paid = np.zeros((*points.shape[:2], self.by_token * texts.rollout.tokens.shape[2]))
        for one in each:
            for (place, j), numbers in one.paid.items():
                paid[place, j, texts.columns(rows[place], j)] += numbers
        dropped = np.any([one.dropped for one in each], axis=0)
        return (points, dropped, paid.astype(np.float32)), dict(counts)


def _scores_of(
    giver: TextGiver,
    samples: Mapping[tuple[int, int], Sample],
    asks: np.ndarray,
    rows: np.ndarray,
) -> GivenScores:
    """One giver's rewards of the groups in some rows, of which ``asks`` [N, G] are read."""
    points = np.full((len(rows), asks.shape[1]), np.nan, np.float32)
    dropped = np.zeros(points.shape, bool)
    paid: dict[tuple[int, int], np.ndarray] = {}
    places: list[list[tuple[int, int]]] = []
    units: list[list[Sample]] = []
    for place, i in enumerate(rows.tolist()):
        present = np.flatnonzero(asks[i]).tolist()
        members = [j for j in present if giver.rules.asks(samples[i, j])]
        whole_group = [members] if members else []  # a group may have nobody to judge
        for unit in whole_group if giver.by_group else [[j] for j in members]:
            places.append([(place, j) for j in unit])
            units.append([samples[i, j] for j in unit])
    results, counts = giver.points(units)
    absent = 0.0 if giver.rules.missing == "zero" else np.nan
    for where, values in zip(places, results, strict=True):
        for at, value in zip(where, values, strict=True):
            points[at] = absent if value is None else total(value)
            if isinstance(value, list) and giver.rules.by_token is not None:
                paid[at] = giver.rules.by_token * np.array(value)
            dropped[at] = value is None and giver.rules.missing == "drop"
    return GivenScores(points, dropped, paid, counts)
