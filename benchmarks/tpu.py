"""Measured times of a pod configuration on the slice that it is for, beside the predicted ones.

    python -m benchmarks.tpu configs/pod_1.7b_v5e.toml --topology v5e:4x4 --plan plan.json

Every host of the slice runs this line; ``tpu_scripts/benchmark.sh`` does it. Weights are random, of
the sizes in ``model.config``, prompts are random tokens of the greatest length, no token ends a
completion, and each gets 0 or 1 point at random: the work that ``jrl plan CONFIG --json``, whose
output is read from ``--plan``, counts. Programs, layouts and the order of the work are those of
``jrl train``; nothing is judged, logged or saved. Times are medians without the first two steps,
whose programs are compiled.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.clock import rounded, steady
from benchmarks.flags import write
from jrl.collect.collector import Collector
from jrl.collect.plan import Setting
from jrl.collect.resharding import ReshardedSampler
from jrl.collect.sources import Around, Groups, Source
from jrl.config import Config, load_config
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.plan.topology import Topology, parse_topology
from jrl.plan.useful import lengths_of, model_flops
from jrl.setup.adapters import policy_of
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of
from jrl.setup.placement import make_meshes
from jrl.setup.run import Run
from jrl.system import processes
from jrl.system.compile_cache import enable_compile_cache
from jrl.system.devices import find_devices
from jrl.train import build, programs
from jrl.train.batches import text_source
from jrl.train.trainable import check_trainable
from jrl.types import Prompt
from jrl.types.asks import DrawRequest

PROGRAMS = {"resharding": "resharding_s", "sampler": "sampler_s", "train_step": "train_s"}
"""The programs of a plan, and the names of their seconds here."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("config", help="configuration with model.config, such as a pod_*.toml")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p.add_argument("--topology", default="", help="the slice, for the peak of its chips: v5e:4x4")
    p.add_argument(
        "--plan", default="", help="output of jrl plan --json for the same configuration"
    )
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--json", default="", help="also write the result to this file")
    return p


# ---------------------------------------------------------------- the run


class _Endless(NamedTuple):
    """A stand-in for a tokenizer: no token ends a completion."""

    stop_ids: tuple[int, ...] = ()


def synthetic_run(config: Config) -> Run:
    """A run on the devices that there are, with random weights and prompts.

    Raises:
      UserError: it needs what is not made up here, or does not fit the devices.
    """
    for key, value, instead in (
        ("model.path", config.model.path, "give sizes in model.config"),
        ("data.task", getattr(config.data, "task", None), "remove it; prompts are random tokens"),
        ("data.env", getattr(config.data, "env", None), "remove it; prompts are random tokens"),
        ("placement", config.placement, "remove it; only colocated runs are measured"),
    ):
        if value is not None:
            raise UserError(f"{key} = {value!r} is not for this benchmark; {instead}")
    mesh, _ = make_meshes(config)
    kind = kind_of(config)
    model, tokenizer = run_shape(config, kind.task, runs=False), _Endless()
    run = build.bare_run(
        config, mesh, kind=kind, model=model, tokenizer=tokenizer, width=kind.prompt_tokens
    )
    check_trainable(run)
    rng = np.random.default_rng(config.seed)
    tokens = rng.integers(3, model.vocab_size, (config.train.prompts, run.width), np.int32)
    prompts = [Prompt(id=i, text="", tokens=row, answer="") for i, row in enumerate(tokens)]
    return run._replace(data=build.RunData({"train": prompts, "eval": []}, {}, {}))


class Clock:
    """Seconds by what they were spent on, one number a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted until its result is there."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = function(*args, **kwargs)
            jax.block_until_ready(jax.tree.leaves(out))
            self._now[name] += time.perf_counter() - begin
            return out

        return counted

    def end_step(self, whole: float) -> None:
        """Closes a step of so many seconds."""
        self.steps.append({**self._now, "step_s": whole})
        self._now.clear()

    def medians(self) -> dict[str, float]:
        """Time of a step and of its parts; 0 for a part that the step lacks."""
        names = dict.fromkeys(name for step in self.steps for name in step)
        return {name: steady(step.get(name, 0.0) for step in self.steps) for name in names}


class Timed(Around):
    """A source whose draws are timed, and whose rewards are made up."""

    def __init__(self, source: Source, clock: Clock, seed: int) -> None:
        super().__init__(source)
        self._draw, self._seed = clock.around("drawing_s", source.draw), seed

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        return with_points(self._draw(request), self._seed)


def measure(run: Run, steps: int) -> dict[str, Any]:
    """Median seconds of a step and of its programs, and the most memory of a chip."""
    clock, config = Clock(), run.config
    with jax.set_mesh(run.mesh):
        sampler = programs.train_sampler(run)
        if sampler is None:
            raise UserError(f"method = {config.method!r} draws no completions; nothing to measure")
        if isinstance(sampler, ReshardedSampler):
            sampler.weights = clock.around("resharding_s", sampler.weights)
        state, shardings = programs.new_state(run)
        train = clock.around("train_s", programs.train_program(run, shardings))
        sampling_params = jax.device_put(run.sampling_params, replicated(run.mesh))
        weights = list(run.rewards.weights.values())
        setting = Setting(run.method, config.train.prompts, 1, weights)
        source = Timed(text_source(run, None, sampler), clock, config.seed)
        collector = Collector(source, setting, run.mesh, programs.packer(run))
        cursor = 0
        for i in range(steps):
            begin = time.perf_counter()
            policy = policy_of(state, run.network)
            weights = {"policy": policy}
            batch, _, cursor = collector.collect(state.key, weights, step=i, cursor=cursor)
            state, _ = train(state, batch, sampling_params)
            clock.end_step(time.perf_counter() - begin)
    medians = clock.medians()
    medians["sampler_s"] = medians.pop("drawing_s") - medians.get("resharding_s", 0.0)
    used = jax.local_devices()[0].memory_stats() or {}
    return medians | {
        "first_step_s": clock.steps[0]["step_s"],
        "bytes_per_chip": used.get("peak_bytes_in_use"),
    }


def with_points(groups: Groups, seed: int) -> Groups:
    """The groups with 0 or 1 point for each completion; the same on every host."""
    rng = np.random.default_rng([seed, *np.asarray(groups.ids["prompt"]).tolist()])
    points = rng.integers(0, 2, groups.rewards.shape).astype(np.float32)
    return groups._replace(rewards=points)


# ---------------------------------------------------------------- beside the plan


def figures(
    times: Mapping[str, Any], run: Run, topology: Topology | None
) -> dict[str, float | None]:
    """Seconds, and tokens a second and model FLOP utilisation that follow from them.

    Args:
      times: "step_s", and the seconds of ``PROGRAMS``.
      run: the run, for its model FLOPs.
      topology: the slice; without it utilisations are None.
    """
    chips, sizes = run.mesh.size, lengths_of(run)
    tokens = sizes.prompts * sizes.group * sizes.new
    row = {name: times.get(name) for name in ("step_s", *PROGRAMS.values())}
    row["tokens_s_chip"] = tokens / times["step_s"] / chips
    for program in ("sampler", "train_step"):
        seconds, used = row[PROGRAMS[program]], None
        if topology is not None and seconds:
            used = model_flops(run, program) / chips / topology.chip.flops / seconds
        row[f"{program}_mfu"] = used
    return row | {"bytes_per_chip": times["bytes_per_chip"]}


def predicted(plan: Mapping[str, Any], run: Run, topology: Topology | None) -> dict[str, Any]:
    """The figures of a plan's JSON.

    Raises:
      UserError: the plan is of another mesh, slice or number of tokens.
    """
    axes = run.config.sampling.mesh_axes if run.config.sampling.mesh else None
    for field, planned, here in (
        ("topology", plan["topology"], topology and topology.name),
        ("mesh", plan["mesh"], dict(run.mesh.shape)),
        ("sampling.mesh", plan["sampling_mesh"], axes and dict(programs.drawing_mesh(run).shape)),
    ):
        if planned != here and not (field == "sampling.mesh" and here == dict(run.mesh.shape)):
            raise UserError(
                f"--plan is of {field} {planned}, and this run has {here}; make it again with"
                " jrl plan CONFIG KEY=VALUE --topology SLICE --json"
            )
    times = {
        PROGRAMS[name]: program["roofline_seconds"] for name, program in plan["programs"].items()
    }
    size = max(program["bytes_per_chip"] for program in plan["programs"].values())
    times |= {"step_s": plan["step_seconds"], "bytes_per_chip": size}
    return figures(times, run, topology)


def beside(measured: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both sets of figures, and the one over the other where both are known."""
    ratios = {
        name: value / plan[name]
        for name, value in measured.items()
        if plan is not None and value is not None and plan.get(name)
    }
    return {"measured": measured, "predicted": plan, "measured_over_predicted": ratios}


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole record."""
    topology = parse_topology(args.topology) if args.topology else None
    config = load_config(args.config, args.overrides)
    run = synthetic_run(config)
    if topology is not None and topology.chips != run.mesh.size:
        raise UserError(
            f"--topology {topology.name} has {topology.chips} chips, and mesh uses {run.mesh.size}"
            " devices; name the slice that this runs on"
        )
    plan = None
    if args.plan:  # read before anything is compiled, so that a wrong one costs nothing
        plan = predicted(json.loads(Path(args.plan).read_text("utf-8")), run, topology)
    times = measure(run, args.steps)
    measured = figures(times, run, topology) | {"first_step_s": times["first_step_s"]}
    return {
        "config": args.config,
        "overrides": args.overrides,
        "device": jax.devices()[0].device_kind,
        "topology": args.topology or None,
        "chips": run.mesh.size,
        "mesh": dict(run.mesh.shape),
        "sampling_mesh": dict(programs.drawing_mesh(run).shape),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "steps": args.steps,
        **beside(measured, plan),
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        processes.start()
        find_devices()
        enable_compile_cache()
        result = rounded(benchmark(args))
    except UserError as error:
        raise SystemExit(f"benchmarks.tpu: {error}") from None
    if jax.process_index() == 0:
        write(result, args.json)


if __name__ == "__main__":
    main()
