"""A resumed run is told of what changed in its files: every kind, by name, whatever the path."""

import dataclasses
import datetime
import decimal
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.config import load_config
from jrl.config.stored import stored_contents
from jrl.data.pairs import Judged
from jrl.episodes.transcript import Segment, Transcript
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer
from jrl.run.contents import check_contents, contents_of
from jrl.setup.kind import RunData
from jrl.types import Prompt, StopReason


def ids(*numbers):
    return np.array(numbers, np.int32)


def prompt(**changes):
    fields = {"meta": {"level": 3, "tags": np.array(["a", "b"], object)}, "solution": ids(7)}
    return dataclasses.replace(Prompt(0, "1 + 1?", ids(3, 4), "2", **fields), **changes)


def row(**changes):
    return Judged(0, "q", ids(3), (ids(4, 1), ids(5, 1)), (1.0, 0.0), (False, False))._replace(
        **changes
    )


def session(token=5):
    segment = Segment(ids(token, 1), True, np.zeros(2, np.float32), np.full(2, -1, np.int32))
    return Transcript(prompt(), 0, ids(3), (segment,), StopReason.STOP_TOKEN)


def run_of(prompts=(), evals=(), pairs=(), sessions=(), *overrides):
    data = RunData(
        {"train": list(prompts), "eval": list(evals)},
        {"pairs": list(pairs)} if pairs else {},
        {},
        [list(sessions)] if sessions else (),
    )
    config = load_config(None, ["data.task=sorting", *overrides])
    return SimpleNamespace(data=data, tokenizer=char_tokenizer(), config=config)


CHANGES = {
    "a question": ("data.train", ([prompt()],), ([prompt(tokens=ids(3, 5))],)),
    "an answer": ("data.train", ([prompt()],), ([prompt(answer="3")],)),
    "a further column": ("data.train", ([prompt()],), ([prompt(meta={"level": 4})],)),
    "a date in a column": (
        "data.train",
        ([prompt(meta={"day": datetime.date(2026, 1, 1)})],),
        ([prompt(meta={"day": datetime.date(2026, 1, 2)})],),
    ),
    "an exact number in a column": (
        "data.train",
        ([prompt(meta={"price": decimal.Decimal("1.50")})],),
        ([prompt(meta={"price": decimal.Decimal("1.60")})],),
    ),
    "a solution": ("data.train", ([prompt()],), ([prompt(solution=ids(8))],)),
    "the order": (
        "data.train",
        ([prompt(), prompt(answer="3")],),
        ([prompt(answer="3"), prompt()],),
    ),
    "a question of the evaluation": ("data.eval", ([], [prompt()]), ([], [prompt(answer="3")])),
    "a chosen answer": (
        "data.pairs",
        ([], [], [row()]),
        ([], [], [row(completions=(ids(6, 1), ids(5, 1)))]),
    ),
    "a score": ("data.pairs", ([], [], [row()]), ([], [], [row(scores=(0.0, 1.0))])),
    "a dialogue": ("data.train", ([], [], [], [session()]), ([], [], [], [session(6)])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_was_read_is_seen(name):
    key, before, after = CHANGES[name]
    one, same, other = (contents_of(run_of(*args)) for args in (before, before, after))
    assert one == same
    assert {k for k in one if one[k] != other[k]} == {key}


def log(directory, contents, *resumed):
    directory.mkdir(exist_ok=True)
    header = {"versions": {}, "config": {}, "contents": contents}
    header |= {"resumed": [{"step": 1, "contents": each} for each in resumed]} if resumed else {}
    (directory / "metrics.jsonl").write_text(json.dumps(header) + "\n")
    return directory


def test_lost_rows_and_other_rows_are_refused_by_key(tmp_path):
    before = contents_of(run_of([prompt(), prompt()], [prompt()]))
    now = contents_of(run_of([prompt()], [prompt(answer="3")]))
    check_contents(log(tmp_path / "run", before), before)
    with pytest.raises(UserError) as caught:
        check_contents(tmp_path / "run", now)
    text = str(caught.value)
    assert "data.train has 1 rows, and had 2 when the run began" in text
    assert "data.eval holds other rows than when the run began" in text
    assert "put them back, or start again in another run.dir" in text


def test_adapters_and_code_of_the_user_s_own_are_compared_by_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    weights, code = tmp_path / "adapters" / "adapter_model.safetensors", tmp_path / "points.py"
    weights.write_bytes(b"a" * 100)
    code.write_text("def f(samples): return [1.0]\n")
    lora = ("model.path=M", "lora.rank=4", "lora.path='adapters'")
    run = run_of([], [], [], [], *lora, 'rewards={"points.py:f"={}}')
    before = contents_of(run)
    assert {"lora.path", "points.py"} <= before.keys()
    directory = log(tmp_path / "run", before)
    code.write_text("def f(samples): return [2.0]\n")
    with pytest.warns(UserWarning, match=r"points.py has changed since the run in .* began"):
        check_contents(directory, contents_of(run))
    log(directory, before, contents_of(run))  # it was resumed with the new one: said once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_contents(directory, contents_of(run))
    weights.write_bytes(b"a" * 99 + b"b")
    with pytest.raises(UserError, match=r"lora.path holds other adapters than when the run began"):
        check_contents(directory, contents_of(run))


def test_the_middle_of_a_large_file_is_left_out_but_its_size_and_ends_are_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("jrl.run.contents._WHOLE", 10)
    file = tmp_path / "weights"
    where = f"lora.path={json.dumps(str(tmp_path))}"
    run = run_of([], [], [], [], "model.path=M", "lora.rank=4", where)
    checksums = set()
    for data in (b"a" * 2**21, b"b" + b"a" * (2**21 - 1), b"a" * (2**21 - 1) + b"b", b"a" * 99):
        file.write_bytes(data)
        checksums.add(contents_of(run)["lora.path"])
    assert len(checksums) == 4


def changes(run, path, text):
    """Keys of the contents that differ once a file holds something else."""
    before = contents_of(run)
    path.write_text(text)
    now = contents_of(run)
    return {key for key in now if before.get(key) != now[key]}


def test_models_that_judge_are_compared_also_those_of_an_ensemble(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = [tmp_path / name / "model.safetensors" for name in ("one", "two", "who")]
    for each in weights:
        each.parent.mkdir()
        each.write_text("a")
    ensemble = "rewards={help={function='model', path=['one', 'two']}}"
    run = run_of([], [], [], [], ensemble)
    assert changes(run, weights[0], "b") == changes(run, weights[1], "b") == {"rewards.help.path"}
    (tmp_path / "who" / "config.json").write_text("{}")
    judge = run_of([], [], [], [], "rewards={says={function='judge', model='who'}}")
    assert changes(judge, weights[2], "b") == {"rewards.says.model"}


def test_of_a_run_that_rewards_the_newest_step_counts_and_no_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = tmp_path / "model" / "checkpoints"
    for step in ("00000001", "00000002"):
        (steps / step / "state").mkdir(parents=True)
        (steps / step / "state" / "array").write_text("a")
    (steps.parent / "config.toml").write_text("")
    run = run_of([], [], [], [], "rewards={help={function='model', path='model'}}")
    assert changes(run, steps.parent / "report.html", "b") == set()
    assert changes(run, steps / "00000001" / "state" / "array", "b") == set()
    assert changes(run, steps / "00000002" / "state" / "array", "b") == {"rewards.help.path"}


def test_files_that_own_code_imports_and_that_options_name_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, code = tmp_path / "words.txt", tmp_path / "points.py"
    (tmp_path / "lib").mkdir()
    code.write_text("from lib import table\nimport near\ndef f(samples, words): return [1.0]\n")
    for name in ("lib/table.py", "lib/__init__.py", "near.py", "deep.py", "words.txt"):
        (tmp_path / name).write_text("import deep\n" if name == "near.py" else "x = 1\n")
    run = run_of([], [], [], [], """rewards={"points.py:f"={words=['words.txt', 'other']}}""")
    for name in ("deep.py", "lib/table.py", "lib/__init__.py", "near.py"):
        assert changes(run, tmp_path / name, "x = 2\n") == {name}
    before = contents_of(run)
    key = "rewards.points.py:f.words = 'words.txt'"
    assert changes(run, words, "other") == {key}
    with pytest.warns(UserWarning, match=f"{key} has changed since the run in .* began"):
        check_contents(log(tmp_path / "run", before), contents_of(run))


def test_tools_in_a_list_are_the_user_s_own_files_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("x = 1\n")
    run = run_of([], [], [], [], """rewards={"a:b"={tools=[{call='own.py:look'}]}}""")
    assert changes(run, tmp_path / "own.py", "x = 2\n") == {"own.py"}


def test_logs_without_hashes_are_resumed_as_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"versions": {}, "config": {}}\n')
    assert stored_contents(tmp_path) == {}
    check_contents(tmp_path, contents_of(run_of([prompt()])))
