"""Merges the splits of rows, adds their sinks, and normalizes."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TOPS_AT_ONCE = tl.constexpr(32)
PARTS_AT_ONCE = tl.constexpr(16)


@triton.jit
def rounded_product(number, factor):
    """Multiplies through a select, so that devices do not fuse the product with a subtraction,
    which would not be 0 for the number itself."""
    return tl.where(number == float("-inf"), float("-inf"), number * factor)


@triton.jit
def finish(sums, top, total, sink, SINKS: tl.constexpr):
    """Normalizes rows: sums ``[n, Dv]``, maxima and totals ``[n]`` (base 2) -> out, lse.

    A row with total 0 sees no key: out is zero, lse the sink's score or -inf.
    """
    nothing = total == 0
    best = top
    if SINKS:
        # The select prevents fusion, see `rounded_product`; its value is not used.
        raised = tl.where(nothing, 0.0, sink * LOG2E)
        best = tl.maximum(top, raised)
        own = tl.exp2(top - best)
        sums = sums * own[:, None]
        total = total * own + tl.exp2(raised - best)
    out = tl.where(nothing[:, None], 0.0, sums / total[:, None])
    lse = tl.where(nothing, sink, (best + tl.log2(total)) * LN2)
    return out, lse


@triton.jit
def merge_parts(
    part_sums, part_tops, part_totals, sinks, out, lse,  # those of `attend.attend_kernel`
    row_at, head, is_row,  # [n]: places in [T, H], heads, whether there is such a row
    step,  # places between splits
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of rows in the order of the splits, whichever was stored last.

    Loads are independent of each other, as one program waits for them; from L2, as other
    multiprocessors stored them.
    """
    ROWS: tl.constexpr = row_at.shape[0]
    splits = tl.num_programs(2)
    dims = tl.arange(0, VALUE_BLOCK)[None, :]
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, splits, TOPS_AT_ONCE):
        split = first + tl.arange(0, TOPS_AT_ONCE)[:, None]
        is_part = (split < splits) & is_row[None, :]
        tops = part_tops + split * step + row_at[None, :]
        tops = tl.load(tops, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, tl.max(tops, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    own_splits = tl.where(is_row, splits, 0)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for first in range(0, splits, PARTS_AT_ONCE):
        for each in tl.static_range(PARTS_AT_ONCE):
            at = (first + each) * step + row_at
            is_part = first + each < own_splits
            part_top = tl.load(part_tops + at, is_part, float("-inf"), cache_modifier=".cg")
            part_total = tl.load(part_totals + at, is_part, 0.0, cache_modifier=".cg")
            part = part_sums + at[:, None] * VALUE_DIM + dims
            part = tl.load(part, is_part[:, None] & (dims < VALUE_DIM), 0.0, cache_modifier=".cg")
            weight = tl.exp2(part_top - shift)
            total += weight * part_total
            sums += weight[:, None] * part
    result, log_sum = finish(sums, top, total, sink, SINKS)
    at = out + row_at[:, None] * VALUE_DIM + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dims < VALUE_DIM))
    tl.store(lse + row_at, log_sum, mask=is_row)
