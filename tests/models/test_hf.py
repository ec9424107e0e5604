"""Checkpoints against transformers, the implementation that wrote them."""

import dataclasses
import functools
import json
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs_extra import require

from jrl.errors import UserError
from jrl.models import hf
from jrl.models.hf.parse import parse
from jrl.models.transformer import transformer

require("dev", "torch", "transformers")
import torch  # noqa: E402

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
MOE = {
    **{"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2},
}
GEMMA = {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 24}
CASES = {
    "llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama_linear_biases": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
            **{"attention_bias": True, "mlp_bias": True, "head_dim": 12},
            **{"tie_word_embeddings": True, "num_key_value_heads": 1},
        },
    ),
    "smollm": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            **{"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
            **{"use_sliding_window": True, "sliding_window": 5},
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "Qwen2ForCausalLM",
        {
            **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_windows": (
        "Qwen3ForCausalLM",
        {
            **{"head_dim": 8, "attention_bias": True, "use_sliding_window": True},
            **{"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        {
            **{**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "attention_bias": True},
            **{"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True},
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5, "head_dim": 10}),
    "mistral_full": ("MistralForCausalLM", {"sliding_window": None}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **{**GEMMA, "num_hidden_layers": 3, "attention_bias": True},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        },
    ),
    "gemma2_uncapped": (
        "Gemma2ForCausalLM",
        {
            **{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **{**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3_capped": (
        "Gemma3ForCausalLM",
        {
            **{**GEMMA, "num_hidden_layers": 6, "attn_logit_softcapping": 2.0},
            **{"final_logit_softcapping": 1.5, "attention_bias": True},
        },
    ),
}


def write_reference(directory, architecture, changes, dtype=None, **save_options):
    """A random checkpoint of transformers, with every norm and bias away from its start."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = model_class.config_class(**{**SHAPE, **changes})
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        with torch.no_grad():
            for name, value in model.named_parameters():
                scale = 0.5 if value.ndim == 1 else 0.15
                value += scale * torch.randn_like(value)
                assert "norm" not in name or value.ndim == 1
        if dtype is not None:
            model = model.to(dtype)
        model.save_pretrained(directory, **save_options)
    return model


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.float().numpy()


def reference_greedy(model, tokens, steps):
    tokens = torch.tensor(np.asarray(tokens), dtype=torch.long)
    with torch.no_grad():
        for _ in range(steps):
            last = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, last], dim=1)
    return tokens[:, -steps:].numpy()


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, params, tokens):
    network = transformer(config)
    b, l = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(l), (b, l))
    hidden, _ = network.hidden(params, tokens, positions, jnp.ones_like(positions))
    return network.logits(params, hidden)


@functools.partial(jax.jit, static_argnums=(0, 3))
def our_greedy(config, params, tokens, steps):
    network = transformer(config)
    b, p = tokens.shape
    params = network.prepare(params)
    cache = network.init_cache(b, p + steps, params)
    positions = jnp.broadcast_to(jnp.arange(p), (b, p))
    hidden, cache = network.extend(params, cache, tokens, positions, jnp.ones((b, p), bool))

    def step(carry, at):
        hidden, cache = carry
        token = network.logits(params, hidden).argmax(-1)[:, None]
        where = jnp.full((b, 1), at)
        hidden, cache = network.extend(params, cache, token, where, jnp.ones((b, 1), bool))
        return (hidden[:, -1], cache), token[:, 0]

    _, tokens = jax.lax.scan(step, (hidden[:, -1], cache), p + jnp.arange(steps))
    return tokens.T


def assert_same_tree(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("case", CASES)
def test_logits_greedy_and_round_trip_equal_the_reference(case, tmp_path):
    architecture, changes = CASES[case]
    model = write_reference(tmp_path / "source", architecture, changes)
    config, params = hf.load(tmp_path / "source")
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (2, 24))
    expected = reference_logits(model, tokens)
    got = np.asarray(our_logits(config, params, jnp.asarray(tokens)))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    greedy = our_greedy(config, params, jnp.asarray(tokens[:, :9]), 32)
    np.testing.assert_array_equal(greedy, reference_greedy(model, tokens[:, :9], 32))

    hf.save(tmp_path / "export", config, params, source_dir=tmp_path / "source")
    again, restored = hf.load(tmp_path / "export")
    assert again == config
    assert_same_tree(restored, params)
    # Without the source's config.json everything must come from ours.
    hf.save(tmp_path / "bare", config, params)
    assert hf.load(tmp_path / "bare")[0] == config
    for export in ("export", "bare"):
        loaded = type(model).from_pretrained(tmp_path / export, attn_implementation="eager")
        np.testing.assert_array_equal(reference_logits(loaded.eval(), tokens), expected)


def test_attention_weights_equal_the_reference(tmp_path):
    architecture, changes = CASES["gemma3_capped"]
    model = write_reference(tmp_path, architecture, changes)
    config, params = hf.load(tmp_path)
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (2, 24))
    with torch.no_grad():
        attentions = model(torch.tensor(tokens), output_attentions=True).attentions
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    attention = jax.jit(transformer(config).extras.views.attention)
    got = attention(params, jnp.asarray(tokens), positions, jnp.ones_like(positions))
    first, last = config.layers // 3, 2 * config.layers // 3  # five layers, or as many as there are
    chosen = sorted({round(first + part * (last - first) / 4) for part in range(5)})
    assert chosen[0] == first
    assert chosen[-1] == last
    expected = np.concatenate([attentions[i].numpy() for i in chosen], axis=1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama checkpoint nobody changes; ``checkpoint`` gives a changeable one."""
    directory = tmp_path_factory.mktemp("llama")
    write_reference(directory, "LlamaForCausalLM", {"head_dim": 12})
    return directory


@pytest.fixture
def checkpoint(llama, tmp_path):
    return pathlib.Path(shutil.copytree(llama, tmp_path / "checkpoint"))


def edit_config(directory, drop=(), **changes):
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in drop}))


def edit_tensors(directory, edit):
    from safetensors.numpy import load_file, save_file

    values = load_file(directory / "model.safetensors")
    edit(values)
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})


def test_sharded_bfloat16_both_ways(tmp_path):
    model = write_reference(
        tmp_path / "source",
        "Qwen3ForCausalLM",
        {"head_dim": 8, "tie_word_embeddings": True},
        dtype=torch.bfloat16,
        max_shard_size="6KB",
    )
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    config, params = hf.load(tmp_path / "source")
    assert config.dtype == config.param_dtype == "bfloat16"
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    gate = model.model.layers[1].mlp.gate_proj.weight.float().detach().numpy()
    np.testing.assert_array_equal(params["layers"]["mlp"]["gate"][1].astype(np.float32), gate.T)

    hf.save(tmp_path / "export", config, params, shard_bytes=6_000)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 2
    again, restored = hf.load(tmp_path / "export")
    assert again == config
    assert_same_tree(restored, params)
    loaded = type(model).from_pretrained(tmp_path / "export")
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)

    wide, converted = hf.load(tmp_path / "source", dtype="float32")
    assert wide.dtype == wide.param_dtype == "float32"
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), converted, params
    )


def test_bfloat16_logits_are_close_to_float32(tmp_path):
    write_reference(tmp_path, "Qwen3ForCausalLM", {"head_dim": 8})
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 12)))
    wide, narrow = (
        our_logits(*hf.load(tmp_path, dtype=d), tokens) for d in ("float32", "bfloat16")
    )
    assert narrow.dtype == jnp.float32
    error = np.abs(np.asarray(wide - narrow)).max()
    assert 0 < error < 0.1 * np.abs(np.asarray(wide)).max()


def test_checkpoint_saved_from_jax_arrays_of_random_weights(tmp_path):
    import transformers

    from jrl.models.config import ModelConfig

    config = ModelConfig(
        vocab_size=31,
        layers=2,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=24,
        max_length=32,
        qk_norm=True,
    )
    params = transformer(config).init(jax.random.key(0))
    hf.save(tmp_path / "export", config, params)
    again, restored = hf.load(tmp_path / "export")
    assert again == dataclasses.replace(config, family="qwen3")
    assert_same_tree(restored, jax.tree.map(np.asarray, params))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    tokens = jnp.arange(31)[None] % 31
    np.testing.assert_allclose(
        our_logits(config, params, tokens), reference_logits(model, tokens), atol=1e-4
    )


@pytest.mark.parametrize(
    ("case", "older"),
    [
        ("llama3", {"rope_theta": 100.0, "rope_scaling": {**LLAMA3, "rope_theta": None}}),
        (
            "llama_linear_biases",
            {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        (
            "gemma3",
            {
                **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ("qwen2_windows", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("smollm3", {"rope_theta": 2e6}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0}),
    ],
)
def test_config_of_older_releases_means_the_same(case, older, tmp_path):
    write_reference(tmp_path, *CASES[case])
    expected = hf.read_config(tmp_path)
    rope = older.get("rope_scaling") or {}
    if "rope_theta" in rope:
        older["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    edit_config(tmp_path, drop=("rope_parameters", "layer_types", "no_rope_layers"), **older)
    assert hf.read_config(tmp_path) == expected


def test_a_window_is_left_out_by_the_key_of_the_families_that_have_it():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    sizes |= {"intermediate_size": 8, "sliding_window": 4, "use_sliding_window": False}
    sizes |= {"max_position_embeddings": 64, "num_key_value_heads": 2}
    windows = {name: parse({**sizes, "model_type": name}).window for name in ("mistral", "qwen2")}
    assert windows == {"mistral": 4, "qwen2": None}


def test_export_keeps_unknown_keys_and_tokenizer_files(checkpoint, tmp_path):
    edit_config(checkpoint, eos_token_id=7, initializer_range=0.123, our_own_note="kept")
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    config, params = hf.load(checkpoint)
    hf.save(tmp_path / "export", config, params, source_dir=checkpoint)
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["initializer_range"]) == (7, 0.123)
    assert raw["our_own_note"] == "kept"
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    # Again over itself: replaced whole, and the companions are not lost.
    hf.save(checkpoint, config, params, source_dir=checkpoint)
    assert (checkpoint / "tokenizer.json").exists()
    for place in (checkpoint, tmp_path / "export"):
        assert (place / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert_same_tree(hf.load(checkpoint)[1], params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "export"]


@pytest.mark.parametrize(
    ("eos", "stop_ids", "exported_eos"),
    [(7, (7, 9), [7, 9]), ([9, 7], (7, 9), [9, 7]), (None, (7,), 7), (7, (), 7)],
)
def test_an_export_names_every_token_that_ends_a_completion(
    eos, stop_ids, exported_eos, checkpoint, tmp_path
):
    generation = {"temperature": 0.6} | ({} if eos is None else {"eos_token_id": eos})
    (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    config, params = hf.load(checkpoint)
    hf.save(tmp_path / "export", config, params, source_dir=checkpoint, stop_ids=stop_ids)
    exported = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert exported == {"temperature": 0.6, "eos_token_id": exported_eos}


def test_save_refuses_what_is_not_a_checkpoint_or_not_this_model(checkpoint, tmp_path):
    config, params = hf.load(checkpoint)
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="not a checkpoint"):
        hf.save(other, config, params)
    with pytest.raises(UserError, match=r"missing 'head'"):
        hf.save(tmp_path / "x", config, {k: v for k, v in params.items() if k != "head"})
    with pytest.raises(UserError, match=r"unexpected 'adapter'"):
        hf.save(tmp_path / "x", config, params | {"adapter": params["embed"]})
    with pytest.raises(UserError, match=r"embed has shape \(60, 32\), expected \(61, 32\)"):
        hf.save(tmp_path / "x", config, params | {"embed": params["embed"][1:]})
    changed = dataclasses.replace(config, qk_norm=True)
    params["layers"]["attention"] |= {n: np.ones((2, 12), np.float32) for n in ("q_norm", "k_norm")}
    with pytest.raises(UserError, match=r"'llama' cannot express model.config.qk_norm = True"):
        hf.save(tmp_path / "x", changed, params)
    assert not (tmp_path / "x").exists()
    hf.save(tmp_path / "x", dataclasses.replace(changed, family="auto"), params)
    assert hf.read_config(tmp_path / "x").family == "qwen3"
    params["layers"]["mlp"] |= {f"{n}_bias": np.ones((2, 40), np.float32) for n in ("gate", "up")}
    params["layers"]["mlp"]["down_bias"] = np.ones((2, 32), np.float32)
    impossible = dataclasses.replace(changed, family="auto", mlp_bias=True)
    with pytest.raises(UserError, match=r"no Hugging Face architecture.*model\.\w+"):
        hf.save(tmp_path / "y", impossible, params)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel.*LlamaFor"),
        ({"architectures": None, "model_type": "phi3"}, "model_type = 'phi3'.*gemma3_text"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2' does not belong"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3.*num_attention_heads = 4"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"rope_scaling.type = 'yarn' is not supported; choose from default, linear, llama3",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_parameters.rope_type = 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters.factor = None"),
    ],
)
def test_config_errors_name_key_and_directory(checkpoint, changes, message):
    (checkpoint / "model.safetensors").unlink()  # found before weights are looked at
    edit_config(checkpoint, **changes)
    with pytest.raises(UserError, match=message) as error:
        hf.load(checkpoint)
    assert str(checkpoint) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is null or off"),
    ],
)
def test_layer_type_errors(changes, message):
    from jrl.models.hf.parse import parse

    raw = {**SHAPE, "model_type": "qwen3", **changes}
    with pytest.raises(UserError, match=message):
        parse(raw)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_layers_of_another_kind_are_refused_in_every_family(family):
    from jrl.models.hf.parse import parse

    raw = {**SHAPE, "model_type": family, "layer_types": ["mamba", "full_attention"]}
    with pytest.raises(UserError, match="layer_types has 'mamba'"):
        parse(raw)


def test_broken_files_are_named(checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    full = weights.read_bytes()
    for part in (full[:-100], full[:50], b"", b"\xff" * 200):
        weights.write_bytes(part)
        with pytest.raises(UserError, match=r"model\.safetensors: truncated or not"):
            hf.load(checkpoint)
    weights.unlink()
    with pytest.raises(UserError, match="has neither model.safetensors nor"):
        hf.load(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickled weights are not read"):
        hf.load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        hf.load(checkpoint)
    with pytest.raises(UserError, match=r"nowhere/config\.json: no such file"):
        hf.load(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path):
    write_reference(tmp_path, "LlamaForCausalLM", {}, max_shard_size="6KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}: no such file"):
        hf.load(tmp_path)


def test_wrong_tensors_are_named_with_their_keys(checkpoint):
    first = "model.layers.0.self_attn.o_proj.weight"
    edit_config(checkpoint, num_attention_heads=2)
    with pytest.raises(UserError) as error:
        hf.load(checkpoint)
    message = str(error.value)
    assert first in message
    assert "[32, 48], expected [32, 24]; axis 1" in message
    assert "num_attention_heads x head_dim in config.json" in message
    edit_config(checkpoint, num_attention_heads=4, attention_bias=True)
    with pytest.raises(UserError, match=r"missing tensors 'model.layers.0.self_attn.k_proj.bias'"):
        hf.load(checkpoint)
    edit_config(checkpoint, attention_bias=False, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"unexpected tensors 'model.layers.1.*num_hidden_layers"):
        hf.load(checkpoint)
    edit_config(checkpoint, num_hidden_layers=2)
    edit_tensors(checkpoint, lambda values: values.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"'lm_head.weight'; for a tied output"):
        hf.load(checkpoint)
    edit_tensors(checkpoint, lambda values: values.update({first: np.ones((32, 48), np.int8)}))
    with pytest.raises(UserError, match="o_proj.weight' has type I8"):
        hf.load(checkpoint)


def test_old_leftovers_are_ignored_and_a_false_tie_is_not(checkpoint):
    expected = hf.load(checkpoint)[1]
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(checkpoint, lambda values: values.update({inv_freq: np.ones(6, np.float32)}))
    assert_same_tree(hf.load(checkpoint)[1], expected)
    edit_config(checkpoint, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head.weight' differs from the embedding"):
        hf.load(checkpoint)
    edit_tensors(
        checkpoint,
        lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"]}),
    )
    assert "head" not in hf.load(checkpoint)[1]


def test_unknown_dtype(llama):
    with pytest.raises(UserError, match="dtype = 'bf16'; .*bfloat16"):
        hf.load(llama, dtype="bf16")
