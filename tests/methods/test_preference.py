"""Direct alignment against float64 loops from the papers, TRL's losses, and identities."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, live_statistics, loss_and_gradient, ragged, run
from preferences import (
    assert_same,
    before,
    dpo,
    logistic,
    mean_of_pairs,
    of_rewards,
    orpo,
    replaced,
    sigmoid,
    softplus,
    two,
)

from jrl.methods import get_method
from jrl.objectives import combine_terms, compute_advantages, policy_loss, transforms
from jrl.objectives.comparisons import write


def smoothed(a, b):
    return 0.8 * softplus(b - a) + 0.2 * softplus(a - b)


def discopop(a, b):
    share = sigmoid((a - b) / 0.05)
    return (1 - share) * softplus(b - a) + share * np.exp(-np.clip(a - b, -20, 20))


CASES = {
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
    "simpo": (
        mean_of_pairs(lambda w, l: softplus(0.5 - 2 * (w.mean - l.mean))),
        {"beta": 2.0, "gamma": 0.5},
    ),
    "orpo": (mean_of_pairs(orpo), {"lambda_": 0.3}),
    "dpo with a gap": (mean_of_pairs(dpo, 0.8), {"min_gap": 0.8}),
    "simpo smoothed": (
        mean_of_pairs(lambda w, l: smoothed(2 * w.mean - 0.5, 2 * l.mean)),
        {"gamma": 0.5, "label_smoothing": 0.2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pair_losses_are_the_papers(case):
    reference, coefficients = CASES[case]
    check(get_method(case.split()[0], **coefficients), reference)


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


def test_simpo_without_a_margin_at_equal_lengths_is_dpo_against_a_uniform_reference():
    d = two(3)
    d.mask[:] = True
    d.live = d.mask.copy()
    d.ref_logprobs[:] = -2.0
    assert_same(get_method("simpo", beta=1.0, gamma=0.0), get_method("dpo", beta=0.2), d)


def test_orpo_without_its_penalty_is_supervised_on_the_chosen():
    d = two(1)
    chosen = before(
        replaced(get_method("sft", weigh="sequences")),
        transforms.stateless(
            lambda scores, batch: (scores, batch.replace(members=batch.members & (scores > 0.5)))
        ),
    )
    assert_same(get_method("orpo", lambda_=0.0), chosen, d)


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
