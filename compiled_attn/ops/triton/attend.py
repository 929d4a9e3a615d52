"""Attention of a tile of query rows over the pages of its request, or over a split of them."""

import triton
import triton.language as tl

from compiled_attn.ops.triton.codes import decode
from compiled_attn.ops.triton.merge import LOG2E, finish, merge_parts, rounded_product


@triton.jit
def _request_of(program, starts, requests, QUERIES: tl.constexpr):
    """Finds the request of a program by bisection.

    Request r has the programs from ``starts[r] // QUERIES + r`` on: ``T // QUERIES + R`` programs
    serve any mix of R requests with T rows (as in vLLM's Triton kernel).
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= program:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit
def _heads_of(row, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Returns the query head of each row of a tile, and whether there is one."""
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    member = (tl.program_id(1) % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    return kv_head * GROUP + member, (row < QUERIES * TILE_HEADS) & (member < GROUP)


@triton.jit
def _softcap(score, cap):
    """``cap * tanh(score / cap)`` by exponentials, which every device has."""
    power = tl.exp2(tl.abs(score) * (-2.0 * LOG2E / cap))
    size = cap * (1.0 - power) / (1.0 + power)
    return tl.where(score < 0, -size, size)


@triton.jit
def _dot(left, right, WIDEN: tl.constexpr):
    """Matrix product in float32; the interpreter multiplies bfloat16 wrongly unless widened."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "requests", "width", "blocks", "window"])
def attend_kernel(
    query,  # [T, HEADS, KEY_DIM]
    key_cache, value_cache,  # [blocks, PAGE, Hk, KEY_DIM or VALUE_DIM]
    key_scale, value_scale,  # [blocks, PAGE, Hk] float32 or None
    block_table, seq_lens, starts,  # [R, width], [R], [R + 1]
    slopes, sinks,  # [HEADS] float32 or None
    out, lse,  # [T, HEADS, VALUE_DIM], [T, HEADS] float32
    part_sums, part_tops, part_totals,  # [splits, T, HEADS(, VALUE_DIM)] float32; None: no splits
    arrivals,  # zeros [first two sizes of the grid] int32: splits of a tile that are stored
    factor,  # of scores; includes log2(e) unless there is softcap or ALiBi
    cap,
    lowest,  # -inf, unknown to the compiler
    window, tokens, requests, width, blocks,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head,  # strides
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, CODES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, FACTOR_LAST: tl.constexpr, IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    WIDEN: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """Computes ``ROWS // TILE_HEADS`` tokens, ``TILE_HEADS`` heads of a KV head.

    Grid: ``(T // QUERIES + R, Hk * cdiv(GROUP, TILE_HEADS), splits)``. FlashAttention-2
    (Dao, 2023); with splits of the keys, Flash-Decoding, whose last program of a tile merges.
    """
    QUERIES: tl.constexpr = ROWS // TILE_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    DTYPE: tl.constexpr = query.dtype.element_ty
    # Applies value scales to the weights, which are fewer, unless float16 weights could underflow.
    SCALED_WEIGHTS: tl.constexpr = CODES != "none" and tl.float16 != DTYPE
    # The last causal rows see the most keys: starts with them, so that none runs alone at the end.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    split = tl.program_id(2)

    row = tl.arange(0, ROWS)
    head, is_row = _heads_of(row, GROUP, TILE_HEADS, QUERIES)
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = value_dims < VALUE_DIM
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))

    if split == 0:  # tokens of no request: those that have this program's number among all
        token = program * QUERIES + row // TILE_HEADS
        is_own = (token < tl.load(starts)) | (token >= tl.load(starts + requests))
        is_own = is_own & is_row & (token < tokens)
        at = token.to(tl.int64) * HEADS + head
        zeros = tl.zeros([ROWS, VALUE_BLOCK], out.dtype.element_ty)
        tl.store(out + at[:, None] * VALUE_DIM + value_dims, zeros, is_own[:, None] & is_value)
        tl.store(lse + at, sink, mask=is_own)

    if requests == 0:
        return
    request = _request_of(program, starts, requests, QUERIES)
    begin = tl.load(starts + request)
    end = tl.minimum(tl.load(starts + request + 1), tokens)
    given = tl.load(seq_lens + request)
    length = tl.minimum(given, width * PAGE)
    first = (program - begin // QUERIES - request) * QUERIES  # row of the request
    first_token = begin + first
    if (first < 0) | (first_token >= end):
        return
    own = first + row // TILE_HEADS
    token = begin + own
    is_row = is_row & (token >= 0) & (token < end)
    position = length - (end - begin) + own
    first_position = length - (end - begin) + first
    last_position = tl.minimum(first_position + QUERIES, length) - 1

    dims = tl.arange(0, KEY_BLOCK)
    query_at = query + token.to(tl.int64) * q_token + head * q_head
    is_query = is_row[:, None] & (dims < KEY_DIM)[None, :]
    queries = tl.load(query_at[:, None] + dims[None, :], mask=is_query, other=0.0)
    if REST_BLOCK > 0:  # of a head size such as 576 that a power of two would nearly double
        rest = KEY_BLOCK + tl.arange(0, REST_BLOCK)
        is_query = is_row[:, None] & (rest < KEY_DIM)[None, :]
        rest_queries = tl.load(query_at[:, None] + rest[None, :], mask=is_query, other=0.0)
    if ALIBI:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)

    # Keys [key_begin, key_end) are this split's; all rows see those of [full_begin, full_end).
    key_begin, key_end, full_end = 0, length, length
    if CAUSAL:
        key_end, full_end = last_position + 1, tl.minimum(first_position + 1, length)
    if WINDOWED:
        key_begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(tl.maximum(key_end - key_begin, 0), KEYS), tl.num_programs(2)) * KEYS
    key_begin += split * share
    key_end = tl.minimum(key_end, key_begin + share)
    full_begin = key_begin
    if WINDOWED:
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, key_begin), KEYS) * KEYS
    full_end = tl.maximum(tl.minimum(full_end, key_end) // KEYS * KEYS, full_begin)

    table = block_table + request.to(tl.int64) * table_row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    # A device cannot raise: numbers that cannot be make NaN, and reach no memory but the cache's.
    total = tl.full([ROWS], 0.0, tl.float32)
    total = tl.where((given > length) | (given < 0), float("nan"), total)
    sums = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    index = tl.arange(0, KEYS)
    is_missing = tl.zeros([KEYS], tl.int32)  # a key that all rows see, in a block that cannot be
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        part_begin, part_end = full_begin, full_end
        if part == 0:
            part_begin, part_end = key_begin, tl.minimum(full_begin, key_end)
        elif part == 2:
            part_begin, part_end = full_end, key_end
        for start in range(part_begin, part_end, KEYS):
            key = start + index
            if PAGE % KEYS == 0:  # one page holds them all
                column, slot = start // PAGE, start % PAGE + index
            elif KEYS % PAGE == 0:  # they fill pages: slots are those of all other tiles
                column, slot = start // PAGE + index // PAGE, index % PAGE
            else:
                column, slot = key // PAGE, key % PAGE
            if part == 1:
                block = tl.load(table + column)
            else:
                block = tl.load(table + column, mask=column * PAGE < length, other=-1)
            is_block = block.to(tl.uint32, bitcast=True) < blocks.to(tl.uint32)
            block = tl.where(is_block, block, 0).to(tl.int64)
            slot = slot.to(tl.int64)

            key_at = (block * k_block + slot * k_slot + kv_head * k_head)[None, :]
            keys = tl.load(
                key_cache + key_at + dims[:, None], mask=(dims < KEY_DIM)[:, None], other=0
            )
            scores = _dot(queries, decode(keys, CODES, DTYPE, HAS_FP8), WIDEN)
            if REST_BLOCK > 0:
                keys = tl.load(
                    key_cache + key_at + rest[:, None], mask=(rest < KEY_DIM)[:, None], other=0
                )
                scores += _dot(rest_queries, decode(keys, CODES, DTYPE, HAS_FP8), WIDEN)
            if CODES != "none":
                scale_at = block * ks_block + slot * ks_slot + kv_head * ks_head
                scores *= (tl.load(key_scale + scale_at) * factor)[None, :]
            elif not FACTOR_LAST:
                scores *= factor
            if CAPPED:
                scores = _softcap(scores, cap)
            if ALIBI:
                scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
            if CAPPED or ALIBI:
                scores *= LOG2E

            value_at = (block * v_block + slot * v_slot + kv_head * v_head)[:, None]
            values = tl.load(value_cache + value_at + value_dims, mask=is_value, other=0)
            if CODES != "none":
                scale_at = block * vs_block + slot * vs_slot + kv_head * vs_head
                scale = tl.load(value_scale + scale_at)
                if SCALED_WEIGHTS:
                    values = decode(values, CODES, DTYPE, HAS_FP8)
                else:
                    values = decode(values, CODES, tl.float32, HAS_FP8) * scale[:, None]
                    values = values.to(DTYPE)
            if not FACTOR_LAST:
                # Keeps devices from fusing the product with the subtraction of the rounded maximum,
                # whose difference is far from 0 for large scores: `lowest` is always -inf.
                scores = tl.maximum(scores, lowest, propagate_nan=tl.PropagateNan.ALL)
            if part == 1:
                is_missing |= (is_block == 0).to(tl.int32)
            else:
                scores = tl.where(is_block, scores, float("nan"))
                # A weight of 0 does not mask a NaN or infinite value: zeroes it, and gives its key
                # a NaN score, which the mask hides from rows that do not see it.
                is_finite = tl.abs(values.to(tl.float32)) < float("inf")
                is_nonfinite = tl.max((is_finite == 0).to(tl.int32), 1) > 0
                if SCALED_WEIGHTS:
                    is_nonfinite = is_nonfinite | ((tl.abs(scale) < float("inf")) == 0)
                    scale = tl.where(is_nonfinite, 0.0, scale)
                scores = tl.where(is_nonfinite[None, :], float("nan"), scores)
                values = tl.where(is_nonfinite[:, None], 0.0, values).to(DTYPE)
                sees = key[None, :] < length
                if CAUSAL:
                    sees = sees & (key[None, :] <= position[:, None])
                if WINDOWED:
                    sees = sees & (key[None, :] > position[:, None] - window)
                scores = tl.where(sees, scores, float("-inf"))

            higher = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            below, lost = scores - shift[:, None], top - shift
            if FACTOR_LAST:
                below *= factor
                lost *= factor
            weights = tl.exp2(below)
            decay = tl.exp2(lost)
            total = total * decay + tl.sum(weights, 1)
            if SCALED_WEIGHTS:
                weights *= scale[None, :]
            sums = sums * decay[:, None] + _dot(weights.to(DTYPE), values, WIDEN)
            top = higher

    total = tl.where(tl.max(is_missing, 0) > 0, float("nan"), total)
    if FACTOR_LAST:
        top = rounded_product(top, factor)
    row_at = token.to(tl.int64) * HEADS + head
    if not IS_SPLIT:
        result, log_sum = finish(sums, top, total, sink, SINKS)
        at = out + row_at[:, None] * VALUE_DIM + value_dims
        tl.store(at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_value)
        tl.store(lse + row_at, log_sum, mask=is_row)
    else:
        at = row_at + split * tokens.to(tl.int64) * HEADS
        part = part_sums + at[:, None] * VALUE_DIM + value_dims
        tl.store(part, sums, mask=is_row[:, None] & is_value)
        tl.store(part_tops + at, top, mask=is_row)
        tl.store(part_totals + at, total, mask=is_row)
        tl.debug_barrier()  # one thread publishes what all have stored
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(2) - 1:
            for start in range(0, tl.minimum(end - first_token, QUERIES) * TILE_HEADS, MERGE_ROWS):
                merged = start + tl.arange(0, MERGE_ROWS)
                merged_head, is_merged = _heads_of(merged, GROUP, TILE_HEADS, QUERIES)
                merged_token = first_token + merged // TILE_HEADS
                is_merged = is_merged & (merged_token >= 0) & (merged_token < end)
                merge_parts(
                    part_sums, part_tops, part_totals, sinks, out, lse,
                    merged_token.to(tl.int64) * HEADS + merged_head, merged_head, is_merged,
                    tokens.to(tl.int64) * HEADS, VALUE_DIM, VALUE_BLOCK, SINKS,
                )  # fmt: skip
