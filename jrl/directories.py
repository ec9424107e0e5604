"""Names of run directories, and what one holds of a run that was stopped."""

from __future__ import annotations

import datetime
from pathlib import Path


def fresh_dir(name: str) -> Path:
    """A directory under ``runs/`` that is not there yet: NAME-TIME."""
    base = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = base, 1
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def what_is_saved(directory: Path) -> str:
    """What a stopped run can be resumed from, in a sentence."""
    folder = directory / "checkpoints"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    if not steps:
        return f"metrics are in {directory}; no checkpoint has been written yet"
    return f"step {max(steps)} is saved; `jrl train {directory}` resumes from it"
