"""Everything on disk: checkpoints, the run directory and its lock, metrics and their sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.storage.checkpoints": ("Checkpoints",),
    "jrl.storage.metrics": ("CLOCKS", "read_jsonl"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.storage.checkpoints import Checkpoints as Checkpoints
    from jrl.storage.metrics import CLOCKS as CLOCKS
    from jrl.storage.metrics import read_jsonl as read_jsonl
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
