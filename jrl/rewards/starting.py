"""Starts and ends the worker processes of a pool, and sees to it that none outlives the trainer."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

from jrl.rewards import kill
from jrl.rewards.copies import CAN_COPY, Template
from jrl.rewards.worker import Lost, RewardWorker, new_process

_END_SECONDS = 10.0
"""Time for a killed process to end, when all end."""


class Processes:
    """Starts and ends workers.

    A process that loads the functions takes seconds to start. From the first loss on there is one
    that others are copied from, in milliseconds, where that can be (see ``copies``).

    Args:
      functions: the reward functions, pickled.
    """

    def __init__(self, functions: bytes) -> None:
        self._functions = functions
        self._template: Template | None = None
        self._ending: list[RewardWorker] = []
        self._warden: subprocess.Popen[bytes] | None = None

    def expect_losses(self) -> None:
        """Makes ready for workers that will have to be replaced."""
        if self._template is None and CAN_COPY:
            with contextlib.suppress(OSError):
                self._template = Template(self._functions)
                self._tell_warden(self._template.pid)

    @property
    def copies(self) -> bool | None:
        """Whether the next worker starts at once; None while it is not known."""
        if self._template is None:
            return None if CAN_COPY else False
        return self._template.look()

    def start(self) -> RewardWorker:
        """A further worker; it may still load the functions.

        Raises:
          OSError: no process can be started.
        """
        worker = None
        if self._template is not None and self.copies:
            with contextlib.suppress(Lost):
                worker = RewardWorker(self._template.start)
        worker = worker or RewardWorker(functools.partial(new_process, self._functions))
        self._tell_warden(worker.pid)
        return worker

    def end(self, worker: RewardWorker, *, its_files: bool = False) -> None:
        """Kills a worker and what it started; ``its_files`` removes its /dev/shm files too."""
        worker.kill(its_files=its_files)
        self._tell_warden(-worker.pid)
        self._ending.append(worker)

    def tidy(self) -> None:
        """Forgets the killed workers that have ended."""
        self._ending = [worker for worker in self._ending if not worker.ended()]

    def close(self) -> None:
        """Waits for those that end, and ends what served them."""
        for worker in self._ending:
            worker.ended(_END_SECONDS)
        self._ending.clear()
        if self._template is not None:
            self._template.kill()
            self._tell_warden(-self._template.pid)
            self._template = None
        if self._warden is not None:
            # Closing its input ends it; waiting avoids a zombie.
            self._warden.communicate()
            self._warden = None

    def _tell_warden(self, number: int) -> None:
        """Registers a process for the warden to kill if the trainer dies; negative unregisters."""
        if self._warden is None:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(kill.__file__))],
                stdin=subprocess.PIPE,
                start_new_session=True,  # not for the terminal's Ctrl-C either
            )
        assert self._warden.stdin is not None
        with contextlib.suppress(OSError):
            self._warden.stdin.write(f"{number}\n".encode())
            self._warden.stdin.flush()
