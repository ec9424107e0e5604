"""Wrappers of a source for its rewards: the points of all parts of a run, and finite sums.

A reward is finite in float32 (``rewards.call``, ``episodes.host``), but a weighted sum, which
advantages are computed from, need not be, and would end a run as a gradient that is not finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.collect.groups import counted
from jrl.collect.sources import Around, Groups, Source, added_counts
from jrl.collect.sources_text import TextSource
from jrl.errors import UserError
from jrl.judging.host import HostScorer, Texts, without_dropped, without_silent
from jrl.judging.judges import judges_of
from jrl.judging.likelihood import Likelihood, make_likelihood
from jrl.judging.row_calls import EndsRows, RowCalls
from jrl.judging.text_parts import TextParts
from jrl.rewards.combine import Combined, combined
from jrl.rewards.model import at_progress, at_turn_ends
from jrl.rewards.pool import RewardPool
from jrl.setup.reward_parts import RunRewards
from jrl.setup.run import Run
from jrl.system.float32 import sum_overflows
from jrl.types import NOTHING, SILENT, Params, Prompt, Rollout, StopReason, opinions
from jrl.types.asks import DrawRequest

PartPoints = Mapping[str, Any]
"""Points [N, G] float32 by reward part; NaN for no opinion."""


class StepWeights(NamedTuple):
    """A training step, and the weights of the policies as it begins.

    Attributes:
      step: training steps done before it.
      weights: parameters by policy; {} where no stage reads them.
    """

    step: int
    weights: Mapping[str, Params]


Stage = Callable[[Groups, PartPoints, StepWeights], tuple[Groups, PartPoints]]
"""(groups, points of earlier parts, step and weights) -> (groups, points of further parts)."""


STEPS: Mapping[str, tuple[str, Callable[..., np.ndarray]]] = {
    "turn": ("turn", at_turn_ends),
    "step": ("step", at_turn_ends),
    "progress": ("step", at_progress),
}
"""``by`` of a reward model that scores steps -> (label of the steps, (values, mask, steps) ->
points by token)."""


class JudgedParts(Around):
    """A source that adds reward parts to those of the source it wraps.

    Args:
      source: of groups with some of the parts.
      gives: names of its parts, in the order of its columns.
      stages: compute further parts, in this order.
      names: all parts, in the order of the resulting columns.
      combined: the parts computed from others.
      calls: calls that begin while the source samples; None for none.
      certain: parts that always have an opinion. A NaN of these is a fault: it must reach the loss
        as a non-finite number, not count as "no opinion".
    """

    def __init__(
        self,
        source: Source,
        gives: Sequence[str],
        stages: Sequence[Stage],
        names: Sequence[str],
        combined: Sequence[Combined] = (),
        certain: Sequence[str] = (),
        calls: RowCalls | None = None,
    ) -> None:
        super().__init__(source)
        self._calls = calls
        self._certain = tuple(certain)
        self._gives, self._stages, self._names = tuple(gives), tuple(stages), tuple(names)
        self._combined = tuple(combined)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        if self._calls is None:
            return self._judged(self.source.draw(request), _at(request))
        with self._calls.step(int(request.step)):
            groups = self.source.draw(request)
            self._calls.drain()
            return self._judged(groups, _at(request))

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """As ``Source.judge``."""
        judged = self.source.judge(subject, prompts, rollout, step)
        return self._judged(judged, StepWeights(step, NOTHING))

    def _judged(self, groups: Groups, at: StepWeights) -> Groups:
        rewards, ids = jax.device_get((groups.rewards, groups.ids))
        rewards = np.where(opinions(np.asarray(rewards), ids), rewards, np.nan)
        points: dict[str, Any] = dict(zip(self._gives, np.moveaxis(rewards, -1, 0), strict=True))
        for stage in self._stages:
            groups, more = stage(groups, points, at)
            points = {**more, **points}
        if self._combined:
            members = np.asarray(counted(groups.rollout))
            listed = isinstance(groups.subject, list)
            rows = [prompt.meta for prompt in groups.subject] if listed else ()
            points = combined(self._combined, points, members, rows, at.step)
        faults = [np.isnan(points[name]) for name in self._certain]
        broken = np.any(faults, axis=0) if faults else np.zeros(groups.rollout.stop.shape, bool)
        rewards, silent = without_silent(np.stack([points[n] for n in self._names], axis=-1))
        rewards, silent = np.where(broken[..., None], np.nan, rewards), np.where(broken, 0, silent)
        rewards, silent = rewards.astype(np.float32), silent.astype(np.int32)
        return groups._replace(rewards=rewards, ids=groups.ids | {SILENT: silent}, spoken=None)


def _at(request: DrawRequest) -> StepWeights:
    return StepWeights(int(request.step), request.weights)


def with_paid(groups: Groups, paid: np.ndarray | None) -> Groups:
    """The groups with ``paid`` [N, G, T] float32 added to the rewards per token; None adds none."""
    if paid is None:
        return groups
    stats = jax.device_get(groups.stats or {})
    before = np.asarray(stats.get("paid", 0), np.float32)
    return groups._replace(stats={**stats, "paid": before + paid})


def function_stage(
    scorer: HostScorer,
    prompts_of: Callable[[Groups], Sequence[Prompt]],
    calls: RowCalls | None = None,
) -> Stage:
    """The stage of the reward functions on the host.

    Args:
      scorer: that calls them.
      prompts_of: (groups) -> their N prompts, as the functions see them.
      calls: calls that began while members were sampled; None for none.
    """

    def stage(groups: Groups, points: PartPoints, at: StepWeights) -> tuple[Groups, PartPoints]:
        rollout = jax.device_get(groups.rollout)
        spoken = groups.spoken or ()
        begun = None if calls is None else calls.begun
        scores = scorer(prompts_of(groups), rollout, at.step, spoken, begun)
        answers = {} if "answer" in groups.ids else {"answer": scores.answers}
        points_of = np.moveaxis(scores.points, -1, 0)
        groups = with_paid(groups, scores.paid)
        groups = groups._replace(
            rollout=scores.rollout,
            ids=groups.ids | answers,
            counts=added_counts(groups.counts, scores.counts),
        )
        return groups, dict(zip(scorer.pool.functions, points_of, strict=True))

    return stage


def rendered_prompts(task: Any) -> Callable[[Groups], list[Prompt]]:
    """The problems of a task as prompts, each with a correct completion as its answer."""

    def prompts(groups: Groups) -> list[Prompt]:
        problems, rows = jax.device_get((groups.subject, groups.ids["prompt"]))
        out = []
        for i, row in enumerate(np.asarray(rows).tolist()):
            problem = jax.tree.map(lambda x, i=i: x[i], problems)
            text, answer = task.render(problem)
            tokens = np.asarray(problem.tokens)[: int(problem.length)]
            out.append(Prompt(row, text, tokens, answer))
        return out

    return prompts


def model_stage(rewards: RunRewards) -> Stage:
    """The reward models of a run that read the policy's tokens."""

    def stage(groups: Groups, points: PartPoints, at: StepWeights) -> tuple[Groups, PartPoints]:
        more, paid = dict[str, Any](), None
        for name, model in rewards.models.items():
            if model.by == "completion":
                more[name] = model(groups.rollout)
                continue
            mask = np.asarray(jax.device_get(groups.rollout.mask))
            label, pays = STEPS[model.by]
            # Without recorded steps, as in evaluation, a completion is one step.
            steps = jax.device_get(groups.ids.get(label, np.zeros(mask.shape, np.int32)))
            values = pays(model.of_tokens(groups.rollout), mask, steps)
            more[name] = values.sum(axis=-1)
            paid = rewards.weights[name] * values + (0 if paid is None else paid)
        return with_paid(groups, paid), more

    return stage


def judge_stage(judges: TextParts, prompts_of: Callable[[Groups], Sequence[Prompt]]) -> Stage:
    """A stage of judges, which may read the rewards so far, and models that read text."""

    def stage(groups: Groups, points: PartPoints, at: StepWeights) -> tuple[Groups, PartPoints]:
        rollout = jax.device_get(groups.rollout)
        texts = Texts(prompts_of(groups), rollout, judges.tokenizer, groups.spoken or ())
        more, dropped, counts, paid = judges(texts, points, at.step, at.weights)
        groups = with_paid(groups, paid)
        if dropped.any():
            rollout, left_out = without_dropped(rollout, dropped)
            groups = groups._replace(rollout=rollout)
            before = groups.counts.get("reward_dropped", 0.0)
            counts["reward_dropped"] = before + left_out
        return groups._replace(counts={**groups.counts, **counts}), more

    return stage


def likelihood_stage(
    parts: Mapping[str, Likelihood], prompts_of: Callable[[Groups], Sequence[Prompt]]
) -> Stage:
    """The policy's own probabilities of the answers."""

    def stage(groups: Groups, points: PartPoints, at: StepWeights) -> tuple[Groups, PartPoints]:
        if "context" in groups.ids:
            raise UserError(
                f"rewards.{next(iter(parts))}: the policy does not read an episode with several"
                " contexts at once; set data.contexts to 1, or remove the part"
            )
        rollout, turns = jax.device_get((groups.rollout, groups.ids.get("turn")))
        more = dict[str, Any]()
        for name, part in parts.items():
            more[name], paid = part(rollout, turns, prompts_of(groups), at.weights)
            groups = with_paid(groups, paid if part.table.by == "turn" else None)
        return groups, more

    return stage


def judged_parts(
    run: Run,
    source: Source,
    pool: RewardPool | None,
    split: str = "train",
) -> Source:
    """The source with all reward parts of the run: functions, models, judges, combined parts.

    Args:
      run: from ``train.build.setup``.
      source: computes the parts of the data; a ``TextSource`` those of functions, too. If it
        reports rows as they end (``EndsRows``), calls about them begin at once.
      pool: the reward functions on the host.
      split: "train" or "eval".
    """
    rewards, stages = run.rewards, list[Stage]()
    # An environment's parts win over functions of that name.
    gives = getattr(source, "parts", rewards.given_by("data"))
    functions = rewards.given_by("function")
    on_host, judges, calls = None, None, None
    if functions and pool is not None:
        on_host = HostScorer(pool, run.tokenizer, split, run.config.train.steps)
    if rewards.given_by("judge"):
        judges = judges_of(run, split)
    certain, staged = gives, on_host
    if isinstance(source, EndsRows) and (on_host or judges):
        calls = RowCalls(on_host, judges)
        source.ended = calls.submit
    if isinstance(source, TextSource):
        gives, certain, staged = functions, (), None  # it calls the functions itself
        if source.draws > 1 and (on_host or judges):
            calls = RowCalls(on_host, judges)
            source = dataclasses.replace(source, calls=calls)
    # Models read first: the calls of functions that began as rows ended continue beside them.
    if rewards.models:
        stages.append(model_stage(rewards))
    if rewards.text_models:
        models = TextParts(rewards.text_models, run.tokenizer, run.config.train.steps)
        stages.append(judge_stage(models, prompts_seen(run)))
    if staged is not None:
        stages.append(function_stage(staged, prompts_seen(run), calls))
    if judges is not None:
        stages.append(judge_stage(judges, prompts_seen(run)))
    if names := rewards.given_by("likelihood"):
        parts = {name: make_likelihood(run, name) for name in names}
        stages.append(likelihood_stage(parts, prompts_seen(run)))
    if not stages and not rewards.combined and calls is None:
        return source
    names, certain = tuple(rewards.weights), (*certain, *rewards.models)
    return JudgedParts(source, gives, stages, names, rewards.combined, certain, calls)


def prompts_seen(run: Run) -> Callable[[Groups], Any]:
    """(groups) -> their prompts as reward functions see them."""
    rendered = rendered_prompts(run.kind.task)
    return lambda groups: groups.subject if isinstance(groups.subject, list) else rendered(groups)


class FiniteSums(Around):
    """A source in which a weighted sum beyond float32 is an error of its completion's rewards.

    Args:
      source: of groups with all reward parts.
      weights: reward part -> weight, in the order of the columns.
      on_error: what such a completion gets, ``reward_pool.on_error``.
    """

    def __init__(self, source: Source, weights: Mapping[str, float], on_error: str) -> None:
        super().__init__(source)
        self._weights, self._on_error = dict(weights), on_error

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        return self._checked(self.source.draw(request))

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """As ``Source.judge``."""
        return self._checked(self.source.judge(subject, prompts, rollout, step))

    def _checked(self, groups: Groups) -> Groups:
        """The groups, and ``reward_errors`` counted; UserError where an error stops the run."""
        rewards, stop = map(np.asarray, jax.device_get((groups.rewards, groups.rollout.stop)))
        counted = (stop < StopReason.FAILED) & (stop != StopReason.ABORTED)
        over = counted & sum_overflows(rewards, list(self._weights.values()))
        if not over.any():
            return groups
        if self._on_error == "stop":
            row, member = np.argwhere(over)[0]
            prompt = int(np.asarray(jax.device_get(groups.ids["prompt"]))[row])
            raise UserError(f"{self._text(rewards[row, member])} (prompt {prompt}); {_REMEDY}")
        counts = dict(groups.counts)
        counts["reward_errors"] = counts.get("reward_errors", 0.0) + float(over.sum())
        groups = groups._replace(counts=counts)
        if self._on_error == "drop":
            rollout, _ = without_dropped(jax.device_get(groups.rollout), over)
            return groups._replace(rollout=rollout)
        stats: dict[str, Any] = dict(groups.stats or {})
        if "paid" in stats:
            paid = np.asarray(jax.device_get(stats["paid"]))
            stats["paid"] = np.where(over[..., None], np.float32(0), paid)
        rewards = np.where(over[..., None], np.float32(0), rewards)
        return groups._replace(rewards=rewards, stats=stats)

    def _text(self, rewards: np.ndarray) -> str:
        """The sum in words, the parts that it is made of named."""
        terms = [
            f"{weight:g} * {value:g} of rewards.{name}"
            for (name, weight), value in zip(self._weights.items(), rewards.tolist(), strict=True)
            if weight and value
        ]
        return f"the sum of {' and '.join(terms)} is infinite in float32"


_REMEDY = 'lower a weight or a reward, or set reward_pool.on_error = "zero" or "drop"'
