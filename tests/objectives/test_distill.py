"""Divergences against float64 sums, TRL, and each other; what sampled tokens say of them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives.distill import (
    KINDS,
    TAILS,
    between,
    divergence,
    forward_kl,
    generalized_jsd,
    on_top_k,
    reverse_kl,
    sampled_divergence,
    teacher_reward_to_go,
    top_k_divergence,
    top_k_of,
    total_variation,
)

FIXTURES = pathlib.Path(__file__).parent.parent / "methods" / "fixtures"
V = 6


def distributions(seed, dead=()):
    """Logits [V] in float64, -inf at the tokens that a truncation removed."""
    logits = np.random.default_rng(seed).normal(size=V) * 2
    logits[list(dead)] = -np.inf
    return logits


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def kl(p, q):
    return sum(
        a * (np.log(a) - np.log(b)) if b > 0 else np.inf for a, b in zip(p, q, strict=True) if a > 0
    )


def expected(kind, student, teacher, beta=0.3):
    q, p = softmax(student), softmax(teacher)
    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.fixture(scope="module")
def value_and_slope():
    """kind -> (student's logits, teacher's) -> divergence and its gradient by the former."""

    def of(kind):
        measure = between(kind, 0.3)

        def value(student, teacher):
            return measure(jax.nn.log_softmax(student), jax.nn.log_softmax(teacher))

        return jax.jit(jax.value_and_grad(value))

    return {kind: of(kind) for kind in KINDS}


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", [(), (1, 4)])
def test_divergences_are_the_sums_of_their_definition(kind, dead, value_and_slope):
    """Also when both leave out the same tokens: those add nothing, also no gradient."""
    for seed in range(4):
        student, teacher = distributions(seed, dead), distributions(seed + 100, dead)
        value, slope = value_and_slope[kind](f32(student), f32(teacher))
        assert value == pytest.approx(expected(kind, student, teacher), rel=1e-5, abs=1e-6)
        for v in range(V):
            if v in dead:
                assert slope[v] == 0
                continue
            step = 1e-5 * (np.arange(V) == v)
            up, down = (expected(kind, student + s, teacher) for s in (step, -step))
            assert slope[v] == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-5)


def test_distributions_with_other_supports(value_and_slope):
    """A token that only one of them has: infinite where weighed, finite for Jensen-Shannon."""
    narrow, wide = distributions(0, (2,)), distributions(1)
    assert value_and_slope["reverse"](f32(wide), f32(narrow))[0] == np.inf
    assert value_and_slope["forward"](f32(narrow), f32(wide))[0] == np.inf
    cases = [("reverse", narrow, wide), ("forward", wide, narrow)]
    cases += [("jsd", narrow, wide), ("jsd", wide, narrow)]
    for kind, student, teacher in cases:
        value, slope = value_and_slope[kind](f32(student), f32(teacher))
        assert value == pytest.approx(expected(kind, student, teacher), rel=1e-5)
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_stay_finite_and_nan_stays_nan(kind, value_and_slope):
    far = f32(np.array([200.0, -200.0, 0, 0, 0, 0]))
    for value in jax.tree.leaves(value_and_slope[kind](far, -far)):
        assert np.isfinite(value).all()
    with_nan = far.at[1].set(jnp.nan)
    assert np.isnan(value_and_slope[kind](with_nan, far)[0])
    assert np.isnan(value_and_slope[kind](far, with_nan)[0])


def test_equal_distributions_are_no_distance_apart(value_and_slope):
    for kind in KINDS:
        value, slope = value_and_slope[kind](f32(distributions(3)), f32(distributions(3)))
        assert value == pytest.approx(0, abs=1e-6)
        np.testing.assert_allclose(slope, 0, atol=1e-6)


def test_the_generalised_divergence_tends_to_the_others():
    student, teacher = (jax.nn.log_softmax(f32(distributions(s))) for s in (5, 6))
    near = generalized_jsd(student, teacher, 1e-3) / 1e-3
    assert near == pytest.approx(float(forward_kl(student, teacher)), rel=3e-2)
    near = generalized_jsd(student, teacher, 0.999) / 1e-3
    assert near == pytest.approx(float(reverse_kl(student, teacher)), rel=3e-2)


def test_total_variation_is_half_the_sum_of_differences():
    one, other = distributions(7), distributions(8, (0,))
    distance = total_variation(jax.nn.log_softmax(f32(one)), jax.nn.log_softmax(f32(other)))
    assert distance == pytest.approx(np.abs(softmax(one) - softmax(other)).sum() / 2, rel=1e-5)


def test_trl_computes_the_same():
    """TRL's ends of beta, 0 and 1, are the forward and the reverse divergence."""
    stored = json.loads((FIXTURES / "trl_pairs.json").read_text())["jsd"]
    student, teacher = (f32(stored[f"{role}_logits"]) for role in ("student", "teacher"))
    mask = np.asarray(stored["mask"], bool)
    for case in stored["cases"]:
        kind = {0.0: "forward", 1.0: "reverse"}.get(case["beta"], "jsd")
        measure = between(kind, case["beta"])

        def loss(logits, measure=measure):
            each = jax.vmap(jax.vmap(measure))(
                jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
            )
            return jnp.where(mask, each, 0).sum() / mask.sum()

        value, slope = jax.jit(jax.value_and_grad(loss))(student)
        assert value == pytest.approx(case["loss"], rel=1e-5)
        np.testing.assert_allclose(slope, np.asarray(case["gradient"]), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_have_the_divergence_and_its_gradient_on_average(kind):
    """The sum over all tokens that might be drawn, each with its probability."""
    student, teacher = f32(distributions(9)), jax.nn.log_softmax(f32(distributions(10)))
    surrogate, measure = sampled_divergence(kind, 0.3), between(kind, 0.3)
    chances = jax.nn.softmax(student)

    def sampled(logits):
        stats = {"logprobs": jax.nn.log_softmax(logits), "teacher_logprobs": teacher}
        return surrogate.apply(stats, jnp.zeros(V), jnp.ones(V, bool))[0] @ chances

    def of_logits(logits):
        return measure(jax.nn.log_softmax(logits), teacher)

    (value, slope), (exact, exact_slope) = (
        jax.value_and_grad(f)(student) for f in (sampled, of_logits)
    )
    assert value == pytest.approx(float(exact), rel=1e-5)
    np.testing.assert_allclose(slope, exact_slope, atol=1e-5)


def test_a_token_s_reward_to_go_is_the_mean_over_the_tokens_after_it(make_batch):
    mask = np.array([[[1, 0, 1, 1], [1, 1, 1, 1]]], bool)
    gap = np.array([[[1.0, 9.0, 2.0, 4.0], [0.0, 1.0, 0.0, np.nan]]])
    stats = {"sampler_logprobs": 0 * mask, "teacher_logprobs": gap}
    batch = make_batch(np.zeros((1, 2)), mask, stats=stats)
    mean, _, _ = teacher_reward_to_go().apply(batch.score(), batch, ())
    assert mean[0, 0].tolist() == [3, 0, 4, 0]
    assert np.isnan(mean[0, 1, :3]).all()
    total, _, _ = teacher_reward_to_go(normalise=False).apply(batch.score(), batch, ())
    assert total[0, 0].tolist() == [6, 0, 4, 0]


def test_unknown_divergences_are_named():
    for build in (between, divergence, sampled_divergence):
        with pytest.raises(UserError, match="divergence = 'revers'; did you mean 'reverse'"):
            build("revers")


def test_statistics_of_several_divergences_live_side_by_side():
    names = {
        divergence(*x).name for x in (("reverse",), ("jsd",), ("jsd", 0.1), ("jsd", 0.1, "ref"))
    }
    assert len(names) == 4


# ---------------------------------------------------------------- the teacher's likeliest tokens


def released_top_k(kind, tail, student, teacher, k, beta=0.3):
    """The losses of NeMo-RL, ROLL and verl, and the one with a bucket, in float64."""
    q, p = softmax(student), softmax(teacher)
    top = np.argsort(-p, kind="stable")[:k]
    rest = np.setdiff1d(np.arange(len(p)), top)
    if tail == "renormalised":
        q, p = q[top] / q[top].sum(), p[top] / p[top].sum()
    elif tail == "bucket" and len(rest):
        q, p = (np.append(x[top], x[rest].sum()) for x in (q, p))
    elif tail == "floor":
        left = p[top] / p[top].sum()
        if kind == "reverse":  # NeMo-RL's correction: H_rest - log_infinitesimal P_rest
            head = (q[top] * (np.log(q[top]) - np.log(left))).sum()
            return head + (q[rest] * np.log(q[rest])).sum() + 100 * q[rest].sum()
        p = np.full(len(p), np.exp(-100.0))
        p[top] = left
    else:
        q, p = q[top], p[top]
    if kind == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    return kl(p, q) if kind == "forward" else kl(q, p)


@pytest.fixture(scope="module")
def top_k_slope():
    """(kind, tail) -> (student's logits, teacher's) -> the statistic and its gradients."""

    def of(kind, tail, k):
        apply = top_k_divergence(kind, k, tail, 0.3).apply

        def value(student, teacher):
            names = {"policy": student, "teacher": teacher}
            return apply({n: jax.nn.log_softmax(x) for n, x in names.items()}, jnp.int32(0))

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))

    return of


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_divergences_are_those_of_the_released_codes(kind, tail, top_k_slope):
    for k in (2, V):
        slope = top_k_slope(kind, tail, k)
        for seed in range(3):
            student, teacher = distributions(seed), distributions(seed + 50)
            value, (gradient, none) = slope(f32(student), f32(teacher))
            reference = released_top_k(kind, tail, student, teacher, k)
            assert value == pytest.approx(reference, rel=1e-4, abs=1e-6)
            assert not none.any(), "nothing is learned by the teacher"
            for v, step in enumerate(1e-6 * np.eye(V)):
                up, down = (
                    released_top_k(kind, tail, student + s, teacher, k) for s in (step, -step)
                )
                assert gradient[v] == pytest.approx((up - down) / 2e-6, rel=2e-3, abs=1e-4)
            if k == V:
                divergence = expected(kind, student, teacher)
                assert value == pytest.approx(divergence, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("tail", ["renormalised", "cut", "bucket"])
def test_tokens_that_both_truncations_removed_add_nothing_to_a_top_k_divergence(tail, top_k_slope):
    student, teacher = distributions(0, (1, 4)), distributions(1, (1, 4))
    value, (gradient, _) = top_k_slope("forward", tail, 5)(f32(student), f32(teacher))
    assert value == pytest.approx(released_top_k("forward", tail, student, teacher, 4), rel=1e-4)
    assert np.isfinite(gradient).all()


def test_the_bucket_holds_what_is_left_and_bounds_the_divergence_from_below():
    student, teacher = (jax.nn.log_softmax(f32(distributions(s))) for s in (3, 53))
    divergence = float(forward_kl(student, teacher))
    bounds = [float(forward_kl(*on_top_k(student, top_k_of(teacher, k), "bucket"))) for k in (1, 3)]
    assert 0 < bounds[0] < bounds[1] < divergence
    assert np.exp(on_top_k(student, top_k_of(teacher, 2), "bucket")[0]).sum() == pytest.approx(1)


def test_an_unknown_tail_names_the_choices():
    with pytest.raises(UserError, match="tail = 'gone'"):
        top_k_divergence(tail="gone")
