"""The reference policy of a run: kept, drawn towards the policy, or replaced by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrl.errors import UserError
from jrl.types import Array, TrainState


def renew_reference(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    refresh_ref: int,
    ref_decay: float,
    reset_optimizer: bool,
) -> TrainState:
    """The state after a step, its reference drawn towards the policy or replaced by it."""
    policy, ref = state.params["policy"], state.frozen["ref"]
    renewed = refresh_ref or ref_decay != 1
    if renewed and jax.tree.map(jnp.shape, policy) != jax.tree.map(jnp.shape, ref):
        raise UserError(
            "the method renews the reference from the policy, and the reference that is given is "
            "of another shape; leave model.reference out"
        )
    if ref_decay != 1:

        def mix(old: Array, new: Array) -> Array:
            old32, new32 = old.astype(jnp.float32), new.astype(jnp.float32)
            return (ref_decay * old32 + (1 - ref_decay) * new32).astype(old.dtype)

        ref = jax.tree.map(mix, ref, policy)
    if refresh_ref:
        due = state.step % refresh_ref == 0
        ref = jax.tree.map(lambda old, new: jnp.where(due, new, old), ref, policy)
        if reset_optimizer:
            state = state.replace(opt_state=_reset(optimizer, state, due))
    return state.replace(frozen=state.frozen | {"ref": ref})


def check_renewable(refresh_ref: int, ref_decay: float) -> None:
    """Raises UserError for a method that renews a reference that is the base of adapters."""
    if refresh_ref or ref_decay != 1:
        raise UserError(
            "the method renews the reference from the policy, and with lora the reference is the "
            "policy with its adapters off, which never changes; leave lora.rank out, or choose a "
            "method whose reference stays"
        )


def _reset(optimizer: optax.GradientTransformation, state: TrainState, due: Array) -> Any:
    """The optimiser's state, fresh where ``due``; where its schedule stands is not forgotten."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def choose(fresh: Any, old: Any) -> Any:
        return old if is_schedule(old) else jnp.where(due, fresh, old)

    fresh = optimizer.init(state.params)
    return jax.tree.map(choose, fresh, state.opt_state, is_leaf=is_schedule)
