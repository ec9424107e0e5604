import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.mesh import RULES, batch_sharding, make_mesh, sharding, tree_shardings
from jrl.models import transformer as T
from jrl.models.config import ModelConfig
from jrl.plan.costs import program_costs
from jrl.types import SharedRows

TINY = ModelConfig(
    vocab_size=31,
    layers=3,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_dim=24,
    max_length=64,
)
VARIANTS = {
    "plain": {},
    "gemma": {
        **{"norm_plus_one": True, "post_norms": True, "qk_norm": True, "embed_scale": 4.0},
        **{"activation": "gelu_tanh", "attention_softcap": 5.0, "logit_softcap": 3.0},
        **{"window": 3, "window_pattern": (True, False), "rope_local_theta": 100.0},
        **{"rope_scaling": "linear", "rope_factor": 8.0, "query_scale": 0.3},
    },
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied_embeddings": False},
    "unrotated": {"rope_pattern": (True, False, True), "rope_scaling": "llama3"},
    "experts": {"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8},
    "mixed": {
        **{"experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8},
        **{"expert_pattern": (False, True, True)},
    },
}


def make(**changes):
    config = dataclasses.replace(TINY, **changes)
    network = T.transformer(config)
    params = network.init(jax.random.key(0))
    # Constants at their start would hide a forgotten bias or norm.
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return network, treedef.unflatten(noisy)


def full_forward(network, params, tokens, lengths):
    b, l = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(l), (b, l))
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    return jax.jit(network.hidden)(params, tokens, positions, segments)


@pytest.mark.parametrize(("variant", "pieces"), [*((v, 1) for v in VARIANTS), ("gemma", 3)])
def test_extend_equals_hidden_on_ragged_rows(variant, pieces):
    network, params = make(**VARIANTS[variant])
    prompts, total, rows = jnp.array([5, 3, 1]), 11, 3
    tokens = jax.random.randint(jax.random.key(2), (rows, total), 0, TINY.vocab_size)
    expected, _ = full_forward(network, params, tokens, jnp.full(rows, total))

    extend, weights = jax.jit(network.extend), network.prepare(params)
    cache = network.init_cache(rows, total + 2, weights, pieces)
    columns = jnp.broadcast_to(jnp.arange(5), (rows, 5))
    live = columns < prompts[:, None]
    out, cache = extend(weights, cache, tokens[:, :5], columns, live)
    np.testing.assert_allclose(
        np.where(live[:, :, None], out, 0.0),
        np.where(live[:, :, None], expected[:, :5], 0.0),
        atol=1e-5,
    )
    for step in range(total - 5):
        at = (prompts + step)[:, None]
        token = jnp.take_along_axis(tokens, at, axis=1)
        out, cache = extend(weights, cache, token, at, jnp.ones((rows, 1), bool))
        want = jnp.take_along_axis(expected, at[:, :, None], axis=1)
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_extend_writes_only_live_tokens():
    network, params = make()
    weights = network.prepare(params)
    cache = network.init_cache(2, 4, weights)
    tokens = jnp.ones((2, 2), jnp.int32)
    positions = jnp.array([[0, 1], [0, 9]])
    live = jnp.array([[True, False], [True, True]])
    _, cache = network.extend(weights, cache, tokens, positions, live)
    keys = np.array([np.asarray(piece["k"]) for (piece,) in cache.rows])
    live_columns = (keys != 0).any((0, 2, 4))
    assert live_columns.tolist() == [[True, False, False, False], [True, False, False, False]]


@pytest.mark.parametrize("variant", ["gemma", "mixed"])
def test_packed_segments_equal_separate_rows(variant):
    network, params = make(**VARIANTS[variant])
    tokens = jax.random.randint(jax.random.key(2), (1, 12), 0, TINY.vocab_size)
    positions = jnp.array([[*range(5), *range(4), 0, 0, 0]])
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3])
    apply = jax.jit(network.hidden)
    packed, _ = apply(params, tokens, positions, segments)
    for start, length in ((0, 5), (5, 4)):
        row = tokens[:, start : start + length]
        alone, _ = full_forward(network, params, row, jnp.array([length]))
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=1e-5)
    # Columns may come in any order: positions say what comes before what.
    order = jax.random.permutation(jax.random.key(5), 12)
    shuffled, _ = apply(params, *(x[:, order] for x in (tokens, positions, segments)))
    np.testing.assert_allclose(shuffled[:, :9], packed[:, order][:, :9], atol=1e-5)


def ragged_groups(packed):
    """Two prompts, one of them of length 0, with three rows each; the same, each row whole.

    Packed, they are one block, and two rows hold what the six did, prompts mixed.
    """
    n, members, p, c = 2, 3, 5, 6
    prompt_lengths = jnp.array([4, 0])
    prompts = jax.random.randint(jax.random.key(2), (n, p), 0, TINY.vocab_size)
    tokens = jax.random.randint(jax.random.key(3), (n * members, c), 0, TINY.vocab_size)
    lengths = jnp.array([[6], [2], [0], [5], [6], [1]])
    column = jnp.arange(c)[None]
    start = jnp.repeat(prompt_lengths, members)[:, None]
    positions, segments = start + column, (column < lengths).astype(jnp.int32)
    owners = jnp.zeros_like(tokens)
    packed_rows = SharedRows(
        prompts[:, None], prompt_lengths[:, None], tokens, positions, segments, owners
    )
    if packed:
        rows = jnp.array([[0, 3], [4, 1], [5, 2]])  # three rows of two completions each
        own_segments = segments * (1 + jnp.arange(n * members)[:, None])
        parts = (
            tokens,
            positions,
            own_segments,
            owners + jnp.arange(n * members)[:, None] // members,
        )
        packed_rows = SharedRows(
            prompts[None], prompt_lengths[None], *(x[rows].reshape(3, -1) for x in parts)
        )
    position_ids = jnp.broadcast_to(jnp.arange(p)[None], (n * members, p))
    repeated = (
        jnp.concatenate([jnp.repeat(prompts, members, axis=0), tokens], axis=1),
        jnp.concatenate([position_ids, positions], axis=1),
        jnp.concatenate([position_ids < start, segments != 0], axis=1).astype(jnp.int32),
    )
    rows = rows if packed else jnp.arange(6)[:, None]
    return packed_rows, repeated, lambda x: x[:, p:][rows].reshape(*packed_rows.tokens.shape, -1)


@pytest.mark.parametrize(
    ("variant", "packed"),
    [
        *((v, False) for v in VARIANTS),
        ("gemma", True),
        pytest.param("mixed", True, marks=pytest.mark.slow),
    ],
)
def test_rows_that_share_a_prompt_equal_rows_that_repeat_it(variant, packed):
    network, params = make(**VARIANTS[variant])
    packed_rows, repeated_rows, hidden_of = ragged_groups(packed)
    weights = jax.random.normal(jax.random.key(4), (*packed_rows.tokens.shape, TINY.embed_dim))
    weights = jnp.where((packed_rows.segments != 0)[:, :, None], weights, 0.0)

    def once(params):
        hidden, aux = network.extras.hidden_shared(params, packed_rows)
        return (weights * hidden).sum(), (hidden, aux)

    def repeated(params):
        hidden, aux = network.hidden(params, *repeated_rows)
        return (weights * hidden_of(hidden)).sum(), (hidden_of(hidden), aux)

    quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    gradient, (hidden, aux) = quick(jax.grad(once, has_aux=True))(params)
    expected_gradient, (expected, like) = quick(jax.grad(repeated, has_aux=True))(params)
    live = np.asarray(packed_rows.segments) != 0
    np.testing.assert_allclose(hidden[live], expected[live], atol=1e-5)
    assert set(aux) == set(like)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient),
        jax.tree.leaves(expected_gradient),
        strict=True,
    ):
        scale = np.abs(b).max() + 1e-6
        np.testing.assert_allclose(a, b, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))
    if aux:  # 4 tokens of prompts and 20 of rows, two visits each
        np.testing.assert_array_equal(aux["router_tokens"], 24)
        np.testing.assert_array_equal(aux["router_visits"].sum(-1), 48)


def test_a_shared_prompt_goes_through_the_network_once():
    """As measured by the compiled program: a prompt of 64 for 8 rows of 8."""
    network = T.transformer(dataclasses.replace(TINY, embed_dim=64, max_length=128))
    params = jax.eval_shape(network.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    prompts = jax.ShapeDtypeStruct((1, 1, 64), jnp.int32)
    packed_rows = SharedRows(prompts, jax.ShapeDtypeStruct((1, 1), jnp.int32), *[rows] * 4)
    long = [jax.ShapeDtypeStruct((8, 72), jnp.int32)] * 3

    def flops(function, *inputs):
        return jax.jit(function).lower(params, *inputs).compile().cost_analysis()["flops"]

    assert flops(network.extras.hidden_shared, packed_rows) < 0.3 * flops(network.hidden, *long)


def test_attention_is_that_of_five_layers_over_the_middle_third():
    """Layers 4 to 8 of 12; of fewer layers, each one once. Rows sum to 1 where a token is."""
    tokens = jnp.arange(6, dtype=jnp.int32).reshape(1, 6) % 5
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    segments = (positions < 5).astype(jnp.int32)
    for layers, count in ((12, 5), (2, 2), (1, 1)):
        network, params = make(layers=layers)
        weights = jax.jit(network.extras.views.attention)(params, tokens, positions, segments)
        assert weights.shape == (1, count * TINY.heads, 6, 6)
        np.testing.assert_allclose(weights.sum(3)[:, :, :5], 1, rtol=1e-5)
        assert not np.triu(np.asarray(weights)[0, 0], 1).any()


def test_padding_has_finite_values_and_no_gradient():
    network, params = make(**VARIANTS["gemma"])
    tokens = jax.random.randint(jax.random.key(2), (2, 6), 0, TINY.vocab_size)
    lengths = jnp.array([4, 6])

    def loss(params, tokens):
        hidden, _ = full_forward(network, params, tokens, lengths)
        live = (jnp.arange(6)[None] < lengths[:, None])[:, :, None]
        return (jnp.where(live, hidden, 0.0) ** 2).sum() + 0.0 * hidden.sum()

    compute = jax.jit(jax.value_and_grad(loss))
    value, gradient = compute(params, tokens)
    other, changed = compute(params, tokens.at[0, 4:].add(1) % TINY.vocab_size)
    assert value == other
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, changed)


def gradient_program(config, remat, shared, attention="auto"):
    network = T.transformer(config, remat=remat, attention=attention)
    params = network.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(2), (2, 6), 0, TINY.vocab_size)
    packed_rows, *_ = ragged_groups(packed=False)

    def loss(params):
        if shared:
            hidden, _ = network.extras.hidden_shared(params, packed_rows)
        else:
            hidden, _ = full_forward(network, params, tokens, jnp.array([6, 4]))
        return (network.logits(params, hidden) ** 2).mean()

    return jax.grad(loss), params


@pytest.mark.parametrize(("shared", "attending"), [(False, 2), (True, 6)])
def test_remat_recomputes_what_it_says_and_changes_no_number(shared, attending):
    products, gradients = {}, {}
    roots = {}
    for remat in T.REMAT:
        gradient, params = gradient_program(TINY, remat, shared)
        text = str(jax.make_jaxpr(gradient)(params))
        products[remat], roots[remat] = text.count("dot_general["), text.count("= rsqrt ")
        gradients[remat] = jax.jit(gradient)(params)
    # "dots" repeats the two products of each attention: of prompts, of rows, of both; "full" also
    # the projections, but for the last one, whose result no derivative needs.
    assert products["dots"] - products["none"] == attending
    assert products["full"] - products["none"] == attending + 6 * (2 if shared else 1)
    # "elementwise" repeats the norms only: no product, and nothing of attention.
    assert products["elementwise"] == products["none"]
    assert roots["elementwise"] > roots["none"]
    # "mlp" also the gate and up products, of prompts and of rows.
    assert products["mlp"] - products["none"] == 2 * (2 if shared else 1)
    for remat in ("dots", "elementwise", "mlp", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            gradients[remat],
            gradients["none"],
        )
    with pytest.raises(UserError, match="remat = 'some'"):
        T.transformer(TINY, remat="some")


@pytest.mark.parametrize("how", ["xla", "blockwise", "splash"])
def test_elementwise_rematerialisation_repeats_nothing_of_attention(how):
    exponentials = {}
    for remat in ("none", "elementwise", "dots"):
        gradient, params = gradient_program(TINY, remat, True, how)
        exponentials[remat] = str(jax.make_jaxpr(gradient)(params)).count("= exp ")
    assert exponentials["elementwise"] == exponentials["none"] < exponentials["dots"]


def test_router_statistics_come_from_sparse_layers_only():
    tokens = jax.random.randint(jax.random.key(2), (2, 6), 0, TINY.vocab_size)
    lengths = jnp.array([6, 2])
    for variant, sparse in (("plain", 0), ("experts", 3), ("mixed", 2)):
        network, params = make(**VARIANTS[variant])
        _, aux = full_forward(network, params, tokens, lengths)
        assert bool(aux) == bool(sparse)
        if sparse:  # 8 live tokens of 2 visits each
            assert aux["router_visits"].shape == (sparse, 4)
            np.testing.assert_array_equal(aux["router_visits"].sum(-1), 16)
            assert aux["router_entropy"].shape == (sparse,)


@pytest.mark.parametrize("variant", VARIANTS)
def test_axes_abstract_and_count_describe_the_parameters(variant):
    config = dataclasses.replace(TINY, **VARIANTS[variant], param_dtype="bfloat16")
    network = T.transformer(config)
    params = jax.eval_shape(network.init, jax.random.key(0))
    assert jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), params, T.abstract(config)
    )
    leaves, treedef = jax.tree.flatten(params)
    assert T.count_params(config) == sum(leaf.size for leaf in leaves)
    for leaf, names in zip(leaves, treedef.flatten_up_to(network.axes()), strict=True):
        assert leaf.ndim == len(names)
        assert leaf.dtype == jnp.bfloat16
        assert set(names) <= set(RULES)


def test_initial_sizes_follow_fan_in():
    config = dataclasses.replace(TINY, layers=2, embed_dim=256, head_dim=64, mlp_dim=512)
    params = T.transformer(config).init(jax.random.key(0))
    expected = {
        ("attention", "q"): 256**-0.5,
        ("attention", "o"): (4 * 64) ** -0.5 / 2,  # residual outputs: over sqrt(2 * layers)
        ("mlp", "down"): 512**-0.5 / 2,
    }
    for (part, name), std in expected.items():
        assert float(params["layers"][part][name].std()) == pytest.approx(std, rel=0.02)
    assert float(params["layers"]["mlp_norm"].min()) == 1.0


@pytest.mark.parametrize("variant", ["plain", "experts"])
def test_sharded_numbers_equal_one_device(variant):
    network, params = make(**VARIANTS[variant], vocab_size=32, embed_dim=16)
    tokens = jax.random.randint(jax.random.key(2), (4, 8), 0, 32)
    segments = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(8), (4, 8))

    def run(params, tokens):
        hidden, _ = network.hidden(params, tokens, positions, segments)
        weights = network.prepare(params)
        cache = network.init_cache(4, 8, weights)
        again, cache = network.extend(weights, cache, tokens, positions, segments == 1)
        return hidden, network.logits(params, again), cache

    expected = jax.jit(run)(params, tokens)
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    placed = jax.device_put(params, tree_shardings(mesh, network.axes(), params))
    with jax.set_mesh(mesh):
        got = jax.jit(run)(placed, jax.device_put(tokens, batch_sharding(mesh)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not got[2].rows[0][0]["k"].sharding.is_fully_replicated


def test_a_tables_gradient_goes_to_the_shard_that_holds_it():
    """Over fsdp the rows travel, over data the shards of the gradient, never the whole of it."""
    config = dataclasses.replace(TINY, vocab_size=2048, embed_dim=32, dtype="float32")
    mesh = make_mesh({"data": 2, "fsdp": 4})
    rows, table = (16, 8), (config.vocab_size, config.embed_dim)

    def loss(embed, tokens, weights):
        return (T.embed(config, {"embed": embed}, tokens) * weights).sum()

    table_sharding = sharding(mesh, ("vocab", "embed"), table)
    spread = batch_sharding(mesh)
    args = [
        jax.ShapeDtypeStruct(table, jnp.float32, sharding=table_sharding),
        jax.ShapeDtypeStruct(rows, jnp.int32, sharding=spread),
        jax.ShapeDtypeStruct((*rows, config.embed_dim), jnp.float32, sharding=spread),
    ]
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss), out_shardings=table_sharding).lower(*args)
    bytes_by_axis = dict.fromkeys(range(5), 0.0)
    for cost in program_costs(lowered.compile().as_text(), list(mesh.shape.values())):
        for c in cost.collectives:
            for axis in c.axes:
                bytes_by_axis[axis] += cost.runs * c.bytes
    shard = 4 * np.prod(table) / 4
    assert bytes_by_axis[0] == shard  # twice, and half of it each time
    assert bytes_by_axis[1] <= 2 * 4 * np.prod(rows) * config.embed_dim / 2


@pytest.mark.parametrize("pieces", [1, 4])
def test_decoding_makes_no_copy_of_the_cache(pieces):
    config = dataclasses.replace(TINY, head_dim=32)
    network = T.transformer(config)
    params = jax.eval_shape(network.init, jax.random.key(0))
    weights = jax.eval_shape(network.prepare, params)
    cache = jax.eval_shape(lambda: network.init_cache(8, 512, None, pieces))

    def decode(params, cache, token):
        def step(carry):
            i, token, cache = carry
            at = jnp.full((8, 1), i)
            hidden, cache = network.extend(params, cache, token, at, jnp.ones((8, 1), bool))
            return i + 1, network.logits(params, hidden).argmax(-1).astype(jnp.int32), cache

        return jax.lax.while_loop(lambda carry: carry[0] < 512, step, (0, token, cache))

    token = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    compiled = jax.jit(decode, donate_argnums=1).lower(weights, cache, token).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size
