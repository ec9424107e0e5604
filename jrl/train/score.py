"""Scoring: per-token statistics of completions under given parameters.

One forward pass, in which a prompt is read once for all completions of its group if the network
supports it; logits exist for completion tokens only, and for a chunk of them at a time if they are
many, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jrl.errors import UserError, unknown_choice
from jrl.mesh import constrain, parts_of
from jrl.models.heads import along_columns
from jrl.models.vocabulary import fused_logprobs
from jrl.objectives.distill import SAVED
from jrl.sampling.params import SamplingParams, sampling_logprobs, token_logprobs
from jrl.train.batch_rows import rows, shared_rows, unpacked
from jrl.train.state import START
from jrl.types import NOTHING, Array, Batch, Network, Params, Statistic, Stats, ValueNetwork

_LOGITS_AT_ONCE = 2**24
"""Maximum logits of a device at a time, in numbers (64 MiB of float32)."""
_SHOWN = 4
"""Arrays of the size of logits in a network's view of the vocabulary."""


OVER = ("vocabulary", "hidden", "values", "attention")
"""Inputs of statistics; see ``types.Statistic``."""


def head_statistics(
    params: Params,
    hidden: dict[str, Array],
    tokens: Array,
    *,
    networks: Mapping[str, Network],
    sampling_params: SamplingParams,
    want: frozenset[str],
    statistics: tuple[Statistic, ...] = (),
) -> Stats:
    """Statistics of tokens that are read from the distributions before them, in chunks.

    Args:
      params: a tree for each policy.
      hidden: for each policy [B, T, D], the state before each token; D is the policy's own.
      tokens: [B, T] int32.
      networks: the network of each policy.
      sampling_params: scalars.
      want: of "logprobs", "entropy", and "NAME_logprobs" of the other policies.
      statistics: those over the vocabulary.

    Returns:
      What is wanted and each statistic, [B, T] float32. A large ``[B, T, V]`` is never held: the
      distributions of all policies exist for one chunk of tokens at a time, and are computed again
      in the backward pass, but for what a statistic saves of a frozen one
      (``distill.top_k_divergence``). Where only log-probabilities and the entropy are read, logits
      exist for a part of the vocabulary at a time.
    """
    policies = {policy for statistic in statistics for policy in statistic.policies}
    # Greedy samples are scored by the distribution of temperature 1, as in ``token_logprobs``.
    warm = sampling_params.replace(
        temperature=jnp.where(sampling_params.temperature > 0, sampling_params.temperature, 1.0)
    )
    # The fused head never sees a whole row of logits, so it cannot truncate or floor them, and a
    # statistic over the vocabulary cannot read them.
    fused: Stats = {}
    truncated = sampling_params.truncates or sampling_params.floors
    for policy in [] if truncated else sorted({*hidden} - policies):
        if (head := networks[policy].extras.head) is None:
            continue
        is_policy = policy == "policy"
        devices = parts_of("batch", tokens.shape[0]), parts_of("vocab", networks[policy].vocab_size)
        outputs = fused_logprobs(
            hidden[policy],
            head(params[policy]),
            tokens,
            warm.temperature,
            entropy=is_policy and "entropy" in want,
            devices=devices,
            at_once=_LOGITS_AT_ONCE,
        )
        fused |= outputs if is_policy else {f"{policy}_logprobs": outputs["logprobs"]}
        # Done by the fused head, so its states must not reach ``_of_logits``, where they would be
        # scored twice.
        hidden = {name: x for name, x in hidden.items() if name != policy}
    fused = {name: x for name, x in fused.items() if name in want}
    if not hidden:
        return fused

    run = partial(
        _of_logits,
        params,
        networks=networks,
        distributions=(sampling_params, warm),
        want=want,
        statistics=statistics,
    )
    # A chunk holds the distributions of all policies at once, so they share the limit.
    shows = sum(networks[policy].extras.views.vocabulary is not None for policy in hidden)
    size = max(networks[policy].vocab_size for policy in hidden) * (len(hidden) + _SHOWN * shows)
    return fused | _in_chunks(run, hidden, tokens, _LOGITS_AT_ONCE // size)


def _of_logits(
    params: Params,
    hidden: dict[str, Array],
    tokens: Array,
    *,
    networks: Mapping[str, Network],
    distributions: tuple[SamplingParams, SamplingParams],
    want: frozenset[str],
    statistics: tuple[Statistic, ...],
) -> Stats:
    """``head_statistics`` from complete logits; ``distributions``: the sampler's, and warm."""
    flat = tokens.reshape(-1)
    policies = {policy for statistic in statistics for policy in statistic.policies}
    stats: Stats = {}
    by_policy: Stats = {}
    besides: Stats = {}
    for policy, states in hidden.items():
        # Flat tokens: vmap over one axis, whatever the shape of the chunk.
        logits = networks[policy].logits(params[policy], states).reshape(flat.shape[0], -1)
        is_policy = policy == "policy"
        name = "logprobs" if is_policy else f"{policy}_logprobs"
        entropy = is_policy and "entropy" in want
        if name in want or entropy:
            outputs = token_logprobs(logits, flat, distributions[0], entropy=entropy)
            stats[name] = outputs["logprobs"]
            stats |= {"entropy": outputs["entropy"]} if entropy else {}
        if policy in policies:
            by_policy[policy] = sampling_logprobs(logits, distributions[1])
            by_policy |= {"logits": logits} if is_policy else {}
        reads = is_policy and policy in policies
        more = networks[policy].extras.views.vocabulary if reads else None
        if more is not None:
            axes, outputs = tokens.ndim, more(params[policy], states)
            besides = {n: x.reshape(-1, *x.shape[axes:]) for n, x in outputs.items()}
    for statistic in statistics:
        inputs = {n: by_policy[n] for n in statistic.policies}
        inputs |= {"logits": by_policy["logits"], **besides} if "policy" in inputs else {}
        stats[statistic.name] = jax.vmap(statistic.apply)(inputs, flat)
    names = want | {statistic.name for statistic in statistics}
    stats = {name: x for name, x in stats.items() if name in names}
    return {n: x.astype(jnp.float32).reshape(tokens.shape) for n, x in stats.items()}


def _in_chunks(
    run: Callable[[dict[str, Array], Array], Stats],
    hidden: dict[str, Array],
    tokens: Array,
    limit: int,
) -> Stats:
    """``run`` over chunks of at most ``limit`` tokens, each made again in the backward pass."""
    b, t = tokens.shape
    parts, chunk = _chunks(b, t, limit)
    if parts == 1 and chunk == t:
        return run(hidden, tokens)

    def tiles(x: Array) -> Array:
        # Chunks of one size, for one compiled body; the padding's results are cut off by
        # ``untiled``.
        x = jnp.pad(x, ((0, 0), (0, -t % chunk), *((0, 0),) * (x.ndim - 2)))
        # Strided, so that every device walks over rows of its own.
        x = x.reshape(b // parts, parts, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2).reshape(-1, b // parts, chunk, *x.shape[4:])

    def untiled(x: Array) -> Array:
        x = x.reshape(parts, -1, b // parts, chunk)
        return jnp.moveaxis(x, 2, 0).reshape(b, -1)[:, :t]

    # Kept for the backward pass, the chunks' distributions would be [B, T, V] together.
    again = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
    stats = jax.lax.map(lambda xs: again(*xs), jax.tree.map(tiles, (hidden, tokens)))
    return jax.tree.map(untiled, stats)


def _chunks(rows: int, columns: int, limit: int) -> tuple[int, int]:
    """The parts of the rows, and columns of a chunk, for ``limit`` tokens.

    The limit is a device's, and so are the rows counted, since a batch is divided over devices.
    """
    local_rows = rows // parts_of("batch", rows)
    parts = next(
        d
        for d in range(1, local_rows + 1)
        if local_rows % d == 0 and (local_rows // d <= limit or d == local_rows)
    )
    # Rows first, then columns: a part of whole rows keeps its columns contiguous.
    return parts, max(1, min(columns, limit // (local_rows // parts)))


def policies_of(params: Params, frozen: Mapping[str, Params], network: Network) -> Params:
    """The trees that scoring reads, by name: those trained, and those frozen.

    Args:
      params: of a ``TrainState``.
      frozen: of it.
      network: the policy.

    Returns:
      "policy", "value" where there is one, and the frozen policies. Where the network has a
      ``split``, the reference is what the run started from, unless another one is kept: the base,
      with the trained part that was given where there was one.
    """
    if network.extras.split is None:
        return params | dict(frozen)
    base, join = frozen["base"], network.extras.split.join
    others = {name: tree for name, tree in frozen.items() if name not in ("base", START)}
    # With adapters the base is stored once and joined here; a reference policy is then free, or
    # as large as the adapters that the run started from.
    ref = join(frozen[START], base) if START in frozen else base
    return {"ref": ref} | params | others | {"policy": join(params["policy"], base)}


@jax.named_scope("score")
def score(
    params: Params,
    batch: Batch,
    sampling_params: SamplingParams,
    *,
    network: Network,
    value: ValueNetwork | None,
    want: frozenset[str],
    statistics: tuple[Statistic, ...] = (),
    networks: Mapping[str, Network] = NOTHING,
) -> Stats:
    """Statistics of a batch's completion tokens under ``params``.

    Args:
      params: {"policy": tree, "value": tree when "values" is wanted, and a tree for each frozen
        policy that is read, by its name}.
      batch: groups of completions.
      sampling_params: scalars; the distribution that the tokens were drawn from.
      network: the policy.
      value: the value network, when "values" is wanted.
      want: of "logprobs", "entropy", "values", "router", and "NAME_logprobs" of frozen policies.
      statistics: further ones.
      networks: those of frozen policies that are not like the policy, by name.

    Returns:
      The wanted statistics and the further ones, [N, G, T] float32; what lies outside
      ``batch.mask`` is meaningless. Only the policies that are read go through their networks. For
      "router" the sums of ``models.moe.router_sums`` of the policy, [n] or [n, E], by name.

    Raises:
      UserError: a batch whose routing is to be replayed, and a network that cannot.
    """
    n, g, t = batch.tokens.shape
    heads, bodies = _readers(want, statistics)
    nets = {name: networks.get(name, network) for name in bodies}
    outputs = tuple(s for s in statistics if s.over == "values")
    reads_values = _reads_values(want, statistics)
    assert value is not None or not reads_values, "an objective that needs values has a network"
    value = value if reads_values else None
    how: dict[str, Any] = {"network": network, "value": value, "networks": networks}
    shared = shares_prompts(want=want, statistics=statistics, **how)
    states: dict[str, Array] = {}
    stats: Stats = {}
    router: Stats = {}
    if shared:
        routed = shared_rows(batch)
        plain = routed._replace(routing=None)
        for name, net in nets.items():
            # Other policies have their own routers, for which nothing is on record.
            rows_of_policy = routed if name == "policy" else plain
            states[name], sums = net.extras.hidden_shared(params[name], rows_of_policy)  # type: ignore[misc]
            router = sums if name == "policy" else router
        if value is not None:
            stats["values"] = value.apply_shared(params["value"], states["policy"], plain)  # type: ignore
    else:
        _check_unshared(batch)
        sequences = rows(batch)
        before, tokens = sequences.before[:, :, None], constrain(sequences.tokens, "batch", None)
        where = sequences.positions, sequences.segments
        for name, net in nets.items():
            hidden, sums = net.hidden(params[name], tokens, *where)
            router = sums if name == "policy" else router
            # Only states that predict completion tokens: logits of prompt tokens are never
            # computed.
            states[name] = jnp.take_along_axis(hidden, before, axis=1)
            if name == "policy" and value is not None:
                values = value.apply(params["value"], hidden, tokens, *where)
                stats["values"] = along_columns(values, sequences.before)

    # States are D numbers a token, ids one: moving the ids is cheaper.
    # Log-probabilities are made where the states are: tokens follow the packing, not the reverse.
    targets, packing = batch.tokens.reshape(n * g, t), batch.packing if shared else None
    if packing is not None:
        targets = targets[jnp.maximum(packing.members, 0), packing.steps]
    if heads:
        stats |= head_statistics(
            params,
            {name: states[name] for name in heads},
            targets,
            networks=nets,
            sampling_params=sampling_params,
            want=want,
            statistics=tuple(s for s in statistics if s.over == "vocabulary"),
        )
    unpack = unpacked(packing, n * g, t)
    stats = {name: unpack(x) for name, x in stats.items()}
    stats |= _of_sequences(statistics, params, batch, lambda name: unpack(states[name]), nets)
    if value is not None and (values := stats["values"]).ndim == 3:  # several outputs
        of_outputs = {s.name: jax.vmap(jax.vmap(s.apply))(values) for s in outputs}
        stats |= of_outputs | {"values": values[..., 0]}
    names = want | {statistic.name for statistic in statistics}
    selected = {k: v.reshape(n, g, t) for k, v in stats.items() if k in names}
    return selected | router if "router" in want else selected


def shares_prompts(
    *,
    network: Network,
    value: ValueNetwork | None,
    want: frozenset[str],
    statistics: tuple[Statistic, ...] = (),
    networks: Mapping[str, Network] = NOTHING,
) -> bool:
    """Whether ``score`` reads a prompt once for its group: all networks that it reads can do so.

    The arguments are those of ``score``.
    """
    _, bodies = _readers(want, statistics)
    shared = all(networks.get(n, network).extras.hidden_shared is not None for n in bodies)
    if value is None or not _reads_values(want, statistics):
        return shared
    return shared and value.apply_shared is not None


def _reads_values(want: frozenset[str], statistics: tuple[Statistic, ...]) -> bool:
    return "values" in want or any(s.over == "values" for s in statistics)


def _check_unshared(batch: Batch) -> None:
    """Raises UserError for a batch that only rows which share their prompts can hold."""
    if batch.routing is not None:
        raise UserError(
            "objective.router_replay = true: a network of this run does not take rows that share "
            "prompts, which is how routing is replayed; use those of jrl.models.transformer"
        )
    if "context" in batch.ids:
        raise UserError(
            "data.contexts: a network of this run does not take rows that share prompts, which is "
            "how the contexts of an episode are laid out; use those of jrl.models.transformer"
        )


def _of_sequences(
    statistics: tuple[Statistic, ...],
    params: Params,
    batch: Batch,
    states: Callable[[str], Array],
    networks: Mapping[str, Network],
) -> Stats:
    """[B, T]: the statistics of hidden states, policy -> [B, T, D], and of attention."""
    n, g, t = batch.tokens.shape
    stats: Stats = {}
    for statistic in statistics:
        name = statistic.policies[0]
        if statistic.over == "hidden":
            live = batch.mask.reshape(n * g, t)
            stats[statistic.name] = jax.vmap(statistic.apply)(states(name), live)
        if statistic.over == "attention":
            stats[statistic.name] = _of_attention(statistic, params[name], batch, networks[name])
    return stats


def _of_attention(statistic: Statistic, params: Params, batch: Batch, network: Network) -> Array:
    """[B, T]: a statistic of attention weights, one sequence at a time because they are large."""
    if network.extras.views.attention is None:
        raise UserError(
            f"{statistic.name} is read from the network's attention, which this network does not "
            "give; use one of jrl.models.transformer, or a method that does not need it"
        )
    if "context" in batch.ids:
        raise UserError(
            f"{statistic.name} is read from attention over complete rows, and data.contexts "
            "divides them; set it to 1"
        )
    n, g, t = batch.tokens.shape
    sequences, attention = rows(batch), network.extras.views.attention

    def one(row: tuple[Array, ...]) -> Array:
        tokens, positions, segments, mask = row
        # [H, T, L] of one sequence; of the whole batch it may not fit in memory.
        weights = attention(params, tokens[None], positions[None], segments[None])[0, :, -t:]
        lags = positions[-t:, None] - positions[None]
        return statistic.apply(weights, jnp.where((segments != 0)[None], lags, -1), mask)

    each = (sequences.tokens, sequences.positions, sequences.segments, batch.mask.reshape(n * g, t))
    return jax.lax.map(one, each)


def _readers(
    want: frozenset[str], statistics: tuple[Statistic, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The policies whose distributions are read, and those whose hidden states are."""
    names = want - {"values", "router"}
    basics = {"policy"} if names & {"logprobs", "entropy"} else set()
    heads = basics | {n.removesuffix("_logprobs") for n in names - {"logprobs", "entropy"}}
    for statistic in statistics:
        if statistic.over not in OVER:
            raise unknown_choice(f"{statistic.name}.over", statistic.over, OVER)
        if statistic.over == "vocabulary":
            heads |= set(statistic.policies)
    bodies = heads | {policy for statistic in statistics for policy in statistic.policies}
    bodies |= {"policy"} if "values" in want else set()
    return tuple(sorted(heads)), tuple(sorted(bodies))
