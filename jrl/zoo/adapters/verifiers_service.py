"""The endpoint at which the agents of a verifiers environment find the policy.

verifiers asks a model over HTTP, as OpenAI's API has it. Here that is a server of this process on
the loopback interface: a request waits until the policy has taken the turn. Its header
X-Session-ID, the id of verifiers' trace, says which episode it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from jrl.episodes.host import EnvError
from jrl.system.extras import need

_SESSION = "X-Session-ID"
_MOST_BYTES = 1 << 30
"""Of a request, as verifiers' own server has it."""


class Conversation:
    """The requests of one episode, one after the other.

    Attributes:
      traces: ids of the traces whose agents asked the policy.
    """

    def __init__(self) -> None:
        self.traces: set[str] = set()
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._waiting: asyncio.Future[Any] | None = None
        self._futures: list[asyncio.Future[Any]] = []

    async def question(self, episode: asyncio.Task[Any]) -> dict[str, Any] | None:
        """The next request's body; None once the episode has ended."""
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({request, episode}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return None
            body, self._waiting = request.result()
            return body
        finally:
            request.cancel()

    def answer(self, completion: Mapping[str, Any]) -> None:
        """Answers the last question."""
        assert self._waiting is not None
        if not self._waiting.done():
            self._waiting.set_result(completion)

    async def ask(self, trace: str, body: dict[str, Any]) -> Mapping[str, Any]:
        """Waits for the policy's turn."""
        self.traces.add(trace)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        self._requests.put_nowait((body, future))
        return await future

    def close(self) -> None:
        """Ends the requests that nobody answers: the server waits a minute for each otherwise."""
        for future in self._futures:
            future.cancel()


class Service:
    """The endpoint, and what the environment itself serves, in one event loop.

    Args:
      vf: the module ``verifiers.v1``.
      env: an environment of it.

    Attributes:
      context: model and client, for ``run_episode``.
    """

    context: Any

    def __init__(self, vf: Any, env: Any) -> None:
        self._vf, self.env = vf, env
        self._conversations: dict[str, Conversation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Starts it in this event loop, where that was not done yet.

        Raises:
          EnvError: the environment does not start.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opened = loop, loop.create_future()
            # A task of its own: what is entered in a task must be left in it.
            self._serving = loop.create_task(self._serve(self._opened))
        assert self._opened is not None
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Ends it, if it runs in this event loop."""
        if self._serving is not None and self._loop is asyncio.get_running_loop():
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._loop = self._serving = None

    @contextlib.asynccontextmanager
    async def episode(self, task: Any) -> AsyncIterator[tuple[Conversation, asyncio.Task[Any]]]:
        """The conversation of an episode of a task, and the episode, which ends with the context.

        Raises:
          EnvError: the environment does not start.
        """
        await self.open()
        conversation, traces = Conversation(), []

        def add(trace: Any) -> None:
            traces.append(trace.id)
            self._conversations[trace.id] = conversation

        run = asyncio.create_task(self.env.run_episode(task, self.context, on_trace=add))
        try:
            yield conversation, run
        finally:
            run.cancel()
            with contextlib.suppress(BaseException):
                await run
            conversation.close()
            for trace in traces:
                self._conversations.pop(trace, None)

    async def _serve(self, opened: asyncio.Future[None]) -> None:
        web = need("aiohttp.web", "verifiers", "an environment of verifiers")
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._handler(web))
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            client = self._vf.EvalClientConfig(
                base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
                api_key_var="JRL_VERIFIERS_KEY",  # any name: nothing is asked outside
            )
            self.context = self._vf.ModelContext(model="policy", client=client)
            async with self.env.serving():
                opened.set_result(None)
                await asyncio.Future()
        except Exception as error:
            if not opened.done():
                opened.set_exception(EnvError(f"verifiers: {type(error).__name__}: {error}"))
        finally:
            await runner.cleanup()

    def _handler(self, web: Any) -> Callable[[Any], Any]:
        async def complete(request: Any) -> Any:
            trace = request.headers.get(_SESSION, "")
            conversation = self._conversations.get(trace)
            if conversation is None:
                return web.json_response({"error": {"message": "no such episode"}}, status=404)
            body = await request.json()
            completion = await conversation.ask(trace, body)
            if not body.get("stream"):
                return web.json_response(completion)
            return web.Response(body=_events(completion), content_type="text/event-stream")

        return complete


def completion(
    number: int, content: str, calls: Sequence[Mapping[str, Any]], cut: bool
) -> dict[str, Any]:
    """A turn of the policy as a chat completion.

    Args:
      number: of the turn.
      content: its text.
      calls: of tools, as the API writes them.
      cut: whether a limit of tokens ended it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    reason = "length" if cut else "tool_calls" if calls else "stop"
    return {
        "id": f"turn{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


def _events(whole: Mapping[str, Any]) -> bytes:
    """A completion as the two events of a stream."""
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**c, "index": i} for i, c in enumerate(delta["tool_calls"])]
    piece = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    chunk = {**whole, "object": "chat.completion.chunk", "choices": [piece]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
