"""Toy runs in which a policy learns to judge what it writes: the judge's agreement rises."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tokenizers
from tokenizers import models

from jrl.collect.collector import Collector
from jrl.collect.plan import Setting
from jrl.collect.plan_tools import TextTools
from jrl.collect.sources_text import TextSource
from jrl.config import load_config
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.methods.edit import edit_of, only
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.rewards.pool import CallOutcome, Scores
from jrl.run.export import export_run
from jrl.run.run import train
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.storage.metrics import read_jsonl
from jrl.train.loop import policy_weights
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import Prompt

# ---------------------------------------------------------------- SPARK

N, G, STEPS = 4, 16, 100
MESH = make_mesh({}, jax.devices()[:1])
SAMPLING = make_sampling_params(1.0)
WORDS = ["", "", "yes", "no", "Verdict: A", "Verdict: B", "4", "5", "6", "7"]
PROMPTS = [Prompt(i, f"q{i}", np.array([10 + i], np.int32), "") for i in range(4)]


class Words:
    """The tokenizer of this policy, and the reward of its problems: 4 and 5 are right."""

    over_batch = by_token = False

    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids if 1 < i < len(WORDS))

    def scores(self, samples, *, group):
        right = [float(s.completion in ("4", "5")) for s in samples]
        return Scores(
            np.array(right, np.float32)[:, None], CallOutcome(np.zeros(len(right), bool), {})
        )


def shown_in(question):
    """The kind of the question, the problem and the answers that it shows, a token each."""
    kinds = {"Proposed answer:": 14, "Answer A:": 15, "attempt at it:": 16}
    (kind,) = [token for text, token in kinds.items() if text in question]
    shares = [WORDS.index(x) for x in question.split("\n") if x in WORDS[6:]]
    (problem,) = [i for i in range(4) if f"q{i}" in question]
    return np.array([kind, 10 + problem, *shares], np.int32)


def agreement_of(method, network):
    """By step: the mean agreement with verdicts, and the share of replies that are verdicts."""
    source = TextSource(
        *(PROMPTS, 4, None),
        jax.jit(functools.partial(generate, network=network, max_new_tokens=1, stop_tokens=(1,))),
        *(SAMPLING, Words(), Words(), 1),
    )
    tools = TextTools(PROMPTS, 1, tokenizer=Words(), tokens_of=shown_in, longest=15)
    collector = Collector(
        source=source,
        setting=Setting(method, N, G, np.ones(1), tools=lambda key: tools, contexts=True),
        mesh=MESH,
    )
    common = {"network": network, "objective": method.objective, "optimizer": optax.adam(0.03)}
    step, state = jax.jit(make_step(**common)), init_state(jax.random.key(3), **common)
    agreement, words, cursor = [], [], 0
    with jax.set_mesh(MESH):
        for i in range(STEPS):
            weights = policy_weights(state)
            batch, _, cursor = collector.collect(state.key, weights, step=i, cursor=cursor)
            assert cursor == N * (i + 1)
            state, metrics = step(state, batch, SAMPLING)
            assert float(metrics["logprob_diff"]) < 1e-4  # questions are scored as they were drawn
            first = np.asarray(batch.prompt_tokens)[:, 0]
            verdicts = np.isin(first, (14, 15)) & np.asarray(batch.members).any(axis=1)
            if verdicts.any():
                agreement.append(float(np.asarray(batch.rewards)[verdicts].mean()))
                live = np.asarray(batch.mask)[verdicts]
                replies = np.asarray(batch.tokens)[verdicts][live]
                words.append(np.isin(replies, (2, 3, 4, 5)).mean())
    return np.array(agreement), np.array(words)


def test_spark_teaches_the_policy_to_judge_its_own_answers(bag):
    """Its verdicts agree ever more; without what pays them they do not.

    Problems are left out of the loss: once all answers are right, so is every "yes".
    """
    method = get_method("spark", question_tokens=4, kl_coef=0.0)
    questions = edit_of(lambda groups, view: only(groups, groups.round > 0))
    method = method.with_(edits=(*method.edits, questions))
    learned, verdicts = agreement_of(method, bag)
    _, unpaid = agreement_of(method.with_(rewards=lambda groups, view: groups), bag)
    assert learned[:3].mean() < 0.3
    assert learned[-15:].mean() > 0.75  # one verdict for all would be right in half
    assert verdicts[-15:].mean() > 0.9
    assert unpaid[-15:].mean() < 0.1  # a verdict is the answer of no problem


# ---------------------------------------------------------------- RL Tango, and a judge with grpo

TOKENS = ["<|turn|>", "<|end|>", *"45q?yesno", "ye", "yes", "no"]
CHAT = (
    "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Problems of one letter, and a policy with a vocabulary of two digits, yes and no."""
    root = tmp_path_factory.mktemp("joint")
    lines = [{"question": f"q{d}", "answer": f"#### {d}"} for d in "45" * 4]
    (root / "train.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    words = {token: i for i, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(words, merges))
    backend.add_special_tokens(TOKENS[:2])
    sizes = {"layers": 1, "embed_dim": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
    shape = ModelConfig(vocab_size=len(TOKENS), max_length=64, **sizes)
    params = jax.jit(transformer(shape).init)(jax.random.key(1))
    hf.save(root / "model", shape, params)
    backend.save(str(root / "model" / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": CHAT}
    (root / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


def settings(place, run, *more):
    return load_config(
        Path(__file__).parents[2] / "configs" / "gsm8k.toml",
        [
            f"run.dir={json.dumps(str(run))}",
            f"model.path={json.dumps(str(place / 'model'))}",
            f"data.train={json.dumps(str(place / 'train.jsonl'))}",
            *("data.eval=", "data.system=", "data.env=judged", "data.ask='?'", "rewards={}"),
            *("data.max_prompt_tokens=8", "data.turn_tokens=1", "sampling.max_new_tokens=16"),
            *("sampling.group=8", "sampling.slots=8", "train.prompts=4", "train.microbatches=1"),
            *("model.dtype=float32", "mesh.fsdp=1", "optimizer.warmup_steps=0", "train.steps=40"),
            *("optimizer.learning_rate=0.02", "checkpoint.every=0", "log.samples_every=0"),
            *more,
        ],
    )


def trained(config):
    train(config, echo=lambda line: None)
    lines = read_jsonl(Path(config.run.dir) / "metrics.jsonl")
    records = [r for r in lines if "loss" in r]
    assert all(r["logprob_diff"] < 1e-4 for r in records)
    return {
        name: np.array([r[f"env/{name}"] / r["episodes"] for r in records])
        for name in ("agreement", "outcome")
    }


TANGO = ("method=rl_tango", "objective.kl_coef=0", "objective.generator_steps=1")


def test_a_verifier_learns_from_its_own_reward(place, tmp_path):
    """The verifier alone, on a generator that stays as it is: from noise to a verdict.

    Half of the solutions are right, and so is a verifier that says the same of all.
    """
    (place / "half.py").write_text("def half(prompt, text):\n    return text in '45q?y'\n")
    reward = f"data.reward={json.dumps(str(place / 'half.py') + ':half')}"
    lines = ("objective.warmup=60", "train.steps=60", "optimizer.learning_rate=0.01")
    curves = trained(settings(place, tmp_path, *TANGO, reward, *lines))
    assert curves["agreement"][0] < 0.35
    assert curves["agreement"][-10:].mean() > 0.4
    halves = curves["outcome"][:30].mean(), curves["outcome"][30:].mean()
    assert abs(halves[0] - halves[1]) < 0.1


def test_a_verifier_moves_in_its_own_turn_alone(place, tmp_path):
    lines = ("objective.warmup=2", "train.steps=2", "checkpoint.every=2")
    config = settings(place, tmp_path / "run", *TANGO, *lines)
    trained(config)
    start = hf.in_memory(hf.open_checkpoint(place / "model")[1])
    same = []
    for policy in range(2):
        export_run(config, tmp_path / str(policy), policy=policy)
        after = hf.in_memory(hf.open_checkpoint(tmp_path / str(policy))[1])
        equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), after, start)
        same.append(jax.tree.all(equal))
    assert same == [True, False]  # the generator has not had its turn


def test_one_policy_is_solver_and_judge(place, tmp_path):
    """The same environment under grpo, a judge that is the policy itself."""
    curves = trained(settings(place, tmp_path, "method=grpo", "objective.kl_coef=0"))
    assert curves["agreement"][0] < 0.35
    assert curves["agreement"][-10:].mean() > 0.7
