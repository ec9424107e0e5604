"""Sizes that cannot fit in memory are refused before anything compiles, all by one check."""

import pathlib
import types

import numpy as np
import pytest

from jrl.compare import compare
from jrl.config import load_config
from jrl.data.sources import MemoryRows
from jrl.data.tables import Mixture
from jrl.drift import measure_drift
from jrl.errors import UserError
from jrl.evaluate import evaluate_run, sample_run
from jrl.evaluate.search import search_run
from jrl.evaluate.statistics import pass_at_k
from jrl.models.config import ModelConfig
from jrl.serving.launch import served_policy
from jrl.train import build, fits
from jrl.train.kinds import EpisodeKind, kind_of

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
TASK = (
    "data.task=sorting",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
)
MANY = 2_000_000_000
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


@pytest.mark.parametrize("said", COMMANDS)
def test_commands_refuse_what_cannot_fit(said):
    with pytest.raises(UserError, match="this takes at least .* of memory, and there are") as found:
        COMMANDS[said](load_config(None, list(TASK)))
    assert str(found.value).startswith(said)


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


def test_pass_at_k_of_a_million_completions_takes_no_time():
    """The binomials of its definition have hundreds of thousands of digits."""
    correct = np.zeros((2, 1_000_000), bool)
    correct[0, :2] = True
    assert pass_at_k(correct, 500_000) == pytest.approx((1 - 0.25) / 2, abs=1e-6)


def test_all_contexts_of_an_episode_are_counted(monkeypatch):
    sizes, space = [], types.SimpleNamespace
    monkeypatch.setattr(fits, "check_fits", lambda said, size, *rest, **more: sizes.append(size))
    for contexts in (1, 3):
        config = space(
            sampling=space(max_new_tokens=10, int8=(), slots=4),
            data=space(options={"contexts": contexts}),
        )
        run = space(config=config, kind=EpisodeKind(config), width=8, model=None)
        fits._check(run, "train.prompts = 2 with sampling.group = 4", 2, 4)
    assert sizes[1] - sizes[0] == 2 * 4 * (2 * 10) * fits._TOKEN_BYTES
