"""Problems that are solved in one group and whose solve rate is predicted in another."""

from __future__ import annotations

import re

from jrl.episodes.calls import run_either
from jrl.episodes.coroutine import Outcome, Policy, coroutine_env
from jrl.episodes.host import EnvExtras, HostEnv, Limits
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.envs.answer_rewards import EXACT, Judge, judge_of, with_values

FORETELL = (
    "{question}\n\nDo not solve it. Foretell how solutions will turn out: how many tokens a right"
    " one takes, how many of {passes} attempts are right, and which notions help. End with"
    " <tokens>NUMBER</tokens> <passes>NUMBER</passes> <notions>A, B</notions>."
)
"""The instruction of a group that predicts."""


def foretell(reward: str | Judge = EXACT, *, passes: int = 8, ask: str = FORETELL) -> HostEnv:
    """Two groups per problem: one solves it, the other predicts the solve rate (``masa``).

    The reward of a prediction is 0 here; the method compares it with the solutions. Notions are not
    judged.

    Args:
      reward: of solutions: "exact", "f1" or ``FILE.py:function``, as in ``players.guided``.
      passes: attempts of which the policy predicts how many are right; as ``objective.passes``.
      ask: the instruction of the second group, with {question} and {passes}.
    """
    judge = judge_of(reward)
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise UserError(f"data.passes = {passes!r}; give a number of attempts, at least 1")

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        if not prompt.meta.get("ask"):
            reply = await policy(prompt.text)
            score = float(await run_either(judge, prompt, reply.text))
            return Outcome(score, success=score >= 1, cut=reply.cut)
        reply = await policy(with_values(ask, question=prompt.text, passes=passes))
        right = _number("passes", reply.text)
        labels = {
            "predicted_tokens": _number("tokens", reply.text),
            "predicted_passes": right if right <= passes else -1,
        }
        read = float(min(labels.values()) >= 0)
        return Outcome(success=False, metrics={"predictions_read": read}, labels=labels)

    names = ("predicted_tokens", "predicted_passes")
    return coroutine_env(episode, limits=Limits(turns=1), extras=EnvExtras(asks=2, labels=names))


def _number(name: str, text: str) -> int:
    """The last number in tags of this name; -1 where there is none."""
    numbers = re.findall(rf"<{name}>\s*(\d{{1,7}})\s*</{name}>", text)
    return int(numbers[-1]) if numbers else -1
