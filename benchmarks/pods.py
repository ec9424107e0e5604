"""Memory and time of the shipped pod configurations on their slices, as XLA compiles them.

    python -m benchmarks.pods --only pod_8b_v6e --program sampler
    python -m benchmarks.pods                       # everything that pods.json does not have yet

Each program is compiled for its slice as a run compiles it (``jrl plan --few-layers``: samplers
from two programs of few layers, training steps whole), in a process of its own. Nothing is
measured: times are the least that the chips' figures allow. Writes pods.json after every program,
and pods.md; the table of ``configs/README.md`` is ``table`` of the same rows
(``tests/plan/test_pods.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

CONFIGS = Path(__file__).parents[1] / "configs"
OUT = Path(__file__).with_suffix("")
NAMES = (
    *("pod_1.7b_v5e", "pod_8b_v6e", "pod_8b_v5e", "pod_32b_v5p", "pod_30b_a3b_v5p"),
    *("pod_405b_v5p", "pod_8b_long_v6e", "pod_8b_long_v5p"),
)
SLICES: Mapping[str, str] = {
    name: tomllib.loads((CONFIGS / f"{name}.toml").read_text())["plan"]["topology"]
    for name in NAMES
}
BEFORE = {
    "pod_1.7b_v5e": 15.0,
    "pod_8b_v6e": 15.0,
    "pod_8b_v5e": 14.2,
    "pod_32b_v5p": 25.8,
    "pod_30b_a3b_v5p": 11.7,
    "pod_405b_v5p": 315.5,
}
"""Seconds of a step with one mesh for both programs, compiled with effort -1; not planned then: the
long ones."""
GIB = 1 << 30


def plan(name: str, program: str) -> dict[str, Any]:
    """One program of a configuration, and the resharding before a sampler."""
    from jrl.config import load_config
    from jrl.plan.make import make_plan
    from jrl.plan.text import as_json
    from jrl.plan.topology import parse_topology

    config = load_config(CONFIGS / f"{name}.toml")
    estimate = make_plan(config, parse_topology(SLICES[name]), "few layers", placement=program)
    fields = as_json(estimate)
    facts = ("mesh", "sampling_mesh", "parameters", "tokens_per_step", "chips", "chip")
    row = {key: fields[key] for key in facts} | {"in_8_bits": list(config.sampling.in_8_bits)}
    return row | fields["programs"]


# ---------------------------------------------------------------- tables


def state_bytes(row: Mapping[str, Any]) -> float:
    """Of the training state, which stays on a chip while it samples."""
    parts = row["train_step"]["bytes_by_part"]
    return sum(
        size for part, size in parts.items() if part in ("weights", "value", "optimizer", "frozen")
    )


def gib_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """GiB of a chip while sampling, training state included, and while training."""
    sampler, training = row["sampler"], row["train_step"]
    weights = sampler["bytes_by_part"].get("weights", 0.0)
    sampling = sampler["bytes_per_chip"] - weights + state_bytes(row)
    return sampling / GIB, training["bytes_per_chip"] / GIB


def utilisation(row: Mapping[str, Any]) -> float:
    """Model FLOP utilisation of the training step."""
    step = row["train_step"]
    return float(step["model_flops"] / row["chip"]["flops"] / step["roofline_seconds"])


def step_seconds(row: Mapping[str, Any]) -> float:
    """Of resharding, sampling and training in turn."""
    return float(sum(row[p]["roofline_seconds"] for p in ("resharding", "sampler", "train_step")))


def mesh(sizes: Mapping[str, int]) -> str:
    """A mesh in words."""
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Meshes, times with their floors, and memory, in Markdown."""
    heads = (
        *("configuration", "slice", "training mesh", "sampler's mesh", "sampler, s (floor)"),
        *("training step, s (floor)", "MFU", "step, s", "before, s"),
        "sampler and training, GiB of a chip",
    )
    lines = ["| " + " | ".join(heads) + " |", "| --- " * 4 + "| ---: " * 6 + "|"]
    for name, row in rows.items():
        times = [
            f"{row[p]['roofline_seconds']:.2f} ({row[p]['floor_seconds']:.2f})"
            for p in ("sampler", "train_step")
        ]
        sampling, trained = gib_of(row)
        room = row["chip"]["hbm_bytes"] / GIB
        cells = [f"`{name}.toml`", SLICES[name], mesh(row["mesh"])]
        short = "".join(f", {part} in 8 bits" for part in row["in_8_bits"])
        cells += [mesh(row["sampling_mesh"]) + short, *times, f"{100 * utilisation(row):.0f} %"]
        cells += [f"{step_seconds(row):.1f}", str(BEFORE.get(name, "-"))]
        cells += [f"{sampling:.1f} and {trained:.1f} of {room:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def breakdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Parts of each program's time, in Markdown."""
    kinds = ("products", "attention", "prefetches", "copies", "the rest", "collectives")
    heads = (
        "configuration",
        "program",
        "at least, s",
        "of its floor",
        "HBM bytes over those needed",
    )
    lines = ["| " + " | ".join((*heads, *kinds)) + " |"]
    lines.append("| --- | --- " + "| ---: " * (len(heads) - 2 + len(kinds)) + "|")
    for name, row in rows.items():
        for program, word in (("sampler", "sampler"), ("train_step", "training")):
            if program not in row:
                continue
            costs = row[program]
            seconds = costs["roofline_seconds"]
            read = "-"
            if costs["reads"]:
                read = f"{costs['hbm_bytes'] / sum(costs['reads'].values()):.2f}"
            cells = [f"`{name}`", word, f"{seconds:.2f}"]
            cells += [f"{100 * costs['floor_seconds'] / seconds:.0f} %", read]
            cells += [f"{costs['operations'][kind]:.2f}" for kind in kinds]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


PAGE = """# The pod configurations, predicted

Made by `python -m benchmarks.pods` from programs that XLA compiled for these slices as a run
compiles them; nothing here was measured on a TPU. Every completion has its full length.

{table}

"Before" is one mesh for both programs, compiled with effort -1, as this project published it
first.

## What the time goes to

Seconds that the operations of each kind would take by themselves, on one chip: matrix products
(what is fused with them included), attention kernels, copies to the chip's fast memory of what is
read there (mostly weights), other copies, the rest (element by element), and what is sent. In a
loop the compute units, the memory and the network work at the same time, so that the columns add
up to more than the time. "Of its floor" is the time of the work that cannot be avoided: model
FLOPs at peak, for a sampler also weights and the filled part of the cache read once for every
token. "HBM bytes over those needed" is the sampler's memory traffic over that reading; below 1, a
part of the weights stays in the chip's fast memory from token to token. Attention is counted with
all its blocks; with `context` a device computes also those that the causal mask hides.

{breakdown}
"""


# ---------------------------------------------------------------- the command


@contextlib.contextmanager
def stored(path: Path) -> Iterator[dict[str, Any]]:
    """The rows on disk; written back under a lock, so that two of these may run at a time."""
    import fcntl

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = json.loads(path.read_text()) if path.exists() else {}
        yield rows
        order = [name for name in SLICES if name in rows]
        path.write_text(json.dumps({name: rows[name] for name in order}, indent=1) + "\n")


def complete(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The rows that have both programs."""
    return {name: row for name, row in rows.items() if {"sampler", "train_step"} <= set(row)}


def main() -> None:
    """Compiles what is asked for, and writes the page."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--only", nargs="*", default=list(SLICES), choices=list(SLICES))
    p.add_argument("--program", nargs="*", default=["sampler", "train_step"])
    p.add_argument("--again", action="store_true", help="also what the file has")
    p.add_argument("--out", type=Path, default=OUT, help="OUT.json and OUT.md")
    args = p.parse_args()
    path = args.out.with_suffix(".json")
    for program in args.program:
        for name in args.only:
            with stored(path) as rows:
                is_stored = program in rows.get(name, {})
            if is_stored and not args.again:
                continue
            planned = plan(name, program)
            with stored(path) as rows:
                rows[name] = rows.get(name, {}) | planned
            print(json.dumps({"configuration": name, "program": program} | planned), flush=True)
    with stored(path) as rows:
        page = PAGE.format(table=table(complete(rows)), breakdown=breakdown(rows))
    args.out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
