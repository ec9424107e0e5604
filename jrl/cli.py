"""The ``jrl`` command. A command imports its work when it runs, so that --help is fast."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jrl.commands import Main, WithKeys, complete_method, complete_override
from jrl.config import Config, as_tree, dump, load_config
from jrl.config.stored import stored_config
from jrl.console import (
    print_drift,
    print_method,
    print_methods,
    print_result,
    print_samples,
    print_table,
)
from jrl.directories import fresh_dir
from jrl.errors import INTERRUPTED, Overdue, UserError, choose
from jrl.extras import version as installed_version
from jrl.hub import hub_name
from jrl.own import remember
from jrl.signals import end_at_once, end_within
from jrl.step_files import what_is_saved

OVERRIDES = "Changes to configuration keys, such as sampling.group=16."
CHECKPOINT = "Training step of the checkpoint; the newest if left out."


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, autocompletion=complete_override),
]
Checkpoint = Annotated[int | None, typer.Option(help=CHECKPOINT, min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or configuration file.")]


app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(started: Callable[[], None] | None = None) -> None:
    """Runs the command line.

    Args:
      started: called before another command than ``train``, which hears signals itself.
    """
    try:
        app(obj=started)
    except SystemExit as end:
        if end.code in (INTERRUPTED, Overdue.exit_code):
            end_within(60, end.code)  # whatever thread of a reward function still holds the process
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version())
        raise typer.Exit


@app.callback(cls=Main, no_args_is_help=True)
def _jrl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Reinforcement learning for language models, in JAX.

    A TOML file configures a run; KEY=VALUE on the command line changes a key. To start, try
    `jrl train configs/tiny.toml`, which takes minutes on a laptop.
    """


@app.command(short_help="Train a policy.", no_args_is_help=True)
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
    chosen = _read(config, overrides)
    if chosen.run.dir is None:
        name = chosen.method if "=" in config else Path(config).stem
        fresh = first_says(str(fresh_dir(name)))
        chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"dir": fresh})})
    directory = Path(chosen.run.dir or "")
    typer.echo(f"run directory: {directory}")

    def stopped() -> str:
        return f"stopped; {what_is_saved(directory)}"

    with end_at_once(stopped):
        from jrl.train.loop import train as run_training

        try:
            summary = run_training(chosen, echo=typer.echo)
        except KeyboardInterrupt as error:
            typer.echo(f"jrl: {str(error) or stopped()}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        print_table(
            "training finished", {k: v for k, v in summary.items() if not isinstance(v, Mapping)}
        )


@app.command("eval", short_help="Measure accuracy on held-out problems.", no_args_is_help=True)
def evaluate(
    target: Target,
    overrides: Overrides = None,
    search: Annotated[
        str | None, typer.Option(help="Search for answers: best_of_n, beam, dvts or mcts.")
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the search.", min=1)] = 4,
    step_tokens: Annotated[int, typer.Option(help="Most tokens of a search's step.", min=1)] = 64,
    out: Annotated[
        str | None,
        typer.Option(help="Search training problems; directory for rows to train on."),
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy on held-out problems: pass@1, pass@k, majority vote.

    With --search also what the search took of each problem: steps, tokens drawn, tokens read again;
    with --out the trees' siblings.jsonl and paths.jsonl are for data.pairs (docs/recipes.md).

    A run directory evaluates its newest checkpoint, a configuration file the model before training.

    Example: jrl eval runs/tiny eval.samples=8 eval.temperature=1.0
    """
    chosen = _read(target, overrides)
    _prepare_jax()
    if search is not None:
        from jrl.evaluate_search import search_run

        result = search_run(
            chosen, search, width=width, step_tokens=step_tokens, checkpoint=checkpoint, out=out
        )
        print_result("evaluation", result, as_json)
        return
    if out is not None:
        raise UserError(f"--out {out}: only a search leaves rows to write; add --search mcts")
    from jrl.evaluate import evaluate_run

    result = evaluate_run(chosen, checkpoint=checkpoint)
    print_result("evaluation", result, as_json)


@app.command(
    short_help="Measure how results move with batch, mesh and dtype.", no_args_is_help=True
)
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
    chosen = _read(target, overrides)
    _prepare_jax()
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


@app.command(short_help="Sample completions from a policy.", no_args_is_help=True)
def sample(
    target: Target,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt (repeatable); else held-out problems."),
    ] = None,
    count: Annotated[int, typer.Option(help="Number of held-out problems.", min=1)] = 4,
    env: Annotated[
        str | None, typer.Option("--env", help="Environment to watch it play in; else the run's.")
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Sample completions from a policy and print them.

    An episode is printed turn by turn. --env NAME is short for data.env=NAME.

    The sampling parameters are those of training (sampling.temperature, sampling.top_p, ...), and
    each prompt gets sampling.group completions.

    Example: jrl sample runs/tiny sampling.group=2 sampling.temperature=0.7
    """
    chosen = _read(target, [*(overrides or []), *([f"data.env={json.dumps(env)}"] if env else [])])
    _prepare_jax()
    from jrl.evaluate import sample_run

    samples = sample_run(chosen, prompts=prompt, count=count, checkpoint=checkpoint)
    if as_json:
        typer.echo(json.dumps(samples, indent=2, ensure_ascii=False))
        return
    print_samples(samples)


@app.command(short_help="Serve a policy over HTTP or gRPC.", no_args_is_help=True)
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Run directory, Hugging Face directory or name, or configuration file.",
        ),
    ],
    overrides: Overrides = None,
    engine: Annotated[
        str, typer.Option(help="jrl: OpenAI's API over HTTP; jetstream: JetStream's over gRPC.")
    ] = "jrl",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default the directory's.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Completions decoded at once.", min=1)] = 16,
    queue: Annotated[
        int, typer.Option(help="Completions that may wait for a slot.", min=0, max=1_000_000)
    ] = 256,
    chunk: Annotated[
        int, typer.Option(help="Decode steps between returns to the host; 0 measures.", min=0)
    ] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds for running requests to finish on a stop.", min=0)
    ] = 30.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="JRL_API_KEY", help="What clients must send as a bearer token."),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write what is drawn to DIR, to train on (docs/environments.md)."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Serve a policy with OpenAI's API over HTTP, or JetStream's over gRPC.

    Without --host only this machine can connect, and without --api-key all that can connect are
    served. Needs the extra serve
    or jetstream. Prompts have at most data.max_prompt_tokens tokens, completions at most
    sampling.max_new_tokens. With jetstream, sampling.temperature and so on apply to all requests.

    Example: jrl serve runs/gsm8k --port 8000
    """
    if engine not in ("jrl", "jetstream"):
        raise choose("--engine", engine, ["jrl", "jetstream"])
    there = {name: os.path.exists(f"{target}/{name}") for name in ("config.json", "config.toml")}
    is_checkpoint = there["config.json"] or hub_name(target) is not None
    if is_checkpoint and not there["config.toml"]:
        chosen = load_config(None, [f"model.path={json.dumps(target)}", *(overrides or ())])
    else:
        chosen = _read(target, overrides)
    _prepare_jax()
    from jrl.serving import launch

    options = launch.ServerOptions(
        name=name or Path(target).resolve().name,
        host=host,
        port=port,
        slots=slots,
        queue=queue,
        chunk=chunk,
        grace_seconds=grace,
        api_key=api_key or None,
        record=record,
    )
    run = launch.serve_openai if engine == "jrl" else launch.serve_jetstream
    run(chosen, options, checkpoint=checkpoint, echo=typer.echo)


@app.command(short_help="Export a checkpoint in Hugging Face format.", no_args_is_help=True)
def convert(
    target: Target,
    output: Annotated[str, typer.Argument(metavar="DIR", help="New directory to write to.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write only the adapters, in PEFT's format.")
    ] = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory: config, safetensors and tokenizer.

    The directory loads with transformers and other tools, and as model.path of another run.
    Adapters are merged into the weights, unless --adapters is given.

    Example: jrl convert runs/gsm8k exported
    """
    chosen = _read(target, overrides)
    from jrl.export import export_run

    directory = export_run(chosen, Path(output), checkpoint=checkpoint, adapters=adapters)
    typer.echo(str(directory))


@app.command(short_help="Write the page of a run, or of several.", no_args_is_help=True)
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


@app.command(short_help="List training methods.")
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show the details of this method, or of FILE.py:function.",
            autocompletion=complete_method,
        ),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only the methods of this family.")] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Only methods that run as published.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the training methods that `method = ...` can name, one a line.

    "partly" marks those of which a run lacks something beside the objective. A method's details say
    what, and give its paper, the parts of a step that it replaces (seams), those that keep state,
    the per-token statistics it needs, and its coefficients.

    Example: jrl methods --family preference --complete
    """
    import jax

    from jrl.methods import list_methods, show_method

    # A list needs no accelerator, and one that is asked for and absent must not end it.
    jax.config.update("jax_platforms", "cpu")
    if name is not None:
        if family is not None or complete:
            unread = "--complete" if family is None else "--family"
            raise UserError(f"{unread} chooses from the list, and {name!r} is one; leave one out")
        shown = show_method(name)
        if as_json:
            typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        else:
            print_method(shown)
        return
    listed = list_methods()
    families = {item["family"] for item in listed}
    if family is not None and family not in families:
        raise choose("--family", family, families)
    listed = [item for item in listed if family in (None, item["family"])]
    listed = [item for item in listed if not (complete and item["unsupported"])]
    if as_json:
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
    else:
        print_methods(listed)


@app.command(short_help="Look at this machine and what a run lacks here.")
def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Configuration file or run directory."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print versions, devices, memory, caches and extras, and what a configuration lacks here.

    Nothing is compiled or trained. The exit code is 1 if something is lacking.

    Example: jrl doctor configs/gsm8k.toml model.path=Qwen/Qwen3-0.6B data.train=openai/gsm8k/main
    """
    from jrl.doctor import examine
    from jrl.train.lacks import lacks

    found = examine()
    lacking: list[str] = []
    if config is not None:
        try:
            lacking = lacks(_read(config, overrides))
        except UserError as error:  # what this machine is, is said all the same
            lacking = str(error).splitlines()
    if as_json:
        typer.echo(json.dumps({**found, "lacks": lacking}, indent=2, ensure_ascii=False))
    else:
        print_table("this machine", found)
        if config is not None:
            typer.echo("\n".join([f"{config} lacks:", *(f"  {line}" for line in lacking)]))
            if not lacking:
                typer.echo("  nothing")
    if lacking:
        raise typer.Exit(1)


@app.command(short_help="Estimate what a run needs on a TPU slice.", no_args_is_help=True)
def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    overrides: Overrides = None,
    topology: Annotated[
        str, typer.Option(help="TPU slice, such as v5p:8x8x16 or 2*v5e:16x16.")
    ] = "v5e:4x4",
    quick: Annotated[bool, typer.Option(help="Compile few layers and extrapolate to all.")] = False,
    effort: Annotated[
        float | None,
        typer.Option(
            help="XLA's optimization effort. A run uses 0, and so does this; -1 compiles several"
            " times faster, with other collectives and less exact memory. --search ranks with -1"
            " and compiles the best again with 0.",
            min=-1,
            max=1,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Rank meshes, remat, microbatches and placements.")
    ] = False,
    candidates: Annotated[int, typer.Option(help="Candidates that --search compiles.", min=1)] = 6,
    seconds: Annotated[
        float | None, typer.Option(help="About how long --search may take, seconds.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a run for a TPU slice without a TPU, and estimate what it needs there.

    XLA compiles the sampler and the training step for every chip of the slice. This needs libtpu,
    but no TPU and no weights. The output has memory on each chip, operations, collectives, and a
    lower bound of the time. The exit code is 1 if the run does not fit.

    Example: jrl plan configs/pod_8b_v5e.toml --topology v5e:16x16
    """
    chosen = _read(config, overrides)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu only compiles
    from jrl.plan.compile import make_plan, quick_plan
    from jrl.plan.disjoint import plan_disjoint
    from jrl.plan.search import search as search_plans
    from jrl.plan.text import as_json as plan_json
    from jrl.plan.text import as_text, search_text
    from jrl.plan.topology import parse_topology

    def echo(line: str) -> None:
        typer.echo(line, err=True)

    slices = parse_topology(topology)
    if search:
        limits: dict[str, Any] = {"limit": candidates, "seconds": seconds}
        ranking = -1.0 if effort is None else effort
        found = search_plans(chosen, slices, **limits, effort=ranking, echo=echo)
        fits = found[0]["fits"]
        typer.echo(json.dumps(found, indent=2) if as_json else search_text(found))
    else:
        options: dict[str, Any] = {} if effort is None else {"effort": effort}
        planner = quick_plan if quick else make_plan
        if chosen.placement is not None:
            planned = plan_disjoint(chosen, slices, planner, echo=echo, **options)
        else:
            planned = planner(chosen, slices, echo=echo, **options)
        fits = planned.fits
        typer.echo(json.dumps(plan_json(planned), indent=2) if as_json else as_text(planned))
    if not fits:
        raise typer.Exit(1)


@app.command(short_help="Compare methods over several seeds.", no_args_is_help=True)
def compare(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    overrides: Overrides = None,
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated, with their default coefficients.")
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
    chosen = _read(config, changes)
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


@app.command("show-config", short_help="Print a configuration with all keys.", cls=WithKeys)
def show_config(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Configuration file or run directory."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the complete configuration of a run, with defaults and changes, as TOML.

    The output can be used as a configuration file. All keys are listed below.

    Example: jrl show-config configs/tiny.toml sampling.group=16
    """
    chosen = _read(config, overrides)
    if chosen.objective or chosen.method != Config().method:  # else there is nothing to be wrong
        from jrl.train.objective import method_of

        method_of(chosen, None)
    if as_json:
        typer.echo(json.dumps(as_tree(chosen, none=True), indent=2, ensure_ascii=False))
    else:
        typer.echo(dump(chosen), nl=False)


# ---------------------------------------------------------------- parts of the commands


def _read(target: str | None, overrides: Sequence[str] | None) -> Config:
    """The configuration that a command's first arguments name."""
    changes = list(overrides or ())
    if target is not None and "=" in target and not os.path.exists(target):
        changes = [target, *changes]
        target = None
    if target is None or not os.path.isdir(target):
        return load_config(target, changes)
    found = stored_config(Path(target), [f"run.dir={json.dumps(target)}", *changes])
    if found is None:
        raise UserError(f"{target} is not a run directory: it has no config.toml")
    config, said = found
    if said:
        typer.echo(f"jrl: {said}", err=True)
    remember(Path(target) / "python")  # the rows of a run from Python
    return config


def _prepare_jax() -> None:
    from jrl.compiles import enable_compile_cache
    from jrl.devices import find_devices

    enable_compile_cache()
    find_devices()
