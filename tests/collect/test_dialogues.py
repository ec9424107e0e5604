"""Runs on dialogues: the loss is that of the assistant's words, and who cannot learn from them."""

import json

import jax
import numpy as np
import pytest
from hub_mirror import byte_tokenizer

from jrl.config import load_config
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.run.diagnostics import obstacles
from jrl.run.run import train
from jrl.train import build
from jrl.train.trainable import check_trainable

SHAPE = ModelConfig(
    vocab_size=257, layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=16,
    max_length=128,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def weights():
    params = jax.tree.map(lambda x: 2 * x, transformer(SHAPE).init(jax.random.key(0)))
    return jax.device_get(params)


@pytest.fixture(scope="module")
def model(weights, tmp_path_factory):
    """A Hugging Face directory with a byte tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    hf.save(directory, SHAPE, weights)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    about = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def talk(number):
    answer = ["yes", "no, 7", "it is"][number % 3]
    turns = [("user", "2+2?"), ("assistant", "3"), ("user", "no"), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Six dialogues that open alike, the last without a reward."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = [{"messages": talk(i), "rewards": [0, i % 2]} for i in range(5)]
    rows.append({"messages": talk(5)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(model, talks, *more):
    base = [
        f'model.path="{model}"',
        f'data.train="dialogues:{talks}"',
        "sampling.max_new_tokens=32",
    ]
    base += ["train.prompts=2", "train.steps=2", "sampling.group=3", "checkpoint.every=0"]
    return load_config(None, [*base, "optimizer.learning_rate=1e-3", *more])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("method", ["ilql", "filtered_bc", "sft", "mc_returns", "awr"])
def test_a_run_trains_on_a_file(method, model, talks, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    printed = []
    more = [f"method={method}", f'run.dir="{tmp_path}/run"', "log.samples_every=1"]
    train(config_of(model, talks, *more), echo=printed.append)
    (line,) = (line for line in printed if line.startswith("data.train: "))
    row_count = 6 if method == "sft" else 5
    assert f"2 groups of {row_count} rows" in line
    assert f"{6 - row_count} without a reward" in line
    assert "12 turns of the assistant in 6 dialogues, 5 with a reward, in 6 rows" in line
    steps = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in r]
    assert len(steps) == 2
    for step in steps:
        assert np.isfinite([v for v in step.values() if isinstance(v, float)]).all()
        assert step["grad_norm"] > 0
        assert step["skipped_updates"] == 0
    turns = lines(tmp_path / "run" / "samples.jsonl")[0]["turns"]
    assert [turn["text"] for turn in turns][:2] == ["3", "u:no;a:"]


def test_the_loss_of_sft_is_the_likelihood_of_the_assistants_words(
    model, weights, talks, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    more = ["method=sft", f'run.dir="{tmp_path}/run"', "train.steps=1", "model.dtype=float32"]
    train(config_of(model, talks, *more), echo=lambda line: None)
    (step,) = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in r]
    network, tokenizer, token_logprobs = transformer(SHAPE), load_tokenizer(model), []

    @jax.jit
    def logprobs_of(weights, *inputs):
        hidden, _ = network.hidden(weights, *inputs)
        return jax.nn.log_softmax(network.logits(weights, hidden))[0]

    for i in range(6):
        last = talk(i)[-1]["content"]
        parts = [("u:2+2?;a:", False), ("3<end>", True), ("u:no;a:", False), (f"{last}<end>", True)]
        encoded = [(tokenizer.encode(text), by_assistant) for text, by_assistant in parts]
        ids = np.array([token for part, _ in encoded for token in part], np.int32)[None]
        mask = np.array([mine for part, mine in encoded for _ in part])
        places = np.arange(ids.shape[1], dtype=np.int32)[None]
        logprobs = np.asarray(logprobs_of(weights, ids, places, np.ones_like(ids)), np.float64)
        token_logprobs += logprobs[places[0, :-1], ids[0, 1:]][mask[1:]].tolist()
    assert step["completion_tokens"] == len(token_logprobs)
    assert step["loss"] == pytest.approx(-np.mean(token_logprobs), abs=1e-5)


def test_a_run_that_was_stopped_resumes_where_it_was(model, talks, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)

    def run(name, *more):
        base = ["method=filtered_bc", f'run.dir="{tmp_path}/{name}"', "train.prompts=1"]
        train(config_of(model, talks, *base, "checkpoint.every=1", *more), echo=lambda line: None)
        return [r["loss"] for r in lines(tmp_path / name / "metrics.jsonl") if "grad_norm" in r]

    unbroken = run("whole", "train.steps=3")
    run("parts", "train.steps=1")
    assert run("parts", "train.steps=3") == unbroken


@pytest.mark.parametrize(
    "method",
    ["grpo", "ppo", "reinforce", "rloo", "a2c", "nlpo", "spin", "remax", "bfs_prover"],
)
def test_methods_that_need_who_drew_are_refused(method, model, talks):
    config = config_of(model, talks, f"method={method}")
    with pytest.raises(UserError, match=f"'dialogues:FILE' does not go with method = {method!r}"):
        build.setup(config)


def test_what_a_run_lacks(model, talks, tmp_path):
    assert obstacles(config_of(model, talks, "method=ilql")) == []
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n')
    (line,) = obstacles(config_of(model, bad, "method=ilql"))
    assert line == f"{bad}, line 1: no message is the assistant's; nothing could be learned"


def test_a_correction_needs_who_drew(model, talks):
    config = config_of(model, talks, "method=filtered_bc", "objective.correction=tis")
    with pytest.raises(
        UserError, match="were not sampled by a policy, .*; choose a method that learns"
    ):
        build.setup(config)


@pytest.mark.parametrize("method", ["dpo", "kto", "digirl", "a_lol", "kimi_k1_5"])
def test_others_that_learn_from_any_data_are_not(method, model, talks):
    check_trainable(build.setup(config_of(model, talks, f"method={method}")))
    assert not get_method(method).objective.surrogate.on_policy


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["sampling.max_new_tokens=9"],
            r"talks.jsonl, line 1: a row has 13 tokens after its prom",
        ),
        (
            ["sampling.max_new_tokens=4", "data.overlong=drop"],
            "row gives as reward or rewards, and",
        ),
        (["rewards.math.weight=1"], "rewards = 'math'; choose from reward"),
        (
            ["placement={}"],
            r"data.train = 'dialogues:FILE' does not go with \[placement\]: nothing",
        ),
        (["data.eval=x.jsonl"], "data.eval = 'x.jsonl' goes with"),
        (["data.overlong=truncate"], "data.overlong = 'truncate'; .*choose from drop, error"),
        (["data.train=dialogues:nowhere.jsonl"], "data.train = 'nowhere.jsonl': there is no such"),
        (["data.template=Q {question}"], "holds one question, and dialogues have many messages"),
        (["train.mode=compiled"], "train.mode = 'compiled' does not go with data.train: it"),
    ],
)
def test_what_does_not_go_together_is_named(model, talks, more, message):
    with pytest.raises(UserError, match=message):
        check_trainable(build.setup(config_of(model, talks, "method=ilql", *more)))


def test_long_and_unrewarded_dialogues_are_left_out_and_counted(model, talks):
    more = ["method=ilql", "sampling.max_new_tokens=14", "data.overlong=drop"]
    counts = build.setup(config_of(model, talks, *more)).data.counts["train"]
    assert (counts.rows, counts.dropped, counts.unrewarded) == (2, 3, 1)
