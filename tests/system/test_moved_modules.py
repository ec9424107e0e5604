"""Old names of modules lead to the new ones."""

import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import jrl
from jrl.errors import UserError
from jrl.system.moved_modules import MOVED, RENAMED, moved_to
from jrl.user_code import load


def test_an_old_name_says_the_new_one():
    assert moved_to("jrl.envs.host") == "jrl.episodes.host"
    assert moved_to("jrl.envs.games.nim") == "jrl.zoo.envs.games.nim"
    assert moved_to("jrl.nothing") is moved_to("json.envs") is moved_to("jrl") is None
    with pytest.raises(ModuleNotFoundError, match=r"^jrl\.train\.replay is jrl.* and methods\.re"):
        importlib.import_module("jrl.train.replay")
    with pytest.raises(
        ModuleNotFoundError, match=r"is jrl\.episodes\.nothing now, and there is none"
    ):
        importlib.import_module("jrl.envs.nothing")
    with pytest.raises(ModuleNotFoundError, match="No module named 'jrl.nothing'"):
        importlib.import_module("jrl.nothing")


def test_an_old_name_is_the_same_module():
    """Not a second copy of its classes, whichever of them is imported first."""
    from jrl.episodes import host, parsers

    spec = host.__spec__
    with pytest.warns(FutureWarning, match=r"^jrl\.envs\.host is jrl\.episodes\.host now; write"):
        from jrl.envs.host import Feedback
    with pytest.warns(FutureWarning) as warned:
        from jrl.envs.parsers.hermes import HERMES
    assert [str(each.message) for each in warned] == [
        f"jrl.envs.{name} is jrl.episodes.{name} now; write the new name"
        for name in ("parsers", "parsers.hermes")
    ]
    assert Feedback is host.Feedback
    assert HERMES is parsers.PARSERS["hermes"]
    assert host.__spec__ is spec


@pytest.mark.parametrize("old", RENAMED)
def test_functions_of_an_old_name_have_their_old_names_too(old):
    with pytest.warns(FutureWarning):
        module = importlib.import_module(f"jrl.{old}")
    for name, new in RENAMED[old].items():
        assert getattr(module, name) is getattr(module, new)


def test_an_old_name_in_a_configuration_leads_to_the_new_one():
    from jrl.zoo.methods.entropy import aepo

    with pytest.warns(FutureWarning, match=r"is jrl\.zoo\.methods\.entropy now"):
        assert load("jrl.methods.entropy:aepo", "method") is aepo
    with pytest.raises(UserError, match=r"there is no module .*; name jrl\.methods\.stores and m"):
        load("jrl.train.replay:arpo", "method")


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_gone_and_new_ones_are_there(old):
    for new in re.split(r", | and ", MOVED[old]):
        new = f"zoo.adapters{new}" if new.startswith(".") else new
        assert importlib.util.find_spec(f"jrl.{new}"), new
        assert not pathlib.Path(jrl.__path__[0], *old.split(".")).with_suffix(".py").exists()


_ALL = """
import importlib, sys, types, warnings
warnings.simplefilter("ignore")
import jrl.episodes.play, jrl.episodes.search, jrl.methods
from jrl.system.moved_modules import MOVED
endpoint, reinforce, others = jrl.episodes.endpoint, jrl.methods.reinforce, []
for old in MOVED:
    try:
        importlib.import_module(f"jrl.{old}")
    except ImportError:  # in several modules, or of an extra
        others.append(old)
assert jrl.episodes.endpoint is endpoint and jrl.methods.reinforce is reinforce
assert len(others) < 20, others
for name, module in list(sys.modules.items()):
    if name.startswith("jrl.") and module.__name__ == name:
        parent, _, last = name.rpartition(".")
        value = getattr(sys.modules[parent], last)
        assert value is module or not isinstance(value, types.ModuleType), (name, value)
from jrl.envs import Env, host, play, search
assert Env is jrl.episodes.Env and host is jrl.episodes.host
assert play.__name__ == "jrl.episodes.device_play" and search.__name__ == "jrl.zoo.envs.search"
"""


def test_old_names_take_the_place_of_no_new_one():
    done = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_old_name_runs_as_a_program():
    command = [sys.executable, "-W", "ignore", "-m", "jrl.json_text"]
    assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize("old", ["episodes.endpoint", "methods.reinforce"])
def test_an_old_name_that_a_function_has_says_the_new_one(old):
    with pytest.raises(ModuleNotFoundError, match=rf"^jrl\.{old} is jrl\.{MOVED[old]} now$"):
        importlib.import_module(f"jrl.{old}")
