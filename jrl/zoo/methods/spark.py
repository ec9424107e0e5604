"""SPARK: rollouts and their verdicts become questions on which the same policy trains at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Fraction
from jrl.methods.edit import Edit, Stateless
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, StepView, new
from jrl.rewards.base import Sample
from jrl.rewards.exact import final_answer
from jrl.rewards.judge_prompts import filled, question_of
from jrl.rewards.replies import read_preference, read_yes_no
from jrl.types import SILENT
from jrl.types.asks import Asks, Tokens

POINTWISE = """Question:
{question}

Proposed answer:
{first}

Is the proposed answer right? Reason first, then end with a line "Verdict: yes" or "Verdict: no"."""
PAIRWISE = """Question:
{question}

Answer A:
{first}

Answer B:
{second}

One of the answers is right. Reason first, then end with a line "Verdict: A" or "Verdict: B"."""
REFLECTION = """Question:
{question}

Here is an attempt at it:
{first}

Check the attempt, mend what is wrong in it, and answer the question."""
VERDICT = "verdict"
"""Key of a group's prior with the right verdict: 1 for "yes", -1 for "no", 2 for "A", -2 for
"B"; 0 for a problem or a reflection, which the problem's own reward functions judge."""
_NO_TICKET = -1


class Recycled(NamedTuple):
    """A question that is made of rollouts.

    Attributes:
      place: of the group that it is about.
      text: the question.
      label: the right verdict, 1 for "yes" or "A", 0 for "no" or "B"; None for a reflection, which
        the problem's own reward functions judge.
      pair: whether two answers are compared.
    """

    place: int
    text: str
    label: float | None = None
    pair: bool = False

    @property
    def verdict(self) -> float:
        """The label as a number of ``VERDICT``."""
        return 0.0 if self.label is None else (2 * self.label - 1) * (1 + self.pair)


def recycled(
    samples: Sequence[Sequence[Sample | None]],
    right: Any,
    step: int,
    most: int,
    pointwise: float = 0.3,
) -> list[Recycled]:
    """The questions that a step's rollouts are recycled into: verdicts first, then reflections.

    Args:
      samples: by group and member.
      right: [m, M] bool, by the problem's own reward.
      step: training steps done; with the texts it determines what is chosen at random.
      most: verdicts, and as many reflections.
      pointwise: the share of groups with right and wrong answers of which one answer is judged,
        and not a pair.
    """
    verdicts, reflections = list[Recycled](), list[Recycled]()
    for place, group in enumerate(samples):
        members = {j: sample for j, sample in enumerate(group) if sample is not None}
        if not members:
            continue
        first = next(iter(members.values()))
        draw = random.Random(f"{step} {place} {first.prompt.id}")
        write = partial(_question, place, question_of(first))
        answers = {j: final_answer(sample.completion) for j, sample in members.items()}
        correct = [j for j in members if right[place, j] and answers[j] is not None]
        bad = [j for j in members if not right[place, j]]
        wrong = [j for j in bad if answers[j] is not None]
        if correct and wrong and draw.random() >= pointwise:
            pair = draw.choice(correct), draw.choice(wrong)
            ahead = draw.random() < 0.5
            both = [answers[j] for j in (pair if ahead else pair[::-1])]
            verdicts.append(write(PAIRWISE, both[0], both[1], label=float(ahead)))
        elif correct or wrong:
            either = correct if correct and (not wrong or draw.random() < 0.5) else wrong
            j = draw.choice(either) if wrong else correct[0]
            verdicts.append(write(POINTWISE, answers[j], label=float(right[place, j])))
        # Of the first half of the groups all that was written is reflected on, of the others the
        # answer alone.
        whole = 2 * place < len(samples)
        if shown := bad if whole else wrong:
            j = draw.choice(shown)
            attempt = members[j].completion if whole else answers[j]
            reflections.append(write(REFLECTION, attempt))
    draw = random.Random(f"{step} {len(verdicts)} {len(reflections)}")
    return [
        each
        for listed in (verdicts, reflections)
        for each in (draw.sample(listed, most) if len(listed) > most else listed)
    ]


def _question(
    place: int, question: str, form: str, first: Any, second: Any = None, label: float | None = None
) -> Recycled:
    """A question in the words of ``form``, about one or two answers."""
    fields = {"question": question, "first": str(first), "second": str(second)}
    return Recycled(place, filled(form, fields), label, pair=second is not None)


def _room(share: float) -> Any:
    """N -> the most groups of questions: as many of verdicts as of reflections."""
    return lambda prompts: 2 * max(math.ceil(prompts * share / 2), 1)


class _Recycler(NamedTuple):
    """The plan's second draw, and the rewards of what it gave."""

    share: float
    tokens: int
    pointwise: float
    above: float

    def next(self, groups: Any, view: StepView) -> Asks:
        """A group of each question that a prompt has room for, under it."""
        samples, entries = view.tools.samples(groups), _room(self.share)(view.prompts)
        # Groups of the step may be absent.
        places = np.flatnonzero(np.asarray(groups.drawn()).any(axis=1)).tolist()
        listed = recycled(
            [samples[i] for i in places],
            np.asarray(groups.success())[places] > self.above,
            int(view.step),
            entries // 2,
            self.pointwise,
        )
        if not listed:
            return ()
        most = groups.rollout.prompt_tokens.shape[1] + self.tokens
        contexts, usable = view.tools.contexts([each.text for each in listed], most)
        at = np.flatnonzero(usable)
        count = len(at)
        questions = [listed[i] for i in at.tolist()]
        rows, verdicts = np.zeros(entries, np.int32), np.zeros(entries, np.float32)
        rows[:count] = [groups.row[places[each.place]] for each in questions]
        verdicts[:count] = [each.verdict for each in questions]
        ids = np.zeros((entries, contexts.ids.shape[1]), np.int32)
        lengths = np.ones(entries, np.int32)
        ids[:count], lengths[:count] = contexts.ids[at], contexts.lengths[at]
        how = {"context": Tokens(ids, lengths), "prior": {VERDICT: verdicts}}
        return (new(count, entries, view.group, row=rows, keep=True, **how),)

    def rewards(self, groups: Any, view: StepView) -> Any:
        """The groups, those of verdicts paid for agreeing with what is right."""
        if VERDICT not in groups.prior:
            return groups
        verdicts = np.asarray(groups.prior[VERDICT])
        at, rewards = np.flatnonzero(verdicts), np.array(groups.rewards)
        silent = {n: np.array(x) for n, x in groups.ids.items() if n == SILENT}
        for points in (rewards, *silent.values()):
            points[at] = 0
        # Of no other group the completions are read again.
        questions = groups.replace(ticket=np.where(verdicts, groups.ticket, _NO_TICKET))
        samples = view.tools.samples(questions)
        for place in at.tolist():
            for j, sample in enumerate(samples[place]):
                if sample is not None:
                    agrees = _agrees(float(verdicts[place]), sample.completion)
                    rewards[place, j, groups.accuracy_column or 0] = agrees
        # Batches are one shape, with questions and without.
        prior = {name: x for name, x in groups.prior.items() if name != VERDICT}
        return groups.replace(rewards=rewards, ids={**groups.ids, **silent}, prior=prior)


def _agrees(verdict: float, reply: str) -> float:
    """1 where a reply gives the right verdict, a number as of ``VERDICT``; else 0."""
    read = read_preference if abs(verdict) > 1 else read_yes_no
    return float(read(reply) == float(verdict > 0))


@variant(grpo, kl_coef=0.001)
def spark(
    base: Method,
    share: Fraction = 1.0,
    pointwise: Fraction = 0.3,
    question_tokens: Count = 1024,
    above: Fraction = 0.5,
) -> Method:
    """GRPO on problems, and on questions made of the step's own rollouts and their verdicts.

    "SPARK: Synergistic Policy And Reward Co-Evolving Framework" (arXiv:2509.22624), as its released
    code has it. Each problem's rollouts make at most one question of verdict and one of reflection:

        all right            is this answer right?  yes        r = 1[verdict = label]
        all wrong            is this answer right?  no         r = 1[verdict = label]
        right and wrong      0.3: one of them at random, right or wrong; else which of a right and a
                             wrong one is right, in random order        r = 1[verdict = label]
        any wrong            mend a wrong attempt (of half of the problems all of it, of the others
                             its answer)                    r = the problem's own reward functions

    Every question gets a group of its own in the same step, normalised and trained as any other, so
    that the policy is its own judge: a reward part with ``model = "policy"`` asks it. At most
    ``share`` N questions are made for the N problems of a step, half of each kind (the code has 64
    for 64). An answer is what ``rewards.final_answer`` finds. The loss has 0.001 of the divergence
    k3, as the released script.

    Prompts in text are needed. A question longer than the longest prompt and ``question_tokens`` is
    left out. A verdict counts in the run's part that says what is right; the other parts of such a
    member are 0.

    Departures: questions are trained on in the step that made them, where the code keeps them until
    it has 64 and takes a step of their own; one wording of each kind, where it has about thirty; no
    images.
    """
    plan = _Recycler(share, question_tokens, pointwise, above)
    return base.with_(
        plan=Plan(next=plan.next, rounds=1, prompts=_room(share), tokens=question_tokens),
        rewards=plan.rewards,
        # Nothing is edited: it is there for the room that questions take in a batch.
        edits=(Edit(Stateless(), lambda state, groups, view: (groups, state), _room(share)),),
        needs=base.needs.reading("questions"),
    )
