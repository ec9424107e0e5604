"""Completions as records for people: text, reward parts and training statistics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrl.collect.groups import external
from jrl.collect.sources import Groups
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.evaluate.sample_tokens import MOST, training_view
from jrl.types import Rollout, StopReason, opinions


def samples_of(
    groups: Groups,
    tokenizer: Any,
    task: Task | Env | None,
    weights: Mapping[str, float],
    count: int,
    advantages: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """The first groups, whole, as records for people, with the reward parts by name.

    Args:
      groups: from a draw.
      tokenizer: turns tokens into text.
      task: the procedural task or environment; not read for prompts in text.
      weights: reward part -> weight, in the order of the rewards.
      count: as many groups are taken as have this many members.
      advantages: [groups, G, T] float32 of those groups, where they were trained on; then the
        records say what each token was, too, up to ``sample_tokens.MOST`` tokens in all.
    """
    rollout, rewards, subject = jax.device_get((groups.rollout, groups.rewards, groups.subject))
    ids, stats = jax.device_get((groups.ids, groups.stats))
    scored = opinions(np.asarray(rewards), ids)
    n, g, _ = rollout.tokens.shape
    records, spent = [], 0
    for row, member in itertools.product(range(min(n, -(-count // g))), range(g)):
        if task is not None and not isinstance(subject, list):
            prompt, answer = task.render(jax.tree.map(lambda x, row=row: x[row], subject))
        else:
            prompt, answer = subject[row].text, subject[row].answer
            answer = "" if answer is None else str(answer)
        length = int(rollout.lengths[row, member])
        each = zip(weights, rewards[row, member].tolist(), scored[row, member], strict=True)
        parts = {name: points if has_opinion else None for name, points, has_opinion in each}
        records.append(
            {
                "prompt": prompt,
                "completion": tokenizer.decode(rollout.tokens[row, member, :length].tolist()),
                "answer": answer,
                "rewards": parts,
                "reward": sum(weights[n] * x for n, x in parts.items() if x is not None),
                "stop": StopReason(int(rollout.stop[row, member])).name.lower(),
                "length": length,
                "group": row,
                "member": member,
                "baseline": bool(rollout.baseline[row, member]),
                "demonstration": bool(external(rollout)[row, member].any()),
            }
        )
        if "turn" in groups.ids:
            records[-1]["turns"] = transcript(rollout, ids, stats, (row, member), tokenizer)
        if "node" in groups.ids:  # of a tree: the nodes on the way, which members share
            records[-1]["nodes"] = list(dict.fromkeys(ids["node"][row, member, :length].tolist()))
        spent += length
        if advantages is not None and row < len(advantages):
            index = (row, member, slice(length))
            records[-1] |= training_view(rollout, index, advantages, tokenizer, spent <= MOST)
    return records


def transcript(
    rollout: Rollout, ids: Any, stats: Any, index: tuple[int, int], tokenizer: Any
) -> list[dict[str, Any]]:
    """One episode turn by turn: speaker, text, tokens and reward.

    What the policy said is trained on, in this row or in that of the member it branched off; what
    the environment said is masked.
    """
    length = int(rollout.lengths[index])
    turn, sampled = ids["turn"][index][:length], rollout.mask[index][:length]
    if "node" in ids:
        same = ids["node"][index[0]] == ids["node"][index]
        sampled = (rollout.mask[index[0]] & same).any(axis=0)[:length]
    tokens, paid = rollout.tokens[index][:length], stats["paid"][index][:length]
    turns = []
    for number in range(int(turn.max(initial=-1)) + 1):
        for by, part in (("policy", sampled), ("environment", ~sampled)):
            of = part & (turn == number)
            if of.any():
                text = tokenizer.decode(tokens[of].tolist())
                size, points = int(of.sum()), float(paid[of].sum())
                turns.append({"by": by, "text": text, "tokens": size, "paid": points})
    return turns
