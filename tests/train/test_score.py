"""Scoring against single unpadded sequences and the whole softmax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.heads import value_head, value_network
from jrl.sampling.draw import make_law
from jrl.train import score as module
from jrl.train.score import head_statistics, in_parts, rows, score, split
from jrl.types import ValueNetwork

LAWS = {
    "plain": make_law(),
    "cold": make_law(0.5),
    "truncated": make_law(0.8, top_k=9, top_p=0.9, min_p=0.01),
}
BOTH = frozenset({"logprobs", "entropy"})


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch()


@pytest.fixture(scope="module")
def scored(network, params, batch):
    """(law, params) -> the statistics of the batch, compiled once for laws of one kind."""

    @partial(jax.jit, static_argnames="want")
    def run(params, batch, law, want=BOTH):
        return score({"policy": params}, batch, law, network=network, value=None, want=want)

    return lambda law, params=params, batch=batch: run(params, batch, law)


def single(batch, i, j):
    """One sequence alone, prompt and completion without a gap: tokens [1, 8], place, live."""
    q, m = int(batch.prompt_lengths[i]), int(batch.lengths[i, j])
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, : q + m] = [*batch.prompt_tokens[i, :q], *batch.tokens[i, j, :m]]
    place = np.arange(8, dtype=np.int32)[None]
    return tokens, place, (place < q + m).astype(np.int32), slice(q - 1, q + m - 1)


@pytest.fixture(scope="module")
def alone(network, params, batch):
    """[N][G] logits before each completion token, from each sequence alone."""

    @jax.jit
    def run(params, *laid):
        return network.logits(params, network.hidden(params, *laid)[0])

    n, g, _ = batch.tokens.shape
    out = []
    for i in range(n):
        rows = [single(batch, i, j) for j in range(g)]
        out.append([np.asarray(run(params, *r[:3]), np.float64)[0, r[3]] for r in rows])
    return out


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_against_single_sequences(scored, alone, batch, law):
    stats = scored(law)
    assert set(stats) == BOTH
    seen_dropped = False
    for i, group in enumerate(alone):
        for j, logits in enumerate(group):
            for t, x in enumerate(logits):
                token = int(batch.tokens[i, j, t])
                x = x / float(law.temperature)
                kept = np.ones(len(x), bool)
                if law.truncates:
                    order = np.argsort(-x)[:9]
                    p = np.exp(x[order] - x.max())
                    p /= p.sum()
                    order = order[np.cumsum(p) - p < 0.9]
                    kept = np.isin(np.arange(len(x)), order) & (x - x.max() >= np.log(0.01))
                    seen_dropped |= not kept[token]
                    kept[token] = True
                total = np.log(np.exp(x[kept]).sum())
                p = np.exp(x[kept] - total)
                assert stats["logprobs"][i, j, t] == pytest.approx(x[token] - total, abs=1e-5)
                assert stats["entropy"][i, j, t] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    assert seen_dropped == law.truncates


def test_rows_lay_prompt_and_completion_side_by_side(batch):
    laid = rows(batch)
    n, g, t = batch.tokens.shape
    p = batch.prompt_tokens.shape[1]
    for b in range(n * g):
        i, j = divmod(b, g)
        q, m = int(batch.prompt_lengths[i]), int(batch.lengths[i, j])
        live = np.asarray(laid.segments[b]) == 1
        assert live.tolist() == [k < q for k in range(p)] + [k < m for k in range(t)]
        assert np.asarray(laid.positions[b])[live].tolist() == list(range(q + m))
        both = [*batch.prompt_tokens[i, :q].tolist(), *batch.tokens[i, j, :m].tolist()]
        assert np.asarray(laid.tokens[b])[live].tolist() == both
        # The column before a token holds the position before it.
        before = np.asarray(laid.positions[b])[np.asarray(laid.before[b])]
        assert before[:m].tolist() == list(range(q - 1, q + m - 1))


def test_padding_is_not_read(scored, batch):
    noise = jax.random.randint(jax.random.key(7), batch.tokens.shape, 0, 19)
    prompt_noise = jax.random.randint(jax.random.key(8), batch.prompt_tokens.shape, 0, 19)
    in_prompt = jnp.arange(3)[None] < batch.prompt_lengths[:, None]
    other = batch.replace(
        tokens=jnp.where(batch.mask, batch.tokens, noise),
        prompt_tokens=jnp.where(in_prompt, batch.prompt_tokens, prompt_noise),
    )
    assert not np.array_equal(other.tokens, batch.tokens)
    assert not np.array_equal(other.prompt_tokens, batch.prompt_tokens)
    a, b = scored(LAWS["plain"]), scored(LAWS["plain"], batch=other)
    live = np.asarray(batch.mask)
    for name in BOTH:
        np.testing.assert_allclose(a[name][live], b[name][live], atol=1e-6)


def test_no_gradient_reaches_padding(network, params, batch):
    """Of the hidden states, of the embeddings of tokens that only padding holds."""
    padding = jnp.where(batch.mask, jnp.minimum(batch.tokens, 16), 17)
    in_prompt = jnp.arange(3)[None] < batch.prompt_lengths[:, None]
    prompts = jnp.where(in_prompt, jnp.minimum(batch.prompt_tokens, 16), 18)
    marked = batch.replace(tokens=padding, prompt_tokens=prompts)

    @jax.jit
    def gradient(table):
        def loss(table):
            # The table is looked up in ``hidden`` only: the head reads the untouched one.
            changed = network._replace(logits=lambda _, h: network.logits(params, h))
            stats = score(
                {"policy": params | {"embed": table}},
                marked,
                LAWS["plain"],
                network=changed,
                value=None,
                want=BOTH,
            )
            live = marked.mask
            return sum(jnp.where(live, x, 0).sum() for x in stats.values())

        return jax.grad(loss)(table)

    norms = np.linalg.norm(np.asarray(gradient(jnp.asarray(params["embed"]))), axis=1)
    assert norms[17] == norms[18] == 0
    assert (norms[:17] > 0).sum() >= 8


CHUNKS = {1: (1, 1), 19 * 4: (4, 1), 8 * 19 * 3: (8, 3)}


@pytest.mark.parametrize("at_once", CHUNKS)
def test_the_head_in_chunks(network, params, monkeypatch, at_once):
    """In chunks of few of the 8 rows and 5 tokens: equal numbers and gradients."""
    hidden = jax.random.normal(jax.random.key(0), (8, 5, 16))
    tokens = jax.random.randint(jax.random.key(1), (8, 5), 0, 19)
    weights = jax.random.normal(jax.random.key(2), (2, 8, 5))
    sizes = []

    def spied(params, hidden):
        sizes.append(hidden.shape[:2])
        return network.logits(params, hidden)

    def run(limit):
        sizes.clear()
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", limit)
        spy = network._replace(logits=spied)

        def loss(params, hidden):
            stats = head_statistics(
                {"policy": params},
                {"policy": hidden},
                tokens,
                networks={"policy": spy},
                law=LAWS["cold"],
                want=BOTH,
            )
            return (weights[0] * stats["logprobs"] + weights[1] * stats["entropy"]).sum(), stats

        out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, hidden)
        return out, set(sizes)

    (gradient, stats), chunks = run(at_once)
    (expected_gradient, expected), whole = run(2**24)
    assert whole == {(8, 5)}
    assert chunks == {CHUNKS[at_once]}
    assert stats["logprobs"].shape == stats["entropy"].shape == (8, 5)
    for a, b in zip(
        jax.tree.leaves((gradient, stats)),
        jax.tree.leaves((expected_gradient, expected)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_only_what_is_wanted(network, params, batch):
    both = {"policy": params, "value": None}
    seen = []

    def apply(value_params, hidden, tokens, positions, segments):
        seen.append(hidden.shape)
        return positions.astype(jnp.float32)

    value = ValueNetwork(init=lambda key: None, axes=lambda: None, apply=apply)

    def run(want):
        return jax.jit(partial(score, network=network, value=value, want=want))(
            both, batch, LAWS["plain"]
        )

    assert set(run(frozenset({"logprobs"}))) == {"logprobs"}
    assert seen == []
    stats = run(frozenset({"values"}))
    assert set(stats) == {"values"}
    # The value of a token is read at the position before it.
    expected = batch.prompt_lengths[:, None, None] - 1 + np.arange(5)[None, None]
    live = np.asarray(batch.mask)
    assert np.array_equal(
        np.asarray(stats["values"])[live], np.broadcast_to(expected, live.shape)[live]
    )


@pytest.mark.parametrize("make", [value_head, value_network])
def test_values_of_single_sequences(network, params, batch, make):
    value = make(network)
    fresh = jax.jit(value.init)(jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), len(jax.tree.leaves(fresh)))
    noise = jax.tree.unflatten(
        jax.tree.structure(fresh),
        [jax.random.normal(k, x.shape) for k, x in zip(keys, jax.tree.leaves(fresh), strict=True)],
    )
    both = {"policy": params, "value": jax.tree.map(lambda a, b: a + 0.3 * b, fresh, noise)}
    want = frozenset({"values"})
    run = jax.jit(partial(score, network=network, value=value, want=want))
    values = run(both, batch, LAWS["plain"])["values"]

    @jax.jit
    def one(both, *laid):
        return value.apply(both["value"], network.hidden(both["policy"], *laid)[0], *laid)[0]

    assert values.dtype == jnp.float32
    for i, j in ((0, 0), (2, 1)):
        *laid, at = single(batch, i, j)
        expected, m = one(both, *laid)[at], int(batch.lengths[i, j])
        np.testing.assert_allclose(values[i, j, :m], expected, atol=1e-5)
        assert np.ptp(expected) > 1e-3 or m == 1


def test_split_deals_the_rows_out(batch):
    parts = split(batch, 2)
    assert parts.tokens.shape == (2, 2, 2, 5)
    for part in range(2):
        mine = jax.tree.map(lambda x, part=part: x[part], parts)
        assert np.array_equal(mine.tokens, batch.tokens[part::2])
        assert np.array_equal(mine.prompt_lengths, batch.prompt_lengths[part::2])
        assert np.array_equal(mine.rewards, batch.rewards[part::2])
        stat = "sampler_logprobs"
        assert np.array_equal(mine.stats[stat], batch.stats[stat][part::2])
        assert np.array_equal(mine.reward_weights, batch.reward_weights)
        mine.check()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_in_parts_gives_rows_back_in_order(batch, parts):
    sizes = []

    def function(part):
        sizes.append(part.tokens.shape[0])
        return {"x": part.tokens * 2.0, "y": part.stats["sampler_logprobs"]}

    out = in_parts(function, batch, parts)
    assert np.array_equal(out["x"], batch.tokens * 2.0)
    assert np.array_equal(out["y"], batch.stats["sampler_logprobs"])
    assert set(sizes) == {4 // parts}
