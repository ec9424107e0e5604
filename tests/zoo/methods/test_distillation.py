"""Distillation that single papers published, against float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import check, numbers, ragged, run, sequences

from jrl.methods import get_method
from jrl.zoo.methods.distillation import adaptive_teacher

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
