"""The working directory after code of users that changed it."""

import os

import pytest

from jrl.system.working_directory import same_working_directory


@pytest.mark.parametrize("removed", [False, True])
def test_what_changed_the_working_directory_is_named_and_undone(tmp_path, caplog, removed):
    before, inside = os.getcwd(), tmp_path / "inside"
    inside.mkdir()
    with same_working_directory("data.env"):
        os.chdir(inside)
        if removed:
            inside.rmdir()
    assert os.getcwd() == before
    place = "one that is gone" if removed else inside
    assert f"data.env changed the working directory of the process to {place}," in caplog.text
    assert "it was set back; write absolute paths" in caplog.text


def test_nothing_is_said_where_nothing_has_changed(caplog):
    with same_working_directory("data.env"):
        pass
    assert not caplog.text
