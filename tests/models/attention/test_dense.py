from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.attention.dense import Part, attend, attend_shared, visible
from jrl.models.config import NO_ROPE, Rope
from jrl.models.decode import write
from jrl.models.rope import angles, frequencies, rotate

B, Q, C, H, K, D = 2, 5, 7, 6, 3, 4


def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, Q, H, D))
    k = jax.random.normal(keys[1], (B, K, C, D))
    v = jax.random.normal(keys[2], (B, K, C, D))
    mask = jax.random.bernoulli(keys[3], 0.6, (B, Q, C)).at[:, :, 0].set(True)
    return q, k, v, mask


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attend_equals_loops_in_float64(softcap):
    q, k, v, mask = (np.asarray(x, np.float64) for x in inputs())
    expected = np.zeros((B, Q, H, D))
    for b in range(B):
        for i in range(Q):
            for h in range(H):
                scores = k[b, h // (H // K)] @ q[b, i, h] * 0.7
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores) * mask[b, i]
                expected[b, i, h] = weights / weights.sum() @ v[b, h // (H // K)]
    got = attend(*inputs(), scale=0.7, softcap=softcap)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_to_a_shared_past_equals_attention_to_copies_of_it(softcap):
    """Values and gradients; a row that sees nothing of its own or of the past among them."""
    members, p = 3, 4
    keys = jax.random.split(jax.random.key(3), 6)
    q = jax.random.normal(keys[0], (B * members, Q, H, D))
    row_part = jax.random.normal(keys[1], (2, B * members, K, Q, D))
    past = jax.random.normal(keys[2], (2, B, K, p, D))
    mask_past = jax.random.bernoulli(keys[3], 0.5, (B * members, Q, p)).at[1].set(False)
    mask_own = jax.random.bernoulli(keys[4], 0.5, (B * members, Q, Q)).at[2].set(False)
    weights = jax.random.normal(keys[5], q.shape)

    def shared(q, row_part, past):
        prefix = Part(*past, mask_past)
        out = attend_shared(q, prefix, *row_part, mask_own, scale=0.7, softcap=softcap)
        return (weights * out).sum(), out

    def repeated(q, row_part, past):
        k, v = jnp.concatenate([jnp.repeat(past, members, axis=1), row_part], axis=3)
        mask = jnp.concatenate([mask_past, mask_own], axis=2)
        out = attend(q, k, v, mask, scale=0.7, softcap=softcap)
        return (weights * out).sum(), out

    quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    got, out = quick(jax.grad(shared, (0, 1, 2), has_aux=True))(q, row_part, past)
    want, expected = quick(jax.grad(repeated, (0, 1, 2), has_aux=True))(q, row_part, past)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_query_that_sees_nothing_is_finite_with_a_finite_gradient():
    q, k, v, mask = inputs()
    mask = mask.at[0, 1].set(False)
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, scale=1.0), q, k, v)
    assert all(bool(jnp.isfinite(x).all()) for x in (out, *pull(out)))


def test_visible_needs_same_segment_and_no_later_position_in_any_column_order():
    positions = jnp.array([[1, 0, 0, 1, 2, 0]])
    segments = jnp.array([[1, 1, 2, 2, 2, 0]])
    mask, distance = visible(positions, segments, positions, segments)
    expected = [
        [1, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert mask[0].astype(int).tolist() == expected
    assert distance[0, 4].tolist() == [1, 2, 2, 1, 0, 2]


def test_scores_after_rotation_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(1), (2, D))
    spin = jnp.asarray(frequencies(Rope(100.0), D))

    def score(at_q, at_k):
        cos, sin = angles(jnp.array([[at_q, at_k]]), spin)
        return float((rotate(q, cos[0, 0], sin[0, 0]) * rotate(k, cos[0, 1], sin[0, 1])).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_frequencies_of_each_scaling():
    base = frequencies(Rope(1e4), 8).astype(np.float64)
    np.testing.assert_allclose(base, 1e4 ** (-np.arange(4) / 4), rtol=1e-6)
    np.testing.assert_allclose(frequencies(Rope(1e4, "linear", 4.0), 8), base / 4, rtol=1e-6)
    rope = Rope(1e4, "llama3", 8.0, 1.0, 4.0, 200)
    got = frequencies(rope, 8)
    # Wavelengths 6.3, 63, 628, 6283: below 200/4 kept, above 200/1 divided, between blended.
    smooth = (200 / (2 * np.pi / base[1]) - 1) / 3
    blended = (1 - smooth) * base[1] / 8 + smooth * base[1]
    np.testing.assert_allclose(got, [base[0], blended, base[2] / 8, base[3] / 8], rtol=1e-5)
    assert not frequencies(NO_ROPE, 8).any()


def test_write_stores_live_entries_at_their_columns():
    old = {name: jnp.zeros((2, K, C, D)) for name in ("k", "v")}
    new = {name: jnp.ones((2, K, 2, D)) for name in old}
    columns, live = jnp.array([[3, 4], [0, C]]), jnp.array([[True, False], [True, True]])
    out = write(old, new, columns, live)
    for name in ("k", "v"):
        columns_written = np.asarray(out[name]).any((1, 3))
        assert [np.flatnonzero(row).tolist() for row in columns_written] == [[3], [0]]


@pytest.mark.parametrize("queries", [1, 256])
def test_bfloat16_attention_and_its_gradient_are_close_to_float32(queries):
    # At these sizes XLA's CPU backend refuses some orders of operands.
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, queries, 4, 64))
    k, v = jax.random.normal(keys[1], (2, 2, 2, 256, 64))
    mask = jnp.ones((2, queries, 256), bool)

    def total(q, k, v):
        return (attend(q, k, v, mask, scale=0.125).astype(jnp.float32) ** 2).sum()

    compute = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    value, gradients = compute(*low)
    exact, expected = compute(*(x.astype(jnp.float32) for x in low))
    assert float(value) == pytest.approx(float(exact), rel=0.02)
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert float(error) < 0.02


@pytest.mark.parametrize("queries", [1, 64])
def test_bfloat16_attention_to_a_shared_past_is_close_to_float32(queries):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (4, queries, 4, 64))
    row_part = jax.random.normal(keys[1], (2, 4, 2, queries, 64))
    past = jax.random.normal(keys[2], (2, 2, 2, 128, 64))
    before = jnp.ones((4, queries, 128), bool)
    mask = jnp.ones((4, queries, queries), bool)

    def total(q, row_part, past):
        out = attend_shared(q, Part(*past, before), *row_part, mask, scale=0.125)
        return (out.astype(jnp.float32) ** 2).sum()

    compute = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    low = [x.astype(jnp.bfloat16) for x in (q, row_part, past)]
    value, gradients = compute(*low)
    exact, expected = compute(*(x.astype(jnp.float32) for x in low))
    assert float(value) == pytest.approx(float(exact), rel=0.02)
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert float(error) < 0.02
