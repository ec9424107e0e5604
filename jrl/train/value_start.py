"""The weights of a value network that starts from a reward model: ``value.path``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.config import Config
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.models import hf
from jrl.models.transformer import transformer
from jrl.setup.adapters import plain_policy, trained_network
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of
from jrl.train.reward_model import make_value, params_of
from jrl.train.reward_runs import is_reward_run, reward_run
from jrl.types import Params


def value_start(config: Config, mesh: Mesh) -> Params:
    """The parameters of ``heads.value_network`` that hold the reward model in ``value.path``.

    As in "Training language models to follow instructions with human feedback" (arXiv:2203.02155):
    trunk and head are the reward model's, so that at a text's last token the first estimate is its
    score. A checkpoint's head has no bias; it begins at 0.

    Args:
      config: of the run whose value network it is.
      mesh: of that run.

    Returns:
      {"trunk", "head": {"weight" [D], "bias" []}}; leaves in files, on the host or on devices.

    Raises:
      UserError: a checkpoint with several labels, or one that cannot be read.
    """
    path = config.value.path or ""
    dtype = config.model.param_dtype
    if not is_reward_run(path):
        loaded = hf.open_classifier(model_directory(path, "value.path"), dtype=dtype)
        weight = loaded.params["head"]["weight"]
        if len(weight) != 1:
            raise UserError(
                f"value.path = {path!r} scores {', '.join(loaded.labels)}; a value network starts"
                " from a reward model with one label"
            )
        head: dict[str, Any] = {"weight": weight[0], "bias": np.zeros((), np.float32)}
        return {"trunk": loaded.params["trunk"], "head": head}
    theirs = reward_run(config, "value.path", path)
    shape = run_shape(theirs, kind_of(theirs).task)
    network = trained_network(theirs, shape, transformer(shape))
    params = params_of(theirs, network, make_value(theirs, network), mesh, None)
    if theirs.value.kind == "network":
        trunk, head = params["value"]["trunk"], params["value"]["head"]
    else:
        trunk, head = plain_policy(params["policy"], network), params["value"]
    return {"trunk": jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), trunk), "head": head}
