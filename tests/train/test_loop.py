"""The loop on procedural tasks: what a run leaves behind; every way of running it agrees."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.data.tasks import TASKS
from jrl.evaluate import load_policy
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build, programs

SIZES = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
BASE = (
    *("data.task=sequence", "data.difficulty=1", SIZES),
    *("sampling.group=4", "train.prompts=4", "train.steps=3"),
    "rewards={verify={}, partial={weight=0.5}}",
    # Adam would turn the rounding of gradients next to 0 into whole steps.
    "optimizer={name='sgd', learning_rate=0.1}",
    *("eval.problems=8", "eval.every=2", "checkpoint.every=2", "log.samples_every=2"),
    "warmup={steps=60, batch=32, learning_rate=1e-2}",  # groups whose rewards differ
)


class Ran:
    """Results and files of a finished run."""

    def __init__(self, directory, *changes):
        self.lines = []
        self.config = load_config(None, [*BASE, *changes, f"run.dir={json.dumps(str(directory))}"])
        self.summary = train(self.config, echo=self.lines.append)
        self.dir = pathlib.Path(directory)
        self.header, *self.records = read_jsonl(self.dir / "metrics.jsonl")
        self.samples = read_jsonl(self.dir / "samples.jsonl")

    def policy(self):
        with jax.set_mesh((run := build.setup(self.config)).mesh):
            return jax.device_get(load_policy(run, None)[1])


def finite(records):
    return all(None not in r.values() for r in records)


def assert_same(ours, theirs, bound):
    """Two runs' records agree in every number but the clock's."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() - CLOCKS == b.keys() - CLOCKS
        for name in a.keys() - CLOCKS:
            assert a[name] == pytest.approx(b[name], rel=bound, abs=bound), (a["step"], name)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The reference run, with the report and everything."""
    return Ran(tmp_path_factory.mktemp("host") / "run")


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def test_a_run_directory_holds_what_scripts_rely_on(host):
    assert {p.name for p in host.dir.iterdir()} >= {
        *("config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "report"),
        "summary.json",
    }
    assert load_config(host.dir / "config.toml") == host.config
    assert {"versions", "device", "mesh", "config", "seed"} <= host.header.keys()
    assert [r["step"] for r in host.records] == [1, 2, 3]
    assert finite(host.records)
    completions = host.config.train.prompts * host.config.sampling.group
    for record in host.records:
        assert {"loss", "reward", "kl", "grad_norm", "compiles", "reward/partial"} <= record.keys()
        assert record["grad_norm"] > 0
        assert record["reward_std"] > 0
        steps = record["completion_tokens"] / record["slot_use"] / completions
        assert steps == pytest.approx(round(steps))  # every one has its slot to the end
        assert record["length"] <= round(steps)
    assert Checkpoints(host.dir / "checkpoints", 2).steps() == [2, 3]
    stored = json.loads((host.dir / "summary.json").read_text())
    assert host.summary.items() >= stored.items()
    assert stored["steps"] == 3
    assert stored["accuracy_after"] == stored["eval_after"]["accuracy"]
    assert stored["train_seconds"] == pytest.approx(sum(r["seconds"] for r in host.records))
    tokens = sum(r["completion_tokens"] for r in host.records)
    assert stored["tokens_per_second"] == pytest.approx(tokens / stored["train_seconds"])
    assert 0 <= stored["accuracy_before"] <= 1
    assert (host.dir / "report" / "index.html").exists()


def test_samples_are_kept_when_they_are_asked_for(host):
    trained = [s for s in host.samples if "split" not in s]
    assert sorted({s["step"] for s in trained}) == [1, 2]
    assert len(trained) == 2 * host.config.log.MIN_MEMBERS
    for s in trained:
        assert s["reward"] == pytest.approx(s["rewards"]["verify"] + 0.5 * s["rewards"]["partial"])
    held_out = [s for s in host.samples if s.get("split") == "eval"]
    assert sorted({s["step"] for s in held_out}) == [0, 2, 3]
    assert all(s["rewards"].keys() == {"verify"} for s in held_out)


def test_samples_are_whole_groups_with_the_advantages_that_were_trained_on(host):
    trained = [s for s in host.samples if "split" not in s]
    groups = {}
    for s in trained:
        groups.setdefault((s["step"], s["group"]), []).append(s)
    assert sorted(groups) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for members in groups.values():
        assert [s["member"] for s in members] == list(range(host.config.sampling.group))
        rewards = np.array([s["reward"] for s in members])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert [s["advantage"] for s in members] == pytest.approx(advantages, abs=1e-4)
        for s in members:
            tokens = s["tokens"]
            assert "".join(tokens["text"]).removesuffix("<stop>") == s["completion"]
            assert len(tokens["text"]) == len(tokens["logprobs"]) == s["length"]
            assert all(x <= 0 for x in tokens["logprobs"])
            assert tokens["advantages"] == pytest.approx(s["advantage"], rel=1e-3, abs=1e-4)
    assert any(s["advantage"] > 0.1 for s in trained)
    assert not any("tokens" in s for s in host.samples if "split" in s)


def test_an_evaluation_is_in_the_record_of_its_step(host):
    assert [r["step"] for r in host.records if "eval/accuracy" in r] == [2]
    assert host.records[1]["eval/problems"] == 8


def test_nothing_is_compiled_after_the_first_step(host):
    counts = [r["compiles"] for r in host.records]
    assert counts[0] > 0
    # The evaluation of step 2 and its programs were made ready before training.
    assert counts[1:] == counts[:1] * 2


def test_compiled_runs_agree_with_the_host(host, tmp_path, no_report):
    compiled = Ran(tmp_path / "run", "train.mode=compiled")
    assert_same(host.records, compiled.records, 1e-5)
    for name in ("accuracy_before", "accuracy_after", "steps"):
        assert compiled.summary[name] == host.summary[name]
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), host.policy(), compiled.policy())
    assert max(jax.tree.leaves(difference)) <= 1e-5
    assert Checkpoints(compiled.dir / "checkpoints", 2).steps() == [2, 3]


def test_eight_devices_give_the_numbers_of_one(host, tmp_path, no_report):
    spread = Ran(tmp_path / "run", "mesh.fsdp=4", "mesh.tensor=2")
    assert {k: n for k, n in spread.header["mesh"].items() if n > 1} == {"fsdp": 4, "tensor": 2}
    assert_same(host.records, spread.records, 1e-4)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), host.policy(), spread.policy())
    assert max(jax.tree.leaves(difference)) <= 1e-4


def test_a_warm_start_lowers_the_loss(tmp_path, no_report):
    warmup = "warmup={steps=40, batch=8, learning_rate=1e-2}"
    ran = Ran(tmp_path / "run", warmup, "train.steps=0", "eval.every=0")
    (line,) = (x for x in ran.lines if x.startswith("warm start"))
    loss = float(re.search(r"loss ([\d.]+)", line).group(1))
    assert ran.records == []
    assert ran.summary["steps"] == 0
    # A new policy draws about evenly from the vocabulary.
    assert loss < 0.8 * np.log(build.setup(ran.config).model.vocab_size)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=() if task == "countdown" else pytest.mark.slow)
        for task in sorted(set(TASKS) - {"sequence"})
    ],
)
def test_every_task_trains(task, tmp_path, no_report):
    more = (f"data.task={task}", "data.difficulty=", "train.steps=2", "eval.every=0")
    ran = Ran(tmp_path / "run", *more, "warmup.steps=0")
    assert ran.summary["steps"] == 2
    assert finite(ran.records)
    assert ran.records[0]["reward/partial"] >= 0
    assert {s["prompt"] for s in ran.samples}


@pytest.mark.parametrize(
    "method", ["remax", "ppo", "dapo", pytest.param("reinforce", marks=pytest.mark.slow)]
)
def test_methods_train_by_name(method, tmp_path, no_report):
    """One of each kind: a plain one, with a greedy member, with values, with groups redrawn."""
    more = (f"method={method}", "train.steps=2", "eval.every=0")
    ran = Ran(tmp_path / "run", *more)
    assert ran.summary["method"] == method
    assert finite(ran.records)
    assert all(r["skipped_updates"] == 0 for r in ran.records)
    assert max(r["grad_norm"] for r in ran.records) > 0
    assert ran.records[0]["logprob_diff"] < 1e-5


def test_supervised_training_draws_nothing_and_learns_the_solutions(tmp_path, no_report):
    more = ("method=sft", "train.steps=30", "eval.every=0", "warmup.steps=0", "checkpoint.every=0")
    more += ("optimizer={name='adam', learning_rate=1e-2}", "sampling.group=1", "train.prompts=16")
    host = Ran(tmp_path / "host", *more)
    losses = [r["loss"] for r in host.records]
    assert losses[-1] < 0.7 * losses[0]
    for record in host.records:
        assert record["reward/verify"] == 1  # every member is a right answer
        assert not {"logprob_diff", "approx_kl", "entropy"} & record.keys()
    assert all(s["demonstration"] and s["completion"] == s["answer"] for s in trained(host))
    compiled = Ran(tmp_path / "compiled", *more, "train.mode=compiled")
    assert_same(host.records, compiled.records, 1e-5)


def test_a_run_learns_from_another_runs_policy(tmp_path, no_report):
    """The teacher has a size of its own; the student comes nearer to it."""
    wide = "model.config={layers=1, embed_dim=32, heads=2, kv_heads=1, head_dim=8, mlp_dim=32}"
    less = ("eval.every=0", "checkpoint.every=0", "eval.problems=4")
    teacher = Ran(tmp_path / "teacher", wide, *less, "train.steps=0", "warmup.steps=0")
    teacher_override = f"frozen.teacher={json.dumps(str(teacher.dir))}"
    student = Ran(
        tmp_path / "student",
        *(
            "method=on_policy_distillation",
            teacher_override,
            *less,
            "warmup.steps=0",
            "train.steps=12",
        ),
        "optimizer={name='adam', learning_rate=1e-2}",
    )
    assert finite(student.records)
    run = build.setup(student.config)
    with jax.set_mesh(run.mesh):
        state, _ = programs.new_state(run)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.frozen["teacher"], teacher.policy()))
    assert run.networks["teacher"].embed_dim == 32
    with_ref = load_config(
        None,
        [*BASE, f"frozen.ref={json.dumps(str(student.dir))}", "objective.kl_coef=0.1"],
    )
    run = build.setup(with_ref)
    with jax.set_mesh(run.mesh):
        state, _ = programs.new_state(run)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.frozen["ref"], student.policy()))
    embed = [tree["policy"]["embed"] for tree in (state.params, {"policy": state.frozen["ref"]})]
    assert not np.array_equal(*embed)


def trained(ran):
    return [s for s in ran.samples if "split" not in s]


EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.parametrize(
    ("meshes", "bound"),
    [
        (((), ()), 1e-6),
        pytest.param(((), ("mesh.fsdp=2", "mesh.tensor=2")), 1e-4, marks=pytest.mark.slow),
        pytest.param((("mesh.fsdp=4",), ("mesh.data=2",)), 1e-4, marks=pytest.mark.slow),
        pytest.param(((), EIGHT), 1e-4, marks=pytest.mark.slow),
        pytest.param((EIGHT, ()), 1e-4, marks=pytest.mark.slow),
    ],
    ids=["the same devices", "more devices", "fewer devices", "one to eight", "eight to one"],
)
def test_a_run_resumes_to_more_steps(meshes, bound, host, tmp_path, no_report):
    """Raising train.steps continues a finished run; nothing is logged twice.

    On other devices its checkpoint is read into other shards.
    """
    first = Ran(tmp_path / "run", "train.steps=1", *meshes[0])
    more = Ran(tmp_path / "run", "train.steps=3", *meshes[1])
    assert first.summary["steps"] == 1
    assert "resuming from step 1" in " ".join(more.lines)
    assert [r["step"] for r in more.records] == [1, 2, 3]
    assert_same(host.records, more.records, bound)
    assert more.summary["accuracy_before"] == host.summary["accuracy_before"]
    assert more.summary["accuracy_after"] == host.summary["accuracy_after"]
    samples, full = ([s for s in r.samples if "split" not in s] for r in (more, host))
    assert [s for s in samples if s["step"] == 2] == [s for s in full if s["step"] == 2]
