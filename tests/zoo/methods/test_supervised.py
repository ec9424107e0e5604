"""Fine-tuning that single papers published, against float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    live_statistics,
    loss_and_gradient,
    means,
    members_of,
    ragged,
    run,
    sequences,
)
from steps import episodes

from jrl.methods import get_method
from jrl.objectives import aggregates
from jrl.zoo.methods.supervised import one_token_rollout

# ---------------------------------------------------------------- one-token rollout


@pytest.fixture(scope="module")
def rollout_loss():
    """(beta, temperature) -> (logits, token) -> loss and gradient by the logits."""

    def of(beta, temperature):
        apply = one_token_rollout(beta, temperature).apply
        value = lambda logits, token: apply({"policy": jax.nn.log_softmax(logits)}, token)  # noqa: E731
        return jax.jit(jax.value_and_grad(value))

    return of


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def test_otr_is_the_expected_loss_of_one_drawn_token(rollout_loss):
    loss = rollout_loss(-0.2, 1.5)
    logits = np.random.default_rng(1).normal(size=5)
    probs, rewards = softmax(logits / 1.5), np.array([-0.2, -0.2, -0.2, 1.0, -0.2])

    def reference(x):
        return -(probs * rewards * np.log(softmax(x))).sum()

    value, slope = loss(jnp.asarray(logits, jnp.float32), 3)
    assert value == pytest.approx(reference(logits), rel=1e-5)
    numeric = [(reference(logits + s) - reference(logits - s)) / 2e-5 for s in 1e-5 * np.eye(5)]
    np.testing.assert_allclose(slope, numeric, atol=1e-5)


def test_otr_s_gradient_is_dft_s_up_to_a_factor(rollout_loss):
    """At temperature 1: 1 - beta times the probability times that of the log-likelihood."""
    logits = jnp.asarray(np.random.default_rng(2).normal(size=6), jnp.float32)
    _, slope = rollout_loss(-0.3, 1.0)(logits, 2)
    nll = jax.grad(lambda x: -jax.nn.log_softmax(x)[2])(logits)
    np.testing.assert_allclose(slope, 1.3 * jax.nn.softmax(logits)[2] * nll, atol=1e-6)


def test_otr_never_draws_a_removed_token_and_keeps_a_nan(rollout_loss):
    loss = rollout_loss(-0.3, 2.0)
    truncated = jnp.array([0.5, -jnp.inf, 0.0, 1.0])
    (value, slope), (small, _) = loss(truncated, 3), loss(truncated[jnp.array([0, 2, 3])], 2)
    assert value == pytest.approx(float(small), rel=1e-6)
    assert slope[1] == 0
    assert np.isnan(loss(truncated.at[0].set(jnp.nan), 3)[0])


def test_otr_minimises_its_statistic():
    method = get_method("otr", beta=0.0, temperature=2.0)
    (statistic,) = method.objective.statistics
    d = ragged(4, g=1)
    setattr(d, statistic.name, d.values)
    value, _ = run(method, d, (statistic.name,))
    assert value == pytest.approx(means(d, "sequences", lambda at: d.values[at]), rel=1e-5)


# ---------------------------------------------------------------- the policy's own best


def bfs_loss(d, frozen, low=0.2, high=0.7):
    steps = {
        (n, i, label): tokens
        for n, i, rows in episodes(d)
        if d.rewards[n, i] >= 0.5
        for label, tokens in rows
    }
    doubt = {
        at: -np.mean([d.sampler_logprobs[at[0], at[1], t] for t in tokens])
        for at, tokens in steps.items()
    }
    if not doubt:
        return 0.0
    bounds = np.quantile(list(doubt.values()), [low, high])
    every = [
        -d.logprobs[n, i, t]
        for (n, i, label), tokens in steps.items()
        if bounds[0] - 1e-6 <= doubt[n, i, label] <= bounds[1] + 1e-6
        for t in tokens
    ]
    return sum(every) / max(len(every), 1)


def test_bfs_prover_trains_on_steps_that_are_neither_easy_nor_noise():
    method = get_method("bfs_prover", low=0.2, high=0.7, success=0.5)
    check(method, bfs_loss, ids=("step",), binary=True)


def test_bfs_prover_keeps_the_steps_of_a_proof_that_a_failure_drew():
    """Two members share their first step, which the one that fails drew; by hand."""
    d = ragged(0, 1, 2, 4, ids=("step",))
    d.members[:], d.lengths[:] = True, 4
    d.mask[:] = d.live[:] = [[True] * 4, [False, False, True, True]]
    d.ids["step"][:] = [0, 0, 1, 1]
    d.ids["node"] = np.array([[[1, 1, 2, 2], [1, 1, 3, 3]]])
    d.rewards = np.array([[0.0, 1.0]])
    method = get_method("bfs_prover", low=0.0, high=1.0)
    batch = as_batch(d)
    _, after, _ = jax.jit(method.objective.advantage.apply)(batch.score(), batch, ())
    assert after.mask[0].tolist() == [[True, True, False, False], [False, False, True, True]]
    advantage = get_method("filtered_bc", keep=0.5).objective.advantage
    _, after, _ = jax.jit(advantage.apply)(batch.score(), batch, advantage.init())
    assert after.mask[0].tolist() == [[True, True, False, False], [False, False, True, True]]


def with_values(d, rng):
    d.node_value = rng.uniform(0, 1, d.mask.shape).astype(np.float32).astype(np.float64)


def alphamath_loss(d, frozen, beta=0.3):
    right = means(d, "tokens", lambda at: -d.logprobs[at] * (d.rewards[at[:2]] >= 0.5))
    return right + beta * means(
        d, "tokens", lambda at: (np.tanh(d.values[at]) - (2 * d.node_value[at] - 1)) ** 2
    )


def test_alphamath_imitates_right_paths_and_fits_the_trees_values():
    method = get_method("alphamath", beta=0.3)
    check(method, alphamath_loss, wrt=("logprobs", "values"), prepare=with_values, binary=True)


def test_alphamath_weighs_the_values_as_the_paper_does():
    d = ragged(1, binary=True)
    with_values(d, np.random.default_rng(0))
    value, _ = run(get_method("alphamath"), d, ("values",))
    np.testing.assert_allclose(value, alphamath_loss(d, d, 0.01), rtol=1e-5)


def test_alphamath_without_a_tree_fits_the_outcome():
    def prepare(d, rng):
        d.node_value = np.where(d.rewards[..., None] >= 0.5, 1.0, 0.0) + 0 * d.values

    def reference(d, frozen):
        return alphamath_loss(d, frozen)

    d = ragged(0, binary=True)
    value, _ = run(get_method("alphamath", beta=0.3), d, ("values",))
    prepare(d, None)
    np.testing.assert_allclose(value, reference(d, d), rtol=1e-5)


# ---------------------------------------------------------------- NFT


NFT = get_method("nft", max_tokens=7)


NFT_ROOT = get_method("nft", max_tokens=7, prompt_weight="odds_root")


NFT_FLOOR = get_method("nft", max_tokens=7, floor=0.3, prompt_weight="none", negative_weight=0.5)


NFT_SEQUENCE = get_method("nft", level="sequence", prompt_weight="failure_rate", floor=0.5)


PACS = get_method("pacs", beta=0.7)


PLAIN_PACS = get_method("pacs", beta=0.7, class_weight="none")


BINARY = {"binary": True, "g": 5}


def rate_of(d, n):
    return np.mean([d.rewards[n, j] > 0.5 for j in members_of(d, n)])


def imitated(d):
    return [(n, i, tokens) for n, i, tokens in sequences(d) if 0 < rate_of(d, n) < 1]


def negative_log(p, rho, frozen_rho, floor):
    """-log of the larger one, with the gradient of the first even where the floor is larger."""
    rest, before = (1 - p * rho) / (1 - p), (1 - p * frozen_rho) / (1 - p)
    return -np.log(max(before, floor)) - (rest - before) / max(before, floor)


def nft_token_loss(d, frozen, weigh=lambda p: 1 - p, negative=1.0, floor=1.0):
    total = 0.0
    for n, i, tokens in imitated(d):
        p = np.clip(rate_of(d, n), 0.02, 0.98)
        for t in tokens:
            gap = d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t]
            before = frozen.logprobs[n, i, t] - d.sampler_logprobs[n, i, t]
            if d.rewards[n, i] > 0.5:
                total -= weigh(p) * gap
            else:
                total += negative * weigh(p) * negative_log(p, np.exp(gap), np.exp(before), floor)
    return total / max(len(imitated(d)), 1) / 7


def nft_sequence_loss(d, frozen):
    total = 0.0
    for n, i, tokens in imitated(d):
        p = np.clip(rate_of(d, n), 0.02, 0.98)
        gap = sum(d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens)
        before = sum(frozen.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens)
        if d.rewards[n, i] > 0.5:
            total -= (1 - p) * gap
        else:
            total += (1 - p) * negative_log(p, np.exp(gap), np.exp(before), 0.5)
    return total / max(len(imitated(d)), 1)


def test_nft_is_the_papers():
    check(NFT, nft_token_loss, **BINARY)


def test_nft_with_the_weight_of_odds_is_the_papers():
    check(NFT_ROOT, lambda d, f: nft_token_loss(d, f, lambda p: ((1 - p) / p) ** 0.5), **BINARY)


def test_nft_floor_and_weights_are_the_papers():
    def loss(d, frozen):
        return nft_token_loss(d, frozen, lambda p: 1.0, 0.5, 0.3)

    check(NFT_FLOOR, loss, **BINARY)


def test_nft_of_whole_completions_is_the_papers():
    check(NFT_SEQUENCE, nft_sequence_loss, batches=((0, 0.3), (1, 0.05)), **BINARY)


def on_policy(seed):
    d = ragged(seed, binary=True, g=5)
    d.logprobs = d.sampler_logprobs.copy()
    return d


@pytest.mark.parametrize("method", [NFT, NFT_ROOT])
def test_nft_on_policy_has_the_gradient_of_grpo_or_dr_grpo(method):
    grpo = get_method("grpo", ddof=0, eps=1e-12).with_(aggregate=aggregates.constant_norm(7))
    if method is NFT:
        grpo = get_method("dr_grpo", max_tokens=7)
    d = on_policy(1)
    d.members[2] = d.members[0] = True  # mixed groups alone: NFT does not count the others
    d.rewards[0], d.rewards[1], d.rewards[2] = [0, 0, 1, 1, 1], [1, 0, 0, 0, 1], [0, 1, 0, 0, 0]
    d.members[1] = True
    d.live = d.mask & d.members[..., None]
    (_, ours), (_, theirs) = run(method, d), run(grpo, d)
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-4, atol=1e-7)
    assert np.abs(ours["logprobs"]).max() > 5e-3


def test_nft_on_right_answers_is_fine_tuning():
    d = ragged(1, binary=True, g=5)
    _, slope = run(NFT, d)
    right = [(n, i, t) for n, i, tokens in imitated(d) for t in tokens if d.rewards[n, i] > 0.5]
    assert right
    for n, i, t in right:
        p = rate_of(d, n)
        expected = -(1 - p) / len(imitated(d)) / 7
        assert slope["logprobs"][n, i, t] == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- PACS


def groups(d):
    """(prompt, its live members that have tokens) of the groups with any."""
    members = {}
    for n, i, _ in sequences(d):
        members.setdefault(n, []).append(i)
    return members


def scores_of(d, n, beta, mu="sampler_logprobs"):
    live = groups(d)[n]
    gap = d.logprobs - getattr(d, mu)
    return {i: beta * gap[n, i][d.mask[n, i]].sum() for i in live}


def pacs_loss(d, frozen, beta=0.7, mu="sampler_logprobs", alone=False, balanced=False):
    total = 0.0
    for n, live in groups(d).items():
        if len(live) < 2:
            continue
        s = scores_of(d, n, beta, mu)
        y = {i: float(d.rewards[n, i] > 0.5) for i in live}
        for i in live:
            others = [s[j] for j in live if j != i]
            psi = s[i] if alone else s[i] - sum(others) / len(others)
            loss = y[i] * np.logaddexp(0, -psi) + (1 - y[i]) * np.logaddexp(0, psi)
            same = sum(y[j] == y[i] for j in live)
            if balanced and same < len(live):
                loss *= len(live) / (2 * same)
            total += loss / len(live)
    return total / max(len(groups(d)), 1)


def test_pacs_is_the_papers():
    check(PLAIN_PACS, pacs_loss)
    check(PACS, lambda d, frozen: pacs_loss(d, frozen, balanced=True), g=5)


def test_pacs_choices():
    method = get_method("pacs", beta=0.7, against="ref", estimator="naive")

    def loss(d, frozen):
        return pacs_loss(d, frozen, mu="ref_logprobs", alone=True, balanced=True)

    check(method, loss, g=5)


def test_pacs_gradient_is_rloos_with_the_prediction_error_as_reward():
    rloo = get_method("rloo")
    d = ragged(1, g=5)
    d.members[:] = True
    d.mask[:, :, 0] = True
    d.live = d.mask & d.members[..., None]
    _, ours = run(PLAIN_PACS, d)
    errors = np.zeros_like(d.rewards)
    for n in range(3):
        s = np.array([scores_of(d, n, 0.7)[i] for i in range(5)])
        psi = s - (s.sum() - s) / 4
        errors[n] = (d.rewards[n] > 0.5) - 1 / (1 + np.exp(-psi))
    d.rewards = errors
    _, theirs = run(rloo, d)
    np.testing.assert_allclose(ours["logprobs"], 0.7 * theirs["logprobs"], atol=1e-6)


def test_pacs_of_equal_policies_is_log_2():
    d = on_policy(1)
    full = sum(len(live) > 1 for live in groups(d).values()) / len(groups(d))
    assert run(PACS, d)[0] == pytest.approx(full * np.log(2), rel=1e-5)


def test_a_nan_reward_reaches_the_loss_of_its_group():
    d = ragged(1, binary=True, g=5)
    n, i, _ = imitated(d)[0]
    batch = as_batch(d)
    for method in (NFT, get_method("w_reinforce"), PACS):
        with_nan = batch.replace(rewards=batch.rewards.at[n, i].set(np.nan))
        loss, _ = loss_and_gradient(method, with_nan, live_statistics(method, d))
        assert np.isnan(loss)
