import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.cpu import (
    FEW,
    REORDERED,
    VERY_FEW,
    WeightFirst,
    _large,
    by_eigen,
    gradient_einsum,
    tuned,
)
from jrl.models.matmul import gradients, matmul
from jrl.models.quant import quantise

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="chooses on CPUs alone")

LARGE = (4, 64, 256), (256, 4, 64)  # 256 x 256 by 256 x 256


def operands(x_shape, w_shape, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, (x_shape, w_shape), strict=True)]


def exact(spec, x, w):
    return np.einsum(spec, np.asarray(x, np.float64), np.asarray(w, np.float64))


@pytest.mark.parametrize(
    ("spec", "x_shape", "w_shape"),
    [
        ("abd,dhk->abhk", *LARGE),
        ("abd,hkd->abhk", (4, 64, 256), (4, 64, 256)),
        ("abhk,hkd->abd", (4, 64, 4, 64), (4, 64, 256)),
        ("abhk,dhk->abd", (4, 64, 4, 64), (256, 4, 64)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_products_are_the_exact_ones(spec, x_shape, w_shape, dtype):
    x, w = operands(x_shape, w_shape, dtype)
    product = _large(spec, x, w)
    assert product is not None
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, exact(spec, x, w), atol=2e-4)


@pytest.mark.parametrize(
    ("spec", "x_shape", "w_shape", "dtype"),
    [
        ("abd,dhk->abhk", (4, 64, 64), (64, 4, 64), jnp.float32),  # small
        ("abd,dhk->abhk", (4, 16, 1024), (1024, 16, 64), jnp.float32),  # few rows
        ("abd,dhk->ahbk", *LARGE, jnp.float32),  # not rows before columns
        ("abd,bdk->abk", (4, 64, 256), (64, 256, 256), jnp.float32),  # a batch of matrices
        ("dab,dhk->abhk", (256, 4, 64), (256, 4, 64), jnp.float32),  # summed axis first
    ],
)
def test_other_products_are_left_alone(spec, x_shape, w_shape, dtype):
    assert _large(spec, *operands(x_shape, w_shape, dtype)) is None


def test_so_are_other_numbers():
    assert [tuned(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)] == [True] * 3
    assert [tuned(x) for x in (jnp.float64, jnp.int8, jnp.int32)] == [False] * 3


def test_a_large_product_has_the_derivatives_of_einsum():
    spec = "abd,dhk->abhk"
    x, w = operands(*LARGE)
    probe = jax.random.normal(jax.random.key(1), (4, 64, 4, 64))
    dx, dw = jax.grad(lambda x, w: (matmul(spec, x, w) * probe).sum(), (0, 1))(x, w)
    np.testing.assert_allclose(dx, exact("abhk,dhk->abd", probe, w), atol=2e-4)
    np.testing.assert_allclose(dw, exact("abd,abhk->dhk", x, probe), atol=2e-4)


def test_it_compiles_to_one_product_of_another_library():
    x, w = operands((256, 256), (256, 256))
    program = jax.jit(by_eigen).lower(x, w).compile().as_text()
    assert " dot(" in program
    assert "convolution(" not in program
    assert "fusion" not in program


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_many_at_once_are_each_alone(axes):
    shapes = [(3, 8, 16) if axes[0] == 0 else (8, 16), (3, 16, 4) if axes[1] == 0 else (16, 4)]
    x, w = operands(*shapes)
    program = jax.jit(jax.vmap(by_eigen, axes))
    assert "feature_group_count" not in program.lower(x, w).as_text()
    np.testing.assert_allclose(program(x, w), np.matmul(x, w), atol=1e-5)


def times(x, w):
    return WeightFirst.of(w, 2).times("bqhk,hkd->bqd", x, jnp.float32)


@pytest.mark.parametrize("rows", [1, 2, 5, VERY_FEW, VERY_FEW + 1, FEW, FEW + 1])
@pytest.mark.parametrize(("heads", "atol"), [(4, 1e-5), (64, 1e-4)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_transposed_weight_multiplies_as_it_is(rows, heads, atol, dtype):
    x, w = operands((rows, 1, heads, 8), (heads, 8, 32 * heads // 4), dtype)
    product, full = jax.jit(times)(x, w), exact("bqhk,hkd->bqd", x, w)
    np.testing.assert_allclose(product, full, atol=atol)


@pytest.mark.parametrize("rows", [2, 5, VERY_FEW, VERY_FEW + 1])
def test_very_few_rows_are_left_to_the_compiler(rows):
    program = jax.jit(times).lower(*operands((rows, 1, 64, 8), (64, 8, 512))).as_text()
    assert ("dot_general" in program) == (rows <= VERY_FEW)
    assert ("convolution" in program) == (rows > VERY_FEW)


def test_a_transposed_weight_is_rounded_as_it_is():
    _, w = operands((1,), (4, 8, 32))
    ours = WeightFirst.of(w, 2).in_8_bits(2, quantise)
    full = quantise(w, 2)
    np.testing.assert_array_equal(ours.values, full.values)
    np.testing.assert_array_equal(ours.scales, full.scales)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        (
            "btf,btd->fd",
            (2, 64, 2100),
            (2, 64, 30),
        ),  # a sum over tokens, the smaller transposed
        ("btd,btf->df", (2, 64, 30), (2, 64, 2100)),
        ("nkpd,nkqp->nkqd", (2, 3, 40, 8), (2, 3, 1200, 40)),
        ("nkqp,nkqd->nkpd", (2, 3, 1200, 40), (2, 3, 1200, 8)),
        ("btd,btsv->svd", (2, 64, 16), (2, 64, 1, 2100)),
        ("btd,btsv->svd", (2, 32, 16), (2, 32, 1, 4200)),  # very wide: the other way round
        ("bqd,bqf->df", (2, 32, 16), (2, 32, 4200)),
        ("bqhk,bqd->hkd", (2, 64, 3, 700), (2, 64, 30)),
        ("bqd,bqhk->dhk", (2, 64, 30), (2, 64, 3, 700)),
    ],
)
def test_the_order_of_operands_changes_no_number(spec, a, b):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in (a, b))
    assert max(a.size, b.size) >= REORDERED
    expected = np.einsum(spec, a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(gradient_einsum(spec, a, b), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("bqd,bqf->df", (4, 256, 64), (4, 256, 320)),
        ("btd,btsv->svd", (4, 64, 16), (4, 64, 1, 4200)),
    ],
)
def test_a_sum_over_rows_copies_no_operand(spec, a, b, dtype):
    shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in (a, b))
    compiled = jax.jit(functools.partial(gradient_einsum, spec)).lower(*shapes).compile()
    assert compiled.out_info.dtype == jnp.float32
    assert "transpose(" not in compiled.as_text()


def test_the_gradient_of_activations_copies_no_weight():
    shape = jax.ShapeDtypeStruct
    x, w, g = (shape(s, jnp.float32) for s in ((4, 256, 64), (64, 320), (4, 256, 320)))
    compiled = jax.jit(lambda *args: gradients("bqd,df->bqf", *args)[0]).lower(x, w, g).compile()
    text = compiled.as_text()
    assert "dot(" in text
    assert "transpose(" not in text
    assert " copy(" not in text
