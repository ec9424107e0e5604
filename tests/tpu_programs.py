"""Compilations by libtpu and the plugin for CUDA, in a process of their own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from jrl.plan.isolate import Isolated

needs_libtpu = pytest.mark.extra("plan")  # libtpu is for Linux on x86 alone
compiler = Isolated()
"""Of the tests of one module, since it takes six seconds to start; ``conftest.py`` closes it."""


def ask(function: str, *args: Any) -> Any:
    """Result of a function of this module, as JSON has it, run in the compiling process."""
    with pytest.MonkeyPatch.context() as patch:
        # libtpu reads XLA_FLAGS too, and ends the process at a flag of another backend.
        patch.delenv("XLA_FLAGS", raising=False)
        return json.loads(compiler(_as_json, function, args))


def _as_json(function: str, args: tuple[Any, ...]) -> str:
    return json.dumps(globals()[function](*json.loads(json.dumps(args))))


def planned(tree: dict[str, Any], topology: str, effort: float = 0.0) -> dict[str, Any]:
    """The plan of a configuration, as ``jrl plan`` prints it in JSON and as text."""
    from jrl.config import build_config
    from jrl.plan.make import make_plan
    from jrl.plan.text import as_json, as_text
    from jrl.plan.topology import parse_topology

    result = make_plan(build_config(tree), parse_topology(topology), effort=effort)
    return as_json(result) | {"text": as_text(result), "numbers": result.parameters}


def resharded(tree: dict[str, Any], topology: str, effort: float) -> dict[str, Any]:
    """The plan of what makes the sampler's weights, in JSON."""
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json
    from jrl.plan.topology import parse_topology

    slices = parse_topology(topology)
    run = plan.abstract_run_on(build_config(tree), slices)
    programs = plan.compiled_programs(
        run, slices, ("resharding",), "sampler", effort, lambda line: None
    )
    return as_json(plan.judged(run, slices, programs))["programs"]["resharding"]


def pod(path: str, topology: str, effort: float) -> dict[str, Any]:
    """The memory of a configuration file's programs, from ones with few layers."""
    from jrl.config import load_config
    from jrl.plan import compile as plan
    from jrl.plan.make import make_plan
    from jrl.plan.text import as_json, as_text
    from jrl.plan.topology import parse_topology

    plan.FAST_BYTES = 1 << 62  # the fewest layers compile soonest, and their memory is right
    result = make_plan(load_config(path), parse_topology(topology), "few layers", effort=effort)
    return as_json(result) | {"text": as_text(result)}


def gpu_program(tree: dict[str, Any], topology: str, name: str) -> dict[str, Any]:
    """One program of a run, compiled for GPUs, in JSON."""
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan.text import as_json
    from jrl.plan.topology import parse_topology

    hosts = parse_topology(topology)
    run = plan.abstract_run_on(build_config(tree), hosts)
    programs = plan.compiled_programs(run, hosts, (name,), "colocated", 0.0, lambda line: None)
    return as_json(plan.judged(run, hosts, programs))["programs"][name]


def gpu_engine(sizes: dict[str, Any], topology: str, mesh: dict[str, int], steps: int) -> Any:
    """Launches of a token step of the host engine in a chunk of so many steps on GPUs.

    Its 64 rows may each truncate, and bring a bias and a grammar; one asked for a report.
    """
    import jax
    import jax.numpy as jnp

    from jrl.mesh import make_mesh, replicated
    from jrl.models import gpu
    from jrl.models.config import ModelConfig
    from jrl.models.transformer import transformer
    from jrl.plan.hlo import parse_program
    from jrl.plan.kernels import token_step
    from jrl.plan.topology import compile_devices, parse_topology
    from jrl.sampling.batch import ChunkInputs
    from jrl.sampling.rows import RowOptions, Rows
    from jrl.sampling.slots import IdleLimit

    rows, vocab = 64, sizes["vocab_size"]
    types = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    network = transformer(ModelConfig(**sizes, **types))
    lengths = {"prompt_tokens": 256, "max_new_tokens": 1024, "chunk": 32}
    wide = RowOptions(stop_width=8, biases=True, masks=True, top_logprobs=8)
    engine = Rows(network, slots=rows, stop_tokens=(0,), **lengths, options=wide)
    chips = make_mesh(mesh, compile_devices(parse_topology(topology)))
    on = replicated(chips)

    def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=on)

    def shapes(function: Callable[..., Any], *args: Any) -> Any:
        return jax.tree.map(
            lambda x: shape(*x.shape, dtype=x.dtype), jax.eval_shape(function, *args)
        )

    with jax.set_mesh(chips):
        weights = shapes(lambda: network.prepare(network.init(jax.random.key(0))))
        batch, idle = shapes(engine._make, weights), IdleLimit(shape(), shape())
        masks = shape(rows, -(-vocab // 32), dtype=jnp.uint32)
        chunk = ChunkInputs(shape(), shape(rows), shape(), idle, shape(rows), None, masks)
        at_once = gpu.block_of(steps)
        program = engine._decode.lower(weights, batch, chunk, at_once=at_once).compile()
    return token_step(parse_program(program.as_text()))._asdict() | {"at_once": at_once}


def gpu_kinds(topologies: list[str]) -> list[str]:
    """The device kinds of GPUs, for each of which the kernels of a token step are compiled."""
    import jax

    from jrl.mesh import make_mesh, replicated
    from jrl.plan.topology import compile_devices, parse_topology

    kinds = []
    for name in topologies:
        *_, last = compile_devices(parse_topology(name))
        mesh = make_mesh({"data": 1}, [last])
        on = replicated(mesh)
        with jax.set_mesh(mesh):
            for function, shapes in _kernels_of_a_step():
                program = jax.jit(function, in_shardings=on, out_shardings=on).lower(*shapes)
                assert "custom-call" in program.compile().as_text()
        kinds.append(last.device_kind)
    return kinds


def gpu_rounded(topologies: list[str], kind: str) -> list[str]:
    """For each GPU a program that rounds a weight to 8 bits and multiplies many rows by it."""
    import jax
    import jax.numpy as jnp

    from jrl.mesh import make_mesh, replicated
    from jrl.models.matmul import project
    from jrl.models.quant import quantise
    from jrl.plan.topology import compile_devices, parse_topology

    x, w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 512), "f4")
    texts = []
    for name in topologies:
        mesh = make_mesh({"data": 1}, compile_devices(parse_topology(name))[:1])
        multiply = jax.jit(
            lambda x, w: project("bd,de->be", x, quantise(w, 1, to=kind)),
            in_shardings=replicated(mesh),
        )
        with jax.set_mesh(mesh):
            texts.append(multiply.lower(x, w).compile().as_text())
    return texts


def _kernels_of_a_step() -> Iterator[tuple[Callable[..., Any], tuple]]:
    """(function, shapes) of ``models.gpu_kernels`` at sizes of 64 rows; heads of 64 to 256."""
    import jax
    import jax.numpy as jnp

    from jrl.models import gpu_kernels as gk

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    floats, ints = partial(shape, dtype=jnp.float32), partial(shape, dtype=jnp.int32)
    short = partial(shape, dtype=jnp.int8)
    yield lambda x, w: gk.few_rows(x, gk.Weight(w)), (shape(64, 6144), shape(6144, 2048))
    silu = partial(gk.gated, activation=jax.nn.silu)
    for kind in (jnp.int8, jnp.float8_e4m3fn):
        in_8_bits = shape(64, 2048), shape(2048, 4096, dtype=kind), floats(4096)
        yield lambda x, w, s: gk.few_rows(x, gk.Weight(w, s)), in_8_bits
        yield lambda x, w, s: silu(x, gk.Weight(w, s)), in_8_bits
    yield lambda x, w: silu(x, gk.Weight(w)), (shape(64, 2048), shape(2048, 4096))
    residual = shape(64, 4096), floats(4, 64, 4096), shape(4096)
    yield partial(gk.added_norm, eps=1e-6), residual
    yield gk.block_sums, (floats(64, 151_936), floats(64))
    sums = floats(64, 38), floats(64, 38, gk.BLOCKS)
    numbers = floats(64), ints(64), floats(64), floats(64)
    yield gk.least_kept, (floats(64, 151_936), *numbers)
    yield gk.pick, (floats(64), floats(64, 151_936), floats(64), *sums)

    def attend(x: Any, member_cache: Any, prompt: Any, turn: Any, reach: Any) -> Any:
        how = gk.Scores(jnp.dtype(jnp.bfloat16), 0.1, softcap=50.0)
        return gk.attend_cache(x, member_cache, prompt, turn, reach, how=how)

    def cache(rows: int, columns: int, size: int, number: Any) -> dict[str, Any]:
        both = {name: number(rows, 8, columns, size) for name in ("k", "v")}
        scales = {f"{name}_scale": floats(rows, 8, 1, columns) for name in ("k", "v")}
        return both | (scales if number is short else {})

    for size, number in ((64, shape), (128, short), (128, shape), (256, shape)):
        turn = gk.Rotation(floats(64, size // 2), floats(64, size // 2), shape(size), shape(size))
        reach = gk.Reach(ints(64), ints(64), ints(8), ints(8))
        caches = cache(64, 128, size, number), cache(8, 256, size, number)
        yield attend, (floats(2, 64, 8, 4, size), *caches, turn, reach)


def refusals(trees: list[dict[str, Any]], topologies: list[str]) -> list[str]:
    """Error messages of configurations that cannot be planned for, "" for others."""
    from jrl.config import build_config
    from jrl.errors import UserError
    from jrl.plan.make import make_plan
    from jrl.plan.topology import parse_topology

    messages = []
    for tree, topology in zip(trees, topologies, strict=True):
        try:
            make_plan(build_config(tree), parse_topology(topology))
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


def kernels(tree: dict[str, Any], topology: str, programs: list[str]) -> dict[str, Any]:
    """The attention kernels in compiled programs of a run, by name, and whether all axes are used.

    "in_loop" are those in the loop over tokens; "copied" is how many numbers the largest array has
    that this loop copies or writes one by one; "loops" are all there are. What the program's entry
    copies, such as weights that it lays out anew, it copies once.
    """
    from jrl.config import build_config
    from jrl.plan import compile as plan
    from jrl.plan import lower
    from jrl.plan.topology import parse_topology

    config = build_config(tree)
    run = lower.abstract_run(config, plan.plan_mesh(config, parse_topology(topology)))
    lowering = {"sampler": lower.lower_sampler, "train_step": lower.lower_step}
    kernels_of: dict[str, Any] = {}
    for name in programs:
        text = lowering[name](run).compile(compiler_options=plan.effort_options(-1.0)).as_text()
        bodies = set(re.findall(r"body=%([\w.\-]+)", text))
        calls, loops, inside, entry, largest = [], 0, "", False, 0
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                entry = line.startswith("ENTRY ")
                inside = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            if 'custom_call_target="tpu_custom_call"' in line:
                calls.append(line.split(" = ")[0].split("%")[-1].split(".")[0])
                loops += inside in bodies
            match = re.search(r" = \w+\[([\d,]+)\]\S* (?:copy|scatter)\(", line)
            if match and "/decode/" in line and not entry:
                largest = max(largest, math.prod(map(int, match[1].split(","))))
        kernels_of[name] = {"kernels": sorted(calls), "in_loop": loops, "devices": run.mesh.size}
        kernels_of[name] |= {"copied": largest, "loops": len(bodies)} if name == "sampler" else {}
    return kernels_of
