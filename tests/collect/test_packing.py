"""Packing of completions: every token once, prompts with their block, little padding."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.collect.packing import SHAPES, Packer, pack


def natural(n, g, seed, mean=64, most=256):
    """Lengths of completions that end by themselves."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.geometric(1 / mean, (n, g)), most).astype(np.int32)


@pytest.mark.parametrize(
    ("n", "g", "parts", "shards"), [(4, 8, 1, 1), (8, 3, 2, 2), (6, 5, 1, 2), (3, 4, 3, 1)]
)
def test_every_token_once_and_in_order(n, g, parts, shards):
    lengths = natural(n, g, 0, mean=9, most=40)
    lengths[1, 0] = 0
    packing = pack(lengths, 40, parts=parts, shards=shards, threshold=9)
    for part in range(parts):
        part_lengths = lengths[part::parts]
        order, members, steps, owners = (
            x[part] for x in (packing.order, packing.members, packing.steps, packing.owners)
        )
        assert sorted(order.reshape(-1).tolist()) == list(range(n // parts))
        assert len(order) % shards == 0  # a device has whole blocks
        counts = np.zeros(part_lengths.size, int)
        per_block = len(members) // len(order)
        for r, row in enumerate(members):
            for c in np.flatnonzero(row >= 0):
                member = row[c]
                assert steps[r, c] == counts[member]  # one after the other
                counts[member] += 1
                assert order[r // per_block, owners[r, c]] == member // g
        assert np.array_equal(counts.reshape(part_lengths.shape), part_lengths)


def test_padding_of_completions_that_end_by_themselves_is_below_five_percent():
    padding = []
    for seed in range(40):
        packing = pack(natural(4, 8, seed), 256)
        padding.append((packing.members < 0).mean())
    assert np.mean(padding) < 0.05
    assert 1 - natural(4, 8, 0).mean() / 256 > 0.6  # what it would be


def test_what_does_not_pay_is_not_packed():
    assert pack(np.full((4, 8), 256), 256) is None
    assert pack(np.full((4, 8), 200), 256) is not None


def packed(packer, lengths):
    """The shape that completions are packed to, and the share of it that is empty."""
    lengths = np.asarray(lengths, np.int32)
    mask = np.arange(256) < lengths[..., None]
    batch = SimpleNamespace(lengths=lengths, mask=mask, ids={}, replace=lambda packing: packing)
    members = packer(batch).members
    counts = np.bincount(members[members >= 0], minlength=lengths.size)
    assert np.array_equal(counts, lengths.reshape(-1))
    return members.shape[1:], (members < 0).mean()


def alike(length):
    return np.full((1, 12), length)


def test_a_shape_that_is_there_is_used_until_a_smaller_one_pays():
    packer = Packer(1, 1, patience=2.0, headroom=0.05)
    first, _ = packed(packer, alike(20))
    assert packed(packer, alike(19))[0] == first
    wider, _ = packed(packer, alike(40))
    assert np.prod(wider) >= 12 * 40
    # Half the columns of the first shape are empty now: four or five batches make two whole ones.
    rest = [packed(packer, alike(10))[0] for _ in range(8)]
    narrow = rest[-1]
    assert 12 * 10 <= np.prod(narrow) < 0.7 * np.prod(first)
    assert rest == [first] * rest.count(first) + [narrow] * rest.count(narrow)
    assert rest.count(first) in (3, 4, 5)
    assert packer.used == {first, wider, narrow}


def test_a_packer_resumes_from_its_notes():
    """As JSON holds them; one that begins anew packs otherwise."""
    lengths = [natural(4, 8, i, 60 + 20 * (i % 3)) for i in range(24)]
    first, fresh, rest = Packer(1, 1), Packer(1, 1), Packer(1, 1)
    shapes = [packed(first, x)[0] for x in lengths[:12]]
    rest.resume(json.loads(json.dumps(first.notes())))
    shapes += [packed(first, x)[0] for x in lengths[12:]]
    assert len(set(shapes)) > 1
    assert [packed(rest, x)[0] for x in lengths[12:]] == shapes[12:]
    assert [packed(fresh, x)[0] for x in lengths[12:]] != shapes[12:]
    assert rest.notes() == first.notes()


def test_rows_of_several_contexts_are_packed_each_for_itself():
    """Columns that members of a tree share are of one context; a later one reads none before it."""
    lengths, mask = np.array([[6, 6]]), np.ones((1, 2, 16), bool)
    ids = {"node": np.zeros((1, 2, 16), int), "context": np.zeros((1, 2, 16), int)}
    mask[:, :, 6:] = False
    batch = SimpleNamespace(lengths=lengths, mask=mask, ids=ids, replace=lambda packing: packing)
    packing = Packer(1, 1)(batch)
    assert packing.segments is None
    assert np.bincount(packing.members[packing.members >= 0]).tolist() == [6, 6]


def test_a_run_has_few_shapes_and_little_padding():
    """Lengths that rise for a while, as those of a policy that learns, and then stay."""
    packer = Packer(1, 1)
    padding = [packed(packer, natural(4, 8, i, 60 + min(i, 20) * 2))[1] for i in range(300)]
    assert 5 < len(packer.used) <= SHAPES
    assert np.mean(padding[50:]) < 0.08


def test_rows_are_about_as_wide_as_the_longest_completion():
    lengths = natural(8, 8, 0, mean=60, most=1000)
    packing = pack(lengths, 1000)
    assert lengths.max() <= packing.members.shape[2] < 1.3 * lengths.max()
