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
    Overrides,
    read,
)
from jrl.cli.complete import complete_method
from jrl.cli.console import (
    print_common_methods,
    print_method,
    print_methods,
    print_table,
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
        bool, typer.Option("--complete", help="Only methods that run as published.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the training methods that `method = ...` can name, one a line.

    Without options these are the two dozen used most, by kind; --all, --family, --complete and
    --json choose from all. "partly" marks methods of which a run lacks something beside the
    objective. A method's details say what, and give its paper, the parts of a step that it replaces
    (seams), those that keep state, the per-token statistics it needs, and its coefficients.

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
            raise UserError(f"{unread} chooses from the list, and {name!r} is one; leave one out")
        shown = show_method(name)
        if as_json:
            typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        else:
            print_method(shown)
        return
    if not (everything or family or complete or as_json):
        kinds = {kind: [show_method(x) for x in names] for kind, names in COMMON.items()}
        print_common_methods(kinds, len(all_methods()))
        return
    listed = list_methods()
    families = {item["family"] for item in listed}
    if family is not None and family not in families:
        raise unknown_choice("--family", family, families)
    listed = [item for item in listed if family in (None, item["family"])]
    listed = [item for item in listed if not (complete and item["unsupported"])]
    if as_json:
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
    else:
        print_methods(listed)


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
    chosen = read(config, overrides)
    if chosen.objective or chosen.method != Config().method:  # else there is nothing to be wrong
        from jrl.train.objective import method_of

        method_of(chosen, None)
    if as_json:
        typer.echo(json.dumps(as_tree(chosen, none=True), indent=2, ensure_ascii=False))
    else:
        typer.echo(dump(chosen), nl=False)


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
    from jrl.cli.doctor import examine
    from jrl.run.diagnostics import lacks

    found = examine()
    lacking: list[str] = []
    if config is not None:
        try:
            lacking = lacks(read(config, overrides))
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
    chosen = read(config, overrides)
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


def imagine(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="TOML file that describes the conversations.")
    ],
    url: Annotated[
        str, typer.Option(help="Base of an OpenAI-compatible endpoint; http://HOST:PORT/v1.")
    ],
    model: Annotated[str, typer.Option(help="Model to ask, as the endpoint calls it.")],
    out: Annotated[str, typer.Option(help="File of dialogues, JSONL; missing ones are added.")],
    count: Annotated[int, typer.Option(help="Dialogues in the file at the end.", min=1)] = 100,
    key_variable: Annotated[
        str | None, typer.Option(help="Environment variable that holds the endpoint's key.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Root of every random draw.", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="Dialogues imagined at once.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.", min=1)] = 2048,
    temperature: Annotated[float, typer.Option(help="Of the model's draws.", min=0)] = 1.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a reply must be there.", min=0.1)
    ] = 300.0,
) -> None:
    """Let a language model imagine conversations to train on, with rewards.

    The imagination engine of arXiv:2311.05584: the model reasons about who the human could be,
    imagines whole dialogues with each, by agents of several skills, and judges how far each reached
    the goal, 0 to 1. TASK has description, agent, human and goal, and perhaps opening, turns,
    personas and criteria. Train on the file with data.train=dialogues:FILE and method=ilql. After
    an error or Ctrl-C the same command adds what is missing.

    Example: jrl imagine configs/imagine/teacher.toml --url http://localhost:8000/v1 --model NAME
    --out imagined.jsonl --count 1000
    """
    imagine = importlib.import_module("jrl.zoo.tools.imagine")

    if key_variable is not None and key_variable not in os.environ:
        raise UserError(
            f"--key-variable {key_variable}: there is no such environment variable; set it"
        )
    key = "" if key_variable is None else os.environ[key_variable]
    asked = imagine.Model(url, model, key, max_tokens, temperature, timeout)
    try:
        found = imagine.imagine(
            imagine.read_task(task),
            asked,
            out,
            count=count,
            seed=seed,
            concurrency=concurrency,
            echo=typer.echo,
        )
    except KeyboardInterrupt:
        typer.echo(f"jrl: stopped; what is done is in {out}, the same command resumes", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{out}: {found.rows} dialogues, mean reward {found.reward:.2f}")
    if found.unreadable:
        typer.echo(
            f"{found.unreadable} are missing, because the model's replies could not be read; the"
            " same command asks for them again"
        )
