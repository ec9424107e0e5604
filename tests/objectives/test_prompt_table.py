import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.objectives.prompt_table import NOBODY, empty, prompt_ids, read, write

BLANK = {"count": 0, "mean": jnp.array([0.5, 0.25])}
SLOTS, ROWS = 4, 3
read_jit = jax.jit(lambda table, ids: read(table, ids, BLANK))
write_jit = jax.jit(write)


def rows(ids):
    """Values that tell which prompt wrote them."""
    ids = np.asarray(ids)
    return {"count": jnp.asarray(ids + 100), "mean": jnp.asarray(ids[:, None] * [1.0, 2.0])}


steps = st.lists(
    st.tuples(
        st.lists(st.integers(-3, 9), min_size=ROWS, max_size=ROWS),
        st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    ),
    max_size=4,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps)
def test_the_table_is_a_dictionary_by_place_with_an_owner(history):
    table, owners = empty(SLOTS, BLANK), {}
    for ids, live in history:
        table = write_jit(table, jnp.array(ids), rows(ids), jnp.array(live))
        for i in sorted(i for i, keep in zip(ids, live, strict=True) if keep):
            owners[i % SLOTS] = i  # the greatest of a step comes last
    for prompts in np.arange(-3, 9).reshape(-1, ROWS):
        values, present = read_jit(table, jnp.asarray(prompts))
        for k, i in enumerate(prompts):
            mine = owners.get(i % SLOTS) == i
            assert bool(present[k]) == mine
            assert int(values["count"][k]) == (i + 100 if mine else 0)
            assert values["mean"][k].tolist() == ([i, 2.0 * i] if mine else [0.5, 0.25])


def test_order_of_rows_does_not_matter_when_prompts_share_a_place():
    ids, live = jnp.array([1, 5, 9]), jnp.ones(3, bool)
    tables = [
        write_jit(empty(SLOTS, BLANK), ids[order], rows(ids[order]), live)
        for order in (jnp.array([0, 1, 2]), jnp.array([2, 0, 1]))
    ]
    jax.tree.map(np.testing.assert_array_equal, *tables)
    assert tables[0].ids.tolist() == [NOBODY, 9, NOBODY, NOBODY]


def test_ids_come_from_the_batch(make_batch):
    batch = make_batch(np.zeros((3, 1)), np.ones((3, 1, 1)))
    assert prompt_ids(batch) is None
    ids = jnp.arange(3)
    assert prompt_ids(batch.replace(ids={"prompt": ids})) is ids
