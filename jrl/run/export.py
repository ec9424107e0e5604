"""Export of a run's policy in Hugging Face format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax

from jrl.config import Config
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.hub import hub_name
from jrl.models import hf
from jrl.models.hf.peft import save_adapters
from jrl.models.tokenizer import CharTokenizer
from jrl.run.model_card import base_name, model_card, write_card
from jrl.setup.adapters import is_base_kept, lora_of, plain_policy
from jrl.train import build


def export_run(
    config: Config,
    directory: Path,
    *,
    checkpoint: int | None = None,
    adapters: bool = False,
    policy: int = 0,
    name: str | None = None,
) -> Path:
    """Writes a run's policy as config.json and safetensors, with its tokenizer and a model card.

    Args:
      config: the run's configuration, with ``run.dir``.
      directory: a new directory.
      checkpoint: a training step; None for the newest.
      adapters: True for the adapters alone, in PEFT's format; False for the complete policy, with
        adapters merged into its weights.
      policy: its number, where the run trained several.
      name: OWNER/NAME of the model on the Hub, for the card; None for the directory's.

    Returns:
      The directory.

    Raises:
      UserError: no such checkpoint or policy; the directory is not empty or cannot be written; or
        adapters are asked of a run without any.
    """
    directory = directory.expanduser()
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} exists and is not empty; name a new directory")
    lora = lora_of(config)
    if adapters and lora is None:
        raise UserError("the run has no adapters ([lora] is not set); remove --adapters")
    run = build.policy_run(config)
    if run.model is None:
        raise UserError(
            f"model.network = {config.model.network!r}: a Hugging Face checkpoint holds the"
            " library's own decoder; a network of your own stays in its run directory"
        )
    derived, stack = run.network.extras.derived, run.network.extras.stack
    if derived is not None and not derived.exact:
        raise UserError(
            f"method = {config.method!r}: its policy has further parameters, and a Hugging Face"
            " checkpoint has no place for them; serve the run itself with jrl serve"
        )
    if policy not in range(policies := stack.policies if stack else 1):
        raise UserError(f"--policy {policy}: the run trained {policies}, numbered from 0")
    with jax.set_mesh(run.mesh):
        _, params, step = load_policy(run, checkpoint)
        if adapters and (split := run.network.extras.split) is not None:
            params = split.split(params)[0]
        elif derived is not None:
            params = jax.jit(partial(plain_policy, network=run.network, policy=policy))(params)
        params = jax.device_get(params)
    card = model_card(config, step=step, name=name or directory.name, adapters=adapters)
    if adapters and lora is not None:
        base = None if is_base_kept(config) else config.model.path
        if base and name is not None and hub_name(base) is None:
            base = base_name(config)  # a path of this machine is not for the Hub
        save_adapters(directory, run.model, params, lora=lora, base=base)
        write_card(directory, card)
        return directory
    stop_ids = run.tokenizer.stop_ids if config.model.path is not None else ()
    hf.save(directory, run.model, params, source_dir=config.model.path, stop_ids=stop_ids)
    if config.model.path is None and isinstance(run.tokenizer, CharTokenizer):
        run.tokenizer.save(directory)
    write_card(directory, card)
    return directory
