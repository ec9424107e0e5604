"""Verl's rewards that run programs, and its choice by data source."""

import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.run.reference_check import check_verifiers
from jrl.types import Prompt
from jrl.verifiers import code as programs
from jrl.zoo.rewards import verl


def sample(completion, answer, source=None, id=0):
    prompt = Prompt(id, "?", np.zeros(1, np.int32), answer, {"data_source": source})
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token")


def points(name, *samples, **options):
    return make_reward(name, **options)(list(samples))


HALF = "```python\nn = int(input())\nprint(n if n % 2 else 0)\n```"
"""Right of odd numbers."""
TESTS = {"inputs": [f"{n}\n" for n in (*range(10), 11, 13)]}
TESTS["outputs"] = TESTS["inputs"]


def test_a_share_of_the_first_ten_tests(monkeypatch):
    """0 and the five odd ones of the ten are right, and both after them; each program runs once."""
    ran, judge = {}, programs.judge

    def once(program, tests, *limits, stop):
        if program.strip() not in ran:
            ran[program.strip()] = judge(program, tests, *limits)
        return ran[program.strip()]

    monkeypatch.setattr(programs, "judge", once)
    half, complete = sample(HALF, TESTS), sample("```python\nprint(input())\n```", TESTS)
    assert points("prime_code", half, complete) == [0.0, 1.0]
    assert points("prime_code", half, complete, continuous=True) == [0.6, 1.0]
    bare = sample("print(input())", TESTS)
    shares = points("sandbox_fusion", half, complete, bare, timeout=4.0)
    assert shares == pytest.approx([8 / 12, 1.0, 0.0])
    assert points("sandbox_fusion", half, timeout=4.0, continuous=True) == [0.6]
    assert verl._limits(3.0, 9.0)["total_seconds"] == 6.0
    for name in ("timeout", "memory_limit_mb"):
        with pytest.raises(
            UserError, match=rf"rewards\.sandbox_fusion\.{name} = 0 must be above 0"
        ):
            verl.sandbox_fusion([], **{name: 0})


BLOCKS = {
    "```python\nprint(1)\n``` Output: ```\n1\n```": ("\nprint(1)\n", "\nprint(1)\n"),
    "```python\nprint(1)": ("\nprint(1)", "\nprint(1)"),  # cut off
    "```\nprint(1)\n``` or ```\nprint(2)\n```": ("", "\nprint(1)\n"),
    "```py\nprint(1)\n```": ("", "print(1)\n"),
    "```print(1)```": ("", "print(1)"),
}


@pytest.mark.parametrize("text", BLOCKS)
def test_programs_are_found_as_verl_finds_them(text):
    """Prime_code reads up to the first fence where no block is Python's."""
    assert (verl._after_python(text), verl._in_fences(text)) == BLOCKS[text]


CHOSEN = {
    "openai/gsm8k": ("#### 4", 1.0),
    "HuggingFaceH4/MATH-500": (r"\boxed{4}", 1.0),
    "math_dapo": ("Answer: 5", -1.0),
    "aime2024": ("Answer: 4", 1.0),
    "numina_olympiads": ("The answer is 4.", 1.0),
    "hiyouga/geometry3k": (r"\boxed{4}", 0.9),
    "searchR1_nq": ("<answer>4</answer>", 1.0),
}


def test_a_reward_is_chosen_by_the_data_source(monkeypatch):
    """Each is one that the others would not give."""
    samples = [sample(text, "4", source) for source, (text, _) in CHOSEN.items()]
    assert points("default_compute_score", *samples) == [x for _, x in CHOSEN.values()]
    options = []
    monkeypatch.setattr(verl, "prime_code", lambda samples, **how: options.append(how) or [0.5])
    assert points("default_compute_score", sample(HALF, TESTS, "taco")) == [0.5]
    assert options == [{"continuous": True}]
    with pytest.raises(UserError, match=r"prompt 0 has data_source = 'gsm8k', which has no reward"):
        points("default_compute_score", sample("4", "4", "gsm8k"))


def test_rows_of_another_source_are_named_before_a_run():
    config = load_config(None, ["data.train=x.jsonl", "rewards={default_compute_score={}}"])
    sources = enumerate(("openai/gsm8k", "mine"))
    rows = [sample("", "4", source, id).prompt for id, source in sources]
    with pytest.raises(UserError, match=r"1 of 2 rows ask for what it cannot judge.*\n.*'mine'"):
        check_verifiers(config, {"train": rows})
