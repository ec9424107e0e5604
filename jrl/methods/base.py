"""What a published method is: at most seven seams filled, the rest at defaults that do nothing.

    prompts    which problems a step uses, and a round of steps
    draw       how a group's samples are drawn, and what beside them
    rewards    an edit of the reward parts
    groups     which groups are trained on, and whether others are drawn in their place
    replay     which completions are kept, and where they are trained on again
    objective  advantage, surrogate, aggregate, regularizers
    schedule   how often a batch is gone through

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
from jrl.methods.plan import Plan
from jrl.objectives import advantages, aggregates, ratios, regularizers, transforms
from jrl.types import (
    Aggregate,
    Array,
    Branching,
    Objective,
    Regularizer,
    Rollout,
    Search,
    Surrogate,
    Transform,
)


class Draw(NamedTuple):
    """What the sampler draws for one prompt beside its G samples.

    Attributes:
      baseline_members: greedy completions, flagged in ``Rollout.baseline`` and never trained on.
      demonstrations: solutions that the data gives, as the group's last members; the statistic
        "external" is 1 on their tokens, their ``sampler_logprobs`` are 0 and mean nothing, and
        their rewards are those that the reward functions give them.
      own: False to draw nothing at all and train on the demonstrations alone (supervised methods).
      tree: how the group's samples branch off one another; None to draw them apart.
      search: how a tree is searched of which the group's samples are leaves; None for no search.
      guide: (the value network's number) -> points of a path that has not ended, by which a search
        goes, too; None to go by leaves alone.
      lines: whether the lines of a text are its reasoning steps, the label "step" of its tokens.
    """

    baseline_members: int = 0
    demonstrations: int = 0
    own: bool = True
    tree: Branching | None = None
    search: Search | None = None
    guide: Callable[[Array], Array] | None = None
    lines: bool = False

    @property
    def shares(self) -> bool:
        """Whether the samples of a group have beginnings in common."""
        return self.tree is not None or self.search is not None


def keep_all(rewards: np.ndarray, members: np.ndarray) -> np.ndarray:
    """[N] bool, all True: every group is trained on."""
    return np.ones(len(rewards), bool)


class GroupEditor(NamedTuple):
    """Which groups are trained on. The training loop does the refilling.

    Attributes:
      keep: (rewards [N, G] float, points; members [N, G] bool) -> [N] bool, True to train on it.
      refill: True to draw new prompts in place of the groups that were not kept.
      max_rounds: how many times to draw at most, the first included; what is still missing then is
        masked out.
    """

    keep: Callable[[np.ndarray, np.ndarray], np.ndarray] = keep_all
    refill: bool = False
    max_rounds: int = 1


def refill(min_std: float = 1e-6, max_rounds: int = 10) -> GroupEditor:
    """Drops groups whose rewards do not differ, and draws others until the batch is full.

    Dynamic sampling of ``dapo``, which keeps groups with some but not all answers right.

    Args:
      min_std: points; a group is kept when the standard deviation of its live members' rewards is
        above it. A group with fewer than two live members is dropped; one with a NaN is kept, so
        that the NaN comes to light.
      max_rounds: how many times to draw at most, the first included.

    >>> keep = refill().keep
    >>> keep(np.array([[1.0, 1.0], [1.0, 0.0]]), np.ones((2, 2), bool)).tolist()
    [False, True]
    """

    def keep(rewards: np.ndarray, members: np.ndarray) -> np.ndarray:
        live = np.maximum(members.sum(axis=1), 1)[:, None]
        mean = np.where(members, rewards, 0).sum(axis=1, keepdims=True) / live
        squares = np.where(members, np.square(rewards - mean), 0).sum(axis=1)
        return ~(np.sqrt(squares / live[:, 0]) <= min_std)

    return GroupEditor(keep, refill=True, max_rounds=max_rounds)


class Replay(NamedTuple):
    """Which completions a run keeps by prompt, and where one of them is trained on again.

    It takes a member's place with all that was recorded of it: tokens, log-probabilities of the
    policy that drew it, versions and points. The training loop keeps them, and saves them with its
    checkpoints.

    Attributes:
      keep: (points [N, G] float, members [N, G] bool) -> [N, G] bool, completions to keep. Points
        are those of the reward part that says what is right, or the score where none does.
      replace: the same -> [N, G] bool, members whose place a kept completion takes, where one of
        that prompt is there.
      each: completions kept of one prompt, the newest.
      prompts: prompts of which any are kept; the one that was added to longest ago goes first.
    """

    keep: Callable[[np.ndarray, np.ndarray], np.ndarray]
    replace: Callable[[np.ndarray, np.ndarray], np.ndarray]
    each: int
    prompts: int


def replay_successes(above: float, each: int, prompts: int) -> Replay:
    """Keeps successes; one of them takes the first member's place in a group without any.

    Args:
      above: points; a completion with more is a success. A NaN is none, and leaves its group alone.
      each: as in ``Replay``.
      prompts: as in ``Replay``.

    >>> points, members = np.array([[0.0, 0.0], [0.0, 1.0]]), np.ones((2, 2), bool)
    >>> rule = replay_successes(0.1, 8, 1024)
    >>> rule.keep(points, members).tolist(), rule.replace(points, members).tolist()
    ([[False, False], [False, True]], [[True, False], [False, False]])
    """

    def keep(points: np.ndarray, members: np.ndarray) -> np.ndarray:
        return members & (points > above)

    def replace(points: np.ndarray, members: np.ndarray) -> np.ndarray:
        failed = (~members | (points <= above)).all(axis=1, keepdims=True)
        return failed & (np.arange(points.shape[1]) == 0)

    return Replay(keep, replace, each, prompts)


def replay_rare(above: float, most: float, each: int, prompts: int) -> Replay:
    """Keeps successes of groups that mostly failed; they take the places of the first members.

    Args:
      above: points; a completion with more is a success.
      most: share of a group's members that are successes, above which none of them is kept.
      each: as in ``Replay``.
      prompts: as in ``Replay``.

    >>> points, members = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]), np.ones((2, 4))
    >>> rule = replay_rare(0.5, 0.25, 8, 1024)
    >>> rule.keep(points, members.astype(bool)).tolist()
    [[True, False, False, False], [False, False, False, False]]
    """

    def keep(points: np.ndarray, members: np.ndarray) -> np.ndarray:
        right = members & (points > above)
        few = right.sum(axis=1) <= most * members.sum(axis=1)
        return right & few[:, None]

    return replay_share(above, 1.0, each, prompts)._replace(keep=keep)


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


def replay_share(above: float, share: float, each: int, prompts: int) -> Replay:
    """Keeps successes; in every group they take the places of the first members, as far as kept.

    Args:
      above: points; a completion with more is a success.
      share: of a group's members, rounded down.
      each: as in ``Replay``.
      prompts: as in ``Replay``.

    >>> points, members = np.array([[0.0, 1.0, 0.0]]), np.ones((1, 3), bool)
    >>> rule = replay_share(0.5, 0.7, 8, 1024)
    >>> rule.keep(points, members).tolist(), rule.replace(points, members).tolist()
    ([[False, True, False]], [[True, True, False]])
    """

    def replace(points: np.ndarray, members: np.ndarray) -> np.ndarray:
        first = np.arange(points.shape[1]) < int(share * points.shape[1])
        return np.broadcast_to(first, points.shape)

    return replay_successes(above, each, prompts)._replace(replace=replace)


class Schedule(NamedTuple):
    """How a batch is used.

    Attributes:
      epochs: passes over a batch before the next one is drawn.
      refresh_ref: steps after which the reference becomes a copy of the policy (iterated DPO,
        self-play, mirror descent); 0 for never.
      ref_decay: after every step the reference is this much of itself and the rest the policy, an
        exponential moving average; 1 leaves it as it is.
      reset_optimizer: True to start the optimiser's moments anew whenever the reference is renewed.
      round_steps: training steps of a round, whose completions are drawn by the policy as the round
        began (the frozen policy "expert"); 0 to draw with the policy as it is.
      restart_rounds: rounds after which the policy begins anew from its first weights (the frozen
        policy "first"), with fresh moments; 0 for never.
    """

    epochs: int = 1
    refresh_ref: int = 0
    ref_decay: float = 1.0
    reset_optimizer: bool = False
    round_steps: int = 0
    restart_rounds: int = 0

    def drawn_by(self, step: Any) -> Any:
        """The version of the policy that draws for a training step: how many steps it has had."""
        return step - step % self.round_steps if self.round_steps else step


def same_prompts(step: int, positions: np.ndarray) -> np.ndarray:
    """The positions [N] int64 in the data source that the run's own order proposes for a step."""
    return positions


def same_rewards(rewards: np.ndarray, rollout: Rollout) -> np.ndarray:
    """The reward parts [N, G, R] float32 as the reward functions gave them."""
    return rewards


class Method(NamedTuple):
    """A method, ready to train with.

    Attributes:
      objective: advantage, surrogate, aggregate, regularizers.
      groups: which groups are trained on, between rollout and advantage.
      draw: what is drawn beside the group.
      rewards: (rewards [N, G, R] float32 points, rollout) -> rewards, before the batch is made.
      prompts: (step, positions [N] int64) -> positions of the prompts to use.
      schedule: how a batch is used.
      replay: which completions are kept and trained on again; None for none.
      curriculum: which problems of the data a step uses; None for the data's own order.
      plan: which members are sampled, in a first draw and in further rounds.
      edits: what is left out, replaced or added before the groups are trained on.
      token_values: heads that the policy gets for the values of tokens; None for none.
      policies: how many policies are trained, each a player of its own; 1 plays all players.
      swap_every: training steps after which policies swap players; 0 for never.
      copy_every: training steps after which the others become copies of the first policy, which
        alone is trained then; 0 to train all of them.
      min_group: the least group size with which the advantage says anything.
      unsupported: what a run of the whole method still lacks, such as tool environments; "" when
        nothing. The objective trains all the same.
    """

    objective: Objective
    groups: GroupEditor = GroupEditor()
    draw: Draw = Draw()
    rewards: Callable[[np.ndarray, Rollout], np.ndarray] = same_rewards
    prompts: Callable[[int, np.ndarray], np.ndarray] = same_prompts
    schedule: Schedule = Schedule()
    replay: Replay | None = None
    curriculum: Curriculum | HardProblems | WrittenProblems | None = None
    plan: Plan = Plan()
    edits: tuple[Edit, ...] = ()
    token_values: TokenValues | None = None
    policies: int = 1
    swap_every: int = 0
    copy_every: int = 0
    min_group: int = 1
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
    def value(self) -> bool:
        """True when the method needs a value network."""
        return bool(self.objective.needs & {"values", "rollout_values"})

    @property
    def seams(self) -> tuple[str, ...]:
        """The names of the seams that the method fills."""
        names = ("prompts", "draw", "rewards", "groups", "schedule", "replay", "token_values")
        fields, defaults = self._asdict(), self._field_defaults
        filled = {name for name in fields if fields[name] != defaults.get(name)}
        if "curriculum" in filled:
            filled.add("prompts")
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
    groups: GroupEditor | None = None,
) -> Method:
    """A method that compares the completions of a prompt with one another: at least two."""
    return Method(
        Objective(advantage, surrogate, aggregate, regularizers),
        groups=GroupEditor() if groups is None else groups,
        schedule=Schedule(epochs),
        min_group=2,
    )
