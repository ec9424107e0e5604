"""Times of a compiled program from its costs and the figures of a chip."""

from __future__ import annotations

import numpy as np

from jrl.plan.costs import KINDS, Cost
from jrl.plan.topology import HOP_SECONDS, Topology, axis_bandwidth


def roofline(
    costs: list[Cost], topology: Topology, devices: np.ndarray
) -> tuple[float, dict[str, float]]:
    """The least time of a program, seconds, and its parts by the resource that limits them.

    In each computation compute units, memory and network work in parallel, and the slowest of the
    three counts; computations run one after the other. Collectives over different axes do not
    overlap.
    """
    by_resource = dict.fromkeys(("compute", "memory", "network"), 0.0)
    for cost in costs:
        times = _times(cost, topology, devices)
        slowest = max(times, key=lambda k: times[k])
        by_resource[slowest] += cost.runs * times[slowest]
    return sum(by_resource.values()), by_resource


def each_alone(costs: list[Cost], topology: Topology, devices: np.ndarray) -> dict[str, float]:
    """Seconds that "compute", "memory" and "network" each would take by themselves."""
    each = [(cost.runs, _times(cost, topology, devices)) for cost in costs]
    return {
        name: sum(runs * times[name] for runs, times in each)
        for name in ("compute", "memory", "network")
    }


def by_operation(costs: list[Cost], topology: Topology, devices: np.ndarray) -> dict[str, float]:
    """Seconds of each kind of operation by itself."""
    chip, seconds = topology.chip, dict.fromkeys(KINDS, 0.0)
    for cost in costs:
        for kind, (flops, traffic) in cost.kinds.items():
            seconds[kind] += cost.runs * max(flops / chip.flops, traffic / chip.hbm_bandwidth)
        seconds["collectives"] += cost.runs * _times(cost, topology, devices)["network"]
    return seconds


def sent_bytes(costs: list[Cost], axes: tuple[str, ...]) -> dict[str, float]:
    """Bytes that a chip sends, by kind and mesh axes, such as "all-gather/fsdp"."""
    sums: dict[str, float] = {}
    for cost in costs:
        for c in cost.collectives:
            key = f"{c.kind}/{'+'.join(axes[a] for a in c.axes)}"
            sums[key] = sums.get(key, 0.0) + cost.runs * c.bytes
    return dict(sorted(sums.items()))


def _times(cost: Cost, topology: Topology, devices: np.ndarray) -> dict[str, float]:
    """Seconds of one run of a computation on each resource."""
    network = 0.0
    for c in cost.collectives:
        rate = axis_bandwidth(topology, devices, c.axes)
        network += max(c.bytes / rate, c.times * HOP_SECONDS)
    return {
        "compute": cost.flops / topology.chip.flops,
        "memory": cost.bytes / topology.chip.hbm_bandwidth,
        "network": network,
    }


def repeated(costs: list[Cost], times: float) -> list[Cost]:
    """The costs of a program that runs several times a step."""
    return [cost._replace(runs=times * cost.runs) for cost in costs]


def total_bytes(costs: list[Cost]) -> float:
    """Bytes that a program moves between memory and a chip's units."""
    return sum(c.runs * c.bytes for c in costs)
