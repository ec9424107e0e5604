"""Names of run directories."""

import time

from jrl.system.directories import fresh_dir


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own():
    names = set()
    for _ in range(3):
        names.add(fresh_dir("configs/grpo"))
        time.sleep(0.002)
    assert len(names) == 3
    assert {path.parent.name for path in names} == {"runs"}
    assert fresh_dir("mine.py:f").name.startswith("mine-f-20")
