"""Objectives as functions of arrays, and as values made of parts.

On arrays, as in rlax::

    advantages = jrl.objectives.grpo_advantages(rewards)                           # [N, G]
    loss = jrl.objectives.grpo_loss(logprobs, old_logprobs, advantages, mask)      # [N, G, T]

On the records of a run, ``compute_advantages`` and ``policy_loss`` apply an ``Objective``: an
advantage (``Transform``), a surrogate, an aggregate and regularizers. Read ``policy.py`` first: it
shows where each part is applied. The transforms ``gae``, ``reward_to_go`` and ``clip`` are in
``jrl.objectives.transforms``. Nothing here sees parameters or the text of tokens.
"""

from jrl.objectives.advantages import group_mean_std as group_mean_std
from jrl.objectives.advantages import leave_one_out as leave_one_out
from jrl.objectives.advantages import mean_centred as mean_centred
from jrl.objectives.aggregates import constant_norm as constant_norm
from jrl.objectives.aggregates import sequence_mean as sequence_mean
from jrl.objectives.aggregates import sequence_sum as sequence_sum
from jrl.objectives.aggregates import token_mean as token_mean
from jrl.objectives.array_advantages import at_last_token as at_last_token
from jrl.objectives.array_advantages import dr_grpo_advantages as dr_grpo_advantages
from jrl.objectives.array_advantages import gae as gae
from jrl.objectives.array_advantages import grpo_advantages as grpo_advantages
from jrl.objectives.array_advantages import maxrl_advantages as maxrl_advantages
from jrl.objectives.array_advantages import opo_advantages as opo_advantages
from jrl.objectives.array_advantages import remax_advantages as remax_advantages
from jrl.objectives.array_advantages import reward_to_go as reward_to_go
from jrl.objectives.array_advantages import rloo_advantages as rloo_advantages
from jrl.objectives.array_advantages import whiten_tokens as whiten_tokens
from jrl.objectives.array_losses import cispo_loss as cispo_loss
from jrl.objectives.array_losses import dapo_loss as dapo_loss
from jrl.objectives.array_losses import dr_grpo_loss as dr_grpo_loss
from jrl.objectives.array_losses import entropy as entropy
from jrl.objectives.array_losses import grpo_loss as grpo_loss
from jrl.objectives.array_losses import gspo_loss as gspo_loss
from jrl.objectives.array_losses import kl_loss as kl_loss
from jrl.objectives.array_losses import ppo_loss as ppo_loss
from jrl.objectives.array_losses import ppo_value_loss as ppo_value_loss
from jrl.objectives.array_losses import reinforce_loss as reinforce_loss
from jrl.objectives.array_losses import sequence_logprobs as sequence_logprobs
from jrl.objectives.array_losses import sft_loss as sft_loss
from jrl.objectives.array_losses import token_logprobs as token_logprobs
from jrl.objectives.array_pairs import bradley_terry_loss as bradley_terry_loss
from jrl.objectives.array_pairs import dpo_loss as dpo_loss
from jrl.objectives.array_pairs import ipo_loss as ipo_loss
from jrl.objectives.array_pairs import orpo_loss as orpo_loss
from jrl.objectives.array_pairs import simpo_loss as simpo_loss
from jrl.objectives.corrections import Correction as Correction
from jrl.objectives.corrections import named_correction as named_correction
from jrl.objectives.distill import divergence as divergence
from jrl.objectives.distill import divergence_in_loss as divergence_in_loss
from jrl.objectives.distill import forward_kl as forward_kl
from jrl.objectives.distill import generalized_jsd as generalized_jsd
from jrl.objectives.distill import reverse_kl as reverse_kl
from jrl.objectives.distill import top_k_divergence as top_k_divergence
from jrl.objectives.distill import total_variation as total_variation
from jrl.objectives.kl import AdaptiveCoef as AdaptiveCoef
from jrl.objectives.kl import k1 as k1
from jrl.objectives.kl import k2 as k2
from jrl.objectives.kl import k3 as k3
from jrl.objectives.normalizers import beta_normalised as beta_normalised
from jrl.objectives.normalizers import decoupled_parts as decoupled_parts
from jrl.objectives.normalizers import exponential_weights as exponential_weights
from jrl.objectives.normalizers import scale_to_informative as scale_to_informative
from jrl.objectives.policy import combine_terms as combine_terms
from jrl.objectives.policy import compute_advantages as compute_advantages
from jrl.objectives.policy import policy_loss as policy_loss
from jrl.objectives.policy import term_counts as term_counts
from jrl.objectives.policy import update_state as update_state
from jrl.objectives.ratios import Ratio as Ratio
from jrl.objectives.ratios import Rule as Rule
from jrl.objectives.ratios import bounded as bounded
from jrl.objectives.ratios import clip as clip
from jrl.objectives.ratios import clip_between as clip_between
from jrl.objectives.ratios import clipped_ratio as clipped_ratio
from jrl.objectives.ratios import free as free
from jrl.objectives.ratios import gate as gate
from jrl.objectives.ratios import nll as nll
from jrl.objectives.ratios import product as product
from jrl.objectives.ratios import ratio_loss as ratio_loss
from jrl.objectives.ratios import reinforce as reinforce
from jrl.objectives.ratios import segment as segment
from jrl.objectives.ratios import sequence as sequence
from jrl.objectives.ratios import sequence_token as sequence_token
from jrl.objectives.ratios import tapered as tapered
from jrl.objectives.ratios import token as token
from jrl.objectives.ratios import weight as weight
from jrl.objectives.regularizers import entropy_bonus as entropy_bonus
from jrl.objectives.regularizers import kl_in_loss as kl_in_loss
from jrl.objectives.regularizers import positive_nll as positive_nll
from jrl.objectives.regularizers import value_loss as value_loss
from jrl.objectives.transforms import centre as centre
from jrl.objectives.transforms import chain as chain
from jrl.objectives.transforms import identity as identity
from jrl.objectives.transforms import kl_in_reward as kl_in_reward
from jrl.objectives.transforms import mask_truncated as mask_truncated
from jrl.objectives.transforms import overlong_penalty as overlong_penalty
from jrl.objectives.transforms import per_group as per_group
from jrl.objectives.transforms import stateless as stateless
from jrl.objectives.transforms import whiten as whiten
from jrl.types import Aggregate as Aggregate
from jrl.types import Objective as Objective
from jrl.types import Regularizer as Regularizer
from jrl.types import Statistic as Statistic
from jrl.types import Surrogate as Surrogate
from jrl.types import Transform as Transform
