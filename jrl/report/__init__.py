"""Reports: plots, and HTML pages of one run or of several.

page      curves and samples of one run, from its directory
health    what asks for a look, and how each number moved
samples   which samples a page holds
overlay   several runs over each other
"""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.report.overlay": ("write_overlay",),
    "jrl.report.page": ("write_report",),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.report.overlay import write_overlay as write_overlay
    from jrl.report.page import write_report as write_report
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
