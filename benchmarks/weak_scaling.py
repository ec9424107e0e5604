"""Weak scaling on paper: what a chip sends, and how long a step takes, from 4 to 1,024 chips.

    python -m benchmarks.weak_scaling --out benchmarks/weak_scaling

The work of a chip stays the same while chips are added: 4 prompts of 512 tokens, 8 completions of
1,024 tokens each, of the 1.7B-class policy of ``configs/pod_1.7b_v5e.toml``, on v5p. The state is
divided over up to 16 chips (mesh.fsdp), further chips are replicas (mesh.data); the sampler divides
its weights over 4 chips (sampling.mesh.tensor). For each slice the programs are compiled for all of
its chips as a run compiles them, the sampler and the resharding with 2 and with 4 layers, and the
line through the two gives the figures of 28 (``jrl plan --few-layers``); nothing is extrapolated
over chips.
Writes OUT.json, OUT.md, OUT.png.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

CONFIG = Path(__file__).parents[1] / "configs" / "pod_1.7b_v5e.toml"
SLICES = ("2x2x1", "2x2x4", "4x4x4", "4x8x8", "8x8x16")
PROMPTS_PER_CHIP, MOST_SHARDS, TENSOR = 4, 16, 4


def measure(shape: str) -> dict[str, Any]:
    """One row: the plan for one slice."""
    from jrl.config import load_config
    from jrl.plan.make import make_plan
    from jrl.plan.topology import parse_topology

    topology = parse_topology(f"v5p:{shape}")
    shards = min(topology.chips, MOST_SHARDS)
    changes = [
        f"mesh.fsdp={shards}",
        f"mesh.data={topology.chips // shards}",
        f"train.prompts={PROMPTS_PER_CHIP * topology.chips}",
        f"train.microbatches={PROMPTS_PER_CHIP}",
        f"sampling.mesh={{data={topology.chips // TENSOR},tensor={TENSOR}}}",
    ]
    plan = make_plan(load_config(CONFIG, changes), topology, "few layers")
    row: dict[str, Any] = {"topology": topology.name, "chips": topology.chips, "fits": plan.fits}
    for name, program in plan.programs.items():
        row[name] = {
            "collective_bytes": program.collective_bytes,
            "roofline_seconds": program.roofline_seconds,
            "bound": program.bound,
            "alone": program.alone,
            "bytes_per_chip": program.bytes_per_chip["total"],
        }
    row["step_seconds"] = plan.step_seconds
    return row


PROGRAMS = {"train_step": "training step", "sampler": "sampler"}


def limits(row: dict[str, Any]) -> str:
    """Bottleneck of each program, with the seconds of each resource by itself."""
    rows = []
    for name, word in PROGRAMS.items():
        bound, alone = row[name]["bound"], row[name]["alone"]
        first = max(bound, key=lambda k: bound[k])
        rest = ", ".join(f"{k} {alone[k]:.2f} s" for k in alone)
        share = 100 * bound[first] / row[name]["roofline_seconds"]
        rows.append(f"{first} limits {share:.0f} % of the {word} ({rest} each by itself)")
    return "; ".join(rows)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    heads: tuple[str, ...] = (
        "chips",
        "GB sent in training",
        "over fsdp",
        "over data",
        "GB sent in sampling",
    )
    heads += ("training step, s", "sampler, s", "resharding, s", "step, s at least")
    lines = [f"| {' | '.join(heads)} |", "| " + "---: | " * len(heads)]
    for row in rows:
        sent, sampling = (row[name]["collective_bytes"] for name in ("train_step", "sampler"))
        over = [
            sum(v for k, v in sent.items() if axis in k.partition("/")[2].split("+"))
            for axis in ("fsdp", "data")
        ]
        sizes = [sum(sent.values()), *over, sum(sampling.values())]
        names = ("train_step", "sampler", "resharding")
        times = [row[name]["roofline_seconds"] for name in names]
        cells = [f"{row['chips']:,}", *(f"{size / 1e9:.1f}" for size in sizes)]
        cells += [f"{seconds:.2f}" for seconds in (*times, row["step_seconds"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(line.rstrip() for line in lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes and time against the number of chips."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    chips = [row["chips"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label in PROGRAMS.items():
        sent = [sum(row[name]["collective_bytes"].values()) / 1e9 for row in rows]
        left.plot(chips, sent, "o-", label=label)
        right.plot(chips, [row[name]["roofline_seconds"] for row in rows], "o-", label=label)
    right.plot(chips, [row["step_seconds"] for row in rows], "k--", label="step")
    for axes, text in ((left, "GB sent by a chip"), (right, "seconds, at least")):
        axes.set(xlabel="chips (v5p)", ylabel=text, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(chips, [f"{c:,}" for c in chips])
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/weak_scaling"))
    parser.add_argument("--slices", nargs="*", default=list(SLICES))
    args = parser.parse_args()
    path = args.out.with_suffix(".json")
    rows = json.loads(path.read_text()) if path.exists() else []
    for shape in args.slices:
        if not any(row["topology"] == f"v5p:{shape}" for row in rows):
            rows.append(measure(shape))
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    rows.sort(key=lambda row: row["chips"])
    about = __doc__.split("\n\n")[2].partition("Writes")[0].strip()
    most = rows[-1]
    gigabytes = [sum(row["sampler"]["collective_bytes"].values()) / 1e9 for row in (rows[0], most)]
    longer = most["step_seconds"] / rows[0]["step_seconds"]
    sentence = (
        f"On {most['chips']:,} chips {limits(most)}. A step takes {longer:.2f} times as long as on "
        f"{rows[0]['chips']} chips. What grows with the chips in sampling is the rollout itself, "
        f"which every chip gets complete: {gigabytes[0]:.1f} GB sent become {gigabytes[1]:.1f} GB."
    )
    notes = (
        "What goes over both axes at once counts in both columns. Made by\n"
        f"`python -m benchmarks.weak_scaling`, which resumes where its JSON ends.\n\n"
        f"{textwrap.fill(sentence, 100)}"
    )
    if len(rows) < len(SLICES):
        notes += f"\n\nHere are {len(rows)} of the {len(SLICES)} slices that it compiles for."
    text = "\n\n".join([about, table(rows), notes, "![plot](weak_scaling.png)"]) + "\n"
    args.out.with_suffix(".md").write_text("# Weak scaling on paper\n\n" + text)
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
