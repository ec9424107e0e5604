"""Members that are trained under the context that they were drawn under, in a group of others.

A group has one prompt. With a member whose context is another one, the prompt becomes what both
begin with, and the rest of each prompt stands before the member's completion, where nobody drew it:
mask False, version -1. A group that was asked for under a context has it for its prompt; what is
longer than prompts are stands before its completions likewise. Every objective works on such rows,
as on those of an environment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jrl.collect.groups import EMPTY, PlacedGroups
from jrl.collect.members import numbers
from jrl.types import Rollout, StopReason
from jrl.types.asks import Asks

_FILLS = {"tokens": 0, "mask": False, "sampler_logprobs": 0.0, "versions": -1}


def in_common(
    groups: PlacedGroups, sampled: Any, asks: Asks, base: int
) -> tuple[PlacedGroups, Any]:
    """The groups, and what was drawn for them under other contexts, with prompts that fit together.

    Args:
      groups: on the host; completions have room for what moves out of a prompt.
      sampled: A ``Groups`` of an ask with contexts, on the host.
      asks: one, whose context is kept.
      base: the step's first ticket, which has place 0.

    Returns:
      (groups, sampled). A member that its row has no room for has stopped as ABORTED.
    """
    (ask,) = asks
    assert ask.context is not None
    width = groups.rollout.tokens.shape[2]
    ours = _Rows(groups.rollout, groups.stats, groups.ids, width)
    theirs = _Rows(sampled.rollout, sampled.stats or {}, sampled.ids, width)
    present = numbers(asks) >= 0
    prompts = np.array(groups.rollout.prompt_tokens)
    lengths = np.array(groups.rollout.prompt_lengths)
    opened, opened_lengths = theirs.prompts(prompts.shape[1], ask.context)
    tickets = np.asarray(ask.ticket)
    for a in np.flatnonzero(present.any(axis=1)).tolist():
        n = int(tickets[a]) - base
        context = np.asarray(ask.context.ids[a, : ask.context.lengths[a]], np.int32)
        if groups.ticket[n] == EMPTY:  # a group of its own, whose prompt the context is
            size = min(len(context), prompts.shape[1])
            prompts[n, :size] = context[:size]
            theirs.prepend(a, context[size:])
            lengths[n], opened[a], opened_lengths[a] = size, prompts[n], size
            continue
        prompt = prompts[n, : lengths[n]]
        size = _common(prompt, context)
        room = width - groups.rollout.lengths[n].max(initial=0)
        if len(prompt) - size > room:  # the others' rows would not hold the rest of their prompt
            theirs.leave_out(a)
            size = len(prompt)
        else:
            ours.prepend(n, prompt[size:])
            theirs.prepend(a, context[size:])
        lengths[n] = size
        opened[a], opened_lengths[a] = prompts[n], size
    groups = ours.into(groups, prompts, lengths)
    return groups, theirs.into(sampled, opened, opened_lengths)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix, at least 1 and less than either length."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return max(int(differ[0]) if len(differ) else size, 1)


class _Rows:
    """Completions on the host that tokens are put in front of.

    Args:
      rollout: [N, G, T].
      stats: [N, G, T] by name.
      ids: labels by name, of which those by token move along.
      width: columns of tokens, at least T.
    """

    def __init__(self, rollout: Rollout, stats: Any, ids: Any, width: int) -> None:
        self._rollout, by_token = rollout, rollout.tokens.shape[2]

        def wide(x: Any, fill: Any) -> np.ndarray:
            edges = [(0, 0), (0, 0), (0, width - by_token)]
            return np.pad(np.asarray(x), edges, constant_values=fill)

        self._arrays = {n: wide(getattr(rollout, n), fill) for n, fill in _FILLS.items()}
        self._stats = {n: wide(x, 0) for n, x in stats.items()}
        self._ids = {n: wide(x, 0) if np.ndim(x) == 3 else x for n, x in ids.items()}
        self._lengths, self._stop = np.array(rollout.lengths), np.array(rollout.stop)

    def prepend(self, n: int, tokens: np.ndarray) -> None:
        """Prepends tokens that were not sampled to the members of group n."""
        if not len(tokens):
            return
        labels = [x for x in self._ids.values() if np.ndim(x) == 3]
        arrays = [*self._arrays.values(), *self._stats.values(), *labels]
        for g in np.flatnonzero(self._stop[n] != StopReason.ABSENT):
            size, more = int(self._lengths[n, g]), len(tokens)
            if size + more > self._arrays["tokens"].shape[2]:
                self._stop[n, g] = StopReason.ABORTED
                continue
            for x in arrays:
                x[n, g, more : more + size] = x[n, g, :size].copy()
                x[n, g, :more] = 0
            self._arrays["tokens"][n, g, :more] = tokens
            self._arrays["versions"][n, g, :more] = -1
            self._lengths[n, g] = size + more

    def leave_out(self, n: int) -> None:
        """Removes the members of group n."""
        present = self._stop[n] != StopReason.ABSENT
        self._stop[n] = np.where(present, StopReason.ABORTED, self._stop[n])

    def prompts(self, width: int, context: Any) -> tuple[np.ndarray, np.ndarray]:
        """Room for the prompts [N, width] that the rows will have, and their lengths [N]."""
        ids = np.zeros((len(self._lengths), width), np.int32)
        size = min(width, context.ids.shape[1])
        ids[:, :size] = np.asarray(context.ids)[:, :size]
        return ids, np.ones(len(ids), np.int32)

    def into(self, groups: Any, prompts: np.ndarray, lengths: np.ndarray) -> Any:
        """The groups with these rows and prompts."""
        rollout = self._rollout.replace(
            prompt_tokens=prompts,
            prompt_lengths=lengths,
            lengths=self._lengths,
            stop=self._stop.astype(np.int32),
            **self._arrays,
        )
        changed = {"rollout": rollout, "ids": self._ids, "stats": self._stats}
        replace = groups.replace if isinstance(groups, PlacedGroups) else groups._replace
        return replace(**changed)
