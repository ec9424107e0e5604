"""Several runs on one page: their curves over each other, and where their configurations differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.config.write import leaves
from jrl.errors import UserError
from jrl.report.page import Curve, as_page, read_run, thin_curve
from jrl.storage.metrics import write_atomic

IGNORED = ("run.", "log.", "checkpoint.")
"""Keys that change nothing about what is learned."""

CONFIDENCE = 0.95


class Series(NamedTuple):
    """Runs that differ by their seed alone.

    Attributes:
      label: what sets them apart from the others.
      runs: their directories' names.
      settings: their configuration by dotted key, without the seed.
      main: their curves of the panels.
      others: their other curves.
    """

    label: str
    runs: list[str]
    settings: dict[str, Any]
    main: list[Curve]
    others: list[Curve]


def write_overlay(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes one page with the curves of several runs.

    Runs whose configurations differ by the seed alone become one curve, the mean over them, with a
    95 % interval of Student's t at the steps that all of them logged; a run on its own keeps its
    own intervals.

    Args:
      run_dirs: two run directories or more.
      out: the page; ``overlay.html`` in the first run's report by default.

    Returns:
      Path of the page, which is self-contained.

    Raises:
      UserError: fewer than two runs, one named twice, a directory without a run, or the page cannot
        be written.
    """
    paths = [Path(run) for run in run_dirs]
    if len({path.resolve() for path in paths}) < max(2, len(paths)):
        raise UserError(f"{', '.join(map(str, paths))}: name two or more different runs")
    series = _series(paths)
    data = {
        "name": " · ".join(one.label for one in series),
        "runs": [{"label": one.label, "runs": one.runs} for one in series],
        "differences": _differences(series),
        "curves": _curves([one.main for one in series]),
        "others": _curves([one.others for one in series]),
    }
    page = Path(out) if out is not None else paths[0] / "report" / "overlay.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(page, as_page(data))
    except OSError as error:
        raise UserError(f"the page cannot be written to {page}: {error}") from None
    return page


def _series(paths: Sequence[Path]) -> list[Series]:
    """The runs, those together that differ by their seed alone."""
    groups: dict[str, list[tuple[Path, dict[str, Any], Any]]] = {}
    for path in paths:
        files = read_run(path)
        comparable = {
            key: value
            for key, value in leaves(files.header.get("config") or {})
            if key != "seed" and not key.startswith(IGNORED) and value != {}
        }
        groups.setdefault(json.dumps(comparable, sort_keys=True), []).append(
            (path, comparable, files)
        )
    every = [members[0][1] for members in groups.values()]
    series = []
    for members in groups.values():
        settings = members[0][1]
        runs = [path.resolve().name for path, _, _ in members]
        main = [files.main for _, _, files in members]
        others = [files.others for _, _, files in members]
        label = _label(settings, every) or (runs[0] if len(runs) == 1 else f"{len(runs)} seeds")
        series.append(Series(label, runs, settings, _mean_curves(main), _mean_curves(others)))
    return series


def _label(settings: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> str:
    """The first few settings that distinguish a series."""
    keys = [key for key in _keys(every) if _differs(key, every)]
    parts = [f"{key.rpartition('.')[2]} {settings.get(key)}" for key in keys if key in settings]
    return ", ".join(parts[:3])


def _keys(every: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for settings in every for key in settings))


def _differs(key: str, every: Sequence[Mapping[str, Any]]) -> bool:
    return any(settings.get(key) != every[0].get(key) for settings in every)


def _differences(series: Sequence[Series]) -> list[list[Any]]:
    """A row for each key that differs: the key, then its value in each series, None for none."""
    every = [one.settings for one in series]
    return [
        [key, *(settings.get(key) for settings in every)]
        for key in sorted(_keys(every))
        if _differs(key, every)
    ]


def _curves(each: Sequence[Sequence[Curve]]) -> list[dict[str, Any]]:
    """The curves of all series, those of one metric side by side; "run" says whose each is."""
    names = list(dict.fromkeys(curve.name for curves in each for curve in curves))
    return [
        thin_curve(curve)._asdict() | {"run": i}
        for name in names
        for i, curves in enumerate(each)
        for curve in curves
        if curve.name == name
    ]


def _mean_curves(runs: Sequence[Sequence[Curve]]) -> list[Curve]:
    """The mean of several runs' curves, by metric; of one run its own."""
    if len(runs) == 1:
        return list(runs[0])
    by_name = [{curve.name: curve for curve in curves} for curves in runs]
    return [
        mean_curve([curves[curve.name] for curves in by_name])
        for curve in runs[0]
        if all(curve.name in curves for curves in by_name)
    ]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over runs, with the interval of Student's t, at the steps that all of them have.

    Args:
      curves: of one metric, two or more.

    >>> one, two = Curve("a", "a", [1, 2], [1.0, 2.0], [], []), Curve("a", "a", [2], [4.0], [], [])
    >>> mean_curve([one, two])[2:4]
    ([2], [3.0])
    """
    from scipy.special import stdtrit

    steps = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
    at = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    values = np.array([[one[step] for step in steps] for one in at], np.float64)
    mean, n = values.mean(0), len(curves)
    half = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * values.std(0, ddof=1) / math.sqrt(n)
    ends = (mean - half).tolist(), (mean + half).tolist()
    return Curve(curves[0].name, curves[0].title, steps, mean.tolist(), *ends)
