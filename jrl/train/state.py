"""The training state: made, placed on a mesh, and described without being made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.errors import UserError
from jrl.mesh import replicated, tree_shardings
from jrl.methods.schedule import ONCE, Schedule, is_rate_schedule
from jrl.types import NOTHING, Array, Network, Objective, Params, TrainState, ValueNetwork

STACKED = ("params", "opt_state", "frozen", "method")
"""Fields of a state that have a leading axis of policies, where several are trained."""
START = "start"
"""The trained part that a run with a ``split`` began with, among its frozen trees: with the base it
is the reference. Runs whose trained part is drawn have none, for that changes nothing at first."""
N = TypeVar("N", Network, ValueNetwork)


def init_state(
    key: Array,
    params: Params | None = None,
    *,
    network: Network,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    value: ValueNetwork | None = None,
    frozen: Mapping[str, Params] = NOTHING,
    schedule: Schedule = ONCE,
) -> TrainState:
    """A state at step 0.

    Args:
      key: the run's root key; consumed.
      params: the policy's tree, from a checkpoint; drawn at random when None. Of a network with a
        ``split`` the base alone will do; its trained part is then drawn. Several policies all
        begin with it.
      network: the policy.
      objective: says whether a reference policy is held, and what state of its own.
      optimizer: any optax transformation.
      value: the value network, for objectives that need values.
      frozen: policies to be read and not trained, by name; those that nothing reads are left out.
        "ref" and the copies of the schedule, where they are not given, start as copies of the
        policy; for "ref" of a network with a ``split`` that is the base, which is there anyway, and
        where ``params`` have a trained part a copy of that, ``START``.
      schedule: says which copies of the policy are held besides.

    Returns:
      The state.

    Raises:
      UserError: the objective needs a frozen policy that is not given.
    """
    check_frozen(objective, {*frozen, *schedule.frozen})
    derived, stack = network.extras.derived, network.extras.stack
    if derived is not None and stack is not None:
        options: dict[str, Any] = {"objective": objective, "optimizer": optimizer, "value": value}
        options |= {"frozen": frozen, "schedule": schedule}
        each = init_state(key, params, network=derived.network, **options)
        return each.replace(**{n: stacked(getattr(each, n), stack.policies) for n in STACKED})
    root, policy = init_policy(key, params, network=network)
    frozen_params, names = {}, frozen_names(objective, schedule)
    if network.extras.split is not None:
        policy, frozen_params["base"] = network.extras.split.split(policy)
        if "ref" in names - set(frozen):
            names = names - {"ref"}
            if params is not None and network.extras.split.split(params)[0]:
                frozen_params[START] = jax.tree.map(jnp.copy, policy)
    trained = {"policy": policy}
    if value is not None:
        trained["value"] = value.init(jax.random.split(key, 3)[1])
    # Buffers of their own: the state is donated, and a buffer cannot be donated twice.
    for name in sorted(names):
        frozen_params[name] = jax.tree.map(jnp.copy, frozen.get(name, policy))
    return TrainState(
        step=jnp.int32(0),
        params=trained,
        opt_state=optimizer.init(trained),
        frozen=frozen_params,
        method=objective.init(),
        key=root,
    )


def init_policy(key: Array, params: Params | None = None, *, network: Network) -> Any:
    """The root key's data and the policy's tree of a state at step 0; see ``init_state``."""
    policy_key, _, root = jax.random.split(key, 3)
    # A copy: the state is donated, and the caller's arrays must outlive it.
    policy = network.init(policy_key) if params is None else jax.tree.map(jnp.copy, params)
    if params is not None:
        policy = _started(policy_key, policy, network)
    return jax.random.key_data(root), policy


def _started(key: Array, params: Params, network: Network) -> Params:
    """A network's parameters from those of a checkpoint, through all that it was derived from."""
    derived = network.extras.derived
    if derived is None or (derived.split is not None and derived.split.split(params)[0]):
        return params
    return derived.start(key, _started(key, params, derived.network))


def stacked(tree: Any, count: int) -> Any:
    """Every array ``count`` times, along a new first axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)


def stacked_axes(axes: Any) -> Any:
    """The logical axes of ``stacked`` parameters."""
    return jax.tree.map(lambda names: (None, *names), axes, is_leaf=lambda x: type(x) is tuple)


def frozen_names(objective: Objective, schedule: Schedule) -> frozenset[str]:
    """Names of the policies that a state holds beside the one that is trained."""
    return objective.frozen | (schedule.frozen - {"ref"})


def check_frozen(objective: Objective, available: Collection[str], method: str = "") -> None:
    """Raises UserError when an objective reads a frozen policy that nobody gives.

    Args:
      objective: what to train with.
      available: names of those that are there; the reference need not be among them.
      method: the method's name, for the message.
    """
    for name in sorted(objective.frozen - {"ref", *available}):
        reader = f"method = {method!r}" if method else "the objective"
        key = f"frozen.{name}"
        raise UserError(
            f"{reader} reads a frozen policy {name!r} that is not there; set {key} = DIR, a "
            f"checkpoint or a run directory (in a script: init_state(frozen={{{name!r}: params}}))"
        )


def state_shardings(
    state: TrainState,
    mesh: Mesh,
    *,
    network: Network,
    value: ValueNetwork | None = None,
    networks: Mapping[str, Network] = NOTHING,
) -> TrainState:
    """Shardings of a state's leaves on a mesh; optimiser moments have those of their weights.

    Args:
      state: a state or its shapes (``jax.eval_shape`` of ``init_state``).
      mesh: from ``mesh.make_mesh``.
      network: the policy.
      value: the value network, if the state has one.
      networks: those of frozen policies that are not like the policy, by name.

    Returns:
      A tree like ``state`` of ``NamedSharding``.

    Raises:
      UserError: a weight that the mesh does not divide.
    """
    axes, frozen_shardings = {"policy": network.axes()}, {}
    if network.extras.stack is not None:
        networks = {name: _with_stacked_axes(other) for name, other in networks.items()}
        value = None if value is None else _with_stacked_axes(value)
    if network.extras.split is not None:
        axes["policy"], base = network.extras.split.split(network.axes())
        frozen_shardings["base"] = tree_shardings(mesh, base, state.frozen["base"])
        if START in state.frozen:
            frozen_shardings[START] = tree_shardings(mesh, axes["policy"], state.frozen[START])
    if value is not None:
        axes["value"] = value.axes()
    params = tree_shardings(mesh, axes, state.params)
    everywhere: Any = replicated(mesh)
    for name in state.frozen.keys() - frozen_shardings.keys():
        other = networks.get(name, network).axes()
        frozen_shardings[name] = tree_shardings(mesh, other, state.frozen[name])
    return TrainState(
        step=everywhere,
        params=params,
        opt_state=_like_params(state.opt_state, state.params, params, everywhere),
        frozen=frozen_shardings,
        method=jax.tree.map(lambda _: everywhere, state.method),
        key=everywhere,
    )


def _with_stacked_axes(network: N) -> N:
    return network._replace(axes=lambda: stacked_axes(network.axes()))


def _like_params(opt_state: Any, params: Params, shardings: Any, otherwise: Any) -> Any:
    """Shardings of an optimiser state: a subtree shaped like the parameters lies like them."""
    shapes = [x.shape for x in jax.tree.leaves(params)]
    structure: Any = jax.tree.structure(params)

    def is_params(node: Any) -> bool:
        if jax.tree.structure(node) != structure:
            return False
        return [getattr(x, "shape", None) for x in jax.tree.leaves(node)] == shapes

    return jax.tree.map(
        lambda node: shardings if is_params(node) else jax.tree.map(lambda _: otherwise, node),
        opt_state,
        is_leaf=is_params,
    )


def rolled_back(good: TrainState, state: TrainState) -> TrainState:
    """An earlier state that continues where a later one stands: its step and its schedule."""
    schedules = jax.tree.leaves(state.opt_state, is_leaf=is_rate_schedule)
    schedule_states = iter([node for node in schedules if is_rate_schedule(node)])
    opt_state = jax.tree.map(
        lambda node: next(schedule_states) if is_rate_schedule(node) else node,
        good.opt_state,
        is_leaf=is_rate_schedule,
    )
    return good.replace(step=state.step, opt_state=opt_state)


def free_memory(state: TrainState) -> None:
    """Gives back what a state holds on the devices, all but what ``rolled_back`` reads and keys."""
    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_rate_schedule)
    moments = [node for node in nodes if not is_rate_schedule(node)]
    for leaf in jax.tree.leaves((state.params, state.frozen, state.method, moments)):
        leaf.delete()
