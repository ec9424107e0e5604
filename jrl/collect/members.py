"""From asks to members: the part of drawing that all sources share.

    rollout, labels, counts = join_drawn(asks, together, sample, prompts, ...)

Asks of one request name the same tickets. Those with only numbers, temperatures and limits are
sampled together, so that a prompt is prefilled once for all of them; an ask with a context or a
prefix of its own is sampled by itself. Members are in the order of the asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.sources import added_counts
from jrl.sampling.sequences import Members
from jrl.types import Array, Rollout, RoutingRecord, StopReason
from jrl.types.asks import BASELINE, Ask, Asks, Tokens

SampleMembers = Callable[[Tokens, Members, Ask], tuple[Rollout, dict[str, Any], dict[str, Any]]]
"""(prompts, members, an ask with their policy and tree) -> (rollout, labels, counts)."""


SampledMembers = tuple[Rollout, dict[str, Any], dict[str, Any]]
"""(rollout [N, G, T], labels of members by name, counts), as a sampler returns them."""


def plain_ask(asks: Asks, temperature: Any) -> tuple[Ask, Members] | None:
    """An ask like all that are sampled from the problems' own prompts, and their members.

    None where all asks have texts of their own.
    """
    plain = [ask for ask in asks if is_plain(ask)]
    if not plain:
        return None
    like = {(ask.policy, ask.tree) for ask in plain}
    assert len(like) == 1, "asks by several policies, or trees, are requests of their own"
    return plain[0], members_of(plain, temperature)


def join_drawn(
    asks: Asks,
    together: SampledMembers | None,
    sample: SampleMembers,
    prompts: Tokens,
    temperature: Any,
    limit: int,
) -> SampledMembers:
    """The members of all asks of a request, in the order of the asks.

    Args:
      asks: of the same tickets.
      together: members sampled for ``plain_ask``. The caller samples them, to keep traces short.
      sample: samples the members of an ask with a context or a prefix.
      prompts: the problems' own, N of them.
      temperature: [] float32, the run's.
      limit: T, the most tokens of a completion.

    Returns:
      The rollout [N, sum of widths, T], labels by name, and counts, which add up.
    """
    parts, at = [], 0
    for ask in asks:
        if is_plain(ask):
            assert together is not None
            parts.append(_columns(together, slice(at, at + ask.width), counts=at == 0))
            at += ask.width
        else:
            parts.append(_with_text(ask, sample, prompts, temperature, limit))
    rollout = parts[0][0] if len(parts) == 1 else join_members([part[0] for part in parts])
    rollout = rollout.replace(prompt_tokens=prompts.ids, prompt_lengths=prompts.lengths)
    counts: dict[str, Any] = {}
    for _, _, more in parts:
        counts = added_counts(counts, more)
    return flagged(rollout, asks), _joined_labels(parts), counts


def is_plain(ask: Ask) -> bool:
    """Whether members are sampled from the problem's own prompt."""
    return ask.context is None and ask.prefix is None


def widths(asks: Asks) -> int:
    """Members of a group that the asks have room for."""
    return sum(ask.width for ask in asks)


def numbers(asks: Asks) -> Any:
    """[N, sum of widths] int32: the number of each member in its group; -1 where it is absent."""
    xp: Any = np if isinstance(asks[0].first, np.ndarray) else jnp
    return xp.concatenate([xp.where(live, n, -1) for n, live in map(_numbers, asks)], axis=1)


def uses(asks: Asks) -> np.ndarray:
    """[sum of widths] int32: what each member is for."""
    return np.concatenate([np.full(ask.width, ask.use, np.int32) for ask in asks])


def _numbers(ask: Ask) -> tuple[Any, Any]:
    """[N, width] int32 and bool: the members' numbers, and which of them there are."""
    xp: Any = np if isinstance(ask.first, np.ndarray) else jnp
    column = xp.arange(ask.width, dtype=np.int32)[None]
    return ask.first[:, None] + column, column < ask.count[:, None]


def members_of(asks: Sequence[Ask], temperature: Any) -> Members:
    """The members of asks that are sampled together; ``temperature`` is the run's."""
    parts = [_numbers(ask) for ask in asks]
    xp: Any = np if isinstance(parts[0][0], np.ndarray) else jnp

    def each(name: str, default: Any) -> Any:
        """[N, sum of widths], or None if no ask sets it."""
        by_ask = [getattr(ask, name) for ask in asks]
        if all(x is None for x in by_ask):
            return None
        shapes = [number.shape for number, _ in parts]
        columns = [default if x is None else x[:, None] for x in by_ask]
        return xp.concatenate(
            [xp.broadcast_to(x, s) for x, s in zip(columns, shapes, strict=True)], axis=1
        )

    return Members(
        number=xp.concatenate([number for number, _ in parts], axis=1),
        live=xp.concatenate([live for _, live in parts], axis=1),
        temperature=each("temperature", temperature),
        limit=each("limit", np.int32(np.iinfo(np.int32).max)),
    )


def _columns(part: tuple[Any, ...], columns: slice, *, counts: bool) -> tuple[Any, Any, Any]:
    """Some of the members sampled together; ``counts`` says whether to return their counts."""
    rollout, labels, part_counts = part
    whole = rollout.replace(prompt_tokens=None, prompt_lengths=None, routing=None)
    picked = jax.tree.map(lambda x: x[:, columns], whole).replace(
        prompt_tokens=rollout.prompt_tokens, prompt_lengths=rollout.prompt_lengths
    )
    if (routing := rollout.routing) is not None:
        picked = picked.replace(routing=routing.replace(tokens=routing.tokens[:, columns]))
    return picked, {n: x[:, columns] for n, x in labels.items()}, part_counts if counts else {}


def flagged(rollout: Rollout, asks: Asks) -> Rollout:
    """The rollout with its baseline members marked."""
    use = uses(asks) == BASELINE
    return rollout.replace(baseline=rollout.baseline | use[None]) if use.any() else rollout


def _joined_labels(parts: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Labels of all members; 0 where an ask has none."""
    names = {name: x for _, labels, _ in parts for name, x in labels.items()}
    xp: Any = np if all(isinstance(x, np.ndarray) for x in names.values()) else jnp

    def of(name: str, part: tuple[Any, ...]) -> Any:
        rollout, labels, _ = part
        shape = (*rollout.lengths.shape, *names[name].shape[2:])
        return labels.get(name, xp.zeros(shape, names[name].dtype))

    return {name: xp.concatenate([of(name, part) for part in parts], axis=1) for name in names}


# ---------------------------------------------------------------- contexts and prefixes


def _with_text(
    ask: Ask, sample: SampleMembers, prompts: Tokens, temperature: Any, limit: int
) -> tuple[Rollout, dict[str, Any], dict[str, Any]]:
    """The members of an ask with a context or a prefix of its own."""
    under = prompts if ask.context is None else ask.context
    if ask.prefix is None:
        return sample(under, members_of([ask], temperature), ask)
    if ask.prefix_as == "given":
        return given_rollout(under, ask, limit), {}, {}
    members = members_of([ask], temperature)
    room = jnp.maximum(limit - ask.prefix.lengths, 0)[:, None]
    most = room if members.limit is None else jnp.minimum(members.limit, room)
    # Prefix and sampled tokens together stay within the limit of a completion.
    fits = {"limit": jnp.broadcast_to(most, members.number.shape), "fits": True}
    members = members.replace(**fits)
    rollout, labels, counts = sample(appended(under, ask.prefix), members, ask)
    return with_prefix(rollout, ask.prefix), labels, counts


def appended(prompts: Tokens, more: Tokens) -> Tokens:
    """Prompts [N, P + W], each followed by further tokens."""
    p, w = prompts.ids.shape[1], more.ids.shape[1]
    column = jnp.arange(p + w)[None]
    start = prompts.lengths[:, None]
    wide = jnp.pad(jnp.asarray(prompts.ids), ((0, 0), (0, w)))
    tail = jnp.take_along_axis(jnp.asarray(more.ids), jnp.clip(column - start, 0, w - 1), axis=1)
    ids = jnp.where(column < start, wide, tail)
    return Tokens(ids, (prompts.lengths + more.lengths).astype(jnp.int32))


def with_prefix(rollout: Rollout, prefix: Tokens) -> Rollout:
    """Completions that begin with a prefix that was not sampled; T columns as before.

    Sampled tokens keep their log-probabilities and versions; the prefix has mask False, version -1.
    """
    t, w = rollout.tokens.shape[2], prefix.ids.shape[1]
    here = jnp.arange(t)[None, None]
    size = prefix.lengths[:, None, None]
    inside = here < size

    def shifted(x: Array, fill: Any) -> Array:
        at = jnp.broadcast_to(jnp.clip(here - size, 0, t - 1), x.shape)
        return jnp.where(inside, fill, jnp.take_along_axis(x, at, axis=2))

    start = jnp.asarray(prefix.ids)[:, jnp.clip(jnp.arange(t), 0, w - 1)][:, None]
    absent = (rollout.stop == StopReason.ABSENT)[:, :, None]
    lengths = jnp.where(absent[:, :, 0], 0, rollout.lengths + prefix.lengths[:, None])
    return rollout.replace(
        tokens=shifted(rollout.tokens, jnp.broadcast_to(start, rollout.tokens.shape)),
        lengths=jnp.minimum(lengths, t).astype(jnp.int32),
        mask=shifted(rollout.mask, False),
        sampler_logprobs=shifted(rollout.sampler_logprobs, jnp.float32(0)),
        versions=shifted(rollout.versions, jnp.int32(-1)),
        routing=None,
    )


def given_rollout(prompts: Tokens, ask: Ask, limit: int) -> Rollout:
    """The demonstrations of an ask as members.

    Args:
      prompts: N of them.
      ask: with the demonstrations as its prefix.
      limit: T, where a demonstration is cut.
    """
    assert ask.prefix is not None
    xp: Any = np if isinstance(ask.prefix.ids, np.ndarray) else jnp
    ids, lengths = ask.prefix.ids[:, :limit], ask.prefix.lengths
    ids = xp.pad(ids, ((0, 0), (0, limit - ids.shape[1]))).astype(np.int32)
    cut = xp.minimum(lengths, limit).astype(np.int32)
    rollout = demonstration_rollout(
        prompts.ids, prompts.lengths, ids, cut, lengths <= limit, ask.width
    )
    _, live = _numbers(ask)
    return rollout.replace(
        lengths=xp.where(live, rollout.lengths, 0),
        mask=rollout.mask & live[:, :, None],
        stop=xp.where(live, rollout.stop, np.int32(StopReason.ABSENT)),
    )


def demonstration_rollout(
    prompt_tokens: Any, prompt_lengths: Any, tokens: Any, lengths: Any, complete: Any, count: int
) -> Rollout:
    """Completions from the data as a rollout that no policy sampled: their versions are -1.

    Args:
      prompt_tokens: [N, P] int32.
      prompt_lengths: [N] int32.
      tokens: [N, T] int32, on the host or the device.
      lengths: [N] int32, tokens.
      complete: [N] bool, False where the completion had to be cut.
      count: members of each group, all alike.
    """
    # Those of a task are made inside the sampling program, those in text on the host.
    xp: Any = np if isinstance(tokens, np.ndarray) else jnp
    n, t = tokens.shape

    def members(x: Any) -> Any:
        return xp.repeat(x[:, None], count, axis=1)

    stop = xp.where(complete, int(StopReason.STOP_TOKEN), int(StopReason.LENGTH))
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=members(tokens),
        lengths=members(lengths),
        mask=members(xp.arange(t)[None] < lengths[:, None]),
        sampler_logprobs=xp.zeros((n, count, t), np.float32),
        versions=xp.full((n, count, t), -1, np.int32),
        stop=members(stop.astype(np.int32)),
        baseline=xp.zeros((n, count), bool),
    ).check()


def join_members(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts of the same problems as one, the members of each after those of the one before."""
    xp: Any = np if all(isinstance(r.tokens, np.ndarray) for r in rollouts) else jnp
    bare = [r.replace(prompt_tokens=None, prompt_lengths=None, routing=None) for r in rollouts]
    joined = jax.tree.map(lambda *parts: xp.concatenate(parts, axis=1), *bare)
    return joined.replace(
        prompt_tokens=rollouts[0].prompt_tokens,
        prompt_lengths=rollouts[0].prompt_lengths,
        routing=_joined_routing(rollouts, xp),
    )


def _joined_routing(rollouts: Sequence[Rollout], xp: Any) -> RoutingRecord | None:
    """The routing record of all members, -1 for members without one; None if no member has one."""
    record = next((r.routing for r in rollouts if r.routing is not None), None)
    if record is None:
        return None
    tail, dtype = record.tokens.shape[3:], record.tokens.dtype
    parts = [
        xp.full((*r.tokens.shape, *tail), -1, dtype) if r.routing is None else r.routing.tokens
        for r in rollouts
    ]
    return record.replace(tokens=xp.concatenate(parts, axis=1))
