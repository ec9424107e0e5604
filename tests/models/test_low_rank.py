"""The product with a frozen matrix and its adapter, in one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import make_mesh
from jrl.models import low_rank
from jrl.models.lora import Adapted

CASES = [
    ("bqd,dhk->bqhk", (2, 40, 8), (8, 4, 16)),
    ("bqhk,hkd->bqd", (2, 90, 2, 3), (2, 3, 40)),
    ("bqf,fd->bqd", (2, 40, 64), (64, 8)),  # backward prolongs the other way
]


@pytest.mark.parametrize(("spec", "rows", "matrix"), CASES)
def test_it_is_the_sum_of_two_products_with_the_same_gradients(spec, rows, matrix, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    n, rank = low_rank._inputs(spec), 2
    x, w = jax.random.normal(keys[0], rows), jax.random.normal(keys[1], matrix)
    a = jax.random.normal(keys[2], (*matrix[:n], rank))
    b = jax.random.normal(keys[3], (rank, *matrix[n:]))

    def loss(x, w, a, b):
        y = Adapted(w, a, b, 0.7).times(spec, x, None, (None,) * w.ndim)
        slopes = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return (jnp.sin(y) * slopes).sum(), y

    def compute(*args):  # traced anew each time
        return jax.jit(lambda *args: jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*args))(
            *args
        )

    (_, two), separate = compute(x, w, a, b)
    monkeypatch.setattr(low_rank, "joins", lambda *args: True)
    text = str(jax.make_jaxpr(lambda *args: loss(*args)[0])(x, w, a, b))
    assert "concatenate" in text
    (_, one), joint = compute(x, w, a, b)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    for left, right in zip(joint, separate, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_it_pays_for_many_rows_and_a_wide_matrix_on_a_gpu(monkeypatch):
    def joins(rows, inputs, outputs, dtype=jnp.bfloat16, axes=("embed", "mlp")):
        x = jax.ShapeDtypeStruct((rows, 512, inputs), dtype)
        return low_rank.joins("bqd,df->bqf", x, jnp.zeros((inputs, outputs), dtype), axes)

    assert not joins(31, 2560, 9728)  # a CPU
    monkeypatch.setattr(low_rank, "platform", lambda: "gpu")
    assert joins(31, 2560, 9728)
    assert not joins(31, 9728, 2560)  # the rows are too long to copy
    assert not joins(1, 2560, 9728)
    assert not joins(31, 2560, 9728, jnp.float32)
    assert not joins(31, 2560, 9728, axes=None)
    with jax.set_mesh(make_mesh({"fsdp": 2}, jax.devices()[:2])):
        assert not joins(32, 2560, 9728)  # devices divide the matrix
    with jax.set_mesh(make_mesh({"data": 2}, jax.devices()[:2])):
        assert joins(32, 2560, 9728)
