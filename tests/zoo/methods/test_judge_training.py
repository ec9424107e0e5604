"""Judges that are trained by their verdicts, RISE-Judge's second stage and FARE: a toy judge.

The judge is a distribution over written judgments for each row, softmax of logits; what it learns
from is the reward ``judge_verdict`` of those that it samples.
"""

import json

import numpy as np
import pytest
from harness import ragged, run
from preferences import dpo, mean_of_pairs

from jrl.methods import get_method
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt

N, G = 4, 6
JUDGMENTS = {
    "pairwise": ["A is shorter. [[A]]", "B is kinder. [[B]]", "Both are fine. [[C]]", "Hm."],
    "step": ["\\boxed{-1}", "Step 0 divides by 0: \\boxed{0}", "\\boxed{1}", "It is right."],
    "yes_no": ["Verdict: yes", "It does not follow.\nVerdict: no", "Perhaps.", "yes and no"],
    "score": [json.dumps({"score": 7}), "Score: 8", "Score: 11", "7 or 8"],
}
LABELS = {"pairwise": "ABBA", "step": [-1, 0, 1, 0], "yes_no": ["yes", "no"] * 2, "score": "7887"}


def softmax(logits):
    each = np.exp(logits - logits.max(-1, keepdims=True))
    return each / each.sum(-1, keepdims=True)


def judged(form, drawn):
    """[N, G] float64: the rewards of judgments, by their number."""
    pay = make_reward("judge_verdict", form=form)
    tokens = np.zeros(1, np.int32)
    prompts = [Prompt(n, "?", tokens, label) for n, label in enumerate(LABELS[form])]
    texts = [[JUDGMENTS[form][k] for k in row] for row in drawn]
    return np.array(
        [
            [pay([Sample(prompt, text, tokens, "stop_token")])[0] for text in row]
            for prompt, row in zip(prompts, texts, strict=True)
        ]
    )


def step(method, logits, first, drawn, rewards):
    """(loss, gradient [N, V] of the logits, the batch)."""
    rows = np.arange(N)[:, None]
    d = ragged(0, n=N, g=G, t=1)
    d.mask[:], d.members[:], d.live[:], d.truncated[:] = True, True, True, False
    d.lengths[:] = 1
    d.rewards = rewards
    now, before = (np.log(softmax(x)[rows, drawn])[..., None] for x in (logits, first))
    d.logprobs, d.sampler_logprobs, d.proximal_logprobs, d.ref_logprobs = now, now, now, before
    loss, gradients = run(method, d)
    slope = gradients["logprobs"][..., 0]
    out = -slope.sum(1, keepdims=True) * softmax(logits)
    np.add.at(out, (rows, drawn), slope)
    return loss, out, d


rise = mean_of_pairs(lambda chosen, rejected: dpo(chosen, rejected, beta=1.0))
"""DPO on a judgment with the label and one without, over the first judge."""


@pytest.mark.parametrize("form", JUDGMENTS)
@pytest.mark.parametrize("name", ["online_dpo", "psr"])
def test_a_toy_judge_learns_the_labels(name, form):
    """From one that has seen the style of judgments alone: all are as likely."""
    method = get_method(name, **({"beta": 1.0} if name == "online_dpo" else {}))
    right = [judged(form, np.full((N, G), k))[:, 0] for k in range(4)]
    assert np.array_equal(np.sum(right, 0), np.ones(N))  # one judgment has the label of a row
    rng, first = np.random.default_rng(0), np.zeros((N, 4))
    logits = first.copy()
    for _ in range(40):
        chances = softmax(logits)
        drawn = np.array([rng.choice(4, G, p=p) for p in chances])
        rewards = judged(form, drawn)
        loss, slope, d = step(method, logits, first, drawn, rewards)
        if name == "psr":  # the negative likelihood of those that are right, over all
            expected = -(rewards * np.log(chances)[np.arange(N)[:, None], drawn]).sum() / (N * G)
        else:
            expected = rise(d, d)
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
        logits -= 4.0 * slope
    assert (softmax(logits) * np.transpose(right)).sum(1).min() > 0.9
    drawn = rng.integers(0, 4, (N, G))
    _, slope, _ = step(method, first, first, drawn, np.zeros((N, G)))
    assert not slope.any()  # what has no label among it teaches nothing
