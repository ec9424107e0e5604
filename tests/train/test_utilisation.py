"""Model FLOP utilisation of a run's steps."""

from __future__ import annotations

import types

import jax
import pytest

from jrl.config import build_config
from jrl.mesh import make_mesh
from jrl.models.flops import Lengths, forward_flops
from jrl.plan.lower import abstract_run
from jrl.plan.topology import CHIPS
from jrl.train import utilisation as used

SIZES = {
    "vocab_size": 64,
    "layers": 2,
    "embed_dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 64,
    "max_length": 64,
}
METRICS = {"prompt_length": 9.6, "length": 7.2}


def run_of(**tables):
    base_tables = {
        "model": {"config": SIZES},
        "data": {"max_prompt_tokens": 16},
        "mesh": {"data": 1},
    }
    base_tables |= {"sampling": {"group": 3, "max_new_tokens": 16}, "train": {"prompts": 4}}
    config = build_config(base_tables | {"method": "grpo"} | tables)
    return abstract_run(config, make_mesh({}, jax.devices()[:1]))


@pytest.mark.parametrize("kind", ["v4", "v5 lite", "v5p", "v5", "v6 lite"])
def test_peaks_are_those_that_plans_count_with(kind):
    device = types.SimpleNamespace(device_kind=f"TPU {kind}")
    chip = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e"}.get(kind, kind)
    assert used.peak_flops(device) == CHIPS[chip].flops


def test_the_longest_name_of_a_device_decides():
    assert used.peak_flops(types.SimpleNamespace(device_kind="NVIDIA H100 PCIe")) == 756e12
    assert used.peak_flops(types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")) == 989e12


def test_a_cpu_has_no_utilisation():
    assert used.utilisation(run_of(), METRICS, 1.0) is None


@pytest.mark.parametrize(
    ("tables", "passes"),
    [
        ({}, 3 + 1),
        ({"objective": {"kl_coef": 0.1}}, 3 + 1 + 1),  # the reference scores the batch too
        ({"objective": {"epochs": 2}}, 6 + 1),
        ({"method": "decoupled_ppo"}, 3 + 1 + 1),  # the policy, before its first update
        ({"lora": {"rank": 2}}, 2 + 1),
    ],
)
def test_a_step_counts_sampling_scoring_and_training(monkeypatch, tables, passes):
    monkeypatch.setattr(used, "peak_flops", lambda device: 1e6)
    once = forward_flops(run_of().shape, Lengths(prompts=4, group=3, prompt=10, new=7))
    share = used.utilisation(run_of(**tables), METRICS, 2.0)
    assert share == pytest.approx(passes * once / 2e6)


def test_what_environments_say_is_read_too(monkeypatch):
    monkeypatch.setattr(used, "peak_flops", lambda device: 1e6)
    short = used.utilisation(run_of(), METRICS, 1.0)
    assert used.utilisation(run_of(), METRICS | {"row_length": 14.0}, 1.0) > short
