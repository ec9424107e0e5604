"""Number of decode slots of a batch, and the smaller states of its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jrl.errors import UserError
from jrl.models.matmul import time_follows_rows

CHUNK = 4
"""Decode steps between two refills of free slots."""
SHRINK_TOKENS = 256
"""Completions at least so long pay for smaller states, each the decode loop compiled once more."""

_SMALLEST, _STATES, _FEW = 2, 3, 32
"""Least slots of a state, the usual number of smaller states, and the slots that the last of them
has at most.

Measured with completions that end by themselves within 256 tokens, on two cores. A sampler of 256
slots took 51 s of processor time to compile with thirteen smaller states (each about 3/4 of the one
before), 20 s with four and 6 s with none; a rollout took 0.35, 0.37 and 1.10 s. One of 32 slots
took 35, 19 and 8 s with seven, three and none, and 0.52, 0.54 and 1.02 s to sample.
"""


class SlotPlan(NamedTuple):
    """Scheduling of rows in decode slots. It changes time and memory, but no completion.

    Attributes:
      slots: S, rows decoded at a time, by each device where ``mesh.lone_axes`` divide the prompts,
        else by all together; 0 takes all.
      block: members of a group that share one copy of their prompt's cache and leave their slots
        together; divides G. 0 is the whole group when all rows have a slot, and 1 when they queue.
      chunk: decode steps between refills of free slots, and after which turns that ended are
        answered; on a GPU at least ``gpu.STEPS``.
      shrink: whether the last live slots move into ever smaller states; None where it pays, see
        ``shrinking_pays``.
    """

    slots: int = 0
    block: int = 0
    chunk: int = CHUNK
    shrink: bool | None = None

    @classmethod
    def of(cls, slots: int | SlotPlan) -> SlotPlan:
        """The plan with this number of slots, or the plan itself."""
        return slots if isinstance(slots, SlotPlan) else cls(slots)


class SlotSizes(NamedTuple):
    """Slots at first, the size of their blocks, and the smaller sizes that follow."""

    slots: int
    block: int
    smaller: tuple[int, ...]


def slot_sizes(rows: int, group: int, plan: SlotPlan, *, pays: bool) -> SlotSizes:
    """The sizes for this many sequences; ``pays`` as ``shrinking_pays`` says.

    Raises:
      UserError: a block that does not divide the group, or that the slots do not hold.
    """
    slots = min(plan.slots, rows) if plan.slots else rows
    # In a queue blocks wait for their slowest member, so there members leave one by one.
    block = plan.block or (group if slots == rows else 1)
    if group % block:
        raise UserError(f"block = {block} does not divide the {group} members of a group")
    if slots < block:
        raise UserError(f"slots = {slots} do not hold one block of {block} sequences")
    # A block that lacks members would never be all ended, and never be refilled.
    slots -= slots % block
    shrink = pays if plan.shrink is None else plan.shrink
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
    """The numbers of slots below ``slots`` of the smaller states: each half of the one before.

    >>> smaller_sizes(32), smaller_sizes(256)
    ((16, 8, 4), (128, 64, 32))
    """
    sizes: list[int] = []
    # Every state is the decode loop compiled once more, so a few of them must do: the last rows
    # idle little where few slots are left, and take little time.
    while slots // 2 >= _SMALLEST and (len(sizes) < _STATES or slots > _FEW):
        slots //= 2
        sizes.append(slots)
    return tuple(sizes)
