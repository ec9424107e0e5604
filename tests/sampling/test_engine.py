"""Requests that come one by one: their draws, their ends, weight updates, suspension, refusals."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit, tiny_config

from jrl.errors import UserError
from jrl.models import gpu
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.chunk_length import GPU_LENGTHS
from jrl.sampling.engine import Engine
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params, sampling_logprobs
from jrl.sampling.request import QueueFull, Request, RequestFeatures
from jrl.types import StopReason

TOKENIZER = char_tokenizer()
CONFIG = tiny_config(40)
NETWORK = transformer(CONFIG)
P, T, STOPS = 8, 24, (3, 5)
BIASES = RequestFeatures(biases=True)
ALL = BIASES._replace(reports=True)


@cache
def params(seed=0):
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(seed)))


def new_engine(slots=3, **more):
    options = {"prompt_tokens": P, "max_new_tokens": T, "stop_tokens": STOPS, "chunk": 4} | more
    return Engine(NETWORK, params(), slots=slots, **options)


@pytest.fixture(scope="module")
def engine():
    """An engine that tests leave idle behind them."""
    return new_engine(requests=ALL, tokenizer=TOKENIZER)


def requests():
    """Seven of them, of all kinds."""
    prompt = lambda *ids: {"tokens": ids, "max_new_tokens": T}  # noqa: E731
    return [
        Request(**prompt(1, 2, 3), seed=1),
        Request(**prompt(4), seed=2, n=3),
        Request(**prompt(*range(8)), seed=3, temperature=0.7, top_k=5),
        Request(**prompt(9, 9), seed=4, temperature=0.0),
        Request(**prompt(7, 1, 7, 1), seed=2**40 + 5, n=2, top_p=0.8, min_p=0.05),
        Request(tokens=(6, 5), max_new_tokens=3, seed=6, stop_tokens=()),
        Request(**prompt(8), seed=7, logit_bias={4: 3.0, 3: -np.inf}, stop_tokens=(4,)),
    ]


def outcome(engine, submitted):
    """Completions by (index of the request, member)."""
    numbers = {engine.submit(r): i for i, r in enumerate(submitted)}
    events = list(engine.run())
    done = {(numbers[e.request], e.member): e.completion for e in events if e.completion}
    assert len(done) == sum(r.n for r in submitted)
    for key, completion in done.items():  # what came in pieces is the whole
        mine = [e for e in events if (numbers[e.request], e.member) == key]
        assert [t for e in mine for t in e.tokens] == completion.tokens.tolist()
        assert [x for e in mine for x in e.logprobs] == completion.logprobs.tolist()
        assert "".join(e.text for e in mine) == completion.text
        assert mine[-1].completion is completion
    return done


@pytest.fixture(scope="module")
def alone(engine):
    """Each request's completions when nobody else is there."""
    return {
        (i, member): c
        for i, request in enumerate(requests())
        for (_, member), c in outcome(engine, [request]).items()
    }


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, completion in got.items():
        other = expected[key]
        assert completion.tokens.tolist() == other.tokens.tolist(), key
        assert (completion.stop, completion.text) == (other.stop, other.text)
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)


def test_the_reasons_that_completions_end(alone):
    for (i, _), c in alone.items():
        request = requests()[i]
        stops = STOPS if request.stop_tokens is None else request.stop_tokens
        if c.stop == StopReason.STOP_TOKEN:
            assert c.tokens[-1] in stops
        else:
            assert c.stop == StopReason.LENGTH
            assert len(c.tokens) == request.max_new_tokens
        assert not set(c.tokens[:-1].tolist()) & set(stops)
        assert (c.versions == 0).all()
    assert {c.stop for c in alone.values()} == {StopReason.STOP_TOKEN, StopReason.LENGTH}
    assert len({tuple(alone[1, m].tokens.tolist()) for m in range(3)}) == 3
    assert (alone[3, 0].logprobs == 0).all()  # greedy
    assert 3 not in alone[6, 0].tokens  # forbidden


def test_completions_equal_those_of_generate(alone):
    """The engine and ``generate`` draw alike for the same keys."""
    for i in (0, 1):
        request = requests()[i]
        key = jax.random.key(11)
        key_data = jax.random.key_data(jax.random.fold_in(key, i)).tolist()
        seeded = Request(request.tokens, T, seed=(key_data[0] << 32) + key_data[1], n=request.n)
        done = outcome(new_batch_engine(), [seeded])
        tokens = np.zeros((1, P), np.int32)
        tokens[0, : len(request.tokens)] = request.tokens
        lengths = np.array([len(request.tokens)], np.int32)
        args = (tokens, lengths, make_sampling_params(), jnp.int32(0), np.array([i]))
        rollout = batch(key, params(), *args, group=request.n)
        for member in range(request.n):
            live = rollout.mask[0, member]
            completion = done[0, member]
            assert completion.tokens.tolist() == rollout.tokens[0, member][live].tolist()
            np.testing.assert_allclose(
                completion.logprobs, rollout.sampler_logprobs[0, member][live], atol=1e-5
            )


@cache
def new_batch_engine():
    return new_engine()


@partial(jit, static_argnames="group")
def batch(key, params, tokens, lengths, sampling_params, version, ids, *, group):
    sizes = {"max_new_tokens": T, "stop_tokens": STOPS, "group": group}
    return generate(
        key, params, tokens, lengths, sampling_params, version, ids, network=NETWORK, **sizes
    )[0]


@pytest.mark.parametrize("order", [range(7), [6, 3, 0, 5, 2, 4, 1]], ids=str)
def test_other_requests_and_their_order_change_no_completion(engine, alone, order):
    submitted = [requests()[i] for i in order]
    got = {(order[i], m): c for (i, m), c in outcome(engine, submitted).items()}
    assert_same(got, alone)


NEIGHBOURS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 2},
    "top-p, biased": {"top_p": 0.5, "logit_bias": {7: 2.0}},
}


@pytest.mark.parametrize(
    "distributions", [list(NEIGHBOURS), ["greedy"], ["top-k", "top-k"]], ids=str
)
def test_sampling_parameters_of_other_rows_change_no_bit(engine, distributions):
    """As many neighbours both times: prompts of another number are read by another product."""

    def first(names):
        """The completion of a request whose slot does not change, beside neighbours like these."""
        more = [
            Request((5, i), T, seed=20 + i, stop_tokens=(), **NEIGHBOURS[name])
            for i, name in enumerate(names)
        ]
        return outcome(engine, [requests()[0], *more])[0, 0]

    done, expected = first(distributions), first(["plain"] * len(distributions))
    assert done.tokens.tolist() == expected.tokens.tolist()
    assert done.logprobs.tolist() == expected.logprobs.tolist()


def test_reports_are_of_each_rows_own_distribution_and_change_no_bit(engine, alone):
    """One row asks for alternatives, one for log-probabilities, others for neither."""
    top_by_request = {0: 3, 2: 48 // 3, 3: 5, 4: 0, 6: 20}
    submitted = [
        dataclasses.replace(r, top_logprobs=top_by_request.get(i)) for i, r in enumerate(requests())
    ]
    numbers = {engine.submit(r): i for i, r in enumerate(submitted)}
    events = list(engine.run())
    assert_same(
        {(numbers[e.request], e.member): e.completion for e in events if e.completion}, alone
    )
    for (i, member), completion in alone.items():
        mine = [e for e in events if (numbers[e.request], e.member) == (i, member)]
        reports = [report for e in mine for report in e.reports]
        if i not in top_by_request:
            assert not reports
            continue
        assert len(reports) == len(completion.tokens)
        expected = distribution_of(submitted[i], completion.tokens)
        for token, report, row in zip(completion.tokens, reports, expected, strict=True):
            assert report.logprob == pytest.approx(row[token], abs=1e-5)
            assert len(report.top) == top_by_request[i]
            order = np.argsort(-row, kind="stable")[: top_by_request[i]]
            np.testing.assert_allclose([x for _, x in report.top], row[order], atol=3e-5)
            live = [t for t, x in report.top if x > -np.inf]
            assert live == order[: len(live)].tolist()


def distribution_of(request, tokens):
    """[t, V] log-probabilities that a reply reports, from one forward pass, in float64."""
    row = np.array([[*request.tokens, *tokens]], np.int32)
    place = jnp.broadcast_to(jnp.arange(row.shape[1]), row.shape)
    hidden, _ = NETWORK.hidden(params(), row, place, jnp.ones_like(row))
    raw = NETWORK.logits(params(), hidden)[0, len(request.tokens) - 1 : -1]
    if request.temperature == 0:
        logprobs = np.asarray(raw, np.float64)
    else:
        chosen = make_sampling_params(
            request.temperature, request.top_k, request.top_p, request.min_p
        )
        biased = raw + request.bias(NETWORK.vocab_size)[None]
        logprobs = np.asarray(sampling_logprobs(biased, chosen), np.float64)
    return logprobs - np.logaddexp.reduce(logprobs, axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", [{"slots": 7, "chunk": 3}, {"slots": 4, "chunk": None}], ids=str)
def test_slots_and_chunks_change_no_completion(alone, shape):
    """Nor does it matter that the engine chooses how long its chunks are."""
    other = new_engine(requests=BIASES, tokenizer=TOKENIZER, **shape)
    assert_same(outcome(other, requests()), alone)
    assert other.live_steps == sum(len(c.tokens) for c in alone.values())
    assert other.slot_steps >= other.live_steps


def test_nothing_compiles_after_the_warm_up():
    engine = new_engine(requests=ALL)
    count = engine.compile()
    cache = jax.tree.leaves(engine.rows.batch.slots.cache)
    assert all(x.is_ready() for x in cache)  # or a request would wait
    outcome(engine, requests())
    outcome(engine, [dataclasses.replace(r, top_logprobs=7) for r in requests()])
    engine.set_weights(params(), 1, recompute=True)
    engine.submit(requests()[1])
    engine.step()
    engine.set_weights(params(1), 2, recompute=True)
    list(engine.run())
    assert engine.executables == count
    engine.submit(requests()[0])
    with pytest.raises(UserError, match="before it is given requests"):
        engine.compile()


# ---------------------------------------------------------------- ends


def test_a_request_is_aborted(engine, alone):
    submitted = requests()
    first, *others = (engine.submit(submitted[i]) for i in (1, 0, 4, 2))
    engine.step()
    engine.abort(first)
    engine.abort(others[2])  # waits for a slot still
    events = list(engine.run())
    done = {(e.request, e.member): e.completion for e in events if e.completion}
    for member in range(3):
        aborted = done[first, member]
        assert aborted.stop == StopReason.ABORTED or len(aborted.tokens) < 4
        assert aborted.tokens.tolist() == alone[1, member].tokens[: len(aborted.tokens)].tolist()
    assert done[others[2], 0].tokens.size == 0
    assert not engine.busy
    assert done[others[0], 0].tokens.tolist() == alone[0, 0].tokens.tolist()


def test_stop_strings(engine, alone):
    completion = max((c for (i, _), c in alone.items() if i < 3), key=lambda c: len(c.text))
    (i, member) = next(k for k, c in alone.items() if c is completion)
    middle = len(completion.text) // 2
    stop = completion.text[middle : middle + 2]  # two characters, two tokens
    at = completion.text.find(stop)
    request = requests()[i]
    fields = {k: getattr(request, k) for k in ("tokens", "max_new_tokens", "seed", "n")}
    fields |= {"temperature": request.temperature, "top_k": request.top_k}
    got = outcome(engine, [Request(**fields, stop_strings=(stop, "never")), requests()[0]])
    end = got[0, member]
    assert end.stop == StopReason.STOP_STRING
    assert end.text == completion.text[:at]
    count = next(k for k in range(T) if stop in TOKENIZER.decode(completion.tokens[:k].tolist()))
    assert end.tokens.tolist() == completion.tokens[:count].tolist()
    assert TOKENIZER.decode(end.tokens.tolist()).endswith(stop)
    assert got[1, 0].tokens.tolist() == alone[0, 0].tokens.tolist()  # the neighbour continues


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_between_chunks(engine, recompute):
    """Each token is of the policy that its version names; only a new cache is all of it."""
    ask = Request(tokens=(1, 2, 3, 4), max_new_tokens=12, seed=8, stop_tokens=())
    engine.submit(ask)
    engine.step()
    engine.set_weights(params(1), 5, recompute=recompute)
    (done,) = (e.completion for e in engine.run() if e.completion)
    engine.set_weights(params(), 0)
    assert done.versions.tolist() == [0] * 4 + [5] * 8
    row = np.array([[1, 2, 3, 4, *done.tokens]], np.int32)
    new, old = (scored(params(i), row)[0] for i in (1, 0))
    np.testing.assert_allclose(done.logprobs[:4], old[3:7], atol=1e-5)
    close = np.abs(done.logprobs[4:] - new[7:15]) < 1e-5
    assert close.all() if recompute else not close.all()


@jit
def scored(params, tokens):
    """[B, L - 1] log-probabilities of each token but the first."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = NETWORK.hidden(params, tokens, positions, jnp.ones_like(tokens))
    logprobs = jax.nn.log_softmax(NETWORK.logits(params, hidden))
    return jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=2)[:, :, 0]


# ---------------------------------------------------------------- refusals


FINE = {"tokens": (1, 2), "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": (1,) * 9}, r"has 9 tokens.*up to 8"),
        ({"tokens": (1, 48)}, r"tokens has token 48.*ends at 47"),
        ({"tokens": (-1,)}, "tokens has token -1"),
        ({"max_new_tokens": 0}, r"max_new_tokens = 0.*must be 1 to 24"),
        ({"max_new_tokens": 25}, r"max_new_tokens = 25.*must be 1 to 24"),
        ({"n": 4}, r"n = 4; must be 1 to 3"),
        ({"n": 0}, "n = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = "),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_k": 49}, r"top_k = 49.*48 tokens"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"min_p": 1.0}, "min_p = 1.0"),
        ({"allowed": ()}, "leave no token"),
        ({"allowed": (4,), "logit_bias": {4: -np.inf}}, "leave no token"),
        ({"logit_bias": {50: 1.0}}, "logit_bias has token 50"),
        ({"logit_bias": {4: np.inf}}, r"logit_bias\[4\] = inf"),
        ({"logit_bias": {4: np.nan}}, r"logit_bias\[4\] = nan"),
        ({"top_logprobs": 21}, "top_logprobs = 21; must be 0 to 20"),
        ({"top_logprobs": -1}, "top_logprobs = -1"),
        ({"stop_tokens": (99,)}, "stop_tokens has token 99"),
        ({"stop_tokens": tuple(range(9))}, r"names 9 tokens.*at most 8"),
        ({"stop_strings": ("",)}, "stop_strings = ''"),
        ({"stop_strings": ("\u4e2d",)}, "alphabet"),
    ],
    ids=str,
)
def test_requests_that_are_refused(engine, wrong, message):
    with pytest.raises(UserError, match=message):
        engine.submit(Request(**FINE | wrong))
    assert not engine.busy


def test_requests_that_the_engine_lacks_options_for():
    engine = new_batch_engine()
    with pytest.raises(UserError, match="biases=True"):
        engine.submit(Request(**FINE, allowed=(1,)))
    with pytest.raises(UserError, match="tokenizer"):
        engine.submit(Request(**FINE, stop_strings=("x",)))
    with pytest.raises(UserError, match="reports=True"):
        engine.submit(Request(**FINE, top_logprobs=0))
    with pytest.raises(UserError, match="chunk = 0"):
        new_engine(chunk=0)
    with pytest.raises(UserError, match="slots = 0; must be at least 1"):
        new_engine(slots=0)
    with pytest.raises(UserError, match="holds 40"):
        new_engine(max_new_tokens=40)


def test_a_full_queue_refuses():
    engine = new_engine(requests=RequestFeatures(queue=2))
    engine.submit(Request(**FINE, n=2))
    with pytest.raises(QueueFull, match="2 completions wait"):
        engine.submit(Request(**FINE))


def test_blocks_of_steps_without_branches_change_nothing(monkeypatch):
    """As on a GPU: tokens, their order, ends, refills and what an abort leaves."""
    report = Request(tokens=(2, 1), max_new_tokens=T, seed=8, top_logprobs=3)
    submitted = [*requests(), report]

    def events():
        engine = new_engine(chunk=20, requests=ALL, tokenizer=TOKENIZER)
        assert engine.compile(refresh=False)
        programs, out = engine.executables, []
        for request in submitted:
            engine.submit(request)
        while engine.busy:
            out += engine.step()
            if len(out) < 4:
                engine.abort(1)
        assert engine.executables == programs  # none was left to compile
        ends = [u.completion and u.completion.stop for u in out]
        updates = [(u.request, u.member, u.tokens, u.logprobs, u.text, u.reports) for u in out]
        return list(zip(updates, ends, strict=True)), engine.slot_steps

    updates, steps = events()
    monkeypatch.setattr(gpu, "steps_at_once", lambda: 16)
    monkeypatch.setattr(gpu, "branches", lambda: False)
    again, steps_again = events()
    assert again == updates
    assert steps_again == steps
    ends = {stop for _, stop in updates}
    assert {StopReason.ABORTED, StopReason.STOP_TOKEN, StopReason.LENGTH} <= ends
    assert any(reports for (*_, reports), _ in updates)


@pytest.mark.slow
def test_every_length_of_chunks_on_a_gpu_is_compiled(monkeypatch):
    monkeypatch.setattr(gpu, "steps_at_once", lambda: 16)
    engine = new_engine(chunk=None)
    compiled, block_lengths = engine.compile(refresh=False), set()
    block_of = gpu.block_of
    monkeypatch.setattr(gpu, "block_of", lambda steps: block_lengths.add(steps) or block_of(steps))
    outcome(engine, requests()[:4])
    assert engine.executables == compiled
    assert {1, 4} <= block_lengths <= set(GPU_LENGTHS)
