"""The record of ``benchmarks.gpu`` as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.lease import Record

COLUMNS = {
    "sampling": (
        *("batch", "prompt", "new", "group", "int8", "float8"),
        *("token_step_ms", "tok_s", "decode_fraction"),
        *("prefill_s", "prefill_fraction", "kernels_a_step", "copies_to_host_a_step"),
        *("idle_share", "lower_s", "compile_s"),
    ),
    "training": (
        *("packed_tokens", "completions", "lora", "layers", "remat", "attention", "step_s"),
        *("fraction", "prime_rl_mfu", "memory_over_kept", "kernels_a_step", "idle_share"),
        *("lower_s", "compile_s", "refused"),
    ),
}


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured rows, each with what its profile added."""
    out = {i: row for i, row in enumerate(rows) if row["kind"] in COLUMNS and "of_row" not in row}
    for row in rows:
        if (i := row.get("of_row")) is not None:
            out[i] = out[i] | row
    return list(out.values())


def table(record: Record, command: str) -> str:
    """The record as Markdown: machine, date, command, figures."""
    facts: dict[str, Any] = {}
    for row in record.rows:
        facts |= row if row["kind"] in ("device", "rate") else {}
    if "copy_gb_s" not in facts:
        return "\nNothing was measured.\n"
    lines = [
        f"\n## {facts['device']}, {facts['date']}",
        f"\n`{command}`\n",
        f"jax {facts['jax']}; bare product {facts['gemm_tflop_s']} TFLOP/s in bfloat16; bare "
        f"copy {facts['copy_gb_s']} GB/s, read and written.",
    ]
    rows = merged(record.rows)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for kind, names in COLUMNS.items():
            chosen = [row for row in rows if (row["shape"], row["kind"]) == (shape, kind)]
            if chosen:
                lines += [f"\n{shape}, {kind}:\n", f"| {' | '.join(names)} |"]
                lines += ["|" + " --- |" * len(names)]
            for row in chosen:
                lines.append(f"| {' | '.join(cell(row, name) for name in names)} |")
    if record.left_out:
        lines.append(f"\nNot measured: {'; '.join(record.left_out)}.")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any], name: str) -> str:
    """A figure of a row, or why it is not there."""
    if name in ("refused", "int8", "float8"):
        return "; ".join(row.get(name, []))
    value = row.get(name, row.get("does_not_fit", row.get("failed", "")))
    return "" if value is None else str(value)
