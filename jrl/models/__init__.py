"""Language models as functions over a parameter tree, and the heads that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.models.config": ("ModelConfig",),
    "jrl.models.file_tokenizer": ("load_tokenizer",),
    "jrl.models.flax_bridge": (
        *("linen_network", "linen_reward", "linen_value", "nnx_network", "nnx_reward", "nnx_value"),
    ),
    "jrl.models.functions": ("function_network",),
    "jrl.models.heads": ("reward_network", "value_head", "value_network"),
    "jrl.models.lora": ("Lora",),
    "jrl.models.tokenizer": ("STOP_ID", "Tokenizer", "char_tokenizer"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.models.config import ModelConfig as ModelConfig
    from jrl.models.file_tokenizer import load_tokenizer as load_tokenizer
    from jrl.models.flax_bridge import linen_network as linen_network
    from jrl.models.flax_bridge import linen_reward as linen_reward
    from jrl.models.flax_bridge import linen_value as linen_value
    from jrl.models.flax_bridge import nnx_network as nnx_network
    from jrl.models.flax_bridge import nnx_reward as nnx_reward
    from jrl.models.flax_bridge import nnx_value as nnx_value
    from jrl.models.functions import function_network as function_network
    from jrl.models.heads import reward_network as reward_network
    from jrl.models.heads import value_head as value_head
    from jrl.models.heads import value_network as value_network
    from jrl.models.lora import Lora as Lora
    from jrl.models.tokenizer import STOP_ID as STOP_ID
    from jrl.models.tokenizer import Tokenizer as Tokenizer
    from jrl.models.tokenizer import char_tokenizer as char_tokenizer
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
