"""A day of a run compressed: thousands of tiny iterations, killed again and again.

    python tests/soak.py --dir DIR [--modes host,compiled,episodes] [--steps 10000] [--kills 30]
        [--seconds 540] [--record FILE]

For each mode two runs of one configuration: one is left alone and watched (memory, files, threads,
processes, programs), the other is ended by SIGKILL at random moments, during its start too, and
resumed each time. Both must have logged every step once and end with the same state bit for bit.

    host      two programs a step, with reward functions in processes of their own
    compiled  one program for all steps between two checkpoints
    episodes  an environment of several turns, in host mode

With ``--seconds`` it ends by then, and the same command resumes; ``tests/test_soak.py`` runs it,
and ``tests/last_soak.md`` holds what the last whole one gave.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
REWARD = "def letters(samples):\n    return [float(s.completion.count('a')) for s in samples]\n"
LOOK_SECONDS = 0.1  # often, so that some look falls between two saves, which open files
BOOT_SHARE, BOOT_SECONDS = 0.2, 10.0  # of the kills, and how far into the start they come


def of_mode(mode: str, directory: pathlib.Path) -> list[str]:
    """Settings of a mode."""
    if mode == "episodes":
        return ["data={env='guess_number', numbers=4, turns=3}"]
    task = ["data.task=sequence", "data.difficulty=1"]
    if mode == "compiled":
        return [*task, "rewards={partial={}}", "train.mode=compiled"]
    reward = directory.parent / "soak_reward.py"
    reward.write_text(REWARD)
    return [*task, "rewards={partial={}, " + json.dumps(f"{reward}:letters") + "={weight=0.1}}"]


def overrides(mode: str, directory: pathlib.Path, steps: int) -> list[str]:
    """The configuration."""
    return [
        *of_mode(mode, directory),
        *("sampling.group=2", "train.prompts=2"),
        "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
        *("optimizer.learning_rate=1e-3", "objective={kl_coef=0.01}"),
        *("eval.problems=4", f"checkpoint.every={max(steps // 100, 1)}", "log.samples_every=100"),
        f"train.steps={steps}",
        f"run.dir={json.dumps(str(directory))}",
    ]


def start(mode: str, directory: pathlib.Path, steps: int) -> subprocess.Popen[bytes]:
    """``jrl train`` in a session of its own, so that nothing of it is left by a kill of it."""
    with (directory.parent / f"{directory.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jrl", "train", *overrides(mode, directory, steps)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        )


def records(directory: pathlib.Path) -> list[dict]:
    """The records of the run's steps."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [r for r in rows if "step" in r]


def last_record(directory: pathlib.Path) -> dict:
    """The newest complete record, read from the end of the file; {} of none."""
    with contextlib.suppress(OSError), (directory / "metrics.jsonl").open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 16384, 0))
        for line in reversed(file.read().split(b"\n")):
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "step" in record:
                    return record
    return {}


def look(process: int, directory: pathlib.Path) -> dict[str, int] | None:
    """Resident memory, threads, open files, child processes, and programs, at a step."""
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
        record = last_record(directory)
        return {
            "step": record["step"],
            "memory_mb": int(fields["VmRSS"].split()[0]) // 1024,
            "threads": int(fields["Threads"]),
            "files": len(os.listdir(f"/proc/{process}/fd")),
            "processes": len(children),
            "programs": record["compiles"],
        }
    except (OSError, KeyError, ValueError):
        return None


class Soak:
    """Both runs, and what was seen so far, kept beside them."""

    def __init__(
        self, mode: str, directory: pathlib.Path, steps: int, kills: int, until: float
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.unbroken, self.killed = directory / "whole", directory / "killed"
        self.mode, self.steps, self.kills, self.until = mode, steps, kills, until
        self.notes = directory / "soak.json"
        self.record: dict = {"looks": [], "kills": [], "starts": {"whole": 0, "killed": 0}}
        if self.notes.exists():
            self.record = json.loads(self.notes.read_text())
        self.random = random.Random(len(self.record["kills"]))

    def keep(self) -> None:
        self.notes.write_text(json.dumps(self.record))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def done(self, directory: pathlib.Path) -> bool:
        return (directory / "summary.json").exists()

    def watch(self) -> None:
        """The run that is left alone; only the end of the time stops it, with SIGTERM."""
        child = start(self.mode, self.unbroken, self.steps)
        self.record["starts"]["whole"] += 1
        while child.poll() is None and not self.late:
            time.sleep(LOOK_SECONDS)
            if reading := look(child.pid, self.unbroken):
                self.record["looks"].append({**reading, "start": self.record["starts"]["whole"]})
        self.end(child, self.unbroken)

    def kill(self) -> None:
        """The other one: ended at a random moment, or left to finish after the last kill."""
        child = start(self.mode, self.killed, self.steps)
        boot_time = time.monotonic()
        self.record["starts"]["killed"] += 1
        left = self.kills - len(self.record["kills"])
        before = last_record(self.killed).get("step", 0)
        mean = (self.steps - before) / (left + 1)
        boots = self.random.random() < BOOT_SHARE
        boot = self.random.uniform(0, BOOT_SECONDS)
        target = before + self.random.uniform(0, 2) * mean
        target = min(target, self.steps - 2 * left)
        while child.poll() is None and not self.late:
            time.sleep(self.random.uniform(0, 0.03))
            step = last_record(self.killed).get("step", 0)
            due = time.monotonic() - boot_time > boot if boots else step >= target
            if left and due:
                child.send_signal(signal.SIGKILL)
                child.wait()
                self.record["kills"].append({"step": step, "start": boots})
                self.keep()
                return
        self.end(child, self.killed)

    def end(self, child: subprocess.Popen[bytes], directory: pathlib.Path) -> None:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        self.keep()
        expected = 0 if self.done(directory) else 130
        assert code == expected, f"{directory.name} ended with {code}; see {directory}.log"

    def run(self) -> bool:
        """Whether both are done."""
        while not self.late and not (self.done(self.unbroken) and self.done(self.killed)):
            if self.done(self.unbroken):
                self.kill()
            else:
                self.watch()
        return self.done(self.unbroken) and self.done(self.killed)


def leaves(directory: pathlib.Path) -> dict:
    """Every array of the newest checkpoint, as stored on disk."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    newest = max((directory / "checkpoints").iterdir(), key=lambda p: int(p.name)) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(newest).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return reader.restore(newest, restore_args=kinds)


def least(looks: list[dict], begin: float, end: float) -> dict:
    """The least of each number between two steps: what stays where no checkpoint is written."""
    within = [x for x in looks if begin <= x["step"] <= end]
    return {name: min(x[name] for x in within) for name in within[0]}


def compare(soak: Soak) -> dict:
    """Compares how both runs end; raises AssertionError where they differ or something grew."""
    import jax
    import numpy as np

    unbroken, killed = leaves(soak.unbroken), leaves(soak.killed)
    same = jax.tree.map(np.array_equal, unbroken, killed)
    assert all(jax.tree.leaves(same)), "the killed run ended with another state"
    steps = list(range(1, soak.steps + 1))
    for directory in (soak.unbroken, soak.killed):
        assert [r["step"] for r in records(directory)] == steps, f"steps of {directory.name}"
    looks = soak.record["looks"]
    # Not at the very end, where the reward processes are gone already.
    starts = [
        [x for x in looks if x["start"] == start and x["step"] < soak.steps * 0.98]
        for start in {x["start"] for x in looks}
    ]
    last = max(starts, key=len)
    span = last[-1]["step"] - last[0]["step"]
    begin = last[0]["step"]
    early = least(last, begin + span / 5, begin + span / 2)
    late = least(last, begin + span * 0.7, begin + span)
    result = {"early": early, "late": late, "arrays": len(jax.tree.leaves(unbroken))}
    for name in ("threads", "files", "processes"):
        assert result["late"][name] <= early[name] + 2, (name, result)
    assert result["late"]["programs"] == early["programs"], result
    assert result["late"]["memory_mb"] <= 1.1 * early["memory_mb"] + 20, result
    return result


def report(soak: Soak, result: dict) -> str:
    """The record of a whole soak of one mode, in Markdown."""
    kills = soak.record["kills"]
    seconds = sum(r["seconds"] for r in records(soak.unbroken))
    names = ("memory_mb", "threads", "files", "processes", "programs")
    rows = [f"| {n} | {result['early'][n]} | {result['late'][n]} |" for n in names]
    return "\n".join(
        [
            f"## {soak.mode}",
            "",
            f"{soak.steps} steps"
            f" ({seconds / soak.steps * 1000:.1f} ms each), {len(kills)} SIGKILLs at random"
            f" moments, {sum(k['start'] for k in kills)} of them within {BOOT_SECONDS:.0f} s of a"
            f" start. Every step is logged once, and all {result['arrays']} arrays of the last"
            " checkpoint equal those of a run that nobody killed, bit for bit.",
            "",
            f"| run left alone, least | from step {result['early']['step']} | from step"
            f" {result['late']['step']} |",
            "| --- | ---: | ---: |",
            *rows,
            "",
            f"Killed at steps {', '.join(str(k['step']) for k in kills)}.",
            "",
        ]
    )


def main() -> int:
    """0 when all is done and equal, 3 when the time was over first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, required=True)
    parser.add_argument("--modes", default="host,compiled,episodes")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=pathlib.Path)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.strip()
    text = f"# The last soak\n\n`python tests/soak.py` at {commit} on {datetime.date.today()}.\n"
    for mode in arguments.modes.split(","):
        soak = Soak(mode, arguments.dir / mode, arguments.steps, arguments.kills, until)
        if not soak.run():
            step = last_record(soak.killed).get("step", 0)
            kills = len(soak.record["kills"])
            print(f"{mode}: {kills} kills, step {step}; the same command resumes")
            return 3
        text += "\n" + report(soak, compare(soak))
    print(text)
    if arguments.record:
        arguments.record.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
