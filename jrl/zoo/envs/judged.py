"""Problems that a solver answers and a judge, who is trained as well, says right or wrong.

    [data]
    train = "train.jsonl"
    env = "judged"
    form = "steps"                      # or "yes_no"

Both are roles of one conversation. With ``objective.policies = 2`` each is a policy of its own,
else one policy is both: its own generative reward model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jrl.episodes.calls import run_either
from jrl.episodes.coroutine import Outcome, Policy, coroutine_env
from jrl.episodes.host import EnvExtras, HostEnv, Limits
from jrl.errors import UserError, unknown_choice
from jrl.rewards.replies import read_yes_no
from jrl.types import Prompt
from jrl.zoo.envs.answer_rewards import EXACT, Judge, judge_of, with_values

SOLVER, JUDGE = "solver", "judge"
MOST_STEPS = 31
"""Steps whose verdicts have room in a label; of a longer solution the whole alone is judged."""

ASK = (
    "Is the solution above right? Check each step and the final answer. End with a line"
    ' "Verdict: yes" or "Verdict: no".'
)
ASK_STEPS = """Check the solution above step by step. It has {count} steps in <step> tags. Answer in
this form and write nothing else, with one analysis for each of the {count} steps:

<step_verification>
<step>Analysis of step 1, which ends with \\boxed{CORRECT} or \\boxed{INCORRECT}</step>
</step_verification>
<final_verification>\\boxed{CORRECT} or \\boxed{INCORRECT}, of the whole solution and its
answer</final_verification>"""


class Verdict(NamedTuple):
    """A judge's parsed reply.

    Attributes:
      right: of the solution; None where that cannot be read.
      steps: of each step, in order; () where they are not one for each step of the solution.
      form: how well-formed the reply is, 0 to 1.
    """

    right: bool | None
    steps: tuple[bool, ...]
    form: float


class JudgeForm(NamedTuple):
    """Question to a judge, and parser of its reply.

    Attributes:
      ask: the message, with {count} for the steps of the solution.
      read: (reply, steps of the solution) -> its verdict.
    """

    ask: str
    read: Callable[[str, int], Verdict]


_STEP = re.compile(r"<step>(.*?)</step>", re.DOTALL)
_BOX = re.compile(r"\\box(?:ed)?\{(CORRECT|INCORRECT)\}\.?\s*$", re.IGNORECASE)
_PARTS = re.compile(
    r"<step_verification>(.*?)</step_verification>\s*<final_verification>(.*?)</final_verification>",
    re.DOTALL,
)


def tagged_steps(text: str) -> list[tuple[int, int]]:
    """(begin, end) of each step in <step> tags, characters, tags included.

    >>> tagged_steps("<step>a</step> <step>b</step>")
    [(0, 14), (15, 29)]
    """
    return [match.span() for match in _STEP.finditer(text)]


def read_yes_no_verdict(reply: str, count: int) -> Verdict:
    """Yes or no, as ``rewards.replies`` reads it; steps are not judged."""
    verdict = read_yes_no(reply)
    return Verdict(None if verdict is None else verdict == 1, (), float(verdict is not None))


def read_step_verdicts(reply: str, count: int) -> Verdict:
    r"""A verdict for each step and one for the whole, in the tags of RL Tango.

    The form's points are the released code's: 0 without both parts in order and nothing beside
    them; else 1, less 0.8 for a final verdict that is none, 0.8 without any step, 0.8 where the
    verdicts are not as many as the solution has steps, 0.4 for text between the steps; at least 0.

    >>> reply = "<step_verification><step>Yes. \\boxed{CORRECT}</step></step_verification>"
    >>> reply += "<final_verification>\\boxed{INCORRECT}</final_verification>"
    >>> read_step_verdicts(reply, 1)
    Verdict(right=False, steps=(True,), form=1.0)
    >>> read_step_verdicts(reply, 2).form, read_step_verdicts("yes", 1).right
    (0.19999999999999996, None)
    """
    parts = _PARTS.search(reply)
    inside, final = parts.groups() if parts else ("", "")
    steps = list(_STEP.findall(inside))
    boxes = [match[1].upper() == "CORRECT" for step in steps if (match := _BOX.search(step))]
    whole = _BOX.search(final.strip())
    form = 0.0
    if parts and parts[0] == reply.strip():
        form = 1.0 - 0.8 * (whole is None) - 0.8 * (not steps)
        form -= 0.8 * (bool(steps) and len(boxes) != count)
        form -= 0.4 * bool(_STEP.sub("", inside).strip())
    right = None if whole is None else whole[1].upper() == "CORRECT"
    return Verdict(right, tuple(boxes) if len(boxes) == count else (), max(form, 0.0))


FORMS: Mapping[str, JudgeForm] = {
    "yes_no": JudgeForm(ASK, read_yes_no_verdict),
    "steps": JudgeForm(ASK_STEPS, read_step_verdicts),
}
"""Forms of the question to the judge, by name."""


def judged_env(
    reward: str | Judge = EXACT,
    *,
    form: str = "yes_no",
    form_weight: float = 0.8,
    question: str = "{question}",
    ask: str = "",
) -> HostEnv:
    """A solver answers, a judge says whether that is right, and both are paid by the outcome.

    With o the outcome, 1 where the answer's reward is at least 1, and v the verdict:

        solver    the answer's reward
        judge     1[v = o] + ``form_weight`` form(reply); a reply without a verdict agrees with none

    The judge reads problem and solution, never the reference answer. The episode's label "outcome"
    is o. With ``form = "steps"`` the label "solution_step" of the solver's tokens is the number of
    their step, and the episode's labels "verified_steps" and "verdicts" are how many steps the
    judge has judged, one by one (0 where it did not), and their verdicts, bit k for step k. Metrics
    are ``outcome``, ``agreement`` and ``verdicts_read``.

    The environment of ``rl_tango``; its weights and form are the defaults.

    Args:
      reward: of answers: "exact", "f1", or a function of (prompt, text), which a configuration
        names as ``FILE.py:function``.
      form: "yes_no" or "steps"; solutions then have their steps in <step> tags, which is for
        ``question`` or ``data.system`` to ask.
      form_weight: of the form of the judge's reply.
      question: the solver's message, with {question}.
      ask: the judge's message, with {count}; "" for the form's.
    """
    judge = judge_of(reward)
    if form not in FORMS:
        raise unknown_choice("data.form", form, FORMS)
    if "{question}" not in question:
        raise UserError(f"data.question = {question!r:.60}; write {{question}} into it")
    how = FORMS[form]

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        solution = await policy(question.replace("{question}", prompt.text))
        value = float(await run_either(judge, prompt, solution.text))
        right = value >= 1
        spans = tagged_steps(solution.text) if form == "steps" else []
        if form == "steps":
            policy.label(solution_step=_by_character(spans, len(solution.text)))
        reply = await policy[JUDGE](with_values(ask or how.ask, count=len(spans)))
        verdict = how.read(reply.text, len(spans))
        agrees = verdict.right == right
        labels = {"outcome": int(right)}
        if form == "steps":
            steps = verdict.steps if len(verdict.steps) <= MOST_STEPS else ()
            bits = sum(1 << k for k, good in enumerate(steps) if good)
            labels |= {"verified_steps": len(steps), "verdicts": bits}
        return Outcome(
            {SOLVER: value, JUDGE: float(agrees) + form_weight * verdict.form},
            success=right,
            metrics={
                "outcome": float(right),
                "agreement": float(agrees),
                "verdicts_read": float(verdict.right is not None),
            },
            labels=labels,
            cut=reply.cut,
        )

    by_step = form == "steps"
    extras = EnvExtras(
        labels=("outcome", *(("verified_steps", "verdicts") if by_step else ())),
        token_labels=("solution_step",) if by_step else (),
    )
    return coroutine_env(episode, roles=(SOLVER, JUDGE), limits=Limits(turns=2), extras=extras)


def _by_character(spans: list[tuple[int, int]], length: int) -> list[int]:
    """The number of the step that each character belongs to; -1 for none."""
    numbers = [-1] * length
    for k, (begin, end) in enumerate(spans):
        numbers[begin:end] = [k] * (end - begin)
    return numbers
