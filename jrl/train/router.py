"""The routers of a policy with experts, in a training step: their losses and their numbers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.config import Config
from jrl.models.moe import balance_loss, z_loss
from jrl.setup.objective import common_coefficients
from jrl.types import Array, Batch, Stats


class RouterTraining(NamedTuple):
    """Settings for training the routers of a policy with experts.

    Attributes:
      balance: what ``moe.balance_loss`` is multiplied by; its shares of visits are those of a
        microbatch, as in the papers.
      z: what ``moe.z_loss`` is multiplied by.
      replay: whether tokens go to the experts that the sampler sent them to.
    """

    balance: float = 0.0
    z: float = 0.0
    replay: bool = False


ROUTER = RouterTraining()
"""Routers without losses of their own."""


def routed_tokens(batch: Batch, *, shared: bool = True) -> Array:
    """[] float32: tokens that go through the network.

    Args:
      batch: whole.
      shared: whether the members of a group share their prompt, which then counts once, without its
        last token; else each reads all of it.
    """
    if not shared:
        return (batch.prompt_lengths[:, None] + batch.lengths).sum().astype(jnp.float32)
    prompts = (batch.prompt_lengths - 1).sum()
    if batch.packing is not None:
        return (prompts + (batch.packing.members >= 0).sum()).astype(jnp.float32)
    return (prompts + batch.lengths.sum()).astype(jnp.float32)


def router_loss(losses: RouterTraining, sums: Stats, tokens: Array) -> tuple[Array, Stats]:
    """The losses of a microbatch, as its share of the whole batch, and the sums to report.

    Args:
      losses: their coefficients.
      sums: from ``moe.router_sums``, each with a leading axis of layers.
      tokens: [] float32, of the whole batch.

    Returns:
      [] float32, and the sums without gradient, with that of the balance among them.
    """
    balance = balance_loss(sums)
    total = losses.balance * balance + losses.z * z_loss(sums)
    return total / jnp.maximum(tokens, 1), jax.lax.stop_gradient(sums | {"router_balance": balance})


def router_pairs(sums: Stats) -> dict[str, tuple[Array, Array]]:
    """The routers' metrics as (sum, count).

    Args:
      sums: of an update, from ``router_loss``; {} for a policy without experts.

    Returns:
      router_entropy (nats a token, mean over layers), router_z (squared nats), router_balance (the
      balance loss; 1 when even), router_max_load (visits of the busiest expert of a layer over
      those of the mean one, mean over layers), router_dropped (the fraction of visits that no
      expert was given) and router_moved (the fraction that the router alone would not have chosen).
    """
    if not sums:
        return {}
    visits, tokens = sums["router_visits"], sums["router_tokens"]
    layers, each = tokens.sum(), tokens[0]
    busiest = visits.max(-1) / jnp.maximum(visits.mean(-1), 1e-9)
    requests = sums["router_asked"].sum()
    return {
        "router_entropy": (sums["router_entropy"].sum(), layers),
        "router_z": (sums["router_z"].sum(), layers),
        "router_balance": (sums["router_balance"], each),
        "router_max_load": (busiest.mean(), jnp.float32(1)),
        "router_dropped": (requests - visits.sum(), requests),
        "router_moved": (sums["router_moved"].sum(), requests),
    }


def router_training(config: Config) -> RouterTraining:
    """Settings for training the routers of a model with experts."""
    common = common_coefficients(config)
    coefficients = common.get("router_balance", 0.0), common.get("router_z", 0.0)
    return RouterTraining(*coefficients, replay=config.replays_routing)
