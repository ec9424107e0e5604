"""``ModelConfig`` to a Hugging Face ``config.json`` that reads back as the same model."""

from __future__ import annotations

import dataclasses
import math

from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.hf.parse import ACTIVATIONS, FAMILIES, FULL, SLIDING, Family, Json, parse


def render(config: ModelConfig, base: Json | None = None) -> Json:
    """The ``config.json`` object of a model, which ``parse`` reads back as the same model.

    Args:
      config: the model.
      base: the object it once came from; keys we do not know are kept when the family agrees.

    Returns:
      The object, with rotation in both the current and the older spelling.

    Raises:
      UserError: the family (every family, for "auto") cannot express a field.
    """
    if config.family != "auto":
        if config.family not in FAMILIES:
            raise UserError(
                f"model.config.family = {config.family!r}; choose from auto, {', '.join(FAMILIES)}"
            )
        out = _render(config, config.family, base)
        if gaps := _lost(config, out):
            raise UserError(
                f"model.config.family = {config.family!r} cannot express model.config.{gaps[0]} = "
                f"{getattr(config, gaps[0])!r}; change it, or set model.config.family = 'auto'"
            )
        return out
    closest: list[str] = []
    for name in FAMILIES:
        out = _render(config, name, base)
        gaps = _lost(config, out)
        if not gaps:
            return out
        closest = gaps if not closest or len(gaps) < len(closest) else closest
    raise UserError(
        "no Hugging Face architecture has this combination; the closest differs in "
        + ", ".join(f"model.config.{field} = {getattr(config, field)!r}" for field in closest)
    )


def _render(config: ModelConfig, name: str, base: Json | None) -> Json:
    c, family = config, FAMILIES[name]
    same = base is not None and base.get("model_type") == name
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    out: Json = dict(base or {}) if same else {key: (base or {}).get(key) for key in ids}
    act = next(key for key, value in ACTIVATIONS.items() if value == c.activation)
    if same and "torch_dtype" in out:
        out["torch_dtype"] = c.param_dtype
    out |= {
        "architectures": [family.architecture],
        "model_type": name,
        "dtype": c.param_dtype,
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.layers,
        "hidden_size": c.embed_dim,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_dim,
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "hidden_activation" if family.gemma else "hidden_act": act,
    }
    if family.bias == "key":
        out["attention_bias"] = c.qkv_bias
    if family.mlp_bias:
        out["mlp_bias"] = c.mlp_bias
    if family.windows != "none":
        out |= {"sliding_window": c.window, "use_sliding_window": c.window is not None}
        if family.gemma or name == "mistral":
            del out["use_sliding_window"]
    if family.windows == "types":
        out["layer_types"] = [FULL if w is None else SLIDING for w in c.windows]
    if family.gemma:
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        out["query_pre_attn_scalar"] = round(scale**-2)
        out["final_logit_softcapping"] = c.logit_softcap
        out["attn_logit_softcapping"] = c.attention_softcap
    if family.nope:
        out["no_rope_layers"] = [int(rope.theta > 0) for rope in c.ropes]
    if family.routed:
        out.pop("num_local_experts", None)
        out |= {
            "num_experts": c.experts,
            "num_experts_per_tok": c.experts_per_token,
            "moe_intermediate_size": c.expert_mlp_dim,
            "norm_topk_prob": c.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(c.sparse) if not sparse],
        }
    return out | _render_ropes(c, family)


def _render_ropes(config: ModelConfig, family: Family) -> Json:
    c = config
    scaling: Json = {"rope_type": c.rope_scaling if c.rope_scaling != "none" else "default"}
    if c.rope_scaling != "none":
        scaling["factor"] = c.rope_factor
    if c.rope_scaling == "llama3":
        scaling["low_freq_factor"] = c.rope_low_freq_factor
        scaling["high_freq_factor"] = c.rope_high_freq_factor
        scaling["original_max_position_embeddings"] = c.rope_original_length
    global_rope = {**scaling, "rope_theta": c.rope_theta}
    out: Json = {"rope_theta": c.rope_theta}
    out["rope_scaling"] = None if c.rope_scaling == "none" else dict(global_rope)
    if not family.two_ropes:
        return out | {"rope_parameters": global_rope}
    near_theta = c.rope_theta if c.rope_local_theta is None else c.rope_local_theta
    sliding: Json = {"rope_type": "default", "rope_theta": near_theta}
    if c.rope_local_factor != 1.0:
        sliding |= {"rope_type": "linear", "factor": c.rope_local_factor}
    out["rope_local_base_freq"] = near_theta
    return out | {"rope_parameters": {FULL: global_rope, SLIDING: sliding}}


_LAYERWISE = {
    **{"rope_theta": "ropes", "rope_scaling": "ropes", "rope_factor": "ropes"},
    **{"rope_low_freq_factor": "ropes", "rope_high_freq_factor": "ropes"},
    **{"rope_original_length": "ropes", "rope_local_theta": "ropes", "rope_local_factor": "ropes"},
    **{"rope_pattern": "ropes", "window": "windows", "window_pattern": "windows"},
    "expert_pattern": "sparse",
}
"""Fields that matter only through what they give each layer."""


def _lost(config: ModelConfig, out: Json) -> list[str]:
    """The fields that would come back different."""
    try:
        reread = parse(out)
    except UserError:
        return ["experts"] if not config.experts else ["family"]
    query = config.head_dim**-0.5
    fields = []
    for field in (f.name for f in dataclasses.fields(config)):
        if field in ("dtype", "family", "param_dtype"):
            continue
        if field.startswith("expert") or field == "norm_topk_prob":
            if field == "experts" and any(config.sparse) != any(reread.sparse):
                fields.append(field)
            if not any(config.sparse):
                continue
        attribute = _LAYERWISE.get(field, field)
        value, reread_value = getattr(config, attribute), getattr(reread, attribute)
        if field == "query_scale":
            value, reread_value = value or query, reread_value or query
        if attribute != field and getattr(config, field) == getattr(reread, field):
            continue
        close = isinstance(value, float) and isinstance(reread_value, float)
        same = math.isclose(value, reread_value, rel_tol=1e-9) if close else value == reread_value
        if not same:
            fields.append(field)
    return fields
