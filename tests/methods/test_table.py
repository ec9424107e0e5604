"""One table over all methods: what each must do whatever its paper says.

Each method's program (``table.program``) is compiled once, and everything asked of it goes through
that: several forms of one ragged batch, numbers at their extremes, and twenty steps of training.
``test_table_training.py`` trains by the library's own step.
"""

from __future__ import annotations

import functools

import chain
import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from table import (
    EVERYONE,
    LANES,
    NAMES,
    N,
    as_float32,
    evaluate,
    example,
    fresh_state,
    numbers,
    one_of_each_family,
    out_of_reach,
    reordered,
    side_by_side,
    with_garbage,
)

from jrl.errors import UserError
from jrl.mesh import batch_sharding, make_mesh, replicated
from jrl.methods import all_methods
from jrl.types import STATISTICS
from jrl.zoo.networks.token_values import TokenValues


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    """Each method in turn. By module, so that pytest runs all tests of one before the next one's:
    they share its program, in one worker."""
    return request.param


def assert_close(got, expected, what):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        scale = max(1.0, float(np.max(np.abs(y), initial=0)))
        np.testing.assert_allclose(
            x, y, atol=3e-6 * scale, rtol=1e-4, err_msg=f"{what}: {jax.tree_util.keystr(path)}"
        )


# ---------------------------------------------------------------- the table


def test_a_method_describes_itself(name):
    published, method = all_methods()[name], example(name)
    description = published.describe()
    prose = " ".join((published.__doc__ or "").split())
    assert description["paper"], "the docstring holds the paper's exact title"
    assert description["arxiv"] is not None or "arxiv" in prose.lower(), (
        "it says why there is no id"
    )
    assert description["summary"].endswith(".")
    assert description["family"]
    assert description["seams"] == list(method.seams)
    assert description["min_group"] >= 1
    unknown = method.objective.needs - set(STATISTICS)
    assert unknown <= {statistic.name for statistic in method.objective.statistics}
    for coefficient in description["coefficients"]:
        assert coefficient["domain"]


def test_order_padding_and_division_change_nothing(name):
    rng = np.random.default_rng(1)
    trained, batch = numbers(name)
    prompts, members = rng.permutation(N), rng.permutation(batch.members.shape[1])
    half = np.arange(N) % 2 == 0
    base, shuffled, spoiled, even, odd = side_by_side(
        name,
        [
            (trained, batch, EVERYONE),
            (*reordered(trained, batch, prompts, members), EVERYONE),
            (*with_garbage(trained, batch, rng), EVERYONE),
            (trained, batch, half),
            (trained, batch, ~half),
        ],
    )
    assert np.isfinite(base["loss"])
    live = batch.mask & batch.members[..., None]
    for key, gradient in base["gradients"].items():
        assert not gradient[~live].any(), f"{key}: a gradient in the padding"
    expected = dict(base)
    expected["gradients"] = {key: x[prompts][:, members] for key, x in base["gradients"].items()}
    assert_close(shuffled, expected, "rows in another order")
    assert_close(spoiled, base, "garbage in the padding")
    parts = ("loss", "terms", "gradients")
    summed = jax.tree.map(np.add, {k: even[k] for k in parts}, {k: odd[k] for k in parts})
    assert_close(summed, {k: base[k] for k in parts}, "the two halves of the batch")


@pytest.mark.slow  # a second compilation
@pytest.mark.parametrize("name", sorted(one_of_each_family()), indirect=True, scope="module")
def test_eight_devices_give_what_one_gives(name):
    """Objectives cannot ask for the mesh (``test_package.py``), so one of each family stands for
    all: XLA divides their programs by the same rules."""
    trained, batch = numbers(name)
    mesh = make_mesh({"data": 8})
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    arguments = as_float32((trained, batch, EVERYONE))
    places = jax.tree.map(lambda x: rows if x.shape[:1] == (N,) else everywhere, arguments)
    with jax.set_mesh(mesh):
        run = jax.jit(
            functools.partial(evaluate, example(name).objective),
            in_shardings=(*places, everywhere),
        )
        got = jax.device_get(run(*arguments, fresh_state(name)))
    assert_close(got, side_by_side(name, [(trained, batch, EVERYONE)])[0], "eight devices")


def finite(out):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(out))


@settings(  # a failure names its seed; making it smaller would take minutes
    max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
@given(data=st.data())
def test_no_finite_input_gives_a_nan(name, data):
    """Log-ratios of a hundred nats, rewards of a million, equal rewards, no members, no tokens."""
    seeds = data.draw(st.lists(st.integers(0, 2**16), min_size=LANES, max_size=LANES))
    variants = []
    for seed in seeds:
        spread = data.draw(st.sampled_from([0.0, 1.0, 100.0]))
        reward = data.draw(st.sampled_from([0.0, -1.0, 1e6, -1e6]))
        trained, batch = numbers(name, seed, spread, reward)
        edit = data.draw(st.sampled_from(["none", "none", "no members", "no tokens", "nobody ran"]))
        if edit == "no members":
            batch = batch.replace(members=np.zeros_like(batch.members))
        elif edit == "no tokens":
            batch = batch.replace(mask=np.zeros_like(batch.mask))
        elif edit == "nobody ran":
            zero = np.zeros_like(batch.lengths)
            batch = batch.replace(lengths=zero, mask=np.zeros_like(batch.mask))
        variants.append((trained, batch, EVERYONE))
    for seed, out in zip(seeds, side_by_side(name, variants), strict=True):
        assert finite(out), (seed, jax.tree.map(lambda x: np.isfinite(x).all(), out))
        assert out["nonfinite"] == 0


def test_a_nan_that_is_read_is_reported(name):
    """A NaN log-probability or reward leaves the loss NaN; it is not averaged or masked away."""
    trained, batch = numbers(name)
    richer = batch.replace(rewards=batch.rewards + np.arange(batch.members.shape[1])[:, None] ** 2)
    base, other = side_by_side(name, [(trained, batch, EVERYONE), (trained, richer, EVERYONE)])
    slope = sum(np.abs(x) for x in base["gradients"].values())
    read = [key for key, x in base["gradients"].items() if x.any()]
    assert read, "the loss has no gradient at all"
    inputs = {}
    for key in read:
        at = np.unravel_index(np.argmax(np.abs(base["gradients"][key])), slope.shape)
        spoiled = trained[key].copy()
        spoiled[at] = np.nan
        inputs[key] = ({**trained, key: spoiled}, batch, EVERYONE)
    if other["loss"] != base["loss"]:  # the rewards are read, of the policy's own samples at least
        slopes = (slope * (1 - batch.stats["external"])).sum(2)
        at = np.unravel_index(np.argmax(slopes if slopes.any() else slope.sum(2)), slopes.shape)
        rewards = batch.rewards.copy()
        rewards[at] = np.nan
        inputs["rewards"] = (trained, batch.replace(rewards=rewards), EVERYONE)
    for key, out in zip(inputs, side_by_side(name, list(inputs.values())), strict=True):
        assert np.isnan(out["loss"]), f"NaN {key}: loss {out['loss']}"
        assert out["nonfinite"] > 0, f"NaN {key}"


# ---------------------------------------------------------------- training


def one_by_default(name):
    """A method as a parameter, marked slow unless it is the first of its family."""
    marks = () if name in one_of_each_family() | {chain.FULLEST} else pytest.mark.slow
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [one_by_default(x) for x in NAMES], indirect=True, scope="module")
def test_twenty_steps_stay_finite_and_move_the_right_way(name):
    if isinstance(example(name).network, TokenValues):
        pytest.skip("trains heads of its own: train/test_offline.py")
    if out_of_reach(name):
        with pytest.raises(UserError, match="attention"):
            chain.train(name)
        return
    metrics = chain.assert_learns(name, *chain.train(name))
    assert not any(step_metrics["nonfinite"] for step_metrics in metrics)
