"""Checkpoints in Hugging Face layout, read and written."""

from jrl.models.hf.files import SHARD_BYTES, load, open_checkpoint, read_config, save
from jrl.models.hf.stored import in_memory, place

__all__ = [
    "SHARD_BYTES",
    "in_memory",
    "load",
    "open_checkpoint",
    "place",
    "read_config",
    "save",
]
