"""The ``jrl`` command: its list of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from jrl.cli import before, policies, runs
from jrl.cli.group import Main, WithKeys
from jrl.errors import INTERRUPTED, Overdue
from jrl.system.extras import version as installed_version
from jrl.system.signals import end_within

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(started: Callable[[], None] | None = None) -> None:
    """Runs the command line.

    Args:
      started: called before every command except ``train``, which handles signals itself.
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


COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {
    "train": ("Train a policy.", runs.train),
    "eval": ("Measure accuracy on held-out problems.", runs.evaluate),
    "drift": ("Measure how results depend on batch, mesh and dtype.", runs.drift),
    "compare": ("Compare methods over several seeds.", runs.compare),
    "report": ("Write the page of a run, or of several.", runs.report),
    "sample": ("Sample completions from a policy.", policies.sample),
    "serve": ("Serve a policy over HTTP or gRPC.", policies.serve),
    "convert": ("Export a checkpoint in Hugging Face format.", policies.convert),
    "plan": ("Estimate a run's memory and time on TPUs or GPUs.", before.plan),
    "methods": ("List training methods.", before.methods),
    "doctor": ("Check this machine, and what a run is missing.", before.doctor),
    "imagine": ("Generate synthetic dialogues to train on.", before.imagine),
    "show-config": ("Print a configuration with all keys.", before.show_config),
}
WITHOUT_ARGUMENTS = ("methods", "doctor", "show-config")

for name, (text, function) in COMMANDS.items():
    app.command(
        name,
        short_help=text,
        no_args_is_help=name not in WITHOUT_ARGUMENTS,
        cls=WithKeys if name == "show-config" else None,
    )(function)
