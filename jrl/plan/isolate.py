"""Calls in a process of their own, which may end without ending this one.

XLA's compiler for TPUs ends its process where it meets a program that it cannot compile.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any


class EndedError(Exception):
    """The process ended during a call."""


class Isolated:
    """Calls functions in another process, the same one until it ends; to be closed.

    Functions, arguments and results are pickled; errors are raised here.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of the function.

        Raises:
          EndedError: the process ended.
        """
        if self._pool is None:
            # Spawned: a fork would have JAX's threads in a state that no one mends.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            self.close()
            raise EndedError from error

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
