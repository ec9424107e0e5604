"""Methods that leave out members whose rewards say little."""

from __future__ import annotations

from typing import Annotated, Any

import jax

from jrl.methods.actor_critic import ppo
from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Choice
from jrl.methods.edit import EditView, edit_of, only, rank

Strategy = Annotated[str, Choice(("best_worst", "best", "best_random"))]


def by_rank(strategy: str) -> Any:
    """An edit that keeps a group's best member, and its worst or another one."""

    def keep(groups: Any, view: EditView) -> Any:
        members = groups.members()
        place, size = rank(groups.score(), members), members.sum(axis=1)[:, None]
        selected = place == 0
        if strategy == "best_worst":
            selected |= place == size - 1
        if strategy == "best_random":
            shape = members.shape[1:]
            draws = jax.vmap(lambda key: jax.random.uniform(key, shape))(view.group_keys)
            selected |= rank(draws, members & (place > 0)) == 0
        return only(groups, selected)

    return edit_of(keep)


@variant(ppo)
def pf_ppo(base: Method, strategy: Strategy = "best_worst") -> Method:
    """PPO on the best and the worst completion of each prompt.

    PF-PPO of "Policy Filtration in RLHF to Fine-Tune LLM for Code Generation" (arXiv:2409.06957).
    The G completions of a prompt are ranked by their scores, and those whose rewards are the least
    reliable are left out. ``strategy`` says which are kept: the best and the worst ("best_worst"),
    the best ("best"), or the best and one of the others at random ("best_random").

    Departures: completions of equal scores are ranked in the order drawn. Those kept are trained on
    once, where the released code samples a batch of the old size from them with replacement, and
    with "best_random" takes the best with four times the chance of each other. The paper chooses
    the strategy before training, by how well rewards explain actual scores among the completions
    kept (R squared), which is not done here.
    """
    return base.with_(edits=(by_rank(strategy),))
