"""Policy and judge in one run, against loops from the papers' code in float64."""

import math

import jax
import numpy as np
import pytest
from harness import (
    advantages_of,
    as_batch,
    check,
    clipped_loss,
    members_of,
    ragged,
    ratio,
    sequences,
)

from jrl.methods import get_method
from jrl.objectives import compute_advantages
from jrl.zoo.methods.joint import rl_tango
from jrl.zoo.networks.policies import Policies

N, G, T = 4, 5, 7


def verified(d, rng):
    """Groups 0 and 2 are the solver's, of up to three steps; 1 and 3 the judge's of the same."""
    d.ids["role"] = np.broadcast_to(np.arange(N)[:, None] % 2, (N, G)).copy()
    d.ids["solution_step"] = np.sort(rng.integers(-1, 3, (N, G, T)), axis=2)
    d.ids["verified_steps"] = rng.integers(0, 2, (N, G)) * 3
    d.ids["verdicts"] = rng.integers(0, 8, (N, G))
    d.ids["outcome"] = np.repeat(rng.integers(0, 2, (N // 2, G)), 2, axis=0)
    d.members[:] = True  # a group of one would have no deviation of its steps
    d.members[0, 1] = False
    d.live = d.mask & d.members[..., None]


def ends(d, n, i):
    """token -> points of the step that it ends."""
    count, points = d.ids["verified_steps"][n, i], {}
    for t in range(T):
        k = d.ids["solution_step"][n, i, t]
        after = d.ids["solution_step"][n, i, t + 1] if t + 1 < T else -1
        if d.live[n, i, t] and 0 <= k < count and k != after:
            points[t] = (1.0 if d.ids["verdicts"][n, i] >> k & 1 else -1.0) / count
    return points


def tango_advantages(d, alpha, balance, ema):
    """By (n, i, t); ``ema`` of right and wrong solutions, as the code's ``pos_count_ema``."""
    out = {}
    any_step = any(ends(d, n, i) for n in (0, 2) for i in members_of(d, n))
    verdicts = [(n, i) for n, i, _ in sequences(d) if n % 2]
    coefs = [1 / (math.sqrt(x) + 1e-6) for x in ema]
    mean = np.mean([coefs[0 if d.ids["outcome"][at] else 1] for at in verdicts])
    for n in range(N):
        live = members_of(d, n)
        scores = np.array([d.rewards[n, i] for i in live])
        z = dict(zip(live, (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6), strict=True))
        steps = {i: ends(d, n, i) for i in live}
        flat = np.array([p for each in steps.values() for p in each.values()])
        m, s = (flat.mean(), flat.std(ddof=1)) if len(flat) > 1 else (0.0, 1.0)
        for i in live:
            for t in range(T):
                later = sum((p - m) / (s + 1e-6) for u, p in steps[i].items() if u >= t)
                solver = n % 2 == 0
                a = alpha if solver and any_step else 0.0
                value = (1 - a) * z[i] + a * later
                if not solver and balance:
                    value *= coefs[0 if d.ids["outcome"][n, i] else 1] / mean
                out[n, i, t] = value
    return out


def counts(d):
    verdicts = [at[:2] for at in sequences(d) if at[0] % 2]
    right = sum(int(d.ids["outcome"][at]) for at in verdicts)
    return right, len(verdicts) - right


@pytest.mark.parametrize("balance", [True, False])
def test_rl_tango_is_the_codes(balance):
    """One policy that is both: the loss of solver and judge."""
    method = rl_tango(policies=1, alpha=0.4, balance=balance, kl_coef=0.0)

    def loss(d, frozen):
        advantages, total, count = tango_advantages(d, 0.4, balance, counts(d)), 0.0, 0
        for n, i, tokens in sequences(d):
            for t in tokens:
                total += clipped_loss(ratio(d, (n, i, t)), advantages[n, i, t])
                count += 1
        return total / max(count, 1)

    check(method, loss, prepare=verified, n=N, g=G, t=T)


def test_alpha_falls_and_the_counts_are_averages():
    """Two updates: alpha of ``get_alpha(1)``, counts of 0.8 and 0.2."""
    method = rl_tango(policies=1, alpha=0.4, alpha_min=0.1, alpha_steps=2)
    objective = method.objective
    compute = jax.jit(lambda batch, state: compute_advantages(objective, batch, state)[::2])
    state, averages = objective.init(), []
    for number, alpha in enumerate((0.4, 0.4 * math.exp(-math.log(4) / 2), 0.1, 0.1)):
        d = ragged(number, n=N, g=G, t=T)
        verified(d, np.random.default_rng(number))
        right, wrong = counts(d)
        ema = (
            (right, wrong)
            if not averages
            else tuple(
                0.8 * old + 0.2 * new for old, new in zip(averages[-1], (right, wrong), strict=True)
            )
        )
        averages.append(ema)
        advantages, state = compute(as_batch(d), state)
        expected = tango_advantages(d, alpha, True, ema)
        for n, i, tokens in sequences(d):
            for t in tokens:
                np.testing.assert_allclose(advantages[n, i, t], expected[n, i, t], atol=2e-5)


def test_verdicts_that_are_not_one_for_each_step_pay_nothing():
    d = ragged(1, n=N, g=G, t=T)
    verified(d, np.random.default_rng(1))
    method = rl_tango(policies=1, alpha=0.4, balance=False)
    d.ids["verified_steps"][:] = 0
    none = advantages_of(method, d)
    plain = advantages_of(get_method("grpo"), d)
    np.testing.assert_allclose(none[d.live], plain[d.live], atol=1e-6)


def test_policies_are_trained_by_turns():
    """Two steps of the second at first, then three of the first for each of the second."""
    network = rl_tango(generator_steps=3, verifier_steps=1, warmup=2).network
    turns = [network.due(step).tolist() for step in range(9)]
    assert [each.index(True) for each in turns] == [1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert all(sum(each) == 1 for each in turns)
    assert Policies(2).due(3).tolist() == [True, True]
