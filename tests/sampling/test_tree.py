"""Trees of completions: who leaves whom and where, what is drawn once, and what that costs."""

from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.config.tree import BranchTree
from jrl.errors import UserError
from jrl.mesh import make_mesh, tree_shardings
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.places import PLACES, closeness, entropy
from jrl.sampling.tree import TreeShape, check_branching, generate_tree, nodes_of
from jrl.types import Branching

CONFIG = ModelConfig(
    vocab_size=16,
    layers=1,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=32,
)
NETWORK = transformer(CONFIG)
N, P, G, T = 4, 5, 6, 12
LENGTHS = np.array([1, 5, 3, 2], np.int32)
IDS = np.array([7, 0, 3, 12], np.int32)
STOPS = (3, 9)
SAMPLING, VERSION = make_sampling_params(0.9), jnp.int32(4)
FIELDS = ("tokens", "lengths", "mask", "sampler_logprobs", "versions", "stop")


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


def prompts():
    return np.random.default_rng(0).integers(0, 16, (N, P)).astype(np.int32)


def program(branching, network=NETWORK, **sizes):
    sizes = {"max_new_tokens": T, "stop_tokens": STOPS} | sizes
    return partial(generate_tree, network=network, tree=TreeShape(branching, G), **sizes)


@cache
def compiled(branching, slots=0):
    return jit(program(branching, slots=slots))


def grown(at="entropy", roots=2, rounds=2, above=0.0, slots=0, order=(0, 1, 2, 3)):
    order = list(order)
    tree = compiled(Branching(at, roots, rounds, above), slots)(
        *(jax.random.key(1), params(), prompts()[order], LENGTHS[order]),
        *(SAMPLING, VERSION, IDS[order]),
    )
    return jax.device_get(tree)


def parted(rollout, n, i):
    """The first token that member i drew itself: where it left the member that it branched off."""
    return int(np.argmax(rollout.mask[n, i]))


def test_where_no_token_is_worth_leaving_the_group_is_drawn_apart():
    out = jit(partial(generate, network=NETWORK, group=G, max_new_tokens=T, stop_tokens=STOPS))(
        jax.random.key(1), params(), prompts(), LENGTHS, SAMPLING, VERSION, IDS
    )
    independent, rollout = jax.device_get(out)[0], grown(above=99.0).rollout
    for name in ("lengths", "mask", "versions", "stop", "baseline"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(independent, name), name)
    live = independent.mask
    np.testing.assert_array_equal(rollout.tokens[live], independent.tokens[live])
    np.testing.assert_allclose(rollout.sampler_logprobs, independent.sampler_logprobs, atol=1e-5)


def assert_is_a_tree(tree):
    """Every token is drawn by one member, and stands in those that branched off behind it."""
    rollout, node = tree.rollout, tree.node
    column = np.arange(T)
    for n in range(N):
        owners = {}  # node -> the member whose tokens they are
        for i in range(G):
            first, end = parted(rollout, n, i), rollout.lengths[n, i]
            assert rollout.mask[n, i].tolist() == ((column >= first) & (column < end)).tolist()
            assert (node[n, i, :end] > 0).all()
            assert not node[n, i, end:].any()
            for label in node[n, i, first:end]:
                assert owners.setdefault(label, i) == i
        for i in range(G):
            for t in range(rollout.lengths[n, i]):
                j = owners[node[n, i, t]]
                assert rollout.mask[n, j, t]
                np.testing.assert_array_equal(
                    rollout.tokens[n, j, : t + 1], rollout.tokens[n, i, : t + 1]
                )
                # A node is a stretch that the same members go through.
                through = {k for k in range(G) if node[n, k, t] == node[n, i, t]}
                if t and node[n, i, t] == node[n, i, t - 1]:
                    assert through == {k for k in range(G) if node[n, k, t - 1] == node[n, i, t]}
                elif t:
                    assert through < {k for k in range(G) if node[n, k, t - 1] == node[n, i, t - 1]}
    mask = rollout.mask
    np.testing.assert_array_equal(rollout.versions, np.where(mask, 4, -1))
    assert not rollout.sampler_logprobs[~mask].any()


@pytest.mark.parametrize("at", PLACES)
def test_each_token_is_drawn_by_one_member_and_shared_by_those_that_leave_it(at):
    tree = grown(at)
    assert_is_a_tree(tree)
    rollout = tree.rollout
    assert rollout.mask.sum() < 0.8 * rollout.lengths.sum()  # much is shared
    assert (rollout.lengths.sum(), rollout.mask.sum()) < (N * G * T, tree.slot_steps)


def whole_logprobs(rollout):
    """[N, G, T] log-probabilities of all tokens by forward passes over whole sequences."""
    out = np.zeros((N, G, T), np.float32)
    rows = np.zeros((N, G, P + T), np.int32)
    for n in range(N):
        rows[n, :, : LENGTHS[n]] = prompts()[n, : LENGTHS[n]]
        rows[n, :, LENGTHS[n] : LENGTHS[n] + T] = rollout.tokens[n]
    flat = jnp.asarray(rows.reshape(N * G, P + T))
    places = jnp.broadcast_to(jnp.arange(P + T)[None], flat.shape)
    hidden, _ = jit(NETWORK.hidden)(params(), flat, places, jnp.ones_like(flat))
    scores = jax.nn.log_softmax(NETWORK.logits(params(), hidden) / 0.9)
    scores = np.asarray(scores).reshape(N, G, P + T, -1)
    for n, i, t in np.ndindex(N, G, T):
        out[n, i, t] = scores[n, i, LENGTHS[n] + t - 1, rollout.tokens[n, i, t]]
    return out, scores


def test_branches_are_drawn_behind_their_whole_past():
    rollout = grown().rollout
    expected, _ = whole_logprobs(rollout)
    mask = rollout.mask
    np.testing.assert_allclose(rollout.sampler_logprobs[mask], expected[mask], atol=1e-5)


@pytest.mark.parametrize("at", ["entropy", "gap", "surprise"])
def test_the_branches_of_one_round_leave_the_places_worth_most(at):
    """The places by float64 from whole forward passes: two of each of the two roots at most."""
    rollout = grown(at, rounds=1).rollout
    logprobs, scores = whole_logprobs(rollout)
    for n in range(N):
        entropies = []
        for i in range(2):
            for t in range(rollout.lengths[n, i]):
                p = np.exp(scores[n, i, LENGTHS[n] + t - 1].astype(np.float64))
                top = np.sort(p)[::-1]
                number = {
                    "entropy": -(p * np.log(p)).sum(),
                    "gap": 1 - (top[0] - top[1]),
                    "surprise": -logprobs[n, i, t],
                }[at]
                entropies.append((number, i, t))
        best = [sorted((w for w in entropies if w[1] == i), reverse=True)[:2] for i in range(2)]
        places = [t for _, _, t in best[0] + best[1]]
        places += [0] * (G - 2 - len(places))  # a root of one token has one place; then the prompt
        assert sorted(parted(rollout, n, i) for i in range(2, G)) == sorted(places)


def test_even_branches_leave_the_middle_and_then_the_quarters():
    rollout = grown("even", rounds=1).rollout
    for n in range(N):
        lengths = rollout.lengths[n, :2]
        places = sorted(x for k in lengths for x in (k // 2, k // 4))
        assert sorted(parted(rollout, n, i) for i in range(2, G)) == places


def test_a_tree_depends_on_neither_slots_nor_neighbours():
    reference, some, turned = grown(), grown(slots=2 * G + 1), grown(order=(2, 0, 3, 1))
    for name in FIELDS:
        one = getattr(reference.rollout, name)
        same = np.array_equal if name != "sampler_logprobs" else partial(np.allclose, atol=1e-5)
        live = reference.rollout.lengths[:, :, None] > np.arange(T)
        live_part = (lambda x, live=live: np.where(live, x, 0)) if one.ndim == 3 else lambda x: x
        assert same(live_part(one), live_part(getattr(some.rollout, name))), name
        back = getattr(turned.rollout, name)[[1, 3, 0, 2]]
        assert same(live_part(one), live_part(back)), name
    np.testing.assert_array_equal(reference.node, some.node)
    np.testing.assert_array_equal(reference.node, turned.node[[1, 3, 0, 2]])


@pytest.mark.parametrize(
    "sizes", [{"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}], ids=str
)
def test_sharded_trees_are_the_same(sizes):
    mesh = make_mesh(sizes)
    placed = jax.device_put(params(), tree_shardings(mesh, NETWORK.axes(), params()))
    args = (jax.random.key(1), placed, prompts(), LENGTHS, SAMPLING, VERSION, IDS)
    with jax.set_mesh(mesh):
        sharded = jax.device_get(jit(program(Branching("entropy", 2, 2)))(*args))
    reference = grown()
    np.testing.assert_array_equal(sharded.node, reference.node)
    live = sharded.node > 0
    np.testing.assert_array_equal(sharded.rollout.tokens[live], reference.rollout.tokens[live])
    np.testing.assert_array_equal(sharded.rollout.mask, reference.rollout.mask)
    np.testing.assert_allclose(
        sharded.rollout.sampler_logprobs, reference.rollout.sampler_logprobs, atol=1e-5
    )


def test_the_past_of_a_branch_is_never_computed_again():
    """The only calls over several tokens are those over the prompts, one for all members."""
    calls = []

    def extend(weights, cache, tokens, *rest):
        calls.append(tokens.shape)
        return NETWORK.extend(weights, cache, tokens, *rest)

    without_fill = NETWORK._replace(extend=extend).with_extras(fill=None)
    args = (jax.random.key(1), params(), prompts(), LENGTHS, SAMPLING, VERSION, IDS)
    jax.eval_shape(program(Branching("entropy", 2, 2), without_fill), *args)
    assert {shape for shape in calls if shape[1] > 1} == {(N, P)}
    assert {shape for shape in calls if shape[1] == 1} == {(2 * N, 1)}  # roots, and a round


def test_nodes_counted_by_hand():
    # Member 1 leaves 0 before token 2; 2 leaves 1 before its second own token; 3 comes by itself.
    owner = jnp.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2], [3, 3, 3, 3]])
    nodes = nodes_of(owner, jnp.array([4, 4, 4, 2])).tolist()
    assert nodes == [[1, 1, 2, 2], [1, 1, 3, 4], [1, 1, 3, 5], [6, 6, 0, 0]]


def test_what_is_measured_of_a_distribution():
    logprobs = jnp.log(jnp.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(entropy(logprobs), [1.5 * np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(closeness(logprobs), [0.75, 0], atol=1e-6)


def test_the_configuration_offers_the_places_that_there_are():
    words, _ = get_args(BranchTree.model_fields["at"].annotation)
    assert get_args(words) == tuple(PLACES)


def test_trees_that_do_not_fit_are_named():
    assert check_branching(Branching(), 8).roots == 4
    with pytest.raises(UserError, match="tree.at = 'entropi'; did you mean 'entropy'"):
        check_branching(Branching("entropi"), 8)
    with pytest.raises(UserError, match=r"tree.roots = 8: sampling.group = 8 leaves no member"):
        check_branching(Branching(roots=8), 8)
    with pytest.raises(UserError, match=r"tree.rounds = 4 does not divide the 6 of"):
        check_branching(Branching(roots=2, rounds=4), 8)
    with pytest.raises(UserError, match=r"slots = 7: a tree of sampling.group = 8 members needs"):
        check_branching(Branching(), 8, 7)
