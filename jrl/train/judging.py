"""Completions and episodes judged by the reward functions of the host."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Sample
from jrl.rewards.exact import final_answer
from jrl.rewards.pool import RewardPool
from jrl.system.processes import deal
from jrl.types import Prompt, Rollout, StopReason

Spoken = Sequence[Sequence[Sequence[Mapping[str, Any]]]]
"""[N][G] messages of episodes behind their openings."""


class HostJudge(NamedTuple):
    """What judges the members of groups on the host.

    Attributes:
      pool: the reward functions.
      tokenizer: turns completions into text for them.
      name: of what is judged, where several processes share the judging.
      steps: training steps of the run.
    """

    pool: RewardPool
    tokenizer: Tokenizer
    name: str = "train"
    steps: int = 0

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, step: int, spoken: Spoken = ()
    ) -> tuple[Rollout, np.ndarray, np.ndarray, dict[str, float]]:
        """Points of N groups of G members.

        Each process judges a share of the prompts and gets the other points from the others, so all
        hold the same points even if a reward function is not deterministic.

        Args:
          prompts: N of them.
          rollout: on the host.
          step: training steps done.
          spoken: of episodes, what was said behind their openings; () for completions.

        Returns:
          (the rollout, where members to be dropped have ended as ABORTED; points [N, G, R] float32,
          NaN where a function has no opinion; answers [N, G] int32, a number for each final answer:
          equal answers have equal numbers; counts by name).
        """
        begin = time.perf_counter()
        share = _Share(self, prompts, rollout, step, spoken)
        # Text is decoded and judged where it is a process's turn; numbers travel, texts do not.
        n = len(prompts)
        if self.pool.over_batch:  # one process sees all samples
            everything, counts = deal(self.name, 1, share.whole)
            points, dropped, answers = (x[0] for x in everything)
        else:
            (points, dropped, answers), counts = deal(self.name, n, share.rows)
        counts["reward_seconds"] = time.perf_counter() - begin
        if dropped.any():
            rollout, counts["reward_dropped"] = without_dropped(rollout, dropped)
        return rollout, points, answers, counts


Judged = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(points [n, G, R] float32, dropped [n, G] bool, answers [n, G] int32)."""


class _Share(NamedTuple):
    """Members of N groups that are judged a share at a time."""

    judge: HostJudge
    prompts: Sequence[Prompt]
    rollout: Rollout
    step: int
    spoken: Spoken

    def whole(self, unit: np.ndarray) -> tuple[Judged, dict[str, float]]:
        """All groups as one unit, where there is one in ``unit``."""
        judged, counts = self.rows(np.arange(len(self.prompts) if len(unit) else 0))
        points, dropped, answers = (x[None][: len(unit)] for x in judged)
        return (points, dropped, answers), counts

    def rows(self, rows: np.ndarray) -> tuple[Judged, dict[str, float]]:
        """Some groups, and counts."""
        g = self.rollout.tokens.shape[1]
        # Absent members were not asked for, and have nothing to judge.
        exists = np.asarray(self.rollout.stop)[rows] != StopReason.ABSENT
        if self.spoken:  # nothing is known of episodes that failed
            exists &= np.asarray(self.rollout.stop)[rows] < StopReason.FAILED
        samples = [
            self._sample(i, j)
            for i, present in zip(rows, exists, strict=True)
            for j in np.flatnonzero(present).tolist()
        ]
        scores = self.judge.pool.scores(samples, group=g if exists.all() else None)
        answers = np.zeros((len(rows), g), np.int32)
        answers[exists] = [answer_number(s.completion) for s in samples]
        points = np.zeros((len(rows), g, scores.points.shape[1]), np.float32)
        points[exists] = scores.points
        dropped = np.zeros((len(rows), g), bool)
        dropped[exists] = scores.dropped
        return (points, dropped, answers), scores.counts

    def _sample(self, i: int, j: int) -> Sample:
        texts = Texts(self.prompts, self.rollout, self.judge.tokenizer, self.spoken)
        return texts.sample(i, j, self.step, self.judge.steps)


class Texts(NamedTuple):
    """What the members of N groups said, for whatever judges text.

    Attributes:
      prompts: N of them.
      rollout: on the host.
      tokenizer: turns completions into text.
      spoken: of episodes, what was said behind their openings; () for completions.
    """

    prompts: Sequence[Prompt]
    rollout: Rollout
    tokenizer: Tokenizer
    spoken: Spoken = ()

    def sample(self, i: int, j: int, step: int, steps: int) -> Sample:
        """Member j of group i, after some of the training steps."""
        rollout, decode = self.rollout, self.tokenizer.decode
        tokens = np.asarray(rollout.tokens[i, j, : rollout.lengths[i, j]])
        spoken = self.spoken[i][j] if self.spoken else ()
        if spoken:
            tokens = tokens[np.asarray(rollout.mask[i, j, : len(tokens)])]
        last = [m["content"] for m in spoken if m["role"] == "assistant"][-1:]
        return Sample(
            prompt=self.prompts[i],
            completion=last[0] if last else decode(tokens.tolist()),
            tokens=tokens,
            stop=StopReason(int(rollout.stop[i, j])).name.lower(),
            messages=tuple(spoken),
            step=step,
            steps=steps,
        )


def without_silent(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points [N, G, R] with 0 for NaN, no opinion, and the label ``SILENT`` [N, G] int32."""
    silent = np.isnan(points)
    bits = (silent << np.arange(points.shape[-1], dtype=np.int64)).sum(axis=-1).astype(np.int32)
    return np.where(silent, 0, points).astype(np.float32), bits


def answer_number(text: str) -> int:
    """A number below 2**31 for the final answer of a text.

    That is what ``rewards.exact.final_answer`` finds, else the whole text.
    """
    return zlib.crc32((final_answer(text) or text).strip().encode()) & 0x7FFFFFFF


def without_dropped(rollout: Rollout, dropped: np.ndarray) -> tuple[Rollout, float]:
    """Takes members [N, G] bool out of their groups, and whole groups with their baseline.

    Returns:
      (the rollout, where those have ended as ABORTED; how many were taken out).
    """
    # without its baseline nothing is left to compare a group with
    out = dropped | (dropped & np.asarray(rollout.baseline)).any(axis=1, keepdims=True)
    stop = np.where(out, np.int32(StopReason.ABORTED), rollout.stop)
    return rollout.replace(stop=stop), float(out.sum())
