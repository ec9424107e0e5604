"""Training: the state, the compiled step, collecting rollouts, and the loop around them.

The package can be called: ``from jrl import Config, train``, then ``train(Config(...))``, is
``jrl.fit`` of a configuration alone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from jrl.config import Config


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
