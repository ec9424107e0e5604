"""Draws the curves of docs/gallery.md and prints its samples, from finished runs.

    python .ci/gallery.py digits runs/digits
    python .ci/gallery.py countdown runs/countdown-sft runs/countdown
    python .ci/gallery.py gridworld comparison

writes docs/gallery/NAME.svg. Behind the name stand run directories, those of one picture one after
another, or the directory of `jrl compare`. The printed table has held-out problems that the run
sampled before and after training.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOOTHED = 10
"""Training steps in the mean that is drawn over the single ones."""
COLOURS = ("#4051b5", "#b5404f", "#2e7d4f")


class Panel(NamedTuple):
    """One plot: its title, and the metrics that it draws, by their label."""

    title: str
    metrics: dict[str, str]


ACCURACY = Panel("held-out accuracy", {"accuracy": "eval/accuracy"})
REWARD = Panel("reward of the samples", {"reward": "reward"})
PICTURES: dict[str, list[Panel]] = {
    "digits": [REWARD, ACCURACY],
    "gridworld": [Panel("success of the samples, 16 seeds", {})],
    "countdown": [ACCURACY, REWARD],
    "tools": [REWARD, Panel("turns of an episode", {"turns": "turns"})],
    "dpo": [
        ACCURACY,
        Panel("margin of the implicit rewards", {"margin": "eval/margin"}),
    ],
    "distillation": [
        ACCURACY,
        Panel("log(teacher / student), nats a token", {"difference": "advantage_mean"}),
    ],
}


def series(run: pathlib.Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps at which a run logged a metric, and its values; of an evaluation both ends, too."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    values = {row["step"]: row[metric] for row in rows if metric in row and "step" in row}
    if metric.startswith("eval/"):
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        name = metric.removeprefix("eval/")
        before, after = (summary[f"eval_{when}"][name] for when in ("before", "after"))
        values = {0: before, **values, summary["steps"]: after}
    return list(values), list(values.values())


def smooth(values: list[float]) -> np.ndarray:
    """The mean over the last ``SMOOTHED`` values, over fewer at the start."""
    total = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTHED, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def draw(name: str, runs: list[pathlib.Path]) -> pathlib.Path:
    """Writes the picture of a gallery's entry."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    look = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}
    look |= {"path.simplify_threshold": 0.8}  # pixels: smaller files
    with plt.rc_context(look | {"axes.spines.top": False, "axes.spines.right": False}):
        panels = PICTURES[name]
        figure, axes = plt.subplots(1, len(panels), figsize=(7.2, 2.3), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            axis.set_title(panel.title, fontsize=9)
            axis.set_xlabel("training step")
            if name == "gridworld":
                draw_seeds(axis, runs[0])
            else:
                draw_runs(axis, runs, panel)
        figure.tight_layout()
        target = ROOT / "docs" / "gallery" / f"{name}.svg"
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return target


def draw_runs(axis: Any, runs: list[pathlib.Path], panel: Panel) -> None:
    """A metric of runs, each beginning at the step where the one before ended."""
    start = 0
    for i, run in enumerate(runs):
        for metric in panel.metrics.values():
            evaluated = metric.startswith("eval/")
            if not evaluated and i + 1 < len(runs):
                continue  # a supervised run has no samples of its own
            steps, values = series(run, metric)
            at = start + np.array(steps)
            axis.plot(at, values, color=COLOURS[i], alpha=1 if evaluated else 0.25, linewidth=1.2)
            if not evaluated:
                axis.plot(at, smooth(values), color=COLOURS[i], linewidth=1.6)
        start += max(series(run, "loss")[0])
        if i + 1 < len(runs) and axis.lines:
            axis.axvline(start, color="grey", linewidth=0.8, linestyle=":")


def draw_seeds(axis: Any, directory: pathlib.Path) -> None:
    """The reward of each seed of a comparison, and their mean."""
    lines = (directory / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = np.array([json.loads(line)["reward"] for line in lines])
    steps = np.arange(1, rewards.shape[1] + 1)
    axis.plot(steps, rewards.T, color=COLOURS[0], alpha=0.2, linewidth=0.7)
    axis.plot(steps, rewards.mean(0), color=COLOURS[0], linewidth=2)


def samples(run: pathlib.Path, count: int = 4) -> list[str]:
    """A Markdown table of held-out samples before and after training."""
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        row for row in map(json.loads, lines) if row.get("split") == "eval" and not row["member"]
    ]
    first, last = (
        {row["prompt"]: row for row in rows if row["step"] == step}
        for step in (min(row["step"] for row in rows), max(row["step"] for row in rows))
    )
    table = ["| problem | before | after |", "| --- | --- | --- |"]
    for prompt in [prompt for prompt in first if prompt in last][:count]:
        table.append(f"| `{prompt}` | {shown(first[prompt])} | {shown(last[prompt])} |")
    return table


def shown(row: dict[str, Any]) -> str:
    """A sample's text, or its turns, the environment's in brackets; and its reward."""
    turns = [
        turn["text"] if turn["by"] == "policy" else f"[{turn['text']}]"
        for turn in row.get("turns", ())
    ]
    text = " ".join(turns) or row["completion"]
    return f"`{text}` ({row['reward']:g})" if text else f"nothing ({row['reward']:g})"


def main(words: list[str]) -> None:
    """Draws one picture."""
    if len(words) < 2 or words[0] not in PICTURES:
        raise SystemExit(f"usage: python .ci/gallery.py {{{','.join(PICTURES)}}} RUN...")
    name, runs = words[0], [pathlib.Path(word) for word in words[1:]]
    print(draw(name, runs).relative_to(ROOT))
    if (runs[-1] / "samples.jsonl").exists():
        print("\n".join(samples(runs[-1])))


if __name__ == "__main__":
    main(sys.argv[1:])
