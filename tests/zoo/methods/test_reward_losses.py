"""Losses of reward models that single papers published, against float64 loops and identities."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import check, run
from preferences import two
from reward_losses import labelled, mean_over_groups, mean_over_pairs, process
from steps import episodes

from jrl.episodes.tree import Step, Tree
from jrl.episodes.tree_rows import rows_of_tree
from jrl.methods import get_method
from jrl.zoo.methods.reward_model import quality_values


def plackett_luce(v, r):
    total = 0.0
    for k in v:
        below = [v[i] for i in v if r[i] < r[k]]
        total += np.logaddexp.reduce([v[k], *below]) - v[k]
    return total


CASES = {
    "margin_ranking": (mean_over_pairs(lambda w, l, gap: max(0, 0.7 - w + l)), {"margin": 0.7}),
    "plackett_luce": (mean_over_groups(plackett_luce), {}),
}


def test_meds3_learns_how_often_a_step_of_a_tree_ends_well():
    """Two steps below the root, of whose paths 2 of 3 and 0 of 1 are right; labels by counting."""
    tree = Tree()
    good, bad = tree.add(0, Step([5])), tree.add(0, Step([6]))
    ends = [tree.add(good, Step([token], done=True)) for token in (7, 8, 9)]
    points = {**dict(zip(ends, (1.0, 0.0, 1.0), strict=True)), tree.add(bad, Step([1])): 0.0}
    (paths,) = rows_of_tree(tree, [2], points).paths
    labels = {
        tuple(ids): values
        for ids, values in zip(paths["responses"], paths["step_values"], strict=True)
    }
    assert labels == {
        (5, 7): [pytest.approx(2 / 3), 1.0],
        (5, 8): [pytest.approx(2 / 3), 0.0],
        (5, 9): [pytest.approx(2 / 3), 1.0],
        (6, 1): [0.0, 0.0],
    }

    def soft(d, rng):
        labelled(d, rng)
        d.step_labels = rng.choice([0.0, 1 / 3, 2 / 3, 1.0], d.step_labels.shape)

    check(get_method("meds3"), process, wrt=("values",), ids=("step",), prepare=soft)


def test_of_two_completions_plackett_luce_is_bradley_terry():
    d = two(0)
    one, other = (
        run(get_method(name), d, ("values",)) for name in ("plackett_luce", "bradley_terry")
    )
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    np.testing.assert_allclose(one[1]["values"], other[1]["values"], atol=1e-6)


def test_past_the_margin_a_ranking_has_no_gradient():
    d = two(2)
    d.values[:, 0], d.values[:, 1] = 2.0, 0.5
    value, gradients = run(get_method("margin_ranking"), d, ("values",))
    assert value == 0
    assert not gradients["values"].any()
    assert not gradients["logprobs"].any()


def rest_mcts_loss(d, frozen):
    total = count = 0.0
    for n, i, steps in episodes(d):
        v = 0.0
        for k, (_, tokens) in enumerate(steps):
            r = 2 * d.step_labels[n, i, tokens[-1]] - 1
            v = max(v + (1 - v) / (len(steps) - k) * r, 0.0)
            total += (d.values[n, i, tokens[-1]] - v) ** 2
            count += 1
    return total / max(count, 1)


def test_rest_mcts_is_the_papers():
    check(get_method("rest_mcts"), rest_mcts_loss, wrt=("values",), ids=("step",), prepare=labelled)


def test_a_right_solution_rises_to_1_in_equal_steps():
    steps, mask = jnp.array([0, 0, 1, 2, 3]), jnp.ones(5, bool)
    values = quality_values(jnp.ones(5), steps, mask)
    np.testing.assert_allclose(values, [0.25, 0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    wrong = quality_values(jnp.array([1.0, 1.0, -1.0, 1.0, 1.0]), steps, mask)
    np.testing.assert_allclose(wrong, [0.25, 0.25, 0.0, 0.5, 1.0], atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_reward_losses_are_the_papers(name):
    reference, coefficients = CASES[name]
    check(get_method(name, **coefficients), reference, wrt=("values",))
