"""Hops 2 to 4: from prompts to a batch with rewards.

    batch, groups, cursor = collector.collect(key, weights, step=step, cursor=cursor)

A ``Collector`` gets groups from a source (``sources.Source``: a task with rewards on the device,
prompts in text with reward functions on the host, ...). A method may drop groups; further prompts
are then sampled until the batch is full, as in the dynamic sampling of ``dapo``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.collect.curriculum import HostRounds
from jrl.collect.edit import edit_counts, edited, learned, mean_sizes, outcome_of
from jrl.collect.groups import PlacedGroups, place_batch, to_batch
from jrl.collect.packing import Packer
from jrl.collect.plan import (
    FirstAsks,
    Setting,
    StepKey,
    first_asks,
    host_rounds,
    new_collected,
    packed,
    rest_of_step,
    unpacked,
)
from jrl.collect.sources import Groups, Source, resume_source, take_groups, to_host
from jrl.methods.curriculum import unchanged
from jrl.types import NOTHING, Array, Batch, Params
from jrl.types.asks import ASIDE, Asks, DrawRequest


class StepGroups(NamedTuple):
    """The groups of one training step.

    Attributes:
      groups: N of them.
      members: [N, G] bool, members to train on; None for all that count in their group.
      cursor: tickets issued so far, including these.
      packing: ``Packer.notes`` before the completions were packed; None if they are not packed yet.
      prior: [N] float32 by name, the curriculum's estimates of each problem.
    """

    groups: Groups
    members: Any
    cursor: int
    packing: dict[str, Any] | None = None
    prior: Mapping[str, Any] = NOTHING


class Collects(Protocol):
    """Hops 1 to 4, as the training loop calls them."""

    def collect(
        self, key: Array, weights: Mapping[str, Params], *, step: int, cursor: int
    ) -> tuple[Batch, Groups, int]:
        """(batch of a step on the mesh of training, the groups in it, tickets issued so far)."""


class Batches(Collects, Protocol):
    """Hops 1 to 4 of a run, with what checkpoints and curricula need."""

    def notes(self) -> dict[str, Any]:
        """State for a checkpoint, so that the next batch is the same."""

    def wait(self) -> None:
        """Returns when no device is sampling."""

    def forget(self, cursor: int) -> None:
        """Drops batches drawn ahead; ``cursor`` counts the tickets of the steps that are done."""

    def learn(self, step: int, advantages: Any) -> None:
        """Updates a curriculum with the step's advantages [N, G, T]; None if they are unknown."""


class Collector:
    """Batches whose groups are sampled on demand, step by step.

    Args:
      source: source of groups, with its wrappers (see ``train.batches.training_batches``).
      setting: constants of the run's steps; the order is that of the source.
      mesh: devices of the batches.
      pack: packs completions into rows; None for none.
      sampled: whether a policy sampled the completions, so that there are ``sampler_logprobs``.
      rounds: runs the curriculum's ``between``; None for one that needs only the source.
      notes: ``Collector.notes`` of a checkpoint; {} for a new run.
    """

    def __init__(
        self,
        source: Source,
        setting: Setting,
        mesh: Mesh,
        pack: Packer | None = None,
        sampled: bool = True,
        *,
        rounds: HostRounds | None = None,
        notes: Mapping[str, Any] = NOTHING,
    ) -> None:
        weights = np.asarray(setting.weights, np.float32)
        setting, method = setting._replace(weights=weights, order=source.order), setting.method
        self.source, self.mesh = source, mesh
        self.pack, self.sampled = pack, sampled
        self.collected = new_collected(setting)
        if "collect" in notes:
            self.collected = unpacked(self.collected, notes["collect"])
        if "source" in notes:
            resume_source(source, notes["source"])
        self._next = self.collected
        self._outcome: tuple[PlacedGroups, PlacedGroups] | None = None
        self._rounds = HostRounds(source) if rounds is None else rounds
        curriculum = method.curriculum
        rewrites = method.rewards is not unchanged
        self._plain = not (method.plan.next or method.edits or curriculum or rewrites)
        if curriculum is not None and curriculum.between is None:
            # As one program each, for the same numbers as in a compiled run.
            curriculum = curriculum._replace(
                choose=jax.jit(curriculum.choose), update=jax.jit(curriculum.update)
            )
            method = method._replace(curriculum=curriculum)
        self.setting = setting._replace(method=method)

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
        request = self.request(key, weights, step)
        with self._drawing():
            now, first = self._first(request, cursor)
            request = request.replace(asks=first.asks)
            # The first draw is made here, not in ``_further``, to keep stack traces short.
            groups = self.source.draw(request)
            step_groups = self._further(groups, first, request, now)
            _, batch = self.assemble(step_groups)
        self.collected = self._next  # not before: a failed step that is repeated would store twice
        return batch, step_groups.groups, step_groups.cursor

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
        """The groups of a training step, sampled by weights of version ``version``.

        Returns:
          N groups. With further rounds or edits ``counts`` of the groups gains reward (points, the
          mean over all members sampled for training, kept or not), and with further rounds also
          rounds, groups_kept (fraction of those sampled) and groups_missing (places without a group
          to train on after the last round; a dropped group fills each).
        """
        request = self.request(key, weights, step, version, newer)
        with self._drawing():
            now, first = self._first(request, cursor)
            request = request.replace(asks=first.asks)
            step_groups = self._further(self.source.draw(request), first, request, now)
        self.collected = self._next
        return step_groups

    def _first(self, request: DrawRequest, cursor: int) -> tuple[StepKey, FirstAsks]:
        """The step and its first draw; a round of the curriculum may begin with it."""
        key: Any = request.key
        if not self._plain:
            key = np.asarray(jax.random.key_data(key) if _typed(key) else key)
        now, collected = StepKey(key, request.step), self.collected.replace(cursor=np.int32(cursor))
        if self.setting.method.curriculum is not None:
            collected = self._rounds.begun(collected, request, self.setting)
        with on_host():
            first = first_asks(collected, now, self.setting)
        return now, first._replace(asks=_host_asks(first.asks))

    def request(
        self,
        key: Array,
        weights: Mapping[str, Params],
        step: int,
        version: int | None = None,
        newer: Callable[[], Any] | None = None,
    ) -> DrawRequest:
        """A request without asks; ``version`` is the weights', None for the step."""
        versions = dict.fromkeys(weights, np.int32(step if version is None else version))
        for policy in self.setting.method.plan.policies:
            versions[policy.name] = np.int32(policy.version(step))
        return DrawRequest(key, weights, versions, np.int32(step), (), newer=newer)

    def _further(
        self, first_groups: Groups, first: FirstAsks, request: DrawRequest, now: StepKey
    ) -> StepGroups:
        """The step's groups: the first draw's, after the plan's further rounds and the edits."""
        if first.order is not None:
            first_groups = take_groups(to_host(first_groups), first.order)
        self._next = first.collected
        if self._plain and not (first.origin.use == ASIDE).any():
            cursor = int(first.collected.cursor)
            return StepGroups(first_groups, None, cursor)

        first_groups, base = to_host(first_groups), int(first.origin.ticket[0])
        about = _by_ticket(first.origin.ticket, first_groups.subject)

        def draw(asks: Asks) -> Groups:
            with jax.default_device(None):  # sampling stays where the weights are
                more = to_host(self.source.draw(request.replace(asks=asks)))
            about.update(_by_ticket(asks[0].ticket, more.subject))
            return more

        with on_host():
            groups, collected, counts = rest_of_step(
                first, first_groups, draw, base, now, self.setting, rounds=host_rounds
            )
            trained, more = groups, {}
            if self.setting.method.edits or self.setting.method.plan.next is not None:
                trained, collected, share = edited(groups, collected, now, self.setting)
                more = edit_counts(groups, trained, share, self.setting)
        groups, trained, more = jax.device_get((groups, trained, more))
        counts = counts | {name: float(x) for name, x in more.items()}
        curriculum = self.setting.method.curriculum
        if curriculum is not None and curriculum.between is not None:
            counts |= curriculum.between.counts(collected.curriculum)
        self._next = collected
        self._outcome = None if curriculum is None else (groups, trained)
        members = np.asarray(trained.members())
        subject, _ = self.source.prompts(request.key, trained.row)
        if isinstance(subject, list):  # a source may have other prompts in its rows by now
            tickets = trained.ticket.tolist()
            subject = [about.get(t, x) for t, x in zip(tickets, subject, strict=True)]
        final = Groups(
            trained.rollout, trained.rewards, subject, counts, trained.ids, trained.stats or None
        )
        prior = {name: np.asarray(x, np.float32) for name, x in trained.prior.items()}
        return StepGroups(final, members, int(collected.cursor), None, prior)

    def learn(self, step: int, advantages: Any) -> None:
        """As ``Batches.learn``."""
        if (curriculum := self.setting.method.curriculum) is None or self._outcome is None:
            return
        (groups, trained), table = self._outcome, self.setting.table
        assert table is not None
        with on_host():
            sizes = None
            if advantages is not None:
                live = trained.rollout.mask & np.asarray(trained.members())[:, :, None]
                sizes = mean_sizes(np.asarray(advantages), live)
            outcome = outcome_of(groups, trained, sizes, np.int32(step), table)
            self.collected = learned(curriculum, self.collected, outcome)
        self._outcome = None

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Tells the source when the draws of a step are over."""
        packing = None if self.pack is None else self.pack.notes()
        try:
            yield
        except BaseException:
            if self.pack is not None and packing is not None:
                self.pack.resume(packing)  # the step is repeated, and would count twice
            self.source.finish(complete=False)
            raise
        self.source.finish(complete=True)

    def assemble(self, step_groups: StepGroups) -> tuple[StepGroups, Batch]:
        """(the groups, their batch on the mesh of training with dropped groups masked out)."""
        groups, method = step_groups.groups, self.setting.method
        # On a device: one program, where eager lines would be a dispatch each.
        make = to_batch if isinstance(groups.rollout.tokens, np.ndarray) else _batch_on_device
        batch = make(
            groups.rollout,
            groups.rewards,
            self.setting.weights,
            groups.ids,
            groups.stats,
            step_groups.members,
            dict(step_groups.prior),
            sampled=self.sampled and method.draw.samples,
        )
        if self.pack is not None:
            step_groups = step_groups._replace(packing=self.pack.notes())
            batch = self.pack(batch)
        return step_groups, place_batch(batch, self.mesh)

    def notes(self) -> dict[str, Any]:
        """As ``Batches.notes``."""
        notes = {} if self.pack is None else {"packing": self.pack.notes()}
        if self.setting.method.curriculum is not None or self.setting.method.edits:
            notes["collect"] = packed(self.collected)
        if state := self.source.notes():
            notes["source"] = state
        return notes

    def wait(self) -> None:
        """Returns at once: nothing is sampled between two calls."""

    def forget(self, cursor: int) -> None:
        """Nothing is drawn ahead."""


# ---------------------------------------------------------------- groups to batch

_batch_on_device = jax.jit(to_batch, static_argnames="sampled")


def on_host() -> Any:
    """The device for plans, edits and curricula between two programs: the CPU."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()


def _typed(key: Any) -> bool:
    return jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)


def _by_ticket(tickets: Any, subject: Any) -> dict[int, Any]:
    """Ticket -> the problem of its group, for prompts in text."""
    if not isinstance(subject, list) or len(subject) != len(tickets):
        return {}
    return dict(zip(np.asarray(tickets).tolist(), subject, strict=True))


def _host_asks(asks: Asks) -> Asks:
    """The asks with every array on the host; asks of the same tickets still share these arrays."""
    first, *others = jax.device_get(asks)
    same = all(ask.ticket.shape == first.ticket.shape for ask in others)
    shared = {"ticket": first.ticket, "row": first.row} if same else {}
    return (first, *(ask.replace(**shared) for ask in others))
