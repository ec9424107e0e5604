"""Makes ``harness`` importable, and hands its pieces out as fixtures."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import harness


@pytest.fixture(scope="session")
def make_ragged():
    return harness.ragged


@pytest.fixture(scope="session")
def make_batch():
    return harness.as_batch


@pytest.fixture(scope="session")
def loss_and_gradients():
    """(method, batch, numbers) -> loss, gradients by name, through the public path."""

    def run(method, batch, d):
        return harness.loss_and_gradient(
            method, batch, harness.live_statistics(method, d, harness.LIVE)
        )

    return run
