"""The method of a run: what its schedule over all steps asks of a resumed one."""

import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.setup.objective import check_total_steps


def test_a_schedule_over_all_steps_does_not_change_its_length():
    def run(method, steps, *more):
        return load_config(None, [f"method={method}", f"train.steps={steps}", *more])

    with pytest.raises(UserError, match="train.steps = 5 there, 9 now: the schedule of method = "):
        check_total_steps(run("epo_entropy", 5), run("epo_entropy", 9))
    check_total_steps(run("epo_entropy", 5), run("epo_entropy", 5))
    check_total_steps(run("grpo", 5), run("grpo", 9))
    fixed = "objective.total_steps=9"
    check_total_steps(run("epo_entropy", 5, fixed), run("epo_entropy", 9, fixed))
