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
"""What members are drawn for: to be trained on, to be compared with, to be read by a plan alone."""


class Tokens(struct.PyTreeNode):
    """Token sequences of different lengths.

    Attributes:
      ids: [A, W] int32, from column 0; past ``lengths`` any value.
      lengths: [A] int32; 0 for an empty sequence.
    """

    ids: Any
    lengths: Any


class Ask(struct.PyTreeNode):
    """Entry a asks for ``count[a]`` members of ``ticket[a]``, from number ``first[a]`` on.

    Attributes:
      ticket: [A] int32; None for new ones, which the loop issues before anything is drawn.
      row: [A] int32, the problem in the data; None where the curriculum chooses it.
      first: [A] int32, the number of the entry's first member.
      count: [A] int32, 0 to ``width`` members; 0 asks for nothing.
      temperature: [A] float32, in place of the run's; 0 is greedy; None for the run's.
      limit: [A] int32, the most tokens drawn; None for the run's.
      context: prompts to draw under in place of the problems' own; None for these. What is drawn
        is judged without them.
      prefix: the first completion tokens, which are not drawn; what is drawn is judged with them.
      prior: [A] float32 by name, what a plan on the host says of new groups, as a curriculum says
        of problems; it comes back in ``PlacedGroups.prior``, 0 for all others. None for nothing.
      width: static, members that an entry has room for.
      use: static, ``TRAIN``, ``BASELINE`` or ``ASIDE``.
      keep: static, whether members are also trained under the context that they were drawn under.
      prefix_as: static; "past": nobody is trained on the prefix. "given": it is a demonstration,
        trained on, of no policy's version.
      policy: static, the name of the weights that draw, "policy" or one of ``Plan.policies``.
      tree: static, how the entry's members branch off one another or are searched for.
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
      weights: trees by name: "policy", those of ``Plan.policies``, "value" where it is read.
      versions: [] int32 by the same names: how many training steps made each.
      step: [] int32, the training step that the members are for.
      asks: with all tickets issued; all of the same tickets and rows.
      split: static, "train" or "eval".
      stream: static, of the run's keys that training members are drawn with: "sample", or
        "curriculum" for what a curriculum draws between rounds. An evaluation has one of its own.
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
