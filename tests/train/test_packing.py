"""Where completions go: every token once, prompts with their block, little padding."""

from types import SimpleNamespace

import numpy as np
import pytest

from jrl.train.packing import WIDTHS, Packer, pack


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
    packing = pack(lengths, 40, parts=parts, shards=shards, worth=9)
    for part in range(parts):
        own = lengths[part::parts]
        order, members, steps, owners = (
            x[part] for x in (packing.order, packing.members, packing.steps, packing.owners)
        )
        assert sorted(order.reshape(-1).tolist()) == list(range(n // parts))
        assert len(order) % shards == 0  # a device has whole blocks
        seen = np.zeros(own.size, int)
        per_block = len(members) // len(order)
        for r, row in enumerate(members):
            for c in np.flatnonzero(row >= 0):
                member = row[c]
                assert steps[r, c] == seen[member]  # one after the other
                seen[member] += 1
                assert order[r // per_block, owners[r, c]] == member // g
        assert np.array_equal(seen.reshape(own.shape), own)


def test_padding_of_completions_that_end_by_themselves_is_below_five_percent():
    padding = []
    for seed in range(40):
        packing = pack(natural(4, 8, seed), 256)
        padding.append((packing.members < 0).mean())
    assert np.mean(padding) < 0.05
    assert 1 - natural(4, 8, 0).mean() / 256 > 0.6  # what it would be


def test_few_widths():
    shapes = {pack(natural(4, 8, seed, 80), 256, worth=9).members.shape for seed in range(300)}
    assert 5 < len(shapes) <= WIDTHS
    assert len({rows for _, rows, _ in shapes}) == 1


def test_what_does_not_pay_is_not_packed():
    assert pack(np.full((4, 8), 256), 256) is None
    assert pack(np.full((4, 8), 200), 256) is not None


def widths(packer, totals):
    """The width that each of some batches is packed to: one group whose completions are alike."""
    found = []
    for total in totals:
        lengths = np.full((1, 12), total, np.int32)
        mask = np.arange(200) < lengths[..., None]
        batch = SimpleNamespace(lengths=lengths, mask=mask, replace=lambda packing: packing)
        found.append(packer(batch).members.shape[2])
    return found


def test_a_width_that_is_there_is_used_until_a_narrower_one_pays():
    packer = Packer(1, 1, patience=2.0, headroom=0.05)
    # 12 completions in two rows: six to a row.
    first, again, wider, *rest = widths(packer, [20, 19, 40, *[10] * 8])
    assert first == again >= 1.05 * 6 * 20
    assert wider >= 1.05 * 6 * 40
    # Half the columns of the first width are empty now: four or five batches make two whole ones.
    narrow = rest[-1]
    assert 1.05 * 6 * 10 <= narrow < 0.7 * first
    assert rest == [first] * rest.count(first) + [narrow] * rest.count(narrow)
    assert rest.count(first) in (3, 4, 5)
    assert packer.used == {first, wider, narrow}
