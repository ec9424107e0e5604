"""Sums and gathers in two steps against those in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jrl.mesh import make_mesh
from jrl.models import collectives


@pytest.mark.parametrize("line", [8, 2], ids=["one step", "two steps"])
def test_device_i_keeps_part_i_of_the_sum_and_gets_the_parts_in_order(line, monkeypatch):
    monkeypatch.setattr(collectives, "_LINE", line)
    mesh = make_mesh({"fsdp": 8}, jax.devices()[:8])
    x = jax.random.randint(jax.random.key(0), (8, 3, 16), 0, 100)

    def local(x):
        part = collectives.sum_scattered(x[0], "fsdp", 1)
        return part[None], collectives.gathered(part, "fsdp", 1)[None]

    by_device = PartitionSpec("fsdp")
    run = jax.shard_map(local, mesh=mesh, in_specs=by_device, out_specs=(by_device, by_device))
    parts, gathered = jax.jit(run)(x)
    total = np.asarray(x).sum(0)
    np.testing.assert_array_equal(jnp.concatenate(list(parts), axis=1), total)
    np.testing.assert_array_equal(gathered, np.broadcast_to(total, gathered.shape))
    steps = str(jax.make_jaxpr(run)(x))
    for kind in ("reduce_scatter[", "all_gather["):
        assert steps.count(kind) == (1 if line == 8 else 2)
