"""The records of the five hops, the values an algorithm is made of, and the axis letters.

| letter | axis                    | letter | axis                  |
| ------ | ----------------------- | ------ | --------------------- |
| N      | prompts                 | S      | decode slots          |
| G      | samples of one prompt   | C      | cache length          |
| B      | sequences, N * G        | V      | vocabulary            |
| P      | prompt tokens           | D      | embedding             |
| T      | completion tokens       | H, K   | query, key-value heads |
| L      | P + T                   | h      | head size             |
| R      | reward parts            | F, E   | feed-forward, experts |

Completions keep the group axis, ``[N, G, T]``, so a group is an array axis and never a convention
about row order. Only aggregates see ``[B, T]``. Names in lower case in ``models/`` and
``sampling/`` spell the axes out (``q_bthk``).
"""

from __future__ import annotations

from types import ModuleType

from jrl.types.network import Cache as Cache
from jrl.types.network import Derived as Derived
from jrl.types.network import Head as Head
from jrl.types.network import Network as Network
from jrl.types.network import NetworkExtras as NetworkExtras
from jrl.types.network import SharedRows as SharedRows
from jrl.types.network import Split as Split
from jrl.types.network import Stack as Stack
from jrl.types.network import ValueNetwork as ValueNetwork
from jrl.types.network import Views as Views
from jrl.types.objective import Aggregate as Aggregate
from jrl.types.objective import Branching as Branching
from jrl.types.objective import Objective as Objective
from jrl.types.objective import Regularizer as Regularizer
from jrl.types.objective import Search as Search
from jrl.types.objective import Statistic as Statistic
from jrl.types.objective import Surrogate as Surrogate
from jrl.types.objective import Transform as Transform
from jrl.types.records import NOTHING as NOTHING
from jrl.types.records import SILENT as SILENT
from jrl.types.records import STATISTICS as STATISTICS
from jrl.types.records import STREAMS as STREAMS
from jrl.types.records import Array as Array
from jrl.types.records import Batch as Batch
from jrl.types.records import Packing as Packing
from jrl.types.records import Params as Params
from jrl.types.records import Prompt as Prompt
from jrl.types.records import Rollout as Rollout
from jrl.types.records import RoutingRecord as RoutingRecord
from jrl.types.records import Stats as Stats
from jrl.types.records import StopReason as StopReason
from jrl.types.records import TrainState as TrainState
from jrl.types.records import opinions as opinions
from jrl.types.records import stream as stream


def __dir__() -> list[str]:
    """The public names, without modules."""
    hidden = {"ModuleType", "annotations"}
    public = {n for n, x in globals().items() if n[0] != "_" and not isinstance(x, ModuleType)}
    return sorted(public - hidden)
