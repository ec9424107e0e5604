"""What the README promises of the demo: minutes long, so run it with ``pytest -m slow``."""

import pytest

from jrl.config import load_config
from jrl.metrics import read_jsonl
from jrl.run.run import train


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_takes_the_tiny_policy_from_below_one_half_to_above_nine_tenths(
    seed, checkout, tmp_path
):
    config = load_config(checkout / "configs/tiny.toml", [f"run.dir={tmp_path}", f"seed={seed}"])
    assert config.eval.problems >= 500
    summary = train(config, echo=lambda line: None)
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_run_does_not_fall_below_its_start(seed, checkout, tmp_path):
    """As one that pays for parts of an answer did: it first learned not to stop."""
    changes = [f"run.dir={tmp_path}", f"seed={seed}", "train.steps=20"]
    summary = train(load_config(checkout / "configs/tiny.toml", changes), echo=lambda line: None)
    assert summary["accuracy_after"] >= summary["accuracy_before"]
    truncated = [r["truncated"] for r in read_jsonl(tmp_path / "metrics.jsonl")[1:]]
    assert truncated[-1] < truncated[0] + 0.1
