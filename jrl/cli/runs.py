"""Commands about runs: train, eval, drift, compare, report.

A command imports its work when it runs, so that --help is fast.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from jrl.cli.arguments import (
    AsJson,
    Checkpoint,
    Overrides,
    Target,
    prepare_jax,
    read,
)
from jrl.cli.complete import complete_override
from jrl.cli.console import (
    print_drift,
    print_result,
    print_table,
    tell,
)
from jrl.errors import INTERRUPTED, UserError
from jrl.storage.step_files import what_is_saved
from jrl.system.directories import fresh_dir
from jrl.system.signals import end_at_once


def train(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="Configuration file, or the directory of a run to resume.",
            autocompletion=complete_override,  # the shell adds files
        ),
    ],
    overrides: Overrides = None,
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of process 0 in a run of several processes.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes.", min=1)] = None,
    process: Annotated[
        int | None, typer.Option(help="Index of this process, from 0.", min=0)
    ] = None,
) -> None:
    """Train a policy, and write metrics, samples, checkpoints and a report.

    All output goes to the run directory, run.dir (runs/NAME-TIME by default). The same command with
    the same run.dir resumes a stopped run from its newest checkpoint.

    On several hosts, start the same command on each with --coordinator, --processes and --process
    (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID), or with JRL_DISTRIBUTED=auto
    on a cluster that JAX knows. run.dir must be a directory that all hosts share.

    Example: jrl train configs/gsm8k.toml model.path=Qwen/Qwen3-0.6B data.train=train.jsonl
    """
    with end_at_once():
        _train(config, overrides, coordinator, processes, process)


def _train(
    config: str,
    overrides: list[str] | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
) -> None:
    if not (coordinator or processes or os.environ.get("JRL_DISTRIBUTED")):
        from jrl.setup.first_row import check_first_row

        check_first_row(read(config, overrides))  # before imports that take seconds
    from jrl.system.processes import first_says, start

    start(coordinator, processes, process)
    settings = read(config, overrides)
    if settings.run.dir is None:
        name = settings.method if "=" in config else Path(config).stem
        fresh = first_says(str(fresh_dir(name)))
        settings = settings.model_copy(
            update={"run": settings.run.model_copy(update={"dir": fresh})}
        )
    directory = Path(settings.run.dir or "")
    typer.echo(f"run directory: {directory}")

    def stopped() -> str:
        return f"stopped; {what_is_saved(directory)}"

    with end_at_once(stopped):
        from jrl.run.run import train as run_training

        try:
            summary = run_training(settings, echo=tell)
        except KeyboardInterrupt as error:
            typer.echo(f"jrl: {str(error) or stopped()}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        # What was not measured, such as accuracy without data.eval, has no line.
        figures = {k: v for k, v in summary.items() if not (v is None or isinstance(v, Mapping))}
        print_table("training finished", figures)


def evaluate(
    target: Target,
    overrides: Overrides = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="Search: best_of_n, greedy, beam, dvts, best_first, puct, uct, frontier or "
            "compute_optimal."
        ),
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            help="Width of the search; for compute_optimal the budget in completions.", min=1
        ),
    ] = 4,
    step_tokens: Annotated[int, typer.Option(help="Maximum tokens of a search step.", min=1)] = 64,
    by: Annotated[
        str, typer.Option(help="Score that ranks paths: likelihood, model, value, ratio or judge.")
    ] = "likelihood",
    reduce: Annotated[
        str,
        typer.Option(help="How step values are reduced to a path score: last, min or mean."),
    ] = "last",
    out: Annotated[
        str | None,
        typer.Option(
            help="Search training problems, and write rows to train on into this directory."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy on held-out problems: pass@1, pass@k, majority vote.

    With --search, also the cost per problem: steps, tokens sampled, tokens prefilled again. --by
    model ranks by rewards.model.path, value by the run's own value network; ratio: log-ratio of the
    trained to the initial policy; the initial policy samples. compute_optimal runs all searches
    within one budget and selects among them by difficulty. --out writes the trees' siblings.jsonl
    and paths.jsonl for data.pairs (docs/recipes.md).

    A run directory evaluates its newest checkpoint, a configuration file the model before training.

    Example: jrl eval runs/tiny eval.samples=8 eval.temperature=1.0
    """
    settings = read(target, overrides)
    prepare_jax()
    if search == "compute_optimal":
        from jrl.evaluate.budget import budget_run

        if out is not None:
            raise UserError(
                f"--out {out}: --search compute_optimal writes no rows; name one search, or remove "
                "--out"
            )

        result = budget_run(
            settings,
            completions=width,
            step_tokens=step_tokens,
            checkpoint=checkpoint,
            by=by,
            reduce=reduce,
        )
        print_result("evaluation", result, as_json)
        return
    if search is not None:
        from jrl.evaluate.search import search_run

        result = search_run(
            settings,
            search,
            width=width,
            step_tokens=step_tokens,
            checkpoint=checkpoint,
            out=out,
            by=by,
            reduce=reduce,
        )
        print_result("evaluation", result, as_json)
        return
    for flag, value, default in (("--by", by, "likelihood"), ("--reduce", reduce, "last")):
        if value != default:
            raise UserError(f"{flag} {value}: only a search ranks paths; add --search beam")
    if out is not None:
        raise UserError(f"--out {out}: only a search writes rows; add --search puct")
    from jrl.evaluate import evaluate_run

    result = evaluate_run(settings, checkpoint=checkpoint)
    print_result("evaluation", result, as_json)


def drift(
    target: Target,
    overrides: Overrides = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Completions decoded at once (repeatable).", min=1)
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(help="Mesh, such as tensor=2 (repeatable); by default the run's."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Type of activations (repeatable); by default the run's and float32."),
    ] = None,
    problems: Annotated[int, typer.Option(help="Held-out problems, at most.", min=1)] = 32,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much results depend on batch, mesh and dtype.

    Held-out problems are completed under every combination, greedily and sampled with fixed seeds.
    The output has deviations of accuracy, length, probabilities and log-probabilities, and the
    first
    differing token, as in "Give Me FP32 or Give Me Death?" (arXiv:2506.09501).

    Example: jrl drift runs/gsm8k --batch 1 --batch 8 --dtype bfloat16 --dtype float32
    """
    settings = read(target, overrides)
    prepare_jax()
    reproducibility = importlib.import_module("jrl.zoo.tools.reproducibility")
    result = reproducibility.measure_drift(
        settings,
        batches=batch or (1, 8),
        meshes=mesh or (),
        dtypes=dtype or (),
        problems=problems,
        checkpoint=checkpoint,
    )
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        print_drift(result)


def compare(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated; objective.NAME=VALUE applies to those with it."
        ),
    ] = "grpo,rloo",
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=2)] = 5,
    steps: Annotated[int | None, typer.Option(help="Training steps.", min=1)] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Tasks, comma-separated: NAME or NAME:DIFFICULTY, or an environment's NAME."
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="New directory to write to.")] = "comparison",
) -> None:
    """Train methods on tasks or environments, several seeds each, and compare their accuracy.

    The seeds of a method run in one program, and all methods start from the same warm start. Writes
    results.jsonl, comparison.md, .json and .png: interquartile means with bootstrap intervals.

    Example: jrl compare configs/tiny.toml --methods grpo,rloo --steps 60 --task sorting,arithmetic
    """
    changes = [*(overrides or ()), *([] if steps is None else [f"train.steps={steps}"])]
    settings = read(config, changes)
    tasks = task or settings.data.name
    if not tasks:
        raise UserError("data.task is missing; name tasks or environments with --task")
    from jrl.run.compare import compare as run_comparison

    names, task_names = _listed(methods, "--methods"), _listed(tasks, "--task")
    directory = Path(out).expanduser()
    run_comparison(
        settings, methods=names, tasks=task_names, seeds=seeds, out=directory, echo=typer.echo
    )
    typer.echo((directory / "comparison.md").read_text(encoding="utf-8").rstrip())


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, of finished or running runs."),
    ],
) -> None:
    """Plot a run, and write one self-contained HTML page with its health, curves and samples.

    The page is RUN/report/index.html; it needs no network and can be shared as one file. For
    several
    runs it is report/overlay.html of the first: overlaid curves, runs that differ only in their
    seed
    as a mean with an interval, and the differences of the configurations.

    Example: jrl report runs/grpo-0 runs/grpo-1 runs/rloo-0 runs/rloo-1
    """
    from jrl.report.overlay import write_overlay
    from jrl.report.page import write_report

    typer.echo(str(write_report(runs[0]) if len(runs) == 1 else write_overlay(runs)))


def _listed(text: str, option: str) -> list[str]:
    """Names between commas.

    Raises:
      UserError: one of them is empty.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UserError(f"{option} {text!r}: a name is empty; write NAME or NAME,NAME")
    return names
