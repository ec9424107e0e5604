"""Functional reinforcement learning for language models, in JAX.

====================== ============================================================================
``fit``                trains a policy on rows, a task or an environment, in one call
``generate``           samples completions: tokens, log-probabilities, versions, stop reasons
``make_step``          a training step, a pure function of state and batch
``make_run``           a whole run as one function, to be jitted and vmapped
``compile_run``        compiles such a run and reports how long that takes
``init_state``         parameters, optimizer state and the objective's own state
``get_method``         a published method by name, with its coefficients
``compute_advantages`` advantages of a batch by an objective
``policy_loss``        the terms of an objective's loss
``transformer``        a decoder of any supported family, from a ``ModelConfig``
``function_network``   a network of two plain functions
``linen_network``      a network of a Flax module; ``nnx_network`` of an NNX one
``load_config``        a run's configuration from TOML
``make_mesh``          a device mesh with the library's axes
====================== ============================================================================

Packages: ``jrl.objectives`` (losses and advantages on arrays), ``jrl.methods`` (every published
method, such as ``jrl.methods.grpo``), ``jrl.models``, ``jrl.sampling``, ``jrl.rewards``,
``jrl.data``, ``jrl.episodes``, ``jrl.train``, ``jrl.evaluate``, ``jrl.plan``, and ``jrl.zoo`` for
one paper, game or other library. Nothing public is deeper than ``jrl.package.name``.

Each name is imported when it is first used, so ``import jrl`` loads no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

HOMES = {
    "jrl": (
        *("config", "data", "episodes", "errors", "evaluate", "mesh", "methods", "models"),
        *("objectives", "plan", "report", "rewards", "run", "sampling", "serving", "storage"),
        *("train", "types", "verifiers", "zoo"),
    ),
    "jrl.config": ("Config", "load_config"),
    "jrl.entry": ("Result", "fit"),
    "jrl.errors": ("UserError",),
    "jrl.mesh": ("make_mesh",),
    "jrl.methods": ("Method", "get_method", "variant"),
    "jrl.models.config": ("ModelConfig",),
    "jrl.models.flax_bridge": ("linen_network", "nnx_network"),
    "jrl.models.functions": ("function_network",),
    "jrl.models.heads": ("reward_network", "value_head", "value_network"),
    "jrl.models.transformer": ("transformer",),
    "jrl.objectives.policy": ("combine_terms", "compute_advantages", "policy_loss"),
    "jrl.sampling.generate": ("generate",),
    "jrl.sampling.params": ("SamplingParams", "make_sampling_params"),
    "jrl.storage.checkpoints": ("Checkpoints",),
    "jrl.system.compile_reports": ("compile_run",),
    "jrl.train.compiled": ("make_run",),
    "jrl.train.score": ("score",),
    "jrl.train.state": ("init_state",),
    "jrl.train.step": ("make_step",),
    "jrl.types": (
        *("Batch", "Network", "Objective", "Prompt", "Rollout", "TrainState", "ValueNetwork"),
    ),
}
"""Module -> public names; those of "jrl" are packages and modules."""

if TYPE_CHECKING:
    from jrl import config as config
    from jrl import data as data
    from jrl import episodes as episodes
    from jrl import errors as errors
    from jrl import evaluate as evaluate
    from jrl import mesh as mesh
    from jrl import methods as methods
    from jrl import models as models
    from jrl import objectives as objectives
    from jrl import plan as plan
    from jrl import report as report
    from jrl import rewards as rewards
    from jrl import run as run
    from jrl import sampling as sampling
    from jrl import serving as serving
    from jrl import storage as storage
    from jrl import train as train
    from jrl import types as types
    from jrl import verifiers as verifiers
    from jrl import zoo as zoo
    from jrl.config import Config as Config
    from jrl.config import load_config as load_config
    from jrl.entry import Result as Result
    from jrl.entry import fit as fit
    from jrl.errors import UserError as UserError
    from jrl.mesh import make_mesh as make_mesh
    from jrl.methods import Method as Method
    from jrl.methods import get_method as get_method
    from jrl.methods import variant as variant
    from jrl.models.config import ModelConfig as ModelConfig
    from jrl.models.flax_bridge import linen_network as linen_network
    from jrl.models.flax_bridge import nnx_network as nnx_network
    from jrl.models.functions import function_network as function_network
    from jrl.models.heads import reward_network as reward_network
    from jrl.models.heads import value_head as value_head
    from jrl.models.heads import value_network as value_network
    from jrl.models.transformer import transformer as transformer
    from jrl.objectives.policy import combine_terms as combine_terms
    from jrl.objectives.policy import compute_advantages as compute_advantages
    from jrl.objectives.policy import policy_loss as policy_loss
    from jrl.sampling.generate import generate as generate
    from jrl.sampling.params import SamplingParams as SamplingParams
    from jrl.sampling.params import make_sampling_params as make_sampling_params
    from jrl.storage.checkpoints import Checkpoints as Checkpoints
    from jrl.system.compile_reports import compile_run as compile_run
    from jrl.train.compiled import make_run as make_run
    from jrl.train.score import score as score
    from jrl.train.state import init_state as init_state
    from jrl.train.step import make_step as make_step
    from jrl.types import Batch as Batch
    from jrl.types import Network as Network
    from jrl.types import Objective as Objective
    from jrl.types import Prompt as Prompt
    from jrl.types import Rollout as Rollout
    from jrl.types import TrainState as TrainState
    from jrl.types import ValueNetwork as ValueNetwork

    __version__: str
else:
    from jrl.system.lazy_names import lazy_names
    from jrl.system.moved_modules import install

    install()
    __all__, _get, __dir__ = lazy_names(__name__, HOMES)
    __all__ += ["__version__"]

    def __getattr__(name: str) -> Any:
        if name != "__version__":
            return _get(name)
        from jrl.system.extras import version

        return version()
