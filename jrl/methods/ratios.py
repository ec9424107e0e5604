"""Relatives of GRPO that differ in the ratio, or in how it holds the policy back.

Each function says its paper's formula with r the reward of a completion, A its advantage, that of
GRPO unless another is given, and rho_t = pi_t / mu_t the ratio of token t under the policy being
trained to the one that drew it. All else is as in ``grpo``.
"""

from __future__ import annotations

from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import NonNegative
from jrl.methods.group_relative import grpo
from jrl.objectives import ratios
from jrl.objectives.aggregates import token_mean

CLIPS = ("clip_low", "clip_high", "dual_clip")


@variant(grpo, clip_low=3e-4, clip_high=4e-4)
def gspo(base: Method) -> Method:
    """GRPO with one ratio per completion: the geometric mean of its tokens' ratios, clipped.

    "Group Sequence Policy Optimization" (arXiv:2507.18071):

        s_i = exp(1/|y_i| sum_t log rho_t)
        loss = -1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

    at the paper's clip bounds. |y_i| counts trained tokens.
    """
    return base.with_(ratio=ratios.sequence)


@variant(grpo, without=("dual_clip",), clip_low=1.0, clip_high=4.0)
def cispo(base: Method, clip_low: NonNegative, clip_high: NonNegative) -> Method:
    """REINFORCE with clipped importance weights: no token ever loses its gradient to clipping.

    CISPO of "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (arXiv:2506.13585):

        loss = -1/(sum_i |o_i|) sum_i sum_t sg(clip(rho_t, 1 - low, 1 + high)) A_i log pi_t

    The paper sets no lower bound (``clip_low`` 1 does that) and does not give the upper one;
    weights up to 5 are those of ``scale_rl``. Departure: no dynamic sampling and length penalty of
    DAPO.
    """
    return base.with_(rule=ratios.bounded(1 - clip_low, 1 + clip_high), aggregate=token_mean)


@variant(grpo, without=("dual_clip",), clip_low=0.4, clip_high=0.4)
def gmpo(base: Method, clip_low: NonNegative, clip_high: NonNegative) -> Method:
    """The geometric mean over tokens of ratios that are clipped one by one, in place of GRPO's.

    "Geometric-Mean Policy Optimization" (arXiv:2507.20673):

        loss = -1/G sum_i A_i exp(1/|o_i| sum_t d_t),  d_t = log rho_t, held to at most clip_high
        where A_i > 0 and to at least -clip_low where A_i < 0

    The paper's clip is (e^-0.4, e^0.4), so the bounds are nats.
    """
    return base.with_(ratio=ratios.geometric_clipped(clip_low, clip_high), rule=ratios.free)
