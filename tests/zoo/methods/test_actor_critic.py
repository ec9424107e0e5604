"""Relatives of PPO that single papers published, against loops from their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    advantages_of,
    as_batch,
    check,
    clipped_loss,
    mean_over,
    ragged,
    ratio,
    rewritten,
    run,
    sequences,
)
from steps import estimates, live_tokens, with_nucleus

from jrl.methods import get_method
from jrl.zoo.methods.actor_critic import in_nucleus, nucleus_statistics
from jrl.zoo.networks.policies import Policies

# ---------------------------------------------------------------- VAPO


def a2c_loss(d, frozen):
    total, count = 0.0, 0
    for (i, j), steps in live_tokens(d).items():
        for k, place in enumerate(steps):
            at = (i, j, place)
            target = 0.9 ** (len(steps) - 1 - k) * d.rewards[i, j]
            total -= (target - d.rollout_values[at]) * d.logprobs[at]
            total += 0.5 * 0.5 * (target - d.values[at]) ** 2 - 0.01 * d.entropy[at]
            count += 1
    return total / max(count, 1)


def awr_loss(d, frozen, beta=0.5, cap=3.0):
    advantages, returns = estimates(d, beta=0.0, discount=1.0, decay=0.8, whiten=True)
    total = 0.0
    for at, a in advantages.items():
        total -= min(np.exp(a / beta), cap) * d.logprobs[at]
        total += 0.5 * 0.5 * (returns[at] - d.values[at]) ** 2
    return total / max(len(advantages), 1)


CASES = {
    "a2c": (a2c_loss, {"discount": 0.9}, ("logprobs", "values", "entropy")),
    "awr": (
        awr_loss,
        {"temperature": 0.5, "weight_cap": 3.0, "gae_lambda": 0.8},
        ("logprobs", "values"),
    ),
}


def test_on_policy_a2c_has_the_gradient_of_ppo():
    d = ragged(4)
    d.logprobs = d.sampler_logprobs.copy()
    same = {"gae_lambda": 0.9, "entropy_coef": 0.01}
    wrt = ("logprobs", "values", "entropy")
    _, one = run(get_method("a2c", **same), d, wrt)
    _, two = run(get_method("ppo", whiten=False, value_clip=None, **same), d, wrt)
    for name in wrt:
        assert np.abs(one[name]).max() > 1e-4
        np.testing.assert_allclose(one[name], two[name], atol=1e-6)


def test_as_the_temperature_grows_the_gradient_of_awr_becomes_that_of_likelihood():
    d = ragged(5)
    _, hot = run(get_method("awr", temperature=1e6), d)
    _, sft = run(get_method("sft"), d)
    assert np.abs(sft["logprobs"]).max() > 0.01
    np.testing.assert_allclose(hot["logprobs"], sft["logprobs"], atol=1e-6)


# ---------------------------------------------------------------- NLPO


PLAIN = {"whiten": False, "gae_lambda": 0.9, "discount": 0.95}


NLPO = get_method("nlpo", kl_coef=0.1, kl_target=None, **PLAIN)


def nlpo_loss(d, frozen):
    terms = []
    for n, i, tokens in sequences(d):
        tokens = [t for t in tokens if d.in_nucleus[n, i, t]]
        later_value = later = 0.0
        advantage = {}
        for t in reversed(tokens):
            gap = d.sampler_logprobs[n, i, t] - d.teacher_logprobs[n, i, t]
            reward = d.rewards[n, i] * (t == tokens[-1]) - 0.1 * gap
            delta = reward + 0.95 * later_value - d.rollout_values[n, i, t]
            later = advantage[t] = delta + 0.95 * 0.9 * later
            later_value = d.rollout_values[n, i, t]
        for t in tokens:
            gap = d.nucleus_logprob[n, i, t] - d.rollout_nucleus_logprob[n, i, t]
            rho, a = np.exp(gap), advantage[t]
            error = d.values[n, i, t] - (a + d.rollout_values[n, i, t])
            terms.append(-min(rho * a, np.clip(rho, 0.8, 1.2) * a) + 0.5 * error**2 / 2)
    return sum(terms) / max(len(terms), 1)


def test_nlpo_is_the_papers():
    check(NLPO, nlpo_loss, wrt=("nucleus_logprob", "values"), prepare=with_nucleus)


def test_nlpo_on_the_whole_vocabulary_is_ppo():
    d = ragged(1)
    d.in_nucleus = np.ones(d.mask.shape)
    d.nucleus_logprob, d.rollout_nucleus_logprob = d.logprobs, d.sampler_logprobs
    ours = run(get_method("nlpo", **PLAIN), d, ("nucleus_logprob", "values"))
    theirs = run(get_method("ppo", value_clip=None, **PLAIN), d, ("logprobs", "values"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["nucleus_logprob"], theirs[1]["logprobs"], atol=1e-7)
    np.testing.assert_allclose(ours[1]["values"], theirs[1]["values"], atol=1e-7)


def nucleus_of(probabilities, top_p):
    """Token ids, from the definition: the most probable ones until they hold top_p."""
    tokens, mass = [], 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        if mass >= top_p and tokens:
            break
        tokens.append(token)
        mass += probabilities[token]
    return sorted(tokens)


def test_the_restricted_distribution_is_renormalised_over_the_nucleus():
    rng = np.random.default_rng(0)
    distributions = {name: rng.dirichlet(np.full(8, 0.5)) for name in ("policy", "ref")}
    inside, before, now = nucleus_statistics(0.8, "ref")
    tokens = nucleus_of(distributions["ref"], 0.8)
    assert 1 < len(tokens) < 8
    logs = {name: jnp.log(jnp.asarray(x, jnp.float32)) for name, x in distributions.items()}
    of = jax.jit(
        lambda logs: jax.vmap(lambda t: (inside.apply(logs, t), now.apply(logs, t)))(jnp.arange(8))
    )
    is_finite, restricted = (np.asarray(x) for x in of(logs))
    assert sorted(np.nonzero(is_finite)[0]) == tokens
    expected = np.log(distributions["policy"][tokens] / distributions["policy"][tokens].sum())
    np.testing.assert_allclose(restricted[tokens], expected, rtol=1e-4)
    assert np.isfinite(restricted).all()
    assert (inside.start, before.start, now.start) == (True, True, False)
    assert NLPO.objective.frozen == {"ref", "teacher"}


@pytest.mark.parametrize("top_p", [0.0, 1.0])
def test_the_least_and_the_greatest_nucleus(top_p):
    probabilities = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    assert in_nucleus(probabilities, top_p).tolist() == [top_p == 1, True, top_p == 1]


def test_a_nucleus_may_hold_a_least_number_of_tokens():
    logs = jnp.log(jnp.array([0.1, 0.6, 0.3]))
    assert in_nucleus(logs, 0.5, min_tokens=2).tolist() == [False, True, True]


# ---------------------------------------------------------------- agents


def cory_loss(d, frozen):
    gains, targets = estimates(d, beta=0.4, discount=1.0, decay=0.9, whiten=False)

    def of_token(*at):  # a row is one player's answer
        return clipped_loss(ratio(d, at), gains[at]) + 0.05 * (d.values[at] - targets[at]) ** 2

    return mean_over(d, of_token, "tokens")


def test_cory_is_the_papers():
    method = get_method("cory", gae_lambda=0.9, whiten=False, value_clip=None)
    assert (method.schedule.epochs, method.network) == (4, Policies(2, swap_every=5))
    check(method, cory_loss, wrt=("logprobs", "values"))


def test_ppo_of_text_games_pays_at_the_end_of_each_turn():
    d = ragged(0, 1, 1, 4, ids=("step",))
    d.members[:], d.mask[:], d.lengths[:] = True, True, 4
    d.live = d.mask
    d.rewards, d.rollout_values = np.array([[3.0]]), np.zeros(d.mask.shape)
    d.paid = np.array([[[0.0, 1.0, 0.0, 2.0]]])
    method = get_method("meow_tea_taro", whiten=False, kl_coef=0.0)
    assert advantages_of(method, d)[0, 0].tolist() == [3.0, 3.0, 2.0, 2.0]


def test_retool_pays_for_right_answers_alone():
    rewards = np.array([[[1.0, 7.0], [0.25, 7.0], [np.nan, 7.0]]], np.float32)
    np.testing.assert_array_equal(
        rewritten(get_method("retool", correct=0.5), rewards),
        [[[1.0, 7.0], [-1.0, 7.0], [np.nan, 7.0]]],
    )


def dsp_loss(d, frozen):
    gains, targets = estimates(d, beta=0.005, discount=0.99, decay=0.95, whiten=True)

    def of_token(*at):
        error = d.values[at] - targets[at]
        return clipped_loss(ratio(d, at), gains[at]) + 0.25 * error**2

    return mean_over(d, of_token, "tokens")


def test_dsp_is_ppo_with_the_released_runs_numbers():
    method = get_method("dsp")
    check(method, dsp_loss, wrt=("logprobs", "values"))
    assert method.schedule.epochs == 5
    advantage, d = method.objective.advantage, ragged(1)
    for nats, up in ((0.4, False), (0.6, True)):  # on either side of the target, 0.5
        d.ref_logprobs = d.sampler_logprobs - nats
        batch = as_batch(d)
        _, _, state = advantage.apply(batch.score(), batch, advantage.init())
        assert (float(jax.tree.leaves(state)[0]) > 0.005) == up


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_paper(name):
    reference, coefficients, wrt = CASES[name]
    check(get_method(name, **coefficients), reference, wrt=wrt)
