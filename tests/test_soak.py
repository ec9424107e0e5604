"""The soak of ``tests/soak.py``, a tenth of it: half an hour of the whole is ``make soak``.

JRL_SOAK_STEPS, _KILLS and _MODES make it longer or shorter.
"""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(7200)  # three modes, each of some minutes
def test_thousands_of_steps_and_many_kills_leave_nothing_and_change_nothing(checkout, tmp_path):
    steps = os.environ.get("JRL_SOAK_STEPS", "1000")
    kills = os.environ.get("JRL_SOAK_KILLS", "4")
    modes = os.environ.get("JRL_SOAK_MODES", "host,compiled,episodes")
    record = ["--record", str(checkout / "tests" / "last_soak.md")] if steps == "10000" else []
    done = subprocess.run(
        [
            *(sys.executable, str(checkout / "tests" / "soak.py"), "--dir", str(tmp_path / "soak")),
            *("--modes", modes, "--steps", steps, "--kills", kills, *record),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{steps} steps") == len(modes.split(","))
    assert done.stdout.count(f"{kills} SIGKILLs") == len(modes.split(","))
