"""Output of the ``jrl`` command: tables, results, methods and configuration keys."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from jrl.config import describe, table_note


def keys_text() -> str:
    """Every configuration key with its type, default and meaning, as text of 96 columns."""
    lines, last = ["Configuration keys:"], ""
    for key in describe():
        table, _, name = key.name.rpartition(".")
        table = key.name if key.kind == "table" and not table else table
        if table not in ("", last):
            lines += ["", f"[{table}]{table_note(table)}"]
        last = table
        default = "" if key.default in (None, {}, (), "") else f", default {_toml(key.default)}"
        only = f"; with {', '.join(key.single)}" if key.single else ""
        if name != table:
            text = f"{key.name}  ({key.kind}{default}{only})"
            lines += textwrap.wrap(
                text, 96, initial_indent="  ", subsequent_indent=" " * 4, break_on_hyphens=False
            )
        lines += textwrap.wrap(
            key.text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(lines)


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def tell(line: str) -> None:
    """Prints a line, on a terminal broken between words."""
    from jrl.run.progress import between_words

    on_terminal = sys.stdout.isatty()
    typer.echo(between_words(line, shutil.get_terminal_size().columns) if on_terminal else line)


def print_result(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    """A result as a table under its title, or as JSON."""
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_table(title, result)


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Names and values in two columns under a title."""
    width = max(map(len, rows), default=0)
    typer.echo(title)
    for name, value in rows.items():
        typer.echo(f"  {name.replace('_', ' '):<{width}}  {_cell(value)}")


def print_machine(facts: Mapping[str, str]) -> None:
    """The facts of ``jrl doctor``: extras that are installed, or not, take a line each way."""
    extras = {k.removeprefix("extra_"): v for k, v in facts.items() if k.startswith("extra_")}
    rows = {k: v for k, v in facts.items() if not k.startswith("extra_")}
    absent = [name for name, text in extras.items() if text.startswith("missing")]
    present = [name for name in extras if name not in absent]
    rows["extras"] = f"{', '.join(present) or 'none'} installed"
    if absent:
        line = extras[absent[0]].partition(": ")[2].replace(f"[{absent[0]}]", "[NAME]")
        rows["other_extras"] = f"{', '.join(absent)}; {line} installs one"
    print_table("this machine", rows)


def print_drift(result: Mapping[str, Any]) -> None:
    """Prints the result of ``drift.measure_drift`` as two tables."""
    for kind in ("greedy", "sampled"):
        typer.echo(f"{kind} completions of {result['problems']} problems, step {result['step']}")
        header = [name.replace("_", " ") for name in result[kind][0]]
        rows = [header, *([_cell(value) for value in row.values()] for row in result[kind])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            typer.echo("  " + "  ".join(cells).rstrip())


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Prompts with their completions, each followed by a line of its other fields.

    An episode is shown turn by turn: who speaks, and what the environment paid for it.
    """
    single = all(item.get("member", 0) == 0 for item in samples)
    for item in samples:
        typer.echo(f"--- {item['prompt']}")
        fields = ("prompt", "completion", "turns", *(("group", "member") if single else ()))
        details = {k: v for k, v in item.items() if k not in fields and v is not False}
        if "turns" not in item:
            typer.echo(item["completion"])
        for turn in item.get("turns", ()):
            reward = f", paid {_cell(turn['paid'])}" if turn["paid"] else ""
            typer.echo(f"[{turn['by']}{reward}] {turn['text'].strip()}")
        typer.echo("    " + "  ".join(f"{name} {_cell(value)}" for name, value in details.items()))


def print_methods(entries: Sequence[Mapping[str, Any]]) -> None:
    """Training methods as a table, one line each, cut to the width of a terminal."""
    rows = [("name", "family", "runs", "arxiv", "summary")]
    for item in entries:
        runs = "partly" if item["unsupported"] else "yes"
        rows.append((item["name"], item["family"], runs, item["arxiv"] or "", item["summary"]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *cells, summary in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        _echo_cut(f"{line}  {summary}")


def print_common_methods(kinds: Mapping[str, Sequence[Mapping[str, Any]]], every: int) -> None:
    """The methods used most, by kind, and how to see the others.

    Args:
      kinds: kind -> descriptions of its methods, as ``show_method`` gives them.
      every: the number of all methods.
    """
    width = max(len(item["name"]) for entries in kinds.values() for item in entries)
    for kind, entries in kinds.items():
        typer.echo(f"{kind}:")
        for item in entries:
            _echo_cut(f"  {item['name']:<{width}}  {item['summary']}")
    typer.echo(f"`jrl methods --all` lists all {every}; `jrl methods NAME` shows one.")


def _echo_cut(line: str) -> None:
    """Prints a line, truncated to the width of the terminal."""
    # Piped tables are read by programs and pagers: nothing is cut there.
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(line if room is None or len(line) <= room else f"{line[: room - 1]}…")


def print_method(method: Mapping[str, Any]) -> None:
    """A training method with its coefficients, its formula and where it departs from its paper."""
    hidden = ("name", "coefficients", "notes")
    rows = {k: v for k, v in method.items() if k not in hidden and v not in ("", [], (), None)}
    print_table(method["name"], rows)
    typer.echo("  coefficients, set as objective.NAME=VALUE:")
    for item in method["coefficients"]:
        default = "required" if item["required"] else f"default {item['default']}"
        typer.echo(f"    {item['name']}  ({default}; {item['domain']})")
    if method["notes"]:
        typer.echo(f"\n{textwrap.indent(method['notes'], '  ')}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 0 if value.is_integer() else 1
        return f"{value:,.{digits}f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return str(value)
