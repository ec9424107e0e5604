"""A server over thousands of requests, good and bad: memory, threads and files stay."""

import json

import pytest

from benchmarks import serving

pytestmark = pytest.mark.extra("serve")


@pytest.mark.slow
def test_nothing_grows(capsys):
    """Megabytes of growth are allowed to the allocator; a cache a completion took gigabytes."""
    serving.main(["--requests", "3000", "--every", "500"])
    summary = json.loads(capsys.readouterr().out)
    assert not summary["unexpected"]
    assert summary["statuses"]["200"] > 1000
    assert summary["statuses"]["400"] > 500
    assert summary["growth_mb"] < 40
    assert max(summary["threads"]) - min(summary["threads"]) <= 2
    assert max(summary["files"]) - min(summary["files"]) <= 2
