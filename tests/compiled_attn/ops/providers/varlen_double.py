"""A fake `torch.nn.attention.varlen.varlen_attn` for machines without a device, in dense attention.

Like FlashAttention it does not write rows of no sequence, returns +inf as the lse of rows without
keys, and has heads first in the lse.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops.providers import varlen


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    assert seqused_k is not None and block_table is not None and cu_seq_k is None
    assert (
        query.dtype in (torch.float16, torch.bfloat16) and key.dtype == value.dtype == query.dtype
    )
    for ints in (cu_seq_q, seqused_k, block_table):
        assert ints.dtype == torch.int32 and ints.stride(-1) == 1
    assert key.shape == value.shape and key.stride(-1) == value.stride(-1) == 1
    _, heads, dim = query.shape
    assert dim % 8 == 0 and dim <= 256 and key.shape[3] == dim
    if not enable_gqa and heads != key.shape[2]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert int(cu_seq_q.diff().max()) <= max_q and int(seqused_k.max()) <= max_k
    out = torch.full_like(query, torch.nan)
    lse = torch.full((heads, len(query)), torch.nan)
    for sequence, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seq_q[sequence : sequence + 2].tolist()
        seen = torch.arange(used)
        pages = block_table[sequence, seen // key.shape[1]].long(), seen % key.shape[1]
        own_key, own_value = (
            cache[pages].double().repeat_interleave(heads // key.shape[2], 1)
            for cache in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), own_key)
        scores *= dim**-0.5 if scale is None else scale
        at = used - (end - begin) + torch.arange(end - begin)[:, None]
        left, right = window_size
        if left >= 0:
            scores.masked_fill_(seen < at - left, -math.inf)
        if right >= 0:
            scores.masked_fill_(seen > at + right, -math.inf)
        total = scores.logsumexp(-1)
        weights = (scores - torch.where(total.isinf(), 0.0, total)[..., None]).exp()
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, own_value).to(query.dtype)
        lse[:, begin:end] = torch.where(total.isneginf(), math.inf, total).float()
    return (out, lse) if return_aux is not None and return_aux.lse else out


def install(monkeypatch: Any, function: Any = varlen_attn, active: str | None = "FA3") -> None:
    """Lets torch have a function, and an implementation of flash attention."""
    module = SimpleNamespace(varlen_attn=function, current_flash_attention_impl=lambda: active)
    module.AuxRequest = lambda lse: SimpleNamespace(lse=lse)
    monkeypatch.setattr(varlen, "import_module", lambda name: module)
