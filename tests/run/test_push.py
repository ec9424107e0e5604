"""Exports with a model card, and their way to a hub on this machine."""

import base64
import contextlib
import http.server
import json
import threading
from pathlib import Path

import hub_mirror
import pytest
import yaml
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.errors import UserError
from jrl.run.model_card import base_license, model_card
from jrl.run.push import check_push, push_directory
from jrl.storage.metrics import RunWriter


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as creating a repository and one commit ask for."""

    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def do_GET(self):
        if self.headers.get("authorization") != "Bearer hf_secret":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/whoami-v2":
            self.answer({"name": "me", "type": "user"})
        else:  # what the model holds already
            self.answer({"id": "me/sorter", "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        data, url = self.body(), f"http://{self.headers['host']}/me/sorter"
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(data))
            self.answer({"url": url, "name": "me/sorter"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(data)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self.answer({"files": modes})
        elif "/commit/main" in self.path:
            for line in data.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.server.files[entry["value"]["path"]] = content
            self.answer({"commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})  # /api/validate-yaml

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files = [], {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.url = url
    with contextlib.closing(server.socket):
        yield server
        server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint with a license in its card."""
    directory = hub_mirror.checkpoint(tmp_path_factory.mktemp("models") / "base", chat=True)
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    return directory


def front_of(text):
    _, front, rest = text.split("---\n", 2)
    return yaml.safe_load(front), rest


@pytest.fixture
def target(base, tmp_path):
    """The first arguments of ``jrl convert``."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(hub_mirror.lines([{"question": "a", "answer": "b"}]))
    return ["convert", f'model.path="{base}"', str(tmp_path / "out"), f'data.train="{rows}"']


def test_the_command_writes_a_card_and_pushes_what_it_wrote(hub, target, tmp_path):
    out = tmp_path / "out"
    arguments = [*target, "rewards=exact", "--push", "me/sorter", "--private"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(out), f"{hub.url}/me/sorter"]
    assert hub.created[0]["name"] == "sorter"
    (created,) = hub.created
    assert created.get("private") is True or created.get("visibility") == "private"
    here = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert hub.files == here
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(here)
    front, body = front_of(here["README.md"].decode())
    assert "base_model" not in front  # a directory, which the Hub would take for a model of its own
    assert "| base model | base |" in body
    assert front["license"] == "apache-2.0"
    assert "# me/sorter" in body
    assert "hf_secret" not in here["README.md"].decode()


def test_pushed_adapters_name_their_base_without_a_path_of_this_machine(hub, target, tmp_path):
    adapters = [*target, "rewards=exact", "lora.rank=2", "--adapters"]
    result = CliRunner().invoke(app, [*adapters, "--push", "me/sorter"])
    assert result.exit_code == 0, result.output
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "base"
    assert not any(str(tmp_path).encode() in content for content in hub.files.values())


def test_without_push_nothing_is_sent_and_the_directory_is_the_same(hub, target, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [*target, "rewards=exact"])
    assert result.exit_code == 0, result.output
    assert "# out" in (out / "README.md").read_text()
    assert not hub.created
    assert not hub.files


def test_a_card_says_what_was_trained_on_what_and_how(tmp_path):
    run = tmp_path / "secret place" / "run"
    run.mkdir(parents=True)
    summary = {"steps": 40, "accuracy_after": 0.5, "eval_after": {"pass@4": 0.75}, "report": "x"}
    (run / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "rewards.py").write_text("def right(samples):\n    return [0.0 for _ in samples]\n")
    config = load_config(
        None,
        [
            "method=gspo",
            "model.path=Qwen/Qwen3-0.6B",
            "data.train=openai/gsm8k/main",
            f'rewards={{"{tmp_path}/rewards.py:right"={{}}}}',
            "optimizer.learning_rate=3e-6",
            f'run.dir="{run}"',
        ],
    )
    text = model_card(config, step=40, name="me/mine", adapters=True)
    front, body = front_of(text)
    assert front == {
        "library_name": "peft",
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "tags": ["jrl", "reinforcement-learning", "gspo"],
        "datasets": ["openai/gsm8k"],
    }
    assert "[arXiv:2507.18071](https://arxiv.org/abs/2507.18071)" in body
    assert "| accuracy after | 0.5 |" in body
    assert "| eval pass@4 | 0.75 |" in body
    (command,) = [line.strip() for line in body.splitlines() if line.startswith("    jrl train")]
    assert "method=gspo model.path=Qwen/Qwen3-0.6B" in command
    assert "rewards.py:right" in command
    assert "optimizer.learning_rate=3e-06" in command
    assert str(tmp_path) not in text


def test_a_card_of_step_0_has_no_metrics(tmp_path):
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    RunWriter(config)
    assert "The run has recorded none." in model_card(config, step=0, name="me/mine")


def test_the_license_is_that_of_the_base_where_it_is_known(base, monkeypatch, tmp_path):
    license_of = lambda path: base_license(load_config(None, [f'model.path="{path}"']))  # noqa: E731
    assert license_of(base) == "apache-2.0"
    assert license_of(hub_mirror.checkpoint(tmp_path / "other")) is None
    hub_mirror.add(tmp_path, "org/m", "model", {"README.md": "---\nlicense: mit\n---\n"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    load = lambda *_, **__: str(  # noqa: E731
        Path(tmp_path) / "models--org--m" / "snapshots" / hub_mirror.COMMITS["first"] / "README.md"
    )
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", load)
    assert license_of("org/m") == "mit"


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("sorter", "hf_secret", "write OWNER/NAME"),
        ("me/sorter", None, "there is no token of the Hub; set HF_TOKEN"),
        ("me/sorter", "hf_wrong", "--push me/sorter: "),
    ],
)
def test_what_the_hub_will_refuse_is_said_before_the_export(hub, name, token, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as error:
        check_push(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "hf_wrong" not in str(error.value)
    result = CliRunner().invoke(app, ["convert", "seed=1", "out", "--private"])
    assert "--private is for --push" in result.output


def test_a_hub_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="--push me/sorter: "):
        push_directory(tmp_path, "me/sorter")
