"""Two steps of every method that ``jrl methods`` says runs, on the data that it needs.

Nobody lists here which method needs which data: a method is tried on one kind of data after the
other, and the product's own checks, which run before anything compiles, say where it cannot train.
So a method that no data fit, or that fails behind those checks, fails here.
"""

from __future__ import annotations

import contextlib
import json

import jax
import numpy as np
import pytest
from hub_mirror import byte_tokenizer
from table import COEFFICIENTS

from jrl.collect.tree_search import drawn_weights
from jrl.config import load_config
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.methods import all_methods, list_methods
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run.own_parts import check_own_parts
from jrl.setup.reward_parts import reward_pool
from jrl.system.signals import Stopping
from jrl.train import build, programs
from jrl.train.batches import training_batches
from jrl.train.loop import train_steps
from jrl.train.state import frozen_names
from jrl.train.trainable import check_trainable

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_dim": 16}
SHAPE = ModelConfig(vocab_size=257, max_length=96, **SIZES)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
OWN = """
from jrl.episodes import Limits
from jrl.episodes.coroutine import coroutine_env
from jrl.episodes.policy import Outcome

def letters(samples):
    return [len(set(sample.completion)) / 4 for sample in samples]

def even(samples):
    return [len(sample.completion) % 2 for sample in samples]

def first(samples):
    return [ord((sample.completion or "a")[0]) % 2 for sample in samples]

def players(count):
    roles = tuple(f"player {i}" for i in range(count))

    async def episode(policy, prompt):
        words = [await policy[role](prompt.text) for role in roles]
        return Outcome({r: len(set(w.text)) / 4 for r, w in zip(roles, words)}, success=True)

    return coroutine_env(episode, roles=roles, limits=Limits(turns=count, turn_tokens=5))

def one(): return players(1)
def two(): return players(2)
def three(): return players(3)
"""
FUNCTIONS = ("letters", "even", "first")
COMMON = (
    *("train.steps=2", "train.prompts=4", "sampling.group=4", "reward_pool.workers=0"),
    *("model.path=PLACE/model", "data.max_prompt_tokens=24", "sampling.max_new_tokens=24"),
)
ROWS = "data.train=PLACE/rows.jsonl"
PLAYED = (ROWS, "rewards={reward={}}", "sampling.max_new_tokens=48")
KINDS: dict[str, tuple[str, ...]] = {
    "text": (ROWS,),
    "pairs": ("data.pairs=PLACE/pairs.jsonl",),
    "lists": ("data.pairs=PLACE/lists.jsonl",),
    "dialogues": ("data.train=dialogues:PLACE/talks.jsonl",),
    "episodes": (*PLAYED, "data.env=PLACE/own.py:one"),
    "two players": (*PLAYED, "data.env=PLACE/own.py:two"),
    "three players": (*PLAYED, "data.env=PLACE/own.py:three"),
}
"""Configurations to try, in order. Prompts in text compile soonest, and suit most methods."""


def write_data(root):
    """Files in PLACE: two checkpoints, questions, pairs, lists with steps, and dialogues."""
    about = {"eos_token": "<end>", "chat_template": TEMPLATE}
    for seed, name in enumerate(("model", "another")):
        params = jax.jit(transformer(SHAPE).init)(jax.random.key(seed))
        hf.save(root / name, SHAPE, jax.device_get(params))
        byte_tokenizer().save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(json.dumps(about))
    (root / "own.py").write_text(OWN)
    questions = [f"{i}+{i}?" for i in range(8)]
    files = {
        "rows": [
            {"question": text, "answer": str(2 * i), "solution": f"is {2 * i}", "hints": ["sum"]}
            | {"solutions": [f"is {2 * i}", f"{i} more"]}
            for i, text in enumerate(questions)
        ],
        "pairs": [
            {"prompt": text, "chosen": "ab", "rejected": "c", "rationale": "d"}
            | {"chosen_score": 2.0, "rejected_score": 1.0}
            for text in questions
        ],
        "lists": [
            {"prompt": [5, 6, i], "responses": [[1, 2, 3], [4, 5], [6, 7]], "scores": [1, 0.5, 0]}
            | {"steps": [[2, 1], [2], [1, 1]], "step_values": [[0.5, 1], [0], [0.5, 0]]}
            | {"visits": [9, 3, 1]}
            for i in range(8)
        ],
        "talks": [
            {
                "messages": [
                    {"role": "user", "content": questions[i // 4]},
                    {"role": "assistant", "content": ["yes", "no"][i % 2]},
                    {"role": "user", "content": "on"},
                    {"role": "assistant", "content": str(i)},
                ],
                "rewards": [0, i % 2],
            }
            for i in range(16)
        ],
    }
    for name, rows in files.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def configuration(name, kind, place):
    """A run of the method on data of that kind, checked as far as runs are before they compile.

    Raises:
      UserError: it cannot be trained so.
    """
    published = all_methods()[name]
    required = [c for c in published.coefficients.values() if c.required]
    values = {c.name: c.domain.example for c in required} | COEFFICIENTS.get(name, {})
    method = published(**values)
    lines = [*COMMON, *KINDS[kind], f"method={name}"]
    lines += [f"objective.{key}={json.dumps(value)}" for key, value in values.items()]
    others = frozen_names(method.objective, method.schedule) - {"ref"} - method.schedule.frozen
    lines += [f"frozen.{other}=PLACE/another" for other in sorted(others)]
    if "several solutions" in method.needs.reads:
        lines.append("data.fields.solution=solutions")
    if kind == "text":
        parts = FUNCTIONS[: max(1, len(method.parts))]
        inside = ", ".join(f"'PLACE/own.py:{function}'={{}}" for function in parts)
        lines.append(f"rewards={{{inside}}}")
    config = load_config(None, [line.replace("PLACE", str(place)) for line in lines])
    run = build.setup(config)
    check_trainable(run)
    check_own_parts(run)
    return config


def first_that_fits(name, place):
    """(the run on the first kind of data that it can be trained on, which kind that is).

    The reasons against every kind fail the test where there is none.
    """
    reasons = {}
    for kind in KINDS:
        try:
            return configuration(name, kind, place), kind
        except UserError as error:
            reasons[kind] = str(error)
    pytest.fail(f"{name} trains on nothing: {json.dumps(reasons, indent=1)}")


def two_steps(config):
    """The metrics of two training steps, as ``jrl train`` makes them."""
    metrics = []

    def note(done, state, step_metrics, groups, cursor):
        metrics.append(jax.device_get(step_metrics))
        return False

    run = build.setup(config)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(reward_pool(config))
        stack.enter_context(jax.set_mesh(run.mesh))
        state, shardings = programs.new_state(run)
        batches = stack.enter_context(training_batches(run, pool, 0, {}, Stopping()))
        train_steps(
            state,
            batches,
            programs.train_program(run, shardings),
            jax.device_put(run.sampling_params, replicated(run.mesh)),
            config.train.steps,
            weights=drawn_weights(run),
            on_step=note,
        )
    return metrics


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [method["name"] for method in list_methods()])
def test_two_steps_change_the_weights(name, place):
    config, _ = first_that_fits(name, place)
    steps = two_steps(config)
    assert len(steps) == 2
    for step_metrics in steps:
        assert np.isfinite(step_metrics["loss"])
        assert np.isfinite(step_metrics["grad_norm"])
        assert not step_metrics["skipped_updates"]
    assert max(step_metrics["grad_norm"] for step_metrics in steps) > 0


def test_what_a_method_reads_of_the_data_is_said_before_anything_compiles(place):
    """Reward parts by number, rationales, and players."""
    for name, kind, text in (
        ("car", "episodes", "method = 'car' reads 2 reward parts in this order: right, confidence"),
        ("tool_star", "episodes", "reads 3 reward parts in this order: form, answer, tools used;"),
        ("rdpo", "text", "'rdpo', which reads rationales, needs data.pairs: nothing else brings"),
        ("comas", "two players", "objective.policies = 3"),
    ):
        with pytest.raises(UserError) as raised:
            configuration(name, kind, place)
        assert text in str(raised.value), name
