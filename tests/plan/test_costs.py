"""Bytes that fusions move, in texts small enough to count by hand."""

from __future__ import annotations

import pytest

from jrl.plan.costs import program_costs

NESTED = """HloModule jit_f, is_scheduled=true

%sliced (s: bf16[36,8,16], i: s32[]) -> bf16[8,16] {
  %s = bf16[36,8,16]{2,1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,8,16]{2,1,0} dynamic-slice(%s, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = bf16[8,16]{1,0} bitcast(%slice)
}

%product (stack: bf16[36,8,16], j: s32[], w: bf16[16,4]) -> bf16[8,4] {
  %stack = bf16[36,8,16]{2,1,0} parameter(0)
  %j = s32[]{:S(6)} parameter(1)
  %w = bf16[16,4]{1,0} parameter(2)
  %x = bf16[8,16]{1,0} fusion(%stack, %j), kind=kLoop, calls=%sliced
  ROOT %dot = bf16[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%updated (t: bf16[36,8,4], y: bf16[8,4], k: s32[]) -> bf16[36,8,4] {
  %t = bf16[36,8,4]{2,1,0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  %k = s32[]{:S(6)} parameter(2)
  %o = s32[] constant(0)
  %row = bf16[1,8,4]{2,1,0} bitcast(%y)
  ROOT %put = bf16[36,8,4]{2,1,0} dynamic-update-slice(%t, %row, %k, %o, %o)
}

%writes (t2: bf16[36,8,4], y2: bf16[8,4], k2: s32[]) -> bf16[36,8,4] {
  %t2 = bf16[36,8,4]{2,1,0} parameter(0)
  %y2 = bf16[8,4]{1,0} parameter(1)
  %k2 = s32[]{:S(6)} parameter(2)
  ROOT %inside = bf16[36,8,4]{2,1,0} fusion(%t2, %y2, %k2), kind=kLoop, calls=%updated
}

ENTRY %main (a: bf16[36,8,16], n: s32[], b: bf16[16,4], c: bf16[36,8,4]) -> bf16[36,8,4] {
  %a = bf16[36,8,16]{2,1,0} parameter(0)
  %n = s32[]{:S(6)} parameter(1)
  %b = bf16[16,4]{1,0} parameter(2)
  %c = bf16[36,8,4]{2,1,0} parameter(3)
  %made = bf16[8,4]{1,0} fusion(%a, %n, %b), kind=kOutput, calls=%product
  ROOT %all = bf16[36,8,4]{2,1,0} fusion(%c, %made, %n), kind=kLoop, calls=%writes
}
"""
SLICE, WEIGHT, RESULT, STACK = 2 * 8 * 16, 2 * 16 * 4, 2 * 8 * 4, 2 * 36 * 8 * 16


def bytes_moved(text):
    return sum(cost.runs * cost.bytes for cost in program_costs(text, (1,)))


def test_a_fusion_within_a_fusion_reads_and_writes_one_layer_of_a_stack():
    """A slice, a weight and the product; then the product, and the row that is written over."""
    assert bytes_moved(NESTED) == (SLICE + WEIGHT + RESULT) + (RESULT + 2 * RESULT)


@pytest.mark.parametrize(
    ("line", "instead", "more"),
    [
        # something else reads the stack: all of it is read, and no longer the slice alone
        (
            "  ROOT %flat = bf16[8,16]{1,0} bitcast(%slice)\n",
            "  %other = bf16[36,8,16]{2,1,0} negate(%s)\n"
            "  ROOT %flat = bf16[8,16]{1,0} bitcast(%slice)\n",
            STACK - SLICE,
        ),
        # the slice is of a view of the stack
        (
            "dynamic-slice(%s, %i",
            "dynamic-slice(%view, %i",
            0,
        ),
        # a fusion within only passes the weight on, to the product that reads it
        (
            "dot(%x, %w)",
            "dot(%x, %same)",
            0,
        ),
    ],
)
def test_what_else_reads_a_stack_counts(line, instead, more):
    text = NESTED.replace(line, instead)
    if "%view" in instead:
        start = "  %zero = s32[] constant(0)\n"
        text = text.replace(start, f"{start}  %view = bf16[36,8,16]{{2,1,0}} bitcast(%s)\n")
    if "%same" in instead:
        start = "  %x = bf16[8,16]{1,0} fusion"
        text = text.replace(
            start,
            "  %same = bf16[16,4]{1,0} fusion(%w), kind=kLoop, calls=%view\n" + start,
        )
        text = text.replace(
            "%product (stack",
            "%view (v: bf16[16,4]) -> bf16[16,4] {\n  %v = bf16[16,4]{1,0} parameter(0)\n"
            "  ROOT %as_it_is = bf16[16,4]{1,0} bitcast(%v)\n}\n\n%product (stack",
        )
    assert text != NESTED
    assert bytes_moved(text) == bytes_moved(NESTED) + more


def test_operations_are_of_their_kind():
    """The product with the slice that it reads; the row that is written over only moves."""
    (cost,) = program_costs(NESTED, (1,))
    assert cost.kinds == {
        "products": (2 * 8 * 4 * 16, SLICE + WEIGHT + RESULT),
        "copies": (0, 3 * RESULT),
    }


AHEAD = """HloModule jit_g, is_scheduled=true

ENTRY %main (a: bf16[16,4], x: bf16[8,16]) -> bf16[8,4] {
  %a = bf16[16,4]{1,0} parameter(0)
  %x = bf16[8,16]{1,0} parameter(1)
  %early = (bf16[16,4]{1,0:S(1)}, bf16[16,4]{1,0}, u32[]) copy-start(%a)
  %near = bf16[16,4]{1,0:S(1)} copy-done(%early)
  %y = bf16[8,4]{1,0} dot(%x, %near), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all = bf16[8,4]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%plus
  %back = (bf16[16,4]{1,0}, bf16[16,4]{1,0:S(1)}, u32[]) copy-start(%near)
  %there = bf16[16,4]{1,0} copy-done(%back)
  ROOT %less = bf16[8,4]{1,0} negate(%all)
}
"""


def test_copies_to_the_fast_memory_are_prefetches_and_those_from_it_copies():
    (cost,) = program_costs(AHEAD, (2,))
    assert cost.kinds == {
        "prefetches": (0, WEIGHT),
        "products": (2 * 8 * 4 * 16, 2 * 8 * 16 + RESULT),
        "collectives": (0, 2 * RESULT),
        "copies": (0, WEIGHT),
        "the rest": (0, 2 * RESULT),
    }
    assert cost.bytes == sum(byte_count for _, byte_count in cost.kinds.values())
