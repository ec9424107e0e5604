"""`jrl train` on episodes with an environment on the host: a checkpoint, questions, and tools."""

import contextlib
import dataclasses
import json
import re
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from judge_server import judge_server
from tokenizers import decoders, models, pre_tokenizers, trainers

from jrl.collect.host_search import leaves_played
from jrl.collect.host_source import host_source
from jrl.collect.run_rows import prompt_seeds
from jrl.collect.sources import simple_request
from jrl.collect.tree_search import plan_of
from jrl.config import load_config
from jrl.entry import fit
from jrl.episodes.play import BY_TIMING
from jrl.episodes.search import by_likelihood, by_path
from jrl.episodes.transcript import rows_of_players, to_rollout
from jrl.errors import RunStopped, UserError
from jrl.evaluate import evaluate_run, load_policy
from jrl.evaluate.search import search_run
from jrl.evaluate.searcher import opened, searched_run, searcher_of, searching
from jrl.judging.text_parts import TextParts
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import loops
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train.build import setup

CONFIGS = Path(__file__).parents[2] / "configs"
GSM8K = CONFIGS / "gsm8k.toml"
CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
OWN = '''
import asyncio
import json
import zlib
from pathlib import Path

from jrl.zoo.envs.calculator import calculator_tool
from jrl.episodes.host import Feedback, HostEnv, Lifecycle, Limits
from jrl.episodes.parsers import PARSERS
from jrl.zoo.envs.players import pair_env
from jrl.episodes.tools import tool_env


def talk(turns, points=1.0):
    """Asks again and again; pays for letters."""

    def init(prompt, seed):
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        letters = sum(c.isalpha() for c in reply.text)
        again = [{"role": "user", "content": "Go on. <|end|>"}]
        return prompt, Feedback(again, points * letters, reply.turn == turns - 1, letters > 2)

    return HostEnv(init, step, limits=Limits(turns=turns, turn_tokens=5))


def lucky(sides=6):
    """An episode of one turn, well ended by chance: one text of so many."""

    def init(prompt, seed):
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        won = float(zlib.crc32(reply.tokens.tobytes()) % sides == 0)
        return prompt, Feedback((), won, True, bool(won))

    return HostEnv(init, step, limits=Limits(turns=1, turn_tokens=5))


def gated():
    """Asks a second time once there is a file "go", but for the first step's episodes."""
    go, inner, began = Path(__file__).with_name("go"), talk(2), []

    async def step(prompt, reply):
        while began[-1] and not go.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3 * bool(began[-1]))  # until what follows the step has begun
        return await inner.step(prompt, reply)

    begin = Lifecycle(begin=lambda step, split: began.append(step))
    return inner._replace(step=step, lifecycle=begin)


def sums():
    reward = lambda prompt, reply: float(prompt.answer in reply.text)
    return tool_env([calculator_tool()], PARSERS["gemma"], reward, Limits(turns=2))


def broken():
    def init(prompt, seed):
        raise RuntimeError("no server")

    async def step(prompt, reply):
        raise AssertionError

    return HostEnv(init, step, limits=Limits(turns=2))


def stuck():
    """Opens, and fails at every turn."""

    async def step(prompt, reply):
        raise RuntimeError("no server")

    return talk(2)._replace(step=step)


def closed():
    async def shutdown():
        Path(__file__).with_name("ended").touch()

    return talk(1)._replace(lifecycle=Lifecycle(at_once=3, shutdown=shutdown))


def two(turns=4):
    """Two players; the first token of a turn says who is next."""

    def init(prompt, seed):
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        again, next_one = [{"role": "user", "content": "Go on."}], int(reply.tokens[0]) % 2
        return prompt, Feedback(again, 1.0, reply.turn == turns - 1, True, next=next_one)

    return HostEnv(init, step, players=2, limits=Limits(turns=turns, turn_tokens=5))


def pair():
    return pair_env(lambda prompt, text: float(sum(c.isalpha() for c in text) > 2))


def nothing():
    return {}


def write(failed, count, seed):
    with Path(__file__).with_name("written.jsonl").open("a") as log:
        log.write(json.dumps({"failed": failed, "seed": seed}) + "\\n")
    return [f"New {seed % 1000} {i}" for i in range(count)]
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Questions, environments and a tiny checkpoint."""
    root = tmp_path_factory.mktemp("host_run")
    lines = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(8)]
    for name in ("train", "eval"):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (root / "own.py").write_text(OWN)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|turn|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["What is 1 + 1? Go on."], trainer)
    backend.save(str(root / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": CHAT}
    shape = ModelConfig(
        vocab_size=280,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=768,
    )
    for name, kv_heads in (("model", 1), ("wide", 2)):  # two can be divided over a tensor axis
        sized = dataclasses.replace(shape, kv_heads=kv_heads)
        hf.save(root / name, sized, transformer(sized).init(jax.random.key(0)))
        (root / name / "tokenizer_config.json").write_text(json.dumps(settings))
        (root / name / "tokenizer.json").write_bytes((root / "tokenizer.json").read_bytes())
    return root


def settings(place, run, env, *more):
    return load_config(
        GSM8K,
        [
            f"run.dir={json.dumps(str(run))}",
            f"model.path={json.dumps(str(place / 'model'))}",
            f"data.train={json.dumps(str(place / 'train.jsonl'))}",
            f"data.eval={json.dumps(str(place / 'eval.jsonl'))}",
            f"data.env={json.dumps(f'{place}/own.py:{env}')}",
            "data.system=",
            "data.max_prompt_tokens=48",
            "model.dtype=float32",
            "rewards={}",
            "sampling.group=4",
            "sampling.max_new_tokens=40",
            "sampling.slots=6",
            "optimizer.warmup_steps=0",
            "train.prompts=2",
            "train.steps=2",
            "train.microbatches=1",
            "mesh.fsdp=1",
            "eval.problems=3",
            "eval.samples=1",
            "checkpoint.every=2",
            *more,
        ],
    )


def records_of(directory):
    return [r for r in read_jsonl(directory / "metrics.jsonl") if "loss" in r]


def untimed(directory):
    """The records of a run without what depends on when environments answer, or on the machine."""
    left = CLOCKS | BY_TIMING
    return [{k: v for k, v in r.items() if k not in left} for r in records_of(directory)]


def test_a_run_of_many_turns(place, tmp_path):
    threads, run = threading.active_count(), tmp_path / "run"
    config = settings(place, run, "talk", "data.turns=2", "data.eval=", "train.steps=1")
    assert train(config, echo=lambda line: None)["steps"] == 1
    (record,) = records_of(run)
    assert record["episodes"] == 8 < record["turns"] <= 16  # data.turns = 1 gives 8
    assert record["env_errors"] == record["env_timeouts"] == 0
    assert record["logprob_diff"] < 1e-4
    several = [s["turns"] for s in read_jsonl(run / "samples.jsonl") if len(s["turns"]) > 2]
    assert several
    for turns in several:
        assert [t["by"] for t in turns] == ["policy", "environment", "policy"]
        assert "Go on. <|end|>" in turns[1]["text"]  # a text from outside, and no control token
    assert threading.active_count() <= threads + 1


def test_turns_are_paid_for_what_they_tell_of_the_answer(place, tmp_path):
    """IGPO: the gains of a row are the change of the policy's probability of its answer."""
    run = tmp_path / "run"
    gain = "rewards={reward={}, gain={function='likelihood', by='turn', weight=0.5}}"
    shape = ("data.turns=3", "data.eval=", "train.steps=1", "method=igpo", "log.samples_every=1")
    assert train(settings(place, run, "talk", *shape, gain), echo=lambda line: None)["steps"] == 1
    (record,) = records_of(run)
    assert 0 < abs(record["reward/gain"]) < 1
    for sample in read_jsonl(run / "samples.jsonl"):
        mine = [turn for turn in sample["turns"] if turn["by"] == "policy"]
        letters = [sum(c.isalpha() for c in turn["text"]) for turn in mine]
        gains = [turn["paid"] - points for turn, points in zip(mine, letters, strict=True)]
        assert gains[-1] == 0  # the last turn has the outcome alone
        assert sum(gains) == pytest.approx(0.5 * sample["rewards"]["gain"], abs=1e-5)


BESIDE = """
def last_turn(samples):
    for s in samples:
        roles = [m["role"] for m in s.messages]
        assert roles == ["assistant", "user", "assistant"][: len(roles)] and len(roles) in (1, 3)
        assert s.completion == s.messages[-1]["content"] and s.prompt.text.startswith("What is")
        assert "Go on." in s.messages[1]["content"] if len(roles) == 3 else True
    return [None if len(s.messages) == 1 else float(sum(map(str.isalpha, s.completion)))
            for s in samples]


def as_in_trl(prompts, completions, trainer_state, **columns):
    assert prompts[0][-1]["role"] == "user" and trainer_state.max_steps in (0, 1)
    return [float(len(c)) for c in completions]
"""


def test_reward_functions_stand_beside_an_environment(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    (tmp_path / "beside.py").write_text(BESIDE)
    run, last, trl = (
        tmp_path / "run",
        *(f"{tmp_path}/beside.py:{n}" for n in ("last_turn", "as_in_trl")),
    )
    rewards = (
        "rewards={reward={}, last={function=" + json.dumps(last) + "}, "
        "messages={function=" + json.dumps(trl) + "}, format={pattern='a', weight=0}, "
        "both={combine='gate', of=['messages', 'reward'], least=3}, "
        "judged={function='judge', url='URL', model='m', template='{conversation}', weight=0}}"
    )
    more = ("data.turns=2", "data.eval=", "train.steps=1", "reward_pool.workers=0")

    def by_turns(body, number):
        text = body["messages"][-1]["content"]
        return f"Score: {10 if 'Go on.' in text else 1}"

    begin_arguments = []  # as rows ended; what a call about all of them asks is none of it
    begin = TextParts.begin
    monkeypatch.setattr(
        TextParts, "begin", lambda *args: begin_arguments.append(args[1]) or begin(*args)
    )
    with judge_server(by_turns) as (url, bodies):
        rewards = rewards.replace("URL", url)
        train(settings(place, run, "talk", *more, rewards, "log.samples_every=1"), echo=print)
    assert all("user: What is" in body["messages"][-1]["content"] for body in bodies[1:])
    assert len(begin_arguments) == 8
    (record,) = records_of(run)
    samples = read_jsonl(run / "samples.jsonl")
    for sample in samples:
        parts, turns = sample["rewards"], len(sample["turns"])
        assert parts["messages"] == turns
        assert (parts["last"] is None) == (turns == 1)
        assert parts["judged"] == float(turns > 1)
        assert parts["both"] == (parts["reward"] if turns >= 3 else 0)
        assert sample["reward"] == pytest.approx((parts["last"] or 0) + parts["both"])
    values = [s["rewards"]["last"] for s in samples if s["rewards"]["last"] is not None]
    assert len(samples) == 8
    assert record["reward/last"] == pytest.approx(np.mean(values))


@pytest.mark.slow
def test_a_progress_estimator_pays_by_turn(place, tmp_path, monkeypatch):
    """SPA: an estimator trained on scored completions, beside what the environment pays."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    rows = [
        {"prompt": f"What is {i}?", "responses": ["letters", "11"], "scores": [1.0, 0.0]}
        for i in range(4)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    estimator = load_config(
        CONFIGS / "reward_model.toml",
        [
            *(f"run.dir={tmp_path / 'rm'}", f"model.path={place / 'model'}"),
            *(f"data.pairs={tmp_path / 'pairs.jsonl'}", "data.max_prompt_tokens=48"),
            *("method=spa_progress", "sampling.max_new_tokens=16", "optimizer.warmup_steps=0"),
            *("optimizer.learning_rate=1e-2", "train.prompts=4", "train.steps=4"),
            *("mesh.fsdp=1", "eval.every=0", "checkpoint.every=4"),
        ],
    )
    train(estimator, echo=lambda line: None)
    run, model = tmp_path / "run", f"function='model', path='{tmp_path / 'rm'}', by='turn'"
    rewards = f"rewards={{reward={{weight=0.5}}, progress={{{model}, weight=10.0}}}}"
    more = ("data.turns=2", "data.eval=", "train.steps=1", "method=ppo", "log.samples_every=1")
    train(settings(place, run, "talk", *more, rewards), echo=lambda line: None)
    samples = read_jsonl(run / "samples.jsonl")
    several = [s for s in samples if len(s["turns"]) == 3]
    assert several
    for sample in several:
        first, between, last = (turn["paid"] for turn in sample["turns"])
        assert between == 0
        parts = sample["rewards"]
        assert first + last == pytest.approx(
            0.5 * parts["reward"] + 10 * parts["progress"], abs=1e-3
        )
        letters = [sum(map(str.isalpha, t["text"])) for t in sample["turns"] if t["by"] == "policy"]
        by_turn = [first - 0.5 * letters[0], last - 0.5 * letters[1]]
        assert all(abs(x) > 1e-3 for x in by_turn)  # each turn has progress of its own


def test_a_reward_of_an_episode_that_nobody_gives_is_said(place, tmp_path):
    def error_of(rewards):
        with pytest.raises(UserError) as caught:
            train(settings(place, tmp_path / "run", "talk", "data.turns=2", rewards), echo=print)
        return str(caught.value)

    assert "the environment pays reward, success, and reward functions are" in error_of(
        "rewards={lenght={}}"
    )
    assert "the environment pays a part of that name" in error_of(
        "rewards={reward={function='exact'}}"
    )


APART = ("sampling.mesh.data=1", "data.turns=2", "data.eval=", "optimizer.learning_rate=0.01")


def test_episodes_on_devices_of_their_own_are_the_synchronous_run(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    same, disjoint = tmp_path / "same", tmp_path / "apart"
    train(settings(place, same, "talk", *APART[1:]), echo=lambda line: None)
    train(settings(place, disjoint, "talk", *APART, "placement={}"), echo=lambda line: None)
    left = CLOCKS | BY_TIMING | {"staleness", "staleness_max"}
    mine, theirs = (
        [{k: r[k] for k in r.keys() - left} for r in records_of(d)] for d in (same, disjoint)
    )
    assert mine == theirs
    assert read_jsonl(same / "samples.jsonl") == read_jsonl(disjoint / "samples.jsonl")


@pytest.mark.slow
def test_the_sampler_of_episodes_may_have_a_mesh_of_its_own(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    more = (*APART[1:2], "mesh.fsdp=2", "eval.problems=2", "optimizer.learning_rate=0.01")
    sampler_mesh = "sampling.mesh.data=1", "sampling.mesh.fsdp=1", "sampling.mesh.tensor=2"
    tensor = "model.path=" + json.dumps(str(place / "wide"))
    train(settings(place, tmp_path / "same", "talk", *more, tensor), echo=lambda line: None)
    train(
        settings(place, tmp_path / "own", "talk", *more, tensor, *sampler_mesh),
        echo=lambda line: None,
    )
    completions = [
        [s["completion"] for s in read_jsonl(tmp_path / run / "samples.jsonl")]
        for run in ("same", "own")
    ]
    assert completions[0] == completions[1]
    for mine, theirs in zip(*(records_of(tmp_path / run) for run in ("same", "own")), strict=True):
        names = {"loss", "reward", "kl", "entropy", "turns", "grad_norm"} & mine.keys()
        assert {k: mine[k] for k in names} == pytest.approx({k: theirs[k] for k in names}, abs=2e-5)


@pytest.mark.parametrize("in_flight", [False, True])
def test_weights_change_between_the_turns_of_a_run(place, tmp_path, monkeypatch, in_flight):
    """The second batch's episodes wait between their turns for the first training step."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    go = place / "go"
    go.unlink(missing_ok=True)
    more = ("placement.staleness=1", "objective={correction='tis'}")
    more += ("train.mode=in_flight",) if in_flight else ()
    config = settings(place, tmp_path / "run", "gated", *APART[:1], *APART[2:], *more)
    if not in_flight:
        go.touch()
    step = loops.Progress.step

    def after(self, done, record):
        step(self, done, record)
        go.touch()

    monkeypatch.setattr(loops.Progress, "step", after)
    train(config, echo=lambda line: None)
    first, second = records_of(tmp_path / "run")
    assert (first["staleness"], first["staleness_max"], second["staleness_max"]) == (0, 0, 1)
    if in_flight:
        assert 0 < second["staleness"] < 1
    else:
        assert second["staleness"] == 1
    assert second["correction_weight"] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("train.mode=packed",),
        pytest.param((*APART[:1], "placement={}"), marks=pytest.mark.slow),
    ],
    ids=["rows", "packed", "apart"],
)
def test_episodes_branch_in_a_run(place, tmp_path, more):
    run = tmp_path / "run"
    tree = (
        "method=arpo",
        "objective={}",
        "tree={kind='branch',at='even',roots=2}",
        "log.samples_every=1",
    )
    sizes = ("data.turns=3", "data.eval=", "sampling.max_new_tokens=80")
    config = settings(place, run, "talk", *sizes, *tree, *more)
    assert train(config, echo=lambda line: None)["steps"] == 2
    for record in records_of(run):
        assert record["branches"] == 4
        assert record["env_fork_errors"] == record["env_errors"] == 0
        assert record["tree_shared_tokens"] > 0
        assert record["logprob_diff"] < 1e-4
    for sample in read_jsonl(run / "samples.jsonl"):
        speakers = [t["by"] for t in sample["turns"]]
        assert speakers == [*["policy", "environment"] * 2, "policy"]
        assert len(sample["nodes"]) == 2


FOLDED = (
    *("data.turns=4", "data.contexts=4", "data.summary_tokens=7", "data.summary='Sum up!'"),
    *("method=supo", "objective={}", "sampling.max_new_tokens=90", "optimizer.learning_rate=0.01"),
)


@pytest.mark.parametrize("mode", ["host", pytest.param("packed", marks=pytest.mark.slow)])
def test_episodes_continue_from_their_summaries(place, tmp_path, mode):
    run = tmp_path / "run"
    more = ("data.eval=", f"train.mode={mode}", "log.samples_every=1")
    train(settings(place, run, "talk", *FOLDED, *more), echo=lambda line: None)
    for record in records_of(run):
        assert record["summaries"] > 4
        assert record["env_errors"] == 0
        # What the sampler saw of a context is what training sees, and nothing else.
        assert record["logprob_diff"] < 1e-4
        assert record["grad_norm"] > 0
    assert summaries_in(run) > 4


@pytest.mark.parametrize(
    "tree",
    [
        ("method=arpo", "tree={kind='branch', at='even', roots=2}", "sampling.slots=8"),
        ("method=deepsearch", "tree={kind='search', by='puct', width=2, rounds=20}"),
    ],
    ids=["branches", "search"],
)
def test_trees_of_episodes_continue_from_their_summaries(place, tmp_path, tree):
    run, more = tmp_path / "run", ("data.eval=", "log.samples_every=1", "rewards={success={}}")
    folded = [x for x in FOLDED if not x.startswith(("method", "objective"))]
    train(settings(place, run, "talk", *folded, *more, *tree), echo=lambda line: None)
    for record in records_of(run):
        assert record["summaries"] > 4
        assert record["env_errors"] == record["env_fork_errors"] == 0
        assert record["tree_shared_tokens"] > 0
        assert record["logprob_diff"] < 1e-4
    assert summaries_in(run) > 0


def summaries_in(run):
    """Number of summaries in a run's samples; each begins the next context."""
    count = 0
    for sample in read_jsonl(run / "samples.jsonl"):
        turns = sample["turns"]
        for i, turn in enumerate(turns):
            if "Sum up!" in turn["text"]:
                count += 1
                assert turn["by"] == "environment"
                summary, restart = turns[i + 1], turns[i + 2]
                assert (summary["by"], restart["by"]) == ("policy", "environment")
                assert restart["text"].startswith(summary["text"])  # and the answer behind it
                assert "Go on." in restart["text"][len(summary["text"]) :] or i + 3 == len(turns)
    return count


BRANCHED = ("data.turns=3", "method=arpo", "objective={}", "sampling.max_new_tokens=80")
SHARED = ("method=webrl", "train.prompts=8", "rewards={success={}}", "objective={replayed=0.5}")
REPLAYED = ("method=arpo_replay", "train.prompts=8", "rewards={success={}}", "objective={}")


WRITTEN = (
    *("method=webrl", "rewards={success={}}", "train.steps=5", "data.eval=", "data.sides=20"),
    "objective={written=4, phase_steps=2, low=0.0, high=1.0, replayed=0.5}",
)


def test_tasks_are_written_at_the_start_of_a_phase(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    two = (place / "train.jsonl").read_text().splitlines()[:2]
    (tmp_path / "two.jsonl").write_text("\n".join(two))
    data = f"data.train={json.dumps(str(tmp_path / 'two.jsonl'))}"
    more = (data, f"data.writer={json.dumps(f'{place}/own.py:write')}", *WRITTEN)
    unbroken, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings(place, unbroken, "lucky", *more, "log.samples_every=1"), echo=lambda line: None)
    records = records_of(unbroken)
    assert [r["written_problems"] for r in records] == [0, 0, 4, 4, 8]
    assert all(r["grad_norm"] > 0 for r in records)
    log = read_jsonl(place / "written.jsonl")
    assert set(log[0]["failed"]) <= {json.loads(line)["question"] for line in two}
    assert log[0]["seed"] != log[1]["seed"]
    new_samples = [s for s in read_jsonl(unbroken / "samples.jsonl") if "New" in s["prompt"]]
    assert {s["step"] for s in new_samples} & {3, 4, 5}
    assert not {s["step"] for s in new_samples} & {1, 2}
    for steps in (3, 5):
        config = settings(place, parts, "lucky", *more, f"train.steps={steps}")
        train(config, echo=lambda line: None)
    assert untimed(unbroken) == untimed(parts)


@pytest.mark.slow
def test_episodes_test_problems_between_rounds(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    rounds = "objective={round_steps=2, attempts=3, hard=0.5, above=0.0}"
    more = ("method=deepsearch", rounds, "rewards={success={}}", "data.eval=", "tree.kind=none")
    unbroken, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings(place, unbroken, "lucky", *more, "train.steps=4"), echo=lambda line: None)
    hard = [r["hard_problems"] for r in records_of(unbroken)]
    assert hard[0] == hard[1] >= hard[2] == hard[3] >= 1
    for steps in (2, 4):
        config = settings(place, parts, "lucky", *more, f"train.steps={steps}")
        train(config, echo=lambda line: None)
    assert untimed(unbroken) == untimed(parts)


def test_written_tasks_need_a_writer(place, tmp_path):
    config = settings(place, tmp_path / "run", "lucky", *WRITTEN)
    with pytest.raises(
        UserError, match="needs data.writer: nobody writes them; set it to FILE.py:function"
    ):
        train(config, echo=lambda line: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["masa", "rank_grpo"])
def test_what_an_environment_labels_is_trained_on(place, tmp_path, method):
    env = {
        "masa": ("foretell", "data.passes=4", "objective={passes=4}"),
        "rank_grpo": ("ranked_list", "data.length=2", "rewards={rank_1={}, rank_2={}}"),
    }[method]
    more = ("data.eval=", "train.steps=2", "data.turn_tokens=6", "log.samples_every=1", *env[1:])
    env_override = f"data.env={env[0]}"
    limits = ("data.max_prompt_tokens=400", "sampling.max_new_tokens=20", f"method={method}")
    lines = []
    config = settings(place, tmp_path, "talk", env_override, *limits, "objective={}", *more)
    train(config, echo=lines.append)
    lacking = [line for line in lines if "the objective alone" in line]
    assert all("a judge of the notions" in line for line in lacking)  # of masa
    records = records_of(tmp_path)
    assert all(r["logprob_diff"] < 1e-4 for r in records)
    # Both groups of a problem, or one.
    assert [r["episodes"] for r in records] == [16 if method == "masa" else 8] * 2
    counted = "env/predictions_read" if method == "masa" else "env/recall"
    assert all(counted in r for r in records)


SEARCHED = ("data.turns=3", "data.eval=", "sampling.max_new_tokens=80", "log.samples_every=1")


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(
            ("method=deepsearch", "objective={}", "tree={kind='search',width=3}"),
            marks=pytest.mark.slow,
        ),
        ("method=alphamath", "objective={}", "tree.kind=search", "train.mode=packed"),
    ],
    ids=["frontier", "value"],
)
def test_groups_of_episodes_are_the_leaves_of_a_search(place, tmp_path, tree):
    run = tmp_path / "run"
    assert train(settings(place, run, "talk", *SEARCHED, *tree), echo=lambda line: None)["steps"]
    for record in records_of(run):
        assert record["search_leaves"] >= 8
        assert record["tree_shared_tokens"] > 0
        assert record["env_fork_errors"] == record["env_errors"] == 0
        assert record["logprob_diff"] < 1e-4
        assert record["grad_norm"] > 0
    for sample in read_jsonl(run / "samples.jsonl"):
        speakers = [t["by"] for t in sample["turns"]]
        assert speakers == [*["policy", "environment"] * 2, "policy"]


@pytest.mark.slow
def test_proofs_are_searched_by_an_expert_and_trained_on_again(place, tmp_path, monkeypatch):
    """On an environment whose turns are easily won; the theorem prover's turns are not."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    coefficients = "objective={round_steps=2, restart_rounds=2, replayed=0.5, success=1.0}"
    more = (*SEARCHED, "method=bfs_prover", coefficients, "train.prompts=8", "rewards={success={}}")
    unbroken, parts = tmp_path / "whole", tmp_path / "parts"
    lines = []
    train(settings(place, unbroken, "talk", *more, "train.steps=5"), echo=lines.append)
    assert not [line for line in lines if "the objective alone" in line]
    records = records_of(unbroken)
    assert all(r["search_leaves"] >= 32 for r in records)
    assert records[0]["replayed"] == 0 < records[-1]["replayed"]
    assert all(r["grad_norm"] > 0 for r in records)
    for steps in (3, 5):
        config = settings(place, parts, "talk", *more, f"train.steps={steps}")
        train(config, echo=lambda line: None)
    # Which copies of caches a search keeps depends on when environments answer (docs/runs.md), so
    # a resumed one draws the same tokens, and their probabilities differ by rounding.
    for record, resumed in zip(untimed(unbroken), untimed(parts), strict=True):
        assert record == pytest.approx(resumed, rel=1e-4, abs=1e-6)
    first, second = (read_jsonl(run / "samples.jsonl") for run in (unbroken, parts))
    assert [s["completion"] for s in first] == [s["completion"] for s in second]


def test_a_search_of_turns_leaves_preferences_to_train_on(place, tmp_path):
    config = settings(place, tmp_path / "run", "talk", "data.turns=2", "sampling.max_new_tokens=60")
    summary = search_run(config, "beam", width=2)
    assert summary["problems"] == 3
    assert summary["turns"] == 2 * summary["expansions"]
    assert (summary["env_errors"], summary["step"]) == (0, 0)
    one = search_run(config, "greedy", width=3, by="ratio")
    assert one["turns"] == 3 * one["expansions"] <= 3 * 2
    left = search_run(config, "puct", width=3, rounds=6, out=str(tmp_path / "rows"))
    rows = read_jsonl(tmp_path / "rows" / "siblings.jsonl")
    assert len(rows) == left["siblings"] > 0 == left["paths"]
    best_of = search_run(config, "best_of_n", width=3)
    assert (best_of["turns"], best_of["expansions"]) == (3, 1)
    with pytest.raises(UserError, match="--out: --search best_of_n plays complete episodes, which"):
        search_run(config, "best_of_n", out=str(tmp_path / "rows"))
    problems = ["What is 1 + 1?", "What is 2 + 2?"]
    with searching(config, "greedy", width=2) as solve:
        proofs = solve(problems)
        assert len(proofs) == 2
        assert solve([]) == []
    with searching(config, "greedy", width=2) as solve:
        assert solve(problems[:1]) + solve(problems[1:]) == proofs  # of what number it is alone
    pairs = load_config(
        None,
        [
            f"model.path={json.dumps(str(place / 'model'))}",
            f"data.pairs={json.dumps(str(tmp_path / 'rows' / 'siblings.jsonl'))}",
            *("data.max_prompt_tokens=96", "data.overlong=drop", "method=tp_llama"),
            *("train.prompts=2", "train.steps=2", "mesh.fsdp=1", "model.dtype=float32"),
            f"run.dir={json.dumps(str(tmp_path / 'pairs'))}",
        ],
    )
    proofs = []
    train(pairs, echo=proofs.append)
    assert all(r["grad_norm"] > 0 for r in records_of(tmp_path / "pairs"))
    assert not [line for line in proofs if "the objective alone" in line]


SAMPLED = (
    *("data.eval=", "method=deepsearch", "sampling.temperature=0.8", "eval.temperature=0.8"),
    *("sampling.top_k=30", "sampling.top_p=0.9", "sampling.min_p=0.01"),
    "tree={kind='search', by='best_first', width=2, rounds=3}",
)


@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("talk", ("data.turns=3", "sampling.max_new_tokens=80")),
        ("talk", ("sampling.max_new_tokens=90", *FOLDED[:4])),
        ("two", ("data.turns=3", "sampling.max_new_tokens=80")),
    ],
    ids=["one context", "contexts", "two players"],
)
def test_a_search_at_evaluation_samples_what_training_samples(place, tmp_path, env, more):
    """Token for token, with the same weights, seeds and problems."""
    config = settings(place, tmp_path / "run", env, *SAMPLED, *more)
    run, positions = setup(config), np.arange(2)
    plan = plan_of(run.method.draw.search, 4)
    with jax.set_mesh(run.mesh):
        key, params, _ = load_policy(run, None)
        with contextlib.closing(host_source(run, run.data.prompts["train"], 4)) as source:
            request = simple_request(key, {"policy": params}, 3, positions.astype(np.int32), 4)
            searched_too = request.asks[0].replace(tree=run.method.draw.search)
            groups, shape = (
                source.draw(request.replace(asks=(searched_too,))),
                source._shape._replace(group=4),
            )
        seeds = prompt_seeds(key, "sample", 3, positions)
        prompts = groups.subject[:: run_players(groups)]
        evaluated = searched_run(config, 2)
        with searcher_of(evaluated, key, params, 3, width=2, split="train") as search:
            searched = opened(search(prompts, seeds, plan, by_path(by_likelihood)))
    members = leaves_played(searched, plan).groups
    if env == "two":
        members = rows_of_players(members, 2)
        first = {s.player for row in members[0] for s in row.segments}
        assert first == {0, 1}
    rollout, expected = to_rollout(members, shape).rollout, groups.rollout
    for name in ("tokens", "lengths", "mask", "versions", "stop"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
    np.testing.assert_allclose(rollout.sampler_logprobs, expected.sampler_logprobs, atol=1e-6)
    contexts = np.asarray(groups.ids.get("context", 0)).max()
    assert (contexts > 0) == (shape.contexts > 1)


def run_players(groups):
    """Rows of groups that each problem has."""
    return len(groups.subject) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "more"),
    [("talk", ("data.turns=2",)), ("lucky", REPLAYED), ("lucky", SHARED), ("talk", BRANCHED)],
    ids=["talk", "replay", "a share", "branches"],
)
def test_a_stopped_run_resumes_bit_for_bit(place, tmp_path, monkeypatch, env, more):
    """Four steps at once, and as many with a signal after the second."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    more = (*more, "data.eval=", "train.steps=4", "optimizer.schedule=constant")
    train(settings(place, tmp_path / "whole", env, *more), echo=lambda line: None)
    config = settings(place, tmp_path / "broken", env, *more)
    with monkeypatch.context() as patch:
        step = loops.Progress.step

        def stop(self, done, record):
            step(self, done, record)
            if done == 2:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(loops.Progress, "step", stop)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 2; saved in"):
            train(config, echo=lambda line: None)
    train(config, echo=lambda line: None)
    timed = CLOCKS | BY_TIMING  # rows wait as long as their environment takes to answer
    mine, theirs = (
        [{k: v for k, v in r.items() if k not in timed} for r in records_of(tmp_path / name)]
        for name in ("broken", "whole")
    )
    assert mine == theirs
    assert [r["step"] for r in mine] == [1, 2, 3, 4]
    assert len({r["loss"] for r in mine}) == 4
    if env == "lucky":  # what was kept before the signal is trained on after it
        assert sum(r["replayed"] for r in mine[2:]) > 0


PLAYERS = (
    *("data.eval=", "data.turn_tokens=5", "sampling.max_new_tokens=400"),
    *("train.steps=3", "optimizer.learning_rate=0.01"),
)


@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("pair", ("method=cory", "objective.swap_every=1")),
        ("pair", ("method=cory", "objective.policies=1", "objective.swap_every=0")),
        ("jrl.zoo.envs.players:discussion_env", ("method=comas", "objective.kl_coef=")),
    ],
)
def test_each_player_is_a_row_and_may_be_a_policy_of_its_own(place, tmp_path, env, more):
    spec = env if ":" in env else f"{place}/own.py:{env}"
    config = settings(place, tmp_path, "pair", f"data.env={json.dumps(spec)}", *PLAYERS, *more)
    train(config, echo=lambda line: None)
    records = records_of(tmp_path)
    # Rows are scored by the policy that drew them, after updates that drive policies apart.
    assert all(r["logprob_diff"] < 1e-4 for r in records)
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert {sum(t["by"] == "policy" for t in s["turns"]) for s in samples} == {1}
    if "method=comas" in more:
        assert {f"reward/policy_{i}" for i in range(3)} <= records[0].keys()
        return
    # Both players are paid for both answers.
    paid = [r["env/pioneer_reward"] + r["env/observer_reward"] for r in records]
    assert [r["reward"] * 8 for r in records] == pytest.approx(paid)


def debate(place):
    """The episode of the guide, in a file of its own."""
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    (code,) = re.findall(r"^```python\n(# debate.py\n.*?)^```", page.read_text(), re.M | re.S)
    assert len(code.splitlines()) < 30
    (place / "debate.py").write_text(code)
    return f"{place}/debate.py:episode"


def test_the_coroutine_of_the_guide_is_trained_and_evaluated(place, tmp_path):
    env_override = f"data.env={json.dumps(debate(place))}"
    more = ("data.turn_tokens=8", "sampling.max_new_tokens=300")
    config = settings(place, tmp_path / "run", "talk", env_override, *more)
    assert train(config, echo=lambda line: None)["steps"] == 2
    records = records_of(tmp_path / "run")
    assert all(r["logprob_diff"] < 1e-4 for r in records)
    assert all(r["env_errors"] == r["env_timeouts"] == 0 for r in records)
    assert all(r["episodes"] == 8 and "env/improved" in r for r in records)
    # The solver takes two turns and the critic one, in groups of their own; evaluation has all.
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {sum(t["by"] == "policy" for t in s["turns"]) for s in samples} == {1, 2, 3}
    summary = evaluate_run(config)
    assert (summary["turns"], summary["failed"]) == (3, 0)


def test_an_episode_is_passed_in_python(place, tmp_path):
    async def episode(policy, prompt, *, word="more"):
        letters = 0
        for messages in (prompt.text, word):
            reply = await policy(messages)
            letters += sum(c.isalpha() for c in reply.text)
            policy.reward(letters / 10)

    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    sizes = {"train.steps": 1, "train.prompts": 2, "train.microbatches": 1, "sampling.group": 4}
    sizes |= {"sampling.max_new_tokens": 40, "data.turn_tokens": 5, "data.word": "again"}
    sizes |= {"model.dtype": "float32", "data.max_prompt_tokens": 48, "mesh.fsdp": 1}
    result = fit(
        rows,
        env=episode,
        model=place / "model",
        config=sizes,
        dir=tmp_path / "run",
        echo=lambda line: None,
    )
    assert result.metrics[-1]["turns"] == 16


def test_what_is_no_episode_is_said_in_python(place, tmp_path):
    rows = [{"question": "What is 1 + 1?", "answer": "2"}]

    async def alone(prompt):
        return 0.0

    with pytest.raises(UserError, match=r"alone\(prompt\) must take policy and prompt"):
        fit(rows, env=alone, model=place / "model", dir=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()

    async def episode(policy, prompt):
        return 0.0

    with pytest.raises(UserError, match="is an episode, which is played on the host about prompts"):
        fit(env=episode, model=place / "model", dir=tmp_path / "none")


def test_a_run_is_evaluated_in_its_environment(place, tmp_path):
    config = settings(place, tmp_path / "run", "talk", "data.turns=1")
    assert train(config, echo=lambda line: None)["steps"] == 2
    assert [r["turns"] for r in records_of(tmp_path / "run")] == [8, 8]
    summary = evaluate_run(config)
    assert summary["turns"] == 1
    assert summary["success"] == pytest.approx(summary["accuracy"])
    assert summary["failed"] == 0


def shipped(place, run, name, *more):
    """A configuration that is shipped, with the tiny model and one step."""
    return load_config(
        CONFIGS / f"{name}.toml",
        [
            f"run.dir={json.dumps(str(run))}",
            f"model.path={json.dumps(str(place / 'model'))}",
            "model.dtype=float32",
            "model.remat=none",
            "data.max_prompt_tokens=160",
            "sampling.group=2",
            "sampling.max_new_tokens=90",
            "optimizer.warmup_steps=0",
            "train.prompts=2",
            "train.steps=1",
            "train.microbatches=1",
            "mesh.fsdp=1",
            "eval.problems=2",
            "eval.samples=1",
            *more,
        ],
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("search", ["data.system=", "data.turn_tokens=20"]),
        pytest.param(
            "gsm8k_python",
            ["data.turn_tokens=20", "data.train={train}", "data.eval={eval}"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "textarena",
            ["data.turn_tokens=8", "data.max_prompt_tokens=560", "data.turns=2"],
            marks=[
                pytest.mark.slow,
                pytest.mark.extra("textarena"),
            ],
        ),
        ("prover", ["data.max_prompt_tokens=300", "data.turn_tokens=20"]),
    ],
)
def test_shipped_configurations_of_environments_take_a_step(
    place, tmp_path, monkeypatch, name, more
):
    monkeypatch.chdir(CONFIGS.parent)
    files = {n: json.dumps(str(place / f"{n}.jsonl")) for n in ("train", "eval")}
    more = [m.format(**files) if "=" in m and "{" in m else m for m in more]
    config = shipped(place, tmp_path / "run", name, *more)
    assert train(config, echo=lambda line: None)["steps"] == 1
    (record,) = records_of(tmp_path / "run")
    assert record["episodes"] == 4
    assert record["env_errors"] == record["env_timeouts"] == 0
    summary = evaluate_run(config)
    assert {"success", "turns", "failed"} <= summary.keys()
    if name == "prover":
        assert "tactic_errors" in summary
    elif name != "textarena":
        assert {"tool_calls", "tool_errors", "tool_structure_errors"} & summary.keys()


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Letters"]


class Letters(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Letter(vf.TaskData(prompt=f"Go on {i}."))


class Letter(vf.Task[vf.TaskData]):
    @vf.reward
    async def letters(self, trace) -> float:
        return float(sum(c.isalpha() for c in trace.branches[-1].messages[-1].content or ""))
"""


@pytest.mark.extra("verifiers")
@pytest.mark.slow
def test_a_run_on_an_environment_of_verifiers(place, tmp_path):
    (tmp_path / "letters_set.py").write_text(TASKSET)
    config = settings(
        place,
        tmp_path / "run",
        "talk",
        'data.env="verifiers"',
        f"data.id={json.dumps(f'{tmp_path}/letters_set.py:Letters')}",
        "data.turn_tokens=8",
        "train.steps=1",
    )
    assert train(config, echo=lambda line: None)["steps"] == 1
    (record,) = records_of(tmp_path / "run")
    assert record["episodes"] == 8
    assert record["env_errors"] == record["env_timeouts"] == 0
    (sample, *_) = read_jsonl(tmp_path / "run" / "samples.jsonl")
    (turn,) = sample["turns"]
    assert sample["reward"] == sum(c.isalpha() for c in turn["text"].replace("<|end|>", ""))
    assert {"success", "turns", "failed"} <= evaluate_run(config).keys()


@pytest.mark.slow
def test_a_run_with_tools_on_several_devices(place, tmp_path):
    of = ["train.steps=1", "data.eval=", "train.prompts=8", "mesh.fsdp=8", "sampling.slots=16"]
    config = settings(place, tmp_path / "run", "sums", *of)
    assert train(config, echo=lambda line: None)["steps"] == 1


@pytest.mark.parametrize(
    ("env", "more", "message"),
    [
        ("talk", [], "data.turns is missing"),
        ("talk", ["data.turn=2"], "data.turn = 2: there is no such option"),
        ("talk", ["data.turns=0"], "limits.turns = 0; must be at least 1"),
        (
            "talk",
            ["data.turns=2", "data.call_seconds=0"],
            "data.call_seconds = 0; must be at least",
        ),
        (
            "talk",
            ["data.turns=2", "data.template_variables={mood=1}"],
            "template_variables.mood is not read by the chat template",
        ),
        ("closed", [], "opens 3 episodes at once, fewer than the 4 members of a group"),
        ("nothing", [], "what it returns is a dict; give a jrl.episodes.HostEnv"),
        (
            "talk",
            ["data.turns=2", "data.isolate=true", "method=arpo", "objective={}"],
            "needs HostEnv.fork: episodes branch with a copy of the environment's state",
        ),
        (
            "talk",
            ["data.turns=2", "method=arpo", "objective={}", "tree={kind='branch',rounds=2}"],
            "tree.rounds = 2 does not go with data.env with data.train: they branch",
        ),
        (
            "talk",
            ["data.turns=2", "data.contexts=2", "sampling.max_new_tokens=90"],
            "data.contexts = 2: a summary of up to data.summary_tokens = 256 and what asks for it",
        ),
        (
            "talk",
            [*FOLDED, "method=preplan_anchor"],
            "data.contexts = 4 does not go with method = 'preplan_anchor', which reads attention",
        ),
        ("tlak", [], "has no function 'tlak'; did you mean 'talk'"),
        (
            "talk",
            ["data.turns=2", "data.template=plain"],
            "data.template = 'plain': there is no such option",
        ),
        (
            "talk",
            ["data.turns=2", "method=sft", "objective={}"],
            "does not go with method = 'sft', which reads demonstrations",
        ),
        ("talk", ["data.turns=2", "rewards={letters={}}"], "rewards.letters: the environment"),
    ],
)
def test_what_is_wrong_is_said_before_a_run_begins(place, tmp_path, env, more, message):
    with pytest.raises(UserError, match=re.escape(message)):
        train(settings(place, tmp_path / "run", env, *more), echo=lambda line: None)
    assert not (tmp_path / "run").exists()
    if env == "closed":  # what was made to be checked is ended, too
        assert (place / "ended").exists()


def test_a_run_of_which_every_episode_failed_has_not_finished(place, tmp_path):
    with pytest.raises(RunStopped, match="all [0-9]+ episodes of the run failed.*no server") as e:
        train(settings(place, tmp_path / "run", "stuck", "train.steps=2"), echo=lambda line: None)
    assert e.value.exit_code == 3
    assert "\n" not in str(e.value)


def test_episodes_that_never_open_end_a_run_before_its_programs_compile(place, tmp_path):
    run, compiled = tmp_path / "run", []
    listen = lambda event, seconds, **about: compiled.append(about.get("fun_name", ""))  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(
            UserError, match="none of the [0-9]+ episodes of the first draw opened.*no s"
        ):
            train(settings(place, run, "broken", "train.steps=9"), echo=lambda line: None)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled
    assert not {"step", "jit(step)"} & set(compiled)
    assert Checkpoints(run / "checkpoints", 1).latest_step() is None


def test_a_run_whose_environment_always_fails_ends_with_its_state_saved(place, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RunStopped, match="env_failures = 1, above 0.99 for 3 steps in a row") as e:
        train(settings(place, run, "stuck", "train.steps=9"), echo=lambda line: None)
    assert e.value.exit_code == 3
    assert f"step 3 is saved; `jrl train {run}` resumes from it" in str(e.value)
    assert Checkpoints(run / "checkpoints", 1).latest_step() == 3
    assert not (run / "summary.json").exists()
