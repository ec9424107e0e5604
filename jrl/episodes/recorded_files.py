"""The files of ``jrl serve --record``, read line by line; ``episodes.recorded`` makes rows of them.

A file begins with a line {"kind": "server"} that names the sampling weights. A line {"kind":
"completion"} has a request's "prompt" and the ids "drawn" after it, with "logprobs" under
the distribution in "sampling" and "versions" of the policy; "number" counts the completions of the
file, and "seen" says how many of them there were when the request came. {"kind": "reward"} pays its
session's newest completion.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError
from jrl.system.float32 import fits_float32
from jrl.types import StopReason

FORMAT = 1
"""Of the files; a reader of another one refuses them."""


class Distribution(NamedTuple):
    """Sampling parameters of a completion; the arguments of ``make_sampling_params``.

    Attributes:
      temperature, top_k, top_p, min_p: of the request.
      biased: whether it added to logits, or followed a grammar, which training knows nothing of.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    biased: bool = False

    def __str__(self) -> str:
        """The settings as keys of [sampling]."""
        settings = [f"{name} = {value:g}" for name, value in [*self._asdict().items()][:-1]]
        return ", ".join(settings) + ", and a logit_bias or a grammar" * self.biased


@dataclasses.dataclass(eq=False)
class RecordedCompletion:
    """A completion on record.

    Attributes:
      prompt: [p] int32.
      drawn: [t] int32.
      logprobs: [t] float32, nats.
      versions: [t] int32.
      stop: why it ended.
      sampling: what it was drawn from.
      number: in its file.
      seen: completions of the file when it was asked for.
      points: paid at its end; None for no reward.
      done: whether the session ended with it.
      parent: what it continues; None for the beginning of an episode.
      joined: whether its prompt begins with the parent's prompt and drawn ids.
      row: of the file of dialogues that it is from; -1 for what a server recorded.
    """

    prompt: np.ndarray
    drawn: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop: StopReason
    sampling: Distribution
    number: int
    seen: int
    points: float | None = None
    done: bool = False
    parent: RecordedCompletion | None = None
    joined: bool = False
    row: int = -1

    def __post_init__(self) -> None:
        self.start = self.prompt.tobytes()
        self.whole = self.start + self.drawn.tobytes()


def read_file(path: Path) -> tuple[dict[str, Any] | None, list[list[RecordedCompletion]], int]:
    """The first line, sessions in the order of their first completion, and how many lines are cut.

    Without a first line, as where the server never came to serve, there is nothing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    *lines, rest = data.split(b"\n")  # the last line of a server that was killed has no end
    damaged, server = int(bool(rest)), None
    sessions: dict[str, list[RecordedCompletion]] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        kind = row.get("kind") if isinstance(row, dict) else None
        if server is None:
            if kind != "server" or row.get("format") != FORMAT:
                raise UserError(
                    f"{where}: not the beginning of a recording of format {FORMAT}; keep other"
                    " files elsewhere"
                )
            server = row
        elif kind == "completion":
            session, node = _node(row, where)
            sessions.setdefault(session, []).append(node)
        elif kind == "reward":
            _pay(sessions.get(row.get("session") or "", []), row, where)
    return server, list(sessions.values()), damaged


def _node(row: Mapping[str, Any], where: str) -> tuple[str, RecordedCompletion]:
    """A completion's session, and the completion.

    Raises:
      UserError: a field is missing, or of another kind or length than it should be.
    """
    try:
        sampled, sampling = _array(row["drawn"], np.int32), row["sampling"]
        versions = row["versions"]
        node = RecordedCompletion(
            prompt=_array(row["prompt"], np.int32),
            drawn=sampled,
            logprobs=_array(row["logprobs"], np.float32),
            versions=_array([versions] * len(sampled) if type(versions) is int else versions),
            stop=StopReason[row["stop"].upper()],
            sampling=Distribution(
                temperature=float(sampling["temperature"]),
                top_k=int(sampling["top_k"]),
                top_p=float(sampling["top_p"]),
                min_p=float(sampling["min_p"]),
                biased=bool(sampling["logit_bias"] or sampling.get("grammar")),
            ),
            number=int(row["number"]),
            seen=int(row["seen"]),
        )
        session = row["session"]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where}: not a completion of a recording ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(session, str) or not len(node.prompt):
        raise UserError(f"{where}: a completion without a session, or with an empty prompt")
    if not len(sampled) == len(node.logprobs) == len(node.versions):
        raise UserError(
            f"{where}: {len(sampled)} drawn ids have {len(node.logprobs)} log-probabilities and "
            f"{len(node.versions)} versions; each needs one"
        )
    if not np.isfinite(node.logprobs).all():
        raise UserError(f"{where}: a log-probability is not finite")
    return session, node


def _array(values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A list of numbers as an array; floats are no ids."""
    array = np.array(values)
    if array.ndim != 1 or (len(array) and dtype is np.int32 and array.dtype.kind != "i"):
        raise ValueError("not a list of numbers")
    if len(array) and dtype is np.int32 and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError("a number out of range")
    return array.astype(dtype)


def _pay(nodes: Sequence[RecordedCompletion], row: Mapping[str, Any], where: str) -> None:
    """Adds a reward to the newest completion of a session; none if its lines are lost."""
    points: Any = row.get("reward")
    done = row.get("done")
    if type(points) not in (int, float) or not fits_float32(points) or type(done) is not bool:
        raise UserError(
            f"{where}: reward = {points!r:.40}, done = {done!r:.40}; give a finite float32 number"
            " and a bool"
        )
    if nodes:
        nodes[-1].points = (nodes[-1].points or 0.0) + points
        if not fits_float32(nodes[-1].points):
            raise UserError(
                f"{where}: the rewards of its session add up to {nodes[-1].points:g}, infinite in"
                " float32"
            )
        nodes[-1].done = nodes[-1].done or done
