"""Attention kernels of a device: the op, and what a user would take instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerator.scene import Step

Kernel = Callable[[Step], Tensor]

_SETS = 3  # of tensors that a kernel reads in turns: cold, as the blocks of the op are


def op(step: Step) -> Tensor:
    """Ours, by the dispatcher."""
    out, _ = torch.ops.compiled_attn.paged_attention(
        step.query, step.key_cache, step.value_cache, step.block_table, step.seq_lens,
        step.query_start_loc, step.sizes.dim**-0.5,
    )  # fmt: skip
    return out


def contiguous_sdpa(like: Step) -> Kernel:
    """SDPA on keys and values that lie in a row for each request: no paging at all."""
    sizes, requests = like.sizes, like.requests
    shape = requests, sizes.kv_heads, like.length, sizes.dim
    example = like.query[:1, :1].expand(shape)
    caches = cycle([(torch.randn_like(example), torch.randn_like(example)) for _ in range(_SETS)])
    seen = None
    if 1 < like.queries < like.length:
        ones = torch.ones(like.queries, like.length, dtype=torch.bool)
        seen = ones.tril(like.length - like.queries).to(like.query.device)

    def run(step: Step) -> Tensor:
        query = step.query.view(requests, step.queries, sizes.heads, sizes.dim).transpose(1, 2)
        key, value = next(caches)
        is_causal = seen is None and step.queries > 1
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=is_causal, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(step.query.shape)

    return run


def gathered_sdpa(step: Step) -> Tensor:
    """Blocks gathered to a row, then SDPA: what is written without a kernel for pages."""
    sizes, requests = step.sizes, step.requests
    blocks = step.block_table.flatten().long()
    key, value = (
        cache[blocks]
        .view(requests, -1, sizes.kv_heads, sizes.dim)[:, : step.length]
        .transpose(1, 2)
        for cache in (step.key_cache, step.value_cache)
    )
    query = step.query.view(requests, step.queries, sizes.heads, sizes.dim).transpose(1, 2)
    seen = None
    if step.queries > 1:
        rows = torch.arange(step.length - step.queries, step.length, device=query.device)
        seen = rows.unsqueeze(1) >= torch.arange(step.length, device=query.device)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2).reshape(step.query.shape)


def flex(_: Step) -> Kernel:
    """FlexAttention under inductor; the block mask is the block table, made outside of the time."""
    from native.flex import block_mask, heads_first
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    masks: dict[int, object] = {}

    def run(step: Step) -> Tensor:
        if step.queries != 1 or step.length % step.sizes.block_size:
            raise NotImplementedError("a block mask here is for decodes of whole blocks")
        if id(step) not in masks:
            masks[id(step)] = block_mask(step.block_table.cpu(), step.key_cache).to(
                str(step.query.device)
            )
        key, value = (heads_first(c, step.requests) for c in (step.key_cache, step.value_cache))
        out = attend(
            step.query.unsqueeze(2), key, value, block_mask=masks[id(step)], enable_gqa=True
        )
        return out.squeeze(2)

    return run


def varlen(_: Step) -> Kernel:
    """torch's own flash attention over pages (torch 2.12 and newer)."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise NotImplementedError(f"no pages in torch {torch.__version__}")

    def run(step: Step) -> Tensor:
        out = varlen_attn(
            step.query, step.key_cache, step.value_cache, step.query_start_loc, None,
            step.queries, step.length, window_size=(-1, 0), enable_gqa=True,
            seqused_k=step.seq_lens, block_table=step.block_table,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return run


def copy(like: Step) -> Kernel:
    """No attention: as many bytes as the step reads, copied; the bound of a decode."""
    size = like.kv_bytes // 2  # each is read and written
    example = torch.zeros(size, dtype=torch.uint8, device=like.query.device)
    pairs = cycle([(torch.empty_like(example), example.clone()) for _ in range(_SETS)])

    def run(_: Step) -> Tensor:
        target, source = next(pairs)
        return target.copy_(source)

    return run


MAKERS: dict[str, Callable[[Step], Kernel]] = {
    "op": lambda _: op,
    "copy": copy,
    "varlen": varlen,
    "flex": flex,
    "sdpa": contiguous_sdpa,
    "gather": lambda _: gathered_sdpa,
}
"""Makers of kernels by name; one raises where its kernel is not available."""
