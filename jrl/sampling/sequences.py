"""Sequences of a batch before they have a slot: prompts, members of groups, and their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.sampling.params import SamplingParams, per_row
from jrl.sampling.slots import prefill
from jrl.types import Array, Cache, Network, StopReason


class Members(struct.PyTreeNode):
    """Members of N groups to sample, with their settings.

    Attributes:
      number: [N, G] int32; the random numbers of a member follow from its prompt's id and this.
      live: [N, G] bool, False for a place that stays empty (``StopReason.ABSENT``).
      temperature: [N, G] float32, in place of the batch's, 0 for a greedy member; None for the
        batch's.
      limit: [N, G] int32, the most tokens sampled; None for the batch's.
      fits: static, whether the limits keep each member within the network's length, whatever the
        widths of prompts and completions add up to.
    """

    number: Array
    live: Array
    temperature: Array | None = None
    limit: Array | None = None
    fits: bool = struct.field(pytree_node=False, default=False)


class Prompts(NamedTuple):
    """N prompts, and the members that are sampled of each.

    Attributes:
      tokens: [N, P] int32, from column 0.
      lengths: [N] int32, 1 to P.
      ids: [N] int32; a row's draws depend on (key, its prompt's id, its member's number) alone.
      members: [N, G].
      state: of an environment, any pytree of arrays with N rows; None without one.
    """

    tokens: Array
    lengths: Array
    ids: Array
    members: Members
    state: Any = None


class SamplerInputs(NamedTuple):
    """Arrays that a sampler reads: all that its program is traced for.

    Attributes:
      key: the same on all devices; consumed.
      weights: the policy's parameters; inside the loop as ``network.prepare`` returns them.
      prompts: N of them; the one part that devices divide.
      sampling_params: scalars; the bias, if any, [V].
      version: [] int32, of the policy.
      shared: for ``Turns.network``, any pytree of arrays; None without turns.
    """

    key: Array
    weights: Any
    prompts: Prompts
    sampling_params: SamplingParams
    version: Array
    shared: Any = None


def first_members(prompts: int, group: int) -> Members:
    """The members 0 to ``group`` - 1 of every prompt, all alike."""
    numbers = jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32), (prompts, group))
    return Members(numbers, jnp.ones((prompts, group), bool))


def member_keys(key: Array, ids: Array, numbers: Array) -> Array:
    """[N, G] keys, each a function of (key, prompt id [N], member [N, G]) alone."""
    # Folded in twice, not split: a prompt that is drawn alone, on another device or in another
    # order has the same keys.
    prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(prompt_keys, numbers)


class Sequences(struct.PyTreeNode):
    """B sequences to draw, and where their prompts are.

    Attributes:
      prompts: the prompts' cache, N rows.
      prompt_lengths: [N] int32, tokens.
      last: [N] int32, the last token of each prompt.
      keys: [B] PRNG keys.
      sampling_params: scalars.
      members: which members of each prompt they are.
    """

    prompts: Cache
    prompt_lengths: Array
    last: Array
    keys: Array
    sampling_params: SamplingParams
    members: Members


def sequences_of(inputs: SamplerInputs, network: Network) -> Sequences:
    """All members of some prompts, whose caches are computed here."""
    key, weights, prompts, sampling_params, *_ = inputs
    tokens, lengths, ids, members, _ = prompts
    # A member's temperature may be 0 where the batch's is not.
    mixed = members.temperature is not None
    return Sequences(
        prompts=prefill(weights, tokens, lengths, network=network),
        prompt_lengths=lengths,
        last=jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0],
        keys=member_keys(key, ids, members.number).reshape(-1),
        sampling_params=sampling_params.replace(greedy=sampling_params.greedy or mixed),
        members=members,
    )


def fresh_rows(sequences: Sequences, index: Array) -> dict[str, Any]:
    """Initial fields of the slots of these sequences, by name."""
    # Members of a prompt are neighbours, so no table from sequence to prompt is needed.
    prompt = index // (sequences.keys.shape[0] // sequences.last.shape[0])
    sampling_params = per_row(sequences.sampling_params, index.shape[0])
    members = sequences.members
    live = members.live.reshape(-1)[index]
    if members.temperature is not None:
        temperature = members.temperature.reshape(-1)[index]
        sampling_params = sampling_params.replace(temperature=temperature)
    fresh: dict[str, Any] = {
        "pending": sequences.last[prompt],
        "prompt_lengths": sequences.prompt_lengths[prompt],
        "lengths": jnp.zeros_like(index),
        "keys": sequences.keys[index],
        "sampling_params": sampling_params,
    }
    if members.limit is not None:
        fresh["limits"] = members.limit.reshape(-1)[index]
        live &= fresh["limits"] > 0
    # An absent member has ended before its first step, so that its slot is free at once.
    fresh["stop"] = jnp.where(live, StopReason.RUNNING, StopReason.ABSENT).astype(jnp.int32)
    return fresh
