"""Search in text: what is sampled, what it costs, and that it finds better answers."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit, tiny_config

from jrl.episodes.play import Device
from jrl.episodes.rounds import SearchCost
from jrl.episodes.search import best_node, by_likelihood, by_path, play_search
from jrl.episodes.tree import Tree, search_plan
from jrl.episodes.tree_rows import rows_of_tree
from jrl.episodes.world import TextWorld
from jrl.errors import UserError
from jrl.models.transformer import transformer
from jrl.sampling.rows import Rows
from jrl.types import Prompt

CONFIG = tiny_config(40, vocab_size=16)
NETWORK = transformer(CONFIG)
PROMPTS = ((1, 2), (3,))
END, STEP, ROOMY = 5, 7, 32


@cache
def params():
    return jit(NETWORK.init)(jax.random.key(0))


@cache
def rows(slots, complete):
    return Rows(
        NETWORK,
        slots=slots,
        prompt_tokens=16,
        max_new_tokens=9,
        stop_tokens=(END,) if complete else (END, STEP),
        chunk=3,
        sampling={"temperature": 1.0},
    )


def sixes_in(tokens):
    """Share of nine places that hold a six."""
    return float((tokens == 6).sum()) / 9


def sixes(paths):
    for path in paths:
        assert path.ends[-1] == len(path.tokens)
        assert list(path.ends) == sorted(set(path.ends))
    return [sixes_in(path.tokens) for path in paths]


def search(name, width=3, score=sixes, slots=4, **more):
    plan = search_plan(name, width, **more)
    table = rows(slots, plan.whole)
    table.set_weights(params(), 0)
    world = TextWorld((END,), 0 if plan.whole else 3)
    searched_prompts = [Prompt(i, "", np.array(ids, np.int32), "") for i, ids in enumerate(PROMPTS)]
    searched = play_search(Device(table), world, searched_prompts, [11, 12], plan, by_path(score))
    assert searched.counts["slot_tokens"] == sum(cost.tokens for cost in searched.costs)
    assert searched.counts["read_tokens"] >= sum(map(len, PROMPTS))
    if slots == ROOMY:  # a path is computed once where copies of all nodes have room
        assert searched.counts["read_tokens"] == sum(map(len, PROMPTS))
    return [SearchResult(*each) for each in zip(searched.trees, searched.costs, strict=True)]


class SearchResult(NamedTuple):
    """A tree, what it took, and its best path."""

    tree: Tree
    cost: SearchCost

    @property
    def tokens(self):
        parts = [self.tree.step(i).content for i in self.tree.path(best_node(self.tree))]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    @property
    def points(self):
        return self.tree.step(best_node(self.tree)).points


@pytest.mark.parametrize(
    ("name", "more"), [("greedy", {}), ("beam", {}), ("dvts", {}), ("puct", {"rounds": 6})]
)
def test_steps_end_where_they_should_and_costs_add_up(name, more):
    for each in search(name, **more):
        nodes = each.tree.nodes[1:]
        assert each.cost.steps == len(nodes) == 3 * each.cost.expansions
        assert each.cost.tokens == sum(len(n.step.content) for n in nodes)
        path = lambda i, e=each: sum(len(e.tree.nodes[j].step.content) for j in e.tree.path(i))  # noqa: E731
        for i, node in enumerate(each.tree.nodes[1:], 1):
            ids = node.step.content
            assert 1 <= len(ids) <= 3
            assert not set(ids[:-1].tolist()) & {END, STEP}
            assert node.done == (ids[-1] == END or path(i) >= 9)
        leaves = each.tree.leaves() or range(1, len(each.tree.nodes))
        assert each.points == max(each.tree.nodes[i].step.points for i in leaves)
        assert each.points == sixes_in(each.tokens)


def test_best_of_n_is_n_whole_completions():
    for each in search("best_of_n", 4):
        assert (each.cost.expansions, each.cost.steps) == (1, 4)
        assert all(n.done for n in each.tree.nodes[1:])
        assert each.points == max(n.step.points for n in each.tree.nodes[1:])


def test_what_a_search_drew_is_what_its_rows_hold_id_for_id():
    for each, prompt in zip(search("puct", rounds=6), PROMPTS, strict=True):
        points = {leaf: float(i % 2) for i, leaf in enumerate(each.tree.leaves())}
        rows = rows_of_tree(each.tree, prompt, points)
        paths = {
            tuple(np.concatenate([each.tree.nodes[i].step.content for i in each.tree.path(leaf)]))
            for leaf in range(1, len(each.tree.nodes))
        }
        assert {tuple(ids) for row in rows.paths for ids in row["responses"]} <= paths
        for row in rows.siblings:
            assert row["prompt"][: len(prompt)] == list(prompt)
            past = row["prompt"][len(prompt) :]
            assert {(*past, *ids) for ids in row["responses"]} <= paths
            assert len(set(row["scores"])) > 1
            assert sum(row["visits"]) <= len(points)
        assert rows.paths or not points


def test_draws_do_not_depend_on_slots():
    for slots in (3, ROOMY):
        for one, other in zip(search("beam"), search("beam", slots=slots), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.cost == other.cost


def test_steps_log_probabilities_are_the_networks():
    each = search("beam", 2)[0]
    ids = [*PROMPTS[0], *each.tokens.tolist()]
    nodes = each.tree.nodes
    leaf = max(each.tree.leaves(), key=lambda i: nodes[i].step.points)
    logprob = sum(nodes[i].step.logprob for i in each.tree.path(leaf))
    row = jnp.array([ids])
    hidden, _ = NETWORK.hidden(params(), row, jnp.arange(len(ids))[None], jnp.ones_like(row))
    scores = jax.nn.log_softmax(NETWORK.logits(params(), hidden)[0])
    start = len(PROMPTS[0])
    expected = sum(float(scores[t - 1, ids[t]]) for t in range(start, len(ids)))
    assert logprob == pytest.approx(expected, abs=1e-4)


def test_a_beam_finds_more_than_one_draw():
    one = np.mean([each.points for each in search("best_of_n", 1)])
    assert np.mean([each.points for each in search("beam", 4)]) > one


def test_without_a_verifier_the_likely_is_taken():
    for each in search("best_of_n", 4, by_likelihood):
        means = [n.step.logprob / n.step.tokens for n in each.tree.nodes[1:]]
        assert each.points == pytest.approx(np.exp(max(means)), rel=1e-6)


def test_what_is_wrong_is_named():
    with pytest.raises(UserError, match="search = 'baem'; did you mean 'beam'"):
        search_plan("baem", 2)
    with pytest.raises(UserError, match="width = 0"):
        search_plan("beam", 0)
    with pytest.raises(UserError, match="search = 'mcts' is called 'puct' now"):
        search_plan("mcts", 2)
