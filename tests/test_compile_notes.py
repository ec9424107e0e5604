"""Lines about compiling: for programs that take long, once each, and for no other."""

import time

import jax
import jax.numpy as jnp
import pytest

from jrl import compile_notes
from jrl.compile_notes import CompileNotes


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(compile_notes, "PATIENCE", 0.02)


def events(notes, name, seconds):
    """What JAX reports while a program is compiled for ``seconds``."""
    notes._on_duration("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, fun_name=name)
    time.sleep(seconds)
    notes._on_duration("/jax/core/compile/backend_compile_duration", seconds, fun_name=name)


def test_long_compilations_are_said_and_short_ones_are_not(patience):
    said = []
    with CompileNotes(said.append) as notes:
        events(notes, "step", 0.3)
        events(notes, "generate", 0.0)
        events(notes, "somebody_s_own", 0.1)
        time.sleep(0.1)
    assert said == ["compiling the training step ...", "compiled the training step in 0 s"]


def test_jax_tells_what_it_compiles(patience):
    """The names of events are JAX's own, and may change with it."""
    said = []

    def held_out(x):
        for _ in range(150):
            x = jnp.sin(x) @ x
        return x

    with CompileNotes(said.append):
        jax.jit(held_out)(jnp.ones((4, 4)) * jnp.float32(time.time() % 1))
    assert said[0] == "compiling the evaluation ..."
    assert said[1].startswith("compiled the evaluation in ")
    jax.jit(held_out)(jnp.ones((5, 5)))
    assert len(said) == 2
