"""The rematerialisation that a run chooses by itself."""

from __future__ import annotations

import math

import jax
import pytest

from jrl.config import build_config, load_config
from jrl.mesh import make_mesh
from jrl.plan.compile import abstract_run_on
from jrl.plan.lower import abstract_run
from jrl.plan.topology import parse_topology
from jrl.run.run import train
from jrl.storage.metrics import check_run_dir
from jrl.train import remat

SIZES = {
    "vocab_size": 64,
    "layers": 8,
    "embed_dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 256,
    "max_length": 256,
}
GIB = float(1 << 30)


def tables(**more):
    base_tables = {
        "model": {"config": SIZES},
        "data": {"max_prompt_tokens": 64},
        "mesh": {"data": 1},
    }
    base_tables |= {"sampling": {"group": 3, "max_new_tokens": 128}, "train": {"prompts": 4}}
    return build_config(base_tables | {"method": "grpo"} | more)


def run_of(**more):
    return abstract_run(tables(**more), make_mesh({}, jax.devices()[:1]))


@pytest.fixture
def sizes(monkeypatch):
    """Counted bytes by candidate, in GiB, in place of those of the run."""
    by_name = dict.fromkeys(remat.ORDER, 0.0)
    monkeypatch.setattr(remat, "counted_bytes", lambda run: by_name[run.config.model.remat] * GIB)
    return by_name


def test_the_count_falls_from_candidate_to_candidate_and_names_auto_by_default():
    run = run_of()
    assert run.config.model.remat == "auto"
    counts = [remat.counted_bytes(remat.with_remat(run, name)) for name in remat.ORDER]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    halves = run_of(train={"prompts": 4, "microbatches": 4})
    assert remat.counted_bytes(remat.with_remat(halves, "elementwise")) < counts[0]


def test_with_little_memory_a_leaner_one_is_taken_and_none_that_is_clear_is_compiled(sizes):
    sizes |= {"elementwise": 90.0, "dots": 85.0, "mlp": 45.0, "full": 20.0}
    run = run_of()

    def never(run):
        raise AssertionError(run.config.model.remat)

    assert remat.choose(run, 200 * GIB, never).remat == "elementwise"
    choice = remat.choose(run, 70 * GIB, never)
    assert choice.remat == "mlp"
    assert choice.text() == (
        "model.remat = auto: mlp, about 45 GiB of 70 GiB; elementwise would take 90 GiB, dots would"
        " take 85 GiB"
    )
    assert remat.choose(run, 10 * GIB, never).remat == "full"


def test_what_is_close_is_compiled_at_most_twice(sizes):
    sizes |= {"elementwise": 90.0, "dots": 85.0, "mlp": 80.0, "full": 79.0}
    run, policies_tried = run_of(), []

    def measure(candidate):
        policies_tried.append(candidate.config.model.remat)
        return {"elementwise": math.inf, "dots": 84 * GIB}[policies_tried[-1]]

    choice = remat.choose(run, 81 * GIB, measure)
    assert policies_tried == ["elementwise", "dots"]
    # By the count scaled as that of "dots" was, "mlp" leaves too little to spare.
    assert (choice.remat, round(choice.refused["mlp"] / GIB, 1)) == ("full", 79.1)
    assert not choice.compiled
    sizes["mlp"] = 75.0
    assert remat.choose(run, 81 * GIB, measure).remat == "mlp"
    exact = remat.choose(run, 95 * GIB, lambda candidate: 80 * GIB)
    assert (exact.remat, exact.size, exact.compiled) == ("elementwise", 80 * GIB, True)
    assert exact.text() == "model.remat = auto: elementwise, 80 GiB of 95 GiB"


def test_experts_are_always_compiled_for_as_what_they_are_sent_is_not_counted(sizes):
    sizes |= dict.fromkeys(remat.ORDER, 1.0)
    experts = {"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8}
    dense, sparse = run_of(), run_of(model={"config": SIZES | experts})
    assert not remat.choose(dense, 100 * GIB, lambda candidate: 90 * GIB).compiled
    assert remat.choose(sparse, 100 * GIB, lambda candidate: 90 * GIB).compiled


def test_the_compiled_step_takes_less_when_whole_layers_are_computed_again():
    run = run_of(model={"config": SIZES, "dtype": "bfloat16", "param_dtype": "bfloat16"})
    by_name = {
        name: remat.compiled_bytes(remat.with_remat(run, name)) for name in ("elementwise", "full")
    }
    assert 0 < by_name["full"] < by_name["elementwise"]


def test_a_run_says_what_it_takes_and_a_resumed_one_takes_it_again(monkeypatch, tmp_path):
    lines, run = [], run_of(run={"dir": str(tmp_path / "run")})
    assert remat.settled(run, lines.append) is run  # on a CPU config.toml is what was given
    assert lines == []
    monkeypatch.setattr(remat, "device_memory", lambda mesh: 1000)
    lean = remat.settled(run, lines.append)
    assert lean.config.model.remat == "full"
    assert lines[0].startswith("model.remat = auto: full, ")
    assert "elementwise would take" in lines[0]
    plain = run.network.hidden.keywords["remat"]
    assert (plain, lean.network.hidden.keywords["remat"]) == ("elementwise", "full")
    explicit = run_of(model={"config": SIZES, "remat": "dots"})
    assert remat.settled(explicit, lines.append) is explicit


@pytest.mark.slow
def test_config_toml_of_a_run_names_the_choice_and_more_memory_does_not_change_it(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(remat, "device_memory", lambda mesh: 1000)
    directory, lines = tmp_path / "run", []
    settings = ("train.steps=1", f"run.dir={directory}", "warmup.steps=0", "eval.problems=2")
    settings += ("optimizer.schedule=constant",)
    config = load_config("configs/tiny.toml", settings)
    train(config, echo=lines.append)
    assert any(line.startswith("model.remat = auto: full, ") for line in lines)
    assert load_config(directory / "config.toml").model.remat == "full"
    monkeypatch.setattr(remat, "device_memory", lambda mesh: 10**15)
    lines.clear()
    again = load_config("configs/tiny.toml", (*settings[1:], "train.steps=2"))
    assert check_run_dir(again)
    train(again, echo=lines.append)
    assert load_config(directory / "config.toml").model.remat == "full"
    assert not any("model.remat" in line for line in lines)


def test_a_plan_takes_what_the_chip_has_room_for(sizes):
    sizes |= {"elementwise": 20.0, "dots": 14.0, "mlp": 10.0, "full": 5.0}
    small, large = (
        abstract_run_on(tables(), parse_topology(name)) for name in ("v5e:1x1", "v6e:1x1")
    )
    assert (small.config.model.remat, large.config.model.remat) == ("dots", "elementwise")
