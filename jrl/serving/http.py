"""The HTTP endpoints of OpenAI's API: completions, chats and responses, complete or streamed.

They need the extra ``serve`` (starlette and uvicorn). Requests are checked before any device work,
wait in a bounded queue, and end when their client disconnects. With an API key, all but /health
need it. With a ``Recorder`` every completed choice is written with its session, and clients may
reward sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from jrl.episodes.parsers import Parser
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.grammar import Grammars
from jrl.sampling.request import Completion, RequestLimits, Update
from jrl.sampling.text import longest_text
from jrl.serving.api_error import ApiError, Json
from jrl.serving.openai_replies import ReplyChoice, reply_head, usage
from jrl.serving.openai_requests import ApiRequest, no_such_model, parse
from jrl.serving.openai_responses import Items, chat_body, renamed
from jrl.serving.record import Recorder, read_reward, session_name
from jrl.serving.worker import EngineWorker, Handle
from jrl.system.json_text import TwoValues, one_value_each
from jrl.types import StopReason

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BYTES = 16 << 20
"""Of a request's body, at most; less where the prompts are short."""
READ_SECONDS = 30.0
"""For a request's body to arrive."""
RETRY_SECONDS = 1
"""When to try again after a full queue, as the reply says."""

OnCompleted = Callable[[int, Completion], None]
"""Called with the number of a choice that has ended and what was drawn, before the client is told.
"""


class Job:
    """A client's request in the engine, and the choices of its reply."""

    def __init__(
        self,
        request: ApiRequest,
        sampler: EngineWorker,
        tokenizer: Tokenizer,
        on_completed: OnCompleted | None = None,
    ) -> None:
        self.request, self._sampler, self._on_completed = request, sampler, on_completed
        self.choices = [ReplyChoice(request, i, tokenizer) for i in range(request.total)]
        self._updates: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._handles: list[Handle] = []

    def start(self) -> None:
        """Submits each prompt to the engine."""
        for i, request in enumerate(self.request.requests):
            on_update = functools.partial(self._on_update, i * self.request.n)
            self._handles.append(self._sampler.submit(request, on_update))

    def stop(self) -> None:
        """Aborts the prompts with running completions."""
        for i, handle in enumerate(self._handles):
            group = self.choices[i * self.request.n : (i + 1) * self.request.n]
            if any(choice.finish is None for choice in group):
                self._sampler.abort(handle)

    def _on_update(self, first: int, member: int, update: Update | Exception) -> None:
        # In the engine's thread. The event loop may have closed meanwhile; nobody listens then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, (first + member, update))

    async def pieces(self, disconnected: asyncio.Future[None]) -> AsyncIterator[Json]:
        """The choices as they grow, until all have ended or ``disconnected`` is done."""
        while any(choice.finish is None for choice in self.choices):
            if self._updates.empty():
                waiting = asyncio.ensure_future(self._updates.get())
                try:
                    both: set[asyncio.Future[Any]] = {waiting, disconnected}
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:  # the grace period is over
                    raise ApiError("the server is stopping", status=503) from None
                finally:
                    waiting.cancel()
                if not waiting.done():
                    return
                index, update = waiting.result()
            else:
                index, update = self._updates.get_nowait()
            if disconnected.done():
                return
            if isinstance(update, Exception):
                message = f"the engine failed: {type(update).__name__}: {update}"
                raise ApiError(message, status=500) from update
            if update.completion is not None:
                await self._completed(index, update.completion)
            piece = self.choices[index].add(update)
            if piece is not None:
                yield piece

    async def _completed(self, index: int, completion: Completion) -> None:
        """Tells of a choice that ended by itself, before the client knows and can continue it."""
        if self._on_completed is None or completion.stop is StopReason.ABORTED:
            return
        try:  # in a thread, as a slow disk must not hold up other streams
            await asyncio.to_thread(self._on_completed, index, completion)
        except asyncio.CancelledError:
            raise ApiError("the server is stopping", status=503) from None


class Service:
    """The endpoints, and the number of completions in the engine.

    Args:
      sampler: the engine.
      tokenizer: the model's.
      limits: of the engine's requests.
      model: the name of the model.
      queue: completions that may wait for a slot; further ones are refused with status 429.
      api_key: what clients must send as a bearer token; None asks for none.
      recorder: writes what is drawn; None for nothing.
      parser: of the model's tool calls; None refuses requests with tools.
      grammars: of the model; None refuses replies that must follow a schema.
    """

    def __init__(
        self,
        sampler: EngineWorker,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        model: str,
        queue: int,
        api_key: str | None = None,
        recorder: Recorder | None = None,
        parser: Parser | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.sampler, self.tokenizer, self.limits = sampler, tokenizer, limits
        self.model_name, self.queue, self._api_key = model, queue, api_key
        self.recorder, self._parser, self._grammars = recorder, parser, grammars
        # JSON may write a character in 6 bytes; and the rest of a body is small.
        prompts = (limits.slots + queue) * 6 * longest_text(tokenizer, limits.prompt_tokens)
        self.max_bytes = min(MAX_BYTES, (1 << 18) + prompts)
        self.created = int(time.time())
        self.pending = 0

    @contextlib.contextmanager
    def job(self, request: ApiRequest, on_completed: OnCompleted | None = None) -> Iterator[Job]:
        """A request in the engine, while the context lasts.

        Args:
          request: of a client.
          on_completed: told of the choices that end.

        Raises:
          ApiError: the queue is full, the engine refuses the request, or has failed.
        """
        self.check_running()
        new, most = request.total, self.limits.slots + self.queue
        if new > most:
            raise ApiError(f"{new} completions at once; this server takes at most {most}")
        if self.pending + new > most:
            raise ApiError(
                f"the queue is full: {self.pending} of {most} completions are running or waiting; "
                "try again later",
                status=429,
                code="queue_full",
            )
        job = Job(request, self.sampler, self.tokenizer, on_completed)
        self.pending += new
        try:
            try:
                job.start()
            except UserError as error:
                raise ApiError(str(error)) from None
            yield job
        finally:
            self.pending -= new
            job.stop()

    def check_running(self) -> None:
        """Raises ApiError when the engine has failed."""
        if self.sampler.failure is not None:
            raise ApiError(f"the engine has failed: {self.sampler.failure}", status=503)

    def check_key(self, request: Request) -> None:
        """Raises ApiError for a request without the server's key."""
        if self._api_key is None:
            return
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._api_key.encode())
        if kind.lower() != "bearer" or not same:
            raise ApiError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    async def health(self, request: Request) -> Response:
        """GET /health: status 200 while the engine runs."""
        self.check_running()
        return _reply({"status": "ok", "pending": self.pending})

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model that is served."""
        self.check_key(request)
        return _reply({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self.check_key(request)
        name = request.path_params["name"]
        if name != self.model_name:
            raise no_such_model(name, self.model_name)
        return _reply(self._model())

    def _model(self) -> Json:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "jrl",
            "max_model_len": min(
                self.limits.max_length, self.limits.prompt_tokens + self.limits.max_new_tokens
            ),
        }

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, chat=True)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses: a chat completion in other words."""
        try:
            return await self._complete(request, chat=True, as_items=True)
        except ApiError as error:
            raise renamed(error) from None

    async def _complete(self, request: Request, chat: bool, as_items: bool = False) -> Response:
        self.check_key(request)
        asked = await _read(request, self.max_bytes)
        body = chat_body(asked) if as_items else asked
        # In a thread, as long prompts take a while to tokenize and other streams must not wait.
        api_request = await asyncio.to_thread(
            parse,
            body,
            chat=chat,
            tokenizer=self.tokenizer,
            limits=self.limits,
            model=self.model_name,
            most=self.limits.slots + self.queue,
            parser=self._parser,
            grammars=self._grammars,
        )
        name, created, stream = uuid.uuid4().hex, int(time.time()), api_request.stream
        head = reply_head(api_request, self.model_name, name, created, piece=stream)
        on_completed: OnCompleted | None = None
        if self.recorder is not None:
            prompts = [each.tokens for each in api_request.requests]
            requested = session_name(request.headers, body)
            place = await asyncio.to_thread(self.recorder.place, requested, prompts)
            on_completed = functools.partial(
                self.recorder.completed, place, api_request, head["id"]
            )
            head["session_id"] = place.session
        items = Items(asked, head) if as_items else None
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(self.job(api_request, on_completed))
            # For a log of requests, which reads it when the reply has ended.
            request.scope["jrl.tokens"] = functools.partial(usage, api_request, job.choices)
            if stream:
                lines: Lines = (
                    functools.partial(_events, job, items)
                    if items is not None
                    else functools.partial(_chunks, job, head)
                )
                return _stream(lines, stack.pop_all())
            async with _gone(request.receive) as disconnected:
                async for _ in job.pieces(disconnected):
                    pass
            choices = [choice.finished() for choice in job.choices]
        if items is not None:
            for _ in items.add(choices[0]):
                pass
            return _reply(items.end(usage(api_request, job.choices))["response"])
        return _reply(head | {"choices": choices, "usage": usage(api_request, job.choices)})

    async def reward(self, request: Request) -> Response:
        """POST /v1/sessions/NAME/reward."""
        self.check_key(request)
        if self.recorder is None:
            raise ApiError("this server records no sessions; start it with --record", status=404)
        points, done = read_reward(await _read(request, self.max_bytes))
        name = request.path_params["name"]
        await asyncio.to_thread(self.recorder.reward, name, points, done=done)
        reply = {"id": name, "object": "session.reward", "reward": points, "done": done}
        return _reply(reply)


# ---------------------------------------------------------------- HTTP


def application(service: Service) -> Starlette:
    """The ASGI application of a service."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _reply(error.body(), error.status)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        asks = request.method == "POST" or request.url.path.startswith("/v1/")  # also without /v1
        if asks and error.status_code == 404:
            message += (
                "; this server has POST /v1/chat/completions, /v1/completions and /v1/responses"
            )
        reply = _reply(ApiError(message, status=error.status_code).body(), error.status_code)
        reply.headers.update(error.headers or {})  # Allow, of a method that is not
        return reply

    async def fault(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}: {error}"
        return _reply(ApiError(message, status=500).body(), 500)

    return Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            Route("/v1/responses", service.responses, methods=["POST"]),
            Route("/v1/sessions/{name:path}/reward", service.reward, methods=["POST"]),
        ],
        exception_handlers={ApiError: refuse, HTTPException: no_route, Exception: fault},
    )


def _reply(body: Json, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    headers = None
    if status == 429:
        headers = {"retry-after": str(RETRY_SECONDS)}
    elif status == 408:
        headers = {"connection": "close"}  # the rest of the body may come, or not
    return JSONResponse(body, status, headers)


async def _read(request: Request, most: int) -> Any:
    """The JSON body of a request.

    Raises:
      ApiError: it is not JSON, longer than ``most`` bytes, or does not arrive.
    """
    from starlette.requests import ClientDisconnect

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Web pages of other origins cannot send this type without a preflight request.
        raise ApiError(f"content-type = {kind!r}; must be 'application/json'", status=415)
    packed = request.headers.get("content-encoding", "identity")
    if packed.strip().lower() not in ("", "identity"):
        problem = f"content-encoding = {packed!r:.40} is not read; send the body as it is"
        raise ApiError(problem, status=415)
    data = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise ApiError(f"the body is longer than {most} bytes", status=413)
    except TimeoutError:
        problem = f"the body did not arrive in {READ_SECONDS:g} s ({len(data)} bytes did)"
        raise ApiError(problem, status=408) from None
    except ClientDisconnect:  # nobody reads the reply
        raise ApiError("the client disconnected") from None
    try:
        body = json.loads(data, object_pairs_hook=one_value_each)
        json.dumps(body, ensure_ascii=False).encode()
    except TwoValues as error:
        raise ApiError(f"{error}; send one of them") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    return body


@contextlib.asynccontextmanager
async def _gone(receive: Callable[[], Any]) -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done when the client has disconnected."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(wait())
    try:
        yield task
    finally:
        task.cancel()


Lines = Callable[[asyncio.Future[None]], AsyncIterator[str]]
"""The server-sent events of a reply, given what is done when the client disconnects."""


async def _chunks(job: Job, head: Json, disconnected: asyncio.Future[None]) -> AsyncIterator[str]:
    """A completion's: pieces that begin with ``head``."""
    request = job.request
    if request.usage:  # as OpenAI's: null in all pieces but the last
        head = head | {"usage": None}
    if request.chat:
        for i in range(len(job.choices)):
            delta = {"role": "assistant", "content": ""}
            first = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
            yield _line(head | {"choices": [first]})
    try:
        async for piece in job.pieces(disconnected):
            yield _line(head | {"choices": [piece]})
    except Exception as error:
        yield _line(_failed(error))
    else:
        if request.usage:
            yield _line(head | {"choices": [], "usage": usage(request, job.choices)})
    yield "data: [DONE]\n\n"


async def _events(job: Job, items: Items, disconnected: asyncio.Future[None]) -> AsyncIterator[str]:
    """A response's: numbered, each with its type."""
    number = itertools.count()

    def line(event: Json) -> str:
        return f"event: {event['type']}\n" + _line({**event, "sequence_number": next(number)})

    for event in items.begin():
        yield line(event)
    try:
        async for piece in job.pieces(disconnected):
            for event in items.add(piece):
                yield line(event)
    except Exception as error:
        yield line({"type": "error", **_failed(error)})
    else:
        yield line(items.end(usage(job.request, job.choices)))


def _failed(error: Exception) -> Json:
    return (error if isinstance(error, ApiError) else ApiError(str(error), status=500)).body()


def _line(data: Json) -> str:
    # Escaped: some clients end a line at U+2028 and others of Unicode's, too.
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def _stream(lines: Lines, stack: contextlib.ExitStack) -> Response:
    """The reply in pieces, as server-sent events; closes ``stack`` when it ends."""
    from starlette.responses import Response

    class Events(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            headers += [(b"cache-control", b"no-cache")]
            with stack:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async with _gone(receive) as disconnected:
                    async for line in lines(disconnected):
                        await send(_body(line.encode(), True))
                await send(_body(b"", False))

    return Events()


def _body(data: bytes, more: bool) -> Json:
    return {"type": "http.response.body", "body": data, "more_body": more}
