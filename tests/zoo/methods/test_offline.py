"""Imitation, values of tokens and critics of steps, against float64 references in loops."""

import jax
import numpy as np
from harness import (
    advantages_of,
    as_batch,
    check,
    members_of,
    numbers,
    ragged,
    sequences,
)
from steps import earned, episodes, paid, steps_of

from jrl.methods import get_method
from jrl.zoo.methods.rounds import written_problems


def filtered_loss(d, frozen, keep=0.4):
    scores = [d.rewards[n, i] for n in range(len(d.rewards)) for i in members_of(d, n)]
    bound = np.quantile(scores, 1 - keep)
    every = [
        -d.logprobs[n, i, t]
        for n, i, tokens in sequences(d)
        if d.rewards[n, i] >= bound - 1e-9
        for t in tokens
    ]
    return sum(every) / max(len(every), 1)


def test_filtered_bc_clones_the_best_of_the_batch():
    check(get_method("filtered_bc", keep=0.4), filtered_loss)


def with_heads(d, rng):
    """Outputs of the heads for each token, and rewards for some turns.

    The first group was cut: the references have V = 0 behind its last tokens, too, which is the
    departure from LMRL Gym that the docstrings of ``ilql`` and ``mc_returns`` state.
    """
    d.truncated[0] = True
    for name in ("q_0", "q_1", "q_target", "state_value", "q_unlikely", "base_surprise"):
        setattr(d, name, numbers(rng, *d.mask.shape))
    d.paid = numbers(rng, *d.mask.shape) * (rng.random(d.mask.shape) < 0.3) * d.mask


def rewards_of(d, n, i, tokens):
    """Points at each live token: what was paid there, and the rest of the score at the last."""
    points = {t: d.paid[n, i, t] for t in tokens}
    points[tokens[-1]] += d.rewards[n, i] - sum(points.values())
    return points


def rows_of(d):
    for n, i in np.argwhere(d.live.any(axis=2)):
        yield n, i, np.flatnonzero(d.live[n, i]).tolist()


def ilql_loss(d, frozen, tau=0.7, gamma=0.9, alpha=0.05, clone=0.5):
    total = count = 0.0
    for n, i, tokens in rows_of(d):
        points = rewards_of(d, n, i, tokens)
        for now, later in zip(tokens, [*tokens[1:], None], strict=True):
            at = n, i, now
            after = 0.0 if later is None else frozen.state_value[n, i, later]
            aim = points[now] + gamma * after
            for name in ("q_0", "q_1"):
                total += (getattr(d, name)[at] - aim) ** 2 / 2
            below = d.q_target[at] < d.state_value[at]
            total += abs(tau - below) * (d.q_target[at] - d.state_value[at]) ** 2 / 2
            total += alpha * d.q_unlikely[at] + clone * d.base_surprise[at]
            count += 1
    return total / max(count, 1)


def test_ilql_is_the_papers_and_values_end_where_a_completion_was_cut():
    method = get_method("ilql", discount=0.9, cql_coef=0.05, sft_coef=0.5)
    wrt = ("q_0", "q_1", "state_value", "q_unlikely", "base_surprise")
    check(method, ilql_loss, wrt=wrt, prepare=with_heads)


def mc_loss(d, frozen, gamma=0.9, alpha=0.05):
    total = count = 0.0
    for n, i, tokens in rows_of(d):
        points, later = rewards_of(d, n, i, tokens), 0.0
        for t in reversed(tokens):
            later = points[t] + gamma * later
            total += (d.q_0[n, i, t] - later) ** 2 / 2
            total += alpha * d.q_unlikely[n, i, t] + d.base_surprise[n, i, t]
            count += 1
    return total / max(count, 1)


def test_mc_returns_is_the_papers_and_returns_end_where_a_completion_was_cut():
    method = get_method("mc_returns", discount=0.9, cql_coef=0.05)
    check(method, mc_loss, wrt=("q_0", "q_unlikely", "base_surprise"), prepare=with_heads)


# ---------------------------------------------------------------- critics of steps


def sure(x):
    return 1 / (1 + np.exp(-x))


def by_step(d, n, i):
    """(points, success chance before, tokens) of each step, and one more chance of 0 at the end."""
    steps = steps_of(d, n, i)
    chance = [sure(d.rollout_values[n, i, tokens[0]]) for _, tokens in steps]
    return earned(d, n, i), [*chance, 0.0], [tokens for _, tokens in steps]


def bce(d, coef):
    """The cross-entropy of the values against success, over tokens."""
    every = [
        np.logaddexp(0, d.values[n, i, t]) - (d.rewards[n, i] > 0) * d.values[n, i, t]
        for n, i, tokens in sequences(d)
        for t in tokens
    ]
    return coef * sum(every) / max(len(every), 1)


def digirl_loss(d, frozen, decay=0.6, keep=0.5, threshold=0.05):
    rows = episodes(d)
    surprise = [(d.rewards[n, i] > 0) - by_step(d, n, i)[1][0] for n, i, _ in rows]
    bound = np.quantile(surprise, 1 - keep) if rows else 0.0
    total = 0.0
    for (n, i, _), gap in zip(rows, surprise, strict=True):
        points, v, steps = by_step(d, n, i)
        for h, tokens in enumerate(steps):
            w = decay ** (len(steps) - 1 - h)
            a = w * d.rewards[n, i] + (1 - w) * (v[h + 1] + points[h] - v[h])
            if gap >= bound - 1e-9 and a > threshold:
                total -= sum(d.logprobs[n, i, t] for t in tokens)
    return total / max(len(rows), 1) + bce(d, 0.7)


def test_digirl_is_the_papers():
    method = get_method("digirl", decay=0.6, keep=0.5, value_coef=0.7)
    check(method, digirl_loss, wrt=("logprobs", "values"), ids=("step",), prepare=paid)


def test_digirl_imitates_success_that_nobody_expected():
    d = ragged(0, 1, 4, 3, ids=("step",))
    d.members[:], d.mask[:], d.lengths[:] = True, True, 3
    d.live = d.mask
    d.rewards = np.array([[1.0, 1.0, 0.0, 0.0]])
    d.rollout_values[0] = [[3.0], [-3.0], [3.0], [-3.0]]  # the second was held to be hopeless
    a = advantages_of(get_method("digirl", keep=0.25, decay=1.0), d)[0]
    assert a.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]


def webrl_loss(d, frozen, beta=0.8, blend=0.3):
    total = 0.0
    for n, i, _ in episodes(d):
        points, v, steps = by_step(d, n, i)
        for h, tokens in enumerate(steps):
            a = blend * (points[h] + v[h + 1] - v[h]) + (1 - blend) * (d.rewards[n, i] - v[h])
            drift = sum(d.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in tokens)
            total += (beta * drift - a) ** 2
    return total / max(len(episodes(d)), 1) + bce(d, 0.7)


def test_webrl_is_the_papers():
    method = get_method("webrl", beta=0.8, blend=0.3, value_coef=0.7)
    check(method, webrl_loss, wrt=("logprobs", "values"), ids=("step",), prepare=paid)


def test_webrl_trains_on_replayed_steps_of_medium_perplexity_alone():
    d = ragged(0, 1, 2, 6, ids=("step",))
    d.members[:], d.mask[:], d.lengths[:] = True, True, 6
    d.live = d.mask
    d.ids["step"][:] = [0, 0, 1, 1, 2, 2]
    d.ids["replayed"] = np.array([[1, 0]])
    # By chance of a token: 0.99, between 0.5 and 0.95 on average, and 0.3.
    chances = np.array([0.99, 0.99, 0.99, 0.5, 0.3, 0.3])
    d.proximal_logprobs = np.broadcast_to(np.log(chances), d.mask.shape)
    method = get_method("webrl", replayed=0.5)
    batch = as_batch(d)
    _, after, _ = jax.jit(method.objective.advantage.apply)(batch.score(), batch, ((), ()))
    assert after.mask[0, 0].tolist() == [False, False, True, True, False, False]
    assert after.mask[0, 1].all()  # a fresh one, with steps of the same chances


def test_digirl_and_webrl_store_nothing_unless_asked_to():
    assert get_method("digirl").edits == get_method("webrl").edits == ()


def test_webrls_tasks_are_written_once_a_phase():
    assert get_method("webrl").curriculum is None
    method = get_method("webrl", written=30, phase_steps=7, high=0.6)
    assert method.curriculum == written_problems(steps=7, problems=30, low=0.05, high=0.6)
    assert [s for s in range(15) if method.schedule.after[0].due(s)] == [7, 14]
    assert "curriculum" in method.seams
