"""The README's promises about the demo: minutes long, so run it with ``pytest -m slow``.

The runs are those of a user: optimised programs, in a process without the tests' flags, with which
programs compile sooner and run several times as long.
"""

import json
import os
import subprocess
import sys

import pytest

from jrl.storage.metrics import read_jsonl

DEMO = """
import json, sys
from jrl.config import load_config
from jrl.run.run import train

config = load_config("configs/tiny.toml", sys.argv[1:])
assert config.eval.problems >= 500
summary = train(config, echo=lambda line: None)
print(json.dumps([summary["accuracy_before"], summary["accuracy_after"]]))
"""


def demo(checkout, *changes):
    """(accuracy before, after) of a run of the demo."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", DEMO, *changes],
        cwd=checkout,
        env=environment | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_rl_takes_the_tiny_policy_from_below_one_half_to_above_nine_tenths(
    seed, checkout, tmp_path
):
    before, after = demo(checkout, f"run.dir={tmp_path}", f"seed={seed}")
    assert before < 0.5
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_run_does_not_fall_below_its_start(seed, checkout, tmp_path):
    """As one that pays for parts of an answer did: it first learned not to stop."""
    before, after = demo(checkout, f"run.dir={tmp_path}", f"seed={seed}", "train.steps=20")
    assert after >= before
    truncated = [r["truncated"] for r in read_jsonl(tmp_path / "metrics.jsonl")[1:]]
    assert truncated[-1] < truncated[0] + 0.1
