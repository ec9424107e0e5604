"""Reports about sampled tokens, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.sampling.params import make_sampling_params, per_row, sampling_logprobs
from jrl.sampling.report import TokenReport, reported_logprobs

LOGITS = np.random.default_rng(0).normal(scale=3, size=(4, 50)).astype(np.float32)
TRUNCATED = {"truncates": True, "floors": True, "greedy": True}


def mixed():
    """Rows that are greedy, plain, truncated, and greedy with what does not matter then."""
    numbers = per_row(make_sampling_params(), 4).replace(**TRUNCATED)
    return numbers.replace(
        temperature=jnp.array([0.0, 0.7, 1.3, 0.0]),
        top_k=jnp.array([0, 0, 5, 2]),
        top_p=jnp.array([1.0, 1.0, 0.9, 0.4]),
        bias=jnp.zeros((4, 50)).at[:, 3].set(4.0),
    )


def test_greedy_rows_report_the_models_own_and_others_what_they_draw_from():
    reported = np.asarray(reported_logprobs(jnp.asarray(LOGITS), mixed()))
    of_model = LOGITS.astype(np.float64)
    of_model -= np.logaddexp.reduce(of_model, axis=1, keepdims=True)
    np.testing.assert_allclose(reported[[0, 3]], of_model[[0, 3]], atol=1e-5)
    of_sampler = np.asarray(sampling_logprobs(jnp.asarray(LOGITS), mixed()))
    np.testing.assert_array_equal(np.isinf(reported[1:3]), np.isinf(of_sampler[1:3]))
    np.testing.assert_allclose(reported[1:3], of_sampler[1:3], atol=1e-6)
    assert np.isinf(of_sampler[0]).sum() == 49  # the point mass, of which nobody learns anything
    assert np.isinf(reported[2]).sum() >= 45


@pytest.mark.parametrize("columns", [[-1, -1, -1, -1], [0, -1, -1, -1], [-1, 2, 3, -1]], ids=str)
def test_a_step_fills_its_column_where_a_row_wants_it(columns):
    report = TokenReport.empty(jnp.array(columns, jnp.int32), 3, 4)
    tokens = jnp.array([4, 3, 2, 1], jnp.int32)
    step = jax.jit(TokenReport.with_step)
    report = step(report, jnp.int32(1), jnp.asarray(LOGITS), tokens, mixed())
    expected = np.asarray(reported_logprobs(jnp.asarray(LOGITS), mixed()))
    assert not np.asarray(report.logprobs)[:, [0, 2]].any()
    if max(columns) >= 0:
        chosen = expected[np.arange(4), np.asarray(tokens)]
        np.testing.assert_array_equal(report.logprobs[:, 1], chosen)
    else:
        assert not np.asarray(report.logprobs).any()
    if max(columns) > 0:
        order = np.argsort(-expected, axis=1, kind="stable")[:, :4]
        np.testing.assert_array_equal(report.top_ids[:, 1], order)
        np.testing.assert_array_equal(
            report.top_logprobs[:, 1], np.take_along_axis(expected, order, 1)
        )
    else:
        assert not np.asarray(report.top_ids).any()
