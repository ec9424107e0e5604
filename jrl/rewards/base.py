"""The samples that reward functions judge. Imports no JAX, as worker processes import it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jrl.types import Prompt

_PROMPT_FIELDS = ("id", "text", "tokens", "answer", "meta", "messages")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion to judge.

    In a worker process ``prompt`` is a plain object with the same attributes, so that the worker
    does not import JAX.

    Attributes:
      prompt: the prompt; ``prompt.answer`` is the reference answer.
      completion: the text, without special tokens; of an episode that of its last turn.
      tokens: [n] int32, the completion's token ids, the stop token included; of an episode those
        of all turns of the policy.
      stop: why it ended: "stop_token", "length", "stop_string" or "aborted"; of an
        episode also "done" and "turns".
      messages: of an episode, what came after its opening: messages with role and content, those
        of the policy as "assistant". () for a completion.
      step: training steps done when it was drawn.
      steps: training steps of the run; 0 where it is not known.
    """

    prompt: Prompt
    completion: str
    tokens: np.ndarray
    stop: str
    messages: tuple[Mapping[str, Any], ...] = ()
    step: int = 0
    steps: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the prompt by its fields."""
        prompt = {name: getattr(self.prompt, name, ()) for name in _PROMPT_FIELDS}
        prompt["meta"] = dict(prompt["meta"])
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restore, (prompt, {name: x for name, x in values.items() if name != "prompt"})


def _restore(prompt: dict[str, Any], values: dict[str, Any]) -> Sample:
    plain: Any = types.SimpleNamespace(**prompt)
    return Sample(plain, **values)


Points = float | None
"""A number, finite in float32, or None for no opinion: the part is left out of the sample's sum."""

RewardFn = Callable[[list[Sample]], list[Points]]
"""Points for each of the samples: one sample a call, one group (see ``whole_group``) or all samples
of a step (see ``whole_batch``).

If the function has an attribute ``prepare``, each worker process calls that once before the first
call, outside of the time limit.
"""

F = TypeVar("F", bound=Callable[..., Any])


def whole_group(function: F) -> F:
    """Marks a reward function that must see all samples of a prompt together.

    Unmarked functions are called with one sample at a time. The time limit is for one call.

    >>> @whole_group
    ... def shortest(samples):
    ...     least = min(len(s.tokens) for s in samples)
    ...     return [float(len(s.tokens) == least) for s in samples]
    >>> shortest.over
    'group'
    """
    function.over = "group"  # type: ignore[attr-defined]
    return function


def whole_batch(function: F) -> F:
    """Marks a reward function that must see all samples of a step together.

    The time limit is for one call.

    >>> @whole_batch
    ... def above_the_mean(samples):
    ...     mean = sum(len(s.tokens) for s in samples) / len(samples)
    ...     return [float(len(s.tokens) < mean) for s in samples]
    >>> above_the_mean.over
    'batch'
    """
    function.over = "batch"  # type: ignore[attr-defined]
    return function
