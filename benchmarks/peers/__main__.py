"""Runs this library and another one on the same flags, back to back, and prints the ratios.

python -m benchmarks.peers --peer tunix --python TUNIX_ENV/bin/python --rounds 3 --eos never

All other flags are those of ``benchmarks.step``, or of ``benchmarks.rollout`` for a peer that only
samples. Absolute times move with the machine; so the ratio is taken inside each round, and the
median over rounds is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clock import rounded
from benchmarks.flags import parser, write

CHECKOUT = Path(__file__).resolve().parents[2]


class Peer(NamedTuple):
    """A script of the peer's and the program of this library that does the same work."""

    script: str
    program: str


PEERS = {
    "tunix": Peer("tunix_grpo.py", "benchmarks.step"),
    "tunix-episodes": Peer("tunix_episodes.py", "benchmarks.episodes"),
    "trl": Peer("trl_grpo.py", "benchmarks.step"),
    "transformers": Peer("transformers_generate.py", "benchmarks.rollout"),
}
FASTER = ("step_s", "rollout_s", "prefill_s", "decode_s", "reference_s", "train_s", "first_step_s")
LESS = ("compiles", "max_rss_mb")


def run(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """The JSON of a program that is run from the checkout, its own output left on stderr.

    Raises:
      SystemExit: the program failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "JAX_PLATFORMS": "cpu"}
    # Programs that come from a cache would make a first step look fast.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        whole = [*command, *flags, "--json", str(path)]
        status = subprocess.run(whole, cwd=CHECKOUT, env=environment, stdout=sys.stderr).returncode
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
        return json.loads(path.read_text(encoding="utf-8"))


def ratios(own: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many times as fast this library is by each time, and what share of the rest it takes."""
    out = {}
    for name in FASTER:
        if own.get(name) and other.get(name):
            out[name] = other[name] / own[name]
    for name in ("rollout_tok_s", "env_steps_s"):
        if own.get(name) and other.get(name):
            out[name] = own[name] / other[name]
    for name in LESS:
        if own.get(name) and other.get(name):
            out[name] = own[name] / other[name]
    return out


def compare(peer: Peer, python: str, rounds: int, flags: Sequence[str]) -> dict[str, Any]:
    """Pairs of runs, the other library first in every other round."""
    pairs = []
    commands = {
        "own": ([sys.executable, "-m", peer.program], [*flags, "--gemm", "0"]),
        "other": ([python, str(Path(__file__).parent / peer.script)], flags),
    }
    for i in range(rounds):
        order = ("own", "other") if i % 2 == 0 else ("other", "own")
        done = {name: run(*commands[name]) for name in order}
        pairs.append(done | {"ratios": ratios(done["own"], done["other"])})
    names = pairs[0]["ratios"]
    middle = {name: statistics.median(pair["ratios"][name] for pair in pairs) for name in names}
    return {"ratios": middle, "rounds": pairs}


def main(argv: Sequence[str] | None = None) -> None:
    about = argparse.ArgumentParser(description=__doc__, add_help=False)
    about.add_argument("--peer", required=True, choices=sorted(PEERS))
    about.add_argument("--python", required=True, help="of the peer's environment")
    about.add_argument("--rounds", type=int, default=3)
    about.add_argument("--json", default="")
    chosen, flags = about.parse_known_args(argv)
    parser(__doc__ or "").parse_args(flags)  # a wrong flag is named before anything runs
    result = compare(PEERS[chosen.peer], chosen.python, chosen.rounds, flags)
    write(rounded({"peer": chosen.peer, "flags": flags} | result), chosen.json)


if __name__ == "__main__":
    main()
