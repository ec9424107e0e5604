"""Whatever bytes a client sends, over HTTP or to JetStream's server: a reply of their protocol, or
the connection is closed; never an error of the server, and the next client is served."""

import json
import socket
import types

import hypothesis
import pytest
from fuzzing import anything, damaged, edits, outcome, settings
from hypothesis import strategies as st
from serving.test_http import FINE, HEAD, post, send, serving

from jrl.models.tokenizer import CharTokenizer
from jrl.zoo.jetstream import server as jetstream

BODY = json.dumps(FINE).encode()
MESSAGE = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LINES = st.lists(
    st.sampled_from(
        [
            *(b"GET / HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"PRI * HTTP/2.0", b"", b"\0"),
            *(b"host: x", b"content-length: 3", b"content-length: -1", b"content-length: 9999999"),
            *(b"transfer-encoding: chunked", b"expect: 100-continue", b"connection: close"),
            *(b"upgrade: websocket", b"content-type: application/json", b"a" * 100, b"\xff: \xff"),
            *(b"authorization: Bearer \xff", b"5", b"{}", b"[", b'{"model": "parrot"}'),
        ]
    ),
    max_size=8,
).map(b"\r\n".join)


@pytest.fixture(scope="module")
def server():
    with serving() as (running, _):
        yield running


@hypothesis.given(edits.map(lambda changes: damaged(MESSAGE, changes)) | LINES | st.binary())
@hypothesis.example(CHUNKED)
@hypothesis.example(CHUNKED.replace(b"0\r\n\r\n", b"-1\r\n\r\n"))
@hypothesis.example(MESSAGE + MESSAGE + HEAD)
@hypothesis.example(HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}")
@settings(150)
def test_any_bytes_get_a_reply_or_the_connection_is_closed(server, data):
    reply = b""
    try:
        with send(server, data) as connection:
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                reply += piece
    except ConnectionError:
        pass
    assert not reply or reply.startswith(b"HTTP/1.1 ")
    statuses = [line for line in reply.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(int(line.split()[1]) < 500 for line in statuses)


def test_a_sound_request_is_served_after_all_that(server):
    assert post(server, FINE)[0] == 200


@hypothesis.given(
    st.sampled_from([None, "text_content", "token_content"]),
    st.text(max_size=30),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=14),
    st.integers(-(2**31), 2**31 - 1) | st.integers(0, 22),
)
@settings(100)
def test_any_request_to_jetstream_is_taken_or_refused(kind, text, ids, most):
    request = types.SimpleNamespace(
        WhichOneof=lambda name: kind,
        text_content=types.SimpleNamespace(text=text),
        token_content=types.SimpleNamespace(token_ids=ids),
        max_tokens=most,
    )
    sizes = {"prompt_tokens": 12, "new_tokens": 20, "vocab_size": 48}
    engine = types.SimpleNamespace(tokenizer=CharTokenizer(), **sizes)
    requests = []
    message = outcome(lambda: requests.append(jetstream._check(request, engine)))
    if requests:
        tokens, _ = requests[0]
        assert 0 < len(tokens) <= 12
        assert all(0 <= i < 48 for i in tokens)
        assert 1 <= most <= 20
    else:
        assert "\n" not in message


@hypothesis.given(st.dictionaries(st.sampled_from(sorted(FINE)), anything), st.booleans())
@hypothesis.example({"prompt": [0]}, False)
@settings(100)
def test_any_json_body_gets_a_reply_below_500(server, changes, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, reply = post(server, FINE | changes, path)
    assert status < 500, reply
    assert status == 200 or reply["error"]["message"]
