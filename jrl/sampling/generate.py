"""Completions of a whole batch in one program: ``device_loop`` with rows of one turn."""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax.numpy as jnp
import numpy as np

from jrl.sampling.device_loop import (
    as_rollout,
    first_slots,
    independent_axes,
    results_of,
    sample_rows,
    sizes_on,
)
from jrl.sampling.params import SamplingParams
from jrl.sampling.sequences import Members, Prompts, SamplerInputs, first_members, sequences_of
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.slots import check_length, decode
from jrl.types import Array, Network, Params, Rollout


def generate(
    key: Array,
    params: Params,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    group: Members | int,
    *,
    network: Network,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    slots: int | SlotPlan = 0,
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
      group: G, members drawn of each prompt; or which, and how, as ``Members`` [N, G].
      network: the policy.
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      slots: S, sequences decoded at a time, 0 for all; or the whole plan of how they take turns.

    Returns:
      The rollout, and the slot-steps it took, [] int32: slots in use, summed over decode steps.

    Raises:
      UserError: prompt and completion do not fit the network, or the slots no block.
    """
    chex.assert_rank([prompt_tokens, prompt_lengths, ids], [2, 1, 1])
    n, width, plan = ids.shape[0], max_new_tokens, SlotPlan.of(slots)
    members = group if isinstance(group, Members) else first_members(n, group)
    # Members with limits of their own may fit where the widest prompt and completion do not.
    if not members.fits:
        check_length(network, prompt_tokens.shape[1], width)
    if members.limit is not None:
        # A plan may ask for more than the run's completions hold.
        members = members.replace(limit=jnp.minimum(members.limit, width))
    prompts = Prompts(prompt_tokens, prompt_lengths, ids, members)
    inputs = SamplerInputs(key, params, prompts, sampling_params, version)
    sizes = sizes_on(independent_axes(network, n)[1], prompts, plan, width, stop_tokens)
    if sizes.slots == members.number.size and not sizes.smaller:
        # A slot for each sequence, to the end. What a queue needs is not compiled then: results
        # apart from the slots, and one more decode loop for each smaller state.
        inputs = inputs._replace(weights=network.prepare(params))
        sequences, weights = sequences_of(inputs, network), inputs.weights
        index = np.arange(sizes.slots, dtype=np.int32)
        first = first_slots(
            sequences, index, sizes.block, network=network, weights=weights, width=width
        )
        rows, count = decode(
            weights,
            first.replace(aligned=True),
            version,
            network=network,
            steps=width,
            stop_tokens=stop_tokens,
        )
        results, routing = results_of(rows, sequences, network)
        return as_rollout(results, prompts, version, routing=routing), count * sizes.slots
    sampled = sample_rows(inputs, network=network, width=width, stop_tokens=stop_tokens, plan=plan)
    rollout = as_rollout(sampled.results, prompts, version, routing=sampled.routing)
    return rollout, sampled.slot_steps
