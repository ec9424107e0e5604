"""Losses, gradients and advantages against TRL's and verl's own, on the same numbers.

``make_peer_fixtures.py`` says how ``fixtures/policy.json`` was made and what stands in it.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.methods import get_method
from jrl.methods.ratios import drop_covariant, mark_covariant
from jrl.objectives import aggregates, combine_terms, policy_loss, ratios, transforms
from jrl.objectives.advantages import greedy_baseline
from jrl.objectives.corrections import named_correction
from jrl.objectives.kl import estimator
from jrl.objectives.normalizers import decoupled_parts
from jrl.objectives.regularizers import value_loss
from jrl.types import Batch

PEERS = json.loads((pathlib.Path(__file__).parent / "fixtures" / "policy.json").read_text())
N, G, T = 2, 3, 5
INPUTS = {name: np.asarray(value, np.float32) for name, value in PEERS["inputs"].items()}
STATS = ("sampler_logprobs", "proximal_logprobs", "ref_logprobs", "rollout_values", "collision")


def grouped(x):
    """[B, ...] float32 as [N, G, ...]."""
    x = np.asarray(x, np.float32)
    return jnp.asarray(x.reshape(N, G, *x.shape[1:]))


MASK = np.asarray(INPUTS["mask"]).reshape(N, G, T) > 0
SOME = jnp.ones((N, G), bool)


def batch(**changes):
    lengths = jnp.asarray(MASK.sum(2), jnp.int32)
    record = Batch(
        prompt_tokens=jnp.zeros((N, 1), jnp.int32),
        prompt_lengths=jnp.ones(N, jnp.int32),
        tokens=jnp.zeros((N, G, T), jnp.int32),
        lengths=lengths,
        mask=jnp.asarray(MASK),
        rewards=jnp.expand_dims(grouped(INPUTS["rewards"]), 2),
        reward_weights=jnp.ones(1),
        members=SOME,
        baseline=~SOME,
        truncated=~SOME,
        stats={name: grouped(INPUTS[name]) for name in STATS},
        ids={"tie_breaker": jnp.arange(N * G).reshape(N, G)},
    )
    return record.replace(**changes).check()


def with_parts(method, **parts):
    return method._replace(objective=method.objective._replace(**parts))


BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"clip_low": 0.05, "clip_high": 0.1}
GMPO = {"clip_low": 0.3, "clip_high": 0.4}
DPPO = {"weight_cap": 1.5}
METHODS = {
    "grpo": ("grpo", BOUNDS),
    "grpo_kl": ("grpo", {**BOUNDS, "kl_coef": 0.04}),
    "grpo_delta": ("grpo", {**BOUNDS, "dual_clip": 1.3}),
    "off_policy_mask": ("grpo", BOUNDS),
    "dr_grpo": ("dr_grpo", {**BOUNDS, "max_tokens": 7}),
    "dapo": ("dapo", {**BOUNDS, "max_tokens": 7}),
    "bnpo": ("bnpo", BOUNDS),
    "gspo": ("gspo", GSPO),
    "cispo": ("cispo", {"clip_high": 0.3}),
    "sapo": ("sapo_soft", {}),
    "vespo": ("vespo", {}),
    "gmpo": ("gmpo", GMPO),
    "verl_gspo": ("gspo_token", GSPO),
    "verl_sapo": ("sapo_soft", {}),
    "verl_gpg": ("gpg", {}),
    "verl_geo_mean": ("gmpo", GMPO),
    "verl_cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    "verl_ppo_dual": ("dapo", {**BOUNDS, "max_tokens": 7}),
    "verl_dppo_tv": ("dppo_tv", {**DPPO, "limit_low": 0.05, "limit_high": 0.05}),
    "verl_dppo_kl": ("dppo_kl", {**DPPO, "limit_low": 0.002, "limit_high": 0.03}),
}


def loss_of(objective, edited=None):
    """The loss of the given advantages, and its gradient by the log-probabilities [B, T]."""
    record = batch() if edited is None else edited
    advantages = jnp.where(MASK, grouped(INPUTS["advantages"])[..., None], 0)

    @jax.value_and_grad
    def loss(logprobs):
        state = objective.init()
        terms, _ = policy_loss(objective, {"logprobs": logprobs}, record, advantages, state)
        return combine_terms(objective, terms, state)

    value, gradient = loss(grouped(INPUTS["logprobs"]))
    return float(value), np.asarray(gradient).reshape(N * G, T)


def assert_equals(peer, value, gradient):
    assert np.abs(peer["gradient"]).max() > 1e-3
    np.testing.assert_allclose(value, peer["loss"], rtol=2e-5)
    np.testing.assert_allclose(gradient, peer["gradient"], atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_and_its_gradient_are_the_peers(name):
    method, coefficients = METHODS[name]
    objective = get_method(method, **coefficients).objective
    if name == "verl_ppo_dual":
        dual = ratios.clipped_ratio(0.2, 0.28, dual_clip=1.1)
        objective = objective._replace(surrogate=dual)
    if name == "off_policy_mask":  # TRL's option, here at a limit below 0 that bites
        objective = objective._replace(
            surrogate=ratios.with_parts(objective.surrogate, off_policy_limit=-0.2)
        )
    assert_equals(PEERS["losses"][name], *loss_of(objective))


@pytest.mark.parametrize("name", ["verl_clip_cov", "verl_kl_cov"])
def test_the_choice_of_tokens_by_covariance_is_verls(name):
    """verl chooses by the policy of the update, so the step starts there; ratios stay as given."""
    peer = PEERS["losses"][name]
    start = batch()
    start = start.replace(stats={**start.stats, "proximal_logprobs": grouped(INPUTS["logprobs"])})
    ratio = np.exp(INPUTS["logprobs"] - INPUTS["sampler_logprobs"]).reshape(N, G, T)
    a = np.asarray(grouped(INPUTS["advantages"]))
    if name == "verl_kl_cov":
        method = get_method("kl_cov", fraction=0.2, penalty=0.7)
        _, edited, _ = mark_covariant(0.2).apply(jnp.asarray(a), start, ())
        assert edited.stats["marked"].sum() == 4
        assert_equals(peer, *loss_of(method.objective, edited))
        return
    coefficients, _, _ = drop_covariant(1.0, 0.1, 0.6).apply(jnp.asarray(a), start, ())
    dropped = (np.asarray(coefficients) == 0) & MASK
    clipped = ((a[..., None] > 0) & (ratio > 1.28)) | ((a[..., None] < 0) & (ratio < 0.8))
    assert 0 < dropped.sum() < MASK.sum()
    gradient = np.asarray(peer["gradient"]).reshape(N, G, T)
    # A token that the clip holds has no gradient either way, and verl does not choose it.
    np.testing.assert_array_equal((gradient == 0) & MASK, (dropped | clipped) & MASK)
    plain = -a[..., None] * ratio / MASK.sum()
    open_to = MASK & ~dropped & ~clipped
    np.testing.assert_allclose(gradient[open_to], plain[open_to], atol=2e-6)


def advantages_of(transform, record):
    values, edited, _ = transform.apply(record.score(), record, transform.init())
    values = np.asarray(transforms.per_token(values, edited))
    return np.where(MASK, values, 0).reshape(N * G, T), edited


def transform_of(name):
    if name == "gdpo":
        return transforms.chain(decoupled_parts(), transforms.whiten("tokens", ddof=1))
    if name == "gae":
        whiten = transforms.whiten("tokens", ddof=1)
        return transforms.chain(transforms.gae(0.9, 0.8), whiten)
    coefficients = {
        "otb": {"lone_tail": True},
        "reinforce_plus_plus": {"discount": 0.9},
    }.get(name, {})
    return get_method(name, **coefficients).objective.advantage


@pytest.mark.parametrize("name", sorted(PEERS["advantages"]))
def test_advantages_are_verls(name):
    peer, record = PEERS["advantages"][name], batch()
    expected = np.asarray(peer["advantages"])
    if name == "gdpo":
        record = batch(
            rewards=grouped(INPUTS["parts"]),
            reward_weights=jnp.asarray(peer["options"]["weights"]),
        )
    if name == "otb":
        start = grouped(INPUTS["sampler_logprobs"])
        record = record.replace(stats={**record.stats, "proximal_logprobs": start})
    if name == "remax":  # verl is given each prompt's greedy reward; here it is a member
        greedy = np.asarray(peer["options"]["greedy"], np.float32).reshape(N, G)[:, :1]
        rewards = jnp.concatenate([grouped(INPUTS["rewards"]), greedy], axis=1)
        last = jnp.broadcast_to(jnp.arange(G + 1) == G, (N, G + 1))
        ours = jax.vmap(greedy_baseline)(rewards, ~last, last)[:, :G]
        ours = np.asarray(ours).reshape(N * G, 1) * INPUTS["mask"]
        np.testing.assert_allclose(ours, expected, atol=1e-6)
        return
    ours, edited = advantages_of(transform_of(name), record)
    if name == "gpg":  # verl counts rewards that are not 0, not groups that differ
        ours = ours * len(INPUTS["rewards"]) / np.count_nonzero(INPUTS["rewards"])
    # verl's whitening divides by one less than the tokens, REINFORCE++'s by the tokens.
    if name.startswith("reinforce_plus_plus"):
        count = MASK.sum()
        ours = ours * np.sqrt((count - 1) / count)
    np.testing.assert_allclose(ours, expected, atol=3e-6)
    if name == "gae":
        returns = np.asarray(edited.stats["returns"]).reshape(N * G, T)
        np.testing.assert_allclose(returns, peer["returns"], atol=2e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_are_verls(kind):
    ours = estimator(kind)(jnp.asarray(INPUTS["logprobs"]), jnp.asarray(INPUTS["ref_logprobs"]))
    np.testing.assert_allclose(ours, PEERS["kl"][kind], atol=1e-6)


@pytest.mark.parametrize("name", ["tis", "sequence_tis"])
def test_weights_of_the_corrections_are_verls(name):
    correction = named_correction(name, 1.2)
    stats = {k: grouped(INPUTS[k]) for k in ("proximal_logprobs", "sampler_logprobs")}
    ours = jax.vmap(jax.vmap(correction.weight))(stats, jnp.asarray(MASK))
    ours = np.where(MASK, ours, 0).reshape(N * G, T)
    np.testing.assert_allclose(ours, PEERS["weights"][name], atol=1e-6)


def test_the_value_loss_is_verls():
    peer = PEERS["losses"]["value_loss"]
    value = value_loss(1.0, peer["options"]["clip"]).value
    stats = {
        "returns": grouped(peer["options"]["returns"]),
        "rollout_values": grouped(INPUTS["rollout_values"]),
    }

    @jax.value_and_grad
    def loss(values):
        losses = jax.vmap(jax.vmap(value))({**stats, "values": values}, jnp.asarray(MASK))
        total, count = aggregates.token_mean(
            losses.reshape(-1, T), jnp.asarray(MASK).reshape(-1, T)
        )
        return total / count

    mean_loss, gradient = loss(grouped(INPUTS["values"]))
    assert_equals(peer, float(mean_loss), np.asarray(gradient).reshape(N * G, T))
