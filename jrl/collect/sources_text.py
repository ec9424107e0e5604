"""Groups of prompts in text, judged by reward functions on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.collect.members import join_drawn, plain_ask
from jrl.collect.sources import FromPrompts, Groups, counted_draw, divided, entries, join_groups
from jrl.data.prompts import pad_prompts
from jrl.judging.host import HostScorer, without_silent
from jrl.judging.row_calls import RowCalls
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.pool import RewardPool
from jrl.sampling.params import SamplingParams
from jrl.sampling.sequences import Members
from jrl.types import SILENT, Array, Prompt, Rollout, stream
from jrl.types.asks import Ask, DrawRequest, Tokens

compiled_stream = jax.jit(stream, static_argnums=1)
"""``stream`` as one program, for use outside of others."""


def root_key(request: DrawRequest) -> Any:
    """The key that draws of text and of episodes begin with: evaluations have one of their own."""
    if request.split == "eval":
        return compiled_stream(request.key, "eval", np.int32(0))
    return request.key


class TextSampler(NamedTuple):
    """Sampler of a request's members for prompts in text.

    Attributes:
      program: ``jax.jit`` of ``generate`` with its keyword arguments bound; None draws nothing.
      sampling_params: scalars.
      temperature: theirs, where asks give some members another one.
    """

    program: Callable[..., tuple[Rollout, Array]] | None
    sampling_params: SamplingParams | None
    temperature: float = 1.0

    def __call__(
        self, request: DrawRequest, prompts: Tokens, limit: int
    ) -> tuple[Rollout, dict[str, Any], dict[str, Any]]:
        """(rollout on the host, labels, counts) of N prompts; ``limit`` cuts a demonstration."""
        tickets, _ = entries(request)
        key = compiled_stream(root_key(request), request.stream, request.step)

        def sample(prompts: Tokens, members: Members, ask: Ask) -> tuple[Any, ...]:
            assert self.program is not None
            params, version = request.weights[ask.policy], request.versions[ask.policy]
            arguments = key, params, prompts.ids, prompts.lengths, self.sampling_params
            # A tree has its members from its program alone.
            more = (members,) if ask.tree is None else ()
            return counted_draw(jax.device_get(self.program(*arguments, version, tickets, *more)))

        plain = plain_ask(request.asks, self.temperature)
        together = None if plain is None else sample(prompts, plain[1], plain[0])
        joined = join_drawn(request.asks, together, sample, prompts, self.temperature, limit)
        return jax.device_get(joined[0]), *joined[1:]


@dataclasses.dataclass(frozen=True, eq=False)
class TextSource(FromPrompts):
    """Prompts in text, a compiled sampler, and reward functions on the host; a ``Source``.

    Attributes:
      all_prompts: in the data's order.
      width: P, tokens.
      seed: of the order, or None for the data's own order.
      program: ``jax.jit`` of ``generate`` with its keyword arguments bound; None draws
        nothing.
      sampling_params: scalars.
      pool: the reward functions; None gives every completion 0 points.
      tokenizer: turns completions into text for them.
      max_new_tokens: T, where a solution is cut.
      temperature: the run's, where asks give some members another one.
      lines: ids that end a line, where lines are steps, the label "step"; () for no label.
      name: of what is drawn for, where several processes share the judging.
      steps: training steps of the run, which reward functions may read.
      free: frees what ``program`` holds between draws.
      draws: parts that the prompts of a request are sampled in, one after the other.
      calls: about the members of all parts but the last, which begin while the next is sampled.
    """

    all_prompts: Sequence[Prompt]
    width: int
    seed: int | None
    program: Callable[..., tuple[Rollout, Array]] | None
    sampling_params: SamplingParams | None
    pool: RewardPool | None
    tokenizer: Tokenizer
    max_new_tokens: int = 0
    temperature: float = 1.0
    lines: Sequence[int] = ()
    name: str = "train"
    steps: int = 0
    free: Callable[[], None] | None = None
    draws: int = 1
    calls: RowCalls | None = None

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        parts, groups_by_part = divided(request, self.draws), list[Groups]()
        for i, part in enumerate(parts):
            groups = self._sampled(part)
            if self.calls is not None and i + 1 < len(parts):
                first = i * len(groups.subject)
                self.calls.submit_groups(groups.subject, groups.rollout, first)
            groups_by_part.append(groups)
        groups = groups_by_part[0] if len(groups_by_part) == 1 else join_groups(groups_by_part)
        if self.calls is not None:
            self.calls.drain()
        judged = self._judge(groups.subject, groups.rollout, int(request.step))
        return judged._replace(counts=judged.counts | groups.counts, ids=judged.ids | groups.ids)

    def _sampled(self, request: DrawRequest) -> Groups:
        """The groups of a request, without points."""
        _, rows = entries(request)
        chosen, _ = self.prompts(request.key, rows)
        prompts = Tokens(*pad_prompts(chosen, self.width))
        sampler = TextSampler(self.program, self.sampling_params, self.temperature)
        rollout, labels, counts = sampler(request, prompts, self.max_new_tokens)
        if len(self.lines):
            ends = np.isin(rollout.tokens, self.lines)
            labels = labels | {"step": (np.cumsum(ends, axis=2) - ends).astype(np.int32)}
        points = np.zeros((*rollout.stop.shape, 0), np.float32)
        return Groups(rollout, points, chosen, counts, labels)

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Rewards of completions, all reward functions at once; see ``judging.host.judged``."""
        return self._judge(prompts, rollout, step)

    def _judge(self, prompts: list[Prompt], rollout: Rollout, step: int) -> Groups:
        n, g, _ = rollout.tokens.shape
        ids = {"prompt": np.array([prompt.id for prompt in prompts], np.int32)}
        if self.pool is None:
            return Groups(rollout, np.zeros((n, g, 1), np.float32), prompts, {}, ids)
        scorer = HostScorer(self.pool, self.tokenizer, self.name, self.steps)
        begun = None if self.calls is None else self.calls.begun
        scores = scorer(prompts, rollout, step, begun=begun)
        rewards, silent = without_silent(scores.points)
        ids |= {"answer": scores.answers, SILENT: silent}
        stats = None if scores.paid is None else {"paid": scores.paid}
        return Groups(scores.rollout, rewards, prompts, scores.counts, ids, stats)

    def finish(self, complete: bool) -> None:
        """As ``Source.finish``."""
        if self.free is not None:
            self.free()
