"""Hops 2 to 4: from prompts to a batch with rewards.

    batch, groups, cursor = collector.collect(key, weights, step=step, cursor=cursor)

A ``Collector`` asks a source for groups (``sources.Source``: a task whose rewards the device
computes, prompts in text whose rewards are functions on the host, ...). A method may drop groups;
then further prompts are drawn until the batch is full: the dynamic sampling of ``dapo``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.methods.base import GroupEditor, Method, keep_all, same_rewards
from jrl.train.asks import DrawRequest, new_ask
from jrl.train.packing import Packer
from jrl.train.sources import Groups, Source, join_groups, take_groups, to_host
from jrl.train.step import place_batch
from jrl.types import NOTHING, Array, Batch, Params, Rollout, StopReason


class StepGroups(NamedTuple):
    """The groups of one training step.

    Attributes:
      groups: N of them.
      live: [N] bool, False where too few groups were kept and a dropped one takes the place; None
        when all are live.
      cursor: tickets issued so far, these included.
      packing: ``Packer.notes`` before their completions were packed; None if they are not packed,
        or not yet.
    """

    groups: Groups
    live: Any
    cursor: int
    packing: dict[str, Any] | None = None


class Batches(Protocol):
    """Hops 1 to 4 of a run: what the training loop gets its batches from."""

    def collect(
        self, key: Array, weights: Mapping[str, Params], *, step: int, cursor: int
    ) -> tuple[Batch, Groups, int]:
        """(batch of a step on the mesh of training, the groups in it, tickets issued so far)."""

    def notes(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next batch to be the same."""

    def wait(self) -> None:
        """Returns when no device is drawing."""

    def forget(self, cursor: int) -> None:
        """Drops what is drawn ahead; ``cursor`` counts the tickets of the steps that are done."""


class Collector(NamedTuple):
    """Batches whose groups are drawn when they are asked for.

    Attributes:
      source: of groups.
      prompts: N, groups of a batch.
      reward_weights: [R] float32.
      method: its rewards and groups seams are used here.
      mesh: where batches go.
      pack: packs completions into rows; None to leave them.
      sampled: whether a policy drew the completions, so that ``sampler_logprobs`` are known.
      group: members that a group has by sampling.
    """

    source: Source
    prompts: int
    reward_weights: Any
    method: Method
    mesh: Mesh
    pack: Packer | None = None
    sampled: bool = True
    group: int = 1

    def collect(
        self, key: Array, weights: Mapping[str, Params], *, step: int, cursor: int
    ) -> tuple[Batch, Groups, int]:
        """As ``Batches.collect``; see ``draw`` for the counts.

        Args:
          key: the run's root key.
          weights: trees by name, "policy" at least.
          step: training steps done; the policy's version.
          cursor: tickets issued so far; every round continues where the last one ended.
        """
        request = self.request(key, weights, step, cursor)
        with self._drawing():
            # The first round is drawn here, and not in ``_fill_up``, to keep stack traces short.
            groups = self.source.draw(request)
            drawn = self._fill_up(groups, request, step, cursor)
            _, batch = self.assemble(drawn)
        return batch, drawn.groups, drawn.cursor

    def draw(
        self,
        key: Array,
        weights: Mapping[str, Params],
        *,
        step: int,
        version: int,
        cursor: int,
        newer: Callable[[], Any] | None = None,
    ) -> StepGroups:
        """The groups of a training step, drawn by weights of an older version.

        Returns:
          N groups. With a filter, ``counts`` of the groups gains reward (points, over all groups
          drawn, kept or not), rounds, groups_kept (fraction of those drawn) and groups_missing
          (places left without a kept group when the rounds ran out; a dropped one stands there).
        """
        request = self.request(key, weights, step, cursor, version, newer)
        with self._drawing():
            return self._fill_up(self.source.draw(request), request, step, cursor)

    def request(
        self,
        key: Array,
        weights: Mapping[str, Params],
        step: int,
        cursor: int,
        version: int | None = None,
        newer: Callable[[], Any] | None = None,
    ) -> DrawRequest:
        """What a round asks for; ``version`` is the weights', None for the schedule's."""
        if version is None:
            version = self.method.schedule.drawn_by(step)
        tickets = self.method.prompts(step, cursor + np.arange(self.prompts)).astype(np.int32)
        rows = self.source.order(tickets)
        ask = new_ask(tickets, rows, self.group, tree=self.method.draw.search)
        versions = dict.fromkeys(weights, np.int32(version))
        return DrawRequest(key, weights, versions, np.int32(step), (ask,), newer=newer)

    def _fill_up(self, first: Groups, request: DrawRequest, step: int, cursor: int) -> StepGroups:
        """The first round's groups, and further rounds' where the method's filter dropped some."""
        editor = self.method.groups
        groups = self._edit(first)
        cursor += self.prompts
        if editor.keep is keep_all:
            return StepGroups(groups, None, cursor)
        groups = to_host(groups)  # a filter reads the rewards of whole groups, on the host
        kept = self._keep(editor, groups)
        rounds = 1
        while editor.refill and kept.sum() < self.prompts and rounds < editor.max_rounds:
            more = self.request(request.key, request.weights, step, cursor)
            drawn = self.source.draw(more.replace(versions=request.versions, newer=request.newer))
            further = to_host(self._edit(drawn))
            cursor, rounds = cursor + self.prompts, rounds + 1
            groups = join_groups([groups, further])
            kept = np.concatenate([kept, self._keep(editor, further)])
        # Kept groups first, in the order sampled; dropped ones only pad a batch that is too small,
        # because its shape is part of the program. ``assemble`` masks them out.
        order = np.argsort(~kept, kind="stable")[: self.prompts]
        live = kept[order]
        members = counted(groups.rollout)
        scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(self.reward_weights))
        counts = groups.counts | {
            "reward": float(scores[members].mean()) if members.any() else 0.0,
            "rounds": float(rounds),
            "groups_kept": float(kept.mean()),
            "groups_missing": float(self.prompts - live.sum()),
        }
        return StepGroups(take_groups(groups, order)._replace(counts=counts), live, cursor)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Tells the source when the draws of a step are over."""
        try:
            yield
        except BaseException:
            self.source.finish(complete=False)
            raise
        self.source.finish(complete=True)

    def assemble(self, drawn: StepGroups) -> tuple[StepGroups, Batch]:
        """(the groups, their batch on the mesh of training with dropped groups masked out)."""
        groups, live = drawn.groups, drawn.live
        # On a device: one program, where eager lines would be a dispatch each.
        make = to_batch if isinstance(groups.rollout.tokens, np.ndarray) else _batch_on_device
        batch = make(
            groups.rollout,
            groups.rewards,
            self.reward_weights,
            groups.ids,
            groups.stats,
            own=self.sampled and self.method.draw.own,
        )
        if live is not None:
            mask = np.asarray(batch.mask) & live[:, None, None]
            members = np.asarray(batch.members) & live[:, None]
            batch = batch.replace(mask=mask, members=members)
        if self.pack is not None:
            drawn = drawn._replace(packing=self.pack.notes())
            batch = self.pack(batch)
        return drawn, place_batch(batch, self.mesh)

    def _edit(self, groups: Groups) -> Groups:
        """The method's own edit of the reward parts."""
        if self.method.rewards is same_rewards:
            return groups
        groups = to_host(groups)
        return groups._replace(rewards=self.method.rewards(groups.rewards, groups.rollout))

    def _keep(self, editor: GroupEditor, groups: Groups) -> np.ndarray:
        """[N] bool: which groups the editor keeps."""
        scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(self.reward_weights))
        return np.asarray(editor.keep(scores, np.asarray(counted(groups.rollout))), bool)

    def notes(self) -> dict[str, Any]:
        """As ``Batches.notes``."""
        packing = {} if self.pack is None else {"packing": self.pack.notes()}
        return packing | self.source.notes()

    def wait(self) -> None:
        """Nothing draws between two calls."""

    def forget(self, cursor: int) -> None:
        """Nothing is drawn ahead."""


# ---------------------------------------------------------------- groups to batch


def to_batch(
    rollout: Rollout,
    rewards: Array,
    weights: Array,
    ids: Mapping[str, Array] = NOTHING,
    recorded: Mapping[str, Array] | None = None,
    *,
    own: bool = True,
) -> Batch:
    """What the training step reads; pure, so that compiled runs use it too.

    Args:
      rollout: from the sampler.
      rewards: [N, G, R] float32, points.
      weights: [R] float32.
      ids: of ``Groups``.
      recorded: ``Groups.stats``.
      own: False when the policy drew nothing; there are no ``sampler_logprobs`` then.
    """
    stats = {"external": external(rollout).astype(np.float32), **(recorded or {})}
    if own:
        stats["sampler_logprobs"] = rollout.sampler_logprobs
    members = counted(rollout)
    return Batch(
        prompt_tokens=rollout.prompt_tokens,
        prompt_lengths=rollout.prompt_lengths,
        tokens=rollout.tokens,
        lengths=rollout.lengths,
        mask=rollout.mask & members[:, :, None],
        rewards=rewards,
        reward_weights=weights,
        members=members,
        baseline=rollout.baseline,
        truncated=(rollout.stop == StopReason.LENGTH) | (rollout.stop == StopReason.TURNS),
        stats=stats,
        ids=dict(ids),
        routing=rollout.routing,
    )


_batch_on_device = jax.jit(to_batch, static_argnames="own")


def counted(rollout: Rollout) -> Any:
    """[N, G] bool: members that count in their group.

    They are neither greedy baselines, nor left out (ABORTED), nor did their environment fail.
    """
    left_out = (rollout.stop == StopReason.ABORTED) | (rollout.stop >= StopReason.FAILED)
    return ~rollout.baseline & ~left_out


def external(rollout: Rollout) -> Any:
    """[N, G, T] bool: the tokens that are trained on and that no policy drew."""
    return rollout.mask & (rollout.versions < 0)
