"""Commands about runs: train, evaluate, compare, and look at what came out.

A command imports its work when it runs, so that --help is fast.
"""

from __future__ import annotations

import json
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
)
from jrl.directories import fresh_dir
from jrl.errors import INTERRUPTED, UserError
from jrl.signals import end_at_once
from jrl.step_files import what_is_saved


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
    from jrl.processes import first_says, start

    start(coordinator, processes, process)
    chosen = read(config, overrides)
    if chosen.run.dir is None:
        name = chosen.method if "=" in config else Path(config).stem
        fresh = first_says(str(fresh_dir(name)))
        chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"dir": fresh})})
    directory = Path(chosen.run.dir or "")
    typer.echo(f"run directory: {directory}")

    def stopped() -> str:
        return f"stopped; {what_is_saved(directory)}"

    with end_at_once(stopped):
        from jrl.run.run import train as run_training

        try:
            summary = run_training(chosen, echo=typer.echo)
        except KeyboardInterrupt as error:
            typer.echo(f"jrl: {str(error) or stopped()}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        print_table(
            "training finished", {k: v for k, v in summary.items() if not isinstance(v, Mapping)}
        )


def evaluate(
    target: Target,
    overrides: Overrides = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="Search: best_of_n, greedy, beam, dvts, best_first, mcts or compute_optimal."
        ),
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            help="Width of the search; of compute_optimal the budget, completions.", min=1
        ),
    ] = 4,
    step_tokens: Annotated[int, typer.Option(help="Most tokens of a search's step.", min=1)] = 64,
    by: Annotated[
        str, typer.Option(help="What a search ranks paths by: likelihood, model, value or ratio.")
    ] = "likelihood",
    reduce: Annotated[
        str, typer.Option(help="Of the values behind a path's steps: last, min or mean.")
    ] = "last",
    out: Annotated[
        str | None,
        typer.Option(help="Search training problems; directory for rows to train on."),
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy on held-out problems: pass@1, pass@k, majority vote.

    With --search also what the search took of each problem: steps, tokens drawn, tokens read again;
    --by model goes by rewards.model.path, value by the run's own value network, ratio by the run's
    policy against the one that it began with, which draws. compute_optimal plays all searches
    within one budget and chooses among them by difficulty; with --out the trees' siblings.jsonl and
    paths.jsonl are for data.pairs (docs/recipes.md).

    A run directory evaluates its newest checkpoint, a configuration file the model before training.

    Example: jrl eval runs/tiny eval.samples=8 eval.temperature=1.0
    """
    chosen = read(target, overrides)
    prepare_jax()
    if search == "compute_optimal":
        from jrl.evaluate.budget import budget_run

        if out is not None:
            raise UserError(
                f"--out {out}: --search compute_optimal leaves no rows; name one search, or leave "
                "--out out"
            )

        result = budget_run(
            chosen,
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
            chosen,
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
    for flag, given, default in (("--by", by, "likelihood"), ("--reduce", reduce, "last")):
        if given != default:
            raise UserError(f"{flag} {given}: only a search ranks paths; add --search beam")
    if out is not None:
        raise UserError(f"--out {out}: only a search leaves rows to write; add --search mcts")
    from jrl.evaluate import evaluate_run

    result = evaluate_run(chosen, checkpoint=checkpoint)
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
    """Measure how far results move with what should not matter: batch, mesh and dtype.

    Held-out problems are completed under every combination, greedily and sampled with fixed seeds.
    Printed are deviations of accuracy, length, probabilities and log-probabilities, and where
    completions first differ, as in "Give Me FP32 or Give Me Death?" (arXiv:2506.09501).

    Example: jrl drift runs/gsm8k --batch 1 --batch 8 --dtype bfloat16 --dtype float32
    """
    chosen = read(target, overrides)
    prepare_jax()
    from jrl.drift import measure_drift

    found = measure_drift(
        chosen,
        batches=batch or (1, 8),
        meshes=mesh or (),
        dtypes=dtype or (),
        problems=problems,
        checkpoint=checkpoint,
    )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_drift(found)


def compare(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods, comma-separated; objective.NAME=VALUE goes to those with it."),
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
    chosen = read(config, changes)
    tasks = task or (chosen.task and chosen.task.name)
    if not tasks:
        raise UserError("data.task is missing; name tasks or environments with --task")
    from jrl.compare import compare as run_comparison

    names = [name.strip() for name in methods.split(",")]
    task_names = [name.strip() for name in tasks.split(",")]
    run_comparison(
        chosen, methods=names, tasks=task_names, seeds=seeds, out=Path(out), echo=typer.echo
    )
    typer.echo((Path(out) / "comparison.md").read_text(encoding="utf-8").rstrip())


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, of finished or running runs."),
    ],
) -> None:
    """Plot a run, and write one self-contained HTML page with its health, curves and samples.

    The page is RUN/report/index.html; it needs no network and can be shared as one file. Of several
    runs it is report/overlay.html of the first: curves over each other, runs that differ by their
    seed alone as a mean with an interval, and where the configurations differ.

    Example: jrl report runs/grpo-0 runs/grpo-1 runs/rloo-0 runs/rloo-1
    """
    from jrl.report.overlay import write_overlay
    from jrl.report.page import write_report

    typer.echo(str(write_report(runs[0]) if len(runs) == 1 else write_overlay(runs)))
