"""Random ragged batches: float64 arrays for the references, and the same numbers as a Batch."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.types import Batch


def ragged(seed, n=3, g=4, t=5, *, spread=0.3, baseline=False):
    """Unequal lengths, empty rows, tool holes, absent members, equal rewards, a group of one.

    Every number is a float32 held in float64, so that a reference sees what the library sees.
    """
    rng = np.random.default_rng(seed)

    def numbers(*shape, scale=1.0, shift=0.0):
        return (rng.normal(size=shape) * scale + shift).astype(np.float32).astype(np.float64)

    lengths = rng.integers(0, t + 1, (n, g))
    mask = (np.arange(t) < lengths[..., None]) & (rng.random((n, g, t)) < 0.9)
    members = rng.random((n, g)) < 0.85
    members[-1] = np.arange(g) == seed % g  # a group with one live member
    greedy = np.zeros((n, g), bool)
    if baseline:
        greedy[:, 0] = True
        members[:, 0] = False
    rewards = numbers(n, g)
    rewards[seed % n] = rewards[seed % n, 0]  # a group of equal rewards
    d = types.SimpleNamespace(
        rewards=rewards,
        lengths=lengths,
        mask=mask,
        members=members,
        baseline=greedy,
        truncated=rng.random((n, g)) < 0.2,
        live=mask & members[..., None],
        values=numbers(n, g, t),
        rollout_values=numbers(n, g, t),
        entropy=np.abs(numbers(n, g, t)),
        sampler_logprobs=numbers(n, g, t, scale=0.3, shift=-1.5),
    )
    for name in ("logprobs", "proximal_logprobs", "ref_logprobs"):
        shifted = d.sampler_logprobs + numbers(n, g, t, scale=spread)
        setattr(d, name, shifted.astype(np.float32).astype(np.float64))
    return d


def as_batch(d, **changes):
    """The record of the same numbers."""
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    n, g, t = d.mask.shape
    stats = ("sampler_logprobs", "proximal_logprobs", "ref_logprobs", "rollout_values")
    batch = Batch(
        prompt_tokens=jnp.zeros((n, 2), jnp.int32),
        prompt_lengths=jnp.ones(n, jnp.int32),
        tokens=jnp.zeros((n, g, t), jnp.int32),
        lengths=jnp.asarray(d.lengths, jnp.int32),
        mask=jnp.asarray(d.mask),
        rewards=f32(d.rewards)[..., None],
        reward_weights=jnp.ones(1, jnp.float32),
        members=jnp.asarray(d.members),
        baseline=jnp.asarray(d.baseline),
        truncated=jnp.asarray(d.truncated),
        stats={name: f32(getattr(d, name)) for name in stats},
    )
    return batch.replace(**changes).check()


@pytest.fixture(scope="session")
def make_ragged():
    return ragged


@pytest.fixture(scope="session")
def make_batch():
    return as_batch


@pytest.fixture(scope="session")
def loss_and_gradients():
    """(method, batch, numbers) -> loss, gradients by name, metrics, through the public path."""
    import jax

    from jrl.objectives import combine_terms, compute_advantages, policy_loss

    def run(method, batch, d):
        objective = method.objective

        @jax.jit
        @jax.value_and_grad
        def loss(trained, batch):
            state = objective.init()
            advantages, batch, state, _ = compute_advantages(objective, batch, state)
            terms, _ = policy_loss(objective, trained, batch, advantages, state)
            return combine_terms(objective, terms, state)

        names = ("logprobs", "values", "entropy")
        trained = {name: jnp.asarray(getattr(d, name), jnp.float32) for name in names}
        value, gradients = loss(trained, batch)
        return float(value), {k: np.asarray(v, np.float64) for k, v in gradients.items()}

    return run
