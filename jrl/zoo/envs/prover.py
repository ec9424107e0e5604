r"""Theorems to prove by tactics, one a turn: ``data.env = "prover"``.

    env = prover(errors_end=False)

A problem's text is a statement of intuitionistic propositional logic, such as
``(a -> b) -> (b -> c) -> a -> c``. The policy sees the goals that are left, as Lean 4 shows them,
and answers with a tactic (``tactics.TACTICS``). Nothing but this library is needed.
``python -m jrl.zoo.envs.statements DIR`` writes statements to train on.
"""

from __future__ import annotations

import math

from jrl.episodes.host import EnvError, EnvExtras, Feedback, HostEnv, Limits, Reply
from jrl.episodes.model_endpoint import user_message
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import Prompt
from jrl.zoo.envs.propositions import FormulaError, parse_formula
from jrl.zoo.envs.tactics import Goals, TacticError, opened, run_tactic, show_goals

INSTRUCTION = (
    "Prove the goal. Answer with one tactic of Lean: intro h, intros, exact h, assumption, "
    "apply h, split, left, right, cases h, exfalso, contradiction, trivial, or have h : FORMULA."
)
"""Stands above the first goal."""


def prover(*, errors_end: bool = True, penalty: float = 0.0, system: str | None = None) -> HostEnv:
    """Statements to prove, a tactic a turn and 24 turns at most; the reward of a proof is 1.

    The environment of step provers such as "Scaling up Multi-Turn Off-Policy RL and Multi-Agent
    Tree Search for LLM Step-Provers" (arXiv:2509.06493, the method ``bfs_prover``), with
    propositional logic in place of Lean. A tactic is the first line of a turn (``tactic_of``). One
    that fails ends the episode, as a search drops such a branch, or is answered with the reason
    and leaves the goals as they are. The metric "tactic_errors" counts failures, and states are
    named by their goals (``Feedback.state_key``).

    Args:
      errors_end: whether a tactic that fails ends the episode.
      penalty: reward that a failing tactic costs. Rewards of an episode add up, so that a proof
        after such a tactic is worth less than 1.
      system: a system message, or None.

    Raises:
      UserError: a penalty below 0.
    """
    if (
        not isinstance(penalty, int | float)
        or isinstance(penalty, bool)
        or not 0 <= penalty < math.inf
    ):
        raise UserError(f"penalty = {penalty!r:.40}; give a number of at least 0")

    async def init(prompt: Prompt, seed: int) -> tuple[Goals, Feedback]:
        goals = read_statement(prompt.text)
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        opening.append(user_message(f"{INSTRUCTION}\n\n{show_goals(goals)}"))
        return goals, Feedback(opening, state_key=show_goals(goals))

    async def step(goals: Goals, reply: Reply) -> tuple[Goals, Feedback]:
        try:
            goals = run_tactic(goals, tactic_of(reply.text))
        except TacticError as error:
            goals_text = show_goals(goals)
            return goals, Feedback(
                messages=[user_message(f"error: {error}\n\n{goals_text}")],
                reward=-penalty,
                done=errors_end,
                state_key=goals_text,
                metrics={"tactic_errors": 1.0},
                cut=errors_end and reply.cut,
            )
        if not goals:
            return goals, Feedback(reward=1.0, done=True, success=True)
        return goals, Feedback([user_message(show_goals(goals))], state_key=show_goals(goals))

    extras = EnvExtras(verified=True)
    fork = lambda goals: goals  # noqa: E731 - they never change, so that episodes may share them
    return HostEnv(init, step, fork=fork, limits=Limits(turns=24), extras=extras)


def read_statement(text: str) -> Goals:
    """The goals with which the proof of a problem begins.

    Raises:
      EnvError: the text is no formula; says at which character.
    """
    try:
        goals = opened(parse_formula(text.strip()))
    except FormulaError as error:
        raise EnvError(f"the statement {text.strip()!r:.60} cannot be read: {error}") from None
    return goals


def tactic_of(text: str) -> str:
    r"""The tactic in a reply: its first line that is not empty, after thoughts and code fences.

    >>> tactic_of("<think>Two arrows.</think>\n\n```lean\nintros\nassumption\n```")
    'intros'
    """
    lines = (line.strip() for line in text.rpartition("</think>")[2].splitlines())
    return next((line for line in lines if line and not line.startswith("```")), "")
