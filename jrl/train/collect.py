"""Hops 2 to 4: from prompts to a batch with rewards.

    batch, groups, position = collect(...)   # program 1 on the device, then reward functions

``collect`` asks a ``GroupSource`` for groups: ``task_rollout``, a procedural task whose rewards are
computed on the device in the same program, or ``TextSource.draw``, prompts in text whose rewards
are functions of text on the host. A method may drop groups; then further prompts are drawn until
the batch is full: the dynamic sampling of ``dapo``.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.data.prompts import pad_prompts
from jrl.data.sources import order
from jrl.data.tasks import Task
from jrl.errors import unknown_choice
from jrl.methods.base import GroupEditor, Method, keep_all, same_rewards
from jrl.models.tokenizer import Tokenizer
from jrl.processes import deal
from jrl.rewards.exact import final_answer
from jrl.rewards.pool import RewardPool, Sample
from jrl.sampling.generate import generate
from jrl.sampling.params import SamplingParams
from jrl.sampling.tree import generate_tree
from jrl.train.demonstrations import (
    demonstration_rollout,
    join_members,
    pad_solutions,
    task_solution,
)
from jrl.train.step import place_batch
from jrl.types import (
    NOTHING,
    Array,
    Batch,
    Branching,
    Network,
    Params,
    Prompt,
    Rollout,
    StopReason,
    stream,
)


class Groups(NamedTuple):
    """What one draw gives: N groups with their rewards.

    Attributes:
      rollout: tokens and what was recorded while drawing them.
      rewards: [N, G, R] float32, points.
      subject: what the prompts were about: the task's problems (a pytree with N rows) or a list of
        N ``Prompt``.
      counts: numbers by name, such as reward functions that ran out of time. Those of several draws
        add up; ``with_slot_use`` makes a share of ``slot_tokens`` and ``slot_steps``, [] int32.
      ids: for ``Batch.ids``; "prompt" [N] int32 at least, the identity of each problem.
      stats: for ``Batch.stats``, [N, G, T] float32 by name, of what an environment recorded.
    """

    rollout: Rollout
    rewards: Any
    subject: Any
    counts: dict[str, Any]
    ids: dict[str, Any]
    stats: dict[str, Any] | None = None


GroupSource = Callable[..., Groups]
"""(root key, policy params, step, positions [N] int32 in the run's order) -> N groups.

The step chooses what is drawn; ``version``, by keyword, is the policy's where it is an older one.
"""


class StepGroups(NamedTuple):
    """The groups of one training step.

    Attributes:
      groups: N of them.
      live: [N] bool, False where too few groups were kept and a dropped one takes the place; None
        when all are live.
      cursor: prompts used so far, these included.
      packing: ``Packer.notes`` before their completions were packed; None if they are not packed,
        or not yet.
    """

    groups: Groups
    live: Any
    cursor: int
    packing: dict[str, Any] | None = None


def collect(
    key: Array,
    params: Params,
    draw: GroupSource,
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
    mesh: Mesh,
    pack: Callable[[Batch], Batch] | None = None,
) -> tuple[Batch, Groups, int]:
    """A full batch of groups, sampled in as many rounds as the method's group filter needs.

    Args:
      key: the run's root key.
      params: the policy's.
      draw: the run's source of groups.
      step: the policy's version.
      cursor: prompts used so far; every round continues where the last one ended.
      prompts: N.
      weights: [R] float32.
      method: its prompts, rewards and groups seams are used here.
      mesh: where the batch goes.
      pack: packs completions into rows, such as a ``packing.Packer``; None to leave them.

    Returns:
      (batch on the mesh, the groups in it, the new cursor); see ``draw_groups`` for the counts.
    """
    draw = _drawing(draw, method, key, params, step)
    # The first round is asked for here, and not in ``_fill_up``, to keep stack traces short.
    first = draw(_next_prompts(method, step, cursor, prompts))
    drawn = _fill_up(first, draw, step, cursor, prompts=prompts, weights=weights, method=method)
    batch = assemble(drawn, weights=weights, method=method, mesh=mesh, pack=pack)
    return batch, drawn.groups, drawn.cursor


def draw_groups(
    key: Array,
    params: Params,
    draw: GroupSource,
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
) -> StepGroups:
    """The groups of a training step; the arguments are those of ``collect``.

    Returns:
      N groups. With a filter, ``counts`` of the groups gains reward (points, over all groups
      drawn, kept or not), rounds, groups_kept (fraction of those drawn) and groups_missing (places
      left without a kept group when the rounds ran out; a dropped one stands there).
    """
    draw = _drawing(draw, method, key, params, step)
    first = draw(_next_prompts(method, step, cursor, prompts))
    return _fill_up(first, draw, step, cursor, prompts=prompts, weights=weights, method=method)


def _drawing(
    draw: GroupSource, method: Method, key: Array, params: Params, step: int
) -> Callable[[np.ndarray], Groups]:
    """The source for a step, of groups by the policy's version that draws them."""
    drawing = partial(draw, key, params, np.int32(step))
    drawn_by = method.schedule.drawn_by(step)
    return drawing if drawn_by == step else partial(drawing, version=np.int32(drawn_by))


def _next_prompts(method: Method, step: int, cursor: int, prompts: int) -> np.ndarray:
    """[prompts] int32, the positions in the data that the method's curriculum takes next."""
    return method.prompts(step, cursor + np.arange(prompts)).astype(np.int32)


def _fill_up(
    first: Groups,
    draw: Callable[[np.ndarray], Groups],
    step: int,
    cursor: int,
    *,
    prompts: int,
    weights: Any,
    method: Method,
) -> StepGroups:
    """The first round's groups, and further rounds' where the method's filter dropped some."""
    editor = method.groups
    groups = _edit(method, first)
    cursor += prompts
    if editor.keep is keep_all:
        return StepGroups(groups, None, cursor)
    groups = to_host(groups)  # a filter reads the rewards of whole groups, on the host
    kept = _keep(editor, groups, weights)
    rounds = 1
    while editor.refill and kept.sum() < prompts and rounds < editor.max_rounds:
        more = to_host(_edit(method, draw(_next_prompts(method, step, cursor, prompts))))
        cursor, rounds = cursor + prompts, rounds + 1
        groups = _join(groups, more)
        kept = np.concatenate([kept, _keep(editor, more, weights)])
    # Kept groups first, in the order sampled; dropped ones only pad a batch that is too small,
    # because its shape is part of the program. ``assemble`` masks them out.
    order = np.argsort(~kept, kind="stable")[:prompts]
    live = kept[order]
    drawn = counted(groups.rollout)
    scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(weights))
    counts = groups.counts | {
        "reward": float(scores[drawn].mean()) if drawn.any() else 0.0,
        "rounds": float(rounds),
        "groups_kept": float(kept.mean()),
        "groups_missing": float(prompts - live.sum()),
    }
    return StepGroups(_take(groups, order)._replace(counts=counts), live, cursor)


def assemble(
    drawn: StepGroups,
    *,
    weights: Any,
    method: Method,
    mesh: Mesh,
    pack: Callable[[Batch], Batch] | None,
) -> Batch:
    """The batch of a training step, on its mesh; dropped groups are masked out."""
    groups, live = drawn.groups, drawn.live
    # On a device: one program, where eager lines would be a dispatch each.
    make = to_batch if isinstance(groups.rollout.tokens, np.ndarray) else _batch_on_device
    rows = groups.rollout, groups.rewards, weights, groups.ids, groups.stats
    batch = make(*rows, own=method.draw.own)
    if live is not None:
        mask = np.asarray(batch.mask) & live[:, None, None]
        members = np.asarray(batch.members) & live[:, None]
        batch = batch.replace(mask=mask, members=members)
    return place_batch(batch if pack is None else pack(batch), mesh)


def _edit(method: Method, groups: Groups) -> Groups:
    """The method's own edit of the reward parts."""
    if method.rewards is same_rewards:
        return groups
    groups = to_host(groups)
    return groups._replace(rewards=method.rewards(groups.rewards, groups.rollout))


def _keep(editor: GroupEditor, groups: Groups, weights: Array) -> np.ndarray:
    """[N] bool: which groups the editor keeps."""
    scores = np.einsum("ngr,r->ng", groups.rewards, np.asarray(weights))
    return np.asarray(editor.keep(scores, np.asarray(counted(groups.rollout))), bool)


# ---------------------------------------------------------------- procedural tasks


def task_rollout(
    key: Array,
    params: Params,
    step: Array,
    ids: Array,
    *,
    version: Array | None = None,
    sampling_params: SamplingParams,
    task: Task,
    split: str,
    parts: Sequence[str],
    network: Network,
    group: int,
    baseline_members: int = 0,
    demonstrations: int = 0,
    slots: int = 0,
    chunk: int = 4,
    tree: Branching | None = None,
) -> Groups:
    """Problems, completions and rewards in one program; the same function in every mode.

    Problem i of a run is a function of (key, i) alone, and so are its completions at a given step.

    Args:
      key: the run's root key.
      params: the policy's.
      step: [] int32, the training step that the completions are for.
      ids: [N] int32, which of the run's problems.
      version: [] int32, the policy's; None for ``step``.
      sampling_params: scalars.
      task: the procedural task.
      split: "train" or "eval".
      parts: reward parts, of "verify" and "partial".
      network: the policy.
      group: members drawn from the distribution; 0 draws nothing at all.
      baseline_members: further members drawn greedily.
      demonstrations: last members, each the task's own solution.
      slots: completions decoded at a time; 0 takes all.
      chunk: decode steps between slot refills.
      tree: how members branch off one another; None draws them apart. With it ``ids`` gains "node",
        and no members may stand beside the group's.

    Returns:
      The groups; their subject is the problems, with N rows. ``ids`` holds "answer" [N, G], a
      number for the whole completion: equal numbers, equal completions.
    """
    data, sample = ("data", "sample") if split == "train" else ("eval_data", "eval")
    problem_keys = jax.vmap(lambda i: stream(key, data, i))(ids)
    problems = jax.vmap(lambda k: task.generate(k, split))(problem_keys)
    members: list[Rollout] = []
    counts: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    if group:
        drawing: Any = partial(generate, baseline_members=baseline_members, chunk=chunk)
        if tree is not None:
            assert baseline_members == demonstrations == 0
            drawing = partial(generate_tree, branching=tree)
        found = drawing(
            stream(key, sample, step),
            params,
            problems.tokens,
            problems.length,
            sampling_params,
            step if version is None else version,
            ids,
            network=network,
            group=group,
            max_new_tokens=task.completion_tokens,
            stop_tokens=(task.stop_id,),
            slots=slots,
        )
        drawn, labels, counts = counted_draw(found)
        members.append(drawn)
    if demonstrations:
        solutions = jax.vmap(partial(task_solution, task))(problems)
        members.append(
            demonstration_rollout(problems.tokens, problems.length, *solutions, demonstrations)
        )
    rollout = members[0] if len(members) == 1 else join_members(members)
    judges = {"verify": task.verify, "partial": task.partial}
    for part in parts:
        if part not in judges:
            raise unknown_choice("rewards", part, judges)

    def judge(problem: Any, tokens: Array, length: Array) -> Array:
        return jnp.array([judges[part](problem, tokens, length) for part in parts], jnp.float32)

    rewards = jax.vmap(lambda p, ts, ns: jax.vmap(partial(judge, p))(ts, ns))(
        problems, rollout.tokens, rollout.lengths
    )
    answer = jax.vmap(jax.vmap(_number_of))(rollout.tokens, rollout.lengths)
    return Groups(rollout, rewards, problems, counts, {"prompt": ids, "answer": answer, **labels})


def _number_of(tokens: Array, length: Array) -> Array:
    """[] int32, at least 0, for the first ``length`` tokens of ONE completion."""
    odd = jnp.uint32(0x9E3779B1)
    powers = jnp.cumprod(jnp.full(tokens.shape, odd, jnp.uint32))
    live = jnp.arange(tokens.shape[0]) < length
    total = jnp.sum(jnp.where(live, (tokens.astype(jnp.uint32) + 1) * powers, 0), dtype=jnp.uint32)
    return (total >> 1).astype(jnp.int32)


def counted_draw(found: tuple[Any, ...]) -> tuple[Rollout, dict[str, Any], dict[str, Any]]:
    """What ``generate`` or ``generate_tree`` returned: (rollout, labels of tokens, counts)."""
    drawn, slot_steps, *node = found
    counts = {"slot_tokens": drawn.mask.sum(), "slot_steps": slot_steps}
    if not node:
        return drawn, {}, counts
    shared = drawn.lengths.sum() - drawn.mask.sum()
    return drawn, {"node": node[0]}, counts | {"tree_shared_tokens": shared}


# ---------------------------------------------------------------- prompts in text


compiled_stream = jax.jit(stream, static_argnums=1)
"""``stream`` as one program, for use outside of others."""


class TextSource(NamedTuple):
    """Prompts in text, a compiled sampler, and reward functions on the host.

    Attributes:
      prompts: all of them, in the source's order.
      width: P, tokens.
      seed: of the order, or None for the source's own order.
      program: ``jax.jit`` of ``generate`` with its keyword arguments bound; None draws
        nothing.
      sampling_params: scalars.
      pool: the reward functions; None gives every completion 0 points.
      tokenizer: turns completions into text for them.
      demonstrations: last members of each group, each the prompt's own solution.
      max_new_tokens: T, where a solution is cut.
      lines: ids that end a line, where lines are steps, the label "step"; () for no label.
      name: of what is drawn for, where several processes share the judging.
    """

    prompts: Sequence[Prompt]
    width: int
    seed: int | None
    program: Callable[..., tuple[Rollout, Array]] | None
    sampling_params: SamplingParams
    pool: RewardPool | None
    tokenizer: Tokenizer
    demonstrations: int = 0
    max_new_tokens: int = 0
    lines: Sequence[int] = ()
    name: str = "train"

    def draw(
        self, key: Array, params: Params, step: Any, positions: Any, version: Any = None
    ) -> Groups:
        """See ``GroupSource``."""
        version = step if version is None else version
        chosen = [self.prompts[i] for i in source_rows(self.seed, positions, len(self.prompts))]
        tokens, lengths = pad_prompts(chosen, self.width)
        members: list[Rollout] = []
        counts: dict[str, Any] = {}
        labels: dict[str, Any] = {}
        if self.program is not None:
            sample_key = compiled_stream(key, "sample", step)
            found = jax.device_get(
                self.program(
                    sample_key, params, tokens, lengths, self.sampling_params, version, positions
                )
            )
            drawn, labels, counts = counted_draw(found)
            members.append(drawn)
        if self.demonstrations:
            solutions = pad_solutions(chosen, self.max_new_tokens)
            members.append(demonstration_rollout(tokens, lengths, *solutions, self.demonstrations))
        rollout = members[0] if len(members) == 1 else join_members(members)
        if len(self.lines):
            ends = np.isin(rollout.tokens, self.lines)
            labels = labels | {"step": (np.cumsum(ends, axis=2) - ends).astype(np.int32)}
        groups = self.judge(chosen, rollout)
        return groups._replace(counts=groups.counts | counts, ids=groups.ids | labels)

    def judge(self, chosen: list[Prompt], rollout: Rollout) -> Groups:
        """Rewards of completions, all reward functions at once.

        Each process judges a share of the prompts and gets the other points from the others, so all
        hold the same points even if a reward function is not deterministic. ``ids`` holds "answer"
        [N, G], a number for each final answer: equal answers have equal numbers.
        """
        n, g, _ = rollout.tokens.shape
        ids = {"prompt": np.array([prompt.id for prompt in chosen], np.int32)}
        if self.pool is None:
            return Groups(rollout, np.zeros((n, g, 1), np.float32), chosen, {}, ids)
        pool = self.pool

        def judged(rows: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
            samples = [
                Sample(
                    prompt=chosen[i],
                    completion=self.tokenizer.decode(tokens.tolist()),
                    tokens=tokens,
                    stop=StopReason(int(rollout.stop[i, j])).name.lower(),
                )
                for i in rows
                for j in range(g)
                for tokens in [np.asarray(rollout.tokens[i, j, : rollout.lengths[i, j]])]
            ]
            points, counts = pool.scores(samples, group=g)
            said = np.array([[answer_number(s.completion)] for s in samples], points.dtype)
            both = np.concatenate([points, said.reshape(-1, 1)], axis=1)
            return both.reshape(len(rows), g, both.shape[1]), counts

        # Text is decoded and judged where it is a process's turn; points travel, texts do not.
        begin = time.perf_counter()
        points, counts = deal(self.name, n, judged)
        counts["reward_seconds"] = time.perf_counter() - begin
        points, ids["answer"] = points[:, :, :-1], points[:, :, -1].astype(np.int32)
        if np.isnan(points).any():
            rollout, points, counts["reward_dropped"] = _without_unjudged(rollout, points)
        return Groups(rollout, points, chosen, counts, ids)


def answer_number(text: str) -> int:
    """A number below 2**24, which float32 holds exactly, for the final answer of a text.

    That is what ``rewards.exact.final_answer`` finds, else the whole text.
    """
    return zlib.crc32((final_answer(text) or text).strip().encode()) & 0xFFFFFF


def _without_unjudged(rollout: Rollout, points: np.ndarray) -> tuple[Rollout, np.ndarray, float]:
    """Takes completions with NaN points out of their groups, and whole groups with their baseline.

    Returns:
      (the rollout, where those have ended as ABORTED; points [N, G, R] float32 without NaN; how
      many completions were taken out).
    """
    out = np.isnan(points).any(axis=2)
    out |= (out & rollout.baseline).any(axis=1, keepdims=True)  # nothing is left to compare with
    stop = np.where(out, np.int32(StopReason.ABORTED), rollout.stop)
    points = np.where(out[:, :, None], np.float32(0), points)
    return rollout.replace(stop=stop), points, float(out.sum())


def source_rows(seed: int | None, positions: np.ndarray, size: int) -> list[int]:
    """Where in the source the run's prompts stand: epoch after epoch, each in an order of its own.

    Args:
      seed: of the order, or None for the source's own order.
      positions: [N] int64, counted from the start of the run.
      size: prompts in the source.
    """
    epochs, indices = np.divmod(positions, size)
    if seed is None:
        return indices.tolist()
    orders = {e: order(seed, int(e), size) for e in np.unique(epochs)}
    return [int(orders[e][i]) for e, i in zip(epochs, indices, strict=True)]


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


def to_host(groups: Groups) -> Groups:
    """The groups with every array on the host."""
    listed = isinstance(groups.subject, list)
    subject = groups.subject if listed else jax.device_get(groups.subject)
    return jax.device_get(groups._replace(subject=None))._replace(subject=subject)


def _join(a: Groups, b: Groups) -> Groups:
    def both(x: Any, y: Any) -> Any:
        return jax.tree.map(lambda u, v: np.concatenate([u, v]), x, y)

    subject = a.subject + b.subject if isinstance(a.subject, list) else both(a.subject, b.subject)
    counts = {k: a.counts.get(k, 0) + b.counts.get(k, 0) for k in a.counts | b.counts}
    rollout, rewards = both(a.rollout, b.rollout), both(a.rewards, b.rewards)
    ids, stats = both(a.ids, b.ids), both(a.stats, b.stats)
    return Groups(rollout, rewards, subject, counts, ids, stats)


def _take(groups: Groups, rows: np.ndarray) -> Groups:
    pick = lambda tree: jax.tree.map(lambda x: x[rows], tree)  # noqa: E731
    many = isinstance(groups.subject, list)
    subject = [groups.subject[i] for i in rows] if many else pick(groups.subject)
    rollout, rewards, ids = pick((groups.rollout, groups.rewards, groups.ids))
    return Groups(rollout, rewards, subject, groups.counts, ids, pick(groups.stats))
