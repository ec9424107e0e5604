"""Every key, spoiled in every way: one good line, before anything compiles, no files left."""

import json
import pathlib

import pytest
from compilations import compilations
from mistakes import BASES, Mistake, all_mistakes, set_up, write_sound_files

from jrl.config import describe, load_config
from jrl.errors import UserError

MISTAKES = all_mistakes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint with a tokenizer of letters, questions and pairs; all is right."""
    return write_sound_files(tmp_path_factory.mktemp("sound"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory, which must stay empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def check(mistake: Mistake, message: str):
    """One line or two, which name the key and the value, and say more than that."""
    lines = message.splitlines()
    assert 1 <= len(lines) <= 2, message
    assert mistake.key in message
    value = mistake.value.replace("1e300", "1e+300")
    assert value.lower() in message.lower()
    assert "Error:" not in message or "tfds" in message, message
    assert all(": " in line or "; " in line or "?" in line for line in lines)
    assert max(map(len, lines)) < 1000


@pytest.mark.parametrize("base", BASES)
def test_what_is_spoiled_was_sound(base, place):
    set_up(place, BASES[base])


def test_every_key_is_spoiled():
    keys = {mistake.key for mistake in MISTAKES}
    assert {key.name for key in describe()} <= keys
    assert len(MISTAKES) > 1200


# A quarter of them; all go through the command line in the full run of the tests.
SHARE = [*MISTAKES[::4], *(each for each in MISTAKES if each.form.startswith("contradiction"))]


@pytest.mark.parametrize("key", sorted({mistake.key for mistake in SHARE}))
def test_mistakes(key, place):
    with compilations() as compiled:
        for mistake in (each for each in SHARE if each.key == key):
            with pytest.raises(UserError) as raised:
                set_up(place, mistake.overrides)
            check(mistake, str(raised.value))
    programs = {f"jit({name})" for name in ("make", "generate", "task_rollout", "step")}
    assert programs.isdisjoint(each.program for each in compiled)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(8))
def test_mistakes_on_the_command_line(start, place, tmp_path):
    """Exit code 2, no traceback, nothing left behind: through the command's own entry."""
    from typer.testing import CliRunner

    from jrl.cli.app import app

    for mistake in MISTAKES[start::8]:
        overrides = [text.replace("PLACE", str(place)) for text in mistake.overrides]
        if not any("run.dir" in text for text in overrides):
            overrides = [f"run.dir={json.dumps(str(tmp_path / 'run'))}", *overrides]
        result = CliRunner().invoke(app, ["train", *overrides])
        assert result.exit_code == 2, (mistake, result.output)
        assert "Traceback" not in result.output, (mistake, result.output)
        assert result.stderr.startswith("jrl: error: "), (mistake, result.output)
        assert mistake.key in result.stderr, (mistake, result.stderr)
        assert not list(pathlib.Path(tmp_path).iterdir()), mistake


DUPLICATES = {
    "[train]\nsteps = 1\nsteps = 2\n": "line 3",
    "[train]\nsteps = 1\n[train]\nprompts = 2\n": "line 3",
    "train = {steps = 1, steps = 2}\n": "line 1",
    "[train]\nsteps = 1\n[train.steps]\nx = 1\n": "line 3",
    "[[train]]\nsteps = 1\n[[train]]\nsteps = 2\n": "train = [{'steps': 1}, {'steps': 2}]; must be",
    '"train.steps" = 5\n': 'unknown key "train.steps": quotes make one name of it',
    '["train.steps"]\nx = 1\n': 'unknown key "train.steps": quotes make one name of it',
    '[rewards]\n"exact.weight" = 2\n': "exact.weight",
    "[train]\nstеps = 1\n": "not valid TOML",  # noqa: RUF001 - a Cyrillic letter
    '[train]\n"stеps" = 1\n': "did you mean train.steps?",  # noqa: RUF001
    '[train]\n" steps" = 1\n': "did you mean train.steps?",
    "[train]\nsteps = 01\n": "line 2",
    "[train]\nsteps = '1'\n": "train.steps = '1'; must be a whole number",
    "[train]\nsteps = \n": "line 2",
    "[train\nsteps = 1\n": "line 1",
    "train: {steps: 1}\n": "line 1",
    "[Train]\nsteps = 1\n": "did you mean train?",
    "[CHECKPOINT]\nkeep = 1\n": "did you mean checkpoint?",
}


@pytest.mark.parametrize("text", DUPLICATES)
def test_files_with_keys_twice_or_misquoted(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_config(path, ["data.task=sorting"])
    assert DUPLICATES[text] in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
