"""The shape of a decoder, as one frozen value.

One description covers Llama 3, Qwen 2, 2.5 and 3 (dense and routed), Mistral, Gemma 2 and 3 and
SmolLM. Layers of one model may differ in attention window, in rotation and in their feed-forward
part; each such choice is a pattern of booleans that is repeated over the layers (and cut there).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Collection
from typing import NamedTuple

from jrl.errors import UserError, unknown_choice

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
ROPE_SCALINGS = ("linear", "llama3", "none")


class Rope(NamedTuple):
    """Rotary embedding of one layer; ``theta`` 0 means none.

    Attributes:
      theta: base of the wavelengths.
      scaling: "none", "linear" or "llama3".
      factor: what frequencies are divided by.
      low_freq_factor: llama3: wavelengths above original_length / this are divided in full.
      high_freq_factor: llama3: wavelengths below original_length / this are left alone.
      original_length: llama3: context length before scaling, tokens.
    """

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


NO_ROPE = Rope(0.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder.

    Attributes:
      vocab_size: V, tokens.
      layers: number of blocks.
      embed_dim: D, width of the residual stream.
      heads: H, query heads.
      kv_heads: K, key-value heads; divides ``heads``.
      head_dim: h, even; need not be ``embed_dim / heads``.
      mlp_dim: F, width of the gated feed-forward part of dense layers.
      max_length: longest sequence, tokens.
      dtype: what activations and matrix products are computed in (sums are float32).
      param_dtype: what parameters are stored in.
      tied_embeddings: whether the output matrix is the embedding.
      norm_eps: added to the mean square inside every RMS norm.
      norm_plus_one: norms multiply by 1 + weight (Gemma) instead of weight.
      post_norms: each block also normalises what attention and feed-forward add (Gemma).
      qk_norm: queries and keys are normalised per head before rotation.
      qkv_bias: query, key and value projections have biases.
      o_bias: the attention output projection has a bias.
      mlp_bias: the dense feed-forward projections have biases.
      activation: the gate's non-linearity.
      embed_scale: what embeddings are multiplied by.
      query_scale: what attention scores are multiplied by; None is head_dim ** -0.5.
      attention_softcap: scores become cap * tanh(score / cap); None for no cap.
      logit_softcap: the same for the output logits.
      rope_theta: base of the rotation's wavelengths.
      rope_scaling: "none", "linear" or "llama3"; not applied with ``rope_local_theta``.
      rope_factor: see ``Rope.factor``.
      rope_low_freq_factor: see ``Rope``.
      rope_high_freq_factor: see ``Rope``.
      rope_original_length: see ``Rope``, tokens.
      rope_local_theta: base for windowed layers; None to rotate all layers alike.
      rope_local_factor: windowed layers' frequencies are divided by it (with local theta only).
      rope_pattern: which layers rotate at all, repeated over the layers.
      window: tokens that a windowed layer sees, itself included; None for no windows.
      window_pattern: which layers are windowed, repeated over the layers.
      experts: E, routed experts of a sparse layer; 0 for a dense model.
      experts_per_token: experts that each token visits.
      expert_mlp_dim: width of one expert.
      norm_topk_prob: whether the visited experts' weights are scaled to sum to one.
      expert_pattern: which layers are sparse, repeated over the layers (when experts > 0).
      family: the Hugging Face ``model_type`` it came from and is exported as; "auto" lets the
        export choose the first family that can express it.
    """

    vocab_size: int
    layers: int
    embed_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    max_length: int
    dtype: str = "float32"
    param_dtype: str = "float32"
    tied_embeddings: bool = True
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    rope_theta: float = 10_000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    rope_local_theta: float | None = None
    rope_local_factor: float = 1.0
    rope_pattern: tuple[bool, ...] = (True,)
    window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp_dim: int = 0
    norm_topk_prob: bool = True
    expert_pattern: tuple[bool, ...] = (True,)
    family: str = "auto"

    def __post_init__(self) -> None:
        """Checks every field; raises ``UserError`` naming the first that cannot be."""
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        _require("layers", self.layers, self.layers <= MOST_LAYERS, f"at most {MOST_LAYERS}")
        for name in ("rope_pattern", "window_pattern", "expert_pattern"):
            object.__setattr__(self, name, _pattern(name, getattr(self, name), self.layers))
        for name in _COUNTS:
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(name, value, value is None or 0 < value < math.inf, "above 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown_choice(f"model.config.{name}", getattr(self, name), choices)
        divides = self.heads % self.kv_heads == 0
        _require(
            "kv_heads", self.kv_heads, divides, f"a divisor of model.config.heads = {self.heads}"
        )
        _require("head_dim", self.head_dim, self.head_dim % 2 == 0, "even, for the rotation")
        if self.rope_scaling == "llama3":
            ordered = self.rope_high_freq_factor > self.rope_low_freq_factor
            low = f"above model.config.rope_low_freq_factor = {self.rope_low_freq_factor}"
            _require("rope_high_freq_factor", self.rope_high_freq_factor, ordered, low)
        _require("experts", self.experts, self.experts >= 0, "0 (dense) or more")
        if self.experts:
            k = self.experts_per_token
            _require("experts_per_token", k, 1 <= k <= self.experts, f"1 to {self.experts}")
            _require("expert_mlp_dim", self.expert_mlp_dim, self.expert_mlp_dim >= 1, "at least 1")
        for name in ("windows", "ropes", "sparse"):
            getattr(self, name)  # found once, here, and read by every trace

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's attention window, tokens; None where a layer sees everything."""
        return tuple(
            self.window if wide else None for wide in _cycle(self.window_pattern, self.layers)
        )

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Each layer's rotation."""
        global_rope = Rope(self.rope_theta, self.rope_scaling)  # without numbers that nothing reads
        if self.rope_scaling != "none":
            global_rope = global_rope._replace(factor=self.rope_factor)
        if self.rope_scaling == "llama3":
            global_rope = global_rope._replace(
                low_freq_factor=self.rope_low_freq_factor,
                high_freq_factor=self.rope_high_freq_factor,
                original_length=self.rope_original_length,
            )
        local_rope = global_rope
        if self.rope_local_theta is not None:
            scaling = "none" if self.rope_local_factor == 1.0 else "linear"
            local_rope = Rope(self.rope_local_theta, scaling, self.rope_local_factor)
        rotates = _cycle(self.rope_pattern, self.layers)
        return tuple(
            (global_rope if window is None else local_rope) if rotate else NO_ROPE
            for rotate, window in zip(rotates, self.windows, strict=True)
        )

    @functools.cached_property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer routes its tokens to experts."""
        if not self.experts:
            return (False,) * self.layers
        return _cycle(self.expert_pattern, self.layers)


MOST_LAYERS = 10_000
"""More are a mistake, and patterns over them would fill the memory."""
_COUNTS = (
    *("vocab_size", "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim"),
    *("max_length", "rope_original_length"),
)
_POSITIVE = (
    *("norm_eps", "embed_scale", "query_scale", "attention_softcap", "logit_softcap"),
    *("rope_theta", "rope_factor", "rope_low_freq_factor", "rope_local_theta"),
    *("rope_local_factor", "window"),
)
_CHOICES = {
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "activation": ACTIVATIONS,
    "rope_scaling": ROPE_SCALINGS,
}


def _check_type(name: str, value: object, kind: str) -> None:
    """Raises UserError where a field holds another type than it declares; NumPy's numbers count."""
    if value is None and kind.endswith("| None"):
        return
    kind = kind.removesuffix(" | None")
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind == "int":
        is_integer = is_number and isinstance(value, numbers.Integral)
        _require(name, value, is_integer, "a whole number")
        _require(name, value, abs(int(value)) < 2**31, "at most 2147483647")  # type: ignore[call-overload]
    elif kind == "float":
        _require(name, value, is_number, "a number")
    elif kind == "str":
        _require(name, value, isinstance(value, str), "text")
    elif kind == "bool":
        _require(name, value, isinstance(value, bool), "true or false")
    else:
        is_bools = isinstance(value, tuple | list) and all(isinstance(v, bool) for v in value)
        _require(name, value, is_bools, "a list of true and false")


_EXPERT_SIZES = ("experts_per_token", "expert_mlp_dim", "expert_pattern")
_SCALED_ROPE = ("rope_factor", "rope_original_length")
_LLAMA3_ROPE = ("rope_low_freq_factor", "rope_high_freq_factor")


def check_read(config: ModelConfig, names: Collection[str]) -> None:
    """Raises UserError for sizes that somebody wrote down and this model does not read.

    Args:
      config: the model.
      names: of the sizes that were written down.
    """
    unread: dict[str, tuple[str, ...]] = {
        "model.config.experts": () if config.experts else _EXPERT_SIZES,
        "model.config.rope_scaling": _SCALED_ROPE if config.rope_scaling == "none" else (),
        'model.config.rope_scaling = "llama3"': (
            () if config.rope_scaling == "llama3" else _LLAMA3_ROPE
        ),
    }
    lines = [
        f"model.config.{name} = {getattr(config, name)!r} is not read without {key}; set that, or"
        " remove it"
        for key, sizes in unread.items()
        for name in sizes
        if name in names
    ]
    if lines:
        raise UserError("\n".join(lines))


def _require(name: str, value: object, holds: bool, remedy: str) -> None:
    if not holds:
        raise UserError(f"model.config.{name} = {value!r}; it must be {remedy}")


def _cycle(pattern: tuple[bool, ...], layers: int) -> tuple[bool, ...]:
    return tuple(pattern[i % len(pattern)] for i in range(layers))


def _pattern(name: str, pattern: tuple[bool, ...], layers: int) -> tuple[bool, ...]:
    """The shortest pattern that gives the same layers, so that equal models are equal values."""
    if not pattern:
        raise UserError(f"model.config.{name} = {pattern!r}; give at least one boolean")
    full = _cycle(tuple(bool(p) for p in pattern), max(layers, 1))
    for length in range(1, len(full) + 1):
        if _cycle(full[:length], len(full)) == full:
            return full[:length]
    return full
