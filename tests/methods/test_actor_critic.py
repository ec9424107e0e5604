"""PPO and its relatives against loops from the papers, in float64, with every term."""

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
    numbers,
    ragged,
    ratio,
    rewritten,
    run,
    sequences,
)

from jrl.methods import get_method
from jrl.methods.actor_critic import in_nucleus, nucleus_statistics
from jrl.objectives import compute_advantages
from jrl.zoo.networks.policies import Policies


def live_tokens(d):
    n, g, t = d.mask.shape
    steps_by_member = {}
    for i, j in np.ndindex(n, g):
        steps = [k for k in range(t) if d.live[i, j, k]]
        if steps:
            steps_by_member[i, j] = steps
    return steps_by_member


def estimates(d, *, beta, discount, decay, whiten):
    """Advantages and returns by at: GAE as a double sum over later temporal differences."""
    advantages, returns = {}, {}
    for (i, j), steps in live_tokens(d).items():
        v = [d.rollout_values[i, j, k] for k in steps] + [0.0]
        r = [-beta * (d.sampler_logprobs[i, j, k] - d.ref_logprobs[i, j, k]) for k in steps]
        r[-1] += d.rewards[i, j]
        delta = [r[k] + discount * v[k + 1] - v[k] for k in range(len(steps))]
        for k, place in enumerate(steps):
            tail = range(k, len(steps))
            a = sum((discount * decay) ** (later - k) * delta[later] for later in tail)
            advantages[i, j, place] = a
            returns[i, j, place] = a + v[k]
    if whiten and advantages:
        mean = sum(advantages.values()) / len(advantages)
        variance = sum((a - mean) ** 2 for a in advantages.values()) / len(advantages)
        advantages = {at: (a - mean) / np.sqrt(variance + 1e-8) for at, a in advantages.items()}
    return advantages, returns


def ppo_loss(d, logprobs, values, entropy, advantages, returns, clip=0.2, c1=0.7, c2=0.05):
    total = 0.0
    for at, a in advantages.items():
        ratio = np.exp(logprobs[at] - d.sampler_logprobs[at])
        total -= min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
        old, new, target = d.rollout_values[at], values[at], returns[at]
        near = old + min(max(new - old, -0.3), 0.3)
        total += c1 * 0.5 * max((new - target) ** 2, (near - target) ** 2)
        total -= c2 * entropy[at]
    return total / max(len(advantages), 1)


def slope(loss, point, step=1e-6):
    gradient = np.zeros_like(point)
    for at in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[at] += step
        down[at] -= step
        gradient[at] = (loss(up) - loss(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_all_gradients_equal_the_paper(
    seed, whiten, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(seed)
    knobs = {"discount": 0.9, "whiten": whiten}
    advantages, returns = estimates(d, beta=0.1, decay=0.8, **knobs)
    method = get_method(
        "ppo",
        gae_lambda=0.8,
        kl_coef=0.1,
        value_coef=0.7,
        value_clip=0.3,
        entropy_coef=0.05,
        **knobs,
    )
    value, gradients = loss_and_gradients(method, make_batch(d), d)
    args = (d.logprobs, d.values, d.entropy)
    assert value == pytest.approx(ppo_loss(d, *args, advantages, returns), abs=2e-5)
    for place, name in enumerate(("logprobs", "values", "entropy")):

        def loss(x, place=place):
            point = [*args[:place], x, *args[place + 1 :]]
            return ppo_loss(d, *point, advantages, returns)

        expected = slope(loss, args[place])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradients[name], expected, rtol=2e-4, atol=2e-5)


def test_without_values_or_decay_ppo_credits_the_whole_score(make_ragged, make_batch):
    d = make_ragged(2)
    d.rollout_values = np.zeros_like(d.rollout_values)
    objective = get_method("ppo", gae_lambda=1.0, whiten=False).objective
    advantages, batch, _, _ = compute_advantages(objective, make_batch(d), objective.init())
    expected = np.where(d.live, d.rewards[..., None], 0)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(batch.stats["returns"], expected, atol=1e-6)


def test_ppo_asks_for_a_value_network_and_others_do_not():
    assert get_method("ppo").value
    assert not get_method("grpo").value
    assert {"values", "rollout_values", "returns"} <= get_method("ppo").objective.needs
    assert "entropy" not in get_method("ppo").objective.needs
    assert "entropy" in get_method("ppo", entropy_coef=0.1).objective.needs


# ---------------------------------------------------------------- VAPO, A2C, AWR


def vapo_loss(d, frozen, alpha=0.5, clip=(0.2, 0.28), c1=0.5, mu=0.1):
    total, count, right = 0.0, 0, []
    for (i, j), steps in live_tokens(d).items():
        decay = max(1 - 1 / (alpha * len(steps)), 0)
        v = [d.rollout_values[i, j, k] for k in steps] + [0.0]
        r = [0.0] * (len(steps) - 1) + [d.rewards[i, j]]
        delta = [r[k] + v[k + 1] - v[k] for k in range(len(steps))]
        for k, place in enumerate(steps):
            at = (i, j, place)
            a = sum(decay ** (s - k) * delta[s] for s in range(k, len(steps)))
            ratio = np.exp(np.clip(d.logprobs[at] - d.sampler_logprobs[at], -20, 20))
            total -= min(ratio * a, min(max(ratio, 1 - clip[0]), 1 + clip[1]) * a)
            total += c1 * 0.5 * (d.values[at] - d.rewards[i, j]) ** 2
            count += 1
            right += [d.logprobs[at]] if d.rewards[i, j] > 0 else []
    return total / max(count, 1) - mu * sum(right) / max(len(right), 1)


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
    "vapo": (vapo_loss, {"length_scale": 0.5}, ("logprobs", "values")),
    "a2c": (a2c_loss, {"discount": 0.9}, ("logprobs", "values", "entropy")),
    "awr": (
        awr_loss,
        {"temperature": 0.5, "weight_cap": 3.0, "gae_lambda": 0.8},
        ("logprobs", "values"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_the_others_equal_the_paper(name):
    reference, coefficients, wrt = CASES[name]
    check(get_method(name, **coefficients), reference, wrt=wrt)


def test_the_value_targets_of_vapo_are_the_scores(make_batch):
    d = ragged(3)
    objective = get_method("vapo").objective
    _, batch, _, _ = compute_advantages(objective, make_batch(d), objective.init())
    expected = np.where(d.live, d.rewards[..., None], 0)
    np.testing.assert_allclose(batch.stats["returns"], expected, atol=1e-5)


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


def with_nucleus(d, rng):
    d.in_nucleus = (rng.random(d.mask.shape) < 0.7).astype(np.float64)
    for name in ("nucleus_logprob", "rollout_nucleus_logprob"):
        setattr(d, name, numbers(rng, *d.mask.shape, scale=0.3, shift=-1.0))


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


# ---------------------------------------------------------------- the divergence's coefficient


@pytest.mark.parametrize("name", ["ppo", "vapo", "salsa", "rlhf_summarize", "nlpo"])
def test_the_coefficient_of_the_divergence_is_steered_to_its_target(name):
    """Ziegler's controller: 1 + 0.1 clip(kl / target - 1, -0.2, 0.2) times as much a step."""
    d = ragged(6)
    with_nucleus(d, np.random.default_rng(0))
    reference = d.teacher_logprobs if name == "nlpo" else d.ref_logprobs
    live = d.live & (d.in_nucleus > 0.5) if name == "nlpo" else d.live
    kl = (d.sampler_logprobs - reference)[live].mean()
    objective = get_method(name, kl_coef=0.5, kl_target=abs(kl) / 1.1).objective
    first, _, state, _ = compute_advantages(objective, as_batch(d), objective.init())
    fixed = get_method(name, kl_coef=0.5, kl_target=None).objective
    np.testing.assert_allclose(
        first, compute_advantages(fixed, as_batch(d), fixed.init())[0], atol=1e-6
    )
    factor = 1 + 0.1 * np.clip(np.sign(kl) * 1.1 - 1, -0.2, 0.2)
    (coef,) = jax.tree.leaves(state["advantage"])
    assert float(coef) == pytest.approx(0.5 * factor, rel=1e-4)


def test_relatives_of_ppo_inherit_its_coefficients():
    reads = get_method("vapo", kl_coef=0.1, entropy_coef=0.1).objective.needs
    assert reads >= {"ref_logprobs", "entropy"}
    for name in ("vapo", "salsa", "rlhf_summarize", "fact_rlhf", "mpo", "safe_rlhf"):
        stage = {"stage": "ppo"} if name == "mpo" else {}
        method = get_method(name, correction="tis", epochs=3, **stage)
        assert method.objective.surrogate.parts.correction.kind == "truncate"
        assert method.schedule.epochs == 3


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
