"""Tree search with an engine: what is drawn, what it costs, and that it finds better answers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.episodes.tree_rows import rows_of_tree
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.serving.search import named_search, search

CONFIG = ModelConfig(
    vocab_size=16,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=40,
)
NETWORK = transformer(CONFIG)
PROMPTS = ((1, 2), (3,))
END, STEP = 5, 7
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
LIMITS = {"end_tokens": (END,), "step_stops": (STEP,), "step_tokens": 3, "max_tokens": 9, "seed": 0}


@cache
def params():
    return jit(NETWORK.init)(jax.random.key(0))


@cache
def engine(slots=4):
    return Engine(
        NETWORK,
        params(),
        slots=slots,
        prompt_tokens=16,
        max_new_tokens=9,
        stop_tokens=(END,),
        chunk=3,
    )


def sixes_in(tokens):
    """How many of nine places hold a six."""
    return float((tokens == 6).sum()) / 9


def sixes(paths):
    for path in paths:
        assert path.ends[-1] == len(path.tokens)
        assert list(path.ends) == sorted(set(path.ends))
    return [sixes_in(path.tokens) for path in paths]


def found(name, width=3, score=sixes, slots=4, **more):
    return search(engine(slots), PROMPTS, named_search(name, width, **more), score, **LIMITS)


@pytest.mark.parametrize(
    ("name", "more"), [("greedy", {}), ("beam", {}), ("dvts", {}), ("mcts", {"rounds": 6})]
)
def test_steps_end_where_they_should_and_costs_add_up(name, more):
    for each, prompt in zip(found(name, **more), PROMPTS, strict=True):
        nodes = each.tree.nodes[1:]
        assert each.cost.steps == len(nodes) == 3 * each.cost.expansions
        assert each.cost.tokens == sum(len(n.step.content) for n in nodes)
        expanded = [i for i, n in enumerate(each.tree.nodes) if n.expanded]
        path = lambda i, e=each: sum(len(e.tree.nodes[j].step.content) for j in e.tree.path(i))  # noqa: E731
        assert each.read_tokens == sum(len(prompt) + path(i) for i in expanded)
        for i, node in enumerate(each.tree.nodes[1:], 1):
            ids = node.step.content
            assert 1 <= len(ids) <= 3
            assert not set(ids[:-1].tolist()) & {END, STEP}
            assert node.done == (ids[-1] == END or path(i) >= 9)
        leaves = each.tree.leaves() or range(1, len(each.tree.nodes))
        assert each.points == max(each.tree.nodes[i].step.points for i in leaves)
        assert each.points == sixes_in(each.tokens)


def test_best_of_n_is_n_whole_completions():
    for each in found("best_of_n", 4):
        assert (each.cost.expansions, each.cost.steps) == (1, 4)
        assert all(n.done for n in each.tree.nodes[1:])
        assert each.points == max(n.step.points for n in each.tree.nodes[1:])


def test_what_a_search_drew_is_what_its_rows_hold_id_for_id():
    for each, prompt in zip(found("mcts", rounds=6), PROMPTS, strict=True):
        points = {leaf: float(i % 2) for i, leaf in enumerate(each.tree.leaves())}
        rows = rows_of_tree(each.tree, prompt, points)
        drawn = {
            tuple(np.concatenate([each.tree.nodes[i].step.content for i in each.tree.path(leaf)]))
            for leaf in range(1, len(each.tree.nodes))
        }
        assert {tuple(ids) for row in rows.paths for ids in row["responses"]} <= drawn
        for row in rows.siblings:
            assert row["prompt"][: len(prompt)] == list(prompt)
            past = row["prompt"][len(prompt) :]
            assert {(*past, *ids) for ids in row["responses"]} <= drawn
            assert len(set(row["scores"])) > 1
            assert sum(row["visits"]) <= len(points)
        assert rows.paths or not points


def test_draws_do_not_depend_on_slots():
    for one, other in zip(found("beam"), found("beam", slots=3), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.cost == other.cost


def test_steps_log_probabilities_are_the_networks():
    each = found("beam", 2)[0]
    ids = [*PROMPTS[0], *each.tokens.tolist()]
    nodes = each.tree.nodes
    leaf = max(each.tree.leaves(), key=lambda i: nodes[i].step.points)
    told = sum(nodes[i].step.logprob for i in each.tree.path(leaf))
    row = jnp.array([ids])
    hidden, _ = NETWORK.hidden(params(), row, jnp.arange(len(ids))[None], jnp.ones_like(row))
    scores = jax.nn.log_softmax(NETWORK.logits(params(), hidden)[0])
    start = len(PROMPTS[0])
    expected = sum(float(scores[t - 1, ids[t]]) for t in range(start, len(ids)))
    assert told == pytest.approx(expected, abs=1e-4)


def test_a_beam_finds_more_than_one_draw():
    one = np.mean([each.points for each in found("best_of_n", 1)])
    assert np.mean([each.points for each in found("beam", 4)]) > one


def test_without_a_verifier_the_likely_is_taken():
    plan = named_search("best_of_n", 4)
    for each in search(engine(), PROMPTS, plan, **LIMITS):
        means = [n.step.logprob / n.step.tokens for n in each.tree.nodes[1:]]
        assert each.points == pytest.approx(np.exp(max(means)), rel=1e-6)


def test_what_is_wrong_is_named():
    with pytest.raises(UserError, match="search = 'baem'; did you mean 'beam'"):
        named_search("baem", 2)
    with pytest.raises(UserError, match="width = 0"):
        named_search("beam", 0)
    with pytest.raises(UserError, match="width = 5 and the engine has 4 slots; draw fewer"):
        found("beam", 5)
    with pytest.raises(UserError, match="step_tokens = 12; give 1 to max_tokens = 9"):
        search(engine(), PROMPTS, named_search("beam", 2), **{**LIMITS, "step_tokens": 12})
