"""Memory and time of a run on TPUs or GPUs, from its programs compiled without them.

- ``topology``: chips, slices, and devices to compile for
- ``lower``: a run without data or weights, and its two programs traced for a mesh
- ``hlo``, ``costs``: operations, bytes and collectives of a compiled program
- ``kernels``: launches in the loops of a program compiled for a GPU, and returns to the host
- ``memory``: bytes on a chip, and what would make a program fit
- ``records``, ``roofline``: what a plan holds, and times from costs
- ``compile``: a run's programs, compiled
- ``count``: the same from counting alone, within seconds
- ``make``: the plan of a run, on the same devices or with devices of their own for rollout
- ``search``: candidates for mesh, remat, microbatches and placement, ranked
- ``text``: a plan as text and JSON
"""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.plan.make": ("make_plan",),
    "jrl.plan.records": ("Plan",),
    "jrl.plan.text": ("as_json", "as_text"),
    "jrl.plan.topology": ("Topology", "parse_topology"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.plan.make import make_plan as make_plan
    from jrl.plan.records import Plan as Plan
    from jrl.plan.text import as_json as as_json
    from jrl.plan.text import as_text as as_text
    from jrl.plan.topology import Topology as Topology
    from jrl.plan.topology import parse_topology as parse_topology
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
