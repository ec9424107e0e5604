"""The records of the five hops, the values an algorithm is made of, and the axis letters.

| letter | axis                    | letter | axis                  |
| ------ | ----------------------- | ------ | --------------------- |
| N      | prompts                 | S      | decode slots          |
| G      | samples of one prompt   | C      | cache length          |
| B      | sequences, N * G        | V      | vocabulary            |
| P      | prompt tokens           | D      | embedding             |
| T      | completion tokens       | H, K   | query, key-value heads |
| L      | P + T                   | h      | head size             |
| R      | reward parts            | F, E   | feed-forward, experts |

Completions keep the group axis, ``[N, G, T]``, so a group is an array axis and never a convention
about row order. Only aggregates see ``[B, T]``. Names in lower case in ``models/`` and
``sampling/`` spell the axes out (``q_bthk``).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.system.readable import readable

Array = jax.Array
Params = Any
"""A nested dict of arrays."""
Stats = dict[str, Array]
"""Per-token statistics by name, each ``[..., T]`` float32; see ``STATISTICS``."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""An empty mapping."""

STATISTICS: Mapping[str, str] = {
    "logprobs": "log-probability of the token under the policy being trained; carries gradient",
    "entropy": "entropy of the policy's distribution at the token; carries gradient",
    "values": "the value network's estimate before the token; carries gradient",
    "sampler_logprobs": "log-probability under the distribution that the token was drawn from",
    "proximal_logprobs": "log-probability under the policy at the start of the training step",
    "ref_logprobs": "log-probability under the reference policy",
    "teacher_logprobs": "log-probability under the teacher, a frozen policy of its own",
    "rollout_values": "the value estimates at the start of the training step",
    "rollout_entropy": "entropy of the policy's distribution at the token at the start of the "
    "training step",
    "returns": "the targets of the value network, written by the advantage",
    "shift": "what a preference loss subtracts from a log-ratio, written by a transform",
    "token_weight": "how much a token counts in its sequence's mean, written by a transform",
    "pair_weight": "how far the order of a pair is trusted, in [0, 1], written by a transform",
    "entropy_low": "least entropy that a smoothing term lets pass, written by a transform",
    "entropy_high": "greatest entropy that a smoothing term lets pass, written by a transform",
    "entropy_smoothing": "weight of the smoothing term at the token, written by a transform",
    "pair_share": "what one preference pair of the group counts for, written by the advantage",
    "pass_rate": "fraction of right answers in the group, written by a transform",
    "tie_breaker": "24 random bits of the member, fresh in every step, written by a transform",
    "positive": "weight of a good completion's token in a likelihood term, written by a transform",
    "marked": "1 at the tokens that a loss holds back, 0 elsewhere, written by a transform",
    "external": "1 where the token belongs to a demonstration, 0 where the policy drew it",
    "node_value": "points that a search expects from the tree node of the token",
    "step_labels": "how right the token's step is, in [0, 1], as the data or a search says",
    "visits": "how often a search went through the member's node",
    "paid": "points paid at the token by the environment, or by reward functions that give them by "
    "token, times the weight of their reward part",
    **{f"attribute_{k}": f"attribute {k} of the completion; NaN if unlabelled" for k in range(8)},
}
"""What a per-token statistic means. All in nats, except values and returns, in points, and
weights and marks. A part of an objective may bring further ones along, each a ``Statistic``."""


class StopReason(enum.IntEnum):
    """Reason for the end of a sequence; ``RUNNING`` before it.

    The sampler ends it at a stop token, the length limit or a stop string, or it is aborted. An
    environment is DONE, reached its limit of TURNS, FAILED, or did not answer in time (TIMEOUT). A
    member of the last two leaves its group, since nothing is known of how good it was. ABSENT is a
    place of a group for which no member was asked.
    """

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    STOP_STRING = 3
    ABORTED = 4
    DONE = 5
    TURNS = 6
    FAILED = 7
    TIMEOUT = 8
    ABSENT = 9


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem, on the host.

    Attributes:
      id: stable identity of the problem in its source.
      text: the prompt as the tokenizer saw it, chat template included.
      tokens: [p] int32, the prompt's token ids; p differs from prompt to prompt.
      answer: what a reward function needs to judge a completion.
      meta: further fields of the source, passed to reward functions untouched.
      solution: [s] int32, the token ids of a completion that the data gives, its end-of-text token
        included; None where none was asked for.
      messages: the prompt as chat messages, where the data gives it so; else ().
      question: the row's question, where that is a text; else "".
    """

    id: int
    text: str
    tokens: np.ndarray
    answer: Any
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    solution: np.ndarray | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    question: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Prompt:
        """Itself: it never changes, and its ``meta`` may be of a kind that cannot be copied."""
        return self


class RoutingRecord(struct.PyTreeNode):
    """Experts of each token in each of the n sparse layers; -1 where not recorded.

    int8, or int16 where there are more than 128 experts.

    Attributes:
      prompts: [N, P, n, k], the prompts' tokens but the last one.
      tokens: [N, G, T, n, k]; at t the token that completion token t was predicted from: the
        prompt's last one, then the completion's own.
    """

    prompts: Array
    tokens: Array


class Rollout(struct.PyTreeNode):
    """Completions as sampled: tokens, and everything recorded while sampling them.

    Attributes:
      prompt_tokens: [N, P] int32, each prompt from column 0, then padding of any value.
      prompt_lengths: [N] int32, tokens; at least 1.
      tokens: [N, G, T] int32, completion tokens from column 0; past ``lengths`` any value.
      lengths: [N, G] int32, completion tokens present, the stop token included.
      mask: [N, G, T] bool, True where the policy drew the token or a demonstration gave it (False
        for tool output, padding).
      sampler_logprobs: [N, G, T] float32, nats, under the distribution actually drawn from; 0
        outside mask.
      versions: [N, G, T] int32, steps: the policy version that drew each token; -1 where no policy
        drew it: outside mask, and in demonstrations.
      stop: [N, G] int32, a ``StopReason``.
      baseline: [N, G] bool, True for a member drawn greedily as a baseline, never trained on.
      routing: which experts each token was sent to; None where nobody asked for it.
    """

    prompt_tokens: Array
    prompt_lengths: Array
    tokens: Array
    lengths: Array
    mask: Array
    sampler_logprobs: Array
    versions: Array
    stop: Array
    baseline: Array
    routing: RoutingRecord | None = None

    def check(self) -> Rollout:
        """Asserts the shapes and dtypes above; works on tracers. Returns self."""
        n, g, t = self.tokens.shape
        chex.assert_shape(self.prompt_tokens, (n, None))
        chex.assert_shape(self.prompt_lengths, (n,))
        chex.assert_shape([self.mask, self.sampler_logprobs, self.versions], (n, g, t))
        chex.assert_shape([self.lengths, self.stop, self.baseline], (n, g))
        chex.assert_type([self.tokens, self.lengths, self.versions, self.stop], jnp.int32)
        chex.assert_type([self.mask, self.baseline], bool)
        chex.assert_type(self.sampler_logprobs, jnp.float32)
        return self


class Packing(struct.PyTreeNode):
    """Layout of a batch's completions packed end to end in rows; see ``collect/packing.py``.

    In a batch every array has a leading axis of the parts that the batch is split into, and
    prompts and members are counted in their part.

    Attributes:
      order: [M, b] int32, the prompts of each block.
      members: [R, C] int32, n * G + g of the completion that a column belongs to; -1 is padding.
        Rows m * R / M .. (m + 1) * R / M - 1 hold completions of the prompts of block m.
      steps: [R, C] int32, which token of it.
      owners: [R, C] int32, in [0, b): which prompt of the block it continues.
      segments: [R, C] int32, 0 for padding, and ends [R, C] int32: those of ``SharedRows``, where
        completions share beginnings; None where each is a segment of its own.
    """

    order: Array
    members: Array
    steps: Array
    owners: Array
    segments: Array | None = None
    ends: Array | None = None


SILENT = "silent"
"""The label [N, G] int32 of members whose bit r is set where reward part r has no opinion of it."""


def opinions(rewards: Any, ids: Mapping[str, Any]) -> Any:
    """[N, G, R] bool: whether each part has an opinion of each member; where not, it pays 0.

    Args:
      rewards: [N, G, R] float32, NumPy or JAX.
      ids: labels, with or without ``SILENT``.
    """
    xp = rewards.__array_namespace__()
    if SILENT not in ids:
        return xp.ones(rewards.shape, dtype=bool)
    bits = xp.arange(rewards.shape[-1], dtype=xp.int32)[None, None]
    return ((ids[SILENT][..., None] >> bits) & 1) == 0


class Batch(struct.PyTreeNode):
    """Input of one training step: groups of completions with their rewards.

    Preference pairs are groups of two (chosen, rejected); supervised examples groups of one.

    Attributes:
      prompt_tokens: [N, P] int32, as in ``Rollout``.
      prompt_lengths: [N] int32, tokens.
      tokens: [N, G, T] int32.
      lengths: [N, G] int32, completion tokens present.
      mask: [N, G, T] bool, True where the token is trained on.
      rewards: [N, G, R] float32, points, one column per reward part, unweighted; 0 where the
        part has no opinion of the member, see ``opinions``.
      reward_weights: [R] float32; the scalar reward is the weighted sum of the parts.
      members: [N, G] bool, True where the member exists, did not fail, and counts in its group's
        statistics.
      baseline: [N, G] bool, True for a greedy baseline member (``members`` is False there).
      truncated: [N, G] bool, True where a limit of length or of turns ended the sequence.
      stats: per-token statistics, each [N, G, T] float32; ``sampler_logprobs`` at least, for RL.
      ids: integer labels by name, [N], [N, G] or [N, G, T] int32: "prompt" the identity of the
        problem; "tie_breaker" [N, G] a random number of each member, fresh in every step, for
        transforms that choose at random; and whatever the environment recorded ("turn", "step",
        "state", "stratum", "node"). Tokens of one "context" see the prompt and each other alone; it
        rises along a row. A transform that finds no such label treats a completion as one
        turn, one step, one stratum.
      notes: what a transform has to report: metrics by name, each (sum [], count []) float32.
        ``compute_advantages`` moves them to its metrics, so that the batch it returns has none.
      prior: [N] float32 by name, what a curriculum knew of each problem before the step.
      packing: how completions go through the network; None for a row each.
      routing: as in ``Rollout``, for a training step that replays it.
    """

    prompt_tokens: Array
    prompt_lengths: Array
    tokens: Array
    lengths: Array
    mask: Array
    rewards: Array
    reward_weights: Array
    members: Array
    baseline: Array
    truncated: Array
    stats: Stats = struct.field(default_factory=dict)
    ids: dict[str, Array] = struct.field(default_factory=dict)
    notes: dict[str, tuple[Array, Array]] = struct.field(default_factory=dict)
    prior: dict[str, Array] = struct.field(default_factory=dict)
    packing: Packing | None = None
    routing: RoutingRecord | None = None

    def check(self) -> Batch:
        """Asserts the shapes and dtypes above; works on tracers. Returns self."""
        n, g, t = self.tokens.shape
        r = self.rewards.shape[-1]
        chex.assert_shape(self.prompt_tokens, (n, None))
        chex.assert_shape(self.prompt_lengths, (n,))
        chex.assert_shape([self.lengths, self.members, self.baseline, self.truncated], (n, g))
        chex.assert_shape(self.mask, (n, g, t))
        chex.assert_shape(self.rewards, (n, g, r))
        chex.assert_shape(self.reward_weights, (r,))
        chex.assert_type([self.mask, self.members, self.baseline, self.truncated], bool)
        chex.assert_type([self.rewards, self.reward_weights], jnp.float32)
        for stat in self.stats.values():
            chex.assert_shape(stat, (n, g, t))
        return self

    def score(self) -> Array:
        """[N, G] float32, points: the weighted sum of the reward parts."""
        return (self.rewards * self.reward_weights[None, None]).sum(-1)


class TrainState(struct.PyTreeNode):
    """Everything a training step reads and writes; the unit of checkpointing.

    Attributes:
      step: [] int32, training steps done; also the policy's version.
      params: {"policy": tree, and "value": tree when the objective needs values}. Of a network
        with a ``split`` the policy's tree is its trained part.
      opt_state: the optax state of ``params``.
      frozen: policies that are read and not trained, by name: "ref" the reference, "teacher";
        only those that the objective needs. Of a network with a ``split`` also "base", which is
        the reference as well unless another one is given.
      method: the objective's own state (trackers, controllers); () when it keeps none.
      key: [2] uint32, the data of the run's root key; every use has a ``stream`` of its own. Raw,
        because jit keeps a second entry for a typed key that comes back from it (JAX 0.10, 0.12).
    """

    step: Array
    params: Params
    opt_state: Any
    frozen: dict[str, Params]
    method: Any
    key: Array


STREAMS = (
    *("data", "sample", "train", "eval_data", "eval", "warmup", "tie_breaker", "replay"),
    *("curriculum", "plan", "edit"),
)
"""What random numbers are drawn for; each use has a stream of keys of its own.

A stream's key is its index, so new ones come last."""


def stream(key: Array, name: str, index: Array | int) -> Array:
    """Key number ``index`` of one of the run's streams.

    Args:
      key: the run's root key, or its data.
      name: one of ``STREAMS``.
      index: [] int, such as the step.

    Returns:
      A typed key.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.random.fold_in(jax.random.fold_in(key, STREAMS.index(name)), index)


# ---------------------------------------------------------------- what an algorithm is made of


class Branching(NamedTuple):
    """Branching of a group's members off one another, which makes the group a tree.

    ``roots`` members are drawn from the prompt. The others come in ``rounds`` of equally many, each
    of which leaves a member that is there at one of the tokens that this one drew, and continues
    with draws of its own. See ``sampling.tree``.

    Episodes on the host are left behind answers of their environment, as they are played, at turns
    whose first tokens have greater numbers on average than those of the episode's first turn. See
    ``episodes.branching``.

    Attributes:
      at: of ``sampling.places.PLACES``, which tokens are left: "entropy" those of the most
        uncertain distributions, "gap" those whose likeliest two tokens are the closest, "surprise"
        the least likely tokens, "even" the middle, then the quarters of what a member drew.
      roots: members drawn from the prompt; 0 for half of the group.
      rounds: of branches; not read in episodes.
      above: what the number of a token must exceed to be left there, in nats for "entropy" and
        "surprise", in probability for "gap" (1 minus the difference); in episodes by how much the
        first turn's number must be exceeded. A member for which no such token is left is drawn from
        the prompt.
    """

    at: str = "entropy"
    roots: int = 0
    rounds: int = 1
    above: float = 0.0


class Search(NamedTuple):
    """Search settings. The leaves of the tree are the group's members.

    See ``collect.tree_search``.

    In a round a node of each tree is chosen, and ``width`` steps are drawn to follow it. A path
    that ends is a leaf; its score is backed up to the nodes before it.

    Attributes:
      by: of ``episodes.tree.SEARCHES``, how nodes are chosen and leaves backed up.
      width: steps drawn from a node.
      rounds: at most; a search ends before once it has found a leaf for each member.
      tokens: the most of a step. In text a step ends with a line, too.
      exploration: how much "uct" and "puct" count that a node was seldom visited.
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


class Cache(struct.PyTreeNode):
    """Cache of S rows, perhaps with a prefix that several rows share.

    With M prefixes, rows m * S / M .. (m + 1) * S / M - 1 share prefix m.

    Attributes:
      rows: the network's arrays, [S, ...] each; entry 0 is the token right after the prefix.
      prefix: arrays of the same kind, [M, ...]; None where nothing is shared.
      prefix_lengths: [M] int32, tokens of each prefix that count; None without prefixes.
      column: [] int32, for one call of ``Network.extend``: the entry that the one token of every
        live row goes to, so that a network may write one column of all rows; None where rows
        differ. A network may ignore it.
    """

    rows: Any
    prefix: Any = None
    prefix_lengths: Array | None = None
    column: Array | None = None

    def offsets(self) -> Array:
        """[S] int32: the position of each row's first token after its prefix."""
        count = jax.tree.leaves(self.rows)[0].shape[0]
        if self.prefix_lengths is None:
            return jnp.zeros(count, jnp.int32)
        return jnp.repeat(self.prefix_lengths, count // self.prefix_lengths.shape[0])


class SharedRows(NamedTuple):
    """Rows of tokens that continue prompts, each prompt held once.

    A token of a row attends to the tokens of its own segment at positions no later than its own,
    and to those tokens of its prompt. Along a segment positions rise by one from column to column.
    Where segments share beginnings, as the branches of a tree do, these are segments, too, and a
    token also attends to those that its own one continues.
    There are M blocks of b prompts each, and rows m * R / M .. (m + 1) * R / M - 1 continue the
    prompts of block m.

    Attributes:
      prompt_tokens: [M, b, P] int32, from column 0 and position 0.
      prompt_lengths: [M, b] int32, tokens that count; may be 0.
      tokens: [R, C] int32.
      positions: [R, C] int32.
      segments: [R, C] int32; 0 is padding.
      owners: [R, C] int32, in [0, b): which prompt of its block a token continues.
      ends: [R, C] int32: the segments from a token's own up to this one, which is left out, attend
        to the token; None for its own alone.
      lengths: [R] int32, tokens of each row, where it is one segment from column 0 that continues
        the one prompt of its block; else None.
      routing: the experts to send tokens to, prompts [M, b, P, n, k] and tokens [R, C, n, k]; None
        to send them where the router does.
    """

    prompt_tokens: Array
    prompt_lengths: Array
    tokens: Array
    positions: Array
    segments: Array
    owners: Array
    ends: Array | None = None
    lengths: Array | None = None
    routing: RoutingRecord | None = None


class Head(NamedTuple):
    """The product that ends a network, as data.

    Attributes:
      weight: [V, D] or [D, V].
      axis: the vocabulary's, of the weight.
      softcap: scores become cap * tanh(score / cap); None for none.
      saves_scores: whether a backward pass gets the scores, four bytes each, in place of the
        product that makes them again.
    """

    weight: Array
    axis: int
    softcap: float | None = None
    saves_scores: bool = False


class Split(NamedTuple):
    """Division of a network's parameters into a frozen base and trained adapters.

    The base alone is a tree that the network's functions take too: the policy as it was.

    Attributes:
      init: (key) -> the trained part as it starts, where it changes nothing.
      split: (params) -> (trained part, base); the trained part is {} for a base alone. Works on any
        tree shaped like the parameters, such as logical axes.
      join: (trained part, base) -> params, the same arrays.
      freeze: (whole parameters of the network that this one was derived from) -> base, as it is
        kept; on the host or the device.
      thaw: (base) -> such whole parameters.
    """

    init: Callable[[Array], Params]
    split: Callable[[Any], tuple[Any, Any]]
    join: Callable[[Any, Any], Any]
    freeze: Callable[[Params], Params]
    thaw: Callable[[Params], Params]


class Stack(NamedTuple):
    """Policies trained side by side: every array of the parameters has a leading axis of them.

    Attributes:
      policies: how many.
      policy: (player, training step) -> the number of the policy that plays it; of arrays, too.
      speaking: (policies [S] int32) -> the network in whose cache all policies read every row, and
        where row s is continued by policy ``policies[s]``. Its ``prepare`` takes the parameters.
      step: (training step of one policy) -> that of all: ``TrainState.params``, ``opt_state``,
        ``frozen`` and ``method`` have the leading axis, and each policy is trained on the groups of
        its players.
    """

    policies: int
    policy: Callable[..., Any]
    speaking: Callable[[Array], Network]
    step: Callable[[Callable[..., Any]], Callable[..., Any]]


class Derived(NamedTuple):
    """Conversion of a network's parameters from those of another one, and back.

    Attributes:
      network: the other one, all of whose weights are trained.
      start: (key, its parameters) -> parameters, which begin with the same policy.
      plain: (parameters, number of the policy) -> its parameters; of a ``stack`` those of one.
      exact: whether they hold the same policy, so that a checkpoint of them is one of it.
      split: where a part of the parameters is frozen, which. Then the functions of the network take
        its parameters alone, too, in the form that ``Split.freeze`` gives.
      stack: where several policies are trained, how.
    """

    network: Network
    start: Callable[[Array, Params], Params]
    plain: Callable[[Params, int], Params]
    exact: bool = True
    split: Split | None = None
    stack: Stack | None = None


class Views(NamedTuple):
    """Views of a network that statistics may read besides logits; see ``Statistic.over``.

    Attributes:
      vocabulary: (params, hidden [..., D]) -> arrays [...], [..., V] or [..., n, V] by name.
      attention: (params, tokens [B, L], positions [B, L], segments [B, L]) -> [B, H, L, L] float32,
        how each token weighs the ones before it, by the heads of five layers spread over the
        middle third; 0 for what it does not see. Large: for the few methods that read it.
    """

    vocabulary: Callable[[Params, Array], dict[str, Array]] | None = None
    attention: Callable[[Params, Array, Array, Array], Array] | None = None


class NetworkExtras(NamedTuple):
    """Optional abilities of a network; None where it lacks one.

    Attributes:
      fill: (weights, cache, tokens [N, P], lengths [N]) -> cache: what ``extend`` makes of an empty
        cache and rows of these lengths from position 0 on, in a faster way.
      hidden_shared: (params, ``SharedRows``) -> ([R, C, D], aux), the same as ``hidden`` of each
        row behind its prompt, for the columns of the row; a prompt goes through the network once.
        Without it the prompt is repeated for each of its rows.
      head: (params) -> ``Head``: ``logits`` are its scores. Without it they are made for a few
        tokens at a time, over all of the vocabulary at once.
      views: what statistics may read besides the logits.
      recorded: (a cache's own or prefix arrays) -> [S, C, n, k], the experts that the token in each
        column was sent to in the n sparse layers, -1 where there is none; see ``RoutingRecord``.
      gathered: whether what ``prepare`` returns is whole on all devices along the mesh's fsdp axis.
      derived: where the parameters were made of another network's, how.
    """

    fill: Callable[..., Cache] | None = None
    hidden_shared: Callable[[Params, SharedRows], tuple[Array, dict[str, Array]]] | None = None
    head: Callable[[Params], Head] | None = None
    views: Views = Views()
    recorded: Callable[[Any], Array] | None = None
    gathered: bool = False
    derived: Derived | None = None

    @property
    def split(self) -> Split | None:
        """The frozen part of the parameters, if any."""
        return None if self.derived is None else self.derived.split

    @property
    def stack(self) -> Stack | None:
        """The stack of several policies, if trained; all other functions are the first one's."""
        return None if self.derived is None else self.derived.stack

    @property
    def own_layout(self) -> bool:
        """Whether the functions of the network take other parameters than a checkpoint's."""
        return self.derived is not None and self.derived.split is None


class Network(NamedTuple):
    """A causal language model as functions over its parameters.

    Attributes:
      vocab_size: V.
      embed_dim: D, the size of ``hidden``'s last axis.
      max_length: the longest sequence the network accepts, tokens.
      init: (key) -> params.
      axes: () -> a tree like params whose leaves are tuples of logical axis names (or None).
      hidden: (params, tokens [B, L], positions [B, L], segments [B, L]) -> ([B, L, D], aux).
        A token attends to tokens of its own segment at positions no later than its own; segment 0
        is padding. Along a segment positions rise with the columns. ``aux`` is a dict of arrays
        with a leading axis of sparse layers, sums over the tokens (``models.moe.router_sums``);
        empty for dense models.
      logits: (params, hidden [..., D]) -> [..., V] float32.
      prepare: (params) -> weights laid out for ``extend``, once for many calls of it: layers apart,
        products fused, in the dtype that they are computed in. ``logits`` takes either kind.
      init_cache: (rows, length, weights, pieces=1) -> ``Cache`` with room for ``length`` own tokens
        a row, in up to ``pieces`` pieces along the length where that lets ``extend`` read only
        those in use.
      extend: (weights, cache, tokens [S, Q], positions [S, Q], live [S, Q]) -> (hidden [S, Q, D],
        cache). Writes Q tokens into the cache at their positions and attends to everything written
        at or before them, the prefix included. Tokens that are not live are neither written nor
        attended to.
      extras: what it brings besides.
    """

    vocab_size: int
    embed_dim: int
    max_length: int
    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    hidden: Callable[..., tuple[Array, dict[str, Array]]]
    logits: Callable[[Params, Array], Array]
    prepare: Callable[[Params], Any]
    init_cache: Callable[..., Cache]
    extend: Callable[..., tuple[Array, Cache]]
    extras: NetworkExtras = NetworkExtras()

    def with_extras(self, **changes: Any) -> Network:
        """The network with some of its extras replaced."""
        return self._replace(extras=self.extras._replace(**changes))


class ValueNetwork(NamedTuple):
    """Estimates the return from each position.

    Attributes:
      init: (key) -> params.
      axes: () -> logical axes, like params.
      apply: (params, policy_hidden [B, L, D], tokens, positions, segments) -> [B, L] float32,
        points, or [B, L, K] of several outputs. A shared trunk reads ``policy_hidden``; a separate
        network reads the tokens.
      apply_shared: (params, policy_hidden [R, C, D], ``SharedRows``) -> [R, C] float32, or
        [R, C, K], the same for rows behind shared prompts; None where the network cannot.
    """

    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    apply: Callable[..., Array]
    apply_shared: Callable[[Params, Array, SharedRows], Array] | None = None
