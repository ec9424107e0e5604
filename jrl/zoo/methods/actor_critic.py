"""Relatives of ``ppo``, whose coefficients they inherit, and whose departures hold for them."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.methods.actor_critic import ppo
from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Fraction, Positive, Whole
from jrl.methods.edit import of_parts
from jrl.methods.schedule import refreshed
from jrl.objectives import normalizers, ratios, transforms
from jrl.types import Array, Batch, Rollout, Statistic, Stats, Surrogate, Transform
from jrl.zoo.networks.policies import train_policies

CORRECTION = ("correction", "correction_cap", "correction_low")
RATIO = ("clip_low", "clip_high", "dual_clip", *CORRECTION)
"""Coefficients of ``ppo`` that mean nothing to a loss without ratios."""


@variant(
    ppo,
    without=(*RATIO, "epochs"),
    gae_lambda=1.0,
    whiten=False,
    value_clip=None,
    entropy_coef=0.01,
)
def a2c(base: Method) -> Method:
    """The policy gradient with a learned baseline and an entropy bonus, no ratio and no clip.

    The synchronous form of the actor-critic of "Asynchronous Methods for Deep Reinforcement
    Learning" (arXiv:1602.01783):

        loss = mean over tokens of [-A_t log pi_t + c_1 (R_t - V_t)^2 / 2 - c_2 H_t]

    with R_t the reward to the end of the completion and A_t = R_t - V_t. Departures: one batch in
    place of asynchronous workers; no discount (the paper has 0.99); ``gae_lambda`` below 1 takes
    generalised estimates in place of returns.
    """
    return base.with_(surrogate=ratios.reinforce()._replace(on_policy=True))


@variant(ppo, without=RATIO, value_clip=None)
def awr(base: Method, temperature: Positive = 1.0, weight_cap: Positive = 20.0) -> Method:
    """Likelihood of the sampled tokens, weighted by the exponential of their advantages.

    "Advantage-Weighted Regression: Simple and Scalable Off-Policy Reinforcement Learning"
    (arXiv:1910.00177):

        loss = -mean over tokens of min(exp(A_t / beta), cap) log pi_t + c_1 value_loss

    with A_t the TD(lambda) return less the value. It reads no ratio: the samples may be old. Beta
    (``temperature``), cap and lambda are the released code's, as is ``whiten``, which the formula
    lacks. Departures: policy and value network learn at the same time, from the batch at hand in
    place of a replay buffer; no discount.
    """
    base = base.after(normalizers.exponential_weights(temperature, weight_cap))
    return base.with_(surrogate=ratios.reinforce())


# ---------------------------------------------------------------- NLPO


def in_nucleus(logprobs: Array, top_p: float, min_tokens: int = 1) -> Array:
    """[V] bool: the fewest most probable tokens that hold ``top_p``, ties included.

    ``logprobs`` [V] are -inf where a truncation removed the token; ``min_tokens`` are in anyway.

    >>> in_nucleus(jnp.log(jnp.array([0.1, 0.5, 0.4])), 0.6).tolist()
    [False, True, True]
    """
    chex.assert_rank(logprobs, 1)
    ordered = -jnp.sort(-logprobs)
    before = jnp.cumsum(jnp.exp(ordered)) - jnp.exp(ordered)
    in_set = (before < top_p) | (jnp.arange(ordered.shape[0]) < min_tokens)
    least = jnp.min(jnp.where(in_set, ordered, jnp.inf))
    return (logprobs >= least) & (logprobs > -jnp.inf)


def nucleus_statistics(
    top_p: float, mask_policy: str, min_tokens: int = 1
) -> tuple[Statistic, ...]:
    """Statistics read by ``keep_nucleus`` and ``on_nucleus``.

    Returns:
      "in_nucleus" 1 or 0 and "rollout_nucleus_logprob", both at the start of the step, and
      "nucleus_logprob", which carries gradient.
    """

    def inside(distributions: Stats, token: Array) -> Array:
        nucleus = in_nucleus(distributions[mask_policy], top_p, min_tokens)
        return nucleus[token].astype(jnp.float32)

    def restricted(distributions: Stats, token: Array) -> Array:
        policy = distributions["policy"]
        allowed = in_nucleus(distributions[mask_policy], top_p, min_tokens) & (policy > -jnp.inf)
        # The token itself always counts: where it is not allowed, the token is not trained on.
        allowed = allowed | (jnp.arange(policy.shape[0]) == token)
        return policy[token] - jax.nn.logsumexp(jnp.where(allowed, policy, -jnp.inf))

    return (
        Statistic("in_nucleus", inside, (mask_policy,), start=True),
        Statistic("rollout_nucleus_logprob", restricted, ("policy", mask_policy), start=True),
        Statistic("nucleus_logprob", restricted, ("policy", mask_policy)),
    )


def keep_nucleus(statistics: tuple[Statistic, ...]) -> Transform:
    """Takes tokens outside of the nucleus out of the loss; brings the statistics of the start."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        outside = batch.stats["in_nucleus"] < 0.5  # a NaN stays in, and shows
        return values, batch.replace(mask=batch.mask & ~outside)

    brought = tuple(s for s in statistics if s.start)
    return transforms.stateless(apply, statistics=brought)


def on_nucleus(inner: Surrogate, statistics: tuple[Statistic, ...]) -> Surrogate:
    """A surrogate of ratios to the sampler, now between distributions within the nucleus."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        renamed = stats | {
            "logprobs": stats["nucleus_logprob"],
            "sampler_logprobs": stats["rollout_nucleus_logprob"],
        }
        return inner.apply(renamed, advantages, mask)

    no_needs = frozenset[str]()
    return Surrogate(apply, no_needs, statistics=statistics, labels=inner.labels, on_policy=True)


def against_policy(transform: Transform, name: str) -> Transform:
    """A transform that reads ``ref_logprobs``, made to read those of another frozen policy."""
    if "ref_logprobs" not in transform.needs:
        return transform
    source = f"{name}_logprobs"

    def apply(values: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        original = {n: x for n, x in batch.stats.items() if n == "ref_logprobs"}
        renamed = batch.with_stats(ref_logprobs=batch.stats[source])
        values, renamed, state = transform.apply(values, renamed, state)
        rest = {n: x for n, x in renamed.stats.items() if n != "ref_logprobs"}
        return values, renamed.replace(stats={**rest, **original}), state

    needs = (transform.needs - {"ref_logprobs"}) | {source}
    return transform._replace(apply=apply, needs=needs)


@variant(
    ppo,
    without=CORRECTION,
    discount=0.99,
    kl_target=0.2,
    value_clip=None,
    epochs=5,
)
def nlpo(
    base: Method, top_p: Fraction = 0.9, sync_steps: Count = 20, min_tokens: Count = 1
) -> Method:
    """PPO on the nucleus of a masking policy, an older copy of the policy.

    NLPO of "Is Reinforcement Learning (Not) for Natural Language Processing: Benchmarks, Baselines,
    and Building Blocks for Natural Language Policy Optimization" (arXiv:2210.01241). With
    pi' the policy's distribution restricted to the fewest tokens that hold ``top_p`` of the masking
    policy's probability:

        r_t = score at the last token, minus beta log(pi_t / pi_0,t) at every token
        A_t = GAE(discount, lambda)
        loss = mean over tokens of [-min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
                                    + value_coef value_loss_t],   rho_t = pi'_t / pi'_old,t

    The masking policy is the run's reference, made anew from the policy every ``sync_steps`` steps
    (the paper's mu). Defaults are the released code's; its tasks have ``top_p`` 0.9 (0.5 in
    translation), mu 20 (IMDB: 5), beta 0.001 (IMDB 0.1, dialogue 0.2) steered to 0.2 (IMDB 0.1,
    CommonGen 2), and some keep at least 100 tokens (``min_tokens``). Departures: beta (``kl_coef``)
    is 0 unless given, because pi_0 then has to be there as the frozen policy "teacher". The sampler
    draws from the whole distribution, and tokens outside the nucleus are left out of the loss:
    those inside are drawn as from pi'. The code always allows special tokens. The value loss is as
    in ``ppo``, without its clip.
    """
    statistics = nucleus_statistics(top_p, "ref", min_tokens)
    return base.with_(
        advantage=against_policy(base.objective.advantage, "teacher"),
        surrogate=on_nucleus(base.objective.surrogate, statistics),
        schedule=base.schedule._replace(after=refreshed(sync_steps)),
        lacks="a sampler that draws within the nucleus of another policy",
    ).before(keep_nucleus(statistics))


# ---------------------------------------------------------------- agents


@variant(ppo, gae_lambda=1.0, kl_coef=0.01)
def meow_tea_taro(base: Method) -> Method:
    """PPO on episodes whose every turn is paid: the recipe for agents in text games.

    The recipe of "A Practitioner's Guide to Multi-turn Agentic Reinforcement Learning"
    (arXiv:2510.01132): a few demonstrations first (``warmup``), simple environments before complex
    ones, and dense rewards by turn, each at the last token that the policy drew in the turn:

        A_t = GAE(1, 1) over drawn tokens, the loss of ``ppo``

    The discount and the penalty of 0.01 a nat in the reward are the authors' script's; lambda 1 is
    the default of the trainer that it calls.
    """
    return base


@variant(ppo)
def retool(base: Method, correct: Positive = 1.0) -> Method:
    """PPO on reasoning that runs code: 1 point for a right answer, -1 for any other.

    "ReTool: Reinforcement Learning for Strategic Tool Use in LLMs" (arXiv:2504.11536):

        r = 1 where the final answer is right, else -1

    with PPO's loss on drawn tokens alone: what the interpreter printed is read and not trained on.
    An answer is right where the first reward part reaches ``correct`` points. The paper starts from
    supervised training on traces with code. ``configs/gsm8k_python.toml`` has the tool.
    """

    def outcome(parts: Array, rollout: Rollout) -> Array:
        first = jnp.where(parts[..., :1] >= correct, 1.0, -1.0)
        first = jnp.where(jnp.isnan(parts[..., :1]), jnp.nan, first)
        return jnp.concatenate([first, parts[..., 1:]], -1)

    return base.with_(rewards=of_parts(outcome))


@variant(ppo, discount=0.99, kl_coef=0.005, kl_target=0.5, value_clip=None, epochs=5)
def dsp(base: Method) -> Method:
    """PPO on a hint for another model: the reward is that of the other model's answer.

    "Guiding Large Language Models via Directional Stimulus Prompting" (arXiv:2302.11520), z being a
    hint, written by a small policy and put into the prompt of a model that is not trained:

        r = metric(answer of the other model to (x, z)) - beta log(pi(z | x) / pi_0(z | x))

    with beta steered to ``kl_target`` nats a token, and PPO's loss; the released runs take that of
    ``nlpo``. ``zoo.envs.players.guided_env`` has the other model answer. The numbers are those of
    the released summarisation runs; for dialogue they have beta 0.01 and 0.2 nats.
    """
    return base


@variant(ppo, kl_coef=0.4, value_coef=0.1, epochs=4)
def cory(base: Method, policies: Count = 2, swap_every: Whole = 5) -> Method:
    """PPO for two players, one of whom sees the other's answer first; both get both rewards.

    "Coevolving with the Other You: Fine-Tuning LLM with Sequential Cooperative Multi-Agent
    Reinforcement Learning" (arXiv:2410.06101). A pioneer answers y1 ~ pi_1(. | x), an observer
    y2 ~ pi_2(. | x, y1), and

        r = r(x, y1) + r(x, y2) - beta KL to the reference     for each of them

    with PPO's estimates and loss, each player's answer being an episode of its own. Both policies
    begin alike, and swap players after ``swap_every`` steps; the first is the one that is kept.
    ``zoo.envs.players.pair_env`` has them play. beta, value coefficient, passes and swaps are those
    of the released IMDB run, in which beta is steered to 6 nats a completion, the divergence is
    over the whole vocabulary, and moments are forgotten at a swap. With ``policies`` 1 one policy
    plays both players.
    """
    if policies == 1:
        return base
    return train_policies(base, policies, swap_every)
