"""Adapters on a frozen base: the same policy merged or not, and gradient to the adapters alone."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.hf.peft import load_adapters, save_adapters
from jrl.models.lora import TARGETS, Adapted, Lora, count_trained, with_adapters
from jrl.models.quant import Quantised, sampler
from jrl.models.transformer import transformer
from jrl.run.sampler_difference import rollout_difference
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.slots import prefill
from jrl.setup.adapters import plain_policy

SIZES = {
    **{"vocab_size": 48, "layers": 2, "embed_dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8},
    **{"mlp_dim": 48, "max_length": 64, "qk_norm": True},
}
CONFIG = ModelConfig(**SIZES)
SPARSE = {"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 16}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 7))
NETWORK = transformer(CONFIG)

CHANGES_BASE = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")


def noisy(network, seed=0):
    """Parameters whose adapters do something."""
    params = jax.jit(network.init)(jax.random.key(seed))
    trained, base = network.extras.split.split(params)
    leaves, treedef = jax.tree.flatten(trained)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    perturbed = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return network.extras.split.join(treedef.unflatten(perturbed), base)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(network, params):
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    hidden, _ = network.hidden(params, jnp.asarray(TOKENS), positions, jnp.ones_like(positions))
    return network.logits(params, hidden)


logits = functools.partial(logits_of, NETWORK)


@pytest.mark.parametrize("base", ["float", "int8"])
def test_merged_is_unmerged_and_off_is_the_base(base):
    """Merged within 2e-5 of logits of size 1; adapters that do nothing leave every bit."""
    lora = Lora(4, 8.0, base=base)
    network = with_adapters(NETWORK, CONFIG, lora)
    params = noisy(network)
    assert isinstance(params["layers"]["mlp"]["down"], Adapted)
    weight = params["layers"]["mlp"]["down"].base
    assert isinstance(weight, Quantised) == (base == "int8")
    out = logits(params)
    np.testing.assert_allclose(logits(plain_policy(params, network)), out, atol=2e-5)

    trained, below = network.extras.split.split(params)
    fresh = network.extras.split.join(network.extras.split.init(jax.random.key(1)), below)
    plain = logits(below)
    np.testing.assert_array_equal(logits(fresh), plain)
    assert np.abs(out - plain).max() > 0.05
    if base == "float":
        np.testing.assert_array_equal(plain, logits(jax.jit(NETWORK.init)(jax.random.key(0))))
    sizes = [x.size for x in jax.tree.leaves(trained)]
    assert sum(sizes) == count_trained(CONFIG, lora)


@pytest.mark.parametrize("base", [pytest.param("float", marks=pytest.mark.slow), "int8"])
def test_the_gradient_is_that_of_the_merged_weights(base):
    network = with_adapters(NETWORK, CONFIG, Lora(3, 6.0, ("q", "o", "up"), base))
    trained, below = network.extras.split.split(noisy(network))
    probe = np.random.default_rng(1).normal(size=(2, 7, 48)).astype(np.float32)

    @jax.jit
    def gradients(trained):
        through = lambda t, f: (logits(f(network.extras.split.join(t, below))) * probe).sum()  # noqa: E731
        separate = jax.grad(through)(trained, lambda params: params)
        return separate, jax.grad(through)(trained, lambda p: plain_policy(p, network))

    separate, merged = gradients(trained)
    assert set(separate["layers"]["attention"]) == {"q", "o"}
    assert set(separate["layers"]["mlp"]) == {"up"}
    for a, b in zip(jax.tree.leaves(separate), jax.tree.leaves(merged), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-5)


CASES = {
    "merged": ("float32", "float", "same", 1e-5),
    "apart": ("float32", "int8", "same", 1e-5),
    "apart bfloat16": ("bfloat16", "float", "same", 0.1),
    "apart on 16-bit weights": ("float32", "float", "same", 1e-5),
    "8 bits": ("float32", "float", "int8", 0.15),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c == "apart" else c for c in CASES]
)
def test_sampling_draws_from_the_policy_with_its_adapters(case):
    dtype, base, weights, most = CASES[case]
    stored = "bfloat16" if "16-bit" in case else "float32"
    config = ModelConfig(**{**SIZES, "dtype": dtype, "param_dtype": stored})
    network = with_adapters(transformer(config), config, Lora(4, 8.0, base=base))
    drawing = sampler(network, config, weights=weights, cache="same")
    params = noisy(network)
    prepared = jax.eval_shape(drawing.prepare, params)["layers"][0]["attention"]
    assert ("qkv" in prepared) == ("apart" not in case)
    if "apart" in case:
        assert isinstance(prepared["q"], Adapted)
    prompts = jnp.asarray(TOKENS, jnp.int32)
    draw = functools.partial(
        generate, network=drawing, group=3, max_new_tokens=8, stop_tokens=(), slots=0
    )
    args = (
        jax.random.key(2),
        params,
        prompts,
        jnp.array([7, 4]),
        make_sampling_params(),
        0,
        jnp.arange(2),
    )
    rollout, _ = jax.jit(draw)(*args)
    difference = jax.jit(functools.partial(rollout_difference, network=network))(
        params, rollout, make_sampling_params()
    )
    assert difference["max_difference"] < most
    assert (difference["max_difference"] > 1e-3) == (most > 1e-3)


def test_kernels_for_gpus_read_caches_beside_adapters_too():
    """A frozen base keeps query, key and value matrices separate; attention is the kernel's."""
    config = ModelConfig(**{**SIZES, "head_dim": 32, "dtype": "bfloat16"})
    prompts, step = jnp.asarray(TOKENS, jnp.int32), jnp.array([[7], [5]])
    states = []
    for attention in ("triton", "xla"):
        network = with_adapters(transformer(config, attention=attention), config, Lora(4, 8.0))
        weights = network.prepare(noisy(network))
        cache = prefill(weights, prompts, step[:, 0] + 1, network=network)
        advance = jax.jit(network.extend)
        live = jnp.ones_like(step, bool)
        state, _ = advance(weights, cache, step, step - 1, live)
        states.append(np.asarray(state, np.float32))
    error = np.linalg.norm(states[0] - states[1]) / np.linalg.norm(states[1])
    assert 0 < error < 0.02


def test_axes_are_shaped_like_the_parameters():
    for base in ("float", "int8"):
        network = with_adapters(NETWORK, CONFIG, Lora(4, base=base))
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        sizes = {"kv_heads": 2, "heads": 4, "embed": 32, "head_dim": 8, "mlp": 48, "vocab": 48}
        sizes |= {"layers": 2}

        def fits(names, x, sizes=sizes):
            assert len(names) == x.ndim
            for name, size in zip(names, x.shape, strict=True):
                assert name is None or sizes[name] == size

        jax.tree.map(fits, network.axes(), shapes, is_leaf=lambda x: isinstance(x, tuple))


# ---------------------------------------------------------------- files


@pytest.mark.extra("dev", "torch", "transformers")
def test_the_merged_export_is_the_policy_for_transformers(tmp_path):
    import torch
    import transformers

    network = with_adapters(NETWORK, CONFIG, Lora(4, 8.0))
    params = noisy(network)
    hf.save(tmp_path / "whole", CONFIG, jax.device_get(plain_policy(params, network)))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(params), theirs, atol=5e-5)


def test_the_adapter_files_hold_what_is_added_to_each_matrix(tmp_path):
    from safetensors.numpy import load_file, save_file

    lora = Lora(4, 8.0, ("q", "o", "down"))
    network = with_adapters(NETWORK, CONFIG, lora)
    params = noisy(network)
    trained, base = network.extras.split.split(params)
    save_adapters(tmp_path / "a", CONFIG, trained, lora=lora, base="somewhere")
    about = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (about["peft_type"], about["r"], about["lora_alpha"]) == ("LORA", 4, 8.0)
    assert about["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    pairs = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(pairs) == 2 * 3 * 2

    def checkpoint(name, tree):
        hf.save(tmp_path / name, CONFIG, jax.device_get(tree))
        return load_file(tmp_path / name / "model.safetensors")

    before, after = (
        checkpoint("base", base),
        checkpoint("merged", plain_policy(params, network)),
    )
    for name, matrix in before.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in pairs:
            a, b = (pairs[f"{prefix}.lora_{x}.weight"] for x in "AB")
            matrix = matrix + 8.0 / 4 * b @ a
        np.testing.assert_allclose(after[name], matrix, atol=1e-5)
    again = load_adapters(tmp_path / "a", CONFIG, lora=lora)
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(trained))
    with pytest.raises(UserError, match=r"lora.rank is 4 there, and must be 8"):
        load_adapters(tmp_path / "a", CONFIG, lora=lora._replace(rank=8))
    with pytest.raises(UserError, match=r"'.*k_proj.lora_A.weight' is missing"):
        load_adapters(tmp_path / "a", CONFIG, lora=lora._replace(targets=("q", "k", "o", "down")))
    other = ModelConfig(**{**SIZES, "mlp_dim": 64})
    with pytest.raises(UserError, match=r"mlp.down has .* belongs to another model"):
        load_adapters(tmp_path / "a", other, lora=lora)
    with pytest.raises(UserError, match="cannot be read as adapters"):
        load_adapters(tmp_path, CONFIG, lora=lora)
    with pytest.raises(UserError, match="exists and is not empty"):
        save_adapters(tmp_path / "a", CONFIG, trained, lora=lora)
    about = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for key, value, message in (
        *(("init_lora_weights", x, "changes the model's own weights") for x in CHANGES_BASE),
        ("alora_invocation_tokens", [1], r"alora_invocation_tokens is \[1\] there"),
    ):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(about | {key: value}))
        with pytest.raises(UserError, match=message):
            load_adapters(tmp_path / "a", CONFIG, lora=lora)
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        load_adapters(tmp_path / "a", CONFIG, lora=lora)
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(about))
    one = next(name for name in sorted(pairs) if "layers.1." in name)
    for value, message in (
        (pairs[one] * np.nan, f"tensor '{one}' of .* holds numbers that are not finite"),
        (pairs[one][:, :1], "belongs to another model"),
    ):
        (tmp_path / "odd").mkdir(exist_ok=True)
        save_file(
            pairs | {one: np.ascontiguousarray(value)},
            tmp_path / "odd" / "adapter_model.safetensors",
        )
        (tmp_path / "odd" / "adapter_config.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match=message):
            load_adapters(tmp_path / "odd", CONFIG, lora=lora)
    for start in (False, "gaussian", "eva", "orthogonal"):
        changed = about | {"init_lora_weights": start}
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(changed))
        load_adapters(tmp_path / "a", CONFIG, lora=lora)


@pytest.mark.filterwarnings("ignore")  # what the two libraries think of each other's releases
@pytest.mark.parametrize(
    ("targets", "changes"),
    [
        pytest.param(TARGETS, {}, id="every projection"),
        pytest.param(("q", "o", "down"), {}, id="some"),
        pytest.param(("q", "k", "v", "o"), SPARSE, id="experts"),
    ],
)
def test_peft_loads_the_adapters_onto_their_checkpoint(targets, changes, tmp_path):
    """Logits of the PEFT library, kept apart and merged, within 2e-5 of ours; and its own files."""
    import peft
    import torch
    import transformers

    config, lora = ModelConfig(**{**SIZES, **changes}), Lora(4, 8.0, targets)
    plain = transformer(config)
    params = noisy(with_adapters(plain, config, lora))
    trained, base = with_adapters(plain, config, lora).extras.split.split(params)
    hf.save(tmp_path / "base", config, jax.device_get(base))
    save_adapters(tmp_path / "a", config, trained, lora=lora, base=str(tmp_path / "base"))

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "base", attn_implementation="eager", dtype=torch.float32)

    def theirs(model):
        with torch.no_grad():
            return model(torch.tensor(TOKENS)).logits.numpy()

    def ours(params):
        return logits_of(plain, params)

    off = theirs(model)
    np.testing.assert_allclose(off, ours(base), atol=2e-5)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "a")
    np.testing.assert_allclose(theirs(adapted), ours(params), atol=2e-5)
    assert np.abs(theirs(adapted) - off).max() > 0.05

    adapted.save_pretrained(tmp_path / "again")
    again = load_adapters(tmp_path / "again", config, lora=lora)
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(trained))
    np.testing.assert_allclose(theirs(adapted.merge_and_unload()), ours(params), atol=2e-5)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("lora", "changes", "message"),
    [
        (Lora(0), {}, "lora.rank = 0; must be at least 1"),
        (Lora(2, 0.0), {}, "lora.alpha = 0.0; must be above 0"),
        (Lora(2, targets=("q", "gat")), {}, "lora.targets = 'gat'; did you mean 'gate'?"),
        (Lora(2, targets=()), {}, "name one or more of q, k"),
        (Lora(2, targets=("head",)), {}, "'head': the products with the vocabulary"),
        (Lora(2, base="int4"), {}, "lora.base = 'int4'; did you mean 'int8'?"),
        (Lora(2), SPARSE, "lora.targets has down, gate, up: .*4 routed experts"),
        (Lora(2, targets=("q",), base="int8"), SPARSE, "lora.base = 'int8': .*4 routed experts"),
    ],
)
def test_what_cannot_be_is_said(lora, changes, message):
    config = ModelConfig(**{**SIZES, **changes})
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        with_adapters(transformer(config), config, lora)


def test_attention_of_a_sparse_model_may_have_adapters():
    config = ModelConfig(**{**SIZES, **SPARSE})
    network = with_adapters(transformer(config), config, Lora(2, targets=TARGETS[:4]))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert isinstance(shapes["layers"]["attention"]["o"], Adapted)
    assert not isinstance(shapes["layers"]["experts"]["up"], Adapted)
