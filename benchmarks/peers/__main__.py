"""Runs this library and another one on the same flags, back to back, and prints the ratios.

python -m benchmarks.peers --peer tunix --python TUNIX_ENV/bin/python --rounds 3 --eos never

All other flags are those of ``benchmarks.step``, or of ``benchmarks.rollout`` for a peer that only
samples. Absolute times move with the machine; so the ratio is taken inside each round, and the
median over rounds is what counts. Each step, and each run when it is done, is a line on stderr, and
``--json`` has the rounds so far.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clock import rounded
from benchmarks.flags import JAX_PLATFORM, parser, progress, write

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
LESS = ("first_step_cpu_s", "compiles", "max_rss_mb")


def environment_for(platform: str) -> dict[str, str]:
    """This process's environment with the checkout importable, on a platform of ``--platform``."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["JAX_PLATFORMS"] = JAX_PLATFORM[platform]
    # Programs that come from a cache would make a first step look fast.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    return environment


def run(command: Sequence[str], flags: Sequence[str], platform: str = "cpu") -> dict[str, Any]:
    """The JSON of a program that is run from the checkout, its own output left on stderr.

    Returns:
      Its figures; ``failed`` alone where it did not end well, as when it ran out of memory.
    """
    environment = environment_for(platform)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        whole = [*command, *flags, "--platform", platform, "--json", str(path)]
        status = subprocess.run(whole, cwd=CHECKOUT, env=environment, stdout=sys.stderr).returncode
        if status:
            return {"failed": f"{' '.join(command)} ended with status {status}"}
        return json.loads(path.read_text(encoding="utf-8"))


def ratios(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Speed relative to the peer by each time, and our share of its processor time and memory."""
    out = {}
    for name in FASTER:
        if ours.get(name) and other.get(name):
            out[name] = other[name] / ours[name]
    for name in ("rollout_tok_s", "env_steps_s"):
        if ours.get(name) and other.get(name):
            out[name] = ours[name] / other[name]
    for name in LESS:
        if ours.get(name) and other.get(name):
            out[name] = ours[name] / other[name]
    return out


def compare(
    peer: Peer,
    python: str,
    rounds: int,
    flags: Sequence[str],
    *,
    platform: str = "cpu",
    peer_micro: int = 0,
    after_round: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Pairs of runs, the other library first in every other round.

    Args:
      peer: the other library.
      python: of its environment.
      rounds: pairs.
      flags: of both.
      platform: "cpu" or "gpu", of both.
      peer_micro: prompts a microbatch of the peer alone; 0 for those of the flags.
      after_round: is given the result so far.
    """
    pairs: list[dict[str, Any]] = []
    micro = ["--micro", str(peer_micro)] if peer_micro else []
    commands: dict[str, tuple[list[str], list[str]]] = {
        "own": ([sys.executable, "-m", peer.program], [*flags, "--gemm", "0"]),
        "other": ([python, str(Path(__file__).parent / peer.script)], [*flags, *micro]),
    }
    result: dict[str, Any] = {}
    for i in range(rounds):
        done: dict[str, Any] = {}
        for name in ("own", "other") if i % 2 == 0 else ("other", "own"):
            done[name] = run(*commands[name], platform)
            figures = {n: x for n, x in done[name].items() if n != "args"}
            progress(name, rounded(figures))
        pairs.append(done | {"ratios": ratios(done["own"], done["other"])})
        names = pairs[0]["ratios"]
        values = {name: [p["ratios"][name] for p in pairs if name in p["ratios"]] for name in names}
        middle = {name: statistics.median(each) for name, each in values.items()}
        result = {"ratios": middle, "rounds": list(pairs)}
        after_round(result)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    about = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    about.add_argument("--peer", required=True, choices=sorted(PEERS))
    about.add_argument("--python", required=True, help="of the peer's environment")
    about.add_argument("--rounds", type=int, default=3)
    about.add_argument("--platform", default="cpu", choices=sorted(JAX_PLATFORM))
    about.add_argument("--peer-micro", type=int, default=0)
    about.add_argument("--json", default="")
    chosen, flags = about.parse_known_args(argv)
    # A wrong flag is named before anything runs.
    checked = parser(__doc__ or "")
    checked.add_argument("--peer-micro", type=int, help="prompts a microbatch of the peer alone")
    checked.parse_args(flags)
    head = {"peer": chosen.peer, "platform": chosen.platform, "flags": flags}

    def keep(result: dict[str, Any]) -> None:
        if chosen.json:
            text = json.dumps(rounded(head | result), indent=1)
            Path(chosen.json).write_text(text + "\n", encoding="utf-8")

    result = compare(
        *(PEERS[chosen.peer], chosen.python, chosen.rounds, flags),
        platform=chosen.platform,
        peer_micro=chosen.peer_micro,
        after_round=keep,
    )
    write(rounded(head | result), chosen.json)
    failed = [
        each["failed"]
        for pair in result["rounds"]
        for each in (pair["own"], pair["other"])
        if "failed" in each
    ]
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
