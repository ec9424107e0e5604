"""Kernels that a GPU ran in one call, from JAX's profiler.

While a profiler runs, XLA launches kernels one by one in place of its CUDA graphs, so that counts
and durations are those of the program's kernels, while gaps between them are larger than without a
profiler, and a loop inside a graph returns to the host. Hence the idle share is taken of the time
measured without one. With ``XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true`` graphs
stay; kernels in their conditional nodes may then be missing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.clock import timed

STREAMS = "Stream #"
"""Start of the names of the lines that hold what a GPU ran; other lines repeat it by operation."""
COPY_TO_HOST = "MemcpyD2H"
FIGURES = (
    *("kernels_a_step", "copies_to_host_a_step", "busy_ms_a_step"),
    *("idle_share", "profiled_idle_share"),
)
MOST_EVENTS = 2**23
"""Events kept of one call; XLA keeps 2 million by itself and drops the rest."""


class Event(NamedTuple):
    """A kernel or a copy: its name, its start, and its duration in nanoseconds."""

    name: str
    begin: float
    duration: float


class Profile(NamedTuple):
    """Device events of one call, and the seconds that the host waited for it."""

    events: list[Event]
    wall_s: float


def profiled(function: Callable[..., Any], *args: Any) -> tuple[Profile, Any]:
    """A profile of one call of a compiled function, and its result.

    The profile has no events where the device is no GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    options.advanced_configuration = {"gpu_max_activity_api_events": MOST_EVENTS}
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            wall, out = timed(function, *args)
        paths = sorted(Path(directory).rglob("*.xplane.pb"))
        data = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
        return Profile([event for each in data for event in device_events(each)], wall), out


def device_events(data: jax.profiler.ProfileData) -> list[Event]:
    """Kernels and copies of the first GPU, in the order of their starts."""
    planes = sorted((p for p in data.planes if p.name.startswith("/device:GPU:")), key=_name)
    events = [
        Event(event.name, event.start_ns, event.duration_ns)
        for plane in planes[:1]
        for line in plane.lines
        if line.name.startswith(STREAMS)
        for event in line.events
    ]
    return sorted(events, key=lambda event: event.begin)


def _name(plane: Any) -> str:
    return plane.name


def is_kernel(event: Event) -> bool:
    """Whether an event is a kernel, and not a copy or a fill of memory."""
    return not event.name.startswith(("Memcpy", "Memset"))


def span(events: Iterable[Event]) -> float:
    """Nanoseconds from the start of the first event to the end of the last one."""
    events = list(events)
    ends = [event.begin + event.duration for event in events]
    return max(ends) - min(event.begin for event in events) if events else 0.0


def busy(events: Iterable[Event]) -> float:
    """Nanoseconds in which at least one event ran; what runs at the same time counts once."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.begin):
        end = event.begin + event.duration
        total += max(end - max(event.begin, reached), 0.0)
        reached = max(reached, end)
    return total


def step_figures(
    whole: Profile, outside: list[Profile], steps: int, seconds: float | None
) -> dict[str, Any]:
    """Figures of one step of a loop.

    Args:
      whole: of the program with the loop.
      outside: of programs that together do what the program does beside the loop.
      steps: how often the loop's body ran.
      seconds: that all steps took without a profiler; None if unknown.

    Returns:
      ``kernels_a_step``; ``copies_to_host_a_step``, how often the loop returned to the host;
      ``busy_ms_a_step``, in which something ran on the device, and the rest as shares:
      ``idle_share`` of ``seconds``, and ``profiled_idle_share`` of the profile. All None without
      events, as on a CPU.
    """
    if not whole.events:
        return dict.fromkeys(FIGURES)
    kernels = _difference(whole, outside, lambda events: sum(map(is_kernel, events)))
    copies = _difference(
        whole, outside, lambda events: sum(event.name == COPY_TO_HOST for event in events)
    )
    worked, took = _difference(whole, outside, busy), _difference(whole, outside, span)
    return {
        "kernels_a_step": kernels / steps,
        "copies_to_host_a_step": copies / steps,
        "busy_ms_a_step": worked / steps / 1e6,
        "idle_share": 1 - worked / 1e9 / seconds if seconds else None,
        "profiled_idle_share": 1 - worked / took if took > 0 else None,
    } | incomplete(whole)


def _difference(
    whole: Profile, outside: list[Profile], count: Callable[[list[Event]], float]
) -> float:
    return count(whole.events) - sum(count(each.events) for each in outside)


def incomplete(profile: Profile) -> dict[str, str]:
    """A note where events are missing, because too many were recorded; else nothing."""
    seconds = span(profile.events) / 1e9
    if profile.wall_s - seconds <= max(0.1 * profile.wall_s, 0.05):
        return {}
    note = f"events span {seconds:.3f} s of {profile.wall_s:.3f} s: some may be missing"
    return {"profile_note": note}


def largest(profile: Profile, steps: int, most: int = 15) -> list[dict[str, Any]]:
    """The kernels with the most time in all: name, total, count, count a step and mean."""
    times: dict[str, list[float]] = {}
    for event in profile.events:
        times.setdefault(event.name, []).append(event.duration)
    order = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "kernel": name,
            "total_ms": sum(each) / 1e6,
            "count": len(each),
            "a_step": len(each) / steps,
            "mean_us": sum(each) / len(each) / 1e3,
        }
        for name, each in order[:most]
    ]


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table of ``largest`` for people."""
    lines = [f"{'total ms':>10} {'count':>8} {'a step':>8} {'mean us':>9}  kernel"]
    for row in rows:
        counts = f"{row['total_ms']:10.3f} {row['count']:8d} {row['a_step']:8.2f}"
        lines.append(f"{counts} {row['mean_us']:9.2f}  {row['kernel'][:110]}")
    return "\n".join(lines)
