"""Attention of prompts by tensor descriptors: over pages of whole tiles, or over new tokens."""

import triton
import triton.language as tl

from compiled_attn.ops.triton.attend import _dot
from compiled_attn.ops.triton.merge import finish, rounded_product


@triton.jit
def _request_of(program, starts, requests, QUERIES: tl.constexpr):
    """Finds the request of a program, see `attend._request_of`.

    Unrolled for up to ``2**16`` requests: warps are not specialised in kernels that have another
    loop.
    """
    request = 0
    for step in tl.static_range(15, -1, -1):
        next_one = request + (1 << step)
        is_one = next_one < requests
        start = tl.load(starts + next_one, mask=is_one, other=0)
        is_one = is_one & (start // QUERIES + next_one <= program)
        request = tl.where(is_one, next_one, request)
    return request


@triton.jit
def _place(start, table, begin, PAGE: tl.constexpr):
    """Returns the block and first slot of a tile of keys; PAGE 0: of new tokens from begin on."""
    if PAGE == 0:
        return 0, begin + start
    return tl.load(table + start // PAGE), start % PAGE


@triton.jit
def _wrong(block, blocks):
    """Returns NaN for a block that is not in the cache, whose tile reads as zeros; else 0."""
    return tl.where((block >= 0) & (block < blocks), 0.0, float("nan"))


@triton.jit
def _add_tile(scores, values, top, total, sums, factor, WIDEN: tl.constexpr):
    """Adds a tile of keys to maxima and totals ``[n]`` and to sums ``[n, D]``."""
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    # Subtracts before it scales, see "Large scores" in docs/design/gpu_kernels.md.
    weights = tl.exp2((scores - shift[:, None]) * factor)
    decay = tl.exp2((top - shift) * factor)
    total = total * decay + tl.sum(weights, 1)
    sums = sums * decay[:, None] + _dot(weights.to(values.dtype), values, WIDEN)
    return higher, total, sums


@triton.jit(do_not_specialize=["tokens", "requests", "width", "blocks"])
def prompt_kernel(
    query,  # [T, HEADS, DIM]
    key, value,  # descriptors of [blocks, slots, Hk, DIM], tiles [1, KEYS, 1, BLOCK]
    block_table, seq_lens, starts,  # [R, width], [R], [R + 1]
    sinks,  # [HEADS] float32 or None
    out, lse,  # [T, HEADS, DIM], [T, HEADS] float32
    factor,  # of scores, with log2(e)
    tokens, requests, width, blocks,
    q_token, q_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPECIALIZED: tl.constexpr, REPAIRS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes ``ROWS // TILE_HEADS`` tokens, ``TILE_HEADS`` heads of a KV head, like `attend`.

    PAGE: slots of a block, all tiles lie in one; 0: keys are a step's new tokens, without blocks,
    and rows see those of their request. SPECIALIZED: other warps load than multiply; leaves out
    tokens of no request, and gives rows an lse of NaN which a non-finite value may have reached
    that they do not see. REPAIRS: computes the tiles of such rows again, and the left out tokens.
    Grid: ``(T // QUERIES + R, Hk * GROUP // TILE_HEADS)``.
    """
    QUERIES: tl.constexpr = ROWS // TILE_HEADS
    HEAD_TILES: tl.constexpr = GROUP // TILE_HEADS
    # The last causal rows see the most keys: starts with them, so that none runs alone at the end.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    row = tl.arange(0, ROWS)
    first_head = kv_head * GROUP + tl.program_id(1) % HEAD_TILES * TILE_HEADS
    head = first_head + row % TILE_HEADS
    dims = tl.arange(0, BLOCK)
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head)

    if not SPECIALIZED:
        token = program * QUERIES + row // TILE_HEADS
        is_own = (token < tl.load(starts)) | (token >= tl.load(starts + requests))
        is_own = is_own & (token < tokens)
        at = token.to(tl.int64) * HEADS + head
        zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
        is_dim = is_own[:, None] & (dims < DIM)[None, :]
        tl.store(out + at[:, None] * DIM + dims[None, :], zeros, is_dim)
        tl.store(lse + at, sink, mask=is_own)

    request = _request_of(program, starts, requests, QUERIES)
    begin = tl.load(starts + request, mask=requests > 0, other=0)
    end = tl.minimum(tl.load(starts + request + 1, mask=requests > 0, other=0), tokens)
    count = end - begin
    first = (program - begin // QUERIES - request) * QUERIES
    given, length = count, count
    if PAGE > 0:
        given = tl.load(seq_lens + request, mask=requests > 0, other=0)
        length = tl.minimum(given, width * PAGE)
    own = first + row // TILE_HEADS
    token = begin + own
    is_row = (own >= 0) & (own < count)
    at = token.to(tl.int64) * HEADS + head
    key_end = tl.where(first < count, length, 0)
    last = tl.full([ROWS], 0, tl.int32) + length - 1
    full_end = key_end
    if CAUSAL:
        last = tl.minimum(length - count + own, last)
        full_end = tl.minimum(length - count + first + 1, key_end)
        key_end = tl.minimum(length - count + first + QUERIES, key_end)
    full_end = tl.maximum(full_end, 0) // KEYS * KEYS
    if REPAIRS:
        seen = tl.load(lse + at, mask=is_row, other=0.0)
        if tl.max((seen != seen).to(tl.int32), 0) == 0:
            return

    # A program builds this descriptor: the compiler splits its rows between two groups of warps.
    descriptor = tl.make_tensor_descriptor(
        query, [tokens, HEADS, DIM], [q_token, q_head, 1], [QUERIES, TILE_HEADS, BLOCK]
    )
    queries = descriptor.load([begin + first, first_head, 0]).reshape(ROWS, BLOCK)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    # A device cannot raise: numbers that cannot be make NaN of their request.
    total = tl.full([ROWS], 0.0, tl.float32)
    total = tl.where((given > length) | (given < 0), float("nan"), total)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    table = block_table + request.to(tl.int64) * table_row
    index = tl.arange(0, KEYS)
    if not SPECIALIZED:
        for start in tl.range(0, full_end, KEYS):
            block, slot = _place(start, table, begin, PAGE)
            keys = key.load([block, slot, kv_head, 0]).reshape(KEYS, BLOCK)
            values = value.load([block, slot, kv_head, 0]).reshape(KEYS, BLOCK)
            scores = _dot(queries, keys.T, WIDEN)
            top, total, sums = _add_tile(scores, values, top, total, sums, factor, WIDEN)
            total += _wrong(block, blocks)
    for start in tl.range(
        0 if SPECIALIZED else full_end, key_end, KEYS, warp_specialize=SPECIALIZED
    ):
        block, slot = _place(start, table, begin, PAGE)
        keys = key.load([block, slot, kv_head, 0]).reshape(KEYS, BLOCK)
        values = value.load([block, slot, kv_head, 0]).reshape(KEYS, BLOCK)
        scores = _dot(queries, keys.T, WIDEN)
        if not SPECIALIZED:
            # A weight of 0 does not mask a NaN or infinite value: zeroes it, and gives its key a
            # NaN score, which the mask hides from rows that do not see it.
            is_finite = tl.abs(values.to(tl.float32)) < float("inf")
            is_nonfinite = tl.max((is_finite == 0).to(tl.int32), 1) > 0
            scores = tl.where(is_nonfinite[None, :], float("nan"), scores)
            values = tl.where(is_nonfinite[:, None], 0.0, values).to(values.dtype)
        scores = tl.where((start + index)[None, :] <= last[:, None], scores, float("-inf"))
        top, total, sums = _add_tile(scores, values, top, total, sums, factor, WIDEN)
        total += _wrong(block, blocks)

    top = rounded_product(top, factor)
    result, log_sum = finish(sums, top, total, sink, SINKS)
    if SPECIALIZED:  # marks rows that a value which they do not see may have reached
        log_sum = tl.where(tl.max((sums != sums).to(tl.int32), 1) > 0, float("nan"), log_sum)
    is_dim = is_row[:, None] & (dims < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), is_dim)
    tl.store(lse + at, log_sum, mask=is_row)
