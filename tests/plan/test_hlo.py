"""Costs read from the text of compiled programs, against texts small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jrl.plan.costs import program_costs
from jrl.plan.hlo import replica_groups

LOOP = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w = f32[16,16]{1,0} constant({...})
  %dot = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[8,16]{1,0} all-reduce(%dot), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %out = (s32[], f32[8,16]{1,0}) tuple(%next, %sum)
}

%condition (q: (s32[], f32[8,16])) -> pred[] {
  %q = (s32[], f32[8,16]{1,0}) parameter(0)
  %n = s32[] constant(5)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,16]{1,0}) tuple(%zero, %a)
  %while = (s32[], f32[8,16]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %r = f32[8,16]{1,0} get-tuple-element(%while), index=1
}
"""


def totals(text, mesh=(2, 2), **trips):
    costs = program_costs(text, mesh, trips=trips)
    bytes_by_kind = {}
    for cost in costs:
        for c in cost.collectives:
            bytes_by_kind[c.kind, c.axes] = (
                bytes_by_kind.get((c.kind, c.axes), 0) + cost.runs * c.bytes
            )
    flops = sum(c.runs * c.flops for c in costs)
    return flops, sum(c.runs * c.bytes for c in costs), bytes_by_kind


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    flops, byte_count, bytes_by_kind = totals(LOOP)
    assert flops == 5 * 2 * 8 * 16 * 16
    assert bytes_by_kind == {("all-reduce", (1,)): 5 * 2 * (8 * 16 * 4) / 2}
    # x, w and the product; what is reduced, twice; the counter and its sum; the condition
    assert byte_count == 5 * (4 * (2 * 128 + 256) + 4 * 2 * 128 + 12 + 9)


def test_the_trip_count_of_a_loop_may_be_given_for_its_scope():
    """For a loop that ends early, such as one that draws tokens until a queue is empty."""
    loop = "condition=%condition, body=%body"
    text = LOOP.replace(loop, f'{loop}, metadata={{op_name="jit(f)/queue/decode/while"}}')
    assert totals(text, decode=7, queue=2)[0] == 7 / 5 * totals(LOOP)[0]
    assert totals(text, queue=2)[0] == totals(text)[0] == totals(LOOP)[0]
    inner = LOOP.replace(loop, f'{loop}, metadata={{op_name="jit(f)/decode/while/body/while"}}')
    assert totals(inner, decode=7)[0] == totals(LOOP)[0]


def test_the_traffic_that_a_kernel_reports_counts():
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[8,1024]) -> f32[8,1024] {
  %a = f32[8,1024]{1,0} parameter(0)
  ROOT %k = f32[8,1024]{1,0} custom-call(%a), backend_config={"cost":{"bytes_accessed":"640"}}
}
"""
    assert totals(text)[1] == 640
    assert totals(text.replace("bytes_accessed", "other"))[1] == 2 * 4 * 8 * 1024


def test_attributes_of_a_kernel_may_contain_newlines():
    call = 'custom-call(%a), frontend_attributes={kernel_metadata={\n"block": "{512}"\n}}, x={}'
    kernel = f"  %k = f32[8,16]{{1,0}} {call}\n"
    text_with_kernel = LOOP.replace(
        "  %zero = s32[] constant(0)\n", f"{kernel}  %zero = s32[] constant(0)\n"
    )
    assert text_with_kernel != LOOP
    assert totals(text_with_kernel)[::2] == totals(LOOP)[::2]


def test_on_chip_memory_is_no_traffic():
    text_on_chip = LOOP.replace(
        "%w = f32[16,16]{1,0} constant", "%w = f32[16,16]{1,0:T(8,128)S(1)} constant"
    )
    assert totals(LOOP)[1] - totals(text_on_chip)[1] == 5 * 16 * 16 * 4


BRANCHES = """HloModule jit_g

%look (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%nothing (n: f32[4,4]) -> f32[4,4] {
  ROOT %n = f32[4,4]{1,0} parameter(0)
}

ENTRY %main (a: f32[4,4], c: s32[]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %c = s32[] parameter(1)
  ROOT %r = f32[4,4]{1,0} conditional(%c, %a, %a), branch_computations={%look, %nothing}
}
"""


def test_the_branches_of_a_conditional_run_in_equal_parts():
    assert totals(BRANCHES)[0] == 2 * 4**3 / 2


UPDATE = """HloModule jit_h

%put (c: f32[64,64], x: f32[1,64], i: s32[]) -> f32[64,64] {
  %c = f32[64,64]{1,0} parameter(0)
  %x = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[64,64]{1,0} dynamic-update-slice(%c, %x, %i, %zero)
}

ENTRY %main (c: f32[64,64], x: f32[1,64], i: s32[]) -> f32[64,64] {
  %c = f32[64,64]{1,0} parameter(0)
  %x = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %r = f32[64,64]{1,0} fusion(%c, %x, %i), kind=kLoop, calls=%put
}
"""


def test_an_update_in_place_moves_what_it_writes():
    assert totals(UPDATE)[1] == 3 * 64 * 4 + 4


def test_a_fusion_beside_others_moves_as_much_and_an_allocated_buffer_nothing():
    """A GPU's copy into a stack, whose start names its operands among its results."""
    buffer, row = "f32[64,64]{1,0}", "f32[1,64]{1,0}"
    line = f"  ROOT %r = {buffer} fusion(%c, %x, %i), kind=kLoop, calls=%put"
    lines = [
        f'  %b = {buffer} custom-call(), custom_call_target="AllocateBuffer"',
        f"  %s = (({buffer}, {row}, s32[]), {buffer}, u32[]) fusion-start(%b, %x, %i), calls=%put",
        f"  ROOT %r = {buffer} fusion-done(%s)",
    ]
    assert line in UPDATE
    assert totals(UPDATE.replace(line, "\n".join(lines)))[1] == totals(UPDATE)[1]


BATCHED = """HloModule jit_k

ENTRY %main (x: bf16[16,4,32,8], y: bf16[16,4,32,8]) -> f32[16,4,32,32] {
  %x = bf16[16,4,32,8]{3,2,1,0} parameter(0)
  %y = bf16[16,4,32,8]{3,2,1,0} parameter(1)
  ROOT %c = f32[16,4,32,32]{3,2,1,0} convolution(%x, %y), """ + (
    "window={size=16x4 stride=15x3 lhs_dilate=16x4}, dim_labels=01bf_01oi->01bf\n}\n"
)


def test_batch_axes_written_as_windows_are_no_more_work():
    assert totals(BATCHED)[0] == 16 * 4 * 2 * 32 * 32 * 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}, x", [[0, 3], [1, 2]]),
        ("replica_groups=mesh['a'=1,'b'=4] {'b':(2)2}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", [[0, 2], [1, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("x", [[0, 1, 2, 3]]),
    ],
)
def test_replica_groups_are_read_in_every_notation(text, expected):
    np.testing.assert_array_equal(replica_groups(text, 4), expected)


def test_an_unknown_notation_of_groups_warns():
    with pytest.warns(UserWarning, match=r"assumed all chips: new\['a'=4\]"):
        assert replica_groups("replica_groups=new['a'=4], x", 4).tolist() == [[0, 1, 2, 3]]


KINDS = """HloModule jit_m

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %g = f32[16,8]{1,0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = f32[4,8]{1,0} reduce-scatter(%x), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%a
  %t = f32[8,8]{1,0} all-to-all(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %p = (f32[8,8], f32[8,8]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %q = f32[8,8]{1,0} collective-permute-done(%p)
  ROOT %r = f32[8,8]{1,0} copy(%q)
}
"""  # noqa: E501


def test_each_collective_sends_its_share_over_its_axes():
    assert totals(KINDS)[2] == {
        ("all-gather", (0,)): 256,
        ("reduce-scatter", (1,)): 128,
        ("all-to-all", (0, 1)): 192,
        ("collective-permute", (1,)): 256,
    }


@pytest.mark.parametrize(("kind", "expected"), [("ALL_REDUCE", 512.0), ("ONE_TO_ONE", 512.0)])
def test_transfers_to_other_slices_are_counted(kind, expected):
    """As XLA writes it for two slices, of which only the first axis of a mesh tells one apart."""
    text = """ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (f32[8,16]{1,0}, u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true, FOR
  %r = (f32[8,16]{1,0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, FOR
  ROOT %b = f32[8,16]{1,0} get-tuple-element(%r), index=0
}
"""
    attribute = f'_xla_megascale_target="{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"'
    _, _, transfers = totals(text.replace("FOR", f"frontend_attributes={{{attribute}}}"), (2, 4))
    name = "all-reduce" if kind == "ALL_REDUCE" else "collective-permute"
    assert transfers == {(name, (0,)): expected}


def test_the_attention_kernel_counts_as_the_products_it_makes():
    """4 heads of 8 query blocks over 256 keys, transposed or not; it says nothing itself."""
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[4,32,64], k: bf16[2,64,256], v: bf16[2,256,64]) -> bf16[4,32,64] {
  %next = s32[4,1,2]{2,1,0} constant({...})
  %q = bf16[4,32,64]{2,1,0} parameter(0)
  %k = bf16[2,64,256]{2,1,0} parameter(1)
  %v = bf16[2,256,64]{2,1,0} parameter(2)
  ROOT %splash_mha_PASS_x.1 = bf16[4,32,64]{2,1,0} custom-call(%next, %q, %k, %v)
}
"""
    product = 2 * 4 * 32 * 256 * 64
    for kind, products in (("fwd", 2), ("dq", 3), ("dkv", 4)):
        assert totals(text.replace("PASS", kind))[0] == products * product
    assert totals(text.replace("splash_mha_PASS", "other"))[0] == 0


def test_a_grouped_product_counts_the_rows_of_its_own_experts():
    """XLA reports the work of all rows, of which a device's experts are visited by its share."""
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[64,16], w: bf16[2,16,32]) -> f32[64,32] {
  %x = bf16[64,16]{1,0} parameter(0)
  %w = bf16[2,16,32]{2,1,0} parameter(1)
  ROOT %ragged-dot-none = f32[64,32]{1,0} custom-call(%x, %w), metadata={op_name="jit(f)/one_of_4/ragged_dot_general/ragged-dot-none"}, backend_config={"cost":{"flops":"65536","bytes_accessed":"12288"}}
}
"""  # noqa: E501
    weights, rows = 2 * 16 * 32 * 2, 64 * 16 * 2 + 64 * 32 * 4
    assert totals(text)[:2] == (2 * 64 * 16 * 32 / 4, weights + rows / 4)
    assert totals(text.replace("one_of_4/", ""))[:2] == (2 * 64 * 16 * 32, weights + rows)
    # matrices that were copied to the fast memory before are read there
    near = text.replace("%w = bf16[2,16,32]{2,1,0} ", "%w = bf16[2,16,32]{2,1,0:S(1)} ")
    assert totals(near)[1] == rows / 4


def test_the_kernel_that_reads_caches_counts_what_is_filled_of_a_row_s_own():
    """Known by its name and scope, whatever the sizes: here those of prompt and rows are equal."""
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[4,2,8,64], k: bf16[4,2,256,64], v: bf16[4,2,256,64]) -> f32[4,2,8,64] {
  %q = bf16[4,2,8,64]{3,2,1,0} parameter(0)
  %k = bf16[4,2,256,64]{3,2,1,0} parameter(1)
  %v = bf16[4,2,256,64]{3,2,1,0} parameter(2)
  %mask = s32[4,1,256]{2,1,0} constant({...})
  %read_cache.1 = f32[4,2,8,64]{3,2,1,0} custom-call(%q, %k, %v, %mask), metadata={op_name="jit(f)/own_cache/read_cache/pallas_call"}
  ROOT %read_cache.2 = f32[4,2,8,64]{3,2,1,0} custom-call(%q, %k, %v, %mask), metadata={op_name="jit(f)/read_cache/pallas_call"}
}
"""  # noqa: E501
    queries, cache_bytes = 4 * 2 * 8 * 64, 2 * 4 * 2 * 64 * 256 * 2 + 4 * 256 * 4
    for share in (1.0, 0.5):
        (cost,) = program_costs(text, (1,), {"read_cache": share, "splash": 0.1})
        assert cost.flops == 2 * 2 * queries * 256 * (1 + share)
        assert cost.bytes == 2 * (2 + 4) * queries + cache_bytes * (1 + share)
