"""Error reporting of the ``jrl`` command, and its list of configuration keys."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from jrl.cli.console import keys_text
from jrl.config.secrets import without_secrets
from jrl.errors import INTERRUPTED, StorageError, UserError
from jrl.system.memory import is_exhausted


class Main(TyperGroup):
    """Reports a UserError as one message with its exit code, and Ctrl-C with 130."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            with _one_line_warnings(), _logged_without_secrets():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except OSError as error:
            if error.errno in _FULL:
                _say_full(error)
                raise typer.Exit(StorageError.exit_code) from None
            if error.errno not in _NAMES or error.filename is None:
                raise
            message = _clipped(
                f"jrl: error: {error.filename!r}: {error.strerror}; name another file"
            )
            typer.echo(message, err=True)
            raise typer.Exit(UserError.exit_code) from None
        except UserError as error:
            shown = without_secrets(str(error))
            first, *rest = map(_clipped, shown.splitlines() or ["unknown error"])
            typer.echo(
                "\n".join([f"jrl: error: {first}", *(f"  {line}" for line in rest)]), err=True
            )
            raise typer.Exit(error.exit_code) from None
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            first = _clipped(" ".join(str(error).split("\n")[0].split()) or "no memory is left")
            typer.echo(f"jrl: error: out of memory: {first}; {_SMALLER}", err=True)
            raise typer.Exit(UserError.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("jrl: stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named; ``ctx.obj`` is what ``main`` was given."""
        resolved = super().resolve_command(ctx, args)
        if resolved[0] != "train" and ctx.obj is not None:
            ctx.obj()
        return resolved


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Shows warnings of the library as errors are shown, without a line of its source."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category is not UserWarning or not Path(filename).is_relative_to(_PACKAGE):
            return usual(message, category, filename, lineno, line)
        return f"jrl: warning: {without_secrets(' '.join(str(message).splitlines()))}\n"

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def _logged_without_secrets() -> Iterator[None]:
    """Hides secrets in what the library logs, such as why an environment failed."""

    def hidden(record: logging.LogRecord) -> bool:
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True

    logger = logging.getLogger("jrl")
    logger.addFilter(hidden)
    try:
        yield
    finally:
        logger.removeFilter(hidden)


def _say_full(error: OSError) -> None:
    """One line about what cannot be written; what is left of the output is dropped."""
    where = "standard output" if error.filename is None else repr(error.filename)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"jrl: error: {where}: {error.strerror}; free disk space", err=True)


def _clipped(line: str) -> str:
    """A line without the middle of a value that fills the screen."""
    return line if len(line) <= _LONGEST else f"{line[:_HALF]} ... {line[-_HALF:]}"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device has no memory left; does not import JAX for its error."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and is_exhausted(error)
    )


_SMALLER = (
    "lower sampling.slots, train.prompts, eval.problems or the lengths, or raise train.microbatches"
)
_LONGEST, _HALF = 2000, 500
_PACKAGE = Path(__file__).parents[1]
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NAMES = {
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EROFS),
}
"""Errors of the system that are about a name that somebody gave, whichever key it was in."""


class WithKeys(TyperCommand):
    """Appends the list of all configuration keys to the help of a command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help, then the keys."""
        super().format_help(ctx, formatter)
        formatter.write("\n" + keys_text() + "\n")
