"""Random rows, and dense float64 attention under a bias, for tests of partial attention."""

from __future__ import annotations

import torch


def random_qkv(
    tokens: int,
    keys: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int | None = None,
) -> list[torch.Tensor]:
    shapes = ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim or dim))
    return [torch.randn(*shape) for shape in shapes]


def dense_under(q, k, v, bias, scale=1.0, softcap=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    return torch.einsum("htn,nhd->thd", weights, v), torch.logsumexp(scores, -1).T
