"""Editing groups between rollout and advantage: which to keep, and drawing more for the rest.

The dynamic sampling of DAPO ("DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
arXiv:2503.14476): groups that carry no signal are replaced by groups of further prompts until the
batch is full, so that every step trains on as many informative groups as asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.methods.base import GroupEditor, Method, keep_all, same_rewards
from jrl.train.rollout import Draw, Groups, to_batch
from jrl.train.step import place_batch
from jrl.types import Array, Batch, Params


class Drawn(NamedTuple):
    """The groups of one training step.

    Attributes:
      groups: N of them.
      live: [N] bool, False where a group that the method's editor dropped fills a place; None when
        all are live.
      cursor: prompts used so far, these included.
      packing: ``Packer.notes`` before their completions were laid out; None where nothing lays
        them out, or has not yet.
    """

    groups: Groups
    live: Any
    cursor: int
    packing: dict[str, Any] | None = None


def collect(
    key: Array,
    params: Params,
    draw: Draw,
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
    mesh: Mesh,
    pack: Callable[[Batch], Batch] | None = None,
) -> tuple[Batch, Groups, int]:
    """A full batch of groups, drawn in as many rounds as the method's editor asks for.

    Args:
      key: the run's root key.
      params: the policy's.
      draw: the run's source of groups.
      step: the policy's version.
      cursor: prompts used so far; every round goes on from where the last one ended.
      prompts: N.
      weights: [R] float32.
      method: its prompts, rewards and groups seams are used here.
      mesh: where the batch goes.
      pack: lays completions out in rows, such as a ``packing.Packer``; None to leave them.

    Returns:
      (batch on the mesh, the groups in it, the new cursor); see ``draw_groups`` for the counts.
    """
    draw = functools.partial(draw, key, params, np.int32(step))
    first = draw(_places(method, step, cursor, prompts))
    drawn = _filled(first, draw, step, cursor, prompts=prompts, weights=weights, method=method)
    batch = assemble(drawn, weights=weights, method=method, mesh=mesh, pack=pack)
    return batch, drawn.groups, drawn.cursor


def draw_groups(
    key: Array,
    params: Params,
    draw: Draw,
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
) -> Drawn:
    """The groups of a training step; the arguments are those of ``collect``.

    Returns:
      N groups. With an editor, ``counts`` of the groups gains reward (points, over all groups
      drawn, kept or not), rounds, groups_kept (fraction of those drawn) and groups_missing (places
      left without a kept group when the rounds ran out; a dropped one stands there).
    """
    draw = functools.partial(draw, key, params, np.int32(step))
    first = draw(_places(method, step, cursor, prompts))
    return _filled(first, draw, step, cursor, prompts=prompts, weights=weights, method=method)


def _places(method: Method, step: int, cursor: int, prompts: int) -> np.ndarray:
    """[prompts] int32, the positions in the data that the method's curriculum takes next."""
    return method.prompts(step, cursor + np.arange(prompts)).astype(np.int32)


def _filled(
    first: Groups,
    draw: Callable[[np.ndarray], Groups],
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
) -> Drawn:
    """The groups first drawn, edited, and more of them where the method's editor asks for more."""
    editor = method.groups
    groups = _edit(method, first)
    cursor += prompts
    if editor.keep is keep_all:
        return Drawn(groups, None, cursor)
    groups = to_host(groups)
    kept = _keep(editor, groups, weights)
    rounds = 1
    while editor.refill and kept.sum() < prompts and rounds < editor.max_rounds:
        more = to_host(_edit(method, draw(_places(method, step, cursor, prompts))))
        cursor, rounds = cursor + prompts, rounds + 1
        groups = _join(groups, more)
        kept = np.concatenate([kept, _keep(editor, more, weights)])
    # Kept groups first, in the order drawn; dropped ones only where too few were kept.
    order = np.argsort(~kept, kind="stable")[:prompts]
    live = kept[order]
    drawn = groups.rollout.baseline == 0
    scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(weights))
    counts = groups.counts | {
        "reward": float(scores[drawn].mean()),
        "rounds": float(rounds),
        "groups_kept": float(kept.mean()),
        "groups_missing": float(prompts - live.sum()),
    }
    return Drawn(_take(groups, order)._replace(counts=counts), live, cursor)


def assemble(
    drawn: Drawn,
    *,
    weights: Any,
    method: Method,
    mesh: Mesh,
    pack: Callable[[Batch], Batch] | None,
) -> Batch:
    """The batch of a training step, on its mesh; dropped groups are masked out."""
    batch, live = _batch(method, drawn.groups, weights), drawn.live
    if live is not None:
        mask = np.asarray(batch.mask) & live[:, None, None]
        members = np.asarray(batch.members) & live[:, None]
        batch = batch.replace(mask=mask, members=members)
    return place_batch(batch if pack is None else pack(batch), mesh)


_batch_on_device = jax.jit(to_batch, static_argnames="own")


def _batch(method: Method, groups: Groups, weights: Any) -> Batch:
    # One program where the rollout lies on the device, not one for every line.
    make = to_batch if isinstance(groups.rollout.tokens, np.ndarray) else _batch_on_device
    return make(groups.rollout, groups.rewards, weights, groups.ids, own=method.draw.own)


def _edit(method: Method, groups: Groups) -> Groups:
    """The method's own edit of the reward parts."""
    if method.rewards is same_rewards:
        return groups
    groups = to_host(groups)
    return groups._replace(rewards=method.rewards(groups.rewards, groups.rollout))


def _keep(editor: GroupEditor, groups: Groups, weights: Array) -> np.ndarray:
    """[N] bool: which groups the editor keeps."""
    scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(weights))
    return np.asarray(editor.keep(scores, ~np.asarray(groups.rollout.baseline)), bool)


def to_host(groups: Groups) -> Groups:
    """The groups with every array on the host."""
    rest = groups.rollout, groups.rewards, groups.counts, groups.ids
    rollout, rewards, counts, ids = jax.device_get(rest)
    subject = groups.subject if isinstance(groups.subject, list) else jax.device_get(groups.subject)
    return Groups(rollout, rewards, subject, counts, ids)


def _join(a: Groups, b: Groups) -> Groups:
    def both(x: Any, y: Any) -> Any:
        return jax.tree.map(lambda u, v: np.concatenate([u, v]), x, y)

    subject = a.subject + b.subject if isinstance(a.subject, list) else both(a.subject, b.subject)
    counts = {k: a.counts.get(k, 0) + b.counts.get(k, 0) for k in a.counts | b.counts}
    return Groups(
        both(a.rollout, b.rollout), both(a.rewards, b.rewards), subject, counts, both(a.ids, b.ids)
    )


def _take(groups: Groups, rows: np.ndarray) -> Groups:
    pick = lambda tree: jax.tree.map(lambda x: x[rows], tree)  # noqa: E731
    many = isinstance(groups.subject, list)
    subject = [groups.subject[i] for i in rows] if many else pick(groups.subject)
    rollout, rewards, ids = pick((groups.rollout, groups.rewards, groups.ids))
    return Groups(rollout, rewards, subject, groups.counts, ids)
