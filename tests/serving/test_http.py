"""The HTTP server, by OpenAI's own client and by raw requests, over an engine that repeats prompts.

The last tests serve a real policy.
"""

import contextlib
import functools
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from needs_extra import require

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.sampling.request import (
    PartialCompletion,
    RequestFeatures,
    RequestLimits,
    TokenLogprobs,
)
from jrl.serving.http import Service
from jrl.serving.server import HttpServer, run
from jrl.serving.worker import EngineWorker
from jrl.types import StopReason

require("serve")
require("dev", "openai")
import openai  # noqa: E402

pytestmark = pytest.mark.extra("serve")

LIMITS = RequestLimits(
    slots=4,
    prompt_tokens=20,
    max_new_tokens=30,
    vocab_size=48,
    max_length=40,
    stop_tokens=8,
    biases=True,
)
NAMED = {"model": "parrot", "queue": 4}


class Talker(CharTokenizer):
    """The built-in tokenizer, with a chat template."""

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        return ";".join(m["content"] for m in messages)


class Parrot:
    """Draws the prompt again and again, a token at a time; "z" ends it. Member m starts at m.

    A prompt that begins with "=" is refused, with "?" fails later, with "," waits for ``gate``.
    """

    def __init__(self):
        self.failure = None
        self.gate = threading.Event()
        self.aborted, self.closed, self.threads = [], False, []

    def submit(self, request, on_update):
        text = Talker().decode(request.tokens)
        if text.startswith("="):
            raise UserError("sampling.prompt = '='; the engine does not take it")
        handle = threading.Event()
        thread = threading.Thread(target=self._draw, args=(text, request, on_update, handle))
        thread.start()
        self.threads.append(thread)
        return handle

    def _draw(self, text, request, on_update, handle):
        if text.startswith("?"):
            on_update(0, RuntimeError("no seed of its own"))
            return
        while text.startswith(",") and not self.gate.wait(0.01) and not handle.is_set():
            pass
        running = {m: PartialCompletion(0, m, request, Talker()) for m in range(request.n)}
        for i in range(request.max_new_tokens):
            for m in [*running]:
                if handle.is_set():
                    return
                # a prompt of control tokens alone is no text
                letter = text[(i + m) % len(text)] if text else "z"
                (token,) = [1] if letter == "z" else Talker().encode(letter)
                stop = StopReason.STOP_TOKEN if token == 1 else StopReason.RUNNING
                if i + 1 == request.max_new_tokens and token != 1:
                    stop = StopReason.LENGTH
                top = ((token, -0.5), (2, -1.5), (3, float("-inf")))
                reports = [TokenLogprobs(-0.5, top[: request.top_logprobs or 0])]
                wants_logprobs = request.top_logprobs is not None
                update = running[m].extend(
                    [token], [-0.5], 0, stop, reports if wants_logprobs else ()
                )
                on_update(m, update)
                if update.completion is not None:
                    del running[m]

    def abort(self, handle):
        handle.set()
        self.aborted.append(handle)

    def close(self, seconds):
        self.closed = True
        self.gate.set()


@contextlib.contextmanager
def serving(queue=4):
    parrot = Parrot()
    service = Service(parrot, Talker(), LIMITS, **NAMED | {"queue": queue})
    running = HttpServer(service, "127.0.0.1", 0, 1.0)
    try:
        yield running, parrot
    finally:
        parrot.gate.set()
        running.stop()
        assert running.wait(10)
        assert running.service.pending == 0
        for thread in parrot.threads:
            thread.join()


@pytest.fixture(scope="module")
def server():
    with serving() as (running, _):
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def post(running, body, path="/v1/completions", kind="application/json"):
    """Status and JSON of a raw request."""
    connection = http.client.HTTPConnection(running.host, running.port, timeout=10)
    with contextlib.closing(connection):
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        connection.request("POST", path, data, {"content-type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


# ---------------------------------------------------------------- what is right


def test_the_model_is_listed(client, server):
    assert [m.id for m in client.models.list()] == ["parrot"]
    assert client.models.retrieve("parrot").owned_by == "jrl"
    connection = http.client.HTTPConnection(server.host, server.port)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["status"]) == (200, "ok")


def test_a_completion(client):
    reply = client.completions.create(model="parrot", prompt="abc", max_tokens=5)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("abcab", "length", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 5)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert abs(reply.created - time.time()) < 60


def test_without_max_tokens_a_completion_has_16_and_a_chat_fills_the_limit(client):
    reply = client.completions.create(model="parrot", prompt="abc")
    assert len(reply.choices[0].text) == 16
    messages = [{"role": "user", "content": "a" * 15}]
    reply = client.chat.completions.create(model="parrot", messages=messages)
    assert len(reply.choices[0].message.content) == LIMITS.max_length - 15
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    reply = client.chat.completions.create(model="parrot", messages=messages)
    assert len(reply.choices[0].message.content) == LIMITS.max_new_tokens


def test_many_prompts_and_many_choices(client):
    reply = client.completions.create(model="parrot", prompt=["abc", [3, 4]], n=2, max_tokens=3)
    assert [(c.index, c.text) for c in reply.choices] == [
        *((0, "abc"), (1, "bca")),
        *((2, "121"), (3, "212")),
    ]
    assert reply.usage.prompt_tokens == 5


def test_the_stop_token_is_counted_but_not_shown(client):
    reply = client.completions.create(model="parrot", prompt="abz", logprobs=1, max_tokens=9)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == ("ab", "stop")
    assert choice.logprobs.tokens == ["a", "b"]
    assert reply.usage.completion_tokens == 3


def test_stop_strings_end_the_text_before_them(client):
    reply = client.completions.create(
        model="parrot", prompt="abcd", stop=["da", "dx"], max_tokens=20, logprobs=0
    )
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    assert choice.logprobs.tokens == ["a", "b", "c"]


def test_logprobs_of_completions(client):
    reply = client.completions.create(model="parrot", prompt="abc", max_tokens=3, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[1] == {"b": -0.5, "0": -1.5}


def test_logprobs_of_chats(client):
    reply = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "ab")
    first, second = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -0.5)
    assert [(t.token, t.logprob) for t in second.top_logprobs] == [
        *(("b", -0.5), ("0", -1.5), ("1", -9999.0))
    ]


@pytest.mark.parametrize("stop", [None, "cab"])
def test_a_stream_equals_the_complete_reply(client, stop):
    ask = {"model": "parrot", "prompt": "abc", "n": 2, "max_tokens": 7, "logprobs": 1, "stop": stop}
    complete = client.completions.create(**ask)
    pieces = list(
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert len({piece.id for piece in pieces}) == 1
    assert pieces[-1].usage == complete.usage
    for choice in complete.choices:
        mine = [c for piece in pieces for c in piece.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [x for c in mine for x in getattr(c.logprobs, name)]
            assert joined == getattr(choice.logprobs, name), name
        assert len(mine) > 1 or stop


def test_a_chat_stream_begins_with_the_role(client):
    messages = [{"role": "user", "content": "abc"}]
    pieces = list(
        client.chat.completions.create(
            model="parrot", messages=messages, max_tokens=4, stream=True, logprobs=True
        )
    )
    deltas = [piece.choices[0].delta for piece in pieces]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(d.content or "" for d in deltas) == "abca"
    assert pieces[0].object == "chat.completion.chunk"
    assert pieces[-1].choices[0].finish_reason == "length"


def test_tokens_arrive_as_they_are_sampled():
    with serving() as (running, parrot):
        connection = http.client.HTTPConnection(running.host, running.port, timeout=10)
        with contextlib.closing(connection):
            body = {"model": "parrot", "messages": [{"role": "user", "content": ",a"}]}
            headers = {"content-type": "application/json"}
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), headers
            )
            response = connection.getresponse()
            assert b"assistant" in response.readline()  # while no token has been drawn
            parrot.gate.set()
            assert response.read().endswith(b"data: [DONE]\n\n")


# ---------------------------------------------------------------- what is wrong

FINE = {"model": "parrot", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
BAD = [
    ({"prompt": "a" * 21}, 400, "prompt", "21 tokens; this server takes at most 20"),
    ({"prompt": ""}, 400, "prompt", "prompt is empty"),
    ({"prompt": []}, 400, "prompt", "no prompt"),
    ({"prompt": None}, 400, "prompt", "must be a string"),
    ({"prompt": [1, 48]}, 400, "prompt", "token id 48; ids are 0 to 47"),
    ({"prompt": [-1]}, 400, "prompt", "token id -1"),
    ({"prompt": [True]}, 400, "prompt", "must be a string"),
    ({"prompt": "ABC"}, 400, "prompt", "'A'"),
    ({"prompt": "="}, 400, None, "the engine does not take it"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens = 0"),
    ({"max_tokens": 31}, 400, "max_tokens", "can write 30"),
    ({"max_tokens": 25, "prompt": "a" * 16}, 400, "max_tokens", "can write 24"),
    ({"temperature": -0.1}, 400, "temperature", "temperature = -0.1"),
    ({"temperature": float("nan")}, 400, "temperature", "temperature = nan"),
    ({"temperature": "hot"}, 400, "temperature", "not a string"),
    ({"temperature": 10**400}, 400, "temperature", "must be 0 (greedy) or"),
    ({"temperature": 1e-40}, 400, "temperature", "must be 0 (greedy) or"),
    ({"top_p": 0}, 400, "top_p", "above 0, at most 1"),
    ({"top_p": 1.1}, 400, "top_p", "top_p = 1.1"),
    ({"top_k": -2}, 400, "top_k", "must be -1 to 48"),
    ({"top_k": 49}, 400, "top_k", "top_k = 49"),
    ({"top_k": True}, 400, "top_k", "an integer"),
    ({"min_p": 1}, 400, "min_p", "below 1"),
    ({"model": "gpt"}, 404, "model", "this server has 'parrot'"),
    ({"model": None}, 400, "model", "model is missing"),
    ({"n": 5}, 400, "n", "n = 5; this server decodes 4"),
    ({"n": 0}, 400, "n", "n = 0"),
    ({"n": 1.5}, 400, "n", "an integer"),
    ({"n": 3, "prompt": ["a", "b", "c"]}, 400, None, "9 completions at once"),
    ({"best_of": 2}, 400, "best_of", "best_of = 2"),
    ({"stop": "ABC"}, 400, "stop", "'A'"),
    ({"stop": ""}, 400, "stop", "empty stop string"),
    ({"stop": ["a"] * 5}, 400, "stop", "at most 4"),
    ({"stop": 3}, 400, "stop", "must be a string"),
    ({"seed": 2**63}, 400, "seed", "seed = 9223372036854775808"),
    ({"seed": 1.5}, 400, "seed", "an integer"),
    ({"logprobs": 21}, 400, "logprobs", "must be 0 to 20"),
    ({"logit_bias": {"48": 1}}, 400, "logit_bias", "0 to 47"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
    ({"logit_bias": {"3": 101}}, 400, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"3": True}}, 400, "logit_bias", "['3'] must be a number, not a boolean"),
    ({"logit_bias": [3]}, 400, "logit_bias", "must be an object"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"echo": True}, 400, "echo", "not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
    ({"max_token": 3}, 400, "max_token", "unknown parameter"),
]
BAD += [({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported")]
BAD_CHATS = [
    ({"messages": []}, 400, "messages", "at least one"),
    ({"messages": "abc"}, 400, "messages", "an array"),
    ({"messages": [{"content": "a"}]}, 400, "messages", "a role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "text parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "text parts"),
    ({"messages": [{"role": "user", "content": "ABC"}]}, 400, "messages", "'A'"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0]", "must be an object"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
    ({"prompt": "abc"}, 400, "prompt", "unknown parameter"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "constrained decoding"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [("/v1/completions", FINE | bad, *rest) for bad, *rest in BAD]
    + [("/v1/chat/completions", CHAT | bad, *rest) for bad, *rest in BAD_CHATS],
)
def test_bad_requests_are_named(server, path, body, status, param, message):
    code, reply = post(server, body, path)
    assert code == status, reply
    error = reply["error"]
    assert message in error["message"]
    assert param is None or error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        ("{", "application/json", 400, "not JSON"),
        (b"\xff", "application/json", 400, "not JSON"),
        ("[1]", "application/json", 400, "must be a JSON object, not an array"),
        ("[" * 100_000, "application/json", 400, "not JSON"),
        ('{"n": 1, "n": 2}', "application/json", 400, "the key 'n' is there twice, with 1 and"),
        (json.dumps(FINE | {"prompt": "\ud800"}), "application/json", 400, "surrogates"),
        (json.dumps(FINE), "text/plain", 415, "must be 'application/json'"),
        (b" " * (17 << 20), "application/json", 413, "longer than"),
    ],
)
def test_bad_bodies_are_named(server, body, kind, status, message):
    code, reply = post(server, body, kind=kind)
    assert code == status
    assert message in reply["error"]["message"]
    assert post(server, FINE)[0] == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server, monkeypatch):
    """20 tokens of 1 character at most, and 1,000 characters to spare for what texts lose."""
    encoded = []
    monkeypatch.setattr(Talker, "encode", lambda self, text, **_: encoded.append(text) or [2])
    chat = {"model": "parrot", "messages": [{"role": "user", "content": "1" * 1100}]}
    for path, body in (
        ("/v1/completions", FINE | {"prompt": "1" * 1100}),
        ("/v1/completions", FINE | {"prompt": ["1", "1" * 1100]}),
        ("/v1/chat/completions", chat),
    ):
        status, reply = post(server, body, path)
        assert status == 400
        assert "characters; this server takes at most 20 tokens" in reply["error"]["message"]
        assert reply["error"]["code"] == "context_length_exceeded"
    assert max(map(len, encoded)) == 1


def test_the_body_is_bounded_by_what_prompts_can_be(server):
    status, reply = post(server, b" " * (1 << 20))
    assert status == 413
    most = (1 << 18) + 6 * (20 + 1000) * (4 + 4)
    assert f"longer than {most} bytes" in reply["error"]["message"]


def send(running, data):
    connection = socket.create_connection((running.host, running.port), timeout=10)
    connection.sendall(data)
    return connection


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_an_upload_that_stops_halfway_is_ended(monkeypatch, caplog):
    monkeypatch.setattr("jrl.serving.http.READ_SECONDS", 0.3)
    with serving() as (running, _):
        with send(running, HEAD + b'content-length: 100\r\n\r\n{"mod') as half:
            reply = b"".join(iter(functools.partial(half.recv, 4096), b""))
        assert b"408" in reply.splitlines()[0]
        assert b"the body did not arrive in 0.3 s (5 bytes did)" in reply
        send(running, HEAD + b'content-length: 100\r\n\r\n{"mod').close()  # a client that leaves
        time.sleep(0.2)
        assert post(running, FINE)[0] == 200
    assert not caplog.records


SILENT = """
import resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
sys.path[:0] = sys.argv[1:]
import test_http as t
with t.serving() as (running, _):
    print(running.port, flush=True)
    sys.stdin.readline()
"""


def test_more_silent_connections_than_files_cut_no_good_client():
    """The oldest silent one is closed for a new one, also under a limit of few files."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-c", SILENT, here, os.path.dirname(here)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        running = types.SimpleNamespace(host="127.0.0.1", port=int(process.stdout.readline()))
        silent = []
        try:
            for _ in range(3):
                silent += [socket.create_connection(("127.0.0.1", running.port)) for _ in range(90)]
                begin = time.monotonic()
                assert post(running, FINE)[0] == 200
                assert time.monotonic() - begin < 10
            silent[0].settimeout(10)
            assert silent[0].recv(1) == b""  # closed before the time of a header was over
        finally:
            for each in silent:
                each.close()
            _, errors = process.communicate("\n", timeout=60)
        assert process.returncode == 0
        assert "Too many open files" not in errors


def test_requests_are_logged_without_contents_unless_asked(client):
    for contents in (False, True):
        lines, parrot = [], Parrot()
        service = Service(parrot, Talker(), LIMITS, **NAMED, api_key="sesame")
        running = HttpServer(service, "127.0.0.1", 0, 1.0, lines.append, contents=contents)
        try:
            with openai.OpenAI(base_url=running.url + "/v1", api_key="sesame") as mine:
                mine.completions.create(**FINE)
                assert list(mine.chat.completions.create(**CHAT, stream=True))
            path = "/v1/completions?api_key=sesame"
            assert post(running, FINE, path)[0] == 401
            until(lambda lines=lines, n=9 if contents else 3: len(lines) == n)
        finally:
            running.stop()
            assert running.wait(10)
        logged = lines[:: 3 if contents else 1]
        shapes = [
            r"POST /v1/completions  200  3 \+ 2 tokens  \d+ ms",
            r"POST /v1/chat/completions  200  3 \+ 2 tokens  \d+ ms",
            r"POST /v1/completions  401  \d+ ms",
        ]
        for line, shape in zip(logged, shapes, strict=True):
            assert re.fullmatch(shape, line)
        assert "sesame" not in "\n".join(lines)
        if contents:
            assert '"prompt":"abc"' in lines[1].replace(" ", "")
            assert '"text":"ab"' in lines[2].replace(" ", "")


def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr("jrl.serving.server.HEADER_SECONDS", 0.3)
    with serving() as (running, _):
        for data in (b"", HEAD):
            with send(running, data) as silent:
                assert silent.recv(100) == b""
        assert post(running, FINE)[0] == 200


def test_half_a_header_after_a_whole_request_is_closed(monkeypatch):
    """In one piece or dribbled; and a client that asks again in time is served."""
    monkeypatch.setattr("jrl.serving.server.HEADER_SECONDS", 0.4)
    body = json.dumps(FINE).encode()
    message = HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    with serving() as (running, _):
        for pieces in (1, 100):
            with send(running, message) as connection:
                for again in (message, b""):
                    reply = http.client.HTTPResponse(connection)
                    reply.begin()
                    assert (reply.status, bool(reply.read())) == (200, True)
                    connection.sendall(again)
                begin, closed = time.monotonic(), b"?"
                size = -(-len(HEAD) // pieces)
                with contextlib.suppress(OSError):  # what is sent after the end is refused
                    for i in range(0, len(HEAD), size):
                        connection.sendall(HEAD[i : i + size])
                        time.sleep(0.02 if pieces > 1 else 0)
                    closed = connection.recv(100)
                assert closed in (b"", b"?")
                assert time.monotonic() - begin < 3
        assert post(running, FINE)[0] == 200


def test_an_api_key_is_needed_where_there_is_one():
    service = Service(Parrot(), Talker(), LIMITS, **NAMED, api_key="sesame")
    running = HttpServer(service, "127.0.0.1", 0, 1.0)
    url = running.url + "/v1"
    try:
        with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as right:
            assert right.completions.create(**FINE).choices[0].text
            assert [m.id for m in right.models.list()] == ["parrot"]
        with openai.OpenAI(base_url=url, api_key="simsim", max_retries=0) as wrong:
            for ask in (lambda: wrong.completions.create(**FINE), wrong.models.list):
                with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
                    ask()
        assert post(running, FINE)[0] == 401
        assert post(running, {}, "/v1/chat/completions")[0] == 401
        connection = http.client.HTTPConnection(running.host, running.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
    finally:
        running.stop()
        assert running.wait(10)


def test_a_reply_says_what_its_logprobs_are_of(client):
    assert "temperature" in client.completions.create(**FINE, logprobs=1).logprobs_of
    assert not hasattr(client.completions.create(**FINE), "logprobs_of")


def test_unknown_paths_and_verbs(client, server):
    for path in ("/v1/embeddings", "/chat/completions"):  # of a base URL without /v1
        status, reply = post(server, FINE, path)
        assert status == 404
        assert "this server has POST /v1/chat/completions" in reply["error"]["message"]
    assert post(server, FINE, "/v1/models")[0] == 405
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("OPTIONS", "/v1/completions")
        response = connection.getresponse()
        assert (response.status, response.headers["allow"]) == (405, "POST")
        assert "Method Not Allowed" in json.loads(response.read())["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError, match="temperature = -1"):
        client.completions.create(**FINE, temperature=-1)


def test_a_full_queue_refuses_and_the_others_continue():
    with serving(queue=2) as (running, parrot):
        replies = []
        slow = FINE | {"prompt": ",a", "n": 3}
        ask = lambda: replies.append(post(running, slow))  # noqa: E731
        others = [threading.Thread(target=ask) for _ in range(2)]
        for other in others:
            other.start()
        until(lambda: running.service.pending == 6)
        status, reply = post(running, FINE)
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
        assert "6 of 6 completions" in reply["error"]["message"]
        with (
            openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(**FINE)
        parrot.gate.set()
        for other in others:
            other.join()
        assert [status for status, _ in replies] == [200, 200]
        assert post(running, FINE)[0] == 200


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slots(stream):
    with serving() as (running, parrot):
        body = json.dumps(FINE | {"prompt": ",a", "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection((running.host, running.port)) as raw:
            raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            until(lambda: running.service.pending == 1)
        until(lambda: running.service.pending == 0)
        assert len(parrot.aborted) == 1
        assert post(running, FINE)[0] == 200
        assert len(parrot.aborted) == 1  # what has ended is not aborted


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_affects_no_other(stream):
    with serving() as (running, parrot):
        replies = []
        slow = threading.Thread(
            target=lambda: replies.append(post(running, FINE | {"prompt": ",a"}))
        )
        slow.start()
        until(lambda: running.service.pending == 1)
        with openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0) as client:
            ask = FINE | {"prompt": "?", "stream": stream}
            with pytest.raises(openai.APIError, match="no seed of its own"):
                list(client.completions.create(**ask))
        parrot.gate.set()
        slow.join()
        assert replies[0][0] == 200


# ---------------------------------------------------------------- the end


class Together:
    """``run`` in the main thread, as it must be, while ``work`` happens beside it."""

    def __init__(self, work):
        self.parrot, self.lines = Parrot(), []
        self.work, self.error = work, None

    def echo(self, line):
        self.lines.append(line)
        if line.startswith("serving"):
            host, port = line.split("/")[2].split(":")
            self.where = types.SimpleNamespace(host=host, port=int(port))
            threading.Thread(target=self._work).start()

    def _work(self):
        try:
            self.work(self)
        except BaseException as error:
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def __call__(self, grace_seconds):
        self.service = Service(self.parrot, Talker(), LIMITS, **NAMED)
        place = {"host": "127.0.0.1", "port": 0}
        try:
            run(self.service, **place, grace_seconds=grace_seconds, echo=self.echo)
        finally:
            assert self.parrot.closed
            if self.error is not None:
                raise self.error


def ask_slowly(together, replies):
    """Two that wait at the gate: one for the whole reply, one for pieces."""
    ask, place = FINE | {"prompt": ",a"}, (together.where.host, together.where.port)

    def stream():
        with contextlib.closing(http.client.HTTPConnection(*place, timeout=10)) as connection:
            headers = {"content-type": "application/json"}
            body = json.dumps(ask | {"stream": True})
            connection.request("POST", "/v1/completions", body, headers)
            replies.append(connection.getresponse().read().decode().split("\n\n"))

    complete = lambda: replies.append(post(together.where, ask))  # noqa: E731
    threads = [threading.Thread(target=work) for work in (complete, stream)]
    for one in threads:
        one.start()
    until(lambda: together.service.pending == 2)
    return threads


def whole_and_pieces(threads, replies):
    """The two replies, when they are there: status and JSON, and the lines of the stream."""
    for one in threads:
        one.join()
    return sorted(replies, key=lambda reply: isinstance(reply, list))


def test_sigterm_lets_requests_finish():
    replies, threads = [], []

    def work(together):
        threads.extend(ask_slowly(together, replies))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((together.where.host, together.where.port))
        together.parrot.gate.set()
        for one in threads:
            one.join()

    before = signal.getsignal(signal.SIGTERM)
    together = Together(work)
    together(20.0)
    assert together.lines[-1] == "stopped"
    (status, reply), pieces = whole_and_pieces(threads, replies)
    assert (status, reply["choices"][0]["text"]) == (200, ",a")
    assert pieces[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(p.removeprefix("data: "))["choices"][0]["text"] for p in pieces[:-2]]
    assert "".join(texts) == ",a"
    assert signal.getsignal(signal.SIGTERM) is before


def test_requests_are_ended_after_the_grace_period():
    start = time.monotonic()
    replies, threads = [], []

    def work(together):
        threads.extend(ask_slowly(together, replies))

    together = Together(work)
    together(1.0)
    assert time.monotonic() - start < 8
    (status, reply), pieces = whole_and_pieces(threads, replies)
    assert status == 503
    assert "stopping" in reply["error"]["message"]
    assert "stopping" in pieces[-3]
    assert pieces[-2] == "data: [DONE]"
    assert together.service.pending == 0
    assert len(together.parrot.aborted) == 2


def test_an_engine_that_fails_ends_the_server_with_its_error():
    statuses = []

    def work(together):
        together.parrot.failure = MemoryError("out of slots")
        with contextlib.suppress(OSError):  # until the door closes
            while True:
                status, reply = post(together.where, FINE)
                assert status == 503
                assert "out of slots" in reply["error"]["message"]
                statuses.append(status)

    with pytest.raises(RuntimeError, match="the engine failed: out of slots"):
        Together(work)(1.0)
    assert statuses


def test_an_address_in_use_is_named(server):
    with pytest.raises(UserError, match=rf"--port {server.port}: .*in use"):
        HttpServer(server.service, server.host, server.port, 1.0)
    with pytest.raises(UserError, match=r"--host 192\.0\.2\.1 --port 0: .*assign"):
        HttpServer(server.service, "192.0.2.1", 0, 1.0)


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_without_the_extra_the_message_says_what_to_install(server, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="jrl serve needs "):
        HttpServer(server.service, "127.0.0.1", 0, 1.0)


# ---------------------------------------------------------------- a real policy

NETWORK = transformer(
    ModelConfig(
        vocab_size=48,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=32,
        max_length=40,
    )
)
SLOTS = 3


@functools.cache
def params():
    return jax.tree.map(lambda x: 2 * x, jax.jit(NETWORK.init)(jax.random.key(0)))


@contextlib.contextmanager
def real(**choices):
    """A client of a server whose engine decodes with a small network; and the worker."""
    mesh, talker = make_mesh(), Talker()
    sizes = {"slots": SLOTS, "prompt_tokens": 12, "max_new_tokens": 20, "chunk": 3}
    engine = Engine(
        NETWORK,
        params(),
        stop_tokens=talker.stop_ids,
        tokenizer=talker,
        requests=RequestFeatures(biases=True, reports=True),
        **sizes | choices,
    )
    worker = EngineWorker(engine, tokenizer=talker, mesh=mesh)
    service = Service(worker, talker, worker.limits, model="tiny", queue=40)
    running = HttpServer(service, "127.0.0.1", 0, 5.0)
    url = running.url + "/v1"
    try:
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            yield client, worker
    finally:
        running.stop()
        assert running.wait(20)
        worker.close(20)
        assert not worker._thread.is_alive()


@pytest.fixture(scope="module")
def policy():
    with real() as (client, worker):
        yield client, worker


def complete(policy, **ask):
    reply = policy[0].completions.create(**{"model": "tiny", "prompt": "2+2=", "seed": 7} | ask)
    return [choice.text for choice in reply.choices]


def test_a_seed_decides_whatever_else_is_sampled(policy):
    alone = complete(policy, n=2)
    assert alone[0] != alone[1]
    assert complete(policy, seed=8, n=2) != alone
    assert complete(policy, seed=-7) != complete(policy, seed=7)
    texts, others = [], []
    threads = [threading.Thread(target=lambda: texts.append(complete(policy, n=2)))]
    for i in range(6):
        ask = {"prompt": "abc"[: 1 + i % 3], "seed": i, "temperature": i / 4, "max_tokens": 3 + i}
        threads.append(
            threading.Thread(target=lambda ask=ask: others.append(complete(policy, **ask)))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone]
    assert len(others) == 6
    assert not policy[1]._handles


def test_without_a_seed_draws_differ(policy):
    assert len({complete(policy, seed=None)[0] for _ in range(4)}) > 1


def test_greedy_completions_are_those_of_whole_forward_passes(policy):
    tokens = Talker().encode("2+2=")
    place = jnp.arange(40, dtype=jnp.int32)[None]

    @jax.jit
    def logits(weights, row):
        return NETWORK.logits(weights, NETWORK.hidden(weights, row, place, 0 * place + 1)[0])

    while len(tokens) < 14 and tokens[-1] != 1:
        row = jnp.asarray([tokens + [0] * (40 - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(logits(params(), row)[0, len(tokens) - 1])))
    expected = Talker().decode(tokens[4:])
    assert complete(policy, temperature=0, max_tokens=10) == [expected]


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_are_of_the_distribution_sampled_from(policy, stream):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 11}
    sampling_params = {"temperature": 0.8, "top_p": 0.9, "logit_bias": {"5": 1.5}, "seed": 3}
    reply = policy[0].chat.completions.create(
        **ask, **sampling_params, logprobs=True, top_logprobs=20, stream=stream
    )
    choices = [c for piece in reply for c in piece.choices] if stream else reply.choices
    content = [t for c in choices if c.logprobs for t in c.logprobs.content]
    assert len(content) >= 5
    for token in content:
        top = [t.logprob for t in token.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert math.fsum(map(math.exp, top)) == pytest.approx(1, abs=2e-5)  # top_p keeps no more
        same = [t.logprob for t in token.top_logprobs if t.token == token.token]
        assert same == [pytest.approx(token.logprob, abs=1e-5)]


def test_greedy_logprobs_are_the_models_own(policy):
    """As OpenAI's are: of the logits as they are, bias and truncation aside."""
    ask = {"temperature": 0, "max_tokens": 9, "logit_bias": {"7": 4}, "extra_body": {"top_k": 3}}
    reply = policy[0].completions.create(model="tiny", prompt="2+2=", logprobs=5, **ask)
    logprobs = reply.choices[0].logprobs
    assert "the model's own" in reply.logprobs_of
    tokens = Talker().encode("2+2=" + reply.choices[0].text)
    place = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden = NETWORK.hidden(params(), jnp.asarray([tokens]), place, 0 * place + 1)[0]
    model_logprobs = jax.nn.log_softmax(NETWORK.logits(params(), hidden)[0])
    for i, (logprob, top) in enumerate(
        zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    ):
        row = model_logprobs[3 + i]
        assert logprob == pytest.approx(float(row[tokens[4 + i]]), abs=1e-5)
        likeliest = jnp.argsort(-row)[:5].tolist()
        assert list(top) == [Talker().decode([t], skip_special=False) for t in likeliest]
        assert list(top.values()) == [pytest.approx(float(row[t]), abs=1e-5) for t in likeliest]
    assert len(logprobs.tokens) > 3
    assert min(logprobs.token_logprobs) < -0.01
    plain = policy[0].completions.create(model="tiny", prompt="2+2=", **ask)
    assert plain.choices[0].text == reply.choices[0].text


def test_sampling_parameters_change_completions(policy):
    (forced,) = complete(policy, logit_bias={"7": 100}, max_tokens=4)
    assert forced == Talker().decode([7]) * 4
    endless = {"max_tokens": 9, "logit_bias": {"0": -100, "1": -100}}
    (free,) = complete(policy, **endless)
    assert len(free) == 9
    (stopped,) = complete(policy, **endless, stop=[free[3:5]])
    assert stopped == free[: free.index(free[3:5])]
    greedy = complete(policy, temperature=0)
    assert complete(policy, extra_body={"top_k": 1}) == greedy
    assert complete(policy, extra_body={"top_k": 0}, seed=1) == complete(policy, seed=1)


def test_a_client_that_goes_away_frees_its_slots_in_the_engine(policy, monkeypatch):
    client, worker = policy
    engine = worker._engine
    step, before = engine.step, engine.live_steps

    def slowly():
        time.sleep(0.2)
        return step()

    monkeypatch.setattr(engine, "step", slowly)
    ask = {"model": "tiny", "prompt": "1", "max_tokens": 20, "logit_bias": {"1": -100}}
    stream = client.completions.create(**ask, n=SLOTS, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: not engine.busy)
    assert engine.live_steps - before < 20 * SLOTS
    monkeypatch.undo()
    assert len(complete(policy, n=SLOTS)) == SLOTS


def test_an_engine_that_fails_fails_all_requests():
    with real() as (client, worker):

        def failing_step():
            raise ZeroDivisionError("a fault of the device")

        worker._engine.step = failing_step
        for status in (500, 503):
            with pytest.raises(openai.InternalServerError, match="a fault of the device") as caught:
                client.completions.create(model="tiny", prompt="1")
            assert caught.value.status_code == status
