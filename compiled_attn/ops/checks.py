"""Argument checks of the op's Python reference; those of C++ are in ``attention_op.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, Expect
from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.errors import KernelArgumentError
from compiled_attn.ops.call import NewTokens, PagedCall

__all__ = ["check", "check_shapes"]

_expect = Expect(KernelArgumentError, KernelArgumentError, "paged_attention: ")
_SEGMENT_UNIT = 64
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def check(call: PagedCall) -> None:
    """Raises KernelArgumentError unless shapes, dtypes, options and indices are valid."""
    check_shapes(call)
    if call.new is not None:
        _check_slots(call, call.new)
    _check_lengths(call)
    _check_blocks(call)


def check_shapes(call: PagedCall) -> None:
    """Raises KernelArgumentError unless shapes, dtypes and options are valid; reads no data."""
    _check_caches(call)
    _expect.tensor("block_table", call.block_table, "[R, W]", (None, None), _INT32, call.query)
    requests = call.block_table.shape[0]
    _expect.tensor("seq_lens", call.seq_lens, "[R]", (requests,), _INT32, call.query)
    starts = call.query_start_loc
    _expect.tensor("query_start_loc", starts, "[R + 1]", (requests + 1,), _INT32, call.query)
    _check_scoring(call)
    if call.new is not None:
        _check_new(call, call.new)


def _check_caches(call: PagedCall) -> None:
    query, keys, values = call.query, call.key_cache, call.value_cache
    _expect.tensor("query", query, "[T, H, D]", (None, None, None), FLOATS)
    dim = query.shape[2]
    legend = "[num_blocks, block_size, Hk, D]"
    _expect.tensor("key_cache", keys, legend, (None, None, None, dim), None, query)
    blocks, size, kv_heads, _ = keys.shape
    _expect.heads(query.shape[1], kv_heads)
    quantised = keys.dtype in QUANTISED
    dtypes = (keys.dtype if quantised else query.dtype,)
    _expect.tensor("key_cache", keys, legend, keys.shape, dtypes)
    _expect.tensor("value_cache", values, legend, (*keys.shape[:3], None), dtypes, query)
    sized = min(size, dim, values.shape[3]) > 0
    _expect(sized, "heads and blocks of at least one element", keys.shape, "give them a size")
    for name, scale in (("key_scale", call.key_scale), ("value_scale", call.value_scale)):
        given = "a tensor" if scale is not None else "None"
        remedy = "scales belong to int8 and fp8 caches, and to no others"
        _expect((scale is not None) == quantised, f"{name} for {dtypes[0]}", given, remedy)
        if scale is not None:
            shape = (blocks, size, kv_heads)
            _expect.tensor(name, scale, "[num_blocks, block_size, Hk]", shape, _FLOAT32, query)
    _expect.unit_stride(query=query, key_cache=keys, value_cache=values)


def _check_scoring(call: PagedCall) -> None:
    scoring = call.scoring
    window, softcap = scoring.window, scoring.softcap
    for name, vector in (("alibi_slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        if vector is not None:
            _expect.tensor(name, vector, "[H]", call.query.shape[1:2], _FLOAT32, call.query)
    if window is not None:
        _expect(call.causal, "causal=True with a window", call.causal, "None is no window")
        _expect(window >= 1, "window of at least 1", window, "None is no window")
    segment = call.segment
    whole = segment is None or (segment > 0 and segment % _SEGMENT_UNIT == 0)
    _expect(whole, f"segment of a multiple of {_SEGMENT_UNIT}", segment, "None is no segment")
    positive = softcap is None or softcap > 0
    _expect(positive, "a positive softcap or None", softcap, "None is no softcap")


def _check_new(call: PagedCall, new: NewTokens) -> None:
    query, dtypes = call.query, (call.query.dtype,)
    tokens, kv_heads = query.shape[0], call.key_cache.shape[2]
    for name, rows, cache in (
        ("key", new.key, call.key_cache),
        ("value", new.value, call.value_cache),
    ):
        shape = (tokens, kv_heads, cache.shape[3])
        _expect.tensor(name, rows, "[T, Hk, D]", shape, dtypes, query)
        _expect.unit_stride(**{name: rows})
    _expect.tensor("slot_mapping", new.slot_mapping, "[T]", (tokens,), (torch.int64,), query)
    read = {"query": query, **new._asdict()}
    read |= {name: getattr(call, name) for name in ("block_table", "seq_lens", "query_start_loc")}
    names = "key_cache", "value_cache", "key_scale", "value_scale"
    written: dict[str, Tensor | None] = {name: getattr(call, name) for name in names}
    for name, each in written.items():
        if each is not None:
            steps = zip(each.stride(), each.shape, strict=True)
            own = all(step or size == 1 for step, size in steps)
            expected = f"{name} with memory for each element"
            _expect(own, expected, "an expanded tensor", "call .clone()")
    _expect.apart(written, read)


def _check_slots(call: PagedCall, new: NewTokens) -> None:
    slots = call.key_cache.shape[0] * call.key_cache.shape[1]
    bad = ((new.slot_mapping < 0) | (new.slot_mapping >= slots)).nonzero()
    if bad.numel():
        token = int(bad[0])
        got, remedy = int(new.slot_mapping[token]), "padding points into block 0"
        _expect(False, f"slot_mapping[{token}] in 0..{slots - 1}", got, remedy)


def _check_lengths(call: PagedCall) -> None:
    tokens, size, width = call.query.shape[0], call.key_cache.shape[1], call.block_table.shape[1]
    bounds, room = call.query_start_loc.tolist(), width * size
    for request, length in enumerate(call.seq_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        _expect(
            0 <= begin <= end <= tokens,
            f"query rows of request {request} in 0..{tokens}, in order",
            f"{begin}..{end}",
            "query_start_loc is a running sum that ends at the tokens of the step",
        )
        expected = f"seq_lens[{request}] in 0..{room} ({width} blocks of {size})"
        _expect(0 <= length <= room, expected, length, "widen the block table")


def _check_blocks(call: PagedCall) -> None:
    blocks, size = call.key_cache.shape[:2]
    for request, length in enumerate(call.seq_lens.tolist()):
        used = call.block_table[request, : -(-length // size)]
        bad = ((used < 0) | (used >= blocks)).nonzero()
        if bad.numel():
            column = int(bad[0])
            expected = f"block_table[{request}, {column}] in 0..{blocks - 1}"
            remedy = "the request needs it: give it a block of the cache"
            _expect(False, expected, int(used[column]), remedy)
