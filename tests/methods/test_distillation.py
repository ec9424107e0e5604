"""The methods of distillation.py against float64 references, and what their papers state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, live_statistics, numbers, ragged, run, sequences

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.distillation import adaptive_teacher
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


@pytest.mark.parametrize("normalise", [True, False])
def test_minillm_is_the_next_token_exactly_and_the_rest_by_policy_gradient(normalise):
    def reference(d, frozen):
        total, count = 0.0, 0
        for n, i, tokens in sequences(d):
            gaps = [d.teacher_logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
            for place, t in enumerate(tokens):
                later = gaps[place + 1 :]
                a = sum(later) / (len(later) if normalise else 1) if later else 0.0
                gap = d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t]
                ratio = np.exp(np.clip(gap, -20, 20))
                gain = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
                total += d.reverse_from_teacher[n, i, t] - gain
                count += 1
        return total / max(count, 1)

    def prepare(d, rng):
        d.reverse_from_teacher = numbers(rng, *d.mask.shape) ** 2

    method = get_method("minillm", normalise=normalise)
    check(method, reference, wrt=("logprobs", "reverse_from_teacher"), prepare=prepare)


def test_minillm_on_one_token_is_the_reverse_divergence():
    d = ragged(4, t=1)
    d.reverse_from_teacher = numbers(np.random.default_rng(0), *d.mask.shape)
    value, gradients = run(get_method("minillm"), d, ("logprobs", "reverse_from_teacher"))
    assert value == pytest.approx(d.reverse_from_teacher[d.live].mean(), rel=1e-5)
    assert not gradients["logprobs"].any()


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


# ---------------------------------------------------------------- AlignDistil


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def weighted_divergence(student, dpo, reverse, beta, beta2):
    w = beta2 * np.abs(softmax(dpo) - softmax(reverse)).sum() + 1e-3
    q, p = softmax(student), softmax(dpo + w * (dpo - reverse))
    return beta / w * sum(a * (np.log(a) - np.log(b)) for a, b in zip(q, p, strict=True))


@pytest.fixture(scope="module")
def adaptive():
    apply = adaptive_teacher(0.1, 2.0).apply

    def value(logits):
        return apply({k: jax.nn.log_softmax(x) for k, x in logits.items()}, jnp.int32(0))

    return jax.jit(jax.value_and_grad(value))


def test_align_distil_extrapolates_the_two_models_by_their_distance(adaptive):
    rng = np.random.default_rng(6)
    for _ in range(4):
        student, dpo, reverse = rng.normal(size=(3, 5))
        numbers = {"policy": student, "dpo": dpo, "reverse_dpo": reverse}
        value, slopes = adaptive({k: jnp.asarray(x, jnp.float32) for k, x in numbers.items()})
        assert value == pytest.approx(
            weighted_divergence(student, dpo, reverse, 0.1, 2.0), rel=1e-4
        )
        for v, step in enumerate(1e-5 * np.eye(5)):
            up, down = (
                weighted_divergence(student + s, dpo, reverse, 0.1, 2.0) for s in (step, -step)
            )
            assert slopes["policy"][v] == pytest.approx((up - down) / 2e-5, rel=2e-3, abs=1e-4)
        assert not slopes["dpo"].any()
        assert not slopes["reverse_dpo"].any()


def test_align_distil_between_equal_models_is_the_reverse_divergence(adaptive):
    student, dpo = np.random.default_rng(7).normal(size=(2, 5))
    logits = {k: jnp.asarray(x, jnp.float32) for k, x in {"policy": student, "dpo": dpo}.items()}
    value, _ = adaptive(logits | {"reverse_dpo": logits["dpo"]})
    q, p = softmax(student), softmax(dpo)
    assert value == pytest.approx(0.1 / 1e-3 * (q * (np.log(q) - np.log(p))).sum(), rel=1e-3)


def test_align_distil_under_truncation_and_nan(adaptive):
    half = jnp.array([0.0, 1.0, -jnp.inf, 0.5, -jnp.inf])
    value, slopes = adaptive({"policy": half, "dpo": half + 1.0, "reverse_dpo": half - half[1]})
    assert np.isfinite(value)
    assert np.isfinite(slopes["policy"]).all()
    with_nan = half.at[0].set(jnp.nan)
    for name in ("policy", "dpo", "reverse_dpo"):
        logits = dict.fromkeys(("policy", "dpo", "reverse_dpo"), half) | {name: with_nan}
        assert np.isnan(adaptive(logits)[0])


def test_align_distil_reads_two_frozen_models_and_either_kind_of_completion():
    method = get_method("align_distil")
    assert method.objective.frozen == {"dpo", "reverse_dpo"}
    assert method.draw.samples
    draw = get_method("align_distil", on_policy=False, beta2=10.0).draw
    assert (draw.samples, draw.demonstrations) == (False, 2)


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
