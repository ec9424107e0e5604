"""A user's reward functions, called once before anything compiles."""

import json

import pytest
from hub_mirror import checkpoint, lines

from jrl.config import load_config
from jrl.errors import UserError
from jrl.run.reward_probe import probe_rewards
from jrl.run.run import train
from jrl.setup.reward_parts import reward_pool
from jrl.train import build

WRONG = {
    "completions[0][0]['content']": r"write completions\[i\] where TRL's",
    "0.5": "float",
    "[]": "0",
    "['a' for c in completions]": "str",
    "[float('nan') for c in completions]": "nan",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("probe")
    checkpoint(place / "model", chat=True)
    (place / "a.jsonl").write_text(lines([{"question": "a?", "answer": "1"}]))
    return place


def run_of(place, name, body, *more):
    (place / f"{name}.py").write_text(f"def f(completions, answer):\n    return {body}\n")
    reward = f"rewards={{{json.dumps(f'{place}/{name}.py:f')}={{}}}}"
    names = [f"model.path={json.dumps(str(place / 'model'))}", f"data.train={place / 'a.jsonl'}"]
    config = load_config(None, [*names, reward, "reward_pool.workers=0", *more])
    return build.setup(config), reward_pool(config)


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_reward_is_one_line(body, place):
    run, pool = run_of(place, f"wrong{list(WRONG).index(body)}", body)
    with pytest.raises(UserError, match=WRONG[body]) as caught:
        probe_rewards(run, pool)
    assert "\n" not in str(caught.value)


def test_a_right_one_is_called_once_with_the_answer(place):
    path = str(place / "answer-")  # a second call could not make it again
    body = f"__import__('os').mkdir({path!r} + answer[0]) or [float(c == a) for c, a in "
    body += "zip(completions, answer)]"
    run, pool = run_of(place, "right", body)
    probe_rewards(run, pool)
    assert (place / "answer-1").is_dir()
    run, pool = run_of(place, "lenient", "1 / 0", "reward_pool.on_error=zero")
    probe_rewards(run, pool)  # fails, and is allowed to


def test_in_a_process_of_its_own_too(place):
    run, pool = run_of(place, "pooled", "'text'", "reward_pool.workers=1")
    with pool, pytest.raises(UserError, match="str"):
        probe_rewards(run, pool)


def test_on_a_task_with_one_of_its_problems(place):
    """A right answer gets its point; a function that is wrong is refused before a run begins."""
    (place / "task.py").write_text(
        "def right(samples):\n"
        "    assert sorted(samples[0].prompt.text[:-1]) == list(samples[0].completion)\n"
        "    return [float(s.completion == s.prompt.answer) for s in samples]\n\n\n"
        "def twice(samples):\n    return [0.0, 0.0]\n"
    )
    sizes = "{layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    for name, message in (("right", None), ("twice", "returned 2 numbers for 1 sample ")):
        reward = f"rewards={{{json.dumps(f'{place}/task.py:{name}')}={{}}}}"
        overrides = ["data.task=sorting", f"model.config={sizes}", reward, "reward_pool.workers=0"]
        config = load_config(None, overrides)
        run, pool = build.setup(config), reward_pool(config)
        if message is None:
            probe_rewards(run, pool)
            continue
        with pytest.raises(UserError, match=message):
            probe_rewards(run, pool)


def test_one_by_token_is_told_where_tokens_end(place):
    (place / "first.py").write_text(
        "import pathlib\n\ndef f(samples):\n"
        f"    pathlib.Path({str(place / 'ends')!r}).write_text(str(len(samples[0].ends)))\n"
        "    return [samples[0].by_token([(0, 1, 1)])]\n"
    )
    reward = f"rewards={{{json.dumps(f'{place}/first.py:f')}={{by_token=true}}}}"
    names = [f"model.path={json.dumps(str(place / 'model'))}", f"data.train={place / 'a.jsonl'}"]
    config = load_config(None, [*names, reward, "reward_pool.workers=0"])
    probe_rewards(build.setup(config), reward_pool(config))
    assert int((place / "ends").read_text()) > 0


def test_a_row_whose_own_solution_is_wrong_ends_a_run_before_it_begins(
    place, tmp_path, monkeypatch
):
    monkeypatch.setenv("JRL_CACHE_DIR", str(tmp_path / "cache"))
    row = {"question": "a?", "schema": "CREATE TABLE t (a)", "answer": "SELECT b FROM t"}
    (tmp_path / "sql.jsonl").write_text(lines([row]))
    names = [f"model.path={json.dumps(str(place / 'model'))}", f"data.train={tmp_path}/sql.jsonl"]
    more = ["rewards={sql={}}", "reward_pool.workers=0", f"run.dir={tmp_path}/run"]
    with pytest.raises(UserError, match=r"data.train, row 1: .*no such column: b"):
        train(load_config(None, [*names, *more]), echo=lambda line: None)
    assert not (tmp_path / "run").exists()
