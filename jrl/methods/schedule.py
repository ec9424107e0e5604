"""Use of a batch, and changes of the training state besides the optimiser's.

    Schedule(epochs=2, after=(copies("ref", every(100)), fresh_moments(every(100))))

An ``After`` is a function of the state with a rule of when it is due. It runs before or after a
training step, or after an optimiser update, inside the compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrl.errors import UserError
from jrl.types import Array, Batch, Network, Objective, TrainState

When = Literal["before", "update", "step"]


class AfterView(NamedTuple):
    """Context of an ``After``, besides the state.

    Attributes:
      optimizer: the run's. Of several policies its state has a leading axis of them, as all trees
        of the state have.
      network: the policy.
      before: the state before the step or the update.
      batch: what is trained on, or a minibatch of it after an update.
    """

    optimizer: optax.GradientTransformation
    network: Network
    before: TrainState
    batch: Batch


class After(NamedTuple):
    """A change of the training state besides the optimiser's updates.

    Attributes:
      apply: (state, view) -> state, a tree of the same shapes. After an update only ``params`` and
        ``opt_state`` may change.
      due: ([] int32) -> [] bool: of training steps done, which before a step leaves that one out;
        of optimiser updates done where ``on`` is "update".
      on: "before" or "step" (after it), of a training step; "update", after one of the optimiser's.
      frozen: copies of the policy that it reads or writes, by name, in ``TrainState.frozen``. They
        begin as the policy does. "ref" is there where the objective reads it.
    """

    apply: Callable[[TrainState, AfterView], TrainState]
    due: Callable[[Array], Any]
    on: When = "step"
    frozen: frozenset[str] = frozenset()


class Ahead(NamedTuple):
    """Parameters at which the gradient of each update is taken, instead of those that it changes.

        theta' = theta + size (gradient at theta of the objective's loss over the same minibatch)

    Attributes:
      objective: another one than the method's; its advantage edits the batch for itself alone. Its
        state is that of a fresh run in each step, and its statistics are those being trained.
      size: above 0 goes up its loss, below 0 down.
    """

    objective: Objective
    size: float


class Schedule(NamedTuple):
    """Use of a batch.

    Attributes:
      epochs: passes over a batch before the next one is drawn.
      after: changes of the state beside the updates, in order.
      ahead: where gradients are taken; None for at the parameters that the update changes.
    """

    epochs: int = 1
    after: tuple[After, ...] = ()
    ahead: Ahead | None = None

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the copies of the policy that ``after`` reads or writes."""
        return frozenset().union(*(each.frozen for each in self.after))


ONCE = Schedule()
"""A batch is gone through once, and the updates alone change the state."""


def run_due(
    after: Sequence[After], on: When, state: TrainState, count: Array, view: AfterView
) -> TrainState:
    """The state after the changes of one kind that are due.

    Args:
      after: of a schedule.
      on: which of them run.
      state: as the step left it so far.
      count: [] int32, what ``After.due`` is asked.
      view: what they read.
    """
    for each in after:
        if each.on == on:
            due, changed = each.due(count), each.apply(state, view)
            # Selected, not branched, so that the step stays one program; a leaf that is the same
            # array costs nothing.
            state = jax.tree.map(
                lambda new, old, due=due: old if new is old else jnp.where(due, new, old),
                changed,
                state,
            )
    return state


# ---------------------------------------------------------------- when


def every(steps: int) -> Callable[[Array], Any]:
    """True after each ``steps`` steps, at least 1, and not before the first.

    >>> [bool(every(2)(jnp.int32(done))) for done in range(5)]
    [False, False, True, False, True]
    """
    return lambda done: (done > 0) & (done % steps == 0)


def at(step: int) -> Callable[[Array], Any]:
    """True once, when ``step`` steps are done."""
    return lambda done: done == step


# ---------------------------------------------------------------- what


def copies(name: str, due: Callable[[Array], Any]) -> After:
    """A frozen policy that becomes a copy of the policy whenever it is due."""

    def apply(state: TrainState, view: AfterView) -> TrainState:
        return _with_frozen(state, name, lambda old, new: new)

    return After(apply, due, frozen=frozenset({name}))


def average(name: str, decay: Any) -> After:
    """A frozen policy that is an exponential moving average of the policy.

    Args:
      name: of the frozen policy.
      decay: in [0, 1], the share of it that stays after every step; the rest is the policy. The
        mean is taken in float32.
    """

    def mix(old: Array, new: Array) -> Array:
        old32, new32 = old.astype(jnp.float32), new.astype(jnp.float32)
        return (decay * old32 + (1 - decay) * new32).astype(old.dtype)

    def apply(state: TrainState, view: AfterView) -> TrainState:
        return _with_frozen(state, name, mix)

    return After(apply, every(1), frozen=frozenset({name}))


def restart(name: str, due: Callable[[Array], Any]) -> After:
    """Restarts the policy from a frozen one, with fresh moments, before a step that is due."""

    def apply(state: TrainState, view: AfterView) -> TrainState:
        state = state.replace(params=state.params | {"policy": state.frozen[name]})
        return _with_fresh_moments(state, view)

    return After(apply, due, on="before", frozen=frozenset({name}))


def fresh_moments(due: Callable[[Array], Any]) -> After:
    """Resets the optimiser's moments; the learning rate's schedule continues."""
    return After(_with_fresh_moments, due)


def refreshed(steps: int, moments: bool = False) -> tuple[After, ...]:
    """A reference that becomes a copy of the policy after each ``steps`` steps; none for 0.

    Args:
      steps: 0 for a reference that stays.
      moments: whether the optimiser's moments start anew then.
    """
    if not steps:
        return ()
    due = every(steps)
    return (copies("ref", due), fresh_moments(due)) if moments else (copies("ref", due),)


def is_rate_schedule(node: Any) -> bool:
    """Whether a node of an optimiser's state says how far its learning rate has come."""
    return isinstance(node, optax.ScaleByScheduleState)


def _with_fresh_moments(state: TrainState, view: AfterView) -> TrainState:
    opt_state = jax.tree.map(
        lambda fresh, old: old if is_rate_schedule(old) else fresh,
        view.optimizer.init(state.params),
        state.opt_state,
        is_leaf=is_rate_schedule,
    )
    return state.replace(opt_state=opt_state)


def _with_frozen(state: TrainState, name: str, mix: Callable[[Array, Array], Array]) -> TrainState:
    """The state with ``mix`` of a frozen policy and the policy; as it is without that one."""
    if name not in state.frozen:  # a reference that the objective does not read
        return state
    policy, frozen = state.params["policy"], state.frozen[name]
    if jax.tree.map(jnp.shape, policy) != jax.tree.map(jnp.shape, frozen):
        of = "the reference" if name == "ref" else f"the frozen policy {name!r}"
        raise UserError(
            f"the method copies the policy into {of}, and the given one has another shape;"
            f" leave frozen.{name} out"
        )
    return state.replace(frozen=state.frozen | {name: jax.tree.map(mix, frozen, policy)})
