"""The methods of rlhf.py: PPO of other scores, and GEPO against a float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    clipped_loss,
    members_of,
    ragged,
    ratio,
    run,
    standard_score,
    tokens_of,
)

from jrl.methods import get_method
from jrl.models.soup import average
from jrl.objectives import compute_advantages
from jrl.types import SILENT
from jrl.zoo.methods.rlhf import lagrangian

WRT = ("logprobs", "values")


def same_losses(one, other, tolerance=1e-5):
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    for name in WRT:
        np.testing.assert_allclose(one[1][name], other[1][name], atol=tolerance)


def test_salsa_is_ppo_held_to_the_soup():
    d = ragged(0)
    salsa = get_method("salsa", kl_coef=0.3)
    value, gradients = run(salsa, d, WRT)
    same_losses((value, gradients), run(get_method("ppo", kl_coef=0.3), d, WRT), 0)
    assert "ref" in salsa.objective.frozen
    d.ref_logprobs = d.ref_logprobs - 1  # another soup is another loss
    assert run(salsa, d, WRT)[0] != value


def test_rlhf_summarize_is_ppo_with_the_divergence_in_the_reward():
    d = ragged(0)
    one = run(get_method("rlhf_summarize", value_coef=0.5), d, WRT)
    same_losses(one, run(get_method("ppo", kl_coef=0.05), d, WRT), 1e-6)


def test_the_average_of_equal_checkpoints_is_that_checkpoint():
    tree = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.float32(2.5)}
    soup = average([tree, tree, tree])
    np.testing.assert_allclose(soup["a"]["w"], tree["a"]["w"], rtol=1e-6)
    np.testing.assert_allclose(soup["b"], tree["b"], rtol=1e-6)


def test_safe_rlhf_moves_its_multiplier_against_the_cost():
    step = lagrangian(budget=0.25, rate=0.5, initial=2.0, cap=2.5)
    d = ragged(0)
    d.rewards = np.stack([d.rewards, np.abs(d.rewards)], axis=-1)
    batch = as_batch(d)
    scores, _, state = step.apply(batch.score(), batch, step.init())
    expected = (d.rewards[..., 0] - 2 * d.rewards[..., 1]) / 3
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    cost = d.rewards[..., 1][d.members].mean()
    rises = np.log(2.0) + 0.5 * 2.0 * (cost - 0.25)
    assert float(state) == pytest.approx(min(rises, np.log(2.5)), abs=1e-6)
    assert cost > 0.25
    d.rewards[..., 1] = 0.0
    cheap = as_batch(d)
    _, _, after = step.apply(cheap.score(), cheap, step.init())
    assert float(after) == pytest.approx(np.log(2.0) - 0.25, abs=1e-6)


def test_a_cost_without_an_opinion_is_no_cost_of_0():
    d = ragged(0)
    d.rewards = np.stack([d.rewards, np.full_like(d.rewards, 2.0)], axis=-1)
    silent = np.zeros(d.members.shape, np.int32)
    silent[:, 0], d.rewards[:, 0, 1] = 2, 0.0  # the second part says nothing of the first member
    d.ids = {**d.ids, SILENT: silent}
    batch = as_batch(d)
    step = lagrangian(budget=0.0, rate=0.1, initial=1.0, cap=5.0)
    _, _, state = step.apply(batch.score(), batch, step.init())
    assert float(state) == pytest.approx(0.1 * 2.0, abs=1e-6)


def test_safe_rlhf_is_ppo_of_the_reward_less_the_cost():
    d = ragged(4)
    d.rewards = np.stack([d.rewards, np.abs(d.rewards)], axis=-1)
    ours = run(get_method("safe_rlhf", kl_coef=0.1), d, WRT)
    d.rewards = (d.rewards[..., 0] - d.rewards[..., 1]) / 2
    same_losses(ours, run(get_method("ppo", kl_coef=0.1), d, WRT))


def test_fact_rlhf_takes_points_for_tokens_and_for_cut_answers():
    d = ragged(4)
    assert d.truncated[d.members].any()
    ours = run(get_method("fact_rlhf"), d, WRT)
    d.rewards = d.rewards - 10 / 896 * d.mask.sum(2) - 8 * d.truncated
    same_losses(ours, run(get_method("ppo", kl_coef=0.1, gae_lambda=1.0, value_coef=0.1), d, WRT))


def test_mpo_is_ppo_on_prompts_whose_scores_are_close():
    d = ragged(4)
    ours = run(get_method("mpo", stage="ppo", threshold=1.2, kl_coef=0.1), d, WRT)
    hard = np.zeros(3, bool)
    for n in range(3):
        scores = [d.rewards[n, i] for i in members_of(d, n) if tokens_of(d, n, i)]
        hard[n] = np.ptp(scores) <= 1.2 if scores else True
    assert 0 < sum(hard) < 3
    d.members &= hard[:, None]
    same_losses(ours, run(get_method("ppo", kl_coef=0.1), d, WRT))


def test_gepo_adds_groups_of_equivalent_demonstrations_to_grpo():
    def reference(d, frozen):
        advantages = standard_score(
            d.__class__(**{**vars(d), "members": d.members & (np.arange(5) < 2)})
        )
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            pool = [i for i in members_of(d, n) if tokens_of(d, n, i)]
            count += bool(pool)
            mine = [i for i in pool if i < 2]
            for i in mine:
                tokens = tokens_of(d, n, i)
                losses = [clipped_loss(ratio(d, (n, i, t)), advantages[n, i]) for t in tokens]
                total += np.mean(losses) / len(mine)
            gap = d.logprobs[n] - d.ref_logprobs[n]
            reward = {i: 0.1 * gap[i, tokens_of(d, n, i)].sum() for i in pool if i >= 2}
            same = [r for i, r in reward.items() if d.rewards[n, i] > 0.5]
            other = [r for i, r in reward.items() if d.rewards[n, i] <= 0.5]
            if same and other:
                margin = np.mean(same) - np.mean(other)
                # The paper: weight 0.01, and 1 for the variance among equivalent ones.
                total += 0.01 * (np.logaddexp(0, -margin) + 1.0 * np.var(same))
        return total / max(count, 1)

    def both_kinds(d, rng):
        d.rewards[:, 2:] = [1, 0, 1]

    method = get_method("gepo", demonstrations=3)
    check(method, reference, g=5, demonstrations=3, prepare=both_kinds)


def numbers(seed, **shape):
    """Groups whose members are all there, with a token each."""
    d = ragged(seed, **shape)
    d.members[:], d.mask[..., 0] = True, True
    d.live = d.mask.copy()
    return d


def test_gepo_without_demonstrations_is_grpo():
    d = numbers(1)
    (one, a), (other, b) = run(get_method("gepo"), d), run(get_method("grpo"), d)
    assert one == pytest.approx(other, abs=1e-6)
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-6)
    assert np.abs(b["logprobs"]).max() > 1e-4


def test_the_variance_among_equivalent_demonstrations_is_part_of_gepo():
    """Two losses whose means are the same differ by the variance alone, as do their gradients."""
    d = numbers(1, g=3, demonstrations=3)
    d.rewards[:] = [1.0, 1.0, 0.0]
    d.ref_logprobs[:], d.logprobs[:] = 0.0, 0.0
    first = np.arange(d.mask.shape[2]) == 0
    d.logprobs[:, 0], d.logprobs[:, 1] = 3.0 * first, 1.0 * first
    keys = {"beta": 1.0, "gepo_coef": 1.0, "demonstrations": 3}
    without, flat = run(get_method("gepo", spread_coef=0.0, **keys), d)
    value, steep = run(get_method("gepo", spread_coef=0.5, **keys), d)
    assert without == pytest.approx(np.logaddexp(0, -2.0), rel=1e-5)
    assert value - without == pytest.approx(0.5 * np.var([3.0, 1.0]), rel=1e-5)
    # The slope of 0.5 var with respect to r_1: 0.5 * 2 (r_1 - mean) / 2, a mean over the groups.
    groups = d.live.any(axis=(1, 2)).sum()
    pulled = steep["logprobs"][:, :2, 0] - flat["logprobs"][:, :2, 0]
    np.testing.assert_allclose(pulled, np.tile([0.5, -0.5], (len(pulled), 1)) / groups, atol=1e-6)


def test_gepo_of_one_of_each_kind_is_dpo():
    d = numbers(1, g=2)
    d.rewards[:], d.external[:] = [1.0, 0.0], 1
    gepo = get_method("gepo", gepo_coef=1.0, spread_coef=0.0)
    (one, a), (other, b) = run(gepo, d), run(get_method("dpo"), d)
    assert one == pytest.approx(other, abs=1e-6)
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-6)
    assert np.abs(b["logprobs"]).max() > 1e-4


# ---------------------------------------------------------------- DR-IRL


def sigma(x):
    return 1 / (1 + np.exp(-x))


def hardness(d, parts, threshold):
    """DR-IRL's coefficients in float64, of the members 0 to 3; member 4 is the demonstration."""
    members = [(n, i) for n in range(len(parts)) for i in members_of(d, n) if i < 4]
    with_demonstration = [n for n in range(len(parts)) if d.members[n, 4]]
    gap = {(n, i): parts[n, 4, 0] - parts[n, i, 0] for n, i in members if n in with_demonstration}
    mean = np.mean(list(gap.values()))
    typical = [g for g in gap.values() if (g - mean) ** 2 <= threshold]
    responsive = sigma(np.mean(typical)) / sigma(mean) if typical else 1.0
    unlike = {at: 1 - parts[(*at, 1)] for at in members}
    middle = sigma(np.mean(list(unlike.values())))
    return {at: responsive * sigma(x) / middle for at, x in unlike.items()}, len(typical), len(gap)


def test_dr_irl_scales_advantages_by_words_and_worth():
    d = ragged(5, n=4, g=5, demonstrations=1)
    rng = np.random.default_rng(1)
    parts = np.stack([d.rewards, rng.random(d.rewards.shape)], axis=2)
    parts[..., 0] = rng.normal(size=d.rewards.shape)
    method = get_method("dr_irl", threshold=1.5)
    batch = as_batch(d)
    weights = np.array([1.0, 0.0], np.float32)
    batch = batch.replace(rewards=np.float32(parts), reward_weights=weights)
    objective = method.objective
    ours = jax.jit(lambda b: compute_advantages(objective, b, objective.init())[0])(batch)
    scale, some, every = hardness(d, parts, 1.5)
    assert 0 < some < every
    plain = d.__class__(**{**vars(d), "members": d.members & (np.arange(5) < 4)})
    expected = standard_score(plain, parts[..., 0])
    for at, factor in scale.items():
        live = d.mask[at]
        np.testing.assert_allclose(np.asarray(ours)[at][live], factor * expected[at], atol=1e-5)
    assert np.ptp(list(scale.values())) > 0.05


def test_dr_irl_does_not_train_on_its_demonstration():
    d = numbers(2, g=4, demonstrations=1)
    _, gradients = run(get_method("dr_irl"), d)
    assert not gradients["logprobs"][:, 3].any()
    assert gradients["logprobs"][:, :3].any()


def test_of_one_gap_dr_irl_is_grpo():
    """Without a part for words, and with every gap typical, nothing is scaled."""
    d = numbers(2, g=4, demonstrations=1)
    one = run(get_method("dr_irl", threshold=1e9), d)
    d.members[:, 3] = False
    other = run(get_method("grpo"), d)
    np.testing.assert_allclose(one[1]["logprobs"], other[1]["logprobs"], atol=1e-6)
