"""Commands before a run: methods, configurations, this machine, a plan for a pod, dialogues.

A command imports its work when it runs, so that --help is fast.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Annotated, Any

import typer

from jrl.cli.arguments import (
    AsJson,
    ConfigOrRun,
    Overrides,
    read,
)
from jrl.cli.complete import complete_method
from jrl.cli.console import (
    print_common_methods,
    print_machine,
    print_method,
    print_methods,
)
from jrl.config import Config, as_tree, dump
from jrl.errors import INTERRUPTED, UserError, unknown_choice


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show the details of this method, or of FILE.py:function.",
            autocompletion=complete_method,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every method, not only those used most.")
    ] = False,
    family: Annotated[str | None, typer.Option(help="Only the methods of this family.")] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Only methods that a run supports completely.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the training methods that `method = ...` can name, one a line.

    Without options these are the two dozen used most, by kind; --all, --family, --complete and
    --json choose from all. "partly" marks methods that need something that `jrl train` does not
    have yet. NAME shows a method's details: what is missing, its paper, the parts that it sets
    (seams), those that keep state, the per-token statistics it needs, its coefficients, its formula
    and its departures from the paper.

    Example: jrl methods --family preference --complete
    """
    import jax

    from jrl.methods import COMMON, all_methods, list_methods, show_method

    # A list needs no accelerator, and one that is asked for and absent must not end it.
    jax.config.update("jax_platforms", "cpu")
    if name is not None:
        options = {"--all": everything, "--family": family is not None, "--complete": complete}
        unread = next((option for option, value in options.items() if value), None)
        if unread is not None:
            raise UserError(f"{unread} filters the list, and {name!r} names one method; remove one")
        details = show_method(name)
        if as_json:
            typer.echo(json.dumps(details, indent=2, ensure_ascii=False))
        else:
            print_method(details)
        return
    if not (everything or family or complete or as_json):
        kinds = {kind: [show_method(x) for x in names] for kind, names in COMMON.items()}
        print_common_methods(kinds, len(all_methods()))
        return
    entries = list_methods()
    families = {item["family"] for item in entries}
    if family is not None and family not in families:
        raise unknown_choice("--family", family, families)
    entries = [item for item in entries if family in (None, item["family"])]
    entries = [item for item in entries if not (complete and item["unsupported"])]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        print_methods(entries)


def show_config(
    config: ConfigOrRun = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the complete configuration of a run, with defaults and changes, as TOML.

    The output can be used as a configuration file. All keys are listed below.

    Example: jrl show-config configs/tiny.toml sampling.group=16
    """
    settings = read(config, overrides)
    if (
        settings.objective or settings.method != Config().method
    ):  # else there is nothing to be wrong
        from jrl.setup.objective import method_of

        method_of(settings)
    if as_json:
        typer.echo(json.dumps(as_tree(settings, none=True), indent=2, ensure_ascii=False))
    else:
        typer.echo(dump(settings), nl=False)


def doctor(
    config: ConfigOrRun = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print versions, devices, memory, caches and extras, and what a configuration is missing.

    Nothing is compiled or trained. The exit code is 1 if something is missing.

    Example: jrl doctor configs/gsm8k.toml model.path=Qwen/Qwen3-0.6B data.train=openai/gsm8k/main
    """
    from jrl.cli.doctor import examine
    from jrl.run.diagnostics import obstacles

    machine = examine()
    lacking: list[str] = []
    if config is not None:
        try:
            lacking = obstacles(read(config, overrides))
        except UserError as error:  # facts about this machine are printed in any case
            lacking = str(error).splitlines()
    if as_json:
        typer.echo(json.dumps({**machine, "lacks": lacking}, indent=2, ensure_ascii=False))
    else:
        print_machine(machine)
        if config is not None:
            typer.echo("\n".join([f"{config} is missing:", *(f"  {line}" for line in lacking)]))
            if not lacking:
                typer.echo("  nothing")
    if lacking:
        raise typer.Exit(1)


_UNREAD = (
    ("--search", "--quick"),
    ("--search", "--few-layers"),
    ("--quick", "--few-layers"),
    ("--quick", "--effort"),
)
"""Options of ``jrl plan`` of which the first leaves the second unread."""


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    overrides: Overrides = None,
    topology: Annotated[
        str | None,
        typer.Option(
            help="TPU slice, such as v5p:8x8x16 or 2*v5e:16x16, or hosts of GPUs, such as h100x8 or"
            " 2*h100x8; default plan.topology of the file, or v5e:4x4."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Count within seconds instead of compiling for minutes.")
    ] = False,
    few_layers: Annotated[
        bool, typer.Option(help="Compile few layers of the sampler and extrapolate to all.")
    ] = False,
    effort: Annotated[
        float | None,
        typer.Option(
            help="XLA's optimization effort. The default 0 is that of a run; -1 compiles several"
            " times faster, with other collectives and less exact memory. --search ranks with -1"
            " and compiles the best again with 0.",
            min=-1,
            max=1,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Rank meshes, remat, microbatches and placements.")
    ] = False,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates that --search compiles; default 6.", min=1)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Approximate time limit of --search, seconds.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a run for TPUs or GPUs that are not here, and estimate its memory and time.

    XLA compiles the sampler and the training step for every chip of the topology. This needs libtpu
    (extra plan) or JAX's plugin for CUDA (extra plan-gpu), but no accelerator and no weights. The
    output has memory per chip, FLOPs, collectives, a lower bound of the time, and for GPUs the
    kernels of a token step. With --quick nothing is compiled: the state, the sampler's weights and
    its cache are exact, temporaries and times are estimates. The exit code is 1 if the run does not
    fit.

    Example: jrl plan configs/pod_8b_v5e.toml --quick
    """
    flags = {"--search": search, "--quick": quick, "--few-layers": few_layers}
    flags |= {"--effort": effort is not None}
    limits: dict[str, Any] = {"limit": candidates, "seconds": seconds}
    limits = {name: value for name, value in limits.items() if value is not None}
    for one, other in _UNREAD:
        if flags[one] and flags[other]:
            raise UserError(f"{other} has no effect with {one}; remove one of them")
    if limits and not search:
        name = "--seconds" if candidates is None else "--candidates"
        raise UserError(f"{name} limits a search; add --search, or remove {name}")
    settings = read(config, overrides)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # compilers of others only compile
    from jrl.plan.make import make_plan
    from jrl.plan.search import search as search_plans
    from jrl.plan.text import as_json as plan_json
    from jrl.plan.text import as_text, search_text
    from jrl.plan.topology import parse_topology

    def echo(line: str) -> None:
        typer.echo(line, err=True)

    slices = parse_topology(topology or settings.plan.topology)
    if search:
        ranking = -1.0 if effort is None else effort
        results = search_plans(settings, slices, **limits, effort=ranking, echo=echo)
        fits = results[0]["fits"]
        typer.echo(json.dumps(results, indent=2) if as_json else search_text(results))
    else:
        options: dict[str, Any] = {} if effort is None else {"effort": effort}
        by = "counting" if quick else "few layers" if few_layers else "compiling"
        planned = make_plan(settings, slices, by, echo=echo, **options)
        fits = planned.fits
        typer.echo(json.dumps(plan_json(planned), indent=2) if as_json else as_text(planned))
    if not fits:
        raise typer.Exit(1)


def imagine(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="TOML file that describes the conversations.")
    ],
    url: Annotated[
        str, typer.Option(help="Base of an OpenAI-compatible endpoint; http://HOST:PORT/v1.")
    ],
    model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")],
    out: Annotated[str, typer.Option(help="JSONL file of dialogues; missing ones are appended.")],
    count: Annotated[int, typer.Option(help="Total dialogues in the file.", min=1)] = 100,
    key_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the endpoint's key.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Root of all random numbers.", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="Concurrent dialogues.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a reply.", min=1)] = 2048,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0)] = 1.0,
    timeout: Annotated[float, typer.Option(help="Timeout of a reply, seconds.", min=0.1)] = 300.0,
) -> None:
    """Generate synthetic conversations with rewards, with a language model.

    The imagination engine of arXiv:2311.05584: the model proposes personas for the human, writes
    complete dialogues with each, by agents of several skill levels, and scores how far each reached
    the goal, 0 to 1. TASK has description, agent, human and goal, and optionally opening, turns,
    personas and criteria. Train on the file with data.train=dialogues:FILE and method=ilql. After
    an error or Ctrl-C the same command appends the missing ones.

    Example: jrl imagine configs/imagine/teacher.toml --url http://localhost:8000/v1 --model NAME
    --out imagined.jsonl --count 1000
    """
    imagine = importlib.import_module("jrl.zoo.tools.imagine")

    if key_variable is not None and key_variable not in os.environ:
        raise UserError(f"--key-variable {key_variable}: no such environment variable; set it")
    key = "" if key_variable is None else os.environ[key_variable]
    imaginer = imagine.Model(url, model, key, max_tokens, temperature, timeout)
    try:
        result = imagine.imagine(
            imagine.read_task(task),
            imaginer,
            out,
            count=count,
            seed=seed,
            concurrency=concurrency,
            echo=typer.echo,
        )
    except KeyboardInterrupt:
        typer.echo(f"jrl: stopped; what is done is in {out}, the same command resumes", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{out}: {result.rows} dialogues, mean reward {result.reward:.2f}")
    if result.unreadable:
        typer.echo(
            f"{result.unreadable} are missing, because the model's replies could not be parsed; the"
            " same command requests them again"
        )
