"""The configuration of a run: its tables, read from TOML, checked, explained and written.

- ``tables``, ``data``, ``tree``, ``optimizer``: every key with its type, limits and meaning
- ``features``: one table of what does not go together; ``checks``, ``numbers``: values that
  contradict each other, and that no key may hold
- ``read``: TOML and ``KEY=VALUE`` to a checked configuration
- ``explain``: error messages for mistakes
- ``keys``: the keys as data, for help and documentation
- ``write``, ``secrets``: back to TOML, without secrets
- ``stored``: the configuration that a run directory holds
"""

from __future__ import annotations

from jrl.config.checks import check_batch
from jrl.config.keys import Key, describe, table_note, table_of, variants
from jrl.config.optimizer import Optimizer
from jrl.config.read import build_config, from_table, load_config
from jrl.config.tables import Config
from jrl.config.write import as_tree, config_hash, dump, flatten, may_differ

__all__ = [
    "Config",
    "Key",
    "Optimizer",
    "as_tree",
    "build_config",
    "check_batch",
    "config_hash",
    "describe",
    "dump",
    "flatten",
    "from_table",
    "load_config",
    "may_differ",
    "table_note",
    "table_of",
    "variants",
]


def __dir__() -> list[str]:
    """The public names, without those that the module imports."""
    return sorted(__all__)
