"""GPUs as topologies: names, figures, networks, and messages where they cannot be planned for."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.plan import compile as plan
from jrl.plan.costs import program_costs
from jrl.plan.estimate import ring_bandwidth
from jrl.plan.memory import other_chips, roomier
from jrl.plan.records import Plan, Program
from jrl.plan.text import as_text
from jrl.plan.topology import (
    CHIPS,
    axis_bandwidth,
    compile_devices,
    larger,
    parse_topology,
    several,
)
from jrl.setup import gather
from jrl.system.devices import GPU_MEMORY_SHARE
from jrl.train.utilisation import PEAKS

CONFIGS = Path(__file__).parents[2] / "configs"
GPUS = {name: chip for name, chip in CHIPS.items() if chip.platform == "gpu"}
SHIPPED = sorted(CONFIGS.glob("gpu_*.toml"))


def test_what_compiles_programs_for_the_tests_uses_names_that_exist():
    """Tests of compiled programs run where the plugin is installed alone."""
    tree = ast.parse((CONFIGS.parent / "tests" / "tpu_programs.py").read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        modules = {}
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jrl"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    named = f"{node.module}.{alias.name}"
                    if not hasattr(module, alias.name):
                        module_named = importlib.import_module(named)
                        modules[alias.asname or alias.name] = module_named
                    elif isinstance(getattr(module, alias.name), ModuleType):
                        modules[alias.asname or alias.name] = getattr(module, alias.name)
        for node in ast.walk(function):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and (module := modules.get(node.value.id)) is not None:
                assert hasattr(module, node.attr), f"{module.__name__}.{node.attr}"


# ---------------------------------------------------------------- names and figures


def test_hosts_of_gpus_have_names_and_unknown_ones_are_refused_with_the_known():
    two = parse_topology("2*h100x8")
    assert (two.family, two.shape, two.slices, two.chips) == ("h100", (8,), 2, 16)
    assert parse_topology("l4x1").chips == 1
    for name in ("h800x8", "h100", "0*h100x8", "v5e"):
        with pytest.raises(UserError, match=r"known: a100x8, h100x8, h200x8, b200x8, l4x8"):
            parse_topology(name)
    with pytest.raises(UserError, match=r"h100x16.*h100x1, h100x2.*several such.*2\*h100x8"):
        parse_topology("h100x16")
    assert larger(parse_topology("h100x1"), 3) == "h100x4"
    assert larger(two, 9) is None
    assert several(two, 24) == "3*h100x8"
    assert several(two, 12) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("v5litepod-16", "v5e:4x4"),
        ("2*v6e-256", "2*v6e:16x16"),
        ("v5p-128", "v5p:4x4x4"),  # cores
        ("v4-8", "v4:2x2x1"),
        (" V5E:4X4", "v5e:4x4"),
        ("H100x8", "h100x8"),
    ],
)
def test_names_of_accelerators_and_other_letters_are_told_the_topology(name, meant):
    with pytest.raises(UserError) as raised:
        parse_topology(name)
    assert str(raised.value) == f"topology = {name!r}; did you mean {meant}?"


@pytest.mark.parametrize("name", ["v5p-127", "v5e-3", "2*2*v5e-16", "v5e-" + "9" * 5000])
def test_names_of_no_accelerator_are_told_the_form(name):
    with pytest.raises(UserError, match="write CHIP:SHAPE"):
        parse_topology(name)


def test_a_mesh_for_more_gpus_names_the_hosts(monkeypatch):
    config = load_config(CONFIGS / "gpu_14b_2_nodes.toml")
    with pytest.raises(UserError, match=r"16 chips.*h100x8 has 8.*--topology 2\*h100x8"):
        plan.plan_mesh(config, parse_topology("h100x8"))


def description(name):
    """The fields of a GPU's file that JAX is given."""
    text = (Path(plan.__file__).parent / "gpus" / f"{name}.txtpb").read_text()
    return {k: v.strip('"') for k, v in re.findall(r"^ *(\w+): (.*)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("name", GPUS)
def test_the_files_for_xla_and_the_tables_are_of_the_same_gpus(name):
    fields, chip = description(name), CHIPS[name]
    assert int(GPU_MEMORY_SHARE * int(fields["device_memory_size"])) == chip.hbm_bytes
    assert float(fields["memory_bandwidth"]) == pytest.approx(chip.hbm_bandwidth, rel=0.05)
    kind = fields["device_description_str"]
    assert gather.MEMORY[kind] == chip.hbm_bytes
    assert next(v for k, v in PEAKS.items() if kind.startswith(k)) == chip.flops


# ---------------------------------------------------------------- networks


def hosts(number, each):
    """GPUs that are compiled for: they know their process, and all are in slice 0."""
    devices = np.empty(number * each, object)
    devices[:] = [
        SimpleNamespace(platform="gpu", process_index=i // each, slice_index=0, coords=[0, i, 0])
        for i in range(number * each)
    ]
    return devices


def test_gpus_of_a_host_have_its_switch_and_hosts_the_network():
    topology = parse_topology("2*h100x8")
    link, network = topology.chip.link_bandwidth, topology.chip.dcn_bandwidth
    grid = hosts(2, 8).reshape(2, 4, 2)
    assert axis_bandwidth(topology, grid, (1,)) == link
    assert axis_bandwidth(topology, grid, (1, 2)) == link
    assert axis_bandwidth(topology, grid, (0,)) == network  # one of each host
    assert axis_bandwidth(topology, grid, (0, 2)) == 2 * network
    assert axis_bandwidth(topology, grid, (0, 1, 2)) == 8 * network
    assert ring_bandwidth(topology, 8) == link
    assert ring_bandwidth(topology, 2) == link  # taken to be in one host
    assert ring_bandwidth(topology, 16) == 8 * network


def test_remedies_name_more_hosts_and_gpus_with_more_memory():
    assert roomier(parse_topology("h100x8"), 2.0)[0].startswith("or take 2*h100x8, with mesh.data")
    assert roomier(parse_topology("h100x1"), 2.0) == [
        "or take h100x2, with mesh.fsdp over the chips that it has more"
    ]
    assert "b200 (164 GiB)" in other_chips(parse_topology("h100x8"), 2.0)[0]


# ---------------------------------------------------------------- costs of a GPU's operations

FMHA = (
    "(bf16[8,16,256,128]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k),"
    ' custom_call_target="__cudnn$fmha{}", backend_config={{"cudnn_fmha_backend_config":'
    ' {{"fmha_scale": 0.088, "intermediate_tensor_shape": {{"element_type": "BF16", "dimensions":'
    ' ["8", "16", "256", "256"]}}}}}}'
)
GEMM = (
    "(f32[64,128,256]{1,2,0}, s8[1024]{0}) custom-call(%a, %b),"
    ' custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    ' {"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
CALLS = f"""HloModule jit_f

ENTRY %main (q: bf16[8,256,16,128], k: bf16[8,256,8,128], a: f32[64,512,128]) -> f32[] {{
  %q = bf16[8,256,16,128]{{3,2,1,0}} parameter(0)
  %k = bf16[8,256,8,128]{{3,2,1,0}} parameter(1)
  %a = f32[64,512,128]{{2,1,0}} parameter(2)
  %b = f32[64,256,512]{{2,1,0}} constant(0)
  %seen = {FMHA.format("ScaleBiasSoftmax")}
  %back = {FMHA.format("SoftmaxBackward")}
  %made = {GEMM}
  ROOT %out = f32[] constant(0)
}}
"""


def test_products_of_nvidia_libraries_are_counted():
    (cost,) = program_costs(CALLS, (1,))
    product = 2 * 8 * 16 * 256 * 256 * 128  # scores, or values, of all pairs
    assert cost.kinds["attention"][0] == (2 + 5) * product
    assert cost.kinds["products"][0] == 2 * 64 * 128 * 256 * 512


ATTENDS = (
    "(bf16[4,2,64,32]{3,2,1,0}, f32[4,2,8]{2,1,0}) custom-call(%cache, %query),"
    ' custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (0, {})},'
    ' metadata={op_name="jit(f)/decode/while/body/attention/jit(attend_cache)/attend_cache/'
    'pallas_call"}'
)
GROUPED = (
    "f32[64,24]{1,0} custom-call(%t, %t, %t, %rows, %matrices),"
    ' custom_call_target="__gpu$xla.gpu.triton",'
    ' metadata={op_name="jit(f)/experts/one_of_2/grouped_rows/pallas_call"}'
)
TRITON = f"""HloModule jit_f

ENTRY %main (cache: bf16[4,2,64,32], query: f32[4,2,8], t: s32[9]) -> f32[] {{
  %cache = bf16[4,2,64,32]{{3,2,1,0}} parameter(0)
  %query = f32[4,2,8]{{2,1,0}} parameter(1)
  %t = s32[9]{{0}} parameter(2)
  %rows = bf16[64,16]{{1,0}} constant(0)
  %matrices = bf16[8,16,24]{{2,1,0}} constant(0)
  %seen = {ATTENDS}
  %made = {GROUPED}
  ROOT %out = f32[] constant(0)
}}
"""


def test_triton_kernels_are_counted_by_their_names():
    (cost,) = program_costs(TRITON, (1,), {"attend_cache": 0.25})
    small = 4 * 4 * 2 * 8
    # A quarter of the cache is read, and it is written in place; the query is read, values written.
    assert cost.kinds["attention"][1] == 0.25 * 2 * 4 * 2 * 64 * 32 + 2 * small
    # Each of 64 rows has one matrix, of which half are on another device.
    assert cost.kinds["products"][0] == 2 * 64 * 16 * 24 / 2


ADDED = """HloModule jit_f

%adds (all: f32[1000,16], part: f32[10,16], i: s32[]) -> f32[1000,16] {
  %all = f32[1000,16]{1,0} parameter(0)
  %part = f32[10,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %before = f32[10,16]{1,0} dynamic-slice(%all, %i, %zero), dynamic_slice_sizes={10,16}
  %sum = f32[10,16]{1,0} add(%before, %part)
  ROOT %put = f32[1000,16]{1,0} dynamic-update-slice(%all, %sum, %i, %zero)
}

%picks (logits: bf16[1000,16], j: s32[]) -> f32[1,16] {
  %logits = bf16[1000,16]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %none = s32[] constant(0)
  %wide = f32[1000,16]{1,0} convert(%logits)
  ROOT %one = f32[1,16]{1,0} dynamic-slice(%wide, %j, %none), dynamic_slice_sizes={1,16}
}

ENTRY %main (x: f32[1000,16], y: f32[10,16], n: s32[], z: bf16[1000,16]) -> f32[1000,16] {
  %x = f32[1000,16]{1,0} parameter(0)
  %y = f32[10,16]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %z = bf16[1000,16]{1,0} parameter(3)
  %row = f32[1,16]{1,0} fusion(%z, %n), kind=kLoop, calls=%picks
  ROOT %more = f32[1000,16]{1,0} fusion(%x, %y, %n), kind=kLoop, calls=%adds
}
"""


def test_what_is_added_in_place_and_picked_from_converted_numbers_is_counted_alone():
    (cost,) = program_costs(ADDED, (1,))
    added = 4 * 10 * 16
    counters = 2 * 4
    # What is added, read, and the part of the buffer, read and written; one row in 16 bits, and
    # in 32.
    assert cost.bytes == 3 * added + (2 + 4) * 16 + counters


# ---------------------------------------------------------------- what is said

KERNELS = {
    **{"layers": 700.0, "draw": 16.0, "rest": 10.0, "conditionals": 196.0},
    **{"returns": 197.0, "bytes": 2e9, "copied": 5e7},
}


def test_the_text_has_kernels_returns_and_networks():
    sizes = {"weights": 2.0**33, "total": 2.0**33}
    bytes_by_kind = {"all-gather/fsdp": 3e9, "all-reduce/data+fsdp": 1e9}
    program = Program(
        sizes, True, 1e12, 1e12, bytes_by_kind, 1.0, {"memory": 1.0}, 1.0, kernels=KERNELS
    )
    small_plan = Plan(
        parse_topology("2*h100x8"), {"data": 2, "fsdp": 8}, {"sampler": program}, True, [], 5, 6
    )._replace(layers=28)
    text = as_text(small_plan)
    assert "726 kernels a token step (layers 700, 25 each of 28; draw 16; rest 10), 2.5 %" in text
    assert "a token step returns to the host 197 times, 196 of them conditionals" in text
    assert "all-gather over fsdp: 3 GB sent through NVLink" in text
    assert "all-reduce over data+fsdp: 1 GB sent through the data-centre network" in text


def test_without_the_plugin_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"plugin for CUDA .*--quick too.*pip .*\[plan-gpu\]"):
        compile_devices(parse_topology("h100x8"))


class Fails:
    """A lowered program that XLA does not compile."""

    def __init__(self, error):
        self.error = error

    def compile(self, compiler_options=None):
        raise jax.errors.JaxRuntimeError(self.error)


@pytest.mark.parametrize(
    ("version", "error", "line"),
    [
        ((0, 10, 2), "UNKNOWN: slice\nmore", r"JAX 0.11, on Python 3.12.*attention=xla \(UNKNOWN"),
        ((0, 12, 0), "UNKNOWN: slice", r"for h100x8; try model.attention=xla \(UNKNOWN: slice\)"),
        ((0, 12, 0), "libdevice not found at ./libdevice.10.bc", r"install it: .*\[plan-gpu\]"),
    ],
)
def test_what_xla_does_not_compile_for_a_gpu_is_one_line(version, error, line, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.raises(UserError, match=line) as caught:
        plan._compiled(Fails(error), None, "sampler", parse_topology("h100x8"))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- shipped configurations


def test_there_are_configurations_of_one_gpu_of_a_node_and_of_two():
    topologies = {path.stem: load_config(path).plan.topology for path in SHIPPED}
    assert set(topologies.values()) == {"h100x1", "h100x8", "2*h100x8"}
    for path in SHIPPED:
        config = load_config(path)
        devices = int(np.prod(list(config.mesh_axes.values())))
        assert devices == parse_topology(config.plan.topology).chips
        assert f"`{path.name}`" in (CONFIGS / "README.md").read_text()
