"""Methods as values of at most eight parts, whose defaults do nothing.

    curriculum  which problems a step uses
    plan        which members are sampled, in a first draw and in further rounds
    rewards     an edit of the reward parts
    edits       what is left out, replaced or added before the groups are trained on
    objective   advantage, surrogate, aggregate, regularizers
    schedule    how often a batch is gone through, and what changes the state beside the updates
    network     what is trained, of the policy's network
    needs       what a run must have

A method is a function that returns a ``Method``; ``methods.published`` adds its paper, its
coefficients and what it inherits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import unknown_choice
from jrl.methods.curriculum import Curriculum, unchanged
from jrl.methods.domains import is_zero
from jrl.methods.edit import Edit
from jrl.methods.plan import Plan, StepView, dry_view
from jrl.methods.schedule import Schedule
from jrl.objectives import advantages, aggregates, ratios, regularizers, transforms
from jrl.system.readable import as_text, lines
from jrl.types import (
    Aggregate,
    Branching,
    Network,
    Objective,
    Regularizer,
    Search,
    Surrogate,
    Transform,
)
from jrl.types.asks import BASELINE, TRAIN, new_ask


class FirstDraw(NamedTuple):
    """Counts of the members that ``Plan.first`` asks for.

    Attributes:
      samples: whether the policy samples members to train on.
      baseline_members: greedy completions of each prompt, never trained on.
      demonstrations: members of each prompt that the data gives.
      tree: how the group's samples branch off one another; None where they do not.
      search: how a tree is searched whose leaves are the group's samples; None for no search.
    """

    samples: bool
    baseline_members: int
    demonstrations: int
    tree: Branching | None
    search: Search | None

    @property
    def shares(self) -> bool:
        """Whether the samples of a group have beginnings in common."""
        return self.tree is not None or self.search is not None


def first_draw(plan: Plan) -> FirstDraw:
    """Counts of the members of a plan's first draw."""
    one = np.zeros(1, np.int32)
    asks = plan.first((new_ask(one, one, 1, tree=plan.tree),), dry_view())
    demonstrations = [ask for ask in asks if ask.prefix_as == "given" and ask.prefix is not None]
    sampled = [ask for ask in asks if not any(ask is other for other in demonstrations)]
    trees = [ask.tree for ask in sampled if ask.tree is not None]
    tree = trees[0] if trees else None
    return FirstDraw(
        samples=any(ask.use == TRAIN for ask in sampled),
        baseline_members=sum(ask.width for ask in sampled if ask.use == BASELINE),
        demonstrations=sum(ask.width for ask in demonstrations),
        tree=tree if isinstance(tree, Branching) else None,
        search=tree if isinstance(tree, Search) else None,
    )


class Needs(NamedTuple):
    """What a run must have for a method.

    Attributes:
      group: the least group size with which the advantage says anything.
      lacks: what no run has yet, such as images; "" for nothing. The objective trains all the same.
      parts: meanings of the reward parts, in their order, where there must be so many; () for any.
      reads: what is read beside prompts and answers: "lines", "goals", "rationales", "questions" or
        "several solutions".
    """

    group: int = 1
    lacks: str = ""
    parts: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()

    def reading(self, name: str) -> Needs:
        """The same, and one thing more that is read."""
        return self._replace(reads=self.reads | {name})


class Method(NamedTuple):
    """A method, ready to train with.

    Attributes:
      objective: advantage, surrogate, aggregate, regularizers.
      rewards: (groups so far, view) -> groups, an edit of their reward parts [m, M, R] float32,
        points, by sample, group or batch. A pure function of arrays: ``Plan.next`` and the edits
        see what it returns, on the host and in a compiled run.
      schedule: how a batch is used.
      curriculum: which problems of the data a step uses; None for the data's own order.
      plan: which members are sampled, in a first draw and in further rounds.
      edits: what is left out, replaced or added before the groups are trained on.
      network: (the policy's network) -> the network that is trained, such as one with further
        heads, or several policies.
      needs: what a run must have for the method.
    """

    objective: Objective
    rewards: Callable[[Any, StepView], Any] = unchanged
    schedule: Schedule = Schedule()
    curriculum: Curriculum | None = None
    plan: Plan = Plan()
    edits: tuple[Edit, ...] = ()
    network: Callable[[Network], Network] = unchanged
    needs: Needs = Needs()

    def batch_groups(self, prompts: int) -> int:
        """Groups of a batch: the step's own, and those that edits have room for."""
        return prompts + sum(edit.extra(prompts) for edit in self.edits)

    def further_groups(self, prompts: int) -> int:
        """Groups of a batch that the plan's further rounds sample, at most."""
        return min(self.plan.prompts(prompts), self.batch_groups(prompts) - prompts)

    def __repr__(self) -> str:
        """The parts by name, those at their defaults left out; see ``system.readable``."""
        objective = self.objective
        parts = {
            "advantage": objective.advantage,
            "surrogate": objective.surrogate,
            "aggregate": objective.aggregate,
            **{term.name: term for term in objective.regularizers},
        }
        texts = {name: as_text(part, 1) for name, part in parts.items()}
        texts["statistics"] = as_text(objective.needs)
        return lines(self, getattr(self, "made_by", "Method"), texts, without=("objective",))

    def with_(self, **changes: Any) -> Method:
        """The method with other parts, by name.

        Args:
          **changes: fields of ``Method`` or of its ``Objective``; ``ratio``, ``rule`` and
            ``correction`` change one part of a surrogate that ``ratios.ratio_loss`` made;
            ``epochs`` changes the schedule; ``group``, ``lacks`` and ``parts`` change ``needs``.

        Raises:
          UserError: there is no such part; the nearest is named.
        """
        names: tuple[str, ...] = (*Method._fields, *Objective._fields, *ratios.RatioParts._fields)
        names += ("epochs", "group", "lacks", "parts")
        for name in changes:
            if name not in names:
                raise unknown_choice("Method.with_", name, names)
        parts = {n: changes.pop(n) for n in ratios.RatioParts._fields if n in changes}
        objective_parts = {n: changes.pop(n) for n in Objective._fields if n in changes}
        if parts:
            objective_parts["surrogate"] = ratios.with_parts(self.objective.surrogate, **parts)
        if of_run := {n: changes.pop(n) for n in ("group", "lacks", "parts") if n in changes}:
            changes["needs"] = changes.get("needs", self.needs)._replace(**of_run)
        if "epochs" in changes:
            changes["schedule"] = self.schedule._replace(epochs=changes.pop("epochs"))
        return self._replace(objective=self.objective._replace(**objective_parts), **changes)

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
    def least_group(self) -> int:
        """The smallest group size with a nonzero advantage."""
        return self.needs.group

    @property
    def lacks(self) -> str:
        """The part of the method that no run supports yet; "" if it is complete."""
        return self.needs.lacks

    @property
    def parts(self) -> tuple[str, ...]:
        """Meanings of the reward parts that the method reads, in order; () for any parts."""
        return self.needs.parts

    @property
    def draw(self) -> FirstDraw:
        """Counts of the members of the plan's first draw."""
        return first_draw(self.plan)

    @property
    def value(self) -> bool:
        """True when the method needs a value network."""
        return bool(self.objective.needs & {"values", "rollout_values"})

    @property
    def seams(self) -> tuple[str, ...]:
        """The names of the seams that the method fills."""
        names = ("curriculum", "plan", "rewards", "edits", "schedule", "network")
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


def entropy_term(coef: float) -> tuple[Regularizer, ...]:
    """A bonus for entropy as a loss term; none at 0."""
    return () if is_zero(coef) else (regularizers.entropy_bonus(coef),)


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
        needs=Needs(2),
    )
