import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import vocabulary
from jrl.models.vocabulary import fused_logprobs
from jrl.types import Head

B, S, D = 2, 3, 8
TEMPERATURE = 0.7


def head_inputs(v, axis, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = 2 * jax.random.normal(keys[0], (B, S, D))
    weight = jax.random.normal(keys[1], (v, D) if axis == 0 else (D, v))
    tokens = jax.random.randint(keys[2], (B, S), 0, v).at[0, :2].set(jnp.array([0, v - 1]))
    return hidden.astype(dtype), weight, tokens


def by_definition(hidden, weight, tokens, axis, softcap):
    """The same from the whole softmax."""
    scores = jnp.einsum("btd,vd->btv", hidden, weight if axis == 0 else weight.T)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    logprobs = jax.nn.log_softmax(scores / TEMPERATURE)
    chosen = jnp.take_along_axis(logprobs, tokens[:, :, None], axis=-1)[:, :, 0]
    return {"logprobs": chosen, "entropy": -(jnp.exp(logprobs) * logprobs).sum(-1)}


def total(stats):
    """A different cotangent for every number."""
    weights = jax.random.normal(jax.random.key(5), (2, B, S))
    return sum((w * stats[n]).sum() for w, n in zip(weights, sorted(stats), strict=False))


@pytest.mark.parametrize(
    ("v", "axis", "softcap", "devices", "at_once"),
    [
        (300, 0, None, (1, 1), 2**20),  # at once
        (256, 1, None, (1, 1), 0),  # two parts of 128
        (300, 1, None, (1, 1), 0),  # three parts of 100
        (301, 0, 4.0, (1, 1), 0),  # three parts, the last one overlaps
        (602, 1, 4.0, (1, 2), 0),  # the same in each of two shards
    ],
)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize("keeps", [False, True])
def test_fused_logprobs_equal_the_whole_softmax(
    v, axis, softcap, devices, at_once, entropy, where, keeps, monkeypatch
):
    monkeypatch.setattr(vocabulary, "platform", lambda: where)  # a GPU's parts are in tiles
    hidden, weight, tokens = head_inputs(v, axis)

    def fused(hidden, weight):
        head = Head(weight, axis, softcap, keeps)
        options = {"devices": devices, "at_once": at_once, "room": 0}
        stats = fused_logprobs(
            hidden, head, tokens, jnp.float32(TEMPERATURE), entropy=entropy, **options
        )
        return total(stats), stats

    def full_softmax(hidden, weight):
        stats = by_definition(hidden, weight, tokens, axis, softcap)
        stats = stats if entropy else {"logprobs": stats["logprobs"]}
        return total(stats), stats

    slopes, stats = jax.jit(jax.grad(fused, (0, 1), has_aux=True))(hidden, weight)
    expected_slopes, expected = jax.jit(jax.grad(full_softmax, (0, 1), has_aux=True))(
        hidden, weight
    )
    assert set(stats) == set(expected)
    for name in stats:
        np.testing.assert_allclose(stats[name], expected[name], atol=2e-5)
    for a, b in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_fused_gradients_in_bfloat16_leave_in_the_operands_dtypes():
    hidden, weight, tokens = head_inputs(300, 0, jnp.bfloat16)

    def loss(hidden, weight):
        one = jnp.float32(1)
        stats = fused_logprobs(hidden, Head(weight, 0), tokens, one, at_once=0, room=0)
        return stats["logprobs"].sum()

    value, (back, slopes) = jax.value_and_grad(loss, (0, 1))(hidden, weight)
    exact, (_, expected) = jax.value_and_grad(loss, (0, 1))(hidden.astype(jnp.float32), weight)
    assert (back.dtype, slopes.dtype) == (jnp.bfloat16, jnp.float32)
    assert float(value) == pytest.approx(float(exact), rel=0.02)
    np.testing.assert_allclose(slopes, expected, atol=0.03 * float(jnp.abs(expected).max()))


def test_a_number_that_is_not_finite_is_not_hidden():
    hidden, weight, tokens = head_inputs(300, 0)
    with_nan = hidden.at[0, 0, 0].set(jnp.nan)
    head, one = Head(weight, 0), jnp.float32(1)
    stats = fused_logprobs(with_nan, head, tokens, one, entropy=True, at_once=0, room=0)
    for x in stats.values():
        assert np.isnan(x[0, 0])
        assert np.isfinite(np.asarray(x).reshape(-1)[1:]).all()


def test_the_memory_of_a_fused_head_does_not_grow_with_the_vocabulary():
    """Temporaries of forward and backward, beside the gradients themselves."""

    def temporaries(v, at_once):
        def loss(hidden, weight, tokens):
            head, one = Head(weight, 0), jnp.float32(1)
            limits = {"at_once": at_once, "room": 2**12}
            stats = fused_logprobs(hidden, head, tokens, one, entropy=True, **limits)
            return stats["logprobs"].sum() + stats["entropy"].sum()

        shape = jax.ShapeDtypeStruct
        inputs = (
            shape((2, 16, 8), jnp.float32),
            shape((v, 8), jnp.float32),
            shape((2, 16), jnp.int32),
        )
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(2**11, 0), temporaries(2**14, 0)
    assert large < 1.1 * small
    assert temporaries(2**14, 2**24) > 4 * large  # what it would be
