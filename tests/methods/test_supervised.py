import numpy as np
import pytest

from jrl.methods import get_method


@pytest.mark.parametrize("weigh", ["tokens", "sequences"])
def test_sft_is_the_mean_negative_log_likelihood(
    weigh, make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(0, 4, 1, 6)
    d.members[:] = True
    d.live = d.mask & d.members[..., None]
    d.rewards[:] = np.nan  # not read
    value, gradients = loss_and_gradients(get_method("sft", weigh=weigh), make_batch(d), d)
    rows = [d.logprobs[i, 0][d.live[i, 0]] for i in range(4) if d.live[i, 0].any()]
    expected = np.zeros_like(d.logprobs)
    if weigh == "tokens":
        loss = -np.concatenate(rows).mean()
        expected[d.live] = -1 / d.live.sum()
    else:
        loss = -np.mean([row.mean() for row in rows])
        for i in range(4):
            expected[i, 0][d.live[i, 0]] = -1 / len(rows) / max(d.live[i, 0].sum(), 1)
    assert value == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], expected, atol=1e-7)


def test_sft_on_nothing_is_zero(make_ragged, make_batch, loss_and_gradients):
    d = make_ragged(0)
    d.mask[:] = False
    value, gradients = loss_and_gradients(get_method("sft"), make_batch(d), d)
    assert value == 0
    assert not gradients["logprobs"].any()


def test_sft_needs_nothing_recorded():
    method = get_method("sft")
    assert method.objective.needs == frozenset()
    assert method.min_group == 1
