"""Checkpoints in Hugging Face layout, read and written."""

from jrl.models.hf.classifier import Classifier, open_classifier
from jrl.models.hf.files import SHARD_BYTES, load, open_checkpoint, read_config, save
from jrl.models.hf.stored import in_memory, place

__all__ = [
    "SHARD_BYTES",
    "Classifier",
    "in_memory",
    "load",
    "open_checkpoint",
    "open_classifier",
    "place",
    "read_config",
    "save",
]
