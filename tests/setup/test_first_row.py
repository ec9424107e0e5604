"""Which rows need a reference answer."""

import numpy as np
import pytest

from jrl.config import load_config
from jrl.rewards import ANSWERLESS, make_reward
from jrl.rewards.base import Sample
from jrl.setup.first_row import needs_answer

REWARDS = """
def long(completions, **columns): return [1.0] * len(completions)
def right(completions, answer): return [1.0] * len(completions)
def read(completions, **columns): return [float(a == "4") for a in columns["answer"]]
def samples(samples): return [float(s.prompt.answer == "4") for s in samples]
def rollout(completion, **state): return 1.0
"""


@pytest.mark.parametrize(
    ("rewards", "needed"),
    [
        ("majority", False),
        ("think_format_reward", False),
        ("exact", True),
        ("length_in_group", True),
        ("code", False),
        ("instructions", False),
        ("{a={function='judge', model='m', template='{completion}'}}", False),
        ("{a={function='judge', model='m', template='{completion} {reference}'}}", True),
        ("{a={function='judge', model='m', form='pairwise'}}", True),
        ("{a={function='judge', model='m', form='pairwise', against='group'}}", False),
        ("{a={function='judge', model='m', form='fapo'}}", True),
        ("{a={function='judge', model='m', form='rubric', column='r'}}", False),
        ("own.py:long", False),
        ("own.py:rollout", False),
        ("own.py:right", True),
        ("own.py:read", True),
        ("own.py:samples", True),
        ('["own.py:long", "math"]', True),
        ("{a={function='judge', model='m', form='pta_plan'}}", True),
        ("{a={function='judge', model='m', form='own.py:form'}}", True),
        ("sandbox_fusion", False),
        ("{}", True),
        ("maths", False),  # no such reward, which is the mistake to name
        ("own.py", False),
    ],
)
def test_rows_need_an_answer_where_a_reward_reads_it(rewards, needed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(REWARDS)
    assert needs_answer(load_config(None, ["data.train=x.jsonl", f"rewards={rewards}"])) == needed


def test_rewards_without_an_answer_do_not_read_it():
    class Prompt:
        """A prompt that fails whoever asks for its answer."""

        meta, text, messages, question = {}, "2?", (), "2?"

        @property
        def answer(self):
            raise AssertionError

    texts = "two<think>", "four and more<think>"  # of two lengths
    samples = [Sample(Prompt(), t, np.arange(len(t)), "stop_token") for t in texts]
    options = {
        "soft_overlong": {"limit": 8, "cache": 4},
        "get_soft_overlong_punishment": {"max_completion_len": 8, "soft_punish_cache": 4},
        "format": {"pattern": "a"},
        "tools_used": {"names": ["a"]},
    }
    for name in ANSWERLESS:
        assert make_reward(name, **options.get(name, {}))(samples) is not None
