"""The values that an algorithm is made of: statistics, transforms, surrogates, regularizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.system.readable import readable
from jrl.types.records import Array, Batch, Stats


class Branching(NamedTuple):
    """Branching of a group's members off one another, which makes the group a tree.

    ``roots`` members are sampled from the prompt. The others come in ``rounds`` of equally many;
    each forks an existing member at one of that member's sampled tokens. See ``sampling.tree``.

    Episodes on the host branch after replies of their environment, while they are played: at turns
    whose first tokens have a greater mean value of ``at`` than those of the episode's first turn.
    See ``episodes.branching``.

    Attributes:
      at: of ``sampling.places.PLACES``, the token at which a member branches: "entropy" the most
        uncertain distribution, "gap" the smallest gap between the two likeliest tokens, "surprise"
        the least likely token, "even" the middle, then the quarters of the sampled tokens.
      roots: members sampled from the prompt; 0 for half of the group.
      rounds: of branching; not read in episodes.
      above: the value of ``at`` that the token must exceed, in nats for "entropy" and "surprise",
        in probability for "gap" (1 minus the difference); in episodes the excess over the first
        turn. A member without such a token to branch at is sampled from the prompt.
    """

    at: str = "entropy"
    roots: int = 0
    rounds: int = 1
    above: float = 0.0


class Search(NamedTuple):
    """Search settings. The leaves of the tree are the group's members.

    See ``collect.tree_search``.

    In a round a node of each tree is selected and expanded by ``width`` sampled steps. A path that
    ends is a leaf; its score is backed up along the path.

    Attributes:
      by: of ``episodes.tree.SEARCHES``, the algorithm that selects nodes and backs up leaves.
      width: steps sampled from a node.
      rounds: at most; a search ends earlier once it has a leaf for each member.
      tokens: most tokens of a step. In text a newline ends a step, too.
      exploration: the exploration constant of "uct" and "puct".
    """

    by: str = "puct"
    width: int = 4
    rounds: int = 64
    tokens: int = 64
    exploration: float = 1.0


class Statistic(NamedTuple):
    """A per-token statistic that a part of an objective brings along; the scoring pass computes it.

    Attributes:
      name: how ``stats`` names it.
      apply: with ``over`` "vocabulary", a function of ONE token: (distributions, token [] int32) ->
        [] float32, where ``distributions`` maps the name of each policy in ``policies`` to the [V]
        float32 log-probabilities of its distribution before the token, temperature and truncation
        included (a token that a truncation removed has -inf), and "logits" to the [V] raw logits of
        the policy, with the network's view of the vocabulary. With ``over`` "attention", a function
        of ONE sequence: (weights [H, T, L], lags [T, L], mask [T]) -> [T], where row t holds how
        completion token t weighs the columns of the sequence, the last T of which are the
        completion, and ``lags`` says how many tokens back each column lies, below 0 for what the
        token does not see; only with ``start``.
        With ``over`` "hidden", a function of ONE sequence: (hidden [T, D], mask [T]) -> [T], where
        ``hidden`` are the last layer's states from which the tokens were predicted.
        With ``over`` "values", a function of ONE token: (outputs [K] of the value network) -> [].
        K is one more than the number at the end of the greatest name of such statistics, such as
        "values_4"; output 0 is the statistic "values".
      policies: of "policy", "ref", "teacher" and other frozen ones; "policy" carries gradient.
      over: "vocabulary", "hidden", "values" or "attention"; a run refuses the last with a network
        that gives no attention weights.
      start: False to compute it under the parameters being trained, with gradient; True to compute
        it once, at the start of the training step and without gradient, for transforms to read.
    """

    name: str
    apply: Callable[..., Array]
    policies: tuple[str, ...] = ("policy",)
    over: str = "vocabulary"
    start: bool = False


class Transform(NamedTuple):
    """A step of computing advantages: an ``(init, apply)`` pair over all groups of a batch.

    Attributes:
      init: () -> state, a pytree; ``()`` for a transform that keeps nothing.
      apply: (advantages [N, G] or [N, G, T], batch, state) -> (advantages, batch, state). The batch
        comes back because a transform may edit masks, add statistics (``returns``) or ``notes``.
      needs: names of the statistics that ``batch.stats`` must hold.
      statistics: those of them that it brings along, with ``start`` set.
    """

    init: Callable[[], Any]
    apply: Callable[[Array, Batch, Any], tuple[Array, Batch, Any]]
    needs: frozenset[str] = frozenset()
    statistics: tuple[Statistic, ...] = ()

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


class Surrogate(NamedTuple):
    """The per-token loss whose gradient is the policy gradient.

    Attributes:
      apply: (stats, advantages [T], mask [T]) -> (losses [T], metrics), for ONE sequence; the
        metrics are [T] arrays by name, averaged over live tokens by the caller. With
        ``over="group"`` every array has a leading [G] and the losses are [G, T]. A metric without
        the last axes, such as the [] accuracy of a pair, is averaged over sequences or groups.
      needs: names of the statistics read besides ``logprobs``.
      over: "sequence", or "group" for losses that compare the members of a group (pairs, lists).
        The rows of the aggregate are then groups: ``sequence_sum`` is the mean over groups.
      statistics: those that it brings along.
      labels: names of the labels in ``Batch.ids`` that it reads; they come among the statistics, as
        int32, and are 0 where nobody recorded any: one turn, one step.
      parts: what it was made of (``objectives.ratios.RatioParts``), for variants; None otherwise.
      on_policy: whether it is a policy gradient without a ratio to who drew the tokens, so that it
        is right for what the policy itself drew alone.
    """

    apply: Callable[[Stats, Array, Array], tuple[Array, Stats]]
    needs: frozenset[str] = frozenset({"sampler_logprobs"})
    over: str = "sequence"
    statistics: tuple[Statistic, ...] = ()
    labels: frozenset[str] = frozenset()
    parts: Any = None
    on_policy: bool = False

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


Aggregate = Callable[[Array, Array], tuple[Array, Array]]
"""(losses [B, T], mask [B, T]) -> (sum [], count []) float32; both add up over microbatches.
A row is a sequence, or a group [B = N, G * T] when the surrogate is one over groups."""


class Regularizer(NamedTuple):
    """A term added to the loss: KL, entropy, value loss.

    Attributes:
      name: the metric's name.
      value: (stats, mask [T]) -> [T] float32 for ONE sequence; not scaled, masked or averaged.
      coef: (state) -> [] float, what the aggregated value is multiplied by.
      init: () -> state.
      update: (state, metrics) -> state, once after each training step.
      needs: names of the statistics read.
      aggregate: None to use the objective's. Its rows are always sequences.
      statistics: those that it brings along.
    """

    name: str
    value: Callable[[Stats, Array], Array]
    coef: Callable[[Any], Any]
    init: Callable[[], Any] = lambda: ()
    update: Callable[[Any, Mapping[str, Array]], Any] = lambda state, metrics: state
    needs: frozenset[str] = frozenset()
    aggregate: Aggregate | None = None
    statistics: tuple[Statistic, ...] = ()

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


class Objective(NamedTuple):
    """An algorithm as a value: replace a field to get another one.

    Attributes:
      advantage: from rewards to advantages.
      surrogate: from advantages to per-token losses.
      aggregate: from per-token losses to (sum, count).
      regularizers: terms added to the loss.
    """

    advantage: Transform
    surrogate: Surrogate
    aggregate: Aggregate
    regularizers: tuple[Regularizer, ...] = ()

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)

    @property
    def needs(self) -> frozenset[str]:
        """Names of every per-token statistic that some part reads."""
        names = {statistic.name for statistic in self.statistics}
        return frozenset(names).union(*(part.needs for part in self._parts))

    @property
    def value_outputs(self) -> int:
        """Numbers that the value network gives for each token; see ``Statistic``."""
        names = [s.name for s in self.statistics if s.over == "values"]
        return 1 + max((int(name.rpartition("_")[2]) for name in names), default=0)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics that the parts bring along, each name once."""
        brought = [statistic for part in self._parts for statistic in part.statistics]
        return tuple({statistic.name: statistic for statistic in brought}.values())

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the policies that are read and not trained: "ref", "teacher", ..."""
        not_frozen = {"sampler", "proximal"}
        ending = "_logprobs"
        names = {n.removesuffix(ending) for n in self.needs if n.endswith(ending)} - not_frozen
        return frozenset(names).union(*(s.policies for s in self.statistics)) - {"policy"}

    @property
    def _parts(self) -> tuple[Transform | Surrogate | Regularizer, ...]:
        return (self.advantage, self.surrogate, *self.regularizers)

    def init(self) -> Any:
        """The state of all parts, a pytree kept in ``TrainState.method``."""
        return {
            "advantage": self.advantage.init(),
            "regularizers": tuple(r.init() for r in self.regularizers),
        }
