"""The distribution, for sampler and trainer, against float64 loops and each other; the draw."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import gpu
from jrl.sampling.params import SamplingParams, make_sampling_params, per_row
from jrl.sampling.params import sample as sample_eagerly
from jrl.sampling.params import sampling_logprobs as sampling_logprobs_eagerly
from jrl.sampling.params import token_logprobs as token_logprobs_eagerly

sample = jax.jit(sample_eagerly)
sampling_logprobs = jax.jit(sampling_logprobs_eagerly)
token_logprobs = jax.jit(token_logprobs_eagerly, static_argnames="entropy")


@partial(jax.jit, static_argnames="name")
def slope_of(logits, tokens, sampling_params, *, name):
    """The derivative of one statistic, summed over rows, with respect to the logits."""

    def total(x):
        return token_logprobs_eagerly(x, tokens, sampling_params, entropy=True)[name].sum()

    return jax.grad(total)(logits)


DISTRIBUTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "top_k and top_p": {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.08, "temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "greedy among few": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
}
distributions = pytest.mark.parametrize("knobs", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())


def some_logits(seed, rows, v, scale=2.0):
    return (scale * np.random.default_rng(seed).normal(size=(rows, v))).astype(np.float32)


def params_of_row(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities [V] in float64: temperature, top-k, top-p, min-p, one after the other.

    Tokens as likely as the last one kept are kept too, so the order of ties does not matter.
    """
    x = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / temperature

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    if top_k:
        kth = sorted(x, reverse=True)[min(top_k, len(x)) - 1]
        x = np.where(x >= kth, x, -np.inf)
    if top_p < 1:
        mass, least = 0.0, None
        probs = softmax(x)
        for i in sorted(range(len(x)), key=lambda i: -x[i]):
            if mass >= top_p:
                break
            mass, least = mass + probs[i], x[i]
        x = np.where(x >= least, x, -np.inf)
    if min_p:
        probs = softmax(x)
        x = np.where(probs >= min_p * probs.max(), x, -np.inf)
    return softmax(x)


# ---------------------------------------------------------------- the distribution


@distributions
@pytest.mark.parametrize("v", [3, 48])
def test_the_distribution_against_float64(knobs, v):
    logits = some_logits(v, 8, v)
    got = np.asarray(sampling_logprobs(logits, make_sampling_params(**knobs)))
    assert got.dtype == np.float32
    for row, expected in zip(got, (params_of_row(x, **knobs) for x in logits), strict=True):
        assert np.array_equal(row > -np.inf, expected > 0)
        np.testing.assert_allclose(np.exp(row), expected, atol=2e-6)
        nonzero = expected > 0
        np.testing.assert_allclose(row[nonzero], np.log(expected[nonzero]), atol=2e-5)


@pytest.mark.parametrize(
    ("logits", "knobs", "in_support"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2}, [1, 1, 1, 1, 0]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_p": 0.6}, [1, 1, 1, 1, 0]),
        # Of the four that top-k leaves, 0.47 of the mass is on the first.
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2, "top_p": 0.7}, [1, 1, 1, 1, 0]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2, "top_p": 0.4}, [1, 0, 0, 0, 0]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], {"top_k": 1}, [1, 1, 1, 1, 1]),
        ([2.0, 0.0, 2.0, 0.0, 1.0], {"min_p": 0.3}, [1, 0, 1, 0, 1]),
        ([2.0, 0.0, 2.0, 0.0, 1.0], {"top_k": 100}, [1, 1, 1, 1, 1]),
        ([-0.0, 0.0, -1.0, -np.inf, -2.0], {"top_k": 1}, [1, 1, 0, 0, 0]),
        ([-3.0, -1e-40, 5e30, -4e30, 2.0], {"top_k": 4}, [1, 1, 1, 0, 1]),
        ([-np.inf, 1.0, -np.inf, -np.inf, 0.0], {"top_k": 3}, [0, 1, 0, 0, 1]),
        ([2.0, 0.0, 2.0, 0.0, 1.0], {"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_ties(logits, knobs, in_support):
    logits = np.array([logits], np.float32)
    got = np.asarray(sampling_logprobs(logits, make_sampling_params(**knobs)))[0]
    assert (got > -np.inf).tolist() == np.array(in_support, bool).tolist()
    np.testing.assert_allclose(np.exp(got), params_of_row(logits[0], **knobs), atol=1e-6)


def odd_logits(name, rows, v):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, v))
    match name:
        case "flat":
            x *= 1e-3
        case "sharp":
            x *= 6
        case "heavy tail":
            x = -1.2 * np.log1p(np.arange(v)) + 0.5 * x
        case "one peak":
            x[:, 7] += 25
        case "ties":
            x = np.round(4 * x)
        case "few allowed":
            x[:, 5:] = -np.inf
        case "far apart":
            x *= 1e30
    return x.astype(np.float32)


@pytest.mark.parametrize(
    "name", ["flat", "sharp", "heavy tail", "one peak", "ties", "few allowed", "far apart"]
)
def test_what_is_kept_is_what_sorting_keeps(name):
    """Of more rows than are searched at a time, each with its own distribution."""
    rows, v = 100, 3000
    rng = np.random.default_rng(6)
    top_k, top_p = rng.integers(1, v, rows), rng.uniform(0.2, 1, rows).astype(np.float32)
    top_k[::3], top_p[1::3] = 0, 1.0
    off = np.zeros(rows, np.float32)
    sampling_params = SamplingParams(
        off + 1, jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p), off, truncates=True
    )
    logits = odd_logits(name, rows, v)
    got = np.asarray(sampling_logprobs(logits, sampling_params)) > -np.inf
    sure = 0
    for row, k, p, in_support in zip(logits.astype(np.float64), top_k, top_p, got, strict=True):
        descending = np.sort(row)[::-1]
        least = descending[k - 1] if k else -np.inf
        if p < 1:
            mass = np.cumsum(np.where(descending >= least, np.exp(descending - row.max()), 0))
            mass /= mass[-1]
            if np.abs(mass - p).min() < 1e-5:
                continue  # rounding decides
            least = max(least, descending[np.argmax(mass >= p)])
        sure += 1
        assert np.array_equal(in_support, (row >= least) & (row > -np.inf))
    assert sure > rows / 3


def test_a_search_that_looks_at_its_end_less_often_finds_the_same(monkeypatch):
    logits = odd_logits("heavy tail", 20, 300)
    params = make_sampling_params(top_k=20, top_p=0.8)
    want = sampling_logprobs(logits, params)
    monkeypatch.setattr(gpu, "halvings_at_once", lambda: 8)
    np.testing.assert_array_equal(sampling_logprobs(logits, params), want)


def test_each_row_can_have_its_own_distribution():
    rows = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 4},
        {"top_p": 0.6, "min_p": 0.3},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7},
    ]
    logits = some_logits(0, len(rows), 33)
    one = [make_sampling_params(**knobs) for knobs in rows]
    together = SamplingParams(
        **{
            name: jnp.stack([getattr(sampling_params, name) for sampling_params in one])
            for name in ("temperature", "top_k", "top_p", "min_p")
        },
        truncates=True,
        floors=True,
    )
    got = np.asarray(sampling_logprobs(logits, together))
    for i, knobs in enumerate(rows):
        expected = params_of_row(logits[i], **knobs)
        assert np.array_equal(got[i] > -np.inf, expected > 0)
        np.testing.assert_allclose(np.exp(got[i]), expected, atol=2e-6)


KINDS = [{}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0, "top_k": 2}, {"min_p": 0.2}]


@pytest.mark.parametrize("few", [0, 1, 6, 11])
def test_rows_of_a_mixed_batch_have_the_distribution_they_have_alone(few):
    """To the bit, however many of the others truncate; and nothing is sorted for them."""
    rows = [KINDS[i % 5] if i < few else {"temperature": 0.5 + i / 10} for i in range(11)]
    rows = [rows[i] for i in np.random.default_rng(few).permutation(11)]
    one = [make_sampling_params(**knobs) for knobs in rows]
    names = ("temperature", "top_k", "top_p", "min_p")
    flags = {"truncates": True, "floors": True, "mixed": True}
    together = SamplingParams(
        **{n: jnp.stack([getattr(sampling_params, n) for sampling_params in one]) for n in names},
        **flags,
    )
    logits, uniform = some_logits(few, 11, 70), np.random.default_rng(1).random(11, np.float32)
    sampled = sample(uniform, logits, together)
    separate = together.replace(mixed=False)
    assert np.array_equal(sampling_logprobs(logits, together), sampling_logprobs(logits, separate))
    plain = together.replace(truncates=False, mixed=False, floors=False)
    for sampling_params in (separate, plain):
        same = np.array(
            [sampling_params is separate or knobs.keys() <= {"temperature"} for knobs in rows]
        )
        for mine, other in zip(sampled, sample(uniform, logits, sampling_params), strict=True):
            assert np.array_equal(np.asarray(mine)[same], np.asarray(other)[same])
    for logit, knobs, token in zip(logits, rows, sampled[0], strict=True):
        assert params_of_row(logit, **knobs)[token] > 0
    program = str(jax.make_jaxpr(sample_eagerly)(uniform, logits, together)).splitlines()
    sorts = [line for line in program if "sort[" in line]
    assert sorts
    assert not [line for line in sorts if "70]" in line.partition("=")[0]]  # but of rows


FORBIDDEN = [3, 17, 40]


def biased(v, **knobs):
    """Parameters with a bias on every token, three forbidden, and those numbers in float32."""
    bias = some_logits(11, 1, v)[0]
    bias[[i for i in FORBIDDEN if i < v]] = -np.inf
    return make_sampling_params(**knobs).replace(bias=jnp.asarray(bias)), bias


@distributions
def test_biased_and_masked_distributions(knobs):
    """The distribution is that of the logits plus the bias, for sampler and trainer alike."""
    logits = some_logits(12, 8, 48)
    sampling_params, bias = biased(48, **knobs)
    got = np.asarray(sampling_logprobs(logits, sampling_params))
    expected = np.stack([params_of_row(x, **knobs) for x in logits.astype(np.float64) + bias])
    np.testing.assert_allclose(np.exp(got), expected, atol=2e-6)
    assert (got[:, FORBIDDEN] == -np.inf).all()
    uniform = jax.random.uniform(jax.random.key(1), (8,))
    tokens, logprobs = sample(uniform, logits, sampling_params)
    np.testing.assert_allclose(logprobs, got[np.arange(8), tokens], atol=1e-5)
    if knobs.get("temperature") != 0:  # greedy tokens are scored at temperature 1
        scores = token_logprobs(logits, tokens, sampling_params, entropy=True)
        np.testing.assert_allclose(scores["logprobs"], logprobs, atol=1e-5)
        surprise = np.log(np.where(expected > 0, expected, 1))
        np.testing.assert_allclose(scores["entropy"], -(expected * surprise).sum(1), atol=1e-5)
        for name in ("logprobs", "entropy"):
            slope = np.asarray(slope_of(logits, tokens, sampling_params, name=name))
            assert np.isfinite(slope).all()
            assert (slope[:, FORBIDDEN] == 0).all()


def test_each_row_can_have_its_own_bias():
    logits = some_logits(13, 4, 48)
    bias = some_logits(14, 4, 48)
    sampling_params = make_sampling_params(0.7)
    got = sampling_logprobs(logits, per_row(sampling_params.replace(bias=jnp.asarray(bias)), 4))
    np.testing.assert_allclose(got, sampling_logprobs(logits + bias, sampling_params), atol=1e-5)
    shared = per_row(sampling_params.replace(bias=jnp.asarray(bias[0])), 4)
    assert shared.bias.shape == (4, 48)
    np.testing.assert_allclose(
        sampling_logprobs(logits, shared),
        sampling_logprobs(logits + bias[:1], sampling_params),
        atol=1e-5,
    )
    assert per_row(sampling_params, 4).bias is None


def test_a_distribution_that_keeps_all_is_the_plain_one():
    """The flags may say "perhaps" where the numbers say "no"."""
    logits = some_logits(1, 8, 48)
    plain = make_sampling_params(temperature=0.7)
    perhaps = plain.replace(truncates=True, floors=True)
    np.testing.assert_allclose(
        sampling_logprobs(logits, plain), sampling_logprobs(logits, perhaps), atol=1e-6
    )


def test_logits_of_low_precision_are_scored_in_float32():
    logits = jnp.asarray(some_logits(2, 3, 16), jnp.bfloat16)
    out = sampling_logprobs(logits, make_sampling_params(0.7))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.exp(out).sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"temperature": -0.1}, "sampling.temperature = -0.1"),
        ({"top_k": -1}, "sampling.top_k = -1"),
        ({"top_p": 0.0}, "sampling.top_p = 0.0"),
        ({"top_p": 1.5}, "sampling.top_p = 1.5"),
        ({"min_p": 1.0}, "sampling.min_p = 1.0"),
        ({"min_p": -0.5}, "sampling.min_p = -0.5"),
        ({"temperature": float("nan")}, "sampling.temperature = nan"),
        ({"temperature": 1e-30}, "sampling.temperature = 1e-30"),  # logits would pass float32
        ({"temperature": float("inf")}, "sampling.temperature = inf"),
    ],
)
def test_numbers_outside_their_domain(knobs, message):
    with pytest.raises(UserError, match=message):
        make_sampling_params(**knobs)


# ---------------------------------------------------------------- the trainer's side of it


@distributions
def test_the_trainer_scores_the_same_distribution(knobs):
    if knobs.get("temperature") == 0:
        return  # scored at temperature 1 instead: see below
    logits = some_logits(3, 8, 48)
    ranks = [0, 0, 1, 1, 2, 25, 40, 47]  # likely tokens, which are kept, and unlikely ones
    tokens = np.argsort(-logits, axis=1)[np.arange(8), ranks].astype(np.int32)
    sampling_params = make_sampling_params(**knobs)
    sampled = np.take_along_axis(
        np.asarray(sampling_logprobs(logits, sampling_params)), tokens[:, None], axis=1
    )[:, 0]
    scored = np.asarray(token_logprobs(logits, tokens, sampling_params)["logprobs"])
    in_support = sampled > -np.inf
    assert in_support.sum() >= 3
    np.testing.assert_allclose(scored[in_support], sampled[in_support], atol=1e-6)
    assert np.isfinite(scored).all()
    if sampling_params.truncates or sampling_params.floors:
        assert (~in_support).sum() >= 3


def test_a_token_left_out_is_put_back_among_the_kept():
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    sampling_params = make_sampling_params(top_k=2)
    got = float(token_logprobs(logits, np.array([3]), sampling_params)["logprobs"][0])
    e = np.exp(np.array([3.0, 2.0, 0.0]))
    assert got == pytest.approx(np.log(e[2] / e.sum()), abs=1e-6)
    gradient = np.asarray(slope_of(logits, np.array([3]), sampling_params, name="logprobs"))[0]
    np.testing.assert_allclose(
        gradient, [-e[0] / e.sum(), -e[1] / e.sum(), 0, 1 - e[2] / e.sum()], atol=1e-6
    )


@distributions
def test_the_gradient_is_that_of_the_distribution(knobs):
    """d log p(token) / d logits = (onehot - p) / temperature over the tokens kept."""
    logits = some_logits(5, 8, 48)
    greedy = knobs.get("temperature") == 0
    sampling_params = make_sampling_params(**knobs)
    tokens = np.asarray(
        jnp.argmax(sampling_logprobs(logits, sampling_params), axis=-1), np.int32
    )  # surely kept
    gradient = slope_of(logits, tokens, sampling_params, name="logprobs")
    for row, x, token in zip(np.asarray(gradient), logits, tokens, strict=True):
        temperature = 1.0 if greedy else knobs.get("temperature", 1.0)
        p = params_of_row(x, **(knobs | {"temperature": temperature}))
        np.testing.assert_allclose(row, (np.eye(48)[token] - p) / temperature, atol=2e-6)


def test_greedy_tokens_are_scored_at_temperature_one():
    logits = some_logits(6, 5, 12)
    tokens = np.argmax(logits, axis=1)
    greedy = token_logprobs(logits, tokens, make_sampling_params(0.0))["logprobs"]
    assert np.array_equal(
        greedy, token_logprobs(logits, tokens, make_sampling_params(1.0))["logprobs"]
    )
    assert np.all(np.asarray(greedy) < 0)


@distributions
def test_entropy_against_float64(knobs):
    logits = some_logits(7, 8, 48)
    sampling_params = make_sampling_params(**knobs)
    tokens = np.argmax(logits, axis=1).astype(np.int32)
    got = np.asarray(token_logprobs(logits, tokens, sampling_params, entropy=True)["entropy"])
    knobs = knobs | ({"temperature": 1.0} if knobs.get("temperature") == 0 else {})
    for h, x in zip(got, logits, strict=True):
        p = params_of_row(x, **knobs)
        p = p[p > 0]
        assert h == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    gradient = np.asarray(slope_of(logits, tokens, sampling_params, name="entropy"))
    assert np.isfinite(gradient).all()
    # Adding a constant to the logits changes nothing, so the gradient sums to zero.
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-5)
    p = np.stack([params_of_row(x, **knobs) for x in logits])
    surprise = np.log(np.where(p > 0, p, 1))
    slope = -p * (surprise + got[:, None]) / knobs.get("temperature", 1.0)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)


def test_entropy_only_when_asked():
    assert set(token_logprobs(np.zeros((1, 3)), np.array([0]), make_sampling_params())) == {
        "logprobs"
    }


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize("name", ["plain", "all"])
def test_the_draw_follows_a_biased_distribution(name):
    logits = some_logits(8, 1, 150)
    sampling_params, bias = biased(150, **DISTRIBUTIONS[name])
    p = params_of_row(logits[0].astype(np.float64) + bias, **DISTRIBUTIONS[name])
    goodness_of_fit(p, logits, sampling_params)


@pytest.mark.parametrize(
    ("v", "name"),
    [(150, name) for name in DISTRIBUTIONS] + [(7, "plain"), (64, "plain"), (7, "all")],
)
def test_the_draw_follows_the_distribution(v, name):
    """Chi-square of 20,000 draws, with fixed keys, so that the outcome is fixed too."""
    logits = some_logits(8, 1, v)
    goodness_of_fit(
        params_of_row(logits[0], **DISTRIBUTIONS[name]),
        logits,
        make_sampling_params(**DISTRIBUTIONS[name]),
    )


def goodness_of_fit(p, logits, sampling_params):
    """Asserts that draws from the distribution of one row [1, V] have the probabilities ``p``."""
    v, count = len(p), 20_000
    uniform = jax.random.uniform(jax.random.key(v), (count,))
    logits_of_all = jnp.broadcast_to(logits[0], (count, v))
    tokens, logprobs = sample(uniform, logits_of_all, sampling_params)
    assert tokens.dtype == np.int32
    tokens = np.asarray(tokens)
    np.testing.assert_allclose(
        logprobs, sampling_logprobs(logits, sampling_params)[0][tokens], atol=1e-5
    )
    counts = np.bincount(tokens, minlength=v)
    assert counts[p == 0].sum() == 0
    # Rare tokens are pooled, so that every cell has at least ten expected counts.
    common = p * count >= 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * count
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = (np.square(observed - expected) / expected).sum()
    freedom = len(expected) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9


def draw(uniform, logprobs):
    """Tokens of a distribution given as log-probabilities."""
    return sample(jnp.asarray(uniform), jnp.asarray(logprobs), make_sampling_params())[0]


ABOVE = np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize("v", [5, 64, 130])
@pytest.mark.parametrize("u", [0.0, 1e-9, 0.25, 0.5, 0.75, 0.999999, float(ABOVE)])
def test_never_a_token_of_probability_zero(v, u):
    """Distributions with nothing at the ends, in the middle, or in whole blocks."""
    rng = np.random.default_rng(v)
    probs = rng.random((64, v)) ** 4
    for i, row in enumerate(probs):
        row[rng.random(v) < i / 80] = 0
        row[: i % v] = 0
        row[v - (3 * i) % v :] = 0
        if not row.any():
            row[(7 * i) % v] = 1e-3
    probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
    tokens = np.asarray(
        draw(
            np.full(64, u, np.float32),
            np.log(np.maximum(probs, 1e-45)) + np.where(probs > 0, 0, -np.inf),
        )
    )
    picked = probs[np.arange(64), tokens]
    assert (picked > 0).all()
    # The token is where the running sum passes u, up to rounding.
    above = np.cumsum(probs.astype(np.float64), axis=1)[np.arange(64), tokens]
    assert (above >= u - 1e-5).all()
    assert (above - picked <= u + 1e-5).all()


def test_where_one_token_ends_and_the_next_begins():
    """Numbers at the running sums themselves, where rounding could name an empty token."""
    rng = np.random.default_rng(0)
    probs = rng.random((1, 64)) * (rng.random((1, 64)) < 0.4)
    probs = (probs / probs.sum()).astype(np.float32)
    edges = np.asarray(jnp.cumsum(probs[0]))
    uniform = np.unique([np.nextafter(edges, 0), edges, np.nextafter(edges, 1)])
    uniform = uniform[uniform < 1].astype(np.float32)
    with np.errstate(divide="ignore"):
        logprobs = np.repeat(np.log(probs), len(uniform), axis=0)
    tokens = np.asarray(draw(uniform, logprobs))
    assert (probs[0, tokens] > 0).all()
    assert (np.diff(tokens) >= 0).all()


def test_the_ends_of_the_unit_interval():
    probs = np.zeros((2, 100), np.float32)
    probs[:, [3, 70, 96]] = [0.25, 0.5, 0.25]
    with np.errstate(divide="ignore"):
        tokens = draw(np.array([0.0, ABOVE], np.float32), np.log(probs))
    assert tokens.tolist() == [3, 96]


def test_rows_draw_alone():
    logprobs = sampling_logprobs(some_logits(9, 16, 70), make_sampling_params())
    uniform = jax.random.uniform(jax.random.key(0), (16,))
    together = draw(uniform, logprobs)
    back = draw(uniform[::-1], logprobs[::-1])[::-1]
    assert np.array_equal(together, back)
    assert len(set(together.tolist())) > 4
