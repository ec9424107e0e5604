"""Weights in files: every part is the part of the whole, and no host reads more than its own."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.mesh import make_mesh, tree_shardings
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.hf.files import open_checkpoint
from jrl.models.hf.stored import Stored
from jrl.models.transformer import transformer

SIZES = {"layers": 3, "embed_dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_dim": 24}
DENSE = ModelConfig(vocab_size=40, max_length=32, qkv_bias=True, **SIZES)
SPARSE = dataclasses.replace(
    DENSE,
    qkv_bias=False,
    experts=4,
    experts_per_token=2,
    expert_mlp_dim=12,
    tied_embeddings=False,
    qk_norm=True,
)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def checkpoint(request, tmp_path_factory):
    """(configuration, directory, the weights that were written)."""
    config = {"dense": DENSE, "sparse": SPARSE}[request.param]
    params = jax.device_get(jax.jit(transformer(config).init)(jax.random.key(0)))
    rng = np.random.default_rng(0)  # also where weights start as constants
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype), params)
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    hf.save(directory, config, params, shard_bytes=20_000)
    return config, directory, params


def test_every_part_is_the_part_of_the_whole(checkpoint):
    _, directory, params = checkpoint
    _, stored = open_checkpoint(directory)
    rng = np.random.default_rng(1)

    def compare(stored, array):
        assert isinstance(stored, Stored)
        assert (stored.shape, stored.dtype) == (array.shape, array.dtype)
        assert np.array_equal(np.asarray(stored), array)
        for _ in range(12):
            begin = [int(rng.integers(0, n)) for n in array.shape]
            index = tuple(
                slice(b, int(rng.integers(b + 1, n + 1)))
                for b, n in zip(begin, array.shape, strict=True)
            )
            assert np.array_equal(stored.read(index), array[index]), index

    jax.tree.map(compare, stored, params)


def test_placed_weights_are_those_of_load_in_any_type(checkpoint):
    config, directory, params = checkpoint
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "data": 2})
    network = transformer(config)
    where = tree_shardings(mesh, network.axes(), params)
    for dtype in (None, "bfloat16"):
        _, stored = open_checkpoint(directory, dtype=dtype)
        _, loaded = hf.load(directory, dtype=dtype)
        placed = hf.place(stored, where)
        assert jax.tree.map(lambda x: x.sharding, placed) == where
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), loaded)
    # arrays that are there already are put as they are
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(hf.place(params, where)), params)


def test_no_device_reads_more_than_its_part(checkpoint, monkeypatch):
    config, directory, params = checkpoint
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    where = tree_shardings(mesh, transformer(config).axes(), params)
    read, most = Stored.read, []

    def watched(self, index):
        part = read(self, index)
        most.append((self.shape, part.shape))
        return part

    monkeypatch.setattr(Stored, "read", watched)
    hf.place(open_checkpoint(directory)[1], where)
    expected = {
        x.shape: at.shard_shape(x.shape)
        for x, at in zip(*map(jax.tree.leaves, (params, where)), strict=True)
    }
    assert dict(most) == expected
    assert any(np.prod(part) * 8 == np.prod(shape) for shape, part in most)


def test_in_memory_reads_what_is_in_files_and_leaves_the_rest(checkpoint):
    _, directory, params = checkpoint
    _, stored = open_checkpoint(directory)
    assert stored["embed"].size == params["embed"].size
    assert stored["embed"].ndim == 2
    assert np.array_equal(stored["embed"].astype(np.float16), params["embed"].astype(np.float16))
    mixed = hf.in_memory({"a": stored["embed"], "b": params["embed"], "c": None})
    assert np.array_equal(mixed["a"], params["embed"])
    assert mixed["b"] is params["embed"]


def test_a_file_that_goes_away_is_named(checkpoint, tmp_path):
    import shutil

    _, directory, _ = checkpoint
    shutil.copytree(directory, tmp_path / "copy")
    _, stored = open_checkpoint(tmp_path / "copy")
    for path in (tmp_path / "copy").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=r"no such file; the checkpoint is incomplete"):
        hf.in_memory(stored)
