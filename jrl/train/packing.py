"""Completions of unlike length packed into rows of one width, so that little padding is computed.

A batch holds completions as ``[N, G, T]``, most of it padding when they end by themselves. For the
network they are laid end to end in fewer and longer rows. Prompts are dealt to blocks of a few, and
a block's completions to its rows, the longest first to the row with the most room. Rows of a block
read the block's prompts, each computed once. Which program runs depends on the width alone, and
there are few widths.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jrl.types import Batch, Packing

LARGEST_BLOCK = 4
"""Prompts a block has at most: each token's scores are made for all of them."""

COMPLETIONS_PER_ROW = 6
"""Completions that a row holds on average; more make denser rows, and more scores in attention."""

WIDTHS = 64
"""Widths, hence programs, that a run has at most."""


class Packer:
    """Packs the batches of a run; for a step whose prompts are not dealt to minibatches.

    Every width is a program to compile. One that is there is used as long as it is wide enough,
    until the columns it left empty add up to ``patience`` whole batches: then a narrower one is
    worth its compilation (rent or buy). A run that is resumed begins without widths, and may
    therefore differ from an unbroken one by the rounding of sums.

    Args:
      parts: microbatches.
      shards: devices that a batch is divided over.
      patience: batches' worth of empty columns before a narrower width is compiled.
      headroom: how much wider than needed a new width is, as a share, for batches to come.
    """

    def __init__(
        self, parts: int, shards: int, patience: float = 8.0, headroom: float = 0.15
    ) -> None:
        self.parts, self.shards = parts, shards
        self.patience, self.headroom = patience, headroom
        self.used: set[int] = set()
        self.wasted = 0.0

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its packing, on the host; as it is where packing does not pay."""
        lengths, mask = jax.device_get((batch.lengths, batch.mask))
        read = np.where(mask.any(-1), lengths, 0)
        narrow = pack(read, mask.shape[2], parts=self.parts, shards=self.shards)
        if narrow is None:
            return batch
        return batch.replace(packing=widened(narrow, self._chosen(narrow.members.shape[2])))

    def _chosen(self, width: int) -> int:
        """The width to use where ``width`` is enough; it stays for later batches."""
        fitting = min((w for w in self.used if w >= width), default=0)
        if fitting:
            self.wasted += (fitting - width) / fitting
            if self.wasted <= self.patience:
                return fitting
        self.wasted = 0.0
        new = -(-int(width * (1 + self.headroom)) // 8) * 8
        self.used.add(new)
        return new


def widened(packing: Packing, columns: int) -> Packing:
    """The packing with padding at the end of its rows."""
    more = ((0, 0), (0, 0), (0, columns - packing.members.shape[2]))
    members: Any = np.pad(packing.members, more, constant_values=-1)
    steps, owners = (np.pad(x, more) for x in (packing.steps, packing.owners))
    return packing.replace(members=members, steps=steps, owners=owners)


def pack(
    lengths: np.ndarray, width: int, *, parts: int = 1, shards: int = 1, worth: float = 0.9
) -> Packing | None:
    """Where in which row each completion goes.

    Args:
      lengths: [N, G] int, tokens of each completion; 0 for one that nobody reads.
      width: T, of the batch.
      parts: the batch goes through the network in so many parts, as ``score.split`` deals them.
      shards: devices that each part is divided over.
      worth: the rows must hold less than this share of the batch's N * G * T columns.

    Returns:
      The packing, its arrays with a leading axis of ``parts``; None where it does not pay.

    >>> packing = pack(np.array([[4, 1, 1, 2, 0]]), 4)
    >>> packing.members[0].tolist(), packing.steps[0].tolist()
    ([[0, 0, 0, 0, 3, 3, 1, 2]], [[0, 1, 2, 3, 0, 1, 0, 0]])
    """
    n, g = lengths.shape
    each = n // parts
    per_device = each // shards
    block = next(b for b in range(min(LARGEST_BLOCK, per_device), 0, -1) if per_device % b == 0)
    rows = -(-block * g // COMPLETIONS_PER_ROW)
    dealt = [_deal(lengths[part::parts], block, rows) for part in range(parts)]
    longest = max(
        int(lengths[part::parts].flat[row].sum())
        for part, (_, filled) in enumerate(dealt)
        for row in filled
    )
    columns = _rounded(longest, block * g * width // rows)
    if columns * rows * (each // block) >= worth * each * g * width:
        return None
    laid = [_lay(lengths[part::parts], *d, columns) for part, d in enumerate(dealt)]
    arrays: Any = [np.stack(parts) for parts in zip(*laid, strict=True)]
    return Packing(*arrays)


def _deal(lengths: np.ndarray, block: int, rows: int) -> tuple[np.ndarray, list[list[int]]]:
    """Prompts to blocks, [blocks, block], and the members of each block to its rows in turn."""
    n, g = lengths.shape
    totals = lengths.sum(1)
    order = _balance(totals, np.arange(n), n // block, block)
    filled: list[list[int]] = []
    for prompts in order:
        members = (np.array(prompts)[:, None] * g + np.arange(g)).reshape(-1)
        filled += _balance(lengths.reshape(-1)[members], members, rows, members.size)
    return np.array(order, np.int32), filled


def _balance(sizes: np.ndarray, names: np.ndarray, bins: int, most: int) -> list[list[int]]:
    """Names dealt to bins of at most so many, the largest first to the emptiest bin."""
    loads, counts = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    filled: list[list[int]] = [[] for _ in range(bins)]
    for i in np.argsort(-sizes, kind="stable"):
        chosen = int(np.argmin(np.where(counts < most, loads, np.iinfo(np.int64).max)))
        loads[chosen] += sizes[i]
        counts[chosen] += 1
        filled[chosen].append(int(names[i]))
    return filled


def _lay(
    lengths: np.ndarray, order: np.ndarray, filled: list[list[int]], columns: int
) -> tuple[np.ndarray, ...]:
    """The arrays of ``Packing`` for one part."""
    g, rows = lengths.shape[1], len(filled) // len(order)
    members = np.full((len(filled), columns), -1, np.int32)
    steps, owners = np.zeros((2, *members.shape), np.int32)
    for r, row in enumerate(filled):
        place = {int(prompt): i for i, prompt in enumerate(order[r // rows])}
        start = 0
        for member in row:
            stop = start + int(lengths.flat[member])
            members[r, start:stop], steps[r, start:stop] = member, np.arange(stop - start)
            owners[r, start:stop] = place[member // g]
            start = stop
    return order, members, steps, owners


def _rounded(columns: int, most: int) -> int:
    """The next of at most ``WIDTHS`` widths, multiples of 8."""
    step = max(8, -(-most // WIDTHS // 8) * 8)
    return -(-max(columns, 1) // step) * step
