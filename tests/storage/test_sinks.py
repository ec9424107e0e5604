"""Trackers: what reaches them, and what is said when they are absent."""

import sys
import time
import types

import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.storage.metrics import RunWriter


def config_in(directory, *overrides):
    return load_config(None, [f'run.dir="{directory}"', *overrides])


@pytest.mark.parametrize(
    ("package", "override"),
    [
        ("tensorboardX", "log.to=tensorboard"),
        ("wandb", "log.to=wandb:demo"),
        ("trackio", "log.to=trackio:demo"),
        ("mlflow", "log.to=mlflow:demo"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_remedy(
    package, override, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    extra = override.removeprefix("log.to=").partition(":")[0]
    message = rf"needs the package {package} .*-m pip install -e .*\[{extra}\]"
    with pytest.raises(UserError, match=message):
        RunWriter(config_in(tmp_path, override))


@pytest.mark.extra("tensorboard")
def test_tensorboard_events_are_written(tmp_path):
    writer = RunWriter(config_in(tmp_path, "log.to=tensorboard"))
    writer.write(1, {"loss": 0.5, "kl": float("nan"), "note": "text"})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"loss" in content
    assert b"kl" not in content


@pytest.mark.extra("tensorboard")
def test_tensorboard_hides_the_steps_that_a_resumed_run_runs_again(tmp_path):
    config = config_in(tmp_path, "log.to=tensorboard")
    for resumed_from, steps in ((None, (1, 2, 3)), (1, (2,))):
        writer = RunWriter(config)
        if resumed_from is not None:
            writer.truncate_after(resumed_from)
        for step in steps:
            writer.write(step, {"loss": 0.5})
        writer.close()
    events = [
        event for path in sorted((tmp_path / "tensorboard").iterdir()) for event in read(path)
    ]
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [2]  # events from this step on are dropped, of the files before
    assert [event.step for event in events if event.HasField("summary")] == [1, 2, 3, 2]


def read(path):
    """The events of a file: each has 12 bytes of length and checksum in front, and 4 behind."""
    from tensorboardX.proto import event_pb2

    content = path.read_bytes()
    while content:
        size = int.from_bytes(content[:8], "little")
        yield event_pb2.Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


def test_wandb_gets_the_numbers_and_a_resumed_run_stays_one_run(tmp_path, monkeypatch):
    runs, calls = [], []

    def init(**arguments):
        calls.append(arguments)
        runs.append(FakeRun())
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = config_in(tmp_path, "log.to=wandb:demo")
    writer = RunWriter(config)
    writer.write(4, {"loss": 0.5, "kl": None, "done": True})
    writer.close()
    RunWriter(config)
    assert runs[0].logged == [(4, {"loss": 0.5})]
    assert runs[0].finished
    assert calls[0]["project"] == "demo"
    assert calls[0]["config"]["seed"] == 0
    assert calls[0]["id"] == calls[1]["id"]


def test_wandb_that_cannot_start_is_an_error_and_one_that_fails_later_is_not(
    tmp_path, monkeypatch, capsys
):
    def refuse(**arguments):
        raise RuntimeError("no key\nwhile retrying")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match="no key while retrying; log in with"):
        RunWriter(config_in(tmp_path / "a", "log.to=wandb:demo"))
    tried = []

    class Broken(FakeRun):
        def log(self, numbers, step):
            tried.append(step)
            raise ConnectionError("gone")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: Broken()))
    writer = RunWriter(config_in(tmp_path / "b", "log.to=wandb:demo"))
    writer.write(1, {"loss": 1.0})
    writer.write(2, {"loss": 1.0})
    assert tried == [1]  # a server that is gone does not hold every step
    monkeypatch.setattr("jrl.storage.metrics.SINK_SECONDS", 0.0)
    writer.write(3, {"loss": 1.0})
    assert tried == [1, 3]
    assert capsys.readouterr().err.count("gone") == 1
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("target", ["trackio", "mlflow"])
def test_a_target_without_a_project_is_named(target):
    with pytest.raises(UserError, match="trackio:PROJECT or mlflow:EXPERIMENT"):
        load_config(None, [f"log.to={target}"])


# ---------------------------------------------------------------- the real libraries, offline


def write_twice(config):
    """A run of two steps, resumed for a third, as three records."""
    for steps in ((1, 2), (3,)):
        writer = RunWriter(config)
        for step in steps:
            writer.write(step, {"loss": step / 2, "reward/a.py:right": 1.0, "kl": None})
        writer.close()


@pytest.mark.extra("wandb")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_twice(config_in(tmp_path, "log.to=wandb:demo"))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.stem for path in files}) == 1  # the id of one run
    # Its service, a process, may write for a moment after the run has finished.
    ends = time.monotonic() + 20
    while not all(b"reward/a.py:right" in path.read_bytes() for path in files):
        assert time.monotonic() < ends, [path.read_bytes() for path in files]
        time.sleep(0.1)


@pytest.mark.extra("trackio")
def test_trackio_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    from trackio.sqlite_storage import SQLiteStorage

    write_twice(config_in(tmp_path / "run", "log.to=trackio:demo"))
    (name,) = SQLiteStorage.get_runs("demo")
    assert name.startswith("run-")
    logs = SQLiteStorage.get_logs("demo", name)
    assert [(row["step"], row["loss"]) for row in logs] == [(1, 0.5), (2, 1.0), (3, 1.5)]


@pytest.mark.extra("mlflow")
@pytest.mark.filterwarnings("ignore")  # of its database library, about itself
def test_mlflow_in_the_run_directory(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_twice(config_in(tmp_path, "log.to=mlflow:demo", "train.steps=7"))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "7"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert run.data.metrics["reward/a.py:right"] == 1.0
    # Elsewhere, and in a directory of MLflow's own.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    RunWriter(config_in(tmp_path / "b", "log.to=mlflow:demo")).close()
    other = mlflow.MlflowClient(f"sqlite:///{tmp_path}/other.db")
    assert other.get_experiment_by_name("demo") is not None


@pytest.mark.extra("mlflow")
@pytest.mark.filterwarnings("ignore")  # of its database library, about itself
def test_mlflow_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://x")
    with pytest.raises(UserError, match="MLflow cannot be started.*MLFLOW_TRACKING_URI"):
        RunWriter(config_in(tmp_path, "log.to=mlflow:demo"))
