"""Running a coroutine to its end, also where the thread already runs an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that runs in a thread and an event loop of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine; runs in this thread unless it has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return run_in_thread(coroutine)
