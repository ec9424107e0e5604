"""Matrix products in the dtype of the activations, accumulated in float32 in both directions.

The derivative that JAX makes of a reduced-precision product multiplies float32 cotangents by
reduced-precision operands, which leaves the fast matrix units, and rounds the gradient of a float32
weight on the way. Here it is written out: the backward pass multiplies reduced-precision numbers
too, and the gradient of each operand leaves in that operand's dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.mesh import constrain, divided, platform
from jrl.types import Array, Head

_WORTH = 2**18
"""Numbers in an operand that make its order worth choosing."""

PRODUCT = "product"
"""The name, for rematerialisation, of results of products with weights."""

SEEN = "seen"
"""The same for what attention's backward pass starts from: weights, values seen, log sums."""


class Factored:
    """A weight that is held as several arrays and multiplied as one: ``quant.Int8``, ``lora``'s."""

    def times(self, spec: str, x: Array, dtype: Any = None) -> Array:
        """``product(spec, x, self, dtype)``."""
        raise NotImplementedError

    def in_8_bits(self, inputs: int) -> Factored:
        """The weight with its matrix in 8 bits; ``inputs`` axes are summed over."""
        raise NotImplementedError


def contract(spec: str, x: Array, w: Array | Factored, dtype: Any = None) -> Array:
    """``product`` of activations with a weight, named ``PRODUCT`` for rematerialisation."""
    # A policy that looks for products does not find those inside a custom derivative.
    made = w.times(spec, x, dtype) if isinstance(w, Factored) else product(spec, x, w, dtype)
    return checkpoint_name(made, PRODUCT)


def product(spec: str, x: Array, w: Array, dtype: Any = None) -> Array:
    """``einsum(spec, x, w)`` in the dtype of ``x``, accumulated in float32.

    Args:
      spec: an einsum of two operands, without ellipsis.
      x: activations.
      w: the other operand, converted to the dtype of ``x`` for the product.
      dtype: of the result; None for that of ``x``.
    """
    return _product(spec, x, w, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(spec: str, x: Array, w: Array, dtype: Any) -> Array:
    w = w.astype(x.dtype)
    out = _large(spec, x, w)
    if out is None:
        out = jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def _forward(spec: str, x: Array, w: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return _product(spec, x, w, dtype), (x, w)


def _backward(spec: str, dtype: Any, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    del dtype
    return gradients(spec, *kept, g)


def gradients(spec: str, x: Array, w: Array, g: Array) -> tuple[Array, Array]:
    """Of ``x`` and ``w``, in their dtypes, where that of ``product(spec, x, w)`` is ``g``."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    g = g.astype(x.dtype)
    # The order of operands matters to XLA on the CPU; see ``attention.attend``.
    dx = _large(f"{out},{right}->{left}", g, w.astype(x.dtype))
    if dx is None:
        dx = ordered_einsum(f"{right},{out}->{left}", w.astype(x.dtype), g)
    dw = ordered_einsum(f"{left},{out}->{right}", x, g)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def ordered_einsum(spec: str, a: Array, b: Array) -> Array:
    """``einsum(spec, a, b)`` in float32, in the order of operands that turns the least round.

    XLA's products on the CPU want the summed axes last in the first operand and first in the
    second, and give the free axes of the first one before those of the second. It copies what
    comes otherwise, and with a sum over tokens that can be the largest array of a layer.
    """
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if max(a.size, b.size) < _WORTH:
        return einsum(spec, a, b)
    if (made := _over_rows(spec, a, b)) is not None:
        return made
    if a.dtype != jnp.float32:
        return einsum(spec, a, b)
    natural, swapped = _order(spec, a.shape, b.shape), _order(_swap(spec), b.shape, a.shape)
    if min(natural.copied, swapped.copied) == 0:
        return einsum(spec, a, b)

    def turned(a: Array, b: Array) -> Array:
        chosen, operands = (
            (natural, (a, b)) if natural.copied <= swapped.copied else (swapped, (b, a))
        )
        out = chosen.spec.split("->")[1]
        # Without the barrier XLA would fold the last turn into the product, and turn an operand.
        made = jax.lax.optimization_barrier(einsum(chosen.spec, *operands))
        return jnp.einsum(f"{out}->{spec.split('->')[1]}", made)

    return jax.lax.platform_dependent(a, b, cpu=turned, default=lambda a, b: einsum(spec, a, b))


def _over_rows(spec: str, a: Array, b: Array) -> Array | None:
    """``einsum(spec, a, b)`` if it sums over all rows of two matrices, or of many, on the CPU.

    As products with one summed axis, the first of a matrix, neither operand is copied: Eigen reads
    the first one turned. None for other sums and elsewhere.
    """
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    batch = "".join(x for x in left if x in right and x in out)
    summed = "".join(x for x in left if x in right and x not in out)
    lead = batch + summed
    if not (summed and left.startswith(lead) and right.startswith(lead) and on_eigen(a.dtype)):
        return None
    rows, columns = left.removeprefix(lead), right.removeprefix(lead)
    size = dict(zip(left + right, a.shape + b.shape, strict=True))
    many, count = (math.prod(size[x] for x in axes) for axes in (batch, summed))
    flat_srm, flat_srn = (x.reshape(many, count, -1).astype(jnp.float32) for x in (a, b))
    m, n = flat_srm.shape[2], flat_srn.shape[2]
    # The narrower one first takes up to a third less time; where one is very wide, a tenth more.
    if (m <= n) == (max(m, n) < _WIDE):
        given, made = batch + rows + columns, jnp.einsum("srm,srn->smn", flat_srm, flat_srn)
    else:
        given, made = batch + columns + rows, jnp.einsum("srn,srm->snm", flat_srn, flat_srm)
    # Without the barrier XLA would fold the turn into the product, and turn an operand.
    made = made if given == out else jax.lax.optimization_barrier(made)
    return jnp.einsum(f"{given}->{out}", made.reshape([size[x] for x in given]))


class _Order(NamedTuple):
    """A product in one order of its operands.

    Attributes:
      copied: numbers that are turned round, in operands and result.
      spec: the einsum, its result in the order in which the product gives it.
    """

    copied: int
    spec: str


def _swap(spec: str) -> str:
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    return f"{b},{a}->{out}"


def _order(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> _Order:
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    size = dict(zip(left + right, a + b, strict=True))
    batch = "".join(x for x in left if x in right and x in out)
    summed = "".join(x for x in left if x in right and x not in out)
    rows = "".join(x for x in left if x not in right)
    columns = "".join(x for x in right if x not in left)
    given = batch + rows + columns
    copied = math.prod(a) * (left != batch + rows + summed)
    copied += math.prod(b) * (right != batch + summed + columns)
    copied += math.prod(size[x] for x in given) * (given != out)
    return _Order(copied, f"{inputs}->{given}")


_product.defvjp(_forward, _backward)


# ---------------------------------------------------------------- which library, on the CPU

# XLA hands matrix products to YNNPACK there, and a convolution of width one, which is the same
# numbers, to Eigen. Eigen is the faster one at the sizes of a decoder: by a tenth to a third with
# thousands of rows, unless the second operand must be turned for it, and with tens of rows by half,
# if the weights are the first operand. With eight rows or fewer YNNPACK takes two thirds of the
# time, the weights first there too (measured with JAX 0.10 and 0.12 on two cores with AVX-512).
# Small products, and batches of matrices as in attention, are faster where XLA puts them.

FEW = 64
"""Rows up to which weights are better the first operand."""
VERY_FEW = 8
"""Rows up to which such a product is better left to XLA, if the weights are ``_MANY`` numbers."""
_MANY = 2**16
_WIDE = 2**12
"""Columns from which a matrix is better the first operand of a sum over rows."""
_LARGE_PRODUCT = 2**24
"""Multiplications from which a product is worth the choice."""


def on_eigen(dtype: Any) -> bool:
    """Whether the library is chosen here: up to float32, on a CPU, where no mesh divides programs.

    Shorter floats are widened for it, as they are for any product on a CPU.
    """
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 4
    return short and platform() == "cpu" and not divided()


def lies_turned(rows: int, dtype: Any) -> bool:
    """Whether a product of so many rows with a prepared matrix lies [columns, rows] in memory."""
    return 1 < rows <= FEW and on_eigen(dtype)


def weights_first(w_nk: Array, x_km: Array) -> Array:
    """[N, M] float32, the product of a matrix with the M <= ``FEW`` columns that it is read for."""
    columns = x_km.shape[1]
    if columns > VERY_FEW or w_nk.size < _MANY:
        return multiply(w_nk, x_km)
    # YNNPACK has kernels for four and eight columns; five to seven take longer than eight do.
    more = -columns % 4 if columns > 4 else 0
    wide = jnp.pad(x_km.astype(jnp.float32), ((0, 0), (0, more)))
    return jnp.matmul(w_nk.astype(jnp.float32), wide)[:, :columns]


def _large(spec: str, x: Array, w: Array) -> Array | None:
    """``einsum(spec, x, w)`` if it is one large product of two matrices; else None."""
    found = letters_of(spec)
    if found is None or not on_eigen(x.dtype):
        return None
    rows, summed, columns = found
    size = dict(zip(rows + summed, x.shape, strict=True))
    m, k = (math.prod(size[c] for c in letters) for letters in (rows, summed))
    n = w.size // k
    if m <= FEW or m * k * n < _LARGE_PRODUCT:
        return None
    straight = f",{summed}{columns}->" in spec
    outputs = w.shape[len(summed) :] if straight else w.shape[: len(columns)]
    x_mk = x.reshape(m, k)
    if straight:
        made = multiply(x_mk, w.reshape(k, n))
    else:  # Eigen would have the matrix turned first; YNNPACK reads it as it lies
        made = jnp.matmul(x_mk.astype(jnp.float32), w.reshape(n, k).astype(jnp.float32).T)
    return made.reshape(*x.shape[: len(rows)], *outputs)


def letters_of(spec: str) -> tuple[str, str, str] | None:
    """The rows, summed axes and columns of an einsum that is one product of two matrices.

    Args:
      spec: of two operands.

    Returns:
      Of "<rows><summed>,<summed><columns>-><rows><columns>", or with the second operand turned.
      None for any other.

    >>> letters_of("bqd,dhk->bqhk"), letters_of("bqd,hkd->bqhk")
    (('bq', 'd', 'hk'), ('bq', 'd', 'hk'))
    >>> letters_of("bqd,dhk->bhqk")
    """
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    summed = "".join(c for c in left if c in right and c not in out)
    rows = left.removesuffix(summed)
    columns = out.removeprefix(rows)
    plain = bool(summed and columns) and (rows + summed, rows + columns) == (left, out)
    if not plain or right not in (summed + columns, columns + summed):
        return None
    return rows, summed, columns


@jax.custom_batching.custom_vmap
def multiply(a_mk: Array, b_kn: Array) -> Array:
    """[M, N] float32, the product of two matrices by way of a convolution."""
    layout = ("NWC", "WIO", "NWC")
    a_1mk, b_1kn = a_mk[None].astype(jnp.float32), b_kn[None].astype(jnp.float32)
    made = jax.lax.conv_general_dilated(a_1mk, b_1kn, (1,), "VALID", dimension_numbers=layout)
    return made[0]


@multiply.def_vmap
def _multiply_each(size: int, batched: list[bool], a_mk: Array, b_kn: Array) -> tuple[Array, bool]:
    # Convolutions of a batch of both are one with groups, which is slow.
    del size, batched
    return jnp.matmul(a_mk, b_kn, preferred_element_type=jnp.float32), True


# ---------------------------------------------------------------- products with the vocabulary

# The gradient is written out, because the one that JAX makes of a loop keeps all that every turn
# made: here the scores of one part exist at a time, or, where they are few, only scores are kept.

_LOWEST = -1e30  # finite, so that nothing times it is 0


class _Walk(NamedTuple):
    """How the vocabulary is walked over; static."""

    axis: int
    softcap: float | None
    entropy: bool
    shards: int
    size: int  # columns of a shard
    width: int  # those that are multiplied at once
    keeps: bool  # scores, for the backward pass; it makes them again otherwise

    @property
    def parts(self) -> int:
        return -(-self.size // self.width)


class _Sums(NamedTuple):
    """Of the scores met so far, each [B, T] float32."""

    peak: Array
    total: Array  # of exp(score - peak)
    mean: Array  # of the scores so weighted, not divided
    chosen: Array


def fused_logprobs(
    hidden: Array,
    head: Head,
    tokens: Array,
    temperature: Array,
    *,
    entropy: bool = False,
    devices: tuple[int, int] = (1, 1),
    at_once: int = 2**24,
    kept: int = 2**24,
    room: int = 2**22,
) -> dict[str, Array]:
    """Log-probabilities of tokens under the softmax of a head's scores, and its entropy.

    Scores, sums and results are float32; products and gradients are rounded as in ``product``.

    Args:
      hidden: [B, T, D].
      head: of the policy.
      tokens: [B, T] int32.
      temperature: [] float32, above 0; it carries no gradient.
      entropy: whether to return it.
      devices: over how many the tokens are divided, and over how many the vocabulary.
      at_once: when a device has no more scores than this, the vocabulary is one part.
      kept: when it has no more than this, they are kept for the backward pass; it makes them again
        otherwise.
      room: how many scores a part has on a device; at least 128 for each of its tokens.

    Returns:
      "logprobs" [B, T] float32, nats, and with ``entropy`` also "entropy" [B, T] float32, nats.
    """
    chex.assert_rank([hidden, head.weight, tokens, temperature], [3, 2, 2, 0])
    shards, own = devices[1], max(tokens.size // devices[0], 1)
    size = head.weight.shape[head.axis] // shards
    width = size if own * size <= at_once else min(size, max(128, room // own))
    if size % -(-size // width) == 0:  # parts of one length, of which none overlap
        width = size // -(-size // width)
    walk = _Walk(head.axis, head.softcap, entropy, shards, size, width, own * size <= kept)
    temperature = jax.lax.stop_gradient(temperature)
    early = head.softcap is None and hidden.dtype == jnp.float32
    if early:  # as exact as dividing scores, which are many more
        hidden = hidden / temperature
    over = None if early else temperature
    logprobs, spread = _fused(walk, hidden, head.weight, tokens, over)
    return {"logprobs": logprobs} | ({"entropy": spread} if entropy else {})


def _start(walk: _Walk, i: Array | int) -> Array:
    """The first column of part i; the last part may overlap the one before it."""
    return jnp.minimum(jnp.int32(i) * walk.width, walk.size - walk.width)


def _parts(walk: _Walk) -> Array:
    return jnp.arange(walk.parts, dtype=jnp.int32)


def _shape(walk: _Walk, dim: int) -> tuple[int, ...]:
    return (walk.shards, walk.size, dim) if walk.axis == 0 else (dim, walk.shards, walk.size)


def _part(walk: _Walk, weight: Array, i: Array | int, dtype: Any) -> Array:
    """[s, c, D] (or [D, s, c]), part i of every shard of the weight, for a product in ``dtype``.

    Devices that divide its width send each other the part. XLA would send it slice by slice, and
    add up the scores of as many products of few columns, as compiled for TPUs.
    """
    part = weight.reshape(_shape(walk, weight.shape[1 - walk.axis]))
    if walk.parts > 1:
        part = jax.lax.dynamic_slice_in_dim(part, _start(walk, i), walk.width, walk.axis + 1)
    return constrain(part.astype(dtype), *_axes(walk, "act_embed"))


def _axes(walk: _Walk, width: str) -> tuple[str | None, ...]:
    """Logical axes of a part, its width named as asked."""
    return ("vocab", None, width) if walk.axis == 0 else (width, "vocab", None)


def _spec(walk: _Walk) -> str:
    return "svd" if walk.axis == 0 else "dsv"


def _scores(walk: _Walk, hidden: Array, part: Array, temperature: Array | None) -> Array:
    """[B, T, s, c] float32, over the temperature where there is one."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if walk.axis == 0 and on_eigen(hidden.dtype):
        # As a product of two matrices it reads the weights as they lie, without turning them first.
        flat_rd, flat_vd = (x.reshape(-1, hidden.shape[2]) for x in (hidden, part))
        scores = einsum("rd,vd->rv", flat_rd, flat_vd)
        scores = scores.reshape(*hidden.shape[:2], walk.shards, -1)
    else:
        scores = einsum(f"btd,{_spec(walk)}->btsv", hidden, part)
    if walk.softcap is not None:
        scores = walk.softcap * jnp.tanh(scores / walk.softcap)
    return scores if temperature is None else scores / temperature


def _local(walk: _Walk, tokens: Array, i: Array | int) -> Array:
    """[B, T, s] int32, where in part i of each shard the tokens are, if they are."""
    first = jnp.arange(walk.shards, dtype=jnp.int32) * walk.size + _start(walk, i)
    return tokens[:, :, None] - first[None, None]


def _new(walk: _Walk, i: Array | int) -> Array:
    """[1, 1, 1, c] bool, the columns that no part before part i has."""
    column = _start(walk, i) + jnp.arange(walk.width, dtype=jnp.int32)
    return (column >= jnp.int32(i) * walk.width)[None, None, None]


def _add(walk: _Walk, sums: _Sums, scores: Array, tokens: Array, i: Array | int) -> _Sums:
    local = _local(walk, tokens, i)
    place = jnp.clip(local, 0, walk.width - 1)
    inside = (local == place) & jnp.take(_new(walk, i)[0, 0, 0], place)
    found = jnp.take_along_axis(scores, place[:, :, :, None], axis=3)[:, :, :, 0]
    chosen = sums.chosen + jnp.where(inside, found, 0).sum(-1)
    if walk.size % walk.width:
        scores = jnp.where(_new(walk, i), scores, _LOWEST)
    peak = jnp.maximum(sums.peak, scores.max((2, 3)))
    weights, old = jnp.exp(scores - peak[:, :, None, None]), jnp.exp(sums.peak - peak)
    total = sums.total * old + weights.sum((2, 3))
    mean = sums.mean
    if walk.entropy:
        mean = mean * old + (weights * scores).sum((2, 3))
    return _Sums(peak, total, mean, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    walk: _Walk, hidden: Array, weight: Array, tokens: Array, temperature: Array | None
) -> tuple[Array, Array]:
    return _fused_forward(walk, hidden, weight, tokens, temperature)[0]


def _fused_forward(
    walk: _Walk, hidden: Array, weight: Array, tokens: Array, temperature: Array | None
) -> tuple[tuple[Array, Array], tuple]:
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    sums = _Sums(zeros + _LOWEST, zeros, zeros, zeros)

    def visit(sums: _Sums, i: Array | int) -> tuple[_Sums, Array | None]:
        part = _part(walk, weight, i, hidden.dtype)
        scores = _scores(walk, hidden, part, temperature)
        return _add(walk, sums, scores, tokens, i), scores if walk.keeps else None

    sums, kept = visit(sums, 0) if walk.parts == 1 else jax.lax.scan(visit, sums, _parts(walk))
    whole = sums.peak + jnp.log(sums.total)
    mean = sums.mean / sums.total
    out = sums.chosen - whole, whole - mean if walk.entropy else zeros
    return out, (hidden, weight, tokens, temperature, whole, mean, kept)


def _fused_backward(walk: _Walk, saved: tuple, g: tuple[Array, Array]) -> tuple:
    hidden, weight, tokens, temperature, whole, mean, kept = saved
    of_chosen, of_entropy = (x[:, :, None, None] for x in g)
    spec = _spec(walk)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def visit(i: Array | int, scores: Array | None) -> tuple[Array, Array]:
        part = _part(walk, weight, i, hidden.dtype)
        scores = _scores(walk, hidden, part, temperature) if scores is None else scores
        probs = jnp.exp(scores - whole[:, :, None, None])
        column = jnp.arange(walk.width, dtype=jnp.int32)[None, None, None]
        at_token = column == _local(walk, tokens, i)[:, :, :, None]
        slope = jnp.where(at_token, of_chosen, 0) - of_chosen * probs
        if walk.entropy:
            slope -= of_entropy * probs * (scores - mean[:, :, None, None])
        if walk.softcap is not None:
            assert temperature is not None  # rows are divided by it where nothing is capped
            slope *= 1 - jnp.square(scores * temperature / walk.softcap)
        if walk.size % walk.width:
            slope = jnp.where(_new(walk, i), slope, 0)
        slope = (slope if temperature is None else slope / temperature).astype(hidden.dtype)
        back = einsum(f"{spec},btsv->btd", part, slope)
        slopes = ordered_einsum(f"btd,btsv->{spec}", hidden, slope)
        slopes = constrain(slopes, *_axes(walk, "act_embed"))
        return back, constrain(slopes, *_axes(walk, "embed"))

    if walk.parts == 1:
        back, slopes = visit(0, kept)
    else:
        along = walk.axis + 1

        def add(
            carry: tuple[Array, Array], x: tuple[Array, Array | None]
        ) -> tuple[tuple[Array, Array], None]:
            back, slopes = carry
            more, part = visit(*x)
            at = _start(walk, x[0])
            if walk.size % walk.width:  # where the part overlaps what is there, it adds 0
                part += jax.lax.dynamic_slice_in_dim(slopes, at, walk.width, along)
            slopes = jax.lax.dynamic_update_slice_in_dim(slopes, part, at, along)
            return (back + more, slopes), None

        shape = _shape(walk, weight.shape[1 - walk.axis])
        start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        (back, slopes), _ = jax.lax.scan(add, start, (_parts(walk), kept))
    slopes = slopes.reshape(weight.shape).astype(weight.dtype)
    return back.astype(hidden.dtype), slopes, None, jax.tree.map(jnp.zeros_like, temperature)


_fused.defvjp(_fused_forward, _fused_backward)
