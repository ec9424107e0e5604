"""A server over thousands of requests, good and bad: memory, threads and files stay."""

import json

import pytest

from benchmarks import serving

pytestmark = pytest.mark.extra("serve")


@pytest.mark.slow
def test_nothing_grows(capsys):
    """Megabytes of growth are allowed to the allocator; a cache a completion took gigabytes."""
    serving.main(["--requests", "3000", "--every", "500"])
    found = json.loads(capsys.readouterr().out)
    assert not found["unexpected"]
    assert found["statuses"]["200"] > 1000
    assert found["statuses"]["400"] > 500
    assert found["growth_mb"] < 40
    assert max(found["threads"]) - min(found["threads"]) <= 2
    assert max(found["files"]) - min(found["files"]) <= 2
