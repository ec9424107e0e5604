"""Functional reinforcement learning for language models, in JAX.

Five hops lead from a prompt to a gradient: ``data`` makes prompts, ``train.collect`` collects,
``sampling`` draws completions, ``rewards`` judge them, ``train.step`` learns. Everything in
between is a pure function over the records of ``jrl.types``.

The names below are the ones a script starts with; each is read from its module when first used,
so ``import jrl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Batch": "jrl.types",
    "Checkpoints": "jrl.storage.checkpoints",
    "Config": "jrl.config",
    "SamplingParams": "jrl.sampling.params",
    "ModelConfig": "jrl.models.config",
    "Network": "jrl.types",
    "Objective": "jrl.types",
    "Prompt": "jrl.types",
    "Rollout": "jrl.types",
    "TrainState": "jrl.types",
    "UserError": "jrl.errors",
    "ValueNetwork": "jrl.types",
    "compile_run": "jrl.system.compile_reports",
    "compute_advantages": "jrl.objectives.policy",
    "fit": "jrl.entry",
    "function_network": "jrl.models.functions",
    "generate": "jrl.sampling.generate",
    "get_method": "jrl.methods",
    "init_state": "jrl.train.state",
    "linen_network": "jrl.models.flax_bridge",
    "load_config": "jrl.config",
    "make_sampling_params": "jrl.sampling.params",
    "make_mesh": "jrl.mesh",
    "make_run": "jrl.train.compiled",
    "make_step": "jrl.train.step",
    "nnx_network": "jrl.models.flax_bridge",
    "policy_loss": "jrl.objectives.policy",
    "reward_network": "jrl.models.heads",
    "transformer": "jrl.models.transformer",
    "value_head": "jrl.models.heads",
    "value_network": "jrl.models.heads",
}

__version__: str
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'jrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("jrl-lm")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
