"""Completions of a whole batch in one program: ``device_loop`` with rows of one turn."""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax.numpy as jnp

from jrl.mesh import divided
from jrl.sampling.device_loop import (
    Prompts,
    as_rollout,
    fill_slots,
    independent_axes,
    results_of,
    sample_rows,
)
from jrl.sampling.params import SamplingParams
from jrl.sampling.queue import CHUNK
from jrl.sampling.slot_sizes import shrinking_pays, slot_sizes
from jrl.sampling.slots import Members, check_length, decode, sequences_of
from jrl.types import Array, Network, Params, Rollout


def generate(
    key: Array,
    params: Params,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    members: Members | None = None,
    *,
    network: Network,
    group: int = 0,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    baseline_members: int = 0,
    slots: int = 0,
    block: int = 0,
    chunk: int = CHUNK,
    shrink: bool | None = None,
) -> tuple[Rollout, Array]:
    """``group`` completions of each prompt: program 1 of an iteration.

    Args:
      key: consumed.
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32, 1 to P.
      sampling_params: scalars; the bias, if any, [V].
      version: [] int32, the policy's version.
      ids: [N] int32; a sequence's draws depend on (key, its prompt's id, its member) alone.
      members: [N, G], which members are drawn and how; None for numbers 0 to ``group`` - 1.
      network: the policy.
      group: members drawn from the distribution; not read with ``members``.
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      baseline_members: further members drawn greedily, flagged in ``Rollout.baseline``.
      slots: S, sequences decoded at a time, by each device where ``mesh.lone_axes`` divide the
        prompts, else by all together; 0 takes all.
      block: members of a group that share one copy of their prompt's cache and leave their slots
        together; divides G = group + baseline_members. 0 is the whole group when all sequences
        have a slot, and 1 when they queue.
      chunk: decode steps between refills of free slots; on a GPU at least ``gpu.STEPS``.
      shrink: whether the last live slots move into ever smaller states; None where it pays, see
        ``slot_sizes.shrinking_pays``.

    Returns:
      The rollout, and the slot-steps it took, [] int32: slots in use, summed over decode steps.
      ``slot_use`` of the two is the share of slot-steps that drew a token.

    Raises:
      UserError: prompt and completion do not fit the network, or the slots no block.
    """
    chex.assert_rank([prompt_tokens, prompt_lengths, ids], [2, 1, 1])
    assert members is None or not baseline_members, "greedy members have temperature 0"
    group = group if members is None else members.number.shape[1]
    if members is None or not members.fits:
        check_length(network, prompt_tokens.shape[1], max_new_tokens)
    # Greedy members come last in their group, so that the others' numbers, and with them their
    # draws, are the same with and without them.
    n, counts, width = ids.shape[0], (group, baseline_members), max_new_tokens
    if members is not None and members.limit is not None:
        # A plan may ask for more than the run's completions hold.
        members = members.replace(limit=jnp.minimum(members.limit, width))
    prompts = Prompts(prompt_tokens, prompt_lengths, members=members)
    _, parts = independent_axes(network, n)
    # By default decided by the shapes, not by timings: the programs of a run do not depend on the
    # machine's load.
    pays = shrinking_pays(width, stop_tokens, alone=parts > 1 or not divided())
    shrink = pays if shrink is None else shrink
    sizes = slot_sizes(n // parts * sum(counts), sum(counts), slots, block, shrink=shrink)
    if sizes.slots == n * sum(counts) and not sizes.smaller:
        # A slot for each sequence, to the end. What a queue needs is not compiled then: results
        # apart from the slots, and one more decode loop for each smaller state.
        weights = network.prepare(params)
        sequences = sequences_of(
            *(key, weights, prompt_tokens, prompt_lengths, sampling_params, ids),
            counts if members is None else members,
            network,
        )
        queue = fill_slots(sequences, sizes, network=network, weights=weights, width=width)
        rows, count = decode(
            weights, queue.slots, version, network=network, steps=width, stop_tokens=stop_tokens
        )
        results, routing = results_of(rows, sequences, network)
        return as_rollout(results, prompts, version, group, routing=routing), count * sizes.slots
    sampled = sample_rows(
        key,
        params,
        prompts,
        sampling_params,
        version,
        ids,
        network=network,
        members=counts,
        width=width,
        stop_tokens=stop_tokens,
        slots=slots,
        block=block,
        chunk=chunk,
        shrink=shrink,
    )
    rollout = as_rollout(sampled.results, prompts, version, group, routing=sampled.routing)
    return rollout, sampled.slot_steps


def slot_use(rollout: Rollout, slot_steps: Array) -> Array:
    """[] float32: the share of slot-steps that drew a token; 1 where no slot ever idled."""
    return rollout.mask.sum() / jnp.maximum(slot_steps, 1)
