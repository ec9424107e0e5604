"""Hugging Face ``config.json`` to ``ModelConfig``.

The defaults here are those of the reference implementation for keys that a file leaves out. What
the reference reads and we cannot compute is refused by name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.errors import UserError
from jrl.models.config import DTYPES, ModelConfig
from jrl.models.hf.keys import FULL, SLIDING, check_types

Json = dict[str, Any]

_REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings"),
)
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"},
}


class Family(NamedTuple):
    """Properties of a ``model_type`` that its config.json does not state.

    Attributes:
      architecture: the class name in ``architectures``.
      classifier: that of its reward models, where another prefix stands before
        "ForSequenceClassification" there.
      windows: "none", "all" (every layer, when a window is set) or "types" (by ``layer_types``).
      bias: "never", "qkv" (always, but not on the output) or "key" (``attention_bias``, on all).
      mlp_bias: whether the key ``mlp_bias`` is read.
      qk_norm: whether queries and keys are normalised.
      gemma: Gemma's norms, embedding scale, query scale and activation key.
      two_ropes: whether windowed layers have a rotation of their own.
      nope: whether ``no_rope_layers`` is read.
      routed: whether sparse layers exist.
      defaults: values of absent keys.
    """

    architecture: str
    windows: str = "none"
    bias: str = "key"
    mlp_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    two_ropes: bool = False
    nope: bool = False
    routed: bool = False
    defaults: Mapping[str, Any] = {}
    classifier: str = ""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", mlp_bias=True),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        windows="types",
        bias="qkv",
        defaults={
            **{"num_key_value_heads": 32, "sliding_window": 4096},
            **{"use_sliding_window": False, "max_window_layers": 28},
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        windows="types",
        qk_norm=True,
        defaults={
            **{"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
            **{"use_sliding_window": False, "max_window_layers": 28},
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        windows="all",
        qk_norm=True,
        routed=True,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        bias="never",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        windows="types",
        gemma=True,
        defaults={
            **{"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
            **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256},
            "num_key_value_heads": 4,
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        windows="types",
        qk_norm=True,
        gemma=True,
        two_ropes=True,
        defaults={
            **{"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
            **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256},
            "num_key_value_heads": 4,
            **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        },
        classifier="Gemma3TextForSequenceClassification",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        windows="types",
        mlp_bias=True,
        nope=True,
        defaults={
            **{"tie_word_embeddings": True, "rope_theta": 2e6, "use_sliding_window": False},
            **{"no_rope_layer_interval": 4, "num_key_value_heads": 4},
        },
    ),
}


def parse(raw: Json, *, classifier: bool = False) -> ModelConfig:
    """The model that a ``config.json`` describes.

    Args:
      raw: the file's object.
      classifier: True for a reward model, a trunk with a head of labels in place of the
        vocabulary's; else a language model.

    Returns:
      The configuration; ``dtype`` and ``param_dtype`` are what the file claims to store.

    Raises:
      UserError: an unknown architecture, a missing key, or a key asking for what is not supported.
    """
    check_types(raw)
    name, family = _family(raw, classifier)
    for key in _REQUIRED:
        if not isinstance(raw.get(key), int):
            raise UserError(f"config.json: {key} = {raw.get(key)!r}; it must be an integer")
    _refuse(raw)

    def get(key: str, otherwise: Any = None) -> Any:
        return raw.get(key, family.defaults.get(key, otherwise))

    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    rotates = _rotating_layers(get, layers) if family.nope else (True,)
    window, window_pattern = _windows(get, family, layers, rotates)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"config.json: dtype = {dtype!r}; choose from {', '.join(DTYPES)}")
    act_key = "hidden_activation" if family.gemma else "hidden_act"
    act = get(act_key) or ("gelu_pytorch_tanh" if family.gemma else "silu")
    if act not in ACTIVATIONS:
        supported = ", ".join(sorted(ACTIVATIONS))
        raise UserError(f"config.json: {act_key} = {act!r} is not supported; known: {supported}")
    attention_bias = family.bias == "key" and bool(get("attention_bias"))
    values: Json = {
        "vocab_size": raw["vocab_size"],
        "layers": layers,
        "embed_dim": raw["hidden_size"],
        "heads": heads,
        "kv_heads": get("num_key_value_heads") or heads,
        "head_dim": get("head_dim") or raw["hidden_size"] // heads,
        "mlp_dim": raw["intermediate_size"],
        "max_length": raw["max_position_embeddings"],
        "dtype": dtype,
        "param_dtype": dtype,
        "tied_embeddings": bool(get("tie_word_embeddings", False)),
        "norm_eps": get("rms_norm_eps", 1e-6),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.bias == "qkv" or attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": family.mlp_bias and bool(get("mlp_bias")),
        "activation": ACTIVATIONS[act],
        "rope_pattern": rotates,
        "window": window,
        "window_pattern": window_pattern,
        "family": name,
        **_ropes(raw, get, family),
    }
    if family.gemma:
        values |= {"norm_plus_one": True, "post_norms": True}
        values["embed_scale"] = raw["hidden_size"] ** 0.5
        values["query_scale"] = get("query_pre_attn_scalar") ** -0.5
        values["logit_softcap"] = get("final_logit_softcapping")
        # The reference reads the scores' cap for Gemma 2 only, though Gemma 3 has the key too.
        values["attention_softcap"] = get("attn_logit_softcapping") if name == "gemma2" else None
    if family.routed:
        values |= _routing(get, layers)
    try:
        return ModelConfig(**values)
    except UserError as error:
        raise UserError(f"config.json: {_in_their_words(str(error))}") from None


_THEIR_KEYS = {
    **{"vocab_size": "vocab_size", "layers": "num_hidden_layers", "embed_dim": "hidden_size"},
    **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"},
    **{"mlp_dim": "intermediate_size", "max_length": "max_position_embeddings"},
    **{"norm_eps": "rms_norm_eps", "window": "sliding_window", "experts": "num_experts"},
    **{"experts_per_token": "num_experts_per_tok", "expert_mlp_dim": "moe_intermediate_size"},
    **{"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"},
    **{"query_scale": "query_pre_attn_scalar ** -0.5", "rope_local_theta": "rope_local_base_freq"},
}


def _in_their_words(message: str) -> str:
    """Our names of fields, in an error about a file, as the file has them."""
    return re.sub(r"model\.config\.(\w+)", lambda m: _THEIR_KEYS.get(m[1], m[1]), message)


_CAUSAL, _CLASSIFIER, _BY_TOKEN = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
)


def _family(raw: Json, classifier: bool) -> tuple[str, Family]:
    by_class = {_class_of(family, classifier): name for name, family in FAMILIES.items()}
    if classifier:  # a head of the same name, which transformers reads at every token
        by_class |= {name.replace(_CLASSIFIER, _BY_TOKEN): by_class[name] for name in by_class}
    supported = ", ".join(sorted(by_class))
    classes = raw.get("architectures") or []
    if classes and classes[0] not in by_class:
        hint = ""
        if classes[0] in {_class_of(family, not classifier) for family in FAMILIES.values()}:
            hint = "; it is a language model: rewards.NAME.answers reads one"
            if not classifier:
                hint = "; it is a reward model: name it in rewards.NAME.path"
        raise UserError(
            f"config.json: architectures = {classes!r} is not supported; supported: {supported}"
            f"{hint}"
        )
    name = raw.get("model_type") or (by_class[classes[0]] if classes else None)
    if not isinstance(name, str) or name not in FAMILIES:
        types = ", ".join(FAMILIES)
        raise UserError(f"config.json: model_type = {name!r} is not supported; supported: {types}")
    if classes and by_class[classes[0]] != name:
        raise UserError(
            f"config.json: model_type = {name!r} does not belong to architectures = {classes!r}"
        )
    return name, FAMILIES[name]


def _class_of(family: Family, classifier: bool) -> str:
    """The class of transformers that reads a family's language models, or its reward models."""
    if not classifier:
        return family.architecture
    return family.classifier or family.architecture.replace(_CAUSAL, _CLASSIFIER)


def _refuse(raw: Json) -> None:
    if raw.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config is set; load the checkpoint that was not quantised"
        )
    if raw.get("use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention = true is not supported")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        value = raw["partial_rotary_factor"]
        raise UserError(f"config.json: partial_rotary_factor = {value!r} is not supported, only 1")


def _rotating_layers(get: Any, layers: int) -> tuple[bool, ...]:
    flags = get("no_rope_layers")
    if flags is None:
        interval = get("no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if len(flags) < layers:
        raise UserError(f"config.json: no_rope_layers has {len(flags)} entries for {layers} layers")
    return tuple(bool(rotates) for rotates in flags[:layers])


def _windows(
    get: Any, family: Family, layers: int, rotates: tuple[bool, ...]
) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and the layers that have it."""
    window = get("sliding_window")
    # Other families have a window wherever they name one, whatever this key says.
    if "use_sliding_window" in family.defaults and not family.nope:
        window = window if get("use_sliding_window") else None
    types = get("layer_types")
    if unknown := sorted(set(types or ()) - {FULL, SLIDING}):  # whatever the family reads of it
        raise UserError(f"config.json: layer_types has {unknown[0]!r}; only {FULL}, {SLIDING}")
    if family.windows == "none":
        return None, (True,)
    if family.windows == "all":
        return window, (True,)
    if types is None:
        types = _default_types(get, family, layers, window, rotates)
    if len(types) != layers:
        raise UserError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    if SLIDING not in types:
        return None, (True,)
    if window is None:
        raise UserError(
            f"config.json: layer_types has {SLIDING!r} but sliding_window is null or off; "
            "set sliding_window (and use_sliding_window), or make every layer full_attention"
        )
    return window, tuple(kind == SLIDING for kind in types)


def _default_types(
    get: Any, family: Family, layers: int, window: int | None, rotates: tuple[bool, ...]
) -> list[str]:
    """The reference's choice for a file without ``layer_types``."""
    if family.gemma:
        pattern = get("sliding_window_pattern")
        sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    elif family.nope:
        on = bool(get("use_sliding_window")) and window is not None
        sliding = [on and not rotates[i % len(rotates)] for i in range(layers)]
    else:
        first = get("max_window_layers")
        sliding = [window is not None and i >= first for i in range(layers)]
    return [SLIDING if s else FULL for s in sliding]


def _ropes(raw: Json, get: Any, family: Family) -> Json:
    """The rotation, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    theta = get("rope_theta", 10_000.0)
    if not family.two_ropes:
        return _rope(rope, key, theta, raw)
    nested = raw.get("rope_parameters") or {}
    global_rope = {**(nested.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
    sliding = nested.get(SLIDING) or {}
    where = key if key == "rope_scaling" else f"{key}.{FULL}"
    values = _rope(global_rope, where, theta, raw)
    local = _rope(sliding, f"rope_parameters.{SLIDING}", get("rope_local_base_freq"), raw)
    if local["rope_scaling"] == "llama3":
        key = f"rope_parameters.{SLIDING}.rope_type"
        raise UserError(f"config.json: {key} = 'llama3' is not supported; choose default or linear")
    factor = local.get("rope_factor", 1.0)
    return values | {"rope_local_theta": local["rope_theta"], "rope_local_factor": factor}


def _rope(rope: Json, where: str, theta: float, raw: Json) -> Json:
    kind_key = "rope_type" if "rope_type" in rope or "type" not in rope else "type"
    kind = rope.get(kind_key, "default")
    if kind not in ("default", "linear", "llama3"):
        raise UserError(
            f"config.json: {where}.{kind_key} = {kind!r} is not supported; "
            "choose from default, linear, llama3"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        value = rope["partial_rotary_factor"]
        raise UserError(f"config.json: {where}.partial_rotary_factor = {value!r}; only 1 works")
    values: Json = {"rope_theta": float(rope.get("rope_theta") or theta), "rope_scaling": "none"}
    if kind == "default":
        return values
    required = ["factor"] + ["low_freq_factor", "high_freq_factor"] * (kind == "llama3")
    for key in required:
        if not isinstance(rope.get(key), int | float):
            raise UserError(
                f"config.json: {where}.{key} = {rope.get(key)!r}; {kind} needs a number"
            )
        values[f"rope_{key}"] = float(rope[key])
    if kind == "llama3":
        length = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        values["rope_original_length"] = length
    return values | {"rope_scaling": kind}


def _routing(get: Any, layers: int) -> Json:
    experts = get("num_experts") or get("num_local_experts") or 128
    step, dense = get("decoder_sparse_step", 1), set(get("mlp_only_layers") or ())
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return {
        "experts": experts,
        "experts_per_token": get("num_experts_per_tok", 8),
        "expert_mlp_dim": get("moe_intermediate_size", 768),
        "norm_topk_prob": bool(get("norm_topk_prob", False)),
        "expert_pattern": sparse,
    }
