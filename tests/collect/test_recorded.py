"""Runs on what a server recorded: from the checkpoint that drew it, ratios begin at one."""

import json

import jax
import numpy as np
import pytest
from hub_mirror import byte_tokenizer

from jrl.collect.sources import simple_request
from jrl.config import load_config
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.run.diagnostics import obstacles
from jrl.run.run import train
from jrl.sampling.engine import Engine
from jrl.serving.launch import served_policy
from jrl.serving.openai_requests import parse
from jrl.serving.record import Recorder
from jrl.train import build
from jrl.train.batches import run_source
from jrl.train.trainable import check_trainable

SHAPE = ModelConfig(
    vocab_size=257, layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=16,
    max_length=64,
)  # fmt: skip
GROUP, SESSIONS, TURNS = 4, 6, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory with a byte tokenizer, whose weights are not all alike."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    backend = byte_tokenizer()
    params = jax.tree.map(lambda x: 2 * x, transformer(SHAPE).init(jax.random.key(0)))
    hf.save(directory, SHAPE, jax.device_get(params))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return directory


@pytest.fixture(scope="module")
def sessions(model, tmp_path_factory):
    """Sessions of two turns with a tool, the first one without a reward."""
    directory = tmp_path_factory.mktemp("recorded")
    config = load_config(None, [f'model.path="{model}"', "sampling.max_new_tokens=12"])
    policy = served_policy(config, checkpoint=None)
    tokenizer = policy.tokenizer
    with jax.set_mesh(policy.mesh):
        engine = Engine(
            policy.network,
            policy.params,
            slots=2,
            prompt_tokens=40,
            max_new_tokens=12,
            stop_tokens=tokenizer.stop_ids,
            tokenizer=tokenizer,
            version=policy.version,
        )
        recorder = Recorder(directory)
        recorder.begin({"model": "tiny"})
        for i in range(SESSIONS):
            ids = [*tokenizer.encode("2+2=")]
            for turn in range(TURNS):
                body = {
                    "model": "tiny",
                    "prompt": ids,
                    "max_tokens": 3 + i % 3,
                    "seed": 9 * i + turn,
                }
                parsed = parse(
                    body, chat=False, tokenizer=tokenizer, limits=engine.limits, model="tiny"
                )
                place = recorder.place(f"s{i}", [ids])
                engine.submit(parsed.requests[0])
                *_, last = engine.run()
                recorder.completed(place, parsed, f"cmpl-{i}-{turn}", 0, last.completion)
                ids = [*ids, *last.completion.tokens.tolist(), *tokenizer.encode(" no;")]
            if i:
                recorder.reward(f"s{i}", i % 2, done=True)
        recorder.close()
    return directory


TICKET = np.zeros(1, np.int32)


def config_of(model, sessions, *more):
    base = [
        f'model.path="{model}"',
        f'data.train="recorded:{sessions}"',
        "sampling.max_new_tokens=24",
    ]
    base += ["train.prompts=1", "train.steps=1", f"sampling.group={GROUP}", "checkpoint.every=0"]
    return load_config(None, [*base, "optimizer.learning_rate=1e-3", *more])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewarded(sessions):
    (path,) = sessions.iterdir()
    return [x for x in lines(path) if x["kind"] == "completion" and x["session"] != "s0"]


@pytest.mark.parametrize("method", ["grpo", "filtered_bc", "sft", "ilql"])
def test_a_run_trains_on_what_was_drawn(method, model, sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    printed = []
    more = [f"method={method}", f'run.dir="{tmp_path}/run"', "log.samples_every=1"]
    train(config_of(model, sessions, *more), echo=printed.append)
    (line,) = (line for line in printed if line.startswith("data.train: "))
    row_count = SESSIONS if method == "sft" else SESSIONS - 1
    assert f"of {row_count} rows" in line
    assert f"{SESSIONS - row_count} without a reward" in line
    records = lines(tmp_path / "run" / "metrics.jsonl")
    (step,) = (r for r in records if "grad_norm" in r)
    assert np.isfinite(step["loss"])
    assert step["grad_norm"] > 0
    assert step["skipped_updates"] == 0
    if method != "sft":
        assert step["logprob_diff"] == pytest.approx(0, abs=1e-4)
        assert step["reward"] > 0
    if method == "grpo":
        assert step["ratio"] == pytest.approx(1, abs=1e-4)
    turns = lines(tmp_path / "run" / "samples.jsonl")[0]["turns"]
    assert [turn["by"] for turn in turns] == ["policy", "environment", "policy"]
    assert turns[1]["text"] == " no;"


def test_the_batch_is_what_is_on_disk(model, sessions):
    run = build.setup(config_of(model, sessions, "sampling.group=8", "data.shuffle=false"))
    check_trainable(run)
    source = run_source(run, None)
    groups = source.draw(simple_request(None, {}, 0, TICKET, rows=source.order(TICKET)))
    completions = rewarded(sessions)
    mask = groups.rollout.mask
    assert groups.rollout.tokens[mask].tolist() == [t for x in completions for t in x["drawn"]]
    logprobs = groups.rollout.sampler_logprobs[mask].tolist()
    assert logprobs == [p for x in completions for p in x["logprobs"]]
    assert set(groups.rollout.versions[mask].tolist()) == {0}
    assert set(groups.rollout.versions[~mask].tolist()) == {-1}
    assert groups.rewards[0, :, 0].tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert groups.subject[0].text == "2+2="


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["sampling.temperature=0.7"], "on record are 12 with temperature = 1,"),
        (["sampling.max_new_tokens=4"], "after its prompt, and sampling.max_new_tokens is 4"),
        (["sampling.max_new_tokens=4", "data.overlong=drop"], "no row is left of 6: 1 have no"),
        (["rewards.math.weight=1"], "rewards = 'math'; choose from reward"),
        (["method=remax"], "'recorded:DIR' does not go with method = 'remax', which draws greedy"),
        (
            ["placement={}"],
            r"data.train = 'recorded:DIR' does not go with \[placement\]: nothing",
        ),
        (["data.eval=x.jsonl"], "data.eval = 'x.jsonl' goes with"),
        (["data.train=recorded:nowhere"], "there is no directory 'nowhere'"),
        (["train.mode=compiled"], "train.mode = 'compiled' does not go with data.train: it"),
    ],
)
def test_what_does_not_go_together_is_named(model, sessions, more, message):
    with pytest.raises(UserError, match=message):
        check_trainable(build.setup(config_of(model, sessions, *more)))


def test_what_a_run_lacks(model, sessions):
    assert obstacles(config_of(model, sessions)) == []
    (line,) = obstacles(config_of(model, "nowhere"))
    assert "there is no directory 'nowhere'" in line


def test_overlong_rows_are_dropped_and_counted(model, sessions):
    lengths = {}
    for line in rewarded(sessions):
        size = len(line["prompt"]) + len(line["drawn"])
        lengths[line["session"]] = size - len("2+2=")
    limit = max(lengths.values()) - 1
    more = [f"sampling.max_new_tokens={limit}", "data.overlong=drop", "sampling.group=8"]
    run = build.setup(config_of(model, sessions, *more))
    counts = run.data.counts["train"]
    over = sum(size > limit for size in lengths.values())
    assert (counts.dropped, counts.rows) == (over, len(lengths) - over)
