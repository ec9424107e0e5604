"""How the ``jrl`` command reports errors, and help that lists the configuration keys."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from jrl.console import keys_text
from jrl.errors import INTERRUPTED, UserError


class Main(TyperGroup):
    """Reports a UserError as one message with its exit code, and Ctrl-C with 130."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            first, *rest = str(error).splitlines() or ["unknown error"]
            typer.echo(
                "\n".join([f"jrl: error: {first}", *(f"  {line}" for line in rest)]), err=True
            )
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("jrl: stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None


class WithKeys(TyperCommand):
    """Appends the list of all configuration keys to the help of a command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help, then the keys."""
        super().format_help(ctx, formatter)
        formatter.write("\n" + keys_text() + "\n")
