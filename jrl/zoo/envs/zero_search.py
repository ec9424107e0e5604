"""Questions with a web search simulated by another model, noisier as training proceeds."""

from __future__ import annotations

import contextvars
import random
from typing import Any

from jrl.episodes.host import Feedback, HostEnv, Limits, Reply
from jrl.episodes.model_endpoint import Speaker, behind_endpoint, reply_of, user_message
from jrl.episodes.parsers import get_parser
from jrl.episodes.tools import Tool, tool_env
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import Prompt
from jrl.zoo.envs.answer_rewards import EXACT, Judge, last_turn_reward


def noise_chance(progress: float, start: float, end: float) -> float:
    """The chance that a simulated search misleads, after a share ``progress`` of the training.

    The curriculum of "ZeroSearch: Incentivize the Search Capability of LLMs without Searching"
    (arXiv:2505.04588):

        p = start + (4^progress - 1) / 3 (end - start)

    >>> noise_chance(0.0, 0.25, 0.5), noise_chance(0.5, 0.0, 0.75), noise_chance(1.0, 0.25, 0.5)
    (0.25, 0.25, 0.5)
    """
    return start + (4.0 ** min(progress, 1.0) - 1) / 3 * (end - start)


_DOCUMENTS = (
    "You are a search engine. The user wants to answer: {question}\nThe answer is: {answer}\n"
    "Write five documents of about 30 words for the query below, one a line, with {kind} "
    "information.\nQuery: {query}"
)


def zero_search_env(
    other: Speaker,
    steps: int,
    reward: str | Judge = EXACT,
    *,
    parser: str = "hermes",
    start: float = 0.0,
    end: float = 0.5,
    limits: Limits = Limits(turns=6),  # noqa: B008 - a value that nobody can change
) -> HostEnv:
    """Questions with a search that another model simulates, more and more of it noise.

    ZeroSearch's environment (see ``noise_chance``), for any policy gradient, such as
    ``zerosearch``. Whether a result is useful or noise is drawn from the group's seed, so that
    members of a group that send the same queries get the same results.

    Args:
      other: writes the documents.
      steps: training steps of the whole run (``train.steps``); progress is the share of them that
        is done, so that a run that resumes continues where it was.
      reward: of the last turn, as in ``answer_rewards.judge_of``; the paper takes "f1".
      parser: of the policy's family, by name.
      start: chance of noise at first, and in every evaluation, so that those compare.
      end: chance of noise in the end.
      limits: of an episode, by their names in a configuration.

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
        request = _DOCUMENTS.format(
            question=prompt.text, answer=prompt.answer, query=query, kind=kind
        )
        return await reply_of(other, [user_message(request)])

    query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tool = Tool("search", "Searches the web.", query, search, limits.call_seconds)
    env = tool_env([tool], get_parser(parser), last_turn_reward(reward), limits)

    async def init(prompt: Prompt, seed: int) -> tuple[Any, list[Message]]:
        session, messages = await env.init(prompt, seed)
        return (session, random.Random(seed)), messages

    async def step(state: Any, reply: Reply) -> tuple[Any, Feedback]:
        session, rng = state
        current.set((session.prompt, rng))
        session, feedback = await env.step(session, reply)
        return (session, rng), feedback

    return env._replace(init=init, step=step, lifecycle=env.lifecycle._replace(begin=begin))


zero_search = behind_endpoint(zero_search_env, "other")
