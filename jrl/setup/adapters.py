"""Runs that train adapters on a frozen base: what is kept in their checkpoints, and what is not.

A checkpoint holds the adapters and their moments. The base is read again from ``model.path``; one
that is nowhere else, because the run began with random weights or a warm start changed it, is
written to ``base/`` in the run directory once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.hf.peft import load_adapters
from jrl.models.lora import Lora, with_adapters
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.integrity import checksums
from jrl.types import (
    NOTHING,
    Network,
    Params,
    TrainState,
)

BASE = "base"


def lora_of(config: Config) -> Lora | None:
    """The adapters that a configuration asks for, or None."""
    table = config.lora
    if table is None:
        return None
    return Lora(table.rank, table.alpha, table.targets, table.base)


def trained_network(config: Config, model: ModelConfig, network: Network) -> Network:
    """The policy as a run trains it: ``network`` itself, or with adapters on a frozen base.

    Raises:
      UserError: adapters that the model cannot have.
    """
    lora = lora_of(config)
    if lora is None:
        return network
    return with_adapters(network, model, lora, gather=network.extras.gathered)


def start_params(config: Config, model: ModelConfig, network: Network, params: Params) -> Params:
    """The weights that a run starts from on the host, from those of its checkpoint.

    A frozen base is put into the form that it is kept in, and joined with the adapters of
    ``lora.path`` where there are some.
    """
    if network.extras.split is None or params is None:
        return params
    base, lora = _frozen_base(config, network, params), lora_of(config)
    if lora is None or config.lora is None or config.lora.path is None:
        return base
    return network.extras.split.join(load_adapters(config.lora.path, model, lora=lora), base)


def put_policy(network: Network, params: Params, where: Any) -> Params:
    """Loads a policy to the devices part by part, never holding all of it in one place.

    Args:
      network: the policy.
      params: whole, or the base alone.
      where: shardings, shaped like the whole policy.
    """
    if network.extras.split is not None and not network.extras.split.split(params)[0]:
        where = network.extras.split.split(where)[1]
    return hf.place(params, where)


# ---------------------------------------------------------------- checkpoints


def without_base(state: TrainState) -> TrainState:
    """The checkpointed part of a state: everything but the base, which does not change."""
    return state.replace(frozen={n: tree for n, tree in state.frozen.items() if n != "base"})


def with_base(state: TrainState, base: Params) -> TrainState:
    """The state with this base."""
    return state.replace(frozen=state.frozen | {"base": base})


def base_checksum(base: Params) -> int:
    """One number that tells a base from another; see ``integrity.checksum``."""
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(base))}
    return zlib.crc32(np.array([*checksums(leaves).values()], np.uint32).tobytes())


def check_base(config: Config, base: Params, expected: int | None) -> int:
    """The checksum of a base; a UserError when the run resumed from another one."""
    checksum = base_checksum(base)
    if expected is not None and checksum != expected:
        raise UserError(
            f"model.path = {config.model.path!r} holds other weights than when the run began, and "
            "its adapters belong to those; put them back, or start again in another run.dir"
        )
    return checksum


def is_base_kept(config: Config) -> bool:
    """Whether the run directory is the one place that has the run's base."""
    return config.model.path is None or config.warmup.steps > 0


def has_base(config: Config) -> bool:
    """Whether the run directory holds the run's base."""
    return Checkpoints(_directory(config), 1).latest_step() is not None


def save_base(config: Config, base: Params) -> None:
    """Writes the base to the run directory."""
    with Checkpoints(_directory(config), 1) as store:
        store.save(0, {BASE: base})


def load_base(config: Config, network: Network, layout: Params) -> Params:
    """A run's frozen base, from ``model.path`` or its run directory; see ``is_base_kept``.

    Args:
      config: the run's, with ``run.dir``.
      network: its policy, with a ``split``.
      layout: where its leaves shall lie; see ``Checkpoints.restore``.
    """
    assert network.extras.split is not None
    if is_base_kept(config):
        return Checkpoints(_directory(config), 1).restore({BASE: layout})[0][BASE]
    assert config.model.path is not None
    _, params = hf.open_checkpoint(config.model.path, dtype=config.model.param_dtype)
    base = _frozen_base(config, network, params)
    if isinstance(jax.tree.leaves(layout)[0], np.ndarray):
        return hf.in_memory(base)
    return hf.place(base, jax.tree.map(lambda x: x.sharding, layout))


def _frozen_base(config: Config, network: Network, params: Params) -> Params:
    """Weights in the form that a frozen base is kept in; for 8 bits they are read first."""
    assert network.extras.split is not None
    lora = lora_of(config)
    in_files = lora is not None and lora.base == "float"
    return network.extras.split.freeze(params if in_files else hf.in_memory(params))


def keep_base(config: Config, base: Params) -> int:
    """Writes a base that is nowhere else to the run directory, once; its checksum."""
    if is_base_kept(config) and not has_base(config):
        save_base(config, base)
    return base_checksum(base)


def with_kept_base(config: Config, network: Network, state: TrainState) -> TrainState:
    """The state with the base that the run directory keeps, if it does."""
    if not is_base_kept(config):
        return state
    return with_base(state, load_base(config, network, state.frozen["base"]))


def _directory(config: Config) -> Path:
    return Path(config.run.dir or "") / BASE


def restore_policy(
    config: Config,
    network: Network,
    layout: Params,
    *,
    checkpoint: int | None = None,
    also: Mapping[str, Any] = NOTHING,
) -> tuple[Params, dict[str, Any]]:
    """The complete policy of a run's checkpoint, and the requested notes.

    Args:
      config: the run's, with ``run.dir``.
      network: its policy.
      layout: where the policy's leaves shall lie; see ``Checkpoints.restore``.
      checkpoint: a training step; None for the newest.
      also: further parts of the state, such as "step", or of its "params".

    Returns:
      (policy, what ``also`` asked for).

    Raises:
      UserError: no such checkpoint, or adapters of another base than ``model.path`` holds now.
    """
    trained, base = layout, None
    if network.extras.split is not None:
        trained, base = network.extras.split.split(layout)
    template = dict(also) | {"params": {"policy": trained, **also.get("params", {})}}
    saved = Checkpoints(Path(config.run.dir or "") / "checkpoints", 1)
    restored, extra = saved.restore(template, checkpoint, subset=True)
    policy = restored["params"].pop("policy")
    if network.extras.split is not None:
        base = load_base(config, network, base)
        check_base(config, base, extra.get("base"))
        policy = network.extras.split.join(policy, base)
    return policy, restored


def policy_of(state: TrainState, network: Network) -> Params:
    """The policy's joined parameters, for the network's functions; no array is copied."""
    if network.extras.split is None:
        return state.params["policy"]
    return network.extras.split.join(state.params["policy"], state.frozen["base"])


def drawn_trees(
    state: TrainState, network: Network, policies: Sequence[Any] = ()
) -> dict[str, Params]:
    """The trees that completions to train on are drawn with, by name.

    Args:
      state: of the run.
      network: the policy.
      policies: those of the plan that draw besides the policy.
    """
    trees = {other.name: other.params(state) for other in policies}
    return {"policy": policy_of(state, network)} | trees


def plain_policy(params: Params, network: Network, policy: int = 0) -> Params:
    """Parameters as a checkpoint has them: of one policy, adapters merged, nothing besides."""
    while (derived := network.extras.derived) is not None:
        params, network = derived.plain(params, policy), derived.network
    return params
