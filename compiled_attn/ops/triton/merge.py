"""Merges the splits of a row, adds its sink, and normalizes."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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


@triton.jit(do_not_specialize=["tokens", "requests", "splits"])
def merge_kernel(
    part_sums,  # [splits, T, H, VALUE_DIM] float32
    part_top, part_total,  # [splits, T, H] float32
    starts,  # [R + 1]
    sinks,  # [H] float32 or None
    out, lse,  # [T, H, VALUE_DIM], [T, H] float32
    tokens, requests, splits,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one token and head. Grid: ``(T, H)``."""
    token = tl.program_id(0)
    row = token.to(tl.int64) * HEADS + tl.program_id(1)
    rows = row + tl.arange(0, 1)
    step = tokens.to(tl.int64) * HEADS
    dims = tl.arange(0, VALUE_BLOCK)[None, :]
    is_own = (token >= tl.load(starts)) & (token < tl.load(starts + requests))
    sink = tl.full([1], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1) + tl.arange(0, 1))
    sums = tl.zeros([1, VALUE_BLOCK], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if is_own:  # a token of no request has no parts
        for split in range(splits):
            top = tl.maximum(top, tl.load(part_top + split * step + rows))
        shift = tl.where(top == float("-inf"), 0.0, top)
        for split in range(splits):
            at = split * step + rows
            weight = tl.exp2(tl.load(part_top + at) - shift)
            total += weight * tl.load(part_total + at)
            part = part_sums + at[:, None] * VALUE_DIM + dims
            sums += weight[:, None] * tl.load(part, mask=dims < VALUE_DIM, other=0.0)
    result, log_sum = finish(sums, top, total, sink, SINKS)
    at = out + rows[:, None] * VALUE_DIM + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse + rows, log_sum)
