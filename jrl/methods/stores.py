"""Stores of completions that a run trains on again: the state of an edit that replays.

    edit = Edit(member_store(capacity), apply)          # or group_store(steps)
    rows, exists = store.of_prompt(prompts, 1, keys)     # or sample(count, key), or pop(count)
    store = store.put(groups, which)

A store never changes: ``put`` and ``pop`` return a new one. In a compiled run it is arrays of fixed
shapes; on the host (shapes None) rows have no padding, and the same functions choose among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.methods.edit import groups_of, members_of, standalone
from jrl.types import NOTHING, Array

FREE = -1
"""The age of a slot that holds nothing."""


class Slots(struct.PyTreeNode):
    """Index of a store: prompt, age and priority of each slot.

    Attributes:
      prompt: [C] int32, identity of the problem; any value in a free slot.
      age: [C] int32, the number of the row in the order of insertion, or ``FREE``.
      priority: [C] float32.
      count: [] int32, rows inserted so far.
      each: static, rows of one prompt that are held, the newest; 0 for all.
      prompts: static, prompts of which any rows are held; the one that was added to longest ago
        goes first. 0 for all.
    """

    prompt: Array
    age: Array
    priority: Array
    count: Array
    each: int = struct.field(pytree_node=False, default=0)
    prompts: int = struct.field(pytree_node=False, default=0)


def empty_slots(capacity: int, each: int = 0, prompts: int = 0) -> Slots:
    """``capacity`` free slots."""
    zeros = jnp.zeros(capacity, jnp.int32)
    return Slots(zeros, zeros + FREE, jnp.zeros(capacity, jnp.float32), jnp.int32(0), each, prompts)


def insert(
    slots: Slots, prompt: Array, accept: Array, priority: Array | None = None
) -> tuple[Slots, Array]:
    """The slots with new rows, in the places of the oldest rows where none is free.

    Args:
      slots: C of them.
      prompt: [B] int32, of each row.
      accept: [B] bool, rows to insert, in their order; of more than C the last ones.
      priority: [B] float32; 1 where None.

    Returns:
      (slots, the slot of each row [B] int32; C for those that are not inserted).
    """
    capacity, number = slots.age.shape[0], jnp.cumsum(accept) - 1
    weight = jnp.ones(prompt.shape, jnp.float32) if priority is None else priority
    # The limits hold over old and new rows together: a new row of a prompt sends away an older one
    # of the same prompt, before any of another's.
    new = {
        "prompt": prompt.astype(jnp.int32),
        "age": jnp.where(accept, slots.count + number, FREE).astype(jnp.int32),
        "priority": weight.astype(jnp.float32),
    }
    both = {name: jnp.concatenate([getattr(slots, name), x]) for name, x in new.items()}
    whole = _within_limits(slots.replace(**both))
    place = jnp.argsort(jnp.argsort(-whole.age, stable=True))  # the newest first
    keep = (whole.age != FREE) & (place < capacity)
    order = jnp.argsort(keep[:capacity], stable=True)  # free slots first
    accepted = keep[capacity:]
    rank = jnp.clip(jnp.cumsum(accepted) - 1, 0, capacity - 1)
    slot = jnp.where(accepted, order[rank], capacity).astype(jnp.int32)
    old = slots.replace(age=jnp.where(keep[:capacity], slots.age, FREE))
    put = {name: getattr(old, name).at[slot].set(x, mode="drop") for name, x in new.items()}
    count = slots.count + accept.sum().astype(jnp.int32)
    return slots.replace(**put, count=count), slot


def _within_limits(slots: Slots) -> Slots:
    """The slots without the rows that ``each`` and ``prompts`` leave no room for."""
    if not slots.each and not slots.prompts:
        return slots
    capacity = slots.age.shape[0]
    free = slots.age == FREE
    # By prompt, the newest row first; free slots come last.
    order = jnp.lexsort((-slots.age, slots.prompt, free))
    age, prompt = slots.age[order], slots.prompt[order]
    occupied = age != FREE
    begins = occupied & jnp.concatenate([jnp.ones(1, bool), prompt[1:] != prompt[:-1]])
    at = jnp.arange(capacity)
    start = jax.lax.cummax(jnp.where(begins, at, 0))
    keep = occupied
    if slots.each:
        keep &= at - start < slots.each
    if slots.prompts:
        newest = jnp.where(begins, age, FREE)
        place = jnp.minimum(slots.prompts, capacity) - 1
        keep &= newest[start] >= jnp.sort(newest)[::-1][place]
    age = jnp.where(keep, age, FREE)
    return slots.replace(age=slots.age.at[order].set(age))


def pick_of_prompt(
    slots: Slots, prompt: Array, fits: Array, count: int, keys: Array
) -> tuple[Array, Array]:
    """Rows of some prompts, at random.

    Args:
      slots: C of them.
      prompt: [N] int32.
      fits: [N, C] bool, False for rows that do not suit a group.
      count: K, rows of each prompt.
      keys: [N] keys.

    Returns:
      (slots [N, K] int32, exists [N, K] bool, True for the first ones).
    """
    capacity = slots.age.shape[0]
    order = jnp.argsort(slots.age, stable=True)
    candidate = (slots.age != FREE)[None] & (slots.prompt[None] == prompt[:, None]) & fits
    candidate = candidate[:, order]
    number = jnp.cumsum(candidate, axis=1) - 1  # among those of the prompt, the oldest first
    most = slots.each or capacity
    draws = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(keys)
    priority = jnp.take_along_axis(draws, jnp.clip(number, 0, most - 1), axis=1)
    scores = jnp.where(candidate, priority, jnp.inf)
    best = jnp.argsort(scores, axis=1, stable=True)[:, :count]
    exists = jnp.take_along_axis(candidate, best, axis=1)
    return _widened(order[best], exists, count)


def pick_at_random(slots: Slots, count: int, key: Array, power: float) -> tuple[Array, Array]:
    """(slots [count] int32, exists [count]): different rows, by priority to a power."""
    occupied = slots.age != FREE
    order = jnp.argsort(jnp.where(occupied, slots.age, jnp.iinfo(jnp.int32).max), stable=True)
    noise = jax.random.gumbel(key, occupied.shape)  # by age, so that slots do not matter
    noise = jnp.zeros(occupied.shape).at[order].set(noise)
    score = noise + (power * jnp.log(jnp.maximum(slots.priority, 1e-30)) if power else 0.0)
    best = jnp.argsort(-jnp.where(occupied, score, -jnp.inf), stable=True)[:count]
    return _widened(best, occupied[best], count)


def take_oldest(slots: Slots, count: int) -> tuple[Slots, Array, Array]:
    """(the slots without them, slots [count] int32, exists [count]) of the oldest rows."""
    occupied = slots.age != FREE
    age = jnp.where(occupied, slots.age, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(age, stable=True)[:count]
    exists = occupied[order]
    age = slots.age.at[order].set(FREE)
    return slots.replace(age=age), *_widened(order, exists, count)


def _widened(slot: Array, exists: Array, count: int) -> tuple[Array, Array]:
    """Slots and flags with ``count`` columns, where a store has fewer slots than that."""
    short = [(0, 0)] * (slot.ndim - 1) + [(0, max(count - slot.shape[-1], 0))]
    return jnp.pad(slot, short).astype(jnp.int32), jnp.pad(exists, short)


Read = Callable[[Any], Mapping[str, Array]]


class Store(struct.PyTreeNode):
    """Completions, or whole groups, in arrays of fixed shapes.

    Attributes:
      slots: which slot holds what.
      rows: [C, ...] by name, all that was recorded; "prompt" the tokens trained under.
      groups: static, whether a row is a whole group.
    """

    slots: Slots
    rows: dict[str, Array]
    groups: bool = struct.field(pytree_node=False, default=False)

    def put(self, groups: Any, accept: Array, priority: Array | None = None) -> Store:
        """The store with these members [m, M], or groups [m], in it."""
        prompt, recorded = _recorded(groups, self.groups)
        flat = None if priority is None else priority.reshape(-1)
        slots, at = insert(self.slots, prompt, accept.reshape(-1), flat)
        rows = {n: x.at[at].set(recorded[n], mode="drop") for n, x in self.rows.items()}
        return self.replace(slots=slots, rows=rows)

    def of_prompt(self, groups: Any, count: int, keys: Array) -> tuple[Any, Array]:
        """(rows [m, count, ...], exists [m, count]) of each group's problem and prompt, at random.

        Args:
          groups: m of them.
          count: rows of each.
          keys: [m] keys.
        """
        prompts = groups.rollout
        fits = same_prompt(self.rows["prompt"], prompts.prompt_tokens, prompts.prompt_lengths)
        fits &= self.rows["prompt_lengths"][None] == prompts.prompt_lengths[:, None]
        at, exists = pick_of_prompt(self.slots, groups.ids["prompt"], fits, count, keys)
        return self._rows(at), exists

    def sample(self, count: int, key: Array, power: float = 0.0) -> tuple[Any, Array]:
        """(rows [count, ...], exists [count]): different ones, by priority to a power."""
        at, exists = pick_at_random(self.slots, count, key, power)
        return self._rows(at), exists

    def pop(self, count: int) -> tuple[Store, Any, Array]:
        """(the store without them, rows [count, ...], exists [count]) of the oldest rows."""
        slots, at, exists = take_oldest(self.slots, count)
        return self.replace(slots=slots), self._rows(at), exists

    def without(self, drop: Callable[[Mapping[str, Array]], Array]) -> Store:
        """The store without the rows for which ``drop`` of their records is True ([C] bool)."""
        age = jnp.where(drop(self.rows), FREE, self.slots.age)
        return self.replace(slots=self.slots.replace(age=age))

    def _rows(self, at: Array) -> dict[str, Array]:
        return {name: x[at] for name, x in self.rows.items()}


def same_prompt(stored: Array, tokens: Array, lengths: Array) -> Array:
    """[m, C] bool: whether the first ``lengths`` [m] tokens of prompts [m, P] are those stored."""
    live = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    one = lambda row, within: ((stored == row[None]) | ~within[None]).all(axis=1)  # noqa: E731
    return jax.vmap(one)(tokens, live)


def _recorded(groups: Any, whole: bool) -> tuple[Array, dict[str, Array]]:
    """(prompt ids [B], records [B, ...] by name) of the groups, or of their members."""
    ids, rollout = groups.ids["prompt"], groups.rollout
    prompts = {"prompt": rollout.prompt_tokens, "prompt_lengths": rollout.prompt_lengths}
    if whole:
        return ids, {**groups_of(groups), **prompts}
    size = groups.use.shape[1]
    recorded = members_of(standalone(groups))
    flat = {n: x.reshape(-1, *x.shape[2:]) for n, x in recorded.items()}
    return jnp.repeat(ids, size), flat | {n: jnp.repeat(x, size, 0) for n, x in prompts.items()}


def _new_store(shapes: Any, slots: Slots, whole: bool) -> Any:
    if shapes is None:
        return HostStore(jax.device_get(slots), {}, whole)
    _, recorded = jax.eval_shape(lambda g: _recorded(g, whole), shapes)
    capacity = slots.age.shape[0]
    rows = {n: jnp.zeros((capacity, *x.shape[1:]), x.dtype) for n, x in recorded.items()}
    return Store(slots, rows, whole)


@dataclasses.dataclass(frozen=True)
class member_store:
    """An ``Edit.init``: an empty store of completions.

    Attributes:
      capacity: C, completions.
      each: completions of one prompt that are held, the newest; 0 for all.
      prompts: prompts of which any are held, those added to last; 0 for all.
    """

    capacity: int
    each: int = 0
    prompts: int = 0

    def __call__(self, shapes: Any, prompts: int) -> Any:
        """The store; ``shapes`` of a step's groups, None on the host."""
        return _new_store(shapes, empty_slots(self.capacity, self.each, self.prompts), False)


@dataclasses.dataclass(frozen=True)
class group_store:
    """An ``Edit.init``: an empty store of whole groups, as many as some steps have.

    Attributes:
      steps: whose groups it holds.
    """

    steps: int

    def __call__(self, shapes: Any, prompts: int) -> Any:
        """The store; ``shapes`` of a step's groups, None on the host, of ``prompts`` prompts."""
        return _new_store(shapes, empty_slots(self.steps * prompts), True)


# ---------------------------------------------------------------- on the host


class HostStore:
    """Completions, or whole groups, on the host: rows without padding, chosen as ``Store`` does.

    Args:
      slots: which slot holds what.
      rows: slot -> all that was recorded, by name.
      groups: whether a row is a whole group.
      shapes: what a padded row looks like, by name; {} before the first one.
    """

    def __init__(
        self,
        slots: Slots,
        rows: Mapping[int, Mapping[str, np.ndarray]],
        groups: bool,
        shapes: Mapping[str, jax.ShapeDtypeStruct] = NOTHING,
    ) -> None:
        self.slots: Slots = jax.tree.map(jnp.asarray, slots)
        self.rows, self.groups, self.shapes = rows, groups, shapes
        self._prompts, self._age = np.asarray(slots.prompt), np.asarray(slots.age)

    def put(self, groups: Any, accept: Any, priority: Any = None) -> HostStore:
        """See ``Store.put``."""
        prompt, recorded = jax.device_get(_recorded(groups, self.groups))
        flat = None if priority is None else np.asarray(priority).reshape(-1)
        slots, at = jax.device_get(
            _compiled_insert(self.slots, prompt, np.asarray(accept).reshape(-1), flat)
        )
        rows = dict(self.rows)
        for i in np.flatnonzero(at < len(self._age)):
            rows[int(at[i])] = self._trimmed({n: x[i] for n, x in recorded.items()})
        shapes = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in recorded.items()}
        return HostStore(slots, _occupied(rows, slots), self.groups, shapes)

    def of_prompt(self, groups: Any, count: int, keys: Array) -> tuple[Any, np.ndarray]:
        """See ``Store.of_prompt``."""
        ids = np.asarray(groups.ids["prompt"])
        tokens, lengths = map(
            np.asarray, (groups.rollout.prompt_tokens, groups.rollout.prompt_lengths)
        )
        fits = np.zeros((len(ids), len(self._age)), bool)
        for slot, row in self.rows.items():
            for n in np.flatnonzero(ids == self._prompts[slot]):
                fits[n, slot] = np.array_equal(row["prompt"], tokens[n, : lengths[n]])
        at, exists = jax.device_get(_compiled_pick_of_prompt(self.slots, ids, fits, count, keys))
        return self._padded(at), exists

    def sample(self, count: int, key: Array, power: float = 0.0) -> tuple[Any, np.ndarray]:
        """See ``Store.sample``."""
        at, exists = jax.device_get(_compiled_pick_at_random(self.slots, count, key, power))
        return self._padded(at), exists

    def pop(self, count: int) -> tuple[HostStore, Any, np.ndarray]:
        """See ``Store.pop``."""
        slots, at, exists = jax.device_get(_compiled_take_oldest(self.slots, count))
        rows = self._padded(at)
        return HostStore(slots, _occupied(self.rows, slots), self.groups, self.shapes), rows, exists

    def without(self, drop: Callable[[Mapping[str, Any]], Any]) -> HostStore:
        """See ``Store.without``."""
        if not self.rows:
            return self
        dropped = np.asarray(drop(self._padded(np.arange(len(self._age)))))
        slots = self.slots.replace(age=np.where(dropped, FREE, self._age))
        return HostStore(slots, _occupied(self.rows, slots), self.groups, self.shapes)

    def holds(self, prompts: Any) -> np.ndarray:
        """[n] bool: whether any rows of these prompts [n] are held."""
        return np.isin(np.asarray(prompts), self._prompts[self._age != FREE])

    def _trimmed(self, row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A row without its padding."""
        length, prompt = int(np.max(row["rollout.lengths"])), int(row["prompt_lengths"])
        trimmed = {}
        for name, x in row.items():
            if name in ("prompt", "rollout.prompt_tokens"):
                trimmed[name] = x[:prompt].copy()
            else:
                trimmed[name] = (x[..., :length] if self._by_token(name, x) else x).copy()
        return trimmed

    def _by_token(self, name: str, x: Any) -> bool:
        """Whether the last axis of a row's record is that of completion tokens."""
        return name.startswith(("rollout.", "ids.", "stats.")) and x.ndim > int(self.groups)

    def _padded(self, at: np.ndarray) -> dict[str, np.ndarray]:
        """Rows [*at.shape, ...] by name, zeros for free slots; {} before any row was held."""
        padded = {}
        for name, like in self.shapes.items():
            out = np.zeros((at.size, *like.shape), like.dtype)
            for i, slot in enumerate(at.reshape(-1).tolist()):
                if (row := self.rows.get(slot)) is None:
                    continue
                x = row[name]
                out[i, ...] = -1 if name == "rollout.versions" else 0
                place: Any = (i, *map(slice, x.shape))
                out[place] = x
            padded[name] = out.reshape(*at.shape, *like.shape)
        return padded

    # ------------------------------------------------------------ in a checkpoint

    def packed(self) -> dict[str, Any]:
        """The stored rows in a few arrays, end to end, for ``unpacked``."""
        slots = {name: np.asarray(getattr(self.slots, name)) for name in _SLOT_ARRAYS}
        slots_used = sorted(self.rows)
        rows = {}
        for name, like in self.shapes.items():
            values = [self.rows[slot][name] for slot in slots_used]
            flat = [x.reshape(-1) for x in values] or [np.zeros(0, like.dtype)]
            rows[_safe(name)] = {
                "values": np.concatenate(flat),
                "shapes": np.array([x.shape for x in values], np.int64),
                "padded": np.array(like.shape, np.int64),
            }
        return {"slots": slots, "held": np.array(slots_used, np.int64), "rows": rows}

    def unpacked(self, notes: Mapping[str, Any]) -> HostStore:
        """The inverse of ``packed``."""
        arrays = {name: np.asarray(notes["slots"][name]) for name in _SLOT_ARRAYS}
        slots_used = np.asarray(notes["held"]).tolist()
        rows: dict[int, dict[str, np.ndarray]] = {slot: {} for slot in slots_used}
        shapes = {}
        for safe, packed in notes["rows"].items():
            name, values = _name(safe), np.asarray(packed["values"])
            # Of no rows there is nothing that -1 could be computed from.
            sizes = np.asarray(packed["shapes"]).reshape(len(slots_used), -1 if slots_used else 0)
            counts = [int(np.prod(size)) for size in sizes]
            parts = np.split(values, np.cumsum(counts)[:-1])
            for slot, size, part in zip(slots_used, sizes, parts, strict=False):
                rows[slot][name] = part.reshape(size.astype(int))
            padded = tuple(np.asarray(packed["padded"]).astype(int).tolist())
            shapes[name] = jax.ShapeDtypeStruct(padded, values.dtype)
        return HostStore(self.slots.replace(**arrays), rows, self.groups, shapes)


_compiled_insert = jax.jit(insert)
_compiled_pick_of_prompt = jax.jit(pick_of_prompt, static_argnums=3)
_compiled_pick_at_random = jax.jit(pick_at_random, static_argnums=(1, 3))
_compiled_take_oldest = jax.jit(take_oldest, static_argnums=1)
_SLOT_ARRAYS = ("prompt", "age", "priority", "count")


def _occupied(rows: Mapping[int, Any], slots: Slots) -> dict[int, Any]:
    """The rows whose slots are not free."""
    age = np.asarray(slots.age)
    return {slot: row for slot, row in rows.items() if age[slot] != FREE}


def _safe(name: str) -> str:
    """A record's name as the key of a checkpoint, in which a dot separates levels."""
    return name.replace(".", ":")


def _name(safe: str) -> str:
    """The inverse of ``_safe``."""
    return safe.replace(":", ".")
