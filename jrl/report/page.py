"""The report of a run: plots, and one self-contained HTML page with curves and samples."""

from __future__ import annotations

import importlib.resources
import importlib.util
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import UserError
from jrl.report.health import findings
from jrl.report.samples import spread, thin_samples
from jrl.storage.metrics import read_jsonl, read_summary, write_atomic

MAX_POINTS = 1500
"""Maximum points of a curve in the page; longer curves are thinned evenly, ends kept."""


class Panel(NamedTuple):
    """A main curve, plotted if the run logged its metric.

    Attributes:
      file: name of the PNG, without suffix.
      title: of the plot, with its unit.
      name: the metric.
    """

    file: str
    title: str
    name: str


PANELS = (  # first what tells a run's health
    Panel("reward", "Reward", "reward"),
    Panel("accuracy", "Held-out accuracy", "eval/accuracy"),
    Panel("zero_std_groups", "Zero-advantage groups, fraction", "zero_std_groups"),
    Panel("truncated", "Truncated completions, fraction", "truncated"),
    Panel("length", "Completion length, tokens", "length"),
    Panel("entropy", "Entropy, nats", "entropy"),
    Panel("clip_fraction_high", "Tokens clipped above, fraction", "clip_fraction_high"),
    Panel("clip_fraction_low", "Tokens clipped below, fraction", "clip_fraction_low"),
    Panel("logprob_diff", "Sampler-trainer difference, nats", "logprob_diff"),
    Panel("kl", "KL, nats", "kl"),
    Panel("grad_norm", "Gradient norm", "grad_norm"),
    Panel("loss", "Loss", "loss"),
    Panel("tokens_per_second", "Tokens per second", "tokens_per_second"),
)

TITLES = {
    "skipped_updates": "Skipped updates, fraction",
    "reward_failures": "Failed reward calls, fraction",
}
"""Titles of curves without a panel that the health checks name."""

ROUNDING = {"logprob_diff": 1e-5, "kl": 1e-6, "loss": 1e-6, "clip_fraction_high": 1e-9}
ROUNDING["clip_fraction_low"] = ROUNDING["truncated"] = 1e-9
"""Panels whose values never exceed this show only rounding noise, and are collapsed."""


class Curve(NamedTuple):
    """One metric over the steps at which it was a finite number.

    Attributes:
      name: the metric.
      title: of the plot.
      steps: training steps, ascending.
      values: the metric.
      low: lower ends of a confidence interval, as long as values, or empty.
      high: upper ends.
    """

    name: str
    title: str
    steps: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


def write_report(run_dir: str | Path) -> Path:
    """Writes the report of a run, finished or not, to ``RUN/report``.

    Args:
      run_dir: a run directory, as ``RunWriter`` writes it.

    Returns:
      Path of ``index.html``, which is self-contained and needs no network. With the extra
      ``plot`` the directory also has a PNG for each main curve, and ``overview.png`` with all of
      them.

    Raises:
      UserError: there is no run, or the report cannot be written.
    """
    run = Path(run_dir)
    files = read_run(run)
    out = run / "report"
    try:
        out.mkdir(exist_ok=True)
        for old in out.glob("*.png"):
            old.unlink()
        if importlib.util.find_spec("matplotlib") is not None:  # of the extra plot
            _draw_plots(out, files.main)
        write_atomic(out / "index.html", _page(run, files))
    except OSError as error:
        raise UserError(f"the report cannot be written to {out}: {error}") from None
    return out / "index.html"


class RunFiles(NamedTuple):
    """Contents of a run directory for a report.

    Attributes:
      header: the first record of metrics.jsonl; {} without one.
      summary: of a finished run, else the newest value of each main metric.
      main: curves of the panels.
      others: all other curves.
    """

    header: dict[str, Any]
    summary: dict[str, Any]
    main: list[Curve]
    others: list[Curve]

    @property
    def quiet(self) -> frozenset[str]:
        """The metrics of panels that show only rounding noise."""
        names = {panel.name for panel in PANELS}
        return frozenset(curve.name for curve in self.others if curve.name in names)


def read_run(run: Path) -> RunFiles:
    """Reads a run directory.

    Raises:
      UserError: it holds no run.
    """
    if not (run / "metrics.jsonl").exists():
        raise UserError(f"{run} is not a run directory: it has no metrics.jsonl")
    records = read_jsonl(run / "metrics.jsonl")
    header = records.pop(0) if records and "versions" in records[0] else {}
    summary = read_summary(run)
    main, others = find_curves([*records, *_ends(summary)])
    return RunFiles(header, summary or _latest(records), main, others)


def find_curves(records: Sequence[Mapping[str, Any]]) -> tuple[list[Curve], list[Curve]]:
    """The curves of a run: those of ``PANELS``, and all other logged numbers.

    Args:
      records: the objects of ``metrics.jsonl`` after its header.

    Returns:
      (main curves in the order of PANELS, several reward parts after the reward; others: those
      of PANELS that hold rounding alone, then the rest by name), each with at least one point.
    """
    names = sorted({n for record in records for n in record if n not in ("step", "versions")})
    curves = {name: curve for name in names if (curve := _curve(records, name)).values}
    parts = [Panel(_file(name), f"Reward part {name[7:]}", name) for name in _parts(curves)]
    main, quiet = [], []
    for panel in (PANELS[0], *(parts if len(parts) > 1 else ()), *PANELS[1:]):
        if panel.name in curves:
            curve = curves.pop(panel.name)._replace(title=panel.title)
            if max(map(abs, curve.values)) <= ROUNDING.get(panel.name, -1.0):
                quiet.append(curve._replace(title=f"{panel.title}: only rounding noise"))
            else:
                main.append(curve)
            for bound_name in (f"{panel.name}_low", f"{panel.name}_high"):
                curves.pop(bound_name, None)
    return main, [*quiet, *curves.values()]


def _parts(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("reward/")]


def _file(name: str) -> str:
    """The name of a metric as the name of a file."""
    return re.sub(r"[^\w-]+", "_", name)


def _curve(records: Sequence[Mapping[str, Any]], name: str) -> Curve:
    rows = {
        record["step"]: record
        for record in records
        if isinstance(record.get("step"), int) and _is_number(record.get(name))
    }
    steps = sorted(rows)
    values = [float(rows[step][name]) for step in steps]
    ends = (f"{name}_low", f"{name}_high")
    if not all(_is_number(rows[step].get(end)) for step in steps for end in ends):
        return Curve(name, TITLES.get(name, name), steps, values, [], [])
    low, high = ([float(rows[step][end]) for step in steps] for end in ends)
    return Curve(name, name, steps, values, low, high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: Sequence[float]) -> list[float]:
    """A centred moving average, which does not shift the curve.

    Args:
      values: as logged.

    Returns:
      As many values, each the mean over a window of a tenth of them, cut off at the ends. Fewer
      than 20 values are returned unchanged.

    >>> smooth([2.0] * 30) == [2.0] * 30
    True
    """
    n = len(values)
    if n < 20:
        return list(values)
    sums = [0.0, *itertools.accumulate(values)]
    half = n // 20
    windows = [(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in windows]


# ---------------------------------------------------------------- plots


def _draw_plots(out: Path, curves: Sequence[Curve]) -> None:
    # Figure without pyplot: no global state, and a notebook keeps its backend
    from matplotlib.figure import Figure

    files = {panel.name: panel.file for panel in PANELS}
    for curve in curves:
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        _draw(figure.subplots(), curve)
        figure.savefig(out / f"{files.get(curve.name) or _file(curve.name)}.png", dpi=120)
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns) if columns else 0
    if rows:
        figure = Figure(figsize=(4.8 * columns, 3.2 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, curve in zip(axes, curves, strict=False):
            _draw(axis, curve)
        for axis in axes[len(curves) :]:
            axis.set_axis_off()
        figure.savefig(out / "overview.png", dpi=120)


def _draw(axis: Any, curve: Curve) -> None:
    from matplotlib.ticker import MaxNLocator

    smoothed = smooth(curve.values)
    few = len(curve.values) < 20
    if curve.low:
        axis.fill_between(curve.steps, curve.low, curve.high, color="#2563eb", alpha=0.15, lw=0)
    if not few:
        axis.plot(curve.steps, curve.values, color="#2563eb", alpha=0.3, linewidth=0.9)
    axis.plot(curve.steps, smoothed, color="#2563eb", linewidth=1.8, marker="o" if few else None)
    axis.set_title(curve.title, fontsize=11, loc="left")
    axis.set_xlabel("step", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.tick_params(labelsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------- the page


def _page(run: Path, files: RunFiles) -> str:
    samples = read_jsonl(run / "samples.jsonl")
    curves = [*files.main, *files.others]
    return as_page(
        {
            "name": run.resolve().name,
            "header": files.header,
            "config": _read_text(run / "config.toml"),
            "summary": {k: v for k, v in files.summary.items() if not isinstance(v, dict)},
            "finished": (run / "summary.json").exists(),
            "health": [
                finding._asdict()
                for finding in findings(curves, files.quiet, fixed_length=_fixed_length(run))
            ],
            "curves": [thin_curve(curve)._asdict() for curve in curves],
            "main": len(files.main),
            "samples": thin_samples(samples),
            "samples_total": len(samples),
        }
    )


def _fixed_length(run: Path) -> bool:
    """Whether the run's task or environment sets the length of completions."""
    try:
        data = tomllib.loads(_read_text(run / "config.toml")).get("data")
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(data, dict) and ("task" in data or ("env" in data and "train" not in data))


def as_page(data: Mapping[str, Any]) -> str:
    """The page that shows the data: one self-contained HTML file."""
    # "<" is the only character that could end the script element early
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = importlib.resources.files("jrl.report").joinpath("page.html").read_text("utf-8")
    return template.replace("/*DATA*/", text, 1)


def _ends(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evaluations before and after training as records; only the summary has them."""
    ends = ((0, "eval_before"), (summary.get("steps"), "eval_after"))
    return [
        {"step": step} | {f"eval/{key}": value for key, value in summary[name].items()}
        for step, name in ends
        if isinstance(summary.get(name), dict)
    ]


def _latest(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest value of each main metric, for a run without a summary."""
    last: dict[str, Any] = {}
    for record in records:
        last |= {name: value for name, value in record.items() if _is_number(value)}
    names = ["step", *(panel.name for panel in PANELS)]
    return {name: last[name] for name in names if name in last}


def thin_curve(curve: Curve) -> Curve:
    """The curve with at most ``MAX_POINTS`` points, taken evenly."""
    picked = spread(len(curve.steps), MAX_POINTS)
    steps = [curve.steps[i] for i in picked]
    values, low, high = (
        [items[i] for i in picked] if items else []
        for items in (curve.values, curve.low, curve.high)
    )
    return Curve(curve.name, curve.title, steps, values, low, high)


def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.exists() else ""
