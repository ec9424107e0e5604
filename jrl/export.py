"""Writing a run's policy in Hugging Face form."""

from __future__ import annotations

from pathlib import Path

import jax

from jrl.config import Config
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.models import hf
from jrl.train import setup as build


def export_run(config: Config, directory: Path, *, checkpoint: int | None = None) -> Path:
    """Writes a run's policy as config.json and safetensors, with the tokenizer it came with.

    Args:
      config: the run's configuration, with ``run.dir``.
      directory: a new directory.
      checkpoint: a training step; None for the newest.

    Returns:
      The directory.

    Raises:
      UserError: no such checkpoint, or the directory holds something or cannot be written.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} exists and is not empty; name a new directory")
    run = build.setup(config)
    with jax.set_mesh(run.mesh):
        _, params, _ = load_policy(run, checkpoint)
        if run.network.split is not None:
            params = jax.jit(run.network.split.merge)(params)
        params = jax.device_get(params)
    hf.save(directory, run.model, params, source_dir=config.model.path)
    return directory
