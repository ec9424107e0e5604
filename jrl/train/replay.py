"""Completions that a run keeps by prompt, and trains on again: the seam ``Method.replay``.

    recall = Recall(rule, source, ...)
    groups = recall.draw(request)   # some members replaced

The swap is between drawing and everything else, so filters, advantages and losses see a group as if
it had been drawn so; ``recalled`` is it, a pure function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.methods.base import Replay
from jrl.train.asks import DrawRequest
from jrl.train.build import Run
from jrl.train.collect import counted
from jrl.train.sources import Around, Groups, Source, entries, take_groups, to_host
from jrl.types import Array, stream

_TOKENS = ("tokens", "mask", "sampler_logprobs", "versions")
_NUMBERS = ("lengths", "stop", "baseline")
_OWN = ("episode",)
"""Labels that tell the members of a group apart, which stay those of the place."""


class Kept(NamedTuple):
    """One completion as it was drawn.

    Attributes:
      opening: [p] int32, the tokens of its prompt.
      row: what was recorded of it by name, "rollout", "ids", "stats" or "rewards" before the dot;
        arrays [t, ...] of its t tokens, without padding, and numbers.
    """

    opening: np.ndarray
    row: dict[str, np.ndarray]


Memory = Mapping[int, tuple[Kept, ...]]
"""Prompt id -> its completions, the newest last; the prompt added to longest ago comes first."""


def recalled(
    memory: Memory, groups: Groups, points: np.ndarray, rule: Replay, order: np.ndarray
) -> tuple[Memory, Groups]:
    """The groups with kept completions in the places that the rule gives, and what is kept then.

    What is kept of these groups is what was drawn, and takes nobody's place among them.

    Args:
      memory: what is kept so far; stays as it is.
      groups: N, on the host; stay as they are.
      points: [N, G] float, that the rule reads.
      rule: of the method.
      order: [N, each] float, which of the kept completions of a prompt are taken, the least first.

    Returns:
      (what is kept, the groups); ``counts`` of the groups gains "replayed", the members replaced,
      and ``ids`` "replayed" [N, G], 1 for these.
    """
    members = counted(groups.rollout)
    arrays = {name: x.copy() for name, x in _arrays(groups).items()}
    prompts = groups.ids["prompt"].tolist()
    replayed = np.zeros(points.shape, np.int32)
    for n, given in enumerate(rule.replace(points, members)):
        places: list[int] = np.flatnonzero(given).tolist()
        opening = _opening(groups, n)
        fit = [k for k in memory.get(prompts[n], ()) if np.array_equal(k.opening, opening)]
        taken = [fit[i] for i in np.argsort(order[n, : len(fit)], kind="stable")]
        for g, kept in zip(places, taken, strict=False):
            _write(arrays, (n, g), _renumbered(kept, arrays, n))
            replayed[n, g] = 1
    after = dict(memory)
    for n, g in np.argwhere(rule.keep(points, members)).tolist():
        kept = Kept(_opening(groups, n), _read(groups, (n, g)))
        newest = (*after.pop(prompts[n], ()), kept)[-rule.each :]
        after[prompts[n]] = newest
    for prompt in list(after)[: max(len(after) - rule.prompts, 0)]:
        del after[prompt]
    counts = groups.counts | {"replayed": float(replayed.sum())}
    made = _with_arrays(groups, arrays)
    return after, made._replace(counts=counts, ids=made.ids | {"replayed": replayed})


def _arrays(groups: Groups) -> dict[str, np.ndarray]:
    """All that was recorded of members, [N, G, ...] by name."""
    rollout = {f"rollout.{name}": getattr(groups.rollout, name) for name in _TOKENS + _NUMBERS}
    ids = {f"ids.{k}": x for k, x in groups.ids.items() if x.ndim > 1 and k not in _OWN}
    stats = {f"stats.{k}": x for k, x in (groups.stats or {}).items()}
    return {**rollout, **ids, **stats, "rewards.all": groups.rewards}


def _by_kind(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind -> name -> x, of what is called "kind.name"."""
    parts: dict[str, dict[str, Any]] = {}
    for name, x in arrays.items():
        kind, _, own = name.partition(".")
        parts.setdefault(kind, {})[own] = x
    return parts


def _with_arrays(groups: Groups, arrays: Mapping[str, np.ndarray]) -> Groups:
    parts = _by_kind(arrays)
    return groups._replace(
        rollout=groups.rollout.replace(**parts["rollout"]),
        rewards=parts["rewards"]["all"],
        ids=groups.ids | parts.get("ids", {}),
        stats=None if groups.stats is None else groups.stats | parts.get("stats", {}),
    )


def _opening(groups: Groups, n: int) -> np.ndarray:
    rollout = groups.rollout
    return np.array(rollout.prompt_tokens[n, : int(rollout.prompt_lengths[n])])


def _by_token(name: str, x: np.ndarray, rank: int) -> bool:
    """Whether an array of members has an axis of tokens at ``rank``."""
    return name != "rewards.all" and x.ndim > rank


def _read(groups: Groups, place: tuple[int, int]) -> dict[str, np.ndarray]:
    """A completion as if it had been drawn by itself: what it shares is taken from who drew it."""
    length = int(groups.rollout.lengths[place])
    row = {
        name: (x[place][:length] if _by_token(name, x, 2) else x[place]).copy()
        for name, x in _arrays(groups).items()
    }
    node = row.get("ids.node")
    if node is None:
        return row
    n, rollout = place[0], groups.rollout
    for g in range(rollout.mask.shape[1]):
        there = rollout.mask[n, g, :length] & (groups.ids["node"][n, g, :length] == node)
        lent = there & ~row["rollout.mask"] & (node > 0)
        for name in ("mask", "sampler_logprobs", "versions"):
            row[f"rollout.{name}"][lent] = getattr(rollout, name)[n, g, :length][lent]
    return row


def _renumbered(kept: Kept, arrays: Mapping[str, np.ndarray], n: int) -> Kept:
    """With numbers of nodes that no other member of group n has."""
    if "ids.node" not in arrays:
        return kept
    node = kept.row["ids.node"]
    own = np.where(node > 0, node + arrays["ids.node"][n].max(initial=0), 0).astype(node.dtype)
    return kept._replace(row=kept.row | {"ids.node": own})


def _write(arrays: Mapping[str, np.ndarray], place: tuple[int, int], kept: Kept) -> None:
    for name, x in arrays.items():
        value = kept.row[name]
        if not _by_token(name, x, 2):
            x[place] = value
            continue
        x[place] = -1 if name == "rollout.versions" else 0
        x[place][: len(value)] = value


# ---------------------------------------------------------------- in a run


class Recall(Around):
    """What a run keeps, around the source of its groups.

    Args:
      rule: of the method.
      source: what draws the groups.
      weights: [R] float32, of the reward parts.
      judge: the column of the reward part that says what is right; None for the score.
      searches: whether the groups are search trees; prompts of which any completions are kept are
        then drawn apart, so that nobody's steps are lost with a member that is replaced.
      notes: what an earlier call of the run had kept, of ``notes``.
    """

    def __init__(
        self,
        rule: Replay,
        source: Source,
        weights: np.ndarray,
        judge: int | None = None,
        searches: bool = False,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source)
        self._rule, self._searches = rule, searches
        self._weights, self._judge = weights, judge
        self._memory: Memory = unpacked(notes) if notes else {}
        self._next = self._memory
        self._order = jax.jit(_uniform, static_argnums=3)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; ``counts`` gains "reward", the mean score of what was drawn."""
        tickets, _ = entries(request)
        drawn = to_host(self._drawn(request))
        scores = drawn.rewards @ self._weights
        points = scores if self._judge is None else drawn.rewards[:, :, self._judge]
        members = counted(drawn.rollout)
        order = np.asarray(self._order(request.key, request.step, tickets, self._rule.each))
        self._next, groups = recalled(self._next, drawn, points, self._rule, order)
        reward = float(scores[members].mean()) if members.any() else 0.0
        return groups._replace(counts=groups.counts | {"reward": reward})

    def _drawn(self, request: DrawRequest) -> Groups:
        """The source's groups; those of prompts with kept completions without search."""
        if not self._searches:
            return self.source.draw(request)
        (ask,) = request.asks
        _, prompts = self.source.prompts(request.key, ask.row)
        held = np.array([prompt.id in self._next for prompt in prompts], bool)
        if not held.any():
            return self.source.draw(request)
        parts = [np.flatnonzero(~held), np.flatnonzero(held)]
        searched, alone = (jax.tree.map(lambda x, at=at: x[at], ask) for at in parts)
        asks = (searched, alone.replace(tree=None))
        groups = self.source.draw(request.replace(asks=asks))
        return take_groups(to_host(groups), np.argsort(np.concatenate(parts)))

    def finish(self, complete: bool) -> None:
        """Keeps what the step drew; nothing where that was given up, or it would be kept twice."""
        super().finish(complete)
        if complete:
            self._memory = self._next
        else:
            self._next = self._memory

    def notes(self) -> dict[str, Any]:
        """What a checkpoint holds: an entry "replay", unless nothing is kept."""
        kept = {"replay": packed(self._memory)} if self._memory else {}
        return super().notes() | kept


def recall_of(run: Run, rule: Replay, source: Source, notes: Mapping[str, Any] | None) -> Recall:
    """What a run keeps; ``notes`` are those of its checkpoint, or None."""
    weights = np.array(list(run.rewards.weights.values()), np.float32)
    searches = run.method.draw.search is not None
    return Recall(rule, source, weights, run.rewards.judged, searches, notes)


def _uniform(key: Array, step: Array, positions: Array, count: int) -> Array:
    """[N, count] float32 in [0, 1), those of a position alone at a step."""
    root = stream(key, "replay", step)
    keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.asarray(positions))
    return jax.vmap(lambda k: jax.random.uniform(k, (count,)))(keys)


def packed(memory: Memory) -> dict[str, Any]:
    """What is kept, in a few arrays: rows end to end. ``unpacked`` reads it.

    Args:
      memory: with at least one completion.
    """
    every = [(prompt, kept) for prompt, rows in memory.items() for kept in rows]
    joined: dict[str, dict[str, np.ndarray]] = {"tokens": {}, "numbers": {}}
    for name, first in every[0][1].row.items():
        values = [kept.row[name] for _, kept in every]
        if _by_token(name, first, 0):
            joined["tokens"][name] = np.concatenate(values)
        else:
            joined["numbers"][name] = np.stack(values)
    return {
        "prompts": np.array([prompt for prompt, _ in every], np.int64),
        "openings": np.concatenate([kept.opening for _, kept in every]),
        "opening_lengths": np.array([len(kept.opening) for _, kept in every], np.int64),
        **{kind: _by_kind(arrays) for kind, arrays in joined.items()},
    }


def unpacked(notes: Mapping[str, Any]) -> Memory:
    """The inverse of ``packed``."""

    def parted(x: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        return np.split(x, np.cumsum(lengths)[:-1])

    def named(kind: str) -> dict[str, np.ndarray]:
        return {f"{k}.{n}": x for k, arrays in notes[kind].items() for n, x in arrays.items()}

    numbers = named("numbers")
    rows = {n: parted(x, numbers["rollout.lengths"]) for n, x in named("tokens").items()}
    openings = parted(notes["openings"], notes["opening_lengths"])
    memory: dict[int, tuple[Kept, ...]] = {}
    for i, prompt in enumerate(notes["prompts"].tolist()):
        row = {name: x[i] for name, x in (rows | numbers).items()}
        memory[prompt] = (*memory.get(prompt, ()), Kept(openings[i], row))
    return memory


# ---------------------------------------------------------------- what cannot be replayed


def check_replay(run: Run) -> None:
    """Raises UserError where a run cannot replay what its method keeps."""
    if run.method.replay is None:
        return
    config, said = run.config, f"method = {run.config.method!r} keeps completions by prompt, "
    if run.task is not None:
        raise UserError(
            f"{said}and no problem of a procedural task or an environment on the device comes "
            "again; give data.train, with data.env = FILE.py:function for episodes"
        )
    if config.recorded is not None:
        raise UserError(f"{said}and recorded sessions are there already; choose another method")
    for key, given in {
        "[placement]": run.rollout_mesh is not None,
        "objective.router_replay": config.replays_routing,
        "objective.tree": run.method.draw.tree is not None,
    }.items():
        if given:
            raise UserError(f"{said}which does not go together with {key}; remove it")
    if jax.process_count() > 1:
        raise UserError(f"{said}which takes one process; use one host")
