"""JetStream's gRPC server for a policy, with its own orchestrator.

Three faults of google-jetstream 0.2.2 are worked around here: it listens on all interfaces, its
queue is unbounded, and an exception in one of its threads kills the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jrl.errors import UserError
from jrl.sampling.text import TextStream, longest_text
from jrl.serving.server import listen
from jrl.zoo.jetstream.engine import SlotEngine, library


def _check(request: Any, engine: SlotEngine) -> tuple[list[int], bool]:
    """The prompt's ids, and whether it was given as text.

    Raises:
      UserError: the engine cannot take the request.
    """
    kind = request.WhichOneof("content")
    if kind is None:
        raise UserError("text_content and token_content are both missing; give one of them")
    as_text = kind == "text_content"
    # What is too long is neither encoded nor copied.
    prompt = request.text_content.text if as_text else request.token_content.token_ids
    most = longest_text(engine.tokenizer, engine.prompt_tokens) if as_text else engine.prompt_tokens
    if len(prompt) > most:
        unit = "characters" if as_text else "tokens"
        raise UserError(
            f"the prompt has {len(prompt)} {unit}; this server takes at most {engine.prompt_tokens}"
            " tokens"
        )
    tokens = list(engine.tokenizer.encode(prompt, add_special=True) if as_text else prompt)
    if not tokens:
        raise UserError("the prompt is empty; it needs at least one token")
    wrong = [i for i in tokens if not 0 <= i < engine.vocab_size]
    if wrong:
        raise UserError(
            f"the prompt holds token id {wrong[0]}; ids are 0 to {engine.vocab_size - 1}"
        )
    if len(tokens) > engine.prompt_tokens:
        raise UserError(
            f"the prompt has {len(tokens)} tokens; this server takes at most {engine.prompt_tokens}"
        )
    if not 1 <= request.max_tokens <= engine.new_tokens:
        raise UserError(
            f"max_tokens = {request.max_tokens}; this server writes 1 to {engine.new_tokens}"
        )
    return tokens, as_text


@functools.cache
def _driver_class() -> type:
    lib = library()
    base = lib.orchestrator.Driver

    class Driver(base):  # type: ignore[misc, valid-type]
        """JetStream's driver with a bounded queue; a failed thread fails every request."""

        live: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.failure: BaseException | None = None
            self.requests: list[Any] = []
            self._changes = threading.Lock()
            super().__init__(*args, **kwargs)
            for engine, free in zip(self._generate_engines, self._generate_slots, strict=True):
                free.put = functools.partial(_put_freed, engine, free.put)

        def bound(self, limit: int) -> None:
            """Limits the waiting requests, at least 1; the orchestrator refuses further ones."""
            self._prefill_backlog.maxsize = max(1, limit)

        def place_request_on_prefill_queue(self, request: Any) -> None:
            """Queues a request."""
            with self._changes:
                self.requests = [r for r in self.requests if not r.return_channel.done()]
                self.requests.append(request)
            if not self.live:
                raise RuntimeError(f"the engine has failed: {self.failure}")
            super().place_request_on_prefill_queue(request)

        def _process_prefill_content(
            self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
        ) -> tuple[Any, int]:
            # The ids are complete, so no BOS is added. JetStream's method expects an array.
            request.prefill_content = np.asarray(request.prefill_content, np.int32)
            return super()._process_prefill_content(request, tokenizer, False, max_prefill_length)

        def fail_all(self, error: BaseException) -> None:
            """Ends every request with an error."""
            with self._changes:
                for request in self.requests:
                    request.return_channel.set_exception(error)

        def _watched(self, work: Callable[[int], None], index: int) -> None:
            try:
                work(index)
            except Exception as error:
                if self.live:
                    logging.getLogger("jrl").exception("JetStream's %s ended", work.__name__)
                    self.failure, self.live = error, False
                    self.fail_all(RuntimeError(f"the engine has failed: {error}"))

        def _prefill_thread(self, idx: int) -> None:
            self._watched(super()._prefill_thread, idx)

        def _transfer_thread(self, idx: int) -> None:
            self._watched(super()._transfer_thread, idx)

        def _generate_thread(self, idx: int) -> None:
            self._watched(super()._generate_thread, idx)

        def _detokenize_thread(self, idx: int) -> None:
            self._watched(super()._detokenize_thread, idx)

    return Driver


def _put_freed(
    engine: SlotEngine,
    put: Callable[..., None],
    slot: int,
    block: bool = True,
    timeout: float | None = None,
) -> None:
    """Returns a slot to the queue of free slots, from the decoding thread once the slot is idle.

    JetStream's decoding thread counts free slots twice before each token and fails if another
    thread returned one in between, so all returns happen in that thread.
    """
    engine.leave(slot, functools.partial(put, slot, block, timeout))


class _Call:
    """The driver for one gRPC call: remembers the request, to end it when the call ends."""

    def __init__(self, driver: Any) -> None:
        self._driver, self.request = driver, None

    def place_request_on_prefill_queue(self, request: Any) -> None:
        self._driver.place_request_on_prefill_queue(request)
        self.request = request

    def end(self) -> None:
        """Ends the request: its slot is freed at the next token."""
        if self.request is not None:
            self.request.max_tokens = -1
            self.request.return_channel.close()


@functools.cache
def _servicer_class() -> type:
    lib, proto = library(), library().proto
    import grpc

    base = lib.orchestrator.LLMOrchestrator

    class Orchestrator(base):  # type: ignore[misc, valid-type]
        """JetStream's orchestrator; checks requests before they are queued."""

        async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
            """Streams a completion, its text decoded from all tokens together."""
            engine = self._driver._generate_engines[0]
            try:
                # Not in this thread, which serves all requests: a long text takes its time.
                tokens, as_text = await asyncio.to_thread(_check, request, engine)
            except UserError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            inner = proto.DecodeRequest(
                max_tokens=request.max_tokens,
                token_content=proto.DecodeRequest.TokenContent(token_ids=tokens),
            )
            call, text = _Call(self._driver), TextStream(engine.tokenizer)
            served = base(driver=call)
            try:
                async for response in base.Decode(served, inner, context):
                    ids = list(response.stream_content.samples[0].token_ids)
                    if ids:
                        yield _piece(proto, text.push(ids) if as_text else "", ids)
                if as_text and (rest := text.close()):
                    yield _piece(proto, rest, [])
            except RuntimeError as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            finally:
                call.end()

    return Orchestrator


def _piece(proto: Any, text: str, ids: Sequence[int]) -> Any:
    content = proto.DecodeResponse.StreamContent
    sample = content.Sample(text=text, token_ids=ids)
    return proto.DecodeResponse(stream_content=content(samples=[sample]))


# ---------------------------------------------------------------- the server


class JetStreamServer:
    """JetStream's gRPC server.

    Args:
      engine: from ``make_engine``.
      host: where to listen.
      port: 0 takes a free one.
      queue_requests: requests that may wait.

    Attributes:
      host, port: where it listens.
      driver: JetStream's driver; its ``failure`` says why it no longer runs.
    """

    def __init__(self, engine: Any, host: str, port: int, *, queue_requests: int) -> None:
        lib = library()
        # gRPC would silently share a port with another server, so the port is probed first.
        with contextlib.closing(listen(host, port)) as free:
            self.host, self.port = free.getsockname()[:2]
        devices = jax.devices()[:1]
        config = lib.config.ServerConfig(
            interleaved_slices=("jrl=1",),  # one engine, which knows its devices
            interleaved_engine_create_fns=(lambda devices: engine,),
        )
        address = f"[{host}]" if ":" in host else host
        with (
            _replaced(lib.server, _HOST=address),
            _replaced(lib.orchestrator, Driver=_driver_class(), LLMOrchestrator=_servicer_class()),
        ):
            # The engine reads a prompt on the host; an array of JAX compiles once a length.
            self._server = lib.server.run(self.port, config, devices, jax_padding=False)
        self.driver = self._server._driver
        self.driver.bound(queue_requests)

    def stop(self, grace_seconds: float) -> None:
        """Ends it once running requests have finished, after ``grace_seconds`` at most."""
        end = time.monotonic() + grace_seconds
        while self.driver.live and time.monotonic() < end:
            if all(request.return_channel.done() for request in self.driver.requests):
                break
            time.sleep(0.02)
        self.driver.fail_all(RuntimeError("the server is stopping"))
        self._server.stop()
        self._server._loop.close()  # it has stopped; JetStream leaves its sockets open


@contextlib.contextmanager
def _replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """The module with other attributes, inside the context."""
    before = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(before)


def run(
    engine: Any,
    *,
    host: str,
    port: int,
    queue_requests: int,
    grace_seconds: float,
    echo: Callable[[str], object],
) -> None:
    """Serves until a signal or a failure; must run in the main thread.

    Raises:
      UserError: the address is taken.
      RuntimeError: the engine failed.
    """
    running = JetStreamServer(engine, host, port, queue_requests=queue_requests)
    signalled: queue.SimpleQueue[int] = queue.SimpleQueue()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {s: signal.signal(s, lambda number, frame: signalled.put(number)) for s in signals}
    try:
        echo(f"serving JetStream's protocol at {running.host}:{running.port}")
        while running.driver.live and signalled.empty():
            time.sleep(0.1)
    finally:
        running.stop(grace_seconds)
        for number, handler in before.items():
            signal.signal(number, handler)
    failure = running.driver.failure
    if failure is not None:
        raise RuntimeError(f"the engine failed: {failure}") from failure
    echo("stopped")
