"""Rewards for how a completion is written: its length, repetition, tags, steps and language."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample, whole_group
from jrl.rewards.math import math_reward


def soft_overlong(samples: list[Sample], limit: int, cache: int) -> list[float]:
    """DAPO's penalty for length, 0 down to -1 over the last ``cache`` tokens before ``limit``.

    Eq. 13 of "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476);
    TRL's ``soft_overlong_punishment_reward``.

    Args:
      samples: what to judge.
      limit: tokens, the longest completion.
      cache: tokens before it over which the penalty grows.

    Raises:
      UserError: ``cache`` is not between 0 and ``limit``.
    """
    if not 0 <= cache <= limit:
        raise UserError(f"rewards.soft_overlong.cache = {cache}; must be 0 to limit = {limit}")
    return [
        -1.0 if (n := len(s.tokens)) > limit else min(0.0, (limit - cache - n) / max(cache, 1))
        for s in samples
    ]


def ended(samples: list[Sample]) -> list[float]:
    """1 where a text or an episode came to an end of its own, 0 where a limit cut it off.

    With ``combine = "veto"`` the penalty of TÜLU 3 for texts without an end ("TÜLU 3: Pushing
    Frontiers in Open Language Model Post-Training", arXiv:2411.15124), -10 in its scripts.
    """
    return [float(s.stop in ("stop_token", "stop_string", "done")) for s in samples]


def cosine_length(
    samples: list[Sample],
    limit: int,
    right: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
) -> list[float | None]:
    """Points for the answer that change with the length along half a cosine.

    Appendix C.1 of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), as
    TRL's ``cosine_scaled_reward`` and Open-RS (arXiv:2503.16219) have it: with n tokens

        end + (begin - end) (1 + cos(pi min(n / limit, 1))) / 2

    Args:
      samples: what to judge; the answer is compared as ``math`` does.
      limit: tokens at which the end is reached.
      right: points of a right answer at 0 tokens and at ``limit``.
      wrong: the same of a wrong one.

    Returns:
      Points; None for a prompt without an answer.
    """
    for name, pair in (("right", right), ("wrong", wrong)):
        if len(pair) != 2:
            raise UserError(f"rewards.cosine_length.{name} = {list(pair)}; give two numbers")
    points: list[float | None] = []
    for sample, verdict in zip(samples, accuracy(samples), strict=True):
        if verdict is None:
            points.append(None)
            continue
        begin, end = right if verdict else wrong
        share = min(len(sample.tokens) / limit, 1.0)
        points.append(end + 0.5 * (begin - end) * (1 + math.cos(math.pi * share)))
    return points


def accuracy(samples: list[Sample], tolerance: float = 1e-6) -> list[float | None]:
    """``math``'s verdict, and no opinion of prompts without an answer; TRL's ``accuracy_reward``.

    Departure: TRL has no opinion either where math-verify cannot read the expected answer.
    """
    verdicts: list[float | None] = []
    for sample in samples:
        if _has_answer(sample):
            verdicts += math_reward([sample], tolerance)
        else:
            verdicts.append(None)
    return verdicts


def _has_answer(sample: Sample) -> bool:
    return sample.prompt.answer is not None and str(sample.prompt.answer).strip() != ""


def reasoning_accuracy(
    samples: list[Sample], delimiters: Sequence[str] = ("</think>",), tolerance: float = 1e-6
) -> list[float | None]:
    """``accuracy`` of what follows the reasoning, 0 where that has no end.

    TRL's ``reasoning_accuracy_reward``: the text behind the last of the first delimiter that there
    is.
    """
    points: list[float | None] = []
    for sample in samples:
        ends = [d for d in delimiters if d in sample.completion]
        if not ends:
            points.append(0.0)
            continue
        answer = sample.completion.split(ends[0])[-1]
        (verdict,) = accuracy([_with_completion(sample, answer)], tolerance)
        points.append(verdict)
    return points


def _with_completion(sample: Sample, text: str) -> Sample:
    return Sample(sample.prompt, text, sample.tokens, sample.stop)


def repetition(
    samples: list[Sample], size: int = 3, penalty: float = -1.0, unit: str = "tokens"
) -> list[float]:
    """A penalty in proportion to the n-grams that occur before.

    Appendix C.2 of arXiv:2502.03373: penalty (1 - distinct / all); TRL's
    ``repetition_penalty_reward`` with tokens, Open-R1's with words.

    Args:
      samples: what to judge.
      size: n.
      penalty: points of a text that only repeats, at most 0.
      unit: "tokens", or "words" for lower-case words.
    """
    if unit not in ("tokens", "words"):
        raise unknown_choice("rewards.repetition.unit", unit, ("tokens", "words"))
    if penalty > 0 or size < 1:
        raise UserError(
            f"rewards.repetition: penalty = {penalty} must be at most 0, size = {size} at least 1"
        )
    return [penalty * share_repeated(_units(sample, unit), size) for sample in samples]


def _units(sample: Sample, unit: str) -> Sequence[object]:
    return sample.tokens.tolist() if unit == "tokens" else sample.completion.lower().split()


def share_repeated(units: Sequence[object], size: int) -> float:
    """The share of n-grams that occurred before, 0 where there is none.

    >>> share_repeated([5, 5, 5, 5, 5], 2)
    0.75
    """
    grams = [tuple(units[i : i + size]) for i in range(len(units) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@whole_group
def length_in_group(samples: list[Sample]) -> list[float]:
    """Points for being short among the group's members; a wrong answer gets none above 0.

    "Kimi k1.5" (arXiv:2501.12599): lambda = 0.5 - (n - shortest) / (longest - shortest) for a right
    answer, min(0, lambda) for a wrong one, 0 where all are as long; Open-R1's ``len_reward``, in
    tokens.
    """
    lengths = [len(sample.tokens) for sample in samples]
    short, long = min(lengths, default=0), max(lengths, default=0)
    if short == long:
        return [0.0] * len(samples)
    verdicts = accuracy(samples)
    points = [0.5 - (n - short) / (long - short) for n in lengths]
    return [x if v is None or v else min(0.0, x) for x, v in zip(points, verdicts, strict=True)]


def think_format(samples: list[Sample]) -> list[float]:
    """1 where one block of <think> stands first and closes; TRL's ``think_format_reward``."""
    form = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
    return [float(form.match(sample.completion) is not None) for sample in samples]


def tag_count(samples: list[Sample]) -> list[float]:
    """A quarter for each of four marks of thinking and answer that is there exactly once.

    Open-R1's ``tag_count_reward``.
    """
    marks = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return [sum(0.25 for m in marks if s.completion.count(m) == 1) for s in samples]


_STEP = re.compile(r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)")


def reasoning_steps(samples: list[Sample], wanted: int = 3) -> list[float]:
    """The share of ``wanted`` marks of steps, at most 1; Open-R1's ``reasoning_steps_reward``."""
    return [min(1.0, len(_STEP.findall(s.completion)) / wanted) for s in samples]


REFLECTION = (
    "wait", "re-check", "recheck", "rethink", "re-evaluate", "reevaluate", "double-check",
    "let me check", "let me verify", "on second thought", "alternatively",
)  # fmt: skip
"""Words by which ``reflection`` knows that a text looks back."""


def reflection(
    samples: list[Sample], most: int = 1, words: Sequence[str] = REFLECTION
) -> list[float]:
    """The share of ``most`` words of looking back, at most 1: a measure, or a part to weigh."""
    forms = [re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE) for word in words]
    counts = [sum(len(form.findall(sample.completion)) for form in forms) for sample in samples]
    return [min(1.0, count / most) for count in counts]


SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",), "cyrillic": ("CYRILLIC",), "greek": ("GREEK",), "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",), "devanagari": ("DEVANAGARI",), "thai": ("THAI",), "hangul": ("HANGUL",),
    "han": ("CJK",), "kana": ("HIRAGANA", "KATAKANA"),
}  # fmt: skip
"""Scripts that ``language`` knows, and how Unicode's names of their letters begin."""


def language(samples: list[Sample], scripts: Sequence[str] = ("latin",)) -> list[float]:
    r"""The share of letters that are of some scripts; 1 for a text without letters.

    The language consistency of "DeepSeek-R1" (arXiv:2501.12948) is the share of words in the target
    language; how words were told apart is not known, so letters are counted here, by script. Code
    in fences, LaTeX commands and addresses are left out.

    Args:
      samples: what to judge.
      scripts: of ``SCRIPTS``.
    """
    if not scripts or isinstance(scripts, str):
        raise UserError(f"rewards.language.scripts = {scripts!r}; give a list of scripts")
    for script in scripts:
        if script not in SCRIPTS:
            raise unknown_choice("rewards.language.scripts", script, SCRIPTS)
    begins = tuple(begin for script in scripts for begin in SCRIPTS[script])
    aside = re.compile(r"```.*?(?:```|$)|\\[a-zA-Z]+|https?://\S+", re.DOTALL)
    points = []
    for sample in samples:
        names = [unicodedata.name(c, "") for c in aside.sub(" ", sample.completion) if c.isalpha()]
        points.append(sum(n.startswith(begins) for n in names) / len(names) if names else 1.0)
    return points
