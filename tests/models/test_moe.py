import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import moe

M, E, K, D, F = 13, 5, 2, 6, 7


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(M, D), (D, E), (E, D, F), (E, D, F), (E, F, D)]
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


def sparse(x, router, gate, up, down, norm):
    scores = (x @ router).astype(jnp.float32)
    w, ids, _ = moe.route(scores, experts_per_token=K, norm_topk_prob=norm)
    return moe.routed(x, w, ids, gate, up, down, jax.nn.silu)


def loop(x, router, gate, up, down, norm):
    """Every expert on every token, weighted by zero where it is not visited."""
    probs = jax.nn.softmax(x @ router, axis=-1)
    kth = jnp.sort(probs, axis=-1)[:, -K][:, None]
    kept = jnp.where(probs >= kth, probs, 0.0)
    kept = kept / kept.sum(-1, keepdims=True) if norm else kept
    out = jnp.zeros_like(x)
    for e in range(E):
        out += kept[:, e : e + 1] * ((jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize("norm", [True, False])
def test_values_and_gradients_equal_a_loop_over_experts(norm):
    args = weights()
    probe = jax.random.normal(jax.random.key(5), (M, D))

    def scalar(f):
        return lambda *a: (f(*a, norm) * probe).sum()

    np.testing.assert_allclose(sparse(*args, norm), loop(*args, norm), atol=2e-5)
    ours = jax.jit(jax.grad(scalar(sparse), argnums=range(5)))(*args)
    theirs = jax.jit(jax.grad(scalar(loop), argnums=range(5)))(*args)
    for a, b in zip(ours, theirs, strict=True):
        assert float(jnp.abs(b).max()) > 1e-2
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_no_token_is_dropped_when_all_visit_one_expert():
    x, _, gate, up, down = weights()
    ids = jnp.full((M, 1), 3, jnp.int32)
    out = moe.routed(x, jnp.ones((M, 1)), ids, gate, up, down, jax.nn.silu)
    np.testing.assert_allclose(out, (jax.nn.silu(x @ gate[3]) * (x @ up[3])) @ down[3], atol=2e-5)
    gradient = jax.grad(
        lambda g: moe.routed(x, jnp.ones((M, 1)), ids, g, up, down, jax.nn.silu).sum()
    )(gate)
    unvisited = np.delete(np.asarray(gradient), 3, axis=0)
    np.testing.assert_array_equal(unvisited, np.zeros_like(unvisited))


def test_bfloat16_products_keep_float32_gradients_of_float32_weights():
    x, router, gate, up, down = weights()
    low = x.astype(jnp.bfloat16)

    def total(gate):
        scores = x @ router
        w, ids, _ = moe.route(scores, experts_per_token=K, norm_topk_prob=True)
        return moe.routed(low, w, ids, gate, up, down, jax.nn.silu).astype(jnp.float32).sum()

    gradient = jax.grad(total)(gate)
    assert gradient.dtype == jnp.float32
    exact = jax.grad(lambda g: sparse(x, router, g, up, down, True).sum())(gate)
    scale = float(jnp.abs(exact).max())
    np.testing.assert_allclose(gradient / scale, exact / scale, atol=0.02)
    assert bool((gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32)).any())


def test_router_statistics_count_live_tokens_only():
    experts = jnp.array([[0, 1], [0, 2], [3, 4]])
    probs = jnp.array([[0.5, 0.5, 0, 0, 0], [1.0, 0, 0, 0, 0], [0.2] * 5])
    stats = moe.router_statistics(experts, probs, jnp.array([True, True, False]))
    np.testing.assert_allclose(stats["router_load"], [0.5, 0.25, 0.25, 0, 0])
    np.testing.assert_allclose(stats["router_entropy"], np.log(2) / 2, rtol=1e-6)
    nobody = moe.router_statistics(experts, probs, jnp.zeros(3, bool))
    np.testing.assert_array_equal(nobody["router_load"], np.zeros(5))
    np.testing.assert_array_equal(nobody["router_entropy"], 0.0)
