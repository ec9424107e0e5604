"""The sampler against itself in pieces, in other company, and against whole forward passes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.errors import UserError
from jrl.models import gpu
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.cache import share
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.sequences import first_members, member_keys
from jrl.sampling.slots import (
    IdleLimit,
    check_length,
    decode,
    extend,
    fork,
    prefill,
    refresh,
    rewind,
    start,
)
from jrl.types import StopReason

CONFIG = ModelConfig(
    vocab_size=23,
    layers=2,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    max_length=24,
)
NETWORK = transformer(CONFIG)
N, P, G, T = 4, 6, 3, 9
STOPS = (5, 11)
LENGTHS = np.array([1, 6, 3, 4], np.int32)  # ragged, with a prompt of one token
IDS = np.array([7, 0, 3, 12], np.int32)
SAMPLING = make_sampling_params(temperature=0.9)
TOP_2 = make_sampling_params(temperature=1.5, top_k=2)
VERSION = jnp.int32(4)


@cache
def params():
    """Weights large enough that the policy has preferences."""
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


@cache
def weights():
    return jit(NETWORK.prepare)(params())


def prompts(filler=0):
    """[N, P] tokens; what lies past each prompt is ``filler``."""
    tokens = np.random.default_rng(0).integers(0, 23, (N, P))
    return np.where(np.arange(P) < LENGTHS[:, None], tokens, filler).astype(np.int32)


@partial(jit, static_argnames=("group", "max_new_tokens", "stop_tokens"))
def sample(*args, **sizes):
    return generate(*args, network=NETWORK, **sizes)


def sampled(
    tokens=None,
    lengths=LENGTHS,
    ids=IDS,
    sampling_params=SAMPLING,
    key=1,
    members=(),
    stops=STOPS,
    **more,
):
    tokens = prompts() if tokens is None else tokens
    sizes = {"max_new_tokens": T, "stop_tokens": stops} | ({} if members else {"group": G}) | more
    args = jax.random.key(key), params(), tokens, lengths, sampling_params, VERSION, ids, *members
    out = sample(*args, **sizes)
    return jax.device_get(out)[0]


@cache
def rollout():
    return sampled()


@cache
def begin():
    """The slots of ``rollout``, before the first token."""
    cache = jit(partial(prefill, network=NETWORK))(weights(), prompts(), LENGTHS)
    keys = member_keys(jax.random.key(1), IDS, first_members(N, G).number).reshape(-1)
    repeat = partial(np.repeat, repeats=G, axis=0)
    sized = {"network": NETWORK, "weights": weights(), "length": T}
    return start(
        share(cache, jnp.array(LENGTHS - 1), G, **sized),
        repeat(prompts()),
        repeat(LENGTHS),
        keys,
        SAMPLING,
        jnp.full(N * G, T, jnp.int32),
        max_new_tokens=T,
    )


@jit
def _decode(weights, slots, version, steps):
    return decode(weights, slots, version, network=NETWORK, steps=steps, stop_tokens=STOPS)


def advance(slots, version=VERSION, *, steps):
    return _decode(weights(), slots, version, steps)[0]


@cache
def decoded():
    """The slots of ``rollout``, decoded in one go."""
    return advance(begin(), steps=T)


@jit
def _decode_until_idle(weights, slots, idle):
    more = {"network": NETWORK, "steps": T, "stop_tokens": STOPS}
    return decode(weights, slots, VERSION, idle=idle, **more)


feed = jit(partial(extend, network=NETWORK))
recompute = jit(partial(refresh, network=NETWORK))


def assert_same(slots, other, *, atol=0.0):
    """The slots hold what other slots or a rollout hold."""
    for name in ("tokens", "lengths", "mask", "versions", "stop"):
        a, b = np.asarray(getattr(slots, name)), np.asarray(getattr(other, name))
        assert np.array_equal(a, b.reshape(a.shape)), name
    logprobs = other.logprobs if hasattr(other, "logprobs") else other.sampler_logprobs
    logprobs = np.asarray(logprobs).reshape(slots.logprobs.shape)
    np.testing.assert_allclose(slots.logprobs, logprobs, rtol=0, atol=atol)


@jit
def _reference_logits(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = NETWORK.hidden(params, tokens, positions, jnp.ones_like(tokens))
    return NETWORK.logits(params, hidden)


def whole_logits(tokens):
    """[B, L, V] logits of the next token from one forward pass without a cache; B is N * G."""
    rows = np.zeros((N * G, P + T), np.int32)
    rows[: len(tokens)] = tokens
    return np.asarray(_reference_logits(params(), rows))[: len(tokens)]


def scored(prompt_tokens, prompt_lengths, tokens, lengths, temperature):
    """Log-probabilities [B, T] of completions, each right behind its own prompt."""
    b, t = tokens.shape
    rows = np.zeros((b, P + T), np.int32)
    for i in range(b):
        both = [*prompt_tokens[i, : prompt_lengths[i]], *tokens[i, : lengths[i]]]
        rows[i, : len(both)] = both
    logprobs = np.asarray(jax.nn.log_softmax(whole_logits(rows) / temperature))
    out = np.zeros((b, t))
    for i in range(b):
        for j in range(lengths[i]):
            out[i, j] = logprobs[i, prompt_lengths[i] + j - 1, tokens[i, j]]
    return out


# ---------------------------------------------------------------- what is recorded


def test_a_rollout_records_what_happened():
    r = rollout()
    assert r.tokens.shape == (N, G, T)
    assert np.array_equal(r.prompt_tokens, prompts())
    column = np.arange(T)
    assert np.array_equal(r.mask, column < r.lengths[:, :, None])
    assert np.array_equal(r.versions, np.where(r.mask, 4, -1))
    assert (r.sampler_logprobs[r.mask] < 0).all()
    assert (r.sampler_logprobs[~r.mask] == 0).all()
    assert not r.baseline.any()
    assert set(r.stop.ravel().tolist()) == {StopReason.STOP_TOKEN, StopReason.LENGTH}
    for i in np.ndindex(N, G):
        completion = r.tokens[i][: r.lengths[i]].tolist()
        if r.stop[i] == StopReason.STOP_TOKEN:  # the stop token is part of it, and the last
            assert completion[-1] in STOPS
            completion = completion[:-1]
        else:
            assert len(completion) == T
        assert not set(completion) & set(STOPS)


def test_the_logprobs_are_those_of_the_distribution_drawn_from():
    r = rollout()
    flat = lambda x: x.reshape(N * G, *x.shape[2:])  # noqa: E731
    expected = scored(
        np.repeat(prompts(), G, axis=0),
        np.repeat(LENGTHS, G),
        flat(r.tokens),
        flat(r.lengths),
        0.9,
    )
    np.testing.assert_allclose(flat(r.sampler_logprobs), expected, atol=1e-5)


def test_what_lies_past_a_prompt_is_not_read():
    assert_same_rollouts(sampled(tokens=prompts(filler=22)), rollout())


def assert_same_rollouts(a, b):
    for name in ("tokens", "lengths", "mask", "sampler_logprobs", "versions", "stop", "baseline"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_draws_follow_the_key_the_id_and_the_member():
    r = rollout()
    assert_same_rollouts(sampled(), r)
    assert not np.array_equal(sampled(key=2).tokens, r.tokens)
    assert not np.array_equal(sampled(ids=IDS + 1).tokens, r.tokens)
    # One prompt under several ids: all sequences go their own way.
    same = np.repeat(prompts()[1:2], N, axis=0)
    hot = make_sampling_params(temperature=3.0, top_k=22)
    free = sampled(tokens=same, lengths=np.full(N, 6, np.int32), sampling_params=hot, stops=())
    assert len({tuple(x) for x in free.tokens.reshape(-1, T).tolist()}) == N * G
    assert (free.stop == StopReason.LENGTH).all()  # nothing stops when nothing may
    assert (free.lengths == T).all()


@pytest.mark.parametrize("order", [[2], [3, 1, 0, 2], [1, 2, 2, 1]])
def test_draws_do_not_depend_on_the_company(order):
    r = rollout()
    other = sampled(tokens=prompts()[order], lengths=LENGTHS[order], ids=IDS[order])
    assert np.array_equal(other.tokens, r.tokens[order])
    assert np.array_equal(other.stop, r.stop[order])
    np.testing.assert_allclose(other.sampler_logprobs, r.sampler_logprobs[order], atol=1e-5)


def test_a_truncated_distribution_draws_what_it_keeps():
    r = sampled(sampling_params=TOP_2, stops=())
    flat = r.tokens.reshape(N * G, T)
    lengths = np.repeat(LENGTHS, G)
    rows = np.concatenate([np.repeat(prompts(), G, axis=0), flat], axis=1)
    for i, n in enumerate(lengths):
        rows[i, n : n + T] = flat[i]
    logits = whole_logits(rows) / 1.5
    for i, n in enumerate(lengths):
        for t in range(T):
            row = logits[i, n + t - 1]
            expected = row[flat[i, t]] - np.log(np.exp(np.sort(row)[-2:]).sum())
            got = r.sampler_logprobs.reshape(N * G, T)[i, t]
            assert got == pytest.approx(expected, abs=1e-5)
            assert flat[i, t] in np.argsort(row)[-2:]


# ---------------------------------------------------------------- greedy


@cache
def by_argmax():
    """[N, T] tokens and lengths, each one the largest logit of a whole forward pass."""
    tokens, lengths = np.zeros((N, T), np.int32), np.zeros(N, np.int32)
    rows = np.zeros((N, P + T), np.int32)
    rows[:, :P] = prompts()
    running = np.ones(N, bool)
    for t in range(T):
        logits = whole_logits(rows)
        for i in np.flatnonzero(running):
            tokens[i, t] = np.argmax(logits[i, LENGTHS[i] + t - 1])
            rows[i, LENGTHS[i] + t] = tokens[i, t]
            lengths[i] = t + 1
            running[i] = tokens[i, t] not in STOPS
    return tokens, lengths


def test_members_of_temperature_0_are_greedy_and_a_larger_group_begins_with_the_smaller():
    wide = G + 2
    members = first_members(N, wide + 1)
    temperature = jnp.where(members.number < wide, SAMPLING.temperature, 0.0)
    r = sampled(members=[members.replace(temperature=temperature)])
    assert r.tokens.shape == (N, wide + 1, T)
    assert not r.baseline.any()  # their asks say which members are baselines
    tokens, lengths = by_argmax()
    assert np.array_equal(r.lengths[:, wide], lengths)
    assert np.array_equal(np.where(r.mask[:, wide], r.tokens[:, wide], 0), tokens)
    assert (r.sampler_logprobs[:, wide] == 0).all()  # a point mass
    assert np.array_equal(r.tokens[:, :G], rollout().tokens)
    np.testing.assert_allclose(r.sampler_logprobs[:, :G], rollout().sampler_logprobs, atol=1e-5)


def test_temperature_zero_is_greedy_for_everyone():
    r = sampled(sampling_params=make_sampling_params(0.0))
    tokens, _ = by_argmax()
    for member in range(G):
        assert np.array_equal(np.where(r.mask[:, member], r.tokens[:, member], 0), tokens)


# ---------------------------------------------------------------- in pieces


def test_generate_is_its_pieces():
    assert_same(decoded(), rollout(), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_are_bit_equal_to_one_go(chunk):
    slots = begin()
    for _ in range(-(-T // chunk)):
        slots = advance(slots, steps=chunk)
    assert_same(slots, decoded())


@pytest.mark.parametrize("limits", [{}, {"until": 6}])
def test_a_loop_that_looks_at_its_end_less_often_ends_where_it_should(limits, monkeypatch):
    def decode_until(steps_at_once):
        monkeypatch.setattr(gpu, "steps_at_once", lambda: steps_at_once)
        how = {"network": NETWORK, "steps": T, "stop_tokens": STOPS} | limits
        return jit(partial(decode, **how))(weights(), begin(), VERSION)

    (slots, count), (want, steps) = decode_until(4), decode_until(1)
    assert count == steps
    assert_same(slots, want)


def test_while_slots_are_idle_the_others_draw_until_the_next_look(monkeypatch):
    idle = IdleLimit(jnp.int32(12), jnp.int32(4))
    _, early = _decode_until_idle(weights(), begin(), idle)
    monkeypatch.setattr(gpu, "steps_at_once", lambda: 3)
    several = jit(partial(decode, network=NETWORK, steps=T, stop_tokens=STOPS, idle=idle))
    slots, count = several(weights(), begin(), VERSION)
    assert early % 3  # it would have ended within a block
    assert count == -(-early // 3) * 3
    assert_same(slots, advance(begin(), steps=int(count)))


def test_a_queue_that_looks_less_often_draws_the_same(monkeypatch):
    def sample_in_chunks(steps_at_once):
        monkeypatch.setattr(gpu, "steps_at_once", lambda: steps_at_once)
        sizes = {"group": G, "max_new_tokens": T, "slots": 6, "stop_tokens": STOPS}
        draw = jit(partial(generate, network=NETWORK, **sizes))
        inputs = jax.random.key(1), params(), prompts(), LENGTHS, SAMPLING, VERSION, IDS
        return draw(*inputs)[0]

    assert_same_rollouts(sample_in_chunks(5), sample_in_chunks(1))


def test_a_chunk_ends_where_it_should():
    slots = advance(begin(), steps=3)
    r = rollout()
    assert np.array_equal(slots.lengths, np.minimum(r.lengths, 3).reshape(-1))
    running = (r.lengths > 3).reshape(-1)
    assert running.any()
    assert np.array_equal(np.asarray(slots.stop) == StopReason.RUNNING, running)
    after = advance(advance(slots, steps=T), steps=3)  # nothing is left to do
    assert_same(after, decoded())


def test_suspended_on_the_host():
    slots = advance(begin(), steps=3)
    data = jax.random.key_data(slots.keys)
    suspended = jax.device_get((slots.replace(keys=None), data))
    back, data = jax.device_put(suspended)
    slots = back.replace(keys=jax.random.wrap_key_data(data))
    assert_same(advance(slots, steps=T), decoded())


def test_each_token_knows_its_version():
    slots = advance(begin(), jnp.int32(1), steps=3)
    slots = advance(slots, jnp.int32(2), steps=T)
    r = rollout()
    expected = np.where(r.mask, np.where(np.arange(T) < 3, 1, 2), -1)
    assert np.array_equal(slots.versions, expected.reshape(-1, T))


def test_refresh_with_the_same_parameters_changes_nothing():
    slots = advance(begin(), steps=4)
    fresh = recompute(weights(), slots, np.repeat(prompts(), G, axis=0))
    assert_same(advance(fresh, steps=T), rollout(), atol=1e-5)


def test_refresh_with_new_parameters_scores_under_them():
    """After it, the log-probabilities are those of the new policy over the whole past."""
    slots = advance(begin(), steps=4)
    others = NETWORK.prepare(jax.tree.map(lambda x: x + 0.1, params()))
    wrong = recompute(others, slots, np.repeat(prompts(), G, axis=0))
    right = recompute(weights(), wrong, np.repeat(prompts(), G, axis=0))
    assert not np.array_equal(wrong.cache.rows[0][0]["k"], slots.cache.rows[0][0]["k"])
    assert_same(advance(right, steps=T), rollout(), atol=1e-5)


def test_limits():
    limits = jnp.arange(N * G, dtype=jnp.int32) % (T + 1)
    stop = jnp.where(limits > 0, StopReason.RUNNING, StopReason.LENGTH).astype(jnp.int32)
    slots = advance(begin().replace(limits=limits, stop=stop), steps=T)
    r = rollout()
    free = r.lengths.reshape(-1)
    assert np.array_equal(slots.lengths, np.minimum(free, limits))
    at_limit = np.asarray(limits) < free
    assert at_limit.any()
    assert (~at_limit).any()
    reasons = np.where(at_limit, StopReason.LENGTH, r.stop.reshape(-1))
    assert np.array_equal(slots.stop, reasons)
    for i in range(N * G):
        n = int(slots.lengths[i])
        assert np.array_equal(slots.tokens[i, :n], r.tokens.reshape(-1, T)[i, :n])


def test_start_with_no_room_is_over():
    cache = NETWORK.init_cache(2, P, weights())
    keys = jax.random.split(jax.random.key(0), 2)
    limits = jnp.array([0, 2], jnp.int32)
    slots = start(cache, prompts()[:2], LENGTHS[:2], keys, SAMPLING, limits, max_new_tokens=2)
    assert slots.stop.tolist() == [StopReason.LENGTH, StopReason.RUNNING]
    assert slots.pending.tolist() == [prompts()[0, 0], prompts()[1, 5]]


# ---------------------------------------------------------------- fork and extend


def test_a_fork_shares_the_past_and_then_goes_its_way():
    slots = advance(begin(), steps=2)
    row = int(np.flatnonzero(np.asarray(slots.stop) == StopReason.RUNNING)[0])
    source = jnp.full(N * G, row, jnp.int32)
    keys = jax.random.split(jax.random.key(9), N * G).at[0].set(slots.keys[row])
    forked = advance(fork(slots, source, keys), steps=T)
    assert len({tuple(x[:2]) for x in forked.tokens.tolist()}) == 1
    assert len({tuple(x) for x in forked.tokens.tolist()}) > 6
    # The one with the old key is the one there would have been.
    assert np.array_equal(forked.tokens[0], rollout().tokens.reshape(-1, T)[row])
    # Each is scored as if it had been decoded alone.
    expected = scored(
        np.repeat(prompts()[[row // G]], N * G, axis=0),
        np.full(N * G, LENGTHS[row // G]),
        np.asarray(forked.tokens),
        np.asarray(forked.lengths),
        0.9,
    )
    np.testing.assert_allclose(forked.logprobs, expected, atol=1e-5)


def test_a_fork_at_any_position():
    """One completion, taken up again after each of its tokens, and with other keys from there."""
    lengths = np.asarray(decoded().lengths)
    row = int(np.argmax(lengths))
    positions = np.minimum(1 + np.arange(N * G), lengths[row]).astype(np.int32)
    source = jnp.full(N * G, row, jnp.int32)
    for same_key in (True, False):
        others = jax.random.split(jax.random.key(9), N * G)
        keys = jnp.repeat(decoded().keys[row][None], N * G) if same_key else others
        back = rewind(fork(decoded(), source, keys), positions)
        assert np.array_equal(back.lengths, positions)
        assert ((back.versions >= 0).sum(axis=1) == positions).all()
        again = advance(back, version=jnp.int32(5), steps=T)
        full = np.asarray(decoded().tokens[row])
        for tokens, versions, position in zip(again.tokens, again.versions, positions, strict=True):
            assert np.array_equal(tokens[:position], full[:position])
            assert set(versions[:position].tolist()) == {4}
            assert set(versions[position:].tolist()) <= {5, -1}
            assert np.array_equal(tokens, full) or not same_key
        if same_key:
            np.testing.assert_allclose(
                again.logprobs, jnp.repeat(decoded().logprobs[row][None], N * G, 0), atol=1e-5
            )
        else:
            assert len({tuple(x) for x in again.tokens.tolist()}) > 4


def extended():
    """Slots that decoded 3 tokens, were given 0 to 4 of a tool's, and continued to the end."""
    before = advance(begin(), steps=3)
    tool = np.random.default_rng(3).integers(0, 23, (N * G, 4)).astype(np.int32)
    counts = (np.arange(N * G) % 5).astype(np.int32)
    after = feed(weights(), before, tool, counts)
    return before, tool, counts, after, advance(after, jnp.int32(5), steps=T)


def test_tokens_from_outside_are_there_and_not_trained_on():
    before, tool, counts, after, end = jax.device_get(extended())
    assert np.array_equal(after.lengths, before.lengths + counts)
    some_had_stopped = before.stop != StopReason.RUNNING
    assert some_had_stopped.any()
    assert np.array_equal(
        after.stop == StopReason.RUNNING, (counts > 0) | (before.stop == StopReason.RUNNING)
    )
    for i in range(N * G):
        n, c = int(before.lengths[i]), int(counts[i])
        assert end.tokens[i, n : n + c].tolist() == tool[i, :c].tolist()
        assert end.tokens[i, :n].tolist() == before.tokens[i, :n].tolist()
        column = np.arange(T)
        sampled_mask = (column < end.lengths[i]) & ~((n <= column) & (column < n + c))
        assert np.array_equal(end.mask[i], sampled_mask)
        assert (end.logprobs[i][~sampled_mask] == 0).all()
        assert (end.versions[i][~sampled_mask] == -1).all()
        assert (end.versions[i][sampled_mask] == np.where(column < n, 4, 5)[sampled_mask]).all()


def test_what_follows_tokens_from_outside_has_seen_them():
    *_, end = jax.device_get(extended())
    expected = scored(
        np.repeat(prompts(), G, axis=0), np.repeat(LENGTHS, G), end.tokens, end.lengths, 0.9
    )
    np.testing.assert_allclose(end.logprobs, np.where(end.mask, expected, 0), atol=1e-5)
    assert (end.lengths > 6).any()


def test_tokens_from_outside_end_at_the_limit():
    before = advance(begin(), steps=7)
    tool = jnp.full((N * G, 4), 2, jnp.int32)
    after = feed(weights(), before, tool, jnp.full(N * G, 4, jnp.int32))
    assert np.array_equal(after.lengths, np.minimum(before.lengths + 4, T))
    full = np.asarray(after.lengths) == T
    assert full.any()
    assert np.array_equal(np.asarray(after.stop) == StopReason.LENGTH, full)
    end = advance(after, steps=T)
    assert np.array_equal(np.asarray(end.tokens)[full], np.asarray(after.tokens)[full])


# ---------------------------------------------------------------- errors


def test_what_does_not_fit():
    check_length(NETWORK, 15, 9)
    with pytest.raises(UserError, match=r"max_new_tokens = 10.*15 tokens.*25.*holds 24.*to 9"):
        check_length(NETWORK, 15, 10)
    with pytest.raises(UserError, match="max_new_tokens = 0"):
        check_length(NETWORK, 15, 0)
    with pytest.raises(UserError, match="holds 24"):
        sampled(max_new_tokens=20)


@pytest.mark.parametrize(("live_wanted", "limit"), [(N * G, 0), (N * G, 5), (N * G - 2, 3), (0, 0)])
def test_decoding_returns_before_more_slot_steps_are_idle(live_wanted, limit):
    ends = np.asarray(rollout().lengths).ravel()
    idle, steps = 0, 0  # the first step is taken in any case
    while steps < T and (steps == 0 or idle + max(live_wanted - (ends > steps).sum(), 0) <= limit):
        idle += max(live_wanted - (ends > steps).sum(), 0)
        steps += 1
    idle_limit = IdleLimit(jnp.int32(live_wanted), jnp.int32(limit))
    slots, count = _decode_until_idle(weights(), begin(), idle_limit)
    assert int(count) == min(steps, ends.max())
    assert count < T or live_wanted == 0
    assert np.array_equal(slots.lengths, np.minimum(ends, steps))
    assert_same(advance(slots, steps=T), rollout())  # and goes on as if it had not
