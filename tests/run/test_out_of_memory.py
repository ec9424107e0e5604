"""Out of memory at run time: program, what it holds, keys to change."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from jrl.config import build_config, load_config
from jrl.mesh import make_mesh
from jrl.plan.lower import abstract_run
from jrl.run import out_of_memory
from jrl.run.out_of_memory import OutOfMemory, memory_of, remedies
from jrl.run.run import train
from jrl.train import loop

XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 28194172928 bytes.\nmore"
SIZES = {"vocab_size": 64, "layers": 2, "embed_dim": 32, "heads": 4, "kv_heads": 2}
SIZES |= {"head_dim": 8, "mlp_dim": 64, "max_length": 64}


def run_of(**tables):
    base_tables = {
        "model": {"config": SIZES},
        "data": {"max_prompt_tokens": 16},
        "mesh": {"data": 1},
    }
    base_tables |= {"sampling": {"group": 4, "max_new_tokens": 32}, "train": {"prompts": 8}}
    config = build_config(base_tables | {"method": "grpo"} | tables)
    return abstract_run(config, make_mesh({}, jax.devices()[:1]))


def failing(program, run, error=XLA):
    with pytest.raises(OutOfMemory) as info, memory_of(program, run):
        raise jax.errors.JaxRuntimeError(error)
    return str(info.value)


def test_the_message_has_the_compiled_program_s_own_figures():
    def step(x):
        return x @ x, jnp.sin(x)

    program = jax.jit(step)
    program(jnp.ones((512, 512)))
    text = failing("training step", run_of())
    assert text == (
        "out of memory in the training step, which holds 1 MiB of arguments, 0 bytes of"
        " temporaries, 2 MiB of results (RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
        ' 28194172928 bytes.); set one of model.remat = "full", train.microbatches = 2,'
        " sampling.max_new_tokens = 16"
    )


def test_it_says_what_the_device_has_and_the_largest_of_several_programs_counts(monkeypatch):
    def executable(name, temporaries):
        sizes = {"temp_size_in_bytes": temporaries, "argument_size_in_bytes": 3 << 30}
        sizes |= {"output_size_in_bytes": 5 << 30, "alias_size_in_bytes": 4 << 30}
        return types.SimpleNamespace(
            hlo_modules=lambda: [types.SimpleNamespace(name=name)],
            get_compiled_memory_stats=lambda: types.SimpleNamespace(**sizes),
        )

    def failing_modules():
        raise RuntimeError("deleted")

    live = [executable("jit_generate", n << 30) for n in (2, 26, 7)]
    live += [executable("jit_step", 99 << 30), types.SimpleNamespace(hlo_modules=failing_modules)]
    client = types.SimpleNamespace(live_executables=lambda: live)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(client=client)])
    stats = {"bytes_limit": 60 << 30, "bytes_in_use": 41 << 30}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    mesh = types.SimpleNamespace(local_devices=[device], shape={"data": 1, "fsdp": 1, "expert": 1})
    text = failing("sampler", run_of()._replace(mesh=mesh))
    assert text.startswith(
        "out of memory in the sampler, which holds 3 GiB of arguments, 26 GiB of temporaries, 1 GiB"
        " of results; a device has 60 GiB, 41 GiB in use now (RESOURCE_EXHAUSTED"
    )


def test_keys_are_of_the_program_and_have_values_that_can_be_set():
    run = run_of(train={"prompts": 8, "microbatches": 8}, model={"config": SIZES, "remat": "full"})
    assert remedies("sampler", run) == [
        "sampling.slots = 16",
        "sampling.int8 = ['cache']",
        "sampling.max_new_tokens = 16",
    ]
    assert remedies("evaluation", run)[0].startswith("eval.problems = ")
    # Nothing is left of remat and microbatches.
    assert remedies("training step", run) == [
        "lora.rank = 16",
        "sampling.max_new_tokens = 16",
        "mesh.fsdp = -1",
    ]
    for program in out_of_memory.FUNCTIONS:
        assert len(remedies(program, run_of())) == 3
        adapted = run_of(lora={"rank": 4}, optimizer={"name": "adafactor"})
        assert len(remedies(program, adapted)) == 3
    assert remedies("initial state", run_of()) == [
        "lora.rank = 16",
        'optimizer.name = "adafactor"',
        'model.param_dtype = "bfloat16"',
    ]
    short = run_of(sampling={"group": 4, "max_new_tokens": 32, "int8": ["weights"]})
    assert "sampling.int8 = ['cache', 'weights']" in remedies("sampler", short)


def test_other_errors_pass_as_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_of("sampler", None):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")


@pytest.mark.slow
def test_a_run_that_runs_out_names_its_program_and_what_is_saved(monkeypatch, tmp_path):
    settings = ("train.steps=2", f"run.dir={tmp_path / 'run'}", "warmup.steps=0", "train.mode=host")
    config = load_config("configs/tiny.toml", settings)

    def exhausted(*args):
        raise jax.errors.JaxRuntimeError(XLA)

    def train_steps(state, batches, step, *rest, **how):
        return loop.train_steps(state, batches, exhausted, *rest, **how)

    monkeypatch.setattr("jrl.run.loops.train_steps", train_steps)
    with pytest.raises(OutOfMemory, match=r"in the training step.*no checkpoint is in"):
        train(config, echo=lambda line: None)
