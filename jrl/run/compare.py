"""Comparison of methods: all seeds of a method in one program, and intervals, not best runs.

Reports as "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv:2108.13264) advises: the interquartile mean over all runs of all tasks, with confidence
intervals from a bootstrap that resamples the runs of each task.

    results.jsonl    a line for each task, method and seed: accuracies (in an environment turns,
                     too), and the reward of each step
    comparison.json  the table's numbers and the configuration
    comparison.md    the table
    comparison.png   intervals, and rewards over steps (with the extra plot)
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.config import Config, as_tree, build_config
from jrl.config.tables import ValueTable
from jrl.episodes import ENVS
from jrl.errors import UserError
from jrl.methods import find_method
from jrl.models import hf
from jrl.sampling.params import make_sampling_params
from jrl.setup.adapters import policy_of
from jrl.setup.frozen import frozen_params
from jrl.setup.kinds import kind_of
from jrl.setup.objective import COMMON, method_of
from jrl.setup.run import Run
from jrl.storage.metrics import plain, write_atomic
from jrl.system.compile_cache import enable_compile_cache
from jrl.train import build, programs
from jrl.train.compiled import held_out, iterate, warm_start
from jrl.train.memory_check import check_weights
from jrl.train.reward_model import value_start
from jrl.train.trainable import check_trainable
from jrl.types import Array, Params

RESAMPLES = 10_000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A statistic with its confidence interval."""

    value: float
    low: float
    high: float


# ---------------------------------------------------------------- statistics


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half of the scores.

    "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264): more
    robust to outlying runs than the mean, with less variance than the median. Of n scores the
    floor(n / 4) lowest and highest are left out.

    Args:
      scores: [..., n] float.

    Returns:
      [...] float.

    >>> interquartile_mean(np.array([0.0, 1.0, 2.0, 9.0])).item()
    1.5
    """
    cut = scores.shape[-1] // 4
    return np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(axis=-1)


def stratified_interval(
    scores: np.ndarray,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The interquartile mean over runs and tasks, with its stratified bootstrap interval.

    The percentile bootstrap of "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice" (arXiv:2108.13264): each resample draws the runs of each task
    with replacement.

    Args:
      scores: [runs, tasks] float.
      seed: of the resamples.
      resamples: number of resamples.
      confidence: share of the resamples inside the interval.
    """
    runs, tasks = scores.shape
    rows = np.random.default_rng(seed).integers(0, runs, (resamples, runs, tasks))
    resampled = interquartile_mean(scores[rows, np.arange(tasks)].reshape(resamples, -1))
    outside = 50 * (1 - confidence)
    low, high = np.percentile(resampled, [outside, 100 - outside])
    return Interval(float(interquartile_mean(scores.reshape(-1))), float(low), float(high))


# ---------------------------------------------------------------- running


def compare(
    config: Config,
    *,
    methods: Sequence[str],
    tasks: Sequence[str],
    seeds: int,
    out: Path,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains every method on every task with several seeds, and writes the comparison.

    For a seed, all methods start from the weights of the same warm start and see the same problems
    in the same order. All seeds of a method run in one program.

    Args:
      config: of the runs: sizes, rewards, optimizer, warm start, ``train.steps``. The first seed
        is ``config.seed``.
      methods: by name, with default coefficients but those of ``config.objective``, each for the
        methods that have it, which is one of them at least.
      tasks: procedural tasks, NAME or NAME:DIFFICULTY, and environments, by name. That of
        ``config`` keeps its options.
      seeds: runs of each method on each task.
      out: a new directory.
      echo: receives lines of progress.

    Returns:
      The content of comparison.json.

    Raises:
      UserError: fewer than two seeds, a directory with results, or a method that cannot run
        inside one program; all such methods are named, before anything runs.
    """
    if seeds < 2:
        raise UserError(f"--seeds {seeds}: an interval needs at least 2 runs of each method")
    if (out / "results.jsonl").exists():
        raise UserError(f"{out} already holds a comparison; name a new directory")
    enable_compile_cache()
    runs = _runs(config, methods, tasks)
    for run in runs.values():
        check_weights(run, key="--seeds", times=seeds)
    out.mkdir(parents=True, exist_ok=True)
    for name, readers in coefficient_readers(config, methods).items():
        if len(readers) < len(methods):
            echo(f"objective.{name} is read by {', '.join(readers)} alone")
    keys = jax.vmap(jax.random.key)(config.seed + jnp.arange(seeds))
    results: list[dict[str, Any]] = []
    for task in tasks:
        start = _Start(runs[task, methods[0]], keys)
        echo(f"{task}: accuracy {float(start.metrics['accuracy'].mean()):.3f} before")
        for method in methods:
            echo(f"{task}: {method}, {seeds} seeds in one program; compiling it takes a while")
            began = time.perf_counter()
            rows = _train(runs[task, method], keys, start)
            seconds = time.perf_counter() - began
            for i, row in enumerate(rows):
                row = {"task": task, "method": method, "seed": config.seed + i} | row
                results.append(row)
                with (out / "results.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(plain(row)) + "\n")
            after = np.mean([row["accuracy_after"] for row in rows])
            echo(f"{task}: {method} {after:.3f} ({seeds} seeds, {seconds:.1f} s)")
    compared = write_comparison(out, results, config)
    echo(f"written to {out}: comparison.md, .json and .png, results.jsonl")
    return compared


def _runs(
    config: Config, methods: Sequence[str], tasks: Sequence[str]
) -> dict[tuple[str, str], Run]:
    """Every task with every method, checked."""
    for name, names in (("--methods", methods), ("--task", tasks)):
        if not names or len(set(names)) < len(names):
            raise UserError(f"{name} {','.join(names)}: name one or more, without repetition")
    runs, problems = {}, []
    readers = coefficient_readers(config, methods)
    for task in tasks:
        name, _, difficulty = task.partition(":")
        if difficulty and not (difficulty.isdecimal() and len(difficulty) < 10):
            raise UserError(f"--task {task}; write NAME or NAME:DIFFICULTY, such as sorting:5")
        tree = config.model_dump(mode="json", exclude_none=True)
        if config.data.name != name or difficulty:
            tree["data"] = {"env" if name in ENVS else "task": name}
        if difficulty:
            tree["data"]["difficulty"] = int(difficulty)
        tree["train"] |= {"mode": "compiled"}
        for method in methods:
            try:
                coefficients = {n: x for n, x in config.objective.items() if method in readers[n]}
                method_config = build_config(tree | {"method": method, "objective": coefficients})
                if not method_of(method_config, kind_of(method_config).new_tokens).value:
                    method_config = method_config.model_copy(update={"value": ValueTable()})
                run = build.setup(method_config)
                check_trainable(run)
                runs[task, method] = run
            except UserError as error:
                problems.append(f"{method}: {error}")
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return runs


def coefficient_readers(config: Config, methods: Sequence[str]) -> dict[str, list[str]]:
    """The methods that read each coefficient of ``config.objective``.

    All of them where none does, each of which then says so.
    """
    coefficients: dict[str, set[str]] = {}
    for method in methods:
        with contextlib.suppress(UserError):  # of a method that is not there, said elsewhere
            coefficients[method] = {*find_method(method).coefficients, *COMMON}
    readers = {}
    for name in config.objective:
        readers_of = [method for method in methods if name in coefficients.get(method, ())]
        readers[name] = readers_of or list(methods)
    return readers


class _Start:
    """The start of a task's runs, for all seeds: [seeds, ...] policies, and their accuracy."""

    def __init__(self, run: Run, keys: Array) -> None:
        make, _ = programs.state_layout(run)
        warmup, weights = run.config.warmup, hf.in_memory(run.params)
        task: Any = run.task

        def begin(key: Array, frozen: dict[str, Params]) -> tuple[Array, Params]:
            state = make(key, weights, frozen)
            policy = policy_of(state, run.network)
            if warmup.steps:
                policy, _ = warm_start(
                    state.key,
                    policy,
                    task=task,
                    network=run.network,
                    steps=warmup.steps,
                    batch=warmup.batch,
                    learning_rate=warmup.learning_rate,
                )
            return state.key, policy

        table, sampling = run.config.eval, run.config.sampling
        evaluate = partial(
            held_out,
            sampling_params=make_sampling_params(
                table.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            ),
            task=task,
            network=run.network,
            problems=table.problems,
            samples=table.samples,
        )

        def measured(key: Array, policy: Params) -> dict[str, Array]:
            groups = evaluate(key, policy)
            turns = {"turns": groups.ids["stratum"].mean()} if "stratum" in groups.ids else {}
            return {"accuracy": groups.rewards[..., 0].mean()} | turns

        self.measure = jax.jit(jax.vmap(measured))
        begun = jax.jit(jax.vmap(begin, (0, None)))
        self.roots, self.policies = begun(keys, _frozen_of(run))
        self.metrics = jax.device_get(self.measure(self.roots, self.policies))


def _frozen_of(run: Run) -> dict[str, Params]:
    """The frozen policies that a run names and reads, on the host."""
    return {name: hf.in_memory(frozen_params(run.config, name)) for name in run.networks}


def _train(run: Run, keys: Array, start: _Start) -> list[dict[str, Any]]:
    """One method on one task, all seeds at once: a row of results for each."""
    make, _ = programs.state_layout(run)
    iteration = programs.make_train_iteration(run)
    frozen = _frozen_of(run)
    value: Params = None  # where the value network starts from a reward model
    if run.value is not None and run.config.value.path is not None:
        value = hf.in_memory(value_start(run.config, run.mesh))

    def train(key: Array, policy: Params, frozen: Params, value: Params) -> tuple[Params, Any]:
        state = make(key, policy, frozen)
        if value is not None:
            state = state.replace(params=state.params | {"value": value})
        records = state, iteration.begin(state)
        state, _, curves = iterate(iteration, *records, run.sampling_params, run.config.train.steps)
        return policy_of(state, run.network), curves

    trained = jax.jit(jax.vmap(train, (0, 0, None, None)))
    policies, curves = trained(keys, start.policies, frozen, value)
    after = jax.device_get(start.measure(start.roots, policies))
    rewards, skipped = np.asarray(curves["reward"]), np.asarray(curves["skipped_updates"]).sum(1)
    return [
        {
            **{f"{name}_before": float(x[i]) for name, x in start.metrics.items()},
            **{f"{name}_after": float(x[i]) for name, x in after.items()},
            "skipped_updates": int(skipped[i]),
            "reward": [round(float(x), 4) for x in rewards[i]],
        }
        for i in range(len(keys))
    ]


# ---------------------------------------------------------------- reporting


def write_comparison(
    out: Path, results: Sequence[Mapping[str, Any]], config: Config
) -> dict[str, Any]:
    """Writes the table (JSON and Markdown) and the plot of results.

    Args:
      out: the directory.
      results: the lines of results.jsonl.
      config: of the runs.

    Returns:
      The content of comparison.json: "methods" by name, best first, each with an ``Interval`` of
      the held-out accuracy for each task and for "all", and of an environment's turns.
    """
    tasks = list(dict.fromkeys(row["task"] for row in results))
    methods = list(dict.fromkeys(row["method"] for row in results))
    played = [row["task"] for row in results if "turns_after" in row]  # in environments

    def interval(method: str, figure: str, *of: str) -> dict[str, float]:
        columns = [
            [r[figure] for r in results if (r["task"], r["method"]) == (task, method)]
            for task in of
        ]
        scores = np.array(columns, np.float64).T
        return stratified_interval(scores, seed=config.seed)._asdict()

    intervals: dict[str, dict[str, dict[str, float]]] = {}
    for method in methods:
        intervals[method] = {"all": interval(method, "accuracy_after", *tasks)}
        intervals[method] |= {task: interval(method, "accuracy_after", task) for task in tasks}
        turns = [task for task in tasks if task in played]
        intervals[method] |= {
            f"{task}, turns": interval(method, "turns_after", task) for task in turns
        }
    intervals = dict(sorted(intervals.items(), key=lambda item: -item[1]["all"]["value"]))
    before = {
        task: float(np.mean([r["accuracy_before"] for r in results if r["task"] == task]))
        for task in tasks
    }
    table = {
        "score": "held-out accuracy after training: interquartile mean, 95 % interval",
        "seeds": len({row["seed"] for row in results}),
        "steps": config.train.steps,
        "accuracy_before": before,
        "methods": intervals,
        "config": as_tree(config),
    }
    write_atomic(out / "comparison.json", json.dumps(plain(table), indent=2) + "\n")
    write_atomic(out / "comparison.md", _markdown(table))
    if importlib.util.find_spec("matplotlib") is not None:  # of the extra plot
        _draw(out / "comparison.png", results, intervals, tasks)
    return table


def _markdown(table: Mapping[str, Any]) -> str:
    def cell(interval: Mapping[str, float]) -> str:
        return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"

    starts = ", ".join(f"{task} {x:.3f}" for task, x in table["accuracy_before"].items())
    columns = [*next(iter(table["methods"].values()))]
    objective = table["config"].get("objective", {})
    settings = ", ".join(f"objective.{name} = {json.dumps(x)}" for name, x in objective.items())
    lines = [
        f"Held-out accuracy after {table['steps']} steps, {table['seeds']} seeds: interquartile",
        "mean and 95 % stratified bootstrap interval (arXiv:2108.13264). All methods start from",
        f"the same policy: {starts}." + (f" With {settings}." if settings else ""),
        "",
        "| " + " | ".join(["method", *columns]) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for name, intervals in table["methods"].items():
        cells = [name, *(cell(intervals[column]) for column in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


FEW = 8
"""Methods up to which their rewards are lines of their own; more are rows of a picture."""


def _draw(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    intervals: Mapping[str, Mapping[str, Mapping[str, float]]],
    tasks: Sequence[str],
) -> None:
    """Intervals on the left, best method on top; rewards of each task on the right.

    The rewards of many methods are rows in the order of the intervals, since no eye tells some two
    dozen lines and colours apart.
    """
    import matplotlib
    from matplotlib.figure import Figure

    names, few = list(intervals), len(intervals) <= FEW
    size = (4.6 + 4.2 * len(tasks), max(3.0, 1.4 + 0.27 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 1 + len(tasks), squeeze=False)[0]
    palette = matplotlib.colormaps["Dark2" if few else "viridis"]
    colours = {name: palette(i) if few else palette(0.35) for i, name in enumerate(names)}
    _draw_intervals(axes[0], {name: intervals[name]["all"] for name in names}, colours)
    for axis, task in zip(axes[1:], tasks, strict=True):
        axis.set_title(f"{task}: reward (IQM over seeds)", fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelsize=9)
        curves = {name: _reward_curve(results, task, name) for name in names}
        if few:
            for name, curve in curves.items():
                axis.plot(np.arange(1, len(curve) + 1), curve, color=colours[name], label=name)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        else:
            _draw_rows(figure, axis, list(curves.values()))
    if few:
        axes[-1].legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)


def _reward_curve(results: Sequence[Mapping[str, Any]], task: str, method: str) -> np.ndarray:
    rows = [r["reward"] for r in results if (r["task"], r["method"]) == (task, method)]
    return interquartile_mean(np.array(rows).T)


def _draw_intervals(
    axis: Any, intervals: Mapping[str, Mapping[str, float]], colours: Mapping[str, Any]
) -> None:
    """A bar and a number for each method, the first one on top."""
    for y, (name, every) in enumerate(intervals.items()):
        width = every["high"] - every["low"]
        axis.barh(y, width, left=every["low"], height=0.6, color=colours[name], alpha=0.6)
        axis.plot([every["value"]] * 2, [y - 0.3, y + 0.3], color="black", lw=1.5)
        place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
        axis.annotate(f"{every['value']:.3f}", (1.01, y), **place)
    axis.set_yticks(range(len(intervals)), list(intervals), fontsize=9)
    axis.set_ylim(len(intervals) - 0.5, -0.5)
    axis.set_title("Accuracy, all tasks: IQM, 95 %", fontsize=10, loc="left")
    axis.tick_params(labelsize=9)
    axis.grid(alpha=0.25, axis="x")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_rows(figure: Any, axis: Any, curves: Sequence[np.ndarray]) -> None:
    """A row for each method, brighter where the reward is higher; in the intervals' order."""
    extent = (0.5, len(curves[0]) + 0.5, len(curves), 0)
    picture = axis.imshow(np.array(curves), aspect="auto", interpolation="nearest", extent=extent)
    axis.set_yticks([])
    figure.colorbar(picture, ax=axis, pad=0.02).ax.tick_params(labelsize=8)
