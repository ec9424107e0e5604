"""What a run would need on a TPU slice, found by compiling its programs for it.

XLA compiles the real sampler and the real training step for the chips asked for; no weights are
made and no TPU is touched. From what it compiled come bytes per chip, operations, collectives by
kind and mesh axis, and the time that the chip's figures allow.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.config import Config, check_batch, from_table
from jrl.errors import UserError
from jrl.mesh import RULES, batch_sharding, batch_shards, make_mesh, replicated
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.kernels import check_attention_on_mesh
from jrl.models.routing import record_dtype
from jrl.models.transformer import count_params
from jrl.models.weights import WeightSpec
from jrl.models.weights import weights as weight_table
from jrl.sampling.engine import check_fits
from jrl.train import setup as build
from jrl.train.adapters import trained_network
from jrl.train.checks import check_experts, check_model_on_mesh
from jrl.train.chips import HOP_SECONDS, Topology, axis_bandwidth, compile_devices, larger
from jrl.train.hlo import Cost, program_costs
from jrl.train.optimizer import make_optimizer
from jrl.train.policies import frozen_directories, run_shape, run_task
from jrl.train.reward_model import VALUES
from jrl.types import Batch, RoutingRecord, TrainState

GIB = 1 << 30


class _Ids(NamedTuple):
    """Stands for a tokenizer. Nothing stops early, so that every completion has its full length."""

    stop_ids: tuple[int, ...] = ()


class Program(NamedTuple):
    """One compiled program on one chip.

    Attributes:
      bytes_per_chip: what lies in the chip's memory while it runs, by what it is; "total" is the
        sum. "prepared" are the weights as the sampler reads them. Parts that could not be told
        apart are absent.
      fits: whether the total is within the chip's memory.
      flops: operations of a chip; None where XLA gave up for want of memory, as below.
      hbm_bytes: moved between memory and the chip's units.
      collective_bytes: bytes that a chip sends, by kind and mesh axes, such as "all-gather/fsdp".
      roofline_seconds: no run is faster on chips with these figures.
      bound: what that time is spent on: "compute", "memory" and "network", seconds each.
      compile_seconds: what compiling took here.
    """

    bytes_per_chip: dict[str, float]
    fits: bool
    flops: float | None
    hbm_bytes: float | None
    collective_bytes: dict[str, float] | None
    roofline_seconds: float | None
    bound: dict[str, float] | None
    compile_seconds: float


class Plan(NamedTuple):
    """A run on a topology.

    Attributes:
      topology: the slices.
      mesh: devices along each axis.
      programs: "sampler" (absent where nothing is drawn) and "train_step".
      fits: whether all programs fit.
      remedies: what would make it fit; empty when it does.
      parameters: numbers in the policy.
      tokens: completion tokens of a step, at most.
      layers: those of the programs that were compiled, where the numbers come from a line through
        shallower ones; empty where the run's own programs were.
      rollout_mesh: of the sampler's devices where they are others; None where they are the same.
      move_seconds: what the weights' way to those devices takes.
    """

    topology: Topology
    mesh: dict[str, int]
    programs: dict[str, Program]
    fits: bool
    remedies: list[str]
    parameters: int
    tokens: int
    layers: tuple[int, ...] = ()
    rollout_mesh: dict[str, int] | None = None
    move_seconds: float = 0.0

    @property
    def step_seconds(self) -> float | None:
        """The two programs one after the other, or side by side; None where one is not known."""
        times = [p.roofline_seconds for p in self.programs.values()]
        together = sum if self.rollout_mesh is None else max
        known = [t for t in times if t is not None]
        return None if None in times else float(together(known)) + self.move_seconds


def _mesh(config: Config, topology: Topology) -> jax.sharding.Mesh:
    table = config.mesh
    return make_mesh(table.axes, compile_devices(topology), slices=table.slices)


def abstract_run(config: Config, mesh: jax.sharding.Mesh) -> build.Run:
    """A run without data, tokenizer or weights: what its two programs are made of.

    Sizes come from ``model.config``, which need no task, or from the checkpoint's config.json; the
    prompts' width is the task's, or ``data.max_prompt_tokens``.

    Raises:
      UserError: sizes are missing, or something does not divide over the mesh.
    """
    task = run_task(config)
    check_batch(config, batch_shards(mesh))
    model = _shape(config, task)
    method = build._method(config, task)
    check_experts(config, model, method)
    network = trained_network(config, model, build.policy_network(config, model))
    if extra := frozen_directories(config):
        raise UserError(
            f"frozen policies of other sizes ({', '.join(extra)}) are not planned for; remove them"
        )
    width = task.prompt_tokens if task else -(-config.data.max_prompt_tokens // 16) * 16
    check_fits(network, width, build._max_new_tokens(config, task))
    check_model_on_mesh(mesh, model, width, build._max_new_tokens(config, task))
    check_attention_on_mesh(mesh, model, config.model.attention)
    epochs = config.train.epochs or method.schedule.epochs
    optimizer = make_optimizer(
        config.optimizer, config.train.steps, epochs * config.train.minibatches
    )
    return build.Run(
        config=config,
        mesh=mesh,
        model=model,
        network=network,
        value=VALUES[config.value.kind](network) if method.value else None,
        networks={},
        tokenizer=_Ids(),
        task=task,
        prompts={},
        judged={},
        data_counts={},
        width=width,
        method=method,
        optimizer=optimizer(config.optimizer.learning_rate),
        law=build._law(config, model.vocab_size),
        weights=build._weights(config, task),
        judge="",
        reward_model=None,
        epochs=epochs,
        params=None,
    )


def _shape(config: Config, task: Any) -> ModelConfig:
    choice = config.model
    types: dict[str, Any] = {"dtype": choice.dtype, "param_dtype": choice.param_dtype}
    if choice.path is not None:
        hf.read_config(Path(choice.path))
    if task is not None or choice.path is not None:
        return run_shape(config, task)
    if choice.config is None:
        raise UserError(
            "model.path and model.config are both missing; a plan needs the sizes of the model"
        )
    return from_table("model.config", ModelConfig, types | choice.config)


# ---------------------------------------------------------------- the two programs, lowered


def lower_sampler(run: build.Run) -> Any:
    """Program 1 of a training step, traced for the run's mesh; None where nothing is drawn."""
    program = build.train_sampler(run)
    if program is None:
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    policy, law = build.policy_layout(run), jax.eval_shape(lambda: run.law)
    n = run.config.train.prompts
    step, ids = _int(), _int(n)
    if run.task is not None:
        return _lower(run, program, key, policy, step, ids, law=law)
    prompts, lengths = _int(n, run.width), _int(n)
    return _lower(run, program, key, policy, prompts, lengths, law, step, ids)


def lower_step(run: build.Run) -> Any:
    """Program 2, traced for the run's mesh."""
    state, shardings = abstract_state(run)
    law = jax.eval_shape(lambda: run.law)
    program = build.train_program(run, shardings)
    return _lower(run, program, state, abstract_batch(run), law)


def _lower(run: build.Run, program: Any, *args: Any, **kwargs: Any) -> Any:
    with jax.set_mesh(run.mesh):
        return program.lower(*args, **kwargs)


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_state(run: build.Run) -> tuple[TrainState, TrainState]:
    """The shapes of a run's state, each with where it lies, and those places alone."""
    make, shardings = build.state_layout(run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(make, key, None, {})
    place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(place, shapes, shardings), shardings


def abstract_batch(run: build.Run) -> Batch:
    """The shapes of a training batch: every group whole, every completion of full length."""
    config, method = run.config, run.method
    draw = method.draw
    n, p = config.train.prompts, run.width
    t = build._max_new_tokens(config, run.task)
    own = config.sampling.group if draw.own else 0
    g = own + (draw.baseline_members if own else 0) + draw.demonstrations
    rows = batch_sharding(run.mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    stats = {"external": array(jnp.float32, n, g, t)}
    if draw.own:
        stats["sampler_logprobs"] = array(jnp.float32, n, g, t)
    parts = len(run.weights)
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
        ids={"prompt": array(jnp.int32, n)},
        routing=_abstract_routing(run.model, array, (n, p), (n, g, t))
        if config.train.replay_routing
        else None,
    )


def _abstract_routing(
    model: ModelConfig, array: Callable[..., Any], prompts: Any, tokens: Any
) -> RoutingRecord:
    """The shapes of a record for prompts [N, P] and completions [N, G, T]."""
    each = sum(model.sparse), model.experts_per_token
    dtype = record_dtype(model)
    return RoutingRecord(array(dtype, *prompts, *each), array(dtype, *tokens, *each))


# ---------------------------------------------------------------- compiling and judging


def make_plan(
    config: Config,
    topology: Topology,
    *,
    echo: Callable[[str], None] = lambda line: None,
    placement: str = "colocated",
    effort: float = 0.0,
) -> Plan:
    """Compiles both programs of a run for a topology and says whether they fit.

    Args:
      config: the run's; ``mesh`` must use every chip.
      topology: what it would run on.
      echo: where progress goes.
      placement: "colocated", where the training state stays in memory while sampling, or
        "sampler" or "train_step", for one of the two programs on chips of its own.
      effort: XLA's in making the programs fast, -1 to 1; a run has 0. Below 0 they compile several
        times sooner, and take a little more memory than the run's (seen: a fifth of temporaries).

    Raises:
      UserError: something does not divide over the mesh, or libtpu cannot compile for it.
    """
    mesh = _mesh(config, topology)
    if mesh.size != topology.chips:
        raise UserError(
            f"mesh uses {mesh.size} of the {topology.chips} chips of {topology.name}; make the "
            "product of its axes the number of chips, or set one axis to -1"
        )
    run = abstract_run(config, mesh)
    kept = _state_bytes(run)
    lowering = {"sampler": lower_sampler, "train_step": lower_step}
    programs: dict[str, Program] = {}
    for name, lower in lowering.items():
        if placement not in ("colocated", name):
            continue
        lowered = lower(run)
        if lowered is None:
            continue
        echo(f"compiling {name} for {topology.name} ...")
        resident = {}
        if name == "sampler" and placement == "colocated":
            resident = {k: v for k, v in kept.items() if k != "weights"}
        options = {"exec_time_optimization_effort": effort} if effort else None
        programs[name] = _compile(lowered, options, run, topology, name, kept, resident)
    remedies = [r for n, p in programs.items() for r in _remedies(run, topology, n, p)]
    tokens = config.train.prompts * abstract_batch(run).tokens.shape[1]
    return Plan(
        topology=topology,
        mesh=dict(mesh.shape.items()),
        programs=programs,
        fits=all(p.fits for p in programs.values()),
        remedies=remedies,
        parameters=count_params(run.model),
        tokens=tokens * abstract_batch(run).tokens.shape[2],
    )


def quick_plan(
    config: Config,
    topology: Topology,
    *,
    echo: Callable[[str], None] = lambda line: None,
    placement: str = "colocated",
    effort: float = -1.0,
) -> Plan:
    """``make_plan`` from the same model with few layers, twice, and a line through the two.

    Layers are alike, so that bytes, operations and collectives grow in a line with their number;
    what XLA does differently in a deep program is missed. Arguments are those of ``make_plan``.
    """
    model = _shape(config, run_task(config))
    period = int(np.lcm.reduce([len(p) for p in _patterns(model)]))
    low, high = 2 * period, 4 * period
    if model.layers <= high or config.model.config is None:
        return make_plan(config, topology, echo=echo, placement=placement, effort=effort)
    plans = []
    for layers in (low, high):
        shallow = {**config.model.config, "layers": layers}
        table = config.model.model_copy(update={"config": shallow})
        chosen = config.model_copy(update={"model": table})
        planned = make_plan(chosen, topology, echo=echo, placement=placement, effort=effort)
        plans.append(planned)
    mesh = _mesh(config, topology)
    run = abstract_run(config, mesh)
    steps = (model.layers - low) / (high - low)

    def line(a: Any, b: Any) -> Any:
        if a is None or b is None:
            return None
        if isinstance(a, dict):
            names = {**a, **b}
            return {k: max(line(a.get(k, 0.0), b.get(k, 0.0)), 0.0) for k in names}
        return a + (b - a) * steps

    limit = topology.chip.hbm_bytes
    programs = {}
    for name, shallow_program in plans[0].programs.items():
        deep = plans[1].programs[name]
        sizes = line(shallow_program.bytes_per_chip, deep.bytes_per_chip)
        numbers = ("flops", "hbm_bytes", "collective_bytes", "roofline_seconds", "bound")
        found = {n: line(getattr(shallow_program, n), getattr(deep, n)) for n in numbers}
        spent = shallow_program.compile_seconds + deep.compile_seconds
        programs[name] = Program(sizes, sizes["total"] <= limit, **found, compile_seconds=spent)
    remedies = [r for n, p in programs.items() for r in _remedies(run, topology, n, p)]
    fits = all(p.fits for p in programs.values())
    parameters = count_params(model)
    return plans[0]._replace(
        programs=programs, fits=fits, remedies=remedies, parameters=parameters, layers=(low, high)
    )


def _patterns(model: ModelConfig) -> tuple[tuple[bool, ...], ...]:
    return model.rope_pattern, model.window_pattern, model.expert_pattern


def _compile(
    lowered: Any,
    options: Mapping[str, float] | None,
    run: build.Run,
    topology: Topology,
    name: str,
    kept: Mapping[str, float],
    resident: Mapping[str, float],
) -> Program:
    start = time.perf_counter()
    limit, extra = topology.chip.hbm_bytes, sum(resident.values())
    weights = {"weights": kept["weights"]} if name == "sampler" else dict(kept)
    try:
        with _no_compile_cache():
            compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        temporaries = _wanted_temporaries(str(error), sum(weights.values()))
        if temporaries is None:
            raise
        sizes = {**resident, **weights, "temporaries": temporaries}
        sizes["total"] = sum(sizes.values())
        seconds = time.perf_counter() - start
        return Program(sizes, False, None, None, None, None, None, seconds)
    stats = compiled.memory_analysis()
    aliased = stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - aliased
    total += stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    sizes = {**resident, **weights}
    if name == "sampler":
        room = float(stats.temp_size_in_bytes)
        sizes["cache"] = min(_cache_bytes(run), room)
        sizes["prepared"] = min(_prepared_bytes(run), room - sizes["cache"])
    sizes["program"] = float(stats.generated_code_size_in_bytes)
    named = sum(v for k, v in sizes.items() if k not in resident)
    sizes["temporaries"] = max(float(total) - named, 0.0)
    sizes["total"] = float(total) + extra
    costs = program_costs(compiled.as_text(), list(run.mesh.shape.values()))
    seconds, bound = roofline(costs, topology, run.mesh.devices)
    return Program(
        bytes_per_chip=sizes,
        fits=sizes["total"] <= limit,
        flops=sum(c.runs * c.flops for c in costs),
        hbm_bytes=sum(c.runs * c.bytes for c in costs),
        collective_bytes=_by_kind(costs, run.mesh.axis_names),
        roofline_seconds=seconds,
        bound=bound,
        compile_seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def _no_compile_cache() -> Iterator[None]:
    """What is compiled for chips that are not there cannot be read back from JAX's cache."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _wanted_temporaries(error: str, arguments: float) -> float | None:
    """Bytes of temporaries that a program wanted in vain; None where the error is another one."""
    if found := re.search(r"HLO temporaries \(([\d.]+)([KMGT])\)", error):
        return float(found[1]) * _UNITS[found[2]]
    if found := re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", error):
        return max(float(found[1]) * _UNITS[found[2]] - arguments, 0.0)
    return None


def roofline(
    costs: list[Cost], topology: Topology, devices: np.ndarray
) -> tuple[float, dict[str, float]]:
    """The least time of a program, seconds, and how much of it goes to what.

    In each computation the chip's units, its memory and its networks work side by side, and the
    slowest of the three decides; computations follow each other. Collectives over different axes
    share the network's time one after the other.
    """
    chip = topology.chip
    bound = dict.fromkeys(("compute", "memory", "network"), 0.0)
    for cost in costs:
        network = 0.0
        for c in cost.collectives:
            rate = axis_bandwidth(topology, devices, c.axes)
            network += max(c.bytes / rate, c.times * HOP_SECONDS)
        times = {
            "compute": cost.flops / chip.flops,
            "memory": cost.bytes / chip.hbm_bandwidth,
            "network": network,
        }
        slowest = max(times, key=lambda k: times[k])
        bound[slowest] += cost.runs * times[slowest]
    return sum(bound.values()), bound


def _by_kind(costs: list[Cost], axes: tuple[str, ...]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for cost in costs:
        for c in cost.collectives:
            key = f"{c.kind}/{'+'.join(axes[a] for a in c.axes)}"
            sums[key] = sums.get(key, 0.0) + cost.runs * c.bytes
    return dict(sorted(sums.items()))


def _state_bytes(run: build.Run) -> dict[str, float]:
    """Bytes of the training state on one chip, by what they are."""
    state, _ = abstract_state(run)

    def size(tree: Any) -> float:
        return float(sum(_shard_bytes(x) for x in jax.tree.leaves(tree)))

    policy = size(state.params["policy"])
    parts = {
        "weights": policy,
        "value": size(state.params) - policy,
        "optimizer": size(state.opt_state),
        "frozen": size(state.frozen),
    }
    return {name: value for name, value in parts.items() if value}


def _shard_bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
    return int(np.prod(shape)) * x.dtype.itemsize


def _cache_bytes(run: build.Run) -> float:
    """Bytes of keys and values on one chip: each prompt's once, each completion's own."""
    config, model = run.config, run.model
    draw = run.method.draw
    group = config.sampling.group + draw.baseline_members
    batch = -(-config.train.prompts // batch_shards(run.mesh))
    rows = min(batch * group, config.sampling.slots or batch * group)
    tokens = batch * run.width + rows * build._max_new_tokens(config, run.task)
    heads = -(-model.kv_heads // run.mesh.shape["tensor"])
    each = 2 * model.layers * heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    return float(tokens * each)


def _prepared_bytes(run: build.Run) -> float:
    """Bytes of the weights as the sampler reads them on one chip, beside those it is given."""
    model, whole = run.model, run.config.sampling.gather_weights
    itemsize, total = jnp.dtype(model.dtype).itemsize, 0.0
    table = weight_table(model)
    if model.tied_embeddings:
        table["head"] = table["embed"]
    for spec in jax.tree.leaves(table, is_leaf=lambda x: isinstance(x, WeightSpec)):
        over = {a for name in spec.axes if name is not None for a in RULES[name]}
        over -= {"fsdp"} if whole else set()
        total += np.prod(spec.shape) * itemsize / np.prod([run.mesh.shape[a] for a in over])
    return float(total)


# ---------------------------------------------------------------- what would make it fit


def _remedies(run: build.Run, topology: Topology, name: str, program: Program) -> list[str]:
    """What to change, most effective first; nothing for a program that fits."""
    if program.fits:
        return []
    config, limit = run.config, topology.chip.hbm_bytes
    sizes = program.bytes_per_chip
    over = sizes["total"] - limit
    lines = [f"{name}: {over / GIB:.1f} GiB too much on each chip"]
    stays = sum(sizes.get(k, 0.0) for k in ("weights", "value", "optimizer", "frozen"))
    if stays > 0.9 * limit:
        sharded = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"] * run.mesh.shape["expert"]
        if sharded < topology.chips:
            lines.append(
                f"the state alone takes {stays / GIB:.1f} GiB; divide it over more chips: raise "
                "mesh.fsdp and lower mesh.data"
            )
        bigger = larger(topology, topology.chips * stays / (0.6 * limit))
        if bigger and bigger != topology.name:
            lines.append(f"the state fits on {bigger} with mesh.fsdp over all its chips")
        lines.append('optimizer.name = "adafactor" keeps almost no moments')
        return lines
    room = limit - stays
    movable = sizes["total"] - stays
    factor = 2 ** int(np.ceil(np.log2(max(movable / room, 1.0001))))
    if name == "train_step":
        if config.model.remat != "full":
            lines.append('model.remat = "full" keeps only each layer\'s input')
        per = config.train.microbatch_prompts // batch_shards(run.mesh)
        if per >= factor:
            lines.append(f"train.microbatches = {config.train.microbatches * factor}")
        else:
            lines.append(
                f"a microbatch is {per} prompts a chip already; lower sampling.max_new_tokens or "
                "sampling.group, or raise mesh.tensor"
            )
        return lines
    prepared = _prepared_bytes(run)
    if config.sampling.gather_weights and run.mesh.shape["fsdp"] > 1 and 2 * prepared > over:
        lines.append(
            f"sampling.gather_weights = false keeps divided the {prepared / GIB:.1f} GiB of weights"
            " that are gathered to sample, and sends them for every token"
        )
    batch = config.train.prompts // batch_shards(run.mesh) * config.sampling.group
    if batch >= 2 * factor:
        lines.append(f"sampling.slots = {max(batch // factor, 1)} completions at a time on a chip")
    lines.append("raise mesh.tensor, which divides weights and keys and values")
    return lines
