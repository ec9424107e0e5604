"""Makes ``harness`` importable, and hands its pieces out as fixtures."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "methods"))

from method_fixtures import loss_and_gradients, make_batch, make_ragged  # noqa: F401
