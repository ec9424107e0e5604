"""Scoring against single unpadded sequences and the whole softmax."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.packing import Packer, pack
from jrl.models.config import ModelConfig
from jrl.models.heads import value_head, value_network, value_networks
from jrl.models.transformer import transformer
from jrl.objectives.distill import top_k_divergence
from jrl.objectives.members import value_output
from jrl.sampling.params import make_sampling_params
from jrl.train import score as module
from jrl.train.batch_rows import in_parts, rows, shared_rows, split
from jrl.train.score import head_statistics, score, shares_prompts
from jrl.types import Head, Statistic, ValueNetwork

DISTRIBUTIONS = {
    "plain": make_sampling_params(),
    "cold": make_sampling_params(0.5),
    "truncated": make_sampling_params(0.8, top_k=9, top_p=0.9, min_p=0.01),
}
SMALL = ModelConfig(
    vocab_size=32,
    layers=2,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=32,
)
BOTH = frozenset({"logprobs", "entropy"})


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch()


@pytest.fixture(scope="module")
def scored(network, params, batch):
    """(sampling_params, params) -> the statistics of the batch, compiled once for each kind."""

    @partial(jax.jit, static_argnames="want")
    def run(params, batch, sampling_params, want=BOTH):
        return score(
            {"policy": params}, batch, sampling_params, network=network, value=None, want=want
        )

    return lambda sampling_params, params=params, batch=batch: jax.device_get(
        run(params, batch, sampling_params)
    )


def single(batch, i, j):
    """One sequence alone, prompt and completion without a gap: tokens [1, 8], place, live."""
    q, m = np.asarray(batch.prompt_lengths)[i], np.asarray(batch.lengths)[i, j]
    tokens = np.zeros((1, 8), np.int32)
    prompts, drawn = np.asarray(batch.prompt_tokens), np.asarray(batch.tokens)
    tokens[0, : q + m] = [*prompts[i, :q], *drawn[i, j, :m]]
    positions = np.arange(8, dtype=np.int32)[None]
    return tokens, positions, (positions < q + m).astype(np.int32), slice(q - 1, q + m - 1)


@pytest.fixture(scope="module")
def alone(network, params, batch):
    """[N][G] logits before each completion token, from each sequence alone."""

    @jax.jit
    def run(params, *inputs):
        return network.logits(params, network.hidden(params, *inputs)[0])

    n, g, _ = batch.tokens.shape
    out = []
    for i in range(n):
        rows = [single(batch, i, j) for j in range(g)]
        out.append([np.asarray(run(params, *r[:3]), np.float64)[0, r[3]] for r in rows])
    return out


@pytest.mark.parametrize("sampling_params", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_against_single_sequences(scored, alone, batch, sampling_params):
    stats, drawn = scored(sampling_params), np.asarray(batch.tokens)
    assert set(stats) == BOTH
    any_dropped = False
    for i, group in enumerate(alone):
        for j, logits in enumerate(group):
            for t, x in enumerate(logits):
                token = drawn[i, j, t]
                x = x / float(sampling_params.temperature)
                in_support = np.ones(len(x), bool)
                if sampling_params.truncates:
                    order = np.argsort(-x)[:9]
                    p = np.exp(x[order] - x.max())
                    p /= p.sum()
                    order = order[np.cumsum(p) - p < 0.9]
                    in_support = np.isin(np.arange(len(x)), order) & (x - x.max() >= np.log(0.01))
                    any_dropped |= not in_support[token]
                    in_support[token] = True
                total = np.log(np.exp(x[in_support]).sum())
                p = np.exp(x[in_support] - total)
                assert stats["logprobs"][i, j, t] == pytest.approx(x[token] - total, abs=1e-5)
                assert stats["entropy"][i, j, t] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    assert any_dropped == sampling_params.truncates


def test_prompts_are_shared_where_all_networks_that_are_read_can_share_them():
    shares = transformer(SMALL)
    alone = shares._replace(extras=shares.extras._replace(hidden_shared=None))
    both = Statistic("gap", lambda distributions, token: token, ("policy", "teacher"))

    def read(policy, *statistics, value=None, want=BOTH, **networks):
        how = {"network": policy, "value": value, "networks": networks}
        return shares_prompts(want=want, statistics=statistics, **how)

    assert read(shares)
    assert not read(alone)
    assert read(shares, teacher=alone)  # which nothing reads
    assert not read(shares, both, teacher=alone)
    assert read(shares, value=value_network(alone))
    assert not read(shares, value=value_network(alone), want=BOTH | {"values"})


def test_rows_lay_prompt_and_completion_side_by_side(batch):
    packed_rows = rows(batch)
    n, g, t = batch.tokens.shape
    p = batch.prompt_tokens.shape[1]
    for b in range(n * g):
        i, j = divmod(b, g)
        q, m = int(batch.prompt_lengths[i]), int(batch.lengths[i, j])
        live = np.asarray(packed_rows.segments[b]) == 1
        assert live.tolist() == [k < q for k in range(p)] + [k < m for k in range(t)]
        assert np.asarray(packed_rows.positions[b])[live].tolist() == list(range(q + m))
        both = [*batch.prompt_tokens[i, :q].tolist(), *batch.tokens[i, j, :m].tolist()]
        assert np.asarray(packed_rows.tokens[b])[live].tolist() == both
        # The column before a token holds the position before it.
        before = np.asarray(packed_rows.positions[b])[np.asarray(packed_rows.before[b])]
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
    a, b = scored(DISTRIBUTIONS["plain"]), scored(DISTRIBUTIONS["plain"], batch=other)
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
            changed = network._replace(logits=lambda _, h: network.logits(params, h)).with_extras(
                head=None
            )
            stats = score(
                {"policy": params | {"embed": table}},
                marked,
                DISTRIBUTIONS["plain"],
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


LENGTHS = np.array([[16, 1, 3], [2, 0, 5], [7, 2, 2], [1, 1, 9]], np.int32)
HIDDEN = Statistic("size", lambda hidden, mask: (hidden**2).sum(-1), over="hidden")


@pytest.mark.parametrize("make", [value_head, value_network])
def test_a_prompt_read_once_gives_the_same_numbers_and_gradients(network, params, batch, make):
    """As when it is repeated for every member: statistics of all kinds, policies and values."""
    heads = {"policy": params, "value": make(network).init(jax.random.key(1)), "ref": params}
    heads["value"] = jax.tree.map(lambda x: x + 0.3, heads["value"])
    heads["ref"] = jax.tree.map(lambda x: 0.9 * x, params)
    want = frozenset({"logprobs", "entropy", "values", "ref_logprobs"})
    names = sorted({*want, "size"})
    weights = jax.random.normal(jax.random.key(4), (len(names), *batch.tokens.shape))
    plain = network.with_extras(hidden_shared=None)
    calls = []

    def gradient(network):
        spy = network._replace(hidden=lambda *args: calls.append(1) or network.hidden(*args))

        def loss(heads):
            value = make(spy)
            stats = score(
                heads,
                batch,
                DISTRIBUTIONS["cold"],
                network=spy,
                value=value,
                want=want,
                statistics=(HIDDEN,),
            )
            live = batch.mask
            return sum(
                jnp.where(live, w * stats[n], 0).sum() for w, n in zip(weights, names, strict=True)
            ), stats

        # At level 0, as tests run, JAX 0.12 is ten times less exact than at that of a real run.
        options = {"xla_backend_optimization_level": 2}
        return jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(heads)

    once, stats = gradient(network)
    assert calls == []
    repeated, expected = gradient(plain)
    assert len(calls) >= 2
    live = np.asarray(batch.mask)
    assert set(stats) == set(expected) == set(names)
    for name in names:
        np.testing.assert_allclose(stats[name][live], expected[name][live], atol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(once), jax.tree.leaves(repeated), strict=True
    ):
        scale = float(jnp.abs(b).max()) + 1e-6
        np.testing.assert_allclose(a, b, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("parts", [1, 2])
def test_packed_rows_give_the_same_numbers_and_gradients(network, params, make_batch, parts):
    batch = make_batch(g=3, t=16, lengths=LENGTHS, mask=np.arange(16) < LENGTHS[:, :, None])
    packing = pack(LENGTHS, 16, parts=parts)
    value = value_head(network)
    both = {
        "policy": params,
        "value": jax.tree.map(lambda x: x + 0.3, value.init(jax.random.key(1))),
    }
    want = frozenset({"logprobs", "entropy", "values"})
    names = sorted({*want, "size"})
    weights = jax.random.normal(jax.random.key(4), (len(names), *batch.tokens.shape))

    def loss(both, batch):
        scoring = partial(
            score,
            both,
            sampling_params=DISTRIBUTIONS["cold"],
            network=network,
            value=value,
            want=want,
            statistics=(HIDDEN,),
        )
        stats = in_parts(scoring, batch, parts)
        zipped = zip(weights, names, strict=True)
        return sum(jnp.where(batch.mask, w * stats[n], 0).sum() for w, n in zipped), stats

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    slopes, stats = gradient(both, batch.replace(packing=packing))
    expected_slopes, expected = gradient(both, batch)
    live = np.asarray(batch.mask)
    for name in names:
        rtol = 1e-6 if name == "size" else 0  # sizes are sums of squares, about 36
        np.testing.assert_allclose(stats[name][live], expected[name][live], rtol, atol=1e-5)
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected_slopes), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * (float(jnp.abs(b).max()) + 1e-6))


def branching(rng, group, width):
    """Members that leave others, and branches of branches: tokens, lengths, node, mask."""
    paths, tokens_so_far = [], 0
    for g in range(group):
        past = paths[rng.integers(g)] if g and rng.random() < 0.8 else []
        past = past[: rng.integers(len(past))] if past else []
        length = rng.integers(1, width + 1 - len(past))
        paths.append([*past, *range(tokens_so_far, tokens_so_far + length)])
        tokens_so_far += length
    through = [tuple(g for g in range(group) if i in paths[g]) for i in range(tokens_so_far)]
    names = {members: k for k, members in enumerate(dict.fromkeys(through), 1)}
    tokens, node, mask = np.zeros((3, group, width), np.int32)
    ids, used = rng.integers(0, 9, tokens_so_far), set()
    for g, path in enumerate(paths):
        for t, i in enumerate(path):
            tokens[g, t], node[g, t], mask[g, t] = ids[i], names[through[i]], i not in used
            used.add(i)
    return tokens, np.array([len(path) for path in paths]), node, mask.astype(bool)


@pytest.mark.parametrize(
    ("attention", "parts", "window"),
    [
        ("xla", 2, None),
        ("splash", 1, None),
        pytest.param("blockwise", 1, 5, marks=pytest.mark.slow),
    ],
)
def test_branches_read_what_they_share_once(make_batch, attention, parts, window):
    """Also where the member that drew what others share is not trained on."""
    rng = np.random.default_rng(0)
    grown = [branching(rng, 6, 16) for _ in range(4)]
    tokens, lengths, node, mask = (np.stack(x) for x in zip(*grown, strict=True))
    mask[0, 0] = False
    batch = make_batch(g=6, t=16, lengths=lengths, mask=mask)
    batch = batch.replace(tokens=jnp.asarray(tokens), ids=batch.ids | {"node": jnp.asarray(node)})
    packed = Packer(parts, 1)(batch)
    live = np.asarray(mask & (np.arange(16) < lengths[:, :, None]))
    cells = packed.packing.members >= 0
    assert live.sum() <= cells.sum() < 0.8 * (node > 0).sum()
    config = dataclasses.replace(SMALL, window=window)
    network, plain = (transformer(config, attention=how) for how in (attention, "xla"))
    params = network.init(jax.random.key(0))
    weights = jax.random.normal(jax.random.key(4), (2, *batch.tokens.shape))

    def gradient(network, batch):
        def loss(params):
            scoring = partial(
                score,
                {"policy": params},
                sampling_params=DISTRIBUTIONS["cold"],
                network=network,
                value=None,
                want=BOTH,
            )
            stats = in_parts(scoring, batch, parts)
            both = zip(weights, sorted(BOTH), strict=True)
            return sum(jnp.where(live, w * stats[n], 0).sum() for w, n in both), stats

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    (slopes, stats), (expected_slopes, expected) = gradient(network, packed), gradient(plain, batch)
    for name in BOTH:
        np.testing.assert_allclose(stats[name][live], expected[name][live], atol=2e-5)
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected_slopes), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * (float(jnp.abs(b).max()) + 1e-6))


def test_shared_rows_hold_what_the_tokens_are_predicted_from(batch):
    packed_rows = shared_rows(batch)
    n, g, t = batch.tokens.shape
    assert np.array_equal(packed_rows.prompt_lengths[:, 0], batch.prompt_lengths - 1)
    for row in range(n * g):
        i, j = divmod(row, g)
        q, m = int(batch.prompt_lengths[i]), int(batch.lengths[i, j])
        full = [*batch.prompt_tokens[i, :q].tolist(), *batch.tokens[i, j, :m].tolist()]
        assert np.asarray(packed_rows.tokens[row, :m]).tolist() == full[q - 1 : -1]
        assert np.asarray(packed_rows.positions[row, :m]).tolist() == list(range(q - 1, q + m - 1))
        assert np.asarray(packed_rows.segments[row]).tolist() == [1] * m + [0] * (t - m)


CHUNKS = {1: (1, 1), 19 * 4: (4, 1), 8 * 19 * 3: (8, 3)}


@pytest.mark.parametrize("at_once", CHUNKS)
def test_the_head_in_chunks(network, params, monkeypatch, at_once):
    """In chunks of few of the 8 rows and 5 tokens: equal numbers and gradients."""
    hidden = jax.random.normal(jax.random.key(0), (8, 5, 16))
    tokens = jax.random.randint(jax.random.key(1), (8, 5), 0, 19)
    weights = jax.random.normal(jax.random.key(2), (2, 8, 5))
    sizes = []

    def count_logits(params, hidden):
        sizes.append(hidden.shape[:2])
        return network.logits(params, hidden)

    def run(limit):
        sizes.clear()
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", limit)
        spy = network._replace(logits=count_logits).with_extras(head=None)

        def loss(params, hidden):
            stats = head_statistics(
                {"policy": params},
                {"policy": hidden},
                tokens,
                networks={"policy": spy},
                sampling_params=DISTRIBUTIONS["cold"],
                want=BOTH,
            )
            return (weights[0] * stats["logprobs"] + weights[1] * stats["entropy"]).sum(), stats

        out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, hidden)
        return out, set(sizes)

    (gradient, stats), chunks = run(at_once)
    (expected_gradient, expected), full = run(2**24)
    assert full == {(8, 5)}
    assert chunks == {CHUNKS[at_once]}
    assert stats["logprobs"].shape == stats["entropy"].shape == (8, 5)
    for a, b in zip(
        jax.tree.leaves((gradient, stats)),
        jax.tree.leaves((expected_gradient, expected)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_head_that_is_walked_over_equals_one_that_is_not(network, params):
    """Policies that are fused beside one whose whole distribution is read."""
    hidden = {n: jax.random.normal(jax.random.key(i), (2, 5, 16)) for i, n in enumerate("ab")}
    hidden = {"policy": hidden["a"], "ref": hidden["b"]}
    tokens = jax.random.randint(jax.random.key(3), (2, 5), 0, 19)
    both = {"policy": params, "ref": params}
    surprise = Statistic(
        "surprise", lambda distributions, token: distributions["ref"][token], policies=("ref",)
    )

    def run(network, sampling_params, statistics=()):
        return head_statistics(
            both,
            hidden,
            tokens,
            networks={"policy": network, "ref": network},
            sampling_params=sampling_params,
            want=BOTH | {"ref_logprobs"},
            statistics=statistics,
        )

    for sampling_params, statistics in (
        (DISTRIBUTIONS["cold"], ()),
        (make_sampling_params(0.0), (surprise,)),
        (DISTRIBUTIONS["truncated"], ()),
    ):
        outputs = run(network, sampling_params, statistics)
        expected = run(network.with_extras(head=None), sampling_params, statistics)
        assert (
            set(outputs) == set(expected) == BOTH | {"ref_logprobs"} | {s.name for s in statistics}
        )
        for name in outputs:
            np.testing.assert_allclose(outputs[name], expected[name], atol=1e-5, err_msg=name)


def test_many_scores_are_not_kept(network, monkeypatch):
    """Temporaries of the gradient: those of a part of the vocabulary, not all 2^24 scores."""
    v = 2**15
    wide = network._replace(vocab_size=v).with_extras(head=lambda weight: Head(weight, 0))
    shape = jax.ShapeDtypeStruct
    inputs = shape((v, 8), jnp.float32), shape((8, 64, 8), jnp.float32), shape((8, 64), jnp.int32)
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 2**20)

    def temporaries():
        def loss(weight, hidden, tokens):
            policy = {
                "networks": {"policy": wide},
                "sampling_params": DISTRIBUTIONS["cold"],
                "want": BOTH,
            }
            outputs = head_statistics({"policy": weight}, {"policy": hidden}, tokens, **policy)
            return outputs["logprobs"].sum() + outputs["entropy"].sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries() < 3 * 2**24


def test_only_what_is_wanted(network, params, batch):
    both = {"policy": params, "value": None}
    shapes = []

    def apply(value_params, hidden, tokens, positions, segments):
        shapes.append(hidden.shape)
        return positions.astype(jnp.float32)

    value = ValueNetwork(init=lambda key: None, axes=lambda: None, apply=apply)

    def run(want):
        return jax.jit(partial(score, network=network, value=value, want=want))(
            both, batch, DISTRIBUTIONS["plain"]
        )

    assert set(run(frozenset({"logprobs"}))) == {"logprobs"}
    assert shapes == []
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
    values = run(both, batch, DISTRIBUTIONS["plain"])["values"]

    @jax.jit
    def one(both, *row):
        return value.apply(both["value"], network.hidden(both["policy"], *row)[0], *row)[0]

    assert values.dtype == jnp.float32
    for i, j in ((0, 0), (2, 1)):
        *packed_rows, at = single(batch, i, j)
        expected, m = one(both, *packed_rows)[at], int(batch.lengths[i, j])
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


def test_of_a_teacher_s_likeliest_tokens_the_backward_pass_keeps_2_k_and_1_numbers(
    monkeypatch, capsys
):
    """Neither a distribution nor logits of the teacher are kept, nor made again."""
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 2 * 4 * 32)
    config = SMALL
    network = transformer(config)
    weights = jax.eval_shape(network.init, jax.random.key(0))
    states = jax.ShapeDtypeStruct((2, 12, config.embed_dim), jnp.float32)
    tokens = jnp.zeros((2, 12), jnp.int32)

    def loss(params, teacher, hidden, k):
        statistic = top_k_divergence("forward", k)
        stats = head_statistics(
            {"policy": params, "teacher": teacher},
            {"policy": hidden, "teacher": hidden},
            tokens,
            networks={"policy": network, "teacher": network},
            sampling_params=make_sampling_params(),
            want=frozenset(),
            statistics=(statistic,),
        )
        return stats[statistic.name].sum()

    jax.ad_checkpoint.print_saved_residuals(partial(loss, k=5), weights, weights, states)
    residuals = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    sizes = [tuple(map(int, re.findall(r"[0-9]+", x.partition("[")[2]))) for x in residuals]
    by_token = [s for s in sizes if np.prod(s, dtype=int) % 24 == 0 and s[-1:] in ((5,), (32,))]
    assert len([s for s in by_token if s[-1] == 5]) == 2, "log-probabilities and ids"
    assert not [s for s in by_token if s[-1] == 32], sizes
    text = str(jax.make_jaxpr(jax.grad(partial(loss, k=5)))(weights, weights, states))
    heads = len(re.findall(r"f32\[[0-9,]*32\] = dot_general", text))
    assert heads == 3, "the student's logits forward and backward, the teacher's forward alone"


@pytest.mark.parametrize("make", [value_head, value_network, value_networks])
def test_several_outputs_are_those_of_one_each(network, params, batch, make):
    """Three numbers for a token, by a head, a network and a network each."""
    value, one = make(network, 3), value_head if make is value_head else value_network
    value_params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        value.init(jax.random.key(1)),
    )

    def part(k):
        if make is value_networks:
            return jax.tree.map(lambda x: x[k], value_params)
        head = value_params if make is value_head else value_params["head"]
        picked = {"weight": head["weight"][:, k], "bias": head["bias"][k]}
        return picked if make is value_head else value_params | {"head": picked}

    def scored_by(value, *statistics):
        want = frozenset({"values"})
        scoring = partial(score, network=network, value=value, want=want, statistics=statistics)
        compiled = jax.jit(scoring)
        return lambda params_of_value: compiled(
            {"policy": params, "value": params_of_value}, batch, make_sampling_params()
        )

    got = scored_by(value, value_output(1), value_output(2, start=True))(value_params)
    assert set(got) == {"values", "values_1", "rollout_values_2"}
    live, of_one = np.asarray(batch.mask), scored_by(one(network))
    for k, name in enumerate(("values", "values_1", "rollout_values_2")):
        expected = of_one(part(k))["values"]
        np.testing.assert_allclose(
            np.asarray(got[name])[live], np.asarray(expected)[live], atol=1e-5
        )
    assert np.abs(np.asarray(got["values"] - got["values_1"])[live]).max() > 1e-3
    is_names = lambda x: type(x) is tuple  # noqa: E731
    ranks = jax.tree.map(len, value.axes(), is_leaf=is_names)
    assert ranks == jax.tree.map(jnp.ndim, value_params)
