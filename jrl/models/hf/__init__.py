"""Checkpoints in Hugging Face layout, read and written."""

from jrl.models.hf.files import SHARD_BYTES, load, read_config, save

__all__ = ["SHARD_BYTES", "load", "read_config", "save"]
