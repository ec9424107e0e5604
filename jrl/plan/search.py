"""Search for the mesh, rematerialisation, microbatches and placement of a run.

The search of "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation"
(arXiv:2406.14088): candidates for the placement and sharding of each program are costed without
running them, and the fastest that fits wins. The paper's cost model is a profile of single layers,
and a Markov chain explores the candidates; here a rough estimate of memory and time orders the
candidates, and XLA compiles the first few for the chips.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config.tables import Config, PlacementTable
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.layers import REMAT
from jrl.plan.estimate import Training, resharding_seconds, sampling_seconds, training_seconds
from jrl.plan.isolate import EndedError, Isolated
from jrl.plan.make import half, make_plan
from jrl.plan.records import Plan
from jrl.plan.topology import Topology
from jrl.setup.frozen import run_shape
from jrl.setup.gather import slots_on_chip
from jrl.setup.kinds import kind_of
from jrl.setup.run import remat_of

Sizes = tuple[tuple[str, int], ...]

_REMAT = tuple(name for name in REMAT if name != "scores")
"""Candidates; estimates have the scores of the vocabulary in no time and no memory."""

SLOWER = 3
"""Ratio of compile times with effort 0 and -1, the maximum observed."""

SAMPLERS = 3
"""Meshes of the sampler's own that are tried with each mesh of training."""


Formats = tuple[tuple[str, tuple[str, ...]], ...]
"""Of the keys ``int8`` and ``float8`` of [sampling] some, each with its value."""


class Candidate(NamedTuple):
    """One way to run.

    Attributes:
      mesh: devices along each axis, of training alone where rollout has a mesh of its own.
      remat: see ``model.remat``.
      microbatches: see ``train.microbatches``.
      rollout: devices of rollout along each axis, half of the chips; None where rollout and
        training alternate on all of them.
      sampler: the mesh that they are arranged in while sampling; None for that of training.
      slots: see ``sampling.slots``; None for the configuration's.
      formats: the parts that ``sampling.int8`` and ``sampling.float8`` name; () for those of the
        configuration.
    """

    mesh: Sizes
    remat: str
    microbatches: int
    rollout: Sizes | None
    sampler: Sizes | None = None
    slots: int | None = None
    formats: Formats = ()

    def text(self) -> str:
        """As changes to a configuration, KEY=VALUE."""
        settings = [f"mesh.{axis}={n}" for axis, n in self.mesh]
        settings += [f"model.remat={self.remat}", f"train.microbatches={self.microbatches}"]
        if self.rollout is not None:
            settings += ["placement.staleness=1"]
        settings += [f"sampling.mesh.{axis}={n}" for axis, n in self.rollout or self.sampler or ()]
        settings += [] if self.slots is None else [f"sampling.slots={self.slots}"]
        settings += [
            f"sampling.{key}={json.dumps(parts, separators=(',', ':'))}"
            for key, parts in self.formats
        ]
        return " ".join(settings)

    def applied(self, config: Config) -> Config:
        """The configuration with these changes."""
        placement = None if self.rollout is None else PlacementTable(staleness=1)
        model = config.model.model_copy(update={"remat": self.remat})
        train = config.train.model_copy(update={"microbatches": self.microbatches})
        training_mesh = {axis: n for axis, n in self.rollout or self.sampler or () if n > 1}
        changes: dict[str, Any] = {"mesh": training_mesh}
        changes |= {} if self.slots is None else {"slots": self.slots}
        changes |= dict(self.formats)
        sampling = config.sampling.model_copy(update=changes)
        tables: dict[str, Any] = {
            "mesh": dict(self.mesh),
            "model": model,
            "train": train,
            "placement": placement,
        }
        tables["sampling"] = sampling
        return config.model_copy(update=tables)


def search(
    config: Config,
    topology: Topology,
    *,
    limit: int = 6,
    seconds: float | None = None,
    effort: float = -1.0,
    echo: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Candidates by predicted step time, those that fit first.

    Args:
      config: the run's. Its meshes, remat, microbatches and placement are replaced; its own are the
        first candidate if they divide the chips.
      topology: the slices.
      limit: the number of candidates to compile.
      seconds: no candidate is begun that would go beyond this time, if it took as long as the
        longest so far; None for no limit. The first one is always compiled.
      effort: XLA's, with which candidates are compiled. The best is then compiled with 0, as a run
        is, if the time allows (about ``SLOWER`` times as long).
      echo: receives lines of progress.

    Returns:
      For each: ``changes`` (text), ``mesh``, ``rollout_mesh``, ``sampling_mesh``, ``remat``,
      ``microbatches``, ``slots``, ``int8``, ``float8``, ``placement``, ``fits``, ``step_seconds``,
      ``effort`` with which that was compiled, ``ranked_seconds`` (with the effort of the ranking),
      ``estimated_seconds`` (before compiling), ``estimate_ratio`` (of all: the median of compiled
      over estimated times), ``seconds`` of each program, ``bytes_per_chip`` (the larger program's),
      and ``error``: why it could not be compiled, or None.

    Raises:
      UserError: no mesh divides the model and the batch over the chips.
    """
    model = run_shape(config, kind_of(config).task, runs=False)
    candidates = list(enumerate_candidates(config, model, topology))
    if not candidates:
        raise UserError(
            f"no mesh over {topology.chips} chips divides the model ({model.heads} heads, "
            f"{model.kv_heads} key-value heads) and train.prompts = {config.train.prompts}; make "
            "train.prompts a multiple of the chips"
        )
    estimate = Estimates(config, model, topology)
    ranked = sorted(candidates, key=estimate)
    results: list[dict[str, Any]] = []
    compiled_candidates: dict[str, Candidate] = {}
    hopeless: set[Sizes | None] = set()
    began, longest, compiled = time.monotonic(), 0.0, Compiled(config, topology, effort)
    with contextlib.closing(compiled.isolated):
        for candidate in dict.fromkeys([*configured(config, candidates), *diverse_first(ranked)]):
            if len(results) == limit:
                break
            if candidate.rollout in hopeless:
                continue
            start = time.monotonic()
            if seconds is not None and results and start - began + longest > seconds:
                echo(
                    f"stopped after {len(results)} of {limit}: the next would exceed {seconds:g} s"
                )
                break
            echo(f"{len(results) + 1} of {limit}: {candidate.text()}")
            result, samples = _judge(compiled, candidate)
            result["estimated_seconds"] = estimate(candidate)
            compiled_candidates[result["changes"]] = candidate
            longest = max(longest, time.monotonic() - start)
            if candidate.rollout is not None and not samples:
                hopeless.add(candidate.rollout)  # on any mesh of training
            results.append(result)
        results.sort(key=_order)
        left = np.inf if seconds is None else began + seconds - time.monotonic()
        if effort and results[0]["fits"] and left > SLOWER * longest:
            echo(f"compiling the best with effort 0, as in a run: {results[0]['changes']}")
            as_run = Compiled(config, topology, 0.0, compiled.isolated)
            again, _ = _judge(as_run, compiled_candidates[results[0]["changes"]])
            if again["error"] is None:
                results[0] |= again | {"ranked_seconds": results[0]["ranked_seconds"]}
    ratio = estimate_ratio(results)
    return sorted((f | {"estimate_ratio": ratio} for f in results), key=_order)


def _order(result: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort key: candidates that fit first, then by time."""
    return not result["fits"], result["step_seconds"] or np.inf


def configured(config: Config, candidates: list[Candidate]) -> list[Candidate]:
    """The configuration itself as a candidate, if it is one."""
    training_mesh = [
        (axis, config.mesh_axes[axis]) for axis in ("data", "fsdp", "tensor", "expert")
    ]
    axes = config.sampling.mesh_axes
    sampler = (
        tuple((axis, axes[axis]) for axis, _ in training_mesh) if config.sampling.mesh else None
    )
    sampler = None if sampler == tuple(training_mesh) else sampler
    current = Candidate(
        tuple(training_mesh), remat_of(config), config.train.microbatches, None, sampler
    )
    return [current] if current._replace(sampler=None) in candidates else []


def diverse_first(ranked: list[Candidate]) -> list[Candidate]:
    """The best of each mesh first, placements alternating; then the others in their order.

    Estimates of similar candidates have similar errors, so different ones are compiled first.
    """
    best: dict[Any, Candidate] = {}
    for candidate in ranked:
        best.setdefault((candidate.mesh, candidate.rollout, candidate.sampler), candidate)
    shared = [c for c in best.values() if c.rollout is None]
    disjoint = [c for c in best.values() if c.rollout is not None]
    turns = itertools.chain.from_iterable(itertools.zip_longest(shared, disjoint))
    return list(dict.fromkeys([c for c in turns if c is not None] + ranked))


def enumerate_candidates(
    config: Config, model: ModelConfig, topology: Topology
) -> Iterator[Candidate]:
    """Every combination that divides the model, the batch and the microbatches."""
    prompts, slices = config.train.prompts // config.train.minibatches, topology.slices
    for part in (topology, half(topology)):
        if part is None:
            continue
        options = _meshes(model, part.chips, config.train.prompts, slices)
        best = sorted(options, key=lambda m: sampling_seconds(config, model, part, dict(m)))
        samplers: list[Sizes | None] = [*best[:2]]
        if part == topology:
            samplers = [None, *best[:SAMPLERS]]
        for mesh, sampler in itertools.product(
            _meshes(model, part.chips, prompts, slices), samplers
        ):
            if sampler == mesh and part == topology:
                continue
            where = (None, sampler) if part == topology else (sampler, None)
            local = prompts // _shards(dict(mesh))
            splits = [parts for parts in (1, 2, 4, 8, 16, 32) if local % parts == 0]
            sampling = _slots(config, sampler or mesh), _formats(config)
            for remat, parts, *sampler_options in itertools.product(_REMAT, splits, *sampling):
                yield Candidate(mesh, remat, parts, *where, *sampler_options)


def _slots(config: Config, mesh: Sizes) -> list[int | None]:
    """The configuration's slots, and where it has one for each sequence a half and a quarter."""
    rows = config.train.prompts // _shards(dict(mesh)) * config.sampling.group
    shared = slots_on_chip(rows, dict(mesh), gathered=True) != rows
    few = [rows // parts for parts in (2, 4) if rows % parts == 0]
    slot_counts = [n * (_shards(dict(mesh)) if shared else 1) for n in few]
    return [None, *(slot_counts if not config.sampling.slots else [])]


def _formats(config: Config) -> list[Formats]:
    """Variants with fewer parts in 8 bits; nothing else is rounded."""
    keys = {"int8": config.sampling.int8, "float8": config.sampling.float8}
    parts = [(key, part) for key, names in keys.items() for part in names]
    fewer = [x for n in range(len(parts)) for x in itertools.combinations(parts, n)]
    rounded = [key for key, names in keys.items() if names]
    return [(), *(tuple((k, tuple(p for key, p in x if key == k)) for k in rounded) for x in fewer)]


def _shards(mesh: Mapping[str, int]) -> int:
    return mesh["data"] * mesh["fsdp"] * mesh["expert"]


def _meshes(model: ModelConfig, chips: int, prompts: int, slices: int) -> Iterator[Sizes]:
    """Powers of two along data, fsdp, tensor and expert that use the chips and divide the batch."""
    powers = [2**i for i in range(int(np.log2(chips)) + 1)]
    widths = [t for t in powers if not (model.kv_heads % t or model.heads % t or t > 16)]
    experts = [e for e in powers if model.experts and model.experts % e == 0] or [1]
    for tensor, expert, fsdp in itertools.product(widths, experts, powers):
        data = chips // (tensor * expert * fsdp)
        if data * tensor * expert * fsdp != chips or model.embed_dim % fsdp:
            continue
        if prompts % (data * fsdp * expert) or data % slices:
            continue
        yield (("data", data), ("fsdp", fsdp), ("tensor", tensor), ("expert", expert))


class Estimates:
    """Rough step times of candidates; halves that several of them share are computed once.

    Args:
      config: the run's.
      model: the policy's shape.
      topology: the slices.
    """

    def __init__(self, config: Config, model: ModelConfig, topology: Topology) -> None:
        self.config, self.model = config, model
        self.topology, self.half = topology, half(topology) or topology
        self._training = functools.cache(self._train)
        self._sampling = functools.cache(self._sample)

    def __call__(self, c: Candidate) -> float:
        """Seconds of a step, multiplied by a large factor if memory is clearly too small."""
        separate = c.rollout is not None
        train, state_bytes = self._training(c.mesh, c.remat, c.microbatches, separate)
        mesh = c.rollout or c.sampler or c.mesh
        sampling = self._sampling(
            mesh, c.slots, c.formats, 0.0 if separate else state_bytes, separate
        )
        if separate:
            return max(train, sampling)
        transfer = 0.0
        if c.sampler is not None:
            transfer = resharding_seconds(self.config, self.model, self.topology, dict(mesh))
        return train + sampling + transfer

    def _train(self, mesh: Sizes, remat: str, parts: int, separate: bool) -> tuple[float, float]:
        topology, options = (
            self.half if separate else self.topology,
            Training(dict(mesh), remat, parts),
        )
        return training_seconds(self.config, self.model, topology, options)

    def _sample(
        self, mesh: Sizes, slots: int | None, formats: Formats, state_bytes: float, separate: bool
    ) -> float:
        changes = dict(formats) | ({} if slots is None else {"slots": slots})
        sampling = self.config.sampling.model_copy(update=changes)
        changed = self.config.model_copy(update={"sampling": sampling})
        topology = self.half if separate else self.topology
        return sampling_seconds(changed, self.model, topology, dict(mesh), state_bytes)


def estimate_ratio(results: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of compiled over estimated times, of what fits; None if nothing does."""
    pairs = [(x["ranked_seconds"], x["estimated_seconds"]) for x in results if x["fits"]]
    ratios = [took / guessed for took, guessed in pairs if took and guessed]
    return float(np.median(ratios)) if ratios else None


# ---------------------------------------------------------------- by compiling


class Compiled:
    """Plans of the two halves of colocated runs, each compiled once for all that share it.

    Args:
      config: the run's.
      topology: the slices.
      effort: XLA's.
      isolated: where they are compiled; None for a process of their own.
    """

    def __init__(
        self, config: Config, topology: Topology, effort: float, isolated: Isolated | None = None
    ) -> None:
        self.config, self.topology, self.effort = config, topology, effort
        self.isolated = isolated or Isolated()
        self._halves: dict[Any, Plan | CannotError] = {}

    def __call__(self, candidate: Candidate) -> Plan:
        """The plan of a candidate.

        Raises:
          CannotError: it cannot be compiled.
        """
        changed = candidate.applied(self.config)
        if candidate.rollout is not None:
            return self._made(changed)
        training = candidate.mesh, candidate.remat, candidate.microbatches
        sampling = candidate.mesh, candidate.sampler, candidate.slots, candidate.formats
        halves = []
        for placement, key in (("sampler", sampling), ("train_step", training)):
            if key not in self._halves:
                try:
                    self._halves[key] = self._made(changed, placement=placement)
                except CannotError as error:
                    self._halves[key] = error
            half = self._halves[key]
            if isinstance(half, CannotError):
                raise half
            halves.append(half)
        return together(*halves)

    def _made(self, config: Config, **options: Any) -> Plan:
        options |= {"by": "few layers", "effort": self.effort}
        try:
            return self.isolated(make_plan, config, self.topology, **options)
        except EndedError:
            raise CannotError("XLA ended the process") from None
        except UserError as error:
            raise CannotError(str(error)) from None
        except jax.errors.JaxRuntimeError as error:
            raise CannotError(f"XLA: {str(error).splitlines()[0]:.200}") from None


class CannotError(Exception):
    """A candidate that has no plan: it is refused, or XLA does not compile it."""


def together(sampler: Plan, training: Plan) -> Plan:
    """The plan of a sampler and a training step in turn on the same chips.

    The training state stays in memory while sampling.
    """
    parts = training.programs["train_step"].bytes_per_chip
    state = {k: v for k, v in parts.items() if k in ("value", "optimizer", "frozen")}
    limit, programs = training.topology.chip.hbm_bytes, {}
    for name, program in sampler.programs.items():
        total = program.bytes_per_chip["total"] + sum(state.values())
        sizes = state | program.bytes_per_chip | {"total": total}
        fits = program.fits and total <= limit
        programs[name] = program._replace(bytes_per_chip=sizes, fits=fits)
    programs |= training.programs
    return training._replace(
        programs=programs,
        fits=all(p.fits for p in programs.values()),
        sampling_mesh=sampler.sampling_mesh,
    )


def _judge(compiled: Compiled, candidate: Candidate) -> tuple[dict[str, Any], bool]:
    """A candidate's plan as a row of the result, and whether its sampler fits."""
    sampler_mesh, config = candidate.sampler, compiled.config
    shared = sampler_mesh is None and candidate.rollout is None
    without = " sampling.mesh={}" if config.sampling.mesh and shared else ""
    sampling = candidate.applied(config).sampling
    result: dict[str, Any] = {
        "changes": candidate.text() + without,
        "mesh": dict(candidate.mesh),
        "rollout_mesh": None if candidate.rollout is None else dict(candidate.rollout),
        "sampling_mesh": None if sampler_mesh is None else dict(sampler_mesh),
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
        "slots": sampling.slots,
        "int8": list(sampling.int8),
        "float8": list(sampling.float8),
        "placement": "colocated" if candidate.rollout is None else "disjoint",
        "effort": compiled.effort,
    }
    try:
        plan = compiled(candidate)
    except CannotError as error:
        unknown = dict.fromkeys(("step_seconds", "ranked_seconds", "bytes_per_chip"))
        return result | unknown | {"fits": False, "seconds": {}, "error": str(error)}, True
    programs = plan.programs
    result |= {
        "fits": plan.fits,
        "step_seconds": plan.step_seconds,
        "ranked_seconds": plan.step_seconds,
        "seconds": {name: p.roofline_seconds for name, p in programs.items()},
        "bytes_per_chip": max(p.bytes_per_chip["total"] for p in programs.values()),
        "error": None,
    }
    return result, all(p.fits for name, p in programs.items() if name == "sampler")
