"""An engine in a thread of its own."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jrl.models.tokenizer import Tokenizer
from jrl.sampling.engine import Engine
from jrl.sampling.request import Request, RequestLimits, Update, check_request

OnUpdate = Callable[[int, Update | Exception], None]
"""Called with a member of the request and its update, or why it failed; in the worker's thread."""


class Handle:
    """A request in the worker."""

    def __init__(self, request: Request, on_update: OnUpdate) -> None:
        self.request, self.on_update = request, on_update
        self.number: int | None = None
        self.left = request.n
        self.aborted = False


class EngineWorker:
    """Runs an engine in a thread of its own; every method may be called from any thread.

    Args:
      engine: the worker's alone from now on.
      tokenizer: its tokenizer.
      mesh: of its weights.

    Attributes:
      failure: the error that ended the thread, or None.
    """

    def __init__(self, engine: Engine, *, tokenizer: Tokenizer, mesh: Mesh) -> None:
        self._engine, self._tokenizer, self._mesh = engine, tokenizer, mesh
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[int, Handle] = {}
        self._thread = threading.Thread(target=self._run, name="jrl-engine", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> RequestLimits:
        """Limits of requests."""
        return self._engine.limits

    def submit(self, request: Request, on_update: OnUpdate) -> Handle:
        """Queues a request; returns at once.

        Raises:
          UserError: the engine cannot serve it.
        """
        check_request(request, self.limits, self._tokenizer)
        handle = Handle(request, on_update)
        self._inbox.put(functools.partial(self._start, handle))
        return handle

    def abort(self, handle: Handle) -> None:
        """Ends the completions that still run, without further updates; returns at once."""
        handle.aborted = True
        self._inbox.put(functools.partial(self._stop, handle))

    def close(self, seconds: float) -> None:
        """Ends the thread after the current chunk, and waits for it for up to ``seconds``."""
        self._inbox.put(None)
        self._thread.join(seconds)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh):
                while self._listen():
                    for update in self._engine.step() if self._engine.busy else ():
                        self._deliver(update)
        except Exception as error:
            logging.getLogger("jrl").exception("the engine failed")
            self.failure = error
            for handle in [*self._handles.values()]:
                self._fail(handle, error)
            while self._listen():
                pass  # ``_start`` fails the requests that still arrive

    def _listen(self) -> bool:
        """Runs the tasks in the inbox, waiting for one while the engine is idle; False to end."""
        wait = self.failure is not None or not self._engine.busy
        while True:
            try:
                task = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
            wait = False

    def _start(self, handle: Handle) -> None:
        if self.failure is not None:
            self._fail(handle, self.failure)
        elif not handle.aborted:
            try:
                handle.number = self._engine.submit(handle.request)
                self._handles[handle.number] = handle
            except Exception as error:  # this request's own
                self._fail(handle, error)

    def _stop(self, handle: Handle) -> None:
        if self.failure is not None or handle.number is None:
            return
        if self._handles.pop(handle.number, None) is not None:
            self._engine.abort(handle.number)

    def _deliver(self, update: Update) -> None:
        handle = self._handles.get(update.request)
        if handle is None:
            return
        handle.left -= update.completion is not None
        if not handle.left:
            del self._handles[update.request]
        handle.on_update(update.member, update)

    def _fail(self, handle: Handle, error: BaseException) -> None:
        wrapped = error if isinstance(error, Exception) else RuntimeError(str(error))
        for member in range(handle.request.n):
            handle.on_update(member, wrapped)
