"""A policy is asked and exported where the files of its data are not."""

import json

import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate import sample_run
from jrl.run.export import export_run


@pytest.fixture
def config(letters_model):
    keys = [f"model.path={json.dumps(str(letters_model))}", "data.template=plain"]
    keys += ["data.train=gone.jsonl", "data.eval=gone.jsonl", "rewards={'gone.py:f'={}}"]
    return load_config(None, [*keys, "sampling.max_new_tokens=4", "sampling.group=2"])


def test_a_policy_answers_prompts_without_the_files_of_its_run(config):
    questions = ["a", "is this a longer one"]
    answers = sample_run(config, prompts=questions)
    assert [a["prompt"] for a in answers] == [q for q in questions for _ in range(2)]
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        sample_run(config)
    with pytest.raises(UserError, match="the prompt has .* data.max_prompt_tokens is 512; raise"):
        sample_run(config, prompts=["a" * 600])


def test_and_so_is_it_exported(config, tmp_path):
    assert (export_run(config, tmp_path / "out") / "model.safetensors").exists()
