"""The records of the five hops, per-token statistics by name, and streams of random numbers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

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
"""Meanings of per-token statistics. All in nats, except values and returns, in points, and
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
      text: the prompt as it was encoded, chat template included.
      tokens: [p] int32, the prompt's token ids; p differs from prompt to prompt.
      answer: the reference answer, for reward functions.
      meta: further fields of the source, passed to reward functions unchanged.
      solution: [s] int32, the token ids of the row's solution, with its end token; None if it is
        not read.
      messages: the prompt as chat messages, if the data has it so; else ().
      question: the row's question if it is a text; else "".
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
      mask: [N, G, T] bool, True for tokens that the policy sampled or that a demonstration contains
        (False for tool output and padding).
      sampler_logprobs: [N, G, T] float32, nats, under the distribution sampled from; 0 outside
        mask.
      versions: [N, G, T] int32, steps: the policy version that sampled each token; -1 for tokens
        that no policy sampled: outside mask, and in demonstrations.
      stop: [N, G] int32, a ``StopReason``.
      baseline: [N, G] bool, True for a member sampled greedily as a baseline, never trained on.
      routing: the experts that each token was sent to; None if they were not recorded.
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
"""Label [N, G] int32: bit r of a member is set if reward part r has no opinion of it."""


def opinions(rewards: Any, ids: Mapping[str, Any]) -> Any:
    """[N, G, R] bool: whether each part has an opinion of each member; its reward is 0 if not.

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
      notes: metrics of transforms by name, each (sum [], count []) float32. ``compute_advantages``
        moves them to its metrics, so that the batch it returns has none.
      prior: [N] float32 by name, a curriculum's estimates of each problem before the step.
      packing: rows that completions are packed into; None for a row each.
      routing: as in ``Rollout``, for a training step that replays the sampler's experts.
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

    def with_stats(self, **stats: Array) -> Batch:
        """The batch with further per-token statistics, or others of the same names."""
        return self.replace(stats={**self.stats, **stats})

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
      frozen: policies that are read but not trained, by name: "ref" the reference, "teacher"; only
        those that the objective needs. Of a network with a ``split`` also "base", which is
        the reference as well unless another one is given.
      method: the state of the objective (trackers, controllers), not a ``Method``; () when it keeps
        none.
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
"""Uses of random numbers; each has its own stream of keys.

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
