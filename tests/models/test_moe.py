from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import moe
from jrl.models.grouped import KERNELS, blocks, grouped_matmul

M, E, K, D, F = 13, 5, 2, 6, 7


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(M, D), (D, E), (E, D, F), (E, D, F), (E, F, D)]
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


def sparse(x, router, gate, up, down, norm):
    scores = (x @ router).astype(jnp.float32)
    to = moe.route(scores, experts_per_token=K, norm_topk_prob=norm)
    return visited(x, to.weights, to.experts, gate, up, down)


def visited(x, w, ids, gate, up, down, **options):
    live = options.pop("live", jnp.ones(x.shape[0], bool))
    return moe.routed(x, w, ids, live, moe.Experts(gate, up, down, jax.nn.silu), **options)


def loop(x, router, gate, up, down, norm):
    """Every expert on every token, weighted by zero where it is not visited."""
    probs = jax.nn.softmax(x @ router, axis=-1)
    kth = jnp.sort(probs, axis=-1)[:, -K][:, None]
    gates = jnp.where(probs >= kth, probs, 0.0)
    gates = gates / gates.sum(-1, keepdims=True) if norm else gates
    out = jnp.zeros_like(x)
    for e in range(E):
        out += gates[:, e : e + 1] * ((jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize("norm", [True, False])
def test_values_and_gradients_equal_a_loop_over_experts(norm):
    args = weights()
    probe = jax.random.normal(jax.random.key(5), (M, D))

    def scalar(f):
        return lambda *a: (f(*a, norm) * probe).sum()

    values = (jax.jit(f, static_argnums=5)(*args, norm) for f in (sparse, loop))
    np.testing.assert_allclose(*values, atol=2e-5)
    ours = jax.jit(jax.grad(scalar(sparse), argnums=range(5)))(*args)
    theirs = jax.jit(jax.grad(scalar(loop), argnums=range(5)))(*args)
    for a, b in zip(ours, theirs, strict=True):
        assert float(jnp.abs(b).max()) > 1e-2
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_no_token_is_dropped_when_all_visit_one_expert():
    x, _, gate, up, down = weights()
    ids = jnp.full((M, 1), 3, jnp.int32)
    out = visited(x, jnp.ones((M, 1)), ids, gate, up, down)
    np.testing.assert_allclose(out, (jax.nn.silu(x @ gate[3]) * (x @ up[3])) @ down[3], atol=2e-5)
    gradient = jax.grad(lambda g: visited(x, jnp.ones((M, 1)), ids, g, up, down).sum())(gate)
    unvisited = np.delete(np.asarray(gradient), 3, axis=0)
    np.testing.assert_array_equal(unvisited, np.zeros_like(unvisited))


def test_bfloat16_products_keep_float32_gradients_of_float32_weights():
    x, router, gate, up, down = weights()
    low = x.astype(jnp.bfloat16)

    def total(gate):
        scores = x @ router
        to = moe.route(scores, experts_per_token=K, norm_topk_prob=True)
        return visited(low, to.weights, to.experts, gate, up, down).sum()

    gradient = jax.grad(total)(gate)
    assert gradient.dtype == jnp.float32
    exact = jax.grad(lambda g: sparse(x, router, g, up, down, True).sum())(gate)
    scale = float(jnp.abs(exact).max())
    np.testing.assert_allclose(gradient / scale, exact / scale, atol=0.02)
    assert bool((gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32)).any())


# ---------------------------------------------------------------- grouped products

ROWS = ([3, 0, 4, 2, 1], [0, 0, 13, 0, 0], [0] * 5)
"""Rows of each expert: uneven, all with one, and none at all; the last rows may be nobody's."""


@cache
def grouped(kernel):
    """Values and gradients under one compiled program for all numbers of rows."""

    def scalar(x, w, rows, probe):
        return (grouped_matmul(x, w, rows, kernel=kernel) * probe).sum()

    def both(x, w, rows, probe):
        return grouped_matmul(x, w, rows, kernel=kernel), jax.grad(scalar, (0, 1))(
            x, w, rows, probe
        )

    return jax.jit(both)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "auto"])
def test_a_grouped_product_is_a_product_for_each_group(kernel):
    x, _, w, _, _ = weights()
    probe = jax.random.normal(jax.random.key(5), (M, F))
    for rows in ROWS:
        product, (dx, dw) = grouped(kernel)(x, w, jnp.array(rows, jnp.int32), probe)
        y = np.zeros((M, F))
        expected = np.zeros((M, D)), np.zeros((E, D, F))
        start, arrays = 0, [np.asarray(a, np.float64) for a in (x, w, probe)]
        for e, count in enumerate(rows):
            at = slice(start, start + count)
            y[at] = arrays[0][at] @ arrays[1][e]
            expected[0][at] = arrays[2][at] @ arrays[1][e].T
            expected[1][e] = arrays[0][at].T @ arrays[2][at]
            start += count
        np.testing.assert_allclose(product, y, atol=1e-5)
        np.testing.assert_allclose(dx, expected[0], atol=1e-5)
        np.testing.assert_allclose(dw, expected[1], atol=1e-5)


def test_an_unknown_kernel_is_named():
    x, _, w, _, _ = weights()
    with pytest.raises(UserError, match="grouped_matmul = 'tiles'.*blocks, megablox"):
        grouped_matmul(x, w, jnp.zeros(E, jnp.int32), kernel="tiles")


def test_blocks_are_as_many_as_the_visited_experts_need():
    """Few tokens and many experts, as in decoding: experts that nobody visits cost nothing."""
    rows = np.zeros(64, np.int32)
    rows[[3, 17, 40]] = [1, 9, 2]
    count, block = blocks(jnp.asarray(rows), 8)
    assert int(count) == 4
    block_list = [tuple(map(int, block(i))) for i in range(4)]
    assert block_list == [(3, 0, 1), (17, 1, 8), (17, 9, 1), (40, 10, 2)]


def test_padding_visits_nobody():
    x, _, gate, up, down = weights()
    ids = jnp.tile(jnp.array([[0, 4]]), (M, 1))
    live = jnp.arange(M) % 2 == 0
    out = visited(x, jnp.ones((M, 2)), ids, gate, up, down, live=live)
    full = visited(x, jnp.ones((M, 2)), ids, gate, up, down)
    np.testing.assert_array_equal(out[~live], 0)
    np.testing.assert_allclose(out[live], full[live], atol=1e-5)


def test_devices_with_some_of_the_experts_add_up_to_all_of_them():
    x, router, gate, up, down = weights()
    to = moe.route(x @ router, experts_per_token=K, norm_topk_prob=True)
    halves = [
        visited(x, to.weights, to.experts, gate[at], up[at], down[at], first=first)
        for first, at in ((0, slice(0, 2)), (2, slice(2, E)))
    ]
    full = visited(x, to.weights, to.experts, gate, up, down)
    np.testing.assert_allclose(sum(halves), full, atol=2e-5)


# ---------------------------------------------------------------- routers


def softmax(x):
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def test_replayed_experts_get_the_weights_that_the_scores_give_them():
    logits = np.random.default_rng(0).normal(size=(3, E)).astype(np.float32)
    record = jnp.array([[4, 0], [-1, -1], [2, 3]], jnp.int8)
    for norm in (True, False):
        to = moe.route(
            jnp.asarray(logits), experts_per_token=K, norm_topk_prob=norm, recorded=record
        )
        top = np.argsort(-logits, axis=1)[:, :K]
        np.testing.assert_array_equal(to.scored_experts, top)
        np.testing.assert_array_equal(to.experts, [[4, 0], top[1], [2, 3]])
        probs = np.take_along_axis(softmax(logits.astype(np.float64)), np.asarray(to.experts), 1)
        expected = probs / probs.sum(1, keepdims=True) if norm else probs
        np.testing.assert_allclose(to.weights, expected, rtol=1e-5)


def test_a_router_learns_through_the_replayed_experts():
    """With weights that sum to one only their difference matters: a softmax over the experts."""
    logits = jnp.array([[0.5, -1.0, 2.0, 0.0, 1.0]])
    record = jnp.array([[1, 3]])

    def first(logits):
        return moe.route(logits, experts_per_token=2, norm_topk_prob=True, recorded=record).weights[
            0, 0
        ]

    share = float(first(logits))
    expected = [0, share * (1 - share), 0, -share * (1 - share), 0]
    np.testing.assert_allclose(jax.grad(first)(logits)[0], expected, atol=1e-6)


def router_numbers(logits, record, live):
    """Sums and losses in float64, one token at a time."""
    probs, m = softmax(logits.astype(np.float64)), len(logits)
    sums = {"visits": np.zeros(E), "probs": np.zeros(E), "entropy": 0.0, "z": 0.0, "moved": 0}
    for i in np.flatnonzero(live):
        top = np.argsort(-logits[i])[:K]
        experts = top if record[i, 0] < 0 else record[i]
        sums["visits"][experts] += 1
        sums["probs"] += probs[i]
        sums["entropy"] -= (probs[i] * np.log(probs[i])).sum()
        sums["z"] += np.log(np.exp(logits[i].astype(np.float64)).sum()) ** 2
        sums["moved"] += len(set(experts) - set(top))
    tokens = live.sum()
    share = sums["visits"] / (K * tokens)
    return sums, tokens, E * (share * sums["probs"]).sum(), m


def test_sums_and_losses_of_a_router():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, M, E)).astype(np.float32)
    record = np.where(
        rng.random((2, M, 1)) < 0.5,
        -1,
        rng.permuted(np.tile(np.arange(E), (2, M, 1)), axis=2)[:, :, :K],
    )
    live = np.arange(M) < 9
    layers, balances, zs = [], [], []
    for scores, experts in zip(logits, record, strict=True):
        to = moe.route(
            jnp.asarray(scores), experts_per_token=K, norm_topk_prob=True, recorded=experts
        )
        numbers = moe.router_sums(jnp.asarray(scores), to, jnp.asarray(live))
        sums, tokens, balance, _ = router_numbers(scores, experts, live)
        assert (numbers["router_tokens"], numbers["router_asked"]) == (tokens, K * tokens)
        np.testing.assert_array_equal(numbers["router_visits"], sums["visits"])
        for name in ("probs", "entropy", "z", "moved"):
            np.testing.assert_allclose(numbers[f"router_{name}"], sums[name], rtol=1e-5)
        assert sums["moved"] > 0
        layers.append(numbers)
        balances.append(balance)
        zs.append(sums["z"])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    np.testing.assert_allclose(moe.balance_loss(stacked), np.mean(balances), rtol=1e-5)
    np.testing.assert_allclose(moe.z_loss(stacked), np.mean(zs), rtol=1e-5)


def test_even_use_has_a_balance_loss_of_one_and_its_gradient_evens_out():
    even = {
        "router_visits": jnp.full((1, E), 4.0),
        "router_probs": jnp.full((1, E), 2.0),
    }
    np.testing.assert_allclose(moe.balance_loss(even) / (2 * E), 1, rtol=1e-6)
    logits = jnp.zeros((4, E)).at[:, 2].set(3.0)

    def loss(logits):
        to = moe.route(logits, experts_per_token=1, norm_topk_prob=False)
        sums = moe.router_sums(logits, to, jnp.ones(4, bool))
        return moe.balance_loss(jax.tree.map(lambda x: x[None], sums)) / 4

    slope = jax.grad(loss)(logits)
    assert float(loss(logits)) > 2
    assert bool((slope[:, 2] > 0).all())
    assert bool((slope[:, 0] < 0).all())
