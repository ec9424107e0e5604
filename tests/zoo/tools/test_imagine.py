"""``jrl imagine``: rows are written one at a time, and whatever ends a run loses none of them."""

import fcntl
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hub_mirror import checkpoint
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.errors import UserError
from jrl.run import run as running
from jrl.zoo.envs.imagined import Task
from jrl.zoo.tools import imagine as module
from jrl.zoo.tools.imagine import Model, imagine, read_task

TASK = Task("Add.", "a teacher", "a student", "Is it understood?", "Teach me.", personas=3)
TOML = """
description = "Add."
agent = "a teacher"
human = "a student"
goal = "Is it understood?"
personas = 3
"""


class Fake:
    """An endpoint: ``fault(number of the request, prompt)`` may answer instead."""

    def __init__(self):
        self.prompts, self.bodies, self.lock = [], [], threading.Lock()
        self.fault = lambda number, prompt: None
        self.pause = 0.0  # seconds after each byte

    def reply(self, body):
        prompt = body["messages"][-1]["content"]
        with self.lock:
            number = len(self.prompts)
            self.prompts.append(prompt)
            self.bodies.append(body)
        if (other := self.fault(number, prompt)) is not None:
            return other
        if "Think about who" in prompt:
            return "1. A shy one.\n2. A proud one.\n3. A tired one."
        if "Score: NUMBER" in prompt:
            return f"So it is.\nScore: {10 if 'A shy' in prompt else 0}"
        return "Agent: 2+2?\nHuman: 4.\nAgent: Yes.\nHuman: I see.\nEND"

    @property
    def dialogues(self):
        return sum("Write their whole" in prompt for prompt in self.prompts)


@pytest.fixture
def fake():
    endpoint = Fake()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            reply = endpoint.reply(json.loads(self.rfile.read(size)))
            status, text = reply if isinstance(reply, tuple) else (200, reply)
            out = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            if status != 200:
                out = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            for at in range(0, len(out), 1 if endpoint.pause else len(out) or 1):
                self.wfile.write(out[at : at + 1] if endpoint.pause else out)
                time.sleep(endpoint.pause)

        def log_message(self, *arguments):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, address):
            """A client that went away is what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield endpoint
    server.shutdown()
    thread.join()
    server.server_close()


def run(fake, out, count=6, **more):
    options = {"timeout": more.pop("timeout", 20.0)}
    return imagine(
        more.pop("task", TASK),
        Model(fake.url, "some", **options),
        out,
        count=count,
        seed=0,
        concurrency=more.pop("concurrency", 2),
        echo=lambda line: None,
    )


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_dialogues_with_rewards(fake, tmp_path):
    summary = run(fake, tmp_path / "new" / "out.jsonl")
    dialogues = rows(tmp_path / "new" / "out.jsonl")
    assert sorted(row["number"] for row in dialogues) == list(range(6))
    assert {row["persona"] for row in dialogues} == {"A shy one.", "A proud one.", "A tired one."}
    assert summary == (6, sum(row["reward"] for row in dialogues) / 6, 0)
    assert dialogues[0]["messages"][0] == {"role": "user", "content": "Teach me."}
    assert [m["role"] for m in dialogues[0]["messages"]][1::2] == ["assistant", "assistant"]
    assert len({body["seed"] for body in fake.bodies}) == len(fake.bodies)


def test_the_same_command_adds_what_is_missing(fake, tmp_path):
    out = tmp_path / "out.jsonl"
    run(fake, out, count=4)
    first = out.read_text()
    out.write_text(first + '{"messages": [{"role": "us')  # cut by a full disk or a kill
    assert run(fake, out, count=6).rows == 6
    assert out.read_text().startswith(first)
    assert sorted(row["number"] for row in rows(out)) == list(range(6))
    prompt_count = len(fake.prompts)
    assert run(fake, out, count=6).rows == 6
    assert len(fake.prompts) == prompt_count
    with pytest.raises(UserError, match="line 1: imagined for another task; name another file"):
        run(fake, out, task=TASK._replace(goal="Is it fun?"))


def test_what_cannot_be_read_is_left_out_and_asked_for_again(fake, tmp_path):
    out = tmp_path / "out.jsonl"
    fake.fault = lambda number, prompt: "Hm." if "A proud one." in prompt else None
    summary = run(fake, out)
    assert (summary.rows, summary.unreadable) == (4, 2)
    fake.fault = lambda number, prompt: None
    assert run(fake, out)[::2] == (6, 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((401, "no such key"), "status 401 Unauthorized: no such key"),
        ((500, ""), "status 500 Internal Server Error; "),
    ],
)
def test_a_failing_endpoint_is_named_with_what_is_done(fake, tmp_path, monkeypatch, fault, message):
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    out = tmp_path / "out.jsonl"
    fake.fault = lambda number, prompt: fault if fake.dialogues > 3 else None
    with pytest.raises(UserError, match=message) as caught:
        run(fake, out, concurrency=1)
    assert f"3 of 6 dialogues are in {out}, and the same command adds" in str(caught.value)
    assert len(rows(out)) == 3
    fake.fault = lambda number, prompt: None
    assert run(fake, out).rows == 6


def test_a_busy_endpoint_is_asked_again(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    seeds = []

    def busy(number, prompt):
        seeds.append(fake.bodies[number]["seed"])
        return (429, "busy") if seeds.count(seeds[-1]) < 3 else None

    fake.fault = busy
    assert run(fake, tmp_path / "out.jsonl", concurrency=1).rows == 6
    assert len(seeds) == 3 * 13


def test_an_endpoint_that_hangs_has_a_deadline(fake, tmp_path):
    released = threading.Event()
    fake.fault = lambda number, prompt: released.wait(10) and None
    with pytest.raises(UserError, match=r"no reply within 0.3 s \(--timeout\); 0 of 6 dialogues"):
        run(fake, tmp_path / "out.jsonl", timeout=0.3)
    released.set()


def test_an_endpoint_that_hardly_says_anything_has_one_too(fake, tmp_path):
    fake.pause = 0.05
    with pytest.raises(UserError, match=r"no reply within 0.3 s \(--timeout\); 0 of 6 dialogues"):
        run(fake, tmp_path / "out.jsonl", timeout=0.3)


def test_what_is_no_endpoint(tmp_path):
    nobody = Model("http://127.0.0.1:9", "some")
    with pytest.raises(UserError, match="Connection refused; 0 of 1 dialogues"):
        imagine(TASK, nobody, tmp_path / "out.jsonl", count=1, seed=0)
    with pytest.raises(UserError, match="--url = 'file:///etc'; write an address such as http://"):
        Model("file:///etc", "some")


def test_only_a_file_of_dialogues_is_added_to(fake, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"question": "2+2?"}\n')
    with pytest.raises(
        UserError, match="out.jsonl, line 1: not a row of jrl imagine; name another"
    ):
        run(fake, out)
    assert out.read_text() == '{"question": "2+2?"}\n'
    out.write_text("Dear diary")  # without an end, as a row that was cut
    with pytest.raises(
        UserError, match="out.jsonl, line 1: not a row of jrl imagine; name another"
    ):
        run(fake, out)
    assert out.read_text() == "Dear diary"
    assert not fake.prompts


def test_one_command_writes_at_a_time(fake, tmp_path):
    out = tmp_path / "out.jsonl"
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another command; wait, or name"):
            run(fake, out)


def command(fake, tmp_path, *more):
    task = tmp_path / "task.toml"
    task.write_text(TOML)
    words = ["imagine", str(task), "--url", fake.url, "--model", "some"]
    return [*words, "--out", str(tmp_path / "out.jsonl"), "--count", "4", *more]


def test_the_command(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    done = CliRunner().invoke(app, command(fake, tmp_path, "--key-variable", "MY_KEY"))
    assert done.exit_code == 0, done.output
    assert "0 of 4 dialogues are there; 3 personas" in done.output
    assert "out.jsonl: 4 dialogues, mean reward " in done.output
    failed = CliRunner().invoke(app, command(fake, tmp_path, "--key-variable", "NO_KEY"))
    assert failed.exit_code == 2
    assert "--key-variable NO_KEY: no such environment variable" in failed.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gaol = 1", "key = 'gaol'; did you mean 'goal'"),
        ("turns = 0", "turns = 0; write a whole number of at least 1"),
        ("criteria = 'x'", "criteria = 'x'; write a list of texts"),
        ("", "description is missing"),
        ("agent = ''", "agent = ''; write a text"),
        ("x", "not valid TOML"),
    ],
)
def test_a_task_is_checked(text, message, tmp_path):
    path = tmp_path / "task.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"task.toml: {message}"):
        read_task(path)


def test_the_example_is_a_task():
    task = read_task("configs/imagine/teacher.toml")
    assert task.criteria
    assert task.personas == 20


def test_an_interrupt_keeps_what_is_done(fake, tmp_path):
    """The rest of the requests hang; what was written is whole, and the next run adds the rest."""
    released, out = threading.Event(), tmp_path / "out.jsonl"
    fake.fault = lambda number, prompt: (released.wait(30) and None) if fake.dialogues > 2 else None
    words = [sys.executable, "-m", "jrl", *command(fake, tmp_path, "--concurrency", "1")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    end = time.monotonic() + 60
    while time.monotonic() < end and not (out.exists() and out.read_text().count("\n") == 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    released.set()
    assert process.returncode == 130, stderr
    assert "jrl: stopped; what is done is in" in stderr
    assert [row["number"] for row in rows(out)] == [0, 1]
    fake.fault = lambda number, prompt: None
    assert CliRunner().invoke(app, command(fake, tmp_path)).exit_code == 0
    assert sorted(row["number"] for row in rows(out)) == [0, 1, 2, 3]


def test_from_a_task_to_a_policy(fake, tmp_path, monkeypatch):
    """Imagined dialogues, then two steps of ILQL on them."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    run(fake, tmp_path / "out.jsonl", count=6)
    model = checkpoint(tmp_path / "model")
    changes = [f'model.path="{model}"', f'data.train="dialogues:{tmp_path}/out.jsonl"']
    changes += ["data.template=plain", "train.steps=2", "train.prompts=2", "train.microbatches=1"]
    changes += ["model.dtype=float32", "sampling.max_new_tokens=64", f'run.dir="{tmp_path}/run"']
    done = CliRunner().invoke(app, ["train", "configs/dialogues.toml", *changes])
    assert done.exit_code == 0, done.output
    assert "12 turns of the assistant in 6 dialogues, 6 with a reward, in 6 rows" in done.output
    steps = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in r]
    assert [step["skipped_updates"] for step in steps] == [0, 0]
    assert all(step["q_loss"] > 0 for step in steps)
