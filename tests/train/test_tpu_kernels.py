"""The real sampler and training step, compiled for slices of TPUs with their attention kernels."""

from __future__ import annotations

import pytest
from tpu_programs import ask, needs_libtpu

MODEL = {
    "vocab_size": 512,
    "layers": 1,
    "embed_dim": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "mlp_dim": 256,
    "max_length": 512,
}
FORWARD, READ, WRITE = "splash_mha_fwd_segmented_residuals", "read_cache", "write_columns"
BACKWARD = ["splash_mha_dkv_segmented_no_residuals", "splash_mha_dq_segmented_no_residuals"]


def run(mesh, attention="auto", **sizes):
    return {
        "method": "grpo",
        "model": {"config": MODEL | sizes, "dtype": "bfloat16", "attention": attention},
        "data": {"max_prompt_tokens": 128},
        "sampling": {"group": 4, "max_new_tokens": 128},
        "optimizer": {"name": "sgd"},
        "train": {"prompts": mesh.get("data", 1) * mesh.get("fsdp", 1)},
        "mesh": mesh,
    }


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2], ids=["together", "in a queue"])
def test_the_sampler_for_v5e_reads_and_writes_its_cache_by_kernels(slots):
    """In the loop over tokens one call for prompts, one for own keys and one that writes them.

    No array as large as a chip's keys, 128 columns of a head for each of its rows, is copied there.
    """
    mesh = {"data": 4, "fsdp": 4} if slots else {"data": 2, "fsdp": 4, "tensor": 2}
    config = run(mesh)
    config["sampling"]["slots"] = slots
    kernels = ask("kernels", config, "v5e:4x4", ["sampler"])["sampler"]
    assert kernels.pop("copied") < (slots or 4) * 128 * 128
    # Over tokens; in a queue also over chunks and over slots to fill. There are no smaller states.
    assert kernels.pop("loops") == (3 if slots else 1)
    assert kernels == {"kernels": [READ, READ, WRITE], "in_loop": 3, "devices": 16}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e:4x4", {"data": 2, "fsdp": 4, "tensor": 2}),
        ("v5p:4x4x4", {"data": 4, "fsdp": 8, "tensor": 2}),
    ],
)
def test_both_programs_run_attention_on_the_kernels(topology, mesh):
    """Prefill and decoding; prompts, and rows at themselves and at prompts, forward and backward.

    Of the last layer only keys and values of prompts are kept, so that its prefill has no kernel.
    """
    chips = 16 if topology == "v5e:4x4" else 64
    kernels = ask("kernels", run(mesh, layers=2), topology, ["sampler", "train_step"])
    assert kernels["sampler"]["kernels"] == sorted([FORWARD, *[READ] * 4, WRITE, WRITE])
    assert kernels["sampler"]["in_loop"] == 6
    step = kernels["train_step"]["kernels"]
    assert set(step) == {FORWARD, *BACKWARD}
    assert [step.count(name) for name in (FORWARD, *BACKWARD)] == [3, 3, 3]
    assert kernels["train_step"]["devices"] == chips


@needs_libtpu
@pytest.mark.slow
def test_windows_and_caps_run_on_the_kernels_and_plain_attention_on_none():
    """Where the sequence is divided too, each chip has its own queries."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "context": 2}
    sizes = {"layers": 2, "window": 64, "window_pattern": [True, False], "attention_softcap": 30.0}
    kernels = ask("kernels", run(mesh, **sizes), "v5e:4x4", ["train_step"])["train_step"]
    assert [kernels["kernels"].count(name) for name in (FORWARD, *BACKWARD)] == [6, 6, 6]
    plain = ask("kernels", run({"data": 16}, "xla"), "v5e:4x4", ["sampler", "train_step"])
    assert set(plain["sampler"]["kernels"]) == {WRITE}
    assert plain["train_step"]["kernels"] == []
