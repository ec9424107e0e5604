"""Weights, keys and values in 8 bits: errors within bounds, and the distribution drawn from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import cpu
from jrl.models.config import ModelConfig
from jrl.models.matmul import project
from jrl.models.quant import (
    INPUTS,
    Quantised,
    axes_in_8_bits,
    dequantise,
    in_8_bits,
    layer_axes,
    quantise,
    quantise_entries,
    quantise_layers,
    sampler,
)
from jrl.models.transformer import transformer
from jrl.run.sampler_difference import rollout_difference
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params

CONFIG = ModelConfig(
    vocab_size=48,
    layers=2,
    embed_dim=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_length=64,
    qk_norm=True,
    tied_embeddings=False,
)
SPECS = {
    "bqd,dhk->bhqk": ((2, 3, 8), (8, 4, 5), 1),
    "bqd,dhk->bqhk": ((2, 3, 8), (8, 4, 5), 1),
    "bqhk,hkd->bqd": ((2, 3, 4, 5), (4, 5, 8), 2),
    "bqf,fd->bqd": ((2, 3, 6), (6, 8), 1),
}


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_number_is_off_by_half_a_scale_at_most(kind):
    w = np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32)
    w[1, :, 2] = 0.0
    w[2, 3, 4] = 100.0
    turned = quantise(w if kind == "host" else jnp.asarray(w), 1, 1)
    assert isinstance(turned.values, np.ndarray) == (kind == "host")
    assert turned.values.dtype == np.int8
    assert turned.scales.shape == (3, 1, 5)
    full = np.asarray(turned.values, np.float64) * np.asarray(turned.scales, np.float64)
    assert (np.abs(full - w) <= 0.5 * np.asarray(turned.scales) * (1 + 1e-5)).all()
    np.testing.assert_array_equal(full[1, :, 2], 0)
    assert np.abs(np.asarray(turned.values)).max() == 127
    np.testing.assert_allclose(np.asarray(turned.scales)[2, 0, 4], 100 / 127, rtol=1e-6)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_number_in_float8_has_four_significant_bits_and_small_ones_steps_of_a_scale(kind):
    """Half of a last place: at most 1/16 of the number, or of the steps of subnormal numbers."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(3, 7, 5)) * 2.0 ** rng.integers(-12, 1, (3, 7, 5))).astype(np.float32)
    w[1, :, 2] = 0.0
    w[2, 3, 4] = 100.0
    turned = quantise(w if kind == "host" else jnp.asarray(w), 1, 1, to="float8")
    assert isinstance(turned.values, np.ndarray) == (kind == "host")
    assert turned.values.dtype == jnp.float8_e4m3fn
    values, scales = (np.asarray(x, np.float64) for x in (turned.values, turned.scales))
    assert scales.shape == (3, 1, 5)
    bound = np.maximum(np.abs(w) / 16, scales * 2**-10)
    assert (np.abs(values * scales - w) <= bound * (1 + 1e-5)).all()
    assert (np.abs(values[(np.abs(w) < scales * 2**-6)]) <= 2**-6).all()
    np.testing.assert_array_equal(values[1, :, 2], 0)
    assert np.abs(values).max(1)[scales[:, 0] != 1].min() == 448  # and no NaN from beyond it
    np.testing.assert_allclose(scales[2, 0, 4], 100 / 448, rtol=1e-6)


def test_int8_is_the_more_exact_of_the_two_unless_a_channel_has_large_outliers():
    """As the description of ``sampling.float8`` says."""
    w = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
    outliers = w.copy()
    outliers[0] *= 50

    def error(w, to):
        return np.sqrt(np.square(quantise(w, 1, to=to).whole() - w)[1:].mean())

    assert error(w, "int8") < 0.5 * error(w, "float8")
    assert error(outliers, "float8") < 0.5 * error(outliers, "int8")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("dtype", "bound", "kind"),
    [("float32", 2e-6, "int8"), ("bfloat16", 1e-2, "int8"), ("bfloat16", 1e-2, "float8")],
)
def test_a_product_is_that_of_the_floats_it_stands_for(spec, dtype, bound, kind):
    """Against float64; the gradient goes to the activations, and that of the integers is none."""
    shape, w_shape, inputs = SPECS[spec]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    w = quantise(jnp.asarray(rng.normal(size=w_shape), jnp.float32), inputs, to=kind)
    full = np.asarray(w.values, np.float64) * np.asarray(w.scales, np.float64)
    out = project(spec, x, w)
    assert out.dtype == x.dtype
    exact = np.einsum(spec, np.asarray(x, np.float64), full)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=bound * np.abs(exact).max())
    assert project(spec, x, w, jnp.float32).dtype == jnp.float32

    probe = rng.normal(size=out.shape).astype(np.float32)
    loss = lambda x: (project(spec, x, w, jnp.float32) * probe).sum()  # noqa: E731
    back = jax.grad(loss)(x)
    operands, result = spec.split("->")
    left, right = operands.split(",")
    exact = np.einsum(f"{result},{right}->{left}", probe.astype(np.float64), full)
    assert back.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(back, np.float64), exact, atol=bound * np.abs(exact).max()
    )


def test_no_product_holds_a_float_copy_of_the_stack():
    """What a scan over layers sets aside does not grow with the layers."""

    def through(layers, x):
        return jax.lax.scan(lambda x, w: (project("bd,de->be", x, w), None), x, layers)[0]

    sizes = {}
    for n in (4, 16):
        stack = Quantised(jnp.zeros((n, 64, 64), jnp.int8), jnp.ones((n, 1, 64), jnp.float32))
        compiled = jax.jit(through).lower(stack, jnp.zeros((2, 64))).compile()
        sizes[n] = compiled.memory_analysis().temp_size_in_bytes
    assert sizes[16] < sizes[4] + 4 * 64 * 64 * 4


def test_layers_on_the_host_and_on_the_device_are_the_same_and_have_axes():
    params = transformer(CONFIG).init(jax.random.key(0))
    turned = jax.jit(functools.partial(quantise_layers, config=CONFIG))(params)
    on_host = quantise_layers(jax.device_get(params), CONFIG)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6, atol=1),
        turned,
        on_host,
    )
    attention = turned["layers"]["attention"]
    assert isinstance(attention["o"], Quantised)
    assert attention["o"].scales.shape == (2, 1, 1, 32)
    assert attention["q_norm"].dtype == turned["embed"].dtype == jnp.float32
    axes = layer_axes(CONFIG, transformer(CONFIG).axes())
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    jax.tree.map(
        lambda names, x: pytest.fail(f"{names}") if len(names) != x.ndim else None,
        axes,
        turned,
        is_leaf=is_axes,
    )
    assert axes["layers"]["attention"]["o"].scales == ("layers", None, None, "embed")
    small = sum(x.nbytes for x in jax.tree.leaves(turned["layers"]))
    assert small < 0.3 * sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    full = dequantise(turned, "float32")
    worst = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), full, params)
    assert 0 < max(jax.tree.leaves(worst)) < 0.01


# ---------------------------------------------------------------- keys and values


def test_an_entry_has_a_scale_of_its_own():
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    x[0, 0, 0] *= 1000
    values, scales = quantise_entries(jnp.asarray(x))
    assert values.dtype == jnp.int8
    assert scales.shape == (2, 3, 4, 1)
    error = np.abs(np.asarray(values, np.float64) * np.asarray(scales, np.float64) - x)
    assert (error <= np.abs(x).max(-1, keepdims=True) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("case", "kind"), [("weights", "int8"), ("weights", "float8"), ("cache", "int8")]
)
def test_decoding_in_8_bits_is_near_full_scoring_and_says_which_distribution_it_drew_from(
    case, kind
):
    """Within 0.1 nats of the policy (float8: 0.5), and with rounded weights 1e-5 of their own."""
    network = transformer(CONFIG)
    params = network.init(jax.random.key(0))
    chosen = {"weights": "same", "cache": "same"} | {case: kind}
    drawing = sampler(network, CONFIG, **chosen)
    prompts = jax.random.randint(jax.random.key(1), (3, 6), 0, 48)
    lengths = jnp.array([6, 3, 4], jnp.int32)
    draw = functools.partial(
        generate, network=drawing, group=4, max_new_tokens=16, stop_tokens=(), slots=6
    )
    args = (
        jax.random.key(2),
        params,
        prompts,
        lengths,
        make_sampling_params(),
        jnp.int32(0),
        jnp.arange(3),
    )
    rollout, _ = jax.jit(draw)(*args)
    score = jax.jit(functools.partial(rollout_difference, network=network))
    difference = score(params, rollout, make_sampling_params())
    assert difference["tokens"] == 3 * 4 * 16
    assert 1e-4 < difference["max_difference"] < (0.5 if kind == "float8" else 0.1)
    assert 1e-7 < difference["kl"] < (1e-2 if kind == "float8" else 1e-3)
    if case == "weights":
        prepared = jax.eval_shape(drawing.prepare, params)
        assert isinstance(prepared["head"], Quantised)
        assert isinstance(prepared["layers"][0]["attention"]["qkv"], Quantised)
        rounded = dequantise(quantise_layers(params, CONFIG, kind), "float32")
        rounded = rounded | {"head": quantise(params["head"], 1, to=kind).whole()}
        assert score(rounded, rollout, make_sampling_params())["max_difference"] < 1e-5


def test_an_int8_cache_takes_a_quarter_of_the_room():
    network = transformer(CONFIG)
    short = sampler(network, CONFIG, weights="same", cache="int8")

    def size(network):
        cache = jax.eval_shape(lambda: network.init_cache(4, 32))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

    h = CONFIG.head_dim
    assert size(short) == size(network) * (h + 4) // (4 * h)


def test_routed_experts_are_refused():
    config = ModelConfig(
        **{f: getattr(CONFIG, f) for f in ("vocab_size", "layers", "embed_dim", "heads")},
        **{f: getattr(CONFIG, f) for f in ("kv_heads", "head_dim", "mlp_dim", "max_length")},
        experts=4,
        experts_per_token=2,
        expert_mlp_dim=16,
    )
    network = transformer(config)
    for kind in ("int8", "float8"):
        with pytest.raises(UserError, match=rf"sampling.{kind} = 'weights'.*4 routed experts"):
            sampler(network, config, weights=kind, cache="same")
    assert sampler(network, config, weights="same", cache="int8") is not network


@pytest.mark.parametrize(
    ("tied", "kind"),
    [
        (True, "int8"),
        pytest.param(False, "int8", marks=pytest.mark.slow),
        pytest.param(True, "float8", marks=pytest.mark.slow),
    ],
)
def test_weights_rounded_before_they_are_joined_are_those_rounded_after(tied, kind, monkeypatch):
    """Channels have scales of their own, so that joining them changes none."""
    monkeypatch.setattr(cpu, "tuned", lambda dtype: False)  # plain matrices, as on a TPU
    config = dataclasses.replace(CONFIG, tied_embeddings=tied, dtype="bfloat16")
    network = transformer(config)
    params = network.init(jax.random.key(0))
    short = jax.jit(sampler(network, config, weights=kind, cache="same").prepare)

    @jax.jit
    def after(params):
        prepared = network.prepare(params)
        matrices = [layer["attention"] | layer["mlp"] for layer in prepared["layers"]]
        layers = [
            {
                name: quantise(w, INPUTS[name], to=kind)
                for name, w in layer.items()
                if name in INPUTS
            }
            for layer in matrices
        ]
        return layers, quantise(prepared["head"], 1, to=kind)

    layers, head = after(params)
    rounded = jax.jit(functools.partial(in_8_bits, config=config, to=kind))(params)
    for weights in (short(params), short(rounded)):
        jax.tree.map(np.testing.assert_array_equal, weights["head"], head)
        for layer, expected in zip(weights["layers"], layers, strict=True):
            layer_weights = layer["attention"] | layer["mlp"]
            for name, matrix in expected.items():
                jax.tree.map(np.testing.assert_array_equal, layer_weights[name], matrix)
    names = axes_in_8_bits(config, network.axes())
    ranks = jax.tree.map(len, names, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(lambda x: x.ndim, rounded)
