"""Which mesh, rematerialisation, microbatches and placement a run should have on a topology.

The search of "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation"
(arXiv:2406.14088): candidates for the placement and sharding of each program are costed without
running them, and the fastest that fits wins. The paper's cost model is a profile of single layers,
and a Markov chain explores the candidates; here a rough estimate of memory and time orders the
candidates, and XLA compiles the first few for the chips.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl.config import Config, PlacementTable
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.transformer import count_params
from jrl.plan.compile import Plan, quick_plan
from jrl.plan.disjoint import half, plan_disjoint
from jrl.plan.lower import run_model
from jrl.plan.topology import Chip, Topology
from jrl.train.frozen import run_task
from jrl.train.gather import cached_tokens

Sizes = tuple[tuple[str, int], ...]

SLOWER = 3
"""How many times as long a program compiles with effort 0 as with -1, observed at most."""

SAMPLERS = 3
"""Meshes of the sampler's own that are tried with each mesh of training."""


class Candidate(NamedTuple):
    """One way to run.

    Attributes:
      mesh: devices along each axis, of training alone where rollout has a mesh of its own.
      remat: see ``model.remat``.
      microbatches: see ``train.microbatches``.
      rollout: devices of rollout along each axis, half of the chips; None where rollout and
        training alternate on all of them.
      sampler: the mesh that they are arranged in while sampling; None for that of training.
    """

    mesh: Sizes
    remat: str
    microbatches: int
    rollout: Sizes | None
    sampler: Sizes | None = None

    def text(self) -> str:
        """As changes to a configuration, KEY=VALUE."""
        found = [f"mesh.{axis}={n}" for axis, n in self.mesh]
        found += [f"model.remat={self.remat}", f"train.microbatches={self.microbatches}"]
        if self.rollout is not None:
            found += ["placement.staleness=1"]
        found += [f"sampling.mesh.{axis}={n}" for axis, n in self.rollout or self.sampler or ()]
        return " ".join(found)

    def applied(self, config: Config) -> Config:
        """The configuration with these changes."""
        placement = None if self.rollout is None else PlacementTable(staleness=1)
        model = config.model.model_copy(update={"remat": self.remat})
        train = config.train.model_copy(update={"microbatches": self.microbatches})
        own = {axis: n for axis, n in self.rollout or self.sampler or () if n > 1}
        sampling = config.sampling.model_copy(update={"mesh": own})
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
      ``microbatches``, ``placement``, ``fits``, ``step_seconds``, ``effort`` with which that was
      compiled, ``ranked_seconds`` (with the effort of the ranking), ``estimated_seconds`` (before
      compiling), ``seconds`` of each program, and ``bytes_per_chip`` (the larger program's).

    Raises:
      UserError: no mesh divides the model and the batch over the chips.
    """
    model = run_model(config, run_task(config))
    candidates = list(enumerate_candidates(config, model, topology))
    if not candidates:
        raise UserError(
            f"no mesh over {topology.chips} chips divides the model ({model.heads} heads, "
            f"{model.kv_heads} key-value heads) and train.prompts = {config.train.prompts}; make "
            "train.prompts a multiple of the chips"
        )
    ranked = sorted(candidates, key=lambda c: estimate(config, model, topology, c))
    found: list[dict[str, Any]] = []
    chosen: dict[str, Candidate] = {}
    hopeless: set[Sizes | None] = set()
    began, longest, compiled = time.monotonic(), 0.0, Compiled(config, topology, effort)
    for candidate in dict.fromkeys([*configured(config, candidates), *diverse_first(ranked)]):
        if len(found) == limit:
            break
        if candidate.rollout in hopeless:
            continue
        start = time.monotonic()
        if seconds is not None and found and start - began + longest > seconds:
            echo(f"stopped after {len(found)} of {limit}: another would go beyond {seconds:g} s")
            break
        echo(f"{len(found) + 1} of {limit}: {candidate.text()}")
        judged, samples = _judge(compiled, candidate)
        judged["estimated_seconds"] = estimate(config, model, topology, candidate)
        chosen[judged["changes"]] = candidate
        longest = max(longest, time.monotonic() - start)
        if candidate.rollout is not None and not samples:
            hopeless.add(candidate.rollout)  # on any mesh of training
        found.append(judged)
    found.sort(key=_order)
    left = np.inf if seconds is None else began + seconds - time.monotonic()
    if effort and found[0]["fits"] and left > SLOWER * longest:
        echo(f"compiling the best with effort 0, as in a run: {found[0]['changes']}")
        again, _ = _judge(Compiled(config, topology, 0.0), chosen[found[0]["changes"]])
        found[0] |= again | {"ranked_seconds": found[0]["ranked_seconds"]}
    return sorted(found, key=_order)


def _order(found: Mapping[str, Any]) -> tuple[bool, float]:
    """What fits first, then by time."""
    return not found["fits"], found["step_seconds"] or np.inf


def configured(config: Config, candidates: list[Candidate]) -> list[Candidate]:
    """The configuration itself as a candidate, if it is one."""
    own = [(axis, config.mesh_axes[axis]) for axis in ("data", "fsdp", "tensor", "expert")]
    axes = config.sampling.mesh_axes
    sampler = tuple((axis, axes[axis]) for axis, _ in own) if config.sampling.mesh else None
    sampler = None if sampler == tuple(own) else sampler
    given = Candidate(tuple(own), config.model.remat, config.train.microbatches, None, sampler)
    return [given] if given._replace(sampler=None) in candidates else []


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
        best = sorted(
            options, key=lambda m: sampling_seconds(config, model, topology.chip, dict(m))
        )
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
            for remat, parts in itertools.product(("full", "elementwise"), (1, 2, 4, 8, 16, 32)):
                if local % parts == 0:
                    yield Candidate(mesh, remat, parts, *where)


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


# ---------------------------------------------------------------- estimates before compiling


def estimate(config: Config, model: ModelConfig, topology: Topology, c: Candidate) -> float:
    """A rough step time, seconds, multiplied by a large factor if memory is clearly too small."""
    train, kept = training_seconds(config, model, topology.chip, c)
    if c.rollout is None:
        mesh = dict(c.sampler or c.mesh)
        sampling = sampling_seconds(config, model, topology.chip, mesh, kept)
        moved = resharding_seconds(model, topology.chip, mesh) if c.sampler else 0.0
        return train + sampling + moved
    return max(train, sampling_seconds(config, model, topology.chip, dict(c.rollout)))


def _tokens(config: Config, mesh: Mapping[str, int]) -> float:
    """Tokens of all sequences on one chip."""
    rows = config.train.prompts * config.sampling.group / _shards(mesh)
    return rows * (config.max_prompt_tokens + config.sampling.max_new_tokens)


def _too_large(size: float, chip: Chip) -> float:
    """The factor on the time of a program of this many bytes."""
    over = size / chip.hbm_bytes
    return 1.0 if over < 0.9 else 1e3 * over


def training_seconds(
    config: Config, model: ModelConfig, chip: Chip, c: Candidate
) -> tuple[float, float]:
    """Rough seconds of a training step, and bytes of the state with its gradient.

    Counts the matrix products of all layers and the collectives of weights, gradients and layer
    outputs.
    """
    mesh, params = dict(c.mesh), count_params(model)
    tokens, matrices = _tokens(config, mesh), mesh["tensor"] * mesh["expert"]
    kept = 4 * params * jnp.dtype(config.model.param_dtype).itemsize / (mesh["fsdp"] * matrices)
    layer = 2 * model.embed_dim * tokens / c.microbatches  # bfloat16
    saved = 1 if c.remat == "full" else 3 + (model.mlp_dim * 2 / model.embed_dim) / mesh["tensor"]
    active = 1.0 if not model.experts else 0.15  # share of the parameters that a token uses
    compute = (8 if c.remat == "full" else 6) * params * active * tokens / chip.flops
    link = 2 * chip.link_bandwidth
    weights = 2 * params / matrices
    gather = (3 * c.microbatches if mesh["fsdp"] > 1 else 2) * weights / link
    exchange = 12 * model.layers * layer * c.microbatches / link if mesh["tensor"] > 1 else 0.0
    size = kept + layer * saved * model.layers
    return (compute / mesh["tensor"] + gather + exchange) * _too_large(size, chip), kept


def resharding_seconds(model: ModelConfig, chip: Chip, mesh: Mapping[str, int]) -> float:
    """Rough seconds until every device has its part of the sampler's weights, in 16 bits."""
    return 2 * count_params(model) / (mesh["tensor"] * mesh["expert"]) / (2 * chip.link_bandwidth)


def sampling_seconds(
    config: Config, model: ModelConfig, chip: Chip, mesh: Mapping[str, int], kept: float = 0.0
) -> float:
    """Rough seconds of a rollout: weights and cache are read for every token."""
    heads = max(model.kv_heads // mesh["tensor"], 1)
    group, new = config.sampling.group, config.sampling.max_new_tokens
    prompts, width = config.train.prompts / _shards(mesh), config.max_prompt_tokens
    tokens = cached_tokens(prompts, group, width, new, config.sampling.slots)
    cache = 4 * model.layers * heads * model.head_dim * tokens
    weights = 2 * count_params(model) / (mesh["tensor"] * mesh["expert"])
    gathered = 2 * weights <= chip.hbm_bytes  # as in train.gather
    read = (weights + cache / 2) / chip.hbm_bandwidth
    if mesh["fsdp"] > 1 and not gathered:
        read += weights / (2 * chip.link_bandwidth)
    if mesh["tensor"] > 1:  # two all-reduces a layer, and one of the logits
        rows = prompts * group
        sums = 8 * model.layers * model.embed_dim + 4 * model.vocab_size
        read += rows * sums / (2 * chip.link_bandwidth)
    size = kept + cache + (weights if gathered else weights / mesh["fsdp"])
    return read * new * _too_large(size, chip)


# ---------------------------------------------------------------- by compiling


class Compiled:
    """Plans of the two halves of colocated runs, each compiled once for all that share it.

    Args:
      config: the run's.
      topology: the slices.
      effort: XLA's.
    """

    def __init__(self, config: Config, topology: Topology, effort: float) -> None:
        self.config, self.topology, self.effort = config, topology, effort
        self._halves: dict[Any, Plan] = {}

    def __call__(self, candidate: Candidate) -> Plan:
        """The plan of a candidate."""
        chosen = candidate.applied(self.config)
        if candidate.rollout is not None:
            return plan_disjoint(chosen, self.topology, quick_plan, effort=self.effort)
        training = candidate.mesh, candidate.remat, candidate.microbatches
        sampling = candidate.mesh, candidate.sampler
        halves = []
        for placement, key in (("sampler", sampling), ("train_step", training)):
            if key not in self._halves:
                options: dict[str, Any] = {"placement": placement, "effort": self.effort}
                self._halves[key] = quick_plan(chosen, self.topology, **options)
            halves.append(self._halves[key])
        return together(*halves)


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
    plan = compiled(candidate)
    programs, own = plan.programs, candidate.sampler
    shared = own is None and candidate.rollout is None
    without = " sampling.mesh={}" if compiled.config.sampling.mesh and shared else ""
    judged = {
        "changes": candidate.text() + without,
        "mesh": dict(candidate.mesh),
        "rollout_mesh": None if candidate.rollout is None else dict(candidate.rollout),
        "sampling_mesh": None if own is None else dict(own),
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
        "placement": "colocated" if candidate.rollout is None else "disjoint",
        "fits": plan.fits,
        "step_seconds": plan.step_seconds,
        "ranked_seconds": plan.step_seconds,
        "effort": compiled.effort,
        "seconds": {name: p.roofline_seconds for name, p in programs.items()},
        "bytes_per_chip": max(p.bytes_per_chip["total"] for p in programs.values()),
    }
    return judged, all(p.fits for name, p in programs.items() if name == "sampler")
