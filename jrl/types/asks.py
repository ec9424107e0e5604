"""Asks: members to sample for each problem, and their settings; from plans to sources.

    ask = new_ask(tickets, rows, group)                   # G members of each of N problems
    request = DrawRequest(key, weights, versions, step, (ask, greedy))
    groups = source.draw(request)

A *row* is a problem of the data. A *ticket* is one use of it: the training loop issues tickets in
ascending order, and the random numbers of a member follow from (key, step, ticket, member) alone.
Baselines, demonstrations, refills, hints, critiques, branches and searches are all asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.types import Array, Branching, Params, Search

TRAIN, BASELINE, ASIDE = 0, 1, 2
"""Uses of members: to train on, as a baseline, or only for the plan."""


class Tokens(struct.PyTreeNode):
    """Token sequences of different lengths.

    Attributes:
      ids: [A, W] int32, from column 0; past ``lengths`` any value.
      lengths: [A] int32; 0 for an empty sequence.
    """

    ids: Any
    lengths: Any


class Ask(struct.PyTreeNode):
    """A request for members: entry a samples ``count[a]`` of ``ticket[a]``, from ``first[a]`` on.

    Attributes:
      ticket: [A] int32; None for new ones, which the loop issues before sampling.
      row: [A] int32, the problem in the data; None if the curriculum chooses it.
      first: [A] int32, the number of the entry's first member.
      count: [A] int32, 0 to ``width`` members; 0 asks for nothing.
      temperature: [A] float32; 0 is greedy; None for the run's.
      limit: [A] int32, most sampled tokens; None for the run's.
      context: prompts to sample under, such as a hint; None for the problems' own. Rewards ignore
        them.
      prefix: forced first completion tokens; rewards include them.
      prior: [A] float32 by name, a plan's description of new groups, on the host alone; returned in
        ``PlacedGroups.prior``, 0 for all other groups. None for nothing.
      width: static, members that an entry has room for.
      use: static, ``TRAIN``, ``BASELINE`` or ``ASIDE``.
      keep: static, whether members are trained under their context, too.
      prefix_as: static; "past": the prefix is not trained on. "given": it is trained on as a
        demonstration, with version -1.
      policy: static, name of the sampling weights, "policy" or one of ``Plan.policies``.
      tree: static, the branching or search that makes the entry's members.
    """

    ticket: Any
    row: Any
    first: Array
    count: Array
    temperature: Array | None = None
    limit: Array | None = None
    context: Tokens | None = None
    prefix: Tokens | None = None
    prior: Mapping[str, Any] | None = None
    width: int = struct.field(pytree_node=False, default=1)
    use: int = struct.field(pytree_node=False, default=TRAIN)
    keep: bool = struct.field(pytree_node=False, default=False)
    prefix_as: Literal["past", "given"] = struct.field(pytree_node=False, default="past")
    policy: str = struct.field(pytree_node=False, default="policy")
    tree: Branching | Search | None = struct.field(pytree_node=False, default=None)

    @property
    def entries(self) -> int:
        """A."""
        return int(self.count.shape[0])


Asks = tuple[Ask, ...]
"""Several where static choices differ; entries of equal tickets belong to one group."""


class DrawRequest(struct.PyTreeNode):
    """A request for the groups of a training step.

    Attributes:
      key: the run's root key.
      weights: parameter trees by name: "policy", ``Plan.policies``, and "value" if it is read.
      versions: [] int32 by the same names: training steps that made each.
      step: [] int32, the training step that the members are for.
      asks: with all tickets issued; all of the same tickets and rows.
      split: static, "train" or "eval".
      stream: static, stream of random keys for training: "sample", or "curriculum" for samples of
        a curriculum between rounds. Evaluations have a stream of their own.
      newer: static, () -> newer weights, or None, for rollouts that change weights between chunks.
    """

    key: Array
    weights: Mapping[str, Params]
    versions: Mapping[str, Any]
    step: Any
    asks: Asks
    split: Literal["train", "eval"] = struct.field(pytree_node=False, default="train")
    stream: Literal["sample", "curriculum"] = struct.field(pytree_node=False, default="sample")
    newer: Callable[[], Any] | None = struct.field(pytree_node=False, default=None)


def new_ask(tickets: Any, rows: Any, count: int, **how: Any) -> Ask:
    """``count`` members, from number 0 on, of each ticket.

    Args:
      tickets: [A] int32.
      rows: [A] int32.
      count: members; also the width.
      **how: further fields of ``Ask``.

    >>> new_ask(np.array([6, 7]), np.array([2, 0]), 4).count.tolist()
    [4, 4]
    """
    # On the host an ask is made of NumPy arrays, so that nothing is dispatched to a device.
    xp: Any = np if isinstance(tickets, np.ndarray) else jnp
    zeros = xp.zeros(tickets.shape, np.int32)
    how = {"width": count, **how}
    return Ask(tickets, rows, first=zeros, count=zeros + np.int32(count), **how)
