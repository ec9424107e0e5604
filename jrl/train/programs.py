"""The state of a run and its two programs on its meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.collect.device_episodes import held_out_rollout, on_device
from jrl.collect.packing import Packer
from jrl.collect.resharding import (
    ReshardedSampler,
    drawn_from_prepared,
    network_on,
    weights_program,
)
from jrl.errors import UserError
from jrl.mesh import batch_shards, placed_shapes, replicated, tree_shardings
from jrl.methods.curriculum import unchanged
from jrl.models import hf
from jrl.sampling.generate import generate
from jrl.sampling.tree import TreeShape, generate_tree
from jrl.setup.adapters import put_policy, trained_network
from jrl.setup.compiler import compiler_options
from jrl.setup.frozen import frozen_params
from jrl.setup.gather import GIB, device_memory, prepared_bytes
from jrl.setup.placement import sampler_mesh
from jrl.setup.run import Run, policy_network, sampler_of
from jrl.train.compiled import Iteration, make_iteration, shown_in_compiled
from jrl.train.reward_model import value_start
from jrl.train.router import router_training
from jrl.train.state import init_policy, init_state, state_shardings
from jrl.train.step import TrainStep, compile_step, make_step
from jrl.train.watch import skip_rule
from jrl.types import Branching, Network, Params, TrainState


def state_layout(run: Run) -> tuple[Callable[..., TrainState], TrainState]:
    """Initialiser of a state from (key, policy params or None, frozen), and the state's shardings.

    Raises:
      UserError: a weight that the mesh does not divide.
    """
    make, _, shardings = _layout(run)
    return make, shardings


def _layout(run: Run) -> tuple[Callable[..., TrainState], TrainState, TrainState]:
    """``state_layout``, with the shapes of the state between the two."""

    def make(key: jax.Array, params: Params, frozen: dict[str, Params]) -> TrainState:
        state = init_state(
            key,
            params,
            network=run.network,
            objective=run.method.objective,
            optimizer=run.optimizer,
            value=run.value,
            frozen=frozen,
            schedule=run.method.schedule,
        )
        kind, outputs = run.config.value.kind, run.method.objective.value_outputs
        starts = kind != "head" and run.config.value.path is None
        if params is None or run.value is None or not starts:
            return state
        trunk = jax.tree.map(jnp.copy, _whole(run.network, state))
        if kind == "networks":
            trunk = jax.tree.map(lambda x: jnp.broadcast_to(x, (outputs, *x.shape)), trunk)
        value = state.params["value"] | {"trunk": trunk}
        return state.replace(params=state.params | {"value": value})

    key = jax.eval_shape(lambda: jax.random.key(run.config.seed))
    frozen = {name: jax.eval_shape(net.init, key) for name, net in run.networks.items()}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)
    shapes = jax.eval_shape(make, key, params, frozen)
    shardings = state_shardings(
        shapes, run.mesh, network=run.network, value=run.value, networks=run.networks
    )
    return make, shapes, shardings


def abstract_state(run: Run) -> tuple[TrainState, TrainState]:
    """The shapes of a run's state with their shardings, and the shardings alone."""
    _, shapes, shardings = _layout(run)
    return placed_shapes(shapes, shardings), shardings


def new_state(run: Run) -> tuple[TrainState, TrainState]:
    """A state at step 0 on the run's mesh, and its shardings."""
    make, shardings = state_layout(run)
    params = run.params
    if params is not None:
        params = put_policy(run.network, params, _checkpoint_shardings(run, run.network))
    frozen = {
        name: hf.place(frozen_params(run.config, name), _checkpoint_shardings(run, network))
        for name, network in run.networks.items()
    }

    def seeded(seed: Any, params: Params, frozen: dict[str, Params]) -> TrainState:
        return make(jax.random.key(seed), params, frozen)

    # Donated, because the state copies what it is given.
    make_placed = jax.jit(
        seeded,
        out_shardings=shardings,
        donate_argnums=() if run.network.extras.own_layout else (1, 2),
        compiler_options=compiler_options(run.mesh),
    )
    state = make_placed(np.uint32(run.config.seed), params, frozen)
    if run.value is None or run.config.value.path is None:
        return state, shardings
    value = hf.place(value_start(run.config, run.mesh), shardings.params["value"])
    return state.replace(params=state.params | {"value": value}), shardings


def _checkpoint_shardings(run: Run, network: Network) -> Any:
    """Shardings of the checkpoint's weights that become a network's parameters."""
    while (derived := network.extras.derived) is not None and derived.split is None:
        network = derived.network
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return tree_shardings(run.mesh, network.axes(), shapes)


def held_bytes(tree: Any) -> float:
    """Bytes on one device of arrays or their shapes, each with where it lies."""

    def size(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return int(np.prod(shape)) * x.dtype.itemsize

    return float(sum(map(size, jax.tree.leaves(tree))))


def check_state(run: Run) -> None:
    """Raises UserError where weights and optimizer state alone are more than a device has."""
    if (limit := device_memory(run.mesh)) is None:
        return
    state = held_bytes(abstract_state(run)[0])
    if (over := state - limit) <= 0:
        return
    does = [] if run.config.lora is not None else ["lora.rank = 16"]
    if run.config.optimizer.name != "adafactor":
        does.append('optimizer.name = "adafactor"')
    if run.config.model.param_dtype == "float32":
        does.append('model.param_dtype = "bfloat16"')
    does.append("mesh.fsdp = -1 on more devices")
    raise UserError(
        f"a device would hold {state / GIB:.1f} GiB of weights and optimizer state, "
        f"{over / GIB:.1f} GiB more than its {limit / GIB:.0f} GiB; set {', '.join(does)}, or"
        " choose a smaller model"
    )


def check_resharding(run: Run) -> None:
    """Raises UserError where the sampler's copy of the weights does not fit beside the state.

    That is for a mesh of the sampler's own; without one the compiler says so.
    """
    target, limit = sampler_mesh(run.config, run.mesh), device_memory(run.mesh)
    if target is None or limit is None or run.model is None:
        return
    state = held_bytes(abstract_state(run)[0])
    copy = prepared_bytes(run.config, run.model, target)
    if (over := state + copy - limit) <= 0:
        return
    tensor, heads = target.shape["tensor"], run.model.kv_heads
    wide = [t for t in range(tensor + 1, heads + 1) if heads % t == 0 and target.size % t == 0]
    does = [f"raise sampling.mesh.tensor to {wide[-1]}"] if wide else []
    if "weights" not in run.config.sampling.in_8_bits and not run.model.experts:
        does.append("set sampling.int8 to ['weights']")
    does.append("raise mesh.fsdp, or take more or larger chips")
    raise UserError(
        f"sampling.mesh: a device would hold {copy / GIB:.1f} GiB of the sampler's weights beside "
        f"{state / GIB:.1f} GiB of the training state, {over / GIB:.1f} GiB more than its "
        f"{limit / GIB:.0f} GiB; {', '.join(does)}"
    )


def _whole(network: Network, state: TrainState) -> Params:
    """The weights of a state's policy before training, as a network of its own has them."""
    if network.extras.split is None:
        return state.params["policy"]
    return network.extras.split.thaw(state.frozen["base"])


def policy_layout(run: Run, mesh: Mesh | None = None) -> Params:
    """The shapes of the policy's weights, each with where it lies on the run's mesh or another."""
    shapes = jax.eval_shape(run.network.init, jax.random.key(0))
    return placed_shapes(shapes, tree_shardings(mesh or run.mesh, run.network.axes(), shapes))


def policy_shardings(run: Run, mesh: Mesh | None = None) -> Any:
    """Shardings of the policy's weights on the run's mesh or another; see ``policy_layout``."""
    return jax.tree.map(lambda x: x.sharding, policy_layout(run, mesh))


def new_policy(run: Run) -> tuple[jax.Array, Params]:
    """The root key and the policy of ``new_state``, without the rest of a state."""
    where, params = policy_shardings(run), run.params
    if params is not None:
        params = put_policy(run.network, params, _checkpoint_shardings(run, run.network))

    def make(seed: Any, params: Params) -> Any:
        return init_policy(jax.random.key(seed), params, network=run.network)

    program = jax.jit(
        make,
        out_shardings=(replicated(run.mesh), where),
        donate_argnums=() if run.network.extras.own_layout else 1,
        compiler_options=compiler_options(run.mesh),
    )
    return program(np.uint32(run.config.seed), params)


def train_sampler(run: Run) -> Any:
    """Program 1 of a training step, compiled; None where the method draws nothing from text."""
    if not run.kind.draws(run.method):
        return None
    draw = run.method.draw
    group = run.config.sampling.group if draw.samples else 0
    return sampler_program(run, split="train", group=group, tree=draw.tree)


def sampler_program(
    run: Run,
    *,
    split: str,
    group: int,
    tree: Branching | None = None,
) -> Any:
    """Program 1, compiled: ``task_rollout`` for a task, episodes, or ``generate`` for text."""
    sampling, sampling_mesh = run.config.sampling, sampler_mesh(run.config, run.mesh)
    network = (
        sampler_of(run, network_on(run, sampling_mesh)) if split == "train" else evaluated(run)
    )
    if (task := run.kind.task) is not None:
        weights = run.rewards.weights
        named = {name: weights[name] for name in run.rewards.given_by("data")}
        parts = run.kind.eval_parts if split == "eval" else named
        draw: Any = partial(
            on_device(task).rollout if split == "train" else held_out_rollout,
            task=task,
            parts=parts,
            slots=sampling.slots if split == "train" else 0,
        )
        # Processes that keep samples must see all of them, and so must an evaluation.
        whole = split == "eval" or jax.process_count() > 1
        return compiled_draw(run, draw, network, whole=whole, split=split)
    draw = partial(
        generate if tree is None else partial(generate_tree, tree=TreeShape(tree, group)),
        max_new_tokens=run.kind.new_tokens,
        stop_tokens=run.tokenizer.stop_ids,
        slots=sampling.slots,
    )
    # Replicated, because every host judges a share of the text.
    return compiled_draw(run, draw, network, whole=True, split=split)


def compiled_draw(run: Run, draw: Any, network: Network, *, whole: bool, split: str) -> Any:
    """A program that draws, compiled for the mesh that it draws on.

    Args:
      run: the run.
      draw: (key, policy params, ..., *, network) -> what is drawn.
      network: the policy as it samples there.
      whole: whether every device gets all of the result.
      split: "train" or "eval".
    """
    mesh = drawing_mesh(run, split)
    where = replicated(mesh) if whole else None
    options = compiler_options(mesh)
    if sampler_mesh(run.config, run.mesh) is None:
        draw = partial(draw, network=network)
        return jax.jit(draw, out_shardings=where, compiler_options=options)
    program = jax.jit(
        partial(draw, network=drawn_from_prepared(network)),
        out_shardings=replicated(mesh),
        compiler_options=options,
    )
    return ReshardedSampler(weights_program(run, network, mesh), program, mesh, run.mesh)


def as_evaluated(run: Run) -> Run:
    """The run with its policy as it is evaluated: with activations of ``eval.dtype``."""
    dtype, model = run.config.eval.dtype, run.model
    if dtype is None or model is None or dtype == model.dtype:
        return run
    model = dataclasses.replace(model, dtype=dtype)
    network = trained_network(run.config, model, policy_network(run.config, model, run.mesh))
    return run._replace(model=model, network=run.method.network(network))


def evaluated(run: Run) -> Network:
    """The policy as it is evaluated, on the mesh that it samples on."""
    return network_on(run, sampler_mesh(run.config, run.mesh))


def drawing_mesh(run: Run, split: str = "train") -> Mesh:
    """The mesh that samples completions of a split."""
    rollout_mesh = run.rollout_mesh if split == "train" else None
    return rollout_mesh or sampler_mesh(run.config, run.mesh) or run.mesh


def train_program(run: Run, shardings: TrainState) -> TrainStep:
    """Program 2, compiled."""
    return compile_step(make_train_step(run, shown_groups(run)), shardings, run.mesh)


def shown_groups(run: Run) -> int:
    """Complete groups of a batch for samples.jsonl: ``LogTable.MIN_MEMBERS`` members or more."""
    draw, group = run.method.draw, run.config.sampling.group
    if not run.kind.sampled:
        return 0
    curriculum = run.method.curriculum
    if curriculum is not None and curriculum.update is not unchanged:  # it learns from all of them
        return run.method.batch_groups(run.config.train.prompts)
    if not run.config.log.samples_every:
        return 0
    members = (group if draw.samples else 0) + draw.baseline_members + draw.demonstrations
    return min(-(-run.config.log.MIN_MEMBERS // members), run.config.train.prompts)


def packer(run: Run) -> Packer | None:
    """Packer of completions into rows; None unless ``train.mode`` is packed."""
    if run.config.train.mode != "packed":
        return None
    return Packer(run.config.train.microbatches, batch_shards(run.mesh))


def make_train_step(run: Run, shown: int = 0) -> TrainStep:
    """Program 2 as a pure function; see ``make_step`` for ``shown``."""
    train = run.config.train
    return make_step(
        network=run.network,
        objective=run.method.objective,
        optimizer=run.optimizer,
        value=run.value,
        networks=run.networks,
        minibatches=train.minibatches,
        microbatches=train.microbatches,
        router=router_training(run.config),
        skip=skip_rule(run.config.watch),
        shown=shown,
        schedule=run.method.schedule,
    )


def make_train_iteration(run: Run) -> Iteration:
    """All five hops of a run on a task as a pure function, for compiled runs.

    Raises:
      UserError: the method has work for the host between the two programs.
    """
    task: Any = run.kind.task
    return make_iteration(
        make_train_step(run, shown_in_compiled(run.method, run.config.train.prompts)),
        method=run.method,
        task=task,
        network=run.network,
        sampler=sampler_of(run),
        weights=run.rewards.weights,
        combined=run.rewards.combined,
        prompts=run.config.train.prompts,
        group=run.config.sampling.group,
        slots=run.config.sampling.slots,
        accuracy_column=run.rewards.accuracy_column,
    )
