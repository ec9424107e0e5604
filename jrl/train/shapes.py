"""The shapes of a training batch, before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.mesh import batch_sharding, replicated
from jrl.models.config import ModelConfig
from jrl.models.routing import record_dtype
from jrl.sampling.params import SamplingParams
from jrl.setup.run import Run
from jrl.types import Batch, RoutingRecord


def abstract_batch(run: Run) -> Batch:
    """The shapes of a training batch: complete groups, completions of full length."""
    config, p = run.config, run.width
    n, g, t = run.kind.batch_shape(run.method)
    rows = batch_sharding(run.mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    labels, axes = run.kind.labels(run.method), (n, g, t)
    ids = {x: array(jnp.int32, *axes[:k]) for x, k in {"prompt": 1, **labels.ids}.items()}
    drawn = {"sampler_logprobs": 3} if run.kind.has_logprobs(run.method) else {}
    names = {"external": 3, **drawn, **labels.stats}
    stats = {x: array(jnp.float32, *axes[:k]) for x, k in names.items()}
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


def abstract_parameters(run: Run) -> SamplingParams:
    """The shapes of the run's sampling parameters, as the training step is given them."""
    where = replicated(run.mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(lambda: run.sampling_params),
    )


def _abstract_routing(
    model: ModelConfig, array: Callable[..., Any], prompts: Any, tokens: Any
) -> RoutingRecord:
    """The shapes of a record for prompts [N, P] and completions [N, G, T]."""
    each = sum(model.sparse), model.experts_per_token
    dtype = record_dtype(model)
    return RoutingRecord(array(dtype, *prompts, *each), array(dtype, *tokens, *each))
