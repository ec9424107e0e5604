import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.objectives.aggregates import constant_norm, sequence_mean, sequence_sum, token_mean

ALL = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_norm": constant_norm(7),
}


def example(seed=0, b=5, t=6):
    rng = np.random.default_rng(seed)
    mask = np.arange(t) < rng.integers(0, t + 1, b)[:, None]
    mask[0] = False
    return rng.normal(size=(b, t)).astype(np.float32), mask


def loops(name, losses, mask):
    total, sequences, tokens = 0.0, 0, 0
    for row, live in zip(losses.astype(np.float64), mask, strict=True):
        live_losses = [x for x, on in zip(row, live, strict=True) if on]
        if not live_losses:
            continue
        total += (
            sum(live_losses) / len(live_losses) if name == "sequence_mean" else sum(live_losses)
        )
        sequences, tokens = sequences + 1, tokens + len(live_losses)
    counts = {"token_mean": tokens, "constant_norm": 7 * sequences}
    return total, counts.get(name, sequences)


@pytest.mark.parametrize("name", ALL)
def test_each_equals_loops(name):
    losses, mask = example()
    total, count = ALL[name](jnp.asarray(losses), jnp.asarray(mask))
    expected_total, expected_count = loops(name, losses, mask)
    assert float(total) == pytest.approx(expected_total, rel=1e-5)
    assert float(count) == expected_count
    assert total.dtype == count.dtype == jnp.float32


@pytest.mark.parametrize("name", ALL)
def test_dead_losses_are_not_read_and_get_no_gradient(name):
    losses, mask = example()
    spoiled = np.where(mask, losses, np.nan)
    clean = ALL[name](jnp.asarray(losses), jnp.asarray(mask))
    dirty = ALL[name](jnp.asarray(spoiled), jnp.asarray(mask))
    assert [float(x) for x in clean] == [float(x) for x in dirty]
    gradient = jax.grad(lambda x: ALL[name](x, jnp.asarray(mask))[0])(jnp.asarray(spoiled))
    assert not np.asarray(gradient)[~mask].any()
    assert np.asarray(gradient)[mask].all()


@pytest.mark.parametrize("name", ALL)
def test_a_live_nan_makes_the_sum_nan_and_leaves_the_count(name):
    losses, mask = example()
    losses[tuple(np.argwhere(mask)[0])] = np.nan
    total, count = ALL[name](jnp.asarray(losses), jnp.asarray(mask))
    assert np.isnan(total)
    assert float(count) == loops(name, losses, mask)[1]


@pytest.mark.parametrize("name", ALL)
def test_an_empty_mask_gives_zero_of_zero(name):
    losses, mask = example()
    got = ALL[name](jnp.full(losses.shape, jnp.nan), jnp.zeros(mask.shape, bool))
    assert [float(x) for x in got] == [0, 0]


@pytest.mark.parametrize("name", ALL)
def test_parts_add_up_to_the_whole(name):
    losses, mask = (jnp.asarray(x) for x in example())
    total = ALL[name](losses, mask)
    top, bottom = ALL[name](losses[:2], mask[:2]), ALL[name](losses[2:], mask[2:])
    for one, two, all_ in zip(top, bottom, total, strict=True):
        assert float(one + two) == pytest.approx(float(all_), rel=1e-5)


def test_equal_lengths_make_the_means_agree():
    losses, mask = jnp.asarray(example()[0]), jnp.ones((5, 6), bool)
    means = {name: float(s / c) for name, (s, c) in ((n, f(losses, mask)) for n, f in ALL.items())}
    assert means["token_mean"] == pytest.approx(means["sequence_mean"], rel=1e-5)
    assert means["sequence_sum"] == pytest.approx(6 * means["token_mean"], rel=1e-5)
    assert means["constant_norm"] == pytest.approx(6 / 7 * means["token_mean"], rel=1e-5)
