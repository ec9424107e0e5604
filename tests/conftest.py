"""What every test shares: a quiet CPU backend with eight devices, and strict JAX settings.

The environment is written before anything imports JAX, so that subprocesses started by a test see
the same machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
OLD_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
"""Whether XLA can do without its newer emitters; a later one ends the process at the flag."""
MAPPINGS, MOST_MAPPINGS = pathlib.Path("/proc/self/maps"), 10_000
"""Pieces of memory of a process. Each program has several, and Linux lets it have 65,530."""
sys.path.insert(0, str(CHECKOUT / "tests"))  # for tpu_programs

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Programs of tests take far longer to compile than to run: the suite is twice as fast so.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # Workers keep all cores busy; a program compiled in many parts takes a quarter longer in sum.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if OLD_EMITTERS:
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Compiled programs are kept between runs and shared by the workers of pytest-xdist.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CHECKOUT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Tests start many Pythons of their own. Where none may write bytecode beside its sources, each
# would compile all that it imports, and take three seconds for JAX alone.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(CHECKOUT / ".cache" / "python")
    sys.dont_write_bytecode = False
# No test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Lets compiled programs go between modules when there are so many that memory matters."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def checkout() -> pathlib.Path:
    """The root of the source checkout."""
    return CHECKOUT
