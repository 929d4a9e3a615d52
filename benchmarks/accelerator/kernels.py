"""Attention kernels of a device: the op, and what a user would take instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from accelerator.scene import Step
from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import PROVIDERS

Kernel = Callable[[Step], Tensor]

_SETS = 3  # of tensors that a kernel reads in turns: cold, as the blocks of the op are


def op(step: Step) -> Tensor:
    """Ours, by the dispatcher."""
    out, _ = torch.ops.compiled_attn.paged_attention(
        step.query, step.key_cache, step.value_cache, step.block_table, step.seq_lens,
        step.query_start_loc, step.sizes.dim**-0.5, key_scale=step.key_scale,
        value_scale=step.value_scale,
    )  # fmt: skip
    return out


def _mask(step: Step) -> dict[str, Any]:
    """Options of SDPA for its rows at the end of its keys, without a mask in memory."""
    if step.queries == 1:
        return {}
    if step.queries == step.length:
        return {"is_causal": True}
    return {"attn_mask": causal_lower_right(step.queries, step.length)}


def contiguous_sdpa(like: Step, backend: SDPBackend | None = None) -> Kernel:
    """SDPA on keys and values that lie in a row for each request: no paging at all.

    ``backend``: the only one to use; None: torch chooses.
    """
    if backend and like.query.device.type != "cuda":
        raise NotImplementedError(f"{backend.name} is for CUDA")
    if backend is SDPBackend.CUDNN_ATTENTION and 1 < like.queries < like.length:
        raise NotImplementedError("cuDNN in torch has no causal rows at the end of the keys")
    sizes, requests = like.sizes, like.requests
    shape = requests, sizes.kv_heads, like.length, sizes.dim
    example = like.query[:1, :1].expand(shape)
    caches = cycle([(torch.randn_like(example), torch.randn_like(example)) for _ in range(_SETS)])

    def run(step: Step) -> Tensor:
        query = step.query.view(requests, step.queries, sizes.heads, sizes.dim).transpose(1, 2)
        key, value = next(caches)
        with sdpa_kernel(backend) if backend else nullcontext():
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **_mask(step))
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
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **_mask(step))
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


def provided(like: Step, name: str) -> Kernel:
    """Triton's kernel with its default plan ("triton"), or a provider's, next to new tokens."""
    device = like.query.device
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET") == "1":
        raise NotImplementedError(f"Triton is for CUDA, not for {device.type}")
    from compiled_attn.ops.triton.arguments import problem_of
    from compiled_attn.ops.triton.autotune import new_tokens
    from compiled_attn.ops.triton.launch import attend
    from compiled_attn.ops.triton.plans import chip_of
    from compiled_attn.ops.triton.tiles import plan

    calls: dict[int, PagedCall] = {}

    def call_of(step: Step) -> PagedCall:
        if id(step) not in calls:
            call = PagedCall.of(
                step.query, step.key_cache, step.value_cache, step.block_table, step.seq_lens,
                step.query_start_loc, step.sizes.dim**-0.5, key_scale=step.key_scale,
                value_scale=step.value_scale,
            )  # fmt: skip
            calls[id(step)] = call._replace(new=new_tokens(call))
        return calls[id(step)]

    call = call_of(like)
    if name in PROVIDERS and (reason := PROVIDERS[name].why_not(call)):
        raise NotImplementedError(f"it {reason}")
    chosen = plan(problem_of(call), chip_of(device))._replace(kernel=name)
    return lambda step: attend(call_of(step), chosen)[0]


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
    "flex": flex,
    "sdpa": contiguous_sdpa,
    "sdpa cudnn": partial(contiguous_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": partial(contiguous_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "gather": lambda _: gathered_sdpa,
    **{name: partial(provided, name=name) for name in ("triton", *PROVIDERS)},
}
"""Makers of kernels by name; one raises where its kernel is not available."""
