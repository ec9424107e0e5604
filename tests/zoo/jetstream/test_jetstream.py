"""JetStream's interface on the row engine, and its own server spoken to over gRPC."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import types
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.types import StopReason
from jrl.zoo.jetstream import engine as jetstream_engine
from jrl.zoo.jetstream import server as jetstream

needs = pytest.mark.extra("jetstream")
CONFIG = ModelConfig(
    vocab_size=48,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    max_length=32,
)
NETWORK = transformer(CONFIG)
TOKENIZER = CharTokenizer()
SLOTS, PROMPT, NEW = 3, 12, 20
ENDLESS = np.where(np.arange(48) == 1, -np.inf, 0).astype(np.float32)
GREEDY = make_sampling_params(temperature=0.0).replace(bias=ENDLESS)
"""The likeliest tokens but for the one that stops."""


@cache
def params():
    """Weights large enough that the policy has preferences."""
    return jax.tree.map(lambda x: 3 * x, jax.jit(NETWORK.init)(jax.random.key(0)))


SIZES = {"slots": SLOTS, "prompt_tokens": PROMPT, "new_tokens": NEW}


def build(kind=jetstream_engine.SlotEngine, sampling_params=GREEDY, seed=1, **sizes):
    fixed = {"network": NETWORK, "tokenizer": TOKENIZER, "mesh": make_mesh()}
    return kind(
        jax.random.key(seed), params(), sampling_params=sampling_params, **fixed, **SIZES | sizes
    )


@cache
def slot_engine():
    return build()


def padded(prompt):
    tokens = np.zeros(16, np.int32)
    tokens[: len(prompt)] = prompt
    return {"padded_tokens": tokens, "true_length": len(prompt)}


def tokens_alone(prompt, count, engine=None):
    """Tokens of one request with the slots to itself."""
    engine = engine or slot_engine()
    weights, state = engine.load_params(), engine.init_decode_state()
    state = engine.insert(engine.prefill(params=weights, **padded(prompt)), state, slot=1)
    out = []
    for _ in range(count):
        token, valid, _ = np.asarray(engine.step())[1]
        if not valid or token in TOKENIZER.stop_ids:
            break
        out.append(int(token))
    return out


def likeliest(prompt, count):
    """Greedy tokens by complete forward passes, without the stop token."""
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        row = jnp.asarray([[*tokens, *[0] * (32 - length)]], jnp.int32)
        places = jnp.arange(32, dtype=jnp.int32)[None]
        logits = np.asarray(_logits(params(), row, places)[0, length - 1])
        tokens.append(int(np.argmax(logits + ENDLESS)))
    return tokens[len(prompt) :]


@jax.jit
def _logits(weights, tokens, positions):
    hidden, _ = NETWORK.hidden(weights, tokens, positions, jnp.ones_like(tokens))
    return NETWORK.logits(weights, hidden)


class ProtoRequest:
    """A request as protobuf gives it."""

    def __init__(self, text=None, ids=(), max_tokens=1):
        self.kind = "token_content" if text is None else "text_content"
        self.text_content = types.SimpleNamespace(text=text)
        self.token_content = types.SimpleNamespace(token_ids=list(ids))
        self.max_tokens = max_tokens

    def WhichOneof(self, name):
        return self.kind


def test_what_is_too_long_is_refused_before_it_is_encoded():
    encoded = []

    class Encoder(CharTokenizer):
        def encode(self, text, *, add_special=False):
            encoded.append(len(text))
            return super().encode(text)

    engine = types.SimpleNamespace(tokenizer=Encoder(), prompt_tokens=PROMPT, new_tokens=NEW)
    engine.vocab_size = 48
    assert jetstream._check(ProtoRequest("1" * PROMPT), engine) == ([3] * PROMPT, True)
    assert jetstream._check(ProtoRequest(ids=[3, 4]), engine) == ([3, 4], False)
    for too_long in (
        ProtoRequest("1" * 2_000_000),
        ProtoRequest(ids=[3] * (PROMPT + 1)),
        ProtoRequest("1" * (PROMPT + 1)),
    ):
        with pytest.raises(UserError, match="this server takes at most 12"):
            jetstream._check(too_long, engine)
    assert max(encoded) == PROMPT + 1


# ---------------------------------------------------------------- the engine, without JetStream


@pytest.mark.parametrize("prompt", [[5], [9, 3, 30, 2], list(range(2, 14))])
def test_greedy_completions_are_those_of_whole_forward_passes(prompt):
    tokens = tokens_alone(prompt, NEW + 3)
    assert tokens == likeliest(prompt, NEW)  # and no more than there is room for


def test_a_stop_token_ends_a_completion():
    often = np.where(np.arange(48) == 1, 4, 0).astype(np.float32)
    warm = build(sampling_params=make_sampling_params(temperature=1.0).replace(bias=often))
    lengths = [len(tokens_alone([9, 3], NEW, warm)) for _ in range(4)]
    assert min(lengths) < NEW


def test_slots_are_filled_emptied_and_filled_again():
    engine = slot_engine()
    weights, state = engine.load_params(), engine.init_decode_state()
    prompts = {0: [4, 8], 2: [11, 12, 13], 1: [7]}
    expected = {slot: likeliest(prompt, NEW) for slot, prompt in prompts.items()}
    later = {0: [20, 2, 2, 41]}
    tokens = {slot: [] for slot in prompts}
    for i in range(NEW):
        if i < 6 and i % 2 == 0:  # one more slot every other step
            slot = list(prompts)[i // 2]
            state = engine.insert(
                engine.prefill(params=weights, **padded(prompts[slot])), state, slot=slot
            )
        if i == 9:
            engine.free_resource(0)
        if i == 11:
            state = engine.insert(engine.prefill(params=weights, **padded(later[0])), state, slot=0)
            assert tokens[0] == expected[0][:9]
            tokens[0], expected[0] = [], likeliest(later[0], NEW)
        for slot, (token, valid, _) in enumerate(np.asarray(engine.step())):
            if valid:
                tokens[slot].append(int(token))
    for slot, count in {0: NEW - 11, 2: NEW - 2, 1: NEW - 4}.items():
        assert tokens[slot] == expected[slot][:count]


def test_nothing_compiles_after_the_warm_up():
    """And completions are those of an engine without it."""
    engine, cold = (
        build(sampling_params=make_sampling_params()),
        build(sampling_params=make_sampling_params()),
    )
    engine.compile()
    expected = tokens_alone((3, 4, 5), 4, cold)
    with compilations() as compiled:
        assert tokens_alone((3, 4, 5), 4, engine) == expected
        weights, state = engine.load_params(), engine.init_decode_state()
        for slot in (0, 2, 0, 1):  # one after the other, without a step between, and over another
            state = engine.insert(engine.prefill(params=weights, **padded([4, 8])), state, slot)
        for freed in ((), range(SLOTS)):
            for slot in freed:
                engine.free_resource(slot)
            valid = np.asarray(engine.step())[:, 1]
        assert not valid.any()
        engine.insert(engine.prefill(params=weights, **padded([9])), state, 1)
    assert not compiled


@needs
def test_nothing_compiles_in_the_servers_own_threads():
    ready = build(jetstream_engine.make_engine)
    ready.compile()
    with compilations() as compiled, serving(ready) as running:
        for prompt in ("1", "2+2=", "sort 312"):
            assert ask(running, prompt)[1] == likeliest(TOKENIZER.encode(prompt), NEW)
    assert not compiled


def test_a_prefix_may_be_deleted_once_inserted():
    engine = slot_engine()
    weights, state = engine.load_params(), engine.init_decode_state()
    prefix = engine.prefill(params=weights, **padded([4, 8]))
    state = engine.insert(prefix, state, slot=0)
    jetstream_engine.delete_arrays(prefix)
    assert int(engine.step()[0, 0]) == likeliest([4, 8], 1)[0]
    assert int(engine._rows.batch.slots.stop[0]) == StopReason.RUNNING


def test_requests_have_their_own_keys():
    warm = build(sampling_params=make_sampling_params(temperature=1.0))
    first, second = (tokens_alone([9, 3], 12, warm) for _ in range(2))
    assert first != second
    again = build(sampling_params=make_sampling_params(temperature=1.0))
    assert tokens_alone([9, 3], 12, again) == first


def test_what_does_not_fit_is_named():
    with pytest.raises(UserError, match="the model holds 32"):
        build(prompt_tokens=16)
    with pytest.raises(UserError, match="slots = 0"):
        build(slots=0)
    with pytest.raises(UserError, match="JetStream takes 32768"):
        build(prompt_tokens=40_000)
    with pytest.raises(UserError, match="prompt is empty"):
        slot_engine().prefill(params=None, padded_tokens=np.zeros(16, np.int32), true_length=0)


def test_without_jetstream_the_command_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "jetstream"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    jetstream_engine.library.cache_clear()
    with pytest.raises(UserError, match=r"pip install --no-deps google-jetstream==0\.2\.2"):
        jetstream_engine.library()


# ---------------------------------------------------------------- JetStream


@cache
def engine():
    return build(jetstream_engine.make_engine)


@contextlib.contextmanager
def serving(engine, queue=8):
    running = jetstream.JetStreamServer(engine, "127.0.0.1", 0, queue_requests=queue)
    try:
        yield running
    finally:
        start = time.monotonic()
        running.stop(2.0)
        assert time.monotonic() - start < 15
        assert not any(t.is_alive() for t in running.driver._all_threads)


@contextlib.contextmanager
def stub(running):
    import grpc
    from jetstream.core.proto import jetstream_pb2_grpc

    with grpc.insecure_channel(f"{running.host}:{running.port}") as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


def request(prompt, max_tokens):
    proto = jetstream_engine.library().proto.DecodeRequest
    if isinstance(prompt, str):
        return proto(text_content=proto.TextContent(text=prompt), max_tokens=max_tokens)
    return proto(token_content=proto.TokenContent(token_ids=prompt), max_tokens=max_tokens)


def ask(running, prompt, max_tokens=NEW):
    """Text and ids of a completion."""
    with stub(running) as client:
        samples = [r.stream_content.samples[0] for r in client.Decode(request(prompt, max_tokens))]
    return "".join(s.text for s in samples), [i for s in samples for i in s.token_ids]


@contextlib.contextmanager
def rpc_error(name, message):
    import grpc

    with pytest.raises(grpc.RpcError, match=message) as error:
        yield
    assert error.value.code() is getattr(grpc.StatusCode, name)


@pytest.fixture(scope="module")
def server():
    with serving(engine()) as running:
        yield running


@needs
def test_it_is_an_engine_of_jetstream():
    api = jetstream_engine.library().engine
    assert isinstance(engine(), api.Engine)
    assert (engine().max_prefill_length, engine().samples_per_slot) == (16, 1)
    state = engine().init_decode_state()
    state = engine().insert(
        engine().prefill(params=engine().load_params(), **padded([5])), state, 2
    )
    state, result = engine().generate(engine().load_params(), state)
    result = result.convert_to_numpy()
    first = result.get_result_at_slot(2)
    assert (first.tokens.tolist(), first.valid.tolist()) == ([likeliest([5], 1)], [[1]])
    assert first.lengths.tolist() == [1]
    assert result.get_result_at_slot(0).valid.tolist() == [[0]]


@needs
def test_the_tokenizer_pads_as_jetstream_does():
    tokenizer = engine().build_tokenizer(engine().get_tokenizer())
    ids, length = tokenizer.encode("10>", max_prefill_length=16, is_bos=True)
    assert (np.asarray(ids)[:4].tolist(), ids.shape, length) == ([3, 2, 16, 0], (16,), 3)
    assert tokenizer.decode([3, 2, 16]) == "10>"
    assert tokenizer.stop_tokens == {1}


@needs
def test_importing_it_leaves_the_process_as_it_was():
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    jetstream_engine.library.cache_clear()
    jetstream_engine.library()
    assert (root.level, list(root.handlers)) == before
    assert not hasattr(jax, "tree_map")


@needs
def test_concurrent_clients_get_their_own_completions(server):
    prompts = ["1", "2+2=", "sort 312", "a b c", "9*9=", "zz", "0", "hello you"]
    replies = {}

    def work(prompt):
        replies[prompt] = ask(server, prompt)

    threads = [threading.Thread(target=work, args=(p,)) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        ids = likeliest(TOKENIZER.encode(prompt), NEW)
        assert replies[prompt] == (TOKENIZER.decode(ids), ids)


@needs
def test_as_many_tokens_as_asked_for(server):
    for count in (1, 4):
        assert ask(server, "2+2=", count)[1] == likeliest(TOKENIZER.encode("2+2="), count)
    # A prompt of ids is answered in ids.
    assert ask(server, [4, 8], 3) == ("", likeliest([4, 8], 3))


@needs
def test_bad_requests_are_refused_and_affect_no_other(server):
    with stub(server) as client:
        stream = client.Decode(request("1", NEW))
        next(stream)
        for prompt, count, message in [
            ("", 3, "prompt is empty"),
            ("1" * 13, 3, "13 tokens; this server takes at most 12"),
            ("ABC", 3, "'A'"),
            ([48], 3, "token id 48"),
            ("1", 0, "max_tokens = 0"),
            ("1", NEW + 1, "writes 1 to 20"),
        ]:
            with rpc_error("INVALID_ARGUMENT", message):
                list(client.Decode(request(prompt, count)))
        with rpc_error("INVALID_ARGUMENT", "both missing"):
            list(client.Decode(jetstream_engine.library().proto.DecodeRequest(max_tokens=3)))
        assert len(list(stream)) == NEW - 1
    assert ask(server, "1")[1] == likeliest(TOKENIZER.encode("1"), NEW)


@needs
def test_it_listens_on_loopback_alone(server):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)
    with pytest.raises(UserError, match="in use"):
        jetstream.JetStreamServer(engine(), "127.0.0.1", server.port, queue_requests=1)


class Held:
    """An engine that draws while it may, and fails where it is told to.

    ``live`` holds how many slots drew a token, step by step.
    """

    def __init__(self, slots):
        self.inner = build(jetstream_engine.make_engine, slots=slots)
        self.may, self.broken, self.live = threading.Event(), None, []
        generate = self.inner.generate

        def generate_held(weights, state):
            self.may.wait(20)
            if self.broken is not None:
                raise self.broken
            state, result = generate(weights, state)
            self.live.append(int(np.asarray(result.data)[:, 1].sum()))
            return state, result

        self.inner.generate = generate_held


@needs
def test_a_full_queue_refuses():
    gated = Held(1)
    with serving(gated.inner, queue=1) as running, stub(running) as client:
        # One in the slot, and one each before insertion and transfer; then the queue.
        streams = []
        with rpc_error("RESOURCE_EXHAUSTED", "queue is full"):
            for _ in range(8):
                streams.append(client.Decode(request("1", 2)))
                end = time.monotonic() + 0.5
                while not streams[-1].done() and time.monotonic() < end:
                    time.sleep(0.01)
                if streams[-1].done():
                    list(streams.pop())
        gated.may.set()
        assert {len(list(one)) for one in streams} == {2}
        assert len(streams) >= 2


@needs
def test_a_client_that_disconnects_frees_its_slot():
    gated = Held(1)
    with serving(gated.inner) as running, stub(running) as client:
        first = client.Decode(request("1", NEW))
        gated.may.set()
        next(first)
        gated.may.clear()
        before = len(gated.live)
        first.cancel()
        until(lambda: running.driver.requests[0].max_tokens < 0)
        second = client.Decode(request("2+2=", 2))
        gated.may.set()
        assert len(list(second)) == 2
        # Up to the first step with a free slot; the engine runs ahead of what the second one reads.
        assert [*gated.live[before:], 0].index(0) < NEW // 2


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@needs
def test_a_free_slot_samples_nothing():
    gated = Held(2)
    gated.may.set()
    with serving(gated.inner) as running:
        ask(running, "1", 1)
        until(lambda: not gated.inner._occupied)
        before = len(gated.live)
        ask(running, "2+2=", 9)
        assert max(gated.live[before:]) == 1


def test_a_slot_is_free_when_its_sequence_has_been_ended():
    engine, free = build(), []
    weights, state = engine.load_params(), engine.init_decode_state()
    prefix = engine.prefill(params=weights, **padded([4, 8]))
    state = engine.insert(prefix, state, slot=1)
    engine.leave(0, lambda: free.append(0))
    assert free == [0]  # nothing was drawn there
    engine.leave(1, lambda: free.append(1))
    assert free == [0]
    with pytest.MonkeyPatch.context() as patch:
        result = types.SimpleNamespace(engine=types.SimpleNamespace(ResultTokens=dict))
        patch.setattr(jetstream_engine, "library", lambda: result)
        state, output = engine.generate(weights, state)
    assert free == [0, 1]
    assert not output["data"][:, 1].any()
    assert int(engine._rows.batch.slots.stop[1]) == StopReason.ABORTED


@needs
def test_a_failure_in_a_thread_is_an_error_of_the_requests(caplog):
    import grpc

    gated = Held(2)
    gated.broken = ZeroDivisionError("a fault of the device")
    with serving(gated.inner) as running, stub(running) as client:
        proto = jetstream_engine.library().proto
        assert client.HealthCheck(proto.HealthCheckRequest()).is_live
        streams = [client.Decode(request("1", NEW)) for _ in range(3)]
        gated.may.set()
        for one in streams:
            with rpc_error("INTERNAL", "a fault of the device"):
                list(one)
        assert not client.HealthCheck(proto.HealthCheckRequest()).is_live
        with pytest.raises(grpc.RpcError, match="a fault of the device"):
            list(client.Decode(request("1", NEW)))
        assert isinstance(running.driver.failure, ZeroDivisionError)
    assert "a fault of the device" in caplog.text


@needs
def test_sigterm_lets_requests_finish():
    gated = Held(2)
    lines, replies = [], []

    def work():
        host, port = lines[0].split()[-1].split(":")
        where = types.SimpleNamespace(host=host, port=port)
        thread = threading.Thread(target=lambda: replies.append(ask(where, "1", 5)[1]))
        thread.start()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        gated.may.set()
        thread.join()

    def echo(line):
        lines.append(line)
        if len(lines) == 1:
            threading.Thread(target=work).start()

    place = {"host": "127.0.0.1", "port": 0, "queue_requests": 4, "grace_seconds": 20.0}
    jetstream.run(gated.inner, **place, echo=echo)
    assert lines[-1] == "stopped"
    assert replies == [likeliest(TOKENIZER.encode("1"), 5)]
    gated.broken = OSError("no more")
    with pytest.raises(RuntimeError, match="the engine failed: no more"):
        jetstream.run(gated.inner, **place, echo=ask_soon)


def ask_soon(line):
    """Asks for something as soon as a server says where it is."""
    host, port = line.split()[-1].split(":")

    def work():
        with contextlib.suppress(Exception):
            ask(types.SimpleNamespace(host=host, port=port), "1", 5)

    threading.Thread(target=work).start()
