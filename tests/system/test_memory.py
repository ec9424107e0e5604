"""What does not fit into memory is refused in one line, and what fits is not."""

import pytest

from jrl.errors import UserError
from jrl.system import memory


def test_the_host_has_memory():
    assert 2**28 < memory.host_bytes() < 2**50


def test_a_container_may_have_less(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP", (tmp_path / "none", limit))
    unlimited = memory.host_bytes()
    limit.write_text("max\n")
    assert memory.host_bytes() == unlimited
    limit.write_text("1048576\n")
    assert memory.host_bytes() == 2**20


def test_what_fits_passes_and_what_does_not_is_named():
    memory.check_fits("a = 1", 100, "lower a", available=100)
    with pytest.raises(UserError, match=r"a = 1: this takes at least 1 KiB .* 100 bytes; lower a"):
        memory.check_fits("a = 1", 1024, "lower a", available=100)
