"""Samples of a server, appended to files for training: the sessions of external agents.

    recorder = Recorder(Path("recorded"))
    recorder.begin({"model": "tiny", "version": 0})
    place = recorder.place(name, prompts)         # when a request comes
    recorder.completed(place, ...)                # when one of its choices has ended
    recorder.reward("task-1", 1.0, done=True)

``jrl.episodes.recorded_files`` has the format, ``jrl.episodes.recorded`` the reader. A client names
its session, or a request whose prompt begins with the prompt and the drawn ids of an earlier one
continues that one's session. Messages are written as ids alone; headers and keys are not written.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.recorded_files import FORMAT
from jrl.errors import StorageError
from jrl.sampling.request import Completion
from jrl.serving.api_error import ApiError
from jrl.serving.openai_requests import ApiRequest
from jrl.system.float32 import fits_float32

MOST = 100_000
"""Sessions, and ends of completions that a request may continue, that are remembered; of more the
oldest are forgotten."""
LONGEST_NAME = 256
"""Characters of a session's name."""

End = tuple[int, bytes]
"""A prompt with its sampled continuation: tokens, and a hash of their ids."""


class Place(NamedTuple):
    """Position of a request in its session.

    Attributes:
      session: its name.
      seen: completions on record when the request came; it can continue none that came later.
    """

    session: str
    seen: int


class Recorder:
    """Appends to a file of its own, a JSON line each; every method may be called from any thread.

    Args:
      directory: made if it is not there.

    Attributes:
      path: the file.

    Raises:
      StorageError: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = directory / f"sessions-{began}-{uuid.uuid4().hex[:8]}.jsonl"
        self._lock = threading.Lock()
        self._done: collections.OrderedDict[str, bool] = collections.OrderedDict()
        self._ends: collections.OrderedDict[End, str] = collections.OrderedDict()
        self._lengths: collections.Counter[int] = collections.Counter()
        self._number = self._size = self._lost = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Without a buffer: what is written is in the file when the server is killed.
            self._file = self.path.open("xb", buffering=0)
        except (OSError, ValueError) as error:
            raise _unwritable(directory, error) from None

    def begin(self, weights: Mapping[str, Any]) -> None:
        """Writes the first line of the file.

        Args:
          weights: what says which weights draw.

        Raises:
          StorageError: it cannot be written.
        """
        try:
            self._write({"kind": "server", "format": FORMAT, "time": time.time(), **weights})
        except OSError as error:
            raise _unwritable(self.path.parent, error) from None

    # ------------------------------------------------------------ sessions

    def place(self, name: str | None, prompts: Sequence[Sequence[int]]) -> Place:
        """The position of an incoming request.

        Args:
          name: of its session, by the client; None to look for the request that it continues.
          prompts: its ids.

        Raises:
          ApiError: the session is done.
        """
        with self._lock:
            if name is None:
                sessions = (session for each in prompts if (session := self._continued(each)))
                name = next(sessions, None) or uuid.uuid4().hex
            self._check_open(name)
            return Place(name, self._number)

    def _continued(self, prompt: Sequence[int]) -> str | None:
        """The session of the longest earlier prompt and completion that this prompt begins with."""
        ends = reversed(_hashes(prompt, self._lengths))
        name = next((self._ends[end] for end in ends if end in self._ends), None)
        return None if name is None or self._done.get(name, False) else name

    def _remember_end(self, ids: Sequence[int], session: str) -> None:
        (end,) = _hashes(ids, {len(ids)})
        new = end not in self._ends
        self._lengths[len(ids)] += new
        if (forgotten := _remember(self._ends, end, session)) is not None:
            self._lengths[forgotten[0]] -= 1
            self._lengths += collections.Counter()  # drops what is counted 0 times

    def _check_open(self, name: str) -> None:
        if self._done.get(name, False):
            raise ApiError(
                f"session {name!r:.80} is done; begin another one", status=409, code="session_done"
            )

    # ------------------------------------------------------------ what is written

    def completed(
        self, place: Place, request: ApiRequest, name: str, choice: int, completion: Completion
    ) -> None:
        """Writes a completed choice; where that fails, a line in the log says so.

        Args:
          place: of its request.
          request: that asked for it.
          name: the reply's.
          choice: number in the reply.
          completion: what was drawn.
        """
        sampling = request.requests[choice // request.n]
        sampled, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
        versions = completion.versions.tolist()
        line = {
            "kind": "completion",
            "session": place.session,
            "seen": place.seen,
            "request": name,
            "choice": choice,
            "time": time.time(),
            "prompt": list(sampling.tokens),
            "drawn": sampled,
            "logprobs": logprobs,
            "versions": versions[0] if len(set(versions)) == 1 else versions,
            "stop": completion.stop.name.lower(),
            "sampling": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "logit_bias": {str(token): x for token, x in sampling.logit_bias.items()},
                "grammar": sampling.grammar is not None,
                "stop": list(sampling.stop_strings),
                "max_new_tokens": sampling.max_new_tokens,
                "seed": sampling.seed,
                "member": completion.member,
            },
        }
        with self._lock:
            _remember(self._done, place.session, self._done.get(place.session, False))
            if not all(map(math.isfinite, logprobs)):
                self._failed("a log-probability is not finite")
                return
            if self._append(line | {"number": self._number}):
                self._number += 1
                self._remember_end([*sampling.tokens, *sampled], place.session)

    def reward(self, session: str, points: float, *, done: bool) -> None:
        """Records a session's reward, and whether it is done.

        Raises:
          ApiError: there is no such session, it is done, or nothing can be written.
        """
        with self._lock:
            if session not in self._done:
                raise ApiError(
                    f"session {session!r:.80} does not exist: this server has recorded no "
                    "completion of it",
                    status=404,
                    code="session_not_found",
                )
            self._check_open(session)
            line = {"kind": "reward", "session": session, "reward": points, "done": done}
            if not self._append(line | {"time": time.time()}):
                raise ApiError("the reward could not be written; send it again", status=503)
            self._done[session] = done

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()

    # ------------------------------------------------------------ the file

    def _append(self, line: Mapping[str, Any]) -> bool:
        """Writes a line, or removes a partial one; whether it was written."""
        try:
            self._write(line)
        except (OSError, ValueError) as error:
            self._failed(getattr(error, "strerror", None) or str(error))
            return False
        if self._lost:
            _log().warning("recording resumes in %s; %d lines were lost", self.path, self._lost)
            self._lost = 0
        return True

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        # Half a line that an earlier call left would spoil this one.
        if self._file.tell() != self._size:
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._size += len(data)

    def _failed(self, why: str) -> None:
        """Says once, until it works again, that nothing is recorded; requests are served."""
        self._lost += 1
        if self._lost == 1:
            _log().warning(
                "recording to %s failed: %s; requests are answered, and not recorded until it works"
                " again",
                self.path,
                why,
            )


def _unwritable(directory: Path, error: Exception) -> StorageError:
    why = getattr(error, "strerror", None) or error
    return StorageError(
        f"--record {directory}: nothing can be written there: {why}; name a directory with room "
        "that may be written"
    )


def session_name(headers: Mapping[str, str], body: Any) -> str | None:
    """The session that a client names: by the header X-Session-Id or ``metadata.session_id``.

    Raises:
      ApiError: it is no text of 1 to ``LONGEST_NAME`` characters, or the two differ.
    """
    metadata = body.get("metadata") if isinstance(body, dict) else None
    inside = metadata.get("session_id") if isinstance(metadata, dict) else None
    names = [x for x in (headers.get("x-session-id"), inside) if x is not None]
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise ApiError(
                f"session_id = {name!r:.80}; must be a text of 1 to {LONGEST_NAME} characters",
                param="metadata.session_id",
            )
        if name != names[0]:
            raise ApiError(
                f"X-Session-Id = {names[0]!r:.80} and metadata.session_id = {name!r:.80} differ; "
                "send one of them",
                param="metadata.session_id",
            )
    return names[0] if names else None


def read_reward(body: Any) -> tuple[float, bool]:
    """Points, and whether the session is done, of the body of a reward.

    Raises:
      ApiError: names the parameter, the value and what is allowed.
    """
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object with a reward")
    if unknown := [name for name in body if name not in ("reward", "done")]:
        raise ApiError(
            f"unknown parameter {unknown[0]!r:.80}", param=unknown[0], code="unknown_parameter"
        )
    points, done = body.get("reward"), body.get("done")
    if isinstance(points, bool) or not isinstance(points, int | float):
        raise ApiError(f"reward = {points!r:.80}; must be a number", param="reward")
    # What training reads is float32, in which larger numbers are infinite.
    if not fits_float32(points):
        raise ApiError(f"reward = {points!r:.80}; must be a finite float32", param="reward")
    if not isinstance(done, bool | None):
        raise ApiError(f"done = {done!r:.80}; must be true or false", param="done")
    return float(points), bool(done)


def _hashes(ids: Sequence[int], lengths: Container[int]) -> list[End]:
    """The beginnings of the ids that have one of these lengths, the shortest first."""
    data = np.asarray(ids, np.int32).tobytes()
    running, ends, hashed = hashlib.blake2b(digest_size=16), [], 0
    for length in (n for n in range(1, len(ids) + 1) if n in lengths):
        running.update(data[hashed : 4 * length])
        hashed = 4 * length
        ends.append((length, running.copy().digest()))
    return ends


def _remember(memory: collections.OrderedDict[Any, Any], key: Any, value: Any) -> Any:
    """Keeps a value as the newest; the key of the oldest where that had to go, else None."""
    memory[key] = value
    memory.move_to_end(key)
    return memory.popitem(last=False)[0] if len(memory) > MOST else None


def _log() -> logging.Logger:
    return logging.getLogger("jrl")
