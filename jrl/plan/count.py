"""A plan from counting alone: nothing is compiled, so that it answers within seconds.

What is exact: the state, the sampler's copy of the weights and its cache, from the arrays' shapes
and shardings; and whether everything divides over the meshes. What is estimated
(``plan.estimate``): temporaries, and the times from operations, bytes and the chip's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jrl.collect.resharding import ReshardedSampler
from jrl.plan.compile import prepared_size, resident_bytes
from jrl.plan.estimate import Training, resharding_seconds, sampling_times, training_times
from jrl.plan.memory import MODELS, cache_bytes, further_cache_bytes, judge_model_bytes, state_bytes
from jrl.plan.records import Program
from jrl.plan.topology import Topology
from jrl.plan.useful import floor_seconds, model_flops, sampler_runs
from jrl.setup.run import Run
from jrl.train.programs import drawing_mesh, train_sampler
from jrl.train.remat import counted_bytes

SAMPLER_TEMPORARIES = 2**28
"""Bytes besides weights and cache that a decode step is taken to need on a chip."""


def counted_programs(
    run: Run,
    topology: Topology,
    names: Sequence[str],
    placement: str,
    effort: float,
    echo: Callable[[str], None],
) -> dict[str, Program]:
    """``compile.compiled_programs`` without compiling anything; ``Program.counted`` is True.

    Beside the compiled plans of the eight shipped pod configurations (``benchmarks/pods.json``) its
    figures are off by what ``configs/README.md`` tells. XLA is not asked, and there is no progress
    to tell.
    """
    del effort, echo
    state, models = state_bytes(run), judge_model_bytes(run)
    sampler = train_sampler(run)
    programs: dict[str, Program] = {}
    for name in names:
        here = resident_bytes(state, models, name, placement)
        if name == "train_step":
            programs[name] = _training(run, topology, here)
        elif name == "resharding" and isinstance(sampler, ReshardedSampler):
            programs[name] = _resharding(run, topology, here)
        elif name == "sampler" and sampler is not None:
            programs[name] = _sampler(run, topology, here)
    return programs


def _training(run: Run, topology: Topology, state: dict[str, float]) -> Program:
    config = run.config
    options = Training(dict(run.mesh.shape.items()), config.model.remat, config.train.microbatches)
    trained = sum(size for part, size in state.items() if part not in MODELS)
    temporaries = max(counted_bytes(run) - trained, 0.0)
    sizes = {**state, "temporaries": temporaries}
    times = training_times(config, run.shape, topology, options)
    groups = run.method.batch_groups(config.train.prompts) / config.train.prompts
    times = {resource: groups * seconds for resource, seconds in times.items()}
    return _program(run, topology, "train_step", sizes, times)


def _resharding(run: Run, topology: Topology, state: dict[str, float]) -> Program:
    sizes = {**state, "prepared": prepared_size(run)}
    mesh = dict(drawing_mesh(run).shape.items())
    seconds = resharding_seconds(run.config, run.shape, topology, mesh)
    return _program(run, topology, "resharding", sizes, {"network": seconds})


def _sampler(run: Run, topology: Topology, state: dict[str, float]) -> Program:
    sizes = {
        **state,
        "prepared": prepared_size(run),
        "cache": cache_bytes(run) + further_cache_bytes(run),
        "temporaries": float(SAMPLER_TEMPORARIES),
    }
    mesh = dict(drawing_mesh(run).shape.items())
    times = sampling_times(run.config, run.shape, topology, mesh, sum(state.values()))
    runs = sampler_runs(run) / run.config.sampling.draws  # the times are of all draws
    times = {resource: runs * seconds for resource, seconds in times.items()}
    return _program(run, topology, "sampler", sizes, times)


def _program(
    run: Run,
    topology: Topology,
    name: str,
    sizes: dict[str, float],
    times: Mapping[str, float],
) -> Program:
    """A program of which only its memory and its times are known."""
    mesh = drawing_mesh(run) if name == "sampler" else run.mesh
    leads = max(times, key=times.__getitem__)
    sizes = sizes | {"total": sum(sizes.values())}
    return Program(
        bytes_per_chip=sizes,
        fits=sizes["total"] <= topology.chip.hbm_bytes,
        flops=None,
        hbm_bytes=None,
        collective_bytes=None,
        roofline_seconds=times[leads],
        bound={leads: times[leads]},
        compile_seconds=0.0,
        alone=dict(times),
        floor_seconds=floor_seconds(run, mesh, topology, name),
        model_flops=model_flops(run, name) / topology.chips,
        counted=True,
    )
