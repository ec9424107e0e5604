"""The samples that reward functions judge. Imports no JAX, as worker processes import it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jrl.types import Prompt

_PROMPT_FIELDS = ("id", "text", "tokens", "answer", "meta")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion to judge.

    In a worker process ``prompt`` is a plain object with the same attributes, so that the worker
    does not import JAX.

    Attributes:
      prompt: the prompt; ``prompt.answer`` is the reference answer.
      completion: the text, without special tokens.
      tokens: [n] int32, the completion's token ids, the stop token included.
      stop: why it ended: "stop_token", "length", "stop_string" or "aborted".
    """

    prompt: Prompt
    completion: str
    tokens: np.ndarray
    stop: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the prompt by its fields."""
        prompt = {name: getattr(self.prompt, name) for name in _PROMPT_FIELDS}
        prompt["meta"] = dict(prompt["meta"])
        return _restore, (prompt, self.completion, self.tokens, self.stop)


def _restore(prompt: dict[str, Any], completion: str, tokens: np.ndarray, stop: str) -> Sample:
    plain: Any = types.SimpleNamespace(**prompt)
    return Sample(plain, completion, tokens, stop)


RewardFn = Callable[[list[Sample]], list[float]]
"""Points for each of the samples: one sample a call, or one group (see ``whole_group``).

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
