"""Running the HTTP server: its socket, its thread, and a graceful end on a signal.

It listens on the loopback interface unless another host is given.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from jrl.errors import UserError
from jrl.serving.http import Service, application
from jrl.serving.request_log import RequestLog
from jrl.system.extras import need


class HttpServer:
    """The HTTP server in a thread of its own.

    Args:
      service: the endpoints.
      host, port: where to listen; port 0 takes a free one.
      grace_seconds: for running requests after ``stop``.
      log: gets a line for each request; None for none.
      contents: whether the lines hold bodies and replies.

    Attributes:
      host, port: where it listens.
      error: why it ended unasked, or None.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        grace_seconds: float,
        log: Callable[[str], object] | None = None,
        *,
        contents: bool = False,
    ) -> None:
        check_ready(host, port)
        import uvicorn

        self.service = service
        self.error: BaseException | None = None
        self._socket = listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        app: Any = application(service)
        if log is not None:
            app = RequestLog(app, log, contents=contents)
        room = open_files()
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            backlog=_backlog(room),
            timeout_graceful_shutdown=max(1, round(grace_seconds)),
        )
        config.load()
        most = max(1, room - 3 * _backlog(room))
        config.http_protocol_class = _impatient(config.http_protocol_class, most)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="jrl-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._socket.close()

    def stop(self, *, now: bool = False) -> None:
        """Asks it to end: no new connections, and a grace period for open ones unless ``now``."""
        self._server.should_exit = True
        self._server.force_exit |= now

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, after waiting for up to ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


HEADER_SECONDS = 30.0
"""For the header of a request to arrive, from the connection or its first byte on."""
_SPARE_FILES = 32
"""Files of the process that no connection takes: of the record, the compile cache, imports."""
_MOST_CONNECTIONS = 10_000
"""Of a process without a limit on files."""


def open_files() -> int:
    """The number of files that this process may still open, less a reserve."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit > 2 * _MOST_CONNECTIONS:
        return _MOST_CONNECTIONS
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        used = 64
    return max(4, limit - used - _SPARE_FILES)


def _backlog(room: int) -> int:
    """Connections that the kernel holds; they can all be accepted before one can be closed."""
    return min(128, max(1, room // 8))


def _impatient(protocol: Any, most: int) -> Any:
    """Uvicorn's protocol, which closes a connection whose next request does not begin for a while.

    Uvicorn itself waits for ever for the first header of a connection, and for the rest of a later
    one of which a part has come; each waiting connection takes a file of the process. Of more than
    ``most`` connections the one that has waited longest is closed: first of those that never sent a
    request, then of those between two; and the new one where all are being served.
    """
    silent: dict[Any, None] = {}  # in the order in which they began to wait
    between: dict[Any, None] = {}

    class Impatient(protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._awaited: Any = None  # what ends the wait, and the newest request at its begin
            if len(self.connections) > most:
                oldest = next(iter(silent), None) or next(iter(between), self)
                silent.pop(oldest, None)
                between.pop(oldest, None)
                oldest.transport.close()
            if not transport.is_closing():
                self._await_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.transport.is_closing():
                self._await_header()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle() and not self.transport.is_closing():
                between[self] = None

        def connection_lost(self, error: Exception | None) -> None:
            if self._awaited is not None:
                self._awaited[0].cancel()
            silent.pop(self, None)
            between.pop(self, None)
            super().connection_lost(error)

        def _await_header(self) -> None:
            if not self._is_idle():
                silent.pop(self, None)
                between.pop(self, None)
                return
            (silent if self.cycle is None else between).setdefault(self)
            if self._awaited and self._awaited[1] is self.cycle:
                return  # of a header in many pieces the first one counts
            if self._awaited is not None:
                self._awaited[0].cancel()
            ends = self.loop.call_later(HEADER_SECONDS, self._close_if_silent, self.cycle)
            self._awaited = ends, self.cycle

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _close_if_silent(self, newest: Any) -> None:
            self._awaited = None
            if self.cycle is newest and self._is_idle() and not self.transport.is_closing():
                self.transport.close()

    return Impatient


def check_ready(host: str, port: int) -> None:
    """Raises UserError when the extra ``serve`` is not installed, or the address is taken."""
    for module in ("starlette", "uvicorn"):
        need(module, "serve", "jrl serve")
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
      UserError: it is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: {error}") from None


def run(
    service: Service,
    *,
    host: str,
    port: int,
    grace_seconds: float,
    echo: Callable[[str], object],
    log: str = "nothing",
) -> None:
    """Serves until a signal or a failure of the engine; returns after a clean end.

    SIGTERM and SIGINT stop new requests and let running ones finish for up to ``grace_seconds``; a
    second signal ends them at once. Must run in the main thread.

    Raises:
      UserError: the address is taken, or the extra ``serve`` is not installed.
      RuntimeError: the engine failed.
    """
    running = HttpServer(
        service,
        host,
        port,
        grace_seconds,
        None if log == "nothing" else echo,
        contents=log == "contents",
    )
    signals_seen: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        running.stop(now=bool(signals_seen))
        signals_seen.append(number)

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        echo(f"serving {service.model_name} at {running.url}/v1")
        while not running.wait(0.2):
            if service.sampler.failure is not None and not signals_seen:
                on_signal(0, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        service.sampler.close(grace_seconds)
    for component, error in (("engine", service.sampler.failure), ("HTTP server", running.error)):
        if error is not None:
            raise RuntimeError(f"the {component} failed: {error}") from error
    echo("stopped")
