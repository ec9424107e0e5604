"""Networks as values of functions, their caches, and rows that share prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.types.records import Array, Params, RoutingRecord


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
        row after its prompt, for the columns of the row; a prompt goes through the network once.
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
        [R, C, K], the same for rows after shared prompts; None where the network cannot.
    """

    init: Callable[[Array], Params]
    axes: Callable[[], Any]
    apply: Callable[..., Array]
    apply_shared: Callable[[Params, Array, SharedRows], Array] | None = None
