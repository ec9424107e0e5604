"""The pod configurations: operations counted by hand, and what configs/README.md says of them."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from tpu_programs import ask, needs_libtpu

from jrl.config_io import build_config, load_config
from jrl.mesh import make_mesh
from jrl.plan import compile as plan
from jrl.plan.lower import abstract_run, abstract_state
from jrl.plan.topology import parse_topology
from jrl.plan.useful import lengths_of, model_flops
from jrl.train import programs
from jrl.train.shapes import abstract_batch

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "method": "grpo",
    "model": {
        "config": {
            "vocab_size": 512,
            "layers": 2,
            "embed_dim": 32,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "mlp_dim": 64,
            "max_length": 64,
        },
        "attention": "xla",
        "remat": "full",
    },
    "data": {"max_prompt_tokens": 16},
    "sampling": {"group": 2, "max_new_tokens": 16},
    "train": {"prompts": 4, "microbatches": 2},
    "mesh": {"data": 1},
}


def on_one_device(config):
    return abstract_run(config, make_mesh({}, jax.devices()[:1]))


def step_flops(run, *, forward, backward):
    """Operations of a training step with remat "full", all chips together, by hand.

    Layers are computed twice on the way forward, but for the last product of each layer, which
    nothing in the backward pass reads; the backward pass is two products for each. The output
    matrix makes its logits a second time for its gradient. Attention multiplies all queries with
    all keys, so many times each way.
    """
    m, sizes = run.shape, lengths_of(run)
    rows = sizes.prompts * (sizes.prompt + sizes.group * sizes.new)
    attention = m.embed_dim * m.head_dim * 2 * (m.heads + m.kv_heads)
    down = m.embed_dim * m.mlp_dim
    layers = 2 * rows * m.layers * (4 * (attention + 3 * down) - down)
    head = 4 * 2 * sizes.prompts * sizes.group * sizes.new * m.embed_dim * m.vocab_size
    width = sizes.prompt + sizes.new
    seen = sizes.prompts * (sizes.prompt**2 + sizes.group * sizes.new * width)
    products = 2 * forward + backward
    return layers + head + 2 * m.layers * products * seen * m.heads * m.head_dim


def traced_flops(jaxpr):
    """Operations of all matrix products of a traced program."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in left)
            total += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inside in jaxprs_in_params(eqn.params):
            total += times * traced_flops(inside)
    return total


def test_a_traced_training_step_multiplies_as_often_as_counted_by_hand():
    run = on_one_device(build_config(SMALL))
    state, _ = abstract_state(run)
    step = programs.make_train_step(run)
    with jax.set_mesh(run.mesh):
        traced = jax.make_jaxpr(step)(state, abstract_batch(run), run.sampling_params)
    assert traced_flops(traced.jaxpr) == step_flops(run, forward=2, backward=4)


def pod(name, *changes):
    """A pod configuration on one device, as which every chip counts."""
    return on_one_device(
        load_config(CONFIGS / name, ["mesh={data=1}", "sampling.mesh={}", *changes])
    )


def test_the_1_7b_step_multiplies_5_14e14_times_a_chip_of_16():
    """The numbers of the sizes themselves, nothing from the library but the rollout's lengths.

    JAX's attention kernel for TPUs computes two products forward, and backward three for the
    queries and four for keys and values.
    """
    run = pod("pod_1.7b_v5e.toml")
    assert step_flops(run, forward=2, backward=7) / 16 == pytest.approx(5.144e14, rel=1e-3)
    tokens, completions = 64 * (512 + 8 * 1024), 64 * 8 * 1024
    layer = 2048 * 128 * 2 * (16 + 8) + 3 * 2048 * 6144
    pairs = 64 * (512 * 513 / 2 + 8 * (1024 * 512 + 1024 * 1025 / 2))
    useful = 6 * (28 * layer * tokens + 2048 * 151936 * completions)
    useful += 12 * 28 * 16 * 128 * pairs
    assert model_flops(run, "train_step") == pytest.approx(useful)
    assert useful / 16 == pytest.approx(3.79e14, rel=1e-3)


# ---------------------------------------------------------------- the tables of configs/README.md


def rows(head):
    """The rows of the table of configs/README.md with this first line, as dicts by column."""
    text = (CONFIGS / "README.md").read_text()
    (table,) = re.findall(rf"^\| {re.escape(head)}.*(?:\n\|.*)+", text, re.M)
    names, _, *lines = [
        [c.strip() for c in line.strip("| ").split("|")] for line in table.split("\n")
    ]
    return [dict(zip(names, cells, strict=True)) for cells in lines]


def figures():
    """What is said of each configuration as it is: times, and memory with floors."""
    times = {row["configuration"]: row for row in rows("configuration | slice") if row[""] == "now"}
    return {
        name.strip("`").split("`")[0]: (row, sizes)
        for name, row in times.items()
        for sizes in rows("configuration | resharding, GiB")
        if sizes["configuration"] == name
    }


def axes(table):
    return " x ".join(f"{axis} {n}" for axis, n in table.items()) or "as training"


def test_the_tables_have_every_pod_and_its_meshes_and_add_up():
    found = figures()
    assert set(found) == {path.name for path in CONFIGS.glob("pod_*.toml")}
    for name, (row, sizes) in found.items():
        tree = tomllib.loads((CONFIGS / name).read_text())
        assert row["mesh"] == axes(tree["mesh"]), name
        assert row["sampler's mesh"] == axes(tree["sampling"].get("mesh", {})), name
        assert f"--topology {row['slice']}" in (CONFIGS / name).read_text()
        parts = [float(row[c]) for c in ("sampler, s", "training step, s", "resharding, s")]
        step, chips = float(row["step, s"]), parse_topology(row["slice"]).chips
        assert sum(parts) == pytest.approx(step, abs=0.02)
        new = tree["train"]["prompts"] * tree["sampling"]["group"]
        new *= tree["sampling"]["max_new_tokens"]
        rate = float(row["tokens/s a chip"].replace(",", ""))
        assert rate == pytest.approx(new / step / chips, rel=5e-3), name
        run, chip = pod(name), parse_topology(row["slice"]).chip
        floor = model_flops(run, "train_step") / chips / chip.flops
        assert float(sizes["training's floor, s"]) == pytest.approx(floor, abs=0.006), name
        used = float(row["training MFU"].removesuffix(" %")) / 100
        assert used == pytest.approx(floor / parts[1], rel=0.01), name


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("pod_*.toml")))
def test_a_pod_compiles_fits_and_takes_what_the_table_says(name):
    """Compiled as a run compiles it, the sampler with few layers: minutes for each."""
    row, sizes = figures()[name]
    plan = ask("pod", str(CONFIGS / name), row["slice"])
    assert plan["fits"]
    for program, column in (
        ("resharding", "resharding"),
        ("sampler", "sampler"),
        ("train_step", "training step"),
    ):
        if program not in plan["programs"]:
            assert row[f"{column}, s"] == "0"
            continue
        made = plan["programs"][program]
        near = {"rel": 0.05, "abs": 0.01}
        assert made["roofline_seconds"] == pytest.approx(float(row[f"{column}, s"]), **near)
        said = float(sizes[f"{column}, GiB"])
        assert made["bytes_per_chip"] / 2**30 == pytest.approx(said, rel=0.05, abs=0.1)


def test_quick_plans_have_more_weights_than_stay_in_fast_memory(monkeypatch):
    """Of 8B over 8 chips a layer has 48 MB: of two layers XLA would keep most on the chip."""
    asked = []

    def compiled(run, topology, names, *options):
        asked.append(run.shape.layers)
        none = plan.Program({"total": 1.0}, True, *[1.0, 1.0, {}, 1.0, {}], 1.0)
        return dict.fromkeys(names, none)

    monkeypatch.setattr(plan, "_programs", compiled)
    monkeypatch.setattr(plan, "plan_mesh", lambda config, _: make_mesh(config.mesh_axes))
    for changes, layers in (
        ([], [36, 2, 4]),
        (["sampling.mesh={tensor=8}"], [36, 4, 6]),
        # so small that all of it stays there, and no more of a deeper one is read
        (["model.config.embed_dim=128", "model.config.mlp_dim=512"], [36, 2, 4]),
    ):
        asked.clear()
        given = ["mesh={fsdp=8}", "sampling.mesh={}", *changes]
        plan.quick_plan(load_config(CONFIGS / "pod_8b_v6e.toml", given), parse_topology("v6e:2x4"))
        assert asked == layers
