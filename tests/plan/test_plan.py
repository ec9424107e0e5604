"""jrl plan: compiling for TPUs that are not there, what is said of it, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tpu_programs import ask, needs_libtpu
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import build_config, load_config
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.transformer import count_params
from jrl.plan import compile as plan
from jrl.plan import lower
from jrl.plan import make as plan_make
from jrl.plan import memory as plan_memory
from jrl.plan import search as plan_search
from jrl.plan.costs import Collective, Cost
from jrl.plan.estimate import ring_bandwidth, sampling_seconds
from jrl.plan.isolate import EndedError, Isolated
from jrl.plan.records import Plan, Program
from jrl.plan.roofline import roofline
from jrl.plan.search import Candidate, Estimates, enumerate_candidates
from jrl.plan.text import as_text, search_text
from jrl.plan.topology import CHIPS, axis_bandwidth, compile_devices, larger, parse_topology
from jrl.setup import gather
from jrl.setup.frozen import run_shape
from jrl.train import programs

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = {
    "vocab_size": 512,
    "layers": 1,
    "embed_dim": 128,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp_dim": 256,
    "max_length": 256,
}


def tiny_tree(*, model=TINY, **tables):
    tree = {
        "method": "reinforce",
        "model": {"config": model, "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 16},
        "sampling": {"group": 2, "max_new_tokens": 16},
        "optimizer": {"name": "sgd"},
        "train": {"prompts": 4},
        "mesh": {"fsdp": 4},
    }
    return tree | tables


def tiny(**tables):
    return build_config(tiny_tree(**tables))


# ---------------------------------------------------------------- topologies and chips


def test_topologies_are_read_and_unknown_ones_refused_with_the_known():
    slices = parse_topology("2*v5p:4x4x8")
    assert (slices.family, slices.shape, slices.slices, slices.chips) == ("v5p", (4, 4, 8), 2, 256)
    assert parse_topology("v5p:4x8x12").chips == 384  # as libtpu builds it, if not in the list
    assert parse_topology("v5e:1x1").chips == 1
    for name in ("v5p:4x4x5", "v5p:8x4x4", "v5p:0x4x4", "v4:8x8x96", "v7:2x2", "v5e", "0*v5e:4x4"):
        with pytest.raises(UserError, match="v5e:1x1|v5p:2x2x1|v4:2x2x1"):
            parse_topology(name)
    assert larger(parse_topology("v5e:4x4"), 20) == "v5e:4x8"
    assert larger(parse_topology("v5e:4x4"), 300) is None


def test_every_figure_of_a_chip_has_a_source():
    for chip in CHIPS.values():
        assert chip.source.startswith("https://")
        assert chip.flops / chip.hbm_bandwidth > 100  # operations per byte: all are above a hundred


def grid(shape, *slices):
    """Devices of a mesh as their coordinates alone, slice after slice."""
    places = [(s, i, j) for s in slices or (0,) for i in range(shape[0]) for j in range(shape[1])]
    grid_devices = np.empty(len(places), object)
    grid_devices[:] = [SimpleNamespace(coords=[i, j, 0], slice_index=s) for s, i, j in places]
    return grid_devices


def test_an_axis_has_the_links_of_its_dimensions():
    link = CHIPS["v5e"].link_bandwidth
    small, pod = parse_topology("v5e:4x4"), parse_topology("v5e:16x16")
    devices = grid((4, 4)).reshape(4, 4)
    assert axis_bandwidth(small, devices, (0,)) == link  # a line of 4: no way round
    assert axis_bandwidth(small, devices, (0, 1)) == 2 * link
    assert axis_bandwidth(pod, grid((16, 16)).reshape(16, 16), (1,)) == 2 * link  # a ring
    both = grid((4, 4), 0, 1).reshape(2, 16)
    two = parse_topology("2*v5e:4x4")
    assert axis_bandwidth(two, both, (0,)) == two.chip.dcn_bandwidth
    assert axis_bandwidth(two, both, (1,)) == 2 * link


def test_the_slowest_of_three_decides_each_computation():
    topology = parse_topology("v5e:4x4")
    chip, devices = topology.chip, grid((4, 4)).reshape(1, 16)
    send = Collective("all-gather", (1,), 16, 1, 2 * chip.link_bandwidth * 3)
    costs = [
        Cost(2.0, chip.flops, chip.hbm_bandwidth / 2, ()),
        Cost(1.0, 0.0, 5 * chip.hbm_bandwidth, ()),
        Cost(1.0, chip.flops, 0.0, (send,)),
    ]
    seconds, bound = roofline(costs, topology, devices)
    assert bound == {"compute": 2.0, "memory": 5.0, "network": 3.0}
    assert seconds == 10.0


def test_without_libtpu_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu is not .*--quick too.*install -e .*\[plan\]"):
        compile_devices(parse_topology("v5e:2x2"))


# ---------------------------------------------------------------- plans


@needs_libtpu
def test_a_tiny_run_is_compiled_and_its_numbers_add_up():
    data = ask("planned", tiny_tree(), "v5e:2x2", -1.0)
    assert data["fits"] is True
    assert set(data["programs"]) == {"sampler", "train_step"}
    for program in data["programs"].values():
        parts = program["bytes_by_part"]
        assert program["bytes_per_chip"] == pytest.approx(sum(parts.values()), rel=1e-6)
        assert parts["weights"] * 4 == pytest.approx(data["numbers"] * 4, rel=0.02)
        assert program["roofline_seconds"] == pytest.approx(sum(program["bound"].values()))
        assert program["collective_bytes"] == sum(program["collective_bytes_by_kind"].values()) > 0
        assert all(kind.endswith("/fsdp") for kind in program["collective_bytes_by_kind"])
    # forward and backward products of the layers and of the head: a chip has one prompt, scored
    # once, and two completions
    layer, head = 4 * 128 * 128 + 3 * 128 * 256, 128 * 512
    least = 6 * (48 * layer + 32 * head)
    assert least < data["programs"]["train_step"]["flops"] < 1.5 * least
    # every token drawn counts, not the body of the loop alone; and in so small a model the whole
    # blocks of keys that the attention kernel multiplies are more than the rest
    least = 2 * (16 * layer + 2 * 16 * (layer + head))
    sampler = data["programs"]["sampler"]
    assert least < sampler["flops"] < 4 * least
    # the weights are gathered once, in bfloat16; the embedding is also transposed for the output,
    # before or after it is sent
    gathered = sampler["collective_bytes_by_kind"]["all-gather/fsdp"]
    assert 2 * (layer + head) * 3 / 4 < gathered < 1.5 * 2 * (layer + 2 * head) * 3 / 4
    prepared = 2 * (layer + 2 * head)
    assert sampler["bytes_by_part"]["prepared"] == pytest.approx(prepared, rel=0.02)
    assert "verdict: fits" in data["text"]
    assert "4 chips" in data["text"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "more"),
    [
        ("tiny", "v5e:1x1", ()),
        ("tiny", "v5e:2x2", ("mesh.data=4",)),
        ("gridworld", "v5e:1x1", ()),
    ],
)
def test_the_first_runs_of_a_newcomer_compile_for_a_tpu(name, topology, more):
    """Their heads are small, and a kernel's memory holds whole tiles."""
    config = load_config(CONFIGS / f"{name}.toml", [*more, "run.dir=unused"])
    tree = config.model_dump(exclude_unset=True)
    assert ask("planned", tree, topology, -1.0)["fits"] is True


@needs_libtpu
@pytest.mark.slow
def test_a_sampler_on_its_own_mesh_gets_its_weights_by_a_program_that_is_counted():
    sampling = {"group": 2, "max_new_tokens": 16, "mesh": {"data": 2, "tensor": 2}}
    data = ask("planned", tiny_tree(sampling=sampling), "v5e:2x2", -1.0)
    assert list(data["programs"]) == ["resharding", "sampler", "train_step"]
    assert (data["mesh"]["fsdp"], data["sampling_mesh"]["tensor"]) == (4, 2)
    layer, head = 4 * 128 * 128 + 3 * 128 * 256, 128 * 512
    prepared = 2 * (layer + 2 * head)  # in 16 bits; the embedding is turned for the output, too
    resharding, sampler = data["programs"]["resharding"], data["programs"]["sampler"]
    for program in (resharding, sampler):
        assert program["bytes_by_part"]["prepared"] == pytest.approx(prepared / 2, rel=0.05)
        assert program["bytes_per_chip"] == pytest.approx(sum(program["bytes_by_part"].values()))
    # a quarter of the weights is on each chip: half of it is exchanged, then it is gathered by two
    bytes_sent = resharding["collective_bytes"]
    assert 0.25 * prepared < bytes_sent < 0.45 * prepared
    # the token loop sends what tensor parallelism adds up, and no weights; across the batch only
    # tokens and whether all rows are done
    kinds = sampler["collective_bytes_by_kind"]
    across = sum(count for kind, count in kinds.items() if not kind.endswith("/tensor"))
    assert across < 0.02 * kinds["all-reduce/tensor"]
    assert "all-gather/fsdp" not in sampler["collective_bytes_by_kind"]
    assert sampler["collective_bytes"] < 0.5 * prepared
    assert sampler["reads"]["weights"] == pytest.approx(16 * (layer + head), rel=0.05)
    assert "sampling on mesh data 2 x tensor 2" in data["text"]
    assert "model FLOP utilisation" in data["text"]
    assert "resharded once a rollout" in data["text"]
    assert "compiled with effort -1: a run's program" in data["text"]
    seconds = [p["roofline_seconds"] for p in data["programs"].values()]
    assert data["step_seconds"] == pytest.approx(sum(seconds))


@needs_libtpu
@pytest.mark.slow
def test_two_policies_in_one_program_have_twice_the_weights_and_the_layout_of_one():
    tables = {
        "method": "grpo",
        "data": {"env": "nim", "heaps": 2, "most": 3, "opponent": "self"},
        "sampling": {"group": 4},
        "mesh": {"data": 4},
    }
    model = {k: v for k, v in TINY.items() if k not in {"vocab_size", "max_length"}}
    tree = tiny_tree(model=model, **tables)
    one, two = (
        ask("planned", tree | {"objective": objective}, "v5e:2x2", -1.0)["programs"]
        for objective in ({}, {"policies": 2})
    )
    assert set(one) == set(two) == {"sampler", "train_step"}
    for name in one:
        parts = [program[name]["bytes_by_part"]["weights"] for program in (one, two)]
        assert parts[1] == pytest.approx(2 * parts[0], rel=0.01)


@needs_libtpu
def test_the_weights_of_405b_are_sent_to_1024_chips_as_integers():
    """The shipped shape with two of its layers, and the program of it that compiles fastest."""
    path = CONFIGS / "pod_405b_v5p.toml"
    changes = ["sampling.int8=['weights']", "sampling.mesh={data=128, tensor=8}"]
    tree = load_config(path, [*changes, "model.config.layers=2"]).model_dump(
        mode="json", exclude_none=True
    )
    program = ask("resharded", tree, "v5p:8x8x16", -1.0)
    layer = 16384 * (128 + 2 * 8 + 128) * 128 + 3 * 16384 * 53248
    embed = 16384 * 128256
    prepared = (2 * layer + embed + 2 * embed) / 8  # the embedding alone has 16 bits
    assert program["bytes_by_part"]["prepared"] == pytest.approx(prepared, rel=0.01)
    bytes_by_kind = program["collective_bytes_by_kind"]
    assert bytes_by_kind["all-gather/fsdp"] == pytest.approx(prepared * 127 / 128, rel=0.01)
    assert sum(bytes_by_kind.values()) < 1.02 * bytes_by_kind["all-gather/fsdp"]
    # what is there beside: one matrix before it is in place, not all of them
    assert program["bytes_by_part"]["temporaries"] < 0.6 * prepared


@needs_libtpu
@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_before_anything_is_compiled():
    one, two = "v5e:2x2", "2*v5e:2x2"
    cases = [
        (one, {"mesh": {"tensor": 4}}, "mesh.tensor = 4 does not divide the model's heads = 2"),
        (one, {"train": {"prompts": 6}}, "a microbatch of 6 prompts"),
        (one, {"mesh": {"fsdp": 2}}, r"mesh \(fsdp 2\) is for 2 chips, and v5e:2x2 has 4"),
        (one, {"mesh": {"tensor": 8}}, "is for 8 chips, and v5e:2x2 has 4"),
        (
            one,
            {
                "model": TINY | {"experts": 6, "experts_per_token": 2, "expert_mlp_dim": 64},
                "mesh": {"expert": 4},
            },
            "mesh.expert = 4 does not divide the model's experts = 6",
        ),
        (
            two,
            {"mesh": {"fsdp": 8}, "train": {"prompts": 8}},
            "mesh.data = 1 does not divide over 2 slices",
        ),
    ]
    topologies, tables, expected_lines = zip(*cases, strict=True)
    messages = ask("refusals", [tiny_tree(**x) for x in tables], topologies)
    for line, expected in zip(messages, expected_lines, strict=True):
        assert re.search(expected, line), line


def test_missing_sizes_are_named():
    config = build_config({"train": {"prompts": 8}})
    with pytest.raises(UserError, match=r"model.config are both missing"):
        run_shape(config, None, runs=False)


def test_a_plan_that_is_too_large_says_by_how_much_and_what_would_do():
    chip = SimpleNamespace(device_kind="TPU v5 lite", platform="tpu")
    shape = {"data": 1, "fsdp": 4, "tensor": 1, "context": 1, "expert": 1}
    mesh = SimpleNamespace(shape=shape, devices=np.array([chip]), size=4)
    topology, gib = parse_topology("v5e:2x2"), plan_memory.GIB

    model = run_shape(tiny(), None, runs=False)

    def remedies(name, config, **sizes):
        run = SimpleNamespace(config=config, mesh=mesh, model=model, shape=model, rollout_mesh=None)
        sizes = {k: v * gib for k, v in sizes.items()}
        sizes["total"] = sum(sizes.values())
        return plan_memory.remedies(run, topology, name, sizes)

    config = tiny(train={"prompts": 64})
    lines = remedies("train_step", config, weights=2, optimizer=4, temporaries=30)
    assert lines[0] == "train_step: 20.0 GiB too much on each chip"
    assert "train.microbatches = 4" in lines
    lines = remedies("train_step", config, weights=20, optimizer=40)
    assert any("v5e:4x8" in line for line in lines)
    lines = remedies("sampler", tiny(train={"prompts": 64}), weights=2, cache=20)
    assert any(line.startswith("sampling.slots = 16") for line in lines)


def test_a_slice_with_more_memory_is_named_whatever_the_slice():
    """A larger slice; for the largest several of them or another chip; of several, larger ones."""

    def lines(name, factor):
        return plan_memory.roomier(parse_topology(name), factor)

    assert lines("v5e:4x4", 2.0) == [
        "or take v5e:4x8, with mesh.fsdp over the chips that it has more"
    ]
    slices, chips = lines("v5e:16x16", 1.5)
    assert slices == "or take 2*v5e:16x16, with mesh.data = 2, which divides the batch further"
    assert chips == "or take a chip with more memory: v4 (32 GiB), v5p (95 GiB), v6e (32 GiB)"
    assert lines("v5e:16x16", 4.0)[1] == "or take a chip with more memory: v5p (95 GiB)"
    assert lines("2*v5e:8x8", 2.0)[0].startswith("or take 2*v5e:8x16,")
    assert lines("2*v5e:16x16", 2.0)[0].startswith("or take 4*v5e:16x16,")
    (several,) = lines("v5p:16x16x24", 3.0)  # the chip with the most memory
    assert several.startswith("or take 4*v5p:16x16x24,")


def test_a_copy_for_the_sampler_that_does_not_fit_is_refused_before_anything_compiles(monkeypatch):
    """8B on 8 devices: an eighth of the state, and for a tensor axis of 1 all weights."""
    overrides = ["mesh={fsdp=8}", "sampling.mesh={data=8}", "train.microbatches=1"]
    mesh = make_mesh({"fsdp": 8}, jax.devices()[:8])
    monkeypatch.setattr(programs, "device_memory", lambda mesh: 20 * plan_memory.GIB)
    run = lower.abstract_run(load_config(CONFIGS / "pod_8b_v6e.toml", overrides), mesh)
    with pytest.raises(UserError, match="sampling.mesh: a device would hold 15.3 GiB") as caught:
        programs.check_resharding(run)
    does = "6.7 GiB more than its 20 GiB; raise sampling.mesh.tensor to 8, set sampling.int8 to"
    assert does in str(caught.value)
    config = load_config(CONFIGS / "pod_8b_v6e.toml", [*overrides, "sampling.int8=['weights']"])
    programs.check_resharding(lower.abstract_run(config, mesh))


def test_a_state_that_does_not_fit_is_refused_before_anything_compiles(monkeypatch):
    """8B in float32 with AdamW: weights and two moments of 4 bytes each."""
    monkeypatch.setattr(programs, "device_memory", lambda mesh: 73 * plan_memory.GIB)
    mesh = make_mesh({}, jax.devices()[:1])
    overrides = ["mesh={fsdp=1}", "model.param_dtype=float32", "sampling.mesh={data=1}"]
    config = load_config(CONFIGS / "pod_8b_v6e.toml", overrides)
    with pytest.raises(UserError, match=r"would hold 91\.5 GiB of weights") as caught:
        programs.check_state(lower.abstract_run(config, mesh))
    assert "18.5 GiB more than its 73 GiB; set lora.rank = 16, optimizer.name" in str(caught.value)
    config = load_config(CONFIGS / "pod_8b_v6e.toml", [*overrides, "lora.rank=16"])
    programs.check_state(lower.abstract_run(config, mesh))


def test_a_deep_program_is_extrapolated_from_few_layers(monkeypatch):
    """Of a program with unrolled layers; a training step of like layers is compiled complete."""
    gib, compiled = plan_memory.GIB, []

    def shallow(run, topology, names, *options):
        layers = run.model.layers
        compiled.append((layers, *names))
        sizes = {"weights": gib, "temporaries": layers * gib, "total": (1 + layers) * gib}
        bytes_by_kind = {"all-gather/fsdp": 5.0 * layers, f"odd/{layers}": 1.0}
        bound = {"compute": 2.0, "memory": 1.0 * layers, "network": 0.0}
        program = Program(
            sizes, True, 3.0 + 2 * layers, 7.0, bytes_by_kind, sum(bound.values()), bound, 1
        )
        return {name: program for name in names if name != "resharding"}

    def quick(**model):
        compiled.clear()
        return plan_make.make_plan(
            tiny(model=TINY | model), parse_topology("v5e:2x2"), "few layers"
        )

    monkeypatch.setattr(plan, "compiled_programs", shallow)
    mesh = make_mesh({"fsdp": 4}, jax.devices()[:4])
    monkeypatch.setattr(plan, "plan_mesh", lambda config, topology: mesh)
    deep_plan = quick(layers=20)
    sampling = ("resharding", "sampler")
    assert compiled == [(20, "train_step"), (2, *sampling), (4, *sampling)]
    assert list(deep_plan.programs) == ["sampler", "train_step"]
    program = deep_plan.programs["sampler"]
    assert (program.layers, deep_plan.programs["train_step"].layers) == ((2, 4), ())
    assert program.bytes_per_chip == {"weights": gib, "temporaries": 20 * gib, "total": 21 * gib}
    assert (deep_plan.fits, program.fits) == (False, False)
    assert deep_plan.remedies[0] == "sampler: 5.0 GiB too much on each chip"
    assert (program.flops, program.roofline_seconds, program.compile_seconds) == (43, 22, 2)
    # what only the deeper program sends grows, what only the shallower one sends is not below none
    assert program.collective_bytes == {"all-gather/fsdp": 100, "odd/2": 0, "odd/4": 9}
    # four layers need no line
    quick(layers=4)
    assert compiled == [(4, *sampling, "train_step")]
    quick(layers=20, experts=4, experts_per_token=2, expert_mlp_dim=8, expert_pattern=[False, True])
    assert compiled == [(20,), (4, *sampling, "train_step"), (8, *sampling, "train_step")]


def test_extrapolated_temporaries_are_no_fewer_than_measured():
    """XLA may need fewer temporaries in a deeper program; the line must not go down to none."""
    low, high = (
        Program({"weights": w, "temporaries": t, "total": w + t}, True, *[None] * 5, 1.0)
        for w, t in ((1.0, 9.0), (2.0, 6.0))
    )
    extrapolated = plan.extrapolate(low, high, 50.0, parse_topology("v5e:2x2"))
    assert extrapolated.bytes_per_chip == {"weights": 51.0, "temporaries": 6.0, "total": 57.0}


def test_every_out_of_memory_error_of_xla_is_read():
    plan_wants = plan.temporaries_in_error
    used = "Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm. Exceeded by 4.7G."
    assert plan_wants(used, 2**30) == 19.5 * 2**30
    total = "the total memory required for HLO temporaries (180.98G) exceeds available HBM (95.74G)"
    assert plan_wants(total, 2**30) == 180.98 * 2**30
    assert plan_wants("INVALID_ARGUMENT: something else", 0.0) is None


def test_the_search_proposes_only_what_divides_and_prefers_what_fits():
    config = load_config(CONFIGS / "pod_8b_v6e.toml")
    topology = parse_topology("v6e:8x8")
    model = run_shape(config, None, runs=False)
    candidates = list(enumerate_candidates(config, model, topology))
    assert {c.rollout is None for c in candidates} == {False, True}
    for c in candidates:
        for sizes in (c.mesh, c.rollout or c.mesh):
            mesh = dict(sizes)
            assert np.prod(list(mesh.values())) == (64 if c.rollout is None else 32)
            assert model.kv_heads % mesh["tensor"] == 0
            assert config.train.prompts % (mesh["data"] * mesh["fsdp"] * mesh["expert"]) == 0
        mesh = dict(c.mesh)
        assert config.train.prompts % (mesh["data"] * mesh["fsdp"] * c.microbatches) == 0
        assert c.sampler != c.mesh
        assert c.sampler is None or (c.rollout is None and np.prod([n for _, n in c.sampler]) == 64)
    assert len({c.sampler for c in candidates}) == 1 + plan_search.SAMPLERS
    assert {c.remat for c in candidates} == {"full", "mlp", "dots", "elementwise", "none"}
    assert {c.formats for c in candidates} == {()}  # nothing is rounded that was not asked for
    assert {c.slots is None for c in candidates} == {True, False}
    rounded = load_config(CONFIGS / "pod_8b_v6e.toml", ["sampling.int8=['weights', 'cache']"])
    formats = {c.formats for c in enumerate_candidates(rounded, model, topology)}
    assert formats == {(), *((("int8", x),) for x in ((), ("weights",), ("cache",)))}
    short = ["sampling.int8=['cache']", "sampling.float8=['weights']"]
    rounded = load_config(CONFIGS / "pod_8b_v6e.toml", short)
    candidates = [c for c in enumerate_candidates(rounded, model, topology) if c.formats]
    in_8_bits = {c.applied(rounded).sampling.in_8_bits for c in candidates}
    assert in_8_bits == {(), ("weights",), ("cache",)}
    alone = next(c for c in candidates if c.applied(rounded).sampling.float8)
    assert alone.text().endswith('sampling.int8=[] sampling.float8=["weights"]')
    best = min(candidates, key=Estimates(config, model, topology))
    assert dict(best.mesh)["data"] < 64  # eight billion weights and moments on one chip do not fit


def test_a_chip_holds_each_prompt_once_and_no_more_completions_than_slots():
    for slots, rows in ((0, 4 * 8), (16, 16), (100, 4 * 8)):
        assert gather.cached_tokens(4, 8, 512, 1024, slots) == 4 * 512 + rows * 1024


def test_few_slots_take_more_turns_and_less_memory():
    """Each turn reads the weights again; where the cache of all does not fit that is what does."""
    topology, mesh = parse_topology("v6e:8x8"), {"data": 16, "fsdp": 1, "tensor": 4, "expert": 1}

    def seconds(bytes_kept, **sampling):
        overrides = [f"sampling.{name}={value}" for name, value in sampling.items()]
        config = load_config(CONFIGS / "pod_8b_v6e.toml", overrides)
        model = run_shape(config, None, runs=False)
        return sampling_seconds(config, model, topology, mesh, bytes_kept)

    assert seconds(0.0) < seconds(0.0, slots=512) < 2 * seconds(0.0)
    room = 24.0 * plan_memory.GIB
    assert seconds(room, slots=256) < seconds(room)
    assert seconds(0.0, int8="['weights', 'cache']") < 0.6 * seconds(0.0)


def test_different_candidates_are_compiled_first():
    def one(data, parts, rollout=None):
        return Candidate((("data", data), ("fsdp", 16 // data)), "full", parts, rollout)

    half = (("data", 8),)
    ranked = [one(1, 1), one(1, 2), one(2, 1), one(1, 1, half), one(2, 2), one(4, 1)]
    order = [0, 3, 2, 5, 1, 4]
    assert plan_search.diverse_first(ranked) == [ranked[i] for i in order]


class Inline:
    """``Isolated`` in this process, where what is compiled can be replaced."""

    def __call__(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    def close(self):
        """Nothing to end."""


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(plan_search, "Isolated", Inline)


def pretend_plan(config, topology, by, *, placement, effort, echo):
    """A training step of as many seconds as microbatches, and a rollout of 8; 5 on its own mesh."""
    own_mesh = bool(config.sampling.mesh)
    seconds = {"sampler": 5.0 if own_mesh else 8.0, "train_step": config.train.microbatches}
    if not effort:  # a run's programs are a little faster
        seconds = {name: 0.9 * x for name, x in seconds.items()}
    names = [placement]
    large = config.mesh_axes["tensor"] == (1 if topology.chips == 64 else 2)
    size = plan_memory.GIB * (100 if large else 2)
    sizes = {"weights": size, "total": size}
    programs = {
        name: Program(sizes, size < 32 * plan_memory.GIB, *[None] * 3, seconds[name], None, 1.0)
        for name in names
    }
    fits = all(p.fits for p in programs.values())
    return Plan(topology, config.mesh_axes, programs, fits, [], 1, 1)


def test_the_search_ranks_by_time_with_what_fits_first(monkeypatch, inline):
    """A step takes as long as the slower half and the transfer of the weights."""
    topology = parse_topology("v6e:8x8")
    monkeypatch.setattr(plan_make, "plan_together", pretend_plan)
    config = load_config(CONFIGS / "pod_8b_v6e.toml")
    (first,) = plan_search.search(config, topology, limit=1)  # as it is
    assert (first["mesh"], first["microbatches"]) == (
        {axis: config.mesh_axes[axis] for axis in ("data", "fsdp", "tensor", "expert")},
        config.train.microbatches,
    )
    ranked = plan_search.search(config, topology, limit=400)
    # the best is compiled again as a run compiles it, and says what it was ranked by
    assert (ranked[0]["effort"], ranked[0]["ranked_seconds"]) == (0.0, 6.0)
    assert ranked[0]["step_seconds"] == pytest.approx(5.4)
    assert {f["effort"] for f in ranked[1:]} == {-1.0}
    ranked[0] |= {"step_seconds": 6.0}
    fitting = [f["step_seconds"] for f in ranked if f["fits"]]
    assert fitting == sorted(fitting)
    assert [f["fits"] for f in ranked] == sorted((f["fits"] for f in ranked), reverse=True)
    move = 2 * plan_memory.GIB / topology.chip.link_bandwidth
    disjoint = next(f for f in ranked if f["placement"] == "disjoint" and f["fits"])
    assert disjoint["step_seconds"] == pytest.approx(8.0 + move)
    assert disjoint["seconds"] == {"sampler": 8.0, "train_step": disjoint["microbatches"]}
    together = [f for f in ranked if f["placement"] == "colocated" and f["fits"]]
    assert (together[0]["step_seconds"], together[0]["sampling_mesh"] is None) == (6.0, False)
    shared = next(f for f in together if f["sampling_mesh"] is None)
    assert shared["step_seconds"] == 9.0
    assert all(f["estimated_seconds"] > 0 for f in ranked)
    mixed = load_config(CONFIGS / "pod_8b_v6e.toml", together[0]["changes"].split())
    assert mixed.sampling.mesh_axes == together[0]["sampling_mesh"] | {"context": 1}
    # what is printed can be given as overrides, and is then planned for as it was
    again = load_config(CONFIGS / "pod_8b_v6e.toml", disjoint["changes"].split())
    assert again.sampling.mesh_axes == disjoint["rollout_mesh"] | {"context": 1}
    same = plan_make.make_plan(again, topology, effort=-1.0)
    assert same.step_seconds == disjoint["step_seconds"]


def test_a_candidate_whose_compilation_ends_the_process_is_one_of_the_found(monkeypatch, inline):
    ends = []

    def abort(self, function, *args, **kwargs):
        if kwargs.get("placement") == "train_step" and not ends:
            ends.append(kwargs)
            raise EndedError
        return function(*args, **kwargs)

    monkeypatch.setattr(plan_make, "plan_together", pretend_plan)
    monkeypatch.setattr(Inline, "__call__", abort)
    config = load_config(CONFIGS / "pod_8b_v6e.toml")
    ranked = plan_search.search(config, parse_topology("v6e:8x8"), limit=3)
    # the training half that ended it is compiled once, and all that share it have its error
    halves = {True: set(), False: set()}
    for f in ranked:
        failed = f["error"] == "XLA ended the process"
        halves[failed].add((str(f["mesh"]), f["remat"], f["microbatches"], f["placement"]))
    assert len(halves[True]) == 1
    assert halves[False]
    assert not halves[True] & halves[False]
    assert (ranked[-1]["fits"], ranked[-1]["step_seconds"]) == (False, None)
    table = search_text(ranked)
    assert "(XLA ended the process)" in table
    ratios = [f["ranked_seconds"] / f["estimated_seconds"] for f in ranked if f["fits"]]
    assert ranked[0]["estimate_ratio"] == pytest.approx(np.median(ratios))
    assert table.endswith("times the estimates (median of what fits)")


def test_a_process_that_ends_is_told_from_an_error_and_the_next_call_has_another():
    run = Isolated()
    try:
        assert run(math.prod, [2, 3]) == 6
        with pytest.raises(EndedError):
            run(os.abort)
        with pytest.raises(ZeroDivisionError):
            run(divmod, 1, 0)
        assert run(math.prod, [3, 5]) == 15
    finally:
        run.close()


def test_estimates_divide_experts_alone_over_the_expert_axis():
    config = load_config(CONFIGS / "pod_30b_a3b_v5p.toml")
    model = run_shape(config, None, runs=False)
    one = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}
    undivided, split = (gather.weight_numbers(model, one | {"expert": n}) for n in (1, 4))
    experts = 48 * 128 * (3 * 2048 * 768 + 2048)  # and the router's columns
    assert undivided - split == experts * 3 / 4
    assert undivided == count_params(model)


def test_collectives_have_the_links_of_the_dimensions_that_they_span():
    link = CHIPS["v5p"].link_bandwidth
    pod = parse_topology("v5p:8x8x16")
    rates = {n: ring_bandwidth(pod, n) / link for n in (2, 8, 16, 128, 1024)}
    assert rates == {2: 1, 8: 2, 16: 2, 128: 4, 1024: 6}
    assert ring_bandwidth(parse_topology("v6e:8x8"), 64) == 2 * CHIPS["v6e"].link_bandwidth


def test_a_rollout_mesh_that_cannot_fit_is_compiled_for_once(monkeypatch, inline):
    def cannot(config, topology, by, **options):
        pretended = pretend_plan(config, topology, by, **options)
        placement = options["placement"]
        programs = {n: p._replace(fits=n != "sampler") for n, p in pretended.programs.items()}
        return pretended._replace(programs=programs, fits=placement == "train_step")

    monkeypatch.setattr(plan_make, "plan_together", cannot)
    config = load_config(CONFIGS / "pod_8b_v6e.toml")
    ranked = plan_search.search(config, parse_topology("v6e:8x8"), limit=400)
    disjoint_meshes = [str(f["rollout_mesh"]) for f in ranked if f["placement"] == "disjoint"]
    assert len(disjoint_meshes) == len(set(disjoint_meshes)) == 2
    assert len(ranked) > 10
    assert not any(f["fits"] for f in ranked)


def test_each_half_is_compiled_once_and_the_time_is_kept(monkeypatch, inline):
    compiled, clock = [], iter(range(0, 10**6, 40))

    def counted(config, topology, by, *, placement, effort, echo):
        axes = config.sampling.mesh_axes if placement == "sampler" else {}
        compiled.append((placement, str(config.mesh), str(axes)))
        if placement == "train_step":
            compiled[-1] += (config.model.remat, config.train.microbatches)
        compiled[-1] += (effort,)
        return pretend_plan(config, topology, by, placement=placement, effort=effort, echo=echo)

    monkeypatch.setattr(plan_make, "plan_together", counted)
    monkeypatch.setattr(plan_search.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(plan_search, "half", lambda topology: None)
    config, lines = load_config(CONFIGS / "pod_8b_v6e.toml"), []
    topology = parse_topology("v6e:8x8")
    # each candidate asks the clock before and after, and so takes 40 s of every 80
    ranked = plan_search.search(config, topology, limit=40, seconds=400, echo=lines.append)
    assert lines[-1] == f"stopped after {len(ranked)} of 40: the next would exceed 400 s"
    assert 3 <= len(ranked) <= 6
    compiled.clear()
    plan_search.search(config, topology, limit=40)
    assert len(compiled) == len(set(compiled)) < 80
    assert {name for name, *_ in compiled} == {"sampler", "train_step"}


def test_the_state_stays_in_memory_while_the_sampler_runs_on_its_own_mesh():
    gib, topology = plan_memory.GIB, parse_topology("v6e:8x8")

    def half(name, seconds, **sizes):
        sizes = {k: v * gib for k, v in sizes.items()}
        sizes["total"] = sum(sizes.values())
        program = Program(sizes, True, *[None] * 3, seconds, None, 1.0)
        return Plan(topology, {"fsdp": 64}, {name: program}, True, [], 1, 64)

    sampler = half("sampler", 4.0, weights=1, prepared=8, cache=4)._replace(sampling_mesh={"a": 1})
    training = half("train_step", 2.0, weights=1, optimizer=6, temporaries=9)
    joined = plan_search.together(sampler, training)
    assert joined.step_seconds == 6.0
    assert joined.programs["sampler"].bytes_per_chip["total"] == 19 * gib
    assert joined.fits
    large = half("train_step", 2.0, weights=1, optimizer=20)
    assert not plan_search.together(sampler, large).programs["sampler"].fits


def test_disjoint_rollout_and_training_have_half_of_the_slice_each(monkeypatch):
    monkeypatch.setattr(plan_make, "plan_together", pretend_plan)
    tables = {"placement": {}, "sampling": {"mesh": {"data": 4}}, "mesh": {"fsdp": 4}}
    halves = plan_make.make_plan(tiny(**tables), parse_topology("v5e:2x4"))
    assert halves.rollout_mesh["data"] == 4
    assert halves.mesh["fsdp"] == 4
    assert "in parallel" in as_text(halves)
    with pytest.raises(UserError, match=r"mesh uses 4 chips.*half of v5e:4x4.*axes 8"):
        plan_make.make_plan(tiny(**tables), parse_topology("v5e:4x4"))
    with pytest.raises(UserError, match="no slice has half its chips"):
        plan_make.make_plan(tiny(**tables), parse_topology("v5e:2x2"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("pod_*.toml")), ids=lambda p: p.stem)
def test_pod_configurations_name_sizes_and_topologies_that_exist(path):
    config = load_config(path)
    topology = parse_topology(config.plan.topology)
    assert math.prod(config.mesh_axes.values()) == topology.chips


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("pod_*.toml")), ids=lambda p: p.stem)
def test_pod_configurations_compile_and_fit(path):
    planned = ask("pod", str(path), load_config(path).plan.topology, -1.0)
    assert planned["fits"], planned["text"]


# ---------------------------------------------------------------- the command


def test_the_command_refuses_a_topology_and_lists_the_known():
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "tiny.toml"), "--topology", "v5e:5x5"])
    assert done.exit_code == 2
    assert "v5e:4x4" in done.output


def test_the_command_prints_json_and_fails_when_it_does_not_fit(monkeypatch):
    program = Program({"weights": 20.0, "total": 20.0}, False, *[None] * 5, 1.0)
    planned = Plan(
        parse_topology("v5e:2x2"), {"fsdp": 4}, {"train_step": program}, False, ["x"], 5, 6
    )
    monkeypatch.setattr(plan_make, "make_plan", lambda *args, **kwargs: planned)
    done = CliRunner().invoke(
        app, ["plan", str(CONFIGS / "tiny.toml"), "--topology", "v5e:2x2", "--json"]
    )
    assert done.exit_code == 1
    data = json.loads(done.output)
    assert data["fits"] is False
    assert data["programs"]["train_step"]["bytes_per_chip"] == 20
    assert data["programs"]["train_step"]["flops"] is None
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "tiny.toml"), "--topology", "v5e:2x2"])
    assert "DOES NOT FIT" in done.output
