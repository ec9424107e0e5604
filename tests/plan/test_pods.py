"""The pod configurations: operations counted by hand, and what configs/README.md says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks import pods
from jrl.config import build_config, load_config
from jrl.mesh import make_mesh
from jrl.plan import compile as plan
from jrl.plan.lower import abstract_run
from jrl.plan.make import make_plan
from jrl.plan.records import Program
from jrl.plan.topology import parse_topology
from jrl.plan.useful import floor_seconds, lengths_of, model_flops
from jrl.train import programs
from jrl.train.programs import abstract_state
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
    pairs = sizes.prompts * (sizes.prompt**2 + sizes.group * sizes.new * width)
    products = 2 * forward + backward
    return layers + head + 2 * m.layers * products * pairs * m.heads * m.head_dim


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


def test_programs_of_few_layers_have_more_weights_than_stay_in_fast_memory(monkeypatch):
    """Of 8B over 8 chips a layer has 48 MB: of two layers XLA would keep most on the chip."""
    layers_compiled = []

    def compiled(run, topology, names, *options):
        layers_compiled.append(run.shape.layers)
        none = Program({"total": 1.0}, True, *[1.0, 1.0, {}, 1.0, {}], 1.0)
        return dict.fromkeys(names, none)

    monkeypatch.setattr(plan, "compiled_programs", compiled)
    monkeypatch.setattr(plan, "plan_mesh", lambda config, _: make_mesh(config.mesh_axes))
    for changes, layers in (
        ([], [36, 2, 4]),
        (["sampling.mesh={tensor=8}"], [36, 4, 6]),
        # so small that all of it stays there, and no more of a deeper one is read
        (["model.config.embed_dim=128", "model.config.mlp_dim=512"], [36, 2, 4]),
    ):
        layers_compiled.clear()
        overrides = ["mesh={fsdp=8}", "sampling.mesh={}", *changes]
        config = load_config(CONFIGS / "pod_8b_v6e.toml", overrides)
        make_plan(config, parse_topology("v6e:2x4"), "few layers")
        assert layers_compiled == layers


ROWS = json.loads((CONFIGS.parent / "benchmarks" / "pods.json").read_text())


def test_the_page_on_configurations_has_the_table_of_the_compiled_plans():
    table = pods.table(pods.complete(ROWS))
    assert table.count("\n") == 1 + len(pods.SLICES)
    assert table in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("name", pods.SLICES)
@pytest.mark.extra("plan")
def test_the_plans_on_record_are_of_the_configurations_as_they_are(name):
    """Meshes, floors and model FLOPs, which nothing has to be compiled for."""
    topology, row = parse_topology(pods.SLICES[name]), ROWS[name]
    run = abstract_run(
        config := load_config(CONFIGS / f"{name}.toml"), plan.plan_mesh(config, topology)
    )
    sampler = programs.drawing_mesh(run)
    assert (row["mesh"], row["sampling_mesh"]) == (dict(run.mesh.shape), dict(sampler.shape))
    assert row["in_8_bits"] == list(config.sampling.in_8_bits)
    for program, mesh in (("sampler", sampler), ("train_step", run.mesh)):
        record = row[program]
        assert record["floor_seconds"] == pytest.approx(floor_seconds(run, mesh, topology, program))
        assert record["model_flops"] == pytest.approx(model_flops(run, program) / topology.chips)
        assert record["fits"]
        assert record["effort"] == 0


SECONDS = {
    "pod_1.7b_v5e": 0.6 * 15.0,
    "pod_8b_v6e": 7.0,
    "pod_8b_v5e": 0.6 * 14.2,
    "pod_32b_v5p": 0.6 * 25.8,
    "pod_30b_a3b_v5p": 0.6 * 11.7,
}
"""Of a step at most: a bound on each of 7 s, or three fifths of what one mesh for both took."""


@pytest.mark.parametrize("name", SECONDS)
def test_predicted_steps_stay_within_their_bounds(name):
    assert pods.step_seconds(ROWS[name]) <= SECONDS[name]
    assert pods.utilisation(ROWS[name]) >= (0.35 if "a3b" in name else 0.5)


def test_the_sampler_of_405b_takes_at_most_40_seconds():
    assert ROWS["pod_405b_v5p"]["sampler"]["roofline_seconds"] <= 40
