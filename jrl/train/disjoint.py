"""Rollout and training at the same time, on disjoint devices of one job, with bounded staleness.

    step k     train on batch k, which makes version k + 1 of the policy
    meanwhile  draw batch k + s with version k, on devices of its own

With a staleness of s every batch is drawn by the policy s steps before the one that it trains (the
first s batches by version 0). Which version draws which batch follows from the step's number and
never from who is faster, so a run is reproducible, and s = 0 is the synchronous run. The bounded
staleness of "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
Reasoning" (arXiv:2505.24298) and the one-step overlap of "LlamaRL: A Distributed Asynchronous
Reinforcement Learning Framework for Efficient Large-scale LLM Training" (arXiv:2505.24034), with
whole batches in place of interrupted completions.

Weights move between the two sets of devices by ``handover``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jrl.collect.collector import Collector, StepGroups
from jrl.collect.sources import Groups, to_host
from jrl.config.tables import PlacementTable
from jrl.episodes.play import Newer
from jrl.setup.run import Run
from jrl.system.signals import STEP_SECONDS, Stopping
from jrl.system.wait_reports import waiting
from jrl.train import programs
from jrl.train.handover import AdapterHandover, Handover, HandoverError, Weights
from jrl.types import NOTHING, Array, Batch, Params, Rollout, RoutingRecord


class BatchesAhead:
    """Draws batches in a thread, each with the version of the policy that its step asks for.

    Its ``collect`` is what the training loop calls for a batch. Use it in a ``with`` statement: on
    the way out the thread ends, after the rollout in which it is unless that was given up; what was
    drawn stays and can be saved. With a staleness of s the rollout devices hold at most s + 1
    versions of the weights, and two where drawing keeps up with training.

    Args:
      drawer: program 1 and the reward functions, on the rollout mesh; its batches are on the
        training mesh.
      hand_over: moves the policy.
      staleness: s, steps between the policy that draws a batch and the one that it trains.
      in_flight: whether a rollout under way is given the newest weights.
      cursor: prompts used so far.
      carried: the groups of the next s steps, when a run resumes.
      hurries: whether a rollout under way has limited time to end, when ``notes`` waits for it.
    """

    def __init__(
        self,
        drawer: Collector,
        hand_over: Handover | AdapterHandover,
        *,
        staleness: int,
        in_flight: bool = False,
        cursor: int = 0,
        carried: Sequence[StepGroups] = (),
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        self._in_flight, self._hurries = in_flight, hurries
        self._drawer, self._hand_over = drawer, hand_over
        self._staleness = staleness
        self._carried = list(carried)
        self._cursor = carried[-1].cursor if carried else cursor
        self._pending: deque[Future[tuple[StepGroups, Batch]]] = deque()
        self._next = self._first = -1
        self._key: Any = None
        self._newest: Weights | None = None  # written by the training loop, read by the thread
        self._given_up = False
        self._thread = ThreadPoolExecutor(1, "rollout")

    def collect(
        self, key: Array, weights: Mapping[str, Params], *, step: int, cursor: int
    ) -> tuple[Batch, Groups, int]:
        """The batch of a step; the drawing of a later one begins, with this step's policy.

        Args:
          key: the run's root key.
          weights: "policy", of version ``step``, on the training mesh.
          step: training steps done.
          cursor: not read; batches drawn ahead have used prompts that this does not count.

        Returns:
          (batch on the training mesh, the groups in it, prompts used up to them). ``counts`` of the
          groups gains staleness and staleness_max (steps between the policy that drew a token and
          the one that it trains, mean over tokens and greatest) and rollout_seconds and
          waited_seconds (of drawing this batch, and of training that stood still for it).

        Raises:
          HandoverError: the weights or the tokens were not what the schedule asks for.
          Exception: whatever drawing raised.
        """
        if self._next < 0:
            self._key = np.asarray(key)  # the state that holds it is donated under the thread
            self._pending.extend(self._thread.submit(self._again, d) for d in self._carried)
            self._next, self._first = step + len(self._carried), step
        sent = self._hand_over.send(weights["policy"], step)
        if self._in_flight:
            self._newest = sent
        while self._next <= step + self._staleness:
            self._pending.append(self._thread.submit(self._new, sent, self._next))
            self._next += 1
        del sent
        began = time.perf_counter()
        with waiting("rollout devices", of=f"step {step + 1}"):
            try:
                step_groups, batch = self._pending[0].result()
            except KeyboardInterrupt:
                self._given_up = True
                raise
        self._pending.popleft()
        waited = {"waited_seconds": time.perf_counter() - began}
        groups = step_groups.groups._replace(counts=step_groups.groups.counts | waited)
        return batch, groups, step_groups.cursor

    def _again(self, step_groups: StepGroups) -> tuple[StepGroups, Batch]:
        with jax.set_mesh(self._hand_over.rollout_mesh):
            return self._drawer.assemble(step_groups)

    def _new(self, weights: Weights, number: int) -> tuple[StepGroups, Batch]:
        """Batch number ``number``, drawn by the policy that the schedule says; in the thread."""
        began = time.perf_counter()
        version = max(number - self._staleness, self._first)
        where = waiting("rollout", of=f"step {number + 1}")
        with where, jax.set_mesh(self._hand_over.rollout_mesh):
            params = self._hand_over.receive(weights, version)
            step_groups = self._drawer.draw(
                self._key,
                {"policy": params},
                step=number,
                version=version,
                cursor=self._cursor,
                newer=self._newer(version) if self._in_flight else None,
            )
            if jax.process_count() > 1:
                # Arrays of one set of devices cannot go to another where processes share them.
                step_groups = step_groups._replace(groups=to_host(step_groups.groups))
            counts = ages(step_groups.groups, number, self._staleness)
            step_groups, batch = self._drawer.assemble(step_groups)
            jax.block_until_ready(batch)
        self._cursor = step_groups.cursor
        counts["rollout_seconds"] = time.perf_counter() - began
        groups = step_groups.groups._replace(counts=step_groups.groups.counts | counts)
        return step_groups._replace(groups=groups), batch

    def _newer(self, version: int) -> Newer:
        """For one rollout, which begins with that version."""
        current = version

        def newer() -> tuple[Params, int] | None:
            nonlocal current
            # Read once: the training loop may replace it between the test and the use.
            newest = self._newest
            if newest is None or newest.version <= current:
                return None
            current = newest.version
            return self._hand_over.receive(newest, current), current

        return newer

    def drawn(self, seconds: float | None = None) -> list[StepGroups]:
        """The groups of the next steps, in their order, up to the first that could not be drawn.

        Args:
          seconds: how long to wait for a rollout; None until it has ended. One that takes longer is
            given up, and so it is where ``collect`` was interrupted.
        """
        if self._next < 0:
            return self._carried
        batches = []
        # In order, and up to the first failure: a resumed run cannot use a later batch without the
        # earlier one.
        for job in self._pending:
            with contextlib.suppress(Exception, CancelledError):  # ``collect`` says why
                batches.append(job.result(0 if self._given_up else seconds)[0])
                continue
            self._given_up = self._given_up or not job.done()
            break
        return batches

    def notes(self) -> dict[str, Any]:
        """As ``Batches.notes``: what is drawn ahead, whose policies are gone when a run resumes."""
        batches = self.drawn(STEP_SECONDS if self._hurries() else None)
        if not batches:
            return self._drawer.notes()
        packing = batches[0].packing
        before = self._drawer.notes() if packing is None else {"packing": packing}
        return {"carried": [stored(groups) for groups in batches]} | before

    def wait(self) -> None:
        """Returns when no device is drawing."""
        self.drawn()

    def learn(self, step: int, advantages: Any) -> None:
        """As ``Batches.learn``; a curriculum does not go together with drawing ahead."""

    def forget(self, cursor: int) -> None:
        """Drops what is drawn ahead; the next batch is drawn by the policy that asks for it.

        Args:
          cursor: prompts used so far, those of the dropped groups excepted.
        """
        # Emptied before the wait, so that nothing collects a cancelled job.
        jobs, self._pending = list(self._pending), deque()
        for job in jobs:
            job.cancel()
        wait(jobs)
        self._carried, self._next, self._cursor = [], -1, cursor
        self._newest = None

    def __enter__(self) -> BatchesAhead:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Ends the thread; after an error what waits to be drawn is not drawn."""
        failed = error is not None or self._given_up
        self._thread.shutdown(wait=not self._given_up, cancel_futures=failed)


def ages(groups: Groups, step: int, most: int) -> dict[str, float]:
    """Age of a batch's tokens when they are trained on: staleness, staleness_max.

    Args:
      groups: of the batch.
      step: the version that is trained on them.
      most: the greatest age allowed, steps.

    Returns:
      The mean over the tokens that a policy drew and the greatest age, steps; 0 without any.

    Raises:
      HandoverError: a token is older than that, or of a version that is yet to be made.
    """
    versions = np.asarray(groups.rollout.versions)
    # Version -1 marks tokens of no policy: replies of environments, demonstrations.
    old = step - versions[np.asarray(groups.rollout.mask) & (versions >= 0)]
    if old.size == 0:
        return {"staleness": 0.0, "staleness_max": 0.0}
    if old.max() > most or old.min() < 0:
        raise HandoverError(
            f"step {step}: a token was drawn by version {step - int(old.max())} to "
            f"{step - int(old.min())} of the policy; placement.staleness = {most} allows versions "
            f"{max(step - most, 0)} to {step}"
        )
    return {"staleness": float(old.mean()), "staleness_max": float(old.max())}


def draw_ahead(
    run: Run, collector: Collector, cursor: int, carried: Sequence[StepGroups], stopping: Stopping
) -> BatchesAhead:
    """Batches of a run whose rollout has separate devices.

    Args:
      run: with a ``rollout_mesh``.
      collector: its source draws on that mesh.
      cursor: tickets issued so far.
      carried: the groups of the next steps, when a run resumes.
      stopping: when set, a rollout that is ahead has as long to end as any other.
    """
    assert run.rollout_mesh is not None
    placement = run.config.placement or PlacementTable()
    where = programs.policy_shardings(run, run.rollout_mesh)
    split, meshes = run.network.extras.split, (run.mesh, run.rollout_mesh)
    return BatchesAhead(
        collector,
        AdapterHandover(split, where, *meshes) if split else Handover(where, *meshes),
        staleness=placement.staleness,
        in_flight=run.config.train.mode == "in_flight",
        cursor=cursor,
        carried=carried,
        hurries=stopping.hurries,
    )


# ---------------------------------------------------------------- what a checkpoint keeps


def stored(step_groups: StepGroups) -> dict[str, Any]:
    """Groups as numbers and NumPy arrays; ``restored`` reads them."""
    groups, members, prior = jax.device_get(
        (step_groups.groups._replace(subject=None), step_groups.members, dict(step_groups.prior))
    )
    subject = step_groups.groups.subject
    if isinstance(subject, list):  # prompts, which the data has
        subject = {"ids": np.array([prompt.id for prompt in subject], np.int64)}
    else:
        subject = {"leaves": jax.device_get(jax.tree.leaves(subject))}
    return {
        "rollout": dataclasses.asdict(groups.rollout),
        "rewards": groups.rewards,
        "subject": subject,
        "counts": groups.counts,
        "ids": groups.ids,
        "stats": groups.stats,
        "members": members,
        "prior": prior,
        "cursor": step_groups.cursor,
    }


def restored(notes: Mapping[str, Any], run: Run) -> StepGroups:
    """The groups that ``stored`` was given in a run like this one."""
    subject = notes["subject"]
    if "ids" in subject:
        prompts = {prompt.id: prompt for prompt in run.data.prompts["train"]}
        subject = [prompts[int(i)] for i in subject["ids"]]
    else:
        task: Any = run.kind.task
        problem = jax.eval_shape(partial(task.generate, split="train"), jax.random.key(0))
        subject = jax.tree.unflatten(jax.tree.structure(problem), subject["leaves"])
    rollout = notes["rollout"]
    if rollout["routing"] is not None:
        rollout = rollout | {"routing": RoutingRecord(**rollout["routing"])}
    groups = Groups(
        rollout=Rollout(**rollout).check(),
        rewards=notes["rewards"],
        subject=subject,
        counts=notes["counts"],
        ids=notes["ids"],
        stats=notes["stats"],
    )
    return StepGroups(groups, notes["members"], notes["cursor"], prior=notes.get("prior", NOTHING))
