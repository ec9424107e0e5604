"""Names of run directories."""

from __future__ import annotations

import datetime
from pathlib import Path


def fresh_dir(name: str) -> Path:
    """A directory under ``runs/`` that is not there yet: NAME-TIME.

    The time has milliseconds, since a run makes its directory seconds after it was named: several
    begun by one loop of a shell would have the same.

    Args:
      name: of a method or a configuration; a function's file may stand before it.
    """
    short = Path(name).name.replace(".py:", "-").replace(":", "-")
    now = datetime.datetime.now()
    base = Path("runs") / f"{short}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03}"
    path, number = base, 1
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path
