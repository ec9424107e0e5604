import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives.corrections import CORRECTIONS, Correction, named_correction
from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.ratios import (
    bounded,
    clamped,
    clip,
    clip_between,
    clipped_ratio,
    free,
    free_but,
    gamma,
    gate,
    geometric_clipped,
    near,
    nll,
    product,
    ratio_loss,
    recentred_clip,
    reinforce,
    score,
    segment,
    sequence,
    sequence_token,
    sum_of_means,
    tapered,
    token,
    weighted,
    with_parts,
)

RULES = {
    "clip": clip(),
    "dual clip": clip(dual_clip=3.0),
    "bounded": bounded(0.0, 5.0),
    "tapered": tapered(),
    "gamma": gamma(2.0, 3.0, 3.0, 2.0),
    "near tv": near("tv", 0.15, 0.15, 20.0),
    "near kl": near("kl", 0.05, 0.05, 20.0),
    "gate": gate(1.0, 1.05),
    "score": score,
}
RATIOS = {
    "token": token,
    "sequence": sequence,
    "sequence_token": sequence_token,
    "product": product,
    "segment": segment("step"),
    "geometric_clipped": geometric_clipped(0.4, 0.4),
    "clamped": clamped(1e3),
}
PARTS = {
    **{name: (token, rule) for name, rule in RULES.items()},
    **{f"{name} ratio": (ratio, clip()) for name, ratio in RATIOS.items()},
    "geometric_clipped free": (geometric_clipped(0.4, 0.4), free),
}


def stats_of(ratios, proximal=None):
    log = jnp.log(jnp.asarray(ratios, jnp.float32))
    sampler = jnp.full(log.shape, -1.0)
    stats = {"logprobs": sampler + log, "sampler_logprobs": sampler}
    if proximal is not None:
        stats["proximal_logprobs"] = sampler + jnp.log(jnp.asarray(proximal, jnp.float32))
        stats["logprobs"] = stats["proximal_logprobs"] + log
    return stats


def run(surrogate, stats, advantages, mask=None):
    """Losses, the gradient of their sum by logprobs, and metrics."""
    advantages = jnp.asarray(advantages, jnp.float32)
    mask = jnp.ones(advantages.shape, bool) if mask is None else jnp.asarray(mask)

    def total(logprobs):
        losses, metrics = surrogate.apply({**stats, "logprobs": logprobs}, advantages, mask)
        return losses.sum(), (losses, metrics)

    (_, (losses, metrics)), slope = jax.value_and_grad(total, has_aux=True)(stats["logprobs"])
    return np.asarray(losses), np.asarray(slope), metrics


def test_the_four_corners_of_the_clip():
    losses, slope, metrics = run(
        clipped_ratio(0.2, 0.3), stats_of([2.0, 0.5, 2.0, 0.5]), [1.0, 1.0, -1.0, -1.0]
    )
    np.testing.assert_allclose(losses, [-1.3, -0.5, 2.0, 0.8], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, -0.5, 2.0, 0], rtol=1e-6)
    assert metrics["clip_fraction_high"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_fraction_low"].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(metrics["ratio"], [2.0, 0.5, 2.0, 0.5], rtol=1e-6)


def test_inside_the_bounds_and_at_zero_advantage_nothing_is_clipped():
    losses, slope, metrics = run(clipped_ratio(), stats_of([1.1, 0.9, 9.0]), [1.0, -2.0, 0.0])
    np.testing.assert_allclose(losses, [-1.1, 1.8, 0], rtol=1e-6)
    np.testing.assert_allclose(slope, [-1.1, 1.8, 0], rtol=1e-6)
    assert not metrics["clip_fraction_high"].any()
    assert not metrics["clip_fraction_low"].any()


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    surrogate = clipped_ratio(dual_clip=3.0)
    losses, slope, metrics = run(surrogate, stats_of([5.0, 2.0, 5.0]), [-1.0, -1.0, 1.0])
    np.testing.assert_allclose(losses, [3.0, 2.0, -1.2], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, 2.0, 0], rtol=1e-6)
    assert metrics["clip_fraction_dual"].tolist() == [1, 0, 0]


def test_the_sequence_ratio_is_the_geometric_mean_over_live_tokens():
    stats = stats_of([2.0, 100.0, 0.5, 4.0])
    mask = [True, False, True, True]
    losses, slope, _ = run(ratio_loss(sequence, clip(5.0, 5.0)), stats, [1.0] * 4, mask)
    s = 4.0 ** (1 / 3)
    np.testing.assert_allclose(losses, [-s] * 4, rtol=1e-6)
    np.testing.assert_allclose(slope, [-4 * s / 3, 0, -4 * s / 3, -4 * s / 3], rtol=1e-5)


def test_the_token_form_keeps_each_gradient_at_its_own_token():
    surrogate = ratio_loss(sequence_token, clip(5.0, 5.0))
    losses, slope, _ = run(surrogate, stats_of([2.0, 0.5]), [1.0, -3.0])
    np.testing.assert_allclose(losses, [-1.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(slope, [-1.0, 3.0], rtol=1e-6)


def test_the_ratio_of_a_segment_is_the_geometric_mean_over_its_live_tokens():
    stats = {**stats_of([2.0, 100.0, 0.5, 4.0, 9.0]), "step": jnp.array([0, 0, 0, 1, 1])}
    mask = [True, False, True, True, True]
    surrogate = ratio_loss(segment("step"), clip(9.0, 9.0))
    assert (surrogate.needs, surrogate.labels) == ({"sampler_logprobs"}, {"step"})
    losses, slope, _ = run(surrogate, stats, [1.0] * 5, mask)
    np.testing.assert_allclose(losses, [-1, -1, -1, -6, -6], rtol=1e-5)
    # Each of the two losses pushes both of a segment's tokens; the dead one is in no segment.
    np.testing.assert_allclose(slope, [-1, 0, -1, -6, -6], rtol=1e-5)


def test_the_product_is_the_ratio_of_the_whole_sequence():
    losses, slope, _ = run(ratio_loss(product, free), stats_of([2.0, 3.0]), [1.0, 0.0])
    np.testing.assert_allclose(losses, [-6, 0], rtol=1e-5)
    np.testing.assert_allclose(slope, [-6, -6], rtol=1e-5)


@pytest.mark.parametrize(
    ("advantage", "mean", "pushed"),
    [(1.0, (1.5 * 0.5) ** 0.5, [0, 1]), (-1.0, (3.0 * 0.6) ** 0.5, [1, 0])],
)
def test_each_ratio_of_the_geometric_mean_is_clipped_by_the_advantages_sign(
    advantage, mean, pushed
):
    ratio = geometric_clipped(-float(np.log(0.6)), float(np.log(1.5)))
    losses, slope, metrics = run(ratio_loss(ratio, free), stats_of([3.0, 0.5]), [advantage] * 2)
    np.testing.assert_allclose(losses, [-advantage * mean] * 2, rtol=1e-5)
    np.testing.assert_allclose(slope, -advantage * mean * np.array(pushed), rtol=1e-5, atol=1e-6)
    assert metrics["clip_fraction_high"].tolist() == [advantage > 0, 0]
    assert metrics["clip_fraction_low"].tolist() == [0, advantage < 0]


def test_a_held_ratio_ends_at_its_limit():
    losses, slope, metrics = run(ratio_loss(clamped(4.0), clip()), stats_of([9.0, 2.0]), [-1.0] * 2)
    np.testing.assert_allclose(losses, [4.0, 2.0], rtol=1e-5)
    np.testing.assert_allclose(slope, [0, 2.0], rtol=1e-5)
    assert metrics["preclip_fraction"].tolist() == [1, 0]


def test_bounds_may_be_read_from_a_statistic():
    rule = clip_between(lambda s: (1 - s["room"], 1 + s["room"]), needs=frozenset({"room"}))
    stats = {**stats_of([2.0, 2.0]), "room": jnp.array([0.5, 9.0])}
    losses, slope, _ = run(ratio_loss(token, rule), stats, [1.0, 1.0])
    np.testing.assert_allclose(losses, [-1.5, -2.0], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, -2.0], rtol=1e-6)


def test_the_recentred_clip_follows_the_policy_at_the_start_of_the_step():
    stats = stats_of([1.1, 1.3], proximal=[3.0, 3.0])
    losses, slope, _ = run(ratio_loss(token, recentred_clip()), stats, [1.0, 1.0])
    np.testing.assert_allclose(losses, [-3.2, -3.2], rtol=1e-5)
    assert not slope.any()
    fresh = {**stats_of([1.1, 1.3]), "proximal_logprobs": stats["sampler_logprobs"]}
    for mine, theirs in zip(
        run(ratio_loss(token, recentred_clip()), fresh, [1.0, 1.0])[:2],
        run(clipped_ratio(), fresh, [1.0, 1.0])[:2],
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_a_bounded_weight_keeps_every_gradient():
    stats = stats_of([2.0, 0.5, 1.1])
    losses, slope, metrics = run(ratio_loss(token, bounded(0.8, 1.3)), stats, [1.0, 1.0, -1.0])
    np.testing.assert_allclose(slope, [-1.3, -0.8, 1.1], rtol=1e-6)
    np.testing.assert_allclose(losses, slope * np.asarray(stats["logprobs"]), rtol=1e-6)
    assert metrics["clip_fraction_high"].tolist() == [1, 0, 0]
    assert metrics["clip_fraction_low"].tolist() == [0, 1, 0]


def test_a_tapered_weight_shrinks_bad_sequences_alone():
    surrogate = ratio_loss(product, tapered())
    for ratios, advantage, weight in (([2.0, 2.0], 1, 1), ([0.5, 0.5], -1, 0.25), ([3, 1], -1, 1)):
        _, slope, metrics = run(surrogate, stats_of(ratios), [advantage] * 2)
        np.testing.assert_allclose(slope, [-advantage * weight] * 2, rtol=1e-5)
        np.testing.assert_allclose(metrics["weight"], [weight] * 2, rtol=1e-5)


def test_the_score_rule_is_reinforce_but_may_be_corrected():
    stats = stats_of([2.0, 0.5], proximal=[3.0, 0.5])
    plain = run(reinforce(), stats, [1.0, -2.0])
    ours = run(ratio_loss(token, score), stats, [1.0, -2.0])
    corrected = run(ratio_loss(token, score, Correction()), stats, [1.0, -2.0])
    outside = run(weighted(reinforce(), Correction()), stats, [1.0, -2.0])
    for k in (0, 1):
        np.testing.assert_allclose(ours[k], plain[k])
        np.testing.assert_allclose(corrected[k], plain[k] * [2.0, 0.5], rtol=1e-5)
        np.testing.assert_allclose(corrected[k], outside[k], rtol=1e-6)


def test_a_sum_of_means_divides_each_sequence_by_its_own_length():
    surrogate = sum_of_means(reinforce())
    assert surrogate.over == "group"
    logprobs = jnp.array([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    losses, _ = surrogate.apply({"logprobs": logprobs}, jnp.ones((2, 3)), mask)
    assert jnp.where(mask, losses, 0).tolist() == [[0.5, 1.0, 0.0], [3.0, 0.0, 0.0]]


def test_a_part_changes_alone():
    before = ratio_loss(sequence, clip(), Correction(), 0.1)
    after = with_parts(before, rule=free)
    assert after.parts == before.parts._replace(rule=free)
    assert with_parts(nll(), correction=None).apply is not None
    assert with_parts(nll(), correction=Correction()).needs == {
        "sampler_logprobs",
        "proximal_logprobs",
    }


def test_a_part_that_a_surrogate_lacks_is_refused():
    with pytest.raises(UserError, match="has no rule to change"):
        with_parts(reinforce(), rule=free)
    with pytest.raises(UserError, match="has no correction to change"):
        with_parts(sum_of_means(reinforce()), correction=Correction())


def test_reinforce_and_nll_read_nothing_but_logprobs():
    stats = {"logprobs": jnp.array([-1.0, -2.0])}
    assert reinforce().needs == nll().needs == frozenset()
    losses, slope, _ = run(reinforce(), stats, [2.0, -1.0])
    assert losses.tolist() == [2.0, -2.0]
    assert slope.tolist() == [-2.0, 1.0]
    losses, slope, _ = run(nll(), stats, [np.nan, 5.0])
    assert losses.tolist() == [1.0, 2.0]
    assert slope.tolist() == [-1.0, -1.0]


# ---------------------------------------------------------------- corrections

WEIGHTS = [0.25, 1.0, 1.5, 8.0]
BY_SEQUENCE = ("sequence ratio", "product", "segment", "geometric")
"""Names of ratios through which a loss pushes several tokens."""


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction("none"), [1, 1, 1, 1]),
        (Correction("truncate", "token", 0.0, 2.0), [0.25, 1, 1.5, 2]),
        (Correction("truncate", "token", 0.5, 2.0), [0.5, 1, 1.5, 2]),
        (Correction("mask", "token", 0.5, 2.0), [0, 1, 1.5, 0]),
        (Correction("truncate", "sequence", 0.0, 9.0), [3, 3, 3, 3]),
        (Correction("truncate", "sequence", 0.0, 2.0), [2, 2, 2, 2]),
        (Correction("mask", "sequence", 0.0, 2.0), [0, 0, 0, 0]),
        (Correction("mask", "geometric", 0.5, 2.0), [3**0.25] * 4),
        (Correction("reject", "geometric", 0.5, 2.0), [1] * 4),
        (Correction("reject", "geometric", 0.5, 1.1), [0] * 4),
    ],
)
@pytest.mark.parametrize("name", PARTS)
def test_each_correction_multiplies_the_loss_by_its_weight(name, correction, expected):
    proximal = {**stats_of([1.05] * 4, proximal=WEIGHTS), "step": jnp.zeros(4, int)}
    plain = {**proximal, "sampler_logprobs": proximal["proximal_logprobs"]}
    one = [1.0] * 4
    losses, slope, metrics = run(ratio_loss(*PARTS[name], correction), proximal, one)
    plain_losses, plain_slope, _ = run(ratio_loss(*PARTS[name]), plain, one)
    np.testing.assert_allclose(metrics["correction_weight"], expected, rtol=1e-5)
    np.testing.assert_allclose(losses, plain_losses * expected, rtol=1e-5)
    if len(set(expected)) == 1 or not name.startswith(BY_SEQUENCE):
        np.testing.assert_allclose(slope, plain_slope * expected, rtol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_needs_follow_the_correction(name):
    labels = {"step"} if name == "segment ratio" else set()
    plain, corrected = ratio_loss(*PARTS[name]), ratio_loss(*PARTS[name], Correction())
    assert plain.needs == {"sampler_logprobs"}
    assert corrected.needs == {"sampler_logprobs", "proximal_logprobs"}
    assert plain.labels == corrected.labels == labels


# ---------------------------------------------------------------- guards


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("gap", [-1e30, -200.0, 200.0, 1e30])
def test_no_finite_gap_overflows(name, gap):
    sampler = jnp.zeros(3)
    stats = {"sampler_logprobs": sampler, "logprobs": sampler + jnp.float32(gap)}
    stats["step"] = sampler
    for advantage in (-10.0, 10.0):
        losses, slope, metrics = run(ratio_loss(*PARTS[name]), stats, [advantage] * 3)
        assert np.isfinite(losses).all()
        assert np.isfinite(slope).all()
        if "ratio" in metrics:
            assert (metrics["ratio"] <= np.exp(LOG_RATIO_LIMIT) * 1.001).all()


@pytest.mark.parametrize("correction", [None, *(c for c in CORRECTIONS if c != "none")])
@pytest.mark.parametrize("name", PARTS)
def test_a_nan_anywhere_live_is_not_hidden(name, correction):
    chosen = named_correction(correction, 2.0) if correction else None
    surrogate = ratio_loss(*PARTS[name], chosen)
    # The log-probabilities below a ratio are not read where no ratio counts.
    unread = {"step"} | (set() if chosen or name != "score" else {"sampler_logprobs"})
    for spoiled in ("logprobs", "advantages", *surrogate.needs - unread):
        stats = {**stats_of([1.0, 1.0], proximal=[1.0, 1.0]), "step": jnp.zeros(2)}
        advantages = jnp.ones(2)
        if spoiled == "advantages":
            advantages = advantages.at[0].set(jnp.nan)
        else:
            stats[spoiled] = stats[spoiled].at[0].set(jnp.nan)
        losses, _, _ = run(surrogate, stats, advantages)
        assert np.isnan(losses[0]), spoiled


def test_shapes_are_checked():
    stats = stats_of([1.0, 1.0])
    with pytest.raises(AssertionError):
        clipped_ratio().apply(stats, jnp.ones(3), jnp.ones(3, bool))
    with pytest.raises(AssertionError):
        clipped_ratio().apply(stats, jnp.ones(2), jnp.ones(2))


# ---------------------------------------------------------------- trust regions


def test_a_sequence_is_dropped_where_the_policy_left_a_bad_completion_behind():
    surrogate = ratio_loss(off_policy_limit=0.3)
    far, near = [0.6, 0.6], [0.9, 0.9]
    for ratios, advantage, dropped in ((far, -1.0, 1), (near, -1.0, 0), (far, 1.0, 0)):
        losses, _, metrics = run(surrogate, stats_of(ratios), [advantage] * 2)
        assert metrics["off_policy"].tolist() == [dropped] * 2
        assert (losses == 0).all() == bool(dropped)


def test_the_soft_gate_falls_off_on_both_sides_and_keeps_the_slope_at_one():
    _, slope, _ = run(ratio_loss(token, gate(2.0, 2.0)), stats_of([1.0, 3.0, 0.1]), [1.0] * 3)
    assert slope[0] == pytest.approx(-1.0)
    assert abs(slope[1]) < 3.0 * 0.08
    assert abs(slope[2]) < 0.1


def test_the_gamma_weight_is_one_on_policy_and_shrinks_away_from_it():
    weights = []
    for ratio in (1.0, 0.5, 4.0):
        _, _, metrics = run(
            ratio_loss(product, gamma(2.0, 2.0, 3.0, 2.0)), stats_of([ratio, 1.0]), [1.0] * 2
        )
        weights.append(float(metrics["sequence_weight"][0]))
    assert weights[0] == pytest.approx(1.0)
    assert max(weights[1:]) < 0.9


def test_the_binary_divergence_drops_by_direction_and_limit():
    stats = {
        "sampler_logprobs": jnp.log(jnp.array([0.5, 0.5, 0.001])),
        "logprobs": jnp.log(jnp.array([0.8, 0.2, 0.1])),
    }
    for kind in ("tv", "kl"):
        surrogate = ratio_loss(token, near(kind, 0.15, 0.15, 20.0))
        up = run(surrogate, stats, [1.0] * 3)[1]
        down = run(surrogate, stats, [-1.0] * 3)[1]
        assert up[0] == 0
        assert down[0] != 0
        assert up[1] != 0
        assert down[1] == 0
    tv = run(ratio_loss(token, near("tv", 0.15, 0.15, 20.0)), stats, [1.0] * 3)[1]
    assert tv[2] == pytest.approx(-20.0)  # a hundredfold ratio, a small change of the distribution


def test_marked_tokens_are_pulled_back_and_rest_on_policy():
    stats = {**stats_of([1.0, 2.0, 2.0]), "marked": jnp.array([1.0, 1.0, 0.0])}
    losses, slope, _ = run(ratio_loss(token, free_but("marked", 0.5)), stats, [0.0] * 3)
    np.testing.assert_allclose(losses, [0, 0.5 * np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(slope, [0, 0.5, 0], atol=1e-6)


def test_an_unknown_divergence_is_refused():
    with pytest.raises(UserError, match="kl, tv"):
        near("js", 0.1, 0.1, 2.0)
