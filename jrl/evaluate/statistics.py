"""Numbers of an evaluation: pass@k, majority votes, and intervals of proportions."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

from jrl.errors import UserError


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """The chance that at least one of k completions drawn from those given is right.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code"
    (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k), averaged over problems.

    Args:
      correct: [M, n] bool, problems by completions.
      k: at most n.

    Returns:
      A fraction.

    Raises:
      UserError: k is above n.

    >>> round(pass_at_k(np.array([[True, False, False], [False, False, False]]), 2), 4)
    0.3333
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise UserError(f"pass@{k}: there are {n} completions a problem; raise eval.samples")
    counts = [int(c) for c in correct.sum(axis=1)]
    # C(n - c, k) / C(n, k) as a product of c factors: the binomials have millions of digits.
    factors = np.clip(1 - k / np.arange(n, 0, -1.0), 0, 1)  # at i: 1 - k / (n - i)
    none_right = [float(np.prod(factors[:c])) for c in counts]
    return float(np.mean(1 - np.array(none_right)))


def majority_vote(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> float:
    """The fraction of problems whose most frequent answer is right; ties go to the earliest.

    The self-consistency of "Self-Consistency Improves Chain of Thought Reasoning in Language
    Models" (arXiv:2203.11171).

    Args:
      answers: [M][n] answers as text; None where a completion gives none, which does not vote.
      correct: [M, n] bool, whether each answer is right.

    Returns:
      A fraction; a problem without any answer counts as wrong.

    >>> majority_vote([["7", "3", "7"]], np.array([[True, False, True]]))
    1.0
    """
    right = 0
    for row, marks in zip(answers, correct, strict=True):
        votes = collections.Counter(a for a in row if a is not None)
        if votes:
            winner = max(votes, key=lambda a: votes[a])
            right += bool(marks[list(row).index(winner)])
    return right / max(len(answers), 1)


def wilson(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % by default.

    Args:
      successes: at most ``trials``; may be fractional (a mean over samples of each problem).
      trials: problems, the independent units.
      z: standard deviations.

    Returns:
      (low, high) fractions.

    >>> tuple(round(x, 3) for x in wilson(9, 10))
    (0.596, 0.982)
    """
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = p + z * z / (2 * trials)
    spread = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def evaluation_metrics(
    correct: np.ndarray,
    lengths: np.ndarray,
    *,
    pass_k: Sequence[int],
    answers: Sequence[Sequence[str | None]] | None = None,
    variants_of: Sequence[object] | None = None,
    confidence: np.ndarray | None = None,
) -> dict[str, float]:
    """The numbers of an evaluation.

    Args:
      correct: [M, n] bool.
      lengths: [M, n] int, tokens.
      pass_k: each k reported.
      answers: for the majority vote; left out without them or with one completion a problem.
      variants_of: [M] of what each problem is a variant; None leaves ``all_variants`` out.
      confidence: [M, n] in [0, 1], stated with the answers; None leaves ``calibration`` out.

    Returns:
      Fractions by name, and ``length`` in tokens.
    """
    m, n = correct.shape
    low, high = wilson(float(correct.mean(axis=1).sum()), m)
    metrics = {
        "accuracy": float(correct.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "length": float(lengths.mean()),
        "problems": float(m),
    }
    metrics |= {f"pass@{k}": pass_at_k(correct, k) for k in pass_k}
    if answers is not None and n > 1:
        metrics["majority"] = majority_vote(answers, correct)
    if variants_of is not None:
        metrics["all_variants"] = all_variants(correct, variants_of)
    if confidence is not None:
        metrics |= calibration(confidence.ravel(), correct.ravel())
    return metrics


CALIBRATION = ("ece", "brier", "auroc")
"""Names that ``calibration`` gives."""


def calibration(confidence: np.ndarray, correct: np.ndarray, bins: int = 10) -> dict[str, float]:
    """How well stated confidences tell right answers from wrong ones.

    Args:
      confidence: [n] in [0, 1].
      correct: [n] bool.
      bins: of equal width.

    Returns:
      "ece", the mean over bins of |mean confidence - accuracy|, weighted by answers; "brier", the
      mean squared difference; "auroc", the chance that a right answer states more than a wrong one,
      ties half, which is left out where all are right or all wrong.

    >>> round(calibration(np.array([0.9, 0.9, 0.2, 0.2]), np.array([1, 1, 0, 1]) == 1)["ece"], 6)
    0.2
    """
    at = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [confidence[at == b].mean() - correct[at == b].mean() for b in range(bins) if b in at]
    shares = [(at == b).mean() for b in range(bins) if b in at]
    metrics = {
        "ece": float(np.abs(gaps) @ np.array(shares)),
        "brier": float(np.square(confidence - correct).mean()),
    }
    differences = confidence[correct][:, None] - confidence[~correct][None]
    if differences.size:
        metrics["auroc"] = float((np.sign(differences) + 1).mean() / 2)
    return metrics


def verdict_quality(accepted: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Precision and recall of a judge's verdicts [n] bool on answers that are right or not.

    Without an accepted answer there is no precision, without a right one no recall.

    >>> verdict_quality(np.array([1, 1, 0]) == 1, np.array([1, 0, 1]) == 1)
    {'judge_precision': 0.5, 'judge_recall': 0.5}
    """
    of = {"judge_precision": accepted, "judge_recall": right}
    both = (accepted & right).sum()
    return {name: float(both / mask.sum()) for name, mask in of.items() if mask.any()}


def all_variants(correct: np.ndarray, variants_of: Sequence[object]) -> float:
    """The fraction of originals all of whose variants are right, the mean over the completions.

    The outcome score of "DeepTheorem: Advancing LLM Reasoning for Theorem Proving Through Natural
    Language and Reinforcement Learning" (arXiv:2505.23754): a theorem counts where the verdicts on
    it and on its contradictions, which its rows share by ``eval.variants_of``, are all right. Its
    reward is 1 for the right verdict, "proved" or "disproved": ``exact`` on a boxed answer.

    Args:
      correct: [M, n] bool; the j-th completions of all problems are judged together.
      variants_of: [M] the original of each problem.

    >>> all_variants(np.array([[1, 1], [1, 0], [1, 1]]) == 1, ["a", "a", "b"])
    0.75
    """
    names = [str(name) for name in variants_of]
    together = [
        correct[[other == name for other in names]].all(axis=0) for name in dict.fromkeys(names)
    ]
    return float(np.mean(together))
