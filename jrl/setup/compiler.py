"""Options of XLA for a run's programs, by the platform that they are compiled for."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.mesh import named_platform

Value = str | bool | int
Options = Mapping[str, Mapping[str, Value]]

OPTIONS: Options = {
    "tpu": {
        # Weights are gathered while other layers are multiplied: each of these is needed for that.
        # libtpu 0.0.42 has them on, and with any of them off compiled a scan over layers with no
        # gather beside its products; another release may have other defaults.
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_enable_latency_hiding_scheduler": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    },
    "cpu": {
        # A program is a thousand small kernels, each of which LLVM goes over. Doing less to them
        # compiles samplers and training steps in 5/6 of the processor time and an initial
        # state in a quarter, with equal bits; all three take as long to run (benchmarks/peers.md).
        "xla_backend_optimization_level": 1,
    },
}
"""Options by platform; one without any is compiled as XLA does by itself."""

TRAINING: Options = {
    "gpu": {
        # On an H200 cuBLAS makes the products of many tokens faster than kernels of Triton, and a
        # step of 1.7B on 16,384 tokens took 0.379 s with it alone, 0.383 s where XLA chose.
        "xla_gpu_enable_triton_gemm": False,
        # It writes a product into a stack of layers in place, and makes the same product once more
        # for whoever else reads it: five of a layer's products.
        "xla_gpu_enable_dynamic_slice_fusion": False,
        # Keys and values in one product are taken apart again, which reads and writes them all, and
        # matrices are copied side by side for a prompt's gate and up: 180 us of a layer's 9,700.
        "xla_gpu_dot_merger_threshold_mb": 0,
        # A loop over layers writes its stacks whole; filled with zeros before, they are written
        # twice: 20 GB of 1.7B on 16,384 tokens.
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    }
}
"""Those of training steps besides; what a release of XLA does not know is left out."""


def compiler_options(mesh: Mesh, *, training: bool = False) -> dict[str, Value] | None:
    """The options of every program of a run on this mesh, for ``jax.jit``.

    An option that XLA_FLAGS sets is left to it.

    Args:
      mesh: of the run.
      training: whether it is the training step.
    """
    platform = named_platform(mesh.devices.flat[0].platform)
    more = TRAINING.get(platform, {}) if training else {}
    options = {**OPTIONS.get(platform, {}), **supported_options(mesh, tuple(more.items()))}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in flags} or None


@functools.cache
def supported_options(mesh: Mesh, options: tuple[tuple[str, Value], ...]) -> dict[str, Value]:
    """The options that the XLA of a mesh's devices supports; it rejects any other."""

    def compiles(some: dict[str, Value]) -> bool:
        where = NamedSharding(mesh, PartitionSpec())
        program = jax.jit(lambda: jnp.zeros(()), out_shardings=where, compiler_options=some)
        try:
            program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    if not options or compiles(dict(options)):
        return dict(options)
    return {name: value for name, value in options if compiles({name: value})}
