"""Host memory and time of loading a checkpoint onto a mesh; prints JSON.

    python -m benchmarks.loading [--gigabytes 4] [--devices 8] [--whole]

A synthetic checkpoint of that size in bfloat16 is written to a temporary directory, and loaded by a
process of its own onto virtual devices of this CPU, whose memory is the host's: so the peak can
never be below the size of the weights. ``--whole`` reads all of it on the host first and then puts
it on the devices, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOAD = "--load"


def sizes(gigabytes: float) -> dict:
    """A model whose weights in bfloat16 are about so large."""
    embed, vocab = 2048, 32_000
    layer = 4 * embed * embed + 3 * embed * 4 * embed
    layers = max(1, round((gigabytes * 1e9 / 2 - vocab * embed) / layer))
    return {
        "vocab_size": vocab,
        "max_length": 1024,
        "layers": layers,
        "embed_dim": embed,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 128,
        "mlp_dim": 4 * embed,
        "dtype": "bfloat16",
        "param_dtype": "bfloat16",
    }


def write(directory: Path, gigabytes: float) -> int:
    """Writes the checkpoint, a weight at a time; returns its bytes."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jrl.models.config import ModelConfig
    from jrl.models.hf.names import tensors
    from jrl.models.hf.render import render

    config = ModelConfig(**sizes(gigabytes))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(render(config, None)))
    rng, index, total = np.random.default_rng(0), {}, 0
    shards: list[dict] = [{}]
    for name, tensor in tensors(config).items():
        value = rng.standard_normal(tensor.shape, np.float32).astype(ml_dtypes.bfloat16)
        shards[-1][name] = value
        total += value.nbytes
        index[name] = len(shards)
        if sum(x.nbytes for x in shards[-1].values()) > 500_000_000:
            save_file(shards[-1], directory / f"part-{len(shards)}.safetensors")
            shards[-1] = {}
            shards.append({})
    save_file(shards[-1], directory / f"part-{len(shards)}.safetensors")
    files = {name: f"part-{number}.safetensors" for name, number in index.items()}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(text)
    return total


def load(directory: str, whole: bool) -> dict:
    """Loads onto all devices; what it took."""
    import jax

    from jrl.mesh import make_mesh, tree_shardings
    from jrl.models import hf
    from jrl.models.transformer import transformer

    mesh = make_mesh({"fsdp": len(jax.devices())})
    network = transformer(hf.read_config(directory))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    where = tree_shardings(mesh, network.axes(), shapes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    _, params = hf.load(directory) if whole else hf.open_checkpoint(directory)
    placed = jax.block_until_ready(hf.place(params, where))
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_bytes_before": before * 1024,
        "weights_bytes": sum(x.nbytes for x in jax.tree.leaves(placed)),
        "devices": len(jax.devices()),
    }


def room(directory: Path, needed: float) -> str:
    """Why there is no room for the benchmark; "" where there is."""
    if shutil.disk_usage(directory).free < 2 * needed:
        return f"{directory} has too little disk for a checkpoint of {needed / 1e9:.1f} GB"
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    return "" if free > 3 * needed else f"{free / 1e9:.1f} GB of memory is too little"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--whole", action="store_true", help="read all of it on the host first")
    parser.add_argument(LOAD, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.whole)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if short := room(Path(folder), args.gigabytes * 1e9):
            raise SystemExit(short)
        written = write(Path(folder) / "model", args.gigabytes)
        command = [sys.executable, "-m", "benchmarks.loading", LOAD, f"{folder}/model"]
        flags = f"--xla_force_host_platform_device_count={args.devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        done = subprocess.run(
            [*command, *(["--whole"] if args.whole else [])],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    over = measured["peak_host_bytes"] - measured["host_bytes_before"] - measured["weights_bytes"]
    how = "whole" if args.whole else "streamed"
    print(
        json.dumps(
            {"how": how, "checkpoint_bytes": written, **measured, "over_weights_bytes": over}
        )
    )


if __name__ == "__main__":
    main()
