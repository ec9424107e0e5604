"""The memory that programs on the CPU run in is kept, and what compilation leaves is not."""

import pathlib
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, jax, jax.numpy as jnp
from jrl.heap import keep_memory
assert keep_memory()
assert keep_memory()  # once is enough

@jax.jit
def large(x):
    return ((x @ x.T) @ x).sum()

x = jnp.ones((3072, 8))
for _ in range(30):  # until freed memory lies together
    large(x).block_until_ready()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    large(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory so")
def test_a_program_runs_again_in_the_memory_it_had():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Its temporary is 36 MiB, which are 9,216 pages a run when they are given back.
    assert int(done.stdout) < 9216


ASKED = r"""
import pathlib, re, jax
from jrl.heap import keep_memory
assert keep_memory()
jax.jit(lambda x: x + 1)(1.0)
areas = re.split(r"\n(?=[0-9a-f]+-)", pathlib.Path("/proc/self/smaps").read_text())
asked = [a for a in areas if "[heap]" in a and re.search(r"VmFlags:.* hg\b", a)]
print(*(sum(int(re.search(rf"{name}: +(\d+)", a)[1]) for a in asked) for name in ("Size", "Rss")))
"""
CHOICE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory so")
@pytest.mark.skipif(not CHOICE.exists(), reason="the system has no huge pages to ask for")
def test_the_heap_asks_for_huge_pages_that_take_up_no_memory():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, resident = map(int, done.stdout.split())  # KiB; a GiB is asked for ahead
    assert size > 2**19
    assert resident < 2**16
