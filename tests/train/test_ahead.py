"""The training step, compiled in a thread of its own before the first batch is there."""

from __future__ import annotations

import json
import threading

import jax
import numpy as np
import pytest
import tokenizers
from compilations import compilations

from jrl.config import load_config
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run.run import train
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import ahead, build

SIZES = (
    *("train.mode=host", "train.steps=2", "warmup.steps=0", "eval.problems=2", "train.prompts=4"),
    *("model.config.layers=1", "checkpoint.every=0"),
)


@pytest.fixture
def compiled():
    """Programs compiled during a test."""
    with compilations() as compiled_programs:
        yield compiled_programs


@pytest.fixture
def on_text(tmp_path):
    """Settings of a run on questions, with a checkpoint and a tokenizer of letters."""
    words = {w: i for i, w in enumerate(["<stop>", *"abcdefghijklmnopqrstuvwxyz? "])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    sizes = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
    model = ModelConfig(vocab_size=32, max_length=64, **sizes)
    hf.save(tmp_path / "model", model, transformer(model).init(jax.random.key(0)))
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    rows = [{"question": f"how many {what}?", "answer": "5"} for what in ("eels", "whales")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"model.path={json.dumps(str(tmp_path / 'model'))}",
        f"data.train={json.dumps(str(tmp_path / 'data.jsonl'))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("train.prompts=2", "reward_pool.workers=1", "checkpoint.every=0", "train.steps=2"),
        *("rewards={exact={}}", "method=grpo"),
    )


def trained(path, settings, directory):
    config = load_config(path, (*settings, f"run.dir={json.dumps(str(directory))}"))
    train(config, echo=lambda line: None)
    records = read_jsonl(directory / "metrics.jsonl")[1:]
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in records]


def test_the_step_of_a_run_on_text_is_compiled_once_beside_the_sampler(
    compiled, monkeypatch, tmp_path, on_text
):
    monkeypatch.setattr(ahead, "pays", lambda run: True)
    assert len(trained(None, on_text, tmp_path / "run")) == 2
    assert [each.thread for each in compiled if each.program == "jit(step)"] == ["compile-step"]


@pytest.mark.slow
def test_so_is_that_of_a_task_and_its_numbers_are_those_of_a_step_compiled_when_called(
    compiled, monkeypatch, tmp_path
):
    plain = trained("configs/tiny.toml", SIZES, tmp_path / "plain")
    assert [each.thread for each in compiled if each.program == "jit(step)"] == ["MainThread"]
    compiled.clear()
    monkeypatch.setattr(ahead, "pays", lambda run: True)
    assert trained("configs/tiny.toml", SIZES, tmp_path / "ahead") == plain
    assert [each.thread for each in compiled if each.program == "jit(step)"] == ["compile-step"]


def test_what_fails_in_the_thread_is_left_to_the_step_itself(monkeypatch, tmp_path):
    run = build.setup(load_config("configs/tiny.toml", (*SIZES, f"run.dir={tmp_path}")))
    assert not ahead.pays(run)  # a CPU
    monkeypatch.setattr(ahead, "pays", lambda run: True)

    def failing(run):
        raise RuntimeError("no such shape")

    monkeypatch.setattr(ahead, "abstract_batch", failing)
    with ahead.StepAhead(run) as step:
        step._wait()
        monkeypatch.setattr(step, "step", lambda *args: args)
        assert step(1, None, 2) == (1, None, 2)


def test_a_batch_of_other_shapes_does_not_wait_for_those_foreseen(monkeypatch, tmp_path):
    run = build.setup(load_config("configs/tiny.toml", (*SIZES, f"run.dir={tmp_path}")))
    monkeypatch.setattr(ahead, "pays", lambda run: True)
    go, started = threading.Event(), threading.Event()

    def compile_slowly(self):
        self._batch = {"tokens": jax.ShapeDtypeStruct((4, 2), "int32")}
        started.set()
        go.wait(60)

    monkeypatch.setattr(ahead.StepAhead, "_compile", compile_slowly)
    with ahead.StepAhead(run) as step:
        started.wait(60)
        monkeypatch.setattr(step, "step", lambda *args: step._thread)
        assert step(0, {"tokens": np.zeros((4, 3), np.int32)}).is_alive()
        go.set()
        assert step(0, {"tokens": np.zeros((4, 2), np.int32)}) is None


@pytest.mark.parametrize(
    ("mode", "platform", "processes", "answer"),
    [("host", "gpu", 1, True), ("packed", "gpu", 1, False), ("host", "tpu", 2, False)],
)
def test_it_pays_on_an_accelerator_of_one_process(mode, platform, processes, answer, monkeypatch):
    run = build.setup(load_config("configs/tiny.toml", (*SIZES, f"train.mode={mode}")))
    monkeypatch.setattr(ahead, "named_platform", lambda name: platform)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert ahead.pays(run) is answer
