"""The methods of difficulty.py against loops written from their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    clipped_loss,
    mean_over,
    members_of,
    numbers,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
    tokens_of,
)

from jrl.errors import UserError
from jrl.methods.group_relative import dr_grpo, grpo
from jrl.objectives import aggregates, compute_advantages
from jrl.types import SILENT
from jrl.zoo.methods.difficulty import (
    CERTAINTY,
    LOGIT,
    chosen_logit,
    masa,
    observe_r1,
    prediction_rewards,
    scale_by_answer_entropy,
    scale_by_difficulty,
    seed_grpo,
    self_certainty,
    ucas,
    univg_r1,
)


def clipped(d, advantage, beta=0.0, rows="sequences", high=0.2, dual=None):
    """The clipped loss with the advantage of each token given by (n, i, t), and k3."""

    def of_token(*at):
        gap = d.ref_logprobs[at] - d.logprobs[at]
        kl = np.exp(gap) - gap - 1
        return beta * kl + clipped_loss(ratio(d, at), advantage(*at), 0.2, high, dual)

    return mean_over(d, of_token, rows)


# ---------------------------------------------------------------- SEED-GRPO


def seed_loss(d, frozen, alpha=0.8):
    def advantage(n, i, t):
        live = members_of(d, n)
        answers = d.ids.get("answer", d.rewards)
        group_answers = [answers[n, j] for j in live]
        shares = [group_answers.count(k) / len(live) for k in set(group_answers)]
        entropy = -sum(np.log(p) for p in shares) / len(shares)
        x = alpha * entropy / np.log(len(live)) if len(live) > 1 else 0.0
        mean = np.mean([d.rewards[n, j] for j in live])
        return (d.rewards[n, i] - mean) * max(1 - x, 0)

    return clipped(d, advantage, rows="sums") / 7


def with_answers(d, rng):
    d.ids["answer"] = rng.integers(0, 3, d.rewards.shape)


def with_few_rewards(d, rng):
    d.rewards = rng.choice([0.0, 0.5, 1.0], d.rewards.shape)


@pytest.mark.parametrize("prepare", [with_answers, with_few_rewards])
def test_seed_grpo_is_the_papers(prepare):
    check(seed_grpo(max_tokens=7, strength=0.8), seed_loss, prepare=prepare, g=6)
    assert seed_grpo.coefficients["strength"].default == 0.02


def test_seed_grpo_at_strength_0_or_with_one_answer_is_dr_grpo():
    d = ragged(3)
    expected, g_expected = run(dr_grpo(max_tokens=7), d)
    off = run(seed_grpo(max_tokens=7, strength=0.0), d)
    d.ids["answer"] = np.zeros_like(d.lengths)
    agreed = run(seed_grpo(max_tokens=7, shape="exponential"), d)
    for value, gradients in (off, agreed):
        assert value == pytest.approx(expected, abs=1e-6)
        np.testing.assert_allclose(gradients["logprobs"], g_expected["logprobs"], atol=1e-6)


# ---------------------------------------------------------------- UniVG-R1


def univg_loss(d, frozen, part=1):
    score = standard_score(d, d.rewards.sum(2), eps=1e-4)

    def advantage(n, i, t):
        m = np.mean([d.rewards[n, j, part] for j in members_of(d, n)])
        return score[n, i] * max(-np.log(max(0.02 + m, 1e-6)), 0)

    return clipped(d, advantage, 0.04)


def with_accuracy(d, rng):
    d.rewards = np.stack([d.rewards, rng.choice([0.0, 0.5, 1.0], d.rewards.shape)], axis=2)
    d.rewards[0, :, 1] = 1.0


def test_univg_r1_is_the_papers():
    check(univg_r1(curve="log", accuracy_part=1), univg_loss, prepare=with_accuracy)


def test_univg_r1_weighs_a_group_that_is_right_throughout_as_grpo_does():
    d = ragged(4)
    accuracy = np.ones_like(d.rewards)
    d.rewards = np.stack([accuracy, d.rewards], axis=2)
    value, gradients = run(univg_r1(), d)
    expected, g_expected = run(grpo(kl_coef=0.04, eps=1e-4), d)
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], g_expected["logprobs"], atol=1e-6)
    with pytest.raises(UserError, match="reward part 2 of 2"):
        run(univg_r1(accuracy_part=2), d)


# ---------------------------------------------------------------- UCAS


def ucas_advantages(d):
    shaped = np.zeros(d.mask.shape)
    logits, score = d.rollout_logit[d.live], standard_score(d)
    for n, i, tokens in sequences(d):
        sums = {j: d.rollout_certainty[n, j][d.live[n, j]].sum() for j in members_of(d, n)}
        spread = np.std(list(sums.values()), ddof=1) if len(sums) > 1 else 0.0
        z = (sums[i] - np.mean(list(sums.values()))) / (spread + 1e-6)
        a = score[n, i]
        scaled = a * np.exp(-0.25 * z) if a > 0 else a * np.exp(0.35 * z)
        for t in tokens:
            unit = (d.rollout_logit[n, i, t] - logits.min()) / np.ptp(logits)
            charged = scaled - 0.05 * unit
            shaped[n, i, t] = max(charged, 0) if scaled > 0 else charged if scaled < 0 else 0.0
    return shaped


def with_confidence(d, rng):
    d.rollout_certainty = np.abs(numbers(rng, *d.mask.shape))
    d.rollout_logit = numbers(rng, *d.mask.shape, scale=5.0)


def test_ucas_is_the_papers():
    def loss(d, frozen):
        shaped = ucas_advantages(d)
        return clipped(d, lambda n, i, t: shaped[n, i, t], rows="tokens", dual=3.0)

    check(ucas(), loss, prepare=with_confidence)


def test_ucas_without_its_coefficients_is_token_mean_grpo():
    d = ragged(5)
    with_confidence(d, np.random.default_rng(0))
    value, gradients = run(ucas(right=0.0, wrong=0.0, penalty=0.0), d)
    expected, g_expected = run(grpo(dual_clip=3.0).with_(aggregate=aggregates.token_mean), d)
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], g_expected["logprobs"], atol=1e-6)


def test_certainty_is_the_divergence_of_the_uniform_distribution_and_ignores_temperature():
    logits = np.array([0.3, -1.0, 2.0, 0.0])
    probs = np.exp(logits) / np.exp(logits).sum()
    distributions = {"logits": jnp.asarray(logits, jnp.float32), "policy": None}
    divergence = (0.25 * np.log(0.25 / probs)).sum()
    assert float(self_certainty(distributions, 0)) == pytest.approx(
        divergence + np.log(4), rel=1e-5
    )
    assert float(chosen_logit(distributions, 2)) == 2.0
    assert CERTAINTY.start
    assert LOGIT.start


def test_a_longer_completion_counts_as_surer():
    """Two completions of 2 and 1 tokens with flat logits: certainties 2 log 4 and log 4."""
    d = ragged(0, 1, 2, 2)
    d.members[:], d.mask[:] = True, [[[True, True], [True, False]]]
    d.rewards = np.array([[1.0, 0.0]])
    d.rollout_certainty = np.full((1, 2, 2), float(self_certainty({"logits": jnp.zeros(4)}, 0)))
    d.rollout_logit = np.zeros((1, 2, 2))
    objective = ucas(penalty=0.0).objective
    got = compute_advantages(objective, as_batch(d), objective.init())[0]
    z = np.array([0.5, -0.5]) * np.sqrt(2)
    expected = z * np.exp([-0.25 * z[0], 0.35 * z[1]])
    np.testing.assert_allclose(got[0, :, 0], expected, rtol=1e-4)


def test_no_token_of_a_right_completion_gets_a_negative_advantage():
    d = ragged(6)
    with_confidence(d, np.random.default_rng(1))
    objective = ucas(penalty=9.0).objective
    plain = grpo().objective
    shaped, before = (
        np.asarray(jax.jit(lambda b, o=o: compute_advantages(o, b, o.init())[0])(as_batch(d)))
        for o in (objective, plain)
    )
    assert (shaped[before > 0] >= 0).all()
    assert (shaped[(before > 0) & d.live] == 0).any()
    assert (shaped[before == 0] == 0).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", 1 - 0.5 * 0.5), ("exponential", np.exp(-0.25)), ("focal", 0.75**3)],
)
def test_advantages_fall_with_the_entropy_of_the_answers(shape, expected):
    d = ragged(0, 1, 4, 1)
    d.members[:] = True
    d.ids["answer"] = np.array([[3, 3, 8, 8]])  # log 2 of at most log 4
    scale = scale_by_answer_entropy(0.5, shape, 3.0)
    values, *_ = jax.jit(scale.apply)(jnp.ones((1, 4)), as_batch(d), ())
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_one_difficulty_for_the_whole_batch_is_that_of_its_mean_accuracy():
    d = ragged(1, 3, 4, 1)
    scale = scale_by_difficulty(over="batch")
    values, *_ = jax.jit(scale.apply)(jnp.ones((3, 4)), as_batch(d), ())
    weight = np.exp(1 - d.rewards[d.members].mean())
    np.testing.assert_allclose(np.asarray(values)[d.members], weight, rtol=1e-5)


def test_what_nobody_judged_is_no_hard_prompt():
    d = ragged(1, 2, 4, 1)
    d.members[:] = True
    d.rewards[:] = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    silent = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])  # no verdict, which is a reward of 0
    d.ids = {**d.ids, SILENT: silent}
    values, *_ = scale_by_difficulty().apply(jnp.ones((2, 4)), as_batch(d), ())
    np.testing.assert_allclose(values[0], np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(values[1], 1.0)


# ---------------------------------------------------------------- Observe-R1

OBSERVE = observe_r1(min_tokens=2)


def observe_loss(d, frozen, c=1.8, bonus=0.2, shortest_above=2):
    total = 0.0
    for n, i, tokens in sequences(d):
        live = members_of(d, n)
        right = [j for j in live if d.rewards[n, j] > 0.5]
        r = {j: d.rewards[n, j] for j in live}
        least = min((len(tokens_of(d, n, j)) for j in right), default=0)
        for j in right:
            r[j] += bonus * (len(tokens_of(d, n, j)) == least > shortest_above)
        p, mean = len(right) / len(live), sum(r.values()) / len(live)
        std = (sum((x - mean) ** 2 for x in r.values()) / max(len(live) - 1, 1)) ** 0.5
        a = 4 * c * p * (1 - p) * (r[i] - mean) / (std + 1e-9) if len(live) > 1 else 0.0
        total += sum(clipped_loss(ratio(d, (n, i, t)), a) for t in tokens) / len(tokens)
    return total / max(len(sequences(d)), 1)


def test_observe_r1_is_the_papers():
    check(OBSERVE, observe_loss, binary=True, g=6)


def test_half_right_without_a_bonus_is_grpo():
    d = ragged(1, binary=True)
    d.members[:] = True
    d.rewards[:] = [[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]
    d.live = d.mask & d.members[..., None]
    plain = observe_r1(scale=1.0, bonus=0.0)
    ours, theirs = run(plain, d), run(grpo(eps=1e-9), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_uniform_groups_have_no_gradient():
    d = ragged(1, binary=True)
    d.rewards[0], d.rewards[1] = 1.0, 0.0
    _, slope = run(OBSERVE, d)
    assert not slope["logprobs"][:2].any()


# ---------------------------------------------------------------- MASA

MASA = masa(passes=4)
EFFICIENT = masa(efficient=True, passes=4, cutoff=0.8)


def ask_twice(d, rng):
    """Groups 0 and 1 solve problems 7 and 8; groups 2 and 3 foretell them."""
    d.members[:] = rng.random(d.members.shape) < 0.9
    d.rewards = (rng.random(d.rewards.shape) < 0.5).astype(np.float64)
    d.ids |= {
        "prompt": np.array([7, 8, 7, 8]),
        "ask": np.array([0, 0, 1, 1]),
        "predicted_tokens": rng.integers(-1, 6, d.members.shape),
        "predicted_passes": rng.integers(-1, 5, d.members.shape),
    }


def solutions(d, n):
    """(groups, members) that solve the problem of group n, demonstrations left out."""
    same = [m for m in range(4) if d.ids["prompt"][m] == d.ids["prompt"][n]]
    external = d.external.any(2)
    return [
        (m, j) for m in same if not d.ids["ask"][m] for j in members_of(d, m) if not external[m, j]
    ]


def foretold(d):
    """The scores after predictions were judged."""
    scores = d.rewards.copy()
    for n, i in np.ndindex(scores.shape):
        if not d.ids["ask"][n]:
            continue
        attempts = solutions(d, n)
        right = [len(tokens_of(d, *at)) for at in attempts if d.rewards[at] > 0.5]
        guess, passes = d.ids["predicted_tokens"][n, i], d.ids["predicted_passes"][n, i]
        length = float(bool(right) and min(right) < guess < max(right))
        rate = len(right) / max(len(attempts), 1)
        difficulty = 0.01 ** abs(passes / 4 - rate) if passes >= 0 and attempts else 0.0
        scores[n, i] = (scores[n, i] + length + difficulty) / 3
    return scores


def standardised(d, scores, n, i, pool):
    if len(pool) < 2:
        return 0.0
    group = [scores[n, j] for j in pool]
    mean = sum(group) / len(group)
    std = (sum((x - mean) ** 2 for x in group) / (len(group) - 1)) ** 0.5
    return (scores[n, i] - mean) / ((std or 1.0) + 1e-6)


def masa_loss(d, frozen):
    scores = foretold(d)
    a = {(n, i): standardised(d, scores, n, i, members_of(d, n)) for n, i, _ in sequences(d)}
    return clipped(d, lambda n, i, t: a[n, i], rows="tokens", high=0.28, dual=10.0)


def predictions(d, n, name):
    """Valid predictions about the problem of group n."""
    same = [m for m in range(4) if d.ids["prompt"][m] == d.ids["prompt"][n] and d.ids["ask"][m]]
    values = [d.ids[name][m, j] for m in same for j in members_of(d, m)]
    return [x for x in values if x >= 0]


def efficient_loss(d, frozen):
    scores, external = foretold(d), d.external.any(2)
    rows = []
    for n, i, tokens in sequences(d):
        solving = not d.ids["ask"][n]
        predicted = predictions(d, n, "predicted_passes")
        if solving and predicted and np.mean(predicted) in (0.0, 4.0):
            continue
        guesses = predictions(d, n, "predicted_tokens")
        limit = 0.8 * np.mean(guesses) if solving and guesses else np.inf
        tokens = [t for t in tokens if t < limit]
        if not tokens:
            continue
        pool = [j for j in members_of(d, n) if not external[n, j]]
        a = 0.0 if external[n, i] else standardised(d, scores, n, i, pool)
        for t in tokens:
            imitation = -0.1 * d.external[n, i, t] * d.logprobs[n, i, t]
            rows.append(clipped_loss(ratio(d, (n, i, t)), a, 0.2, 0.28, 10.0) + imitation)
    return sum(rows) / max(len(rows), 1)


def test_masa_is_the_papers():
    check(MASA, masa_loss, prepare=ask_twice, n=4)


def test_efficient_masa_gates_cuts_and_imitates():
    def gate_one(d, rng):
        ask_twice(d, rng)
        d.ids["predicted_passes"][3] = 4  # problem 8 is called trivial

    check(EFFICIENT, efficient_loss, prepare=gate_one, n=4, demonstrations=1)
    check(EFFICIENT, efficient_loss, prepare=ask_twice, n=4, demonstrations=1, batches=((5, 0.3),))


def test_masa_without_predictions_is_token_mean_grpo():
    d = ragged(1)
    plain = grpo(clip_high=0.28, dual_clip=10.0).with_(aggregate=aggregates.token_mean)
    ours, theirs = run(MASA, d), run(plain, d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_a_perfect_prediction_is_worth_a_point():
    d = ragged(1, n=4)
    ask_twice(d, np.random.default_rng(0))
    d.members[:] = True
    d.rewards[:] = 1.0
    d.rewards[0, 0] = 0.0
    d.lengths[0] = [1, 2, 4, 5]
    d.mask[0] = np.arange(d.mask.shape[2]) < d.lengths[0][:, None]
    d.ids["predicted_tokens"][2] = [3, 2, 5, -1]
    d.ids["predicted_passes"][2] = [3, 3, 3, 3]
    batch = as_batch(d)
    judge = jax.jit(lambda batch: prediction_rewards(4, 0.5).apply(batch.score(), batch, ())[0])
    scored = judge(batch)
    np.testing.assert_allclose(scored[2], [1, 2 / 3, 2 / 3, 2 / 3], rtol=1e-5)
