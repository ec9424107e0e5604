"""The pieces of ``harness`` as fixtures, for the tests of the core's methods and the zoo's."""

import harness
import pytest


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
