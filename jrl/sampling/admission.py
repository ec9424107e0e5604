"""Admissions of a row engine: prompts and per-row settings as arrays of few shapes.

Few shapes, so that every admission program can be compiled before the first request: prompts are
padded to one of a few widths, and their number to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.sampling.params import SamplingParams

MIN_WIDTH = 64
"""The narrowest width that prompts are padded to, tokens; each further one is four times wider."""


class RowSampling(NamedTuple):
    """Sampling settings of one row.

    Attributes:
      temperature, top_k, top_p, min_p: as in ``make_sampling_params``.
      bias: [V] float32, nats, added to the logits; None for no change.
      stop_tokens: ids that end the row; None for the engine's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: np.ndarray | None = None
    stop_tokens: Sequence[int] | None = None


class RowStart(NamedTuple):
    """The start of a row.

    Attributes:
      tokens: the prompt's ids.
      seed: below 2**64, of the prompt; ``member`` is folded into it.
      member: number in the group.
      limit: tokens after the prompt at which the row stops.
      sampling: of this row; None for the engine's.
    """

    tokens: tuple[int, ...]
    seed: int
    member: int
    limit: int
    sampling: RowSampling | None = None


class Admission(NamedTuple):
    """New rows of the batch: A prompts for D rows.

    Attributes:
      tokens: [A, W] int32, the prompts from column 0.
      lengths: [A] int32, tokens of each prompt.
      rows: [D] int32, index of each row in the batch; S for an unused one.
      source: [D] int32, index of each row's prompt.
      seeds: [D, 2] uint32, the raw key of each row's prompt.
      members: [D] int32, folded into the key.
      limits: [D] int32, the longest completion, tokens; 0 for an unused row.
      stops: [D, K] int32, stop tokens, padded with -1.
      sampling_params: one value a row.
    """

    tokens: Any
    lengths: Any
    rows: Any
    source: Any
    seeds: Any
    members: Any
    limits: Any
    stops: Any
    sampling_params: SamplingParams


def widths(longest: int) -> tuple[int, ...]:
    """The widths that prompts of up to ``longest`` tokens are padded to.

    >>> widths(600)
    (64, 256, 600)
    """
    out, width = [], MIN_WIDTH
    while width < longest:
        out.append(width)
        width *= 4
    return (*out, longest)


class AdmissionBuilder(NamedTuple):
    """Makes admissions on the host.

    Attributes:
      slots: S, rows of the batch.
      max_rows: D, the most rows in one admission, a power of two.
      max_prompts: the most prompts in one admission.
      widths: of prompts, ascending, tokens.
      stop_width: K, the most stop tokens of a row.
      sampling: of rows that bring none of their own; its stop tokens are not None.
      vocab_size: V where rows may have a bias, else 0.
    """

    slots: int
    max_rows: int
    max_prompts: int
    widths: tuple[int, ...]
    stop_width: int
    sampling: RowSampling
    vocab_size: int

    def split(self, starts: Mapping[int, RowStart]) -> list[dict[int, RowStart]]:
        """The rows of each admission; all rows of a prompt together if they fit."""
        of_prompt: dict[tuple[int, ...], dict[int, RowStart]] = {}
        for row, start in starts.items():
            # Grouped by prompt first, so that a prompt is computed once an admission, not once a
            # row.
            of_prompt.setdefault(start.tokens, {})[row] = start
        parts: list[dict[int, RowStart]] = []
        prompts = 0
        for rows in of_prompt.values():
            prompts += 1
            for row, start in rows.items():
                # A prompt cut in two by the limit is computed twice, which is cheaper than a wider
                # program for every admission.
                if not parts or len(parts[-1]) == self.max_rows or prompts > self.max_prompts:
                    parts.append({})
                    prompts = 1
                parts[-1][row] = start
        return parts

    def build(self, starts: Mapping[int, RowStart]) -> Admission:
        """The admission of some rows, one of the parts that ``split`` returns."""
        # Each once, in order: a prompt's place among those computed.
        distinct = dict.fromkeys(start.tokens for start in starts.values())
        prompts = {tokens: i for i, tokens in enumerate(distinct)}
        # Rows beyond the batch are written nowhere, so one shape serves any number of rows.
        unused = self.max_rows - len(starts)
        rows = [*starts, *[self.slots] * unused]
        source = [*(prompts[start.tokens] for start in starts.values()), *[0] * unused]
        # A limit of 0 tokens: the slot is stopped as soon as it is written.
        none = RowStart(tokens=(), seed=0, member=0, limit=0)
        padded = [*starts.values(), *[none] * unused]
        tokens, lengths = self._prompts(list(prompts))
        settings = [start.sampling or self.sampling for start in padded]
        return Admission(
            tokens=tokens,
            lengths=lengths,
            rows=np.array(rows, np.int32),
            source=np.array(source, np.int32),
            # Two words, as JAX has no 64-bit integers by default.
            seeds=np.array([divmod(start.seed, 2**32) for start in padded], np.uint32),
            members=np.array([start.member for start in padded], np.int32),
            limits=np.array([start.limit for start in padded], np.int32),
            stops=np.stack([self._stops(each) for each in settings]),
            sampling_params=self._sampling_params(settings),
        )

    def empty(self, prompts: int, width: int) -> Admission:
        """An admission of no rows, with the shapes of one of this many prompts, to compile with."""
        new = self.build({})
        tokens, lengths = np.zeros((prompts, width), np.int32), np.ones(prompts, np.int32)
        return new._replace(tokens=tokens, lengths=lengths)

    def _prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and lengths: a power of two of rows, padded to one of the widths."""
        count = 1 << max(len(prompts) - 1, 0).bit_length()
        longest = max(map(len, prompts), default=0)
        tokens = np.zeros((count, next(w for w in self.widths if w >= longest)), np.int32)
        # An unused row has a length of 1, since its last token's place is length - 1.
        lengths = np.ones(count, np.int32)
        for i, prompt in enumerate(prompts):
            lengths[i] = len(prompt)
            tokens[i, : lengths[i]] = prompt
        return tokens, lengths

    def _stops(self, sampling: RowSampling) -> np.ndarray:
        ids = self.sampling.stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens
        assert ids is not None
        return np.array([*ids, *[-1] * (self.stop_width - len(ids))], np.int32)

    def _sampling_params(self, rows: Sequence[RowSampling]) -> SamplingParams:
        numbers: dict[str, Any] = {
            "temperature": np.array([r.temperature for r in rows], np.float32),
            "top_k": np.array([r.top_k for r in rows], np.int32),
            "top_p": np.array([r.top_p for r in rows], np.float32),
            "min_p": np.array([r.min_p for r in rows], np.float32),
        }
        # The array [rows, V] exists only where some row may need it: it is as large as the logits.
        bias: Any = None
        if self.vocab_size:
            none = np.zeros(self.vocab_size, np.float32)
            bias = np.stack([none if r.bias is None else r.bias for r in rows])
        return SamplingParams(**numbers, bias=bias)
