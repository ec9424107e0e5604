"""Checkpoints against transformers, the implementation that wrote them."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import hf
from jrl.models.transformer import transformer

torch = pytest.importorskip("torch")

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
            **{**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 3},
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
