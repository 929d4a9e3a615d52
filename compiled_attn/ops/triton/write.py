"""Writes new tokens to the caches: unchanged, or as codes with a scale per token and head."""

import triton
import triton.language as tl

from compiled_attn.ops.triton.codes import encode

# Lower bound of a row's largest element, as in `compiled_attn.cache.quantisation`.
_TINY = tl.constexpr(2.0**-110)
_ZEROED = tl.constexpr(128)


@triton.jit(do_not_specialize=["blocks", "counters"])
def write_kernel(
    key, value,  # [T, Hk, KEY_DIM or VALUE_DIM]
    key_cache, value_cache,  # [blocks, PAGE, Hk, KEY_DIM or VALUE_DIM]
    key_scale, value_scale,  # [blocks, PAGE, Hk] float32 or None
    slots,  # [T] int64
    arrivals,  # [counters] int32, zeroed for the attention that follows; or None
    counters, blocks,
    key_token, key_head, value_token, value_head,  # strides
    k_block, k_slot, k_head, v_block, v_slot, v_head,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    KV_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, CODES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Writes some heads of one token. Grid: ``(T, cdiv(Hk, TILE_HEADS))``."""
    if arrivals is not None:
        step = tl.num_programs(0) * tl.num_programs(1) * _ZEROED
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        for start in range(program * _ZEROED, counters, step):
            at = start + tl.arange(0, _ZEROED)
            tl.store(arrivals + at, 0, mask=at < counters)
    token = tl.program_id(0).to(tl.int64)
    slot_of_all = tl.load(slots + token)
    block = slot_of_all // PAGE
    slot = slot_of_all % PAGE
    is_slot = (slot_of_all >= 0) & (block < blocks)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    heads = tl.where(is_slot, heads, KV_HEADS).to(tl.int64)  # else nothing is written
    _write(
        key + token * key_token, key_head,
        key_cache + block * k_block + slot * k_slot, k_head,
        key_scale, block * ks_block + slot * ks_slot, ks_head,
        heads, KV_HEADS, KEY_DIM, KEY_BLOCK, CODES, LARGEST,
    )  # fmt: skip
    _write(
        value + token * value_token, value_head,
        value_cache + block * v_block + slot * v_slot, v_head,
        value_scale, block * vs_block + slot * vs_slot, vs_head,
        heads, KV_HEADS, VALUE_DIM, VALUE_BLOCK, CODES, LARGEST,
    )  # fmt: skip


@triton.jit
def _write(
    new, new_head, cell, cell_head, scales, scale_at, scale_head, heads,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK)[None, :]
    there = (heads < KV_HEADS)[:, None] & (dims < DIM)
    rows = tl.load(new + heads[:, None] * new_head + dims, mask=there, other=0.0)
    if CODES != "none":
        rows = rows.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(rows), 1), _TINY)
        is_nan = tl.max((rows != rows).to(tl.int32), 1) > 0  # a maximum may drop NaN
        scale = tl.div_rn(tl.where(is_nan, float("nan"), largest), LARGEST)
        tl.store(scales + scale_at + heads * scale_head, scale, mask=heads < KV_HEADS)
        divisor = tl.broadcast_to(scale[:, None], rows.shape)
        rows = encode(tl.div_rn(rows, divisor), CODES)
    tl.store(cell + heads[:, None] * cell_head + dims, rows, mask=there)
