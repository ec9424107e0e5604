"""The samples that reward functions judge. Imports no JAX, as worker processes import it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.types import Prompt

_PROMPT_FIELDS = ("id", "text", "tokens", "answer", "meta", "messages", "question")


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
      ends: [n] int32, the length of ``completion`` after each token, characters, 0 for those of
        earlier turns; () unless a part of the run has ``by_token = true``.
    """

    prompt: Prompt
    completion: str
    tokens: np.ndarray
    stop: str
    messages: tuple[Mapping[str, Any], ...] = ()
    step: int = 0
    steps: int = 0
    ends: Any = ()

    def by_token(
        self, pieces: Iterable[tuple[int, int, float]], *, spread: bool = False
    ) -> list[float]:
        """Points for each token, of points for pieces of the completion's text.

        Those of a piece are paid at the token with its last character, or in equal shares at each
        of its tokens. A piece without a character is paid nowhere.

        Args:
          pieces: (begin, end, points), characters of ``completion``.
          spread: whether all tokens of a piece have a share.

        Raises:
          UserError: a piece is not within the text, or it is not known where tokens end.

        >>> sample = Sample(None, "1. a 2. b", np.arange(3), "length", ends=np.array([4, 8, 9]))
        >>> sample.by_token([(0, 4, 1.0), (5, 9, 0.5)])
        [1.0, 0.0, 0.5]
        """
        if len(self.ends) != len(self.tokens):
            raise UserError(
                "it is not known where tokens end in the text; set by_token = true in the part's"
                " table of [rewards]"
            )
        points = np.zeros(len(self.tokens))
        for begin, end, value in pieces:
            if not 0 <= begin <= end <= len(self.completion):
                size = len(self.completion)
                raise UserError(f"piece {(begin, end)} is not within a text of {size} characters")
            if begin == end:
                continue
            last = int(np.searchsorted(self.ends, end))
            first = int(np.searchsorted(self.ends, begin, side="right")) if spread else last
            points[first : last + 1] += value / (last + 1 - first)
        return points.tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the prompt by its fields."""
        prompt = {name: getattr(self.prompt, name, ()) for name in _PROMPT_FIELDS}
        prompt["meta"] = dict(prompt["meta"])
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restore, (prompt, {name: x for name, x in values.items() if name != "prompt"})


def unshared(sample: Sample) -> Sample:
    """The sample with a row of its own, as a worker process has it.

    What a function does to lists and dicts of one sample would else be read by the next calls.
    """
    prompt = copy.copy(sample.prompt)
    for name in ("meta", "answer"):
        object.__setattr__(prompt, name, _copied(getattr(prompt, name, ())))
    return dataclasses.replace(sample, prompt=prompt)


def _copied(value: Any) -> Any:
    """Lists and dicts copied at any depth; what is no value of JSON as it is."""
    if type(value) is list:
        return [_copied(item) for item in value]
    return {k: _copied(x) for k, x in value.items()} if type(value) is dict else value


def _restore(prompt: dict[str, Any], values: dict[str, Any]) -> Sample:
    plain: Any = types.SimpleNamespace(**prompt)
    return Sample(plain, **values)


Points = float | None
"""A number, finite in float32, or None for no opinion: the part is left out of the sample's sum."""

Returned = Points | list[float]
"""Points, or of a part with ``by_token = true`` [n] numbers, one for each of ``Sample.tokens``."""


def total(points: Returned) -> float:
    """A reward as one number: the sum of those per token; 0 for no opinion."""
    return float(sum(points)) if isinstance(points, list) else points or 0.0


RewardFn = Callable[[list[Sample]], Sequence[Returned]]
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


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a reward function and their defaults."""
    _, *options = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in options if p.kind is not p.VAR_KEYWORD}


def options_of(other: Callable[..., Any], *without: str, **defaults: Any) -> Callable[[F], F]:
    """Gives the ``**options`` of a reward function the names and defaults that another one has.

    All but those ``without``, and with these ``defaults`` in place of the other's.

    >>> def timed(samples, seconds=4.0, repeats=1): ...
    >>> @options_of(timed, "repeats", seconds=2.0)
    ... def fast(samples, least=0.1, **options):
    ...     return options
    >>> inspect.signature(fast), fast([]), fast([], seconds=1.0)
    (<Signature (samples, least=0.1, *, seconds=2.0)>, {'seconds': 2.0}, {'seconds': 1.0})
    """
    _, *theirs = inspect.signature(other).parameters.values()
    left = [p.replace(kind=p.KEYWORD_ONLY) for p in theirs if p.name not in without]
    added = [p.replace(default=defaults.get(p.name, p.default)) for p in left]

    def mark(function: F) -> F:
        *mine, _ = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            return function(*args, **{p.name: p.default for p in added} | options)

        called.__signature__ = inspect.Signature([*mine, *added])  # type: ignore[attr-defined]
        return called  # type: ignore[return-value]

    return mark
