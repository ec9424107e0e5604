"""Options of XLA: those of the platform, and for every program of a run."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.collect import resharding
from jrl.mesh import make_mesh
from jrl.setup import compiler
from jrl.setup.compiler import OPTIONS, TRAINING, compiler_options, supported_options
from jrl.train import programs, step


def test_options_of_another_release_are_left_out():
    mesh, real = make_mesh({}, jax.devices()[:1]), ("xla_backend_optimization_level", 0)
    with jax.set_mesh(mesh):
        assert supported_options(mesh, (("xla_no_such_option", True), real)) == dict([real])
        assert supported_options(mesh, (real,)) == dict([real])
        assert supported_options(mesh, ()) == {}


def test_a_platform_without_options_is_compiled_as_it_was(monkeypatch):
    monkeypatch.setattr(compiler, "supported_options", lambda mesh, options: dict(options))
    cpu = make_mesh({}, jax.devices()[:1])
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert compiler_options(cpu) is None
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options(cpu) == compiler_options(cpu, training=True) == dict(OPTIONS["cpu"])
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    assert compiler_options(tpu) == compiler_options(tpu, training=True) == dict(OPTIONS["tpu"])
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    assert compiler_options(gpu) is None
    assert compiler_options(gpu, training=True) == dict(TRAINING["gpu"])


def test_every_program_of_a_run_is_compiled_with_them(monkeypatch):
    """Start, sampler, training step and resharding: an option that is not known stops each."""
    from jrl.config import load_config
    from jrl.plan import lower
    from jrl.train import build

    unknown = {"xla_no_such_option": "true"}
    for module in (programs, resharding, step):
        monkeypatch.setattr(module, "compiler_options", lambda mesh, **_: unknown)
    changes = [
        *("data.task=sequence", "data.difficulty=1", "sampling.group=2", "train.prompts=8"),
        "model.config={layers=1, embed_dim=16, heads=4, kv_heads=2, head_dim=8, mlp_dim=32}",
        *("mesh.fsdp=2", "sampling.mesh.tensor=2", "mesh.data=4", "sampling.mesh.data=4"),
    ]
    run = build.setup(load_config(None, changes))
    sampler_run = programs.train_sampler(run)
    reshard = lower.lower_resharding(run)
    weights = reshard.out_info
    mentions = []
    for start in (programs.new_state, programs.new_policy):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            start(run)
    for lowered in (reshard, lower.lower_sampler(run, weights), lower.lower_step(run)):
        try:
            lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            mentions.append("xla_no_such_option" in str(error))
    assert sampler_run.mesh.shape["tensor"] == 2
    assert mentions == [True] * 3
