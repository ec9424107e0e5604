"""Search trees counted by hand on toys, and searches that find what they are meant to find."""

import math

import pytest

from jrl.episodes.rounds import search_rounds
from jrl.episodes.tree import (
    SearchPlan,
    Step,
    Tree,
    beam,
    best_first,
    constrained,
    descend,
    dvts,
    frontier,
    mean_backup,
    puct,
    siblings,
    uct,
)

TARGET = "abca"


def letters(paths):
    """Three letters continue every path; four end it, and points say how many are right."""
    out = []
    for path in paths:
        out.append([])
        for letter in "abc":
            word = "".join([*path, letter])
            right = sum(x == y for x, y in zip(word, TARGET, strict=False))
            done = len(word) == len(TARGET)
            points = float(word == TARGET) if done else right / len(TARGET)
            logprob = math.log({"a": 0.5, "b": 0.3, "c": 0.2}[letter])
            out[-1].append(Step(letter, 1, logprob, done=done, points=points))
    return out


def grow(tree, select, expand, backup, *, rounds, tokens=0):
    """Searches with steps that are there at once; the cost."""
    plan = SearchPlan(select, backup, lambda node: node.value, 0, rounds, tokens=tokens)
    search = search_rounds([tree], plan)
    try:
        chosen = next(search)
        while True:
            paths = [[tree.step(j).content for j in tree.path(node)] for _, node, _ in chosen]
            chosen = search.send(expand(paths))
    except StopIteration as end:
        return end.value[0]


def word(tree, node):
    return "".join(tree.nodes[i].step.content for i in tree.path(node))


def test_a_tree_counted_by_hand():
    tree = Tree()
    left, right = tree.add(0, Step("l")), tree.add(0, Step("r"))
    leaf = tree.add(left, Step("x", done=True))
    mean_backup(tree, leaf, 1.0)
    mean_backup(tree, right, 0.0)
    mean_backup(tree, leaf, 0.0)
    assert [(n.visits, n.total) for n in tree.nodes] == [(3, 1.0), (2, 1.0), (1, 0.0), (2, 1.0)]
    assert [tree.nodes[i].value for i in tree.path(leaf)] == [0.5, 0.5]
    assert uct(2.0)(tree, left) == pytest.approx(0.5 + 2 * math.sqrt(math.log(3) / 2))
    assert puct(2.0)(tree, left) == pytest.approx(0.5 + 2 * math.sqrt(3) / 3)
    assert tree.open() == [right]
    assert tree.leaves() == [leaf]
    (group,) = siblings(tree)
    assert group == ([], ["l", "r"], [0.5, 0.0], [2, 1])


def test_a_step_never_visited_comes_first():
    tree = Tree()
    one, other = tree.add(0, Step("1")), tree.add(0, Step("2"))
    mean_backup(tree, one, 1.0)
    assert descend(uct())(tree) == [other]


def test_deepsearch_backs_up_more_near_the_leaf_and_keeps_right_paths_positive():
    tree, backup = Tree(), constrained(0.3)
    a = tree.add(0, Step("a"))
    b = tree.add(a, Step("b", done=True))
    c = tree.add(a, Step("c", done=True))
    backup(tree, b, -1.0)
    totals = [n.total for n in tree.nodes]
    assert totals == pytest.approx([-1 / 3, -2 / 3, -1.0, 0.0])  # (d + 1) / 3, at least 0.3
    backup(tree, c, 1.0)  # right: what was below 0 is replaced
    assert [n.total for n in tree.nodes] == pytest.approx([1 / 3, 2 / 3, -1.0, 1.0])
    backup(tree, b, -1.0)  # wrong: what is above 0 stays
    assert [n.total for n in tree.nodes] == pytest.approx([1 / 3, 2 / 3, -2.0, 1.0])


@pytest.mark.parametrize("score", [uct(0.5), puct(1.0)])
def test_mcts_finds_the_word(score):
    tree = Tree()
    cost = grow(tree, descend(score), letters, mean_backup, rounds=30)
    assert TARGET in {word(tree, i) for i in tree.leaves()}
    assert cost.steps == 3 * cost.expansions == len(tree.nodes) - 1
    assert tree.nodes[0].visits == cost.steps  # every step has points here


@pytest.mark.parametrize(("select", "expansions"), [(beam(1), 4), (beam(2), 7), (dvts(), 10)])
def test_beams_take_what_they_are_wide(select, expansions):
    tree = Tree()
    cost = grow(tree, select, letters, mean_backup, rounds=10)
    assert cost == (expansions, 3 * expansions, 3 * expansions)
    best = max(tree.leaves(), key=lambda i: tree.nodes[i].step.points)
    assert word(tree, best) == TARGET


def test_subtrees_of_dvts_stay_apart():
    tree = Tree()
    grow(tree, dvts(), letters, mean_backup, rounds=10)
    firsts = [word(tree, i)[0] for i in tree.leaves()]
    assert sorted(firsts) == sorted(3 * "abc")  # three leaves below each first letter


def test_best_first_follows_the_likely():
    tree = Tree()
    grow(tree, best_first(), letters, mean_backup, rounds=4)
    assert {word(tree, i) for i in tree.leaves()} == {"aaaa", "aaab", "aaac"}


def test_the_frontier_is_everywhere():
    tree = Tree()
    a, b = tree.add(0, Step("a", entropy=0.1)), tree.add(0, Step("b", entropy=0.9))
    assert frontier()(tree) == [b]
    c = tree.add(b, Step("c", entropy=0.1))
    assert frontier()(tree) == [c]  # deeper
    tree.nodes[b].visits, tree.nodes[b].total = 1, -5.0  # and now behind a bad step
    assert frontier()(tree) == [a]
    assert frontier(max_depth=2)(tree) == [a]
    assert frontier(max_depth=1)(tree) == []


def test_the_budget_of_tokens_ends_a_search():
    cost = grow(Tree(), best_first(), letters, mean_backup, rounds=99, tokens=7)
    assert cost.tokens == 9
    assert grow(Tree(), lambda tree: [], letters, mean_backup, rounds=9) == (0, 0, 0)
