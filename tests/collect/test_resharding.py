"""A layout of the sampler's own on the devices of training."""

from __future__ import annotations

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.resharding import ReshardedSampler, network_on, weights_program
from jrl.collect.sources import simple_request
from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate import evaluate_run
from jrl.mesh import make_mesh
from jrl.models.quant import quantise
from jrl.plan.costs import program_costs
from jrl.run import run as running
from jrl.setup.placement import sampler_mesh
from jrl.storage.metrics import read_jsonl
from jrl.train import build, programs

BASE = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=2", "train.prompts=8"),
    "model.config={layers=2, embed_dim=16, heads=4, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "optimizer.learning_rate=1e-2", "train.steps=3"),
    *("eval.problems=8", "checkpoint.every=0", "log.samples_every=1"),
)
EXPERTS = [
    f"model.config.{size}" for size in ("experts=4", "experts_per_token=2", "expert_mlp_dim=16")
]
APART = ("mesh.fsdp=8", "sampling.mesh.data=4", "sampling.mesh.tensor=2")


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def config(*changes, directory=None):
    run_dir = [] if directory is None else [f"run.dir={json.dumps(str(directory))}"]
    return load_config(None, [*BASE, *changes, *run_dir])


def go(directory, *changes):
    summary = running.train(config(*changes, directory=directory), echo=lambda line: None)
    records = read_jsonl(directory / "metrics.jsonl")[1:]
    samples = read_jsonl(directory / "samples.jsonl")
    return records, [s["completion"] for s in samples], summary


def assert_same_run(mine, theirs, *, exact=False):
    (records, texts, summary), (others, other_texts, other_summary) = mine, theirs
    assert texts == other_texts
    assert summary["eval_after"] == pytest.approx(other_summary["eval_after"])
    for a, b in zip(records, others, strict=True):
        for name in ("reward", "loss", "grad_norm", "length", "logprob_diff"):
            tolerance = 0 if exact else 1e-5
            assert a[name] == pytest.approx(b[name], rel=100 * tolerance, abs=tolerance), name


def others_slow(cases):
    first, *rest = cases
    return [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


@pytest.mark.parametrize(
    ("meshes", "policy"),
    others_slow(
        [
            (APART, ()),
            (("mesh.fsdp=4", "mesh.expert=2", "sampling.mesh={expert=4, data=2}"), (*EXPERTS,)),
            (
                ("mesh.fsdp=2", "mesh.tensor=2", "mesh.data=2", "sampling.mesh.data=8"),
                ("lora.rank=2", "sampling.slots=3"),
            ),
            # Rounding to 8 bits now and then makes a step of a difference in a weight's last bit.
            (APART, ("sampling.int8=['weights', 'cache']", "train.mode=packed", "train.steps=2")),
        ]
    ),
)
def test_a_run_that_samples_on_another_mesh_is_that_of_one_device(meshes, policy, tmp_path):
    one = go(tmp_path / "one", *policy)
    resharded = go(tmp_path / "own", *meshes, *policy)
    assert_same_run(resharded, one)
    assert len({r["grad_norm"] for r in one[0]}) > 1


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(tmp_path):
    unbroken = go(tmp_path / "whole", *APART)
    go(tmp_path / "broken", *APART, "train.steps=2")
    records, _, summary = go(tmp_path / "broken", *APART)
    assert [r["step"] for r in records] == [1, 2, 3]
    for mine, theirs in zip(records, unbroken[0], strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert mine[name] == theirs[name]
    # and a command that only evaluates uses the sampler's mesh, too
    scores = evaluate_run(config(*APART, directory=tmp_path / "broken"))
    assert scores["accuracy"] == summary["accuracy_after"]


def resharded(*changes, dtype="bfloat16"):
    run = build.setup(config(*changes, f"model.dtype={dtype}"))
    program = programs.train_sampler(run)
    assert isinstance(program, ReshardedSampler)
    with jax.set_mesh(run.mesh):
        params = programs.new_policy(run)[1]
    return run, program, params


def test_weights_are_held_in_the_samplers_dtype_until_they_are_freed():
    run, program, params = resharded(*APART)
    key = jax.device_put(
        jax.random.key(0), jax.tree.leaves(params)[0].sharding.mesh.devices.flat[0]
    )
    ids = np.arange(8, dtype=np.int32)
    for _ in range(2):  # further draws of the same step do not move them again
        request = simple_request(key, {"policy": params}, np.int32(0), ids, 4)
        groups = program.draw(request, sampling_params=run.sampling_params)
    arrays = jax.tree.leaves(program._resharded)
    assert {x.sharding.mesh.shape["tensor"] for x in arrays} == {2}
    assert {str(x.dtype) for x in arrays if x.ndim > 1} == {"bfloat16"}
    assert program.weights._cache_size() == 1
    program.free()
    assert all(x.is_deleted() for x in arrays)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    assert groups.rollout.tokens.shape[0] == 8


def test_weights_in_float8_are_those_of_one_device():
    _, program, params = resharded(*APART, "sampling.float8=weights")
    with jax.set_mesh(program.mesh):
        weights = program._weights_of(params)
    head, down = weights["head"], weights["layers"][0]["mlp"]["down"]
    assert {str(w.values.dtype) for w in (head, down)} == {"float8_e4m3fn"}
    assert head.values.sharding.mesh.shape["tensor"] == 2
    embed = jax.device_get(params["embed"]).astype(jnp.bfloat16)
    alone = jax.jit(partial(quantise, inputs=1, to="float8"))(embed.T)
    jax.tree.map(np.testing.assert_array_equal, head, alone)


@pytest.mark.parametrize(
    ("meshes", "expert"), [(("mesh.fsdp=8", "sampling.mesh={data=4, tensor=2}"), False)]
)
def test_a_device_is_sent_only_what_it_keeps(meshes, expert):
    """An exchange inside the sampler's tensor axis, and a gather of what it divides: in 16 bits."""
    run = build.setup(config(*meshes, "model.dtype=bfloat16"))
    sampling_mesh = sampler_mesh(run.config, run.mesh)
    with jax.set_mesh(sampling_mesh):
        program = weights_program(run, network_on(run, sampling_mesh), sampling_mesh)
        text = program.lower(programs.policy_layout(run)).compile().as_text()
    bytes_by_kind = {}
    for cost in program_costs(text, (4, 2)):
        for c in cost.collectives:
            bytes_by_kind[c.kind] = bytes_by_kind.get(c.kind, 0.0) + cost.runs * c.bytes
    c = run.shape
    layer = (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.mlp_dim
    matrices = c.embed_dim * (c.layers * layer + 2 * c.vocab_size)
    # a CPU sends bfloat16 as float32
    assert bytes_by_kind["all-gather"] < 1.3 * 4 * matrices / 2 * 3 / 4
    assert sum(bytes_by_kind.values()) < 1.8 * 4 * matrices / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("mesh.fsdp=8", "sampling.mesh.tensor=4"),
            "sampling.mesh has 4 devices and mesh 8; the sampler uses the devices of training",
        ),
        (("mesh.fsdp=8", "sampling.mesh={tensor=4, data=2}"), "sampling.mesh.tensor = 4 does not"),
        (
            ("mesh.fsdp=8", "sampling.mesh={expert=8}", *EXPERTS),
            "sampling.mesh.expert = 8 does not",
        ),
        (("mesh.data=8", "sampling.mesh={context=8}"), "sampling.mesh.context = 8: sampling does"),
        (
            ("mesh.data=8", "sampling.mesh={tensor=2, data=-1, expert=-1}"),
            "sampling.mesh.data and sampling.mesh.expert are -1",
        ),
        (
            ("mesh.data=8", "sampling.mesh={tensor=2, data=-1}", "sampling.slots=6"),
            "sampling.slots = 6 cannot be split over the 4 devices of sampling.mesh",
        ),
        (
            ("mesh.tensor=2", "train.prompts=3", "sampling.mesh.data=2"),
            "train.prompts = 3 cannot be split over the 2 devices of sampling.mesh",
        ),
        (
            ("mesh.data=8", "sampling.mesh.fsdp=8", "train.mode=compiled"),
            "train.mode = 'compiled' does not go with [sampling.mesh]: it is one program",
        ),
        (
            ("mesh.data=4", "sampling.mesh.fsdp=4", "placement.rollout.data=4"),
            "placement.rollout = {'data': 4} is no longer a key; set sampling.mesh",
        ),
    ],
)
def test_a_sampler_mesh_that_cannot_be_is_named(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build.setup(config(*changes))


def test_what_is_left_is_filled_and_the_mesh_of_training_is_no_other():
    mesh = make_mesh({"fsdp": 8})
    sampling_mesh = sampler_mesh(config("mesh.fsdp=8", "sampling.mesh={tensor=2, data=-1}"), mesh)
    assert dict(sampling_mesh.shape) == {
        "data": 4,
        "fsdp": 1,
        "tensor": 2,
        "context": 1,
        "expert": 1,
    }
    assert list(sampling_mesh.devices.flat) == list(mesh.devices.flat)
    assert sampler_mesh(config("mesh.fsdp=8", "sampling.mesh.fsdp=8"), mesh) is None
    assert sampler_mesh(config("mesh.fsdp=8"), mesh) is None
