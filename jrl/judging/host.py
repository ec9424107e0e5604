"""Rewards of completions and episodes by functions on the host.

The functions are a ``RewardPool``; language models that score are ``judging.judges``.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Sample
from jrl.rewards.exact import final_answer
from jrl.rewards.pool import Begun, RewardPool
from jrl.sampling.text import TextStream
from jrl.system.processes import deal
from jrl.types import Prompt, Rollout, StopReason

Spoken = Sequence[Sequence[Sequence[Mapping[str, Any]]]]
"""[N][G] messages of episodes after their openings."""


class HostScores(NamedTuple):
    """Rewards of N groups of G members, from functions on the host.

    Attributes:
      rollout: on the host; members to be dropped have ended as ABORTED.
      points: [N, G, R] float32, NaN where a function has no opinion.
      answers: [N, G] int32, a number for each final answer: equal answers have equal numbers.
      counts: by name.
      paid: [N, G, T] float32, weighted points of the tokens; None where no function gives them by
        token.
    """

    rollout: Rollout
    points: np.ndarray
    answers: np.ndarray
    counts: dict[str, float]
    paid: np.ndarray | None


class HostScorer(NamedTuple):
    """Computes rewards of members with functions on the host.

    Attributes:
      pool: the reward functions.
      tokenizer: turns completions into text for them.
      name: of the rewards, for processes that share the work.
      steps: training steps of the run.
    """

    pool: RewardPool
    tokenizer: Tokenizer
    name: str = "train"
    steps: int = 0

    def __call__(
        self,
        prompts: Sequence[Prompt],
        rollout: Rollout,
        step: int,
        spoken: Spoken = (),
        begun: Begun | None = None,
    ) -> HostScores:
        """Points of N groups of G members.

        Each process scores a share of the prompts and receives the other points, so all have the
        same points even if a reward function is not deterministic.

        Args:
          prompts: N of them.
          rollout: on the host.
          step: training steps done.
          spoken: messages of episodes after their openings; () for completions.
          begun: calls about members that began when those ended.
        """
        begin = time.perf_counter()
        share = _Share(self, prompts, rollout, step, spoken, begun)
        # Text is decoded and judged where it is a process's turn; numbers travel, texts do not.
        n = len(prompts)
        if self.pool.over_batch:  # one process sees all samples
            everything, counts = deal(self.name, 1, share.whole)
            points, dropped, answers, paid = (x[0] for x in everything)
        else:
            (points, dropped, answers, paid), counts = deal(self.name, n, share.rows)
        counts["reward_seconds"] = time.perf_counter() - begin
        if dropped.any():
            rollout, counts["reward_dropped"] = without_dropped(rollout, dropped)
        return HostScores(rollout, points, answers, counts, paid if self.pool.by_token else None)


Judged = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""(points [n, G, R] float32, dropped [n, G] bool, answers [n, G] int32, paid [n, G, T] float32, T
being 0 where no function gives points by token)."""


class _Share(NamedTuple):
    """N groups whose members each process scores a share of."""

    scorer: HostScorer
    prompts: Sequence[Prompt]
    rollout: Rollout
    step: int
    spoken: Spoken
    begun: Begun | None

    def whole(self, unit: np.ndarray) -> tuple[Judged, dict[str, float]]:
        """All groups as one unit, in the process that has it; none in the others."""
        judged, counts = self.rows(np.arange(len(self.prompts) if len(unit) else 0))
        points, dropped, answers, paid = (x[None][: len(unit)] for x in judged)
        return (points, dropped, answers, paid), counts

    def rows(self, rows: np.ndarray) -> tuple[Judged, dict[str, float]]:
        """Some groups, and counts."""
        g = self.rollout.tokens.shape[1]
        # Absent members were not asked for: there is nothing to score.
        exists = np.asarray(self.rollout.stop)[rows] != StopReason.ABSENT
        if self.spoken:  # failed episodes have no transcript to score
            exists &= np.asarray(self.rollout.stop)[rows] < StopReason.FAILED
        places = [
            (n, j) for n, present in enumerate(exists) for j in np.flatnonzero(present).tolist()
        ]
        samples = [self._sample(rows[n], j) for n, j in places]
        scores_of = self.scorer.pool.scores
        if self.begun is not None:
            scores_of = partial(scores_of, begun=self.begun)
        scored, outcome = scores_of(samples, group=g if exists.all() else None)
        answers = np.zeros((len(rows), g), np.int32)
        answers[exists] = [answer_number(s.completion) for s in samples]
        points = np.zeros((len(rows), g, scored.shape[1]), np.float32)
        points[exists] = scored
        dropped = np.zeros((len(rows), g), bool)
        dropped[exists] = outcome.dropped
        by_token = self.scorer.pool.by_token
        paid = np.zeros((len(rows), g, self.rollout.tokens.shape[2] * by_token), np.float32)
        for (n, j), tokens in zip(places, outcome.paid, strict=bool(by_token)):
            paid[n, j, self._columns(rows[n], j)] = tokens
        return (points, dropped, answers, paid), outcome.counts

    def _columns(self, i: int, j: int) -> np.ndarray:
        """[n] int: columns of a member's row that hold the tokens of its sample."""
        texts = Texts(self.prompts, self.rollout, self.scorer.tokenizer, self.spoken)
        return texts.columns(i, j)

    def _sample(self, i: int, j: int) -> Sample:
        texts = Texts(self.prompts, self.rollout, self.scorer.tokenizer, self.spoken)
        sample = texts.sample(i, j, self.step, self.scorer.steps)
        return with_ends(sample, self.scorer.tokenizer) if self.scorer.pool.by_token else sample


class Texts(NamedTuple):
    """Texts of the members of N groups, for reward functions, judges and models.

    Attributes:
      prompts: N of them.
      rollout: on the host.
      tokenizer: turns completions into text.
      spoken: messages of episodes after their openings; () for completions.
    """

    prompts: Sequence[Prompt]
    rollout: Rollout
    tokenizer: Tokenizer
    spoken: Spoken = ()

    def columns(self, i: int, j: int) -> np.ndarray:
        """[n] int: columns of the row of member j of group i that hold its sample's tokens."""
        length = int(self.rollout.lengths[i, j])
        if self.spoken and self.spoken[i][j]:
            return np.flatnonzero(np.asarray(self.rollout.mask[i, j, :length]))
        return np.arange(length)

    def sample(self, i: int, j: int, step: int, steps: int) -> Sample:
        """Member j of group i; ``step`` of the run's ``steps`` training steps are done."""
        spoken = self.spoken[i][j] if self.spoken else ()
        tokens = np.asarray(self.rollout.tokens[i, j])[self.columns(i, j)]
        stop = StopReason(int(self.rollout.stop[i, j]))
        return make_sample(self.prompts[i], tokens, stop, spoken, self.tokenizer, step, steps)


def make_sample(
    prompt: Prompt,
    tokens: np.ndarray,
    stop: StopReason,
    spoken: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    step: int,
    steps: int,
) -> Sample:
    """The ``Sample`` of a member, for reward functions and judges.

    Args:
      prompt: its problem.
      tokens: [n] int32, those of the policy.
      stop: why it ended.
      spoken: messages of an episode after its opening; () for a completion.
      tokenizer: turns completions into text.
      step: training steps done.
      steps: of the run.
    """
    last = [m["content"] for m in spoken if m["role"] == "assistant"][-1:]
    return Sample(
        prompt=prompt,
        completion=last[0] if last else tokenizer.decode(tokens.tolist()),
        tokens=np.array(tokens, np.int32),
        stop=stop.name.lower(),
        messages=tuple(spoken),
        step=step,
        steps=steps,
    )


def with_ends(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """The sample with ``ends``, which ``Sample.by_token`` needs."""
    stream = TextStream(tokenizer)
    stream.push(sample.tokens.tolist())
    stream.close()
    # In an episode the text is that of the last turn.
    before = len(stream.text) - len(sample.completion) if sample.messages else 0
    if not stream.text.endswith(sample.completion):
        return sample
    return dataclasses.replace(sample, ends=np.maximum(np.array(stream.ends, np.int32) - before, 0))


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
