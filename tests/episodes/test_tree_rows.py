"""Rows of search trees counted by hand."""

import numpy as np
import pytest

from jrl.episodes.tree import Step, Tree, constrained
from jrl.episodes.tree_rows import rows_of_tree


def step(*ids, done=False):
    return Step(np.array(ids, np.int32), len(ids), done=done)


@pytest.fixture
def toy():
    """Two steps from the root, the first of which was drawn twice; and its leaves."""
    tree = Tree()
    one, two, again = (tree.add(0, step(*ids)) for ids in ((5, 6), (7,), (5, 6)))
    leaves = {
        tree.add(one, step(8, 1, done=True)): 1.0,
        tree.add(one, step(9, 1, done=True)): 0.0,
        tree.add(two, step(1, done=True)): 0.0,
        tree.add(again, step(8, 1, done=True)): 1.0,
        tree.add(again, step(4, 1, done=True)): 1.0,
    }
    tree.add(two, step(3))  # nobody went on from here
    tree.nodes[one].visits, tree.nodes[one].total = 9, -9.0  # of the search's own guide
    return tree, leaves


def test_siblings_have_the_mean_outcomes_behind_them(toy):
    tree, leaves = toy
    first, second = rows_of_tree(tree, (2, 3), leaves).siblings
    assert first == {
        "prompt": [2, 3],
        "responses": [[5, 6], [7]],
        "scores": [0.75, 0.0],
        "visits": [4, 1],
    }
    assert second == {
        "prompt": [2, 3, 5, 6],
        "responses": [[8, 1], [9, 1], [4, 1]],
        "scores": [1.0, 0.0, 1.0],
        "visits": [2, 1, 1],
    }


def test_paths_have_the_values_of_their_steps(toy):
    tree, leaves = toy
    (row,) = rows_of_tree(tree, (2, 3), leaves).paths
    assert row == {
        "prompt": [2, 3],
        "responses": [[5, 6, 8, 1], [5, 6, 9, 1], [7, 1], [5, 6, 4, 1]],
        "scores": [1.0, 0.0, 0.0, 1.0],
        "steps": [[2, 2], [2, 2], [1, 1], [2, 2]],
        "step_values": [[0.75, 1.0], [0.75, 0.0], [0.0, 0.0], [0.75, 1.0]],
    }


def test_the_tree_stays_as_it_is(toy):
    tree, leaves = toy
    before = [(n.visits, n.total, list(n.children)) for n in tree.nodes]
    rows_of_tree(tree, (2,), leaves)
    assert [(n.visits, n.total, n.children) for n in tree.nodes] == before


def test_leaves_that_nobody_judged_count_in_nothing(toy):
    tree, leaves = toy
    right = {leaf: points for leaf, points in leaves.items() if points}
    rows = rows_of_tree(tree, (2,), right)
    assert rows.siblings == []  # all that is known is right
    assert rows.paths[0]["responses"] == [[5, 6, 8, 1], [5, 6, 4, 1]]
    assert rows_of_tree(tree, (2,), {}) == ([], [])


def test_another_backup_gives_other_values(toy):
    tree, leaves = toy
    signs = {leaf: 2 * points - 1 for leaf, points in leaves.items()}
    (row,) = rows_of_tree(tree, (2,), signs, constrained(0.1)).paths
    assert row["scores"] == [1.0, -1.0, -1.0, 1.0]  # points stay those of the leaves
    # A node at depth 1 of 2 gets 2/3 of each right leaf, and a wrong one takes nothing from it:
    # 3 times 2/3 over 4 visits.
    values = row["step_values"]
    np.testing.assert_allclose(values, [[0.5, 1], [0.5, -1], [-2 / 3, -1], [0.5, 1]], rtol=1e-6)
