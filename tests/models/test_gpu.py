"""Kernels for token steps on GPUs, run step by step on the CPU, against the plain functions."""

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models import gpu
from jrl.models.attention.choice import check_attention
from jrl.models.attention.dense import Part, attend_parts
from jrl.models.config import ModelConfig, Rope
from jrl.models.decode import write
from jrl.models.gpu_kernels import (
    PAIRED,
    Reach,
    Rotation,
    Scores,
    Weight,
    added_norm,
    attend_cache,
    block_sums,
    few_rows,
    gated,
    pick,
    takes_product,
)
from jrl.models.layers import logits, rms_norm
from jrl.models.quant import quantise, quantise_entries, sampler
from jrl.models.rope import angles, frequencies, rotate
from jrl.models.transformer import transformer
from jrl.sampling.cache import share
from jrl.sampling.params import SamplingParams, kept_tokens, sample, token_logprobs
from jrl.sampling.slots import prefill

BF16 = jnp.bfloat16
slow = partial(pytest.param, marks=pytest.mark.slow)


def numbers(seed):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.normal(size=shape), BF16)


def cache(draw, rows, heads, columns, size, in_8_bits):
    k, v = draw(rows, heads, columns, size), draw(rows, heads, columns, size)
    if not in_8_bits:
        return {"k": k, "v": v}
    (k, k_scale), (v, v_scale) = quantise_entries(k), quantise_entries(v)
    scales = {"k_scale": k_scale.swapaxes(2, 3), "v_scale": v_scale.swapaxes(2, 3)}
    return {"k": k, "v": v} | scales


def plain_step(x, cache, prompt, turn, reach, how):
    """Norms, rotation, the cache's write and attention, by the functions of other platforms."""
    s, heads, per_head, size = x.shape
    group = per_head - 2
    x = x if turn.bias is None else x + turn.bias[None]

    def normed(v, w):
        if w is None:
            return v
        v32 = v.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(v32 * v32, -1, keepdims=True) + how.eps)
        w = w.astype(jnp.float32) + how.plus_one
        return (v32 * scale * w.reshape(*(1,) * (v.ndim - 1), -1)).astype(v.dtype)

    q, k, v = normed(x[:, :, :group], turn.q_norm), normed(x[:, :, group], turn.k_norm), x[:, :, -1]
    q = rotate(q, turn.cos[:, None, None], turn.sin[:, None, None])
    k = rotate(k, turn.cos[:, None], turn.sin[:, None])
    column, position = reach.columns[:, None], reach.positions
    new = {"k": k[:, :, None], "v": v[:, :, None]}
    cache = write(cache, new, column, column >= 0)
    window = how.window or 2**30
    back = column[:, :, None] - jnp.arange(cache["k"].shape[2])[None, None]
    scales = cache.get("k_scale"), cache.get("v_scale")
    parts = [Part(cache["k"], cache["v"], (back >= 0) & (back < window), None, *scales)]
    if prompt is not None:
        n, columns = prompt["k"].shape[0], jnp.arange(prompt["k"].shape[2])[None, None]
        lengths = jnp.repeat(reach.lengths, s // n)[:, None, None]
        mask = (columns < lengths) & (position[:, None, None] - columns < window)
        scales = prompt.get("k_scale"), prompt.get("v_scale")
        parts.append(Part(prompt["k"], prompt["v"], mask, None, *scales))
    q = q.reshape(s, 1, heads * group, size)
    return attend_parts(q, parts, scale=how.scale, softcap=how.softcap)[:, 0], cache


@pytest.mark.parametrize(
    ("rows", "prompts", "heads", "group", "columns", "width", "how", "in_8_bits", "bias"),
    [
        slow(6, 2, 2, 2, 70, 70, {}, False, False),
        (8, 2, 1, 3, 40, 100, {"window": 30, "softcap": 5.0}, False, True),
        (4, 2, 2, 2, 70, 40, {"plus_one": True}, True, False),
        slow(3, 0, 1, 4, 300, 0, {"window": 90}, False, False),
        slow(1, 1, 1, 2, 300, 300, {}, True, True),
    ],
)
def test_a_step_of_attention_is_the_plain_one(
    rows, prompts, heads, group, columns, width, how, in_8_bits, bias
):
    draw, size, rng = numbers(0), 32, np.random.default_rng(1)
    how = Scores(BF16, 0.3, **how)
    x = draw(rows, heads, group + 2, size)
    row_cache = cache(draw, rows, heads, columns, size, in_8_bits)
    prompt = cache(draw, prompts, heads, width, size, in_8_bits) if prompts else None
    column = jnp.asarray(rng.integers(1, columns, rows), jnp.int32).at[-1].set(columns - 1)
    if rows > 2:  # one that has just begun, and one that has ended
        column = column.at[0].set(0).at[1].set(-1)
    lengths = jnp.asarray(rng.integers(1, width + 1, prompts), jnp.int32) if prompts else None
    before = jnp.repeat(lengths, rows // prompts) if prompts else 0
    position = before + jnp.maximum(column, 0)
    freqs = jnp.asarray(frequencies(Rope(1e4), size))
    cos, sin = (t[:, 0] for t in angles(position[:, None], freqs))
    turn = Rotation(
        cos, sin, draw(size), draw(size), draw(heads, group + 2, size) if bias else None
    )
    first = None
    if prompts and how.window:
        earliest = position.reshape(prompts, -1).min(1)
        first = jnp.clip(earliest - how.window + 1, 0, lengths)
    reach = Reach(column, position, first, lengths)
    halves = jnp.stack([x.astype(jnp.float32) / 2] * 2)  # parts of a product
    out, new = attend_cache(halves, row_cache, prompt, turn, reach, how=how, interpret=True)
    want, stored = plain_step(x, row_cache, prompt, turn, reach, how)
    live = np.asarray(column >= 0)
    reference, actual = (np.asarray(a, np.float32)[live] for a in (want, out))
    assert np.linalg.norm(actual - reference) < 6e-3 * np.linalg.norm(reference)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for name in row_cache:  # of 8 bits one step, where a tie is rounded the other way
        off = 1 if in_8_bits and "scale" not in name else 0.04
        reference, entry = (np.asarray(a[name], np.float32) for a in (stored, new))
        np.testing.assert_allclose(entry, reference, atol=off)
        if name in "kv":
            np.testing.assert_array_equal(
                entry[~live], np.asarray(row_cache[name], np.float32)[~live]
            )


def test_products_of_few_rows():
    draw = numbers(2)
    x, w = draw(5, 256), draw(256, 192)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    parts = few_rows(x, Weight(w), interpret=True)
    assert parts.shape[0] > 1
    np.testing.assert_allclose(parts.sum(0), want, rtol=1e-4, atol=1e-3)
    for kind in ("int8", "float8"):
        short = quantise(w, 1, to=kind)
        weight = Weight(short.values, short.scales.reshape(-1))
        actual = few_rows(x, weight, interpret=True).sum(0)
        want_8 = np.asarray(x, np.float64) @ np.asarray(short.whole(), np.float64)
        np.testing.assert_allclose(actual, want_8, rtol=1e-4, atol=1e-3)
    # Gate and up in turn, PAIRED columns each.
    for weights, product in ((Weight(w), want), (weight, want_8)):
        pair = product.reshape(5, -1, 2, PAIRED)
        gate, up = (np.asarray(pair[:, :, i].reshape(5, -1)) for i in (0, 1))
        out = gated(x, weights, jax.nn.silu, interpret=True)
        silu = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(out.astype(jnp.float32), silu, rtol=0.03, atol=0.5)
    assert takes_product(64, 128, 192)
    assert not takes_product(65, 128, 192)
    assert not takes_product(1, 96, 192)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_every_number_in_float8_is_read_exactly(dtype):
    """All 254 of them, subnormals too, one beside the other as a weight of an identity's rows."""
    bits = jnp.arange(256, dtype=jnp.uint8)
    numbers = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    numbers = jnp.where(jnp.isnan(numbers.astype(jnp.float32)), 0, numbers)
    weight = Weight(jnp.tile(numbers.reshape(4, 64), (16, 1)), jnp.full(64, 2.0))
    rows = few_rows(jnp.eye(64, dtype=dtype)[:4], weight, interpret=True).sum(0)
    np.testing.assert_array_equal(rows, 2 * numbers.astype(jnp.float32).reshape(4, 64))


def test_an_output_matrix_in_float8_is_the_kernels_on_a_gpu(monkeypatch):
    draw, config = numbers(6), dataclasses.replace(CONFIG, vocab_size=128)
    x, w = draw(3, 64), draw(64, 128)
    float8, int8 = (quantise(w, 1, to=kind) for kind in ("float8", "int8"))
    plain = logits({"head": float8}, x, config=config)
    assert gpu.scores(x, float8) is None  # on a CPU
    monkeypatch.setattr(gpu, "platform", lambda: "gpu")
    monkeypatch.setattr(gpu, "_interpret", lambda: True)
    others = x.astype(jnp.float32), float8, x, int8, x, w, x[:, None], float8
    assert all(gpu.scores(*pair) is None for pair in zip(others[::2], others[1::2], strict=True))
    kernel = gpu.scores(x, float8)
    want = np.asarray(x, np.float64) @ np.asarray(float8.whole(), np.float64)
    np.testing.assert_allclose(kernel, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(plain, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(logits({"head": float8}, x, config=config), kernel)


def test_a_sum_and_its_norm():
    draw = numbers(3)
    x, out, w = draw(3, 80), draw(3, 80), draw(80)
    parts = jnp.stack([out.astype(jnp.float32) * f for f in (0.25, 0.75)])
    total, normed = added_norm(x, parts, w, eps=1e-6, plus_one=True, interpret=True)
    np.testing.assert_array_equal(total.astype(jnp.float32), (x + out).astype(jnp.float32))
    v = np.asarray(x + out, np.float64)
    want = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * (1 + np.asarray(w, np.float64))
    np.testing.assert_allclose(normed.astype(jnp.float32), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("capability", "runs"), [("9.0", True), ("8.9", True), ("7.5", False), ("gfx942", False)]
)
def test_older_chips_and_those_of_others_decode_in_plain_jax(capability, runs, monkeypatch):
    chip = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [chip])
    monkeypatch.setattr(gpu, "platform", lambda: "gpu")
    assert gpu.kernels("auto") == runs
    assert gpu.draws(jnp.zeros((1, 8))) == runs
    assert not gpu.kernels("xla")
    with contextlib.nullcontext() if runs else pytest.raises(UserError, match="8.0 or above"):
        check_attention(CONFIG, "triton", "gpu")


def test_rows_that_devices_do_not_share_evenly_are_drawn_in_plain_jax(monkeypatch):
    monkeypatch.setattr(gpu, "platform", lambda: "gpu")
    with jax.set_mesh(make_mesh({"data": 2})):
        assert gpu.draws(jnp.zeros((4, 8)))
        assert not gpu.draws(jnp.zeros((3, 8)))


@pytest.mark.parametrize("vocab", [23, 4097, 9000])
def test_a_draw_is_that_of_the_plain_search(vocab):
    rng, rows = np.random.default_rng(4), 12
    logits = jnp.asarray(4 * rng.normal(size=(rows, vocab)), jnp.float32)
    logits = logits.at[2, 5].set(logits.max()).at[2, 9].set(logits.max())  # a tie for the first
    uniform = jnp.asarray(rng.uniform(size=rows), jnp.float32).at[0].set(0.0).at[1].set(1 - 2**-24)
    temperature = jnp.tile(jnp.asarray([1.0, 0.7, 0.0, 2.0], jnp.float32), rows // 4)
    sums = block_sums(logits, temperature, interpret=True)
    token, logprob = pick(uniform, logits, temperature, *sums, interpret=True)
    off = jnp.zeros(rows)
    params = SamplingParams(temperature, off.astype(jnp.int32), off + 1, off, greedy=True)
    want, want_logprob = sample(uniform, logits, params)
    edge = np.arange(rows) == 1  # where the order of a sum decides, it is a token with mass
    np.testing.assert_array_equal(token[~edge], want[~edge])
    np.testing.assert_allclose(logprob[~edge], want_logprob[~edge], atol=2e-5)
    exact = jax.nn.log_softmax(logits[1] / temperature[1])[token[1]]
    np.testing.assert_allclose(logprob[1], exact, atol=2e-5)


def shaped(rows):
    """Distributions of rows: off, hot and cold, top-k, top-p, min-p, all of them, and extremes."""
    kinds = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (2.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 40, 0.9, 0.01),
        (0.0, 5, 0.5, 0.5),
        (1.0, 1, 1.0, 0.0),
        (1.0, 10**6, 1e-6, 0.0),
    ]
    temperature, top_k, top_p, min_p = np.array([kinds[i % len(kinds)] for i in range(rows)]).T
    arrays = map(jnp.float32, (temperature, top_p, min_p))
    temperature, top_p, min_p = arrays
    flags = {"truncates": True, "mixed": True, "floors": True}
    return SamplingParams(temperature, jnp.int32(top_k), top_p, min_p, greedy=True, **flags)


@pytest.mark.parametrize("vocab", [pytest.param(23, marks=pytest.mark.slow), 9000])
def test_truncation_keeps_what_the_plain_search_keeps(vocab, monkeypatch):
    """With ties, forbidden tokens, both zeros, and a bias."""
    rng, rows = np.random.default_rng(6), 8
    logits = jnp.asarray(np.round(4 * rng.normal(size=(rows, vocab)), 2), jnp.float32)
    logits = logits.at[:, 3].set(-jnp.inf).at[:, 7].set(0.0).at[:, 8].set(-0.0)
    uniform = jnp.asarray(rng.uniform(size=rows), jnp.float32)
    params = shaped(rows)
    kept_mask, (token, logprob) = kept_tokens(logits, params), sample(uniform, logits, params)
    assert kept_mask[6].sum() == kept_mask[7].sum() == 1
    monkeypatch.setattr(gpu, "draws", lambda logits: True)
    # Rows that keep all keep the forbidden one too, which weighs nothing.
    again = kept_tokens(logits, params) & (logits > -jnp.inf)
    live = np.asarray(params.temperature) > 0
    np.testing.assert_array_equal(again[live], (kept_mask & (logits > -jnp.inf))[live])
    again, logprob_again = sample(uniform, logits, params)
    np.testing.assert_array_equal(again, token)
    np.testing.assert_allclose(logprob_again, logprob, atol=2e-5)
    scores = partial(token_logprobs, tokens=token, sampling_params=params)
    np.testing.assert_allclose(scores(logits)["logprobs"][live], logprob[live], atol=2e-5)
    slope = jax.grad(lambda x: scores(x)["logprobs"][live].sum())(logits)
    np.testing.assert_allclose(slope[live].sum(1), 0.0, atol=1e-4)
    forbids = jnp.zeros(vocab).at[token[0]].set(-jnp.inf)
    assert sample(uniform, logits, params.replace(bias=forbids))[0][0] != token[0]


@pytest.mark.parametrize("rows", [8, 6])
def test_devices_that_divide_the_vocabulary_draw_what_one_draws(rows, monkeypatch):
    """Each for rows of its own, or, where they are uneven, each for all of its rows."""
    monkeypatch.setattr(gpu, "draws", lambda logits: True)
    rng = np.random.default_rng(7)
    logits = jnp.asarray(4 * rng.normal(size=(rows, 300)), jnp.float32)
    uniform, params = jnp.asarray(rng.uniform(size=rows), jnp.float32), shaped(rows)
    one = sample(uniform, logits, params), kept_tokens(logits, params)
    mesh = make_mesh({"data": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, PartitionSpec("data", "tensor"))
        divided = jax.device_put(logits, where)
        several = jax.jit(sample)(uniform, divided, params), jax.jit(kept_tokens)(divided, params)
    chex.assert_trees_all_equal(jax.device_get(several), jax.device_get(one))


CONFIG = ModelConfig(
    vocab_size=31,
    layers=1,
    embed_dim=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    mlp_dim=64,
    max_length=40,
    dtype="bfloat16",
    qk_norm=True,
    window=6,
)


@pytest.mark.parametrize("kind", ["same", slow("int8"), slow("float8")])
def test_steps_of_a_model_are_those_of_plain_jax(kind, monkeypatch):
    """Token steps behind shared prompts, weights and cache in 8 bits or not."""
    monkeypatch.setattr(gpu, "pairs", lambda width: PAIRED)
    prompts = jnp.asarray(np.random.default_rng(5).integers(0, 31, (2, 9)), jnp.int32)
    lengths = jnp.asarray([9, 4], jnp.int32)
    hidden = {}
    for attention in ("triton", "xla"):
        network = transformer(CONFIG, attention=attention)
        if kind != "same":
            network = sampler(network, CONFIG, weights=kind, cache="int8")
        weights = network.prepare(network.init(jax.random.key(0)))
        past = prefill(weights, prompts, lengths + 1, network=network)
        rows = share(past, lengths, 3, network=network, weights=weights, length=5)

        @partial(jax.jit, static_argnames="step")
        def advance(rows, token, step, network=network, weights=weights):
            positions = jnp.repeat(lengths, 3)[:, None] + step
            live = jnp.arange(6)[:, None] != 4
            return network.extend(weights, rows, token, positions, live)

        states = []
        for step in range(3):
            token = jnp.full((6, 1), step, jnp.int32) + jnp.arange(6)[:, None]
            state, rows = advance(rows, token, step)
            states.append(np.delete(np.asarray(state, np.float32), 4, axis=0))
        hidden[attention] = np.stack(states)
    error = np.linalg.norm(hidden["triton"] - hidden["xla"]) / np.linalg.norm(hidden["xla"])
    assert 0 < error < 0.02


# ---------------------------------------------------------------- whole sequences


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_norm_and_rotation_in_one_pass_and_their_gradient(normed, rows):
    """Of three rows of seven tokens with three heads, at positions of their own or of one row."""
    draw, config = numbers(3), dataclasses.replace(CONFIG, norm_plus_one=True)
    x, g, w = draw(3, 7, 3, 32), draw(3, 7, 3, 32), draw(32) if normed else None
    positions = jnp.arange(7, dtype=jnp.int32)[None] + 5 * jnp.arange(rows)[:, None]
    turn = angles(positions, jnp.asarray(frequencies(Rope(1e4), 32)))

    def plain(x, w):
        x = x if w is None else rms_norm(x, w, config)
        return rotate(x, turn[0][:, :, None], turn[1][:, :, None])

    def kernel(x, w):
        return gpu.norm_rotated(config, x, w, turn, "heads")

    (expected, back), (out, pulled) = (jax.vjp(f, x, w) for f in (plain, kernel))
    pairs = [(out, expected)]
    pairs += zip(jax.tree.leaves(pulled(g)), jax.tree.leaves(back(g)), strict=True)
    for a, b in pairs:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        np.testing.assert_allclose(a, b, atol=0.01 * float(jnp.abs(b).max()))
