"""Old names of modules lead to the new ones."""

import importlib
import importlib.util
import re

import pytest

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.system.moved_modules import MOVED, moved_to


def test_an_old_name_says_the_new_one():
    assert moved_to("jrl.envs.host") == "jrl.episodes.host"
    assert moved_to("jrl.envs.games.nim") == "jrl.zoo.envs.games.nim"
    assert moved_to("jrl.nothing") is moved_to("json.envs") is moved_to("jrl") is None
    with pytest.raises(ModuleNotFoundError, match=r"^jrl\.own is jrl\.user_code now$"):
        importlib.import_module("jrl.own")
    with pytest.raises(
        ModuleNotFoundError, match=r"^jrl\.envs is jrl\.episodes now; environments are"
    ):
        importlib.import_module("jrl.envs.players")
    with pytest.raises(ModuleNotFoundError, match="No module named 'jrl.nothing'"):
        importlib.import_module("jrl.nothing")


def test_an_old_name_in_a_configuration_says_the_new_one():
    with pytest.raises(UserError, match=r"there is no module .*; name jrl\.zoo\.methods\.entropy"):
        get_method("jrl.methods.entropy:aepo")


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_gone_and_new_ones_are_there(old):
    for new in re.split(r", | and ", MOVED[old]):
        new = f"zoo.adapters{new}" if new.startswith(".") else new
        assert importlib.util.find_spec(f"jrl.{new}"), new
    with pytest.raises(ModuleNotFoundError, match=r" is jrl\..* now"):
        importlib.import_module(f"jrl.{old}")
