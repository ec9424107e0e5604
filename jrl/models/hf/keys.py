"""The types of a checkpoint's ``config.json``, checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError
from jrl.models.config import MOST_LAYERS

_WHOLE = "a whole number of at least 1"
_COUNT = "a whole number of at least 0"
_NUMBER = "a finite number above 0"
_BOOLEAN = "true or false"
_TEXT = "text"
_OBJECT = "an object"
_TEXTS = "a list of texts"
_WHOLES = "a list of whole numbers"

FULL, SLIDING = "full_attention", "sliding_attention"

_LARGEST = 2**31 - 1

_NULL = (
    *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "no_rope_layers"),
    *("mlp_only_layers", "rope_scaling", "rope_parameters", "attn_logit_softcapping"),
    *("final_logit_softcapping", "architectures", "model_type", "dtype", "torch_dtype"),
    *("hidden_act", "hidden_activation", "attention_bias", "mlp_bias", "num_experts"),
    *("num_local_experts", "use_sliding_window", "full_attention", "sliding_attention"),
    "original_max_position_embeddings",
)
"""Keys that may be null, which means the same as absent, or off."""

_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("intermediate_size", "max_position_embeddings", "num_key_value_heads", "head_dim"),
            *("sliding_window", "sliding_window_pattern", "num_experts_per_tok"),
            *("moe_intermediate_size", "decoder_sparse_step", "no_rope_layer_interval"),
        ),
        _WHOLE,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "max_window_layers"), _COUNT),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"),
            "norm_topk_prob",
        ),
        _BOOLEAN,
    ),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), _TEXT),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _TEXT),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
    **dict.fromkeys(("architectures", "layer_types"), _TEXTS),
    **dict.fromkeys(("no_rope_layers", "mlp_only_layers"), _WHOLES),
}
_ROPE_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _NUMBER),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys((FULL, SLIDING), _OBJECT),
    "original_max_position_embeddings": _WHOLE,
}


def check_types(raw: Mapping[str, Any]) -> None:
    """Raises a UserError for the first key whose value is of another type than the model reads."""
    _check(raw, _KEYS, "")
    if isinstance(layers := raw.get("num_hidden_layers"), int) and layers > MOST_LAYERS:
        raise UserError(f"config.json: num_hidden_layers = {layers}; at most {MOST_LAYERS}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        _check(rope, _ROPE_KEYS, f"{key}.")
        for kind in (FULL, SLIDING):
            _check(rope.get(kind) or {}, _ROPE_KEYS, f"{key}.{kind}.")


def _check(raw: Mapping[str, Any], kinds: Mapping[str, str], prefix: str) -> None:
    for key, kind in kinds.items():
        if key not in raw or (raw[key] is None and key in _NULL):
            continue
        value = raw[key]
        if not _is(value, kind):
            text = repr(value)
            text = text if len(text) <= 60 else f"{text[:60]}..."
            raise UserError(f"config.json: {prefix}{key} = {text}; it must be {kind}")


def _is(value: Any, kind: str) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == _WHOLE:
        return is_int and 1 <= value <= _LARGEST
    if kind == _COUNT:
        return is_int and 0 <= value <= _LARGEST
    if kind == _NUMBER:
        if is_int:
            return 0 < value < 1e300
        return isinstance(value, float) and math.isfinite(value) and value > 0
    if kind == _BOOLEAN:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _OBJECT:
        return isinstance(value, dict)
    if not isinstance(value, list):
        return False
    if kind == _TEXTS:
        return all(isinstance(each, str) for each in value)
    return all(isinstance(each, int) for each in value)
