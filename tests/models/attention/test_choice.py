"""Every kernel of attention against plain attention in float32, and which one is chosen when."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.models.attention import choice, splash_cache
from jrl.models.attention import cudnn as cudnn_module
from jrl.models.attention.blockwise import blockwise
from jrl.models.attention.choice import Shape, kernel_for, row_attention, shared_attention
from jrl.models.attention.cudnn import cudnn
from jrl.models.attention.dense import NO_WINDOW, Part, attend, attend_parts, visible
from jrl.models.attention.flash import Marks, Place, attend_places
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.slots import prefill
from jrl.types import SharedRows

BLOCKS, PROMPTS, PROMPT, ROWS, COLUMNS, HEADS, KV_HEADS, SIZE = 2, 2, 12, 4, 40, 4, 2, 16
QUICK = {"xla_backend_optimization_level": 0}
MODEL = ModelConfig(
    vocab_size=31,
    layers=2,
    embed_dim=16,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=SIZE,
    mlp_dim=24,
    max_length=256,
)


def packed():
    """Rows of several completions each, of unlike lengths, behind prompts of unlike lengths."""
    rng = np.random.default_rng(0)
    lengths = np.array([[PROMPT, 7], [4, 9]], np.int32)
    positions, segments, owners = np.zeros((3, ROWS, COLUMNS), np.int32)
    for row in range(ROWS):
        start, segment = 0, 1
        while start < COLUMNS - 6:
            count = min(int(rng.integers(3, 20)), COLUMNS - 4 - start)
            owner = int(rng.integers(0, PROMPTS))
            here = row, slice(start, start + count)
            segments[here], owners[here] = segment, owner
            positions[here] = lengths[row // 2, owner] + np.arange(count)
            start, segment = start + count, segment + 1
    return laid_out(lengths, positions, segments, owners)


def laid_out(lengths, positions, segments, owners):
    """Rows whose tokens nobody reads."""
    prompts = jnp.zeros((*lengths.shape, PROMPT), jnp.int32)
    arrays = (lengths, positions, positions, segments, owners)
    return SharedRows(prompts, *map(jnp.asarray, arrays))


def both(how, config, layout, inputs):
    """Values, and their gradients by a weight for each number of a live token."""

    def total(q, *keys_values):
        window = NO_WINDOW if config.window is None else config.window
        out = shared_attention(how, config, layout)(q, *keys_values, window)
        live = (layout.segments != 0)[:, :, None, None]
        out = jnp.where(live, out, 0)
        return (out * inputs[-1]).sum(), out

    compiled = partial(jax.jit, compiler_options=QUICK)
    gradients, out = compiled(jax.grad(total, (0, 1, 2, 3, 4), has_aux=True))(*inputs[:-1])
    return [out, *gradients]


def random_inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    q, weights = jax.random.normal(keys[0], (2, ROWS, COLUMNS, HEADS, SIZE))
    past = jax.random.normal(keys[1], (2, BLOCKS, KV_HEADS, PROMPTS * PROMPT, SIZE))
    keys_values = jax.random.normal(keys[2], (2, ROWS, KV_HEADS, COLUMNS, SIZE))
    return q, *past, *keys_values, weights


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 8, "attention_softcap": 2.0, "query_scale": 0.3},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_dense_attention_on_packed_rows_behind_prompts(changes, monkeypatch):
    """Values and gradients; several completions a row, of two prompts, GQA, padding."""
    monkeypatch.setattr("jrl.models.attention.choice.blockwise", partial(blockwise, block=16))
    config, packed_rows, inputs = dataclasses.replace(MODEL, **changes), packed(), random_inputs()
    expected = both("xla", config, packed_rows, inputs)
    for kind in ("blockwise", "splash"):
        for got, want in zip(both(kind, config, packed_rows, inputs), expected, strict=True):
            assert float(jnp.abs(want).max()) > 0.1
            np.testing.assert_allclose(got, want, atol=2e-5, err_msg=kind)


def test_blocks_need_no_order_of_columns():
    """Tokens of a row in any order; a window; a query that sees nothing gets finite numbers."""
    q, _, _, k, v, _ = random_inputs()
    order = np.random.default_rng(1).permutation(COLUMNS)
    positions = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], (ROWS, COLUMNS))
    segments = jnp.where(positions < 30, 1 + positions % 2, 0)
    mask, distance = visible(positions, segments, positions, segments)
    expected = attend(q, k, v, mask & (distance < 9), scale=0.3)
    marks = Marks(segments, positions)
    chosen = (blockwise(scale=0.3, softcap=None, block=16),)
    got = jax.jit(partial(attend_places, kernels=chosen, window=9))(q, (Place(k, v, marks, marks),))
    live = np.asarray(segments != 0)
    np.testing.assert_allclose(np.asarray(got)[live], np.asarray(expected)[live], atol=1e-5)
    assert np.isfinite(got).all()


def test_memory_of_blocks_grows_with_the_length_and_of_dense_scores_with_its_square():
    def temporary(kind, length):
        config = dataclasses.replace(MODEL, max_length=length)
        position_ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        q = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.float32)
        k = jax.ShapeDtypeStruct((1, KV_HEADS, length, SIZE), jnp.float32)

        def total(q, k, v, positions, segments):
            look = row_attention(kind, config, positions, segments)
            return look(q, k, v, NO_WINDOW).sum()

        compiled = jax.jit(jax.grad(total, (0, 1, 2)), compiler_options=QUICK)
        program = compiled.lower(q, k, k, position_ids, position_ids).compile()
        return program.memory_analysis().temp_size_in_bytes

    blocks = [temporary("blockwise", n) for n in (4096, 8192)]
    assert blocks[1] < 2.2 * blocks[0] < 0.1 * temporary("xla", 8192)


@pytest.mark.parametrize("kind", [pytest.param("blockwise", marks=pytest.mark.slow), "splash"])
def test_a_network_gives_the_same_states_on_every_kernel(kind):
    """Layers with and without a window, prompts and rows, under rematerialisation."""
    changes = {"window": 5, "window_pattern": (True, False), "attention_softcap": 3.0}
    config, rows = dataclasses.replace(MODEL, **changes), packed()
    tokens = jax.random.randint(jax.random.key(1), (ROWS, COLUMNS), 0, 31)
    prompts = jax.random.randint(jax.random.key(2), (BLOCKS, PROMPTS, PROMPT), 0, 31)
    rows = rows._replace(prompt_tokens=prompts, tokens=tokens)
    live = np.asarray(rows.segments != 0)
    params = transformer(config).init(jax.random.key(0))

    def states(how):
        network = transformer(config, attention=how, remat="full")
        hidden, _ = jax.jit(network.extras.hidden_shared, compiler_options=QUICK)(params, rows)
        return np.asarray(hidden)[live]

    np.testing.assert_allclose(states(kind), states("xla"), atol=2e-5)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize(
    ("window", "softcap", "queries"),
    [(None, None, 1), pytest.param(150, 2.0, 3, marks=pytest.mark.slow)],
)
def test_splash_reads_a_cache_as_dense_attention_does(window, softcap, queries, monkeypatch):
    """Rows of unlike lengths behind shared prompts; blocks that nobody sees; dead rows."""
    monkeypatch.setattr(splash_cache, "_LARGEST", 128)
    members, length, prompt = 3, 384, 256
    keys = jax.random.split(jax.random.key(0), 3)
    s = BLOCKS * members
    q = jax.random.normal(keys[0], (s, queries, HEADS, SIZE))
    keys_values = jax.random.normal(keys[1], (2, s, KV_HEADS, length, SIZE))
    past = jax.random.normal(keys[2], (2, BLOCKS, KV_HEADS, prompt, SIZE))
    prompts = np.repeat([200, 31], members)[:, None, None]
    reached = (
        np.array([383, 130, 127, 0, 5, 260])[:, None, None] + np.arange(queries)[None, :, None]
    )
    reach = NO_WINDOW if window is None else window
    columns = np.arange(length)[None, None]
    mask = (columns <= reached) & (reached - columns < reach)
    positions = np.arange(prompt)[None, None]
    before = (positions < prompts) & (prompts + reached - positions < reach)
    parts = [
        Part(keys_values[0], keys_values[1], jnp.asarray(mask)),
        Part(past[0], past[1], jnp.asarray(before)),
    ]
    chosen = {"scale": 0.3, "softcap": softcap}
    kernel = partial(splash_cache.splash_look, interpret=True)

    @partial(jax.jit, compiler_options=QUICK)
    def look(q, parts):
        return attend_parts(q, parts, **chosen), attend_parts(q, parts, **chosen, attend_one=kernel)

    expected, out = look(q, parts)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_what_a_kernel_does_not_read_is_not_sent_again():
    """Blocks past a row's end are left out and repeat the last one; the first is always read."""
    lengths = jnp.array([300, 0])
    mask = (jnp.arange(512)[None, None] < lengths[:, None, None]) & jnp.ones((1, 16, 1), bool)
    visited = partial(splash_cache._visited, rows=16, heads=1, block=(16, 128))
    info = jax.jit(visited, compiler_options=QUICK)(mask)
    assert info.block_mask[:, 0].tolist() == [[2, 2, 1, 0], [1, 0, 0, 0]]
    assert info.data_next[:, 0].tolist() == [[0, 1, 2, 2], [0, 0, 0, 0]]


def test_prompts_are_prefilled_and_continued_alike_by_the_kernel():
    """Row lengths that no kernel takes as they are; the cache has room for whole blocks."""
    config = dataclasses.replace(MODEL, window=8, window_pattern=(True, False))
    prompts = jax.random.randint(jax.random.key(1), (3, 21), 0, 31)
    lengths, params = jnp.array([21, 9, 1]), transformer(config).init(jax.random.key(0))
    at = jnp.broadcast_to(lengths[:, None] - 1, (3, 1))
    pending = jnp.take_along_axis(prompts, at, axis=1)

    @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def next_states(how):
        network = transformer(config, attention=how)
        weights = network.prepare(params)
        cache = prefill(weights, prompts, lengths, network=network)
        states, cache = network.extend(weights, cache, pending, at, jnp.ones((3, 1), bool))
        return states, cache.rows[0][0]["v"]

    (expected, plain), (states, continued) = next_states("xla"), next_states("splash")
    assert plain.shape[2] == 21
    assert continued.shape[2] == 128
    np.testing.assert_allclose(states, expected, atol=2e-5)


# ---------------------------------------------------------------- cuDNN


def test_cudnn_is_asked_for_what_dense_attention_computes():
    """Its arguments, computed by XLA: a mask, with lengths made even, and causal prompts."""
    columns = COLUMNS - 1
    q, _, _, k, v, _ = random_inputs()
    q, k, v = q[:, :columns], k[:, :, :columns], v[:, :, :columns]
    positions = np.broadcast_to(np.arange(columns, dtype=np.int32)[None], (ROWS, columns))
    lengths = np.array([columns, 17, 5, 1], np.int32)
    live = positions < lengths[:, None]

    @partial(jax.jit, compiler_options=QUICK)
    def look(q, k, v, positions, segments):
        mask, _ = visible(positions, segments, positions, segments)
        attention = partial(cudnn, q, k, v, scale=0.3, implementation="xla")
        return attend(q, k, v, mask, scale=0.3), attention(mask=mask), attention(lengths=lengths)

    expected, *results = look(q, k, v, positions, live.astype(np.int32))
    for got in results:
        assert got.shape == q.shape
        np.testing.assert_allclose(np.asarray(got)[live], np.asarray(expected)[live], atol=1e-5)


def dense_scores(scale, q, keys, lengths, causal):
    """Masked scores [B, K, H / K, Q, C] of a part, as cuDNN would make them."""
    k = keys[0]
    b, n, _, d = q.shape
    grouped = q.reshape(b, n, k.shape[1], -1, d)
    scores = scale * jnp.einsum("bqkgd,bkcd->bkgqc", grouped, k)
    columns = jnp.arange(k.shape[2])
    near = columns[None] < jnp.maximum(lengths, 1)[:, None]
    before = (columns[None] <= jnp.arange(n)[:, None]) | (not causal)
    return jnp.where((near[:, None] & before[None])[:, None, None], scores, -jnp.inf)


def dense_forward(scale, q, keys, lengths, causal):
    scores = dense_scores(scale, q, keys, lengths, causal)
    logs = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bkgqc,bkcd->bqkgd", jnp.exp(scores - logs[..., None]), keys[1])
    return out.reshape(q.shape), logs.reshape(q.shape[0], -1, q.shape[1])


def dense_backward(scale, q, out, g, logs, keys, lengths, causal):
    """By the formulas of "FlashAttention-2" (arXiv:2307.08691), with the sums that are given."""
    grouped = lambda x: x.reshape(*x.shape[:2], keys[0].shape[1], -1, x.shape[3])  # noqa: E731
    q, out, g = grouped(q), grouped(out), grouped(g)
    scores = dense_scores(scale, q.reshape(*g.shape[:2], -1, g.shape[4]), keys, lengths, causal)
    logs = logs.reshape(g.shape[0], g.shape[2], g.shape[3], g.shape[1])
    weights = jnp.exp(scores - logs[..., None])
    along = jnp.einsum("bqkgd,bqkgd->bkgq", g, out)
    back = weights * (jnp.einsum("bqkgd,bkcd->bkgqc", g, keys[1]) - along[..., None])
    dq = scale * jnp.einsum("bkgqc,bkcd->bqkgd", back, keys[0])
    dk = scale * jnp.einsum("bkgqc,bqkgd->bkcd", back, q)
    dv = jnp.einsum("bkgqc,bqkgd->bkcd", weights, g)
    return dq.reshape(*g.shape[:2], -1, g.shape[4]), dk, dv


@pytest.mark.parametrize(
    ("before", "axes"), [((5, PROMPT), {}), ((0, 3), {}), ((5, PROMPT), {"data": 2, "tensor": 2})]
)
def test_rows_behind_their_prompts_need_no_mask(before, axes, monkeypatch):
    """Two rows a prompt, one of them full, with cuDNN's two calls in plain JAX; gradients, too."""
    monkeypatch.setattr(choice, "_no_cudnn", lambda config, where: "")
    monkeypatch.setattr(cudnn_module, "forward", dense_forward)
    monkeypatch.setattr(cudnn_module, "backward", dense_backward)
    keys = jax.random.split(jax.random.key(0), 6)
    before, columns = np.array(before, np.int32), np.arange(COLUMNS, dtype=np.int32)[None]
    lengths = np.array([COLUMNS, 9, 17, 1], np.int32)
    live = columns < lengths[:, None]
    positions = np.repeat(before, 2)[:, None] + columns
    marks = positions, live.astype(np.int32), np.zeros((4, COLUMNS), np.int32)
    layout = laid_out(before[:, None], *marks)
    sizes = [(4, COLUMNS, HEADS, SIZE), *[(2, KV_HEADS, PROMPT, SIZE)] * 2]
    sizes += [(4, KV_HEADS, COLUMNS, SIZE)] * 2
    inputs = [jax.random.normal(k, size) for k, size in zip(keys, sizes, strict=False)]
    probe = jax.random.normal(keys[5], sizes[0]) * live[:, :, None, None]

    def by_mask(*inputs):
        return shared_attention("xla", MODEL, layout)(*inputs, NO_WINDOW)

    def by_lengths(*inputs):
        rows = layout._replace(lengths=jnp.asarray(lengths))
        return shared_attention("cudnn", MODEL, rows)(*inputs, NO_WINDOW)

    @partial(jax.jit, compiler_options=QUICK)
    def both_ways(inputs):
        pulled = [jax.vjp(look, *inputs) for look in (by_mask, by_lengths)]
        return [(*back(probe), values) for values, back in pulled]

    devices = jax.devices()[: math.prod(axes.values())]
    with jax.set_mesh(make_mesh(axes or {"data": 1}, devices)):
        (*expected, values), (*slopes, same) = both_ways(inputs)
    np.testing.assert_allclose(np.asarray(same)[live], np.asarray(values)[live], atol=1e-5)
    for a, b in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Programs are traced as where there is a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda wanted: True)
    monkeypatch.setattr(choice, "platform", lambda: "gpu")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_this_release_of_jax_has_what_rows_behind_prompts_ask_cudnn_for():
    """Arguments of its own functions, which it may change: the gradient is traced."""
    assert cudnn_module.continues()
    q, keys, row_keys = ((4, 8, 2, 64), (2, 2, 6, 64), (4, 2, 8, 64))
    q, *pieces = (jnp.zeros(size, jnp.bfloat16) for size in (q, keys, keys, row_keys, row_keys))
    lengths = cudnn_module.Lengths(jnp.array([6, 3]), jnp.array([8, 8, 1, 0]))

    def total(q, before, after):
        return cudnn_module.continued(0.3, q, before, after, lengths).astype(jnp.float32).sum()

    inputs = q, tuple(pieces[:2]), tuple(pieces[2:])
    shapes = jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), *inputs)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, inputs)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_behind_prompts_have_a_mask_where_jax_changed(monkeypatch):
    monkeypatch.setattr(cudnn_module, "_RULE", (*cudnn_module._RULE, "new"))
    assert not cudnn_module.continues()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_programs_call_cudnn_forward_and_backward():
    config, packed_rows = dataclasses.replace(MODEL, dtype="bfloat16"), packed()
    inputs = [x.astype(jnp.bfloat16) for x in random_inputs()[:-1]]

    def total(*inputs):
        out = shared_attention("auto", config, packed_rows)(*inputs, NO_WINDOW)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_long_row_behind_its_prompt_goes_to_cudnn_without_a_mask():
    """A mask of 65,536 columns would take 8 GiB."""
    config, columns = dataclasses.replace(MODEL, dtype="bfloat16"), 2**16
    shape = jax.ShapeDtypeStruct
    row, one = shape((1, columns), jnp.int32), shape((1,), jnp.int32)
    prompt, ones = shape((1, 1, 8), jnp.int32), shape((1, 1), jnp.int32)
    layout = SharedRows(prompt, ones, row, row, row, row, None, one)
    sizes = [(1, columns, HEADS, SIZE), *[(1, KV_HEADS, 8, SIZE)] * 2]
    sizes += [(1, KV_HEADS, columns, SIZE)] * 2
    inputs = [shape(size, jnp.bfloat16) for size in sizes]

    def look(layout, *inputs):
        return shared_attention("auto", config, layout)(*inputs, NO_WINDOW)

    text = jax.jit(look).trace(layout, *inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert f"{columns}x{columns}" not in text


@pytest.mark.usefixtures("as_on_a_gpu")
def test_elementwise_rematerialisation_does_not_call_cudnn_again():
    tokens = jnp.ones((2, 8), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), tokens.shape)
    calls = {}
    for remat in ("none", "elementwise", "dots"):
        config = dataclasses.replace(MODEL, dtype="bfloat16")
        network = transformer(config, attention="cudnn", remat=remat)
        params = jax.eval_shape(network.init, jax.random.key(0))

        def total(params, network=network):
            return network.hidden(params, tokens, positions, tokens)[0].astype(jnp.float32).sum()

        text = str(jax.make_jaxpr(jax.grad(total))(params))
        calls[remat] = text.count("dot_product_attention_fwd_wrapper[")
    assert calls == {"none": 1, "elementwise": 1, "dots": 2}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_neither_of_the_two_calls_behind_a_prompt_is_made_again():
    rows, one = jnp.ones((2, 8), jnp.int32), jnp.ones((1, 1, 4), jnp.int32)
    positions = jnp.broadcast_to(3 + jnp.arange(8, dtype=jnp.int32), rows.shape)
    lengths = jnp.full(2, 8, jnp.int32)
    shared = SharedRows(one, one[0, :, :1] + 3, rows, positions, rows, 0 * rows, lengths=lengths)
    calls = {}
    for remat in ("none", "scores", "elementwise", "dots"):
        config = dataclasses.replace(MODEL, dtype="bfloat16")
        network = transformer(config, attention="cudnn", remat=remat)
        params = jax.eval_shape(network.init, jax.random.key(0))

        def total(params, network=network):
            states, _ = network.extras.hidden_shared(params, shared)
            return states.astype(jnp.float32).sum()

        text = str(jax.make_jaxpr(jax.grad(total))(params))
        calls[remat] = text.count("dot_product_attention_fwd_wrapper[")
    # Of the prompt to itself, of rows to the prompt, and to themselves.
    assert calls == {"none": 3, "scores": 3, "elementwise": 3, "dots": 6}


# ---------------------------------------------------------------- the choice


def chosen(
    monkeypatch, where, shape=(4, 2048, 2048), steady=True, how="auto", lengths=False, **changes
):
    monkeypatch.setattr(choice, "platform", lambda: where)
    config = dataclasses.replace(MODEL, **changes)
    return kernel_for(how, config, Shape(*shape), steady=steady, lengths=lengths)


def test_the_fastest_exact_kernel_is_chosen(monkeypatch):
    choose = partial(chosen, monkeypatch)
    assert choose("cpu", (4, 512, 2048)) == "xla"
    assert choose("cpu") == "blockwise"
    assert choose("cpu", (1024, 512, 512)) == "blockwise"  # 4 GiB of scores
    assert choose("tpu") == "splash"
    assert choose("tpu", (4, 64, 64)) == "xla"
    assert choose("tpu", window=9) == "splash"
    assert choose("tpu", window=9, steady=False) == "xla"
    assert choose("tpu", how="splash", window=9, steady=False) == "blockwise"
    assert choose("gpu", dtype="bfloat16") == "cudnn"
    assert choose("gpu") == "xla"  # float32
    assert choose("gpu", (8, 32768, 32768), dtype="bfloat16") == "blockwise"  # a mask of 16 GiB
    assert choose("gpu", (8, 32768, 32768), dtype="bfloat16", lengths=True) == "cudnn"
    assert choose("gpu", dtype="bfloat16", attention_softcap=2.0) == "xla"
    assert choose("gpu", (4, 8192, 8192), dtype="float16", head_dim=256) == "blockwise"
    with jax.set_mesh(make_mesh({"fsdp": 4})):  # scores are counted on each device
        assert choose("cpu", (1024, 512, 512)) == "xla"
    with jax.set_mesh(make_mesh({"context": 2})):
        assert choose("tpu") == "splash"
        assert choose("gpu", dtype="bfloat16") == "xla"


def test_kernels_that_cannot_are_refused_with_what_would_do(monkeypatch):
    choose = partial(chosen, monkeypatch)
    with pytest.raises(UserError, match="needs a GPU, and this runs on cpu.*'auto'"):
        choose("cpu", how="cudnn")
    with pytest.raises(UserError, match="model.dtype = 'float32'"):
        choose("gpu", how="cudnn")
    with pytest.raises(UserError, match=r"model.config.attention_softcap = 2.0"):
        choose("gpu", how="cudnn", dtype="bfloat16", attention_softcap=2.0)
    with pytest.raises(UserError, match="model.config.head_dim = 12"):
        choose("gpu", how="cudnn", dtype="bfloat16", head_dim=12)
    with pytest.raises(UserError, match="not on GPUs"):
        choose("gpu", how="splash")
    with pytest.raises(UserError, match="'triton': it computes in.*model.dtype = 'float32'"):
        choose("gpu", how="triton")
    with pytest.raises(UserError, match="'triton': it takes heads of 32, 64.*head_dim = 12"):
        choose("gpu", how="triton", dtype="bfloat16", head_dim=12)
    with pytest.raises(UserError, match="not on TPUs"):
        choose("tpu", how="triton", dtype="bfloat16", head_dim=32)
    assert choose("gpu", how="triton", dtype="bfloat16", head_dim=32) == "cudnn"
    with pytest.raises(UserError, match="choose from auto, blockwise, cudnn, splash, triton, xla"):
        transformer(MODEL, attention="flash")
    mesh, config = make_mesh({"context": 2}), dataclasses.replace(MODEL, dtype="bfloat16")
    monkeypatch.setattr(choice, "named_platform", lambda where: "gpu")
    with pytest.raises(UserError, match="mesh.context = 2 divides them"):
        choice.check_attention_on_mesh(mesh, config, "cudnn")


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("blockwise", {"fsdp": 2, "tensor": 2, "context": 2}),
        pytest.param("blockwise", {"fsdp": 4}, marks=pytest.mark.slow),
        pytest.param("splash", {"tensor": 2, "context": 4}, marks=pytest.mark.slow),
    ],
)
def test_kernels_divide_rows_heads_and_queries_over_devices(kind, axes):
    """Each device runs the kernel on its own; rows that do not divide are everybody's."""
    config = dataclasses.replace(MODEL, window=8)
    packed_rows, inputs = packed(), random_inputs()
    expected = both("xla", config, packed_rows, inputs)
    with jax.set_mesh(make_mesh(axes)):
        results = both(kind, config, packed_rows, inputs)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
