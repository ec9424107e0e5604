"""Models behind OpenAI-compatible endpoints, as speakers: functions from messages to text.

speak = endpoint("http://localhost:8000/v1", "some-model")
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import inspect
import io
import json
import math
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.episodes.calls import run_either
from jrl.episodes.host import EnvError, HostEnv
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import NOTHING
from jrl.user_code import load

Speaker = Callable[[list[Message]], Any]
"""(messages, as OpenAI's API writes them) -> text; sync or async."""


def user_message(content: str) -> Message:
    """A message in the role "user"."""
    return {"role": "user", "content": content}


def assistant_message(content: str) -> Message:
    """A message in the role "assistant"."""
    return {"role": "assistant", "content": content}


def check_url(url: Any, key: str) -> str:
    """The address of a server, unchanged.

    Args:
      url: as somebody wrote it.
      key: of the configuration or command line that holds it, for messages.

    Raises:
      UserError: no request over HTTP can be sent to it.

    >>> check_url("http://localhost:8000/v1", "data.url")
    'http://localhost:8000/v1'
    """
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (TypeError, ValueError, AttributeError):  # no text; a port that is no number
        good = False
    if not good or not url.isprintable() or " " in url:
        raise UserError(f"{key} = {url!r:.80}; write an address such as http://localhost:8000/v1")
    return url


def endpoint(
    url: str,
    model: str,
    *,
    key: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
    fields: Mapping[str, Any] = NOTHING,
    timeout: float | None = None,
    most_bytes: int | None = None,
    read: Callable[[Mapping[str, Any]], Any] = lambda choice: choice["message"]["content"],
) -> Speaker:
    """A model behind an OpenAI-compatible endpoint.

    Args:
      url: of the API's base, such as "http://localhost:8000/v1".
      model: its name there.
      key: for the header "Authorization", or "".
      max_tokens: limit of an answer.
      temperature: of sampling.
      fields: further ones of each request, such as "seed".
      timeout: seconds until the whole answer has arrived, or TimeoutError is raised; None waits.
      most_bytes: of a response, or ValueError is raised; None takes any.
      read: the first choice of a response -> what the speaker returns.
    """
    fixed = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **fields}
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def speak(messages: list[Message]) -> Any:
        body = json.dumps({**fixed, "messages": list(map(dict, messages))}).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, headers)
        try:
            with _opener().open(request, timeout=timeout) as reply:
                content = json.loads(_body(reply, most_bytes))
                _check_error(content, request.full_url, reply.headers)
                return read(content["choices"][0])
        except urllib.error.HTTPError as error:
            # The body has the reason; the status alone does not.
            with contextlib.suppress(OSError, http.client.HTTPException):
                reply_text = " ".join(error.read(300).decode("utf-8", "replace").split())
                error.msg = f"{error.msg}: {reply_text}" if reply_text else error.msg
            raise

    return speak


def keyed_endpoint(
    url: str, model: str, key_variable: str = "", *, key: str = "data.key_variable", **more: Any
) -> Speaker:
    """``endpoint`` as a configuration names it, its key in an environment variable.

    Args:
      url: as in ``endpoint``.
      model: as in ``endpoint``.
      key_variable: the variable that holds the key, or "".
      key: of the configuration that names the variable, for messages.
      **more: further arguments of ``endpoint``.

    Raises:
      UserError: there is no such variable, the address is none, or another value could not be sent.
    """
    table = key.rpartition(".")[0]
    check_url(url, f"{table}.url")
    _check_fields({"model": model, **more}, table)
    secret = environment_variable(key_variable, key) if key_variable else ""
    return endpoint(url, model, key=secret, **more)


def _check_fields(fields: Mapping[str, Any], table: str) -> None:
    """Raises UserError for a field of requests that every server would refuse."""
    model, tokens = fields["model"], fields.get("max_tokens", 1)
    temperature = fields.get("temperature", 0.0)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    for name, value, good, problem in (
        ("model", model, isinstance(model, str) and model.strip(), "the name of a model there"),
        ("max_tokens", tokens, type(tokens) is int and tokens > 0, "a whole number above 0"),
        ("temperature", temperature, number and 0 <= temperature < math.inf, "0 or more"),
    ):
        if not good:
            raise UserError(f"{table}.{name} = {value!r:.80}; write {problem}")


def environment_variable(name: str, key: str) -> str:
    """The value of an environment variable that a key of the configuration names.

    Raises:
      UserError: there is none of that name.
    """
    if name not in os.environ:
        raise UserError(f"{key} names {name!r}, and there is no such environment variable")
    return os.environ[name]


def _check_error(content: Any, url: str, headers: Any) -> None:
    """Raises the HTTPError that a body names, as routers do that have sent the status 200 before.

    >>> _check_error({"error": {"code": 502, "message": "no provider"}}, "http://a/v1", None)
    Traceback (most recent call last):
    ...
    urllib.error.HTTPError: HTTP Error 502: no provider
    """
    error = content.get("error") if isinstance(content, dict) and "choices" not in content else None
    if not isinstance(error, dict):
        return
    code = error.get("code")
    if type(code) is int and 400 <= code < 600:
        reason = " ".join(str(error.get("message", "")).split())[:300]
        raise urllib.error.HTTPError(url, code, reason, headers, io.BytesIO())


def _body(reply: Any, most: int | None) -> bytes:
    """The body of a response.

    Raises:
      ValueError: it has more than ``most`` bytes.
      IncompleteRead: the connection ended before it did, which read1 does not tell.
    """
    pieces, size = [], 0
    while piece := reply.read1(1 << 16):
        size += len(piece)
        if most is not None and size > most:
            raise ValueError(f"a response of more than {most} bytes")
        pieces.append(piece)
    if reply.length:
        raise http.client.IncompleteRead(b"".join(pieces)[-80:], reply.length)
    return b"".join(pieces)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Opens requests with a time limit for the response, and follows no redirect."""
    return urllib.request.build_opener(_NoRedirect, _Http, _Https)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET, and takes the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """Refuses, so that the status is an HTTPError."""


class _Timed(io.RawIOBase):
    """Bytes of a socket until a time. Its own timeout is for each piece, however many come."""

    def __init__(self, raw: Any, sock: socket.socket, seconds: float) -> None:
        self._raw, self._sock, self._until = raw, sock, time.monotonic() + seconds

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Raises TimeoutError when the time is over."""
        self._sock.settimeout(max(self._until - time.monotonic(), 0.001))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Closes the socket's file, too."""
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        if (seconds := sock.gettimeout()) is not None:
            self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, seconds))


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, request, context=self._context)  # type: ignore[attr-defined]


async def reply_of(speaker: Speaker, messages: Sequence[Message]) -> str:
    """The answer of a speaker to messages.

    Raises:
      EnvError: it is no text.
    """
    text = await run_either(speaker, list(messages))
    if not isinstance(text, str):
        raise EnvError(f"the other model said {text!r:.60}, not text")
    return text


def behind_endpoint(make: Callable[..., HostEnv], name: str) -> Callable[..., HostEnv]:
    """A maker of an environment for configurations, which name its speaker.

    Its argument ``name`` becomes ``FILE.py:function`` from messages to text or, where that is left
    out, a model behind an endpoint: ``url`` and ``model`` as in ``endpoint``, ``key_variable``,
    the environment variable that holds its key, ``max_tokens`` and ``temperature``.

    Args:
      make: takes the speaker by this name, and other arguments that a configuration can write.
      name: of the speaker among its arguments.
    """

    def configured(**options: Any) -> HostEnv:
        of_endpoint = {n: options.pop(n) for n in _ENDPOINT if n in options}
        if spec := options.pop(name, ""):
            speaker = load(spec, f"data.{name}")
        elif {"url", "model"} <= of_endpoint.keys():
            speaker = keyed_endpoint(**of_endpoint)
        else:
            raise UserError(
                f"data.{name} is missing: name a FILE.py:function, or give url and model"
            )
        return make(**{name: speaker}, **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    added = {**_ENDPOINT, name: ""}
    others = [p for n, p in inspect.signature(make).parameters.items() if n != name]
    parameters = [p.replace(kind=keyword) for p in others]
    parameters += [inspect.Parameter(n, keyword, default=value) for n, value in added.items()]
    functools.update_wrapper(configured, make)
    configured.__name__ = make.__name__.removesuffix("_env")
    configured.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return configured


_ENDPOINT = {"url": "", "model": "", "key_variable": "", "max_tokens": 512, "temperature": 1.0}
