"""The host engine's rows (stands in until they move here)."""

from __future__ import annotations

from typing import Any

from jrl.serving.episode_rows import EpisodeRows, More, RowStart

SuspendedRow = Any


class Rows(EpisodeRows):
    """S rows on the device."""

    def __init__(self, *args: Any, suspended: int | None = None, **more: Any) -> None:
        super().__init__(*args, parked=suspended, **more)

    @property
    def max_suspended(self) -> int:
        """The most rows that may be suspended."""
        return self.parked

    def suspend(self, row: int) -> SuspendedRow:
        """A copy of a row; its slot is free then."""
        return self.park(row)

    def resume(self, row: int, suspended: SuspendedRow, start: RowStart | None = None) -> None:
        """Puts a copy into a slot, with ``start`` as another member."""
        if start is None:
            super().resume(row, suspended)
        else:
            self.resume_branch(row, suspended, start)


__all__ = ["More", "RowStart", "Rows", "SuspendedRow"]
