"""Sources of one's own in a run: ``data.train = "source:FILE.py:function"``.

    def sums(sampler, tokenizer, largest=9):
        return Sums(sampler, tokenizer, largest)      # has the methods of ``sources.Source``

``sampler(request, prompts)`` draws a group of completions for each prompt, as the request asks.

Before anything compiles a run draws once from such a source, by a sampler of one token
(``tried_source``), so that what does not fit is an error of one line.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.collect.members import demonstration_rollout, flagged, widths
from jrl.collect.sources import (
    Around,
    Groups,
    Source,
    check_groups,
    check_source,
    simple_request,
)
from jrl.collect.sources_text import TextSampler
from jrl.config.secrets import reveal
from jrl.data.prompts import pad_prompts
from jrl.errors import UserError
from jrl.setup.run import Run
from jrl.types import Prompt, Rollout
from jrl.types.asks import DrawRequest, Tokens
from jrl.user_code import check_options, check_takes, load, made_by


class Sampler(NamedTuple):
    """The sampler of a run, for a source of one's own.

    Attributes:
      sampler: of prompts in text.
      width: P, tokens.
      limit: T, tokens.
      vocab_size: V.
    """

    sampler: TextSampler
    width: int
    limit: int
    vocab_size: int

    def __call__(self, request: DrawRequest, prompts: Sequence[Prompt]) -> Rollout:
        """A group of completions of each prompt, on the host.

        Args:
          request: whose asks and weights are used.
          prompts: N, one for each entry of the request, of at most ``width`` tokens.
        """
        tokens = padded(request, prompts, self.width, self.vocab_size)
        rollout, _, _ = self.sampler(request, tokens, self.limit)
        return rollout


def padded(request: DrawRequest, prompts: Sequence[Prompt], width: int, vocab_size: int) -> Tokens:
    """The prompts of a source of one's own as arrays [N, P].

    Raises:
      UserError: they are not N ``Prompt``, or the tokens of one are none, more than ``width``, or
        no ids of the vocabulary.
    """
    n = request.asks[0].entries
    if len(prompts) != n or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError(
            f"sampler(request, prompts) got {prompts!r:.60}; give {n} jrl.types.Prompt, one for"
            " each entry of the request"
        )
    for prompt in prompts:
        ids = np.asarray(prompt.tokens)
        if ids.shape == (0,):
            raise UserError(f"prompt {prompt.id} has no tokens; it needs at least one")
        # An id outside the vocabulary would read another token's embedding, silently.
        whole = ids.ndim == 1 and ids.dtype.kind in "iu"
        if not whole or not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UserError(
                f"prompt {prompt.id} has the tokens {prompt.tokens!r:.60}; give a list of ids from"
                f" 0 to {vocab_size - 1}, as tokenizer.encode returns"
            )
    return Tokens(*pad_prompts(prompts, width))


class CheckedSource(Around):
    """A source of one's own whose groups are checked as they are drawn.

    Args:
      source: has every part of one.
      parts: R, reward parts of the run.
    """

    def __init__(self, source: Source, parts: int) -> None:
        super().__init__(source)
        self._parts = parts

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``.

        Raises:
          UserError: the shapes are not those that were asked for.
        """
        return check_groups(self.source.draw(request), request, self._parts, self.source)

    def notes(self) -> dict[str, Any]:
        """As ``Source.notes``.

        Raises:
          UserError: they are no values that a checkpoint gives back as they are.
        """
        return check_notes(self.source.notes(), self.source)


def check_notes(notes: Any, source: Any) -> dict[str, Any]:
    """The notes of a source of one's own, if a checkpoint can hold them.

    Raises:
      UserError: they are no dict of JSON values and NumPy arrays, or a key in them is no text.
    """
    name = f"{type(source).__name__}.notes"
    if not isinstance(notes, dict):
        raise UserError(f"{name} returned {notes!r:.40}; return a dict, {{}} for no state")
    try:
        json.dumps(notes, default=_stored_array)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} returned {notes!r:.60}: {error}; return values of JSON and NumPy arrays, which"
            " checkpoints hold"
        ) from None
    # JSON makes texts of them, and the resumed source would look its numbers up in vain.
    if (key := _no_text_key(notes)) is not None:
        raise UserError(
            f"{name} returned the key {key!r:.40}; keys must be text, as in JSON: write str(key),"
            " and int(key) in resume"
        )
    if notes and not hasattr(source, "resume"):
        raise UserError(
            f"{name} returned {notes!r:.40}, and there is no method that a resumed run gives it to;"
            " write def resume(self, notes)"
        )
    return notes


def _no_text_key(value: Any) -> Any:
    """A key of a dict in a value of JSON that is no text; None for none."""
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        return wrong[0] if wrong else _no_text_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((x for x in map(_no_text_key, value) if x is not None), None)
    return None


def _stored_array(value: Any) -> None:
    """Lets arrays pass, which checkpoints hold beside JSON."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no value of JSON")


def make_own_source(run: Run, sampler: Any) -> CheckedSource:
    """The source that ``data.train`` names.

    Args:
      run: from ``train.build.setup``.
      sampler: a ``Sampler``, or what stands in for one before anything compiles.

    Raises:
      UserError: there is no such function, it does not take the sampler, the tokenizer and the
        options, or what it returns lacks a part.
    """
    data: Any = run.config.data
    key = f"data.train = {data.train!r}"
    make = load(data.place, "data.train")
    check_takes(make, ("sampler", "tokenizer"), key)
    arguments = {"sampler": sampler, "tokenizer": run.tokenizer}
    arguments |= reveal(data.free_options, "data")
    check_options(make, arguments, "data")
    source = check_source(made_by(make, key, **arguments))
    return CheckedSource(source, len(run.rewards.given_by("data")))


# ---------------------------------------------------------------- tried before anything compiles


class Unsampled(NamedTuple):
    """A run's sampler before it compiles: completions of one token that no policy sampled.

    Attributes:
      width: P, tokens.
      limit: T, tokens.
      vocab_size: V.
    """

    width: int
    limit: int
    vocab_size: int

    def __call__(self, request: DrawRequest, prompts: Sequence[Prompt]) -> Rollout:
        """As ``Sampler``."""
        tokens = padded(request, prompts, self.width, self.vocab_size)
        return flagged(unsampled(tokens, widths(request.asks), self.limit), request.asks)


def unsampled(prompts: Tokens, members: int, limit: int) -> Rollout:
    """Completions [N, ``members``, ``limit``] of one token each, whose id is 0."""
    n = len(prompts.lengths)
    tokens, ones = np.zeros((n, limit), np.int32), np.ones(n, np.int32)
    return demonstration_rollout(
        prompts.ids, prompts.lengths, tokens, ones, np.ones(n, bool), members
    )


def tried(key: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result; what fails is a UserError that names the key, and the line where it can."""
    try:
        return function(*args)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(key) else f"{key}: {text}") from None


def _closed(value: Any) -> Any:
    """The value; a coroutine is closed, or Python would warn that nobody awaited it."""
    if inspect.iscoroutine(value):
        value.close()
    return value


def _has_length(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def tried_source(run: Run) -> CheckedSource:
    """A run's source of one's own, by a sampler of one token; what a run calls works.

    Raises:
      UserError: one of them fails, or returns something else than a source does.
    """
    limit, size = run.config.sampling.max_new_tokens, run.network.vocab_size
    checked = make_own_source(run, Unsampled(run.width, limit, size))
    data: Any = run.config.data
    key, n = f"data.train = {data.train!r}", run.config.train.prompts
    name, tickets = type(checked.source).__name__, np.arange(n, dtype=np.int32)
    rows = np.asarray(_closed(made_by(checked.order, key, tickets)))
    if rows.shape != (n,) or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(
            f"{key}: {name}.order returned {rows.dtype} of shape {rows.shape} for {n} tickets;"
            f" return ({n},) int32, the row of each"
        )
    root = np.asarray(jax.random.key_data(jax.random.key(run.config.seed)))
    pair = _closed(made_by(checked.prompts, key, root, rows))
    if not isinstance(pair, tuple) or len(pair) != 2 or not _has_length(pair[1], n):
        raise UserError(
            f"{key}: {name}.prompts returned {pair!r:.60} for {n} rows; return (subjects, prompts),"
            f" {n} of each"
        )
    group = run.config.sampling.group
    request = simple_request(root, {"policy": ()}, np.int32(0), tickets, group, rows=rows)
    tried(key, made_by, checked.draw, key, request)
    tried(key, made_by, checked.notes, key)
    return checked
