"""The kernel that reads caches on TPUs against plain attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.attention import cache_read
from jrl.models.attention.dense import NO_WINDOW, Part, attend_parts
from jrl.models.quant import quantise_entries

PROMPTS, MEMBERS, HEADS, KV_HEADS, SIZE = 2, 3, 4, 2, 16
QUICK = {"xla_backend_optimization_level": 0}


def part_of(keys, values, mask, int8):
    """Keys [M, K, C, h] and values as a cache holds them, and what they are as floats."""
    if not int8:
        return Part(keys, values, mask)
    (k, k_scale), (v, v_scale) = map(quantise_entries, (keys, values))
    scales = k_scale.swapaxes(2, 3), v_scale.swapaxes(2, 3)
    return Part(k, v, mask, None, *scales)


@pytest.mark.parametrize(
    ("window", "softcap", "queries", "int8", "together"),
    [
        (None, None, 1, False, False),
        (None, 2.0, 2, True, False),
        (100, None, 1, True, True),
    ],
)
def test_a_cache_is_read_as_dense_attention_reads_it(window, softcap, queries, int8, together):
    """Rows of unlike lengths behind shared prompts; blocks that nobody sees; dead rows."""
    length, prompt, s = 384, 256, PROMPTS * MEMBERS
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (s, queries, HEADS, SIZE))
    keys_values = [jax.random.normal(key, (s, KV_HEADS, length, SIZE)) for key in keys[1:3]]
    past = [jax.random.normal(key, (PROMPTS, KV_HEADS, prompt, SIZE)) for key in keys[3:]]
    lengths = np.repeat([200, 31], MEMBERS)[:, None, None]
    ends = [200] * s if together else [383, 130, 127, 0, 5, 260]
    reached = np.array(ends)[:, None, None] + np.arange(queries)[None, :, None]
    reach, columns = NO_WINDOW if window is None else window, np.arange(length)[None, None]
    mask = (columns <= reached) & (reached - columns < reach)
    before = np.arange(prompt)[None, None]
    before = (before < lengths) & (lengths + reached - before < reach)
    parts = (
        part_of(*keys_values, jnp.asarray(mask), int8),
        part_of(*past, jnp.asarray(before), int8),
    )

    def kernel(q, part, scale, softcap):
        assert cache_read.takes(q, part)
        rows = together and part.v_mkcd.shape[0] == s
        return cache_read.look(q, part, scale, softcap, together=rows, interpret=True)

    @partial(jax.jit, compiler_options=QUICK)
    def look(q, parts):
        chosen = {"scale": 0.3, "softcap": softcap}
        return attend_parts(q, parts, **chosen), attend_parts(q, parts, **chosen, attend_one=kernel)

    expected, out = look(q, parts)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_only_blocks_that_some_row_sees_are_read():
    """The first always is; one that is not read repeats the last, and those at the end no step."""
    lengths = jnp.array([300, 0, 129, 130])
    mask = jnp.arange(512)[None, None] < lengths[:, None, None]
    for rows, some, last in (
        (1, [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]], [2, 0, 1, 1]),
        (2, [[1, 1, 1, 0], [1, 1, 0, 0]], [2, 1]),
    ):
        visited, read_last, count = cache_read._visited(mask, rows, 128)
        assert visited.tolist() == some
        assert read_last[:, -1].tolist() == last
        assert int(count) == 3


def test_a_step_has_as_many_rows_as_fill_it():
    def rows(m, heads, dtype, head_dim=128):
        values = jax.ShapeDtypeStruct((m, heads, 1024, head_dim), dtype)
        return cache_read._rows_at_once(Part(values, values, None), 4, 128)

    assert rows(64, 2, jnp.bfloat16) == 8  # 2 heads of 128 columns are 128 KiB of keys and values
    assert rows(64, 2, jnp.int8) == 16
    assert rows(6, 2, jnp.bfloat16) == 6
    assert rows(64, 8, jnp.bfloat16) == 2
    assert rows(7, 64, jnp.float32) == 1
    # Heads of 64 numbers take the room of 128 in the kernel's memory, which has it; of 16 it is the
    # room that counts: 2 MiB are 4 rows of 4 heads, where 1 MiB of what is read would be 16.
    assert rows(64, 2, jnp.bfloat16, 64) == 16
    assert rows(192, 4, jnp.float32, 16) == 4
