"""More requests than are waited for: the last long completions do not hold a step up.

"APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation"
(arXiv:2509.18521): more prompts are sampled than a training step needs, the step begins when enough
groups are whole, and the others go on in the next step from where they are, with the policy that
drew each of their tokens on record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.sampling.driver import Engine
from jrl.sampling.request import Completion, Request
from jrl.types import Rollout


class Collector:
    """Whole groups from an engine, in the order in which they become whole.

    What is not taken stays where it is, in the engine's slots and queue or here, across weight
    updates (``Engine.set_weights``). Departure from the paper: a group that waits here whole is
    taken before a step draws anything.

    Args:
      engine: the engine; nobody else may take its events.

    Attributes:
      partial: completions of groups that are not whole yet, by request number.
      whole: groups that nobody has taken.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sizes: dict[int, int] = {}
        self.partial: dict[int, list[Completion]] = {}
        self.whole: dict[int, list[Completion]] = {}

    def submit(self, request: Request) -> int:
        """Queues a request whose ``n`` completions are a group; returns its number."""
        number = self._engine.submit(request)
        self._sizes[number], self.partial[number] = request.n, []
        return number

    @property
    def waiting(self) -> int:
        """Groups that are not whole."""
        return len(self.partial)

    def take(self, groups: int) -> dict[int, list[Completion]]:
        """So many whole groups by request number, fewer when the engine has no more to do.

        The completions of a group are in the order of its members.
        """
        while len(self.whole) < groups and self._engine.busy:
            for event in self._engine.step():
                if event.completion is not None:
                    self._add(event.completion)
        numbers = list(self.whole)[:groups]
        return {number: self.whole.pop(number) for number in numbers}

    def _add(self, completion: Completion) -> None:
        number = completion.request
        group = self.partial[number]
        group.append(completion)
        if len(group) == self._sizes[number]:
            self.whole[number] = sorted(group, key=lambda c: c.member)
            del self.partial[number], self._sizes[number]


def to_rollout(
    groups: Mapping[int, Sequence[Completion]],
    requests: Mapping[int, Request],
    *,
    prompt_tokens: int,
    max_new_tokens: int,
) -> Rollout:
    """Groups as the record that training reads, on the host; N of them, all of one size.

    Args:
      groups: the completions of each request.
      requests: by number; others may be among them.
      prompt_tokens: P.
      max_new_tokens: T.
    """
    n, g = len(groups), len(next(iter(groups.values())))
    p, t = prompt_tokens, max_new_tokens
    prompts, prompt_lengths = np.zeros((n, p), np.int32), np.zeros(n, np.int32)
    tokens, lengths = np.zeros((n, g, t), np.int32), np.zeros((n, g), np.int32)
    logprobs, versions = np.zeros((n, g, t), np.float32), np.full((n, g, t), -1, np.int32)
    stop = np.zeros((n, g), np.int32)
    for i, (number, group) in enumerate(groups.items()):
        prompt = requests[number].tokens
        prompt_lengths[i] = len(prompt)
        prompts[i, : len(prompt)] = prompt
        for j, completion in enumerate(group):
            size = len(completion.tokens)
            lengths[i, j], stop[i, j] = size, completion.stop
            tokens[i, j, :size] = completion.tokens
            logprobs[i, j, :size] = completion.logprobs
            versions[i, j, :size] = completion.versions
    arrays: dict[str, Any] = {
        "prompt_tokens": prompts,
        "prompt_lengths": prompt_lengths,
        "tokens": tokens,
        "lengths": lengths,
        "mask": np.arange(t)[None, None] < lengths[:, :, None],
        "sampler_logprobs": logprobs,
        "versions": versions,
        "stop": stop,
        "baseline": np.zeros((n, g), bool),
    }
    return Rollout(**arrays).check()
