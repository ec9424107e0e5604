"""Sizes that cannot fit in memory are refused before anything compiles, all by one check."""

import json
import pathlib
import types

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.data.datasets import MemoryRows
from jrl.data.tables import Mixture
from jrl.errors import UserError
from jrl.evaluate import evaluate_run, sample_run
from jrl.evaluate.search import search_run
from jrl.evaluate.statistics import pass_at_k
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run.compare import compare
from jrl.serving.launch import served_policy
from jrl.setup.kind import RunData
from jrl.setup.kinds import EpisodeKind, kind_of
from jrl.setup.objective import method_of
from jrl.setup.reward_parts import parts_of
from jrl.train import build
from jrl.train import memory_check as fits
from jrl.train.memory_check import UNDIVIDED, held_models
from jrl.zoo.tools.reproducibility import measure_drift

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
TASK = (
    "data.task=sorting",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
)
MANY = 2_000_000_000
KEY = jax.random.key(0)
TOO_LARGE = {
    f"train.prompts={MANY}": f"train.prompts = {MANY} with sampling.group = 8, 6 + 6 tokens each",
    f"eval.problems={MANY}": f"eval.problems = {MANY} with eval.samples = 1,",
    f"eval={{samples=1000000, problems={MANY}, temperature=1}}": "with eval.samples = 1000000,",
    f"warmup={{steps=1, batch={MANY}}}": f"warmup.batch = {MANY},",
    "model.config.mlp_dim=2000000000": "model.config: the weights: this takes at least",
}


@pytest.mark.parametrize("override", TOO_LARGE)
def test_a_run_that_cannot_fit_is_refused_with_its_bytes(override):
    with pytest.raises(UserError) as raised:
        build.setup(load_config(None, [*TASK, override]))
    assert TOO_LARGE[override] in str(raised.value)
    assert "of memory, and there are" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_what_is_not_drawn_or_trained_is_not_counted():
    config = load_config(None, [*TASK, f"train.prompts={MANY}", f"eval.problems={MANY}"])
    assert build.setup(config, trains=False).config.train.prompts == MANY  # and is not refused


PLAIN = {"meshes": (), "dtypes": ()}
COMMANDS = {
    "--count = ": lambda config: sample_run(config, count=MANY),
    "--width = ": lambda config: search_run(config, "beam", width=10**12),
    "--batch = ": lambda config: measure_drift(config, batches=(1, MANY), problems=2, **PLAIN),
    "--problems = ": lambda config: measure_drift(config, batches=(1, 2), problems=10**12, **PLAIN),
    "--seeds = ": lambda config: compare(
        config, methods=["grpo"], tasks=["sorting"], seeds=MANY, out=pathlib.Path("none")
    ),
    "--slots = ": lambda config: served_policy(config, checkpoint=None, slots=MANY),
    "eval.problems = ": lambda config: evaluate_run(
        config.model_copy(update={"eval": config.eval.model_copy(update={"problems": MANY})})
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_what_cannot_fit(command):
    with pytest.raises(
        UserError, match="this takes at least .* of memory, and there are"
    ) as caught:
        COMMANDS[command](load_config(None, list(TASK)))
    assert str(caught.value).startswith(command)


def test_weights_of_data_that_repeat_a_source_beyond_memory():
    rows = MemoryRows([{"question": "1"}])
    assert len(Mixture({"a": rows, "b": rows}, {"a": 1, "b": 3})) == 4
    with pytest.raises(UserError, match=r"'b' = 1e\+12: this takes at least 36.4 TiB of memory"):
        Mixture({"a": rows, "b": rows}, {"a": 1, "b": 1e12})


def test_the_bytes_are_those_of_the_arrays():
    """By hand: 3 prompts of 10 tokens, 2 completions of 5 each; float32 keys and values."""
    model = ModelConfig(vocab_size=32, max_length=64, **SIZES)
    assert fits.token_cache_bytes(model) == 2 * 2 * 8
    assert fits.token_cache_bytes(model, 4) == 4 * 2 * 2 * 8
    config = load_config(None, ["model.path=x", "data.train=a.jsonl", "sampling.max_new_tokens=5"])
    kind = kind_of(config)
    run = types.SimpleNamespace(config=config, model=model, kind=kind, width=10)
    needed = 4 * 3 * 10 + 13 * 3 * 2 * 5 + (3 * 10 + 3 * 2 * 5) * 128

    def check(available, monkeypatch):
        monkeypatch.setattr(fits, "available_bytes", lambda: available)
        fits._check(run, "a = 3", 3, 2)

    with pytest.MonkeyPatch.context() as monkeypatch:
        check(needed, monkeypatch)
        with pytest.raises(UserError, match="a = 3, 10 \\+ 5 tokens each: this takes at least"):
            check(needed - 1, monkeypatch)


def test_parts_that_are_sampled_in_turn_and_groups_of_questions_are_counted(monkeypatch):
    """By hand: a batch of SPARK has 4 more groups and longer rows; a cache has 2 of 4 prompts."""
    sizes, model = [], ModelConfig(vocab_size=32, max_length=64, **SIZES)
    monkeypatch.setattr(fits, "check_fits", lambda message, size, *rest, **more: sizes.append(size))
    for name in ("check_weights", "check_held_models"):
        monkeypatch.setattr(fits, name, lambda run: None)
    lines = ("model.path=x", "data.train=a.jsonl", "sampling.max_new_tokens=5", "train.prompts=4")
    lines = (*lines, "sampling.group=2")
    for more in ((), ("sampling.draws=2",), ("method=spark", "objective.question_tokens=7")):
        config = load_config(None, [*lines, *more])
        kind = kind_of(config)
        method = method_of(config, kind.new_tokens)
        run = types.SimpleNamespace(config=config, model=model, kind=kind, method=method)
        run.width, run.data = 10, RunData({}, {}, {})
        fits.check_training(run)
    rows, cached = 4 * 4 * 10 + 13 * 4 * 2 * 5, (4 * 10 + 4 * 2 * 5) * 128
    questions = 4 * 8 * 10 + 13 * 8 * 2 * (5 + 7)
    assert sizes == [rows + cached, rows + cached / 2, questions + cached]


def test_the_states_of_a_likelihood_are_counted():
    """By hand: 6 texts of 40 tokens and an answer's, float32, and 9 distributions of 32."""
    lines = ("model.path=x", "data.train=a.jsonl", "sampling.max_new_tokens=20")
    part = "rewards={math={}, p={function='likelihood', rows=6, max_answer_tokens=9}}"
    config = load_config(None, [*lines, "data.max_prompt_tokens=20", part])
    policy = ModelConfig(vocab_size=32, max_length=64, **SIZES)
    (likely,) = held_models(config, parts_of(config), policy)
    assert (likely.part, likely.weight_bytes()) == ("p", 0)
    assert likely.working_bytes() == 6 * (20 + 20 + 9) * 16 * 4 + 9 * 32 * 4
    short = ModelConfig(vocab_size=32, max_length=45, **SIZES)  # no longer text is read
    assert held_models(config, parts_of(config), short)[0].tokens == 45
    assert held_models(config, parts_of(config), None) == []


def test_pass_at_k_of_a_million_completions_takes_no_time():
    """The binomials of its definition have hundreds of thousands of digits."""
    correct = np.zeros((2, 1_000_000), bool)
    correct[0, :2] = True
    assert pass_at_k(correct, 500_000) == pytest.approx((1 - 0.25) / 2, abs=1e-6)


def test_all_contexts_of_an_episode_are_counted(monkeypatch):
    sizes, space = [], types.SimpleNamespace
    monkeypatch.setattr(fits, "check_fits", lambda message, size, *rest, **more: sizes.append(size))
    for contexts in (1, 3):
        config = space(
            sampling=space(max_new_tokens=10, int8=(), slots=4),
            data=space(options={"contexts": contexts}),
        )
        run = space(config=config, kind=EpisodeKind(config), width=8, model=None)
        fits._check(run, "train.prompts = 2 with sampling.group = 4", 2, 4)
    assert sizes[1] - sizes[0] == 2 * 4 * (2 * 10) * fits._TOKEN_BYTES


JUDGE = "function='judge', form='yes_no', template='{completion}', max_prompt_tokens=40"
JUDGE += ", max_tokens=24"


@pytest.fixture(scope="module")
def models_directory(tmp_path_factory):
    """The sizes of a judge and of a reward model, without weights: nothing more is read."""
    root = tmp_path_factory.mktemp("beside")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 40}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": False, "model_type": "qwen3"}
    for name, head in (("judge", "CausalLM"), ("reward", "SequenceClassification")):
        (root / name).mkdir()
        labels = {"id2label": {"0": "good"}, "label2id": {"good": 0}}
        raw = sizes | {"architectures": [f"Qwen3For{head}"]} | (labels if name != "judge" else {})
        (root / name / "config.json").write_text(json.dumps(raw))
    return root


def with_models(models_directory, *names):
    judge, reward = models_directory / "judge", models_directory / "reward"
    parts = {
        "good": f"{{{JUDGE}, model='{judge}', at_once=5}}",
        "again": f"{{{JUDGE}, model='{judge}', at_once=5}}",
        "own": f"{{{JUDGE}, model='policy', at_once=7}}",
        "help": f"{{function='model', path=['{reward}', '{reward}']}}",
    }
    chosen = ", ".join(f"{name}={parts[name]}" for name in names)
    return load_config(None, [*TASK, f"rewards={{verify={{}}, {chosen}}}"])


BLOCK = 16 * (2 + 2 * 1) * 8 + 2 * 8 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 8
"""Numbers of a layer: queries, keys, values; output; feed-forward; norms, those of heads too."""


def test_judges_and_reward_models_are_counted_beside_the_policy(models_directory, monkeypatch):
    """By hand: float32 weights of 2 layers, an ensemble of two, one cache at a time."""
    trunk = 4 * (2 * BLOCK + 40 * 16 + 16)
    config = with_models(models_directory, "good", "again", "own", "help")
    policy = ModelConfig(vocab_size=32, max_length=64, **SIZES)
    good, again, same_model, help_ = held_models(config, parts_of(config), policy)
    assert [each.weight_bytes() for each in (again, same_model)] == [0, 0]  # weights that are there
    assert good.weight_bytes() == trunk + 4 * 40 * 16  # and the head
    assert help_.weight_bytes() == 2 * trunk  # a classifier has none
    assert good.working_bytes() == again.working_bytes() == 5 * (40 + 24) * 2 * 2 * 8 * 4
    assert same_model.working_bytes() == 7 * (40 + 24) * 2 * 2 * 8 * 4
    assert help_.working_bytes() == 0
    halves = dict(UNDIVIDED) | {"fsdp": 2}
    assert good.weight_bytes(halves) < 0.6 * good.weight_bytes()
    assert good.working_bytes(halves) == 3 * (40 + 24) * 2 * 2 * 8 * 4  # 5 of 2 devices
    run = types.SimpleNamespace(config=config, rewards=parts_of(config), model=policy)
    run.network = transformer(policy)
    weights = sum(4 * x.size for x in jax.tree.leaves(jax.eval_shape(run.network.init, KEY)))
    needed = weights + good.weight_bytes() + help_.weight_bytes() + same_model.working_bytes()
    for least, too_small in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(fits, "available_bytes", lambda least=least: least)
        if too_small:
            message = r"rewards.good and .* and rewards.help: the weights beside .* at_once"
            with pytest.raises(UserError, match=message):
                fits.check_held_models(run)
        else:
            fits.check_held_models(run)


def test_a_run_is_refused_before_its_judge_is_loaded(models_directory, monkeypatch):
    """No weights are there; reading them would be another error."""
    monkeypatch.setattr(fits, "_policy_bytes", lambda run: 1e18)
    monkeypatch.setattr(fits, "check_weights", lambda run: None)
    with pytest.raises(UserError, match="rewards.good: the weights beside the policy's with what"):
        build.setup(with_models(models_directory, "good"))
