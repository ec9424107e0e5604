"""Methods, environments and tools that one paper, one game or one other library needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.zoo.envs.answer_rewards": ("answer_f1",),
    "jrl.zoo.envs.calculator": ("calculator_tool",),
    "jrl.zoo.envs.propositions": ("parse_formula", "provable"),
    "jrl.zoo.envs.subgoals": ("model_planner", "prove_by_parts"),
    "jrl.zoo.networks.policies": ("Policies",),
    "jrl.zoo.tools.puzzles": ("puzzle_rows",),
    "jrl.zoo.tools.refinements": (
        *("Solution", "best_draft", "global_rows", "local_rows", "sorm_rows"),
    ),
    "jrl.zoo.tools.reward_checks": (
        *("contrast_consistency", "flipped", "strengths", "with_strengths"),
    ),
    "jrl.zoo.tools.reward_consistency": ("convex_da", "reward_fusion"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.zoo.envs.answer_rewards import answer_f1 as answer_f1
    from jrl.zoo.envs.calculator import calculator_tool as calculator_tool
    from jrl.zoo.envs.propositions import parse_formula as parse_formula
    from jrl.zoo.envs.propositions import provable as provable
    from jrl.zoo.envs.subgoals import model_planner as model_planner
    from jrl.zoo.envs.subgoals import prove_by_parts as prove_by_parts
    from jrl.zoo.networks.policies import Policies as Policies
    from jrl.zoo.tools.puzzles import puzzle_rows as puzzle_rows
    from jrl.zoo.tools.refinements import Solution as Solution
    from jrl.zoo.tools.refinements import best_draft as best_draft
    from jrl.zoo.tools.refinements import global_rows as global_rows
    from jrl.zoo.tools.refinements import local_rows as local_rows
    from jrl.zoo.tools.refinements import sorm_rows as sorm_rows
    from jrl.zoo.tools.reward_checks import contrast_consistency as contrast_consistency
    from jrl.zoo.tools.reward_checks import flipped as flipped
    from jrl.zoo.tools.reward_checks import strengths as strengths
    from jrl.zoo.tools.reward_checks import with_strengths as with_strengths
    from jrl.zoo.tools.reward_consistency import convex_da as convex_da
    from jrl.zoo.tools.reward_consistency import reward_fusion as reward_fusion
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
