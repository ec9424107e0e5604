"""The shipped configurations of rewards that run something, on rows of their layout."""

import json

import numpy as np
import pytest

from jrl.config import load_config
from jrl.data.datasets import open_dataset
from jrl.rewards import Sample
from jrl.setup.reward_parts import reward_pool
from jrl.types import Prompt


def points(name, rows, completions, tmp_path, group=1):
    """Rewards of the configuration's parts for a completion of each row, read from a file."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["model.path=none", f"data.train={tmp_path}/train.jsonl", "mesh.fsdp=1"]
    config = load_config(f"configs/{name}.toml", [*options, "reward_pool.workers=1"])
    read = list(open_dataset(config.data.train))
    keys = {"question": "question", "answer": "answer"} | dict(config.data.fields or {})
    prompts = [
        Prompt(i, row[keys["question"]], np.zeros(1, np.int32), row[keys["answer"]], row)
        for i, row in enumerate(read)
    ]
    prompts = [prompts[i - i % group] for i in range(len(prompts))]
    samples = [
        Sample(prompt, text, np.zeros(1, np.int32), "stop_token")
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    with reward_pool(config) as pool:
        scores = pool.scores(samples, group=group)
    return dict(zip(pool.functions, scores.points.T, strict=True))


def test_code(tmp_path):
    tests = {"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]}
    rows = [{"question": "Double it.", "input_output": json.dumps(tests)}] * 2
    texts = ["```python\nprint(2 * int(input()))\n```", "```python\nprint(6)\n```"]
    paid = points("code", rows, texts, tmp_path)
    assert paid["code"] == pytest.approx([1.0, 0.0])


def test_sql(tmp_path):
    row = {
        "question": "How many?",
        "schema": "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1), (2);",
        "query": "SELECT count(*) FROM t",
    }
    paid = points("sql", [row] * 2, ["```sql\nSELECT count(a) FROM t\n```", "SELECT 3"], tmp_path)
    assert paid["sql"] == pytest.approx([1.0, 0.0])
    assert paid["sql_syntax"] == pytest.approx([1.0, 1.0])
    assert paid["sql_schema"] == pytest.approx([0.5, 0.0])
    assert 0 < paid["sql_ngrams"][0] < 1


def test_intrinsic(tmp_path):
    rows = [{"question": "2 + 2?", "answer": "So it is 4.\n#### 4"}] * 4
    texts = [rf"\boxed{{{x}}}" for x in ("4", "5", "5.0", "4")]
    paid = points("intrinsic", rows, texts, tmp_path, group=4)
    assert paid["agree"] == pytest.approx([0.5] * 4)
    assert paid["entropy"] == pytest.approx([-np.log(2)] * 4)
    sure = points("intrinsic", rows, texts[:1] * 4, tmp_path, group=4)
    assert np.isnan(sure["agree"]).all()
