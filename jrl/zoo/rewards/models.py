"""Reward models as single papers read them: keys of ``[rewards.NAME]``, by name of the paper.

    [rewards.principled]
    function = "rlbff"
    path = "DIR"                 # the model; any other key replaces the paper's

Each function returns keys of ``config.reward_model``.
"""

from __future__ import annotations

from typing import Any


def rlbff() -> dict[str, Any]:
    """Yes or No to a principle: the reward is log p(Yes) - log p(No) of the next token, in nats.

    "RLBFF: Binary Flexible Feedback to bridge between Human Feedback & Verifiable Rewards"
    (arXiv:2509.21319): reward modelling as entailment of a principle by a response,

        r(x, y, c) = log p(Yes | x, y, c) - log p(No | x, y, c)

    where c is the principle: the key ``principle``, or each row's column of that name. The path is
    that of a language model. Departures: this is the scalar model; the generative one, which
    reasons first, is a judge (``function = "judge"``, ``form = "yes_no"``). The difference of
    log-probabilities is the authors' description of their published models, the wording of the
    question is ours; ``template`` has that of a model at hand.
    """
    return {
        "answers": ["Yes", "No"],
        "template": [
            {
                "role": "user",
                "content": "{conversation}\n\nDoes the last response fulfil this principle:"
                " {principle}? Answer Yes or No.",
            }
        ],
    }


def rlmt() -> dict[str, Any]:
    """The score of what follows the thinking, which the reward model does not see.

    "Language Models that Think, Chat Better" (arXiv:2509.20357): the policy draws a chain of
    thought z, then a response y, and what is maximised is

        E[ r(x, y) ]

    by a reward model trained on preferences, over both z and y, with GRPO, PPO or online DPO. A
    completion that never ends its thinking has no response; here it has no opinion, and with
    ``missing = "zero"`` 0 points. Departures: the end of thinking is "</think>", as reasoning
    models of today write it; ``after`` names another.
    """
    return {"after": "</think>"}


def rluf() -> dict[str, Any]:
    """The probability that a user would love the response.

    "Reinforcement Learning from User Feedback" (arXiv:2505.14946): a classifier of logged binary
    feedback, P[Love] = sigmoid(f(x, y)), is one of several rewards in a weighted sum, beside
    helpfulness and safety, each a part of its own with its ``weight``. The classifier is trained on
    completions with scores 1 and 0 by the binary cross-entropy, which is ``prm`` without steps.
    Departures: the paper's optimiser of several objectives and its weights are not known.
    """
    return {"link": "sigmoid"}


def helpsteer2() -> dict[str, Any]:
    """A weighted sum of the five attributes that HelpSteer2's reward models predict, each 0 to 4.

    "HelpSteer2: Open-source dataset for training top-performing reward models" (arXiv:2406.08673),
    with the weights of the authors' Llama3-70B-SteerLM-RM:

        0.65 helpfulness + 0.8 correctness + 0.45 coherence + 0.55 complexity - 0.4 verbosity

    The checkpoint's ``id2label`` has these names. ``helpsteer2_regression`` trains such a
    head, of which ``labels`` go by place; ``steerlm2`` conditions the policy on attributes.
    """
    return {
        "labels": {
            "helpfulness": 0.65,
            "correctness": 0.8,
            "coherence": 0.45,
            "complexity": 0.55,
            "verbosity": -0.4,
        }
    }


def pav() -> dict[str, Any]:
    """Change of a prover's chance of success over each step, at the step's end.

    "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning" (arXiv:2410.08146).
    The process reward of step a_h is its advantage under a prover mu other than the policy,

        A(s_h, a_h) = Q(s_h, a_h) - Q(s_(h-1), a_(h-1)),   Q(s, a) = P(mu is right from there)

    with Q a model that ``pav_verifier`` trained, of which ``path`` is the run directory, or a
    checkpoint that reads text, of which steps are paragraphs. The
    weight is the paper's alpha: 0.5 for 2B and 9B, 0.2 for 27B. ``method = "pav"`` learns from it.
    Departures: the first step counts from the mean of the group's first steps, where the paper has
    the prover's chance from the prompt alone.
    """
    return {"by": "progress", "link": "sigmoid"}


def upo() -> dict[str, Any]:
    """A pass, or all ten, of an estimator with Monte Carlo dropout.

    "Self-Evolutionary Large Language Models through Uncertainty-Enhanced Preference Optimization"
    (arXiv:2409.11212): dropout 0.1 stays on when pairs are judged, ten times. ``single_pass`` says
    which pass a part is; ``method = "upo"`` reads ten parts of weight 0. Without it the passes are
    an ensemble, of which ``ensemble = "deviation"`` takes the uncertainty off. Departures: dropout
    is before the head, where the released code has it within adapters of every layer, and a pass
    has one mask for all texts; the estimator scores single completions, the paper's reads a pair.
    """
    return {"dropout": 0.1, "passes": 10}


def fact_rlhf() -> dict[str, Any]:
    """The score of a reward model that is shown facts which the policy does not see.

    "Aligning Large Multimodal Models with Factually Augmented RLHF" (arXiv:2309.14525): captions,
    or the right option, stand beside the prompt,

        r(x, facts, y)

    so that the model need not know what it can read. ``facts`` is a column of the data. The method
    ``fact_rlhf`` is PPO with the paper's further rewards. Departures: the wording is ours.
    """
    return {
        "template": [
            {"role": "user", "content": "{question}\n\nFacts:\n{facts}"},
            {"role": "assistant", "content": "{completion}"},
        ]
    }
