"""The main job end to end: a checkpoint that transformers wrote, questions in JSONL, and back."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge_server import judge_server
from needs_extra import require

from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate import evaluate_run, load_policy, sample_run
from jrl.judging.row_calls import RowCalls
from jrl.models import hf
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.run.export import export_run
from jrl.run.run import train
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import read_jsonl
from jrl.train import build, programs

require("dev", "torch", "transformers")
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)

GSM8K = pathlib.Path(__file__).parents[2] / "configs" / "gsm8k.toml"
THINGS = ("apples", "coins", "eggs", "boats", "cards", "shells", "plums", "maps", "nails", "cups")
CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
REWARDS = '''
import os
import pathlib
import zlib


def letters(samples):
    """Points for letters, so that completions of one prompt differ."""
    return [sum(c.isalpha() for c in s.completion) / len(s.tokens) for s in samples]


def embed(texts):
    """A retriever's vectors: counts of vowels."""
    return [[float(text.count(c)) for c in "aeiou"] for text in texts]


def half(samples):
    """A quarter of a point, and of every second completion nothing."""
    return [0.25 if zlib.crc32(s.tokens.tobytes()) % 2 else None for s in samples]


def coin(samples):
    """0 or 1 by the tokens; always 0 for two prompts of three, whose groups then say nothing."""
    return [float(s.prompt.id % 3 == 0 and zlib.crc32(s.tokens.tobytes()) % 2) for s in samples]


def mood(samples):
    """0 or 1 by chance, another time another; who asked for which prompt is noted in a file."""
    with pathlib.Path(os.environ["MOOD"]).open("a") as notes:
        notes.writelines(f"{os.environ['MOOD_OF']} {s.prompt.id}\\n" for s in samples)
    return [float(os.urandom(1)[0] % 2) for s in samples]
'''


def rows(first, count):
    """Problems in the form that GSM8K publishes."""
    for i in range(first, first + count):
        a, b, what = i + 2, 3 * i + 1, THINGS[i % len(THINGS)]
        yield {
            "question": f"Ada has {a} {what} and finds {b} more. How many {what} has she now?",
            "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {what}.\n#### {a + b:,}",
            "source": what,
        }


def write_rows(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Data, rewards, and one Qwen3 checkpoint written whole and in shards."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    root = tmp_path_factory.mktemp("text_run")
    long = {"question": "Ada counts. " * 60 + "How many?", "answer": "#### 60"}
    write_rows(root / "train.jsonl", [*rows(0, 9), long, *rows(9, 2)])
    write_rows(root / "eval.jsonl", rows(40, 6))
    (root / "rewards.py").write_text(REWARDS)

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|turn|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [r[key] for r in rows(0, 40) for key in ("question", "answer")]
    backend.train_from_iterator(texts, trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|end|>",
            pad_token="<|pad|>",
            chat_template=CHAT,
        )
        config = transformers.Qwen3Config(
            vocab_size=304,  # more rows than the tokenizer has ids, as published checkpoints have
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config)
        with torch.no_grad():
            for value in model.parameters():
                value += 0.2 * torch.randn_like(value)
        model.save_pretrained(root / "whole")
        model.save_pretrained(root / "shards", max_shard_size="20KB")
        for name in ("whole", "shards"):
            tokenizer.save_pretrained(root / name)
    assert len(list((root / "shards").glob("*.safetensors"))) > 1
    return root


def settings(place, run, *more, model="whole"):
    """configs/gsm8k.toml with this data and this model, at sizes for a test."""
    return load_config(
        GSM8K,
        [
            f"run.dir={json.dumps(str(run))}",
            f"model.path={json.dumps(str(place / model))}",
            f"data.train={json.dumps(str(place / 'train.jsonl'))}",
            f"data.eval={json.dumps(str(place / 'eval.jsonl'))}",
            "model.dtype=float32",
            "data.max_prompt_tokens=170",
            "sampling.group=4",
            "sampling.max_new_tokens=6",
            "optimizer.learning_rate=1e-3",
            "optimizer.warmup_steps=0",
            "train.prompts=4",
            "train.microbatches=2",
            "train.steps=3",
            "mesh.fsdp=1",
            "eval.every=2",
            "eval.samples=3",
            "eval.temperature=1.0",
            "eval.variants_of=source",
            "checkpoint.every=1",
            "log.samples_every=1",
            "reward_pool.workers=1",
            f"rewards={{math={{}}, {reward(place, 'letters')}={{weight=0.5}}}}",
            *more,
        ],
    )


def reward(place, function):
    return json.dumps(f"{place / 'rewards.py'}:{function}")


@pytest.fixture(scope="module")
def base(place, tmp_path_factory):
    """One whole run: (config, summary, lines for people, records, samples)."""
    config = settings(place, tmp_path_factory.mktemp("base") / "run")
    lines = []
    summary = train(config, echo=lines.append)
    directory = pathlib.Path(config.run.dir)
    metrics = read_jsonl(directory / "metrics.jsonl")
    return config, summary, lines, metrics, read_jsonl(directory / "samples.jsonl")


@pytest.fixture
def quick(place, tmp_path, monkeypatch):
    """Runs a variant in this process, without evaluations and without a report."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)

    def run(*more):
        config = settings(
            place,
            tmp_path / "run",
            "data.eval=",
            "eval.every=0",
            "train.steps=2",
            "checkpoint.every=0",
            "reward_pool.workers=0",
            "train.microbatches=1",
            f"rewards={{{reward(place, 'letters')}={{}}}}",
            *more,
        )
        train(config, echo=lambda line: None)
        directory = pathlib.Path(config.run.dir)
        return (
            config,
            read_jsonl(directory / "metrics.jsonl")[1:],
            read_jsonl(directory / "samples.jsonl"),
        )

    return run


def finite(records, *names):
    """Every number of every record is finite (they are null in JSON otherwise)."""
    for record in records:
        assert [k for k, v in record.items() if v is None] == []
        assert set(names) <= record.keys()
    return True


def test_metrics_begin_with_a_header_and_have_a_record_a_step(base):
    config, _, _, (header, *records), _ = base
    assert {"versions", "device", "mesh", "config", "seed"} <= header.keys()
    assert header["config"]["data"]["train"] == config.data.train
    assert [r["step"] for r in records] == [1, 2, 3]
    always = ("loss", "reward", "kl", "grad_norm", "length", "tokens_per_second", "compiles")
    assert finite(records, *always, "reward/math", "reward_timeouts", "reward_errors")
    (letters,) = (k for k in records[0] if k.startswith("reward/") and k.endswith(":letters"))
    for record in records:
        parts = record["reward/math"] + 0.5 * record[letters]
        assert record["reward"] == pytest.approx(parts, abs=1e-5)
        assert record["grad_norm"] > 0
        assert 0 < record["slot_use"] <= 1
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the start
    assert records[2]["kl"] > 1e-6
    assert [r["prompts"] for r in records] == [4, 8, 12]
    assert [("eval/pass@2" in r, "eval/majority" in r) for r in records] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def test_prompts_over_the_limit_are_dropped_and_counted(base):
    lines = base[2]
    assert any("data.train: 11 prompts of 12 rows; too long: 1 dropped" in x for x in lines)


def test_samples_keep_the_reward_parts(base):
    samples = base[4]
    trained = [s for s in samples if "split" not in s]
    assert {s["step"] for s in trained} == {1, 2, 3}
    for s in trained:
        assert "<|turn|>user\nAda has" in s["prompt"]
        assert s["prompt"].startswith("<|turn|>system\nReason step by step")
        assert s["answer"].isdigit()
        (letters,) = (v for k, v in s["rewards"].items() if k.endswith(":letters"))
        assert s["reward"] == pytest.approx(s["rewards"]["math"] + 0.5 * letters)
        assert s["length"] <= 6
        assert (s["stop"] == "length") <= (s["length"] == 6)
    assert len({s["completion"] for s in trained[:4]}) > 1
    assert {s["step"] for s in samples if s.get("split") == "eval"} == {0, 2, 3}


def test_the_run_directory_keeps_the_contract(base):
    config, summary, *_ = base
    directory = pathlib.Path(config.run.dir)
    assert {p.name for p in directory.iterdir()} >= {
        *("config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "report"),
        "summary.json",
    }
    stored = json.loads((directory / "summary.json").read_text())
    keys = ("accuracy_before", "accuracy_after", "steps", "train_seconds", "tokens_per_second")
    assert all(isinstance(stored[k], int | float) for k in keys)
    assert stored["steps"] == 3
    names = {"accuracy", "pass@1", "pass@2", "majority", "all_variants", "problems"}
    assert stored["eval_after"].keys() >= names
    assert stored["eval_after"]["problems"] == 6
    assert stored["eval_after"]["pass@1"] == pytest.approx(stored["accuracy_after"])
    assert pathlib.Path(summary["report"]).stat().st_size > 10_000
    assert Checkpoints(directory / "checkpoints", 2).steps() == [2, 3]  # the newest two


def test_the_checkpoint_gives_the_accuracy_of_the_summary(base):
    config, summary, *_ = base
    again = evaluate_run(config)
    assert again.pop("step") == 3
    assert again == pytest.approx(summary["eval_after"])


def test_transformers_reads_the_export_and_agrees(base, place, tmp_path):
    config, *_ = base
    export_run(config, tmp_path / "exported")
    run = build.setup(config)
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == run.tokenizer.eos_id
    _, params, step = load_policy(run, None)
    assert step == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert reader.decode(run.data.prompts["eval"][0].tokens) == run.data.prompts["eval"][0].text
    tokens = np.random.default_rng(0).integers(0, 300, (2, 12))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    place_ = jnp.broadcast_to(jnp.arange(12), (2, 12))
    network = transformer(run.model)
    hidden, _ = network.hidden(params, jnp.asarray(tokens), place_, jnp.ones((2, 12), jnp.int32))
    ours = network.logits(params, hidden)
    assert np.abs(ours - theirs).max() < 1e-4
    _, start = hf.load(place / "whole", dtype="float32")
    change = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), params, start
    )
    assert max(jax.tree.leaves(change)) > 1e-4  # what was exported is what was trained
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="exists and is not empty"):
        export_run(config, tmp_path / "mine")


def test_own_prompts_are_answered_without_being_judged(base):
    config, *_ = base
    answers = sample_run(config, prompts=["Is 7 prime?", "And 8?"])
    assert len(answers) == 8  # two questions, a group each
    assert {a["prompt"].split("<|turn|>user\n")[1].split("<|end|>")[0] for a in answers} == {
        *("Is 7 prime?", "And 8?")
    }
    assert {a["step"] for a in answers} == {3}
    assert not any({"rewards", "reward", "answer"} & a.keys() for a in answers)


def test_a_checkpoint_in_shards_is_the_same_model(place, tmp_path):
    one_file, shards = (settings(place, tmp_path / m, model=m) for m in ("whole", "shards"))
    a, b = build.setup(one_file), build.setup(shards)
    assert a.model == b.model
    assert jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))
    question = ["How many eggs?"]
    first, second = (sample_run(c, prompts=question) for c in (one_file, shards))
    assert first == second


def test_dapo_draws_prompts_until_the_batch_is_full(place, quick):
    _, records, samples = quick(
        "method=dapo",
        "objective={}",
        f"rewards={{{reward(place, 'coin')}={{}}}}",
    )
    assert finite(records, "rounds", "groups_kept", "groups_missing")
    used = 0
    for record in records:
        assert record["rounds"] > 1
        assert record["groups_kept"] < 0.6
        assert record["prompts"] == used + 4 * record["rounds"]
        used = record["prompts"]
        assert record["groups_missing"] == 0
        assert record["zero_std_groups"] == 0
        assert record["reward_std"] > 0
    for first, last in zip(samples[::2], samples[1::2], strict=True):  # two kept of each group
        assert first["prompt"] == last["prompt"]
        assert first["member"] < last["member"]


def test_a_judge_s_points_reach_the_reward(place, quick):
    """Half of the verdicts cannot be read: those are counted, and the part is left out there."""

    def answer(body, number):
        text = body["messages"][-1]["content"]
        return f"Score: {len(text) % 10}" if len(text) % 2 else "Well written!"

    with judge_server(answer) as (url, bodies):
        judge = f"{{function='judge', url='{url}', model='m', scale=[0, 10], weight=0.5}}"
        _, records, samples = quick(
            f"rewards={{{reward(place, 'letters')}={{}}, good={judge}}}",
            *(f"data.eval={json.dumps(str(place / 'eval.jsonl'))}", "eval.problems=2"),
        )
    first, *later_prompts = [body["messages"][-1]["content"] for body in bodies]
    assert first == "Answer with the word yes."  # before anything compiles
    for text in later_prompts:
        assert "Ada has" in text
        assert "<|turn|>" not in text.partition("Answer:")[0]  # the question as its row has it
    assert finite(records, "reward/good", "judge_seconds", "judge_cached")
    points = {s["rewards"]["good"] for s in samples}
    assert None in points
    assert len(points) > 2
    for s in samples:
        (letters,) = (v for k, v in s["rewards"].items() if k.endswith(":letters"))
        assert s["reward"] == pytest.approx(letters + 0.5 * (s["rewards"]["good"] or 0))
    assert sum(r["judge_calls"] for r in records) < len(later_prompts)
    evaluated = [s["rewards"]["good"] for s in samples if s.get("split") == "eval"]
    assert any(evaluated)  # held-out completions are judged, too
    assert sum(r["judge_unreadable"] for r in records) > 0
    assert not any(r["judge_failures"] or r["judge_timeouts"] for r in records)


@pytest.mark.slow
def test_text_is_sampled_in_parts(quick, tmp_path, monkeypatch):
    """With sampling.draws = 2 all tokens and points are the same; calls begin after the first."""
    submitted, submit = [], RowCalls.submit_groups

    def record_groups(self, prompts, rollout, first):
        submitted.append((len(prompts), first))
        submit(self, prompts, rollout, first)

    monkeypatch.setattr(RowCalls, "submit_groups", record_groups)
    (_, (one,), samples), (_, (two,), samples_in_parts) = (
        quick("train.steps=1", f"sampling.draws={n}", f"run.dir={json.dumps(str(tmp_path / n))}")
        for n in "12"
    )
    assert submitted == [(2, 0)]
    assert [s["completion"] for s in samples_in_parts] == [s["completion"] for s in samples]
    assert [s["rewards"] for s in samples_in_parts] == [s["rewards"] for s in samples]
    assert two["reward"] == one["reward"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)


def test_a_judge_that_does_not_answer_is_said_before_anything_else(quick, tmp_path):
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{each.getsockname()[1]}/v1"
        judge = f"rewards={{good={{function='judge', url='{url}', model='m'}}}}"
        with pytest.raises(UserError, match=r"rewards.good.url = '.*' does not answer \(.*refused"):
            quick(judge)
    assert not (tmp_path / "run").exists()


@contextlib.contextmanager
def served(model, *more):
    """``jrl serve`` of a checkpoint on loopback; yields its address."""
    command = [sys.executable, "-m", "jrl", "serve", str(model), "--port", "0", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout.readline, "")
            yield next(m[1] for x in lines if (m := re.match(r"serving \S+ at (http\S+)", x)))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


MET = "{enum=[true, false]}"
CRITERIA = (
    "{type='json_schema', json_schema={name='verdict', strict=true, schema={type='object', "
    f"properties={{1={MET}, 2={MET}, 3={MET}}}, required=['1', '2', '3'], "
    "additionalProperties=false}}}"
)


@pytest.mark.slow
@pytest.mark.extra("serve")
def test_a_served_model_judges(place, tmp_path, monkeypatch):
    """configs/judge.toml with a second model of this framework, whose server enforces the form."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    sizes = ("--slots", "4", "data.max_prompt_tokens=200", "sampling.max_new_tokens=50")
    with served(place / "whole", "--name", "judge", *sizes) as url:
        config = load_config(
            GSM8K.with_name("judge.toml"),
            [
                f"run.dir={json.dumps(str(tmp_path / 'run'))}",
                f"model.path={json.dumps(str(place / 'whole'))}",
                f"data.train={json.dumps(str(place / 'train.jsonl'))}",
                *("data.max_prompt_tokens=170", "model.dtype=float32", "mesh.fsdp=1"),
                *("sampling.group=4", "sampling.max_new_tokens=6", "train.prompts=4"),
                *("train.microbatches=1", "train.steps=1", "eval.every=0", "checkpoint.every=0"),
                *("log.samples_every=1", "reward_pool.workers=0", f"rewards.clear.url={url}"),
                # the policy is never right, and neither of the two can read a long question
                *("rewards.clear.only=", "rewards.clear.template={completion}"),
                *("rewards.clear.max_tokens=50", "rewards.clear.temperature=1.0"),
                f"rewards.clear.fields={{response_format={CRITERIA}}}",
            ],
        )
        train(config, echo=lambda line: None)
    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert record["judge_calls"] > 0
    assert record["judge_failures"] == record["judge_timeouts"] == record["judge_unreadable"] == 0
    points = {round(s["rewards"]["clear"], 4) for s in samples}
    assert points <= {0.0, 0.3333, 0.6667, 1.0}  # the server's draws are its own, and may agree
    assert len(list((tmp_path / "run" / "judge").rglob("*.json"))) > 1


@pytest.mark.slow
def test_the_policy_and_its_start_judge(place, quick):
    """Both read a chat of the checkpoint's template; what a random model says is no verdict."""
    judge = "function='judge', form='yes_no', template='{completion}', max_tokens=4"
    judge += ", max_prompt_tokens=60"
    parts = ", ".join(f"{name}={{{judge}, model='{name}'}}" for name in ("policy", "start"))
    _, records, _ = quick(f"rewards={{math={{}}, {parts}}}", "train.steps=1", "train.prompts=2")
    (record,) = records
    assert record["judge_calls"] >= record["judge_unreadable"] > 0
    assert record["judge_failures"] == record["judge_timeouts"] == 0


@pytest.mark.slow
def test_an_earlier_success_stands_in_a_group_that_failed(place, quick, tmp_path):
    write_rows(tmp_path / "few.jsonl", rows(0, 4))
    _, records, samples = quick(
        *("method=arpo_replay", "objective={}", "sampling.group=2", "train.steps=8"),
        *(f"data.train={json.dumps(str(tmp_path / 'few.jsonl'))}", "log.samples_every=1"),
        f"rewards={{{reward(place, 'coin')}={{}}}}",
    )
    assert finite(records, "replayed")
    assert sum(r["replayed"] for r in records) > 0
    (part,) = (name for name in records[0] if name.startswith("reward/"))
    for record in records:  # of 4 * 2 members trained on, one success more for each replay
        more = 8 * (record[part] - record["reward"])
        assert more == pytest.approx(record["replayed"])
    assert len({s["prompt"] for s in samples}) == 4


def test_parts_without_an_opinion_and_parts_of_parts(place, quick, tmp_path):
    """GDPO over a part that is silent about one completion of two, and a gate."""
    half = f"own={{function={reward(place, 'half')}}}"
    first = f"letters={{function={reward(place, 'letters')}}}"
    gate = "gated={combine='gate', of=['letters', 'own'], least=0.2}"
    quick(
        "method=gdpo",
        f"rewards={{{half}, {first}, {gate}}}",
        "train.steps=1",
        "train.prompts=2",
        "log.by=source",
    )
    (record,) = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    parts = [s["rewards"] for s in samples]
    assert {p["own"] is None for p in parts} == {True, False}
    for p in parts:
        gated = None if p["own"] is None and p["letters"] >= 0.2 else (p["letters"] >= 0.2) * 0.25
        assert p["gated"] == gated
    by = {name: x for name, x in record.items() if name.startswith("reward_by/")}
    sources = {x for x in THINGS for s in samples if f" {x} " in s["prompt"]}
    assert {name for name in by if name.count("/") == 1} == {f"reward_by/{s}" for s in sources}
    assert np.mean([by[f"reward_by/{s}"] for s in sources]) == pytest.approx(record["reward"])
    for name in ("own", "letters", "gated"):
        values = [p[name] for p in parts if p[name] is not None]
        assert record[f"reward/{name}"] == pytest.approx(np.mean(values), abs=1e-6)
    assert record["reward"] == pytest.approx(np.mean([p["gated"] or 0 for p in parts]), abs=1e-6)


@pytest.mark.slow
def test_gcpo_pays_a_behaviour_where_it_helps(place, quick):
    """GCPO's sum of accuracy, contrast and length, and R^3, on the samples of a run."""
    parts = {
        "right": f"{{function={reward(place, 'coin')}}}",
        "aux": "{function='format', pattern='.*[a-m].*', weight=0}",
        "useful": "{combine='group_contrast', of=['aux', 'right']}",
        "length": "{function='chain_length', limit=8}",
        "r3": f"{{function='r3', embed='{place}/rewards.py:embed', weight=0}}",
    }
    table = ", ".join(f"{name}={part}" for name, part in parts.items())
    _, records, samples = quick(
        *("method=grpo", f"rewards={{{table}}}", "sampling.group=6", "train.steps=4"),
        "log.samples_every=1",
    )
    assert finite(records, "reward/useful", "reward/r3")
    groups = {}
    for s in samples:
        groups.setdefault((s["step"], s["prompt"]), []).append(s["rewards"])
    signs = set()
    for group in groups.values():
        sides = [[p["right"] for p in group if p["aux"] == value] for value in (1.0, 0.0)]
        gap = np.mean(sides[0]) - np.mean(sides[1]) if all(sides) else 0.0
        signs.add(np.sign(gap))
        for p in group:
            assert p["useful"] == np.sign(gap) * p["aux"]
    assert len(signs) > 1
    assert any(s["rewards"]["r3"] > 0 for s in samples)


def test_ppo_trains_a_value_head(quick):
    config, records, _ = quick("method=ppo", "objective={}")
    assert finite(records, "value_loss")
    run = build.setup(config)
    start, _ = programs.new_state(run)
    state, _ = Checkpoints(pathlib.Path(config.run.dir) / "checkpoints", 1).restore(start)
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start.params, state.params)
    assert max(jax.tree.leaves(change["value"])) > 0
    assert max(jax.tree.leaves(change["policy"])) > 0


@pytest.mark.slow
def test_remax_compares_with_a_greedy_completion(quick):
    _, records, samples = quick("method=remax", "objective={}", "sampling.group=2")
    assert finite(records)
    assert [s["baseline"] for s in samples[:3]] == [False, False, True]
    greedy = {}
    for s in samples:
        if s["baseline"] and s["step"] == 1:
            greedy[s["prompt"]] = s["completion"]
    assert greedy
    # Members alone are counted as tokens trained on.
    assert records[0]["completion_tokens"] <= 4 * 2 * 6


def test_supervised_training_on_the_solutions_of_the_data(quick):
    config, records, samples = quick(
        "method=sft", "objective={}", "sampling.max_new_tokens=64", "data.max_prompt_tokens=150"
    )
    assert finite(records, "loss")
    assert "approx_kl" not in records[0]
    run = build.setup(config)
    texts = {p.text: run.tokenizer.decode(p.solution.tolist()) for p in run.data.prompts["train"]}
    assert samples
    for s in samples:
        assert s["demonstration"]
        assert s["member"] == 0
        assert s["completion"] == texts[s["prompt"]]
        assert "<<" in s["completion"]
        assert s["stop"] == "stop_token"
    lengths = {len(p.solution) for p in run.data.prompts["train"]}
    assert len(lengths) > 1
    # Cut where there is no room, and said to be.
    _, _, samples_cut = quick(
        "method=sft", "objective={}", "run.resume=never", f"run.dir={config.run.dir}2"
    )
    assert {(s["stop"], s["length"]) for s in samples_cut} == {("length", 6)}


HALF = """
import json, sys
from jrl.system.processes import start
port, process, config = sys.argv[1:]
start(f"127.0.0.1:{port}", 2, int(process))
from jrl.config import build_config
from jrl.run import run as running
running.write_report = lambda directory: directory
running.train(build_config(json.loads(config)))
"""


@pytest.mark.slow
def test_two_processes_judge_half_each_and_agree_on_what_is_left_to_chance(place, tmp_path):
    """DAPO draws again until its groups are mixed: processes that disagreed would hang."""
    config = settings(
        place,
        tmp_path / "run",
        *("method=dapo", "objective={}", "mesh.fsdp=8", "train.prompts=8"),
        *("train.microbatches=1", "train.steps=2", "reward_pool.workers=0"),
        *("data.eval=", "eval.every=0"),
        f"rewards={{{reward(place, 'mood')}={{}}}}",
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = re.sub(r"(device_count)=\d+", r"\1=4", os.environ["XLA_FLAGS"])
    halves = [
        subprocess.Popen(
            [sys.executable, "-c", HALF, str(port), str(i), config.model_dump_json()],
            env=os.environ
            | {"XLA_FLAGS": flags, "MOOD": str(tmp_path / "notes"), "MOOD_OF": f"{i}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    for half in halves:
        output = half.communicate(timeout=240)[0]
        assert half.returncode == 0, output
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    assert finite(records, "rounds")
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    tried = 2  # by each process, before anything compiles
    assert len(notes) == sum(r["rounds"] for r in records) * 8 * 4 + tried
    assert [sum(process == each for process, _ in notes) for each in "01"] == [len(notes) / 2] * 2
    assert 0 < records[0]["reward"] < 1


@pytest.mark.slow
def test_the_file_as_it_is_computes_in_bfloat16_on_all_devices(quick):
    config, records, _ = quick("model.dtype=bfloat16", "mesh.fsdp=-1", "train.prompts=8")
    assert finite(records)
    assert records[0]["logprob_diff"] < 0.1
    assert records[1]["grad_norm"] > 0
    run = build.setup(config)
    assert run.model.dtype == "bfloat16"
    assert dict(run.mesh.shape)["fsdp"] == 8
    assert {x.dtype for x in jax.tree.leaves(run.params)} == {np.dtype("float32")}
