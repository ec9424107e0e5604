"""Hops 2 to 4: from prompts to a batch with rewards.

    groups = collect(...)     # program 1 on the device, then reward functions on the host

A ``Source`` hides where prompts come from: a procedural task, whose rewards are computed on the
device in the same program, or prompts in text, whose rewards are functions of text on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data.prompts import pad_prompts
from jrl.data.sources import order
from jrl.data.tasks import Task
from jrl.errors import UserError, choose
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.pool import RewardPool, Sample
from jrl.sampling.draw import Law
from jrl.sampling.engine import generate
from jrl.types import Array, Batch, Network, Params, Prompt, Rollout, StopReason, stream


class Groups(NamedTuple):
    """What one draw gives: N groups with their rewards.

    Attributes:
      rollout: tokens and what was recorded while drawing them.
      rewards: [N, G, R] float32, points.
      subject: what the prompts were about: the task's problems (a pytree with N rows) or a list of
        N ``Prompt``.
      counts: numbers by name, such as reward functions that ran out of time.
    """

    rollout: Rollout
    rewards: Any
    subject: Any
    counts: dict[str, float]


Draw = Callable[[Array, Params, Any, Any], Groups]
"""(root key, policy params, step, positions [N] int32 in the run's order) -> N groups."""


# ---------------------------------------------------------------- procedural tasks


def task_rollout(
    key: Array,
    params: Params,
    step: Array,
    ids: Array,
    *,
    law: Law,
    task: Task,
    split: str,
    parts: Sequence[str],
    network: Network,
    group: int,
    baseline_members: int = 0,
) -> Groups:
    """Problems, completions and rewards in one program; the same function in every mode.

    Problem i of a run is a function of (key, i) alone, and so are its completions at a given step.

    Args:
      key: the run's root key.
      params: the policy's.
      step: [] int32, the policy's version.
      ids: [N] int32, which of the run's problems.
      law: scalars.
      task: the procedural task.
      split: "train" or "eval".
      parts: reward parts, of "verify" and "partial".
      network: the policy.
      group: members drawn from the law.
      baseline_members: further members drawn greedily.

    Returns:
      The groups; their subject is the problems, with N rows.
    """
    data, sample = ("data", "sample") if split == "train" else ("eval_data", "eval")
    problem_keys = jax.vmap(lambda i: stream(key, data, i))(ids)
    problems = jax.vmap(lambda k: task.generate(k, split))(problem_keys)
    rollout = generate(
        stream(key, sample, step),
        params,
        problems.tokens,
        problems.length,
        law,
        step,
        ids,
        network=network,
        group=group,
        max_new_tokens=task.completion_tokens,
        stop_tokens=(task.stop_id,),
        baseline_members=baseline_members,
    )
    judges = {"verify": task.verify, "partial": task.partial}
    for part in parts:
        if part not in judges:
            raise choose("rewards", part, judges)

    def judge(problem: Any, tokens: Array, length: Array) -> Array:
        return jnp.stack([judges[part](problem, tokens, length) for part in parts])

    rewards = jax.vmap(lambda p, ts, ns: jax.vmap(partial(judge, p))(ts, ns))(
        problems, rollout.tokens, rollout.lengths
    )
    return Groups(rollout, rewards, problems, {})


# ---------------------------------------------------------------- prompts in text


class TextSource(NamedTuple):
    """Prompts in text, a compiled sampler, and reward functions on the host.

    Attributes:
      prompts: all of them, in the source's order.
      width: P, tokens.
      seed: of the order, or None for the source's own order.
      program: ``jax.jit`` of ``generate`` with its keyword arguments bound.
      law: scalars.
      pool: the reward functions; None gives every completion 0 points.
      tokenizer: turns completions into text for them.
    """

    prompts: Sequence[Prompt]
    width: int
    seed: int | None
    program: Callable[..., Rollout]
    law: Law
    pool: RewardPool | None
    tokenizer: Tokenizer

    def draw(self, key: Array, params: Params, step: Any, positions: Any) -> Groups:
        """See ``Draw``."""
        chosen = [self.prompts[i] for i in place(self.seed, positions, len(self.prompts))]
        tokens, lengths = pad_prompts(chosen, self.width)
        sample_key = stream(key, "sample", step)
        rollout = self.program(sample_key, params, tokens, lengths, self.law, step, positions)
        return self.judge(chosen, jax.device_get(rollout))

    def judge(self, chosen: list[Prompt], rollout: Rollout) -> Groups:
        """Rewards of completions, all reward functions at once."""
        n, g, _ = rollout.tokens.shape
        if self.pool is None:
            return Groups(rollout, np.zeros((n, g, 1), np.float32), chosen, {})
        texts = completions(rollout, self.tokenizer)
        samples = [
            Sample(
                prompt=chosen[i // g],
                completion=texts[i],
                tokens=np.asarray(rollout.tokens[i // g, i % g, : rollout.lengths[i // g, i % g]]),
                stop=StopReason(int(rollout.stop[i // g, i % g])).name.lower(),
            )
            for i in range(n * g)
        ]
        scores, counts = self.pool.scores(samples, group=g)
        return Groups(rollout, scores.reshape(n, g, -1), chosen, counts)


def place(seed: int | None, positions: np.ndarray, size: int) -> list[int]:
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


def completions(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The text of each completion, N * G of them; ``rollout`` is on the host."""
    t = rollout.tokens.shape[-1]
    pairs = zip(rollout.tokens.reshape(-1, t), rollout.lengths.reshape(-1), strict=True)
    return [tokenizer.decode(tokens[:n].tolist()) for tokens, n in pairs]


def samples_of(
    groups: Groups, tokenizer: Any, task: Task | None, weights: Mapping[str, float], count: int
) -> list[dict[str, Any]]:
    """The first ``count`` completions as records for people, with the reward parts by name.

    Args:
      groups: from a draw.
      tokenizer: turns tokens into text.
      task: the procedural task, or None for prompts in text.
      weights: reward part -> weight, in the order of the rewards.
      count: the most records.
    """
    rollout, rewards, subject = jax.device_get((groups.rollout, groups.rewards, groups.subject))
    n, g, _ = rollout.tokens.shape
    records = []
    for i in range(min(count, n * g)):
        row, member = divmod(i, g)
        if task is not None:
            prompt, answer = task.render(jax.tree.map(lambda x, row=row: x[row], subject))
        else:
            prompt, answer = subject[row].text, str(subject[row].answer)
        length = int(rollout.lengths[row, member])
        parts = dict(zip(weights, rewards[row, member].tolist(), strict=True))
        records.append(
            {
                "prompt": prompt,
                "completion": tokenizer.decode(rollout.tokens[row, member, :length].tolist()),
                "answer": answer,
                "rewards": parts,
                "reward": sum(weights[name] * points for name, points in parts.items()),
                "stop": StopReason(int(rollout.stop[row, member])).name.lower(),
                "length": length,
                "member": member,
                "baseline": bool(rollout.baseline[row, member]),
            }
        )
    return records


# ---------------------------------------------------------------- groups to batch


def to_batch(rollout: Rollout, rewards: Array, weights: Array) -> Batch:
    """What the training step reads; pure, so that compiled runs use it too.

    Args:
      rollout: from the sampler.
      rewards: [N, G, R] float32, points.
      weights: [R] float32.
    """
    members = ~rollout.baseline
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
        truncated=rollout.stop == StopReason.LENGTH,
        stats={"sampler_logprobs": rollout.sampler_logprobs},
    )


def check_group(method_name: str, min_group: int, group: int) -> None:
    """Raises UserError when a group-relative method is given groups too small to compare in."""
    if group < min_group:
        raise UserError(
            f"sampling.group = {group}: method {method_name!r} compares the samples of one prompt "
            f"and needs at least {min_group}; raise sampling.group or choose a method without a "
            "group baseline, such as reinforce_plus_plus or ppo"
        )
