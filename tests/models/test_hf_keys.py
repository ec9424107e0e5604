"""Types in config.json and beside it: one line with key and value, whatever stands there."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.hf.files import load, read_config
from jrl.models.hf.parse import FAMILIES, parse

SOUND = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
WRONG = [
    ("rope_scaling", "linear"),
    ("rope_scaling", [1]),
    ("rope_scaling", {"rope_type": 3}),
    ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
    ("rope_scaling", {"rope_type": "linear", "factor": None}),
    ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
    (
        "rope_scaling",
        {
            **{"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4},
            "original_max_position_embeddings": "8k",
        },
    ),
    ("rope_theta", "10000"),
    ("rope_theta", None),
    ("rope_theta", -1),
    ("rope_theta", {}),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", [1e-6]),
    ("rms_norm_eps", None),
    ("layer_types", "full_attention"),
    ("layer_types", [1, 2]),
    ("layer_types", {"0": "full_attention"}),
    ("tie_word_embeddings", "yes"),
    ("tie_word_embeddings", 1),
    ("rope_parameters", 7),
    ("rope_parameters", {"full_attention": 3}),
    ("rope_parameters", {"rope_theta": "x"}),
    ("num_hidden_layers", True),
    ("num_hidden_layers", 10**12),
    ("num_hidden_layers", 1_000_000),
    ("vocab_size", 64.0),
    ("num_key_value_heads", "2"),
    ("head_dim", -8),
    ("sliding_window", "all"),
    ("hidden_act", ["silu"]),
    ("architectures", 3),
    ("architectures", [None]),
    ("model_type", 5),
    ("torch_dtype", {"a": 1}),
]


def refusal(raw):
    with pytest.raises(UserError) as raised:
        parse(raw)
    assert str(raised.value).startswith("config.json: ")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "smollm3", "qwen3_moe"])
@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda v: str(v)[:30])
def test_a_wrong_type_is_named(family, key, value):
    raw = SOUND | {"architectures": [FAMILIES[family].architecture], "model_type": family}
    assert key in refusal(raw | {key: value})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = sorted(
    {
        *SOUND,
        *(key for key, _ in WRONG),
        *(key for family in FAMILIES.values() for key in family.defaults),
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"),
        *("no_rope_layers", "decoder_sparse_step", "norm_topk_prob", "quantization_config"),
        *("partial_rotary_factor", "attention_bias", "mlp_bias", "hidden_activation"),
    }
)


@hypothesis.given(
    st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS), anything, max_size=2)
)
@hypothesis.settings(max_examples=400, deadline=None, database=None)
def test_any_value_gives_a_model_or_one_line(family, changes):
    raw = SOUND | {"architectures": [FAMILIES[family].architecture], "model_type": family}
    message = ""
    try:
        parse(raw | changes)
    except UserError as error:
        message = str(error)
    assert "\n" not in message


SIZES = {
    **{"vocab_size": 8, "layers": 2, "embed_dim": 4, "heads": 2, "kv_heads": 1},
    **{"head_dim": 2, "mlp_dim": 4, "max_length": 8},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("layers", "2"), ("layers", 2.0), ("layers", True), ("heads", None), ("layers", 10**12)),
        *(("norm_eps", "tiny"), ("norm_eps", None), ("tied_embeddings", "no"), ("window", 1.5)),
        *(("activation", 3), ("rope_pattern", "ab"), ("window_pattern", [1, 0]), ("dtype", [])),
        *(("query_scale", "x"), ("rope_factor", {}), ("family", 1)),
    ],
)
def test_types_in_model_config(key, value):
    with pytest.raises(UserError, match=rf"model\.config\.{key} = ") as raised:
        ModelConfig(**SIZES | {key: value})
    assert "\n" not in str(raised.value)


@hypothesis.given(st.sampled_from(sorted(ModelConfig.__dataclass_fields__)), anything)
@hypothesis.settings(max_examples=300, deadline=None, database=None)
def test_any_field_gives_a_model_or_one_line(key, value):
    message = ""
    try:
        ModelConfig(**SIZES | {key: value})
    except UserError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    "name",
    [3, None, "../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\0b", []],
)
def test_an_index_names_files_of_its_own_directory(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(SOUND))
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="it must be the name of a file in the same directory"):
        load(tmp_path)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"[]", b'{"vocab_size": "\\ud800"}'])
def test_a_config_that_is_no_json_object(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(UserError, match=r"config\.json") as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)
