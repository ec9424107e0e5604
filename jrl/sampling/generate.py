"""Completions of a whole batch in one program: ``device_loop`` with rows of one turn."""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax.numpy as jnp

from jrl.sampling.device_loop import as_rollout, sample_rows
from jrl.sampling.params import SamplingParams
from jrl.sampling.sequences import Members, Prompts, SamplerInputs, first_members
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.slots import check_length
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
    width, plan = max_new_tokens, SlotPlan.of(slots)
    members = group if isinstance(group, Members) else first_members(ids.shape[0], group)
    # Members with limits of their own may fit where the widest prompt and completion do not.
    if not members.fits:
        check_length(network, prompt_tokens.shape[1], width)
    if members.limit is not None:
        # A plan may ask for more than the run's completions hold.
        members = members.replace(limit=jnp.minimum(members.limit, width))
    prompts = Prompts(prompt_tokens, prompt_lengths, ids, members)
    inputs = SamplerInputs(key, params, prompts, sampling_params, version)
    sampled = sample_rows(inputs, network=network, width=width, stop_tokens=stop_tokens, plan=plan)
    rollout = as_rollout(sampled.results, prompts, version, routing=sampled.routing)
    return rollout, sampled.slot_steps
