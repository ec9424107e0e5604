"""Problems of reasoning-gym, answered by a policy in one or more attempts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.episodes.host import Feedback, HostEnv, Limits, Reply
from jrl.system.extras import need
from jrl.types import NOTHING, Prompt

ASK = "Put the final answer within <answer></answer>."


class _Problem(NamedTuple):
    entry: Any
    attempts: int = 0


def from_reasoning_gym(
    task: str,
    *,
    options: Mapping[str, Any] = NOTHING,
    attempts: int = 1,
    problems: int = 100_000,
    seed: int,
    ask: str = ASK,
) -> HostEnv:
    """A task as an environment; needs the extra ``reasoning-gym``.

    The seed of a group names its problem, of ``problems`` that the task makes from ``seed``; the
    prompt's text, if any, stands before the question. The reward is the task's own score of the
    last answer; a score of 1 is a success and ends the episode.

    Args:
      task: a data set that ``reasoning_gym.create_dataset`` knows, such as "leg_counting".
      options: of the data set.
      attempts: how often the policy may answer; after a wrong answer it is told so.
      problems: how many there are.
      seed: of the data set.
      ask: stands after the question; the last answer within the tags is taken, else all text.

    Raises:
      UserError: reasoning-gym is not installed.
    """
    gym = need("reasoning_gym", "reasoning-gym", repr(task))
    data = gym.create_dataset(task, size=problems, seed=seed, **options)

    def init(prompt: Prompt, group_seed: int) -> tuple[_Problem, list[dict[str, str]]]:
        entry = data[group_seed % problems]
        parts = [prompt.text, entry["question"], ask]
        content = "\n".join(part for part in parts if part)
        return _Problem(entry), [{"role": "user", "content": content}]

    def step(problem: _Problem, reply: Reply) -> tuple[_Problem, Feedback]:
        answer = gym.utils.extract_answer(reply.text) if "<answer>" in reply.text else reply.text
        score = float(data.score_answer(answer=answer, entry=problem.entry))
        attempt = problem.attempts + 1
        if score >= 1 or attempt >= attempts:
            metrics = {"attempts": float(attempt)}
            return problem, Feedback(reward=score, done=True, success=score >= 1, metrics=metrics)
        messages = [{"role": "user", "content": "That is not right. Try again."}]
        return problem._replace(attempts=attempt), Feedback(messages, state_key=attempt)

    return HostEnv(init, step, limits=Limits(turns=attempts))
