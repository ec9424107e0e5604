"""Which mesh, rematerialisation, microbatches and placement a run should have on a topology.

The search of "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation"
(arXiv:2406.14088): candidates for where each program runs and how it is divided are costed without
running them, and the fastest that fits is taken. There a profile of single layers is the cost model
and a Markov chain walks the candidates; here XLA compiles a candidate for the chips, a bound on
memory and time orders the candidates, and the first few are compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl.config import Config
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.transformer import count_params
from jrl.train.chips import SHAPES, Topology, parse_topology
from jrl.train.plan import Plan, _shape, quick_plan
from jrl.train.policies import run_task


class Candidate(NamedTuple):
    """One way to run.

    Attributes:
      mesh: devices along each axis, of one placement's chips.
      remat: see ``model.remat``.
      microbatches: see ``train.microbatches``.
      disjoint: sampler and training step on one half of the chips each.
    """

    mesh: tuple[tuple[str, int], ...]
    remat: str
    microbatches: int
    disjoint: bool

    def text(self) -> str:
        """As the changes to a configuration that it stands for."""
        mesh = " ".join(f"mesh.{axis}={n}" for axis, n in self.mesh)
        place = "sampler and training on half the chips each" if self.disjoint else "colocated"
        return f"{mesh} model.remat={self.remat} train.microbatches={self.microbatches}; {place}"


def search(
    config: Config,
    topology: Topology,
    *,
    limit: int = 6,
    echo: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Candidates by predicted step time, those that fit first.

    Args:
      config: the run's; its mesh, remat and microbatches are replaced.
      topology: what it would run on.
      limit: how many candidates are compiled.
      echo: where progress goes.

    Returns:
      For each: ``changes`` (text), ``mesh``, ``remat``, ``microbatches``, ``placement``, ``fits``,
      ``step_seconds`` and ``bytes_per_chip`` (the larger program's).

    Raises:
      UserError: no mesh divides the model and the batch over the chips.
    """
    model = _shape(config, run_task(config))
    half = _half(topology)
    candidates = list(_candidates(config, model, topology, half is not None))
    if not candidates:
        raise UserError(
            f"no mesh over {topology.chips} chips divides the model ({model.heads} heads, "
            f"{model.kv_heads} key-value heads) and train.prompts = {config.train.prompts}; make "
            "train.prompts a multiple of the chips"
        )
    ranked = sorted(candidates, key=lambda c: _guess(config, model, topology, c))
    found = []
    for number, candidate in enumerate(ranked[:limit], 1):
        echo(f"{number} of {min(limit, len(ranked))}: {candidate.text()}")
        found.append(_judge(config, topology, half, candidate))
    return sorted(found, key=lambda f: (not f["fits"], f["step_seconds"] or np.inf))


def _half(topology: Topology) -> Topology | None:
    """A slice with half the chips, for placements side by side."""
    for shape in SHAPES[topology.family]:
        other = parse_topology(f"{topology.family}:{shape}")
        if 2 * other.chips == topology.chips:
            return other
    return None


def _candidates(
    config: Config, model: ModelConfig, topology: Topology, halves: bool
) -> Iterator[Candidate]:
    """Every combination that divides what it must."""
    for disjoint in (False, True) if halves else (False,):
        chips = topology.chips // (2 if disjoint else 1)
        for sizes in _meshes(model, chips):
            data, fsdp, _, expert = sizes
            prompts, shards = config.train.prompts // config.train.minibatches, data * fsdp * expert
            if prompts % shards or (topology.slices > 1 and data % topology.slices):
                continue
            mesh = tuple(zip(("data", "fsdp", "tensor", "expert"), sizes, strict=True))
            shared = prompts // shards
            for remat, parts in itertools.product(("full", "dots"), (1, 2, 4, 8, 16, 32)):
                if shared % parts == 0:
                    yield Candidate(mesh, remat, parts, disjoint)


def _meshes(model: ModelConfig, chips: int) -> Iterator[tuple[int, int, int, int]]:
    """(data, fsdp, tensor, expert), powers of two, with as many chips."""
    powers = [2**i for i in range(int(np.log2(chips)) + 1)]
    widths = [t for t in powers if not (model.kv_heads % t or model.heads % t or t > 16)]
    experts = [e for e in powers if model.experts and model.experts % e == 0] or [1]
    for tensor, expert in itertools.product(widths, experts):
        rest = chips // (tensor * expert)
        if tensor * expert * rest != chips or rest < 1:
            continue
        for fsdp in powers:
            if rest % fsdp == 0 and model.embed_dim % fsdp == 0:
                yield rest // fsdp, fsdp, tensor, expert


def _guess(config: Config, model: ModelConfig, topology: Topology, c: Candidate) -> float:
    """A rough step time, seconds; far out of reach when the memory is surely too small.

    Weights, gradient and moments against memory; then the reads of weights and the exchange of
    gradients and of layers' outputs, each at the chip's rates.
    """
    mesh, chip = dict(c.mesh), topology.chip
    params = count_params(model)
    split = mesh["fsdp"] * mesh["tensor"] * mesh["expert"]
    kept = 4 * params * jnp.dtype(config.model.param_dtype).itemsize / split
    rows = config.train.prompts * config.sampling.group // (mesh["data"] * mesh["fsdp"])
    length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    tokens = rows * length
    layer = 2 * model.embed_dim * tokens / c.microbatches  # bfloat16
    wide = 1 if c.remat == "full" else 2 + (model.mlp_dim * 2 / model.embed_dim) / mesh["tensor"]
    heads = max(model.kv_heads // mesh["tensor"], 1)
    cache = 4 * model.layers * heads * model.head_dim * tokens
    gathered = 2 * params / (mesh["tensor"] * mesh["expert"] * mesh["fsdp"])
    train = kept + layer * wide * model.layers
    sample = (gathered if c.disjoint else kept) + cache
    over = max(train, sample) / chip.hbm_bytes
    chips = topology.chips / (2 if c.disjoint else 1)
    visited = 1.0 if not model.experts else 0.15
    compute = (8 if c.remat == "full" else 6) * params * visited * tokens / chip.flops
    compute *= mesh["data"] * mesh["fsdp"] / chips
    weights = 2 * params / (mesh["tensor"] * mesh["expert"])
    link = 2 * chip.link_bandwidth
    gather = 3 * c.microbatches * weights / link if mesh["fsdp"] > 1 else 2 * weights / link
    exchange = 0.0
    if mesh["tensor"] > 1:
        exchange = 12 * model.layers * layer * c.microbatches / link
    read = gathered / chip.hbm_bandwidth
    token = max(read, 0.0) + (weights / link if mesh["fsdp"] > 1 else 0.0)
    token += cache / 2 / chip.hbm_bandwidth
    sampling = token * config.sampling.max_new_tokens
    times = compute + gather + exchange, sampling
    return (max(times) if c.disjoint else sum(times)) * (1.0 if over < 0.9 else 1e3 * over)


def _judge(
    config: Config, topology: Topology, half: Topology | None, candidate: Candidate
) -> dict[str, Any]:
    """A candidate's plan, or why there is none."""
    mesh = config.mesh.model_copy(update=dict(candidate.mesh) | {"context": 1})
    model = config.model.model_copy(update={"remat": candidate.remat})
    train = config.train.model_copy(update={"microbatches": candidate.microbatches})
    chosen = config.model_copy(update={"mesh": mesh, "model": model, "train": train})
    seconds: float | None
    if candidate.disjoint:
        assert half is not None
        plans = [quick_plan(chosen, half, placement=p) for p in ("sampler", "train_step")]
        times = [plan.step_seconds for plan in plans]
        seconds = None if None in times else max(t for t in times if t) + _move(plans[0])
    else:
        plans = [quick_plan(chosen, topology)]
        seconds = plans[0].step_seconds
    programs = [p for plan in plans for p in plan.programs.values()]
    return {
        "changes": candidate.text(),
        "mesh": dict(candidate.mesh),
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
        "placement": "disjoint" if candidate.disjoint else "colocated",
        "fits": all(plan.fits for plan in plans),
        "step_seconds": seconds,
        "bytes_per_chip": max(p.bytes_per_chip["total"] for p in programs),
    }


def _move(plan: Plan) -> float:
    """Seconds to send the policy's weights from the training chips to the sampler's."""
    weights = plan.programs["sampler"].bytes_per_chip["weights"]
    return weights / plan.topology.chip.link_bandwidth
