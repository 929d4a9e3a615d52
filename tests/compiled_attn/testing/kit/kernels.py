"""A simple, correct paged attention, and what happens to it when one thing is wrong."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing import Capabilities
from compiled_attn.testing.kit.interfaces import Op, OpWrite

SIZES: dict[str, Any] = {"head_dims": (16,), "block_sizes": (4,), "groups": (2,)}
CLAIMS = Capabilities(Op.features, **SIZES)
WRITE_CLAIMS = Capabilities(OpWrite.features, **SIZES)


class Kernel:
    """The op in plain torch, request by request; ``bug`` names what is wrong with it."""

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.capabilities = CLAIMS

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        bug, size = self.bug, key_cache.shape[1]
        tokens, heads, dim = query.shape
        out = query.new_zeros(tokens, heads, value_cache.shape[3])
        lse = query.new_full((tokens, heads), -math.inf, dtype=torch.float32)
        if sinks is not None and bug != "lse without the sink":
            lse[:] = sinks
        if bug == "NaN in padded rows":
            out.fill_(math.nan)
        if bug == "scales the query in place":
            query.mul_(scale)
            scale = 1.0
        if bug == "ignores the scale":
            scale = dim**-0.5
        if bug == "a global dtype":
            torch.set_default_dtype(torch.float64)
        if bug == "block ids in 16 bits":
            block_table = block_table.short()
        if bug == "reads int64 as int32" and block_table.dtype == torch.int64:
            block_table = block_table.contiguous().view(torch.int32)[:, : block_table.shape[1]]
        if bug == "contiguous strides" and not key_cache.is_contiguous():
            steps = torch.empty(key_cache.shape, device="meta").stride()
            key_cache = key_cache.as_strided(key_cache.shape, steps)
        if bug == "blocks without gaps":
            key_cache, value_cache = (
                each.as_strided(each.shape, (size * each.stride(1), *each.stride()[1:]))
                for each in (key_cache, value_cache)
            )
        if bug in ("stale number of blocks", "buffers of the first call"):
            if not hasattr(seq_lens, "_first"):
                seq_lens._first = seq_lens.clone()
            most = -(-int(seq_lens._first.max()) // size) * size
            kept = seq_lens._first if bug == "buffers of the first call" else most
            seq_lens = torch.minimum(seq_lens, torch.as_tensor(kept))
        lengths, starts = self._ints(seq_lens), query_start_loc.tolist()
        table = self._ints(block_table) if bug == "stale tables" else block_table.tolist()
        if bug == "blocks of the first request":
            table = [table[0]] * len(table)
        mixed = {end - start for start, end in pairwise(starts)} - {0, 1}
        for request, length in enumerate(lengths):
            rows = slice(starts[request], starts[request + 1])
            count = rows.stop - rows.start
            if bug == "a prompt's neighbour has its length" and mixed and count == 1:
                length = min(length, *(n for n in lengths if n))
            used = table[request][: -(-length // size)]
            if bug == "consecutive blocks" and used:
                used = [min(used[0] + n, len(key_cache) - 1) for n in range(len(used))]
            if bug == "a shared block is read once":
                used = [b for b in used if not any(b in t[:1] for t in table[:request])] or used
            if not count or (not length and bug != "NaN in empty rows"):
                continue
            kept = length + (bug == "reads one key past the end")
            key = self._read(key_cache, used, key_scale)[:kept]
            scales = key_scale if bug == "K's scale for V" else value_scale
            value = self._read(value_cache, used, scales)[:kept]
            if bug == "loses the last key of a full block" and length % size == 0:
                key, value = key[:-1], value[:-1]
            if bug == "a thousand keys at most":
                key, value = key[-1000:], value[-1000:]
            if bug == "loses the first key of a chunk" and 1 < count < length:
                key, value = key[1:], value[1:]
            if bug == "multiplies hidden values by 0":
                key, value = (self._read(c, used, s) for c, s in
                              ((key_cache, key_scale), (value_cache, scales)))  # fmt: skip
            if bug == "hides NaN alone":
                key, value = (self._read(c, used, s) for c, s in
                              ((key_cache, key_scale), (value_cache, scales)))  # fmt: skip
                key, value = (torch.where(x.isnan(), 0, x) for x in (key, value))
            group = heads // key.shape[1]
            if bug == "heads in turns":
                key, value = key.repeat(1, group, 1), value.repeat(1, group, 1)
            else:
                key, value = (x.repeat_interleave(group, 1) for x in (key, value))
            if bug == "values as large as keys" and value.shape[2] != dim:
                value = value.flatten().roll(1).view_as(value)
            scores = torch.einsum("nhd,lhd->hnl", query[rows].float(), key) * scale
            at = torch.arange(length - count, length)[:, None]
            if bug == "aligned to the first key" and count > 1:
                at = at - (length - count)
            to = torch.arange(len(key))
            slopes = 0 if alibi_slopes is None else alibi_slopes[:, None, None] * (to - at)
            if bug == "ALiBi the other way":
                slopes = -slopes
            if bug == "caps after ALiBi":
                scores = scores + slopes
            if softcap is not None and bug != "no softcap":
                scores = softcap * torch.tanh(scores / softcap)
            if bug != "caps after ALiBi":
                scores = scores + slopes
            past = bug == "reads one key past the end"
            at, hidden = at + past, to >= length + past
            if causal or bug == "always causal":
                hidden = hidden | (to > at)
            if window is not None:
                last = at - window + (bug != "window off by one")
                hidden = hidden | (to < last)
            scores = scores.masked_fill(hidden, -math.inf)
            extra = sinks is not None
            if extra:
                sink = sinks[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, torch.zeros_like(sink) if bug == "sinks of 0" else
                                    sink], -1)  # fmt: skip
            if bug == "counts the last key twice" and mixed and count == 1:
                scores[..., len(key) - 1] += math.log(2)
            most = scores.amax(-1, keepdim=True).clamp_min(-1e30)
            weights = (scores - (0 if bug == "no maximum" else most)).exp()
            if bug == "weighs a key 1 % more":
                weights[..., min(9, len(key)) - 1] *= 1.01
            total = weights.sum(-1, keepdim=True)
            if bug == "NaN in empty rows" or bug == "no maximum":
                weights = weights / total
            else:
                weights = weights / total.clamp_min(1e-30)
            out[rows] = torch.einsum("hnl,lhd->nhd", weights[..., : len(key)], value).to(out.dtype)
            if bug == "NaN of one is NaN of all":
                out += 0 * query.sum()
            if bug == "NaN of one is NaN of the one before" and 0 < request < len(lengths) - 2:
                out[rows] += 0 * query[starts[request + 1]].sum()
            seen = scores[..., : len(key)] if bug == "lse without the sink" else scores
            own = seen.logsumexp(-1).T
            lse[rows] = own / math.log(2) if bug == "lse of base 2" else own
        if bug == "output in float64":
            out = out.double()
        if bug == "transposed lse":
            lse = lse.T
        return out, lse

    def _ints(self, tensor: Tensor) -> list[Any]:
        """Lists of a tensor, which a kernel might remember by its address."""
        if self.bug not in ("stale lengths", "stale tables"):
            return tensor.tolist()
        if not hasattr(tensor, "_remembered"):
            tensor._remembered = tensor.tolist()
        return tensor._remembered

    def _read(self, cache: Tensor, blocks: list[int], scale: Tensor | None) -> Tensor:
        if self.bug == "e5m2 is e4m3" and cache.dtype == torch.float8_e5m2:
            cache = cache.view(torch.float8_e4m3fn)
        rows = [cache[block].float() for block in blocks]
        read = torch.stack(rows).flatten(0, 1) if rows else cache[0, :0].float()
        if scale is None:
            return read
        scales = torch.stack([scale[block] for block in blocks]).flatten(0, 1)
        if self.bug == "the first scale for all":
            scales = scales[:1].expand_as(scales)
        return read * scales.unsqueeze(-1)


class WritingKernel:
    """The op that writes, over `Kernel`."""

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.capabilities = WRITE_CLAIMS

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        size, bug = key_cache.shape[1], self.bug
        step = block_table, seq_lens, query_start_loc, scale
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        if bug == "attends, then writes":
            result = Kernel()(query, key_cache, value_cache, *step, **scales, **options)
        if bug == "slots in 16 bits":
            slot_mapping = slot_mapping % 2**16
        for row, slot in enumerate(slot_mapping.tolist()):
            if bug == "writes the last row of all only" and row != len(key) - 1:
                continue
            at = divmod(slot, size)
            if bug == "padding writes to a free block" and slot == 0:
                used = {0, *block_table.flatten().tolist()}
                at = (next(b for b in range(len(key_cache)) if b not in used), 0)
            for new, cache, each in (
                (key, key_cache, key_scale),
                (value, value_cache, value_scale),
            ):
                _store(new[row], cache, each, at, bug)
            if bug == "clears the rest of the block":
                key_cache[at[0], at[1] + 1 :] = 0
        if bug != "attends, then writes":
            result = Kernel()(query, key_cache, value_cache, *step, **scales, **options)
        return result


def _store(row: Tensor, cache: Tensor, scale: Tensor | None, at: tuple[int, int], bug: str) -> None:
    if scale is None:
        cache[at] = row * (1 + 2**-20) if bug == "rounds what it writes" else row
        return
    limit = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
    scale[at] = row.float().abs().amax(-1) / limit[cache.dtype]
    scaled = row.float() / scale[at][..., None]
    cache[at] = (scaled.round() if cache.dtype == torch.int8 else scaled).to(cache.dtype)
    if bug == "forgets a scale":
        scale[at] = 1.0


BUGS = {
    "a global dtype": "global_state",
    "block ids in 16 bits": "large_ids",
    "heads in turns": "heads",
    "blocks of the first request": "decode",
    "consecutive blocks": "blocks",
    "loses the last key of a full block": "block_borders",
    "reads one key past the end": "decode",
    "ignores the scale": "scale",
    "no maximum": "large_scores",
    "a thousand keys at most": "long_context",
    "aligned to the first key": "chunked",
    "loses the first key of a chunk": "chunked",
    "a prompt's neighbour has its length": "mixed",
    "counts the last key twice": "mixed",
    "a shared block is read once": "shared_prefix",
    "multiplies hidden values by 0": "poison_nan",
    "hides NaN alone": "poison_inf",
    "NaN of one is NaN of all": "neighbours",
    "NaN of one is NaN of the one before": "neighbours",
    "stale number of blocks": "same_buffers",
    "buffers of the first call": "same_buffers",
    "scales the query in place": "inputs",
    "window off by one": "window",
    "no softcap": "softcap",
    "ALiBi the other way": "alibi",
    "caps after ALiBi": "softcap_alibi",
    "sinks of 0": "sinks",
    "values as large as keys": "mla",
    "K's scale for V": "int8",
    "the first scale for all": "int8",
    "e5m2 is e4m3": "fp8_e5m2",
    "always causal": "noncausal",
    "lse of base 2": "lse",
    "lse without the sink": "lse_sinks",
    "transposed lse": "lse",
    "NaN in padded rows": "padding_rows",
    "NaN in empty rows": "empty_rows",
    "contiguous strides": "strided",
    "blocks without gaps": "strided",
    "reads int64 as int32": "int64_tables",
    "stale lengths": "same_buffers",
    "stale tables": "same_buffers",
    "output in float64": "decode",
}
"""Bugs of `Kernel`, and the first case that must fail."""

WRITING_BUGS = {
    "slots in 16 bits": "large_ids",
    "attends, then writes": "decode",
    "writes the last row of all only": "decode",
    "padding writes to a free block": "padding_append",
    "clears the rest of the block": "append",
    "rounds what it writes": "append",
    "forgets a scale": "int8",
}
"""The same for `WritingKernel`."""
