"""Stacked policies, one per player, each trained on its own rows.

    method = train_policies(get_method("ppo"), policies=2, swap_every=5)
    network = method.network(network)
    params = network.init(key)                              # [2, ...] each; both begin alike

As a network it is the first policy: what evaluates, serves or exports a run reads that one. Where
players speak by turns, all policies read every row into caches of their own, beside each other, and
the one whose turn it is draws. So each token is read as often as there are policies; of a decode
step, which waits for weights, that is what policies with rows of their own would take as well.

An episode of R players makes R groups for each start, one after the other, so that the groups of a
player lie R apart. Every policy has its own weights, optimiser, reference, value network and state
of the method, and is trained on the groups of the player that it was; nothing is shared but the
program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.curriculum import unchanged
from jrl.methods.schedule import After, AfterView, every
from jrl.objectives.advantages import live_mean
from jrl.sampling.params import SamplingParams
from jrl.train.state import STACKED, stacked, stacked_axes
from jrl.types import (
    Array,
    Batch,
    Cache,
    Derived,
    Network,
    NetworkExtras,
    Params,
    Stack,
    TrainState,
    Views,
)

SUMMED = ("completion_tokens", "skipped_updates", "skipped_steps")
"""Metrics of a step that add up over policies; of all others the mean is taken."""


@dataclasses.dataclass(frozen=True)
class Policies:
    """Several policies of a network: ``Method.network`` of methods that train them.

    Attributes:
      policies: how many, at least 2.
      swap_every: training steps after which each policy becomes the next player; 0 for never.
      trained: the first so many are trained; 0 for all.
      turns: steps for which each policy is trained alone, one after the other; () trains all of
        them in every step.
      warmup: steps before the first turn in which the last policy is trained alone.
      inner: what each of them is, of the policy's network.
    """

    policies: int
    swap_every: int = 0
    trained: int = 0
    turns: tuple[int, ...] = ()
    warmup: int = 0
    inner: Callable[[Network], Network] = unchanged

    def __call__(self, network: Network) -> Network:
        """The policies, which begin with the same weights.

        Args:
          network: all of whose weights are trained.
        """
        return _together(self.inner(network), self)

    def policy(self, player: Any, step: Any) -> Any:
        """The number of the policy that is this player in a training step; of arrays, too."""
        swaps = step // self.swap_every if self.swap_every else 0
        return (player + swaps) % self.policies

    def due(self, step: Any) -> Array:
        """[policies] bool: those that a training step trains.

        >>> both = Policies(2, turns=(2, 1), warmup=1)
        >>> [both.due(step).tolist() for step in range(4)]
        [[False, True], [True, False], [True, False], [False, True]]
        """
        numbers = jnp.arange(self.policies)
        if not self.turns:
            return numbers >= 0
        at = step - self.warmup
        number = (at % sum(self.turns) >= jnp.cumsum(jnp.array(self.turns))).sum()
        return numbers == jnp.where(at < 0, self.policies - 1, number)


def train_policies(
    method: Method,
    policies: int | None = None,
    swap_every: int | None = None,
    copy_every: int | None = None,
) -> Method:
    """The method with a policy for each player.

    Args:
      method: perhaps one that trains several; what is None then stays as it is.
      policies: how many; 1 plays all players.
      swap_every: training steps after which policies swap players; 0 for never.
      copy_every: training steps after which the others become copies of the first policy, which
        alone is trained then; 0 to train all of them.

    Raises:
      UserError: what several policies do, asked of one.
    """
    already = method.network if isinstance(method.network, Policies) else None
    inner = method.network if already is None else already.inner
    count = policies or (1 if already is None else already.policies)
    if count == 1:
        for name, steps in {"swap_every": swap_every, "copy_every": copy_every}.items():
            if steps:
                raise UserError(
                    f"objective.{name} = {steps}: one policy plays all players; set"
                    " objective.policies to their number, or leave it out"
                )
        return method.with_(network=inner)
    if swap_every is None:
        swap_every = 0 if already is None else already.swap_every
    method = method.with_(network=Policies(count, swap_every, int(bool(copy_every)), inner=inner))
    if not copy_every:
        return method
    after = (*method.schedule.after, copies_of_first(copy_every))
    return method.with_(schedule=method.schedule._replace(after=after))


def copies_of_first(steps: int) -> After:
    """All policies become copies of the first one after each ``steps`` steps."""

    def apply(state: TrainState, view: AfterView) -> TrainState:
        copy = lambda x: jnp.broadcast_to(x[0], x.shape)  # noqa: E731
        return state.replace(**{n: jax.tree.map(copy, getattr(state, n)) for n in STACKED})

    return After(apply, every(steps))


def one_of(tree: Any, index: Any) -> Any:
    """Policy number ``index`` of a stacked tree."""
    return jax.tree.map(lambda x: x[index], tree)


# ---------------------------------------------------------------- the network


class Prepared(struct.PyTreeNode):
    """Prepared weights of all policies, or of the first alone."""

    weights: tuple[Any, ...]


def _together(network: Network, policies: Policies) -> Network:
    """The network of ``policies.policies`` policies like ``network``."""
    count, first, extras = policies.policies, partial(_first, network), network.extras
    stack = Stack(
        policies=count,
        policy=policies.policy,
        speaking=partial(_speaking, network, count),
        step=partial(step_of_each, policies=policies),
    )
    return network._replace(
        init=lambda key: stacked(network.init(key), count),
        axes=lambda: stacked_axes(network.axes()),
        hidden=first(network.hidden),
        logits=first(network.logits),
        prepare=lambda params: Prepared((network.prepare(_of_first(params)),)),
        init_cache=_init_cache(network),
        extend=first(network.extend),
        extras=NetworkExtras(
            fill=first(extras.fill),
            hidden_shared=first(extras.hidden_shared),
            head=first(extras.head),
            views=Views(attention=first(extras.views.attention)),
            gathered=extras.gathered,
            derived=Derived(
                network=network,
                start=lambda key, params: stacked(params, count),
                plain=one_of,
                exact=extras.derived is None or extras.derived.exact,
                stack=stack,
            ),
        ),
    )


def _of_first(params: Any) -> Any:
    return params.weights[0] if isinstance(params, Prepared) else one_of(params, 0)


def _first(network: Network, function: Callable[..., Any] | None) -> Any:
    """A function of parameters or prepared weights and more, with those of the first policy."""
    if function is None:
        return None
    return lambda params, *arguments: function(_of_first(params), *arguments)


def _init_cache(network: Network) -> Callable[..., Cache]:
    def init_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Cache:
        each = None if weights is None else _of_first(weights)
        return network.init_cache(rows, length, each, pieces)

    return init_cache


def _speaking(network: Network, count: int, policies: Array) -> Network:
    """See ``Stack.speaking``."""

    def prepare(params: Params) -> Prepared:
        return Prepared(tuple(network.prepare(one_of(params, i)) for i in range(count)))

    def init_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Cache:
        prepared = [None] * count if weights is None else weights.weights
        caches = [network.init_cache(rows, length, each, pieces) for each in prepared]
        return Cache(rows=tuple(cache.rows for cache in caches))

    def parts(cache: Cache) -> list[Cache]:
        prefixes = [None] * count if cache.prefix is None else cache.prefix
        pairs = zip(cache.rows, prefixes, strict=True)
        return [cache.replace(rows=suffix, prefix=prefix) for suffix, prefix in pairs]

    def joined(cache: Cache, caches: list[Cache]) -> Cache:
        return cache.replace(rows=tuple(each.rows for each in caches))

    def chosen(of_each: list[Array]) -> Array:
        """[S, ...]: each row by its policy."""
        rows = jnp.arange(of_each[0].shape[0])
        return jnp.stack(of_each)[policies, rows]

    def extend(weights: Prepared, cache: Cache, *tokens: Array) -> tuple[Array, Cache]:
        pairs = zip(weights.weights, parts(cache), strict=True)
        out = [network.extend(each, part, *tokens) for each, part in pairs]
        return chosen([hidden for hidden, _ in out]), joined(cache, [after for _, after in out])

    def fill(weights: Prepared, cache: Cache, tokens: Array, lengths: Array) -> Cache:
        assert network.extras.fill is not None
        pairs = zip(weights.weights, parts(cache), strict=True)
        return joined(cache, [network.extras.fill(w, part, tokens, lengths) for w, part in pairs])

    def logits(weights: Prepared, hidden: Array) -> Array:
        return chosen([network.logits(each, hidden) for each in weights.weights])

    return network._replace(
        prepare=prepare,
        init_cache=init_cache,
        extend=extend,
        logits=logits,
        extras=NetworkExtras(
            fill=None if network.extras.fill is None else fill, gathered=network.extras.gathered
        ),
    )


# ---------------------------------------------------------------- the step


def divided_batch(batch: Batch, policies: Policies, step: Array | int) -> Batch:
    """[policies, ...]: each policy's groups of a batch in which players take turns."""

    def divide(x: Array) -> Array:
        by_player = jnp.moveaxis(x.reshape(-1, policies.policies, *x.shape[1:]), 1, 0)
        return jnp.roll(by_player, policies.policy(0, step), axis=0)

    weights = stacked(batch.reward_weights, policies.policies)
    rows = jax.tree.map(divide, batch.replace(reward_weights=None))
    return rows.replace(reward_weights=weights)


def step_of_each(step: Callable[..., Any], policies: Policies) -> Callable[..., Any]:
    """A training step of all policies, one after the other, or of the first, from that of one.

    Policies whose turn it is not stay as they are, moments and all. Metrics are means over the
    policies that were trained and drew anything, or sums
    (``SUMMED``); "policy_rewards" [policies] are the rewards of each.
    """
    trained = policies.trained or policies.policies

    def of_all(
        state: TrainState, batch: Batch, sampling_params: SamplingParams
    ) -> tuple[TrainState, dict[str, Array]]:
        rows = divided_batch(batch, policies, state.step)

        def trains(fields: dict, batch: Batch) -> tuple[dict, dict[str, Array]]:
            after, metrics = step(state.replace(**fields), batch, sampling_params)
            return {name: getattr(after, name) for name in STACKED}, metrics

        def stays(fields: dict, batch: Batch) -> tuple[dict, dict[str, Array]]:
            _, metrics = jax.eval_shape(trains, fields, batch)
            return fields, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

        def one(part: tuple[dict, Batch, Array]) -> tuple[dict, dict[str, Array]]:
            fields, batch, due = part
            if not policies.turns:
                return trains(fields, batch)
            out: tuple[dict, dict[str, Array]] = jax.lax.cond(due, trains, stays, fields, batch)
            return out

        # Not ``vmap``: the activations of one policy are enough to hold at a time.
        before = {name: getattr(state, name) for name in STACKED}
        first = jax.tree.map(lambda x: x[:trained], (before, rows, policies.due(state.step)))
        after, metrics = jax.lax.map(one, first)
        after = jax.tree.map(lambda x, rest: jnp.concatenate([x, rest[trained:]]), after, before)
        # A policy whose player never moved has nothing to report.
        has_tokens = metrics["completion_tokens"] > 0

        def mean(x: Array) -> Array:
            drew = jnp.where(has_tokens.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
            return drew.sum(0) / jnp.maximum(has_tokens.sum(), 1)

        advantages = metrics.pop("advantages", None)
        metrics = {n: x.sum(0) if n in SUMMED else mean(x) for n, x in metrics.items()}
        metrics["policy_rewards"] = jax.vmap(_reward)(rows)
        if advantages is not None:  # in the order of the batch's groups
            advantages = jnp.roll(advantages, -policies.policy(0, state.step), axis=0)
            in_order = jnp.moveaxis(advantages, 0, 1).reshape(-1, *advantages.shape[2:])
            metrics["advantages"] = in_order[: advantages.shape[1]]
        return state.replace(step=state.step + 1, **after), metrics

    return of_all


def _reward(batch: Batch) -> Array:
    """[] float32: the mean score of the live members."""
    return live_mean(batch.score(), batch.members)
