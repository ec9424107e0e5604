"""Model FLOPs of a forward pass, independent of how it is computed.

They are those of matrix products with causal attention and without recomputation, as in "PaLM:
Scaling Language Modeling with Pathways" (arXiv:2204.02311). Embedding look-ups count nothing, and
the output matrix counts for completions alone, since no logits of prompts are made.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np

from jrl.models.config import ModelConfig
from jrl.models.weights import is_spec, weights


class Lengths(NamedTuple):
    """The sizes of a rollout when every completion has its full length.

    Attributes:
      prompts: N.
      group: G, greedy members among them.
      prompt: P, tokens.
      new: T, tokens.
    """

    prompts: int
    group: int
    prompt: int
    new: int


def layer_matrices(model: ModelConfig) -> float:
    """Numbers of the layers' matrices that one token is multiplied with; of experts, its own."""
    total = 0.0
    for spec in jax.tree.leaves(weights(model)["layers"], is_leaf=is_spec):
        share = model.experts_per_token / model.experts if spec.axes[1] == "expert" else 1.0
        total += share * math.prod(spec.shape) if spec.inputs else 0.0
    return total


def attention_pairs(model: ModelConfig, sizes: Lengths) -> float:
    """Pairs of a query and a key that it sees, of one group, summed over layers."""
    positions = np.arange(1, sizes.prompt + sizes.new + 1, dtype=np.float64)
    total = 0.0
    for window in model.windows:
        keys = positions if window is None else np.minimum(positions, window)
        total += keys[: sizes.prompt].sum() + sizes.group * keys[sizes.prompt :].sum()
    return total


def forward_flops(model: ModelConfig, sizes: Lengths) -> float:
    """FLOPs of one forward pass over the groups of a step, each prompt scored once."""
    completions = sizes.group * sizes.new
    matrices = layer_matrices(model) * (sizes.prompt + completions)
    head = model.embed_dim * model.vocab_size * completions
    pairs = 2 * model.heads * model.head_dim * attention_pairs(model, sizes)
    return 2.0 * sizes.prompts * (matrices + head + pairs)
