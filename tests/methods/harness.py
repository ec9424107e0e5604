"""One way for every family to hold a method against a float64 reference written from its paper.

    from harness import check, members_of, sequences

    def rloo_loss(d, frozen):                      # the loss only, in loops, from the paper
        total = 0.0
        for n, i, tokens in sequences(d):          # live members that have a live token
            others = [d.rewards[n, j] for j in members_of(d, n) if j != i]
            a = d.rewards[n, i] - sum(others) / len(others) if others else 0.0
            total -= a * sum(d.logprobs[n, i, t] for t in tokens)
        return total / max(len(sequences(d)), 1)

    def test_rloo_is_the_papers():
        check(get_method("rloo"), rloo_loss)

``check`` makes three random ragged batches (ratios of about e^0.3, e^0.05 and e^3), runs the method
through ``compute_advantages``, ``policy_loss`` and ``combine_terms``, and compares the loss and its
gradient with the reference and the reference's central differences. A reference is a function of
two copies of the batch's numbers: ``d``, of which one statistic at a time is moved, and
``frozen``, which stays: read ``frozen.logprobs`` wherever the paper stops the gradient. Name what
else to differentiate with ``wrt=("logprobs", "values", "entropy")``; statistics that the method
brings along are made by ``prepare``:

    def with_gap(d, rng):                          # a Statistic named "gap", carrying gradient
        d.gap = numbers(rng, *d.mask.shape)

    check(method, reference, wrt=("logprobs", "gap"), prepare=with_gap)

``prepare(d, rng)`` may change anything: rewards to 0 and 1, ``d.ids["turn"] = ...``, lengths.
Further arguments go to ``ragged``: ``check(m, ref, g=2)`` for pairs, ``demonstrations=1``,
``baseline=True``, ``n=..., t=...``, ``ids=("turn", "state")``.

The pieces, for identities and special cases:

    d = ragged(seed)                               # float64 numbers, see its docstring
    batch = as_batch(d)                            # the same numbers as the library's record
    loss, grads = loss_and_gradient(method, batch, live_statistics(method, d))
    one, two = run(method, d), run(other, d)       # the two lines above in one
    advantages = advantages_of(method, d)          # [N, G, T]

The program is compiled once for each method VALUE and shape: keep the method in a variable (or
call ``check`` once) rather than building it anew for every batch. A compilation is most of a test's
time, about 0.2 s.
"""

import copy
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.groups import PlacedGroups
from jrl.methods import get_method
from jrl.objectives import combine_terms, compute_advantages, policy_loss, ratios
from jrl.types import Batch

LIVE = ("logprobs", "entropy", "values")
"""Statistics of the policy being trained; every other [N, G, T] float of ``d`` is the batch's."""

BATCHES = ((0, 0.3), (1, 0.05), (2, 3.0))
"""(seed, spread in nats of every policy around the sampler)."""


def numbers(rng, *shape, scale=1.0, shift=0.0):
    """Normal numbers that are float32, held in float64: both sides see the same ones."""
    return (rng.normal(size=shape) * scale + shift).astype(np.float32).astype(np.float64)


def ragged(
    seed, n=3, g=4, t=5, *, spread=0.3, baseline=False, demonstrations=0, ids=(), binary=False
):
    """Random groups with everything that may go wrong in a real batch.

    Unequal lengths with empty rows among them, holes in the masks, absent members, one group of
    equal rewards (number ``seed % n``), one group with a single live member (the last).

    Args:
      seed: everything follows from it.
      n: prompts.
      g: members of a group.
      t: tokens of the longest completion.
      spread: nats, the deviation of each policy's log-probabilities from the sampler's.
      baseline: True makes member 0 of every group a greedy one (``baseline``, not a member).
      demonstrations: the last so many members are demonstrations: ``external`` is 1 on their
        tokens and ``sampler_logprobs`` 0.
      ids: of "turn", "step", "state", "node", "item" ([N, G, T]; the first two never decrease) and
        "stratum" ([N, G]); "prompt" [N] and "tie_breaker" [N, G] are always there.
      binary: True for rewards of 0 and 1.

    Returns:
      A namespace of float64, bool and int arrays: rewards [N, G]; lengths, members, baseline,
      truncated [N, G]; mask, live [N, G, T]; ids; and the statistics [N, G, T] logprobs, entropy,
      values, sampler_logprobs, proximal_logprobs, ref_logprobs, teacher_logprobs,
      rollout_entropy, rollout_values, external.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, t + 1, (n, g))
    mask = (np.arange(t) < lengths[..., None]) & (rng.random((n, g, t)) < 0.9)
    members = rng.random((n, g)) < 0.85
    members[-1] = np.arange(g) == seed % g
    greedy = np.zeros((n, g), bool)
    if baseline:
        greedy[:, 0] = True
        members[:, 0] = False
    rewards = numbers(rng, n, g)
    if binary:
        rewards = (rewards > 0).astype(np.float64)
    rewards[seed % n] = rewards[seed % n, 0]
    d = types.SimpleNamespace(
        rewards=rewards,
        lengths=lengths,
        mask=mask,
        members=members,
        baseline=greedy,
        truncated=rng.random((n, g)) < 0.2,
        live=mask & members[..., None],
        values=numbers(rng, n, g, t),
        rollout_values=numbers(rng, n, g, t),
        entropy=np.abs(numbers(rng, n, g, t)),
        rollout_entropy=np.abs(numbers(rng, n, g, t)),
        sampler_logprobs=numbers(rng, n, g, t, scale=0.3, shift=-1.5),
        external=np.zeros((n, g, t)),
        ids={
            "prompt": rng.permutation(100)[:n] + 10**6,
            "tie_breaker": rng.integers(0, 2**31 - 1, (n, g)),
        },
    )
    for name in ("logprobs", "proximal_logprobs", "ref_logprobs", "teacher_logprobs"):
        shifted = d.sampler_logprobs + numbers(rng, n, g, t, scale=spread)
        setattr(d, name, shifted.astype(np.float32).astype(np.float64))
    if demonstrations:
        d.external[:, -demonstrations:] = 1
        d.sampler_logprobs[:, -demonstrations:] = 0
    for name in ids:
        shape = (n, g) if name == "stratum" else (n, g, t)
        labels = rng.integers(0, 3, shape)
        d.ids[name] = np.sort(labels, axis=-1) if name in ("turn", "step") else labels
    return d


def as_batch(d, **changes):
    """The library's record of ``d``; ``changes`` replace fields of it."""
    n, g, t = d.mask.shape
    stats = {
        name: jnp.asarray(value, jnp.float32)
        for name, value in vars(d).items()
        if name not in LIVE and np.shape(value) == (n, g, t) and value.dtype == np.float64
    }
    batch = Batch(
        prompt_tokens=jnp.zeros((n, 2), jnp.int32),
        prompt_lengths=jnp.ones(n, jnp.int32),
        tokens=jnp.asarray(getattr(d, "tokens", np.zeros((n, g, t))), jnp.int32),
        lengths=jnp.asarray(d.lengths, jnp.int32),
        mask=jnp.asarray(d.mask),
        rewards=jnp.asarray(d.rewards, jnp.float32).reshape(n, g, -1),
        reward_weights=jnp.ones(d.rewards[0, 0].size, jnp.float32),
        members=jnp.asarray(d.members),
        baseline=jnp.asarray(d.baseline),
        truncated=jnp.asarray(d.truncated),
        stats=stats,
        ids={name: jnp.asarray(value, jnp.int32) for name, value in d.ids.items()},
    )
    return batch.replace(**changes).check()


def live_statistics(method, d, wrt=("logprobs",)):
    """The statistics that ``policy_loss`` is given beside the batch's, by name, float32."""
    names = {"logprobs", *wrt} | (method.objective.needs & set(LIVE))
    return {name: jnp.asarray(getattr(d, name), jnp.float32) for name in sorted(names)}


def loss_and_gradient(method, batch, stats, state=None):
    """The loss of a whole batch and its gradient with respect to each of ``stats``.

    Args:
      method: a ``Method``; its program is compiled once.
      batch: from ``as_batch``.
      stats: from ``live_statistics``: [N, G, T] by name.
      state: the objective's; None for that of a fresh run.

    Returns:
      A float and float64 arrays [N, G, T] by name.
    """
    state = method.objective.init() if state is None else state
    value, gradients = _program(method)(stats, batch, state)
    return float(value), {name: np.asarray(x, np.float64) for name, x in gradients.items()}


def run(method, d, wrt=("logprobs",)):
    """``loss_and_gradient`` of the numbers ``d``."""
    return loss_and_gradient(method, as_batch(d), live_statistics(method, d, wrt))


def advantages_of(method, d):
    """The advantages of every token [N, G, T], as ``compute_advantages`` returns them."""
    objective = method.objective
    compute = jax.jit(lambda batch: compute_advantages(objective, batch, objective.init())[0])
    return np.asarray(compute(as_batch(d)), np.float64)


def central_differences(loss, point, where, step=1e-6):
    """The gradient of ``loss`` (array -> float) at ``point``, taken where ``where`` is True."""
    gradient = np.zeros_like(point)
    for at in zip(*np.nonzero(where), strict=True):
        up, down = point.copy(), point.copy()
        up[at] += step
        down[at] -= step
        gradient[at] = (loss(up) - loss(down)) / (2 * step)
    return gradient


def check(
    method, reference, *, wrt=("logprobs",), batches=BATCHES, prepare=None, some=True, **shape
):
    """Asserts that loss and gradients are the reference's on random ragged batches.

    Args:
      method: a ``Method``.
      reference: (d, frozen) -> float, the paper's loss in float64.
      wrt: the statistics to differentiate. The gradient must be exactly 0 off the live tokens.
      batches: (seed, spread) pairs.
      prepare: None, or (d, rng) -> None, which edits the numbers.
      some: the gradient of each of ``wrt`` must not be zero on at least one of the batches, or the
        test shows nothing; False to do without.
      **shape: for ``ragged``.
    """
    largest = dict.fromkeys(wrt, 0.0)
    for seed, spread in batches:
        d = ragged(seed, spread=spread, **shape)
        if prepare is not None:
            prepare(d, np.random.default_rng(seed + 10**6))
            d.live = d.mask & d.members[..., None]
        assert_matches(method, reference, d, wrt)
        _, gradients = run(method, d, wrt)
        largest = {name: max(top, np.abs(gradients[name]).max()) for name, top in largest.items()}
    assert not some or min(largest.values()) > 1e-6, largest


def assert_matches(method, reference, d, wrt=("logprobs",)):
    """As ``check``, on the one batch ``d``."""
    value, gradients = run(method, d, wrt)
    slopes = {}
    for name in wrt:

        def perturbed(x, name=name):
            point = copy.copy(d)
            setattr(point, name, x)
            return reference(point, d)

        slopes[name] = central_differences(perturbed, getattr(d, name), d.live)
    scale = max(1.0, *(np.abs(slope).max() for slope in slopes.values()))
    np.testing.assert_allclose(value, reference(d, d), rtol=2e-5, atol=2e-5 * scale)
    for name, slope in slopes.items():
        np.testing.assert_allclose(
            gradients[name], slope, rtol=2e-4, atol=2e-5 * scale, err_msg=f"gradient of {name}"
        )
        assert not gradients[name][~d.live].any(), f"gradient of {name} off the live tokens"


def assert_reinforce_on_policy(method, d):
    """Asserts that on-policy the gradient is REINFORCE's with the same advantages."""
    _, ours = run(method, d)
    _, theirs = run(method.with_(surrogate=ratios.reinforce()), d)
    assert np.abs(theirs["logprobs"]).max() > 0.01
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-6)


def assert_cut(name, coefficients):
    """Asserts that off-policy a method's bounds take gradient away: at 50 it has more."""
    d = ragged(2, spread=1.0)
    lower(d, None)
    _, masked = run(get_method(name, **coefficients), d)
    _, uncut = run(get_method(name, **dict.fromkeys(coefficients, 50.0)), d)
    assert np.abs(masked["logprobs"] - uncut["logprobs"]).max() > 1e-3


# ---------------------------------------------------------------- for the loops of references


def rewritten(method, parts, rollout=None):
    """The reward parts [N, G, R] as a method's ``rewards`` leaves them."""
    n, g, r = np.shape(parts)
    zeros, numbers = np.zeros((n, g), np.int32), np.arange(n)
    labels = {}, {}, {}, numbers, numbers, zeros, zeros == 0, zeros
    groups = PlacedGroups(rollout, np.asarray(parts, np.float32), np.ones(r, np.float32), *labels)
    return np.asarray(method.rewards(groups, None).rewards)


def members_of(d, n):
    """The live members of group ``n``."""
    return [i for i in range(d.members.shape[1]) if d.members[n, i]]


def tokens_of(d, n, i):
    """The places under the mask of one member, live or not."""
    return [t for t in range(d.mask.shape[2]) if d.mask[n, i, t]]


def sequences(d):
    """(prompt, member, its live tokens) of every live member with a live token."""
    n_prompts, n_members, _ = d.mask.shape
    every = [(n, i) for n in range(n_prompts) for i in range(n_members) if d.members[n, i]]
    return [(n, i, tokens_of(d, n, i)) for n, i in every if tokens_of(d, n, i)]


def ratio(d, at, below="sampler_logprobs"):
    """pi / mu at a token (n, i, t), its logarithm held within the library's 20 nats."""
    return np.exp(np.clip(d.logprobs[at] - getattr(d, below)[at], -20, 20))


def standard_score(d, rewards=None, eps=1e-6, ddof=1):
    """GRPO's advantages [N, G] of ``rewards``, those of ``d`` unless given; 0 where not live."""
    rewards = d.rewards if rewards is None else rewards
    scores = np.zeros(d.members.shape)
    for n, row in enumerate(d.members):
        group = rewards[n][row]
        if len(group) > 1:
            deviation = np.sqrt(np.sum((group - group.mean()) ** 2) / (len(group) - ddof))
            scores[n, row] = (group - group.mean()) / (deviation + eps)
    return scores


def clipped_loss(r, a, low=0.2, high=0.2, dual=None):
    """PPO's loss of one token of ratio ``r`` and advantage ``a``."""
    gain = min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return -max(gain, dual * a) if dual and a < 0 else -gain


def mean_over(d, of_token, rows="sequences"):
    """The mean of ``of_token(n, i, t)`` over all tokens, or over each sequence and then of those.

    Args:
      d: the batch.
      of_token: the loss of a token.
      rows: "sequences", "tokens", or "sums" for the mean over sequences of their tokens' sums.
    """
    sums = [
        sum(of_token(n, i, t) for t in ts) / (len(ts) if rows == "sequences" else 1)
        for n, i, ts in sequences(d)
    ]
    count = sum(len(ts) for *_, ts in sequences(d)) if rows == "tokens" else len(sums)
    return sum(sums) / max(count, 1)


def with_advantages(d, advantage):
    """GRPO's loss with the advantage of each token given by (n, i, t)."""
    return mean_over(d, lambda n, i, t: clipped_loss(ratio(d, (n, i, t)), advantage(n, i, t)))


def means(d, weigh, each):
    """``mean_over`` of ``each`` of a place (n, i, t)."""
    return mean_over(d, lambda *at: each(at), weigh)


def log_ratio(d, at):
    """log(pi / mu) at a token (n, i, t), nats."""
    return d.logprobs[at] - d.sampler_logprobs[at]


def over_sequences(d, of_sequence, lengths=False):
    """The mean over sequences of a function of (advantage, places), or that times the lengths."""
    a, rows = standard_score(d), sequences(d)
    each = [of_sequence(a[n, i], [(n, i, t) for t in tokens]) for n, i, tokens in rows]
    each = [x * len(row[2]) for x, row in zip(each, rows, strict=True)] if lengths else each
    return sum(each) / max(len(rows), 1)


def lower(d, rng):
    """Log-probabilities of which all are below 0, as those of a distribution are."""
    for name in ("logprobs", "proximal_logprobs", "sampler_logprobs"):
        setattr(d, name, -np.abs(getattr(d, name)) - np.float32(0.01))
        setattr(d, name, getattr(d, name).astype(np.float32).astype(np.float64))


def sum_of_scores(d, advantage, divide):
    """-sum A log pi over the live tokens, divided by the number of "sequences" or "tokens"."""
    rows = "sums" if divide == "sequences" else "tokens"
    return mean_over(d, lambda *at: -advantage(*at) * d.logprobs[at], rows)


def full(seed, **kwargs):
    """Groups of equal lengths without holes."""
    d = ragged(seed, **kwargs)
    d.mask[:], d.members[:], d.lengths[:] = True, True, d.mask.shape[2]
    d.live = d.mask.copy()
    d.rewards = np.random.default_rng(seed).normal(size=d.rewards.shape)
    return d


@functools.lru_cache(maxsize=256)
def _program(method):
    objective = method.objective

    @jax.jit
    @jax.value_and_grad
    def program(stats, batch, state):
        advantages, batch, state, _ = compute_advantages(objective, batch, state)
        terms, _ = policy_loss(objective, stats, batch, advantages, state)
        return combine_terms(objective, terms, state)

    return program
