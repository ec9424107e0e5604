"""Training: the state, the compiled step, the programs of a run, and the loop around them.

What a run is made of is in ``jrl.setup``, what draws groups in ``jrl.collect``, what scores rows in
``jrl.judging``.

The package can be called: ``from jrl import Config, train``, then ``train(Config(...))``, is
``jrl.fit`` of a configuration alone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

HOMES = {
    "jrl.collect.groups": ("place_batch", "to_batch"),
    "jrl.collect.sources": ("Groups", "Source", "entries", "join_groups", "simple_request"),
    "jrl.collect.sources_task": ("task_rollout",),
    "jrl.train.compiled": ("held_out", "make_run", "warm_start", "with_policy"),
    "jrl.train.loop": ("train_steps",),
    "jrl.train.optimizer": ("make_optimizer",),
    "jrl.train.state": ("init_state", "state_shardings"),
    "jrl.train.step": ("compile_step", "make_step"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from pathlib import Path

    from jrl.collect.groups import place_batch as place_batch
    from jrl.collect.groups import to_batch as to_batch
    from jrl.collect.sources import Groups as Groups
    from jrl.collect.sources import Source as Source
    from jrl.collect.sources import entries as entries
    from jrl.collect.sources import join_groups as join_groups
    from jrl.collect.sources import simple_request as simple_request
    from jrl.collect.sources_task import task_rollout as task_rollout
    from jrl.config import Config
    from jrl.train.compiled import held_out as held_out
    from jrl.train.compiled import make_run as make_run
    from jrl.train.compiled import warm_start as warm_start
    from jrl.train.compiled import with_policy as with_policy
    from jrl.train.loop import train_steps as train_steps
    from jrl.train.optimizer import make_optimizer as make_optimizer
    from jrl.train.state import init_state as init_state
    from jrl.train.state import state_shardings as state_shardings
    from jrl.train.step import compile_step as compile_step
    from jrl.train.step import make_step as make_step
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)


class _Callable(ModuleType):
    """This package. ``jrl.train`` is what a script looks for, and the package has that name."""

    def __call__(self, config: Config | str | Path, **options: Any) -> Any:
        """Trains a configuration, as ``jrl train`` does.

        Args:
          config: a configuration, or a TOML file.
          **options: as ``jrl.fit`` takes them by name, such as ``dir`` and ``on_step``.

        Returns:
          What ``jrl.fit`` returns.
        """
        # the entry stands above this package, whose modules import downwards only
        return sys.modules["jrl"].fit(config=config, **options)


sys.modules[__name__].__class__ = _Callable
