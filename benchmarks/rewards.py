"""Times the rewards of a step with and without hostile samples among them; prints one JSON.

python -m benchmarks.rewards --items 600 --rounds 3

Three stages: programs by their tests in the sandbox ("code"), functions in the pool's processes
("function"), and a judge on loopback ("judge"). Each is timed clean and with a share of hostile
items, in turns, in one process; a ratio is that of the two medians. "at_once" has all items at the
start, so that the one that hangs last is waited for with nothing left to do; "over_generation" is
how a run has them, as rows end, over the time that the clean items take divided by ``--load``.
Processor time is that of this process, its workers and what they waited for. "by_kind" are seconds
of a stage with one hostile item of a kind, less those of a clean one: what an item of that kind
costs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.clock import rounded
from jrl.config.judge import JudgeTable, checked
from jrl.judging.cache import QuestionVote
from jrl.judging.client import JudgeClient
from jrl.rewards import make_reward
from jrl.rewards.base import Sample
from jrl.rewards.kill import tree
from jrl.rewards.pool import RewardPool
from jrl.rewards.replies import read_score
from jrl.rewards.verdicts import Question
from jrl.types import Prompt

T = TypeVar("T")
GOOD = "```python\nn = int(input())\nprint(sum(range(n)) * 2)\n```"
PROGRAMS = {
    "sleep": "import time\ntime.sleep(1000)",
    "spin": "while True:\n    pass",
    "fork": "import os\nwhile True:\n    os.fork()",
    "print": "while True:\n    print('4')",
    "allocate": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "raise": "raise ValueError",
    "kill": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)",
}
"""Kind of hostility -> a program in the sandbox."""
FAULTS = ("slow", "500", "429", "malformed", "cut")
"""Kinds of hostility of a judge: an answer after 2 s, statuses, JSON that is none, a body that ends
too early. "silent" is one that never answers."""
SLOW_SECONDS = 2.0


# ---------------------------------------------------------------- reward functions


def work(samples: list[Sample], rounds: int = 20_000) -> list[float]:
    """Honest work of some milliseconds, or what a hostile completion asks for."""
    acts = {
        "sleep": lambda: time.sleep(1000),
        "spin": _spin,
        "fork": _fork,
        "print": _print,
        "allocate": _allocate,
        "raise": _raise,
        "kill": lambda: os.kill(os.getpid(), 9),
    }
    if (act := acts.get(samples[0].completion)) is not None:
        act()
    digest = b""
    for _ in range(rounds):
        digest = hashlib.sha256(digest).digest()
    return [1.0]


def _spin() -> None:
    while True:
        pass


def _fork() -> None:
    for _ in range(16):  # a bomb would take the machine: processes of functions are not limited
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def _print() -> None:
    while True:
        sys.stdout.write("x" * 4096)


def _allocate() -> None:
    blocks = []
    while True:
        blocks.append(b"x" * (1 << 24))


def _raise() -> None:
    raise ValueError("hostile")


# ---------------------------------------------------------------- stages


class Stage(NamedTuple):
    """Timed cases.

    Attributes:
      kinds: of hostility.
      run: (kind of each item, "" for a clean one; seconds over which they come) -> (items with
        points, counts).
      further: kinds that are timed alone.
    """

    kinds: Sequence[str]
    run: Callable[[Sequence[str], float], tuple[int, dict[str, float]]]
    further: Sequence[str] = ()


def sample(number: int, completion: str) -> Sample:
    """An item with tests, for whatever judges it."""
    tests = {"inputs": ["3", "10", "100"], "outputs": ["6", "90", "9900"]}
    prompt = Prompt(number, "?", np.zeros(1, np.int32), "", {"tests": json.dumps(tests)})
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token")


def paced(items: Sequence[T], seconds: float) -> Iterator[T]:
    """Yields items evenly over some seconds."""
    begin = time.monotonic()
    for i, item in enumerate(items, 1):
        time.sleep(max(begin + seconds * i / len(items) - time.monotonic(), 0.0))
        yield item


def pool_stage(pool: RewardPool, good: str, bad: Callable[[str], str]) -> Stage:
    """Items that a pool judges."""

    def run(kinds: Sequence[str], seconds: float) -> tuple[int, dict[str, float]]:
        items = [sample(i, bad(kind) if kind else good) for i, kind in enumerate(kinds)]
        with pool.begin() as begun:
            for item in paced(items, seconds) if seconds else ():
                begun.submit(item)
            scores = pool.scores(items, begun=begun)
        return int((scores.points > 0).sum()), scores.outcome.counts

    return Stage([*PROGRAMS], run)


def judge_stage(url: str, seconds: float) -> Stage:
    """Items that a judge on loopback scores."""
    keys = {"url": url, "model": "m", "timeout": seconds, "seconds": seconds * 2}
    client = JudgeClient(checked(JudgeTable, "rewards.judge", keys), "rewards.judge")

    def run(kinds: Sequence[str], seconds: float) -> tuple[int, dict[str, float]]:
        questions = [
            QuestionVote(Question(({"role": "user", "content": f"{i} {kind}"},), _score))
            for i, kind in enumerate(kinds)
        ]
        for each in paced(questions, seconds) if seconds else ():
            client.begin([each])
        verdicts, counts = client.verdicts(questions)
        return sum(v is not None for v in verdicts), counts

    return Stage(FAULTS, run, ("silent",))


def _score(reply: str) -> float | None:
    return read_score(reply, 0, 10)


@contextlib.contextmanager
def faulty_judge(latency: float) -> Iterator[str]:
    """A judge whose replies take ``latency`` seconds, or fail as a question says; its address."""
    over = threading.Event()
    good = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Score: 7"}}]})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kind = body["messages"][-1]["content"].partition(" ")[2]
            waits = {"slow": SLOW_SECONDS, "silent": 1e6, "500": 0.0, "429": 0.0}
            over.wait(waits.get(kind, latency))
            text = "{" if kind == "malformed" else good
            with contextlib.suppress(OSError):
                self.send_response(int(kind) if kind.isdigit() else 200)
                if kind == "429":
                    self.send_header("Retry-After", "2")
                self.send_header("Content-Length", str(len(text) + 99 * (kind == "cut")))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.request_queue_size = True, 1024
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


# ---------------------------------------------------------------- measuring


def processor_seconds() -> float:
    """Of this process, of those below it, and of what they waited for."""
    ticks, of_children = os.sysconf("SC_CLK_TCK"), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + of_children.ru_utime + of_children.ru_stime
    for child in tree(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / ticks
    return total


def hostile_items(stage: Stage, items: int, hostile: int, seed: int) -> list[str]:
    """The kind of each item: ``hostile`` of them in turn of the stage's kinds, anywhere."""
    places = np.random.default_rng(seed).permutation(items)[:hostile]
    kinds = [""] * items
    for i, place in enumerate(places.tolist()):
        kinds[place] = stage.kinds[(seed * hostile + i) % len(stage.kinds)]
    return kinds


def timed(
    stage: Stage, kinds: Sequence[str], seconds: float = 0.0
) -> tuple[float, float, dict[str, float]]:
    """(wall seconds, processor seconds, counts) of a stage; checks that no clean item is lost."""
    wall, processor = time.perf_counter(), processor_seconds()
    done, counts = stage.run(kinds, seconds)
    out = time.perf_counter() - wall, processor_seconds() - processor, counts
    if done < kinds.count(""):
        raise RuntimeError(f"{kinds.count('') - done} clean items have no points: {counts}")
    return out


def compared(
    stage: Stage, args: argparse.Namespace, items: int, seconds: float = 0.0
) -> dict[str, Any]:
    """The figures of clean rounds and of hostile ones, whose items come over some seconds."""
    hostile = max(round(items * args.share), 1)
    runs: dict[str, list[tuple[float, float]]] = {"clean": [], "hostile": []}
    counts: dict[str, float] = {}
    for seed in range(args.rounds):
        for name in runs if seed % 2 else reversed(runs):
            kinds = (
                hostile_items(stage, items, hostile, seed) if name == "hostile" else [""] * items
            )
            wall, processor, extra = timed(stage, kinds, seconds)
            runs[name].append((wall, processor))
            if name == "hostile":
                counts = {key: counts.get(key, 0) + x for key, x in extra.items()}
    out: dict[str, Any] = {"hostile_items": hostile, "counts": counts}
    for i, clock in enumerate(("wall_s", "processor_s")):
        both = {name: statistics.median(run[i] for run in each) for name, each in runs.items()}
        out[clock] = both | {"ratio": both["hostile"] / both["clean"]}
    return out


def measured(stage: Stage, args: argparse.Namespace, items: int) -> dict[str, Any]:
    """The figures of a stage."""
    timed(stage, [""] * min(items, 8))  # starts the processes
    out: dict[str, Any] = {"items": items, "at_once": compared(stage, args, items)}
    if args.load:
        seconds = out["generation_s"] = out["at_once"]["wall_s"]["clean"] / args.load
        out["over_generation"] = compared(stage, args, items, seconds)
    if args.by_kind:
        few = [""] * args.by_kind
        clean = statistics.median(timed(stage, few)[0] for _ in range(3))
        kinds = (*stage.kinds, *stage.further)
        out["by_kind"] = {k: timed(stage, [k, *few[1:]])[0] - clean for k in kinds}
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures of the stages that the flags name."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--stages", nargs="*", default=["code", "function", "judge"])
    p.add_argument("--items", type=int, default=600, help="of a stage; of functions 10 times that")
    p.add_argument("--share", type=float, default=0.01, help="of hostile items")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--timeout", type=float, default=10.0, help="seconds of one call or request")
    p.add_argument("--latency", type=float, default=0.3, help="seconds of the judge's replies")
    p.add_argument("--load", type=float, default=0.8, help="share of a generation that they take")
    p.add_argument("--by-kind", type=int, default=0, help="items beside one of each kind; 0: none")
    p.add_argument("--json", help="file to write as well")
    args = p.parse_args(argv)
    limits = {
        "workers": args.workers,
        "timeout_seconds": args.timeout,
        "memory_gib": 1.0,
        "on_error": "zero",
    }
    out: dict[str, Any] = {"flags": vars(args)}
    if "code" in args.stages:
        with RewardPool({"code": make_reward("code")}, **limits) as pool:
            bad = lambda kind: f"```python\n{PROGRAMS[kind]}\n```"  # noqa: E731
            out["code"] = measured(pool_stage(pool, GOOD, bad), args, args.items)
    if "function" in args.stages:
        function = make_reward(f"{Path(__file__).resolve()}:work")
        with RewardPool({"work": function}, **limits) as pool:
            stage = pool_stage(pool, "fine", lambda kind: kind)
            out["function"] = measured(stage, args, 10 * args.items)
    if "judge" in args.stages:
        with faulty_judge(args.latency) as url:
            out["judge"] = measured(judge_stage(url, args.timeout), args, args.items)
    text = json.dumps(rounded(out), indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
