"""From a run or a checkpoint to a server, and the command that does it all."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from hub_mirror import byte_tokenizer
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.serving.launch import served_policy
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import RunWriter

SIZES = "{layers=1, embed_dim=8, heads=2, kv_heads=1, head_dim=4, mlp_dim=8}"
RUN = ["data.task=sorting", f"model.config={SIZES}", "seed=3"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with one checkpoint whose weights are all 0.5."""
    directory = tmp_path_factory.mktemp("runs") / "old"
    config = load_config(None, [*RUN, f'run.dir="{directory}"'])
    RunWriter(config)
    fresh = served_policy(load_config(None, RUN), checkpoint=None)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), fresh.params)
    with Checkpoints(directory / "checkpoints", 1) as checkpoints:
        checkpoints.save(5, {"step": np.int32(5), "params": {"policy": params}})
    return directory


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    """A Hugging Face directory with a byte tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    backend = byte_tokenizer()
    shape = ModelConfig(
        vocab_size=257,
        layers=1,
        embed_dim=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        mlp_dim=8,
        max_length=64,
    )
    hf.save(directory, shape, jax.device_get(transformer(shape).init(jax.random.key(0))))
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    config = {"eos_token": "<end>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_run_gives_its_checkpoint_and_its_tasks_sizes(run_dir):
    config = load_config(run_dir / "config.toml", [f'run.dir="{run_dir}"'])
    policy = served_policy(config, checkpoint=None)
    assert {float(x) for leaf in jax.tree.leaves(policy.params) for x in leaf.ravel()} == {0.5}
    assert policy.version == 5
    assert isinstance(policy.tokenizer, CharTokenizer)
    assert policy.prompt_tokens + policy.new_tokens == policy.network.max_length
    with pytest.raises(UserError, match="7"):
        served_policy(config, checkpoint=7)


def test_without_a_checkpoint_it_is_the_model_before_training():
    first, again, other = (
        served_policy(load_config(None, [*RUN, f"seed={seed}"]), checkpoint=None).params
        for seed in (3, 3, 4)
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))


def test_a_checkpoint_directory_needs_no_data(checkpoint_dir):
    path = f'model.path="{checkpoint_dir}"'
    policy = served_policy(load_config(None, [path, "sampling.max_new_tokens=24"]), checkpoint=None)
    _, params = hf.load(checkpoint_dir)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, policy.params))
    assert (policy.prompt_tokens, policy.new_tokens) == (40, 24)
    assert policy.tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi\n"
    with pytest.raises(UserError, match=r"max_new_tokens = 64: the model holds 64"):
        served_policy(load_config(None, [path, "sampling.max_new_tokens=64"]), checkpoint=None)
    with pytest.raises(UserError, match=r"model\.path is missing"):
        served_policy(load_config(None, []), checkpoint=None)


@pytest.mark.parametrize("engine", ["jrl", "jetstream"])
def test_the_command_passes_its_options(engine, run_dir, checkpoint_dir, monkeypatch):
    calls = []

    def taker(name):
        return lambda config, options, **more: calls.append((name, config, options, more))

    stand_in = types.SimpleNamespace(
        serve_openai=taker("jrl"),
        serve_jetstream=taker("jetstream"),
        ServerOptions=types.SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "jrl.serving.launch", stand_in)
    monkeypatch.setattr("jrl.serving.launch", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "jrl.zoo.jetstream.launch", stand_in)
    monkeypatch.setenv("JRL_CACHE_DIR", "")
    arguments = ["--engine", engine, "--slots", "3", "--queue", "5", "--grace", "2", "--port", "0"]
    arguments += ["--chunk", "6"]
    monkeypatch.setenv("JRL_API_KEY", "sesame")
    flags = ["--name", "it", "--api-key", "simsim", "--record", "kept", "--log-contents"]
    for target, more in ((run_dir, ["--checkpoint", "5"]), (checkpoint_dir, flags)):
        result = CliRunner().invoke(app, ["serve", str(target), "seed=9", *arguments, *more])
        assert result.exit_code == 0, result.output
    (name, config, options, first), (_, other, named_options, second) = calls
    assert (name, config.seed, config.run.dir) == (engine, 9, str(run_dir))
    assert (options.name, options.slots, options.queue, options.chunk) == ("old", 3, 5, 6)
    assert (options.grace_seconds, options.host, options.port) == (2.0, "127.0.0.1", 0)
    assert (first["checkpoint"], second["checkpoint"]) == (5, None)
    assert (other.model.path, named_options.name) == (str(checkpoint_dir), "it")
    assert (options.api_key, named_options.api_key) == ("sesame", "simsim")
    assert (options.record, named_options.record) == (None, "kept")
    assert (options.log, named_options.log) == ("nothing", "contents")


def test_an_unknown_engine_is_named():
    result = CliRunner().invoke(app, ["serve", "seed=1", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "--engine = 'vllm'; choose from jetstream, jrl" in result.stderr


@pytest.mark.extra("serve")
def test_the_command_serves_and_stops_on_a_signal(checkpoint_dir):
    command = [sys.executable, "-m", "jrl", "serve", str(checkpoint_dir), "--port", "0"]
    command += [
        "--log-requests",
        "--slots",
        "2",
        "sampling.max_new_tokens=8",
        "data.max_prompt_tokens=16",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            lines = iter(process.stdout.readline, "")
            first = next(line for line in lines if "are refused" not in line)
            sizes = "2 slots, prompts of up to 16 tokens and completions of up to 8"
            assert first == f"compiling for {sizes} ...\n"
            assert re.fullmatch(r"compiled in \d+ s\n", next(lines))
            place = re.fullmatch(r"serving tiny at http://(127\.0\.0\.1):(\d+)/v1\n", next(lines))
            connection = http.client.HTTPConnection(*place.groups(), timeout=60)
            with contextlib.closing(connection):
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                response = connection.getresponse()
                reply = json.loads(response.read())
            assert response.status == 200, reply
            assert 1 <= reply["usage"]["completion_tokens"] <= 8
            assert reply["usage"]["prompt_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            line, end = process.stdout.read().splitlines()
            tokens = reply["usage"]["completion_tokens"]
            spoken = rf"POST /v1/chat/completions  200  3 \+ {tokens} tokens  \d+ ms"
            assert re.fullmatch(spoken, line)
            assert end == "stopped"
        finally:
            process.kill()
