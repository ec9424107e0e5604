"""Relatives of GRPO with other rewards or normalisations.

Notation as in ``methods.group_relative``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp

from jrl.errors import UserError
from jrl.methods.base import Method, entropy_term
from jrl.methods.definition import variant
from jrl.methods.domains import Choice, Ddof, NonNegative, Positive
from jrl.methods.edit import of_parts
from jrl.methods.group_relative import grpo
from jrl.objectives import aggregates, normalizers, transforms
from jrl.types import Array, Rollout


@variant(grpo)
def bnpo(base: Method, normalise: Annotated[str, Choice(("beta", "group"))] = "beta") -> Method:
    """Advantages scaled by a Beta density fitted to the batch, and a token mean.

    "BNPO: Beta Normalization Policy Optimization" (arXiv:2506.02864), p being a group's mean reward
    and a, b the Beta distribution with the mean and sample variance that p has over the batch's
    groups:

        A_i = (r_i - p) / f(p; 1 + a / 3, 1 + b / 3)
        loss = -1/(sum_i |o_i|) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)

    Rewards are to lie in [0, 1]. Departures: a, b come from the batch at hand, by moments, with
    a + b of at most 300, where the released code holds 1/f below 1e6; one score is normalised, not
    each part of it as in the paper's decomposition. What TRL calls bnpo is its token mean over the
    batch with GRPO's advantages: ``normalise="group"``, which alone reads ``eps`` and ``ddof``.
    """
    if normalise == "beta":
        base = base.with_(advantage=normalizers.beta_normalised())
    return base.with_(aggregate=aggregates.token_mean)


@variant(grpo)
def gdpo(base: Method, eps: Positive, ddof: Ddof) -> Method:
    """GRPO with every reward part normalised in its group before the parts are added up.

    "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
    Optimization" (arXiv:2601.05242), with r_k the parts and w_k their weights:

        S_i = sum_k w_k (r_ik - mean(r_k)) / std(r_k),   A_i = (S_i - mean(S)) / std(S)

    the first over the group, the second over the batch's completions; then the loss of GRPO.
    Departures: ``eps`` is added to each part's deviation and 1e-8 to the batch's variance, as in
    the authors' release for verl, whose second normalisation is over tokens; the one for TRL is
    over completions, as here, and adds 1e-4 to both deviations.
    """
    parts = normalizers.decoupled_parts(eps=eps, ddof=ddof)
    return base.with_(advantage=transforms.chain(parts, transforms.whiten("sequences", ddof=ddof)))


# ---------------------------------------------------------------- rewards of agents


def reward_parts(method: str, parts: Array, names: Sequence[str]) -> tuple[Array, ...]:
    """The reward parts [N, G] one by one; their number is that of the names, or it is refused."""
    if parts.shape[2] != len(names):
        text = ", ".join(names)
        raise UserError(f"{method} with {parts.shape[2]} reward parts; give {len(names)}: {text}")
    return tuple(jnp.moveaxis(parts, 2, 0))


def as_first(score: Array, shape_source: Array) -> Array:
    """Parts [N, G, R]: the score, then zeros."""
    return jnp.stack([score, *[jnp.zeros_like(score)] * (shape_source.shape[2] - 1)], axis=2)


@variant(grpo)
def car(base: Method, separation: NonNegative = 1.0) -> Method:
    """GRPO of answers with a stated confidence, which pays for being right and for knowing it.

    CAR of "The Confidence Dichotomy: Analyzing and Mitigating Miscalibration in Tool-Use Agents"
    (arXiv:2601.07264), c being 1 for a right answer and p the confidence that stands beside it:

        r = (1 + m) c - (c - p)^2

    with m = ``separation``: -1 to 0 for a wrong answer and m to 1 + m for a right one, so that the
    two ranges are apart and no honest mistake is worth an answer; the best p is the chance to be
    right at any m. Two reward parts are read, c and p, in that order; the reward function
    "confidence" gives p. Give the first a weight of 1. In episodes both may be parts of the
    environment, or functions beside it. Departures: the paper's formula could not be read, only
    accounts of it, by which its margin-separated reward has terms of its own for right and wrong
    answers and pays any right one more; this is the plainest such score, and m is a guess. With 0
    it is that of "Beyond Binary Rewards: Training LMs to Reason About Their Uncertainty"
    (arXiv:2507.16806).
    """
    names = "right", "confidence"

    def calibrated(parts: Array, rollout: Rollout) -> Array:
        right, confidence = reward_parts("car", parts, names)
        return as_first((1 + separation) * right - jnp.square(right - confidence), parts)

    return base.with_(rewards=of_parts(calibrated), parts=names)


@variant(grpo)
def tool_star(base: Method, bonus: NonNegative = 0.1) -> Method:
    """GRPO of answers found with several tools, paid in the order form, answer, use of tools.

    "Tool-Star: Empowering LLM-Brained Multi-Tool Reasoner via Reinforcement Learning"
    (arXiv:2505.16410), three reward parts being the form (1 or 0), the answer's score and whether
    both tools were called:

        r = -1 where the form is broken, else 0 where the answer's score is 0,
            else score + 0.1 where all tools were used, else score

    as the released code has it. What tools return is read and not trained on. The paper starts from
    supervised training, and ends with DPO on pairs of the policy's own (``online_iterative_dpo``).
    ``data.env = "multi_hop"`` with ``tools = ["search", "python"]`` has both tools; its ``reward``
    is the answer's, and the reward functions "format" and "tools_used" beside it are the other two
    (docs/rewards.md).
    """
    names = "form", "answer", "tools used"

    def ordered(parts: Array, rollout: Rollout) -> Array:
        form, score, used = reward_parts("tool_star", parts, names)
        correct_scores = jnp.where(score > 0, score + bonus * (used > 0), score * 0)
        broken = jnp.where(jnp.isnan(form + score), jnp.nan, -1)
        return as_first(jnp.where(form > 0, correct_scores, broken), parts)

    return base.with_(rewards=of_parts(ordered), parts=names)


@variant(grpo, kl_coef=0.001)
def zerosearch(base: Method) -> Method:
    """GRPO of answers found with a search that another model plays, and plays worse and worse.

    "ZeroSearch: Incentivize the Search Capability of LLMs without Searching" (arXiv:2505.04588): a
    result is useful or noise, the latter at step i of m with the chance

        p_i = p_s + (b^(i/m) - 1) / (b - 1) (p_e - p_s),   b = 4

    and A_i = (r_i - mean(r)) / std(r) of the answers' F1 goes with

        loss = -1/(sum_i |o_i|) sum_i sum_t [min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)
                                             - beta k3_t]

    over drawn tokens: documents are read and not trained on. ``zoo.envs.zero_search.zero_search``
    is the search, with the model behind an endpoint and ``reward = "f1"``. beta (``kl_coef``),
    groups of 5 and p from 0 to 0.5 are the released scripts'; the paper trains as well with
    ``reinforce_plus_plus`` and ``ppo`` in the same environment. Departures: a mean over the batch's
    tokens, where the code takes that of each microbatch.
    """
    return base.with_(aggregate=aggregates.token_mean)


@variant(grpo, clip_high=0.28)
def doctoragent_rl(base: Method, entropy_coef: NonNegative = 0.001) -> Method:
    """GRPO of complete consultations, scored by the rewards of their turns, with an entropy bonus.

    "DoctorAgent-RL: A Multi-Agent Collaborative Reinforcement Learning System for Multi-Turn
    Clinical Dialogue" (arXiv:2505.19630). A doctor asks a patient, another model, and a turn earns

        r_k = 1 for a question that is answered, -1 for one that the patient cannot answer,
              -2 for one asked before or a turn of no known form, -5 for running out of turns,
              0 to 10 for a diagnosis with its recommendation
        R_i = sum of r_k over the turns of episode i,   A_i = (R_i - mean(R)) / std(R)
        loss = -1/(sum_i |o_i|) sum_i sum_t [min(rho_t A_i, clip(rho_t, 1 - 0.2, 1 + 0.28) A_i)
                                             + c H_t]

    over drawn tokens, H_t the policy's entropy. ``zoo.envs.players.consultation`` is the
    environment; it draws each group's number of turns, 2 to 10, and tells the doctor. c
    (``entropy_coef``), the bounds, groups of 8 and no divergence from a reference are the released
    script's, which begins with supervised training. Departures: a mean over the batch's tokens,
    where the code takes that of each microbatch; the code clips twice, at 3 (``dual_clip``), and
    draws a number of turns for each episode, where here the members of a group share one, as they
    are compared.
    """
    return base.with_(aggregate=aggregates.token_mean).plus(*entropy_term(entropy_coef))
