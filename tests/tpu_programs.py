"""What tests ask of libtpu, and of the plugin for CUDA, in a process of its own.

libtpu serves one at a time.

    python tests/tpu_programs.py FUNCTION ARGUMENTS_AS_JSON

prints what the function returns as the last line, as JSON.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

needs_libtpu = pytest.mark.extra("plan")  # libtpu is for Linux on x86 alone


def ask(function: str, *args: Any) -> Any:
    """What a function of this module returns in a process of its own, when libtpu is free."""
    command = [sys.executable, __file__, function, json.dumps(args)]
    with Path(tempfile.gettempdir(), "jrl-libtpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # libtpu reads XLA_FLAGS too, and ends the process at a flag of another backend.
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def planned(tree: dict[str, Any], topology: str, effort: float = 0.0) -> dict[str, Any]:
    """The plan of a configuration, as ``jrl plan`` prints it in JSON and as text."""
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json, as_text
    from jrl.plan.topology import parse_topology

    found = plan.make_plan(build_config(tree), parse_topology(topology), effort=effort)
    return as_json(found) | {"text": as_text(found), "numbers": found.parameters}


def resharded(tree: dict[str, Any], topology: str, effort: float) -> dict[str, Any]:
    """The plan of what makes the sampler's weights, in JSON."""
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json
    from jrl.plan.topology import parse_topology

    slices = parse_topology(topology)
    run = plan.abstract_run_on(build_config(tree), slices)
    programs = plan._programs(run, slices, ("resharding",), "sampler", effort, lambda line: None)
    return as_json(plan.judged(run, slices, programs))["programs"]["resharding"]


def pod(path: str, topology: str, effort: float) -> dict[str, Any]:
    """The memory of a configuration file's programs, from ones with few layers."""
    from jrl.config import load_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json, as_text
    from jrl.plan.topology import parse_topology

    slices = parse_topology(topology)
    found = plan.quick_plan(load_config(path), slices, effort=effort, timed=False)
    return as_json(found) | {"text": as_text(found)}


def gpu_program(tree: dict[str, Any], topology: str, name: str) -> dict[str, Any]:
    """One program of a run, compiled for GPUs, in JSON."""
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json
    from jrl.plan.topology import parse_topology

    hosts = parse_topology(topology)
    run = plan.abstract_run_on(build_config(tree), hosts)
    programs = plan._programs(run, hosts, (name,), "colocated", 0.0, lambda line: None)
    return as_json(plan.judged(run, hosts, programs))["programs"][name]


def gpu_kinds(topologies: list[str]) -> list[str]:
    """The device kinds of GPUs, for each of which a product and an activation are compiled."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from jrl.plan.topology import compile_devices, parse_topology

    kinds = []
    for name in topologies:
        *_, last = compile_devices(parse_topology(name))
        on = SingleDeviceSharding(last)
        layer = jax.jit(lambda x, w: jax.nn.silu(x @ w), in_shardings=on, out_shardings=on)
        shape = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
        assert "fusion(" in layer.lower(shape, shape).compile().as_text()
        kinds.append(last.device_kind)
    return kinds


def refused(trees: list[dict[str, Any]], topologies: list[str]) -> list[str]:
    """What is said of configurations that cannot be planned for."""
    from jrl.config import build_config
    from jrl.errors import UserError
    from jrl.plan import compile as plan
    from jrl.plan.topology import parse_topology

    said = []
    for tree, topology in zip(trees, topologies, strict=True):
        try:
            plan.make_plan(build_config(tree), parse_topology(topology))
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def kernels(tree: dict[str, Any], topology: str, programs: list[str]) -> dict[str, Any]:
    """The attention kernels in compiled programs of a run, by name, and whether all axes are used.

    "in_loop" are those in the loop over tokens; "copied" is how many numbers the largest array has
    that this loop copies or writes one by one; "loops" are all there are.
    """
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan import lower
    from jrl.plan.topology import parse_topology

    config = build_config(tree)
    run = lower.abstract_run(config, plan.plan_mesh(config, parse_topology(topology)))
    lowering = {"sampler": lower.lower_sampler, "train_step": lower.lower_step}
    found: dict[str, Any] = {}
    for name in programs:
        text = lowering[name](run).compile(compiler_options=plan.effort_options(-1.0)).as_text()
        bodies = set(re.findall(r"body=%([\w.\-]+)", text))
        calls, loops, inside, copied = [], 0, "", 0
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                inside = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            if 'custom_call_target="tpu_custom_call"' in line:
                calls.append(line.split(" = ")[0].split("%")[-1].split(".")[0])
                loops += inside in bodies
            moved = re.search(r" = \w+\[([\d,]+)\]\S* (?:copy|scatter)\(", line)
            if moved and "/decode/" in line:
                copied = max(copied, math.prod(map(int, moved[1].split(","))))
        found[name] = {"kernels": sorted(calls), "in_loop": loops, "devices": run.mesh.size}
        found[name] |= {"copied": copied, "loops": len(bodies)} if name == "sampler" else {}
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
