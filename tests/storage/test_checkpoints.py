"""Checkpoints: bit-equal, atomic, portable between meshes, and clear about what does not fit."""

import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.storage.checkpoints import Checkpoints


class Tracker(NamedTuple):
    mean: jax.Array
    count: jax.Array


class State(struct.PyTreeNode):
    step: jax.Array
    params: dict
    opt_state: object
    frozen: dict
    method: object
    key: jax.Array


def make_state(mesh=None, seed=0):
    """A state with every kind of leaf; on a mesh when there is one."""
    w_key, b_key, key = jax.random.split(jax.random.key(seed), 3)
    params = {
        "policy": {
            "w": jax.random.normal(w_key, (16, 8)),
            "b": jax.random.normal(b_key, (8,), jnp.bfloat16),
        }
    }
    state = State(
        step=jnp.int32(7),
        params=params,
        opt_state=optax.adamw(optax.constant_schedule(1e-3)).init(params),
        frozen={},
        method={
            "advantage": (),
            "regularizers": (Tracker(jnp.float32(0.1), jnp.int32(3)),),
            "empty": jnp.zeros((0, 4)),
            "keys": jax.random.split(jax.random.key(1, impl="rbg"), 8),
        },
        key=key,
    )
    if mesh is None:
        return state

    def place(leaf):
        over = ["fsdp"] if leaf.ndim and leaf.shape[0] % 4 == 0 and leaf.size else []
        over += ["tensor"] if leaf.ndim == 2 and leaf.size else []
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*over)))

    return jax.tree.map(place, state)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(got, want, *, placed_as=None):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    placed_as = want if placed_as is None else placed_as
    for a, b, like in zip(*map(jax.tree.leaves, (got, want, placed_as)), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert bits(a) == bits(b)
        if isinstance(like, jax.Array):
            assert a.sharding == like.sharding
            assert a.committed == like.committed


def save(directory, *steps, keep=3, state=None):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(seed=step) if state is None else state)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.mark.parametrize("sizes", [None, {"fsdp": 4, "tensor": 2}])
def test_round_trip_is_bit_equal(tmp_path, sizes):
    state = make_state(sizes and make_mesh(sizes))
    extra = {"position": {"epoch": 1, "index": 40}, "reward": 0.1 + 0.2, "name": "rø"}
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(7, state, extra=extra)
    got, got_extra = Checkpoints(tmp_path / "c", keep=2).restore(state)
    assert_same(got, state)
    assert got_extra == extra
    # The restored key draws what the saved one would have drawn.
    assert bits(jax.random.normal(got.key, (4,))) == bits(jax.random.normal(state.key, (4,)))


@pytest.mark.parametrize("to", [{"fsdp": 2, "tensor": 4}, {"fsdp": 8}, {}])
def test_restores_onto_another_mesh(tmp_path, to):
    state = make_state(make_mesh({"fsdp": 4, "tensor": 2}))
    save(tmp_path, 7, state=state)
    mesh = make_mesh(to)
    want = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), make_state()
    )
    want = want.replace(
        params=jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))), want.params
        )
    )
    got, _ = Checkpoints(tmp_path, 3).restore(abstract(want))
    assert_same(got, want)


def test_a_struct_without_sharding_restores_uncommitted(tmp_path):
    state = make_state(make_mesh({"fsdp": 8}))
    save(tmp_path, 7, state=state)
    got, _ = Checkpoints(tmp_path, 3).restore(jax.eval_shape(make_state))
    assert_same(got, make_state())


def test_host_leaves_restore_as_what_they_are(tmp_path):
    state = {"i": 3, "f": 0.1, "t": True, "n": np.arange(4, dtype=np.int64), "z": np.zeros((0, 2))}
    save(tmp_path, 1, state=state)
    got, _ = Checkpoints(tmp_path, 3).restore({"i": 0, "f": 0.0, "t": False, "n": state["n"] * 0,
                                               "z": state["z"]})  # fmt: skip
    assert [type(got[k]) for k in "iftn"] == [int, float, bool, np.ndarray]
    assert (got["i"], got["f"], got["t"]) == (3, 0.1, True)
    np.testing.assert_array_equal(got["n"], np.arange(4))
    assert got["z"].shape == (0, 2)


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, None])
def test_the_state_may_be_donated_once_save_returns(tmp_path, sizes):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    w = jnp.arange(512 * 512, dtype=jnp.float32).reshape(512, 512)
    if sizes:
        w = jax.device_put(w, NamedSharding(make_mesh(sizes), PartitionSpec("fsdp", "tensor")))
    want = np.array(w)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(0, {"w": w})
    for _ in range(10):
        w = bump(w)
    got, _ = checkpoints.restore({"w": w})
    checkpoints.close()
    assert float(w[0, 0]) == 10.0
    np.testing.assert_array_equal(got["w"], want)


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "dir", keep=2)
    assert checkpoints.steps() == []
    assert checkpoints.latest_step() is None
    assert not (tmp_path / "new").exists()
    for step in (1, 5, 10):
        checkpoints.save(step, make_state(seed=step))
    checkpoints.close()
    assert checkpoints.steps() == [5, 10]
    assert checkpoints.latest_step() == 10
    state, _ = checkpoints.restore(make_state(), step=5)
    assert_same(state, make_state(seed=5))


def test_steps_kept_for_good_and_the_best_outlive_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 12):
            checkpoints.save(step, {"w": np.ones(3)}, best=3 if step < 9 else 9)
            checkpoints.wait()
            if step == 8:
                assert checkpoints.steps() == [3, 4, 7, 8]
    assert checkpoints.steps() == [4, 8, 9, 10, 11]


def test_a_subset_reads_parameters_without_the_optimiser(tmp_path):
    save(tmp_path, 4)
    template = {"params": jax.eval_shape(make_state).params}
    got, _ = Checkpoints(tmp_path, 3).restore(template, subset=True)
    assert_same(got["params"], make_state(seed=4).params)
    with pytest.raises(UserError, match="opt_state.0.count is in the checkpoint only"):
        Checkpoints(tmp_path, 3).restore(template)


def test_nothing_to_restore_is_said(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in .*/runs/x"):
        Checkpoints(tmp_path / "runs" / "x", 1).restore(make_state())
    save(tmp_path / "c", 2, 4)
    with pytest.raises(UserError, match="no checkpoint of step 3 in .*; there are 2, 4"):
        Checkpoints(tmp_path / "c", 1).restore(make_state(), step=3)
    with pytest.raises(UserError, match="checkpoint.keep = 0"):
        Checkpoints(tmp_path, 0)


def test_a_mismatch_names_the_leaf(tmp_path):
    save(tmp_path, 4)
    template = make_state()

    def policy(**changes):
        return template.replace(params={"policy": template.params["policy"] | changes})

    checkpoints = Checkpoints(tmp_path, 3)
    wrong = r"params.policy.w is float32\[16, 8\], expected float32\[16, 9\]"
    with pytest.raises(UserError, match=wrong):
        checkpoints.restore(policy(w=jnp.zeros((16, 9))))
    with pytest.raises(UserError, match=r"b is bfloat16\[8\], expected float32\[8\]"):
        checkpoints.restore(policy(b=jnp.zeros(8)))
    with pytest.raises(UserError, match="params.policy.c is not in the checkpoint"):
        checkpoints.restore(policy(c=jnp.zeros(8)))
    with pytest.raises(UserError, match="frozen.ref.w is not in the checkpoint"):
        checkpoints.restore(template.replace(frozen={"ref": {"w": jnp.zeros(1)}}))
    with pytest.raises(UserError, match="key<rbg>"):
        checkpoints.restore(template.replace(key=jax.random.key(0, impl="rbg")))


def test_extra_must_be_json_but_for_numpy_arrays(tmp_path):
    with pytest.raises(UserError, match="extra cannot be JSON"):
        Checkpoints(tmp_path, 1).save(0, {"w": jnp.zeros(1)}, extra={"array": jnp.zeros(2)})
    arrays = {"list": [{"a": np.arange(3)}, None], "empty": np.zeros((0, 2), np.float32), "n": 1}
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(0, {"w": jnp.zeros(1)}, extra=arrays)
        _, extra = checkpoints.restore({"w": jnp.zeros(1)})
    jax.tree.map(np.testing.assert_array_equal, extra, arrays)
    assert [x.dtype for x in jax.tree.leaves(extra)[:2]] == [np.float32, np.int64]


def test_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"both called 'a\.b'"):
        Checkpoints(tmp_path, 1).save(0, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})


def data_files(step_dir):
    return sorted(p for p in step_dir.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", ["half", "empty", "gone"])
def test_a_damaged_file_falls_back_or_changes_nothing(tmp_path, damage):
    """Arrays have no copy; the small files have, and they say what they were read from."""
    good = tmp_path / "good"
    save(good, 10, 20)
    fell_back = mended = 0
    for file in data_files(good / "00000020"):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(good, tmp_path / "c")
        victim = tmp_path / "c" / file.relative_to(good)
        content = victim.read_bytes()
        victim.unlink()
        if damage != "gone":
            victim.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
        checkpoints = Checkpoints(tmp_path / "c", 2)
        if victim.parent.name == "d":
            with pytest.warns(UserWarning, match=r"step 20 in .*/c is damaged and was skipped"):
                got, _ = checkpoints.restore(make_state())
            assert_same(got, make_state(seed=10))
            fell_back += 1
            continue
        if victim.name in ("_CHECKPOINT_METADATA", "commit_success.txt", "sizes.json"):
            got, _ = checkpoints.restore(make_state())
        else:
            with pytest.warns(UserWarning, match=f"{victim.name} damaged, and read from a copy"):
                got, _ = checkpoints.restore(make_state())
            mended += 1
        assert_same(got, make_state(seed=20))
    assert fell_back >= 3
    assert mended >= 3


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_one_flipped_bit_anywhere_is_seen_or_harmless(tmp_path, recwarn):
    """60 places over all files, and an older step to fall back to."""
    warnings.simplefilter("always")  # two damages may be told in the same words
    save(tmp_path, 10, 20)
    rng = np.random.default_rng(0)
    files = [f for f in data_files(tmp_path / "00000020") if f.stat().st_size]
    arrays = [f for f in files if f.parent.name == "d"]
    outcomes = {10: 0, 20: 0}
    for i in range(60):
        file = arrays[i // 2 % len(arrays)] if i % 2 else files[i // 2 % len(files)]
        content = file.read_bytes()
        flip(file, int(rng.integers(8 * len(content))))
        got, _ = Checkpoints(tmp_path, 2).restore(make_state())
        newest = make_state(seed=20).params["policy"]["w"]
        step = 20 if bits(got.params["policy"]["w"]) == bits(newest) else 10
        assert_same(got, make_state(seed=step))
        outcomes[step] += 1
        file.write_bytes(content)
    assert outcomes[10] >= 5
    assert outcomes[20] >= 5  # small files have copies, and files of arrays hold old parts too
    assert len([w for w in recwarn if "was skipped" in str(w.message)]) == outcomes[10]


def test_flipped_numbers_are_named_with_their_array(tmp_path):
    """The bits of an array itself, which the readers of arrays take for numbers."""
    state = {"params": {"w": np.random.default_rng(0).random(5000)}, "step": np.int32(3)}
    save(tmp_path, 1, 2, state=state)
    data = max(data_files(tmp_path / "00000002"), key=lambda p: p.stat().st_size)
    content = data.read_bytes()
    mismatches = 0
    for place in np.linspace(0.05, 0.95, 10):
        flip(data, int(place * 8 * len(content)))
        with pytest.warns(UserWarning, match="step 2 .* is damaged and was skipped") as caught:
            got, _ = Checkpoints(tmp_path, 2).restore(state)
        assert bits(got["params"]["w"]) == bits(state["params"]["w"])
        mismatches += "params.w has another checksum than when it was saved" in str(
            caught[0].message
        )
        with pytest.raises(UserError, match="checkpoint step 2 in .* is damaged"):
            Checkpoints(tmp_path, 2).restore(state, step=2)
        data.write_bytes(content)
    assert mismatches >= 1


def test_damage_in_the_values_of_the_host_is_seen_without_the_copies(tmp_path):
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}, extra={"cursor": 400})
    (tmp_path / "00000001" / "sizes.json").unlink()
    meta = tmp_path / "00000001" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace("400", "500"))
    with pytest.raises(
        UserError, match="step 1 .* is damaged .*meta/metadata has another checksum"
    ):
        Checkpoints(tmp_path, 2).restore({"w": np.ones(3)}, step=1)


def test_a_step_of_before_checksums_is_read(tmp_path):
    save(tmp_path, 7)
    step = tmp_path / "00000007"
    meta = json.loads((step / "meta" / "metadata").read_text())
    del meta["checksums"], meta["crc32"]
    (step / "meta" / "metadata").write_text(json.dumps(meta | {"format": 1}))
    (step / "sizes.json").write_text(json.dumps({"meta/metadata": 3}))
    got, _ = Checkpoints(tmp_path, 3).restore(make_state())
    assert_same(got, make_state(seed=7))


def break_step(directory, step):
    data = max((directory / f"{step:08d}" / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:10])


def test_training_continues_past_a_damaged_step(tmp_path):
    save(tmp_path, 10, 20)
    break_step(tmp_path, 20)
    with Checkpoints(tmp_path, 2) as checkpoints:
        with pytest.warns(UserWarning, match="has 10 bytes of"):
            checkpoints.restore(make_state())
        checkpoints.save(20, make_state(seed=99))
    got, _ = Checkpoints(tmp_path, 2).restore(make_state())
    assert_same(got, make_state(seed=99))
    assert Checkpoints(tmp_path, 2).steps() == [10, 20]


def test_a_damaged_step_asked_for_or_without_another_is_an_error(tmp_path):
    save(tmp_path, 10, 20)
    break_step(tmp_path, 20)
    with pytest.raises(UserError, match="step 20 in .* is damaged"):
        Checkpoints(tmp_path, 2).restore(make_state(), step=20)
    break_step(tmp_path, 10)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(UserError, match="step 20, 10 in .* is damaged"),
    ):
        Checkpoints(tmp_path, 2).restore(make_state())


def test_another_continuation_is_not_mixed_in(tmp_path):
    save(tmp_path, 10, 20)
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.restore(make_state(), step=10)
    with pytest.raises(UserError, match="step 15 is older than step 20"):
        checkpoints.save(15, make_state())
    # The step the run stands at is on disk already: nothing to do.
    checkpoints.restore(make_state())
    checkpoints.save(20, make_state(seed=1))
    got, _ = checkpoints.restore(make_state())
    assert_same(got, make_state(seed=20))


PREAMBLE = """
import jax, numpy as np, os, resource, signal, sys, time
from jrl.storage.checkpoints import Checkpoints
from jrl.errors import UserError
small, big = {"w": np.arange(1000.0)}, {"w": np.random.default_rng(0).random(4_000_000)}
checkpoints = Checkpoints(sys.argv[1], 1)
checkpoints.save(1, small)
checkpoints.wait()
"""


def start(script, directory):
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )


def test_a_killed_save_leaves_the_previous_step(tmp_path):
    for delay in (0.0, 0.01, 0.03):
        directory = tmp_path / str(delay)
        child = start(
            "checkpoints.save(2, big)\nprint('saving', flush=True)\ntime.sleep(60)", directory
        )
        with child:
            assert child.stdout.readline() == "saving\n"
            time.sleep(delay)
            child.send_signal(signal.SIGKILL)
        checkpoints = Checkpoints(directory, 1)
        assert checkpoints.steps() in ([1], [2], [1, 2])
        want = np.random.default_rng(0).random(4_000_000)
        if checkpoints.latest_step() == 1:
            want = np.arange(1000.0)
        got, _ = checkpoints.restore({"w": want * 0})
        np.testing.assert_array_equal(got["w"], want)
        # What the killed save left does not stand in the way of the next one, and goes.
        checkpoints.save(3, {"w": np.arange(1000.0)})
        checkpoints.close()
        assert checkpoints.steps() == [3]
        assert [p.name for p in directory.iterdir()] == ["00000003"]


def test_a_full_disk_leaves_the_earlier_step_and_is_said_quietly(tmp_path):
    # A limit on the size of files fails like a full disk, in the same threads.
    child = start(
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
try:
    checkpoints.save(2, big)
    checkpoints.wait()
except UserError as error:
    print(error)
print(checkpoints.steps())
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
checkpoints.save(3, small)
checkpoints.close()
print(checkpoints.steps())
""",
        tmp_path,
    )
    out, err = child.communicate(timeout=120)
    lines = out.splitlines()
    assert lines[0].startswith(f"checkpoint step 2 was not written to {tmp_path}")
    assert "File too large" in lines[0]
    assert "earlier steps are unchanged" in lines[0]
    assert lines[1:] == ["[1]", "[3]"]
    assert err == ""
    assert child.returncode == 0


def test_an_oserror_of_the_first_call_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="step 1 was not written"):
        Checkpoints(tmp_path / "file" / "c", 1).save(1, {"w": np.zeros(3)})


def test_terminal_stays_quiet(tmp_path):
    child = start("got, _ = checkpoints.restore(small)\nprint(got['w'][-1])", tmp_path)
    out, err = child.communicate(timeout=120)
    assert (out, err) == ("999.0\n", "")


def test_a_reader_leaves_a_running_save_alone(tmp_path):
    save(tmp_path, 1)
    half = tmp_path / "00000002.orbax-checkpoint-tmp"
    half.mkdir()
    reader = Checkpoints(tmp_path, 1)
    assert reader.steps() == [1]
    reader.restore(make_state())
    reader.close()
    assert half.exists()


TWO_PROCESSES = """
import sys, jax, numpy as np, warnings
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jrl.storage.checkpoints import Checkpoints
from jrl.mesh import make_mesh
mesh = make_mesh({"fsdp": 4})
def put(x, *over):
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, PartitionSpec(*over)), lambda i: x[i])
x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
state = {"w": put(x, "fsdp"), "step": jnp.int32(3), "n": np.arange(3)}
with Checkpoints(sys.argv[3], 2) as checkpoints:
    checkpoints.save(3, state, extra={"a": 1})
    checkpoints.save(4, state, extra={"a": 2})
    got, extra = checkpoints.restore({"w": put(x * 0, None, "fsdp"), "step": jnp.int32(0),
                                      "n": np.zeros(3, int)})
    assert extra == {"a": 2}
    for shard in got["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])
    assert int(got["step"]) == 3
    if jax.process_index() == 0:
        import pathlib
        files = (pathlib.Path(sys.argv[3]) / "00000004" / "state").rglob("d/*")
        max(files, key=lambda file: file.stat().st_size).write_bytes(b"short")
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, extra = checkpoints.restore(state)
    assert extra == {"a": 1}, extra
    assert any("step 4" in str(w.message) for w in caught)
print("ok")
"""


def test_two_processes_write_one_checkpoint(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(i), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    results = [child.communicate(timeout=120) for child in children]
    for out, err in results:
        assert out.endswith("ok\n"), err


def test_layout_is_written_beside_the_arrays(tmp_path):
    save(tmp_path, 4)
    meta = json.loads((tmp_path / "00000004" / "meta" / "metadata").read_text())
    assert meta["leaves"]["params.policy.b"] == {"shape": [8], "dtype": "bfloat16"}
    assert meta["leaves"]["key"]["impl"] == "threefry2x32"


def test_directories_of_steps_that_changed_their_names_are_refused_by_the_step_they_hold(tmp_path):
    with Checkpoints(tmp_path, 3) as store:
        for step in (1, 2):
            store.save(step, {"x": jnp.float32(step)})
    one, two = sorted(p for p in tmp_path.iterdir() if p.name.isdigit())
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    with pytest.raises(UserError, match=r"step 2 in .* holds step 1: directories of steps were"):
        Checkpoints(tmp_path, 3).restore({"x": jnp.float32(0)})
    with pytest.raises(UserError, match=r"step 1 in .* holds step 2"):
        Checkpoints(tmp_path, 3).restore({"x": jnp.float32(0)}, 1)


SHUTDOWN = """
import asyncio

async def late():
    try:
        await asyncio.sleep(60)
    finally:
        raise OSError("the disk is full")

async def fails():
    asyncio.create_task(late())
    await asyncio.sleep(0)
    raise OSError("the disk is full")
"""


@pytest.mark.parametrize("package", ["orbax", "elsewhere"])
def test_an_error_of_a_save_is_told_once(package, tmp_path, caplog):
    """What asyncio says of further tasks that fail while the first one's error ends them."""
    save(tmp_path, 1)
    names = {}
    exec(compile(SHUTDOWN, f"/site-packages/{package}/writing.py", "exec"), names)
    with pytest.raises(OSError, match="the disk is full"):
        asyncio.run(names["fails"]())
    said = [each.message for each in caplog.records if each.name == "asyncio"]
    assert len(said) == (package != "orbax")
