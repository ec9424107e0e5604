"""Decode bandwidth, prefill rate and training rate of large shapes on one accelerator.

python -m benchmarks.gpu --shapes 1.7b 8b --json gpu.jsonl --table benchmarks/gpu.md

Weights are random and bfloat16, and so are gradients and the moments of Adam. Each figure is a
fraction of what the same device reached on a bare copy or a bare product just before. A row is
printed as soon as it is measured, and what a profile of one call adds to it after that. What a
program needs is known when it is compiled. Sampling that does not fit the device is reported as
such; training first gives up saved activations ("scores" to "full" rematerialisation), then
half of the layers at a time, and its row says what it ran with and why.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import floor
from benchmarks.gpu_programs import Measured, attempt, memory_limit
from benchmarks.gpu_sampling import Policy, Work, policy, sampling_row
from benchmarks.gpu_table import table
from benchmarks.gpu_training import Update, training_row
from benchmarks.lease import Budget, Cost, Record, ends_in_time
from jrl.models.attention.choice import ATTENTION
from jrl.models.config import ModelConfig
from jrl.models.transformer import REMAT
from jrl.system.devices import GPU_MEMORY_SHARE

_NAMES = ("layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")
_QWEN3 = {
    "0.6b": (28, 1024, 16, 8, 128, 3072, 151_936),
    "1.7b": (28, 2048, 16, 8, 128, 6144, 151_936),
    "4b": (36, 2560, 32, 8, 128, 9728, 151_936),
    "8b": (36, 4096, 32, 8, 128, 12_288, 151_936),
    "tiny": (1, 32, 2, 1, 16, 64, 64),
}
SHAPES: dict[str, dict[str, int | bool]] = {
    name: dict(zip(_NAMES, sizes, strict=True)) | {"tied_embeddings": name != "8b"}
    for name, sizes in _QWEN3.items()
}
"""Shapes of Qwen3 models, and one for a quick look."""

PEAKS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L4": 121.0}
"""TFLOP/s in bfloat16 without sparsity, by a word of the device's name, of NVIDIA's datasheets."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shapes", nargs="+", default=["1.7b", "8b"], choices=sorted(SHAPES))
    p.add_argument(
        *("--work", "--sampling"),
        nargs="*",
        type=Work.parse,
        metavar="ROWS:PROMPT:NEW:GROUP",
        help="sampling rows; in place of --batches, --prompt-len, --gen-len and --group",
    )
    p.add_argument(
        "--batches", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    )
    p.add_argument("--group", type=int, default=1, help="rows that share a prompt, where they fit")
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--gen-len", type=int, default=1024)
    p.add_argument(
        "--int8", nargs="*", default=[], choices=["weights", "cache"], help="sampled in 8 bits"
    )
    p.add_argument(
        "--float8", nargs="*", default=[], choices=["weights"], help="the same, in float8_e4m3fn"
    )
    p.add_argument("--packed", nargs="*", type=int, default=[4096, 16_384], help="training tokens")
    p.add_argument(
        "--completions",
        type=int,
        default=0,
        help="that training tokens are in, behind a prompt of --prompt-len; 0: as long as that",
    )
    p.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters; 0: all")
    p.add_argument("--remat", default="scores", choices=REMAT)
    p.add_argument("--attention", default="auto", choices=ATTENTION, help="on a GPU auto is cuDNN")
    p.add_argument("--rounds", type=int, default=3, help="fewer where they take over 3 s")
    p.add_argument("--gemm", type=int, default=8192, help="side of the bare product")
    p.add_argument("--copy-mb", type=int, default=4096, help="size of the bare copy")
    p.add_argument("--peak-tflops", type=float, default=0, help="datasheet's; 0: by device name")
    p.add_argument("--memory-gb", type=float, default=0, help="to fit into; 0: the device's own")
    p.add_argument(
        "--profile",
        nargs="?",
        default="counts",
        const="kernels",
        choices=["none", "counts", "kernels"],
        help="of one call of each row on a GPU; alone: also the largest kernels, to stderr",
    )
    p.add_argument("--hlo", default="", help="write the optimised programs into this directory")
    p.add_argument("--seconds", type=float, default=0, help="to end within; 0: no limit")
    p.add_argument("--json", default="", help="append the rows to this file, a line each")
    p.add_argument("--table", default="", help="append the record to this file")
    return p


def model_config(shape: str, max_length: int) -> ModelConfig:
    """A shape in bfloat16, weights and all."""
    sizes: dict[str, Any] = dict(SHAPES[shape])
    dtypes: dict[str, Any] = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    return ModelConfig(max_length=max_length, qk_norm=True, **dtypes, **sizes)


# ---------------------------------------------------------------- what is measured

BEFORE = ("setup_s", "refused_s", "lower_s", "compile_s", "prefill_compile_s")
"""Parts of a row's time that do not grow with its tokens."""


class Row(NamedTuple):
    """A row to measure.

    Attributes:
      kind: "sampling" or "training".
      shape: a name of ``SHAPES``.
      name: for people.
      cost: for the budget.
      run: measures it.
    """

    kind: str
    shape: str
    name: str
    cost: Cost
    run: Callable[[], Measured]


def works(args: argparse.Namespace) -> list[Work]:
    """The sampling rows of the flags."""
    if args.work is not None:
        return args.work
    group = lambda rows: args.group if rows % args.group == 0 else 1  # noqa: E731
    return [Work(n, args.prompt_len, args.gen_len, group(n)) for n in args.batches]


def updates(args: argparse.Namespace) -> list[Update]:
    """The training rows of the flags."""
    return [Update.of(packed, args.completions, args.prompt_len) for packed in args.packed]


def rows_of(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a shape. Its weights are made for the first sampling row, and freed after all."""
    sampled = works(args)
    longest = max((work.prompt + work.new for work in sampled), default=1)
    config = model_config(shape, longest)
    models: list[Policy] = []

    def sample(work: Work) -> Measured:
        begin = time.perf_counter()
        if not models:
            models.append(policy(config, args))
        setup = time.perf_counter() - begin
        measured = sampling_row(models[0], work, args)
        return measured._replace(row=measured.row | {"setup_s": setup})

    weights = 2 * floor.trunk_weights(config)
    for work in sampled:
        cost = Cost(config.layers, floor.decode_bytes(config, work.drawn(), weights))
        name = f"{shape} sampling {work}"
        yield Row("sampling", shape, name, cost, partial(attempt, partial(sample, work)))
    models.clear()
    for update in updates(args):
        config = model_config(shape, update.prompt + update.new)
        cost = Cost(config.layers, floor.score_flops(config, update.drawn()))
        name = f"{shape} training {update.tokens}"
        yield Row("training", shape, name, cost, partial(training_row, config, update, args))


def measure(args: argparse.Namespace, record: Record) -> str:
    """Every row of every shape that there is time for, with its fraction of the bare rates.

    Returns:
      The reason that some were left out; "" where none were.
    """
    budget, reason = Budget(args.seconds), ""
    # A row that is cut off in the middle is named by these, too.
    record.left_out = [row.name for shape in args.shapes for row in rows_of(shape, args)]
    rates = bare_rates(args, record)
    for shape in args.shapes:
        for row in rows_of(shape, args):
            if not budget.fits(row.kind, row.cost):
                took = budget.estimate(row.kind, row.cost)
                reason = f"--seconds {args.seconds:g}: {row.name} would take about {took:.0f} s"
                continue
            begin = time.perf_counter()
            measured = attempted(row)
            record.left_out.remove(row.name)
            names = {"kind": row.kind, "shape": row.shape}
            record.add(names | measured.row | fractions(measured.row, rates))
            add_profile(record, names, measured, args)
            prepared = sum(measured.row.get(name, 0.0) for name in BEFORE)
            budget.spent(row.kind, row.cost, prepared, time.perf_counter() - begin)
            # Its profile holds weights or a state, for which the next row may have no room.
            del measured
    return reason


def attempted(row: Row) -> Measured:
    """A row, or the error that ended it, whose traceback is on stderr; the others go on."""
    try:
        return row.run()
    except Exception as error:
        traceback.print_exc()
        return Measured({"name": row.name, "failed": f"{type(error).__name__}: {error}"[:300]})


def add_profile(
    record: Record, names: dict[str, str], measured: Measured, args: argparse.Namespace
) -> None:
    """Writes what a profile says of a row; a profiler that fails costs that and no more."""
    if measured.profile is None or args.profile == "none":
        return
    try:
        figures = measured.profile()
    except Exception as error:  # CUPTI needs rights that not every machine gives
        figures = {"profile_error": f"{type(error).__name__}: {error}"[:300]}
    record.add(names | {"of_row": len(record.rows) - 1} | figures)


def bare_rates(args: argparse.Namespace, record: Record) -> dict[str, float | None]:
    """Properties and measured rates of the device; each is written immediately."""
    device, flags = jax.devices()[0], os.environ.get("XLA_FLAGS", "")
    limit = memory_limit(args)
    head = {"kind": "device", "device": device.device_kind, "jax": jax.__version__}
    head |= {"date": datetime.date.today().isoformat(), "xla_flags": flags}
    record.add(head | {"memory_gb": limit / 1e9 if np.isfinite(limit) else None})
    peak = args.peak_tflops or peak_of(device.device_kind)
    gemm = floor.gemm_rate(args.gemm, "bfloat16")
    record.add({"kind": "rate", "gemm_tflop_s": gemm / 1e12, "peak_tflop_s": peak})
    copy = floor.copy_rate(args.copy_mb)
    record.add({"kind": "rate", "copy_gb_s": copy / 1e9})
    return {"gemm": gemm, "copy": copy, "peak": peak and peak * 1e12}


def peak_of(device_kind: str) -> float | None:
    """TFLOP/s of the datasheet; None for a card that is not in ``PEAKS``."""
    words = set(re.split(r"\W+", device_kind))
    # Slower cards of the same name.
    if words & {"PCIe", "NVL"}:
        return None
    return next((PEAKS[name] for name in PEAKS if name in words), None)


def fractions(row: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """A row's rates over those of the device."""
    if "prefill_s" in row:
        prefilled = {"prefill_fraction": row["prefill_flop_s"] / rates["gemm"]}
        if "decode_bytes_s" not in row:
            return prefilled
        return {"decode_fraction": row["decode_bytes_s"] / rates["copy"]} | prefilled
    if "step_s" in row:
        peak = rates["peak"]
        return {
            "fraction": row["flop_s"] / rates["gemm"],
            "prime_rl_mfu": row["prime_rl_flop_s"] / peak if peak else None,
            "memory_over_kept": row["held_bytes"] / row["kept_bytes"],
        }
    return {}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser()
    args = arguments.parse_args(argv)
    if "weights" in args.int8 and args.float8:
        arguments.error("--int8 and --float8 both name weights; remove it from one")
    try:
        updates(args)
    except ValueError as error:
        arguments.error(str(error))
    # On GPUs JAX takes three quarters of the memory; this much is given to a run of JRL.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    flags = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "benchmarks.gpu", *flags])

    def summary(record: Record) -> str:
        text = table(record, command)
        if args.table:
            with Path(args.table).open("a", encoding="utf-8") as file:
                file.write(text)
        return text

    record = Record(args.json, summary)
    with ends_in_time(record, args.seconds):
        record.end(measure(args, record))
    if any("failed" in row for row in record.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
