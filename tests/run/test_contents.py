"""A resumed run is told of what changed in its files: every kind, by name, whatever the path."""

import dataclasses
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
from jrl.setup.kinds import RunData
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


def test_logs_without_hashes_are_resumed_as_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"versions": {}, "config": {}}\n')
    assert stored_contents(tmp_path) == {}
    check_contents(tmp_path, contents_of(run_of([prompt()])))
