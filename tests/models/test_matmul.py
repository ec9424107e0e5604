import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jrl.mesh import make_mesh, spec
from jrl.models import cpu
from jrl.models import matmul as module
from jrl.models.matmul import matmul, summed_short


def test_matmul_has_the_derivatives_of_einsum():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    w = jax.random.normal(jax.random.key(1), (4, 5, 6))
    probe = jax.random.normal(jax.random.key(2), (2, 5, 3, 6))
    spec = "abd,dhk->ahbk"

    def ours(x, w):
        return (matmul(spec, x, w) * probe).sum()

    def theirs(x, w):
        return (jnp.einsum(spec, x, w) * probe).sum()

    for a, b in zip(jax.grad(ours, (0, 1))(x, w), jax.grad(theirs, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    low = x.astype(jnp.bfloat16)
    dx, dw = jax.grad(lambda x, w: matmul(spec, x, w).astype(jnp.float32).sum(), (0, 1))(low, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    exact = np.asarray(low, np.float64).sum((0, 1))
    np.testing.assert_allclose(dw[:, 0, 0], exact, rtol=1e-6)


def test_parts_of_a_sum_over_devices_are_sent_as_short_as_the_activations(monkeypatch):
    """A device's own part is summed in float32 and rounded once; all other sums stay float32."""
    monkeypatch.setattr(cpu, "tuned", lambda dtype: False)
    x, w = jnp.ones((4, 2, 4), jnp.bfloat16), jnp.ones((4, 4))

    monkeypatch.setattr(module, "platform", lambda: "tpu")
    counts = {}
    mesh = make_mesh({"tensor": 2, "data": 4}, jax.devices()[:8])
    for axes in (None, ("mlp", "embed"), ("embed", "mlp")):
        with jax.set_mesh(mesh):
            product = partial(module._matmul, "bqd,df->bqf", dtype=None, axes=axes)
            forward = jax.make_jaxpr(product)(x, w)
            back = partial(module.gradients, "bqd,df->bqf", axes=axes)
            backward = jax.make_jaxpr(back)(x, w, jnp.ones((4, 2, 4), jnp.bfloat16))
        short = "preferred_element_type=bfloat16"
        counts[axes] = [str(jaxpr).count(short) for jaxpr in (forward, backward)]
    assert counts == {None: [0, 0], ("mlp", "embed"): [1, 0], ("embed", "mlp"): [0, 1]}
    monkeypatch.setattr(module, "platform", lambda: "cpu")  # which cannot
    with jax.set_mesh(mesh):
        assert summed_short("bqd,df->bqf", (4, 4), ("embed", "mlp")) is None


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_gradient_of_a_divided_weight_is_summed_and_divided_at_once(axes):
    """A reduce-scatter of what a device has multiplied; no device sums the whole gradient."""
    mesh = make_mesh(axes, jax.devices()[:8])
    x = jax.random.normal(jax.random.key(0), (8, 2, 16))
    w = jax.random.normal(jax.random.key(1), (16, 4))
    probe = jax.random.normal(jax.random.key(2), (8, 2, 4))

    def gradient(x, w, names):
        return jax.grad(lambda w: (matmul("bqd,df->bqf", x, w, None, names) * probe).sum())(w)

    with jax.set_mesh(mesh):
        names = "embed", "mlp"
        at = NamedSharding(mesh, spec(names))
        arguments = jax.device_put(x, NamedSharding(mesh, spec(("batch",)))), jax.device_put(w, at)
        compiled = (
            jax.jit(partial(gradient, names=names), out_shardings=at).lower(*arguments).compile()
        )
        result = compiled(*arguments)
    kinds = re.findall(r" (all-reduce|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert kinds == ["reduce-scatter", *["all-reduce"] * ("data" in axes)]
    np.testing.assert_allclose(result, gradient(x, w, None), atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "axes", "dtypes"),
    [
        ("bfloat16", {"data": 1}, ["bfloat16"] * 3),
        ("float32", {"data": 1}, ["bfloat16", "bfloat16", "float32"]),
        # Sums over rows of several devices are added up in float32.
        ("bfloat16", {"data": 8}, ["bfloat16", "bfloat16", "float32"]),
    ],
)
def test_on_a_gpu_a_product_is_written_as_it_is_rounded(weight, axes, dtypes, monkeypatch):
    """Forward, of the activations, and of the weight; others write float32 and round it."""

    def dtypes_on(where):
        monkeypatch.setattr(module, "platform", lambda: where)
        monkeypatch.setattr(cpu, "tuned", lambda dtype: False)
        x, w = jnp.ones((8, 2, 16), jnp.bfloat16), jnp.ones((16, 4), weight)

        def both(x, w):
            out, back = jax.vjp(lambda x, w: matmul("bqd,df->bqf", x, w), x, w)
            return back(out)

        with jax.set_mesh(make_mesh(axes, jax.devices()[: axes["data"]])):
            text = str(jax.make_jaxpr(both)(x, w))
        return re.findall(r"preferred_element_type=(\w+)", text)

    assert dtypes_on("gpu") == dtypes
    assert dtypes_on("tpu") == ["float32"] * 3
