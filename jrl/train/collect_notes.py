"""``CollectState`` as a checkpoint of a run on the host holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.methods.stores import HostStore
from jrl.train.plan import CollectState


def packed(collected: CollectState) -> dict[str, Any]:
    """Arrays by name: each leaf of the states under its number, stores with rows end to end."""
    leaves, _ = jax.tree.flatten(collected, is_leaf=_is_store)
    notes = {str(i): x.packed() if _is_store(x) else np.asarray(x) for i, x in enumerate(leaves)}
    return notes | ({"added": list(collected.added)} if collected.added else {})


def unpacked(like: CollectState, notes: Mapping[str, Any]) -> CollectState:
    """What ``packed`` was given; ``like`` is what the run began with."""
    leaves, structure = jax.tree.flatten(like, is_leaf=_is_store)
    values = [notes[str(i)] for i in range(len(leaves))]
    made = [_like(x, v) for x, v in zip(leaves, values, strict=True)]
    collected: CollectState = jax.tree.unflatten(structure, made)
    return collected.replace(added=tuple(notes.get("added", ())))


def _like(x: Any, value: Any) -> Any:
    """What a checkpoint says, of the kind that the run began with."""
    if _is_store(x):
        return x.unpacked(value)
    return jnp.asarray(value) if isinstance(x, jax.Array) else np.asarray(value)


def _is_store(x: Any) -> bool:
    return isinstance(x, HostStore)
