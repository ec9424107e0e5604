"""Completions of a draw as records for people: text, reward parts, and what training knew."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.evaluate.sample_tokens import MOST, training_view
from jrl.train.groups import external
from jrl.train.sources import Groups
from jrl.types import Rollout, StopReason


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
      task: the procedural task or environment, or None for prompts in text.
      weights: reward part -> weight, in the order of the rewards.
      count: as many groups are taken as have this many members.
      advantages: [groups, G, T] float32 of those groups, where they were trained on; then the
        records say what each token was, too, up to ``sample_tokens.MOST`` tokens in all.
    """
    rollout, rewards, subject = jax.device_get((groups.rollout, groups.rewards, groups.subject))
    ids, stats = jax.device_get((groups.ids, groups.stats))
    n, g, _ = rollout.tokens.shape
    records, spent = [], 0
    for row, member in itertools.product(range(min(n, -(-count // g))), range(g)):
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
            here = (row, member, slice(length))
            records[-1] |= training_view(rollout, here, advantages, tokenizer, spent <= MOST)
    return records


def transcript(
    rollout: Rollout, ids: Any, stats: Any, here: tuple[int, int], tokenizer: Any
) -> list[dict[str, Any]]:
    """One episode as what was said by turns: by whom, the text, how many tokens, points paid.

    What the policy said is trained on, in this row or in that of the member it branched off; what
    the environment said is masked.
    """
    length = int(rollout.lengths[here])
    turn, drawn = ids["turn"][here][:length], rollout.mask[here][:length]
    if "node" in ids:
        same = ids["node"][here[0]] == ids["node"][here]
        drawn = (rollout.mask[here[0]] & same).any(axis=0)[:length]
    tokens, paid = rollout.tokens[here][:length], stats["paid"][here][:length]
    said = []
    for number in range(int(turn.max(initial=-1)) + 1):
        for by, part in (("policy", drawn), ("environment", ~drawn)):
            of = part & (turn == number)
            if of.any():
                text = tokenizer.decode(tokens[of].tolist())
                size, points = int(of.sum()), float(paid[of].sum())
                said.append({"by": by, "text": text, "tokens": size, "paid": points})
    return said
