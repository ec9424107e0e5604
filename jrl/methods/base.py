"""What a published method is: at most seven seams filled, the rest at defaults that do nothing.

    curriculum  which problems a step uses
    plan        which members are sampled, in a first draw and in further rounds
    rewards     an edit of the reward parts
    edits       what is left out, replaced or added before the groups are trained on
    objective   advantage, surrogate, aggregate, regularizers
    schedule    how often a batch is gone through

A method is a function that returns a ``Method``; ``methods.published`` adds its paper, its
coefficients and what it inherits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jrl.methods.curriculum import Curriculum
from jrl.methods.domains import is_zero
from jrl.methods.edit import Edit
from jrl.methods.plan import Plan, dry_view
from jrl.objectives import advantages, aggregates, ratios, regularizers, transforms
from jrl.train.asks import BASELINE, TRAIN, new_ask
from jrl.types import (
    Aggregate,
    Branching,
    Objective,
    Regularizer,
    Rollout,
    Search,
    Surrogate,
    Transform,
)


class FirstDraw(NamedTuple):
    """What ``Plan.first`` asks for, in numbers.

    Attributes:
      own: whether the policy draws members to train on.
      baseline_members: greedy completions of each prompt, never trained on.
      demonstrations: members of each prompt that the data gives.
      tree: how the group's samples branch off one another; None where they do not.
      search: how a tree is searched whose leaves are the group's samples; None for no search.
    """

    own: bool
    baseline_members: int
    demonstrations: int
    tree: Branching | None
    search: Search | None

    @property
    def shares(self) -> bool:
        """Whether the samples of a group have beginnings in common."""
        return self.tree is not None or self.search is not None


def first_draw(plan: Plan) -> FirstDraw:
    """What a plan's first draw asks for."""
    one = np.zeros(1, np.int32)
    asks = plan.first((new_ask(one, one, 1, tree=plan.tree),), dry_view())
    given = [ask for ask in asks if ask.prefix_as == "given" and ask.prefix is not None]
    sampled = [ask for ask in asks if not any(ask is other for other in given)]
    trees = [ask.tree for ask in sampled if ask.tree is not None]
    tree = trees[0] if trees else None
    return FirstDraw(
        own=any(ask.use == TRAIN for ask in sampled),
        baseline_members=sum(ask.width for ask in sampled if ask.use == BASELINE),
        demonstrations=sum(ask.width for ask in given),
        tree=tree if isinstance(tree, Branching) else None,
        search=tree if isinstance(tree, Search) else None,
    )


class HardProblems(NamedTuple):
    """The problems that are mostly failed as a round begins; no others are drawn in it.

    A problem that is left out is not tested again. Where all would be left out, the round has the
    problems of the last one.

    Attributes:
      steps: training steps of a round.
      attempts: completions of each problem by which it is judged.
      most: share of them that may be successes.
      above: points; a completion with more is a success.
    """

    steps: int
    attempts: int
    most: float
    above: float


class WrittenProblems(NamedTuple):
    """Problems that another model writes as a round begins, after those that were failed.

    They stand beside those of the data from then on, if the value network thinks them neither
    hopeless nor easy: its number, a logit, behind what the policy would see first.

    Attributes:
      steps: training steps of a round.
      problems: how many are asked for.
      low: the least probability of success.
      high: the greatest.
    """

    steps: int
    problems: int
    low: float
    high: float


class TokenValues(NamedTuple):
    """Values of tokens that lean the policy; see ``models.token_values``, which has the arguments.

    Attributes:
      beta: nats a point.
      follow: which part of the way targets go after each update.
      heads: estimates of each value.
    """

    beta: float
    follow: float
    heads: int


class Schedule(NamedTuple):
    """How a batch is used.

    Attributes:
      epochs: passes over a batch before the next one is drawn.
      refresh_ref: steps after which the reference becomes a copy of the policy (iterated DPO,
        self-play, mirror descent); 0 for never.
      ref_decay: after every step the reference is this much of itself and the rest the policy, an
        exponential moving average; 1 leaves it as it is.
      reset_optimizer: True to start the optimiser's moments anew whenever the reference is renewed.
      round_steps: training steps after which the frozen policy "expert" becomes a copy of the
        policy; 0 for never.
      restart_rounds: rounds after which the policy begins anew from its first weights (the frozen
        policy "first"), with fresh moments; 0 for never.
    """

    epochs: int = 1
    refresh_ref: int = 0
    ref_decay: float = 1.0
    reset_optimizer: bool = False
    round_steps: int = 0
    restart_rounds: int = 0


def same_rewards(rewards: np.ndarray, rollout: Rollout) -> np.ndarray:
    """The reward parts [N, G, R] float32 as the reward functions gave them."""
    return rewards


class Method(NamedTuple):
    """A method, ready to train with.

    Attributes:
      objective: advantage, surrogate, aggregate, regularizers.
      rewards: (rewards [N, G, R] float32 points, rollout) -> rewards, before the batch is made.
      schedule: how a batch is used.
      curriculum: which problems of the data a step uses; None for the data's own order.
      plan: which members are sampled, in a first draw and in further rounds.
      edits: what is left out, replaced or added before the groups are trained on.
      token_values: heads that the policy gets for the values of tokens; None for none.
      policies: how many policies are trained, each a player of its own; 1 plays all players.
      swap_every: training steps after which policies swap players; 0 for never.
      copy_every: training steps after which the others become copies of the first policy, which
        alone is trained then; 0 to train all of them.
      min_group: the least group size with which the advantage says anything.
      needs: what a run must offer: "lines" where the lines of a text are its reasoning steps, the
        label "step" of its tokens.
      unsupported: what a run of the whole method still lacks, such as tool environments; "" when
        nothing. The objective trains all the same.
    """

    objective: Objective
    rewards: Callable[[np.ndarray, Rollout], np.ndarray] = same_rewards
    schedule: Schedule = Schedule()
    curriculum: Curriculum | HardProblems | WrittenProblems | None = None
    plan: Plan = Plan()
    edits: tuple[Edit, ...] = ()
    token_values: TokenValues | None = None
    policies: int = 1
    swap_every: int = 0
    copy_every: int = 0
    min_group: int = 1
    needs: frozenset[str] = frozenset()
    unsupported: str = ""

    def with_(self, **changes: Any) -> Method:
        """The method with other parts, by name.

        Args:
          **changes: fields of ``Method`` or of its ``Objective``; ``ratio``, ``rule`` and
            ``correction`` change one part of a surrogate that ``ratios.ratio_loss`` made; and
            ``epochs`` changes the schedule.
        """
        parts = {n: changes.pop(n) for n in ratios.RatioParts._fields if n in changes}
        own = {n: changes.pop(n) for n in Objective._fields if n in changes}
        if parts:
            own["surrogate"] = ratios.with_parts(self.objective.surrogate, **parts)
        if "epochs" in changes:
            changes["schedule"] = self.schedule._replace(epochs=changes.pop("epochs"))
        return self._replace(objective=self.objective._replace(**own), **changes)

    def after(self, *steps: Transform) -> Method:
        """The method with further steps after those that compute its advantages."""
        return self.with_(advantage=transforms.chain(self.objective.advantage, *steps))

    def before(self, *steps: Transform) -> Method:
        """The method with steps on the scores before its advantages are computed."""
        return self.with_(advantage=transforms.chain(*steps, self.objective.advantage))

    def plus(self, *terms: Regularizer) -> Method:
        """The method with further terms in its loss."""
        return self.with_(regularizers=(*self.objective.regularizers, *terms))

    @property
    def draw(self) -> FirstDraw:
        """What the plan's first draw asks for, in numbers."""
        return first_draw(self.plan)

    @property
    def value(self) -> bool:
        """True when the method needs a value network."""
        return bool(self.objective.needs & {"values", "rollout_values"})

    @property
    def seams(self) -> tuple[str, ...]:
        """The names of the seams that the method fills."""
        names = ("curriculum", "plan", "rewards", "edits", "schedule", "token_values")
        fields, defaults = self._asdict(), self._field_defaults
        filled = {name for name in fields if fields[name] != defaults.get(name)}
        return ("objective", *(name for name in names if name in filled))


# ---------------------------------------------------------------- what many methods share


CENTRED = transforms.per_group(advantages.mean_centred)
"""Rewards minus their group's mean."""


def normalised(eps: float, ddof: int) -> Transform:
    """GRPO's advantages: rewards minus their group's mean, over its deviation."""
    return transforms.per_group(partial(advantages.group_mean_std, eps=eps, ddof=ddof))


def kl_term(kind: str, coef: float) -> tuple[Regularizer, ...]:
    """The divergence from the reference as a loss term; no term and no reference at 0."""
    return () if is_zero(coef) else (regularizers.kl_in_loss(kind, coef),)


def kl_penalty(kind: str, coef: float, level: str = "token") -> tuple[Transform, ...]:
    """The divergence taken out of the reward; no step and no reference at 0."""
    return () if is_zero(coef) else (transforms.kl_in_reward(kind, coef, level=level),)


def against_others(
    advantage: Transform,
    surrogate: Surrogate,
    aggregate: Aggregate = aggregates.sequence_mean,
    regularizers: tuple[Regularizer, ...] = (),
    epochs: int = 1,
) -> Method:
    """A method that compares the completions of a prompt with one another: at least two."""
    return Method(
        Objective(advantage, surrogate, aggregate, regularizers),
        schedule=Schedule(epochs),
        min_group=2,
    )
