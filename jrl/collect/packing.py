"""Packing: completions of different lengths in rows of one width, with little padding.

A batch holds completions as ``[N, G, T]``, most of it padding when they end by themselves. The
network reads them packed end to end into fewer rows. Prompts are assigned to blocks of at most
``LARGEST_BLOCK``, and the completions of a block to its rows: the longest first, into the first row
with room. Rows of a block attend to the block's prompts, each of which is computed once.

Completions that branch off one another share a row, with their common tokens stored once.

Rows are about as wide as the longest completion, or tree, because attention scores a whole row. The
number of rows and their width decide which program runs: widths are rounded and shapes are reused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import Batch, Packing

LARGEST_BLOCK = 4
"""Most prompts in a block: attention scores each token against all of them, its own or not."""

COMPLETIONS_PER_ROW = 4
"""Widths of up to this many completions of mean length (and a quarter more) are tried. Wider rows
pack more densely, and cost more scores in attention."""

WIDTHS = 32
"""Row width is a multiple of 8 and of batch_width / WIDTHS."""

SHAPES = 16
"""After this many distinct shapes, compile a new one only if no existing shape fits."""


class PackedShape(NamedTuple):
    """Rows of each block of prompts, and their columns; decides which program runs."""

    rows: int
    columns: int


class Packer:
    """Packs the batches of a run; for steps without minibatches.

    Every shape is a program to compile. An existing one is used as long as a batch fits into it,
    until the columns it left empty add up to ``patience`` whole batches: then a smaller one is
    worth its compilation (the rent-or-buy rule). A batch's shape decides how its sums are rounded,
    so the shapes in use are part of a checkpoint; without them a resumed run would differ.

    Args:
      parts: microbatches.
      shards: devices that a batch is divided over.
      patience: batches' worth of empty columns before a smaller shape is compiled.
      headroom: how much wider than needed rows are, as a share, where no shape held a batch.

    Attributes:
      used: the shapes compiled so far.
      wasted: batches' worth of columns left empty since the last new shape.
    """

    def __init__(
        self, parts: int, shards: int, patience: float = 2.0, headroom: float = 0.12
    ) -> None:
        self.parts, self.shards = parts, shards
        self.patience, self.headroom = patience, headroom
        self.used: set[PackedShape] = set()
        self.wasted = 0.0

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its packing, on the host; as it is where packing does not pay."""
        lengths, mask = jax.device_get((batch.lengths, batch.mask))
        # A completion without trained tokens needs no columns, unless another member branches from
        # it.
        lengths, trees = np.where(mask.any(-1), lengths, 0), None
        # Members share columns of one context alone; rows of several are packed each for itself.
        if "node" in batch.ids and "context" not in batch.ids:
            node, tokens = jax.device_get((batch.ids["node"], batch.tokens))
            lengths, trees = grown_together(lengths, mask, node, tokens)
        deal = _Deal(lengths, mask.shape[2], self.parts, self.shards, trees=trees)
        if deal.needed is None:
            return batch
        return batch.replace(packing=deal.packed(self._chosen(deal, deal.needed)))

    def notes(self) -> dict[str, Any]:
        """The shapes in use and the waste, as JSON; ``resume`` reads it."""
        return {"shapes": sorted(map(list, self.used)), "wasted": self.wasted}

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Continues as the packer that returned these notes."""
        self.used = {PackedShape(*shape) for shape in notes["shapes"]}
        self.wasted = notes["wasted"]

    def _chosen(self, deal: _Deal, shape_needed: PackedShape) -> PackedShape:
        """The shape to use for this batch; it stays for later ones."""
        # The smallest existing shape that fits costs no compilation.
        for shape in sorted(self.used, key=math.prod):
            rows = deal.rows(shape.columns)
            if 0 < rows <= shape.rows:
                # Rent or buy: after ``patience`` batches' worth of empty columns a smaller shape
                # is worth its compilation.
                self.wasted += max(0.0, 1 - math.prod(shape_needed) / math.prod(shape))
                if self.wasted <= self.patience or len(self.used) >= SHAPES:
                    return shape
                break
        else:
            # Nothing fits: leave headroom, or the next slightly longer batch compiles again.
            wider = -(-int(shape_needed.columns * (1 + self.headroom)) // 8) * 8
            shape_needed = shape_needed._replace(columns=wider)
        self.wasted = 0.0
        self.used.add(shape_needed)
        return shape_needed


def pack(
    lengths: np.ndarray, width: int, *, parts: int = 1, shards: int = 1, threshold: float = 0.9
) -> Packing | None:
    """The row and columns of each completion.

    Args:
      lengths: [N, G] int, tokens of each completion; 0 for one that is not trained on.
      width: T, of the batch.
      parts: microbatches, as ``train.score.split`` assigns prompts to them.
      shards: devices that each part is divided over.
      threshold: packing pays below this fraction of the batch's N * G * T columns.

    Returns:
      The packing, its arrays with a leading axis of ``parts``; None where it does not pay.

    >>> packing = pack(np.array([[4, 1, 1, 2, 0]]), 4)
    >>> packing.members[0].tolist(), packing.steps[0].tolist()
    ([[0, 0, 0, 0, 3, 3, 1, 2]], [[0, 1, 2, 3, 0, 1, 0, 0]])
    """
    deal = _Deal(lengths, width, parts, shards, threshold)
    return None if deal.needed is None else deal.packed(deal.needed)


class Tree(NamedTuple):
    """The tokens of members of ONE group that branch off one another, each once, in their order.

    Attributes:
      members: [L] int32, which member a token belongs to.
      steps: [L] int32, which token of it.
      segments: [L] int32, from 0 on, and ends [L] int32: as in ``SharedRows``.
    """

    members: np.ndarray
    steps: np.ndarray
    segments: np.ndarray
    ends: np.ndarray


def grown_together(
    lengths: np.ndarray, mask: np.ndarray, node: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, dict[tuple[int, int], Tree]]:
    """The trees of a batch.

    Args:
      lengths: [N, G] int, tokens of each completion; 0 for one that is not trained on.
      mask: [N, G, T] bool.
      node: [N, G, T] int, ``ids["node"]``.
      tokens: [N, G, T] int.

    Returns:
      [N, G] int, the tokens of the tree that begins with a member, 0 for one that left another;
      and (n, g) -> the tree. A member alone is a tree of its own.

    >>> node = np.array([[[1, 2, 2], [1, 3, 0]]])
    >>> mask = np.array([[[1, 1, 1], [0, 1, 0]]], bool)
    >>> sizes, trees = grown_together(np.array([[3, 2]]), mask, node, node)
    >>> sizes.tolist(), trees[0, 0].members.tolist(), trees[0, 0].steps.tolist()
    ([[4, 0]], [0, 1, 0, 0], [0, 1, 1, 2])
    >>> trees[0, 0].segments.tolist(), trees[0, 0].ends.tolist()
    ([0, 1, 2, 2], [3, 2, 3, 3])
    """
    sizes, trees = np.zeros_like(lengths), {}
    for n, group in enumerate(lengths):
        begins = _begins(group, mask[n], node[n], tokens[n])
        for g in np.flatnonzero(group):
            if begins[g][0] < 0:
                trees[n, int(g)] = tree = _tree(int(g), begins, group)
                sizes[n, g] = len(tree.members)
    return sizes, trees


def _begins(
    lengths: np.ndarray, mask: np.ndarray, node: np.ndarray, tokens: np.ndarray
) -> list[tuple[int, int]]:
    """(parent, token at which it branches) of each member of ONE group; (-1, 0) for none."""
    begins = [(-1, 0)] * len(lengths)
    for g in range(len(lengths)):
        for other in range(g):
            most = min(lengths[g], lengths[other])
            # A token that a member is trained on is its own.
            shared = (node[g] == node[other]) & (node[g] > 0) & (tokens[g] == tokens[other])
            shared &= ~mask[g]
            same = int(np.argmin(np.append(shared[:most], False)))
            if same > begins[g][1]:
                begins[g] = other, same
    return begins


def _tree(root: int, begins: Sequence[tuple[int, int]], lengths: np.ndarray) -> Tree:
    """The tree rooted at a member; the tokens between two branch points are a segment."""
    cells: list[tuple[int, int, int]] = []
    ends: list[int] = []

    def grow(g: int, start: int) -> None:
        owned: list[int] = []
        leaving = sorted((at, other) for other, (parent, at) in enumerate(begins) if parent == g)
        for stop in [*dict.fromkeys(at for at, _ in leaving), int(lengths[g])]:
            owned.append(len(ends))
            ends.append(0)
            cells.extend((g, step, owned[-1]) for step in range(start, stop))
            for other in (other for at, other in leaving if at == stop):
                grow(other, stop)
            start = stop
        # Later segments of the tree see these ones; those of branches grown in between do not.
        for segment in owned:
            ends[segment] = len(ends)

    grow(root, 0)
    members, steps, segments = np.array(cells, np.int32).reshape(-1, 3).T
    return Tree(members, steps, segments, np.array(ends, np.int32)[segments])


class _Deal:
    """The prompts of each part assigned to blocks, and the shape their completions need.

    Attributes:
      needed: the cheapest shape; None if packing does not pay.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        width: int,
        parts: int,
        shards: int,
        threshold: float = 0.9,
        trees: Mapping[tuple[int, int], Tree] | None = None,
    ) -> None:
        self._trees = trees
        n, g = lengths.shape
        each = n // parts
        per_device = each // shards
        # Blocks divide a device's prompts evenly, so no block crosses devices.
        block = next(b for b in range(min(LARGEST_BLOCK, per_device), 0, -1) if per_device % b == 0)
        # The same strides as ``train.score.split``: microbatch i holds prompts i, i + parts, ...
        self.lengths = [lengths[part::parts] for part in range(parts)]
        # Blocks of about equal load: the block with most rows decides the shape of all.
        self.orders = [
            _balance(lengths_of_part.sum(1), np.arange(each), each // block, block)
            for lengths_of_part in self.lengths
        ]
        self._filled: dict[int, list[list[list[list[int]]]]] = {}
        # Empty completions take no columns, so they do not count in the mean either.
        longest, mean = int(lengths.max()), lengths.sum() / max(np.count_nonzero(lengths), 1)
        step = max(8, -(-width // WIDTHS // 8) * 8)
        # Wider rows leave less padding at their ends, but attention computes scores of whole rows.
        most = max(longest, min(math.ceil(COMPLETIONS_PER_ROW * mean), width)) * 5 // 4
        widths = range(-(-max(longest, 1) // step) * step, most + step, step)
        shapes = [PackedShape(self.rows(columns), columns) for columns in widths]
        # By cells, rows times columns: products over tokens dominate, and attention is bounded by
        # ``most``.
        best = min(shapes, key=math.prod)
        # Packing costs gathers and masks, so it must save at least a tenth of the columns.
        pays = math.prod(best) * (each // block) < threshold * each * g * width
        self.needed = best if pays else None

    def rows(self, columns: int) -> int:
        """Rows of this many columns that a block needs at most; 0 if a completion is longer."""
        if columns < max(int(lengths_of_part.max()) for lengths_of_part in self.lengths):
            return 0
        if columns not in self._filled:
            self._filled[columns] = [
                [_fill(lengths_of_part, block, columns) for block in order]
                for lengths_of_part, order in zip(self.lengths, self.orders, strict=True)
            ]
        return max(1, *(len(rows) for part in self._filled[columns] for rows in part))

    def packed(self, shape: PackedShape) -> Packing:
        """The packing in rows of a shape that the completions fit into."""
        assert 0 < self.rows(shape.columns) <= shape.rows
        rows_of_parts, group = self._filled[shape.columns], self.lengths[0].shape[1]
        parts = [
            _lay(self._cells(part), np.array(order, np.int32), rows, shape, group)
            for part, (order, rows) in enumerate(zip(self.orders, rows_of_parts, strict=True))
        ]
        arrays: Any = [np.stack(arrays) for arrays in zip(*parts, strict=True)]
        return Packing(*(arrays if self._trees is not None else arrays[:4]))

    def _cells(self, part: int) -> Callable[[int], Tree]:
        """(n * G + g within a part) -> the tree of that member, members numbered the same way."""
        lengths, parts, trees = self.lengths[part], len(self.lengths), self._trees
        g = lengths.shape[1]

        def cells(first: int) -> Tree:
            n, root = divmod(first, g)
            if trees is not None:
                tree = trees[part + n * parts, root]
                return tree._replace(members=tree.members + n * g)
            zeros = np.zeros(lengths[n, root], np.int32)
            return Tree(zeros + first, np.arange(len(zeros)), zeros, zeros + 1)

        return cells


def _fill(lengths: np.ndarray, prompts: Sequence[int], columns: int) -> list[list[int]]:
    """The members of a block in rows, each the longest first into the first row with room."""
    g = lengths.shape[1]
    members = (np.array(prompts)[:, None] * g + np.arange(g)).reshape(-1)
    sizes = lengths.reshape(-1)[members]
    rows: list[list[int]] = []
    room = np.zeros(members.size, np.int64)
    # First-fit decreasing: at most 11/9 of the optimal number of rows. The stable sort makes the
    # packing a function of the lengths alone, which bit-equal resumes need.
    for i in np.argsort(-sizes, kind="stable"):
        if not sizes[i]:
            break
        # Only rows in use: ``room`` has a slot for every possible row.
        fits = np.flatnonzero(room[: len(rows)] >= sizes[i])
        row = int(fits[0]) if fits.size else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = columns
        room[row] -= sizes[i]
        rows[row].append(int(members[i]))
    return rows


def _balance(sizes: np.ndarray, names: np.ndarray, bins: int, most: int) -> list[list[int]]:
    """Names assigned to bins of at most ``most``, the largest first, to the emptiest bin."""
    # Longest-processing-time scheduling; the fixed number of prompts per bin keeps array shapes
    # static.
    loads, counts = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    contents: list[list[int]] = [[] for _ in range(bins)]
    for i in np.argsort(-sizes, kind="stable"):
        emptiest = int(np.argmin(np.where(counts < most, loads, np.iinfo(np.int64).max)))
        loads[emptiest] += sizes[i]
        counts[emptiest] += 1
        contents[emptiest].append(int(names[i]))
    return contents


def _lay(
    cells: Callable[[int], Tree],
    order: np.ndarray,
    rows_of_blocks: Sequence[Sequence[Sequence[int]]],
    shape: PackedShape,
    group: int,
) -> tuple[np.ndarray, ...]:
    """The arrays of ``Packing`` for one part."""
    members = np.full((len(order) * shape.rows, shape.columns), -1, np.int32)
    steps, owners, segments, ends = np.zeros((4, *members.shape), np.int32)
    for block, rows in enumerate(rows_of_blocks):
        # Members count prompts within the part, ``owners`` within the block: attention sees one
        # block.
        number = {int(prompt): i for i, prompt in enumerate(order[block])}
        for r, row in enumerate(rows, start=block * shape.rows):
            start = used = 0
            # End to end; ``owners`` says which prompt of the block each column attends to.
            for first in row:
                tree = cells(first)
                at = r, slice(start, start + len(tree.members))
                members[at], steps[at] = tree.members, tree.steps
                owners[at] = number[first // group]
                segments[at], ends[at] = tree.segments + 1 + used, tree.ends + 1 + used
                # Segments of one row are numbered on, so that no tree sees its neighbour; 0 stays
                # padding.
                start, used = at[1].stop, int(ends[at].max())
    return order, members, steps, owners, segments, ends
