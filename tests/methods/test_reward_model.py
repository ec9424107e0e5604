"""Reward models and process reward models against float64 loops, and their identities."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import check, members_of, ragged, run, tokens_of
from preferences import best_and_worst, eligible, softplus
from steps import episodes

from jrl.episodes.tree import Step, Tree
from jrl.episodes.tree_rows import rows_of_tree
from jrl.methods import get_method
from jrl.methods.reward_model import quality_values


def value_of(d, n, i):
    return d.values[n, i, tokens_of(d, n, i)[-1]]


def mean_over_groups(loss):
    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            if best_and_worst(d, n, d.rewards[n]):
                v = {i: value_of(d, n, i) for i in eligible(d, n)}
                total += loss(v, d.rewards[n])
                count += 1
        return total / max(count, 1)

    return reference


def mean_over_pairs(loss):
    def of_group(v, r):
        each = [loss(v[i], v[j], r[i] - r[j]) for i in v for j in v if r[i] > r[j]]
        return sum(each) / len(each)

    return mean_over_groups(of_group)


def plackett_luce(v, r):
    total = 0.0
    for k in v:
        below = [v[i] for i in v if r[i] < r[k]]
        total += np.logaddexp.reduce([v[k], *below]) - v[k]
    return total


CASES = {
    "bradley_terry": (mean_over_pairs(lambda w, l, gap: softplus(l - w)), {}),
    "bradley_terry with margin and centring": (
        mean_over_pairs(lambda w, l, gap: softplus(l - w + 0.3 + 0.5 * gap) + 0.1 * (w + l) ** 2),
        {"margin": 0.3, "margin_per_point": 0.5, "centring": 0.1},
    ),
    "margin_ranking": (mean_over_pairs(lambda w, l, gap: max(0, 0.7 - w + l)), {"margin": 0.7}),
    "plackett_luce": (mean_over_groups(plackett_luce), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_reward_losses_are_the_papers(case):
    reference, coefficients = CASES[case]
    check(get_method(case.split()[0], **coefficients), reference, wrt=("values",))


def step_ends(d, n, i):
    tokens = tokens_of(d, n, i)
    step = d.ids["step"][n, i] if "step" in d.ids else np.zeros(d.mask.shape[2])
    return [
        a
        for a, b in zip(tokens, [*tokens[1:], None], strict=False)
        if b is None or step[b] != step[a]
    ]


def process(d, frozen):
    losses = []
    for n in range(len(d.rewards)):
        for i in members_of(d, n):
            for t in step_ends(d, n, i):
                z = d.step_labels[n, i, t] if hasattr(d, "step_labels") else d.rewards[n, i]
                z = min(max(z, 0.0), 1.0)
                v = d.values[n, i, t]
                losses.append(z * softplus(-v) + (1 - z) * softplus(v))
    return sum(losses) / max(len(losses), 1)


def labelled(d, rng):
    d.step_labels = (rng.random(d.mask.shape) < 0.5).astype(np.float64)


def test_prm_judges_the_end_of_each_step():
    check(get_method("prm"), process, wrt=("values",), ids=("step",), prepare=labelled)


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


def test_with_one_step_prm_is_an_outcome_reward_model():
    check(get_method("prm"), process, wrt=("values",), binary=True)


def two(seed):
    d = ragged(seed, g=2)
    d.members[:] = True
    d.mask[..., 0] = True
    d.rewards[:] = [1.0, 0.0]
    return d


def test_of_two_completions_plackett_luce_is_bradley_terry():
    d = two(0)
    one, other = (
        run(get_method(name), d, ("values",)) for name in ("plackett_luce", "bradley_terry")
    )
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    np.testing.assert_allclose(one[1]["values"], other[1]["values"], atol=1e-6)


def test_a_constant_added_to_all_values_changes_nothing_without_centring():
    d, plain = two(1), get_method("bradley_terry")
    before = run(plain, d, ("values",))[0]
    d.values = d.values + 3.0
    assert run(plain, d, ("values",))[0] == pytest.approx(before, abs=1e-5)
    d.values[:] = 2.0
    assert run(plain, d, ("values",))[0] == pytest.approx(np.log(2), abs=1e-6)


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
