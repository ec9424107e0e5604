"""Episodes of several roles, or with another model: a guided solver, a user, a patient, an expert.

    env = guided_env(endpoint("http://localhost:8000/v1", "some-model"), reward)

Another model is a ``Speaker``, any function from messages to text, sync or async. A configuration
names it by its endpoint or as ``FILE.py:function``:

    [data]
    train = "train.jsonl"
    env = "guided"
    url = "http://localhost:8000/v1"
    model = "some-model"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jrl.episodes.calls import run_either
from jrl.episodes.coroutine import Outcome, Policy, coroutine_env
from jrl.episodes.host import EnvError, HostEnv, Limits
from jrl.episodes.model_endpoint import (
    Speaker,
    assistant_message,
    behind_endpoint,
    reply_of,
    user_message,
)
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import Prompt
from jrl.user_code import load
from jrl.zoo.envs.answer_rewards import EXACT, Judge, judge_of, with_values


def guided_env(
    other: Speaker,
    reward: str | Judge = EXACT,
    *,
    turns: int = 1,
    system: str | None = None,
    hint: str = "{question}\n\n{guidance}",
) -> HostEnv:
    """The policy writes guidance, another model acts on it, and its answers are judged.

    The environment of ``dsp``, ``matryoshka`` and ``epo_strategy``. In every turn the other model
    reads the question with the guidance, or the guidance alone after the first, and the policy
    reads its answer. Every answer is rewarded; one of 1 or more ends the episode as a success.

    Args:
      other: the model that is not trained.
      reward: of its answers: "exact", "f1", or a function of (prompt, text), which a configuration
        names as ``FILE.py:function``.
      turns: the most of the policy.
      system: the policy's system message, or None.
      hint: the other model's first message, with {question} and {guidance}.
    """
    judge = judge_of(reward)

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        messages: list[Message] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        messages.append(user_message(prompt.text))
        conversation: list[Message] = []
        score = 0.0
        for _ in range(turns):
            guidance = (await policy(messages)).text
            first = with_values(hint, question=prompt.text, guidance=guidance)
            conversation.append(user_message(guidance if conversation else first))
            answer = await reply_of(other, conversation)
            score = float(await run_either(judge, prompt, answer))
            policy.reward(score)
            if score >= 1:
                break
            conversation.append(assistant_message(answer))
            messages = [user_message(answer or "...")]
        return Outcome(success=score >= 1)

    return coroutine_env(episode, limits=Limits(turns=turns))


def dialogue_env(
    user: Speaker, judge: str | Callable[[Prompt, Sequence[Message]], Any], *, turns: int = 8
) -> HostEnv:
    """The policy talks with a user, scripted or another model; every turn is judged.

    Args:
      user: reads the conversation, the policy's turns as "user", its own as "assistant"; the
        problem, which is its first message, stands before the policy's first turn.
      judge: (problem, conversation, which the policy's turn ends) -> reward, or (reward, whether
        the episode ends); or ``FILE.py:function``.
      turns: the most of the policy.
    """
    judged_by = load(judge, "data.judge") if isinstance(judge, str) else judge

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        conversation: list[Message] = []
        answer = prompt.text
        while True:
            conversation.append(user_message((await policy(answer)).text))
            judgement = await run_either(judged_by, prompt, tuple(conversation))
            score, done = judgement if isinstance(judgement, tuple) else (judgement, False)
            policy.reward(score)
            if done or policy.turns >= turns:
                return Outcome(success=float(score) > 0)
            first, *others = conversation
            # Many chat templates want the first message to be a user's.
            opened = f"You said: {prompt.text}\n\n{first['content']}"
            answer = await reply_of(user, [user_message(opened), *others])
            conversation.append(assistant_message(answer))

    return coroutine_env(episode, limits=Limits(turns=turns))


def pair_env(
    reward: str | Judge = EXACT,
    *,
    ask: str = "The answer above is another one's. Give your own answer to the question.",
) -> HostEnv:
    """A pioneer answers, then an observer who has read it; both are rewarded for both (``cory``).

    One policy plays both roles, or two are trained (``objective.policies``).

    Args:
      reward: of each answer by itself, as in ``guided_env``.
      ask: the observer's instruction.
    """
    judge = judge_of(reward)

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        answer = await policy["pioneer"](prompt.text)
        pioneer = float(await run_either(judge, prompt, answer.text))
        policy.reward(pioneer)
        policy.record(pioneer_reward=pioneer)
        answer = await policy["observer"](ask)
        observer = float(await run_either(judge, prompt, answer.text))
        policy.record(observer_reward=observer)
        rewards = {"pioneer": observer, "observer": pioneer + observer}
        return Outcome(rewards, success=observer >= 1)

    return coroutine_env(episode, roles=("pioneer", "observer"), limits=Limits(turns=2))


_EVALUATE = (
    "Evaluate the solution above: is each step right, and is the answer? Name every mistake."
)
_SCORE = (
    "Give the solution a score from 1 to 3, in the light of the evaluation: 1 wrong, 2 partly "
    "right, 3 right. End with <score>NUMBER</score>."
)


def discussion_env() -> HostEnv:
    """A solution is written, evaluated and scored, and the score is its reward (``comas``).

    One policy plays the three roles, or three are trained (``objective.policies``). There is no
    reference answer.
    """

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        await policy["solver"](prompt.text)
        await policy["evaluator"](_EVALUATE)
        score = await policy["scorer"](_SCORE)
        rewards = dict(zip(policy.roles, discussion_rewards(score.text), strict=True))
        return Outcome(rewards, success=rewards["solver"] > 0.5)

    roles = ("solver", "evaluator", "scorer")
    return coroutine_env(episode, roles=roles, limits=Limits(turns=3))


def discussion_rewards(text: str) -> tuple[float, float, float]:
    """Rewards of solution, evaluation and score, from the text of the score.

    >>> discussion_rewards("<score>3</score>"), discussion_rewards("good")
    ((1.0, 0.0, 0.0), (0.0, 0.0, -1.0))
    """
    scores = re.findall(r"<score>\s*([123])\s*</score>", text)
    if not scores:
        return 0.0, 0.0, -1.0
    judge_reward = (int(scores[-1]) - 1) / 2
    return judge_reward, 1 - judge_reward, 0.0


def expert_env(*, patches: int = 2, turns: int = 16) -> HostEnv:
    """Steps along an expert's trajectory, which resumes after a mistake (``ui_s1``).

    A problem has the columns "actions" and perhaps "observations", lists of text: the expert's
    actions, and what it saw after each. A turn earns 1 where it is the expert's action. Otherwise
    the policy is told that action, at most ``patches`` times in an episode, and the next mistake
    ends it. An episode without a mistake is a success.

    Args:
      patches: mistakes that are corrected.
      turns: the most of an episode.
    """
    if patches < 0:
        raise UserError(f"patches = {patches}; must be at least 0")

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        actions = list(prompt.meta.get("actions") or ())
        if not actions:
            raise EnvError('a problem without "actions", a list of the expert\'s')
        observations = list(prompt.meta.get("observations") or ())
        message, mistakes = prompt.text, 0
        for number, action in enumerate(actions):
            reply = await policy(message, state_key=number)
            right = reply.text.strip() == str(action).strip()
            mistakes += not right
            policy.reward(float(right))
            policy.record(mistakes=float(not right))
            if mistakes > patches:
                break
            message = str(observations[number]) if number < len(observations) else "Next."
            if not right:
                message = f"The right action was: {action}\n{message}"
        return Outcome(success=not mistakes)

    return coroutine_env(episode, limits=Limits(turns=turns))


UNKNOWN = "I do not know."
PATIENT = """You are a patient. Answer the doctor in a sentence or two, by this case alone:

{case}

Never name the diagnosis. Where the case does not tell, answer: {unknown}"""
"""A patient's answer to a question that it cannot answer."""


def consultation_env(
    patient: Speaker, examiner: str | Judge, *, turns: Sequence[int] = (2, 10)
) -> HostEnv:
    """A doctor questions a patient, and gives a diagnosis before the turns are used up.

    The environment of "DoctorAgent-RL: A Multi-Agent Collaborative Reinforcement Learning System
    for Multi-Turn Clinical Dialogue" (arXiv:2505.19630), for the method ``doctoragent_rl``. A turn
    is "Question: ..." or "Diagnosis: ..."; its reward is

        1 for a question that the patient can answer, -1 for one that it cannot
        -2 for a question asked before, -2 for a turn that is neither, -5 for the last turn
        without a diagnosis, and for a diagnosis what the examiner says, 0 to 10

    The number of turns is drawn from the group's seed; the doctor is told it at the start, and
    after each turn how many are used up. A diagnosis worth 5 or more is a success.

    Args:
      patient: answers as "assistant"; ``UNKNOWN`` where it cannot. Its system message is
        ``PATIENT`` with the case, the problem's answer.
      examiner: (problem, diagnosis) -> 0 to 10, for diagnosis and recommendation; or
        ``FILE.py:function``.
      turns: the least and the most of an episode.
    """
    examine = judge_of(examiner, "data.examiner")
    if len(turns) != 2 or not 1 <= turns[0] <= turns[1]:
        raise UserError(f"turns = {turns}; give the least and the most of an episode, 1 or more")
    least, most = turns

    async def episode(policy: Policy, prompt: Prompt, seed: int) -> Outcome:
        allowed = least + seed % (most - least + 1)
        case = with_values(PATIENT, case=prompt.answer, unknown=UNKNOWN)
        conversation: list[Message] = [{"role": "system", "content": case}]
        questions: set[str] = set()
        rule = f"You have {allowed} turns. Each is one line, Question: ... or Diagnosis: ..."
        message = f"{prompt.text}\n{rule}"
        while True:
            text = (await policy(message)).text
            kind, _, words = (part.strip() for part in text.strip().partition(":"))
            if kind.lower() == "diagnosis":
                score = float(await run_either(examine, prompt, words))
                return Outcome(score, success=score >= 5)
            if policy.turns >= allowed:
                return Outcome(-5.0, success=False)
            if kind.lower() != "question" or not words:
                score, answer = -2.0, "Write Question: ... or Diagnosis: ..."
            elif words.lower() in questions:
                score, answer = -2.0, "You have asked that."
            else:
                conversation.append(user_message(words))
                answer = await reply_of(patient, conversation)
                conversation.append(assistant_message(answer))
                questions.add(words.lower())
                score = -1.0 if answer.strip(" .\n").lower() == UNKNOWN.strip(".").lower() else 1.0
            policy.reward(score)
            message = f"{answer}\nTurn {policy.turns} of {allowed}."

    return coroutine_env(episode, limits=Limits(turns=most))


guided = behind_endpoint(guided_env, "other")
dialogue = behind_endpoint(dialogue_env, "user")
consultation = behind_endpoint(consultation_env, "patient")
pair = pair_env
