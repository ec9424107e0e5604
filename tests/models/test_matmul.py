from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jrl.mesh import make_mesh
from jrl.models import cpu
from jrl.models import matmul as module
from jrl.models.matmul import divided, matmul


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
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))

    pairs = {}
    for side in (None, "inputs", "outputs"):
        product = partial(module._matmul, "bd,df->bf", dtype=None, divided=side)
        forward = jax.make_jaxpr(product)(x, w)
        back = partial(module.gradients, "bd,df->bf", divided=side)
        backward = jax.make_jaxpr(back)(x, w, jnp.ones((2, 4), jnp.bfloat16))
        pairs[side] = [str(j).count("preferred_element_type=bfloat16") for j in (forward, backward)]
    assert pairs == {None: [0, 0], "inputs": [1, 0], "outputs": [0, 1]}
    mesh = make_mesh({"tensor": 2, "fsdp": 4}, jax.devices()[:8])
    with jax.set_mesh(mesh):
        assert divided("inputs", "heads", 4) is None  # CPUs cannot
        monkeypatch.setattr(module, "platform", lambda: "tpu")
        assert divided("inputs", "heads", 4) == "inputs"
        assert divided("inputs", "heads", 3) is None
    assert divided("inputs", "heads", 4) is None
