"""The soak of ``tests/soak.py``; JRL_SOAK_STEPS and JRL_SOAK_KILLS make it shorter."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_thousands_of_steps_and_many_kills_leave_nothing_and_change_nothing(checkout, tmp_path):
    steps = os.environ.get("JRL_SOAK_STEPS", "10000")
    kills = os.environ.get("JRL_SOAK_KILLS", "30")
    record = ["--record", str(checkout / "tests" / "last_soak.md")] if steps == "10000" else []
    done = subprocess.run(
        [
            *(sys.executable, str(checkout / "tests" / "soak.py"), "--dir", str(tmp_path / "soak")),
            *("--steps", steps, "--kills", kills, *record),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{steps} steps" in done.stdout
    assert f"{kills} SIGKILLs" in done.stdout
