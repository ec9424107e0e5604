"""The methods of trees.py against loops written from their papers, and trees counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    advantages_of,
    as_batch,
    check,
    clipped_loss,
    mean_over,
    members_of,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
    with_advantages,
)

from jrl.episodes.tree import Step, Tree, constrained
from jrl.methods import all_methods, get_method
from jrl.methods.group_relative import grpo
from jrl.zoo.methods.trees import (
    arpo,
    constrained_values,
    deepsearch,
    node_gains,
    prefix_steps,
    tempo,
    treerl,
)

# ---------------------------------------------------------------- the tree of prefixes


def tree_value(d, n, scores, prefix):
    """The mean score of the live members of group n that begin with ``prefix``."""
    begin = [
        scores[j]
        for j in members_of(d, n)
        if d.lengths[n, j] >= len(prefix) and list(d.tokens[n, j, : len(prefix)]) == list(prefix)
    ]
    return sum(begin) / len(begin)


def tempo_loss(d, frozen, coef=0.5):
    scores = standard_score(d)

    def advantage(n, i, t):
        path = d.tokens[n, i]
        after, before = (tree_value(d, n, scores[n], path[:k]) for k in (t + 1, t))
        return scores[n, i] + coef * (after - before)

    return with_advantages(d, advantage)


def with_few_tokens(d, rng):
    d.tokens = rng.integers(0, 2, d.mask.shape)


def test_tempo_is_the_papers():
    check(tempo(td_coef=0.5), tempo_loss, g=6, prepare=with_few_tokens)


def test_tempo_where_nothing_branches_is_grpo():
    d = ragged(3)
    d.lengths[:], d.members[:] = 5, True
    d.live = d.mask
    d.tokens = np.random.default_rng(0).integers(0, 9, d.mask.shape)
    d.tokens[:, :, 1:3] = 4  # all part at the first token, and again nowhere
    _, with_tree = run(tempo(), d)
    _, without = run(grpo(), d)
    np.testing.assert_allclose(
        with_tree["logprobs"][:, :, 1:3], without["logprobs"][:, :, 1:3], atol=1e-6
    )
    assert np.abs(with_tree["logprobs"] - without["logprobs"])[:, :, 0].max() > 1e-3
    d.tokens[:] = 4
    _, one_path = run(tempo(), d)
    np.testing.assert_array_equal(one_path["logprobs"], without["logprobs"])


def test_along_a_completion_the_steps_add_up_to_its_own_advantage():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, (6, 8))
    tokens[:, -1] = np.arange(6)  # no two alike
    scores = rng.normal(size=6).astype(np.float32)
    live = np.array([True] * 5 + [False])
    steps = jax.jit(prefix_steps)(*map(jnp.asarray, (scores, tokens, np.full(6, 8), live)))
    centred = np.where(live, scores - scores[live].mean(), 0)
    np.testing.assert_allclose(np.asarray(steps).sum(1), centred, atol=1e-6)


# ---------------------------------------------------------------- branches


def in_a_tree(d, rng=None):
    """Members 1 and 2 leave member 0, 3 leaves 1, and each token is under one member's mask."""
    g, t = d.mask.shape[1:]
    owner = np.broadcast_to(np.arange(g)[None, :, None], d.mask.shape).copy()
    owner[:, 1, :2], owner[:, 2, :3] = 0, 0
    owner[:, 3, :3] = owner[:, 1, :3]
    d.lengths[:] = t
    d.lengths[:, 2] = t - 1
    d.live = d.mask = (owner == np.arange(g)[None, :, None]) & (
        np.arange(t) < d.lengths[:, :, None]
    )
    # Of each group: 0 goes through 1, 2 and 3; its leavers have nodes of their own behind these.
    nodes = np.array([[1, 1, 2, 3, 3], [1, 1, 4, 5, 5], [1, 1, 2, 6, 0], [1, 1, 4, 7, 7]])
    d.ids["node"] = np.broadcast_to(nodes[None], d.mask.shape).copy()
    d.tokens = 10 * d.ids["node"] + np.arange(t)


def going_through(d, n, i, t):
    """Live members of group n that go through token t of member i."""
    node = d.ids["node"][n, :, t]
    return [j for j in members_of(d, n) if node[j] == node[i] > 0]


def mean_of(d, n, i, t, values):
    return np.mean([values[n, j] for j in going_through(d, n, i, t)])


def arpo_loss(d, frozen):
    scores = standard_score(d)
    return with_advantages(d, lambda n, i, t: mean_of(d, n, i, t, scores))


def test_arpo_is_the_papers():
    check(arpo(), arpo_loss, prepare=in_a_tree)


def test_tempo_in_a_tree_is_the_papers_with_each_token_once():
    def loss(d, frozen):
        scores = standard_score(d)

        def advantage(n, i, t):
            after = mean_of(d, n, i, t, scores)
            group_scores = [scores[n, j] for j in members_of(d, n)]
            before = mean_of(d, n, i, t - 1, scores) if t else np.mean(group_scores)
            return after + after - before

        return with_advantages(d, advantage)

    check(tempo(), loss, prepare=in_a_tree)


def treerl_loss(d, frozen):
    def advantage(n, i, t):
        node = d.ids["node"][n, i]
        first = list(node).index(node[t])
        root = np.mean([d.rewards[n, j] for j in members_of(d, n)])
        here = mean_of(d, n, i, t, d.rewards)
        before = mean_of(d, n, i, first - 1, d.rewards) if first else root
        return (here - root + here - before) * np.sqrt(len(going_through(d, n, i, t)))

    return mean_over(
        d, lambda n, i, t: clipped_loss(ratio(d, (n, i, t)), advantage(n, i, t)), "tokens"
    )


def test_treerl_is_the_papers():
    check(treerl(), treerl_loss, prepare=in_a_tree)


def toy(rewards):
    d = ragged(0, 1, 4)
    d.members[:], d.truncated[:] = True, False
    in_a_tree(d)
    d.rewards = np.array([rewards])
    return d


def test_a_tree_counted_by_hand():
    """Rewards 1, 0, 0, 1: all, then 0 with 2 beside 1 with 3, then each by itself."""
    d = toy([1.0, 0.0, 0.0, 1.0])
    scale = np.std([1, 0, 0, 1], ddof=1)
    shared = advantages_of(arpo(), d)[0] * scale
    # Outside of its own tokens a member has no advantage that a loss would read.
    expected = {0: [0, 0, 0, 0.5, 0.5], 1: [0, -0.5, -0.5], 2: [-0.5], 3: [0.5, 0.5]}
    for i, numbers in expected.items():
        np.testing.assert_allclose(shared[i][d.mask[0, i]], numbers, atol=1e-4)
    gains = advantages_of(treerl(), d)[0]
    expected = {0: [0, 0, 0, 1, 1], 1: [0, -1, -1], 2: [-1], 3: [1, 1]}
    for i, numbers in expected.items():
        np.testing.assert_allclose(gains[i][d.mask[0, i]], numbers, atol=1e-6)
    d = toy([1.0, 0.0, 1.0, 0.0])  # now the first branch decides: its two nodes are 1 and 0
    gains = advantages_of(treerl(), d)[0]
    one, two = np.sqrt(2) * (0.5 + 0.5), 0.5 + 0.0  # two leaves; then nothing more is gained
    expected = {0: [0, 0, one, two, two], 1: [-one, -two, -two], 2: [two], 3: [-two, -two]}
    for i, numbers in expected.items():
        np.testing.assert_allclose(gains[i][d.mask[0, i]], numbers, atol=1e-6)


def test_each_token_drawn_is_trained_once_with_what_its_members_earn_together():
    """Summed over a tree the advantages are those of its members drawn apart, each token once."""
    d = toy([3.0, 1.0, 0.0, 0.5])
    independent = standard_score(d)[0]
    shared = advantages_of(arpo(), d)[0]
    for i in range(4):
        for t in np.flatnonzero(d.mask[0, i]):
            through = going_through(d, 0, i, t)
            assert sum(d.mask[0, j, t] for j in through) == 1
            np.testing.assert_allclose(
                shared[i, t] * len(through), independent[through].sum(), atol=1e-4
            )


def test_without_branches_arpo_is_grpo_and_treerl_twice_the_centred_reward():
    d = ragged(3)
    np.testing.assert_allclose(advantages_of(arpo(), d), advantages_of(grpo(), d), atol=1e-6)
    d.members[:], d.mask[:] = True, True
    advantages = advantages_of(treerl(), d)
    twice = 2 * (d.rewards - d.rewards.mean(1, keepdims=True))
    np.testing.assert_allclose(advantages, np.repeat(twice[:, :, None], 5, axis=2), atol=1e-5)


def test_values_are_backed_up_as_the_search_does():
    d = toy([1.0, -1.0, 1.0, -1.0])
    node = d.ids["node"][0]
    rng = np.random.default_rng(0)
    for scores in (d.rewards[0], rng.normal(size=4)):
        tree, numbers = Tree(), {0: 0}  # node's label -> its number in the tree
        for i in range(4):
            before, backup = 0, constrained(0.1)
            for label in dict.fromkeys(x for x in node[i].tolist() if x):
                if label not in numbers:
                    numbers[label] = tree.add(before, Step(label))
                before = numbers[label]
            backup(tree, before, float(scores[i]))
        got = constrained_values(
            jnp.asarray(scores, jnp.float32), jnp.asarray(node), jnp.ones(4, bool)
        )
        expected = [
            [tree.nodes[numbers[x]].total if x else 0.0 for x in row] for row in node.tolist()
        ]
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_deepsearch_reads_the_values_of_branches():
    d = toy([1.0, -1.0, -1.0, -1.0])
    values = np.asarray(
        constrained_values(
            *map(jnp.asarray, (np.float32(d.rewards[0]), d.ids["node"][0], np.ones(4, bool)))
        )
    )
    advantages = advantages_of(deepsearch(), d)[0]
    mean = d.rewards.mean()
    np.testing.assert_allclose(advantages[0, :3], np.tanh(values[0, :3]) - mean, atol=1e-6)
    np.testing.assert_allclose(advantages[0, 3:], 1.0 - mean, atol=1e-6)  # the leaf's own reward
    assert values[0, 0] > 0 > values[1, 2]  # on the right path, and off it


def test_alphamaths_values_are_the_mean_outcomes_below_a_token():
    method = get_method("alphamath")
    d = toy([1.0, 0.0, 0.0, 1.0])
    batch = as_batch(d)
    score = batch.score()
    _, batch, _ = method.objective.advantage.apply(score, batch, method.objective.advantage.init())
    np.testing.assert_allclose(batch.stats["returns"][0, 0], [0, 0, 0, 1, 1])
    np.testing.assert_allclose(batch.stats["returns"][0, 3], [0, 0, 0, 1, 1])


def test_methods_that_draw_trees_say_so():
    tree_methods = {n for n, m in all_methods().items() if m.example().draw.tree is not None}
    assert tree_methods == {"arpo", "treerl"}
    assert "plan" in treerl().seams
    assert arpo().draw.tree == ("entropy", 0, 1, 0.0)
    assert treerl().draw.tree == ("surprise", 0, 1, 0.0)
    assert not treerl().lacks
    assert not tempo().lacks


def test_gains_are_0_where_all_earn_the_same():
    node = jnp.asarray(toy([0.1] * 4).ids["node"][0])
    assert not jax.jit(node_gains)(jnp.full(4, 0.1), node, jnp.ones(4, bool)).any()


# ---------------------------------------------------------------- nodes of a search


def with_nodes(d, rng):
    d.ids["node"] = np.sort(rng.integers(0, 3, d.mask.shape), axis=2)
    d.node_value = rng.normal(size=d.mask.shape).astype(np.float32).astype(np.float64)


def deepsearch_loss(d, frozen, width=0.5, bound=0.8):
    out = {}
    for n, i, tokens in sequences(d):
        mean = np.mean([d.rewards[n, j] for j in members_of(d, n)])
        leaf = d.ids["node"][n, i, tokens[-1]]
        for t in tokens:
            inner = np.tanh(d.node_value[n, i, t] / width) * bound
            value = d.rewards[n, i] if d.ids["node"][n, i, t] == leaf else inner
            out[n, i, t] = value - mean

    def of_token(n, i, t):
        return clipped_loss(ratio(d, (n, i, t)), out[n, i, t], 0.2, 0.28, 10.0)

    return mean_over(d, of_token, "tokens")


def test_deepsearch_is_the_papers():
    check(deepsearch(width=0.5, bound=0.8), deepsearch_loss, prepare=with_nodes)


def test_deepsearch_takes_the_released_codes_width_and_bound():
    d = ragged(4)
    with_nodes(d, np.random.default_rng(0))
    value, _ = run(deepsearch(), d)
    np.testing.assert_allclose(value, deepsearch_loss(d, d, 1.0, 1.0), rtol=1e-5)
