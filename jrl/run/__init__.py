"""A run from its configuration to its files: begins, resumes, records, evaluates and ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.run.compare": ("Interval", "interquartile_mean", "stratified_interval"),
    "jrl.run.export": ("export_run",),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.run.compare import Interval as Interval
    from jrl.run.compare import interquartile_mean as interquartile_mean
    from jrl.run.compare import stratified_interval as stratified_interval
    from jrl.run.export import export_run as export_run
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
