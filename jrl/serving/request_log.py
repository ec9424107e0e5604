"""A line for each request: method, path, status, tokens and time; bodies only on request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

_LONGEST_PATH = 120
_LONGEST_CONTENT = 20_000
"""Characters of a body or a reply in the log."""


class RequestLog:
    """An ASGI application that prints a line for each request of another one.

    Headers and query strings, which may hold keys, are never printed, and control characters of
    paths and contents are escaped.

    Args:
      app: the application.
      echo: prints a line.
      contents: whether to print bodies and replies too.
    """

    def __init__(self, app: Any, echo: Callable[[str], object], *, contents: bool = False) -> None:
        self._app, self._echo, self._contents = app, echo, contents

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        body, reply = bytearray(), bytearray()

        async def receive_and_note() -> Any:
            message = await receive()
            if self._contents and len(body) < _LONGEST_CONTENT:
                body.extend(message.get("body", b""))
            return message

        async def send_and_note(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            if self._contents and len(reply) < _LONGEST_CONTENT:
                reply.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive_and_note, send_and_note)
        finally:
            milliseconds = 1000 * (time.monotonic() - began)
            self._echo(_line(scope, status, milliseconds))
            if self._contents:
                self._echo(f"  body  {_readable(body)}")
                self._echo(f"  reply {_readable(reply)}")


def _line(scope: Any, status: int, milliseconds: float) -> str:
    path = json.dumps(scope["path"][:_LONGEST_PATH])[1:-1]
    count = scope.get("jrl.tokens")
    tokens = ""
    if count is not None:
        usage = count()
        tokens = f"  {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
    # A client that leaves gets no status.
    status_text = str(status) if status else "gone"
    return f"{scope['method']} {path}  {status_text}{tokens}  {milliseconds:.0f} ms"


def _readable(content: bytearray) -> str:
    text = content[:_LONGEST_CONTENT].decode("utf-8", "replace")
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
