"""Segment statistics against loops over dictionaries, on arrays of any shape."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.objectives import segments as seg

SHAPES = ((5,), (2, 3), (2, 2, 3))


@st.composite
def cases(draw):
    """(values float32, live, ids, ids) of one shape; some segments are constant or alone."""
    shape = draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape))
    number = st.sampled_from([0.1, 0.1, -2.5, 3.0, 1e6, 7.7, -0.3])
    list_of = lambda elements: draw(st.lists(elements, min_size=size, max_size=size))  # noqa: E731
    values = np.array(list_of(number), np.float32).reshape(shape)
    live = np.array(list_of(st.booleans()), bool).reshape(shape)
    first = np.array(list_of(st.sampled_from([-7, 0, 3, 2**31 - 1])), np.int32).reshape(shape)
    second = np.array(list_of(st.sampled_from([0, 1])), np.int32).reshape(shape)
    return values, live, first, second


def loops(values, live, *ids):
    """The places of each live item's segment, by place."""
    members = collections.defaultdict(list)
    for place in np.ndindex(values.shape):
        if live[place]:
            members[tuple(int(i[place]) for i in ids)].append(place)
    return {place: places for places in members.values() for place in places}


def expected(values, live, ids, statistic):
    """[...] float64; 0 where not live."""
    out = np.zeros(values.shape)
    for place, places in loops(values, live, *ids).items():
        items = np.array([values[p] for p in places], np.float64)
        out[place] = statistic(items, places.index(place))
    return out


STATISTICS = {
    "total": lambda x, i: x.sum(),
    "mean": lambda x, i: x.mean(),
    "std": lambda x, i: x.std(),
    "sample std": lambda x, i: x.std(ddof=1) if len(x) > 1 else 0,
    "leave_one_out": lambda x, i: np.delete(x, i).mean() if len(x) > 1 else 0,
    "minimum": lambda x, i: x.min(),
    "maximum": lambda x, i: x.max(),
    "lower quantile": lambda x, i: np.quantile(x, 0.2),
    "median": lambda x, i: np.quantile(x, 0.5),
    "count": lambda x, i: len(x),
}


@jax.jit
def ours(values, live, *ids):
    s = seg.segments(live, *ids)
    return {
        "total": seg.total(values, s),
        "mean": seg.mean(values, s),
        "std": seg.std(values, s),
        "sample std": seg.std(values, s, ddof=1),
        "leave_one_out": seg.leave_one_out(values, s),
        "minimum": seg.minimum(values, s),
        "maximum": seg.maximum(values, s),
        "lower quantile": seg.quantile(values, s, 0.2),
        "median": seg.quantile(values, s, 0.5),
        "count": seg.count(s),
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_against_loops(case):
    values, live, *ids = case
    statistics = ours(values, live, *ids)
    assert set(statistics) == set(STATISTICS)
    scale = np.abs(np.where(live, values, 0)).max() + 1
    for name, statistic in STATISTICS.items():
        want = expected(values, live, ids, statistic)
        np.testing.assert_allclose(statistics[name], want, atol=2e-6 * scale, err_msg=name)
        assert (np.asarray(statistics[name])[~live] == 0).all(), name


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_items_does_not_matter(case, random):
    values, live, *ids = (x.reshape(-1) for x in case)
    order = list(range(values.size))
    random.shuffle(order)
    plain = ours(*(jnp.asarray(x) for x in (values, live, *ids)))
    mixed = ours(*(jnp.asarray(x[order]) for x in (values, live, *ids)))
    scale = np.abs(values).max()
    for name in STATISTICS:
        np.testing.assert_allclose(
            mixed[name], np.asarray(plain[name])[order], atol=1e-6 * scale, err_msg=name
        )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equal_values_have_no_deviation(case):
    values, live, *ids = case
    constant = np.full_like(values, 0.1)
    statistics = ours(constant, live, *ids)
    assert np.array_equal(statistics["mean"], np.where(live, constant, 0))
    assert (np.asarray(statistics["std"]) == 0).all()
    assert np.array_equal(statistics["median"], np.where(live, constant, 0))


def test_a_live_nan_spreads_over_its_segment_and_no_further():
    values = np.array([np.nan, 1.0, 2.0, 3.0, np.nan], np.float32)
    live = np.array([True, True, True, True, False])
    ids = np.array([1, 1, 2, 2, 2], np.int32)
    statistics = ours(values, live, ids, np.zeros(5, np.int32))
    for name in ("total", "mean", "std", "sample std", "minimum", "maximum"):
        assert np.isnan(statistics[name][:2]).all(), name
        assert np.isfinite(statistics[name][2:]).all(), name
    assert np.isnan(statistics["leave_one_out"][1])  # the others of the second hold the NaN
    assert statistics["count"].tolist() == [2, 2, 2, 2, 0]


def test_a_quantile_keeps_to_its_own_segment():
    values = np.arange(6, dtype=np.float32)
    s = seg.segments(jnp.ones(6, bool), jnp.array([4, 9, 4, 9, 4, 9]))
    assert seg.quantile(values, s, 0.0).tolist() == [0, 1, 0, 1, 0, 1]
    assert seg.quantile(values, s, 1.0).tolist() == [4, 5, 4, 5, 4, 5]


@pytest.mark.parametrize("ids", [(), (np.zeros(4, np.int32),)])
def test_without_ids_all_items_are_one_segment(ids):
    values = np.array([1.0, 2.0, 4.0, 9.0], np.float32)
    s = seg.segments(jnp.array([True, True, True, False]), *ids)
    assert seg.total(values, s).tolist() == [7, 7, 7, 0]


def test_ids_broadcast_and_lift():
    """One id a prompt for [N, G] items; and the same under vmap over rows."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    live = np.ones((2, 3), bool)
    s = seg.segments(jnp.asarray(live), jnp.array([[7], [7]]))
    assert seg.total(values, s).tolist() == [[15.0] * 3] * 2
    by_row = jax.vmap(lambda v, m: seg.total(v, seg.segments(m)))(values, live)
    assert by_row.tolist() == [[3.0] * 3, [12.0] * 3]


def test_the_gradient_of_a_deviation_of_equals_is_finite():
    s = seg.segments(jnp.ones(3, bool))
    slope = jax.grad(lambda x: seg.std(x, s).sum())(jnp.ones(3))
    assert np.isfinite(slope).all()
