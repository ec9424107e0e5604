"""``jrl imagine``: a file of synthetic dialogues written by a model behind an endpoint.

``zoo.envs.imagined`` has what it is asked and how its replies are read. Each dialogue is one line,
written as soon as it is judged; the same command adds those that are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import http.client
import json
import queue
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jrl.config.read import read_toml
from jrl.episodes.model_endpoint import check_url, endpoint
from jrl.errors import Mistakes, StorageError, UserError, unknown_choice
from jrl.zoo.envs.imagined import Task, UnreadableError, imagine_row, reason

PAUSES = (1.0, 5.0)
"""Seconds before a request is sent again that a busy server refused."""
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may answer later."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model behind an OpenAI-compatible endpoint.

    Attributes:
      url: its base, such as "http://localhost:8000/v1".
      name: as the endpoint calls it.
      key: for the header "Authorization", or "".
      max_tokens: of a reply.
      temperature: of its draws.
      timeout: seconds until a reply must be there.
    """

    url: str
    name: str
    key: str = ""
    max_tokens: int = 2048
    temperature: float = 1.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_url(self.url, "--url")

    def ask(self, prompt: str, seed: int) -> Any:
        """The model's reply to a prompt.

        Raises:
          EndpointError: it does not answer, or with something else than a reply.
        """
        speak = endpoint(
            self.url,
            self.name,
            key=self.key,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            fields={"seed": seed},
            timeout=self.timeout,
        )
        for pause in (*PAUSES, None):
            try:
                return speak([{"role": "user", "content": prompt}])
            except urllib.error.HTTPError as error:
                if pause is None or error.code not in BUSY:
                    raise EndpointError(_status(error)) from None
                time.sleep(pause)
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                if isinstance(cause, TimeoutError):
                    raise EndpointError(f"no reply within {self.timeout:g} s (--timeout)") from None
                raise EndpointError(str(cause) or type(error).__name__) from None
            except (ValueError, LookupError, TypeError) as error:
                raise EndpointError(
                    f"not a reply of OpenAI's API ({type(error).__name__}: {str(error)[:100]})"
                ) from None
        raise AssertionError


def _status(error: urllib.error.HTTPError) -> str:
    """The text of an HTTP error."""
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = error.read(300)
    body_text = " ".join(body.decode("utf-8", "replace").split())
    return f"status {error.code} {error.reason}{': ' * bool(body_text)}{body_text}"


class EndpointError(Exception):
    """The endpoint failed."""


class Imagined(NamedTuple):
    """Result of a call of ``imagine``.

    Attributes:
      rows: dialogues in the file.
      reward: their mean, 0 to 1.
      unreadable: dialogues left out because a reply could not be read; the next call tries again.
    """

    rows: int
    reward: float
    unreadable: int


# ---------------------------------------------------------------- the task


def read_task(path: str | Path) -> Task:
    """A task from a TOML file with the keys of ``Task``.

    Raises:
      UserError: the file cannot be read, or a key is unknown, missing, or of another kind.
    """
    table, mistakes = read_toml(Path(path)), Mistakes()
    for name, value in table.items():
        mistakes.look(partial(_check_key, path, name, value))
    missing = [n for n in Task._fields if n not in Task._field_defaults and n not in table]
    for name in missing:
        mistakes.look(partial(_missing, path, name))
    mistakes.check()
    return Task(**{**table, "criteria": tuple(table.get("criteria", ()))})


def _missing(path: str | Path, name: str) -> None:
    raise UserError(f"{path}: {name} is missing; it is a text (configs/imagine has an example)")


def _check_key(path: str | Path, name: str, value: Any) -> None:
    """Raises UserError for a key that a task does not have, or a value that it cannot."""
    if name not in Task._fields:
        raise UserError(f"{path}: {unknown_choice('key', name, Task._fields)}")
    if name in ("turns", "personas"):
        fine, kind = type(value) is int and value >= 1, "a whole number of at least 1"
    elif name == "criteria":
        texts = isinstance(value, list) and all(isinstance(x, str) and x.strip() for x in value)
        fine, kind = texts, "a list of texts"
    else:
        fine, kind = isinstance(value, str) and bool(value.strip()), "a text"
    if not fine:
        raise UserError(f"{path}: {name} = {value!r:.60}; write {kind}")


# ---------------------------------------------------------------- the file


class _File:
    """Rows of dialogues, appended one at a time.

    Args:
      path: of the file; made if missing. A line that was cut is removed.
      task: a text that names the task; a file of another one is refused.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path, self._task = path, task
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise StorageError(f"--out {path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self.rows = self._load()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Keeps other commands from the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {self.path} is being written by another command; wait, or name another file"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _load(self) -> list[dict[str, Any]]:
        """The rows that are there; what a kill or a full disk cut is removed."""
        self._file.seek(0)
        *lines, rest = self._file.read().split(b"\n")
        rows = [self._read(line, number) for number, line in enumerate(lines, 1)]
        if rest:
            if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
                raise self._other(len(lines) + 1)
            self._file.truncate(sum(len(line) + 1 for line in lines))
        return rows

    def _other(self, number: int) -> UserError:
        return UserError(f"{self.path}, line {number}: not a row of jrl imagine; name another file")

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        fields = row if isinstance(row, dict) else {}
        if type(fields.get("number")) is not int or type(fields.get("reward")) is not float:
            raise self._other(number)
        if fields.get("task") != self._task:
            raise UserError(
                f"{self.path}, line {number}: imagined for another task; name another file"
            )
        return fields

    def close(self) -> None:
        """Lets others write the file."""
        self._file.close()

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        row = {**row, "task": self._task}
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"--out {self.path}: {error.strerror}") from None
        self.rows.append(row)


_BEGINNING = b'{"messages": ['
"""Of each line."""


# ---------------------------------------------------------------- all dialogues


def imagine(
    task: Task,
    model: Model,
    out: str | Path,
    *,
    count: int,
    seed: int,
    concurrency: int = 8,
    echo: Callable[[str], object] = print,
) -> Imagined:
    """Imagines the dialogues that a file lacks.

    Args:
      task: what they are about.
      model: that imagines.
      out: the file. Rows that are there stay, and their personas are used again.
      count: dialogues in the file at the end.
      seed: of what is drawn: skills, and the model's own draws where its endpoint reads a seed.
      concurrency: dialogues at a time.
      echo: where lines for a person go.

    Raises:
      UserError: the endpoint fails; what is done is written. Or the file holds something else.
    """
    digest = hashlib.sha256(json.dumps(task._asdict()).encode()).hexdigest()[:8]
    with contextlib.closing(_File(Path(out).expanduser(), digest)) as file:
        return _imagine(task, model, file, count, seed, concurrency, echo)


def _imagine(
    task: Task,
    model: Model,
    file: _File,
    count: int,
    seed: int,
    concurrency: int,
    echo: Callable[[str], object],
) -> Imagined:
    """See ``imagine``."""
    present = {row["number"] for row in file.rows}
    missing = [number for number in range(count) if number not in present]
    unreadable = 0
    if missing:
        try:
            personas_before = [str(row.get("persona")) for row in file.rows]
            personas = reason(model.ask, task, personas_before, seed=seed)
            echo(f"{len(present)} of {count} dialogues are there; {len(personas)} personas")

            def one(number: int) -> dict[str, Any]:
                return imagine_row(model.ask, task, personas, number, seed=seed)

            for row in _each(one, missing, min(concurrency, len(missing))):
                if row is None:
                    unreadable += 1
                    continue
                file.add(row)
                if len(file.rows) % 10 == 0:
                    echo(
                        f"{len(file.rows)} of {count} dialogues, mean reward {_mean(file.rows):.2f}"
                    )
        except EndpointError as error:
            raise UserError(
                f"--url {model.url}: {error}; {len(file.rows)} of {count} dialogues are in"
                f" {file.path}, and the same command adds the others"
            ) from None
        except UnreadableError as error:
            raise UserError(f"--model {model.name} lists no personas: {error}") from None
    return Imagined(len(file.rows), _mean(file.rows), unreadable)


def _mean(rows: Sequence[dict[str, Any]]) -> float:
    return sum(float(row["reward"]) for row in rows) / max(len(rows), 1)


def _each(
    work: Callable[[int], dict[str, Any]], numbers: Sequence[int], threads: int
) -> Iterator[dict[str, Any] | None]:
    """The results of ``work`` for each number, in order of completion; None for unreadable ones.

    Threads are daemons, so that a request that hangs does not keep a process that was interrupted.
    What is done is handed over before an error is raised.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        waiting.put(number)
    failed = threading.Event()

    def run() -> None:
        while not failed.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(work(number))
            except UnreadableError:
                results.put(None)
            except Exception as error:
                results.put(error)
                return

    for _ in range(threads):
        threading.Thread(target=run, daemon=True).start()
    fault: BaseException | None = None
    left = len(numbers)
    while left:
        try:
            item = results.get(block=fault is None)
        except queue.Empty:
            break
        except KeyboardInterrupt as interrupt:
            fault = interrupt
            failed.set()
            continue
        left -= 1
        if isinstance(item, Exception):
            fault = fault or item
            failed.set()
        else:
            yield item
    if fault is not None:
        raise fault
