"""Plans and searches as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jrl.plan.memory import GIB
from jrl.plan.records import Plan, Program
from jrl.plan.topology import Topology

_WORDS = {
    "resharding": "resharding of the weights for the sampler",
    "train_step": "training step",
    "sampler": "sampler",
    "judge": "while judges and likelihoods are asked",
}
_PARTS = {
    "prepared": "gathered copy for sampling",
    "temporaries": "activations and other temporaries",
    "value": "value network",
    "optimizer": "optimizer moments",
    "frozen": "frozen policies",
    "judges": "judges",
    "reward_models": "reward models",
    "cache": "cache of keys and values",
    "working": "keys and values, or states",
    "program": "code",
}


def as_json(plan: Plan) -> dict[str, Any]:
    """The JSON of ``jrl plan --json``: ``fits``, and each program's numbers; None if unknown."""
    chip = plan.topology.chip
    return {
        "fits": plan.fits,
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "mesh": plan.mesh,
        "rollout_mesh": plan.rollout_mesh,
        "sampling_mesh": plan.sampling_mesh,
        "parameters": plan.parameters,
        "remat": plan.remat,
        "chip": {
            "hbm_bytes": chip.hbm_bytes,
            "flops": chip.flops,
            "hbm_bandwidth": chip.hbm_bandwidth,
            "source": chip.source,
        },
        "step_seconds": plan.step_seconds,
        "tokens_per_step": plan.tokens,
        "remedies": plan.remedies,
        "programs": {name: _numbers(program) for name, program in plan.programs.items()},
    }


def _numbers(program: Program) -> dict[str, Any]:
    """A program's numbers by name, totals with their parts."""
    traffic, parts, numbers = (
        program.collective_bytes,
        dict(program.bytes_per_chip),
        program._asdict(),
    )
    return numbers | {
        "extrapolated_from_layers": list(numbers.pop("layers")),
        "bytes_per_chip": parts.pop("total"),
        "bytes_by_part": parts,
        "collective_bytes": None if traffic is None else sum(traffic.values()),
        "collective_bytes_by_kind": traffic,
    }


def as_text(plan: Plan) -> str:
    """The text of ``jrl plan``."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    topology = plan.topology
    chips = "1 chip" if topology.chips == 1 else f"{topology.chips} chips"
    yield f"{plan.parameters / 1e9:.2f}B parameters on {topology.name}, {chips}"
    if plan.sampling_mesh is not None:
        yield f"training on mesh {_mesh(plan.mesh)}, sampling on mesh {_mesh(plan.sampling_mesh)}"
        yield "of the same chips; the weights are resharded once a rollout"
    elif plan.rollout_mesh is None:
        yield f"mesh {_mesh(plan.mesh)}"
    else:
        yield f"training on mesh {_mesh(plan.mesh)}, sampling on mesh {_mesh(plan.rollout_mesh)}"
        yield f"in parallel; sending the weights takes {_seconds(plan.move_seconds)}"
    if plan.experts and max(m.get("expert", 1) for m in (plan.mesh, plan.sampling_mesh or {})) > 1:
        yield "experts are counted as visited equally often; a chip with more visits takes longer"
    yield f"rematerialisation {plan.remat}"
    for name, program in plan.programs.items():
        yield ""
        tokens = plan.tokens / topology.chips if plan.rollout_mesh is None else 0.0
        yield from _program(_WORDS[name], program, topology, tokens)
        if program.kernels is not None:
            yield from _launched(program.kernels, name, plan.layers)
    yield ""
    counted = any(program.counted for program in plan.programs.values())
    if (seconds := plan.step_seconds) is not None:
        rate = plan.tokens / max(seconds, 1e-9)
        least = "about" if counted else "at least"
        yield (
            f"a step takes {least} {_seconds(seconds)} when every completion has its full length: "
            f"{rate:,.0f} tokens/s, {rate / topology.chips:,.0f} a chip"
        )
    if counted:
        yield "nothing was compiled; without --quick it is, for minutes, and the verdict is certain"
    estimated = " by this estimate" * counted
    yield f"verdict: fits{estimated}" if plan.fits else f"verdict: DOES NOT FIT{estimated}"
    for remedy in plan.remedies:
        yield f"  {remedy}"
    yield f"chip figures: {topology.chip.source}"


def _mesh(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one chip"


def _program(name: str, program: Program, topology: Topology, tokens: float) -> Iterator[str]:
    limit = topology.chip.hbm_bytes
    total = program.bytes_per_chip["total"]
    yield f"{name}: {total / GIB:.2f} of {limit / GIB:.0f} GiB a chip ({100 * total / limit:.0f} %)"
    for part, size in program.bytes_per_chip.items():
        if part != "total":
            yield f"  {_PARTS.get(part, part):<33} {size / GIB:8.3f} GiB"
    if name == _WORDS["judge"]:
        yield "  counted: its activations and its time are not known"
        return
    if program.layers:
        yield f"  extrapolated from programs of {' and '.join(map(str, program.layers))} layers"
    if program.counted:
        yield "  counted, not compiled: temporaries and times are estimates, the rest is exact"
        yield "  (training of shipped pod files: 0.34 to 0.95 and 0.42 to 1.02 times as compiled)"
    elif program.roofline_seconds is None or program.bound is None:
        yield "  XLA ran out of memory; operations and time are unknown"
        return
    if program.flops is not None:
        traffic = _bytes(program.hbm_bytes or 0)
        yield f"  {program.flops:.3g} operations, {traffic} of memory traffic"
    for key, size in (program.collective_bytes or {}).items():
        kind, _, axes = key.partition("/")
        yield f"  {kind} over {axes}: {_bytes(size)} sent{_through(topology, axes)}"
    if program.roofline_seconds is not None and program.bound is not None:
        split = ", ".join(f"{k} {_seconds(v)}" for k, v in program.bound.items() if v)
        least = "about" if program.counted else "at least"
        yield f"  {least} {_seconds(program.roofline_seconds)} ({split})"
    yield from _shares(program, topology, tokens)


def _through(topology: Topology, axes: str) -> str:
    """The network of a collective over mesh axes; "" where there is but that between TPUs."""
    if topology.slices > 1 and "data" in axes.split("+"):  # no other axis crosses slices
        return " through the data-centre network"
    return f" through {topology.chip.link}" if topology.chip.platform == "gpu" else ""


def _launched(kernels: Mapping[str, float], name: str, layers: int) -> Iterator[str]:
    """Lines on what the host launches on a GPU in a program of this name."""
    parts = {part: kernels[part] for part in ("layers", "draw", "rest")}
    each = [f"{part} {_count(n)}" for part, n in parts.items() if n]
    if layers:
        each[0] += f", {kernels['layers'] / layers:.3g} each of {layers}"
    unit = "token step" if name == "sampler" else "training step"
    copied = 100 * kernels["copied"] / max(kernels["bytes"], 1.0)
    yield (
        f"  {_count(sum(parts.values()))} kernels a {unit} ({'; '.join(each)}),"
        f" {copied:.1f} % of its bytes copied or gathered only"
    )
    if kernels["returns"]:
        conditionals = kernels["conditionals"]
        of_them = f", {conditionals:.3g} of them conditionals" if conditionals else ""
        times = "once" if kernels["returns"] == 1 else f"{kernels['returns']:.3g} times"
        yield f"  a {unit} returns to the host {times}{of_them}"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _shares(program: Program, topology: Topology, tokens: float) -> Iterator[str]:
    """Breakdown of a program's time, and its distance from the lower bound."""
    seconds = max(program.roofline_seconds or 0.0, 1e-12)
    if program.alone is not None:
        each = ", ".join(f"{k} {_seconds(v)}" for k, v in program.alone.items())
        yield f"  each by itself: {each}; {max(program.alone, key=program.alone.__getitem__)} leads"
    if program.operations is not None:
        by_operation = sorted(program.operations.items(), key=lambda item: -item[1])
        yield f"  by operation: {', '.join(f'{k} {_seconds(v)}' for k, v in by_operation if v)}"
    if program.full_seconds is not None:
        yield (
            "  the cache is read as far as it is filled; read whole for every token: "
            f"{_seconds(program.full_seconds)}"
        )
    elif program.reads is not None:
        yield "  the cache is read whole for every token, filled or not"
    if program.reads is not None and program.hbm_bytes:
        shares = {k: v / program.hbm_bytes for k, v in program.reads.items()}
        rest = max(1 - sum(shares.values()), 0.0)
        named = ", ".join(f"{k} {100 * v:.0f} %" for k, v in shares.items())
        yield (
            f"  memory traffic: {named} (read once a token), activations and the rest "
            f"{100 * rest:.0f} %"
        )
    if program.model_flops:
        used = program.model_flops / topology.chip.flops / seconds
        rate = f", {tokens / seconds:,.0f} tokens/s a chip" if tokens else ""
        yield f"  model FLOP utilisation {100 * used:.1f} %{rate}"
    if program.floor_seconds:
        reached = 100 * program.floor_seconds / seconds
        yield f"  floor {_seconds(program.floor_seconds)}, of which {reached:.0f} % is reached"
    if program.effort:
        yield (
            f"  compiled with effort {program.effort:g}: a run's program, with 0, may have other "
            "collectives and temporaries"
        )


def _bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def search_text(results: Sequence[Mapping[str, Any]]) -> str:
    """The candidates of a search as a table, best first, and how far the estimates were off."""
    rows = [("", "predicted step", "estimated before", "GiB a chip", "changes")]
    for i, item in enumerate(results, 1):
        seconds, bytes_ = item["step_seconds"], item["bytes_per_chip"]
        time = "-" if seconds is None else _seconds(seconds)
        size = "-" if bytes_ is None else f"{bytes_ / GIB:.1f}"
        why = item["error"] or "does not fit"
        verdict = item["changes"] if item["fits"] else f"{item['changes']} ({why})"
        rough = _seconds(item["estimated_seconds"]) if item["fits"] else "-"
        if item["step_seconds"] != item["ranked_seconds"]:
            verdict += f" (compiled as in a run; ranked by {_seconds(item['ranked_seconds'])})"
        rows.append((str(i), time, rough, size, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths, strict=True)), row[4]])
        for row in rows
    ]
    if results and (ratio := results[0]["estimate_ratio"]) is not None:
        lines.append(f"compiled times are {ratio:.2g} times the estimates (median of what fits)")
    return "\n".join(lines)
