"""Direct alignment against float64 loops from the papers, TRL's losses, and identities."""

import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, live_statistics, loss_and_gradient, ragged, run
from preferences import (
    assert_same,
    before,
    dpo,
    mean_of_pairs,
    orpo,
    pairs_of,
    replaced,
    sigmoid,
    softplus,
    two,
)

from jrl.methods import get_method
from jrl.objectives import combine_terms, compute_advantages, policy_loss, transforms
from jrl.objectives.comparisons import write
from jrl.zoo.methods.demonstrations import demonstrations_first


def of_rewards(loss, beta=0.1):
    return mean_of_pairs(lambda w, l: loss(beta * w.h, beta * l.h))


def logistic(a, b):
    return softplus(b - a)


def smoothed(a, b):
    return 0.8 * softplus(b - a) + 0.2 * softplus(a - b)


def discopop(a, b):
    share = sigmoid((a - b) / 0.05)
    return (1 - share) * softplus(b - a) + share * np.exp(-np.clip(a - b, -20, 20))


def exo(a, b, e=0.01):
    p = sigmoid(a - b)
    return p * (-softplus(b - a) - np.log(1 - e)) + sigmoid(b - a) * (-softplus(a - b) - np.log(e))


PAIRS = {
    "dpo": (of_rewards(logistic), {}),
    "dpo smoothed": (of_rewards(smoothed), {"label_smoothing": 0.2}),
    "dpo hinge": (of_rewards(lambda a, b: max(0, 1 - a + b)), {"loss": "hinge"}),
    "dpo nca": (
        of_rewards(lambda a, b: softplus(-a) + softplus(a) / 2 + softplus(b) / 2),
        {"loss": "nca"},
    ),
    "dpo discopop": (of_rewards(discopop), {"loss": "discopop"}),
    "dpo apo_zero": (of_rewards(lambda a, b: 1 - sigmoid(a) + sigmoid(b)), {"loss": "apo_zero"}),
    "dpo apo_down": (
        of_rewards(lambda a, b: sigmoid(a) + 1 - sigmoid(a - b)),
        {"loss": "apo_down"},
    ),
    "ipo": (mean_of_pairs(lambda w, l: (w.h - l.h - 1 / 0.4) ** 2), {"tau": 0.2}),
    "ipo of means": (
        mean_of_pairs(lambda w, l: (w.h / len(w.tokens) - l.h / len(l.tokens) - 1 / 0.4) ** 2),
        {"tau": 0.2, "length_normalised": True},
    ),
    "robust_dpo": (
        of_rewards(lambda a, b: (0.8 * softplus(b - a) - 0.2 * softplus(a - b)) / 0.6),
        {"noise": 0.2},
    ),
    "exo": (of_rewards(exo), {"label_smoothing": 0.01}),
    "simpo": (
        mean_of_pairs(lambda w, l: softplus(0.5 - 2 * (w.mean - l.mean))),
        {"beta": 2.0, "gamma": 0.5},
    ),
    "orpo": (mean_of_pairs(orpo), {"lambda_": 0.3}),
    "cpo": (mean_of_pairs(lambda w, l: softplus(0.1 * (l.lp - w.lp)) - w.lp), {}),
    "slic": (mean_of_pairs(lambda w, l: max(0, 1 - w.lp + l.lp) - 0.1 * w.lp), {}),
    "online_dpo": (of_rewards(logistic), {}),
    "online_dpo ipo": (mean_of_pairs(lambda w, l: (w.h - l.h - 5) ** 2), {"loss": "ipo"}),
    "rlaif_v": (
        mean_of_pairs(lambda w, l: softplus(0.1 * (l.h - w.h)), 0.8),
        {"min_gap": 0.8},
    ),
    "mpo": (mean_of_pairs(lambda w, l: softplus(0.1 * (l.h - w.h)), 0.8), {"threshold": 0.8}),
    "dpo with a gap": (mean_of_pairs(dpo, 0.8), {"min_gap": 0.8}),
    "cpo hinge": (
        mean_of_pairs(lambda w, l: max(0, 1 + 0.1 * (l.lp - w.lp)) - w.lp),
        {"loss": "hinge"},
    ),
    "simpo smoothed": (
        mean_of_pairs(lambda w, l: smoothed(2 * w.mean - 0.5, 2 * l.mean)),
        {"gamma": 0.5, "label_smoothing": 0.2},
    ),
    "xpo hinge": (of_rewards(lambda a, b: max(0, 1 - a + b)), {"loss": "hinge"}),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pair_losses_are_the_papers(case):
    reference, coefficients = PAIRS[case]
    check(get_method(case.split()[0], **coefficients), reference)


def test_aot_compares_sorted_log_ratios():
    def reference(d, frozen):
        pairs, start = pairs_of(d), pairs_of(frozen)
        order = np.argsort([w.start - l.start for w, l in start])
        refs = sorted(w.ref - l.ref for w, l in start)
        u = [pairs[k][0].lp - pairs[k][1].lp for k in order]
        losses = [softplus(-0.1 * (x - y)) for x, y in zip(u, refs, strict=True)]
        return sum(losses) / max(len(losses), 1)

    check(get_method("aot"), reference, n=5)


def test_unpaired_aot_is_that_of_the_sorted_rewards_at_the_start_of_a_step():
    def start_of_step(d, rng):
        d.proximal_logprobs = d.logprobs.copy()

    def reference(d, frozen):
        pairs = pairs_of(d)
        high, low = (sorted(pair[k].h for pair in pairs) for k in (0, 1))
        losses = [softplus(-0.1 * (x - y)) for x, y in zip(high, low, strict=True)]
        return sum(losses) / max(len(losses), 1)

    check(get_method("aot", pairing="unpaired"), reference, n=5, prepare=start_of_step)


def test_reward_augmented_dpo_prefers_the_score_nearest_to_the_goal():
    def with_goals(d, rng):
        d.ids["goal"] = rng.integers(-1, 2, len(d.rewards))

    def reference(d, frozen):
        pairs = pairs_of(d, -((d.ids["goal"][:, None] - d.rewards) ** 2))
        return sum(dpo(w, l, 0.01) for w, l in pairs) / max(len(pairs), 1)

    check(get_method("reward_augmented_dpo"), reference, prepare=with_goals)


# ---------------------------------------------------------------- TRL


TRL = json.loads((pathlib.Path(__file__).parent / "fixtures" / "trl_pairs.json").read_text())


def trl_batch():
    arrays = {name: np.asarray(value) for name, value in TRL["inputs"].items()}
    d = ragged(0, n=3, g=2, t=4)
    d.mask = arrays["mask"] > 0
    d.members[:] = True
    d.lengths = d.mask.sum(2)
    d.logprobs, d.ref_logprobs = arrays["logprobs"], arrays["ref_logprobs"]
    d.proximal_logprobs = d.logprobs.copy()
    d.rewards[:] = [1.0, 0.0]
    d.live = d.mask.copy()
    return d


PEERS = {
    "dpo.sigmoid": ("dpo", {}, 1),
    "dpo.hinge": ("dpo", {"loss": "hinge"}, 1),
    "dpo.nca_pair": ("dpo", {"loss": "nca"}, 1),
    "dpo.apo_zero": ("dpo", {"loss": "apo_zero"}, 1),
    "dpo.apo_down": ("dpo", {"loss": "apo_down"}, 1),
    "dpo.discopop": ("dpo", {"loss": "discopop"}, 1),
    "dpo.ipo": ("ipo", {"length_normalised": True}, 1),
    "dpo.exo_pair": ("exo", {"label_smoothing": 0.1}, 1),
    "dpo.robust": ("robust_dpo", {"noise": 0.1}, 1),
    "dpo.aot": ("aot", {}, 1),
    "dpo.aot_unpaired": ("aot", {"pairing": "unpaired"}, 1),
    "dpo.sigmoid_norm": ("ddpo", {"beta": 0.1, "gamma": 1.0}, 1),
    # TRL adds the two losses of a pair; the method's is the mean over completions.
    "dpo.sppo_hard": (
        "sppo",
        {"eta": 10.0, "model": "comparison", "against": "others"},
        2,
    ),
    "cpo.sigmoid": ("cpo", {"nll_coef": 0.0}, 1),
    "cpo.simpo": ("simpo", {"beta": 2.0, "gamma": 0.5}, 1),
}


def peer(name):
    kind, _, variant = name.partition(".")
    stored = TRL[kind][variant] if variant else TRL[kind]
    return stored["loss"], np.asarray(stored["gradient"])


@pytest.mark.parametrize("name", PEERS)
def test_losses_and_gradients_are_trls(name):
    method, coefficients, scale = PEERS[name]
    loss, gradient = peer(name)
    got, gradients = run(get_method(method, **coefficients), trl_batch())
    assert scale * got == pytest.approx(loss, rel=2e-5)
    np.testing.assert_allclose(scale * gradients["logprobs"], gradient, rtol=2e-4, atol=2e-6)


def test_the_penalty_of_orpo_is_trls():
    loss, gradient = peer("orpo")
    d = trl_batch()
    with_odds, slope = run(get_method("orpo", lambda_=0.1), d)
    without, flat = run(get_method("orpo", lambda_=0.0), d)
    assert with_odds - without == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(slope["logprobs"] - flat["logprobs"], gradient, atol=2e-6)


def test_bco_without_its_running_mean_is_trls():
    loss, gradient = peer("dpo.bco_pair")
    d = trl_batch()
    d.proximal_logprobs = d.ref_logprobs.copy()  # where the mean log-ratio starts from 0
    got, gradients = run(get_method("bco"), d)
    assert got == pytest.approx(loss, rel=2e-5)
    np.testing.assert_allclose(gradients["logprobs"], gradient, rtol=2e-4, atol=2e-6)


def test_kto_at_a_given_divergence_is_trls():
    loss, gradient = peer("kto")
    d, options = trl_batch(), TRL["kto"]["options"]
    method = get_method("kto", undesirable=options["undesirable_weight"])
    write_shift = transforms.stateless(
        lambda scores, batch: (scores, write(batch, "shift", jnp.float32(options["kl"])))
    )
    shifted = transforms.chain(method.objective.advantage, write_shift)
    got, gradients = run(replaced(method, advantage=shifted), d)
    assert got == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], gradient, atol=2e-6)


def test_dpo_on_demonstrations_and_own_draws_is_spins_loss():
    d = ragged(2, g=2, demonstrations=1)
    method = before(get_method("dpo"), demonstrations_first())
    value, _ = run(method, d)
    losses = []
    for n in range(3):
        if d.live[n].any(axis=1).all():
            h = np.where(d.live[n], d.logprobs[n] - d.ref_logprobs[n], 0).sum(1)
            losses.append(np.logaddexp(0, -0.1 * (h[1] - h[0])))
    assert losses
    assert value == pytest.approx(np.mean(losses), abs=1e-6)


def test_at_the_reference_dpo_is_log_two():
    d = two(0)
    d.logprobs = d.ref_logprobs.copy()
    value, gradients = run(get_method("dpo", beta=0.3), d)
    assert value == pytest.approx(np.log(2), abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"][:, 0][d.live[:, 0]], -0.15 / 3, atol=1e-7)
    np.testing.assert_allclose(gradients["logprobs"][:, 1][d.live[:, 1]], 0.15 / 3, atol=1e-7)


def test_metrics_are_means_over_pairs():
    d = two(1)
    d.rewards[0] = 1.0  # no pair
    objective = get_method("dpo").objective
    batch = as_batch(d)
    advantages, batch, state, _ = compute_advantages(objective, batch, objective.init())
    stats = live_statistics(get_method("dpo"), d)
    _, metrics = policy_loss(objective, stats, batch, advantages, state)
    h = 0.1 * np.where(d.live, d.logprobs - d.ref_logprobs, 0).sum(2)[1:]
    expected = {
        "accuracy": (h[:, 0] > h[:, 1]).mean(),
        "margin": (h[:, 0] - h[:, 1]).mean(),
        "chosen_reward": h[:, 0].mean(),
        "rejected_reward": h[:, 1].mean(),
    }
    for name, number in expected.items():
        total, count = metrics[name]
        assert count == 2
        assert float(total / count) == pytest.approx(number, abs=1e-5)


def test_the_optimum_of_ipo_is_a_finite_margin():
    d = two(0, t=1)
    d.logprobs = d.ref_logprobs.copy()
    d.logprobs[:, 0, 0] += 1 / 0.2
    value, gradients = run(get_method("ipo", tau=0.1), d)
    assert value == pytest.approx(0, abs=1e-9)
    assert np.abs(gradients["logprobs"]).max() < 1e-4


def test_robust_dpo_without_noise_is_dpo_and_its_mean_over_flips_is_clean():
    d = two(0)
    assert_same(get_method("robust_dpo", noise=0.0), get_method("dpo"), d)
    method = get_method("robust_dpo", noise=0.2)
    right = run(method, d)[0]
    clean = run(get_method("dpo"), d)[0]
    d.rewards = d.rewards[:, ::-1].copy()
    wrong = run(method, d)[0]
    assert 0.8 * right + 0.2 * wrong == pytest.approx(clean, abs=1e-6)


def test_exo_is_least_where_the_policy_agrees_with_the_labels():
    d = two(0, t=1)
    d.logprobs = d.ref_logprobs.copy()
    d.logprobs[:, 0, 0] += np.log(0.9 / 0.1) / 0.5
    value, gradients = run(get_method("exo", beta=0.5, label_smoothing=0.1), d)
    assert value == pytest.approx(0, abs=1e-6)
    assert np.abs(gradients["logprobs"]).max() < 1e-5


def test_simpo_without_a_margin_at_equal_lengths_is_dpo_against_a_uniform_reference():
    d = two(3)
    d.mask[:] = True
    d.live = d.mask.copy()
    d.ref_logprobs[:] = -2.0
    assert_same(get_method("simpo", beta=1.0, gamma=0.0), get_method("dpo", beta=0.2), d)
    assert_same(get_method("cpo", nll_coef=0.0), get_method("dpo"), d)


def test_orpo_without_its_penalty_is_supervised_on_the_chosen():
    d = two(1)
    chosen = before(
        replaced(get_method("sft", weigh="sequences")),
        transforms.stateless(
            lambda scores, batch: (scores, batch.replace(members=batch.members & (scores > 0.5)))
        ),
    )
    assert_same(get_method("orpo", lambda_=0.0), chosen, d)


def test_past_its_margin_slic_only_imitates():
    d = two(1)
    d.logprobs[:, 1] -= 50.0
    _, gradients = run(get_method("slic", nll_coef=0.5), d)
    np.testing.assert_allclose(gradients["logprobs"][:, 0][d.live[:, 0]], -0.5 / 3, atol=1e-7)
    assert not gradients["logprobs"][:, 1].any()


def test_aot_on_one_pair_is_dpo():
    d = two(0, n=1)
    assert_same(get_method("aot"), get_method("dpo"), d)


SAME_ON_PAIRS = {
    "online_dpo": {},
    "online_iterative_dpo": {},
    "rlaif_v": {},
    "upo": {"share": 1.0},
    "tp_llama": {},
    "rdpo": {},
    "mpo": {"threshold": 0.0},
    "reward_augmented_dpo": {"beta": 0.1},
}


@pytest.mark.parametrize("name", SAME_ON_PAIRS)
def test_on_plain_pairs_it_is_dpo(name):
    assert_same(get_method(name, **SAME_ON_PAIRS[name]), get_method("dpo"), two(2))


def test_the_goal_of_the_lower_score_reverses_the_pair():
    d, method = two(1), get_method("reward_augmented_dpo")
    d.ids["goal"] = np.zeros(3, int)
    aimed = run(method, d)[0]
    flipped = types.SimpleNamespace(**vars(d))
    flipped.rewards = d.rewards[:, ::-1].copy()
    assert aimed == pytest.approx(run(get_method("dpo", beta=0.01), flipped)[0], abs=1e-6)


def test_a_group_of_one_or_of_equal_rewards_is_left_out():
    d = two(0)
    d.rewards[0], d.members[1, 1] = 1.0, False
    d.live = d.mask & d.members[..., None]
    method = get_method("dpo")
    loss, gradients = loss_and_gradient(method, as_batch(d), live_statistics(method, d))
    assert not gradients["logprobs"][:2].any()
    assert gradients["logprobs"][2].any()
    h = np.where(d.live, d.logprobs - d.ref_logprobs, 0).sum(2)[2]
    assert loss == pytest.approx(np.logaddexp(0, -0.1 * (h[0] - h[1])), abs=1e-6)


def test_terms_of_a_batch_without_a_pair_are_zero():
    d = two(0)
    d.rewards[:] = 1.0
    method = get_method("dpo")
    objective, batch = method.objective, as_batch(d)
    advantages, batch, state, _ = compute_advantages(objective, batch, objective.init())
    terms, _ = policy_loss(objective, live_statistics(method, d), batch, advantages, state)
    assert [float(x) for x in terms["surrogate"]] == [0, 0]
    assert float(combine_terms(objective, terms, state)) == 0


# ---------------------------------------------------------------- siblings in a search tree


def visited(d, rng):
    often = rng.integers(0, 9, d.rewards.shape).astype(np.float64)
    d.visits = np.broadcast_to(often[..., None], d.mask.shape).copy()


def mcts_loss(d, frozen, beta=0.2):
    def of_pair(w, l):
        n_w, n_l = (d.visits[s.n, s.i, 0] for s in (w, l))
        alpha = min(1 / (max(n_w, 1) / n_l + 1) if n_l else 0.0, 0.5)
        a, b = beta * w.h, beta * l.h
        return (1 - alpha) * softplus(b - a) + alpha * softplus(a - b)

    losses = [of_pair(w, l) for w, l in pairs_of(d)]
    return sum(losses) / max(len(losses), 1)


def test_mcts_dpo_trusts_a_pair_by_its_visits():
    check(get_method("mcts_dpo", beta=0.2), mcts_loss, prepare=visited)


def test_mcts_dpo_without_visits_and_step_q_are_dpo():
    d = two(2)
    expected = run(get_method("dpo"), d)
    for name in ("mcts_dpo", "step_q"):
        value, gradients = run(get_method(name), d)
        assert value == pytest.approx(expected[0], rel=1e-6), name
        np.testing.assert_allclose(gradients["logprobs"], expected[1]["logprobs"], atol=1e-7)
