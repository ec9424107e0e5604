"""The sampling distribution, shared by sampler and trainer, and sampling from it.

The sampler draws from ``sampling_logprobs(logits, sampling_params)``; the trainer scores with
``token_logprobs`` under the same ``SamplingParams``. Temperature and truncation are part of the
policy, so ratios are of one distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.errors import UserError
from jrl.mesh import parts_of
from jrl.models import gpu
from jrl.types import Array

COLDEST, HOTTEST = 1e-6, 1e12
"""Temperatures between which logits stay within float32."""
_SUMMED = 64
"""Numbers that are summed at a time, so that little is rounded."""
_ROWS = 4
"""Rows of a mixed batch that are truncated at a time."""
_HALVES = 24
"""Bisection steps between two logits, before bisection of their bits."""
MOST_HALVINGS = _HALVES + 32
"""The longest search: then the interval is one float32."""
_SIGN = np.uint32(1 << 31)
_BLOCK = 64
"""Tokens a block in the two-level draw; 64 measured best on CPU for vocabularies up to 32k."""


class SamplingParams(struct.PyTreeNode):
    """Sampling parameters: temperature, then top-k, top-p, min-p.

    The numbers are arrays so that they can change from step to step, or from row to row, without a
    new executable. The flags are static: a distribution that does not truncate pays nothing for it.

    Attributes:
      temperature: [] or [B] float32; 0 is greedy, a point mass on the largest logit.
      top_k: [] or [B] int32, tokens kept; 0 keeps all.
      top_p: [] or [B] float32, probability kept; 1 keeps all.
      min_p: [] or [B] float32, the least probability kept relative to the largest; 0 keeps all.
      bias: [V] or [B, V] float32, added to the logits before anything else; -inf forbids a token.
        None adds nothing and costs nothing.
      truncates: static, whether top-k or top-p may be in use.
      mixed: static, whether rows have distributions of their own, of which few may truncate: it is
        looked which ones do, and the others pay nothing for it.
      floors: static, whether min-p may be in use.
      greedy: static, whether the temperature of some row may be 0.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    bias: Array | None = None
    truncates: bool = struct.field(pytree_node=False, default=False)
    mixed: bool = struct.field(pytree_node=False, default=False)
    floors: bool = struct.field(pytree_node=False, default=False)
    greedy: bool = struct.field(pytree_node=False, default=True)


def make_sampling_params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParams:
    """A distribution of scalars, checked.

    Raises:
      UserError: a number outside its domain.
    """
    checks = {
        "temperature": (
            temperature,
            temperature == 0 or COLDEST <= temperature <= HOTTEST,
            f"0 (greedy) or {COLDEST} to {HOTTEST}",
        ),
        "top_k": (top_k, top_k >= 0, "0 (off) or a number of tokens"),
        "top_p": (top_p, 0 < top_p <= 1, "above 0, at most 1"),
        "min_p": (min_p, 0 <= min_p < 1, "at least 0, below 1"),
    }
    for name, (value, fine, domain) in checks.items():
        if not fine:
            raise UserError(f"sampling.{name} = {value!r}; must be {domain}")
    # Put on the device as they are: a conversion would be a program of its own.
    return SamplingParams(
        temperature=jax.device_put(np.float32(temperature)),
        top_k=jax.device_put(np.int32(top_k)),
        top_p=jax.device_put(np.float32(top_p)),
        min_p=jax.device_put(np.float32(min_p)),
        truncates=top_k > 0 or top_p < 1,
        floors=min_p > 0,
        greedy=temperature == 0,
    )


def per_row(sampling_params: SamplingParams, rows: int) -> SamplingParams:
    """The parameters with one value per row; shared values are repeated."""

    def spread(x: Array, rank: int) -> Array:
        x = jnp.asarray(x)
        return x if x.ndim == rank else jnp.broadcast_to(x[None], (rows, *x.shape))

    bias = None if sampling_params.bias is None else spread(sampling_params.bias, 2)
    numbers = jax.tree.map(lambda x: spread(x, 1), sampling_params.replace(bias=None))
    return numbers.replace(bias=bias)


def kept_tokens(scaled: Array, sampling_params: SamplingParams) -> Array:
    """[B, V] bool, the tokens that truncation keeps; ``scaled`` are logits over temperature.

    Ties with the last token kept are kept, so the set is a function of the distribution alone.
    """
    scaled = jax.lax.stop_gradient(scaled)
    mask = jnp.ones(scaled.shape, bool)
    if not (sampling_params.truncates or sampling_params.floors):
        return mask
    k, p, min_p = _truncation(scaled, sampling_params)
    if gpu.draws(scaled):
        return scaled >= gpu.least_kept(scaled, k, p, min_p)[:, None]
    if sampling_params.truncates:
        if sampling_params.mixed:
            truncating = ((k > 0) & (k < scaled.shape[-1])) | (p < 1)
            cut = jnp.where(truncating, _cuts_of_some(scaled, k, p, truncating), -jnp.inf)
        else:
            cut = _cuts(scaled, k, p)
        mask = scaled >= cut[:, None]
    if sampling_params.floors:
        peak = jnp.max(scaled, axis=-1, keepdims=True)
        floor = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-30)), -jnp.inf)[:, None]
        mask &= scaled - peak >= floor
    return mask


def _truncation(logits: Array, sampling_params: SamplingParams) -> tuple[Array, ...]:
    """Top-k, top-p and min-p of each row of the logits [B, V]; what a flag rules out is off."""
    rows = logits.shape[:1]
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x), rows)  # noqa: E731
    k, p, floor = map(spread, (sampling_params.top_k, sampling_params.top_p, sampling_params.min_p))
    cold = sampling_params.mixed & (spread(sampling_params.temperature) <= 0)
    return (
        jnp.where(cold, 0, k) if sampling_params.truncates else jnp.zeros_like(k),
        jnp.where(cold, 1.0, p) if sampling_params.truncates else jnp.ones_like(p),
        floor if sampling_params.floors else jnp.zeros_like(floor),
    )


def _cuts(scaled: Array, k: Array, p: Array) -> Array:
    """[B] float32, the smallest logit of each row [B, V] that top-k, then top-p, keep.

    Nothing is sorted: both are thresholds on a sum over the larger logits, searched by halves.
    """
    v = scaled.shape[-1]
    lowest = jnp.min(jnp.where(scaled > -jnp.inf, scaled, jnp.inf), axis=-1)
    limit = jnp.where((k <= 0) | (k > v), jnp.inf, k.astype(jnp.float32))
    cut = _search(scaled, jnp.ones_like(scaled), limit, lowest, lambda x: jnp.ones(x.shape))
    peak = jnp.max(scaled, axis=-1)
    weights = jnp.where(scaled >= cut[:, None], jnp.exp(scaled - peak[:, None]), 0.0)
    total = _sum(weights)
    error = 2 * (_SUMMED + v / _SUMMED) * np.finfo(np.float32).eps * total  # in two sums, at most

    def least(x: Array) -> Array:
        weight = jnp.exp(x - peak)
        return jnp.where(weight > 4 * error, weight, 0.0)

    limit = jnp.where(p >= 1, jnp.inf, p * total)
    return jnp.maximum(cut, _search(scaled, weights, limit, jnp.maximum(lowest, cut), least))


def _cuts_of_some(scaled: Array, k: Array, p: Array, rows_wanted: Array) -> Array:
    """``_cuts`` of the rows wanted [B], a few at a time; -inf, which cuts nothing, elsewhere."""
    rows = scaled.shape[0]
    order, at_once = jnp.argsort(~rows_wanted, stable=True), min(_ROWS, rows)

    def some(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        done, cuts = carry
        # Near the end rows are taken that were done before, or that need nothing.
        index = jax.lax.dynamic_slice_in_dim(order, jnp.minimum(done, rows - at_once), at_once)
        return done + at_once, cuts.at[index].set(_cuts(scaled[index], k[index], p[index]))

    nothing = jnp.full(rows, -jnp.inf)
    return jax.lax.while_loop(lambda c: c[0] < jnp.sum(rows_wanted), some, (jnp.int32(0), nothing))[
        1
    ]


def _ordered(x: Array) -> Array:
    """uint32 in the order of the float32 ``x``."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # no -0
    return jnp.where(bits >> 31 == 1, ~bits, bits | _SIGN)


def _unordered(x: Array) -> Array:
    """The float32 that is ``x`` in order, the inverse of ``_ordered``."""
    bits = jnp.where(x >> 31 == 1, x ^ _SIGN, ~x)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _search(
    values: Array, weights: Array, limit: Array, lowest: Array, least: Callable[[Array], Array]
) -> Array:
    """The greatest value from which on the entries weigh enough.

    Args:
      values: [B, V] float32.
      weights: [B, V] float32.
      limit: [B] float32, how much is enough.
      lowest: [B] float32, the smallest value of interest.
      least: [B] values -> what an entry with that value or a larger one weighs at least, [B]
        float32; 0 where that is too little to be told from rounding. It ends a search early.

    Returns:
      [B] float32; -inf where all entries from ``lowest`` on weigh less than that.
    """

    def above(x: Array) -> Array:
        return _sum(jnp.where(values >= _unordered(x)[:, None], weights, 0.0))

    def open_(low: Array, high: Array, mass: Array, beyond: Array) -> Array:
        several = mass - beyond >= 1.5 * least(_unordered(low))  # entries from low to below high
        return (mass >= limit) & several & (high - low > 1)

    def halve(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, low, high, mass, beyond = carry
        # By value first, which finds the place among entries, then by bits, which ends.
        between = _ordered(_unordered(low) / 2 + _unordered(high) / 2)
        tried = jnp.where(i < _HALVES, between, low + (high - low) // 2)
        tried = jnp.clip(tried, low + 1, high - 1)
        weight = above(tried)
        moves = open_(low, high, mass, beyond)
        up, down = moves & (weight >= limit), moves & (weight < limit)
        return (
            i + 1,
            jnp.where(up, tried, low),
            jnp.where(down, tried, high),
            jnp.where(up, weight, mass),
            jnp.where(down, weight, beyond),
        )

    low, high = _ordered(lowest), _ordered(jnp.max(values, axis=-1)) + 1
    start: tuple[Array, ...] = jnp.int32(0), low, high, above(low), jnp.zeros(low.shape)

    def halves(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        # Rows whose search is over stay as they are.
        return jax.lax.fori_loop(0, at_once, lambda _, carry: halve(carry), carry)

    at_once = gpu.halvings_at_once()
    step = halve if at_once == 1 else halves
    # Named for profiles and for ``plan.useful``: it ends early, so its program has no trip count.
    with jax.named_scope("threshold"):
        _, low, _, mass, _ = jax.lax.while_loop(lambda c: jnp.any(open_(*c[1:])), step, start)
    return jnp.where(mass >= limit, _unordered(low), -jnp.inf)


def _sum(x: Array) -> Array:
    """[B], the sums of rows [B, V], of few numbers each at a time, so that little is rounded."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _SUMMED)))
    return x.reshape(x.shape[0], -1, _SUMMED).sum(1).sum(1)


def scaled_logits(logits: Array, sampling_params: SamplingParams) -> tuple[Array, Array]:
    """Logits over temperature [B, V], and which rows are greedy [B, 1]."""
    temperature = jnp.asarray(sampling_params.temperature)
    temperature = jnp.broadcast_to(temperature, logits.shape[:1])[:, None]
    greedy = temperature <= 0
    return _biased(logits, sampling_params) / jnp.where(greedy, 1.0, temperature), greedy


def _biased(logits: Array, sampling_params: SamplingParams) -> Array:
    """Logits [B, V] float32 with the bias, if there is one."""
    logits, bias = logits.astype(jnp.float32), sampling_params.bias
    if bias is None:
        return logits
    return logits + (bias[None] if bias.ndim == 1 else bias)


def sampling_logprobs(logits: Array, sampling_params: SamplingParams) -> Array:
    """Log-probabilities of all tokens under the distribution.

    Args:
      logits: [B, V] float.
      sampling_params: scalars, or one value a row.

    Returns:
      [B, V] float32, nats; normalised over the tokens kept, -inf for those left out.
    """
    chex.assert_rank(logits, 2)
    scaled, greedy = scaled_logits(logits, sampling_params)
    if sampling_params.truncates or sampling_params.floors:
        scaled = jnp.where(kept_tokens(scaled, sampling_params), scaled, -jnp.inf)
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    if not sampling_params.greedy:
        return log_probs
    first = jax.nn.one_hot(jnp.argmax(scaled, -1), scaled.shape[-1], dtype=bool)
    return jnp.where(greedy, jnp.where(first, 0.0, -jnp.inf), log_probs)


def token_logprobs(
    logits: Array, tokens: Array, sampling_params: SamplingParams, *, entropy: bool = False
) -> dict[str, Array]:
    """Log-probabilities of given tokens under the distribution, as the trainer needs them.

    A token that the present policy's truncation would leave out was drawn from an earlier one's:
    it is put back among the kept, so that its log-probability stays finite and has a gradient.
    At temperature 0 the tokens are scored at temperature 1, since a point mass has no gradient.

    Args:
      logits: [B, V] float.
      tokens: [B] int32.
      sampling_params: scalars, or one value a row.
      entropy: whether to return the distribution's entropy too.

    Returns:
      "logprobs" [B] float32, nats, and with ``entropy`` also "entropy" [B] float32, nats.
    """
    chex.assert_rank([logits, tokens], [2, 1])
    scaled, _ = scaled_logits(logits, sampling_params)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)
    if sampling_params.truncates or sampling_params.floors:
        mask = kept_tokens(scaled, sampling_params)
        mask |= jnp.arange(scaled.shape[-1])[None] == tokens[:, None]
        scaled = jnp.where(mask, scaled, -jnp.inf)
    total = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    out = {"logprobs": (chosen - total)[:, 0]}
    if entropy:
        probs = jnp.exp(scaled - total)
        out["entropy"] = total[:, 0] - jnp.sum(probs * jnp.where(probs > 0, scaled, 0.0), axis=-1)
    return out


# ---------------------------------------------------------------- the draw


def sample(uniform: Array, logits: Array, sampling_params: SamplingParams) -> tuple[Array, Array]:
    """Samples one token per row from one random number each, with its log-probability.

    The cumulative distribution is inverted without normalising it first. The search runs over
    blocks, then inside one, which keeps the running sums short and exact. Drawing this way needs
    one exponential a logit and a single random number; perturbing every logit costs more.

    Args:
      uniform: [B] float32 in [0, 1).
      logits: [B, V] float.
      sampling_params: scalars, or one value a row.

    Returns:
      tokens [B] int32, never one of probability 0, and their log-probabilities [B] float32, nats,
      equal to ``sampling_logprobs(logits, sampling_params)`` at the tokens.
    """
    chex.assert_rank([uniform, logits], [1, 2])
    shaped = sampling_params.truncates or sampling_params.floors
    if gpu.draws(logits):
        temperature = jnp.broadcast_to(jnp.asarray(sampling_params.temperature), logits.shape[:1])
        truncation = _truncation(logits, sampling_params) if shaped else ()
        return gpu.draw(uniform, _biased(logits, sampling_params), temperature, truncation)
    scaled, greedy = scaled_logits(logits, sampling_params)
    if sampling_params.bias is None:
        # The same number as below, and the scaled logits need not be stored to find it.
        largest = jnp.max(logits.astype(jnp.float32), axis=-1, keepdims=True)
        peak = scaled_logits(largest, sampling_params)[0]
    else:
        peak = jnp.max(scaled, axis=-1, keepdims=True)  # no truncation removes it
    if shaped:
        scaled = jnp.where(kept_tokens(scaled, sampling_params), scaled, -jnp.inf)
    weights = jnp.exp(scaled - peak)
    if sampling_params.greedy:
        weights = jnp.where(greedy, (scaled == peak).astype(jnp.float32), weights)

    # First the block in which the running sum passes the target, then the token inside it.
    size = _block(weights.shape[1])
    blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % size)))
    blocks = blocks.reshape(weights.shape[0], -1, size)
    mass = blocks.sum(-1)
    total = mass.sum(-1)
    target = uniform * total
    if sampling_params.greedy:  # the first of the largest, as argmax takes it
        target = jnp.where(greedy[:, 0], 0, target)
    block, left = _invert(target, mass)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _invert(left, inside)
    token = block * size + token
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    logprob = chosen - peak[:, 0] - jnp.log(total)
    return token, jnp.where(greedy[:, 0], 0, logprob) if sampling_params.greedy else logprob


def _block(vocab: int) -> int:
    """Tokens a block: where devices divide the vocabulary, so that they divide the blocks too."""
    parts = parts_of("vocab", vocab)
    sizes = [size for size in (64, 32, 16, 8) if vocab % (size * parts) == 0]
    return sizes[0] if parts > 1 and sizes else _BLOCK


def _invert(target: Array, mass: Array) -> tuple[Array, Array]:
    """The entry of ``mass`` [B, M] where the running sum passes ``target`` [B], and what is left.

    Rounding can carry the target past the last entry with mass; that entry is taken then.
    """
    above = jnp.cumsum(mass, axis=-1)
    last = mass.shape[-1] - 1 - jnp.argmax(mass[:, ::-1] > 0, axis=-1)
    index = jnp.minimum(jnp.sum(above <= target[:, None], axis=-1), last).astype(jnp.int32)
    # A target that lands in an empty entry by rounding moves to the next one with mass.
    empty = (mass > 0) & (jnp.arange(mass.shape[-1])[None] >= index[:, None])
    index = jnp.argmax(empty, axis=-1).astype(jnp.int32)
    below = jnp.take_along_axis(above - mass, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - below, 0.0)
