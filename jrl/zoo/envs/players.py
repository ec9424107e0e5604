"""Episodes with others: an untrained model, a user, the policy in several roles, an expert.

    env = guided_env(endpoint("http://localhost:8000/v1", "some-model"), reward)

Another model is a ``Speaker``, any function from messages to text, sync or async.
"""

from __future__ import annotations

import contextvars
import json
import os
import random
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.episodes.calls import run_either
from jrl.episodes.host import EnvError, Feedback, HostEnv, Limits, Reply
from jrl.episodes.tools import Tool, tool_env
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import NOTHING, Prompt

Speaker = Callable[[list[Message]], Any]
"""(messages, as OpenAI's API writes them) -> text; sync or async."""
Judge = Callable[[Prompt, str], Any]
"""(problem, answer) -> points; sync or async."""


def endpoint(
    url: str,
    model: str,
    *,
    key: str = "",
    max_tokens: int = 512,
    temperature: float = 1.0,
    fields: Mapping[str, Any] = NOTHING,
    timeout: float | None = None,
) -> Speaker:
    """A model behind an OpenAI-compatible endpoint.

    Args:
      url: its base, such as "http://localhost:8000/v1".
      model: as it calls it.
      key: for the header "Authorization", or "".
      max_tokens: of an answer.
      temperature: of its draws.
      fields: further ones of each request, such as "seed".
      timeout: seconds until an answer must be there, or TimeoutError is raised; None waits.
    """
    asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **fields}
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def speak(messages: list[Message]) -> str:
        body = json.dumps({**asked, "messages": list(map(dict, messages))}).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, headers)
        until = None if timeout is None else time.monotonic() + timeout
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.loads(_body(reply, until))["choices"][0]["message"]["content"]

    return speak


def keyed_endpoint(
    url: str, model: str, key_variable: str = "", *, key: str = "data.key_variable", **more: Any
) -> Speaker:
    """``endpoint`` as a configuration names it, its key in an environment variable.

    Args:
      url: as in ``endpoint``.
      model: as in ``endpoint``.
      key_variable: that holds the key, or "".
      key: of the configuration that names the variable, for messages.
      **more: further arguments of ``endpoint``.

    Raises:
      UserError: there is no such variable.
    """
    secret = environment_variable(key_variable, key) if key_variable else ""
    return endpoint(url, model, key=secret, **more)


def environment_variable(name: str, key: str) -> str:
    """The value of an environment variable that a key of the configuration names.

    Raises:
      UserError: there is none of that name.
    """
    if name not in os.environ:
        raise UserError(f"{key} names {name!r}, and there is no such environment variable")
    return os.environ[name]


def _body(reply: Any, until: float | None) -> bytes:
    """What a server sends. A socket's own limit is for each piece, however many come."""
    pieces = []
    while piece := reply.read1(1 << 16):
        if until is not None and time.monotonic() > until:
            raise TimeoutError("timed out")
        pieces.append(piece)
    return b"".join(pieces)


class _Talk(NamedTuple):
    prompt: Prompt
    messages: tuple[Message, ...] = ()


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def reply_of(speaker: Speaker, messages: Sequence[Message]) -> str:
    """What a speaker says to messages.

    Raises:
      EnvError: it is no text.
    """
    text = await run_either(speaker, list(messages))
    if not isinstance(text, str):
        raise EnvError(f"the other model said {text!r:.60}, not text")
    return text


def guided_env(
    other: Speaker,
    reward: Judge,
    *,
    turns: int = 1,
    system: str | None = None,
    hint: str = "{question}\n\n{guidance}",
) -> HostEnv:
    """The policy writes guidance, another model acts on it, and its answers are judged.

    What ``dsp``, ``matryoshka`` and ``epo_strategy`` train on. In every turn the other model reads
    the question with the guidance, or the guidance alone after the first, and the policy reads what
    it answered; every answer is paid, and one worth 1 point or more ends the episode well.

    Args:
      other: the model that is not trained.
      reward: judges an answer of its.
      turns: of the policy.
      system: what the policy is told to do, or None.
      hint: how question and guidance become the other model's first message.
    """

    async def init(prompt: Prompt, seed: int) -> tuple[_Talk, list[Message]]:
        told = [] if system is None else [{"role": "system", "content": system}]
        return _Talk(prompt), [*told, _user(prompt.text)]

    async def step(talk: _Talk, reply: Reply) -> tuple[_Talk, Feedback]:
        first = hint.format(question=talk.prompt.text, guidance=reply.text)
        asked = (*talk.messages, _user(reply.text if talk.messages else first))
        answer = await reply_of(other, asked)
        points = float(await run_either(reward, talk.prompt, answer))
        done = points >= 1 or reply.turn + 1 >= turns
        talk = talk._replace(messages=(*asked, {"role": "assistant", "content": answer}))
        return talk, Feedback([_user(answer or "...")], points, done, points >= 1)

    return HostEnv(init, step, limits=Limits(turns=turns))


def dialogue_env(
    user: Speaker, judge: Callable[[Prompt, Sequence[Message]], Any], *, turns: int = 8
) -> HostEnv:
    """The policy talks with a user, scripted or another model; every turn is judged.

    Args:
      user: reads the talk so far, the policy's words as "user" and its own as "assistant".
      judge: (problem, the talk, last the policy's words) -> points, or (points, whether it ends).
      turns: the most of the policy's.
    """

    async def init(prompt: Prompt, seed: int) -> tuple[_Talk, list[Message]]:
        return _Talk(prompt), [_user(prompt.text)]

    async def step(talk: _Talk, reply: Reply) -> tuple[_Talk, Feedback]:
        talk = talk._replace(messages=(*talk.messages, _user(reply.text)))
        judged = await run_either(judge, talk.prompt, talk.messages)
        points, done = judged if isinstance(judged, tuple) else (judged, False)
        if done or reply.turn + 1 >= turns:
            return talk, Feedback((), points, True, float(points) > 0)
        answer = await reply_of(user, talk.messages)
        talk = talk._replace(messages=(*talk.messages, {"role": "assistant", "content": answer}))
        return talk, Feedback([_user(answer)], points)

    return HostEnv(init, step, limits=Limits(turns=turns))


class _Pair(NamedTuple):
    prompt: Prompt
    points: float = 0.0


def pair_env(
    reward: Judge,
    *,
    ask: str = "The answer above is another one's. Give your own answer to the question.",
) -> HostEnv:
    """A pioneer answers, then an observer who has read it; both are paid for both (``cory``).

    Two players: one policy plays them, or two are trained (``objective.policies``).

    Args:
      reward: judges each answer by itself.
      ask: what the observer is told.
    """

    async def init(prompt: Prompt, seed: int) -> tuple[_Pair, list[Message]]:
        return _Pair(prompt), [_user(prompt.text)]

    async def step(pair: _Pair, reply: Reply) -> tuple[_Pair, Feedback]:
        points = float(await run_either(reward, pair.prompt, reply.text))
        if reply.turn == 0:
            metrics = {"pioneer_reward": points}
            return pair._replace(points=points), Feedback([_user(ask)], points, metrics=metrics)
        return pair, Feedback(
            reward=pair.points + points,
            done=True,
            success=points >= 1,
            metrics={"observer_reward": points},
            earlier=(points,),
        )

    return HostEnv(init, step, limits=Limits(turns=2), players=2)


_ASKED = (
    "Evaluate the solution above: is each step right, and is the answer? Name every mistake.",
    "Give the solution a score from 1 to 3, in the light of the evaluation: 1 wrong, 2 partly "
    "right, 3 right. End with <score>NUMBER</score>.",
)
_SCORE = re.compile(r"<score>\s*([123])\s*</score>")


def discussion_env() -> HostEnv:
    """A solution is written, evaluated and scored, and the score pays for it (``comas``).

    Three players: one policy plays them, or three are trained (``objective.policies``). No answer
    is known to anybody. Points of solution and evaluation are known once the score is, and are then
    paid for their own turns (``Feedback.earlier``).
    """

    async def init(prompt: Prompt, seed: int) -> tuple[_Talk, list[Message]]:
        return _Talk(prompt), [_user(prompt.text)]

    async def step(talk: _Talk, reply: Reply) -> tuple[_Talk, Feedback]:
        if reply.turn < 2:
            return talk, Feedback([_user(_ASKED[reply.turn])], 0.0)
        paid = discussion_points(reply.text)
        return talk, Feedback((), paid[2], True, paid[0] > 0.5, earlier=paid[:2])

    return HostEnv(init, step, limits=Limits(turns=3), players=3)


def discussion_points(text: str) -> tuple[float, float, float]:
    """Points of solution, evaluation and score, from the text of the score.

    >>> discussion_points("<score>3</score>"), discussion_points("good")
    ((1.0, 0.0, 0.0), (0.0, 0.0, -1.0))
    """
    found = _SCORE.findall(text)
    if not found:
        return 0.0, 0.0, -1.0
    worth = (int(found[-1]) - 1) / 2
    return worth, 1 - worth, 0.0


def expert_env(*, patches: int = 2, turns: int = 16) -> HostEnv:
    """Steps along an expert's trajectory, which is taken up again after a mistake (``ui_s1``).

    A problem has the columns "actions" and perhaps "observations", lists of text: what the expert
    did, and what it saw after each action. A turn earns 1 point where it is the expert's action.
    Else the expert's is told, at most ``patches`` times in an episode, and the next mistake ends
    it. An episode without one is a success.

    Args:
      patches: how many mistakes are mended.
      turns: the most of an episode.
    """

    async def init(prompt: Prompt, seed: int) -> tuple[tuple[Prompt, int], list[Message]]:
        if not prompt.meta.get("actions"):
            raise EnvError('a problem without "actions", a list of the expert\'s')
        return (prompt, 0), [_user(prompt.text)]

    async def step(state: tuple[Prompt, int], reply: Reply) -> tuple[tuple[Prompt, int], Feedback]:
        prompt, mistakes = state
        actions = list(prompt.meta["actions"])
        seen = list(prompt.meta.get("observations") or [])
        right = str(actions[reply.turn]).strip() == reply.text.strip()
        mistakes += not right
        told = "" if right else f"The right action was: {actions[reply.turn]}\n"
        after = str(seen[reply.turn]) if reply.turn < len(seen) else "Next."
        done = reply.turn + 1 >= len(actions) or mistakes > patches
        metrics = {"mistakes": float(not right)}
        return (prompt, mistakes), Feedback(
            [_user(told + after)], float(right), done, not mistakes, reply.turn + 1, metrics
        )

    if patches < 0:
        raise UserError(f"patches = {patches}; must be at least 0")
    return HostEnv(init, step, limits=Limits(turns=turns))


# ---------------------------------------------------------------- a patient


class _Case(NamedTuple):
    prompt: Prompt
    turns: int
    messages: tuple[Message, ...] = ()
    asked: frozenset[str] = frozenset()


UNKNOWN = "I do not know."
"""What a patient answers who cannot tell."""


def consultation_env(
    patient: Speaker, examiner: Judge, *, turns: tuple[int, int] = (2, 10)
) -> HostEnv:
    """A doctor questions a patient, and gives a diagnosis before the turns are used up.

    The environment of "DoctorAgent-RL: A Multi-Agent Collaborative Reinforcement Learning System
    for Multi-Turn Clinical Dialogue" (arXiv:2505.19630), for the method
    ``doctoragent_rl``. A turn is "Question: ..." or "Diagnosis: ..."; it is worth

        1 for a question that the patient can answer, -1 for one that it cannot
        -2 for a question asked before, -2 for a turn that is neither, -5 for the last turn
        without a diagnosis, and for a diagnosis what the examiner says, 0 to 10

    An episode may take a number of turns drawn from the group's seed, which the doctor is told at
    the start, and after each turn how many are used up. A diagnosis worth half the points or more
    is a success.

    Args:
      patient: answers as "assistant"; ``UNKNOWN`` where it cannot tell. It is told the case in a
        system message, the problem's answer.
      examiner: (problem, diagnosis) -> 0 to 10 points, for diagnosis and recommendation.
      turns: the least and the most of an episode.
    """
    least, most = turns

    async def init(prompt: Prompt, seed: int) -> tuple[_Case, list[Message]]:
        given = least + seed % (most - least + 1)
        told = f"You have {given} turns. Each is one line, Question: ... or Diagnosis: ..."
        return _Case(prompt, given), [_user(f"{prompt.text}\n{told}")]

    async def step(case: _Case, reply: Reply) -> tuple[_Case, Feedback]:
        kind, _, said = (part.strip() for part in reply.text.strip().partition(":"))
        if kind.lower() == "diagnosis":
            points = float(await run_either(examiner, case.prompt, said))
            return case, Feedback((), points, True, points >= 5)
        if reply.turn + 1 >= case.turns:
            return case, Feedback((), -5.0, True)
        used = f"Turn {reply.turn + 1} of {case.turns}."
        if kind.lower() != "question" or not said:
            told = f"Write Question: ... or Diagnosis: ...\n{used}"
            return case, Feedback([_user(told)], -2.0)
        if said.lower() in case.asked:
            return case, Feedback([_user(f"You have asked that.\n{used}")], -2.0)
        system = {"role": "system", "content": str(case.prompt.answer)}
        messages = (*case.messages, _user(said))
        answer = await reply_of(patient, [system, *messages])
        case = case._replace(
            messages=(*messages, {"role": "assistant", "content": answer}),
            asked=case.asked | {said.lower()},
        )
        points = -1.0 if answer.strip() == UNKNOWN else 1.0
        return case, Feedback([_user(f"{answer}\n{used}")], points)

    if not 1 <= least <= most:
        raise UserError(f"turns = {turns}; give the least, at least 1, and the most")
    return HostEnv(init, step, limits=Limits(turns=most))


# ---------------------------------------------------------------- a search that another model plays


def noise_chance(progress: float, start: float, end: float, base: float = 4.0) -> float:
    """How often a simulated search misleads, after a share ``progress`` of the training.

    The curriculum of "ZeroSearch: Incentivize the Search Capability of LLMs without Searching"
    (arXiv:2505.04588):

        p = start + (base^progress - 1) / (base - 1) (end - start)

    >>> noise_chance(0.0, 0.25, 0.5), noise_chance(0.5, 0.0, 0.75), noise_chance(1.0, 0.25, 0.5)
    (0.25, 0.25, 0.5)
    """
    return start + (base ** min(progress, 1.0) - 1) / (base - 1) * (end - start)


_DOCUMENTS = (
    "You are a search engine. The user wants to answer: {question}\nThe answer is: {answer}\n"
    "Write five documents of about 30 words for the query below, one a line, with {kind} "
    "information.\nQuery: {query}"
)


def zero_search_env(
    other: Speaker,
    parser: Any,
    reward: Callable[[Prompt, Reply], Any],
    limits: Limits,
    *,
    steps: int,
    start: float = 0.0,
    end: float = 0.5,
) -> HostEnv:
    """Questions with a search that another model plays, at first well and later worse.

    ZeroSearch's environment (see ``noise_chance``), for any policy gradient, such as
    ``zerosearch``. Whether a result is useful or noise is drawn from
    the group's seed, so that members of a group that ask alike are answered alike.

    Args:
      other: writes the documents.
      parser: of tool calls, of the policy's family.
      reward: judges the last turn; the paper takes the F1 of the answer.
      limits: of an episode.
      steps: training steps of the whole run (``train.steps``); progress is the share of them that
        is done, so that a run that resumes continues where it was.
      start: chance of noise at first, and in every evaluation, so that those compare.
      end: chance of noise in the end.

    Raises:
      UserError: no steps.
    """
    if steps < 1:
        raise UserError(f"steps = {steps}; must be at least 1")
    chance = [start]

    def begin(step: int, split: str) -> None:
        chance[0] = start if split == "eval" else noise_chance(step / steps, start, end)

    current: contextvars.ContextVar[tuple[Prompt, random.Random]] = contextvars.ContextVar("now")

    async def search(query: str) -> str:
        prompt, rng = current.get()
        kind = "noisy, useless" if rng.random() < chance[0] else "useful"
        asked = _DOCUMENTS.format(
            question=prompt.text, answer=prompt.answer, query=query, kind=kind
        )
        return await reply_of(other, [_user(asked)])

    query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tool = Tool("search", "Searches the web.", query, search, limits.call_seconds)
    env = tool_env([tool], parser, reward, limits)

    async def init(prompt: Prompt, seed: int) -> tuple[Any, list[Message]]:
        session, messages = await env.init(prompt, seed)
        return (session, random.Random(seed)), messages

    async def step(state: Any, reply: Reply) -> tuple[Any, Feedback]:
        session, rng = state
        current.set((session.prompt, rng))
        session, feedback = await env.step(session, reply)
        return (session, rng), feedback

    return env._replace(init=init, step=step, begin=begin)
