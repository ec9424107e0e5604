"""The shapes of a training batch, and which metrics a step will have, before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.config import Config
from jrl.config.unions import EnvData, EpisodeData, RecordedData
from jrl.envs import Env
from jrl.errors import UserError, unknown_choice
from jrl.evaluate import evaluation_names
from jrl.mesh import batch_sharding, replicated
from jrl.metrics import CLOCKS
from jrl.models.config import ModelConfig
from jrl.models.routing import record_dtype
from jrl.train import build, programs
from jrl.train.objective import max_new_tokens
from jrl.types import Batch, RoutingRecord

RECORDED = CLOCKS | {
    *("prompts", "kl", "slot_use", "skipped_steps", "rollbacks", "staleness", "staleness_max"),
    *("reward_failures", "reward_timeouts", "reward_errors", "env_failures"),
    *("tree_shared_tokens", "rounds", "groups_kept", "groups_missing", "groups_redrawn"),
    *("search_nodes", "search_leaves", "read_tokens", "reread_tokens", "replayed"),
}
"""Metrics that a record has beside those of the training step, in runs of one kind or another."""


def check_metric_names(run: build.Run) -> None:
    """Raises UserError for a metric in [watch] or checkpoint.best that no record will have.

    The step is traced for it, not compiled. Environments and judged data have metrics of their own:
    there a wrong name is found at the first step.

    Args:
      run: from ``build.setup``.
    """
    _check_evaluations(run)
    config = run.config
    best = (config.checkpoint.best or "").removeprefix("-")
    asked = [("watch", name) for name in config.watch]
    asked += [("checkpoint.best", best)] if best else []
    parts = {f"reward/{name}" for name in run.rewards.weights}
    open_names = [
        (key, name)
        for key, name in asked
        if not name.startswith("eval/") and name not in RECORDED | parts
    ]
    own = isinstance(config.data, EnvData | EpisodeData | RecordedData)
    if not open_names or own or run.data.judged:
        return
    step, (make, _) = programs.make_train_step(run), programs.state_layout(run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen = {name: jax.eval_shape(net.init, key) for name, net in run.networks.items()}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)
    with jax.set_mesh(run.mesh):
        state = jax.eval_shape(make, key, params, frozen)
        _, metrics = jax.eval_shape(step, state, abstract_batch(run), run.sampling_params)
    known = {name for name, value in metrics.items() if not value.shape} | RECORDED | parts
    for key, name in open_names:
        if name not in known:
            raise unknown_choice(key, name, known)


def asked_of_evaluations(config: Config) -> list[tuple[str, str]]:
    """(key, metric without "eval/") of what [watch] and retention read of evaluations."""
    best = (config.checkpoint.best or "").removeprefix("-")
    asked = [("watch", name) for name, limit in config.watch.items() if limit.action != "none"]
    asked += [("checkpoint.best", best)]
    return [(key, n.removeprefix("eval/")) for key, n in asked if n.startswith("eval/")]


def _check_evaluations(run: build.Run) -> None:
    """Raises UserError for a metric of evaluations that none will have."""
    config, data = run.config, run.data
    asked = asked_of_evaluations(config)
    if asked and run.task is None and not data.prompts.get("eval") and "eval" not in data.judged:
        key, name = asked[0]
        raise UserError(f"{key} = 'eval/{name}' needs held-out prompts; set data.eval")
    names = evaluation_names(run)
    if names is None or data.judged:
        return  # known with the first evaluation, which comes before the first step
    for key, name in asked:
        if name not in names:
            raise unknown_choice(key, f"eval/{name}", (f"eval/{each}" for each in names))


def abstract_batch(run: build.Run) -> Batch:
    """The shapes of a training batch: complete groups, completions of full length."""
    config, method = run.config, run.method
    draw = method.draw
    n, p = config.train.prompts, run.width
    t = max_new_tokens(config, run.task)
    own = config.sampling.group if draw.own else 0
    g = own + (draw.baseline_members if own else 0) + draw.demonstrations
    rows = batch_sharding(run.mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    stats = {"external": array(jnp.float32, n, g, t)}
    if draw.own:
        stats["sampler_logprobs"] = array(jnp.float32, n, g, t)
    ids = {"prompt": array(jnp.int32, n)}
    if isinstance(run.task, Env):
        ids |= {name: array(jnp.int32, n, g, t) for name in ("turn", "step", "state")}
        ids["stratum"] = array(jnp.int32, n, g)
        stats["paid"] = array(jnp.float32, n, g, t)
    parts = len(run.rewards.weights)
    everywhere: Any = replicated(run.mesh)
    weights: Any = jax.ShapeDtypeStruct((parts,), jnp.float32, sharding=everywhere)
    return Batch(
        prompt_tokens=array(jnp.int32, n, p),
        prompt_lengths=array(jnp.int32, n),
        tokens=array(jnp.int32, n, g, t),
        lengths=array(jnp.int32, n, g),
        mask=array(bool, n, g, t),
        rewards=array(jnp.float32, n, g, parts),
        reward_weights=weights,
        members=array(bool, n, g),
        baseline=array(bool, n, g),
        truncated=array(bool, n, g),
        stats=stats,
        ids=ids,
        routing=_abstract_routing(run.shape, array, (n, p), (n, g, t))
        if config.replays_routing
        else None,
    )


def _abstract_routing(
    model: ModelConfig, array: Callable[..., Any], prompts: Any, tokens: Any
) -> RoutingRecord:
    """The shapes of a record for prompts [N, P] and completions [N, G, T]."""
    each = sum(model.sparse), model.experts_per_token
    dtype = record_dtype(model)
    return RoutingRecord(array(dtype, *prompts, *each), array(dtype, *tokens, *each))
