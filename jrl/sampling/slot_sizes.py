"""Number of decode slots of a batch, and the smaller states of its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jrl.errors import UserError
from jrl.models.matmul import time_follows_rows

SHRINK_TOKENS = 256
"""Completions at least so long pay for smaller states, each the decode loop compiled once more: at
256 tokens they keep 87 % of slot-steps live, where half as many keep 71 %."""

_SMALLEST = 2


class SlotSizes(NamedTuple):
    """Slots at first, the size of their blocks, and the smaller sizes that follow."""

    slots: int
    block: int
    smaller: tuple[int, ...]


def slot_sizes(rows: int, group: int, slots: int, block: int, *, shrink: bool) -> SlotSizes:
    """The sizes for this many sequences.

    Raises:
      UserError: a block that does not divide the group, or that the slots do not hold.
    """
    slots = min(slots, rows) if slots else rows
    # In a queue blocks wait for their slowest member, so there members leave one by one.
    block = block or (group if slots == rows else 1)
    if group % block:
        raise UserError(f"block = {block} does not divide the {group} members of a group")
    if slots < block:
        raise UserError(f"slots = {slots} do not hold one block of {block} sequences")
    # A block that lacks members would never be all ended, and never be refilled.
    slots -= slots % block
    return SlotSizes(slots, block, smaller_sizes(slots) if shrink else ())


def shrinking_pays(max_new_tokens: int, stop_tokens: Sequence[int], *, alone: bool) -> bool:
    """Whether the last live slots should move into smaller states.

    Only where a step's time falls with the slots. Where it is the time of reading the weights,
    smaller states gain nothing, and each is the decode loop compiled once more.

    Args:
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      alone: whether each device draws by itself.
    """
    # Without stop tokens all rows end together, and there is nothing to move.
    long = bool(stop_tokens) and max_new_tokens >= SHRINK_TOKENS
    return long and alone and time_follows_rows()


def smaller_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of slots below ``slots`` of the smaller states: each about 3/4 of the one before.

    >>> smaller_sizes(32)
    (24, 16, 12, 8, 6, 4, 2)
    """
    # Two sizes for each halving: with halvings alone up to half of the slots idle before a move.
    powers = [2**i for i in range(slots.bit_length())]
    sizes = {s for power in powers for s in (power, power + power // 2) if s != 3}
    return tuple(sorted((s for s in sizes if _SMALLEST <= s < slots), reverse=True))
