"""Memory and time of a run on a TPU slice or on GPUs, from its compiled programs.

XLA compiles the real sampler and the real training step for the chips, without weights and without
any of them here. The compiled programs give bytes per chip, operations, collectives by kind and
mesh axis, a lower bound of the time from the chip's figures, and for GPUs the kernels that the host
launches.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jrl.config import Config
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.config import ModelConfig
from jrl.models.transformer import count_params
from jrl.plan.costs import Cost, program_costs
from jrl.plan.hlo import parse_program
from jrl.plan.kernels import program_launches, token_loop, token_step
from jrl.plan.lower import abstract_run, lower_resharding, lower_sampler, lower_step, outputs
from jrl.plan.memory import (
    MODELS,
    cache_bytes,
    further_cache_bytes,
    judge_model_bytes,
    judge_working_bytes,
    remedies,
    state_bytes,
)
from jrl.plan.records import Plan, Program
from jrl.plan.roofline import by_operation, each_alone, repeated, roofline, sent_bytes, total_bytes
from jrl.plan.topology import Topology, compile_devices, larger, parse_topology, several
from jrl.plan.useful import decoding, floor_seconds, loop_trips, model_flops, sampler_runs
from jrl.setup.gather import prepared_bytes
from jrl.setup.run import Run
from jrl.system.extras import install_line
from jrl.train.programs import check_resharding, drawing_mesh
from jrl.train.remat import AUTO, choose, with_remat
from jrl.train.shapes import abstract_batch

PROGRAMS = ("resharding", "sampler", "train_step")
RATIOS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "tpu": {"resharding": (60.0, 35.0), "sampler": (20.0, 10.0), "train_step": (100.0, 22.0)},
    "gpu": {"resharding": (20.0, 20.0), "sampler": (20.0, 20.0), "train_step": (15.0, 15.0)},
}
"""Platform -> program -> how many times as long as tracing and lowering XLA compiles it, with
effort 0 and below; rough. With effort -1 two layers of ``configs/pod_8b_v6e.toml`` gave 35, 10 and
22; those of effort 0 follow from the seconds in ``benchmarks/pods.json``. Of GPUs: two layers of
1.7B with JAX 0.11."""
FAST_BYTES = 128 << 20
"""A chip's vector memory (VMEM), or more: XLA keeps weights there for as long as a loop runs."""


def plan_mesh(config: Config, topology: Topology) -> jax.sharding.Mesh:
    """The configuration's mesh of the topology's devices.

    Raises:
      UserError: the mesh has another number of devices than the slices have chips.
    """
    for key, axes in (("mesh", config.mesh_axes), ("sampling.mesh", config.sampling.mesh_axes)):
        size = math.prod(axes.values()) if key == "mesh" or config.sampling.mesh else -1
        if size > 0 and size != topology.chips and not (key != "mesh" and config.placement):
            each = topology.chips // topology.slices
            written = config.plan.topology
            fitting = written if parse_topology(written).chips == size else None
            if fitting is None and size > each:
                fitting = larger(topology, size / topology.slices)
            fitting = fitting or several(topology, size)
            such = f", such as --topology {fitting}" if fitting else ""
            raise UserError(
                f"{key} ({_axes(axes)}) is for {size} chips, and {topology.name} has"
                f" {topology.chips}: name the slice with --topology{such}, or in the file as"
                " plan.topology; or make the product of the mesh's axes the number of chips, or set"
                " one axis to -1"
            )
    return make_mesh(config.mesh_axes, compile_devices(topology), slices=topology.slices)


def _axes(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in axes.items() if n != 1) or "one device"


# ---------------------------------------------------------------- compiling and judging


def few_layer_programs(
    run: Run,
    topology: Topology,
    names: Sequence[str],
    placement: str,
    effort: float,
    echo: Callable[[str], None],
) -> dict[str, Program]:
    """``compiled_programs``, but a program with unrolled layers is compiled twice with few layers.

    Unrolled are the sampler, and the training step of a model whose layers are not all alike.
    Bytes, operations and collectives grow linearly with the number of layers, so the two give those
    of the complete model; what XLA does differently in a deep program is missed. Weights that fit
    the chip's fast memory stay there from token to token, so that both programs have more of them,
    or the complete one has no more.
    """
    config = run.config  # fewer layers would fit with another rematerialisation
    model, sizes = run.shape, config.model.config
    if sizes is None:
        return compiled_programs(run, topology, names, placement, effort, echo)
    period = int(np.lcm.reduce([len(p) for p in _patterns(model)]))

    def of(layers: int) -> Run:
        table = config.model.model_copy(update={"config": {**sizes, "layers": layers}})
        return abstract_run_on(config.model_copy(update={"model": table}), topology)

    low, deep = 2 * period, prepared_size(run)
    each = (deep - prepared_size(of(low))) / max(model.layers - low, 1)
    if each * model.layers > FAST_BYTES and topology.chip.platform == "tpu":
        low *= math.ceil(FAST_BYTES / (each * low))
    high = low + 2 * period
    if low + high > model.layers:  # two programs of so many layers take longer than the one
        return compiled_programs(run, topology, names, placement, effort, echo)
    unrolled = PROGRAMS if len(set(model.sparse)) > 1 else ("resharding", "sampler")
    complete = [name for name in names if name not in unrolled]
    rest = [name for name in names if name in unrolled]
    programs = compiled_programs(run, topology, complete, placement, effort, echo)
    few = []
    for layers in (low, high) if rest else ():
        few.append(compiled_programs(of(layers), topology, rest, placement, effort, echo))
    steps = (model.layers - low) / (high - low)
    for name in few[0] if few else ():
        extrapolated = extrapolate(few[0][name], few[1][name], steps, topology)
        programs[name] = extrapolated._replace(layers=(low, high))
    return {name: programs[name] for name in PROGRAMS if name in programs}


def extrapolate(low: Program, high: Program, steps: float, topology: Topology) -> Program:
    """The program on the line through both, ``steps`` times their difference beyond ``low``."""

    def line(a: Any, b: Any) -> Any:
        if a is None or b is None:
            return None
        if isinstance(a, dict):
            names = {**a, **b}
            return {k: max(line(a.get(k, 0.0), b.get(k, 0.0)), 0.0) for k in names}
        return a + (b - a) * steps

    sizes, spare = line(low.bytes_per_chip, high.bytes_per_chip), "temporaries"
    if spare in sizes:  # a deeper program needs no fewer of them
        sizes[spare] = max(sizes[spare], high.bytes_per_chip[spare])
    sizes["total"] = sum(size for part, size in sizes.items() if part != "total")
    numbers = (
        *("flops", "hbm_bytes", "collective_bytes", "roofline_seconds", "bound", "alone"),
        *("full_seconds", "floor_seconds", "model_flops", "reads", "operations", "kernels"),
    )
    return Program(
        sizes,
        sizes["total"] <= topology.chip.hbm_bytes,
        **{name: line(getattr(low, name), getattr(high, name)) for name in numbers},
        compile_seconds=low.compile_seconds + high.compile_seconds,
        effort=high.effort,
    )


def abstract_run_on(config: Config, topology: Topology) -> Run:
    """``lower.abstract_run`` on the mesh of a topology, its division over all meshes checked."""
    mesh = plan_mesh(config, topology)
    run = abstract_run(config, mesh)
    check_resharding(run)
    if run.config.model.remat == AUTO:
        run = with_remat(run, choose(run, topology.chip.hbm_bytes).remat)
    return run


def compiled_programs(
    run: Run,
    topology: Topology,
    names: Sequence[str],
    placement: str,
    effort: float,
    echo: Callable[[str], None],
) -> dict[str, Program]:
    """The run's programs of these names, compiled; one that the run lacks is left out.

    Args:
      run: abstract, on a mesh of the topology's devices.
      topology: the slices.
      names: of ``PROGRAMS``.
      placement: see ``make.make_plan``.
      effort: XLA's optimization effort, -1 to 1; a run uses 0. Below 0 programs compile several
        times faster, but they are others: the temporaries differ (20 % more with JAX 0.10, 5 % less
        with 0.12), and so do collectives (one of the output matrix's gradient for every part of the
        vocabulary instead of one for all).
      echo: receives lines of progress.
    """
    held_bytes = state_bytes(run)
    programs: dict[str, Program] = {}
    weights: Any = None
    for name in names:
        began = time.perf_counter()
        lowered = _lowered(run, name, weights)
        if lowered is None:
            continue
        took, platform = time.perf_counter() - began, topology.chip.platform
        about = compile_estimate(name, took, effort, platform)
        echo(f"compiling {name} for {topology.name} ({about}) ...")
        state = resident_bytes(held_bytes, judge_model_bytes(run), name, placement)
        compiled, seconds = _compiled(lowered, effort_options(effort), name, topology)
        if isinstance(compiled, str):
            programs[name] = _out_of_memory(compiled, run, name, state, seconds)
            break
        if name == "resharding":
            weights = outputs(lowered, compiled)
        programs[name] = _measured(compiled, run, topology, name, state, seconds)
        programs[name] = programs[name]._replace(effort=effort)
    return programs


def resident_bytes(
    state: Mapping[str, float], models: Mapping[str, float], name: str, placement: str
) -> dict[str, float]:
    """Bytes on a chip of what stays while a program runs, by part.

    Args:
      state: of training.
      models: of judges and reward models, which are where the sampler is.
      name: of the program.
      placement: as in ``make.make_plan``.
    """
    if placement == "colocated":
        return {**state, **models}
    return dict(state) if name == "train_step" else {"weights": state["weights"], **models}


def judge_program(run: Run, topology: Topology) -> dict[str, Program]:
    """Memory of a chip while judges and likelihoods are asked, by "judge".

    That is between sampler and training step: keys and values of a judge, or states of a likelihood
    beside what stays; other activations are not counted. {} without either on the devices.
    """
    if not (working := judge_working_bytes(run)):
        return {}
    sizes = {**state_bytes(run), **judge_model_bytes(run), "working": working}
    sizes["total"] = sum(sizes.values())
    fits = sizes["total"] <= topology.chip.hbm_bytes
    return {"judge": Program(sizes, fits, None, None, None, None, None, 0.0)}


def compile_estimate(
    name: str, lowering_seconds: float, effort: float, platform: str = "tpu"
) -> str:
    """About how long XLA compiles a program, such as "about 6 min", from what lowering it took."""
    seconds = RATIOS[platform][name][effort < 0] * lowering_seconds
    if seconds < 90:
        return f"about {max(10 * round(seconds / 10), 10)} s"
    return f"about {seconds / 60:.0f} min"


def _lowered(run: Run, name: str, weights: Any) -> Any:
    if name == "resharding":
        return lower_resharding(run)
    return lower_step(run) if name == "train_step" else lower_sampler(run, weights)


def _compiled(
    lowered: Any, options: Mapping[str, Any] | None, name: str, topology: Topology
) -> tuple[Any, float]:
    """The compiled program, or XLA's error where memory is too small, and the time it took."""
    start = time.perf_counter()
    try:
        with _no_compile_cache():
            compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if temporaries_in_error(str(error), 0.0) is None:
            if topology.chip.platform == "gpu":
                raise UserError(_not_compiled(str(error), name, topology)) from None
            raise
        compiled = str(error)
    return compiled, time.perf_counter() - start


def _not_compiled(error: str, name: str, topology: Topology) -> str:
    """The line for a program that XLA does not compile for a GPU."""
    line = f"XLA of JAX {jax.__version__} does not compile {name} for {topology.name}"
    if "libdevice" in error:
        return f"{line} without CUDA's libdevice; install it: {install_line('plan-gpu')}"
    why = error.splitlines()[0][:200]
    # JAX 0.10.2 fails on a slice that it fuses with cuDNN's attention in the prefill.
    newer = jax.__version_info__ < (0, 11)
    hint = "; JAX 0.11, on Python 3.12 or newer, may, and so may" if newer else "; try"
    return f"{line}{hint} model.attention=xla ({why})"


def effort_options(effort: float) -> dict[str, Any] | None:
    """XLA's options for an effort from -1 to 1; later releases of JAX have optimization levels."""
    if not effort:
        return None
    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": effort}
    return {"optimization_level": "O3" if effort > 0 else "O1" if effort > -0.5 else "O0"}


def judged(run: Run, topology: Topology, programs: dict[str, Program]) -> Plan:
    """The plan of these programs: whether they fit, and what would make them fit."""
    programs = programs | judge_program(run, topology)
    changes = [r for n, p in programs.items() for r in remedies(run, topology, n, p.bytes_per_chip)]
    prompts, group, length = abstract_batch(run).tokens.shape
    return Plan(
        topology=topology,
        mesh=dict(run.mesh.shape.items()),
        programs=programs,
        fits=all(p.fits for p in programs.values()),
        remedies=changes,
        parameters=count_params(run.shape),
        tokens=prompts * group * length,
        sampling_mesh=None if drawing_mesh(run) == run.mesh else dict(drawing_mesh(run).shape),
        experts=run.shape.experts,
        remat=run.config.model.remat,
        layers=run.shape.layers,
    )


def _patterns(model: ModelConfig) -> tuple[tuple[bool, ...], ...]:
    return model.rope_pattern, model.window_pattern, model.expert_pattern


def _out_of_memory(
    error: str, run: Run, name: str, state: Mapping[str, float], seconds: float
) -> Program:
    """The partial result of a program that does not fit into memory."""
    arguments = _arguments(run, name, state)
    resident = {k: v for k, v in state.items() if k not in arguments}
    temporaries = temporaries_in_error(error, sum(arguments.values()))
    sizes = {**resident, **arguments, "temporaries": temporaries or 0.0}
    sizes["total"] = sum(sizes.values())
    return Program(sizes, False, None, None, None, None, None, seconds)


def _arguments(run: Run, name: str, state: Mapping[str, float]) -> dict[str, float]:
    """Bytes of what a program is given, by part."""
    if name == "train_step":
        return {part: size for part, size in state.items() if part not in MODELS}
    if name == "sampler" and run.config.sampling.mesh and drawing_mesh(run) != run.mesh:
        return {"prepared": prepared_size(run)}
    return {"weights": state["weights"]}


def prepared_size(run: Run) -> float:
    """Bytes on a chip of the sampler's own copy of the weights."""
    return prepared_bytes(run.config, run.shape, drawing_mesh(run))


def _measured(
    compiled: Any,
    run: Run,
    topology: Topology,
    name: str,
    state: Mapping[str, float],
    seconds: float,
) -> Program:
    """A compiled program's bytes, operations and times."""
    began, stats = time.perf_counter(), compiled.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total += stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    arguments = _arguments(run, name, state)
    resident = {k: v for k, v in state.items() if k not in arguments}
    sizes = {**resident, **arguments}
    room = float(stats.temp_size_in_bytes)
    if name == "resharding":
        sizes["prepared"] = float(stats.output_size_in_bytes)
    elif name == "sampler":
        sizes["cache"] = min(cache_bytes(run), room)
        if "prepared" not in sizes:
            sizes["prepared"] = min(prepared_size(run), room - sizes["cache"])
    sizes["program"] = float(stats.generated_code_size_in_bytes)
    named = sum(v for k, v in sizes.items() if k not in resident)
    sizes["temporaries"] = max(float(total) - named, 0.0)
    sizes["total"] = float(total) + sum(resident.values())
    if name == "sampler":  # what a further round samples runs in a program of its own
        sizes["cache"] += (more := further_cache_bytes(run))
        sizes["total"] += more
    mesh = drawing_mesh(run) if name == "sampler" else run.mesh
    text, shape = compiled.as_text(), list(mesh.shape.values())
    decode = decoding(run, mesh) if name == "sampler" else None
    trips = loop_trips(run, mesh, name)
    runs = sampler_runs(run) if name == "sampler" else 1.0
    costs = repeated(program_costs(text, shape, decode.live if decode else {}, trips), runs)
    least, by_resource = roofline(costs, topology, mesh.devices)
    full_seconds = None
    if decode is not None:
        unfilled = repeated(program_costs(text, shape, trips=trips), runs)
        if total_bytes(unfilled) > total_bytes(costs):  # else no kernel reads a cache in part
            full_seconds = roofline(unfilled, topology, mesh.devices)[0]
    return Program(
        bytes_per_chip=sizes,
        fits=sizes["total"] <= topology.chip.hbm_bytes,
        flops=sum(c.runs * c.flops for c in costs),
        hbm_bytes=total_bytes(costs),
        collective_bytes=sent_bytes(costs, mesh.axis_names),
        roofline_seconds=least,
        bound=by_resource,
        compile_seconds=seconds + time.perf_counter() - began,
        alone=each_alone(costs, topology, mesh.devices),
        full_seconds=full_seconds,
        floor_seconds=floor_seconds(run, mesh, topology, name),
        model_flops=model_flops(run, name) / topology.chips,
        reads=None
        if decode is None
        else {"weights": decode.steps * decode.weights, "cache": decode.steps * decode.cache},
        operations=by_operation(costs, topology, mesh.devices),
        kernels=_kernels(text, name, costs) if topology.chip.platform == "gpu" else None,
    )


def _kernels(text: str, name: str, costs: list[Cost]) -> dict[str, float] | None:
    """``Program.kernels`` of a program for GPUs; None for a resharding."""
    if name == "resharding":
        return None
    program = parse_program(text)
    loop = token_loop(program) if name == "sampler" else None
    launches = token_step(program) if name == "sampler" else program_launches(program)
    if launches is None:
        return None
    # A loop inside the token step, such as that of the draw's threshold, has little traffic.
    parts = [c._replace(runs=1.0) for c in costs if loop is not None and c.name == loop.body]
    parts = parts or costs
    copied = sum(c.runs * c.kinds.get("copies", (0.0, 0.0))[1] for c in parts)
    return launches._asdict() | {"bytes": total_bytes(parts), "copied": copied}


@contextlib.contextmanager
def _no_compile_cache() -> Iterator[None]:
    """JAX cannot load programs for absent chips from its compilation cache, so it is off here."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]

    def enable(value: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", value)
        compilation_cache.reset_cache()  # JAX checks the setting once

    enable(False)
    try:
        yield
    finally:
        enable(before)


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def temporaries_in_error(error: str, arguments: float) -> float | None:
    """Bytes of temporaries in an out-of-memory error of XLA's; None for another error."""
    if match := re.search(r"HLO temporaries \(([\d.]+)([KMGT])\)", error):
        return float(match[1]) * _UNITS[match[2]]
    if match := re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", error):
        return max(float(match[1]) * _UNITS[match[2]] - arguments, 0.0)
    return None
