"""Run directories: what is written, what is refused, what a resumed run drops."""

import json
import math
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import StorageError, UserError
from jrl.storage import metrics
from jrl.storage.metrics import (
    RunWriter,
    check_run_dir,
    plain,
    read_jsonl,
    read_summary,
    write_atomic,
)
from jrl.storage.sinks import Sink


def config_in(directory, *overrides):
    return load_config(None, [f'run.dir="{directory}"', *overrides])


def strict(path):
    """The lines of a JSONL file; NaN and Infinity are refused, as strict readers do."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_plain_keeps_order_and_makes_strict_json():
    tree = {
        "z": jnp.float32(0.5),
        "a": jnp.array([1, 2]),
        "nan": float("nan"),
        "inf": np.float64("-inf"),
        "list": (jnp.bfloat16(1.5), True, None, "x"),
        "array": np.array([1.0, np.nan]),
        "one": jnp.ones((1, 1)),
    }
    got = plain(tree)
    assert list(got) == list(tree)
    assert got["z"] == 0.5
    assert got["a"] == [1, 2]
    assert got["nan"] is None
    assert got["inf"] is None
    assert got["list"] == [1.5, True, None, "x"]
    assert got["array"] == [1.0, None]
    assert got["one"] == 1.0
    json.dumps(got, allow_nan=False)


def test_a_run_directory_holds_what_scripts_read(tmp_path):
    run = tmp_path / "deep" / "run"
    writer = RunWriter(config_in(run, "seed=3"), mesh={"data": 2, "fsdp": 4})
    assert not writer.resuming
    record = writer.write(1, {"loss": jnp.float32(0.25), "kl": jnp.nan, "reward": 1})
    writer.write_samples(1, [{"prompt": "p\n</x>", "completion": "é", "rewards": {"math": 1.0}}])
    writer.write_summary({"accuracy_after": np.float32(0.5), "bad": np.inf})
    writer.close()

    first, step = strict(run / "metrics.jsonl")
    assert {"python", "jrl", "jax", "jaxlib", "flax", "optax"} <= first["versions"].keys()
    assert first["device"]["platform"] == "cpu"
    assert first["device"]["count"] == 8
    assert first["mesh"] == {"data": 2, "fsdp": 4}
    assert first["seed"] == 3
    assert first["config"]["sampling"]["group"] == 8
    assert step == record == {"step": 1, "loss": 0.25, "kl": None, "reward": 1}
    assert strict(run / "samples.jsonl") == [
        {"step": 1, "prompt": "p\n</x>", "completion": "é", "rewards": {"math": 1.0}}
    ]
    assert json.loads((run / "summary.json").read_text()) == {"accuracy_after": 0.5, "bad": None}
    assert load_config(run / "config.toml") == config_in(run, "seed=3")
    assert sorted(p.name for p in run.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
    ]


def test_samples_of_an_evaluation_that_is_made_again_replace_the_first_ones(tmp_path):
    def evaluated(text):
        return [{"completion": text, "split": "eval"}] * 2

    config = config_in(tmp_path)
    writer = RunWriter(config)
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
    writer.write_samples(2, [{"completion": "trained", "split": "train"}])
    writer.write_samples(2, evaluated("first"))
    again = RunWriter(config)
    again.truncate_after(2)
    again.write_samples(2, evaluated("second"))
    again.write_samples(3, evaluated("later"))
    texts = [r["completion"] for r in strict(tmp_path / "samples.jsonl")]
    assert texts == ["trained", "second", "second", "later", "later"]


def test_logs_are_on_the_disk_when_a_checkpoint_is(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")))
    writer = RunWriter(config_in(tmp_path))
    writer.sync()  # nothing is sampled yet
    writer.write_samples(1, [{"completion": "a"}])
    synced.clear()
    writer.sync()
    assert synced == {str(tmp_path / f"{name}.jsonl") for name in ("metrics", "samples")}


def test_an_evaluation_that_is_made_up_for_reaches_the_trackers(tmp_path, monkeypatch):
    got = []
    sink = Sink("T", lambda numbers, step: got.append((step, numbers)), lambda: None)
    monkeypatch.setattr(metrics, "open_sinks", lambda config, directory: [sink])
    writer = RunWriter(config_in(tmp_path))
    writer.write(1, {"loss": 0.5})
    writer.add_to_record(1, {"eval/accuracy": np.float32(0.25)})
    assert got == [(1, {"loss": 0.5}), (1, {"eval/accuracy": 0.25})]
    assert strict(tmp_path / "metrics.jsonl")[1] == {"step": 1, "loss": 0.5, "eval/accuracy": 0.25}


def test_a_resumed_run_drops_the_steps_it_runs_again(tmp_path):
    config = config_in(tmp_path)
    writer = RunWriter(config)
    for step in range(1, 6):
        writer.write(step, {"loss": step})
        writer.write_samples(step, [{"prompt": str(step)}])
    writer.write_summary({"steps": 5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line

    again = RunWriter(config)
    assert again.resuming
    again.truncate_after(3)
    again.write(4, {"loss": 40})
    first, *steps = strict(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in steps] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert [r["step"] for r in strict(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert [entry["step"] for entry in first["resumed"]] == [3]
    assert not (tmp_path / "summary.json").exists()

    third = RunWriter(config)
    third.truncate_after(-1)
    (only,) = strict(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in only["resumed"]] == [3, -1]


def test_the_evaluation_of_a_finished_run_is_there_once_when_it_is_repeated(tmp_path):
    config, held_out = config_in(tmp_path), {"prompt": "1", "split": "eval"}
    for _ in range(3):
        writer = RunWriter(config)
        if writer.resuming:
            writer.truncate_after(2)
        else:
            writer.write_samples(0, [held_out])
            for step in (1, 2):
                writer.write(step, {"loss": 1})
            writer.write_samples(2, [{"prompt": "2"}])
        writer.write_samples(2, [held_out, held_out])
        samples = strict(tmp_path / "samples.jsonl")
        assert [(r["step"], "split" in r) for r in samples] == [
            *((0, True), (2, False), (2, True), (2, True))
        ]


def test_a_half_line_in_the_middle_costs_only_itself(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, \n{"step": 3}\n3\n\n{"st')
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_another_configuration_is_refused_and_the_keys_are_named(tmp_path):
    RunWriter(config_in(tmp_path, "objective.clip=0.1"))
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(UserError) as caught:
        RunWriter(config_in(tmp_path, "sampling.group=4", "objective.beta=1"))
    message = str(caught.value)
    assert "sampling.group = 8 there, 4 now" in message
    assert "objective.clip = 0.1 there, None now" in message
    assert "objective.beta = None there, 1 now" in message
    assert "name another directory" in message
    assert len(message.splitlines()) == 4
    assert (tmp_path / "config.toml").read_text() == before


def test_more_steps_and_another_place_are_no_other_configuration(tmp_path):
    RunWriter(config_in(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert check_run_dir(config_in(tmp_path / "b", "train.steps=500", "run.resume=must"))


def test_resume_never_and_must(tmp_path):
    with pytest.raises(UserError, match="holds no run, but run.resume = 'must'"):
        check_run_dir(config_in(tmp_path, "run.resume=must"))
    RunWriter(config_in(tmp_path))
    with pytest.raises(UserError, match="holds a run, but run.resume = 'never'"):
        check_run_dir(config_in(tmp_path, "run.resume=never"))


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        RunWriter(config_in(tmp_path / "file"))
    with pytest.raises(UserError, match=r"run\.dir = .* cannot be written"):
        RunWriter(config_in(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match=r"run\.dir is missing"):
        RunWriter(load_config(None))
    (tmp_path / "config.toml").write_text("old_key = 1\n")
    with pytest.raises(UserError, match="cannot be read; name another directory"):
        RunWriter(config_in(tmp_path))


def test_an_edit_of_config_toml_is_seen_and_a_damaged_header_is_not_one(tmp_path):
    config = config_in(tmp_path)
    RunWriter(config)
    path, log = tmp_path / "config.toml", tmp_path / "metrics.jsonl"
    before, header = path.read_text(), json.loads(log.read_text())
    rate = header["config"]["optimizer"]["learning_rate"]
    edited_text = re.sub(r"learning_rate = .*", "learning_rate = 0.01", before, count=1)
    assert edited_text != before
    path.write_text(edited_text)
    message = f"learning_rate = {rate!r} in the header of metrics.jsonl, 0.01 there; restore it, or"
    with pytest.raises(UserError, match=re.escape(message)):
        check_run_dir(load_config(path))
    path.write_text(re.sub(r"every = .*", "every = 7", before))  # what may differ
    assert check_run_dir(load_config(path))
    path.write_text(before)
    header["config"]["optimizer"]["learning_rate"] = 3.0
    log.write_text(json.dumps(header) + "\n")
    assert check_run_dir(load_config(path))


def test_lines_that_a_full_disk_does_not_take_are_kept_and_written_later(tmp_path, capsys):
    writer = RunWriter(config_in(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer.write(1, {"loss": 1.0})
    record = writer.write(2, {"loss": 2.0})
    assert record == {"step": 2, "loss": 2.0}
    assert writer.fault() == ""  # not for long enough
    message = f"{tmp_path / 'metrics.jsonl'} cannot be written (No space left on device)"
    assert writer.fault(0) == message
    with pytest.raises(StorageError, match="No space left"):
        writer.retry()
    unwritten = writer.unwritten
    assert list(unwritten) == ["metrics.jsonl"]
    assert [json.loads(line)["step"] for line in unwritten["metrics.jsonl"].splitlines()] == [1, 2]

    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lo')  # what fitted of another line
    writer.write(3, {"loss": 3.0})
    steps = [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
    assert read_jsonl(tmp_path / "metrics.jsonl") == steps
    assert (writer.fault(0), writer.unwritten) == ("", {})
    assert capsys.readouterr().err == ""

    again = RunWriter(config_in(tmp_path))
    again.truncate_after(1)
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")[1:]] == [1]
    again.truncate_after(2, unwritten)  # of a checkpoint: only what is not there is added
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")[1:]] == [1, 2]


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_numbers_survive_exactly(tmp_path):
    writer = RunWriter(config_in(tmp_path))
    writer.write(1, {"a": np.float64(math.pi), "b": np.int64(2**53 + 1)})
    record = strict(tmp_path / "metrics.jsonl")[1]
    assert (record["a"], record["b"]) == (math.pi, 2**53 + 1)


DAMAGED = ("", "[1, 2]", "null", "{", '{"steps": 2, "eval_after": 1}')


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_summary_has_no_evaluation(tmp_path, text):
    writer = RunWriter(config_in(tmp_path / "run"))
    (tmp_path / "run" / "summary.json").write_text(text)
    assert isinstance(read_summary(tmp_path / "run"), dict)
    assert set(writer.last_evaluation(2)) == {"step"}
    (tmp_path / "run" / "summary.json").write_text('{"steps": 2, "eval_after": {"accuracy": 0.5}}')
    assert writer.last_evaluation(2)["eval/accuracy"] == 0.5
    writer.close()
