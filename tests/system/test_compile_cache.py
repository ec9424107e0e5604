"""Counting compilations, and the compile cache on disk."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jrl.system.compile_cache import CompileCounter, enable_compile_cache

ONE_PROGRAM = """
import json, jax, jax.numpy as jnp
from jrl.system.compile_cache import CompileCounter, enable_compile_cache
directory = enable_compile_cache()
if directory:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
with CompileCounter() as counter:
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).block_until_ready()
print(json.dumps([directory and str(directory), counter.count, counter.cached]))
"""


def run(tmp_path, **environment):
    environment_kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JRL_", "XDG_"))
    }
    result = subprocess.run(
        [sys.executable, "-c", ONE_PROGRAM],
        env={**environment_kept, "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_the_second_process_reads_what_the_first_compiled(tmp_path):
    directory, count, cached = run(tmp_path)
    assert Path(directory).is_relative_to(tmp_path / ".cache" / "jrl")
    assert count >= 1
    assert cached == 0
    again, count_again, cached_again = run(tmp_path)
    assert (again, count_again) == (directory, count)
    assert cached_again >= 1


def test_an_empty_variable_turns_the_cache_off(tmp_path):
    directory, _, cached = run(tmp_path, JRL_CACHE_DIR="")
    assert (directory, cached) == (None, 0)
    assert not (tmp_path / ".cache").exists()


def test_a_directory_that_jax_was_told_to_use_is_kept(tmp_path):
    directory, _, _ = run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert directory == str(tmp_path / "mine")


def test_a_cache_that_cannot_be_written_is_told_and_left_out(tmp_path, monkeypatch, capsys):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("JRL_CACHE_DIR", str(tmp_path / "file"))
    assert enable_compile_cache() is None
    assert "no compile cache" in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir == before


def test_counter_counts_new_shapes_only_and_only_while_it_is_on():
    step = jax.jit(lambda x: x * 2 + 1)
    three, four, five = (jnp.zeros(n) for n in (3, 4, 5))
    with CompileCounter() as counter:
        step(three)
        step(three)
        assert counter.count == 1
        step(four)
        assert counter.count == 2
        assert counter.seconds > 0
    step(five)
    assert counter.count == 2


TRIMMED = """
import ctypes, types, jax, jax.numpy as jnp
from jrl.system.compile_cache import CompileCounter, return_compiler_memory
calls = []
ctypes.CDLL = lambda name: types.SimpleNamespace(malloc_trim=calls.append)
return_compiler_memory()
return_compiler_memory()  # once is enough
with CompileCounter() as counter:
    program = jax.jit(lambda x: jnp.sin(x) @ x)
    program(program(jnp.ones((4, 4)))).block_until_ready()
print(len(calls) == counter.count > 0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks the GNU C library")
def test_what_a_compilation_leaves_is_returned_once():
    result = subprocess.run(
        [sys.executable, "-c", TRIMMED],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "True\n"
