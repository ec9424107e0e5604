"""Progress of a loop: one live line on a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

_WINDOW = 20
"""Recent steps that the time left is estimated from."""

_PLAIN_SECONDS = 1.0
"""Seconds between plain lines, the first and the last excepted."""


_shown: list[Progress] = []
"""Loops whose live line is on the terminal, the newest last."""


def between_words(text: str, columns: int) -> str:
    """A long text in lines of at most so many columns, broken between words alone.

    A terminal breaks inside of them. A word that is longer, such as a path, stays whole.

    >>> print(between_words("partial: the fraction", 14))
    partial: the
        fraction
    """
    return "\n".join(
        textwrap.fill(
            line, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


@contextlib.contextmanager
def above_live_line() -> Iterator[None]:
    """Takes the live line off the terminal while something else is printed there.

    Whatever prints, on standard output or error and from whichever thread, has the line to itself
    then; without a live line nothing happens.
    """
    progress = _shown[-1] if _shown else None
    if progress is None:
        yield
        return
    with progress.hidden():
        yield


class Progress:
    """Shows the progress of a loop; a context manager.

    >>> import io
    >>> stream = io.StringIO()
    >>> with Progress("train", total=2, file=stream) as progress:
    ...     progress.step(1, {"reward": 0.25, "tokens_per_second": 1200.0})
    >>> print(stream.getvalue().split("  left")[0])
    train  step 1/2  reward 0.2500  1,200 tokens/s
    """

    def __init__(
        self,
        label: str,
        *,
        total: int,
        start: int = 0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Sets up, without showing anything yet.

        Args:
          label: of the loop, one word.
          total: steps of the loop.
          start: steps done by an earlier run.
          file: where to write; standard output when None.
          clock: returns seconds; for tests.
        """
        self._label, self._total, self._done = label, total, start
        self._clock = clock
        self._console = Console(file=file or sys.stdout, highlight=False)
        self._spent: deque[float] = deque(maxlen=_WINDOW)
        self._before: tuple[int, float, Any] | None = None
        self._printed = float("-inf")
        self._live: RichProgress | None = None
        self._lock = threading.RLock()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.fields[line]}"),
            )
            self._live = RichProgress(*columns, console=self._console, transient=True)
            self._task = self._live.add_task(label, total=total, completed=start, line="starting")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            _shown.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            line = self._live.tasks[0].fields["line"]
            with self._lock:
                _shown.remove(self)
                self._live.stop()
            self._print(f"{self._label}  {line}")

    def step(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Updates the number of steps done.

        Args:
          done: steps done, including the earlier run's.
          metrics: ``reward`` (or ``accuracy``, or ``loss``) and ``tokens_per_second`` are shown if
            present and not None; ``seconds`` and ``compiles`` serve the time left.
        """
        now = self._clock()
        self._done = done
        self._note_time(done, now, metrics)
        line = self._line(metrics)
        if self._live is not None:
            self._live.update(self._task, completed=done, line=line)
        elif now - self._printed >= _PLAIN_SECONDS or done >= self._total:
            self._printed = now
            self._print(f"{self._label}  {line}")

    def note(self, text: str) -> None:
        """Prints a line of text, above the live line on a terminal."""
        self._print(text)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes the live line off the terminal for the duration of the block."""
        with self._lock:
            shown = self._live is not None and self in _shown
            if shown and self._live is not None:
                self._live.stop()
            try:
                yield
            finally:
                if shown and self._live is not None:
                    self._live.start()

    def seconds_left(self) -> float | None:
        """Seconds until the last step at the recent rate, or None before the second step.

        Steps in which something was compiled do not count; the first one of this call never does.
        """
        if not self._spent:
            return None
        return (self._total - self._done) * sum(self._spent) / len(self._spent)

    def _note_time(self, done: int, now: float, metrics: Mapping[str, Any]) -> None:
        """Records a step's seconds, evaluation and saving included, unless it compiled.

        Steps that are told of in one go, as those of a compiled run are, say their own time.
        """
        before, compiles = self._before, metrics.get("compiles")
        self._before = (done, now, compiles)
        if before is not None and done > before[0] and compiles == before[2]:
            took = (now - before[1]) / (done - before[0])
            self._spent.append(max(took, float(metrics.get("seconds") or 0.0)))

    def _line(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"step {self._done}/{self._total}"]
        metric = next(
            (n for n in ("reward", "accuracy", "loss") if metrics.get(n) is not None), None
        )
        if metric is not None:
            parts.append(f"{metric} {float(metrics[metric]):.4f}")
        if (pace := metrics.get("tokens_per_second")) is not None:
            parts.append(f"{float(pace):,.0f} tokens/s")
        if (left := self.seconds_left()) is not None and self._done < self._total:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk ends no run
            if self._console.is_terminal:
                text = between_words(text, self._console.width)
            self._console.print(text, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss under an hour.

    >>> duration(83.2), duration(7384)
    ('1:23', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
