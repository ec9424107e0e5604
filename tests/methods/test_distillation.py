"""The methods of distillation.py against float64 references, and what their papers state."""

import jax
import numpy as np
import pytest
from harness import as_batch, check, live_statistics, numbers, ragged, run, sequences

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.objectives import compute_advantages, policy_loss


def sequence_means(d, each):
    rows = [np.mean([each((n, i, t)) for t in tokens]) for n, i, tokens in sequences(d)]
    return sum(rows) / max(len(rows), 1)


def token_means(d, each):
    rows = [each((n, i, t)) for n, i, tokens in sequences(d) for t in tokens]
    return sum(rows) / max(len(rows), 1)


# ---------------------------------------------------------------- GKD


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"divergence": "reverse"}, "reverse_from_teacher"),
        ({"beta": 0.1, "demonstrations": 1}, "jsd_0.1_from_teacher"),
    ],
)
def test_gkd_is_the_mean_divergence_of_a_completion(options, name):
    def reference(d, frozen):
        return sequence_means(d, lambda at: getattr(d, name)[at])

    def prepare(d, rng):
        setattr(d, name, numbers(rng, *d.mask.shape) ** 2)

    method = get_method("gkd", **options)
    assert [(s.name, s.policies) for s in method.objective.statistics] == [
        (name, ("policy", "teacher"))
    ]
    assert method.objective.frozen == {"teacher"}
    check(method, reference, wrt=(name,), prepare=prepare, batches=((0, 0.3),))


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_sampled_gkd_estimates_by_the_drawn_tokens(kind):
    """f(r) for the value; f(r) - r f'(r), which is 0 at r = 1, for the gradient."""
    beta = 0.3

    def f(r):
        m = beta * r + 1 - beta
        values = {"forward": r * np.log(r), "reverse": -np.log(r)}
        return values.get(kind, beta * r * np.log(r) - m * np.log(m))

    def reference(d, frozen):
        def each(at):
            log_r = frozen.teacher_logprobs[at] - frozen.logprobs[at]
            r, h = np.exp(log_r), 1e-6
            slope = (f(r * (1 + h)) - f(r * (1 - h))) / (2 * h * r)
            at_one = (f(1 + h) - f(1 - h)) / (2 * h)
            weight = f(r) - r * slope + at_one
            return f(r) + weight * (d.logprobs[at] - frozen.logprobs[at])

        return sequence_means(d, each)

    batches = ((0, 0.3), (1, 0.05))
    check(get_method("gkd", divergence=kind, beta=beta, over="sampled"), reference, batches=batches)


def test_gkd_over_the_teacher_s_likeliest_tokens_minimises_that_divergence():
    name = "forward_top_64_cut_from_teacher"

    def reference(d, frozen):
        return sequence_means(d, lambda at: getattr(d, name)[at])

    def prepare(d, rng):
        setattr(d, name, numbers(rng, *d.mask.shape) ** 2)

    method = get_method("gkd", divergence="forward", top_k=64, tail="cut")
    assert [s.name for s in method.objective.statistics] == [name]
    check(method, reference, wrt=(name,), prepare=prepare, batches=((0, 0.3),))
    with pytest.raises(UserError, match=r"gkd.over = 'sampled' with gkd.top_k = 2"):
        get_method("gkd", over="sampled", top_k=2)
    with pytest.raises(UserError, match=r"gkd.tail = 'gone'; give one of renormalised, cut"):
        get_method("gkd", top_k=2, tail="gone")


def test_sampled_gkd_refuses_demonstrations():
    with pytest.raises(UserError, match=r"gkd.over = 'sampled' with gkd.demonstrations = 2"):
        get_method("gkd", over="sampled", demonstrations=2)


# ---------------------------------------------------------------- MiniLLM, on-policy distillation


def test_on_policy_distillation_rewards_each_token_by_the_teacher():
    def reference(d, frozen):
        def each(at):
            ratio = np.exp(np.clip(frozen.logprobs[at] - d.sampler_logprobs[at], -20, 20))
            a = d.teacher_logprobs[at] - d.sampler_logprobs[at]
            return -min(ratio, 1 + 1.5) * a * d.logprobs[at]

        return token_means(d, each)

    check(get_method("on_policy_distillation", cap=1.5), reference)


def test_on_policy_distillation_has_the_sampled_reverse_divergence_s_gradient_on_policy():
    d = ragged(5, n=1, g=1)
    d.mask[:], d.members[:] = True, True
    d.live[:] = True
    d.sampler_logprobs = d.logprobs
    _, one = run(get_method("on_policy_distillation"), d)
    _, other = run(get_method("gkd", divergence="reverse", over="sampled"), d)
    np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-6)


# ---------------------------------------------------------------- metrics


def test_the_divergence_is_reported():
    d = ragged(8)
    method = get_method("gkd", over="sampled", divergence="reverse")
    objective = method.objective

    @jax.jit
    def reported(batch, stats):
        advantages, batch, state, _ = compute_advantages(objective, batch, objective.init())
        return policy_loss(objective, stats, batch, advantages, state)[1]["divergence"]

    total, count = reported(as_batch(d), live_statistics(method, d))
    expected = (d.logprobs - d.teacher_logprobs)[d.live].mean()
    assert total / count == pytest.approx(expected, rel=1e-4)
