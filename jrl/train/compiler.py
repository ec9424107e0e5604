"""Options of XLA for a run's programs, by the platform that they are compiled for."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

OPTIONS: Mapping[str, Mapping[str, str]] = {
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
    }
}
"""Options by platform; one without any is compiled as XLA does by itself."""


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """The options of every program of a run on this mesh, for ``jax.jit``."""
    options = OPTIONS.get(mesh.devices.flat[0].platform)
    return None if options is None else dict(options)
