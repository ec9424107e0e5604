"""Reward functions that single papers published."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance
from typing import Any

import numpy as np

from jrl.errors import UserError
from jrl.rewards.base import Sample, whole_batch, whole_group
from jrl.rewards.matching import stated_answer
from jrl.rewards.shaping import share_repeated
from jrl.rewards.tool_calls import call_score, calls_in, expected_calls, policy_text
from jrl.user_code import load

# ---------------------------------------------------------------- ToolRL


def toolrl(
    samples: list[Sample],
    column: str = "answer",
    most: float = 3.0,
    schedule_steps: int = 0,
) -> list[float]:
    """ToolRL's reward: form, 0 or 1, plus correctness of the tool calls, -3 to 3.

    "ToolRL: Reward is All Tool Learning Needs" (arXiv:2504.13958), as its released code has it:

        correctness = 6 S / S_max - 3,  -3 for calls that cannot be read, 0 where none is expected

    with S of ``tool_calls.call_score``. The form is <think>...</think> followed by a line break and
    a <tool_call> block, a <response> block, or one and the other, as the row expects: a response is
    expected where none or a text with <response> is.

    Args:
      samples: what to judge.
      column: with the expected calls; see ``rewards.tool_calls``.
      most: the bound of correctness.
      schedule_steps: of the schedule that the paper compares, 150 in its code: the form's bounds
        shrink from 2 (and -2) towards 1 (and 0, held at -1), and correctness' grow from 2 to
        ``most``. 0 for fixed bounds.
    """
    points = []
    for sample in samples:
        high, low, bound = 1.0, 0.0, most
        if schedule_steps:
            share = sample.step / schedule_steps
            high = max(2 - (2 - high) * share, 1.0)
            low = min(-2 + (2 + low) * share, -1.0)
            bound = min((most - 2) * share + 2, most)
        expected = expected_calls(sample, column)
        formed = _toolrl_form(sample, bool(expected))
        correct = 0.0
        if expected:
            calls_made = (
                calls_in(policy_text(sample)) if "</tool_call>" in policy_text(sample) else None
            )
            correct = (
                -bound
                if calls_made is None
                else 2 * bound * call_score(expected, calls_made) - bound
            )
        points.append((high if formed else low) + correct)
    return points


def _toolrl_form(sample: Sample, calls: bool) -> bool:
    answers = "<response>" in str(sample.prompt.answer) or not calls
    text, blocks = sample.completion, ""
    if calls:
        blocks += r"\n<tool_call>\n.*?\n</tool_call>"
    if answers:
        blocks += r"\n<response>.*?</response>"
    once = [
        name
        for name, expected_once in (("tool_call", calls), ("response", answers))
        if expected_once
    ]
    counts = all(text.count(f"<{n}>") == text.count(f"</{n}>") == 1 for n in once)
    return counts and re.search(rf"^<think>.*?</think>{blocks}$", text, re.DOTALL) is not None


# ---------------------------------------------------------------- ConvSearch-R1


def convsearch(
    samples: list[Sample],
    retriever: str,
    column: str = "gold",
    bad_form: float = -0.1,
    curriculum: bool = False,
) -> list[float]:
    """Points for the rank at which a rewritten query finds the gold passage.

    The rank-incentive reward of "ConvSearch-R1: Enhancing Query Reformulation for Conversational
    Search with Reasoning via Reinforcement Learning" (arXiv:2505.15776): (19 - k) / 9 for rank k of
    1 to 10, (100 - k) / 90 up to 100, else 0; without <think>...</think> and a rewrite behind it
    ``bad_form`` instead. With ``curriculum`` the released code's other mapping: 1 - (k - 1) / 99
    up to rank 100, after a quarter of the run's steps up to rank 10 alone and 0 up to 100; -0.2
    where the passage is not found.

    Args:
      samples: what to judge; the rewrite is in <rewrite>...</rewrite>, the stated answer, or what
        follows </think>.
      retriever: "FILE.py:function", (queries) -> for each the ids of passages, best first.
      column: with the gold passage's id, or a list of ids of which the best counts.
      bad_form: points.
      curriculum: whether points change after a quarter of the steps.

    Raises:
      UserError: a row has no gold passage, or the retriever returned another number of lists.
    """
    rewrites = [_rewrite(sample.completion) for sample in samples]
    queries = [text for text in rewrites if text is not None]
    ranked = list(load(retriever, "rewards.convsearch.retriever")(queries)) if queries else []
    if len(ranked) != len(queries):
        raise UserError(
            f"rewards.convsearch.retriever returned {len(ranked)} lists for {len(queries)} queries"
        )
    lists = iter(ranked)
    points = []
    for sample, rewrite in zip(samples, rewrites, strict=True):
        if rewrite is None:
            points.append(bad_form)
            continue
        gold = sample.prompt.meta.get(column)
        if gold is None:
            raise UserError(f"rewards.convsearch: prompt {sample.prompt.id} has no {column!r}")
        rank, late = _rank(list(next(lists)), gold), sample.step > sample.steps // 4
        points.append(rank_points_by_stage(rank, late) if curriculum else rank_points(rank))
    return points


def rank_points(rank: int | None) -> float:
    """Points of a rank from 1; None for a passage that was not found.

    >>> [round(rank_points(k), 2) for k in (1, 10, 11, 100, 101)]
    [2.0, 1.0, 0.99, 0.0, 0.0]
    """
    if rank is None or rank > 100:
        return 0.0
    return (19 - rank) / 9 if rank <= 10 else (100 - rank) / 90


def rank_points_by_stage(rank: int | None, late: bool) -> float:
    """Points of a rank from 1 in the first quarter of the steps, and later.

    >>> [rank_points_by_stage(k, late) for late in (False, True) for k in (1, 100, None)]
    [1.0, 0.0, -0.2, 1.0, 0.0, -0.2]
    """
    if rank is None or rank > 100:
        return -0.2
    return 0.0 if late and rank > 10 else 1 - (rank - 1) / 99


def _rewrite(text: str) -> str | None:
    formed = re.fullmatch(r"\s*<think>.*?</think>(.+)", text, re.DOTALL)
    if formed and (tagged := re.search(r"<rewrite>(.*?)</rewrite>", formed[1], re.DOTALL)):
        return tagged[1]
    return stated_answer(formed[1]) if formed and formed[1].strip() else None


def _rank(ids: Sequence[Any], gold: Any) -> int | None:
    gold_ids = set(map(str, gold if isinstance(gold, list | tuple) else [gold]))
    return next((k for k, each in enumerate(ids, 1) if str(each) in gold_ids), None)


# ---------------------------------------------------------------- VisualQuality-R1


@whole_batch
def rank_fidelity(samples: list[Sample], eps: float = 1e-6) -> list[float]:
    """Points for scores that order the step's items as their labels do.

    The reward of "VisualQuality-R1: Reasoning-Induced Image Quality Assessment via Reinforcement
    Learning to Rank" (arXiv:2505.14460), on items in text: with q_k(x_i) the number that member k
    states, Phi the normal distribution, and g 1, 1/2 or 0 as the label of x_i is above, equal to or
    below that of x_j,

        p = Phi((q_k(x_i) - mean q(x_j)) / sqrt(var_i + var_j + eps))
        r = mean over j of sqrt(p g + eps) + sqrt((1 - p)(1 - g) + eps)

    Variances are those of the released code, over n - 1. Departures: a completion without a number
    is 0 points and left out of its item's mean, where the code draws one at random; a step with a
    single item pays 0.

    Args:
      samples: of all groups of the step; the answer of each prompt is its label, a number.
      eps: added under the roots, as in the code.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.prompt.id, []).append(i)
    stated = [_number(stated_answer(sample.completion)) for sample in samples]
    labels = {item: _label(samples[rows[0]]) for item, rows in groups.items()}
    scores = {
        item: [q for i in rows if (q := stated[i]) is not None] for item, rows in groups.items()
    }
    mean = {item: fmean(q) if q else 0.0 for item, q in scores.items()}
    spread = {item: variance(q) if len(q) > 1 else 0.0 for item, q in scores.items()}
    points = []
    for i, sample in enumerate(samples):
        mine, score, others = sample.prompt.id, stated[i], [j for j in groups if scores[j]]
        others = [j for j in others if j != mine]
        if score is None or not others:
            points.append(0.0)
            continue
        total = 0.0
        for j in others:
            p = NormalDist().cdf((score - mean[j]) / math.sqrt(spread[mine] + spread[j] + eps))
            g = 0.5 + 0.5 * ((labels[mine] > labels[j]) - (labels[mine] < labels[j]))
            total += math.sqrt(p * g + eps) + math.sqrt((1 - p) * (1 - g) + eps)
        points.append(total / len(others))
    return points


def _label(sample: Sample) -> float:
    answer = sample.prompt.answer
    try:
        return float(answer)
    except (TypeError, ValueError):
        raise UserError(
            f"rewards.rank_fidelity: prompt {sample.prompt.id} has the answer {answer!r:.40}; its"
            " label must be a number"
        ) from None


def _number(text: str) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(numbers[0]) if numbers else None


# ---------------------------------------------------------------- V-Triune


def dynamic_iou(
    samples: list[Sample],
    thresholds: Sequence[float] = (0.85, 0.95, 0.99),
    shares: Sequence[float] = (0.1, 0.25),
) -> list[float]:
    """The overlap of a stated box with the labelled one, counted above a threshold that rises.

    "One RL to See Them All: Visual Triple Unified Reinforcement Learning" (arXiv:2505.18129): the
    intersection over union where it is at least 0.85 in the first 10 % of the steps, 0.95 up to
    25 %, 0.99 after.

    Args:
      samples: what to judge; the answer is [left, top, right, bottom], and so is what is stated.
      thresholds: least overlaps.
      shares: of the run's steps up to which all but the last of them hold.
    """
    points = []
    for sample in samples:
        share = sample.step / sample.steps if sample.steps else 0.0
        stage = sum(share > limit for limit in shares)
        if (labelled := _box(answer := sample.prompt.answer)) is None:
            raise UserError(
                f"rewards.dynamic_iou: prompt {sample.prompt.id} has the answer {answer!r:.40};"
                " give [left, top, right, bottom]"
            )
        overlap = box_overlap(_box(stated_answer(sample.completion)), labelled)
        points.append(overlap if overlap >= thresholds[stage] else 0.0)
    return points


def box_overlap(a: Sequence[float] | None, b: Sequence[float] | None) -> float:
    """Intersection over union of two boxes [left, top, right, bottom]; 0 where one is missing.

    >>> box_overlap([0, 0, 2, 2], [1, 0, 3, 2])
    0.3333333333333333
    """
    if a is None or b is None:
        return 0.0
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    inside = max(width, 0) * max(height, 0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return inside / (areas - inside) if areas > inside else 0.0


def _box(value: Any) -> list[float] | None:
    entries = (
        value if isinstance(value, list | tuple) else re.findall(r"-?\d+(?:\.\d+)?", str(value))
    )
    numbers = [float(x) for x in entries]
    ordered = len(numbers) == 4 and numbers[0] <= numbers[2] and numbers[1] <= numbers[3]
    return numbers if ordered else None


# ---------------------------------------------------------------- DR-IRL


def demonstration_similarity(
    samples: list[Sample], encoder: str, column: str = "answer"
) -> list[float | None]:
    """Similarity of a completion and the row's demonstration, clause by clause, at most 1.

    The W of DR-IRL, "Inverse Reinforcement Learning with Dynamic Reward Scaling for LLM Alignment"
    (arXiv:2503.18991): with clauses S^1 ... S^K of the completion and D^l of the demonstration,

        W = 1/K sum_k max_l cos(encoder(S^k), encoder(D^l))

    which ``method = "dr_irl"`` reads as its second part, of weight 0. A text without a clause gets
    no opinion. Departures: clauses end at . ! ? ; and line breaks; how the paper splits them is not
    known. It uses a text encoder (CLIP's in its first versions), which is yours to name.

    Args:
      samples: what to judge.
      encoder: "FILE.py:function", (texts) -> a vector for each, not all zeros.
      column: with the demonstration; "answer" for the row's answer.

    Raises:
      UserError: the encoder returned another number of vectors.
    """
    encode = load(encoder, "rewards.demonstration_similarity.encoder")
    points: list[float | None] = []
    for sample in samples:
        shown = sample.prompt.answer if column == "answer" else sample.prompt.meta.get(column)
        mine, theirs = _clauses(sample.completion), _clauses(str(shown or ""))
        if not mine or not theirs:
            points.append(None)
            continue
        vectors = np.asarray(encode([*mine, *theirs]), np.float64)
        if len(vectors) != len(mine) + len(theirs):
            raise UserError(
                f"rewards.demonstration_similarity.encoder returned {len(vectors)} vectors for"
                f" {len(mine) + len(theirs)} texts"
            )
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        alike = vectors[: len(mine)] @ vectors[len(mine) :].T
        points.append(float(alike.max(axis=1).mean()))
    return points


def _clauses(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[.!?;\n]+", text) if part.strip()]


# ---------------------------------------------------------------- GEPO


def listed_solution(
    samples: list[Sample], column: str = "solutions", labels: str = "equivalent"
) -> list[float | None]:
    """1 or 0 for a completion that the row lists, as it says; no opinion of any other.

    What ``method = "gepo"`` reads of its demonstrations, programs that are equivalent to the source
    and such that are not. "On-Policy Optimization with Group Equivalent Preference for
    Multi-Programming Language Understanding" (arXiv:2505.12723).

    Args:
      samples: what to judge.
      column: with a list of texts.
      labels: the column with a label for each, true or false.

    Raises:
      UserError: a row has not as many labels as texts.
    """
    points: list[float | None] = []
    for sample in samples:
        texts, of = sample.prompt.meta.get(column) or (), sample.prompt.meta.get(labels) or ()
        if len(texts) != len(of):
            raise UserError(
                f"rewards.listed_solution: prompt {sample.prompt.id} has {len(texts)} {column} and"
                f" {len(of)} {labels}; give one for each"
            )
        by_text = {text.strip(): float(label) for text, label in zip(texts, of, strict=True)}
        points.append(by_text.get(sample.completion.strip()))
    return points


# ---------------------------------------------------------------- R^3


@whole_group
def r3(
    samples: list[Sample],
    embed: str,
    column: str = "qtype",
    constrained: str = "CONSTRAINED",
    reference: str = "reference",
    limit: int = 512,
) -> list[float]:
    """Regularized relevance: of an answer to its question, or to a reference answer.

    R^3 of "Preference-free Alignment Learning with Regularized Relevance Reward"
    (arXiv:2402.03469), as the released code of its later version has it. With n words and marks of
    a completion y, their distinct share of trigrams d, and e the retriever's embeddings,

        open-ended      (n / 100) (e(x) . e(y)) d
        constrained     (limit / 100) (e(a) . e(y)) / 3.5 d

    for the question x and the reference answer a; d is 1 of fewer than three words. There the
    retriever is facebook/contriever, the mean of its last states over a text's tokens, which are
    not normalised: 3.5 is the dot product that the code takes for the greatest. The policy is
    trained by ``ppo``. Departures: the code cuts a completion where it begins to play the user,
    which stop strings do here.

    Args:
      samples: what to judge, a group.
      embed: "FILE.py:function", (texts) -> [n, D] numbers.
      column: of the kind of question.
      constrained: the kind that has a reference answer; every other is open-ended.
      reference: the column of that answer; rows without it have their answer.
      limit: tokens, the longest completion.

    Raises:
      UserError: a constrained row has no reference, or the embeddings are not one for each text.
    """
    embedded = load(embed, "rewards.r3.embed")
    points: list[float] = []
    if not samples:
        return points
    prompt = samples[0].prompt
    open_ended = str(prompt.meta.get(column)) != constrained
    beside = prompt.question or prompt.text
    if not open_ended:
        beside = str(prompt.meta.get(reference) or prompt.answer or "")
        if not beside:
            raise UserError(f"rewards.r3: prompt {prompt.id} has no {reference!r} and no answer")
    texts = [beside, *(sample.completion for sample in samples)]
    vectors = np.asarray(embedded(texts), np.float64)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise UserError(
            f"rewards.r3.embed returned shape {vectors.shape} for {len(texts)} texts; return [n, D]"
        )
    for sample, relevance in zip(samples, vectors[1:] @ vectors[0], strict=True):
        words = re.findall(r"\w+|[^\w\s]+", sample.completion)
        scale = len(words) / 100 if open_ended else limit / 100 / 3.5
        points.append(float(scale * relevance * (1 - share_repeated(words, 3))))
    return points


# ---------------------------------------------------------------- GCPO


def chain_length(samples: list[Sample], limit: int) -> list[float]:
    """The share of the longest completion that a completion has, at most 1.

    The length reward of GCPO, "GeometryZero: Improving Geometry Solving for LLM with Group
    Contrastive Policy Optimization" (arXiv:2506.07160), which "promotes longer reasoning chains":

        r = min(n / limit, 1)

    added to accuracy, form and ``group_contrast``. Departures: the paper's own formula could not be
    read and its code is not public here; this is the plainest such reward.

    Args:
      samples: what to judge; n are its tokens.
      limit: tokens from which on the reward is 1.
    """
    if limit < 1:
        raise UserError(f"rewards.chain_length.limit = {limit}; must be at least 1")
    return [min(len(sample.tokens) / limit, 1.0) for sample in samples]
