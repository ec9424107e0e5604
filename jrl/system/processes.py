"""Several processes as one run: how they find each other, agree, stop, and notice a lost one.

Every host runs the same command (multi-controller JAX). Where the processes are told about each
other by flags or the environment, ``start`` joins them before anything asks for a device.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jrl.errors import UserError
from jrl.system.signals import Stopping
from jrl.system.wait_reports import waiting

COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DETECT = "JRL_DISTRIBUTED"
"""Set to ``auto``, processes ask the cluster (Cloud TPU, GKE, Slurm, Open MPI) who they are."""

SILENCE_SECONDS = 60
"""A process that says nothing for so long is taken for lost, and ends the others."""


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    silence_seconds: int | None = None,
) -> None:
    """Joins this process to the others of its run; alone, it does nothing.

    Arguments left out come from the environment: ``JAX_COORDINATOR_ADDRESS``,
    ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID`` and ``JRL_SILENCE_SECONDS``; with
    ``JRL_DISTRIBUTED=auto`` the cluster is asked instead.

    Args:
      coordinator: HOST:PORT of process 0.
      processes: how many there are.
      process: which one this is, from 0.
      silence_seconds: how long a lost process goes unnoticed.

    Raises:
      UserError: one of the three is missing or no number, ``JRL_DISTRIBUTED`` is something else,
        or the others did not come.
    """
    coordinator = coordinator or os.environ.get(COORDINATOR)
    processes = _number(PROCESSES) if processes is None else processes
    process = _number(PROCESS) if process is None else process
    silence = silence_seconds or _number("JRL_SILENCE_SECONDS") or SILENCE_SECONDS
    settings = {COORDINATOR: coordinator, PROCESSES: processes, PROCESS: process}
    if (detect := os.environ.get(DETECT, "")) not in ("", "auto"):
        # Ignored, it would let every host train a run of its own.
        raise UserError(f"{DETECT} = {detect!r}; must be auto, or not set")
    automatic = detect == "auto"
    if all(value is None for value in settings.values()) and not automatic:
        return
    if jax.distributed.is_initialized():
        return
    if not automatic:
        if missing := [name for name, value in settings.items() if value is None]:
            raise UserError(
                f"{', '.join(missing)} missing, {', '.join(set(settings) - set(missing))} given; "
                f"give all three (--coordinator, --processes, --process), or set {DETECT}=auto"
            )
        assert processes is not None
        assert process is not None
        if processes < 1:
            raise UserError(f"processes = {processes}; must be at least 1")
        if not 0 <= process < processes:
            raise UserError(f"process = {process}; must be 0 to {processes - 1}")
        host, _, port = (coordinator or "").rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(f"coordinator = {coordinator!r}; must be HOST:PORT of process 0")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            # Given all three, a cluster is not asked: Slurm's would take one GPU a process.
            cluster_detection_method=None if automatic else "deactivate",
            heartbeat_timeout_seconds=silence,
            initialization_timeout=max(silence, 300),
            shutdown_timeout_seconds=silence,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this run did not find each other: {error}") from None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r}; must be a whole number")
    return int(text)


def first_says(value: Any) -> Any:
    """Process 0's value, JSON, on every process."""
    if jax.process_count() == 1:
        return value
    return json.loads(_everyone_says(json.dumps(value))[0])


def all_say(value: Any) -> list[Any]:
    """The values of all processes, JSON, in their order, on every process."""
    if jax.process_count() == 1:
        return [value]
    return [json.loads(text) for text in _everyone_says(json.dumps(value))]


def check_same(label: str, values: Mapping[str, Any]) -> None:
    """Raises the same UserError on every process when they do not hold the same values.

    Args:
      label: names them, for the message.
      values: JSON values by name.
    """
    if jax.process_count() == 1:
        return
    by_process = all_say(dict(values))
    lines = []
    for number, values_there in enumerate(by_process[1:], 1):
        for name in sorted(by_process[0].keys() | values_there.keys()):
            if values_there.get(name) != by_process[0].get(name):
                lines.append(
                    f"{name} = {by_process[0].get(name)!r} in process 0,"
                    f" {values_there.get(name)!r} in process {number}"
                )
    if lines:
        more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
        listed = "\n".join([*lines[:8], *more])
        raise UserError(f"the processes of this run disagree on their {label}:\n{listed}")


def _everyone_says(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    with waiting("other processes"):
        sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(data)] = data
        gathered = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [bytes(row[:n]).decode() for row, n in zip(gathered, sizes, strict=True)]


_PATIENCE_MS = 7 * 24 * 3600 * 1000  # a process that is lost is noticed by its silence, not by this
_turns: collections.Counter[str] = collections.Counter()


def deal(
    name: str,
    count: int,
    work: Callable[[np.ndarray], tuple[tuple[np.ndarray, ...], Mapping[str, float]]],
) -> tuple[tuple[np.ndarray, ...], dict[str, float]]:
    """Items dealt to the processes: each works on its own, and all get what came of all.

    The hosts talk to each other, and no device is asked, so that a thread may call this while
    programs run. Calls of one name come in the same order in all processes.

    Args:
      name: of this use.
      count: items, the same everywhere.
      work: (indices [m] int) -> (results [m, ...] each, counts by name).

    Returns:
      (results [count, ...] each, the counts summed).

    Raises:
      UserError: what ``work`` raised in one of the processes, on every process.
    """
    processes = jax.process_count()
    if processes == 1:
        results, counts = work(np.arange(count))
        return results, dict(counts)
    answer: dict[str, Any] = {}
    try:
        results, counts = work(np.arange(jax.process_index(), count, processes))
        answer = {
            "results": [x.tolist() for x in results],
            "counts": dict(counts),
            "forms": [(x.shape[1:], str(x.dtype)) for x in results],
        }
    except UserError as error:
        answer = {"error": str(error)}
    answers = [json.loads(text) for text in _hosts_say(name, json.dumps(answer))]
    if errors := [each["error"] for each in answers if "error" in each]:
        raise UserError(errors[0])
    merged = tuple(np.zeros((count, *shape), dtype) for shape, dtype in answers[0]["forms"])
    total: collections.Counter[str] = collections.Counter()
    for i, each in enumerate(answers):
        for whole, part in zip(merged, each["results"], strict=True):
            if part:
                whole[i::processes] = part
        total.update(each["counts"])
    return merged, dict(total)


def _hosts_say(name: str, text: str) -> list[str]:
    """The texts of all processes, in their order, by way of the service that joined them."""
    from jax._src import distributed  # JAX lends it to nobody by a public name

    client: Any = distributed.global_state.client
    turn = _turns[name]
    _turns[name] += 1
    folder = f"jrl/{name}/{turn}"
    client.key_value_set_bytes(f"{folder}/{jax.process_index():08d}", text.encode())

    def missing() -> str:
        present = {int(key[-8:]) for key, _ in client.key_value_dir_get_bytes(f"{folder}/")}
        return f"not here: {', '.join(map(str, sorted({*range(jax.process_count())} - present)))}"

    with waiting(f"other processes ({name})", missing):
        client.wait_at_barrier(f"{folder}/all", _PATIENCE_MS)
    texts = sorted(client.key_value_dir_get_bytes(f"{folder}/"))
    if jax.process_index() == 0 and turn:
        client.key_value_delete(f"jrl/{name}/{turn - 1}/")  # everybody is past it
    return [value.decode() for _, value in texts]


def any_says(value: bool) -> bool:
    """Whether any process says so; every process asks at the same point."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    with waiting("other processes"):
        return bool(np.any(multihost_utils.process_allgather(np.array(value))))


# ---------------------------------------------------------------- being asked to stop


def stop_requested(stopping: Stopping) -> bool:
    """Whether a signal or a wait that took too long asks the run to stop, in whichever process."""
    requested = stopping.is_set() or bool(stopping.late)
    if any_says(requested) and not requested:
        stopping.set()
        return True
    return requested
